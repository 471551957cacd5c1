/* The backend's table; makes and ends machines; the machines that a thread has entered. */
#define _POSIX_C_SOURCE 200809L
#include "base/mem.h"
#include "device/sim/machine.h"
#include "device/memory.h"

#include <pthread.h>
#include <string.h>

#define MEMORY ((size_t)1 << 30)
#define LAUNCH_US 3.0
#define GBYTES_PER_S 1000.0

static atomic_uint_fast64_t machines;

static void sim_free_machine(fan_sim *m)
{
    m->dying = true;
    if (m->parts) {
        fan__recording_drop_all(m);
        fan__queue_drop_work(m);
        for (int i = 0; i < m->config.devices; i++)
            if (m->parts[i].device.backend)
                fan_device_flush(&m->parts[i].device);
        for (int i = 0; i < m->config.devices; i++)
            if (m->parts[i].device.backend)
                fan_device_clear(&m->parts[i].device);
        for (int i = 0; i < m->config.devices; i++)
            fan_arena_fini(&m->parts[i].arena);
    }
    for (size_t i = 0; i < m->nqueues; i++)
        fan_free(m->queues[i]);
    fan__access_take_back(m, (fan_extent){0, UINT64_MAX});
    fan_free(m->parts);
    fan_free(m->queues);
    fan_race_check_free(m->race_check);
    fan_host_sched_free(m->host_sched);
    (void)pthread_cond_destroy(&m->ran);
    (void)pthread_mutex_destroy(&m->lock);
    fan_free(m);
}

static bool sim_closed(const fan_device *d)
{
    return atomic_load_explicit(&fan__sim_machine(d)->closed, memory_order_acquire);
}

static uint64_t sim_left_out(fan_device *d) { return fan__sim_machine(d)->left_out; }

static void sim_device_fini(fan_device *d) { sim_free_machine(fan__sim_machine(d)); }

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
    .closed = sim_closed,
    .left_out = sim_left_out,
    .device_fini = sim_device_fini,
};

static void *sim_before_block(void *ctx)
{
    fan_sim *m = ctx;
    return m->hooks.before_block ? m->hooks.before_block(m->hooks.ctx) : NULL;
}

static void sim_after_block(void *ctx, void *before_)
{
    fan_sim *m = ctx;
    if (m->hooks.after_block)
        m->hooks.after_block(m->hooks.ctx, before_);
}

static void sim_set_host_sched(fan_sim *m)
{
    fan_host_sched_hooks h = {.before_block = sim_before_block, .after_block = sim_after_block, .block_ctx = m};
    if (m->has_chooser) {
        h.choose = m->chooser.choose;
        h.pick = m->chooser.pick;
        h.ctx = m->chooser.ctx;
    }
    fan_host_sched_set_hooks(m->host_sched, &h);
}

/* sim_begin_anew: resets counters and clocks to those of a new machine. */
static void sim_begin_anew(fan_sim *m)
{
    fan_mutex now;
    m->random = m->config.seed;
    m->number = m->calls = m->races = m->unsound = 0;
    m->has_first = m->has_pending = false;
    m->last = 0;
    m->device_us = 0;
#ifdef FAN_TEST
    m->fail_at = -1;
    m->planned = false;
#endif
    memset(m->host_us, 0, sizeof m->host_us);
    memset(m->made, 0, sizeof m->made);
    for (int i = 0; m->parts && i < m->config.devices; i++)
        m->parts[i].given = 0;
    m->mutex_base = 0;
    if (fan_mutex_init(&now) == 0) {
        m->mutex_base = now.id;
        fan_mutex_fini(&now);
    }
}

fan_status fan_sim_new(const fan_sim_config *config, const fan_sim_hooks *hooks, fan_sim **out, fan_error *err)
{
    *out = NULL;
    if (config->devices < 1 || config->devices > FAN_SIM_DEVICES)
        return fan_fail(err, FAN_ERR_VALUE, "a machine has 1 to %d devices, got %d", FAN_SIM_DEVICES, config->devices);
    fan_sim *m = fan_calloc(sizeof *m);
    if (!m)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
    fan_mutexes_numbered();
    (void)pthread_mutex_init(&m->lock, NULL);
    (void)pthread_cond_init(&m->ran, NULL);
    atomic_init(&m->holds, 1);
    atomic_init(&m->captures, 0);
    m->users = 1;
    m->config = *config;
    if (m->config.memory == 0)
        m->config.memory = MEMORY;
    if (!(m->config.launch_us > 0))
        m->config.launch_us = LAUNCH_US;
    if (!(m->config.gbytes_per_s > 0))
        m->config.gbytes_per_s = GBYTES_PER_S;
    if (hooks)
        m->hooks = *hooks;
    m->checking = true;
    m->handle = 1;
    m->serial = atomic_fetch_add(&machines, 1);
    fan_status status = FAN_ERR_NOMEM;
    m->race_check = fan_race_check_new();
    m->host_sched = fan_host_sched_new(config->seed);
    m->parts = fan_calloc((size_t)config->devices * sizeof *m->parts);
    if (!m->race_check || !m->host_sched || !m->parts) {
        fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
        goto done;
    }
    sim_set_host_sched(m);
    FAN_GO(fan__queue_host(m, 0, FAN_MAIN, err));
    for (int i = 0; i < config->devices; i++) {
        fan_sim_device_part *p = &m->parts[i];
        if (fan_arena_init(&p->arena, m->config.memory, config->run_work)) {
            status =
                fan_fail(err, FAN_ERR_NOMEM, "cannot reserve %zu bytes of addresses for sim:%d; ask for less memory",
                         m->config.memory, i);
            goto done;
        }
        if (fan_device_init(&p->device, &fan_sim_backend, m, i, &m->holds)) {
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
            goto done;
        }
        FAN_GO(fan__queue_new(m, i, FAN_LEGACY, true, NULL, &p->legacy, err));
    }
    sim_begin_anew(m);
    *out = m;
done:
    if (status != FAN_OK)
        sim_free_machine(m);
    return status;
}

