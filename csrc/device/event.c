/* Events: they are made or reused, recorded on streams, waited for; clocks show which waits can be
 * left out. Notes are events of freed memory. */
#include "device/event.h"

#include "base/mem.h"
#include "device/capture_rule.h"
#include "device/stream.h"

#include <assert.h>

static atomic_uint_fast64_t last_event;

/* event_make: makes an event that the backend has initialized, with one hold, and without one on
 * the device. */
static fan_status event_make(fan_device *d, bool pooled, fan_event **out, fan_error *err)
{
    fan_event *e = NULL;
    if (pooled) {
        fan__device_lock(d);
        e = d->pool;
        if (e)
            d->pool = e->next;
        fan__device_unlock(d);
    }
    if (!e) {
        e = fan_calloc(sizeof *e);
        if (!e)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
        e->device = d;
        e->own = !pooled;
        fan_clock_init(&e->clock);
        fan_yield();
        fan_status status = d->backend->event_init(e, err);
        if (status != FAN_OK) {
            fan_free(e);
            return status;
        }
    }
    atomic_init(&e->refs, 1);
    e->id = atomic_fetch_add(&last_event, 1) + 1;
    e->next = NULL;
    *out = e;
    return FAN_OK;
}

static void event_free_whole(fan_event *e)
{
    if (e->device->backend->event_fini)
        e->device->backend->event_fini(e);
    fan_clock_fini(&e->clock);
    fan_free(e);
}

/* event_to_pool: puts e into the pool of its device; keeps e's hold on the device. */
static void event_to_pool(fan_event *e)
{
    fan_device *d = e->device;
    e->clock.n = 0; /* keeps its memory */
    e->count = 0;
    fan__device_lock(d);
    e->next = d->pool;
    d->pool = e;
    fan__device_unlock(d);
}

/* event_ticket_begin: takes the ticket `first` of a record on s (event.h, Elision). `clock` becomes
 * the clock that a waiter of the event acquires. FAN_ERR_NOMEM. */
static fan_status event_ticket_begin(fan_stream *s, uint64_t *first, fan_clock *clock,
                                     fan_error *err)
{
    *first = UINT64_MAX;
    if (s->lane == FAN_NO_LANE)
        return FAN_OK;
    fan__device_lock(s->device);
    *first = ++s->count;
    bool failed = fan_clock_copy(clock, &s->clock) || fan_clock_set(clock, s->lane, *first);
    fan__device_unlock(s->device);
    if (failed)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
    return FAN_OK;
}

/* event_ticket_end: takes the ticket `last`. Only later records have a `first` as large, or this
 * one itself if no other record began in between. The device's lock is held. */
static uint64_t event_ticket_end(const fan_stream *s, uint64_t first)
{
    if (first == UINT64_MAX || first == s->count)
        return first;
    return s->count + 1;
}

/* event_was_recorded: counts a record, and writes its trace line. */
static void event_was_recorded(const fan_event *e, const fan_stream *s)
{
    atomic_fetch_add_explicit(&s->device->events, 1, memory_order_relaxed);
    fan__device_trace(FAN_TRACE_RECORD, s->device, s, NULL, e->id, 0);
}

/* event_record_pooled: makes a pooled event of ticket `first`, and records it on s; without a hold
 * on the device. */
static fan_status event_record_pooled(fan_stream *s, uint64_t *first, fan_event **out,
                                      fan_error *err)
{
    fan_device *d = s->device;
    FAN_TRY(event_make(d, true, out, err));
    fan_status status = event_ticket_begin(s, first, &(*out)->clock, err);
    if (status == FAN_OK) {
        fan_yield();
        status = d->backend->record(*out, s, err);
    }
    if (status == FAN_OK)
        event_was_recorded(*out, s);
    else
        event_to_pool(*out);
    return status;
}

fan_status fan_event_new(fan_device *d, fan_event **out, fan_error *err)
{
    *out = NULL;
    FAN_TRY(event_make(d, false, out, err));
    fan_device_hold(d);
    return FAN_OK;
}

