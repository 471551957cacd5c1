/* fold: one sum while it is made: its terms, its options, its result. */
#ifndef FAN_BUFFER_FOLD_H
#define FAN_BUFFER_FOLD_H

#include "buffer/plan.h"
#include "buffer/slot.h"

/* One term of a fold: the running sum, or a contribution. Borrowed from the slot, which is busy. */
typedef struct fan_term {
    const fan_value *v;
    fan_stream *producer;
    fan_event *event;
    bool donated, ours, exposed;
    bool is_value;
    int64_t key;        /* of a contribution, -1: none */
    fan_dtype own;      /* of a contribution: the dtype in which an object meets it (D7); FAN_DT_NONE: the one it has */
    fan_dtype_set seen; /* of all up to and with this term */
} fan_term;

typedef struct fan_fold {
    fan_buffer *b;
    size_t slot;
    fan_term *terms; /* the terms that add something: undefined ones and symbolic zeros are none */
    size_t n;
    fan_dtype_set seen;   /* of the terms and of the zeros */
    fan_operand *scratch; /* room for n + 1 operands */
    int64_t *keys;        /* of the operands, where figures are written; else NULL */
    /* options, set by the caller */
    bool finish;   /* the result in the sum's own dtype, fresh; else in the accumulation dtype, perhaps in place */
    bool may_end;  /* the user may end it (base/interrupt.h): of a take, as long as nothing would be lost */
    bool snapshot; /* for a snapshot: the slot's own sum stays as it is */
    const fan_take *take;         /* scale; NULL: none */
    fan_dtype finish_dtype;       /* of a finished result; FAN_DT_NONE: the sum's own */
    const fan_value *out;         /* write here (all terms dense); NULL: none */
    const fan_exact_state *state; /* summed before these terms; NULL: nothing */
    fan_stream *taker;            /* S22 */
    fan_fold_plan plan;           /* fan_fold_decide */
    /* results */
    fan_value result; /* owned */
    bool ours, donated;
    fan_stream *ready;      /* held */
    fan_event *ready_event; /* held */
    uint64_t rules;
    fan_sum_stats sum_stats; /* with stats: of the result */
    /* between begin and end */
    fan_batch *batch; /* the sum waits there; NULL: it was queued */
    size_t number;    /* .. as this one */
    fan_event *early; /* an event that a planted fault records too early */
} fan_fold;

/* What a fold or a take is made of: the items it sums, and what they have in common. */
typedef struct fan_gathered {
    fan_fold fold;
    fan_item **items; /* copies of the pointers */
    size_t nitems;
    const fan_value *zero; /* the first symbolic zero */
    const fan_value *like; /* whose kind the sum comes back as (D15) */
    int64_t like_key;
} fan_gathered;

#endif
