/* library: C calls to and from libraries that own arrays on CUDA devices: exchange tables, current
 * streams, allocators, and the streams that used what leaves us. */
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

/* ---- memory of other libraries on a device: whose stream, whose allocator ---- */

/* reads_by_table: how; its origin, and perhaps FAN_ASKS_VALUE. -1: it is no such type. */
static long reads_by_table(PyObject *o)
{
    const fan_state *st = fan_state_get();
    PyObject *how =
        st->table_types ? PyDict_GetItem(st->table_types, (PyObject *)Py_TYPE(o)) : NULL;
    return how ? PyLong_AsLong(how) : -1;
}

/* answers_false: whether an attribute is False, or a method without arguments returns it. */
static bool answers_false(PyObject *o, PyObject *name, bool method)
{
    PyObject *said = method ? PyObject_CallMethodNoArgs(o, name) : PyObject_GetAttr(o, name);
    Py_XDECREF(said);
    return said == Py_False;
}

bool fan_tensor_has(PyObject *o, const fan_array *a)
{
    const fan_state *st = fan_state_get();
    fan_dl_tensor is;
    if (!fan_is_tensor(st, o) || !fan_tensor_look(st, o, &is))
        return false;
    bool same = is.ndim == a->ndim &&
                (a->size == 0 || (is.data && (char *)is.data + is.byte_offset == a->data));
    for (int i = 0; i < a->ndim && same; i++)
        same = is.shape[i] == a->shape[i];
    return same;
}

/* int_of: what a method without arguments returns; -1: it fails, perhaps with an exception. */
static int64_t int_of(PyObject *o, const char *method)
{
    PyObject *n = o ? PyObject_CallMethod(o, method, NULL) : NULL;
    int64_t value = n ? PyLong_AsLongLong(n) : -1;
    Py_XDECREF(n);
    return value;
}

/* host_view: another tensor over the memory of a torch tensor on the CPU: it keeps that memory
 * where the first one is given other memory (Tensor.set_). NULL, perhaps with an exception: it is
 * none, or its storage was cut. */
static PyObject *host_view(PyObject *o)
{
    const fan_state *st = fan_state_get();
    fan_dl_tensor t;
    if (!fan_is_tensor(st, o) || !fan_tensor_is_plain(st, o) || !fan_tensor_look(st, o, &t) ||
        t.device.type != FAN_DL_CPU || !t.data || t.dtype.bits < 8 || (t.ndim && !t.strides))
        return NULL;
    PyObject *storage = PyObject_CallMethod(o, "untyped_storage", NULL);
    int64_t bytes = int_of(storage, "nbytes"), last = int_of(o, "storage_offset");
    bool whole = bytes > 0 && last >= 0;
    for (int i = 0; i < t.ndim && whole; i++) {
        whole = t.shape[i] > 0;
        last += (t.shape[i] - 1) * t.strides[i];
    }
    whole = whole && last < bytes / (t.dtype.bits / 8 * t.dtype.lanes);
    Py_XDECREF(storage);
    return whole ? PyObject_CallMethod(o, "detach", NULL) : NULL;
}

/* tensor_by_table: an array of a CUDA device, or (`host`, its host_view) a torch tensor on the CPU,
 * by its library's exchange table; the caller's to adopt. NULL: not by this way, without an
 * exception. */
static fan_dl_versioned *tensor_by_table(PyObject *o, PyObject *host, const fan_dl_api *api,
                                         bool asks_value, fan_device **device)
{
    const fan_state *st = fan_state_get();
    fan_dl_versioned *made = NULL;
    /* A table's record lacks whether its memory holds the value of the array (dlpack.h,
     * fan_dl_api). */
    if ((fan_is_tensor(st, o) && !fan_tensor_is_plain(st, o)) ||
        (asks_value &&
         !(answers_false(o, st->str_requires_grad, false) &&
           answers_false(o, st->str_is_neg, true) && answers_false(o, st->str_is_conj, true)))) {
        PyErr_Clear();
        return NULL;
    }
    if (api->take(host ? host : o, &made) != 0) {
        made = NULL;
        fan_tensor_threw();
    }
    const fan_backend_entry *b =
        made && made->major == FAN_DL_MAJOR && made->tensor.data && made->tensor.device.id >= 0
            ? fan_backend_of_dlpack(made->tensor.device.type)
            : NULL;
    if (b && host) {
        *device = fan_cpu();
        return made;
    }
    if (b && b->backend->has_streams && fan_backend_device(b, made->tensor.device.id, device) == 0)
        return made;
    PyErr_Clear(); /* the other way raises the error again, if it is one */
    if (made && made->deleter)
        made->deleter(made);
    return NULL;
}

