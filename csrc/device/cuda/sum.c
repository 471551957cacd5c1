/* Sums, and their statistics.
 *
 * Gap-free sources of one dtype, the first of which may be a running sum in the accumulation dtype,
 * are one fold; anything else is one launch of fan_any, whose arguments hold as many sources as
 * fit; with more sources, a running sum in the last accumulation dtype is the first source of the
 * next launch. It is in the result itself if that has its dtype and no later source overlaps it,
 * else in scratch memory.
 *
 * The launch that sums also collects the statistics: each block writes a row after the result's
 * figures, and a small launch adds the rows up (array/device_stats.h). So there is no scratch
 * memory to free, and no wait. If a sum takes several launches, each checks its operands for
 * non-finite elements; the figures of the last one are the result's. */

#include "array/extents.h"
#include "array/nditer.h"
#include "array/sum.h"
#include "base/fault.h"
#include "base/mem.h"
#include "device/cuda/part.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(fan_device_stats) == 8 * FAN_STATS_WORDS &&
                   sizeof(fan_stats_partial) == 8 * FAN_STATS_PARTIAL_WORDS,
               "figures are words");

static uint64_t sum_rows_of(const fan_stats_out *g)
{
    return fan__address_of(g->words) + sizeof(fan_device_stats);
}

/* sum_stats_rows: adds up the rows of `size` elements. `from`: the operand that is the first source
 * of this launch; `more`: an earlier launch has measured the operands before it. */
static fan_status sum_stats_rows(const fan__launch_ctx *s, int64_t rows, int64_t size, size_t from,
                                 size_t n, bool more, fan_error *err)
{
    const fan_stats_out *g = s->stats_out;
    fan_k_stats_end a;
    memset(&a, 0, sizeof a - sizeof a.keys);
    a.rows = sum_rows_of(g);
    a.stats = fan__address_of(g->words);
    a.before = 0;
    if (more)
        a.before = a.stats;
    else if (g->before)
        a.before = fan__address_of(g->before);
    a.nrows = rows;
    a.count = size;
    if (n)
        memcpy(a.keys, g->keys + from, n * sizeof *a.keys);
    return fan__launch_blocks(s, s->part->fold_stats_end, 1, &a, err);
}

static fan_status sum_fold(const fan__launch_ctx *s, size_t which, const fan_array *out,
                           const fan_operand *in, size_t n, const fan_scale *scale, fan_error *err)
{
    fan_k_fold a;
    uint64_t low = 0;
    memset(&a, 0, sizeof a - sizeof a.in);
    a.parts = fan__parts_of(out->dtype);
    if (!s->blind)
        a.out = fan__address_of(out);
    a.count = out->size * a.parts;
    a.n = (int32_t)n;
    a.scaled = scale && scale->on;
    if (a.scaled) {
        char factor[16] = {0};
        fan_scale_as(scale, in[0].acc, factor);
        memcpy(&a.factor, factor, sizeof a.factor);
    }
    for (size_t k = 0; k < n; k++) {
        a.in[k] = fan__address_of(in[k].array);
        low |= a.in[k];
    }
    bool aligned = ((low | a.out) & 15) == 0 || FAN_FAULT(CUDA_ALWAYS_WIDE);
    a.flags = fan__fold_flags(which, out, in[0].array);
    if (aligned)
        a.flags |= FAN_K_ALIGNED;
    if (s->stats_out) {
        int64_t rows = fan_stats_partials(out->size);
        a.rows = sum_rows_of(s->stats_out);
        a.negative = fan_dtype_kind(out->dtype) == 'i';
        a.first_suspect = (int32_t)s->first_suspect;
        FAN_TRY(fan__launch_blocks(s, s->part->fold_stats[which], rows, &a, err));
        return sum_stats_rows(s, rows, out->size, 0, n, false, err);
    }
    int64_t per = 16 / fan__folds[which].bytes;
    return fan__launch_threads(s, s->part->folds[which], (a.count + per - 1) / per, &a, err);
}

/* A source of fan_any. */
typedef struct sum_source {
    uint64_t address;
    fan_dtype dtype, acc;
    const int64_t *strides; /* for the walk's axes if `walked`, else for those of an array */
    fan_weight weight;
    bool walked, anywhere;
} sum_source;

/* What a launch does to its sum: the elements of the factor, and the divisor; NULL: there is none.
 */
typedef struct sum_end {
    const char *factor, *divisor;
} sum_end;

