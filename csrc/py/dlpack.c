/* dlpack: see dlpack.h. First what comes in, then what goes out. */
#include "py/dlpack.h"
#include "array/elements.h"
#include "py/machine.h"

#include "base/mem.h"
#include "device/cuda/cuda.h"

#include <stdio.h>
#include <string.h>

/* ---- in ---- */

/* What a storage keeps of the tensor under it. */
typedef struct taken {
    void *managed; /* fan_dl_versioned, or fan_dl_managed */
    bool versioned;
    PyObject *producer; /* held where there is no deleter */
} taken;

/* delete: the producer's deleter, with the live exception set aside; what it leaves behind goes to sys.unraisablehook.
 * Needs the GIL. */
static void delete (void *managed, bool versioned)
{
    PyObject *live = fan_exception_take();
    if (versioned) {
        fan_dl_versioned *m = managed;
        if (m->deleter)
            m->deleter(m);
    } else {
        fan_dl_managed *m = managed;
        if (m->deleter)
            m->deleter(m);
    }
    if (PyErr_Occurred())
        PyErr_WriteUnraisable(NULL);
    fan_exception_put(live);
}

static void release_taken(void *ctx)
{
    taken *t = ctx;
    fan_gil gil;
    /* The interpreter is gone or going: the producer may be, too. Its memory is left to the end of the process. */
    if (fan_finalizing() || !fan_gil_enter(&gil))
        return;
    delete (t->managed, t->versioned);
    Py_XDECREF(t->producer);
    fan_free(t);
    fan_gil_leave(&gil);
}

static void release_host(fan_storage *s) { release_taken(s->ctx); }

/* storage_for: over no memory yet; where that is on a device with streams, `release` waits for those that used it. NULL
 * with an exception. */
static fan_storage *storage_for(fan_device *d, void (*host)(fan_storage *), void (*release)(void *), void *ctx)
{
    fan_storage *st = NULL;
    fan_error err = {0};
    if (!d->backend->has_streams)
        st = fan_storage_wrap(NULL, 0, host, ctx);
    else
        (void)fan_memory_wrap(d, NULL, release, ctx, &st, &err);
    if (!st)
        PyErr_NoMemory();
    return st;
}

fan_dtype fan_dl_dtype_of(fan_dl_dtype d)
{
    switch (d.code) {
    case FAN_DL_BOOL:
        return d.bits == 8 ? FAN_DT_BOOL : FAN_DT_NONE;
    case FAN_DL_INT:
        return d.bits == 8    ? FAN_DT_INT8
               : d.bits == 16 ? FAN_DT_INT16
               : d.bits == 32 ? FAN_DT_INT32
               : d.bits == 64 ? FAN_DT_INT64
                              : FAN_DT_NONE;
    case FAN_DL_UINT:
        return d.bits == 8    ? FAN_DT_UINT8
               : d.bits == 16 ? FAN_DT_UINT16
               : d.bits == 32 ? FAN_DT_UINT32
               : d.bits == 64 ? FAN_DT_UINT64
                              : FAN_DT_NONE;
    case FAN_DL_FLOAT:
        return d.bits == 16   ? FAN_DT_FLOAT16
               : d.bits == 32 ? FAN_DT_FLOAT32
               : d.bits == 64 ? FAN_DT_FLOAT64
                              : FAN_DT_NONE;
    case FAN_DL_BFLOAT:
        return d.bits == 16 ? FAN_DT_BFLOAT16 : FAN_DT_NONE;
    case FAN_DL_COMPLEX:
        return d.bits == 64 ? FAN_DT_COMPLEX64 : d.bits == 128 ? FAN_DT_COMPLEX128 : FAN_DT_NONE;
    case FAN_DL_F8_E4M3FN:
        return d.bits == 8 ? FAN_DT_FLOAT8_E4M3FN : FAN_DT_NONE;
    case FAN_DL_F8_E5M2:
        return d.bits == 8 ? FAN_DT_FLOAT8_E5M2 : FAN_DT_NONE;
    default:
        return FAN_DT_NONE;
    }
}

