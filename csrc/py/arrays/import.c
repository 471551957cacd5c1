/* import: makes a fan_value of whatever a caller adds, by its class (facts.h). import_any tries
 * with objects of other classes: a type with an exchange table, Zero, and then any object as
 * fanin._interop.arrays.describe describes it.
 *
 * In this order: ndarrays and whether they changed; memory of other libraries; numbers and zeros;
 * records of _interop.arrays; the functions that the rest of the core calls; out=. */
#include "py/arrays/arrays.h"
#include "py/device/backends.h"
#include "py/arrays/dlpack.h"
#include "py/arrays/facts.h"

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
    const fan_storage of = {
        .data = PyArray_DATA(a),
        .release = fan_release_object,
        .ctx = a,
    };
    fan_status status = fan_array_foreign(
        &of, PyArray_BYTES(a), dtype, PyArray_NDIM(a), (const int64_t *)PyArray_DIMS(a),
        (const int64_t *)PyArray_STRIDES(a), writable && fan_ndarray_may_write(a), out, &err);
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
    bool is_scalar = origin == FAN_FROM_NUMPY_SCALAR;
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(a));
    if (dtype == FAN_DT_NONE)
        return fan_dtype_refuse(PyArray_DESCR(a), is_scalar ? "the scalar" : "the array");
    if (fan_view_ndarray(a, dtype, writable, &out->array) < 0)
        return -1;
    if (is_scalar)
        out->rank = RANK_NUMPY_SCALAR;
    fan_value_set_dense(out, origin, fan_cpu(), object);
    return 0;
}

int fan_visit_behind(PyObject *o, const fan_value *v, visitproc visit, void *arg)
{
#ifdef Py_GIL_DISABLED
    return 0; /* reference counts do not show owners here */
#endif
    Py_ssize_t refs = 1;
    /* The value's storage, or an array over it, has a reference, too. Other code may hold those, so
     * the reference counts only where the value has the one hold on each. */
    if (v) {
        if (v->form != FAN_FORM_DENSE || !v->array)
            return 0;
        const fan_storage *st = v->array->storage;
        if (!st || st->release != fan_release_object)
            return 0;
        if (atomic_load(&v->array->refs) != 1)
            return 0;
        if (atomic_load(&st->refs) != 1)
            return 0;
        Py_VISIT((PyObject *)st->ctx);
        refs += st->ctx == o;
        o = st->ctx;
    }
    while (o && PyArray_CheckExact(o) && Py_REFCNT(o) == refs) {
        o = PyArray_BASE((PyArrayObject *)o);
        refs = 1;
        Py_VISIT(o);
    }
    return 0;
}

/* is_array: whether an object is a fanin.Array. It cannot change, and may be any view of an
 * ndarray's memory. */
static bool is_array(PyObject *o)
{
    return o && Py_TYPE(o) == fan_state_get()->array_type;
}

/* is_all_of: whether an array has the address, dtype, shape and strides of an ndarray. */
static bool is_all_of(const fan_array *a, const PyArrayObject *nd)
{
    if (PyArray_BYTES(nd) != a->data)
        return false;
    if (PyArray_NDIM(nd) != a->ndim)
        return false;
    if (fan_dtype_of_descr(PyArray_DESCR(nd)) != a->dtype)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        if (PyArray_DIM(nd, i) != a->shape[i])
            return false;
        if (a->shape[i] > 1 && PyArray_STRIDE(nd, i) != a->strides[i])
            return false;
    }
    return true;
}

/* ndarray_is_unchanged: of an array that is a view of an ndarray, all of it unless it is a `part`;
 * other owners cannot be read. */
static bool ndarray_is_unchanged(const fan_array *a, bool part)
{
    const fan_storage *st = a->storage;
    if (!st)
        return true;
    if (st->release != fan_release_object)
        return true;
    if (!PyArray_Check((PyObject *)st->ctx))
        return true;
    if (a->size == 0) /* no element is read */
        return true;
    if (!part && !is_all_of(a, st->ctx))
        return false;
    int64_t lo;
    int64_t hi;
    fan_array_reach(a, &lo, &hi);
    return fan_owner_has(st->ctx, a->data + lo, a->data + hi);
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

/* is_not_summed: whether `o` is an ndarray of a dtype that we do not sum, which a slot with
 * combine= takes as an object. */
static bool is_not_summed(PyObject *o)
{
    return PyArray_Check(o) && fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) == FAN_DT_NONE;
}

