/* Sums over axes.
 *
 * The order of the terms is D7's: it depends on the shape alone, so the results are bitwise those of the CPU. One
 * launch makes all lanes of all groups; or all groups, if the result has enough elements to keep the GPU busy, so that
 * lanes need no memory. Then each launch sums runs of the previous one's results, until one number per element is left.
 * Intermediate results are at most 1/256 of the input, and neighbouring threads read neighbouring ones. */
#include "device/cuda/reduce.h"

#include "array/reduce.h"
#include "base/fault.h"
#include "device/cuda/memory.h"
#include "device/cuda/sum.h"

#include <stdlib.h>
#include <string.h>

#define MOST_LEVELS 10                    /* 8192 * 256^7 is more than 2^63, and one launch for the lanes */
#define THREADS_WANTED ((int64_t)1 << 16) /* enough threads to keep a GPU busy */

/* Some axes of an array, with neighbours joined if every stride allows it. */
typedef struct reduce_axes {
    int n;
    int64_t extent[FAN_MAX_NDIM], out[FAN_MAX_NDIM], in[FAN_MAX_NDIM];
} reduce_axes;

static void reduce_add_axis(reduce_axes *a, int64_t extent, int64_t out, int64_t in)
{
    int last = a->n - 1;
    if (a->n && a->in[last] == in * extent && a->out[last] == out * extent) {
        a->extent[last] *= extent;
    } else {
        a->extent[last = a->n++] = extent;
    }
    a->out[last] = out;
    a->in[last] = in;
}

static void reduce_axes_of(reduce_axes *stay, reduce_axes *go, const fan_array *out, const fan_array *in)
{
    int lead = in->ndim - out->ndim;
    stay->n = go->n = 0;
    for (int i = 0; i < in->ndim; i++)
        if (in->shape[i] != 1 && i >= lead && out->shape[i - lead] == in->shape[i])
            reduce_add_axis(stay, in->shape[i], out->strides[i - lead], in->strides[i]);
        else if (in->shape[i] != 1)
            reduce_add_axis(go, in->shape[i], 0, in->strides[i]);
}

static void reduce_put_axes(fan_k_reduce *a, const reduce_axes *stay, const reduce_axes *go)
{
    size_t some = (size_t)stay->n * sizeof *a->words, gone = (size_t)go->n * sizeof *a->words;
    int64_t *at = a->words;
    a->stay = stay->n;
    a->go = go->n;
    memcpy(at, stay->extent, some);
    memcpy(at += stay->n, stay->out, some);
    memcpy(at += stay->n, stay->in, some);
    memcpy(at += stay->n, go->extent, gone);
    memcpy(at + go->n, go->in, gone);
}

/* reduce_deal: sets up the first launch. */
static void reduce_deal(fan_k_reduce *a)
{
    int64_t groups = (a->terms - 1) / FAN_K_GROUP + 1, over = a->terms - (groups - 1) * FAN_K_GROUP;
    a->group = FAN_K_GROUP;
    a->runs = 1;
    if (a->terms <= FAN_K_RUN)
        return;
    a->lanes = FAN_K_LANES;
    a->whole = a->numbers >= THREADS_WANTED / groups;
    a->runs = groups;
    if (!a->whole)
        a->runs = ((groups - 1) << FAN_K_LANES) + (over >> FAN_K_LANES ? 1 << FAN_K_LANES : over);
}

/* reduce_deal_again: turns `a` into the launch that sums its present results. size: of an intermediate number. */
static void reduce_deal_again(fan_k_reduce *a, reduce_axes *stay, int64_t size)
{
    bool lanes = a->lanes && !a->whole;
    reduce_axes left = {.n = a->runs > 1, .extent = {a->runs}, .in = {a->across ? a->numbers * size : size}};
    a->in_part = a->across ? size : a->runs * size;
    int64_t step = a->in_part * a->parts;
    for (int i = stay->n - 1; i >= 0; i--) {
        stay->in[i] = step;
        step *= stay->extent[i];
    }
    reduce_put_axes(a, stay, &left);
    a->terms = a->runs;
    a->group = lanes ? 1 << FAN_K_LANES : FAN_K_RUN;
    a->lanes = a->whole = 0;
    a->runs = (a->terms - 1) / a->group + 1;
    a->again = true;
}

static fan_status reduce_launches(const fan__launch_ctx *s, fan_k_reduce *a, reduce_axes *stay, size_t which,
                                  uint64_t *scratch, fan_error *err)
{
    uint64_t out = a->out;
    int64_t size = (int64_t)fan_dtype_size((fan_dtype)a->acc);
    for (int level = 0;; level++) {
        a->last = a->runs == 1;
        a->out = out;
        if (!a->last) {
            FAN_TRY(fan__cuda_scratch(s->stream, (size_t)(a->numbers * a->runs * size), &scratch[level], err));
            a->out = scratch[level];
        }
        FAN_TRY(fan__launch_threads(s, s->part->reduce[which], a->numbers * a->runs, a, err));
        if (a->last)
            return FAN_OK;
        reduce_deal_again(a, stay, size);
        a->in = scratch[level];
        if (FAN_FAULT(CUDA_EARLY_LANES)) {
            fan__cuda_scratch_free(s->stream, scratch[level]);
            scratch[level--] = 0;
        }
        which = fan__reduce_for((fan_dtype)a->acc);
    }
}

fan_status fan__cuda_reduce(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err)
{
    fan_k_reduce a;
    reduce_axes stay, go;
    uint64_t scratch[MOST_LEVELS] = {0};
    if (out->size == 0)
        return FAN_OK;
    if (in->size == 0)
        return fan__cuda_zero(s, out, err);
    memset(&a, 0, sizeof a);
    reduce_axes_of(&stay, &go, out, in);
    reduce_put_axes(&a, &stay, &go);
    a.out = fan__address_of(out);
    a.in = fan__address_of(in);
    a.parts = fan_dtype_kind(in->dtype) == 'c' ? 2 : 1;
    a.in_part = (int64_t)fan_dtype_size(in->dtype) / a.parts;
    a.out_part = (int64_t)fan_dtype_size(out->dtype) / a.parts;
    a.numbers = out->size * a.parts;
    a.terms = in->size / out->size;
    a.acc = (int32_t)(a.parts == 2 ? FAN_DT_FLOAT64 : fan_reduce_dtype(in->dtype));
    a.to = (int32_t)(a.parts == 1 ? out->dtype : out->dtype == FAN_DT_COMPLEX64 ? FAN_DT_FLOAT32 : FAN_DT_FLOAT64);
    a.anywhere = fan__is_anywhere(out) || fan__is_anywhere(in);
    a.across = stay.n && (!go.n || llabs(stay.in[stay.n - 1]) <= llabs(go.in[go.n - 1]));
    reduce_deal(&a);
    fan_status status = reduce_launches(s, &a, &stay, fan__reduce_for(in->dtype), scratch, err);
    for (int i = 0; i < MOST_LEVELS && scratch[i]; i++)
        fan__cuda_scratch_free(s->stream, scratch[i]);
    return status;
}
