/* recorder: the entries for graph trees: captures streams, and launches the graph. */
#ifndef FAN_DEVICE_CUDA_RECORDER_H
#define FAN_DEVICE_CUDA_RECORDER_H

#include "device/cuda/part.h"
#include "device/job.h"

extern const fan_recorder fan__cuda_recorder;

/* fan__cuda_recorder_note: adds the accesses of `job`, queued under `capture`, to the recording of that capture, if
 * any. FAN_ERR_NOMEM: nothing was added. */
fan_status fan__cuda_recorder_note(fan_cuda *c, uint64_t capture, const fan_job *job, fan_error *err);

#endif
