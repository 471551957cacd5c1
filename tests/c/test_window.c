/* Window sums against exact folds (which test_exact.c checks against whole numbers): random blocks
 * of every range of exponents, trees of merges and messages; their memory; what fails. */
#include "array/convert.h"
#include "array/exact.h"
#include "array/exact_loops.h"
#include "base/fault.h"
#include "base/mem.h"
#include "windows.h"

static const fan_dtype dtypes[] = {FAN_DT_FLOAT32,    FAN_DT_FLOAT64,      FAN_DT_BFLOAT16,
                                   FAN_DT_FLOAT16,    FAN_DT_FLOAT8_E5M2,  FAN_DT_COMPLEX64,
                                   FAN_DT_COMPLEX128, FAN_DT_FLOAT8_E4M3FN};
#define DTYPES 8

static size_t numbers_of(fan_dtype d)
{
    return 1 + (size_t)is_complex(d);
}

/* part_of: the dtype of the parts of a complex dtype; another dtype is its own. */
static fan_dtype part_of(fan_dtype d)
{
    if (d == FAN_DT_COMPLEX64)
        return FAN_DT_FLOAT32;
    return d == FAN_DT_COMPLEX128 ? FAN_DT_FLOAT64 : d;
}

/* How the numbers of a block are drawn: exponents in [top - range, top]. */
typedef struct recipe {
    int top, range;
    bool special, zeros;
} recipe;

static double drawn(const recipe *r)
{
    if (r->special && one_in(400)) {
        if (one_in(3))
            return NAN;
        return random_below(2) ? INFINITY : -INFINITY;
    }
    if (r->zeros && random_below(3))
        return random_below(2) ? 0.0 : -0.0;
    double m = 1 + (double)(random_bits() >> 12) * 0x1p-52;
    if (one_in(3))
        m = 1 + (double)random_below(4) / 4; /* few digits */
    if (one_in(2))
        m = -m;
    return ldexp(m, r->top - (int)random_below(r->range + 1));
}

/* fill: draws every number, rounded by the conversions of the library, which have tests of their
 * own. */
static void fill(fan_array *to, fan_dtype d, const recipe *r)
{
    int64_t n = to->size * (int64_t)numbers_of(d);
    double *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = drawn(r);
    fan_convert(to->data, part_of(d), (int64_t)fan_dtype_size(part_of(d)), (const char *)x,
                FAN_DT_FLOAT64, 8, n);
    free(x);
}

static bool same_bits(const fan_array *a, const fan_array *b)
{
    fan_dtype d = part_of(a->dtype);
    size_t each = fan_dtype_size(d);
    size_t n = (size_t)a->size * numbers_of(a->dtype);
    for (size_t i = 0; i < n; i++) {
        const char *x = a->data + i * each;
        const char *y = b->data + i * each;
        double u, v;
        fan_convert((char *)&u, FAN_DT_FLOAT64, 8, x, d, (int64_t)each, 1);
        fan_convert((char *)&v, FAN_DT_FLOAT64, 8, y, d, (int64_t)each, 1);
        bool both_nan = isnan(u) && isnan(v);
        if (memcmp(x, y, each) && !both_nan)
            return false;
    }
    return true;
}

/* filled: an array of numbers that are drawn by a recipe. */
static fan_array *filled(fan_dtype d, int64_t size, const recipe *r)
{
    fan_array *a = array_of(d, size);
    fill(a, d, r);
    return a;
}

static void add_one(fan_window *w, const fan_array *a)
{
    CHECK_OK(fan_window_add(w, &a, 1, NULL));
}

static int64_t wrong, checked;

static void check_round(fan_array **in, size_t n, fan_dtype d, fan_dtype to, const fan_scale *scale)
{
    fan_array *a = array_of(to, in[0]->size);
    fan_array *b = array_of(to, in[0]->size);
    fan_window *w = window_of(in, n, d, in[0]->size);
    fan_operand terms[64];
    for (size_t k = 0; k < n; k++)
        terms[k] = (fan_operand){.array = in[k], .acc = d};
    fan_exact_fold(a, terms, n, d, scale);
    fan_window_round(b, w, scale);
    checked++;
    wrong += !same_bits(a, b);
    fan_window_free(w);
    fan_array_drop(a);
    fan_array_drop(b);
}

static int random_top(fan_dtype d)
{
    bool high = random_below(2);
    if (d == FAN_DT_FLOAT64)
        return high ? 1023 : -1000;
    return high ? 127 : -100;
}

static fan_dtype random_real(void)
{
    return part_of(dtypes[random_below(DTYPES)]);
}

