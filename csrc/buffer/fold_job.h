/* fold_job: one sum while it is made: its terms, its options, its result; and what every kind of
 * sum is made with: fresh memory, jobs, terms that become the sum. */
#ifndef FAN_BUFFER_FOLD_JOB_H
#define FAN_BUFFER_FOLD_JOB_H

#include "buffer/plan.h"
#include "buffer/internal.h"

/* One term of a fold: the running sum, or a contribution. Borrowed from the slot, which is busy. */
typedef struct fan_term {
    const fan_value *v;
    fan_stream *producer;
    fan_event *event;
    bool donated;
    bool owned;
    bool exposed;
    bool unshared;     /* of a plain entry: only the list held it when it was gathered */
    bool is_value;     /* it is the running sum */
    size_t entry;      /* which of the gathered entries it is */
    fan_weight weight; /* W1; not on: it is 1 */
    int64_t key;       /* of a contribution, -1: none */
    /* of a contribution: the dtype in which an object meets it (D7); FAN_DT_NONE: the one it has */
    fan_dtype own;
    int64_t number;   /* of a Python int or bool, or a sum of such, its value (D5); else 0 */
    int64_t weak_int; /* .. of a contribution; else 0 */
    /* of all up to and with this term; where a Python int of these does not fit their promotion,
     * also of those up to the next term with which all of them do (D5) */
    fan_dtype_set seen;
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
    /* the result in the sum's own dtype, fresh; else in the accumulation dtype, perhaps in place */
    bool finish;
    /* the user may end it (base/interrupt.h): of a take, as long as nothing would be lost */
    bool may_end;
    bool snapshot;                /* for a snapshot: the slot's own sum stays as it is */
    const fan_take *take;         /* NULL: none */
    fan_scale scale;              /* of a result that is handed out; with the divisor of a mean */
    fan_dtype finish_dtype;       /* of a finished result; FAN_DT_NONE: the sum's own */
    const fan_value *out;         /* write here (all terms dense); NULL: none */
    const fan_exact_state *state; /* summed before these terms; NULL: nothing */
    fan_stream *taker;            /* S22 */
    fan_fold_plan plan;           /* fan_fold_decide */
    /* results */
    fan_value result; /* owned */
    int64_t int_sum;  /* of a sum of Python ints and bools alone, its value (D5); else 0 */
    bool owned;
    bool donated;
    fan_stream *ready;      /* held */
    fan_event *ready_event; /* held */
    uint64_t rules;
    fan_sum_stats sum_stats; /* with stats: of the result */
    /* between begin and end */
    fan_batch *batch; /* the sum waits there; NULL: it was queued */
    size_t number;    /* .. as this one */
    fan_event *early; /* an event that a planted fault records too early */
} fan_fold;

/* The input of a fold or a take: the entries it sums, and what they have in common. */
typedef struct fan_gathered {
    fan_fold fold;
    fan_entry *entries; /* copies: what arrives meanwhile moves the list */
    size_t n;
    fan_weight *weights;  /* owned: of the entries; NULL: they have none */
    fan_divisor *divisor; /* owned: of the mean; NULL: none is taken */
    fan_value *products;  /* owned: terms times their weights */
    size_t nproducts;
    bool has_sum;      /* the first entry is the running sum */
    fan_item *room;    /* owned: for the sum that a commit leaves in the slot */
    fan_item *sum;     /* that sum; the slot's; NULL: nothing was committed */
    fan_value *values; /* owned: of the plain ones */
    size_t nvalues;
    const fan_value *zero; /* the first symbolic zero */
    size_t zero_entry;     /* .. and which of the entries it is */
    fan_like like;
    /* those of all that was gathered: fold.seen, and zeros after the last term of a fold at add */
    fan_dtype_set seen;
    /* the range of the Python ints in the sum, and 0 */
    int64_t weak_lo;
    int64_t weak_hi;
    /* One of them that does not fit the sum's dtype, in which it would be made now; 0: they all
     * do. */
    int64_t unfit;
} fan_gathered;

static inline fan_slot *fan_fold_slot(const fan_fold *fold)
{
    return &fold->b->slots[fold->slot];
}

