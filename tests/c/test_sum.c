/* Sums against the oracle: the left fold, element by element, in plain code. */
#include "array/sum.h"

#include "array/convert.h"
#include "array/sum_isa.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "base/workers.h"
#include "check.h"
#include "oracle.h"

#include <float.h>
#include <math.h>

#define MOST 20

/* any_isa: one of the instruction sets at hand. */
static void any_isa(void)
{
    size_t n = 0;
    while (fan_sum_isa_at(n))
        n++;
    CHECK(fan_sum_set_isa(fan_sum_isa_at((size_t)random_below((int64_t)n))));
}

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
        s->shape[random_below(s->ndim)] = s->ndim == 1  ? 1 + random_below(5000)
                                          : s->ndim < 4 ? 120 + random_below(200)
                                                        : 5;
    if (s->ndim && random_below(40) == 0)
        s->shape[random_below(s->ndim)] = 0;
}

/* Operands of random dtypes that widen as D3 says; `own`: all of one dtype, added in that very
 * dtype; `wish`: in a wider one. */
static void random_operands(sum *s, int kind)
{
    bool one_dtype = kind != 0;
    fan_dtype d = (fan_dtype)random_below(FAN_DT_COUNT);
    fan_dtype acc = FAN_DT_NONE;
    s->dtype = d;
    s->n = 1 + (size_t)random_below(random_below(3) ? 4 : MOST);
    if (kind == 2 || kind == 3)
        acc = kind == 2
                  ? d
                  : fan_dtype_promote(d, random_below(2) ? FAN_DT_FLOAT64 : FAN_DT_COMPLEX128);
    for (size_t k = 0; k < s->n; k++) {
        fan_dtype next = one_dtype ? d : (fan_dtype)random_below(FAN_DT_COUNT);
        if (random_below(3) == 0 || fan_dtype_promote(s->dtype, next) == FAN_DT_NONE)
            next = s->dtype;
        s->dtype = fan_dtype_promote(s->dtype, next);
        s->in[k].acc = acc == FAN_DT_NONE ? fan_dtype_accumulate(s->dtype) : acc;
        /* the same array twice */
        if (k && random_below(8) == 0 && s->array[k - 1]->dtype == next) {
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
    any_isa();
    fan_sum(out, s->in, s->n, &(fan_sum_how){.scale = s->scale});
    for (int64_t i = 0; i < size; i++) {
        good &= same_number(get(out, i), want[i]);
        if (!CHECK(same_number(get(out, i), want[i]))) {
            fprintf(stderr, "    %s: element %lld of %lld, %zu operands into %s:", what,
                    (long long)i, (long long)size, s->n, fan_dtype_name(out->dtype));
            for (size_t k = 0; k < s->n; k++)
                fprintf(stderr, " %s/%s", fan_dtype_name(s->array[k]->dtype),
                        fan_dtype_name(s->in[k].acc));
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

static bool is_full; /* the whole size, not the sample */

/* rounds: how many rounds the whole size's `all` are here. */
static int rounds(int all)
{
    return is_full ? all : all / 5;
}

static void sums_equal_the_left_fold(int kind, const char *what)
{
    for (int round = 0; round < rounds(1200); round++) {
        sum s;
        random_shape(&s);
        random_operands(&s, kind);
        random_scale(&s);
        fan_dtype last = s.in[s.n - 1].acc;
        fan_dtype d = random_below(2) ? s.dtype : (fan_dtype)random_below(FAN_DT_COUNT);
        if (!fan_dtype_can_cast(last, d))
            d = last;
        fan_array *out = random_view(d, s.ndim, s.shape, false);
        check_sum(&s, out, what);
        fan_array_drop(out);
        drop(&s);
    }
}

/* `out` is one of the operands, at every position; or the memory of one, seen as another dtype of
 * the same width. */
static void in_place_at_every_position(void)
{
    int as_other = 0;
    for (int round = 0; round < rounds(800); round++) {
        sum s;
        random_shape(&s);
        random_operands(&s, round % 4);
        random_scale(&s);
        fan_dtype last = s.in[s.n - 1].acc;
        size_t at = (size_t)random_below((int64_t)s.n);
        fan_array *mine = random_view(s.array[at]->dtype, s.ndim, s.shape, false);
        fan_array *out = NULL;
        for (size_t k = 0; k < s.n; k++) { /* perhaps the same view more than once */
            if (k == at || (s.array[k]->dtype == mine->dtype && random_below(6) == 0)) {
                fan_array_drop(s.array[k]);
                s.array[k] = fan_array_hold(mine);
                s.in[k].array = s.array[k];
            }
        }
        fan_dtype d = mine->dtype;
        for (int try = 0; try < 20; try ++) {
            fan_dtype other = (fan_dtype)random_below(FAN_DT_COUNT);
            if (fan_dtype_size(other) == fan_dtype_size(mine->dtype) &&
                fan_dtype_can_cast(last, other))
                d = other;
        }
        if (!fan_dtype_can_cast(last, d)) {
            fan_array_drop(mine);
            drop(&s);
            continue;
        }
        as_other += d != mine->dtype;
        CHECK_OK(fan_array_view(mine->storage, mine->data, d, s.ndim, mine->shape, mine->strides,
                                true, &out, NULL));
        check_sum(&s, out, "in place");
        fan_array_drop(out);
        fan_array_drop(mine);
        drop(&s);
    }
    CHECK(as_other > rounds(100));
}

/* Every number of operands around the groups inside, and lengths around the tiles: gap-free
 * float32, in place at each position too. */
static void every_count_and_length(void)
{
    static const int64_t lengths[] = {1, 2, 3, 7, 16, 17, 2047, 2048, 2049, 4096, 4099};
    for (size_t n = 1; n <= MOST; n++) {
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            for (size_t at = 0; at <= n; at++) {
                if (lengths[l] > 20 && at % 5 != 0 && at != n)
                    continue;
                if (!is_full && (n + l) % 4 != 0)
                    continue;
                sum s = {.ndim = 1, .shape = {lengths[l]}, .n = n, .dtype = FAN_DT_FLOAT32};
                for (size_t k = 0; k < n; k++) {
                    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, s.shape, NULL, &s.array[k], NULL));
                    for (int64_t i = 0; i < s.array[k]->size; i++)
                        random_element(FAN_DT_FLOAT32, element(s.array[k], i));
                    s.in[k] = (fan_operand){s.array[k], FAN_DT_FLOAT32};
                }
                fan_array *out = NULL;
                if (at < n)
                    out = fan_array_hold(s.array[at]);
                else
                    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, s.shape, NULL, &out, NULL));
                check_sum(&s, out, "count and length");
                fan_array_drop(out);
                drop(&s);
            }
        }
    }
}

