/* driver: the CUDA driver of the process, opened at its first use, and the devices and streams that are named of it. */
#ifndef FAN_DEVICE_CUDA_DRIVER_H
#define FAN_DEVICE_CUDA_DRIVER_H

#include "device/cuda/cuda.h"

/* fan_driver_open: the driver; the caller owns a hold in *out. Blocks while it is opened. */
fan_status fan_driver_open(fan_cuda **out, fan_error *err);
/* fan_driver_use: replaces the driver by the library at `path` (copied; NULL: the system's) for all later uses.
 * FAN_ERR_NOMEM. */
fan_status fan_driver_use(const char *path, fan_error *err);

#endif
