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

static uint64_t sum_rows_of(const fan_stats_out *out)
{
    return fan__address_of(out->words) + sizeof(fan_device_stats);
}

/* The statistics that a launch has measured. */
typedef struct sum_measured {
    int64_t rows;   /* that it wrote */
    int64_t size;   /* elements */
    size_t sources; /* 0: none */
    size_t first;   /* the operand that is the first source */
    bool more;      /* an earlier launch has measured the operands before it */
} sum_measured;

/* sum_add_rows: adds up the rows of a launch. */
static fan_status sum_add_rows(const fan__launch_ctx *s, const fan_stats_out *out,
                               const sum_measured *launch, fan_error *err)
{
    fan_k_stats_end a;
    memset(&a, 0, sizeof a - sizeof a.keys);
    a.rows = sum_rows_of(out);
    a.stats = fan__address_of(out->words);
    if (launch->more)
        a.before = a.stats;
    else if (out->before)
        a.before = fan__address_of(out->before);
    a.nrows = launch->rows;
    a.count = launch->size;
    if (launch->sources)
        memcpy(a.keys, out->keys + launch->first, launch->sources * sizeof *a.keys);
    return fan__launch_blocks(s, s->part->fold_stats_end, 1, &a, err);
}

/* sum_fold_args: sets the arguments of the fold `which`; `a->out` stays 0 if no sum is written. */
static void sum_fold_args(const fan__launch_ctx *s, size_t which, const fan_job *job, fan_k_fold *a)
{
    const fan_operand *in = job->in;
    memset(a, 0, sizeof *a - sizeof a->in);
    a->parts = fan__parts_of(job->out->dtype);
    if (!s->blind)
        a->out = fan__address_of(job->out);
    a->count = job->out->size * a->parts;
    a->n = (int32_t)job->n;
    a->scaled = job->scale && job->scale->on;
    if (a->scaled) {
        char factor[16] = {0};
        fan_scale_as(job->scale, in->acc, factor);
        memcpy(&a->factor, factor, sizeof a->factor);
    }
    uint64_t low = a->out;
    for (size_t k = 0; k < job->n; k++) {
        a->in[k] = fan__address_of(in[k].array);
        low |= a->in[k];
    }
    a->flags = fan__fold_flags(which, job->out, in->array);
    if ((low & 15) == 0 || FAN_FAULT(CUDA_ALWAYS_WIDE))
        a->flags |= FAN_K_ALIGNED;
}

static fan_status sum_fold(const fan__launch_ctx *s, size_t which, const fan_job *job,
                           fan_error *err)
{
    fan_k_fold a;
    sum_fold_args(s, which, job, &a);
    if (!job->stats_out) {
        int64_t per_thread = 16 / fan__folds[which].bytes;
        int64_t threads = (a.count + per_thread - 1) / per_thread;
        return fan__launch_threads(s, s->part->folds[which], threads, &a, err);
    }
    sum_measured launch = {
        .rows = fan_stats_partials(job->out->size),
        .size = job->out->size,
        .sources = job->n,
    };
    a.rows = sum_rows_of(job->stats_out);
    a.negative = fan_dtype_kind(job->out->dtype) == 'i';
    a.first_suspect = (int32_t)job->first_suspect;
    FAN_TRY(fan__launch_blocks(s, s->part->fold_stats[which], launch.rows, &a, err));
    return sum_add_rows(s, job->stats_out, &launch, err);
}

/* A source of fan_any. */
typedef struct sum_source {
    uint64_t address;
    fan_dtype dtype;
    fan_dtype acc;
    const int64_t *strides; /* for the walk's axes if `walked`, else for those of an array */
    fan_weight weight;
    bool walked;
    bool anywhere;
} sum_source;

