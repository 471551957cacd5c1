/* device: what a backend is, and the streams, events and memory that all backends share.
 *
 * A backend is one const table, filled by name. A backend's author reads this page and nothing else. Every entry's
 * comment answers: what it does; may it block; which stream orders it; who owns the result; what NULL means; what may
 * fail. Entries are called with no lock of ours held, from any thread.
 *
 * A device without streams (the CPU) runs work at once; it has no streams, events, or use sets.
 *
 * Title: Lifetime. "x is used on stream s" means: x's memory may be reused only after what s had queued at x's last
 * use has run. Device memory keeps the set of streams that used it (fan_memory_record_stream). When its last hold goes,
 * an event is recorded on each of them and on its owner, and the memory goes back when all have passed; this is polled
 * on later calls.
 *
 * Title: Elision. Each stream has a lane. What a stream is known to wait for is a clock over lanes; an event carries
 * the clock of its stream at record. A wait whose event's own count is already in the waiting stream's clock is left
 * out (and counted); never one of the legacy default stream, for each call that names that is a barrier between the
 * blocking streams. Threads: no lock is held across a backend's call, so two records on one stream may reach the
 * backend in either order. A record therefore draws two numbers of its stream, one before the call and one after. Who
 * waits for it learns the earlier; it may be left out only by who knows the later: then the record that was waited for
 * began after this one was through. What a stream learns from a wait it learns once the backend has the wait. An event
 * that is re-recorded meanwhile teaches nothing and is never left out.
 */
#ifndef FAN_DEVICE_DEVICE_H
#define FAN_DEVICE_DEVICE_H

#include "array/array.h"
#include "array/sparse.h"
#include "array/sum.h"
#include "array/device_stats.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"
#include "device/capture_rule.h"

#include <pthread.h>

typedef struct fan_device fan_device;
typedef struct fan_stream fan_stream;
typedef struct fan_event fan_event;

/* Work that a stream orders. Arrays in a job belong to the caller: a backend that runs later copies geometry and
 * addresses, and does not hold their storages (keeping memory alive until the work has run is the rules' business:
 * Lifetime). */
typedef enum fan_job_kind {
    FAN_JOB_SUM,     /* out = fold of in[0..n) with scale (fan_sum) */
    FAN_JOB_EXACT,   /* out = their exact sum in in[0].acc, with scale (fan_exact_fold) */
    FAN_JOB_REDUCE,  /* out = in[0] summed to out's shape (fan_reduce) */
    FAN_JOB_COPY,    /* out = in[0], same shape, converted (fan_array_copy) */
    FAN_JOB_ZERO,    /* out = 0 */
    FAN_JOB_SCATTER, /* out += sparse (fan_sparse_scatter); reads and writes out */
    FAN_JOB_UPLOAD,  /* out (device) = in[0] (host memory, read before the call returns) */
    FAN_JOB_STATS    /* the figures of in[0] as it is; who of in[skip..n) spoiled it. No out */
} fan_job_kind;

/* Statistics that a job leaves on its device (array/device_stats.h), for fan_stats_out_read. */
typedef struct fan_stats_out {
    const fan_array *words; /* of fan_stats_out_new; written in the order of the stream */
    const fan_array
        *before; /* NULL, or words of an earlier job (perhaps the same): who spoiled that one spoiled this one too */
    const int64_t *keys; /* of each operand; -1: none */
} fan_stats_out;

typedef struct fan_job {
    fan_job_kind kind;
    const fan_array *out;
    const fan_operand *in;
    size_t n;
    const fan_scale *scale;   /* NULL: none */
    const fan_sparse *sparse; /* FAN_JOB_SCATTER */
    fan_stats *stats; /* FAN_JOB_SUM on a device without streams: what is to be known of the result (fan_sum_how). NULL:
                         nothing */
    const fan_stats_out *figures; /* FAN_JOB_SUM, FAN_JOB_STATS on one with streams: the same, of n >= 1 operands; never
                                   under capture. NULL: nothing */
    size_t skip;                  /* with stats or figures: operands before this one are not held to blame */
    const char *label;            /* for traces and reports; copied */
} fan_job;

