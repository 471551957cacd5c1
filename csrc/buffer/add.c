/* add: one contribution into one slot.
 *
 *   1. it is checked (A8-A16), and its streams are planned (S3-S11)          locked
 *   2. it gets a place in the slot                                           locked
 *   3. it is converted, its event recorded, used on A (S9, S21)              unlocked
 *      parked: a fold may sum it                                             locked
 *   4. what is due is folded (Park and fold)                                 locked, but the sum
 *   5. the leaf's warning (S6)                                               unlocked
 *
 * Then the same of a plain contribution, and of many. */
#include "array/extents.h"
#include "array/sum.h"
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "buffer/add.h"
#include "buffer/fold.h"
#include "buffer/plain.h"
#include "buffer/slot.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- 1. is it right (A8-A16), and which stream waits (S3-S11)? ---- */

static const char *add_kind_words(char kind)
{
    switch (kind) {
    case 'c':
        return "complex";
    case 'f':
        return "float";
    case 'b':
        return "bool";
    default:
        return "integer";
    }
}

/* A10, A11: of arrays and numbers. */
static fan_status add_fail_dtype(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                 fan_dtype_fit fit, fan_error *err)
{
    const fan_slot_spec *spec = b->slots[slot].spec;
    const char *own = fan_dtype_name(c->value.dtype);
    fan_place place = fan_slot_place(b, slot, c->key);
    if (fit == FAN_DTYPE_FIT_WISH) {
        return fan_fail_at(
            err, FAN_ERR_VALUE, 0, place,
            "accumulate=%s cannot hold %s of dtype %s; declare the slot's dtype (A11)",
            fan_dtype_name(spec->accumulate), c->value.weak ? "a Python number" : "a gradient",
            own);
    }
    if (fit == FAN_DTYPE_FIT_APART) {
        return fan_fail_at(
            err, FAN_ERR_VALUE, 0, place,
            "%s has no common dtype with what the slot holds; declare the slot's dtype (A10)", own);
    }
    char want[32] = "dtype ";
    fan_append(want, sizeof want, "%s", fan_dtype_name(spec->dtype));
    return fan_fail_expected(err, FAN_ERR_VALUE, place, want, own,
                             ": %s into %s would lose values; convert it yourself (A10)",
                             add_kind_words(fan_dtype_kind(c->value.dtype)),
                             add_kind_words(fan_dtype_kind(spec->dtype)));
}

static fan_status add_check_dtype(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  fan_check_result *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *value = &c->value;
    fan_dtype declared = s->spec->dtype;
    out->to.dtype = value->dtype;
    out->seen = s->state->seen;
    if (value->form == FAN_FORM_OBJECT) {
        if (!s->spec->exact)
            return FAN_OK;
        return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, c->key),
                           "an exact sum takes arrays, and no objects (A11)");
    }
    /* D5: an undeclared dtype may still widen, so what does not fit the sum's is found when that is
     * made. */
    out->number = fan_value_number(value);
    fan_dtype_fit fit =
        fan_accum_dtype_fit(declared, s->spec->accumulate, value->dtype, value->weak, &out->seen);
    if (fit != FAN_DTYPE_FIT_EXACT && fit != FAN_DTYPE_FIT_CAST)
        return add_fail_dtype(b, slot, c, fit, err);
    if (declared != FAN_DT_NONE && !fan_weak_int_fits(out->number, declared))
        return fan_slot_fail_int(b, slot, c->key, out->number, declared, err);
    if (fit == FAN_DTYPE_FIT_CAST && !c->summed)
        out->to.dtype = declared;
    bool dense = value->form == FAN_FORM_DENSE;
    bool sparse = value->form == FAN_FORM_SPARSE;
    bool streams = value->device && value->device->backend->has_streams;
    if (s->spec->exact && sparse && streams) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, c->key),
                           "an exact sum on a device with streams takes dense gradients (A11)");
    }
    bool partial = value->form == FAN_FORM_PARTIAL;
    if (dense || sparse || partial)
        out->to.cast = value->dtype != out->to.dtype;
    out->to.whole = partial && (s->spec->exact || out->to.reduce);
    return FAN_OK;
}

/* An object that lists no memory of its own could be used on a stream without anyone knowing. */
static fan_status add_check_parts(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  const fan_device *want, fan_error *err)
{
    const fan_value *value = &c->value;
    bool streams = c->stream;
    if (want)
        streams = want->backend->has_streams;
    if (value->form != FAN_FORM_OBJECT || value->nparts || !streams)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, c->key),
                       "an object on a device with streams must say what memory it holds: "
                       "give it __fanin_parts__()");
}

/* A12. */
static fan_status add_check_device(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                   fan_check_result *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *value = &c->value;
    fan_device *want = s->spec->device ? s->spec->device : s->state->device;
    fan_move_facts facts = {.here = !value->device || !want || value->device == want};
    out->to.device = value->device;
    if (!facts.here) {
        bool from_host = value->device == fan_cpu();
        facts.dense = value->form == FAN_FORM_DENSE;
        facts.number = facts.dense && from_host && value->array->ndim == 0;
        facts.streams = want->backend->has_streams;
        facts.to_host = s->spec->device && want == fan_cpu();
        out->to.device = want;
    }
    out->to.move = fan_accum_move(&facts);
    if (out->to.move == FAN_MOVE_NOT)
        return add_check_parts(b, slot, c, want, err);
    if (out->to.move != FAN_MOVE_NO)
        return FAN_OK;
    char has[64] = "one on ";
    char wants[64] = "a gradient on ";
    char place[32];
    fan_append(wants, sizeof wants, "%s", fan_device_text(want, place, sizeof place));
    fan_append(has, sizeof has, "%s", fan_device_text(value->device, place, sizeof place));
    return fan_fail_expected(err, FAN_ERR_VALUE, fan_slot_place(b, slot, c->key), wants, has,
                             "%s (A12)", fan_device_of_another(value->device, want));
}

static fan_status add_check_stream(const fan_buffer *b, size_t slot, const fan_stream *stream,
                                   const fan_device *d, const char *whose, int64_t key,
                                   fan_error *err)
{
    char one[32];
    char two[32];
    if (!stream)
        return FAN_OK;
    const fan_device *own = stream->device;
    if (own->backend == d->backend && own->self == d->self)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, key),
                       "the %s stream is on %s, which cannot wait for or be waited for by %s%s",
                       whose, fan_device_text(own, one, sizeof one),
                       fan_device_text(d, two, sizeof two), fan_device_of_another(own, d));
}

/* A9: out->to.reduce. */
static fan_status add_check_shape(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  fan_check_result *out, fan_error *err)
{
    const fan_slot_spec *spec = b->slots[slot].spec;
    const fan_slot_state *state = b->slots[slot].state;
    bool declared = spec->has_shape;
    const int64_t *shape;
    int ndim = fan_value_shape(&c->value, &shape);
    if (ndim < 0 || (!declared && !state->shaped))
        return FAN_OK;
    const int64_t *wanted = state->shape;
    int wanted_ndim = state->ndim;
    if (declared) {
        wanted = spec->shape;
        wanted_ndim = spec->ndim;
    }
    fan_fit fit = fan_accum_fit(declared, wanted_ndim, wanted, ndim, shape);
    out->to.reduce = fit == FAN_FIT_REDUCE && c->value.form != FAN_FORM_ZERO;
    if (fit != FAN_FIT_NO)
        return FAN_OK;
    char has[160];
    char wants[240] = "a gradient of shape ";
    fan_append(wants, sizeof wants, "%s%s", fan_shape_text(wanted_ndim, wanted, has, sizeof has),
               declared ? " (or of a shape that is broadcast from it)" : " as the first one");
    return fan_fail_expected(err, FAN_ERR_VALUE, fan_slot_place(b, slot, c->key), wants,
                             fan_shape_text(ndim, shape, has, sizeof has), " (A9)");
}