/* A launch of fan_any or its like. */
typedef struct sum_launch {
    const fan_nditer *walk;
    const sum_source *out;
    const sum_source *in;
    size_t n;
    const char *factor;  /* the elements that multiply the sum; NULL: there are none */
    const char *divisor; /* what divides it first; NULL: there is none */
} sum_launch;

static int64_t *sum_put_strides(int64_t *words, const fan_nditer *walk, const sum_source *source)
{
    for (int i = 0; i < walk->ndim; i++) {
        int axis = i;
        if (!source->walked)
            axis = walk->axis[i];
        words[i] = source->strides[axis];
    }
    return words + walk->ndim;
}

static void sum_put_weights(int64_t *words, const sum_launch *launch)
{
    for (size_t k = 0; k < launch->n; k++) {
        const fan_weight *given = &launch->in[k].weight;
        double weight[2] = {1, 0};
        if (given->on) {
            weight[0] = given->re;
            weight[1] = given->im;
        }
        memcpy(words, weight, sizeof weight);
        words += 2;
    }
}

/* sum_put_words: writes the words of a launch: of the walk, of the result, of each source. */
static void sum_put_words(fan_k_any *a, const sum_launch *launch)
{
    const fan_nditer *walk = launch->walk;
    int64_t *at = fan__put_words(a->words, walk->extent, walk->ndim);
    *at++ = (int64_t)launch->out->address;
    at = sum_put_strides(at, walk, launch->out);
    for (size_t k = 0; k < launch->n; k++) {
        const sum_source *source = &launch->in[k];
        *at++ = (int64_t)source->address;
        *at++ = (int64_t)source->dtype | (int64_t)source->acc << 8;
        at = sum_put_strides(at, walk, source);
        a->anywhere |= source->anywhere;
        a->weighted |= source->weight.on;
    }
    if (a->weighted)
        sum_put_weights(at, launch);
}

/* sum_any_args: sets the arguments of fan_any and its like. */
static void sum_any_args(const sum_launch *launch, fan_k_any *a)
{
    const char *factor = launch->factor;
    size_t n = launch->n;
    memset(a, 0, sizeof *a);
    a->size = launch->walk->size;
    a->n = (int32_t)n;
    a->ndim = launch->walk->ndim;
    a->out = (int32_t)launch->out->dtype;
    a->scaled = factor != NULL;
    if (factor)
        memcpy(a->factor, factor, sizeof a->factor);
    if (factor && n && launch->in[n - 1].acc == FAN_DT_COMPLEX64) { /* its parts: a word each */
        memcpy(&a->factor[1], factor + 4, 4);
        a->factor[0] &= UINT32_MAX;
    }
    a->divided = launch->divisor != NULL;
    if (a->divided)
        memcpy(&a->divisor, launch->divisor, sizeof a->divisor);
    a->anywhere = launch->out->anywhere;
    sum_put_words(a, launch);
}

static sum_source sum_source_of(const fan_array *a, fan_dtype acc)
{
    return (sum_source){
        .address = fan__address_of(a),
        .dtype = a->dtype,
        .acc = acc,
        .strides = a->strides,
        .anywhere = fan__is_anywhere(a),
    };
}

/* A sum by fan_any, in one launch or several. */
typedef struct sum_series {
    const fan_job *job;
    size_t room;        /* sources of a launch */
    size_t done;        /* operands that were sources so far */
    sum_source running; /* their sum, once there was a launch */
    uint64_t scratch;   /* its memory; 0: none */
    sum_source sources[FAN_K_WORDS / 2];
    int64_t strides[2][FAN_MAX_NDIM]; /* of this running sum and of the next one */
} sum_series;

/* sum_room: returns how many sources the arguments of a launch hold. */
static size_t sum_room(const fan_job *job, const fan_nditer *walk)
{
    bool weighted = false;
    for (size_t i = 0; i < job->n; i++)
        weighted |= job->in[i].weight.on;
    int words = FAN_K_WORDS - 1 - 2 * walk->ndim;
    int per_source = 2 + walk->ndim + 2 * weighted;
    return (size_t)(words / per_source);
}

