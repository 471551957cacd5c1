/* Sums against the oracle: the left fold, element by element, in plain code. */
#include "array/sum.h"

#include "base/mem.h"
#include "check.h"
#include "oracle.h"

#define MOST 20

typedef struct sum {
    int ndim;
    int64_t shape[4];
    size_t n;
    fan_array *array[MOST];
    fan_operand in[MOST];
    fan_dtype dtype; /* the promotion of all */
    fan_scale scale;
} sum;

static void random_shape(sum *s)
{
    s->ndim = (int)random_below(5);
    for (int i = 0; i < s->ndim; i++)
        s->shape[i] = 1 + random_below(5);
    if (s->ndim && random_below(6) == 0)
        s->shape[random_below(s->ndim)] = s->ndim == 1 ? 1 + random_below(5000) : s->ndim < 4 ? 120 + random_below(200) : 5;
    if (s->ndim && random_below(40) == 0)
        s->shape[random_below(s->ndim)] = 0;
}

/* Operands of random dtypes that widen as D3 says; `own`: all of one dtype, added in that very dtype; `wish`: in a wider one. */
static void random_operands(sum *s, int kind)
{
    bool one_dtype = kind != 0;
    fan_dtype d = (fan_dtype)random_below(FAN_DTYPE_COUNT), acc = FAN_NO_DTYPE;
    s->dtype = d;
    s->n = 1 + (size_t)random_below(random_below(3) ? 4 : MOST);
    if (kind == 2 || kind == 3)
        acc = kind == 2 ? d : fan_dtype_promote(d, random_below(2) ? FAN_FLOAT64 : FAN_COMPLEX128);
    for (size_t k = 0; k < s->n; k++) {
        fan_dtype next = one_dtype ? d : (fan_dtype)random_below(FAN_DTYPE_COUNT);
        if (random_below(3) == 0 || fan_dtype_promote(s->dtype, next) == FAN_NO_DTYPE)
            next = s->dtype;
        s->dtype = fan_dtype_promote(s->dtype, next);
        s->in[k].acc = acc == FAN_NO_DTYPE ? fan_dtype_accumulate(s->dtype) : acc;
        if (k && random_below(8) == 0 && s->array[k - 1]->dtype == next) { /* the same array twice */
            s->array[k] = fan_array_hold(s->array[k - 1]);
        } else {
            s->array[k] = random_view(next, s->ndim, s->shape, true);
        }
        s->in[k].array = s->array[k];
    }
}

static void random_scale(sum *s)
{
    memset(&s->scale, 0, sizeof s->scale);
    s->scale.on = random_below(2);
    s->scale.re = (double)random_below(1000) / 128.0 - 3;
    s->scale.im = (double)random_below(1000) / 128.0 - 3;
    s->scale.i = random_below(2000) - 1000;
}

static number factor_of(const fan_scale *scale, fan_dtype d)
{
    number f = {(uint64_t)scale->i, scale->re, scale->im};
    char buf[16];
    store_number(d, f, buf);
    return load_number(d, buf);
}

/* fold: what element i of the sum must be, in the last accumulation dtype; *acc says which. */
static number fold(const sum *s, int64_t i, fan_dtype *acc)
{
    number x = {0, 0, 0};
    *acc = s->in[0].acc;
    for (size_t k = 0; k < s->n; k++) {
        fan_dtype to = s->in[k].acc;
        number next = convert_number(s->array[k]->dtype, get(s->array[k], i), to);
        x = k ? add_numbers(to, convert_number(*acc, x, to), next) : next;
        *acc = to;
    }
    return s->scale.on ? scale_number(*acc, x, factor_of(&s->scale, *acc)) : x;
}

static void tidy(number *x, fan_dtype d)
{
    if (!is_whole(d))
        x->whole = 0;
    if (!is_complex(d))
        x->im = 0;
}

