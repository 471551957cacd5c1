/* oracle: numbers of every dtype in plain code, one element at a time, sharing nothing with csrc
 * but the list of dtypes; arrays made of them, with random geometry and random elements.
 *
 * A low float is decoded by the definition of its bits and encoded by a search for its nearest
 * neighbours among all codes. */
#ifndef FAN_TESTS_ORACLE_H
#define FAN_TESTS_ORACLE_H

#include "array/array.h"
#include "array/sum.h"
#include "check.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct low_float {
    int mant, bias;
    uint32_t last; /* code of the largest finite value, without sign */
    uint32_t over; /* code of anything larger */
    int table;     /* of decode_plain */
} low_float;

static inline low_float low_of(fan_dtype d)
{
    switch (d) {
    case FAN_DT_FLOAT16: return (low_float){10, 15, 0x7bff, 0x7c00, 0};
    case FAN_DT_BFLOAT16: return (low_float){7, 127, 0x7f7f, 0x7f80, 1};
    case FAN_DT_FLOAT8_E5M2: return (low_float){2, 15, 0x7b, 0x7c, 2};
    case FAN_DT_FLOAT8_E4M3FN: return (low_float){3, 7, 0x7e, 0x7f, 3};
    default: return (low_float){0};
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

static inline double decode_bits(low_float f, uint32_t code)
{
    uint32_t hidden = 1u << f.mant;
    uint32_t m = code & (hidden - 1);
    int exponent = (int)(code >> f.mant);
    if (exponent == 0)
        return ldexp((double)m, 1 - f.bias - f.mant);
    return ldexp((double)(m + hidden), exponent - f.bias - f.mant);
}

/* decode_plain: the value of a code without sign as if all exponents were finite; computed once. */
static inline double decode_plain(low_float f, uint32_t code)
{
    static double known[4][1 << 15];
    static bool filled[4];
    double *table = known[f.table];
    if (!filled[f.table]) {
        for (uint32_t c = 0; c <= f.last + 1; c++)
            table[c] = decode_bits(f, c);
        filled[f.table] = true;
    }
    return table[code];
}

static inline double decode_low(fan_dtype d, uint32_t code)
{
    low_float f = low_of(d);
    uint32_t a = code & (sign_bit(d) - 1);
    double x = NAN;
    if (a <= f.last) {
        x = decode_plain(f, a);
    } else if (a == f.over && d != FAN_DT_FLOAT8_E4M3FN) {
        x = INFINITY;
    }
    return code & sign_bit(d) ? -x : x;
}

static inline uint32_t encode_low(fan_dtype d, long double x)
{
    low_float f = low_of(d);
    uint32_t sign = signbit(x) ? sign_bit(d) : 0;
    if (isnan(x))
        return sign | f.over | 1;
    long double a = fabsl(x);
    uint32_t low = 0;
    uint32_t high = f.last + 1; /* decode_plain(low) <= a, unless a is beyond all */
    if (a >= (long double)decode_plain(f, high))
        return sign | f.over;
    while (high - low > 1) {
        uint32_t mid = (low + high) / 2;
        if ((long double)decode_plain(f, mid) <= a) {
            low = mid;
        } else {
            high = mid;
        }
    }
    long double down = a - (long double)decode_plain(f, low);
    long double up = (long double)decode_plain(f, high) - a;
    bool odd_tie = up == down && low % 2 == 1;
    uint32_t code = up < down || odd_tie ? high : low;
    return sign | (code > f.last ? f.over : code);
}

static inline double round_low(fan_dtype d, long double x)
{
    return decode_low(d, encode_low(d, x));
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
    case FAN_DT_BOOL: x.whole = v.u8 != 0; break;
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

/* stored: x as an element of dtype d holds it. */
static inline number stored(fan_dtype d, number x)
{
    char buf[16] = {0};
    store_number(d, x, buf);
    return load_number(d, buf);
}

/* convert_number: x of dtype `from` as dtype `to`, rounded once. No test converts floats to
 * integers with it. */
static inline number convert_number(fan_dtype from, number x, fan_dtype to)
{
    if (from == to)
        return x;
    if (is_whole(from) && !is_whole(to)) {
        long double v = (long double)(int64_t)x.whole;
        if (from == FAN_DT_UINT64)
            v = (long double)x.whole;
        if (is_low(to))
            return (number){0, round_low(to, v), 0}; /* not by way of a double */
        bool single = to == FAN_DT_FLOAT32 || to == FAN_DT_COMPLEX64;
        x.re = single ? (double)(float)v : (double)v;
    } else if (to == FAN_DT_BOOL) {
        x.whole = x.whole != 0 || x.re != 0;
    } else if (!is_whole(from) && is_whole(to)) {
        x.whole = (uint64_t)(int64_t)x.re;
    }
    return stored(to, x);
}

/* add_numbers: a + b in dtype d, rounded to it. */
static inline number add_numbers(fan_dtype d, number a, number b)
{
    if (d == FAN_DT_BOOL)
        return (number){a.whole | b.whole, 0, 0};
    if (is_whole(d))
        return stored(d, (number){a.whole + b.whole, 0, 0});
    if (d == FAN_DT_FLOAT64 || d == FAN_DT_COMPLEX128)
        return (number){0, a.re + b.re, a.im + b.im};
    float re = (float)a.re + (float)b.re;
    float im = (float)a.im + (float)b.im;
    return stored(d, (number){0, (double)re, (double)im});
}

static inline number scale_number(fan_dtype d, number a, number f)
{
    if (d == FAN_DT_BOOL)
        return (number){a.whole && f.whole, 0, 0};
    if (is_whole(d))
        return stored(d, (number){a.whole * f.whole, 0, 0});
    if (d == FAN_DT_FLOAT64)
        return (number){0, a.re * f.re, 0};
    if (d == FAN_DT_COMPLEX128)
        return (number){0, a.re * f.re - a.im * f.im, a.re * f.im + a.im * f.re};
    float ar = (float)a.re;
    float ai = (float)a.im;
    float fr = (float)f.re;
    float fi = (float)f.im;
    if (d == FAN_DT_COMPLEX64)
        return (number){0, (double)(ar * fr - ai * fi), (double)(ar * fi + ai * fr)};
    return stored(d, (number){0, (double)(ar * fr), 0});
}

static inline bool same_real(double a, double b)
{
    if (isnan(a) || isnan(b))
        return isnan(a) && isnan(b);
    return a == b && signbit(a) == signbit(b);
}

static inline bool same_number(number a, number b)
{
    return a.whole == b.whole && same_real(a.re, b.re) && same_real(a.im, b.im);
}

/* A small generator with a seed, so that a failure can be had again: 1, or what random_seed reads.
 */
static uint64_t random_state = 1;

/* random_seed: takes the number of a word "seed=4" among the program's arguments; without one the
 * seed stays. */
static inline void random_seed(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "seed=", 5) == 0)
            random_state = strtoull(argv[i] + 5, NULL, 10);
    }
}

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

