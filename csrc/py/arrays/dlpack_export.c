/* dlpack_export: arrays of ours for other libraries.
 *
 * In this order: capsules; the arguments of __dlpack__, and whether a copy goes out; arrays on
 * devices, which offer themselves, ordered with the consumer's stream; _Exporter, which offers a
 * host array. */
#include "py/arrays/dlpack.h"
#include "py/arrays/arrays.h"
#include "py/base/args.h"
#include "py/device/backends.h"

#include "base/mem.h"
#include "array/nditer.h"

#include <stdio.h>

/* A tensor for another library, in both layouts, in one allocation. May be deleted on any thread,
 * without the GIL. */
typedef struct sent {
    fan_dl_versioned versioned;
    fan_dl_managed legacy;
    fan_array *a; /* held */
    int64_t dims[];
} sent;

static void delete_sent(sent *s)
{
    fan_array_drop(s->a);
    fan_free(s);
}

static void delete_versioned(fan_dl_versioned *m)
{
    delete_sent(m->ctx);
}

static void delete_legacy(fan_dl_managed *m)
{
    delete_sent(m->ctx);
}

/* capsule_gone: calls the deleter of a capsule that was not consumed; the live exception stays. */
static void capsule_gone(PyObject *capsule)
{
    bool versioned = PyCapsule_IsValid(capsule, "dltensor_versioned");
    if (versioned || PyCapsule_IsValid(capsule, "dltensor"))
        fan_dl_delete(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)), versioned);
}

PyObject *fan_dlpack_capsule(fan_dl_versioned *managed)
{
    return PyCapsule_New(managed, "dltensor_versioned", capsule_gone);
}

/* has_element_strides: whether every stride is a whole number of elements: DLPack cannot express
 * others. */
static bool has_element_strides(const fan_array *a)
{
    int64_t item = (int64_t)fan_dtype_size(a->dtype);
    for (int i = 0; i < a->ndim; i++) {
        if (a->strides[i] % item != 0)
            return false;
    }
    return true;
}

/* sent_new: NULL: out of memory. */
static sent *sent_new(fan_array *a, fan_dl_device at, bool copied)
{
    size_t ndim = (size_t)a->ndim;
    sent *s = fan_alloc(sizeof *s + 2 * ndim * sizeof(int64_t));
    if (!s)
        return NULL;
    fan_dl_tensor tensor = {
        .data = a->size ? a->data : NULL,
        .device = at,
        .ndim = a->ndim,
        .dtype = fan_dl_dtype_for(a->dtype),
        .shape = s->dims,
        .strides = s->dims + ndim,
    };
    for (size_t i = 0; i < ndim; i++) {
        tensor.shape[i] = a->shape[i];
        tensor.strides[i] = a->strides[i] / (int64_t)fan_dtype_size(a->dtype);
    }
    uint64_t flags = copied ? FAN_DL_IS_COPIED : 0;
    if (!a->writable)
        flags |= FAN_DL_READ_ONLY;
    s->a = fan_array_hold(a);
    s->versioned = (fan_dl_versioned){
        .major = FAN_DL_MAJOR,
        .minor = FAN_DL_MINOR,
        .ctx = s,
        .deleter = delete_versioned,
        .flags = flags,
        .tensor = tensor,
    };
    s->legacy = (fan_dl_managed){
        .tensor = tensor,
        .ctx = s,
        .deleter = delete_legacy,
    };
    return s;
}

fan_status fan_dlpack_send(fan_array *a, fan_dl_device at, fan_dl_versioned **out, fan_error *err)
{
    *out = NULL;
    if (!has_element_strides(a)) {
        return fan_fail(err, FAN_ERR_BUFFER,
                        "a stride is no whole number of elements: give a copy");
    }
    sent *s = sent_new(a, at, false);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    *out = &s->versioned;
    return FAN_OK;
}

/* dlpack_offer: a capsule over the memory of `a`, which it holds. */
static PyObject *dlpack_offer(fan_array *a, fan_dl_device at, bool versioned, bool copied)
{
    PyObject *capsule;
    sent *s = sent_new(a, at, copied);
    if (!s)
        return PyErr_NoMemory();
    if (versioned)
        capsule = fan_dlpack_capsule(&s->versioned);
    else
        capsule = PyCapsule_New(&s->legacy, "dltensor", capsule_gone);
    if (!capsule)
        delete_sent(s);
    return capsule;
}

