/* add: one contribution into one slot, the general path (fan_buffer_add, at the end). The short
 * path of plain contributions is add_plain.c.
 *
 *   1. it is checked (A8-A16), and its streams are planned (S3-S11)          locked
 *   2. it gets a place in the slot                                           locked
 *   3. it is converted (add_convert.c), its event recorded, used on A (S9, S21)
 *                                                                            unlocked
 *      parked: a fold may sum it                                             locked
 *   4. what is due is folded (Park and fold)                                 locked, but the sum
 *   5. the leaf's warning (S6)                                               unlocked */
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "buffer/add.h"
#include "buffer/fold.h"
#include "buffer/slot.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <assert.h>
#include <inttypes.h>
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

/* A contribution while it is checked. */
typedef struct add_check {
    const fan_buffer *b;
    size_t slot;
    const fan_slot *s;
    const fan_contribution *c;
    const fan_value *value;
    fan_place place; /* what an error is about */
    fan_check_result *out;
} add_check;

/* A10, A11: of arrays and numbers. */
static fan_status check_dtype_failed(const add_check *check, fan_dtype_fit fit, fan_error *err)
{
    const fan_slot_spec *spec = check->s->spec;
    const fan_value *value = check->value;
    const char *own = fan_dtype_name(value->dtype);
    if (fit == FAN_DTYPE_FIT_WISH) {
        const char *what = "a gradient";
        if (value->weak)
            what = "a Python number";
        return fan_fail_value(
            err, check->place,
            "accumulate=%s cannot hold %s of dtype %s; declare the slot's dtype (A11)",
            fan_dtype_name(spec->accumulate), what, own);
    }
    if (fit == FAN_DTYPE_FIT_APART) {
        return fan_fail_value(
            err, check->place,
            "%s has no common dtype with what the slot holds; declare the slot's dtype (A10)", own);
    }
    char want[32] = "dtype ";
    fan_append(want, sizeof want, "%s", fan_dtype_name(spec->dtype));
    return fan_fail_expected(err, FAN_ERR_VALUE, check->place, want, own,
                             ": %s into %s would lose values; convert it yourself (A10)",
                             add_kind_words(fan_dtype_kind(value->dtype)),
                             add_kind_words(fan_dtype_kind(spec->dtype)));
}

/* A11: what an exact sum takes. */
static fan_status check_exact(const add_check *check, fan_error *err)
{
    const fan_value *value = check->value;
    if (!check->s->spec->exact)
        return FAN_OK;
    if (value->form == FAN_FORM_OBJECT) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0, check->place,
                           "an exact sum takes arrays, and no objects (A11)");
    }
    bool streams = value->device && value->device->backend->has_streams;
    if (value->form != FAN_FORM_SPARSE || !streams)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_TYPE, 0, check->place,
                       "an exact sum on a device with streams takes dense gradients (A11)");
}

static fan_status check_dtype(const add_check *check, fan_error *err)
{
    const fan_slot_spec *spec = check->s->spec;
    const fan_value *value = check->value;
    fan_check_result *out = check->out;
    fan_dtype declared = spec->dtype;
    out->to.dtype = value->dtype;
    if (value->form == FAN_FORM_OBJECT)
        return check_exact(check, err);
    /* D5: an undeclared dtype may still widen, so what does not fit the sum's is found when that is
     * made. */
    out->number = fan_value_number(value);
    fan_dtype_fit fit =
        fan_accum_dtype_fit(declared, spec->accumulate, value->dtype, value->weak, &out->seen);
    if (fit != FAN_DTYPE_FIT_EXACT && fit != FAN_DTYPE_FIT_CAST)
        return check_dtype_failed(check, fit, err);
    if (declared != FAN_DT_NONE && !fan_weak_int_fits(out->number, declared)) {
        return fan_slot_fail_int(check->b, check->slot, check->c->key, out->number, declared, err);
    }
    if (fit == FAN_DTYPE_FIT_CAST && !check->c->summed)
        out->to.dtype = declared;
    FAN_TRY(check_exact(check, err));
    bool partial = value->form == FAN_FORM_PARTIAL;
    if (value->form != FAN_FORM_ZERO)
        out->to.cast = value->dtype != out->to.dtype;
    out->to.whole = partial && (spec->exact || out->to.reduce);
    return FAN_OK;
}

/* Refuses an object on a device with streams that lists no memory of its own: no rule could order
 * its uses. */
