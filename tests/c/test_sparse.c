/* Sparse sums against a dense model: every number of the dense shape is folded by itself, in the
 * order (key, position). The model, random sparse arrays, then merges, scatters, reductions and
 * casts of them, and what is refused or fails. */
#include "array/sum.h"
#include "array/sparse.h"

#include "base/mem.h"
#include "check.h"
#include "oracle.h"

#define MOST 5
#define ALL 4096 /* numbers of the largest dense shape */

/* ---- the model ---- */

typedef struct model {
    bool here[ALL];
    number x[ALL];
    fan_dtype acc;
} model;

static int64_t load_at(const fan_array *a, int64_t i)
{
    return (int64_t)get(a, i).whole;
}

static int dims_of(const fan_sparse *s)
{
    return s->format == FAN_FORMAT_COO ? (int)s->indices->shape[0] : 2;
}

static bool has_blocks(fan_format f)
{
    return f == FAN_FORMAT_BSR || f == FAN_FORMAT_BSC;
}

static bool is_by_column(fan_format f)
{
    return f == FAN_FORMAT_CSC || f == FAN_FORMAT_BSC;
}

/* place_of: the linear index in the dense shape of number c of stored entry e. */
static int64_t place_of(const fan_sparse *s, int64_t e, int64_t c)
{
    int64_t index[FAN_MAX_NDIM] = {0};
    if (s->format == FAN_FORMAT_COO) {
        int dim = dims_of(s);
        for (int i = s->ndim - 1; i >= dim; i--) {
            index[i] = c % s->shape[i];
            c /= s->shape[i];
        }
        for (int i = 0; i < dim; i++)
            index[i] = load_at(s->indices, i * s->indices->shape[1] + e);
    } else {
        int64_t line = 0;
        int64_t h = 1;
        int64_t w = 1;
        int along = is_by_column(s->format);
        if (has_blocks(s->format)) {
            h = s->values->shape[1];
            w = s->values->shape[2];
        }
        while (load_at(s->pointers, line + 1) <= e)
            line++;
        index[along] = line;
        index[1 - along] = load_at(s->indices, e);
        index[0] = index[0] * h + c / w;
        index[1] = index[1] * w + c % w;
    }
    int64_t place = 0;
    for (int i = 0; i < s->ndim; i++)
        place = place * s->shape[i] + index[i];
    return place;
}

static int64_t numbers_in_entry(const fan_sparse *s)
{
    return fan_sparse_nnz(s) ? s->values->size / fan_sparse_nnz(s) : 0;
}

static void model_convert(model *m, fan_dtype to)
{
    for (int i = 0; i < ALL; i++) {
        if (m->here[i])
            m->x[i] = convert_number(m->acc, m->x[i], to);
    }
    m->acc = to;
}

static void model_add(model *m, const fan_sparse *s, fan_dtype acc)
{
    int64_t cells = numbers_in_entry(s);
    model_convert(m, acc);
    for (int64_t i = 0; i < s->values->size; i++) {
        int64_t at = place_of(s, i / cells, i % cells);
        number x = convert_number(s->values->dtype, get(s->values, i), acc);
        m->x[at] = m->here[at] ? add_numbers(acc, m->x[at], x) : x;
        m->here[at] = true;
    }
}

static void model_scale(model *m, const fan_scale *scale)
{
    number factor = factor_of(scale, m->acc);
    for (int i = 0; scale->on && i < ALL; i++) {
        if (m->here[i])
            m->x[i] = scale_number(m->acc, m->x[i], factor);
    }
}

static model *model_new(fan_dtype acc)
{
    model *m = calloc(1, sizeof *m);
    m->acc = acc;
    return m;
}

/* same_as_model: s holds exactly the model's numbers, in its dtype, folded in their own order. */
static bool same_as_model(const fan_sparse *s, const model *m)
{
    model *own = model_new(m->acc);
    model_add(own, s, m->acc);
    bool same = s->values->dtype == m->acc;
    for (int i = 0; same && i < ALL; i++) {
        same = own->here[i] == m->here[i];
        if (same && m->here[i])
            same = same_number(own->x[i], m->x[i]);
    }
    free(own);
    return same;
}

