#include "buffer/fold_job.h"

#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/internal.h"

#include <stdio.h>

/* `accumulate=` holds the dtype of each contribution, checked at its add, and so that of every
 * prefix. */
fan_dtype fan_fold_accumulated(const fan_fold *f, fan_dtype_set seen)
{
    fan_dtype d = fan_dtype_set_promote(seen), wish = fan_fold_slot(f)->spec->accumulate;
    if (d == FAN_DT_NONE)
        return d;
    return wish == FAN_DT_NONE ? fan_dtype_accumulate(d) : wish;
}

const fan_scale *fan_fold_scale(const fan_fold *f)
{
    bool scaled = f->take && f->take->scale.on;
    return scaled ? &f->take->scale : NULL;
}

fan_dtype fan_fold_last(const fan_fold *f)
{
    fan_dtype_set seen = f->seen;
    if (FAN_FAULT(SCALED_BEFORE_WIDENED) && f->n)
        seen = f->terms[f->n - 1].seen;
    fan_dtype d = fan_fold_accumulated(f, seen);
    const fan_scale *scale = fan_fold_scale(f);
    return scale ? fan_scale_dtype(scale, d) : d;
}

fan_dtype fan_fold_dtype(const fan_fold *f)
{
    return fan_dtype_set_promote(f->seen);
}

fan_status fan_fold_job(fan_fold *f, fan_job *job, fan_error *err)
{
    fan_buffer *b = f->b;
    fan_slot *s = fan_fold_slot(f);
    fan_device *d = fan_fold_device(f);
    char label[FAN_TRACE_LABEL];
    uint64_t bytes = job->out ? fan_dense_bytes(job->out) : 0;
    if (d->backend->has_streams || fan_trace_on()) { /* only these read it */
        if (s->spec->name)
            snprintf(label, sizeof label, "%s %s", job->label, s->spec->name);
        else
            snprintf(label, sizeof label, "%s %s[%zu]", job->label, b->name, f->slot);
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
    if (FAN_FAULT(SUM_ON_LAST_PRODUCER) && f->n)
        on = f->terms[f->n - 1].producer;
    if (f->batch)
        return fan_batch_put(f->batch, on, job, &f->number, err);
    bool release_gil =
        bytes >= FAN_BUSY_BYTES && !d->backend->has_streams && b->frontend->allow_threads_begin;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    fan_status status = fan_device_run(d, on, job, err);
    if (release_gil)
        b->frontend->allow_threads_end(left);
    return status;
}

fan_status fan_fold_job_to_fresh(fan_fold *f, fan_job *job, fan_error *err)
{
    fan_interrupt interrupt;
    bool may_end = f->may_end && !fan_fold_device(f)->backend->has_streams;
    fan_interrupt_begin(&interrupt, may_end ? f->b->frontend->check_signals : NULL, err);
    return fan_interrupt_end(&interrupt, fan_fold_job(f, job, err));
}

fan_status fan_fold_fresh(fan_fold *f, fan_dtype dtype, int ndim, const int64_t *shape,
                          const fan_array *like, fan_array **out, fan_error *err)
{
    fan_device *d = fan_fold_device(f);
    const fan_frontend *frontend = f->b->frontend;
    const fan_value *first = NULL; /* D15: of its kind the sum is */
    for (size_t i = 0; i < f->n; i++)
        if (!first || f->terms[i].v->rank < first->rank)
            first = f->terms[i].v;
    *out = NULL;
    if (d->backend->has_streams && frontend->fresh && first)
        FAN_TRY(frontend->fresh(first->origin, d, fan_fold_accum(f), dtype, ndim, shape, like, out,
                                err));
    return *out ? FAN_OK
                : fan_device_array(d, fan_fold_accum(f), dtype, ndim, shape, like, out, err);
}

fan_status fan_fold_keep_term(fan_fold *f, size_t i, fan_value *out, fan_error *err)
{
    FAN_TRY(fan_value_copy(f->b->frontend, f->terms[i].v, out, err));
    f->owned = f->terms[i].owned;
    f->donated = f->terms[i].donated;
    return FAN_OK;
}

fan_status fan_fold_into(fan_fold *f, fan_job_kind kind, const char *label, const fan_array *out,
                         const fan_operand *in, size_t n, const fan_sparse *sparse, fan_error *err)
{
    return fan_fold_job(
        f, &(fan_job){.kind = kind, .out = out, .in = in, .n = n, .sparse = sparse, .label = label},
        err);
}

fan_status fan_fold_sum_sparse(fan_fold *f, size_t n, fan_sparse **out, fan_error *err)
{
    fan_sparse_operand *in = fan_alloc(n * sizeof *in);
    if (!in)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < n; i++)
        in[i] =
            (fan_sparse_operand){f->terms[i].v->sparse, fan_fold_accumulated(f, f->terms[i].seen)};
    FAN_COUNT(f->b, passes, 1);
    fan_status status = fan_device_sparse_merge(fan_fold_device(f), fan_fold_accum(f), in, n, true,
                                                FAN_DT_NONE, NULL, out, err);
    fan_free(in);
    return status;
}

uint64_t fan_fold_expanded(const fan_fold *f)
{
    bool some = f->n || f->state;
    uint64_t axes = some ? ~UINT64_C(0) : 0;
    if (f->state)
        axes = f->state->expanded;
    for (size_t i = 0; i < f->n; i++)
        axes &=
            f->terms[i].v->form == FAN_FORM_DENSE ? fan_array_expanded(f->terms[i].v->array) : 0;
    return axes;
}
