/* Host threads: the reports of a machine's spawned thread to its scheduler, the search and the
 * checker. And the control of a machine by tests and users: run queued work, count, fail. */
#include "base/fault.h"
#include "device/memory.h"
#include "device/sim/machine.h"

fan_status fan_sim_spawn(fan_sim *machine, int *actor, fan_error *err)
{
    int i = -1;
    fan_status status;
    *actor = -1;
    fan__sim_lock(machine);
    fan__sim_access_state(machine, OF_ACTORS, FAN_SCHED_WRITE);
    FAN_GO(fan__sim_alive(machine, err));
    FAN_GO(fan_host_sched_spawn(machine->host_sched, &i, err));
    FAN_GO(fan__queue_host(machine, 1 + (size_t)i, (uint64_t)i, err));
    const fan_clock *now = fan_race_check_clock(machine->race_check, fan__sim_lane(machine));
    if (fan_race_check_sync(machine->race_check, machine->host_lane[1 + i], now) != FAN_OK)
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread"));
    machine->host_us[1 + i] = *fan__host_clock(machine);
    *actor = i;
done:
    fan__sim_unlock(machine);
    if (status != FAN_OK && i >= 0)
        fan_host_sched_end(machine->host_sched, i);
    return status;
}

static void thread_yield(void *ctx)
{
    fan_sim *machine = ctx;
    fan__sim_thread *here = &fan__sim_here;
    bool again = here->fresh;
    here->fresh = false;
    if (!here->kernels && !again)
        fan_host_sched_yield(machine->host_sched, here->actor);
}

static bool thread_begin(void *ctx)
{
    fan_sim *machine = ctx;
    fan__sim_thread *here = &fan__sim_here;
    if (here->kernels || FAN_FAULT(NO_TURNS))
        return true;
    if (!here->vain)
        fan_host_sched_polled(machine->host_sched, here->actor, false);
    here->vain = false;
    fan_host_sched_yield(machine->host_sched, here->actor);
    here->fresh = true;
    return !fan_sim_gave_up(machine);
}

static void thread_end(void *ctx)
{
    (void)ctx; /* the thread's own */
    fan__sim_here.fresh = false;
}

static void thread_not_ready(void *ctx)
{
    fan_sim *machine = ctx;
    if (fan__sim_here.kernels)
        return;
    fan__sim_here.vain = true;
    fan_host_sched_polled(machine->host_sched, fan__sim_here.actor, true);
}

static void thread_changed(void *ctx, uint64_t mutex)
{
    fan_sim *machine = ctx;
    fan_host_sched_changed(machine->host_sched, fan__sim_here.actor, mutex);
}

/* thread_mutex_number: returns the number of a mutex for the search, the same in every run: for one
 * of a spawned thread, that thread and the index among its mutexes; for others, the index among
 * all. */
static uint64_t thread_mutex_number(const fan_sim *machine, uint64_t id)
{
    if (id & MADE_HERE)
        return (id & OF_ITS_MAKER) | (OF_ITS_MAKER + 1);
    return id - machine->mutex_base;
}

static uint64_t thread_name(void *ctx)
{
    fan_sim *machine = ctx;
    size_t by = fan__sim_maker();
    fan__sim_lock(machine);
    uint64_t number = (uint64_t)by << 40 | ++machine->made[by];
    fan__sim_unlock(machine);
    return MADE_HERE | (machine->serial & 0xfff) << 47 | number;
}