static void sum_put_strides(int64_t *words, const fan_nditer *w, const int64_t *strides,
                            bool walked)
{
    for (int i = 0; i < w->ndim; i++)
        words[i] = walked ? strides[i] : strides[w->axis[i]];
}

/* sum_any_args: sets the arguments of fan_any and its like. */
static void sum_any_args(const fan_nditer *w, const sum_source *out, const sum_source *in, size_t n,
                         sum_end end, fan_k_any *args)
{
    const char *factor = end.factor;
    fan_k_any a;
    memset(&a, 0, sizeof a);
    a.size = w->size;
    a.n = (int32_t)n;
    a.ndim = w->ndim;
    a.out = (int32_t)out->dtype;
    a.scaled = factor != NULL;
    if (factor)
        memcpy(a.factor, factor, sizeof a.factor);
    if (factor && n && in[n - 1].acc == FAN_DT_COMPLEX64) { /* its two parts are one word each */
        memcpy(&a.factor[1], factor + 4, 4);
        a.factor[0] &= UINT32_MAX;
    }
    a.divided = end.divisor != NULL;
    if (end.divisor)
        memcpy(&a.divisor, end.divisor, sizeof a.divisor);
    a.anywhere = out->anywhere;
    int64_t *at = a.words;
    memcpy(at, w->extent, (size_t)w->ndim * sizeof *at);
    at += w->ndim;
    *at++ = (int64_t)out->address;
    sum_put_strides(at, w, out->strides, out->walked);
    at += w->ndim;
    for (size_t k = 0; k < n; k++, at += w->ndim) {
        *at++ = (int64_t)in[k].address;
        *at++ = (int64_t)in[k].dtype | (int64_t)in[k].acc << 8;
        sum_put_strides(at, w, in[k].strides, in[k].walked);
        a.anywhere |= in[k].anywhere;
        a.weighted |= in[k].weight.on;
    }
    for (size_t k = 0; a.weighted && k < n; k++) {
        double weight[2] = {1, 0};
        if (in[k].weight.on) {
            weight[0] = in[k].weight.re;
            weight[1] = in[k].weight.im;
        }
        memcpy(at, weight, sizeof weight);
        at += 2;
    }
    *args = a;
}

/* sum_any: launches fan_any. `begun`: how many operands earlier launches have summed into the first
 * source. */
static fan_status sum_any(const fan__launch_ctx *s, const fan_nditer *w, const sum_source *out,
                          const sum_source *in, size_t n, size_t begun, sum_end end, fan_error *err)
{
    fan_k_any a;
    sum_any_args(w, out, in, n, end, &a);
    if (!s->stats_out)
        return fan__launch_threads(s, s->part->any, w->size, &a, err);
    int64_t rows = fan_stats_partials(w->size);
    a.rows = sum_rows_of(s->stats_out);
    a.first_suspect = begun ? 1 : (int32_t)s->first_suspect;
    FAN_TRY(fan__launch_blocks(s, s->part->fold_stats_any, rows, &a, err));
    return sum_stats_rows(s, rows, w->size, begun ? begun - 1 : 0, n, begun > 0, err);
}

static sum_source sum_source_of(const fan_array *a, fan_dtype acc)
{
    return (sum_source){.address = fan__address_of(a),
                        .dtype = a->dtype,
                        .acc = acc,
                        .strides = a->strides,
                        .anywhere = fan__is_anywhere(a)};
}

/* sum_keeps: returns whether a running sum of dtype acc may be in `out` while in[from..n) are still
 * to be read. */
static bool sum_keeps(const fan_array *out, fan_dtype acc, const fan_operand *in, size_t from,
                      size_t n)
{
    for (size_t k = from; k < n; k++) {
        if (!fan_array_extents_disjoint(out, in[k].array))
            return false;
    }
    return out->dtype == acc;
}