/* entry_rises: whether entry e of a COO array comes after the one before it. */
static bool entry_rises(const fan_sparse *s, int64_t e)
{
    int64_t nnz = fan_sparse_nnz(s);
    for (int i = 0; i < dims_of(s); i++) {
        int64_t before = load_at(s->indices, i * nnz + e - 1);
        int64_t here = load_at(s->indices, i * nnz + e);
        if (before != here)
            return before < here;
    }
    return false;
}

/* is_sorted: entries rise strictly in the order of their index parts. */
static bool is_sorted(const fan_sparse *s)
{
    if (s->format == FAN_FORMAT_COO) {
        for (int64_t e = 1; e < fan_sparse_nnz(s); e++) {
            if (!entry_rises(s, e))
                return false;
        }
        return true;
    }
    for (int64_t p = 0; p + 1 < s->pointers->shape[0]; p++) {
        int64_t end = load_at(s->pointers, p + 1);
        for (int64_t e = load_at(s->pointers, p) + 1; e < end; e++) {
            if (load_at(s->indices, e - 1) >= load_at(s->indices, e))
                return false;
        }
    }
    return true;
}

/* ---- random sparse arrays ---- */

static fan_array *random_index(int ndim, const int64_t *shape)
{
    return random_view(random_below(2) ? FAN_DT_INT32 : FAN_DT_INT64, ndim, shape, false);
}

static void put_index(const fan_array *a, int64_t i, int64_t x)
{
    put_number(a, i, (number){(uint64_t)x, 0, 0});
}

/* The dense shape of a random sparse array, and how it is cut. */
typedef struct shape_of {
    int ndim;
    int64_t shape[4];
    int dims;     /* sparse_dim of COO */
    int64_t h, w; /* of a block */
} shape_of;

/* fill_pointers: with numbers that rise from 0 to nnz. */
static void fill_pointers(const fan_array *pointers, int64_t rows, int64_t nnz)
{
    int64_t last = 0;
    put_index(pointers, 0, 0);
    put_index(pointers, rows, nnz);
    for (int64_t p = 1; p < rows; p++) {
        last += random_below(nnz / rows + 2);
        last = smaller(last, nnz);
        put_index(pointers, p, last);
    }
}

/* sparse_of: an array of three parts, which it takes over. */
static fan_sparse *sparse_of(fan_format f, int ndim, const int64_t *shape, fan_array *indices,
                             fan_array *pointers, fan_array *values)
{
    fan_sparse *s = NULL;
    CHECK_OK(fan_sparse_new(f, ndim, shape, indices, pointers, values, false, &s, NULL));
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return s;
}

/* random_sparse: entries are in any order, with duplicates. */
static fan_sparse *random_sparse(fan_format f, fan_dtype d, const shape_of *is)
{
    int64_t nnz = one_in(6) ? 0 : random_below(40);
    int64_t part[FAN_MAX_NDIM];
    const int64_t *shape = is->shape;
    fan_array *indices, *values;
    fan_array *pointers = NULL;
    int n = 1;
    if (f == FAN_FORMAT_COO) {
        for (int i = 0; i < is->dims; i++)
            nnz *= shape[i] != 0;
        const int64_t index_shape[] = {is->dims, nnz};
        indices = random_index(2, index_shape);
        for (int64_t i = 0; i < is->dims * nnz; i++)
            put_index(indices, i, random_below(shape[i / nnz]));
        for (int i = is->dims; i < is->ndim; i++)
            part[n++] = shape[i];
    } else {
        int64_t counts[] = {shape[0] / is->h, shape[1] / is->w};
        int along = is_by_column(f);
        int64_t rows = counts[along];
        int64_t others = counts[1 - along];
        if (rows == 0 || others == 0)
            nnz = 0;
        pointers = random_index(1, &(int64_t){rows + 1});
        indices = random_index(1, &nnz);
        fill_pointers(pointers, rows, nnz);
        for (int64_t e = 0; e < nnz; e++)
            put_index(indices, e, random_below(others));
        if (has_blocks(f)) {
            part[n++] = is->h;
            part[n++] = is->w;
        }
    }
    part[0] = nnz;
    if (n <= 4) {
        values = random_view(d, n, part, true);
    } else {
        values = array_shaped(d, n, part);
        for (int64_t i = 0; i < values->size; i++)
            random_element(d, element(values, i));
    }
    fan_sparse *s = sparse_of(f, is->ndim, shape, indices, pointers, values);
    CHECK_OK(fan_sparse_check(s, NULL));
    return s;
}

