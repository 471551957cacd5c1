/* lowp: float16, bfloat16, float8_e4m3fn, float8_e5m2 to and from float32, bit for bit as NumPy and
 * ml_dtypes (except for the payload of NaNs).
 *
 *             exponent  mantissa  bias  largest  beyond it
 *   float16         5        10    15    65504   inf
 *   bfloat16        8         7   127   3.39e38  inf
 *   e5m2            5         2    15    57344   inf
 *   e4m3fn          4         3     7      448   NaN (it has no inf)
 *
 * Widening is exact. Narrowing rounds to nearest, ties to even. A float32 that is normal in the
 * target is rounded on its bits: drop `dropped` mantissa bits, add just under half a unit, and one
 * more if the last kept bit is odd; a carry correctly increments the exponent. One that is
 * subnormal there is added to a power of two whose last bit is the target's smallest step: the
 * adder rounds it.
 *
 * Float64 and integers are first converted to a float32 rounded to odd (the last bit is set if
 * anything was lost), so that the second rounding equals that of the exact value. NumPy's float16
 * is rounded once as well; ml_dtypes converts float64 and int64 to bfloat16 and float8 by way of a
 * float32 rounded to nearest, so a value next to a tie may differ from ours in its last bit.
 *
 * No branches: compilers vectorize these. */
#ifndef FAN_ARRAY_LOWP_H
#define FAN_ARRAY_LOWP_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define FAN_LOW static __device__ inline
#else
#define FAN_LOW static inline
#endif