static inline fan_device *fan_fold_device(const fan_fold *fold)
{
    fan_device *d = fan_fold_slot(fold)->state->device;
    if (!d)
        return fan_cpu();
    return d;
}

/* fan_fold_accum: returns A, the stream that sums.
 *   NULL: the device has no streams */
static inline fan_stream *fan_fold_accum(const fan_fold *fold)
{
    return fan_fold_slot(fold)->state->accum;
}

/* fan_term_is_sum: the term is the sum of several contributions. */
static inline bool fan_term_is_sum(const fan_fold *fold, const fan_term *term)
{
    return term->is_value && fan_fold_slot(fold)->list->summed > 1;
}

/* fan_range_add: *lo to *hi has this number, too. */
static inline void fan_range_add(int64_t *lo, int64_t *hi, int64_t number)
{
    if (number < *lo)
        *lo = number;
    if (number > *hi)
        *hi = number;
}

static inline uint64_t fan_dense_bytes(const fan_array *a)
{
    return (uint64_t)a->size * fan_dtype_size(a->dtype);
}

fan_status fan_fold_fail_memory(const fan_fold *fold, fan_error *err);
/* fan_fold_dtype: the sum's dtype; FAN_DT_NONE for objects. */
fan_dtype fan_fold_dtype(const fan_fold *fold);
/* fan_fold_accumulated: what a prefix with these dtypes runs in (A11). */
fan_dtype fan_fold_accumulated(const fan_fold *fold, fan_dtype_set seen);

/* fan_fold_scale: returns the factor of a result that is handed out.
 *   NULL: the result is not multiplied */
const fan_scale *fan_fold_scale(const fan_fold *fold);
/* fan_fold_last: the dtype in which the sum ends before it is scaled and rounded: the accumulation
 * dtype of all that came, symbolic zeros after the last term too (A2, D3), and wide enough for the
 * scale (D10). */
fan_dtype fan_fold_last(const fan_fold *fold);

/* fan_fold_expanded: axes along which every term, and the exact state, is expanded (A13); 0 unless
 * all are dense. */
uint64_t fan_fold_expanded(const fan_fold *fold);

/* The operations that write into the memory of a term. */
typedef enum fan_writer {
    FAN_WRITER_SUM, /* the fold, in one pass */
    /* the fold, dense and sparse terms one by one: each prefix in the dtype of its own */
    FAN_WRITER_PREFIXES,
    FAN_WRITER_TAKER, /* the taker of the term, in the order of the consumer's stream (S18) */
    FAN_WRITER_TARGET /* the producer of a target, on the accumulation stream */
} fan_writer;
/* fan_term_may_write: A6: whether the memory of a dense or sparse term may be written. */
fan_reuse_answer fan_term_may_write(const fan_fold *fold, size_t which, fan_writer writer);

/* fan_fold_job: queues the job on A, or puts it into the fold's batch; counted. */
fan_status fan_fold_job(fan_fold *fold, fan_job *job, fan_error *err);
/* fan_fold_job_to_fresh: the same, into memory that is dropped where the user ends a take
 * meanwhile. */
fan_status fan_fold_job_to_fresh(fan_fold *fold, fan_job *job, fan_error *err);
/* fan_fold_into: fan_fold_job of a job of few words. */
fan_status fan_fold_into(fan_fold *fold, fan_job_kind kind, const char *label, const fan_array *out,
                         const fan_operand *in, size_t n, fan_error *err);
/* fan_fold_copy: such a job: `to` becomes `from`, in its dtype. */
fan_status fan_fold_copy(fan_fold *fold, const char *label, const fan_array *to,
                         const fan_array *from, fan_error *err);
/* fan_fold_zero: such a job: `to` becomes 0. */
fan_status fan_fold_zero(fan_fold *fold, const fan_array *to, fan_error *err);
/* fan_fold_scatter: such a job: the entries of a sparse array are added to those of `to`. */
fan_status fan_fold_scatter(fan_fold *fold, const char *label, const fan_array *to,
                            const fan_sparse *sparse, fan_error *err);
