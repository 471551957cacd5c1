/* Exact sums against whole numbers: the terms of one element in one long integer, rounded by
 * looking for the nearest code. */
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

/* an integer in two's complement, in units of 2^-1074 and `less` bits more */
typedef struct whole {
    uint32_t digit[DIGITS];
} whole;

static void whole_add(whole *w, uint64_t m, int at, bool minus)
{
    int i = at / 32;
    int bit = at % 32;
    unsigned __int128 wide = (unsigned __int128)m << bit;
    int64_t carry = 0;
    for (int j = 0; i < DIGITS; i++, j++) {
        int64_t piece = j < 4 ? (int64_t)(uint32_t)(wide >> (32 * j)) : 0;
        int64_t sum = (int64_t)w->digit[i] + (minus ? -piece : piece) + carry;
        w->digit[i] = (uint32_t)sum;
        carry = sum >> 32;
        if (j >= 4 && carry == 0)
            break;
    }
}

static int whole_sign(const whole *w)
{
    if (w->digit[DIGITS - 1] >> 31)
        return -1;
    for (int i = 0; i < DIGITS; i++)
        if (w->digit[i])
            return 1;
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
    uint64_t e = code >> f.mant;
    uint64_t m = code & ((UINT64_C(1) << f.mant) - 1);
    if (e)
        m |= UINT64_C(1) << f.mant;
    whole_add(w, m, base - f.unit + (int)(e ? e - 1 : 0), minus);
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
        if (whole_sign(&rest) >= 0)
            low = mid;
        else
            high = mid;
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
    uint64_t code = beyond > 0 || (beyond == 0 && low % 2) ? high : low;
    return code > f.last ? f.over : code;
}

/* model: the exact sum of n codes of dtype d, as a code of dtype `to`. NaNs come out without
 * sign. */
static uint64_t model(fan_dtype d, const uint64_t *codes, size_t n, fan_dtype to)
{
    format f = format_of(d);
    format g = format_of(to);
    uint64_t sign = UINT64_C(1) << (width_of(d) - 1);
    uint64_t out = UINT64_C(1) << (width_of(to) - 1);
    bool plus = false;
    bool minus = false;
    bool none = false;
    bool all_minus_zero = true;
    whole w = {{0}};
    int base = f.unit > g.unit ? f.unit : g.unit;
    for (size_t k = 0; k < n; k++) {
        uint64_t a = codes[k] & (sign - 1);
        all_minus_zero &= codes[k] == sign;
        if (a == f.over && f.over != f.none)
            *(codes[k] & sign ? &minus : &plus) = true;
        else if (a > f.last)
            none = true;
        else
            whole_add_code(&w, base, d, a, codes[k] & sign);
    }
    if (none || (plus && minus))
        return g.none;
    if (plus || minus)
        return g.over == g.none ? g.none : g.over | (minus ? out : 0);
    int s = whole_sign(&w);
    if (s == 0)
        return all_minus_zero ? out : 0;
    if (s < 0)
        whole_negate(&w);
    uint64_t code = nearest(&w, base, to);
    return code == g.none ? code : code | (s < 0 ? out : 0);
}

/* ---- hostile terms ---- */

/* tie: term k of a tie: its exponent and bits. The first is anywhere (`at`), the second half of its
 * last bit, of its own dtype or of a narrower one; others lie just out of a float64's reach, or
 * anywhere below. false: a zero,
 * rather. */
static bool tie(const format *f, uint64_t *codes, size_t k, uint64_t *at, uint64_t *e, uint64_t *m)
{
    uint64_t mant = (uint64_t)f->mant;
    uint64_t top = f->last >> f->mant;
    if (k == 0) {
        *e = *at =
            mant + 2 < top ? mant + 2 + (uint64_t)random_below((int64_t)(top - mant - 2)) : top;
    } else if (k == 1) {
        uint64_t gap = random_below(2) ? mant + 1 : random_below(2) ? 24 : 8;
        *e = *at > gap ? *at - gap : 0;
        *m = 0;
        codes[0] = gap <= mant ? codes[0] >> (mant - gap + 1) << (mant - gap + 1) : codes[0];
    } else if (random_below(2)) {
        uint64_t near = 2 * mant + (uint64_t)random_below(12);
        *e = random_below(2) && *at > near ? *at - near
                                           : (uint64_t)random_below((int64_t)*at + 1) / 3;
        *m = random_below(2) ? *m : 0;
    } else {
        return false;
    }
    return true;
}

