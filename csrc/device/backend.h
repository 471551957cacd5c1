/* backend: the interface of a backend: one const table, filled by name; the buffer uses devices
 * through it alone.
 *
 * Authors of a backend need this header, and job.h for jobs. cpu/cpu.c is the smallest example,
 * sim/ the reference for the meaning, cuda/ the real one. Entries are called from any thread, with
 * no lock of ours held. Each comment answers, in this order and as far as it applies: what the
 * entry does; whether it may block; which stream orders it; the owner of the result; what NULL
 * means (for the entry itself, or for an argument); what may fail.
 *
 * A device without streams (the CPU) runs work at once and has neither streams nor events: groups
 * 3, 4 and 6 are NULL. The backend's own data are fan_device.self, fan_stream.impl and
 * fan_event.impl; it initializes a device by fan_device_init (device.h) and makes a stream by
 * fan_stream_new (stream.h). */
#ifndef FAN_DEVICE_BACKEND_H
#define FAN_DEVICE_BACKEND_H

#include "array/array.h"
#include "device/job.h"

/* recorder: records the work of a device and replays it: the entries that a backend's author fills
 * in for graph trees (graph/).
 *
 * One tree at a time calls each entry, on the thread that calls the tree's function, with no lock
 * of ours held but the tree's own, and without the interpreter's lock. `origin` is the tree's
 * stream; NULL on a device without streams. The order of calls:
 *
 *   origin      once, when the tree is made
 *   begin       the thread starts recording; the function's body runs (on this thread; it may fork
 *               `origin`)
 *   end         .. returns the recording, or fails: either way recording ends;  or
 *   abort       .. the body failed: discards the recording; never fails
 *   launch      any number of times, in any order with launches of others on the same origin, from
 *               any thread
 *   drop        once
 *
 * Memory: while the thread records, or warms up, it has a fan_memory_scope (memory.h): its
 * allocations on the device come from the tree's arena, at fixed addresses; the recorder allocates
 * none. */
#define FAN_POISON 0xA5 /* each byte of memory that must not be read */

typedef struct fan_device fan_device;
typedef struct fan_stream fan_stream;
typedef struct fan_recording fan_recording; /* the backend's own */

/* One access of a recording: `bytes` from `data` on, by the operation `name`. Returns false to end
 * the visit. */
typedef bool (*fan_recording_visit)(void *ctx, const char *name, const void *data, size_t bytes,
                                    bool write);

typedef struct fan_recorder {
    /* origin: makes a stream for the tree. The caller owns a hold. NULL: the device has none. */
    fan_status (*origin)(fan_device *d, fan_stream **out, fan_error *err);

    /* begin: records all that this thread queues from now on on `origin`, and on streams that wait
     * for it, instead of running it (a device without streams: all work of the thread).
     * FAN_ERR_CAPTURE, FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*begin)(fan_device *d, fan_stream *origin, fan_error *err);

    /* end: returns the recording, for the caller to drop. FAN_ERR_CAPTURE with the reason: a stream
     * that was not joined, a call that cannot be recorded. */
    fan_status (*end)(fan_device *d, fan_stream *origin, fan_recording **out, fan_error *err);
    void (*abort)(fan_device *d, fan_stream *origin);

    /* launch: runs all of it again, in the order of `origin`. Avoids allocation. */
    fan_status (*launch)(fan_recording *r, fan_stream *origin, fan_error *err);
    void (*drop)(fan_recording *r);

    /* accesses: visits its accesses, as far as they are available; for others the roles are
     * trusted. NULL: none are. */
    void (*accesses)(const fan_recording *r, fan_recording_visit visit, void *ctx);
    /* accesses_all: `accesses` visits all of them: kernels of other libraries cannot be part of a
     * recording. */
    bool accesses_all;

    /* clock: returns when all that is queued on `origin` will have run, in microseconds of the
     * device's clock: for traces. NULL: unknown. */
    double (*clock)(fan_device *d, fan_stream *origin);

    /* bytes: returns the device memory that the driver uses for it, beside the arena. NULL:
     * none. */
    uint64_t (*bytes)(const fan_recording *r);

    /* kernels: returns how many kernels, copies and fills it runs. */
    size_t (*kernels)(const fan_recording *r);

    /* poison: fills memory that must not be read any more, in the order of `origin`; only with
     * debug=True, unless `always_poisons`. NULL: leaves it. */
    bool always_poisons;
    fan_status (*poison)(fan_device *d, fan_stream *origin, void *data, size_t bytes,
                         fan_error *err);
} fan_recorder;

typedef struct fan_event fan_event;