/* device_words: "CUDA device 1", for messages. */
static char *device_words(fan_dl_device d, char *buf, size_t size)
{
    static const struct {
        int32_t type;
        const char *word;
    } known[] = {{FAN_DL_CUDA, "CUDA"}, {FAN_DL_CUDA_MANAGED, "CUDA managed"},
                 {4, "OpenCL"},         {7, "Vulkan"},
                 {8, "Metal"},          {10, "ROCm"},
                 {11, "ROCm host"},     {12, "extension"},
                 {14, "oneAPI"},        {16, "Hexagon"},
                 {18, "Trainium"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].type == d.type) {
            snprintf(buf, size, "%s device %ld", known[i].word, (long)d.id);
            return buf;
        }
    snprintf(buf, size, "device (%ld, %ld)", (long)d.type, (long)d.id);
    return buf;
}

/* inside: whether all of `a` lies in the address space, and, on a device, whether its elements lie where the device can
 * read them. */
static int inside(const fan_array *a, const fan_device *d)
{
    uintptr_t at = (uintptr_t)a->data, end;
    size_t item = fan_dtype_size(a->dtype), align = fan_dtype_kind(a->dtype) == 'c' ? item / 2 : item;
    bool aligned = at % align == 0;
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    if ((uintptr_t)-lo > at || __builtin_add_overflow(at, (uintptr_t)hi, &end))
        return fan_refuse(PyExc_ValueError, "the tensor's strides leave the address space");
    for (int i = 0; i < a->ndim; i++)
        aligned = aligned && (a->shape[i] < 2 || a->strides[i] % (int64_t)align == 0);
    if (d->backend->has_streams && a->size > 0 && !aligned)
        return fan_refuse(
            PyExc_BufferError,
            "the tensor's elements of %zu bytes are not aligned, and a device cannot read them: give a copy", item);
    return 0;
}

