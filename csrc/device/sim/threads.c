/* Host threads: the reports of a machine's spawned thread to its scheduler, the search and the
 * checker. And the control of a machine by tests and users: run queued work, count, fail. */
#include "base/fault.h"
#include "device/memory.h"
#include "device/sim/machine.h"

fan_status fan_sim_spawn(fan_sim *m, int *actor, fan_error *err)
{
    int i = -1;
    bool first;
    fan_status status;
    *actor = -1;
    fan__sim_lock(m);
    fan__sim_access(m, FAN__NAME(OF_ACTORS, 0), FAN_SCHED_WRITE);
    FAN_GO(fan__sim_alive(m, err));
    FAN_GO(fan_host_sched_spawn(m->host_sched, &i, &first, err));
    FAN_GO(fan__queue_host(m, 1 + (size_t)i, (uint64_t)i, err));
    if (fan_race_check_sync(m->race_check, m->host_lane[1 + i],
                            fan_race_check_clock(m->race_check, fan__sim_lane(m))) != FAN_OK) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread");
        goto done;
    }
    m->host_us[1 + i] = m->host_us[fan__sim_host(m)];
    *actor = i;
done:
    fan__sim_unlock(m);
    if (status != FAN_OK && i >= 0)
        fan_host_sched_end(m->host_sched, i);
    return status;
}

static void thread_yield(void *ctx)
{
    fan_sim *m = ctx;
    bool again = fan__sim_here.fresh;
    fan__sim_here.fresh = false;
    if (!fan__sim_here.kernels && !again)
        fan_host_sched_yield(m->host_sched, fan__sim_here.actor);
}

static bool thread_begin(void *ctx)
{
    fan_sim *m = ctx;
    if (fan__sim_here.kernels || FAN_FAULT(NO_TURNS))
        return true;
    if (!fan__sim_here.vain)
        fan_host_sched_polled(m->host_sched, fan__sim_here.actor, false);
    fan__sim_here.vain = false;
    fan_host_sched_yield(m->host_sched, fan__sim_here.actor);
    fan__sim_here.fresh = true;
    return fan_host_sched_given_up(m->host_sched) == FAN_GOING;
}

static void thread_end(void *ctx)
{
    (void)ctx; /* the thread's own */
    fan__sim_here.fresh = false;
}

static void thread_not_ready(void *ctx)
{
    fan_sim *m = ctx;
    if (fan__sim_here.kernels)
        return;
    fan__sim_here.vain = true;
    fan_host_sched_polled(m->host_sched, fan__sim_here.actor, true);
}

static void thread_changed(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan_host_sched_changed(m->host_sched, fan__sim_here.actor, mutex);
}

/* thread_mutex_number: returns the number of a mutex for the search, the same in every run: for one
 * of a spawned thread, that thread and the index among its mutexes; for others, the index among
 * all. */
static uint64_t thread_mutex_number(const fan_sim *m, uint64_t id)
{
    if (id & MADE_HERE)
        return (id & OF_ITS_MAKER) | (OF_ITS_MAKER + 1);
    return id - m->mutex_base;
}

static uint64_t thread_name(void *ctx)
{
    fan_sim *m = ctx;
    size_t by = fan__sim_maker();
    fan__sim_lock(m);
    uint64_t number = (uint64_t)by << 40 | ++m->made[by];
    fan__sim_unlock(m);
    return MADE_HERE | (m->serial & 0xfff) << 47 | number;
}

static void thread_access(void *ctx, fan_thing thing, uint64_t id, fan_sched_mode how)
{
    static const int kinds[] = {
        [FAN_THING_LOCKED] = OF_MUTEX,      [FAN_THING_BUDGET] = OF_BUDGET,
        [FAN_THING_COUNTERS] = OF_COUNTERS, [FAN_THING_HOST_MEMORY] = OF_HOST,
        [FAN_THING_OPTIONS] = OF_OPTIONS,   [FAN_THING_POOL] = OF_POOL,
        [FAN_THING_GRAPH] = OF_GRAPH};
    fan_sim *m = ctx;
    uint64_t number = 0;
    if (id)
        number = thread_mutex_number(m, id);
    if (thing == FAN_THING_HOST_MEMORY || thing == FAN_THING_GRAPH)
        number = (uint64_t)fan__sim_here.apart;
    fan__sim_access(m, FAN__NAME(kinds[thing], number), how);
    if (thing != FAN_THING_LOCKED)
        return;
    fan__sim_lock(m); /* state guarded by the mutex was written before */
    (void)fan_race_check_locked(m->race_check, fan__sim_lane(m), id);
    if (how == FAN_SCHED_WRITE || how == FAN_SCHED_COUNT)
        (void)fan_race_check_unlocking(m->race_check, fan__sim_lane(m), id);
    fan__sim_unlock(m);
}

