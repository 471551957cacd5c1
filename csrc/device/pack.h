/* pack: copies of jobs that outlive their callers: with the geometry of their arrays, and their uploads, in one
 * block. */
#ifndef FAN_DEVICE_PACK_H
#define FAN_DEVICE_PACK_H

#include "device/job.h"

/* The copy of a waiting job is followed by its arrays' geometry, and its uploads, in one block. In a first pass `to` is
 * NULL and the room is counted. */
typedef struct fan__packer {
    char *to;
    size_t used;
} fan__packer;

void *fan__pack(fan__packer *p, size_t bytes);
fan_job *fan__pack_jobs(fan__packer *p, const fan_job *jobs, size_t n);
fan_array **fan__pack_arrays(fan__packer *p, fan_array *const *arrays, size_t n);

#endif
