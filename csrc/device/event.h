/* event: points in the queues of streams, and waits for them.
 *
 * Title: Elision. A wait is left out, and counted, if the waiting stream already waits for what the event stands for.
 * Each stream has a lane; what a stream is known to wait for is a clock over lanes (`clock`), and an event carries the
 * clock of its stream at the record. Exception: a wait of the legacy default stream is never left out, because each
 * call that names that stream is a barrier between the blocking streams.
 *
 * Threads: no lock is held across a call of the backend, so two records on one stream may reach the backend in either
 * order. Therefore each record takes two tickets from its stream: `first` before the call of the backend, `last` after
 * it. A stream that waits for the event may assume `first`; a wait may be skipped only by a stream that already knows
 * `last`: then the record that it waited for began after this one had returned. A stream learns what an event carries
 * only once the backend has the wait. An event that is recorded again in the meantime teaches nothing, and its wait is
 * never left out. */
#ifndef FAN_DEVICE_EVENT_H
#define FAN_DEVICE_EVENT_H

#include "device/stream.h"

struct fan_event {
    atomic_size_t refs;
    fan_device *device; /* held */
    fan_stream *stream; /* held; NULL: never recorded */
    uint64_t id;        /* of this use of the event: a pooled event gets a new one each time */
    uint64_t count; /* `last` (Elision): the count of the stream when the record had returned; UINT64_MAX: unknown */
    /* The clock that a stream which waits for the event will know. Its own lane stands at `first` (Elision). */
    fan_clock clock;
    uint32_t recording; /* records under way */
    uint64_t records;   /* records begun */
    uint64_t capture;   /* the capture that its last record belongs to; 0: none */
    /* An event of a user, not of the pool: it is freed with its last hold, since the next user must get one that was
     * never recorded. */
    bool own;
    uint64_t noted;     /* the id of the stream that it is a note of (fan__event_note) */
    atomic_bool passed; /* of a note: it was seen to have passed */
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
/* fan_stream_follow: s waits for all that `other`, of the same device, has queued: a record and a wait in one, where
 * the caller knows that neither is captured (nobody is asked). */
fan_status fan_stream_follow(fan_stream *s, fan_stream *other, fan_error *err);
/* fan_event_covers: whether a stream that waits for `newer` need not wait for `e` as well: both were recorded on one
 * stream, and the record of `newer` began after that of `e` had returned. */
bool fan_event_covers(const fan_event *newer, const fan_event *e);
/* fan_sync_trace: a line of trace for backends: the host waited for a stream, or an event (the other is NULL). */
void fan_sync_trace(const fan_device *d, const fan_stream *s, const fan_event *e);

/* fan__event_note: an event that stands for where s is now, for memory of `owner` that is to be freed. It is neither
 * counted nor traced, and does not hold the machine of owner. NULL: there can be none now (K3: none on a stream that is
 * captured, since such an event can never be queried. What the graph uses is kept by the backend; the rest is waited
 * for once the capture has ended). fan__event_note_end: puts it back into the pool. fan__event_passed: whether what it
 * stands for has run. */
fan_event *fan__event_note(fan_device *owner, fan_stream *s);
void fan__event_note_end(fan_device *owner, fan_event *e);
bool fan__event_passed(fan_event *e);

/* fan__events_fini: frees the events of d, which are all in its pool. */
void fan__events_fini(fan_device *d);

#endif
