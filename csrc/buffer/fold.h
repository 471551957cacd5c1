/* fold: what a slot holds is gathered as terms; the sum is planned, begun and ended; it becomes the
 * slot's value.
 *
 * Order within a fold: plan; allocate; wait and mark; run; record. So a lack of memory is met
 * before anything has happened. */
#ifndef FAN_BUFFER_FOLD_H
#define FAN_BUFFER_FOLD_H

#include "buffer/fold_job.h"

/* ---- gather ---- */

/* fan_gather: the running sum and the first `m` parked contributions (SIZE_MAX: all) as terms.
 * may_end: as fan_fold has it. The slot is busy; takes its lock. */
fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, bool may_end, fan_gathered *gathered,
                      fan_error *err);
void fan_gathered_fini(fan_gathered *gathered);
/* fan_gathered_check: FAN_ERR_VALUE where a Python int does not fit the dtype of the sum (D5). */
fan_status fan_gathered_check(const fan_gathered *gathered, fan_error *err);

/* fan_gathered_weigh: W1, W7: before a fold begins whose terms are not all dense: those with a
 * weight become their products. Dense ones are multiplied by the pass that sums them. */
fan_status fan_gathered_weigh(fan_gathered *gathered, fan_error *err);

/* ---- plan, begin, end ---- */

/* fan_fold_decide: fold->plan: what the sum will do. begin and run call it themselves; explain()
 * calls it alone. */
void fan_fold_decide(fan_fold *fold);
/* fan_fold_run: sums fold->n >= 2 terms (or finishes fold->n == 1) on A. FAN_ERR_NOMEM and
 * FAN_ERR_EXTERN leave all as it was; after FAN_ERR_DEVICE, FAN_ERR_RACE and the like the slot must
 * be poisoned. */
fan_status fan_fold_run(fan_fold *fold, fan_error *err);
/* fan_fold_begin: the first half of fan_fold_run: up to the sum, which is put into `batch` (NULL:
 * it is queued at once). The slot stays busy. Every fold that began is ended or abandoned. */
fan_status fan_fold_begin(fan_fold *fold, fan_batch *batch, fan_error *err);
/* fan_fold_end: the second half, once the batch was flushed: orders others after the sum. */
fan_status fan_fold_end(fan_fold *fold, fan_error *err);
/* fan_fold_left: whether the sum was never queued, because another one failed. */
bool fan_fold_left(const fan_fold *fold);
/* fan_fold_abandon: gives up such a fold. */
void fan_fold_abandon(fan_fold *fold);
/* fan_fold_batches: whether the sum is one job on streams, which others may be queued with. */
bool fan_fold_batches(const fan_fold *fold);
/* fan_fold_is_exact: whether the sum is an exact one: of floats, in a slot that declares it. */
bool fan_fold_is_exact(const fan_fold *fold);

/* ---- when a fold is due (budget.c) ---- */

/* fan_slot_due: locked: returns how many of the first contributions are to be folded now.
 * `pending`: parked bytes of other slots that are about to be folded, and so no longer count. */
size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t pending);
/* fan_slot_fold_while_due: locked on entry and on return: folds while the budget is passed and
 * there is something to fold. */
fan_status fan_slot_fold_while_due(fan_buffer *b, size_t slot, fan_error *err);
/* fan_plain_fold_due: folds, if the budget is passed, after the plain entry `object` was parked in
 * the slot. `alone`: but for the caller only the buffer holds it. */
fan_status fan_plain_fold_due(fan_buffer *b, size_t slot, const void *object, bool alone,
                              fan_error *err);
/* fan_slot_promote: locked on entry and on return: a slot whose only contribution waits: it becomes
 * the sum; and a sum of plain entries gets an item. */
fan_status fan_slot_promote(fan_buffer *b, size_t slot, fan_error *err);
/* ---- the sum becomes the slot's ---- */

/* fan_fold_commit_end: ends a fold that began: its sum becomes the value of the slot, and the items
 * that were gathered leave the list. The slot is busy. */
fan_status fan_fold_commit_end(fan_buffer *b, size_t slot, fan_gathered *gathered, fan_error *err);

/* FAN_BATCH_BYTES: bytes of results that one batch may hold before it is flushed. Until then
 * nothing that the results replace is freed. */
#define FAN_BATCH_BYTES (UINT64_C(64) << 20)

#endif
