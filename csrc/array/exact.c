/* exact: see exact.h. In this order: terms, which window.c reads, too; tiles.
 *
 * Design: a tile of the sum is first computed fast, in float64, together with a proof for each
 * element that it is right; an element without a proof is summed again in integers, which is always
 * right and ten times slower.
 *
 * A sum of float32 (or narrower) in float64. Let every term be an integer multiple of a unit u, and
 * n * max|x| <= 2^53 u: then no partial sum loses a bit, in any order. A term of p digits is a
 * multiple of a unit above min|x| * 2^-p. So beside the sum we keep min|x| over the nonzero terms,
 * and max|x|, as integers (the bits of positive floats are ordered; a zero, less one, is the
 * largest of all):
 *
 *   exact     n * max|x| <= min|x| * 2^(53 - p)
 *   near      n * n * max|x| * 2^-52 bounds the loss: both ends of sum -+ that round alike (no tie
 * between them)
 *
 * For float16 and float8 the first always holds: their largest value is few units (float16: 2^40,
 * so n <= 2^13).
 *
 * A sum of float64 is kept as sum + rest, where rest gathers the loss of each addition (TwoSum: it
 * is a float64). The loss of rest itself:
 *
 *   exact     n * n * max|x| <= min|x| * 2^53: none
 *   near      n * n * n * max|x| * 2^-105 at most: both ends of sum + (rest -+ that) round alike
 *
 * The integer path: the sum as an integer multiple of the dtype's smallest step, in two's
 * complement, with as many limbs as its largest value needs. Spare values of its top limb represent
 * inf and NaN.
 *
 * Rounding once: a tile's result is a float64 that is the exact sum, or lies between the same two
 * neighbours of the result dtype (near), or was rounded to odd: its last bit is set if anything was
 * lost, so that the next rounding, to a type of 51 digits or fewer, equals that of the exact
 * value. The product of an exact sum of float32 with a factor is rounded to odd, too. */
#include "array/exact.h"

#include "array/convert.h"
#include "array/exact_loops.h"
#include "array/exact_weighted.h"
#include "array/lowp.h"
#include "array/nditer.h"
#include "base/fault.h"
#include "base/float_mode.h"
#include "base/interrupt.h"

#include <string.h>

/* rows at least this long are not mixed in one tile, so that they can be read in place */
#define LONG_ROW 128
#define LONG_RUN 4096 /* elements at once for sums that need no proof */
#define BATCH 32      /* elements that take the integer path together */

bool fan_exact_fits(fan_dtype d)
{
    return fan__exact_kind_of(d).limbs != 0;
}

#ifdef FAN_TEST
static atomic_int_fast64_t slow_ones;

int64_t fan_exact_slow(void)
{
    return atomic_load_explicit(&slow_ones, memory_order_relaxed);
}
#endif

/* ---- terms; also for window.c ---- */

static const fan_array *exact_operand(const exact_job *j, size_t k)
{
    return *(const fan_array *const *)(const void *)(j->in + k * j->step);
}

void fan__exact_job_begin(exact_job *j, const void *in, size_t step, size_t n, fan_dtype d)
{
    bool as_it_is = fan__exact_is_wide(d) || d == FAN_DT_COMPLEX64;
    j->in = in;
    j->step = step;
    j->n = n;
    j->d = d;
    j->k = fan__exact_kind_of(d);
    j->parts = fan__exact_parts(d);
    j->read = FAN_DT_FLOAT32;
    if (as_it_is)
        j->read = d;
    j->loops = fan__exact_loops();
    j->j = (judge){.n = n,
                   .digits = j->k.digits,
                   .always = j->k.always && n <= FAN_EXACT_ALWAYS,
                   .grid = TO_DOUBLE,
                   .shifts = true,
                   .by = 1.0};
}

/* exact_low_ways: returns the conversions of a low dtype to and from float32; NULL if it has no
 * loop. */
static const low_ways *exact_low_ways(const exact_loops *loops, fan_dtype d)
{
    if (loops->low[d].up)
        return &loops->low[d];
    return NULL;
}

