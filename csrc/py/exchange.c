/* exchange: the one way in and out. Whatever a caller adds becomes a fan_value here, and every sum becomes a Python
 * object again.
 *
 *   in    None | ndarray | Python scalar | fanin's device array | NumPy scalar | Zero | anything else, as
 * fanin.arrays.describe says out   the value's own object, or a new one of its origin's kind (D15)
 *
 * An array's storage holds the object whose memory it is, and the value holds it as well: so a view outlives the value,
 * and an ndarray that nobody else has counts two references (see unshared in frontend.c).
 */
#include "py/dlpack.h"
#include "py/machine.h"

#include "base/interrupt.h"
#include "base/mem.h"
#include "device/cuda/cuda.h"

#include <numpy/arrayscalars.h>
#include <stdio.h>
#include <string.h>

/* D15, D5: the sum is of the kind of the first contribution of the lowest rank. */
enum { RANK_ARRAY, RANK_NUMPY_SCALAR, RANK_PYTHON_SCALAR };

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

/* view_ndarray: an ndarray's memory; its dtype has been looked at. */
static int view_ndarray(PyArrayObject *a, fan_dtype dtype, bool writable, fan_array **out)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "fanin is for 64-bit machines");
    FAN_RAW int64_t dims[2 * FAN_MAX_NDIM];
    int64_t *shape = dims, *strides = dims + FAN_MAX_NDIM;
    int ndim = PyArray_NDIM(a);
    FAN_RAW fan_error err;
    fan_storage *st;
    fan_status status;
    err.text[0] = '\0';
    for (int i = 0; i < ndim && i < FAN_MAX_NDIM; i++) {
        shape[i] = PyArray_DIM(a, i);
        strides[i] = PyArray_STRIDE(a, i);
    }
    st = fan_storage_wrap(PyArray_DATA(a), 0, release_object, a);
    if (!st) {
        PyErr_NoMemory();
        return -1;
    }
    Py_INCREF(a);
    status = fan_array_view(st, PyArray_BYTES(a), dtype, ndim, shape, strides, writable && PyArray_ISWRITEABLE(a), out,
                            &err);
    fan_storage_drop(st);
    return status == FAN_OK ? 0 : fan_refuse_error(status, &err);
}

static int import_ndarray(PyArrayObject *a, PyObject *object, fan_origin origin, bool writable, fan_value *out)
{
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(a));
    if (dtype == FAN_DT_NONE)
        return fan_dtype_refuse(PyArray_DESCR(a), origin == FAN_FROM_NUMPY_SCALAR ? "the scalar" : "the array");
    if (view_ndarray(a, dtype, writable, &out->array) < 0)
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
    return 0; /* counts say nothing here */
#endif
    Py_ssize_t refs = 1;
    if (v) { /* its storage has it, too, or an array over it; where somebody else may have that, nothing is known */
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

/* ndarray_still: of an array that is a view of an ndarray; others cannot be asked. */
static bool ndarray_still(const fan_array *a)
{
    const fan_storage *st = a->storage;
    if (!st || st->release != release_object || !PyArray_Check((PyObject *)st->ctx))
        return true;
    PyArrayObject *nd = st->ctx;
    int64_t lo, hi;
    if (a->size == 0) /* nothing is read */
        return true;
    if (PyArray_BYTES(nd) != a->data || PyArray_NDIM(nd) != a->ndim ||
        fan_dtype_of_descr(PyArray_DESCR(nd)) != a->dtype)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (PyArray_DIM(nd, i) != a->shape[i] || (a->shape[i] > 1 && PyArray_STRIDE(nd, i) != a->strides[i]))
            return false;
    fan_array_reach(a, &lo, &hi);
    return fan_owner_has((PyObject *)nd, a->data + lo, a->data + hi);
}

/* tensor_is: whether a torch tensor's memory is the array's. */
static bool tensor_is(PyObject *o, const fan_array *a)
{
    const fan_state *st = fan_state_get();
    fan_dl_tensor is;
    if (!st->torch_api || Py_TYPE(o) != st->torch_type || st->torch_api->look(o, &is) != 0) {
        PyErr_Clear();
        return false;
    }
    bool same = is.ndim == a->ndim && (a->size == 0 || (is.data && (char *)is.data + is.byte_offset == a->data));
    for (int i = 0; i < a->ndim && same; i++)
        same = is.shape[i] == a->shape[i];
    return same;
}

bool fan_value_still(const fan_value *v)
{
    fan_array *some[3];
    size_t n = fan_value_arrays(v, some, 3);
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return true;
    bool still = !v->own_memory || tensor_is(v->object, v->array);
    for (size_t i = 0; i < n && still; i++)
        still = ndarray_still(some[i]);
    fan_gil_leave(&gil);
    return still;
}

static void tensor_failed(void *ctx, const char *kind, const char *text)
{
    (void)ctx;
    (void)kind;
    (void)text; /* the general path tells, if it fails as well */
}

/* quick_tensors: how exact torch tensors are read by the fast path, told by fanin.arrays when it meets the first one.
 */
static PyObject *quick_tensors(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_state *st = fan_state_get();
    PyObject *type, *capsule, *is_neg, *requires_grad;
    int origin;
    if (!PyArg_ParseTuple(args, "O!OOOi:quick_tensors", &PyType_Type, &type, &capsule, &is_neg, &requires_grad,
                          &origin))
        return NULL;
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (!api || st->torch_api || !Py_TYPE(requires_grad)->tp_descr_get)
        Py_RETURN_FALSE;
    st->torch_type = (PyTypeObject *)Py_NewRef(type);
    st->torch_is_neg = Py_NewRef(is_neg);
    st->torch_requires_grad = Py_NewRef(requires_grad);
    st->torch_origin = (uint8_t)origin;
    st->torch_api = api;
    Py_RETURN_TRUE;
}

static int import_object(PyObject *o, PyObject *parts, fan_value *out);

/* not_summed: is `o` an ndarray of a dtype that we do not sum? A slot with combine= takes it as an object. */
static bool not_summed(PyObject *o)
{
    return PyArray_Check(o) && fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) == FAN_DT_NONE;
}