/* check_random: the sum of random blocks of dtype d; returns how many there were. */
static int64_t check_random(fan_dtype d)
{
    static const int ranges[] = {0, 4, 20, 34, 60, 100, 140};
    fan_dtype to = d;
    if (!is_complex(d))
        to = random_real();
    size_t n = 1 + (size_t)random_below(one_in(8) ? 60 : 12);
    int64_t size = 1 + random_below(700);
    recipe r = {.top = (int)random_below(40) - 20};
    r.range = ranges[random_below(7)];
    r.special = one_in(6);
    r.zeros = one_in(4);
    if (one_in(8))
        r.top = random_top(d);
    fan_array *in[64];
    for (size_t i = 0; i < n; i++) {
        recipe own = r;
        own.top -= (int)random_below(8);
        fan_dtype from = d;
        if (one_in(12) && !is_complex(d))
            from = random_real();
        in[i] = filled(from, size, &own);
    }
    fan_exact_isa((int)random_below(3));
    fan_scale scale = {.on = true, .re = random_below(2) ? 0.125 : 1.0 / 3};
    if (is_complex(d) && one_in(3))
        scale.im = -2;
    check_round(in, n, d, to, random_below(2) ? &scale : NULL);
    fan_exact_isa(-1);
    drop_arrays(in, n);
    return (size * (int64_t)numbers_of(d) - 1) / FAN_WINDOW_BLOCK + 1;
}

/* random_blocks: at least `blocks` of each dtype, or of one. */
static void random_blocks(int64_t blocks, int only)
{
    for (int which = 0; which < DTYPES; which++) {
        int64_t seen = 0;
        if (only >= 0 && which != only)
            continue;
        while (seen < blocks)
            seen += check_random(dtypes[which]);
        printf("%s: %lld blocks\n", fan_dtype_name(dtypes[which]), (long long)seen);
        CHECK(seen >= blocks);
    }
    printf("%lld sums, %lld wrong\n", (long long)checked, (long long)wrong);
    CHECK_INT(wrong, 0);
}

/* check_damaged: a message that was cut, has more, or was damaged is refused, or at least does no
 * harm. */
static void check_damaged(fan_window *other, char *message, size_t bytes, size_t damaged)
{
    size_t used = 0;
    fan_error err = {FAN_OK};
    for (size_t cut = 1; cut < damaged; cut++)
        CHECK_INT(fan_window_merge_packed(other, message, bytes - cut, &used, &err), FAN_ERR_VALUE);
    CHECK_HAS(err.text, "not a message of window sums");
    CHECK_INT(fan_window_merge_packed(other, message + 1, bytes - 1, &used, &err), FAN_ERR_VALUE);
}

/* A block of 64 bits: 8 bytes a number in memory, about 6 in a message; zeros cost nothing in
 * one. */
static void memory_is_as_promised(size_t damaged)
{
    int64_t size = 1 << 16;
    fan_array *a = array_of(FAN_DT_FLOAT32, size);
    recipe r = {.top = 0, .range = 8};
    fan_window *w = fan_window_new(FAN_DT_FLOAT32, size);
    fan_window *other = fan_window_new(FAN_DT_FLOAT32, size);
    for (int k = 0; k < 8; k++) {
        fill(a, FAN_DT_FLOAT32, &r);
        add_one(w, a);
    }
    CHECK(fan_window_bytes(w) <= (size_t)size * 8 + (size_t)size / 8 + 200);
    char *to = malloc(fan_window_room(w));
    size_t bytes = fan_window_pack(w, to);
    printf("message: %.2f bytes an element\n", (double)bytes / (double)size);
    CHECK(bytes <= (size_t)size * 6);
    size_t used = 0;
    CHECK_OK(fan_window_merge_packed(other, to, bytes, &used, NULL));
    check_damaged(other, to, bytes, damaged);
    fan_array *one = array_of(FAN_DT_FLOAT32, size);
    fan_array *two = array_of(FAN_DT_FLOAT32, size);
    fan_window_round(one, w, NULL);
    fan_window_round(two, other, NULL);
    CHECK(same_bits(one, two)); /* refused messages left nothing */
    int64_t reach = smaller((int64_t)bytes, 20000);
    for (size_t k = 0; k < damaged; k++) {
        size_t at = (size_t)random_below(reach);
        char old = to[at];
        to[at] = (char)random_bits();
        (void)fan_window_merge_packed(other, to, bytes, &used, NULL);
        to[at] = old;
    }
    fan_window_round(two, other, NULL);
    memset(a->data, 0, (size_t)size * 4);
    fan_window *zeros = fan_window_new(FAN_DT_FLOAT32, size);
    add_one(zeros, a);
    CHECK_INT(fan_window_pack(zeros, to), size / FAN_WINDOW_BLOCK * 8);
    fan_window_free(zeros);
    fan_window_free(w);
    fan_window_free(other);
    drop_arrays((fan_array *[]){a, one, two}, 3);
    free(to);
}

/* The ways in which numbers come into a window. */
typedef enum entry {
    ADDED,
    MERGED,
    MERGED_PACKED
} entry;