fan_status fan_event_record(fan_stream *s, fan_event **out, fan_error *err)
{
    *out = NULL;
    fan_device *d = s->device;
    fan_event *e;
    uint64_t first;
    uint64_t capture;
    FAN_TRY(fan_stream_capture(s, &capture, err));
    FAN_TRY(event_record_pooled(s, &first, &e, err));
    fan_device_hold(d);
    e->stream = fan_stream_hold(s);
    e->capture = capture;
    fan__device_lock(d);
    e->count = event_ticket_end(s, first);
    fan__device_unlock(d);
    *out = e;
    return FAN_OK;
}

fan_status fan_event_rerecord(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_device *d = e->device;
    if (s->device != d) {
        char mine[24];
        char theirs[24];
        return fan_fail(err, FAN_ERR_VALUE, "an event of %s cannot be recorded on a stream of %s%s",
                        fan_device_text(d, mine, sizeof mine),
                        fan_device_text(s->device, theirs, sizeof theirs),
                        fan_device_of_another(s->device, d));
    }
    fan_clock clock;
    uint64_t first;
    uint64_t capture;
    FAN_TRY(fan_stream_capture(s, &capture, err));
    fan_clock_init(&clock);
    fan_status status = event_ticket_begin(s, &first, &clock, err);
    if (status != FAN_OK) {
        fan_clock_fini(&clock);
        return status;
    }
    fan__device_lock(d);
    bool alone = e->recording++ == 0;
    uint64_t number = ++e->records;
    fan__device_unlock(d);

    fan_yield();
    status = d->backend->record(e, s, err);

    fan_stream *old = NULL;
    fan__device_lock(d);
    e->recording--;
    if (status == FAN_OK) {
        old = e->stream;
        e->stream = fan_stream_hold(s);
        e->capture = capture;
        if (alone && number == e->records && s->lane != FAN_NO_LANE) {
            fan_clock was = e->clock;
            e->clock = clock;
            clock = was;
            e->count = event_ticket_end(s, first);
        } else { /* the order of concurrent records is unknown */
            e->clock.n = 0;
            e->count = UINT64_MAX;
        }
    }
    fan__device_unlock(d);
    fan_clock_fini(&clock);
    fan_stream_drop(old);
    if (status == FAN_OK)
        event_was_recorded(e, s);
    return status;
}

fan_stream *fan_event_stream(fan_event *e)
{
    fan_device *d = e->device;
    fan__device_lock(d);
    fan_stream *s = fan_stream_hold(e->stream);
    fan__device_unlock(d);
    return s;
}

fan_event *fan_event_hold(fan_event *e)
{
    if (e)
        atomic_fetch_add_explicit(&e->refs, 1, memory_order_relaxed);
    return e;
}

