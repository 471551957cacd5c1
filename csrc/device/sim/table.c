/* The backend's entries: memory; streams and events. Its table; makes and ends machines. The
 * machines that a thread has entered. */
#define _POSIX_C_SOURCE 200809L
#include "array/nditer.h"
#include "base/mem.h"
#include "device/memory.h"
#include "device/sim/machine.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- memory ---- */

static fan_status fan__sim_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out,
                                 fan_error *err)
{
    fan_sim *machine = fan__sim_machine(d);
    fan_sim_device_part *part = &machine->parts[d->index];
    fan_arena *a = &part->arena;
    bool host = false;
    (void)stream;
    fan__sim_lock(machine);
    fan_status status = fan__sim_enter(machine, "alloc", err);
    part->given += bytes + 128;
    bool decides = part->given > a->bytes;
    fan__sim_access(machine, FAN__NAME(OF_MEMORY, (uint64_t)d->index),
                    decides ? FAN_SCHED_DECIDE : FAN_SCHED_COUNT);
    if (status != FAN_OK)
        goto done;
    fan_block *block = fan_arena_alloc(a, bytes, &host);
    if (block) {
        block->name = fan__sim_new_name(machine, OF_BLOCK);
        block->left = false;
        block->graphs = 0;
        fan_race_check_forget(machine->race_check, block->lo, block->hi);
        *out = (void *)block->lo;
    } else if (host) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s of sim:%d", bytes,
                          FAN_PLURAL(bytes), d->index);
    } else {
        status = fan_fail_code(err, FAN_ERR_DEVICE_NOMEM, 2,
                               "sim:%d is out of memory: %zu byte%s requested, %zu of %zu in use",
                               d->index, bytes, FAN_PLURAL(bytes), a->in_use, a->bytes);
    }
done:
    fan__sim_unlock(machine);
    return status;
}

static void fan__sim_free(fan_device *d, void *data, size_t bytes)
{
    fan_sim *machine = fan__sim_machine(d);
    fan_arena *a = &machine->parts[d->index].arena;
    (void)bytes;
    fan__sim_lock(machine);
    fan__sim_access(machine, FAN__NAME(OF_MEMORY, (uint64_t)d->index), FAN_SCHED_COUNT);
    fan_block *b = fan_arena_find(a, (uintptr_t)data);
    if (b && b->graphs)
        b->left = true; /* K3 */
    else
        fan_arena_free(a, (uintptr_t)data);
    fan__sim_unlock(machine);
}

/* Lanes whose clocks the next step must contain. */
typedef struct lane_list {
    uint32_t *list;
    size_t n;
    size_t cap;
    bool short_of_memory;
} lane_list;

static void lane_list_add(lane_list *l, uint32_t lane)
{
    if (fan_grow((void **)&l->list, &l->cap, l->n + 1, sizeof *l->list))
        l->short_of_memory = true;
    else
        l->list[l->n++] = lane;
}

/* lane_list_add_graph: adds the lanes of a launched graph that uses the block. */
static void lane_list_add_graph(lane_list *l, const fan_sim_graph *g, const fan_block *b)
{
    size_t at = 0;
    while (at < g->nblocks && g->blocks[at] != b->lo)
        at++;
    if (at == g->nblocks || !g->queues)
        return;
    for (uint32_t i = 0; i < g->members; i++) {
        if (g->queues[i])
            lane_list_add(l, g->queues[i]->lane);
    }
}

/* check_release: checks that memory may be freed once `streams` have passed. A race is raised
 * later. */
static void check_release(fan_sim *machine, void *data, size_t bytes, fan_stream *const *streams,
                          size_t n, const char *call_site)
{
    fan_race_check *check = machine->race_check;
    lane_list after = {0};
    fan_race race;
    for (size_t i = 0; i < n; i++) {
        const fan_sim_queue *queue = fan__queue_of(streams[i]);
        lane_list_add(&after, queue->lane);
        fan__sim_access(machine, queue->name, false);
    }
    /* The threads that held the memory have dropped it before, so what they waited for is over. */
    for (size_t i = 0; i < 1 + FAN_ACTORS; i++) {
        if (!machine->has_lane[i])
            continue;
        lane_list_add(&after, machine->host_lane[i]);
        fan__sim_access(machine, FAN__NAME(OF_WAITED, i), false);
    }
    const fan_block *b = fan__access_block(machine, data);
    bool kept = b && b->graphs; /* a graph that uses the block may be launched again */
    if (b)
        fan__sim_access(machine, b->name, true);
    for (const fan_sim_graph *g = machine->graphs; g && kept; g = g->next)
        lane_list_add_graph(&after, g, b);

    uint32_t lane = fan__sim_lane(machine);
    uintptr_t lo = (uintptr_t)data;
    uintptr_t hi = lo + bytes;
    fan_status status = FAN_OK;
    if (!after.short_of_memory && kept)
        status = fan_race_check_let_go(check, lane, after.list, after.n, lo, hi, call_site, &race);
    else if (!after.short_of_memory)
        status = fan_race_check_release(check, lane, after.list, after.n, lo, hi, call_site, &race);
    fan_free(after.list);
    if (status != FAN_ERR_RACE)
        return;
    fan__sim_keep_race(machine, &race);
    if (!machine->has_pending)
        machine->pending = race;
    machine->has_pending = true;
}

