/* Sums against the oracle: the left fold, element by element, in plain code. First sums and
 * reductions of random arrays, then one result whatever computes it, then statistics. */
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

/* any_isa: switches to one of the instruction sets at hand. */
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
    if (s->ndim == 0)
        return;
    if (one_in(6)) {
        int64_t extent = 5;
        if (s->ndim == 1) {
            extent = 1 + random_below(5000);
        } else if (s->ndim < 4) {
            extent = 120 + random_below(200);
        }
        s->shape[random_below(s->ndim)] = extent;
    }
    if (one_in(40))
        s->shape[random_below(s->ndim)] = 0;
}

typedef enum operands {
    WIDENING,  /* of random dtypes that widen as D3 says */
    ONE_DTYPE, /* all of one dtype */
    OWN_DTYPE, /* .. and added in that very dtype */
    WIDER      /* .. and added in a wider one */
} operands;

static const char *const kinds[] = {"widening", "one dtype", "added in its own dtype",
                                    "added in a wider dtype"};

/* Operands of random dtypes that widen as D3 says; `own`: all of one dtype, added in that very
 * dtype; `wish`: in a wider one. */
static void random_operands(sum *s, operands kind)
{
    fan_dtype d = random_dtype();
    fan_dtype acc = FAN_DT_NONE;
    s->dtype = d;
    s->n = 1 + (size_t)random_below(one_in(3) ? MOST : 4);
    if (kind == OWN_DTYPE) {
        acc = d;
    } else if (kind == WIDER) {
        acc = fan_dtype_promote(d, random_below(2) ? FAN_DT_FLOAT64 : FAN_DT_COMPLEX128);
    }
    for (size_t k = 0; k < s->n; k++) {
        fan_dtype next = d;
        if (kind == WIDENING)
            next = random_dtype();
        if (one_in(3) || fan_dtype_promote(s->dtype, next) == FAN_DT_NONE)
            next = s->dtype;
        s->dtype = fan_dtype_promote(s->dtype, next);
        s->in[k].weight = (fan_weight){.on = false};
        s->in[k].acc = acc;
        if (acc == FAN_DT_NONE)
            s->in[k].acc = fan_dtype_accumulate(s->dtype);
        bool twice = k && one_in(8) && s->array[k - 1]->dtype == next;
        if (twice) {
            s->array[k] = fan_array_hold(s->array[k - 1]);
        } else {
            s->array[k] = random_view(next, s->ndim, s->shape, true);
        }
        s->in[k].array = s->array[k];
    }
}

static void random_sum(sum *s, operands kind)
{
    random_shape(s);
    random_operands(s, kind);
    s->scale = random_scale(random_below(2));
}

/* fold: what element i of the sum must be, in the last accumulation dtype. */
static number fold(const sum *s, int64_t i)
{
    fan_dtype acc = s->in[0].acc;
    number x = convert_number(s->array[0]->dtype, get(s->array[0], i), acc);
    for (size_t k = 1; k < s->n; k++) {
        fan_dtype to = s->in[k].acc;
        number next = convert_number(s->array[k]->dtype, get(s->array[k], i), to);
        x = add_numbers(to, convert_number(acc, x, to), next);
        acc = to;
    }
    if (!s->scale.on)
        return x;
    return scale_number(acc, x, factor_of(&s->scale, acc));
}

static void check_sum(const sum *s, const fan_array *out, const char *what)
{
    int64_t size = out->size;
    number *want = malloc(sizeof *want * (size_t)(size + 1));
    for (int64_t i = 0; i < size; i++)
        want[i] = convert_number(s->in[s->n - 1].acc, fold(s, i), out->dtype);
    any_isa();
    fan_sum(out, s->in, s->n, &(fan_sum_options){.scale = s->scale});
    for (int64_t i = 0; i < size; i++) {
        if (CHECK(same_number(get(out, i), want[i])))
            continue;
        fprintf(stderr, "    %s: element %lld of %lld, %zu operands into %s:", what, (long long)i,
                (long long)size, s->n, fan_dtype_name(out->dtype));
        for (size_t k = 0; k < s->n; k++) {
            fprintf(stderr, " %s/%s", fan_dtype_name(s->array[k]->dtype),
                    fan_dtype_name(s->in[k].acc));
        }
        fprintf(stderr, "\n");
        break;
    }
    free(want);
}

static bool is_full; /* the whole size, not the sample */

