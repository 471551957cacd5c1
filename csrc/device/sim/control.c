/* Control of a machine by tests and users: run queued work, count, fail. */
#include "device/memory.h"
#include "device/sim/machine.h"

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
        status = fan_fail_code(err, FAN_ERR_CAPTURE, code, "synchronize: %s (CUDA's code %d)", fan_capture_words(code),
                               code);
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
        m->host_us[fan__sim_host(m)] = fan__later(m->host_us[fan__sim_host(m)], m->queues[i]->end_us);
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

uint64_t fan_sim_races(const fan_sim *m) { return control_count(m, &m->races); }

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

uint64_t fan_sim_calls(const fan_sim *m) { return control_count(m, &m->calls); }

uint64_t fan_sim_unsound(const fan_sim *m) { return control_count(m, &m->unsound); }
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

void fan_sim_limit(fan_sim *m, size_t steps) { fan_host_sched_limit(m->host_sched, steps); }

size_t fan_sim_steps(fan_sim *m) { return fan_host_sched_steps(m->host_sched); }

int fan_sim_break(fan_sim *m, const char *text) { return fan_host_sched_break(m->host_sched, text); }

bool fan_sim_abandoned(const fan_sim *m) { return fan_host_sched_given_up(m->host_sched) == FAN_ABANDONED; }

#ifdef FAN_TEST
bool fan_sim_gave_up(const fan_sim *m) { return fan_host_sched_given_up(m->host_sched) != FAN_GOING; }
#endif

bool fan_sim_stuck(fan_sim *m, int actor) { return fan_host_sched_stuck(m->host_sched, actor); }

void fan_sim_host_schedule(const fan_sim *m, char *buf, size_t size)
{
    fan_host_sched_schedule(m->host_sched, buf, size);
}