typedef struct sum {
    size_t n;
    fan_sparse *part[MOST];
    fan_sparse_operand in[MOST];
    fan_dtype dtype;
    fan_scale scale;
    bool alike;
} sum;

static void drop_parts(sum *s)
{
    for (size_t k = 0; k < s->n; k++)
        fan_sparse_drop(s->part[k]);
}

/* are_alike: two arrays of one format are cut in one way. */
static bool are_alike(const fan_sparse *a, const fan_sparse *b)
{
    if (a->format != b->format || dims_of(a) != dims_of(b))
        return false;
    size_t axes = (size_t)(b->values->ndim - 1);
    return memcmp(a->values->shape + 1, b->values->shape + 1, axes * sizeof(int64_t)) == 0;
}

typedef enum cut {
    ONE_DIM,
    SEVERAL_DIMS,
    COMPRESSED,
    MIXTURE
} cut;

/* random_sum: of COO arrays of one sparse_dim or of several, of compressed ones, or of all. */
static void random_sum(sum *s, cut kind)
{
    bool is_coo = kind < COMPRESSED;
    shape_of is = {.ndim = is_coo ? (int)random_below(4) : 2};
    is.dims = random_axes(is.ndim);
    for (int i = 0; i < is.ndim; i++)
        is.shape[i] = one_in(25) ? 0 : 2 * (1 + random_below(3));
    fan_format f = (fan_format)(1 + random_below(4));
    is.h = 1 + random_below(2);
    is.w = 1 + random_below(2);
    s->n = 1 + (size_t)random_below(MOST);
    s->alike = true;
    bool own = one_in(6);
    fan_dtype d = random_dtype();
    s->dtype = d;
    for (size_t k = 0; k < s->n; k++) {
        if (!own && one_in(3))
            d = random_dtype();
        if (fan_dtype_promote(s->dtype, d) == FAN_DT_NONE)
            d = s->dtype;
        s->dtype = fan_dtype_promote(s->dtype, d);
        if (kind == SEVERAL_DIMS)
            is.dims = random_axes(is.ndim);
        if (kind == MIXTURE) {
            f = (fan_format)random_below(5);
            is.dims = (int)random_below(3);
            is.h = 1 + random_below(2);
            is.w = 1 + random_below(2);
        }
        shape_of part = is;
        if (is_coo || !has_blocks(f)) {
            part.h = 1;
            part.w = 1;
        }
        s->part[k] = random_sparse(is_coo ? FAN_FORMAT_COO : f, d, &part);
        fan_dtype acc = s->dtype;
        if (!own)
            acc = fan_dtype_accumulate(acc);
        s->in[k] = (fan_sparse_operand){s->part[k], acc};
        s->alike &= are_alike(s->part[k], s->part[0]);
    }
    s->scale = random_scale(one_in(4));
}

/* ---- the tests ---- */

/* merged: the sum of n operands. */
static fan_sparse *merged(const fan_sparse_operand *in, size_t n, bool coalesce, fan_dtype result,
                          const fan_scale *scale)
{
    fan_sparse *got = NULL;
    CHECK_OK(fan_sparse_merge(in, n, coalesce, result, scale, &got, NULL));
    return got;
}

/* check_two_steps: folding in two steps gives what folding in one gives (park and fold: the same
 * bits for every budget). */
static void check_two_steps(const sum *s, const model *m)
{
    size_t split = 1 + (size_t)random_below((int64_t)s->n - 1);
    size_t left = s->n - split;
    fan_sparse_operand rest[MOST + 1];
    fan_sparse *first = merged(s->in, split, random_below(2), FAN_DT_NONE, NULL);
    rest[0] = (fan_sparse_operand){first, s->in[split - 1].acc};
    memcpy(rest + 1, s->in + split, left * sizeof rest[0]);
    fan_sparse *both = merged(rest, left + 1, random_below(2), FAN_DT_NONE, NULL);
    CHECK(same_as_model(both, m));
    fan_sparse_drop(first);
    fan_sparse_drop(both);
}

