/* materialize: what the fast path has parked in a slot becomes items like any other, or is dropped. */
#ifndef FAN_BUFFER_MATERIALIZE_H
#define FAN_BUFFER_MATERIALIZE_H

#include "buffer/slot.h"

/* fan_slot_materialize: locked: what is parked becomes items of a pass. FAN_ERR_NOMEM: nothing happened. */
fan_status fan__slot_materialize(fan_buffer *b, size_t slot, fan_error *err);
static inline fan_status fan_slot_materialize(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_fast_list *p = b->slots[slot].fast;
    return p && p->n ? fan__slot_materialize(b, slot, err) : FAN_OK;
}
/* fan_fast_drop: unlocked: drops what is parked in a slot. */
void fan_fast_drop(fan_buffer *b, size_t slot);
/* fan_fast_unpark: `n` of the slot's gradients no longer count against the budget, and of the others it is to be asked
 * anew who has them. */
void fan_fast_unpark(fan_buffer *b, fan_fast_list *p, size_t n);

#endif
