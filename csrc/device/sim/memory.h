/* memory: memory of the simulated devices: the table's entries. */
#ifndef FAN_DEVICE_SIM_MEMORY_H
#define FAN_DEVICE_SIM_MEMORY_H

#include "device/sim/machine.h"

fan_status fan__sim_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err);
void fan__sim_free(fan_device *d, void *data, size_t bytes);
void fan__sim_dropped(fan_device *d, void *data, size_t bytes, fan_stream *const *streams, size_t n);
fan_status fan__sim_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err);

#endif
