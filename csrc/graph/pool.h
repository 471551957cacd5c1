/* pool: the block table of one reserved range of memory: which bytes are taken, and which were at another time.
 *
 * Offsets, not addresses: nothing here touches memory, so that the same block table serves a simulated device, CUDA and
 * the host, and the same calls give the same offsets on each of them. First fit: the lowest gap that is large enough.
 * Not thread-safe.
 *
 * Title: Checkpoints. A replay changes what is in memory and not the block table, which stays as it was when
 * something was recorded last. To grow another branch, it is put back to the end of the recording that was replayed,
 * less what died since: fan_graph_pool_restore, then fan_graph_pool_free of each. From there on the same calls give the
 * same offsets as they did the first time. */
#ifndef FAN_GRAPH_POOL_H
#define FAN_GRAPH_POOL_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_GRAPH_ALIGN 256 /* as CUDA's allocators: every kernel's wide loads ask for less */
#define FAN_GRAPH_NOWHERE UINT64_MAX

/* Bytes that are taken. */
typedef struct fan_graph_range {
    uint64_t lo, hi;
} fan_graph_range;

/* What is taken, sorted, without overlap; the rest is free. NULL and 0: nothing is. */
typedef struct fan_graph_ranges {
    fan_graph_range *at;
    size_t n, cap;
} fan_graph_ranges;

typedef struct fan_graph_pool {
    uint64_t bytes; /* of the whole; a multiple of FAN_GRAPH_ALIGN */
    fan_graph_ranges taken;
    uint64_t in_use;     /* bytes of them */
    uint64_t high_water; /* where the highest range ended that was ever taken */
} fan_graph_pool;

void fan_graph_ranges_fini(fan_graph_ranges *r);

/* fan_graph_pool_init: `bytes` are rounded down. */
void fan_graph_pool_init(fan_graph_pool *p, uint64_t bytes);
void fan_graph_pool_fini(fan_graph_pool *p);
/* fan_graph_pool_alloc: *offset of so many bytes (0 count as 1). FAN_ERR_DEVICE_NOMEM where no gap is large enough,
 * FAN_ERR_NOMEM; then nothing has changed. */
fan_status fan_graph_pool_alloc(fan_graph_pool *p, uint64_t bytes, uint64_t *offset, fan_error *err);
/* fan_graph_pool_free: a range is free that begins there; false where none does. */
bool fan_graph_pool_free(fan_graph_pool *p, uint64_t offset);
/* fan_graph_pool_find: where the range begins that holds `offset`; FAN_GRAPH_NOWHERE: it is free. */
uint64_t fan_graph_pool_find(const fan_graph_pool *p, uint64_t offset);

/* fan_graph_pool_checkpoint: what is taken now, for the caller to end. FAN_ERR_NOMEM. */
fan_status fan_graph_pool_checkpoint(const fan_graph_pool *p, fan_graph_ranges *out, fan_error *err);
/* fan_graph_pool_restore: what was taken then is, and nothing else. FAN_ERR_NOMEM; then nothing has changed. */
fan_status fan_graph_pool_restore(fan_graph_pool *p, const fan_graph_ranges *then, fan_error *err);
/* fan_graph_pool_swap: what was taken then is, and *then is what was until now. */
void fan_graph_pool_swap(fan_graph_pool *p, fan_graph_ranges *then);
#ifdef FAN_TEST
/* fan_graph_pool_holds: whether ranges begin at these offsets, in any order and as often as one likes, and nowhere
 * else. */
bool fan_graph_pool_holds(const fan_graph_pool *p, const uint64_t *offsets, size_t n);
#endif

#endif
