/* Sums, and their statistics.
 *
 * Gap-free sources of one dtype, the first of which may be a running sum in the accumulation dtype, are one fold;
 * anything else is one launch of fan_any, whose arguments hold as many sources as fit; with more sources, a running sum
 * in the last accumulation dtype is the first source of the next launch. It is in the result itself if that has its
 * dtype and no later source overlaps it, else in scratch memory.
 *
 * The launch that sums also collects the statistics: each block writes a row after the result's figures, and a small
 * launch adds the rows up (array/device_stats.h). So there is no scratch memory to free, and no wait. If a sum takes
 * several launches, each checks its operands for non-finite elements; the figures of the last one are the result's. */
#include "device/cuda/sum.h"

#include "array/extents.h"
#include "base/fault.h"
#include "device/cuda/context.h"
#include "device/cuda/memory.h"

#include <string.h>

_Static_assert(sizeof(fan_device_stats) == 8 * FAN_STATS_WORDS &&
                   sizeof(fan_stats_partial) == 8 * FAN_STATS_PARTIAL_WORDS,
               "figures are words");

static uint64_t sum_rows_of(const fan_stats_out *g) { return fan__address_of(g->words) + sizeof(fan_device_stats); }

/* sum_stats_rows: adds up the rows of `size` elements. `from`: the operand that is the first source of this launch;
 * `more`: an earlier launch has measured the operands before it. */
static fan_status sum_stats_rows(const fan__launch_ctx *s, int64_t rows, int64_t size, size_t from, size_t n, bool more,
                                 fan_error *err)
{
    const fan_stats_out *g = s->stats_out;
    fan_k_stats_end a;
    memset(&a, 0, sizeof a - sizeof a.keys);
    a.rows = sum_rows_of(g);
    a.stats = fan__address_of(g->words);
    a.before = more ? a.stats : g->before ? fan__address_of(g->before) : 0;
    a.nrows = rows;
    a.count = size;
    if (n)
        memcpy(a.keys, g->keys + from, n * sizeof *a.keys);
    return fan__launch_blocks(s, s->part->fold_stats_end, 1, &a, err);
}

static fan_status sum_fold(const fan__launch_ctx *s, size_t which, const fan_array *out, const fan_operand *in,
                           size_t n, const fan_scale *scale, fan_error *err)
{
    fan_k_fold a;
    uint64_t low = 0;
    memset(&a, 0, sizeof a - sizeof a.in);
    a.parts = fan_dtype_kind(out->dtype) == 'c' ? 2 : 1;
    a.out = s->blind ? 0 : fan__address_of(out);
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
    a.flags = fan__fold_flags(which, out, in[0].array) | (aligned ? FAN_K_ALIGNED : 0);
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
    bool walked, anywhere;
} sum_source;

static void sum_put_strides(int64_t *words, const fan_nditer *w, const int64_t *strides, bool walked)
{
    for (int i = 0; i < w->ndim; i++)
        words[i] = walked ? strides[i] : strides[w->axis[i]];
}

/* sum_any_args: sets the arguments of fan_any and its like. */
static void sum_any_args(const fan_nditer *w, const sum_source *out, const sum_source *in, size_t n, const char *factor,
                         fan_k_any *args)
{
    fan_k_any a;
    memset(&a, 0, sizeof a);
    a.size = w->size;
    a.n = (int32_t)n;
    a.ndim = w->ndim;
    a.out = out->dtype;
    a.scaled = factor != NULL;
    if (factor)
        memcpy(a.factor, factor, sizeof a.factor);
    if (factor && n && in[n - 1].acc == FAN_DT_COMPLEX64) { /* its two parts are one word each */
        memcpy(&a.factor[1], factor + 4, 4);
        a.factor[0] &= UINT32_MAX;
    }
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
    }
    *args = a;
}

