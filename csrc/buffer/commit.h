/* commit: when a fold is due, and how its sum becomes the slot's value. */
#ifndef FAN_BUFFER_COMMIT_H
#define FAN_BUFFER_COMMIT_H

#include "buffer/fold.h"

/* fan_slot_due: locked: how many of its first items are to be folded now if `coming` bytes of other slots no longer
 * count as parked; 0: none. */
size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t coming);
/* fan_slot_fold_while_due: locked on entry and on return: folds while the budget is passed and there is something to
 * fold. */
fan_status fan_slot_fold_while_due(fan_buffer *b, size_t slot, fan_error *err);
/* fan_slot_promote: locked on entry and on return: where one contribution is all there is, it becomes the value now. */
fan_status fan_slot_promote(fan_buffer *b, size_t slot, fan_error *err);
/* fan_fold_commit_end: ends a fold that began: its sum becomes the slot's value, and what was gathered goes off the
 * list. The slot is busy. */
fan_status fan_fold_commit_end(fan_buffer *b, size_t slot, fan_gathered *g, fan_error *err);

#endif
