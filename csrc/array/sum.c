/* sum: sums of any number of arrays (sum.h). In this order: statistics; one sum; its tiles, its
 * pieces; factors, weights and divisors as numbers; which loop takes a sum; fan_sum; flat sums.
 *
 * Design. The elements are cut into pieces (fan_stats_piece), which several threads may process; a
 * piece is cut into tiles. If all operands are gap-free and have the result's dtype, a tile is the
 * whole piece and one loop reads them all (`sum_straight`). Else a tile is small enough for the L1
 * cache together with its operands, and operands are added in order: gap-free neighbours of one
 * dtype are read in place, by one loop that converts in registers; any other is first converted
 * into a scratch tile. The running sum stays in its tile; the last step writes straight to `out` if
 * no further conversion is needed.
 *
 * Many operands at once would need more pages and streams than a processor tracks: more than MANY
 * are added in groups, over a tile.
 *
 * Pitfall: `out` may be one of the operands. So a tile of `out` is written only after every
 * operand's tile has been read: by the very last step, which reads element i of all its sources
 * before it writes element i. */
#include "array/sum.h"

#include "array/convert.h"
#include "array/device_stats.h"
#include "array/nditer.h"
#include "array/sum_isa.h"
#include "base/fault.h"
#include "base/float_mode.h"
#include "base/interrupt.h"
#include "base/workers.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

/* ---- statistics (stats.h) ---- */

static void stats_begin(fan_stats *s)
{
    *s = (fan_stats){.bad = SIZE_MAX};
}

static void stats_merge(fan_stats *into, const fan_stats *next)
{
    into->count += next->count;
    fan_sum_and_rest(&into->squares, &into->rest, next->squares);
    into->rest += next->rest;
    into->nonfinite += next->nonfinite;
    if (next->absmax > into->absmax)
        into->absmax = next->absmax;
    into->bad = fan_umin(into->bad, next->bad);
}

static void stats_run_begin(fan_stats_run *r)
{
    memset(r, 0, sizeof *r);
}

static void stats_run_end(fan_stats_run *r, uint64_t count, fan_stats *s)
{
    fan_stats_block_end(r);
    *s = (fan_stats){.count = count, .absmax = r->top, .nonfinite = r->nonfinite, .bad = SIZE_MAX};
    for (size_t i = 0; i < FAN_STATS_LANES; i++) {
        fan_sum_and_rest(&s->squares, &s->rest, r->total[i]);
        s->rest += r->rest[i];
    }
}

#define MEASURE_TILE 4096
#define LONG_RUN ((int64_t)1 << 18) /* elements read in place between two polls for interrupts */

/* stats_count: counts the elements of `a`, each times 2^-scale. A scale needs float64 or
 * complex128. Returns false if it was interrupted. */
static bool stats_count(const fan_array *a, int scale, fan_stats *s)
{
    FAN_UNINITIALIZED _Alignas(64) char tile[MEASURE_TILE];
    FAN_UNINITIALIZED fan_nditer w;
    const fan_loops *loops = fan_loops_of(a->dtype);
    const fan_loops *doubles = fan_loops_of(FAN_DT_FLOAT64);
    int64_t piece = fan_stats_piece(a->size);
    int64_t most = MEASURE_TILE / fan_dtype_step(a->dtype);
    double factor = ldexp(1, -scale);
    stats_begin(s);
    fan_nditer_one(&w, a, false);
    for (int64_t at = 0; at < a->size; at += piece) {
        fan_stats_run run;
        fan_stats one;
        int64_t end = fan_min(a->size, at + piece);
        int64_t n;
        stats_run_begin(&run);
        for (int64_t i = at; i < end; i += n) {
            n = fan_min(end - i, LONG_RUN);
            const char *p = NULL;
            if (!scale)
                p = fan_nditer_whole(&w, a, i, n);
            if (!p) {
                n = fan_min(n, most);
                fan_nditer_read(&w, a, i, n, a->dtype, tile);
                p = tile;
            }
            if (scale)
                doubles->scale(tile, (const char *)&factor, (size_t)n * loops->parts);
            loops->measure(&run, p, (size_t)n);
            if (fan_interrupted(n))
                return false;
        }
        stats_run_end(&run, (uint64_t)(end - at), &one);
        if (one.nonfinite)
            one.bad = 0;
        stats_merge(s, &one);
    }
    return true;
}

/* stats_end: completes the statistics of `a`: counts the squares again if the largest element asks
 * for a scale. */
static void stats_end(const fan_array *a, fan_stats *s)
{
    fan_stats scaled;
    int scale = fan_stats_scale_of(s->absmax);
    if (scale && stats_count(a, scale, &scaled)) {
        s->squares = scaled.squares;
        s->rest = scaled.rest;
        s->scale = scale;
    }
    s->squares += s->rest;
    s->rest = 0;
}

