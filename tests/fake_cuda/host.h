/* host: kernels.cu as C, for the fake driver: a kernel is a function that is called once for each
 * thread of its grid. If it has barriers, the threads of a block run in turns (fake_cuda/block.h,
 * which the including file provides). An access of a GPU must be aligned to its size:
 * fan_k_misaligned records a violation. AT reports each access, element by element, to
 * fake_cuda/traffic.h; so memory that is only read must be passed as const. */
#ifndef FAN_FAKE_HOST_H
#define FAN_FAKE_HOST_H

#include "device/kernels/args.h"
#include "fake_cuda/tag.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static _Thread_local int64_t fan_k_thread, fan_k_threads;
static _Thread_local bool fan_k_misaligned;

static inline uint64_t fan_k_host(uint64_t address, size_t alignment, size_t bytes, bool reads)
{
    if (fan__traffic_counts())
        fan__traffic_touch(address, bytes, reads);
    if (address % alignment)
        fan_k_misaligned = true;
    return address & ~FAN_FAKE_TAG & ~(uint64_t)(alignment - 1);
}

/* fan_k_meet: a barrier, after which the thread continues with its own number. */
static inline void fan_k_meet(void)
{
    int64_t mine = fan_k_thread;
    fan__block_meet();
    fan_k_thread = mine;
}

/* fan_k_same: returns the lanes of the warp that pass the same x. All threads of the block must
 * call it. */
static inline uint32_t fan_k_same(uint32_t x)
{
    static _Thread_local uint32_t given[FAN_K_BLOCK];
    int lane = (int)(fan_k_thread % FAN_K_BLOCK);
    int first = lane - lane % FAN_K_WARP;
    uint32_t same = 0;
    given[lane] = x;
    fan_k_meet();
    for (int i = 0; i < FAN_K_WARP; i++)
        same |= (uint32_t)(given[first + i] == x) << i;
    fan_k_meet();
    return same;
}

#define KERNEL static void
#define ARGS(T, a) const T a
#define DEVICE static
#define NOINLINE_DEVICE static
#define THREAD fan_k_thread
#define THREADS fan_k_threads
#define READS(T) __builtin_types_compatible_p(T *, const T *)
#define AT(T, address) ((T *)(uintptr_t)fan_k_host((address), _Alignof(T), sizeof(T), READS(T)))
#define UNROLL(n)
#define SHARED static _Thread_local /* the threads of a block are run by one thread of the host */
#define LANE ((int)(fan_k_thread % FAN_K_BLOCK))
#define BLOCK (fan_k_thread / FAN_K_BLOCK)
#define SYNC_BLOCK fan_k_meet()
#define EACH_LANE(i, n) for (int i = LANE; i < (n); i += FAN_K_BLOCK)
#define IS_FIRST_LANE (LANE == 0)
#define COUNT_ONE(n) (void)++(n)
#define SYNC_WARP SYNC_BLOCK
#define SAME_IN_WARP(x) fan_k_same(x)
#define BITS_IN(mask) __builtin_popcount(mask)
typedef struct sixteen {
    _Alignas(16) uint64_t halves[2];
} sixteen;

#endif
