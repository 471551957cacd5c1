/* fold_sparse: sums with sparse terms: merged, or scattered into a dense sum. */
#include "base/mem.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"

/* ---- all terms sparse ---- */

/* A part of a lone term in memory of its own. */
static fan_status sparse_copy_part(fan_fold *fold, const fan_array *part, fan_array **out,
                                   fan_error *err)
{
    FAN_TRY(fan_device_array(fan_fold_device(fold), fan_fold_accum(fold), part->dtype, part->ndim,
                             part->shape, part, out, err));
    return fan_fold_copy(fold, "copy", *out, part, err);
}

static fan_status sparse_copy_parts(fan_fold *fold, const fan_sparse *v, fan_sparse_parts *to,
                                    fan_error *err)
{
    FAN_TRY(sparse_copy_part(fold, v->indices, &to->indices, err));
    if (v->pointers)
        FAN_TRY(sparse_copy_part(fold, v->pointers, &to->pointers, err));
    return sparse_copy_part(fold, v->values, &to->values, err);
}

/* The only term, copied entry by entry: it keeps its structure (A14). */
static fan_status sparse_copy(fan_fold *fold, const fan_sparse *v, fan_sparse **out, fan_error *err)
{
    fan_sparse_parts to = {.indices = NULL};
    fan_status status = sparse_copy_parts(fold, v, &to, err);
    return fan_sparse_parts_end(&to, status, v, out, err);
}

bool fan_fold_is_copied(const fan_fold *fold)
{
    const fan_fold_plan *plan = &fold->plan;
    bool only = fold->finish && fold->n == 1;
    if (!only || plan->coalesce)
        return false;
    bool into_out = fold->finish_dtype != FAN_DT_NONE;
    bool changed = fan_fold_scale(fold) || fold->terms[0].v->dtype != plan->dtype;
    return !into_out && !changed;
}

fan_status fan_fold_sparse(fan_fold *fold, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sparse *sum = NULL;
    size_t n = fold->n;
    fan_sparse_operand *in = fan_alloc((n + 1) * sizeof *in);
    if (!in)
        return fan_fail_memory(err);
    fan_fold_sparse_operands(fold, n, in);
    fan_dtype last = fan_fold_last(fold);
    if (in[n - 1].acc != last)
        in[n++] = (fan_sparse_operand){NULL, last};
    FAN_GO(fan_order_wait_terms(fold, err));
    if (fan_fold_is_copied(fold)) {
        FAN_GO(sparse_copy(fold, in[0].sparse, &sum, err));
    } else {
        fan_dtype rounded = FAN_DT_NONE;
        if (fold->finish)
            rounded = fold->plan.dtype;
        FAN_COUNT(fold->b, passes, 1);
        FAN_GO(fan_device_sparse_merge(fan_fold_device(fold), fan_fold_accum(fold), in, n,
                                       fold->plan.coalesce, rounded, fan_fold_scale(fold), &sum,
                                       err));
    }
    fold->result = fan_value_sparse(sum, fan_fold_device(fold));
    fold->owned = true;
done:
    fan_free(in);
    return status;
}

/* ---- dense and sparse in any mix ---- */

/* A sum of dense and sparse terms while it is made. */
typedef struct mixed {
    fan_array *cur; /* the sum so far, in the accumulation dtype of what is in it */
    fan_value kept; /* the term whose memory `cur` is; undefined: fresh memory */
    int ndim;
    const int64_t *shape;
    size_t lead; /* sparse terms before the first dense one, where that is copied */
    size_t next; /* the term that comes next */
} mixed;

/* The terms up to and with the first dense one, into memory that is no term's. */
static fan_status mixed_begin_fresh(fan_fold *fold, mixed *sum, fan_error *err)
{
    /* The sparse terms before the first dense one are summed by themselves; where they have no
     * entry the dense value stays as it is (D12). */
    FAN_TRY(fan_fold_copy(fold, "copy", sum->cur, fold->terms[sum->lead].v->array, err));
    sum->next = sum->lead + 1;
    if (!sum->lead)
        return FAN_OK;
    fan_sparse *leading = NULL;
    FAN_COUNT(fold->b, passes, 1);
    FAN_TRY(fan_fold_sum_sparse(fold, sum->lead, &leading, err));
    fan_status status = fan_fold_scatter(fold, "scatter", sum->cur, leading, err);
    fan_sparse_drop(leading);
    return status;
}