void fan_stats_of(const fan_array *a, fan_stats *s)
{
    FAN_DEFAULT_FLOAT_MODE;
    if (stats_count(a, 0, s))
        stats_end(a, s);
}

double fan_stats_sumsq(const fan_stats *s)
{
    FAN_DEFAULT_FLOAT_MODE;
    double sum = ldexp(s->squares, 2 * s->scale);
    FAN_FLOAT_BARRIER(sum);
    return sum;
}

double fan_stats_norm(const fan_stats *s)
{
    FAN_DEFAULT_FLOAT_MODE;
    double norm = ldexp(sqrt(s->squares), s->scale);
    FAN_FLOAT_BARRIER(norm);
    return norm;
}

void fan_stats_repeat(fan_stats *s, uint64_t times)
{
    FAN_DEFAULT_FLOAT_MODE;
    FAN_FLOAT_BARRIER(times);
    s->count *= times;
    s->nonfinite *= times;
    s->squares *= (double)times;
}

/* ---- one sum ---- */

#define TILE 8192u /* bytes; a multiple of every item size */
/* rows at least this long are not mixed in one tile, so that they can be read in place */
#define LONG_ROW 128
#define MANY 16                  /* sources that one loop reads at once */
#define GROUP 8                  /* beyond MANY, and far away: this many at a time */
#define MANY_AT_ONCE 64          /* sources listed at once */
#define WATCHED 2048u            /* bytes of a result that are counted while they are in cache */
#define NEAR ((uint64_t)1 << 20) /* bytes of sources that the L2 cache may hold */
#define PARALLEL_FROM ((uint64_t)4 << 20) /* bytes that are worth waking threads for */

/* What all pieces of a sum share; on the stack of the caller's thread. */
typedef struct sum_op {
    const fan_array *out;
    const fan_operand *in;
    size_t n;
    const char *factor;       /* NULL: no scale */
    const char *divisor;      /* NULL: none */
    bool weighted;            /* some operand has a weight */
    fan_fold_loop *fold;      /* NULL, or the loop that reads all operands in place */
    fan_watch *watch;         /* NULL, or the loop that also counts */
    fan_loop_options options; /* of `fold` */
    fan_dtype last;           /* the last accumulation dtype */
    int64_t most;             /* elements of a tile */
    int64_t row;              /* elements of a long row, else 0 */
    int64_t piece;            /* elements of a piece */
    fan_nditer iter;
    fan_stats *parts; /* of each piece, or NULL */
    size_t first_suspect;
    atomic_bool stop; /* the caller was interrupted: start no more pieces */
} sum_op;

/* last_cache: returns the bytes of the last-level cache; a typical size if unknown or shared with
 * many. */
static uint64_t last_cache(void)
{
    static atomic_long known;
    long bytes = atomic_load_explicit(&known, memory_order_relaxed);
    if (!bytes) {
#ifdef _SC_LEVEL3_CACHE_SIZE
        bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
        if (bytes < (4 << 20) || bytes > (64 << 20))
            bytes = 32 << 20;
        atomic_store_explicit(&known, bytes, memory_order_relaxed);
    }
    return (uint64_t)bytes;
}

/* sum_in_groups: folds any number of gap-free sources. `tile` has room for TILE bytes. */
static void sum_in_groups(fan_fold_loop *fold, char *dst, fan_sources from, size_t count,
                          size_t size, size_t acc_size, const fan_loop_options *options, char *tile)
{
    size_t most = TILE / acc_size;
    if (from.n <= MANY || !options->ahead) {
        fold(dst, from, count, options);
        return;
    }
    for (size_t at = 0; at < count; at += most) {
        const char *here[GROUP];
        size_t len = fan_umin(count - at, most);
        fan_loop_options group = {.raw = true, .ahead = true};
        char *to = tile;
        size_t m = GROUP;
        for (size_t k = 0; k < from.n; k += m) {
            if (k + m >= from.n) { /* the last group */
                m = from.n - k;
                to = dst + at * size;
                group.factor = options->factor;
                group.divisor = options->divisor;
                group.raw = false;
                group.stream = options->stream;
            }
            if (options->weights)
                group.weights = options->weights + k * acc_size;
            for (size_t i = 0; i < m; i++)
                here[i] = from.at[k + i] + at * size;
            fold(to, (fan_sources){here, m}, len, &group);
            group.start = tile;
        }
    }
}

/* ---- a tile ---- */

