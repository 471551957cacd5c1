#include "py/import_memory.h"

#include "py/backends.h"
#include "py/dlpack_import.h"

#include "base/interrupt.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

static void release_object(fan_storage *s)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    PyObject *live = fan_exception_take();
    Py_DECREF((PyObject *)s->ctx);
    fan_exception_put(live);
    fan_gil_leave(&gil);
}

int fan_view_ndarray(PyArrayObject *a, fan_dtype dtype, bool writable, fan_array **out)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "fanin is for 64-bit machines");
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    err.text[0] = '\0';
    const fan_storage of = {.data = PyArray_DATA(a), .release = release_object, .ctx = a};
    status = fan_array_foreign(&of, PyArray_BYTES(a), dtype, PyArray_NDIM(a), (const int64_t *)PyArray_DIMS(a),
                               (const int64_t *)PyArray_STRIDES(a), writable && PyArray_ISWRITEABLE(a), out, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    Py_INCREF(a);
    return 0;
}

int fan_import_ndarray(PyArrayObject *a, PyObject *object, fan_origin origin, bool writable, fan_value *out)
{
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(a));
    if (dtype == FAN_DT_NONE)
        return fan_dtype_refuse(PyArray_DESCR(a), origin == FAN_FROM_NUMPY_SCALAR ? "the scalar" : "the array");
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
    if (v) { /* its storage has it, too, or an array over it; other code may have that, so it cannot be counted */
        const fan_storage *st = v->form == FAN_FORM_DENSE && v->array ? v->array->storage : NULL;
        if (!st || st->release != release_object || atomic_load(&v->array->refs) != 1 || atomic_load(&st->refs) != 1)
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

/* is_array: a fanin.Array, which is what it was made as: over an ndarray's memory it may be any view of that. */
static bool is_array(PyObject *o) { return o && Py_TYPE(o) == fan_state_get()->array_type; }

/* ndarray_is_unchanged: of an array that is a view of an ndarray, all of it unless it is a `part`; others cannot be
 * asked. */
static bool ndarray_is_unchanged(const fan_array *a, bool part)
{
    const fan_storage *st = a->storage;
    if (!st || st->release != release_object || !PyArray_Check((PyObject *)st->ctx))
        return true;
    PyArrayObject *nd = st->ctx;
    int64_t lo, hi;
    if (a->size == 0) /* nothing is read */
        return true;
    if (!part && (PyArray_BYTES(nd) != a->data || PyArray_NDIM(nd) != a->ndim ||
                  fan_dtype_of_descr(PyArray_DESCR(nd)) != a->dtype))
        return false;
    for (int i = 0; i < a->ndim && !part; i++)
        if (PyArray_DIM(nd, i) != a->shape[i] || (a->shape[i] > 1 && PyArray_STRIDE(nd, i) != a->strides[i]))
            return false;
    fan_array_reach(a, &lo, &hi);
    return fan_owner_has((PyObject *)nd, a->data + lo, a->data + hi);
}

bool fan_tensor_has(PyObject *o, const fan_array *a)
{
    const fan_state *st = fan_state_get();
    fan_dl_tensor is;
    if (!fan_is_tensor(st, o) || !fan_tensor_look(st, o, &is))
        return false;
    bool same = is.ndim == a->ndim && (a->size == 0 || (is.data && (char *)is.data + is.byte_offset == a->data));
    for (int i = 0; i < a->ndim && same; i++)
        same = is.shape[i] == a->shape[i];
    return same;
}

bool fan_value_is_unchanged(const fan_value *v)
{
    fan_array *some[3];
    size_t n = fan_value_arrays(v, some, 3);
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return true;
    bool unchanged = !v->own_memory || fan_tensor_has(v->object, v->array);
    for (size_t i = 0; i < n && unchanged; i++)
        unchanged = ndarray_is_unchanged(some[i], is_array(v->object));
    fan_gil_leave(&gil);
    return unchanged;
}

/* fan_is_not_summed: is `o` an ndarray of a dtype that we do not sum? A slot with combine= takes it as an object. */
bool fan_is_not_summed(PyObject *o)
{
    return PyArray_Check(o) && fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) == FAN_DT_NONE;
}

