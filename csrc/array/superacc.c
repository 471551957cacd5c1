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
    uint64_t u = bits_of(x), m = u & (UINT64_MAX >> 12);
    int e = (int)(u >> 52 & 0x7ff);
    bool minus = u >> 63;
    int64_t top = (int64_t)w[k->limbs - 1];
    if (e == 0x7ff) {
        int64_t mine = m ? FAN_ACC_NAN : minus ? FAN_ACC_MINUS_INF : FAN_ACC_PLUS_INF;
        bool clash = (top == FAN_ACC_PLUS_INF || top == FAN_ACC_MINUS_INF) && top != mine;
        w[k->limbs - 1] = (uint64_t)(top == FAN_ACC_NAN || clash ? FAN_ACC_NAN : mine);
        return;
    }
    if (top <= FAN_ACC_NAN) {
        if (top != FAN_ACC_NOTHING || (minus && !(e | (m != 0))))
            return;
        w[k->limbs - 1] = 0;
    }
    if (e)
        m |= UINT64_C(1) << 52;
    else
        e = 1;
    /* x is m * 2^(e - 1075), and m * 2^at units; the bits of m below the unit are zero */
    int at = e - 1075 + k->unit;
    if (at < 0) {
        m = at > -64 ? m >> -at : 0;
        at = 0;
    }
    int i = at >> 6, bit = at & 63;
    uint64_t piece[2] = {m << bit, bit ? m >> (64 - bit) : 0}, carry = 0;
    for (int j = 0; i < k->limbs && (j < 2 || carry); i++, j++) {
        uint64_t p = j < 2 ? piece[j] : 0, a = w[i];
        uint64_t b = minus ? a - p : a + p;
        uint64_t c = minus ? b - carry : b + carry;
        carry = minus ? (b > a) | (c > b) : (b < a) | (c < b);
        w[i] = c;
    }
}

double fan__superacc_value(const uint64_t *w, const fan_exact_kind *k, const double *factor,
                           bool odd)
{
    uint64_t mag[FAN_EXACT_LIMBS + 1];
    int64_t top = (int64_t)w[k->limbs - 1];
    double by = factor ? *factor : 1.0;
    if (top <= FAN_ACC_NAN)
        return by * (top == FAN_ACC_NOTHING     ? -0.0
                     : top == FAN_ACC_PLUS_INF  ? (double)INFINITY
                     : top == FAN_ACC_MINUS_INF ? -(double)INFINITY
                                                : (double)NAN);
    bool minus = top < 0, more = false;
    uint64_t carry = minus;
    int high = -1;
    for (int i = 0; i < k->limbs; i++) {
        mag[i] = (minus ? ~w[i] : w[i]) + carry;
        carry = carry && mag[i] == 0;
        high = mag[i] ? i : high;
    }
    if (high < 0)
        return by * 0.0;
    int64_t E = -(int64_t)k->unit;
    if (factor) {
        uint64_t u = bits_of(by), m = u & (UINT64_MAX >> 12);
        int e = (int)(u >> 52 & 0x7ff);
        if (e == 0x7ff || by == 0)
            return minus ? -by : by;
        m |= (uint64_t)(e != 0) << 52;
        E += (e ? e : 1) - 1075;
        minus ^= u >> 63;
        unsigned __int128 over = 0;
        for (int i = 0; i <= high; i++) {
            over += (unsigned __int128)mag[i] * m;
            mag[i] = (uint64_t)over;
            over >>= 64;
        }
        mag[high + 1] = (uint64_t)over;
        high += over != 0;
    }
    int lead = __builtin_clzll(mag[high]);
    uint64_t m = mag[high] << lead;
    if (high > 0) {
        m |= lead ? mag[high - 1] >> (64 - lead) : 0;
        more = lead ? mag[high - 1] << lead : mag[high - 1];
    }
    for (int i = high - 2; i >= 0; i--)
        more |= mag[i] != 0;
    int64_t exponent = E + 64 * high + 63 - lead;
    bool to_odd = odd && !FAN_FAULT(EXACT_NO_ODD);
    uint64_t u;
    if (exponent > 1023) {
        u = to_odd ? bits_of(DBL_MAX) : bits_of((double)INFINITY);
    } else if (exponent < -1075) {
        u = to_odd;
    } else {
        /* the exponent of the last bit kept */
        int64_t least = exponent - 52 > -1074 ? exponent - 52 : -1074;
        int drop = (int)(63 - (exponent - least));
        uint64_t kept = drop > 63 ? 0 : m >> drop;
        uint64_t rest = drop > 63 ? m : m << (64 - drop); /* drop is 11 at least */
        if (to_odd)
            kept |= rest || more;
        else
            kept += rest > UINT64_C(1) << 63 || (rest == UINT64_C(1) << 63 && (more || (kept & 1)));
        u = ((uint64_t)(least + 1074) << 52) + kept; /* a carry correctly increments the exponent */
    }
    return of_bits(u | (uint64_t)minus << 63);
}
