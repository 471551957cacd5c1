/* dlpack: see dlpack.h. First what comes in, then what goes out. */
#include "py/dlpack.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- in ---- */

/* What a storage keeps of the tensor under it. */
typedef struct taken {
    void *managed; /* fan_dl_versioned, or fan_dl_managed */
    bool versioned;
    PyObject *producer; /* held where there is no deleter */
} taken;

/* delete: the producer's deleter, with the live exception set aside; what it leaves behind goes to sys.unraisablehook. Needs the GIL. */
static void delete(void *managed, bool versioned)
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

static void release_taken(fan_storage *s)
{
    taken *t = s->ctx;
    fan_gil gil;
    /* The interpreter is gone or going: the producer may be, too. Its memory is left to the end of the process. */
    if (fan_finalizing() || !fan_gil_enter(&gil))
        return;
    delete(t->managed, t->versioned);
    Py_XDECREF(t->producer);
    fan_free(t);
    fan_gil_leave(&gil);
}

fan_dtype fan_dl_dtype_of(fan_dl_dtype d)
{
    switch (d.code) {
    case FAN_DL_BOOL:
        return d.bits == 8 ? FAN_BOOL : FAN_NO_DTYPE;
    case FAN_DL_INT:
        return d.bits == 8 ? FAN_INT8 : d.bits == 16 ? FAN_INT16 : d.bits == 32 ? FAN_INT32 : d.bits == 64 ? FAN_INT64 : FAN_NO_DTYPE;
    case FAN_DL_UINT:
        return d.bits == 8 ? FAN_UINT8 : d.bits == 16 ? FAN_UINT16 : d.bits == 32 ? FAN_UINT32 : d.bits == 64 ? FAN_UINT64 : FAN_NO_DTYPE;
    case FAN_DL_FLOAT:
        return d.bits == 16 ? FAN_FLOAT16 : d.bits == 32 ? FAN_FLOAT32 : d.bits == 64 ? FAN_FLOAT64 : FAN_NO_DTYPE;
    case FAN_DL_BFLOAT:
        return d.bits == 16 ? FAN_BFLOAT16 : FAN_NO_DTYPE;
    case FAN_DL_COMPLEX:
        return d.bits == 64 ? FAN_COMPLEX64 : d.bits == 128 ? FAN_COMPLEX128 : FAN_NO_DTYPE;
    case FAN_DL_F8_E4M3FN:
        return d.bits == 8 ? FAN_FLOAT8_E4M3FN : FAN_NO_DTYPE;
    case FAN_DL_F8_E5M2:
        return d.bits == 8 ? FAN_FLOAT8_E5M2 : FAN_NO_DTYPE;
    default:
        return FAN_NO_DTYPE;
    }
}

/* device_words: "CUDA device 1", for messages. */
static char *device_words(fan_dl_device d, char *buf, size_t size)
{
    static const struct {
        int32_t type;
        const char *word;
    } known[] = {{FAN_DL_CUDA, "CUDA"}, {FAN_DL_CUDA_MANAGED, "CUDA managed"}, {4, "OpenCL"}, {7, "Vulkan"}, {8, "Metal"}, {10, "ROCm"},
                 {11, "ROCm host"},     {12, "extension"},                      {14, "oneAPI"}, {16, "Hexagon"}, {18, "Trainium"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].type == d.type) {
            snprintf(buf, size, "%s device %ld", known[i].word, (long)d.id);
            return buf;
        }
    snprintf(buf, size, "device (%ld, %ld)", (long)d.type, (long)d.id);
    return buf;
}