static void merges_equal_the_dense_model(cut kind)
{
    int coalesced = 0;
    int not_coalesced = 0;
    int mixed = 0;
    for (int round = 0; round < 1200; round++) {
        sum s;
        random_sum(&s, kind);
        bool want = random_below(2);
        fan_dtype result = random_below(2) ? FAN_DT_NONE : s.dtype;
        model *m = model_new(s.in[0].acc);
        for (size_t k = 0; k < s.n; k++)
            model_add(m, s.part[k], s.in[k].acc);
        model_scale(m, &s.scale);
        model_convert(m, result == FAN_DT_NONE ? s.in[s.n - 1].acc : result);
        fan_sparse *got = merged(s.in, s.n, want, result, s.scale.on ? &s.scale : NULL);
        CHECK(same_as_model(got, m));
        CHECK_OK(fan_sparse_check(got, NULL));
        CHECK(got->indices->dtype == FAN_DT_INT64);
        if (s.alike) {
            CHECK(got->format == s.part[0]->format);
        } else {
            mixed++;
        }
        bool must = want || got->format != FAN_FORMAT_COO || s.scale.on;
        if (got->coalesced || must) {
            CHECK(is_sorted(got));
            CHECK(got->coalesced && got->nnz_coalesced == fan_sparse_nnz(got));
        } else {
            CHECK(got->nnz_coalesced == s.part[0]->nnz_coalesced);
        }
        coalesced += got->coalesced;
        not_coalesced += !got->coalesced;

        /* coalescing never changes bits */
        fan_sparse_operand again = {got, got->values->dtype};
        fan_sparse *twice = merged(&again, 1, true, FAN_DT_NONE, NULL);
        CHECK(same_as_model(twice, m) && is_sorted(twice));
        fan_sparse_drop(twice);
        if (s.n > 1 && !s.scale.on && result == FAN_DT_NONE)
            check_two_steps(&s, m);
        fan_sparse_drop(got);
        free(m);
        drop_parts(&s);
    }
    CHECK(coalesced > 300);
    if (kind == ONE_DIM)
        CHECK(not_coalesced > 100);
    if (kind == SEVERAL_DIMS || kind == MIXTURE)
        CHECK(mixed > 100);
}

/* Entries in (key, position) order, until something coalesces. */
static void coo_is_concatenated_in_order(void)
{
    const int64_t shape = 10;
    const int64_t index_shape[] = {1, 3};
    fan_sparse *s[2];
    fan_sparse_operand in[2];
    for (int k = 0; k < 2; k++) {
        fan_array *indices = array_shaped(FAN_DT_INT32, 2, index_shape);
        fan_array *values = array_of(FAN_DT_FLOAT32, 3);
        for (int e = 0; e < 3; e++) {
            put_index(indices, e, 9 - 2 * e - k);
            put_number(values, e, (number){0, e + 10 * k, 0});
        }
        s[k] = sparse_of(FAN_FORMAT_COO, 1, &shape, indices, NULL, values);
        in[k] = (fan_sparse_operand){s[k], FAN_DT_FLOAT32};
    }
    fan_sparse *got = merged(in, 2, false, FAN_DT_FLOAT32, NULL);
    const int64_t want[] = {9, 7, 5, 8, 6, 4};
    CHECK_INT(fan_sparse_nnz(got), 6);
    for (int e = 0; e < 6; e++) {
        CHECK_INT(load_at(got->indices, e), want[e]);
        CHECK(same_real(get(got->values, e).re, e % 3 + 10 * (e / 3)));
    }
    CHECK(!got->coalesced);
    CHECK_INT(got->nnz_coalesced, 3);
    fan_sparse_drop(got);
    fan_sparse_drop(s[0]);
    fan_sparse_drop(s[1]);
}

/* same_place: entry e of a and entry g of b are at one place of four axes. */
static bool same_place(const fan_sparse *a, int64_t e, const fan_sparse *b, int64_t g)
{
    for (int i = 0; i < 4; i++) {
        int64_t one = load_at(a->indices, i * fan_sparse_nnz(a) + e);
        if (one != load_at(b->indices, i * fan_sparse_nnz(b) + g))
            return false;
    }
    return true;
}

