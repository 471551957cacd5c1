#define _POSIX_C_SOURCE 200809L
#include "device/device.h"

#include "base/mem.h"
#include "base/trace.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static atomic_uint_fast64_t last_device, last_stream, last_event;

static void lock(fan_device *d) { (void)pthread_mutex_lock(&d->lock); }

static void unlock(fan_device *d) { (void)pthread_mutex_unlock(&d->lock); }

/* ---- lanes of the elision clocks ---- */

/* A lane that a stream leaves goes to the next stream, which goes on counting: what others know of the lane stays true,
 * for it speaks of smaller numbers. The lowest free lane goes first, so that clocks stay short. */
#define LANES 1024
static pthread_mutex_t lanes_lock = PTHREAD_MUTEX_INITIALIZER;
static bool lane_taken[LANES];
static uint64_t lane_count[LANES];

static void lane_take(fan_stream *s)
{
    s->lane = FAN_NO_LANE;
    (void)pthread_mutex_lock(&lanes_lock);
    for (uint32_t i = 0; i < LANES; i++)
        if (!lane_taken[i]) {
            lane_taken[i] = true;
            s->lane = i;
            s->count = lane_count[i];
            break;
        }
    (void)pthread_mutex_unlock(&lanes_lock);
}

static void lane_give(fan_stream *s)
{
    if (s->lane == FAN_NO_LANE)
        return;
    (void)pthread_mutex_lock(&lanes_lock);
    lane_taken[s->lane] = false;
    lane_count[s->lane] = s->count;
    (void)pthread_mutex_unlock(&lanes_lock);
}

/* ---- forks ---- */

/* A child has its parent's locks, and not the threads that held them. So a fork waits until nobody holds one: nothing
 * is called under them, and none is taken under another. What the child inherited can be let go of. */
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t watching = PTHREAD_ONCE_INIT;
static fan_device *devices;

static void before_fork(void)
{
    (void)pthread_mutex_lock(&devices_lock);
    for (fan_device *d = devices; d; d = d->next)
        lock(d);
    (void)pthread_mutex_lock(&lanes_lock);
}

static void after_fork(void)
{
    (void)pthread_mutex_unlock(&lanes_lock);
    for (fan_device *d = devices; d; d = d->next)
        unlock(d);
    (void)pthread_mutex_unlock(&devices_lock);
}

static void watch_forks(void) { (void)pthread_atfork(before_fork, after_fork, after_fork); }

static void enlist(fan_device *d)
{
    (void)pthread_once(&watching, watch_forks);
    (void)pthread_mutex_lock(&devices_lock);
    d->next = devices;
    devices = d;
    (void)pthread_mutex_unlock(&devices_lock);
}

static void strike(fan_device *d)
{
    (void)pthread_mutex_lock(&devices_lock);
    for (fan_device **at = &devices; *at; at = &(*at)->next)
        if (*at == d) {
            *at = d->next;
            break;
        }
    (void)pthread_mutex_unlock(&devices_lock);
}

/* ---- devices ---- */

int fan_device_init(fan_device *d, const fan_backend *b, void *self, int index, atomic_size_t *holds)
{
    memset(d, 0, sizeof *d);
    if (pthread_mutex_init(&d->lock, NULL))
        return -1;
    atomic_init(&d->own, 0);
    d->holds = holds ? holds : &d->own;
    d->backend = b;
    d->self = self;
    d->index = index;
    d->id = atomic_fetch_add(&last_device, 1) + 1;
    d->leaving_end = &d->leaving;
    enlist(d);
    return 0;
}

fan_device *fan_device_new(const fan_backend *b, void *self, int index)
{
    fan_device *d = fan_alloc(sizeof *d);
    if (!d)
        return NULL;
    if (fan_device_init(d, b, self, index, NULL)) {
        fan_free(d);
        return NULL;
    }
    atomic_store(&d->own, 1);
    return d;
}

fan_device *fan_device_hold(fan_device *d)
{
    if (d && d != fan_cpu())
        atomic_fetch_add_explicit(d->holds, 1, memory_order_relaxed);
    return d;
}

void fan_device_drop(fan_device *d)
{
    if (!d || d == fan_cpu() || atomic_fetch_sub_explicit(d->holds, 1, memory_order_acq_rel) > 1)
        return;
    bool own = d->holds == &d->own;
    if (own)
        fan_device_clear(d);
    if (d->backend->device_fini)
        d->backend->device_fini(d);
    if (own)
        fan_free(d);
}

char *fan_device_text(const fan_device *d, char *buf, size_t size)
{
    if (d->backend->has_streams)
        snprintf(buf, size, "%s:%d", d->backend->name, d->index);
    else
        snprintf(buf, size, "%s", d->backend->name);
    return buf;
}

/* ---- traces ---- */

static void trace(fan_trace_kind kind, const fan_device *d, const fan_stream *s, const fan_stream *other,
                  const fan_event *e, uint64_t bytes)
{
    if (!fan_trace_on())
        return;
    fan_trace_line line = {.kind = (uint8_t)kind,
                           .device = (int16_t)d->index,
                           .slot = -1,
                           .key = -1,
                           .stream = s ? s->handle : 0,
                           .other = other ? other->handle : 0,
                           .event = e ? e->id : 0,
                           .bytes = bytes,
                           .start_us = -1,
                           .end_us = -1};
    if (other) {
        char text[24];
        snprintf(line.label, sizeof line.label, "stream %llu of %s", (unsigned long long)other->handle,
                 fan_device_text(other->device, text, sizeof text));
    }
    fan_trace_put(&line);
}