/* fan_job_run: does a job at once on memory that the host can reach; parallel: other threads may help. */
void fan_job_run(const fan_job *job, bool parallel);
/* fan_job_bytes: what it reads and writes, every element once. */
uint64_t fan_job_bytes(const fan_job *job);
/* fan_job_word: "sum", "copy": its label where it has none. */
const char *fan_job_word(fan_job_kind kind);
/* fan_job_trace: puts the job's line (KERNEL or COPY) into the traces of this thread; times on the device's clock, < 0:
 * unknown. */
void fan_job_trace(const fan_device *d, const fan_stream *s, const fan_job *job, double start_us, double end_us);
/* fan_jobs_label: "3 slots: sum grads[0], sum grads[1], .." of n jobs in one launch. Returns buf. fan_jobs_trace: their
 * one line. */
char *fan_jobs_label(const fan_job *jobs, size_t n, char *buf, size_t size);
void fan_jobs_trace(const fan_device *d, const fan_stream *s, const fan_job *jobs, size_t n, const char *label,
                    double start_us, double end_us);

/* What became of a job that was given away with others. */
typedef enum fan_job_state {
    FAN_JOB_PENDING, /* nothing was done for it */
    FAN_JOB_QUEUED,
    FAN_JOB_FAILED /* as after a `run` that failed with the same status */
} fan_job_state;

