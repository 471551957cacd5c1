/* dlpack_device: arrays on a device, given to other libraries: DLPack, __cuda_array_interface__. */
#include "py/base/args.h"
#include "py/device/backends.h"
#include "py/arrays/dlpack_export.h"

#include <stdio.h>

/* consumer_stream: what an integer of the protocol means: a hold in *out; NULL: the consumer wants no waiting (-1). */
static int consumer_stream(PyObject *o, fan_device *d, fan_stream **out)
{
    long long n = FAN_DL_LEGACY;
    int overflow = 0;
    *out = NULL;
    if (o != Py_None) {
        if (!PyLong_Check(o) || PyBool_Check(o))
            return fan_refuse(PyExc_TypeError,
                              "__dlpack__: expected stream= as an integer (1: legacy default, 2: per-thread default, "
                              "-1: no waiting, or a handle), got %R",
                              o);
        n = PyLong_AsLongLongAndOverflow(o, &overflow);
        if (n == -1 && PyErr_Occurred())
            return -1;
    }
    if (n == FAN_DL_NO_SYNC && !overflow)
        return 0;
    if (overflow || n <= 0)
        return fan_refuse(PyExc_ValueError,
                          "__dlpack__: %R is no stream; expected 1 (legacy default), 2 (per-thread default), -1 (no "
                          "waiting) or a handle",
                          o);
    *out = fan_backend_stream(d, (uint64_t)n);
    return *out ? 0 : -1;
}

/* await_users: `s` waits for all that was queued on the streams that used the memory, and is marked as one of them. The
 * GIL may be let go. */
static fan_status await_users(fan_array *a, fan_stream *s, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_stream *user;
    for (size_t i = 0; status == FAN_OK && (user = fan_memory_user(a->storage, i)); i++) {
        fan_event *e = NULL;
        if (user != s) {
            status = fan_event_record(user, &e, err);
            if (status == FAN_OK)
                status = fan_stream_wait(s, e, NULL, err);
            fan_event_drop(e);
        }
        fan_stream_drop(user);
    }
    return status == FAN_OK ? fan_memory_record_stream(a->storage, s, err) : status;
}

/* device_copy: another array on d, whose copy is queued on s behind what made `a`. */
static fan_status device_copy(fan_array *a, fan_device *d, fan_stream *s, fan_array **out, fan_error *err)
{
    fan_operand from = {.array = a, .acc = a->dtype};
    FAN_TRY(fan_device_array(d, s, a->dtype, a->ndim, a->shape, a, out, err));
    fan_status status =
        fan_device_run(d, s, &(fan_job){.kind = FAN_JOB_COPY, .out = *out, .in = &from, .n = 1, .label = "copy"}, err);
    if (status != FAN_OK) {
        fan_array_drop(*out);
        *out = NULL;
    }
    return status;
}

/* to_host: dl_device=(1, 0): a copy, there when the call returns. */
static fan_status to_host(fan_array *a, fan_device *d, fan_array **out, fan_error *err)
{
    fan_stream *s = fan_stream_current(d);
    fan_status status = s ? await_users(a, s, err) : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    if (status == FAN_OK)
        status = fan_array_new(a->dtype, a->ndim, a->shape, a, out, err);
    if (status == FAN_OK)
        status = d->backend->read(s, *out, a, err);
    fan_stream_drop(s);
    if (status != FAN_OK) {
        fan_array_drop(*out);
        *out = NULL;
    }
    return status;
}

