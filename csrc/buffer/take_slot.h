/* take_slot: one slot's way through a take. */
#ifndef FAN_BUFFER_TAKE_SLOT_H
#define FAN_BUFFER_TAKE_SLOT_H

#include "buffer/fold.h"
#include "buffer/out.h"

/* One slot's way through take. */
typedef struct fan_slot_take {
    size_t slot;
    fan_gathered g;
    bool claimed, gathered;
    fan_take_plan plan;
    bool asked_again; /* its plan was made again once no other slot could fail any more */
    bool copy_out;    /* D11: out= may not be written while terms are still to be read */
    bool begun;       /* its fold has begun, and waits in the batch */
    bool handed;      /* the consumer is ordered after it */
    fan_value result;
    fan_stream *ready;
    fan_event *ready_event;
    uint8_t origin, rank;
    fan_sum_stats sum_stats;
} fan_slot_take;

static inline bool fan_take_scaled(const fan_take *how) { return how->scale.on; }

/* fan_take_count: how many slots are taken. */
static inline size_t fan_take_count(const fan_buffer *b, const fan_take *how) { return how->one ? 1 : b->nslots; }

/* fan_take_out_of: the `out` of the i-th slot that is taken; NULL: it has none. fan_take_out_at: the same by slot. */
static inline const fan_value *fan_take_out_of(const fan_take *how, size_t i)
{
    return how->out && how->out[i].form == FAN_FORM_DENSE ? &how->out[i] : NULL;
}
static inline const fan_value *fan_take_out_at(const fan_take *how, size_t slot)
{
    return fan_take_out_of(how, how->one ? 0 : slot);
}

/* fan_take_check_scale, fan_take_check_out: whether this sum can be scaled so, or written into that `out`. */
fan_status fan_take_check_scale(const fan_buffer *b, size_t slot, const fan_fold *f, const fan_take *how,
                                fan_error *err);
fan_status fan_take_check_out(const fan_buffer *b, size_t slot, const fan_gathered *g, const fan_value *out,
                              fan_error *err);
/* fan_take_zeros: D13: the sum of a slot that was fed only symbolic zeros: the first of them, or one of the dtype of
 * the sum and the declared shape. */
fan_status fan_take_zeros(fan_buffer *b, size_t slot, const fan_value *zero, fan_dtype sum, fan_value *out,
                          fan_error *err);
/* fan_written_by_own_out: whether the `out` of this slot overlaps one of its terms. */
bool fan_written_by_own_out(const fan_slot_take *c, const fan_value *out);
/* fan_take_poison: poisons a slot that is busy. It takes the lock: another thread may be asking whether the slot is
 * ready. */
void fan_take_poison(fan_buffer *b, size_t slot, fan_status status, const fan_error *err);

fan_status fan_slot_take_claim(fan_buffer *b, size_t slot, fan_error *err);
/* fan_slot_take_decide: makes c->plan, and does at once what needs no fold. The slot is busy. `last`: no other slot of
 * the take can fail any more. */
fan_status fan_slot_take_decide(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs,
                                fan_slot_take *c, fan_stream *consumer, bool last, fan_error *err);
/* fan_slot_take_into_out: the fold that writes straight into out. */
fan_status fan_slot_take_into_out(fan_buffer *b, size_t slot, const fan_take *how, fan_slot_take *c, fan_batch *batch,
                                  fan_error *err);
/* fan_slot_take_fold: carries out the fold of the slot if it needs one now, or puts it into the batch.
 * fan_take_slots_end: ends the folds of takes[from, to) that are in the batch. `failed`: another slot has failed, and
 * nothing more is queued; a slot whose sum was not queued is as it was. */
fan_status fan_slot_take_fold(fan_buffer *b, size_t slot, fan_slot_take *c, fan_batch *batch, fan_error *err);
fan_status fan_take_slots_end(fan_buffer *b, fan_slot_take *takes, size_t from, size_t to, fan_batch *batch,
                              bool failed, fan_error *err);
/* fan_slot_take_copy: copies the sum into out. */
fan_status fan_slot_take_copy(fan_buffer *b, size_t slot, const fan_take *how, fan_slot_take *c, fan_error *err);
/* fan_slot_take_stats: with stats=True: measures what the pass of the sum could not. A sum that is undefined or an
 * object has UINT64_MAX elements; zeros that were written into an `out` are elements. */
fan_status fan_slot_take_stats(fan_slot_take *c, const fan_pass *p, fan_error *err);

#endif
