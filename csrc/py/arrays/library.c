/* library: C calls to and from libraries that own arrays on CUDA devices.
 *
 * In this order: arrays that come in by an exchange table; the library's current stream; sums in
 * arrays of the library's allocator; which streams used an array that goes back to its library. */
#include "py/arrays/arrays.h"

#include "py/device/backends.h"
#include "py/arrays/dlpack.h"

#include <string.h>

static void tensor_failed(void *ctx, const char *kind, const char *text)
{
    (void)ctx;
    (void)kind;
    (void)text; /* the general path raises, if it fails as well */
}

/* ---- in, by an exchange table ---- */

/* reads_by_table: the origin of an array that a table reads, plus FAN_ASKS_VALUE where the table's
 * record lacks whether its memory holds its value; -1: it is of no such type. */
static long reads_by_table(PyObject *o)
{
    PyObject *types = fan_state_get()->table_types;
    PyObject *reading = NULL;
    if (types)
        reading = PyDict_GetItem(types, (PyObject *)Py_TYPE(o));
    if (!reading)
        return -1;
    return PyLong_AsLong(reading);
}

/* table_of: the table of what reads_by_table returned; NULL: none is known. */
static const fan_dl_api *table_of(long reading)
{
    if (reading < 0)
        return NULL;
    return fan_state_get()->tables[reading % FAN_ASKS_VALUE];
}

/* has_own_value: whether an array that a table reads requires no gradient, and its memory holds its
 * value; false: unknown, too. */
static bool has_own_value(PyObject *o)
{
    const fan_state *st = fan_state_get();
    return fan_result_is(PyObject_GetAttr(o, st->str_requires_grad), Py_False) &&
           fan_result_is(PyObject_CallMethodNoArgs(o, st->str_is_neg), Py_False) &&
           fan_result_is(PyObject_CallMethodNoArgs(o, st->str_is_conj), Py_False);
}

bool fan_tensor_has(PyObject *o, const fan_array *a)
{
    fan_dl_tensor tensor;
    if (!fan_is_tensor(o))
        return false;
    if (!fan_tensor_look(o, &tensor))
        return false;
    if (tensor.ndim != a->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        if (tensor.shape[i] != a->shape[i])
            return false;
    }
    if (a->size == 0)
        return true;
    return tensor.data && (char *)tensor.data + tensor.byte_offset == a->data;
}

/* int_of: the int that a method without arguments returns; -1: it fails, perhaps with an
 * exception. */
static int64_t int_of(PyObject *o, const char *method)
{
    PyObject *n = PyObject_CallMethod(o, method, NULL);
    if (!n)
        return -1;
    int64_t value = PyLong_AsLongLong(n);
    Py_DECREF(n);
    return value;
}

/* is_inside_storage: whether all elements of a torch tensor, which has some, are inside its
 * storage; false, perhaps with an exception: it was cut. */
static bool is_inside_storage(PyObject *o, const fan_dl_tensor *tensor)
{
    PyObject *storage = PyObject_CallMethod(o, "untyped_storage", NULL);
    if (!storage)
        return false;
    int64_t bytes = int_of(storage, "nbytes");
    Py_DECREF(storage);
    int64_t last = int_of(o, "storage_offset");
    if (bytes <= 0 || last < 0)
        return false;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] <= 0)
            return false;
        last += (tensor->shape[i] - 1) * tensor->strides[i];
    }
    return last < bytes / (tensor->dtype.bits / 8 * tensor->dtype.lanes);
}

/* host_view: another tensor over the memory of a torch tensor on the CPU: it keeps that memory
 * where the first one is given other memory (Tensor.set_). NULL, perhaps with an exception: it is
 * none, or its storage was cut. */
static PyObject *host_view(PyObject *o)
{
    fan_dl_tensor tensor;
    if (!fan_is_tensor(o))
        return NULL;
    if (!fan_tensor_is_plain(o))
        return NULL;
    if (!fan_tensor_look(o, &tensor))
        return NULL;
    if (tensor.device.type != FAN_DL_CPU)
        return NULL;
    if (tensor.dtype.bits < 8)
        return NULL;
    if (!tensor.data)
        return NULL;
    if ((tensor.ndim && !tensor.strides))
        return NULL;
    if (!is_inside_storage(o, &tensor))
        return NULL;
    return PyObject_CallMethod(o, "detach", NULL);
}