fan_device *fan_sim_device(fan_sim *m, int index)
{
    return index >= 0 && index < m->config.devices ? &m->parts[index].device : NULL;
}

fan_sim *fan_sim_of(const fan_device *d) { return d->backend == &fan_sim_backend ? fan__sim_machine(d) : NULL; }

uint64_t fan_sim_seed(const fan_sim *m) { return m->config.seed; }

#ifdef FAN_TEST
fan_status fan_sim_reset(fan_sim *m, fan_error *err)
{
    if (fan_host_sched_count(m->host_sched) != 0 && fan_host_sched_given_up(m->host_sched) == FAN_GOING)
        return fan_fail(err, FAN_ERR_STATE, "a machine with host threads cannot be reset: join them first");
    fan__queue_drop_work(m);
    for (int i = 0; i < m->config.devices; i++)
        fan_device_poll(&m->parts[i].device);
    fan__sim_lock(m);
    size_t live = 0;
    for (int i = 0; i < m->config.devices; i++)
        live += m->parts[i].arena.live;
    if (live) {
        fan__sim_unlock(m);
        return fan_fail(err, FAN_ERR_STATE, "a machine cannot be reset while %zu blocks of its memory are held", live);
    }
    for (int i = 0; i < m->config.devices; i++)
        fan_arena_reset(&m->parts[i].arena);
    fan_race_check_reset(m->race_check);
    fan_host_sched_reset(m->host_sched, m->config.seed);
    for (size_t i = 0; i < m->nqueues; i++) {
        m->queues[i]->queued = m->queues[i]->done = 0;
        m->queues[i]->end_us = 0;
    }
    sim_begin_anew(m);
    fan__queue_sweep(m);
    fan__sim_unlock(m);
    return FAN_OK;
}
#endif

void fan_sim_set_chooser(fan_sim *m, const fan_sim_chooser *c)
{
    fan__sim_lock(m);
    m->has_chooser = c != NULL;
    if (c)
        m->chooser = *c;
    sim_set_host_sched(m);
    fan__sim_unlock(m);
}

/* ---- the machines that a thread has entered, and the devices that it can name for that: the innermost one's ---- */

typedef struct entered_machine {
    struct entered_machine *outer;
    fan_sim *machine; /* held */
} entered_machine;

static pthread_key_t entered_key; /* the innermost entered_machine of a thread */
static bool entered_has_key;

static void entered_change(fan_sim *m, size_t by)
{
    fan__sim_lock(m);
    m->entered += by;
    atomic_store_explicit(&m->closed, m->entered == 0, memory_order_release);
    fan__sim_unlock(m);
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

static void entered_make_key(void) { entered_has_key = pthread_key_create(&entered_key, entered_thread_exit) == 0; }

static entered_machine *entered_innermost(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, entered_make_key);
    return entered_has_key ? pthread_getspecific(entered_key) : NULL;
}

fan_status fan_sim_enter(fan_sim *m, fan_error *err)
{
    entered_machine *outer = entered_innermost(), *e = fan_calloc(sizeof *e);
    if (!e || !entered_has_key || pthread_setspecific(entered_key, e)) {
        fan_free(e);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory to enter a machine");
    }
    e->outer = outer;
    e->machine = fan_sim_hold(m);
    entered_change(m, 1);
    return FAN_OK;
}

void fan_sim_leave(const fan_sim *m)
{
    entered_machine *innermost = entered_innermost();
    for (entered_machine **at = &innermost; *at; at = &(*at)->outer)
        if ((*at)->machine == m) {
            entered_machine *left = *at;
            *at = left->outer;
            (void)pthread_setspecific(entered_key, innermost); /* before what the drop may call */
            (void)entered_free(left);
            return;
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
    if (!e)
        return fan_fail(
            err, FAN_ERR_VALUE,
            "device \"sim:%ld\": no simulated machine is entered on this thread: with fanin.sim.Machine(): ..", index);
    if (index >= n)
        return fan_fail(err, FAN_ERR_VALUE,
                        "device \"sim:%ld\": this machine has %d device%s; use fanin.sim.Machine(devices=%ld)", index,
                        n, FAN_PLURAL(n), index + 1);
    *out = fan_device_hold(fan_sim_device(e->machine, (int)index));
    return FAN_OK;
}

const fan_backend_entry fan_sim_entry = {.backend = &fan_sim_backend, .count = entered_count, .find = entered_find};
