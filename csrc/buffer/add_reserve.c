/* add_reserve: gives a contribution its place in the slot, and takes it back if the add fails later. */
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "buffer/add_op.h"
#include "buffer/enter.h"
#include "buffer/lock.h"
#include "buffer/order.h"
#include "buffer/pass.h"
#include "buffer/unchanged.h"

#include <assert.h>
#include <string.h>

/* S5, S8 to S11: the slot's streams, fixed by its first gradient. */
static void fix_streams(fan_pass *p, const fan_arrival *a, const fan_add_streams *with)
{
    fan_stream *const known[] = {with->consumer, a->producer, with->current};
    p->how = a->plan.sync.how;
    p->consumer = fan_stream_hold(fan_order_stream(a->plan.sync.slot.consumer, known, 3));
    p->accum = fan_stream_hold(fan_order_stream(a->plan.sync.slot.accum, known, 3));
    p->capture_origin = p->how == FAN_CASE_CURRENT && with->pooled ? fan_stream_hold(a->producer) : NULL;
    assert(p->consumer && p->accum);
}

/* Makes room for one item more at *at and, if the slot has no shape yet, a copy of the shape. False: out of memory;
 * *shape is owned by the caller. */
static bool make_room(const fan_slot *s, fan_pass *p, const fan_contribution *c, size_t *at, bool keep, int64_t **shape)
{
    const int64_t *from = NULL;
    int ndim = fan_value_shape(&c->value, &from);
    if (ndim >= 0 && !s->spec->has_shape && !p->shaped) {
        *shape = fan_alloc((size_t)ndim * sizeof **shape);
        if (!*shape)
            return false;
        if (ndim)
            memcpy(*shape, from, (size_t)ndim * sizeof **shape);
    }
    if (!keep)
        return true;
    if (fan_grow((void **)&p->items, &p->cap, p->nitems + 1, sizeof *p->items) != 0)
        return false;
    /* With many items each new one would move the rest: it goes behind all others, and the items are sorted when they
     * are read. */
    if (c->key >= 0 && !p->unsorted && p->nitems - *at > FAN_SHIFTED && !fan_pass_by_arrival(p))
        return false;
    *at = p->unsorted ? p->nitems : *at;
    return !p->unsorted || fan_keys_put(p->unsorted, c->key) >= 0;
}

/* Notes in the pass what a contribution brings: dtypes, keys, range of ints. */
static void pass_note(fan_pass *p, const fan_contribution *c, const fan_arrival *a, const fan_add_streams *with)
{
    p->seen = a->seen;
    if (c->value.weak) {
        p->has_weak_int = true;
        p->weak_lo = a->weak_lo;
        p->weak_hi = a->weak_hi;
    }
    p->keyed = c->key >= 0 ? 1 : -1;
    p->count++;
    p->objects = p->objects || c->value.form == FAN_FORM_OBJECT;
    if (a->device && !p->device)
        p->device = fan_device_hold(a->device);
    if (a->plan.sync.how != FAN_CASE_HOST && a->plan.sync.how != FAN_CASE_LATER)
        fix_streams(p, a, with);
    p->rules |= a->plan.rules;
}

static void put_item(const fan_slot *s, size_t at, const fan_contribution *c, const fan_arrival *a, fan_item *it)
{
    fan_pass *p = s->p;
    memmove(&p->items[at + 1], &p->items[at], (p->nitems - at) * sizeof *p->items);
    p->items[at] = it;
    p->nitems++;
    p->arriving++;
    it->value = c->value;
    it->key = c->key;
    if (c->value.form != FAN_FORM_UNDEFINED && c->value.form != FAN_FORM_OBJECT)
        it->own = s->spec->dtype != FAN_DT_NONE ? a->seen : fan_dtype_set_add(0, c->value.dtype, c->value.weak);
    it->donated = c->donate && !c->copy && c->value.form != FAN_FORM_UNDEFINED;
    it->producer = fan_stream_hold(a->producer);
    it->ours = it->exposed = c->summed;
    it->parked = FAN_FAULT(PARKED_EARLY);
}