static PyObject *export_to_host(fan_array *a, fan_device *d, const fan_dl_request *q)
{
    fan_array *copied = NULL;
    fan_error err = {0};
    fan_status status;
    if (q->stream != Py_None)
        return PyErr_Format(PyExc_ValueError,
                            "__dlpack__: a copy on the host has no streams; expected stream=None, got %R", q->stream);
    if (q->copy == 0)
        return PyErr_Format(
            PyExc_BufferError,
            "__dlpack__: the array is on a device, and copy=False: the host cannot have it without a copy");
    Py_BEGIN_ALLOW_THREADS
        status = to_host(a, d, &copied, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    PyObject *capsule = fan_dlpack_offer(copied, (fan_dl_device){FAN_DL_CPU, 0}, q->major >= 1, true);
    fan_array_drop(copied);
    return capsule;
}

static int shared_with_others(const fan_device *d, const char *what)
{
    char text[32];
    if (fan_is_shared(d))
        return 0;
    return fan_refuse(PyExc_BufferError, "%s: the array is on %s, which no other library supports", what,
                      fan_device_text(d, text, sizeof text));
}

PyObject *fan_dlpack_device(const fan_device *d)
{
    return shared_with_others(d, "__dlpack_device__") < 0 ? NULL
                                                          : Py_BuildValue("(ii)", d->backend->dlpack[0], d->index);
}

PyObject *fan_dlpack_export(fan_array *a, fan_device *d, PyObject *const *values)
{
    fan_dl_request q = {.type = d->backend->dlpack[0], .id = d->index};
    fan_stream *s = NULL, *on = NULL;
    fan_array *copied = NULL;
    fan_error err = {0};
    fan_status status = FAN_OK;
    PyObject *capsule = NULL;
    if (shared_with_others(d, "__dlpack__") < 0 || fan_dl_request_parse(values, &q) < 0)
        return NULL;
    if (q.type == FAN_DL_CPU && q.id == 0)
        return export_to_host(a, d, &q);
    if (q.type != d->backend->dlpack[0] || q.id != d->index)
        return PyErr_Format(PyExc_BufferError, "__dlpack__: the array is on %s and is not copied to device (%ld, %ld)",
                            fan_device_text(d, (char[32]){""}, 32), q.type, q.id);
    if (fan_dl_request_decide(a, &q) < 0)
        return NULL;
    if (consumer_stream(q.stream, d, &s) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        on = s            ? fan_stream_hold(s)
             : q.copy > 0 ? fan_stream_current(d)
                          : NULL; /* a copy is ordered behind its source at any rate */
        if (on)
            status = await_users(a, on, &err);
        if (status == FAN_OK && q.copy > 0)
            status =
                on ? device_copy(a, d, on, &copied, &err) : fan_fail(&err, FAN_ERR_NOMEM, "out of memory for a stream");
        fan_stream_drop(on);
        fan_stream_drop(s);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    capsule = fan_dlpack_offer(copied ? copied : a, (fan_dl_device){d->backend->dlpack[0], d->index}, q.major >= 1,
                               copied != NULL);
    fan_array_drop(copied);
    return capsule;
}

/* typestr: "<f4"; false for what NumPy's letters do not name. */
static bool typestr(fan_dtype d, char *buf, size_t size)
{
    if (fan_dtype_of_ml_dtypes(d))
        return false;
    snprintf(buf, size, "%c%c%zu", fan_dtype_size(d) > 1 ? '<' : '|', fan_dtype_kind(d), fan_dtype_size(d));
    return true;
}

PyObject *fan_interface_export(fan_array *a, fan_device *d)
{
    char type[8], text[32];
    fan_error err = {0};
    fan_status status = FAN_ERR_NOMEM;
    PyObject *shape, *strides;
    if (!d->backend->cuda_protocols || !typestr(a->dtype, type, sizeof type))
        return PyErr_Format(PyExc_AttributeError, "an array of dtype %s on %s has no __cuda_array_interface__",
                            fan_dtype_name(a->dtype), fan_device_text(d, text, sizeof text));
    fan_stream *s = fan_stream_current(d);
    Py_BEGIN_ALLOW_THREADS
        if (s)
            status = await_users(a, s, &err);
    Py_END_ALLOW_THREADS
    unsigned long long handle = s ? s->handle : FAN_DL_LEGACY;
    fan_stream_drop(s);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    shape = fan_ints(a->ndim, a->shape);
    strides = shape ? fan_ints(a->ndim, a->strides) : NULL;
    if (!strides) {
        Py_XDECREF(shape);
        return NULL;
    }
    return Py_BuildValue("{s:N,s:s,s:(KO),s:N,s:i,s:K}", "shape", shape, "typestr", type, "data",
                         (unsigned long long)(uintptr_t)(a->size ? a->data : NULL), a->writable ? Py_False : Py_True,
                         "strides", strides, "version", 3, "stream", handle);
}
