/* Fast loops add terms to blocks of 64-bit words; everything else (128-bit words,
 * superaccumulators, inf and NaN) goes number by number. A term x of a block with unit 2^base is
 * the integer x * 2^-base: the product is exact, because the factor is a power of two and the
 * block's base is at most the lowest set bit of x, and the conversion is exact, because the block's
 * bound is below 2^62 units. */
#include "array/window.h"

#include "array/convert.h"
#include "array/exact_loops.h"
#include "array/lowp.h"
#include "array/sum_isa.h"
#include "base/fault.h"
#include "base/float_mode.h"
#include "base/mem.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#define B FAN_WINDOW_BLOCK

enum {
    WORDS_64,
    WORDS_128,
    LIMBS
};

typedef struct window_block {
    double bound; /* of |number| */
    int32_t base;
    uint8_t form;
    bool empty;   /* nothing was added: the words are not written yet */
    bool special; /* a number may be inf or NaN */
    /* WORDS_128: int64_t high[B]; LIMBS: the limbs of each number, which then replace the words */
    void *more;
} window_block;

struct fan_window {
    fan_dtype dtype;
    int64_t size, numbers, blocks;
    fan_exact_kind kind;
    int64_t *word; /* whole blocks */
    window_block *block;
};

/* The content of a block, of this window, of another, or of a message. */
typedef struct window_view {
    const window_block *block;
    const int64_t *low;
    size_t n; /* numbers */
} window_view;

/* What an addition needs: the sum of the largest |term| of each array, the exponent of a bit at or
 * below the lowest set bit of all terms (INT_MAX: only zeros). */
typedef struct window_need {
    double most;
    int lowest;
    bool special;
    int form; /* at least */
} window_need;

fan_window *fan_window_new(fan_dtype d, int64_t size)
{
    fan_window *w = fan_calloc(sizeof *w);
    if (!w)
        return NULL;
    w->dtype = d;
    w->size = size;
    w->numbers = size * (int64_t)fan__exact_parts(d);
    w->blocks = (w->numbers + B - 1) / B;
    w->kind = fan__exact_kind_of(d);
    w->word = fan_alloc_data((size_t)w->blocks * B * sizeof *w->word);
    w->block = fan_calloc((size_t)w->blocks * sizeof *w->block);
    if (!w->word || !w->block) {
        fan_window_free(w);
        return NULL;
    }
    for (int64_t b = 0; b < w->blocks; b++)
        w->block[b].empty = true;
    return w;
}

void fan_window_free(fan_window *w)
{
    if (!w)
        return;
    for (int64_t b = 0; w->block && b < w->blocks; b++)
        fan_free(w->block[b].more);
    fan_free_data(w->word, (size_t)w->blocks * B * sizeof *w->word);
    fan_free(w->block);
    fan_free(w);
}

/* block_more_bytes: returns the bytes of `more` of a block of this form. */
static size_t block_more_bytes(const fan_window *w, int form)
{
    return form == WORDS_64    ? 0
           : form == WORDS_128 ? B * sizeof(int64_t)
                               : B * (size_t)w->kind.limbs * sizeof(uint64_t);
}

fan_dtype fan_window_dtype(const fan_window *w)
{
    return w->dtype;
}
int64_t fan_window_size(const fan_window *w)
{
    return w->size;
}

#ifdef FAN_TEST
size_t fan_window_bytes(const fan_window *w)
{
    size_t bytes = sizeof *w + (size_t)w->blocks * (B * sizeof *w->word + sizeof *w->block);
    for (int64_t b = 0; b < w->blocks; b++)
        bytes += block_more_bytes(w, w->block[b].form);
    return bytes;
}

void fan_window_forms(const fan_window *w, int64_t count[4])
{
    memset(count, 0, 4 * sizeof *count);
    for (int64_t b = 0; b < w->blocks; b++)
        count[w->block[b].empty ? 0 : 1 + w->block[b].form]++;
}
#endif

static window_view window_view_of(const fan_window *w, int64_t b)
{
    int64_t rest = w->numbers - b * B;
    return (window_view){w->block + b, w->word + b * B, (size_t)(rest < B ? rest : B)};
}

/* ---- one number ---- */

/* cell_special: returns the top word of a sum with top word `top` to which inf or NaN `term` is
 * added. */
static int64_t cell_special(int64_t top, int64_t term)
{
    return top == FAN_ACC_NAN || (top < FAN_ACC_NAN && top != FAN_ACC_NOTHING && top != term)
               ? FAN_ACC_NAN
               : term;
}

static const int64_t *high_of(const window_block *b)
{
    return b->more;
}

/* cell_top: returns the top word of number i. */
static int64_t cell_top(const window_view *v, const fan_exact_kind *k, size_t i)
{
    const window_block *b = v->block;
    if (b->empty)
        return FAN_ACC_NOTHING;
    return b->form == WORDS_64    ? v->low[i]
           : b->form == WORDS_128 ? high_of(b)[i]
                                  : ((const int64_t *)b->more)[(i + 1) * (size_t)k->limbs - 1];
}

static __int128 cell_value(const window_view *v, size_t i)
{
    if (v->block->form == WORDS_64)
        return v->low[i];
    return (__int128)((unsigned __int128)(uint64_t)high_of(v->block)[i] << 64 |
                      (uint64_t)v->low[i]);
}

/* cell_size: enters |number i| into the bits that any number has and the largest. */
static void cell_size(const window_view *v, size_t i, unsigned __int128 *any,
                      unsigned __int128 *most)
{
    __int128 x = cell_value(v, i);
    unsigned __int128 a = x < 0 ? -(unsigned __int128)x : (unsigned __int128)x;
    *any |= a;
    *most = a > *most ? a : *most;
}

/* zeros_of: returns the number of zero bits at the end; 0 for 0. */
static int zeros_of(unsigned __int128 any)
{
    if (any == 0)
        return 0;
    return (uint64_t)any ? __builtin_ctzll((uint64_t)any)
                         : 64 + __builtin_ctzll((uint64_t)(any >> 64));
}

/* cell_set: stores a number, or a top word that represents none. */
static void cell_set(window_block *b, int64_t *low, size_t i, __int128 x, int64_t special)
{
    if (b->form == WORDS_64) {
        low[i] = special ? special : (int64_t)x;
    } else {
        low[i] = special ? 0 : (int64_t)x;
        ((int64_t *)b->more)[i] = special ? special : (int64_t)(x >> 64);
    }
}

/* limbs_add: adds an integer in two's complement, `words` long, times 2^at, to the superaccumulator
 * `to`, which is a number. */
