/* plan: what one add, one fold, one take or one target will do, decided before anything is changed.
 *
 * The question: given what a slot holds and what the call wants, which stream waits for which, what
 * is recorded, in which memory and in which dtype does the result lie, and by which rules?
 *
 * sync answers it for streams, accum for memory; here the two become one value per step of a
 * gradient's road. The file that takes a step gathers facts, calls the function here, and carries
 * out the plan:
 *
 *   plan              facts gathered by          carried out by
 *   fan_add_plan      add.c                      add.c, add_convert.c, order.c (streams)
 *   fan_fold_plan     fold.c                     fold.c, fold_*.c (its kind), order.c (streams)
 *   fan_take_plan     take_carry_out.c           take_carry_out.c, fold.c
 *   fan_target_plan   target.c                   target.c
 *
 * A worked case. A slot on stream c holds g1 from p1; g2 came from p2; the budget is passed:
 *
 *   add g1   sync OTHER   record on p1; g1 is used on c                       S9
 *   add g2   sync LATER   record on p2
 *   fold     kind DENSE   c waits for both events (S13, S12); a fresh array   A7 (g1 is held)
 *            after        ready on c, no event, for c consumes                S14 S16 S17
 *   add g3   sync LATER   record on p3
 *   fold     kind DENSE   c waits for g3 (S12); into the running sum          A6 (it is our own)
 *
 * What can go wrong: a step that decides again, by itself, and a little differently. So nothing
 * outside of sync, accum and this file sets a rule's bit, each field is read by the code that
 * carries the plan out, and explain() and the trace print the plan that ran. A test keeps all
 * three.
 *
 * Everything here is a pure function of its arguments: no allocation, no device call, no
 * lock. */
#ifndef FAN_BUFFER_PLAN_H
#define FAN_BUFFER_PLAN_H

#include "buffer/accum.h"
#include "buffer/sync.h"

/* ---- add: one contribution on its way into a slot (S2-S11, S21) ---- */

/* Where a contribution is converted (A9, A10, A12) or copied before it is parked. */
typedef enum fan_convert_on {
    FAN_CONVERT_NOT,
    FAN_CONVERT_HOST, /* at once: no stream has anything to do with it */
    /* from a device to the host: on a stream of the device that it comes from */
    FAN_CONVERT_SOURCE,
    FAN_CONVERT_PRODUCER, /* on the producer's stream, before its event */
    FAN_CONVERT_ACCUM     /* on the accumulation stream: it is ready there then */
} fan_convert_on;

typedef enum fan_record_on {
    FAN_RECORD_NOT,
    FAN_RECORD_PRODUCER,
    FAN_RECORD_ACCUM
} fan_record_on;

typedef struct fan_add_facts {
    bool defined;
    uint64_t device; /* where it will be; 0: a device without streams */
    /* as fan_sync_add_plan has them */
    fan_stream_id producer;
    fan_stream_id consumer;
    fan_stream_id current;
    fan_sync_slot slot;
    bool changes;  /* it must be converted, or is to be copied */
    bool upload;   /* .. from the host */
    bool download; /* .. to the host */
} fan_add_facts;

typedef struct fan_add_plan {
    fan_sync_add sync;
    fan_convert_on convert;
    /* S21: the accumulation stream waits for the producer's before it converts */
    bool wait;
    bool mark_source;      /* S21: what is converted is used on the stream that converts */
    fan_record_on record;  /* the event that others will wait for */
    uint64_t producer_bit; /* what the proof calls one on the producer's stream */
    bool mark;             /* S9: it is used on the accumulation stream from now on */
    fan_stream_id ready;   /* where it is ready */
    uint64_t rules;
} fan_add_plan;

fan_add_plan fan_plan_add(const fan_add_facts *facts);

/* fan_plan_plain_slot: the rules by which plain contributions (plain.h) came to a slot, of which
 * some are defined, some not. */
uint64_t fan_plan_plain_slot(bool defined, bool undefined);
/* fan_plan_plain_fold: the rules of a sum of them; `reusable`: fan_reusable returned yes for the
 * first. */
uint64_t fan_plan_plain_fold(bool reusable);

/* ---- fold: a running sum and what came since, in one pass (A1-A8, A11, A13, S12-S17, S22) ---- */

