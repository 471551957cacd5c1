/* memory: device memory, and when it may be reused.
 *
 * Title: Lifetime. "x is used on stream s" means: x's memory may be reused only after all that s
 * had queued at x's last use has run. Device memory keeps the set of streams that used it
 * (fan_memory_record_stream). Its last drop records an event on each of them and on its owner; the
 * memory is freed once all have passed, which later calls poll. Memory freed in one call shares
 * events, one per stream, recorded at the end of the call: later than necessary, which is safe
 * (fan_memory_leave_begin). */
#ifndef FAN_DEVICE_MEMORY_H
#define FAN_DEVICE_MEMORY_H

#include "device/stream.h"

/* fan_memory_wrap: makes a storage of the same Lifetime over memory on d that another allocator
 * owns: after its last drop, once all streams that used it have passed, release(ctx) is called, on
 * any thread with no lock of ours held. FAN_ERR_NOMEM: release is not called. */
fan_status fan_memory_wrap(fan_device *d, void *data, void (*release)(void *ctx), void *ctx,
                           fan_storage **out, fan_error *err);
/* fan_memory_wrapped: returns the ctx of a storage that fan_memory_wrap made with this release;
 * NULL: it is no such storage. */
void *fan_memory_wrapped(const fan_storage *st, void (*release)(void *ctx));
/* fan_memory_lend: makes a storage over memory of d that its lender keeps: the last drop calls
 * release(ctx) at once, on any thread with no lock of ours held. The lender orders later uses
 * (fan_memory_wait_users). FAN_ERR_NOMEM: release is not called. fan_memory_wrapped returns its
 * ctx. */
fan_status fan_memory_lend(fan_device *d, fan_stream *owner, void *data, size_t bytes,
                           void (*release)(void *ctx), void *ctx, fan_storage **out,
                           fan_error *err);
/* fan_memory_wait_users: makes s wait for all that the memory's users but `done` (may be NULL) have
 * queued; then its owner is its only user. A failure keeps the users that were not waited for. */
fan_status fan_memory_wait_users(fan_storage *st, fan_stream *s, const fan_stream *done,
                                 fan_error *err);
/* fan_memory_lent: returns whether fan_memory_lend made it. */
bool fan_memory_lent(const fan_storage *st);
/* fan_memory_used_by: returns whether only s uses the memory. */
bool fan_memory_used_by(fan_storage *st, const fan_stream *s);

/* Title: Scopes. While a thread is in a scope, its allocations on the scope's device come from
 * `alloc`: a storage as of fan_memory_lend (NULL: from the device, as outside); owner is NULL if
 * the first user is unknown. Scopes nest; the innermost of a device applies. On the CPU it covers
 * all memory that the core allocates on the thread. outside (NULL: not needed): called with each
 * storage that came from the device in spite of the scope; if it fails, the allocation fails.
 * `recording`: work that the thread queues on a stream that is not captured would run once and not
 * in replays: fan_memory_scope_check refuses it, naming `who`. */
typedef struct fan_memory_scope {
    fan_device *device;
    fan_status (*alloc)(struct fan_memory_scope *self, fan_stream *owner, size_t bytes,
                        fan_storage **out, fan_error *err);
    fan_status (*outside)(struct fan_memory_scope *self, fan_storage *made, fan_error *err);
    const char *who;
    bool recording;
    struct fan_memory_scope *outer;
    fan_storage_make was; /* on the CPU: the previous allocator of host memory */
} fan_memory_scope;
void fan_memory_scope_begin(fan_memory_scope *s);
void fan_memory_scope_end(fan_memory_scope *s);
/* fan_memory_scope_check: for a stream s that is not captured: returns whether this thread may
 * queue work on it. FAN_ERR_CAPTURE. */
fan_status fan_memory_scope_check(const fan_stream *s, fan_error *err);
/* fan_memory_scope_upload: called before host memory is copied to d: refused in a scope, because a
 * replay would not notice changes. FAN_ERR_CAPTURE. */
fan_status fan_memory_scope_upload(const fan_device *d, fan_error *err);

/* fan_memory_record_stream: adds s to the users of the memory. FAN_ERR_VALUE: s is of another
 * machine. FAN_ERR_NOMEM leaves the set of users unchanged. No effect for host storages, or if s
 * owns the memory. */
fan_status fan_memory_record_stream(fan_storage *st, fan_stream *s, fan_error *err);
/* fan_memory_record_stream_all: .. of n arrays (NULLs allowed), under one lock for those of s's
 * device. */
fan_status fan_memory_record_stream_all(fan_array *const *arrays, size_t n, fan_stream *s,
                                        fan_error *err);
/* fan_memory_user: returns a hold on the i-th user of the memory; NULL after the last. While the
 * caller holds the storage, no user is removed, and new ones are appended. */
fan_stream *fan_memory_user(fan_storage *st, size_t i);
/* fan_memory_set_stream: sets the owner of memory that has none yet. */
void fan_memory_set_stream(fan_storage *st, fan_stream *owner);

/* fan_memory_leave_begin: begins a call that may free much memory on this thread: until
 * fan_memory_leave_end it is only collected. They nest. */
void fan_memory_leave_begin(void);
/* fan_memory_leave_end: frees the collected memory, at the end of the outermost call. */
void fan_memory_leave_end(void);

/* fan_device_poll: frees memory whose users have passed. */
void fan_device_poll(fan_device *d);
void fan_device_flush(fan_device *d);
/* fan_device_orphan: called for the last user of a machine: drops the streams of pending memory,
 * which hold the device. (Pending memory keeps a stream only because no event could be recorded on
 * it.) The memory itself stays until the device is freed. */
void fan_device_orphan(fan_device *d);
void fan_device_clear(fan_device *d);

/* fan_device_array: allocates device memory as an array in the order of `like` (D16), owned by
 * stream `owner`. */
fan_status fan_device_array(fan_device *d, fan_stream *owner, fan_dtype dtype, int ndim,
                            const int64_t *shape, const fan_array *like, fan_array **out,
                            fan_error *err);
/* fan_stats_out_new: allocates memory for the statistics of results of up to `size` elements, owned
 * by stream `owner`. */
fan_status fan_stats_out_new(fan_device *d, fan_stream *owner, int64_t size, fan_array **words,
                             fan_error *err);
/* fan_stats_out_read: reads the statistics after all that s has queued. Blocks; FAN_ERR_CAPTURE if
 * s is captured. */
fan_status fan_stats_out_read(fan_stream *s, const fan_array *words, fan_device_stats *out,
                              fan_error *err);

/* fan_memory_device: returns its device, not held. NULL: the host. */
fan_device *fan_memory_device(const fan_storage *st);

#ifdef FAN_TEST
/* fan_memory_users: writes up to `cap` streams that used it (no holds), its owner first; returns
 * how many there are. 0 for host storages. */
size_t fan_memory_users(fan_storage *st, fan_stream **out, size_t cap);
#endif

#endif
