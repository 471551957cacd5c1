/* window: exact sums (array/window.h) for fanin.dist, which sends them between ranks.
 *
 * A Python object has one window; a thread enters it for each call. In this order: the object;
 * additions; messages between ranks; the rounded sum. */
#include "array/exact.h"
#include "array/window.h"
#include "base/mem.h"
#include "py/base/args.h"
#include "py/arrays/arrays.h"

#define WINDOW "fanin.window"

/* A thread that works on a window without the GIL sets `busy`; the calls of others then fail. */
typedef struct window {
    fan_window *sum;
    atomic_flag busy;
} window;

static void window_free(PyObject *capsule)
{
    window *self = PyCapsule_GetPointer(capsule, WINDOW);
    fan_window_free(self->sum);
    fan_free(self);
}

/* window_enter: returns the window, to be left; NULL with an exception. */
static window *window_enter(PyObject *capsule)
{
    window *self = PyCapsule_GetPointer(capsule, WINDOW);
    if (self && atomic_flag_test_and_set(&self->busy)) {
        PyErr_SetString(PyExc_RuntimeError, "window: another thread uses it");
        return NULL;
    }
    return self;
}

static void window_leave(window *self)
{
    atomic_flag_clear(&self->busy);
}

/* window_threads_begin: lets other Python threads run if the window is large. window_threads_end
 * accepts NULL. */
static PyThreadState *window_threads_begin(const window *self)
{
    if (fan_window_size(self->sum) * (int64_t)sizeof(int64_t) < FAN_BUSY_BYTES)
        return NULL;
    return PyEval_SaveThread();
}

static void window_threads_end(PyThreadState *left)
{
    if (left)
        PyEval_RestoreThread(left);
}

/* window_wrap: an object that has the sum, which it takes also if it fails. */
static PyObject *window_wrap(fan_window *sum)
{
    window *self = fan_calloc(sizeof *self);
    if (!self || !sum) {
        fan_window_free(sum);
        fan_free(self);
        return PyErr_NoMemory();
    }
    self->sum = sum;
    PyObject *capsule = PyCapsule_New(self, WINDOW, window_free);
    if (!capsule) {
        fan_window_free(sum);
        fan_free(self);
    }
    return capsule;
}

static PyObject *window_new(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_dtype dtype;
    int64_t size;
    if (fan_dtype_parse(a[0], &dtype) < 0)
        return NULL;
    if (fan_index(a[1], "window_new: size", PyExc_ValueError, &size) < 0)
        return NULL;
    if (dtype == FAN_DT_NONE || !fan_exact_fits(dtype)) {
        return PyErr_Format(PyExc_ValueError,
                            "window_new: expected a real or complex float dtype, got %R", a[0]);
    }
    if (size < 0 || size > INT64_MAX / 1024) {
        return PyErr_Format(PyExc_ValueError,
                            "window_new: %S elements are more than memory can hold", a[1]);
    }
    return window_wrap(fan_window_new(dtype, size));
}

/* window_wide: the same sum in float64 or complex128. */
static PyObject *window_wide(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    window *self = window_enter(capsule);
    if (!self)
        return NULL;
    fan_dtype wide = FAN_DT_FLOAT64;
    if (fan_dtype_kind(fan_window_dtype(self->sum)) == 'c')
        wide = FAN_DT_COMPLEX128;
    fan_window *made = fan_window_copy(self->sum, wide);
    window_leave(self);
    return window_wrap(made);
}

/* window_check_array: 0 if the array is dense memory on the host that fits the window, or -1 with
 * an exception. */
static int window_check_array(const window *self, const fan_value *v, const char *call, PyObject *o)
{
    int64_t size = fan_window_size(self->sum);
    if (v->form != FAN_FORM_DENSE || v->device != fan_cpu()) {
        return fan_refuse(PyExc_TypeError, "%s: expected a dense array on the CPU, got %s", call,
                          FAN_TYPE_TEXT(o));
    }
    if (v->array->size != size) {
        return fan_refuse(PyExc_ValueError, "%s: expected an array of %lld elements, got %lld",
                          call, (long long)size, (long long)v->array->size);
    }
    return 0;
}

/* window_check_term: 0 if the window can add the array, or -1 with an exception; `first`: the array
 * before it. */