/* One contribution alone is unchanged: -0.0 stays -0.0; nothing is added to the first. */
static void nothing_is_added_to_the_first(void)
{
    double minus = -0.0;
    double got = 1;
    double also = -0.0;
    fan_storage *st = fan_storage_new(64);
    double *memory = st->data;
    fan_array *a, *b, *out;
    memory[0] = minus;
    memory[1] = also;
    CHECK_OK(fan_array_view(st, (char *)memory, FAN_DT_FLOAT64, 0, NULL, NULL, true, &a, NULL));
    CHECK_OK(
        fan_array_view(st, (char *)(memory + 1), FAN_DT_FLOAT64, 0, NULL, NULL, true, &b, NULL));
    CHECK_OK(
        fan_array_view(st, (char *)(memory + 2), FAN_DT_FLOAT64, 0, NULL, NULL, true, &out, NULL));
    fan_operand in[3] = {{a, FAN_DT_FLOAT64}, {b, FAN_DT_FLOAT64}, {a, FAN_DT_FLOAT64}};
    for (size_t n = 1; n <= 3; n++) {
        fan_sum(out, in, n, NULL);
        got = memory[2];
        CHECK(got == 0 && signbit(got));
    }
    /* the order of a left fold: (1e16 + 1) + 1 loses both ones, (1 + 1) + 1e16 keeps two */
    memory[0] = 1;
    memory[1] = 1e16;
    fan_sum(out, (fan_operand[]){{b, FAN_DT_FLOAT64}, {a, FAN_DT_FLOAT64}, {a, FAN_DT_FLOAT64}}, 3,
            NULL);
    CHECK(memory[2] == 1e16);
    fan_sum(out, (fan_operand[]){{a, FAN_DT_FLOAT64}, {a, FAN_DT_FLOAT64}, {b, FAN_DT_FLOAT64}}, 3,
            NULL);
    CHECK(memory[2] == 1e16 + 2);
    fan_array_drop(a);
    fan_array_drop(b);
    fan_array_drop(out);
    fan_storage_drop(st);
}

