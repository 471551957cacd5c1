/* sum: sums, copies on the device, statistics, zeros. */
#ifndef FAN_DEVICE_CUDA_SUM_H
#define FAN_DEVICE_CUDA_SUM_H

#include "device/cuda/launch.h"

fan_status fan__cuda_sum(const fan__launch_ctx *s, const fan_array *out, const fan_operand *in, size_t n,
                         const fan_scale *scale, fan_error *err);
fan_status fan__cuda_copy(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);
/* fan__cuda_measure: computes the statistics of an existing array, as those of its own sum, which is not written. */
fan_status fan__cuda_measure(fan__launch_ctx *s, const fan_job *job, fan_error *err);
fan_status fan__cuda_zero(const fan__launch_ctx *s, const fan_array *out, fan_error *err);

/* reduce: sums over axes (D7). */
/* fan__cuda_reduce: fan_reduce (array/reduce.h), queued; the same bits. */
fan_status fan__cuda_reduce(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);

/* copy: copies between host and device, and sums made on the host. */
fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);
fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src, fan_error *err);
/* fan__cuda_exact: makes an exact sum on the host, because there is no kernel for it. Blocks. */
fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err);

#endif
