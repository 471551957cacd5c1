/* add_op: one contribution on its way into its slot. */
#ifndef FAN_BUFFER_ADD_OP_H
#define FAN_BUFFER_ADD_OP_H

#include "buffer/check.h"

/* The streams of a contribution: what the caller named, and what stands in for what was not named. All held. */
typedef struct fan_add_streams {
    fan_stream *current;  /* S4, S5, S11 */
    fan_stream *consumer; /* NULL: S5 */
    bool pooled;          /* `current` is a stream of the device's own pool (S11 under capture) */
} fan_add_streams;

/* One contribution on its way. */
typedef struct fan_add_op {
    size_t slot;
    fan_contribution *c;
    fan_arrival a;
    fan_add_streams with;
    fan_stream *accum, *consumer, *producer; /* held */
    /* The op owns it until fan_add_reserve; from then on the slot owns it, and it is read here until it is parked. */
    fan_item *it;
    fan_value old; /* what a conversion replaced */
    uint64_t bytes;
    bool reserved; /* fan_add_reserve went through: it counts in its slot */
    /* An earlier contribution of the same call is already on its way into this slot. A take of the slot waits until
     * that one is parked, so this one must not wait for the take: neither would ever go on. */
    bool follows;
    const struct fan_add_op *previous; /* the contribution before it in one call; NULL: it is the first */
    bool parked;                       /* a fold may sum it */
    /* The plain fields of the pass before this contribution, for fan_add_undo. Nothing in it is held. */
    fan_pass before;
    bool mismatch;
} fan_add_op;

/* fan_current_for: the stream that S4, S5 and S11 call current, of the device that c will be on; a hold, or NULL. */
fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c);
/* fan_add_reserve: checks it, and gives it a place in its slot. */
fan_status fan_add_reserve(fan_buffer *b, fan_add_op *x, fan_error *err);
/* fan_add_carry_out: conversions, the event, the mark: nothing for an undefined one. */
fan_status fan_add_carry_out(fan_buffer *b, fan_add_op *x, fan_error *err);
/* fan_add_park: the slot is locked. From now on a fold may sum it. fan_add_unpark: takes that back; no fold has summed
 * it. */
void fan_add_park(fan_buffer *b, fan_add_op *x);
void fan_add_unpark(fan_buffer *b, fan_add_op *x);
/* fan_add_undo: the slot is locked. The caller owns the value again and the slot is as before; *gone goes to
 * fan_pass_free. */
void fan_add_undo(fan_buffer *b, fan_add_op *x, fan_pass **gone);
/* fan_add_fail: gives a contribution back after it, or another of the same call, has failed. Unlocked. */
void fan_add_fail(fan_buffer *b, fan_add_op *x, fan_status status, const fan_error *err);
/* fan_add_warn: S6, for n contributions. fan_add_end: drops what the op holds. */
fan_status fan_add_warn(fan_buffer *b, const fan_add_op *x, size_t n, fan_error *err);
void fan_add_end(fan_buffer *b, fan_add_op *x);

#endif
