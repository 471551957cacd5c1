/* stats: figures of a sum beside its value, for buffers made with stats=True; for others nothing
 * happens here.
 *
 * On the CPU the pass that sums measures too. On a device with streams it writes the statistics
 * into memory of the device, in the order of A, and only the thread that reads them waits. Each sum
 * has such memory of its own, since a take that fails must leave that of the running sum as it was;
 * which contribution first brought an inf or a NaN is carried from one sum to the next. */
#ifndef FAN_BUFFER_STATS_H
#define FAN_BUFFER_STATS_H

#include "buffer/fold_job.h"

/* fan_fold_stats_memory: on a device with streams, before anything is queued: makes
 * fold->sum_stats.device_words for the result. Not for objects, whose result has a size only then,
 * and not where A is captured. */
fan_status fan_fold_stats_memory(fan_fold *fold, fan_error *err);
/* fan_fold_first_suspect: the number of the first term that could be the first with an inf or a
 * NaN. The running sum is none: whether it has one is known already. */
size_t fan_fold_first_suspect(const fan_fold *fold);
/* fan_fold_collect_stats: what the pass of the sum could not measure: reads the result once more,
 * and its terms if it is not finite. On a device with streams this is queued on A. */
fan_status fan_fold_collect_stats(fan_fold *fold, const fan_value *result, fan_error *err);
/* fan_fold_find_nonfinite: the number of the term on the host that first brought an inf or a NaN
 * (D35), read while other threads of the frontend may run; fold->n: none did, an earlier one is
 * known, or the buffer has no statistics. Nothing was lost where the user ended it. No lock is
 * held. */
fan_status fan_fold_find_nonfinite(const fan_fold *fold, size_t *found, fan_error *err);
/* fan_sum_stats_of_out: after a sparse sum with these statistics was written into `out` on the
 * host: they become those of all its elements. Cannot fail. */
void fan_sum_stats_of_out(const fan_buffer *b, const fan_array *out, fan_sum_stats *sum_stats);
/* fan_fold_measure_term: for a take of one contribution, which is handed through as it is: A waits
 * for it and measures it into fold->sum_stats; `*R` becomes A. */
fan_status fan_fold_measure_term(fan_fold *fold, fan_stream **R, fan_error *err);
/* fan_slot_measure: measures the running sum, an array on d, as it is now; `key` is that of its
 * last contribution. The slot is busy; unlocked. */
fan_status fan_slot_measure(fan_buffer *b, size_t slot, const fan_array *sum, fan_device *d,
                            int64_t key, fan_error *err);

#endif
