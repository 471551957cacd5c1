/* Exact sums against whole numbers: the terms of one element in one long integer, rounded by
 * a search for the nearest code. The model, hostile terms and arrays of them, then sums, factors,
 * windows and planted faults. */
#include "array/exact.h"

#include "array/convert.h"
#include "array/nditer.h"
#include "array/exact_loops.h"
#include "base/fault.h"
#include "base/mem.h"
#include "check.h"
#include "oracle.h"
#include "windows.h"

/* ---- the model ---- */

#define DIGITS 72 /* of 32 bits */

typedef struct format {
    int mant, unit;            /* the smallest step is 2^-unit */
    uint64_t last, over, none; /* codes without sign: the largest number, what is beyond it, NaN */
} format;

static format format_of(fan_dtype d)
{
    switch (d) {
    case FAN_DT_FLOAT16: return (format){10, 24, 0x7bff, 0x7c00, 0x7e00};
    case FAN_DT_BFLOAT16: return (format){7, 133, 0x7f7f, 0x7f80, 0x7fc0};
    case FAN_DT_FLOAT8_E5M2: return (format){2, 16, 0x7b, 0x7c, 0x7e};
    case FAN_DT_FLOAT8_E4M3FN: return (format){3, 9, 0x7e, 0x7f, 0x7f};
    case FAN_DT_FLOAT32: return (format){23, 149, 0x7f7fffff, 0x7f800000, 0x7fc00000};
    default:
        return (format){52, 1074, UINT64_C(0x7fefffffffffffff), UINT64_C(0x7ff0000000000000),
                        UINT64_C(0x7ff8000000000000)};
    }
}

static int width_of(fan_dtype d)
{
    return (int)fan_dtype_size(d) * 8;
}

static uint64_t sign_of(fan_dtype d)
{
    return UINT64_C(1) << (width_of(d) - 1);
}

/* mantissas: the bits of a code that hold the mantissa. */
static uint64_t mantissas(format f)
{
    return (UINT64_C(1) << f.mant) - 1;
}

/* an integer in two's complement, in units of 2^-1074 and `less` bits more */
typedef struct whole {
    uint32_t digit[DIGITS];
} whole;

static void whole_add(whole *w, uint64_t m, int at, bool minus)
{
    unsigned __int128 wide = (unsigned __int128)m << at % 32;
    int64_t carry = 0;
    for (int i = at / 32; i < DIGITS; i++) {
        int64_t piece = (int64_t)(uint32_t)wide;
        int64_t sum = (int64_t)w->digit[i] + (minus ? -piece : piece) + carry;
        wide >>= 32;
        w->digit[i] = (uint32_t)sum;
        carry = sum >> 32;
        if (wide == 0 && carry == 0)
            break;
    }
}

static int whole_sign(const whole *w)
{
    if (w->digit[DIGITS - 1] >> 31)
        return -1;
    for (int i = 0; i < DIGITS; i++) {
        if (w->digit[i])
            return 1;
    }
    return 0;
}

static void whole_negate(whole *w)
{
    uint64_t carry = 1;
    for (int i = 0; i < DIGITS; i++) {
        carry += (uint32_t)~w->digit[i];
        w->digit[i] = (uint32_t)carry;
        carry >>= 32;
    }
}

/* A number whose unit is 2^-base: base is 1074, or more where a factor came in. */
static void whole_add_code(whole *w, int base, fan_dtype d, uint64_t code, bool minus)
{
    format f = format_of(d);
    int e = (int)(code >> f.mant);
    uint64_t m = code & mantissas(f);
    if (e) {
        m |= UINT64_C(1) << f.mant;
        e--;
    }
    whole_add(w, m, base - f.unit + e, minus);
}