/* geometry: the tensor as a view into `st`, which is not yet over any memory: fills in its address. */
static int geometry(const fan_dl_tensor *t, bool writable, fan_storage *st, const fan_device *d, fan_array **out)
{
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM], size = 0;
    fan_error err = {0};
    fan_dtype dtype = fan_dl_dtype_of(t->dtype);
    uintptr_t at = (uintptr_t)t->data;
    fan_status status;
    if (dtype == FAN_DT_NONE || t->dtype.lanes != 1)
        return fan_refuse(
            PyExc_BufferError,
            "the tensor's elements have DLPack type code %d with %d bits and %d lanes, which is not summed",
            (int)t->dtype.code, (int)t->dtype.bits, (int)t->dtype.lanes);
    if (t->ndim < 0 || t->ndim > FAN_MAX_NDIM)
        return fan_refuse(PyExc_ValueError, "the tensor has %d axes; expected 0 to %d", (int)t->ndim, FAN_MAX_NDIM);
    if (t->ndim > 0 && !t->shape)
        return fan_refuse(PyExc_ValueError, "the tensor has %d axes and no shape", (int)t->ndim);
    for (int i = 0; i < t->ndim; i++)
        shape[i] = t->shape[i];
    status = fan_shape_check(t->ndim, shape, fan_dtype_size(dtype), &size, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    fan_dense_strides(t->ndim, shape, fan_dtype_size(dtype), NULL, strides);
    /* An empty tensor's address and strides mean nothing and may be anything. */
    for (int i = 0; i < t->ndim && t->strides && size > 0; i++)
        if (__builtin_mul_overflow(t->strides[i], (int64_t)fan_dtype_size(dtype), &strides[i]))
            return fan_refuse(PyExc_ValueError,
                              "the tensor's stride %lld along axis %d is more than can be counted in bytes",
                              (long long)t->strides[i], i);
    if (size > 0 && !t->data)
        return fan_refuse(PyExc_ValueError, "the tensor has %lld elements at address NULL", (long long)size);
    if (size > 0 && (t->byte_offset > INT64_MAX || __builtin_add_overflow(at, (uintptr_t)t->byte_offset, &at)))
        return fan_refuse(PyExc_ValueError, "the tensor's byte_offset %llu leaves the address space",
                          (unsigned long long)t->byte_offset);
    if (size == 0)
        at = 0;
    st->data = (void *)at;
    status = fan_array_view(st, (char *)at, dtype, t->ndim, shape, strides, writable, out, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    if (inside(*out, d) == 0)
        return 0;
    fan_array_drop(*out);
    *out = NULL;
    return -1;
}

/* check_device: whether the tensor is where it is to be, and where __dlpack_device__ said. */
static int check_device(const fan_dl_device *at, const fan_dl_device *said, const fan_device *d)
{
    char words[64], name[32];
    bool host = at->type == FAN_DL_CPU || at->type == FAN_DL_CUDA_HOST,
         device = at->type == FAN_DL_CUDA || at->type == FAN_DL_CUDA_MANAGED;
    if (d->backend->has_streams ? !device || at->id != d->index : !host || at->id < 0)
        return fan_refuse(PyExc_BufferError, "the tensor is on %s; expected %s", device_words(*at, words, sizeof words),
                          d->backend->has_streams ? fan_device_text(d, name, sizeof name) : "host memory");
    if (said->type >= 0 && said->type != at->type)
        return fan_refuse(PyExc_BufferError,
                          "__dlpack_device__ named device type %ld, and the tensor is on device type %ld",
                          (long)said->type, (long)at->type);
    return 0;
}

/* ours: takes the capsule's content, which from then on is the caller's. One of two takers wins, with or without a GIL.
 */
static void *ours(PyObject *capsule, bool *versioned)
{
    static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;
    const char *name;
    void *managed = NULL;
    int status = 0;
    pthread_mutex_lock(&taking);
    name = PyCapsule_GetName(capsule);
    *versioned = name && strcmp(name, "dltensor_versioned") == 0;
    if (*versioned || (name && strcmp(name, "dltensor") == 0)) {
        managed = PyCapsule_GetPointer(capsule, name);
        status = managed ? PyCapsule_SetName(capsule, *versioned ? "used_dltensor_versioned" : "used_dltensor") : -1;
    }
    pthread_mutex_unlock(&taking);
    if (managed && status == 0)
        return managed;
    if (PyErr_Occurred())
        return NULL;
    if (name && strncmp(name, "used_", 5) == 0)
        fan_refuse(PyExc_BufferError, "the DLPack capsule has been consumed already");
    else
        fan_refuse(PyExc_BufferError,
                   "__dlpack__ gave a capsule that is neither a 'dltensor' nor a 'dltensor_versioned'");
    return NULL;
}

int fan_dlpack_adopt(void *managed, bool versioned, PyObject *producer, const fan_dl_device *said, fan_dl_writes writes,
                     fan_device *d, fan_array **out)
{
    const fan_dl_versioned *new_form = versioned ? managed : NULL;
    const fan_dl_managed *old_form = versioned ? NULL : managed;
    bool has_deleter = new_form ? new_form->deleter != NULL : old_form->deleter != NULL;
    fan_storage *st = NULL;
    taken *t = NULL;
    if (new_form && new_form->major != FAN_DL_MAJOR) {
        /* Nothing behind the flags may be read. */
        fan_refuse(PyExc_BufferError, "the tensor is of DLPack version %u.%u; expected major version %d",
                   (unsigned)new_form->major, (unsigned)new_form->minor, FAN_DL_MAJOR);
        goto refuse;
    }
    fan_dl_tensor tensor = new_form ? new_form->tensor : old_form->tensor;
    if (check_device(&tensor.device, said, d) < 0)
        goto refuse;
    if (!has_deleter && !producer) {
        fan_refuse(PyExc_BufferError, "the DLPack capsule has no deleter, and nothing else keeps its memory alive");
        goto refuse;
    }
    bool writable = writes == FAN_DL_WRITE || (writes == FAN_DL_AS_IT_SAYS && new_form &&
                                               !(new_form->flags & (FAN_DL_READ_ONLY | FAN_DL_IS_COPIED)));
    t = fan_alloc(sizeof *t);
    if (!t)
        PyErr_NoMemory();
    st = t ? storage_for(d, release_host, release_taken, t) : NULL;
    if (!st) {
        fan_free(t);
        goto refuse;
    }
    *t = (taken){managed, versioned, has_deleter ? NULL : Py_XNewRef(producer)};
    /* From here on the storage's release calls the deleter. */
    int result = geometry(&tensor, writable, st, d, out);
    fan_storage_drop(st);
    return result;
refuse:
    delete (managed, versioned);
    return -1;
}

int fan_dlpack_take(PyObject *capsule, PyObject *producer, const fan_dl_device *said, fan_dl_writes writes,
                    fan_device *d, fan_array **out)
{
    bool versioned;
    void *managed;
    if (!PyCapsule_CheckExact(capsule))
        return fan_refuse(PyExc_TypeError, "__dlpack__ gave a %.200s; expected a capsule", Py_TYPE(capsule)->tp_name);
    managed = ours(capsule, &versioned);
    return managed ? fan_dlpack_adopt(managed, versioned, producer, said, writes, d, out) : -1;
}

/* peek_at: a tensor's numbers in memory of ours. */
static int peek_at(const fan_dl_tensor *t, int64_t *dims, fan_dl_tensor *out)
{
    *out = *t;
    if (t->ndim < 0 || t->ndim > FAN_MAX_NDIM)
        return fan_refuse(PyExc_ValueError, "the tensor has %d axes; expected 0 to %d", (int)t->ndim, FAN_MAX_NDIM);
    if (t->ndim > 0 && !t->shape)
        return fan_refuse(PyExc_ValueError, "the tensor has %d axes and no shape", (int)t->ndim);
    out->shape = dims;
    out->strides = t->strides ? dims + t->ndim : NULL;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0)
            return fan_refuse(PyExc_ValueError, "the tensor's axis %d has the extent %lld: it must not be negative", i,
                              (long long)t->shape[i]);
        out->shape[i] = t->shape[i];
        if (t->strides)
            out->strides[i] = t->strides[i];
    }
    return 0;
}

