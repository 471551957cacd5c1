/* oracle: numbers of every dtype in plain code, one element at a time, sharing nothing with csrc
 * but the list of dtypes.
 *
 * A low float is decoded by the definition of its bits and encoded by looking for its nearest
 * neighbours among all
 * codes. */
#ifndef FAN_TESTS_ORACLE_H
#define FAN_TESTS_ORACLE_H

#include "array/array.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct low_float {
    int mant, bias;
    uint32_t last; /* code of the largest finite value, without sign */
    uint32_t over; /* what stands for anything larger */
} low_float;

static inline low_float low_of(fan_dtype d)
{
    switch (d) {
    case FAN_DT_FLOAT16: return (low_float){10, 15, 0x7bff, 0x7c00};
    case FAN_DT_BFLOAT16: return (low_float){7, 127, 0x7f7f, 0x7f80};
    case FAN_DT_FLOAT8_E5M2: return (low_float){2, 15, 0x7b, 0x7c};
    case FAN_DT_FLOAT8_E4M3FN: return (low_float){3, 7, 0x7e, 0x7f};
    default: return (low_float){0, 0, 0, 0};
    }
}

static inline bool is_low(fan_dtype d)
{
    return low_of(d).mant != 0;
}

static inline bool is_complex(fan_dtype d)
{
    return fan_dtype_kind(d) == 'c';
}

static inline uint32_t sign_bit(fan_dtype d)
{
    return fan_dtype_size(d) == 2 ? 0x8000u : 0x80u;
}

/* The value of a code without sign as if all exponents were finite; worked out once. */
static inline double decode_plain(low_float f, uint32_t code)
{
    static double known[4][1 << 15];
    static bool filled[4];
    int which = f.mant == 10 ? 0 : f.mant == 7 ? 1 : f.mant == 2 ? 2 : 3;
    for (uint32_t c = 0; !filled[which] && c <= f.last + 1; c++) {
        uint32_t e = c >> f.mant, m = c & ((1u << f.mant) - 1);
        known[which][c] = e ? ldexp((double)(m + (1u << f.mant)), (int)e - f.bias - f.mant)
                            : ldexp((double)m, 1 - f.bias - f.mant);
    }
    filled[which] = true;
    return known[which][code];
}

static inline double decode_low(fan_dtype d, uint32_t code)
{
    low_float f = low_of(d);
    uint32_t a = code & (sign_bit(d) - 1);
    double x = a <= f.last                                  ? decode_plain(f, a)
               : (a == f.over && d != FAN_DT_FLOAT8_E4M3FN) ? INFINITY
                                                            : NAN;
    return code & sign_bit(d) ? -x : x;
}

static inline uint32_t encode_low(fan_dtype d, long double x)
{
    low_float f = low_of(d);
    uint32_t sign = signbit(x) ? sign_bit(d) : 0;
    if (isnan(x))
        return sign | (f.over == 0x7f ? 0x7f : f.over + 1);
    long double a = fabsl(x);
    uint32_t low = 0, high = f.last + 1; /* decode_plain(low) <= a, unless a is beyond all */
    if (a >= (long double)decode_plain(f, high))
        return sign | f.over;
    while (high - low > 1) {
        uint32_t mid = (low + high) / 2;
        if ((long double)decode_plain(f, mid) <= a)
            low = mid;
        else
            high = mid;
    }
    long double down = a - (long double)decode_plain(f, low),
                up = (long double)decode_plain(f, high) - a;
    uint32_t code = down < up ? low : up < down ? high : low % 2 == 0 ? low : high;
    return sign | (code > f.last ? f.over : code);
}

/* A number: whole for bool and integers (as the bits of an int64 or uint64), else re, im. */
typedef struct number {
    uint64_t whole;
    double re, im;
} number;

