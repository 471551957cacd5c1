/* dlpack: the DLPack protocol (ABI 1.3, written down here from its published description): its
 * structs, its dtypes. */
#ifndef FAN_PY_DLPACK_H
#define FAN_PY_DLPACK_H

#include "py/base/py.h"

#define FAN_DL_MAJOR 1
#define FAN_DL_MINOR 3

enum {
    FAN_DL_CPU = 1,
    FAN_DL_CUDA = 2,
    FAN_DL_CUDA_HOST = 3,
    FAN_DL_CUDA_MANAGED = 13
};
enum {
    FAN_DL_INT = 0,
    FAN_DL_UINT = 1,
    FAN_DL_FLOAT = 2,
    FAN_DL_BFLOAT = 4,
    FAN_DL_COMPLEX = 5,
    FAN_DL_BOOL = 6,
    FAN_DL_F8_E4M3FN = 10,
    FAN_DL_F8_E5M2 = 12
};

/* Streams as integers, in __dlpack__(stream=) and __cuda_array_interface__: 0 is never one. */
enum {
    FAN_DL_NO_SYNC = -1,
    FAN_DL_LEGACY = 1,
    FAN_DL_PER_THREAD = 2
};

#define FAN_DL_READ_ONLY (UINT64_C(1) << 0)
#define FAN_DL_IS_COPIED (UINT64_C(1) << 1)

typedef struct fan_dl_device {
    int32_t type;
    int32_t id;
} fan_dl_device;

typedef struct fan_dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} fan_dl_dtype;

typedef struct fan_dl_tensor {
    void *data;
    fan_dl_device device;
    int32_t ndim;
    fan_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides;     /* in elements; NULL: C order */
    uint64_t byte_offset; /* element 0 is at data + byte_offset */
} fan_dl_tensor;

/* The contents of a capsule named "dltensor". */
typedef struct fan_dl_managed {
    fan_dl_tensor tensor;
    void *ctx;
    void (*deleter)(struct fan_dl_managed *self); /* may be NULL */
} fan_dl_managed;

/* The contents of a capsule named "dltensor_versioned". The fields before `tensor` are the same in
 * every version. */
typedef struct fan_dl_versioned {
    uint32_t major;
    uint32_t minor;
    void *ctx;
    void (*deleter)(struct fan_dl_versioned *self); /* may be NULL */
    uint64_t flags;
    fan_dl_tensor tensor;
} fan_dl_versioned;

_Static_assert(sizeof(fan_dl_device) == 8, "DLPack's layout");
_Static_assert(sizeof(fan_dl_dtype) == 4, "DLPack's layout");
_Static_assert(sizeof(fan_dl_tensor) == 48, "DLPack's layout");
_Static_assert(sizeof(fan_dl_managed) == 64, "DLPack's layout");
_Static_assert(sizeof(fan_dl_versioned) == 80, "DLPack's layout");
_Static_assert(offsetof(fan_dl_versioned, flags) == 24, "DLPack's layout");
_Static_assert(offsetof(fan_dl_versioned, tensor) == 32, "DLPack's layout");
_Static_assert(offsetof(fan_dl_tensor, shape) == 24, "DLPack's layout");
_Static_assert(offsetof(fan_dl_tensor, byte_offset) == 40, "DLPack's layout");

/* The table of a library's types by which tensors are exchanged without Python's calls
 * (DLPack 1.3): `type.__dlpack_c_exchange_api__`, a capsule. It exports memory, not values: a
 * tensor's conjugate and negative bits, and whether it requires a gradient, are not in it. */
typedef struct fan_dl_api {
    struct {
        uint32_t major;
        uint32_t minor;
        const struct fan_dl_api *older;
    } header;
    int (*allocate)(fan_dl_tensor *like, fan_dl_versioned **out, void *ctx,
                    void (*fail)(void *ctx, const char *kind, const char *text));
    int (*take)(void *object, fan_dl_versioned **out);
    int (*give)(fan_dl_versioned *tensor, void **object);
    int (*look)(void *object, fan_dl_tensor *out); /* borrowed */
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} fan_dl_api;