/* two_ints: reads a tuple of two ints; false, without an exception: it is none. */
static bool two_ints(PyObject *o, long *first, long *second)
{
    bool good = PyTuple_Check(o) && PyArg_ParseTuple(o, "ll", first, second);
    PyErr_Clear();
    return good;
}

static PyObject *value_or_none(PyObject *o)
{
    return fan_or_none(o);
}

/* The arguments of __dlpack__. */
typedef struct fan_dl_request {
    PyObject *stream;
    long major;
    long type;
    long id;
    int copy; /* -1: not given */
} fan_dl_request;

/* request_parse: reads the arguments of __dlpack__, in the order of core.pyi. -1 with an
 * exception. */
static int request_parse(PyObject *const *values, fan_dl_request *q)
{
    PyObject *max_version = value_or_none(values[1]);
    PyObject *device = value_or_none(values[2]);
    PyObject *copy = value_or_none(values[3]);
    long minor;
    q->stream = value_or_none(values[0]);
    q->major = 0;
    if (max_version != Py_None && !two_ints(max_version, &q->major, &minor)) {
        return fan_refuse(PyExc_TypeError,
                          "__dlpack__: expected max_version=(major, minor), got %R", max_version);
    }
    if (device != Py_None && !two_ints(device, &q->type, &q->id)) {
        return fan_refuse(PyExc_TypeError, "__dlpack__: expected dl_device=(type, id), got %R",
                          device);
    }
    q->copy = copy == Py_None ? -1 : copy == Py_True;
    return 0;
}

/* request_decide: sets q->copy where a capsule cannot describe the array; -1 with BufferError where
 * the consumer wants no copy. */
static int request_decide(const fan_array *a, fan_dl_request *q)
{
    if (q->copy > 0)
        return 0;
    if (!has_element_strides(a)) {
        if (q->copy == 0) {
            return fan_refuse(PyExc_BufferError, "__dlpack__: a stride is no whole number of "
                                                 "elements: this array goes out as a copy only");
        }
        q->copy = 1;
    } else if (!a->writable && q->major < 1) {
        return fan_refuse(
            PyExc_BufferError,
            "__dlpack__: the array is read-only, and an unversioned capsule has no flag "
            "for that; pass max_version=(1, 0) or copy=True");
    }
    return 0;
}

/* ---- arrays on devices ---- */

/* consumer_stream: the stream that an integer of the protocol names, a hold; NULL: the consumer
 * wants no waiting (-1). */
static int consumer_stream(PyObject *o, fan_device *d, fan_stream **out)
{
    long long n = FAN_DL_LEGACY;
    int overflow = 0;
    *out = NULL;
    if (o != Py_None) {
        if (!PyLong_Check(o) || PyBool_Check(o)) {
            return fan_refuse(PyExc_TypeError,
                              "__dlpack__: expected stream= as an integer (1: legacy default, 2: "
                              "per-thread default, "
                              "-1: no waiting, or a handle), got %R",
                              o);
        }
        n = PyLong_AsLongLongAndOverflow(o, &overflow);
        if (n == -1 && PyErr_Occurred())
            return -1;
    }
    if (n == FAN_DL_NO_SYNC && !overflow)
        return 0;
    if (overflow || n <= 0) {
        return fan_refuse(PyExc_ValueError,
                          "__dlpack__: %R is no stream; expected 1 (legacy default), 2 (per-thread "
                          "default), -1 (no "
                          "waiting) or a handle",
                          o);
    }
    *out = fan_backend_stream(d, (uint64_t)n);
    if (!*out)
        return -1;
    return 0;
}

/* await_users: `s` waits for the work that was queued on the streams that used the memory, and is
 * recorded as one of them. May release the GIL. */
static fan_status await_users(fan_array *a, fan_stream *s, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_stream *user;
    for (size_t i = 0; status == FAN_OK && (user = fan_memory_user(a->storage, i)); i++) {
        status = fan_dl_order(s, user, err);
        fan_stream_drop(user);
    }
    FAN_TRY(status);
    return fan_memory_record_stream(a->storage, s, err);
}

