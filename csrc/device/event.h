/* event: points in streams' queues, and waits for them.
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
#ifndef FAN_DEVICE_EVENT_H
#define FAN_DEVICE_EVENT_H

#include "device/stream.h"

struct fan_event {
    atomic_size_t refs;
    fan_device *device; /* held */
    fan_stream *stream; /* held; NULL: never recorded */
    uint64_t id;        /* of this use of it: a pooled event gets a new one */
    uint64_t count;     /* stream's count when its record was through; UINT64_MAX: cannot be told */
    fan_clock known;    /* what who waits for it will know; its own count is the one before the record */
    uint32_t recording; /* records under way */
    uint64_t records;   /* records begun */
    uint64_t capture;   /* the capture that its last record belongs to; 0: none */
    bool own;           /* of a user: goes with its last hold, for the next user's was never recorded */
    void *impl;
    fan_event *next; /* in the pool */
};

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
/* fan_sync_trace: a line of trace for backends: the host waited for a stream, or an event (the other is NULL). */
void fan_sync_trace(const fan_device *d, const fan_stream *s, const fan_event *e);

/* fan__event_note: an event for memory of `owner` alone, which leaves: where s is now. Not counted, not traced, and
 * without a hold on owner's own machine. NULL: it cannot be had now (K3: none on a stream that is captured: its event
 * could never be asked; what the graph uses is its backend's to keep, and the rest is waited for once the capture has
 * ended). fan__event_note_end: back into the pool. fan__event_passed: what it stands for has run. */
fan_event *fan__event_note(fan_device *owner, fan_stream *s);
void fan__event_note_end(fan_device *owner, fan_event *e);
bool fan__event_passed(fan_event *e);

/* fan__events_fini: frees the events of d, which are all in its pool. */
void fan__events_fini(fan_device *d);

#endif