static inline bool one_in(int64_t n)
{
    return random_below(n) == 0;
}

static inline fan_dtype random_dtype(void)
{
    return (fan_dtype)random_below(FAN_DT_COUNT);
}

/* dtype_or_random: one time in two d, else any. */
static inline fan_dtype dtype_or_random(fan_dtype d)
{
    return random_below(2) ? d : random_dtype();
}

static inline int random_axes(int ndim)
{
    return ndim ? (int)random_below(ndim + 1) : 0;
}

/* random_small: the last `fewer` extents of a shape, each of them or 1. */
static inline void random_small(int64_t *small, int fewer, int ndim, const int64_t *shape)
{
    for (int i = 0; i < fewer; i++)
        small[i] = random_below(2) ? 1 : shape[ndim - fewer + i];
}

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* random_gap: one time in three a number below n, else 0. */
static inline int64_t random_gap(int64_t n)
{
    return one_in(3) ? random_below(n) : 0;
}

/* random_element: mostly tame numbers, where sums cancel and round; one in sixteen any bits at
 * all. */
static inline void random_element(fan_dtype d, void *p)
{
    uint64_t bits[2] = {random_bits(), random_bits()};
    if (is_whole(d) || one_in(16)) {
        memcpy(p, bits, fan_dtype_size(d));
        return;
    }
    number x = {0};
    x.re = (double)random_below(4001) / 64.0 - 31.25;
    x.im = (double)random_below(999) / 7.0 - 70.0;
    store_number(d, x, p);
}

