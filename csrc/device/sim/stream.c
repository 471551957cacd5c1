#include "device/sim/machine.h"

#include "base/mem.h"

#include <stdio.h>

fan_stream *fan__sim_current(fan_device *d)
{
    fan_sim *m = fan__sim_machine(d);
    fan_sim_device_part *p = &m->parts[d->index];
    fan__sim_lock(m);
    fan_stream *s = p->current ? fan_stream_hold(p->current) : fan_stream_new(d, 1, p->legacy);
    if (s && !p->current) {
        p->legacy->refs++;
        if (p->current_id)
            s->id = p->current_id; /* the object is new, the stream is the same */
        else
            p->current_id = s->id;
        if (m->users)
            p->current = fan_stream_hold(s);
    }
    fan__sim_unlock(m);
    return s;
}

fan_status fan__sim_find_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err)
{
    char text[32];
    if (handle <= FAN_LEGACY) {
        *out = fan__sim_current(d);
        return *out ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
    fan_sim *m = fan__sim_machine(d);
    fan_stream *found = NULL;
    fan__sim_lock(m);
    for (size_t i = 0; i < m->nqueues && !found; i++) {
        const fan_sim_queue *q = m->queues[i];
        if (q->stream && q->device == d->index && q->handle == handle)
            found = fan_stream_try_hold(q->stream);
    }
    fan__sim_unlock(m);
    *out = found;
    return found ? FAN_OK
                 : fan_fail(err, FAN_ERR_VALUE, "no stream of %s has the handle %llu: Machine.stream makes one",
                            fan_device_text(d, text, sizeof text), (unsigned long long)handle);
}

void fan__sim_stream_fini(fan_stream *s)
{
    fan_sim *m = fan__sim_machine(s->device);
    fan__sim_lock(m);
    if (fan__queue_of(s)->stream == s)
        fan__queue_of(s)->stream = NULL;
    fan__queue_drop(fan__queue_of(s));
    fan__queue_sweep(m);
    fan__sim_unlock(m);
}

fan_status fan__sim_capture(fan_stream *s, uint64_t *id, fan_error *err)
{
    (void)err;
    *id = 0;
    fan__sim_access(fan__sim_machine(s->device), FAN__NAME(OF_CAPTURES, 0), FAN_SCHED_READ);
    if (atomic_load_explicit(&fan__sim_machine(s->device)->captures, memory_order_relaxed))
        (void)fan_sim_capture_state(fan__sim_machine(s->device), s, id, NULL);
    return FAN_OK;
}

fan_status fan_sim_stream(fan_sim *m, int device, bool blocking, fan_stream **out, fan_error *err)
{
    fan_sim_queue *q = NULL;
    *out = NULL;
    if (device < 0 || device >= m->config.devices)
        return fan_fail(err, FAN_ERR_VALUE, "no device %d: this machine has %d", device, m->config.devices);
    fan_yield();
    fan__sim_lock(m);
    fan_status status = fan__sim_alive(m, err);
    if (status == FAN_OK)
        status = fan__queue_new(m, device, m->handle + 1, blocking,
                                fan_race_check_clock(m->race_check, fan__sim_lane(m)), &q, err);
    if (status == FAN_OK) {
        fan__sim_access(m, FAN__NAME(OF_STREAMS, 0), FAN_SCHED_COUNT);
        m->handle++;
        *out = fan_stream_new(&m->parts[device].device, q->handle, q);
        if (!*out) {
            fan__queue_drop(q);
            fan__queue_sweep(m);
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
        }
    }
    fan__sim_unlock(m);
    return status;
}

fan_status fan__sim_capture_stream(fan_device *d, uint64_t id, fan_stream **out, fan_error *err)
{
    (void)id; /* a new number each time: numbers are free here */
    return fan_sim_stream(fan__sim_machine(d), d->index, false, out, err);
}

void fan_sim_list(fan_sim *m, fan_stream *s)
{
    fan__sim_lock(m);
    fan__queue_of(s)->stream = s;
    fan__sim_unlock(m);
}

fan_status fan_sim_listed(fan_sim *m, fan_stream ***out, size_t *n, fan_error *err)
{
    fan__sim_lock(m);
    fan_stream **all = fan_alloc((m->nqueues + 1) * sizeof(fan_stream *));
    *n = 0;
    *out = all;
    for (size_t i = 0; all && i < m->nqueues; i++)
        if (m->queues[i]->stream && fan_stream_try_hold(m->queues[i]->stream))
            all[(*n)++] = m->queues[i]->stream;
    fan__sim_unlock(m);
    return all ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a list of streams");
}

fan_status fan__stream_barrier(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = 0; q->legacy && m->recordings && i < m->nqueues; i++) {
        const fan_sim_queue *other = m->queues[i];
        if (other->recording && other->device == q->device && other->blocking)
            status = fan__recording_refuse(q, fan_capture_break(&other->recording->capture, FAN_CAPTURE_IMPLICIT),
                                           "work", err);
    }
    FAN_TRY(status);
    if (!q->blocking)
        return FAN_OK;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *other = m->queues[i];
        if (other == q || other->device != q->device || !(q->legacy ? other->blocking : other->legacy))
            continue;
        fan__sim_access(m, other->name, false);
        FAN_TRY(fan__queue_wait(m, q, (fan_sim_point){other, other->queued}, err));
        /* The host's clock is not needed: a sync queues nothing. */
        if (fan_race_check_sync(m->race_check, q->lane, fan_race_check_clock(m->race_check, other->lane)) != FAN_OK)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        q->end_us = fan__later(q->end_us, other->end_us);
    }
    return FAN_OK;
}