static void limbs_add(uint64_t *to, const fan_exact_kind *k, const uint64_t *from, int words,
                      int at)
{
    uint64_t sign = (int64_t)from[words - 1] < 0 ? UINT64_MAX : 0;
    unsigned carry = 0;
    int bit = at & 63;
    for (int i = at >> 6, j = 0; i < k->limbs; i++, j++) {
        uint64_t here = j < words ? from[j] : sign, below = j == 0          ? 0
                                                            : j - 1 < words ? from[j - 1]
                                                                            : sign;
        uint64_t p = bit ? here << bit | below >> (64 - bit) : here, sum = to[i] + p,
                 all = sum + carry;
        carry = (sum < p) | (all < sum);
        to[i] = all;
    }
}

/* limbs_merge: adds number i of a view to the superaccumulator `to`. */
static void limbs_merge(uint64_t *to, const fan_exact_kind *k, const window_view *v,
                        const fan_exact_kind *from, size_t i)
{
    int64_t *top = (int64_t *)&to[k->limbs - 1], other = cell_top(v, from, i);
    if (other == FAN_ACC_NOTHING)
        return;
    if (other <= FAN_ACC_NAN) {
        *top = cell_special(*top, other);
        return;
    }
    if (*top <= FAN_ACC_NAN) {
        if (*top != FAN_ACC_NOTHING)
            return;
        *top = 0;
    }
    if (v->block->form == LIMBS) {
        limbs_add(to, k, (const uint64_t *)v->block->more + i * (size_t)from->limbs, from->limbs,
                  k->unit - from->unit);
    } else {
        __int128 x = cell_value(v, i);
        uint64_t word[2] = {(uint64_t)x, (uint64_t)(x >> 64)};
        limbs_add(to, k, word, 2, v->block->base + k->unit);
    }
}

/* ---- loops for each vector unit ---- */

/* Facts of a row of terms: the bits of the largest |x|, and of the smallest nonzero |x| less
 * one. */
typedef struct row_facts {
    uint64_t high, low;
} row_facts;

typedef struct row_size {
    uint64_t any, large, numbers;
} row_size;

#define MAGIC 0x1.8p52 /* added to an integer below 2^51, it leaves the integer in the low bits */

/* minus_zero: the bits of -0.0 times a factor. */
static inline __attribute__((always_inline)) uint64_t minus_zero(double by)
{
    return (bits_of(by) ^ UINT64_C(1) << 63) & UINT64_C(1) << 63;
}

#define TERM_SMALL(x) ((int64_t)bits_of((double)(x) * by + MAGIC) - (int64_t)bits_of(MAGIC))
#define TERM_LARGE(x) ((int64_t)((double)(x) * by))

/* ADD_ROW: adds n terms; `first`: to an empty block. A -0.0 leaves the sum what it was. */
#define ADD_ROW(NAME, TARGET, T, UINT, SIZE, TERM)                                          \
    TARGET static void add_##SIZE##_##NAME(int64_t *restrict w, const char *from, size_t n, \
                                           double by, bool first)                           \
    {                                                                                       \
        const UINT *restrict u = (const UINT *)(const void *)from;                          \
        const T *restrict x = (const T *)(const void *)from;                                \
        const UINT sign = (UINT)1 << (8 * sizeof(UINT) - 1);                                \
        if (first)                                                                          \
            for (size_t i = 0; i < n; i++) {                                                \
                int64_t t = TERM(x[i]), old = -(int64_t)(u[i] == sign);                     \
                w[i] = (t & ~old) | (FAN_ACC_NOTHING & old);                                \
            }                                                                               \
        else                                                                                \
            for (size_t i = 0; i < n; i++) {                                                \
                int64_t t = TERM(x[i]), v = w[i], old = -(int64_t)(u[i] == sign);           \
                int64_t none = -(int64_t)(v == FAN_ACC_NOTHING) & ~old;                     \
                w[i] = (int64_t)((uint64_t)(v & ~none) + (uint64_t)t);                      \
            }                                                                               \
    }

#define FACTS(NAME, TARGET, UINT, SINT, SIZE)                                          \
    TARGET static void facts_##SIZE##_##NAME(const char *from, size_t n, row_facts *f) \
    {                                                                                  \
        const UINT *restrict u = (const UINT *)(const void *)from;                     \
        const UINT all = (UINT) - 1 >> 1;                                              \
        SINT high = 0, low = (SINT)all;                                                \
        for (size_t i = 0; i < n; i++) {                                               \
            SINT a = (SINT)(u[i] & all), less = (SINT)((UINT)(a - 1) & all);           \
            high = a > high ? a : high;                                                \
            low = less < low ? less : low;                                             \
        }                                                                              \
        *f = (row_facts){(uint64_t)high, (uint64_t)low};                               \
    }

/* MERGE_ROW: adds words << by. */
#define MERGE_ROW(NAME, TARGET)                                                                  \
    TARGET static void merge_##NAME(int64_t *restrict w, const int64_t *restrict from, size_t n, \
                                    int by)                                                      \
    {                                                                                            \
        for (size_t i = 0; i < n; i++) {                                                         \
            int64_t v = w[i], x = from[i], no_v = -(int64_t)(v == FAN_ACC_NOTHING),              \
                    no_x = -(int64_t)(x == FAN_ACC_NOTHING);                                     \
            uint64_t shifted = (uint64_t)(x & ~no_x) << by;                                      \
            w[i] = (int64_t)((uint64_t)(v & ~(no_v & ~no_x)) + shifted);                         \
        }                                                                                        \
    }

/* ROUND_ROW: words below 2^50 as float64, times a factor. */
#define ROUND_ROW(NAME, TARGET)                                                                   \
    TARGET static void round_##NAME(double *restrict to, const int64_t *restrict w, size_t n,     \
                                    double by)                                                    \
    {                                                                                             \
        for (size_t i = 0; i < n; i++) {                                                          \
            int64_t v = w[i], none = -(int64_t)(v == FAN_ACC_NOTHING);                            \
            double x = (of_bits((uint64_t)((v & ~none) + (int64_t)bits_of(MAGIC))) - MAGIC) * by; \
            to[i] = of_bits((bits_of(x) & ~(uint64_t)none) | ((uint64_t)none & minus_zero(by)));  \
        }                                                                                         \
    }

/* SIZE_ROW: the bits that any word has, and those that any |word| has below its sign (one too few
 * for negative powers of two); how many words are numbers. */
#define SIZE_ROW(NAME, TARGET)                                                       \
    TARGET static void size_##NAME(const int64_t *restrict w, size_t n, row_size *s) \
    {                                                                                \
        uint64_t any = 0, large = 0, numbers = 0;                                    \
        for (size_t i = 0; i < n; i++) {                                             \
            int64_t none = -(int64_t)(w[i] == FAN_ACC_NOTHING), v = w[i] & ~none;    \
            any |= (uint64_t)v;                                                      \
            large |= (uint64_t)(v ^ (v >> 63));                                      \
            numbers += (uint64_t)(1 + none);                                         \
        }                                                                            \
        *s = (row_size){any, large, numbers};                                        \
    }