/* Whatever allocation fails: the sum is what it was, and the addition can be repeated. */
static void failures_lose_nothing(entry how)
{
    int64_t size = 2000;
    int64_t skip = 0;
    fan_array *got = array_of(FAN_DT_FLOAT32, size);
    fan_array *want = array_of(FAN_DT_FLOAT32, size);
    fan_array *a = filled(FAN_DT_FLOAT32, size, &(recipe){.top = 0, .range = 10});
    fan_array *b = filled(FAN_DT_FLOAT32, size, &(recipe){.top = 0, .range = 70});
    const fan_array *both[] = {a, b};
    fan_window *w = fan_window_new(FAN_DT_FLOAT32, size);
    fan_window *other = fan_window_new(FAN_DT_FLOAT32, size);
    add_one(w, a);
    add_one(other, b);
    void *bytes = malloc(fan_window_room(other));
    size_t used;
    size_t length = fan_window_pack(other, bytes);
    for (fan_status status = FAN_ERR_NOMEM; status != FAN_OK; skip++) {
        fan_mem_fail_at(skip, 1);
        if (how == ADDED) {
            status = fan_window_add(w, both + 1, 1, NULL);
        } else if (how == MERGED) {
            status = fan_window_merge(w, other, NULL);
        } else {
            status = fan_window_merge_packed(w, bytes, length, &used, NULL);
        }
        fan_mem_fail_at(-1, 0);
        fan_window_round(got, w, NULL);
        if (status != FAN_OK) {
            CHECK_INT(status, FAN_ERR_NOMEM);
            CHECK(same_bits(got, a));
        }
    }
    CHECK(skip > 3);
    fan_exact_sum(want, both, 2, FAN_DT_FLOAT32, NULL);
    CHECK(same_bits(got, want));
    fan_window_free(w);
    fan_window_free(other);
    free(bytes);
    drop_arrays((fan_array *[]){a, b, got, want}, 4);
}

/* A copy in a dtype that contains its own is the same sum. */
static void copies_widen_without_loss(fan_dtype from, fan_dtype to)
{
    static const int ranges[] = {8, 60, 120};
    for (int i = 0; i < 3; i++) {
        int64_t size = 1000;
        recipe r = {.top = 3, .range = ranges[i], .special = i == 1, .zeros = true};
        fan_array *a[4];
        fan_array *x = array_of(to, size);
        fan_array *y = array_of(to, size);
        fan_operand terms[4];
        for (int t = 0; t < 4; t++) {
            a[t] = filled(t < 3 ? from : to, size, &r);
            terms[t] = (fan_operand){.array = a[t], .acc = to};
        }
        fan_window *w = window_of(a, 3, from, size);
        fan_window *wider = fan_window_copy(w, to);
        add_one(wider, a[3]);
        fan_window_round(x, wider, NULL);
        fan_exact_fold(y, terms, 4, to, NULL);
        CHECK(same_bits(x, y));
        fan_window_free(w);
        fan_window_free(wider);
        drop_arrays(a, 4);
        fan_array_drop(x);
        fan_array_drop(y);
    }
}

/* Elements by index, several times the same. */
static void elements_by_index(void)
{
    for (int k = 0; k < 60; k++) {
        fan_dtype d = dtypes[random_below(DTYPES)];
        int64_t at[900];
        int64_t size = 1 + random_below(600);
        int64_t n = 1 + random_below(900);
        recipe r = {.top = 2, .range = (int)random_below(90), .zeros = true};
        r.special = one_in(3);
        fan_array *values = filled(d, n, &r);
        fan_array *x = array_of(d, size);
        fan_array *y = array_of(d, size);
        size_t each = fan_dtype_size(d);
        fan_window *w = fan_window_new(d, size);
        fan_window *v = fan_window_new(d, size);
        for (int64_t i = 0; i < n; i++)
            at[i] = random_below(size);
        CHECK_OK(fan_window_add_at(w, values, at, NULL));
        for (int64_t i = 0; i < n; i++) { /* one at a time, as arrays of -0.0 but for one */
            fan_array *one = array_of(d, size);
            for (int64_t p = 0; p < size; p++)
                put_number(one, p, (number){0, -0.0, -0.0});
            memcpy(element(one, at[i]), values->data + (size_t)i * each, each);
            add_one(v, one);
            fan_array_drop(one);
        }
        fan_window_round(x, w, NULL);
        fan_window_round(y, v, NULL);
        CHECK(same_bits(x, y));
        fan_window_free(w);
        fan_window_free(v);
        drop_arrays((fan_array *[]){values, x, y}, 3);
    }
}

