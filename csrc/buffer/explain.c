/* explain: what a slot looks like now, and what its next sum would do. */
#include "buffer/enter.h"
#include "buffer/fold_job.h"
#include "buffer/fold_run.h"
#include "buffer/gather.h"
#include "buffer/lock.h"
#include "buffer/pass.h"

#include <string.h>

fan_status fan_buffer_look(fan_buffer *b, size_t slot, fan_slot_view *out, fan_item_view *items, size_t cap,
                           fan_error *err)
{
    fan_gathered g;
    fan_slot *s;
    fan_status status;
    memset(out, 0, sizeof *out);
    FAN_TRY(fan_slot_check(b, slot, err));
    s = &b->slots[slot];
    fan_slot_lock(b, slot);
    status = fan_slot_claim_all(b, slot, false, "explain", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    status = fan_gather(b, slot, SIZE_MAX, &g, err);
    if (status == FAN_OK) {
        fan_dtype d = fan_fold_dtype(&g.fold);
        out->dtype = d;
        out->accumulate = d == FAN_DT_NONE ? d : fan_accum_dtype(d, s->spec->accumulate);
        out->next = fan_fold_plan(&g.fold);
        out->reuse = fan_fold_reuse(&g.fold);
        fan_gathered_fini(&g);
    }
    fan_slot_lock(b, slot);
    out->how = s->p->how;
    out->rules = s->p->rules;
    out->consumer = s->p->consumer ? s->p->consumer->handle : 0;
    out->accum = s->p->accum ? s->p->accum->handle : 0;
    out->ready = s->p->ready ? s->p->ready->handle : 0;
    out->event = s->p->ready_event != NULL;
    out->has_value = s->p->value.form != FAN_FORM_UNDEFINED;
    out->value_ours = s->p->value_ours;
    out->value_form = s->p->value.form;
    out->poisoned = s->p->poison ? s->p->poison->text : NULL;
    out->count = s->p->count;
    out->expected = s->expected;
    out->next_key = s->p->keyed > 0 ? s->p->next_key : -1;
    out->items = s->p->nitems;
    fan_pass_in_order(s->p);
    out->budget = b->budget;
    out->limits = b->limits;
    out->parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    out->alone = atomic_load_explicit(&b->alone, memory_order_relaxed);
    for (size_t i = 0; i < s->p->nitems && i < cap; i++) {
        const fan_item *it = s->p->items[i];
        items[i] = (fan_item_view){.key = it->key,
                                   .form = it->value.form,
                                   .dtype = it->value.dtype,
                                   .producer = it->producer ? it->producer->handle : 0,
                                   .event = it->event != NULL,
                                   .donated = it->donated,
                                   .ready = it->parked};
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
        const fan_fast_list *fast = s->fast;
        bool begun = fast && fast->n && fast->summed; /* the first of the list is the sum then */
        out->parked += s->p->nitems + (fast ? fast->n - begun : 0);
        out->sums += s->p->value.form != FAN_FORM_UNDEFINED || s->p->exact || begun;
        out->poisoned += s->p->poison != NULL;
        fan_slot_unlock(b, i);
    }
    out->bytes = atomic_load_explicit(&b->parked, memory_order_relaxed);
}