/* Shapes whose linear index does not fit an int64 are sorted column by column. */
static void keys_may_have_several_columns(void)
{
    const int64_t huge = (int64_t)1 << 40;
    const int64_t shape[] = {huge, 3, huge, huge};
    for (int round = 0; round < 50; round++) {
        int64_t nnz = 1 + random_below(200);
        const int64_t index_shape[] = {4, nnz};
        fan_array *indices = array_shaped(FAN_DT_INT64, 2, index_shape);
        fan_array *values = array_of(FAN_DT_INT32, nnz);
        int64_t total = 0;
        int64_t sums = 0;
        for (int64_t e = 0; e < nnz; e++) {
            for (int i = 0; i < 4; i++) {
                int64_t index;
                if (i == 1) {
                    index = random_below(3);
                } else {
                    index = random_below(2) * (huge - 2 + random_below(2));
                }
                put_index(indices, i * nnz + e, index);
            }
            put_index(values, e, random_below(1000000));
            total += load_at(values, e);
        }
        fan_sparse *s = sparse_of(FAN_FORMAT_COO, 4, shape, indices, NULL, values);
        fan_sparse_operand in = {s, FAN_DT_INT32};
        fan_sparse *got = merged(&in, 1, true, FAN_DT_NONE, NULL);
        CHECK(is_sorted(got));
        for (int64_t g = 0; g < fan_sparse_nnz(got); g++) {
            int64_t want = 0;
            for (int64_t e = 0; e < nnz; e++) {
                if (same_place(s, e, got, g))
                    want += load_at(s->values, e);
            }
            CHECK_INT(load_at(got->values, g), want);
            sums += want;
        }
        CHECK_INT(sums, total);
        fan_sparse_drop(got);
        fan_sparse_drop(s);
    }
}

static void a_large_sum_is_sorted_stably(void)
{
    const int64_t shape = 100000;
    const int64_t nnz = 50000;
    const int64_t index_shape[] = {1, nnz};
    fan_array *indices = array_shaped(FAN_DT_INT64, 2, index_shape);
    fan_array *values = array_of(FAN_DT_FLOAT32, nnz);
    float *want = calloc((size_t)shape, sizeof *want);
    bool *here = calloc((size_t)shape, sizeof *here);
    for (int64_t e = 0; e < nnz; e++) {
        int64_t i = random_below(20000) * 5;
        float x = (float)random_below(1000000) / 777.0f;
        put_index(indices, e, i);
        memcpy(element(values, e), &x, 4);
        want[i] = here[i] ? want[i] + x : x;
        here[i] = true;
    }
    fan_sparse *s = sparse_of(FAN_FORMAT_COO, 1, &shape, indices, NULL, values);
    fan_sparse_operand in = {s, FAN_DT_FLOAT32};
    fan_sparse *got = merged(&in, 1, true, FAN_DT_FLOAT32, NULL);
    CHECK(is_sorted(got));
    for (int64_t e = 0; e < fan_sparse_nnz(got); e++)
        CHECK(same_real(get(got->values, e).re, (double)want[load_at(got->indices, e)]));
    free(want);
    free(here);
    fan_sparse_drop(got);
    fan_sparse_drop(s);
}

static void scatters_equal_the_dense_model(void)
{
    for (int round = 0; round < 3000; round++) {
        sum s;
        random_sum(&s, (cut)(round % 4));
        fan_dtype d = dtype_or_random(s.dtype);
        for (size_t k = 0; k < s.n; k++) {
            if (!fan_dtype_can_cast(s.part[k]->values->dtype, d))
                d = s.dtype;
        }
        fan_array *into = random_view(d, s.part[0]->ndim, s.part[0]->shape, false);
        model *m = model_new(d);
        for (int64_t i = 0; i < into->size; i++) {
            m->here[i] = true;
            m->x[i] = get(into, i);
        }
        for (size_t k = 0; k < s.n; k++) {
            model_add(m, s.part[k], d);
            fan_sparse_scatter(into, s.part[k]);
        }
        for (int64_t i = 0; i < into->size; i++)
            CHECK(same_number(get(into, i), m->x[i]));
        free(m);
        fan_array_drop(into);
        drop_parts(&s);
    }
}

