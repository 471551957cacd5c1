/* exact_weighted: see exact_weighted.h. In this order: the accumulator; the quotient; a tile; the
 * sum.
 *
 * Each number of a tile has an accumulator: an integer multiple of 2^-2148, in two's complement,
 * which holds the sum of 2^31 products of two float64. A product of two mantissas has 106 bits and
 * goes to its place as three words, with carries. The quotient of two such integers is made bit by
 * bit, 66 bits and whether anything is left; so one rounding, to nearest even or to odd, is the
 * only one. */
#include "array/exact_weighted.h"

#include "array/convert.h"
#include "array/exact_loops.h"
#include "array/nditer.h"
#include "array/superacc.h"
#include "base/fault.h"
#include "base/float_mode.h"
#include "base/interrupt.h"

#include <math.h>
#include <string.h>

#define WORDS 68  /* of an accumulator */
#define UNIT 2148 /* its unit is 2^-UNIT */
#define TILE_ELEMENTS 32

/* ---- the accumulator ---- */

typedef enum accumulator_kind {
    ONLY_MINUS_ZERO,
    A_NUMBER,
    PLUS_INFINITE,
    MINUS_INFINITE,
    NOT_A_NUMBER
} accumulator_kind;

typedef struct accumulator {
    accumulator_kind kind;
    uint64_t words[WORDS];
} accumulator;

static void accumulator_start(accumulator *a)
{
    a->kind = ONLY_MINUS_ZERO;
    memset(a->words, 0, sizeof a->words);
}

/* Adds an inf or a NaN. */
static void accumulator_add_special(accumulator *a, double x)
{
    accumulator_kind kind = NOT_A_NUMBER;
    if (x > 0)
        kind = PLUS_INFINITE;
    else if (x < 0)
        kind = MINUS_INFINITE;
    bool finite = a->kind == ONLY_MINUS_ZERO || a->kind == A_NUMBER;
    if (finite || a->kind == kind)
        a->kind = kind;
    else
        a->kind = NOT_A_NUMBER;
}

/* Adds the three words of a magnitude at word `first`, or subtracts them. */
static void accumulator_add_words(uint64_t *words, int first, const uint64_t piece[3], bool minus)
{
    uint64_t carry = 0;
    for (int i = first; i < WORDS; i++) {
        uint64_t part = 0;
        if (i - first < 3)
            part = piece[i - first];
        else if (!carry)
            return;
        uint64_t old = words[i];
        uint64_t sum;
        if (minus) {
            sum = old - part;
            words[i] = sum - carry;
            carry = (sum > old) | (words[i] > sum);
        } else {
            sum = old + part;
            words[i] = sum + carry;
            carry = (sum < old) | (words[i] < sum);
        }
    }
}

/* Adds the product of two numbers; `by` is finite. */
static void accumulator_add_product(accumulator *a, double x, double by)
{
    bool minus = signbit(x) != signbit(by);
    if (x - x != 0) { /* the product is an inf, or no number: it is exact as float64 has it */
        accumulator_add_special(a, x * by);
        return;
    }
    if (a->kind > A_NUMBER)
        return;
    if (x == 0 || by == 0) {
        if (!minus)
            a->kind = A_NUMBER;
        return;
    }
    a->kind = A_NUMBER;
    int exponent;
    int exponent_by;
    unsigned __int128 m = fan__number_parts(x, &exponent);
    m *= fan__number_parts(by, &exponent_by);
    int at = exponent + exponent_by + UNIT;
    int bit = at & 63;
    uint64_t low = (uint64_t)m;
    uint64_t high = (uint64_t)(m >> 64);
    uint64_t piece[3] = {low << bit, high << bit, 0};
    if (bit) {
        piece[1] |= low >> (64 - bit);
        piece[2] = high >> (64 - bit);
    }
    accumulator_add_words(a->words, at >> 6, piece, minus);
}

/* ---- magnitudes and their quotient ---- */

/* A positive integer times 2^exponent; n is 0 for 0. */
typedef struct magnitude {
    int n;
    int64_t exponent;
    uint64_t words[2 * WORDS];
} magnitude;

/* The magnitude of an accumulator that is a number; *minus: it is negative. */
static void magnitude_of(const accumulator *a, magnitude *m, bool *minus)
{
    uint64_t all[WORDS];
    int low = WORDS;
    *minus = a->words[WORDS - 1] >> 63;
    uint64_t carry = *minus;
    m->n = 0;
    for (int i = 0; i < WORDS; i++) {
        all[i] = (*minus ? ~a->words[i] : a->words[i]) + carry;
        carry = carry && all[i] == 0;
        if (!all[i])
            continue;
        if (low == WORDS)
            low = i;
        m->n = i - low + 1;
    }
    m->exponent = (int64_t)low * 64 - UNIT;
    if (m->n)
        memcpy(m->words, all + low, (size_t)m->n * sizeof *all);
}

