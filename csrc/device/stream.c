/* Devices, streams, the current streams of a thread, and the lines of their work in traces. */
#define _POSIX_C_SOURCE 200809L

#include "device/stream.h"

#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"

#include <stdio.h>
#include <string.h>

/* ---- devices ---- */

static atomic_uint_fast64_t last_device;

/* A forked child inherits its parent's locks without the threads that held them. So fork acquires
 * these locks first: no call is made while one is held, and no other is acquired. Inherited objects
 * can be dropped in the child. */
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;

static fan_device *devices;

static void device_lock_list(void)
{
    (void)pthread_mutex_lock(&devices_lock);
}

static void device_unlock_list(void)
{
    (void)pthread_mutex_unlock(&devices_lock);
}

static void device_lock_all(void)
{
    device_lock_list();
    for (fan_device *d = devices; d; d = d->next)
        fan__device_lock(d);
}

static void device_unlock_all(void)
{
    for (fan_device *d = devices; d; d = d->next)
        fan__device_unlock(d);
    device_unlock_list();
}

static fan_fork device_fork = {.lock = device_lock_all, .unlock = device_unlock_all};

int fan_device_init(fan_device *d, const fan_backend *b, void *self, int index,
                    atomic_size_t *holds)
{
    memset(d, 0, sizeof *d);
    if (pthread_mutex_init(&d->lock, NULL))
        return -1;
    d->holds = holds;
    d->backend = b;
    d->self = self;
    d->index = index;
    d->id = atomic_fetch_add(&last_device, 1) + 1;
    d->pending_free_end = &d->pending_free;
    (void)fan_fork_add(&device_fork);
    device_lock_list();
    d->next = devices;
    devices = d;
    device_unlock_list();
    return 0;
}

void fan_device_fini(fan_device *d)
{
    device_lock_list();
    fan_device **at = &devices;
    while (*at && *at != d)
        at = &(*at)->next;
    if (*at)
        *at = d->next;
    device_unlock_list();
    (void)pthread_mutex_destroy(&d->lock);
}

fan_device *fan_device_hold(fan_device *d)
{
    if (d && d->holds)
        atomic_fetch_add_explicit(d->holds, 1, memory_order_relaxed);
    return d;
}

void fan_device_drop(fan_device *d)
{
    if (d && d->holds && atomic_fetch_sub_explicit(d->holds, 1, memory_order_acq_rel) == 1)
        d->backend->device_fini(d);
}

char *fan_device_text(const fan_device *d, char *buf, size_t size)
{
    if (d->index >= 0)
        snprintf(buf, size, "%s:%d", d->backend->name, d->index);
    else
        snprintf(buf, size, "%s", d->backend->name);
    return buf;
}

/* ---- streams ---- */

static atomic_uint_fast64_t last_stream;

/* A freed stream's lane goes to the next new stream, which continues its count: clocks that contain
 * the lane stay valid, because they hold smaller counts. The lowest free lane is reused first, so
 * that clocks stay short. */
#define LANES 1024

static pthread_mutex_t lanes_lock = PTHREAD_MUTEX_INITIALIZER;

static bool lane_taken[LANES];

static uint64_t lane_count[LANES];

static void stream_lock_lanes(void)
{
    (void)pthread_mutex_lock(&lanes_lock);
}

static void stream_unlock_lanes(void)
{
    (void)pthread_mutex_unlock(&lanes_lock);
}

static fan_fork stream_fork = {.lock = stream_lock_lanes, .unlock = stream_unlock_lanes};

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
    fan_clock_init(&s->clock);
    s->lane = FAN_NO_LANE;
    (void)fan_fork_add(&stream_fork);
    stream_lock_lanes();
    uint32_t lane = 0;
    while (lane < LANES && lane_taken[lane])
        lane++;
    if (lane < LANES) {
        lane_taken[lane] = true;
        s->lane = lane;
        s->count = lane_count[lane];
    }
    stream_unlock_lanes();
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
    /* Relaxed: the lock of the list in which the caller found it orders what the stream holds. */
    size_t refs = atomic_load_explicit(&s->refs, memory_order_relaxed);
    while (refs) {
        if (atomic_compare_exchange_weak_explicit(&s->refs, &refs, refs + 1, memory_order_relaxed,
                                                  memory_order_relaxed))
            return s;
    }
    return NULL;
}

void fan_stream_drop(fan_stream *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_device *d = s->device;
    if (d->backend->stream_fini)
        d->backend->stream_fini(s);
    if (s->lane != FAN_NO_LANE) {
        stream_lock_lanes();
        lane_taken[s->lane] = false;
        lane_count[s->lane] = s->count;
        stream_unlock_lanes();
    }
    fan_clock_fini(&s->clock);
    fan_free(s);
    fan_device_drop(d);
}

