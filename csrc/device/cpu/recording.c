#include "device/cpu/recording.h"

#include "array/extents.h"
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

typedef struct operand {
    fan_extent at;
    bool writable;
} operand;

struct fan_recording {
    fan_blocks *blocks;
    kernel *kernels;
    size_t n, cap;
    operand *operands; /* none: any memory is one */
    size_t operand_count, operand_cap;
    bool defers;          /* kernels do not run while it is made */
    fan_storage_make was; /* .. else: the previous allocator of the thread's memory */
    fan_error why;        /* the first reason why it is invalid; empty: valid */
};

static _Thread_local fan_recording *here;

fan_recording *fan_recording_here(void)
{
    return fan_storage_redirected() ? here : NULL;
}

bool fan_recording_defers(void)
{
    return fan_storage_redirected() && here && here->defers;
}

static fan_storage *make_here(size_t n)
{
    return fan_blocks_storage(here->blocks, n);
}

fan_recording *fan_recording_new(void)
{
    fan_recording *r = fan_calloc(sizeof *r);
    if (r && !(r->blocks = fan_blocks_new())) {
        fan_free(r);
        return NULL;
    }
    return r;
}

static void kernel_free(kernel *k)
{
    fan_free(k->job);
    fan_free((void *)k->call.accesses);
    if (k->call.drop)
        k->call.drop(k->call.ctx);
}

void fan_recording_free(fan_recording *r)
{
    if (!r)
        return;
    if (here == r)
        (void)fan_recording_end(r, NULL);
    for (size_t i = r->n; i-- > 0;)
        kernel_free(&r->kernels[i]);
    fan_free(r->kernels);
    fan_free(r->operands);
    fan_blocks_drop(r->blocks);
    fan_free(r);
}

fan_status fan_recording_begin(fan_recording *r, fan_error *err)
{
    if (here)
        return fan_fail(err, FAN_ERR_CAPTURE,
                        "this thread records already: end that recording first");
    here = r;
    if (!r->defers)
        r->was = fan_storage_redirect(make_here);
    return FAN_OK;
}

fan_status fan_recording_end(fan_recording *r, fan_error *err)
{
    if (here == r) {
        if (!r->defers)
            (void)fan_storage_redirect(r->was);
        here = NULL;
    }
    if (r->why.status != FAN_OK && err)
        *err = r->why;
    return r->why.status;
}

/* ---- valid memory, and refusals ---- */

fan_status fan_recording_operand(fan_recording *r, const void *data, size_t bytes, bool writable,
                                 fan_error *err)
{
    if (fan_grow((void **)&r->operands, &r->operand_cap, r->operand_count + 1,
                 sizeof *r->operands) < 0)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    r->operands[r->operand_count++] = (operand){fan_extent_flat(data, bytes), writable};
    return FAN_OK;
}

bool fan_recording_knows(fan_recording *r, const void *data, size_t bytes, bool write)
{
    bool any = bytes == 0 || !r->operand_count || FAN_FAULT(RECORDS_ANYTHING);
    if (any || fan_blocks_have(r->blocks, data, bytes))
        return true;
    for (size_t i = 0; i < r->operand_count; i++)
        if ((!write || r->operands[i].writable) &&
            fan_extent_within(fan_extent_flat(data, bytes), r->operands[i].at))
            return true;
    return false;
}

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

void fan_recording_fail(fan_recording *r, const char *why)
{
    (void)recording_refuse(r, NULL, FAN_ERR_CAPTURE, "%s", why);
}

static fan_status recording_no_memory(fan_recording *r, fan_error *err)
{
    return recording_refuse(r, err, FAN_ERR_NOMEM, "out of memory");
}

static fan_status check_access(fan_recording *r, const char *name, fan_cpu_access access,
                               fan_error *err)
{
    return fan_recording_knows(r, access.data, access.bytes, false)
               ? FAN_OK
               : recording_refuse(
                     r, err, FAN_ERR_CAPTURE,
                     "%s %s memory that is neither allocated in the recording nor an operand: a "
                     "replay "
                     "would use its contents at that time; compute it in the recording, or pass it "
                     "as an "
                     "operand (to a step of tape.compiled as an argument, or in static=)",
                     name, access.write ? "writes" : "reads");
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
    for (size_t i = 0; i < call->n && status == FAN_OK; i++) {
        copies[i] = call->accesses[i];
        status = check_access(r, call->name, copies[i], err);
    }
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

fan_status fan_recording_job(const fan_job *job, fan_error *err)
{
    fan_recording *r = fan_recording_here();
    fan__packer p = {NULL, 0};
    if (!r)
        return FAN_OK;
    const char *name = job->label ? job->label : fan_job_word(job->kind);
    if (job->kind == FAN_JOB_EXACT)
        return recording_refuse(r, err, FAN_ERR_CAPTURE,
                                "an exact sum cannot be recorded: record with another accumulate=");
    if (job->kind == FAN_JOB_SCATTER)
        return recording_refuse(
            r, err, FAN_ERR_CAPTURE,
            "a sum of sparse gradients cannot be recorded: make them dense: its size depends on "
            "their values");
    if (job->kind == FAN_JOB_STATS || job->stats || job->stats_out)
        return recording_refuse(
            r, err, FAN_ERR_CAPTURE,
            "the statistics of a sum (stats=True) cannot be recorded: measure it outside");
    for (size_t i = 0; i < job->n; i++)
        FAN_TRY(check_access(r, name, access_of(job->in[i].array, false), err));
    if (job->out)
        FAN_TRY(check_access(r, name, access_of(job->out, true), err));
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

fan_status fan_recording_replay(fan_recording *r, fan_error *err)
{
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

size_t fan_recording_kernels(const fan_recording *r)
{
    return r->n;
}

fan_blocks *fan_recording_blocks(const fan_recording *r)
{
    return r->blocks;
}

/* ---- the recorder's entries ---- */

static fan_status cpu_begin(fan_device *d, fan_stream *origin, fan_error *err)
{
    (void)d, (void)origin;
    fan_recording *r = fan_recording_new();
    if (!r)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    r->defers = true;
    fan_status status = fan_recording_begin(r, err);
    if (status != FAN_OK)
        fan_recording_free(r);
    return status;
}

static fan_status cpu_end(fan_device *d, fan_stream *origin, fan_recording **out, fan_error *err)
{
    (void)d, (void)origin;
    fan_recording *r = here;
    *out = NULL;
    if (!r)
        return fan_fail(err, FAN_ERR_CAPTURE, "this thread does not record");
    fan_status status = fan_recording_end(r, err);
    if (status != FAN_OK)
        fan_recording_free(r);
    else
        *out = r;
    return status;
}

static void cpu_abort(fan_device *d, fan_stream *origin)
{
    (void)d, (void)origin;
    fan_recording_free(here);
}

static fan_status cpu_launch(fan_recording *r, fan_stream *origin, fan_error *err)
{
    (void)origin;
    return fan_recording_replay(r, err);
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
    .drop = fan_recording_free,
    .accesses = cpu_accesses,
    .accesses_all = true,
    .poison = cpu_poison,
};
