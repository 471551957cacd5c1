/* Conversions against the oracle: every bit pattern of the low floats, every tie between two of
 * them, every pair of dtypes. */
#include "array/convert.h"

#include "check.h"
#include "oracle.h"

static const fan_dtype lows[] = {FAN_DT_FLOAT16, FAN_DT_BFLOAT16, FAN_DT_FLOAT8_E4M3FN,
                                 FAN_DT_FLOAT8_E5M2};

/* one: a single element of `from` as `to`. */
static number one(fan_dtype from, const void *p, fan_dtype to)
{
    char buf[16];
    memset(buf, 0x5a, sizeof buf);
    fan_convert(buf, to, 0, p, from, 0, 1);
    return load_number(to, buf);
}

/* round_to: the code of one number of dtype `from` in a low dtype. */
static uint32_t round_to(fan_dtype low, const void *x, fan_dtype from)
{
    uint16_t code = 0;
    fan_convert((char *)&code, low, 0, x, from, 0, 1);
    return code;
}

static uint32_t round_float(fan_dtype low, float x)
{
    return round_to(low, &x, FAN_DT_FLOAT32);
}

static uint32_t round_double(fan_dtype low, double x)
{
    return round_to(low, &x, FAN_DT_FLOAT64);
}

static bool same_code(fan_dtype low, uint32_t a, uint32_t b)
{
    return a == b || (isnan(decode_low(low, a)) && isnan(decode_low(low, b)));
}

static void every_pattern_goes_up_and_comes_back(fan_dtype low)
{
    uint32_t all = sign_bit(low) * 2;
    for (uint32_t code = 0; code < all; code++) {
        double x = decode_low(low, code);
        CHECK(same_real(one(low, &code, FAN_DT_FLOAT32).re, x));
        CHECK(same_real(one(low, &code, FAN_DT_FLOAT64).re, x));
        CHECK(same_code(low, round_float(low, (float)x), code));
        CHECK(same_code(low, round_double(low, x), code));
    }
}

/* Around each midpoint between two neighbours: the tie goes to the even one, the next numbers on
 * either side to their side. */
static void every_tie_goes_to_the_even(fan_dtype low)
{
    low_float f = low_of(low);
    for (uint32_t code = 0; code <= f.last; code++) {
        double tie = (decode_plain(f, code) + decode_plain(f, code + 1)) / 2;
        uint32_t up = code + 1 > f.last ? f.over : code + 1;
        uint32_t even = code % 2 ? up : code;
        for (int negative = 0; negative < 2; negative++) {
            uint32_t sign = negative ? sign_bit(low) : 0;
            double s = negative ? -1 : 1;
            CHECK_INT(round_double(low, s * tie), sign | even);
            CHECK_INT(round_double(low, s * nextafter(tie, 0)), sign | code);
            CHECK_INT(round_double(low, s * nextafter(tie, INFINITY)), sign | up);
            float t = (float)tie;
            if ((double)t != tie)
                continue; /* below half of bfloat16's smallest step there is no float32 */
            CHECK_INT(round_float(low, (float)s * t), sign | even);
            CHECK_INT(round_float(low, (float)s * nextafterf(t, 0)), sign | code);
            CHECK_INT(round_float(low, (float)s * nextafterf(t, INFINITY)), sign | up);
        }
    }
    CHECK(same_code(low, round_float(low, INFINITY), f.over));
    CHECK(same_code(low, round_float(low, -INFINITY), f.over | sign_bit(low)));
    CHECK(same_code(low, round_double(low, 1e300), f.over));
    CHECK(same_code(low, round_double(low, -1e-320), sign_bit(low)));
    CHECK(isnan(decode_low(low, round_float(low, NAN))));
    CHECK(isnan(decode_low(low, round_double(low, -NAN))));
}

static void random_floats_round_as_the_oracle(fan_dtype low)
{
    for (int i = 0; i < 60000; i++) {
        uint64_t bits = random_bits();
        float x;
        double y;
        memcpy(&x, &bits, 4);
        memcpy(&y, &bits, 8);
        CHECK(same_code(low, round_float(low, x), encode_low(low, (long double)x)));
        CHECK(same_code(low, round_double(low, y), encode_low(low, (long double)y)));
        /* near the low float's range */
        y = ldexp((double)(int64_t)bits, (int)random_below(300) - 213);
        CHECK(same_code(low, round_double(low, y), encode_low(low, (long double)y)));
    }
}

static uint64_t random_power(void)
{
    return (uint64_t)1 << random_below(64);
}

static void integers_round_once(void)
{
    static const fan_dtype to[] = {FAN_DT_FLOAT16,     FAN_DT_BFLOAT16,  FAN_DT_FLOAT8_E4M3FN,
                                   FAN_DT_FLOAT8_E5M2, FAN_DT_FLOAT32,   FAN_DT_FLOAT64,
                                   FAN_DT_COMPLEX64,   FAN_DT_COMPLEX128};
    for (int i = 0; i < 60000; i++) {
        uint64_t bits = random_bits() >> random_below(64);
        if (one_in(4)) { /* next to a power of two, where ties lie */
            bits &= (uint64_t)random_below(4);
            bits += random_power();
            bits += random_power();
        }
        for (size_t k = 0; k < sizeof to / sizeof to[0]; k++) {
            number x = {bits, 0, 0};
            number want_u = convert_number(FAN_DT_UINT64, x, to[k]);
            number want_i = convert_number(FAN_DT_INT64, x, to[k]);
            CHECK(same_number(one(FAN_DT_UINT64, &bits, to[k]), want_u));
            CHECK(same_number(one(FAN_DT_INT64, &bits, to[k]), want_i));
        }
    }
}