/* random_scale: a factor for every dtype. */
static inline fan_scale random_scale(bool on)
{
    fan_scale scale = {.on = on};
    scale.re = (double)random_below(1000) / 128.0 - 3;
    scale.im = (double)random_below(1000) / 128.0 - 3;
    scale.i = random_below(2000) - 1000;
    return scale;
}

/* factor_of: the factor as a number of dtype d. */
static inline number factor_of(const fan_scale *scale, fan_dtype d)
{
    return stored(d, (number){(uint64_t)scale->i, scale->re, scale->im});
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

static inline void put_number(const fan_array *a, int64_t i, number x)
{
    char buf[16];
    store_number(a->dtype, x, buf);
    memcpy(element(a, i), buf, fan_dtype_size(a->dtype));
}

static inline fan_array *array_shaped(fan_dtype d, int ndim, const int64_t *shape)
{
    fan_array *a = NULL;
    CHECK_OK(fan_array_new(d, ndim, shape, NULL, &a, NULL));
    return a;
}

/* array_of: one axis of `size` elements. */
static inline fan_array *array_of(fan_dtype d, int64_t size)
{
    return array_shaped(d, 1, &size);
}

static inline fan_array *view_of(fan_storage *s, void *data, fan_dtype d, int ndim,
                                 const int64_t *shape, const int64_t *strides)
{
    fan_array *a = NULL;
    CHECK_OK(fan_array_view(s, data, d, ndim, shape, strides, true, &a, NULL));
    return a;
}

static inline void drop_arrays(fan_array *const *arrays, size_t n)
{
    for (size_t k = 0; k < n; k++)
        fan_array_drop(arrays[k]);
}

/* random_view: a view with random geometry over memory of its own; the caller drops it. Elements
 * overlap only if `may_repeat`. */
static inline fan_array *random_view(fan_dtype d, int ndim, const int64_t *shape, bool may_repeat)
{
    int64_t strides[4];
    int64_t axes[4] = {0, 1, 2, 3};
    int64_t step = (int64_t)fan_dtype_size(d);
    int64_t lo = 0;
    int64_t hi = step;
    for (int i = ndim - 1; i > 0; i--) {
        int64_t k = random_below(i + 1);
        int64_t swapped = axes[i];
        axes[i] = axes[k];
        axes[k] = swapped;
    }
    if (one_in(3)) {
        for (int i = 0; i < ndim; i++)
            axes[i] = i;
    }
    for (int i = ndim - 1; i >= 0; i--) {
        int64_t axis = axes[i];
        step += random_gap(9);
        strides[axis] = one_in(4) ? -step : step;
        if (may_repeat && one_in(5))
            strides[axis] = 0;
        if (shape[axis] == 0)
            continue;
        int64_t reach = strides[axis] * (shape[axis] - 1);
        if (reach < 0) {
            lo += reach;
        } else {
            hi += reach;
        }
        step *= shape[axis];
    }
    int64_t skew = random_gap(8);
    size_t bytes = (size_t)(hi - lo + skew);
    fan_storage *s = fan_storage_new(bytes);
    fan_array *a = NULL;
    memset(s->data, 0x5a, bytes);
    if (fan_array_view(s, (char *)s->data + skew - lo, d, ndim, shape, strides, true, &a, NULL))
        abort();
    fan_storage_drop(s);
    for (int64_t i = 0; i < a->size; i++)
        random_element(d, element(a, i));
    return a;
}

#endif
