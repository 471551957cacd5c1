// clang-format Language: Cpp
/* sum_body: the loops of sums for one instruction set, written once and compiled three times. Each
 * file that makes a set includes it once, after it has defined
 *
 *   FAN_SET    the name of the fan_loop_set to define
 *   FAN_NAME   its name as text
 *   FAN_WIDE   the bytes of its widest vector: 16, 32 or 64
 *
 * and has enabled the instruction set in the compiler. Only the few lines under "Machines" and
 * "Short integers" depend on which one it is. It includes sum_numbers.h for each width of vectors,
 * and sum_fold.h for each number type.
 *
 * A fold takes a step of four vectors from each source in turn and keeps the four sums in
 * registers, so that every element is read once and written once, whatever the number of sources.
 * The remainder after the last whole vector is one more vector, which ends with the last element
 * and was read before anything was written: `dst` may be one of the sources. Low floats become
 * float32 (or are rounded) in the register. */
#include "array/convert.h"
#include "array/device_stats.h"
#include "array/lowp.h"
#include "array/sum_loops.h"

#include <math.h>

#define ALWAYS static inline __attribute__((always_inline, unused))
#define ALONE static __attribute__((noinline))
#define AHEAD 1024 /* bytes between the current sum and the prefetch */

/* The names of a number type KIND, of its accumulation dtype SUM, and of vectors of a WIDTH. */
#define JOINED(a, b, c) a##b##c
#define JOIN(a, b, c) JOINED(a, b, c)
#define AT_WIDTH(name) JOIN(name, _, WIDTH)
#define OF(name) JOIN(name, _, KIND)
#define OF_SUM(name) JOIN(name, _, SUM)
#define AT(name) AT_WIDTH(OF(name))
#define SUM_AT(name) AT_WIDTH(OF_SUM(name))
#define ONE(name) JOIN(OF(name), _, 1)
#define SHORT(name) JOIN(OF(name), _, s)
#define WIDE(name) JOIN(OF(name), _, w)
#define SUM_ONE(name) JOIN(OF_SUM(name), _, 1)

/* ---- Machines ---- */

#if defined(__x86_64__)
#include <immintrin.h>
/* flow4 .. flow64: store a vector past the caches. */
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
#endif
#if FAN_WIDE >= 64
ALWAYS void flow64(void *p, const void *v)
{
    _mm512_stream_si512(p, _mm512_loadu_si512(v));
}
#endif
#endif

/* flow: stores a vector past the caches, where the machine can. */
ALWAYS void flow(void *p, const void *v, size_t bytes)
{
#if defined(__x86_64__)
    switch (bytes) {
    case 4:
        flow4(p, v);
        return;
    case 8:
        flow8(p, v);
        return;
    case 16:
        flow16(p, v);
        return;
#if FAN_WIDE >= 32
    case 32:
        flow32(p, v);
        return;
#endif
#if FAN_WIDE >= 64
    case 64:
        flow64(p, v);
        return;
#endif
    default:
        break;
    }
#endif
    memcpy(p, v, bytes);
}

/* flow_split: the same sixteen bytes at a time: p need not be at the start of a line. */
ALWAYS void flow_split(char *p, const void *v, size_t bytes)
{
    for (size_t q = 0; q < bytes; q += 16)
        flow(p + q, (const char *)v + q, 16);
}