/* Rows of an embedding: long runs, converted piece by piece or added where they lie. */
static void long_rows_are_scattered_whole(void)
{
    for (int round = 0; round < 40; round++) {
        int64_t row = 1 + random_below(1500);
        int64_t shape[] = {3, row};
        int64_t part[] = {5, row};
        int64_t index_shape[] = {1, 5};
        fan_dtype d = round % 2 ? FAN_DT_FLOAT32 : FAN_DT_FLOAT16;
        fan_array *values = random_view(d, 2, part, true);
        fan_array *into = random_view(FAN_DT_FLOAT32, 2, shape, false);
        fan_array *indices = array_shaped(FAN_DT_INT64, 2, index_shape);
        for (int64_t e = 0; e < 5; e++)
            put_index(indices, e, random_below(3));
        number *want = malloc(sizeof *want * (size_t)into->size);
        for (int64_t i = 0; i < into->size; i++)
            want[i] = get(into, i);
        for (int64_t i = 0; i < values->size; i++) {
            int64_t at = load_at(indices, i / row) * row + i % row;
            want[at] = add_numbers(FAN_DT_FLOAT32, want[at], get(values, i));
        }
        fan_sparse *s = sparse_of(FAN_FORMAT_COO, 2, shape, indices, NULL, values);
        fan_sparse_scatter(into, s);
        for (int64_t i = 0; i < into->size; i++)
            CHECK(same_number(get(into, i), want[i]));
        free(want);
        fan_sparse_drop(s);
        fan_array_drop(into);
    }
}

/* reduced_place: where the number at `place` of s's shape is in its last `fewer` axes, stretched
 * from `small`. */
static int64_t reduced_place(const fan_sparse *s, int64_t place, int fewer, const int64_t *small)
{
    int64_t at = 0;
    int64_t step = 1;
    const int64_t *shape = s->shape + s->ndim - fewer;
    for (int k = fewer - 1; k >= 0; k--) {
        if (small[k] != 1)
            at += place % shape[k] * step;
        place /= shape[k];
        step *= small[k];
    }
    return at;
}

/* A sum to a declared shape: entries in their order, onto zeros, in the dtype of D7, rounded
 * once. */
static void reductions_equal_the_dense_model(void)
{
    for (int round = 0; round < 1500; round++) {
        sum s;
        random_sum(&s, (cut)(round % 4));
        const fan_sparse *part = s.part[0];
        fan_dtype from = part->values->dtype;
        fan_dtype acc = fan_reduce_dtype(from);
        fan_dtype d = random_below(2) ? from : acc;
        int fewer = random_axes(part->ndim);
        int64_t small[4];
        int64_t cells = numbers_in_entry(part);
        random_small(small, fewer, part->ndim, part->shape);
        fan_array *out = random_view(d, fewer, small, false);
        number want[ALL] = {{0, 0, 0}};
        for (int64_t i = 0; i < part->values->size; i++) {
            int64_t at = reduced_place(part, place_of(part, i / cells, i % cells), fewer, small);
            number x = convert_number(from, get(part->values, i), acc);
            want[at] = add_numbers(acc, want[at], x);
        }
        CHECK_OK(fan_sparse_reduce(out, part, from, NULL));
        for (int64_t i = 0; i < out->size; i++)
            CHECK(same_number(get(out, i), convert_number(acc, want[i], d)));
        fan_array_drop(out);
        drop_parts(&s);
    }
}

static void casts_share_what_does_not_change(void)
{
    for (int round = 0; round < 300; round++) {
        sum s;
        random_sum(&s, (cut)(round % 4));
        const fan_sparse *part = s.part[0];
        fan_sparse *got = NULL;
        fan_dtype from = part->values->dtype;
        fan_dtype d = fan_dtype_promote(from, FAN_DT_FLOAT32);
        CHECK_OK(fan_sparse_cast(part, d, &got, NULL));
        CHECK(got->indices == part->indices && got->pointers == part->pointers);
        CHECK((got->values == part->values) == (d == from));
        CHECK_INT(got->values->dtype, d);
        for (int64_t i = 0; i < got->values->size; i++) {
            number x = convert_number(from, get(part->values, i), d);
            CHECK(same_number(get(got->values, i), x));
        }
        fan_sparse_drop(got);
        drop_parts(&s);
    }
}

static void formats_have_names(void)
{
    fan_format f = FAN_FORMAT_COO;
    CHECK_STR(fan_format_name(FAN_FORMAT_BSC), "bsc");
    CHECK_STR(fan_format_name((fan_format)9), "none");
    CHECK(fan_format_from_name("csc", &f) && f == FAN_FORMAT_CSC);
    CHECK(!fan_format_from_name("dok", &f) && !fan_format_from_name(NULL, &f));
}

