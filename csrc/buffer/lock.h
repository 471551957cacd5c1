/* lock: a slot's lock, and who has the slot while it is unlocked. "Locked": the caller holds the slot's lock. */
#ifndef FAN_BUFFER_LOCK_H
#define FAN_BUFFER_LOCK_H

#include "buffer/slot.h"

void fan_slot_lock(fan_buffer *b, size_t slot);
void fan_slot_unlock(fan_buffer *b, size_t slot);
/* fan_buffer_here: FAN_ERR_STATE in a forked child, where another thread was in the buffer at the fork. Asked before
 * any lock of the buffer is taken. fan_buffer_adopt: the same without a word: no lock or slot is held by a thread that
 * stayed behind. */
fan_status fan_buffer_here(fan_buffer *b, fan_error *err);
void fan_buffer_adopt(fan_buffer *b);

/* fan_slot_notify: locked: wakes who waits for a change of the slot. */
void fan_slot_notify(fan_buffer *b, size_t slot);
/* fan_slot_wait_free: locked: waits until something changed. FAN_ERR_STATE where whoever has the slot could be waiting
 * for this thread: `what` names its call. */
fan_status fan_slot_wait_free(fan_buffer *b, size_t slot, const char *what, fan_error *err);
/* fan_slot_claim: locked; makes the slot busy. Waits for whoever has it, and, for a take, until every add has parked.
 */
fan_status fan_slot_claim(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err);
/* fan_slot_make_busy: locked: the same of a slot that is free, for a fold. */
void fan_slot_make_busy(fan_slot *s);
void fan_slot_let_go(fan_buffer *b, size_t slot); /* locked */

#endif