const char *fan__exact_term(const exact_job *j, size_t k, int64_t at, int64_t len, char *room)
{
    const fan_array *a = exact_operand(j, k);
    if (a->dtype != j->d && j->d != j->read) {
        /* converted from another dtype to a low one: rounded to that first */
        FAN_UNINITIALIZED char rounded_first[FAN_EXACT_TILE * 2];
        fan_nditer_read(&j->iter, a, at, len, j->d, rounded_first);
        fan_convert_dense(room, j->read, rounded_first, j->d, len);
        return room;
    }
    const low_ways *low = NULL;
    const char *p = NULL;
    if (j->read == FAN_DT_FLOAT32)
        low = exact_low_ways(j->loops, a->dtype);
    if (low)
        p = fan_nditer_whole(&j->iter, a, at, len);
    if (!p)
        return fan_nditer_elements(&j->iter, a, at, len, j->read, room);
    low->up((void *)room, p, (size_t)len);
    return room;
}

bool fan__exact_scale_begin(judge *j, const fan_scale *scale, bool is_complex)
{
    if (!scale || !scale->on)
        return false;
    if (is_complex && scale->im != 0) {
        j->grid = TO_DOUBLE;
        return true;
    }
    j->scaled = true;
    j->by = scale->re;
    j->shifts = !(bits_of(scale->re) << 12);
    return false;
}

void fan__exact_set_grid(judge *j, fan_dtype out)
{
    j->grid = TO_LOW;
    if (fan__exact_is_wide(out))
        j->grid = TO_DOUBLE;
    else if (out == FAN_DT_FLOAT32 || out == FAN_DT_COMPLEX64)
        j->grid = TO_SINGLE;
}

/* ---- tiles ---- */

/* Neutral operands, for fewer sources than a loop takes. */
static const float no_single[FAN_EXACT_TILE] = {[0 ... FAN_EXACT_TILE - 1] = -0.0f};
static const double no_double[FAN_EXACT_TILE] = {[0 ... FAN_EXACT_TILE - 1] = -0.0};
static const uint16_t no_brain[LONG_RUN] = {[0 ... LONG_RUN - 1] = 0x8000};

/* Room for terms that cannot be read in place. */
typedef struct scratch {
    _Alignas(64) char term[FAN_EXACT_SOURCES][FAN_EXACT_TILE * sizeof(double)];
} scratch;

/* exact_prove: leaves the values to round in t->sum; returns whether some are not proved. */
static bool exact_prove(const exact_job *j, tally *t, size_t numbers)
{
    bool is_wide = fan__exact_is_wide(j->d);
    bool again = j->j.scaled || (is_wide && j->j.grid != TO_DOUBLE);
    bool bad = false;
    judge first = j->j;
    if (again)
        first.grid = TO_DOUBLE;
    if (is_wide)
        bad = j->loops->judge_wide(t, &first, numbers);
    else if (!first.always)
        bad = j->loops->judge_narrow(t, &first, numbers);
    if (!again)
        return bad;
    if (is_wide)
        return j->loops->products_wide(t, &j->j, numbers);
    return j->loops->products_narrow(t, &j->j, numbers);
}

/* direct_of: returns the loop from the operands straight to `out`; NULL if there is none. */
static exact_direct direct_of(const exact_job *j, const fan_array *out)
{
    int factor = NO_FACTOR;
    if (j->j.scaled)
        factor = PRODUCT;
    if (j->j.scaled && j->j.shifts)
        factor = SHIFT;
    if (j->n > FAN_EXACT_SOURCES || out->dtype != j->d)
        return NULL;
    for (size_t k = 0; k < j->n; k++) {
        const fan_array *a = exact_operand(j, k);
        /* the result may be discarded, so it must not overwrite operands */
        if (a->dtype != j->d || a->data == out->data)
            return NULL;
    }
    switch (j->d) {
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64:
        return j->loops->single[factor];
    case FAN_DT_FLOAT64:
    case FAN_DT_COMPLEX128:
        return j->loops->twice[factor];
    case FAN_DT_BFLOAT16:
        return j->loops->brain[factor];
    case FAN_DT_FLOAT16:
        return j->loops->half_sum[factor];
    default:
        return NULL;
    }
}

