/* snapshot: the sum as it is now, which stays (D17). */
#include "buffer/order.h"
#include "buffer/take.h"

/* Copies the slot's contents to a value of its own, in the order of the consumer. */
static fan_status snapshot_sum(fan_gathered *gathered, fan_stream *consumer, fan_value *out,
                               fan_error *err)
{
    fan_fold *fold = &gathered->fold;
    fan_buffer *b = fold->b;
    FAN_TRY(fan_gathered_check(gathered, err));
    bool some = fold->n || fold->state;
    if (!some && gathered->zero)
        return fan_take_zeros(b, fold->slot, gathered->zero, fan_fold_dtype(fold), out, err);
    if (!some)
        return FAN_OK;
    const fan_term *first = &fold->terms[0];
    FAN_TRY(fan_gathered_weigh(gathered, err));
    if (fold->n == 1 && !fold->state && first->v->form == FAN_FORM_OBJECT) {
        FAN_TRY(fan_value_copy(b->frontend, first->v, out, err));
        return fan_order_hand_over(b, fold->slot, out, first->producer, first->event, consumer,
                                   &fold->rules, err);
    }
    fan_status status = fan_fold_run(fold, err);
    *out = fold->result;
    FAN_TRY(status);
    return fan_order_hand_over(b, fold->slot, out, fold->ready, fold->ready_event, consumer,
                               &fold->rules, err);
}

fan_status fan_buffer_snapshot(fan_buffer *b, size_t slot, fan_stream *consumer, fan_value *out,
                               fan_error *err)
{
    fan_gathered gathered;
    *out = fan_value_none();
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot *s = &b->slots[slot];
    fan_slot_lock(b, slot);
    fan_status status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK)
        status = fan_slot_claim_all(b, slot, false, "a snapshot", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    status = fan_gather(b, slot, SIZE_MAX, false, &gathered, err);
    if (status == FAN_OK) {
        gathered.fold.finish = true;
        gathered.fold.snapshot = true;
        if (!consumer)
            consumer = s->state->consumer;
        status = snapshot_sum(&gathered, consumer, out, err);
        if (status != FAN_OK) {
            fan_value_drop(b->frontend, out);
        } else if (gathered.like.some && out->form != FAN_FORM_OBJECT) {
            out->origin = gathered.like.origin;
            out->rank = gathered.like.rank;
        }
        fan_gathered_fini(&gathered);
    }
    fan_slot_lock(b, slot);
    fan_slot_poison(s, status, err);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    return status;
}