int fan_dlpack_peek(PyObject *capsule, int64_t *dims, fan_dl_tensor *out, uint64_t *flags)
{
    bool versioned;
    int result = -1;
    void *managed;
    if (!PyCapsule_CheckExact(capsule))
        return fan_refuse(PyExc_TypeError, "__dlpack__ gave a %.200s; expected a capsule", Py_TYPE(capsule)->tp_name);
    managed = ours(capsule, &versioned);
    if (!managed)
        return -1;
    *flags = 0;
    if (!versioned) {
        result = peek_at(&((const fan_dl_managed *)managed)->tensor, dims, out);
    } else if (((const fan_dl_versioned *)managed)->major == FAN_DL_MAJOR) {
        *flags = ((const fan_dl_versioned *)managed)->flags;
        result = peek_at(&((const fan_dl_versioned *)managed)->tensor, dims, out);
    } else {
        fan_refuse(PyExc_BufferError, "the tensor is of DLPack version %u.%u; expected major version %d",
                   (unsigned)((const fan_dl_versioned *)managed)->major,
                   (unsigned)((const fan_dl_versioned *)managed)->minor, FAN_DL_MAJOR);
    }
    delete (managed, versioned);
    return result;
}

static void release_owner(void *owner)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    PyObject *live = fan_exception_take();
    Py_DECREF((PyObject *)owner);
    fan_exception_put(live);
    fan_gil_leave(&gil);
}

static void release_host_owner(fan_storage *s) { release_owner(s->ctx); }

int fan_address_take(uint64_t address, fan_dtype dtype, int ndim, const int64_t *shape, const int64_t *strides,
                     bool writable, PyObject *owner, fan_device *d, fan_array **out)
{
    int64_t dense[FAN_MAX_NDIM], size = 0;
    fan_error err = {0};
    fan_status status = fan_shape_check(ndim, shape, fan_dtype_size(dtype), &size, &err);
    fan_storage *st;
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    if (size > 0 && !address)
        return fan_refuse(PyExc_ValueError, "the array has %lld elements at address NULL", (long long)size);
    if (size == 0)
        address = 0;
    if (!strides || size == 0) {
        fan_dense_strides(ndim, shape, fan_dtype_size(dtype), NULL, dense);
        strides = dense;
    }
    st = storage_for(d, release_host_owner, release_owner, owner);
    if (!st)
        return -1;
    Py_INCREF(owner);
    st->data = (void *)(uintptr_t)address;
    status = fan_array_view(st, st->data, dtype, ndim, shape, strides, writable, out, &err);
    fan_storage_drop(st);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    if (inside(*out, d) == 0)
        return 0;
    fan_array_drop(*out);
    *out = NULL;
    return -1;
}