static void fan__sim_dropped(fan_device *d, void *data, size_t bytes, fan_stream *const *streams,
                             size_t n)
{
    fan_sim *machine = fan__sim_machine(d);
    char call_site[FAN__SITE];
    fan__sim_call_site(machine, call_site, sizeof call_site);
    fan__sim_lock(machine);
    fan__access_take_back(machine, fan_extent_flat(data, bytes));
    if (machine->checking && !machine->dying && !fan_sim_gave_up(machine))
        check_release(machine, data, bytes, streams, n, call_site);
    fan__sim_unlock(machine);
}

static fan_status fan__sim_read(fan_stream *s, const fan_array *dst, const fan_array *src,
                                fan_error *err)
{
    fan_sim *machine = fan__sim_machine(s->device);
    fan_sim_queue *queue = fan__queue_of(s);
    fan_race race;
    char call_site[FAN__SITE];
    fan_status status;
    fan_status found;
    fan__sim_call_site(machine, call_site, sizeof call_site);
    /* a copy on `queue` that the host waits for */
    fan_array *source = (fan_array *)(uintptr_t)src;
    fan__work work = {
        .name = "read",
        .call_site = call_site,
        .kernel = {.reads = &source, .nreads = 1},
        .kept = KEPT_BY_HOST,
    };
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter_on(machine, queue, "read", "read", err));
    fan__sim_access(machine, queue->name, true);
    fan__sim_access_state(machine, OF_PROGRESS, false);
    fan__access_report(machine, &work);
    found = fan__access_judge(machine, queue->lane, &work, &race, err);
    if (found != FAN_OK && found != FAN_ERR_RACE) {
        status = found;
        goto done;
    }
    FAN_GO(fan__run_finish(machine, queue, err));
    uint64_t bytes = (uint64_t)src->size * fan_dtype_size(src->dtype);
    *fan__host_clock(machine) += fan__sim_copy_us(machine, bytes);
    if (found == FAN_ERR_RACE)
        status = fan__sim_raise(machine, &race, err);
done:
    fan__sim_unlock(machine);
    FAN_TRY(status);
    if (machine->config.run_work)
        fan_array_copy(dst, src);
    else
        fan_fill_zero(dst);
    fan_sync_trace(s->device, s, NULL);
    return FAN_OK;
}

fan_status fan_sim_array(fan_sim *machine, int device, fan_dtype dtype, int ndim,
                         const int64_t *shape, const fan_array *init, fan_array **out,
                         fan_error *err)
{
    fan_sim_device_part *part;
    fan_array *a;
    *out = NULL;
    FAN_TRY(fan__sim_part(machine, device, &part, err));
    if (init)
        FAN_TRY(fan_memory_scope_upload(&part->device, err));
    FAN_TRY(fan_device_array(&part->device, NULL, dtype, ndim, shape, init, &a, err));
    fan__sim_lock(machine);
    fan_block *b = fan__access_block(machine, a->storage->data);
    if (b)
        b->automatic = true;
    if (init) {
        uint64_t bytes = (uint64_t)a->size * fan_dtype_size(dtype);
        *fan__host_clock(machine) += fan__sim_copy_us(machine, bytes);
    }
    fan__sim_unlock(machine);
    if (init && machine->config.run_work) {
        /* at once: no other call has this memory yet, and its earlier users have passed */
        fan_array_copy(a, init);
    }
    *out = a;
    return FAN_OK;
}

