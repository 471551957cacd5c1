/* stats: with stats, what is known of a sum beside its value; without, nothing happens here.
 *
 * On the CPU the pass that sums tells at once. On a device with streams it writes figures into memory of the device, in
 * the order of A, and nobody waits: the reader does. Each sum has memory of its own (a take that fails must leave the
 * running sum's alone); who spoiled the running sum goes from one to the next. */
#ifndef FAN_BUFFER_STATS_H
#define FAN_BUFFER_STATS_H

#include "buffer/fold.h"

/* fan_sum_stats_hold: another one that tells the same; fan_sum_stats_move leaves nothing behind. fan_sum_stats_drop:
 * unlocked. */
fan_sum_stats fan_sum_stats_hold(const fan_sum_stats *k);
fan_sum_stats fan_sum_stats_move(fan_sum_stats *k);
void fan_sum_stats_drop(fan_sum_stats *k);
/* fan_sum_stats_forget: locked: what is known of a slot's last sum is so no longer; the caller drops it, unlocked. */
fan_sum_stats fan_sum_stats_forget(fan_buffer *b, size_t slot);

/* fan_fold_stats_memory: on a device with streams, before anything is queued: memory for the figures of the result,
 * f->sum_stats.device_words, unless only the result will tell how large it is (objects), or A is captured. */
fan_status fan_fold_stats_memory(fan_fold *f, fan_error *err);
/* fan_fold_first_suspect: how many terms are not held to blame for an inf or a NaN: the running sum, of which it is
 * known who spoiled it. */
size_t fan_fold_first_suspect(const fan_fold *f);
/* fan_fold_collect_stats: what the sum's own pass has not told: the result is read once more, and its terms where it is
 * not finite. Queued on A on a device with streams. */
fan_status fan_fold_collect_stats(fan_fold *f, const fan_value *result, fan_error *err);
/* fan_fold_measure_term: of the only term, which is handed through as it is: A waits for it; then f->sum_stats tells of
 * it, and
 * `*R` is A. */
fan_status fan_fold_measure_term(fan_fold *f, fan_stream **R, fan_error *err);
/* fan_slot_measure: of the running sum as it is now, whose last contribution has this key. The slot is busy; unlocked.
 */
fan_status fan_slot_measure(fan_buffer *b, size_t slot, int64_t key, fan_error *err);

#endif