/* fan_is_tensor: whether an object is a torch tensor that torch's table reads. */
static inline bool fan_is_tensor(PyObject *o)
{
    const fan_state *st = fan_state_get();
    return st->torch_api && Py_TYPE(o) == st->torch_type;
}

/* fan_tensor_is_plain: false: the tensor is sparse, nested or meta: torch's table would throw,
 * which takes milliseconds. */
bool fan_tensor_is_plain(PyObject *o);

/* fan_tensor_threw: counts a tensor for which the table threw. */
void fan_tensor_threw(void);
/* fan_tensor_throws: returns how many it threw for. */
long long fan_tensor_throws(void);

/* fan_tensor_look: reads a torch tensor by its table, borrowed; false: it cannot. Runs no Python
 * code. */
bool fan_tensor_look(PyObject *o, fan_dl_tensor *out);

/* fan_dl_api_of: the table in a capsule; NULL: no known one, without an exception. */
const fan_dl_api *fan_dl_api_of(PyObject *capsule);
fan_dtype fan_dl_dtype_of(fan_dl_dtype d);

/* fan_dl_plain: what a plain contribution of a tensor is (buffer/plain.h), but for origin and
 * check_at_use; false: it is none. import_plain.c. */
bool fan_dl_plain(const fan_dl_tensor *t, bool gaps, fan_plain_kind *kind, char **data);

/* fan_dl_dtype_for: the other way round. */
fan_dl_dtype fan_dl_dtype_for(fan_dtype d);

/* ---- import ---- */

typedef enum fan_dl_writes {
    /* writable where the tensor is versioned and flagged neither READ_ONLY nor IS_COPIED */
    FAN_DL_WRITABLE_IF_FLAGGED,
    FAN_DL_READ, /* never */
    FAN_DL_WRITE /* always: the caller trusts the producer */
} fan_dl_writes;

/* fan_dlpack_take: takes the content of `capsule` and makes it an array on `d`, where the tensor
 * must be; the caller owns the hold.
 *
 *   producer  kept alive where the tensor has no deleter; may be NULL
 *   reported  the result of __dlpack_device__; its type is -1 if that was not called
 *
 * -1 with TypeError, BufferError or ValueError; the producer's deleter has then been called if the
 * capsule was taken. Memory on a device with streams follows Lifetime: the deleter waits for all
 * streams that used it. */
int fan_dlpack_take(PyObject *capsule, PyObject *producer, const fan_dl_device *reported,
                    fan_dl_writes writes, fan_device *d, fan_array **out);
/* fan_dlpack_adopt: the same for the content of a capsule: a fan_dl_versioned, or a fan_dl_managed,
 * which the caller owns and gives away. */
int fan_dlpack_adopt(void *managed, bool versioned, PyObject *producer,
                     const fan_dl_device *reported, fan_dl_writes writes, fan_device *d,
                     fan_array **out);
/* fan_dl_view: a tensor as a view into `st`, over no memory before, which gets its address; `d` is
 * where it lies. FAN_ERR_TYPE: its dtype; FAN_ERR_VALUE, FAN_ERR_BUFFER, FAN_ERR_NOMEM. On failure
 * *out is NULL. Needs no interpreter. */
fan_status fan_dl_view(const fan_dl_tensor *t, bool writable, fan_storage *st, const fan_device *d,
                       fan_array **out, fan_error *err);
/* fan_address_take: the same for an address that `owner` declares as its own
 * (__cuda_array_interface__); strides in bytes, NULL: C order. `owner` is kept alive. */
int fan_address_take(uint64_t address, fan_dtype dtype, int ndim, const int64_t *shape,
                     const int64_t *strides, bool writable, PyObject *owner, fan_device *d,
                     fan_array **out);
