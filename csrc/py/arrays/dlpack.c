/* dlpack: DLPack's dtypes and exchange tables, and arrays of other libraries by DLPack or by
 * address.
 *
 * In this order: dtypes and tables; storages over a producer's memory; views with the checks of
 * addresses, strides and devices; capsules. */
#include "py/arrays/dlpack.h"
#include "py/arrays/arrays.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

fan_dtype fan_dl_dtype_of(fan_dl_dtype d)
{
    switch (d.code << 8 | d.bits) {
#define X(NAME, name, bytes, kind, SUM, LIBRARY, DLPACK) \
    case FAN_DL_##DLPACK << 8 | 8 * (bytes):             \
        return FAN_DT_##NAME;
        FAN_DTYPE_LIST(X)
#undef X
    default:
        return FAN_DT_NONE;
    }
}

fan_dl_dtype fan_dl_dtype_for(fan_dtype d)
{
    static const uint8_t codes[FAN_DT_COUNT] = {
#define X(NAME, name, bytes, kind, SUM, LIBRARY, DLPACK) FAN_DL_##DLPACK,
        FAN_DTYPE_LIST(X)
#undef X
    };
    return (fan_dl_dtype){codes[d], (uint8_t)(8 * fan_dtype_size(d)), 1};
}

const fan_dl_api *fan_dl_api_of(PyObject *capsule)
{
    if (!PyCapsule_CheckExact(capsule))
        return NULL;
    const fan_dl_api *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();
    while (api && api->header.major != FAN_DL_MAJOR)
        api = api->header.older;
    if (!api || !api->look || !api->allocate)
        return NULL;
    if (!api->give)
        return NULL;
    if (!api->take)
        return NULL;
    if (!api->current_stream)
        return NULL;
    return api;
}

/* ---- import ---- */

/* The tensor under a storage, which ends it. */
typedef struct taken {
    void *managed; /* fan_dl_versioned, or fan_dl_managed */
    bool versioned;
    PyObject *producer; /* held where there is no deleter */
} taken;

void fan_dl_delete(void *managed, bool versioned)
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
    /* At the interpreter's end the producer may be gone, too: its memory stays until the process
     * ends. */
    if (fan_finalizing() || !fan_gil_enter(&gil))
        return;
    fan_dl_delete(t->managed, t->versioned);
    Py_XDECREF(t->producer);
    fan_free(t);
    fan_gil_leave(&gil);
}

static void release_host(fan_storage *s)
{
    release_taken(s->ctx);
}

fan_status fan_dl_storage(fan_device *d, void (*host)(fan_storage *), void (*release)(void *),
                          void *ctx, fan_storage **out, fan_error *err)
{
    if (d->backend->has_streams)
        return fan_memory_wrap(d, NULL, release, ctx, out, err);
    *out = fan_storage_wrap(NULL, 0, host, ctx);
    if (!*out)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    return FAN_OK;
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
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].type == d.type) {
            snprintf(buf, size, "%s device %ld", known[i].word, (long)d.id);
            return buf;
        }
    }
    snprintf(buf, size, "device (%ld, %ld)", (long)d.type, (long)d.id);
    return buf;
}

/* is_aligned: whether each element is at a multiple of its size, or of that of its real part. */
static bool is_aligned(const fan_array *a)
{
    int64_t align = (int64_t)fan_dtype_size(a->dtype);
    if (fan_dtype_kind(a->dtype) == 'c')
        align /= 2;
    if ((uintptr_t)a->data % (uintptr_t)align != 0)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] > 1 && a->strides[i] % align != 0)
            return false;
    }
    return true;
}

/* keep_if_inside: drops *out unless all of it lies in the address space, and, on a device, its
 * elements where the device can read them. */
