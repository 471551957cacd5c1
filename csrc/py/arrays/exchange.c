/* exchange: functions for fanin._interop and fanin.slots. In this order: how torch tensors are read
 * without a call; arrays on devices; dtypes; exchange tables; memory that is kept until streams
 * have passed. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/arrays/dlpack.h"
#include "py/device/backends.h"

/* is_own: whether a descriptor is of this kind and for objects of this type, so that we may call
 * its function ourselves. */
static bool is_own(PyObject *type, PyObject *descriptor, const PyTypeObject *kind)
{
    return Py_TYPE(descriptor) == kind &&
           PyType_IsSubtype((PyTypeObject *)type, ((PyDescrObject *)descriptor)->d_type);
}

static bool is_getter(PyObject *type, PyObject *descriptor)
{
    return is_own(type, descriptor, &PyGetSetDescr_Type) &&
           ((PyGetSetDescrObject *)descriptor)->d_getset->get;
}

/* is_plain_test: whether fan_tensor_look can read a tuple: a function without arguments, then pairs
 * of a getter and its value. */
static bool is_plain_test(PyObject *type, PyObject *plain)
{
    Py_ssize_t n = PyTuple_GET_SIZE(plain);
    if (n % 2 == 0)
        return false;
    PyObject *runs_python = PyTuple_GET_ITEM(plain, 0);
    if (!PyCFunction_CheckExact(runs_python) || PyCFunction_GET_FLAGS(runs_python) != METH_NOARGS)
        return false;
    for (Py_ssize_t i = 1; i < n; i += 2) {
        if (!is_getter(type, PyTuple_GET_ITEM(plain, i)))
            return false;
    }
    return true;
}

/* quick_tensors: how exact torch tensors are read as plain contributions; _interop.torch calls this
 * for the first one. Returns False where this version of torch cannot be read so. */
static PyObject *quick_tensors(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_state *st = fan_state_get();
    PyObject *type = a[0];
    PyObject *is_neg = a[2];
    PyObject *requires_grad = a[3];
    PyObject *plain = a[4];
    int64_t origin;
    if (fan_number_arg(a[6], "quick_tensors: origin", &origin) < 0)
        return NULL;
    const fan_dl_api *api = fan_dl_api_of(a[1]);
    if (!api || st->torch_api)
        Py_RETURN_FALSE;
    if (!is_own(type, is_neg, &PyMethodDescr_Type) ||
        ((PyMethodDescrObject *)is_neg)->d_method->ml_flags != METH_NOARGS)
        Py_RETURN_FALSE;
    if (!is_getter(type, requires_grad) || !is_plain_test(type, plain))
        Py_RETURN_FALSE;
    st->torch_type = (PyTypeObject *)Py_NewRef(type);
    st->torch_is_neg = Py_NewRef(is_neg);
    st->torch_requires_grad = Py_NewRef(requires_grad);
    st->torch_plain = Py_NewRef(plain);
    st->torch_graph = Py_NewRef(a[5]);
    st->torch_origin = (uint8_t)origin;
    st->torch_api = api;
    Py_RETURN_TRUE;
}

/* fill: copies `init` to the array on the device and waits for that. */
static fan_status fill(fan_device *d, const fan_array *a, const fan_array *init, fan_error *err)
{
    fan_operand from = {
        .array = init,
        .acc = init->dtype,
    };
    fan_job job = {
        .kind = FAN_JOB_UPLOAD,
        .out = a,
        .in = &from,
        .n = 1,
        .label = "array",
    };
    fan_stream *s = d->backend->current(d);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    fan_status status = fan_device_run(d, s, &job, err);
    if (status == FAN_OK)
        status = fan_stream_sync(s, err);
    /* The copy may still run: the memory, which has no owner, is freed after it. */
    if (status != FAN_OK)
        (void)fan_memory_record_stream(a->storage, s, NULL);
    fan_stream_drop(s);
    return status;
}

static PyObject *device_array(PyObject *Py_UNUSED(module), PyObject *const *values)
{
    PyObject *where = values[0];
    PyArrayObject *from = (PyArrayObject *)values[1];
    bool empty = values[2] == Py_True;
    PyObject *made = NULL;
    fan_device *d = NULL;
    fan_array *init = NULL;
    if (fan_device_arg(where, &d) < 0)
        return NULL;
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(from));
    bool is_numbers = dtype != FAN_DT_NONE && PyArray_NDIM(from) <= FAN_MAX_NDIM;
    if (!is_numbers || !d || !d->backend->has_streams) {
        PyErr_Format(PyExc_ValueError,
                     "device_array: expected a device with streams and an array of numbers, got %R "
                     "and dtype %R",
                     where, PyArray_DESCR(from));
    } else if (fan_view_ndarray(from, dtype, false, &init) == 0) {
        fan_array *a = NULL;
        fan_error err = {0};
        fan_status status;
        Py_BEGIN_ALLOW_THREADS
            status = fan_device_array(d, NULL, dtype, init->ndim, init->shape, init, &a, &err);
            if (status == FAN_OK && !empty)
                status = fill(d, a, init, &err);
        Py_END_ALLOW_THREADS
        if (status == FAN_OK)
            made = fan_array_wrap(a, d);
        else
            fan_raise(status, &err);
        fan_array_drop(a);
    }
    fan_array_drop(init);
    fan_device_drop(d);
    return made;
}

/* ---- queries of _interop and fanin.slots ---- */