static bool check_sum(const sum *s, const fan_array *out, const char *what)
{
    int64_t size = out->size;
    number *want = malloc(sizeof *want * (size_t)(size ? size : 1));
    bool good = true;
    for (int64_t i = 0; i < size; i++) {
        fan_dtype acc;
        want[i] = fold(s, i, &acc);
        want[i] = convert_number(acc, want[i], out->dtype);
        tidy(&want[i], out->dtype);
    }
    fan_sum(out, s->in, s->n, &(fan_sum_how){.scale = s->scale});
    for (int64_t i = 0; i < size; i++) {
        good &= same_number(get(out, i), want[i]);
        if (!CHECK(same_number(get(out, i), want[i]))) {
            fprintf(stderr, "    %s: element %lld of %lld, %zu operands into %s:", what, (long long)i, (long long)size, s->n,
                    fan_dtype_name(out->dtype));
            for (size_t k = 0; k < s->n; k++)
                fprintf(stderr, " %s/%s", fan_dtype_name(s->array[k]->dtype), fan_dtype_name(s->in[k].acc));
            fprintf(stderr, "\n");
            break;
        }
    }
    free(want);
    return good;
}

static void drop(sum *s)
{
    for (size_t k = 0; k < s->n; k++)
        fan_array_drop(s->array[k]);
}

static void sums_equal_the_left_fold(int kind, const char *what)
{
    for (int round = 0; round < 1200; round++) {
        sum s;
        random_shape(&s);
        random_operands(&s, kind);
        random_scale(&s);
        fan_dtype last = s.in[s.n - 1].acc, d = random_below(2) ? s.dtype : (fan_dtype)random_below(FAN_DTYPE_COUNT);
        if (!fan_dtype_can_cast(last, d))
            d = last;
        fan_array *out = random_view(d, s.ndim, s.shape, false);
        check_sum(&s, out, what);
        fan_array_drop(out);
        drop(&s);
    }
}

/* `out` is one of the operands, at every position; or the memory of one, seen as another dtype of the same width. */
static void in_place_at_every_position(void)
{
    int as_other = 0;
    for (int round = 0; round < 800; round++) {
        sum s;
        random_shape(&s);
        random_operands(&s, round % 4);
        random_scale(&s);
        fan_dtype last = s.in[s.n - 1].acc;
        size_t at = (size_t)random_below((int64_t)s.n);
        fan_array *mine = random_view(s.array[at]->dtype, s.ndim, s.shape, false), *out = NULL;
        for (size_t k = 0; k < s.n; k++) { /* perhaps the same view more than once */
            if (k == at || (s.array[k]->dtype == mine->dtype && random_below(6) == 0)) {
                fan_array_drop(s.array[k]);
                s.array[k] = fan_array_hold(mine);
                s.in[k].array = s.array[k];
            }
        }
        fan_dtype d = mine->dtype;
        for (int try = 0; try < 20; try++) {
            fan_dtype other = (fan_dtype)random_below(FAN_DTYPE_COUNT);
            if (fan_dtype_size(other) == fan_dtype_size(mine->dtype) && fan_dtype_can_cast(last, other))
                d = other;
        }
        if (!fan_dtype_can_cast(last, d)) {
            fan_array_drop(mine);
            drop(&s);
            continue;
        }
        as_other += d != mine->dtype;
        CHECK_OK(fan_array_view(mine->storage, mine->data, d, s.ndim, mine->shape, mine->strides, true, &out, NULL));
        check_sum(&s, out, "in place");
        fan_array_drop(out);
        fan_array_drop(mine);
        drop(&s);
    }
    CHECK(as_other > 100);
}

/* Every number of operands around the groups inside, and lengths around the tiles: gap-free float32, in place at each position too. */
static void every_count_and_length(void)
{
    static const int64_t lengths[] = {1, 2, 3, 7, 16, 17, 2047, 2048, 2049, 4096, 4099};
    for (size_t n = 1; n <= MOST; n++) {
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            for (size_t at = 0; at <= n; at++) {
                if (lengths[l] > 20 && at % 5 != 0 && at != n)
                    continue;
                sum s = {.ndim = 1, .shape = {lengths[l]}, .n = n, .dtype = FAN_FLOAT32};
                for (size_t k = 0; k < n; k++) {
                    CHECK_OK(fan_array_new(FAN_FLOAT32, 1, s.shape, NULL, &s.array[k], NULL));
                    for (int64_t i = 0; i < s.array[k]->size; i++)
                        random_element(FAN_FLOAT32, element(s.array[k], i));
                    s.in[k] = (fan_operand){s.array[k], FAN_FLOAT32};
                }
                fan_array *out = NULL;
                if (at < n)
                    out = fan_array_hold(s.array[at]);
                else
                    CHECK_OK(fan_array_new(FAN_FLOAT32, 1, s.shape, NULL, &out, NULL));
                check_sum(&s, out, "count and length");
                fan_array_drop(out);
                drop(&s);
            }
        }
    }
}

