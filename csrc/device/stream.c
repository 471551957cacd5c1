#define _POSIX_C_SOURCE 200809L
#include "device/stream.h"

#include "base/fork.h"
#include "base/mem.h"

#include <stdio.h>

static atomic_uint_fast64_t last_stream;

/* When a stream is freed its lane goes to the next stream that is made, which goes on counting: what others know of the
 * lane stays true, since it speaks of smaller counts. The lowest free lane is given out first, so that clocks stay
 * short. */
#define LANES 1024

static pthread_mutex_t lanes_lock = PTHREAD_MUTEX_INITIALIZER;

static bool lane_taken[LANES];

static uint64_t lane_count[LANES];

static void stream_lock_lanes(void) { (void)pthread_mutex_lock(&lanes_lock); }

static void stream_unlock_lanes(void) { (void)pthread_mutex_unlock(&lanes_lock); }

static fan_fork stream_fork = {.lock = stream_lock_lanes, .unlock = stream_unlock_lanes};

static void stream_take_lane(fan_stream *s)
{
    s->lane = FAN_NO_LANE;
    (void)fan_fork_add(&stream_fork);
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

static void stream_give_lane(fan_stream *s)
{
    if (s->lane == FAN_NO_LANE)
        return;
    (void)pthread_mutex_lock(&lanes_lock);
    lane_taken[s->lane] = false;
    lane_count[s->lane] = s->count;
    (void)pthread_mutex_unlock(&lanes_lock);
}

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
    stream_take_lane(s);
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
    stream_give_lane(s);
    fan_clock_fini(&s->clock);
    fan_free(s);
    fan_device_drop(d);
}

typedef struct pushed_stream {
    struct pushed_stream *outer;
    fan_stream *stream;
} pushed_stream;

static _Thread_local pushed_stream *innermost;

fan_stream *fan_stream_pushed(fan_device *d)
{
    for (const pushed_stream *p = innermost; p; p = p->outer)
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
    pushed_stream *p = fan_alloc(sizeof *p);
    if (!p)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a current stream");
    p->stream = fan_stream_hold(s);
    p->outer = innermost;
    innermost = p;
    return FAN_OK;
}

void fan_stream_pop(fan_stream *s)
{
    for (pushed_stream **at = &innermost; *at; at = &(*at)->outer) {
        pushed_stream *p = *at;
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

fan_status fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    fan_yield();
    return d->backend->run(d, s, job, err);
}
