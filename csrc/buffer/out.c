#include "buffer/out.h"

bool fan_out_overlaps_inputs(const fan_extents *inputs, const fan_array *out, size_t k)
{
    size_t at = inputs->n;
    if (!at)
        return false;
    for (const fan_extent_entry *x; (x = fan_extents_next(inputs, fan_extent_of(out), &at)) != NULL;)
        if (x->owner != k || !x->flag || !fan_array_same_view(out, x->array))
            return true;
    return false;
}

bool fan_written_by_out(const fan_extents *outs, const fan_value *v)
{
    fan_array *some[3];
    size_t n = outs->n ? fan_value_arrays(v, some, 3) : 0;
    for (size_t i = 0; i < n && i < 3; i++) {
        size_t at = outs->n;
        if (fan_extents_next(outs, fan_extent_of(some[i]), &at))
            return true;
    }
    return false;
}

bool fan_outs_meet(const fan_extents *outs, size_t *one, size_t *two)
{
    const fan_extent_entry *x, *y;
    if (!fan_extents_any_pair(outs, &x, &y))
        return false;
    *one = x->owner < y->owner ? x->owner : y->owner;
    *two = x->owner < y->owner ? y->owner : x->owner;
    return true;
}