static PyObject *dtype_name(PyObject *Py_UNUSED(module), PyObject *o)
{
    fan_dtype d;
    if (fan_dtype_parse(o, &d) < 0)
        return NULL;
    if (d == FAN_DT_NONE)
        Py_RETURN_NONE;
    return PyUnicode_FromString(fan_dtype_name(d));
}

static PyObject *can_cast(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_dtype from;
    fan_dtype to;
    if (fan_dtype_parse(a[0], &from) < 0)
        return NULL;
    if (fan_dtype_parse(a[1], &to) < 0)
        return NULL;
    bool known = from != FAN_DT_NONE && to != FAN_DT_NONE;
    return PyBool_FromLong(known && fan_dtype_can_cast(from, to));
}

static PyObject *is_no_gradient(PyObject *Py_UNUSED(module), PyObject *o)
{
    return PyBool_FromLong(fan_is_no_gradient(o));
}

/* table_arg: an exchange table that is known; NULL with TypeError. */
static const fan_dl_api *table_arg(PyObject *capsule)
{
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (!api) {
        PyErr_Format(PyExc_TypeError, "expected DLPack's exchange table of version %d, got %.200s",
                     FAN_DL_MAJOR, Py_TYPE(capsule)->tp_name);
    }
    return api;
}

static PyObject *table_known(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t origin;
    if (fan_number_arg(a[1], "table_known: origin", &origin) < 0)
        return NULL;
    const fan_dl_api *api = fan_dl_api_of(a[0]);
    if (origin >= FAN_FROM_FOREIGN && origin < 256)
        fan_state_get()->tables[origin] = api;
    return PyBool_FromLong(api != NULL);
}

static PyObject *read_by_table(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_state *st = fan_state_get();
    PyObject *type = a[0];
    int64_t origin;
    if (fan_number_arg(a[1], "read_by_table: origin", &origin) < 0)
        return NULL;
    if (!st->table_types)
        st->table_types = PyDict_New();
    if (!st->table_types)
        return NULL;
    if (origin < FAN_FROM_FOREIGN || origin > 255) {
        if (PyDict_Contains(st->table_types, type) > 0 && PyDict_DelItem(st->table_types, type) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    if (a[2] == Py_True)
        origin += FAN_ASKS_VALUE;
    PyObject *reading = PyLong_FromLongLong(origin);
    if (!reading)
        return NULL;
    int bad = PyDict_SetItem(st->table_types, type, reading);
    Py_DECREF(reading);
    if (bad)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *table_take(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *object = a[1];
    fan_dl_versioned *managed = NULL;
    const fan_dl_api *api = table_arg(a[0]);
    if (!api)
        return NULL;
    if (api->take(object, &managed) != 0 || !managed) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_BufferError, "the exchange table of %.200s gave no tensor",
                         Py_TYPE(object)->tp_name);
        }
        return NULL;
    }
    PyObject *capsule = fan_dlpack_capsule(managed);
    if (!capsule && managed->deleter)
        managed->deleter(managed);
    return capsule;
}

static PyObject *table_give(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *capsule = a[1];
    void *object = NULL;
    const fan_dl_api *api = table_arg(a[0]);
    if (!api)
        return NULL;
    fan_dl_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (!managed || PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0)
        return NULL;
    /* the table takes the tensor, on failure, too */
    if (api->give(managed, &object) == 0 && object)
        return object;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_BufferError, "the exchange table gave no array");
    return NULL;
}

static PyObject *table_stream(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    void *stream = NULL;
    int64_t index;
    const fan_dl_api *api = table_arg(a[0]);
    if (!api)
        return NULL;
    if (fan_number_arg(a[1], "table_stream: device", &index) < 0)
        return NULL;
    if (api->current_stream(FAN_DL_CUDA, (int32_t)index, &stream) == 0)
        return PyLong_FromVoidPtr(stream);
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_BufferError,
                     "the exchange table has no current stream of CUDA device %d", (int)index);
    }
    return NULL;
}

/* holder_gone: ends a holder: a capsule over a storage, whose memory is kept until streams have
 * passed. */
static void holder_gone(PyObject *capsule)
{
    fan_storage *st = PyCapsule_GetPointer(capsule, "fanin.holder");
    PyObject *live = fan_exception_take();
    Py_BEGIN_ALLOW_THREADS
        fan_storage_drop(st);
    Py_END_ALLOW_THREADS
    fan_exception_put(live);
}

/* hold_until: adds a stream to those that the memory of *st waits for; the first one makes *st,
 * which takes a reference to `owner`. */
static fan_status hold_until(fan_stream *s, PyObject *owner, fan_storage **st, fan_error *err)
{
    if (!*st) {
        FAN_TRY(fan_memory_wrap(s->device, NULL, fan_release_library_array, owner, st, err));
        Py_INCREF(owner);
    }
    return fan_memory_record_stream(*st, s, err);
}

static PyObject *hold_for(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *streams = a[1];
    PyObject *capsule = NULL;
    fan_storage *st = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(streams); i++) {
        fan_stream *s;
        if (fan_stream_arg(PyList_GET_ITEM(streams, i), &s) < 0)
            goto done;
        if (!s) {
            PyErr_SetString(PyExc_TypeError, "hold_for: expected streams, got None");
            goto done;
        }
        int bad = FAN_CHECK(hold_until(s, a[0], &st, &err));
        fan_stream_drop(s);
        if (bad)
            goto done;
    }
    if (st)
        capsule = PyCapsule_New(st, "fanin.holder", holder_gone);
    else
        PyErr_SetString(PyExc_ValueError, "hold_for: expected streams");
done:
    if (!capsule)
        fan_storage_drop(st);
    return capsule;
}

#include "py/declared/exchange.h"