/* flowed: what was stored past the caches is there for other threads. */
ALWAYS void flowed(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* can_flow: whether a result is large enough to be stored past the caches. */
ALWAYS bool can_flow(const char *dst, size_t count, size_t size, const fan_loop_options *options)
{
    bool wanted = options->stream && !options->raw;
    bool aligned = (uintptr_t)dst % size == 0;
    return wanted && aligned && count * size >= 1024;
}

ALWAYS void fetch_ahead(const char *p, size_t bytes)
{
    for (size_t q = 0; q < bytes; q += 64)
        __builtin_prefetch(p + AHEAD + q);
}

/* ---- Short integers to 32 bits and back ----
 *
 * __builtin_convertvector could express it, but today's compilers convert half by half where one
 * instruction would do. The narrowed values fit. */
#if defined(__x86_64__)
/* The registers that hold the numbers, short ones perhaps in their lower part. */
typedef __m128i words_16, halves_16, bytes_16;
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
typedef __m256i words_32;
typedef __m128i halves_32, bytes_32;
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
typedef __m512i words_64;
typedef __m256i halves_64;
typedef __m128i bytes_64;
#define widen16_64 _mm512_cvtepu16_epi32
#define widen8_64 _mm512_cvtepu8_epi32
#define narrow16_64 _mm512_cvtepi32_epi16
#define narrow8_64 _mm512_cvtepi32_epi8
#endif
#endif

/* ---- Numbers, and vectors of them ---- */

#define WIDTH 1
#define BYTES 0
#include "array/sum_numbers.h"
#if FAN_WIDE > 16
#define WIDTH s
#define BYTES 16
#include "array/sum_numbers.h"
#endif
#define WIDTH w
#define BYTES FAN_WIDE
#include "array/sum_numbers.h"

/* ---- Counting ----
 *
 * The statistics of float results, in the register: 16 numbers at a time, each into its lane. A
 * step with a non-finite number is neither counted nor written: the fold ends there, and its caller
 * handles those numbers one by one, while the operands are unchanged. */

/* any: whether a bit is set. */
ALWAYS bool any(vu64_w x)
{
#if defined(__x86_64__) && FAN_WIDE == 64
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__x86_64__) && FAN_WIDE == 32
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#elif defined(__x86_64__)
    return _mm_movemask_epi8((__m128i)x) != 0;
#else
    return (x[0] | x[1]) != 0;
#endif
}

#define VECTORS_OF_LANES (FAN_STATS_LANES * 8 / FAN_WIDE)
#define VALUES_OF_VECTOR (FAN_WIDE / 8)

/* larger: the larger of two vectors of float64, lane by lane; b where a is NaN. */
ALWAYS vf64_w larger(vf64_w a, vf64_w b)
{
#if defined(__x86_64__) && FAN_WIDE == 64
    return (vf64_w)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__x86_64__) && FAN_WIDE == 32
    return (vf64_w)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__x86_64__)
    return (vf64_w)_mm_max_pd((__m128d)a, (__m128d)b);
#else
    vu64_w more = (vu64_w)(a > b);
    return (vf64_w)(((vu64_w)a & more) | ((vu64_w)b & ~more));
#endif
}

