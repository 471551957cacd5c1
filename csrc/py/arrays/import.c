/* import: the one way in: whatever a caller adds becomes a fan_value here.
 *
 *   None | ndarray | Python scalar | fanin's device array | a type with an exchange table | NumPy scalar | Zero |
 *   anything else, as fanin._interop.arrays.describe describes it
 */
#include "py/arrays/import_memory.h"
#include "py/arrays/library.h"

#include "base/mem.h"

#include <string.h>

static int import_object(PyObject *o, PyObject *parts, fan_value *out);

static int import_numpy_scalar(PyObject *o, bool has_combine, fan_value *out)
{
    PyObject *a = PyArray_FromScalar(o, NULL);
    int result = !a ? -1
                 : has_combine && fan_is_not_summed(a)
                     ? import_object(o, NULL, out)
                     : fan_import_ndarray((PyArrayObject *)a, o, FAN_FROM_NUMPY_SCALAR, false, out);
    Py_XDECREF(a);
    return result;
}

static int too_long(PyObject *o)
{
    PyObject *bits = PyObject_CallMethod(o, "bit_length", NULL);
    int result =
        bits ? fan_refuse(PyExc_OverflowError,
                          "an integer of %S bits does not fit int64; expected -2**63 .. 2**63 - 1, or a float", bits)
             : -1;
    Py_XDECREF(bits);
    return result;
}

