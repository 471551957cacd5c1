/* snapshot: the sum of a slot as it is now, which stays (D17). */
#include "buffer/enter.h"
#include "buffer/fold_job.h"
#include "buffer/fold_run.h"
#include "buffer/gather.h"
#include "buffer/lock.h"
#include "buffer/order.h"
#include "buffer/pass.h"
#include "buffer/take_slot.h"

fan_status fan_buffer_snapshot(fan_buffer *b, size_t slot, fan_stream *consumer, fan_value *out, fan_error *err)
{
    fan_slot *s;
    fan_gathered g;
    fan_status status;
    fan_fold *f = &g.fold;
    *out = (fan_value){.dtype = FAN_DT_NONE};
    FAN_TRY(fan_slot_check(b, slot, err));
    s = &b->slots[slot];
    fan_slot_lock(b, slot);
    status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK)
        status = fan_slot_claim_all(b, slot, false, "a snapshot", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    status = fan_gather(b, slot, SIZE_MAX, false, &g, err);
    if (status != FAN_OK)
        goto let_go;
    f->finish = f->snapshot = true;
    if (f->n == 0 && !f->state) {
        if (g.zero)
            status = fan_take_zeros(b, slot, g.zero, fan_fold_dtype(f), out, err);
    } else if (f->n == 1 && !f->state && f->terms[0].v->form == FAN_FORM_OBJECT) {
        status = fan_value_copy(b->frontend, f->terms[0].v, out, err);
        if (status == FAN_OK)
            status = fan_order_hand_over(b, slot, out, s->p->consumer, s->p->accum, f->terms[0].producer,
                                         f->terms[0].event, consumer ? consumer : s->p->consumer, &f->rules, err);
    } else {
        status = fan_fold_run(f, err);
        *out = f->result;
        if (status == FAN_OK)
            status = fan_order_hand_over(b, slot, out, s->p->consumer, s->p->accum, f->ready, f->ready_event,
                                         consumer ? consumer : s->p->consumer, &f->rules, err);
    }
    if (status == FAN_OK && !g.like && f->state) {
        out->origin = f->state->origin;
        out->rank = f->state->rank;
    }
    if (status == FAN_OK && g.like && out->form != FAN_FORM_OBJECT) {
        out->origin = g.like->origin;
        out->rank = g.like->rank;
    }
    if (status != FAN_OK)
        fan_value_drop(b->frontend, out);
    fan_gathered_fini(&g);
let_go:
    fan_slot_lock(b, slot);
    fan_slot_poison(s, status, err);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    return status;
}
