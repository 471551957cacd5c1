/* host: kernels.cu as C, for the fake driver: a kernel is a function that is called once for each thread of its grid. */
#ifndef FAN_DEVICE_KERNELS_HOST_H
#define FAN_DEVICE_KERNELS_HOST_H

#include "device/kernels/tag.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static _Thread_local int64_t fan_k_thread, fan_k_threads;

#define KERNEL static void
#define ARGS(T, a) const T a
#define FN static
#define CALLED static
#define THREAD fan_k_thread
#define THREADS fan_k_threads
#define AT(T, address) ((T *)(uintptr_t)((address) & ~FAN_FAKE_TAG))
#define UNROLL(n)
typedef struct sixteen {
    uint64_t halves[2];
} sixteen;

#endif
