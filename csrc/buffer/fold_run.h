/* fold_run: a fold planned, begun and ended. Each kind of sum has a file of its own (fold_kinds.h).
 *
 * Order within a fold: plan; allocate; wait and mark; run; record. So a want of memory is met before anything has
 * happened. */
#ifndef FAN_BUFFER_FOLD_RUN_H
#define FAN_BUFFER_FOLD_RUN_H

#include "buffer/fold.h"

/* fan_fold_decide: f->plan: what the sum will do. begin and run do so by themselves; explain() asks for it. */
void fan_fold_decide(fan_fold *f);
/* fan_fold_run: sums f->n >= 2 terms (or finishes f->n == 1) on A. FAN_ERR_NOMEM and FAN_ERR_EXTERN leave all as it
 * was; after FAN_ERR_DEVICE, FAN_ERR_RACE and the like the slot must be poisoned. */
fan_status fan_fold_run(fan_fold *f, fan_error *err);
/* fan_fold_begin, fan_fold_end: the two halves of fan_fold_run. begin goes up to the sum, which is put into `batch`
 * (NULL: it is queued at once). end starts once the batch was flushed: it orders others after the sum. Between them the
 * slot stays busy. Every fold that began is ended, or, where its sum was never queued because another failed, abandoned
 * (fan_fold_left). */
fan_status fan_fold_begin(fan_fold *f, fan_batch *batch, fan_error *err);
fan_status fan_fold_end(fan_fold *f, fan_error *err);
bool fan_fold_left(const fan_fold *f);
void fan_fold_abandon(fan_fold *f);
/* fan_fold_batches: whether the sum is one job on streams, which others may be queued with. */
bool fan_fold_batches(const fan_fold *f);
/* fan_fold_is_exact: whether the sum is an exact one: of floats, in a slot that asks for it. */
bool fan_fold_is_exact(const fan_fold *f);

#endif