void fan_sync_trace(const fan_device *d, const fan_stream *s, const fan_event *e)
{
    trace(FAN_TRACE_SYNC, d, s, NULL, e, 0);
}

/* ---- streams ---- */

fan_stream *fan_stream_new(fan_device *d, uint64_t handle, void *impl)
{
    fan_stream *s = fan_calloc(sizeof *s);
    if (!s)
        return NULL;
    atomic_init(&s->refs, 1);
    s->device = fan_device_hold(d);
    s->id = atomic_fetch_add(&last_stream, 1) + 1;
    s->handle = handle;
    s->impl = impl;
    fan_clock_init(&s->known);
    lane_take(s);
    return s;
}

fan_stream *fan_stream_hold(fan_stream *s)
{
    if (s)
        atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

fan_stream *fan_stream_try_hold(fan_stream *s)
{
    size_t refs = atomic_load_explicit(&s->refs, memory_order_relaxed);
    while (refs)
        if (atomic_compare_exchange_weak_explicit(&s->refs, &refs, refs + 1, memory_order_relaxed,
                                                  memory_order_relaxed))
            return s;
    return NULL;
}

void fan_stream_drop(fan_stream *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_device *d = s->device;
    if (d->backend->stream_fini)
        d->backend->stream_fini(s);
    lane_give(s);
    fan_clock_fini(&s->known);
    fan_free(s);
    fan_device_drop(d);
}

typedef struct pushed {
    struct pushed *outer;
    fan_stream *stream;
} pushed;

static _Thread_local pushed *innermost;

fan_stream *fan_stream_pushed(fan_device *d)
{
    for (const pushed *p = innermost; p; p = p->outer)
        if (p->stream->device == d)
            return fan_stream_hold(p->stream);
    return NULL;
}

fan_stream *fan_stream_current(fan_device *d)
{
    if (!d->backend->has_streams)
        return NULL;
    fan_stream *s = fan_stream_pushed(d);
    return s ? s : d->backend->current(d);
}

fan_status fan_stream_push(fan_stream *s, fan_error *err)
{
    pushed *p = fan_alloc(sizeof *p);
    if (!p)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a current stream");
    p->stream = fan_stream_hold(s);
    p->outer = innermost;
    innermost = p;
    return FAN_OK;
}

void fan_stream_pop(fan_stream *s)
{
    for (pushed **at = &innermost; *at; at = &(*at)->outer) {
        pushed *p = *at;
        if (p->stream != s)
            continue;
        *at = p->outer;
        fan_free(p);
        fan_stream_drop(s);
        return;
    }
}

fan_status fan_stream_sync(fan_stream *s, fan_error *err)
{
    fan_yield();
    return s->device->backend->sync(s, err);
}

fan_status fan_stream_capture(fan_stream *s, uint64_t *id, fan_error *err)
{
    const fan_backend *b = s->device->backend;
    *id = 0;
    return b->capture ? b->capture(s, id, err) : FAN_OK;
}

/* ---- events ---- */

/* event_make: an event that the backend knows, with one hold and no device's. */
static fan_status event_make(fan_device *d, bool pooled, fan_event **out, fan_error *err)
{
    fan_event *e = NULL;
    if (pooled) {
        lock(d);
        e = d->pool;
        if (e)
            d->pool = e->next;
        unlock(d);
    }
    if (!e) {
        e = fan_calloc(sizeof *e);
        if (!e)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
        e->device = d;
        e->own = !pooled;
        fan_clock_init(&e->known);
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

static void event_free(fan_event *e)
{
    if (e->device->backend->event_fini)
        e->device->backend->event_fini(e);
    fan_clock_fini(&e->known);
    fan_free(e);
}

/* event_keep: into the pool of its device; its own hold on that is not touched. */
static void event_keep(fan_event *e)
{
    fan_device *d = e->device;
    e->known.n = 0; /* its room stays */
    e->count = 0;
    lock(d);
    e->next = d->pool;
    d->pool = e;
    unlock(d);
}

/* draw_first: the number of a record before it. Afterwards `known` is what who waits for it will know. FAN_ERR_NOMEM.
 */
static fan_status draw_first(fan_stream *s, uint64_t *first, fan_clock *known)
{
    *first = UINT64_MAX;
    if (s->lane == FAN_NO_LANE)
        return FAN_OK;
    lock(s->device);
    *first = ++s->count;
    bool failed = fan_clock_copy(known, &s->known) || fan_clock_set(known, s->lane, *first);
    unlock(s->device);
    return failed ? FAN_ERR_NOMEM : FAN_OK;
}

/* draw_last: its number after it: only records begun from now on have as large a first number, but for its own where
 * nobody came between. The device's lock is held. */
static uint64_t draw_last(const fan_stream *s, uint64_t first)
{
    return first == UINT64_MAX || first == s->count ? first : s->count + 1;
}

fan_status fan_event_new(fan_device *d, fan_event **out, fan_error *err)
{
    *out = NULL;
    fan_event *e = NULL;
    FAN_TRY(event_make(d, false, &e, err));
    fan_device_hold(d);
    *out = e;
    return FAN_OK;
}

fan_status fan_event_record(fan_stream *s, fan_event **out, fan_error *err)
{
    *out = NULL;
    fan_device *d = s->device;
    fan_event *e = NULL;
    FAN_TRY(event_make(d, true, &e, err));
    fan_status status = fan_stream_capture(s, &e->capture, err);
    uint64_t first = 0;
    if (status == FAN_OK && draw_first(s, &first, &e->known) != FAN_OK)
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
    if (status == FAN_OK) {
        fan_yield();
        status = d->backend->record(e, s, err);
    }
    if (status != FAN_OK) {
        event_keep(e);
        return status;
    }
    e->device = fan_device_hold(d);
    e->stream = fan_stream_hold(s);
    lock(d);
    e->count = draw_last(s, first);
    unlock(d);
    atomic_fetch_add_explicit(&d->events, 1, memory_order_relaxed);
    trace(FAN_TRACE_RECORD, d, s, NULL, e, 0);
    *out = e;
    return FAN_OK;
}

fan_status fan_event_rerecord(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_device *d = e->device;
    if (s->device != d) {
        char mine[24], theirs[24];
        return fan_fail(err, FAN_ERR_VALUE, "an event of %s cannot be recorded on a stream of %s",
                        fan_device_text(d, mine, sizeof mine), fan_device_text(s->device, theirs, sizeof theirs));
    }
    fan_clock known;
    uint64_t first, capture;
    FAN_TRY(fan_stream_capture(s, &capture, err));
    fan_clock_init(&known);
    if (draw_first(s, &first, &known) != FAN_OK) {
        fan_clock_fini(&known);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
    }
    lock(d);
    bool alone = e->recording++ == 0;
    uint64_t turn = ++e->turns;
    unlock(d);

    fan_yield();
    fan_status status = d->backend->record(e, s, err);

    fan_stream *old = NULL;
    lock(d);
    e->recording--;
    if (status == FAN_OK) {
        old = e->stream;
        e->stream = fan_stream_hold(s);
        e->capture = capture;
        if (alone && turn == e->turns && s->lane != FAN_NO_LANE) {
            fan_clock was = e->known;
            e->known = known;
            known = was;
            e->count = draw_last(s, first);
        } else { /* which of several records came last is not known */
            e->known.n = 0;
            e->count = UINT64_MAX;
        }
    }
    unlock(d);
    fan_clock_fini(&known);
    fan_stream_drop(old);
    if (status != FAN_OK)
        return status;
    atomic_fetch_add_explicit(&d->events, 1, memory_order_relaxed);
    trace(FAN_TRACE_RECORD, d, s, NULL, e, 0);
    return FAN_OK;
}

fan_stream *fan_event_stream(fan_event *e)
{
    fan_device *d = e->device;
    lock(d);
    fan_stream *s = fan_stream_hold(e->stream);
    unlock(d);
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
        event_free(e);
    else
        event_keep(e);
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

bool fan_event_covers(const fan_event *later, const fan_event *e)
{
    fan_device *d = e->device;
    if (later->device != d)
        return false;
    lock(d);
    bool covers = later->stream && later->stream == e->stream && later->recording == 0 && e->recording == 0 &&
                  later->capture == e->capture && fan_clock_get(&later->known, e->stream->lane) >= e->count;
    unlock(d);
    return covers;
}

/* What a wait for an event teaches, taken before the wait. */
typedef struct lesson {
    bool any, never; /* never: it was not recorded so far */
    uint32_t lane;
    uint64_t count, turn;
    fan_clock known;
} lesson;

static void lesson_take(lesson *l, fan_event *e)
{
    fan_clock_init(&l->known);
    lock(e->device);
    l->never = !e->stream && e->recording == 0;
    /* What a captured event teaches holds inside its graph alone: a stream that is pulled into a capture leaves what it
     * had queued before behind. */
    l->any = e->stream && e->recording == 0 && e->count != UINT64_MAX && !e->capture &&
             fan_clock_copy(&l->known, &e->known) == 0;
    l->turn = e->turns;
    l->count = e->count;
    l->lane = l->any ? e->stream->lane : FAN_NO_LANE;
    unlock(e->device);
}

/* lesson_learn: once the backend has the wait; nothing where the event was re-recorded meanwhile. */
static void lesson_learn(lesson *l, fan_event *e, fan_stream *s)
{
    lock(e->device);
    bool same = l->any && e->recording == 0 && e->turns == l->turn;
    unlock(e->device);
    if (same) {
        lock(s->device);
        (void)fan_clock_join(&s->known, &l->known); /* for want of memory: nothing learnt, nothing left out later */
        unlock(s->device);
    }
}

/* across_captures: S7 for a wait of s for e, before the driver hears of it. The slot's redirection is the buffer's. */
static fan_status across_captures(fan_stream *s, fan_event *e, fan_error *err)
{
    uint64_t mine, theirs;
    char waiting[24], of[24];
    FAN_TRY(fan_stream_capture(s, &mine, err));
    lock(e->device);
    theirs = e->capture;
    unsigned long long from = e->stream ? (unsigned long long)e->stream->handle : 0;
    unlock(e->device);
    if (fan_capture_rule(mine, theirs, false, s->handle == FAN_LEGACY) == FAN_CAPTURE_GO)
        return FAN_OK;
    (void)fan_device_text(s->device, waiting, sizeof waiting);
    (void)fan_device_text(e->device, of, sizeof of);
    if (!mine)
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, 906,
            "the legacy default stream of %s cannot be pulled into the capture of stream %llu of %s; make the stream "
            "that is captured "
            "the current one, or pass it as stream=, where the buffer is made and taken from (CUDA's code 906)",
            waiting, from, of);
    return fan_fail_code(err, FAN_ERR_CAPTURE, theirs ? 902 : 905,
                         "stream %llu of %s is captured and cannot wait for stream %llu of %s, which is %s; fork that "
                         "stream from the captured "
                         "one before the work, or finish the work before the capture begins (CUDA's code %d)",
                         (unsigned long long)s->handle, waiting, from, of, theirs ? "in another capture" : "in none",
                         theirs ? 902 : 905);
}

fan_status fan_stream_wait(fan_stream *s, fan_event *e, bool *elided, fan_error *err)
{
    fan_device *d = s->device;
    if (elided)
        *elided = false;
    if (d->backend != e->device->backend) {
        char mine[24], theirs[24];
        return fan_fail(err, FAN_ERR_TYPE, "a stream of %s cannot wait for an event of %s",
                        fan_device_text(d, mine, sizeof mine), fan_device_text(e->device, theirs, sizeof theirs));
    }
    lesson l;
    lesson_take(&l, e);
    bool known = false;
    if (l.any && s->handle != FAN_LEGACY) {
        lock(d);
        known = l.lane == s->lane || fan_clock_get(&s->known, l.lane) >= l.count; /* a stream never waits for itself */
        unlock(d);
    }
    if (known) {
        fan_clock_fini(&l.known);
        atomic_fetch_add_explicit(&d->elided, 1, memory_order_relaxed);
        if (d->backend->elided)
            d->backend->elided(s, e);
        if (elided)
            *elided = true;
        trace(FAN_TRACE_ELIDED, d, s, NULL, e, 0);
        return FAN_OK;
    }
    fan_yield();
    fan_status status = d->backend->capture && !l.never ? across_captures(s, e, err) : FAN_OK;
    if (status == FAN_OK)
        status = d->backend->wait(s, e, err);
    if (status == FAN_OK && !l.never) {
        lesson_learn(&l, e, s);
        atomic_fetch_add_explicit(&d->waits, 1, memory_order_relaxed);
        if (fan_trace_on()) {
            lock(e->device);
            fan_stream *on = e->stream ? fan_stream_hold(e->stream) : NULL;
            unlock(e->device);
            trace(FAN_TRACE_WAIT, d, s, on, e, 0);
            fan_stream_drop(on);
        }
    }
    fan_clock_fini(&l.known);
    return status;
}

/* ---- memory ---- */

#define USERS 4

typedef struct fan_memory fan_memory;

/* Device memory. streams[0] is its owner (NULL: none), the others used it. Once it is leaving, events[i] stands for
 * what streams[i] had queued at its last use, and streams[i] is let go; a stream without event could not be recorded
 * yet, and a later record is as good. */
struct fan_memory {
    fan_memory *next;   /* among the leaving ones */
    fan_device *device; /* held; not while leaving: the device's list would hold the device */
    void *data;
    size_t bytes;
    void (*release)(void *ctx); /* another allocator's memory goes back so; NULL: the device's own */
    void *ctx;
    bool lost;     /* leaving, and what must pass is not known any more: it stays until its device goes */
    size_t n, cap; /* of streams, the owner's place counted */
    fan_stream **streams;
    fan_event **events;
    fan_stream *few_streams[USERS];
    fan_event *few_events[USERS];
};

static bool shares(const fan_device *a, const fan_device *b) { return a->holds == b->holds; }

/* quiet_record: an event for `m` alone: not counted, not traced, and without a hold on m's own machine. K3: none on a
 * stream that is captured: its event could never be asked; what the graph uses is its backend's to keep, and the rest
 * is waited for once the capture has ended. */
static fan_event *quiet_record(fan_memory *m, fan_stream *s)
{
    fan_event *e = NULL;
    uint64_t capture;
    if (fan_stream_capture(s, &capture, NULL) != FAN_OK || capture)
        return NULL;
    if (event_make(s->device, true, &e, NULL) != FAN_OK)
        return NULL;
    fan_yield();
    const fan_backend *b = s->device->backend;
    if ((b->note ? b->note : b->record)(e, s, NULL) != FAN_OK) {
        event_keep(e);
        return NULL;
    }
    e->capture = 0;
    if (!shares(m->device, s->device))
        fan_device_hold(s->device);
    return e;
}

static void quiet_keep(fan_memory *m, fan_event *e)
{
    fan_device *d = e->device;
    event_keep(e);
    if (!shares(m->device, d))
        fan_device_drop(d);
}

/* record_uses: an event on every stream that used leaving memory. Those that cannot be recorded now are tried again
 * later. */
static void record_uses(fan_memory *m)
{
    for (size_t i = 0; i < m->n; i++) {
        fan_stream *s = m->streams[i];
        if (!s)
            continue;
        bool lost = s->device->backend->lost && s->device->backend->lost(s->device);
        m->events[i] = lost ? NULL : quiet_record(m, s);
        if (!m->events[i] && !lost)
            continue;
        m->streams[i] = NULL;
        fan_stream_drop(s);
    }
}

static bool event_passed(fan_event *e)
{
    const fan_backend *b = e->device->backend;
    bool done = false;
    if (b->peek)
        return b->peek(e);
    return b->query(e, &done, NULL) == FAN_OK && done;
}

/* passed: whether all that used leaving memory has run. */
static bool passed(fan_memory *m)
{
    if (m->lost)
        return false;
    for (size_t i = 0; i < m->n; i++) {
        if (m->streams[i])
            return false;
        if (!m->events[i])
            continue;
        if (!event_passed(m->events[i]))
            return false;
        quiet_keep(m, m->events[i]);
        m->events[i] = NULL;
    }
    return true;
}

static void memory_free(fan_memory *m)
{
    fan_device *d = m->device;
    if (m->release) {
        m->release(m->ctx);
    } else {
        trace(FAN_TRACE_FREE, d, NULL, NULL, NULL, m->bytes);
        d->backend->free(d, m->data, m->bytes);
    }
    if (m->streams != m->few_streams)
        fan_free(m->streams);
    fan_free(m);
}

/* poll: gives back what has passed; looks at all that leaves, or at the oldest until `most` had not passed. The caller
 * holds the device. */
static void poll(fan_device *d, size_t most)
{
    lock(d);
    fan_memory *list = d->leaving;
    d->leaving = NULL;
    d->leaving_end = &d->leaving;
    unlock(d);
    fan_memory *stay = NULL, **end = &stay;
    while (list && most > 0) {
        fan_memory *m = list;
        list = m->next;
        m->next = NULL;
        record_uses(m);
        if (passed(m)) {
            memory_free(m);
        } else {
            *end = m;
            end = &m->next;
            most--;
        }
    }
    /* Those not looked at come first next time, then those just looked at, then what began to leave meanwhile. */
    fan_memory **last = &list;
    while (*last)
        last = &(*last)->next;
    *last = stay;
    if (stay)
        last = end;
    if (!list)
        return;
    lock(d);
    *last = d->leaving;
    if (!d->leaving)
        d->leaving_end = last;
    d->leaving = list;
    unlock(d);
}

#define GLANCE 16

void fan_device_poll(fan_device *d) { poll(d, SIZE_MAX); }

static void leave(fan_memory *m)
{
    fan_device *d = m->device;
    m->next = NULL;
    lock(d);
    *d->leaving_end = m;
    d->leaving_end = &m->next;
    unlock(d);
}

void fan_device_flush(fan_device *d)
{
    lock(d);
    fan_memory *list = d->leaving;
    d->leaving = NULL;
    d->leaving_end = &d->leaving;
    unlock(d);
    while (list) {
        fan_memory *m = list;
        list = m->next;
        for (size_t i = 0; i < m->n; i++) {
            if (m->events[i]) {
                (void)m->events[i]->device->backend->event_sync(m->events[i], NULL);
                quiet_keep(m, m->events[i]);
            } else if (m->streams[i]) {
                (void)m->streams[i]->device->backend->sync(m->streams[i], NULL);
                fan_stream_drop(m->streams[i]);
            }
        }
        memory_free(m);
    }
}

void fan_device_orphan(fan_device *d)
{
    lock(d);
    fan_memory *list = d->leaving;
    d->leaving = NULL;
    d->leaving_end = &d->leaving;
    unlock(d);
    while (list) {
        fan_memory *m = list;
        list = m->next;
        record_uses(m);
        for (size_t i = 0; i < m->n; i++) {
            m->lost |= m->streams[i] != NULL;
            fan_stream_drop(m->streams[i]);
            m->streams[i] = NULL;
        }
        leave(m);
    }
}

void fan_device_clear(fan_device *d)
{
    fan_device_flush(d);
    while (d->pool) {
        fan_event *e = d->pool;
        d->pool = e->next;
        event_free(e);
    }
    strike(d);
    (void)pthread_mutex_destroy(&d->lock);
}

/* captured: one of the streams is in a capture: then nothing is asked on account of the memory (K2). */
static bool captured(fan_stream *const *streams, size_t n)
{
    uint64_t id = 0;
    for (size_t i = 0; i < n && !id; i++)
        if (streams[i] && fan_stream_capture(streams[i], &id, NULL) != FAN_OK)
            id = 0;
    return id != 0;
}

/* memory_release: the last hold went. Nothing here allocates for the memory itself, so nothing is lost where memory is
 * short. */
static void memory_release(fan_storage *st)
{
    fan_memory *m = st->ctx;
    fan_device *d = m->device;
    size_t skip = m->streams[0] ? 0 : 1; /* no owner */
    if (d->backend->dropped && !m->release)
        d->backend->dropped(d, m->data, m->bytes, m->streams + skip, m->n - skip);
    if (captured(m->streams, m->n)) {
        leave(m);
        fan_device_drop(d);
        return;
    }
    record_uses(m);
    if (passed(m)) {
        memory_free(m);
    } else {
        leave(m);
    }
    poll(d, GLANCE);
    fan_device_drop(d);
}

static bool leaves(fan_device *d)
{
    lock(d);
    bool some = d->leaving != NULL;
    unlock(d);
    return some;
}

/* await_uses: blocks until all that used leaving memory has run; false where a stream cannot be waited for (it is
 * captured, or gone). */
static bool await_uses(fan_memory *m)
{
    record_uses(m);
    for (size_t i = 0; i < m->n; i++) {
        fan_stream *s = m->streams[i];
        if (m->events[i] && m->events[i]->device->backend->event_sync(m->events[i], NULL) != FAN_OK)
            return false;
        if (!s)
            continue;
        if (s->device->backend->sync(s, NULL) != FAN_OK) /* it cannot be recorded, so it is waited for as a whole */
            return false;
        m->streams[i] = NULL;
        fan_stream_drop(s);
    }
    return passed(m);
}

/* reclaim: waits for the memory that leaves longest, of that which can be waited for, and gives it back; false: there
 * is none. */
static bool reclaim(fan_device *d)
{
    size_t n = 0;
    lock(d);
    for (const fan_memory *m = d->leaving; m; m = m->next)
        n++;
    unlock(d);
    for (; n > 0; n--) {
        lock(d);
        fan_memory *m = d->leaving;
        if (m) {
            d->leaving = m->next;
            if (!d->leaving)
                d->leaving_end = &d->leaving;
        }
        unlock(d);
        if (!m)
            return false;
        if (await_uses(m)) {
            memory_free(m);
            return true;
        }
        leave(m);
    }
    return false;
}

fan_status fan_memory_new(fan_device *d, fan_stream *owner, size_t bytes, fan_storage **out, fan_error *err)
{
    *out = NULL;
    if (!d->backend->has_streams) {
        *out = fan_storage_new(bytes);
        return *out ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s", bytes, FAN_PLURAL(bytes));
    }
    fan_memory *m = fan_calloc(sizeof *m);
    fan_storage *st = m ? fan_storage_wrap(NULL, bytes, memory_release, m) : NULL;
    if (!st) {
        fan_free(m);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s on a device", bytes, FAN_PLURAL(bytes));
    }
    m->device = d;
    m->bytes = bytes ? bytes : 1; /* empty memory has an address of its own */
    m->streams = m->few_streams;
    m->events = m->few_events;
    m->cap = USERS;
    m->n = 1;
    bool capture = captured(&owner, 1); /* K2: then nothing is asked or waited for */
    if (!capture)
        poll(d, GLANCE);
    fan_yield();
    fan_status status = d->backend->alloc(d, owner, m->bytes, &m->data, err);
    for (bool wait = false; status == FAN_ERR_DEVICE_NOMEM && !capture && leaves(d);
         wait = true) { /* it may have passed; else the oldest is waited for, and the next .. */
        if (wait && !reclaim(d))
            break;
        poll(d, SIZE_MAX);
        status = d->backend->alloc(d, owner, m->bytes, &m->data, err);
    }
    if (status != FAN_OK) {
        st->release = NULL;
        fan_storage_drop(st);
        fan_free(m);
        return status;
    }
    fan_device_hold(d);
    m->streams[0] = owner ? fan_stream_hold(owner) : NULL;
    st->data = m->data;
    *out = st;
    return FAN_OK;
}

static fan_memory *memory_of(const fan_storage *st) { return st && st->release == memory_release ? st->ctx : NULL; }

fan_status fan_memory_wrap(fan_device *d, void *data, void (*release)(void *ctx), void *ctx, fan_storage **out,
                           fan_error *err)
{
    fan_memory *m = fan_calloc(sizeof *m);
    *out = m ? fan_storage_wrap(data, 0, memory_release, m) : NULL;
    if (!*out) {
        fan_free(m);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the books of an array's memory");
    }
    m->device = fan_device_hold(d);
    m->data = data;
    m->release = release;
    m->ctx = ctx;
    m->streams = m->few_streams;
    m->events = m->few_events;
    m->cap = USERS;
    m->n = 1; /* the owner's place */
    return FAN_OK;
}

void *fan_memory_wrapped(const fan_storage *st, void (*release)(void *ctx))
{
    const fan_memory *m = memory_of(st);
    return m && m->release == release ? m->ctx : NULL;
}

/* widen: room for one more user. The device's lock is held. */
static int widen(fan_memory *m)
{
    if (m->n < m->cap)
        return 0;
    size_t cap = 2 * m->cap;
    fan_stream **streams = fan_calloc(cap * (sizeof *streams + sizeof(fan_event *)));
    if (!streams)
        return -1;
    memcpy(streams, m->streams, m->n * sizeof *streams);
    if (m->streams != m->few_streams)
        fan_free(m->streams);
    m->streams = streams;
    m->events = (fan_event **)(void *)(streams + cap);
    m->cap = cap;
    return 0;
}

fan_status fan_memory_record_stream(fan_storage *st, fan_stream *s, fan_error *err)
{
    fan_memory *m = memory_of(st);
    if (!m || !s)
        return FAN_OK;
    bool added = false, failed = false;
    lock(m->device);
    size_t i = 0;
    while (i < m->n && m->streams[i] != s)
        i++;
    if (i == m->n) {
        failed = widen(m) != 0;
        if (!failed) {
            m->streams[m->n++] = fan_stream_hold(s);
            added = true;
        }
    }
    unlock(m->device);
    if (failed)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream that uses %zu byte%s", m->bytes,
                        FAN_PLURAL(m->bytes));
    if (added)
        trace(FAN_TRACE_MARK, m->device, s, NULL, NULL, m->bytes);
    return FAN_OK;
}

size_t fan_memory_users(fan_storage *st, fan_stream **out, size_t cap)
{
    fan_memory *m = memory_of(st);
    if (!m)
        return 0;
    lock(m->device);
    size_t skip = m->streams[0] ? 0 : 1, n = m->n - skip;
    for (size_t i = 0; i < n && i < cap; i++)
        out[i] = m->streams[skip + i];
    unlock(m->device);
    return n;
}

fan_stream *fan_memory_user(fan_storage *st, size_t i)
{
    fan_memory *m = memory_of(st);
    if (!m)
        return NULL;
    lock(m->device);
    i += m->streams[0] ? 0 : 1;
    fan_stream *s = i < m->n ? fan_stream_hold(m->streams[i]) : NULL;
    unlock(m->device);
    return s;
}

void fan_memory_set_stream(fan_storage *st, fan_stream *owner)
{
    fan_memory *m = memory_of(st);
    if (!m || !owner)
        return;
    lock(m->device);
    if (!m->streams[0]) {
        size_t i = 1;
        while (i < m->n && m->streams[i] != owner)
            i++;
        if (i < m->n) /* it used it already: its hold moves */
            m->streams[i] = m->streams[--m->n];
        else
            fan_stream_hold(owner);
        m->streams[0] = owner;
    }
    unlock(m->device);
}

fan_device *fan_memory_device(fan_storage *st)
{
    const fan_memory *m = memory_of(st);
    return m ? m->device : fan_cpu();
}

fan_status fan_device_array(fan_device *d, fan_stream *owner, fan_dtype dtype, int ndim, const int64_t *shape,
                            const fan_array *like, fan_array **out, fan_error *err)
{
    *out = NULL;
    if (!d->backend->has_streams)
        return fan_array_new(dtype, ndim, shape, like, out, err);
    int64_t size, strides[FAN_MAX_NDIM];
    size_t item = fan_dtype_size(dtype);
    FAN_TRY(fan_shape_check(ndim, shape, item, &size, err));
    fan_dense_strides(ndim, shape, item, like, strides);
    fan_storage *st;
    FAN_TRY(fan_memory_new(d, owner, (size_t)size * item, &st, err));
    fan_status status = fan_array_view(st, st->data, dtype, ndim, shape, strides, true, out, err);
    fan_storage_drop(st);
    return status;
}

/* ---- work ---- */

fan_status fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    fan_yield();
    return d->backend->run(d, s, job, err);
}

fan_status fan_stats_out_new(fan_device *d, fan_stream *owner, int64_t size, fan_array **words, fan_error *err)
{
    int64_t n = FAN_TOLD_WORDS + FAN_TOLD_ROW_WORDS * fan_stats_partials(size);
    return fan_device_array(d, owner, FAN_DT_UINT64, 1, &n, NULL, words, err);
}

fan_status fan_stats_out_read(fan_stream *s, const fan_array *words, fan_device_stats *out, fan_error *err)
{
    int64_t n = FAN_TOLD_WORDS, step = (int64_t)fan_dtype_size(FAN_DT_UINT64);
    fan_array host = {.data = (char *)out,
                      .dtype = FAN_DT_UINT64,
                      .ndim = 1,
                      .size = n,
                      .shape = &n,
                      .strides = &step,
                      .writable = true};
    fan_array *head;
    FAN_TRY(fan_array_slice(words, 0, 0, n, &head, err));
    fan_yield();
    fan_status status = s->device->backend->read(s, &host, head, err);
    fan_array_drop(head);
    return status;
}

/* to_host: a part of sparse data on the host, in the order of s. NULL stays NULL. */
static fan_status to_host(fan_device *d, fan_stream *s, const fan_array *part, fan_array **out, fan_error *err)
{
    *out = NULL;
    if (!part)
        return FAN_OK;
    fan_array *host;
    FAN_TRY(fan_array_new(part->dtype, part->ndim, part->shape, part, &host, err));
    fan_yield();
    fan_status status = d->backend->read(s, host, part, err);
    if (status != FAN_OK) {
        fan_array_drop(host);
        return status;
    }
    *out = host;
    return FAN_OK;
}

static fan_status to_device(fan_device *d, fan_stream *s, const fan_array *part, fan_array **out, fan_error *err)
{
    *out = NULL;
    if (!part)
        return FAN_OK;
    fan_array *on = NULL;
    FAN_TRY(fan_device_array(d, s, part->dtype, part->ndim, part->shape, part, &on, err));
    fan_operand from = {.array = part, .acc = part->dtype};
    fan_status status = fan_device_run(
        d, s, &(fan_job){.kind = FAN_JOB_UPLOAD, .out = on, .in = &from, .n = 1, .label = "upload"}, err);
    if (status != FAN_OK) {
        fan_array_drop(on);
        return status;
    }
    *out = on;
    return FAN_OK;
}

/* sparse_moved: the same with every part moved by `move`. */
static fan_status sparse_moved(fan_device *d, fan_stream *s, const fan_sparse *from,
                               fan_status (*move)(fan_device *, fan_stream *, const fan_array *, fan_array **,
                                                  fan_error *),
                               fan_sparse **out, fan_error *err)
{
    fan_array *indices = NULL, *pointers = NULL, *values = NULL;
    fan_status status;
    *out = NULL;
    FAN_GO(move(d, s, from->indices, &indices, err));
    FAN_GO(move(d, s, from->pointers, &pointers, err));
    FAN_GO(move(d, s, from->values, &values, err));
    FAN_GO(fan_sparse_new(from->format, from->ndim, from->shape, indices, pointers, values, from->coalesced, out, err));
    (*out)->nnz_coalesced = from->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

static fan_status merge_on_host(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n, bool coalesce,
                                fan_dtype result, const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    fan_sparse *merged = NULL;
    fan_status status = FAN_OK;
    fan_sparse_operand *host = n <= SIZE_MAX / sizeof *host ? fan_calloc(n * sizeof *host) : NULL;
    if (!host)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a sparse sum");
    for (size_t i = 0; i < n; i++) {
        fan_sparse *part;
        FAN_GO(sparse_moved(d, s, in[i].sparse, to_host, &part, err));
        host[i] = (fan_sparse_operand){.sparse = part, .acc = in[i].acc};
    }
    FAN_GO(fan_sparse_merge(host, n, coalesce, result, scale, &merged, err));
    FAN_GO(sparse_moved(d, s, merged, to_device, out, err));
done:
    for (size_t i = 0; i < n; i++)
        fan_sparse_drop((fan_sparse *)(uintptr_t)host[i].sparse);
    fan_free(host);
    fan_sparse_drop(merged);
    return status;
}

/* queue_copy: src into count elements of dst from `start` along `axis`. */
static fan_status queue_copy(fan_device *d, fan_stream *s, const fan_array *dst, int axis, int64_t start,
                             const fan_array *src, fan_error *err)
{
    fan_array *into;
    if (src->size == 0)
        return FAN_OK;
    FAN_TRY(fan_array_slice(dst, axis, start, src->shape[axis], &into, err));
    fan_operand from = {.array = src, .acc = dst->dtype};
    fan_status status = fan_device_run(
        d, s, &(fan_job){.kind = FAN_JOB_COPY, .out = into, .in = &from, .n = 1, .label = "concatenate"}, err);
    fan_array_drop(into);
    return status;
}

/* concatenate: the entries of COO operands, one after the other; queued. */
static fan_status concatenate(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n, fan_sparse **out,
                              fan_error *err)
{
    const fan_sparse *first = in[0].sparse;
    fan_array *indices = NULL, *values = NULL;
    fan_status status;
    int64_t total = 0, shape[FAN_MAX_NDIM];
    for (size_t i = 0; i < n; i++)
        if (__builtin_add_overflow(total, fan_sparse_nnz(in[i].sparse), &total))
            return fan_fail(err, FAN_ERR_VALUE, "a sparse sum has more entries than can be counted");
    int64_t grid[2] = {first->indices->shape[0], total};
    FAN_GO(fan_device_array(d, s, FAN_DT_INT64, 2, grid, NULL, &indices, err));
    memcpy(shape, first->values->shape, (size_t)first->values->ndim * sizeof *shape);
    shape[0] = total;
    FAN_GO(fan_device_array(d, s, in[n - 1].acc, first->values->ndim, shape, NULL, &values, err));
    for (size_t i = 0, at = 0; i < n; i++) {
        FAN_GO(queue_copy(d, s, indices, 1, (int64_t)at, in[i].sparse->indices, err));
        FAN_GO(queue_copy(d, s, values, 0, (int64_t)at, in[i].sparse->values, err));
        at += (size_t)fan_sparse_nnz(in[i].sparse);
    }
    FAN_GO(fan_sparse_new(FAN_FORMAT_COO, first->ndim, first->shape, indices, NULL, values, n == 1 && first->coalesced,
                          out, err));
    (*out)->nnz_coalesced = first->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(values);
    return status;
}

fan_status fan_device_sparse_merge(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n, bool coalesce,
                                   fan_dtype result, const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    *out = NULL;
    if (!d->backend->has_streams)
        return fan_sparse_merge(in, n, coalesce, result, scale, out, err);
    fan_dtype last = in[n - 1].acc;
    bool plain = !coalesce && !(scale && scale->on) && (result == FAN_DT_NONE || result == last);
    for (size_t i = 0; i < n && plain; i++) /* D3: where it widens, what came before is summed first */
        plain = in[i].sparse->format == FAN_FORMAT_COO && in[i].acc == last &&
                in[i].sparse->indices->shape[0] == in[0].sparse->indices->shape[0];
    return plain ? concatenate(d, s, in, n, out, err) : merge_on_host(d, s, in, n, coalesce, result, scale, out, err);
}
