/* import: the one way in: whatever a caller adds becomes a fan_value here.
 *
 *   None | ndarray | Python scalar | fanin's device array | a type with an exchange table | NumPy
 * scalar | Zero | anything else, as fanin._interop.arrays.describe describes
 * it */
#include "py/arrays/arrays.h"
#include "py/device/backends.h"
#include "py/arrays/dlpack.h"

#include "array/overlap.h"
#include "base/interrupt.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- memory ---- */

int fan_view_ndarray(PyArrayObject *a, fan_dtype dtype, bool writable, fan_array **out)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "fanin is for 64-bit machines");
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    const fan_storage of = {.data = PyArray_DATA(a), .release = fan_release_object, .ctx = a};
    fan_status status = fan_array_foreign(
        &of, PyArray_BYTES(a), dtype, PyArray_NDIM(a), (const int64_t *)PyArray_DIMS(a),
        (const int64_t *)PyArray_STRIDES(a), writable && PyArray_ISWRITEABLE(a), out, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    Py_INCREF(a);
    return 0;
}

/* D15, D5: the sum is of the kind of the first contribution of the lowest rank. */
enum {
    RANK_ARRAY,
    RANK_NUMPY_SCALAR,
    RANK_PYTHON_SCALAR
};

/* import_ndarray: an ndarray's memory as that of `object`. */
static int import_ndarray(PyArrayObject *a, PyObject *object, fan_origin origin, bool writable,
                          fan_value *out)
{
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(a));
    if (dtype == FAN_DT_NONE)
        return fan_dtype_refuse(PyArray_DESCR(a),
                                origin == FAN_FROM_NUMPY_SCALAR ? "the scalar" : "the array");
    if (fan_view_ndarray(a, dtype, writable, &out->array) < 0)
        return -1;
    out->form = FAN_FORM_DENSE;
    out->dtype = dtype;
    out->origin = (uint8_t)origin;
    out->rank = origin == FAN_FROM_NUMPY_SCALAR ? RANK_NUMPY_SCALAR : RANK_ARRAY;
    out->device = fan_cpu();
    out->object = Py_NewRef(object);
    return 0;
}

int fan_visit_behind(PyObject *o, const fan_value *v, visitproc visit, void *arg)
{
#ifdef Py_GIL_DISABLED
    return 0; /* reference counts do not show owners here */
#endif
    Py_ssize_t refs = 1;
    /* its storage has it, too, or an array over it; other code may have that, so it cannot be
     * counted */
    if (v) {
        const fan_storage *st = v->form == FAN_FORM_DENSE && v->array ? v->array->storage : NULL;
        if (!st || st->release != fan_release_object || atomic_load(&v->array->refs) != 1 ||
            atomic_load(&st->refs) != 1)
            return 0;
        Py_VISIT((PyObject *)st->ctx);
        refs += st->ctx == o;
        o = st->ctx;
    }
    while (PyArray_CheckExact(o) && Py_REFCNT(o) == refs) {
        o = PyArray_BASE((PyArrayObject *)o);
        refs = 1;
        Py_VISIT(o);
        if (!o)
            return 0;
    }
    return 0;
}

/* is_array: a fanin.Array, which is what it was made as: over an ndarray's memory it may be any
 * view of that. */
static bool is_array(PyObject *o)
{
    return o && Py_TYPE(o) == fan_state_get()->array_type;
}

/* ndarray_is_unchanged: of an array that is a view of an ndarray, all of it unless it is a `part`;
 * other owners cannot be read. */