/* nearest: the code of w >= 0 in dtype d; ties to even. */
static uint64_t nearest(const whole *w, int base, fan_dtype d)
{
    format f = format_of(d);
    uint64_t low = 0;
    uint64_t high = f.last + 1;
    while (high - low > 1) { /* the largest code that is not above w */
        uint64_t mid = low + (high - low) / 2;
        whole rest = *w;
        whole_add_code(&rest, base, d, mid, true);
        if (whole_sign(&rest) >= 0) {
            low = mid;
        } else {
            high = mid;
        }
    }
    whole twice = {{0}};
    for (int i = 0; i < 2; i++) {
        uint64_t carry = 0;
        for (int k = 0; k < DIGITS; k++) {
            carry += (uint64_t)twice.digit[k] + w->digit[k];
            twice.digit[k] = (uint32_t)carry;
            carry >>= 32;
        }
    }
    whole_add_code(&twice, base, d, low, true);
    whole_add_code(&twice, base, d, high, true);
    int beyond = whole_sign(&twice);
    bool up = beyond > 0 || (beyond == 0 && low % 2);
    uint64_t code = low + up; /* high is the next */
    return code > f.last ? f.over : code;
}

/* model: the exact sum of n codes of dtype d, as a code of dtype `to`. NaNs come out without
 * sign. */
static uint64_t model(fan_dtype d, const uint64_t *codes, size_t n, fan_dtype to)
{
    format f = format_of(d);
    format g = format_of(to);
    uint64_t sign = sign_of(d);
    bool infinite[2] = {false, false}; /* plus, minus */
    bool none = false;
    bool all_minus_zero = true;
    whole w = {{0}};
    int base = (int)larger(f.unit, g.unit);
    for (size_t k = 0; k < n; k++) {
        bool minus = codes[k] & sign;
        uint64_t a = codes[k] & (sign - 1);
        all_minus_zero &= codes[k] == sign;
        if (a <= f.last) {
            whole_add_code(&w, base, d, a, minus);
        } else if (a == f.over && f.over != f.none) {
            infinite[minus] = true;
        } else {
            none = true;
        }
    }
    bool minus = whole_sign(&w) < 0;
    uint64_t code;
    if (none || (infinite[0] && infinite[1])) {
        code = g.none;
    } else if (infinite[0] || infinite[1]) {
        minus = infinite[1];
        code = g.over;
    } else if (whole_sign(&w) == 0) {
        minus = all_minus_zero;
        code = 0;
    } else {
        if (minus)
            whole_negate(&w);
        code = nearest(&w, base, to);
    }
    if (minus && code != g.none)
        code |= sign_of(to);
    return code;
}

/* ---- hostile terms ---- */

static uint64_t random_sign(uint64_t sign)
{
    return random_below(2) ? sign : 0;
}

/* tie: term k of a tie: its exponent and bits. The first is anywhere (`at`), the second half of its
 * last bit, of its own dtype or of a narrower one; others lie just out of a float64's reach, or
 * anywhere below. false: the term is a zero. */
static bool tie(const format *f, uint64_t *codes, size_t k, uint64_t *at, uint64_t *e, uint64_t *m)
{
    uint64_t mant = (uint64_t)f->mant;
    uint64_t top = f->last >> f->mant;
    if (k == 0) {
        *at = top;
        if (mant + 2 < top)
            *at = mant + 2 + (uint64_t)random_below((int64_t)(top - mant - 2));
        *e = *at;
    } else if (k == 1) {
        uint64_t gap = mant + 1;
        if (one_in(2))
            gap = random_below(2) ? 24 : 8;
        *e = *at > gap ? *at - gap : 0;
        *m = 0;
        if (gap <= mant)
            codes[0] = codes[0] >> (mant - gap + 1) << (mant - gap + 1);
    } else if (random_below(2)) {
        uint64_t near = 2 * mant + (uint64_t)random_below(12);
        if (random_below(2) && *at > near) {
            *e = *at - near;
        } else {
            *e = (uint64_t)random_below((int64_t)*at + 1) / 3;
        }
        if (one_in(2))
            *m = 0;
    } else {
        return false;
    }
    return true;
}

/* The ways in which terms are hostile. */
typedef enum way {
    ANY_EXPONENT,
    NEAR_ONE_ANOTHER,
    CANCELLING, /* pairs that cancel, and something small */
    TIE,        /* and something far below it */
    SUBNORMAL,  /* subnormal, zero, or next to it */
    ZEROS,
    LARGEST, /* which must not overflow on the way */
    NO_NUMBER,
    WAYS
} way;

