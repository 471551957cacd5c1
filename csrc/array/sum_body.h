// clang-format Language: Cpp
/* sum_body: the loops of sums for one instruction set, each dtype's made by macros, written once
 * and compiled three times. Each file that makes a set includes it once, after it has defined
 *
 *   FAN_SET    the name of the fan_loop_set to define
 *   FAN_NAME   its name as text
 *   FAN_WIDE   the bytes of its widest vector: 16, 32 or 64
 *
 * and has enabled the instruction set in the compiler. Only the few lines under "Machines" depend
 * on which one it is.
 *
 * A fold takes a step of four vectors from each source in turn and keeps the four sums in
 * registers, so that every element is read once and written once, whatever the number of sources.
 * The remainder after the last whole vector is one more vector, which ends with the last element
 * and was read before anything was written: `dst` may be one of the sources. Low floats become
 * float32 (or are rounded) in the register. */
#include "array/convert.h"
#include "array/lowp.h"
#include "array/device_stats.h"
#include "array/sum_loops.h"

#include <math.h>

#define ALWAYS static inline __attribute__((always_inline, unused))
#define AHEAD 1024 /* bytes between the current sum and the prefetch */

/* ---- Machines ---- */

#if defined(__x86_64__)
#include <immintrin.h>
/* FLOW: a vector stored past the caches. */
ALWAYS void flow4(void *p, const void *v)
{
    int x;
    memcpy(&x, v, 4);
    _mm_stream_si32(p, x);
}
ALWAYS void flow8(void *p, const void *v)
{
    long long x;
    memcpy(&x, v, 8);
    _mm_stream_si64(p, x);
}
ALWAYS void flow16(void *p, const void *v)
{
    _mm_stream_si128(p, _mm_loadu_si128(v));
}
#if FAN_WIDE >= 32
ALWAYS void flow32(void *p, const void *v)
{
    _mm256_stream_si256(p, _mm256_loadu_si256(v));
}
#else
#define flow32(p, v) memcpy(p, v, 32)
#endif
#if FAN_WIDE >= 64
ALWAYS void flow64(void *p, const void *v)
{
    _mm512_stream_si512(p, _mm512_loadu_si512(v));
}
#else
#define flow64(p, v) memcpy(p, v, 64)
#endif
#define FLOW(p, v)                  \
    do {                            \
        if (sizeof *(v) == 64)      \
            flow64(p, v);           \
        else if (sizeof *(v) == 32) \
            flow32(p, v);           \
        else if (sizeof *(v) == 16) \
            flow16(p, v);           \
        else if (sizeof *(v) == 8)  \
            flow8(p, v);            \
        else                        \
            flow4(p, v);            \
    } while (0)
#define FLOWED() _mm_sfence()
#else
#define FLOW(p, v) memcpy(p, v, sizeof *(v))
#define FLOWED() (void)0
#endif

/* ---- Vectors ---- */

/* For each number type, the vector of S's width and an unaligned one; for low floats in memory, of
 * half and a quarter of its bytes. */
#define VECTOR(T, name, bytes)                             \
    typedef T v##name __attribute__((vector_size(bytes))); \
    typedef T m##name __attribute__((vector_size(bytes), aligned(1), may_alias));
