/* dlpack_import: arrays of other libraries, by DLPack or by address.
 *
 *   x.__dlpack__(max_version=(1, 3)) -> capsule -> fan_dlpack_take -> fan_array whose storage calls the producer's
 * deleter
 *
 * What can go wrong, on the way in. The capsule may be no capsule, used, of an unknown name, or be taken by two threads
 * at once: it is renamed before anything else that can fail, and the code that renames it owns what is in it. From then
 * on the producer's deleter is called exactly once: when the last hold on the memory goes, or here when the tensor is
 * refused. The tensor may lie: it is read once into locals and every number is checked by fan_array_view. Not
 * defendable: a forged address, a deleter that is none, memory that the producer frees early.
 */
#ifndef FAN_PY_DLPACK_IMPORT_H
#define FAN_PY_DLPACK_IMPORT_H

#include "py/dlpack.h"

typedef enum fan_dl_writes {
    FAN_DL_AS_IT_SAYS, /* writable where the tensor is versioned and says neither READ_ONLY nor IS_COPIED */
    FAN_DL_READ,       /* never */
    FAN_DL_WRITE       /* always: the caller trusts the producer */
} fan_dl_writes;

/* fan_dlpack_take: what `capsule` holds, as an array on `d`, where the tensor must be; the caller owns the hold.
 * `producer` (may be NULL) is kept alive where the tensor has no deleter. said: the result of __dlpack_device__; its
 * type is -1 if that was not called. -1 with TypeError, BufferError or ValueError; the producer's deleter has then been
 * called if the capsule was taken. Memory on a device with streams follows Lifetime: the deleter waits for all streams
 * that used it. */
int fan_dlpack_take(PyObject *capsule, PyObject *producer, const fan_dl_device *said, fan_dl_writes writes,
                    fan_device *d, fan_array **out);
/* fan_dlpack_adopt: the same for what a capsule held: a fan_dl_versioned, or a fan_dl_managed, which is the caller's to
 * give away. */
int fan_dlpack_adopt(void *managed, bool versioned, PyObject *producer, const fan_dl_device *said, fan_dl_writes writes,
                     fan_device *d, fan_array **out);
/* fan_dl_view: a tensor as a view into `st`, over no memory before, which gets its address; `d` is where it lies.
 * FAN_ERR_TYPE: its dtype; FAN_ERR_VALUE, FAN_ERR_BUFFER, FAN_ERR_NOMEM. On failure *out is NULL. Needs no
 * interpreter. */
fan_status fan_dl_view(const fan_dl_tensor *t, bool writable, fan_storage *st, const fan_device *d, fan_array **out,
                       fan_error *err);
/* fan_address_take: the same for an address that `owner` declares as its own (__cuda_array_interface__); strides in
 * bytes, NULL: C order. `owner` is kept alive. */
int fan_address_take(uint64_t address, fan_dtype dtype, int ndim, const int64_t *shape, const int64_t *strides,
                     bool writable, PyObject *owner, fan_device *d, fan_array **out);
/* fan_dlpack_peek: what `capsule` holds, as its producer gave it, for the address alone: the capsule is taken and
 * given back at once. shape and strides (NULL where it has none) point into `dims`, which has room for 2 *
 * FAN_MAX_NDIM. -1 with TypeError, BufferError or ValueError. */
int fan_dlpack_peek(PyObject *capsule, int64_t *dims, fan_dl_tensor *out, uint64_t *flags);

#endif
