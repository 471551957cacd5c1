/* run: jobs of the CUDA backend: the table's entries. */
#ifndef FAN_DEVICE_CUDA_RUN_H
#define FAN_DEVICE_CUDA_RUN_H

#include "device/cuda/part.h"

fan_status fan__cuda_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
fan_status fan__cuda_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err);

/* batch: many sums in one launch: the table's entry. */
fan_status fan__cuda_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *states,
                              fan_error *err);

#endif