#ifdef FAN_TEST
fan_status fan_sim_host_read(fan_sim *machine, fan_stream *s, const fan_array *dst,
                             const fan_array *a, fan_error *err)
{
    fan_stream *on = NULL;
    if (s) {
        on = fan_stream_hold(s);
    } else {
        fan_sim_device_part *p = NULL;
        if (a->storage)
            p = fan__access_part(machine, (uintptr_t)a->storage->data);
        if (!p)
            return fan_fail(err, FAN_ERR_VALUE, "the array is in no memory of this machine");
        on = fan_stream_current(&p->device);
        if (!on)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
    fan_yield();
    fan_status status = fan__sim_read(on, dst, a, err);
    fan_stream_drop(on);
    return status;
}
#endif

/* ---- streams and events ---- */

static fan_stream *fan__sim_current(fan_device *d)
{
    fan_sim *machine = fan__sim_machine(d);
    fan_sim_device_part *p = &machine->parts[d->index];
    fan__sim_lock(machine);
    fan_stream *s = p->current;
    if (s) {
        (void)fan_stream_hold(s);
        goto done;
    }
    s = fan_stream_new(d, 1, p->legacy);
    if (!s)
        goto done;
    p->legacy->refs++;
    if (p->current_id)
        s->id = p->current_id; /* the object is new, the stream is the same */
    else
        p->current_id = s->id;
    if (machine->users)
        p->current = fan_stream_hold(s);
done:
    fan__sim_unlock(machine);
    return s;
}

static fan_status fan__sim_find_stream(fan_device *d, uint64_t handle, fan_stream **out,
                                       fan_error *err)
{
    char text[32];
    if (handle <= FAN_LEGACY) {
        *out = fan__sim_current(d);
        if (!*out)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
        return FAN_OK;
    }
    fan_sim *machine = fan__sim_machine(d);
    fan_stream *found = NULL;
    fan__sim_lock(machine);
    for (size_t i = 0; i < machine->nqueues && !found; i++) {
        const fan_sim_queue *queue = machine->queues[i];
        if (queue->stream && queue->device == d->index && queue->handle == handle)
            found = fan_stream_try_hold(queue->stream);
    }
    fan__sim_unlock(machine);
    *out = found;
    if (!found) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "no stream of %s has the handle %llu: Machine.stream makes one",
                        fan_device_text(d, text, sizeof text), (unsigned long long)handle);
    }
    return FAN_OK;
}

static void fan__sim_stream_fini(fan_stream *s)
{
    fan_sim *machine = fan__sim_machine(s->device);
    fan_sim_queue *queue = fan__queue_of(s);
    fan__sim_lock(machine);
    if (queue->stream == s)
        queue->stream = NULL;
    fan__queue_drop(queue);
    fan__queue_sweep(machine);
    fan__sim_unlock(machine);
}

static fan_status fan__sim_capture(fan_stream *s, uint64_t *id, fan_error *err)
{
    (void)err;
    *id = 0;
    fan_sim *machine = fan__sim_machine(s->device);
    fan__sim_access_state(machine, OF_CAPTURES, FAN_SCHED_READ);
    if (atomic_load_explicit(&machine->captures, memory_order_relaxed))
        (void)fan_sim_capture_state(machine, s, id);
    return FAN_OK;
}

static fan_status fan__sim_capture_stream(fan_device *d, uint64_t id, fan_stream **out,
                                          fan_error *err)
{
    (void)id; /* a new number each time: numbers are free here */
    return fan_sim_stream(fan__sim_machine(d), d->index, false, out, err);
}

void fan_sim_list(fan_sim *machine, fan_stream *s)
{
    fan__sim_lock(machine);
    fan__queue_of(s)->stream = s;
    fan__sim_unlock(machine);
}

fan_status fan_sim_listed(fan_sim *machine, fan_stream ***out, size_t *n, fan_error *err)
{
    fan__sim_lock(machine);
    fan_stream **all = fan_alloc((machine->nqueues + 1) * sizeof(fan_stream *));
    *n = 0;
    *out = all;
    for (size_t i = 0; all && i < machine->nqueues; i++) {
        fan_stream *s = machine->queues[i]->stream;
        if (s && fan_stream_try_hold(s))
            all[(*n)++] = s;
    }
    fan__sim_unlock(machine);
    if (!all)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a list of streams");
    return FAN_OK;
}

static fan_status fan__sim_event_init(fan_event *e, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(e->device);
    fan_sim_event *ev = fan_calloc(sizeof *ev);
    if (!ev)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
    fan_clock_init(&ev->clock);
    fan_clock_init(&ev->place);
    fan__sim_lock(machine);
    fan_status status = FAN_OK;
    if (!fan_sim_gave_up(machine)) /* as in fan__sim_record */
        status = fan__sim_enter(machine, "event_init", err);
    if (status == FAN_OK)
        ev->name = fan__sim_new_name(machine, OF_EVENT);
    fan__sim_unlock(machine);
    if (status == FAN_OK)
        e->impl = ev;
    else
        fan_free(ev);
    return status;
}