static int import_numpy_scalar(PyObject *o, bool has_combine, fan_value *out)
{
    PyObject *a = PyArray_FromScalar(o, NULL);
    int result = !a ? -1
                 : has_combine && not_summed(a)
                     ? import_object(o, NULL, out)
                     : import_ndarray((PyArrayObject *)a, o, FAN_FROM_NUMPY_SCALAR, false, out);
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
    FAN_RAW fan_error err;
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

static int shape_of(PyObject *o, int64_t *shape) { return ints_of("a shape", o, shape); }

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
    if (!dtype || fan_dtype_parse(dtype, &out->dtype) < 0 || (ndim = shape_of(shape, dims)) < 0)
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

/* ---- what _interop.describe says ---- */

/* The records of _interop/records.py are told apart by the number of their fields. */
enum { OBJECT_FIELDS = 1, REFUSED_FIELDS = 2, DENSE_FIELDS = 3, STORED_FIELDS = 8 };

/* device_named: the device of DLPack's numbers; its memory holds it from then on, so no hold is kept here. BufferError
 * where there is none. */
static int device_named(long type, long index, PyObject *producer, fan_device **out)
{
    *out = fan_cpu();
    if (type != FAN_DL_CUDA && type != FAN_DL_CUDA_MANAGED)
        return 0;
    if (fan_cuda_device_at(index, out) == 0)
        return 0;
    PyObject *why = fan_exception_take();
    fan_refuse(PyExc_BufferError, "the %.200s is on CUDA device %ld, which cannot be used: %S",
               Py_TYPE(producer)->tp_name, index, why);
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
    ndim = shape_of(shape, dims);
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

/* import_source: memory as fanin.arrays names it: an ndarray, fanin's device array, (capsule, device type, device
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
        return view_ndarray(nd, dtype, true, out);
    }
    if (PyTuple_Check(source))
        return (PyTuple_GET_SIZE(source) == 4 ? import_capsule : import_address)(source, producer, out, device);
    a = fan_array_arg(source, device);
    if (!a)
        return PyErr_Occurred()
                   ? -1
                   : fan_refuse(PyExc_TypeError, "expected an array, got a %.200s", Py_TYPE(source)->tp_name);
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
    out->own_memory = out->device == fan_cpu() && tensor_is(object, out->array);
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
    if (!PyArg_ParseTuple(d, "iOsOOOOp:Stored", &origin, &object, &name, &shape, &source[0], &source[1], &source[2],
                          &coalesced))
        return -1;
    if (!fan_format_from_name(name, &format))
        return fan_refuse(PyExc_ValueError, "expected a sparse format 'coo', 'csr', 'csc', 'bsr' or 'bsc', got '%s'",
                          name);
    ndim = shape_of(shape, dims);
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
        fan_interrupt_begin(&interrupt, fan_python.poll, &err);
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

/* collect_parts: the memory that an object says it holds; each part is an array we know, dense or sparse. */
static int collect_parts(PyObject *parts, fan_value *out)
{
    PyObject *fast = Py_TYPE(parts)->tp_iter || PySequence_Check(parts) ? PySequence_Tuple(parts) : NULL;
    Py_ssize_t n = fast ? PyTuple_GET_SIZE(fast) : 0;
    int result = -1;
    if (!fast)
        return PyErr_Occurred()
                   ? -1
                   : fan_refuse(PyExc_TypeError,
                                "__fanin_parts__() gave a %.200s; expected the arrays that the object holds",
                                Py_TYPE(parts)->tp_name);
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
            bad = fan_refuse(PyExc_TypeError,
                             "__fanin_parts__() gave a %.200s; expected the arrays that the object holds",
                             Py_TYPE(item)->tp_name);
        if (!bad) {
            k = fan_value_arrays(&v, out->parts + out->nparts, 3);
            for (size_t j = 0; j < k; j++)
                fan_array_hold(out->parts[out->nparts + j]);
            out->nparts += k;
            if (!out->device || !out->device->backend->has_streams)
                out->device = v.device;
        }
        fan_value_drop(&fan_python, &v);
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

/* import_described: what _interop.describe makes of it. The records of _interop/records.py differ in the number of
 * their fields. */
static int import_described(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    PyObject *arrays = fan_arrays(), *d = NULL;
    int result = -1;
    fan_stream *ready = fan_where_stream();
    PyObject *on = ready ? fan_stream_wrap(ready) : Py_NewRef(Py_None);
    if (arrays && on)
        d = PyObject_CallMethod(arrays, "describe", "OOOO", o, recording ? Py_True : Py_False,
                                has_combine ? Py_True : Py_False, on);
    Py_XDECREF(on);
    if (!d)
        return -1;
    switch (PyTuple_Check(d) ? PyTuple_GET_SIZE(d) : 0) {
    case DENSE_FIELDS:
        result = has_combine && not_summed(PyTuple_GET_ITEM(d, 2)) ? import_object(o, NULL, out) : import_dense(d, out);
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
        PyErr_SetString(PyExc_SystemError, "_interop.describe gave no record");
    }
    PyObject *live = fan_exception_take(); /* a capsule's destructor is another library's code */
    Py_DECREF(d);
    fan_exception_put(live);
    return result;
}

/* ---- memory of other libraries on a device: whose stream, whose allocator ---- */

/* A type whose arrays are read through its library's exchange table (read_by_table). */
#define ASKS_VALUE 256 /* beside its origin: what the table does not tell is asked of the array (torch) */

/* reads_by_table: how; its origin, and perhaps ASKS_VALUE. -1: it is no such type. */
static long reads_by_table(PyObject *o)
{
    const fan_state *st = fan_state_get();
    PyObject *how = st->table_types ? PyDict_GetItem(st->table_types, (PyObject *)Py_TYPE(o)) : NULL;
    return how ? PyLong_AsLong(how) : -1;
}

/* answers_false: whether an attribute, or a method without arguments, says False. */
static bool answers_false(PyObject *o, PyObject *name, bool method)
{
    PyObject *said = method ? PyObject_CallMethodNoArgs(o, name) : PyObject_GetAttr(o, name);
    Py_XDECREF(said);
    return said == Py_False;
}

/* holds_its_value: whether the memory that a table tells of holds the value of this array (dlpack.h, fan_dl_api). */
static bool holds_its_value(PyObject *o)
{
    const fan_state *st = fan_state_get();
    return answers_false(o, st->str_requires_grad, false) && answers_false(o, st->str_is_neg, true) &&
           answers_false(o, st->str_is_conj, true);
}

/* tensor_by_table: an array of a CUDA device, by its library's exchange table; the caller's to adopt. NULL: not by this
 * way, and nothing is said. */
static fan_dl_versioned *tensor_by_table(PyObject *o, const fan_dl_api *api, bool asks_value, fan_device **device)
{
    fan_dl_versioned *made = NULL;
    if ((asks_value && !holds_its_value(o)) || api->take(o, &made) != 0)
        made = NULL;
    if (made && made->major == FAN_DL_MAJOR && made->tensor.data &&
        (made->tensor.device.type == FAN_DL_CUDA || made->tensor.device.type == FAN_DL_CUDA_MANAGED) &&
        fan_cuda_device_at(made->tensor.device.id, device) == 0)
        return made;
    PyErr_Clear(); /* the other way says it, if there is anything to say */
    if (made && made->deleter)
        made->deleter(made);
    return NULL;
}

/* import_by_table: nothing waits for anything. 1: it is imported; 0: not by this way, and nothing is said; -1 with an
 * exception. */
static int import_by_table(PyObject *o, fan_value *out)
{
    long how = reads_by_table(o);
    const fan_dl_api *api = how < 0 ? NULL : fan_state_get()->tables[how % ASKS_VALUE];
    const fan_dl_device said = {-1, 0};
    fan_device *device = NULL;
    fan_dl_versioned *tensor = api ? tensor_by_table(o, api, how >= ASKS_VALUE, &device) : NULL;
    if (!tensor)
        return 0;
    int result = fan_dlpack_adopt(tensor, true, o, &said, how >= ASKS_VALUE ? FAN_DL_WRITE : FAN_DL_AS_IT_SAYS, device,
                                  &out->array);
    out->device = device; /* its memory holds it */
    fan_device_drop(device);
    if (result < 0)
        return -1;
    out->form = FAN_FORM_DENSE;
    out->dtype = out->array->dtype;
    out->origin = (uint8_t)(how % ASKS_VALUE);
    out->object = Py_NewRef(o);
    return 1;
}

/* handle_of_library: the handle of the current stream, on a CUDA device, of the library that owns an object: 1: it is
 * in *handle; 0: it tells none; -1 with an exception. */
static int handle_of_library(PyObject *o, const fan_device *d, unsigned long long *handle)
{
    long how = reads_by_table(o);
    const fan_dl_api *api = how < 0 ? NULL : fan_state_get()->tables[how % ASKS_VALUE];
    void *stream = NULL;
    if (api && api->current_stream(FAN_DL_CUDA, d->index, &stream) == 0) {
        *handle = (unsigned long long)(uintptr_t)stream;
        return 1;
    }
    PyErr_Clear();
    PyObject *arrays = fan_arrays();
    PyObject *said = arrays ? PyObject_CallMethod(arrays, "library_stream", "Oi", o, d->index) : NULL;
    if (!said || said == Py_None) {
        Py_XDECREF(said);
        return said ? 0 : -1;
    }
    *handle = PyLong_AsUnsignedLongLong(said);
    Py_DECREF(said);
    return *handle == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 1;
}

int fan_library_stream(const fan_value *v, fan_stream **out)
{
    unsigned long long handle = 0;
    *out = NULL;
    if (!v->device || !v->object || v->origin == FAN_FROM_DEVICE_ARRAY || !fan_cuda_of(v->device))
        return 0;
    fan_stream *pushed = fan_stream_pushed(v->device);
    fan_stream_drop(pushed);
    if (pushed)
        return 0;
    int told = handle_of_library((PyObject *)v->object, v->device, &handle);
    if (told <= 0)
        return told;
    *out = fan_cuda_stream_arg(v->device, handle);
    return *out ? 0 : -1;
}

/* release_loan: an array that a library allocated for a sum. */
static void release_loan(void *ctx)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    PyObject *live = fan_exception_take();
    Py_DECREF((PyObject *)ctx);
    fan_exception_put(live);
    fan_gil_leave(&gil);
}

/* is_what: whether a library's tensor is a gap-free one as it was asked for. */
static bool is_what(const fan_dl_tensor *t, const fan_device *d, fan_dtype dtype, int ndim, const int64_t *shape,
                    const int64_t *strides)
{
    if (t->device.type != FAN_DL_CUDA || t->device.id != d->index || t->ndim != ndim || t->dtype.lanes != 1 ||
        fan_dl_dtype_of(t->dtype) != dtype)
        return false;
    if (!t->data) /* sums without elements are not asked for */
        return false;
    for (int i = 0; i < ndim; i++)
        if (t->shape[i] != shape[i] || (shape[i] > 1 && t->strides && t->strides[i] != strides[i]))
            return false;
    return true;
}

/* allocated: a library's new array; NULL, without an exception, where it gives none. */
static PyObject *allocated(const fan_dl_api *api, const fan_device *d, fan_dtype dtype, int ndim, int64_t *shape,
                           int64_t *strides, fan_dl_tensor *is)
{
    fan_dl_tensor like = {.device = {FAN_DL_CUDA, d->index},
                          .ndim = ndim,
                          .dtype = fan_dl_dtype_for(dtype),
                          .shape = shape,
                          .strides = strides};
    fan_dl_versioned *managed = NULL;
    void *object = NULL;
    if (api->allocate(&like, &managed, NULL, tensor_failed) == 0 && managed && api->give(managed, &object) != 0)
        object = NULL;
    if (object && (api->look(object, is) != 0 || !is_what(is, d, dtype, ndim, shape, strides)))
        Py_CLEAR(object);
    PyErr_Clear();
    return object;
}

/* order_behind: `on` may write what was allocated on the library's current stream `from`: what ran there before on the
 * same memory comes first. */
static fan_status order_behind(fan_stream *on, fan_stream *from, fan_error *err)
{
    fan_event *e = NULL;
    if (on == from)
        return FAN_OK;
    FAN_TRY(fan_event_record(from, &e, err));
    fan_status status = fan_stream_wait(on, e, NULL, err);
    fan_event_drop(e);
    return status;
}

static fan_status fresh_from(const fan_dl_api *api, fan_device *d, fan_stream *on, fan_dtype dtype, int ndim,
                             int64_t *shape, int64_t *strides, const int64_t *steps, fan_array **out, fan_error *err)
{
    fan_dl_tensor is;
    fan_storage *st = NULL;
    fan_stream *from = NULL;
    fan_status status = FAN_OK;
    void *current = NULL;
    PyObject *object = api->current_stream(FAN_DL_CUDA, d->index, &current) == 0
                           ? allocated(api, d, dtype, ndim, shape, strides, &is)
                           : NULL;
    PyErr_Clear();
    if (!object)
        return FAN_OK;
    status = fan_memory_wrap(d, (char *)is.data + is.byte_offset, release_loan, object, &st, err);
    if (status != FAN_OK) {
        Py_DECREF(object);
        return status;
    }
    FAN_GO(fan_cuda_stream(d, (uint64_t)(uintptr_t)current, &from, err));
    fan_memory_set_stream(st, from);
    FAN_GO(order_behind(on, from, err));
    FAN_GO(fan_memory_record_stream(st, on, err));
    FAN_GO(fan_array_view(st, st->data, dtype, ndim, shape, steps, true, out, err));
done:
    fan_stream_drop(from);
    fan_storage_drop(st);
    return status;
}

fan_status fan_fresh(uint8_t origin, fan_device *d, fan_stream *on, fan_dtype dtype, int ndim, const int64_t *shape,
                     const fan_array *like, fan_array **out, fan_error *err)
{
    const fan_state *state = fan_state_get();
    const fan_dl_api *api = state && origin >= FAN_FROM_FOREIGN && fan_cuda_of(d) ? state->tables[origin] : NULL;
    int64_t dims[FAN_MAX_NDIM], strides[FAN_MAX_NDIM], steps[FAN_MAX_NDIM], size = 1;
    uint64_t capture;
    fan_gil gil;
    *out = NULL;
    if (!api || !on)
        return FAN_OK;
    FAN_TRY(fan_stream_capture(on, &capture, err));
    fan_dense_strides(ndim, shape, fan_dtype_size(dtype), like, steps);
    for (int i = ndim - 1; i >= 0; i--) {
        dims[i] = shape[i];
        strides[i] = size;
        size *= shape[i];
    }
    if (capture || !size) /* its allocator is not asked inside a capture: whose pool it would be is not known */
        return FAN_OK;
    for (int i = 0; i < ndim; i++)
        if (dims[i] > 1 && steps[i] != strides[i] * (int64_t)fan_dtype_size(dtype))
            return FAN_OK; /* its allocator makes C order alone (D16) */
    if (!fan_gil_enter(&gil))
        return FAN_OK;
    PyObject *live = fan_exception_take();
    fan_status status = fresh_from(api, d, on, dtype, ndim, dims, strides, steps, out, err);
    fan_exception_put(live);
    fan_gil_leave(&gil);
    return status;
}

/* leaving: an object of a library's leaves us: its allocator, or a second hold on its memory, is told of all the
 * streams that used it (Lifetime). What fails here is shown by sys.unraisablehook: the object must not be lost. */
static void leaving(PyObject *object, const fan_value *v)
{
    fan_array *few[3];
    size_t n = fan_value_arrays(v, few, 3);
    fan_array *const *parts = v->form == FAN_FORM_OBJECT ? v->parts : few;
    PyObject *arrays = fan_arrays(), *streams = arrays ? PyList_New(0) : NULL, *done = NULL;
    for (size_t i = 0; streams && i < n; i++) {
        fan_stream *user;
        for (size_t k = 0; streams && (user = fan_memory_user(parts[i]->storage, k)); k++) {
            PyObject *s = fan_stream_wrap(user);
            int known = s ? PySequence_Contains(streams, s) : -1;
            if (known < 0 || (known == 0 && PyList_Append(streams, s) < 0))
                Py_CLEAR(streams);
            Py_XDECREF(s);
            fan_stream_drop(user);
        }
    }
    if (streams && PyList_GET_SIZE(streams))
        done = PyObject_CallMethod(arrays, "leaving", "OiO", object, v->device->index, streams);
    else if (streams)
        done = Py_NewRef(Py_None);
    if (!done)
        PyErr_WriteUnraisable(object);
    Py_XDECREF(done);
    Py_XDECREF(streams);
}

/* holder: what keeps memory until streams have passed: a capsule over a storage. */
static void holder_gone(PyObject *capsule)
{
    fan_storage *st = PyCapsule_GetPointer(capsule, "fanin.holder");
    PyObject *live = fan_exception_take();
    Py_BEGIN_ALLOW_THREADS fan_storage_drop(st);
    Py_END_ALLOW_THREADS fan_exception_put(live);
}

static PyObject *hold_for(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *owner, *streams, *capsule = NULL;
    fan_storage *st = NULL;
    fan_error err = {0};
    fan_status status = FAN_OK;
    fan_stream *s = NULL;
    if (!PyArg_ParseTuple(args, "OO!:hold_for", &owner, &PyList_Type, &streams))
        return NULL;
    for (Py_ssize_t i = 0; status == FAN_OK && i < PyList_GET_SIZE(streams); i++) {
        if (fan_stream_arg(PyList_GET_ITEM(streams, i), &s) < 0)
            goto done;
        if (!s) {
            PyErr_SetString(PyExc_TypeError, "hold_for: expected streams, got None");
            goto done;
        }
        if (!st && (status = fan_memory_wrap(s->device, NULL, release_loan, owner, &st, &err)) == FAN_OK)
            Py_INCREF(owner);
        if (status == FAN_OK)
            status = fan_memory_record_stream(st, s, &err);
        fan_stream_drop(s);
    }
    if (status != FAN_OK)
        fan_raise(status, &err);
    else if (!st)
        PyErr_SetString(PyExc_ValueError, "hold_for: expected streams");
    else
        capsule = PyCapsule_New(st, "fanin.holder", holder_gone);
done:
    if (!capsule)
        fan_storage_drop(st);
    return capsule;
}

/* ---- in ---- */

static int import_any(PyObject *o, bool recording, bool has_combine, fan_value *out)
{
    fan_state *st = fan_state_get();
    fan_array *a;
    fan_device *device;
    int known;
    if (PyArray_CheckExact(o) && !recording) {
        if (PyArray_DESCR((PyArrayObject *)o)->type_num == NPY_OBJECT || (has_combine && not_summed(o)))
            return import_object(o, NULL, out);
        return import_ndarray((PyArrayObject *)o, o, FAN_FROM_NDARRAY, true, out);
    }
    if (o == Py_None)
        return 0;
    if (!recording) {
        known = import_python_scalar(o, out);
        if (known != 0)
            return known < 0 ? -1 : 0;
        a = fan_array_arg(o, &device);
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
        known = import_by_table(o, out);
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
    PyObject *live = fan_exception_take();
    fan_value_drop(&fan_python, out);
    fan_exception_put(live);
    return -1;
}

int fan_import_object(PyObject *o, fan_value *out)
{
    *out = (fan_value){.dtype = FAN_DT_NONE};
    if (import_described(o, true, true, out) == 0)
        return 0;
    PyObject *live = fan_exception_take();
    fan_value_drop(&fan_python, out);
    fan_exception_put(live);
    return -1;
}

/* meets_itself: two elements may share a byte. Exact where the axes nest, which those of every ordinary view do; else
 * yes. */
static bool meets_itself(const fan_array *a)
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
    if (fan_import(o, false, false, out) < 0)
        return -1;
    if (out->form == FAN_FORM_DENSE && (out->origin == FAN_FROM_PYTHON_SCALAR || out->origin == FAN_FROM_NUMPY_SCALAR))
        fan_value_drop(&fan_python, out);
    if (out->form != FAN_FORM_DENSE) {
        fan_value_drop(&fan_python, out);
        return fan_refuse(PyExc_TypeError, "out: expected a dense array to write into, got a %.200s",
                          Py_TYPE(o)->tp_name);
    }
    if (!out->array->writable)
        why = "is read-only";
    else if (meets_itself(out->array))
        why = "overlaps itself";
    else if (out->object != o)
        why = "is read through a detached copy or view: give x.detach()"; /* what is written might not be seen in `o` */
    if (why) {
        fan_value_drop(&fan_python, out);
        return fan_refuse(PyExc_BufferError, "out: expected an array that can be written, got a %.200s that %s",
                          Py_TYPE(o)->tp_name, why);
    }
    return 0;
}

/* ---- out ---- */

static void array_gone(PyObject *capsule)
{
    fan_array *a = PyCapsule_GetPointer(capsule, "fanin.array");
    PyObject *live = fan_exception_take();
    fan_array_drop(a);
    fan_exception_put(live);
}

PyObject *fan_export_array(fan_array *a)
{
    FAN_RAW npy_intp shape[FAN_MAX_NDIM];
    FAN_RAW npy_intp strides[FAN_MAX_NDIM];
    PyArray_Descr *descr;
    PyObject *nd, *base;
    if (fan_dtype_needs_ml_dtypes(a->dtype)) {
        /* Only where torch's bfloat16 or float8 met NumPy's arrays and the caller has no ml_dtypes: nothing is lost in
         * float32. */
        fan_array *wide = NULL;
        fan_error err = {0};
        fan_status status = fan_array_new(FAN_DT_FLOAT32, a->ndim, a->shape, a, &wide, &err);
        if (status != FAN_OK)
            return fan_raise(status, &err);
        fan_array_copy(wide, a);
        nd = fan_export_array(wide);
        fan_array_drop(wide);
        return nd;
    }
    descr = fan_descr_of_dtype(a->dtype);
    if (!descr)
        return NULL;
    for (int i = 0; i < a->ndim; i++) {
        shape[i] = a->shape[i];
        strides[i] = a->strides[i];
    }
    if (a->size == 0)
        return PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, shape, NULL, NULL, 0, NULL);
    nd = PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, shape, strides, a->data,
                              a->writable ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (!nd)
        return NULL;
    base = PyCapsule_New(a, "fanin.array", array_gone);
    if (base)
        fan_array_hold(a);
    if (!base || PyArray_SetBaseObject((PyArrayObject *)nd, base) < 0)
        Py_CLEAR(nd);
    return nd;
}

/* export_part: what fanin.arrays gets of an array: fanin's device array, or an exporter. */
static PyObject *export_part(fan_array *a, fan_device *d)
{
    return d && d->backend->has_streams ? fan_array_wrap(a, d) : fan_exporter_new(a);
}

static PyObject *export_shape(int ndim, const int64_t *shape)
{
    PyObject *t = PyTuple_New(ndim);
    for (int i = 0; t && i < ndim; i++) {
        PyObject *n = PyLong_FromLongLong(shape[i]);
        if (!n) {
            Py_DECREF(t);
            return NULL;
        }
        PyTuple_SET_ITEM(t, i, n);
    }
    return t;
}

/* loan: the library's own array, where the sum was written into one. Borrowed. */
static PyObject *loan(const fan_value *v)
{
    const fan_dl_api *api = v->origin >= FAN_FROM_FOREIGN ? fan_state_get()->tables[v->origin] : NULL;
    PyObject *o = api ? fan_memory_wrapped(v->array->storage, release_loan) : NULL;
    int64_t strides[FAN_MAX_NDIM];
    fan_dl_tensor is;
    for (int i = 0; i < v->array->ndim; i++)
        strides[i] = v->array->strides[i] / (int64_t)fan_dtype_size(v->dtype);
    if (!o || api->look(o, &is) != 0 || (char *)is.data + is.byte_offset != v->array->data ||
        !is_what(&is, v->device, v->dtype, v->array->ndim, v->array->shape, strides)) {
        PyErr_Clear();
        return NULL;
    }
    return o;
}

static PyObject *export_device(const fan_value *v)
{
    PyObject *part, *arrays, *made, *o = loan(v);
    if (o) {
        Py_INCREF(o);
        leaving(o, v);
        return o;
    }
    part = fan_array_wrap(v->array, v->device);
    if (!part || v->origin < FAN_FROM_FOREIGN || !fan_cuda_of(v->device))
        return part;
    arrays = fan_arrays();
    made = arrays ? PyObject_CallMethod(arrays, "export_device", "iO", (int)v->origin, part) : NULL;
    Py_DECREF(part);
    return made;
}

static PyObject *export_dense(const fan_value *v)
{
    PyObject *arrays, *nd, *part, *scalar;
    if (v->device && v->device->backend->has_streams)
        return export_device(v);
    if (v->origin >= FAN_FROM_FOREIGN) {
        arrays = fan_arrays();
        part = arrays ? fan_exporter_new(v->array) : NULL;
        nd = part ? PyObject_CallMethod(arrays, "export_dense", "iO", (int)v->origin, part) : NULL;
        Py_XDECREF(part);
        return nd;
    }
    nd = fan_export_array(v->array);
    if (!nd || v->array->ndim > 0 || (v->origin != FAN_FROM_PYTHON_SCALAR && v->origin != FAN_FROM_NUMPY_SCALAR))
        return nd;
    scalar = PyArray_Return((PyArrayObject *)nd); /* steals */
    if (!scalar || v->origin == FAN_FROM_NUMPY_SCALAR)
        return scalar;
    /* NumPy's own scalars know their Python twin; those of ml_dtypes are floats. */
    nd = fan_dtype_kind(v->dtype) == 'f' ? PyNumber_Float(scalar) : PyObject_CallMethod(scalar, "item", NULL);
    Py_DECREF(scalar);
    return nd;
}

static PyObject *export_sparse(const fan_value *v)
{
    const fan_sparse *s = v->sparse;
    PyObject *arrays = fan_arrays(), *shape = NULL, *indices = NULL, *pointers = NULL, *values = NULL, *o = NULL;
    if (!arrays)
        return NULL;
    shape = export_shape(s->ndim, s->shape);
    indices = shape ? export_part(s->indices, v->device) : NULL;
    pointers = !indices ? NULL : s->pointers ? export_part(s->pointers, v->device) : Py_NewRef(Py_None);
    values = pointers ? export_part(s->values, v->device) : NULL;
    if (values)
        o = PyObject_CallMethod(arrays, "export_sparse", "isOOOOO", (int)v->origin, fan_format_name(s->format), shape,
                                indices, pointers, values, s->coalesced ? Py_True : Py_False);
    Py_XDECREF(shape);
    Py_XDECREF(indices);
    Py_XDECREF(pointers);
    Py_XDECREF(values);
    return o;
}

static PyObject *export_zero(const fan_value *v)
{
    fan_state *st = fan_state_get();
    PyObject *type = fan_lazy(&st->zero_type, "fanin.slots", "Zero"), *shape, *o;
    if (!type)
        return NULL;
    shape = export_shape(v->array->ndim, v->array->shape);
    o = shape ? PyObject_CallFunction(type, "Os", shape, fan_dtype_name(v->dtype)) : NULL;
    Py_XDECREF(shape);
    return o;
}

PyObject *fan_export(fan_value *v)
{
    PyObject *o = NULL, *live;
    if (v->form == FAN_FORM_UNDEFINED)
        o = Py_NewRef(Py_None);
    else if (v->object) {
        o = Py_NewRef((PyObject *)v->object);
        if (v->device && v->origin != FAN_FROM_DEVICE_ARRAY && fan_cuda_of(v->device))
            leaving(o, v);
    } else if (v->form == FAN_FORM_DENSE)
        o = export_dense(v);
    else if (v->form == FAN_FORM_SPARSE)
        o = export_sparse(v);
    else if (v->form == FAN_FORM_ZERO)
        o = export_zero(v);
    else
        PyErr_SetString(PyExc_SystemError, "an object's sum without an object");
    live = fan_exception_take();
    fan_value_drop(&fan_python, v);
    fan_exception_put(live);
    return o;
}

/* ---- what fanin.arrays and fanin.slots ask ---- */

static PyObject *dtype_name(PyObject *Py_UNUSED(module), PyObject *o)
{
    fan_dtype d;
    if (fan_dtype_parse(o, &d) < 0)
        return NULL;
    if (d == FAN_DT_NONE)
        Py_RETURN_NONE;
    return PyUnicode_FromString(fan_dtype_name(d));
}

static PyObject *can_cast(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from, *to;
    fan_dtype one, two;
    if (!PyArg_ParseTuple(args, "OO:can_cast", &from, &to) || fan_dtype_parse(from, &one) < 0 ||
        fan_dtype_parse(to, &two) < 0)
        return NULL;
    return PyBool_FromLong(one != FAN_DT_NONE && two != FAN_DT_NONE && fan_dtype_can_cast(one, two));
}

/* table_arg: an exchange table that is known; NULL with TypeError. */
static const fan_dl_api *table_arg(PyObject *capsule)
{
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (!api)
        PyErr_Format(PyExc_TypeError, "expected DLPack's exchange table of version %d, got %.200s", FAN_DL_MAJOR,
                     Py_TYPE(capsule)->tp_name);
    return api;
}

static PyObject *table_known(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    int origin;
    if (!PyArg_ParseTuple(args, "Oi:table_known", &capsule, &origin))
        return NULL;
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (origin >= FAN_FROM_FOREIGN && origin < 256)
        fan_state_get()->tables[origin] = api;
    return PyBool_FromLong(api != NULL);
}

static PyObject *read_by_table(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_state *st = fan_state_get();
    PyObject *type, *how = NULL;
    int origin, asks_value;
    if (!PyArg_ParseTuple(args, "O!ip:read_by_table", &PyType_Type, &type, &origin, &asks_value) ||
        (!st->table_types && !(st->table_types = PyDict_New())))
        return NULL;
    if (origin < FAN_FROM_FOREIGN || origin > 255) {
        if (PyDict_Contains(st->table_types, type) > 0 && PyDict_DelItem(st->table_types, type) < 0)
            return NULL;
    } else if (!(how = PyLong_FromLong(origin + (asks_value ? ASKS_VALUE : 0))) ||
               PyDict_SetItem(st->table_types, type, how) < 0) {
        Py_XDECREF(how);
        return NULL;
    }
    Py_XDECREF(how);
    Py_RETURN_NONE;
}

static PyObject *table_take(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *object, *made;
    fan_dl_versioned *managed = NULL;
    const fan_dl_api *api;
    if (!PyArg_ParseTuple(args, "OO:table_take", &capsule, &object) || !(api = table_arg(capsule)))
        return NULL;
    if (api->take(object, &managed) != 0 || !managed)
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_BufferError, "the exchange table of %.200s gave no tensor",
                                               Py_TYPE(object)->tp_name);
    made = fan_dlpack_capsule(managed);
    if (!made && managed->deleter)
        managed->deleter(managed);
    return made;
}