static bool ndarray_is_unchanged(const fan_array *a, bool part)
{
    const fan_storage *st = a->storage;
    if (!st || st->release != fan_release_object || !PyArray_Check((PyObject *)st->ctx))
        return true;
    PyArrayObject *nd = st->ctx;
    int64_t lo, hi;
    if (a->size == 0) /* nothing is read */
        return true;
    if (!part && (PyArray_BYTES(nd) != a->data || PyArray_NDIM(nd) != a->ndim ||
                  fan_dtype_of_descr(PyArray_DESCR(nd)) != a->dtype))
        return false;
    for (int i = 0; i < a->ndim && !part; i++)
        if (PyArray_DIM(nd, i) != a->shape[i] ||
            (a->shape[i] > 1 && PyArray_STRIDE(nd, i) != a->strides[i]))
            return false;
    fan_array_reach(a, &lo, &hi);
    return fan_owner_has((PyObject *)nd, a->data + lo, a->data + hi);
}

bool fan_value_is_unchanged(const fan_value *v)
{
    fan_array *own[3];
    size_t n;
    fan_array *const *all = fan_value_arrays(v, own, &n);
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return true;
    bool unchanged = !v->own_memory || fan_tensor_has(v->object, v->array);
    for (size_t i = 0; i < n && unchanged; i++)
        unchanged = ndarray_is_unchanged(all[i], is_array(v->object));
    fan_gil_leave(&gil);
    return unchanged;
}

/* is_not_summed: is `o` an ndarray of a dtype that we do not sum? A slot with combine= takes it as
 * an object. */
static bool is_not_summed(PyObject *o)
{
    return PyArray_Check(o) && fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) == FAN_DT_NONE;
}

bool fan_is_no_gradient(PyObject *o)
{
    if (o == Py_None)
        return true;
    if (!PyArray_Check(o) || PyArray_DESCR((PyArrayObject *)o)->type_num != NPY_VOID)
        return false;
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)o);
    PyObject *names = PyDataType_NAMES(descr); /* borrowed; not a tuple: there are no fields */
    if (PyDataType_ELSIZE(descr) != 0 || !names || !PyTuple_Check(names) ||
        PyTuple_GET_SIZE(names) != 1)
        return false;
    return PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "float0") == 0;
}

int fan_dims_tuple(const char *what, PyObject *o, int64_t *shape)
{
    Py_ssize_t n = PyTuple_Check(o) ? PyTuple_GET_SIZE(o) : -1;
    if (n < 0 || n > FAN_MAX_NDIM)
        return fan_refuse(n < 0 ? PyExc_TypeError : PyExc_ValueError,
                          "expected %s, a tuple of at most %d ints, got %R", what, FAN_MAX_NDIM, o);
    for (Py_ssize_t i = 0; i < n; i++) {
        shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(o, i));
        if (shape[i] == -1 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError))
                return -1;
            PyErr_Clear();
            return fan_refuse(PyExc_ValueError, "%s %R: a number does not fit 64 bits", what, o);
        }
    }
    return (int)n;
}

/* device_named: the device of DLPack's numbers; its memory holds it from then on, so no hold is
 * kept here. BufferError where there is none. */
static int device_named(long type, long index, PyObject *producer, fan_device **out)
{
    const fan_backend_entry *b = fan_backend_of_dlpack(type);
    *out = fan_cpu();
    if (!b || !b->backend->has_streams)
        return 0;
    if (index < 0 || index > INT32_MAX)
        PyErr_Format(PyExc_ValueError, "there is no %s:%ld: no machine has so many devices",
                     b->backend->name, index);
    else if (fan_backend_device(b, index, out) == 0)
        return 0;
    PyObject *why = fan_exception_take();
    fan_refuse(PyExc_BufferError, "the %.200s is on %s:%ld, which cannot be used: %S",
               Py_TYPE(producer)->tp_name, b->backend->name, index, why);
    Py_XDECREF(why);
    return -1;
}

static int import_capsule(PyObject *source, PyObject *producer, fan_array **out,
                          fan_device **device)
{
    PyObject *capsule;
    long type, index;
    int writes;
    if (!PyArg_ParseTuple(source, "Olli:source", &capsule, &type, &index, &writes) ||
        device_named(type, index, producer, device) < 0)
        return -1;
    fan_dl_device said = {(int32_t)type, (int32_t)index};
    int result = fan_dlpack_take(capsule, producer, &said, (fan_dl_writes)writes, *device, out);
    fan_device_drop(*device);
    return result;
}

