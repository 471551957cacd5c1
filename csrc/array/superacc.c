/* superacc: superaccumulators: the format of each dtype, adding a float64 at its place with
 * carries, and the final rounding: magnitude, factor, then to nearest even or to odd. */
#include "array/superacc.h"

#include "base/fault.h"

#include <float.h>
#include <math.h>

fan_exact_kind fan__exact_kind_of(fan_dtype d)
{
    switch (d) {
#define LOW(X, NAME, c, bits, limbs, unit, digits, always) \
    case FAN_DT_##NAME:                                    \
        return (fan_exact_kind){limbs, unit, digits, always};
        FAN_LOW_LIST(LOW, )
#undef LOW
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64:
        return (fan_exact_kind){5, 149, 24, false};
    case FAN_DT_FLOAT64:
    case FAN_DT_COMPLEX128:
        return (fan_exact_kind){FAN_EXACT_LIMBS, 1074, 53, false};
    default:
        return (fan_exact_kind){0, 0, 0, false};
    }
}

void fan__superacc_start(uint64_t *w, const fan_exact_kind *k)
{
    memset(w, 0, (size_t)k->limbs * sizeof *w);
    w[k->limbs - 1] = (uint64_t)FAN_ACC_NOTHING;
}

void fan__superacc_add(uint64_t *w, const fan_exact_kind *k, double x)
{
    int e;
    uint64_t m = fan__number_parts(x, &e);
    bool minus = signbit(x);
    int64_t top = (int64_t)w[k->limbs - 1];
    if (x - x != 0) {
        w[k->limbs - 1] = (uint64_t)fan__acc_special(top, fan__acc_special_of(x));
        return;
    }
    if (top <= FAN_ACC_NAN) {
        bool minus_zero = minus && m == 0;
        if (top != FAN_ACC_NOTHING || minus_zero)
            return;
        w[k->limbs - 1] = 0;
    }

    int at = e + k->unit; /* x is m * 2^at units; the bits of m below the unit are zero */
    if (at < 0) {
        m = at > -64 ? m >> -at : 0;
        at = 0;
    }
    int first = at >> 6;
    int bit = at & 63;
    uint64_t piece[2] = {m << bit, bit ? m >> (64 - bit) : 0};
    uint64_t carry = 0;
    for (int i = first; i < k->limbs; i++) {
        uint64_t part = 0;
        uint64_t old = w[i];
        uint64_t sum;
        if (i - first < 2)
            part = piece[i - first];
        else if (!carry)
            return;
        if (minus) {
            sum = old - part;
            w[i] = sum - carry;
            carry = (sum > old) | (w[i] > sum);
        } else {
            sum = old + part;
            w[i] = sum + carry;
            carry = (sum < old) | (w[i] < sum);
        }
    }
}

/* special_value: returns what a top word represents that is no number. */
static double special_value(int64_t top)
{
    if (top == FAN_ACC_NOTHING)
        return -0.0;
    if (top == FAN_ACC_PLUS_INF)
        return (double)INFINITY;
    if (top == FAN_ACC_MINUS_INF)
        return -(double)INFINITY;
    return (double)NAN;
}

/* magnitude_of: writes the limbs of |w|; returns the index of the highest that is not zero, or
 * -1. */
static int magnitude_of(const uint64_t *w, int limbs, bool minus, uint64_t *mag)
{
    uint64_t carry = minus;
    int high = -1;
    for (int i = 0; i < limbs; i++) {
        mag[i] = (minus ? ~w[i] : w[i]) + carry;
        carry = carry && mag[i] == 0;
        if (mag[i])
            high = i;
    }
    return high;
}

/* limbs_times: multiplies the limbs 0 .. high by m; returns the index of the highest one now. */
static int limbs_times(uint64_t *mag, int high, uint64_t m)
{
    unsigned __int128 over = 0;
    for (int i = 0; i <= high; i++) {
        over += (unsigned __int128)mag[i] * m;
        mag[i] = (uint64_t)over;
        over >>= 64;
    }
    mag[high + 1] = (uint64_t)over;
    if (over)
        return high + 1;
    return high;
}

uint64_t fan__magnitude_round(uint64_t m, bool more, int64_t exponent, bool odd)
{
    const uint64_t half = UINT64_C(1) << 63;
    bool to_odd = odd && !FAN_FAULT(EXACT_NO_ODD);
    if (exponent > 1023)
        return bits_of(to_odd ? DBL_MAX : (double)INFINITY);
    if (exponent < -1075)
        return to_odd;
    /* the exponent of the last bit kept */
    int64_t least = exponent - 52;
    if (least < -1074)
        least = -1074;
    int drop = (int)(63 - (exponent - least)); /* 11 at least */
    uint64_t kept = 0;
    uint64_t rest = m;
    if (drop <= 63) {
        kept = m >> drop;
        rest = m << (64 - drop);
    }
    if (to_odd)
        kept |= rest || more;
    else if (rest == half)
        kept += more || (kept & 1);
    else
        kept += rest > half;
    return ((uint64_t)(least + 1074) << 52) + kept; /* a carry correctly increments the exponent */
}

double fan__superacc_value(const uint64_t *w, const fan_exact_kind *k, const double *factor,
                           bool odd)
{
    uint64_t mag[FAN_EXACT_LIMBS + 1];
    int64_t top = (int64_t)w[k->limbs - 1];
    double by = 1.0;
    if (factor)
        by = *factor;
    if (top <= FAN_ACC_NAN)
        return by * special_value(top);
    bool minus = top < 0;
    int high = magnitude_of(w, k->limbs, minus, mag);
    if (high < 0)
        return by * 0.0;

    int64_t unit = -(int64_t)k->unit;
    if (factor) {
        int e;
        if (by - by != 0 || by == 0)
            return minus ? -by : by;
        high = limbs_times(mag, high, fan__number_parts(by, &e));
        unit += e;
        minus ^= signbit(by) != 0;
    }

    int lead = __builtin_clzll(mag[high]);
    uint64_t m = mag[high] << lead;
    bool more = false;
    if (high > 0 && lead)
        m |= mag[high - 1] >> (64 - lead);
    if (high > 0)
        more = mag[high - 1] << lead;
    for (int i = high - 2; i >= 0; i--)
        more |= mag[i] != 0;
    uint64_t bits = fan__magnitude_round(m, more, unit + 64 * high + 63 - lead, odd);
    return of_bits(bits | (uint64_t)minus << 63);
}