/* hostile: n terms of one element. */
static void hostile(fan_dtype d, uint64_t *codes, size_t n, int way)
{
    format f = format_of(d);
    uint64_t sign = UINT64_C(1) << (width_of(d) - 1);
    uint64_t top = f.last >> f.mant;
    uint64_t middle = (uint64_t)random_below((int64_t)top + 1);
    uint64_t at = 0;
    for (size_t k = 0; k < n; k++) {
        uint64_t m = random_bits() & ((UINT64_C(1) << f.mant) - 1);
        uint64_t e = (uint64_t)random_below((int64_t)top + 1);
        switch (way) {
        case 0: /* any exponent */ break;
        case 1: /* near one another */
            e = middle > 3 ? middle - (uint64_t)random_below(4) : middle;
            break;
        case 2: /* pairs that cancel, and something small */
            if (k % 3 == 1) {
                codes[k] = codes[k - 1] ^ sign;
                continue;
            }
            e = k % 3 == 2 ? (uint64_t)random_below((int64_t)middle + 1) : e;
            break;
        case 3: /* a tie, and something far below it */
            if (!tie(&f, codes, k, &at, &e, &m)) {
                codes[k] = random_below(2) ? sign : 0;
                continue;
            }
            break;
        case 4: /* subnormal, zero, or next to it */
            e = (uint64_t)random_below(3) / 2;
            m = random_below(3) ? m : 0;
            break;
        case 5: /* zeros */
            codes[k] = random_below(4) ? sign : random_below(8) ? sign : 0;
            continue;
        case 6: /* the largest, which must not overflow on the way */
            codes[k] = (f.last - (uint64_t)random_below(3)) | (k % 2 ? sign : 0);
            if (random_below(4) == 0)
                codes[k] ^= sign;
            continue;
        default: /* what is no number, now and then */
            if (random_below((int64_t)n + 2) == 0) {
                codes[k] = random_below(3) ? f.over | (random_below(2) ? sign : 0) : f.none;
                continue;
            }
            break;
        }
        e = e > top ? top : e;
        codes[k] = e << f.mant | m | (random_below(2) ? sign : 0);
        if ((codes[k] & (sign - 1)) > f.last)
            codes[k] = f.last | (codes[k] & sign);
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

static void terms_make(terms *t, fan_dtype d, size_t n, size_t size, int way)
{
    int64_t shape[2] = {(int64_t)size, 2};
    *t = (terms){.d = d, .n = n, .size = size, .codes = malloc(n * size * sizeof *t->codes)};
    for (size_t i = 0; i < size; i++)
        hostile(d, t->codes + i * n, n, way < 0 ? (int)random_below(8) : way);
    for (size_t k = 0; k < n; k++) {
        /* with gaps now and then */
        fan_array *whole_one = NULL;
        bool gaps = random_below(4) == 0;
        CHECK_OK(fan_array_new(d, gaps ? 2 : 1, shape, NULL, &whole_one, NULL));
        t->array[k] = whole_one;
        if (gaps) {
            CHECK_OK(fan_array_view(whole_one->storage, whole_one->data, d, 1, shape,
                                    whole_one->strides, true, &t->array[k], NULL));
            fan_array_drop(whole_one);
        }
    }
    for (size_t i = 0; i < size; i++)
        for (size_t k = 0; k < n; k++)
            store(t->array[k]->data + (int64_t)i * t->array[k]->strides[0], d, t->codes[i * n + k]);
}

static void terms_free(terms *t)
{
    for (size_t k = 0; k < t->n; k++)
        fan_array_drop(t->array[k]);
    free(t->codes);
}

static bool same_code(fan_dtype d, uint64_t got, uint64_t want)
{
    format f = format_of(d);
    uint64_t a = got & ((UINT64_C(1) << (width_of(d) - 1)) - 1);
    bool none = a > f.last && (a != f.over || f.over == f.none);
    return want == f.none ? none : got == want;
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

/* check_terms: every vector unit, another order, and trees of windows give what the model does. */
static void check_terms(terms *t, fan_dtype to, const char *what, bool planted)
{
    int64_t size = (int64_t)t->size;
    fan_array *out[8];
    int outs = 0;
    for (int isa = 0; isa < 3; isa++) {
        if (isa && fan_exact_isa(isa) != isa)
            continue;
        CHECK_INT(fan_exact_isa(isa), isa);
        CHECK_OK(fan_array_new(to, 1, &size, NULL, &out[outs], NULL));
        fan_exact_sum(out[outs++], (const fan_array *const *)t->array, t->n, t->d, NULL);
        fan_window *w = window_of(t->array, t->n, t->d, size);
        CHECK_OK(fan_array_new(to, 1, &size, NULL, &out[outs], NULL));
        fan_window_round(out[outs++], w, NULL);
        fan_window_free(w);
    }
    fan_exact_isa(-1);
    shuffle(t->array, t->n);
    CHECK_OK(fan_array_new(to, 1, &size, NULL, &out[outs], NULL));
    fan_exact_sum(out[outs++], (const fan_array *const *)t->array, t->n, t->d, NULL);
    int64_t shown = 0;
    for (size_t i = 0; i < t->size; i++) {
        uint64_t want = model(t->d, t->codes + i * t->n, t->n, to);
        for (int o = 0; o < outs; o++) {
            uint64_t got = load(out[o]->data + (int64_t)i * out[o]->strides[0], to);
            looked_at++;
            if (same_code(to, got, want))
                continue;
            wrong++;
            if (planted || shown++ > 2)
                continue;
            CHECK(same_code(to, got, want));
            fprintf(stderr,
                    "    %s: out %d: element %zu, %zu terms of %s into %s: got %llx, want %llx:",
                    what, o, i, t->n, fan_dtype_name(t->d), fan_dtype_name(to),
                    (unsigned long long)got, (unsigned long long)want);
            for (size_t k = 0; k < t->n && k < 9; k++)
                fprintf(stderr, " %llx", (unsigned long long)t->codes[i * t->n + k]);
            fprintf(stderr, "\n");
        }
    }
    if (!planted)
        CHECK_INT(shown, 0);
    for (int o = 0; o < outs; o++)
        fan_array_drop(out[o]);
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
            size_t n =
                round % 16 == 0 ? 1 + (size_t)random_below(200) : 1 + (size_t)random_below(12);
            size_t size = round % 16 == 0 ? 200 : 4000;
            terms t;
            terms_make(&t, reals[r], n, size, round % 3 == 0 ? -1 : round % 8);
            check_terms(&t, random_below(2) ? reals[r] : reals[random_below(REALS)], "random",
                        false);
            terms_free(&t);
            left -= (int)size;
        }
    }
}

static void thousands_of_terms(void)
{
    static const size_t counts[] = {511, 1024, 4095, 4096};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int way = 0; way < 8; way++) {
            terms t;
            terms_make(&t, reals[(c + (size_t)way) % REALS], counts[c], 24, way);
            check_terms(&t, t.d, "thousands", false);
            terms_free(&t);
        }
}

