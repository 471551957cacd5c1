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

fan_status fan_graph_pool_alloc(fan_graph_pool *p, uint64_t bytes, uint64_t *offset, fan_error *err)
{
    fan_graph_ranges *r = &p->taken;
    uint64_t need, lo = 0;
    size_t i = 0;
    if (__builtin_add_overflow(bytes ? bytes : 1, (uint64_t)FAN_GRAPH_ALIGN - 1, &need))
        need = UINT64_MAX;
    need -= need % FAN_GRAPH_ALIGN;
    for (; i < r->n && r->at[i].lo - lo < need; i++)
        lo = r->at[i].hi;
    if (need > p->bytes - lo)
        return fan_fail(err, FAN_ERR_DEVICE_NOMEM,
                        "no room for %llu bytes in the graph tree's %llu, of which %llu are in use",
                        (unsigned long long)bytes, (unsigned long long)p->bytes,
                        (unsigned long long)p->in_use);
    if (fan_grow((void **)&r->at, &r->cap, r->n + 1, sizeof *r->at))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    memmove(&r->at[i + 1], &r->at[i], (r->n - i) * sizeof *r->at);
    r->at[i] = (fan_graph_range){lo, lo + need};
    r->n++;
    p->in_use += need;
    if (lo + need > p->high_water)
        p->high_water = lo + need;
    *offset = lo;
    return FAN_OK;
}

bool fan_graph_pool_free(fan_graph_pool *p, uint64_t offset)
{
    fan_graph_ranges *r = &p->taken;
    size_t i = first_from(r, offset);
    if (i == r->n || r->at[i].lo != offset)
        return false;
    p->in_use -= r->at[i].hi - r->at[i].lo;
    memmove(&r->at[i], &r->at[i + 1], (r->n - i - 1) * sizeof *r->at);
    r->n--;
    return true;
}

uint64_t fan_graph_pool_find(const fan_graph_pool *p, uint64_t offset)
{
    size_t i = first_from(&p->taken, offset);
    return i < p->taken.n && p->taken.at[i].lo <= offset ? p->taken.at[i].lo : FAN_GRAPH_NOWHERE;
}

/* ranges_copy: on failure *out is unchanged. */
static fan_status ranges_copy(fan_graph_ranges *out, const fan_graph_ranges *from, fan_error *err)
{
    if (fan_grow((void **)&out->at, &out->cap, from->n, sizeof *out->at))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
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

static void count_in_use(fan_graph_pool *p)
{
    p->in_use = 0;
    for (size_t i = 0; i < p->taken.n; i++)
        p->in_use += p->taken.at[i].hi - p->taken.at[i].lo;
}

fan_status fan_graph_pool_restore(fan_graph_pool *p, const fan_graph_ranges *then, fan_error *err)
{
    FAN_TRY(ranges_copy(&p->taken, then, err));
    count_in_use(p);
    return FAN_OK;
}

void fan_graph_pool_swap(fan_graph_pool *p, fan_graph_ranges *then)
{
    fan_graph_ranges now = p->taken;
    p->taken = *then;
    *then = now;
    count_in_use(p);
}