/* ---- current streams ---- */

typedef struct fan_pushed_stream {
    struct fan_pushed_stream *outer;
    fan_stream *stream;
    /* the current streams with this one as the last; held; NULL: not made yet */
    fan_stream_set *set;
} fan_pushed_stream;

static _Thread_local fan_pushed_stream *pushed; /* the last */
static _Thread_local fan_stream_set *entered;   /* below them; held by its fan_streams_enter */

atomic_size_t fan__streams_used; /* pushed streams, and sets */

/* streams_used: adds `by`, 1 or SIZE_MAX (for -1). */
static void streams_used(size_t by)
{
    atomic_fetch_add_explicit(&fan__streams_used, by, memory_order_relaxed);
}

fan_stream_set *fan_stream_set_hold(fan_stream_set *set)
{
    if (set)
        atomic_fetch_add_explicit(&set->refs, 1, memory_order_relaxed);
    return set;
}

void fan_stream_set_drop(fan_stream_set *set)
{
    if (!set || atomic_fetch_sub_explicit(&set->refs, 1, memory_order_acq_rel) > 1)
        return;
    for (size_t i = 0; i < set->n; i++)
        fan_stream_drop(set->all[i]);
    fan_free(set);
    streams_used(SIZE_MAX);
}

fan_stream *fan_stream_set_find(const fan_stream_set *set, const fan_device *d)
{
    for (size_t i = 0; set && i < set->n; i++) {
        if (set->all[i]->device == d)
            return set->all[i];
    }
    return NULL;
}

/* stream_set_add: adds s, unless the set has a stream of that device. */
static void stream_set_add(fan_stream_set *set, fan_stream *s)
{
    if (!fan_stream_set_find(set, s->device))
        set->all[set->n++] = fan_stream_hold(s);
}

static fan_stream_set *set_new(size_t cap)
{
    fan_stream_set *set = fan_alloc(sizeof *set + cap * sizeof *set->all);
    if (set) {
        atomic_init(&set->refs, 1);
        set->n = 0;
        streams_used(1);
    }
    return set;
}

static fan_status no_memory(fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a current stream");
}

fan_status fan_stream_set_now(fan_stream_set **out, fan_error *err)
{
    size_t cap = 0;
    if (!pushed) {
        *out = fan_stream_set_hold(entered);
        return FAN_OK;
    }
    *out = fan_stream_set_hold(pushed->set);
    if (*out)
        return FAN_OK;
    if (entered)
        cap = entered->n;
    for (const fan_pushed_stream *p = pushed; p; p = p->outer)
        cap++;
    fan_stream_set *set = set_new(cap);
    if (!set)
        return no_memory(err);
    for (const fan_pushed_stream *p = pushed; p; p = p->outer)
        stream_set_add(set, p->stream);
    for (size_t i = 0; entered && i < entered->n; i++)
        stream_set_add(set, entered->all[i]);
    pushed->set = set;
    *out = fan_stream_set_hold(set);
    return FAN_OK;
}

fan_status fan_stream_set_with(fan_stream_set *set, fan_stream *s, fan_stream_set **out,
                               fan_error *err)
{
    if (set && set->all[0] == s) {
        *out = fan_stream_set_hold(set);
        return FAN_OK;
    }
    size_t others = set ? set->n : 0;
    *out = set_new(others + 1);
    if (!*out)
        return no_memory(err);
    stream_set_add(*out, s);
    for (size_t i = 0; i < others; i++)
        stream_set_add(*out, set->all[i]);
    return FAN_OK;
}

fan_stream *fan_stream_pushed(fan_device *d)
{
    for (const fan_pushed_stream *p = pushed; p; p = p->outer) {
        if (p->stream->device == d)
            return fan_stream_hold(p->stream);
    }
    return fan_stream_hold(fan_stream_set_find(entered, d));
}

fan_stream *fan_stream_current(fan_device *d)
{
    if (!d->backend->has_streams)
        return NULL;
    fan_stream *s = fan_stream_pushed(d);
    if (!s)
        s = d->backend->current(d);
    return s;
}

fan_status fan_stream_push(fan_stream *s, fan_error *err)
{
    fan_pushed_stream *p = fan_calloc(sizeof *p);
    if (!p)
        return no_memory(err);
    p->stream = fan_stream_hold(s);
    p->outer = pushed;
    pushed = p;
    streams_used(1);
    return FAN_OK;
}