/* The running sum of a tile. Sources wait until one loop adds them all. */
typedef struct running_sum {
    fan_dtype acc;
    const fan_loops *loops; /* of acc */
    char *tile;             /* the sum, once it has begun */
    char *scratch;          /* a source that could not be read in place */
    bool begun;
    bool scratch_used; /* one of those that wait is there */
    bool weighted;     /* some operand of the sum has a weight */
    /* the sources that wait: */
    const char *src[GROUP];
    _Alignas(8) char weights[GROUP * 8];
    size_t sources;
    fan_dtype from;      /* their dtype */
    fan_fold_loop *fold; /* the loop for it */
} running_sum;

/* sum_weights: the weights of the sources that wait; NULL: they have none. */
static const char *sum_weights(const running_sum *sum)
{
    if (sum->weighted)
        return sum->weights;
    return NULL;
}

/* weight_number: writes number k of `weights`, by which a loop multiplies an operand: 1 where it
 * has no weight, or a complex one. */
static void weight_number(const fan_weight *weight, fan_dtype acc, size_t k, char *weights)
{
    static const fan_weight none = {.on = true, .re = 1};
    if (!weight->on || weight->im != 0)
        weight = &none;
    fan_weight_as(weight, acc, weights + k * fan_weight_size(acc));
}

/* sum_put: lets one more source wait, with its weight where some operand has one. */
static void sum_put(running_sum *sum, const char *p, const fan_weight *weight)
{
    if (sum->weighted)
        weight_number(weight, sum->acc, sum->sources, sum->weights);
    sum->src[sum->sources++] = p;
}

/* sum_add: adds the sources that wait to what has begun. */
static void sum_add(const running_sum *sum, char *to, int64_t len, fan_loop_options *options)
{
    fan_sources from = {sum->src, sum->sources};
    if (sum->begun)
        options->start = sum->tile;
    options->weights = sum_weights(sum);
    sum->fold(to, from, (size_t)len * sum->loops->parts, options);
}

/* sum_flush: adds the sources that wait. */
static void sum_flush(running_sum *sum, int64_t len)
{
    fan_loop_options options = {.raw = true};
    if (sum->sources)
        sum_add(sum, sum->tile, len, &options);
    sum->begun = true;
    sum->scratch_used = false;
    sum->sources = 0;
}

/* sum_divide: divides the running sum. */
static void sum_divide(const running_sum *sum, const char *divisor, int64_t len)
{
    fan_loop_options options = {.divisor = divisor};
    fan_loops_apply(sum->loops, sum->tile, sum->tile, len, &options);
}

/* sum_widen: continues the sum in another dtype (D3). */
static void sum_widen(running_sum *sum, fan_dtype acc, int64_t len)
{
    sum_flush(sum, len);
    fan_convert_dense(sum->scratch, acc, sum->tile, sum->acc, len);
    char *other = sum->tile;
    sum->tile = sum->scratch;
    sum->scratch = other;
    sum->acc = acc;
    sum->loops = fan_loops_of(acc);
}

/* sum_weigh_complex: multiplies the elements in scratch by a complex weight. */
static void sum_weigh_complex(const running_sum *sum, const fan_weight *weight, int64_t len)
{
    _Alignas(16) char factor[16];
    const fan_scale scale = {.on = true, .re = weight->re, .im = weight->im};
    fan_scale_as(&scale, sum->acc, factor);
    sum->loops->scale(sum->scratch, factor, (size_t)len);
}

/* sum_fold_tile: sums elements [at, at + len) into `result` (gap-free, out's dtype) or, if that is
 * NULL, into `out`. */