/* hostile: n terms of one element. */
static void hostile(fan_dtype d, uint64_t *codes, size_t n, way how)
{
    format f = format_of(d);
    uint64_t sign = sign_of(d);
    uint64_t top = f.last >> f.mant;
    uint64_t middle = (uint64_t)random_below((int64_t)top + 1);
    uint64_t at = 0;
    for (size_t k = 0; k < n; k++) {
        uint64_t m = random_bits() & mantissas(f);
        uint64_t e = (uint64_t)random_below((int64_t)top + 1);
        switch (how) {
        case NEAR_ONE_ANOTHER:
            e = middle;
            if (middle > 3)
                e -= (uint64_t)random_below(4);
            break;
        case CANCELLING:
            if (k % 3 == 1) {
                codes[k] = codes[k - 1] ^ sign;
                continue;
            }
            if (k % 3 == 2)
                e = (uint64_t)random_below((int64_t)middle + 1);
            break;
        case TIE:
            if (!tie(&f, codes, k, &at, &e, &m)) {
                codes[k] = random_sign(sign);
                continue;
            }
            break;
        case SUBNORMAL:
            e = (uint64_t)random_below(3) / 2;
            if (one_in(3))
                m = 0;
            break;
        case ZEROS:
            codes[k] = sign;
            if (one_in(4) && one_in(8))
                codes[k] = 0;
            continue;
        case LARGEST:
            codes[k] = f.last - (uint64_t)random_below(3);
            if (k % 2)
                codes[k] |= sign;
            if (one_in(4))
                codes[k] ^= sign;
            continue;
        case NO_NUMBER:
            if (one_in((int64_t)n + 2)) {
                codes[k] = f.none;
                if (!one_in(3))
                    codes[k] = f.over | random_sign(sign);
                continue;
            }
            break;
        default: break;
        }
        e = (uint64_t)smaller((int64_t)e, (int64_t)top);
        codes[k] = e << f.mant | m;
        if (codes[k] > f.last)
            codes[k] = f.last;
        codes[k] |= random_sign(sign);
    }
}

/* ---- arrays of them ---- */

#define MOST 4096

typedef struct terms {
    fan_dtype d;
    size_t n, size;
    uint64_t *codes; /* of element i: codes[i * n ..] */
    fan_array *array[MOST];
} terms;

/* in_of: the arrays as the sums take them. */
static const fan_array *const *in_of(fan_array *const *arrays)
{
    return (const fan_array *const *)arrays;
}

static uint64_t load(const char *p, fan_dtype d)
{
    uint64_t u = 0;
    memcpy(&u, p, fan_dtype_size(d));
    return u;
}

static void store(char *p, fan_dtype d, uint64_t code)
{
    memcpy(p, &code, fan_dtype_size(d));
}

/* with_gaps: one axis of an array, now and then with a gap behind each element. */
static fan_array *with_gaps(fan_dtype d, int64_t size)
{
    if (!one_in(4))
        return array_of(d, size);
    int64_t shape[2] = {size, 2};
    fan_array *both = array_shaped(d, 2, shape);
    fan_array *a = view_of(both->storage, both->data, d, 1, shape, both->strides);
    fan_array_drop(both);
    return a;
}

/* terms_make: how: one way for all elements, or WAYS: any for each. */
static void terms_make(terms *t, fan_dtype d, size_t n, size_t size, way how)
{
    *t = (terms){.d = d, .n = n, .size = size};
    t->codes = malloc(n * size * sizeof *t->codes);
    for (size_t i = 0; i < size; i++) {
        way own = how;
        if (how == WAYS)
            own = (way)random_below(WAYS);
        hostile(d, t->codes + i * n, n, own);
    }
    for (size_t k = 0; k < n; k++) {
        t->array[k] = with_gaps(d, (int64_t)size);
        for (size_t i = 0; i < size; i++)
            store(element(t->array[k], (int64_t)i), d, t->codes[i * n + k]);
    }
}

static void terms_free(terms *t)
{
    drop_arrays(t->array, t->n);
    free(t->codes);
}