/* The loop straight to the result. After a failure the quick way is not tried for some tiles. */
typedef struct direct {
    exact_direct loop; /* NULL: none */
    unsigned shy;      /* tiles for which the quick way is not tried */
    unsigned grown;    /* .. after the next failure: more with each */
} direct;

/* neutral: returns the operand beside a sum's operands in their own dtype. */
static const char *neutral(const exact_job *j)
{
    if (fan__exact_is_wide(j->d))
        return (const char *)no_double;
    if (exact_low_ways(j->loops, j->d))
        return (const char *)no_brain;
    return (const char *)no_single;
}

/* exact_went: processes elements [at, at + len) straight; false if one of them needs more than
 * that, or has gaps. */
static bool exact_went(const exact_job *j, direct *go, const fan_array *out, int64_t at,
                       int64_t len)
{
    const char *src[FAN_EXACT_SOURCES];
    char *dst = fan_nditer_whole(&j->iter, out, at, len);
    int sources = (int)j->n;
    if (!dst)
        return false;
    for (size_t k = 0; k < FAN_EXACT_SOURCES; k++) {
        src[k] = neutral(j);
        if (k < j->n)
            src[k] = fan_nditer_whole(&j->iter, exact_operand(j, k), at, len);
        if (!src[k])
            return false;
    }
    size_t numbers = (size_t)len * j->parts;
    if (go->shy > 0) {
        go->shy--;
        return !go->loop(dst, src, sources, &j->j, numbers, false);
    }
    if (!go->loop(dst, src, sources, &j->j, numbers, true)) {
        go->grown = 0;
        return true;
    }
    if (go->grown < 64)
        go->grown = 2 * go->grown + 1;
    go->shy = go->grown;
    return !go->loop(dst, src, sources, &j->j, numbers, false);
}

/* exact_integer_path: sums the unproved elements of a tile in integers. */
static void exact_integer_path(const exact_job *j, int64_t at, size_t numbers, tally *t,
                               scratch *room)
{
    FAN_UNINITIALIZED uint64_t words[BATCH * FAN_EXACT_LIMBS];
    size_t which[BATCH];
    size_t w = (size_t)j->k.limbs;
    const double *factor = j->j.scaled ? &j->j.by : NULL;
    for (size_t i = 0; i < numbers;) {
        size_t m = 0;
        for (; i < numbers && m < BATCH; i++) {
            if (t->bad[i])
                which[m++] = i;
        }
        if (m == 0)
            break;
        for (size_t b = 0; b < m; b++)
            fan__superacc_start(words + b * w, &j->k);

        size_t from = which[0] / j->parts;
        int64_t len = (int64_t)(which[m - 1] / j->parts - from) + 1;
        for (size_t k = 0; k < j->n; k++) {
            const char *p = fan__exact_term(j, k, at + (int64_t)from, len, room->term[0]);
            for (size_t b = 0; b < m; b++) {
                double x = fan__exact_number(j, p, which[b] - from * j->parts);
                fan__superacc_add(words + b * w, &j->k, x);
            }
        }
        for (size_t b = 0; b < m; b++) {
            t->sum[which[b]] =
                fan__superacc_value(words + b * w, &j->k, factor, j->j.grid != TO_DOUBLE);
        }
#ifdef FAN_TEST
        atomic_fetch_add_explicit(&slow_ones, (int64_t)m, memory_order_relaxed);
#endif
    }
}

/* exact_tile: leaves the values of elements [at, at + len), to be rounded to the result, in
 * t->sum. */