void fan_event_drop(fan_event *e)
{
    if (!e || atomic_fetch_sub_explicit(&e->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_device *d = e->device;
    fan_stream *s = e->stream;
    e->stream = NULL;
    if (e->own)
        event_free_whole(e);
    else
        event_to_pool(e);
    fan_stream_drop(s);
    fan_device_drop(d);
}

fan_status fan_event_query(fan_event *e, bool *done, fan_error *err)
{
    fan_yield();
    return e->device->backend->query(e, done, err);
}

fan_status fan_event_sync(fan_event *e, fan_error *err)
{
    fan_yield();
    return e->device->backend->event_sync(e, err);
}

bool fan_event_covers(const fan_event *newer, const fan_event *e)
{
    fan_device *d = e->device;
    if (newer->device != d)
        return false;
    fan__device_lock(d);
    bool same_stream = newer->stream && newer->stream == e->stream;
    bool recorded = newer->recording == 0 && e->recording == 0;
    bool covers = same_stream && recorded && newer->capture == e->capture;
    if (covers)
        covers = fan_clock_get(&newer->clock, e->stream->lane) >= e->count;
    fan__device_unlock(d);
    return covers;
}

void fan_sync_trace(const fan_device *d, const fan_stream *s, const fan_event *e)
{
    fan__device_trace(FAN_TRACE_SYNC, d, s, NULL, e ? e->id : 0, 0);
}

/* The clock that a stream acquires by a wait for an event, read before the wait. */
typedef struct event_clock {
    /* never: the event was not recorded so far */
    bool any;
    bool never;
    uint32_t lane;
    uint64_t count;
    uint64_t number;
    fan_clock clock;
} event_clock;

static void event_clock_read(const fan_event *e, event_clock *l)
{
    *l = (event_clock){.lane = FAN_NO_LANE};
    fan_clock_init(&l->clock);
    fan__device_lock(e->device);
    bool still = e->recording == 0;
    bool recorded = e->stream && still;
    /* The clock of a captured event is valid only inside its graph: a stream that joins a capture
     * is no longer ordered after its earlier work. */
    bool has_clock = e->count != UINT64_MAX && !e->capture;
    l->never = !e->stream && still;
    l->any = recorded && has_clock && fan_clock_copy(&l->clock, &e->clock) == 0;
    l->number = e->records;
    l->count = e->count;
    if (l->any)
        l->lane = e->stream->lane;
    fan__device_unlock(e->device);
}

/* event_across_captures: applies S7 to a wait of s for e before the driver is called. (The buffer
 * decides whether another stream replaces s.) */
static fan_status event_across_captures(fan_stream *s, fan_event *e, fan_error *err)
{
    uint64_t mine;
    uint64_t theirs;
    char waiting[24];
    char of[24];
    FAN_TRY(fan_stream_capture(s, &mine, err));
    fan__device_lock(e->device);
    theirs = e->capture;
    unsigned long long from = 0;
    if (e->stream)
        from = e->stream->handle;
    fan__device_unlock(e->device);
    if (fan_capture_rule(mine, theirs, false, s->handle == FAN_LEGACY) == FAN_CAPTURE_GO)
        return FAN_OK;
    (void)fan_device_text(s->device, waiting, sizeof waiting);
    (void)fan_device_text(e->device, of, sizeof of);
    if (!mine) {
        return fan_fail_code(err, FAN_ERR_CAPTURE, 906,
                             "the legacy default stream of %s cannot be pulled into the capture of "
                             "stream %llu of %s; make the stream "
                             "that is captured "
                             "the current one, or pass it as stream=, where the buffer is made and "
                             "taken from (CUDA's code 906)",
                             waiting, from, of);
    }
    int code = theirs ? 902 : 905;
    return fan_fail_code(
        err, FAN_ERR_CAPTURE, code,
        "stream %llu of %s is captured and cannot wait for stream %llu of %s, which is %s; fork "
        "that "
        "stream from the captured "
        "one before the work, or finish the work before the capture begins (CUDA's code %d)",
        (unsigned long long)s->handle, waiting, from, of, theirs ? "in another capture" : "in none",
        code);
}

fan_status fan_stream_wait(fan_stream *s, fan_event *e, bool *elided, fan_error *err)
{
    fan_device *d = s->device;
    if (elided)
        *elided = false;
    if (d->backend != e->device->backend) {
        char mine[24];
        char theirs[24];
        return fan_fail(err, FAN_ERR_TYPE, "a stream of %s cannot wait for an event of %s",
                        fan_device_text(d, mine, sizeof mine),
                        fan_device_text(e->device, theirs, sizeof theirs));
    }
    event_clock l;
    event_clock_read(e, &l);
    bool elide = false;
    if (l.any && s->handle != FAN_LEGACY) {
        fan__device_lock(d);
        /* waiting for itself needs no wait */
        elide = l.lane == s->lane || fan_clock_get(&s->clock, l.lane) >= l.count;
        fan__device_unlock(d);
    }
    if (elide) {
        fan_clock_fini(&l.clock);
        atomic_fetch_add_explicit(&d->elided, 1, memory_order_relaxed);
        if (d->backend->elided)
            d->backend->elided(s, e);
        if (elided)
            *elided = true;
        fan__device_trace(FAN_TRACE_ELIDED, d, s, NULL, e->id, 0);
        return FAN_OK;
    }
    fan_yield();
    fan_status status = FAN_OK;
    if (d->backend->capture && !l.never)
        status = event_across_captures(s, e, err);
    if (status == FAN_OK)
        status = d->backend->wait(s, e, err);
    if (status == FAN_OK && !l.never) {
        fan__device_lock(e->device);
        bool same = l.any && e->recording == 0 && e->records == l.number;
        fan__device_unlock(e->device);
        if (same) {
            fan__device_lock(s->device);
            /* out of memory: s's clock stays lower, so no later wait is left out because of it */
            (void)fan_clock_join(&s->clock, &l.clock);
            fan__device_unlock(s->device);
        }
        atomic_fetch_add_explicit(&d->waits, 1, memory_order_relaxed);
        if (fan_trace_on()) {
            fan__device_lock(e->device);
            fan_stream *on = fan_stream_hold(e->stream);
            fan__device_unlock(e->device);
            fan__device_trace(FAN_TRACE_WAIT, d, s, on, e->id, 0);
            fan_stream_drop(on);
        }
    }
    fan_clock_fini(&l.clock);
    return status;
}

fan_status fan_stream_follow(fan_stream *s, fan_stream *other, fan_error *err)
{
    fan_device *d = s->device;
    fan_event *e; /* private to this call: it needs no hold and no second check */
    uint64_t first;
    assert(other->device == d);
    FAN_TRY(event_record_pooled(other, &first, &e, err));
    e->capture = 0;
    fan_yield();
    fan_status status = d->backend->wait(s, e, err);
    if (status == FAN_OK) {
        fan__device_lock(d);
        if (first != UINT64_MAX) {
            /* out of memory: s's clock stays lower, which is safe */
            (void)fan_clock_join(&s->clock, &e->clock);
        }
        fan__device_unlock(d);
        atomic_fetch_add_explicit(&d->waits, 1, memory_order_relaxed);
        fan__device_trace(FAN_TRACE_WAIT, d, s, other, e->id, 0);
    }
    event_to_pool(e);
    return status;
}

void fan__events_fini(fan_device *d)
{
    while (d->pool) {
        fan_event *e = d->pool;
        d->pool = e->next;
        event_free_whole(e);
    }
}

static bool event_shares_machine(const fan_device *a, const fan_device *b)
{
    return a->holds == b->holds;
}

fan_event *fan__event_note(fan_device *owner, fan_stream *s)
{
    fan_event *e = NULL;
    uint64_t capture;
    if (fan_stream_capture(s, &capture, NULL) != FAN_OK)
        return NULL;
    if (capture)
        return NULL;
    if (event_make(s->device, true, &e, NULL) != FAN_OK)
        return NULL;
    fan_yield();
    const fan_backend *b = s->device->backend;
    fan_status status;
    if (b->note)
        status = b->note(e, s, NULL);
    else
        status = b->record(e, s, NULL);
    if (status != FAN_OK) {
        event_to_pool(e);
        return NULL;
    }
    e->capture = 0;
    e->noted = s->id;
    atomic_store_explicit(&e->passed, false, memory_order_relaxed);
    if (!event_shares_machine(owner, s->device))
        fan_device_hold(s->device);
    return e;
}

void fan__event_note_end(fan_device *owner, fan_event *e)
{
    fan_device *d = e->device;
    if (atomic_fetch_sub_explicit(&e->refs, 1, memory_order_acq_rel) > 1)
        return; /* shared with other memory */
    event_to_pool(e);
    if (!event_shares_machine(owner, d))
        fan_device_drop(d);
}

bool fan__event_passed(fan_event *e)
{
    const fan_backend *b = e->device->backend;
    /* Acquire: the memory is reused after this, and the thread whose query found that the event had
     * passed may be another one. It pairs with the release below. */
    bool done = atomic_load_explicit(&e->passed, memory_order_acquire);
    if (done)
        return true;
    if (b->peek)
        done = b->peek(e);
    else if (b->query(e, &done, NULL) != FAN_OK)
        done = false;
    if (done)
        atomic_store_explicit(&e->passed, true, memory_order_release);
    return done;
}