/* All orders of five terms: one hash. */
static void every_order_of_five(void)
{
    for (int r = 0; r < REALS; r++) {
        int64_t size = 700;
        int64_t orders = 0;
        terms t;
        fan_array *out;
        terms_make(&t, reals[r], 5, (size_t)size, -1);
        CHECK_OK(fan_array_new(t.d, 1, &size, NULL, &out, NULL));
        uint64_t hash = 0;
        for (int p = 0; p < 3125; p++) {
            const fan_array *in[5];
            int digits[5];
            int seen = 0;
            int rest = p;
            for (int k = 0; k < 5; k++, rest /= 5) {
                digits[k] = rest % 5;
                seen |= 1 << digits[k];
                in[k] = t.array[digits[k]];
            }
            if (seen != 31)
                continue;
            fan_exact_sum(out, in, 5, t.d, NULL);
            for (int64_t i = 0; i < size; i++) { /* a NaN is a NaN */
                uint64_t code = load(out->data + i * out->strides[0], t.d);
                if (same_code(t.d, code, format_of(t.d).none))
                    store(out->data + i * out->strides[0], t.d, format_of(t.d).none);
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
    const fan_array *in[16];
    fan_array *made[16], *out;
    double got = 0;
    for (size_t k = 0; k < n; k++) {
        CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 0, NULL, NULL, &made[k], NULL));
        memcpy(made[k]->data, &x[k], sizeof x[k]);
        in[k] = made[k];
    }
    CHECK_OK(fan_array_new(to, 0, NULL, NULL, &out, NULL));
    fan_exact_sum(out, in, n, FAN_DT_FLOAT32, scale);
    fan_convert((char *)&got, FAN_DT_FLOAT64, 8, out->data, to, 8, 1);
    for (size_t k = 0; k < n; k++)
        fan_array_drop(made[k]);
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
        hostile(FAN_DT_FLOAT32, codes, n, (int)random_below(5));
        for (size_t k = 0; k < n; k++) {
            uint32_t u = (uint32_t)codes[k];
            memcpy(&x[k], &u, 4);
        }
        float got = (float)sum_of(x, n, FAN_DT_FLOAT32, &scale);
        double whole_sum = sum_of(x, n, FAN_DT_FLOAT64, NULL);
        if (!isfinite(by) || by == 0 || whole_sum == 0) {
            /* the sign of a sum that rounds to zero is the exact one's */
            float want = (float)(whole_sum * by);
            CHECK(isnan(want) ? isnan(got) : memcmp(&want, &got, 4) == 0);
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
        for (size_t k = 0; k < n; k++) {
            uint64_t a = codes[k] & 0x7fffffffu;
            uint64_t mant = a & 0x7fffffu;
            uint64_t field = a >> 23;
            if (field)
                mant |= 0x800000u;
            unsigned __int128 p = (unsigned __int128)mant * (uint64_t)(m < 0 ? -m : m);
            bool minus = (codes[k] >> 31 & 1) ^ (m < 0);
            whole_add(&w, (uint64_t)p, (int)(field ? field - 1 : 0), minus);
            whole_add(&w, (uint64_t)(p >> 64), (int)(field ? field - 1 : 0) + 64, minus);
        }
        int s = whole_sign(&w);
        if (s < 0)
            whole_negate(&w);
        uint32_t had;
        uint32_t want = (uint32_t)nearest(&w, base, FAN_DT_FLOAT32) | (s < 0 ? 0x80000000u : 0);
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
    fan_array *in[6], *part[6], *out, *re, *wide_out;
    for (int k = 0; k < 6; k++) {
        CHECK_OK(fan_array_new(FAN_DT_COMPLEX64, 1, &size, NULL, &in[k], NULL));
        for (int64_t i = 0; i < 2 * size; i++) {
            uint64_t code[1];
            hostile(FAN_DT_FLOAT32, code, 1, (int)random_below(5));
            store(in[k]->data + 4 * i, FAN_DT_FLOAT32, code[0]);
        }
    }
    CHECK_OK(fan_array_new(FAN_DT_COMPLEX64, 1, &size, NULL, &out, NULL));
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, &size, NULL, &re, NULL));
    CHECK_OK(fan_array_new(FAN_DT_COMPLEX64, 1, &size, NULL, &wide_out, NULL));
    fan_exact_sum(out, (const fan_array *const *)in, 6, FAN_DT_COMPLEX64, NULL);
    for (int which = 0; which < 2; which++) {
        for (int k = 0; k < 6; k++)
            CHECK_OK(fan_array_view(in[k]->storage, in[k]->data + 4 * which, FAN_DT_FLOAT32, 1,
                                    &size, in[k]->strides, true, &part[k], NULL));
        fan_exact_sum(re, (const fan_array *const *)part, 6, FAN_DT_FLOAT32, NULL);
        for (int64_t i = 0; i < size; i++)
            CHECK(load(re->data + 4 * i, FAN_DT_FLOAT32) ==
                  load(out->data + 8 * i + 4 * which, FAN_DT_FLOAT32));
        for (int k = 0; k < 6; k++)
            fan_array_drop(part[k]);
    }
    for (int k = 0; k < 3; k++)
        CHECK_OK(fan_array_view(in[k]->storage, in[k]->data, FAN_DT_FLOAT32, 1, &size,
                                in[k]->strides, true, &part[k], NULL));
    fan_window *wide;
    fan_window *narrow = fan_window_new(FAN_DT_FLOAT32, size);
    CHECK_OK(fan_window_add(narrow, (const fan_array *const *)part, 3, NULL));
    wide = fan_window_copy(narrow, FAN_DT_COMPLEX64);
    CHECK_OK(fan_window_add(wide, (const fan_array *const *)in + 3, 3, NULL));
    fan_window_round(wide_out, wide, NULL);
    for (int64_t i = 0; i < size; i++)
        CHECK(load(wide_out->data + 8 * i, FAN_DT_FLOAT32) ==
              load(out->data + 8 * i, FAN_DT_FLOAT32));
    for (int k = 0; k < 6; k++) {
        fan_array_drop(in[k]);
        if (k < 3)
            fan_array_drop(part[k]);
    }
    fan_window_free(narrow);
    fan_window_free(wide);
    fan_array_drop(out);
    fan_array_drop(re);
    fan_array_drop(wide_out);
}

