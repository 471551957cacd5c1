/* driver: the CUDA driver of the process, opened at its first use, and the devices and streams that are named of it. */
#ifndef FAN_DEVICE_CUDA_DRIVER_H
#define FAN_DEVICE_CUDA_DRIVER_H

#include "device/cuda/cuda.h"

/* fan_driver_open: the driver; the caller owns a hold in *out. Blocks while it is opened. */
fan_status fan_driver_open(fan_cuda **out, fan_error *err);
/* fan_driver_use: replaces the driver by the library at `path` (copied; NULL: the system's) for all later uses.
 * FAN_ERR_NOMEM. */
fan_status fan_driver_use(const char *path, fan_error *err);
/* fan_driver_compile: sets the function that compiles the kernels for a device that has none and passes them to
 * fan_cuda_give_kernels. It is called when the device is first used, without a lock; err has the reason why the device
 * has no kernels. */
typedef fan_status fan_compile_kernels(fan_cuda *c, int index, int compute, fan_error *err);
void fan_driver_compile(fan_compile_kernels *compile);

#endif