/* backend_of: the backend of a tensor, which may be NULL; NULL: there is none, or the tensor has no
 * address. */
static const fan_backend_entry *backend_of(const fan_dl_versioned *made)
{
    if (!made || made->major != FAN_DL_MAJOR)
        return NULL;
    if (!made->tensor.data)
        return NULL;
    if (made->tensor.device.id < 0)
        return NULL;
    return fan_backend_of_dlpack(made->tensor.device.type);
}

/* tensor_by_table: an array of a CUDA device, or (`host`, its host_view) a torch tensor on the CPU,
 * by its library's exchange table; the caller's to adopt. NULL: not by this way, without an
 * exception. */
static fan_dl_versioned *tensor_by_table(PyObject *o, PyObject *host, const fan_dl_api *api,
                                         bool asks_value, fan_device **device)
{
    fan_dl_versioned *made = NULL;
    if (fan_is_tensor(o) && !fan_tensor_is_plain(o))
        return NULL;
    if (asks_value && !has_own_value(o))
        return NULL;
    if (api->take(host ? host : o, &made) != 0) {
        made = NULL;
        fan_tensor_threw();
    }
    const fan_backend_entry *entry = backend_of(made);
    if (entry && host) {
        *device = fan_cpu();
        return made;
    }
    if (entry && entry->backend->has_streams &&
        fan_backend_device(entry, made->tensor.device.id, device) == 0)
        return made;
    PyErr_Clear(); /* the other way raises the error again, if it is one */
    if (made && made->deleter)
        made->deleter(made);
    return NULL;
}

int fan_import_by_table(PyObject *o, fan_value *out)
{
    long reading = reads_by_table(o);
    const fan_dl_device reported = {-1, 0};
    fan_device *device = NULL;
    const fan_dl_api *api = table_of(reading);
    if (!api)
        return 0;
    bool asks_value = reading >= FAN_ASKS_VALUE;
    PyObject *host = host_view(o);
    PyErr_Clear();
    fan_dl_versioned *tensor = tensor_by_table(o, host, api, asks_value, &device);
    Py_XDECREF(host);
    if (!tensor)
        return 0;
    int result = fan_dlpack_adopt(tensor, true, o, &reported,
                                  asks_value ? FAN_DL_WRITE : FAN_DL_WRITABLE_IF_FLAGGED, device,
                                  &out->array);
    fan_device_drop(device); /* its memory holds it */
    if (result < 0)
        return -1;
    fan_value_set_dense(out, (fan_origin)(reading % FAN_ASKS_VALUE), device, o);
    out->own_memory = device == fan_cpu() && fan_tensor_has(o, out->array);
    return 1;
}

/* ---- the library's current stream ---- */

/* current_handle: the handle of the current stream of the library that owns `o`. 1, 0 where it has
 * none, -1 with an exception. */
static int current_handle(PyObject *o, const fan_device *d, uint64_t *out)
{
    void *stream = NULL;
    const fan_dl_api *api = table_of(reads_by_table(o));
    if (api && api->current_stream(d->backend->dlpack[0], d->index, &stream) == 0) {
        *out = (uintptr_t)stream;
        return 1;
    }
    PyErr_Clear();
    PyObject *current = fan_arrays_call("library_stream", "(Oi)", o, d->index);
    if (!current)
        return -1;
    int has_one = current != Py_None;
    if (has_one)
        *out = PyLong_AsUnsignedLongLong(current);
    Py_DECREF(current);
    if (PyErr_Occurred())
        return -1;
    return has_one;
}

int fan_library_stream(const fan_value *v, fan_stream *last, fan_stream **out)
{
    fan_device *d = v->device;
    uint64_t handle;
    *out = NULL;
    if (!d || !v->object)
        return 0;
    if (v->origin == FAN_FROM_DEVICE_ARRAY || !fan_is_shared(d))
        return 0;
    fan_stream *pushed = fan_stream_pushed(d);
    fan_stream_drop(pushed);
    if (pushed)
        return 0;
    int has_one = current_handle(v->object, d, &handle);
    if (has_one <= 0)
        return has_one;
    if (last && last->device == d && last->handle == (handle ? handle : FAN_LEGACY))
        *out = fan_stream_hold(last);
    else
        *out = fan_backend_stream(d, handle);
    if (!*out)
        return -1;
    return 0;
}