/* sum_next_sources: sets the sources of the next launch; returns their number. */
static size_t sum_next_sources(sum_series *series)
{
    size_t n = 0;
    if (series->done > 0)
        series->sources[n++] = series->running;
    while (n < series->room && series->done < series->job->n) {
        const fan_operand *operand = &series->job->in[series->done++];
        sum_source *source = &series->sources[n++];
        *source = sum_source_of(operand->array, operand->acc);
        source->weight = operand->weight;
    }
    return n;
}

/* sum_keeps: returns whether the result's memory may hold a running sum of dtype acc while the
 * other operands are still to be read. */
static bool sum_keeps(const sum_series *series, fan_dtype acc)
{
    const fan_job *job = series->job;
    for (size_t k = series->done; k < job->n; k++) {
        if (!fan_array_extents_disjoint(job->out, job->in[k].array))
            return false;
    }
    return job->out->dtype == acc;
}

/* sum_running_elsewhere: allocates scratch memory for the next running sum, in the walk's order. */
static fan_status sum_running_elsewhere(const fan__launch_ctx *s, sum_series *series,
                                        const fan_nditer *walk, fan_dtype acc, sum_source *out,
                                        fan_error *err)
{
    bool other = series->running.strides == series->strides[0];
    int64_t *packed = series->strides[other];
    int64_t step = (int64_t)fan_dtype_size(acc);
    for (int i = walk->ndim - 1; i >= 0; i--) {
        packed[i] = step;
        step *= walk->extent[i];
    }
    *out = (sum_source){
        .dtype = acc,
        .strides = packed,
        .walked = true,
    };
    return fan__cuda_scratch(s->stream, (size_t)step, &out->address, err);
}

/* sum_any: launches fan_any. `begun`: how many operands earlier launches have summed into the first
 * source. */
static fan_status sum_any(const fan__launch_ctx *s, const sum_launch *launch, const fan_job *job,
                          size_t begun, fan_error *err)
{
    fan_k_any a;
    sum_any_args(launch, &a);
    if (!job->stats_out)
        return fan__launch_threads(s, s->part->any, a.size, &a, err);
    sum_measured measured = {
        .rows = fan_stats_partials(a.size),
        .size = a.size,
        .sources = launch->n,
    };
    a.rows = sum_rows_of(job->stats_out);
    a.first_suspect = (int32_t)job->first_suspect;
    if (begun) {
        a.first_suspect = 1;
        measured.first = begun - 1;
        measured.more = true;
    }
    FAN_TRY(fan__launch_blocks(s, s->part->fold_stats_any, measured.rows, &a, err));
    return sum_add_rows(s, job->stats_out, &measured, err);
}

/* sum_group: one launch of a series. `end`: where the result goes, and what is done to it at the
 * end. */
static fan_status sum_group(const fan__launch_ctx *s, sum_series *series, const sum_launch *end,
                            fan_error *err)
{
    const fan_job *job = series->job;
    size_t begun = series->done;
    sum_source target = *end->out;
    sum_launch launch = {
        .walk = end->walk,
        .out = &target,
        .in = series->sources,
        .n = sum_next_sources(series),
    };
    uint64_t scratch = 0;
    if (series->done == job->n) {
        launch.factor = end->factor;
        launch.divisor = end->divisor;
    } else {
        fan_dtype acc = job->in[series->done - 1].acc;
        if (!sum_keeps(series, acc)) {
            FAN_TRY(sum_running_elsewhere(s, series, end->walk, acc, &target, err));
            scratch = target.address;
        }
    }
    fan_status status = sum_any(s, &launch, job, begun, err);
    if (series->scratch)
        fan__cuda_scratch_free(s->stream, series->scratch);
    series->scratch = scratch;
    series->running = target;
    series->running.acc = target.dtype;
    return status;
}

