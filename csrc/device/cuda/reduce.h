/* reduce: sums over axes (D7). */
#ifndef FAN_DEVICE_CUDA_REDUCE_H
#define FAN_DEVICE_CUDA_REDUCE_H

#include "device/cuda/launch.h"

/* fan__cuda_reduce: fan_reduce (array/reduce.h), queued; the same bits. */
fan_status fan__cuda_reduce(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);

#endif