/* int8 wraps, bool is "or" of any nonzero bytes, a low float rounds once at the end or at each add,
 * as acc says. */
static void each_kind_sums_in_its_way(void)
{
    fan_storage *st = fan_storage_new(64);
    fan_array *a, *b, *out;
    int64_t none = 0;
    int64_t one = 1;
    int8_t *bytes = st->data;
    CHECK_OK(fan_array_view(st, (char *)bytes, FAN_DT_INT8, 1, &one, &none, true, &a, NULL));
    CHECK_OK(fan_array_view(st, (char *)bytes + 1, FAN_DT_INT8, 1, &one, &none, true, &out, NULL));
    bytes[0] = 100;
    fan_sum(out, (fan_operand[]){{a, FAN_DT_INT8}, {a, FAN_DT_INT8}}, 2, NULL);
    CHECK_INT(bytes[1], -56);
    fan_array_drop(a);
    fan_array_drop(out);
    CHECK_OK(fan_array_view(st, (char *)bytes, FAN_DT_BOOL, 1, &one, &none, true, &a, NULL));
    CHECK_OK(fan_array_view(st, (char *)bytes + 1, FAN_DT_BOOL, 1, &one, &none, true, &out, NULL));
    bytes[0] = (int8_t)0x80;
    fan_sum(out, (fan_operand[]){{a, FAN_DT_BOOL}, {a, FAN_DT_BOOL}}, 2, NULL);
    CHECK_INT(bytes[1], 1);
    fan_sum(out, (fan_operand[]){{a, FAN_DT_BOOL}}, 1, NULL);
    CHECK_INT(bytes[1], 1);
    fan_array_drop(a);
    fan_array_drop(out);
    uint16_t *halves = st->data;
    fan_operand ten[10];
    CHECK_OK(fan_array_view(st, (char *)halves, FAN_DT_FLOAT16, 1, &one, &none, true, &a, NULL));
    CHECK_OK(
        fan_array_view(st, (char *)(halves + 1), FAN_DT_FLOAT16, 1, &one, &none, true, &b, NULL));
    CHECK_OK(
        fan_array_view(st, (char *)(halves + 2), FAN_DT_FLOAT16, 1, &one, &none, true, &out, NULL));
    halves[0] = (uint16_t)encode_low(FAN_DT_FLOAT16, 2048);
    halves[1] = (uint16_t)encode_low(FAN_DT_FLOAT16, 1);
    for (int k = 0; k < 10; k++)
        ten[k] = (fan_operand){k ? b : a, FAN_DT_FLOAT32};
    fan_sum(out, ten, 10, NULL);
    CHECK(same_real(decode_low(FAN_DT_FLOAT16, halves[2]), 2056)); /* 2057 is a tie */
    for (int k = 0; k < 10; k++)
        ten[k].acc = FAN_DT_FLOAT16;
    fan_sum(out, ten, 10, NULL);
    CHECK(same_real(decode_low(FAN_DT_FLOAT16, halves[2]), 2048)); /* 2049 is a tie each time */
    fan_array_drop(a);
    fan_array_drop(b);
    fan_array_drop(out);
    fan_storage_drop(st);
}

/* reduce_one: what element o of a reduction must be: the reduced axes in C order, one after the
 * other. */
