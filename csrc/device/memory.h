/* memory: device memory, and when it may be used again.
 *
 * Title: Lifetime. "x is used on stream s" means: x's memory may be reused only after what s had queued at x's last
 * use has run. Device memory keeps the set of streams that used it (fan_memory_record_stream). When its last hold goes,
 * an event is recorded on each of them and on its owner, and the memory goes back when all have passed; this is polled
 * on later calls. What leaves in one call shares its events, one for each stream, which are recorded at its end: later
 * than need be, and so as good (fan_memory_leave_begin).
 */
#ifndef FAN_DEVICE_MEMORY_H
#define FAN_DEVICE_MEMORY_H

#include "device/stream.h"

/* fan_memory_wrap: memory on d that another allocator owns, as a storage of the same Lifetime: once its last hold has
 * gone and all streams that used it have passed, release(ctx) is called, on any thread with no lock of ours held.
 * FAN_ERR_NOMEM: release is not called. */
fan_status fan_memory_wrap(fan_device *d, void *data, void (*release)(void *ctx), void *ctx, fan_storage **out,
                           fan_error *err);
/* fan_memory_wrapped: the ctx of a storage that fan_memory_wrap made with this release; NULL: it is no such storage. */
void *fan_memory_wrapped(const fan_storage *st, void (*release)(void *ctx));
/* fan_memory_lend: memory of d that its lender goes on having: release(ctx) is called with the last hold, at once, on
 * any thread with no lock of ours held. Its lender sees to the order of what comes then (fan_memory_wait_users).
 * FAN_ERR_NOMEM: release is not called. fan_memory_wrapped gives its ctx. */
fan_status fan_memory_lend(fan_device *d, fan_stream *owner, void *data, size_t bytes, void (*release)(void *ctx),
                           void *ctx, fan_storage **out, fan_error *err);
/* fan_memory_wait_users: s waits for all that the memory's users but `done` (may be NULL) have queued; then its owner
 * is its only user. A failure leaves the users that were not waited for. */
fan_status fan_memory_wait_users(fan_storage *st, fan_stream *s, const fan_stream *done, fan_error *err);
/* fan_memory_lent: whether it is memory that fan_memory_lend made. */
bool fan_memory_lent(const fan_storage *st);
/* fan_memory_used_by: whether no stream but s uses the memory. */
bool fan_memory_used_by(fan_storage *st, const fan_stream *s);

/* Title: Scopes. While a thread is in a scope, what it allocates on the scope's device comes from `alloc`: a storage,
 * as fan_memory_lend makes one (NULL: from the device, as outside); owner is NULL where nobody knows who uses it first.
 * They nest, and the innermost of a device counts. On the CPU it is all memory that the core allocates on the thread.
 * outside (NULL: nothing): called with each storage that came from the device although the scope is there; failing, the
 * allocation fails.
 * `recording`: what the thread queues on a stream that is not captured would be done once, and not in the replays:
 * fan_memory_scope_check refuses that, naming `who`. */
typedef struct fan_memory_scope {
    fan_device *device;
    fan_status (*alloc)(struct fan_memory_scope *self, fan_stream *owner, size_t bytes, fan_storage **out,
                        fan_error *err);
    fan_status (*outside)(struct fan_memory_scope *self, fan_storage *made, fan_error *err);
    const char *who;
    bool recording;
    struct fan_memory_scope *outer;
    fan_storage_make was; /* on the CPU: where host memory came from */
} fan_memory_scope;
void fan_memory_scope_begin(fan_memory_scope *s);
void fan_memory_scope_end(fan_memory_scope *s);
/* fan_memory_scope_check: s is not captured; may this thread queue work on it? FAN_ERR_CAPTURE. */
fan_status fan_memory_scope_check(const fan_stream *s, fan_error *err);
/* fan_memory_scope_upload: the host's memory is to be copied to d: in a scope, where a replay would not see that it has
 * changed, that is refused. FAN_ERR_CAPTURE. */
fan_status fan_memory_scope_upload(const fan_device *d, fan_error *err);

/* fan_memory_record_stream: the memory is used on s. FAN_ERR_VALUE: s is of another machine. FAN_ERR_NOMEM leaves the
 * set of users as it was. Does nothing for host storages, and where s owns the memory. */
fan_status fan_memory_record_stream(fan_storage *st, fan_stream *s, fan_error *err);
/* fan_memory_record_stream_all: .. of n arrays (NULL among them is fine), under one lock for those of s's device. */
fan_status fan_memory_record_stream_all(fan_array *const *arrays, size_t n, fan_stream *s, fan_error *err);
/* fan_memory_user: the i-th user of the memory, with a hold; NULL behind the last. While the caller holds the storage
 * no user leaves the set, and a new one comes last. */
fan_stream *fan_memory_user(fan_storage *st, size_t i);
/* fan_memory_set_stream: sets the owner of memory that has none yet. */
void fan_memory_set_stream(fan_storage *st, fan_stream *owner);

/* fan_memory_leave_begin, .._end: a call of which much memory may leave, on this thread: between them it is only kept.
 * They nest. */
void fan_memory_leave_begin(void);
void fan_memory_leave_end(void);

/* fan_device_poll: gives back memory whose users have passed. */
void fan_device_poll(fan_device *d);
void fan_device_flush(fan_device *d);
/* fan_device_orphan: for the last user of a machine: drops the streams of memory that is to be freed, which keep the
 * device. (Such memory kept a stream only because no event could be recorded on it.) The memory itself stays until the
 * device goes. */
void fan_device_orphan(fan_device *d);
void fan_device_clear(fan_device *d);

/* fan_device_array: fresh device memory as an array in the order of `like` (D16), owned by stream `owner`. */
fan_status fan_device_array(fan_device *d, fan_stream *owner, fan_dtype dtype, int ndim, const int64_t *shape,
                            const fan_array *like, fan_array **out, fan_error *err);
/* fan_stats_out_new: memory for the statistics of results of up to `size` elements, owned by stream `owner`. */
fan_status fan_stats_out_new(fan_device *d, fan_stream *owner, int64_t size, fan_array **words, fan_error *err);
/* fan_stats_out_read: the statistics, once s has run so far. Blocks; FAN_ERR_CAPTURE if s is captured. */
fan_status fan_stats_out_read(fan_stream *s, const fan_array *words, fan_device_stats *out, fan_error *err);

#ifdef FAN_TEST
/* fan_memory_device: the device that it lies on; not held. NULL: the host. */
fan_device *fan_memory_device(const fan_storage *st);
/* fan_memory_users: the streams (no holds; at most `cap` are stored) that used it, its owner first; returns how many
 * there are. 0 for host storages. */
size_t fan_memory_users(fan_storage *st, fan_stream **out, size_t cap);
#endif

#endif
