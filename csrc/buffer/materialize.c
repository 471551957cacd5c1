#include "buffer/materialize.h"

#include "array/convert.h"
#include "base/mem.h"
#include "buffer/lock.h"
#include "buffer/unchanged.h"

#include <string.h>

void fan_fast_unpark(fan_buffer *b, fan_fast_list *p, size_t n)
{
    if (n) /* of None alone nobody has set `bytes` */
        atomic_fetch_sub_explicit(&b->parked, n * p->bytes, memory_order_relaxed);
    if (p->alone)
        atomic_fetch_sub_explicit(&b->alone, p->alone * p->bytes, memory_order_relaxed);
    p->alone = p->ask = 0;
}

void fan_fast_drop(fan_buffer *b, size_t slot)
{
    fan_fast_list *p = b->slots[slot].fast;
    FAN_UNINITIALIZED fan_fast_detached gone;
    if (!p || !p->n)
        return;
    fan_fast_unpark(b, p, fan_fast_list_parked(p) - p->undefined);
    fan_fast_list_detach(p, &gone);
    const fan_fast_term *terms = gone.heap ? gone.heap : gone.inline_terms;
    for (size_t i = 0; i < gone.n; i++)
        if (terms[i].object)
            b->frontend->drop(terms[i].object);
    fan_fast_detached_fini(&gone, p);
}

static void items_free(fan_buffer *b, fan_item **items, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fan_value_drop(b->frontend, &items[i]->value);
        fan_free(items[i]);
    }
    fan_free(items);
}

/* A10: the dtype that they bring. */
static fan_dtype_set dtypes_of(const fan_spec *spec, const fan_fast_kind *k)
{
    return fan_dtype_set_add(0, k->dtype, k->weak && spec->dtype == FAN_DT_NONE);
}

/* D5: Python ints are checked against the dtype of all, which may come yet. */
static void weak_range(fan_pass *p, const fan_fast_list *list)
{
    p->has_weak_int = true;
    for (size_t i = 0; list->kind.dtype == FAN_DT_INT64 && i < list->n; i++) {
        int64_t n = 0;
        if (list->terms[i].object)
            memcpy(&n, fan_fast_data(&list->kind, &list->terms[i]), sizeof n);
        p->weak_lo = n < p->weak_lo ? n : p->weak_lo;
        p->weak_hi = n > p->weak_hi ? n : p->weak_hi;
    }
}

/* The items of what is parked, in *items. */
static fan_status items_of(fan_buffer *b, size_t slot, fan_item **items, size_t *made, fan_error *err)
{
    fan_fast_list *list = b->slots[slot].fast;
    fan_fast_list_sort(list);
    fan_dtype_set own = fan_fast_list_defined(list) ? dtypes_of(b->slots[slot].spec, &list->kind) : 0; /* no kind yet */
    for (size_t i = list->summed > 0; i < list->n; i++) {
        const fan_fast_term *one = &list->terms[i];
        if (!one->object && one->key < 0)
            continue; /* it only counts (S2) */
        fan_item *it = fan_calloc(sizeof *it);
        if (!it)
            return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
        it->value.dtype = FAN_DT_NONE;
        bool kept = false;
        fan_status status =
            one->object ? b->frontend->fast_value(one->object, one->data, &list->kind, &it->value, &kept, err) : FAN_OK;
        if (status != FAN_OK) {
            fan_free(it);
            return status == FAN_ERR_STATE ? fan_slot_changed(b, slot, one->key, err) : status;
        }
        it->key = one->key;
        it->parked = true;
        it->own = it->value.form == FAN_FORM_OBJECT || !one->object ? 0 : own;
        it->bytes = one->object ? list->bytes : 0;
        it->donated = one->donated;
        it->ours = one->ours;
        it->exposed = it->ours && kept;
        items[(*made)++] = it;
    }
    return FAN_OK;
}