static int window_check_term(const window *self, const fan_value *v, const fan_array *first,
                             PyObject *o)
{
    fan_dtype dtype = fan_window_dtype(self->sum);
    if (window_check_array(self, v, "window_add", o) < 0)
        return -1;
    if (!fan_dtype_can_cast(v->dtype, dtype)) {
        return fan_refuse(PyExc_ValueError, "window_add: a window of %s cannot add an array of %s",
                          fan_dtype_name(dtype), fan_dtype_name(v->dtype));
    }
    if (!fan_array_same_shape(v->array, first))
        return fan_refuse(PyExc_ValueError, "window_add: expected arrays of one shape");
    return 0;
}

static PyObject *window_add(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *arrays = a[1];
    PyObject *result = NULL;
    size_t n = (size_t)PyTuple_GET_SIZE(arrays);
    size_t read = 0;
    window *self = window_enter(a[0]);
    if (!self)
        return NULL;
    fan_value *values = fan_calloc((n + 1) * sizeof *values);
    const fan_array **in = fan_alloc((n + 1) * sizeof *in);
    if (!values || !in) {
        PyErr_NoMemory();
        goto done;
    }
    while (read < n) {
        PyObject *o = PyTuple_GET_ITEM(arrays, read);
        fan_value *v = &values[read];
        if (fan_import(o, false, false, v) < 0)
            goto done;
        in[read] = v->array;
        read++;
        if (window_check_term(self, v, in[0], o) < 0)
            goto done;
    }
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    PyThreadState *left = window_threads_begin(self);
    fan_status status = fan_window_add(self->sum, in, n, &err);
    window_threads_end(left);
    result = fan_done(status, &err);
done:
    for (size_t i = 0; i < read; i++)
        fan_value_release(&values[i]);
    fan_free(values);
    fan_free(in);
    window_leave(self);
    return result;
}

static PyObject *window_room(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    window *self = window_enter(capsule);
    if (!self)
        return NULL;
    size_t room = fan_window_room(self->sum);
    window_leave(self);
    return PyLong_FromSize_t(room);
}

static PyObject *message_new(PyObject *Py_UNUSED(module), PyObject *size)
{
    fan_array *a = NULL;
    int64_t n;
    if (fan_index(size, "message_new: size", PyExc_ValueError, &n) < 0)
        return NULL;
    /* A message is no memory of a graph tree, which refuses sums into it. */
    if (fan_storage_redirected()) {
        npy_intp dim = (npy_intp)n;
        return PyArray_SimpleNew(1, &dim, NPY_UINT8);
    }
    if (FAN_CHECK(fan_array_new(FAN_DT_UINT8, 1, &n, NULL, &a, &err)) < 0)
        return NULL;
    PyObject *made = fan_export_array(a);
    fan_array_drop(a);
    return made;
}

/* window_check_message: 0 for an array of uint8 without gaps, or -1 with an exception. */
static int window_check_message(PyObject *o, const char *call)
{
    PyArrayObject *a = (PyArrayObject *)o;
    bool is_flat = PyArray_NDIM(a) == 1 && PyArray_IS_C_CONTIGUOUS(a);
    if (is_flat && PyArray_TYPE(a) == NPY_UBYTE)
        return 0;
    return fan_refuse(PyExc_TypeError, "%s: expected a contiguous array of uint8 with one axis",
                      call);
}

static PyObject *window_pack(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyArrayObject *message = (PyArrayObject *)a[1];
    PyObject *result = NULL;
    window *self = window_enter(a[0]);
    if (!self)
        return NULL;
    if (window_check_message(a[1], "window_pack") < 0)
        goto done;
    size_t room = fan_window_room(self->sum);
    if (!PyArray_ISWRITEABLE(message) || (size_t)PyArray_SIZE(message) < room) {
        fan_refuse(PyExc_BufferError, "window_pack: expected %zu writable bytes, got %zd", room,
                   PyArray_SIZE(message));
        goto done;
    }
    PyThreadState *left = window_threads_begin(self);
    size_t bytes = fan_window_pack(self->sum, PyArray_DATA(message));
    window_threads_end(left);
    result = PyLong_FromSize_t(bytes);
done:
    window_leave(self);
    return result;
}