#define VECTORS(S, W)                \
    VECTOR(uint8_t, u8_##S, W)       \
    VECTOR(uint16_t, u16_##S, W)     \
    VECTOR(uint32_t, u32_##S, W)     \
    VECTOR(int32_t, i32_##S, W)      \
    VECTOR(uint64_t, u64_##S, W)     \
    VECTOR(float, f32_##S, W)        \
    VECTOR(double, f64_##S, W)       \
    VECTOR(float, half32_##S, W / 2) \
    VECTOR(uint16_t, half16_##S, W / 2)
/* Four bytes are handled as one number. */
#if FAN_WIDE > 16 || !defined(__x86_64__)
VECTOR(uint8_t, half8_w, FAN_WIDE / 4)
#else
typedef uint32_t vhalf8_w;
typedef fan_any_u32 mhalf8_w;
#endif
VECTORS(w, FAN_WIDE)
#if FAN_WIDE > 16
typedef uint32_t vhalf8_s;
typedef fan_any_u32 mhalf8_s;
VECTORS(s, 16)
#endif

/* ---- Short integers to 32 bits and back ----
 *
 * __builtin_convertvector could express it, but today's compilers convert half by half where one
 * instruction would do. The narrowed values fit. */
#if defined(__x86_64__)
ALWAYS __m128i widen16_16(__m128i x)
{
    return _mm_unpacklo_epi16(x, _mm_setzero_si128());
}
ALWAYS __m128i widen8_16(__m128i x)
{
    return widen16_16(_mm_unpacklo_epi8(x, _mm_setzero_si128()));
}
ALWAYS __m128i narrow16_16(__m128i x)
{
    x = _mm_srai_epi32(_mm_slli_epi32(x, 16), 16); /* SSE2 packs signed ones alone */
    return _mm_packs_epi32(x, x);
}
ALWAYS __m128i narrow8_16(__m128i x)
{
    x = _mm_packs_epi32(x, x);
    return _mm_packus_epi16(x, x);
}
#if FAN_WIDE == 32
#define widen16_32 _mm256_cvtepu16_epi32
#define widen8_32 _mm256_cvtepu8_epi32
ALWAYS __m128i narrow16_32(__m256i x)
{
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08));
}
ALWAYS __m128i narrow8_32(__m256i x)
{
    __m128i y = narrow16_32(x);
    return _mm_packus_epi16(y, y);
}
#elif FAN_WIDE == 64
#define widen16_64 _mm512_cvtepu16_epi32
#define widen8_64 _mm512_cvtepu8_epi32
#define narrow16_64 _mm512_cvtepi32_epi16
#define narrow8_64 _mm512_cvtepi32_epi8
#endif
/* SHORTS: A16 and A8 are the registers that hold the short integers, perhaps in their lower
 * part. */
#define SHORTS(S, W, A32, A16, A8)              \
    ALWAYS vu32_##S widen16_##S(vhalf16_##S x)  \
    {                                           \
        A16 y = {0};                            \
        memcpy(&y, &x, sizeof x);               \
        return (vu32_##S)widen16_##W(y);        \
    }                                           \
    ALWAYS vu32_##S widen8_##S(vhalf8_##S x)    \
    {                                           \
        A8 y = {0};                             \
        memcpy(&y, &x, sizeof x);               \
        return (vu32_##S)widen8_##W(y);         \
    }                                           \
    ALWAYS vhalf16_##S narrow16_##S(vu32_##S x) \
    {                                           \
        A16 y = narrow16_##W((A32)x);           \
        vhalf16_##S z;                          \
        memcpy(&z, &y, sizeof z);               \
        return z;                               \
    }                                           \
    ALWAYS vhalf8_##S narrow8_##S(vu32_##S x)   \
    {                                           \
        A8 y = narrow8_##W((A32)x);             \
        vhalf8_##S z;                           \
        memcpy(&z, &y, sizeof z);               \
        return z;                               \
    }
#if FAN_WIDE == 64
SHORTS(w, 64, __m512i, __m256i, __m128i)
#elif FAN_WIDE == 32
SHORTS(w, 32, __m256i, __m128i, __m128i)
#else
SHORTS(w, 16, __m128i, __m128i, __m128i)
#endif
#if FAN_WIDE > 16
SHORTS(s, 16, __m128i, __m128i, __m128i)
#endif
#else
#define widen16_w(x) __builtin_convertvector(x, vu32_w)
#define widen8_w(x) __builtin_convertvector(x, vu32_w)
#define narrow16_w(x) __builtin_convertvector(x, vhalf16_w)
#define narrow8_w(x) __builtin_convertvector(x, vhalf8_w)
#endif

/* ---- One number, one vector: in, plus, times, weigh, over, out ----
 *
 * up_K of memory, plus_K, times_K, down_K to memory; the same with _v_S for vectors. weigh_K: a
 * term times its weight, rounded to the number's type; over_K: a sum over its divisor, rounded so
 * too. Integers wrap: they are unsigned here, whatever their dtype; they are not divided. */

#define NUMBERS(K, MEM, T, UP, PLUS, TIMES, WEIGH, OVER, DOWN) \
    ALWAYS T up_##K(MEM x)                                     \
    {                                                          \
        return UP;                                             \
    }                                                          \
    ALWAYS T plus_##K(T a, T b)                                \
    {                                                          \
        return PLUS;                                           \
    }                                                          \
    ALWAYS T times_##K(T a, T b)                               \
    {                                                          \
        return TIMES;                                          \
    }                                                          \
    ALWAYS T weigh_##K(T a, T b)                               \
    {                                                          \
        return WEIGH;                                          \
    }                                                          \
    ALWAYS T over_##K(T a, T b)                                \
    {                                                          \
        (void)b;                                               \
        return OVER;                                           \
    }                                                          \
    ALWAYS MEM down_##K(T x)                                   \
    {                                                          \
        return DOWN;                                           \
    }
typedef uint8_t mem_u8;
typedef uint16_t mem_u16;

/* X(kind, number in memory, number, in, a plus b, a times b, a weighed by b, a over b, out) */
#define WIDE_LIST(X)                                                                          \
    X(truth, uint8_t, uint8_t, x != 0, a | b, a & b, a & b, a, x)                             \
    X(bits8, uint8_t, uint8_t, x, (uint8_t)(a + b), (uint8_t)(a * b), (uint8_t)(a * b), a, x) \
    X(bits16, uint16_t, uint16_t, x, (uint16_t)(a + b), (uint16_t)((uint32_t)a * b),          \
      (uint16_t)((uint32_t)a * b), a, x)                                                      \
    X(bits32, uint32_t, uint32_t, x, a + b, a * b, a * b, a, x)                               \
    X(bits64, uint64_t, uint64_t, x, a + b, a * b, a * b, a, x)                               \
    X(single, float, float, x, a + b, a * b, a * b, a / b, x)                                 \
    X(twice, double, double, x, a + b, a * b, a * b, a / b, x)                                \
    X(doubled, float, double, (double)x, a + b, a * b, a * b, a / b, (float)x)
#define LOW(X, NAME, K, BITS, ...)                                                                \
    X(K, uint##BITS##_t, float, fan_float_of_##K(x), a + b, a * b, a * b, a / b, fan_##K##_of(x)) \
    X(own_##K, uint##BITS##_t, float, fan_float_of_##K(x), fan_float_of_##K(fan_##K##_of(a + b)), \
      a *b, fan_float_of_##K(fan_##K##_of(a *b)), fan_float_of_##K(fan_##K##_of(a / b)),          \
      fan_##K##_of(x))
WIDE_LIST(NUMBERS)
FAN_LOW_LIST(LOW, NUMBERS)
#undef NUMBERS

/* Vectors of low floats: as lowp.h, lane by lane. A comparison of vectors is a vector of masks. */
#define EITHER(S, mask, yes, no) ((no) ^ (((yes) ^ (no)) & (vu32_##S)(mask)))
#define LOW_VECTORS(S)                                                                           \
    ALWAYS vu32_##S low_round_##S(vu32_##S a, uint32_t mant, uint32_t bias)                      \
    {                                                                                            \
        uint32_t dropped = 23u - mant, rebias = (127u - bias) << 23,                             \
                 power = (127u + 24u - bias - mant) << 23;                                       \
        vu32_##S normal =                                                                        \
            (a - rebias + ((1u << (dropped - 1u)) - 1u) + ((a >> dropped) & 1u)) >> dropped;     \
        vu32_##S subnormal = (vu32_##S)((vf32_##S)a + fan_float_of_bits(power)) - power;         \
        return EITHER(S, a < rebias + (1u << 23), subnormal, normal);                            \
    }                                                                                            \
    ALWAYS vu32_##S low_widen_##S(vu32_##S a, uint32_t mant, uint32_t bias)                      \
    {                                                                                            \
        vu32_##S normal = (a << (23u - mant)) + ((127u - bias) << 23);                           \
        float step = fan_float_of_bits((127u + 1u - bias - mant) << 23);                         \
        vu32_##S subnormal = (vu32_##S)(__builtin_convertvector((vi32_##S)a, vf32_##S) * step);  \
        return EITHER(S, a < (1u << mant), subnormal, normal);                                   \
    }                                                                                            \
    ALWAYS vf32_##S float16_up_##S(vu32_##S h)                                                   \
    {                                                                                            \
        vu32_##S a = h & 0x7fffu, r = low_widen_##S(a, 10, 15);                                  \
        r = EITHER(S, a >= 0x7c00u, 0x7f800000u | a << 13, r);                                   \
        return (vf32_##S)(r | (h & 0x8000u) << 16);                                              \
    }                                                                                            \
    ALWAYS vu32_##S float16_down_##S(vf32_##S x)                                                 \
    {                                                                                            \
        vu32_##S u = (vu32_##S)x, a = u & 0x7fffffffu, r = low_round_##S(a, 10, 15), zero = {0}; \
        r = EITHER(S, a >= 0x477ff000u, zero + 0x7c00u, r);                                      \
        r = EITHER(S, a > 0x7f800000u, zero + 0x7e00u, r);                                       \
        return r | (u >> 16 & 0x8000u);                                                          \
    }                                                                                            \
    ALWAYS vf32_##S bfloat16_up_##S(vu32_##S h)                                                  \
    {                                                                                            \
        return (vf32_##S)(h << 16);                                                              \
    }                                                                                            \
    ALWAYS vu32_##S bfloat16_down_##S(vf32_##S x)                                                \
    {                                                                                            \
        vu32_##S u = (vu32_##S)x, r = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;                      \
        return EITHER(S, (u & 0x7fffffffu) > 0x7f800000u, u >> 16 | 0x40u, r);                   \
    }                                                                                            \
    ALWAYS vf32_##S e5m2_up_##S(vu32_##S h)                                                      \
    {                                                                                            \
        return float16_up_##S(h << 8);                                                           \
    }                                                                                            \
    ALWAYS vu32_##S e5m2_down_##S(vf32_##S x)                                                    \
    {                                                                                            \
        vu32_##S u = (vu32_##S)x, a = u & 0x7fffffffu, r = low_round_##S(a, 2, 15), zero = {0};  \
        r = EITHER(S, a >= 0x47700000u, zero + 0x7cu, r);                                        \
        r = EITHER(S, a > 0x7f800000u, zero + 0x7eu, r);                                         \
        return r | (u >> 24 & 0x80u);                                                            \
    }                                                                                            \
    ALWAYS vf32_##S e4m3fn_up_##S(vu32_##S h)                                                    \
    {                                                                                            \
        vu32_##S a = h & 0x7fu, r = low_widen_##S(a, 3, 7), zero = {0};                          \
        r = EITHER(S, a == 0x7fu, zero + 0x7fc00000u, r);                                        \
        return (vf32_##S)(r | (h & 0x80u) << 24);                                                \
    }                                                                                            \
    ALWAYS vu32_##S e4m3fn_down_##S(vf32_##S x)                                                  \
    {                                                                                            \
        vu32_##S u = (vu32_##S)x, a = u & 0x7fffffffu, r = low_round_##S(a, 3, 7), zero = {0};   \
        r = EITHER(S, a > 0x43e80000u, zero + 0x7fu, r);                                         \
        return r | (u >> 24 & 0x80u);                                                            \
    }
LOW_VECTORS(w)
#if FAN_WIDE > 16
LOW_VECTORS(s)
#endif

/* Low floats of memory to float32 and back. */
#define LOW_MEMORY(S, NAME, K, BITS, ...) LOW_MEMORY_OF(K, S, half##BITS##_##S, BITS)
#define LOW_MEMORY_OF(K, S, MEM, BITS)              \
    ALWAYS vf32_##S K##_in_##S(v##MEM x)            \
    {                                               \
        return K##_up_##S(widen##BITS##_##S(x));    \
    }                                               \
    ALWAYS v##MEM K##_out_##S(vf32_##S x)           \
    {                                               \
        return narrow##BITS##_##S(K##_down_##S(x)); \
    }
FAN_LOW_LIST(LOW_MEMORY, w)
#if FAN_WIDE > 16
FAN_LOW_LIST(LOW_MEMORY, s)
/* AVX2 and AVX-512 machines have instructions for float16; only their NaNs are made ours first. */
ALWAYS vf32_w quick_in_w(vhalf16_w x)
{
#if FAN_WIDE == 64
    return (vf32_w)_mm512_cvtph_ps((__m256i)x);
#else
    return (vf32_w)_mm256_cvtph_ps((__m128i)x);
#endif
}
ALWAYS vhalf16_w quick_out_w(vf32_w x)
{
    vu32_w u = (vu32_w)x;
    u = EITHER(w, (u & 0x7fffffffu) > 0x7f800000u, (u & 0x80000000u) | 0x7fc00000u, u);
#if FAN_WIDE == 64
    return (vhalf16_w)_mm512_cvtps_ph((__m512)u, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (vhalf16_w)_mm256_cvtps_ph((__m256)u, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
}
#define float16_in_w quick_in_w
#define float16_out_w quick_out_w
#endif

/* Floats to doubles and back, for the same reason. */
#if FAN_WIDE == 64
#define doubles_w(x) ((vf64_w)_mm512_cvtps_pd((__m256)(x)))
#define floats_w(x) ((vhalf32_w)_mm512_cvtpd_ps((__m512d)(x)))
#elif FAN_WIDE == 32
#define doubles_w(x) ((vf64_w)_mm256_cvtps_pd((__m128)(x)))
#define floats_w(x) ((vhalf32_w)_mm256_cvtpd_ps((__m256d)(x)))
#else
#define doubles_w(x) __builtin_convertvector(x, vf64_w)
#define floats_w(x) __builtin_convertvector(x, vhalf32_w)
#endif
#define doubles_s(x) __builtin_convertvector(x, vf64_s)
#define floats_s(x) __builtin_convertvector(x, vhalf32_s)

/* X(kind, vector in memory, number, vector, in, a plus b, a times b, a weighed by b, a over b,
 * out): the vectors of S's width. */
#define WIDE_VECTOR_LIST(X, S)                                                              \
    X(truth, S, u8_##S, uint8_t, vu8_##S, (vu8_##S)(x != 0) & 1, a | b, a & b, a & b, a, x) \
    X(bits8, S, u8_##S, uint8_t, vu8_##S, x, a + b, a * b, a * b, a, x)                     \
    X(bits16, S, u16_##S, uint16_t, vu16_##S, x, a + b, a * b, a * b, a, x)                 \
    X(bits32, S, u32_##S, uint32_t, vu32_##S, x, a + b, a * b, a * b, a, x)                 \
    X(bits64, S, u64_##S, uint64_t, vu64_##S, x, a + b, a * b, a * b, a, x)                 \
    X(single, S, f32_##S, float, vf32_##S, x, a + b, a * b, a * b, a / b, x)                \
    X(twice, S, f64_##S, double, vf64_##S, x, a + b, a * b, a * b, a / b, x)                \
    X(doubled, S, half32_##S, double, vf64_##S, doubles_##S(x), a + b, a * b, a * b, a / b, \
      floats_##S(x))
#define LOW_VECTOR(S, NAME, K, BITS, ...)                                                       \
    VECTOR_NUMBERS(K, S, half##BITS##_##S, float, vf32_##S, K##_in_##S(x), a + b, a * b, a * b, \
                   a / b, K##_out_##S(x))                                                       \
    VECTOR_NUMBERS(own_##K, S, half##BITS##_##S, float, vf32_##S, K##_in_##S(x),                \
                   K##_in_##S(K##_out_##S(a + b)), a *b, K##_in_##S(K##_out_##S(a *b)),         \
                   K##_in_##S(K##_out_##S(a / b)), K##_out_##S(x))

#define VECTOR_NUMBERS(K, S, MEM, T, V, UP, PLUS, TIMES, WEIGH, OVER, DOWN) \
    typedef v##MEM vector_##K##_##S;                                        \
    ALWAYS V in_##K##_##S(const char *p)                                    \
    {                                                                       \
        v##MEM x = *(const m##MEM *)(const void *)p;                        \
        return UP;                                                          \
    }                                                                       \
    ALWAYS V plus_##K##_##S(V a, V b)                                       \
    {                                                                       \
        return PLUS;                                                        \
    }                                                                       \
    ALWAYS V times_##K##_##S(V a, T b)                                      \
    {                                                                       \
        return TIMES;                                                       \
    }                                                                       \
    ALWAYS V weigh_##K##_##S(V a, T b)                                      \
    {                                                                       \
        return WEIGH;                                                       \
    }                                                                       \
    ALWAYS V over_##K##_##S(V a, T b)                                       \
    {                                                                       \
        (void)b;                                                            \
        return OVER;                                                        \
    }                                                                       \
    ALWAYS v##MEM down_##K##_##S(V x)                                       \
    {                                                                       \
        return DOWN;                                                        \
    }
WIDE_VECTOR_LIST(VECTOR_NUMBERS, w)
FAN_LOW_LIST(LOW_VECTOR, w)
#if FAN_WIDE > 16
WIDE_VECTOR_LIST(VECTOR_NUMBERS, s)
FAN_LOW_LIST(LOW_VECTOR, s)
#endif
#undef VECTOR_NUMBERS

/* ---- Folds ---- */

/* The begin and end of sums other than the sources: RAW is the number of the accumulation dtype in
 * memory, up_R and down_R convert from it and to it. */
#define FOLD_WIDTH(K, R, S, STEPS, MEM, RAW, T, V)                                               \
    /* A vector of source k; weights NULL: as it is. */                                          \
    ALWAYS V term_##K##_##S(const char *p, const char *weights, size_t k)                        \
    {                                                                                            \
        V x = in_##K##_##S(p);                                                                   \
        typedef RAW FAN_ANYWHERE raw_mem;                                                        \
        if (weights)                                                                             \
            x = weigh_##K##_##S(x, up_##R(((const raw_mem *)(const void *)weights)[k]));         \
        return x;                                                                                \
    }                                                                                            \
    ALWAYS V fold_in_##K##_##S(const char *const *src, const char *start, size_t i,              \
                               const char *weights)                                              \
    {                                                                                            \
        return start ? in_##R##_##S(start + i * sizeof(RAW))                                     \
                     : term_##K##_##S(src[0] + i * sizeof(MEM), weights, 0);                     \
    }                                                                                            \
    ALWAYS void fold_out_##K##_##S(char *dst, size_t i, V x, int raw, int stream)                \
    {                                                                                            \
        if (raw) {                                                                               \
            vector_##R##_##S y = down_##R##_##S(x);                                              \
            memcpy(dst + i * sizeof(RAW), &y, sizeof y);                                         \
            return;                                                                              \
        }                                                                                        \
        vector_##K##_##S y = down_##K##_##S(x);                                                  \
        if (stream)                                                                              \
            FLOW(dst + i * sizeof(MEM), &y);                                                     \
        else                                                                                     \
            memcpy(dst + i * sizeof(MEM), &y, sizeof y);                                         \
    }                                                                                            \
    /* For count >= lanes. */                                                                    \
    ALWAYS void fold_##K##_##S(char *dst, const char *const *src, size_t n, size_t count,        \
                               const char *start, T factor, int scaled, int raw, int ahead,      \
                               int stream, const char *weights, T divisor, int divided)          \
    {                                                                                            \
        const size_t lanes = sizeof(V) / sizeof(T), step = STEPS * lanes, first = !start;        \
        size_t i = 0;                                                                            \
        int rest = stream || count % lanes;                                                      \
        V last = {0};                                                                            \
        if (rest) {                                                                              \
            size_t at = count - lanes;                                                           \
            last = fold_in_##K##_##S(src, start, at, weights);                                   \
            for (size_t k = first; k < n; k++)                                                   \
                last =                                                                           \
                    plus_##K##_##S(last, term_##K##_##S(src[k] + at * sizeof(MEM), weights, k)); \
            if (divided)                                                                         \
                last = over_##K##_##S(last, divisor);                                            \
            if (scaled)                                                                          \
                last = times_##K##_##S(last, factor);                                            \
        }                                                                                        \
        if (stream) { /* whole lines at a time */                                                \
            size_t head = (64 - (uintptr_t)dst % 64) % 64 / sizeof(MEM);                         \
            if (weights || divided)                                                              \
                i = each_weighed_##K(dst, src, n, 0, head, start, factor, scaled, raw, weights,  \
                                     divisor, divided);                                          \
            else                                                                                 \
                i = each_##K(dst, src, n, 0, head, start, factor, scaled, raw);                  \
        }                                                                                        \
        for (; STEPS == 4 && i + step <= count; i += step) {                                     \
            const char *p = src[0] + i * sizeof(MEM);                                            \
            V a, b, c, d;                                                                        \
            a = fold_in_##K##_##S(src, start, i, weights);                                       \
            b = fold_in_##K##_##S(src, start, i + lanes, weights);                               \
            c = fold_in_##K##_##S(src, start, i + 2 * lanes, weights);                           \
            d = fold_in_##K##_##S(src, start, i + 3 * lanes, weights);                           \
            if (ahead && first)                                                                  \
                for (size_t q = 0; q < step * sizeof(MEM); q += 64)                              \
                    __builtin_prefetch(p + AHEAD + q);                                           \
            for (size_t k = first; k < n; k++) {                                                 \
                p = src[k] + i * sizeof(MEM);                                                    \
                if (ahead)                                                                       \
                    for (size_t q = 0; q < step * sizeof(MEM); q += 64)                          \
                        __builtin_prefetch(p + AHEAD + q);                                       \
                a = plus_##K##_##S(a, term_##K##_##S(p, weights, k));                            \
                b = plus_##K##_##S(b, term_##K##_##S(p + lanes * sizeof(MEM), weights, k));      \
                c = plus_##K##_##S(c, term_##K##_##S(p + 2 * lanes * sizeof(MEM), weights, k));  \
                d = plus_##K##_##S(d, term_##K##_##S(p + 3 * lanes * sizeof(MEM), weights, k));  \
            }                                                                                    \
            if (divided) {                                                                       \
                a = over_##K##_##S(a, divisor);                                                  \
                b = over_##K##_##S(b, divisor);                                                  \
                c = over_##K##_##S(c, divisor);                                                  \
                d = over_##K##_##S(d, divisor);                                                  \
            }                                                                                    \
            if (scaled) {                                                                        \
                a = times_##K##_##S(a, factor);                                                  \
                b = times_##K##_##S(b, factor);                                                  \
                c = times_##K##_##S(c, factor);                                                  \
                d = times_##K##_##S(d, factor);                                                  \
            }                                                                                    \
            fold_out_##K##_##S(dst, i, a, raw, stream);                                          \
            fold_out_##K##_##S(dst, i + lanes, b, raw, stream);                                  \
            fold_out_##K##_##S(dst, i + 2 * lanes, c, raw, stream);                              \
            fold_out_##K##_##S(dst, i + 3 * lanes, d, raw, stream);                              \
        }                                                                                        \
        for (; i + lanes <= count; i += lanes) {                                                 \
            V a = fold_in_##K##_##S(src, start, i, weights);                                     \
            for (size_t k = first; k < n; k++) {                                                 \
                if (STEPS == 1 && ahead && i % 64 == 0)                                          \
                    __builtin_prefetch(src[k] + i * sizeof(MEM) + AHEAD);                        \
                a = plus_##K##_##S(a, term_##K##_##S(src[k] + i * sizeof(MEM), weights, k));     \
            }                                                                                    \
            if (divided)                                                                         \
                a = over_##K##_##S(a, divisor);                                                  \
            if (scaled)                                                                          \
                a = times_##K##_##S(a, factor);                                                  \
            fold_out_##K##_##S(dst, i, a, raw, STEPS == 1 && stream);                            \
        }                                                                                        \
        if (rest)                                                                                \
            fold_out_##K##_##S(dst, count - lanes, last, raw, 0);                                \
    }

/* SMALL: fewer numbers than a wide vector has, but enough for a short one. */
#if FAN_WIDE > 16
#define FOLD_SMALL(...) FOLD_WIDTH(__VA_ARGS__)
#define SMALL(K, T, ...)           \
    if (count >= 16 / sizeof(T))   \
        fold_##K##_s(__VA_ARGS__); \
    else
#else
#define FOLD_SMALL(...)
#define SMALL(K, T, ...)
#endif

#define FOLD_EACH(K, R, MEM, RAW, T)                                                              \
    static __attribute__((noinline)) size_t each_##K(char *dst, const char *const *src, size_t n, \
                                                     size_t i, size_t end, const char *start,     \
                                                     T factor, int scaled, int raw)               \
    {                                                                                             \
        typedef MEM FAN_ANYWHERE mem;                                                             \
        typedef RAW FAN_ANYWHERE raw_mem;                                                         \
        for (; i < end; i++) {                                                                    \
            T a = start ? up_##R(((const raw_mem *)(const void *)start)[i])                       \
                        : up_##K(((const mem *)(const void *)src[0])[i]);                         \
            for (size_t k = !start; k < n; k++)                                                   \
                a = plus_##K(a, up_##K(((const mem *)(const void *)src[k])[i]));                  \
            if (scaled)                                                                           \
                a = times_##K(a, factor);                                                         \
            if (raw)                                                                              \
                ((raw_mem *)(void *)dst)[i] = down_##R(a);                                        \
            else                                                                                  \
                ((mem *)(void *)dst)[i] = down_##K(a);                                            \
        }                                                                                         \
        return i;                                                                                 \
    }                                                                                             \
    static __attribute__((noinline)) size_t each_weighed_##K(                                     \
        char *dst, const char *const *src, size_t n, size_t i, size_t end, const char *start,     \
        T factor, int scaled, int raw, const char *weights, T divisor, int divided)               \
    {                                                                                             \
        typedef MEM FAN_ANYWHERE mem;                                                             \
        typedef RAW FAN_ANYWHERE raw_mem;                                                         \
        const raw_mem *by = (const raw_mem *)(const void *)weights;                               \
        for (; i < end; i++) {                                                                    \
            T a = 0;                                                                              \
            if (start)                                                                            \
                a = up_##R(((const raw_mem *)(const void *)start)[i]);                            \
            for (size_t k = 0; k < n; k++) {                                                      \
                T x = up_##K(((const mem *)(const void *)src[k])[i]);                             \
                if (by)                                                                           \
                    x = weigh_##K(x, up_##R(by[k]));                                              \
                if (k == 0 && !start)                                                             \
                    a = x;                                                                        \
                else                                                                              \
                    a = plus_##K(a, x);                                                           \
            }                                                                                     \
            if (divided)                                                                          \
                a = over_##K(a, divisor);                                                         \
            if (scaled)                                                                           \
                a = times_##K(a, factor);                                                         \
            if (raw)                                                                              \
                ((raw_mem *)(void *)dst)[i] = down_##R(a);                                        \
            else                                                                                  \
                ((mem *)(void *)dst)[i] = down_##K(a);                                            \
        }                                                                                         \
        return i;                                                                                 \
    }
#define FACTOR(R, RAW, T)                        \
    T factor = 0;                                \
    if (options->factor) {                       \
        RAW of;                                  \
        memcpy(&of, options->factor, sizeof of); \
        factor = up_##R(of);                     \
    }
#define DIVISOR(R, RAW, T)                        \
    T divisor = 0;                                \
    if (options->divisor) {                       \
        RAW of;                                   \
        memcpy(&of, options->divisor, sizeof of); \
        divisor = up_##R(of);                     \
    }
#define CAN_STREAM(MEM)                                                       \
    (options->stream && !options->raw && (uintptr_t)dst % sizeof(MEM) == 0 && \
     count * sizeof(MEM) >= 1024)

/* WEIGHED: with weights or a divisor: one loop for all variants. */
#define WEIGHED(K, R, MEM, RAW, T)                                                                 \
    static __attribute__((noinline)) void weighed_##K(char *dst, const char *const *src, size_t n, \
                                                      size_t count,                                \
                                                      const fan_loop_options *options)             \
    {                                                                                              \
        FACTOR(R, RAW, T)                                                                          \
        DIVISOR(R, RAW, T)                                                                         \
        if (count < FAN_WIDE / sizeof(T)) {                                                        \
            each_weighed_##K(dst, src, n, 0, count, options->start, factor, !!options->factor,     \
                             options->raw, options->weights, divisor, !!options->divisor);         \
            return;                                                                                \
        }                                                                                          \
        int stream = CAN_STREAM(MEM);                                                              \
        fold_##K##_w(dst, src, n, count, options->start, factor, !!options->factor, options->raw,  \
                     options->ahead, stream, options->weights, divisor, !!options->divisor);       \
        if (stream)                                                                                \
            FLOWED();                                                                              \
    }

/* LIGHT: number types with cheap steps, where overhead counts: one loop per variant. */
#define LIGHT(K, R, MEM, RAW, T, V)                                                               \
    FOLD_EACH(K, R, MEM, RAW, T)                                                                  \
    FOLD_WIDTH(K, R, w, 4, MEM, RAW, T, V##_w)                                                    \
    FOLD_SMALL(K, R, s, 4, MEM, RAW, T, V##_s)                                                    \
    WEIGHED(K, R, MEM, RAW, T)                                                                    \
    static void few_##K(char *dst, const char *const *src, size_t n, size_t count,                \
                        const char *start, T factor, int scaled, int raw)                         \
    {                                                                                             \
        SMALL(K, T, dst, src, n, count, start, factor, scaled, raw, 0, 0, NULL, 0, 0)             \
        each_##K(dst, src, n, 0, count, start, factor, scaled, raw);                              \
    }                                                                                             \
    static __attribute__((noinline)) void sum_with_##K(char *dst, const char *const *src,         \
                                                       size_t n, size_t count,                    \
                                                       const fan_loop_options *options)           \
    {                                                                                             \
        if (options->weights || options->divisor) {                                               \
            weighed_##K(dst, src, n, count, options);                                             \
            return;                                                                               \
        }                                                                                         \
        FACTOR(R, RAW, T)                                                                         \
        if (count < FAN_WIDE / sizeof(T)) {                                                       \
            few_##K(dst, src, n, count, options->start, factor, !!options->factor, options->raw); \
        } else if (CAN_STREAM(MEM)) {                                                             \
            fold_##K##_w(dst, src, n, count, options->start, factor, !!options->factor, 0, 1, 1,  \
                         NULL, 0, 0);                                                             \
            FLOWED();                                                                             \
        } else if (options->ahead) {                                                              \
            fold_##K##_w(dst, src, n, count, options->start, factor, !!options->factor,           \
                         options->raw, 1, 0, NULL, 0, 0);                                         \
        } else {                                                                                  \
            fold_##K##_w(dst, src, n, count, options->start, factor, !!options->factor,           \
                         options->raw, 0, 0, NULL, 0, 0);                                         \
        }                                                                                         \
    }                                                                                             \
    static void sum_##K(char *dst, const char *const *src, size_t n, size_t count,                \
                        const fan_loop_options *options)                                          \
    {                                                                                             \
        if (options)                                                                              \
            sum_with_##K(dst, src, n, count, options);                                            \
        else if (count < FAN_WIDE / sizeof(T))                                                    \
            few_##K(dst, src, n, count, NULL, 0, 0, 0);                                           \
        else                                                                                      \
            fold_##K##_w(dst, src, n, count, NULL, 0, 0, 0, 0, 0, NULL, 0, 0);                    \
    }

/* HEAVY: number types with expensive steps: one loop for all variants. */
#define HEAVY(K, R, MEM, RAW, T, V)                                                               \
    FOLD_EACH(K, R, MEM, RAW, T)                                                                  \
    FOLD_WIDTH(K, R, w, 1, MEM, RAW, T, V##_w)                                                    \
    WEIGHED(K, R, MEM, RAW, T)                                                                    \
    static void sum_##K(char *dst, const char *const *src, size_t n, size_t count,                \
                        const fan_loop_options *options)                                          \
    {                                                                                             \
        static const fan_loop_options nothing;                                                    \
        options = options ? options : &nothing;                                                   \
        if (options->weights || options->divisor) {                                               \
            weighed_##K(dst, src, n, count, options);                                             \
            return;                                                                               \
        }                                                                                         \
        FACTOR(R, RAW, T)                                                                         \
        if (count < FAN_WIDE / sizeof(T)) {                                                       \
            each_##K(dst, src, n, 0, count, options->start, factor, !!options->factor,            \
                     options->raw);                                                               \
            return;                                                                               \
        }                                                                                         \
        int stream = CAN_STREAM(MEM);                                                             \
        fold_##K##_w(dst, src, n, count, options->start, factor, !!options->factor, options->raw, \
                     options->ahead, stream, NULL, 0, 0);                                         \
        if (stream)                                                                               \
            FLOWED();                                                                             \
    }

LIGHT(truth, truth, uint8_t, uint8_t, uint8_t, vu8)
LIGHT(bits8, bits8, uint8_t, uint8_t, uint8_t, vu8)
LIGHT(bits16, bits16, uint16_t, uint16_t, uint16_t, vu16)
LIGHT(bits32, bits32, uint32_t, uint32_t, uint32_t, vu32)
LIGHT(bits64, bits64, uint64_t, uint64_t, uint64_t, vu64)
LIGHT(single, single, float, float, float, vf32)
LIGHT(twice, twice, double, double, double, vf64)
LIGHT(doubled, twice, float, double, double, vf64)
#define HOW_16 LIGHT
#define HOW_8 HEAVY
#define LOW_FOLDS(X, NAME, K, BITS, ...)                      \
    HOW_##BITS(K, single, uint##BITS##_t, float, float, vf32) \
        HEAVY(own_##K, own_##K, uint##BITS##_t, uint##BITS##_t, float, vf32)
FAN_LOW_LIST(LOW_FOLDS, )

/* ---- Folds that count ----
 *
 * The statistics of float results, in the register: 16 numbers at a time, each into its lane. A
 * step with a non-finite number is neither counted nor written: the fold ends there, and its caller
 * handles those numbers one by one, while the operands are unchanged. */

#if defined(__x86_64__) && FAN_WIDE == 64
#define ANY(x) (_mm512_test_epi32_mask((__m512i)(x), (__m512i)(x)) != 0)
#elif defined(__x86_64__) && FAN_WIDE == 32
#define ANY(x) (!_mm256_testz_si256((__m256i)(x), (__m256i)(x)))
#elif defined(__x86_64__)
#define ANY(x) (_mm_movemask_epi8((__m128i)(x)) != 0)
#else
#define ANY(x) ((((vu64_w)(x))[0] | ((vu64_w)(x))[1]) != 0)
#endif

/* FLOW_SPLIT: as FLOW, sixteen bytes at a time: dst need not be at the start of a line. */
#if defined(__x86_64__)
#define FLOW_SPLIT(p, v)                         \
    for (size_t q = 0; q < sizeof *(v); q += 16) \
        flow16((char *)(p) + q, (const char *)(v) + q);
#else
#define FLOW_SPLIT(p, v) memcpy(p, v, sizeof *(v));
#endif

#define VECTORS_OF_LANES (FAN_STATS_LANES * 8 / FAN_WIDE)
#define VALUES_OF_VECTOR (FAN_WIDE / 8)

/* LARGER: the larger of two vectors of float64, lane by lane; b where a is NaN. */
#if defined(__x86_64__) && FAN_WIDE == 64
#define LARGER(a, b) ((vf64_w)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#elif defined(__x86_64__) && FAN_WIDE == 32
#define LARGER(a, b) ((vf64_w)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#elif defined(__x86_64__)
#define LARGER(a, b) ((vf64_w)_mm_max_pd((__m128d)(a), (__m128d)(b)))
#else
#define LARGER(a, b) larger(a, b)
ALWAYS vf64_w larger(vf64_w a, vf64_w b)
{
    vu64_w more = (vu64_w)(a > b);
    return (vf64_w)(((vu64_w)a & more) | ((vu64_w)b & ~more));
}
#endif

/* count_in: adds finite values to the next lanes. */
ALWAYS void count_in(vf64_w *sum, vf64_w *top, vf64_w x)
{
    vf64_w size = (vf64_w)((vu64_w)x & 0x7fffffffffffffffu);
    *sum += x * x;
    *top = LARGER(size, *top);
}

/* block_end: as fan_stats_block_end, of lanes in registers. */
ALWAYS void block_end(fan_stats_run *r, vf64_w *sum)
{
    for (size_t j = 0; j < VECTORS_OF_LANES; j++) {
        vf64_w before, rest;
        memcpy(&before, r->total + j * VALUES_OF_VECTOR, sizeof before);
        memcpy(&rest, r->rest + j * VALUES_OF_VECTOR, sizeof rest);
        vf64_w after = before + sum[j];
        vf64_w added = after - before;
        rest += (before - (after - added)) + (sum[j] - added);
        memcpy(r->total + j * VALUES_OF_VECTOR, &after, sizeof after);
        memcpy(r->rest + j * VALUES_OF_VECTOR, &rest, sizeof rest);
        sum[j] = (vf64_w){0};
    }
}

/* Of a vector of results, as float or double: which are not finite, and into which lanes the others
 * go. `at`: the first lane. */
ALWAYS vu64_w endless_single(vf32_w x)
{
    return (vu64_w)(((vu32_w)x & 0x7fffffffu) >= 0x7f800000u);
}
ALWAYS vu64_w endless_twice(vf64_w x)
{
    return (vu64_w)(((vu64_w)x & 0x7fffffffffffffffu) >= 0x7ff0000000000000u);
}
ALWAYS void count_single(vf64_w *sum, vf64_w *top, size_t at, vf32_w x)
{
    vhalf32_w half[2];
    memcpy(half, &x, sizeof x);
    size_t j = at / VALUES_OF_VECTOR;
    count_in(&sum[j], &top[j], doubles_w(half[0]));
    count_in(&sum[j + 1], &top[j + 1], doubles_w(half[1]));
}
ALWAYS void count_twice(vf64_w *sum, vf64_w *top, size_t at, vf64_w x)
{
    count_in(&sum[at / VALUES_OF_VECTOR], &top[at / VALUES_OF_VECTOR], x);
}

/* H: single or twice, the type in which rounded results are counted; BACK: converts a rounded
 * result to it. */
#define WATCH(K, R, H, MEM, T, V, BACK)                                                            \
    ALWAYS size_t watching_##K(char *dst, const char *const *src, size_t n, size_t count,          \
                               T factor, int scaled, int stream, fan_stats_run *r)                 \
    {                                                                                              \
        const size_t lanes = sizeof(V) / sizeof(T), step = 4 * lanes;                              \
        size_t i = 0;                                                                              \
        vf64_w sum[VECTORS_OF_LANES], top[VECTORS_OF_LANES];                                       \
        memcpy(sum, r->lane, sizeof sum);                                                          \
        memset(top, 0, sizeof top);                                                                \
        for (; i + step <= count; i += step) {                                                     \
            V x[4];                                                                                \
            vector_##K##_w y[4];                                                                   \
            for (size_t v = 0; v < 4; v++)                                                         \
                x[v] = in_##K##_w(src[0] + (i + v * lanes) * sizeof(MEM));                         \
            for (size_t q = 0; q < step * sizeof(MEM); q += 64)                                    \
                __builtin_prefetch(src[0] + i * sizeof(MEM) + AHEAD + q);                          \
            for (size_t k = 1; k < n; k++) {                                                       \
                const char *p = src[k] + i * sizeof(MEM);                                          \
                for (size_t q = 0; q < step * sizeof(MEM); q += 64)                                \
                    __builtin_prefetch(p + AHEAD + q);                                             \
                for (size_t v = 0; v < 4; v++)                                                     \
                    x[v] = plus_##K##_w(x[v], in_##K##_w(p + v * lanes * sizeof(MEM)));            \
            }                                                                                      \
            if (scaled)                                                                            \
                for (size_t v = 0; v < 4; v++)                                                     \
                    x[v] = times_##K##_w(x[v], factor);                                            \
            vu64_w endless = {0};                                                                  \
            for (size_t v = 0; v < 4; v++) {                                                       \
                y[v] = down_##K##_w(x[v]);                                                         \
                endless |= endless_##H(BACK(y[v]));                                                \
            }                                                                                      \
            if (ANY(endless))                                                                      \
                break;                                                                             \
            for (size_t v = 0; v < 4; v++) {                                                       \
                count_##H(sum, top, v * lanes % FAN_STATS_LANES, BACK(y[v]));                      \
                if (stream == 2)                                                                   \
                    FLOW(dst + (i + v * lanes) * sizeof(MEM), &y[v]);                              \
                else if (stream)                                                                   \
                    FLOW_SPLIT(dst + (i + v * lanes) * sizeof(MEM), &y[v])                         \
                else                                                                               \
                    memcpy(dst + (i + v * lanes) * sizeof(MEM), &y[v], sizeof y[v]);               \
            }                                                                                      \
            if ((r->numbers + i + step) % FAN_STATS_BLOCK == 0)                                    \
                block_end(r, sum);                                                                 \
        }                                                                                          \
        double most[FAN_STATS_LANES];                                                              \
        memcpy(r->lane, sum, sizeof sum);                                                          \
        memcpy(most, top, sizeof top);                                                             \
        for (size_t k = 0; k < FAN_STATS_LANES; k++)                                               \
            r->top = most[k] > r->top ? most[k] : r->top;                                          \
        r->numbers += i;                                                                           \
        return i;                                                                                  \
    }                                                                                              \
    static size_t watch_##K(char *dst, const char *const *src, size_t n, size_t count,             \
                            const fan_loop_options *options, fan_stats_run *r)                     \
    {                                                                                              \
        FACTOR(R, RAW_##H, T)                                                                      \
        const size_t step = 4 * FAN_WIDE / sizeof(T);                                              \
        if (step % FAN_STATS_LANES || r->numbers % step)                                           \
            return 0;                                                                              \
        if (options->stream && (uintptr_t)dst % 16 == 0 && sizeof(vector_##K##_w) >= 16) {         \
            size_t done = (uintptr_t)dst % sizeof(vector_##K##_w) == 0                             \
                              ? watching_##K(dst, src, n, count, factor, !!options->factor, 2, r)  \
                              : watching_##K(dst, src, n, count, factor, !!options->factor, 1, r); \
            FLOWED();                                                                              \
            return done;                                                                           \
        }                                                                                          \
        return watching_##K(dst, src, n, count, factor, !!options->factor, 0, r);                  \
    }
#define RAW_single float
#define RAW_twice double
#define ITSELF(y) (y)
WATCH(single, single, single, float, float, vf32_w, ITSELF)
WATCH(twice, twice, twice, double, double, vf64_w, ITSELF)
WATCH(float16, single, single, uint16_t, float, vf32_w, float16_in_w)
WATCH(bfloat16, single, single, uint16_t, float, vf32_w, bfloat16_in_w)

/* ---- Scattered sums, running sums, factors ---- */

#define ADD_AT(K, MEM, RUN)                                                                      \
    static void add_at_##K(char *dst, const int64_t *to, const char *src, const int64_t *from,   \
                           size_t n, size_t run)                                                 \
    {                                                                                            \
        typedef MEM FAN_ANYWHERE mem;                                                            \
        for (size_t k = 0; k < n; k++) {                                                         \
            mem *d = (mem *)(void *)(dst + to[k]);                                               \
            const mem *s =                                                                       \
                (const mem *)(const void *)(from ? src + from[k] : src + k * run * sizeof(mem)); \
            if (run == 1) {                                                                      \
                d[0] = down_##K(plus_##K(up_##K(d[0]), up_##K(s[0])));                           \
                continue;                                                                        \
            }                                                                                    \
            RUN(K)                                                                               \
        }                                                                                        \
    }
#define RUN_HERE(K)                  \
    FAN_VECTOR                       \
    for (size_t i = 0; i < run; i++) \
        d[i] = down_##K(plus_##K(up_##K(d[i]), up_##K(s[i])));
#define RUN_THERE(K)                                         \
    const char *both[] = {(const char *)d, (const char *)s}; \
    sum_##K((char *)d, both, 2, run, NULL);
#define OTHERS(K, MEM, T, RUN)                                          \
    ADD_AT(K, MEM, RUN)                                                 \
    static void add_up_##K(char *acc, const char *src, size_t n)        \
    {                                                                   \
        typedef MEM FAN_ANYWHERE mem;                                   \
        const mem *s = (const mem *)(const void *)src;                  \
        T sum = up_##K(*(const mem *)(const void *)acc);                \
        for (size_t i = 0; i < n; i++)                                  \
            sum = plus_##K(sum, up_##K(s[i]));                          \
        *(mem *)(void *)acc = down_##K(sum);                            \
    }                                                                   \
    static void scale_##K(char *dst, const char *factor, size_t n)      \
    {                                                                   \
        const char *src[] = {dst};                                      \
        sum_##K(dst, src, 1, n, &(fan_loop_options){.factor = factor}); \
    }
OTHERS(truth, uint8_t, uint8_t, RUN_HERE)
OTHERS(bits8, uint8_t, uint8_t, RUN_HERE)
OTHERS(bits16, uint16_t, uint16_t, RUN_HERE)
OTHERS(bits32, uint32_t, uint32_t, RUN_HERE)
OTHERS(bits64, uint64_t, uint64_t, RUN_HERE)
OTHERS(single, float, float, RUN_HERE)
OTHERS(twice, double, double, RUN_HERE)
#define LOW_OTHERS(X, NAME, K, BITS, ...) OTHERS(own_##K, uint##BITS##_t, float, RUN_THERE)
FAN_LOW_LIST(LOW_OTHERS, )

/* Complex numbers are added part by part; only these two handle whole ones. */
#define COMPLEX(K, T)                                             \
    static void add_up_c##K(char *acc, const char *src, size_t n) \
    {                                                             \
        typedef T FAN_ANYWHERE mem;                               \
        const mem *s = (const mem *)(const void *)src;            \
        mem *a = (mem *)(void *)acc;                              \
        T re = a[0], im = a[1];                                   \
        for (size_t i = 0; i < n; i++) {                          \
            re += s[2 * i];                                       \
            im += s[2 * i + 1];                                   \
        }                                                         \
        a[0] = re;                                                \
        a[1] = im;                                                \
    }
COMPLEX(single, float)
COMPLEX(twice, double)

/* Complex factors are the same in every set: with AVX-512, GCC 12 contracts (re * fr) -+ (im * fi)
 * to an FMA despite -ffp-contract, which gives other bits. */
void fan_loops_scale_csingle(char *dst, const char *factor, size_t n);
void fan_loops_scale_ctwice(char *dst, const char *factor, size_t n);
#if FAN_WIDE == 16
#define COMPLEX_FACTOR(K, T)                                           \
    void fan_loops_scale_c##K(char *dst, const char *factor, size_t n) \
    {                                                                  \
        typedef T FAN_ANYWHERE mem;                                    \
        mem *d = (mem *)(void *)dst;                                   \
        T fr = ((const mem *)(const void *)factor)[0],                 \
          fi = ((const mem *)(const void *)factor)[1];                 \
        for (size_t i = 0; i < n; i++) {                               \
            T re = d[2 * i], im = d[2 * i + 1];                        \
            d[2 * i] = re * fr - im * fi;                              \
            d[2 * i + 1] = re * fi + im * fr;                          \
        }                                                              \
    }
COMPLEX_FACTOR(single, float)
COMPLEX_FACTOR(twice, double)
#endif

/* ---- Statistics ----
 *
 * The quick way assumes that all is finite: 16 numbers at a time, each into its lane. If a square
 * or the largest shows otherwise (or squares exceed float64), the same numbers are counted again,
 * one by one. */

static void measure_each(fan_stats_run *r, const double *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool whole = isfinite(x[i]);
        double size = fabs(x[i]);
        r->nonfinite += !whole;
        r->top = whole && size > r->top ? size : r->top;
        r->lane[r->numbers++ % FAN_STATS_LANES] += whole ? x[i] * x[i] : 0.0;
        if (r->numbers % FAN_STATS_BLOCK == 0)
            fan_stats_block_end(r);
    }
}

static void measure_pairs(fan_stats_run *r, const double *x, size_t n)
{
    for (size_t i = 0; i < n; i += 2) {
        double re = x[i];
        double im = x[i + 1];
        double *lane = r->lane + r->numbers % FAN_STATS_LANES;
        bool whole = isfinite(re) && isfinite(im);
        r->nonfinite += !whole;
        lane[0] += whole ? re * re : 0.0;
        lane[1] += whole ? im * im : 0.0;
        if (whole && fabs(re) + fabs(im) >= r->top) { /* else |z| cannot be the largest */
            double size = fan_complex_abs(re, im);
            r->top = size > r->top ? size : r->top;
        }
        r->numbers += 2;
        if (r->numbers % FAN_STATS_BLOCK == 0)
            fan_stats_block_end(r);
    }
}

/* SURVEY: T is float or double. `r->numbers` and n are multiples of the lanes, and n ends in the
 * block; false: nothing was counted, all must be counted one by one. */
#define SURVEY(NAME, IN, T)                                                                   \
    static bool measure_##NAME(fan_stats_run *r, const char *src, size_t n)                   \
    {                                                                                         \
        vf64_w sum[VECTORS_OF_LANES], top[VECTORS_OF_LANES];                                  \
        memcpy(sum, r->lane, sizeof sum);                                                     \
        memset(top, 0, sizeof top);                                                           \
        for (size_t i = 0; i < n; i += FAN_STATS_LANES, src += FAN_STATS_LANES * sizeof(T)) { \
            _Pragma("GCC unroll 8") for (size_t j = 0; j < VECTORS_OF_LANES; j++)             \
            {                                                                                 \
                count_in(&sum[j], &top[j], IN(src + j * VALUES_OF_VECTOR * sizeof(T)));       \
            }                                                                                 \
        }                                                                                     \
        double lane[FAN_STATS_LANES], most[FAN_STATS_LANES], all = 0, largest = 0;            \
        memcpy(lane, sum, sizeof lane);                                                       \
        memcpy(most, top, sizeof most);                                                       \
        for (size_t i = 0; i < FAN_STATS_LANES; i++) {                                        \
            all += lane[i];                                                                   \
            largest = most[i] > largest ? most[i] : largest;                                  \
        }                                                                                     \
        if (!isfinite(all) || !isfinite(largest))                                             \
            return false;                                                                     \
        r->top = largest > r->top ? largest : r->top;                                         \
        r->numbers += n;                                                                      \
        if (r->numbers % FAN_STATS_BLOCK == 0)                                                \
            block_end(r, sum);                                                                \
        memcpy(r->lane, sum, sizeof sum);                                                     \
        return true;                                                                          \
    }
SURVEY(single, in_doubled_w, float)
SURVEY(twice, in_twice_w, double)

#define PIECE FAN_STATS_BLOCK

/* survey_length: returns how many of the next n numbers are counted at once: up to the next lane 0,
 * or whole lanes up to the end of the block, or the rest. */
ALWAYS size_t survey_length(const fan_stats_run *r, size_t n)
{
    size_t phase = r->numbers % FAN_STATS_LANES;
    size_t most = FAN_STATS_LANES - phase;
    if (phase == 0) {
        most = FAN_STATS_BLOCK - r->numbers % FAN_STATS_BLOCK;
        if (n > FAN_STATS_LANES)
            n -= n % FAN_STATS_LANES;
    }
    return n < most ? n : most;
}

/* SURVEY_AS: converts values of another dtype to double (or float) first, a piece at a time. */
#define SURVEY_AS(NAME, MEM, T, HOW, EXPR)                                                    \
    static void stats_##NAME(fan_stats_run *r, const char *src, size_t n)                     \
    {                                                                                         \
        typedef MEM FAN_ANYWHERE mem;                                                         \
        FAN_UNINITIALIZED T buf[PIECE];                                                       \
        FAN_UNINITIALIZED double wide[PIECE];                                                 \
        for (size_t m; n; n -= m, src += m * sizeof(mem)) {                                   \
            size_t phase = r->numbers % FAN_STATS_LANES;                                      \
            const mem *s = (const mem *)(const void *)src;                                    \
            m = survey_length(r, n);                                                          \
            for (size_t i = 0; i < m; i++) {                                                  \
                mem x = s[i];                                                                 \
                buf[i] = (T)(EXPR);                                                           \
            }                                                                                 \
            if (!phase && m % FAN_STATS_LANES == 0 && measure_##HOW(r, (const char *)buf, m)) \
                continue;                                                                     \
            for (size_t i = 0; i < m; i++)                                                    \
                wide[i] = (double)buf[i];                                                     \
            measure_each(r, wide, m);                                                         \
        }                                                                                     \
    }
SURVEY_AS(truth, uint8_t, double, twice, x != 0)
SURVEY_AS(int8, int8_t, double, twice, x)
SURVEY_AS(int16, int16_t, double, twice, x)
SURVEY_AS(int32, int32_t, double, twice, x)
SURVEY_AS(int64, int64_t, double, twice, x)
SURVEY_AS(uint8, uint8_t, double, twice, x)
SURVEY_AS(uint16, uint16_t, double, twice, x)
SURVEY_AS(uint32, uint32_t, double, twice, x)
SURVEY_AS(uint64, uint64_t, double, twice, x)
#define LOW_SURVEY(X, NAME, K, BITS, ...) \
    SURVEY_AS(K, uint##BITS##_t, float, single, fan_float_of_##K(x))
FAN_LOW_LIST(LOW_SURVEY, )

/* SURVEY_REAL: reads in place. */
#define SURVEY_REAL(NAME, T)                                                     \
    static void stats_##NAME(fan_stats_run *r, const char *src, size_t n)        \
    {                                                                            \
        typedef T FAN_ANYWHERE mem;                                              \
        FAN_UNINITIALIZED double wide[PIECE];                                    \
        for (size_t m; n; n -= m, src += m * sizeof(T)) {                        \
            size_t phase = r->numbers % FAN_STATS_LANES;                         \
            m = survey_length(r, n);                                             \
            if (!phase && m % FAN_STATS_LANES == 0 && measure_##NAME(r, src, m)) \
                continue;                                                        \
            for (size_t i = 0; i < m; i++)                                       \
                wide[i] = (double)((const mem *)(const void *)src)[i];           \
            measure_each(r, wide, m);                                            \
        }                                                                        \
    }
SURVEY_REAL(single, float)
SURVEY_REAL(twice, double)

/* SURVEY_COMPLEX: n elements, 2n numbers. */
#define SURVEY_COMPLEX(NAME, T)                                               \
    static void stats_c##NAME(fan_stats_run *r, const char *src, size_t n)    \
    {                                                                         \
        typedef T FAN_ANYWHERE mem;                                           \
        FAN_UNINITIALIZED double wide[PIECE];                                 \
        for (size_t m, left = 2 * n; left; left -= m, src += m * sizeof(T)) { \
            size_t phase = r->numbers % FAN_STATS_LANES;                      \
            m = phase ? FAN_STATS_LANES - phase : PIECE;                      \
            m = left < m ? left : m;                                          \
            for (size_t i = 0; i < m; i++)                                    \
                wide[i] = (double)((const mem *)(const void *)src)[i];        \
            measure_pairs(r, wide, m);                                        \
        }                                                                     \
    }
SURVEY_COMPLEX(single, float)
SURVEY_COMPLEX(twice, double)

static uint64_t read_all(const char *p, size_t bytes)
{
    vu64_w a = {0}, b = a, c = a, d = a;
    const size_t step = 4 * FAN_WIDE;
    for (size_t i = 0; i + step <= bytes; i += step) {
        for (size_t q = 0; q < step; q += 64)
            __builtin_prefetch(p + i + 2 * AHEAD + q);
        a ^= *(const mu64_w *)(const void *)(p + i);
        b ^= *(const mu64_w *)(const void *)(p + i + FAN_WIDE);
        c ^= *(const mu64_w *)(const void *)(p + i + 2 * FAN_WIDE);
        d ^= *(const mu64_w *)(const void *)(p + i + 3 * FAN_WIDE);
    }
    a ^= b ^ c ^ d;
    for (size_t k = 1; k < FAN_WIDE / 8; k++)
        a[0] ^= a[k];
    return a[0];
}

/* ---- The set ---- */

#define REAL(K, MEM, STATS, WATCH)                                          \
    {sizeof(MEM), 1,         sum_##K,       NULL,  FAN_DT_NONE, add_at_##K, \
     add_up_##K,  scale_##K, stats_##STATS, WATCH, NULL}
#define WATCH_16(K) watch_##K
#define WATCH_8(K) NULL
#define LOW_REAL(X, NAME, K, BITS, ...)                \
    [FAN_DT_##NAME] = {BITS / 8,       1,              \
                       sum_own_##K,    sum_##K,        \
                       FAN_DT_FLOAT32, add_at_own_##K, \
                       add_up_own_##K, scale_own_##K,  \
                       stats_##K,      NULL,           \
                       WATCH_##BITS(K)},
#define PAIR(K, MEM, UP, UPPER)                                                      \
    {2 * sizeof(MEM),      2,          sum_##K, UP,  UPPER, add_at_##K, add_up_c##K, \
     fan_loops_scale_c##K, stats_c##K, NULL,    NULL}

const fan_loop_set FAN_SET = {
    FAN_NAME,
    read_all,
    {
        [FAN_DT_BOOL] = REAL(truth, uint8_t, truth, NULL),
        [FAN_DT_INT8] = REAL(bits8, uint8_t, int8, NULL),
        [FAN_DT_INT16] = REAL(bits16, uint16_t, int16, NULL),
        [FAN_DT_INT32] = REAL(bits32, uint32_t, int32, NULL),
        [FAN_DT_INT64] = REAL(bits64, uint64_t, int64, NULL),
        [FAN_DT_UINT8] = REAL(bits8, uint8_t, uint8, NULL),
        [FAN_DT_UINT16] = REAL(bits16, uint16_t, uint16, NULL),
        [FAN_DT_UINT32] = REAL(bits32, uint32_t, uint32, NULL),
        [FAN_DT_UINT64] = REAL(bits64, uint64_t, uint64, NULL),
        FAN_LOW_LIST(LOW_REAL, )[FAN_DT_FLOAT32] = {4, 1, sum_single, sum_doubled, FAN_DT_FLOAT64,
                                                    add_at_single, add_up_single, scale_single,
                                                    stats_single, watch_single, NULL},
        [FAN_DT_FLOAT64] = REAL(twice, double, twice, watch_twice),
        [FAN_DT_COMPLEX64] = PAIR(single, float, sum_doubled, FAN_DT_COMPLEX128),
        [FAN_DT_COMPLEX128] = PAIR(twice, double, NULL, FAN_DT_NONE),
    },
};