/* rounds: how many rounds the whole size's `all` are here. */
static int rounds(int all)
{
    return is_full ? all : all / 5;
}

static void sums_equal_the_left_fold(operands kind)
{
    for (int round = 0; round < rounds(1200); round++) {
        sum s;
        random_sum(&s, kind);
        fan_dtype last = s.in[s.n - 1].acc;
        fan_dtype d = dtype_or_random(s.dtype);
        if (!fan_dtype_can_cast(last, d))
            d = last;
        fan_array *out = random_view(d, s.ndim, s.shape, false);
        check_sum(&s, out, kinds[kind]);
        fan_array_drop(out);
        drop_arrays(s.array, s.n);
    }
}

/* random_alias: d, or another dtype of the same width to which `last` can be cast. */
static fan_dtype random_alias(fan_dtype d, fan_dtype last)
{
    size_t size = fan_dtype_size(d);
    for (int try = 0; try < 20; try ++) {
        fan_dtype other = random_dtype();
        if (fan_dtype_size(other) == size && fan_dtype_can_cast(last, other))
            d = other;
    }
    return d;
}

/* `out` is one of the operands, at every position; or the memory of one, seen as another dtype of
 * the same width. */
static void in_place_at_every_position(void)
{
    int as_other = 0;
    for (int round = 0; round < rounds(800); round++) {
        sum s;
        random_sum(&s, (operands)(round % 4));
        fan_dtype last = s.in[s.n - 1].acc;
        size_t at = (size_t)random_below((int64_t)s.n);
        fan_array *mine = random_view(s.array[at]->dtype, s.ndim, s.shape, false);
        for (size_t k = 0; k < s.n; k++) { /* perhaps the same view more than once */
            if (k != at && (s.array[k]->dtype != mine->dtype || !one_in(6)))
                continue;
            fan_array_drop(s.array[k]);
            s.array[k] = fan_array_hold(mine);
            s.in[k].array = mine;
        }
        fan_dtype d = random_alias(mine->dtype, last);
        if (fan_dtype_can_cast(last, d)) {
            fan_array *out =
                view_of(mine->storage, mine->data, d, s.ndim, mine->shape, mine->strides);
            as_other += d != mine->dtype;
            check_sum(&s, out, "in place");
            fan_array_drop(out);
        }
        fan_array_drop(mine);
        drop_arrays(s.array, s.n);
    }
    CHECK(as_other > rounds(100));
}

/* check_count_and_length: a sum of gap-free float32 into operand `at`, or, where there is none,
 * into another array. */
static void check_count_and_length(size_t n, int64_t length, size_t at)
{
    sum s = {.ndim = 1, .shape = {length}, .n = n, .dtype = FAN_DT_FLOAT32};
    for (size_t k = 0; k < n; k++) {
        s.array[k] = array_of(FAN_DT_FLOAT32, length);
        for (int64_t i = 0; i < length; i++)
            random_element(FAN_DT_FLOAT32, element(s.array[k], i));
        s.in[k] = (fan_operand){.array = s.array[k], .acc = FAN_DT_FLOAT32};
    }
    fan_array *out;
    if (at < n) {
        out = fan_array_hold(s.array[at]);
    } else {
        out = array_of(FAN_DT_FLOAT32, length);
    }
    check_sum(&s, out, "count and length");
    fan_array_drop(out);
    drop_arrays(s.array, n);
}

/* Every number of operands around the groups inside, and lengths around the tiles, in place at each
 * position too. */
static void every_count_and_length(void)
{
    static const int64_t lengths[] = {1, 2, 3, 7, 16, 17, 2047, 2048, 2049, 4096, 4099};
    for (size_t n = 1; n <= MOST; n++) {
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            if (!is_full && (n + l) % 4 != 0)
                continue;
            for (size_t at = 0; at <= n; at++) {
                if (lengths[l] <= 20 || at % 5 == 0 || at == n)
                    check_count_and_length(n, lengths[l], at);
            }
        }
    }
}