static fan_status check_parts(const add_check *check, const fan_device *want, fan_error *err)
{
    const fan_value *value = check->value;
    bool streams = check->c->stream;
    if (want)
        streams = want->backend->has_streams;
    if (value->form != FAN_FORM_OBJECT || value->nparts || !streams)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_TYPE, 0, check->place,
                       "an object on a device with streams must say what memory it holds: "
                       "give it __fanin_parts__()");
}

/* A12. */
static fan_status check_device(const add_check *check, fan_error *err)
{
    const fan_value *value = check->value;
    fan_conversion *to = &check->out->to;
    fan_device *declared = check->s->spec->device;
    fan_device *want = check->s->state->device;
    if (declared)
        want = declared;
    fan_move_facts facts = {.here = !value->device || !want || value->device == want};
    to->device = value->device;
    if (!facts.here) {
        bool from_host = value->device == fan_cpu();
        facts.dense = value->form == FAN_FORM_DENSE;
        facts.number = facts.dense && from_host && value->array->ndim == 0;
        facts.streams = want->backend->has_streams;
        facts.to_host = declared && want == fan_cpu();
        to->device = want;
    }
    to->move = fan_accum_move(&facts);
    if (to->move == FAN_MOVE_NOT)
        return check_parts(check, want, err);
    if (to->move != FAN_MOVE_NO)
        return FAN_OK;
    char has[64] = "one on ";
    char wants[64] = "a gradient on ";
    char place[32];
    fan_append(wants, sizeof wants, "%s", fan_device_text(want, place, sizeof place));
    fan_append(has, sizeof has, "%s", fan_device_text(value->device, place, sizeof place));
    return fan_fail_expected(err, FAN_ERR_VALUE, check->place, wants, has, "%s (A12)",
                             fan_device_of_another(value->device, want));
}

static fan_status check_stream(const add_check *check, const fan_stream *stream, const char *whose,
                               fan_error *err)
{
    const fan_device *d = check->out->to.device;
    char one[32];
    char two[32];
    if (!stream)
        return FAN_OK;
    const fan_device *own = stream->device;
    if (own->backend == d->backend && own->self == d->self)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_TYPE, 0, check->place,
                       "the %s stream is on %s, which cannot wait for or be waited for by %s%s",
                       whose, fan_device_text(own, one, sizeof one),
                       fan_device_text(d, two, sizeof two), fan_device_of_another(own, d));
}

/* A9: out->to.reduce. */
static fan_status check_shape(const add_check *check, fan_error *err)
{
    const fan_slot_spec *spec = check->s->spec;
    const fan_slot_state *state = check->s->state;
    const fan_value *value = check->value;
    bool declared = spec->has_shape;
    const int64_t *shape;
    int ndim = fan_value_shape(value, &shape);
    if (ndim < 0 || (!declared && !state->shaped))
        return FAN_OK;
    const int64_t *wanted = state->shape;
    int wanted_ndim = state->ndim;
    const char *why = " as the first one";
    if (declared) {
        wanted = spec->shape;
        wanted_ndim = spec->ndim;
        why = " (or of a shape that is broadcast from it)";
    }
    fan_fit fit = fan_accum_fit(declared, wanted_ndim, wanted, ndim, shape);
    check->out->to.reduce = fit == FAN_FIT_REDUCE && value->form != FAN_FORM_ZERO;
    if (fit != FAN_FIT_NO)
        return FAN_OK;
    char has[160];
    char wants[240] = "a gradient of shape ";
    fan_append(wants, sizeof wants, "%s%s", fan_shape_text(wanted_ndim, wanted, has, sizeof has),
               why);
    return fan_fail_expected(err, FAN_ERR_VALUE, check->place, wants,
                             fan_shape_text(ndim, shape, has, sizeof has), " (A9)");
}

/* A15, A16. */
static fan_status check_key(const add_check *check, fan_error *err)
{
    const fan_slot *s = check->s;
    const fan_slot_state *state = s->state;
    int64_t key = check->c->key;
    if (fan_keys_mix(state->keyed, key)) {
        const char *how = "without";
        if (state->keyed > 0)
            how = "with";
        return fan_fail_value(
            err, check->place,
            "this pass adds %s keys to this slot; keep to that until take() (A15)", how);
    }
    if (fan_slot_missing(s, 1) <= 0)
        return fan_slot_fail_count(check->b, check->slot, key, "one more", err);
    if (key < 0)
        return FAN_OK;
    if ((uint64_t)key < state->next_key || fan_list_has(s->list, key)) {
        return fan_fail_value(err, check->place,
                              "this key has contributed already in this pass (A16)");
    }
    return FAN_OK;
}

