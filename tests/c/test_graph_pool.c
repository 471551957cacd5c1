/* A graph tree's block table, beside a map that marks each unit of its memory: first fit,
 * checkpoints, restores. */
#include "graph/pool.h"

#include "base/mem.h"
#include "base/rng.h"
#include "check.h"

#include <stdlib.h>

#define UNITS 48
#define OWNERS 64

static uint64_t below(uint64_t *rng, uint64_t n)
{
    return fan_rng(rng) % n;
}

/* What the block table should say: of each unit, who has it. */
typedef struct map {
    int of[UNITS]; /* 0: nobody */
    int first[OWNERS], units[OWNERS];
} map;

static int map_alloc(map *m, int owner, int units)
{
    for (int lo = 0; lo + units <= UNITS; lo++) {
        int i = 0;
        while (i < units && m->of[lo + i] == 0)
            i++;
        if (i < units)
            continue;
        for (i = 0; i < units; i++)
            m->of[lo + i] = owner;
        m->first[owner] = lo;
        m->units[owner] = units;
        return lo;
    }
    return -1;
}

static void map_free(map *m, int owner)
{
    for (int i = 0; i < m->units[owner]; i++)
        m->of[m->first[owner] + i] = 0;
    m->units[owner] = 0;
}

static bool agree(const fan_graph_pool *p, const map *m)
{
    uint64_t in_use = 0;
    size_t n = 0;
    for (int o = 1; o < OWNERS; o++) {
        n += m->units[o] > 0;
        in_use += (uint64_t)m->units[o] * FAN_GRAPH_ALIGN;
    }
    bool same = fan_graph_pool_in_use(p) == in_use && p->taken.n == n;
    for (size_t i = 0; i + 1 < p->taken.n; i++) {
        same = same && p->taken.at[i].hi <= p->taken.at[i + 1].lo &&
               p->taken.at[i].lo < p->taken.at[i].hi;
    }
    for (int u = 0; u < UNITS; u++) {
        uint64_t at =
            fan_graph_pool_find(p, (uint64_t)u * FAN_GRAPH_ALIGN + (uint64_t)u % FAN_GRAPH_ALIGN);
        uint64_t want = FAN_GRAPH_NOWHERE;
        if (m->of[u])
            want = (uint64_t)m->first[m->of[u]] * FAN_GRAPH_ALIGN;
        same = same && at == want;
    }
    return same;
}

/* digest: where the last block ends, and how much is in use. */
static uint64_t digest(const fan_graph_pool *p)
{
    if (p->taken.n == 0)
        return 0;
    return p->taken.at[p->taken.n - 1].hi + fan_graph_pool_in_use(p);
}

static bool act(uint64_t *rng, fan_graph_pool *p, map *m, long *full)
{
    int owner = 1 + (int)below(rng, OWNERS - 1);
    if (m->units[owner]) {
        CHECK(fan_graph_pool_free(p, (uint64_t)m->first[owner] * FAN_GRAPH_ALIGN));
        CHECK(!fan_graph_pool_free(p, (uint64_t)m->first[owner] * FAN_GRAPH_ALIGN));
        map_free(m, owner);
        return true;
    }
    int units = 1 + (int)below(rng, 9);
    uint64_t bytes = (uint64_t)(units - 1) * FAN_GRAPH_ALIGN + below(rng, FAN_GRAPH_ALIGN + 1);
    uint64_t offset = 77;
    units = (int)((bytes + FAN_GRAPH_ALIGN - 1) / FAN_GRAPH_ALIGN);
    if (!units)
        units = 1; /* of no bytes: still a place of its own */
    int lo = map_alloc(m, owner, units);
    fan_status status = fan_graph_pool_alloc(p, bytes, &offset, NULL);
    if (lo < 0) {
        ++*full;
        return status == FAN_ERR_DEVICE_NOMEM && offset == 77;
    }
    return status == FAN_OK && offset == (uint64_t)lo * FAN_GRAPH_ALIGN;
}

