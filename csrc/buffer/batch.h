/* batch: many slots in one launch: what a batch of adds makes due.
 *
 * Every slot that is due is made busy and its fold begun; then the sums are queued together; then each slot gets what
 * orders others after its sum (S14-S17) and is let go. Who adds meanwhile to a slot that is busy parks, and who takes
 * waits, as for one fold: nothing here waits for a slot. A launch that fails poisons the slots whose sums were in it;
 * those whose turn had not come are as they were. */
#ifndef FAN_BUFFER_BATCH_H
#define FAN_BUFFER_BATCH_H

#include "buffer/slot.h"

/* FAN_BATCH_BYTES: results that may be under way in one batch: until it is flushed nothing of what they replace is let
 * go. */
#define FAN_BATCH_BYTES (UINT64_C(64) << 20)
/* fan_buffer_fold_batch: on devices: folds what is due in slots[order[0..n)], in ascending order, with as few launches
 * as possible. What it passes over, slots that others have among it, is left to a fold by itself. */
fan_status fan_buffer_fold_batch(fan_buffer *b, const size_t *slots, const size_t *order, size_t n, fan_error *err);

#endif