static void fan__sim_event_fini(fan_event *e)
{
    fan_sim *machine = fan__sim_machine(e->device);
    fan_sim_event *ev = e->impl;
    fan__sim_lock(machine);
    fan__queue_drop(ev->point.queue);
    fan__recording_drop(ev->recording);
    fan__queue_sweep(machine);
    fan__sim_unlock(machine);
    fan_clock_fini(&ev->place);
    fan_clock_fini(&ev->clock);
    fan_free(ev);
}

/* event_name: gives a reused pooled event a new name. Its first call is its maker's record. */
static void event_name(fan_sim *machine, const fan_event *e)
{
    fan_sim_event *ev = e->impl;
    if (ev->id == e->id)
        return;
    if (ev->id)
        ev->name = fan__sim_new_name(machine, OF_EVENT);
    ev->id = e->id;
}

/* event_set_point: makes ev represent all that `queue` has queued, uncaptured. */
static void event_set_point(fan_sim *machine, fan_sim_event *ev, fan_sim_queue *queue)
{
    fan__recording_drop(ev->recording);
    ev->recording = NULL;
    fan__queue_drop(ev->point.queue);
    queue->refs++;
    ev->point = (fan_sim_point){queue, queue->queued};
    ev->us = fan__later(queue->end_us, *fan__host_clock(machine));
}

static fan_status fan__sim_record(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(s->device);
    fan_sim_event *ev = e->impl;
    fan_sim_queue *queue = fan__queue_of(s);
    fan_status status;
    fan__sim_lock(machine);
    if (fan_sim_gave_up(machine)) {
        status = FAN_OK; /* nothing runs any more, and memory must still be freed */
        goto done;
    }
    FAN_GO(fan__sim_enter(machine, "record", err));
    event_name(machine, e);
    if (queue->recording) {
        status = fan__recording_record(ev, queue, err);
        goto done;
    }
    FAN_GO(fan__stream_barrier(machine, queue, err));
    if (fan_race_check_record(machine->race_check, queue->lane, fan__sim_lane(machine), &ev->clock))
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event"));
    fan__sim_access(machine, queue->name, true);
    fan__sim_access(machine, ev->name, true);
    event_set_point(machine, ev, queue);
    ev->denied = 0;
done:
    fan__sim_unlock(machine);
    return status;
}

/* fan__sim_note: records an event at the current end of s, for memory that is to be freed: no
 * barrier of the legacy stream, and no other ordering. */
static fan_status fan__sim_note(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(s->device);
    fan_sim_event *ev = e->impl;
    fan_sim_queue *queue = fan__queue_of(s);
    fan_status status = FAN_OK;
    fan__sim_lock(machine);
    if (fan_sim_gave_up(machine))
        goto done;
    FAN_GO(fan__sim_enter(machine, "record", err));
    FAN_GO(fan__recording_none(queue, "record", err));
    event_name(machine, e);
    event_set_point(machine, ev, queue);
    ev->clock.n = 0; /* it orders nothing */
done:
    fan__sim_unlock(machine);
    return status;
}

static fan_status fan__sim_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(s->device);
    const fan_sim_event *ev = e->impl;
    fan_sim_queue *queue = fan__queue_of(s);
    fan_status status;
    bool never = false, captured;
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter(machine, "wait", err));
    if (fan__sim_machine(e->device) != machine) {
        FAN_GO(
            fan_fail(err, FAN_ERR_VALUE, "a stream cannot wait for an event of another machine"));
    }
    event_name(machine, e);
    fan__sim_access(machine, ev->name, false);
    FAN_GO(fan__recording_wait(queue, ev, &captured, err));
    if (captured)
        goto done;
    never = !ev->point.queue;
    if (never)
        goto done;
    FAN_GO(fan__stream_barrier(machine, queue, err));
    FAN_GO(fan__queue_wait(machine, queue, ev->point, err));
    /* The host's clock is not joined at a wait: an elided wait would not join it either. */
    FAN_GO(fan__lane_after(machine, queue->lane, &ev->clock, err));
    fan__sim_access(machine, queue->name, true);
    queue->end_us = fan__later(queue->end_us, ev->us);
