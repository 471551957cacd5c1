/* reduce: the sum of an array over some of its axes, by rows or by elements of the result.
 *
 * The order is D7's, on every device: up to RUN terms one after the other, in C order of the
 * reduced axes. More are distributed, so that a GPU can sum in parallel:
 *
 *   terms     0 1 2 .. 31 | 32 33 .. 63 | ..   of each GROUP in a row, term k to lane k mod LANES
 *   lanes     0 + 32 + ..,  1 + 33 + ..,  ..   each lane one after the other
 *   groups    lane 0 + lane 1 + .. + lane 31   one number of each group
 *   runs      RUN groups in a row, one after the other; then RUN of those; until one number is
 *             left */
#include "array/sum.h"

#include "array/convert.h"
#include "array/nditer.h"
#include "array/sum_isa.h"
#include "base/float_mode.h"
#include "base/interrupt.h"

#include <string.h>

/* Some axes of an array, as an array of its own on the stack. */
typedef struct part {
    fan_array a;
    int64_t shape[FAN_MAX_NDIM];
    int64_t strides[FAN_MAX_NDIM];
    int64_t nearest; /* smallest |stride| */
} part;

static void part_begin(part *p, const fan_array *of)
{
    memset(&p->a, 0, sizeof p->a);
    p->a.data = of->data;
    p->a.dtype = of->dtype;
    p->a.size = 1;
    p->a.shape = p->shape;
    p->a.strides = p->strides;
    p->nearest = INT64_MAX;
}

static void part_axis(part *p, int64_t extent, int64_t stride)
{
    if (extent == 1) /* its stride may be anything */
        return;
    p->shape[p->a.ndim] = extent;
    p->strides[p->a.ndim++] = stride;
    p->a.size *= extent;
    p->nearest = fan_min(p->nearest, fan_magnitude(stride));
}

fan_dtype fan_reduce_dtype(fan_dtype d)
{
    switch (fan_dtype_kind(d)) {
    case 'f':
        return FAN_DT_FLOAT64;
    case 'c':
        return FAN_DT_COMPLEX128;
    default:
        return d;
    }
}

#define RUN 256
#define LANES 32
#define GROUP (RUN * LANES)
#define LEVELS 7       /* GROUP * RUN^7 is more than 2^63 */
#define ROW_BYTES 2048 /* of sums that grow side by side */

/* Sums of groups: at each level the current run, of `count` numbers. */
typedef struct reduce_runs {
    const fan_loops *loops;
    size_t numbers; /* side by side; complex numbers count as two */
    int count[LEVELS];
    _Alignas(64) char sum[LEVELS][ROW_BYTES];
} reduce_runs;

static void runs_begin(reduce_runs *r, const fan_loops *loops, size_t elements)
{
    r->loops = loops;
    r->numbers = elements * loops->parts;
    memset(r->count, 0, sizeof r->count);
}

static void row_add(const fan_loops *loops, char *into, const char *row, size_t numbers)
{
    const char *both[] = {into, row};
    loops->own(into, (fan_sources){both, 2}, numbers, NULL);
}

/* runs_put: adds a number at a level. */
static void runs_put(reduce_runs *r, int level, const char *row, size_t bytes)
{
    if (r->count[level]++ == 0)
        memcpy(r->sum[level], row, bytes);
    else
        row_add(r->loops, r->sum[level], row, r->numbers);
}

static void runs_add(reduce_runs *r, const char *row, size_t bytes)
{
    runs_put(r, 0, row, bytes);
    for (int i = 0; i + 1 < LEVELS && r->count[i] == RUN; i++) {
        runs_put(r, i + 1, r->sum[i], bytes);
        r->count[i] = 0;
    }
}

/* runs_end: adds the last, shorter runs. */
static const char *runs_end(reduce_runs *r, size_t bytes)
{
    const char *row = NULL;
    for (int i = 0; i < LEVELS; i++) {
        if (row && r->count[i])
            runs_put(r, i, row, bytes);
        if (r->count[i])
            row = r->sum[i];
    }
    return row;
}

/* gone_at: returns the offset of term k from the first. */
static int64_t gone_at(const part *gone, int64_t k)
{
    int64_t offset = 0;
    for (int i = gone->a.ndim - 1; i >= 0; i--) {
        offset += k % gone->shape[i] * gone->strides[i];
        k /= gone->shape[i];
    }
    return offset;
}

