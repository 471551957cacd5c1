/* How it is done: a tile of the sum is first made fast, in float64, and with it a proof for each element that it is
 * right; an element without one is summed again in whole numbers, which is always right and ten times slower.
 *
 * A sum of float32 (and all that is narrower) in float64. Let every term be a whole number of units u, and n * max|x|
 * <= 2^53 u: then no partial sum loses a bit, in any order. A term of p digits is a whole number of units above min|x|
 * * 2^-p. So beside the sum we keep min|x| over terms that are not zero, and max|x|, as integers (bits of positive
 * floats are in order; a zero, less one, is the largest of all):
 *
 *   exact     n * max|x| <= min|x| * 2^(53 - p)
 *   near      n * n * max|x| * 2^-52 bounds what was lost: both ends of sum -+ that round alike (no tie between them)
 *
 * For float16 and float8 the first holds always: their largest value is few units (float16: 2^40, so n <= 2^13).
 *
 * A sum of float64 is kept as sum + rest, where rest gathers what each addition lost (TwoSum: that is a float64). What
 * rest itself loses:
 *
 *   exact     n * n * max|x| <= min|x| * 2^53: nothing
 *   near      n * n * n * max|x| * 2^-105 at most: both ends of sum + (rest -+ that) round alike
 *
 * The integer path: the sum as a whole number of the dtype's smallest step, in two's complement, as many words as its
 * largest value needs. This is the state between folds as well. Its top word has some values to spare: they stand for
 * what is no number.
 *
 * Rounding once: what leaves a tile is a float64 that is the exact sum, or lies between the same two neighbours of the
 * result dtype (near), or was rounded to odd: its last bit is set where anything was lost, so that the next rounding,
 * to a type of 51 digits or fewer, is that of the exact value. */
#include "array/exact.h"

#include "array/convert.h"
#include "array/lowp.h"
#include "array/sum_loops.h"
#include "array/nditer.h"
#include "base/fault.h"
#include "base/interrupt.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#define TILE 512      /* numbers */
#define AT_ONCE 8     /* sources that are read side by side */
#define LONG_ROW 128  /* rows of so many elements are not mixed in one tile, so that they can be read where they lie */
#define LONG_RUN 4096 /* elements at once of sums that need no proof */
#define BATCH 32      /* elements that go the integer path together */
#define MOST_WORDS 34

/* A real dtype's smallest step is 2^-unit; `digits` are those of its mantissa; `words` hold 2^30 of its largest value.
 */
typedef struct kind {
    int words, unit, digits;
    bool always; /* float64 sums lose nothing, for n <= ALWAYS_MOST */
} kind;

#define ALWAYS_MOST 8192

static kind kind_of(fan_dtype d)
{
    switch (d) {
    case FAN_DT_FLOAT8_E4M3FN:
        return (kind){1, 9, 4, true};
    case FAN_DT_FLOAT8_E5M2:
        return (kind){1, 16, 3, true};
    case FAN_DT_FLOAT16:
        return (kind){2, 24, 11, true};
    case FAN_DT_BFLOAT16:
        return (kind){5, 133, 8, false};
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64:
        return (kind){5, 149, 24, false};
    case FAN_DT_FLOAT64:
    case FAN_DT_COMPLEX128:
        return (kind){MOST_WORDS, 1074, 53, false};
    default:
        return (kind){0, 0, 0, false};
    }
}

static size_t parts_of(fan_dtype d) { return fan_dtype_kind(d) == 'c' ? 2 : 1; }

/* wide: numbers of d are float64; else they are read as float32. */
static bool wide(fan_dtype d) { return d == FAN_DT_FLOAT64 || d == FAN_DT_COMPLEX128; }

bool fan_exact_fits(fan_dtype d) { return kind_of(d).words != 0; }

size_t fan_exact_state_size(fan_dtype d) { return (size_t)kind_of(d).words * parts_of(d) * sizeof(int64_t); }

/* ---- whole numbers ---- */

/* What the top word can say beside a number. */
#define NOTHING INT64_MIN /* only -0.0 so far; the other words are 0 */
#define PLUS_INF (INT64_MIN + 1)
#define MINUS_INF (INT64_MIN + 2)
#define NO_NUMBER (INT64_MIN + 3)