int fan_import_by_table(PyObject *o, fan_value *out)
{
    long how = reads_by_table(o);
    const fan_dl_api *api = how < 0 ? NULL : fan_state_get()->tables[how % FAN_ASKS_VALUE];
    const fan_dl_device said = {-1, 0};
    fan_device *device = NULL;
    PyObject *host = api ? host_view(o) : NULL;
    PyErr_Clear();
    fan_dl_versioned *tensor =
        api ? tensor_by_table(o, host, api, how >= FAN_ASKS_VALUE, &device) : NULL;
    Py_XDECREF(host);
    if (!tensor)
        return 0;
    int result = fan_dlpack_adopt(tensor, true, o, &said,
                                  how >= FAN_ASKS_VALUE ? FAN_DL_WRITE : FAN_DL_AS_IT_SAYS, device,
                                  &out->array);
    out->device = device; /* its memory holds it */
    fan_device_drop(device);
    if (result < 0)
        return -1;
    out->form = FAN_FORM_DENSE;
    out->dtype = out->array->dtype;
    out->origin = (uint8_t)(how % FAN_ASKS_VALUE);
    out->object = Py_NewRef(o);
    out->own_memory = device == fan_cpu() && fan_tensor_has(o, out->array);
    return 1;
}

int fan_library_stream(const fan_value *v, fan_stream *last, fan_stream **out)
{
    fan_device *d = v->device;
    unsigned long long handle;
    void *stream = NULL;
    *out = NULL;
    if (!d || !v->object || v->origin == FAN_FROM_DEVICE_ARRAY || !fan_is_shared(d))
        return 0;
    fan_stream *pushed = fan_stream_pushed(d);
    fan_stream_drop(pushed);
    if (pushed)
        return 0;
    long how = reads_by_table(v->object);
    const fan_dl_api *api = how < 0 ? NULL : fan_state_get()->tables[how % FAN_ASKS_VALUE];
    if (api && api->current_stream(d->backend->dlpack[0], d->index, &stream) == 0) {
        handle = (unsigned long long)(uintptr_t)stream;
    } else {
        PyErr_Clear();
        PyObject *arrays = fan_arrays();
        PyObject *current = arrays ? PyObject_CallMethod(arrays, "library_stream", "Oi",
                                                         (PyObject *)v->object, d->index)
                                   : NULL;
        bool none = current == Py_None;
        handle = current && !none ? PyLong_AsUnsignedLongLong(current) : 0;
        Py_XDECREF(current);
        if (!current || none || (handle == (unsigned long long)-1 && PyErr_Occurred()))
            return none ? 0 : -1;
    }
    bool same = last && last->device == d && last->handle == (handle ? handle : FAN_LEGACY);
    *out = same ? fan_stream_hold(last) : fan_backend_stream(d, handle);
    return *out ? 0 : -1;
}

void fan_release_library_array(void *ctx)
{
    fan_object_drop(ctx);
}

bool fan_is_dense_like(const fan_dl_tensor *t, const fan_device *d, fan_dtype dtype, int ndim,
                       const int64_t *shape, const int64_t *strides)
{
    if (t->device.type != d->backend->dlpack[0] || t->device.id != d->index || t->ndim != ndim ||
        t->dtype.lanes != 1 || fan_dl_dtype_of(t->dtype) != dtype)
        return false;
    if (!t->data) /* sums without elements are not requested */
        return false;
    for (int i = 0; i < ndim; i++)
        if (t->shape[i] != shape[i] || (shape[i] > 1 && t->strides && t->strides[i] != strides[i]))
            return false;
    return true;
}