/* count_in: adds finite values to the next lanes. */
ALWAYS void count_in(vf64_w *sum, vf64_w *top, vf64_w x)
{
    vf64_w size = (vf64_w)((vu64_w)x & 0x7fffffffffffffffu);
    *sum += x * x;
    *top = larger(size, *top);
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

/* ---- Folds of each number type (sum_fold.h) ---- */

#define KIND truth
#include "array/sum_fold.h"
#define KIND bits8
#include "array/sum_fold.h"
#define KIND bits16
#include "array/sum_fold.h"
#define KIND bits32
#include "array/sum_fold.h"
#define KIND bits64
#include "array/sum_fold.h"
#define KIND single
#define COUNTED
#include "array/sum_fold.h"
#define KIND twice
#define COUNTED
#include "array/sum_fold.h"
#define KIND doubled
#define SUM twice
#include "array/sum_fold.h"
#define KIND float16
#define SUM single
#define COUNTED
#include "array/sum_fold.h"
#define KIND bfloat16
#define SUM single
#define COUNTED
#include "array/sum_fold.h"
#define KIND e4m3fn
#define SUM single
#define STEPS 1
#include "array/sum_fold.h"
#define KIND e5m2
#define SUM single
#define STEPS 1
#include "array/sum_fold.h"
#define KIND own_float16
#define STEPS 1
#include "array/sum_fold.h"
#define KIND own_bfloat16
#define STEPS 1
#include "array/sum_fold.h"
#define KIND own_e4m3fn
#define STEPS 1
#include "array/sum_fold.h"
#define KIND own_e5m2
#define STEPS 1
#include "array/sum_fold.h"

/* ---- Complex numbers ---- */

/* Complex numbers are added part by part; only these two handle whole ones. */
#define COMPLEX(K, T)                                             \
    static void add_up_c##K(char *acc, const char *src, size_t n) \
    {                                                             \
        typedef T FAN_ANYWHERE mem;                               \
        const mem *s = (const mem *)src;                          \
        mem *a = (mem *)acc;                                      \
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
#define COMPLEX_FACTOR(K, T)                                            \
    void fan_loops_scale_c##K(char *dst, const char *factor, size_t n)  \
    {                                                                   \
        typedef T FAN_ANYWHERE mem;                                     \
        mem *d = (mem *)dst;                                            \
        T fr = ((const mem *)factor)[0], fi = ((const mem *)factor)[1]; \
        for (size_t i = 0; i < n; i++) {                                \
            T re = d[2 * i], im = d[2 * i + 1];                         \
            d[2 * i] = re * fr - im * fi;                               \
            d[2 * i + 1] = re * fi + im * fr;                           \
        }                                                               \
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
        if (whole && size > r->top)
            r->top = size;
        if (whole)
            r->lane[r->numbers % FAN_STATS_LANES] += x[i] * x[i];
        r->numbers++;
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
        if (whole) {
            lane[0] += re * re;
            lane[1] += im * im;
        }
        if (whole && fabs(re) + fabs(im) >= r->top) { /* else |z| cannot be the largest */
            double size = fan_complex_abs(re, im);
            if (size > r->top)
                r->top = size;
        }
        r->numbers += 2;
        if (r->numbers % FAN_STATS_BLOCK == 0)
            fan_stats_block_end(r);
    }
}

/* SURVEY: T is float or double. `r->numbers` and n are multiples of the lanes, and n ends in the
 * block; false: nothing was counted, all must be counted one by one. */
#define SURVEY(NAME, IN, T)                                                                   \
    ALONE bool measure_##NAME(fan_stats_run *r, const char *src, size_t n)                    \
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
    if (n < most)
        return n;
    return most;
}

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
                wide[i] = (double)((const mem *)src)[i];                         \
            measure_each(r, wide, m);                                            \
        }                                                                        \
    }
SURVEY_REAL(single, float)
SURVEY_REAL(twice, double)

/* SURVEY_AS: converts values of another dtype to those of WIDE first, a piece at a time. */
#define SURVEY_AS(NAME, MEM, T, WIDE, EXPR)                               \
    static void stats_##NAME(fan_stats_run *r, const char *src, size_t n) \
    {                                                                     \
        typedef MEM FAN_ANYWHERE mem;                                     \
        FAN_UNINITIALIZED T wide[PIECE];                                  \
        for (size_t m; n; n -= m, src += m * sizeof(mem)) {               \
            const mem *s = (const mem *)src;                              \
            m = n < PIECE ? n : PIECE;                                    \
            for (size_t i = 0; i < m; i++) {                              \
                mem x = s[i];                                             \
                wide[i] = (T)(EXPR);                                      \
            }                                                             \
            stats_##WIDE(r, (const char *)wide, m);                       \
        }                                                                 \
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
                wide[i] = (double)((const mem *)src)[i];                      \
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
        a ^= *(const mu64_w *)(p + i);
        b ^= *(const mu64_w *)(p + i + FAN_WIDE);
        c ^= *(const mu64_w *)(p + i + 2 * FAN_WIDE);
        d ^= *(const mu64_w *)(p + i + 3 * FAN_WIDE);
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
