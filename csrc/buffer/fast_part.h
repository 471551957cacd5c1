/* fast_part: what the files of the fast path share (fast.h). */
#ifndef FAN_BUFFER_FAST_PART_H
#define FAN_BUFFER_FAST_PART_H

#include "array/convert.h"
#include "array/extents.h"
#include "buffer/fast.h"
#include "buffer/slot.h"
#include "buffer/options.h"

/* FAN_FAST_COUNT: adds to a counter of the buffer and of the process; inside the interpreter. */
#define FAN_FAST_COUNT(b, name, k) ((b)->quick.name += (k), fan_fast_total.name += (k))

/* fan_fast_claim, fan_fast_let_go: the slot is this thread's; nobody else adds or takes. let_go of [first, end) tells
 * those who wait. */
static inline void fan_fast_claim(fan_slot *s)
{
    s->busy = s->taking = true;
    fan_slot_set_owner(s, fan_thread_id());
}
void fan_fast_let_go(fan_buffer *b, fan_span span);
/* fan_fast_stats_on_device: with stats: what is known of the slot's last sum stands on a device. */
static inline bool fan_fast_stats_on_device(const fan_buffer *b, size_t slot)
{
    return b->sum_stats && (b->sum_stats[slot].device_words || b->sum_stats[slot].stream);
}
/* fan_fast_scale_fits: whether a scale is one for the sum of this kind, and for the loops that are at hand here; what
 * is wrong with it the general path says. */
bool fan_fast_scale_fits(const fan_take *how, fan_dtype dtype, fan_dtype acc);
/* fan_fast_take_few: the sum of a few small arrays in one slot, which goes nowhere else; false: it is not that, and
 * nothing happened. */
bool fan_fast_take_few(fan_buffer *b, size_t slot, const fan_take *how, void **result);

/* What a sum of several runs needs beside them, where it is more than one call of a loop. */
typedef struct fan_fast_scratch {
    fan_array *arrays; /* room for n + 1 */
    fan_operand *in;   /* .. and n */
} fan_fast_scratch;
/* fan_fast_needs_scratch: whether a sum of n terms needs it. */
static inline bool fan_fast_needs_scratch(const fan_list *p, size_t n, fan_dtype acc, bool with_stats)
{
    return with_stats || (n > FAN_FAST_TERMS && acc != p->kind.dtype) || !fan_fast_is_flat(p->size, n);
}
/* fan_fast_sum_terms: `out` becomes the fold of n terms, scaled (NULL: not), with statistics (NULL: none). out is one
 * of the terms or apart from all; where n is more than FAN_FAST_TERMS, the first or apart. scratch: NULL where it is
 * not needed. Allocates nothing, needs no interpreter. */
void fan_fast_sum_terms(const fan_fast_kind *k, const fan_entry *terms, size_t n, fan_dtype acc, const fan_scale *scale,
                        char *out, const fan_fast_scratch *scratch, fan_stats *stats);

/* fan_fast_reusable: A6 of the first of the slot's terms, as the target of a sum of `n` of them in dtype `acc`. */
bool fan_fast_reusable(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc);

/* fan_fast_fold_due: after `object` was parked in `slot`, and perhaps the budget passed. */
fan_status fan_fast_fold_due(fan_buffer *b, size_t slot, const void *object, bool alone, fan_error *err);

/* fan_fast_outs_disjoint: whether sums may be written to n outs, of slots, in any order: none meets another, nor what
 * is still read, but for a term of its own slot that is all of it. Sorts them by address. */
bool fan_fast_outs_disjoint(const fan_buffer *b, fan_span span, fan_flat *outs, size_t n);

#endif