static fan_status sum_in_groups(const fan__launch_ctx *s, const fan_nditer *walk,
                                const fan_job *job, fan_error *err)
{
    const fan_scale *scale = job->scale;
    sum_source out = sum_source_of(job->out, FAN_DT_NONE);
    sum_launch end = {.walk = walk, .out = &out};
    sum_series series = {.job = job, .room = sum_room(job, walk)};
    char factor[16] = {0};
    char divisor[8] = {0};
    if (scale && scale->on) {
        fan_scale_as(scale, job->in[job->n - 1].acc, factor);
        end.factor = factor;
    }
    if (scale && scale->divisor) {
        fan_divisor_as(scale->divisor, job->in[job->n - 1].acc, divisor);
        end.divisor = divisor;
    }
    if (s->blind)
        out.address = 0;
    fan_status status;
    do
        status = sum_group(s, &series, &end, err);
    while (status == FAN_OK && series.done < job->n);
    if (series.scratch)
        fan__cuda_scratch_free(s->stream, series.scratch);
    return status;
}

fan_status fan__cuda_sum(const fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    const fan_array *out = job->out;
    const fan_scale *scale = job->scale;
    fan_nditer walk;
    if (out->size == 0) {
        if (!job->stats_out)
            return FAN_OK;
        return sum_add_rows(s, job->stats_out, &(sum_measured){.rows = 0}, err);
    }
    fan__walk_job(&walk, job);
    size_t which = fan__fold_for(job, &walk);
    if (which == FAN__FOLDS || (scale && scale->divisor))
        return sum_in_groups(s, &walk, job, err);
    if (job->stats_out && (fan__fold_flags(which, out, job->in->array) & FAN_K_OUT_WIDE))
        return sum_in_groups(s, &walk, job, err);
    return sum_fold(s, which, job, err);
}

fan_status fan__cuda_copy(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                          fan_error *err)
{
    fan_operand from = {
        .array = in,
        .acc = out->dtype,
    };
    fan_job job = {
        .out = out,
        .in = &from,
        .n = 1,
    };
    return fan__cuda_sum(s, &job, err);
}

/* sum_find_first_nonfinite: if the sum has an inf or a NaN, and its contribution was not found yet:
 * checks whether it was the k-th operand of `job`. */
static fan_status sum_find_first_nonfinite(const fan__launch_ctx *s, const fan_job *job, size_t k,
                                           fan_error *err)
{
    const fan_array *of = job->in[k].array;
    fan_k_any a;
    fan_nditer walk;
    char kind = fan_dtype_kind(of->dtype);
    if (of->size == 0)
        return FAN_OK;
    if ((kind != 'f' && kind != 'c'))
        return FAN_OK;
    fan_nditer_one(&walk, of, false);
    sum_source in = sum_source_of(of, of->dtype);
    sum_source nowhere = {
        .dtype = of->dtype,
        .strides = of->strides,
    };
    sum_launch launch = {
        .walk = &walk,
        .out = &nowhere,
        .in = &in,
        .n = 1,
    };
    sum_any_args(&launch, &a);
    a.rows = fan__address_of(job->stats_out->words);
    memcpy(&a.factor[0], &job->stats_out->keys[k], sizeof *job->stats_out->keys);
    return fan__launch_threads(s, s->part->nonfinite, walk.size, &a, err);
}

fan_status fan__cuda_measure(fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    const fan_array *of = job->in[0].array;
    fan_operand from = {
        .array = of,
        .acc = fan_dtype_accumulate(of->dtype),
    };
    fan_job sum = {
        .out = of,
        .in = &from,
        .n = 1,
        .stats_out = job->stats_out,
        .first_suspect = job->first_suspect,
    };
    s->blind = true;
    FAN_TRY(fan__cuda_sum(s, &sum, err));
    for (size_t k = 1; k < job->n; k++)
        FAN_TRY(sum_find_first_nonfinite(s, job, k, err));
    return FAN_OK;
}

