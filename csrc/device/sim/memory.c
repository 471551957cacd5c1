#include "device/sim/machine.h"

#include "array/nditer.h"
#include "base/mem.h"
#include "device/memory.h"

fan_status fan__sim_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err)
{
    fan_sim *m = fan__sim_machine(d);
    fan_arena *a = &m->parts[d->index].arena;
    bool host = false;
    (void)stream;
    fan__sim_lock(m);
    fan_status status = fan__sim_enter(m, "alloc", err);
    m->parts[d->index].given += bytes + 128;
    fan__sim_access(m, FAN__NAME(OF_MEMORY, (uint64_t)d->index),
                    m->parts[d->index].given > a->bytes ? FAN_SCHED_DECIDE : FAN_SCHED_COUNT);
    fan_block *b = status == FAN_OK ? fan_arena_alloc(a, bytes, &host) : NULL;
    if (b) {
        b->name = fan__sim_new_name(m, OF_BLOCK);
        b->left = false;
        b->graphs = 0;
        fan_race_check_forget(m->race_check, b->lo, b->hi);
        *out = (void *)b->lo;
    } else if (status == FAN_OK) {
        status = host ? fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s of sim:%d", bytes, FAN_PLURAL(bytes),
                                 d->index)
                      : fan_fail_code(err, FAN_ERR_DEVICE_NOMEM, 2,
                                      "sim:%d is out of memory: %zu byte%s requested, %zu of %zu in use", d->index,
                                      bytes, FAN_PLURAL(bytes), a->in_use, a->bytes);
    }
    fan__sim_unlock(m);
    return status;
}

void fan__sim_free(fan_device *d, void *data, size_t bytes)
{
    fan_sim *m = fan__sim_machine(d);
    (void)bytes;
    fan__sim_lock(m);
    fan__sim_access(m, FAN__NAME(OF_MEMORY, (uint64_t)d->index), FAN_SCHED_COUNT);
    fan_block *b = fan_arena_find(&m->parts[d->index].arena, (uintptr_t)data);
    if (b && b->graphs)
        b->left = true; /* K3 */
    else
        fan_arena_free(&m->parts[d->index].arena, (uintptr_t)data);
    fan__sim_unlock(m);
}

/* Lanes whose clocks the next step must contain. */
typedef struct lane_list {
    uint32_t *list;
    size_t n, cap;
    bool short_of_memory;
} lane_list;

static void lane_list_add(lane_list *l, uint32_t lane)
{
    if (fan_grow((void **)&l->list, &l->cap, l->n + 1, sizeof *l->list))
        l->short_of_memory = true;
    else
        l->list[l->n++] = lane;
}

void fan__sim_dropped(fan_device *d, void *data, size_t bytes, fan_stream *const *streams, size_t n)
{
    fan_sim *m = fan__sim_machine(d);
    lane_list after = {0};
    fan_race race;
    char call_site[FAN__SITE];
    fan__sim_call_site(m, call_site, sizeof call_site);
    fan__sim_lock(m);
    fan__access_take_back(m, fan_extent_flat(data, bytes));
    if (!m->checking || m->dying || fan_host_sched_given_up(m->host_sched) != FAN_GOING)
        goto done;
    for (size_t i = 0; i < n; i++) {
        lane_list_add(&after, fan__queue_of(streams[i])->lane);
        fan__sim_access(m, fan__queue_of(streams[i])->name, false);
    }
    /* The threads that held the memory have dropped it before, so what they waited for is over. */
    for (size_t i = 0; i < 1 + FAN_ACTORS; i++)
        if (m->has_lane[i]) {
            lane_list_add(&after, m->host_lane[i]);
            fan__sim_access(m, FAN__NAME(OF_WAITED, i), false);
        }
    const fan_block *b = fan__access_block(m, data);
    if (b) {
        fan__sim_access(m, b->name, true);
        for (const fan_sim_graph *g = m->graphs; g && b->graphs; g = g->next) {
            bool uses = false;
            for (size_t i = 0; i < g->nblocks && !uses; i++)
                uses = g->blocks[i] == b->lo;
            for (uint32_t i = 0; uses && g->queues && i < g->members; i++)
                if (g->queues[i])
                    lane_list_add(&after, g->queues[i]->lane);
        }
    }
    if (after.short_of_memory)
        goto done;
    fan_status (*release)(fan_race_check *, uint32_t, const uint32_t *, size_t, uintptr_t, uintptr_t, const char *,
                          fan_race *) =
        b && b->graphs ? fan_race_check_let_go
                       : fan_race_check_release; /* a graph that uses the block may be launched again */
    if (release(m->race_check, fan__sim_lane(m), after.list, after.n, (uintptr_t)data, (uintptr_t)data + bytes,
                call_site, &race) == FAN_ERR_RACE) {
        fan__sim_keep_race(m, &race);
        if (!m->has_pending) {
            m->pending = race;
            m->has_pending = true;
        }
    }
done:
    fan__sim_unlock(m);
    fan_free(after.list);
}

