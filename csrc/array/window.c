/* window: see window.h. In this order: windows; one number of a block; loops for each vector unit;
 * room for what comes; terms; rounding; merges; arrays repeated along axes; messages.
 *
 * Fast loops add terms to blocks of 64-bit words; everything else (128-bit words,
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
#include <stdlib.h>
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

typedef unsigned __int128 bits128;

struct fan_window {
    fan_dtype dtype;
    int64_t size;
    int64_t numbers;
    int64_t blocks;
    fan_exact_kind kind;
    int64_t *word; /* whole blocks */
    window_block *block;
};

/* A block of a window, or of a message, with its words. */
typedef struct window_view {
    window_block *block;
    int64_t *low;
    size_t n; /* numbers */
    const fan_exact_kind *kind;
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
    fan_window *window = fan_calloc(sizeof *window);
    if (!window)
        return NULL;
    window->dtype = d;
    window->size = size;
    window->numbers = size * (int64_t)fan__exact_parts(d);
    window->blocks = (window->numbers + B - 1) / B;
    window->kind = fan__exact_kind_of(d);
    window->word = fan_alloc_data((size_t)window->blocks * B * sizeof *window->word);
    window->block = fan_calloc((size_t)window->blocks * sizeof *window->block);
    if (!window->word || !window->block) {
        fan_window_free(window);
        return NULL;
    }
    for (int64_t b = 0; b < window->blocks; b++)
        window->block[b].empty = true;
    return window;
}

void fan_window_free(fan_window *window)
{
    if (!window)
        return;
    for (int64_t b = 0; window->block && b < window->blocks; b++)
        fan_free(window->block[b].more);
    fan_free_data(window->word, (size_t)window->blocks * B * sizeof *window->word);
    fan_free(window->block);
    fan_free(window);
}

/* number_more_bytes: returns the bytes of `more` of a number in a block of this form. */
static size_t number_more_bytes(const fan_exact_kind *k, int form)
{
    if (form == WORDS_64)
        return 0;
    if (form == WORDS_128)
        return sizeof(int64_t);
    return (size_t)k->limbs * sizeof(uint64_t);
}

fan_dtype fan_window_dtype(const fan_window *window)
{
    return window->dtype;
}
int64_t fan_window_size(const fan_window *window)
{
    return window->size;
}

#ifdef FAN_TEST
size_t fan_window_bytes(const fan_window *window)
{
    size_t bytes = sizeof *window +
                   (size_t)window->blocks * (B * sizeof *window->word + sizeof *window->block);
    for (int64_t b = 0; b < window->blocks; b++)
        bytes += B * number_more_bytes(&window->kind, window->block[b].form);
    return bytes;
}

void fan_window_forms(const fan_window *window, int64_t count[4])
{
    memset(count, 0, 4 * sizeof *count);
    for (int64_t b = 0; b < window->blocks; b++)
        count[window->block[b].empty ? 0 : 1 + window->block[b].form]++;
}
#endif

static window_view window_view_of(const fan_window *window, int64_t b)
{
    int64_t rest = window->numbers - b * B;
    return (window_view){window->block + b, window->word + b * B, (size_t)fan_min(rest, B),
                         &window->kind};
}

/* ---- one number ---- */

static int64_t *high_of(const window_block *block)
{
    return block->more;
}

/* cell_limbs: returns the superaccumulator of number i of a block that has them. */
static uint64_t *cell_limbs(const window_view *v, size_t i)
{
    return (uint64_t *)v->block->more + i * (size_t)v->kind->limbs;
}

/* word_top: returns the top word of number i of a block of words that is not empty. */
static int64_t word_top(const window_view *v, size_t i)
{
    if (v->block->form == WORDS_64)
        return v->low[i];
    return high_of(v->block)[i];
}

/* cell_top: returns the top word of number i. */
static int64_t cell_top(const window_view *v, size_t i)
{
    if (v->block->empty)
        return FAN_ACC_NOTHING;
    if (v->block->form == LIMBS)
        return (int64_t)cell_limbs(v, i)[v->kind->limbs - 1];
    return word_top(v, i);
}

static __int128 cell_value(const window_view *v, size_t i)
{
    if (v->block->form == WORDS_64)
        return v->low[i];
    uint64_t high = (uint64_t)high_of(v->block)[i];
    return (__int128)((bits128)high << 64 | (uint64_t)v->low[i]);
}

/* cell_size: enters |number i| into the bits that any number has and the largest. */
static void cell_size(const window_view *v, size_t i, bits128 *any, bits128 *most)
{
    __int128 x = cell_value(v, i);
    bits128 a = (bits128)x;
    if (x < 0)
        a = -a;
    *any |= a;
    if (a > *most)
        *most = a;
}

/* zeros_of: returns the number of zero bits at the end; 0 for 0. */
static int zeros_of(bits128 any)
{
    uint64_t low = (uint64_t)any;
    if (any == 0)
        return 0;
    if (low == 0)
        return 64 + __builtin_ctzll((uint64_t)(any >> 64));
    return __builtin_ctzll(low);
}