/* One contribution alone is unchanged: -0.0 stays -0.0; nothing is added to the first. */
static void nothing_is_added_to_the_first(void)
{
    fan_storage *st = fan_storage_new(64);
    double *memory = st->data;
    fan_array *a = view_of(st, memory, FAN_DT_FLOAT64, 0, NULL, NULL);
    fan_array *b = view_of(st, memory + 1, FAN_DT_FLOAT64, 0, NULL, NULL);
    fan_array *out = view_of(st, memory + 2, FAN_DT_FLOAT64, 0, NULL, NULL);
    fan_operand of_a = {.array = a, .acc = FAN_DT_FLOAT64};
    fan_operand of_b = {.array = b, .acc = FAN_DT_FLOAT64};
    memory[0] = -0.0;
    memory[1] = -0.0;
    for (size_t n = 1; n <= 3; n++) {
        fan_sum(out, (fan_operand[]){of_a, of_b, of_a}, n, NULL);
        CHECK(same_real(memory[2], -0.0));
    }
    /* the order of a left fold: (1e16 + 1) + 1 loses both ones, (1 + 1) + 1e16 keeps two */
    memory[0] = 1;
    memory[1] = 1e16;
    fan_sum(out, (fan_operand[]){of_b, of_a, of_a}, 3, NULL);
    CHECK(memory[2] == 1e16);
    fan_sum(out, (fan_operand[]){of_a, of_a, of_b}, 3, NULL);
    CHECK(memory[2] == 1e16 + 2);
    drop_arrays((fan_array *[]){a, b, out}, 3);
    fan_storage_drop(st);
}

/* byte_sum: x, a byte of dtype d, alone or (n 2) twice. */
static int8_t byte_sum(fan_dtype d, int8_t x, size_t n)
{
    fan_array *a = array_shaped(d, 0, NULL);
    fan_array *out = array_shaped(d, 0, NULL);
    int8_t got;
    memcpy(a->data, &x, 1);
    fan_sum(out, (fan_operand[]){{.array = a, .acc = d}, {.array = a, .acc = d}}, n, NULL);
    memcpy(&got, out->data, 1);
    fan_array_drop(a);
    fan_array_drop(out);
    return got;
}

/* int8 wraps, bool is "or" of any nonzero bytes, a low float rounds once at the end or at each add,
 * by its accumulation dtype. */
static void each_kind_sums_in_its_way(void)
{
    CHECK_INT(byte_sum(FAN_DT_INT8, 100, 2), -56);
    CHECK_INT(byte_sum(FAN_DT_BOOL, INT8_MIN, 2), 1);
    CHECK_INT(byte_sum(FAN_DT_BOOL, INT8_MIN, 1), 1);
    fan_operand ten[10];
    fan_array *a = array_shaped(FAN_DT_FLOAT16, 0, NULL);
    fan_array *b = array_shaped(FAN_DT_FLOAT16, 0, NULL);
    fan_array *out = array_shaped(FAN_DT_FLOAT16, 0, NULL);
    put_number(a, 0, (number){0, 2048, 0});
    put_number(b, 0, (number){0, 1, 0});
    for (int k = 0; k < 10; k++)
        ten[k] = (fan_operand){.array = k ? b : a, .acc = FAN_DT_FLOAT32};
    fan_sum(out, ten, 10, NULL);
    CHECK(same_real(get(out, 0).re, 2056)); /* 2057 is a tie */
    for (int k = 0; k < 10; k++)
        ten[k].acc = FAN_DT_FLOAT16;
    fan_sum(out, ten, 10, NULL);
    CHECK(same_real(get(out, 0).re, 2048)); /* 2049 is a tie each time */
    drop_arrays((fan_array *[]){a, b, out}, 3);
}

/* reduced_place: the index in `out` of what element i of `in` is added to. */
static int64_t reduced_place(const fan_array *in, const fan_array *out, int64_t i)
{
    int64_t place = 0;
    int64_t step = 1;
    int to = out->ndim - 1;
    for (int k = in->ndim - 1; to >= 0; k--, to--) {
        if (out->shape[to] != 1)
            place += i % in->shape[k] * step;
        i /= in->shape[k];
        step *= out->shape[to];
    }
    return place;
}

/* left_fold: of every `step`-th of n terms, from the first on. */
static number left_fold(fan_dtype acc, const number *terms, int64_t n, int64_t step)
{
    number x = terms[0];
    for (int64_t k = step; k < n; k += step)
        x = add_numbers(acc, x, terms[k]);
    return x;
}

/* group_sum: the sum of up to 8192 terms: each of 32 lanes is a left fold, and so is their sum. */
static number group_sum(fan_dtype acc, const number *terms, int64_t n)
{
    number lanes[32];
    int64_t used = smaller(n, 32);
    for (int64_t k = 0; k < used; k++)
        lanes[k] = left_fold(acc, terms + k, n - k, 32);
    return left_fold(acc, lanes, used, 1);
}

