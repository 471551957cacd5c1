/* pool: keeps the memory of large arrays for reuse: faulting in fresh pages costs more than the sum
 * that fills them.
 *
 * Blocks come from the system in a few sizes (eight per doubling), so a returned block fits every
 * request within an eighth of its size. A returned block is held, with its pages, until an array of
 * its size is allocated; above the limit the blocks returned longest ago go back to the system. All
 * functions may be called from any thread; a forked child owns a copy of its parent's blocks. */
#ifndef FAN_BASE_POOL_H
#define FAN_BASE_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Data of at least this size comes from the pool. */
#define FAN_POOL_FROM ((size_t)1 << 20)

/* fan_pool_take: allocates at least n >= FAN_POOL_FROM bytes, aligned to 64, not zeroed. Returns
 * NULL when out of memory, even after all held blocks were freed. */
void *fan_pool_take(size_t n);
/* fan_pool_give: returns a block of fan_pool_take(n), with the same n. Does not allocate; cannot
 * fail. */
void fan_pool_give(void *p, size_t n);

/* fan_pool_set_limit: sets how many bytes may be held (default: an eighth of the machine's memory,
 * at most 1 GiB); 0 holds none. Excess blocks are freed now. */
void fan_pool_set_limit(size_t bytes);
/* fan_pool_trim: frees all held blocks; returns their bytes. */
size_t fan_pool_trim(void);

typedef struct fan_pool_counts {
    size_t limit;
    size_t held;     /* bytes in held blocks */
    size_t blocks;   /* number of held blocks */
    size_t peak;     /* the largest `held` so far */
    uint64_t hits;   /* requests served by a held block */
    uint64_t misses; /* requests served by the system */
} fan_pool_counts;

fan_pool_counts fan_pool_get(void);

/* fan_pool_set_poison: sets whether returned blocks are filled with a pattern; the process aborts
 * if one was written to before its next use. On by default in test builds. (AddressSanitizer
 * poisons held blocks in any case.) */
void fan_pool_set_poison(bool on);

#endif