static bool same_code(fan_dtype d, uint64_t got, uint64_t want)
{
    format f = format_of(d);
    uint64_t a = got & (sign_of(d) - 1);
    bool is_infinite = a == f.over && f.over != f.none;
    if (want != f.none)
        return got == want;
    return a > f.last && !is_infinite;
}

static void shuffle(fan_array **a, size_t n)
{
    for (size_t k = n; k > 1; k--) {
        size_t at = (size_t)random_below((int64_t)k);
        fan_array *x = a[k - 1];
        a[k - 1] = a[at];
        a[at] = x;
    }
}

static int64_t wrong, looked_at; /* of a run with a planted fault */

/* exact: the sum of n arrays in dtype d, into an array of dtype `to`. */
static fan_array *exact(fan_array *const *in, size_t n, fan_dtype d, fan_dtype to)
{
    fan_array *out = array_of(to, in[0]->size);
    fan_exact_sum(out, in_of(in), n, d, NULL);
    return out;
}

/* rounded: the sum in a window, which is freed. */
static fan_array *rounded(fan_window *w, fan_dtype to, int64_t size)
{
    fan_array *out = array_of(to, size);
    fan_window_round(out, w, NULL);
    fan_window_free(w);
    return out;
}

/* check_terms: every vector unit, another order, and trees of windows give what the model does. */
static void check_terms(terms *t, fan_dtype to, const char *what, bool planted)
{
    int64_t size = (int64_t)t->size;
    fan_array *out[8];
    size_t outs = 0;
    for (int isa = 0; isa < 3; isa++) {
        if (isa && fan_exact_isa(isa) != isa)
            continue;
        CHECK_INT(fan_exact_isa(isa), isa);
        out[outs++] = exact(t->array, t->n, t->d, to);
        out[outs++] = rounded(window_of(t->array, t->n, t->d, size), to, size);
    }
    fan_exact_isa(-1);
    shuffle(t->array, t->n);
    out[outs++] = exact(t->array, t->n, t->d, to);
    int64_t shown = 0;
    for (size_t i = 0; i < t->size; i++) {
        uint64_t want = model(t->d, t->codes + i * t->n, t->n, to);
        for (size_t o = 0; o < outs; o++) {
            uint64_t got = load(element(out[o], (int64_t)i), to);
            looked_at++;
            if (same_code(to, got, want))
                continue;
            wrong++;
            if (planted || shown++ > 2)
                continue;
            CHECK(same_code(to, got, want));
            fprintf(stderr,
                    "    %s: out %zu: element %zu, %zu terms of %s into %s: got %llx, want %llx:",
                    what, o, i, t->n, fan_dtype_name(t->d), fan_dtype_name(to),
                    (unsigned long long)got, (unsigned long long)want);
            for (size_t k = 0; k < t->n && k < 9; k++)
                fprintf(stderr, " %llx", (unsigned long long)t->codes[i * t->n + k]);
            fprintf(stderr, "\n");
        }
    }
    if (!planted)
        CHECK_INT(shown, 0);
    drop_arrays(out, outs);
}

static const fan_dtype reals[] = {FAN_DT_FLOAT32,       FAN_DT_BFLOAT16,    FAN_DT_FLOAT16,
                                  FAN_DT_FLOAT8_E4M3FN, FAN_DT_FLOAT8_E5M2, FAN_DT_FLOAT64};
#define REALS 6

static void a_million_sums(double share)
{
    /* elements for each dtype; all of them are summed five times */
    static const int elements[REALS] = {1000000, 60000, 40000, 20000, 20000, 100000};
    for (int r = 0; r < REALS; r++) {
        int left = (int)(elements[r] * share);
        for (int round = 0; left > 0; round++) {
            bool many = round % 16 == 0;
            size_t n = 1 + (size_t)random_below(many ? 200 : 12);
            size_t size = many ? 200 : 4000;
            terms t;
            terms_make(&t, reals[r], n, size, round % 3 == 0 ? WAYS : (way)(round % 8));
            fan_dtype to = reals[r];
            if (one_in(2))
                to = reals[random_below(REALS)];
            check_terms(&t, to, "random", false);
            terms_free(&t);
            left -= (int)size;
        }
    }
}

