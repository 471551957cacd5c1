/* Recordings on the CPU: lists of kernels, which a replay runs in their order.
 *
 * Sections: the list, and the recording of this thread; refusals, which make it invalid; kernels,
 * which are added to it; and the entries of the recorder's table. */
#include "device/cpu/recording.h"

#include "base/fault.h"
#include "base/mem.h"
#include "device/job.h"

/* A kernel of the core or of a frontend. */
typedef struct kernel {
    fan_job *job; /* with all its data in its block; NULL: `call` is used */
    fan_cpu_call call;
} kernel;

struct fan_recording {
    kernel *kernels;
    size_t n;
    size_t cap;
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
static fan_status recording_refuse(fan_recording *r, fan_status status, const char *reason,
                                   fan_error *err)
{
    if (r->why.status == FAN_OK)
        (void)fan_fail(&r->why, status, "%s", reason);
    return fan_fail(err, status, "%s", reason);
}

static fan_status recording_no_memory(fan_recording *r, fan_error *err)
{
    return recording_refuse(r, FAN_ERR_NOMEM, "out of memory", err);
}

/* ---- kernels ---- */

/* recording_put: takes the kernel, also on failure. */
static fan_status recording_put(fan_recording *r, kernel *added, fan_error *err)
{
    if (fan_grow((void **)&r->kernels, &r->cap, r->n + 1, sizeof *r->kernels) < 0) {
        kernel_free(added);
        return recording_no_memory(r, err);
    }
    r->kernels[r->n++] = *added;
    return FAN_OK;
}

fan_status fan_recording_call(fan_recording *r, const fan_cpu_call *call, fan_error *err)
{
    kernel added = {.call = *call};
    fan_cpu_access *copies = fan_alloc(call->n * sizeof *copies);
    added.call.accesses = copies;
    if (!copies) {
        kernel_free(&added);
        return recording_no_memory(r, err);
    }
    for (size_t i = 0; i < call->n; i++)
        copies[i] = call->accesses[i];
    return recording_put(r, &added, err);
}

/* job_refusal: why a job cannot be recorded; NULL: it can. */
static const char *job_refusal(const fan_job *job)
{
    if (job->kind == FAN_JOB_EXACT)
        return "an exact sum cannot be recorded: record with another accumulate=";
    if (job->kind == FAN_JOB_SCATTER) {
        return "a sum of sparse gradients cannot be recorded: make them dense: its size depends on "
               "their values";
    }
    if (job->kind == FAN_JOB_STATS || job->stats || job->stats_out)
        return "the statistics of a sum (stats=True) cannot be recorded: measure it outside";
    return NULL;
}

fan_status fan_recording_job(const fan_job *job, bool *recorded, fan_error *err)
{
    fan_recording *r = fan_recording_here();
    fan__packer packer = {NULL, 0};
    *recorded = r != NULL;
    if (!r)
        return FAN_OK;
    const char *refusal = job_refusal(job);
    if (refusal)
        return recording_refuse(r, FAN_ERR_CAPTURE, refusal, err);
    (void)fan__pack_jobs(&packer, job, 1);
    kernel added = {.job = fan_alloc(packer.used)};
    if (!added.job)
        return recording_no_memory(r, err);
    packer = (fan__packer){(char *)added.job, 0};
    (void)fan__pack_jobs(&packer, job, 1);
    return recording_put(r, &added, err);
}

/* ---- the recorder's entries ---- */

static fan_status cpu_begin(fan_device *d, fan_stream *origin, fan_error *err)
{
    (void)d;
    (void)origin;
    if (here) {
        return fan_fail(err, FAN_ERR_CAPTURE,
                        "this thread records already: end that recording first");
    }
    here = fan_calloc(sizeof *here);
    if (!here)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    return FAN_OK;
}

static fan_status cpu_end(fan_device *d, fan_stream *origin, fan_recording **out, fan_error *err)
{
    (void)d;
    (void)origin;
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
    (void)d;
    (void)origin;
    recording_free(here);
}

/* cpu_launch: runs all kernels, in their order; stops at the first failure. */
static fan_status cpu_launch(fan_recording *r, fan_stream *origin, fan_error *err)
{
    (void)origin;
    size_t n = r->n;
    if (FAN_FAULT(KERNEL_NOT_REPLAYED) && n)
        n--;
    for (size_t i = 0; i < n; i++) {
        const kernel *k = &r->kernels[i];
        if (k->job)
            fan_job_run(k->job, true);
        else
            FAN_TRY(k->call.run(k->call.ctx, err));
    }
    return FAN_OK;
}

/* array_access: visits the memory of an operand; returns false if the visits end. */
static bool array_access(const fan_job *job, const fan_array *a, fan_recording_visit visit,
                         void *ctx)
{
    int64_t lo;
    int64_t hi;
    fan_array_reach(a, &lo, &hi);
    if (lo == hi)
        return true;
    const char *word = fan_job_word(job->kind);
    size_t bytes = (size_t)(hi - lo);
    bool writes = a == job->out;
    return visit(ctx, word, a->data + lo, bytes, writes);
}

/* kernel_accesses: visits what a kernel reads and writes; returns false if the visits end. */
static bool kernel_accesses(const kernel *k, fan_recording_visit visit, void *ctx)
{
    const fan_job *job = k->job;
    if (job) {
        for (size_t i = 0; i < job->n; i++) {
            if (!array_access(job, job->in[i].array, visit, ctx))
                return false;
        }
        return array_access(job, job->out, visit, ctx);
    }
    for (size_t i = 0; i < k->call.n; i++) {
        const fan_cpu_access *access = &k->call.accesses[i];
        if (!access->bytes)
            continue;
        if (!visit(ctx, k->call.name, access->data, access->bytes, access->write))
            return false;
    }
    return true;
}

static void cpu_accesses(const fan_recording *r, fan_recording_visit visit, void *ctx)
{
    size_t i = 0;
    while (i < r->n && kernel_accesses(&r->kernels[i], visit, ctx))
        i++;
}

static size_t cpu_kernels(const fan_recording *r)
{
    return r->n;
}

static fan_status cpu_poison(fan_device *d, fan_stream *origin, void *data, size_t bytes,
                             fan_error *err)
{
    (void)d;
    (void)origin;
    (void)err;
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
    .kernels = cpu_kernels,
    .poison = cpu_poison,
};