/* import_address: (address, dtype, shape, strides or None, writable, device index), of
 * __cuda_array_interface__. */
static int import_address(PyObject *source, PyObject *producer, fan_array **out,
                          fan_device **device)
{
    PyObject *dtype, *shape, *strides;
    int64_t dims[FAN_MAX_NDIM], steps[FAN_MAX_NDIM];
    unsigned long long address;
    fan_dtype d;
    long index;
    int writable, ndim;
    if (!PyArg_ParseTuple(source, "KOOOpl:source", &address, &dtype, &shape, &strides, &writable,
                          &index) ||
        fan_dtype_parse(dtype, &d) < 0)
        return -1;
    ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0 || (strides != Py_None && fan_dims_tuple("strides", strides, steps) != ndim))
        return PyErr_Occurred()
                   ? -1
                   : fan_refuse(PyExc_ValueError, "the array has %d axes and the strides %R", ndim,
                                strides);
    if (device_named(FAN_DL_CUDA, index, producer, device) < 0)
        return -1;
    int result = fan_address_take(address, d, ndim, dims, strides == Py_None ? NULL : steps,
                                  writable, producer, *device, out);
    fan_device_drop(*device);
    return result;
}

/* import_source: memory as _interop.arrays names it: an ndarray, fanin's device array, (capsule,
 * device type, device index, fan_dl_writes), or what an address is (import_address). */
static int import_source(PyObject *source, PyObject *producer, fan_array **out, fan_device **device)
{
    fan_array *a;
    *device = fan_cpu();
    if (PyArray_Check(source)) {
        PyArrayObject *nd = (PyArrayObject *)source;
        fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(nd));
        if (dtype == FAN_DT_NONE)
            return fan_dtype_refuse(PyArray_DESCR(nd), "the array");
        return fan_view_ndarray(nd, dtype, true, out);
    }
    if (PyTuple_Check(source))
        return (PyTuple_GET_SIZE(source) == 4 ? import_capsule : import_address)(source, producer,
                                                                                 out, device);
    a = fan_array_arg(source, device);
    if (!a)
        return PyErr_Occurred() ? -1
                                : fan_refuse(PyExc_TypeError, "expected an array, got %s",
                                             FAN_TYPE_TEXT(source));
    if (fan_array_usable(a) < 0)
        return -1;
    *out = fan_array_hold(a);
    return 0;
}

static int import_dense(PyObject *d, fan_value *out)
{
    PyObject *object, *source;
    int origin;
    if (!PyArg_ParseTuple(d, "iOO:Dense", &origin, &object, &source) ||
        import_source(source, object, &out->array, &out->device) < 0)
        return -1;
    out->form = FAN_FORM_DENSE;
    out->dtype = out->array->dtype;
    out->origin = (uint8_t)origin;
    out->object = Py_NewRef(object);
    out->own_memory = out->device == fan_cpu() && fan_tensor_has(object, out->array);
    return 0;
}