/* reduce_terms: the sum of n terms in the order of D7; `terms` is overwritten. */
static number reduce_terms(fan_dtype acc, number *terms, int64_t n)
{
    int64_t left = 0;
    if (n == 0)
        return (number){0, 0, 0};
    if (n <= 256)
        return left_fold(acc, terms, n, 1);
    for (int64_t at = 0; at < n; at += 8192)
        terms[left++] = group_sum(acc, terms + at, smaller(n - at, 8192));
    while (left > 1) {
        int64_t runs = 0;
        for (int64_t at = 0; at < left; at += 256)
            terms[runs++] = left_fold(acc, terms + at, smaller(left - at, 256), 1);
        left = runs;
    }
    return terms[0];
}

/* reduce_one: what element o of a reduction must be; the reduced axes are read in C order. `terms`
 * has room for the elements of `in`. */
static number reduce_one(const fan_array *in, const fan_array *out, int64_t o, number *terms)
{
    fan_dtype acc = fan_reduce_dtype(in->dtype);
    int64_t n = 0;
    for (int64_t i = 0; i < in->size; i++) {
        if (reduced_place(in, out, i) == o)
            terms[n++] = convert_number(in->dtype, get(in, i), acc);
    }
    return convert_number(acc, reduce_terms(acc, terms, n), out->dtype);
}

static void reductions_have_the_order_of_their_length(void)
{
    int rows = 0;
    int zeros = 0;
    int lanes = 0;
    for (int round = 0; round < rounds(2000); round++) {
        int64_t shape[4], small[4];
        int ndim = (int)random_below(5);
        int fewer = random_axes(ndim);
        for (int i = 0; i < ndim; i++)
            shape[i] = one_in(30) ? 0 : 1 + random_below(5);
        if (ndim && round % 16 == 0)
            shape[random_below(ndim)] = 60 + random_below(260);
        random_small(small, fewer, ndim, shape);
        fan_dtype d = random_dtype();
        fan_dtype to = dtype_or_random(d);
        if (!fan_dtype_can_cast(d, to))
            to = d;
        fan_array *in = random_view(d, ndim, shape, true);
        fan_array *out = random_view(to, fewer, small, false);
        number *terms = malloc(sizeof *terms * (size_t)(in->size + 1));
        CHECK(fan_broadcasts_from(ndim, shape, fewer, small));
        fan_reduce(out, in, in->dtype);
        for (int64_t i = 0; i < out->size; i++) {
            if (!CHECK(same_number(get(out, i), reduce_one(in, out, i, terms)))) {
                fprintf(stderr, "    round %d: %s to %s\n", round, fan_dtype_name(d),
                        fan_dtype_name(to));
            }
        }
        rows += in->size > 0;
        zeros += in->size == 0 && out->size > 0;
        lanes += out->size > 0 && in->size / out->size > 256;
        free(terms);
        fan_array_drop(in);
        fan_array_drop(out);
    }
    CHECK(rows > rounds(1000) && zeros > rounds(20) && lanes > 0);
}

/* Of 1e16 and then ones, a left fold loses every one, and the lanes of a longer sum keep most. */
static void from_257_terms_on_a_reduction_has_lanes(void)
{
    for (int64_t n = 256; n <= 257; n++) {
        number terms[257];
        fan_array *in = array_of(FAN_DT_FLOAT64, n);
        fan_array *out = array_shaped(FAN_DT_FLOAT64, 0, NULL);
        for (int64_t i = 0; i < n; i++) {
            terms[i] = (number){0, i == 0 ? 1e16 : 1, 0};
            put_number(in, i, terms[i]);
        }
        number folded = left_fold(FAN_DT_FLOAT64, terms, n, 1);
        number want = reduce_terms(FAN_DT_FLOAT64, terms, n);
        fan_reduce(out, in, FAN_DT_FLOAT64);
        CHECK(same_number(get(out, 0), want));
        CHECK(same_number(folded, want) == (n == 256));
        fan_array_drop(in);
        fan_array_drop(out);
    }
}

/* ---- one result, whatever does it ---- */

/* fresh: a gap-free array whose first element lies `off` bytes behind a line. */
static fan_array *fresh(fan_dtype d, int64_t n, size_t off)
{
    int64_t step = (int64_t)fan_dtype_size(d);
    fan_storage *s = fan_storage_new((size_t)(n * step) + off + 64);
    fan_array *a = view_of(s, (char *)s->data + off, d, 1, &n, &step);
    fan_storage_drop(s);
    return a;
}

