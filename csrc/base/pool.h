/* pool: memory of large arrays, kept for the next one: to have fresh pages faulted in costs more than the sum that
 * fills them.
 *
 * A block comes from the system and is one of a few sizes (eight to a doubling), so that what is given back serves
 * every size within an eighth. Given back, it is held, the pages with it, until an array of its size is asked for;
 * where more is held than the limit says, what was given back longest ago goes to the system. All functions may be
 * called from any thread; a forked child has the blocks of its parent as its own.
 */
#ifndef FAN_BASE_POOL_H
#define FAN_BASE_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* From here on memory for data is the pool's. */
#define FAN_POOL_FROM ((size_t)1 << 20)

/* fan_pool_take: at least n >= FAN_POOL_FROM bytes, aligned to 64, not zeroed. NULL when out of memory, even with all
 * that was held given up. */
void *fan_pool_take(size_t n);
/* fan_pool_give: gives back what fan_pool_take(n) gave, with the same n. Allocates nothing, cannot fail. */
void fan_pool_give(void *p, size_t n);

/* fan_pool_set_limit: bytes that may be held (at first an eighth of the machine's memory, 1 GiB at most); 0: nothing is
 * held. What is too much goes now. */
void fan_pool_set_limit(size_t bytes);
/* fan_pool_trim: all that is held goes to the system; returns how many bytes that were. */
size_t fan_pool_trim(void);

typedef struct fan_pool_counts {
    size_t limit;
    size_t held;     /* bytes that wait for a next use */
    size_t blocks;   /* in how many blocks */
    size_t peak;     /* the most that was held */
    uint64_t hits;   /* blocks used again */
    uint64_t misses; /* blocks that had to be fresh */
} fan_pool_counts;

fan_pool_counts fan_pool_get(void);

/* fan_pool_set_poison: whether blocks are filled with a pattern when they are given back, and the process ends where
 * one has been written to before its next use. On at first in test builds. (AddressSanitizer is told of held blocks in
 * any case.) */
void fan_pool_set_poison(bool on);

#endif