static int import_sparse(PyObject *d, fan_value *out)
{
    PyObject *object, *source[3], *shape;
    fan_array *part[3] = {NULL, NULL, NULL};
    int64_t dims[FAN_MAX_NDIM];
    fan_device *device = NULL;
    fan_format format;
    fan_error err;
    fan_status status = FAN_OK;
    const char *name;
    int origin, coalesced, ndim, result = -1;
    err.text[0] = '\0';
    if (!PyArg_ParseTuple(d, "iOsOOOOp:Stored", &origin, &object, &name, &shape, &source[0],
                          &source[1], &source[2], &coalesced))
        return -1;
    if (!fan_format_from_name(name, &format))
        return fan_refuse(PyExc_ValueError,
                          "expected a sparse format 'coo', 'csr', 'csc', 'bsr' or 'bsc', got '%s'",
                          name);
    ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0)
        return -1;
    for (int i = 0; i < 3; i++) {
        fan_device *on;
        if (source[i] == Py_None && i == 1)
            continue;
        if (import_source(source[i], object, &part[i], &on) < 0)
            goto done;
        if (device && on != device) {
            fan_refuse(PyExc_ValueError, "the parts of a sparse array are on different devices");
            goto done;
        }
        device = on;
    }
    status = fan_sparse_new(format, ndim, dims, part[0], part[1], part[2], coalesced, &out->sparse,
                            &err);
    if (status == FAN_OK && device == fan_cpu()) {
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, fan_check_signals, &err);
        status = fan_interrupt_end(&interrupt, fan_sparse_check(out->sparse, &err));
    }
    if (status != FAN_OK) {
        fan_refuse_error(status, &err);
        goto done;
    }
    out->form = FAN_FORM_SPARSE;
    out->dtype = out->sparse->values->dtype;
    out->origin = (uint8_t)origin;
    out->device = device;
    out->object = Py_NewRef(object);
    result = 0;
done:
    for (int i = 0; i < 3; i++)
        fan_array_drop(part[i]);
    return result;
}

/* ---- any object ---- */

static int import_object(PyObject *o, PyObject *parts, fan_value *out);

