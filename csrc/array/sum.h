/* sum: N arrays into one, in one pass: the left fold D1 in the accumulation dtype D2, widening as
 * in D3, one rounding.
 *
 *   out[i] = round((((in0[i]) + in1[i]) + in2[i]) / divisor * scale)
 *
 * Each in[k] is first converted to acc[k], and multiplied by its weight, where it has one (W1).
 *
 * The order over k is fixed; tiles, vector width and threads never change a bit (no contraction to
 * FMA). */
#ifndef FAN_ARRAY_SUM_H
#define FAN_ARRAY_SUM_H

#include "array/array.h"
#include "array/stats.h"

/* A weight multiplies an operand: it is rounded to the accumulation dtype, and so is the product,
 * before it is added. Of an integer sum `re` is an integer. Not `on`: there is none. */
typedef struct fan_weight {
    bool on;
    bool integer; /* it was given as an int: what an object is multiplied by */
    double re, im;
} fan_weight;

typedef struct fan_operand {
    /* same shape as out; any strides (0, negative, unaligned too); if out is this operand: the same
     * view */
    const fan_array *array;
    /* the dtype of the fold after this operand (D3: never narrows from k to k+1); of a reduction:
     * fan_reduce's */
    fan_dtype acc;
    fan_weight weight;
} fan_operand;

/* The divisor of a mean: the exact sum of its parts, none of which is 0 but a lone one. */
#define FAN_DIVISOR_PARTS 40
typedef struct fan_divisor {
    double nearest; /* rounded to nearest */
    double odd;     /* rounded to odd: the next rounding of it is the only one */
    int n;
    double parts[FAN_DIVISOR_PARTS];
} fan_divisor;

typedef struct fan_scale {
    /* NULL, or what divides the sum, in its accumulation dtype, before it is multiplied. It lives
     * as long as the scale. */
    const fan_divisor *divisor;
    bool on;       /* there is a factor */
    double re, im; /* for float and complex sums */
    int64_t i;     /* for integer sums */
} fan_scale;

/* Options of fan_sum; NULL: defaults. */
typedef struct fan_sum_options {
    fan_scale scale;
    /* receives the statistics of the rounded elements of `out`, from the same pass; NULL: not
     * wanted */
    fan_stats *stats;
    size_t first_suspect; /* operands before this one are not reported (fan_stats.bad) */
    bool parallel;        /* other threads may help with a large sum */
} fan_sum_options;

/* fan_sum: writes the fold of `n` >= 1 operands into `out` (any dtype that the last acc may be cast
 * to); how may be NULL. Allocates nothing, cannot fail, may be interrupted. `out` may be the very
 * view of one operand (fan_array_same_view, or the same geometry with the same item size);
 * otherwise it must not overlap any. Each add of a low-float acc rounds. */
void fan_sum(const fan_array *out, const fan_operand *in, size_t n, const fan_sum_options *options);

/* fan_sum_flat: as fan_sum, for n gap-free runs of `count` elements of one dtype into another of
 * that dtype: one call of a loop. `out` may be exactly one of the runs. acc is dtype, or float32
 * for low floats, float64 for float32, complex128 for complex64; with any other it does nothing and
 * returns false. factor: an element of acc that multiplies the sum before it is rounded; NULL:
 * none, as it must be for complex sums in a wider acc. One thread. */
bool fan_sum_flat(char *out, const char *const *src, size_t n, size_t count, fan_dtype dtype,
                  fan_dtype acc, const char *factor);

/* fan_sum_flat_from: as fan_sum_flat, beginning with a run of acc at `start` (NULL: with the first
 * run), which `out` may be if `raw`: then the sum is written as acc, without the last rounding. n
 * may be 0 beside `start`. */
bool fan_sum_flat_from(char *out, const char *start, const char *const *src, size_t n, size_t count,
                       fan_dtype dtype, fan_dtype acc, const char *factor, bool raw);

/* fan_sum_flat_upper: returns the dtype wider than d that fan_sum_flat accepts with it;
 * FAN_DT_NONE: there is none. */
fan_dtype fan_sum_flat_upper(fan_dtype d);

/* fan_sum_flat_fits: returns whether fan_sum_flat accepts these two. */
bool fan_sum_flat_fits(fan_dtype dtype, fan_dtype acc);

/* fan_scale_dtype: returns the dtype in which a sum of dtype d is multiplied (D10): d; or, for a
 * sum of floats whose range a part of the factor leaves, float64 or complex128. */
fan_dtype fan_scale_dtype(const fan_scale *scale, fan_dtype d);

/* fan_scale_acts: whether a scale (or NULL) changes a sum. */
static inline bool fan_scale_acts(const fan_scale *scale)
{
    return scale && (scale->on || scale->divisor);
}

/* fan_sum_flat_weighted: as fan_sum_flat, each run multiplied by its weight: `weights` has n of
 * fan_weight_as (NULL: none); divisor: of fan_divisor_as (NULL: none). */
bool fan_sum_flat_weighted(char *out, const char *const *src, size_t n, size_t count,
                           fan_dtype dtype, fan_dtype acc, const char *weights, const char *divisor,
                           const char *factor);

/* fan_weight_size: returns the bytes of one number of the parts of dtype d: at most 8. */
size_t fan_weight_size(fan_dtype d);
/* fan_weight_as: writes the real part of a weight as one such number, rounded once. */
void fan_weight_as(const fan_weight *weight, fan_dtype d, char *number);
/* fan_divisor_as: the same of a divisor. */
void fan_divisor_as(const fan_divisor *divisor, fan_dtype d, char *number);
/* fan_weight_fit_of: whether a weight is a finite number once it is rounded to dtype d, with all of
 * its digits: what is below the smallest normal number of d must be a number of d exactly. */
typedef enum fan_weight_fit {
    FAN_WEIGHT_FITS,
    FAN_WEIGHT_TOO_LARGE,
    FAN_WEIGHT_TOO_SMALL
} fan_weight_fit;
fan_weight_fit fan_weight_fit_of(const fan_weight *weight, fan_dtype d);


/* fan_scale_as: writes the scale as one element of dtype d (rounded once), at most 16 bytes. */
void fan_scale_as(const fan_scale *scale, fan_dtype d, char *factor);

/* measure: the statistics of an existing array. */
/* fan_stats_of: computes the statistics of an array, in the order of its memory, exactly as fan_sum
 * does for a result with these strides; bad is 0 or SIZE_MAX. May be interrupted. */
void fan_stats_of(const fan_array *a, fan_stats *s);

/* fan_stats_sumsq: returns the sum of the squares; inf where it exceeds float64, 0 where it is too
 * small for one. */
double fan_stats_sumsq(const fan_stats *s);
/* fan_stats_norm: returns the root of the sum of the squares; inf only where the root itself
 * exceeds float64. */
double fan_stats_norm(const fan_stats *s);
/* fan_stats_repeat: makes the statistics of an array those of the array `times` times. */
void fan_stats_repeat(fan_stats *s, uint64_t times);

/* reduce: the sum of an array over some of its axes (D7). */

/* fan_reduce_dtype: returns the dtype in which D7 folds: float64 for floats, complex128 for
 * complex, the dtype itself for the rest. */
fan_dtype fan_reduce_dtype(fan_dtype d);
/* fan_reduce: sums `in`, each element rounded to `dtype` first, over leading and stretched axes
 * into `out` (fresh, any dtype, shape broadcasts to in's). Converts by the piece. May be
 * interrupted. */
void fan_reduce(const fan_array *out, const fan_array *in, fan_dtype dtype);

#endif