bool fan_is_no_gradient(PyObject *o)
{
    if (o == Py_None)
        return true;
    if (!PyArray_Check(o))
        return false;
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)o);
    if (descr->type_num != NPY_VOID || PyDataType_ELSIZE(descr) != 0)
        return false;
    PyObject *names = PyDataType_NAMES(descr); /* borrowed; not a tuple: there are no fields */
    if (!names)
        return false;
    if (!PyTuple_Check(names))
        return false;
    if (PyTuple_GET_SIZE(names) != 1)
        return false;
    return PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "float0") == 0;
}

int fan_dims_tuple(const char *what, PyObject *o, int64_t *shape)
{
    Py_ssize_t n = PyTuple_Check(o) ? PyTuple_GET_SIZE(o) : -1;
    if (n < 0 || n > FAN_MAX_NDIM) {
        return fan_refuse(n < 0 ? PyExc_TypeError : PyExc_ValueError,
                          "expected %s, a tuple of at most %d ints, got %R", what, FAN_MAX_NDIM, o);
    }
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

/* device_named: the device of DLPack's numbers, which its memory holds from then on, so that the
 * caller drops its hold. BufferError where there is none. */
static int device_named(long type, long index, PyObject *producer, fan_device **out)
{
    const fan_backend_entry *entry = fan_backend_of_dlpack(type);
    *out = fan_cpu();
    if (!entry || !entry->backend->has_streams)
        return 0;
    const char *name = entry->backend->name;
    if (index < 0 || index > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "there is no %s:%ld: no machine has so many devices", name,
                     index);
    } else if (fan_backend_device(entry, index, out) == 0)
        return 0;
    PyObject *why = fan_exception_take();
    fan_refuse(PyExc_BufferError, "the %.200s is on %s:%ld, which cannot be used: %S",
               Py_TYPE(producer)->tp_name, name, index, why);
    Py_XDECREF(why);
    return -1;
}

static int import_capsule(PyObject *source, PyObject *producer, fan_array **out,
                          fan_device **device)
{
    PyObject *capsule;
    long type;
    long index;
    int writes;
    if (!PyArg_ParseTuple(source, "Olli:source", &capsule, &type, &index, &writes))
        return -1;
    if (device_named(type, index, producer, device) < 0)
        return -1;
    fan_dl_device reported = {(int32_t)type, (int32_t)index};
    int result = fan_dlpack_take(capsule, producer, &reported, (fan_dl_writes)writes, *device, out);
    fan_device_drop(*device);
    return result;
}

/* import_address: (address, dtype, shape, strides or None, writable, device index), of
 * __cuda_array_interface__. */
static int import_address(PyObject *source, PyObject *producer, fan_array **out,
                          fan_device **device)
{
    PyObject *dtype_name, *shape, *strides;
    unsigned long long address;
    long index;
    int writable;
    if (!PyArg_ParseTuple(source, "KOOOpl:source", &address, &dtype_name, &shape, &strides,
                          &writable, &index))
        return -1;
    fan_dtype dtype;
    if (fan_dtype_parse(dtype_name, &dtype) < 0)
        return -1;
    int64_t dims[FAN_MAX_NDIM];
    int64_t steps[FAN_MAX_NDIM];
    const int64_t *given_steps = NULL;
    int ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0)
        return -1;
    if (strides != Py_None) {
        int n = fan_dims_tuple("strides", strides, steps);
        if (n < 0)
            return -1;
        if (n != ndim) {
            return fan_refuse(PyExc_ValueError, "the array has %d axes and the strides %R", ndim,
                              strides);
        }
        given_steps = steps;
    }
    if (device_named(FAN_DL_CUDA, index, producer, device) < 0)
        return -1;
    int result =
        fan_address_take(address, dtype, ndim, dims, given_steps, writable, producer, *device, out);
    fan_device_drop(*device);
    return result;
}

/* import_source: memory as _interop.arrays names it: an ndarray, fanin's device array, the tuple
 * (capsule, device type, device index, fan_dl_writes), or the tuple of import_address. */