/* A15, A16. */
static fan_status add_check_key(const fan_buffer *b, size_t slot, int64_t key, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_slot_state *state = s->state;
    if (fan_keys_mix(state->keyed, key)) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, key),
                           "this pass adds %s keys to this slot; keep to that until take() (A15)",
                           state->keyed > 0 ? "with" : "without");
    }
    if (fan_slot_missing(s, 1) <= 0)
        return fan_slot_fail_count(b, slot, key, "one more", err);
    if (key < 0)
        return FAN_OK;
    if ((uint64_t)key < state->next_key || fan_list_has(s->list, key)) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, key),
                           "this key has contributed already in this pass (A16)");
    }
    return FAN_OK;
}

fan_status fan_check_contribution(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  fan_stream *current, fan_stream *consumer, fan_check_result *out,
                                  fan_error *err)
{
    const fan_slot_state *state = b->slots[slot].state;
    fan_form form = c->value.form;
    bool defined = form != FAN_FORM_UNDEFINED;
    memset(out, 0, sizeof *out);
    out->to.dtype = FAN_DT_NONE;
    out->seen = state->seen;
    if (defined) {
        FAN_TRY(add_check_shape(b, slot, c, out, err));
        FAN_TRY(add_check_dtype(b, slot, c, out, err));
        FAN_TRY(add_check_device(b, slot, c, out, err));
    }
    if (c->weight.on) {
        FAN_TRY(fan_weight_check_value(b, slot, c->key, &c->weight, &c->value, out->to.dtype,
                                       out->to.reduce, err));
    }
    FAN_TRY(add_check_key(b, slot, c->key, err));

    const fan_conversion *to = &out->to;
    bool arrays = form == FAN_FORM_DENSE || form == FAN_FORM_PARTIAL;
    bool copied = c->copy && (arrays || form == FAN_FORM_SPARSE);
    bool moved = to->move != FAN_MOVE_NOT;
    bool changed = to->reduce || to->cast || to->whole;
    fan_add_facts facts = {.defined = defined,
                           .changes = changed || moved || copied,
                           .upload = to->move == FAN_MOVE_UPLOAD,
                           .download = to->move == FAN_MOVE_DOWNLOAD};
    fan_device *d = to->device;
    if (d && d->backend->has_streams) {
        FAN_TRY(add_check_stream(b, slot, c->stream, d, "producer's", c->key, err));
        FAN_TRY(add_check_stream(b, slot, consumer, d, "consumer's", c->key, err));
        if (!current) {
            return fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(b, slot, -1),
                               "out of memory for the current stream");
        }
        out->producer = c->stream ? c->stream : current;
        FAN_TRY(fan_stream_check_open(out->producer, err));
        facts.device = d->id;
        facts.producer = fan_stream_id_of(c->stream);
        facts.consumer = fan_stream_id_of(consumer);
        facts.current = fan_stream_id_of(current);
        facts.slot = fan_slot_streams(state);
    }
    out->plan = fan_plan_add(&facts);
    return FAN_OK;
}

/* ---- 2. a place in the slot ---- */

static fan_stream *add_current_of(fan_device *d)
{
    if (!d || !d->backend->has_streams)
        return NULL;
    return fan_stream_current(d);
}

fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c)
{
    fan_slot *s = &b->slots[slot];
    const fan_value *value = &c->value;
    if (s->spec->device)
        return add_current_of(s->spec->device);
    bool number =
        value->device == fan_cpu() && value->form == FAN_FORM_DENSE && value->array->ndim == 0;
    if (!number)
        return add_current_of(value->device);

    /* A12: it goes to the slot's device. */
    fan_slot_lock(b, slot);
    fan_device *d = s->state->device ? s->state->device : fan_cpu();
    fan_device_hold(d);
    fan_slot_unlock(b, slot);
    fan_stream *current = add_current_of(d);
    fan_device_drop(d);
    return current;
}

/* S7, S11: for a gradient made under capture and a slot that is empty: which stream consumes in the
 * place of that of the buffer, and which is current where the legacy stream would be. Unlocked: it
 * calls the driver. */
static fan_status add_across_captures(fan_buffer *b, size_t slot, const fan_contribution *c,
                                      fan_add_streams *with, fan_error *err)
{
    fan_stream *current = with->current;
    if (!current)
        return FAN_OK;
    fan_device *d = current->device;
    fan_stream *P = c->stream ? c->stream : current;
    fan_stream *asked = b->stream ? b->stream : current;
    if (P->device->backend != d->backend || asked->device->backend != d->backend)
        return FAN_OK;
    fan_stream *C = asked;
    FAN_TRY(fan_order_consumer(asked, P, NULL, &C, err));
    if (C != asked) {
        fan_stream_drop(with->consumer);
        with->consumer = fan_stream_hold(C);
    }
    if (current->handle != 1 || !d->backend->capture_stream)
        return FAN_OK;
    if (P->device == d || C->device == d)
        return FAN_OK;

    fan_slot_lock(b, slot);
    bool empty = !b->slots[slot].state->accum;
    fan_slot_unlock(b, slot);
    uint64_t id;
    FAN_TRY(fan_stream_capture(P, &id, err));
    if (!empty || !id)
        return FAN_OK;
    fan_stream *capture_stream = NULL;
    FAN_TRY(d->backend->capture_stream(d, id, &capture_stream, err));
    fan_stream_drop(current);
    with->current = capture_stream;
    with->pooled = true;
    return FAN_OK;
}

/* What a reservation needs room for. */
typedef struct add_room {
    fan_slot_state *state; /* the slot's, or a new one */
    int64_t *shape;        /* that the contribution fixes; NULL: it fixes none */
    int ndim;
} add_room;

/* Locked. Everything that can still fail: the state, the shape, a place in the list. Where it
 * fails, the slot is as it was. */
static fan_status reserve_prepare(fan_buffer *b, fan_add_op *op, bool keep, add_room *room,
                                  fan_error *err)
{
    fan_slot *s = &b->slots[op->slot];
    fan_list *list = fan_slot_list(s);
    const fan_entry entry = {.item = op->item, .general = true};
    const int64_t *shape = NULL;
    int ndim = fan_value_shape(&op->c->value, &shape);
    *room = (add_room){.state = s->state, .ndim = ndim};
    if (!fan_slot_has_state(s))
        room->state = fan_calloc(sizeof *room->state);
    bool good = list && room->state;
    if (good && op->c->weight.on)
        good = fan_slot_weights_begin(s, false);
    if (good && ndim >= 0 && !s->spec->has_shape && !room->state->shaped) {
        room->shape = fan_alloc((size_t)ndim * sizeof *shape);
        good = room->shape != NULL;
        if (good && ndim)
            memcpy(room->shape, shape, (size_t)ndim * sizeof *shape);
    }
    op->item->key = op->c->key;
    if (good && keep)
        good = fan_list_put(list, &entry);
    if (good)
        return FAN_OK;
    fan_free(room->shape);
    if (room->state != s->state)
        fan_slot_state_free(b, room->state);
    return fan_slot_fail_memory(b, op->slot, err);
}

/* Locked. Cannot fail: S5, S8 to S11: the slot's streams, fixed by its first gradient. */
static void reserve_commit_streams(fan_slot_state *state, const fan_add_op *op)
{
    const fan_check_result *checked = &op->checked;
    const fan_add_streams *with = &op->streams;
    const fan_sync_add *plan = &checked->plan.sync;
    if (plan->stream_case == FAN_CASE_HOST || plan->stream_case == FAN_CASE_LATER)
        return;
    fan_stream *const known[] = {with->consumer, checked->producer, with->current};
    state->stream_case = plan->stream_case;
    state->consumer = fan_stream_hold(fan_order_stream(plan->slot.consumer, known, 3));
    state->accum = fan_stream_hold(fan_order_stream(plan->slot.accum, known, 3));
    if (state->stream_case == FAN_CASE_CURRENT && with->pooled)
        state->capture_origin = fan_stream_hold(checked->producer);
    assert(state->consumer && state->accum);
}