fan_status fan__sim_event_init(fan_event *e, fan_error *err)
{
    fan_sim *m = fan__sim_machine(e->device);
    fan_sim_event *ev = fan_calloc(sizeof *ev);
    if (!ev)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
    fan_clock_init(&ev->clock);
    fan_clock_init(&ev->place);
    fan__sim_lock(m);
    fan_status status = fan_host_sched_given_up(m->host_sched) == FAN_GOING ? fan__sim_enter(m, "event_init", err)
                                                                            : FAN_OK; /* as in fan__sim_record */
    if (status == FAN_OK)
        ev->name = fan__sim_new_name(m, OF_EVENT);
    fan__sim_unlock(m);
    if (status == FAN_OK)
        e->impl = ev;
    else
        fan_free(ev);
    return status;
}

void fan__sim_event_fini(fan_event *e)
{
    fan_sim *m = fan__sim_machine(e->device);
    fan_sim_event *ev = e->impl;
    fan__sim_lock(m);
    fan__queue_drop(ev->point.queue);
    fan__recording_drop(ev->recording);
    fan__queue_sweep(m);
    fan__sim_unlock(m);
    fan_clock_fini(&ev->place);
    fan_clock_fini(&ev->clock);
    fan_free(ev);
}

/* event_name: gives a reused pooled event a new name. Its first call is its maker's record. */
static void event_name(fan_sim *m, const fan_event *e)
{
    fan_sim_event *ev = e->impl;
    if (ev->id == e->id)
        return;
    if (ev->id)
        ev->name = fan__sim_new_name(m, OF_EVENT);
    ev->id = e->id;
}

/* event_set_point: makes ev represent all that q has queued, uncaptured. */
static void event_set_point(fan_sim *m, fan_sim_event *ev, fan_sim_queue *q)
{
    fan__recording_drop(ev->recording);
    ev->recording = NULL;
    fan__queue_drop(ev->point.queue);
    q->refs++;
    ev->point = (fan_sim_point){q, q->queued};
    ev->us = fan__later(q->end_us, m->host_us[fan__sim_host(m)]);
}

fan_status fan__sim_record(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_sim *m = fan__sim_machine(s->device);
    fan_sim_event *ev = e->impl;
    fan_sim_queue *q = fan__queue_of(s);
    fan_status status;
    fan__sim_lock(m);
    if (fan_host_sched_given_up(m->host_sched) != FAN_GOING) {
        status = FAN_OK; /* nothing runs any more, and memory must still be freed */
        goto done;
    }
    FAN_GO(fan__sim_enter(m, "record", err));
    event_name(m, e);
    if (q->recording) {
        status = fan__recording_record(ev, q, err);
        goto done;
    }
    FAN_GO(fan__stream_barrier(m, q, err));
    if (fan_race_check_record(m->race_check, q->lane, fan__sim_lane(m), &ev->clock) != FAN_OK) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
        goto done;
    }
    fan__sim_access(m, q->name, true);
    fan__sim_access(m, ev->name, true);
    event_set_point(m, ev, q);
    ev->denied = 0;
done:
    fan__sim_unlock(m);
    return status;
}

fan_status fan__sim_note(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_sim *m = fan__sim_machine(s->device);
    fan_sim_event *ev = e->impl;
    fan_sim_queue *q = fan__queue_of(s);
    fan_status status = FAN_OK;
    fan__sim_lock(m);
    if (fan_host_sched_given_up(m->host_sched) != FAN_GOING)
        goto done;
    FAN_GO(fan__sim_enter(m, "record", err));
    FAN_GO(fan__recording_none(q, "record", err));
    event_name(m, e);
    event_set_point(m, ev, q);
    ev->clock.n = 0; /* it orders nothing */
done:
    fan__sim_unlock(m);
    return status;
}

fan_status fan__sim_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    fan_sim *m = fan__sim_machine(s->device);
    const fan_sim_event *ev = e->impl;
    fan_sim_queue *q = fan__queue_of(s);
    fan_status status;
    bool never = false, captured;
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "wait", err));
    if (fan__sim_machine(e->device) != m) {
        status = fan_fail(err, FAN_ERR_VALUE, "a stream cannot wait for an event of another machine");
        goto done;
    }
    event_name(m, e);
    fan__sim_access(m, ev->name, false);
    FAN_GO(fan__recording_wait(q, ev, &captured, err));
    if (captured)
        goto done;
    never = !ev->point.queue;
    if (never)
        goto done;
    FAN_GO(fan__stream_barrier(m, q, err));
    FAN_GO(fan__queue_wait(m, q, ev->point, err));
    /* The host's clock is not joined at a wait: an elided wait would not join it either. */
    if (fan_race_check_sync(m->race_check, q->lane, &ev->clock) != FAN_OK) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        goto done;
    }
    fan__sim_access(m, q->name, true);
    q->end_us = fan__later(q->end_us, ev->us);