static uint64_t thread_mutex_name(const fan_sim *m, uint64_t id)
{
    return FAN__NAME(OF_MUTEX, thread_mutex_number(m, id));
}

static void thread_await(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    char call_site[FAN__SITE];
    fan__sim_call_site(m, call_site, sizeof call_site);
    fan_host_sched_wait(m->host_sched, fan__sim_here.actor, mutex, call_site);
}

static void thread_reached(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan__sim_lock(m);
    (void)fan_race_check_locked(m->race_check, fan__sim_lane(m), mutex);
    fan__sim_unlock(m);
}

static bool thread_wait(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan__sim_lock(m);
    fan__sim_access(m, thread_mutex_name(m, mutex), false);
    fan__sim_unlock(m);
    thread_await(ctx, mutex);
    return true;
}

static void thread_locked(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan_host_sched_locked(m->host_sched, fan__sim_here.actor, mutex);
    fan__sim_lock(m);
    fan__sim_access(m, thread_mutex_name(m, mutex), true);
    (void)fan_race_check_locked(m->race_check, fan__sim_lane(m), mutex);
    fan__sim_unlock(m);
}

static void thread_unlocking(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan__sim_lock(m);
    fan__sim_access(m, thread_mutex_name(m, mutex), true);
    (void)fan_race_check_unlocking(m->race_check, fan__sim_lane(m), mutex);
    fan__sim_unlock(m);
    fan_host_sched_unlocking(m->host_sched, fan__sim_here.actor, mutex);
}

/* thread_spawn: the new thread holds the machine until it has left, or is refused. */
static int thread_spawn(void *ctx)
{
    fan_sim *m = ctx;
    int actor = -1;
    if (fan_sim_spawn(m, &actor, NULL) != FAN_OK)
        return -1;
    fan_sim_hold(m);
    return actor;
}

static bool thread_enter(void *ctx, int actor)
{
    fan_sim *m = ctx;
    bool go = fan_sim_thread_begin(m, actor);
    if (!go)
        fan_sim_drop(m);
    return go;
}

static void thread_leave(void *ctx, int actor)
{
    fan_sim *m = ctx;
    fan_sim_thread_end(m, actor);
    fan_sim_drop(m);
}

static bool thread_refused(void *ctx, int actor)
{
    const fan_sim *m = ctx;
    return fan_host_sched_refused(m->host_sched, actor);
}

bool fan_sim_thread_begin(fan_sim *m, int actor)
{
    fan_sim_hold(m);
    if (!fan_host_sched_begin(m->host_sched, actor)) {
        fan_sim_drop(m);
        return false;
    }
    fan__sim_here.m = m;
    fan__sim_here.actor = actor;
    fan__sim_here.fresh = false;
    fan__sim_here.vain = false;
    fan__sim_here.apart = 0;
    fan__sim_here.hooks = (fan_thread_hooks){.yield = thread_yield,
                                             .wait = thread_wait,
                                             .await = thread_await,
                                             .reached = thread_reached,
                                             .locked = thread_locked,
                                             .unlocking = thread_unlocking,
                                             .begin = thread_begin,
                                             .end = thread_end,
                                             .not_ready = thread_not_ready,
                                             .changed = thread_changed,
                                             .access = thread_access,
                                             .name = thread_name,
                                             .spawn = thread_spawn,
                                             .enter = thread_enter,
                                             .leave = thread_leave,
                                             .refused = thread_refused,
                                             .ctx = m};
    fan_thread_set_hooks(&fan__sim_here.hooks);
    return true;
}

void fan_sim_thread_apart(int number)
{
    fan__sim_here.apart = number;
}

void fan_sim_thread_end(fan_sim *m, int actor)
{
    bool mine = fan__sim_here.m == m && fan__sim_here.actor == actor;
    if (mine) {
        fan__sim_access(m, FAN__NAME(OF_THREAD, (uint64_t)actor), FAN_SCHED_WRITE);
        fan_thread_set_hooks(NULL);
        fan__sim_here.m = NULL;
    }
    fan_host_sched_end(m->host_sched, actor);
    if (mine)
        fan_sim_drop(m);
}

