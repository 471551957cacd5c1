/* pack: copies of jobs that outlive their callers: the geometry of their arrays, and what they upload, behind them in
 * one block. */
#ifndef FAN_DEVICE_PACK_H
#define FAN_DEVICE_PACK_H

#include "device/job.h"

/* A job that waits has its arrays' geometry, and what it uploads, behind it in one block. First `to` is NULL and the
 * room is counted. */
typedef struct fan__packer {
    char *to;
    size_t used;
} fan__packer;

void *fan__pack(fan__packer *p, size_t bytes);
fan_job *fan__pack_jobs(fan__packer *p, const fan_job *jobs, size_t n);
fan_array **fan__pack_arrays(fan__packer *p, fan_array *const *arrays, size_t n);

#endif
