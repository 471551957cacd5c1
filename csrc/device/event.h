/* event: points in the queues of streams, and waits for them.
 *
 * Title: Elision. A wait is left out, and counted, if the waiting stream already waits for the
 * event's record. Each stream has a lane; the records that a stream waits for are a clock over
 * lanes (`clock`), and an event carries the clock of its stream at the record. Exception: a wait of
 * the legacy default stream is never left out, because each call that names that stream is a
 * barrier between the blocking streams.
 *
 * Threads: no lock is held across a call of the backend, so two records on one stream may reach the
 * backend in either order. Therefore each record takes two tickets from its stream: `first` before
 * the call of the backend, `last` after it. A stream that waits for the event may assume `first`; a
 * wait may be left out only if the stream's clock already contains `last`: then the record that it
 * waited for began after this one had returned. A stream's clock acquires that of an event only
 * after the backend's wait. An event that is recorded again in the meantime adds nothing, and its
 * wait is never left out. */
#ifndef FAN_DEVICE_EVENT_H
#define FAN_DEVICE_EVENT_H

#include "device/stream.h"

struct fan_event {
    atomic_size_t refs;
    fan_device *device; /* held */
    fan_stream *stream; /* held; NULL: never recorded */
    uint64_t id;        /* of this use of the event: a pooled event gets a new one each time */
    /* `last` (Elision): the stream's count when the record returned; UINT64_MAX: unknown */
    uint64_t count;
    /* The clock that a waiter of the event acquires. Its own lane is at `first` (Elision). */
    fan_clock clock;
    uint32_t recording; /* records in progress */
    uint64_t records;   /* records begun */
    uint64_t capture;   /* the capture of its last record; 0: none */
    /* A user's event, not pooled: it is freed with its last hold, because the next user must get
     * one that was never recorded. */
    bool own;
    uint64_t noted;     /* the id of the stream that it is a note of (fan__event_note) */
    atomic_bool passed; /* of a note: it was found to have passed */
    void *impl;
    fan_event *next; /* in the pool */
};

/* fan_event_record: takes an event from the pool and records it on s; the caller owns the hold. */
fan_status fan_event_record(fan_stream *s, fan_event **out, fan_error *err);
/* fan_event_new: makes an event outside of the pool, which was never recorded. */
fan_status fan_event_new(fan_device *d, fan_event **out, fan_error *err);
/* fan_event_query: sets *done to whether the last record of e was reached, or there was none. */
fan_status fan_event_query(fan_event *e, bool *done, fan_error *err);
/* fan_event_sync: waits until the last record of e is reached. */
fan_status fan_event_sync(fan_event *e, fan_error *err);
/* fan_event_rerecord: records a user's event on a stream of its device. */
fan_status fan_event_rerecord(fan_event *e, fan_stream *s, fan_error *err);
/* fan_event_stream: returns a hold on the stream of its last record; NULL: never recorded. */
fan_stream *fan_event_stream(fan_event *e);
fan_event *fan_event_hold(fan_event *e);
/* fan_event_drop: e may be NULL; the last drop returns it to the pool, or frees one of
 * fan_event_new */
void fan_event_drop(fan_event *e);
/* fan_stream_wait: makes s wait for e, across devices of one backend (FAN_ERR_TYPE otherwise), and
 * by the table of S7 if one of them is captured (FAN_ERR_CAPTURE); *elided (may be NULL): it was
 * left out (Elision). */
fan_status fan_stream_wait(fan_stream *s, fan_event *e, bool *elided, fan_error *err);
/* fan_stream_follow: makes s wait for all that `other`, of the same device, has queued: a record
 * and a wait in one, for callers that have checked that neither is captured. */
fan_status fan_stream_follow(fan_stream *s, fan_stream *other, fan_error *err);
/* fan_event_covers: returns whether a stream that waits for `newer` need not wait for `e` as well:
 * both were recorded on one stream, and the record of `newer` began after that of `e` had
 * returned. */
bool fan_event_covers(const fan_event *newer, const fan_event *e);
/* fan_sync_trace: writes a trace line for a backend: the host waited for a stream, or an event (the
 * other is NULL). */
void fan_sync_trace(const fan_device *d, const fan_stream *s, const fan_event *e);

/* fan__event_note: returns an event at the current end of s, for memory of `owner` that is to be
 * freed. It is neither counted nor traced, and does not hold owner's machine. NULL: not possible
 * now (K3: s is captured, and such an event could never be queried. The backend keeps memory that
 * the graph uses; other memory is waited for after the capture). */
fan_event *fan__event_note(fan_device *owner, fan_stream *s);
/* fan__event_note_end: returns such an event to the pool. */
void fan__event_note_end(fan_device *owner, fan_event *e);
/* fan__event_passed: returns whether the record of e has been reached. */
bool fan__event_passed(fan_event *e);

/* fan__events_fini: frees the events of d, which are all in its pool. */
void fan__events_fini(fan_device *d);

#endif