static fan_status sum_in_groups(const fan__launch_ctx *s, const fan_nditer *w, const fan_array *out,
                                const fan_operand *in, size_t n, const fan_scale *scale,
                                fan_error *err)
{
    sum_source here[FAN_K_WORDS / 2], running = {.address = 0}, target;
    sum_source to = sum_source_of(out, FAN_DT_NONE);
    uint64_t held = 0, next; /* scratch memory of the running sum */
    int64_t strides[2][FAN_MAX_NDIM];
    char factor[16] = {0};
    fan_status status = FAN_OK;
    char divisor[8] = {0};
    sum_end last = {NULL, NULL};
    sum_end none = {NULL, NULL};
    bool weighted = false;
    for (size_t i = 0; i < n; i++)
        weighted |= in[i].weight.on;
    size_t room = (size_t)((FAN_K_WORDS - 1 - 2 * w->ndim) / (2 + w->ndim + 2 * weighted));
    size_t k = 0;
    if (scale && scale->on) {
        fan_scale_as(scale, in[n - 1].acc, factor);
        last.factor = factor;
    }
    if (scale && scale->divisor) {
        fan_divisor_as(scale->divisor, in[n - 1].acc, divisor);
        last.divisor = divisor;
    }
    if (s->blind)
        to.address = 0;
    do {
        size_t m = 0;
        size_t begun = k;
        if (k > 0)
            here[m++] = running;
        for (; m < room && k < n; m++, k++) {
            here[m] = sum_source_of(in[k].array, in[k].acc);
            here[m].weight = in[k].weight;
        }
        target = to;
        next = 0;
        if (k < n && !sum_keeps(out, in[k - 1].acc, in, k, n)) {
            fan_dtype acc = in[k - 1].acc;
            int64_t *packed = strides[running.strides == strides[0]]; /* in the order of the walk */
            int64_t step = (int64_t)fan_dtype_size(acc);
            for (int i = w->ndim - 1; i >= 0; i--) {
                packed[i] = step;
                step *= w->extent[i];
            }
            target = (sum_source){.dtype = acc, .strides = packed, .walked = true};
            FAN_GO(fan__cuda_scratch(s->stream, (size_t)step, &target.address, err));
            next = target.address;
        }
        status = sum_any(s, w, &target, here, m, begun, k == n ? last : none, err);
        if (held)
            fan__cuda_scratch_free(s->stream, held);
        held = next;
        running = target;
        running.acc = running.dtype;
    } while (status == FAN_OK && k < n);
done:
    if (held)
        fan__cuda_scratch_free(s->stream, held);
    return status;
}

fan_status fan__cuda_sum(const fan__launch_ctx *s, const fan_array *out, const fan_operand *in,
                         size_t n, const fan_scale *scale, fan_error *err)
{
    fan_nditer w;
    if (out->size == 0) {
        if (!s->stats_out)
            return FAN_OK;
        return sum_stats_rows(s, 0, 0, 0, 0, false, err);
    }
    fan_nditer_begin(&w, out, false);
    for (size_t k = 0; k < n; k++)
        fan_nditer_also(&w, in[k].array);
    fan_nditer_ready(&w);
    size_t which = fan__fold_for(out, in, n, scale && scale->on, &w);
    if (which == FAN__FOLDS || (scale && scale->divisor))
        return sum_in_groups(s, &w, out, in, n, scale, err);
    if (s->stats_out && (fan__fold_flags(which, out, in[0].array) & FAN_K_OUT_WIDE))
        return sum_in_groups(s, &w, out, in, n, scale, err);
    return sum_fold(s, which, out, in, n, scale, err);
}

fan_status fan__cuda_copy(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                          fan_error *err)
{
    return fan__cuda_sum(s, out, &(fan_operand){.array = in, .acc = out->dtype}, 1, NULL, err);
}

/* sum_find_first_nonfinite: if the sum has an inf or a NaN, and its contribution was not found yet:
 * checks whether it was `of`. */
static fan_status sum_find_first_nonfinite(const fan__launch_ctx *s, const fan_array *of,
                                           int64_t key, fan_error *err)
{
    fan_k_any a;
    fan_nditer w;
    char kind = fan_dtype_kind(of->dtype);
    if (of->size == 0 || (kind != 'f' && kind != 'c'))
        return FAN_OK;
    fan_nditer_begin(&w, of, false);
    fan_nditer_ready(&w);
    sum_source in = sum_source_of(of, of->dtype);
    sum_source nowhere = {.dtype = of->dtype, .strides = of->strides};
    sum_any_args(&w, &nowhere, &in, 1, (sum_end){NULL, NULL}, &a);
    a.rows = fan__address_of(s->stats_out->words);
    memcpy(&a.factor[0], &key, sizeof key);
    return fan__launch_threads(s, s->part->nonfinite, w.size, &a, err);
}

fan_status fan__cuda_measure(fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    const fan_array *of = job->in[0].array;
    s->blind = true;
    FAN_TRY(fan__cuda_sum(
        s, of, &(fan_operand){.array = of, .acc = fan_dtype_accumulate(of->dtype)}, 1, NULL, err));
    for (size_t k = 1; k < job->n; k++)
        FAN_TRY(sum_find_first_nonfinite(s, job->in[k].array, job->stats_out->keys[k], err));
    return FAN_OK;
}