fan_status fan_sim_join(fan_sim *m, fan_error *err)
{
    if (fan__sim_actor(m) >= 0)
        return fan_fail(err, FAN_ERR_STATE, "a host thread of the machine cannot join its threads");
    fan__sim_lock(m);
    fan_status status = fan__sim_alive(m, err);
    fan__sim_unlock(m);
    FAN_TRY(status);
    if (fan_host_sched_count(m->host_sched) == 0)
        return FAN_OK;
    status = fan_host_sched_join(m->host_sched, err);
    fan__sim_lock(m);
    for (size_t i = 1; i < 1 + FAN_ACTORS; i++)
        if (m->has_lane[i]) {
            (void)fan_race_check_sync(m->race_check, m->host_lane[0],
                                      /* lanes have room for all lanes */
                                      fan_race_check_clock(m->race_check, m->host_lane[i]));
            m->host_us[0] = fan__later(m->host_us[0], m->host_us[i]);
        }
    fan__sim_unlock(m);
    return status;
}

void fan_sim_read_thread(fan_sim *m, int actor)
{
    fan__sim_access(m, FAN__NAME(OF_THREAD, (uint64_t)actor), FAN_SCHED_READ);
}

fan_status fan_sim_after_thread(fan_sim *m, int actor, fan_error *err)
{
    fan_status status = FAN_OK;
    fan__sim_lock(m);
    if (actor >= 0 && actor < FAN_ACTORS && m->has_lane[1 + actor])
        status =
            fan__run_join(m, fan_race_check_clock(m->race_check, m->host_lane[1 + actor]), err);
    fan__sim_unlock(m);
    return status;
}

void fan_sim_read_event(const fan_event *e)
{
    const fan_sim_event *ev = e->impl;
    fan_sim *m = fan_sim_of(e->device);
    if (!m || !fan__sim_here.m)
        return;
    fan__sim_lock(m);
    fan__sim_access(m, ev->name, FAN_SCHED_READ);
    fan__sim_unlock(m);
}

void fan_sim_access_memory(const fan_device *d, const fan_array *a, bool write)
{
    fan_sim *m = fan_sim_of(d);
    if (!m || !fan__sim_here.m)
        return;
    fan__sim_lock(m);
    const fan_block *b = a->storage ? fan__access_block(m, a->storage->data) : NULL;
    if (b)
        fan__sim_access(m, b->name, write);
    fan__sim_unlock(m);
}

void fan_sim_read_all(fan_sim *m)
{
    fan__sim_access(m, FAN__NAME(OF_CALLS, 0), FAN_SCHED_DECIDE);
    fan__sim_access(m, FAN__NAME(OF_STREAMS, 0), FAN_SCHED_DECIDE);
}

/* ---- control ---- */

fan_status fan_sim_synchronize(fan_sim *m, fan_error *err)
{
    fan_status status;
    if (fan__sim_actor(m) < 0 && fan_host_sched_count(m->host_sched) != 0)
        FAN_TRY(fan_sim_join(m, err));
    fan_yield();
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "synchronize", err));
    for (fan_sim_recording *r = m->recordings; r; r = r->next) {
        int code = fan_capture_break(&r->capture, FAN_CAPTURE_UNSUPPORTED);
        status = fan_fail_code(err, FAN_ERR_CAPTURE, code, "synchronize: %s (CUDA's code %d)",
                               fan_capture_words(code), code);
    }
    if (status != FAN_OK)
        goto done;
    fan__sim_access(m, FAN__NAME(OF_PROGRESS, 0), false);
    fan__sim_access(m, FAN__NAME(OF_QUEUED, 0), false);
    for (size_t i = 0; i < m->nqueues; i++)
        fan__sim_access(m, m->queues[i]->name, false);
    FAN_GO(fan__run_until(m, (fan_sim_point){NULL, 0}, err));
    for (size_t i = 0; i < m->nqueues; i++) {
        FAN_GO(fan__run_join(m, fan_race_check_clock(m->race_check, m->queues[i]->lane), err));
        m->host_us[fan__sim_host(m)] =
            fan__later(m->host_us[fan__sim_host(m)], m->queues[i]->end_us);
    }
    FAN_GO(fan__sim_raise_pending(m, err));
