/* scatter: adds sparse data into dense arrays. */
#ifndef FAN_DEVICE_CUDA_SCATTER_H
#define FAN_DEVICE_CUDA_SCATTER_H

#include "device/cuda/launch.h"

/* fan__cuda_scatter: fan_sparse_scatter (array/sparse.h), queued; the same bits. Skips indices beyond the shape. */
fan_status fan__cuda_scatter(const fan__launch_ctx *s, const fan_array *into, const fan_sparse *sp, fan_error *err);

#endif