static void sum_fold_tile(const sum_op *op, int64_t at, int64_t len, char *tile, char *scratch,
                          char *result)
{
    fan_dtype acc = op->in[0].acc;
    running_sum sum = {.acc = acc,
                       .loops = fan_loops_of(acc),
                       .tile = tile,
                       .scratch = scratch,
                       .weighted = op->weighted};
    for (size_t k = 0; k < op->n; k++) {
        const fan_operand *one = &op->in[k];
        if (one->acc != sum.acc)
            sum_widen(&sum, one->acc, len);
        fan_dtype from = one->array->dtype;
        fan_fold_loop *fold = fan_loops_fold(fan_loops_of(from), from, sum.acc);
        const char *p = NULL;
        bool complex_weight = one->weight.on && one->weight.im != 0; /* multiplied in scratch */
        if (fold && !complex_weight)
            p = fan_nditer_whole(&op->iter, one->array, at, len);
        if (!p) {
            from = sum.acc;
            fold = sum.loops->own;
        }
        bool other_dtype = sum.sources && sum.from != from;
        bool no_scratch = !p && sum.scratch_used;
        if (sum.sources == GROUP || other_dtype || no_scratch)
            sum_flush(&sum, len);
        if (!p) {
            fan_nditer_read(&op->iter, one->array, at, len, sum.acc, sum.scratch);
            sum.scratch_used = true;
            p = sum.scratch;
        }
        if (complex_weight)
            sum_weigh_complex(&sum, &one->weight, len);
        sum.fold = fold;
        sum.from = from;
        sum_put(&sum, p, &one->weight);
    }

    /* The last fold writes the result if it needs no other conversion, and no complex factor, which
     * comes after the fold. */
    fan_dtype d = op->out->dtype;
    bool factor_after = op->factor && sum.loops->parts == 2;
    bool converts = sum.from != d && sum.acc != d;
    char *to = result;
    if (!to)
        to = fan_nditer_whole(&op->iter, op->out, at, len);
    bool one_step = !converts && !factor_after;
    if (to && sum.sources && one_step) {
        fan_loop_options options = {.factor = op->factor, .divisor = op->divisor};
        options.raw = sum.from != d;
        sum_add(&sum, to, len, &options);
        return;
    }
    sum_flush(&sum, len);
    if (op->divisor)
        sum_divide(&sum, op->divisor, len);
    if (op->factor)
        sum.loops->scale(sum.tile, op->factor, (size_t)len);
    if (result)
        fan_convert_dense(result, d, sum.tile, sum.acc, len);
    else
        fan_nditer_write(&op->iter, op->out, at, len, sum.acc, sum.tile);
}

/* sum_weigh_tile: multiplies `len` elements of one->acc by the operand's weight. */
static void sum_weigh_tile(const fan_operand *one, char *tile, int64_t len)
{
    _Alignas(8) char number[8];
    running_sum sum = {.acc = one->acc, .loops = fan_loops_of(one->acc), .scratch = tile};
    if (one->weight.im != 0) {
        sum_weigh_complex(&sum, &one->weight, len);
        return;
    }
    fan_weight_as(&one->weight, one->acc, number);
    fan_loop_options options = {.weights = number};
    fan_loops_apply(sum.loops, tile, tile, len, &options);
}

/* has_nonfinite: returns whether an element of [at, at + len) of an operand is inf or NaN. */
static bool has_nonfinite(const sum_op *op, const fan_operand *one, int64_t at, int64_t len,
                          char *scratch)
{
    const fan_array *a = one->array;
    fan_dtype dtype = a->dtype;
    if (one->weight.on)
        dtype = one->acc;
    char kind = fan_dtype_kind(dtype);
    if (kind != 'f' && kind != 'c')
        return false;
    fan_stats_run run;
    stats_run_begin(&run);
    if (one->weight.on) { /* W6: the term is the product */
        fan_nditer_read(&op->iter, a, at, len, dtype, scratch);
        sum_weigh_tile(one, scratch, len);
        fan_loops_of(dtype)->measure(&run, scratch, (size_t)len);
        return run.nonfinite > 0;
    }
    const char *p = fan_nditer_elements(&op->iter, a, at, len, dtype, scratch);
    fan_loops_of(dtype)->measure(&run, p, (size_t)len);
    return run.nonfinite > 0;
}

/* sum_measured: sums, writes and counts as much of [at, end) as one loop can; returns how many
 * elements. */
static int64_t sum_measured(const sum_op *op, int64_t at, int64_t end, fan_stats_run *run)
{
    FAN_UNINITIALIZED const char *src[MANY];
    size_t from = (size_t)at * fan_dtype_size(op->out->dtype);
    for (size_t k = 0; k < op->n; k++)
        src[k] = op->in[k].array->data + from;
    fan_sources all = {src, op->n};
    size_t count = (size_t)(end - at);
    return (int64_t)op->watch(op->out->data + from, all, count, &op->options, run);
}

/* sum_straight: sums [at, at + len) of at most MANY_AT_ONCE operands that one loop reads in
 * place. */
static void sum_straight(const sum_op *op, int64_t at, int64_t len, char *to, char *tile,
                         const fan_loop_options *options)
{
    FAN_UNINITIALIZED const char *src[MANY_AT_ONCE];
    const fan_loops *loops = fan_loops_of(op->out->dtype);
    size_t size = fan_dtype_size(op->out->dtype);
    for (size_t k = 0; k < op->n; k++)
        src[k] = op->in[k].array->data + (size_t)at * size;
    fan_sources all = {src, op->n};
    size_t count = (size_t)len * loops->parts;
    size_t acc_size = fan_dtype_size(op->last) / loops->parts;
    sum_in_groups(op->fold, to, all, count, size / loops->parts, acc_size, options, tile);
}

/* sum_counted: counts the tile in `result` and writes it to `out`. Finds the operand before *bad
 * with a non-finite element first, because `out` may be an operand. */
