/* fold_sparse: sums with sparse terms: merged, or scattered into a dense sum. */
#include "base/mem.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"

/* ---- all terms sparse ---- */

/* A part of a lone term in memory of its own. NULL stays NULL. */
static fan_status sparse_copy_part(fan_fold *f, const fan_array *part, fan_array **out,
                                   fan_error *err)
{
    if (!part)
        return FAN_OK;
    fan_stream *on = fan_fold_accum(f);
    FAN_TRY(fan_device_array(fan_fold_device(f), on, part->dtype, part->ndim, part->shape, part,
                             out, err));
    fan_operand in = {part, part->dtype};
    return fan_fold_into(f, FAN_JOB_COPY, "copy", *out, &in, 1, NULL, err);
}

/* The only term, copied entry by entry: it keeps its structure (A14). */
static fan_status sparse_copy(fan_fold *f, const fan_sparse *v, fan_sparse **out, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *indices = NULL;
    fan_array *pointers = NULL;
    fan_array *values = NULL;
    FAN_GO(sparse_copy_part(f, v->indices, &indices, err));
    FAN_GO(sparse_copy_part(f, v->pointers, &pointers, err));
    FAN_GO(sparse_copy_part(f, v->values, &values, err));
    FAN_GO(fan_sparse_new(v->format, v->ndim, v->shape, indices, pointers, values, v->coalesced,
                          out, err));
    (*out)->nnz_coalesced = v->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

bool fan_fold_is_copied(const fan_fold *f)
{
    bool alone = f->finish && f->n == 1 && !f->plan.coalesce;
    bool into_out = f->finish_dtype != FAN_DT_NONE;
    bool changed = fan_fold_scale(f) || f->terms[0].v->dtype != f->plan.dtype;
    return alone && !into_out && !changed;
}

fan_status fan_fold_sparse(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sparse *sum = NULL;
    fan_sparse_operand *in = fan_alloc((f->n + 1) * sizeof *in);
    if (!in)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < f->n; i++)
        in[i] =
            (fan_sparse_operand){f->terms[i].v->sparse, fan_fold_accumulated(f, f->terms[i].seen)};
    fan_dtype last = fan_fold_last(f);
    bool wider = in[f->n - 1].acc != last;
    if (wider)
        in[f->n] = (fan_sparse_operand){NULL, last};
    FAN_GO(fan_order_wait_terms(f, err));
    if (fan_fold_is_copied(f)) {
        FAN_GO(sparse_copy(f, in[0].sparse, &sum, err));
        f->result = fan_value_sparse(sum, fan_fold_device(f));
        f->owned = true;
        goto done;
    }
    FAN_COUNT(f->b, passes, 1);
    FAN_GO(fan_device_sparse_merge(fan_fold_device(f), fan_fold_accum(f), in, f->n + wider,
                                   f->plan.coalesce, f->finish ? f->plan.dtype : FAN_DT_NONE,
                                   fan_fold_scale(f), &sum, err));
    f->result = fan_value_sparse(sum, fan_fold_device(f));
    f->owned = true;
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

/* The terms up to and with the first dense one. */
static fan_status mixed_begin(fan_fold *f, mixed *m, fan_error *err)
{
    fan_term *t = f->terms;
    if (f->plan.exclusive) {
        FAN_TRY(fan_order_wait_users(f, m->cur, err));
        FAN_COUNT(f->b, in_place, f->n - 1);
        m->next = t[0].v->form == FAN_FORM_SPARSE ? 2 : 1;
        return m->next == 1 ? FAN_OK
                            : fan_fold_into(f, FAN_JOB_SCATTER, "scatter", m->cur, NULL, 0,
                                            t[0].v->sparse, err);
    }
    /* What is sparse before the first dense term is summed by itself; where it has no entry the
     * dense value stays as it is (D12). */
    f->scratch[0] = (fan_operand){t[m->lead].v->array, m->cur->dtype};
    FAN_TRY(fan_fold_into(f, FAN_JOB_COPY, "copy", m->cur, f->scratch, 1, NULL, err));
    m->next = m->lead + 1;
    if (!m->lead)
        return FAN_OK;
    fan_sparse *leading = NULL;
    FAN_TRY(fan_fold_sum_sparse(f, m->lead, &leading, err));
    fan_status status = fan_fold_into(f, FAN_JOB_SCATTER, "scatter", m->cur, NULL, 0, leading, err);
    fan_sparse_drop(leading);
    return status;
}

/* One sparse term, or all dense ones up to the next sparse. */
static fan_status mixed_more(fan_fold *f, mixed *m, fan_error *err)
{
    fan_term *t = f->terms;
    size_t i = m->next, end = i;
    fan_array *wider = NULL;
    fan_status status;
    while (end < f->n && t[end].v->form == FAN_FORM_DENSE)
        end++;
    end = end > i ? end : i + 1;
    fan_dtype acc = fan_fold_accumulated(f, t[end - 1].seen);
    if (acc != m->cur->dtype)
        FAN_TRY(fan_fold_fresh(f, acc, m->ndim, m->shape, m->cur, &wider, err));
    fan_array *to = wider ? wider : m->cur;
    f->scratch[0] = (fan_operand){m->cur, m->cur->dtype};
    if (t[i].v->form == FAN_FORM_DENSE) {
        for (size_t k = i; k < end; k++)
            f->scratch[1 + k - i] =
                (fan_operand){t[k].v->array, fan_fold_accumulated(f, t[k].seen)};
        status = fan_fold_into(f, FAN_JOB_SUM, "sum", to, f->scratch, 1 + end - i, NULL, err);
    } else {
        status =
            wider ? fan_fold_into(f, FAN_JOB_COPY, "widen", to, f->scratch, 1, NULL, err) : FAN_OK;
        if (status == FAN_OK)
            status = fan_fold_into(f, FAN_JOB_SCATTER, "scatter", to, NULL, 0, t[i].v->sparse, err);
    }
    if (wider) {
        fan_array_drop(status == FAN_OK ? m->cur : wider);
        m->cur = status == FAN_OK ? wider : m->cur;
    }
    m->next = end;
    return status;
}

fan_status fan_fold_mixed(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    mixed m = {.kept = {.dtype = FAN_DT_NONE}};
    bool begun = false;
    m.ndim = fan_value_shape(f->terms[0].v, &m.shape);
    /* Where the sum is made: in the first term or the second, or in fresh memory. */
    fan_term *t = f->terms;
    if (f->plan.exclusive) {
        size_t kept = f->plan.action == FAN_ACTION_INTO_NEW;
        m.cur = fan_array_hold(t[kept].v->array);
        FAN_GO(fan_fold_keep_term(f, kept, &m.kept, err));
    } else {
        while (t[m.lead].v->form == FAN_FORM_SPARSE)
            m.lead++;
        FAN_GO(fan_fold_fresh(f, fan_fold_accumulated(f, t[m.lead].seen), m.ndim, m.shape,
                              t[m.lead].v->array, &m.cur, err));
    }
    FAN_GO(fan_order_wait_terms(f, err));
    FAN_GO(mixed_begin(f, &m, err));
    begun = m.next > 1;
    for (; m.next < f->n; begun = true)
        FAN_GO(mixed_more(f, &m, err));
    /* The sum in the dtype in which it is wanted, scaled. */
    const fan_scale *scale = fan_fold_scale(f);
    if (f->plan.dtype != m.cur->dtype || scale) {
        fan_array *last = NULL;
        FAN_GO(fan_fold_fresh(f, f->plan.dtype, m.ndim, m.shape, m.cur, &last, err));
        f->scratch[0] = (fan_operand){m.cur, fan_fold_last(f)};
        status = fan_fold_job(f,
                              &(fan_job){.kind = FAN_JOB_SUM,
                                         .out = last,
                                         .in = f->scratch,
                                         .n = 1,
                                         .scale = scale,
                                         .label = "finish"},
                              err);
        fan_array_drop(status == FAN_OK ? m.cur : last);
        m.cur = status == FAN_OK ? last : m.cur;
        FAN_GO(status);
    }
    if (m.kept.form == FAN_FORM_DENSE) {
        f->result = m.kept;
        m.kept = fan_value_none();
    } else {
        f->result = fan_value_dense(fan_array_hold(m.cur), fan_fold_device(f));
        f->owned = true;
    }
done:
    /* want of memory changes nothing, as a rule: here a part of the sum is in its place */
    if (status == FAN_ERR_DEVICE_NOMEM && begun && m.kept.form == FAN_FORM_DENSE) {
        status = FAN_ERR_DEVICE;
        if (err)
            err->status = status;
    }
    fan_value_drop(f->b->frontend, &m.kept);
    fan_array_drop(m.cur);
    return status;
}
