/* frontend: the table of functions by which the core holds, compares and sums Python objects and
 * lets other threads run (buffer/value.h).
 *
 * In this order: other references to an object; combine= and operators; the warning of
 * mismatched streams; plain contributions (buffer/plain.h), whose functions are called inside the
 * interpreter only; the tables. */
#include "py/arrays/dlpack.h"
#include "py/arrays/arrays.h"
#include "py/arrays/objects.h"

#include <stdio.h>

/* has_no_weakref: whether no weak reference leads to an object, whose type has a list of them. */
static bool has_no_weakref(PyObject *o)
{
    Py_ssize_t at = Py_TYPE(o)->tp_weaklistoffset;
    const void *first = (char *)o + at;
    return at > 0 && *(PyObject *const *)first == NULL;
}

bool fan_only_ours(PyObject *o, Py_ssize_t refs)
{
#ifdef Py_GIL_DISABLED
    return false; /* reference counts do not show owners here */
#endif
    if (fan_is_unboxed(o))
        return fan_unboxed_is_unique(o);
    if (Py_REFCNT(o) != refs || !PyArray_CheckExact(o))
        return false;
    PyArrayObject *a = (PyArrayObject *)o;
    if (!PyArray_CHKFLAGS(a, NPY_ARRAY_OWNDATA | NPY_ARRAY_WRITEABLE))
        return false;
    if (PyArray_BASE(a))
        return false;
    return has_no_weakref(o);
}

/* owns_memory: whether an ndarray owns its memory, or has the only reference to the ndarray that
 * does. */
static bool owns_memory(const PyArrayObject *a)
{
    PyObject *base = PyArray_BASE(a);
    if (base) {
        if (!PyArray_CheckExact(base) || Py_REFCNT(base) != 1)
            return false;
        a = (PyArrayObject *)base;
    }
    return PyArray_CHKFLAGS(a, NPY_ARRAY_OWNDATA) && !PyArray_BASE(a);
}

bool fan_alone(PyObject *o, Py_ssize_t refs)
{
#ifdef Py_GIL_DISABLED
    return false;
#endif
    if (fan_is_unboxed(o))
        return fan_unboxed_is_unique(o);
    if (Py_REFCNT(o) != refs)
        return false;
    return !PyArray_CheckExact(o) || owns_memory((PyArrayObject *)o);
}

/* value_is_alone: fan_alone of an object, or of the object of a value. References that a library
 * keeps outside of the Python object do not count. */
static bool value_is_alone(void *object, const fan_value *v)
{
    if (!fan_gil_held())
        return false;
    Py_ssize_t refs = 1;
    if (v && !fan_is_unboxed(object) && PyArray_CheckExact((PyObject *)object))
        refs = 2; /* the value's, and that of the storage over it (import.c) */
    return fan_alone(object, refs);
}

/* value_is_only_ours: fan_only_ours of the object of a value, which has two references: the
 * value's, and that of the storage over it (import.c). */
static bool value_is_only_ours(void *object)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return false;
    bool only_ours = fan_only_ours(object, 2);
    fan_gil_leave(&gil);
    return only_ours;
}

/* export_term: a term for Python: its object, or, for a sum of the core's, an array of its origin's
 * kind over the same memory. */
static PyObject *export_term(const fan_value *v)
{
    if (v->object)
        return Py_NewRef((PyObject *)v->object);
    fan_value copy;
    if (FAN_CHECK(fan_value_copy(&fan_python, v, &copy, &err)) < 0)
        return NULL;
    return fan_export(&copy);
}

/* combine_result: the sum that _interop.arrays.combine made, or its refusal (Conformed and Refused
 * in _interop/records.py). */
static fan_status combine_result(PyObject *record, fan_value *out, fan_error *err)
{
    PyObject *first = PyTuple_GET_ITEM(record, 0);
    fan_status refused = FAN_ERR_TYPE;
    if (PyTuple_GET_SIZE(record) == 1) {
        if (fan_import_object(first, out) < 0)
            return fan_from_python(err);
        return FAN_OK;
    }
    const char *text = PyUnicode_AsUTF8(PyTuple_GET_ITEM(record, 1));
    if (!text)
        return fan_from_python(err);
    if (first == PyExc_ValueError)
        refused = FAN_ERR_VALUE;
    return fan_fail(err, refused, "%s", text);
}

/* weight_number: the weight as it was given; new reference. */
static PyObject *weight_number(const fan_weight *weight)
{
    if (weight->integer)
        return PyLong_FromDouble(weight->re);
    if (weight->im != 0)
        return PyComplex_FromDoubles(weight->re, weight->im);
    return PyFloat_FromDouble(weight->re);
}

static fan_status multiply(const fan_value *v, const fan_weight *weight, bool divide,
                           fan_value *out, fan_error *err)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return fan_fail(err, FAN_ERR_STATE, "the interpreter is being shut down");
    PyObject *record = NULL;
    PyObject *by = NULL;
    PyObject *term = export_term(v);
    if (term)
        by = weight_number(weight);
    if (by)
        record = fan_arrays_call("weigh", "(OON)", term, by, fan_py_bool(divide));
    fan_status status;
    if (record)
        status = combine_result(record, out, err);
    else
        status = fan_from_python(err);
    Py_XDECREF(record);
    Py_XDECREF(by);
    Py_XDECREF(term);
    fan_gil_leave(&gil);
    return status;
}