static void thread_access(void *ctx, fan_thing thing, uint64_t id, fan_sched_mode mode)
{
    static const int kinds[] = {
        [FAN_THING_LOCKED] = OF_MUTEX,      [FAN_THING_BUDGET] = OF_BUDGET,
        [FAN_THING_COUNTERS] = OF_COUNTERS, [FAN_THING_HOST_MEMORY] = OF_HOST,
        [FAN_THING_OPTIONS] = OF_OPTIONS,   [FAN_THING_POOL] = OF_POOL,
        [FAN_THING_GRAPH] = OF_GRAPH};
    fan_sim *machine = ctx;
    uint64_t number = 0;
    if (id)
        number = thread_mutex_number(machine, id);
    if (thing == FAN_THING_HOST_MEMORY || thing == FAN_THING_GRAPH)
        number = (uint64_t)fan__sim_here.apart;
    fan__sim_access(machine, FAN__NAME(kinds[thing], number), mode);
    if (thing != FAN_THING_LOCKED)
        return;
    fan__sim_lock(machine); /* state guarded by the mutex was written before */
    (void)fan_race_check_locked(machine->race_check, fan__sim_lane(machine), id);
    if (mode == FAN_SCHED_WRITE || mode == FAN_SCHED_COUNT)
        (void)fan_race_check_unlocking(machine->race_check, fan__sim_lane(machine), id);
    fan__sim_unlock(machine);
}

static uint64_t thread_mutex_name(const fan_sim *machine, uint64_t id)
{
    return FAN__NAME(OF_MUTEX, thread_mutex_number(machine, id));
}

static void thread_await(void *ctx, uint64_t mutex)
{
    fan_sim *machine = ctx;
    char call_site[FAN__SITE];
    fan__sim_call_site(machine, call_site, sizeof call_site);
    fan_host_sched_wait(machine->host_sched, fan__sim_here.actor, mutex, call_site);
}

static void thread_reached(void *ctx, uint64_t mutex)
{
    fan_sim *machine = ctx;
    fan__sim_lock(machine);
    (void)fan_race_check_locked(machine->race_check, fan__sim_lane(machine), mutex);
    fan__sim_unlock(machine);
}

static bool thread_wait(void *ctx, uint64_t mutex)
{
    fan_sim *machine = ctx;
    fan__sim_lock(machine);
    fan__sim_access(machine, thread_mutex_name(machine, mutex), false);
    fan__sim_unlock(machine);
    thread_await(ctx, mutex);
    return true;
}

static void thread_locked(void *ctx, uint64_t mutex)
{
    fan_sim *machine = ctx;
    fan_host_sched_locked(machine->host_sched, fan__sim_here.actor, mutex);
    fan__sim_lock(machine);
    fan__sim_access(machine, thread_mutex_name(machine, mutex), true);
    (void)fan_race_check_locked(machine->race_check, fan__sim_lane(machine), mutex);
    fan__sim_unlock(machine);
}

static void thread_unlocking(void *ctx, uint64_t mutex)
{
    fan_sim *machine = ctx;
    fan__sim_lock(machine);
    fan__sim_access(machine, thread_mutex_name(machine, mutex), true);
    (void)fan_race_check_unlocking(machine->race_check, fan__sim_lane(machine), mutex);
    fan__sim_unlock(machine);
    fan_host_sched_unlocking(machine->host_sched, fan__sim_here.actor, mutex);
}

/* thread_spawn: the new thread holds the machine until it has left, or is refused. */
static int thread_spawn(void *ctx)
{
    fan_sim *machine = ctx;
    int actor = -1;
    if (fan_sim_spawn(machine, &actor, NULL) != FAN_OK)
        return -1;
    fan_sim_hold(machine);
    return actor;
}

static bool thread_enter(void *ctx, int actor)
{
    fan_sim *machine = ctx;
    bool go = fan_sim_thread_begin(machine, actor);
    if (!go)
        fan_sim_drop(machine);
    return go;
}

static void thread_leave(void *ctx, int actor)
{
    fan_sim *machine = ctx;
    fan_sim_thread_end(machine, actor);
    fan_sim_drop(machine);
}

static bool thread_refused(void *ctx, int actor)
{
    const fan_sim *machine = ctx;
    return fan_host_sched_refused(machine->host_sched, actor);
}

bool fan_sim_thread_begin(fan_sim *machine, int actor)
{
    fan_sim_hold(machine);
    if (!fan_host_sched_begin(machine->host_sched, actor)) {
        fan_sim_drop(machine);
        return false;
    }
    fan__sim_here = (fan__sim_thread){
        .machine = machine,
        .actor = actor,
        .kernels = fan__sim_here.kernels,
        .hooks =
            {
                .yield = thread_yield,
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
                .ctx = machine,
            },
    };
    fan_thread_set_hooks(&fan__sim_here.hooks);
    return true;
}