static uint64_t bits_of(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static double of_bits(uint64_t u)
{
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static void words_start(uint64_t *w, const kind *k)
{
    memset(w, 0, (size_t)k->words * sizeof *w);
    w[k->words - 1] = (uint64_t)NOTHING;
}

static void words_add(uint64_t *w, const kind *k, double x)
{
    uint64_t u = bits_of(x), m = u & (UINT64_MAX >> 12);
    int e = (int)(u >> 52 & 0x7ff);
    bool minus = u >> 63;
    int64_t top = (int64_t)w[k->words - 1];
    if (e == 0x7ff) {
        int64_t mine = m ? NO_NUMBER : minus ? MINUS_INF : PLUS_INF;
        bool clash = (top == PLUS_INF || top == MINUS_INF) && top != mine;
        w[k->words - 1] = (uint64_t)(top == NO_NUMBER || clash ? NO_NUMBER : mine);
        return;
    }
    if (top <= NO_NUMBER) {
        if (top != NOTHING || (minus && !(e | (m != 0))))
            return;
        w[k->words - 1] = 0;
    }
    if (e)
        m |= UINT64_C(1) << 52;
    else
        e = 1;
    /* x is m * 2^(e - 1075), and m * 2^at units; below the unit m has zeros alone */
    int at = e - 1075 + k->unit;
    if (at < 0) {
        m = at > -64 ? m >> -at : 0;
        at = 0;
    }
    int i = at >> 6, bit = at & 63;
    uint64_t piece[2] = {m << bit, bit ? m >> (64 - bit) : 0}, carry = 0;
    for (int j = 0; i < k->words && (j < 2 || carry); i++, j++) {
        uint64_t p = j < 2 ? piece[j] : 0, a = w[i];
        uint64_t b = minus ? a - p : a + p;
        uint64_t c = minus ? b - carry : b + carry;
        carry = minus ? (b > a) | (c > b) : (b < a) | (c < b);
        w[i] = c;
    }
}

/* rounded: m * 2^(E - 63) (the top bit of m is set), and a little more if `more`, as a float64: to nearest even, or to
 * odd. */
static double rounded(bool minus, uint64_t m, int64_t E, bool more, bool odd)
{
    uint64_t u;
    if (E > 1023) {
        u = odd ? bits_of(DBL_MAX) : bits_of((double)INFINITY);
    } else if (E < -1075) {
        u = odd;
    } else {
        int64_t least = E - 52 > -1074 ? E - 52 : -1074; /* the exponent of the last bit kept */
        int drop = (int)(63 - (E - least));
        uint64_t kept = drop > 63 ? 0 : m >> drop;
        uint64_t rest = drop > 63 ? m : m << (64 - drop); /* drop is 11 at least */
        if (odd)
            kept |= rest || more;
        else
            kept += rest > UINT64_C(1) << 63 || (rest == UINT64_C(1) << 63 && (more || (kept & 1)));
        u = ((uint64_t)(least + 1074) << 52) + kept; /* a carry runs into the exponent as it should */
    }
    return of_bits(u | (uint64_t)minus << 63);
}

/* words_value: the number, times *factor where there is one, as a float64: to odd, or to nearest. */
static double words_value(const uint64_t *w, const kind *k, const double *factor, bool odd)
{
    uint64_t mag[MOST_WORDS + 1];
    int64_t top = (int64_t)w[k->words - 1];
    double by = factor ? *factor : 1.0;
    if (top <= NO_NUMBER)
        return by * (top == NOTHING     ? -0.0
                     : top == PLUS_INF  ? (double)INFINITY
                     : top == MINUS_INF ? -(double)INFINITY
                                        : (double)NAN);
    bool minus = top < 0, more = false;
    uint64_t carry = minus;
    int high = -1;
    for (int i = 0; i < k->words; i++) {
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
    return rounded(minus, m, E + 64 * high + 63 - lead, more, odd && !FAN_FAULT(EXACT_NO_ODD));
}

/* ---- the fast way ---- */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* What is known of each number of a tile. */
typedef struct tally {
    double sum[TILE];
    double rest[TILE]; /* wide */
    union {
        struct {
            uint32_t low[TILE], high[TILE]; /* twice the bits of |x|: the smallest less one, the largest */
        };
        struct {
            double small[TILE], large[TILE]; /* wide */
        };
    };
    uint32_t bad[TILE]; /* not proved */
    float odd[TILE];
} tally;

/* How a tile is judged. */
typedef struct judge {
    size_t n; /* terms */
    int digits;
    bool always;
    enum { TO_DOUBLE, TO_SINGLE, TO_LOW } grid; /* what it will be rounded to */
    bool scaled, shifts; /* there is a factor; it is a power of two, or none: products are exact */
    double by;
} judge;

/* proof: what judging an element takes, worked out once. */
typedef struct proof {
    double n, reach, lost;
    int span; /* narrow: exponents that differ by no more prove that nothing was lost */
} proof;

static proof proof_of(const judge *j, bool is_wide)
{
    double n = (double)j->n;
    int bits = j->n > 1 ? 64 - __builtin_clzll((unsigned long long)j->n - 1) : 0; /* n <= 2^bits */
    proof p = {n, of_bits((uint64_t)(1023 + 53 - j->digits) << 52), (n * n + 2 * n) * 0x1p-52, 52 - j->digits - bits};
    if (is_wide) /* by powers of two, so that neither side overflows */
        p = (proof){n * n * 0x1p-64, 0x1p-11, n * n * n * 0x1p-104, 0};
    if (FAN_FAULT(EXACT_NO_RANGE))
        p.reach *= 0x1p70, p.span += 70;
    return p;
}

#define NEVER(a, b) ((void)(a), (void)(b), 0)
#define SINGLE(a, b) ((float)(a) == (float)(b))
#define LOW(a, b) (fan_odd_of_double(a) == fan_odd_of_double(b))

/* quick_bad: the first proof from exponents alone, all that is tried at first: for numbers of like size it holds. */
ALWAYS_INLINE uint32_t quick_bad(uint32_t low, uint32_t high, proof p)
{
    return (int32_t)(high >> 24) > (int32_t)(low >> 24) + p.span;
}

ALWAYS_INLINE uint64_t quick_bad_wide(double value, double small, double large, proof p)
{
    uint64_t range = p.n * large <= small * p.reach ? 0 : 1, finite = value - value == 0 ? 0 : 1;
    return range | finite;
}

/* NAME_bad: no proof for this sum. An inf or NaN among the terms shows in the sum, which cannot overflow: so it is
 * right. */
#define NARROW_BAD(NAME, ALIKE)                                                                                  \
    ALWAYS_INLINE uint32_t narrow_bad_##NAME(double s, uint32_t low, uint32_t high, proof p)                     \
    {                                                                                                            \
        double large = (double)fan_float_of_bits(high >> 1), small = (double)fan_float_of_bits((low + 1u) >> 1); \
        double b = large * p.lost;                                                                               \
        return !((p.n * large <= small * p.reach) | (ALIKE(s - b, s + b)) | !(s - s == 0));                      \
    }
NARROW_BAD(double, NEVER)
NARROW_BAD(single, SINGLE)
NARROW_BAD(low, LOW)

ALWAYS_INLINE uint64_t wide_bad(double s, double r, double small, double large, proof p)
{
    double b = large * p.lost, low = s + (r - b), high = s + (r + b);
    uint64_t range = p.n * large <= small * p.reach ? 0 : 1, apart = low == high ? 0 : 1, tiny = b > 0x1p-1000 ? 0 : 1;
    uint64_t finite = (high - high) + (s - s) == 0 ? 0 : 1;
    return (range & (apart | tiny)) | finite;
}

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
#define WIDE_MORE double sum = t->sum[i], rest = t->rest[i], small = t->small[i], large = t->large[i];
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
#define SOURCES SOURCE(0), SOURCE(1), SOURCE(2), SOURCE(3), SOURCE(4), SOURCE(5), SOURCE(6), SOURCE(7)

/* NAME_tile: adds `len` numbers of each of 8 sources to what is known of them (`first`: nothing yet). */
#define TILE_LOOPS(NAME, MEM)                                                                \
    ALWAYS_INLINE void NAME##_tile(tally *t, const char *const *src, bool first, size_t len) \
    {                                                                                        \
        const MEM SOURCES;                                                                   \
        if (first)                                                                           \
            EACH(NAME##_FIRST, EIGHT(NAME##_TERM), NAME##_KEEP)                              \
        else                                                                                 \
            EACH(NAME##_MORE, EIGHT(NAME##_TERM), NAME##_KEEP)                               \
    }
TILE_LOOPS(NARROW, fan_any_u32)
TILE_LOOPS(PLAIN, fan_any_u32)
TILE_LOOPS(WIDE, fan_any_f64)

/* judge_tile: leaves in `sum` what is to be rounded, in `bad` which numbers have no proof; returns whether there are
 * any. */
ALWAYS_INLINE bool judge_narrow(tally *t, const judge *j, size_t len)
{
    proof p = proof_of(j, false);
    uint32_t any = 0;
#define NARROW_JUDGE(NAME) \
    EACH(uint32_t bad = narrow_bad_##NAME(t->sum[i], t->low[i], t->high[i], p);, t->bad[i] = bad;, any |= bad;)
    if (j->grid == TO_DOUBLE)
        NARROW_JUDGE(double)
    else if (j->grid == TO_SINGLE)
        NARROW_JUDGE(single)
    else
        NARROW_JUDGE(low)
    return any;
}

/* whole_sum: sum + rest; but -0.0 stays what it is where rest is 0. By a mask: a vector loop has no branch around an
 * addition. */
ALWAYS_INLINE double whole_sum(double sum, double rest)
{
    uint64_t keep = 0u - (uint64_t)(rest == 0 ? 1 : 0), a = bits_of(sum), b = bits_of(sum + rest);
    return of_bits(b ^ ((a ^ b) & keep));
}

ALWAYS_INLINE bool judge_wide(tally *t, const judge *j, size_t len)
{
    proof p = proof_of(j, true);
    uint64_t any = 0;
    FAN_VECTOR
    for (size_t i = 0; i < len; i++) {
        uint64_t bad = wide_bad(t->sum[i], t->rest[i], t->small[i], t->large[i], p);
        t->sum[i] = whole_sum(t->sum[i], t->rest[i]);
        t->bad[i] = (uint32_t)bad;
        any |= bad;
    }
    return any;
}

/* odd_tile: the sums as float32, rounded to odd: what narrower results are rounded from. */
ALWAYS_INLINE void odd_tile(float *to, const double *from, size_t len)
{
    EACH(double x = from[i];, , to[i] = fan_odd_of_double(x);)
}

/* NAME_direct: the common sums of 8 arrays or fewer in one loop from the sources to the result; returns whether any is
 * bad: then all was in vain. Sources are made up to 2, 4 or 8 with -0.0, which changes nothing. `quick`: by the quick
 * proof. */
#define DIRECT(NAME, MEM, FIRST, TERM, T, QUICK, BAD, OUT, VALUE)                                                \
    ALWAYS_INLINE bool NAME##_direct(char *dst, const char *const *src, int sources, const judge *j, size_t len, \
                                     bool quick)                                                                 \
    {                                                                                                            \
        const MEM SOURCES;                                                                                       \
        OUT *d = (OUT *)dst;                                                                                     \
        proof p = proof_of(j, sizeof(T) == 8);                                                                   \
        T any = 0;                                                                                               \
        if (!quick)                                                                                              \
            EACH(FIRST, EIGHT(TERM), any |= BAD; d[i] = VALUE;)                                                  \
        else if (sources <= 2)                                                                                   \
            EACH(FIRST, TWO(TERM), any |= QUICK; d[i] = VALUE;)                                                  \
        else if (sources <= 4)                                                                                   \
            EACH(FIRST, FOUR(TERM), any |= QUICK; d[i] = VALUE;)                                                 \
        else                                                                                                     \
            EACH(FIRST, EIGHT(TERM), any |= QUICK; d[i] = VALUE;)                                                \
        return any;                                                                                              \
    }
DIRECT(single, fan_any_u32, NARROW_FIRST, NARROW_TERM, uint32_t, quick_bad(low, high, p),
       narrow_bad_single(sum, low, high, p), fan_any_f32, (float)sum)
DIRECT(brain, fan_any_u16, NARROW_FIRST, BRAIN_TERM, uint32_t, quick_bad(low, high, p),
       narrow_bad_low(sum, low, high, p), fan_any_u16, fan_bfloat16_of(fan_odd_of_double(sum)))
DIRECT(twice, fan_any_f64, WIDE_FIRST, WIDE_TERM, uint64_t, quick_bad_wide(whole_sum(sum, rest), small, large, p),
       wide_bad(sum, rest, small, large, p), fan_any_f64, whole_sum(sum, rest))

/* NAME_up, NAME_down: low floats as float32, and float32 rounded to odd as low floats. */
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
LOW_LOOPS(half, fan_any_u16, fan_float_of_float16, fan_float16_of)
LOW_LOOPS(bfloat16, fan_any_u16, fan_float_of_bfloat16, fan_bfloat16_of)
LOW_LOOPS(e4m3fn, fan_any_u8, fan_float_of_e4m3fn, fan_e4m3fn_of)
LOW_LOOPS(e5m2, fan_any_u8, fan_float_of_e5m2, fan_e5m2_of)

typedef struct low_ways {
    void (*up)(float *to, const char *from, size_t len);
    void (*down)(char *to, const float *from, size_t len);
} low_ways;

/* half_direct: a float16 sum is a whole number of 2^-24, below 2^19 for 8 terms: always exact, and no small float32. So
 * rounding it to odd is keeping 24 of the float64's digits, the last of which is set where any other was. */
#define DIGITS_LOST UINT64_C(0x1fffffff)
ALWAYS_INLINE void half_direct(char *dst, const char *const *src, int sources, size_t at, size_t len)
{
    fan_any_u16 *d = (fan_any_u16 *)dst;
    for (size_t i = at; i < len; i++) {
        double sum = -0.0;
        for (int k = 0; k < sources; k++)
            sum += (double)fan_float_of_float16(((const fan_any_u16 *)src[k])[i]);
        d[i] = fan_float16_of(fan_odd_of_double(sum));
    }
}

typedef struct ways {
    low_ways half, bfloat16, e4m3fn, e5m2;
    void (*narrow)(tally *t, const char *const *src, bool first, size_t len);
    void (*plain)(tally *t, const char *const *src, bool first, size_t len);
    void (*wide)(tally *t, const char *const *src, bool first, size_t len);
    bool (*judge_narrow)(tally *t, const judge *j, size_t len);
    bool (*judge_wide)(tally *t, const judge *j, size_t len);
    void (*odd)(float *to, const double *from, size_t len);
    bool (*single)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
    bool (*brain)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
    bool (*twice)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
    bool (*half_sum)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
} ways;

#define LOW_WAYS(LOW, NAME, TARGET)                                                                          \
    TARGET static void LOW##_up_##NAME(float *to, const char *from, size_t len) { LOW##_up(to, from, len); } \
    TARGET static void LOW##_down_##NAME(char *to, const float *from, size_t len) { LOW##_down(to, from, len); }
#define LOW_WAY(LOW, NAME) {LOW##_up_##NAME, LOW##_down_##NAME}

/* The loops once more for each vector unit. */
#define WAYS(NAME, TARGET)                                                                                           \
    TARGET static void narrow_##NAME(tally *t, const char *const *src, bool first, size_t len)                       \
    {                                                                                                                \
        NARROW_tile(t, src, first, len);                                                                             \
    }                                                                                                                \
    TARGET static void plain_##NAME(tally *t, const char *const *src, bool first, size_t len)                        \
    {                                                                                                                \
        PLAIN_tile(t, src, first, len);                                                                              \
    }                                                                                                                \
    TARGET static void wide_##NAME(tally *t, const char *const *src, bool first, size_t len)                         \
    {                                                                                                                \
        WIDE_tile(t, src, first, len);                                                                               \
    }                                                                                                                \
    TARGET static bool judge_narrow_##NAME(tally *t, const judge *j, size_t len) { return judge_narrow(t, j, len); } \
    TARGET static bool judge_wide_##NAME(tally *t, const judge *j, size_t len) { return judge_wide(t, j, len); }     \
    TARGET static void odd_##NAME(float *to, const double *from, size_t len) { odd_tile(to, from, len); }            \
    TARGET static bool single_##NAME(char *dst, const char *const *src, int sources, const judge *j, size_t len,     \
                                     bool quick)                                                                     \
    {                                                                                                                \
        return single_direct(dst, src, sources, j, len, quick);                                                      \
    }                                                                                                                \
    TARGET static bool brain_##NAME(char *dst, const char *const *src, int sources, const judge *j, size_t len,      \
                                    bool quick)                                                                      \
    {                                                                                                                \
        return brain_direct(dst, src, sources, j, len, quick);                                                       \
    }                                                                                                                \
    TARGET static bool twice_##NAME(char *dst, const char *const *src, int sources, const judge *j, size_t len,      \
                                    bool quick)                                                                      \
    {                                                                                                                \
        return twice_direct(dst, src, sources, j, len, quick);                                                       \
    }                                                                                                                \
    LOW_WAYS(bfloat16, NAME, TARGET)                                                                                 \
    LOW_WAYS(e4m3fn, NAME, TARGET)                                                                                   \
    LOW_WAYS(e5m2, NAME, TARGET)
#define WAY(NAME, HALF)                              \
    {LOW_WAY(half, NAME),   LOW_WAY(bfloat16, NAME), \
     LOW_WAY(e4m3fn, NAME), LOW_WAY(e5m2, NAME),     \
     narrow_##NAME,         plain_##NAME,            \
     wide_##NAME,           judge_narrow_##NAME,     \
     judge_wide_##NAME,     odd_##NAME,              \
     single_##NAME,         brain_##NAME,            \
     twice_##NAME,          HALF}

WAYS(plain, )
LOW_WAYS(half, plain, )
#if defined(__x86_64__) && defined(__GNUC__)
#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c")))
WAYS(avx2, AVX2)
WAYS(avx512, AVX512)

/* HALF_WAYS: float16 by the instructions for it, W numbers at once. Every NaN is the one that half_down makes. */
#define HALF_WAYS(NAME, TARGET, W, FLOATS, HALVES, WIDEN, NARROW, LOAD, STORE, LOAD_HALVES, STORE_HALVES, ONE_NAN) \
    TARGET static void half_up_##NAME(float *to, const char *from, size_t len)                                     \
    {                                                                                                              \
        size_t whole = len - len % W;                                                                              \
        for (size_t i = 0; i < whole; i += W)                                                                      \
            STORE(to + i, WIDEN(LOAD_HALVES((const HALVES *)(const void *)(from + 2 * i))));                       \
        half_up(to + whole, from + 2 * whole, len - whole);                                                        \
    }                                                                                                              \
    TARGET static void half_down_##NAME(char *to, const float *from, size_t len)                                   \
    {                                                                                                              \
        size_t whole = len - len % W;                                                                              \
        for (size_t i = 0; i < whole; i += W) {                                                                    \
            FLOATS x = LOAD(from + i);                                                                             \
            STORE_HALVES((HALVES *)(void *)(to + 2 * i),                                                           \
                         NARROW(ONE_NAN(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));                       \
        }                                                                                                          \
        half_down(to + 2 * whole, from + whole, len - whole);                                                      \
    }

AVX2 static inline __m256 one_nan_avx2(__m256 x)
{
    __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f)),
           nan = _mm256_or_ps(sign, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

AVX512 static inline __m512 one_nan_avx512(__m512 x)
{
    __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f)),
           nan = _mm512_or_ps(sign, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, nan);
}

AVX2 static inline __m256d odd_half_avx2(__m256d sum)
{
    __m256i u = _mm256_castpd_si256(sum), digits = _mm256_set1_epi64x(DIGITS_LOST);
    __m256i none = _mm256_cmpeq_epi64(_mm256_and_si256(u, digits), _mm256_setzero_si256());
    return _mm256_castsi256_pd(_mm256_or_si256(_mm256_andnot_si256(digits, u),
                                               _mm256_andnot_si256(none, _mm256_set1_epi64x(DIGITS_LOST + 1))));
}

AVX2 static inline void half_term_avx2(__m256d *sum, const char *from)
{
    for (int i = 0; i < 2; i++) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i)));
        sum[2 * i] = _mm256_add_pd(sum[2 * i], _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
        sum[2 * i + 1] = _mm256_add_pd(sum[2 * i + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
    }
}

AVX2 static inline void half_done_avx2(char *to, const __m256d *sum)
{
    for (int i = 0; i < 2; i++) {
        __m128 low = _mm256_cvtpd_ps(odd_half_avx2(sum[2 * i])), high = _mm256_cvtpd_ps(odd_half_avx2(sum[2 * i + 1]));
        __m256 x = one_nan_avx2(_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1));
        _mm_storeu_si128((__m128i *)(void *)(to + 16 * i),
                         _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
}

AVX512 static inline __m256 odd_half_avx512(__m512d sum)
{
    __m512i u = _mm512_castpd_si512(sum), digits = _mm512_set1_epi64(DIGITS_LOST);
    __mmask8 some = _mm512_test_epi64_mask(u, digits);
    u = _mm512_andnot_si512(digits, u);
    return _mm512_cvtpd_ps(_mm512_castsi512_pd(_mm512_mask_or_epi64(u, some, u, _mm512_set1_epi64(DIGITS_LOST + 1))));
}

AVX512 static inline void half_term_avx512(__m512d *sum, const char *from)
{
    __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
    sum[0] = _mm512_add_pd(sum[0], _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    sum[1] = _mm512_add_pd(sum[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}

AVX512 static inline void half_done_avx512(char *to, const __m512d *sum)
{
    __m512 x =
        one_nan_avx512(_mm512_insertf32x8(_mm512_castps256_ps512(odd_half_avx512(sum[0])), odd_half_avx512(sum[1]), 1));
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Two at once and a sum of their own for every other: additions that lose nothing may be in any order, and this chain
 * is half as long. */
#define HALF_SUM(NAME, TARGET, DOUBLES, ALL, PLUS)                                                                 \
    TARGET ALWAYS_INLINE void half_run_##NAME(char *dst, const char *const *src, const int sources, size_t len)    \
    {                                                                                                              \
        for (size_t i = 0; i < len; i += 16) {                                                                     \
            DOUBLES even[128 / sizeof(DOUBLES)], odd[128 / sizeof(DOUBLES)];                                       \
            for (size_t k = 0; k < 128 / sizeof(DOUBLES); k++)                                                     \
                even[k] = odd[k] = ALL(-0.0);                                                                      \
            for (int k = 0; k < sources; k += 2) {                                                                 \
                half_term_##NAME(even, src[k] + 2 * i);                                                            \
                half_term_##NAME(odd, src[k + 1] + 2 * i);                                                         \
            }                                                                                                      \
            for (size_t k = 0; k < 128 / sizeof(DOUBLES); k++)                                                     \
                even[k] = PLUS(even[k], odd[k]);                                                                   \
            half_done_##NAME(dst + 2 * i, even);                                                                   \
        }                                                                                                          \
    }                                                                                                              \
    TARGET static bool half_sum_##NAME(char *dst, const char *const *src, int sources, const judge *j, size_t len, \
                                       bool quick)                                                                 \
    {                                                                                                              \
        size_t whole = len - len % 16;                                                                             \
        (void)j;                                                                                                   \
        (void)quick;                                                                                               \
        if (sources <= 2)                                                                                          \
            half_run_##NAME(dst, src, 2, whole);                                                                   \
        else if (sources <= 4)                                                                                     \
            half_run_##NAME(dst, src, 4, whole);                                                                   \
        else                                                                                                       \
            half_run_##NAME(dst, src, 8, whole);                                                                   \
        half_direct(dst, src, sources, whole, len);                                                                \
        return false;                                                                                              \
    }
HALF_SUM(avx2, AVX2, __m256d, _mm256_set1_pd, _mm256_add_pd)
HALF_SUM(avx512, AVX512, __m512d, _mm512_set1_pd, _mm512_add_pd)

HALF_WAYS(avx2, AVX2, 8, __m256, __m128i, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps,
          _mm_loadu_si128, _mm_storeu_si128, one_nan_avx2)
HALF_WAYS(avx512, AVX512, 16, __m512, __m256i, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_storeu_ps,
          _mm256_loadu_si256, _mm256_storeu_si256, one_nan_avx512)
static const ways all_ways[] = {WAY(plain, NULL), WAY(avx2, half_sum_avx2), WAY(avx512, half_sum_avx512)};

#else
static const ways all_ways[] = {WAY(plain, NULL)};
#endif

static atomic_int at_most = INT_MAX;
static atomic_int_fast64_t slow_ones;

static int isa_now(void)
{
    int rank = fan_sum_isa_rank(), most = atomic_load_explicit(&at_most, memory_order_relaxed);
    return rank < most ? rank : most;
}

int fan_exact_isa(int most)
{
    atomic_store_explicit(&at_most, most < 0 ? INT_MAX : most, memory_order_relaxed);
    return isa_now();
}

static const ways *ways_here(void) { return &all_ways[isa_now()]; }

int64_t fan_exact_slow(void) { return atomic_load_explicit(&slow_ones, memory_order_relaxed); }

/* judge_again: where there is a factor, or a sum of float64 becomes something narrower. `sum` is exact where it is not
 * bad (or, wide, the float64 next to the exact sum); bad ones may pass here if their product is sure all the same. */
static bool judge_again(tally *t, const judge *j, bool is_wide, size_t len)
{
    double n = (double)j->n, lost = (n * n + 2 * n) * 0x1p-52, size = fabs(j->by);
    bool any = false, tame = size >= 0x1p-800 && size <= 0x1p800;
    for (size_t i = 0; i < len; i++) {
        bool bad = !j->always && t->bad[i];
        double p = t->sum[i] * j->by, b = fabs(p) * 0x1p-51;
        if (bad && !is_wide)
            b += (double)fan_float_of_bits(t->high[i] >> 1) * lost * size * 1.0001;
        bool sure = j->shifts && !bad && (!is_wide || j->grid == TO_DOUBLE);
        if (!sure && j->grid != TO_DOUBLE && !(is_wide && bad))
            sure = j->grid == TO_SINGLE ? SINGLE(p - b, p + b) : LOW(p - b, p + b);
        /* small products of float64 have fewer digits, and what overflowed on the way proves nothing */
        if (is_wide)
            sure = sure && (fabs(p) >= 0x1p-1000 || t->sum[i] == 0) && p - p == 0;
        else
            sure = sure || !(t->sum[i] - t->sum[i] == 0);
        t->sum[i] = p;
        t->bad[i] = !(sure && tame);
        any |= t->bad[i];
    }
    return any;
}

/* ---- tiles ---- */

/* What changes no sum, where there are fewer sources than a loop takes. */
static const float no_single[TILE] = {[0 ... TILE - 1] = -0.0f};
static const double no_double[TILE] = {[0 ... TILE - 1] = -0.0};
static const uint16_t no_brain[LONG_RUN] = {[0 ... LONG_RUN - 1] = 0x8000};

typedef struct job {
    const char *in; /* pointers to arrays, `step` bytes apart */
    size_t step;
    size_t n, parts;
    fan_dtype d, read; /* the sum's; as which its terms are read */
    kind k;
    const ways *how;
    judge j;
    fan_nditer walk;
} job;

/* Room for terms that cannot be read where they lie. */
typedef struct spare {
    _Alignas(64) char term[AT_ONCE][TILE * sizeof(double)];
} spare;

static const fan_array *operand(const job *j, size_t k)
{
    return *(const fan_array *const *)(const void *)(j->in + k * j->step);
}

static void job_begin(job *j, const void *in, size_t step, size_t n, fan_dtype d)
{
    j->in = in;
    j->step = step;
    j->n = n;
    j->d = d;
    j->k = kind_of(d);
    j->parts = parts_of(d);
    j->read = wide(d) || d == FAN_DT_COMPLEX64 ? d : FAN_DT_FLOAT32;
    j->how = ways_here();
    j->j = (judge){.n = n,
                   .digits = j->k.digits,
                   .always = j->k.always && n <= ALWAYS_MOST,
                   .grid = TO_DOUBLE,
                   .shifts = true,
                   .by = 1.0};
}

/* low_of: how numbers of a low dtype become float32, and back; NULL: no loop of its own. */
static const low_ways *low_of(const ways *how, fan_dtype d)
{
    switch (d) {
    case FAN_DT_FLOAT16:
        return &how->half;
    case FAN_DT_BFLOAT16:
        return &how->bfloat16;
    case FAN_DT_FLOAT8_E4M3FN:
        return &how->e4m3fn;
    case FAN_DT_FLOAT8_E5M2:
        return &how->e5m2;
    default:
        return NULL;
    }
}

/* term: elements [at, at + len) of operand k, as the dtype in which they are read. */
static const char *term(const job *j, size_t k, int64_t at, int64_t len, char *room)
{
    const fan_array *a = operand(j, k);
    const char *p = a->dtype == j->d || j->d == j->read ? fan_nditer_whole(&j->walk, a, at, len) : NULL;
    const low_ways *low = p && j->read == FAN_DT_FLOAT32 ? low_of(j->how, a->dtype) : NULL;
    if (p && a->dtype == j->read)
        return p;
    if (low) {
        low->up((float *)(void *)room, p, (size_t)len);
        return room;
    }
    if (a->dtype == j->d || j->d == j->read) {
        fan_nditer_read(&j->walk, a, at, len, j->read, room);
        return room;
    }
    FAN_UNCLEARED char rounded_first[TILE * 2]; /* of another dtype into a low one: rounded to that first */
    fan_nditer_read(&j->walk, a, at, len, j->d, rounded_first);
    fan_convert(room, j->read, (int64_t)fan_dtype_size(j->read), rounded_first, j->d, (int64_t)fan_dtype_size(j->d),
                len);
    return room;
}

static double number_at(const job *j, const char *p, size_t i)
{
    return wide(j->d) ? ((const fan_any_f64 *)p)[i] : (double)((const fan_any_f32 *)p)[i];
}

/* fast: the sums of a tile, and what is known of them. */
static void fast(const job *j, int64_t at, int64_t len, tally *t, spare *room)
{
    const char *src[AT_ONCE];
    size_t numbers = (size_t)len * j->parts;
    const char *none = wide(j->d) ? (const char *)no_double : (const char *)no_single;
    for (size_t k = 0; k < j->n; k += AT_ONCE) {
        int sources = j->n - k < AT_ONCE ? (int)(j->n - k) : AT_ONCE;
        for (int i = 0; i < AT_ONCE; i++)
            src[i] = i < sources ? term(j, k + (size_t)i, at, len, room->term[i]) : none;
        (wide(j->d) ? j->how->wide : j->j.always ? j->how->plain : j->how->narrow)(t, src, k == 0, numbers);
    }
}

/* prove: leaves what is to be rounded in t->sum; returns whether there are bad ones. */
static bool prove(const job *j, tally *t, size_t numbers)
{
    bool is_wide = wide(j->d), again = j->j.scaled || (is_wide && j->j.grid != TO_DOUBLE), bad = false;
    judge first = j->j;
    if (again)
        first.grid = TO_DOUBLE;
    if (is_wide)
        bad = j->how->judge_wide(t, &first, numbers);
    else if (!first.always)
        bad = j->how->judge_narrow(t, &first, numbers);
    return again ? judge_again(t, &j->j, is_wide, numbers) : bad;
}

/* slow: the bad ones of a tile once more, in whole numbers. */
static void slow(const job *j, int64_t at, size_t numbers, tally *t, spare *room)
{
    FAN_UNCLEARED uint64_t words[BATCH * MOST_WORDS];
    size_t which[BATCH], w = (size_t)j->k.words;
    for (size_t i = 0; i < numbers;) {
        size_t m = 0;
        for (; i < numbers && m < BATCH; i++)
            if (t->bad[i])
                which[m++] = i;
        if (m == 0)
            break;
        for (size_t b = 0; b < m; b++)
            words_start(words + b * w, &j->k);
        int64_t from = (int64_t)(which[0] / j->parts), to = (int64_t)(which[m - 1] / j->parts) + 1;
        for (size_t k = 0; k < j->n; k++) {
            const char *p = term(j, k, at + from, to - from, room->term[0]);
            for (size_t b = 0; b < m; b++)
                words_add(words + b * w, &j->k, number_at(j, p, which[b] - (size_t)from * j->parts));
        }
        for (size_t b = 0; b < m; b++)
            t->sum[which[b]] = words_value(words + b * w, &j->k, j->j.scaled ? &j->j.by : NULL, j->j.grid != TO_DOUBLE);
        atomic_fetch_add_explicit(&slow_ones, (int64_t)m, memory_order_relaxed);
    }
}

/* A factor: what it makes of the judging, and what is left for the end: complex ones that are not real. */
static bool scale_begin(judge *j, const fan_scale *scale, bool is_complex)
{
    if (!scale || !scale->on)
        return false;
    if (is_complex && scale->im != 0) {
        j->grid = TO_DOUBLE;
        return true;
    }
    j->scaled = true;
    j->by = scale->re;
    j->shifts = !(bits_of(scale->re) << 12);
    return false;
}

static void turn(double *parts, int64_t len, const fan_scale *scale)
{
    for (int64_t i = 0; i < len; i++) {
        double re = parts[2 * i], im = parts[2 * i + 1];
        parts[2 * i] = re * scale->re - im * scale->im;
        parts[2 * i + 1] = re * scale->im + im * scale->re;
    }
}

static void set_grid(judge *j, fan_dtype out)
{
    j->grid = wide(out) ? TO_DOUBLE : out == FAN_DT_FLOAT32 || out == FAN_DT_COMPLEX64 ? TO_SINGLE : TO_LOW;
}

typedef bool (*direct)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);

/* direct_of: the loop that goes from the operands straight to `out`; NULL: there is none. */
static direct direct_of(const job *j, const fan_array *out)
{
    bool fits = j->n <= AT_ONCE && !j->j.scaled && out->dtype == j->d;
    for (size_t k = 0; k < j->n && fits; k++)
        fits = operand(j, k)->dtype == j->d &&
               operand(j, k)->data != out->data; /* what is written in vain must not be what is read */
    if (!fits)
        return NULL;
    return j->d == FAN_DT_FLOAT32 || j->d == FAN_DT_COMPLEX64 ? j->how->single
           : wide(j->d)                                       ? j->how->twice
           : j->d == FAN_DT_BFLOAT16                          ? j->how->brain
           : j->d == FAN_DT_FLOAT16                           ? j->how->half_sum
                                                              : NULL;
}

/* went: elements [at, at + len) are done by `go`; false where one of them needs more than that, or has gaps. *shy:
 * tiles for which the quick way is not tried: more of them each time that it was in vain. */
static bool went(const job *j, direct go, const fan_array *out, int64_t at, int64_t len, unsigned *shy, unsigned *grown)
{
    const char *src[AT_ONCE];
    char *dst = fan_nditer_whole(&j->walk, out, at, len);
    for (size_t k = 0; k < j->n && dst; k++) {
        src[k] = fan_nditer_whole(&j->walk, operand(j, k), at, len);
        if (!src[k])
            return false;
    }
    const char *none = wide(j->d)             ? (const char *)no_double
                       : low_of(j->how, j->d) ? (const char *)no_brain
                                              : (const char *)no_single;
    for (size_t k = j->n; k < AT_ONCE; k++)
        src[k] = none;
    if (!dst)
        return false;
    size_t numbers = (size_t)len * j->parts;
    if (*shy == 0) {
        if (!go(dst, src, (int)j->n, &j->j, numbers, true)) {
            *grown = 0;
            return true;
        }
        *grown = *grown < 64 ? 2 * *grown + 1 : *grown;
        *shy = *grown;
    } else {
        --*shy;
    }
    return !go(dst, src, (int)j->n, &j->j, numbers, false);
}

static void exact_sum(const fan_array *out, const void *in, size_t step, size_t n, fan_dtype d, const fan_scale *scale)
{
    FAN_UNCLEARED job j;
    FAN_UNCLEARED _Alignas(64) tally t;
    FAN_UNCLEARED spare room;
    if (out->size == 0)
        return;
    job_begin(&j, in, step, n, d);
    set_grid(&j.j, out->dtype);
    bool turns = scale_begin(&j.j, scale, j.parts == 2);
    fan_nditer_begin(&j.walk, out, false);
    for (size_t k = 0; k < n; k++)
        fan_nditer_also(&j.walk, operand(&j, k));
    fan_nditer_ready(&j.walk);
    fan_dtype as = j.parts == 2 ? FAN_DT_COMPLEX128 : j.j.grid == TO_LOW ? FAN_DT_FLOAT32 : FAN_DT_FLOAT64;
    int64_t most = TILE / (int64_t)j.parts, run = d == FAN_DT_FLOAT16 ? LONG_RUN : most;
    int64_t row = j.walk.ndim > 1 ? j.walk.extent[j.walk.ndim - 1] : 0;
    direct go = turns ? NULL : direct_of(&j, out);
    const low_ways *low = as == FAN_DT_FLOAT32 ? low_of(j.how, out->dtype) : NULL;
    unsigned shy = 0, grown = 0;
    for (int64_t at = 0, len; at < j.walk.size && !fan_interrupted(most); at += len) {
        int64_t rest = row >= LONG_ROW ? row - at % row : j.walk.size - at;
        len = rest < run ? rest : run;
        if (go && went(&j, go, out, at, len, &shy, &grown))
            continue;
        len = rest < most ? rest : most;
        size_t numbers = (size_t)len * j.parts;
        fast(&j, at, len, &t, &room);
        if (prove(&j, &t, numbers) && !FAN_FAULT(EXACT_NO_SLOW))
            slow(&j, at, numbers, &t, &room);
        if (turns)
            turn(t.sum, len, scale);
        if (as == FAN_DT_FLOAT32)
            j.how->odd(t.odd, t.sum, numbers);
        char *whole = low ? fan_nditer_whole(&j.walk, out, at, len) : NULL;
        if (whole) {
            low->down(whole, t.odd, numbers);
            continue;
        }
        fan_nditer_write(&j.walk, out, at, len, as, as == FAN_DT_FLOAT32 ? (const char *)t.odd : (const char *)t.sum);
    }
}

void fan_exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d, const fan_scale *scale)
{
    exact_sum(out, in, sizeof *in, n, d, scale);
}

void fan_exact_fold(const fan_array *out, const fan_operand *in, size_t n, fan_dtype d, const fan_scale *scale)
{
    exact_sum(out, &in->array, sizeof *in, n, d, scale);
}

/* ---- between folds ---- */

void fan_exact_start(void *state, fan_dtype d, int64_t size)
{
    kind k = kind_of(d);
    uint64_t *w = state;
    for (size_t i = 0; i < (size_t)size * parts_of(d); i++, w += k.words)
        words_start(w, &k);
}

void fan_exact_add(void *state, fan_dtype d, const fan_array *const *in, size_t n)
{
    FAN_UNCLEARED job j;
    FAN_UNCLEARED _Alignas(64) tally t;
    FAN_UNCLEARED spare room;
    uint64_t *w = state;
    if (n == 0 || in[0]->size == 0)
        return;
    job_begin(&j, in, sizeof *in, n, d);
    fan_nditer_begin(&j.walk, in[0], true); /* C order, as the states */
    for (size_t k = 1; k < n; k++)
        fan_nditer_also(&j.walk, in[k]);
    fan_nditer_ready(&j.walk);
    int64_t most = TILE / (int64_t)j.parts;
    for (int64_t at = 0, len; at < j.walk.size; at += len) {
        len = j.walk.size - at < most ? j.walk.size - at : most;
        size_t numbers = (size_t)len * j.parts;
        /* Where the sum of these terms is one float64, that alone is added. */
        bool some = n > 1 && !wide(d), bad = false;
        if (some) {
            fast(&j, at, len, &t, &room);
            bad = prove(&j, &t, numbers);
            for (size_t i = 0; i < numbers; i++)
                if (!bad || !t.bad[i])
                    words_add(w + i * (size_t)j.k.words, &j.k, t.sum[i]);
        }
        for (size_t k = 0; k < n && (!some || bad); k++) {
            const char *p = term(&j, k, at, len, room.term[0]);
            for (size_t i = 0; i < numbers; i++)
                if (!some || t.bad[i])
                    words_add(w + i * (size_t)j.k.words, &j.k, number_at(&j, p, i));
        }
        w += numbers * (size_t)j.k.words;
    }
}

void fan_exact_add_at(void *state, fan_dtype d, const fan_array *values, const int64_t *to)
{
    FAN_UNCLEARED job j;
    FAN_UNCLEARED spare room;
    const fan_array *const in[] = {values};
    uint64_t *w = state;
    if (values->size == 0)
        return;
    job_begin(&j, in, sizeof *in, 1, d);
    fan_nditer_begin(&j.walk, values, true);
    fan_nditer_ready(&j.walk);
    int64_t most = TILE / (int64_t)j.parts;
    size_t each = j.parts * (size_t)j.k.words;
    for (int64_t at = 0, len; at < j.walk.size; at += len) {
        len = j.walk.size - at < most ? j.walk.size - at : most;
        const char *p = term(&j, 0, at, len, room.term[0]);
        for (size_t i = 0; i < (size_t)len * j.parts; i++)
            words_add(w + (size_t)to[at + (int64_t)(i / j.parts)] * each + i % j.parts * (size_t)j.k.words, &j.k,
                      number_at(&j, p, i));
    }
}

void fan_exact_finish(const fan_array *out, const void *state, fan_dtype d, const fan_scale *scale)
{
    FAN_UNCLEARED fan_nditer walk;
    FAN_UNCLEARED double value[TILE];
    kind k = kind_of(d);
    size_t parts = parts_of(d);
    judge j = {.by = 1.0};
    const uint64_t *w = state;
    if (out->size == 0)
        return;
    set_grid(&j, out->dtype);
    bool turns = scale_begin(&j, scale, parts == 2);
    fan_nditer_begin(&walk, out, true);
    fan_nditer_ready(&walk);
    int64_t most = TILE / (int64_t)parts;
    for (int64_t at = 0, len; at < walk.size; at += len) {
        len = walk.size - at < most ? walk.size - at : most;
        for (size_t i = 0; i < (size_t)len * parts; i++, w += k.words)
            value[i] = words_value(w, &k, j.scaled ? &j.by : NULL, j.grid != TO_DOUBLE);
        if (turns)
            turn(value, len, scale);
        fan_nditer_write(&walk, out, at, len, parts == 2 ? FAN_DT_COMPLEX128 : FAN_DT_FLOAT64, (const char *)value);
    }
}

void fan_exact_widen(void *to, fan_dtype wider, const void *from, fan_dtype d, int64_t size)
{
    kind a = kind_of(d), b = kind_of(wider);
    size_t parts = parts_of(d);
    const uint64_t *w = from;
    uint64_t *v = to;
    int shift = b.unit - a.unit;
    fan_exact_start(to, wider, size);
    for (int64_t i = 0; i < size; i++, v += (parts_of(wider) - parts) * (size_t)b.words) {
        for (size_t p = 0; p < parts; p++, w += a.words, v += b.words) {
            int64_t top = (int64_t)w[a.words - 1];
            if (top <= NO_NUMBER) {
                v[b.words - 1] = (uint64_t)top;
                continue;
            }
            for (int k = 0; k < b.words; k++) { /* word k of w * 2^shift; above its top word w has its sign */
                int at = k - shift / 64, bit = shift % 64;
                uint64_t here = at < 0 ? 0 : at < a.words ? w[at] : (uint64_t)(top >> 63);
                uint64_t below = at < 1 ? 0 : at - 1 < a.words ? w[at - 1] : (uint64_t)(top >> 63);
                v[k] = bit ? here << bit | below >> (64 - bit) : here;
            }
        }
        if (parts_of(wider) > parts) /* the imaginary part of what is real: +0.0, as a conversion has it */
            v[b.words - 1] = 0;
    }
}