/* ---- arrays of a library's allocator ---- */

void fan_release_library_array(void *ctx)
{
    fan_object_drop(ctx);
}

bool fan_is_dense_like(const fan_dl_tensor *t, const fan_device *d, fan_dtype dtype, int ndim,
                       const int64_t *shape, const int64_t *strides)
{
    if (t->device.type != d->backend->dlpack[0])
        return false;
    if (t->device.id != d->index)
        return false;
    if (t->ndim != ndim)
        return false;
    if (t->dtype.lanes != 1)
        return false;
    if (fan_dl_dtype_of(t->dtype) != dtype)
        return false;
    if (!t->data) /* sums without elements are not requested */
        return false;
    for (int i = 0; i < ndim; i++) {
        if (t->shape[i] != shape[i])
            return false;
        if (shape[i] > 1 && t->strides && t->strides[i] != strides[i])
            return false;
    }
    return true;
}

/* allocated: a new array of a library, and its tensor; NULL, without an exception: it gives
 * none. */
static PyObject *allocated(const fan_dl_api *api, fan_dl_tensor *like, const fan_device *d,
                           fan_dl_tensor *out)
{
    fan_dl_versioned *managed = NULL;
    void *made = NULL;
    int failed = api->allocate(like, &managed, NULL, tensor_failed);
    if (failed || !managed || api->give(managed, &made) != 0)
        made = NULL;
    PyObject *object = made;
    bool good = object && api->look(object, out) == 0 &&
                fan_is_dense_like(out, d, fan_dl_dtype_of(like->dtype), like->ndim, like->shape,
                                  like->strides);
    if (!good)
        Py_CLEAR(object);
    PyErr_Clear();
    return object;
}

fan_status fan_dl_order(fan_stream *on, fan_stream *from, fan_error *err)
{
    fan_event *e = NULL;
    if (on == from)
        return FAN_OK;
    FAN_TRY(fan_event_record(from, &e, err));
    fan_status status = fan_stream_wait(on, e, NULL, err);
    fan_event_drop(e);
    return status;
}

/* allocator_on: makes `on` the library's current stream, where it is one of its own, until the
 * context manager that it returns ends: the library's allocator gives memory of the current stream,
 * and then a sum need not wait for work that is queued on another. NULL, without an exception: it
 * cannot, or it is the current stream already. */
static PyObject *allocator_on(const fan_dl_api *api, uint8_t origin, fan_device *d, fan_stream *on)
{
    void *current = NULL;
    PyObject *scope = NULL;
    PyObject *entered = NULL;
    int failed = api->current_stream(d->backend->dlpack[0], d->index, &current);
    uint64_t handle = current ? (uintptr_t)current : FAN_LEGACY;
    if (!failed && handle != on->handle)
        scope = fan_arrays_call("allocator_on", "(iN)", (int)origin, fan_stream_wrap(on));
    if (scope && scope != Py_None)
        entered = PyObject_CallMethod(scope, "__enter__", NULL);
    PyErr_Clear();
    if (!entered)
        Py_CLEAR(scope);
    Py_XDECREF(entered);
    return scope;
}

/* allocator_leave: ends what allocator_on returned, which may be NULL. */
static void allocator_leave(PyObject *scope)
{
    if (!scope)
        return;
    PyObject *left = PyObject_CallMethod(scope, "__exit__", "OOO", Py_None, Py_None, Py_None);
    if (!left)
        PyErr_WriteUnraisable(scope);
    Py_XDECREF(left);
    Py_DECREF(scope);
}

/* fresh_from: an array of the library's allocator whose memory is ready on `on`; FAN_OK and *out
 * unchanged: the library gives none. */