/* import_python_scalar: 1 if `o` is one (D5), 0 if not, -1 with an exception. */
static int import_python_scalar(PyObject *o, fan_value *out)
{
    union {
        unsigned char b;
        int64_t i;
        double f;
        Py_complex c;
    } x;
    fan_dtype dtype;
    FAN_UNINITIALIZED fan_error err;
    int overflow = 0;
    memset(&x, 0, sizeof x);
    err.text[0] = '\0';
    if (PyFloat_CheckExact(o)) {
        dtype = FAN_DT_FLOAT64;
        x.f = PyFloat_AS_DOUBLE(o);
    } else if (PyLong_CheckExact(o)) {
        dtype = FAN_DT_INT64;
        x.i = PyLong_AsLongLongAndOverflow(o, &overflow);
        if (overflow)
            return too_long(o);
    } else if (PyBool_Check(o)) {
        dtype = FAN_DT_BOOL;
        x.b = o == Py_True;
    } else if (PyComplex_CheckExact(o)) {
        dtype = FAN_DT_COMPLEX128;
        x.c = PyComplex_AsCComplex(o);
    } else {
        return 0;
    }
    fan_status status = fan_array_new(dtype, 0, NULL, NULL, &out->array, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    memcpy(out->array->data, &x, fan_dtype_size(dtype));
    out->array->writable = false; /* the object must not differ from it */
    out->form = FAN_FORM_DENSE;
    out->dtype = dtype;
    out->weak = true;
    out->origin = FAN_FROM_PYTHON_SCALAR;
    out->rank = RANK_PYTHON_SCALAR;
    out->device = fan_cpu();
    out->object = Py_NewRef(o);
    return 1;
}

/* import_zero: a zero's array is one element, seen with the zero's shape. */
static int import_zero(PyObject *o, fan_value *out)
{
    const fan_state *st = fan_state_get();
    PyObject *shape = PyObject_GetAttr(o, st->str_shape), *dtype = shape ? PyObject_GetAttr(o, st->str_dtype) : NULL;
    int64_t dims[FAN_MAX_NDIM], strides[FAN_MAX_NDIM] = {0};
    fan_storage *element = NULL;
    fan_error err;
    fan_status status;
    int ndim, result = -1;
    err.text[0] = '\0';
    if (!dtype || fan_dtype_parse(dtype, &out->dtype) < 0 || (ndim = fan_shape_tuple(shape, dims)) < 0)
        goto done;
    element = fan_storage_new(16);
    if (!element) {
        PyErr_NoMemory();
        goto done;
    }
    memset(element->data, 0, 16);
    status = fan_array_view(element, element->data, out->dtype, ndim, dims, strides, false, &out->array, &err);
    if (status != FAN_OK) {
        fan_refuse_error(status, &err);
        goto done;
    }
    out->form = FAN_FORM_ZERO;
    out->origin = FAN_FROM_ZERO;
    out->object = Py_NewRef(o);
    result = 0;
done:
    fan_storage_drop(element);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return result;
}

/* ---- records of _interop.arrays ---- */

/* The records of _interop/records.py differ in the number of their fields. */
enum { OBJECT_FIELDS = 1, REFUSED_FIELDS = 2, DENSE_FIELDS = 3, STORED_FIELDS = 8 };

/* collect_parts: the memory that an object declares; each part is an array that we can read, dense or sparse. */
static int collect_parts(PyObject *parts, fan_value *out)
{
    PyObject *fast = Py_TYPE(parts)->tp_iter || PySequence_Check(parts) ? PySequence_Tuple(parts) : NULL;
    Py_ssize_t n = fast ? PyTuple_GET_SIZE(fast) : 0;
    int result = -1;
    if (!fast)
        return PyErr_Occurred()
                   ? -1
                   : fan_refuse(PyExc_TypeError, "__fanin_parts__() gave %s; expected the arrays that the object holds",
                                FAN_TYPE_TEXT(parts));
    if (n > 0) {
        out->parts = fan_alloc((size_t)n * 3 * sizeof(fan_array *));
        if (!out->parts) {
            PyErr_NoMemory();
            goto done;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(fast, i);
        fan_value v;
        int bad = fan_import(item, false, false, &v);
        size_t k = 0;
        if (!bad && v.form != FAN_FORM_DENSE && v.form != FAN_FORM_SPARSE)
            bad = fan_refuse(PyExc_TypeError, "__fanin_parts__() gave %s; expected the arrays that the object holds",
                             FAN_TYPE_TEXT(item));
        if (!bad) {
            k = fan_value_arrays(&v, out->parts + out->nparts, 3);
            for (size_t j = 0; j < k; j++)
                fan_array_hold(out->parts[out->nparts + j]);
            out->nparts += k;
            if (!out->device || !out->device->backend->has_streams)
                out->device = v.device;
        }
        fan_value_release(&v);
        if (bad)
            goto done;
    }
    result = 0;
done:
    Py_DECREF(fast);
    return result;
}

static int import_object(PyObject *o, PyObject *parts, fan_value *out)
{
    out->form = FAN_FORM_OBJECT;
    out->dtype = FAN_DT_NONE;
    out->origin = FAN_FROM_OBJECT;
    out->object = Py_NewRef(o);
    return parts && parts != Py_None ? collect_parts(parts, out) : 0;
}

/* import_described: what _interop.arrays makes of it. The records of _interop/records.py differ in the number of
 * their fields. */
static int import_described(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    PyObject *arrays = fan_arrays(), *d = NULL;
    int result = -1;
    fan_stream *ready = fan_error_context_stream();
    PyObject *on = ready ? fan_stream_wrap(ready) : Py_NewRef(Py_None);
    if (arrays && on)
        d = PyObject_CallMethod(arrays, "describe", "OOOO", o, recording ? Py_True : Py_False,
                                has_combine ? Py_True : Py_False, on);
    Py_XDECREF(on);
    if (!d)
        return -1;
    switch (PyTuple_Check(d) ? PyTuple_GET_SIZE(d) : 0) {
    case DENSE_FIELDS:
        result = has_combine && fan_is_not_summed(PyTuple_GET_ITEM(d, 2)) ? import_object(o, NULL, out)
                                                                          : fan_import_dense(d, out);
        break;
    case STORED_FIELDS:
        result = fan_import_sparse(d, out);
        break;
    case OBJECT_FIELDS:
        result = import_object(o, PyTuple_GET_ITEM(d, 0), out);
        break;
    case REFUSED_FIELDS:
        result = fan_refuse(PyTuple_GET_ITEM(d, 0), "%U", PyTuple_GET_ITEM(d, 1));
        break;
    default:
        PyErr_SetString(PyExc_SystemError, "_interop.arrays gave no record");
    }
    PyObject *live = fan_exception_take(); /* a capsule's destructor is another library's code */
    Py_DECREF(d);
    fan_exception_put(live);
    return result;
}

/* ---- in ---- */

static int import_any(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    fan_state *st = fan_state_get();
    fan_array *a;
    fan_device *device;
    int known;
    if (PyArray_CheckExact(o) && !recording) {
        if (PyArray_DESCR((PyArrayObject *)o)->type_num == NPY_OBJECT || (has_combine && fan_is_not_summed(o)))
            return import_object(o, NULL, out);
        if (fan_storage_redirected() && fan_ndarray_check_known(o, "a sum, copy or conversion") < 0)
            return -1;
        return fan_import_ndarray((PyArrayObject *)o, o, FAN_FROM_NDARRAY, true, out);
    }
    if (o == Py_None)
        return 0;
    if (!recording) {
        known = import_python_scalar(o, out);
        if (known != 0)
            return known < 0 ? -1 : 0;
        a = fan_array_arg(o, &device);
        if (a && fan_array_usable(a) < 0)
            return -1;
        if (a) {
            out->form = FAN_FORM_DENSE;
            out->dtype = a->dtype;
            out->origin = FAN_FROM_DEVICE_ARRAY;
            out->device = device;
            out->array = fan_array_hold(a);
            out->object = Py_NewRef(o);
            return 0;
        }
        if (PyErr_Occurred())
            return -1;
        known = fan_import_by_table(o, out);
        if (known != 0)
            return known < 0 ? -1 : 0;
        if (PyArray_IsScalar(o, Generic))
            return import_numpy_scalar(o, has_combine, out);
    }
    if (!fan_lazy(&st->zero_type, "fanin.slots", "Zero"))
        return -1;
    if ((PyObject *)Py_TYPE(o) == st->zero_type)
        return import_zero(o, out);
    return import_described(o, recording, has_combine, out);
}

int fan_import(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    *out = (fan_value){.dtype = FAN_DT_NONE};
    if (import_any(o, recording, has_combine, out) == 0)
        return 0;
    fan_value_release(out);
    return -1;
}

int fan_import_object(PyObject *o, fan_value *out)
{
    *out = (fan_value){.dtype = FAN_DT_NONE};
    if (import_described(o, true, true, out) == 0)
        return 0;
    fan_value_release(out);
    return -1;
}

/* may_overlap_itself: two elements may share a byte. Exact where the axes nest, which those of every ordinary view do;
 * else yes. */
static bool may_overlap_itself(const fan_array *a)
{
    uint64_t span = fan_dtype_size(a->dtype), done = 0;
    if (a->size == 0)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        int next = -1;
        uint64_t step = UINT64_MAX;
        for (int k = 0; k < a->ndim; k++) {
            uint64_t s = a->strides[k] < 0 ? 0 - (uint64_t)a->strides[k] : (uint64_t)a->strides[k];
            if (!(done >> k & 1) && a->shape[k] > 1 && s < step) {
                next = k;
                step = s;
            }
        }
        if (next < 0)
            break;
        if (step < span)
            return true;
        span += step * (uint64_t)(a->shape[next] - 1); /* the reach was checked when `a` was made */
        done |= UINT64_C(1) << next;
    }
    return false;
}

int fan_import_out(PyObject *o, fan_value *out)
{
    const char *why = NULL;
    if (PyArray_Check(o) && fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) == FAN_DT_NONE)
        return fan_refuse(fan_state_get()->dtype_error,
                          "out: expected an array of a dtype that is summed, as np.empty(shape, 'float64'), got %S",
                          (PyObject *)PyArray_DESCR((PyArrayObject *)o));
    if (fan_import(o, false, false, out) < 0)
        return -1;
    if (out->form == FAN_FORM_DENSE && (out->origin == FAN_FROM_PYTHON_SCALAR || out->origin == FAN_FROM_NUMPY_SCALAR))
        fan_value_release(out);
    if (out->form != FAN_FORM_DENSE) {
        fan_value_release(out);
        return fan_refuse(PyExc_TypeError, "out: expected a dense array to write into, got %s", FAN_TYPE_TEXT(o));
    }
    if (!out->array->writable)
        why = "is read-only";
    else if (may_overlap_itself(out->array))
        why = "overlaps itself";
    else if (out->object != o)
        why = "is read through a detached copy or view: give x.detach()"; /* what is written might not be seen in `o` */
    if (why) {
        fan_value_release(out);
        return fan_refuse(PyExc_BufferError, "out: expected an array that can be written, got %s that %s",
                          FAN_TYPE_TEXT(o), why);
    }
    return 0;
}