/* sum_of: the sum so far, as a value. */
static fan_status sum_of(fan_buffer *b, size_t slot, fan_value *out, bool *kept, fan_error *err)
{
    const fan_fast_list *list = b->slots[slot].fast;
    const fan_fast_term *one = &list->terms[0];
    fan_status status = b->frontend->fast_value(one->object, one->data, &list->kind, out, kept, err);
    return status == FAN_ERR_STATE ? fan_slot_changed(b, slot, one->key, err) : status;
}

/* pass_fill: what a slot knows of a pass whose contributions so far are items of ours. Takes items, shape and sum. */
static void pass_fill(fan_pass *p, const fan_slot *s, fan_item **items, size_t made, int64_t *shape,
                      const fan_value *sum)
{
    const fan_fast_list *list = s->fast;
    const fan_fast_kind *k = &list->kind;
    bool some = fan_fast_list_defined(list);
    if (some && k->ndim)
        memcpy(shape, k->shape, (size_t)k->ndim * sizeof *shape);
    p->seen = some ? dtypes_of(s->spec, k) : 0;
    if (some && k->weak)
        weak_range(p, list);
    p->keyed = list->terms[0].key < 0 ? -1 : 1;
    p->count = fan_fast_list_count(list);
    p->device = some ? fan_device_hold(fan_cpu()) : NULL;
    p->rules = fan_plan_fast_slot(some, list->undefined > 0) | (list->summed ? list->rules : 0);
    p->items = items;
    p->nitems = made;
    p->cap = list->n;
    if (list->summed) {
        p->value = *sum;
        p->value_summed = list->summed > 1;
        p->value_ours = p->value_summed || list->terms[0].ours;
        p->value_donated = list->terms[0].donated;
        p->value_seen = p->seen;
        p->value_key = list->terms[0].key < 0 ? -1 : 0;
        p->next_key = (uint64_t)list->terms[0].key + 1;
    }
    if (s->spec->has_shape || !some) {
        fan_free(shape);
    } else {
        p->shape = shape;
        p->ndim = k->ndim;
        p->shaped = true;
    }
}

fan_status fan__slot_materialize(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *list = s->fast;
    const fan_fast_kind *k = &list->kind;
    size_t n = list->n, made = 0;
    fan_status status = FAN_OK;
    fan_value sum = {.dtype = FAN_DT_NONE};
    /* Whoever has the slot already is the caller. Nobody else adds or takes meanwhile. */
    bool mine = s->busy, taking = s->taking, some = n > list->undefined, check_late = some && k->check_at_use,
         sum_kept = false;
    fan_pass *p = fan_calloc(sizeof *p);
    fan_item **items = fan_alloc(n * sizeof *items);
    int64_t *shape = fan_alloc(some ? (size_t)k->ndim * sizeof *shape : 0);
    if (!p || !items || !shape)
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot));
    if (check_late) {
        s->busy = s->taking = true;
        fan_slot_set_owner(s, fan_thread_id());
        fan_slot_unlock(b, slot);
    }
    status = items_of(b, slot, items, &made, err);
    if (status == FAN_OK && list->summed)
        status = sum_of(b, slot, &sum, &sum_kept, err);
    if (check_late) {
        fan_slot_lock(b, slot);
        s->taking = taking;
        if (!mine)
            fan_slot_let_go(b, slot);
    }
    FAN_GO(status);
    pass_fill(p, s, items, made, shape, &sum);
    p->value_exposed = sum_kept && p->value_ours;
    s->p = p;
    /* The items have holds of their own; nothing is called back, for more than these remain. They are parked as before;
     * who has them is asked anew. */
    fan_fast_unpark(b, list, 0);
    for (size_t i = 0; i < n; i++)
        if (list->terms[i].object)
            b->frontend->drop(list->terms[i].object);
    fan_fast_list_empty(list);
    return FAN_OK;
done:
    fan_value_drop(b->frontend, &sum);
    if (items)
        items_free(b, items, made);
    fan_free(shape);
    fan_free(p);
    return status;
}