FAN_LOW uint32_t fan_bits_of_float(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

FAN_LOW float fan_float_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* fan_either: yes if c, else no; by a mask, because compilers may not vectorize `?:` around float
 * arithmetic. */
FAN_LOW uint32_t fan_either(int c, uint32_t yes, uint32_t no)
{
    return no ^ ((yes ^ no) & (0u - (uint32_t)c));
}

/* fan_lowp_round: returns |x| of float32 bits `a` (sign cleared, not NaN, in range) as exponent and
 * mantissa of a float with `mant` mantissa bits and bias `bias`. */
FAN_LOW uint32_t fan_lowp_round(uint32_t a, uint32_t mant, uint32_t bias)
{
    uint32_t dropped = 23u - mant;
    uint32_t rebias = (127u - bias) << 23;
    uint32_t normal =
        (a - rebias + ((1u << (dropped - 1u)) - 1u) + ((a >> dropped) & 1u)) >> dropped;
    /* smallest step 2^(1 - bias - mant), so the power of two is 2^(24 - bias - mant) */
    uint32_t power = (127u + 24u - bias - mant) << 23;
    uint32_t subnormal = fan_bits_of_float(fan_float_of_bits(a) + fan_float_of_bits(power)) - power;
    return fan_either(a < rebias + (1u << 23), subnormal, normal);
}

/* fan_lowp_widen: returns the float32 bits of exponent and mantissa `a` (sign cleared, finite). */
FAN_LOW uint32_t fan_lowp_widen(uint32_t a, uint32_t mant, uint32_t bias)
{
    uint32_t normal = (a << (23u - mant)) + ((127u - bias) << 23);
    float step = fan_float_of_bits((127u + 1u - bias - mant) << 23);
    uint32_t subnormal = fan_bits_of_float((float)(int32_t)a * step);
    return fan_either(a < (1u << mant), subnormal, normal);
}

/* fan_lowp_of: returns x rounded: float32 bits from `over` on become `inf`, NaN becomes `nan`; the
 * sign goes to bit `sign`. */
FAN_LOW uint32_t fan_lowp_of(float x, uint32_t mant, uint32_t bias, uint32_t over, uint32_t inf,
                             uint32_t nan, uint32_t sign)
{
    uint32_t u = fan_bits_of_float(x);
    uint32_t a = u & 0x7fffffffu;
    uint32_t r = fan_lowp_round(a, mant, bias);
    r = fan_either(a >= over, inf, r);
    if (nan != inf)
        r = fan_either(a > 0x7f800000u, nan, r);
    return r | (u >> 31 << sign);
}

#ifdef __CUDA_ARCH__
/* The hardware's conversions round as those below: every number gets the same bits (NaNs may differ
 * in payload). */
FAN_LOW uint16_t fan_float16_of(float x)
{
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

FAN_LOW float fan_float_of_float16(uint16_t h)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
#else
FAN_LOW uint16_t fan_float16_of(float x)
{
    return (uint16_t)fan_lowp_of(x, 10, 15, 0x477ff000u, 0x7c00u, 0x7e00u, 15); /* 65520 */
}

FAN_LOW float fan_float_of_float16(uint16_t h)
{
    uint32_t a = h & 0x7fffu;
    uint32_t r = fan_lowp_widen(a, 10, 15);
    r = fan_either(a >= 0x7c00u, 0x7f800000u | a << 13, r);
    return fan_float_of_bits(r | (uint32_t)(h & 0x8000u) << 16);
}
#endif

FAN_LOW uint16_t fan_bfloat16_of(float x)
{
    uint32_t u = fan_bits_of_float(x);
    uint32_t r = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (uint16_t)fan_either((u & 0x7fffffffu) > 0x7f800000u, u >> 16 | 0x40u, r);
}

FAN_LOW float fan_float_of_bfloat16(uint16_t h)
{
    return fan_float_of_bits((uint32_t)h << 16);
}

FAN_LOW uint8_t fan_e5m2_of(float x)
{
    return (uint8_t)fan_lowp_of(x, 2, 15, 0x47700000u, 0x7cu, 0x7eu, 7); /* 61440 */
}

FAN_LOW float fan_float_of_e5m2(uint8_t h)
{
    return fan_float_of_float16((uint16_t)(h << 8)); /* e5m2 is float16 without its low byte */
}

FAN_LOW uint8_t fan_e4m3fn_of(float x)
{
    /* beyond 464, which is a tie and becomes 448 */
    return (uint8_t)fan_lowp_of(x, 3, 7, 0x43e80001u, 0x7fu, 0x7fu, 7);
}

FAN_LOW float fan_float_of_e4m3fn(uint8_t h)
{
    uint32_t a = h & 0x7fu;
    uint32_t r = fan_lowp_widen(a, 3, 7);
    r = fan_either(a == 0x7fu, 0x7fc00000u, r);
    return fan_float_of_bits(r | (uint32_t)(h & 0x80u) << 24);
}

/* fan_floats_of_four_e5m2, .._e4m3fn: convert four bytes, the lowest first, for GPUs. Both go by
 * way of float16: e5m2 is its upper byte. e4m3fn's bias is smaller by 8, so a shift makes a float16
 * that is the value divided by 2^8, exactly; but its NaN becomes 480. Multiplying the shifted bits
 * by 2^15 + 2^12 gives inf for that one value alone, and inf * 0 is a NaN, while everything else
 * times 0 is a zero of its sign. */
#ifdef __CUDA_ARCH__
FAN_LOW uint32_t fan_half_pair_times(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

FAN_LOW uint32_t fan_half_pair_times_plus(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

/* fan_spread_pair: returns bytes 2 * which and 2 * which + 1 of `four` as the upper bytes of a pair
 * of float16. */
FAN_LOW uint32_t fan_spread_pair(uint32_t four, int which)
{
    return __byte_perm(four, 0, which ? 0x3424 : 0x1404);
}
#else
FAN_LOW uint32_t fan_half_pair_times(uint32_t a, uint32_t b)
{
    uint32_t lo =
        fan_float16_of(fan_float_of_float16((uint16_t)a) * fan_float_of_float16((uint16_t)b));
    return lo | (uint32_t)fan_float16_of(fan_float_of_float16((uint16_t)(a >> 16)) *
                                         fan_float_of_float16((uint16_t)(b >> 16)))
                    << 16;
}

/* fan_half_pair_times_plus: the product is exact. */
FAN_LOW uint32_t fan_half_pair_times_plus(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t ab = fan_half_pair_times(a, b);
    uint32_t lo =
        fan_float16_of(fan_float_of_float16((uint16_t)ab) + fan_float_of_float16((uint16_t)c));
    return lo | (uint32_t)fan_float16_of(fan_float_of_float16((uint16_t)(ab >> 16)) +
                                         fan_float_of_float16((uint16_t)(c >> 16)))
                    << 16;
}

FAN_LOW uint32_t fan_spread_pair(uint32_t four, int which)
{
    uint32_t two = four >> (16 * which);
    return (two & 0xffu) << 8 | (two & 0xff00u) << 16;
}
#endif

FAN_LOW uint32_t fan_half_pair_of_e4m3fn(uint32_t four, int which)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((uint16_t)(four >> (16 * which))));
    return r;
#else
    uint32_t y = fan_spread_pair(four, which);
    uint32_t small = (y & 0x80008000u) | (y >> 1 & 0x3f803f80u);
    /* 2^15 + 2^12 */
    uint32_t nan = fan_half_pair_times(fan_half_pair_times(small, 0x78807880u), 0);
    return fan_half_pair_times_plus(small, 0x5c005c00u, nan); /* 2^8 */
#endif
}

/* fan_floats_of_halves: converts a pair to float32. */
FAN_LOW void fan_floats_of_halves(uint32_t halves, float *x)
{
    x[0] = fan_float_of_float16((uint16_t)halves);
    x[1] = fan_float_of_float16((uint16_t)(halves >> 16));
}

FAN_LOW void fan_floats_of_four_e4m3fn(uint32_t four, float *x)
{
    fan_floats_of_halves(fan_half_pair_of_e4m3fn(four, 0), x);
    fan_floats_of_halves(fan_half_pair_of_e4m3fn(four, 1), x + 2);
}

FAN_LOW void fan_floats_of_four_e5m2(uint32_t four, float *x)
{
    fan_floats_of_halves(fan_spread_pair(four, 0), x);
    fan_floats_of_halves(fan_spread_pair(four, 1), x + 2);
}

/* fan_odd_of_double: returns x as float32, rounded to odd. */
FAN_LOW float fan_odd_of_double(double x)
{
    float f = (float)x;
    double back = (double)f;
    uint32_t u = fan_bits_of_float(f);
    double ax = x < 0 ? -x : x;
    double ab = back < 0 ? -back : back;
    u = ab > ax ? u - 1u : u;              /* rounded up (or to inf): one step back towards zero */
    u = back < x || back > x ? u | 1u : u; /* inexact; for a NaN this does not matter */
    return fan_float_of_bits(u);
}

/* fan_odd_of_u64: returns m as float32, rounded to odd; the low bits are first combined into one,
 * so that a double holds the rest. */
FAN_LOW float fan_odd_of_u64(uint64_t m)
{
    uint64_t gathered = (m & 0xffffu) ? (m & ~(uint64_t)0xffff) | 0x10000u : m;
    m = m >> 48 ? gathered : m;
    return fan_odd_of_double((double)m);
}

FAN_LOW float fan_odd_of_i64(int64_t x)
{
    float f = fan_odd_of_u64(x < 0 ? 0u - (uint64_t)x : (uint64_t)x);
    return x < 0 ? -f : f;
}

#endif