/* Locked: puts a contribution that was checked into the slot. FAN_ERR_NOMEM changes nothing. */
static fan_status reserve(fan_buffer *b, size_t slot, fan_contribution *c, const fan_arrival *a,
                          const fan_add_streams *with, fan_item *it, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_pass *p = s->p;
    bool keep = c->value.form != FAN_FORM_UNDEFINED || c->key >= 0;
    int64_t *shape = NULL;
    size_t at = a->at;
    if (p == &fan_pass_none && !(p = fan_calloc(sizeof *p)))
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    if (!make_room(s, p, c, &at, keep, &shape)) {
        fan_free(shape);
        if (s->p == &fan_pass_none)
            fan_pass_free(b, p);
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    }
    if (s->p != p) /* the thread that sums reads it without the lock */
        s->p = p;
    if (shape) {
        const int64_t *same;
        p->shape = shape;
        p->ndim = fan_value_shape(&c->value, &same);
        p->shaped = true;
    }
    pass_note(p, c, a, with);
    if (keep)
        put_item(s, at, c, a, it);
    return FAN_OK;
}

/* Locked: takes a reserved item back, of a pass that was `before` without it. Returns the pass if nothing else was in
 * it, for fan_pass_free. */
static fan_pass *take_back(fan_buffer *b, size_t slot, fan_item *it, const fan_pass *before)
{
    fan_slot *s = &b->slots[slot];
    fan_pass *p = s->p;
    for (size_t i = p->nitems; i-- > 0;)
        if (p->items[i] == it) {
            memmove(&p->items[i], &p->items[i + 1], (p->nitems - i - 1) * sizeof *p->items);
            p->nitems--;
            if (p->unsorted)
                fan_keys_remove(p->unsorted, it->key);
            break;
        }
    p->count--;
    /* no other contribution came meanwhile: the pass becomes what it was (forget_one) */
    bool alone = p->count == before->count && !p->poison;
    p->seen = p->value_seen;
    for (size_t i = 0; !alone && i < p->nitems; i++)
        p->seen = fan_item_seen(p->seen, s, p->items[i]);
    return p->count == 0 && !p->poison ? fan_pass_cut(s) : NULL;
}

fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c)
{
    fan_slot *s = &b->slots[slot];
    fan_device *d = s->spec->device ? s->spec->device : c->value.device;
    fan_stream *current;
    if (d == fan_cpu() && !s->spec->device && c->value.form == FAN_FORM_DENSE && c->value.array->ndim == 0) {
        fan_slot_lock(b, slot);
        d = s->p->device ? s->p->device : d;
        fan_device_hold(d);
        fan_slot_unlock(b, slot);
        current = d->backend->has_streams ? fan_stream_current(d) : NULL;
        fan_device_drop(d);
        return current;
    }
    return d && d->backend->has_streams ? fan_stream_current(d) : NULL;
}

/* S7, S11: for a gradient made under capture and a slot that is empty: which stream consumes in the place of that of
 * the buffer, and which is current where the legacy stream would be. Unlocked: the driver is asked. */
static fan_status across_captures(fan_buffer *b, size_t slot, const fan_contribution *c, fan_add_streams *with,
                                  fan_error *err)
{
    fan_stream *current = with->current, *P = c->stream ? c->stream : current, *C = b->stream ? b->stream : current,
               *capture_stream = NULL;
    uint64_t id;
    if (!current || P->device->backend != current->device->backend || C->device->backend != current->device->backend)
        return FAN_OK;
    fan_stream *asked = C;
    FAN_TRY(fan_order_consumer(asked, P, NULL, &C, err));
    if (C != asked) {
        fan_stream_drop(with->consumer);
        with->consumer = fan_stream_hold(C);
    }
    if (current->handle != 1 || P->device == current->device || C->device == current->device ||
        !current->device->backend->capture_stream)
        return FAN_OK;
    fan_slot_lock(b, slot);
    bool empty = !b->slots[slot].p->accum;
    fan_slot_unlock(b, slot);
    FAN_TRY(fan_stream_capture(P, &id, err));
    if (!empty || !id)
        return FAN_OK;
    FAN_TRY(current->device->backend->capture_stream(current->device, id, &capture_stream, err));
    fan_stream_drop(current);
    with->current = capture_stream;
    with->pooled = true;
    return FAN_OK;
}