/* Multiplies by a positive float64. */
static void magnitude_times(magnitude *m, double by)
{
    int exponent;
    uint64_t factor = fan__number_parts(by, &exponent);
    unsigned __int128 over = 0;
    for (int i = 0; i < m->n; i++) {
        over += (unsigned __int128)m->words[i] * factor;
        m->words[i] = (uint64_t)over;
        over >>= 64;
    }
    if (over)
        m->words[m->n++] = (uint64_t)over;
    m->exponent += exponent;
}

static int64_t magnitude_bits(const magnitude *m)
{
    return (int64_t)m->n * 64 - __builtin_clzll(m->words[m->n - 1]);
}

/* Shifts left by `bits`, into n words: one more than the shifted number needs. */
static void words_shift(const magnitude *m, int64_t bits, uint64_t *out, int n)
{
    int whole = (int)(bits >> 6);
    int part = (int)(bits & 63);
    memset(out, 0, (size_t)n * sizeof *out);
    for (int i = 0; i < m->n; i++) {
        out[i + whole] |= m->words[i] << part;
        if (part)
            out[i + whole + 1] |= m->words[i] >> (64 - part);
    }
}

static bool words_at_least(const uint64_t *a, const uint64_t *b, int n)
{
    for (int i = n - 1; i >= 0; i--) {
        if (a[i] != b[i])
            return a[i] > b[i];
    }
    return true;
}

static void words_subtract(uint64_t *a, const uint64_t *b, int n)
{
    uint64_t borrow = 0;
    for (int i = 0; i < n; i++) {
        uint64_t old = a[i];
        uint64_t rest = old - b[i];
        a[i] = rest - borrow;
        borrow = (rest > old) | (a[i] > rest);
    }
}

static void words_double(uint64_t *a, int n)
{
    for (int i = n - 1; i > 0; i--)
        a[i] = a[i] << 1 | a[i - 1] >> 63;
    a[0] <<= 1;
}

/* What rounding needs: m * 2^(exponent - 63) with the highest bit of m set, and whether there is
 * more. */
typedef struct leading {
    uint64_t m;
    bool more;
    int64_t exponent;
} leading;

static leading leading_of(const magnitude *m)
{
    const uint64_t *words = m->words;
    int high = m->n - 1;
    int lead = __builtin_clzll(words[high]);
    leading l = {.m = words[high] << lead};
    if (high > 0 && lead)
        l.m |= words[high - 1] >> (64 - lead);
    if (high > 0)
        l.more = words[high - 1] << lead;
    for (int i = high - 2; i >= 0; i--)
        l.more |= words[i] != 0;
    l.exponent = m->exponent + magnitude_bits(m) - 1;
    return l;
}

/* The quotient: both are shifted to one length, and 66 bits are made. */
static leading leading_of_quotient(const magnitude *x, const magnitude *y)
{
    uint64_t rest[2 * WORDS + 2];
    uint64_t by[2 * WORDS + 2];
    int64_t bits_x = magnitude_bits(x);
    int64_t bits_y = magnitude_bits(y);
    int64_t most = fan_max(bits_x, bits_y);
    int n = (int)(most / 64) + 2;
    words_shift(x, most - bits_x, rest, n);
    words_shift(y, most - bits_y, by, n);
    unsigned __int128 quotient = 0;
    for (int i = 0; i < 66; i++) {
        quotient <<= 1;
        if (words_at_least(rest, by, n)) {
            words_subtract(rest, by, n);
            quotient |= 1;
        }
        words_double(rest, n);
    }
    leading l = {.more = false};
    for (int i = 0; i < n; i++)
        l.more |= rest[i] != 0;
    /* the quotient is between 2^64 and 2^66 */
    int lead = 1 + (quotient >> 65 != 0);
    l.m = (uint64_t)(quotient >> lead);
    l.more |= ((uint64_t)quotient & ((1u << lead) - 1)) != 0;
    l.exponent = (x->exponent + bits_x) - (y->exponent + bits_y) + (lead - 2);
    return l;
}

/* ---- a tile ---- */

typedef struct weighted_job {
    const fan_operand *in;
    size_t n, parts;
    fan_dtype d;
    bool odd;
    double factor;       /* real; 1: there is none */
    bool divides, minus; /* the divisor is negative */
    magnitude divisor;
    fan_nditer iter;
} weighted_job;

/* The value of a sum that is no number, or 0, as float64 arithmetic has it. */
static double special_value(accumulator_kind kind)
{
    switch (kind) {
    case ONLY_MINUS_ZERO:
        return -0.0;
    case PLUS_INFINITE:
        return (double)INFINITY;
    case MINUS_INFINITE:
        return -(double)INFINITY;
    case NOT_A_NUMBER:
        return (double)NAN;
    default:
        return 0.0;
    }
}