/* Locked. Cannot fail: the pass has one contribution more. */
static void reserve_commit_state(fan_slot *s, const fan_add_op *op, const add_room *room)
{
    const fan_check_result *checked = &op->checked;
    const fan_contribution *c = op->c;
    fan_slot_state *state = room->state;
    if (s->state != state) /* the thread that sums reads it without the lock */
        s->state = state;
    if (room->shape) {
        state->shape = room->shape;
        state->ndim = room->ndim;
        state->shaped = true;
    }
    state->seen = checked->seen;
    state->has_weak_int = state->has_weak_int || c->value.weak;
    state->keyed = c->key < 0 ? -1 : 1;
    state->count++;
    state->objects = state->objects || c->value.form == FAN_FORM_OBJECT;
    if (checked->to.device && !state->device)
        state->device = fan_device_hold(checked->to.device);
    reserve_commit_streams(state, op);
    state->rules |= checked->plan.rules;
    if (c->weight.on)
        fan_slot_weights_put(s, &c->weight);
}

/* Locked. Cannot fail: the item, which is in the list, gets what is known of its contribution. */
static void reserve_commit_item(const fan_slot *s, const fan_add_op *op)
{
    const fan_check_result *checked = &op->checked;
    const fan_contribution *c = op->c;
    fan_item *item = op->item;
    bool defined = c->value.form != FAN_FORM_UNDEFINED;
    item->value = c->value;
    if (defined && c->value.form != FAN_FORM_OBJECT) {
        item->own = checked->seen;
        if (s->spec->dtype == FAN_DT_NONE)
            item->own = fan_dtype_set_add(0, c->value.dtype, c->value.weak);
    }
    item->number = checked->number;
    item->weight = c->weight;
    if (FAN_FAULT(WEIGHT_DROPPED) && op->follows)
        item->weight.on = false;
    item->donated = defined && c->donate && !c->copy;
    item->producer = fan_stream_hold(checked->producer);
    item->owned = c->summed;
    item->exposed = c->summed;
    item->parked = FAN_FAULT(PARKED_EARLY);
    s->state->arriving++;
}

/* Locked. Checks the contribution, and gives it a place in its slot. */
static fan_status reserve_locked(fan_buffer *b, fan_add_op *op, fan_error *err)
{
    fan_slot *s = &b->slots[op->slot];
    const fan_contribution *c = op->c;
    const fan_add_streams *with = &op->streams;
    bool defined = c->value.form != FAN_FORM_UNDEFINED;
    bool keep = defined || c->key >= 0;
    if (op->follows)
        FAN_TRY(fan_slot_poisoned(b, op->slot, err));
    else
        FAN_TRY(fan_slot_enter(b, op->slot, "add", err));
    FAN_TRY(
        fan_check_contribution(b, op->slot, c, with->current, with->consumer, &op->checked, err));
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    op->before = *s->state;
    add_room room;
    FAN_TRY(reserve_prepare(b, op, keep, &room, err));

    reserve_commit_state(s, op, &room);
    if (keep)
        reserve_commit_item(s, op);
    op->reserved = true;
    fan_stream *producer = op->checked.producer;
    if (b->leaf && producer && producer != s->state->consumer) {
        op->mismatch = true;
        op->producer = fan_stream_hold(producer);
    }
    if (defined) {
        op->accum = fan_stream_hold(s->state->accum);
        op->consumer = fan_stream_hold(s->state->consumer);
    } else if (!keep) {
        fan_free(op->item);
        op->item = NULL;
        fan_slot_notify(b, op->slot);
    }
    return FAN_OK;
}

fan_status fan_add_reserve(fan_buffer *b, fan_add_op *op, fan_error *err)
{
    size_t slot = op->slot;
    const fan_contribution *c = op->c;
    FAN_TRY(fan_slot_check_unmoved(b, slot, &c->value, c->key, err));
    if (c->value.form == FAN_FORM_SPARSE && c->value.device == fan_cpu()) {
        fan_interrupt interrupt;
        fan_buffer_interrupt_begin(b, &interrupt, true, err);
        FAN_TRY(fan_interrupt_end(&interrupt, fan_sparse_check(c->value.sparse, err)));
    }
    op->streams.current = fan_current_for(b, slot, c);
    op->streams.consumer = fan_stream_hold(b->stream);
    FAN_TRY(add_across_captures(b, slot, c, &op->streams, err));
    op->item = fan_calloc(sizeof *op->item);
    if (!op->item)
        return fan_slot_fail_memory(b, slot, err);
    fan_slot_lock(b, slot);
    fan_status status = reserve_locked(b, op, err);
    fan_slot_unlock(b, slot);
    return status;
}

/* Locked. Cannot fail: the state becomes what it was before the contribution, which was the last
 * that came. */
static void add_undo_state(fan_slot_state *state, const fan_slot_state *before)
{
    if (!before->shaped) {
        fan_free(state->shape);
        state->shape = NULL;
        state->ndim = 0;
        state->shaped = false;
    }
    if (!before->device) {
        fan_device_drop(state->device);
        state->device = NULL;
    }
    if (before->stream_case == FAN_CASE_HOST) {
        fan_stream_drop(state->consumer);
        fan_stream_drop(state->accum);
        fan_stream_drop(state->capture_origin);
        state->consumer = NULL;
        state->accum = NULL;
        state->capture_origin = NULL;
        state->stream_case = FAN_CASE_HOST;
    }
    state->rules = before->rules;
    state->seen = before->seen;
    state->has_weak_int = before->has_weak_int;
    state->keyed = before->keyed;
}

/* Locked: the caller has its value again, and the slot is as it was; *gone is for
 * fan_slot_state_free. */
static void add_undo(fan_buffer *b, fan_add_op *op, fan_slot_state **gone)
{
    fan_item *item = op->item;
    fan_slot *s = &b->slots[op->slot];
    fan_slot_state *state = s->state;
    fan_list *list = s->list;
    const fan_entry entry = {.item = item, .general = true};
    if (item)
        (void)fan_list_remove(list, &entry);
    state->count--;
    if (op->c->weight.on)
        fan_slot_weights_take_back(s, &op->c->weight);
    *gone = NULL;
    if (state->count == 0 && !state->poison) {
        *gone = fan_slot_cut(b, s);
    } else if (state->count == op->before.count && !state->poison) {
        /* no other contribution came meanwhile */
        add_undo_state(state, &op->before);
    } else {
        state->seen = state->summed_seen;
        for (size_t i = list->summed > 0; i < list->n; i++)
            state->seen = fan_entry_seen(state->seen, s, &list->entries[i]);
    }
    if (item && item->value.form != FAN_FORM_UNDEFINED) {
        /* a conversion is dropped, with the item */
        fan_value *back = op->old.form == FAN_FORM_UNDEFINED ? &item->value : &op->old;
        op->c->value = *back;
        *back = fan_value_none();
    }
    op->reserved = false;
    fan_slot_notify(b, op->slot);
}

void fan_add_fail(fan_buffer *b, fan_add_op *op, fan_status status, const fan_error *err)
{
    fan_slot *s = &b->slots[op->slot];
    fan_slot_state *gone = NULL;
    if (!op->reserved)
        return;
    fan_slot_lock(b, op->slot);
    if (op->item && !op->item->parked)
        s->state->arriving--;
    if (status != FAN_OK)
        fan_slot_poison(s, status, err);
    add_undo(b, op, &gone);
    fan_slot_unlock(b, op->slot);
    fan_slot_state_free(b, gone);
}

/* ---- converted, or copied, on the way into a slot (A9, A10, A12, S21) ---- */