static bool is_finite(number x)
{
    return isfinite(x.re) && isfinite(x.im);
}

static bool is_wild(number x)
{
    double most = fmax(fabs(x.re), fabs(x.im));
    return most > 1e100 || isnan(x.re) || isnan(x.im);
}

/* fill: numbers of many sizes, with signed zeros, subnormals and (`wild`) infinities and NaNs among
 * them; one array in many is enough of them. */
static void fill(fan_array *a, bool wild)
{
    size_t size = fan_dtype_size(a->dtype);
    char pattern[16 * 997];
    for (size_t k = 0; k < 997; k++) {
        char *p = pattern + k * size;
        do {
            random_element(a->dtype, p);
        } while (!wild && is_wild(load_number(a->dtype, p)));
    }
    for (int64_t i = 0; i < a->size; i++) {
        size_t from = (size_t)((i * 7 + i / 997) % 997);
        memcpy(a->data + (size_t)i * size, pattern + from * size, size);
    }
}

/* part_dtype: of the real and the imaginary part of a complex dtype; another dtype is its own. */
static fan_dtype part_dtype(fan_dtype d)
{
    if (d == FAN_DT_COMPLEX64)
        return FAN_DT_FLOAT32;
    return d == FAN_DT_COMPLEX128 ? FAN_DT_FLOAT64 : d;
}

/* hash_of: of the elements; all NaNs are one. */
static uint64_t hash_of(const fan_array *a)
{
    uint64_t h = 1469598103934665603u;
    fan_dtype part = part_dtype(a->dtype);
    size_t size = fan_dtype_size(part);
    size_t n = (size_t)a->size * fan_dtype_size(a->dtype) / size;
    for (size_t i = 0; i < n; i++) {
        const char *p = a->data + i * size;
        uint64_t bits = 0;
        memcpy(&bits, p, size);
        if (fan_dtype_kind(part) == 'f' && isnan(load_number(part, p).re))
            bits = 0x7ff8;
        h = (h ^ bits) * 1099511628211u;
    }
    return h;
}

/* same_facts: all statistics are equal but the sum of squares. */
static bool same_facts(const fan_stats *a, const fan_stats *b)
{
    if (a->count != b->count || a->nonfinite != b->nonfinite)
        return false;
    if (a->scale != b->scale || a->absmax != b->absmax)
        return false;
    return a->bad == b->bad;
}

static bool same_stats(fan_stats a, fan_stats b)
{
    return memcmp(&a.squares, &b.squares, sizeof a.squares) == 0 && same_facts(&a, &b);
}

/* The sum keeps statistics of each piece on the stack: FAN_STATS_PIECES of them, whatever the
 * size. */
static void statistics_have_no_more_pieces_than_there_is_room_for(void)
{
    for (int64_t all = 1; all <= INT64_C(1) << 40; all *= 2) {
        for (int64_t size = all - 1; size <= all + 1; size++) {
            int64_t piece = fan_stats_piece(size);
            CHECK(piece > 0 && (size + piece - 1) / piece <= FAN_STATS_PIECES);
        }
    }
}

/* magnitude: of a complex number, moved to where its square is a number. */
static double magnitude(number z)
{
    double square = z.re * z.re + z.im * z.im;
    int move = 0;
    if (square <= 1e-280) {
        move = 600;
    } else if (!(square < 1e280)) {
        move = -600;
    }
    double re = ldexp(z.re, move);
    double im = ldexp(z.im, move);
    double size = ldexp(sqrt(re * re + im * im), -move);
    if (isfinite(size))
        CHECK(fabs(size - hypot(z.re, z.im)) <= 4 * DBL_EPSILON * size + 5e-324);
    return size;
}