static int import_source(PyObject *source, PyObject *producer, fan_array **out, fan_device **device)
{
    *device = fan_cpu();
    if (PyArray_Check(source)) {
        PyArrayObject *nd = (PyArrayObject *)source;
        fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(nd));
        if (dtype == FAN_DT_NONE)
            return fan_dtype_refuse(PyArray_DESCR(nd), "the array");
        return fan_view_ndarray(nd, dtype, true, out);
    }
    if (PyTuple_Check(source)) {
        if (PyTuple_GET_SIZE(source) == 4)
            return import_capsule(source, producer, out, device);
        return import_address(source, producer, out, device);
    }
    fan_array *a = fan_array_arg(source, device);
    if (!a)
        return fan_refuse(PyExc_TypeError, "expected an array, got %s", FAN_TYPE_TEXT(source));
    if (fan_array_usable(a) < 0)
        return -1;
    *out = fan_array_hold(a);
    return 0;
}

static int import_dense(PyObject *d, fan_value *out)
{
    PyObject *object, *source;
    int origin;
    fan_device *device;
    if (!PyArg_ParseTuple(d, "iOO:Dense", &origin, &object, &source))
        return -1;
    if (import_source(source, object, &out->array, &device) < 0)
        return -1;
    fan_value_set_dense(out, (fan_origin)origin, device, object);
    out->own_memory = device == fan_cpu() && fan_tensor_has(object, out->array);
    return 0;
}

static int import_sparse(PyObject *d, fan_value *out)
{
    PyObject *object, *source[3], *shape;
    const char *name;
    int origin;
    int coalesced;
    if (!PyArg_ParseTuple(d, "iOsOOOOp:SparseArray", &origin, &object, &name, &shape, &source[0],
                          &source[1], &source[2], &coalesced))
        return -1;
    fan_format format;
    if (!fan_format_from_name(name, &format)) {
        return fan_refuse(PyExc_ValueError,
                          "expected a sparse format 'coo', 'csr', 'csc', 'bsr' or 'bsc', got '%s'",
                          name);
    }
    int64_t dims[FAN_MAX_NDIM];
    int ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0)
        return -1;

    /* indices, pointers (None: the format has none) and values, all on one device */
    fan_array *part[3] = {NULL, NULL, NULL};
    fan_device *device = NULL;
    fan_error err = {0};
    int result = -1;
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

    fan_status status = fan_sparse_new(format, ndim, dims, part[0], part[1], part[2], coalesced,
                                       &out->sparse, &err);
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
    int result;
    PyObject *a = PyArray_FromScalar(o, NULL);
    if (!a)
        return -1;
    if (has_combine && is_not_summed(a))
        result = import_object(o, NULL, out);
    else
        result = import_ndarray((PyArrayObject *)a, o, FAN_FROM_NUMPY_SCALAR, false, out);
    Py_DECREF(a);
    return result;
}

/* refuse_large_int: OverflowError for an int that 64 bits do not hold; returns -1. */
static int refuse_large_int(PyObject *o)
{
    PyObject *bits = PyObject_CallMethod(o, "bit_length", NULL);
    if (bits) {
        fan_refuse(PyExc_OverflowError,
                   "an integer of %S bits does not fit int64; expected -2**63 .. 2**63 - "
                   "1, or a float",
                   bits);
    }
    Py_XDECREF(bits);
    return -1;
}

/* import_number: a Python number (D5). */
static int import_number(PyObject *o, fan_value *out)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    char *data;
    if (!fan_number_read(o, &kind, &data))
        return refuse_large_int(o);
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    fan_status status = fan_array_new(kind.dtype, 0, NULL, NULL, &out->array, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    const char *value = kind.inside ? (const char *)&data : data;
    memcpy(out->array->data, value, fan_dtype_size(kind.dtype));
    out->array->writable = false; /* the object must not differ from it */
    out->weak = true;
    out->rank = RANK_PYTHON_SCALAR;
    fan_value_set_dense(out, FAN_FROM_PYTHON_SCALAR, fan_cpu(), o);
    return 0;
}

/* import_zero: a zero is an array of one element, broadcast to its shape. */
static int import_zero(PyObject *o, fan_value *out)
{
    const fan_state *st = fan_state_get();
    PyObject *dtype = NULL;
    fan_storage *element = NULL;
    int result = -1;
    PyObject *shape = PyObject_GetAttr(o, st->str_shape);
    if (shape)
        dtype = PyObject_GetAttr(o, st->str_dtype);
    if (!dtype || fan_dtype_parse(dtype, &out->dtype) < 0)
        goto done;
    int64_t dims[FAN_MAX_NDIM], strides[FAN_MAX_NDIM] = {0};
    int ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0)
        goto done;
    element = fan_storage_new(16);
    if (!element) {
        PyErr_NoMemory();
        goto done;
    }
    memset(element->data, 0, 16);
    fan_error err = {0};
    fan_status status = fan_array_view(element, element->data, out->dtype, ndim, dims, strides,
                                       false, &out->array, &err);
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

