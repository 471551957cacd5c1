/* exchange: functions for fanin._interop and fanin.slots: exchange tables, dtypes. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/arrays/dlpack.h"
#include "py/device/backends.h"

/* is_own: a descriptor of this kind, for objects of this type: its function may be called as it
 * is. */
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

/* quick_tensors: how exact torch tensors are read as plain contributions; _interop.torch calls this
 * for the first
 * one. */
static PyObject *quick_tensors(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_state *st = fan_state_get();
    PyObject *type = a[0], *is_neg = a[2], *requires_grad = a[3], *plain = a[4], *graph = a[5];
    int64_t origin;
    if (fan_number_arg(a[6], "quick_tensors: origin", &origin) < 0)
        return NULL;
    const fan_dl_api *api = fan_dl_api_of(a[1]);
    /* What fan_tensor_look reads: a function without arguments, then pairs of a getter and its
     * value. */
    Py_ssize_t n = PyTuple_GET_SIZE(plain);
    PyObject *f = n % 2 == 1 ? PyTuple_GET_ITEM(plain, 0) : NULL;
    bool good = api && !st->torch_api && is_own(type, is_neg, &PyMethodDescr_Type) &&
                ((PyMethodDescrObject *)is_neg)->d_method->ml_flags == METH_NOARGS &&
                is_getter(type, requires_grad) && f && PyCFunction_CheckExact(f) &&
                PyCFunction_GET_FLAGS(f) == METH_NOARGS;
    for (Py_ssize_t i = 1; good && i < n; i += 2)
        good = is_getter(type, PyTuple_GET_ITEM(plain, i));
    if (!good)
        Py_RETURN_FALSE;
    st->torch_type = (PyTypeObject *)Py_NewRef(type);
    st->torch_is_neg = Py_NewRef(is_neg);
    st->torch_requires_grad = Py_NewRef(requires_grad);
    st->torch_plain = Py_NewRef(plain);
    st->torch_graph = Py_NewRef(graph);
    st->torch_origin = (uint8_t)origin;
    st->torch_api = api;
    Py_RETURN_TRUE;
}

/* fill: `init`'s values onto the device, and there when the call returns. */
static fan_status fill(fan_device *d, const fan_array *a, const fan_array *init, fan_error *err)
{
    fan_operand from = {.array = init, .acc = init->dtype};
    fan_stream *s = d->backend->current(d);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    fan_status status = fan_device_run(
        d, s, &(fan_job){.kind = FAN_JOB_UPLOAD, .out = a, .in = &from, .n = 1, .label = "array"},
        err);
    if (status == FAN_OK)
        status = fan_stream_sync(s, err);
    /* the copy may run still: the memory, which has no owner, goes back behind it */
    if (status != FAN_OK)
        (void)fan_memory_record_stream(a->storage, s, NULL);
    fan_stream_drop(s);
    return status;
}

static PyObject *device_array(PyObject *Py_UNUSED(module), PyObject *const *values)
{
    PyObject *where = values[0], *made = NULL;
    PyArrayObject *from = (PyArrayObject *)values[1];
    fan_device *d = NULL;
    bool empty = values[2] == Py_True;
    fan_array *init = NULL, *a = NULL;
    fan_error err = {0};
    fan_status status;
    if (fan_device_arg(where, &d) < 0)
        return NULL;
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(from));
    if (!d || !d->backend->has_streams || dtype == FAN_DT_NONE ||
        PyArray_NDIM(from) > FAN_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError,
                     "device_array: expected a device with streams and an array of numbers, got %R "
                     "and dtype %R",
                     where, PyArray_DESCR(from));
    } else if (fan_view_ndarray(from, dtype, false, &init) == 0) {
        Py_BEGIN_ALLOW_THREADS
            status = fan_device_array(d, NULL, dtype, init->ndim, init->shape, init, &a, &err);
            if (status == FAN_OK && !empty)
                status = fill(d, a, init, &err);
        Py_END_ALLOW_THREADS
        made = status == FAN_OK ? fan_array_wrap(a, d) : fan_raise(status, &err);
    }
    fan_array_drop(a);
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
    fan_dtype one, two;
    if (fan_dtype_parse(a[0], &one) < 0 || fan_dtype_parse(a[1], &two) < 0)
        return NULL;
    return PyBool_FromLong(one != FAN_DT_NONE && two != FAN_DT_NONE &&
                           fan_dtype_can_cast(one, two));
}