static void thousands_of_terms(void)
{
    static const size_t counts[] = {511, 1024, 4095, 4096};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (way how = ANY_EXPONENT; how < WAYS; how++) {
            terms t;
            terms_make(&t, reals[(c + (size_t)how) % REALS], counts[c], 24, how);
            check_terms(&t, t.d, "thousands", false);
            terms_free(&t);
        }
    }
}

/* permuted: whether the digits of p in base 5 are an order of five; then the arrays in it. */
static bool permuted(int p, fan_array *const *arrays, const fan_array **in)
{
    int seen = 0;
    for (int k = 0; k < 5; k++) {
        seen |= 1 << p % 5;
        in[k] = arrays[p % 5];
        p /= 5;
    }
    return seen == 31;
}

/* All orders of five terms: one hash. */
static void every_order_of_five(void)
{
    for (int r = 0; r < REALS; r++) {
        int64_t size = 700;
        int64_t orders = 0;
        uint64_t hash = 0;
        terms t;
        terms_make(&t, reals[r], 5, (size_t)size, WAYS);
        fan_array *out = array_of(t.d, size);
        uint64_t none = format_of(t.d).none;
        for (int p = 0; p < 3125; p++) {
            const fan_array *in[5];
            if (!permuted(p, t.array, in))
                continue;
            fan_exact_sum(out, in, 5, t.d, NULL);
            for (int64_t i = 0; i < size; i++) { /* a NaN is a NaN */
                if (same_code(t.d, load(element(out, i), t.d), none))
                    store(element(out, i), t.d, none);
            }
            uint64_t h = fan_array_hash(out);
            if (orders++ == 0)
                hash = h;
            CHECK(h == hash);
        }
        CHECK_INT(orders, 120);
        fan_array_drop(out);
        terms_free(&t);
    }
}

static double sum_of(const float *x, size_t n, fan_dtype to, const fan_scale *scale)
{
    fan_array *in[16];
    double got = 0;
    for (size_t k = 0; k < n; k++) {
        in[k] = array_shaped(FAN_DT_FLOAT32, 0, NULL);
        memcpy(in[k]->data, &x[k], sizeof x[k]);
    }
    fan_array *out = array_shaped(to, 0, NULL);
    fan_exact_sum(out, in_of(in), n, FAN_DT_FLOAT32, scale);
    fan_convert((char *)&got, FAN_DT_FLOAT64, 8, out->data, to, 8, 1);
    drop_arrays(in, n);
    fan_array_drop(out);
    return got;
}

static void named_cases(void)
{
    const float big = 0x1.fffffep127f;
#define SUM(to, ...) \
    sum_of((const float[]){__VA_ARGS__}, sizeof (float[]){__VA_ARGS__} / sizeof(float), to, NULL)
    CHECK(SUM(FAN_DT_FLOAT32, big, big, -big) == (double)big);
    CHECK(SUM(FAN_DT_FLOAT32, big, big) == (double)INFINITY);
    CHECK(SUM(FAN_DT_FLOAT64, big, big) == 2 * (double)big);
    /* a tie with what would be 2^128 */
    CHECK(SUM(FAN_DT_FLOAT32, big, 0x1p103f) == (double)INFINITY);
    CHECK(SUM(FAN_DT_FLOAT32, big, 0x1p103f, -0x1p-149f) == (double)big);
    CHECK(SUM(FAN_DT_FLOAT32, INFINITY, -big, 1) == (double)INFINITY);
    CHECK(isnan(SUM(FAN_DT_FLOAT32, INFINITY, -INFINITY)));
    CHECK(isnan(SUM(FAN_DT_FLOAT32, 1, NAN)));
    /* 1 + 2^-24 is a tie; a little more or less is not, and float64 alone would not see it */
    CHECK(SUM(FAN_DT_FLOAT32, 1, 0x1p-24f) == 1);
    CHECK(SUM(FAN_DT_FLOAT32, 1, 0x1p-24f, 0x1p-120f) == 1 + 0x1p-23);
    CHECK(SUM(FAN_DT_FLOAT32, 1 + 0x1p-23f, 0x1p-24f, -0x1p-120f) == 1 + 0x1p-23);
    CHECK(SUM(FAN_DT_BFLOAT16, 1, 0x1p-8f, 0x1p-140f) == 1 + 0x1p-7);
    CHECK(SUM(FAN_DT_FLOAT16, 65504, 16, -0x1p-140f) == 65504);
    CHECK(SUM(FAN_DT_FLOAT16, 65504, 16) == (double)INFINITY);
    CHECK(SUM(FAN_DT_FLOAT32, 0x1p-149f, 0x1p-149f, -0x1p-148f) == 0);
    CHECK(!signbit(SUM(FAN_DT_FLOAT32, 1, -1)));
    CHECK(!signbit(SUM(FAN_DT_FLOAT32, -0.0f, 0.0f)));
    CHECK(signbit(SUM(FAN_DT_FLOAT32, -0.0f, -0.0f, -0.0f)));
    CHECK(signbit(SUM(FAN_DT_FLOAT16, -0x1p-149f, 0.0f))); /* too small for it, and not zero */
#undef SUM
}