/* ---- fanin.Partial ---- */

/* import_axes: one run of numbers of Partial._place; `n` of them, -1: as many as there are. */
static int import_axes(PyObject *place, Py_ssize_t i, int n, int64_t *out)
{
    PyObject *run = NULL;
    if (PyTuple_Check(place) && i < PyTuple_GET_SIZE(place))
        run = PyTuple_GET_ITEM(place, i);
    if (!run || !PyTuple_Check(run) || PyTuple_GET_SIZE(run) > FAN_MAX_NDIM)
        goto wrong;
    if (n >= 0 && PyTuple_GET_SIZE(run) != n)
        goto wrong;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(run); k++) {
        out[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(run, k));
        if (out[k] == -1 && PyErr_Occurred())
            return -1;
    }
    return (int)PyTuple_GET_SIZE(run);
wrong:
    PyErr_SetString(PyExc_SystemError, "fanin.Partial has no place");
    return -1;
}

/* import_patch: the patch of a Partial, as its constructor computed it. */
static int import_patch(PyObject *shape, PyObject *place, fan_patch **out)
{
    int64_t whole[FAN_MAX_NDIM];
    int64_t start[FAN_MAX_NDIM];
    int64_t step[FAN_MAX_NDIM];
    int64_t along[FAN_MAX_NDIM];
    int64_t extent[FAN_MAX_NDIM];
    int8_t from[FAN_MAX_NDIM];
    int ndim = fan_shape_tuple(shape, whole);
    if (ndim < 0)
        return -1;
    if (import_axes(place, 0, ndim, start) < 0)
        return -1;
    if (import_axes(place, 1, ndim, step) < 0)
        return -1;
    if (import_axes(place, 2, ndim, along) < 0)
        return -1;
    int values = import_axes(place, 3, -1, extent);
    if (values < 0)
        return -1;
    for (int k = 0; k < ndim; k++)
        from[k] = (int8_t)along[k];
    return FAN_CHECK(fan_patch_new(ndim, whole, start, step, from, values, extent, out, &err));
}

/* check_records: a pass that records itself sums the values alone, so what they record would be
 * lost. */
static int check_records(PyObject *values)
{
    PyObject *flag = PyObject_GetAttrString(values, "requires_grad");
    if (!flag) {
        PyErr_Clear();
        return 0;
    }
    bool records = flag == Py_True;
    Py_DECREF(flag);
    if (!records)
        return 0;
    return fan_refuse(PyExc_NotImplementedError,
                      "create_graph: a Partial of %s that requires a gradient: the sum could not "
                      "be differentiated; give the whole array, made by the library's own calls",
                      FAN_TYPE_TEXT(values));
}

/* import_partial: values, and where they lie. */
static int import_partial(PyObject *o, bool recording, fan_value *out)
{
    char has[160];
    char wants[160];
    fan_patch *patch = NULL;
    int result = -1;
    PyObject *shape = NULL;
    PyObject *place = NULL;
    PyObject *values = PyObject_GetAttrString(o, "values");
    if (values)
        shape = PyObject_GetAttrString(o, "shape");
    if (shape)
        place = PyObject_GetAttrString(o, "_place");
    if (!place || import_patch(shape, place, &patch) < 0)
        goto done;
    if (recording && check_records(values) < 0)
        goto done;
    if (fan_import(values, false, false, out) < 0)
        goto done;
    if (out->form != FAN_FORM_DENSE) {
        fan_refuse(PyExc_TypeError, "a Partial of %s: expected a dense array as its values",
                   FAN_TYPE_TEXT(values));
        goto done;
    }
    const fan_array *a = out->array;
    if (!fan_shape_same(a->ndim, a->shape, patch->values, patch->extent)) {
        fan_refuse(PyExc_ValueError, "the values of a Partial changed their shape from %s to %s",
                   fan_shape_text(patch->values, patch->extent, wants, sizeof wants),
                   fan_shape_text(a->ndim, a->shape, has, sizeof has));
        goto done;
    }
    fan_value_set_patch(out, patch);
    out->own_memory = false;
    out->weak = false;
    PyObject *was = out->object;
    out->object = Py_NewRef(o);
    Py_XDECREF(was);
    result = 0;
done:
    fan_patch_drop(patch);
    Py_XDECREF(values);
    Py_XDECREF(shape);
    Py_XDECREF(place);
    return result;
}