/* float16 into float32, bfloat16 into float64, by way of windows */
static void windows_widen_without_loss(void)
{
    static const fan_dtype from[] = {FAN_DT_FLOAT16, FAN_DT_BFLOAT16, FAN_DT_FLOAT8_E5M2,
                                     FAN_DT_FLOAT32};
    static const fan_dtype to[] = {FAN_DT_FLOAT32, FAN_DT_FLOAT64, FAN_DT_FLOAT16, FAN_DT_FLOAT64};
    for (int r = 0; r < 4; r++) {
        terms t;
        terms_make(&t, from[r], 7, 400, -1);
        int64_t size = 400;
        fan_array *out;
        fan_window *wide;
        fan_window *narrow = fan_window_new(from[r], size);
        CHECK_OK(fan_window_add(narrow, (const fan_array *const *)t.array, 4, NULL));
        wide = fan_window_copy(narrow, to[r]);
        CHECK_OK(fan_window_add(wide, (const fan_array *const *)t.array + 4, 3, NULL));
        CHECK_OK(fan_array_new(to[r], 1, &size, NULL, &out, NULL));
        fan_window_round(out, wide, NULL);
        for (int64_t i = 0; i < size; i++)
            CHECK(same_code(to[r], load(out->data + i * out->strides[0], to[r]),
                            model(from[r], t.codes + i * 7, 7, to[r])));
        fan_array_drop(out);
        fan_window_free(narrow);
        fan_window_free(wide);
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
        fan_array *in[10], *fresh, *other;
        for (int i = 0; i < ndim; i++)
            shape[i] = 1 + random_below(random_below(4) ? 6 : 150);
        for (size_t k = 0; k < n; k++)
            in[k] = random_view(d, ndim, shape, k != at);
        for (int64_t i = 0; i < in[at]->size; i++)
            random_element(d, element(in[at], i));
        fresh = random_view(d, ndim, shape, false);
        other = random_view(d, ndim, shape, false);
        fan_exact_sum(fresh, (const fan_array *const *)in, n, d, NULL);
        fan_window *sum = fan_window_new(d, fresh->size);
        CHECK_OK(fan_window_add(sum, (const fan_array *const *)in, n, NULL));
        fan_window_round(other, sum, NULL);
        fan_window_free(sum);
        fan_exact_sum(in[at], (const fan_array *const *)in, n, d, NULL);
        for (int64_t i = 0; i < fresh->size; i++) {
            CHECK(same_number(get(fresh, i), get(in[at], i)));
            CHECK(same_number(get(fresh, i), get(other, i)));
        }
        for (size_t k = 0; k < n; k++)
            fan_array_drop(in[k]);
        fan_array_drop(fresh);
        fan_array_drop(other);
    }
}