/* plane_bytes: how many of the `rest` last bytes of each number are side by side in the next plane
 * of a message. */
static inline int plane_bytes(int rest)
{
    return rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
}

#define EACH_PLANE(X) X(1, fan_any_u8) X(2, fan_any_u16) X(4, fan_any_u32) X(8, fan_any_u64)

#define PACK_PLANE(BYTES, UINT)                                   \
    if (bytes == BYTES) {                                         \
        UINT *restrict to = (UINT *)(void *)p;                    \
        for (size_t i = 0; i < n; i++) {                          \
            uint64_t none = -(uint64_t)(w[i] == FAN_ACC_NOTHING), \
                     u = (uint64_t)(w[i] >> zeros) + lift;        \
            to[i] = (UINT)((u & ~none) >> shift);                 \
        }                                                         \
    }

#define UNPACK_PLANE(BYTES, UINT)                                                       \
    if (bytes == BYTES) {                                                               \
        const UINT *restrict from = (const UINT *)(const void *)p;                      \
        for (size_t i = 0; i < n; i++)                                                  \
            w[i] = (int64_t)((done ? (uint64_t)w[i] : 0) | (uint64_t)from[i] << shift); \
    }

/* MESSAGE_ROWS: words of 64 bits to and from the planes of a message. */
#define MESSAGE_ROWS(NAME, TARGET)                                                            \
    TARGET static void pack_##NAME(char *p, const int64_t *restrict w, size_t n, int zeros,   \
                                   int width)                                                 \
    {                                                                                         \
        const uint64_t lift = UINT64_C(1) << (8 * width - 1);                                 \
        for (int done = 0, bytes; done < width; done += bytes, p += n * (size_t)bytes) {      \
            const int shift = 8 * done;                                                       \
            bytes = plane_bytes(width - done);                                                \
            EACH_PLANE(PACK_PLANE)                                                            \
        }                                                                                     \
    }                                                                                         \
    TARGET static void unpack_##NAME(const char *p, int64_t *restrict w, size_t n, int width) \
    {                                                                                         \
        const uint64_t lift = UINT64_C(1) << (8 * width - 1);                                 \
        for (int done = 0, bytes; done < width; done += bytes, p += n * (size_t)bytes) {      \
            const int shift = 8 * done;                                                       \
            bytes = plane_bytes(width - done);                                                \
            EACH_PLANE(UNPACK_PLANE)                                                          \
        }                                                                                     \
        for (size_t i = 0; i < n; i++) {                                                      \
            uint64_t u = (uint64_t)w[i], none = -(uint64_t)((u & ~UINT64_C(3)) == 0);         \
            w[i] = (int64_t)(u - (lift & ~none) + ((uint64_t)FAN_ACC_NOTHING & none));        \
        }                                                                                     \
    }

typedef struct window_loops {
    void (*facts_single)(const char *from, size_t n, row_facts *f);
    void (*facts_double)(const char *from, size_t n, row_facts *f);
    void (*single_small)(int64_t *w, const char *from, size_t n, double by, bool first);
    void (*single_large)(int64_t *w, const char *from, size_t n, double by, bool first);
    void (*double_small)(int64_t *w, const char *from, size_t n, double by, bool first);
    void (*double_large)(int64_t *w, const char *from, size_t n, double by, bool first);
    void (*merge)(int64_t *w, const int64_t *from, size_t n, int by);
    void (*round)(double *to, const int64_t *w, size_t n, double by);
    void (*size)(const int64_t *w, size_t n, row_size *s);
    void (*pack)(char *p, const int64_t *w, size_t n, int zeros, int width);
    void (*unpack)(const char *p, int64_t *w, size_t n, int width);
} window_loops;

#define LOOPS(NAME, TARGET)                                                   \
    FACTS(NAME, TARGET, fan_any_u32, int32_t, single)                         \
    FACTS(NAME, TARGET, fan_any_u64, int64_t, double)                         \
    ADD_ROW(NAME, TARGET, fan_any_f32, fan_any_u32, single_small, TERM_SMALL) \
    ADD_ROW(NAME, TARGET, fan_any_f32, fan_any_u32, single_large, TERM_LARGE) \
    ADD_ROW(NAME, TARGET, fan_any_f64, fan_any_u64, double_small, TERM_SMALL) \
    ADD_ROW(NAME, TARGET, fan_any_f64, fan_any_u64, double_large, TERM_LARGE) \
    MERGE_ROW(NAME, TARGET)                                                   \
    ROUND_ROW(NAME, TARGET) SIZE_ROW(NAME, TARGET) MESSAGE_ROWS(NAME, TARGET)
