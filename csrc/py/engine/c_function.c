/* c_function: the functions of nodes in C.
 *
 * Values for the C API; a call with a node's sums; the Python type CFunction. */
#include "py/engine/c_function.h"

#include "base/mem.h"
#include "device/cpu/recording.h"
#include "py/arrays/arrays.h"
#include "py/base/api_failure.h"

#include <string.h>

#define VALUES_ON_STACK (2 * FAN_SUMS_ON_STACK)

static function_object *function_cast(PyObject *o)
{
    return (function_object *)o;
}

/* ---- values ---- */

/* text_of: the name of a node; NULL: none. */
static fan_node_label text_of(const fan_node *n)
{
    if (n)
        return fan_node_name(n);
    return (fan_node_label){"a function in C"};
}

int fan_c_import(PyObject *o, const fan_node *n, fanin_value *out)
{
    fan_dtype dtype = FAN_DT_NONE;
    fan_array *a = NULL;
    fan_value v;
    int bad = 0;
    fan_c_show(NULL, out);
    if (PyArray_CheckExact(o))
        dtype = fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o));
    if (dtype != FAN_DT_NONE) {
        if (fan_view_ndarray((PyArrayObject *)o, dtype, true, &a) < 0)
            return -1;
        fan_c_show(a, out);
        return 0;
    }
    if (fan_is_no_gradient(o))
        return 0;
    if (fan_import(o, false, true, &v) < 0)
        return -1;
    bool has_streams = v.device && v.device->backend->has_streams;
    if (v.form == FAN_FORM_DENSE && !has_streams)
        fan_c_show(fan_array_hold(v.array), out);
    else {
        bad = fan_set_error(PyExc_TypeError, "%s takes arrays on the CPU, got %s", text_of(n).text,
                            FAN_TYPE_TEXT(o));
    }
    fan_value_release(&v);
    return bad;
}

/* ---- call ---- */

/* raise_failure: the function's error as an exception; -1. */
__attribute__((noinline, cold)) static int raise_failure(const fan_node *n, fanin_status status,
                                                         const fanin_error *err)
{
    const fan_status core = fan_api_core_status(status);
    FAN_UNINITIALIZED fan_error failed;
    const char *text = "its function failed without a message";
    if (status == FANIN_ERR_PYTHON && PyErr_Occurred())
        return -1;
    if (err->text[0])
        text = err->text;
    else if (status == FANIN_ERR_NOMEM)
        return fan_no_memory();
    if (core == FAN_ERR_EXTERN) {
        return fan_set_error(PyExc_SystemError, "%s: its function returned %d without an exception",
                             text_of(n).text, (int)status);
    }
    (void)fan_fail(&failed, core, "%s: %.500s", text_of(n).text, text);
    return fan_check(core, &failed);
}

/* call_function: 0, or -1 with an exception. */
static int call_function(const function_object *f, const fan_node *n, const fanin_value *sums,
                         fanin_value *out)
{
    FAN_UNINITIALIZED fanin_error err;
    /* a recording cannot contain its work */
    if (fan_storage_redirected() && fan_recording_here()) {
        return fan_set_error(
            fan_state_get()->capture_error,
            "%s: a node's function in C cannot be recorded: a replay would not run it again",
            text_of(n).text);
    }
    void *left = NULL;
    if (f->flags & FANIN_LONG)
        left = fan_allow_threads_begin();
    err.text[0] = '\0';
    fanin_status status = f->call(f->ctx, sums, f->inputs, out, f->gradients, &err);
    if (left)
        fan_allow_threads_end(left);
    err.text[sizeof err.text - 1] = '\0';
    if (status == FANIN_OK) {
        if (!PyErr_Occurred())
            return 0;
        status = FANIN_ERR_PYTHON;
    }
    return raise_failure(n, status, &err);
}

static inline bool is_object(const void *sum)
{
    return sum && !fan_is_unboxed(sum);
}

/* array_of: of an unboxed sum, or of none, which is NULL. */
static inline fan_array *array_of(void *sum)
{
    if (!sum)
        return NULL;
    return fan_unboxed_array(sum);
}

/* call_with: converts the sums; Python objects get holds of their own. */
static int call_with(const function_object *f, const fan_node *n, void **sums, fanin_value *values)
{
    int bad = 0;
    uint32_t imported = 0;
    for (uint32_t k = 0; k < f->inputs && !bad; k++) {
        if (is_object(sums[k])) {
            bad = fan_c_import(sums[k], n, &values[k]);
            if (!bad)
                imported = k + 1;
        } else {
            fan_c_show(array_of(sums[k]), &values[k]);
        }
    }
    if (!bad)
        bad = call_function(f, n, values, values + f->inputs);
    while (imported-- > 0) {
        if (is_object(sums[imported]))
            fan_array_drop(fan_c_array(&values[imported]));
    }
    return bad;
}

