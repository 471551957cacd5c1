/* enter: a slot is entered: it is there, nobody stands in the way, and what came the short way has become items. */
#ifndef FAN_BUFFER_ENTER_H
#define FAN_BUFFER_ENTER_H

#include "buffer/slot.h"

fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err); /* S1; and fan_buffer_here */
/* fan_slot_enter: locked: waits while a take has the slot; what the short way parked has become items then, and the
 * slot is not poisoned. */
fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err);
/* fan_slot_claim_all: fan_slot_claim; what the short way parked has become items then. */
fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err);
/* fan_slot_in_target: locked: FAN_ERR_STATE where this thread has begun a target of the slot and not ended it: what it
 * adds into would miss its pass. */
fan_status fan_slot_in_target(const fan_buffer *b, size_t slot, const char *what, fan_error *err);

#endif