/* One conversion. What its steps make is the caller's, also after a failure half-way. */
typedef struct add_conversion {
    fan_buffer *b;
    const fan_slot_spec *spec;
    const fan_conversion *to;
    fan_device *device; /* where a step runs, */
    fan_stream *on;     /* .. and what orders it; NULL: on the host */
    bool copies;        /* all memory of the result is the buffer's own */
} add_conversion;

/* One job from `in` to `out`, counted. `acc`: fan_operand's. */
static fan_status convert_job(const add_conversion *c, fan_job_kind kind, const char *label,
                              const fan_array *out, const fan_array *in, fan_dtype acc,
                              fan_error *err)
{
    fan_buffer *b = c->b;
    fan_operand operand = {.array = in, .acc = acc};
    fan_job job = {.kind = kind, .out = out, .in = &operand, .n = 1, .label = label};
    uint64_t bytes = fan_dense_bytes(in);
    bool on_host = !c->device->backend->has_streams;
    void *left = fan_frontend_leave(b->frontend, bytes >= FAN_BUSY_BYTES && on_host);
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_buffer_interrupt_begin(b, &interrupt, on_host, err);
    fan_status status = fan_device_run(c->device, c->on, &job, err);
    status = fan_interrupt_end(&interrupt, status);
    fan_frontend_return(b->frontend, left);
    FAN_COUNT(b, copies, 1);
    FAN_COUNT(b, passes, 1);
    FAN_COUNT(b, bytes_read, bytes);
    FAN_COUNT(b, bytes_written, fan_dense_bytes(out));
    return status;
}

/* An array in another dtype, or copied; otherwise the same memory with a hold more. */
static fan_status convert_part(const add_conversion *c, fan_array *from, fan_dtype dtype,
                               bool copies, fan_array **out, fan_error *err)
{
    if (from->dtype == dtype && !copies) {
        *out = fan_array_hold(from);
        return FAN_OK;
    }
    const char *label = from->dtype == dtype ? "copy" : "cast";
    FAN_TRY(fan_device_array(c->device, c->on, dtype, from->ndim, from->shape, from, out, err));
    return convert_job(c, FAN_JOB_COPY, label, *out, from, dtype, err);
}

/* The same entries, each number rounded (D6): duplicates are not added here, so that their sum runs
 * in the dtype of the slot (D12). Index parts that are not copied stay the source's. */