static inline number load_number(fan_dtype d, const void *p)
{
    number x = {0, 0, 0};
    union {
        uint8_t u8;
        uint16_t u16;
        uint32_t u32;
        uint64_t u64;
        int8_t i8;
        int16_t i16;
        int32_t i32;
        float f;
        double d;
        float c[2];
        double z[2];
    } v;
    memset(&v, 0, sizeof v);
    memcpy(&v, p, fan_dtype_size(d));
    switch (d) {
    case FAN_DT_BOOL: x.whole = v.u8 ? 1 : 0; break;
    case FAN_DT_INT8: x.whole = (uint64_t)v.i8; break;
    case FAN_DT_INT16: x.whole = (uint64_t)v.i16; break;
    case FAN_DT_INT32: x.whole = (uint64_t)v.i32; break;
    case FAN_DT_UINT8: x.whole = v.u8; break;
    case FAN_DT_UINT16: x.whole = v.u16; break;
    case FAN_DT_UINT32: x.whole = v.u32; break;
    case FAN_DT_INT64:
    case FAN_DT_UINT64: x.whole = v.u64; break;
    case FAN_DT_FLOAT32: x.re = (double)v.f; break;
    case FAN_DT_FLOAT64: x.re = v.d; break;
    case FAN_DT_COMPLEX64:
        x.re = (double)v.c[0];
        x.im = (double)v.c[1];
        break;
    case FAN_DT_COMPLEX128:
        x.re = v.z[0];
        x.im = v.z[1];
        break;
    default: x.re = decode_low(d, fan_dtype_size(d) == 2 ? v.u16 : v.u8); break;
    }
    return x;
}

static inline void store_number(fan_dtype d, number x, void *p)
{
    uint16_t u16;
    float c[2] = {(float)x.re, (float)x.im};
    double z[2] = {x.re, x.im};
    switch (d) {
    case FAN_DT_BOOL: {
        uint8_t b = x.whole != 0;
        memcpy(p, &b, 1);
        break;
    }
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64: memcpy(p, c, fan_dtype_size(d)); break;
    case FAN_DT_FLOAT64:
    case FAN_DT_COMPLEX128: memcpy(p, z, fan_dtype_size(d)); break;
    case FAN_DT_FLOAT16:
    case FAN_DT_BFLOAT16:
    case FAN_DT_FLOAT8_E4M3FN:
    case FAN_DT_FLOAT8_E5M2:
        u16 = (uint16_t)encode_low(d, (long double)x.re);
        memcpy(p, &u16, fan_dtype_size(d)); /* little-endian, as all that runs these tests */
        break;
    default: memcpy(p, &x.whole, fan_dtype_size(d)); break;
    }
}

static inline bool is_whole(fan_dtype d)
{
    char k = fan_dtype_kind(d);
    return k == 'b' || k == 'i' || k == 'u';
}

/* The number x of dtype `from` as dtype `to`, rounded once. Float to integer is not asked. */
static inline number convert_number(fan_dtype from, number x, fan_dtype to)
{
    char buf[16];
    if (from == to)
        return x;
    if (is_whole(from) && !is_whole(to)) {
        long double v =
            from == FAN_DT_UINT64 ? (long double)x.whole : (long double)(int64_t)x.whole;
        x.re = to == FAN_DT_FLOAT32 || to == FAN_DT_COMPLEX64 ? (double)(float)v : (double)v;
        if (is_low(to))
            return (number){0, decode_low(to, encode_low(to, v)), 0}; /* not over a double */
    } else if (!is_whole(from) && is_whole(to)) {
        x.whole = (uint64_t)(int64_t)x.re;
        if (to == FAN_DT_BOOL)
            x.whole = x.re != 0;
    }
    memset(buf, 0, sizeof buf);
    store_number(to, x, buf);
    return load_number(to, buf);
}

/* a + b in dtype d, rounded to it. */
static inline number add_numbers(fan_dtype d, number a, number b)
{
    number r = {0, 0, 0};
    if (d == FAN_DT_BOOL) {
        r.whole = a.whole | b.whole;
    } else if (is_whole(d)) {
        char buf[16];
        r.whole = a.whole + b.whole;
        store_number(d, r, buf);
        r = load_number(d, buf);
    } else if (d == FAN_DT_FLOAT64 || d == FAN_DT_COMPLEX128) {
        r.re = a.re + b.re;
        r.im = a.im + b.im;
    } else {
        float re = (float)a.re + (float)b.re, im = (float)a.im + (float)b.im;
        r.re = (double)re;
        r.im = (double)im;
        if (is_low(d))
            r.re = decode_low(d, encode_low(d, (long double)re));
    }
    return r;
}

