/* batch: many slots in one launch: the folds that one add_many makes due on devices.
 *
 * 1. Every slot that is due is made busy and its fold begun. 2. All sums are queued together. 3. Each slot gets what
 * orders others after its sum (S14-S17) and is let go. Nothing here waits for a slot. Meanwhile a thread that adds to a
 * busy slot parks, and a thread that takes it waits, as for any fold. A launch that fails poisons the slots whose sums
 * were in it; slots whose sums were not queued yet are as they were. */
#ifndef FAN_BUFFER_BATCH_H
#define FAN_BUFFER_BATCH_H

#include "buffer/slot.h"

/* FAN_BATCH_BYTES: bytes of results that one batch may hold before it is flushed. Until then nothing that the results
 * replace is freed. */
#define FAN_BATCH_BYTES (UINT64_C(64) << 20)
/* fan_buffer_fold_batch: on devices: folds what is due in slots[order[0..n)], in ascending order, with as few launches
 * as possible. Slots that another thread has meanwhile are left to a fold of their own. */
fan_status fan_buffer_fold_batch(fan_buffer *b, const size_t *slots, const size_t *order, size_t n, fan_error *err);

#endif