void fan_sim_thread_apart(int number)
{
    fan__sim_here.apart = number;
}

void fan_sim_thread_end(fan_sim *machine, int actor)
{
    bool mine = fan__sim_here.machine == machine && fan__sim_here.actor == actor;
    if (mine) {
        fan__sim_access(machine, FAN__NAME(OF_THREAD, (uint64_t)actor), FAN_SCHED_WRITE);
        fan_thread_set_hooks(NULL);
        fan__sim_here.machine = NULL;
    }
    fan_host_sched_end(machine->host_sched, actor);
    if (mine)
        fan_sim_drop(machine);
}

fan_status fan_sim_join(fan_sim *machine, fan_error *err)
{
    if (fan__sim_actor(machine) >= 0)
        return fan_fail(err, FAN_ERR_STATE, "a host thread of the machine cannot join its threads");
    fan__sim_lock(machine);
    fan_status status = fan__sim_alive(machine, err);
    fan__sim_unlock(machine);
    FAN_TRY(status);
    if (fan_host_sched_count(machine->host_sched) == 0)
        return FAN_OK;
    status = fan_host_sched_join(machine->host_sched, err);
    fan__sim_lock(machine);
    for (size_t i = 1; i < 1 + FAN_ACTORS; i++) {
        if (!machine->has_lane[i])
            continue;
        const fan_clock *then = fan_race_check_clock(machine->race_check, machine->host_lane[i]);
        /* lanes of threads have room for all lanes */
        (void)fan_race_check_sync(machine->race_check, machine->host_lane[0], then);
        machine->host_us[0] = fan__later(machine->host_us[0], machine->host_us[i]);
    }
    fan__sim_unlock(machine);
    return status;
}

void fan_sim_read_thread(fan_sim *machine, int actor)
{
    fan__sim_access(machine, FAN__NAME(OF_THREAD, (uint64_t)actor), FAN_SCHED_READ);
}

fan_status fan_sim_after_thread(fan_sim *machine, int actor, fan_error *err)
{
    fan_status status = FAN_OK;
    fan__sim_lock(machine);
    if (actor >= 0 && actor < FAN_ACTORS && machine->has_lane[1 + actor]) {
        status = fan__run_join(
            machine, fan_race_check_clock(machine->race_check, machine->host_lane[1 + actor]), err);
    }
    fan__sim_unlock(machine);
    return status;
}

void fan_sim_read_all(fan_sim *machine)
{
    fan__sim_access_state(machine, OF_CALLS, FAN_SCHED_DECIDE);
    fan__sim_access_state(machine, OF_STREAMS, FAN_SCHED_DECIDE);
}

/* ---- control ---- */

fan_status fan_sim_synchronize(fan_sim *machine, fan_error *err)
{
    fan_status status;
    if (fan__sim_actor(machine) < 0 && fan_host_sched_count(machine->host_sched) != 0)
        FAN_TRY(fan_sim_join(machine, err));
    fan_yield();
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter(machine, "synchronize", err));
    FAN_GO(fan__recording_break_all(machine, "synchronize", true, FAN_CAPTURE_GLOBAL, err));
    fan__sim_access_state(machine, OF_PROGRESS, false);
    fan__sim_access_state(machine, OF_QUEUED, false);
    for (size_t i = 0; i < machine->nqueues; i++)
        fan__sim_access(machine, machine->queues[i]->name, false);
    FAN_GO(fan__run_until(machine, (fan_sim_point){NULL, 0}, err));
    for (size_t i = 0; i < machine->nqueues; i++) {
        const fan_sim_queue *queue = machine->queues[i];
        const fan_clock *then = fan_race_check_clock(machine->race_check, queue->lane);
        FAN_GO(fan__run_join(machine, then, err));
        fan__host_until(machine, queue->end_us);
    }
    FAN_GO(fan__sim_raise_pending(machine, err));
done:
    fan__sim_unlock(machine);
    if (status == FAN_OK) {
        for (int i = 0; i < machine->config.devices; i++)
            fan_device_poll(&machine->parts[i].device);
    }
    return status;
}