typedef struct fan_backend {
    /* ---- 1. identity ---- */

    const char *name; /* "cpu", "sim", "cuda": part of device names, and of messages */
    bool has_streams;

    /* dlpack: DLPack's device types whose memory devices of this kind read; arrays of ours are
     * exported as the first. All 0: no other library can use the memory. */
    int dlpack[2];

    /* cuda_protocols: streams have __cuda_stream__, arrays have __cuda_array_interface__. */
    bool cuda_protocols;

    /* find_stream: returns the stream of d with a handle; 0 and 1 are the legacy default. The
     * caller owns a hold. NULL on a device without streams. FAN_ERR_VALUE, FAN_ERR_NOMEM,
     * FAN_ERR_DEVICE. */
    fan_status (*find_stream)(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err);

    /* device_fini: called when the count that d shares with its machine reaches zero: calls
     * fan_device_flush for each device of the machine, then fan_device_clear, then frees them. May
     * block. NULL: its devices are never freed. Cannot fail. */
    void (*device_fini)(fan_device *d);

    /* lost: returns whether d runs nothing and can be queried no more, so that its memory need not
     * wait for users. Does not block. NULL: never. Cannot fail. */
    bool (*lost)(fan_device *d);

    /* closed: returns whether nothing may be queued on d now (a simulated machine after its block).
     * Does not block. NULL: d does not close. Cannot fail. */
    bool (*closed)(const fan_device *d);

    /* left_out: returns the bits of plans (buffer/sync.h) that a proof leaves out on d. Does not
     * block. NULL: none. */
    uint64_t (*left_out)(fan_device *d);

    /* ---- 2. memory ---- */

    /* alloc: allocates `bytes` of d. Blocks only to reclaim. The memory is usable in the order of
     * `stream`; NULL: at once, anywhere. The caller owns *out and returns it by `free`.
     * FAN_ERR_DEVICE_NOMEM, FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*alloc)(fan_device *d, fan_stream *stream, size_t bytes, void **out,
                        fan_error *err);

    /* free: frees memory of `alloc`. Must not wait for streams: all users have passed. Cannot
     * fail. */
    void (*free)(fan_device *d, void *data, size_t bytes);

    /* read: copies `src` (device) to `dst` (host; same shape and dtype). Blocks until done. Ordered
     * by `stream`; NULL on a device without streams. FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*read)(fan_stream *stream, const fan_array *dst, const fan_array *src,
                       fan_error *err);

    /* dropped: reports that memory lost its last reference and will be reused once `streams` have
     * passed. Does not block. NULL: not needed. Cannot fail. */
    void (*dropped)(fan_device *d, void *data, size_t bytes, fan_stream *const *streams, size_t n);

    /* use: checks that the caller, which accesses `a` in the call `name`, has not donated its
     * memory to a buffer; with `donate` notes that this call does. Does not block. NULL: not
     * checked. FAN_ERR_RACE and FAN_ERR_NOMEM note nothing. */
    fan_status (*use)(fan_device *d, const fan_array *a, const char *name, bool donate,
                      fan_error *err);

    /* returned: reports that a buffer returns `a`, so that its memory counts as donated no more.
     * Does not block. NULL: not needed. Cannot fail. */
    void (*returned)(fan_device *d, const fan_array *a);

    /* ---- 3. streams ---- */

    /* current: returns d's own current stream: its legacy default stream. Does not block. The
     * caller owns a hold; NULL: out of memory. */
    fan_stream *(*current)(fan_device *d);

    /* sync: waits until everything queued on s has run. Blocks. FAN_ERR_CAPTURE, FAN_ERR_DEADLOCK,
     * FAN_ERR_DEVICE. */
    fan_status (*sync)(fan_stream *s, fan_error *err);

    /* stream_fini: frees s->impl after the last drop of s. Does not wait for queued work. Cannot
     * fail. */
    void (*stream_fini)(fan_stream *s);

    /* ---- 4. events ---- */

    /* event_init: makes e->impl; called once per event, which is pooled afterwards. FAN_ERR_NOMEM,
     * FAN_ERR_DEVICE. */
    fan_status (*event_init)(fan_event *e, fan_error *err);

    /* event_fini: frees e->impl; queued waits for it remain valid. Cannot fail. */
    void (*event_fini)(fan_event *e);

    /* record: makes e represent all that s has queued so far, in place of its last record. Does not
     * block. FAN_ERR_NOMEM, FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*record)(fan_event *e, fan_stream *s, fan_error *err);

    /* note: as record, for peek and event_sync alone: it orders nothing else. NULL: use record. */
    fan_status (*note)(fan_event *e, fan_stream *s, fan_error *err);

    /* wait: orders all that is queued on s from now on after e's last record, if there was one.
     * Does not block. FAN_ERR_NOMEM, FAN_ERR_VALUE, FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*wait)(fan_stream *s, fan_event *e, fan_error *err);

    /* elided: reports that a wait of s for e was left out (event.h, Elision). Must not call back.
     * NULL: not needed. Cannot fail. */
    void (*elided)(fan_stream *s, fan_event *e);

    /* query: sets *done to whether e's last record has been reached. Does not block.
     * FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*query)(fan_event *e, bool *done, fan_error *err);

    /* nudge: called after a query found that an event of d has not passed, so that a polling host
     * makes progress. NULL: work runs by itself. */
    fan_status (*nudge)(fan_device *d, fan_error *err);

    /* peek: as query, for freeing memory alone. NULL: use query. Cannot fail: false. */
    bool (*peek)(fan_event *e);

    /* event_sync: waits until e's last record has been reached. Blocks. FAN_ERR_CAPTURE,
     * FAN_ERR_DEADLOCK, FAN_ERR_DEVICE. */
    fan_status (*event_sync)(fan_event *e, fan_error *err);

    /* ---- 5. work ---- */

    /* run: queues `job` and writes its trace line (only the backend has the times). Does not block;
     * on a device without streams the job has run. Ordered by s; NULL on such a device.
     * FAN_ERR_NOMEM and FAN_ERR_DEVICE_NOMEM change nothing; FAN_ERR_DEVICE, FAN_ERR_CAPTURE,
     * FAN_ERR_RACE. */
    fan_status (*run)(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);

    /* run_many: queues as many of n sums as it can in as few launches as it can; no sum accesses
     * memory that another one writes, so their order is free. Does not block. Ordered by s. states,
     * all FAN_JOB_PENDING on entry, receives the state of each; the caller passes jobs pending
     * after FAN_OK to `run`. NULL: never worthwhile. Fails as run does, at the first failure. */
    fan_status (*run_many)(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n,
                           fan_job_state *states, fan_error *err);

    /* ---- 6. recording: capture into graphs ---- */

    /* capture: sets *id to the number of s's capture; 0: none. Does not block. NULL: no captures.
     * FAN_ERR_CAPTURE if a violation has ended it, FAN_ERR_DEVICE. */
    fan_status (*capture)(fan_stream *s, uint64_t *id, fan_error *err);

    /* capture_stream: makes a stream of the backend's own, used by the capture `id` alone (S11
     * under capture). Does not block. The caller owns a hold. NULL: not available. FAN_ERR_NOMEM,
     * FAN_ERR_DEVICE. */
    fan_status (*capture_stream)(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);

    /* recorder: records and replays the device's work. NULL: not supported. */
    const fan_recorder *recorder;

    /* ---- 7. explored schedules (base/thread.h, Calls and turns) ---- */

    /* array_accessed, event_accessed: report that the calling thread is in a call of the public
     * interface that may write `a`, on d, or that reads the last record of e. NULL: not observed.
     * Cannot fail. */
    void (*array_accessed)(const fan_device *d, const fan_array *a);
    void (*event_accessed)(const fan_event *e);
} fan_backend;

