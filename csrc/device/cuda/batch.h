/* batch: many sums in one launch: the table's entry. */
#ifndef FAN_DEVICE_CUDA_BATCH_H
#define FAN_DEVICE_CUDA_BATCH_H

#include "device/cuda/part.h"

fan_status fan__cuda_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *states,
                              fan_error *err);

#endif
