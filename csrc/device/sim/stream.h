/* stream: streams of a machine: the table's entries, and the barriers of the legacy default stream. */
#ifndef FAN_DEVICE_SIM_STREAM_H
#define FAN_DEVICE_SIM_STREAM_H

#include "device/sim/machine.h"

fan_stream *fan__sim_current(fan_device *d);
fan_status fan__sim_find_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err);
void fan__sim_stream_fini(fan_stream *s);
fan_status fan__sim_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status fan__sim_capture_stream(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);

/* fan__stream_barrier: A7: before anything on the legacy default stream, all that its device's blocking streams had
 * queued; before anything on a blocking stream, all that the legacy stream had. FAN_ERR_NOMEM may leave waits behind:
 * they order more than was asked, which no caller can see. */
fan_status fan__stream_barrier(fan_sim *m, fan_sim_queue *q, fan_error *err);

#endif