enum {
    MANY = 700
};

/* check_layout: a run of one pair of dtypes: bit 0 and 1: gaps in the source and the result; from 4
 * on long, 5 and 6 backwards, 7 one element again and again. */
static void check_layout(fan_dtype from, fan_dtype to, int layout)
{
    static char src[MANY * 40 + 64], dst[MANY * 40 + 64];
    int64_t size_to = (int64_t)fan_dtype_size(to);
    int64_t step_from = (int64_t)fan_dtype_size(from);
    int64_t step_to = size_to;
    int64_t n = MANY;
    if (layout & 1)
        step_from += random_below(20);
    if (layout & 2)
        step_to += random_below(20);
    if (layout < 4)
        n = 1 + random_below(20);
    char *s = src + random_below(16);
    char *d = dst + random_below(16);
    if (layout == 5) {
        s += (n - 1) * step_from;
        step_from = -step_from;
    } else if (layout == 6) {
        d += (n - 1) * step_to;
        step_to = -step_to;
    } else if (layout == 7) {
        step_from = 0;
    }
    memset(dst, 0x5a, sizeof dst);
    for (int64_t k = 0; k < n; k++)
        random_element(from, s + k * step_from);
    fan_convert(d, to, step_to, s, from, step_from, n);
    for (int64_t k = 0; k < n; k++) {
        number want = convert_number(from, load_number(from, s + k * step_from), to);
        if (!CHECK(same_number(load_number(to, d + k * step_to), want)))
            fprintf(stderr, "    %s to %s\n", fan_dtype_name(from), fan_dtype_name(to));
    }
    int64_t touched = 0;
    for (size_t k = 0; k < sizeof dst; k++)
        touched += dst[k] != 0x5a;
    CHECK(touched <= n * size_to);
}

/* Every pair of dtypes, gap-free and with steps of every sign, at every alignment, in runs longer
 * than the pieces inside. */
static void every_pair_equals_the_oracle(void)
{
    for (fan_dtype from = 0; from < FAN_DT_COUNT; from++) {
        for (fan_dtype to = 0; to < FAN_DT_COUNT; to++) {
            bool truncates = !is_whole(from) && is_whole(to); /* D6; a test of its own */
            for (int layout = 0; layout < 8 && !truncates; layout++)
                check_layout(from, to, layout);
        }
    }
    char none[8] = {0};
    fan_convert(none, FAN_DT_INT8, 1, none, FAN_DT_FLOAT64, 8, 0); /* nothing is nothing */
}

static void bool_bytes_are_true_when_not_zero(void)
{
    for (int b = 0; b < 256; b++) {
        uint8_t in = (uint8_t)b;
        uint8_t out = 0xee;
        int64_t whole = -1;
        fan_convert((char *)&out, FAN_DT_BOOL, 0, (const char *)&in, FAN_DT_BOOL, 0, 1);
        CHECK_INT(out, b != 0);
        fan_convert((char *)&whole, FAN_DT_INT64, 0, (const char *)&in, FAN_DT_BOOL, 0, 1);
        CHECK_INT(whole, b != 0);
    }
}

static void float_to_integer_is_defined(void)
{
    static const struct {
        double x;
        int64_t i64;
        uint64_t u64;
        int8_t i8;
    } cases[] = {
        {2.9, 2, 2, 2},
        {-2.9, -2, (uint64_t)-2, -2},
        {NAN, 0, 0, 0},
        {INFINITY, INT64_MAX, UINT64_MAX, -1},
        {-INFINITY, INT64_MIN, (uint64_t)1 << 63, 0},
        {1e19, INT64_MAX, 10000000000000000000u, -1},
        {300, 300, 300, 44},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double z[2] = {cases[i].x, 5};
        CHECK_INT(one(FAN_DT_FLOAT64, z, FAN_DT_INT64).whole, cases[i].i64);
        CHECK(one(FAN_DT_FLOAT64, z, FAN_DT_UINT64).whole == cases[i].u64);
        CHECK_INT((int8_t)one(FAN_DT_FLOAT64, z, FAN_DT_INT8).whole, cases[i].i8);
        CHECK_INT(one(FAN_DT_COMPLEX128, z, FAN_DT_INT64).whole, cases[i].i64);
        CHECK(same_real(one(FAN_DT_COMPLEX128, z, FAN_DT_FLOAT64).re, cases[i].x));
    }
}

int main(void)
{
    for (int i = 0; i < 4; i++) {
        every_pattern_goes_up_and_comes_back(lows[i]);
        every_tie_goes_to_the_even(lows[i]);
        random_floats_round_as_the_oracle(lows[i]);
    }
    integers_round_once();
    every_pair_equals_the_oracle();
    bool_bytes_are_true_when_not_zero();
    float_to_integer_is_defined();
    return check_done();
}