done:
    fan__sim_unlock(machine);
    if (never && machine->hooks.warn) {
        char text[128];
        snprintf(
            text, sizeof text,
            "stream %llu of sim:%d waits for an event that was never recorded: that is no wait",
            (unsigned long long)s->handle, s->device->index);
        machine->hooks.warn(machine->hooks.ctx, text);
    }
    return status;
}

static void fan__sim_elided(fan_stream *s, fan_event *e)
{
    fan_sim *machine = fan__sim_machine(s->device);
    const fan_sim_event *ev = e->impl;
    const fan_sim_queue *queue = fan__queue_of(s);
    fan__sim_lock(machine);
    fan__sim_access(machine, queue->name, false);
    fan__sim_access(machine, ev->name, false);
    const fan_clock *now = fan_race_check_clock(machine->race_check, queue->lane);
    if (machine->checking && !fan_clock_leq(&ev->clock, now))
        machine->unsound++;
    fan__sim_unlock(machine);
}

/* query_choose: the search chooses *done, where it may (sim.h, Queries). */
static fan_status query_choose(fan_sim *machine, fan_sim_event *ev, bool *done, fan_error *err)
{
    const fan_clock *now = fan_race_check_clock(machine->race_check, fan__sim_lane(machine));
    int answer = 1;
    if (!fan__sim_picks(machine))
        return FAN_OK;
    if (fan__sim_here.kernels)
        return FAN_OK;
    if (!machine->config.run_work)
        return FAN_OK;
    if (fan_clock_leq(&ev->clock, now))
        return FAN_OK;
    if (ev->denied < FAN_ASKS)
        answer = fan_host_sched_pick(machine->host_sched, 2);
    if (answer < 0)
        return FAN_OK;
    *done = answer == 1;
    if (!*done) {
        ev->denied++;
        return FAN_OK;
    }
    FAN_TRY(fan__run_for(machine, ev->point, 0, done, err));
    if (!*done)
        fan_sched_not_ready(); /* it never will, unless another thread acts */
    return FAN_OK;
}

static fan_status fan__sim_query(fan_event *e, bool *done, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(e->device);
    fan_sim_event *ev = e->impl;
    fan_status status;
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter(machine, "query", err));
    FAN_GO(fan__recording_has_time(ev, e, "query", err));
    fan__sim_access(machine, ev->name, false);
    fan__sim_access_state(machine, OF_PROGRESS, true);
    fan__sim_access_state(machine, OF_QUEUED, false);
    fan__run_settle(machine);
    *done = fan__run_has_passed(ev);
    if (ev->point.queue)
        FAN_GO(query_choose(machine, ev, done, err));
    if (*done && ev->point.queue)
        status = fan__run_join(machine, &ev->clock, err);
done:
    fan__sim_unlock(machine);
    return status;
}

static bool fan__sim_peek(fan_event *e)
{
    fan_sim *machine = fan__sim_machine(e->device);
    fan__sim_lock(machine);
    fan__run_settle(machine);
    const fan_sim_event *ev = e->impl;
    bool done = fan__run_has_passed(ev) && !ev->recording;
    done = done || fan_sim_gave_up(machine);
    fan__sim_unlock(machine);
    return done;
}

static fan_status fan__sim_sync(fan_stream *s, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(s->device);
    fan_sim_queue *queue = fan__queue_of(s);
    fan_status status;
    if (machine->dying)
        return FAN_OK;
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter_on(machine, queue, "sync", "synchronize", err));
    fan__sim_access(machine, queue->name, queue->blocking);
    fan__sim_access_state(machine, OF_PROGRESS, false);
    FAN_GO(fan__run_finish(machine, queue, err));
done:
    fan__sim_unlock(machine);
    if (status == FAN_OK)
        fan_sync_trace(s->device, s, NULL);
    return status;
}

static fan_status fan__sim_event_sync(fan_event *e, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(e->device);
    const fan_sim_event *ev = e->impl;
    fan_status status;
    if (machine->dying)
        return FAN_OK;
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter(machine, "event_sync", err));
    FAN_GO(fan__sim_raise_pending(machine, err));
    FAN_GO(fan__recording_has_time(ev, e, "synchronize", err));
    fan__sim_access(machine, ev->name, false);
    fan__sim_access_state(machine, OF_PROGRESS, false);
    if (ev->point.queue)
        status = fan__run_to(machine, ev->point, &ev->clock, ev->us, err);
done:
    fan__sim_unlock(machine);
    if (status == FAN_OK)
        fan_sync_trace(e->device, NULL, e);
    return status;
}


/* ---- the table; making and ending machines ---- */

#define MEMORY ((size_t)1 << 30)
#define LAUNCH_US 3.0
#define GBYTES_PER_S 1000.0

