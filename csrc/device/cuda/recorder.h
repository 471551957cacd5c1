/* recorder: what graph trees ask of a device: its streams captured, and the graph launched. */
#ifndef FAN_DEVICE_CUDA_RECORDER_H
#define FAN_DEVICE_CUDA_RECORDER_H

#include "device/cuda/part.h"
#include "device/job.h"

extern const fan_recorder fan__cuda_recorder;

/* fan__cuda_recorder_note: `job` is queued under `capture`; a recording that is that capture has what it touches from
 * then on. FAN_ERR_NOMEM: it has nothing of it. */
fan_status fan__cuda_recorder_note(fan_cuda *c, uint64_t capture, const fan_job *job, fan_error *err);

#endif
