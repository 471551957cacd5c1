#include "device/cuda/copy.h"

#include "array/elements.h"
#include "base/fault.h"
#include "base/mem.h"
#include "device/cuda/context.h"
#include "device/cuda/memory.h"
#include "device/cuda/sum.h"

#include <string.h>

/* A host copy of an array's memory: the same strides, no gaps. */
typedef struct copy_twin {
    char *bytes;
    size_t size;
    int64_t lo;
    fan_array array;
} copy_twin;

static fan_status copy_twin_begin(copy_twin *t, const fan_array *of, fan_error *err)
{
    int64_t hi;
    fan_array_reach(of, &t->lo, &hi);
    t->size = (size_t)(hi - t->lo);
    t->bytes = fan_alloc_data(t->size);
    if (!t->bytes)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s beside a device", t->size,
                        FAN_PLURAL(t->size));
    t->array = (fan_array){.data = t->bytes - t->lo,
                           .dtype = of->dtype,
                           .ndim = of->ndim,
                           .size = of->size,
                           .shape = of->shape,
                           .strides = of->strides,
                           .writable = true};
    return FAN_OK;
}

static void copy_twin_end(copy_twin *t) { fan_free_data(t->bytes, t->size); }

/* copy_packed: makes `like` without gaps, in scratch memory of the stream; its dims are in room[2 * FAN_MAX_NDIM]. */
static fan_status copy_packed(const fan__launch_ctx *s, const fan_array *like, fan_array *out, int64_t *room,
                              fan_error *err)
{
    uint64_t at = 0;
    FAN_TRY(fan__cuda_scratch(s->stream, (size_t)like->size * fan_dtype_size(like->dtype), &at, err));
    memcpy(room, like->shape, (size_t)like->ndim * sizeof *room);
    fan_dense_strides(like->ndim, like->shape, fan_dtype_size(like->dtype), NULL, room + FAN_MAX_NDIM);
    *out = (fan_array){.data = (char *)(uintptr_t)at,
                       .dtype = like->dtype,
                       .ndim = like->ndim,
                       .size = like->size,
                       .shape = room,
                       .strides = room + FAN_MAX_NDIM,
                       .writable = true};
    return FAN_OK;
}

/* copy_send: copies from host memory, which may be reused on return. Blocks if the device itself reads such memory. */
static fan_status copy_send(const fan__launch_ctx *s, uint64_t to, const char *from, size_t bytes, fan_error *err)
{
    int mode = fan__cuda_relax(s->part, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = fan__cuda_api_of(s->part)->MemcpyHtoDAsync(to, from, bytes, s->on);
    (void)fan__cuda_relax(s->part, mode);
    FAN_TRY(fan__cuda_check(s->part, code, "cuMemcpyHtoDAsync", err));
    return s->part->reads_host && !FAN_FAULT(CUDA_EARLY_HOST) ? fan__cuda_pass(s->part, s->on, err) : FAN_OK;
}

fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err)
{
    fan_status status;
    copy_twin t = {.bytes = NULL};
    fan_array near;
    int64_t room[2 * FAN_MAX_NDIM];
    if (out->size == 0)
        return FAN_OK;
    if (!fan_array_dense(out)) {
        FAN_TRY(copy_packed(s, out, &near, room, err));
        status = fan__cuda_upload(s, &near, in, err);
        if (status == FAN_OK)
            status = fan__cuda_copy(s, out, &near, err);
        fan__cuda_scratch_free(s->stream, fan__address_of(&near));
        return status;
    }
    FAN_GO(copy_twin_begin(&t, out, err)); /* memory that is certainly not pinned */
    fan_array_copy(&t.array, in);
    status = copy_send(s, fan__address_of(out) + (uint64_t)t.lo, t.bytes, t.size, err);
done:
    copy_twin_end(&t);
    return status;
}

fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(s->part);
    fan_status status;
    copy_twin t = {.bytes = NULL};
    fan_array near;
    int64_t room[2 * FAN_MAX_NDIM];
    if (src->size == 0)
        return FAN_OK;
    if (!fan_array_dense(src)) {
        FAN_TRY(copy_packed(s, src, &near, room, err));
        status = fan__cuda_copy(s, &near, src, err);
        if (status == FAN_OK)
            status = fan__cuda_download(s, dst, &near, err);
        fan__cuda_scratch_free(s->stream, fan__address_of(&near));
        return status;
    }
    FAN_GO(copy_twin_begin(&t, src, err));
    int mode = fan__cuda_relax(s->part, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = api->MemcpyDtoHAsync(t.bytes, fan__address_of(src) + (uint64_t)t.lo, t.size, s->on);
    (void)fan__cuda_relax(s->part, mode);
    FAN_GO(fan__cuda_check(s->part, code, "cuMemcpyDtoHAsync", err));
    FAN_GO(fan__cuda_pass(s->part, s->on, err));
    fan_array_copy(dst, &t.array);
done:
    copy_twin_end(&t);
    return status;
}

fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *sum_ = NULL, **made = fan_calloc(job->n * sizeof *made);
    fan_operand *in = fan_calloc(job->n * sizeof *in);
    if (!made || !in) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for an exact sum");
        goto done;
    }
    for (size_t k = 0; k < job->n; k++) {
        const fan_array *a = job->in[k].array;
        FAN_GO(fan_array_new(a->dtype, a->ndim, a->shape, a, &made[k], err));
        FAN_GO(fan__cuda_download(s, made[k], a, err));
        in[k] = (fan_operand){.array = made[k], .acc = job->in[k].acc};
    }
    FAN_GO(fan_array_new(job->out->dtype, job->out->ndim, job->out->shape, job->out, &sum_, err));
    fan_job_run(&(fan_job){.kind = FAN_JOB_EXACT, .out = sum_, .in = in, .n = job->n, .scale = job->scale}, true);
    status = fan__cuda_upload(s, job->out, sum_, err);
done:
    for (size_t k = 0; made && k < job->n; k++)
        fan_array_drop(made[k]);
    fan_array_drop(sum_);
    fan_free(made);
    fan_free(in);
    return status;
}