static inline number scale_number(fan_dtype d, number a, number f)
{
    number r = {0, 0, 0};
    if (d == FAN_DT_BOOL) {
        r.whole = a.whole && f.whole;
    } else if (is_whole(d)) {
        char buf[16];
        r.whole = a.whole * f.whole;
        store_number(d, r, buf);
        r = load_number(d, buf);
    } else if (d == FAN_DT_COMPLEX128) {
        r.re = a.re * f.re - a.im * f.im;
        r.im = a.re * f.im + a.im * f.re;
    } else if (d == FAN_DT_COMPLEX64) {
        float ar = (float)a.re, ai = (float)a.im, fr = (float)f.re, fi = (float)f.im;
        r.re = (double)(ar * fr - ai * fi);
        r.im = (double)(ar * fi + ai * fr);
    } else if (d == FAN_DT_FLOAT64) {
        r.re = a.re * f.re;
    } else {
        float p = (float)a.re * (float)f.re;
        r.re = is_low(d) ? decode_low(d, encode_low(d, (long double)p)) : (double)p;
    }
    return r;
}

static inline bool same_real(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

static inline bool same_number(number a, number b)
{
    return a.whole == b.whole && same_real(a.re, b.re) && same_real(a.im, b.im);
}

/* A small generator with a seed, so that a failure can be had again. */
static uint64_t random_state = 1;

static inline uint64_t random_bits(void)
{
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t z = random_state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline int64_t random_below(int64_t n)
{
    return (int64_t)(random_bits() % (uint64_t)n);
}

/* A random element: mostly tame numbers, where sums cancel and round; one in sixteen any bits at
 * all. */
static inline void random_element(fan_dtype d, void *p)
{
    uint64_t bits[2] = {random_bits(), random_bits()};
    if (is_whole(d) || random_below(16) == 0) {
        memcpy(p, bits, fan_dtype_size(d));
        return;
    }
    number x = {0, (double)random_below(4001) / 64.0 - 31.25,
                (double)random_below(999) / 7.0 - 70.0};
    store_number(d, x, p);
}

/* element: the address of the element with linear index i, in C order. */
static inline char *element(const fan_array *a, int64_t i)
{
    char *p = a->data;
    for (int k = a->ndim - 1; k >= 0; k--) {
        p += i % a->shape[k] * a->strides[k];
        i /= a->shape[k];
    }
    return p;
}

static inline number get(const fan_array *a, int64_t i)
{
    return load_number(a->dtype, element(a, i));
}

static inline void put(const fan_array *a, int64_t i, number x)
{
    char buf[16];
    store_number(a->dtype, x, buf);
    memcpy(element(a, i), buf, fan_dtype_size(a->dtype));
}

/* A view with random geometry over memory of its own; the caller drops it. Elements overlap only if
 * `may_repeat`. */
static inline fan_array *random_view(fan_dtype d, int ndim, const int64_t *shape, bool may_repeat)
{
    int64_t strides[4], axes[4] = {0, 1, 2, 3}, step = (int64_t)fan_dtype_size(d), lo = 0,
                        hi = step;
    for (int i = ndim - 1; i > 0; i--) {
        int64_t k = random_below(i + 1), t = axes[i];
        axes[i] = axes[k];
        axes[k] = t;
    }
    if (random_below(3) == 0)
        for (int i = 0; i < ndim; i++)
            axes[i] = i;
    for (int i = ndim - 1; i >= 0; i--) {
        int64_t axis = axes[i], gap = random_below(3) ? 0 : random_below(9);
        strides[axis] = (step + gap) * (random_below(4) ? 1 : -1);
        step = (step + gap) * (shape[axis] ? shape[axis] : 1);
        if (may_repeat && random_below(5) == 0)
            strides[axis] = 0;
        if (strides[axis] < 0)
            lo += strides[axis] * (shape[axis] > 0 ? shape[axis] - 1 : 0);
        else
            hi += strides[axis] * (shape[axis] > 0 ? shape[axis] - 1 : 0);
    }
    int64_t skew = random_below(3) ? 0 : random_below(8);
    fan_storage *s = fan_storage_new((size_t)(hi - lo + skew));
    fan_array *a = NULL;
    memset(s->data, 0x5a, (size_t)(hi - lo + skew));
    if (fan_array_view(s, (char *)s->data + skew - lo, d, ndim, shape, strides, true, &a, NULL))
        abort();
    fan_storage_drop(s);
    for (int64_t i = 0; i < a->size; i++)
        random_element(d, element(a, i));
    return a;
}

#endif