fan_status fan__cuda_zero(const fan__launch_ctx *s, const fan_array *out, fan_error *err)
{
    int64_t lo, hi;
    if (out->size == 0)
        return FAN_OK;
    if (!fan_array_dense(out))
        return fan__cuda_sum(s, out, NULL, 0, NULL, err);
    fan_array_reach(out, &lo, &hi);
    return fan__cuda_check(s->part,
                           fan__cuda_api_of(s->part)->MemsetD8Async(
                               fan__address_of(out) + (uint64_t)lo, 0, (size_t)(hi - lo), s->on),
                           "cuMemsetD8Async", err);
}

/* Sums over axes.
 *
 * The order of the terms is D7's: it depends on the shape alone, so the results are bitwise those
 * of the CPU. One launch makes all lanes of all groups; or all groups, if the result has enough
 * elements to keep the GPU busy, so that lanes need no memory. Then each launch sums runs of the
 * previous one's results, until one number per element is left. Intermediate results are at most
 * 1/256 of the input, and neighbouring threads read neighbouring ones. */
/* 8192 * 256^7 is more than 2^63, and one launch for the lanes */
#define MOST_LEVELS 10
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

static void reduce_put_axes(fan_k_reduce *a, const reduce_axes *stay, const reduce_axes *go)
{
    size_t some = (size_t)stay->n * sizeof *a->words;
    size_t gone = (size_t)go->n * sizeof *a->words;
    int64_t *at = a->words;
    a->stay = stay->n;
    a->go = go->n;
    memcpy(at, stay->extent, some);
    at += stay->n;
    memcpy(at, stay->out, some);
    at += stay->n;
    memcpy(at, stay->in, some);
    at += stay->n;
    memcpy(at, go->extent, gone);
    memcpy(at + go->n, go->in, gone);
}

static fan_status reduce_launches(const fan__launch_ctx *s, fan_k_reduce *a, reduce_axes *stay,
                                  size_t which, uint64_t *scratch, fan_error *err)
{
    uint64_t out = a->out;
    int64_t size = (int64_t)fan_dtype_size((fan_dtype)a->acc);
    for (int level = 0;; level++) {
        a->last = a->runs == 1;
        a->out = out;
        if (!a->last) {
            FAN_TRY(fan__cuda_scratch(s->stream, (size_t)(a->numbers * a->runs * size),
                                      &scratch[level], err));
            a->out = scratch[level];
        }
        FAN_TRY(fan__launch_threads(s, s->part->reduce[which], a->numbers * a->runs, a, err));
        if (a->last)
            return FAN_OK;
        bool lanes = a->lanes && !a->whole;
        reduce_axes left = {
            .n = a->runs > 1, .extent = {a->runs}, .in = {a->across ? a->numbers * size : size}};
        a->in_part = a->across ? size : a->runs * size;
        int64_t step = a->in_part * a->parts;
        for (int i = stay->n - 1; i >= 0; i--) {
            stay->in[i] = step;
            step *= stay->extent[i];
        }
        reduce_put_axes(a, stay, &left);
        a->terms = a->runs;
        a->group = lanes ? 1 << FAN_K_LANES : FAN_K_RUN;
        a->lanes = 0;
        a->whole = 0;
        a->runs = (a->terms - 1) / a->group + 1;
        a->again = true;
        a->in = scratch[level];
        if (FAN_FAULT(CUDA_EARLY_LANES)) {
            fan__cuda_scratch_free(s->stream, scratch[level]);
            scratch[level--] = 0;
        }
        which = fan__reduce_for((fan_dtype)a->acc);
    }
}