/* device_copy: another array on d; its copy is queued on s after the work that made `a`. */
static fan_status device_copy(fan_array *a, fan_device *d, fan_stream *s, fan_array **out,
                              fan_error *err)
{
    fan_operand from = {
        .array = a,
        .acc = a->dtype,
    };
    FAN_TRY(fan_device_array(d, s, a->dtype, a->ndim, a->shape, a, out, err));
    fan_job job = {
        .kind = FAN_JOB_COPY,
        .out = *out,
        .in = &from,
        .n = 1,
        .label = "copy",
    };
    fan_status status = fan_device_run(d, s, &job, err);
    if (status != FAN_OK) {
        fan_array_drop(*out);
        *out = NULL;
    }
    return status;
}

/* order_for: orders the memory for the work that a consumer queues on `s` (NULL: it does not wait),
 * or makes a copy that is. */
static fan_status order_for(fan_stream *s, fan_array *a, fan_device *d, bool copy, fan_array **out,
                            fan_error *err)
{
    fan_stream *on = NULL;
    if (s)
        on = fan_stream_hold(s);
    else if (copy) /* a copy is ordered after its source in any case */
        on = fan_stream_current(d);
    else
        return FAN_OK;
    if (!on)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    fan_status status = await_users(a, on, err);
    if (status == FAN_OK && copy)
        status = device_copy(a, d, on, out, err);
    fan_stream_drop(on);
    return status;
}

/* host_copy: another array on the host, with the values when the call returns. */
static fan_status host_copy(fan_array *a, fan_device *d, fan_array **out, fan_error *err)
{
    fan_stream *s = fan_stream_current(d);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    fan_status status = await_users(a, s, err);
    if (status == FAN_OK)
        status = fan_array_new(a->dtype, a->ndim, a->shape, a, out, err);
    if (status == FAN_OK)
        status = d->backend->read(s, *out, a, err);
    fan_stream_drop(s);
    return status;
}

/* export_to_host: dl_device=(1, 0): a copy, complete when the call returns. */
static PyObject *export_to_host(fan_array *a, fan_device *d, const fan_dl_request *q)
{
    fan_array *copied = NULL;
    PyObject *capsule = NULL;
    if (q->stream != Py_None) {
        return PyErr_Format(
            PyExc_ValueError,
            "__dlpack__: a copy on the host has no streams; expected stream=None, got %R",
            q->stream);
    }
    if (q->copy == 0) {
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: the array is on a device, and copy=False: the host cannot "
                            "have it without a copy");
    }
    if (FAN_CHECK_UNLOCKED(host_copy(a, d, &copied, &err)) == 0)
        capsule = dlpack_offer(copied, (fan_dl_device){FAN_DL_CPU, 0}, q->major >= 1, true);
    fan_array_drop(copied);
    return capsule;
}

static int shared_with_others(const fan_device *d, const char *what)
{
    char text[32];
    if (fan_is_shared(d))
        return 0;
    return fan_refuse(PyExc_BufferError, "%s: the array is on %s, which no other library supports",
                      what, fan_device_text(d, text, sizeof text));
}

PyObject *fan_dlpack_device(const fan_device *d)
{
    if (shared_with_others(d, "__dlpack_device__") < 0)
        return NULL;
    return Py_BuildValue("(ii)", d->backend->dlpack[0], d->index);
}

PyObject *fan_dlpack_export(fan_array *a, fan_device *d, PyObject *const *values)
{
    fan_dl_device at = {d->backend->dlpack[0], d->index};
    fan_dl_request q = {
        .type = at.type,
        .id = at.id,
    };
    fan_stream *s = NULL;
    fan_array *copied = NULL;
    if (shared_with_others(d, "__dlpack__") < 0)
        return NULL;
    if (request_parse(values, &q) < 0)
        return NULL;
    if (q.type == FAN_DL_CPU && q.id == 0)
        return export_to_host(a, d, &q);
    if (q.type != at.type || q.id != at.id) {
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: the array is on %s and is not copied to device (%ld, %ld)",
                            fan_device_text(d, (char[32]){""}, 32), q.type, q.id);
    }
    if (request_decide(a, &q) < 0)
        return NULL;
    if (consumer_stream(q.stream, d, &s) < 0)
        return NULL;
    int bad = FAN_CHECK_UNLOCKED(order_for(s, a, d, q.copy > 0, &copied, &err));
    fan_stream_drop(s);
    if (bad)
        return NULL;
    bool is_copy = copied != NULL;
    PyObject *capsule = dlpack_offer(is_copy ? copied : a, at, q.major >= 1, is_copy);
    fan_array_drop(copied);
    return capsule;
}

