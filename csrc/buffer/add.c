/* add: one contribution into one slot.
 *
 *   1. a place in the slot is reserved: checked (A8-A16), the streams planned (S3-S11)   locked
 *   2. converted, its event recorded, used on the accumulation stream (S9, S21)           unlocked
 *   3. parked: a fold may sum it                                                          locked
 *   4. what is due is folded (Park and fold)                                              locked, but for the sum
 *   5. the leaf's warning (S6) */
#include "base/fault.h"
#include "buffer/add_op.h"
#include "buffer/commit.h"
#include "buffer/enter.h"
#include "buffer/lock.h"
#include "buffer/pass.h"

/* Locked: folds if that is due. *gone is for fan_pass_free. */
static fan_status add_fold(fan_buffer *b, fan_add_op *x, fan_pass **gone, fan_error *err)
{
    fan_slot *s = &b->slots[x->slot];
    fan_item *it = x->it;
    fan_event *recorded_again = FAN_FAULT(RECORD_AFTER_FOLD) && it->event ? fan_event_hold(it->event) : NULL;
    fan_status status = fan_slot_fold_while_due(b, x->slot, err);
    if (recorded_again)
        (void)fan_event_rerecord(recorded_again, x->a.producer, err);
    fan_event_drop(recorded_again);
    if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
        return FAN_OK; /* it is parked; the sum is tried again later */
    if (status == FAN_OK || fan_status_poisons(status))
        return status;
    /* A callback raised: the add did not happen, if its contribution is still there to be taken back. */
    bool there = false;
    for (size_t i = 0; i < s->p->nitems; i++)
        there = there || s->p->items[i] == it;
    if (there && !s->busy) {
        fan_item_unpark(b, it);
        fan_add_undo(b, x, gone);
    }
    return status;
}

fan_status fan_buffer_add(fan_buffer *b, size_t slot, fan_contribution *c, fan_error *err)
{
    fan_add_op x = {.slot = slot, .c = c, .old = {.dtype = FAN_DT_NONE}};
    fan_pass *gone = NULL;
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_status status = fan_add_reserve(b, &x, err);
    if (status == FAN_OK) {
        status = fan_add_carry_out(b, &x, err);
        if (status != FAN_OK)
            fan_add_fail(b, &x, status, err);
    }
    if (status == FAN_OK && x.it) {
        bool defined = c->value.form != FAN_FORM_UNDEFINED;
        fan_slot_lock(b, slot);
        fan_add_park(b, &x);
        status = defined ? add_fold(b, &x, &gone, err) : FAN_OK;
        fan_slot_unlock(b, slot);
        fan_pass_free(b, gone);
    }
    if (status == FAN_OK)
        status = fan_add_warn(b, &x, 1, err);
    fan_add_end(b, &x);
    return status;
}