static double weighted_value(const weighted_job *j, const accumulator *a)
{
    magnitude m;
    bool minus = false;
    m.n = 0;
    if (a->kind == A_NUMBER)
        magnitude_of(a, &m, &minus);
    bool special_factor = j->factor - j->factor != 0 || j->factor == 0;
    if (m.n == 0 || special_factor) {
        double value = special_value(a->kind);
        if (m.n)
            value = minus ? -1.0 : 1.0;
        if (j->divides && j->minus)
            value = -value;
        return value * j->factor;
    }
    if (j->factor != 1) {
        magnitude_times(&m, fabs(j->factor));
        minus ^= signbit(j->factor) != 0;
    }
    leading l;
    if (j->divides) {
        l = leading_of_quotient(&m, &j->divisor);
        minus ^= j->minus;
    } else {
        l = leading_of(&m);
    }
    uint64_t bits = fan__magnitude_round(l.m, l.more, l.exponent, j->odd);
    return of_bits(bits | (uint64_t)minus << 63);
}

/* Adds `len` elements of one operand, which are float64 numbers at x, to their accumulators. */
static void weighted_add(const weighted_job *j, const fan_operand *one, const double *x,
                         int64_t len, accumulator *sums)
{
    double re = 1.0;
    double im = 0.0;
    if (one->weight.on) {
        re = one->weight.re;
        im = one->weight.im;
    }
    size_t numbers = (size_t)len * j->parts;
    for (size_t i = 0; i < numbers; i++)
        accumulator_add_product(&sums[i], x[i], re);
    if (im == 0)
        return;
    for (size_t i = 0; i < numbers; i += 2) {
        accumulator_add_product(&sums[i], x[i + 1], -im);
        accumulator_add_product(&sums[i + 1], x[i], im);
    }
}

/* Sums elements [at, at + len) into `values`. */
static void weighted_tile(const weighted_job *j, int64_t at, int64_t len, accumulator *sums,
                          double *values)
{
    _Alignas(16) char rounded[TILE_ELEMENTS * 16];
    double x[TILE_ELEMENTS * 2];
    size_t numbers = (size_t)len * j->parts;
    fan_dtype wide = fan__exact_values(j->parts);
    for (size_t i = 0; i < numbers; i++)
        accumulator_start(&sums[i]);
    for (size_t k = 0; k < j->n; k++) {
        fan_nditer_read(&j->iter, j->in[k].array, at, len, j->d, rounded);
        fan_convert_dense((char *)x, wide, rounded, j->d, len);
        weighted_add(j, &j->in[k], x, len, sums);
    }
    for (size_t i = 0; i < numbers; i++)
        values[i] = weighted_value(j, &sums[i]);
}

/* ---- the sum ---- */

static void weighted_set_divisor(weighted_job *j, const fan_divisor *divisor)
{
    accumulator sum;
    accumulator_start(&sum);
    for (int i = 0; i < divisor->n; i++)
        accumulator_add_product(&sum, divisor->parts[i], 1.0);
    if (FAN_FAULT(DIVISOR_ROUNDED_EARLY)) {
        accumulator_start(&sum);
        accumulator_add_product(&sum, (double)(float)divisor->nearest, 1.0);
    }
    magnitude_of(&sum, &j->divisor, &j->minus);
    j->divides = true;
}

/* Writes a tile: rounded to odd first, where the result is narrower than float64. */
static void weighted_write(const weighted_job *j, const fan_array *out, int64_t at, int64_t len,
                           const double *values)
{
    float odd[TILE_ELEMENTS];
    bool low = j->odd && out->dtype != FAN_DT_FLOAT32 && j->parts == 1;
    if (!low) {
        fan_dtype wide = fan__exact_values(j->parts);
        fan_nditer_write(&j->iter, out, at, len, wide, (const char *)values);
        return;
    }
    fan__exact_loops()->odd(odd, values, (size_t)len);
    fan_nditer_write(&j->iter, out, at, len, FAN_DT_FLOAT32, (const char *)odd);
}

void fan_exact_weighted(const fan_array *out, const fan_operand *in, size_t n, fan_dtype d,
                        const fan_scale *scale)
{
    FAN_UNINITIALIZED accumulator sums[2 * TILE_ELEMENTS];
    double values[2 * TILE_ELEMENTS];
    FAN_DEFAULT_FLOAT_MODE;
    if (out->size == 0)
        return;
    weighted_job j = {.in = in, .n = n, .d = d, .factor = 1.0};
    j.parts = fan__exact_parts(d);
    bool scaled = scale && scale->on;
    bool turns = scaled && j.parts == 2 && scale->im != 0;
    j.odd = !fan__exact_is_wide(out->dtype) && !turns;
    if (scaled && !turns)
        j.factor = scale->re;
    if (scale && scale->divisor)
        weighted_set_divisor(&j, scale->divisor);
    fan_nditer_begin(&j.iter, out, false);
    for (size_t k = 0; k < n; k++)
        fan_nditer_also(&j.iter, in[k].array);
    fan_nditer_ready(&j.iter);
    int64_t len;
    for (int64_t at = 0; at < j.iter.size && !fan_interrupted(TILE_ELEMENTS); at += len) {
        len = fan_min(j.iter.size - at, TILE_ELEMENTS);
        weighted_tile(&j, at, len, sums, values);
        if (turns)
            fan__exact_turn(values, len, scale);
        weighted_write(&j, out, at, len, values);
    }
}
