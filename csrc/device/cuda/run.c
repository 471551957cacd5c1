#include "device/cuda/run.h"

#include "array/extents.h"
#include "device/cuda/context.h"
#include "device/cuda/copy.h"
#include "device/cuda/memory.h"
#include "device/cuda/recorder.h"
#include "device/cuda/reduce.h"
#include "device/cuda/scatter.h"
#include "device/cuda/stream.h"
#include "device/cuda/sum.h"
#include "device/memory.h"
#include "device/trace.h"

#include <string.h>

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

/* run_under_capture: refuses jobs that a graph cannot replay, and makes the graph hold the memory of the others. */
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
        return fan__cuda_scatter(s, job->out, job->sparse, err);
    case FAN_JOB_UPLOAD:
        return fan__cuda_upload(s, job->out, job->in[0].array, err);
    case FAN_JOB_STATS:
        return fan__cuda_measure(s, job, err);
    }
    return FAN_OK;
}

/* run_in_place: returns whether the job overwrites its input. */
static bool run_in_place(const fan_job *job)
{
    for (size_t k = 0; job->kind == FAN_JOB_SUM && k < job->n; k++)
        if (!fan_array_extents_disjoint(job->out, job->in[k].array))
            return true;
    return job->kind == FAN_JOB_SCATTER;
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
        run_in_place(job)) { /* a job that ran out of memory changes nothing, except here */
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