/* The terms up to and with the first dense one. */
static fan_status mixed_begin(fan_fold *fold, mixed *sum, fan_error *err)
{
    if (!fold->plan.exclusive)
        return mixed_begin_fresh(fold, sum, err);
    const fan_value *first = fold->terms[0].v;
    FAN_TRY(fan_order_wait_users(fold, sum->cur, err));
    FAN_COUNT(fold->b, in_place, fold->n - 1);
    sum->next = 1;
    if (first->form != FAN_FORM_SPARSE)
        return FAN_OK;
    sum->next = 2;
    return fan_fold_scatter(fold, "scatter", sum->cur, first->sparse, err);
}

/* Terms i to `end`, all dense, added to `sum`, into `to`. */
static fan_status mixed_add_dense(fan_fold *fold, const fan_array *sum, size_t i, size_t end,
                                  const fan_array *to, fan_error *err)
{
    size_t n = 1;
    fold->scratch[0] = (fan_operand){.array = sum, .acc = sum->dtype};
    for (; i < end; i++) {
        const fan_term *term = &fold->terms[i];
        fan_dtype acc = fan_fold_accumulated(fold, term->seen);
        fold->scratch[n++] = (fan_operand){.array = term->v->array, .acc = acc};
    }
    return fan_fold_into(fold, FAN_JOB_SUM, "sum", to, fold->scratch, n, err);
}

/* One sparse term, or all dense ones up to the next sparse. */
static fan_status mixed_more(fan_fold *fold, mixed *sum, fan_error *err)
{
    const fan_term *terms = fold->terms;
    size_t i = sum->next;
    size_t end = i;
    fan_array *wider = NULL;
    while (end < fold->n && terms[end].v->form == FAN_FORM_DENSE)
        end++;
    bool dense = end > i;
    if (!dense)
        end = i + 1;
    fan_dtype acc = fan_fold_accumulated(fold, terms[end - 1].seen);
    if (acc != sum->cur->dtype)
        FAN_TRY(fan_fold_fresh(fold, acc, sum->ndim, sum->shape, sum->cur, &wider, err));
    fan_array *to = sum->cur;
    if (wider)
        to = wider;
    fan_status status = FAN_OK;
    if (!dense && wider)
        status = fan_fold_copy(fold, "widen", to, sum->cur, err);
    if (dense)
        status = mixed_add_dense(fold, sum->cur, i, end, to, err);
    else if (status == FAN_OK)
        status = fan_fold_scatter(fold, "scatter", to, terms[i].v->sparse, err);
    sum->next = end;
    if (!wider)
        return status;
    return fan_fold_replace(&sum->cur, wider, status);
}

/* Where the sum is made: in the first term or the second, or in fresh memory. */
static fan_status mixed_place(fan_fold *fold, mixed *sum, fan_error *err)
{
    const fan_term *terms = fold->terms;
    if (fold->plan.exclusive) {
        size_t kept = fold->plan.action == FAN_ACTION_INTO_NEW;
        sum->cur = fan_array_hold(terms[kept].v->array);
        return fan_fold_keep_term(fold, kept, &sum->kept, err);
    }
    while (terms[sum->lead].v->form == FAN_FORM_SPARSE)
        sum->lead++;
    const fan_term *first = &terms[sum->lead];
    fan_dtype acc = fan_fold_accumulated(fold, first->seen);
    return fan_fold_fresh(fold, acc, sum->ndim, sum->shape, first->v->array, &sum->cur, err);
}

/* *begun: a part of the sum is in its place. */
static fan_status mixed_make(fan_fold *fold, mixed *sum, bool *begun, fan_error *err)
{
    FAN_TRY(mixed_place(fold, sum, err));
    FAN_TRY(fan_order_wait_terms(fold, err));
    FAN_TRY(mixed_begin(fold, sum, err));
    *begun = sum->next > 1;
    while (sum->next < fold->n) {
        FAN_TRY(mixed_more(fold, sum, err));
        *begun = true;
    }
    return fan_fold_finish(fold, &sum->cur, err);
}

fan_status fan_fold_mixed(fan_fold *fold, fan_error *err)
{
    mixed sum = {.kept = fan_value_none()};
    bool begun = false;
    sum.ndim = fan_value_shape(fold->terms[0].v, &sum.shape);
    fan_status status = mixed_make(fold, &sum, &begun, err);
    return fan_fold_whole_end(fold, sum.cur, &sum.kept, begun, status, err);
}
