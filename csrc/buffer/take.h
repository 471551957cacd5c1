/* take: one take on its way through its steps (take.c), of the slots that it takes. */
#ifndef FAN_BUFFER_TAKE_H
#define FAN_BUFFER_TAKE_H

#include "array/extents.h"
#include "buffer/fold.h"
#include "buffer/slot.h"

/* One slot's way through take. */
typedef struct fan_take_slot {
    const struct fan_take_op *op;
    fan_buffer *b;
    size_t slot;
    fan_slot *s;
    const fan_value *out; /* where the caller wants the sum; NULL: it has no out= */
    fan_stream *consumer; /* no hold; NULL: none */
    fan_gathered gathered;
    bool claimed;
    bool has_gathered;
    fan_take_plan plan;
    bool planned_again;       /* its plan was made again once no other slot could fail any more */
    bool out_overlaps_inputs; /* D11 */
    bool begun;               /* its fold has begun, and waits in the batch */
    bool ordered;             /* the consumer is, after it */
    fan_value result;
    fan_stream *ready;
    fan_event *ready_event;
    fan_sum_stats sum_stats;
    fan_slot_state *gone; /* once it is emptied: what was in it */
} fan_take_slot;

/* One take: the slots that it takes, and what their steps share. */
typedef struct fan_take_op {
    fan_buffer *b;
    const fan_take *options;
    fan_take_slot *slots;
    size_t n;
    /* which memory meets which out= (D11) */
    fan_extents inputs;
    fan_extents outs;
    fan_batch *batch; /* sums on streams, queued together; NULL: one by one */
} fan_take_op;

/* fan_take_prepare: claims the slots, and gathers what they hold, checked against the options of
 * the take. A slot that was claimed stays so, also after a failure; nothing else has changed. */
fan_status fan_take_prepare(fan_take_op *op, fan_error *err);
/* fan_take_carry_out: makes the sums, and orders the consumer after them. A slot whose sum fails
 * is as it was, or poisoned. */
fan_status fan_take_carry_out(fan_take_op *op, fan_error *err);

/* fan_take_place: what a message about the slot is about. */
static inline fan_place fan_take_place(const fan_take_slot *part)
{
    return fan_slot_place(part->b, part->slot, -1);
}

/* fan_take_scale_fits: whether the scale is one for sums of this dtype. */
static inline bool fan_take_scale_fits(const fan_take *options, fan_dtype dtype)
{
    if (!options->scale.on || dtype == FAN_DT_NONE)
        return true;
    char kind = fan_dtype_kind(dtype);
    if (kind == 'c')
        return true;
    return options->real && (kind == 'f' || options->integral);
}

/* fan_take_name_origin: sets the kind of the sum: that of the contribution that decides it
 * (D15). */
static inline void fan_take_name_origin(fan_take_slot *part)
{
    if (part->result.form == FAN_FORM_UNDEFINED || part->result.form == FAN_FORM_ZERO)
        return;
    part->result.origin = part->gathered.like.origin;
    part->result.rank = part->gathered.like.rank;
}

/* fan_take_zeros: D13: a slot fed only zeros gives the first one, or one of the sum's dtype and the
 * declared shape. */
fan_status fan_take_zeros(fan_buffer *b, size_t slot, const fan_value *zero, fan_dtype sum,
                          fan_value *out, fan_error *err);

#endif
