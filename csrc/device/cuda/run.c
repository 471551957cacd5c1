#include "device/cuda/run.h"

#include "array/extents.h"
#include "device/cuda/context.h"
#include "device/cuda/copy.h"
#include "device/cuda/memory.h"
#include "device/cuda/recorder.h"
#include "device/cuda/reduce.h"
#include "device/cuda/stream.h"
#include "device/cuda/sum.h"
#include "device/memory.h"
#include "device/trace.h"

#include <string.h>

#define WORKERS 1024 /* at most, on COO entries: each looks at all indices */
#define THREADS_WANTED ((int64_t)1 << 16)

/* run_scatter_coo, run_scatter_rows: what differs between the formats; return where the words go on. */
static int64_t *run_scatter_coo(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    const fan_array *indices = sp->indices;
    a->sparse = (int32_t)indices->shape[0];
    a->index_row = indices->strides[0];
    a->index_step = indices->strides[1];
    memcpy(a->words, into->shape, (size_t)a->sparse * sizeof *a->words);
    memcpy(a->words + a->sparse, into->strides, (size_t)a->sparse * sizeof *a->words);
    a->lanes = THREADS_WANTED / (a->inside ? a->inside : 1);
    a->lanes = a->lanes < 1 ? 1 : a->lanes > WORKERS ? WORKERS : a->lanes;
    a->lanes = a->lanes < a->entries ? a->lanes : a->entries;
    return a->words + 2 * a->sparse;
}

static int64_t *run_scatter_rows(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    bool blocked = sp->format == FAN_FORMAT_BSR || sp->format == FAN_FORMAT_BSC;
    int axis = sp->format == FAN_FORMAT_CSC || sp->format == FAN_FORMAT_BSC;
    int64_t unit[2] = {blocked ? sp->values->shape[1] : 1, blocked ? sp->values->shape[2] : 1};
    a->pointers = fan__address_of(sp->pointers);
    a->pointer_size = (int32_t)fan_dtype_size(sp->pointers->dtype);
    a->pointer_step = sp->pointers->strides[0];
    a->index_step = sp->indices->strides[0];
    a->lanes = sp->pointers->shape[0] - 1;
    a->words[0] = unit[!axis] ? into->shape[!axis] / unit[!axis] : 0;
    a->words[1] = unit[axis] * into->strides[axis];
    a->words[2] = unit[!axis] * into->strides[!axis];
    return a->words + 3;
}

static fan_status run_scatter(const fan__launch_ctx *s, const fan_array *into, const fan_sparse *sp, fan_error *err)
{
    fan_k_scatter a;
    const fan_array *values = sp->values;
    if (values->size == 0)
        return FAN_OK;
    memset(&a, 0, sizeof a);
    a.into = fan__address_of(into);
    a.values = fan__address_of(values);
    a.indices = fan__address_of(sp->indices);
    a.entries = values->shape[0];
    a.inside = values->size / values->shape[0];
    a.value_step = values->strides[0];
    a.into_dtype = into->dtype;
    a.value_dtype = values->dtype;
    a.index_size = (int32_t)fan_dtype_size(sp->indices->dtype);
    a.anywhere = fan__is_anywhere(into) || fan__is_anywhere(values);
    if (fan__is_anywhere(sp->indices) || (sp->pointers && fan__is_anywhere(sp->pointers)))
        return fan_fail(err, FAN_ERR_VALUE, "the indices of a sparse gradient on cuda:%d are not aligned to their size",
                        s->part->index);
    int64_t *at = sp->format == FAN_FORMAT_COO ? run_scatter_coo(&a, into, sp) : run_scatter_rows(&a, into, sp);
    a.inner = values->ndim - 1;
    int first = into->ndim - a.inner; /* 0 for blocks */
    if (2 * a.sparse + 3 * (int64_t)a.inner + 3 > (int64_t)(sizeof a.words / sizeof *a.words))
        return fan_fail(err, FAN_ERR_VALUE, "a sparse gradient of %d axes has too many for cuda:%d", into->ndim,
                        s->part->index);
    memcpy(at, values->shape + 1, (size_t)a.inner * sizeof *at);
    memcpy(at + a.inner, into->strides + first, (size_t)a.inner * sizeof *at);
    memcpy(at + 2 * a.inner, values->strides + 1, (size_t)a.inner * sizeof *at);
    return fan__launch_threads(s, s->part->scatter, a.lanes * a.inside, &a, err);
}

static fan_status run_retain_array(const fan__launch_ctx *s, const fan_array *a, uint64_t capture, fan_cu_graph graph,
                                   fan_error *err)
{
    return a && a->size ? fan__cuda_retain(s->part, fan__address_of(a), capture, graph, err) : FAN_OK;
}