static void named_cases(void)
{
    /* one contribution alone is unchanged: -0.0 stays -0.0; nothing is added to the first */
    double minus = -0.0, got = 1, also = -0.0;
    fan_storage *st = fan_storage_new(64);
    double *memory = st->data;
    fan_array *a, *b, *out;
    memory[0] = minus;
    memory[1] = also;
    CHECK_OK(fan_array_view(st, (char *)memory, FAN_FLOAT64, 0, NULL, NULL, true, &a, NULL));
    CHECK_OK(fan_array_view(st, (char *)(memory + 1), FAN_FLOAT64, 0, NULL, NULL, true, &b, NULL));
    CHECK_OK(fan_array_view(st, (char *)(memory + 2), FAN_FLOAT64, 0, NULL, NULL, true, &out, NULL));
    fan_operand in[3] = {{a, FAN_FLOAT64}, {b, FAN_FLOAT64}, {a, FAN_FLOAT64}};
    for (size_t n = 1; n <= 3; n++) {
        fan_sum(out, in, n, NULL);
        got = memory[2];
        CHECK(got == 0 && signbit(got));
    }
    /* the order of a left fold: (1e16 + 1) + 1 loses both ones, (1 + 1) + 1e16 keeps two */
    memory[0] = 1;
    memory[1] = 1e16;
    fan_sum(out, (fan_operand[]){{b, FAN_FLOAT64}, {a, FAN_FLOAT64}, {a, FAN_FLOAT64}}, 3, NULL);
    CHECK(memory[2] == 1e16);
    fan_sum(out, (fan_operand[]){{a, FAN_FLOAT64}, {a, FAN_FLOAT64}, {b, FAN_FLOAT64}}, 3, NULL);
    CHECK(memory[2] == 1e16 + 2);
    fan_array_drop(a);
    fan_array_drop(b);
    fan_array_drop(out);

    /* int8 wraps, bool is "or" of any nonzero bytes, a low float rounds once at the end or at each add, as acc says */
    int64_t none = 0, one = 1;
    int8_t *bytes = st->data;
    CHECK_OK(fan_array_view(st, (char *)bytes, FAN_INT8, 1, &one, &none, true, &a, NULL));
    CHECK_OK(fan_array_view(st, (char *)bytes + 1, FAN_INT8, 1, &one, &none, true, &out, NULL));
    bytes[0] = 100;
    fan_sum(out, (fan_operand[]){{a, FAN_INT8}, {a, FAN_INT8}}, 2, NULL);
    CHECK_INT(bytes[1], -56);
    fan_array_drop(a);
    fan_array_drop(out);
    CHECK_OK(fan_array_view(st, (char *)bytes, FAN_BOOL, 1, &one, &none, true, &a, NULL));
    CHECK_OK(fan_array_view(st, (char *)bytes + 1, FAN_BOOL, 1, &one, &none, true, &out, NULL));
    bytes[0] = (int8_t)0x80;
    fan_sum(out, (fan_operand[]){{a, FAN_BOOL}, {a, FAN_BOOL}}, 2, NULL);
    CHECK_INT(bytes[1], 1);
    fan_sum(out, (fan_operand[]){{a, FAN_BOOL}}, 1, NULL);
    CHECK_INT(bytes[1], 1);
    fan_array_drop(a);
    fan_array_drop(out);
    uint16_t *halves = st->data;
    fan_operand ten[10];
    CHECK_OK(fan_array_view(st, (char *)halves, FAN_FLOAT16, 1, &one, &none, true, &a, NULL));
    CHECK_OK(fan_array_view(st, (char *)(halves + 1), FAN_FLOAT16, 1, &one, &none, true, &b, NULL));
    CHECK_OK(fan_array_view(st, (char *)(halves + 2), FAN_FLOAT16, 1, &one, &none, true, &out, NULL));
    halves[0] = (uint16_t)encode_low(FAN_FLOAT16, 2048);
    halves[1] = (uint16_t)encode_low(FAN_FLOAT16, 1);
    for (int k = 0; k < 10; k++)
        ten[k] = (fan_operand){k ? b : a, FAN_FLOAT32};
    fan_sum(out, ten, 10, NULL);
    CHECK(same_real(decode_low(FAN_FLOAT16, halves[2]), 2056)); /* 2057 is a tie */
    for (int k = 0; k < 10; k++)
        ten[k].acc = FAN_FLOAT16;
    fan_sum(out, ten, 10, NULL);
    CHECK(same_real(decode_low(FAN_FLOAT16, halves[2]), 2048)); /* 2049 is a tie each time */
    fan_array_drop(a);
    fan_array_drop(b);
    fan_array_drop(out);
    fan_storage_drop(st);
}

