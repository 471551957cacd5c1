/* race_text: a race as a sentence: both operations, their streams, their lines, the missing wait. */
#ifndef FAN_DEVICE_SIM_RACE_TEXT_H
#define FAN_DEVICE_SIM_RACE_TEXT_H

#include "device/sim/machine.h"

/* fan__sim_race_text: writes the sentence for a race, with the missing wait. The machine's lock is held. */
void fan__sim_race_text(fan_sim *m, const fan_race *race, char *buf, size_t size);

#endif