/* Another dtype than the sum's is rounded to it first: as D1 says of every term. */
static void terms_of_another_dtype(fan_dtype d)
{
    int64_t size = 50;
    fan_array *others, *lows, *rounded, *out[2];
    CHECK_OK(fan_array_new(d, 1, &size, NULL, &others, NULL));
    CHECK_OK(fan_array_new(FAN_DT_BFLOAT16, 1, &size, NULL, &lows, NULL));
    CHECK_OK(fan_array_new(FAN_DT_BFLOAT16, 1, &size, NULL, &rounded, NULL));
    for (int64_t i = 0; i < size; i++) {
        int32_t x = d == FAN_DT_INT32 ? (int32_t)(random_below(1 << 20) - (1 << 19))
                                      /* a half from 1 to 2 */
                                      : 0x3c00 + (int32_t)random_below(1 << 10);
        memcpy(others->data + others->strides[0] * i, &x, fan_dtype_size(d));
        random_element(FAN_DT_BFLOAT16, element(lows, i));
    }
    fan_array_copy(rounded, others);
    for (int o = 0; o < 2; o++)
        CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, &size, NULL, &out[o], NULL));
    for (size_t n = 1; n <= 2; n++) {
        fan_exact_sum(out[0], (const fan_array *[]){others, lows}, n, FAN_DT_BFLOAT16, NULL);
        fan_exact_sum(out[1], (const fan_array *[]){rounded, lows}, n, FAN_DT_BFLOAT16, NULL);
        for (int64_t i = 0; i < size; i++)
            CHECK(same_number(get(out[0], i), get(out[1], i)));
    }
    fan_array_drop(others);
    fan_array_drop(lows);
    fan_array_drop(rounded);
    fan_array_drop(out[0]);
    fan_array_drop(out[1]);
}