/* geometry: the tensor as a view into `st`, which is not yet over any memory: fills in its address. */
static int geometry(const fan_dl_tensor *t, bool writable, fan_storage *st, fan_array **out)
{
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM], size = 0, lo, hi;
    fan_error err = {0};
    fan_dtype dtype = fan_dl_dtype_of(t->dtype);
    uintptr_t at = (uintptr_t)t->data, end;
    fan_status status;
    if (dtype == FAN_NO_DTYPE || t->dtype.lanes != 1)
        return fan_refuse(PyExc_BufferError, "the tensor's elements have DLPack type code %d with %d bits and %d lanes, which is not summed",
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
            return fan_refuse(PyExc_ValueError, "the tensor's stride %lld along axis %d is more than can be counted in bytes",
                              (long long)t->strides[i], i);
    if (size > 0 && !t->data)
        return fan_refuse(PyExc_ValueError, "the tensor has %lld elements at address NULL", (long long)size);
    if (size > 0 && (t->byte_offset > INT64_MAX || __builtin_add_overflow(at, (uintptr_t)t->byte_offset, &at)))
        return fan_refuse(PyExc_ValueError, "the tensor's byte_offset %llu leaves the address space", (unsigned long long)t->byte_offset);
    if (size == 0)
        at = 0;
    st->data = (void *)at;
    status = fan_array_view(st, (char *)at, dtype, t->ndim, shape, strides, writable, out, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    fan_array_reach(*out, &lo, &hi);
    if ((uintptr_t)-lo > at || __builtin_add_overflow(at, (uintptr_t)hi, &end)) {
        fan_array_drop(*out);
        *out = NULL;
        return fan_refuse(PyExc_ValueError, "the tensor's strides leave the address space");
    }
    return 0;
}

/* ours: takes the capsule's content, which from then on is the caller's. One of two takers wins, with or without a GIL. */
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
        fan_refuse(PyExc_BufferError, "__dlpack__ gave a capsule that is neither a 'dltensor' nor a 'dltensor_versioned'");
    return NULL;
}

int fan_dlpack_take(PyObject *capsule, PyObject *producer, int64_t device_type, fan_dl_writes writes, fan_array **out)
{
    fan_dl_tensor tensor;
    uint64_t flags = 0;
    bool versioned, has_deleter, writable;
    fan_storage *st = NULL;
    taken *t = NULL;
    void *managed;
    char words[64];
    int result = -1;

    if (!PyCapsule_CheckExact(capsule))
        return fan_refuse(PyExc_TypeError, "__dlpack__ gave a %.200s; expected a capsule", Py_TYPE(capsule)->tp_name);
    managed = ours(capsule, &versioned);
    if (!managed)
        return -1;
    if (versioned) {
        const fan_dl_versioned *m = managed;
        has_deleter = m->deleter != NULL;
        if (m->major != FAN_DL_MAJOR) {
            /* Nothing behind the flags may be read. */
            fan_refuse(PyExc_BufferError, "the tensor is of DLPack version %u.%u; expected major version %d", (unsigned)m->major,
                       (unsigned)m->minor, FAN_DL_MAJOR);
            goto refuse;
        }
        flags = m->flags;
        tensor = m->tensor;
    } else {
        const fan_dl_managed *m = managed;
        has_deleter = m->deleter != NULL;
        tensor = m->tensor;
    }
    if ((tensor.device.type != FAN_DL_CPU && tensor.device.type != FAN_DL_CUDA_HOST) || tensor.device.id < 0) {
        fan_refuse(PyExc_BufferError, "the tensor is on %s; expected host memory", device_words(tensor.device, words, sizeof words));
        goto refuse;
    }
    if (device_type >= 0 && device_type != tensor.device.type) {
        fan_refuse(PyExc_BufferError, "__dlpack_device__ named device type %lld, and the tensor is on device type %d", (long long)device_type,
                   (int)tensor.device.type);
        goto refuse;
    }
    if (!has_deleter && !producer) {
        fan_refuse(PyExc_BufferError, "the DLPack capsule has no deleter, and nothing else keeps its memory alive");
        goto refuse;
    }
    writable = writes == FAN_DL_WRITE || (writes == FAN_DL_AS_IT_SAYS && versioned && !(flags & (FAN_DL_READ_ONLY | FAN_DL_IS_COPIED)));
    t = fan_alloc(sizeof *t);
    st = t ? fan_storage_wrap(NULL, 0, release_taken, t) : NULL;
    if (!st) {
        fan_free(t);
        PyErr_NoMemory();
        goto refuse;
    }
    *t = (taken){managed, versioned, has_deleter ? NULL : Py_XNewRef(producer)};
    /* From here on the storage's release calls the deleter. */
    result = geometry(&tensor, writable, st, out);
    fan_storage_drop(st);
    return result;
refuse:
    delete(managed, versioned);
    return -1;
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
            return fan_refuse(PyExc_ValueError, "the tensor's axis %d has the extent %lld: it must not be negative", i, (long long)t->shape[i]);
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
        fan_refuse(PyExc_BufferError, "the tensor is of DLPack version %u.%u; expected major version %d", (unsigned)((const fan_dl_versioned *)managed)->major,
                   (unsigned)((const fan_dl_versioned *)managed)->minor, FAN_DL_MAJOR);
    }
    delete(managed, versioned);
    return result;
}