typedef struct fan_backend {
    /* identity */
    const char *name; /* "cpu", "sim", "cuda" */
    bool has_streams;

    /* memory. alloc: `bytes` on the device, to be used first on `stream` (NULL: unordered); may block only to reclaim;
     * the caller owns the result; FAN_ERR_DEVICE_NOMEM. free: gives it back; all its users have passed; cannot fail.
     * read: copies `src` (device) into `dst` (host, same shape and dtype) in the order of `stream` and waits for it:
     * blocks. dropped (NULL: nothing to tell): the last hold on the memory went, it will be reused once `streams` have
     * passed; cannot fail. */
    fan_status (*alloc)(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err);
    void (*free)(fan_device *d, void *data, size_t bytes);
    fan_status (*read)(fan_stream *stream, const fan_array *dst, const fan_array *src, fan_error *err);
    void (*dropped)(fan_device *d, void *data, size_t bytes, fan_stream *const *streams, size_t n);

    /* streams. current: the backend's own notion of the device's current stream (its legacy default), a hold for the
     * caller; NULL without streams. sync: blocks until everything queued on `s` has run. stream_fini: the last hold on
     * `s` went; frees s->impl. */
    fan_stream *(*current)(fan_device *d);
    fan_status (*sync)(fan_stream *s, fan_error *err);
    void (*stream_fini)(fan_stream *s);

    /* events. event_init fills e->impl (a pooled event is initialised once); event_fini frees it. record: captures what
     * `s` has queued so far. wait: what is queued on `s` from now on runs after `e`'s last record; a no-op where it was
     * never recorded. None blocks. query: true when the recorded work has run. event_sync blocks until it has. peek
     * (NULL: query): as query, but nobody will rely on the answer beyond giving memory back. note (NULL: record): as
     * record, for peek and event_sync alone: it orders nothing else. elided (NULL: nothing to tell): a wait of `s` for
     * `e` was left out; may not call back. */
    fan_status (*event_init)(fan_event *e, fan_error *err);
    void (*event_fini)(fan_event *e);
    fan_status (*record)(fan_event *e, fan_stream *s, fan_error *err);
    fan_status (*note)(fan_event *e, fan_stream *s, fan_error *err);
    fan_status (*wait)(fan_stream *s, fan_event *e, fan_error *err);
    fan_status (*query)(fan_event *e, bool *done, fan_error *err);
    bool (*peek)(fan_event *e);
    void (*elided)(fan_stream *s, fan_event *e);
    fan_status (*event_sync)(fan_event *e, fan_error *err);

    /* work. run: queues `job` on `s` (s NULL on a device without streams: runs at once); does not block; puts the job's
     * trace line, for it alone knows the time. */
    fan_status (*run)(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
    /* run_many (NULL: it never pays): queues as many of n sums as it can in as few launches as it can. No job touches
     * what another one writes, so their order is free. fates, all FAN_JOB_PENDING on entry, says what became of each;
     * what still waits after FAN_OK is for `run`. The first failure ends it. */
    fan_status (*run_many)(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *fates,
                           fan_error *err);

    /* capture (NULL: there is none): the number of the capture into a graph that `s` is in, 0: in none. Does not block.
     */
    fan_status (*capture)(fan_stream *s, uint64_t *id, fan_error *err);

    /* spare (NULL: there is none): a hold on a stream of the backend's own, on which nobody queues but for the capture
     * `id` (S11 under capture). */
    fan_status (*spare)(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);

    /* lost (NULL: never): nothing runs on `d` any more, and nothing can be asked of it: memory that leaves need not
     * wait for anybody. */
    bool (*lost)(fan_device *d);

    /* left_out (NULL: nothing): the plan bits (buffer/sync.h) that a proof leaves out on this device. */
    uint64_t (*left_out)(fan_device *d);
    /* device_fini (NULL: nothing): the last hold on a device of fan_device_new went, or the last on the machine whose
     * holds a device of fan_device_init shares; in the second case it calls fan_device_clear for each of them. */
    void (*device_fini)(fan_device *d);
} fan_backend;

struct fan_device {
    atomic_size_t *holds; /* its own, or one that all devices of a machine share */
    atomic_size_t own;
    const fan_backend *backend;
    void *self;           /* the backend's */
    int index;            /* ordinal within the backend */
    uint64_t id;          /* never reused; 0 is the CPU alone */
    pthread_mutex_t lock; /* guards what follows; `known`, `count` of its streams; its events; the users of its memory.
                           * Nothing is called while it is held, so it is no step of anyone's (D30) */
    fan_event *pool;      /* free events */
    struct fan_memory *leaving, **leaving_end; /* memory whose users have not passed yet, oldest first */
    atomic_uint_fast64_t events, waits,
        elided;       /* counted by fan_event_record, fan_event_rerecord and fan_stream_wait */
    fan_device *next; /* of all that were begun; guarded by a lock of their own */
};

struct fan_stream {
    atomic_size_t refs;
    fan_device *device; /* held */
    uint64_t id;        /* never reused; identifies the stream to the rules */
    uint64_t handle;    /* the backend's number for it, as users know it */
    uint32_t lane;      /* of the elision clocks; FAN_NO_LANE: too many streams, nothing is left out */
    uint64_t count;     /* records begun on it; a stream that inherits a lane goes on counting */
    fan_clock known;    /* what it is known to wait for (Elision) */
    void *impl;         /* the backend's */
};

struct fan_event {
    atomic_size_t refs;
    fan_device *device; /* held */
    fan_stream *stream; /* held; NULL: never recorded */
    uint64_t id;        /* of this use of it: a pooled event gets a new one */
    uint64_t count;     /* stream's count when its record was through; UINT64_MAX: cannot be told */
    fan_clock known;    /* what who waits for it will know; its own count is the one before the record */
    uint32_t recording; /* records under way */
    uint64_t turns;     /* records begun */
    uint64_t capture;   /* the capture that its last record belongs to; 0: none */
    bool own;           /* of a user: goes with its last hold, for the next user's was never recorded */
    void *impl;
    fan_event *next; /* in the pool */
};

#define FAN_NO_LANE UINT32_MAX
#define FAN_LEGACY 1 /* the handle of the legacy default stream */

/* fan_device_new: a device with one hold; NULL when out of memory. */
fan_device *fan_device_new(const fan_backend *b, void *self, int index);
/* fan_device_init: the same in memory of the backend's, which shares `holds` (nothing is added to it). Returns 0 or -1.
 * fan_device_flush: waits for leaving memory (event_sync) and gives it back. fan_device_clear: that, and frees its
 * events; nothing may hold it any more. Devices that share holds are all flushed before the first is cleared. */
int fan_device_init(fan_device *d, const fan_backend *b, void *self, int index, atomic_size_t *holds);
void fan_device_flush(fan_device *d);
/* fan_device_orphan: leaving memory lets go of its streams, which keep the device (they were kept only where an event
 * could not be recorded); such memory stays until the device goes. For the last user of a machine. */
void fan_device_orphan(fan_device *d);
void fan_device_clear(fan_device *d);
fan_device *fan_device_hold(fan_device *d);
void fan_device_drop(fan_device *d); /* NULL is fine */
/* fan_cpu: the CPU. Its holds do nothing. */
fan_device *fan_cpu(void);
/* fan_device_text: "cpu", "sim:0". */
char *fan_device_text(const fan_device *d, char *buf, size_t size);

fan_stream *fan_stream_new(fan_device *d, uint64_t handle, void *impl); /* NULL when out of memory */
fan_stream *fan_stream_hold(fan_stream *s);                             /* every hold takes NULL and gives it back */
/* fan_stream_try_hold: NULL where its last hold has gone. For backends, which keep a stream's address until
 * stream_fini. */
fan_stream *fan_stream_try_hold(fan_stream *s);
void fan_stream_drop(fan_stream *s); /* NULL is fine */
/* fan_stream_current: the innermost stream pushed for `d` on this thread, else the backend's current; a hold. NULL for
 * devices without streams. */
fan_stream *fan_stream_current(fan_device *d);
/* fan_sync_trace: a line of trace for backends: the host waited for a stream, or an event (the other is NULL). */
void fan_sync_trace(const fan_device *d, const fan_stream *s, const fan_event *e);
/* fan_stream_pushed: the innermost stream pushed for `d` on this thread, a hold; NULL: none. */
fan_stream *fan_stream_pushed(fan_device *d);
/* fan_stream_push: makes s the current stream of its device on this thread (holds it); FAN_ERR_NOMEM. pop takes off the
 * innermost push of `s`. */
fan_status fan_stream_push(fan_stream *s, fan_error *err);
void fan_stream_pop(fan_stream *s);
fan_status fan_stream_sync(fan_stream *s, fan_error *err);
/* fan_stream_capture: the capture that s is in; 0: none. */
fan_status fan_stream_capture(fan_stream *s, uint64_t *id, fan_error *err);

/* fan_event_record: a fresh (pooled) event, recorded on s; the caller owns the hold. */
fan_status fan_event_record(fan_stream *s, fan_event **out, fan_error *err);
fan_status fan_event_new(fan_device *d, fan_event **out, fan_error *err); /* not recorded, not from the pool */
fan_status fan_event_query(fan_event *e, bool *done, fan_error *err);     /* true also where it was never recorded */
fan_status fan_event_sync(fan_event *e, fan_error *err);
/* fan_event_rerecord: for events of users; must be of s's device. */
fan_status fan_event_rerecord(fan_event *e, fan_stream *s, fan_error *err);
/* fan_event_stream: a hold on the stream that it was last recorded on; NULL before. */
fan_stream *fan_event_stream(fan_event *e);
fan_event *fan_event_hold(fan_event *e);
void fan_event_drop(
    fan_event *e); /* NULL is fine; the last drop puts it into the pool, or frees one of fan_event_new */
/* fan_stream_wait: s waits for e, across devices of one backend (FAN_ERR_TYPE otherwise), and by the table of S7 where
 * one of them is captured (FAN_ERR_CAPTURE); *elided (may be NULL) says that it was left out (Elision). */
fan_status fan_stream_wait(fan_stream *s, fan_event *e, bool *elided, fan_error *err);

/* fan_event_covers: whoever waits for `later` need not wait for `e`: both recorded on one stream, later's record begun
 * when e's was through. */
bool fan_event_covers(const fan_event *later, const fan_event *e);

/* fan_memory_new: `bytes` of device memory owned by stream `owner` (may be NULL), as a storage whose release follows
 * Lifetime. On the CPU: fan_storage_new. */
fan_status fan_memory_new(fan_device *d, fan_stream *owner, size_t bytes, fan_storage **out, fan_error *err);
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
/* fan_memory_users: the streams (no holds; at most `cap` are stored) that used it, its owner first; returns how many
 * there are. 0 for host storages. */
size_t fan_memory_users(fan_storage *st, fan_stream **out, size_t cap);
/* fan_memory_user: the i-th of them, with a hold; NULL behind the last. While the caller holds the storage none leaves,
 * and new ones come last. */
fan_stream *fan_memory_user(fan_storage *st, size_t i);
/* fan_memory_set_stream: gives memory without an owner its owner. */
void fan_memory_set_stream(fan_storage *st, fan_stream *owner);
fan_device *fan_memory_device(fan_storage *st); /* the CPU for host storages; no hold */
/* fan_device_poll: gives back memory whose users have passed. */
void fan_device_poll(fan_device *d);
/* fan_device_array: fresh device memory as an array in the order of `like` (D16), owned by stream `owner`. */
fan_status fan_device_array(fan_device *d, fan_stream *owner, fan_dtype dtype, int ndim, const int64_t *shape,
                            const fan_array *like, fan_array **out, fan_error *err);
fan_status fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
/* fan_stats_out_new: memory for the figures of results of up to `size` elements, owned by `owner`. */
fan_status fan_stats_out_new(fan_device *d, fan_stream *owner, int64_t size, fan_array **words, fan_error *err);
/* fan_stats_out_read: what is in them once s has run so far: blocks; FAN_ERR_CAPTURE where s is captured. */
fan_status fan_stats_out_read(fan_stream *s, const fan_array *words, fan_device_stats *out, fan_error *err);

/* fan_batch: sums held back until they can be queued together (run_many). Of one thread. A flush queues all that waits,
 * each on its own stream; jobs of a stream that may touch what another of them writes go one after the other, as they
 * came. The first failure ends the flush, and every later one does nothing. */
typedef struct fan_batch fan_batch;
fan_batch *fan_batch_new(void);    /* NULL when out of memory */
void fan_batch_free(fan_batch *b); /* NULL is fine */
/* fan_batch_put: holds s and the job's arrays until the batch is cleared; `scale` is to live as long. *number is for
 * fan_batch_state. FAN_ERR_NOMEM. */
fan_status fan_batch_put(fan_batch *b, fan_stream *s, const fan_job *job, size_t *number, fan_error *err);
void fan_batch_flush(fan_batch *b);
fan_job_state fan_batch_state(const fan_batch *b, size_t number);
/* fan_batch_failure: what the first failure was; FAN_OK: there was none. */
fan_status fan_batch_failure(const fan_batch *b, fan_error *err);
/* fan_batch_waits_on: some job may wait that belongs to s: whoever records an event on s flushes first. */
bool fan_batch_waits_on(const fan_batch *b, const fan_stream *s);
uint64_t fan_batch_bytes(const fan_batch *b); /* of the results of all its jobs */
void fan_batch_clear(fan_batch *b);           /* as new; the room stays */

/* fan_device_sparse_merge: fan_sparse_merge for parts on device d, ordered by s. COO without `coalesce` and without
 * result rounding is queued; anything else reads the parts to the host (blocks), merges there and uploads. */
fan_status fan_device_sparse_merge(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n, bool coalesce,
                                   fan_dtype result, const fan_scale *scale, fan_sparse **out, fan_error *err);

#endif