/* add_scaled: adds a float32 code times m to the integer. */
static void add_scaled(whole *w, uint32_t code, int64_t m)
{
    uint64_t mant = code & 0x7fffffu;
    int field = (int)(code >> 23 & 0xff);
    if (field) {
        mant |= 0x800000u;
        field--;
    }
    unsigned __int128 p = (unsigned __int128)mant * (uint64_t)llabs(m);
    bool minus = (code >> 31) ^ (m < 0);
    whole_add(w, (uint64_t)p, field, minus);
    whole_add(w, (uint64_t)(p >> 64), field + 64, minus);
}

/* The factor is exact, too: of two candidates the one that long arithmetic confirms. */
static void a_factor_is_exact(void)
{
    static const double factors[] = {0.125, 3,     1.0 / 3,     -7e-30,   0x1p-149,
                                     -0.0,  1e300, 0x1.8p-1074, INFINITY, NAN};
    int64_t slow_before = fan_exact_slow();
    for (int round = 0; round < 4000; round++) {
        uint64_t codes[4];
        float x[4];
        size_t n = 1 + (size_t)random_below(4);
        double by = factors[random_below(10)];
        fan_scale scale = {.on = true, .re = by};
        hostile(FAN_DT_FLOAT32, codes, n, (way)random_below(5));
        for (size_t k = 0; k < n; k++)
            x[k] = (float)load_number(FAN_DT_FLOAT32, &codes[k]).re;
        float got = (float)sum_of(x, n, FAN_DT_FLOAT32, &scale);
        double whole_sum = sum_of(x, n, FAN_DT_FLOAT64, NULL);
        if (!isfinite(by) || by == 0 || whole_sum == 0) {
            /* the sign of a sum that rounds to zero is the exact one's */
            CHECK(same_real((double)got, (double)(float)(whole_sum * by)));
            continue;
        }
        /* base: sum * factor is a whole number of 2^-(149 + 1074): too long for the model's
         * integers; so shift the factor's exponent into the sum */
        int e;
        int64_t m = (int64_t)ldexp(frexp(by, &e), 53);
        whole w = {{0}};
        int base = 149 + 53 - e; /* units of the product */
        if (base < 149 || base > 1500)
            continue;
        for (size_t k = 0; k < n; k++)
            add_scaled(&w, (uint32_t)codes[k], m);
        bool minus = whole_sign(&w) < 0;
        if (minus)
            whole_negate(&w);
        uint32_t had;
        uint32_t want = (uint32_t)nearest(&w, base, FAN_DT_FLOAT32);
        if (minus)
            want |= 0x80000000u;
        memcpy(&had, &got, 4);
        if (!CHECK(want == had))
            fprintf(stderr, "    factor %a: got %x, want %x\n", by, had, want);
    }
    CHECK(fan_exact_slow() > slow_before);
}

