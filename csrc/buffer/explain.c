/* explain: the present state of a slot, and what its next sum would do; expect and ready. */
#include "base/fault.h"
#include "buffer/slot.h"
#include "buffer/fold_job.h"
#include "buffer/fold.h"
#include "buffer/stats.h"
#include <inttypes.h>
#include <string.h>

/* The plan that a sum of all that is there would follow. */
static void look_at_plan(fan_gathered *gathered, fan_slot_view *out)
{
    fan_fold *fold = &gathered->fold;
    out->dtype = fan_fold_dtype(fold);
    out->accumulate = fan_fold_accumulated(fold, fold->seen);
    if (fold->n > 1)
        fan_fold_decide(fold);
    out->next = fold->plan;
}

/* Locked: the running sum. */
static void look_at_sum(const fan_slot *s, fan_slot_view *out)
{
    const fan_entry *sum = fan_slot_sum(s);
    if (!sum)
        return;
    out->has_value = true;
    if (!sum->general) {
        out->value_owned = sum->owned || s->list->summed > 1;
        out->value_form = FAN_FORM_DENSE;
        return;
    }
    const fan_item *item = sum->item;
    out->ready = fan_stream_handle(item->producer);
    out->event = item->event;
    out->value_owned = item->owned;
    out->value_form = item->value.form;
}

/* Locked: the state of the pass, and the limits of the buffer. */
static void look_at_slot(const fan_buffer *b, const fan_slot *s, fan_slot_view *out)
{
    const fan_slot_state *state = s->state;
    out->how = fan_slot_letter(s);
    out->rules = state->rules;
    out->consumer = fan_stream_handle(state->consumer);
    out->accum = fan_stream_handle(state->accum);
    if (state->poison)
        out->poisoned = state->poison->text;
    out->count = state->count;
    out->expected = s->expected;
    out->next_key = -1;
    if (state->keyed > 0 && state->next_key <= INT64_MAX)
        out->next_key = (int64_t)state->next_key;
    out->items = fan_slot_waiting(s);
    out->budget = b->budget;
    out->limits = b->limits;
    out->parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    out->alone = atomic_load_explicit(&b->alone, memory_order_relaxed);
}

/* Locked: one that waits. */
static fan_item_view look_at_entry(const fan_list *list, const fan_entry *one)
{
    fan_item_view view = {.key = fan_entry_key(one), .dtype = FAN_DT_NONE};
    if (!one->general) {
        view.ready = true;
        if (one->object) {
            view.form = FAN_FORM_DENSE;
            view.dtype = list->kind.dtype;
            view.donated = one->donated;
        }
        return view;
    }
    const fan_item *item = one->item;
    if (!item->parked) /* until then its add may be about the rest, without the lock */
        return view;
    view.form = item->value.form;
    view.dtype = item->value.dtype;
    view.producer = fan_stream_handle(item->producer);
    view.event = item->event;
    view.donated = item->donated;
    view.ready = true;
    return view;
}

fan_status fan_buffer_look(fan_buffer *b, size_t slot, fan_slot_view *out, fan_item_view *items,
                           size_t cap, fan_error *err)
{
    memset(out, 0, sizeof *out);
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot *s = &b->slots[slot];
    fan_slot_lock(b, slot);
    fan_status status = fan_slot_claim_all(b, slot, false, "explain", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    fan_gathered gathered;
    status = fan_gather(b, slot, SIZE_MAX, false, &gathered, err);
    if (status == FAN_OK) {
        look_at_plan(&gathered, out);
        fan_gathered_fini(&gathered);
    }
    fan_slot_lock(b, slot);
    fan_list *list = s->list;
    look_at_sum(s, out);
    look_at_slot(b, s, out);
    if (list)
        fan_list_sort(list);
    for (size_t i = 0; i < out->items && i < cap; i++)
        items[i] = look_at_entry(list, &list->entries[i + (list->summed > 0)]);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    return status;
}

void fan_buffer_sketch(fan_buffer *b, fan_sketch *out)
{
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot_lock(b, i);
        const fan_slot *s = &b->slots[i];
        out->parked += fan_slot_waiting(s);
        out->sums += fan_slot_sum(s) || s->state->exact;
        out->poisoned += s->state->poison != NULL;
        fan_slot_unlock(b, i);
    }
    out->bytes = atomic_load_explicit(&b->parked, memory_order_relaxed);
}

fan_status fan_buffer_expect(fan_buffer *b, size_t slot, int64_t n, fan_error *err)
{
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_place place = fan_slot_place(b, slot, -1);
    if (n < 0) {
        return fan_fail_value(err, place, "expect takes a count >= 0, got %" PRId64, n);
    }
    fan_slot_lock(b, slot);
    fan_slot *s = &b->slots[slot];
    fan_status status = FAN_OK;
    int64_t count = fan_slot_count(s);
    if (count <= n)
        s->expected = n;
    else {
        status = fan_fail_value(
            err, place, "expects %" PRId64 " contribution%s but has %" PRId64 " already (A16)", n,
            FAN_PLURAL(n), count);
    }
    fan_slot_unlock(b, slot);
    return status;
}

fan_status fan_buffer_ready(fan_buffer *b, size_t slot, bool *ready, fan_error *err)
{
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot_lock(b, slot);
    const fan_slot *s = &b->slots[slot];
    fan_status status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK && s->expected < 0) {
        status = fan_fail_value(err, fan_slot_place(b, slot, -1),
                                "ready() needs expect(%zu, n) first", slot);
    }
    bool arrived = s->state->arriving == 0 || FAN_FAULT(READY_TOO_SOON);
    *ready = status == FAN_OK && arrived && fan_slot_missing(s, 0) == 0;
    fan_slot_unlock(b, slot);
    return status;
}