/* cell_set: stores a number in a block of words. */
static void cell_set(const window_view *v, size_t i, __int128 x)
{
    v->low[i] = (int64_t)x;
    if (v->block->form == WORDS_128)
        high_of(v->block)[i] = (int64_t)(x >> 64);
}

/* cell_mark: stores a top word that represents no number. */
static void cell_mark(const window_view *v, size_t i, int64_t top)
{
    v->low[i] = top;
    if (v->block->form == WORDS_64)
        return;
    v->low[i] = 0;
    high_of(v->block)[i] = top;
}

/* limbs_add: adds an integer in two's complement, `words` long, times 2^at, to the superaccumulator
 * `to`, which is a number. */
static void limbs_add(uint64_t *to, const fan_exact_kind *k, const uint64_t *from, int words,
                      int at)
{
    uint64_t sign = (int64_t)from[words - 1] < 0 ? UINT64_MAX : 0;
    uint64_t below = 0;
    unsigned carry = 0;
    int first = at >> 6;
    int bit = at & 63;
    for (int i = first; i < k->limbs; i++) {
        uint64_t here = i - first < words ? from[i - first] : sign;
        uint64_t part = here << bit;
        if (bit)
            part |= below >> (64 - bit);
        uint64_t sum = to[i] + part;
        uint64_t all = sum + carry;
        carry = (sum < part) | (all < sum);
        to[i] = all;
        below = here;
    }
}

/* limbs_merge: adds number i of a view to the superaccumulator `to` of kind k. */
static void limbs_merge(uint64_t *to, const fan_exact_kind *k, const window_view *v, size_t i)
{
    int64_t *top = (int64_t *)&to[k->limbs - 1];
    int64_t other = cell_top(v, i);
    if (other == FAN_ACC_NOTHING)
        return;
    if (other <= FAN_ACC_NAN) {
        *top = fan__acc_special(*top, other);
        return;
    }
    if (*top == FAN_ACC_NOTHING)
        *top = 0;
    if (*top <= FAN_ACC_NAN)
        return;
    if (v->block->form == LIMBS) {
        limbs_add(to, k, cell_limbs(v, i), v->kind->limbs, k->unit - v->kind->unit);
        return;
    }
    __int128 x = cell_value(v, i);
    uint64_t word[2] = {(uint64_t)x, (uint64_t)(x >> 64)};
    limbs_add(to, k, word, 2, v->block->base + k->unit);
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
        const UINT *restrict u = (const UINT *)from;                                        \
        const T *restrict x = (const T *)from;                                              \
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
        const UINT *restrict u = (const UINT *)from;                                   \
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
    if (rest >= 8)
        return 8;
    if (rest >= 4)
        return 4;
    if (rest >= 2)
        return 2;
    return 1;
}

#define EACH_PLANE(X) X(1, fan_any_u8) X(2, fan_any_u16) X(4, fan_any_u32) X(8, fan_any_u64)

#define PACK_PLANE(BYTES, UINT)                                   \
    if (bytes == BYTES) {                                         \
        UINT *restrict to = (UINT *)p;                            \
        for (size_t i = 0; i < n; i++) {                          \
            uint64_t none = -(uint64_t)(w[i] == FAN_ACC_NOTHING), \
                     u = (uint64_t)(w[i] >> zeros) + lift;        \
            to[i] = (UINT)((u & ~none) >> shift);                 \
        }                                                         \
    }