static fan_status fresh_from(const fan_dl_api *api, uint8_t origin, fan_device *d, fan_stream *on,
                             fan_dl_tensor *like, const int64_t *steps, fan_array **out,
                             fan_error *err)
{
    fan_dl_tensor tensor;
    fan_storage *st = NULL;
    fan_stream *from = NULL;
    void *current = NULL;
    PyObject *object = NULL;
    PyObject *scope = allocator_on(api, origin, d, on);
    if (api->current_stream(d->backend->dlpack[0], d->index, &current) == 0)
        object = allocated(api, like, d, &tensor);
    PyErr_Clear();
    allocator_leave(scope);
    if (!object)
        return FAN_OK;
    fan_status status = fan_memory_wrap(d, (char *)tensor.data + tensor.byte_offset,
                                        fan_release_library_array, object, &st, err);
    if (status != FAN_OK) {
        Py_DECREF(object);
        return status;
    }
    FAN_GO(d->backend->find_stream(d, (uintptr_t)current, &from, err));
    fan_memory_set_stream(st, from);
    FAN_GO(fan_dl_order(on, from, err)); /* what ran there before on the same memory comes first */
    FAN_GO(fan_memory_record_stream(st, on, err));
    FAN_GO(fan_array_view(st, st->data, fan_dl_dtype_of(like->dtype), like->ndim, like->shape,
                          steps, true, out, err));
done:
    fan_stream_drop(from);
    fan_storage_drop(st);
    return status;
}

fan_status fan_fresh(uint8_t origin, fan_device *d, fan_stream *on, fan_dtype dtype, int ndim,
                     const int64_t *shape, const fan_array *like, fan_array **out, fan_error *err)
{
    const fan_state *state = fan_state_get();
    *out = NULL;
    if (!state || !on)
        return FAN_OK;
    const fan_dl_api *api = state->tables[origin];
    if (!api)
        return FAN_OK;
    if (origin < FAN_FROM_FOREIGN || !fan_is_shared(d))
        return FAN_OK;
    uint64_t capture;
    FAN_TRY(fan_stream_capture(on, &capture, err));
    int64_t dims[FAN_MAX_NDIM];
    int64_t strides[FAN_MAX_NDIM];
    int64_t steps[FAN_MAX_NDIM];
    int64_t size = 1;
    fan_dense_strides(ndim, shape, fan_dtype_size(dtype), like, steps);
    for (int i = ndim - 1; i >= 0; i--) {
        dims[i] = shape[i];
        strides[i] = size;
        size *= shape[i];
    }
    if (capture || !size) /* no call of its allocator inside a capture: the pool would be unknown */
        return FAN_OK;
    for (int i = 0; i < ndim; i++) {
        if (dims[i] > 1 && steps[i] != strides[i] * (int64_t)fan_dtype_size(dtype))
            return FAN_OK; /* its allocator makes C order alone (D16) */
    }
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return FAN_OK;
    PyObject *live = fan_exception_take();
    fan_dl_tensor wanted = {
        .device = {d->backend->dlpack[0], d->index},
        .ndim = ndim,
        .dtype = fan_dl_dtype_for(dtype),
        .shape = dims,
        .strides = strides,
    };
    fan_status status = fresh_from(api, origin, d, on, &wanted, steps, out, err);
    fan_exception_put(live);
    fan_gil_leave(&gil);
    return status;
}

/* ---- out ---- */

/* add_stream: appends a stream to a list that lacks it, NULL without memory. */
static void add_stream(PyObject **streams, fan_stream *user)
{
    PyObject *s = fan_stream_wrap(user);
    int known = -1;
    if (s)
        known = PySequence_Contains(*streams, s);
    if (known < 0)
        Py_CLEAR(*streams);
    if (known == 0)
        fan_list_add(streams, Py_NewRef(s));
    Py_XDECREF(s);
}

void fan_leaves(PyObject *object, const fan_value *v)
{
    fan_array *own[3];
    size_t n;
    fan_array *const *parts = fan_value_arrays(v, own, &n);
    PyObject *streams = PyList_New(0);
    PyObject *done = NULL;
    for (size_t i = 0; i < n; i++) {
        fan_stream *user;
        for (size_t k = 0; streams && (user = fan_memory_user(parts[i]->storage, k)); k++) {
            add_stream(&streams, user);
            fan_stream_drop(user);
        }
    }
    if (streams && PyList_GET_SIZE(streams))
        done = fan_arrays_call("leaving", "(OiO)", object, v->device->index, streams);
    else if (streams)
        done = Py_NewRef(Py_None);
    if (!done)
        PyErr_WriteUnraisable(object);
    Py_XDECREF(done);
    Py_XDECREF(streams);
}
