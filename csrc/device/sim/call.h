/* call: what every call on a machine begins with: has it given up, is this the call that is to fail; and races told. */
#ifndef FAN_DEVICE_SIM_CALL_H
#define FAN_DEVICE_SIM_CALL_H

#include "device/sim/machine.h"

#define FAN__SITE 96

void fan__sim_call_site(const fan_sim *m, char *buf, size_t size);
fan_status fan__sim_alive(fan_sim *m, fan_error *err);
/* fan__sim_enter: every call of the table begins here, locked: has the machine given up, is this the call that is to
 * fail? */
fan_status fan__sim_enter(fan_sim *m, const char *call, fan_error *err);
fan_status fan__sim_raise(fan_sim *m, const fan_race *race, fan_error *err);
/* fan__sim_raise_pending: a race that a release found, by the first call that can say so. */
fan_status fan__sim_raise_pending(fan_sim *m, fan_error *err);
void fan__sim_keep_race(fan_sim *m, const fan_race *race);

#endif