/* model_piece: adds elements [at, end) of a to the statistics. */
static void model_piece(const fan_array *a, int64_t at, int64_t end, fan_stats *all)
{
    fan_stats_run run = {.top = 0};
    fan_stats one = {.count = 0};
    int parts = is_complex(a->dtype) ? 2 : 1;
    int64_t position = 0;
    for (int64_t i = at; i < end; i++) {
        char wide[16];
        size_t size = fan_dtype_size(a->dtype);
        fan_convert(wide, FAN_DT_COMPLEX128, 16, a->data + (size_t)i * size, a->dtype, 0, 1);
        number z = load_number(FAN_DT_COMPLEX128, wide);
        bool finite = is_finite(z);
        double scaled[2] = {ldexp(z.re, -all->scale), ldexp(z.im, -all->scale)};
        for (int part = 0; part < parts; part++) {
            if (finite)
                run.lane[position % 16] += scaled[part] * scaled[part];
            position++;
            if (position % 512 == 0)
                fan_stats_block_end(&run);
        }
        all->count++;
        all->nonfinite += !finite;
        if (finite)
            all->absmax = fmax(all->absmax, parts == 1 ? fabs(z.re) : magnitude(z));
    }
    fan_stats_block_end(&run);
    for (int lane = 0; lane < 16; lane++) {
        fan_sum_and_rest(&one.squares, &one.rest, run.total[lane]);
        one.rest += run.rest[lane];
    }
    fan_sum_and_rest(&all->squares, &all->rest, one.squares);
    all->rest += one.rest;
}

/* model_scaled: what the header of stats.h says, element by element, of a gap-free array; the
 * squares of the elements times 2^-scale. */
static fan_stats model_scaled(const fan_array *a, int scale)
{
    fan_stats all = {.bad = SIZE_MAX, .scale = scale};
    int64_t piece = fan_stats_piece(a->size);
    for (int64_t at = 0; at < a->size; at += piece)
        model_piece(a, at, smaller(at + piece, a->size), &all);
    all.squares += all.rest;
    all.rest = 0;
    return all;
}

static fan_stats model_stats(const fan_array *a)
{
    fan_stats plain = model_scaled(a, 0);
    if (plain.absmax > 0x1p400)
        return model_scaled(a, 600);
    if (plain.absmax > 0 && plain.absmax < 0x1p-400)
        return model_scaled(a, -600);
    return plain;
}

/* model_bad: the first operand that has no number where the sum has none; SIZE_MAX: there is
 * none. */
static size_t model_bad(const fan_operand *in, size_t n, const fan_array *out)
{
    for (size_t k = 0; k < n && !is_whole(out->dtype); k++) {
        for (int64_t i = 0; i < out->size; i++) {
            if (!is_finite(get(in[k].array, i)) && !is_finite(get(out, i)))
                return k;
        }
    }
    return SIZE_MAX;
}

/* A sum that every way computes: dtypes, number and length of the operands, where they lie. */
typedef struct case_of {
    fan_dtype d, acc;
    size_t n;
    int64_t size;
    size_t off;
    bool wild, in_place;
} case_of;

/* check_stats: those of the first way are the model's; those of the others are the same. */
static bool check_stats(const case_of *c, const fan_operand *in, const fan_array *out,
                        const fan_stats *got, fan_stats *known)
{
    bool same = true;
    if (!known->count) {
        *known = *got;
        fan_stats model = model_stats(out);
        fan_stats of;
        if (!c->in_place) {
            model.bad = model_bad(in, c->n, out);
            same &= CHECK(same_stats(*got, model));
        }
        fan_stats_of(out, &of);
        of.bad = got->bad;
        same &= CHECK(same_stats(*got, of));
    }
    return same & CHECK(same_stats(*got, *known));
}

/* every_way: the sum and its statistics on each instruction set, with one thread and two, alone and
 * beside statistics, in place and not: one hash. */
static void every_way(case_of c)
{
    fan_array *a[70];
    fan_operand in[70];
    uint64_t first = 0;
    fan_stats known = {0};
    for (size_t k = 0; k < c.n; k++) {
        a[k] = fresh(c.d, c.size, c.off * k % 4096);
        fill(a[k], c.wild && k % 3 == 1);
        in[k] = (fan_operand){.array = a[k], .acc = c.acc};
    }
    const fan_array *middle = a[c.n / 2];
    size_t bytes = (size_t)c.size * fan_dtype_size(c.d);
    fan_array *keep = fresh(c.d, c.size, 0);
    fan_array *out;
    if (c.in_place) {
        out = fan_array_hold(a[c.n / 2]);
    } else {
        out = fresh(c.d, c.size, c.off ? fan_dtype_size(c.d) : 0);
    }
    memcpy(keep->data, middle->data, bytes);
    for (size_t way = 0; fan_sum_isa_at(way / 4); way++) {
        int threads = 1 + (int)(way / 2 % 2);
        bool stats = way % 2;
        fan_stats got;
        if (way % 4 == 0)
            CHECK(fan_sum_set_isa(fan_sum_isa_at(way / 4)));
        fan_workers_set(threads);
        if (c.in_place)
            memcpy(out->data, keep->data, bytes);
        fan_sum_options options = {.parallel = true};
        if (stats)
            options.stats = &got;
        fan_sum(out, in, c.n, &options);
        uint64_t h = hash_of(out);
        if (way == 0)
            first = h;
        bool same = CHECK(h == first);
        if (stats)
            same &= check_stats(&c, in, out, &got, &known);
        if (!same) {
            fprintf(stderr,
                    "    %s/%s, %zu x %lld, offset %zu, %s, %d threads, stats %d, in place %d\n",
                    fan_dtype_name(c.d), fan_dtype_name(c.acc), c.n, (long long)c.size, c.off,
                    fan_sum_isa(), threads, stats, c.in_place);
        }
    }
    fan_workers_set(0);
    fan_array_drop(keep);
    fan_array_drop(out);
    drop_arrays(a, c.n);
}