/* Parts of complex numbers are sums of their own; states of theirs widen without loss. */
static void complex_and_wider_windows(void)
{
    int64_t size = 300;
    fan_array *in[6], *part[2][6];
    for (int k = 0; k < 6; k++) {
        in[k] = array_of(FAN_DT_COMPLEX64, size);
        for (int64_t i = 0; i < 2 * size; i++) {
            uint64_t code;
            hostile(FAN_DT_FLOAT32, &code, 1, (way)random_below(5));
            store(in[k]->data + 4 * i, FAN_DT_FLOAT32, code);
        }
        for (int which = 0; which < 2; which++) {
            part[which][k] = view_of(in[k]->storage, in[k]->data + 4 * which, FAN_DT_FLOAT32, 1,
                                     &size, in[k]->strides);
        }
    }
    fan_array *out = exact(in, 6, FAN_DT_COMPLEX64, FAN_DT_COMPLEX64);
    for (int which = 0; which < 2; which++) {
        fan_array *real = exact(part[which], 6, FAN_DT_FLOAT32, FAN_DT_FLOAT32);
        for (int64_t i = 0; i < size; i++)
            CHECK(memcmp(real->data + 4 * i, out->data + 8 * i + 4 * which, 4) == 0);
        fan_array_drop(real);
    }
    fan_window *narrow = fan_window_new(FAN_DT_FLOAT32, size);
    CHECK_OK(fan_window_add(narrow, in_of(part[0]), 3, NULL));
    fan_window *wide = fan_window_copy(narrow, FAN_DT_COMPLEX64);
    CHECK_OK(fan_window_add(wide, in_of(in) + 3, 3, NULL));
    fan_array *wide_out = rounded(wide, FAN_DT_COMPLEX64, size);
    for (int64_t i = 0; i < size; i++)
        CHECK(memcmp(wide_out->data + 8 * i, out->data + 8 * i, 4) == 0);
    drop_arrays(in, 6);
    drop_arrays(part[0], 6);
    drop_arrays(part[1], 6);
    fan_window_free(narrow);
    fan_array_drop(out);
    fan_array_drop(wide_out);
}

/* Terms of one dtype in a window of another that contains it. */
static void windows_widen_without_loss(void)
{
    static const fan_dtype pairs[][2] = {{FAN_DT_FLOAT16, FAN_DT_FLOAT32},
                                         {FAN_DT_BFLOAT16, FAN_DT_FLOAT64},
                                         {FAN_DT_FLOAT8_E5M2, FAN_DT_FLOAT16},
                                         {FAN_DT_FLOAT32, FAN_DT_FLOAT64}};
    for (int r = 0; r < 4; r++) {
        fan_dtype from = pairs[r][0];
        fan_dtype to = pairs[r][1];
        int64_t size = 400;
        terms t;
        terms_make(&t, from, 7, (size_t)size, WAYS);
        fan_window *narrow = fan_window_new(from, size);
        CHECK_OK(fan_window_add(narrow, in_of(t.array), 4, NULL));
        fan_window *wide = fan_window_copy(narrow, to);
        CHECK_OK(fan_window_add(wide, in_of(t.array) + 4, 3, NULL));
        fan_array *out = rounded(wide, to, size);
        for (int64_t i = 0; i < size; i++) {
            uint64_t want = model(from, t.codes + i * 7, 7, to);
            CHECK(same_code(to, load(element(out, i), to), want));
        }
        fan_array_drop(out);
        fan_window_free(narrow);
        terms_free(&t);
    }
}

/* `out` may be one of the operands; shapes and strides are those of any array. */
static void in_place_and_strided(void)
{
    for (int round = 0; round < 300; round++) {
        fan_dtype d = reals[random_below(REALS)];
        int ndim = (int)random_below(4);
        int64_t shape[4];
        size_t n = 1 + (size_t)random_below(10);
        size_t at = (size_t)random_below((int64_t)n);
        fan_array *in[10];
        for (int i = 0; i < ndim; i++)
            shape[i] = 1 + random_below(one_in(4) ? 150 : 6);
        for (size_t k = 0; k < n; k++)
            in[k] = random_view(d, ndim, shape, k != at);
        for (int64_t i = 0; i < in[at]->size; i++)
            random_element(d, element(in[at], i));
        fan_array *fresh = random_view(d, ndim, shape, false);
        fan_array *other = random_view(d, ndim, shape, false);
        fan_exact_sum(fresh, in_of(in), n, d, NULL);
        fan_window *sum = fan_window_new(d, fresh->size);
        CHECK_OK(fan_window_add(sum, in_of(in), n, NULL));
        fan_window_round(other, sum, NULL);
        fan_window_free(sum);
        fan_exact_sum(in[at], in_of(in), n, d, NULL);
        for (int64_t i = 0; i < fresh->size; i++) {
            CHECK(same_number(get(fresh, i), get(in[at], i)));
            CHECK(same_number(get(fresh, i), get(other, i)));
        }
        drop_arrays(in, n);
        fan_array_drop(fresh);
        fan_array_drop(other);
    }
}