const fan_dl_api *fan_dl_api_of(PyObject *capsule)
{
    const fan_dl_api *api = PyCapsule_CheckExact(capsule) ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    while (api && api->header.major != FAN_DL_MAJOR)
        api = api->header.older;
    return api && api->look && api->allocate && api->give && api->take && api->current_stream ? api : NULL;
}

/* ---- out ---- */

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

static void exporter_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    fan_array_drop(((exporter *)o)->a);
    type->tp_free(o);
    Py_DECREF(type);
}

/* A tensor that goes out; both layouts, one allocation. May be deleted on any thread, without the GIL. */
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

static void delete_versioned(fan_dl_versioned *m) { delete_sent(m->ctx); }

static void delete_legacy(fan_dl_managed *m) { delete_sent(m->ctx); }

/* Nobody took what is in the capsule: the deleter is called, the live exception stays. */
static void capsule_gone(PyObject *capsule)
{
    PyObject *live;
    fan_dl_versioned *v;
    fan_dl_managed *m;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        v = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        live = fan_exception_take();
        if (v && v->deleter)
            v->deleter(v);
        fan_exception_put(live);
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        m = PyCapsule_GetPointer(capsule, "dltensor");
        live = fan_exception_take();
        if (m && m->deleter)
            m->deleter(m);
        fan_exception_put(live);
    }
}

PyObject *fan_dlpack_capsule(fan_dl_versioned *managed)
{
    return PyCapsule_New(managed, "dltensor_versioned", capsule_gone);
}

fan_dl_dtype fan_dl_dtype_for(fan_dtype d)
{
    uint8_t code = FAN_DL_FLOAT;
    switch (d) {
    case FAN_DT_BOOL:
        code = FAN_DL_BOOL;
        break;
    case FAN_DT_BFLOAT16:
        code = FAN_DL_BFLOAT;
        break;
    case FAN_DT_FLOAT8_E4M3FN:
        code = FAN_DL_F8_E4M3FN;
        break;
    case FAN_DT_FLOAT8_E5M2:
        code = FAN_DL_F8_E5M2;
        break;
    default:
        code = fan_dtype_kind(d) == 'i'   ? FAN_DL_INT
               : fan_dtype_kind(d) == 'u' ? FAN_DL_UINT
               : fan_dtype_kind(d) == 'c' ? FAN_DL_COMPLEX
                                          : FAN_DL_FLOAT;
    }
    return (fan_dl_dtype){code, (uint8_t)(8 * fan_dtype_size(d)), 1};
}

/* countable: whether every stride is a whole number of elements, which is all that DLPack can say. */
static bool countable(const fan_array *a)
{
    int64_t item = (int64_t)fan_dtype_size(a->dtype);
    for (int i = 0; i < a->ndim; i++)
        if (a->strides[i] % item != 0)
            return false;
    return true;
}

static PyObject *offer(fan_array *a, fan_dl_device at, bool versioned, bool copied)
{
    size_t ndim = (size_t)a->ndim;
    sent *s = fan_alloc(sizeof *s + 2 * ndim * sizeof(int64_t));
    fan_dl_tensor tensor = {
        .data = a->size ? a->data : NULL, .device = at, .ndim = a->ndim, .dtype = fan_dl_dtype_for(a->dtype)};
    PyObject *capsule;
    if (!s)
        return PyErr_NoMemory();
    tensor.shape = s->dims;
    tensor.strides = s->dims + ndim;
    for (size_t i = 0; i < ndim; i++) {
        tensor.shape[i] = a->shape[i];
        tensor.strides[i] = a->strides[i] / (int64_t)fan_dtype_size(a->dtype);
    }
    s->a = fan_array_hold(a);
    s->versioned = (fan_dl_versioned){
        .major = FAN_DL_MAJOR,
        .minor = FAN_DL_MINOR,
        .ctx = s,
        .deleter = delete_versioned,
        .flags = (a->writable ? 0 : FAN_DL_READ_ONLY) | (copied ? FAN_DL_IS_COPIED : 0),
        .tensor = tensor,
    };
    s->legacy = (fan_dl_managed){.tensor = tensor, .ctx = s, .deleter = delete_legacy};
    capsule = versioned ? PyCapsule_New(&s->versioned, "dltensor_versioned", capsule_gone)
                        : PyCapsule_New(&s->legacy, "dltensor", capsule_gone);
    if (!capsule)
        delete_sent(s);
    return capsule;
}