/* The sum of an array over some axes. */
typedef struct reduction {
    part kept;              /* of the array: the axes that stay */
    part gone;              /* .. the others */
    part to;                /* the result, with the axes that stay */
    fan_nditer w;           /* over kept and to */
    fan_dtype dtype;        /* to which each element is rounded first */
    fan_dtype acc;          /* in which they are added: no narrower */
    const fan_loops *loops; /* of acc */
} reduction;

/* reduce_read: reads the elements [at, at + n) as elements of acc; they take RUN * 16 bytes at
 * most. */
static void reduce_read(const reduction *r, const fan_nditer *w, const fan_array *a, int64_t at,
                        int64_t n, char *to)
{
    FAN_UNINITIALIZED _Alignas(64) char rounded[RUN * 16];
    if (r->dtype == a->dtype || r->dtype == r->acc) {
        fan_nditer_read(w, a, at, n, r->acc, to);
        return;
    }
    fan_nditer_read(w, a, at, n, r->dtype, rounded);
    fan_convert_dense(to, r->acc, rounded, r->dtype, n);
}

/* A row: elements [at, at + n) of the result while they are summed. */
typedef struct reduce_row {
    const reduction *of;
    int64_t at, n;
} reduce_row;

/* row_terms: adds the terms k, k + step, .. before `end` to `sum`; false: interrupted. */
static bool row_terms(const reduce_row *row, int64_t k, int64_t step, int64_t end, char *sum)
{
    FAN_UNINITIALIZED _Alignas(64) char scratch[ROW_BYTES];
    const reduction *r = row->of;
    fan_array from = r->kept.a;
    char *to = sum; /* the first term starts the sum */
    for (; k < end; k += step) {
        from.data = r->kept.a.data + gone_at(&r->gone, k);
        reduce_read(r, &r->w, &from, row->at, row->n, to);
        if (to == scratch)
            row_add(r->loops, sum, scratch, (size_t)row->n * r->loops->parts);
        if (fan_interrupted(row->n))
            return false;
        to = scratch;
    }
    return true;
}

/* row_group: adds the terms [k, end), at most a group, which lanes share; false: interrupted. */
static bool row_group(const reduce_row *row, int64_t k, int64_t end, char *group)
{
    FAN_UNINITIALIZED _Alignas(64) char lane[ROW_BYTES];
    const fan_loops *loops = row->of->loops;
    if (!row_terms(row, k, LANES, end, group))
        return false;
    for (int64_t j = k + 1; j < end && j < k + LANES; j++) {
        if (!row_terms(row, j, LANES, end, lane))
            return false;
        row_add(loops, group, lane, (size_t)row->n * loops->parts);
    }
    return true;
}

/* by_rows: adds one row to a row of the result for each element of the reduced axes. */
static void by_rows(const reduction *r)
{
    FAN_UNINITIALIZED _Alignas(64) char sum[ROW_BYTES];
    FAN_UNINITIALIZED reduce_runs runs;
    reduce_row row = {.of = r};
    int64_t size = fan_dtype_step(r->acc);
    int64_t most = ROW_BYTES / size;
    int64_t terms = r->gone.a.size;
    for (; row.at < r->w.size; row.at += row.n) {
        row.n = fan_min(r->w.size - row.at, most);
        if (terms <= RUN) {
            if (!row_terms(&row, 0, 1, terms, sum))
                return;
            fan_nditer_write(&r->w, &r->to.a, row.at, row.n, r->acc, sum);
            continue;
        }
        size_t bytes = (size_t)(row.n * size);
        runs_begin(&runs, r->loops, (size_t)row.n);
        for (int64_t k = 0; k < terms; k += GROUP) {
            if (!row_group(&row, k, fan_min(terms, k + GROUP), sum))
                return;
            runs_add(&runs, sum, bytes);
        }
        fan_nditer_write(&r->w, &r->to.a, row.at, row.n, r->acc, runs_end(&runs, bytes));
    }
}

static void lanes_add_doubles(double *restrict lanes, const double *restrict terms, size_t rows,
                              size_t wide)
{
    for (size_t j = 0; j < wide; j += 8) { /* eight sums in registers */
        double sum[8];
        memcpy(sum, lanes + j, sizeof sum);
        for (size_t k = 0; k < rows; k++) {
            for (size_t i = 0; i < 8; i++)
                sum[i] += terms[k * wide + j + i];
        }
        memcpy(lanes + j, sum, sizeof sum);
    }
}

