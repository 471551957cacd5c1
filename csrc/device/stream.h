/* stream: streams as the rules see them, and which one is current on a thread.
 *
 * Title: Current streams. On a thread one stream of each device is current: the one that was pushed there last, else
 * the backend's own. A fan_stream_set is what was current at one moment, to be made so again elsewhere: the pushed
 * ones, one for each device; on all other devices the backend's own. NULL: none was pushed. It never changes, and many
 * hold it.
 */
#ifndef FAN_DEVICE_STREAM_H
#define FAN_DEVICE_STREAM_H

#include "base/clock.h"
#include "base/thread.h"
#include "device/device.h"

struct fan_stream {
    atomic_size_t refs;
    fan_device *device; /* held */
    uint64_t id;        /* never reused; identifies the stream to the rules */
    uint64_t handle;    /* the backend's number for it, as users know it */
    /* its lane in the clocks (Elision); FAN_NO_LANE: there are too many streams, and no wait of this one is left out */
    uint32_t lane;
    uint64_t count;  /* records begun on it; a stream that inherits a lane goes on counting */
    fan_clock clock; /* what it is known to wait for (Elision) */
    void *impl;      /* the backend's */
};

#define FAN_NO_LANE UINT32_MAX
#define FAN_LEGACY 1 /* the handle of the legacy default stream */

fan_stream *fan_stream_new(fan_device *d, uint64_t handle, void *impl); /* NULL when out of memory */
fan_stream *fan_stream_hold(fan_stream *s);                             /* every hold takes NULL and gives it back */
/* fan_stream_try_hold: NULL where its last hold has gone. For backends, which keep a stream's address until
 * stream_fini. */
fan_stream *fan_stream_try_hold(fan_stream *s);
void fan_stream_drop(fan_stream *s); /* NULL is fine */
/* fan_stream_current: the innermost stream pushed for `d` on this thread, else the backend's current; a hold. NULL for
 * devices without streams. */
fan_stream *fan_stream_current(fan_device *d);
/* fan_stream_pushed: the innermost stream pushed for `d` on this thread, a hold; NULL: none. */
fan_stream *fan_stream_pushed(fan_device *d);
/* fan_stream_push: makes s the current stream of its device on this thread (holds it); FAN_ERR_NOMEM. pop takes off the
 * innermost push of `s`. */
fan_status fan_stream_push(fan_stream *s, fan_error *err);
void fan_stream_pop(fan_stream *s);

typedef struct fan_stream_set {
    atomic_size_t refs;
    size_t n;          /* at least 1 */
    fan_stream *all[]; /* held; the one that was pushed last comes first */
} fan_stream_set;

/* fan_streams_in_use: whether any stream is pushed, on any thread, or any set is held: else nothing is current but the
 * backends' own. One load. */
extern atomic_size_t fan__streams_used;
static inline bool fan_streams_in_use(void)
{
    return atomic_load_explicit(&fan__streams_used, memory_order_relaxed) != 0;
}

/* fan_stream_set_now: what is current on this thread: a hold in *out; FAN_ERR_NOMEM. fan_stream_set_with: `set`, which
 * may be NULL, with `s` as the first and for its device. */
fan_status fan_stream_set_now(fan_stream_set **out, fan_error *err);
fan_status fan_stream_set_with(fan_stream_set *set, fan_stream *s, fan_stream_set **out, fan_error *err);
fan_stream_set *fan_stream_set_hold(fan_stream_set *set); /* takes NULL and gives it back */
void fan_stream_set_drop(fan_stream_set *set);            /* NULL is fine */
/* fan_stream_set_find: its stream of a device, borrowed; NULL: none. */
fan_stream *fan_stream_set_find(const fan_stream_set *set, const fan_device *d);

/* fan_streams_enter: a set, held by the caller meanwhile, becomes all that is current on this thread, until
 * fan_streams_leave, which takes off what was pushed since. They nest. */
typedef struct fan_streams_outer {
    struct fan_pushed_stream *pushed;
    fan_stream_set *set;
} fan_streams_outer;
void fan_streams_enter(fan_stream_set *set, fan_streams_outer *outer);
void fan_streams_leave(const fan_streams_outer *outer);

fan_status fan_stream_sync(fan_stream *s, fan_error *err);
/* fan_stream_capture: the capture that s is in; 0: none. */
fan_status fan_stream_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);

#endif