static fan_status keep_if_inside(fan_array **out, const fan_device *d, fan_error *err)
{
    fan_array *a = *out;
    uintptr_t at = (uintptr_t)a->data;
    uintptr_t end;
    int64_t lo;
    int64_t hi;
    fan_status status = FAN_OK;
    fan_array_reach(a, &lo, &hi);
    if ((uintptr_t)-lo > at || __builtin_add_overflow(at, (uintptr_t)hi, &end))
        status = fan_fail(err, FAN_ERR_VALUE, "the tensor's strides leave the address space");
    else if (d->backend->has_streams && a->size > 0 && !is_aligned(a)) {
        status = fan_fail(err, FAN_ERR_BUFFER,
                          "the tensor's elements of %zu bytes are not aligned, and a device cannot "
                          "read them: give a copy",
                          fan_dtype_size(a->dtype));
    }
    if (status != FAN_OK) {
        fan_array_drop(a);
        *out = NULL;
    }
    return status;
}

/* view_strides: the strides of a tensor that has elements, in bytes; `strides` has those of C
 * order. */
static fan_status view_strides(const fan_dl_tensor *t, int64_t item, int64_t *strides,
                               fan_error *err)
{
    for (int i = 0; i < t->ndim && t->strides; i++) {
        if (t->shape[i] == 1) /* the stride of one element may be any number */
            continue;
        if (__builtin_mul_overflow(t->strides[i], item, &strides[i])) {
            return fan_fail(
                err, FAN_ERR_VALUE,
                "the tensor's stride %lld along axis %d is more than can be counted in bytes",
                (long long)t->strides[i], i);
        }
    }
    return FAN_OK;
}

fan_status fan_dl_view(const fan_dl_tensor *t, bool writable, fan_storage *st, const fan_device *d,
                       fan_array **out, fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM];
    int64_t strides[FAN_MAX_NDIM];
    int64_t size;
    fan_dtype dtype = fan_dl_dtype_of(t->dtype);
    size_t item = fan_dtype_size(dtype);
    *out = NULL;
    if (dtype == FAN_DT_NONE || t->dtype.lanes != 1) {
        return fan_fail(err, FAN_ERR_TYPE,
                        "the tensor's elements have DLPack type code %d with %d bits and %d lanes, "
                        "which is not summed; expected "
                        "bool, int8..64, uint8..64, float or complex in one lane: convert it first",
                        (int)t->dtype.code, (int)t->dtype.bits, (int)t->dtype.lanes);
    }
    if (t->ndim < 0 || t->ndim > FAN_MAX_NDIM) {
        return fan_fail(err, FAN_ERR_VALUE, "the tensor has %d axes; expected 0 to %d",
                        (int)t->ndim, FAN_MAX_NDIM);
    }
    if (t->ndim > 0 && !t->shape)
        return fan_fail(err, FAN_ERR_VALUE, "the tensor has %d axes and no shape", (int)t->ndim);
    for (int i = 0; i < t->ndim; i++)
        shape[i] = t->shape[i];
    FAN_TRY(fan_shape_check(t->ndim, shape, item, &size, err));
    fan_dense_strides(t->ndim, shape, item, NULL, strides);

    /* The address and strides of an empty tensor mean nothing and may be any number. */
    uintptr_t at = 0;
    if (size > 0) {
        at = (uintptr_t)t->data;
        FAN_TRY(view_strides(t, (int64_t)item, strides, err));
        if (!t->data) {
            return fan_fail(err, FAN_ERR_VALUE, "the tensor has %lld elements at address NULL",
                            (long long)size);
        }
        if (t->byte_offset > INT64_MAX || __builtin_add_overflow(at, t->byte_offset, &at)) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "the tensor's byte_offset %llu leaves the address space",
                            (unsigned long long)t->byte_offset);
        }
    }
    st->data = (void *)at;
    FAN_TRY(fan_array_view(st, st->data, dtype, t->ndim, shape, strides, writable, out, err));
    return keep_if_inside(out, d, err);
}