/* ---- records of _interop.arrays ---- */

/* The records of _interop/records.py differ in the number of their fields. */
enum {
    OBJECT_FIELDS = 1,
    REFUSED_FIELDS = 2,
    DENSE_FIELDS = 3,
    SPARSE_ARRAY_FIELDS = 8
};

/* refuse_parts: TypeError for what __fanin_parts__ returned; returns -1. */
static int refuse_parts(PyObject *o)
{
    return fan_refuse(PyExc_TypeError,
                      "__fanin_parts__() gave %s; expected the arrays that the object holds",
                      FAN_TYPE_TEXT(o));
}

/* collect_part: appends the arrays of one part, which is dense or sparse, to those of `out`, where
 * there is room. */
static int collect_part(PyObject *part, fan_value *out)
{
    fan_value v;
    fan_array *own[3];
    size_t n;
    if (fan_import(part, false, false, &v) < 0)
        return -1;
    if (v.form != FAN_FORM_DENSE && v.form != FAN_FORM_SPARSE) {
        fan_value_release(&v);
        return refuse_parts(part);
    }
    fan_array *const *arrays = fan_value_arrays(&v, own, &n);
    for (size_t i = 0; i < n; i++)
        out->parts[out->nparts++] = fan_array_hold(arrays[i]);
    if (!out->device || !out->device->backend->has_streams)
        out->device = v.device;
    fan_value_release(&v);
    return 0;
}

/* collect_parts: the memory that an object declares. */
static int collect_parts(PyObject *parts, fan_value *out)
{
    if (!Py_TYPE(parts)->tp_iter && !PySequence_Check(parts))
        return refuse_parts(parts);
    PyObject *tuple = PySequence_Tuple(parts);
    if (!tuple)
        return -1;
    int result = 0;
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    if (n > 0) {
        out->parts = fan_alloc((size_t)n * 3 * sizeof(fan_array *));
        if (!out->parts) {
            PyErr_NoMemory();
            result = -1;
        }
    }
    for (Py_ssize_t i = 0; result == 0 && i < n; i++)
        result = collect_part(PyTuple_GET_ITEM(tuple, i), out);
    Py_DECREF(tuple);
    return result;
}

static int import_object(PyObject *o, PyObject *parts, fan_value *out)
{
    out->form = FAN_FORM_OBJECT;
    out->dtype = FAN_DT_NONE;
    out->origin = FAN_FROM_OBJECT;
    out->object = Py_NewRef(o);
    if (!parts || parts == Py_None)
        return 0;
    return collect_parts(parts, out);
}

/* import_record: the value of a record of _interop.arrays. */
static int import_record(PyObject *o, PyObject *record, bool has_combine, fan_value *out)
{
    switch (PyTuple_Check(record) ? PyTuple_GET_SIZE(record) : 0) {
    case DENSE_FIELDS:
        if (has_combine && is_not_summed(PyTuple_GET_ITEM(record, 2)))
            return import_object(o, NULL, out);
        return import_dense(record, out);
    case SPARSE_ARRAY_FIELDS:
        return import_sparse(record, out);
    case OBJECT_FIELDS:
        return import_object(o, PyTuple_GET_ITEM(record, 0), out);
    case REFUSED_FIELDS:
        return fan_refuse(PyTuple_GET_ITEM(record, 0), "%U", PyTuple_GET_ITEM(record, 1));
    default:
        PyErr_SetString(PyExc_SystemError, "_interop.arrays gave no record");
        return -1;
    }
}

/* import_described: the value that _interop.arrays describes. */
static int import_described(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    fan_stream *ready = fan_error_context_stream();
    PyObject *record =
        fan_arrays_call("describe", "(OOON)", o, fan_py_bool(recording), fan_py_bool(has_combine),
                        ready ? fan_stream_wrap(ready) : Py_NewRef(Py_None));
    if (!record)
        return -1;
    int result = import_record(o, record, has_combine, out);
    PyObject *live = fan_exception_take(); /* a capsule's destructor is another library's code */
    Py_DECREF(record);
    fan_exception_put(live);
    return result;
}

/* ---- in ---- */

