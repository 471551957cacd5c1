/* pool: the block table of one reserved range of memory, with checkpoints.
 *
 * It has offsets, not addresses, and does not access memory: so one block table serves a simulated
 * device, CUDA and the host, and the same calls give the same offsets on each. First fit: the
 * lowest gap that is large enough. Not thread-safe.
 *
 * Title: Checkpoints. A replay changes the contents of memory but not the block table, which stays
 * as the last recording left it. Before another branch is recorded, the table is put back to the
 * end of the replayed recording, without what died since: fan_graph_pool_restore, then
 * fan_graph_pool_free of each. Then the same calls give the same offsets as the first time. */
#ifndef FAN_GRAPH_POOL_H
#define FAN_GRAPH_POOL_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_GRAPH_ALIGN 256 /* as CUDA's allocators; the widest loads of kernels need less */
#define FAN_GRAPH_NOWHERE UINT64_MAX

/* Allocated bytes. */
typedef struct fan_graph_range {
    uint64_t lo;
    uint64_t hi;
} fan_graph_range;

/* Allocated ranges, sorted, disjoint; the rest is free. */
typedef struct fan_graph_ranges {
    fan_graph_range *at;
    size_t n;
    size_t cap;
} fan_graph_ranges;

typedef struct fan_graph_pool {
    uint64_t bytes; /* the size; a multiple of FAN_GRAPH_ALIGN */
    fan_graph_ranges taken;
    uint64_t high_water; /* the highest end of a range so far */
} fan_graph_pool;

void fan_graph_ranges_fini(fan_graph_ranges *r);

/* fan_graph_pool_init: `bytes` are rounded down. */
void fan_graph_pool_init(fan_graph_pool *p, uint64_t bytes);
void fan_graph_pool_fini(fan_graph_pool *p);
/* fan_graph_pool_alloc: `bytes` (0 counts as 1) at *offset. FAN_ERR_DEVICE_NOMEM if no gap is large
 * enough, FAN_ERR_NOMEM; on failure nothing has changed. */
fan_status fan_graph_pool_alloc(fan_graph_pool *p, uint64_t bytes, uint64_t *offset,
                                fan_error *err);
/* fan_graph_pool_free: frees the range that begins at `offset`; false: there is none. */
bool fan_graph_pool_free(fan_graph_pool *p, uint64_t offset);
/* fan_graph_pool_find: the begin of the range that contains `offset`; FAN_GRAPH_NOWHERE: it is
 * free. */
uint64_t fan_graph_pool_find(const fan_graph_pool *p, uint64_t offset);

/* fan_graph_pool_in_use: the allocated bytes. */
uint64_t fan_graph_pool_in_use(const fan_graph_pool *p);

/* fan_graph_pool_checkpoint: a copy of the ranges, for the caller to free. FAN_ERR_NOMEM. */
fan_status fan_graph_pool_checkpoint(const fan_graph_pool *p, fan_graph_ranges *out,
                                     fan_error *err);
/* fan_graph_pool_restore: puts the table back to a checkpoint. FAN_ERR_NOMEM; then nothing has
 * changed. */
fan_status fan_graph_pool_restore(fan_graph_pool *p, const fan_graph_ranges *then, fan_error *err);
/* fan_graph_pool_swap: the same without copying; *then becomes the table of before. */
void fan_graph_pool_swap(fan_graph_pool *p, fan_graph_ranges *then);

#endif