/* What a consumer asks of __dlpack__. */
typedef struct asked {
    PyObject *stream;
    long major, type, id;
    int copy; /* -1: not said */
} asked;

static bool two_ints(PyObject *o, long *first, long *second)
{
    bool are = PyTuple_Check(o) && PyArg_ParseTuple(o, "ll", first, second);
    PyErr_Clear();
    return are;
}

static int parse_asked(PyObject *args, PyObject *kwargs, asked *q)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *max_version = Py_None, *device = Py_None, *copy = Py_None;
    long minor = 0;
    q->stream = Py_None;
    q->major = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &q->stream, &max_version, &device,
                                     &copy))
        return -1;
    if (max_version != Py_None && !two_ints(max_version, &q->major, &minor))
        return fan_refuse(PyExc_TypeError, "__dlpack__: expected max_version=(major, minor), got %R", max_version);
    if (device != Py_None && !two_ints(device, &q->type, &q->id))
        return fan_refuse(PyExc_TypeError, "__dlpack__: expected dl_device=(type, id), got %R", device);
    q->copy = copy == Py_None ? -1 : PyObject_IsTrue(copy);
    return copy != Py_None && q->copy < 0 ? -1 : 0;
}

/* settle_copy: a view goes out as itself unless a copy was asked for or a capsule cannot say what it is; -1 with
 * BufferError where a copy is not wanted. */
static int settle_copy(const fan_array *a, asked *q)
{
    if (q->copy > 0)
        return 0;
    if (!countable(a)) {
        if (q->copy == 0)
            return fan_refuse(
                PyExc_BufferError,
                "__dlpack__: a stride is no whole number of elements: this array goes out as a copy only");
        q->copy = 1;
    } else if (!a->writable && q->major < 1) {
        return fan_refuse(PyExc_BufferError, "__dlpack__: the array is read-only, which an unversioned capsule cannot "
                                             "say; ask with max_version=(1, 0), or for copy=True");
    }
    return 0;
}

static PyObject *exporter_dlpack(PyObject *o, PyObject *args, PyObject *kwargs)
{
    asked q = {.type = FAN_DL_CPU};
    PyObject *capsule;
    fan_array *a = ((exporter *)o)->a, *copied = NULL;
    fan_error err = {0};
    if (parse_asked(args, kwargs, &q) < 0)
        return NULL;
    if (q.stream != Py_None)
        return PyErr_Format(PyExc_ValueError, "__dlpack__: a host array has no streams; expected stream=None, got %R",
                            q.stream);
    if (q.type != FAN_DL_CPU || q.id != 0)
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: the array is on the host and is not copied to device (%ld, %ld)", q.type,
                            q.id);
    if (settle_copy(a, &q) < 0)
        return NULL;
    if (q.copy > 0) {
        fan_status status = fan_array_new(a->dtype, a->ndim, a->shape, a, &copied, &err);
        if (status != FAN_OK)
            return fan_raise(status, &err);
        fan_array_copy(copied, a);
        a = copied;
    }
    capsule = offer(a, (fan_dl_device){FAN_DL_CPU, 0}, q.major >= 1, q.copy > 0);
    fan_array_drop(copied);
    return capsule;
}

/* ---- out, from a device ---- */

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
    *out = fan_cuda_stream_arg(d, (uint64_t)n);
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

