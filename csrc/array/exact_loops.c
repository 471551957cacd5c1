/* exact_loops: see exact_loops.h. Macros make the loops, so that each is written once. In this
 * order: proofs; terms; tiles; straight from the operands to the result; the loops for each vector
 * unit; proofs with a factor. */
#include "array/exact_loops.h"

#include "array/convert.h"
#include "array/lowp.h"
#include "array/sum_isa.h"
#include "base/fault.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* proof: the constants of judging an element. */
typedef struct proof {
    double n, reach, lost;
    int span; /* narrow: exponents that differ by at most this prove that nothing was lost */
} proof;

static proof proof_of(const judge *j, bool is_wide)
{
    double n = (double)j->n;
    int bits = 0; /* n <= 2^bits */
    if (j->n > 1)
        bits = 64 - __builtin_clzll((unsigned long long)j->n - 1);
    proof p = {n, of_bits((uint64_t)(1023 + 53 - j->digits) << 52), (n * n + 2 * n) * 0x1p-52,
               52 - j->digits - bits};
    if (is_wide) /* by powers of two, so that neither side overflows */
        p = (proof){n * n * 0x1p-64, 0x1p-11, n * n * n * 0x1p-104, 0};
    if (FAN_FAULT(EXACT_NO_RANGE)) {
        p.reach *= 0x1p70;
        p.span += 70;
    }
    return p;
}

#define NEVER(a, b) ((void)(a), (void)(b), 0)
#define SINGLE(a, b) ((float)(a) == (float)(b))
#define LOW(a, b) (fan_odd_of_double(a) == fan_odd_of_double(b))

/* quick_bad: the first proof from exponents alone; tried first, because it holds for numbers of
 * similar size. */
ALWAYS_INLINE uint32_t quick_bad(uint32_t low, uint32_t high, proof p)
{
    return (int32_t)(high >> 24) > (int32_t)(low >> 24) + p.span;
}

ALWAYS_INLINE uint64_t quick_bad_wide(double value, double small, double large, proof p)
{
    uint64_t range = !(p.n * large <= small * p.reach);
    uint64_t finite = !(value - value == 0);
    return range | finite;
}

/* NAME_bad: true if this sum has no proof. An inf or NaN among the terms shows in the sum, which
 * cannot overflow, so it is right. */
#define NARROW_BAD(NAME, ALIKE)                                                              \
    ALWAYS_INLINE uint32_t narrow_bad_##NAME(double s, uint32_t low, uint32_t high, proof p) \
    {                                                                                        \
        double large = (double)fan_float_of_bits(high >> 1),                                 \
               small = (double)fan_float_of_bits((low + 1u) >> 1);                           \
        double b = large * p.lost;                                                           \
        return !((p.n * large <= small * p.reach) | (ALIKE(s - b, s + b)) | !(s - s == 0));  \
    }
NARROW_BAD(double, NEVER)
NARROW_BAD(single, SINGLE)
NARROW_BAD(low, LOW)

ALWAYS_INLINE uint64_t wide_bad(double s, double r, double small, double large, proof p)
{
    double b = large * p.lost;
    double low = s + (r - b);
    double high = s + (r + b);
    uint64_t range = !(p.n * large <= small * p.reach);
    uint64_t spread = !(low == high);
    uint64_t tiny = !(b > 0x1p-1000);
    uint64_t finite = !((high - high) + (s - s) == 0);
    return (range & (spread | tiny)) | finite;
}

/* factored: the constants of judging a product with the factor. */
typedef struct factored {
    double by;
    double lost; /* what an unproved sum may lose, relative to its largest term, times the factor */
    uint32_t is_wild; /* products may leave the range of float64 */
} factored;

static factored factored_of(const judge *j)
{
    double n = (double)j->n;
    double size = fabs(j->by);
    return (factored){.by = j->by,
                      .lost = (n * n + 2 * n) * 0x1p-52 * size * 1.0001,
                      .is_wild = !(size >= 0x1p-800 && size <= 0x1p800)};
}

