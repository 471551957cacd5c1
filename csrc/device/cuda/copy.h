/* copy: copies between host and device, and sums made on the host. */
#ifndef FAN_DEVICE_CUDA_COPY_H
#define FAN_DEVICE_CUDA_COPY_H

#include "device/cuda/launch.h"

fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);
fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src, fan_error *err);
/* fan__cuda_exact: makes an exact sum on the host, because there is no kernel for it. Blocks. */
fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err);

#endif
