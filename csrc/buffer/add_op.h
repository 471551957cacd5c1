/* add_op: one contribution on its way into its slot. */
#ifndef FAN_BUFFER_ADD_OP_H
#define FAN_BUFFER_ADD_OP_H

#include "buffer/check.h"

/* The streams that a contribution was given, and that stand for what it was not given; held. */
typedef struct fan_add_streams {
    fan_stream *current;  /* S4, S5, S11 */
    fan_stream *consumer; /* NULL: S5 */
    bool pooled;          /* `current` is the device's own: S11 under capture */
} fan_add_streams;

/* One contribution on its way. */
typedef struct fan_add_op {
    size_t slot;
    fan_contribution *c;
    fan_arrival a;
    fan_add_streams with;
    fan_stream *accum, *consumer, *producer; /* held */
    fan_item *it;  /* ours until it is reserved; then the slot's, and known here until it is parked */
    fan_value old; /* what a conversion replaced */
    uint64_t bytes;
    bool reserved;   /* it counts in its slot */
    bool follows;    /* another of the same call is on its way into the slot: a take waits for that one, and so for this
                        one, and must not be waited for */
    bool parked;     /* a fold may sum it */
    fan_pass before; /* what the slot knew before it: its plain fields, nothing is held */
    bool mismatch;
} fan_add_op;

/* fan_current_for: the stream that S4, S5 and S11 call current, of the device that c will be on; a hold, or NULL. */
fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c);
/* fan_add_reserve: checks it, and gives it a place in its slot. */
fan_status fan_add_reserve(fan_buffer *b, fan_add_op *x, fan_error *err);
/* fan_add_carry_out: conversions, the event, the mark: nothing for an undefined one. */
fan_status fan_add_carry_out(fan_buffer *b, fan_add_op *x, fan_error *err);
/* fan_add_park: locked: a fold may sum it from now on. fan_add_unpark: nobody has summed it, and nobody may any more.
 */
void fan_add_park(fan_buffer *b, fan_add_op *x);
void fan_add_unpark(fan_buffer *b, fan_add_op *x);
/* fan_add_undo: locked: the caller has its value again, and the slot is as it was; *gone is for fan_pass_free. */
void fan_add_undo(fan_buffer *b, fan_add_op *x, fan_pass **gone);
/* fan_add_fail: after a failure of its own, or of one beside it: unlocked. */
void fan_add_fail(fan_buffer *b, fan_add_op *x, fan_status status, const fan_error *err);
/* fan_add_warn: S6, for n of them. fan_add_end: what it holds is dropped. */
fan_status fan_add_warn(fan_buffer *b, const fan_add_op *x, size_t n, fan_error *err);
void fan_add_end(fan_buffer *b, fan_add_op *x);

#endif