fan_status fan__cuda_fill_zero(const fan__launch_ctx *s, uint64_t address, size_t bytes,
                               fan_error *err)
{
    fan_cu_result code = fan__cuda_api_of(s->part)->MemsetD8Async(address, 0, bytes, s->on);
    return fan__cuda_check(s->part, code, "cuMemsetD8Async", err);
}

fan_status fan__cuda_zero(const fan__launch_ctx *s, const fan_array *out, fan_error *err)
{
    int64_t lo;
    int64_t hi;
    if (out->size == 0)
        return FAN_OK;
    if (!fan_array_dense(out))
        return fan__cuda_sum(s, &(fan_job){.out = out}, err);
    fan_array_reach(out, &lo, &hi);
    return fan__cuda_fill_zero(s, fan__address_of(out) + (uint64_t)lo, (size_t)(hi - lo), err);
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
    int64_t extent[FAN_MAX_NDIM];
    int64_t out[FAN_MAX_NDIM];
    int64_t in[FAN_MAX_NDIM];
} reduce_axes;

/* A sum over axes. */
typedef struct reduction {
    fan_k_reduce args;
    reduce_axes stay;
    uint64_t scratch[MOST_LEVELS];
} reduction;

static void reduce_add_axis(reduce_axes *a, int64_t extent, int64_t out, int64_t in)
{
    int last = a->n - 1;
    bool joins = a->n && a->in[last] == in * extent && a->out[last] == out * extent;
    if (joins) {
        a->extent[last] *= extent;
    } else {
        last = a->n++;
        a->extent[last] = extent;
    }
    a->out[last] = out;
    a->in[last] = in;
}

static void reduce_put_axes(reduction *r, const reduce_axes *go)
{
    const reduce_axes *stay = &r->stay;
    int64_t *at = r->args.words;
    r->args.stay = stay->n;
    r->args.go = go->n;
    at = fan__put_words(at, stay->extent, stay->n);
    at = fan__put_words(at, stay->out, stay->n);
    at = fan__put_words(at, stay->in, stay->n);
    at = fan__put_words(at, go->extent, go->n);
    fan__put_words(at, go->in, go->n);
}

/* reduce_again: sets the arguments of the launch that reads the last one's results. */
static void reduce_again(reduction *r)
{
    fan_k_reduce *a = &r->args;
    reduce_axes *stay = &r->stay;
    bool lanes = a->lanes && !a->whole;
    int64_t size = (int64_t)fan_dtype_size((fan_dtype)a->acc);
    reduce_axes left = {
        .n = a->runs > 1,
        .extent = {a->runs},
        .in = {size},
    };
    a->in_part = a->runs * size;
    if (a->across) {
        left.in[0] = a->numbers * size;
        a->in_part = size;
    }
    int64_t step = a->in_part * a->parts;
    for (int i = stay->n - 1; i >= 0; i--) {
        stay->in[i] = step;
        step *= stay->extent[i];
    }
    reduce_put_axes(r, &left);
    a->in = a->out;
    a->terms = a->runs;
    a->group = FAN_K_RUN;
    if (lanes)
        a->group = 1 << FAN_K_LANES;
    a->runs = (a->terms - 1) / a->group + 1;
    a->lanes = 0;
    a->whole = 0;
    a->again = true;
}