#define LOOPS_OF(NAME)        \
    {facts_single_##NAME,     \
     facts_double_##NAME,     \
     add_single_small_##NAME, \
     add_single_large_##NAME, \
     add_double_small_##NAME, \
     add_double_large_##NAME, \
     merge_##NAME,            \
     round_##NAME,            \
     size_##NAME,             \
     pack_##NAME,             \
     unpack_##NAME}

LOOPS(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
LOOPS(avx2, __attribute__((target("avx2"))))
LOOPS(avx512, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))
static const window_loops all_loops[] = {LOOPS_OF(plain), LOOPS_OF(avx2), LOOPS_OF(avx512)};
#else
static const window_loops all_loops[] = {LOOPS_OF(plain)};
#endif

static const window_loops *window_loops_now(void)
{
    return &all_loops[fan__exact_isa_now()];
}

/* ---- room for what comes ---- */

/* window_top: returns the least e with x < 2^e; INT_MIN / 2 for 0. */
static int window_top(double x)
{
    return x == 0 ? INT_MIN / 2 : isinf(x) ? 2000 : ilogb(x) + 1;
}

/* bound_plus: returns an upper bound of a + b. */
static double bound_plus(double a, double b)
{
    return (a + b) * (1 + 0x1p-50);
}

/* block_base: returns the base that the block would have. The first terms get a few bits below
 * their lowest, where the room suffices: later terms then seldom shift the block. */
static int block_base(const fan_window *w, const window_block *b, const window_need *need,
                      double bound)
{
    int base = need->lowest;
    bool fresh = b->bound == 0;
    if (base == INT_MAX || (!fresh && base >= b->base))
        return b->base;
    int spare = (62 - 16 - (window_top(bound) - base)) / 2;
    base -= spare < 0 ? 0 : spare > 8 ? 8 : spare;
    return base < -w->kind.unit ? -w->kind.unit : base;
}

static int block_form(const window_block *b, const window_need *need, int base, double bound)
{
    int bits = window_top(bound) - base, most = FAN_FAULT(WINDOW_NOT_WIDENED) ? 70 : 62;
    int form = bits <= most ? WORDS_64 : bits <= 126 ? WORDS_128 : LIMBS;
    form = form > need->form ? form : need->form;
    return form > b->form ? form : b->form;
}

/* block_tighten: computes bound and base anew, from the words; no number changes. */
static void block_tighten(window_block *b, int64_t *low, size_t n)
{
    window_view v = {b, low, n};
    unsigned __int128 any = 0, most = 0;
    if (b->empty || b->form == LIMBS)
        return;
    for (size_t i = 0; i < n; i++)
        if ((b->form == WORDS_64 ? low[i] : high_of(b)[i]) > FAN_ACC_NAN)
            cell_size(&v, i, &any, &most);
    int zeros = zeros_of(any);
    for (size_t i = 0; i < n && zeros; i++)
        if ((b->form == WORDS_64 ? low[i] : high_of(b)[i]) > FAN_ACC_NAN)
            cell_set(b, low, i, cell_value(&v, i) >> zeros, 0);
    b->base += zeros;
    b->bound = ldexp((double)(most >> zeros) * (1 + 0x1p-50), b->base);
}

/* block_widen: gives the block another form; no number changes. false: out of memory. */
static bool block_widen(fan_window *w, window_block *b, int64_t *low, size_t n, int form)
{
    size_t limbs = (size_t)w->kind.limbs;
    void *more = fan_alloc(block_more_bytes(w, form));
    if (!more)
        return false;
    window_view v = {b, low, n};
    for (size_t i = 0; i < n && !b->empty; i++) {
        if (form == LIMBS) {
            uint64_t *to = (uint64_t *)more + i * limbs;
            fan__superacc_start(to, &w->kind);
            limbs_merge(to, &w->kind, &v, &w->kind, i);
        } else {
            bool number = low[i] > FAN_ACC_NAN;
            ((int64_t *)more)[i] = number ? low[i] >> 63 : low[i];
            low[i] = number ? low[i] : 0;
        }
    }
    fan_free(b->more);
    b->more = more;
    b->form = (uint8_t)form;
    if (form == LIMBS)
        b->base = -w->kind.unit;
    return true;
}

/* block_reserve: makes room for what comes; no number changes. FAN_ERR_NOMEM. */
static bool block_reserve(fan_window *w, int64_t at, const window_need *need)
{
    window_block *b = w->block + at;
    int64_t *low = w->word + at * B;
    size_t n = window_view_of(w, at).n;
    double bound = bound_plus(b->bound, need->most);
    int base = block_base(w, b, need, bound), form = block_form(b, need, base, bound);
    if (form > b->form && !block_widen(w, b, low, n, form))
        return false;
    if (b->form != LIMBS) {
        int by = b->bound == 0 ? 0 : b->base - base; /* zeros need no shift */
        for (size_t i = 0; i < n && by > 0 && !b->empty; i++) {
            window_view v = {b, low, n};
            if (cell_top(&v, &w->kind, i) > FAN_ACC_NAN)
                cell_set(b, low, i, (__int128)((unsigned __int128)cell_value(&v, i) << by), 0);
        }
        b->base = base;
    }
    b->bound = bound;
    b->special |= need->special;
    return true;
}

/* block_fits: whether the block keeps its form. */
static bool block_fits(const fan_window *w, int64_t at, const window_need *need)
{
    const window_block *b = w->block + at;
    double bound = bound_plus(b->bound, need->most);
    return block_form(b, need, block_base(w, b, need, bound), bound) == b->form;
}

/* block_begin: writes the empty sum into the words of an empty block. */
static void block_begin(fan_window *w, int64_t at)
{
    window_block *b = w->block + at;
    int64_t *low = w->word + at * B;
    for (size_t i = 0; i < B && b->empty; i++) {
        if (b->form == LIMBS)
            fan__superacc_start((uint64_t *)b->more + i * (size_t)w->kind.limbs, &w->kind);
        else
            cell_set(b, low, i, 0, FAN_ACC_NOTHING);
    }
    b->empty = false;
}

/* ---- terms ---- */

/* number_parts: x = +-m * 2^exponent. */
static uint64_t number_parts(double x, int *exponent)
{
    uint64_t u = bits_of(x), m = u & (UINT64_MAX >> 12);
    int e = (int)(u >> 52 & 0x7ff);
    *exponent = (e ? e : 1) - 1075;
    return e ? m | UINT64_C(1) << 52 : m;
}

/* need_number: adds a number to a need. */
static void need_number(window_need *need, double *most, double x)
{
    int e;
    if (x - x != 0) {
        need->special = true;
        return;
    }
    uint64_t m = number_parts(x, &e);
    if (m == 0)
        return;
    int lowest = e + __builtin_ctzll(m);
    need->lowest = lowest < need->lowest ? lowest : need->lowest;
    *most = fabs(x) > *most ? fabs(x) : *most;
}

/* number_add: adds x to number i of a block with room for it. */
static void number_add(fan_window *w, window_block *b, int64_t *low, size_t i, double x)
{
    window_view v = {b, low, B};
    int e;
    if (b->form == LIMBS) {
        fan__superacc_add((uint64_t *)b->more + i * (size_t)w->kind.limbs, &w->kind, x);
        return;
    }
    int64_t top = cell_top(&v, &w->kind, i);
    if (x - x != 0) {
        cell_set(b, low, i, 0,
                 cell_special(top, x != x  ? FAN_ACC_NAN
                                   : x > 0 ? FAN_ACC_PLUS_INF
                                           : FAN_ACC_MINUS_INF));
        return;
    }
    if (top <= FAN_ACC_NAN && (top != FAN_ACC_NOTHING || (x == 0 && signbit(x))))
        return;
    uint64_t m = number_parts(x, &e);
    int by = e - b->base;
    __int128 t = m == 0 ? 0 : by >= 0 ? (__int128)m << by : (__int128)(m >> -by);
    cell_set(b, low, i, (top == FAN_ACC_NOTHING ? 0 : cell_value(&v, i)) + (signbit(x) ? -t : t),
             0);
}

/* wide_add: adds finite terms to a block of words of 128 bits without inf and NaN. */
static void wide_add(window_block *b, int64_t *low, const char *p, size_t n, bool is_double)
{
    int64_t *high = b->more;
    for (size_t i = 0; i < n; i++) {
        double x = is_double ? ((const fan_any_f64 *)(const void *)p)[i]
                             : (double)((const fan_any_f32 *)(const void *)p)[i];
        int e;
        uint64_t m = number_parts(x, &e), sign = bits_of(x) >> 63;
        if (m == 0 && (sign || high[i] != FAN_ACC_NOTHING))
            continue;
        int by = m ? e - b->base : 0;
        unsigned __int128 t = by >= 0 ? (unsigned __int128)m << by : m >> -by;
        unsigned __int128 v = high[i] == FAN_ACC_NOTHING
                                  ? 0
                                  : (unsigned __int128)(uint64_t)high[i] << 64 | (uint64_t)low[i];
        v += (t ^ -(unsigned __int128)sign) + sign;
        low[i] = (int64_t)v;
        high[i] = (int64_t)(v >> 64);
    }
}

/* row_need: adds a row of terms to a need by its exponents: `lowest` may be lower than it need be.
 * false: there are inf or NaN. */
static bool row_need(const exact_job *j, const window_loops *loops, const char *p, size_t n,
                     window_need *need)
{
    row_facts f;
    int e;
    double most, least;
    if (fan__exact_is_wide(j->d)) {
        loops->facts_double(p, n, &f);
        if (f.high >> 52 == 0x7ff)
            return false;
        most = of_bits(f.high);
        least = of_bits(f.low + 1);
    } else {
        loops->facts_single(p, n, &f);
        if (f.high >> 23 == 0xff)
            return false;
        most = (double)fan_float_of_bits((uint32_t)f.high);
        least = (double)fan_float_of_bits((uint32_t)f.low + 1);
    }
    if (f.high == 0)
        return true;
    number_parts(least, &e);
    int leading = ilogb(least), lowest = leading - (j->k.digits - 1);
    lowest = lowest < -j->k.unit ? -j->k.unit : lowest;
    need->lowest = lowest < need->lowest ? lowest : need->lowest;
    need->most = bound_plus(need->most, most);
    return true;
}

/* terms_need: what the terms of one block need; by their exponents if that suffices for the block
 * to keep its form, else by their lowest set bits. */
static window_need terms_need(fan_window *w, int64_t at, const exact_job *j,
                              const window_loops *loops, char *room)
{
    window_view v = window_view_of(w, at);
    int64_t first = at * B / (int64_t)j->parts, len = (int64_t)(v.n / j->parts);
    window_need need = {.lowest = INT_MAX};
    bool finite = true;
    for (size_t k = 0; k < j->n && finite; k++)
        finite = row_need(j, loops, fan__exact_term(j, k, first, len, room), v.n, &need);
    if (finite && block_fits(w, at, &need))
        return need;
    need = (window_need){.lowest = INT_MAX};
    for (size_t k = 0; k < j->n; k++) {
        const char *p = fan__exact_term(j, k, first, len, room);
        double most = 0;
        for (size_t i = 0; i < v.n; i++)
            need_number(&need, &most, fan__exact_number(j, p, i));
        need.most = bound_plus(need.most, most);
    }
    if (!block_fits(w, at, &need))
        block_tighten(w->block + at, w->word + at * B, v.n);
    return need;
}

static fan_status window_no_memory(fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an exact sum");
}

fan_status fan_window_add(fan_window *w, const fan_array *const *in, size_t n, fan_error *err)
{
    FAN_UNINITIALIZED exact_job j;
    FAN_UNINITIALIZED _Alignas(64) char room[B * sizeof(double)];
    const window_loops *loops = window_loops_now();
    FAN_DEFAULT_FLOAT_MODE;
    if (n == 0 || w->size == 0)
        return FAN_OK;
    fan__exact_job_begin(&j, in, sizeof *in, n, w->dtype);
    fan_nditer_begin(&j.iter, in[0], true);
    for (size_t k = 1; k < n; k++)
        fan_nditer_also(&j.iter, in[k]);
    fan_nditer_ready(&j.iter);
    for (int64_t b = 0; b < w->blocks; b++) {
        window_need need = terms_need(w, b, &j, loops, room);
        if (!block_reserve(w, b, &need))
            return window_no_memory(err);
    }
    for (int64_t b = 0; b < w->blocks; b++) {
        window_block *block = w->block + b;
        window_view v = window_view_of(w, b);
        int64_t *low = w->word + b * B, first = b * B / (int64_t)j.parts,
                len = (int64_t)(v.n / j.parts);
        bool fast =
            block->form == WORDS_64 && !block->special && block->base > -1000 && block->base < 1000;
        bool small = window_top(block->bound) - block->base <= 50;
        double by = fast ? ldexp(1, -block->base) : 0;
        if (!fast)
            block_begin(w, b);
        for (size_t k = 0; k < j.n; k++) {
            const char *p = fan__exact_term(&j, k, first, len, room);
            if (fast)
                (fan__exact_is_wide(j.d) ? small ? loops->double_small : loops->double_large
                 : small                 ? loops->single_small
                                         : loops->single_large)(low, p, v.n, by, block->empty);
            else if (block->form == WORDS_128 && !block->special)
                wide_add(block, low, p, v.n, fan__exact_is_wide(j.d));
            for (size_t i = 0; i < v.n && !fast && (block->form != WORDS_128 || block->special);
                 i++)
                number_add(w, block, low, i, fan__exact_number(&j, p, i));
            block->empty = false;
        }
    }
    return FAN_OK;
}

fan_status fan_window_add_at(fan_window *w, const fan_array *values, const int64_t *at,
                             fan_error *err)
{
    FAN_UNINITIALIZED exact_job j;
    FAN_UNINITIALIZED _Alignas(64) char room[B * sizeof(double)];
    FAN_DEFAULT_FLOAT_MODE;
    if (values->size == 0)
        return FAN_OK;
    fan__exact_job_begin(&j, &values, sizeof values, 1, w->dtype);
    fan_nditer_begin(&j.iter, values, true);
    fan_nditer_ready(&j.iter);
    int64_t parts = (int64_t)j.parts, most = B / parts;
    for (int add = 0; add < 2; add++)
        for (int64_t from = 0, len; from < j.iter.size; from += len) {
            len = j.iter.size - from < most ? j.iter.size - from : most;
            const char *p = fan__exact_term(&j, 0, from, len, room);
            for (int64_t i = 0; i < len * parts; i++) {
                int64_t number = at[from + i / parts] * parts + i % parts;
                double x = fan__exact_number(&j, p, (size_t)i);
                if (add) {
                    block_begin(w, number / B);
                    number_add(w, w->block + number / B, w->word + number / B * B,
                               (size_t)(number % B), x);
                    continue;
                }
                window_need need = {.lowest = INT_MAX};
                need_number(&need, &need.most, x);
                if (!block_reserve(w, number / B, &need))
                    return window_no_memory(err);
            }
        }
    return FAN_OK;
}

fan_window *fan_window_copy(const fan_window *from, fan_dtype d)
{
    fan_window *w = fan_window_new(d, from->size);
    size_t spread = fan__exact_parts(d) / fan__exact_parts(from->dtype), limbs;
    if (!w)
        return NULL;
    limbs = (size_t)w->kind.limbs;
    for (int64_t at = 0; at < w->blocks; at++) {
        window_view v = window_view_of(from, at / (int64_t)spread);
        window_block *b = w->block + at;
        const window_block *old = v.block;
        size_t offset = (size_t)(at % (int64_t)spread) * (B / spread), n = window_view_of(w, at).n;
        if (old->empty)
            continue;
        *b = (window_block){
            .bound = old->bound, .base = old->base, .empty = true, .special = old->special};
        if (old->form != WORDS_64 && !block_widen(w, b, w->word + at * B, n, old->form)) {
            fan_window_free(w);
            return NULL;
        }
        block_begin(w, at);
        for (size_t i = 0; i < n; i++) {
            size_t k = offset + i / spread;
            int64_t top = cell_top(&v, &from->kind, k);
            if (i % spread) { /* the imaginary part of a real number is +0.0, as in a conversion */
                if (b->form == LIMBS)
                    ((uint64_t *)b->more)[(i + 1) * limbs - 1] = 0;
                else
                    cell_set(b, w->word + at * B, i, 0, 0);
            } else if (b->form == LIMBS) {
                limbs_merge((uint64_t *)b->more + i * limbs, &w->kind, &v, &from->kind, k);
            } else {
                cell_set(b, w->word + at * B, i, top <= FAN_ACC_NAN ? 0 : cell_value(&v, k),
                         top <= FAN_ACC_NAN ? top : 0);
            }
        }
    }
    return w;
}

/* ---- rounding ---- */

/* cell_round: returns number i, times *factor if not NULL, as a float64 rounded to nearest, or to
 * odd. */
static double cell_round(const window_view *v, const fan_exact_kind *k, size_t i,
                         const double *factor, bool odd)
{
    fan_exact_kind own = {.limbs = v->block->form == WORDS_64 ? 1 : 2, .unit = -v->block->base};
    int64_t top = cell_top(v, k, i);
    uint64_t word[2] = {(uint64_t)v->low[i], (uint64_t)top};
    if (v->block->form == LIMBS)
        return fan__superacc_value((const uint64_t *)v->block->more + i * (size_t)k->limbs, k,
                                   factor, odd);
    return fan__superacc_value(word, &own, factor, odd);
}

/* product_odd: returns a * b rounded to odd, for products far from the ends of the exponents. */
static double product_odd(double a, double b)
{
    double p = a * b, rest = fma(a, b, -p);
    uint64_t u = bits_of(p);
    if (rest == 0 || u & 1)
        return p;
    return of_bits((rest > 0) == (p > 0) ? u + 1 : u - 1);
}

/* block_round: writes the numbers of a block as float64, which a conversion to the result's dtype
 * then rounds: to nearest if that is float64, else exactly or to odd. */
static void block_round(const window_view *v, const fan_exact_kind *k, const judge *j,
                        const window_loops *loops, double *value)
{
    const window_block *b = v->block;
    const double *factor = j->scaled ? &j->by : NULL;
    int top = window_top(b->bound), bits = top - b->base;
    double size = factor ? fabs(j->by) : 1;
    bool odd = j->grid != TO_DOUBLE, shifts = !factor || j->shifts;
    bool tame = !b->empty && !b->special && b->form != LIMBS && b->base > -900 && top < 900 &&
                size > 0x1p-50 && size < 0x1p50;
    double unit = tame ? ldexp(1, b->base) : 0;
    if (tame && b->form == WORDS_64 && bits <= 50 && (shifts || !odd)) {
        loops->round(value, v->low, v->n, unit);
        for (size_t i = 0; i < v->n && factor; i++)
            value[i] *= *factor;
        return;
    }
    for (size_t i = 0; i < v->n; i++) {
        if (b->empty)
            value[i] = (factor ? *factor : 1.0) * -0.0;
        else if (!tame || cell_top(v, k, i) == FAN_ACC_NOTHING)
            value[i] = cell_round(v, k, i, factor, odd);
        else if (bits <= 53 && odd && !shifts)
            value[i] = product_odd((double)v->low[i] * unit, *factor);
        else if (bits <= 53 || (!odd && shifts)) /* the conversion rounds to nearest, or is exact */
            value[i] = (b->form == WORDS_64 ? (double)v->low[i] : (double)cell_value(v, i)) * unit *
                       (factor ? *factor : 1);
        else
            value[i] = cell_round(v, k, i, factor, odd);
    }
}

void fan_window_round(const fan_array *out, const fan_window *w, const fan_scale *scale)
{
    FAN_UNINITIALIZED fan_nditer iter;
    FAN_UNINITIALIZED double value[B];
    size_t parts = fan__exact_parts(w->dtype);
    judge j = {.by = 1.0, .shifts = true};
    const window_loops *loops = window_loops_now();
    FAN_DEFAULT_FLOAT_MODE;
    if (out->size == 0)
        return;
    fan__exact_set_grid(&j, out->dtype);
    bool turns = fan__exact_scale_begin(&j, scale, parts == 2);
    fan_nditer_begin(&iter, out, true);
    fan_nditer_ready(&iter);
    for (int64_t b = 0; b < w->blocks; b++) {
        window_view v = window_view_of(w, b);
        int64_t len = (int64_t)(v.n / parts);
        block_round(&v, &w->kind, &j, loops, value);
        if (turns)
            fan__exact_turn(value, len, scale);
        fan_nditer_write(&iter, out, b * B / (int64_t)parts, len,
                         parts == 2 ? FAN_DT_COMPLEX128 : FAN_DT_FLOAT64, (const char *)value);
    }
}

/* ---- merges ---- */

static bool view_reserve(fan_window *w, int64_t at, const window_view *from)
{
    const window_block *b = from->block;
    window_need need = {.most = b->form == LIMBS ? 0 : b->bound,
                        .lowest = b->bound == 0 || b->form == LIMBS ? INT_MAX : b->base,
                        .special = b->special,
                        .form = b->form};
    if (from->block->empty)
        return true;
    if (!block_fits(w, at, &need))
        block_tighten(w->block + at, w->word + at * B, from->n);
    return block_reserve(w, at, &need);
}

/* cell_merge: adds number k of `from` to number i of block `at`, which has room for it. */
static void cell_merge(fan_window *w, int64_t at, size_t i, const window_view *from, size_t k)
{
    window_block *b = w->block + at;
    int64_t *low = w->word + at * B;
    window_view mine = {b, low, B};
    int64_t top = cell_top(&mine, &w->kind, i);
    int64_t other = cell_top(from, &w->kind, k);
    if (b->form == LIMBS) {
        limbs_merge((uint64_t *)b->more + i * (size_t)w->kind.limbs, &w->kind, from, &w->kind, k);
        return;
    }
    if (other == FAN_ACC_NOTHING)
        return;
    if (other <= FAN_ACC_NAN) {
        cell_set(b, low, i, 0, cell_special(top, other));
        return;
    }
    if (top <= FAN_ACC_NAN && top != FAN_ACC_NOTHING)
        return;
    int by = from->block->bound == 0 ? 0 : from->block->base - b->base; /* zeros need no shift */
    __int128 old = top == FAN_ACC_NOTHING ? 0 : cell_value(&mine, i);
    cell_set(b, low, i, old + (__int128)((unsigned __int128)cell_value(from, k) << by), 0);
}

static void view_add(fan_window *w, int64_t at, const window_view *from, const window_loops *loops)
{
    window_block *b = w->block + at;
    if (from->block->empty)
        return;
    block_begin(w, at);
    if (b->form == WORDS_64 && !b->special) {
        /* zeros need no shift */
        int by = from->block->bound == 0 ? 0 : from->block->base - b->base;
        loops->merge(w->word + at * B, from->low, from->n, by);
        return;
    }
    for (size_t i = 0; i < from->n; i++)
        cell_merge(w, at, i, from, i);
}

/* ---- repeated along axes ---- */

/* The elements of an array in C order, and which of a smaller one each repeats. */
typedef struct spread_walk {
    int ndim;
    const int64_t *shape;
    int64_t index[FAN_MAX_NDIM];
    int64_t step[FAN_MAX_NDIM]; /* in the smaller one */
    int64_t at;                 /* in the smaller one */
} spread_walk;

static void spread_begin(spread_walk *walk, int ndim, const int64_t *shape, uint64_t axes)
{
    int64_t step = 1;
    walk->ndim = ndim;
    walk->shape = shape;
    walk->at = 0;
    for (int i = ndim - 1; i >= 0; i--) {
        bool repeats = axes >> i & 1;
        walk->index[i] = 0;
        walk->step[i] = repeats ? 0 : step;
        step *= repeats ? 1 : shape[i];
    }
}

static void spread_next(spread_walk *walk)
{
    for (int i = walk->ndim - 1; i >= 0; i--) {
        walk->at += walk->step[i];
        if (++walk->index[i] < walk->shape[i])
            return;
        walk->at -= walk->step[i] * walk->shape[i];
        walk->index[i] = 0;
    }
}

/* need_block: enters the numbers of another block into a need: as each replaces an empty one, the
 * largest counts. */
static void need_block(window_need *need, const window_block *b)
{
    bool sized = b->form != LIMBS && b->bound != 0 && !b->empty;
    need->form = b->form > need->form ? b->form : need->form;
    need->special |= b->special;
    if (!sized)
        return;
    need->most = b->bound > need->most ? b->bound : need->most;
    need->lowest = b->base < need->lowest ? b->base : need->lowest;
}

fan_window *fan_window_spread(const fan_window *from, int ndim, const int64_t *shape, uint64_t axes)
{
    FAN_UNINITIALIZED spread_walk walk;
    int64_t size = 1;
    for (int i = 0; i < ndim; i++)
        size *= shape[i];
    fan_window *w = fan_window_new(from->dtype, size);
    int64_t parts = (int64_t)fan__exact_parts(from->dtype);
    if (!w)
        return NULL;
    FAN_DEFAULT_FLOAT_MODE;
    for (int add = 0; add < 2; add++) {
        spread_begin(&walk, ndim, shape, axes);
        for (int64_t at = 0; at < w->blocks; at++) {
            int64_t elements = (int64_t)window_view_of(w, at).n / parts;
            window_need need = {.lowest = INT_MAX};
            if (add)
                block_begin(w, at);
            for (int64_t i = 0; i < elements; i++, spread_next(&walk)) {
                int64_t number = walk.at * parts;
                window_view v = window_view_of(from, number / B);
                if (!add)
                    need_block(&need, v.block);
                for (int64_t part = 0; add && part < parts; part++)
                    cell_merge(w, at, (size_t)(i * parts + part), &v, (size_t)(number % B + part));
            }
            if (!add && !block_reserve(w, at, &need)) {
                fan_window_free(w);
                return NULL;
            }
        }
    }
    return w;
}

#ifdef FAN_TEST
fan_status fan_window_merge(fan_window *w, const fan_window *from, fan_error *err)
{
    const window_loops *loops = window_loops_now();
    FAN_DEFAULT_FLOAT_MODE;
    for (int64_t b = 0; b < w->blocks; b++) {
        window_view v = window_view_of(from, b);
        if (!view_reserve(w, b, &v))
            return window_no_memory(err);
    }
    for (int64_t b = 0; b < w->blocks; b++) {
        window_view v = window_view_of(from, b);
        view_add(w, b, &v, loops);
    }
    return FAN_OK;
}
#endif

/* ---- messages ---- */

/* A block of a message: this header, then its numbers, each less the lowest number of so many
 * bytes; the values below 4 represent what is no number. Their lowest 8, 4, 2 or 1 bytes
 * (plane_bytes) come first, side by side, then the next ones: a loop over numbers then reads and
 * writes whole vectors. */
typedef struct window_header {
    int32_t base;
    /* bytes per number; 0: each is 0, or only -0.0; MESSAGE_LIMBS: superaccumulators */
    uint8_t width;
    uint8_t flags;
    uint16_t zero;
} window_header;

enum {
    MESSAGE_EMPTY = 1,
    MESSAGE_SPECIAL = 2
};
#define MESSAGE_LIMBS 255

static size_t header_bytes(const window_header *h, size_t n, const fan_exact_kind *k)
{
    return n * (h->width == MESSAGE_LIMBS ? (size_t)k->limbs * sizeof(uint64_t) : h->width);
}

size_t fan_window_room(const fan_window *w)
{
    size_t bytes = 0;
    for (int64_t b = 0; b < w->blocks; b++) {
        int form = w->block[b].form;
        size_t width = form == WORDS_64    ? 8
                       : form == WORDS_128 ? 16
                                           : (size_t)w->kind.limbs * sizeof(uint64_t);
        bytes += sizeof(window_header) + window_view_of(w, b).n * width;
    }
    return bytes;
}

/* header_of: returns the header of a block, and how many zero bits all its numbers end with. */
static window_header header_of(const window_view *v, const window_loops *loops, int *zeros)
{
    const window_block *b = v->block;
    unsigned __int128 any = 0, large = 0;
    size_t numbers = 0;
    *zeros = 0;
    if (b->form == LIMBS && !b->empty)
        return (window_header){.width = MESSAGE_LIMBS, .flags = b->special ? MESSAGE_SPECIAL : 0};
    if (b->form == WORDS_64 && !b->special && !b->empty) {
        row_size size;
        loops->size(v->low, v->n, &size);
        any = size.any;
        large = size.large;
        numbers = size.numbers;
    } else {
        for (size_t i = 0; i < v->n && !b->empty; i++)
            if ((b->form == WORDS_64 ? v->low[i] : high_of(b)[i]) > FAN_ACC_NAN) {
                cell_size(v, i, &any, &large);
                numbers++;
            }
    }
    if (any == 0 && !b->special && (numbers == 0 || numbers == v->n))
        return (window_header){.flags = numbers ? 0 : MESSAGE_EMPTY};
    *zeros = zeros_of(any);
    large >>= *zeros;
    int bits = (uint64_t)(large >> 64) ? 128 - __builtin_clzll((uint64_t)(large >> 64))
               : large                 ? 64 - __builtin_clzll((uint64_t)large)
                                       : 0;
    /* two bits more: the sign, and room for the lowest values, which represent what is no number */
    return (window_header){b->base + *zeros, (uint8_t)((bits + 9) / 8),
                           b->special ? MESSAGE_SPECIAL : 0, 0};
}

static unsigned __int128 number_get(const char *p, size_t n, int width, size_t i)
{
    unsigned __int128 x = 0;
    for (int done = 0, bytes; done < width; done += bytes, p += n * (size_t)bytes) {
        bytes = plane_bytes(width - done);
        uint64_t part = 0;
        memcpy(&part, p + i * (size_t)bytes, (size_t)bytes);
        x |= (unsigned __int128)part << 8 * done;
    }
    return x;
}

size_t fan_window_pack(const fan_window *w, void *to)
{
    const window_loops *loops = window_loops_now();
    char *p = to;
    for (int64_t at = 0; at < w->blocks; at++) {
        window_view v = window_view_of(w, at);
        int zeros;
        window_header h = header_of(&v, loops, &zeros);
        memcpy(p, &h, sizeof h);
        p += sizeof h;
        if (h.width == MESSAGE_LIMBS)
            memcpy(p, v.block->more, header_bytes(&h, v.n, &w->kind));
        else if (h.width && v.block->form == WORDS_64 && !v.block->special)
            loops->pack(p, v.low, v.n, zeros, h.width);
        else
            for (size_t i = 0; i < v.n && h.width; i++) {
                int64_t top = cell_top(&v, &w->kind, i);
                unsigned __int128 lift = (unsigned __int128)1 << (8 * h.width - 1);
                unsigned __int128 x = top > FAN_ACC_NAN
                                          ? (unsigned __int128)(cell_value(&v, i) >> zeros) + lift
                                          : (unsigned __int128)(top - FAN_ACC_NOTHING);
                char *plane = p;
                for (int done = 0, bytes; done < h.width;
                     done += bytes, plane += v.n * (size_t)bytes) {
                    bytes = plane_bytes(h.width - done);
                    uint64_t part = (uint64_t)(x >> 8 * done);
                    memcpy(plane + i * (size_t)bytes, &part, (size_t)bytes);
                }
            }
        p += header_bytes(&h, v.n, &w->kind);
    }
    return (size_t)(p - (char *)to);
}

/* unpack: reads a block of a message into a block and its words; superaccumulators stay where they
 * are. */
static void unpack(const window_header *h, const char *p, size_t n, window_block *b, int64_t *low,
                   int64_t *high, const window_loops *loops)
{
    *b = (window_block){
        .base = h->base,
        .form = h->width == MESSAGE_LIMBS ? LIMBS
                : h->width > 8            ? WORDS_128
                                          : WORDS_64,
        .empty = h->flags & MESSAGE_EMPTY,
        .special = h->flags & MESSAGE_SPECIAL,
        .bound = h->width && h->width != MESSAGE_LIMBS ? ldexp(1, h->base + 8 * h->width - 1) : 0,
        .more = high};
    if (b->form == LIMBS || b->empty)
        return;
    if (h->width == 0) {
        memset(low, 0, n * sizeof *low);
    } else if (h->width <= 8) {
        loops->unpack(p, low, n, h->width);
    } else {
        for (size_t i = 0; i < n; i++) {
            unsigned __int128 x = number_get(p, n, h->width, i),
                              lift = (unsigned __int128)1 << (8 * h->width - 1);
            cell_set(b, low, i, (__int128)(x - lift), x < 4 ? (int64_t)x + FAN_ACC_NOTHING : 0);
        }
    }
}

static bool header_valid(const window_header *h, const fan_exact_kind *k)
{
    if (h->flags > (MESSAGE_EMPTY | MESSAGE_SPECIAL) || h->zero ||
        (h->width && h->flags & MESSAGE_EMPTY))
        return false;
    return h->width == MESSAGE_LIMBS || (h->width <= 16 && h->base >= -k->unit && h->base < 1024) ||
           h->width == 0;
}

fan_status fan_window_merge_packed(fan_window *w, const void *from, size_t bytes, size_t *used,
                                   fan_error *err)
{
    FAN_UNINITIALIZED int64_t low[B];
    FAN_UNINITIALIZED int64_t high[B];
    const window_loops *loops = window_loops_now();
    FAN_DEFAULT_FLOAT_MODE;
    if ((uintptr_t)from % _Alignof(int64_t))
        return fan_fail(err, FAN_ERR_VALUE, "a message of window sums is aligned to 8 bytes");
    for (int add = 0; add < 2; add++) {
        const char *p = from, *end = p + bytes;
        for (int64_t at = 0; at < w->blocks; at++) {
            window_header h = {.flags = 255};
            window_block b;
            window_view v = {&b, low, window_view_of(w, at).n};
            if ((size_t)(end - p) >= sizeof h)
                memcpy(&h, p, sizeof h);
            p += sizeof h;
            if (!header_valid(&h, &w->kind) || header_bytes(&h, v.n, &w->kind) > (size_t)(end - p))
                return fan_fail(err, FAN_ERR_VALUE,
                                "not a message of window sums: block %lld of %lld is malformed",
                                (long long)at, (long long)w->blocks);
            unpack(&h, p, add || h.width == MESSAGE_LIMBS ? v.n : 0, &b, low, high, loops);
            if (b.form == LIMBS)
                /* whole blocks and headers are multiples of 8 bytes */
                b.more = (void *)(uintptr_t)p;
            p += header_bytes(&h, v.n, &w->kind);
            if (add)
                view_add(w, at, &v, loops);
            else if (!view_reserve(w, at, &v))
                return window_no_memory(err);
        }
        *used = (size_t)(p - (const char *)from);
    }
    return FAN_OK;
}