static void bad_parts_are_refused(void)
{
    fan_error err;
    fan_sparse *s = NULL;
    const int64_t shape[] = {4, 6};
    const int64_t two[] = {2, 3};
    const int64_t block[] = {3, 2, 3};
    const int64_t odd[] = {3, 3, 3};
    fan_array *coo = array_shaped(FAN_DT_INT64, 2, two);
    fan_array *values = array_of(FAN_DT_FLOAT32, 3);
    fan_array *floats = array_shaped(FAN_DT_FLOAT32, 2, two);
    fan_array *index = array_of(FAN_DT_INT32, 3);
    fan_array *rows = array_of(FAN_DT_INT32, 5);
    fan_array *columns = array_of(FAN_DT_INT32, 6);
    fan_array *blocks = array_shaped(FAN_DT_FLOAT32, 3, block);
    fan_array *odd_blocks = array_shaped(FAN_DT_FLOAT32, 3, odd);
    const struct {
        fan_format f;
        int ndim;
        fan_array *indices, *pointers, *values;
        fan_status want;
        const char *says;
    } cases[] = {
        {FAN_FORMAT_COO, 2, coo, NULL, values, FAN_OK, ""},
        {FAN_FORMAT_COO, 1, coo, NULL, values, FAN_ERR_VALUE, "sparse_dim"},
        {FAN_FORMAT_COO, 2, floats, NULL, values, FAN_ERR_TYPE, "float32"},
        {FAN_FORMAT_COO, 2, coo, NULL, floats, FAN_ERR_VALUE, "(3,)"},
        {FAN_FORMAT_COO, 2, index, NULL, values, FAN_ERR_VALUE, "(3,)"},
        {FAN_FORMAT_CSR, 2, index, rows, values, FAN_OK, ""},
        {FAN_FORMAT_CSR, 2, index, columns, values, FAN_ERR_VALUE, "pointers"},
        {FAN_FORMAT_CSR, 2, index, NULL, values, FAN_ERR_VALUE, "pointers"},
        {FAN_FORMAT_CSR, 2, index, values, values, FAN_ERR_TYPE, "pointers"},
        {FAN_FORMAT_CSC, 2, index, rows, values, FAN_ERR_VALUE, "(7,)"},
        {FAN_FORMAT_CSR, 2, coo, rows, values, FAN_ERR_VALUE, "indices"},
        {FAN_FORMAT_CSR, 1, index, rows, values, FAN_ERR_VALUE, "2 axes"},
        {FAN_FORMAT_BSR, 2, index, index, blocks, FAN_OK, ""},
        {FAN_FORMAT_BSC, 2, index, index, blocks, FAN_OK, ""},
        {FAN_FORMAT_BSR, 2, index, rows, values, FAN_ERR_VALUE, "blocks"},
        {FAN_FORMAT_BSR, 2, index, index, odd_blocks, FAN_ERR_VALUE, "blocks"},
        {(fan_format)9, 2, index, index, blocks, FAN_ERR_VALUE, "format"},
        {FAN_FORMAT_COO, -1, coo, NULL, values, FAN_ERR_VALUE, "axes"},
        {FAN_FORMAT_COO, FAN_MAX_NDIM + 1, coo, NULL, values, FAN_ERR_VALUE, "axes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fan_status got = fan_sparse_new(cases[i].f, cases[i].ndim, shape, cases[i].indices,
                                        cases[i].pointers, cases[i].values, false, &s, &err);
        CHECK_INT(got, cases[i].want);
        CHECK((s != NULL) == (got == FAN_OK));
        if (got)
            CHECK_HAS(err.text, cases[i].says);
        fan_sparse_drop(s);
    }
    fan_array *all[] = {coo, values, floats, index, rows, columns, blocks, odd_blocks};
    drop_arrays(all, 8);
}

/* Index parts may change after they were checked: whatever they then hold, nothing outside is
 * touched. */
