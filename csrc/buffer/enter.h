/* enter: what every call on a slot asks first: is the slot there, does another thread stand in the way? Then what the
 * fast path parked becomes items. */
#ifndef FAN_BUFFER_ENTER_H
#define FAN_BUFFER_ENTER_H

#include "buffer/slot.h"

fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err); /* S1; and fan_buffer_here */
/* fan_slot_enter: locked: waits while a take has the slot, turns what the fast path parked into items, and fails if the
 * slot is poisoned. */
fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err);
/* fan_slot_claim_all: as fan_slot_claim, and turns what the fast path parked into items. */
fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err);
/* fan_slot_in_target: locked: FAN_ERR_STATE if this thread has begun a target of the slot and not ended it: what it
 * adds would miss its pass. */
fan_status fan_slot_in_target(const fan_buffer *b, size_t slot, const char *what, fan_error *err);

#endif
