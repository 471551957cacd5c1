/* memory: the driver's memory: the table's entries, scratch memory, and memory of graphs. */
#ifndef FAN_DEVICE_CUDA_MEMORY_H
#define FAN_DEVICE_CUDA_MEMORY_H

#include "device/cuda/part.h"

fan_status fan__cuda_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err);
void fan__cuda_free(fan_device *d, void *data, size_t bytes);
/* fan__cuda_scratch: allocates memory for one job on s; fan__cuda_scratch_free: frees it in the order of s. */
fan_status fan__cuda_scratch(fan_stream *s, size_t bytes, uint64_t *out, fan_error *err);
void fan__cuda_scratch_free(fan_stream *s, uint64_t address);
/* fan__cuda_retain: keeps the memory at `address`, used by captured work, as long as the graph. */
fan_status fan__cuda_retain(fan_cuda_part *p, uint64_t address, uint64_t capture, fan_cu_graph graph, fan_error *err);
/* fan__cuda_trim: frees unused kept memory; returns how many bytes. Blocks. */
size_t fan__cuda_trim(fan_cuda_part *p);
void fan__cuda_blocks_fini(fan_cuda_part *p);

#endif
