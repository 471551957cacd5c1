#include "device/sim/call.h"

#include "device/sim/footprint.h"
#include "device/sim/race_text.h"

void fan__sim_call_site(const fan_sim *m, char *buf, size_t size)
{
    buf[0] = '\0';
    if (m->hooks.call_site)
        m->hooks.call_site(m->hooks.ctx, buf, size);
}

fan_status fan__sim_alive(fan_sim *m, fan_error *err)
{
    switch (fan_host_sched_given_up(m->host_sched)) {
    case FAN_ABANDONED:
        return fan_fail(err, FAN_ERR_STATE, "abandoned: the machine ends this run");
    case FAN_DEADLOCKED:
        return fan_fail(err, FAN_ERR_DEADLOCK, "the machine gave up: its host threads are in a deadlock");
    case FAN_GOING:
        break;
    }
    return FAN_OK;
}

/* call_planned: fails, in test builds, if this is the call that fan_sim_fail_at selected. */
static fan_status call_planned(fan_sim *m, const char *call, fan_error *err)
{
#ifdef FAN_TEST
    if (m->planned) /* calls after the failed one depend on it, too */
        fan__sim_touch(m, FAN__NAME(OF_FAULTS, 0), true);
    if (m->fail_at >= 0 && m->fail_at-- == 0)
        return fan_fail_code(err, m->fail_with, m->fail_with == FAN_ERR_DEVICE ? 999 : 2,
                             "%s of the simulated device failed, as planned", call);
#endif
    (void)m, (void)call, (void)err;
    return FAN_OK;
}

fan_status fan__sim_enter(fan_sim *m, const char *call, fan_error *err)
{
    FAN_TRY(fan__sim_alive(m, err));
    m->calls++;
    fan__sim_touch(m, FAN__NAME(OF_CALLS, 0), FAN_TOUCH_COUNTS);
    fan__sim_touch(m, FAN__NAME(OF_CAPTURES, 0),
                   m->recordings ? FAN_TOUCH_WRITES : FAN_TOUCH_READS); /* a call may join a capture, or break it */
    return call_planned(m, call, err);
}

fan_status fan__sim_raise(fan_sim *m, const fan_race *race, fan_error *err)
{
    char text[FAN_ERROR_TEXT];
    fan__sim_race_text(m, race, text, sizeof text);
    return fan_fail(err, FAN_ERR_RACE, "%s", text);
}

fan_status fan__sim_raise_pending(fan_sim *m, fan_error *err)
{
    if (!m->has_pending)
        return FAN_OK;
    m->has_pending = false;
    return fan__sim_raise(m, &m->pending, err);
}

void fan__sim_keep_race(fan_sim *m, const fan_race *race)
{
    m->races++;
    if (!m->has_first) {
        m->first = *race;
        m->has_first = true;
    }
}
