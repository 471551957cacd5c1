/* call: the checks at the start of every call on a machine: has the machine given up, is this call planned to fail? And
 * the report of a race. */
#ifndef FAN_DEVICE_SIM_CALL_H
#define FAN_DEVICE_SIM_CALL_H

#include "device/sim/machine.h"

#define FAN__SITE 96

void fan__sim_call_site(const fan_sim *m, char *buf, size_t size);
fan_status fan__sim_alive(fan_sim *m, fan_error *err);
/* fan__sim_enter: begins every call of the table, with the machine locked. Fails if the machine has given up, or if
 * this call is planned to fail. */
fan_status fan__sim_enter(fan_sim *m, const char *call, fan_error *err);
fan_status fan__sim_raise(fan_sim *m, const fan_race *race, fan_error *err);
/* fan__sim_raise_pending: raises a race that a release found; the first later call that can fail does it. */
fan_status fan__sim_raise_pending(fan_sim *m, fan_error *err);
void fan__sim_keep_race(fan_sim *m, const fan_race *race);

#endif