static bool is_large(fan_dtype d)
{
    switch (d) {
    case FAN_DT_FLOAT32:
    case FAN_DT_BFLOAT16:
    case FAN_DT_COMPLEX128:
    case FAN_DT_INT64: return true;
    default: return false;
    }
}

/* all_ways: of sums of dtype d in dtype acc, of 1 to 17 and of 64 operands. */
static void all_ways(fan_dtype d, fan_dtype acc)
{
    static const size_t offsets[] = {0, 1, 64, 1088};
    for (size_t n = 1; n <= 18; n++) {
        if (!is_full && (n + (size_t)d) % 4 != 0)
            continue;
        bool in_place = one_in(3);
        int64_t size = 1 + random_below(1 + random_below(3000));
        every_way((case_of){d, acc, n == 18 ? 64 : n, size, offsets[n % 4], n % 2, in_place});
    }
}

static void all_ways_are_one(void)
{
    for (fan_dtype d = 0; d < FAN_DT_COUNT; d++) {
        fan_dtype accs[] = {d, fan_dtype_accumulate(d), d};
        if (d == FAN_DT_FLOAT32) {
            accs[2] = FAN_DT_FLOAT64;
        } else if (d == FAN_DT_COMPLEX64) {
            accs[2] = FAN_DT_COMPLEX128;
        }
        for (int k = 0; k < 3; k++) {
            if (k && accs[k] == d)
                continue;
            all_ways(d, accs[k]);
            if (!is_full && k && d != FAN_DT_BFLOAT16)
                continue;
            /* several pieces, two threads */
            int64_t size = is_full && is_large(d) ? 700001 : 40001;
            every_way((case_of){d, accs[k], 3, size, 64, true, false});
        }
    }
    static const case_of long_ones[] = {
        {FAN_DT_FLOAT32, FAN_DT_FLOAT32, 3, 700001, 64, true, true},
        {FAN_DT_FLOAT32, FAN_DT_FLOAT32, 17, 100003, 1088, false, false}, /* in groups */
        {FAN_DT_BFLOAT16, FAN_DT_FLOAT32, 20, 200003, 1088, false, true},
        {FAN_DT_FLOAT32, FAN_DT_FLOAT32, 70, 20003, 64, true, false}, /* too many for one list */
    };
    for (int k = 0; k < 4; k++)
        every_way(long_ones[k]);
}

/* sum_twice: a + a. */
static void sum_twice(const fan_array *out, const fan_array *a, const fan_sum_options *options)
{
    fan_sum(
        out,
        (fan_operand[]){{.array = a, .acc = FAN_DT_FLOAT32}, {.array = a, .acc = FAN_DT_FLOAT32}},
        2, options);
}

/* So large that it is written around the caches, at the start of a line, beside one, and between
 * elements. */
static void what_is_larger_than_the_caches(void)
{
    static const size_t offsets[] = {4, 0, 1};
    int64_t n = (int64_t)9 << 20;
    size_t bytes = (size_t)n * 4;
    for (size_t o = 0; o < (is_full ? 3 : 1); o++) {
        fan_array *a = fresh(FAN_DT_FLOAT32, n, 0);
        fan_array *out = fresh(FAN_DT_FLOAT32, n, offsets[o]);
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
                memset(out->data, 1, bytes);
                fan_sum_options options = {.parallel = i % 2};
                if (stats)
                    options.stats = &s;
                sum_twice(out, a, &options);
                CHECK(memcmp(out->data, plain->data, bytes) == 0);
            }
            fan_stats_of(plain, &want);
            want.bad = SIZE_MAX; /* x + x may overflow, but x is finite in both operands */
            CHECK(same_stats(s, want));
        }
        drop_arrays((fan_array *[]){a, out, plain}, 3);
    }
}

