/* fold_job: the dtypes of a sum, its jobs, and memory for it. */
#include "buffer/fold_job.h"

#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/slot.h"

#include <stdio.h>

fan_status fan_fold_fail_memory(const fan_fold *fold, fan_error *err)
{
    return fan_slot_fail_memory(fold->b, fold->slot, err);
}

fan_dtype fan_fold_accumulated(const fan_fold *fold, fan_dtype_set seen)
{
    return fan_accum_dtype_of(seen, fan_fold_slot(fold)->spec->accumulate);
}

const fan_scale *fan_fold_scale(const fan_fold *fold)
{
    if (!fan_scale_acts(&fold->scale))
        return NULL;
    return &fold->scale;
}

fan_dtype fan_fold_last(const fan_fold *fold)
{
    fan_dtype_set seen = fold->seen;
    if (FAN_FAULT(SCALED_BEFORE_WIDENED) && fold->n)
        seen = fold->terms[fold->n - 1].seen;
    fan_dtype dtype = fan_fold_accumulated(fold, seen);
    const fan_scale *scale = fan_fold_scale(fold);
    if (!scale)
        return dtype;
    return fan_scale_dtype(scale, dtype);
}

fan_dtype fan_fold_dtype(const fan_fold *fold)
{
    return fan_dtype_set_promote(fold->seen);
}

fan_status fan_fold_job(fan_fold *fold, fan_job *job, fan_error *err)
{
    fan_buffer *b = fold->b;
    fan_slot *s = fan_fold_slot(fold);
    fan_device *d = fan_fold_device(fold);
    bool on_host = !d->backend->has_streams;
    char label[FAN_TRACE_LABEL];
    uint64_t bytes = 0;
    if (job->out)
        bytes = fan_dense_bytes(job->out);
    if (!on_host || fan_trace_on()) { /* only these read it */
        if (s->spec->name)
            snprintf(label, sizeof label, "%s %s", job->label, s->spec->name);
        else
            snprintf(label, sizeof label, "%s %s[%zu]", job->label, b->name, fold->slot);
        job->label = label;
    }
    FAN_COUNT(b, passes, 1);
    FAN_COUNT(b, bytes_written, bytes);
    for (size_t i = 0; i < job->n; i++) {
        uint64_t n = fan_dense_bytes(job->in[i].array);
        FAN_COUNT(b, bytes_read, n);
        bytes += n;
    }
    fan_stream *on = s->state->accum;
    if (FAN_FAULT(SUM_ON_LAST_PRODUCER) && fold->n)
        on = fold->terms[fold->n - 1].producer;
    if (fold->batch)
        return fan_batch_put(fold->batch, on, job, &fold->number, err);
    void *left = fan_frontend_leave(b->frontend, on_host && bytes >= FAN_BUSY_BYTES);
    fan_status status = fan_device_run(d, on, job, err);
    fan_frontend_return(b->frontend, left);
    return status;
}

fan_status fan_fold_job_to_fresh(fan_fold *fold, fan_job *job, fan_error *err)
{
    fan_interrupt interrupt;
    bool may_end = fold->may_end && !fan_fold_device(fold)->backend->has_streams;
    fan_buffer_interrupt_begin(fold->b, &interrupt, may_end, err);
    return fan_interrupt_end(&interrupt, fan_fold_job(fold, job, err));
}

fan_status fan_fold_fresh(fan_fold *fold, fan_dtype dtype, int ndim, const int64_t *shape,
                          const fan_array *like, fan_array **out, fan_error *err)
{
    fan_device *d = fan_fold_device(fold);
    fan_stream *A = fan_fold_accum(fold);
    const fan_frontend *frontend = fold->b->frontend;
    const fan_value *first = NULL; /* D15: of its kind the sum is */
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (!first || value->rank < first->rank)
            first = value;
    }
    *out = NULL;
    if (first && frontend->fresh && d->backend->has_streams)
        FAN_TRY(frontend->fresh(first->origin, d, A, dtype, ndim, shape, like, out, err));
    if (*out)
        return FAN_OK;
    return fan_device_array(d, A, dtype, ndim, shape, like, out, err);
}

fan_status fan_fold_keep_term(fan_fold *fold, size_t i, fan_value *out, fan_error *err)
{
    const fan_term *term = &fold->terms[i];
    FAN_TRY(fan_value_copy(fold->b->frontend, term->v, out, err));
    fold->owned = term->owned;
    fold->donated = term->donated;
    return FAN_OK;
}