static PyObject *is_no_gradient(PyObject *Py_UNUSED(module), PyObject *o)
{
    return PyBool_FromLong(fan_is_no_gradient(o));
}

/* table_arg: an exchange table that is known; NULL with TypeError. */
static const fan_dl_api *table_arg(PyObject *capsule)
{
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (!api)
        PyErr_Format(PyExc_TypeError, "expected DLPack's exchange table of version %d, got %.200s",
                     FAN_DL_MAJOR, Py_TYPE(capsule)->tp_name);
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
    PyObject *type = a[0], *how = NULL;
    int64_t origin;
    if (fan_number_arg(a[1], "read_by_table: origin", &origin) < 0 ||
        (!st->table_types && !(st->table_types = PyDict_New())))
        return NULL;
    if (origin < FAN_FROM_FOREIGN || origin > 255) {
        if (PyDict_Contains(st->table_types, type) > 0 && PyDict_DelItem(st->table_types, type) < 0)
            return NULL;
    } else if (!(how = PyLong_FromLongLong(origin + (a[2] == Py_True ? FAN_ASKS_VALUE : 0))) ||
               PyDict_SetItem(st->table_types, type, how) < 0) {
        Py_XDECREF(how);
        return NULL;
    }
    Py_XDECREF(how);
    Py_RETURN_NONE;
}

static PyObject *table_take(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *object = a[1], *made;
    fan_dl_versioned *managed = NULL;
    const fan_dl_api *api = table_arg(a[0]);
    if (!api)
        return NULL;
    if (api->take(object, &managed) != 0 || !managed)
        return PyErr_Occurred()
                   ? NULL
                   : PyErr_Format(PyExc_BufferError, "the exchange table of %.200s gave no tensor",
                                  Py_TYPE(object)->tp_name);
    made = fan_dlpack_capsule(managed);
    if (!made && managed->deleter)
        managed->deleter(managed);
    return made;
}

static PyObject *table_give(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *tensor = a[1];
    const fan_dl_api *api = table_arg(a[0]);
    void *object = NULL;
    if (!api)
        return NULL;
    fan_dl_versioned *managed = PyCapsule_GetPointer(tensor, "dltensor_versioned");
    if (!managed || PyCapsule_SetName(tensor, "used_dltensor_versioned") < 0)
        return NULL;
    if (api->give(managed, &object) != 0 || !object) /* which had it, errors too */
        return PyErr_Occurred()
                   ? NULL
                   : PyErr_Format(PyExc_BufferError, "the exchange table gave no array");
    return object;
}

static PyObject *table_stream(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const fan_dl_api *api = table_arg(a[0]);
    void *stream = NULL;
    int64_t index;
    if (!api || fan_number_arg(a[1], "table_stream: device", &index) < 0)
        return NULL;
    if (api->current_stream(FAN_DL_CUDA, (int32_t)index, &stream) != 0)
        return PyErr_Occurred()
                   ? NULL
                   : PyErr_Format(PyExc_BufferError,
                                  "the exchange table has no current stream of CUDA device %d",
                                  (int)index);
    return PyLong_FromVoidPtr(stream);
}

/* holder_gone: of a holder, which keeps memory until streams have passed: a capsule over a
 * storage. */
static void holder_gone(PyObject *capsule)
{
    fan_storage *st = PyCapsule_GetPointer(capsule, "fanin.holder");
    PyObject *live = fan_exception_take();
    Py_BEGIN_ALLOW_THREADS
        fan_storage_drop(st);
    Py_END_ALLOW_THREADS
    fan_exception_put(live);
}

static PyObject *hold_for(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *owner = a[0], *streams = a[1];
    PyObject *capsule = NULL;
    fan_storage *st = NULL;
    fan_error err = {0};
    fan_status status = FAN_OK;
    fan_stream *s = NULL;
    for (Py_ssize_t i = 0; status == FAN_OK && i < PyList_GET_SIZE(streams); i++) {
        if (fan_stream_arg(PyList_GET_ITEM(streams, i), &s) < 0)
            goto done;
        if (!s) {
            PyErr_SetString(PyExc_TypeError, "hold_for: expected streams, got None");
            goto done;
        }
        if (!st && (status = fan_memory_wrap(s->device, NULL, fan_release_library_array, owner, &st,
                                             &err)) == FAN_OK)
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

#include "py/declared/exchange.h"