/* sum_any: launches fan_any. `begun`: how many operands earlier launches have summed into the first source. */
static fan_status sum_any(const fan__launch_ctx *s, const fan_nditer *w, const sum_source *out, const sum_source *in,
                          size_t n, size_t begun, const char *factor, fan_error *err)
{
    fan_k_any a;
    sum_any_args(w, out, in, n, factor, &a);
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

/* sum_keeps: returns whether a running sum of dtype acc may be in `out` while in[from..n) are still to be read. */
static bool sum_keeps(const fan_array *out, fan_dtype acc, const fan_operand *in, size_t from, size_t n)
{
    for (size_t k = from; k < n; k++)
        if (!fan_array_extents_disjoint(out, in[k].array))
            return false;
    return out->dtype == acc;
}

/* sum_scratch: allocates scratch memory for a running sum of dtype acc, in the order of the walk. */
static fan_status sum_scratch(const fan__launch_ctx *s, const fan_nditer *w, fan_dtype acc, int64_t *strides,
                              sum_source *out, fan_error *err)
{
    int64_t step = (int64_t)fan_dtype_size(acc);
    for (int i = w->ndim - 1; i >= 0; i--) {
        strides[i] = step;
        step *= w->extent[i];
    }
    *out = (sum_source){.dtype = acc, .strides = strides, .walked = true};
    return fan__cuda_scratch(s->stream, (size_t)step, &out->address, err);
}

static fan_status sum_in_groups(const fan__launch_ctx *s, const fan_nditer *w, const fan_array *out,
                                const fan_operand *in, size_t n, const fan_scale *scale, fan_error *err)
{
    sum_source here[FAN_K_WORDS / 2], running = {.address = 0}, target;
    sum_source to = sum_source_of(out, FAN_DT_NONE);
    uint64_t held = 0, next; /* scratch memory of the running sum */
    int64_t strides[2][FAN_MAX_NDIM];
    char factor[16] = {0};
    fan_status status = FAN_OK;
    size_t room = (size_t)((FAN_K_WORDS - 1 - 2 * w->ndim) / (2 + w->ndim)), k = 0;
    bool scaled = scale && scale->on;
    if (scaled)
        fan_scale_as(scale, in[n - 1].acc, factor);
    if (s->blind)
        to.address = 0;
    do {
        size_t m = 0, begun = k;
        if (k > 0)
            here[m++] = running;
        for (; m < room && k < n; m++, k++)
            here[m] = sum_source_of(in[k].array, in[k].acc);
        target = to;
        next = 0;
        if (k < n && !sum_keeps(out, in[k - 1].acc, in, k, n)) {
            FAN_GO(sum_scratch(s, w, in[k - 1].acc, strides[running.strides == strides[0]], &target, err));
            next = target.address;
        }
        status = sum_any(s, w, &target, here, m, begun, k == n && scaled ? factor : NULL, err);
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

fan_status fan__cuda_sum(const fan__launch_ctx *s, const fan_array *out, const fan_operand *in, size_t n,
                         const fan_scale *scale, fan_error *err)
{
    fan_nditer w;
    if (out->size == 0)
        return s->stats_out ? sum_stats_rows(s, 0, 0, 0, 0, false, err) : FAN_OK;
    fan_nditer_begin(&w, out, false);
    for (size_t k = 0; k < n; k++)
        fan_nditer_also(&w, in[k].array);
    fan_nditer_ready(&w);
    size_t which = fan__fold_for(out, in, n, scale && scale->on, &w);
    if (which == FAN__FOLDS || (s->stats_out && (fan__fold_flags(which, out, in[0].array) & FAN_K_OUT_WIDE)))
        return sum_in_groups(s, &w, out, in, n, scale, err);
    return sum_fold(s, which, out, in, n, scale, err);
}

fan_status fan__cuda_copy(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err)
{
    return fan__cuda_sum(s, out, &(fan_operand){.array = in, .acc = out->dtype}, 1, NULL, err);
}

/* sum_find_first_nonfinite: if the sum has an inf or a NaN, and its contribution was not found yet: checks whether it
 * was `of`. */
static fan_status sum_find_first_nonfinite(const fan__launch_ctx *s, const fan_array *of, int64_t key, fan_error *err)
{
    fan_k_any a;
    fan_nditer w;
    char kind = fan_dtype_kind(of->dtype);
    if (of->size == 0 || (kind != 'f' && kind != 'c'))
        return FAN_OK;
    fan_nditer_begin(&w, of, false);
    fan_nditer_ready(&w);
    sum_source in = sum_source_of(of, of->dtype), nowhere = {.dtype = of->dtype, .strides = of->strides};
    sum_any_args(&w, &nowhere, &in, 1, NULL, &a);
    a.rows = fan__address_of(s->stats_out->words);
    memcpy(&a.factor[0], &key, sizeof key);
    return fan__launch_threads(s, s->part->nonfinite, w.size, &a, err);
}

fan_status fan__cuda_measure(fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    const fan_array *of = job->in[0].array;
    s->blind = true;
    FAN_TRY(fan__cuda_sum(s, of, &(fan_operand){.array = of, .acc = fan_dtype_accumulate(of->dtype)}, 1, NULL, err));
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
    return fan__cuda_check(
        s->part,
        fan__cuda_api_of(s->part)->MemsetD8Async(fan__address_of(out) + (uint64_t)lo, 0, (size_t)(hi - lo), s->on),
        "cuMemsetD8Async", err);
}
