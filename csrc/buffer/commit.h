/* commit: when a fold is due, and how its sum becomes the slot's value. */
#ifndef FAN_BUFFER_COMMIT_H
#define FAN_BUFFER_COMMIT_H

#include "buffer/fold.h"

/* fan_slot_due: locked: how many of the first items are to be folded now; 0: none. `coming`: parked bytes of other
 * slots that are about to be folded, and so no longer count. */
size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t coming);
/* fan_slot_fold_while_due: locked on entry and on return: folds while the budget is passed and there is something to
 * fold. */
fan_status fan_slot_fold_while_due(fan_buffer *b, size_t slot, fan_error *err);
/* fan_slot_promote: locked on entry and on return: a slot whose only contribution is one item: the item becomes its
 * value. */
fan_status fan_slot_promote(fan_buffer *b, size_t slot, fan_error *err);
/* fan_fold_commit_end: ends a fold that began: its sum becomes the value of the slot, and the items that were gathered
 * leave the list. The slot is busy. */
fan_status fan_fold_commit_end(fan_buffer *b, size_t slot, fan_gathered *g, fan_error *err);

#endif
