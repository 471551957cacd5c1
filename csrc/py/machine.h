/* machine: what the files of streams, arrays, machines, traces and rules ask of each other. */
#ifndef FAN_PY_MACHINE_H
#define FAN_PY_MACHINE_H

#include "py/py.h"

/* fan_machine_device: device `index` of the innermost machine entered on this thread; a hold, or NULL with ValueError.
 */
fan_device *fan_machine_device(long index);
/* fan_machine_count: how many devices that machine has; 0 where there is none. */
int fan_machine_count(void);
/* fan_machine_stream: the stream of `handle` among those that the machine of `d` made, or its legacy default (1); a
 * hold, or NULL with ValueError. */
fan_stream *fan_machine_stream(fan_device *d, uint64_t handle);
/* cuda.c. fan_cuda_device_arg: "cuda:0" of the process's driver; a hold. -1 with an exception. fan_cuda_stream_arg: a
 * hold, or NULL with an exception. */
int fan_cuda_device_arg(const char *name, fan_device **out);
int fan_cuda_device_at(long index, fan_device **out); /* by its number */
fan_stream *fan_cuda_stream_arg(fan_device *d, uint64_t handle);
/* fan_ints: integers as a tuple. */
PyObject *fan_ints(int n, const int64_t *items);
/* fan_shape_arg: integers from a sequence, or one bare integer, into shape[FAN_MAX_NDIM]; their number, or -1 with an
 * exception. */
int fan_shape_arg(PyObject *o, int64_t *shape);
/* fan_raise_sim: fan_raise, and fanin.sim.DeadlockError for FAN_ERR_DEADLOCK. */
PyObject *fan_raise_sim(fan_status status, const fan_error *err);

#endif
