/* Vector clocks: a few lanes inline, more on the heap. */
#include "base/clock.h"

#include "base/mem.h"

#include <string.h>

void fan_clock_init(fan_clock *c)
{
    c->n = 0;
    c->cap = FAN_CLOCK_INLINE;
    c->heap = NULL;
}

void fan_clock_fini(fan_clock *c)
{
    fan_free(c->heap);
    fan_clock_init(c);
}

static uint64_t *lanes_of(fan_clock *c)
{
    return c->heap ? c->heap : c->lanes;
}

static const uint64_t *lanes_in(const fan_clock *c)
{
    return c->heap ? c->heap : c->lanes;
}

/* clock_reserve: makes room for `n` lanes. Lanes beyond those in use are zeroed when they come into
 * use. */
static int clock_reserve(fan_clock *c, uint32_t n)
{
    if (n <= c->cap)
        return 0;
    uint64_t cap = (uint64_t)c->cap * 2;
    if (cap < n)
        cap = n;
    if (cap > UINT32_MAX)
        cap = UINT32_MAX;
    uint64_t *p = fan_alloc((size_t)cap * sizeof *p);
    if (!p)
        return -1;
    memcpy(p, lanes_in(c), (size_t)c->n * sizeof *p);
    fan_free(c->heap);
    c->heap = p;
    c->cap = (uint32_t)cap;
    return 0;
}

/* clock_widen: brings lanes up to n into use, with count 0. The room must exist. */
static void clock_widen(fan_clock *c, uint32_t n)
{
    if (n <= c->n)
        return;
    memset(lanes_of(c) + c->n, 0, (size_t)(n - c->n) * sizeof(uint64_t));
    c->n = n;
}

uint64_t fan_clock_get(const fan_clock *c, uint32_t lane)
{
    return lane < c->n ? lanes_in(c)[lane] : 0;
}

int fan_clock_set(fan_clock *c, uint32_t lane, uint64_t count)
{
    if (lane >= c->n) {
        if (count == 0)
            return 0;
        if (lane == UINT32_MAX || clock_reserve(c, lane + 1))
            return -1;
        clock_widen(c, lane + 1);
    }
    lanes_of(c)[lane] = count;
    return 0;
}

int fan_clock_join(fan_clock *c, const fan_clock *other)
{
    if (c == other)
        return 0;
    if (clock_reserve(c, other->n))
        return -1;
    clock_widen(c, other->n);
    uint64_t *mine = lanes_of(c);
    const uint64_t *theirs = lanes_in(other);
    for (uint32_t i = 0; i < other->n; i++) {
        if (mine[i] < theirs[i])
            mine[i] = theirs[i];
    }
    return 0;
}

int fan_clock_copy(fan_clock *c, const fan_clock *other)
{
    if (c == other)
        return 0;
    if (clock_reserve(c, other->n))
        return -1;
    memcpy(lanes_of(c), lanes_in(other), (size_t)other->n * sizeof(uint64_t));
    c->n = other->n;
    return 0;
}

bool fan_clock_leq(const fan_clock *a, const fan_clock *b)
{
    const uint64_t *mine = lanes_in(a);
    for (uint32_t i = 0; i < a->n; i++) {
        if (mine[i] > fan_clock_get(b, i))
            return false;
    }
    return true;
}