typedef enum fan_fold_kind {
    FAN_FOLD_DENSE,
    FAN_FOLD_SPARSE,
    FAN_FOLD_MIXED, /* dense and sparse: a dense sum, term by term */
    /* partial ones, and others: a dense sum, each term in its place (P1, P2) */
    FAN_FOLD_PARTIAL,
    FAN_FOLD_EXACT,
    FAN_FOLD_EXACT_SPARSE,
    FAN_FOLD_OBJECTS /* pairwise, by the objects' own operator */
} fan_fold_kind;

/* Undefined contributions and symbolic zeros are no terms (S2, A2). */
typedef struct fan_fold_facts {
    /* how many; of them sparse, partial, and objects */
    size_t terms;
    size_t sparse;
    size_t partial;
    size_t objects;
    fan_side first; /* the first term; */
    /* .. the first one of another form or sparse format, else the second */
    fan_side other;
    bool other_is_second;
    bool coalesced; /* the first term is sparse, without duplicates */
    bool summed;    /* it is the sum of several contributions */
    /* A6, A3: of dense ones */
    fan_reuse_answer reuse_first;
    fan_reuse_answer reuse_other;
    /* A5: stored numbers of all, and of the first after it was coalesced last */
    int64_t entries;
    int64_t entries_before;
    uint64_t expanded; /* A13: axes along which every term is expanded */
    bool recording;    /* A1 */
    bool exact;        /* A11: the slot's sum is an exact one */
    bool has_state;    /* .. and begun */
    bool stats;
    /* the result is handed out: in the sum's dtype, and apart from all terms; else it stays */
    bool finish;
    bool has_out;  /* .. in memory of the taker */
    bool writable; /* .. which will write into it */
    fan_dtype_set seen;
    fan_dtype accumulate;   /* the wish (A11) */
    fan_dtype finish_dtype; /* FAN_DT_NONE: the sum's own */
    fan_sync_slot slot;
    fan_stream_id taker;
} fan_fold_facts;

typedef struct fan_fold_plan {
    fan_fold_kind kind;
    fan_action action; /* where the result lies */
    fan_dtype dtype;   /* of the result; FAN_DT_NONE of objects */
    uint64_t expanded; /* A13: axes along which the result stays expanded */
    bool coalesce;     /* A5 */
    /* A waits for all other streams that used the memory it writes (*Reusable*) */
    bool exclusive;
    bool batches;           /* one job on a stream: others may be queued with it in one launch */
    fan_reuse_answer reuse; /* why it is, or is not, made in the first term's memory */
    fan_sync_fold after;    /* what orders others after it */
    uint64_t rules;         /* of the sum; those of the order are after.rules */
} fan_fold_plan;

/* fan_plan_fold: facts->terms is at least 1, unless has_state. */
fan_fold_plan fan_plan_fold(const fan_fold_facts *facts);

/* ---- take: how a slot's sum reaches its consumer (A14, D11, D21) ---- */

typedef enum fan_take_way {
    FAN_TAKE_NOTHING, /* nothing was added, or zeros that go into out */
    FAN_TAKE_ZERO,    /* zeros were */
    /* the only term itself: a sum that is there already, or the only contribution (A14) */
    FAN_TAKE_HAND,
    FAN_TAKE_COMMIT,   /* the running sum, which the slot keeps should a later one fail */
    FAN_TAKE_FINISH,   /* made apart from it */
    FAN_TAKE_INTO_OUT, /* written straight into out, after all sums */
    /* planned again once no other slot can fail any more: it writes into a donated term */
    FAN_TAKE_LATE
} fan_take_way;

typedef struct fan_take_facts {
    size_t terms;
    size_t dense;
    size_t sparse;
    size_t partial;
    size_t objects;
    bool takes_partial; /* the taker takes a partial sum as it is (P3) */
    bool has_state;
    bool has_zero;
    bool has_out; /* out=; */
    /* .. it overlaps a term of another slot, or one of its own that it is not the same view of */
    bool out_overlaps_inputs;
    bool out_overlaps_own; /* .. or a term of its own slot, in whatever way */
    bool stats;            /* the terms of an exact sum are read again once it is made */
    bool scaled;
    bool writable;
    bool exact;
    bool widened;  /* the accumulation dtype is not the sum's */
    bool expanded; /* A13: all terms are */
    bool whole;    /* no key is missing */
    /* no other slot is taken; none is left that could fail */
    bool alone;
    bool last;
    bool first_donated;
    bool same_dtype;  /* the first term is of the sum's dtype */
    bool overwritten; /* some out= lies where the only term lies */
    bool summed;      /* the only term is the sum of several contributions */
    bool loose;       /* it is sparse, and an index may occur twice in it */
    /* of the only term: whether the taker may write it (A6); read where `writable` is set */
    fan_reuse_answer reuse;
} fan_take_facts;