fan_status fan__sim_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err)
{
    fan_sim *m = fan__sim_machine(s->device);
    fan_sim_queue *q = fan__queue_of(s);
    fan_race race;
    char call_site[FAN__SITE];
    fan_status status, found;
    fan__sim_call_site(m, call_site, sizeof call_site);
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "read", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    FAN_GO(fan__recording_none(q, "read", err));
    FAN_GO(fan__stream_barrier(m, q, err));
    fan__sim_access(m, q->name, true);
    fan__sim_access(m, FAN__NAME(OF_PROGRESS, 0), false);
    fan__access_report(m, fan__visit_read, src);
    /* a copy on q that the host waits for */
    found = fan__access_judge(m, q->lane, "read", call_site, KEPT_BY_HOST, false, fan__visit_read, src, &race, err);
    if (found != FAN_OK && found != FAN_ERR_RACE) {
        status = found;
        goto done;
    }
    FAN_GO(fan__run_finish(m, q, err));
    m->host_us[fan__sim_host(m)] +=
        (double)fan_dtype_size(src->dtype) * (double)src->size / (m->config.gbytes_per_s * 1e3);
    if (found == FAN_ERR_RACE)
        status = fan__sim_raise(m, &race, err);
done:
    fan__sim_unlock(m);
    if (status == FAN_OK) {
        if (m->config.run_work)
            fan_array_copy(dst, src);
        else
            fan_fill_zero(dst);
        fan_sync_trace(s->device, s, NULL);
    }
    return status;
}

fan_status fan_sim_array(fan_sim *m, int device, fan_dtype dtype, int ndim, const int64_t *shape, const fan_array *init,
                         fan_array **out, fan_error *err)
{
    *out = NULL;
    if (device < 0 || device >= m->config.devices)
        return fan_fail(err, FAN_ERR_VALUE, "no device %d: this machine has %d", device, m->config.devices);
    fan_array *a;
    if (init)
        FAN_TRY(fan_memory_scope_upload(&m->parts[device].device, err));
    FAN_TRY(fan_device_array(&m->parts[device].device, NULL, dtype, ndim, shape, init, &a, err));
    fan__sim_lock(m);
    fan_block *b = fan__access_block(m, a->storage->data);
    if (b)
        b->automatic = true;
    if (init)
        m->host_us[fan__sim_host(m)] +=
            (double)a->size * (double)fan_dtype_size(dtype) / (m->config.gbytes_per_s * 1e3);
    fan__sim_unlock(m);
    if (init && m->config.run_work)
        fan_array_copy(a, init); /* at once: the memory is new to everyone, and its earlier users have passed */
    *out = a;
    return FAN_OK;
}

#ifdef FAN_TEST
fan_status fan_sim_host_read(fan_sim *m, fan_stream *s, const fan_array *dst, const fan_array *a, fan_error *err)
{
    fan_stream *on = NULL;
    if (s) {
        on = fan_stream_hold(s);
    } else {
        fan_sim_device_part *p = a->storage ? fan__access_part(m, (uintptr_t)a->storage->data) : NULL;
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
