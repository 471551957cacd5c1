#include "device/sim/stream.h"

#include "base/mem.h"
#include "device/sim/call.h"
#include "device/sim/footprint.h"
#include "device/sim/queue.h"
#include "device/sim/recording.h"

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

/* stream_listed: the stream of a device with a handle, of those that fan_sim_list named; a hold, or NULL. */
static fan_stream *stream_listed(fan_sim *m, int device, uint64_t handle)
{
    fan_stream *found = NULL;
    fan__sim_lock(m);
    for (size_t i = 0; i < m->nqueues && !found; i++) {
        const fan_sim_queue *q = m->queues[i];
        if (q->stream && q->device == device && q->handle == handle)
            found = fan_stream_try_hold(q->stream);
    }
    fan__sim_unlock(m);
    return found;
}

fan_status fan__sim_find_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err)
{
    char text[32];
    if (handle <= FAN_LEGACY) {
        *out = fan__sim_current(d);
        return *out ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
    *out = stream_listed(fan__sim_machine(d), d->index, handle);
    return *out ? FAN_OK
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
    fan__sim_touch(fan__sim_machine(s->device), FAN__NAME(OF_CAPTURES, 0), FAN_TOUCH_READS);
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
        fan__sim_touch(m, FAN__NAME(OF_STREAMS, 0), FAN_TOUCH_COUNTS);
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

/* stream_legacy_is_free: checks that no stream that the legacy stream of q's device would wait for is captured. */
static fan_status stream_legacy_is_free(fan_sim *m, const fan_sim_queue *q, fan_error *err)
{
    fan_status status = FAN_OK;
    if (!q->legacy || !m->recordings)
        return FAN_OK;
    for (size_t i = 0; i < m->nqueues; i++) {
        const fan_sim_queue *other = m->queues[i];
        if (other->recording && other->device == q->device && other->blocking)
            status = fan__recording_refuse(q, fan_capture_break(&other->recording->capture, FAN_CAPTURE_IMPLICIT),
                                           "work", err);
    }
    return status;
}

fan_status fan__stream_barrier(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    FAN_TRY(stream_legacy_is_free(m, q, err));
    if (!q->blocking)
        return FAN_OK;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *other = m->queues[i];
        if (other == q || other->device != q->device || !(q->legacy ? other->blocking : other->legacy))
            continue;
        fan__sim_touch(m, other->name, false);
        FAN_TRY(fan__queue_wait(m, q, (fan_sim_point){other, other->queued}, err));
        /* The host's clock is not needed: a sync queues nothing. */
        if (fan_race_check_sync(m->race_check, q->lane, fan_race_check_clock(m->race_check, other->lane)) != FAN_OK)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        q->end_us = fan__later(q->end_us, other->end_us);
    }
    return FAN_OK;
}
