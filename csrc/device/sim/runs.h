/* runs: a view as runs of bytes. */
#ifndef FAN_DEVICE_SIM_RUNS_H
#define FAN_DEVICE_SIM_RUNS_H

#include "array/array.h"

/* The runs of a view: `bytes` at a time, at base + every combination of the axes, the widest stride outermost. */
typedef struct fan__runs {
    uintptr_t base;
    uintptr_t bytes; /* 0: the view is empty */
    int n;           /* axes left */
    int64_t extent[FAN_MAX_NDIM], stride[FAN_MAX_NDIM], at[FAN_MAX_NDIM];
} fan__runs;

void fan__runs_of(const fan_array *a, fan__runs *out);
/* fan__runs_next: moves to the next run; false: there is none. */
bool fan__runs_next(fan__runs *r);

#endif
