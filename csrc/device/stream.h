/* stream: streams as the rules use them, and which one is current on a thread.
 *
 * Title: Current streams. Each device has one current stream per thread: the one pushed last on the
 * thread, else the backend's own. A fan_stream_set is a snapshot of the current streams, to be
 * restored elsewhere: the pushed ones, one per device; all other devices have the backend's own.
 * NULL: none was pushed. It is immutable and shared. */
#ifndef FAN_DEVICE_STREAM_H
#define FAN_DEVICE_STREAM_H

#include "base/clock.h"
#include "base/thread.h"
#include "base/trace.h"
#include "device/device.h"

struct fan_stream {
    atomic_size_t refs;
    fan_device *device; /* held */
    uint64_t id;        /* never reused; identifies the stream to the rules */
    uint64_t handle;    /* the backend's number for it, which users see */
    /* its lane in the clocks (Elision); FAN_NO_LANE: too many streams, and no wait of this one is
     * left out */
    uint32_t lane;
    uint64_t count;  /* records begun on it; a stream that inherits a lane continues its count */
    fan_clock clock; /* the records that it waits for (Elision) */
    void *impl;      /* the backend's */
};

#define FAN_NO_LANE UINT32_MAX
#define FAN_LEGACY 1 /* the handle of the legacy default stream */

/* NULL when out of memory */
fan_stream *fan_stream_new(fan_device *d, uint64_t handle, void *impl);
/* every hold accepts NULL and returns it */
fan_stream *fan_stream_hold(fan_stream *s);
/* fan_stream_try_hold: NULL if its last hold was dropped. For backends, which keep a stream's
 * address until stream_fini. */
fan_stream *fan_stream_try_hold(fan_stream *s);
void fan_stream_drop(fan_stream *s); /* s may be NULL */
/* fan_stream_current: returns a hold on the innermost stream pushed for `d` on this thread, else on
 * the backend's current stream. NULL for devices without streams. */
fan_stream *fan_stream_current(fan_device *d);
/* fan_stream_pushed: returns a hold on the innermost stream pushed for `d` on this thread; NULL:
 * none. */
fan_stream *fan_stream_pushed(fan_device *d);
/* fan_stream_push: makes s the current stream of its device on this thread (holds it);
 * FAN_ERR_NOMEM. */
fan_status fan_stream_push(fan_stream *s, fan_error *err);
/* fan_stream_pop: removes the innermost push of `s`. */
void fan_stream_pop(fan_stream *s);

typedef struct fan_stream_set {
    atomic_size_t refs;
    size_t n;          /* at least 1 */
    fan_stream *all[]; /* held; the one pushed last comes first */
} fan_stream_set;

/* fan_streams_in_use: returns whether any stream is pushed on any thread, or any set is held;
 * otherwise only the backends' own streams are current. One load. */
extern atomic_size_t fan__streams_used;
static inline bool fan_streams_in_use(void)
{
    return atomic_load_explicit(&fan__streams_used, memory_order_relaxed) != 0;
}

/* fan_stream_set_now: returns a hold on a snapshot of this thread's current streams in *out;
 * FAN_ERR_NOMEM. */
fan_status fan_stream_set_now(fan_stream_set **out, fan_error *err);
/* fan_stream_set_with: the same for `set`, which may be NULL, with `s` first and for its device. */
fan_status fan_stream_set_with(fan_stream_set *set, fan_stream *s, fan_stream_set **out,
                               fan_error *err);
fan_stream_set *fan_stream_set_hold(fan_stream_set *set); /* accepts NULL and returns it */
void fan_stream_set_drop(fan_stream_set *set);            /* set may be NULL */
/* fan_stream_set_find: returns its stream of a device, borrowed; NULL: none. */
fan_stream *fan_stream_set_find(const fan_stream_set *set, const fan_device *d);

/* fan_streams_enter: makes a set, held by the caller meanwhile, all that is current on this thread,
 * until fan_streams_leave, which removes later pushes. They nest. */
typedef struct fan_streams_outer {
    struct fan_pushed_stream *pushed;
    fan_stream_set *set;
} fan_streams_outer;
void fan_streams_enter(fan_stream_set *set, fan_streams_outer *outer);
void fan_streams_leave(const fan_streams_outer *outer);

/* fan_stream_check_open: FAN_ERR_STATE if nothing may be queued on s now. Each public call on a
 * stream, or with one, checks it first, also where it would queue nothing. s may be NULL. */
fan_status fan_stream_check_open(const fan_stream *s, fan_error *err);
fan_status fan_stream_sync(fan_stream *s, fan_error *err);
/* fan_stream_capture: sets *id to s's capture; 0: none. */
fan_status fan_stream_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);

/* trace: the lines that devices write to this thread's traces. */
/* fan__device_trace: writes a line about a stream, another one (NULL: none) and an event (0:
 * none). */
void fan__device_trace(fan_trace_kind kind, const fan_device *d, const fan_stream *s,
                       const fan_stream *other, uint64_t event, uint64_t bytes);
/* fan_job_trace: writes the job's line (KERNEL or COPY) to this thread's traces; begin_ns: when a
 * finished job began (base/trace.h), 0: unknown; times on the device's clock, < 0: unknown. */
void fan_job_trace(const fan_device *d, const fan_stream *s, const fan_job *job, uint64_t begin_ns,
                   double start_us, double end_us);
void fan_jobs_trace(const fan_device *d, const fan_stream *s, const fan_job *jobs, size_t n,
                    const char *label, double start_us, double end_us);

#endif