/* lanes_add: adds n consecutive terms; fresh: they start the lanes. */
static void lanes_add(fan_dtype acc, char *lanes, const char *terms, size_t n, bool fresh)
{
    const fan_loops *loops = fan_loops_of(acc);
    size_t size = fan_dtype_size(acc);
    size_t from = 0;
    if (fresh) {
        from = fan_umin(n, LANES);
        memcpy(lanes, terms, from * size);
    }
    if (acc == FAN_DT_FLOAT64 || acc == FAN_DT_COMPLEX128) {
        size_t rows = (n - from) / LANES;
        lanes_add_doubles((void *)lanes, (const void *)(terms + from * size), rows,
                          LANES * loops->parts);
        from += rows * LANES;
    }
    while (from < n) {
        size_t m = fan_umin(n - from, LANES);
        row_add(loops, lanes, terms + from * size, m * loops->parts);
        from += m;
    }
}

/* The reduced axes as one run of terms. */
typedef struct reduce_run {
    const reduction *of;
    fan_nditer walk;
    fan_array terms;
    bool dealt; /* to lanes */
} reduce_run;

/* group_sum: sums the terms [k, end), at most a group, into `sum`. */
static void group_sum(const reduce_run *run, int64_t k, int64_t end, char *sum)
{
    FAN_UNINITIALIZED _Alignas(64) char scratch[RUN * 16], lanes[LANES * 16];
    const reduction *r = run->of;
    size_t size = fan_dtype_size(r->acc);
    for (int64_t at = k; at < end; at += RUN) {
        int64_t n = fan_min(end - at, RUN);
        reduce_read(r, &run->walk, &run->terms, at, n, scratch);
        if (run->dealt)
            lanes_add(r->acc, lanes, scratch, (size_t)n, at == k);
    }
    const char *terms = scratch;
    int64_t n = end - k;
    if (run->dealt) {
        terms = lanes;
        n = fan_min(n, LANES);
    }
    memcpy(sum, terms, size); /* the first is not added to zero */
    r->loops->add_up(sum, terms + size, (size_t)n - 1);
}

/* by_elements: sums each element of the result as one run over the reduced axes. */
static void by_elements(const reduction *r)
{
    FAN_UNINITIALIZED reduce_run run;
    FAN_UNINITIALIZED reduce_runs runs;
    _Alignas(16) char sum[16];
    size_t size = fan_dtype_size(r->acc);
    int64_t terms = r->gone.a.size;
    run.of = r;
    run.terms = r->gone.a;
    run.dealt = terms > RUN;
    fan_nditer_one(&run.walk, &run.terms, true);
    for (int64_t at = 0; at < r->w.size; at++) {
        run.terms.data = fan_nditer_whole(&r->w, &r->kept.a, at, 1);
        runs_begin(&runs, r->loops, 1);
        for (int64_t k = 0; k < terms; k += GROUP) {
            int64_t end = fan_min(terms, k + GROUP);
            group_sum(&run, k, end, sum);
            runs_add(&runs, sum, size);
            if (fan_interrupted(end - k))
                return;
        }
        fan_nditer_write(&r->w, &r->to.a, at, 1, r->acc, runs_end(&runs, size));
    }
}

void fan_reduce(const fan_array *out, const fan_array *in, fan_dtype dtype)
{
    FAN_UNINITIALIZED reduction r;
    FAN_DEFAULT_FLOAT_MODE;
    int lead = in->ndim - out->ndim;
    if (out->size == 0)
        return;
    if (in->size == 0) { /* an axis of extent 0 is reduced */
        fan_fill_zero(out);
        return;
    }
    part_begin(&r.kept, in);
    part_begin(&r.gone, in);
    part_begin(&r.to, out);
    for (int i = 0; i < in->ndim; i++) {
        int64_t extent = in->shape[i];
        bool stays = i >= lead && out->shape[i - lead] == extent;
        if (!stays) {
            part_axis(&r.gone, extent, in->strides[i]);
            continue;
        }
        part_axis(&r.kept, extent, in->strides[i]);
        part_axis(&r.to, extent, out->strides[i - lead]);
    }
    r.dtype = dtype;
    r.acc = fan_reduce_dtype(dtype);
    r.loops = fan_loops_of(r.acc);
    fan_nditer_begin(&r.w, &r.kept.a, false);
    fan_nditer_also(&r.w, &r.to.a);
    fan_nditer_ready(&r.w);
    bool near = r.kept.a.size < 16 || r.gone.nearest < r.kept.nearest;
    if (near && r.gone.a.size >= 64)
        by_elements(&r);
    else
        by_rows(&r);
}