static atomic_uint_fast64_t machines;

static void sim_free_machine(fan_sim *machine)
{
    machine->dying = true;
    if (machine->parts) {
        fan__recording_drop_all(machine);
        fan__queue_drop_work(machine);
        for (int i = 0; i < machine->config.devices; i++) {
            fan_device *d = &machine->parts[i].device;
            if (d->backend)
                fan_device_flush(d);
        }
        for (int i = 0; i < machine->config.devices; i++) {
            fan_sim_device_part *part = &machine->parts[i];
            if (part->device.backend)
                fan_device_clear(&part->device);
            fan_arena_fini(&part->arena);
        }
    }
    for (size_t i = 0; i < machine->nqueues; i++)
        fan_free(machine->queues[i]);
    fan__access_take_back(machine, (fan_extent){0, UINT64_MAX});
    fan_free(machine->parts);
    fan_free(machine->queues);
    fan_free(machine->names);
    fan_race_check_free(machine->race_check);
    fan_host_sched_free(machine->host_sched);
    (void)pthread_cond_destroy(&machine->ran);
    (void)pthread_mutex_destroy(&machine->lock);
    fan_free(machine);
}

static bool sim_closed(const fan_device *d)
{
    return atomic_load_explicit(&fan__sim_machine(d)->closed, memory_order_acquire);
}

static uint64_t sim_left_out(fan_device *d)
{
    return fan__sim_machine(d)->left_out;
}

static void sim_device_fini(fan_device *d)
{
    sim_free_machine(fan__sim_machine(d));
}

static void event_accessed(const fan_event *e)
{
    const fan_sim_event *ev = e->impl;
    fan_sim *machine = fan__sim_machine(e->device);
    if (!fan__sim_here.machine)
        return;
    fan__sim_lock(machine);
    fan__sim_access(machine, ev->name, FAN_SCHED_READ);
    fan__sim_unlock(machine);
}

static void array_accessed(const fan_device *d, const fan_array *a)
{
    fan_sim *machine = fan__sim_machine(d);
    if (!fan__sim_here.machine)
        return;
    fan__sim_lock(machine);
    const fan_block *b = a->storage ? fan__access_block(machine, a->storage->data) : NULL;
    if (b)
        fan__sim_access(machine, b->name, FAN_SCHED_WRITE);
    fan__sim_unlock(machine);
}

static const fan_backend fan_sim_backend = {
    .name = "sim",
    .has_streams = true,
    .find_stream = fan__sim_find_stream,
    .alloc = fan__sim_alloc,
    .free = fan__sim_free,
    .read = fan__sim_read,
    .dropped = fan__sim_dropped,
    .use = fan__sim_use,
    .returned = fan__sim_returned,
    .current = fan__sim_current,
    .sync = fan__sim_sync,
    .stream_fini = fan__sim_stream_fini,
    .event_init = fan__sim_event_init,
    .event_fini = fan__sim_event_fini,
    .record = fan__sim_record,
    .note = fan__sim_note,
    .wait = fan__sim_wait,
    .query = fan__sim_query,
    .nudge = fan__sim_nudge,
    .peek = fan__sim_peek,
    .elided = fan__sim_elided,
    .event_sync = fan__sim_event_sync,
    .run = fan__sim_run,
    .run_many = fan__sim_run_many,
    .capture = fan__sim_capture,
    .capture_stream = fan__sim_capture_stream,
    .recorder = &fan_sim_recorder,
    .array_accessed = array_accessed,
    .event_accessed = event_accessed,
    .closed = sim_closed,
    .left_out = sim_left_out,
    .device_fini = sim_device_fini,
};

static void sim_set_host_sched(fan_sim *machine)
{
    fan_host_sched_hooks h = {
        .before_block = machine->hooks.before_block,
        .after_block = machine->hooks.after_block,
        .block_ctx = machine->hooks.ctx,
    };
    if (machine->has_chooser) {
        h.choose = machine->chooser.choose;
        h.pick = machine->chooser.pick;
        h.ctx = machine->chooser.ctx;
    }
    fan_host_sched_set_hooks(machine->host_sched, &h);
}

