/* mem: host memory; in test builds counted, with a hook that fails the n-th allocation.
 *
 * Everything the core allocates on the host comes from here. Allocation of 0 bytes gives a pointer
 * that can be freed. All functions may be called from any thread. */
#ifndef FAN_BASE_MEM_H
#define FAN_BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

void *fan_alloc(size_t n);            /* NULL when out of memory */
void *fan_calloc(size_t n);           /* zeroed */
void *fan_realloc(void *p, size_t n); /* p may be NULL; on failure p stays valid */
void fan_free(void *p);               /* p may be NULL */

/* fan_alloc_data: allocates memory for array data, aligned to 64 bytes; free it with fan_free_data
 * and the same n. Large blocks come from the pool (base/pool.h). */
void *fan_alloc_data(size_t n);
void fan_free_data(void *p, size_t n); /* p may be NULL */

#ifdef FAN_TEST
/* fan_mem_fail_at: lets the next `skip` allocations succeed and the `count` after them fail (-1:
 * all); skip < 0 ends it. Process-wide. */
void fan_mem_fail_at(int64_t skip, int64_t count);

typedef struct fan_mem_counts {
    int64_t live;   /* blocks not yet freed */
    int64_t total;  /* allocations ever */
    int64_t failed; /* allocations refused by fan_mem_fail_at */
} fan_mem_counts;

fan_mem_counts fan_mem_get(void);
#endif

/* fan_grow: makes room for at least `want` items of `size` bytes in *items (capacity *cap). Returns
 * 0, or -1 when out of memory (nothing changed). */
int fan_grow(void **items, size_t *cap, size_t want, size_t size);

/* cache: the size of the processor's caches. */
/* fan_cache_bytes: returns the size of one core's second-level cache. The system is queried once;
 * the result is 1 MiB if the query fails or gives an implausible size. */
uint64_t fan_cache_bytes(void);

#endif