/* fan_backend_scope: what a thread enters to use devices of a backend (a simulated machine), so
 * that the threads that work for it can enter the same. */
typedef struct fan_backend_scope {
    /* entered: returns the innermost scope of this thread, with a hold; NULL: none. */
    void *(*entered)(void);

    /* enter: makes it the innermost scope of this thread until `leave`. Where memory is short, no
     * effect. */
    void (*enter)(void *scope);
    void (*leave)(void *scope);
    void (*drop)(void *scope);
} fan_backend_scope;

/* fan_backend_entry: what the registry (py/device/backends.h) has of a backend beside its
 * table. */
typedef struct fan_backend_entry {
    const fan_backend *backend;

    /* count: how many devices a caller can name now. May block. NULL: one, and its name has no
     * number. Cannot fail:
     * 0. */
    int (*count)(void);

    /* bare_name: the name without a number means device 0. */
    bool bare_name;

    /* find: the device called "name:index". May block. The caller owns a hold. FAN_ERR_VALUE where
     * there is none of that number, FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*find)(long index, fan_device **out, fan_error *err);

    /* keep, trim: bounds the freed memory that each device keeps for later sums; returns all of it
     * to the system and gives its size in bytes. May block. NULL: no memory is kept. Cannot
     * fail. */
    void (*keep)(size_t bytes);
    size_t (*trim)(void);

    /* scope: NULL: threads enter nothing. */
    const fan_backend_scope *scope;
} fan_backend_entry;

#endif
