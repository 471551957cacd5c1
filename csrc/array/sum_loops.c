#include "array/sum_loops.h"

#include "array/convert.h"
#include "array/low.h"

/* X(NAME, type in memory, type of a value, a alone, a plus b, a times b). Integers wrap: they are unsigned here, whatever they are outside. */
#define WIDE_LIST(X)                                                                                                  \
    X(truth, fan_any_u8, uint8_t, a != 0, (a | b) != 0, a && b)                                                       \
    X(bits8, fan_any_u8, uint8_t, a, (uint8_t)(a + b), (uint8_t)(a * b))                                              \
    X(bits16, fan_any_u16, uint16_t, a, (uint16_t)(a + b), (uint16_t)((uint32_t)a * b))                               \
    X(bits32, fan_any_u32, uint32_t, a, a + b, a * b)                                                                 \
    X(bits64, fan_any_u64, uint64_t, a, a + b, a * b)                                                                 \
    X(single, fan_any_f32, float, a, a + b, a * b)                                                                    \
    X(twice, fan_any_f64, double, a, a + b, a * b)
/* The low floats: each add is one in float32, rounded. */
#define LOW_LIST(X)                                                                                                   \
    X(half, fan_any_u16, uint16_t, a, fan_float16_of(fan_float_of_float16(a) + fan_float_of_float16(b)),              \
      fan_float16_of(fan_float_of_float16(a) * fan_float_of_float16(b)))                                              \
    X(brain, fan_any_u16, uint16_t, a, fan_bfloat16_of(fan_float_of_bfloat16(a) + fan_float_of_bfloat16(b)),          \
      fan_bfloat16_of(fan_float_of_bfloat16(a) * fan_float_of_bfloat16(b)))                                           \
    X(e4m3fn, fan_any_u8, uint8_t, a, fan_e4m3fn_of(fan_float_of_e4m3fn(a) + fan_float_of_e4m3fn(b)),                 \
      fan_e4m3fn_of(fan_float_of_e4m3fn(a) * fan_float_of_e4m3fn(b)))                                                 \
    X(e5m2, fan_any_u8, uint8_t, a, fan_e5m2_of(fan_float_of_e5m2(a) + fan_float_of_e5m2(b)),                         \
      fan_e5m2_of(fan_float_of_e5m2(a) * fan_float_of_e5m2(b)))

#define ARITHMETIC(NAME, MEM, T, ONE, PLUS, TIMES)                                                                    \
    static inline T one_##NAME(T a)                                                                                   \
    {                                                                                                                 \
        return ONE;                                                                                                   \
    }                                                                                                                 \
    static inline T plus_##NAME(T a, T b)                                                                             \
    {                                                                                                                 \
        return PLUS;                                                                                                  \
    }                                                                                                                 \
    static inline T times_##NAME(T a, T b)                                                                            \
    {                                                                                                                 \
        return TIMES;                                                                                                 \
    }
WIDE_LIST(ARITHMETIC)
LOW_LIST(ARITHMETIC)
#undef ARITHMETIC

/* One case of `add` per number of sources, so that each is one loop that reads every source once and writes once. */
#define EACH(expr)                                                                                                    \
    FAN_VECTOR                                                                                                        \
    for (size_t i = 0; i < n; i++)                                                                                    \
        d[i] = expr;                                                                                                  \
    break;
#define P(NAME, rest, k) plus_##NAME(rest, s##k[i])
#define SUM2(NAME) plus_##NAME(s0[i], s1[i])
#define SUM3(NAME) P(NAME, SUM2(NAME), 2)
#define SUM4(NAME) P(NAME, SUM3(NAME), 3)
#define SUM5(NAME) P(NAME, SUM4(NAME), 4)
#define SUM6(NAME) P(NAME, SUM5(NAME), 5)
#define SUM7(NAME) P(NAME, SUM6(NAME), 6)
#define SUM8(NAME) P(NAME, SUM7(NAME), 7)
#define SOURCE(k) *s##k = (const void *)src[k < sources ? k : 0]