/* 2^20 terms: the bound grows, and is computed anew where it no longer fits. */
static void many_terms(int64_t terms)
{
    int64_t count[4];
    int64_t size = 256;
    fan_array *a = array_of(FAN_DT_FLOAT32, size);
    fan_array *out = array_of(FAN_DT_FLOAT64, size);
    float *x = (float *)(void *)a->data;
    for (int64_t i = 0; i < size; i++)
        x[i] = i % 2 ? 1.5f : 0x1p-30f * (float)(i + 1);
    fan_window *w = fan_window_new(FAN_DT_FLOAT32, size);
    for (int64_t k = 0; k < terms; k++) {
        add_one(w, a);
        for (int64_t i = 1; i < size; i += 2)
            x[i] = -x[i];
    }
    fan_window_round(out, w, NULL);
    for (int64_t i = 0; i < size; i++) {
        double sum = 0x1p-30 * (double)(terms * (i + 1));
        CHECK(get(out, i).re == (i % 2 ? 0.0 : sum));
    }
    fan_window_forms(w, count);
    CHECK_INT(count[1], 1);
    fan_window_free(w);
    fan_array_drop(a);
    fan_array_drop(out);
}

/* Words of 128 bits whose numbers have become small again: a sum of -0.0 alone keeps its sign. */
static void wide_words_keep_minus_zero(void)
{
    static const float first[] = {0x1p70f, 0x1p-20f, -0x1p70f, 0x1p-60f};
    int64_t count[4];
    int64_t size = 2;
    fan_array *a = array_of(FAN_DT_FLOAT32, size);
    fan_array *out = array_of(FAN_DT_FLOAT32, size);
    float *x = (float *)(void *)a->data;
    float *y = (float *)(void *)out->data;
    fan_window *w = fan_window_new(FAN_DT_FLOAT32, size);
    for (int k = 0; k < 4; k++) {
        x[0] = first[k];
        x[1] = -0.0f;
        add_one(w, a);
    }
    fan_window_forms(w, count);
    CHECK_INT(count[2], 1);
    fan_window_round(out, w, NULL);
    CHECK(y[0] == 0x1p-20f);
    CHECK(same_real((double)y[1], -0.0));
    fan_window_free(w);
    fan_array_drop(a);
    fan_array_drop(out);
}

static void a_planted_fault_is_found(void)
{
    int64_t size = 256;
    int differ = 0;
    recipe r = {.top = 0, .range = 44};
    fan_array *in[3];
    fan_array *x = array_of(FAN_DT_FLOAT32, size);
    fan_array *y = array_of(FAN_DT_FLOAT32, size);
    for (int k = 0; k < 3; k++) {
        in[k] = filled(FAN_DT_FLOAT32, size, &r);
    }
    fan_exact_sum(x, (const fan_array *const *)in, 3, FAN_DT_FLOAT32, NULL);
    for (int planted = 0; planted < 2; planted++) {
        fan_fault_plant(planted ? FAN_FAULT_WINDOW_NOT_WIDENED : FAN_FAULT_NONE);
        fan_window *w = fan_window_new(FAN_DT_FLOAT32, size);
        CHECK_OK(fan_window_add(w, (const fan_array *const *)in, 3, NULL));
        fan_fault_plant(FAN_FAULT_NONE);
        fan_window_round(y, w, NULL);
        differ += !same_bits(x, y);
        CHECK_INT(differ, planted);
        fan_window_free(w);
    }
    drop_arrays(in, 3);
    fan_array_drop(x);
    fan_array_drop(y);
}

int main(int argc, char **argv)
{
    static const fan_dtype widened[][2] = {
        {FAN_DT_FLOAT32, FAN_DT_FLOAT64},     {FAN_DT_FLOAT32, FAN_DT_COMPLEX64},
        {FAN_DT_BFLOAT16, FAN_DT_COMPLEX128}, {FAN_DT_COMPLEX64, FAN_DT_COMPLEX128},
        {FAN_DT_FLOAT64, FAN_DT_COMPLEX128},  {FAN_DT_FLOAT16, FAN_DT_FLOAT32},
        {FAN_DT_FLOAT32, FAN_DT_FLOAT32}};
    int64_t live = fan_mem_get().live;
    bool many = argc > 2;
    bool full = check_is_full(argc, argv);
    if (many) {
        random_blocks(atoll(argv[1]), atoi(argv[2]));
    } else {
        random_blocks(full ? 500 : 20, -1);
    }
    CHECK(windows_met() || many); /* a narrow dtype alone has no wide blocks */
    memory_is_as_promised(full ? 3000 : 400);
    for (entry how = ADDED; how <= MERGED_PACKED; how++)
        failures_lose_nothing(how);
    for (int k = 0; k < 7; k++)
        copies_widen_without_loss(widened[k][0], widened[k][1]);
    elements_by_index();
    many_terms(full ? 1 << 20 : 1 << 17);
    wide_words_keep_minus_zero();
    a_planted_fault_is_found();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
