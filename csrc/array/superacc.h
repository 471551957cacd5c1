/* superacc: a superaccumulator: an exact sum as an integer multiple of its dtype's smallest step,
 * in two's complement, with as many 64-bit limbs as the largest value needs. The integer path of
 * exact.c. */
#ifndef FAN_ARRAY_SUPERACC_H
#define FAN_ARRAY_SUPERACC_H

#include "array/dtype.h"

#include <string.h>

#define FAN_EXACT_LIMBS 34    /* at most */
#define FAN_EXACT_ALWAYS 8192 /* terms */

/* A real dtype's smallest step is 2^-unit; `digits` are those of its mantissa; `limbs` hold 2^30 of
 * its largest value. */
typedef struct fan_exact_kind {
    int limbs, unit, digits;
    bool always; /* float64 sums are exact for n <= FAN_EXACT_ALWAYS */
} fan_exact_kind;

/* Values of a top word that no sum has; what is at most FAN_ACC_NAN is no number. */
#define FAN_ACC_NOTHING INT64_MIN /* only -0.0 so far; the other words are 0 */
#define FAN_ACC_PLUS_INF (INT64_MIN + 1)
#define FAN_ACC_MINUS_INF (INT64_MIN + 2)
#define FAN_ACC_NAN (INT64_MIN + 3)

/* fan__exact_kind_of: returns the format of a dtype's parts; limbs is 0 if its sums cannot be
 * exact. */
fan_exact_kind fan__exact_kind_of(fan_dtype d);

static inline uint64_t bits_of(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline double of_bits(uint64_t u)
{
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* fan__number_parts: x = +-m * 2^exponent. */
static inline uint64_t fan__number_parts(double x, int *exponent)
{
    uint64_t u = bits_of(x);
    uint64_t m = u & (UINT64_MAX >> 12);
    int e = (int)(u >> 52 & 0x7ff);
    *exponent = (e ? e : 1) - 1075;
    if (e)
        return m | UINT64_C(1) << 52;
    return m;
}

/* fan__acc_special_of: returns the top word that represents inf or NaN. */
static inline int64_t fan__acc_special_of(double x)
{
    if (x != x)
        return FAN_ACC_NAN;
    if (x > 0)
        return FAN_ACC_PLUS_INF;
    return FAN_ACC_MINUS_INF;
}

/* fan__acc_special: returns the top word of a sum with top word `top` to which inf or NaN `term` is
 * added. */
static inline int64_t fan__acc_special(int64_t top, int64_t term)
{
    if (top == FAN_ACC_NAN)
        return FAN_ACC_NAN;
    bool infinite = top < FAN_ACC_NAN && top != FAN_ACC_NOTHING;
    if (infinite && top != term)
        return FAN_ACC_NAN;
    return term;
}

/* fan__magnitude_round: returns the bits of the float64 for m * 2^(exponent - 63), whose highest
 * bit is set, rounded to odd or to nearest; `more`: and a part below the last bit of m. */
uint64_t fan__magnitude_round(uint64_t m, bool more, int64_t exponent, bool odd);
/* fan__superacc_start: sets the empty sum. */
void fan__superacc_start(uint64_t *limbs, const fan_exact_kind *k);
void fan__superacc_add(uint64_t *limbs, const fan_exact_kind *k, double x);
/* fan__superacc_value: returns the number, times *factor if not NULL, as a float64, rounded to odd
 * or to nearest. */
double fan__superacc_value(const uint64_t *limbs, const fan_exact_kind *k, const double *factor,
                           bool odd);

#endif