static fan_status convert_sparse(const add_conversion *c, const fan_sparse *v, fan_sparse **out,
                                 fan_error *err)
{
    fan_dtype dtype = c->to->dtype;
    fan_array *indices = NULL;
    fan_array *pointers = NULL;
    fan_array *values = NULL;
    fan_status status = FAN_OK;
    if (FAN_FAULT(MERGED_BEFORE_CAST)) {
        fan_sparse_operand own = {v, v->values->dtype};
        return fan_device_sparse_merge(c->device, c->on, &own, 1, true, dtype, NULL, out, err);
    }
    FAN_GO(convert_part(c, v->indices, v->indices->dtype, c->copies, &indices, err));
    if (v->pointers)
        FAN_GO(convert_part(c, v->pointers, v->pointers->dtype, c->copies, &pointers, err));
    FAN_GO(convert_part(c, v->values, dtype, c->copies, &values, err));
    FAN_GO(fan_sparse_new(v->format, v->ndim, v->shape, indices, pointers, values, v->coalesced,
                          out, err));
    (*out)->nnz_coalesced = v->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

/* Summed to the declared shape, each element rounded to the declared dtype before: in the
 * accumulation dtype, so that the slot's sum is rounded once more, at the end (D7). `from` NULL: of
 * a sparse one. */
static fan_status convert_reduce(const add_conversion *c, const fan_array *from,
                                 const fan_sparse *sparse, fan_array **made, fan_error *err)
{
    fan_dtype dtype = c->to->dtype;
    fan_dtype acc = fan_accum_dtype(dtype, FAN_DT_NONE);
    FAN_TRY(
        fan_device_array(c->device, c->on, acc, c->spec->ndim, c->spec->shape, NULL, made, err));
    if (from)
        return convert_job(c, FAN_JOB_REDUCE, "reduce", *made, from, dtype, err);
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_buffer_interrupt_begin(c->b, &interrupt, !c->device->backend->has_streams, err);
    fan_status status = fan_device_sparse_reduce(c->device, c->on, sparse, dtype, *made, err);
    status = fan_interrupt_end(&interrupt, status);
    FAN_COUNT(c->b, copies, 1);
    return status;
}

/* A 0-d gradient of the host for a device; cast on the host. */
static fan_status convert_upload(const add_conversion *c, const fan_array *from, fan_array **made,
                                 fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *host = NULL;
    fan_dtype dtype = c->to->dtype;
    add_conversion here = {.b = c->b, .device = fan_cpu()};
    FAN_GO(fan_device_array(here.device, NULL, dtype, 0, NULL, NULL, &host, err));
    FAN_GO(convert_job(&here, FAN_JOB_COPY, "cast", host, from, dtype, err));
    FAN_GO(fan_device_array(c->device, c->on, dtype, 0, NULL, NULL, made, err));
    status = convert_job(c, FAN_JOB_UPLOAD, "upload", *made, host, dtype, err);
done:
    fan_array_drop(host);
    return status;
}

/* A dense gradient. An expanded one stays expanded (A13): its compact base is copied, cast and
 * moved, and a reduction reads it as it is. */
static fan_status convert_dense(add_conversion *c, const fan_value *v, fan_array **made,
                                fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *compact = NULL;   /* the base of the gradient */
    fan_array *near = NULL;      /* .. on the host, where it comes from a device */
    fan_array *converted = NULL; /* .. as the slot wants it */
    fan_array *wide = NULL;      /* what is reduced: `near` in the shape of the gradient */
    const fan_array *whole = v->array;
    uint64_t expanded = fan_array_expanded(whole);
    if (FAN_FAULT(EXPANDED_WRITTEN_OUT))
        expanded = 0;
    FAN_GO(fan_array_compact(whole, expanded, &compact, err));
    fan_array *from = compact;
    if (c->to->move == FAN_MOVE_DOWNLOAD) {
        FAN_GO(fan_device_array(fan_cpu(), NULL, from->dtype, from->ndim, from->shape, from, &near,
                                err));
        FAN_GO(v->device->backend->read(c->on, near, from, err)); /* the elements are there then */
        from = near;
        c->on = NULL;
    }
    if (c->to->reduce) {
        FAN_GO(fan_array_broadcast(from, whole->ndim, whole->shape, &wide, err));
        status = convert_reduce(c, wide, NULL, made, err);
        goto done;
    }
    if (c->to->move == FAN_MOVE_UPLOAD)
        FAN_GO(convert_upload(c, from, &converted, err));
    else
        FAN_GO(convert_part(c, from, c->to->dtype, !near, &converted, err));
    status = fan_array_broadcast(converted, whole->ndim, whole->shape, made, err);
done:
    fan_array_drop(compact);
    fan_array_drop(near);
    fan_array_drop(converted);
    fan_array_drop(wide);
    return status;
}

/* A partial gradient as a dense one, in the dtype that it has or, where nothing is summed to a
 * declared shape yet, in that of the slot; zero elsewhere. */
static fan_status convert_whole(add_conversion *c, const fan_value *v, fan_array **made,
                                fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_patch *patch = v->patch;
    fan_array *whole = NULL;
    fan_array *view = NULL;
    fan_dtype dtype = c->to->reduce ? v->dtype : c->to->dtype;
    fan_job zero = {.kind = FAN_JOB_ZERO, .label = "begin"};
    FAN_GO(fan_device_array(c->device, c->on, dtype, patch->ndim, patch->shape, NULL, &whole, err));
    zero.out = whole;
    FAN_GO(fan_device_run(c->device, c->on, &zero, err));
    FAN_GO(fan_patch_view(patch, whole, &view, err));
    if (patch->size > 0)
        FAN_GO(convert_job(c, FAN_JOB_COPY, "copy", view, v->array, dtype, err));
    if (c->to->reduce)
        status = convert_reduce(c, whole, NULL, made, err);
    else
        *made = fan_array_hold(whole);
done:
    fan_array_drop(whole);
    fan_array_drop(view);
    return status;
}

/* The contribution as its slot wants it. */
static fan_status add_contribution_convert(fan_buffer *b, const fan_add_op *op, fan_stream *on,
                                           fan_value *out, fan_error *err)
{
    const fan_conversion *to = &op->checked.to;
    const fan_value *value = &op->c->value;
    fan_status status;
    fan_array *made = NULL;
    fan_sparse *sparse = NULL;
    add_conversion c = {
        .b = b, .spec = b->slots[op->slot].spec, .to = to, .device = to->device, .on = on};
    /* donated memory is its owner's again once it is converted */
    c.copies = (op->c->copy || op->c->donate) && !FAN_FAULT(COPY_KEEPS_INDICES);
    *out = fan_value_none();
    if (to->whole)
        status = convert_whole(&c, value, &made, err);
    else if (value->form != FAN_FORM_SPARSE)
        status = convert_dense(&c, value, &made, err);
    else if (to->reduce)
        status = convert_reduce(&c, NULL, value->sparse, &made, err);
    else
        status = convert_sparse(&c, value->sparse, &sparse, err);
    if (status != FAN_OK) {
        fan_array_drop(made);
        fan_sparse_drop(sparse);
        return status;
    }
    if (sparse)
        *out = fan_value_sparse(sparse, to->device);
    else
        *out = fan_value_dense(made, to->device);
    if (value->form == FAN_FORM_PARTIAL && !to->whole)
        fan_value_set_patch(out, value->patch);
    out->origin = value->origin;
    out->rank = value->rank;
    out->weak = value->weak;
    return FAN_OK;
}

/* ---- 3. carried out and parked ---- */

/* A planted fault: an event of the slot that is recorded again, instead of a new one. */
static fan_event *add_event_to_reuse(const fan_slot *s, const fan_device *d)
{
    for (size_t i = 0; i < fan_slot_entries(s); i++) {
        const fan_entry *one = &s->list->entries[i];
        fan_event *event = NULL;
        if (one->general)
            event = one->item->event;
        if (event && event->device == d)
            return event;
    }
    return NULL;
}

/* An event on `stream` for the item. */
static fan_status add_record(fan_buffer *b, const fan_add_op *op, fan_stream *stream, uint64_t bit,
                             fan_error *err)
{
    fan_item *item = op->item;
    fan_event_drop(item->event);
    item->event = NULL;
    if (FAN_FAULT(RECORD_AFTER_FOLD) && !item->owned)
        return fan_event_new(stream->device, &item->event, err);
    /* the slot is not locked here */
    fan_event *again = NULL;
    if (FAN_FAULT(EVENT_REUSED))
        again = add_event_to_reuse(&b->slots[op->slot], stream->device);
    if (!again)
        return fan_order_record(b, stream, bit, &item->event, err);
    item->event = fan_event_hold(again);
    return fan_event_rerecord(again, stream, err);
}

/* The event of the contribution before it in one call, where that covers this one as well: it was
 * recorded within the call, on the same stream, and the buffer has queued nothing there since.
 * NULL: there is none. */
static fan_event *add_shared_event(const fan_add_op *op)
{
    const fan_add_op *before = op->previous;
    if (!before || !before->item)
        return NULL;
    const fan_check_result *own = &op->checked;
    const fan_check_result *other = &before->checked;
    if (own->plan.convert != FAN_CONVERT_NOT || other->plan.convert != FAN_CONVERT_NOT)
        return NULL;
    if (other->plan.record != FAN_RECORD_PRODUCER || other->producer != own->producer)
        return NULL;
    if (other->plan.producer_bit != own->plan.producer_bit)
        return NULL;
    return before->item->event;
}

/* Whether a converted sparse gradient still reads index memory of its source. */
static bool shares_indices(const fan_value *made, const fan_value *source)
{
    return made->form == FAN_FORM_SPARSE && made->sparse->indices == source->sparse->indices;
}

static void add_trace(const fan_buffer *b, const fan_add_op *op)
{
    const fan_check_result *checked = &op->checked;
    /* a stream's number means something on its own device only */
    fan_stream *producer = checked->producer;
    const fan_device *d = producer ? producer->device : checked->to.device;
    fan_trace_line line = {.kind = FAN_TRACE_ADD,
                           .how = fan_sync_letter(checked->plan.sync.stream_case),
                           .device = fan_device_number(d),
                           .count = 1,
                           .key = op->c->key,
                           .rules = checked->plan.rules,
                           .stream = fan_stream_handle(producer),
                           .bytes = fan_value_bytes(&op->c->value)};
    fan_slot_trace(b, op->slot, line);
    fan_slot_digest(b, op->slot, &op->c->value, op->c->key, &op->c->weight, checked->producer);
}

/* From a device to the host, on a stream of the device that it comes from. */
static fan_status add_convert_at_source(fan_buffer *b, fan_add_op *op, fan_value *made,
                                        fan_error *err)
{
    const fan_contribution *c = op->c;
    fan_stream *on = fan_stream_hold(c->stream);
    if (!on)
        on = fan_stream_current(c->value.device);
    fan_status status = add_contribution_convert(b, op, on, made, err);
    fan_stream_drop(on);
    return status;
}

/* S21: what the plan has done before the conversion, and the conversion. */
static fan_status add_convert(fan_buffer *b, fan_add_op *op, fan_value *made, fan_error *err)
{
    const fan_add_plan *plan = &op->checked.plan;
    fan_stream *producer = op->checked.producer;
    fan_stream *on = producer;
    if (plan->convert == FAN_CONVERT_SOURCE)
        return add_convert_at_source(b, op, made, err);
    if (plan->convert == FAN_CONVERT_ACCUM)
        on = op->accum;
    if (plan->wait) {
        FAN_TRY(add_record(b, op, producer, plan->producer_bit, err));
        FAN_TRY(fan_order_wait(b, op->slot, on, op->item->event, FAN_PLAN_S21_WAIT, err));
    }
    if (plan->mark_source)
        FAN_TRY(fan_order_record_stream(&op->c->value, on, FAN_PLAN_S21_MARK, err));
    if (FAN_FAULT(RECORD_BEFORE_CONVERSION) && plan->record == FAN_RECORD_PRODUCER)
        FAN_TRY(add_record(b, op, producer, plan->producer_bit, err));
    FAN_TRY(add_contribution_convert(b, op, on, made, err));
    if (plan->convert != FAN_CONVERT_ACCUM)
        return FAN_OK;

    /* The item gets the stream where the converted gradient is ready. */
    fan_item *item = op->item;
    fan_status status = FAN_OK;
    fan_event_drop(item->event);
    item->event = NULL;
    fan_stream_drop(item->producer);
    item->producer = fan_stream_hold(fan_order_stream(plan->ready, &op->accum, 1));
    if (plan->record == FAN_RECORD_ACCUM)
        status = add_record(b, op, on, FAN_PLAN_S21_RECORD, err);
    if (status != FAN_OK)
        fan_value_drop(b->frontend, made);
    return status;
}

fan_status fan_add_carry_out(fan_buffer *b, fan_add_op *op, fan_error *err)
{
    const fan_add_plan *plan = &op->checked.plan;
    fan_item *item = op->item;
    const fan_value *value = &op->c->value;
    if (value->form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    /* it may have waited for the slot */
    FAN_TRY(fan_slot_check_unmoved(b, op->slot, value, op->c->key, err));
    if (fan_trace_on())
        add_trace(b, op);

    fan_value made = fan_value_none();
    if (plan->convert != FAN_CONVERT_NOT)
        FAN_TRY(add_convert(b, op, &made, err));
    if (made.form != FAN_FORM_UNDEFINED) {
        op->old = item->value;
        item->value = made;
        item->owned = !shares_indices(&made, &op->old);
        item->donated = false;
    }
    if (plan->record == FAN_RECORD_PRODUCER && !item->event) {
        fan_stream *on = op->checked.producer;
        if (FAN_FAULT(RECORD_ON_CONSUMER))
            on = op->consumer;
        item->event = fan_event_hold(add_shared_event(op));
        if (!item->event)
            FAN_TRY(add_record(b, op, on, plan->producer_bit, err));
    }
    if (plan->mark)
        FAN_TRY(fan_order_record_stream(&item->value, op->accum, FAN_PLAN_S9_MARK, err));

    op->bytes = fan_value_bytes(&item->value);
    if (op->bytes == 0)
        op->bytes = 1; /* an object without bytes passes a budget of 0, too */
    fan_form form = item->value.form;
    bool one_array = form == FAN_FORM_DENSE || form == FAN_FORM_PARTIAL;
    bool is_readable = one_array && item->value.device == fan_cpu();
    if (fan_get_debug() && is_readable && !item->owned) {
        FAN_TRY(fan_slot_hash(b, item->value.array, true, &item->hash, err));
        item->hashed = true;
    }
    return FAN_OK;
}

void fan_add_park(fan_buffer *b, fan_add_op *op)
{
    fan_item *item = op->item;
    if (!item || op->parked)
        return;
    op->parked = true;
    b->slots[op->slot].state->arriving--;
    op->c->value = fan_value_none();
    item->bytes = op->bytes;
    item->parked = true;
    if (fan_sched_active())
        fan_buffer_weigh(b, op->bytes);
    bool dense_on_host = item->value.form == FAN_FORM_DENSE && !op->accum;
    bool alone = item->owned || op->c->alone;
    item->alone = b->budget == FAN_BUDGET_AUTO && dense_on_host && alone;
    if (item->alone)
        atomic_fetch_add_explicit(&b->alone, item->bytes, memory_order_relaxed);
    fan_count_parked(b, op->bytes);
    fan_slot_notify(b, op->slot);
}

void fan_add_unpark(fan_buffer *b, fan_add_op *op)
{
    if (!op->parked)
        return;
    fan_item_unpark(b, op->item);
    op->parked = false;
    op->item->parked = false;
    b->slots[op->slot].state->arriving++;
}

void fan_add_end(fan_buffer *b, fan_add_op *op)
{
    if (op->reserved)
        FAN_COUNT(b, adds, 1);
    else
        fan_item_free(b, op->item);
    if (op->reserved && b->sum_stats) {
        fan_slot_lock(b, op->slot);
        fan_sum_stats last = fan_sum_stats_forget(b, op->slot);
        fan_slot_unlock(b, op->slot);
        fan_sum_stats_drop(&last);
    }
    if (op->c->donate)
        fan_value_returned(&op->old); /* the slot keeps its conversion */
    fan_value_drop(b->frontend, &op->old);
    fan_stream_drop(op->accum);
    fan_stream_drop(op->consumer);
    fan_stream_drop(op->producer);
    fan_stream_drop(op->streams.current);
    fan_stream_drop(op->streams.consumer);
}

fan_status fan_add_warn(fan_buffer *b, const fan_add_op *ops, size_t n, fan_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const fan_add_op *op = &ops[i];
        if (!op->mismatch)
            continue;
        FAN_COUNT(b, mismatches, 1);
        if (b->frontend->mismatch && fan_warn_mismatch_now())
            FAN_TRY(b->frontend->mismatch(b->name, op->slot, op->producer, op->consumer, err));
    }
    return FAN_OK;
}

/* ---- one contribution ---- */

/* Locked: folds if that is due. *gone is for fan_slot_state_free. */
static fan_status add_fold(fan_buffer *b, fan_add_op *op, fan_slot_state **gone, fan_error *err)
{
    fan_slot *s = &b->slots[op->slot];
    const fan_entry own = {.item = op->item, .general = true};
    fan_event *recorded_again = NULL;
    if (FAN_FAULT(RECORD_AFTER_FOLD) && op->item->event)
        recorded_again = fan_event_hold(op->item->event);
    fan_status status = fan_slot_fold_while_due(b, op->slot, err);
    if (recorded_again)
        (void)fan_event_rerecord(recorded_again, op->checked.producer, err);
    fan_event_drop(recorded_again);
    if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
        return FAN_OK; /* it is parked; the sum is tried again later */
    if (status == FAN_OK || fan_status_poisons(status))
        return status;
    /* A callback raised: the add did not happen, if its contribution is still there to be taken
     * back. */
    bool there = false;
    for (size_t i = 0; i < s->list->n && !there; i++)
        there = fan_entry_same(&s->list->entries[i], &own);
    if (there && !s->busy) {
        fan_item_unpark(b, op->item);
        add_undo(b, op, gone);
    }
    return status;
}

/* Carried out, parked, folded. */
static fan_status add_reserved(fan_buffer *b, fan_add_op *op, fan_error *err)
{
    fan_slot_state *gone = NULL;
    fan_status status = fan_add_carry_out(b, op, err);
    if (status != FAN_OK) {
        fan_add_fail(b, op, status, err);
        return status;
    }
    if (!op->item)
        return FAN_OK;
    bool defined = op->c->value.form != FAN_FORM_UNDEFINED;
    fan_slot_lock(b, op->slot);
    fan_add_park(b, op);
    if (defined)
        status = add_fold(b, op, &gone, err);
    fan_slot_unlock(b, op->slot);
    fan_slot_state_free(b, gone);
    return status;
}

fan_status fan_buffer_add(fan_buffer *b, size_t slot, fan_contribution *c, fan_error *err)
{
    fan_add_op op = {.slot = slot, .c = c, .old = fan_value_none()};
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_status status = fan_add_reserve(b, &op, err);
    if (status == FAN_OK)
        status = add_reserved(b, &op, err);
    if (status == FAN_OK)
        status = fan_add_warn(b, &op, 1, err);
    fan_add_end(b, &op);
    return status;
}

/* ---- a plain contribution (plain.h): without a lock, a value or an item ---- */

static void add_plain_count_peak(fan_buffer *b, uint64_t now)
{
    atomic_uint_fast64_t *peak = &b->counters.peak_parked_bytes;
    if (now > atomic_load_explicit(peak, memory_order_relaxed))
        atomic_store_explicit(peak, now, memory_order_relaxed);
}

/* Whether the first gradient of a slot is as declared (A9, A10, A12), and of a dtype that is summed
 * here. It may be large while it is alone. */
static bool add_plain_fits(const fan_slot_spec *spec, const fan_plain_kind *kind)
{
    if (spec->exact || !fan_slot_takes(spec, kind->dtype, kind->ndim, kind->shape))
        return false;
    return fan_sum_flat_fits(kind->dtype, fan_accum_dtype(kind->dtype, spec->accumulate));
}

static inline __attribute__((always_inline)) bool add_plain_park(fan_buffer *b, size_t slot,
                                                                 const fan_plain_kind *kind,
                                                                 const fan_entry *one)
{
    fan_slot *s = &b->slots[slot];
    if (fan_slot_has_state(s) || s->busy || fan_plain_stats_on_device(b, slot))
        return false;
    fan_list *list = fan_slot_list(s);
    if (!list)
        return false;
    if (fan_keys_mix(fan_list_keyed(list), one->key))
        return false;
    if (kind && !fan_list_defined(list)) {
        if (!add_plain_fits(s->spec, kind))
            return false;
        list->kind = *kind;
        list->size = fan_plain_bytes(kind);
        list->bytes = list->size ? list->size : 1;
    } else if (kind) {
        if (fan_plain_is_large(list->size) || !fan_plain_same(&list->kind, kind))
            return false;
    }
    if (fan_slot_missing(s, 1) <= 0)
        return false;
    return fan_list_insert(list, one);
}

/* add_plain_count: true: the budget is to be checked; `due`: it is anyway. */
static inline __attribute__((always_inline)) bool add_plain_count(fan_buffer *b, size_t slot,
                                                                  const fan_plain_kind *kind,
                                                                  bool copied, bool due)
{
    fan_counter_add(&b->counters.adds, 1);
    if (!kind)
        return false;
    if (copied) { /* a copy that was made for the buffer is counted as one of its own */
        uint64_t size = fan_plain_bytes(kind);
        fan_counter_add(&b->counters.copies, 1);
        fan_counter_add(&b->counters.passes, 1);
        fan_counter_add(&b->counters.bytes_read, size);
        fan_counter_add(&b->counters.bytes_written, size);
    }
    const fan_list *list = b->slots[slot].list;
    uint64_t bytes = list->bytes;
    if (fan_sched_active())
        fan_buffer_weigh(b, bytes);
    uint64_t now = atomic_fetch_add_explicit(&b->parked, bytes, memory_order_relaxed) + bytes;
    add_plain_count_peak(b, now);
    if (!fan_budget_near(b, now))
        return false;
    return due || fan_list_begins(list);
}

typedef struct add_plain_op {
    fan_list *list; /* whose first entry is the sum .. */
    fan_dtype acc;  /* .. in this dtype */
    void *object;   /* whose memory the sum is; NULL: the buffer's own */
    char *sum;
    const char *data;
    size_t count; /* elements */
    int64_t key;
} add_plain_op;

/* add_plain_takes: whether one more of this kind is added straight into the sum, which is the first
 * of the slot's list, with nothing behind it (A6): it is complete up to `key`. With an automatic
 * budget they wait until some can be summed together. */
static bool add_plain_takes(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                            const char *data, int64_t key)
{
    const fan_slot *s = &b->slots[slot];
    const fan_list *list = s->list;
    const fan_entry *first = &list->entries[0];
    bool eager = b->budget != FAN_BUDGET_AUTO;
    bool idle = !fan_slot_has_state(s) && !s->busy && !s->targets;
    bool only = list->n == 1;
    if (!eager || !idle || !only)
        return false;
    if (kind->scalar || !fan_plain_same(&list->kind, kind))
        return false;
    if (fan_keys_mix(fan_list_keyed(list), key) || fan_slot_missing(s, 1) <= 0)
        return false;
    if (!fan_key_is_next(fan_list_next_key(list), key))
        return false;
    bool overlaps = fan_flats_meet(first->data, list->bytes, data, list->bytes);
    if (overlaps || !fan_plain_is_flat(list->size, 2))
        return false;
    return fan_plain_may_write(b, slot, 1, fan_plain_accum(b, slot)) == FAN_REUSE_YES;
}

static bool add_plain_can(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                          const char *data, int64_t key, add_plain_op *out)
{
    const fan_slot *s = &b->slots[slot];
    if (b->sum_stats || !fan_plain_has_sum(s))
        return false;
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    bool due = fan_budget_near(b, parked + fan_plain_kind_bytes(kind));
    if (!due || !add_plain_takes(b, slot, kind, data, key))
        return false;
    const fan_entry *first = &s->list->entries[0];
    *out = (add_plain_op){.list = s->list,
                          .acc = kind->dtype,
                          .sum = first->data,
                          .data = data,
                          .count = fan_plain_elements(kind),
                          .key = key};
    if (first->wide)
        out->acc = fan_plain_accum(b, slot);
    if (!first->owned)
        out->object = first->object;
    return true;
}

/* add_plain_unchanged: the gradient is what it was, and so is a sum that was donated (NULL: it is
 * the buffer's own). */
static bool add_plain_unchanged(const fan_buffer *b, const fan_plain_kind *kind,
                                const fan_entry *one, const add_plain_op *op)
{
    if (kind->check_at_use && !fan_plain_unchanged(b, one->object, kind, one->data))
        return false;
    if (!op->object)
        return true;
    return fan_plain_unchanged(b, op->object, kind, op->sum) &&
           b->frontend->plain->writable(op->object, kind);
}

/* add_plain_begin: whether `one` is to be added into the slot's sum at once. Calls the library
 * first, which may run arbitrary code, and then checks all again. */
static bool add_plain_begin(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                            const fan_entry *one, add_plain_op *op)
{
    const fan_plain_frontend *plain = b->frontend->plain;
    FAN_UNINITIALIZED add_plain_op then;
    if (one->owned || !add_plain_can(b, slot, kind, one->data, one->key, op))
        return false;
    if (!kind->check_at_use)
        return add_plain_unchanged(b, kind, one, op);
    const fan_entry first = op->list->entries[0];
    void *sum = op->object;
    /* It was checked when the second contribution came, and has had no other reference since. */
    bool checked = sum && op->list->summed > 1 && plain->nobody_else_has(sum);
    if (sum)
        plain->hold(sum);
    bool good = fan_plain_has_value(b, one, false);
    if (good && !checked)
        good = fan_plain_has_value(b, &first, true);
    good = good && add_plain_can(b, slot, kind, one->data, one->key, &then);
    if (good && then.sum == op->sum && then.object == sum)
        good = add_plain_unchanged(b, kind, one, &then);
    else
        good = false;
    if (good)
        *op = then;
    if (sum)
        b->frontend->drop(sum);
    return good;
}

static void add_plain_sum(fan_buffer *b, const add_plain_op *op)
{
    fan_list *list = op->list;
    fan_entry *sum = &list->entries[0];
    fan_dtype dtype = list->kind.dtype;
    size_t count = op->count;
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    if (fan_sched_active())
        fan_buffer_weigh(b, list->size);
    bool wide = sum->wide;
    if (wide) {
        (void)fan_sum_flat_from(op->sum, op->sum, &op->data, 1, count, dtype, op->acc, NULL, true);
    } else {
        const char *const runs[] = {op->sum, op->data};
        (void)fan_sum_flat(op->sum, runs, 2, count, dtype, op->acc, NULL);
    }
    list->summed++;
    list->rules |= fan_plan_plain_fold(true);
    *sum = fan_entry_of(sum->object, sum->data, op->key, false, sum->owned);
    sum->wide = wide;
    uint64_t size = fan_plain_sum_size(list, wide);
    fan_counter_add(&b->counters.adds, 1);
    fan_counter_add(&b->counters.folds, 1);
    fan_counter_add(&b->counters.passes, 1);
    fan_counter_add(&b->counters.in_place, 1);
    fan_counter_add(&b->counters.bytes_read, list->size + size);
    fan_counter_add(&b->counters.bytes_written, size);
    add_plain_count_peak(b, parked + list->bytes);
}

/* A copy for the buffer, which *one is then, with the caller's hold. NULL: it is for the general
 * path. May call the array library, which may run arbitrary code. */
static void *add_plain_copy(fan_buffer *b, const fan_plain_kind *kind, fan_entry *one)
{
    if (kind->scalar || fan_plain_pitch(kind))
        return NULL;
    if (!fan_plain_fits(kind->dtype, kind->dtype, fan_plain_bytes(kind)))
        return NULL;
    void *copy = b->frontend->plain->copy(one->object, kind, &one->data);
    if (!copy)
        return NULL;
    one->object = copy;
    one->owned = true;
    one->alone = true;
    return copy;
}

/* The statistics, the counters, and a fold that is due, once a contribution is parked. */
static inline __attribute__((always_inline)) fan_status add_plain_end(fan_buffer *b, size_t slot,
                                                                      const fan_plain_kind *kind,
                                                                      const fan_entry *one,
                                                                      fan_error *err)
{
    if (b->sum_stats)
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    if (!add_plain_count(b, slot, kind, one->owned, false))
        return FAN_OK;
    fan_sched_stepped();
    return fan_plain_fold_due(b, slot, one->object, one->alone, err);
}

fan_status fan_plain_add(fan_buffer *b, size_t slot, const fan_plain_kind *kind, fan_entry *one,
                         bool *added, fan_error *err)
{
    FAN_UNINITIALIZED add_plain_op op;
    assert(slot < b->nslots);
    *added = false;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return FAN_OK;
    bool sum = kind && fan_plain_has_sum(&b->slots[slot]);
    if (sum && add_plain_begin(b, slot, kind, one, &op)) {
        add_plain_sum(b, &op);
        *added = true; /* the buffer keeps no reference, so needs no copy */
        return FAN_OK;
    }
    void *copy = NULL;
    bool allowed = true;
    if (one->copy && kind) {
        copy = add_plain_copy(b, kind, one);
        if (!copy)
            return FAN_OK;
        allowed = fan_plain_allowed() && fan_buffer_is_usable(b);
    }
    *added = allowed && add_plain_park(b, slot, kind, one);
    if (*added && kind)
        b->frontend->plain->hold(one->object);
    if (copy)
        b->frontend->drop(copy);
    if (!*added)
        return FAN_OK;
    return add_plain_end(b, slot, kind, one, err);
}

/* add_plain_weight_fits: whether a plain contribution takes this weight: the general path reports
 * what is wrong with it. */
static bool add_plain_weight_fits(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                                  const fan_weight *weight)
{
    if (kind->scalar || weight->im != 0)
        return false;
    fan_dtype wish = b->slots[slot].spec->accumulate;
    bool is_float = kind->dtype == FAN_DT_FLOAT32 || kind->dtype == FAN_DT_FLOAT64;
    bool usual = fabs(weight->re) < 0x1p64 && fabs(weight->re) > 0x1p-64;
    if (is_float && wish == FAN_DT_NONE && usual)
        return true;
    fan_dtype acc = fan_accum_dtype(kind->dtype, wish);
    return fan_weight_check(b, slot, -1, weight, kind->dtype, acc, NULL) == FAN_OK;
}

fan_status fan_plain_add_weighted(fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                                  fan_entry *one, const fan_weight *weight, bool *added,
                                  fan_error *err)
{
    assert(slot < b->nslots);
    fan_slot *s = &b->slots[slot];
    *added = false;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return FAN_OK;
    if (!add_plain_weight_fits(b, slot, kind, weight))
        return FAN_OK;
    void *copy = NULL;
    bool allowed = true;
    if (one->copy) {
        copy = add_plain_copy(b, kind, one);
        if (!copy)
            return FAN_OK;
        allowed = fan_plain_allowed() && fan_buffer_is_usable(b);
    }
    allowed = allowed && fan_slot_weights_begin(s, true);
    one->weighted = true;
    *added = allowed && add_plain_park(b, slot, kind, one);
    one->weighted = *added;
    if (*added) {
        fan_slot_weights_put_plain(s, one->key, weight);
        b->frontend->plain->hold(one->object);
    }
    if (copy)
        b->frontend->drop(copy);
    if (!*added)
        return FAN_OK;
    return add_plain_end(b, slot, kind, one, err);
}

/* ---- many plain contributions ---- */

#define ADD_AHEAD 8

void fan_plain_prefetch(const fan_buffer *b, size_t slot)
{
    if (slot >= b->nslots)
        return;
    const char *list = (const char *)b->slots[slot].list;
    if (!list)
        return;
    for (size_t at = 0; at < 192; at += 64)
        __builtin_prefetch(list + at, 1);
}

/* add_plain_read: the k-th of a batch; false: it is not a plain one. */
static bool add_plain_read(const fan_buffer *b, const fan_plain_batch *batch, size_t k,
                           size_t *slot, fan_plain_kind *kind, fan_entry *one)
{
    return batch->read(batch->ctx, k, slot, kind, one) && *slot < b->nslots;
}

/* Whether the k-th of a batch goes straight into the sum of a slot beyond `last`. *slot: the slot
 * that it is for. */
static bool add_plain_sums(const fan_buffer *b, const fan_plain_batch *batch, size_t k, size_t last,
                           size_t *slot, add_plain_op *op)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    if (!add_plain_read(b, batch, k, slot, &kind, &one))
        return false;
    if (!one.object || kind.check_at_use)
        return false;
    if (k && *slot <= last)
        return false;
    return add_plain_can(b, *slot, &kind, one.data, one.key, op) && !op->object;
}

