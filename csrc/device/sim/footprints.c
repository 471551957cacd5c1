#include "device/sim/footprints.h"

#include "base/mem.h"

fan__footprint *fan__footprint_take(fan_explore *x)
{
    fan__footprint *f = x->free_footprints;
    if (f) {
        x->free_footprints = f->next;
        f->n = 0;
        return f;
    }
    return fan_calloc(sizeof *f);
}

void fan__footprint_give(fan_explore *x, fan__footprint *f)
{
    f->next = x->free_footprints;
    x->free_footprints = f;
}

static bool print_weighed(const fan_explore *x, uint64_t object)
{
    for (size_t i = 0; i < x->ndecided; i++)
        if (x->decided[i] == object)
            return true;
    return false;
}

/* footprint_commute: returns whether two steps' accesses to one object commute: reads do; counts do, if no step decides
 * by the number; others do not. */
static bool footprint_commute(const fan_explore *x, uint64_t object, unsigned a, unsigned b)
{
    unsigned either = a | b;
    if (!(either & (FAN__FOOTPRINT_BIT(FAN_TOUCH_WRITES) | FAN__FOOTPRINT_BIT(FAN_TOUCH_COUNTS))))
        return true;
    return either == FAN__FOOTPRINT_BIT(FAN_TOUCH_COUNTS) && !print_weighed(x, object);
}

bool fan__footprint_independent(const fan_explore *x, const fan__footprint *a, const fan__footprint *b)
{
    for (size_t i = 0; i < a->n; i++)
        for (size_t j = 0; j < b->n; j++)
            if (a->items[i].object == b->items[j].object &&
                !footprint_commute(x, a->items[i].object, a->items[i].how, b->items[j].how))
                return false;
    return true;
}

/* footprint_place: returns the object's row, or the free row for it. */
static fan__footprint_known *footprint_place(fan__footprint_known *table, size_t cap, uint64_t object)
{
    size_t i = (size_t)(object * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (cap - 1);
    while (table[i].used && table[i].object != object)
        i = (i + 1) & (cap - 1);
    return &table[i];
}

static fan__footprint_known *print_row(fan_explore *x, uint64_t object)
{
    if (2 * (x->nknown + 1) > x->known_cap) {
        size_t cap = x->known_cap ? 2 * x->known_cap : 64;
        fan__footprint_known *more = fan_calloc(cap * sizeof *more);
        if (!more)
            return NULL;
        for (size_t i = 0; i < x->known_cap; i++)
            if (x->known_footprints[i].used)
                *footprint_place(more, cap, x->known_footprints[i].object) = x->known_footprints[i];
        fan_free(x->known_footprints);
        x->known_footprints = more;
        x->known_cap = cap;
    }
    fan__footprint_known *row = footprint_place(x->known_footprints, x->known_cap, object);
    x->nknown += !row->used;
    row->used = true;
    row->object = object;
    return row;
}

static bool conflicts_with(const fan_explore *x, const fan__footprint_known *row, int actor, unsigned how)
{
    for (int a = 0; a < FAN__FOOTPRINT_ACTORS; a++)
        if (a != actor && row->how[a] && !footprint_commute(x, row->object, how, row->how[a]))
            return true;
    return false;
}

fan_status fan__footprint_note(fan_explore *x, uint64_t object, int actor, unsigned how)
{
    fan__footprint_known *row = print_row(x, object);
    if (!row)
        return x->status = FAN_ERR_NOMEM;
    if (row->how[actor] & how)
        return FAN_OK;
    x->again |= x->pruned && conflicts_with(x, row, actor, how);
    row->how[actor] |= (unsigned char)how;
    return FAN_OK;
}

bool fan__footprint_alone(const fan_explore *x, int actor, const fan__footprint *f)
{
    for (size_t i = 0; i < f->n; i++)
        if (conflicts_with(x, footprint_place(x->known_footprints, x->known_cap, f->items[i].object), actor,
                           f->items[i].how))
            return false;
    return true;
}

fan_status fan__footprint_decide(fan_explore *x, uint64_t object)
{
    if (print_weighed(x, object))
        return FAN_OK;
    if (fan_grow((void **)&x->decided, &x->decided_cap, x->ndecided + 1, sizeof *x->decided))
        return x->status = FAN_ERR_NOMEM;
    x->decided[x->ndecided++] = object;
    x->again |= x->searched > 0; /* in the first run nothing has been left out yet */
    return FAN_OK;
}