/* check_device: whether the tensor is on the expected device, and on that of __dlpack_device__. */
static int check_device(const fan_dl_device *at, const fan_dl_device *reported, const fan_device *d)
{
    char words[64];
    char name[32];
    bool expected;
    if (d->backend->has_streams) {
        bool on_device = at->type == FAN_DL_CUDA || at->type == FAN_DL_CUDA_MANAGED;
        expected = on_device && at->id == d->index;
    } else {
        bool on_host = at->type == FAN_DL_CPU || at->type == FAN_DL_CUDA_HOST;
        expected = on_host && at->id >= 0;
    }
    if (!expected) {
        return fan_refuse(PyExc_BufferError, "the tensor is on %s; expected %s",
                          device_words(*at, words, sizeof words),
                          d->backend->has_streams ? fan_device_text(d, name, sizeof name)
                                                  : "host memory");
    }
    if (reported->type >= 0 && reported->type != at->type) {
        return fan_refuse(
            PyExc_BufferError,
            "__dlpack_device__ named device type %ld, and the tensor is on device type %ld",
            (long)reported->type, (long)at->type);
    }
    return 0;
}

/* capsule_take: takes the capsule's content, which the caller then owns; NULL with an exception.
 * One of two takers wins, with or without a GIL. */
static void *capsule_take(PyObject *capsule, bool *versioned)
{
    static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;
    if (!PyCapsule_CheckExact(capsule)) {
        fan_refuse(PyExc_TypeError, "__dlpack__ gave %s; expected a capsule",
                   FAN_TYPE_TEXT(capsule));
        return NULL;
    }
    void *managed = NULL;
    const char *used = NULL;
    pthread_mutex_lock(&taking);
    const char *name = PyCapsule_GetName(capsule);
    *versioned = name && strcmp(name, "dltensor_versioned") == 0;
    if (*versioned)
        used = "used_dltensor_versioned";
    else if (name && strcmp(name, "dltensor") == 0)
        used = "used_dltensor";
    if (used)
        managed = PyCapsule_GetPointer(capsule, name);
    if (managed && PyCapsule_SetName(capsule, used) != 0)
        managed = NULL;
    pthread_mutex_unlock(&taking);
    if (managed || PyErr_Occurred())
        return managed;
    if (name && strncmp(name, "used_", 5) == 0) {
        fan_refuse(PyExc_BufferError, "the DLPack capsule has been consumed already");
    } else {
        fan_refuse(
            PyExc_BufferError,
            "__dlpack__ gave a capsule that is neither a 'dltensor' nor a 'dltensor_versioned'");
    }
    return NULL;
}

/* tensor_of: the tensor in a capsule's content. NULL with BufferError: it is of a version of which
 * nothing after the flags may be read. */
static const fan_dl_tensor *tensor_of(const void *managed, bool versioned)
{
    const fan_dl_versioned *m = managed;
    if (!versioned)
        return &((const fan_dl_managed *)managed)->tensor;
    if (m->major == FAN_DL_MAJOR)
        return &m->tensor;
    fan_refuse(PyExc_BufferError,
               "the tensor is of DLPack version %u.%u; expected major version %d",
               (unsigned)m->major, (unsigned)m->minor, FAN_DL_MAJOR);
    return NULL;
}

static bool deleter_is_set(const void *managed, bool versioned)
{
    if (versioned)
        return ((const fan_dl_versioned *)managed)->deleter != NULL;
    return ((const fan_dl_managed *)managed)->deleter != NULL;
}

/* may_write: whether the memory of a capsule's content may be written. */
static bool may_write(const void *managed, bool versioned, fan_dl_writes writes)
{
    if (writes != FAN_DL_WRITABLE_IF_FLAGGED)
        return writes == FAN_DL_WRITE;
    if (!versioned)
        return false;
    uint64_t flags = ((const fan_dl_versioned *)managed)->flags;
    return !(flags & (FAN_DL_READ_ONLY | FAN_DL_IS_COPIED));
}

