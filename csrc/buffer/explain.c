/* explain: what a slot looks like now, and what its next sum would do; expect and ready. */
#include "base/fault.h"
#include "buffer/slot.h"
#include "buffer/fold_job.h"
#include "buffer/fold.h"
#include "buffer/stats.h"
#include <inttypes.h>
#include <string.h>

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
    if (status == FAN_OK) { /* the plan that a sum of all that is there would follow */
        out->dtype = fan_fold_dtype(&gathered.fold);
        out->accumulate = out->dtype == FAN_DT_NONE
                              ? FAN_DT_NONE
                              : fan_accum_dtype(out->dtype, s->spec->accumulate);
        if (gathered.fold.n > 1)
            fan_fold_decide(&gathered.fold);
        out->next = gathered.fold.plan;
        fan_gathered_fini(&gathered);
    }
    fan_slot_lock(b, slot);
    const fan_slot_state *p = s->state;
    const fan_entry *sum = fan_slot_sum(s);
    const fan_item *own = sum && sum->general ? sum->item : NULL;
    out->how = p->accum ? fan_sync_letter(p->how) : '\0';
    out->rules = p->rules;
    out->consumer = p->consumer ? p->consumer->handle : 0;
    out->accum = p->accum ? p->accum->handle : 0;
    out->ready = own && own->producer ? own->producer->handle : 0;
    out->event = own && own->event;
    out->has_value = sum != NULL;
    out->value_owned = own ? own->owned : sum && (sum->owned || s->list->summed > 1);
    out->value_form = own ? own->value.form : sum ? FAN_FORM_DENSE : FAN_FORM_UNDEFINED;
    out->poisoned = p->poison ? p->poison->text : NULL;
    out->count = p->count;
    out->expected = s->expected;
    out->next_key = p->keyed > 0 && p->next_key <= INT64_MAX ? (int64_t)p->next_key : -1;
    out->items = fan_slot_waiting(s);
    out->budget = b->budget;
    out->limits = b->limits;
    out->parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    out->alone = atomic_load_explicit(&b->alone, memory_order_relaxed);
    if (s->list)
        fan_list_sort(s->list);
    for (size_t i = 0; i < fan_slot_waiting(s) && i < cap; i++) {
        const fan_entry *one = &s->list->entries[i + (s->list->summed > 0)];
        const fan_item *it = one->general ? one->item : NULL;
        if (!it) {
            items[i] = (fan_item_view){.key = one->key, .dtype = FAN_DT_NONE, .ready = true};
            if (one->object) {
                items[i].form = FAN_FORM_DENSE;
                items[i].dtype = s->list->kind.dtype;
                items[i].donated = one->donated;
            }
            continue;
        }
        items[i] = (fan_item_view){.key = it->key, .dtype = FAN_DT_NONE};
        if (it->parked) /* until then its add may be about the rest, without the lock */
            items[i] = (fan_item_view){.key = it->key,
                                       .form = it->value.form,
                                       .dtype = it->value.dtype,
                                       .producer = it->producer ? it->producer->handle : 0,
                                       .event = it->event,
                                       .donated = it->donated,
                                       .ready = true};
    }
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
    if (n < 0)
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, -1),
                           "expect takes a count >= 0, got %" PRId64, n);
    fan_slot_lock(b, slot);
    fan_status status = FAN_OK;
    if (fan_slot_count(&b->slots[slot]) > n)
        status = fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, -1),
                             "expects %" PRId64 " contribution%s but has %" PRId64 " already (A16)",
                             n, FAN_PLURAL(n), fan_slot_count(&b->slots[slot]));
    else
        b->slots[slot].expected = n;
    fan_slot_unlock(b, slot);
    return status;
}

fan_status fan_buffer_ready(fan_buffer *b, size_t slot, bool *ready, fan_error *err)
{
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot_lock(b, slot);
    const fan_slot *s = &b->slots[slot];
    fan_status status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK && s->expected < 0)
        status = fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, -1),
                             "ready() needs expect(%zu, n) first", slot);
    *ready = status == FAN_OK && fan_slot_missing(s, 0) == 0 &&
             (s->state->arriving == 0 || FAN_FAULT(READY_TOO_SOON));
    fan_slot_unlock(b, slot);
    return status;
}