static fan_status reduce_launches(const fan__launch_ctx *s, reduction *r, size_t which,
                                  fan_error *err)
{
    fan_k_reduce *a = &r->args;
    uint64_t out = a->out;
    size_t size = fan_dtype_size((fan_dtype)a->acc);
    for (int level = 0;; level++) {
        int64_t threads = a->numbers * a->runs;
        a->last = a->runs == 1;
        a->out = out;
        if (!a->last) {
            FAN_TRY(fan__cuda_scratch(s->stream, (size_t)threads * size, &a->out, err));
            r->scratch[level] = a->out;
        }
        FAN_TRY(fan__launch_threads(s, s->part->reduce[which], threads, a, err));
        if (a->last)
            return FAN_OK;
        reduce_again(r);
        if (FAN_FAULT(CUDA_EARLY_LANES)) {
            fan__cuda_scratch_free(s->stream, r->scratch[level]);
            r->scratch[level--] = 0;
        }
        which = fan__reduce_for((fan_dtype)a->acc);
    }
}

/* reduce_set_axes: sets which axes stay and which go, and which of them neighbouring threads
 * share. */
static void reduce_set_axes(reduction *r, const fan_array *out, const fan_array *in)
{
    reduce_axes *stay = &r->stay;
    reduce_axes go = {.n = 0};
    int lead = in->ndim - out->ndim;
    for (int i = 0; i < in->ndim; i++) {
        int64_t extent = in->shape[i];
        int axis = i - lead;
        if (extent == 1)
            continue;
        if (axis >= 0 && out->shape[axis] == extent)
            reduce_add_axis(stay, extent, out->strides[axis], in->strides[i]);
        else
            reduce_add_axis(&go, extent, 0, in->strides[i]);
    }
    reduce_put_axes(r, &go);
    r->args.across = stay->n > 0;
    if (stay->n && go.n) {
        int64_t stay_step = llabs(stay->in[stay->n - 1]);
        int64_t go_step = llabs(go.in[go.n - 1]);
        r->args.across = stay_step <= go_step;
    }
}

/* reduce_set_dtypes: sets the dtypes of the sum and of the result: of one part. */
static void reduce_set_dtypes(fan_k_reduce *a, const fan_array *out, const fan_array *in)
{
    fan_dtype acc = FAN_DT_FLOAT64;
    fan_dtype to = FAN_DT_FLOAT64;
    a->parts = fan__parts_of(in->dtype);
    a->in_part = (int64_t)fan_dtype_size(in->dtype) / a->parts;
    a->out_part = (int64_t)fan_dtype_size(out->dtype) / a->parts;
    if (a->parts == 1) {
        acc = fan_reduce_dtype(in->dtype);
        to = out->dtype;
    } else if (out->dtype == FAN_DT_COMPLEX64) {
        to = FAN_DT_FLOAT32;
    }
    a->acc = (int32_t)acc;
    a->to = (int32_t)to;
}

/* reduce_set_runs: distributes the terms over lanes. */
static void reduce_set_runs(fan_k_reduce *a)
{
    a->group = FAN_K_GROUP;
    a->runs = 1;
    if (a->terms <= FAN_K_RUN)
        return;
    int64_t groups = (a->terms - 1) / FAN_K_GROUP + 1;
    int64_t last = a->terms - (groups - 1) * FAN_K_GROUP;
    a->lanes = FAN_K_LANES;
    a->whole = a->numbers >= THREADS_WANTED / groups;
    a->runs = groups;
    if (a->whole)
        return;
    if (last >> FAN_K_LANES)
        last = 1 << FAN_K_LANES;
    a->runs = ((groups - 1) << FAN_K_LANES) + last;
}

static fan_status reduce_as_it_is(const fan__launch_ctx *s, const fan_array *out,
                                  const fan_array *in, fan_error *err)
{
    if (out->size == 0)
        return FAN_OK;
    if (in->size == 0)
        return fan__cuda_zero(s, out, err);
    reduction r = {.stay.n = 0};
    fan_k_reduce *a = &r.args;
    a->out = fan__address_of(out);
    a->in = fan__address_of(in);
    a->anywhere = fan__is_anywhere(out) || fan__is_anywhere(in);
    reduce_set_dtypes(a, out, in);
    reduce_set_axes(&r, out, in);
    a->numbers = out->size * a->parts;
    a->terms = in->size / out->size;
    reduce_set_runs(a);
    fan_status status = reduce_launches(s, &r, fan__reduce_for(in->dtype), err);
    for (int i = 0; i < MOST_LEVELS && r.scratch[i]; i++)
        fan__cuda_scratch_free(s->stream, r.scratch[i]);
    return status;
}

