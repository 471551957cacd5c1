#include "buffer/out.h"

#include <stdlib.h>

static int by_beginning(const void *a, const void *b)
{
    const fan_extent *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

void fan_extents_put(fan_extents *e, const fan_array *a, size_t slot, bool dense)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    if (lo == hi)
        return;
    e->all[e->n++] = (fan_extent){
        .lo = (uintptr_t)(a->data + lo), .hi = (uintptr_t)(a->data + hi), .a = a, .slot = slot, .dense = dense};
}

void fan_extents_sort(fan_extents *e)
{
    uintptr_t highest = 0;
    if (e->n)
        qsort(e->all, e->n, sizeof *e->all, by_beginning);
    for (size_t i = 0; i < e->n; i++) {
        highest = e->all[i].hi > highest ? e->all[i].hi : highest;
        e->all[i].highest = highest;
    }
}

/* The next fan_extent that meets `a`, below *at (first: e->n); NULL: none is left. */
static const fan_extent *extents_next(const fan_extents *e, const fan_array *a, size_t *at)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    uintptr_t from = (uintptr_t)(a->data + lo), to = (uintptr_t)(a->data + hi);
    if (lo == hi)
        return NULL;
    if (*at == e->n) {
        size_t low = 0, high = e->n;
        while (low < high) {
            size_t mid = low + (high - low) / 2;
            if (e->all[mid].lo < to)
                low = mid + 1;
            else
                high = mid;
        }
        *at = low;
    }
    while (*at > 0 && e->all[*at - 1].highest > from) {
        const fan_extent *x = &e->all[--*at];
        if (x->hi > from)
            return x;
    }
    return NULL;
}

bool fan_out_meets_inputs(const fan_extents *inputs, const fan_array *out, size_t k)
{
    size_t at = inputs->n;
    if (!at)
        return false;
    for (const fan_extent *x; (x = extents_next(inputs, out, &at)) != NULL;)
        if (x->slot != k || !x->dense || !fan_array_same_view(out, x->a))
            return true;
    return false;
}

bool fan_written_by_out(const fan_extents *outs, const fan_value *v)
{
    fan_array *some[3];
    size_t n = outs->n ? fan_value_arrays(v, some, 3) : 0;
    for (size_t i = 0; i < n && i < 3; i++) {
        size_t at = outs->n;
        if (extents_next(outs, some[i], &at))
            return true;
    }
    return false;
}

bool fan_outs_meet(const fan_extents *outs, size_t *one, size_t *two)
{
    for (size_t i = 1; i < outs->n; i++) {
        if (outs->all[i - 1].highest <= outs->all[i].lo)
            continue;
        size_t j = i - 1;
        while (outs->all[j].hi <= outs->all[i].lo)
            j--;
        size_t x = outs->all[i].slot, y = outs->all[j].slot;
        *one = x < y ? x : y;
        *two = x < y ? y : x;
        return true;
    }
    return false;
}