/* reduce_one: what element o of a reduction must be: the reduced axes in C order, one after the other. */
static number reduce_one(const fan_array *in, const fan_array *out, int64_t o)
{
    fan_dtype acc = fan_reduce_dtype(in->dtype);
    number x = {0, 0, 0};
    bool first = true;
    for (int64_t i = 0; i < in->size; i++) {
        int64_t rest = i, place = 0, step = 1;
        for (int k = in->ndim - 1; k >= 0; k--) {
            int64_t index = rest % in->shape[k];
            int to = k - (in->ndim - out->ndim);
            rest /= in->shape[k];
            if (to >= 0) {
                place += out->shape[to] == 1 ? 0 : index * step;
                step *= out->shape[to];
            }
        }
        if (place != o)
            continue;
        number next = convert_number(in->dtype, get(in, i), acc);
        x = first ? next : add_numbers(acc, x, next);
        first = false;
    }
    x = convert_number(acc, x, out->dtype);
    tidy(&x, out->dtype);
    return x;
}

static void reductions_equal_the_left_fold(void)
{
    int rows = 0, zeros = 0;
    for (int round = 0; round < 2000; round++) {
        int64_t shape[4], small[4];
        int ndim = (int)random_below(5), fewer = ndim ? (int)random_below(ndim + 1) : 0;
        for (int i = 0; i < ndim; i++)
            shape[i] = random_below(30) ? 1 + random_below(5) : 0;
        if (ndim && round % 16 == 0)
            shape[random_below(ndim)] = 60 + random_below(260);
        for (int i = 0; i < fewer; i++)
            small[i] = random_below(2) ? 1 : shape[ndim - fewer + i];
        fan_dtype d = (fan_dtype)random_below(FAN_DTYPE_COUNT), to = random_below(2) ? d : (fan_dtype)random_below(FAN_DTYPE_COUNT);
        if (!fan_dtype_can_cast(d, to))
            to = d;
        fan_array *in = random_view(d, ndim, shape, true), *out = random_view(to, fewer, small, false);
        CHECK(fan_broadcasts_from(ndim, shape, fewer, small));
        fan_reduce(out, in);
        for (int64_t i = 0; i < out->size; i++) {
            number want = reduce_one(in, out, i);
            if (!CHECK(same_number(get(out, i), want)))
                fprintf(stderr, "    round %d: %s to %s\n", round, fan_dtype_name(d), fan_dtype_name(to));
        }
        rows += in->size > 0;
        zeros += in->size == 0 && out->size > 0;
        fan_array_drop(in);
        fan_array_drop(out);
    }
    CHECK(rows > 1000 && zeros > 50);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    named_cases();
    every_count_and_length();
    sums_equal_the_left_fold(0, "widening");
    sums_equal_the_left_fold(1, "one dtype");
    sums_equal_the_left_fold(2, "added in its own dtype");
    sums_equal_the_left_fold(3, "added in a wider dtype");
    in_place_at_every_position();
    reductions_equal_the_left_fold();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
