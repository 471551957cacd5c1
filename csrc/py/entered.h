/* entered: the simulated machines entered on this thread, and what is named of them: devices and streams. */
#ifndef FAN_PY_ENTERED_H
#define FAN_PY_ENTERED_H

#include "py/machine_part.h"

/* fan_machine_device: device `index` of the innermost machine entered on this thread; a hold, or NULL with ValueError.
 */
fan_device *fan_machine_device(long index);
/* fan_machine_count: how many devices that machine has; 0 where there is none. */
int fan_machine_count(void);
/* fan_machine_stream: the stream of `handle` among those that the machine of `d` made, or its legacy default (1); a
 * hold, or NULL with ValueError. */
fan_stream *fan_machine_stream(fan_device *d, uint64_t handle);

/* Machine._enter, _leave. */
PyObject *fan_machine_enter(PyObject *o, PyObject *none);
PyObject *fan_machine_leave(PyObject *o, PyObject *none);

#endif