/* S3 to S5: the streams of a contribution that will be on a device with streams. */
static fan_status check_streams(const add_check *check, const fan_add_streams *with,
                                fan_add_facts *facts, fan_error *err)
{
    fan_check_result *out = check->out;
    fan_stream *stream = check->c->stream;
    FAN_TRY(check_stream(check, stream, "producer's", err));
    FAN_TRY(check_stream(check, with->consumer, "consumer's", err));
    if (!with->current) {
        fan_place place = check->place;
        place.key = -1;
        return fan_fail_at(err, FAN_ERR_NOMEM, 0, place, "out of memory for the current stream");
    }
    out->producer = with->current;
    if (stream)
        out->producer = stream;
    FAN_TRY(fan_stream_check_open(out->producer, err));
    facts->device = out->to.device->id;
    facts->producer = fan_stream_id_of(stream);
    facts->consumer = fan_stream_id_of(with->consumer);
    facts->current = fan_stream_id_of(with->current);
    facts->slot = fan_slot_streams(check->s->state);
    return FAN_OK;
}

fan_status fan_check_contribution(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  const fan_add_streams *with, fan_check_result *out,
                                  fan_error *err)
{
    const fan_value *value = &c->value;
    const add_check check = {.b = b,
                             .slot = slot,
                             .s = &b->slots[slot],
                             .c = c,
                             .value = value,
                             .place = fan_slot_place(b, slot, c->key),
                             .out = out};
    bool defined = value->form != FAN_FORM_UNDEFINED;
    memset(out, 0, sizeof *out);
    out->to.dtype = FAN_DT_NONE;
    out->seen = check.s->state->seen;
    if (defined) {
        FAN_TRY(check_shape(&check, err));
        FAN_TRY(check_dtype(&check, err));
        FAN_TRY(check_device(&check, err));
    }
    const fan_conversion *to = &out->to;
    if (c->weight.on) {
        FAN_TRY(
            fan_weight_check_value(b, slot, c->key, &c->weight, value, to->dtype, to->reduce, err));
    }
    FAN_TRY(check_key(&check, err));

    bool arrays = value->form == FAN_FORM_DENSE || value->form == FAN_FORM_PARTIAL;
    bool copied = c->copy && (arrays || value->form == FAN_FORM_SPARSE);
    bool moved = to->move != FAN_MOVE_NOT;
    bool changed = to->reduce || to->cast || to->whole;
    fan_add_facts facts = {.defined = defined,
                           .changes = changed || moved || copied,
                           .upload = to->move == FAN_MOVE_UPLOAD,
                           .download = to->move == FAN_MOVE_DOWNLOAD};
    if (to->device && to->device->backend->has_streams)
        FAN_TRY(check_streams(&check, with, &facts, err));
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
    fan_device *d = fan_cpu();
    if (s->state->device)
        d = s->state->device;
    fan_device_hold(d);
    fan_slot_unlock(b, slot);
    fan_stream *current = add_current_of(d);
    fan_device_drop(d);
    return current;
}

/* S7, S11: for a gradient made under capture and a slot that is empty: which stream consumes
 * instead of the buffer's, and which is current where the legacy stream would be. Unlocked: it
 * calls the driver. */
static fan_status add_across_captures(fan_buffer *b, size_t slot, const fan_contribution *c,
                                      fan_add_streams *with, fan_error *err)
{
    fan_stream *current = with->current;
    if (!current)
        return FAN_OK;
    fan_device *d = current->device;
    fan_stream *P = current;
    if (c->stream)
        P = c->stream;
    fan_stream *asked = current;
    if (b->stream)
        asked = b->stream;
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

/* The sizes that a reservation allocates room for. */
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
    bool undeclared = !s->spec->has_shape && ndim >= 0;
    if (good && undeclared && !room->state->shaped) {
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
    state->keyed = 1;
    if (c->key < 0)
        state->keyed = -1;
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
    bool defined = c->value.form != FAN_FORM_UNDEFINED;
    bool keep = defined || c->key >= 0;
    if (op->follows)
        FAN_TRY(fan_slot_poisoned(b, op->slot, err));
    else
        FAN_TRY(fan_slot_enter(b, op->slot, "add", err));
    FAN_TRY(fan_check_contribution(b, op->slot, c, &op->streams, &op->checked, err));
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
        fan_value *back = &op->old;
        if (op->old.form == FAN_FORM_UNDEFINED)
            back = &item->value;
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
    const fan_device *d = checked->to.device;
    if (producer)
        d = producer->device;
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
    fan_status status = fan_add_convert(b, op->slot, c, &op->checked.to, on, made, err);
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
    FAN_TRY(fan_add_convert(b, op->slot, op->c, &op->checked.to, on, made, err));
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
    if (fan_status_is_memory(status))
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
