/* The block table of a tree's memory: a sorted list of allocated ranges. First allocate, free and
 * find, then checkpoints, which are copies of the list. */
#include "graph/pool.h"

#include "base/mem.h"
#include "base/search.h"

#include <string.h>

void fan_graph_ranges_fini(fan_graph_ranges *r)
{
    fan_free(r->at);
    *r = (fan_graph_ranges){0};
}

void fan_graph_pool_init(fan_graph_pool *p, uint64_t bytes)
{
    *p = (fan_graph_pool){.bytes = bytes - bytes % FAN_GRAPH_ALIGN};
}

void fan_graph_pool_fini(fan_graph_pool *p)
{
    fan_graph_ranges_fini(&p->taken);
    *p = (fan_graph_pool){0};
}

/* first_from: the first range that ends after `offset`; n: none. */
static size_t first_from(const fan_graph_ranges *r, uint64_t offset)
{
    return fan_search_end(r->at, r->n, sizeof *r->at, offsetof(fan_graph_range, hi), offset);
}

fan_status fan_graph_pool_alloc(fan_graph_pool *pool, uint64_t bytes, uint64_t *offset,
                                fan_error *err)
{
    fan_graph_ranges *taken = &pool->taken;
    uint64_t need;
    uint64_t lo = 0;
    size_t i = 0;
    if (__builtin_add_overflow(bytes ? bytes : 1, (uint64_t)FAN_GRAPH_ALIGN - 1, &need))
        need = UINT64_MAX;
    need -= need % FAN_GRAPH_ALIGN;
    while (i < taken->n && taken->at[i].lo - lo < need)
        lo = taken->at[i++].hi;
    if (need > pool->bytes - lo) {
        return fan_fail(err, FAN_ERR_DEVICE_NOMEM,
                        "no room for %llu bytes in the graph tree's %llu, of which %llu are in use",
                        (unsigned long long)bytes, (unsigned long long)pool->bytes,
                        (unsigned long long)fan_graph_pool_in_use(pool));
    }
    if (fan_grow((void **)&taken->at, &taken->cap, taken->n + 1, sizeof *taken->at))
        return fan_fail_memory(err);
    memmove(&taken->at[i + 1], &taken->at[i], (taken->n - i) * sizeof *taken->at);
    taken->at[i] = (fan_graph_range){lo, lo + need};
    taken->n++;
    if (lo + need > pool->high_water)
        pool->high_water = lo + need;
    *offset = lo;
    return FAN_OK;
}

bool fan_graph_pool_free(fan_graph_pool *pool, uint64_t offset)
{
    fan_graph_ranges *taken = &pool->taken;
    size_t i = first_from(taken, offset);
    if (i == taken->n || taken->at[i].lo != offset)
        return false;
    memmove(&taken->at[i], &taken->at[i + 1], (taken->n - i - 1) * sizeof *taken->at);
    taken->n--;
    return true;
}

uint64_t fan_graph_pool_find(const fan_graph_pool *pool, uint64_t offset)
{
    const fan_graph_ranges *taken = &pool->taken;
    size_t i = first_from(taken, offset);
    bool found = i < taken->n && taken->at[i].lo <= offset;
    if (found)
        return taken->at[i].lo;
    return FAN_GRAPH_NOWHERE;
}

uint64_t fan_graph_pool_in_use(const fan_graph_pool *pool)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < pool->taken.n; i++)
        bytes += pool->taken.at[i].hi - pool->taken.at[i].lo;
    return bytes;
}

/* ranges_copy: on failure *out is unchanged. */
static fan_status ranges_copy(fan_graph_ranges *out, const fan_graph_ranges *from, fan_error *err)
{
    if (fan_grow((void **)&out->at, &out->cap, from->n, sizeof *out->at))
        return fan_fail_memory(err);
    if (from->n)
        memcpy(out->at, from->at, from->n * sizeof *out->at);
    out->n = from->n;
    return FAN_OK;
}

fan_status fan_graph_pool_checkpoint(const fan_graph_pool *p, fan_graph_ranges *out, fan_error *err)
{
    *out = (fan_graph_ranges){0};
    return ranges_copy(out, &p->taken, err);
}

fan_status fan_graph_pool_restore(fan_graph_pool *p, const fan_graph_ranges *then, fan_error *err)
{
    return ranges_copy(&p->taken, then, err);
}

void fan_graph_pool_swap(fan_graph_pool *p, fan_graph_ranges *then)
{
    fan_graph_ranges now = p->taken;
    p->taken = *then;
    *then = now;
}