int fan_dlpack_adopt(void *managed, bool versioned, PyObject *producer,
                     const fan_dl_device *reported, fan_dl_writes writes, fan_device *d,
                     fan_array **out)
{
    bool has_deleter = deleter_is_set(managed, versioned);
    fan_storage *st = NULL;
    fan_error err = {0};
    const fan_dl_tensor *tensor = tensor_of(managed, versioned);
    if (!tensor || check_device(&tensor->device, reported, d) < 0)
        goto refuse;
    if (!has_deleter && !producer) {
        fan_refuse(PyExc_BufferError,
                   "the DLPack capsule has no deleter, and nothing else keeps its memory alive");
        goto refuse;
    }
    bool writable = may_write(managed, versioned, writes);
    taken *t = fan_alloc(sizeof *t);
    if (!t || fan_dl_storage(d, release_host, release_taken, t, &st, &err) != FAN_OK) {
        PyErr_NoMemory();
        fan_free(t);
        goto refuse;
    }
    *t = (taken){
        .managed = managed,
        .versioned = versioned,
    };
    if (!has_deleter)
        t->producer = Py_XNewRef(producer);
    /* From here on the storage's release calls the deleter. */
    fan_status status = fan_dl_view(tensor, writable, st, d, out, &err);
    fan_storage_drop(st);
    if (status == FAN_OK)
        return 0;
    if (status == FAN_ERR_TYPE)
        return fan_refuse(fan_state_get()->dtype_error, "%s", err.text);
    return fan_refuse_error(status, &err);
refuse:
    fan_dl_delete(managed, versioned);
    return -1;
}

int fan_dlpack_take(PyObject *capsule, PyObject *producer, const fan_dl_device *reported,
                    fan_dl_writes writes, fan_device *d, fan_array **out)
{
    bool versioned;
    void *managed = capsule_take(capsule, &versioned);
    if (!managed)
        return -1;
    return fan_dlpack_adopt(managed, versioned, producer, reported, writes, d, out);
}

/* peek_at: copies a tensor's record, its shape and strides to memory of ours. */
static int peek_at(const fan_dl_tensor *t, int64_t *dims, fan_dl_tensor *out)
{
    *out = *t;
    if (t->ndim < 0 || t->ndim > FAN_MAX_NDIM) {
        return fan_refuse(PyExc_ValueError, "the tensor has %d axes; expected 0 to %d",
                          (int)t->ndim, FAN_MAX_NDIM);
    }
    if (t->ndim > 0 && !t->shape)
        return fan_refuse(PyExc_ValueError, "the tensor has %d axes and no shape", (int)t->ndim);
    out->shape = dims;
    out->strides = t->strides ? dims + t->ndim : NULL;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0) {
            return fan_refuse(PyExc_ValueError,
                              "the tensor's axis %d has the extent %lld: it must not be negative",
                              i, (long long)t->shape[i]);
        }
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
    void *managed = capsule_take(capsule, &versioned);
    if (!managed)
        return -1;
    const fan_dl_tensor *t = tensor_of(managed, versioned);
    *flags = 0;
    if (t && versioned)
        *flags = ((const fan_dl_versioned *)managed)->flags;
    if (t)
        result = peek_at(t, dims, out);
    fan_dl_delete(managed, versioned);
    return result;
}

int fan_address_take(uint64_t address, fan_dtype dtype, int ndim, const int64_t *shape,
                     const int64_t *strides, bool writable, PyObject *owner, fan_device *d,
                     fan_array **out)
{
    int64_t dense[FAN_MAX_NDIM];
    int64_t size;
    fan_error err = {0};
    fan_storage *st = NULL;
    fan_status status = fan_shape_check(ndim, shape, fan_dtype_size(dtype), &size, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    if (size > 0 && !address) {
        return fan_refuse(PyExc_ValueError, "the array has %lld elements at address NULL",
                          (long long)size);
    }
    if (size == 0)
        address = 0;
    if (!strides || size == 0) {
        fan_dense_strides(ndim, shape, fan_dtype_size(dtype), NULL, dense);
        strides = dense;
    }
    if (fan_dl_storage(d, fan_release_object, fan_object_drop, owner, &st, &err) != FAN_OK) {
        PyErr_NoMemory();
        return -1;
    }
    Py_INCREF(owner);
    st->data = (void *)(uintptr_t)address;
    status = fan_array_view(st, st->data, dtype, ndim, shape, strides, writable, out, &err);
    fan_storage_drop(st);
    if (status == FAN_OK)
        status = keep_if_inside(out, d, &err);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    return 0;
}