static void sum_counted(const sum_op *op, int64_t at, int64_t len, const char *result,
                        char *scratch, fan_stats_run *run, size_t *bad)
{
    const fan_loops *loops = fan_loops_of(op->out->dtype);
    uint64_t before = run->nonfinite;
    loops->measure(run, result, (size_t)len);
    if (run->nonfinite != before) {
        for (size_t k = op->first_suspect; k < op->n && k < *bad; k++) {
            if (has_nonfinite(op, &op->in[k], at, len, scratch))
                *bad = k;
        }
    }
    fan_loop_options past_caches = {.stream = true};
    const fan_loop_options *options = NULL;
    if (op->options.stream)
        options = &past_caches;
    char *whole = fan_nditer_whole(&op->iter, op->out, at, len);
    if (whole)
        fan_loops_apply(loops, whole, result, len, options);
    else
        fan_nditer_write(&op->iter, op->out, at, len, op->out->dtype, result);
}

/* ---- a piece ---- */

/* sum_piece: sums, and with statistics counts, a piece; on any thread. */
static void sum_piece(void *ctx, size_t index)
{
    sum_op *op = ctx;
    FAN_UNINITIALIZED _Alignas(64) char tile[TILE], scratch[TILE], result[TILE];
    int64_t begin = (int64_t)index * op->piece;
    int64_t end = fan_min(op->iter.size, begin + op->piece);
    size_t item = fan_dtype_size(op->out->dtype);
    size_t bad = SIZE_MAX;
    fan_stats_run run;
    if (fan_interrupted(end - begin))
        atomic_store_explicit(&op->stop, true, memory_order_relaxed);
    if (atomic_load_explicit(&op->stop, memory_order_relaxed))
        return;
    if (op->fold && !op->parts) {
        char *to = op->out->data + (size_t)begin * item;
        sum_straight(op, begin, end - begin, to, tile, &op->options);
        return;
    }

    stats_run_begin(&run);
    fan_loop_options near = op->options;
    near.stream = false;
    char *to = NULL;
    if (op->parts)
        to = result;
    int64_t most = op->most;
    if (op->fold)
        most = (int64_t)(WATCHED / item);
    int64_t len;
    for (int64_t at = begin; at < end; at += len) {
        if (op->parts && op->watch) {
            len = sum_measured(op, at, end, &run);
            if (len > 0)
                continue;
        }
        len = fan_min(most, end - at);
        if (op->row)
            len = fan_min(len, op->row - at % op->row);
        if (op->fold)
            sum_straight(op, at, len, to, tile, &near);
        else
            sum_fold_tile(op, at, len, tile, scratch, to);
        if (op->parts)
            sum_counted(op, at, len, result, scratch, &run, &bad);
    }
    if (op->parts) {
        stats_run_end(&run, (uint64_t)(end - begin), &op->parts[index]);
        op->parts[index].bad = bad;
    }
}

/* ---- factors, weights and divisors, as numbers of a dtype ---- */

void fan_scale_as(const fan_scale *scale, fan_dtype d, char *factor)
{
    FAN_DEFAULT_FLOAT_MODE;
    double parts[2] = {scale->re, scale->im};
    switch (fan_dtype_kind(d)) {
    case 'f':
        fan_convert(factor, d, 0, (const char *)parts, FAN_DT_FLOAT64, 0, 1);
        break;
    case 'c':
        fan_convert(factor, d, 0, (const char *)parts, FAN_DT_COMPLEX128, 0, 1);
        break;
    default:
        fan_convert(factor, d, 0, (const char *)&scale->i, FAN_DT_INT64, 0, 1);
        break;
    }
}

/* weight_parts: returns the dtype of the parts of d. */
static fan_dtype weight_parts(fan_dtype d)
{
    if (d == FAN_DT_COMPLEX64)
        return FAN_DT_FLOAT32;
    if (d == FAN_DT_COMPLEX128)
        return FAN_DT_FLOAT64;
    return d;
}

size_t fan_weight_size(fan_dtype d)
{
    return fan_dtype_size(weight_parts(d));
}

void fan_weight_as(const fan_weight *weight, fan_dtype d, char *number)
{
    FAN_DEFAULT_FLOAT_MODE;
    fan_dtype part = weight_parts(d);
    if (fan_dtype_kind(part) == 'f') {
        fan_convert(number, part, 0, (const char *)&weight->re, FAN_DT_FLOAT64, 0, 1);
        return;
    }
    int64_t whole = (int64_t)weight->re;
    fan_convert(number, part, 0, (const char *)&whole, FAN_DT_INT64, 0, 1);
}

