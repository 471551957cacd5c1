/* pass: what a slot holds during one pass: its items, by key, and how all of it ends. */
#ifndef FAN_BUFFER_PASS_H
#define FAN_BUFFER_PASS_H

#include "buffer/slot.h"

void fan_item_free(fan_buffer *b, fan_item *it);
/* fan_item_unpark: it no longer counts against the budget. */
void fan_item_unpark(fan_buffer *b, fan_item *it);
/* fan_item_seen: a slot's dtypes with those of one item more (A10). */
fan_dtype_set fan_item_seen(fan_dtype_set seen, const fan_slot *s, const fan_item *it);

/* fan_pass_has: locked: whether a key is among the items; *at: where it would go to. */
bool fan_pass_has(const fan_pass *p, int64_t key, size_t *at);
/* fan_pass_in_order: locked: they are by key afterwards. */
void fan_pass_in_order(fan_pass *p);
/* fan_pass_by_arrival: locked: they are by arrival from now on. False: out of memory, and nothing happened. */
bool fan_pass_by_arrival(fan_pass *p);
/* fan_pass_ready_prefix: locked: parked items that a fold may sum now: keys without a gap, or all that have arrived in
 * order. */
size_t fan_pass_ready_prefix(fan_pass *p);
/* fan_pass_cut: locked: the slot is empty afterwards; what it held, for fan_pass_free, which drops it, unlocked. */
fan_pass *fan_pass_cut(fan_slot *s);
void fan_pass_free(fan_buffer *b, fan_pass *p);

/* fan_status_poisons: whether after such a failure nobody knows what a slot's memory holds. */
bool fan_status_poisons(fan_status s);
/* fan_slot_poison: locked or owned: keeps the first failure of a device call. */
void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err);
fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err); /* locked */

#endif