/* The laws of a checkpoint, for one trace of calls. */
static bool one_trace(uint64_t seed, long *full)
{
    uint64_t rng = seed * 0x9E37;
    fan_graph_pool p;
    fan_graph_ranges then, again;
    map kept;
    map m = {0};
    uint64_t replayed[12];
    bool good = true;
    fan_graph_pool_init(&p, (uint64_t)UNITS * FAN_GRAPH_ALIGN + below(&rng, FAN_GRAPH_ALIGN));
    for (uint64_t i = below(&rng, 40); i > 0; i--)
        good = good && act(&rng, &p, &m, full);
    good = good && agree(&p, &m);
    CHECK_OK(fan_graph_pool_checkpoint(&p, &then, NULL));
    kept = m;
    uint64_t from_here = rng;
    uint64_t high = p.high_water;
    /* What is called after it .. */
    for (int i = 0; i < 12; i++) {
        good = good && act(&rng, &p, &m, full);
        replayed[i] = digest(&p);
    }
    /* .. is called again after it was restored, and all of it is where it was. Twice is as once. */
    CHECK_OK(fan_graph_pool_restore(&p, &then, NULL));
    if (seed % 2)
        CHECK_OK(fan_graph_pool_restore(&p, &then, NULL));
    good = good && agree(&p, &kept) && p.high_water >= high;
    good = good && p.bytes == (uint64_t)UNITS * FAN_GRAPH_ALIGN;
    CHECK_OK(fan_graph_pool_checkpoint(&p, &again, NULL));
    good = good && again.n == then.n;
    if (good && then.n)
        good = memcmp(again.at, then.at, then.n * sizeof *then.at) == 0;
    rng = from_here;
    m = kept;
    for (int i = 0; i < 12; i++) {
        good = good && act(&rng, &p, &m, full);
        good = good && replayed[i] == digest(&p);
    }
    /* Less what died since: what is reported live is what lives. */
    CHECK_OK(fan_graph_pool_restore(&p, &then, NULL));
    for (int o = 1; o < OWNERS; o++) {
        if (kept.units[o] && below(&rng, 2)) {
            good = good && fan_graph_pool_free(&p, (uint64_t)kept.first[o] * FAN_GRAPH_ALIGN);
            map_free(&kept, o);
        }
    }
    good = good && agree(&p, &kept);
    fan_graph_ranges_fini(&then);
    fan_graph_ranges_fini(&again);
    fan_graph_pool_fini(&p);
    return good;
}

static void the_laws_of_checkpoints_hold(void)
{
    long full = 0;
    long bad = 0;
    long traces = 100000;
    for (long i = 0; i < traces; i++) {
        if (!one_trace((uint64_t)i, &full) && !bad++)
            fprintf(stderr, "seed %ld\n", i);
    }
    CHECK_INT(bad, 0);
    CHECK(full > traces / 100); /* and the memory ended often enough to be tried */
}

static void memory_that_ends_changes_nothing(void)
{
    fan_graph_pool p;
    fan_graph_ranges then;
    uint64_t offset = 0;
    fan_error err = {0};
    fan_graph_pool_init(&p, 1 << 20);
    fan_mem_fail_at(0, -1);
    CHECK_INT(fan_graph_pool_alloc(&p, 1, &offset, NULL), FAN_ERR_NOMEM);
    fan_mem_fail_at(-1, 0);
    CHECK_INT(p.taken.n, 0);
    CHECK_INT(fan_graph_pool_in_use(&p), 0);
    CHECK_OK(fan_graph_pool_checkpoint(&p, &then, NULL)); /* of nothing: no memory */
    for (int i = 0; i < 20; i++)
        CHECK_OK(fan_graph_pool_alloc(&p, 1000, &offset, NULL));
    CHECK_INT(offset, 19 * 1024);
    fan_graph_ranges more;
    fan_mem_fail_at(0, -1);
    CHECK_INT(fan_graph_pool_checkpoint(&p, &more, NULL), FAN_ERR_NOMEM);
    fan_mem_fail_at(-1, 0);
    fan_graph_ranges_fini(&more);
    CHECK_OK(fan_graph_pool_checkpoint(&p, &more, NULL));
    CHECK_OK(fan_graph_pool_restore(&p, &then, NULL));
    CHECK_INT(fan_graph_pool_in_use(&p), 0);
    fan_graph_pool small;
    fan_graph_pool_init(&small, 1 << 20);
    fan_mem_fail_at(0, -1);
    CHECK_INT(fan_graph_pool_restore(&small, &more, NULL), FAN_ERR_NOMEM);
    fan_mem_fail_at(-1, 0);
    CHECK_INT(small.taken.n, 0);
    CHECK_OK(fan_graph_pool_restore(&small, &more, NULL));
    CHECK_INT(fan_graph_pool_in_use(&small), 20 * 1024);
    CHECK_INT(fan_graph_pool_alloc(&small, UINT64_MAX, &offset, &err), FAN_ERR_DEVICE_NOMEM);
    CHECK_HAS(err.text, "no room for 18446744073709551615 bytes in the graph tree's 1048576, of "
                        "which 20480 are in use");
    fan_graph_ranges_fini(&then);
    fan_graph_ranges_fini(&more);
    fan_graph_pool_fini(&small);
    fan_graph_pool_fini(&p);
    CHECK_INT(fan_mem_get().live, 0);
}

int main(void)
{
    the_laws_of_checkpoints_hold();
    memory_that_ends_changes_nothing();
    return check_done();
}
