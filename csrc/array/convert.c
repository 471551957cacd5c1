/* convert: see convert.h.
 *
 * Design: each common pair of dtypes has a loop of its own (`direct`). All others are converted in
 * small pieces by way of one of four wide types that hold the source exactly (int64, uint64,
 * float64, complex128); each dtype converts from each wide type with one rounding. So 17 dtypes
 * need 17 + 68 loops instead of 289. */
#include "array/convert.h"

#include "array/lowp.h"

#include <stdbool.h>
#include <string.h>

typedef void (*run)(char *dst, const char *src, size_t n);

/* Float to integer: never requested (D6), but defined. */
static inline int64_t convert_whole(double x)
{
    if (x >= 9223372036854775808.0)
        return INT64_MAX;
    if (x >= -9223372036854775808.0)
        return (int64_t)x;
    if (x < 0)
        return INT64_MIN;
    return 0;
}

static inline uint64_t whole_u(double x)
{
    if (x >= 18446744073709551616.0)
        return UINT64_MAX;
    if (x >= 9223372036854775808.0)
        return (uint64_t)x;
    return (uint64_t)convert_whole(x);
}

/* X(NAME, memory type, wide type, in: wide of x; out: of an int64, of a uint64, of a float64) */
#define LOW_REAL(X, NAME, c, bits, ...)                                 \
    X(NAME, fan_any_u##bits, WIDE_F64, (double)fan_float_of_##c(x),     \
      fan_##c##_of(fan_odd_of_i64(x)), fan_##c##_of(fan_odd_of_u64(x)), \
      fan_##c##_of(fan_odd_of_double(x)))
#define REAL_LIST(X)                                                                          \
    X(BOOL, fan_any_u8, WIDE_I64, x != 0, x != 0, x != 0, x != 0)                             \
    X(INT8, fan_any_i8, WIDE_I64, x, (int8_t)x, (int8_t)x, (int8_t)convert_whole(x))          \
    X(INT16, fan_any_i16, WIDE_I64, x, (int16_t)x, (int16_t)x, (int16_t)convert_whole(x))     \
    X(INT32, fan_any_i32, WIDE_I64, x, (int32_t)x, (int32_t)x, (int32_t)convert_whole(x))     \
    X(INT64, fan_any_i64, WIDE_I64, x, x, (int64_t)x, convert_whole(x))                       \
    X(UINT8, fan_any_u8, WIDE_I64, x, (uint8_t)x, (uint8_t)x, (uint8_t)convert_whole(x))      \
    X(UINT16, fan_any_u16, WIDE_I64, x, (uint16_t)x, (uint16_t)x, (uint16_t)convert_whole(x)) \
    X(UINT32, fan_any_u32, WIDE_I64, x, (uint32_t)x, (uint32_t)x, (uint32_t)convert_whole(x)) \
    X(UINT64, fan_any_u64, WIDE_U64, x, (uint64_t)x, x, whole_u(x))                           \
    FAN_LOW_LIST(LOW_REAL, X)                                                                 \
    X(FLOAT32, fan_any_f32, WIDE_F64, (double)x, (float)x, (float)x, (float)x)                \
    X(FLOAT64, fan_any_f64, WIDE_F64, x, (double)x, (double)x, x)

enum {
    WIDE_I64,
    WIDE_U64,
    WIDE_F64,
    WIDE_C128,
    WIDES
};
typedef int64_t in_WIDE_I64;
typedef uint64_t in_WIDE_U64;
typedef double in_WIDE_F64;

#define LOOP(expr)                   \
    for (size_t i = 0; i < n; i++) { \
        expr;                        \
    }

#define REAL(NAME, T, W, IN, OF_I64, OF_U64, OF_F64)                 \
    static void in_##NAME(char *dst, const char *src, size_t n)      \
    {                                                                \
        const T *s = (const T *)src;                                 \
        in_##W *d = (void *)dst;                                     \
        LOOP(T x = s[i]; d[i] = IN)                                  \
    }                                                                \
    static void NAME##_of_i64(char *dst, const char *src, size_t n)  \
    {                                                                \
        const int64_t *s = (const void *)src;                        \
        T *d = (T *)dst;                                             \
        LOOP(int64_t x = s[i]; d[i] = OF_I64)                        \
    }                                                                \
    static void NAME##_of_u64(char *dst, const char *src, size_t n)  \
    {                                                                \
        const uint64_t *s = (const void *)src;                       \
        T *d = (T *)dst;                                             \
        LOOP(uint64_t x = s[i]; d[i] = OF_U64)                       \
    }                                                                \
    static void NAME##_of_f64(char *dst, const char *src, size_t n)  \
    {                                                                \
        const double *s = (const void *)src;                         \
        T *d = (T *)dst;                                             \
        LOOP(double x = s[i]; d[i] = OF_F64)                         \
    }                                                                \
    static void NAME##_of_c128(char *dst, const char *src, size_t n) \
    {                                                                \
        const double *s = (const void *)src;                         \
        T *d = (T *)dst;                                             \
        LOOP(double x = s[2 * i]; d[i] = OF_F64)                     \
    }
REAL_LIST(REAL)
#undef REAL

#define COMPLEX_OUT(NAME, T, P, W, WT)                              \
    static void NAME##_of_##W(char *dst, const char *src, size_t n) \
    {                                                               \
        const WT *s = (const void *)src;                            \
        T *d = (T *)dst;                                            \
        LOOP(d[2 * i] = (P)s[i]; d[2 * i + 1] = 0)                  \
    }
#define COMPLEX(NAME, T, P)                                                    \
    static void in_##NAME(char *dst, const char *src, size_t n)                \
    {                                                                          \
        const T *s = (const T *)src;                                           \
        double *d = (void *)dst;                                               \
        LOOP(d[2 * i] = (double)s[2 * i]; d[2 * i + 1] = (double)s[2 * i + 1]) \
    }                                                                          \
    static void NAME##_of_c128(char *dst, const char *src, size_t n)           \
    {                                                                          \
        const double *s = (const void *)src;                                   \
        T *d = (T *)dst;                                                       \
        LOOP(d[2 * i] = (P)s[2 * i]; d[2 * i + 1] = (P)s[2 * i + 1])           \
    }                                                                          \
    COMPLEX_OUT(NAME, T, P, i64, int64_t)                                      \
    COMPLEX_OUT(NAME, T, P, u64, uint64_t)                                     \
    COMPLEX_OUT(NAME, T, P, f64, double)
COMPLEX(COMPLEX64, fan_any_f32, float)
COMPLEX(COMPLEX128, fan_any_f64, double)

/* The loops of one dtype: to its wide type, and from each. */
static const struct {
    int wide;
    run in, out[WIDES];
} ways[FAN_DT_COUNT] = {
#define OUTS(NAME) {NAME##_of_i64, NAME##_of_u64, NAME##_of_f64, NAME##_of_c128}
#define ROW(NAME, T, W, a, b, c, d) [FAN_DT_##NAME] = {W, in_##NAME, OUTS(NAME)},
    REAL_LIST(ROW)
#undef ROW
        [FAN_DT_COMPLEX64] = {WIDE_C128, in_COMPLEX64, OUTS(COMPLEX64)},
    [FAN_DT_COMPLEX128] = {WIDE_C128, in_COMPLEX128, OUTS(COMPLEX128)},
};

/* The common pairs. X(FROM, TO, memory type from, memory type to, expression) */
#define LOW_DIRECT(X, NAME, c, bits, ...)                               \
    X(NAME, FLOAT32, fan_any_u##bits, fan_any_f32, fan_float_of_##c(x)) \
    X(FLOAT32, NAME, fan_any_f32, fan_any_u##bits, fan_##c##_of(x))
#define DIRECT_LIST(X)                                       \
    X(BOOL, BOOL, fan_any_u8, fan_any_u8, x != 0)            \
    FAN_LOW_LIST(LOW_DIRECT, X)                              \
    X(FLOAT32, FLOAT64, fan_any_f32, fan_any_f64, (double)x) \
    X(FLOAT64, FLOAT32, fan_any_f64, fan_any_f32, (float)x)

#define DIRECT(FROM, TO, S, D, EXPR)                                 \
    static void FROM##_to_##TO(char *dst, const char *src, size_t n) \
    {                                                                \
        const S *s = (const S *)src;                                 \
        D *d = (D *)dst;                                             \
        FAN_VECTOR                                                   \
        LOOP(S x = s[i]; d[i] = EXPR)                                \
    }
DIRECT_LIST(DIRECT)
#undef DIRECT

static const run direct[FAN_DT_COUNT][FAN_DT_COUNT] = {
#define ROW(FROM, TO, S, D, EXPR) [FAN_DT_##FROM][FAN_DT_##TO] = FROM##_to_##TO,
    DIRECT_LIST(ROW)
#undef ROW
};

#define PIECE 256

/* convert_over_wide: converts any pair, gap-free on both sides. */
static void convert_over_wide(char *dst, fan_dtype to, const char *src, fan_dtype from, size_t n)
{
    FAN_UNINITIALIZED _Alignas(16) char wide[PIECE * 16];
    while (n) {
        size_t m = n;
        if (m > PIECE)
            m = PIECE;
        ways[from].in(wide, src, m);
        ways[to].out[ways[from].wide](dst, wide, m);
        src += m * fan_dtype_size(from);
        dst += m * fan_dtype_size(to);
        n -= m;
    }
}

void fan_convert_dense(char *dst, fan_dtype to, const char *src, fan_dtype from, int64_t n)
{
    if (n <= 0)
        return;
    if (direct[from][to])
        direct[from][to](dst, src, (size_t)n);
    else if (from == to)
        memcpy(dst, src, (size_t)n * fan_dtype_size(to));
    else
        convert_over_wide(dst, to, src, from, (size_t)n);
}

/* convert_spread: copies n elements of `size` bytes between any strides. */
static void convert_spread(char *dst, int64_t dst_step, const char *src, int64_t src_step,
                           size_t size, int64_t n)
{
#define EACH(bytes)                                                \
    case bytes:                                                    \
        for (int64_t i = 0; i < n; i++)                            \
            memcpy(dst + i * dst_step, src + i * src_step, bytes); \
        break;
    switch (size) {
        EACH(1)
        EACH(2)
        EACH(4)
        EACH(8)
        EACH(16)
    default:
        break;
    }
#undef EACH
}

/* convert_gapped: makes pieces gap-free, converts and spreads them. */
static void convert_gapped(char *dst, fan_dtype to, int64_t dst_step, const char *src,
                           fan_dtype from, int64_t src_step, int64_t n)
{
    FAN_UNINITIALIZED _Alignas(16) char near[PIECE * 16];
    FAN_UNINITIALIZED _Alignas(16) char far[PIECE * 16];
    size_t size_to = fan_dtype_size(to);
    size_t size_from = fan_dtype_size(from);
    while (n) {
        int64_t m = n;
        if (m > PIECE)
            m = PIECE;
        const char *dense = src;
        if (src_step != (int64_t)size_from) {
            convert_spread(near, (int64_t)size_from, src, src_step, size_from, m);
            dense = near;
        }
        if (dst_step == (int64_t)size_to) {
            fan_convert_dense(dst, to, dense, from, m);
        } else {
            fan_convert_dense(far, to, dense, from, m);
            convert_spread(dst, dst_step, far, (int64_t)size_to, size_to, m);
        }
        src += m * src_step;
        dst += m * dst_step;
        n -= m;
    }
}

void fan_convert(char *dst, fan_dtype to, int64_t dst_step, const char *src, fan_dtype from,
                 int64_t src_step, int64_t n)
{
    if (n <= 0)
        return;
    size_t size = fan_dtype_size(to);
    bool dense = dst_step == (int64_t)size && src_step == fan_dtype_step(from);
    if (n == 1 || dense)
        fan_convert_dense(dst, to, src, from, n);
    else if (from == to && from != FAN_DT_BOOL)
        convert_spread(dst, dst_step, src, src_step, size, n);
    else
        convert_gapped(dst, to, dst_step, src, from, src_step, n);
}