/* Another dtype than the sum's is rounded to it first: as D1 says of every term. */
static void terms_of_another_dtype(fan_dtype d)
{
    int64_t size = 50;
    fan_array *others = array_of(d, size);
    fan_array *lows = array_of(FAN_DT_BFLOAT16, size);
    fan_array *rounded_first = array_of(FAN_DT_BFLOAT16, size);
    for (int64_t i = 0; i < size; i++) {
        int32_t x;
        if (d == FAN_DT_INT32) {
            x = (int32_t)(random_below(1 << 20) - (1 << 19));
        } else {
            x = 0x3c00 + (int32_t)random_below(1 << 10); /* a half from 1 to 2 */
        }
        memcpy(element(others, i), &x, fan_dtype_size(d));
        random_element(FAN_DT_BFLOAT16, element(lows, i));
    }
    fan_array_copy(rounded_first, others);
    for (size_t n = 1; n <= 2; n++) {
        fan_array *one = exact((fan_array *[]){others, lows}, n, FAN_DT_BFLOAT16, FAN_DT_FLOAT32);
        fan_array *two =
            exact((fan_array *[]){rounded_first, lows}, n, FAN_DT_BFLOAT16, FAN_DT_FLOAT32);
        for (int64_t i = 0; i < size; i++)
            CHECK(same_number(get(one, i), get(two, i)));
        fan_array_drop(one);
        fan_array_drop(two);
    }
    drop_arrays((fan_array *[]){others, lows, rounded_first}, 3);
}

/* A fault planted in the sums is found by what is above. */
static void planted_faults_are_found(void)
{
    static const fan_fault_id faults[] = {FAN_FAULT_EXACT_NO_INTEGER_PATH, FAN_FAULT_EXACT_NO_ODD,
                                          FAN_FAULT_EXACT_NO_RANGE};
    for (int f = 0; f < 6; f++) {
        fan_dtype d = f % 2 ? FAN_DT_FLOAT64 : FAN_DT_FLOAT32;
        int64_t before = wrong;
        fan_fault_plant(faults[f / 2]);
        for (int round = 0; round < 16; round++) {
            terms t;
            terms_make(&t, d, 5, 2000, (way)(round % 8));
            check_terms(&t, round < 8 ? d : FAN_DT_FLOAT32, "planted", true);
            terms_free(&t);
        }
        fan_fault_plant(FAN_FAULT_NONE);
        if (!CHECK(wrong > before)) {
            fprintf(stderr, "    planted fault %d is not found in %s\n", faults[f / 2],
                    fan_dtype_name(d));
        }
    }
}

int main(int argc, char **argv)
{
    int64_t live = fan_mem_get().live;
    double share = check_is_full(argc, argv) ? 1 : 0.05;
    CHECK(fan_exact_fits(FAN_DT_FLOAT32) && fan_exact_fits(FAN_DT_COMPLEX64));
    CHECK(!fan_exact_fits(FAN_DT_INT32) && !fan_exact_fits(FAN_DT_BOOL));
    named_cases();
    every_order_of_five();
    a_factor_is_exact();
    complex_and_wider_windows();
    windows_widen_without_loss();
    in_place_and_strided();
    terms_of_another_dtype(FAN_DT_INT32);
    terms_of_another_dtype(FAN_DT_FLOAT16);
    thousands_of_terms();
    a_million_sums(share);
    CHECK_INT(wrong, 0);
    CHECK(windows_met());
    planted_faults_are_found();
    CHECK(looked_at > 100000);
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