int fan_function_run(const function_object *f, const fan_node *n, void **sums, void **gradients,
                     uint32_t ngradients)
{
    FAN_UNINITIALIZED fanin_value on_stack[VALUES_ON_STACK];
    fanin_value *values = on_stack;
    size_t all = (size_t)f->inputs + ngradients;
    if (n && ngradients != f->gradients) {
        return fan_set_error(PyExc_ValueError,
                             "%s returned an invalid number of gradients: expected %u, got %u",
                             fan_node_name(n).text, ngradients, f->gradients);
    }
    if (all > VALUES_ON_STACK) {
        values = fan_alloc(all * sizeof *values);
        if (!values)
            return fan_no_memory();
    }
    fanin_value *out = values + f->inputs;
    for (uint32_t i = 0; i < ngradients; i++)
        fan_c_show(NULL, &out[i]);
    int bad = call_with(f, n, sums, values);
    for (uint32_t i = 0; i < ngradients; i++)
        gradients[i] = fan_unboxed(fan_c_array(&out[i]));
    if (values != on_stack)
        fan_free(values);
    return bad;
}

/* ---- CFunction ---- */

/* run: calls it with sums, and returns the gradients as a Python function does: a single one, or a
 * tuple. `gradients` are all NULL before. */
static PyObject *run(const function_object *f, void **sums, void **gradients)
{
    uint32_t n = f->gradients;
    PyObject *all = NULL;
    bool bad = fan_function_run(f, NULL, sums, gradients, n) < 0 || fan_box_all(gradients, n) < 0;
    if (!bad && n == 1)
        return fan_take_or_none(gradients[0]);
    if (!bad)
        all = PyTuple_New(n);
    for (uint32_t i = 0; i < n; i++) {
        if (all)
            PyTuple_SET_ITEM(all, i, fan_take_or_none(gradients[i]));
        else if (gradients[i])
            fan_object_drop(gradients[i]);
    }
    return all;
}

static PyObject *function_call(PyObject *o, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const function_object *f = function_cast(o);
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if ((kwnames && PyTuple_GET_SIZE(kwnames)) || n != (Py_ssize_t)f->inputs) {
        return PyErr_Format(PyExc_TypeError, "a function in C takes %u sums by position, got %zd",
                            f->inputs, n);
    }
    void **sums = fan_calloc(((size_t)f->inputs + f->gradients) * sizeof *sums);
    if (!sums)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++)
        sums[i] = fan_given(args[i]);
    PyObject *made = run(f, sums, sums + f->inputs);
    fan_free(sums);
    return made;
}

PyObject *fan_function_new(const fanin_function *given)
{
    size_t size = 0;
    fanin_function f;
    if (given)
        size = given->struct_size;
    if (size != sizeof f) {
        return PyErr_Format(
            PyExc_ValueError,
            "function_new: struct_size: expected sizeof(fanin_function), %zu, got %zu", sizeof f,
            size);
    }
    f = *given;
    if (f.reserved) {
        return PyErr_Format(PyExc_ValueError, "function_new: reserved: expected 0, got %u",
                            f.reserved);
    }
    bool counts = f.inputs > 0 && f.inputs <= INT32_MAX && f.gradients <= INT32_MAX;
    bool known_flags = !(f.flags & ~FANIN_LONG);
    if (!f.call || !counts || !known_flags) {
        return PyErr_Format(
            PyExc_ValueError,
            "function_new: expected a function of 1 input at least and known flags, got %s, %u "
            "inputs, %u gradients, flags %u",
            f.call ? "one" : "NULL", f.inputs, f.gradients, f.flags);
    }
    function_object *self = PyObject_New(function_object, fan_state_get()->function_type);
    if (!self)
        return NULL;
    self->vectorcall = function_call;
    self->call = f.call;
    self->ctx = f.ctx;
    self->release = f.release;
    self->inputs = f.inputs;
    self->gradients = f.gradients;
    self->flags = f.flags;
    return (PyObject *)self;
}

static void function_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject *live = fan_exception_take();
    if (function_cast(o)->release)
        function_cast(o)->release(function_cast(o)->ctx);
    if (PyErr_Occurred())
        PyErr_WriteUnraisable(NULL);
    fan_exception_put(live);
    PyObject_Free(o);
    Py_DECREF(type);
}

static PyObject *function_repr(PyObject *o)
{
    return PyUnicode_FromFormat("<function in C of %u sums, which returns %u gradients>",
                                function_cast(o)->inputs, function_cast(o)->gradients);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(function_object, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The function of a node in C, made by `fanin_api.function_new` (docs/c-api.md)."},
    {Py_tp_dealloc, function_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_repr, function_repr},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec fan_function_spec = {
    .name = "fanin._core.CFunction",
    .basicsize = sizeof(function_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = slots,
};