/* pushed_free: frees a pushed stream that is off the list. */
static void pushed_free(fan_pushed_stream *p)
{
    fan_stream_set_drop(p->set);
    fan_stream_drop(p->stream);
    fan_free(p);
    streams_used(SIZE_MAX);
}

void fan_stream_pop(fan_stream *s)
{
    fan_pushed_stream **at = &pushed;
    while (*at && (*at)->stream != s)
        at = &(*at)->outer;
    fan_pushed_stream *found = *at;
    if (!found)
        return;
    for (fan_pushed_stream *p = pushed; p != found; p = p->outer) {
        fan_stream_set *had_it = p->set;
        p->set = NULL;
        fan_stream_set_drop(had_it);
    }
    *at = found->outer;
    pushed_free(found);
}

void fan_streams_enter(fan_stream_set *set, fan_streams_outer *outer)
{
    *outer = (fan_streams_outer){pushed, entered};
    pushed = NULL;
    entered = set;
}

void fan_streams_leave(const fan_streams_outer *outer)
{
    while (pushed) {
        fan_pushed_stream *p = pushed;
        pushed = p->outer;
        pushed_free(p);
    }
    pushed = outer->pushed;
    entered = outer->set;
}

fan_status fan_stream_check_open(const fan_stream *s, fan_error *err)
{
    char text[32];
    if (!s || !s->device->backend->closed)
        return FAN_OK;
    if (!s->device->backend->closed(s->device))
        return FAN_OK;
    if (FAN_FAULT(STREAM_STAYS_OPEN))
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE,
                    "stream %llu of %s is closed: the block of its machine has ended; use it "
                    "within the block, as in "
                    "with machine: ..",
                    (unsigned long long)s->handle, fan_device_text(s->device, text, sizeof text));
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
    if (!b->capture)
        return FAN_OK;
    return b->capture(s, id, err);
}

fan_status fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    FAN_TRY(fan_job_check(job, err));
    fan_yield();
    return d->backend->run(d, s, job, err);
}

void fan__device_trace(fan_trace_kind kind, const fan_device *d, const fan_stream *s,
                       const fan_stream *other, uint64_t event, uint64_t bytes)
{
    if (!fan_trace_on())
        return;
    fan_trace_line line = {
        .kind = (uint8_t)kind,
        .device = (int16_t)d->index,
        .slot = -1,
        .key = -1,
        .event = event,
        .bytes = bytes,
        .start_us = -1,
        .end_us = -1,
    };
    if (s)
        line.stream = s->handle;
    if (other) {
        char text[24];
        line.other = other->handle;
        snprintf(line.label, sizeof line.label, "stream %llu of %s",
                 (unsigned long long)other->handle,
                 fan_device_text(other->device, text, sizeof text));
    }
    fan_trace_put(&line);
}

void fan_job_trace(const fan_device *d, const fan_stream *s, const fan_job *job, uint64_t begin_ns,
                   double start_us, double end_us)
{
    if (!fan_trace_on())
        return;
    bool copy = job->kind == FAN_JOB_COPY || job->kind == FAN_JOB_UPLOAD;
    fan_trace_line line = {
        .kind = copy ? FAN_TRACE_COPY : FAN_TRACE_KERNEL,
        .device = -1,
        .slot = -1,
        .key = -1,
        .count = (uint32_t)job->n,
        .bytes = fan_job_bytes(job),
        .begin_ns = begin_ns,
        .start_us = start_us,
        .end_us = end_us,
    };
    if (s) {
        line.device = (int16_t)d->index;
        line.stream = s->handle;
    }
    for (size_t i = 0; i < job->n; i++)
        line.in_place |= job->kind == FAN_JOB_SUM && job->in[i].array->data == job->out->data;
    snprintf(line.label, sizeof line.label, "%s", fan_job_name(job));
    fan_trace_put(&line);
}

void fan_jobs_trace(const fan_device *d, const fan_stream *s, const fan_job *jobs, size_t n,
                    const char *label, double start_us, double end_us)
{
    if (!fan_trace_on())
        return;
    fan_trace_line line = {
        .kind = FAN_TRACE_KERNEL,
        .device = (int16_t)d->index,
        .slot = -1,
        .key = -1,
        .count = (uint32_t)n,
        .stream = s->handle,
        .start_us = start_us,
        .end_us = end_us,
    };
    for (size_t i = 0; i < n; i++)
        line.bytes += fan_job_bytes(&jobs[i]);
    snprintf(line.label, sizeof line.label, "%s", label);
    fan_trace_put(&line);
}