static void indices_that_lie_do_no_harm(void)
{
    static const int64_t lies[] = {-1, 1000000, INT64_MAX, INT64_MIN, 7};
    int refused = 0;
    for (int round = 0; round < 2000; round++) {
        sum s;
        random_sum(&s, (cut)(round % 4));
        fan_sparse *part = s.part[0];
        fan_sparse *got = NULL;
        fan_array *victim = part->pointers && random_below(2) ? part->pointers : part->indices;
        fan_array *into = random_view(part->values->dtype, part->ndim, part->shape, false);
        fan_error err;
        for (int i = 0; victim->size && i < 3; i++)
            put_index(victim, random_below(victim->size), lies[random_below(5)]);
        bool good = fan_sparse_check(part, &err) == FAN_OK;
        fan_sparse_scatter(into, part);
        fan_status status = fan_sparse_merge(s.in, 1, true, FAN_DT_NONE, NULL, &got, &err);
        CHECK((status == FAN_OK) == good);
        CHECK((got != NULL) == good);
        if (!good) {
            bool named = strstr(err.text, "index") || strstr(err.text, "pointer");
            CHECK(status == FAN_ERR_VALUE && named);
        }
        refused += !good;
        fan_sparse_drop(got);
        fan_array_drop(into);
        drop_parts(&s);
    }
    CHECK(refused > 500);
}

/* merge_fails: a merge whose allocation n (or all from n on) fails; returns its status. */
static fan_status merge_fails(const sum *s, bool coalesce, int n, int64_t count)
{
    int64_t live = fan_mem_get().live;
    fan_sparse *got = NULL;
    fan_error err;
    fan_mem_fail_at(n, count);
    fan_status status = fan_sparse_merge(s->in, s->n, coalesce, s->dtype, &s->scale, &got, &err);
    fan_mem_fail_at(-1, 0);
    if (status != FAN_OK) {
        CHECK_INT(status, FAN_ERR_NOMEM);
        CHECK(got == NULL && err.status == FAN_ERR_NOMEM);
    }
    fan_sparse_drop(got);
    CHECK_INT(fan_mem_get().live, live);
    return status;
}

/* reduce_and_cast_fail: allocation n of each fails; returns the first failure. */
static fan_status reduce_and_cast_fail(const fan_sparse *part, const fan_array *out, int n)
{
    int64_t live = fan_mem_get().live;
    fan_sparse *got = NULL;
    fan_mem_fail_at(n, 1);
    fan_status reduced = fan_sparse_reduce(out, part, part->values->dtype, NULL);
    fan_mem_fail_at(n, 1);
    fan_status status = fan_sparse_cast(part, FAN_DT_COMPLEX128, &got, NULL);
    fan_mem_fail_at(-1, 0);
    if (status == FAN_OK)
        status = reduced;
    CHECK(status == FAN_OK || status == FAN_ERR_NOMEM);
    fan_sparse_drop(got);
    CHECK_INT(fan_mem_get().live, live);
    return status;
}

static void out_of_memory_leaves_nothing_behind(void)
{
    int failures = 0;
    for (int round = 0; round < 200; round++) {
        sum s;
        random_sum(&s, (cut)(round % 4));
        bool coalesce = random_below(2);
        int64_t none = 0;
        fan_status status = FAN_ERR_NOMEM;
        for (int n = 0; status != FAN_OK; n++) {
            failures += merge_fails(&s, coalesce, n, 1) != FAN_OK;
            status = merge_fails(&s, coalesce, n, -1);
            failures += status != FAN_OK;
        }
        fan_array *out = random_view(s.part[0]->values->dtype, 0, &none, false);
        status = FAN_ERR_NOMEM;
        for (int n = 0; status != FAN_OK; n++)
            status = reduce_and_cast_fail(s.part[0], out, n);
        fan_array_drop(out);
        drop_parts(&s);
    }
    CHECK(failures > 1000);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    formats_have_names();
    bad_parts_are_refused();
    coo_is_concatenated_in_order();
    for (cut kind = ONE_DIM; kind <= MIXTURE; kind++)
        merges_equal_the_dense_model(kind);
    keys_may_have_several_columns();
    a_large_sum_is_sorted_stably();
    scatters_equal_the_dense_model();
    long_rows_are_scattered_whole();
    reductions_equal_the_dense_model();
    casts_share_what_does_not_change();
    indices_that_lie_do_no_harm();
    out_of_memory_leaves_nothing_behind();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
