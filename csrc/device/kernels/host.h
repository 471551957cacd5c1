/* host: kernels.cu as C, for the fake driver: a kernel is a function that is called once for each thread of its grid.
 */
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
/* A block: what its threads have in common; where they meet, the first of them, which runs last, goes on for all. */
#define SHARED static _Thread_local
#define LANE ((int)(fan_k_thread % FAN_K_BLOCK))
#define BLOCK (fan_k_thread / FAN_K_BLOCK)
#define MEET       \
    if (LANE != 0) \
    return false
#define EACH_LANE(i, n) for (int i = 0; i < (n); i++)
#define GOES_ON true
typedef struct sixteen {
    uint64_t halves[2];
} sixteen;

#endif