/* sim_begin_anew: resets counters and clocks to those of a new machine. */
static void sim_begin_anew(fan_sim *machine)
{
    fan_mutex now;
    machine->random = machine->config.seed;
    machine->number = 0;
    machine->calls = 0;
    machine->races = 0;
    machine->unsound = 0;
    machine->has_pending = false;
    machine->last = 0;
    machine->device_us = 0;
#ifdef FAN_TEST
    machine->fail_at = -1;
    machine->planned = false;
#endif
    memset(machine->host_us, 0, sizeof machine->host_us);
    memset(machine->made, 0, sizeof machine->made);
    for (int i = 0; machine->parts && i < machine->config.devices; i++)
        machine->parts[i].given = 0;
    machine->mutex_base = 0;
    if (fan_mutex_init(&now) == 0) {
        machine->mutex_base = now.id;
        fan_mutex_fini(&now);
    }
}

fan_status fan_sim_new(const fan_sim_config *config, const fan_sim_hooks *hooks, fan_sim **out,
                       fan_error *err)
{
    *out = NULL;
    if (config->devices < 1 || config->devices > FAN_SIM_DEVICES) {
        return fan_fail(err, FAN_ERR_VALUE, "a machine has 1 to %d devices, got %d",
                        FAN_SIM_DEVICES, config->devices);
    }
    fan_sim *machine = fan_calloc(sizeof *machine);
    if (!machine)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
    fan_mutexes_numbered();
    (void)pthread_mutex_init(&machine->lock, NULL);
    (void)pthread_cond_init(&machine->ran, NULL);
    atomic_init(&machine->holds, 1);
    atomic_init(&machine->captures, 0);
    machine->users = 1;
    machine->config = *config;
    if (machine->config.memory == 0)
        machine->config.memory = MEMORY;
    if (!(machine->config.launch_us > 0))
        machine->config.launch_us = LAUNCH_US;
    if (!(machine->config.gbytes_per_s > 0))
        machine->config.gbytes_per_s = GBYTES_PER_S;
    if (hooks)
        machine->hooks = *hooks;
    machine->checking = true;
    machine->handle = 1;
    machine->serial = atomic_fetch_add(&machines, 1);
    fan_status status = FAN_ERR_NOMEM;
    machine->race_check = fan_race_check_new();
    machine->host_sched = fan_host_sched_new(config->seed);
    machine->parts = fan_calloc((size_t)config->devices * sizeof *machine->parts);
    if (!machine->race_check || !machine->host_sched || !machine->parts) {
        fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
        goto done;
    }
    sim_set_host_sched(machine);
    FAN_GO(fan__queue_host(machine, 0, FAN_MAIN, err));
    for (int i = 0; i < config->devices; i++) {
        fan_sim_device_part *p = &machine->parts[i];
        if (fan_arena_init(&p->arena, machine->config.memory, config->run_work)) {
            status =
                fan_fail(err, FAN_ERR_NOMEM,
                         "cannot reserve %zu bytes of addresses for sim:%d; ask for less memory",
                         machine->config.memory, i);
            goto done;
        }
        if (fan_device_init(&p->device, &fan_sim_backend, machine, i, &machine->holds)) {
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
            goto done;
        }
        FAN_GO(fan__queue_new(machine, i, FAN_LEGACY, true, NULL, &p->legacy, err));
    }
    sim_begin_anew(machine);
    *out = machine;
done:
    if (status != FAN_OK)
        sim_free_machine(machine);
    return status;
}

fan_device *fan_sim_device(fan_sim *machine, int index)
{
    if (index < 0 || index >= machine->config.devices)
        return NULL;
    return &machine->parts[index].device;
}

fan_sim *fan_sim_of(const fan_device *d)
{
    if (d->backend != &fan_sim_backend)
        return NULL;
    return fan__sim_machine(d);
}

uint64_t fan_sim_seed(const fan_sim *machine)
{
    return machine->config.seed;
}

#ifdef FAN_TEST
fan_status fan_sim_reset(fan_sim *machine, fan_error *err)
{
    if (fan_host_sched_count(machine->host_sched) != 0 && !fan_sim_gave_up(machine)) {
        return fan_fail(err, FAN_ERR_STATE,
                        "a machine with host threads cannot be reset: join them first");
    }
    fan__queue_drop_work(machine);
    for (int i = 0; i < machine->config.devices; i++)
        fan_device_poll(&machine->parts[i].device);
    fan__sim_lock(machine);
    size_t live = 0;
    for (int i = 0; i < machine->config.devices; i++)
        live += machine->parts[i].arena.live;
    if (live) {
        fan__sim_unlock(machine);
        return fan_fail(err, FAN_ERR_STATE,
                        "a machine cannot be reset while %zu blocks of its memory are held", live);
    }
    for (int i = 0; i < machine->config.devices; i++)
        fan_arena_reset(&machine->parts[i].arena);
    fan_race_check_reset(machine->race_check);
    fan_host_sched_reset(machine->host_sched, machine->config.seed);
    for (size_t i = 0; i < machine->nqueues; i++) {
        machine->queues[i]->queued = 0;
        machine->queues[i]->done = 0;
        machine->queues[i]->end_us = 0;
    }
    sim_begin_anew(machine);
    fan__queue_sweep(machine);
    fan__sim_unlock(machine);
    return FAN_OK;
}
#endif