static void exact_tile(const exact_job *j, int64_t at, int64_t len, tally *t, scratch *room)
{
    size_t numbers = (size_t)len * j->parts;
    const char *src[FAN_EXACT_SOURCES];
    const char *none = (const char *)no_single;
    exact_tile_loop add = j->loops->narrow;
    if (j->j.always)
        add = j->loops->plain;
    if (fan__exact_is_wide(j->d)) {
        none = (const char *)no_double;
        add = j->loops->wide;
    }
    for (size_t k = 0; k < j->n; k += FAN_EXACT_SOURCES) {
        for (size_t i = 0; i < FAN_EXACT_SOURCES; i++) {
            src[i] = none;
            if (k + i < j->n)
                src[i] = fan__exact_term(j, k + i, at, len, room->term[i]);
        }
        add(t, src, k == 0, numbers);
    }
    if (exact_prove(j, t, numbers) && !FAN_FAULT(EXACT_NO_INTEGER_PATH))
        exact_integer_path(j, at, numbers, t, room);
}

/* exact_write: rounds the values of a tile to the result. */
static void exact_write(const exact_job *j, const fan_array *out, int64_t at, int64_t len, tally *t)
{
    if (j->parts == 2 || j->j.grid != TO_LOW) {
        fan_dtype values = fan__exact_values(j->parts);
        fan_nditer_write(&j->iter, out, at, len, values, (const char *)t->sum);
        return;
    }
    const low_ways *low = exact_low_ways(j->loops, out->dtype);
    char *whole = NULL;
    j->loops->odd(t->odd, t->sum, (size_t)len);
    if (low)
        whole = fan_nditer_whole(&j->iter, out, at, len);
    if (whole)
        low->down(whole, t->odd, (size_t)len);
    else
        fan_nditer_write(&j->iter, out, at, len, FAN_DT_FLOAT32, (const char *)t->odd);
}

static void exact_sum(const fan_array *out, const void *in, size_t step, size_t n, fan_dtype d,
                      const fan_scale *scale)
{
    FAN_UNINITIALIZED exact_job j;
    FAN_UNINITIALIZED _Alignas(64) tally t;
    FAN_UNINITIALIZED scratch room;
    FAN_DEFAULT_FLOAT_MODE;
    if (out->size == 0)
        return;
    fan__exact_job_begin(&j, in, step, n, d);
    fan__exact_set_grid(&j.j, out->dtype);
    bool turns = fan__exact_scale_begin(&j.j, scale, j.parts == 2);
    fan_nditer_begin(&j.iter, out, false);
    for (size_t k = 0; k < n; k++)
        fan_nditer_also(&j.iter, exact_operand(&j, k));
    fan_nditer_ready(&j.iter);

    int64_t most = FAN_EXACT_TILE / (int64_t)j.parts;
    int64_t run = most;
    if (d == FAN_DT_FLOAT16)
        run = LONG_RUN;
    int64_t row = 0;
    if (j.iter.ndim > 1)
        row = j.iter.extent[j.iter.ndim - 1];
    direct go = {.loop = NULL};
    if (!turns)
        go.loop = direct_of(&j, out);
    int64_t len;
    for (int64_t at = 0; at < j.iter.size && !fan_interrupted(most); at += len) {
        int64_t rest = j.iter.size - at;
        if (row >= LONG_ROW)
            rest = row - at % row;
        len = fan_min(rest, run);
        if (go.loop && exact_went(&j, &go, out, at, len))
            continue;
        len = fan_min(rest, most);
        exact_tile(&j, at, len, &t, &room);
        if (turns)
            fan__exact_turn(t.sum, len, scale);
        exact_write(&j, out, at, len, &t);
    }
}

#ifdef FAN_TEST
void fan_exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d,
                   const fan_scale *scale)
{
    exact_sum(out, in, sizeof *in, n, d, scale);
}
#endif

void fan_exact_fold(const fan_array *out, const fan_operand *in, size_t n, fan_dtype d,
                    const fan_scale *scale)
{
    bool weighted = scale && scale->divisor;
    for (size_t k = 0; k < n; k++)
        weighted = weighted || in[k].weight.on;
    if (weighted) {
        fan_exact_weighted(out, in, n, d, scale);
        return;
    }
    exact_sum(out, &in->array, sizeof *in, n, d, scale);
}