/* every_code: of a low dtype, summed in acc alone and with -0.0, is itself. */
static void every_code(fan_dtype d, fan_dtype acc)
{
    size_t size = fan_dtype_size(d);
    int64_t codes = size == 1 ? 256 : 65536;
    int64_t minus = codes / 2; /* -0.0, which adds nothing */
    fan_array *a = fresh(d, codes, 0);
    fan_array *zero = fresh(d, codes, 0);
    fan_array *out = fresh(d, codes, 0);
    for (int64_t i = 0; i < codes; i++) {
        memcpy(a->data + (size_t)i * size, &i, size);
        memcpy(zero->data + (size_t)i * size, &minus, size);
    }
    const char *in[] = {a->data, zero->data};
    for (size_t n = 1; n <= 2; n++) {
        int64_t wrong = 0;
        CHECK(fan_sum_flat(out->data, in, n, (size_t)codes, d, acc, NULL));
        for (int64_t c = 0; c < codes; c++)
            wrong += !same_number(get(a, c), get(out, c));
        CHECK_INT(wrong, 0);
    }
    drop_arrays((fan_array *[]){a, zero, out}, 3);
}

/* Every low float there is, through every loop, beside zero and alone. */
static void every_low_float(void)
{
    for (fan_dtype d = 0; d < FAN_DT_COUNT; d++) {
        for (size_t i = 0; is_low(d) && fan_sum_isa_at(i); i++) {
            CHECK(fan_sum_set_isa(fan_sum_isa_at(i)));
            every_code(d, FAN_DT_FLOAT32);
            every_code(d, d);
        }
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
        random_sum(&s, (operands)(round % 4));
        fan_dtype d = s.in[s.n - 1].acc;
        if (fan_dtype_accumulate(s.dtype) == d && random_below(2))
            d = s.dtype;
        fan_array *out = random_view(d, s.ndim, s.shape, false);
        any_isa();
        fan_sum(out, s.in, s.n, &(fan_sum_options){.scale = s.scale, .stats = &got});
        fan_array *flat = fresh(d, out->size, 0);
        for (int64_t i = 0; i < out->size; i++)
            put_number(flat, i, get(out, i));
        fan_stats want = model_stats(flat);
        want.bad = model_bad(s.in, s.n, out);
        culprits += want.bad != SIZE_MAX;
        bool close =
            got.squares == want.squares || fabs(got.squares - want.squares) <= 1e-12 * want.squares;
        if (!CHECK(close && same_facts(&got, &want))) {
            fprintf(stderr, "    round %d: %s, %lld elements: %g %g, %g %g, %llu %llu, %zu %zu\n",
                    round, fan_dtype_name(d), (long long)out->size, got.squares, want.squares,
                    got.absmax, want.absmax, (unsigned long long)got.nonfinite,
                    (unsigned long long)want.nonfinite, got.bad, want.bad);
        }
        fan_array_drop(out);
        fan_array_drop(flat);
        drop_arrays(s.array, s.n);
    }
    CHECK(culprits > rounds(20));
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
    put_number(a, 777, (number){0, 3e38, 0});
    CHECK(hash_of(a) != h);
    fan_stats_of(a, &t);
    CHECK(!same_stats(s, t) && t.absmax >= 3e38f && fan_stats_sumsq(&t) > fan_stats_sumsq(&s));
    put_number(a, 3, (number){0, INFINITY, 0});
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
    sum_twice(out, a, &(fan_sum_options){.stats = &s, .parallel = true});
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
    sum_twice(out, a, &(fan_sum_options){.stats = &s});
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
    random_seed(argc, argv);
    int64_t live = fan_mem_get().live;
    statistics_have_no_more_pieces_than_there_is_room_for();
    nothing_is_added_to_the_first();
    each_kind_sums_in_its_way();
    every_count_and_length();
    for (operands kind = WIDENING; kind <= WIDER; kind++)
        sums_equal_the_left_fold(kind);
    in_place_at_every_position();
    reductions_have_the_order_of_their_length();
    from_257_terms_on_a_reduction_has_lanes();
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
