/* copy: between the host and the device, and sums that the host makes. */
#ifndef FAN_DEVICE_CUDA_COPY_H
#define FAN_DEVICE_CUDA_COPY_H

#include "device/cuda/launch.h"

fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);
fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src, fan_error *err);
/* fan__cuda_exact: an exact sum. There is no kernel for it: it is made on the host. Blocks. */
fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err);

#endif