/* add_plain_sum_all: true: all went straight into their sums; false: one is not for that, and
 * nothing happened. */
static bool add_plain_sum_all(fan_buffer *b, const fan_plain_batch *batch)
{
    FAN_UNINITIALIZED add_plain_op next;
    add_plain_op *all = NULL; /* made once there is one */
    size_t slot;
    size_t last = 0;
    size_t found = 0;
    for (; found < batch->n; found++) {
        if (batch->far)
            batch->prefetch(batch->ctx, found);
        /* Ascending: each slot occurs once, so each check still holds when its sum is written. */
        if (!add_plain_sums(b, batch, found, last, &slot, &next))
            break;
        if (!all)
            all = fan_alloc(batch->n * sizeof *all);
        if (!all)
            break;
        all[found] = next;
        last = slot;
    }
    bool good = all && found == batch->n;
    for (size_t k = 0; good && k < found; k++) {
        if (k + ADD_AHEAD < found) {
            const add_plain_op *ahead = &all[k + ADD_AHEAD];
            __builtin_prefetch(ahead->list, 1);
            __builtin_prefetch(ahead->sum, 1);
            __builtin_prefetch(ahead->data);
        }
        add_plain_sum(b, &all[k]);
    }
    fan_free(all);
    return good;
}

/* add_plain_take_back: the first n of a batch, which were parked, the last one first. */
static void add_plain_take_back(fan_buffer *b, const fan_plain_batch *batch, size_t n)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    size_t slot;
    while (n-- > 0) {
        (void)add_plain_read(b, batch, n, &slot, &kind, &one);
        fan_list *list = b->slots[slot].list;
        (void)fan_list_remove(list, &one);
        if (one.object) {
            fan_list_unpark(b, list, 1);
            b->frontend->drop(one.object);
        }
        fan_counter_add(&b->counters.adds, UINT64_MAX);
    }
}