PyObject *fan_interface_export(fan_array *a, fan_device *d)
{
    char type[8];
    char text[32];
    if (!d->backend->cuda_protocols || fan_dtype_of_ml_dtypes(a->dtype)) {
        return PyErr_Format(PyExc_AttributeError,
                            "an array of dtype %s on %s has no __cuda_array_interface__",
                            fan_dtype_name(a->dtype), fan_device_text(d, text, sizeof text));
    }
    size_t item = fan_dtype_size(a->dtype);
    char byte_order = item > 1 ? '<' : '|';
    snprintf(type, sizeof type, "%c%c%zu", byte_order, fan_dtype_kind(a->dtype), item);
    fan_stream *s = fan_stream_current(d);
    if (!s)
        return fan_raise(FAN_ERR_NOMEM, NULL);
    unsigned long long handle = s->handle;
    int bad = FAN_CHECK_UNLOCKED(await_users(a, s, &err));
    fan_stream_drop(s);
    if (bad)
        return NULL;
    return Py_BuildValue("{s:N,s:s,s:(NO),s:N,s:i,s:K}", "shape", fan_ints(a->ndim, a->shape),
                         "typestr", type, "data", PyLong_FromVoidPtr(a->size ? a->data : NULL),
                         fan_py_bool(!a->writable), "strides", fan_ints(a->ndim, a->strides),
                         "version", 3, "stream", handle);
}

/* ---- _Exporter: offers a host array of ours by __dlpack__ ---- */

typedef struct exporter {
    PyObject_HEAD fan_array *a; /* held; never NULL after new */
} exporter;

PyObject *fan_exporter_new(fan_array *a)
{
    PyTypeObject *type = fan_state_get()->exporter_type;
    exporter *self = (exporter *)type->tp_alloc(type, 0);
    if (self)
        self->a = fan_array_hold(a);
    return (PyObject *)self;
}

FAN_DEALLOC(exporter_dealloc, fan_array_drop(((exporter *)o)->a))

static PyObject *exporter_dlpack(PyObject *o, PyObject *const *values)
{
    fan_dl_request q = {.type = FAN_DL_CPU};
    fan_array *a = ((exporter *)o)->a;
    fan_array *copied = NULL;
    if (request_parse(values, &q) < 0)
        return NULL;
    if (q.stream != Py_None) {
        return PyErr_Format(PyExc_ValueError,
                            "__dlpack__: a host array has no streams; expected stream=None, got %R",
                            q.stream);
    }
    if (q.type != FAN_DL_CPU || q.id != 0) {
        return PyErr_Format(
            PyExc_BufferError,
            "__dlpack__: the array is on the host and is not copied to device (%ld, %ld)", q.type,
            q.id);
    }
    if (request_decide(a, &q) < 0)
        return NULL;
    if (q.copy > 0) {
        if (FAN_CHECK(fan_array_new(a->dtype, a->ndim, a->shape, a, &copied, &err)) < 0)
            return NULL;
        fan_array_copy(copied, a);
        a = copied;
    }
    PyObject *capsule = dlpack_offer(a, (fan_dl_device){FAN_DL_CPU, 0}, q.major >= 1, q.copy > 0);
    fan_array_drop(copied);
    return capsule;
}

static PyObject *exporter_dlpack_device(PyObject *Py_UNUSED(o), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("(ii)", FAN_DL_CPU, 0);
}

static PyObject *exporter_numpy(PyObject *o, PyObject *Py_UNUSED(none))
{
    return fan_export_array(((exporter *)o)->a);
}

static PyObject *exporter_compact(PyObject *o, PyObject *Py_UNUSED(none))
{
    const fan_array *a = ((exporter *)o)->a;
    fan_array *compact;
    if (FAN_CHECK(fan_array_compact(a, fan_array_expanded(a), &compact, &err)) < 0)
        return NULL;
    PyObject *base = fan_exporter_new(compact);
    fan_array_drop(compact);
    return Py_BuildValue("(NN)", base, fan_ints(a->ndim, a->shape));
}

#include "py/declared/Exporter.h"

static PyType_Slot exporter_slots[] = {
    {Py_tp_doc, (void *)exporter_doc},
    {Py_tp_dealloc, exporter_dealloc},
    {Py_tp_methods, exporter_methods},
    {0, NULL},
};

PyType_Spec fan_exporter_spec = {
    .name = "fanin._core._Exporter",
    .basicsize = sizeof(exporter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = exporter_slots,
};
