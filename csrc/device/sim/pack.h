/* pack: operations of the machine with copies of their jobs. */
#ifndef FAN_DEVICE_SIM_PACK_H
#define FAN_DEVICE_SIM_PACK_H

#include "device/pack.h"
#include "device/sim/machine.h"

/* fan__op_new: makes an op followed by copies of n jobs; n == 0: with room for a kernel alone. */
fan_sim_op *fan__op_new(const fan_job *jobs, size_t n);

#endif