static PyObject *export_to_host(fan_array *a, fan_device *d, const asked *q)
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
    Py_BEGIN_ALLOW_THREADS status = to_host(a, d, &copied, &err);
    Py_END_ALLOW_THREADS if (status != FAN_OK) return fan_raise(status, &err);
    PyObject *capsule = offer(copied, (fan_dl_device){FAN_DL_CPU, 0}, q->major >= 1, true);
    fan_array_drop(copied);
    return capsule;
}

static int shared_with_others(const fan_device *d, const char *what)
{
    char text[32];
    if (fan_cuda_of(d))
        return 0;
    return fan_refuse(PyExc_BufferError, "%s: the array is on %s, which no other library knows", what,
                      fan_device_text(d, text, sizeof text));
}

PyObject *fan_dlpack_device(const fan_device *d)
{
    return shared_with_others(d, "__dlpack_device__") < 0 ? NULL : Py_BuildValue("(ii)", FAN_DL_CUDA, d->index);
}

PyObject *fan_dlpack_export(fan_array *a, fan_device *d, PyObject *args, PyObject *kwargs)
{
    asked q = {.type = FAN_DL_CUDA, .id = d->index};
    fan_stream *s = NULL, *on = NULL;
    fan_array *copied = NULL;
    fan_error err = {0};
    fan_status status = FAN_OK;
    PyObject *capsule = NULL;
    if (shared_with_others(d, "__dlpack__") < 0 || parse_asked(args, kwargs, &q) < 0)
        return NULL;
    if (q.type == FAN_DL_CPU && q.id == 0)
        return export_to_host(a, d, &q);
    if (q.type != FAN_DL_CUDA || q.id != d->index)
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: the array is on CUDA device %d and is not copied to device (%ld, %ld)",
                            d->index, q.type, q.id);
    if (settle_copy(a, &q) < 0)
        return NULL;
    if (consumer_stream(q.stream, d, &s) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS on = s            ? fan_stream_hold(s)
                                : q.copy > 0 ? fan_stream_current(d)
                                             : NULL; /* a copy is ordered behind its source at any rate */
    if (on)
        status = await_users(a, on, &err);
    if (status == FAN_OK && q.copy > 0)
        status =
            on ? device_copy(a, d, on, &copied, &err) : fan_fail(&err, FAN_ERR_NOMEM, "out of memory for a stream");
    fan_stream_drop(on);
    fan_stream_drop(s);
    Py_END_ALLOW_THREADS if (status != FAN_OK) return fan_raise(status, &err);
    capsule = offer(copied ? copied : a, (fan_dl_device){FAN_DL_CUDA, d->index}, q.major >= 1, copied != NULL);
    fan_array_drop(copied);
    return capsule;
}

/* typestr: "<f4"; false for what NumPy's letters do not name. */
static bool typestr(fan_dtype d, char *buf, size_t size)
{
    if (d == FAN_DT_BFLOAT16 || d == FAN_DT_FLOAT8_E4M3FN || d == FAN_DT_FLOAT8_E5M2)
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
    if (!fan_cuda_of(d) || !typestr(a->dtype, type, sizeof type))
        return PyErr_Format(PyExc_AttributeError, "an array of dtype %s on %s has no __cuda_array_interface__",
                            fan_dtype_name(a->dtype), fan_device_text(d, text, sizeof text));
    fan_stream *s = fan_stream_current(d);
    Py_BEGIN_ALLOW_THREADS if (s) status = await_users(a, s, &err);
    Py_END_ALLOW_THREADS unsigned long long handle = s ? s->handle : FAN_DL_LEGACY;
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

static PyObject *exporter_dlpack_device(PyObject *Py_UNUSED(o), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("(ii)", FAN_DL_CPU, 0);
}

static PyObject *exporter_numpy(PyObject *o, PyObject *Py_UNUSED(none)) { return fan_export_array(((exporter *)o)->a); }

static PyMethodDef exporter_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))exporter_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\nA capsule over the array's "
     "memory."},
    {"__dlpack_device__", exporter_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self, /)\n--\n\n(1, 0): host memory."},
    {"numpy", exporter_numpy, METH_NOARGS, "numpy($self, /)\n--\n\nAn ndarray over the same memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot exporter_slots[] = {
    {Py_tp_doc, "An array of the core's on its way out: _interop.export makes of it what the caller knows."},
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
