#include "array/extents.h"

#include <stdlib.h>

fan_extent fan_extent_of(const fan_array *a)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    uint64_t at = (uint64_t)(uintptr_t)a->data;
    return lo < hi ? (fan_extent){at + (uint64_t)lo, at + (uint64_t)hi - 1} : (fan_extent){1, 0};
}

bool fan_array_extents_disjoint(const fan_array *a, const fan_array *b)
{
    return !fan_extents_may_overlap(fan_extent_of(a), fan_extent_of(b));
}

/* ---- lists ---- */

void fan_extents_put(fan_extents *e, const fan_array *a, size_t owner, bool flag)
{
    fan_extent at = fan_extent_of(a);
    if (!fan_extent_empty(at))
        e->all[e->n++] = (fan_extent_entry){.at = at, .array = a, .owner = owner, .flag = flag};
}

static int by_first(const void *a, const void *b)
{
    const fan_extent_entry *x = a, *y = b;
    return (x->at.first > y->at.first) - (x->at.first < y->at.first);
}

void fan_extents_sort(fan_extents *e)
{
    uint64_t highest = 0;
    if (e->n)
        qsort(e->all, e->n, sizeof *e->all, by_first);
    for (size_t i = 0; i < e->n; i++) {
        highest = e->all[i].at.last > highest ? e->all[i].at.last : highest;
        e->all[i].highest = highest;
    }
}

/* begun: how many entries begin at `last` or before. */
static size_t begun(const fan_extents *e, uint64_t last)
{
    size_t low = 0, high = e->n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (e->all[mid].at.first <= last)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

const fan_extent_entry *fan_extents_next(const fan_extents *e, fan_extent of, size_t *at)
{
    if (fan_extent_empty(of))
        return NULL;
    if (*at == e->n)
        *at = begun(e, of.last);
    while (*at > 0 && e->all[*at - 1].highest >= of.first) {
        const fan_extent_entry *x = &e->all[--*at];
        if (fan_extents_may_overlap(x->at, of))
            return x;
    }
    return NULL;
}

bool fan_extents_any_pair(const fan_extents *e, const fan_extent_entry **one, const fan_extent_entry **two)
{
    for (size_t i = 1; i < e->n; i++) {
        if (e->all[i - 1].highest < e->all[i].at.first)
            continue;
        size_t j = i - 1;
        while (!fan_extents_may_overlap(e->all[j].at, e->all[i].at))
            j--;
        *one = &e->all[j];
        *two = &e->all[i];
        return true;
    }
    return false;
}

/* How far the extents reach that were met so far, and how far those of other owners than the one that reaches farthest.
 */
typedef struct reach {
    fan_extent farthest, other;
    size_t owner;
} reach;

static void reach_add(reach *r, const fan_extent_entry *x)
{
    bool farther = fan_extent_empty(r->farthest) || x->at.last > r->farthest.last;
    if (r->owner == x->owner) {
        r->farthest = farther ? x->at : r->farthest;
    } else if (farther) {
        r->other = r->farthest;
        r->farthest = x->at;
        r->owner = x->owner;
    } else if (fan_extent_empty(r->other) || x->at.last > r->other.last) {
        r->other = x->at;
    }
}

/* Those met so far begin no later: who meets any of another owner meets the one that reaches farthest. */
static bool reach_meets(const reach *r, const fan_extent_entry *x)
{
    return fan_extents_may_overlap(r->owner == x->owner ? r->other : r->farthest, x->at);
}

bool fan_extents_independent(const fan_extents *e)
{
    const fan_extent none = {1, 0};
    reach all = {none, none, SIZE_MAX}, written = all;
    for (size_t i = 0; i < e->n; i++) {
        const fan_extent_entry *x = &e->all[i];
        if (reach_meets(x->flag ? &all : &written, x))
            return false;
        reach_add(&all, x);
        if (x->flag)
            reach_add(&written, x);
    }
    return true;
}
