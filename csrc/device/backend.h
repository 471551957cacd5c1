/* backend: one const table, filled by name: all that the buffer knows of a kind of device.
 *
 * Its author reads this page, and job.h for what a job is. cpu/cpu.c is the smallest example, sim/ the reference for
 * the meaning, cuda/ the proof. Entries are called from any thread, with no lock of ours held. Each comment answers, in
 * this order and where there is something to say: what it does; may it block; which stream orders it; who owns the
 * result; what NULL means (of the entry itself, or of an argument); what may fail.
 *
 * A device without streams (the CPU) runs work at once and has neither streams nor events: groups 3, 4 and 6 stay NULL.
 * The backend's own data hang on fan_device.self, fan_stream.impl and fan_event.impl; a device is begun with
 * fan_device_init (device.h), a stream with fan_stream_new (stream.h).
 */
#ifndef FAN_DEVICE_BACKEND_H
#define FAN_DEVICE_BACKEND_H

#include "device/job.h"
#include "device/recorder.h"

typedef struct fan_event fan_event;

typedef struct fan_backend {
    /* ---- 1. identity ---- */

    const char *name; /* "cpu", "sim", "cuda": in the names of devices, and in messages */
    bool has_streams;

    /* dlpack: DLPack's device types whose memory devices of this kind read; arrays of ours are exported as the first.
     * All 0: no other library can use the memory. */
    int dlpack[2];

    /* cuda_protocols: streams have __cuda_stream__, arrays have __cuda_array_interface__. */
    bool cuda_protocols;

    /* find_stream: the stream of d with a handle; 0 and 1 are the legacy default. The caller owns a hold. NULL on a
     * device without streams. FAN_ERR_VALUE, FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*find_stream)(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err);

    /* device_fini: the last hold went on what holds d, or on the machine whose holds it shares: fan_device_flush for
     * each device of that, then fan_device_clear, then their memory. May block. NULL: its devices never go. Cannot
     * fail. */
    void (*device_fini)(fan_device *d);

    /* lost: whether nothing runs on d any more and nothing can be asked of it, so that memory need not wait for
     * anybody. Does not block. NULL: never. Cannot fail. */
    bool (*lost)(fan_device *d);

    /* left_out: the bits of plans (buffer/sync.h) that a proof leaves out on d. Does not block. NULL: none. */
    uint64_t (*left_out)(fan_device *d);

    /* ---- 2. memory ---- */

    /* alloc: `bytes` of memory of d. Blocks only to reclaim. To be used first on `stream`, and elsewhere behind that;
     * NULL: anywhere, at once. The caller owns *out and gives it to `free`. FAN_ERR_DEVICE_NOMEM, FAN_ERR_NOMEM,
     * FAN_ERR_DEVICE. */
    fan_status (*alloc)(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err);

    /* free: gives memory of `alloc` back. May not wait for streams: all its users have passed. Cannot fail. */
    void (*free)(fan_device *d, void *data, size_t bytes);

    /* read: copies `src` (of the device) into `dst` (of the host; same shape and dtype). Blocks until it is there. In
     * the order of `stream`; NULL on a device without. FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*read)(fan_stream *stream, const fan_array *dst, const fan_array *src, fan_error *err);

    /* dropped: tells that the last hold on memory went: it will be used again once `streams` have passed. Does not
     * block. NULL: nobody wants to know. Cannot fail. */
    void (*dropped)(fan_device *d, void *data, size_t bytes, fan_stream *const *streams, size_t n);

    /* ---- 3. streams ---- */

    /* current: the stream that d itself calls current: its legacy default stream. Does not block. The caller owns a
     * hold; NULL: out of memory. */
    fan_stream *(*current)(fan_device *d);

    /* sync: everything queued on s has run. Blocks. FAN_ERR_CAPTURE, FAN_ERR_DEADLOCK, FAN_ERR_DEVICE. */
    fan_status (*sync)(fan_stream *s, fan_error *err);

    /* stream_fini: the last hold on s went: frees s->impl. Does not wait for what is queued. Cannot fail. */
    void (*stream_fini)(fan_stream *s);

    /* ---- 4. events ---- */

    /* event_init: makes e->impl. Once for each event, which is pooled afterwards. FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*event_init)(fan_event *e, fan_error *err);

    /* event_fini: frees e->impl; waits for it that are queued go on. Cannot fail. */
    void (*event_fini)(fan_event *e);

    /* record: e stands for all that s has queued so far, instead of what it stood for. Does not block. FAN_ERR_NOMEM,
     * FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*record)(fan_event *e, fan_stream *s, fan_error *err);

    /* note: as record, but for peek and event_sync alone: it orders nothing else. NULL: record does. */
    fan_status (*note)(fan_event *e, fan_stream *s, fan_error *err);

    /* wait: what is queued on s from now on runs behind e's last record; behind nothing where there was none. Does not
     * block. FAN_ERR_NOMEM, FAN_ERR_VALUE, FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*wait)(fan_stream *s, fan_event *e, fan_error *err);

    /* elided: tells that a wait of s for e was left out (event.h, Elision). May not call back. NULL: nobody wants to
     * know. Cannot fail. */
    void (*elided)(fan_stream *s, fan_event *e);

    /* query: *done: what e stands for has run. Does not block. FAN_ERR_CAPTURE, FAN_ERR_DEVICE. */
    fan_status (*query)(fan_event *e, bool *done, fan_error *err);

    /* nudge: called after a query found that an event of d has not passed, so that a host which polls makes progress.
     * NULL: work runs by itself. */
    fan_status (*nudge)(fan_device *d, fan_error *err);

    /* peek: as query, of which only memory that is given back depends. NULL: query does. Cannot fail: false. */
    bool (*peek)(fan_event *e);

    /* event_sync: what e stands for has run. Blocks. FAN_ERR_CAPTURE, FAN_ERR_DEADLOCK, FAN_ERR_DEVICE. */
    fan_status (*event_sync)(fan_event *e, fan_error *err);

    /* ---- 5. work ---- */

    /* run: queues `job` and puts its line into the trace, for it alone knows the time. Does not block; on a device
     * without streams the job has run. Ordered by s; NULL on such a device. FAN_ERR_NOMEM and FAN_ERR_DEVICE_NOMEM
     * change nothing; FAN_ERR_DEVICE, FAN_ERR_CAPTURE, FAN_ERR_RACE. */
    fan_status (*run)(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);

    /* run_many: queues as many of n sums as it can in as few launches as it can; none touches what another one writes,
     * so their order is free. Does not block. Ordered by s. states, all FAN_JOB_PENDING on entry, says what became of
     * each; what is pending after FAN_OK is for `run`. NULL: it never pays. Fails as run does, at the first that fails.
     */
    fan_status (*run_many)(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *states,
                           fan_error *err);

    /* ---- 6. recording: capture into graphs ---- */

    /* capture: *id: the number of the capture that s is in; 0: in none. Does not block. NULL: there is no capture.
     * FAN_ERR_CAPTURE where a violation has ended it, FAN_ERR_DEVICE. */
    fan_status (*capture)(fan_stream *s, uint64_t *id, fan_error *err);

    /* capture_stream: a stream of the backend's own, on which nobody queues but for the capture `id` (S11 under
     * capture). Does not block. The caller owns a hold. NULL: there is none. FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*capture_stream)(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);

    /* recorder: how d does once more what it did. NULL: it cannot. */
    const fan_recorder *recorder;
} fan_backend;

/* fan_backend_entry: what the registry (py/backends.h) knows of a backend beside its table. */
typedef struct fan_backend_entry {
    const fan_backend *backend;

    /* count: how many devices a caller can name now. May block. NULL: one, and its name has no number. Cannot fail: 0.
     */
    int (*count)(void);

    /* bare_name: the name without a number means device 0. */
    bool bare_name;

    /* find: the device called "name:index". May block. The caller owns a hold. FAN_ERR_VALUE where there is none of
     * that number, FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*find)(long index, fan_device **out, fan_error *err);

    /* keep, trim: bounds the freed memory that each device keeps for later sums; returns all of it to the system and
     * gives its size in bytes. May block. NULL: no memory is kept. Cannot fail. */
    void (*keep)(size_t bytes);
    size_t (*trim)(void);
} fan_backend_entry;

#endif