void fan_divisor_as(const fan_divisor *divisor, fan_dtype d, char *number)
{
    FAN_DEFAULT_FLOAT_MODE;
    fan_dtype part = weight_parts(d);
    double from = divisor->odd;
    if (part == FAN_DT_FLOAT64)
        from = divisor->nearest;
    fan_convert(number, part, 0, (const char *)&from, FAN_DT_FLOAT64, 0, 1);
}

/* smallest_normal: returns the least number that a float dtype of 32 bits or less has with all of
 * its precision. */
static double smallest_normal(fan_dtype d)
{
    switch (d) {
    case FAN_DT_FLOAT8_E4M3FN:
        return 0x1p-6;
    case FAN_DT_FLOAT8_E5M2:
    case FAN_DT_FLOAT16:
        return 0x1p-14;
    default:
        return FLT_MIN;
    }
}

/* rounded_to: returns x after a round trip through dtype d. */
static double rounded_to(double x, fan_dtype d)
{
    FAN_DEFAULT_FLOAT_MODE; /* another rounds what is too large to the largest number */
    _Alignas(16) char number[16];
    double back;
    fan_convert(number, d, 0, (const char *)&x, FAN_DT_FLOAT64, 0, 1);
    fan_convert((char *)&back, FAN_DT_FLOAT64, 0, number, d, 0, 1);
    FAN_FLOAT_BARRIER(back);
    return back;
}

/* weight_part_fit: of one part of a weight, in the dtype of parts `part`. */
static fan_weight_fit weight_part_fit(double x, fan_dtype part)
{
    double size = fabs(x);
    bool usual = part == FAN_DT_FLOAT32 && size >= FLT_MIN && size < 0x1p127;
    if (part == FAN_DT_FLOAT64 || usual || x == 0)
        return FAN_WEIGHT_FITS;
    double back = rounded_to(x, part);
    if (!isfinite(back))
        return FAN_WEIGHT_TOO_LARGE;
    if (size < smallest_normal(part) && back != x)
        return FAN_WEIGHT_TOO_SMALL;
    return FAN_WEIGHT_FITS;
}

fan_weight_fit fan_weight_fit_of(const fan_weight *weight, fan_dtype d)
{
    fan_dtype part = weight_parts(d);
    if (fan_dtype_kind(part) != 'f')
        return FAN_WEIGHT_FITS;
    fan_weight_fit re = weight_part_fit(weight->re, part);
    if (re != FAN_WEIGHT_FITS)
        return re;
    return weight_part_fit(weight->im, part);
}

/* scale_part_fits: returns whether d has x, rounded, with all of its precision. */
static bool scale_part_fits(double x, fan_dtype d)
{
    if (x == 0 || !isfinite(x))
        return true;
    return isfinite(rounded_to(x, d)) && fabs(x) >= smallest_normal(d);
}

fan_dtype fan_scale_dtype(const fan_scale *scale, fan_dtype d)
{
    char kind = fan_dtype_kind(d);
    bool floats = kind == 'f' || kind == 'c';
    if (!floats || d == FAN_DT_FLOAT64 || d == FAN_DT_COMPLEX128)
        return d;
    fan_dtype parts = weight_parts(d);
    fan_dtype wide = FAN_DT_COMPLEX128;
    if (kind == 'f')
        wide = FAN_DT_FLOAT64;
    if (scale->divisor && !scale_part_fits(scale->divisor->nearest, parts))
        return wide;
    if (!scale->on)
        return d;
    if (!scale_part_fits(scale->re, parts))
        return wide;
    if (kind == 'c' && !scale_part_fits(scale->im, parts))
        return wide;
    return d;
}

/* ---- which loop takes a sum ---- */

/* sum_alike: returns whether the dtype and layout of `a` are those of `out`, which is gap-free in C
 * order. */
static bool sum_alike(const fan_array *a, const fan_array *out)
{
    if (a->dtype != out->dtype)
        return false;
    for (int i = 0; i < out->ndim; i++) {
        if (a->strides[i] != out->strides[i])
            return false;
    }
    return true;
}

/* sum_one_loop: returns the loop that reads all operands in place; NULL if there is none. */
static fan_fold_loop *sum_one_loop(const fan_array *out, const fan_operand *in, size_t n)
{
    fan_dtype d = out->dtype;
    fan_dtype acc = in[0].acc;
    for (size_t k = 0; k < n; k++) {
        if (in[k].acc != acc || in[k].array->dtype != d)
            return NULL;
    }
    return fan_loops_fold(fan_loops_of(d), d, acc);
}

/* sum_small: does a small sum of gap-free arrays in C order, without options, in one call of its
 * loop. */
