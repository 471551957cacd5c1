/* memory: device memory, and when it may be used again.
 *
 * Title: Lifetime. "x is used on stream s" means: x's memory may be reused only after what s had queued at x's last
 * use has run. Device memory keeps the set of streams that used it (fan_memory_record_stream). When its last hold goes,
 * an event is recorded on each of them and on its owner, and the memory goes back when all have passed; this is polled
 * on later calls.
 */
#ifndef FAN_DEVICE_MEMORY_H
#define FAN_DEVICE_MEMORY_H

#include "device/stream.h"

/* fan_memory_wrap: memory on d that another allocator owns, as a storage of the same Lifetime: once its last hold has
 * gone and all streams that used it have passed, release(ctx) is called, on any thread with no lock of ours held.
 * FAN_ERR_NOMEM: release is not called. */
fan_status fan_memory_wrap(fan_device *d, void *data, void (*release)(void *ctx), void *ctx, fan_storage **out,
                           fan_error *err);
/* fan_memory_wrapped: the ctx of such a storage, if it was made with this release; else NULL. */
void *fan_memory_wrapped(const fan_storage *st, void (*release)(void *ctx));
/* fan_memory_record_stream: the mark. FAN_ERR_NOMEM leaves the set as it was. A no-op for host storages and on the
 * memory's owner stream. */
fan_status fan_memory_record_stream(fan_storage *st, fan_stream *s, fan_error *err);
/* fan_memory_user: the i-th of them, with a hold; NULL behind the last. While the caller holds the storage none leaves,
 * and new ones come last. */
fan_stream *fan_memory_user(fan_storage *st, size_t i);
/* fan_memory_set_stream: gives memory without an owner its owner. */
void fan_memory_set_stream(fan_storage *st, fan_stream *owner);

/* fan_device_poll: gives back memory whose users have passed. */
void fan_device_poll(fan_device *d);
void fan_device_flush(fan_device *d);
/* fan_device_orphan: leaving memory lets go of its streams, which keep the device (they were kept only where an event
 * could not be recorded); such memory stays until the device goes. For the last user of a machine. */
void fan_device_orphan(fan_device *d);
void fan_device_clear(fan_device *d);

/* fan_device_array: fresh device memory as an array in the order of `like` (D16), owned by stream `owner`. */
fan_status fan_device_array(fan_device *d, fan_stream *owner, fan_dtype dtype, int ndim, const int64_t *shape,
                            const fan_array *like, fan_array **out, fan_error *err);
/* fan_stats_out_new: memory for the figures of results of up to `size` elements, owned by `owner`. */
fan_status fan_stats_out_new(fan_device *d, fan_stream *owner, int64_t size, fan_array **words, fan_error *err);
/* fan_stats_out_read: what is in them once s has run so far: blocks; FAN_ERR_CAPTURE where s is captured. */
fan_status fan_stats_out_read(fan_stream *s, const fan_array *words, fan_device_stats *out, fan_error *err);

#ifdef FAN_TEST
/* fan_memory_device: where it lies; no hold. NULL: on the host. */
fan_device *fan_memory_device(const fan_storage *st);
/* fan_memory_users: the streams (no holds; at most `cap` are stored) that used it, its owner first; returns how many
 * there are. 0 for host storages. */
size_t fan_memory_users(fan_storage *st, fan_stream **out, size_t cap);
#endif

#endif