/* Checks it, and gives it a place in its slot. */
fan_status fan_add_reserve(fan_buffer *b, fan_add_op *x, fan_error *err)
{
    fan_status status = FAN_OK;
    size_t slot = x->slot;
    fan_contribution *c = x->c;
    fan_slot *s = &b->slots[slot];
    FAN_TRY(fan_slot_check_unmoved(b, slot, &c->value, c->key, err));
    if (c->value.form == FAN_FORM_SPARSE && c->value.device == fan_cpu()) {
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, b->frontend->check_signals, err);
        FAN_TRY(fan_interrupt_end(&interrupt, fan_sparse_check(c->value.sparse, err)));
    }
    x->with.current = fan_current_for(b, slot, c);
    x->with.consumer = fan_stream_hold(b->stream);
    FAN_TRY(across_captures(b, slot, c, &x->with, err));
    x->it = fan_calloc(sizeof *x->it);
    if (!x->it)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    fan_slot_lock(b, slot);
    FAN_GO(x->follows ? fan_slot_poisoned(b, slot, err) : fan_slot_enter(b, slot, "add", err));
    FAN_GO(fan_check_contribution(b, slot, c, x->with.current, x->with.consumer, &x->a, err));
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    x->before = *s->p;
    FAN_GO(reserve(b, slot, c, &x->a, &x->with, x->it, err));
    x->reserved = true;
    if (b->leaf && x->a.producer && x->a.producer != s->p->consumer) {
        x->mismatch = true;
        x->producer = fan_stream_hold(x->a.producer);
    }
    if (c->value.form == FAN_FORM_UNDEFINED && c->key < 0) {
        fan_free(x->it);
        x->it = NULL;
        fan_slot_notify(b, slot);
    } else if (c->value.form != FAN_FORM_UNDEFINED) {
        x->accum = fan_stream_hold(s->p->accum);
        x->consumer = fan_stream_hold(s->p->consumer);
    }
done:
    fan_slot_unlock(b, slot);
    return status;
}

/* Undoes pass_note for a contribution that is taken back, if no other came meanwhile. */
static void forget_one(fan_pass *p, const fan_pass *before)
{
    if (p->count != before->count || p->poison)
        return;
    if (!before->shaped) {
        fan_free(p->shape);
        p->shape = NULL;
        p->ndim = 0;
        p->shaped = false;
    }
    if (!before->device) {
        fan_device_drop(p->device);
        p->device = NULL;
    }
    if (before->how == FAN_CASE_HOST) {
        fan_stream_drop(p->consumer);
        fan_stream_drop(p->accum);
        fan_stream_drop(p->capture_origin);
        p->consumer = p->accum = p->capture_origin = NULL;
        p->how = FAN_CASE_HOST;
    }
    p->rules = before->rules;
    p->seen = before->seen;
    p->has_weak_int = before->has_weak_int;
    p->weak_lo = before->weak_lo;
    p->weak_hi = before->weak_hi;
    p->keyed = before->keyed;
}

/* Locked: the caller has its value again, and the slot is as it was; *gone is for fan_pass_free. */
void fan_add_undo(fan_buffer *b, fan_add_op *x, fan_pass **gone)
{
    fan_item *it = x->it;
    *gone = take_back(b, x->slot, it, &x->before);
    if (!*gone)
        forget_one(b->slots[x->slot].p, &x->before);
    if (it && it->value.form != FAN_FORM_UNDEFINED) {
        if (x->old.form == FAN_FORM_UNDEFINED) {
            x->c->value = it->value;
            it->value = (fan_value){.dtype = FAN_DT_NONE};
        } else {
            x->c->value = x->old;
            x->old = (fan_value){.dtype = FAN_DT_NONE};
        }
    }
    x->reserved = false;
    fan_slot_notify(b, x->slot);
}

/* After a failure of its own, or of one beside it: unlocked. */
void fan_add_fail(fan_buffer *b, fan_add_op *x, fan_status status, const fan_error *err)
{
    fan_pass *gone = NULL;
    if (!x->reserved)
        return;
    fan_slot_lock(b, x->slot);
    if (x->it && !x->it->parked)
        b->slots[x->slot].p->arriving--;
    if (status != FAN_OK)
        fan_slot_poison(&b->slots[x->slot], status, err);
    fan_add_undo(b, x, &gone);
    fan_slot_unlock(b, x->slot);
    fan_pass_free(b, gone);
}