static bool sum_small(const fan_array *out, const fan_operand *in, size_t n)
{
    FAN_UNINITIALIZED const char *src[MANY_AT_ONCE];
    const fan_loops *loops = fan_loops_of(out->dtype);
    int64_t step = (int64_t)loops->size;
    if (n > MANY_AT_ONCE || (uint64_t)out->size * (uint64_t)step * n > NEAR)
        return false;
    for (int i = out->ndim - 1; i >= 0; i--) {
        if (out->strides[i] != step)
            return false;
        step *= out->shape[i];
    }
    fan_dtype acc = in[0].acc;
    for (size_t k = 0; k < n; k++) {
        if (in[k].acc != acc || in[k].weight.on || !sum_alike(in[k].array, out))
            return false;
        src[k] = in[k].array->data;
    }
    fan_fold_loop *fold = fan_loops_fold(loops, out->dtype, acc);
    fan_sources all = {src, n};
    if (fold)
        fold(out->data, all, (size_t)out->size * loops->parts, NULL);
    return fold;
}

/* sum_fold: returns the loop that reads all operands in place; NULL if an array has gaps, or a
 * complex factor comes after the fold. */
static fan_fold_loop *sum_fold(const sum_op *op)
{
    if (op->n > MANY_AT_ONCE || !fan_nditer_whole(&op->iter, op->out, 0, op->out->size))
        return NULL;
    if (op->factor && fan_dtype_kind(op->last) == 'c')
        return NULL;
    for (size_t k = 0; k < op->n; k++) {
        if (op->in[k].weight.on && op->in[k].weight.im != 0)
            return NULL;
        if (!fan_nditer_whole(&op->iter, op->in[k].array, 0, op->out->size))
            return NULL;
    }
    return sum_one_loop(op->out, op->in, op->n);
}

/* sum_watch: returns the loop of the fold that also counts; NULL: none. */
static fan_watch *sum_watch(const sum_op *op)
{
    const fan_loops *loops = fan_loops_of(op->out->dtype);
    bool weighs = op->weighted || op->divisor;
    if (!op->fold || op->n > MANY || weighs)
        return NULL;
    if (op->fold == loops->own)
        return loops->own_watch;
    return loops->up_watch;
}

/* sum_write_weights: writes the real weights of all operands, which one loop reads. */
static void sum_write_weights(const sum_op *op, char *weights)
{
    for (size_t k = 0; k < op->n; k++)
        weight_number(&op->in[k].weight, op->last, k, weights);
}

#ifdef FAN_TEST
/* sum_fused: a planted fault: the sum of float64 operands without gaps, whose products are not
 * rounded. */
static bool sum_fused(const sum_op *op)
{
    if (!op->weighted || !op->fold || op->out->dtype != FAN_DT_FLOAT64)
        return false;
    double *out = (void *)op->out->data;
    for (int64_t i = 0; i < op->out->size; i++) {
        double sum = 0;
        for (size_t k = 0; k < op->n; k++) {
            const fan_operand *one = &op->in[k];
            double by = 1;
            if (one->weight.on)
                by = one->weight.re;
            sum = fma(((const fan_any_f64 *)one->array->data)[i], by, sum);
        }
        out[i] = sum;
    }
    return true;
}
#endif

/* ---- fan_sum ---- */

/* sum_large: any sum; apart, because its frame is large. */
static __attribute__((noinline)) void sum_large(const fan_array *out, const fan_operand *in,
                                                size_t n, const fan_sum_options *options)
{
    static const fan_sum_options nothing;
    if (!options)
        options = &nothing;
    FAN_UNINITIALIZED sum_op op;
    FAN_UNINITIALIZED fan_stats parts[FAN_STATS_PIECES];
    _Alignas(16) char factor[16];
    _Alignas(8) char divisor[8];
    FAN_UNINITIALIZED _Alignas(8) char weights[8 * MANY_AT_ONCE];
    size_t widest = fan_dtype_size(out->dtype);
    uint64_t written = (uint64_t)out->size * widest;
    uint64_t read = 0;
    bool among = false; /* out is an operand */
    op.weighted = false;
    fan_nditer_begin(&op.iter, out, false);
    for (size_t k = 0; k < n; k++) {
        const fan_array *a = in[k].array;
        widest = fan_umax(widest, fan_dtype_size(in[k].acc));
        read += (uint64_t)a->size * fan_dtype_size(a->dtype);
        among |= a->data == out->data;
        op.weighted |= in[k].weight.on;
        fan_nditer_also(&op.iter, a);
    }
    fan_nditer_ready(&op.iter);

    op.out = out;
    op.in = in;
    op.n = n;
    op.last = in[n - 1].acc;
    op.factor = NULL;
    if (options->scale.on) {
        fan_scale_as(&options->scale, op.last, factor);
        op.factor = factor;
    }
    op.divisor = NULL;
    if (options->scale.divisor) {
        fan_divisor_as(options->scale.divisor, op.last, divisor);
        op.divisor = divisor;
    }
    op.fold = sum_fold(&op);
    op.watch = sum_watch(&op);
#ifdef FAN_TEST
    if (FAN_FAULT(PRODUCT_FUSED) && sum_fused(&op))
        return;
#endif
    op.options =
        (fan_loop_options){.factor = op.factor, .divisor = op.divisor, .ahead = read > NEAR};
    if (op.fold && op.weighted) {
        sum_write_weights(&op, weights);
        op.options.weights = weights;
    }
    op.options.stream = !among && written > last_cache() / 2;
    op.most = (int64_t)(TILE / widest);
    op.row = 0;
    if (op.iter.ndim > 1 && op.iter.extent[op.iter.ndim - 1] >= LONG_ROW)
        op.row = op.iter.extent[op.iter.ndim - 1];
    op.parts = NULL;
    if (options->stats)
        op.parts = parts;
    op.first_suspect = options->first_suspect;
    atomic_init(&op.stop, false);

    bool parallel = options->parallel && read + written >= PARALLEL_FROM;
    op.piece = out->size;
    if (parallel || op.parts)
        op.piece = fan_stats_piece(out->size);
    size_t pieces = (size_t)((out->size - 1) / op.piece + 1);
    if (parallel) {
        fan_workers_run(pieces, sum_piece, &op);
    } else {
        for (size_t i = 0; i < pieces; i++)
            sum_piece(&op, i);
    }
    if (!op.parts || atomic_load(&op.stop))
        return;
    for (size_t i = 0; i < pieces; i++)
        stats_merge(options->stats, &parts[i]);
    stats_end(out, options->stats);
}