static fan_status reduce_as_it_is(const fan__launch_ctx *s, const fan_array *out,
                                  const fan_array *in, fan_error *err)
{
    fan_k_reduce a;
    reduce_axes stay, go;
    uint64_t scratch[MOST_LEVELS] = {0};
    if (out->size == 0)
        return FAN_OK;
    if (in->size == 0)
        return fan__cuda_zero(s, out, err);
    memset(&a, 0, sizeof a);
    int lead = in->ndim - out->ndim;
    stay.n = 0;
    go.n = 0;
    for (int i = 0; i < in->ndim; i++) {
        int64_t extent = in->shape[i];
        if (extent == 1)
            continue;
        if (i >= lead && out->shape[i - lead] == extent)
            reduce_add_axis(&stay, extent, out->strides[i - lead], in->strides[i]);
        else
            reduce_add_axis(&go, extent, 0, in->strides[i]);
    }
    reduce_put_axes(&a, &stay, &go);
    a.out = fan__address_of(out);
    a.in = fan__address_of(in);
    a.parts = fan__parts_of(in->dtype);
    a.in_part = (int64_t)fan_dtype_size(in->dtype) / a.parts;
    a.out_part = (int64_t)fan_dtype_size(out->dtype) / a.parts;
    a.numbers = out->size * a.parts;
    a.terms = in->size / out->size;
    fan_dtype acc = FAN_DT_FLOAT64;
    fan_dtype to = FAN_DT_FLOAT64; /* of one part */
    if (a.parts == 1) {
        acc = fan_reduce_dtype(in->dtype);
        to = out->dtype;
    } else if (out->dtype == FAN_DT_COMPLEX64) {
        to = FAN_DT_FLOAT32;
    }
    a.acc = (int32_t)acc;
    a.to = (int32_t)to;
    a.anywhere = fan__is_anywhere(out) || fan__is_anywhere(in);
    a.across = stay.n > 0;
    if (stay.n && go.n) {
        int64_t stay_step = llabs(stay.in[stay.n - 1]);
        int64_t go_step = llabs(go.in[go.n - 1]);
        a.across = stay_step <= go_step;
    }
    int64_t groups = (a.terms - 1) / FAN_K_GROUP + 1;
    int64_t over = a.terms - (groups - 1) * FAN_K_GROUP;
    a.group = FAN_K_GROUP;
    a.runs = 1;
    if (a.terms > FAN_K_RUN) {
        a.lanes = FAN_K_LANES;
        a.whole = a.numbers >= THREADS_WANTED / groups;
        a.runs = groups;
        if (!a.whole) {
            int64_t last = over >> FAN_K_LANES ? 1 << FAN_K_LANES : over;
            a.runs = ((groups - 1) << FAN_K_LANES) + last;
        }
    }
    fan_status status = reduce_launches(s, &a, &stay, fan__reduce_for(in->dtype), scratch, err);
    for (int i = 0; i < MOST_LEVELS && scratch[i]; i++)
        fan__cuda_scratch_free(s->stream, scratch[i]);
    return status;
}

/* copy_packed: makes memory for `like` in a dtype without gaps, in scratch memory of the stream;
 * its dims are in room[2 * FAN_MAX_NDIM]. */
static fan_status copy_packed(const fan__launch_ctx *s, const fan_array *like, fan_dtype dtype,
                              fan_array *out, int64_t *room, fan_error *err)
{
    uint64_t at = 0;
    FAN_TRY(fan__cuda_scratch(s->stream, (size_t)like->size * fan_dtype_size(dtype), &at, err));
    memcpy(room, like->shape, (size_t)like->ndim * sizeof *room);
    fan_dense_strides(like->ndim, like->shape, fan_dtype_size(dtype), NULL, room + FAN_MAX_NDIM);
    *out = (fan_array){.data = (char *)(uintptr_t)at,
                       .dtype = dtype,
                       .ndim = like->ndim,
                       .size = like->size,
                       .shape = room,
                       .strides = room + FAN_MAX_NDIM,
                       .writable = true};
    return FAN_OK;
}

fan_status fan__cuda_reduce(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                            fan_dtype dtype, fan_error *err)
{
    if (dtype == in->dtype || out->size == 0 || in->size == 0)
        return reduce_as_it_is(s, out, in, err);
    /* The kernels read one dtype: the elements are rounded in scratch memory first, along an
     * expanded axis once. */
    fan_array base = *in;
    fan_array rounded;
    int64_t shape[FAN_MAX_NDIM], room[2 * FAN_MAX_NDIM];
    uint64_t expanded = fan_array_expanded(in);
    base.shape = shape;
    for (int i = 0; i < in->ndim; i++) {
        shape[i] = in->shape[i];
        if (expanded >> i & 1u) {
            shape[i] = 1;
            base.size /= in->shape[i];
        }
    }
    FAN_TRY(copy_packed(s, &base, dtype, &rounded, room, err));
    fan__launch_ctx quiet = *s; /* it does not change the result */
    quiet.begun = NULL;
    fan_status status = fan__cuda_copy(&quiet, &rounded, &base, err);
    for (int i = 0; i < in->ndim; i++) {
        if (expanded >> i & 1u)
            rounded.strides[i] = 0;
    }
    rounded.shape = in->shape;
    rounded.size = in->size;
    if (status == FAN_OK)
        status = reduce_as_it_is(s, out, &rounded, err);
    fan__cuda_scratch_free(s->stream, fan__address_of(&rounded));
    return status;
}