/* NAME_product_bad: true if the product p of this sum has no proof. `bad`: 1 if the sum has none,
 * and then may have lost something; 0 if it is exact. `high`: as in a tally. */
#define NARROW_PRODUCT(NAME, ALIKE)                                                    \
    ALWAYS_INLINE uint32_t narrow_product_bad_##NAME(double s, double p, uint32_t bad, \
                                                     uint32_t high, factored f)        \
    {                                                                                  \
        double large = (double)fan_float_of_bits(high >> 1);                           \
        double b = fabs(p) * 0x1p-51 + large * f.lost;                                 \
        return (bad & !((ALIKE(p - b, p + b)) | !(s - s == 0))) | f.is_wild;           \
    }
NARROW_PRODUCT(double, NEVER)
NARROW_PRODUCT(single, SINGLE)
NARROW_PRODUCT(low, LOW)

/* product_has_digits: whether what a product of float64 lost can be computed, too: small ones have
 * fewer digits, and an intermediate overflow proves nothing. */
ALWAYS_INLINE uint32_t product_has_digits(double s, double p)
{
    uint32_t normal = (fabs(p) >= 0x1p-900) | (s == 0);
    uint32_t finite = p - p == 0;
    return normal & finite;
}

/* wide_product_bad: as narrow_product_bad, of the float64 nearest to an exact sum. */
#define WIDE_PRODUCT(NAME, ALIKE)                                                                \
    ALWAYS_INLINE uint32_t wide_product_bad_##NAME(double s, double p, uint32_t bad, factored f) \
    {                                                                                            \
        double b = fabs(p) * 0x1p-51;                                                            \
        uint32_t sure = (ALIKE(p - b, p + b)) & product_has_digits(s, p) & (bad ^ 1u);           \
        return (sure ^ 1u) | f.is_wild;                                                          \
    }
WIDE_PRODUCT(single, SINGLE)
WIDE_PRODUCT(low, LOW)

#define NARROW_ONE(u)                    \
    sum += (double)fan_float_of_bits(u); \
    u <<= 1;                             \
    high = u > high ? u : high;          \
    u -= 1u;                             \
    low = u < low ? u : low;
#define NARROW_TERM(k)        \
    {                         \
        uint32_t u = s##k[i]; \
        NARROW_ONE(u)         \
    }
#define BRAIN_TERM(k)                         \
    {                                         \
        uint32_t u = (uint32_t)s##k[i] << 16; \
        NARROW_ONE(u)                         \
    }
#define PLAIN_TERM(k) sum += (double)fan_float_of_bits(s##k[i]);
#define WIDE_TERM(k)                                                            \
    {                                                                           \
        double x = s##k[i], next = sum + x, z = next - sum, a = x < 0 ? -x : x; \
        rest += (sum - (next - z)) + (x - z);                                   \
        sum = next;                                                             \
        large = a > large ? a : large;                                          \
        a = a == 0 ? DBL_MAX : a;                                               \
        small = a < small ? a : small;                                          \
    }
#define TWO(TERM) TERM(0) TERM(1)
#define FOUR(TERM) TWO(TERM) TERM(2) TERM(3)
#define EIGHT(TERM) FOUR(TERM) TERM(4) TERM(5) TERM(6) TERM(7)

#define NARROW_FIRST           \
    uint32_t low = UINT32_MAX; \
    uint32_t high = 0;         \
    double sum = -0.0;
#define NARROW_MORE                              \
    uint32_t low = t->low[i], high = t->high[i]; \
    double sum = t->sum[i];
#define NARROW_KEEP    \
    t->low[i] = low;   \
    t->high[i] = high; \
    t->sum[i] = sum;
#define PLAIN_FIRST double sum = -0.0;
#define PLAIN_MORE double sum = t->sum[i];
#define PLAIN_KEEP t->sum[i] = sum;
#define WIDE_FIRST          \
    double sum = -0.0;      \
    double rest = 0;        \
    double small = DBL_MAX; \
    double large = 0;
