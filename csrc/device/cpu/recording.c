#include "device/cpu/recording.h"

#include "base/fault.h"
#include "base/mem.h"
#include "device/job.h"

#include <stdarg.h>
#include <stdio.h>

/* A kernel of the core or of a frontend. */
typedef struct kernel {
    fan_job *job; /* with all its data in its block; NULL: `call` is used */
    fan_cpu_call call;
} kernel;

struct fan_recording {
    kernel *kernels;
    size_t n, cap;
    fan_error why; /* the first reason why it is invalid; empty: valid */
};

static _Thread_local fan_recording *here;

fan_recording *fan_recording_here(void)
{
    return fan_storage_redirected() ? here : NULL;
}

static void kernel_free(kernel *k)
{
    fan_free(k->job);
    fan_free((void *)k->call.accesses);
    if (k->call.drop)
        k->call.drop(k->call.ctx);
}

static void recording_free(fan_recording *r)
{
    if (!r)
        return;
    if (here == r)
        here = NULL;
    for (size_t i = r->n; i-- > 0;)
        kernel_free(&r->kernels[i]);
    fan_free(r->kernels);
    fan_free(r);
}

/* ---- refusals ---- */

/* recording_refuse: makes the recording invalid, for a reason, which `err` (may be NULL) gets. */
__attribute__((format(printf, 4, 5))) static fan_status recording_refuse(fan_recording *r,
                                                                         fan_error *err,
                                                                         fan_status status,
                                                                         const char *fmt, ...)
{
    char text[FAN_ERROR_TEXT];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (r->why.status == FAN_OK)
        (void)fan_fail(&r->why, status, "%s", text);
    return fan_fail(err, status, "%s", text);
}

static fan_status recording_no_memory(fan_recording *r, fan_error *err)
{
    return recording_refuse(r, err, FAN_ERR_NOMEM, "out of memory");
}

/* ---- kernels ---- */

static fan_status recording_put(fan_recording *r, const kernel *k, fan_error *err)
{
    if (fan_grow((void **)&r->kernels, &r->cap, r->n + 1, sizeof *r->kernels) < 0)
        return recording_no_memory(r, err);
    r->kernels[r->n++] = *k;
    return FAN_OK;
}

fan_status fan_recording_call(fan_recording *r, const fan_cpu_call *call, fan_error *err)
{
    kernel k = {.call = *call};
    fan_cpu_access *copies = fan_alloc(call->n * sizeof *copies);
    fan_status status = copies ? FAN_OK : recording_no_memory(r, err);
    k.call.accesses = copies;
    for (size_t i = 0; i < call->n && copies; i++)
        copies[i] = call->accesses[i];
    if (status == FAN_OK)
        status = recording_put(r, &k, err);
    if (status != FAN_OK)
        kernel_free(&k);
    return status;
}

static fan_cpu_access access_of(const fan_array *a, bool write)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    return (fan_cpu_access){a->size ? a->data + lo : a->data, (size_t)(hi - lo), write};
}

fan_status fan_recording_job(const fan_job *job, bool *recorded, fan_error *err)
{
    fan_recording *r = fan_recording_here();
    fan__packer p = {NULL, 0};
    *recorded = r != NULL;
    if (!r)
        return FAN_OK;
    if (job->kind == FAN_JOB_EXACT)
        return recording_refuse(r, err, FAN_ERR_CAPTURE,
                                "an exact sum cannot be recorded: record with another accumulate=");
    if (job->kind == FAN_JOB_SCATTER)
        return recording_refuse(r, err, FAN_ERR_CAPTURE,
                                "a sum of sparse gradients cannot be recorded: make them dense: "
                                "its size depends on their values");
    if (job->kind == FAN_JOB_STATS || job->stats || job->stats_out)
        return recording_refuse(
            r, err, FAN_ERR_CAPTURE,
            "the statistics of a sum (stats=True) cannot be recorded: measure it outside");
    (void)fan__pack_jobs(&p, job, 1);
    kernel k = {.job = fan_alloc(p.used)};
    if (!k.job)
        return recording_no_memory(r, err);
    p = (fan__packer){(char *)k.job, 0};
    (void)fan__pack_jobs(&p, job, 1);
    fan_status status = recording_put(r, &k, err);
    if (status != FAN_OK)
        kernel_free(&k);
    return status;
}

/* ---- the recorder's entries ---- */

static fan_status cpu_begin(fan_device *d, fan_stream *origin, fan_error *err)
{
    (void)d, (void)origin;
    if (here)
        return fan_fail(err, FAN_ERR_CAPTURE,
                        "this thread records already: end that recording first");
    here = fan_calloc(sizeof *here);
    return here ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory");
}

static fan_status cpu_end(fan_device *d, fan_stream *origin, fan_recording **out, fan_error *err)
{
    (void)d, (void)origin;
    fan_recording *r = here;
    *out = NULL;
    if (!r)
        return fan_fail(err, FAN_ERR_CAPTURE, "this thread does not record");
    here = NULL;
    if (r->why.status == FAN_OK) {
        *out = r;
        return FAN_OK;
    }
    fan_status status = r->why.status;
    if (err)
        *err = r->why;
    recording_free(r);
    return status;
}

static void cpu_abort(fan_device *d, fan_stream *origin)
{
    (void)d, (void)origin;
    recording_free(here);
}

/* cpu_launch: runs all kernels, in their order; stops at the first failure. */
static fan_status cpu_launch(fan_recording *r, fan_stream *origin, fan_error *err)
{
    (void)origin;
    size_t n = FAN_FAULT(KERNEL_NOT_REPLAYED) && r->n ? r->n - 1 : r->n;
    for (size_t i = 0; i < n; i++) {
        const kernel *k = &r->kernels[i];
        if (k->job)
            fan_job_run(k->job, true);
        else
            FAN_TRY(k->call.run(k->call.ctx, err));
    }
    return FAN_OK;
}

static void cpu_accesses(const fan_recording *r, fan_recording_visit visit, void *ctx)
{
    bool on = true;
    for (size_t i = 0; i < r->n && on; i++) {
        const kernel *k = &r->kernels[i];
        for (size_t j = 0; !k->job && j < k->call.n && on; j++)
            on = !k->call.accesses[j].bytes ||
                 visit(ctx, k->call.name, k->call.accesses[j].data, k->call.accesses[j].bytes,
                       k->call.accesses[j].write);
        for (size_t j = 0; k->job && j <= k->job->n && on; j++) {
            const fan_array *a = j < k->job->n ? k->job->in[j].array : k->job->out;
            fan_cpu_access access = access_of(a, j == k->job->n);
            on = !access.bytes ||
                 visit(ctx, fan_job_word(k->job->kind), access.data, access.bytes, access.write);
        }
    }
}

static fan_status cpu_poison(fan_device *d, fan_stream *origin, void *data, size_t bytes,
                             fan_error *err)
{
    (void)d, (void)origin, (void)err;
    memset(data, FAN_CPU_POISON, bytes);
    return FAN_OK;
}

const fan_recorder fan_cpu_recorder = {
    .begin = cpu_begin,
    .end = cpu_end,
    .abort = cpu_abort,
    .launch = cpu_launch,
    .drop = recording_free,
    .accesses = cpu_accesses,
    .accesses_all = true,
    .poison = cpu_poison,
};