static fan_status run_retain_all(const fan__launch_ctx *s, const fan_job *job, uint64_t capture, fan_cu_graph graph,
                                 fan_error *err)
{
    FAN_TRY(run_retain_array(s, job->out, capture, graph, err));
    for (size_t k = 0; k < job->n && job->kind != FAN_JOB_UPLOAD; k++)
        FAN_TRY(run_retain_array(s, job->in[k].array, capture, graph, err));
    if (job->sparse) {
        FAN_TRY(run_retain_array(s, job->sparse->indices, capture, graph, err));
        FAN_TRY(run_retain_array(s, job->sparse->pointers, capture, graph, err));
        FAN_TRY(run_retain_array(s, job->sparse->values, capture, graph, err));
    }
    return FAN_OK;
}

/* run_under_capture: what a graph cannot replay is refused; what the rest uses is the graph's as well. */
static fan_status run_under_capture(const fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    uint64_t capture;
    fan_cu_graph graph = NULL;
    if (job->kind == FAN_JOB_UPLOAD)
        FAN_TRY(fan_memory_scope_upload(s->stream->device, err));
    FAN_TRY(fan__cuda_capture_of(s->stream, &capture, &graph, err));
    if (!capture)
        return fan_memory_scope_check(s->stream, err);
    if (job->kind == FAN_JOB_UPLOAD || job->kind == FAN_JOB_EXACT || job->stats_out)
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, 900,
            "%s needs the host, which a captured stream (%#llx of cuda:%d) cannot wait for: do it before the capture",
            job->kind == FAN_JOB_EXACT ? "an exact sum"
            : job->stats_out           ? "a sum with statistics"
                                       : "a copy from the host",
            (unsigned long long)s->stream->handle, s->part->index);
    FAN_TRY(run_retain_all(s, job, capture, graph, err));
    return fan__cuda_recorder_note(s->part->cuda, capture, job, err);
}

static fan_status run_kind(fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    switch (job->kind) {
    case FAN_JOB_SUM:
        return fan__cuda_sum(s, job->out, job->in, job->n, job->scale, err);
    case FAN_JOB_EXACT:
        return fan__cuda_exact(s, job, err);
    case FAN_JOB_REDUCE:
        return fan__cuda_reduce(s, job->out, job->in[0].array, err);
    case FAN_JOB_COPY:
        return fan__cuda_copy(s, job->out, job->in[0].array, err);
    case FAN_JOB_ZERO:
        return fan__cuda_zero(s, job->out, err);
    case FAN_JOB_SCATTER:
        return run_scatter(s, job->out, job->sparse, err);
    case FAN_JOB_UPLOAD:
        return fan__cuda_upload(s, job->out, job->in[0].array, err);
    case FAN_JOB_STATS:
        return fan__cuda_measure(s, job, err);
    }
    return FAN_OK;
}

/* run_in_place: the job writes over what it reads. */
static bool run_in_place(const fan_job *job)
{
    for (size_t k = 0; job->kind == FAN_JOB_SUM && k < job->n; k++)
        if (!fan_array_extents_disjoint(job->out, job->in[k].array))
            return true;
    return false;
}

fan_status fan__cuda_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    bool begun = false;
    fan__launch_ctx w = {.part = fan__cuda_part_of(d),
                         .stream = s,
                         .label = job->label ? job->label : fan_job_word(job->kind),
                         .stats_out = job->stats_out,
                         .first_suspect = job->first_suspect,
                         .begun = &begun};
    fan__cuda_scope scope;
    fan_status status;
    FAN_TRY(fan__cuda_queue_of(s, &w.on, err));
    FAN_TRY(fan__cuda_enter(w.part, &scope, err));
    FAN_GO(run_under_capture(&w, job, err));
    status = run_kind(&w, job, err);
    if (status == FAN_ERR_DEVICE_NOMEM && begun &&
        run_in_place(job)) { /* want of memory changes nothing, as a rule: here it did */
        status = FAN_ERR_DEVICE;
        if (err)
            err->status = status;
    }
done:
    fan__cuda_leave(&scope);
    if (status == FAN_OK)
        fan_job_trace(d, s, job, 0, -1, -1);
    return status;
}

fan_status fan__cuda_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err)
{
    fan__launch_ctx w = {.part = fan__cuda_part_of(s->device), .stream = s, .label = "read"};
    fan__cuda_scope scope;
    uint64_t capture;
    fan_status status;
    FAN_TRY(fan__cuda_queue_of(s, &w.on, err));
    FAN_TRY(fan__cuda_enter(w.part, &scope, err));
    FAN_GO(fan__cuda_capture_of(s, &capture, NULL, err));
    if (capture)
        status =
            fan_fail_code(err, FAN_ERR_CAPTURE, 900,
                          "stream %#llx of cuda:%d is captured: its values cannot be read before the graph has run",
                          (unsigned long long)s->handle, s->device->index);
    else
        status = fan__cuda_download(&w, dst, src, err);
done:
    fan__cuda_leave(&scope);
    return status;
}
