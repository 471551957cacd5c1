/* add: a contribution on its way into a slot: checked, given a place, carried out, parked. */
#ifndef FAN_BUFFER_ADD_H
#define FAN_BUFFER_ADD_H

#include "buffer/add_convert.h"
#include "buffer/plan.h"
#include "buffer/internal.h"

/* The result of a contribution's check, under the lock: its conversion, and where it goes. */
typedef struct fan_check_result {
    fan_conversion to;
    fan_dtype_set seen;   /* the dtypes that the slot has seen, this one's included */
    int64_t number;       /* as in fan_item */
    fan_stream *producer; /* S4; no hold */
    fan_add_plan plan;
} fan_check_result;

/* The streams of a contribution: those that the caller named, and the defaults of the others. All
 * held. */
typedef struct fan_add_streams {
    fan_stream *current;  /* S4, S5, S11 */
    fan_stream *consumer; /* NULL: S5 */
    bool pooled;          /* `current` is a stream of the device's own pool (S11 under capture) */
} fan_add_streams;

/* fan_check_contribution: shape, dtype, device, key and parts (A8-A10, A12, A15, A16), then S3-S5,
 * S8-S11. Changes nothing. Under the slot's lock. `with`: the current stream of the device it will
 * be on; the buffer's stream, or the one that replaces it (S7). */
fan_status fan_check_contribution(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  const fan_add_streams *with, fan_check_result *out,
                                  fan_error *err);

/* One contribution on its way. */
typedef struct fan_add_op {
    size_t slot;
    fan_contribution *c;
    fan_check_result checked;
    fan_add_streams streams;
    /* held */
    fan_stream *accum;
    fan_stream *consumer;
    fan_stream *producer;
    /* The op owns it until fan_add_reserve; from then on the slot owns it, and it is read here
     * until it is parked. */
    fan_item *item;
    fan_value old; /* what a conversion replaced */
    uint64_t bytes;
    bool reserved; /* fan_add_reserve went through: it counts in its slot */
    /* An earlier contribution of the same call is already on its way into this slot. A take of the
     * slot waits until that one is parked, so this one must not wait for the take: neither would
     * ever end. */
    bool follows;
    /* the contribution before it in one call; NULL: it is the first */
    const struct fan_add_op *previous;
    bool parked; /* a fold may sum it */
    /* The plain fields of the pass before this contribution, for add_undo. Nothing in it is
     * held. */
    fan_slot_state before;
    bool mismatch;
} fan_add_op;

/* fan_current_for: the stream that S4, S5 and S11 call current, of the device that c will be on; a
 * hold, or NULL. */
fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c);
/* fan_add_reserve: checks it, and gives it a place in its slot. */
fan_status fan_add_reserve(fan_buffer *b, fan_add_op *op, fan_error *err);
/* fan_add_carry_out: conversions, the event, the mark: nothing for an undefined one. */
fan_status fan_add_carry_out(fan_buffer *b, fan_add_op *op, fan_error *err);
/* fan_add_park: the slot is locked. From now on a fold may sum it. */
void fan_add_park(fan_buffer *b, fan_add_op *op);
/* fan_add_unpark: takes that back; no fold has summed it. */
void fan_add_unpark(fan_buffer *b, fan_add_op *op);
/* fan_add_fail: gives a contribution back after it, or another of the same call, has failed.
 * Unlocked. */
void fan_add_fail(fan_buffer *b, fan_add_op *op, fan_status status, const fan_error *err);
/* fan_add_warn: S6, for n contributions. */
fan_status fan_add_warn(fan_buffer *b, const fan_add_op *op, size_t n, fan_error *err);
/* fan_add_end: counts the add, and drops what the op holds. */
void fan_add_end(fan_buffer *b, fan_add_op *op);

#endif