/* fan_fold_fresh: memory for a result: of the library whose kind it comes back as (D15), or of the
 * device. */
fan_status fan_fold_fresh(fan_fold *fold, fan_dtype dtype, int ndim, const int64_t *shape,
                          const fan_array *like, fan_array **out, fan_error *err);
/* fan_fold_replace: *sum becomes `to` if `status` is FAN_OK, and stays otherwise; the other hold is
 * dropped. Returns `status`. */
fan_status fan_fold_replace(fan_array **sum, fan_array *to, fan_status status);
/* fan_fold_finish: *sum in the dtype in which it is wanted, scaled. */
fan_status fan_fold_finish(fan_fold *fold, fan_array **sum, fan_error *err);
/* fan_fold_keep_term: term `i` becomes the result: its memory will hold the sum. */
fan_status fan_fold_keep_term(fan_fold *fold, size_t i, fan_value *out, fan_error *err);
/* fan_fold_made: `sum`, which gets a hold more, is the result. */
void fan_fold_made(fan_fold *fold, fan_array *sum);
/* fan_fold_whole_end: ends a dense sum that was made term by term, in memory of the term `kept`
 * where that is defined: the result, if `status` is FAN_OK. The holds on both are taken. `begun`: a
 * part of it was in its place. Returns `status`, or, where memory of a term is lost, an error that
 * poisons. */
fan_status fan_fold_whole_end(fan_fold *fold, fan_array *sum, fan_value *kept, bool begun,
                              fan_status status, fan_error *err);
/* fan_fold_has: whether some term has this form. */
bool fan_fold_has(const fan_fold *fold, fan_form form);
/* fan_fold_sparse_operands: the first n terms, all sparse, as operands. */
void fan_fold_sparse_operands(const fan_fold *fold, size_t n, fan_sparse_operand *in);
/* fan_fold_sum_sparse: the first n terms, all sparse, as one without duplicates; not counted. */
fan_status fan_fold_sum_sparse(fan_fold *fold, size_t n, fan_sparse **out, fan_error *err);

/* fan_fold_dense: all terms dense: one pass. */
fan_status fan_fold_dense(fan_fold *fold, fan_error *err);
/* fan_fold_sparse: all terms sparse (A5, A7), or one of them to be finished. */
fan_status fan_fold_sparse(fan_fold *fold, fan_error *err);
/* fan_fold_is_copied: whether a sparse result is the only term as it is, but in memory of its own:
 * for a taker that writes it, or for a snapshot. fan_fold_sparse copies it. */
bool fan_fold_is_copied(const fan_fold *fold);
/* fan_fold_mixed: dense and sparse in any mix: a dense sum, written term by term in order (A3, A4,
 * A6, A7). It is in the accumulation dtype of each prefix. */
fan_status fan_fold_mixed(fan_fold *fold, fan_error *err);
/* fan_fold_partial: partial terms, with dense and sparse ones in any mix, or one alone to be made
 * dense: each term is added in its place (P1, P2, P4). */
fan_status fan_fold_partial(fan_fold *fold, fan_error *err);
/* fan_fold_make_whole: a partial value as a dense one, zero elsewhere, for what has no places: an
 * object's operator, an exact sum. */
fan_status fan_fold_make_whole(fan_fold *fold, const fan_value *partial, fan_value *out,
                               fan_error *err);
/* fan_fold_exact: an exact one, of dense terms or of sparse ones (A11). */
fan_status fan_fold_exact(fan_fold *fold, fan_error *err);
/* fan_fold_exact_merged: a sparse value of the slot, whose sums are exact, without duplicates, in
 * its own dtype; not counted. */
fan_status fan_fold_exact_merged(const fan_fold *fold, const fan_value *value, fan_sparse **out,
                                 fan_error *err);
/* fan_fold_absorb: after fan_fold_decide, on the CPU: adds the terms to the slot's exact state, a
 * new or a wider one where it must be. nonfinite: of fan_fold_find_nonfinite. FAN_ERR_NOMEM:
 * nothing happened. */
fan_status fan_fold_absorb(fan_fold *fold, const fan_like *like, size_t nonfinite, fan_error *err);

#endif