/* An array without gaps in scratch memory of the stream. */
typedef struct copy_packed {
    fan_array array;
    int64_t shape[FAN_MAX_NDIM];
    int64_t strides[FAN_MAX_NDIM];
} copy_packed;

/* copy_like: an array of the shape of `like`, with other memory and strides. */
static fan_array copy_like(const fan_array *like, char *data, int64_t *strides)
{
    return (fan_array){
        .data = data,
        .dtype = like->dtype,
        .ndim = like->ndim,
        .size = like->size,
        .shape = like->shape,
        .strides = strides,
        .writable = true,
    };
}

/* copy_pack: allocates memory for `like` in a dtype. */
static fan_status copy_pack(const fan__launch_ctx *s, const fan_array *like, fan_dtype dtype,
                            copy_packed *out, fan_error *err)
{
    size_t size = fan_dtype_size(dtype);
    uint64_t at = 0;
    FAN_TRY(fan__cuda_scratch(s->stream, (size_t)like->size * size, &at, err));
    out->array = copy_like(like, (char *)(uintptr_t)at, out->strides);
    out->array.dtype = dtype;
    out->array.shape = out->shape;
    memcpy(out->shape, like->shape, (size_t)like->ndim * sizeof *out->shape);
    fan_dense_strides(like->ndim, like->shape, size, NULL, out->strides);
    return FAN_OK;
}

static void copy_unpack(const fan__launch_ctx *s, const copy_packed *packed)
{
    fan__cuda_scratch_free(s->stream, fan__address_of(&packed->array));
}

fan_status fan__cuda_reduce(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                            fan_dtype dtype, fan_error *err)
{
    if (dtype == in->dtype || out->size == 0 || in->size == 0)
        return reduce_as_it_is(s, out, in, err);
    /* The kernels read one dtype: the elements are rounded in scratch memory first, along an
     * expanded axis once. */
    fan_array base = *in;
    copy_packed rounded;
    int64_t shape[FAN_MAX_NDIM];
    uint64_t expanded = fan_array_expanded(in);
    base.shape = shape;
    for (int i = 0; i < in->ndim; i++) {
        shape[i] = in->shape[i];
        if (expanded >> i & 1u) {
            shape[i] = 1;
            base.size /= in->shape[i];
        }
    }
    FAN_TRY(copy_pack(s, &base, dtype, &rounded, err));
    fan__launch_ctx quiet = *s; /* it does not change the result */
    quiet.begun = NULL;
    fan_status status = fan__cuda_copy(&quiet, &rounded.array, &base, err);
    for (int i = 0; i < in->ndim; i++) {
        if (expanded >> i & 1u)
            rounded.strides[i] = 0;
    }
    rounded.array.shape = in->shape;
    rounded.array.size = in->size;
    if (status == FAN_OK)
        status = reduce_as_it_is(s, out, &rounded.array, err);
    copy_unpack(s, &rounded);
    return status;
}

/* A copy between the device and the host. */
typedef struct copy_pair {
    const fan_array *device;
    const fan_array *host;
    bool upload;
} copy_pair;

fan_status fan__cuda_pass_upload(const fan__launch_ctx *s, fan_error *err)
{
    if (!s->part->reads_host || FAN_FAULT(CUDA_EARLY_HOST))
        return FAN_OK;
    return fan__cuda_pass(s->part, s->on, err);
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
    } else {
        code = api->MemcpyDtoHAsync(host, device, bytes, s->on);
    }
    fan__cuda_restore(s->part, mode);
    FAN_TRY(fan__cuda_check(s->part, code, call, err));
    if (upload)
        return fan__cuda_pass_upload(s, err);
    return fan__cuda_pass(s->part, s->on, err);
}

