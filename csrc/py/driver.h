/* driver: the CUDA driver of the process, opened when it is first asked for, and what is named of it. */
#ifndef FAN_PY_DRIVER_H
#define FAN_PY_DRIVER_H

#include "device/cuda/cuda.h"
#include "py/py.h"

#define FAN_MOST_DEVICES 65535

/* fan_driver_open: the driver; a hold in *out. Without the GIL, or with it where it is known to be open. */
fan_status fan_driver_open(fan_cuda **out, fan_error *err);
/* fan_driver_opened: the driver, if it was opened: a hold; NULL: it was not. Without the GIL. */
fan_cuda *fan_driver_opened(void);
/* fan_driver_use: another one from now on: its path, of PyMem_RawMalloc, which is taken; NULL: the system's. Without
 * the GIL. */
void fan_driver_use(char *path);

/* fan_cuda_device_arg: "cuda:0" of it; a hold. -1 with an exception. fan_cuda_stream_arg: a hold, or NULL with an
 * exception. */
int fan_cuda_device_arg(const char *name, fan_device **out);
int fan_cuda_device_at(long index, fan_device **out); /* by its number */
fan_stream *fan_cuda_stream_arg(fan_device *d, uint64_t handle);

#endif