/* fan_dlpack_peek: reads the tensor in `capsule`, for its address alone: takes the capsule and
 * calls its deleter at once. shape and strides (NULL where it has none) point into `dims`, which
 * has room for 2 * FAN_MAX_NDIM. -1 with TypeError, BufferError or ValueError. */
int fan_dlpack_peek(PyObject *capsule, int64_t *dims, fan_dl_tensor *out, uint64_t *flags);
/* fan_dl_storage: a storage over no memory yet. Its end calls `release` with `ctx`, on a device
 * with streams after those that used the memory; that of a host storage calls `host`.
 * FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
fan_status fan_dl_storage(fan_device *d, void (*host)(fan_storage *), void (*release)(void *),
                          void *ctx, fan_storage **out, fan_error *err);
/* fan_dl_delete: calls the producer's deleter with the live exception set aside; sys.unraisablehook
 * reports an exception that it leaves. Needs the GIL. */
void fan_dl_delete(void *managed, bool versioned);

/* ---- export (dlpack_export.c): an exporter, an object with __dlpack__ and __dlpack_device__,
 * offers a host array; an array on a device offers itself ---- */

/* fan_dlpack_send: an array as a tensor that holds it, without a capsule and without the
 * interpreter. FAN_ERR_NOMEM, FAN_ERR_BUFFER. */
fan_status fan_dlpack_send(fan_array *a, fan_dl_device at, fan_dl_versioned **out, fan_error *err);
/* fan_dlpack_capsule: a capsule over a tensor that it takes over, unless NULL comes back. */
PyObject *fan_dlpack_capsule(fan_dl_versioned *managed);

/* fan_dlpack_export: __dlpack__ of an array on a device with streams. The stream that the consumer
 * names waits for all that used the memory, and is recorded as one of them. */
PyObject *fan_dlpack_export(fan_array *a, fan_device *d, PyObject *const *values);
PyObject *fan_dlpack_device(const fan_device *d);
/* fan_interface_export: __cuda_array_interface__ of it: a dict; AttributeError where it cannot have
 * one. */
PyObject *fan_interface_export(fan_array *a, fan_device *d);

/* fan_exporter_new: an object that offers `a` (a host array; a hold of its own) by __dlpack__. */
PyObject *fan_exporter_new(fan_array *a);

/* ---- C calls to libraries that own arrays on CUDA devices (library.c) ---- */

/* added to a type's origin: its table lacks whether memory holds the value of an array, and
 * whether that requires a gradient, so these are read of the array (torch) */
#define FAN_ASKS_VALUE 256
/* fan_import_by_table: imports an array of a CUDA device, or a torch tensor on the CPU, by its
 * library's exchange table, without a wait.
 *
 *   1   it is imported
 *   0   not by this way, without an exception
 *   -1  with an exception */
int fan_import_by_table(PyObject *o, fan_value *out);
/* whether a torch tensor's memory is the array's */
bool fan_tensor_has(PyObject *o, const fan_array *a);
/* fan_release_library_array: of the storage of an array that a library allocated for a sum. */
void fan_release_library_array(void *ctx);
/* fan_is_dense_like: whether a library's tensor is gap-free and as requested. */
bool fan_is_dense_like(const fan_dl_tensor *t, const fan_device *d, fan_dtype dtype, int ndim,
                       const int64_t *shape, const int64_t *strides);
/* fan_leaves: an object of a library's leaves us: reports to its allocator, or to a second hold on
 * its memory, all the streams that used it (Lifetime). Failures are reported to sys.unraisablehook:
 * the object must not be lost. */
void fan_leaves(PyObject *object, const fan_value *v);
/* fan_dl_order: work that is queued on `on` from now on runs after what was queued on `from`. */
fan_status fan_dl_order(fan_stream *on, fan_stream *from, fan_error *err);

#endif
