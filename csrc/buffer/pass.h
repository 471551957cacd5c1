/* pass: what a slot holds during one pass, its items above all, and how it is dropped. */
#ifndef FAN_BUFFER_PASS_H
#define FAN_BUFFER_PASS_H

#include "buffer/slot.h"

void fan_item_free(fan_buffer *b, fan_item *it);
/* fan_item_unpark: takes the item off what counts against the budget. */
void fan_item_unpark(fan_buffer *b, fan_item *it);
/* fan_item_seen: the dtypes that the slot has seen, with those of one item more (A10). */
fan_dtype_set fan_item_seen(fan_dtype_set seen, const fan_slot *s, const fan_item *it);

/* fan_pass_has: locked: whether an item has this key; *at: the place where such an item belongs. */
bool fan_pass_has(const fan_pass *p, int64_t key, size_t *at);
/* fan_pass_in_order: locked: sorts the items by key. */
void fan_pass_in_order(fan_pass *p);
/* fan_pass_by_arrival: locked: from now on the items are kept in the order of arrival. False: out of memory, and
 * nothing happened. */
bool fan_pass_by_arrival(fan_pass *p);
/* fan_pass_ready_prefix: locked: how many of the first items a fold may sum now: they are parked and, with keys, no key
 * before them is missing. */
size_t fan_pass_ready_prefix(fan_pass *p);
/* fan_pass_cut: locked: empties the slot and returns what it held, for fan_pass_free, which drops it without the lock.
 */
fan_pass *fan_pass_cut(fan_slot *s);
void fan_pass_free(fan_buffer *b, fan_pass *p);

/* fan_status_poisons: whether after such a failure it is unknown what the memory of the slot holds. */
bool fan_status_poisons(fan_status s);
/* fan_slot_poison: locked or owned: keeps the first failure of a device call. */
void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err);
fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err); /* locked */

#endif