fan_status fan_sim_step(fan_sim *machine, bool *ran, fan_error *err)
{
    fan_status status;
    *ran = false;
    fan_yield();
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter(machine, "step", err));
    FAN_GO(fan__sim_raise_pending(machine, err));
    fan__sim_access_state(machine, OF_PROGRESS, true);
    fan__sim_access_state(machine, OF_QUEUED, false);
    while (machine->executor && machine->executor != fan_thread_id())
        fan__run_stand_by(machine);
    fan_sim_queue *queue = fan__run_pick(machine);
    if (queue) {
        *ran = true;
        FAN_GO(fan__run_one(machine, queue, err));
        fan__run_settle(machine);
    }
done:
    fan__queue_sweep(machine);
    fan__sim_unlock(machine);
    return status;
}

/* control_count: reads a counter that other threads may change. */
static uint64_t control_count(fan_sim *machine, const uint64_t *count)
{
    fan__sim_lock(machine);
    uint64_t n = *count;
    fan__sim_unlock(machine);
    return n;
}

uint64_t fan_sim_races(fan_sim *machine)
{
    return control_count(machine, &machine->races);
}

#ifdef FAN_TEST
bool fan_sim_first_race(fan_sim *machine, fan_race *out)
{
    fan__sim_lock(machine);
    bool some = machine->races > 0;
    if (some)
        *out = machine->first;
    fan__sim_unlock(machine);
    return some;
}
#endif

fan_status fan_sim_pending(fan_sim *machine, fan_error *err)
{
    fan__sim_lock(machine);
    fan_status status = fan__sim_raise_pending(machine, err);
    fan__sim_unlock(machine);
    return status;
}

void fan_sim_check(fan_sim *machine, bool on)
{
    fan__sim_lock(machine);
    machine->checking = on;
    fan__sim_unlock(machine);
}

void fan_sim_leave_out(fan_sim *machine, uint64_t plan_bits)
{
    fan__sim_lock(machine);
    machine->left_out = plan_bits;
    fan__sim_unlock(machine);
}

#ifdef FAN_TEST
void fan_sim_fail_at(fan_sim *machine, int64_t index, fan_status status)
{
    fan__sim_lock(machine);
    machine->fail_at = index;
    machine->planned = true;
    machine->fail_with = status;
    fan__sim_unlock(machine);
}

uint64_t fan_sim_calls(fan_sim *machine)
{
    return control_count(machine, &machine->calls);
}

uint64_t fan_sim_unsound(fan_sim *machine)
{
    return control_count(machine, &machine->unsound);
}
#endif

double fan_sim_host_us(fan_sim *machine)
{
    double us = 0;
    fan__sim_lock(machine);
    for (size_t i = 0; i < 1 + FAN_ACTORS; i++)
        us = fan__later(us, machine->host_us[i]);
    fan__sim_unlock(machine);
    return us;
}

double fan_sim_device_us(fan_sim *machine)
{
    fan__sim_lock(machine);
    double us = machine->device_us;
    fan__sim_unlock(machine);
    return us;
}

void fan_sim_limit(fan_sim *machine, size_t steps)
{
    fan_host_sched_limit(machine->host_sched, steps);
}

size_t fan_sim_steps(fan_sim *machine)
{
    return fan_host_sched_steps(machine->host_sched);
}

int fan_sim_break(fan_sim *machine, const char *text)
{
    return fan_host_sched_break(machine->host_sched, text);
}

bool fan_sim_abandoned(const fan_sim *machine)
{
    return fan_host_sched_given_up(machine->host_sched) == FAN_ABANDONED;
}

bool fan_sim_gave_up(const fan_sim *machine)
{
    return fan_host_sched_given_up(machine->host_sched) != FAN_GOING;
}

bool fan_sim_stuck(fan_sim *machine, int actor)
{
    return fan_host_sched_stuck(machine->host_sched, actor);
}

void fan_sim_host_schedule(const fan_sim *machine, char *buf, size_t size)
{
    fan_host_sched_schedule(machine->host_sched, buf, size);
}