static int import_exact_ndarray(PyObject *o, bool has_combine, fan_value *out)
{
    PyArrayObject *a = (PyArrayObject *)o;
    if (PyArray_TYPE(a) == NPY_OBJECT || (has_combine && is_not_summed(o)))
        return import_object(o, NULL, out);
    if (fan_storage_redirected() && fan_ndarray_check_known(o, "a sum, copy or conversion") < 0)
        return -1;
    return import_ndarray(a, o, FAN_FROM_NDARRAY, true, out);
}

/* import_array: of a fanin.Array. */
static int import_array(PyObject *o, fan_value *out)
{
    fan_device *device;
    fan_array *a = fan_array_arg(o, &device);
    if (fan_array_usable(a) < 0)
        return -1;
    out->array = fan_array_hold(a);
    fan_value_set_dense(out, FAN_FROM_DEVICE_ARRAY, device, o);
    return 0;
}

/* import_other: Zero, Partial, or by Python. */
static int import_other(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    fan_state *st = fan_state_get();
    if (!fan_lazy(&st->zero_type, "fanin.slots", "Zero"))
        return -1;
    if (!fan_lazy(&st->partial_type, "fanin.partial", "Partial"))
        return -1;
    if ((PyObject *)Py_TYPE(o) == st->zero_type)
        return import_zero(o, out);
    if ((PyObject *)Py_TYPE(o) == st->partial_type)
        return import_partial(o, recording, out);
    return import_described(o, recording, has_combine, out);
}

/* import_any: -1 with an exception; else `out` has the value. */
static int import_any(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    fan_class is = fan_class_of(o);
    if (is == FAN_IS_NONE)
        return 0;
    if (recording)
        return import_other(o, true, has_combine, out);
    switch (is) {
    case FAN_IS_NDARRAY:
        return import_exact_ndarray(o, has_combine, out);
    case FAN_IS_NUMBER:
        return import_number(o, out);
    case FAN_IS_NUMPY_SCALAR:
        return import_numpy_scalar(o, has_combine, out);
    case FAN_IS_ARRAY:
        return import_array(o, out);
    default: {
        int known = fan_import_by_table(o, out);
        if (known != 0)
            return known;
        return import_other(o, false, has_combine, out);
    }
    }
}

int fan_import(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    *out = (fan_value){.dtype = FAN_DT_NONE};
    if (import_any(o, recording, has_combine, out) >= 0)
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
    return fan_is_tensor(o) && fan_result_is(PyObject_CallMethod(o, method, NULL), Py_True);
}

/* why_not_writable: the words for a value of `o` that cannot be written; NULL: it can. */
static const char *why_not_writable(PyObject *o, const fan_value *v, fan_verdict itself)
{
    if (!v->array->writable) {
        if (is_lazy(o, "is_conj"))
            return "has torch's conjugate bit: give out=x.resolve_conj()";
        if (is_lazy(o, "is_neg"))
            return "has torch's negative bit: give out=x.resolve_neg()";
        return "is read-only";
    }
    if (itself != FAN_OVERLAP_DISJOINT)
        return "overlaps itself";
    if (v->object != o) /* a write might not reach `o` */
        return "is read through a detached copy or view: give x.detach()";
    return NULL;
}

int fan_import_out(PyObject *o, fan_value *out)
{
    if (is_not_summed(o)) {
        return fan_refuse(fan_state_get()->dtype_error,
                          "out: expected an array of a dtype that is summed, as np.empty(shape, "
                          "'float64'), got %S",
                          (PyObject *)PyArray_DESCR((PyArrayObject *)o));
    }
    if (fan_import(o, false, false, out) < 0)
        return -1;
    bool is_number = out->origin == FAN_FROM_PYTHON_SCALAR || out->origin == FAN_FROM_NUMPY_SCALAR;
    if (out->form != FAN_FORM_DENSE || is_number) {
        fan_refuse(PyExc_TypeError, "out: expected a dense array to write into, got %s",
                   FAN_TYPE_TEXT(o));
        goto refused;
    }
    const fan_region region = fan_region_of(out->array);
    fan_verdict itself;
    if (FAN_CHECK(fan_overlap_itself(&region, 0, NULL, NULL, &itself, &err)) < 0)
        goto refused;
    const char *why = why_not_writable(o, out, itself);
    if (!why)
        return 0;
    fan_refuse(PyExc_BufferError, "out: expected an array that can be written, got %s that %s",
               FAN_TYPE_TEXT(o), why);
refused:
    fan_value_release(out);
    return -1;
}
