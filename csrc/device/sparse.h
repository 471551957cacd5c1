/* sparse: sums of sparse data on a device. */
#ifndef FAN_DEVICE_SPARSE_H
#define FAN_DEVICE_SPARSE_H

#include "array/sparse.h"
#include "device/stream.h"

/* fan_device_sparse_merge: fan_sparse_merge for parts on device d, ordered by s. COO without `coalesce` and without
 * result rounding is queued; anything else copies the parts to the host (blocks), merges there and uploads. */
fan_status fan_device_sparse_merge(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n, bool coalesce,
                                   fan_dtype result, const fan_scale *scale, fan_sparse **out, fan_error *err);

#endif