fan_status fan_fold_into(fan_fold *fold, fan_job_kind kind, const char *label, const fan_array *out,
                         const fan_operand *in, size_t n, fan_error *err)
{
    fan_job job = {
        .kind = kind,
        .out = out,
        .in = in,
        .n = n,
        .label = label,
    };
    return fan_fold_job(fold, &job, err);
}

fan_status fan_fold_copy(fan_fold *fold, const char *label, const fan_array *to,
                         const fan_array *from, fan_error *err)
{
    const fan_operand in = {.array = from, .acc = to->dtype};
    return fan_fold_into(fold, FAN_JOB_COPY, label, to, &in, 1, err);
}

fan_status fan_fold_zero(fan_fold *fold, const fan_array *to, fan_error *err)
{
    return fan_fold_into(fold, FAN_JOB_ZERO, "begin", to, NULL, 0, err);
}

fan_status fan_fold_scatter(fan_fold *fold, const char *label, const fan_array *to,
                            const fan_sparse *sparse, fan_error *err)
{
    fan_job job = {
        .kind = FAN_JOB_SCATTER,
        .out = to,
        .sparse = sparse,
        .label = label,
    };
    return fan_fold_job(fold, &job, err);
}

void fan_fold_made(fan_fold *fold, fan_array *sum)
{
    fold->result = fan_value_dense(fan_array_hold(sum), fan_fold_device(fold));
    fold->owned = true;
}

fan_status fan_fold_whole_end(fan_fold *fold, fan_array *sum, fan_value *kept, bool begun,
                              fan_status status, fan_error *err)
{
    bool in_place = kept->form == FAN_FORM_DENSE;
    if (status == FAN_OK && in_place && sum == kept->array) {
        fold->result = *kept;
        *kept = fan_value_none();
    } else if (status == FAN_OK) {
        fan_fold_made(fold, sum);
    }
    /* want of memory changes nothing, as a rule: here a part of the sum is in its place */
    if (status == FAN_ERR_DEVICE_NOMEM && begun && in_place) {
        status = FAN_ERR_DEVICE;
        if (err)
            err->status = status;
    }
    fan_value_drop(fold->b->frontend, kept);
    fan_array_drop(sum);
    return status;
}

fan_status fan_fold_replace(fan_array **sum, fan_array *to, fan_status status)
{
    fan_array_drop(status == FAN_OK ? *sum : to);
    if (status == FAN_OK)
        *sum = to;
    return status;
}

fan_status fan_fold_finish(fan_fold *fold, fan_array **sum, fan_error *err)
{
    const fan_scale *scale = fan_fold_scale(fold);
    fan_dtype wanted = fold->plan.dtype;
    const fan_array *from = *sum;
    fan_array *last = NULL;
    if (wanted == from->dtype && !scale)
        return FAN_OK;
    FAN_TRY(fan_fold_fresh(fold, wanted, from->ndim, from->shape, from, &last, err));
    const fan_operand in = {.array = from, .acc = fan_fold_last(fold)};
    fan_job job = {
        .kind = FAN_JOB_SUM,
        .out = last,
        .in = &in,
        .n = 1,
        .scale = scale,
        .label = "finish",
    };
    return fan_fold_replace(sum, last, fan_fold_job(fold, &job, err));
}

void fan_fold_sparse_operands(const fan_fold *fold, size_t n, fan_sparse_operand *in)
{
    for (size_t i = 0; i < n; i++) {
        const fan_term *term = &fold->terms[i];
        in[i].sparse = term->v->sparse;
        in[i].acc = fan_fold_accumulated(fold, term->seen);
    }
}

fan_status fan_fold_sum_sparse(fan_fold *fold, size_t n, fan_sparse **out, fan_error *err)
{
    fan_sparse_operand *in = fan_alloc(n * sizeof *in);
    if (!in)
        return fan_fail_memory(err);
    fan_fold_sparse_operands(fold, n, in);
    fan_status status = fan_device_sparse_merge(fan_fold_device(fold), fan_fold_accum(fold), in, n,
                                                true, FAN_DT_NONE, NULL, out, err);
    fan_free(in);
    return status;
}

bool fan_fold_has(const fan_fold *fold, fan_form form)
{
    for (size_t i = 0; i < fold->n; i++) {
        if (fold->terms[i].v->form == form)
            return true;
    }
    return false;
}

uint64_t fan_fold_expanded(const fan_fold *fold)
{
    uint64_t axes = ~UINT64_C(0);
    if (!fold->n)
        axes = 0;
    if (fold->state)
        axes = fold->state->expanded;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form != FAN_FORM_DENSE)
            return 0;
        axes &= fan_array_expanded(value->array);
    }
    return axes;
}