static fan_status combine(void *function, const fan_value *old, const fan_value *new_,
                          fan_value *out, fan_error *err)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return fan_fail(err, FAN_ERR_STATE, "the interpreter is being shut down");
    PyObject *sum = NULL;
    PyObject *b = NULL;
    PyObject *a = export_term(old);
    if (a)
        b = export_term(new_);
    if (b)
        sum = fan_arrays_call("combine", "(OOO)", fan_or_none((PyObject *)function), a, b);
    fan_status status;
    if (sum)
        status = combine_result(sum, out, err);
    else
        status = fan_from_python(err);
    Py_XDECREF(sum);
    Py_XDECREF(a);
    Py_XDECREF(b);
    fan_gil_leave(&gil);
    return status;
}

static void clear_error(void)
{
    PyErr_Clear();
}

/* mismatch: warns. The add succeeds in any case: sys.unraisablehook gets a warning that is an
 * error. */
static fan_status mismatch(const char *buffer, size_t slot, const fan_stream *producer,
                           const fan_stream *consumer, fan_error *Py_UNUSED(err))
{
    const fan_state *st = fan_state_get();
    fan_gil gil;
    if (!st || !fan_gil_enter(&gil))
        return FAN_OK;
    char one[32];
    char two[32];
    PyObject *live = fan_exception_take();
    if (PyErr_WarnFormat(st->mismatch_warning, 1,
                         "%s: slot %zu: the gradient was made on stream %llu of %s, and the leaf "
                         "that accumulates it is "
                         "on stream %llu of %s: each "
                         "pass waits there. Use one stream, or switch the warning off: "
                         "fanin.set_options(warn_stream_mismatch=False) (S6)",
                         buffer, slot, (unsigned long long)producer->handle,
                         fan_device_text(producer->device, one, sizeof one),
                         (unsigned long long)consumer->handle,
                         fan_device_text(consumer->device, two, sizeof two)) < 0) {
        PyObject *warning = fan_exception_take();
        PyObject *where = PyUnicode_FromFormat("%s.add", buffer);
        fan_exception_put(warning);
        PyErr_WriteUnraisable(where);
        Py_XDECREF(where);
    }
    fan_exception_put(live);
    fan_gil_leave(&gil);
    return FAN_OK;
}

/* ---- plain contributions: always inside the interpreter ---- */

static fan_status plain_value(void *object, char *data, const fan_plain_kind *kind, fan_value *out,
                              bool *kept, fan_error *err)
{
    *kept = false;
    if (fan_is_unboxed(object)) {
        *out = fan_unboxed_value(object);
        return FAN_OK;
    }
    if (!fan_plain_is_unchanged(object, kind, data))
        return fan_fail(err, FAN_ERR_STATE, "a gradient was changed after it was added");
    Py_ssize_t refs = Py_REFCNT((PyObject *)object);
    if (fan_import(object, false, false, out) < 0)
        return fan_from_python(err);
    *kept = kind->check_at_use && Py_REFCNT((PyObject *)object) > refs + 1; /* one is the value's */
    return FAN_OK;
}

static bool plain_drop_if_shared(void *object)
{
    if (fan_is_unboxed(object))
        return fan_unboxed_drop_if_shared(object);
    if (Py_REFCNT((PyObject *)object) == 1)
        return false;
    Py_DECREF((PyObject *)object);
    return true;
}

static bool plain_is_unique(void *object)
{
    if (fan_is_unboxed(object))
        return fan_unboxed_is_unique(object);
    return Py_REFCNT((PyObject *)object) == 1 && has_no_weakref(object);
}

static bool plain_is_only_ours(void *object)
{
    return fan_only_ours(object, 1);
}

/* plain_wrote: torch is the one library that counts writes to plain arrays. */
static bool plain_wrote(void *object)
{
    const fan_state *st = fan_state_get();
    if (!fan_is_tensor(object))
        return true;
    PyObject *wrote = PyObject_CallMethodOneArg(st->torch_graph, st->str_increment_version, object);
    Py_XDECREF(wrote);
    return wrote != NULL;
}

static const fan_plain_frontend plain = {
    .hold = fan_object_hold_here,
    .drop_if_shared = plain_drop_if_shared,
    .is_unchanged = fan_plain_is_unchanged,
    .has_own_value = fan_plain_has_own_value,
    .is_detached = fan_plain_is_detached,
    .is_unique = plain_is_unique,
    .unshared = plain_is_only_ours,
    .writable = fan_plain_writable,
    .fresh = fan_plain_fresh,
    .copy = fan_plain_copy,
    .number = fan_plain_number,
    .wrote = plain_wrote,
};

const fan_frontend fan_python = {
    .hold = fan_object_hold,
    .drop = fan_object_drop,
    .unshared = value_is_only_ours,
    .alone = value_is_alone,
    .plain_value = plain_value,
    .is_unchanged = fan_value_is_unchanged,
    .clear_error = clear_error,
    .combine = combine,
    .multiply = multiply,
    .fresh = fan_fresh,
    .allow_threads_begin = fan_allow_threads_begin,
    .allow_threads_end = fan_allow_threads_end,
    .check_signals = fan_check_signals,
    .mismatch = mismatch,
#ifndef Py_GIL_DISABLED
    .plain = &plain, /* its counters need one thread at a time */
#endif
};