/* copy_bytes: copies between the device and host memory that is not pinned, which may be reused on
 * return. Blocks for a download, or if the device itself reads such memory. */
static fan_status copy_bytes(const fan__launch_ctx *s, uint64_t device, char *host, size_t bytes,
                             bool upload, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(s->part);
    const char *call = "cuMemcpyDtoHAsync";
    fan_cu_result code;
    int mode = fan__cuda_relax(s->part);
    if (upload) {
        call = "cuMemcpyHtoDAsync";
        code = api->MemcpyHtoDAsync(device, host, bytes, s->on);
    } else
        code = api->MemcpyDtoHAsync(host, device, bytes, s->on);
    fan__cuda_restore(s->part, mode);
    FAN_TRY(fan__cuda_check(s->part, code, call, err));
    if (upload && (!s->part->reads_host || FAN_FAULT(CUDA_EARLY_HOST)))
        return FAN_OK;
    return fan__cuda_pass(s->part, s->on, err);
}

/* copy_across: copies between arrays of the device and of the host. An array with gaps is copied
 * through scratch memory without any; the host's through a copy with the device's strides. */
static fan_status copy_across(const fan__launch_ctx *s, const fan_array *device,
                              const fan_array *host, bool upload, fan_error *err)
{
    fan_status status = FAN_OK;
    int64_t lo;
    int64_t hi;
    if (device->size == 0)
        return FAN_OK;
    if (!fan_array_dense(device)) {
        fan_array packed;
        int64_t room[2 * FAN_MAX_NDIM];
        FAN_TRY(copy_packed(s, device, device->dtype, &packed, room, err));
        if (!upload)
            status = fan__cuda_copy(s, &packed, device, err);
        if (status == FAN_OK)
            status = copy_across(s, &packed, host, upload, err);
        if (upload && status == FAN_OK)
            status = fan__cuda_copy(s, device, &packed, err);
        fan__cuda_scratch_free(s->stream, fan__address_of(&packed));
        return status;
    }
    fan_array_reach(device, &lo, &hi);
    size_t bytes = (size_t)(hi - lo);
    char *memory = fan_alloc_data(bytes);
    if (!memory)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s beside a device", bytes,
                        FAN_PLURAL(bytes));
    fan_array near = {.data = memory - lo,
                      .dtype = device->dtype,
                      .ndim = device->ndim,
                      .size = device->size,
                      .shape = device->shape,
                      .strides = device->strides,
                      .writable = true};
    if (upload)
        fan_array_copy(&near, host);
    status = copy_bytes(s, fan__address_of(device) + (uint64_t)lo, memory, bytes, upload, err);
    if (status == FAN_OK && !upload)
        fan_array_copy(host, &near);
    fan_free_data(memory, bytes);
    return status;
}

fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                            fan_error *err)
{
    return copy_across(s, out, in, true, err);
}

fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src,
                              fan_error *err)
{
    return copy_across(s, src, dst, false, err);
}

fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *sum_ = NULL;
    fan_array **made = fan_calloc(job->n * sizeof *made);
    fan_operand *in = fan_calloc(job->n * sizeof *in);
    if (!made || !in) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for an exact sum");
        goto done;
    }
    for (size_t k = 0; k < job->n; k++) {
        const fan_array *a = job->in[k].array;
        FAN_GO(fan_array_new(a->dtype, a->ndim, a->shape, a, &made[k], err));
        FAN_GO(fan__cuda_download(s, made[k], a, err));
        in[k] = (fan_operand){.array = made[k], .acc = job->in[k].acc, .weight = job->in[k].weight};
    }
    FAN_GO(fan_array_new(job->out->dtype, job->out->ndim, job->out->shape, job->out, &sum_, err));
    fan_job_run(
        &(fan_job){.kind = FAN_JOB_EXACT, .out = sum_, .in = in, .n = job->n, .scale = job->scale},
        true);
    status = fan__cuda_upload(s, job->out, sum_, err);
done:
    for (size_t k = 0; made && k < job->n; k++)
        fan_array_drop(made[k]);
    fan_array_drop(sum_);
    fan_free(made);
    fan_free(in);
    return status;
}