done:
    fan__sim_unlock(m);
    if (status == FAN_OK)
        for (int i = 0; i < m->config.devices; i++)
            fan_device_poll(&m->parts[i].device);
    return status;
}

fan_status fan_sim_step(fan_sim *m, bool *ran, fan_error *err)
{
    fan_status status;
    *ran = false;
    fan_yield();
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "step", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    fan__sim_access(m, FAN__NAME(OF_PROGRESS, 0), true);
    fan__sim_access(m, FAN__NAME(OF_QUEUED, 0), false);
    while (m->executor && m->executor != fan_thread_id())
        fan__run_stand_by(m);
    fan_sim_queue *q = fan__run_pick(m);
    if (q) {
        *ran = true;
        FAN_GO(fan__run_one(m, q, err));
        fan__run_settle(m);
    }
done:
    fan__queue_sweep(m);
    fan__sim_unlock(m);
    return status;
}

/* control_count: reads a counter that other threads may change. */
static uint64_t control_count(const fan_sim *m, const uint64_t *count)
{
    fan__sim_lock((fan_sim *)(uintptr_t)m);
    uint64_t n = *count;
    fan__sim_unlock((fan_sim *)(uintptr_t)m);
    return n;
}

uint64_t fan_sim_races(const fan_sim *m)
{
    return control_count(m, &m->races);
}

#ifdef FAN_TEST
bool fan_sim_first_race(const fan_sim *m, fan_race *out)
{
    fan__sim_lock((fan_sim *)(uintptr_t)m);
    bool some = m->has_first;
    if (some)
        *out = m->first;
    fan__sim_unlock((fan_sim *)(uintptr_t)m);
    return some;
}
#endif

fan_status fan_sim_pending(fan_sim *m, fan_error *err)
{
    fan__sim_lock(m);
    fan_status status = fan__sim_raise_pending(m, err);
    fan__sim_unlock(m);
    return status;
}

void fan_sim_check(fan_sim *m, bool on)
{
    fan__sim_lock(m);
    m->checking = on;
    fan__sim_unlock(m);
}

void fan_sim_leave_out(fan_sim *m, uint64_t plan_bits)
{
    fan__sim_lock(m);
    m->left_out = plan_bits;
    fan__sim_unlock(m);
}

#ifdef FAN_TEST
void fan_sim_fail_at(fan_sim *m, int64_t index, fan_status status)
{
    fan__sim_lock(m);
    m->fail_at = index;
    m->planned = true;
    m->fail_with = status;
    fan__sim_unlock(m);
}

uint64_t fan_sim_calls(const fan_sim *m)
{
    return control_count(m, &m->calls);
}

uint64_t fan_sim_unsound(const fan_sim *m)
{
    return control_count(m, &m->unsound);
}
#endif

double fan_sim_host_us(const fan_sim *m)
{
    double us = 0;
    fan__sim_lock((fan_sim *)(uintptr_t)m);
    for (size_t i = 0; i < 1 + FAN_ACTORS; i++)
        us = fan__later(us, m->host_us[i]);
    fan__sim_unlock((fan_sim *)(uintptr_t)m);
    return us;
}

double fan_sim_device_us(const fan_sim *m)
{
    fan__sim_lock((fan_sim *)(uintptr_t)m);
    double us = m->device_us;
    fan__sim_unlock((fan_sim *)(uintptr_t)m);
    return us;
}

void fan_sim_limit(fan_sim *m, size_t steps)
{
    fan_host_sched_limit(m->host_sched, steps);
}

size_t fan_sim_steps(fan_sim *m)
{
    return fan_host_sched_steps(m->host_sched);
}

int fan_sim_break(fan_sim *m, const char *text)
{
    return fan_host_sched_break(m->host_sched, text);
}

bool fan_sim_abandoned(const fan_sim *m)
{
    return fan_host_sched_given_up(m->host_sched) == FAN_ABANDONED;
}

#ifdef FAN_TEST
bool fan_sim_gave_up(const fan_sim *m)
{
    return fan_host_sched_given_up(m->host_sched) != FAN_GOING;
}
#endif

bool fan_sim_stuck(fan_sim *m, int actor)
{
    return fan_host_sched_stuck(m->host_sched, actor);
}

void fan_sim_host_schedule(const fan_sim *m, char *buf, size_t size)
{
    fan_host_sched_schedule(m->host_sched, buf, size);
}
