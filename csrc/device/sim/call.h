/* call: what every call on a machine asks first: has the machine given up, is this the call that is to fail? And how a
 * race is reported. */
#ifndef FAN_DEVICE_SIM_CALL_H
#define FAN_DEVICE_SIM_CALL_H

#include "device/sim/machine.h"

#define FAN__SITE 96

void fan__sim_call_site(const fan_sim *m, char *buf, size_t size);
fan_status fan__sim_alive(fan_sim *m, fan_error *err);
/* fan__sim_enter: begins every call of the table; the machine is locked. Fails if the machine has given up, or if this
 * is the call that is to fail. */
fan_status fan__sim_enter(fan_sim *m, const char *call, fan_error *err);
fan_status fan__sim_raise(fan_sim *m, const fan_race *race, fan_error *err);
/* fan__sim_raise_pending: reports a race that a release found: done by the first call after it that can. */
fan_status fan__sim_raise_pending(fan_sim *m, fan_error *err);
void fan__sim_keep_race(fan_sim *m, const fan_race *race);

#endif
