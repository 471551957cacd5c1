/* dlpack: arrays of other libraries, in and out, by the DLPack protocol (ABI 1.3, written down here from its published
 * description).
 *
 *   in    x.__dlpack__(max_version=(1, 3)) -> capsule -> fan_dlpack_take -> fan_array whose storage calls the
 * producer's deleter out   fan_array -> fanin's exporter, an object with __dlpack__ and __dlpack_device__; an array on
 * a device offers itself (fan_dlpack_export)
 *
 * What can go wrong, on the way in. The capsule may be no capsule, used, of an unknown name, or be taken by two threads
 * at once: it is renamed before anything else that can fail, and whoever renames it owns what is in it. From then on
 * the producer's deleter is called exactly once: when the last hold on the memory goes, or here when the tensor is
 * refused. The tensor may lie: it is read once into locals and every number is checked by fan_array_view. Not
 * defendable: a forged address, a deleter that is none, memory that the producer frees early.
 */
#ifndef FAN_PY_DLPACK_H
#define FAN_PY_DLPACK_H

#include "py/py.h"

#define FAN_DL_MAJOR 1
#define FAN_DL_MINOR 3

enum { FAN_DL_CPU = 1, FAN_DL_CUDA = 2, FAN_DL_CUDA_HOST = 3, FAN_DL_CUDA_MANAGED = 13 };
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
enum { FAN_DL_NO_SYNC = -1, FAN_DL_LEGACY = 1, FAN_DL_PER_THREAD = 2 };

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

/* What a capsule named "dltensor" holds. */
typedef struct fan_dl_managed {
    fan_dl_tensor tensor;
    void *ctx;
    void (*deleter)(struct fan_dl_managed *self); /* may be NULL */
} fan_dl_managed;

/* What a capsule named "dltensor_versioned" holds. The fields before `tensor` are the same in every version. */
typedef struct fan_dl_versioned {
    uint32_t major, minor;
    void *ctx;
    void (*deleter)(struct fan_dl_versioned *self); /* may be NULL */
    uint64_t flags;
    fan_dl_tensor tensor;
} fan_dl_versioned;

_Static_assert(sizeof(fan_dl_device) == 8 && sizeof(fan_dl_dtype) == 4, "DLPack's layout");
_Static_assert(sizeof(void *) != 8 ||
                   (sizeof(fan_dl_tensor) == 48 && sizeof(fan_dl_managed) == 64 && sizeof(fan_dl_versioned) == 80),
               "DLPack's layout");
_Static_assert(sizeof(void *) != 8 ||
                   (offsetof(fan_dl_versioned, flags) == 24 && offsetof(fan_dl_versioned, tensor) == 32 &&
                    offsetof(fan_dl_tensor, shape) == 24 && offsetof(fan_dl_tensor, byte_offset) == 40),
               "DLPack's layout");

/* The table of a library's types by which tensors are exchanged without Python's calls (DLPack 1.3):
 * `type.__dlpack_c_exchange_api__`, a capsule. It exports memory, not values: a tensor's conjugate and negative bits,
 * and whether it asks for a gradient, are not in it. */
typedef struct fan_dl_api {
    struct {
        uint32_t major, minor;
        const struct fan_dl_api *older;
    } header;
    int (*allocate)(fan_dl_tensor *like, fan_dl_versioned **out, void *ctx,
                    void (*fail)(void *ctx, const char *kind, const char *text));
    int (*take)(void *object, fan_dl_versioned **out);
    int (*give)(fan_dl_versioned *tensor, void **object);
    int (*look)(void *object, fan_dl_tensor *out); /* borrowed */
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} fan_dl_api;

/* fan_dl_api_of: the table in a capsule; NULL: none that we know, without an exception. */
const fan_dl_api *fan_dl_api_of(PyObject *capsule);
fan_dtype fan_dl_dtype_of(fan_dl_dtype d);

typedef enum fan_dl_writes {
    FAN_DL_AS_IT_SAYS, /* writable where the tensor is versioned and says neither READ_ONLY nor IS_COPIED */
    FAN_DL_READ,       /* never */
    FAN_DL_WRITE       /* always: the caller knows the producer */
} fan_dl_writes;

/* fan_dlpack_take: what `capsule` holds, as an array on `d`, where the tensor must be; the caller owns the hold.
 * `producer` (may be NULL) is kept alive where the tensor has no deleter. said: what __dlpack_device__ said; its type
 * is -1 where that was not asked. -1 with TypeError, BufferError or ValueError; the producer's deleter has then been
 * called if the capsule was taken. Memory on a device with streams follows Lifetime: the deleter waits for all streams
 * that used it. */
int fan_dlpack_take(PyObject *capsule, PyObject *producer, const fan_dl_device *said, fan_dl_writes writes,
                    fan_device *d, fan_array **out);
/* fan_dlpack_adopt: the same for what a capsule held: a fan_dl_versioned, or a fan_dl_managed, which is the caller's to
 * give away. */
int fan_dlpack_adopt(void *managed, bool versioned, PyObject *producer, const fan_dl_device *said, fan_dl_writes writes,
                     fan_device *d, fan_array **out);
/* fan_address_take: the same for an address that `owner` says is its own (__cuda_array_interface__); strides in bytes,
 * NULL: C order. `owner` is kept alive. */
int fan_address_take(uint64_t address, fan_dtype dtype, int ndim, const int64_t *shape, const int64_t *strides,
                     bool writable, PyObject *owner, fan_device *d, fan_array **out);
/* fan_dl_dtype_for: the other way round. */
fan_dl_dtype fan_dl_dtype_for(fan_dtype d);

/* fan_dlpack_peek: what `capsule` holds, as its producer tells it, for the address alone: the capsule is taken and
 * given back at once. shape and strides (NULL where it has none) point into `dims`, which has room for 2 *
 * FAN_MAX_NDIM. -1 with TypeError, BufferError or ValueError. */
int fan_dlpack_peek(PyObject *capsule, int64_t *dims, fan_dl_tensor *out, uint64_t *flags);

/* fan_dlpack_capsule: a capsule over a tensor that it takes over, unless NULL comes back. */
PyObject *fan_dlpack_capsule(fan_dl_versioned *managed);
/* fan_dlpack_export: __dlpack__ of an array on a device with streams. Whatever stream the consumer names waits for all
 * that used the memory, and is marked. */
PyObject *fan_dlpack_export(fan_array *a, fan_device *d, PyObject *args, PyObject *kwargs);
PyObject *fan_dlpack_device(const fan_device *d);
/* fan_interface_export: __cuda_array_interface__ of it: a dict; AttributeError where it cannot have one. */
PyObject *fan_interface_export(fan_array *a, fan_device *d);
/* fan_exporter_new: an object that offers `a` (a host array; a hold of its own) by __dlpack__. */
PyObject *fan_exporter_new(fan_array *a);

#endif