static PyObject *window_merge_packed(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyArrayObject *message = (PyArrayObject *)a[1];
    PyObject *result = NULL;
    window *self = window_enter(a[0]);
    if (!self)
        return NULL;
    if (window_check_message(a[1], "window_merge_packed") == 0) {
        size_t used = 0;
        FAN_UNINITIALIZED fan_error err;
        fan_error_clear(&err);
        PyThreadState *left = window_threads_begin(self);
        fan_status status = fan_window_merge_packed(self->sum, PyArray_DATA(message),
                                                    (size_t)PyArray_SIZE(message), &used, &err);
        window_threads_end(left);
        if (status == FAN_OK)
            result = PyLong_FromSize_t(used);
        else
            fan_raise(status, &err);
    }
    window_leave(self);
    return result;
}

/* window_check_round: 0 if the sum can be written to `out` with this scale, or -1 with an
 * exception. */
static int window_check_round(const window *self, const fan_value *out, const fan_take *options,
                              PyObject *o)
{
    fan_dtype dtype = fan_window_dtype(self->sum);
    char kind = fan_dtype_kind(dtype);
    if (window_check_array(self, out, "window_round", o) < 0)
        return -1;
    if (kind != fan_dtype_kind(out->dtype)) {
        return fan_refuse(PyExc_ValueError,
                          "window_round: a sum of %s cannot be written to an array of %s",
                          fan_dtype_name(dtype), fan_dtype_name(out->dtype));
    }
    bool complex_scale = options->scale.on && !options->real;
    if (complex_scale && kind != 'c') {
        return fan_refuse(PyExc_ValueError,
                          "window_round: a sum of %s needs a real number as scale",
                          fan_dtype_name(dtype));
    }
    return 0;
}

static PyObject *window_round(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_value out;
    fan_take options = {0};
    PyObject *result = NULL;
    window *self = window_enter(a[0]);
    if (!self)
        return NULL;
    if (fan_scale_arg(a[2], &options) < 0 || fan_import_out(a[1], &out) < 0)
        goto done;
    if (window_check_round(self, &out, &options, a[1]) == 0) {
        PyThreadState *left = window_threads_begin(self);
        fan_window_round(out.array, self->sum, options.scale.on ? &options.scale : NULL);
        window_threads_end(left);
        result = Py_NewRef(Py_None);
    }
    fan_value_release(&out);
done:
    window_leave(self);
    return result;
}

/* ---- a sum of a few arrays, without a window ---- */

/* exact_fits: whether the value can be a term of an exact sum in `out`, or `out` itself. */
static bool exact_fits(const fan_value *v, const fan_value *out)
{
    if (v->form != FAN_FORM_DENSE)
        return false;
    if (v->device != fan_cpu())
        return false;
    if (v->dtype != out->dtype)
        return false;
    return fan_exact_fits(v->dtype) && fan_array_same_shape(v->array, out->array);
}

/* exact_terms: reads the terms; returns how many fit, of which the caller releases the values. */
static size_t exact_terms(PyObject *arrays, const fan_value *out, fan_value *values,
                          fan_operand *in)
{
    size_t n = (size_t)PyList_GET_SIZE(arrays);
    for (size_t k = 0; k < n; k++) {
        if (fan_import(PyList_GET_ITEM(arrays, k), false, false, &values[k]) < 0)
            return k;
        in[k].array = values[k].array;
        if (!exact_fits(&values[k], out)) {
            fan_value_release(&values[k]);
            return k;
        }
    }
    return n;
}

static PyObject *exact_into(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_value out;
    fan_take options = {0};
    if (fan_storage_redirected()) /* a graph tree records: add_n handles that */
        Py_RETURN_FALSE;
    if (fan_scale_arg(a[2], &options) < 0)
        return NULL;
    if (fan_import_out(a[1], &out) < 0)
        return NULL;
    size_t n = (size_t)PyList_GET_SIZE(a[0]);
    fan_value *values = fan_calloc((n + 1) * sizeof *values);
    fan_operand *in = fan_calloc((n + 1) * sizeof *in);
    size_t read = 0;
    bool fits = values && in && n > 0;
    if (fits) {
        read = exact_terms(a[0], &out, values, in);
        fits = read == n && exact_fits(&out, &out) && !PyErr_Occurred();
    }
    if (fits)
        fan_exact_fold(out.array, in, n, out.dtype, options.scale.on ? &options.scale : NULL);
    for (size_t k = 0; k < read; k++)
        fan_value_release(&values[k]);
    fan_value_release(&out);
    fan_free(values);
    fan_free(in);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(fits);
}

#include "py/declared/window.h"