done:
    fan__sim_unlock(m);
    if (never && m->hooks.warn) {
        char text[128];
        snprintf(text, sizeof text, "stream %llu of sim:%d waits for an event that was never recorded: that is no wait",
                 (unsigned long long)s->handle, s->device->index);
        m->hooks.warn(m->hooks.ctx, text);
    }
    return status;
}

void fan__sim_elided(fan_stream *s, fan_event *e)
{
    fan_sim *m = fan__sim_machine(s->device);
    const fan_sim_event *ev = e->impl;
    fan__sim_lock(m);
    fan__sim_access(m, fan__queue_of(s)->name, false);
    fan__sim_access(m, ev->name, false);
    if (m->checking && !fan_clock_leq(&ev->clock, fan_race_check_clock(m->race_check, fan__queue_of(s)->lane)))
        m->unsound++;
    fan__sim_unlock(m);
}

fan_status fan__sim_query(fan_event *e, bool *done, fan_error *err)
{
    fan_sim *m = fan__sim_machine(e->device);
    fan_sim_event *ev = e->impl;
    fan_status status;
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "query", err));
    FAN_GO(fan__recording_has_time(ev, e, "query", err));
    fan__sim_access(m, ev->name, false);
    fan__sim_access(m, FAN__NAME(OF_PROGRESS, 0), true);
    fan__sim_access(m, FAN__NAME(OF_QUEUED, 0), false);
    fan__run_settle(m);
    *done = true;
    if (ev->point.queue) {
        bool chosen = m->has_chooser && m->chooser.pick && !fan__sim_here.kernels && m->config.run_work;
        *done = fan__run_has_passed(ev);
        if (chosen && !fan_clock_leq(&ev->clock, fan_race_check_clock(m->race_check, fan__sim_lane(m)))) {
            int said = ev->denied < FAN_ASKS ? fan_host_sched_pick(m->host_sched, 2) : 1;
            if (said >= 0) {
                *done = said == 1;
                if (!*done)
                    ev->denied++;
                else
                    FAN_GO(fan__run_for(m, ev->point, 0, done, err));
                if (said == 1 && !*done)
                    fan_sched_not_ready(); /* it never will, unless another thread acts */
            }
        }
    }
    if (*done && ev->point.queue)
        status = fan__run_join(m, &ev->clock, err);
done:
    fan__sim_unlock(m);
    return status;
}

bool fan__sim_peek(fan_event *e)
{
    fan_sim *m = fan__sim_machine(e->device);
    fan__sim_lock(m);
    fan__run_settle(m);
    const fan_sim_event *ev = e->impl;
    bool done = (fan__run_has_passed(ev) && !ev->recording) || fan_host_sched_given_up(m->host_sched) != FAN_GOING;
    fan__sim_unlock(m);
    return done;
}

fan_status fan__sim_sync(fan_stream *s, fan_error *err)
{
    fan_sim *m = fan__sim_machine(s->device);
    fan_sim_queue *q = fan__queue_of(s);
    fan_status status;
    if (m->dying)
        return FAN_OK;
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "sync", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    FAN_GO(fan__recording_none(q, "synchronize", err));
    FAN_GO(fan__stream_barrier(m, q, err));
    fan__sim_access(m, q->name, q->blocking);
    fan__sim_access(m, FAN__NAME(OF_PROGRESS, 0), false);
    FAN_GO(fan__run_finish(m, q, err));
done:
    fan__sim_unlock(m);
    if (status == FAN_OK)
        fan_sync_trace(s->device, s, NULL);
    return status;
}

fan_status fan__sim_event_sync(fan_event *e, fan_error *err)
{
    fan_sim *m = fan__sim_machine(e->device);
    const fan_sim_event *ev = e->impl;
    fan_clock then;
    fan_status status;
    if (m->dying)
        return FAN_OK;
    fan_clock_init(&then);
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "event_sync", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    FAN_GO(fan__recording_has_time(ev, e, "synchronize", err));
    fan__sim_access(m, ev->name, false);
    fan__sim_access(m, FAN__NAME(OF_PROGRESS, 0), false);
    double us = ev->us;
    if (!ev->point.queue)
        goto done;
    if (fan_clock_copy(&then, &ev->clock)) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        goto done;
    }
    FAN_GO(fan__run_until(m, ev->point, err));
    status = fan__run_join(m, &then, err);
    m->host_us[fan__sim_host(m)] = fan__later(m->host_us[fan__sim_host(m)], us);
done:
    fan__sim_unlock(m);
    fan_clock_fini(&then);
    if (status == FAN_OK)
        fan_sync_trace(e->device, NULL, e);
    return status;
}