void fan_sim_set_chooser(fan_sim *machine, const fan_sim_chooser *c)
{
    fan__sim_lock(machine);
    machine->has_chooser = c != NULL;
    if (c)
        machine->chooser = *c;
    sim_set_host_sched(machine);
    fan__sim_unlock(machine);
}

/* ---- the machines that a thread has entered, and the devices that it can name for that: the
 * innermost one's ---- */

typedef struct entered_machine {
    struct entered_machine *outer;
    fan_sim *machine; /* held */
} entered_machine;

static pthread_key_t entered_key; /* the innermost entered_machine of a thread */
static bool entered_has_key;

static void entered_change(fan_sim *machine, size_t by)
{
    fan__sim_lock(machine);
    machine->entered += by;
    atomic_store_explicit(&machine->closed, machine->entered == 0, memory_order_release);
    fan__sim_unlock(machine);
}

static entered_machine *entered_free(entered_machine *e)
{
    entered_machine *outer = e->outer;
    entered_change(e->machine, SIZE_MAX);
    fan_sim_drop(e->machine);
    fan_free(e);
    return outer;
}

static void entered_thread_exit(void *innermost)
{
    for (entered_machine *e = innermost; e;)
        e = entered_free(e);
}

static void entered_make_key(void)
{
    entered_has_key = pthread_key_create(&entered_key, entered_thread_exit) == 0;
}

static entered_machine *entered_innermost(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, entered_make_key);
    if (!entered_has_key)
        return NULL;
    return pthread_getspecific(entered_key);
}

fan_status fan_sim_enter(fan_sim *machine, fan_error *err)
{
    entered_machine *outer = entered_innermost();
    entered_machine *e = fan_calloc(sizeof *e);
    if (!e || !entered_has_key || pthread_setspecific(entered_key, e)) {
        fan_free(e);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory to enter a machine");
    }
    e->outer = outer;
    e->machine = fan_sim_hold(machine);
    entered_change(machine, 1);
    return FAN_OK;
}

void fan_sim_leave(const fan_sim *machine)
{
    entered_machine *innermost = entered_innermost();
    for (entered_machine **at = &innermost; *at; at = &(*at)->outer) {
        entered_machine *left = *at;
        if (left->machine == machine) {
            *at = left->outer;
            (void)pthread_setspecific(entered_key, innermost); /* before what the drop may call */
            (void)entered_free(left);
            return;
        }
    }
}

fan_sim *fan_sim_entered(void)
{
    entered_machine *e = entered_innermost();
    return e ? e->machine : NULL;
}

static int entered_count(void)
{
    entered_machine *e = entered_innermost();
    return e ? e->machine->config.devices : 0;
}

static fan_status entered_find(long index, fan_device **out, fan_error *err)
{
    entered_machine *e = entered_innermost();
    int n = entered_count();
    *out = NULL;
    if (!e) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "device \"sim:%ld\": no simulated machine is entered on this thread: with "
                        "fanin.sim.Machine(): ..",
                        index);
    }
    if (index >= n) {
        return fan_fail(
            err, FAN_ERR_VALUE,
            "device \"sim:%ld\": this machine has %d device%s; use fanin.sim.Machine(devices=%ld)",
            index, n, FAN_PLURAL(n), index + 1);
    }
    *out = fan_device_hold(fan_sim_device(e->machine, (int)index));
    return FAN_OK;
}

static void *scope_entered(void)
{
    fan_sim *machine = fan_sim_entered();
    return machine ? fan_sim_hold(machine) : NULL;
}

static void scope_enter(void *machine)
{
    (void)fan_sim_enter(machine, NULL);
}

static void scope_leave(void *machine)
{
    fan_sim_leave(machine);
}

static void scope_drop(void *machine)
{
    fan_sim_drop(machine);
}

static const fan_backend_scope scope = {
    .entered = scope_entered,
    .enter = scope_enter,
    .leave = scope_leave,
    .drop = scope_drop,
};

const fan_backend_entry fan_sim_entry = {
    .backend = &fan_sim_backend,
    .count = entered_count,
    .find = entered_find,
    .scope = &scope,
};