/* allocated: a library's new array; NULL, without an exception, where it gives none. */
static PyObject *allocated(const fan_dl_api *api, const fan_device *d, fan_dtype dtype, int ndim,
                           int64_t *shape, int64_t *strides, fan_dl_tensor *is)
{
    fan_dl_tensor like = {.device = {d->backend->dlpack[0], d->index},
                          .ndim = ndim,
                          .dtype = fan_dl_dtype_for(dtype),
                          .shape = shape,
                          .strides = strides};
    fan_dl_versioned *managed = NULL;
    void *object = NULL;
    if (api->allocate(&like, &managed, NULL, tensor_failed) == 0 && managed &&
        api->give(managed, &object) != 0)
        object = NULL;
    if (object &&
        (api->look(object, is) != 0 || !fan_is_dense_like(is, d, dtype, ndim, shape, strides)))
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

/* allocator_on: `on` becomes the library's current stream, where it is one of its own: its
 * allocator gives memory of the current stream, and a sum need not wait for what is queued on
 * another. What ends that; NULL, without an exception: it is not, or it is that already. */
static PyObject *allocator_on(const fan_dl_api *api, uint8_t origin, fan_device *d, fan_stream *on)
{
    void *current = NULL;
    PyObject *arrays = fan_arrays(), *s = NULL, *scope = NULL, *entered = NULL;
    if (!arrays || api->current_stream(d->backend->dlpack[0], d->index, &current) != 0 ||
        (current ? (uint64_t)(uintptr_t)current : FAN_LEGACY) == on->handle)
        goto done;
    s = fan_stream_wrap(on);
    scope = s ? PyObject_CallMethod(arrays, "allocator_on", "iO", (int)origin, s) : NULL;
    if (scope && scope != Py_None)
        entered = PyObject_CallMethod(scope, "__enter__", NULL);
done:
    PyErr_Clear();
    if (!entered)
        Py_CLEAR(scope);
    Py_XDECREF(entered);
    Py_XDECREF(s);
    return scope;
}

static fan_status fresh_from(const fan_dl_api *api, uint8_t origin, fan_device *d, fan_stream *on,
                             fan_dtype dtype, int ndim, int64_t *shape, int64_t *strides,
                             const int64_t *steps, fan_array **out, fan_error *err)
{
    fan_dl_tensor is;
    fan_storage *st = NULL;
    fan_stream *from = NULL;
    fan_status status = FAN_OK;
    void *current = NULL;
    PyObject *scope = allocator_on(api, origin, d, on);
    PyObject *object = api->current_stream(d->backend->dlpack[0], d->index, &current) == 0
                           ? allocated(api, d, dtype, ndim, shape, strides, &is)
                           : NULL;
    PyErr_Clear();
    PyObject *left =
        scope ? PyObject_CallMethod(scope, "__exit__", "OOO", Py_None, Py_None, Py_None) : NULL;
    if (scope && !left)
        PyErr_WriteUnraisable(scope);
    Py_XDECREF(left);
    Py_XDECREF(scope);
    if (!object)
        return FAN_OK;
    status = fan_memory_wrap(d, (char *)is.data + is.byte_offset, fan_release_library_array, object,
                             &st, err);
    if (status != FAN_OK) {
        Py_DECREF(object);
        return status;
    }
    FAN_GO(d->backend->find_stream(d, (uint64_t)(uintptr_t)current, &from, err));
    fan_memory_set_stream(st, from);
    FAN_GO(fan_dl_order(on, from, err)); /* what ran there before on the same memory comes first */
    FAN_GO(fan_memory_record_stream(st, on, err));
    FAN_GO(fan_array_view(st, st->data, dtype, ndim, shape, steps, true, out, err));
done:
    fan_stream_drop(from);
    fan_storage_drop(st);
    return status;
}

fan_status fan_fresh(uint8_t origin, fan_device *d, fan_stream *on, fan_dtype dtype, int ndim,
                     const int64_t *shape, const fan_array *like, fan_array **out, fan_error *err)
{
    const fan_state *state = fan_state_get();
    const fan_dl_api *api =
        state && origin >= FAN_FROM_FOREIGN && fan_is_shared(d) ? state->tables[origin] : NULL;
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
    if (capture || !size) /* no call of its allocator inside a capture: the pool would be unknown */
        return FAN_OK;
    for (int i = 0; i < ndim; i++)
        if (dims[i] > 1 && steps[i] != strides[i] * (int64_t)fan_dtype_size(dtype))
            return FAN_OK; /* its allocator makes C order alone (D16) */
    if (!fan_gil_enter(&gil))
        return FAN_OK;
    PyObject *live = fan_exception_take();
    fan_status status = fresh_from(api, origin, d, on, dtype, ndim, dims, strides, steps, out, err);
    fan_exception_put(live);
    fan_gil_leave(&gil);
    return status;
}

void fan_leaves(PyObject *object, const fan_value *v)
{
    fan_array *own[3];
    size_t n;
    fan_array *const *parts = fan_value_arrays(v, own, &n);
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