/* A fault planted in the sums is found by what is above. */
static void planted_faults_are_found(void)
{
    static const fan_fault_id faults[] = {FAN_FAULT_EXACT_NO_INTEGER_PATH, FAN_FAULT_EXACT_NO_ODD,
                                          FAN_FAULT_EXACT_NO_RANGE};
    for (int f = 0; f < 3; f++) {
        for (int r = 0; r < 2; r++) {
            int64_t before = wrong;
            fan_fault_plant(faults[f]);
            for (int round = 0; round < 16; round++) {
                terms t;
                terms_make(&t, r ? FAN_DT_FLOAT64 : FAN_DT_FLOAT32, 5, 2000, round % 8);
                check_terms(&t, r && round < 8 ? FAN_DT_FLOAT64 : FAN_DT_FLOAT32, "planted", true);
                terms_free(&t);
            }
            fan_fault_plant(FAN_FAULT_NONE);
            if (!CHECK(wrong > before))
                fprintf(stderr, "    planted fault %d is not found in %s\n", faults[f],
                        r ? "float64" : "float32");
        }
    }
}

int main(int argc, char **argv)
{
    int64_t live = fan_mem_get().live;
    double share = check_is_full(argc, argv) ? 1 : 0.05;
    CHECK(fan_exact_fits(FAN_DT_FLOAT32) && fan_exact_fits(FAN_DT_COMPLEX64) &&
          !fan_exact_fits(FAN_DT_INT32) && !fan_exact_fits(FAN_DT_BOOL));
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