/* Parks them in turn. Returns how many, up to the first that is not for that; *due: the budget is
 * to be checked. */
static size_t add_plain_park_all(fan_buffer *b, const fan_plain_batch *batch, bool *due)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    size_t slot;
    for (size_t k = 0; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        if (!add_plain_read(b, batch, k, &slot, &kind, &one))
            return k;
        const fan_plain_kind *its = one.object ? &kind : NULL;
        if (!add_plain_park(b, slot, its, &one))
            return k;
        if (its)
            b->frontend->plain->hold(one.object);
        *due |= add_plain_count(b, slot, its, false, *due);
    }
    return batch->n;
}

fan_status fan_plain_add_many(fan_buffer *b, const fan_plain_batch *batch, bool *added,
                              fan_error *err)
{
    size_t slot;
    bool due = false;
    *added = fan_plain_allowed() && fan_buffer_is_usable(b);
    if (!*added || (batch->n && add_plain_sum_all(b, batch)))
        return FAN_OK;
    uint64_t peak = atomic_load(&b->counters.peak_parked_bytes);
    size_t parked = add_plain_park_all(b, batch, &due);
    *added = parked == batch->n;
    if (!*added) {
        add_plain_take_back(b, batch, parked);
        atomic_store(&b->counters.peak_parked_bytes, peak);
        return FAN_OK;
    }
    /* last of all: of what was taken back all is known still */
    for (size_t k = 0; b->sum_stats && k < parked; k++) {
        (void)batch->again(batch->ctx, k, &slot);
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    }
    if (!due)
        return FAN_OK;
    fan_sched_stepped();
    for (size_t k = 0; k < parked; k++) {
        const void *object = batch->again(batch->ctx, k, &slot);
        if (object)
            FAN_TRY(fan_plain_fold_due(b, slot, object, false, err));
    }
    return FAN_OK;
}