typedef struct fan_take_plan {
    fan_take_way way;
    /* the sum, which is made apart from it, is copied into out when all else is done */
    bool copy_out;
    bool counts; /* it is a copy of the only term */
    uint64_t rules;
} fan_take_plan;

/* fan_plan_take_way: the first line of this table that holds:
 *
 *   terms    and                                             way
 *   none     zeros alone, which go into no out=              ZERO
 *   none     nothing else                                    NOTHING
 *   any      out=, which one pass may write (not D11)        INTO_OUT
 *   several  in place, keys may be missing, donated          LATE
 *   several  in place, no key is missing                     COMMIT
 *   one      no array is made or changed                     HAND (A14)
 *   any      whatever else                                   FINISH
 *
 * "In place": arrays, not exact, neither scaled nor for an out=. To COMMIT needs no wider dtype for
 * the sum of arrays, a term that is not sparse, a dense one where some are partial (a sum of
 * partial ones does not record which elements were reached), and no writer of an expanded sum. HAND
 * needs a taker that takes partial ones where the only term is one (P3).
 *
 * Inline: of plain entries (plain.h) most facts are constants. */
static inline fan_take_way fan_plan_take_way(const fan_take_facts *f)
{
    bool sums = f->terms > 1;
    bool objects = f->objects > 0;
    bool exact = f->exact && (sums || f->has_state);
    if (f->terms == 0 && !f->has_state) {
        if (f->has_zero && !f->has_out)
            return FAN_TAKE_ZERO;
        return FAN_TAKE_NOTHING;
    }

    /* D11: the sum is made apart from its `out`, and copied into it, where out cannot be written in
     * one pass, or would change what is still to be read. */
    bool one_pass = f->dense == f->terms;
    bool read_again = f->stats && f->exact && f->out_overlaps_own;
    bool copy = f->out_overlaps_inputs || read_again;
    if (f->has_out && one_pass && !copy)
        return FAN_TAKE_INTO_OUT;
    bool anew = f->scaled || f->has_out;
    if (exact || anew || f->terms == 0)
        return FAN_TAKE_FINISH;

    if (sums) {
        /* beyond a gap nothing is committed: the missing keys may still come */
        bool whole = f->whole || f->alone || f->last;
        if (!whole && !objects && f->first_donated)
            return FAN_TAKE_LATE;
        bool same_dtype = objects || !f->widened;
        bool unreached = f->partial && f->partial + f->sparse == f->terms;
        bool written_out = f->writable && f->expanded;
        bool apart = f->sparse == f->terms || written_out || unreached;
        if (!whole || !same_dtype || apart)
            return FAN_TAKE_FINISH;
        return FAN_TAKE_COMMIT;
    }

    bool must_copy = f->writable && !objects && f->reuse != FAN_REUSE_YES;
    bool coalesce = f->summed && f->loose; /* D12 */
    bool same_dtype = objects || f->same_dtype;
    bool widen = f->partial && !f->takes_partial; /* to its whole */
    if (f->overwritten || must_copy || widen)
        return FAN_TAKE_FINISH;
    if (coalesce || !same_dtype)
        return FAN_TAKE_FINISH;
    return FAN_TAKE_HAND;
}

static inline fan_take_plan fan_plan_take(const fan_take_facts *f)
{
    fan_take_plan plan = {.way = fan_plan_take_way(f)};
    bool some = f->terms || f->has_state || f->has_zero;
    plan.copy_out = some && f->has_out && plan.way != FAN_TAKE_INTO_OUT;
    plan.counts = plan.way == FAN_TAKE_FINISH && f->terms == 1;
    if (plan.way == FAN_TAKE_HAND && !f->summed)
        plan.rules = FAN_A(14);
    return plan;
}

/* ---- target: a producer that adds into the slot by itself ---- */

typedef struct fan_target_facts {
    bool idle;              /* no thread has the slot; nothing is parked or on its way */
    fan_reuse_answer reuse; /* of its value, where earlier targets do not count as holders (D34) */
    bool complete;          /* it is of all keys before this one */
    fan_stream_id producer;
    fan_stream_id accum;
    fan_stream_id ready;
} fan_target_facts;

typedef struct fan_target_plan {
    /* The running sum itself is lent; else zeros, which are added when they come back. By no rule:
     * A6 would not have it written once an earlier target has seen it (D34). */
    bool direct;
} fan_target_plan;

fan_target_plan fan_plan_target(const fan_target_facts *facts);

#endif