void fan_sum(const fan_array *out, const fan_operand *in, size_t n, const fan_sum_options *options)
{
    FAN_DEFAULT_FLOAT_MODE;
    bool counts = options && options->stats;
    bool scales = options && fan_scale_acts(&options->scale);
    if (counts)
        stats_begin(options->stats);
    if (out->size == 0)
        return;
    if (!counts && !scales && sum_small(out, in, n))
        return;
    sum_large(out, in, n, options);
}

/* ---- flat sums ---- */

/* sum_flat: one call of the loop that adds runs of `dtype` in `acc`; false, and nothing happened:
 * there is none. A complex factor comes after the fold, and only in the dtype of the result. */
static inline bool sum_flat(char *out, fan_sources from, size_t count, fan_dtype dtype,
                            fan_dtype acc, fan_loop_options *options)
{
    FAN_DEFAULT_FLOAT_MODE;
    const fan_loops *loops = fan_loops_of(dtype);
    fan_fold_loop *fold = fan_loops_fold(loops, dtype, acc);
    const char *factor_after = NULL;
    if (options->factor && loops->parts == 2)
        factor_after = options->factor;
    if (!fold || (factor_after && acc != dtype))
        return false;
    if (factor_after)
        options->factor = NULL;
    options->ahead = count * loops->size * from.n > NEAR;
    bool multiplies = options->factor || options->weights || options->divisor;
    bool continues = options->start || options->raw;
    bool plain = !options->ahead && !multiplies && !continues;
    if (plain)
        options = NULL;
    fold(out, from, count * loops->parts, options);
    if (factor_after)
        loops->scale(out, factor_after, count);
    return true;
}

bool fan_sum_flat(char *out, const char *const *src, size_t n, size_t count, fan_dtype dtype,
                  fan_dtype acc, const char *factor)
{
    fan_loop_options options = {.factor = factor};
    return sum_flat(out, (fan_sources){src, n}, count, dtype, acc, &options);
}

bool fan_sum_flat_from(char *out, const char *start, const char *const *src, size_t n, size_t count,
                       fan_dtype dtype, fan_dtype acc, const char *factor, bool raw)
{
    fan_loop_options options = {.factor = factor, .start = start, .raw = raw};
    return sum_flat(out, (fan_sources){src, n}, count, dtype, acc, &options);
}

bool fan_sum_flat_weighted(char *out, const char *const *src, size_t n, size_t count,
                           fan_dtype dtype, fan_dtype acc, const char *weights, const char *divisor,
                           const char *factor)
{
    fan_loop_options options = {.factor = factor, .weights = weights, .divisor = divisor};
    return sum_flat(out, (fan_sources){src, n}, count, dtype, acc, &options);
}

fan_dtype fan_sum_flat_upper(fan_dtype d)
{
    const fan_loops *loops = fan_loops_of(d);
    if (loops->up)
        return loops->upper;
    return FAN_DT_NONE;
}

bool fan_sum_flat_fits(fan_dtype dtype, fan_dtype acc)
{
    return fan_loops_fold(fan_loops_of(dtype), dtype, acc) != NULL;
}