static int import_numpy_scalar(PyObject *o, bool has_combine, fan_value *out)
{
    PyObject *a = PyArray_FromScalar(o, NULL);
    int result = !a ? -1
                 : has_combine && is_not_summed(a)
                     ? import_object(o, NULL, out)
                     : import_ndarray((PyArrayObject *)a, o, FAN_FROM_NUMPY_SCALAR, false, out);
    Py_XDECREF(a);
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
        if (overflow) {
            PyObject *bits = PyObject_CallMethod(o, "bit_length", NULL);
            if (bits)
                fan_refuse(PyExc_OverflowError,
                           "an integer of %S bits does not fit int64; expected -2**63 .. 2**63 - "
                           "1, or a float",
                           bits);
            Py_XDECREF(bits);
            return -1;
        }
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

/* import_zero: a zero is an array of one element, broadcast to its shape. */
static int import_zero(PyObject *o, fan_value *out)
{
    const fan_state *st = fan_state_get();
    PyObject *shape = PyObject_GetAttr(o, st->str_shape),
             *dtype = shape ? PyObject_GetAttr(o, st->str_dtype) : NULL;
    int64_t dims[FAN_MAX_NDIM], strides[FAN_MAX_NDIM] = {0};
    fan_storage *element = NULL;
    fan_error err;
    fan_status status;
    int ndim, result = -1;
    err.text[0] = '\0';
    if (!dtype || fan_dtype_parse(dtype, &out->dtype) < 0 ||
        (ndim = fan_shape_tuple(shape, dims)) < 0)
        goto done;
    element = fan_storage_new(16);
    if (!element) {
        PyErr_NoMemory();
        goto done;
    }
    memset(element->data, 0, 16);
    status = fan_array_view(element, element->data, out->dtype, ndim, dims, strides, false,
                            &out->array, &err);
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
enum {
    OBJECT_FIELDS = 1,
    REFUSED_FIELDS = 2,
    DENSE_FIELDS = 3,
    STORED_FIELDS = 8
};

/* collect_parts: the memory that an object declares; each part is an array that we can read, dense
 * or sparse. */
static int collect_parts(PyObject *parts, fan_value *out)
{
    PyObject *fast =
        Py_TYPE(parts)->tp_iter || PySequence_Check(parts) ? PySequence_Tuple(parts) : NULL;
    Py_ssize_t n = fast ? PyTuple_GET_SIZE(fast) : 0;
    int result = -1;
    if (!fast)
        return PyErr_Occurred()
                   ? -1
                   : fan_refuse(
                         PyExc_TypeError,
                         "__fanin_parts__() gave %s; expected the arrays that the object holds",
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
        fan_array *own[3];
        int bad = fan_import(item, false, false, &v);
        size_t k = 0;
        if (!bad && v.form != FAN_FORM_DENSE && v.form != FAN_FORM_SPARSE)
            bad = fan_refuse(PyExc_TypeError,
                             "__fanin_parts__() gave %s; expected the arrays that the object holds",
                             FAN_TYPE_TEXT(item));
        if (!bad) {
            fan_array *const *all = fan_value_arrays(&v, own, &k);
            for (size_t j = 0; j < k; j++)
                out->parts[out->nparts++] = fan_array_hold(all[j]);
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

/* import_described: what _interop.arrays makes of it. The records of _interop/records.py differ in
 * the number of their fields. */
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
        result = has_combine && is_not_summed(PyTuple_GET_ITEM(d, 2)) ? import_object(o, NULL, out)
                                                                      : import_dense(d, out);
        break;
    case STORED_FIELDS:
        result = import_sparse(d, out);
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
        if (PyArray_DESCR((PyArrayObject *)o)->type_num == NPY_OBJECT ||
            (has_combine && is_not_summed(o)))
            return import_object(o, NULL, out);
        if (fan_storage_redirected() && fan_ndarray_check_known(o, "a sum, copy or conversion") < 0)
            return -1;
        return import_ndarray((PyArrayObject *)o, o, FAN_FROM_NDARRAY, true, out);
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

/* is_lazy: whether a torch tensor has this bit: its memory holds other numbers than it shows. */
static bool is_lazy(PyObject *o, const char *method)
{
    PyObject *set = fan_is_tensor(fan_state_get(), o) ? PyObject_CallMethod(o, method, NULL) : NULL;
    bool lazy = set == Py_True;
    Py_XDECREF(set);
    PyErr_Clear();
    return lazy;
}

/* read_only_words: why an array that is imported as read-only cannot be written. */
static const char *read_only_words(PyObject *o)
{
    if (is_lazy(o, "is_conj"))
        return "has torch's conjugate bit: give out=x.resolve_conj()";
    if (is_lazy(o, "is_neg"))
        return "has torch's negative bit: give out=x.resolve_neg()";
    return "is read-only";
}

int fan_import_out(PyObject *o, fan_value *out)
{
    const char *why = NULL;
    fan_verdict v = FAN_OVERLAP_DISJOINT;
    if (PyArray_Check(o) && fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) == FAN_DT_NONE)
        return fan_refuse(fan_state_get()->dtype_error,
                          "out: expected an array of a dtype that is summed, as np.empty(shape, "
                          "'float64'), got %S",
                          (PyObject *)PyArray_DESCR((PyArrayObject *)o));
    if (fan_import(o, false, false, out) < 0)
        return -1;
    if (out->form == FAN_FORM_DENSE &&
        (out->origin == FAN_FROM_PYTHON_SCALAR || out->origin == FAN_FROM_NUMPY_SCALAR))
        fan_value_release(out);
    if (out->form != FAN_FORM_DENSE) {
        fan_value_release(out);
        return fan_refuse(PyExc_TypeError, "out: expected a dense array to write into, got %s",
                          FAN_TYPE_TEXT(o));
    }
    const fan_region r = fan_region_of(out->array);
    if (FAN_CHECK(fan_overlap_itself(&r, 0, NULL, NULL, &v, &err)) < 0) {
        fan_value_release(out);
        return -1;
    }
    if (!out->array->writable)
        why = read_only_words(o);
    else if (v != FAN_OVERLAP_DISJOINT)
        why = "overlaps itself";
    else if (out->object != o)
        /* a write might not reach `o` */
        why = "is read through a detached copy or view: give x.detach()";
    if (why) {
        fan_value_release(out);
        return fan_refuse(PyExc_BufferError,
                          "out: expected an array that can be written, got %s that %s",
                          FAN_TYPE_TEXT(o), why);
    }
    return 0;
}