/* add, for up to FAN_ADD_MOST sources, and for up to two, where conversions would make of it too much code. */
#define ADD_MANY(NAME, MEM, T, ONE, PLUS, TIMES)                                                                      \
    static void add_##NAME(char *dst, const char *const *src, int sources, size_t n)                                  \
    {                                                                                                                 \
        MEM *d = (MEM *)dst;                                                                                          \
        const MEM SOURCE(0), SOURCE(1), SOURCE(2), SOURCE(3), SOURCE(4), SOURCE(5), SOURCE(6), SOURCE(7);             \
        switch (sources) {                                                                                            \
        case 1:                                                                                                       \
            EACH(one_##NAME(s0[i]))                                                                                   \
        case 2:                                                                                                       \
            EACH(SUM2(NAME))                                                                                          \
        case 3:                                                                                                       \
            EACH(SUM3(NAME))                                                                                          \
        case 4:                                                                                                       \
            EACH(SUM4(NAME))                                                                                          \
        case 5:                                                                                                       \
            EACH(SUM5(NAME))                                                                                          \
        case 6:                                                                                                       \
            EACH(SUM6(NAME))                                                                                          \
        case 7:                                                                                                       \
            EACH(SUM7(NAME))                                                                                          \
        case 8:                                                                                                       \
            EACH(SUM8(NAME))                                                                                          \
        default:                                                                                                      \
            break;                                                                                                    \
        }                                                                                                             \
    }
#define ADD_TWO(NAME, MEM, T, ONE, PLUS, TIMES)                                                                       \
    static void add_##NAME(char *dst, const char *const *src, int sources, size_t n)                                  \
    {                                                                                                                 \
        MEM *d = (MEM *)dst;                                                                                          \
        const MEM SOURCE(0), SOURCE(1);                                                                               \
        switch (sources) {                                                                                            \
        case 1:                                                                                                       \
            EACH(one_##NAME(s0[i]))                                                                                   \
        case 2:                                                                                                       \
            EACH(SUM2(NAME))                                                                                          \
        default:                                                                                                      \
            break;                                                                                                    \
        }                                                                                                             \
    }
WIDE_LIST(ADD_MANY)
LOW_LIST(ADD_TWO)

#define LOOPS(NAME, MEM, T, ONE, PLUS, TIMES)                                                                         \
    static void add_at_##NAME(char *dst, const int64_t *to, const char *src, const int64_t *from, size_t n,           \
                              size_t run)                                                                             \
    {                                                                                                                 \
        for (size_t k = 0; k < n; k++) {                                                                              \
            MEM *d = (MEM *)(dst + to[k]);                                                                            \
            const MEM *s = (const MEM *)(from ? src + from[k] : src + k * run * sizeof(MEM));                         \
            if (run == 1) {                                                                                           \
                d[0] = plus_##NAME(d[0], s[0]);                                                                       \
                continue;                                                                                             \
            }                                                                                                         \
            FAN_VECTOR                                                                                                \
            for (size_t i = 0; i < run; i++)                                                                          \
                d[i] = plus_##NAME(d[i], s[i]);                                                                       \
        }                                                                                                             \
    }                                                                                                                 \
    static void add_up_##NAME(char *acc, const char *src, size_t n)                                                   \
    {                                                                                                                 \
        const MEM *s = (const MEM *)src;                                                                              \
        T sum = *(const MEM *)acc;                                                                                    \
        for (size_t i = 0; i < n; i++)                                                                                \
            sum = plus_##NAME(sum, s[i]);                                                                             \
        *(MEM *)acc = sum;                                                                                            \
    }                                                                                                                 \
    static void scale_##NAME(char *dst, const char *factor, size_t n)                                                 \
    {                                                                                                                 \
        MEM *d = (MEM *)dst;                                                                                          \
        T by = *(const MEM *)factor;                                                                                  \
        for (size_t i = 0; i < n; i++)                                                                                \
            d[i] = times_##NAME(d[i], by);                                                                            \
    }
WIDE_LIST(LOOPS)
LOW_LIST(LOOPS)
#undef LOOPS

/* Complex numbers add part by part; only these two see whole ones. */
#define COMPLEX(NAME, MEM, T)                                                                                         \
    static void add_up_c##NAME(char *acc, const char *src, size_t n)                                                  \
    {                                                                                                                 \
        const MEM *s = (const MEM *)src;                                                                              \
        MEM *a = (MEM *)acc;                                                                                          \
        T re = a[0], im = a[1];                                                                                       \
        for (size_t i = 0; i < n; i++) {                                                                              \
            re += s[2 * i];                                                                                           \
            im += s[2 * i + 1];                                                                                       \
        }                                                                                                             \
        a[0] = re;                                                                                                    \
        a[1] = im;                                                                                                    \
    }                                                                                                                 \
    static void scale_c##NAME(char *dst, const char *factor, size_t n)                                                \
    {                                                                                                                 \
        MEM *d = (MEM *)dst;                                                                                          \
        T fr = ((const MEM *)factor)[0], fi = ((const MEM *)factor)[1];                                               \
        for (size_t i = 0; i < n; i++) {                                                                              \
            T re = d[2 * i], im = d[2 * i + 1];                                                                       \
            d[2 * i] = re * fr - im * fi;                                                                             \
            d[2 * i + 1] = re * fi + im * fr;                                                                         \
        }                                                                                                             \
    }
COMPLEX(single, fan_any_f32, float)
COMPLEX(twice, fan_any_f64, double)

#define REAL(NAME) {1, FAN_ADD_MOST, add_##NAME, add_at_##NAME, add_up_##NAME, scale_##NAME}
#define LOW(NAME) {1, 2, add_##NAME, add_at_##NAME, add_up_##NAME, scale_##NAME}
#define PAIR(NAME) {2, FAN_ADD_MOST, add_##NAME, add_at_##NAME, add_up_c##NAME, scale_c##NAME}

const fan_loops *fan_loops_of(fan_dtype d)
{
    static const fan_loops loops[FAN_DTYPE_COUNT] = {
        [FAN_BOOL] = REAL(truth),
        [FAN_INT8] = REAL(bits8),
        [FAN_INT16] = REAL(bits16),
        [FAN_INT32] = REAL(bits32),
        [FAN_INT64] = REAL(bits64),
        [FAN_UINT8] = REAL(bits8),
        [FAN_UINT16] = REAL(bits16),
        [FAN_UINT32] = REAL(bits32),
        [FAN_UINT64] = REAL(bits64),
        [FAN_FLOAT16] = LOW(half),
        [FAN_BFLOAT16] = LOW(brain),
        [FAN_FLOAT8_E4M3FN] = LOW(e4m3fn),
        [FAN_FLOAT8_E5M2] = LOW(e5m2),
        [FAN_FLOAT32] = REAL(single),
        [FAN_FLOAT64] = REAL(twice),
        [FAN_COMPLEX64] = PAIR(single),
        [FAN_COMPLEX128] = PAIR(twice),
    };
    return &loops[d];
}