/* ints_of: a tuple of ints that fanin itself made or checked, a shape or strides. Returns the rank, -1 with an
 * exception. */
static int ints_of(const char *what, PyObject *o, int64_t *shape)
{
    Py_ssize_t n = PyTuple_Check(o) ? PyTuple_GET_SIZE(o) : -1;
    if (n < 0 || n > FAN_MAX_NDIM)
        return fan_refuse(n < 0 ? PyExc_TypeError : PyExc_ValueError, "expected %s, a tuple of at most %d ints, got %R",
                          what, FAN_MAX_NDIM, o);
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

int fan_shape_tuple(PyObject *o, int64_t *shape) { return ints_of("a shape", o, shape); }

/* device_named: the device of DLPack's numbers; its memory holds it from then on, so no hold is kept here. BufferError
 * where there is none. */
static int device_named(long type, long index, PyObject *producer, fan_device **out)
{
    const fan_backend_entry *b = fan_backend_of_dlpack(type);
    *out = fan_cpu();
    if (!b || !b->backend->has_streams)
        return 0;
    if (index < 0 || index > INT32_MAX)
        PyErr_Format(PyExc_ValueError, "there is no %s:%ld: no machine has so many devices", b->backend->name, index);
    else if (fan_backend_device(b, index, out) == 0)
        return 0;
    PyObject *why = fan_exception_take();
    fan_refuse(PyExc_BufferError, "the %.200s is on %s:%ld, which cannot be used: %S", Py_TYPE(producer)->tp_name,
               b->backend->name, index, why);
    Py_XDECREF(why);
    return -1;
}

static int import_capsule(PyObject *source, PyObject *producer, fan_array **out, fan_device **device)
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

/* import_address: (address, dtype, shape, strides or None, writable, device index), of __cuda_array_interface__. */
static int import_address(PyObject *source, PyObject *producer, fan_array **out, fan_device **device)
{
    PyObject *dtype, *shape, *strides;
    int64_t dims[FAN_MAX_NDIM], steps[FAN_MAX_NDIM];
    unsigned long long address;
    fan_dtype d;
    long index;
    int writable, ndim;
    if (!PyArg_ParseTuple(source, "KOOOpl:source", &address, &dtype, &shape, &strides, &writable, &index) ||
        fan_dtype_parse(dtype, &d) < 0)
        return -1;
    ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0 || (strides != Py_None && ints_of("strides", strides, steps) != ndim))
        return PyErr_Occurred()
                   ? -1
                   : fan_refuse(PyExc_ValueError, "the array has %d axes and the strides %R", ndim, strides);
    if (device_named(FAN_DL_CUDA, index, producer, device) < 0)
        return -1;
    int result =
        fan_address_take(address, d, ndim, dims, strides == Py_None ? NULL : steps, writable, producer, *device, out);
    fan_device_drop(*device);
    return result;
}

/* import_source: memory as _interop.arrays names it: an ndarray, fanin's device array, (capsule, device type, device
 * index, fan_dl_writes), or what an address is (import_address). */
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
        return (PyTuple_GET_SIZE(source) == 4 ? import_capsule : import_address)(source, producer, out, device);
    a = fan_array_arg(source, device);
    if (!a)
        return PyErr_Occurred() ? -1 : fan_refuse(PyExc_TypeError, "expected an array, got %s", FAN_TYPE_TEXT(source));
    if (fan_array_usable(a) < 0)
        return -1;
    *out = fan_array_hold(a);
    return 0;
}

int fan_import_dense(PyObject *d, fan_value *out)
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

int fan_import_sparse(PyObject *d, fan_value *out)
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
    if (!PyArg_ParseTuple(d, "iOsOOOOp:Stored", &origin, &object, &name, &shape, &source[0], &source[1], &source[2],
                          &coalesced))
        return -1;
    if (!fan_format_from_name(name, &format))
        return fan_refuse(PyExc_ValueError, "expected a sparse format 'coo', 'csr', 'csc', 'bsr' or 'bsc', got '%s'",
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
    status = fan_sparse_new(format, ndim, dims, part[0], part[1], part[2], coalesced, &out->sparse, &err);
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