static PyObject *table_give(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *tensor;
    const fan_dl_api *api;
    void *object = NULL;
    if (!PyArg_ParseTuple(args, "OO:table_give", &capsule, &tensor) || !(api = table_arg(capsule)))
        return NULL;
    fan_dl_versioned *managed = PyCapsule_GetPointer(tensor, "dltensor_versioned");
    if (!managed || PyCapsule_SetName(tensor, "used_dltensor_versioned") < 0)
        return NULL;
    if (api->give(managed, &object) != 0 || !object) /* which had it, errors too */
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_BufferError, "the exchange table gave no array");
    return object;
}

static PyObject *table_stream(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    const fan_dl_api *api;
    void *stream = NULL;
    int index;
    if (!PyArg_ParseTuple(args, "Oi:table_stream", &capsule, &index) || !(api = table_arg(capsule)))
        return NULL;
    if (api->current_stream(FAN_DL_CUDA, index, &stream) != 0)
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_BufferError,
                                               "the exchange table told no current stream of CUDA device %d", index);
    return PyLong_FromVoidPtr(stream);
}

PyMethodDef fan_exchange_functions[] = {
    {"table_known", table_known, METH_VARARGS,
     "table_known(table, origin, /)\n--\n\nSums of this origin are allocated by this exchange table from now on (None: "
     "by the core); whether it is one that is known."},
    {"read_by_table", read_by_table, METH_VARARGS,
     "read_by_table(type, origin, asks_value, /)\n--\n\nArrays of this very type that are on a CUDA device are read by "
     "the exchange table of their origin from now on; origin -1: no longer. asks_value: is_neg, is_conj and "
     "requires_grad "
     "are asked first."},
    {"table_take", table_take, METH_VARARGS,
     "table_take(table, x, /)\n--\n\nA capsule over x by its exchange table: nothing waits for anything."},
    {"table_give", table_give, METH_VARARGS,
     "table_give(table, capsule, /)\n--\n\nA library's array over what a capsule holds."},
    {"table_stream", table_stream, METH_VARARGS,
     "table_stream(table, device, /)\n--\n\nThe handle of a library's current stream on a CUDA device."},
    {"hold_for", hold_for, METH_VARARGS,
     "hold_for(owner, streams, /)\n--\n\nWhat keeps `owner`, once it is let go itself, until all that the streams have "
     "queued by then has run."},
    {"quick_tensors", quick_tensors, METH_VARARGS,
     "quick_tensors(type, table, is_neg, requires_grad, origin, /)\n--\n\nRead exact torch tensors through torch's "
     "exchange table from now on; whether it is one that is known."},
    {"dtype_name", dtype_name, METH_O,
     "dtype_name(dtype, /)\n--\n\nThe name of a dtype that is summed (NumPy's, torch's, a name); None for None."},
    {"can_cast", can_cast, METH_VARARGS,
     "can_cast(from_dtype, to_dtype, /)\n--\n\nWhether a gradient is cast so (D6)."},
    {NULL, NULL, 0, NULL},
};