/* copy_dense: copies between an array of the device without gaps and a copy of the host's array
 * with the same strides. */
static fan_status copy_dense(const fan__launch_ctx *s, const copy_pair *pair, fan_error *err)
{
    const fan_array *device = pair->device;
    int64_t lo;
    int64_t hi;
    fan_array_reach(device, &lo, &hi);
    size_t bytes = (size_t)(hi - lo);
    char *memory = fan_alloc_data(bytes);
    if (!memory) {
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s beside a device", bytes,
                        FAN_PLURAL(bytes));
    }
    fan_array near = copy_like(device, memory - lo, device->strides);
    if (pair->upload)
        fan_array_copy(&near, pair->host);
    uint64_t from = fan__address_of(device) + (uint64_t)lo;
    fan_status status = copy_bytes(s, from, memory, bytes, pair->upload, err);
    if (status == FAN_OK && !pair->upload)
        fan_array_copy(pair->host, &near);
    fan_free_data(memory, bytes);
    return status;
}

/* copy_across: as copy_dense, an array of the device with gaps through scratch memory without
 * any. */
static fan_status copy_across(const fan__launch_ctx *s, const copy_pair *pair, fan_error *err)
{
    const fan_array *device = pair->device;
    if (device->size == 0)
        return FAN_OK;
    if (fan_array_dense(device))
        return copy_dense(s, pair, err);
    copy_packed packed;
    copy_pair through = *pair;
    fan_status status = FAN_OK;
    FAN_TRY(copy_pack(s, device, device->dtype, &packed, err));
    through.device = &packed.array;
    if (!pair->upload)
        status = fan__cuda_copy(s, &packed.array, device, err);
    if (status == FAN_OK)
        status = copy_dense(s, &through, err);
    if (pair->upload && status == FAN_OK)
        status = fan__cuda_copy(s, device, &packed.array, err);
    copy_unpack(s, &packed);
    return status;
}

fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                            fan_error *err)
{
    return copy_across(s,
                       &(copy_pair){
                           .device = out,
                           .host = in,
                           .upload = true,
                       },
                       err);
}

fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src,
                              fan_error *err)
{
    return copy_across(s, &(copy_pair){.device = src, .host = dst}, err);
}

/* exact_on_host: makes an exact sum of copies: `in` and `made` have room for the operands'. */
static fan_status exact_on_host(const fan__launch_ctx *s, const fan_job *job, fan_operand *in,
                                fan_array **made, fan_error *err)
{
    const fan_array *out = job->out;
    fan_array *sum = NULL;
    for (size_t k = 0; k < job->n; k++) {
        const fan_array *a = job->in[k].array;
        FAN_TRY(fan_array_new(a->dtype, a->ndim, a->shape, a, &made[k], err));
        FAN_TRY(fan__cuda_download(s, made[k], a, err));
        in[k] = job->in[k];
        in[k].array = made[k];
    }
    FAN_TRY(fan_array_new(out->dtype, out->ndim, out->shape, out, &sum, err));
    fan_job on_host = {
        .kind = FAN_JOB_EXACT,
        .out = sum,
        .in = in,
        .n = job->n,
        .scale = job->scale,
    };
    fan_job_run(&on_host, true);
    fan_status status = fan__cuda_upload(s, out, sum, err);
    fan_array_drop(sum);
    return status;
}

fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    fan_status status;
    fan_array **made = fan_calloc(job->n * sizeof *made);
    fan_operand *in = fan_calloc(job->n * sizeof *in);
    if (made && in)
        status = exact_on_host(s, job, in, made, err);
    else
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for an exact sum");
    for (size_t k = 0; made && k < job->n; k++)
        fan_array_drop(made[k]);
    fan_free(made);
    fan_free(in);
    return status;
}