#define WIDE_MORE \
    double sum = t->sum[i], rest = t->rest[i], small = t->small[i], large = t->large[i];
#define WIDE_KEEP        \
    t->sum[i] = sum;     \
    t->rest[i] = rest;   \
    t->small[i] = small; \
    t->large[i] = large;

#define EACH(BEGIN, TERMS, ...)        \
    FAN_VECTOR                         \
    for (size_t i = 0; i < len; i++) { \
        BEGIN TERMS __VA_ARGS__        \
    }
#define SOURCE(k) *s##k = (const void *)src[k]
#define SOURCES \
    SOURCE(0), SOURCE(1), SOURCE(2), SOURCE(3), SOURCE(4), SOURCE(5), SOURCE(6), SOURCE(7)

/* TILE_LOOP: adds `len` numbers of each of 8 sources to the tally (`first`: it is empty). */
#define TILE_LOOP(name, NAME, MEM, UNIT, TARGET)                                               \
    TARGET static void name##_##UNIT(tally *t, const char *const *src, bool first, size_t len) \
    {                                                                                          \
        const MEM SOURCES;                                                                     \
        if (first)                                                                             \
            EACH(NAME##_FIRST, EIGHT(NAME##_TERM), NAME##_KEEP)                                \
        else                                                                                   \
            EACH(NAME##_MORE, EIGHT(NAME##_TERM), NAME##_KEEP)                                 \
    }

/* judge_tile: leaves the values to round in `sum` and marks unproved numbers in `bad`; returns
 * whether there are any. */
ALWAYS_INLINE bool judge_narrow(tally *t, const judge *j, size_t len)
{
    proof p = proof_of(j, false);
    uint32_t any = 0;
#define NARROW_JUDGE(NAME)                                                                        \
    EACH(uint32_t bad = narrow_bad_##NAME(t->sum[i], t->low[i], t->high[i], p);, t->bad[i] = bad; \
         , any |= bad;)
    if (j->grid == TO_DOUBLE)
        NARROW_JUDGE(double)
    else if (j->grid == TO_SINGLE)
        NARROW_JUDGE(single)
    else
        NARROW_JUDGE(low)
    return any;
}

/* whole_sum: returns sum + rest, but keeps -0.0 if rest is 0. By a mask: a vector loop has no
 * branch around an addition. */
ALWAYS_INLINE double whole_sum(double sum, double rest)
{
    uint64_t keep = 0u - (uint64_t)(rest == 0);
    uint64_t a = bits_of(sum);
    uint64_t b = bits_of(sum + rest);
    return of_bits(b ^ ((a ^ b) & keep));
}

ALWAYS_INLINE bool judge_wide(tally *t, const judge *j, size_t len)
{
    proof p = proof_of(j, true);
    uint64_t any = 0;
    FAN_VECTOR
    for (size_t i = 0; i < len; i++) {
        double sum = t->sum[i];
        double rest = t->rest[i];
        double whole = whole_sum(sum, rest);
        double moved = whole - sum;
        uint64_t bad = wide_bad(sum, rest, t->small[i], t->large[i], p);
        t->sum[i] = whole;
        t->rest[i] = (sum - (whole - moved)) + (rest - moved);
        t->bad[i] = (uint32_t)bad;
        any |= bad;
    }
    return any;
}

/* judge_products: multiplies the sums of a tile by the factor, and repeats the proof: `sum` is
 * exact where `bad` is 0 (or, wide, sum + rest is, up to what wide_bad allows); an element that was
 * bad may pass if its product is certain. */
#define EACH_PRODUCT(TIMES, BAD)                                                               \
    EACH(double s = t->sum[i]; double p = TIMES(s, f.by);, uint32_t bad = BAD;, t->sum[i] = p; \
         t->bad[i] = bad; any |= bad;)
#define NEAREST(a, b) ((a) * (b))
#define OF_NARROW(NAME) narrow_product_bad_##NAME(s, p, t->bad[i], t->high[i], f)
#define OF_WIDE(NAME) wide_product_bad_##NAME(s, p, t->bad[i], f)
ALWAYS_INLINE bool judge_products_narrow(tally *t, const judge *j, size_t len)
{
    factored f = factored_of(j);
    uint32_t any = 0;
    if (j->always && j->grid == TO_DOUBLE)
        EACH_PRODUCT(NEAREST, f.is_wild)
    else if (j->always)
        EACH_PRODUCT(fan__product_odd, f.is_wild)
    else if (j->grid == TO_DOUBLE)
        EACH_PRODUCT(NEAREST, OF_NARROW(double))
    else if (j->grid == TO_SINGLE)
        EACH_PRODUCT(fan__product_odd, OF_NARROW(single))
    else
        EACH_PRODUCT(fan__product_odd, OF_NARROW(low))
    return any;
}

/* judge_products_double: the same where float64 are summed, and float64 is the result: a product is
 * certain if both its ends round alike, or if the factor is a power of two. */
ALWAYS_INLINE bool judge_products_double(tally *t, const judge *j, size_t len)
{
    factored f = factored_of(j);
    double lost = proof_of(j, true).lost * fabs(f.by);
    uint32_t shifts = j->shifts;
    uint64_t keep = (uint64_t)shifts - 1; /* no bit if the factor is a power of two */
    uint32_t any = 0;
    FAN_VECTOR
    for (size_t i = 0; i < len; i++) {
        double s = t->sum[i];
        double p = s * f.by;
        double rest = fan__product_rest(s, f.by, p) + t->rest[i] * f.by;
        double b = fabs(p) * 0x1p-102 + t->large[i] * lost;
        uint32_t alike = p + (rest - b) == p + (rest + b);
        uint32_t sure = (alike | shifts) & product_has_digits(s, p) & (t->bad[i] ^ 1u);
        uint32_t bad = (sure ^ 1u) | f.is_wild;
        t->sum[i] = whole_sum(p, of_bits(bits_of(rest) & keep));
        t->bad[i] = bad;
        any |= bad;
    }
    return any;
}

ALWAYS_INLINE bool judge_products_wide(tally *t, const judge *j, size_t len)
{
    factored f = factored_of(j);
    uint32_t any = 0;
    if (j->grid == TO_DOUBLE)
        return judge_products_double(t, j, len);
    if (j->grid == TO_SINGLE)
        EACH_PRODUCT(NEAREST, OF_WIDE(single))
    else
        EACH_PRODUCT(NEAREST, OF_WIDE(low))
    return any;
}

/* odd_tile: converts the sums to float32, rounded to odd, from which narrower results are
 * rounded. */
ALWAYS_INLINE void odd_tile(float *to, const double *from, size_t len)
{
    EACH(double x = from[i];, , to[i] = fan_odd_of_double(x);)
}

/* DIRECT: sums 8 arrays or fewer in one loop from the sources to the result; returns whether any
 * element is unproved: then the result is invalid. Sources are padded to 2, 4 or 8 with -0.0, which
 * is neutral. `quick`: by the quick proof. */
#define DIRECT(NAME, UNIT, TARGET, MEM, FIRST, TERM, T, QUICK, BAD, OUT, VALUE)      \
    TARGET static bool NAME##_##UNIT(char *dst, const char *const *src, int sources, \
                                     const judge *j, size_t len, bool quick)         \
    {                                                                                \
        const MEM SOURCES;                                                           \
        OUT *d = (OUT *)dst;                                                         \
        proof p = proof_of(j, sizeof(T) == 8);                                       \
        factored f = factored_of(j);                                                 \
        T any = 0;                                                                   \
        (void)f;                                                                     \
        if (!quick)                                                                  \
            EACH(FIRST, EIGHT(TERM), any |= BAD; d[i] = VALUE;)                      \
        else if (sources <= 2)                                                       \
            EACH(FIRST, TWO(TERM), any |= (QUICK); d[i] = VALUE;)                    \
        else if (sources <= 4)                                                       \
            EACH(FIRST, FOUR(TERM), any |= (QUICK); d[i] = VALUE;)                   \
        else                                                                         \
            EACH(FIRST, EIGHT(TERM), any |= (QUICK); d[i] = VALUE;)                  \
        return any;                                                                  \
    }

/* NAME_up, NAME_down: convert low floats to float32, and float32 rounded to odd to low floats. */
#define LOW_LOOPS(NAME, MEM, UP, DOWN)                                      \
    ALWAYS_INLINE void NAME##_up(float *to, const char *from, size_t len)   \
    {                                                                       \
        const MEM *s = (const MEM *)from;                                   \
        EACH(MEM x = s[i];, , to[i] = UP(x);)                               \
    }                                                                       \
    ALWAYS_INLINE void NAME##_down(char *to, const float *from, size_t len) \
    {                                                                       \
        MEM *d = (MEM *)to;                                                 \
        EACH(float x = from[i];, , d[i] = DOWN(x);)                         \
    }
#define LOOPS_OF(X, NAME, c, bits, ...) \
    LOW_LOOPS(c, fan_any_u##bits, fan_float_of_##c, fan_##c##_of)
FAN_LOW_LIST(LOOPS_OF, )

/* half_direct: a float16 sum is an integer multiple of 2^-24, below 2^19 for 8 terms: always exact,
 * and never a subnormal float32. So rounding to odd keeps 24 of the float64's digits and sets the
 * last if any other was set. */
#define DIGITS_LOST UINT64_C(0x1fffffff)
ALWAYS_INLINE void half_direct(char *dst, const char *const *src, int sources, size_t at,
                               size_t len)
{
    fan_any_u16 *d = (fan_any_u16 *)dst;
    for (size_t i = at; i < len; i++) {
        double sum = -0.0;
        for (int k = 0; k < sources; k++)
            sum += (double)fan_float_of_float16(((const fan_any_u16 *)src[k])[i]);
        d[i] = fan_float16_of(fan_odd_of_double(sum));
    }
}

/* LOW_WAYS: of a low float, for a vector unit: (its name, its target). */
#define LOW_WAYS(UNIT, NAME, c, ...) LOW_WAYS_IN(c, BOTH UNIT)
#define LOW_WAYS_IN(...) LOW_WAYS_OF(__VA_ARGS__)
#define BOTH(name, target) name, target
#define LOW_WAYS_OF(c, NAME, TARGET)                                            \
    TARGET static void c##_up_##NAME(float *to, const char *from, size_t len)   \
    {                                                                           \
        c##_up(to, from, len);                                                  \
    }                                                                           \
    TARGET static void c##_down_##NAME(char *to, const float *from, size_t len) \
    {                                                                           \
        c##_down(to, from, len);                                                \
    }
#define LOW_WAY(UNIT, NAME, c, ...) [FAN_DT_##NAME] = {c##_up_##UNIT, c##_down_##UNIT},

/* Products of sums with the factor. */
#define SHIFTED (sum * f.by)
#define TIMES fan__product_odd(sum, f.by)
#define QUICK_BAD quick_bad(low, high, p) | f.is_wild
#define PRODUCT_BAD(NAME) \
    narrow_product_bad_##NAME(sum, TIMES, narrow_bad_double(sum, low, high, p), high, f)

/* The loops, compiled for each vector unit. */
#define WAYS(NAME, TARGET)                                                                         \
    TILE_LOOP(narrow, NARROW, fan_any_u32, NAME, TARGET)                                           \
    TILE_LOOP(plain, PLAIN, fan_any_u32, NAME, TARGET)                                             \
    TILE_LOOP(wide, WIDE, fan_any_f64, NAME, TARGET)                                               \
    TARGET static bool judge_narrow_##NAME(tally *t, const judge *j, size_t len)                   \
    {                                                                                              \
        return judge_narrow(t, j, len);                                                            \
    }                                                                                              \
    TARGET static bool judge_wide_##NAME(tally *t, const judge *j, size_t len)                     \
    {                                                                                              \
        return judge_wide(t, j, len);                                                              \
    }                                                                                              \
    TARGET static bool products_narrow_##NAME(tally *t, const judge *j, size_t len)                \
    {                                                                                              \
        return judge_products_narrow(t, j, len);                                                   \
    }                                                                                              \
    TARGET static bool products_wide_##NAME(tally *t, const judge *j, size_t len)                  \
    {                                                                                              \
        return judge_products_wide(t, j, len);                                                     \
    }                                                                                              \
    TARGET static void odd_##NAME(float *to, const double *from, size_t len)                       \
    {                                                                                              \
        odd_tile(to, from, len);                                                                   \
    }                                                                                              \
    DIRECT(single, NAME, TARGET, fan_any_u32, NARROW_FIRST, NARROW_TERM, uint32_t,                 \
           quick_bad(low, high, p), narrow_bad_single(sum, low, high, p), fan_any_f32, (float)sum) \
    DIRECT(single_shift, NAME, TARGET, fan_any_u32, NARROW_FIRST, NARROW_TERM, uint32_t,           \
           QUICK_BAD, PRODUCT_BAD(single), fan_any_f32, (float)SHIFTED)                            \
    DIRECT(single_product, NAME, TARGET, fan_any_u32, NARROW_FIRST, NARROW_TERM, uint32_t,         \
           QUICK_BAD, PRODUCT_BAD(single), fan_any_f32, (float)TIMES)                              \
    DIRECT(brain, NAME, TARGET, fan_any_u16, NARROW_FIRST, BRAIN_TERM, uint32_t,                   \
           quick_bad(low, high, p), narrow_bad_low(sum, low, high, p), fan_any_u16,                \
           fan_bfloat16_of(fan_odd_of_double(sum)))                                                \
    DIRECT(brain_shift, NAME, TARGET, fan_any_u16, NARROW_FIRST, BRAIN_TERM, uint32_t, QUICK_BAD,  \
           PRODUCT_BAD(low), fan_any_u16, fan_bfloat16_of(fan_odd_of_double(SHIFTED)))             \
    DIRECT(brain_product, NAME, TARGET, fan_any_u16, NARROW_FIRST, BRAIN_TERM, uint32_t,           \
           QUICK_BAD, PRODUCT_BAD(low), fan_any_u16, fan_bfloat16_of(fan_odd_of_double(TIMES)))    \
    DIRECT(twice, NAME, TARGET, fan_any_f64, WIDE_FIRST, WIDE_TERM, uint64_t,                      \
           quick_bad_wide(whole_sum(sum, rest), small, large, p),                                  \
           wide_bad(sum, rest, small, large, p), fan_any_f64, whole_sum(sum, rest))                \
    FAN_LOW_ML_LIST(LOW_WAYS, (NAME, TARGET))
#define WAY(NAME, HALF)                                                        \
    {                                                                          \
        .low = {FAN_LOW_LIST(LOW_WAY, NAME)},                                  \
        .narrow = narrow_##NAME,                                               \
        .plain = plain_##NAME,                                                 \
        .wide = wide_##NAME,                                                   \
        .judge_narrow = judge_narrow_##NAME,                                   \
        .judge_wide = judge_wide_##NAME,                                       \
        .products_narrow = products_narrow_##NAME,                             \
        .products_wide = products_wide_##NAME,                                 \
        .odd = odd_##NAME,                                                     \
        .single = {single_##NAME, single_shift_##NAME, single_product_##NAME}, \
        .brain = {brain_##NAME, brain_shift_##NAME, brain_product_##NAME},     \
        .twice = {twice_##NAME},                                               \
        .half_sum = {HALF},                                                    \
    }

WAYS(plain, )
LOW_WAYS_OF(float16, plain, )
#if defined(__x86_64__) && defined(__GNUC__)
#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c")))
WAYS(avx2, AVX2)
WAYS(avx512, AVX512)

/* HALF_WAYS: float16 by hardware instructions, W numbers at once. Every NaN becomes the one that
 * float16_down makes. */
#define HALF_WAYS(NAME, TARGET, W, FLOATS, HALVES, WIDEN, NARROW, LOAD, STORE, LOAD_HALVES,  \
                  STORE_HALVES, ONE_NAN)                                                     \
    TARGET static void float16_up_##NAME(float *to, const char *from, size_t len)            \
    {                                                                                        \
        size_t whole = len - len % W;                                                        \
        for (size_t i = 0; i < whole; i += W)                                                \
            STORE(to + i, WIDEN(LOAD_HALVES((const void *)(from + 2 * i))));                 \
        float16_up(to + whole, from + 2 * whole, len - whole);                               \
    }                                                                                        \
    TARGET static void float16_down_##NAME(char *to, const float *from, size_t len)          \
    {                                                                                        \
        size_t whole = len - len % W;                                                        \
        for (size_t i = 0; i < whole; i += W) {                                              \
            FLOATS x = LOAD(from + i);                                                       \
            STORE_HALVES((void *)(to + 2 * i),                                               \
                         NARROW(ONE_NAN(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); \
        }                                                                                    \
        float16_down(to + 2 * whole, from + whole, len - whole);                             \
    }

AVX2 static inline __m256 one_nan_avx2(__m256 x)
{
    __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    __m256 nan = _mm256_or_ps(sign, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

AVX512 static inline __m512 one_nan_avx512(__m512 x)
{
    __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
    __m512 nan = _mm512_or_ps(sign, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, nan);
}

AVX2 static inline __m256d odd_half_avx2(__m256d sum)
{
    __m256i u = _mm256_castpd_si256(sum);
    __m256i digits = _mm256_set1_epi64x(DIGITS_LOST);
    __m256i none = _mm256_cmpeq_epi64(_mm256_and_si256(u, digits), _mm256_setzero_si256());
    return _mm256_castsi256_pd(
        _mm256_or_si256(_mm256_andnot_si256(digits, u),
                        _mm256_andnot_si256(none, _mm256_set1_epi64x(DIGITS_LOST + 1))));
}

AVX2 static inline void half_term_avx2(__m256d *sum, const char *from)
{
    for (int i = 0; i < 2; i++) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + 16 * i)));
        sum[2 * i] = _mm256_add_pd(sum[2 * i], _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
        sum[2 * i + 1] =
            _mm256_add_pd(sum[2 * i + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
    }
}

AVX2 static inline void half_done_avx2(char *to, const __m256d *sum)
{
    for (int i = 0; i < 2; i++) {
        __m128 low = _mm256_cvtpd_ps(odd_half_avx2(sum[2 * i]));
        __m128 high = _mm256_cvtpd_ps(odd_half_avx2(sum[2 * i + 1]));
        __m256 x = one_nan_avx2(_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1));
        _mm_storeu_si128((void *)(to + 16 * i),
                         _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
}

AVX512 static inline __m256 odd_half_avx512(__m512d sum)
{
    __m512i u = _mm512_castpd_si512(sum);
    __m512i digits = _mm512_set1_epi64(DIGITS_LOST);
    __mmask8 some = _mm512_test_epi64_mask(u, digits);
    u = _mm512_andnot_si512(digits, u);
    return _mm512_cvtpd_ps(
        _mm512_castsi512_pd(_mm512_mask_or_epi64(u, some, u, _mm512_set1_epi64(DIGITS_LOST + 1))));
}

AVX512 static inline void half_term_avx512(__m512d *sum, const char *from)
{
    __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
    sum[0] = _mm512_add_pd(sum[0], _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    sum[1] = _mm512_add_pd(sum[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}

AVX512 static inline void half_done_avx512(char *to, const __m512d *sum)
{
    __m512 x = one_nan_avx512(_mm512_insertf32x8(_mm512_castps256_ps512(odd_half_avx512(sum[0])),
                                                 odd_half_avx512(sum[1]), 1));
    _mm256_storeu_si256((void *)to,
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Two at once with separate sums: exact additions may be in any order, and this chain is half as
 * long. */
#define HALF_SUM(NAME, TARGET, DOUBLES, ALL, PLUS)                                     \
    TARGET ALWAYS_INLINE void half_run_##NAME(char *dst, const char *const *src,       \
                                              const int sources, size_t len)           \
    {                                                                                  \
        for (size_t i = 0; i < len; i += 16) {                                         \
            DOUBLES even[128 / sizeof(DOUBLES)], odd[128 / sizeof(DOUBLES)];           \
            for (size_t k = 0; k < 128 / sizeof(DOUBLES); k++)                         \
                even[k] = odd[k] = ALL(-0.0);                                          \
            for (int k = 0; k < sources; k += 2) {                                     \
                half_term_##NAME(even, src[k] + 2 * i);                                \
                half_term_##NAME(odd, src[k + 1] + 2 * i);                             \
            }                                                                          \
            for (size_t k = 0; k < 128 / sizeof(DOUBLES); k++)                         \
                even[k] = PLUS(even[k], odd[k]);                                       \
            half_done_##NAME(dst + 2 * i, even);                                       \
        }                                                                              \
    }                                                                                  \
    TARGET static bool half_sum_##NAME(char *dst, const char *const *src, int sources, \
                                       const judge *j, size_t len, bool quick)         \
    {                                                                                  \
        size_t whole = len - len % 16;                                                 \
        (void)j;                                                                       \
        (void)quick;                                                                   \
        if (sources <= 2)                                                              \
            half_run_##NAME(dst, src, 2, whole);                                       \
        else if (sources <= 4)                                                         \
            half_run_##NAME(dst, src, 4, whole);                                       \
        else                                                                           \
            half_run_##NAME(dst, src, 8, whole);                                       \
        half_direct(dst, src, sources, whole, len);                                    \
        return false;                                                                  \
    }
HALF_SUM(avx2, AVX2, __m256d, _mm256_set1_pd, _mm256_add_pd)
HALF_SUM(avx512, AVX512, __m512d, _mm512_set1_pd, _mm512_add_pd)

HALF_WAYS(avx2, AVX2, 8, __m256, __m128i, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps,
          _mm256_storeu_ps, _mm_loadu_si128, _mm_storeu_si128, one_nan_avx2)
HALF_WAYS(avx512, AVX512, 16, __m512, __m256i, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps,
          _mm512_storeu_ps, _mm256_loadu_si256, _mm256_storeu_si256, one_nan_avx512)
static const exact_loops all_ways[] = {WAY(plain, NULL), WAY(avx2, half_sum_avx2),
                                       WAY(avx512, half_sum_avx512)};

#else
static const exact_loops all_ways[] = {WAY(plain, NULL)};
#endif

#ifdef FAN_TEST
static atomic_int at_most = INT_MAX;

int fan__exact_isa_now(void)
{
    int rank = fan_sum_isa_rank();
    int most = atomic_load_explicit(&at_most, memory_order_relaxed);
    return (int)fan_min(rank, most);
}

int fan_exact_isa(int most)
{
    atomic_store_explicit(&at_most, most < 0 ? INT_MAX : most, memory_order_relaxed);
    return fan__exact_isa_now();
}
#else
int fan__exact_isa_now(void)
{
    return fan_sum_isa_rank();
}
#endif

const exact_loops *fan__exact_loops(void)
{
    return &all_ways[fan__exact_isa_now()];
}