static number reduce_one(const fan_array *in, const fan_array *out, int64_t o)
{
    fan_dtype acc = fan_reduce_dtype(in->dtype);
    number x = {0, 0, 0};
    bool first = true;
    for (int64_t i = 0; i < in->size; i++) {
        int64_t rest = i;
        int64_t place = 0;
        int64_t step = 1;
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
    int rows = 0;
    int zeros = 0;
    for (int round = 0; round < rounds(2000); round++) {
        int64_t shape[4], small[4];
        int ndim = (int)random_below(5);
        int fewer = ndim ? (int)random_below(ndim + 1) : 0;
        for (int i = 0; i < ndim; i++)
            shape[i] = random_below(30) ? 1 + random_below(5) : 0;
        if (ndim && round % 16 == 0)
            shape[random_below(ndim)] = 60 + random_below(260);
        for (int i = 0; i < fewer; i++)
            small[i] = random_below(2) ? 1 : shape[ndim - fewer + i];
        fan_dtype d = (fan_dtype)random_below(FAN_DT_COUNT);
        fan_dtype to = random_below(2) ? d : (fan_dtype)random_below(FAN_DT_COUNT);
        if (!fan_dtype_can_cast(d, to))
            to = d;
        fan_array *in = random_view(d, ndim, shape, true);
        fan_array *out = random_view(to, fewer, small, false);
        CHECK(fan_broadcasts_from(ndim, shape, fewer, small));
        fan_reduce(out, in, in->dtype);
        for (int64_t i = 0; i < out->size; i++) {
            number want = reduce_one(in, out, i);
            if (!CHECK(same_number(get(out, i), want)))
                fprintf(stderr, "    round %d: %s to %s\n", round, fan_dtype_name(d),
                        fan_dtype_name(to));
        }
        rows += in->size > 0;
        zeros += in->size == 0 && out->size > 0;
        fan_array_drop(in);
        fan_array_drop(out);
    }
    CHECK(rows > rounds(1000) && zeros > rounds(50));
}

/* ---- one result, whatever does it ---- */

/* fresh: a gap-free array whose first element lies `off` bytes behind a line. */
static fan_array *fresh(fan_dtype d, int64_t n, size_t off)
{
    size_t bytes = (size_t)n * fan_dtype_size(d);
    int64_t step = (int64_t)fan_dtype_size(d);
    fan_storage *s = fan_storage_new(bytes + off + 64);
    fan_array *a = NULL;
    CHECK_OK(fan_array_view(s, (char *)s->data + off, d, 1, &n, &step, true, &a, NULL));
    fan_storage_drop(s);
    return a;
}

/* fill: numbers of many sizes, with signed zeros, subnormals and (`wild`) infinities and NaNs among
 * them; one array in many is enough of them. */
static void fill(fan_array *a, bool wild)
{
    size_t size = fan_dtype_size(a->dtype);
    size_t known = 0;
    char pattern[16 * 997];
    for (; known < 997; known++) {
        char *p = pattern + known * size;
        number x;
        do {
            random_element(a->dtype, p);
            x = load_number(a->dtype, p);
        } while (!wild &&
                 (!isfinite(x.re) || !isfinite(x.im) || fabs(x.re) > 1e100 || fabs(x.im) > 1e100));
    }
    for (int64_t i = 0; i < a->size; i++) {
        memcpy(a->data + (size_t)i * size, pattern + (size_t)((i * 7 + i / 997) % 997) * size,
               size);
    }
}

/* hash_of: of the elements; all NaNs are one. */
static uint64_t hash_of(const fan_array *a)
{
    uint64_t h = 1469598103934665603u;
    size_t size = fan_dtype_size(a->dtype);
    size_t parts = is_complex(a->dtype) ? 2 : 1;
    fan_dtype part = parts == 1                     ? a->dtype
                     : a->dtype == FAN_DT_COMPLEX64 ? FAN_DT_FLOAT32
                                                    : FAN_DT_FLOAT64;
    for (size_t i = 0; i < (size_t)a->size * parts; i++) {
        const char *p = a->data + i * (size / parts);
        uint64_t bits = 0;
        memcpy(&bits, p, size / parts);
        if (fan_dtype_kind(part) == 'f' && isnan(load_number(part, p).re))
            bits = 0x7ff8;
        h = (h ^ bits) * 1099511628211u;
    }
    return h;
}

static bool same_stats(fan_stats a, fan_stats b)
{
    return a.count == b.count && memcmp(&a.squares, &b.squares, sizeof a.squares) == 0 &&
           a.scale == b.scale && a.absmax == b.absmax && a.nonfinite == b.nonfinite &&
           a.bad == b.bad;
}

/* The sum keeps statistics of each piece on the stack: FAN_STATS_PIECES of them, whatever the
 * size. */
static void statistics_have_no_more_pieces_than_there_is_room_for(void)
{
    for (int64_t all = 1; all <= INT64_C(1) << 40; all *= 2)
        for (int64_t size = all - 1; size <= all + 1; size++) {
            int64_t piece = fan_stats_piece(size);
            CHECK(piece > 0 && (size + piece - 1) / piece <= FAN_STATS_PIECES);
        }
}

/* model_stats: what the header of stats.h says, element by element, of a gap-free array; the
 * squares of the elements times 2^-scale. */
static fan_stats model_scaled(const fan_array *a, int scale)
{
    fan_stats all = {.bad = SIZE_MAX, .scale = scale};
    int64_t piece = fan_stats_piece(a->size);
    int parts = is_complex(a->dtype) ? 2 : 1;
    for (int64_t at = 0; at < a->size; at += piece) {
        fan_stats_run run = {.top = 0};
        fan_stats one = {.count = 0};
        for (int64_t i = at; i < a->size && i < at + piece; i++) {
            char wide[16];
            fan_convert(wide, FAN_DT_COMPLEX128, 16, a->data + (size_t)i * fan_dtype_size(a->dtype),
                        a->dtype, 0, 1);
            number z = load_number(FAN_DT_COMPLEX128, wide);
            bool whole = isfinite(z.re) && isfinite(z.im);
            double number[2] = {ldexp(z.re, -scale), ldexp(z.im, -scale)};
            for (int part = 0; part < parts; part++) {
                int64_t position = (i - at) * parts + part;
                run.lane[position % 16] += whole ? number[part] * number[part] : 0;
                if ((position + 1) % 512 == 0)
                    fan_stats_block_end(&run);
            }
            all.count++;
            all.nonfinite += !whole;
            if (!whole)
                continue;
            double square = z.re * z.re + z.im * z.im;
            int move = square > 1e-280 && square < 1e280 ? 0 : square < 1 ? 600 : -600;
            double re = ldexp(z.re, move);
            double im = ldexp(z.im, move);
            double size = parts == 1 ? fabs(z.re) : ldexp(sqrt(re * re + im * im), -move);
            if (parts == 2 && isfinite(size))
                CHECK(fabs(size - hypot(z.re, z.im)) <= 4 * DBL_EPSILON * size + 5e-324);
            all.absmax = size > all.absmax ? size : all.absmax;
        }
        fan_stats_block_end(&run);
        for (int lane = 0; lane < 16; lane++) {
            fan_sum_and_rest(&one.squares, &one.rest, run.total[lane]);
            one.rest += run.rest[lane];
        }
        fan_sum_and_rest(&all.squares, &all.rest, one.squares);
        all.rest += one.rest;
    }
    all.squares += all.rest;
    all.rest = 0;
    return all;
}

static fan_stats model_stats(const fan_array *a)
{
    fan_stats plain = model_scaled(a, 0);
    if (plain.absmax > 0x1p400)
        return model_scaled(a, 600);
    return plain.absmax > 0 && plain.absmax < 0x1p-400 ? model_scaled(a, -600) : plain;
}

static size_t model_bad(const fan_operand *in, size_t n, const fan_array *out)
{
    for (size_t k = 0; k < n; k++) {
        for (int64_t i = 0; i < out->size; i++) {
            number x = get(in[k].array, i);
            number r = get(out, i);
            if (!is_whole(out->dtype) && (!isfinite(x.re) || !isfinite(x.im)) &&
                (!isfinite(r.re) || !isfinite(r.im)))
                return k;
        }
    }
    return SIZE_MAX;
}

/* every_way: the sum and its statistics on each instruction set, with one thread and two, alone and
 * beside statistics, in place and not: one hash. */
static void every_way(fan_dtype d, fan_dtype acc, size_t n, int64_t size, size_t off, bool wild,
                      bool in_place)
{
    fan_array *a[70];
    fan_operand in[70];
    uint64_t first = 0;
    fan_stats known = {0};
    bool met = false;
    for (size_t k = 0; k < n; k++) {
        a[k] = fresh(d, size, off * k % 4096);
        fill(a[k], wild && k % 3 == 1);
        in[k] = (fan_operand){a[k], acc};
    }
    fan_array *keep = fresh(d, size, 0);
    fan_array *out =
        in_place ? fan_array_hold(a[n / 2]) : fresh(d, size, off ? fan_dtype_size(d) : 0);
    memcpy(keep->data, a[n / 2]->data, (size_t)size * fan_dtype_size(d));
    for (size_t i = 0; fan_sum_isa_at(i); i++) {
        CHECK(fan_sum_set_isa(fan_sum_isa_at(i)));
        for (int threads = 1; threads <= 2; threads++) {
            fan_workers_set(threads);
            for (int stats = 0; stats < 2; stats++) {
                fan_stats s;
                if (in_place)
                    memcpy(out->data, keep->data, (size_t)size * fan_dtype_size(d));
                fan_sum(out, in, n, &(fan_sum_how){.stats = stats ? &s : NULL, .parallel = true});
                uint64_t h = hash_of(out);
                if (!met)
                    first = h;
                bool same = CHECK(h == first);
                if (stats) {
                    if (!known.count) {
                        known = s;
                        fan_stats of;
                        fan_stats model = model_stats(out);
                        if (!in_place) {
                            model.bad = model_bad(in, n, out);
                            same &= CHECK(same_stats(s, model));
                        }
                        fan_stats_of(out, &of);
                        of.bad = s.bad;
                        same &= CHECK(same_stats(s, of));
                    }
                    same &= CHECK(same_stats(s, known));
                }
                met = true;
                if (!same)
                    fprintf(stderr,
                            "    %s/%s, %zu x %lld, offset %zu, %s, %d threads, stats %d, in place "
                            "%d\n",
                            fan_dtype_name(d), fan_dtype_name(acc), n, (long long)size, off,
                            fan_sum_isa(), threads, stats, in_place);
            }
        }
    }
    fan_workers_set(0);
    fan_array_drop(keep);
    fan_array_drop(out);
    for (size_t k = 0; k < n; k++)
        fan_array_drop(a[k]);
}

static void all_ways_are_one(void)
{
    static const size_t offsets[] = {0, 1, 64, 1088};
    for (int d = 0; d < FAN_DT_COUNT; d++) {
        fan_dtype accs[] = {(fan_dtype)d, fan_dtype_accumulate((fan_dtype)d),
                            d == FAN_DT_FLOAT32     ? FAN_DT_FLOAT64
                            : d == FAN_DT_COMPLEX64 ? FAN_DT_COMPLEX128
                                                    : (fan_dtype)d};
        for (int k = 0; k < 3; k++) {
            if (k && accs[k] == accs[0])
                continue;
            for (size_t n = 1; n <= 18; n++) {
                if (!is_full && (n + (size_t)d) % 4 != 0)
                    continue;
                bool in_place = random_below(3) == 0;
                every_way((fan_dtype)d, accs[k], n == 18 ? 64 : n,
                          1 + random_below(1 + random_below(3000)), offsets[n % 4], n % 2,
                          in_place);
            }
            if (!is_full && k && (fan_dtype)d != FAN_DT_BFLOAT16)
                continue;
            bool large = d == FAN_DT_FLOAT32 || d == FAN_DT_BFLOAT16 || d == FAN_DT_COMPLEX128 ||
                         d == FAN_DT_INT64;
            /* several pieces, two threads */
            every_way((fan_dtype)d, accs[k], 3, large && is_full ? 700001 : 40001, 64, true, false);
        }
    }
    every_way(FAN_DT_FLOAT32, FAN_DT_FLOAT32, 3, 700001, 64, true, true);
    every_way(FAN_DT_FLOAT32, FAN_DT_FLOAT32, 17, 100003, 1088, false, false); /* in groups */
    every_way(FAN_DT_BFLOAT16, FAN_DT_FLOAT32, 20, 200003, 1088, false, true);
    /* too many for one list */
    every_way(FAN_DT_FLOAT32, FAN_DT_FLOAT32, 70, 20003, 64, true, false);
}

/* So large that it is written around the caches, at the start of a line, beside one, and between
 * elements. */
static void what_is_larger_than_the_caches(void)
{
    static const size_t offsets[] = {4, 0, 1};
    int64_t n = (int64_t)9 << 20;
    for (size_t o = 0; o < (is_full ? 3 : 1); o++) {
        size_t off = offsets[o];
        fan_array *a = fresh(FAN_DT_FLOAT32, n, 0);
        fan_array *out = fresh(FAN_DT_FLOAT32, n, off);
        fan_array *plain = fresh(FAN_DT_FLOAT32, n, 0);
        fill(a, false);
        for (int64_t i = 0; i < n; i++) {
            float x;
            memcpy(&x, a->data + 4 * i, 4);
            x = x + x;
            memcpy(plain->data + 4 * i, &x, 4);
        }
        for (size_t i = 0; fan_sum_isa_at(i); i++) {
            fan_stats s, want;
            CHECK(fan_sum_set_isa(fan_sum_isa_at(i)));
            for (int stats = 0; stats < 2; stats++) {
                memset(out->data, 1, (size_t)n * 4);
                fan_sum(out, (fan_operand[]){{a, FAN_DT_FLOAT32}, {a, FAN_DT_FLOAT32}}, 2,
                        &(fan_sum_how){.stats = stats ? &s : NULL, .parallel = i % 2});
                CHECK(memcmp(out->data, plain->data, (size_t)n * 4) == 0);
            }
            fan_stats_of(plain, &want);
            CHECK(same_stats(s, want));
        }
        fan_array_drop(a);
        fan_array_drop(out);
        fan_array_drop(plain);
    }
}

/* Every low float there is, through every loop, beside zero and alone. */
static void every_low_float(void)
{
    for (int d = 0; d < FAN_DT_COUNT; d++) {
        if (!is_low((fan_dtype)d))
            continue;
        size_t size = fan_dtype_size((fan_dtype)d);
        int64_t codes = size == 1 ? 256 : 65536;
        fan_array *a = fresh((fan_dtype)d, codes, 0);
        fan_array *zero = fresh((fan_dtype)d, codes, 0);
        fan_array *out = fresh((fan_dtype)d, codes, 0);
        for (int64_t i = 0; i < codes; i++) {
            int64_t minus = INT64_C(1) << (8 * size - 1); /* -0.0: what adds nothing */
            memcpy(a->data + (size_t)i * size, &i, size);
            memcpy(zero->data + (size_t)i * size, &minus, size);
        }
        for (size_t i = 0; fan_sum_isa_at(i); i++) {
            CHECK(fan_sum_set_isa(fan_sum_isa_at(i)));
            for (int own = 0; own < 2; own++) {
                for (size_t n = 1; n <= 2; n++) {
                    int64_t wrong = 0;
                    CHECK(fan_sum_flat(out->data, (const char *[]){a->data, zero->data}, n,
                                       (size_t)codes, (fan_dtype)d,
                                       own ? (fan_dtype)d : FAN_DT_FLOAT32, NULL));
                    for (int64_t c = 0; c < codes; c++)
                        wrong += !same_number(get(a, c), get(out, c));
                    CHECK_INT(wrong, 0);
                }
            }
        }
        fan_array_drop(a);
        fan_array_drop(zero);
        fan_array_drop(out);
    }
    CHECK(!fan_sum_flat(NULL, NULL, 1, 0, FAN_DT_INT8, FAN_DT_INT16, NULL));
}

/* Statistics of any layout and any dtypes: counts exact, sums of squares as close as another order
 * may be. */
static void statistics_of_any_layout(void)
{
    int culprits = 0;
    for (int round = 0; round < rounds(1500); round++) {
        sum s;
        fan_stats got;
        random_shape(&s);
        random_operands(&s, round % 4);
        random_scale(&s);
        fan_dtype d = s.in[s.n - 1].acc;
        if (fan_dtype_accumulate(s.dtype) == d && random_below(2))
            d = s.dtype;
        fan_array *out = random_view(d, s.ndim, s.shape, false);
        fan_array *flat = NULL;
        any_isa();
        fan_sum(out, s.in, s.n, &(fan_sum_how){.scale = s.scale, .stats = &got});
        flat = fresh(d, out->size, 0);
        for (int64_t i = 0; i < out->size; i++)
            memcpy(flat->data + (size_t)i * fan_dtype_size(d), element(out, i), fan_dtype_size(d));
        fan_stats want = model_stats(flat);
        want.bad = model_bad(s.in, s.n, out);
        culprits += want.bad != SIZE_MAX;
        bool close =
            got.squares == want.squares || fabs(got.squares - want.squares) <= 1e-12 * want.squares;
        if (!CHECK(close && got.scale == want.scale && got.count == want.count &&
                   got.absmax == want.absmax && got.nonfinite == want.nonfinite &&
                   got.bad == want.bad))
            fprintf(stderr, "    round %d: %s, %lld elements: %g %g, %g %g, %llu %llu, %zu %zu\n",
                    round, fan_dtype_name(d), (long long)out->size, got.squares, want.squares,
                    got.absmax, want.absmax, (unsigned long long)got.nonfinite,
                    (unsigned long long)want.nonfinite, got.bad, want.bad);
        fan_array_drop(out);
        fan_array_drop(flat);
        drop(&s);
    }
    CHECK(culprits > rounds(50));
}

/* The model finds what it is there for. */
static void a_planted_fault_is_found(void)
{
    fan_array *a = fresh(FAN_DT_FLOAT32, 1000, 0);
    fan_stats s, t;
    fill(a, false);
    uint64_t h = hash_of(a);
    fan_stats_of(a, &s);
    CHECK(same_stats(s, model_stats(a)));
    put(a, 777, (number){0, 3e38, 0});
    CHECK(hash_of(a) != h);
    fan_stats_of(a, &t);
    CHECK(!same_stats(s, t) && t.absmax >= 3e38f && fan_stats_sumsq(&t) > fan_stats_sumsq(&s));
    put(a, 3, (number){0, INFINITY, 0});
    fan_stats_of(a, &t);
    CHECK(t.nonfinite == 1 && t.bad == 0 && isfinite(fan_stats_sumsq(&t)));
    CHECK(!fan_sum_set_isa("z80"));
    fan_array_drop(a);
}

static void a_sum_allocates_nothing(void)
{
    fan_array *a = fresh(FAN_DT_FLOAT32, 3 << 20, 0);
    fan_array *out = fresh(FAN_DT_FLOAT32, 3 << 20, 0);
    fan_stats s;
    memset(a->data, 0, (size_t)a->size * 4);
    int64_t made = fan_mem_get().total;
    fan_sum(out, (fan_operand[]){{a, FAN_DT_FLOAT32}, {a, FAN_DT_FLOAT32}}, 2,
            &(fan_sum_how){.stats = &s, .parallel = true});
    CHECK_INT(fan_mem_get().total, made);
    fan_array_drop(a);
    fan_array_drop(out);
}

static fan_status give_up(fan_error *err)
{
    return fan_fail(err, FAN_ERR_EXTERN, "interrupted");
}

/* The pieces that follow an interrupt are neither summed nor counted. */
static void an_interrupted_sum_writes_nothing_more(void)
{
    int64_t n = 3 << 20;
    fan_array *a = fresh(FAN_DT_FLOAT32, n, 0);
    fan_array *out = fresh(FAN_DT_FLOAT32, n, 0);
    fan_interrupt now;
    fan_error err;
    fan_stats s;
    memset(a->data, 0, (size_t)n * 4);
    memset(out->data, 1, (size_t)n * 4);
    fan_interrupt_begin(&now, give_up, &err);
    now.next = 1; /* the check is due at the first poll that reads the clock */
    now.ahead = 0;
    fan_sum(out, (fan_operand[]){{a, FAN_DT_FLOAT32}, {a, FAN_DT_FLOAT32}}, 2,
            &(fan_sum_how){.stats = &s});
    CHECK_INT(fan_interrupt_end(&now, FAN_OK), FAN_ERR_EXTERN);
    CHECK(s.absmax == 0);
    for (int64_t i = 0; i < 4 * n; i += 4093)
        CHECK_INT(out->data[i], 1);
    fan_array_drop(a);
    fan_array_drop(out);
}

int main(int argc, char **argv)
{
    is_full = check_is_full(argc, argv);
    int64_t live = fan_mem_get().live;
    statistics_have_no_more_pieces_than_there_is_room_for();
    nothing_is_added_to_the_first();
    each_kind_sums_in_its_way();
    every_count_and_length();
    sums_equal_the_left_fold(0, "widening");
    sums_equal_the_left_fold(1, "one dtype");
    sums_equal_the_left_fold(2, "added in its own dtype");
    sums_equal_the_left_fold(3, "added in a wider dtype");
    in_place_at_every_position();
    reductions_equal_the_left_fold();
    all_ways_are_one();
    what_is_larger_than_the_caches();
    every_low_float();
    statistics_of_any_layout();
    a_planted_fault_is_found();
    a_sum_allocates_nothing();
    an_interrupted_sum_writes_nothing_more();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