const fan_dl_api *fan_dl_api_of(PyObject *capsule)
{
    const fan_dl_api *api = PyCapsule_CheckExact(capsule) ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    while (api && api->header.major != FAN_DL_MAJOR)
        api = api->header.older;
    return api && api->look && api->allocate && api->give ? api : NULL;
}

/* ---- out ---- */

typedef struct exporter {
    PyObject_HEAD
    fan_array *a; /* held; never NULL after new */
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

static void delete_versioned(fan_dl_versioned *m)
{
    delete_sent(m->ctx);
}

static void delete_legacy(fan_dl_managed *m)
{
    delete_sent(m->ctx);
}

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

static fan_dl_dtype dl_dtype_of(fan_dtype d)
{
    uint8_t code = FAN_DL_FLOAT;
    switch (d) {
    case FAN_BOOL:
        code = FAN_DL_BOOL;
        break;
    case FAN_BFLOAT16:
        code = FAN_DL_BFLOAT;
        break;
    case FAN_FLOAT8_E4M3FN:
        code = FAN_DL_F8_E4M3FN;
        break;
    case FAN_FLOAT8_E5M2:
        code = FAN_DL_F8_E5M2;
        break;
    default:
        code = fan_dtype_kind(d) == 'i' ? FAN_DL_INT : fan_dtype_kind(d) == 'u' ? FAN_DL_UINT : fan_dtype_kind(d) == 'c' ? FAN_DL_COMPLEX : FAN_DL_FLOAT;
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

static PyObject *offer(fan_array *a, bool versioned, bool copied)
{
    size_t ndim = (size_t)a->ndim;
    sent *s = fan_alloc(sizeof *s + 2 * ndim * sizeof(int64_t));
    fan_dl_tensor tensor = {.data = a->size ? a->data : NULL, .device = {FAN_DL_CPU, 0}, .ndim = a->ndim, .dtype = dl_dtype_of(a->dtype)};
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

static PyObject *exporter_dlpack(PyObject *o, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *max_version = Py_None, *device = Py_None, *copy = Py_None, *capsule;
    fan_array *a = ((exporter *)o)->a, *copied = NULL;
    fan_error err = {0};
    fan_status status;
    long major = 0, minor = 0, type = FAN_DL_CPU, id = 0;
    int want_copy;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream, &max_version, &device, &copy))
        return NULL;
    if (stream != Py_None)
        return PyErr_Format(PyExc_ValueError, "__dlpack__: a host array has no streams; expected stream=None, got %R", stream);
    if (max_version != Py_None && !(PyTuple_Check(max_version) && PyArg_ParseTuple(max_version, "ll:max_version", &major, &minor)))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "__dlpack__: expected max_version=(major, minor), got %R", max_version);
    if (device != Py_None && !(PyTuple_Check(device) && PyArg_ParseTuple(device, "ll:dl_device", &type, &id)))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "__dlpack__: expected dl_device=(type, id), got %R", device);
    if (type != FAN_DL_CPU || id != 0)
        return PyErr_Format(PyExc_BufferError, "__dlpack__: the array is on the host and is not copied to device (%ld, %ld)", type, id);
    want_copy = copy == Py_None ? 0 : PyObject_IsTrue(copy);
    if (want_copy < 0)
        return NULL;
    if (!want_copy && !countable(a)) {
        if (copy != Py_None)
            return PyErr_Format(PyExc_BufferError, "__dlpack__: a stride is no whole number of elements: this array goes out as a copy only");
        want_copy = 1;
    }
    if (want_copy) {
        status = fan_array_new(a->dtype, a->ndim, a->shape, a, &copied, &err);
        if (status != FAN_OK)
            return fan_raise(status, &err);
        fan_array_copy(copied, a);
        a = copied;
    }
    capsule = offer(a, major >= 1, want_copy);
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

static PyMethodDef exporter_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))exporter_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\nA capsule over the array's memory."},
    {"__dlpack_device__", exporter_dlpack_device, METH_NOARGS, "__dlpack_device__($self, /)\n--\n\n(1, 0): host memory."},
    {"numpy", exporter_numpy, METH_NOARGS, "numpy($self, /)\n--\n\nAn ndarray over the same memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot exporter_slots[] = {
    {Py_tp_doc, "An array of the core's on its way out: fanin.arrays makes of it what the caller knows."},
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