#define UNPACK_PLANE(BYTES, UINT)                                                       \
    if (bytes == BYTES) {                                                               \
        const UINT *restrict from = (const UINT *)p;                                    \
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

typedef void (*row_facts_of)(const char *from, size_t n, row_facts *f);
typedef void (*row_add)(int64_t *w, const char *from, size_t n, double by, bool first);

typedef struct window_loops {
    row_facts_of facts_single;
    row_facts_of facts_double;
    row_add single_small;
    row_add single_large;
    row_add double_small;
    row_add double_large;
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
    if (x == 0)
        return INT_MIN / 2;
    if (isinf(x))
        return 2000;
    return ilogb(x) + 1;
}

/* bound_plus: returns an upper bound of a + b. */
static double bound_plus(double a, double b)
{
    return (a + b) * (1 + 0x1p-50);
}

/* block_base: returns the base that the block would have. The first terms get a few bits below
 * their lowest, where the room suffices: later terms then seldom shift the block. */
static int block_base(const window_view *v, const window_need *need, double bound)
{
    const window_block *block = v->block;
    int base = need->lowest;
    bool fresh = block->bound == 0;
    if (base == INT_MAX || (!fresh && base >= block->base))
        return block->base;
    int spare = (62 - 16 - (window_top(bound) - base)) / 2;
    base -= (int)fan_max(fan_min(spare, 8), 0);
    return (int)fan_max(base, -v->kind->unit);
}

static int block_form(const window_block *block, const window_need *need, int base, double bound)
{
    int bits = window_top(bound) - base;
    int most = 62;
    if (FAN_FAULT(WINDOW_NOT_WIDENED))
        most = 70;
    int form = LIMBS;
    if (bits <= most)
        form = WORDS_64;
    else if (bits <= 126)
        form = WORDS_128;
    if (form < need->form)
        form = need->form;
    if (form > block->form)
        return form;
    return block->form;
}

/* block_tighten: computes bound and base anew, from the words; no number changes. */
static void block_tighten(const window_view *v)
{
    window_block *block = v->block;
    bits128 any = 0;
    bits128 most = 0;
    if (block->empty || block->form == LIMBS)
        return;
    for (size_t i = 0; i < v->n; i++) {
        if (word_top(v, i) > FAN_ACC_NAN)
            cell_size(v, i, &any, &most);
    }
    int zeros = zeros_of(any);
    for (size_t i = 0; i < v->n && zeros; i++) {
        if (word_top(v, i) > FAN_ACC_NAN)
            cell_set(v, i, cell_value(v, i) >> zeros);
    }
    block->base += zeros;
    block->bound = ldexp((double)(most >> zeros) * (1 + 0x1p-50), block->base);
}

/* block_widen: gives the block another form; no number changes. false: out of memory. */
static bool block_widen(const window_view *v, int form)
{
    const fan_exact_kind *kind = v->kind;
    window_block *block = v->block;
    int64_t *low = v->low;
    void *more = fan_alloc(B * number_more_bytes(kind, form));
    if (!more)
        return false;
    for (size_t i = 0; i < v->n && !block->empty; i++) {
        if (form == LIMBS) {
            uint64_t *to = (uint64_t *)more + i * (size_t)kind->limbs;
            fan__superacc_start(to, kind);
            limbs_merge(to, kind, v, i);
            continue;
        }
        int64_t *high = more;
        high[i] = low[i];
        if (low[i] > FAN_ACC_NAN)
            high[i] = low[i] >> 63;
        else
            low[i] = 0;
    }
    fan_free(block->more);
    block->more = more;
    block->form = (uint8_t)form;
    if (form == LIMBS)
        block->base = -kind->unit;
    return true;
}

/* block_reserve: makes room for what comes; no number changes. false: out of memory. */
static bool block_reserve(const window_view *v, const window_need *need)
{
    window_block *block = v->block;
    double bound = bound_plus(block->bound, need->most);
    int base = block_base(v, need, bound);
    int form = block_form(block, need, base, bound);
    if (form > block->form && !block_widen(v, form))
        return false;
    if (block->form != LIMBS) {
        int by = 0; /* zeros need no shift */
        if (block->bound != 0)
            by = block->base - base;
        for (size_t i = 0; i < v->n && by > 0; i++) {
            if (cell_top(v, i) > FAN_ACC_NAN)
                cell_set(v, i, (__int128)((bits128)cell_value(v, i) << by));
        }
        block->base = base;
    }
    block->bound = bound;
    block->special |= need->special;
    return true;
}

/* block_fits: whether the block keeps its form. */
static bool block_fits(const window_view *v, const window_need *need)
{
    double bound = bound_plus(v->block->bound, need->most);
    return block_form(v->block, need, block_base(v, need, bound), bound) == v->block->form;
}

/* block_begin: writes the empty sum into the words of an empty block. */
static void block_begin(const window_view *v)
{
    window_block *block = v->block;
    for (size_t i = 0; i < B && block->empty; i++) {
        if (block->form == LIMBS)
            fan__superacc_start(cell_limbs(v, i), v->kind);
        else
            cell_mark(v, i, FAN_ACC_NOTHING);
    }
    block->empty = false;
}

/* ---- terms ---- */

/* shifted: returns m * 2^by, whose bits below 1 are zero. */
static bits128 shifted(uint64_t m, int by)
{
    if (m == 0)
        return 0;
    if (by < 0)
        return m >> -by;
    return (bits128)m << by;
}

/* need_number: adds a number to a need. */
static void need_number(window_need *need, double *most, double x)
{
    int e;
    if (x - x != 0) {
        need->special = true;
        return;
    }
    uint64_t m = fan__number_parts(x, &e);
    if (m == 0)
        return;
    int lowest = e + __builtin_ctzll(m);
    if (lowest < need->lowest)
        need->lowest = lowest;
    if (fabs(x) > *most)
        *most = fabs(x);
}

/* number_add: adds x to number i of a block with room for it. */
static void number_add(const window_view *v, size_t i, double x)
{
    int e;
    if (v->block->form == LIMBS) {
        fan__superacc_add(cell_limbs(v, i), v->kind, x);
        return;
    }
    int64_t top = cell_top(v, i);
    if (x - x != 0) {
        cell_mark(v, i, fan__acc_special(top, fan__acc_special_of(x)));
        return;
    }
    bool minus = signbit(x);
    bool nothing = top == FAN_ACC_NOTHING;
    if (top <= FAN_ACC_NAN && !nothing)
        return;
    if (nothing && x == 0 && minus)
        return;
    uint64_t m = fan__number_parts(x, &e);
    __int128 term = (__int128)shifted(m, e - v->block->base);
    if (minus)
        term = -term;
    if (!nothing)
        term += cell_value(v, i);
    cell_set(v, i, term);
}

/* wide_add: adds finite terms to a block of words of 128 bits without inf and NaN. */
static void wide_add(const window_view *v, const exact_job *j, const char *p)
{
    int64_t *low = v->low;
    int64_t *high = v->block->more;
    for (size_t i = 0; i < v->n; i++) {
        double x = fan__exact_number(j, p, i);
        bool nothing = high[i] == FAN_ACC_NOTHING;
        int e;
        uint64_t m = fan__number_parts(x, &e);
        uint64_t sign = bits_of(x) >> 63;
        if (m == 0 && (sign || !nothing))
            continue;
        bits128 term = shifted(m, e - v->block->base);
        bits128 sum = 0;
        if (!nothing)
            sum = (bits128)(uint64_t)high[i] << 64 | (uint64_t)low[i];
        sum += (term ^ -(bits128)sign) + sign;
        low[i] = (int64_t)sum;
        high[i] = (int64_t)(sum >> 64);
    }
}

/* row_need: adds a row of terms to a need by its exponents: `lowest` may be lower than it need be.
 * false: there are inf or NaN. */
static bool row_need(const exact_job *j, const window_loops *loops, const char *p, size_t n,
                     window_need *need)
{
    row_facts f;
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
    int lowest = ilogb(least) - (j->k.digits - 1);
    if (lowest < -j->k.unit)
        lowest = -j->k.unit;
    if (lowest < need->lowest)
        need->lowest = lowest;
    need->most = bound_plus(need->most, most);
    return true;
}

/* terms_need: what the terms of one block, from element `first` on, need; by their exponents if
 * that suffices for the block to keep its form, else by their lowest set bits. */
static window_need terms_need(const window_view *v, int64_t first, const exact_job *j,
                              const window_loops *loops, char *room)
{
    int64_t len = (int64_t)(v->n / j->parts);
    window_need need = {.lowest = INT_MAX};
    bool finite = true;
    for (size_t k = 0; k < j->n && finite; k++)
        finite = row_need(j, loops, fan__exact_term(j, k, first, len, room), v->n, &need);
    if (finite && block_fits(v, &need))
        return need;
    need = (window_need){.lowest = INT_MAX};
    for (size_t k = 0; k < j->n; k++) {
        const char *p = fan__exact_term(j, k, first, len, room);
        double most = 0;
        for (size_t i = 0; i < v->n; i++)
            need_number(&need, &most, fan__exact_number(j, p, i));
        need.most = bound_plus(need.most, most);
    }
    if (!block_fits(v, &need))
        block_tighten(v);
    return need;
}

static fan_status window_no_memory(fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an exact sum");
}

/* row_add_of: returns the loop that adds a row to words of 64 bits; `small`: sums have at most 50
 * bits. */
static row_add row_add_of(const window_loops *loops, bool is_double, bool small)
{
    if (is_double && small)
        return loops->double_small;
    if (is_double)
        return loops->double_large;
    if (small)
        return loops->single_small;
    return loops->single_large;
}

/* terms_add: adds the terms of one block, from element `first` on, which has room for them. */
static void terms_add(const window_view *v, int64_t first, const exact_job *j,
                      const window_loops *loops, char *room)
{
    window_block *block = v->block;
    int64_t len = (int64_t)(v->n / j->parts);
    bool fast = block->form == WORDS_64 && !block->special && abs(block->base) < 1000;
    bool wide = block->form == WORDS_128 && !block->special;
    bool small = window_top(block->bound) - block->base <= 50;
    row_add add = row_add_of(loops, fan__exact_is_wide(j->d), small);
    double by = 0;
    if (fast)
        by = ldexp(1, -block->base);
    else
        block_begin(v);

    for (size_t k = 0; k < j->n; k++) {
        const char *p = fan__exact_term(j, k, first, len, room);
        if (fast) {
            add(v->low, p, v->n, by, block->empty);
        } else if (wide) {
            wide_add(v, j, p);
        } else {
            for (size_t i = 0; i < v->n; i++)
                number_add(v, i, fan__exact_number(j, p, i));
        }
        block->empty = false;
    }
}

fan_status fan_window_add(fan_window *window, const fan_array *const *in, size_t n, fan_error *err)
{
    FAN_UNINITIALIZED exact_job j;
    FAN_UNINITIALIZED _Alignas(64) char room[B * sizeof(double)];
    const window_loops *loops = window_loops_now();
    FAN_DEFAULT_FLOAT_MODE;
    if (n == 0 || window->size == 0)
        return FAN_OK;
    fan__exact_job_begin(&j, in, sizeof *in, n, window->dtype);
    fan_nditer_begin(&j.iter, in[0], true);
    for (size_t k = 1; k < n; k++)
        fan_nditer_also(&j.iter, in[k]);
    fan_nditer_ready(&j.iter);

    int64_t elements = B / (int64_t)j.parts; /* of a block */
    for (int64_t b = 0; b < window->blocks; b++) {
        window_view v = window_view_of(window, b);
        window_need need = terms_need(&v, b * elements, &j, loops, room);
        if (!block_reserve(&v, &need))
            return window_no_memory(err);
    }
    for (int64_t b = 0; b < window->blocks; b++) {
        window_view v = window_view_of(window, b);
        terms_add(&v, b * elements, &j, loops, room);
    }
    return FAN_OK;
}

fan_status fan_window_add_at(fan_window *window, const fan_array *values, const int64_t *at,
                             fan_error *err)
{
    FAN_UNINITIALIZED exact_job j;
    FAN_UNINITIALIZED _Alignas(64) char room[B * sizeof(double)];
    FAN_DEFAULT_FLOAT_MODE;
    if (values->size == 0)
        return FAN_OK;
    fan__exact_job_begin(&j, &values, sizeof values, 1, window->dtype);
    fan_nditer_one(&j.iter, values, true);
    int64_t parts = (int64_t)j.parts;
    int64_t most = B / parts;
    for (int add = 0; add < 2; add++) {
        for (int64_t from = 0; from < j.iter.size; from += most) {
            int64_t rest = j.iter.size - from;
            int64_t len = fan_min(rest, most);
            const char *p = fan__exact_term(&j, 0, from, len, room);
            for (int64_t i = 0; i < len * parts; i++) {
                int64_t number = at[from + i / parts] * parts + i % parts;
                double x = fan__exact_number(&j, p, (size_t)i);
                window_view v = window_view_of(window, number / B);
                if (add) {
                    block_begin(&v);
                    number_add(&v, (size_t)(number % B), x);
                    continue;
                }
                window_need need = {.lowest = INT_MAX};
                need_number(&need, &need.most, x);
                if (!block_reserve(&v, &need))
                    return window_no_memory(err);
            }
        }
    }
    return FAN_OK;
}

/* block_copy: writes the numbers of a view from `offset` on, each followed by `spread` - 1 zeros,
 * into a block of the same form. */
static void block_copy(const window_view *to, const window_view *from, size_t offset, size_t spread)
{
    for (size_t i = 0; i < to->n; i++) {
        size_t k = offset + i / spread;
        uint64_t *limbs = NULL;
        if (to->block->form == LIMBS)
            limbs = cell_limbs(to, i);
        int64_t top = cell_top(from, k);
        /* the imaginary part of a real number is +0.0, as in a conversion */
        bool imaginary = i % spread;
        if (imaginary && limbs)
            limbs[to->kind->limbs - 1] = 0;
        else if (imaginary)
            cell_set(to, i, 0);
        else if (limbs)
            limbs_merge(limbs, to->kind, from, k);
        else if (top <= FAN_ACC_NAN)
            cell_mark(to, i, top);
        else
            cell_set(to, i, cell_value(from, k));
    }
}

fan_window *fan_window_copy(const fan_window *from, fan_dtype d)
{
    fan_window *window = fan_window_new(d, from->size);
    int64_t spread = (int64_t)(fan__exact_parts(d) / fan__exact_parts(from->dtype));
    if (!window)
        return NULL;
    for (int64_t at = 0; at < window->blocks; at++) {
        window_view old = window_view_of(from, at / spread);
        window_view v = window_view_of(window, at);
        int form = old.block->form;
        if (old.block->empty)
            continue;
        v.block->bound = old.block->bound;
        v.block->base = old.block->base;
        v.block->special = old.block->special;
        if (form != WORDS_64 && !block_widen(&v, form)) {
            fan_window_free(window);
            return NULL;
        }
        block_begin(&v);
        block_copy(&v, &old, (size_t)(at % spread * (B / spread)), (size_t)spread);
    }
    return window;
}

/* ---- rounding ---- */

/* cell_round: returns number i, times *factor if not NULL, as a float64 rounded to nearest, or to
 * odd. */
static double cell_round(const window_view *v, size_t i, const double *factor, bool odd)
{
    const window_block *block = v->block;
    if (block->form == LIMBS)
        return fan__superacc_value(cell_limbs(v, i), v->kind, factor, odd);
    fan_exact_kind own = {.limbs = 1 + block->form, .unit = -block->base};
    uint64_t word[2] = {(uint64_t)v->low[i], (uint64_t)cell_top(v, i)};
    return fan__superacc_value(word, &own, factor, odd);
}

/* cell_double: returns the integer of number i, rounded to nearest. */
static double cell_double(const window_view *v, size_t i)
{
    if (v->block->form == WORDS_64)
        return (double)v->low[i];
    return (double)cell_value(v, i);
}

/* block_round: writes the numbers of a block as float64, which a conversion to the result's dtype
 * then rounds: to nearest if that is float64, else exactly or to odd. */
static void block_round(const window_view *v, const judge *j, const window_loops *loops,
                        double *value)
{
    const window_block *block = v->block;
    const double *factor = j->scaled ? &j->by : NULL;
    double by = j->by;
    double size = fabs(by);
    int top = window_top(block->bound);
    int bits = top - block->base;
    bool odd = j->grid != TO_DOUBLE;
    bool shifts = !factor || j->shifts;

    bool integers = !block->empty && !block->special && block->form != LIMBS;
    bool in_range = block->base > -900 && top < 900;
    bool moderate = size > 0x1p-50 && size < 0x1p50;
    bool tame = integers && in_range && moderate;
    bool exact = shifts || !odd;
    bool short_words = block->form == WORDS_64 && bits <= 50;
    double unit = ldexp(1, block->base);
    if (tame && short_words) {
        loops->round(value, v->low, v->n, unit);
        if (!exact) {
            for (size_t i = 0; i < v->n; i++)
                value[i] = fan__product_odd(value[i], by);
        } else if (factor) {
            for (size_t i = 0; i < v->n; i++)
                value[i] *= by;
        }
        return;
    }

    /* the conversion of the integer rounds to nearest, or is exact */
    bool to_nearest = !odd && shifts;
    bool converts = tame && (bits <= 53 || to_nearest);
    for (size_t i = 0; i < v->n; i++) {
        if (block->empty)
            value[i] = by * -0.0;
        else if (!converts || cell_top(v, i) == FAN_ACC_NOTHING)
            value[i] = cell_round(v, i, factor, odd);
        else if (exact)
            value[i] = cell_double(v, i) * unit * by;
        else
            value[i] = fan__product_odd((double)v->low[i] * unit, by);
    }
}

void fan_window_round(const fan_array *out, const fan_window *window, const fan_scale *scale)
{
    FAN_UNINITIALIZED fan_nditer iter;
    FAN_UNINITIALIZED double value[B];
    size_t parts = fan__exact_parts(window->dtype);
    judge j = {.by = 1.0, .shifts = true};
    const window_loops *loops = window_loops_now();
    FAN_DEFAULT_FLOAT_MODE;
    if (out->size == 0)
        return;
    fan__exact_set_grid(&j, out->dtype);
    bool turns = fan__exact_scale_begin(&j, scale, parts == 2);
    fan_dtype as = fan__exact_values(parts);
    fan_nditer_one(&iter, out, true);
    for (int64_t b = 0; b < window->blocks; b++) {
        window_view v = window_view_of(window, b);
        int64_t len = (int64_t)(v.n / parts);
        block_round(&v, &j, loops, value);
        if (turns)
            fan__exact_turn(value, len, scale);
        fan_nditer_write(&iter, out, b * B / (int64_t)parts, len, as, (const char *)value);
    }
}

/* ---- merges ---- */

/* need_block: enters the numbers of another block into a need: as each replaces an empty one, the
 * largest counts. */
static void need_block(window_need *need, const window_block *block)
{
    bool sized = block->form != LIMBS && block->bound != 0 && !block->empty;
    need->form = (int)fan_max(need->form, block->form);
    need->special |= block->special;
    if (!sized)
        return;
    if (block->bound > need->most)
        need->most = block->bound;
    need->lowest = (int)fan_min(need->lowest, block->base);
}

static bool view_reserve(const window_view *to, const window_view *from)
{
    window_need need = {.lowest = INT_MAX};
    if (from->block->empty)
        return true;
    need_block(&need, from->block);
    if (!block_fits(to, &need))
        block_tighten(to);
    return block_reserve(to, &need);
}

/* shift_of: returns by how many bits the words of another block are shifted to the base of b; zeros
 * need no shift. */
static int shift_of(const window_block *from, const window_block *block)
{
    if (from->bound == 0)
        return 0;
    return from->base - block->base;
}

/* cell_merge: adds number k of `from` to number i of a block that has room for it. */
static void cell_merge(const window_view *to, size_t i, const window_view *from, size_t k)
{
    int64_t top = cell_top(to, i);
    int64_t other = cell_top(from, k);
    bool nothing = top == FAN_ACC_NOTHING;
    if (to->block->form == LIMBS) {
        limbs_merge(cell_limbs(to, i), to->kind, from, k);
        return;
    }
    if (other == FAN_ACC_NOTHING)
        return;
    if (other <= FAN_ACC_NAN) {
        cell_mark(to, i, fan__acc_special(top, other));
        return;
    }
    if (top <= FAN_ACC_NAN && !nothing)
        return;
    __int128 sum = (__int128)((bits128)cell_value(from, k) << shift_of(from->block, to->block));
    if (!nothing)
        sum += cell_value(to, i);
    cell_set(to, i, sum);
}

static void view_add(const window_view *to, const window_view *from, const window_loops *loops)
{
    if (from->block->empty)
        return;
    block_begin(to);
    if (to->block->form == WORDS_64 && !to->block->special) {
        loops->merge(to->low, from->low, from->n, shift_of(from->block, to->block));
        return;
    }
    for (size_t i = 0; i < from->n; i++)
        cell_merge(to, i, from, i);
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
        walk->step[i] = 0;
        if (repeats)
            continue;
        walk->step[i] = step;
        step *= shape[i];
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

fan_window *fan_window_spread(const fan_window *from, int ndim, const int64_t *shape, uint64_t axes)
{
    FAN_UNINITIALIZED spread_walk walk;
    int64_t size = 1;
    for (int i = 0; i < ndim; i++)
        size *= shape[i];
    fan_window *window = fan_window_new(from->dtype, size);
    int64_t parts = (int64_t)fan__exact_parts(from->dtype);
    if (!window)
        return NULL;
    FAN_DEFAULT_FLOAT_MODE;
    for (int add = 0; add < 2; add++) {
        spread_begin(&walk, ndim, shape, axes);
        for (int64_t at = 0; at < window->blocks; at++) {
            window_view to = window_view_of(window, at);
            int64_t elements = (int64_t)to.n / parts;
            window_need need = {.lowest = INT_MAX};
            if (add)
                block_begin(&to);
            for (int64_t i = 0; i < elements; i++) {
                int64_t number = walk.at * parts;
                window_view v = window_view_of(from, number / B);
                if (!add)
                    need_block(&need, v.block);
                for (int64_t part = 0; add && part < parts; part++)
                    cell_merge(&to, (size_t)(i * parts + part), &v, (size_t)(number % B + part));
                spread_next(&walk);
            }
            if (!add && !block_reserve(&to, &need)) {
                fan_window_free(window);
                return NULL;
            }
        }
    }
    return window;
}

#ifdef FAN_TEST
fan_status fan_window_merge(fan_window *window, const fan_window *from, fan_error *err)
{
    const window_loops *loops = window_loops_now();
    FAN_DEFAULT_FLOAT_MODE;
    for (int64_t b = 0; b < window->blocks; b++) {
        window_view to = window_view_of(window, b);
        window_view v = window_view_of(from, b);
        if (!view_reserve(&to, &v))
            return window_no_memory(err);
    }
    for (int64_t b = 0; b < window->blocks; b++) {
        window_view to = window_view_of(window, b);
        window_view v = window_view_of(from, b);
        view_add(&to, &v, loops);
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
    if (h->width == MESSAGE_LIMBS)
        return n * (size_t)k->limbs * sizeof(uint64_t);
    return n * h->width;
}

size_t fan_window_room(const fan_window *window)
{
    size_t bytes = 0;
    for (int64_t b = 0; b < window->blocks; b++) {
        int form = window->block[b].form;
        size_t width = number_more_bytes(&window->kind, form);
        if (form != LIMBS)
            width += sizeof(int64_t);
        bytes += sizeof(window_header) + window_view_of(window, b).n * width;
    }
    return bytes;
}

/* bits_in: returns the number of bits up to the highest that is set; 0 for 0. */
static int bits_in(bits128 x)
{
    uint64_t high = (uint64_t)(x >> 64);
    uint64_t low = (uint64_t)x;
    if (high)
        return 128 - __builtin_clzll(high);
    if (low)
        return 64 - __builtin_clzll(low);
    return 0;
}

/* header_of: returns the header of a block, and how many zero bits all its numbers end with. */
static window_header header_of(const window_view *v, const window_loops *loops, int *zeros)
{
    const window_block *block = v->block;
    bits128 any = 0;
    bits128 large = 0;
    size_t numbers = 0;
    uint8_t special = block->special ? MESSAGE_SPECIAL : 0;
    *zeros = 0;
    if (block->empty && !block->special)
        return (window_header){.flags = MESSAGE_EMPTY};
    if (block->form == LIMBS && !block->empty)
        return (window_header){.width = MESSAGE_LIMBS, .flags = special};
    if (block->form == WORDS_64 && !block->special) {
        row_size size;
        loops->size(v->low, v->n, &size);
        any = size.any;
        large = size.large;
        numbers = size.numbers;
    } else {
        for (size_t i = 0; i < v->n && !block->empty; i++) {
            if (word_top(v, i) > FAN_ACC_NAN) {
                cell_size(v, i, &any, &large);
                numbers++;
            }
        }
    }
    bool alike = numbers == 0 || numbers == v->n;
    if (any == 0 && !block->special && alike)
        return (window_header){.flags = numbers ? 0 : MESSAGE_EMPTY};
    *zeros = zeros_of(any);
    /* two bits more: the sign, and room for the lowest values, which represent what is no number */
    int bits = bits_in(large >> *zeros) + 2;
    return (window_header){block->base + *zeros, (uint8_t)((bits + 7) / 8), special, 0};
}

static bits128 number_get(const char *p, size_t n, int width, size_t i)
{
    bits128 x = 0;
    int bytes;
    for (int done = 0; done < width; done += bytes) {
        bytes = plane_bytes(width - done);
        uint64_t part = 0;
        memcpy(&part, p + i * (size_t)bytes, (size_t)bytes);
        x |= (bits128)part << 8 * done;
        p += n * (size_t)bytes;
    }
    return x;
}

static void number_put(char *p, size_t n, int width, size_t i, bits128 x)
{
    int bytes;
    for (int done = 0; done < width; done += bytes) {
        bytes = plane_bytes(width - done);
        uint64_t part = (uint64_t)(x >> 8 * done);
        memcpy(p + i * (size_t)bytes, &part, (size_t)bytes);
        p += n * (size_t)bytes;
    }
}

/* numbers_pack: writes the numbers of a block of words, each without its last `zeros` bits. */
static void numbers_pack(char *p, const window_view *v, int zeros, int width)
{
    bits128 lift = (bits128)1 << (8 * width - 1);
    for (size_t i = 0; i < v->n; i++) {
        int64_t top = cell_top(v, i);
        bits128 x;
        if (top > FAN_ACC_NAN)
            x = (bits128)(cell_value(v, i) >> zeros) + lift;
        else
            x = (bits128)(top - FAN_ACC_NOTHING);
        number_put(p, v->n, width, i, x);
    }
}

size_t fan_window_pack(const fan_window *window, void *to)
{
    const window_loops *loops = window_loops_now();
    char *p = to;
    for (int64_t at = 0; at < window->blocks; at++) {
        window_view v = window_view_of(window, at);
        int zeros;
        window_header h = header_of(&v, loops, &zeros);
        size_t bytes = header_bytes(&h, v.n, &window->kind);
        memcpy(p, &h, sizeof h);
        p += sizeof h;
        if (h.width == MESSAGE_LIMBS)
            memcpy(p, v.block->more, bytes);
        else if (h.width && v.block->form == WORDS_64 && !v.block->special)
            loops->pack(p, v.low, v.n, zeros, h.width);
        else if (h.width)
            numbers_pack(p, &v, zeros, h.width);
        p += bytes;
    }
    return (size_t)(p - (char *)to);
}

/* unpack: reads the header and, if `words`, the numbers of a block of a message; superaccumulators
 * stay where they are. `v` has room for words of 64 bits, and `high`. */
static void unpack(const window_header *h, const char *p, const window_view *v, bool words,
                   int64_t *high, const window_loops *loops)
{
    window_block *block = v->block;
    *block = (window_block){.base = h->base, .form = WORDS_64, .more = high};
    block->empty = h->flags & MESSAGE_EMPTY;
    block->special = h->flags & MESSAGE_SPECIAL;
    if (h->width == MESSAGE_LIMBS) {
        block->form = LIMBS;
        /* whole blocks and headers are multiples of 8 bytes */
        block->more = (void *)(uintptr_t)p;
        return;
    }
    if (h->width > 8)
        block->form = WORDS_128;
    if (h->width)
        block->bound = ldexp(1, h->base + 8 * h->width - 1);
    if (block->empty || !words)
        return;
    if (h->width == 0) {
        memset(v->low, 0, v->n * sizeof *v->low);
        return;
    }
    if (h->width <= 8) {
        loops->unpack(p, v->low, v->n, h->width);
        return;
    }
    bits128 lift = (bits128)1 << (8 * h->width - 1);
    for (size_t i = 0; i < v->n; i++) {
        bits128 x = number_get(p, v->n, h->width, i);
        if (x < 4)
            cell_mark(v, i, (int64_t)x + FAN_ACC_NOTHING);
        else
            cell_set(v, i, (__int128)(x - lift));
    }
}

static bool header_valid(const window_header *h, const fan_exact_kind *k)
{
    if (h->flags > (MESSAGE_EMPTY | MESSAGE_SPECIAL) || h->zero)
        return false;
    if (h->width == 0)
        return true;
    if (h->flags & MESSAGE_EMPTY)
        return false;
    if (h->width == MESSAGE_LIMBS)
        return true;
    return h->width <= 16 && h->base >= -k->unit && h->base < 1024;
}

/* message_pass: reads the message; adds its blocks, or reserves room for them. */
static fan_status message_pass(fan_window *w, const char *p, size_t bytes, bool add, size_t *used,
                               fan_error *err)
{
    FAN_UNINITIALIZED int64_t low[B];
    FAN_UNINITIALIZED int64_t high[B];
    const window_loops *loops = window_loops_now();
    const char *begin = p;
    const char *end = p + bytes;
    for (int64_t at = 0; at < w->blocks; at++) {
        window_header h = {.flags = 255};
        window_block b;
        window_view to = window_view_of(w, at);
        window_view v = {&b, low, to.n, to.kind};
        if ((size_t)(end - p) >= sizeof h)
            memcpy(&h, p, sizeof h);
        p += sizeof h;
        size_t length = header_bytes(&h, v.n, &w->kind);
        if (!header_valid(&h, &w->kind) || length > (size_t)(end - p)) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "not a message of window sums: block %lld of %lld is malformed",
                            (long long)at, (long long)w->blocks);
        }
        unpack(&h, p, &v, add, high, loops);
        p += length;
        if (add)
            view_add(&to, &v, loops);
        else if (!view_reserve(&to, &v))
            return window_no_memory(err);
    }
    *used = (size_t)(p - begin);
    return FAN_OK;
}

fan_status fan_window_merge_packed(fan_window *w, const void *from, size_t bytes, size_t *used,
                                   fan_error *err)
{
    FAN_DEFAULT_FLOAT_MODE;
    if ((uintptr_t)from % _Alignof(int64_t))
        return fan_fail(err, FAN_ERR_VALUE, "a message of window sums is aligned to 8 bytes");
    fan_status st = message_pass(w, from, bytes, false, used, err);
    if (st)
        return st;
    return message_pass(w, from, bytes, true, used, err);
}
