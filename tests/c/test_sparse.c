/* Sparse sums against a dense model: every number of the dense shape is folded by itself, in the
 * order (key,
 * position). */
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

/* place_of: the linear index in the dense shape of number c of stored entry e. */
static int64_t place_of(const fan_sparse *s, int64_t e, int64_t c)
{
    int64_t index[FAN_MAX_NDIM] = {0};
    bool by_column = s->format == FAN_FORMAT_CSC || s->format == FAN_FORMAT_BSC;
    bool blocks = s->format == FAN_FORMAT_BSR || s->format == FAN_FORMAT_BSC;
    if (s->format == FAN_FORMAT_COO) {
        int dim = dims_of(s);
        for (int i = s->ndim - 1; i >= dim; i--) {
            index[i] = c % s->shape[i];
            c /= s->shape[i];
        }
        for (int i = 0; i < dim; i++)
            index[i] = load_at(s->indices, i * s->indices->shape[1] + e);
    } else {
        int64_t row = 0;
        int64_t h = blocks ? s->values->shape[1] : 1;
        int64_t w = blocks ? s->values->shape[2] : 1;
        while (load_at(s->pointers, row + 1) <= e)
            row++;
        index[0] = (by_column ? load_at(s->indices, e) : row) * h + c / w;
        index[1] = (by_column ? row : load_at(s->indices, e)) * w + c % w;
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
        if (!m->here[i])
            continue;
        m->x[i] = convert_number(m->acc, m->x[i], to);
        if (!is_whole(to))
            m->x[i].whole = 0;
        if (!is_complex(to))
            m->x[i].im = 0;
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
        if (!is_whole(acc))
            x.whole = 0;
        m->x[at] = m->here[at] ? add_numbers(acc, m->x[at], x) : x;
        m->here[at] = true;
    }
}

static void model_scale(model *m, const fan_scale *scale)
{
    char buf[16];
    number f = {(uint64_t)scale->i, scale->re, scale->im};
    store_number(m->acc, f, buf);
    f = load_number(m->acc, buf);
    for (int i = 0; scale->on && i < ALL; i++)
        if (m->here[i])
            m->x[i] = scale_number(m->acc, m->x[i], f);
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
    for (int i = 0; same && i < ALL; i++)
        same = own->here[i] == m->here[i] && (!m->here[i] || same_number(own->x[i], m->x[i]));
    free(own);
    return same;
}

/* is_sorted: entries rise strictly in the order of their index parts. */
static bool is_sorted(const fan_sparse *s)
{
    int64_t nnz = fan_sparse_nnz(s);
    for (int64_t e = 1; s->format == FAN_FORMAT_COO && e < nnz; e++) {
        int i = 0;
        int dim = dims_of(s);
        while (i < dim && load_at(s->indices, i * nnz + e - 1) == load_at(s->indices, i * nnz + e))
            i++;
        if (i == dim || load_at(s->indices, i * nnz + e - 1) > load_at(s->indices, i * nnz + e))
            return false;
    }
    for (int64_t p = 0; s->format != FAN_FORMAT_COO && p + 1 < s->pointers->shape[0]; p++)
        for (int64_t e = load_at(s->pointers, p) + 1; e < load_at(s->pointers, p + 1); e++)
            if (load_at(s->indices, e - 1) >= load_at(s->indices, e))
                return false;
    return true;
}

/* ---- random sparse arrays ---- */

static fan_array *random_index(int ndim, const int64_t *shape)
{
    return random_view(random_below(2) ? FAN_DT_INT32 : FAN_DT_INT64, ndim, shape, false);
}

static void put_index(const fan_array *a, int64_t i, int64_t x)
{
    number n = {(uint64_t)x, 0, 0};
    put(a, i, n);
}

/* dims: sparse_dim for COO; h, w: blocks. Entries are in any order, with duplicates. */
static fan_sparse *random_sparse(fan_format f, fan_dtype d, int ndim, const int64_t *shape,
                                 int dims, int64_t h, int64_t w)
{
    int64_t part[FAN_MAX_NDIM];
    int64_t nnz = random_below(6) ? random_below(40) : 0;
    fan_array *indices, *values;
    fan_array *pointers = NULL;
    fan_sparse *s = NULL;
    int n = 0;
    bool blocks = f == FAN_FORMAT_BSR || f == FAN_FORMAT_BSC;
    if (f == FAN_FORMAT_COO) {
        for (int i = 0; i < dims; i++)
            nnz = shape[i] ? nnz : 0;
        const int64_t index_shape[] = {dims, nnz};
        indices = random_index(2, index_shape);
        for (int64_t i = 0; i < dims * nnz; i++)
            put_index(indices, i, random_below(shape[i / nnz]));
        part[n++] = nnz;
        for (int i = dims; i < ndim; i++)
            part[n++] = shape[i];
    } else {
        int axis = f == FAN_FORMAT_CSC || f == FAN_FORMAT_BSC;
        int64_t rows = axis ? shape[1] / w : shape[0] / h;
        int64_t others = axis ? shape[0] / h : shape[1] / w;
        int64_t count = rows + 1;
        nnz = rows && others ? nnz : 0;
        pointers = random_index(1, &count);
        indices = random_index(1, &nnz);
        put_index(pointers, 0, 0);
        put_index(pointers, rows, nnz);
        for (int64_t p = 1, last = 0; p < rows; p++) {
            last += random_below(nnz / rows + 2);
            last = last < nnz ? last : nnz;
            put_index(pointers, p, last);
        }
        for (int64_t e = 0; e < nnz; e++)
            put_index(indices, e, random_below(others));
        part[n++] = nnz;
        if (blocks) {
            part[n++] = h;
            part[n++] = w;
        }
    }
    if (n <= 4) {
        values = random_view(d, n, part, true);
    } else {
        CHECK_OK(fan_array_new(d, n, part, NULL, &values, NULL));
        for (int64_t i = 0; i < values->size; i++)
            random_element(d, element(values, i));
    }
    CHECK_OK(fan_sparse_new(f, ndim, shape, indices, pointers, values, false, &s, NULL));
    CHECK_OK(fan_sparse_check(s, NULL));
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
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

/* random_sum: `kind` 0 COO of one sparse_dim, 1 COO of several, 2 compressed, 3 a mixture of
 * all. */
static void random_sum(sum *s, int kind)
{
    int ndim = kind < 2 ? (int)random_below(4) : 2;
    int dims = ndim ? (int)random_below(ndim + 1) : 0;
    int64_t shape[4];
    for (int i = 0; i < ndim; i++)
        shape[i] = random_below(25) ? 2 * (1 + random_below(3)) : 0;
    fan_format f = (fan_format)(1 + random_below(4));
    int64_t h = 1 + random_below(2);
    int64_t w = 1 + random_below(2);
    s->n = 1 + (size_t)random_below(MOST);
    s->alike = true;
    bool own = random_below(6) == 0;
    fan_dtype d = s->dtype = (fan_dtype)random_below(FAN_DT_COUNT);
    for (size_t k = 0; k < s->n; k++) {
        if (!own && random_below(3) == 0)
            d = (fan_dtype)random_below(FAN_DT_COUNT);
        if (fan_dtype_promote(s->dtype, d) == FAN_DT_NONE)
            d = s->dtype;
        s->dtype = fan_dtype_promote(s->dtype, d);
        if (kind == 1)
            dims = ndim ? (int)random_below(ndim + 1) : 0;
        if (kind == 3) {
            f = (fan_format)random_below(5);
            dims = (int)random_below(3);
            h = 1 + random_below(2);
            w = 1 + random_below(2);
        }
        bool blocks = f == FAN_FORMAT_BSR || f == FAN_FORMAT_BSC;
        s->part[k] = random_sparse(kind < 2 ? FAN_FORMAT_COO : f, d, ndim, shape, dims,
                                   kind >= 2 && blocks ? h : 1, kind >= 2 && blocks ? w : 1);
        s->in[k] =
            (fan_sparse_operand){s->part[k], own ? s->dtype : fan_dtype_accumulate(s->dtype)};
        s->alike &= s->part[k]->format == s->part[0]->format &&
                    dims_of(s->part[k]) == dims_of(s->part[0]) &&
                    memcmp(s->part[k]->values->shape + 1, s->part[0]->values->shape + 1,
                           (size_t)(s->part[0]->values->ndim - 1) * sizeof(int64_t)) == 0;
    }
    memset(&s->scale, 0, sizeof s->scale);
    s->scale.on = random_below(4) == 0;
    s->scale.re = (double)random_below(1000) / 128.0 - 3;
    s->scale.im = (double)random_below(1000) / 128.0 - 3;
    s->scale.i = random_below(2000) - 1000;
}

static void drop(sum *s)
{
    for (size_t k = 0; k < s->n; k++)
        fan_sparse_drop(s->part[k]);
}

/* ---- the tests ---- */

static void merges_equal_the_dense_model(int kind)
{
    int coalesced = 0;
    int not_coalesced = 0;
    int mixed = 0;
    for (int round = 0; round < 1200; round++) {
        sum s;
        random_sum(&s, kind);
        bool want = random_below(2);
        fan_dtype last = s.in[s.n - 1].acc;
        fan_dtype result = random_below(2) ? FAN_DT_NONE : s.dtype;
        fan_sparse *got = NULL;
        model *m = model_new(s.in[0].acc);
        for (size_t k = 0; k < s.n; k++)
            model_add(m, s.part[k], s.in[k].acc);
        model_scale(m, &s.scale);
        model_convert(m, result == FAN_DT_NONE ? last : result);
        CHECK_OK(
            fan_sparse_merge(s.in, s.n, want, result, s.scale.on ? &s.scale : NULL, &got, NULL));
        CHECK(same_as_model(got, m));
        CHECK_OK(fan_sparse_check(got, NULL));
        CHECK(got->indices->dtype == FAN_DT_INT64);
        if (s.alike)
            CHECK(got->format == s.part[0]->format);
        else
            mixed++;
        if (got->coalesced || want || got->format != FAN_FORMAT_COO || s.scale.on)
            CHECK(is_sorted(got) && got->coalesced && got->nnz_coalesced == fan_sparse_nnz(got));
        else
            CHECK(got->nnz_coalesced == s.part[0]->nnz_coalesced);
        got->coalesced ? coalesced++ : not_coalesced++;

        /* coalescing never changes bits */
        fan_sparse_operand again = {got, got->values->dtype};
        fan_sparse *twice = NULL;
        CHECK_OK(fan_sparse_merge(&again, 1, true, FAN_DT_NONE, NULL, &twice, NULL));
        CHECK(same_as_model(twice, m) && is_sorted(twice));
        fan_sparse_drop(twice);

        /* folding in two steps gives what folding in one gives (park and fold: the same bits for
         * every budget) */
        if (s.n > 1 && !s.scale.on && result == FAN_DT_NONE) {
            size_t split = 1 + (size_t)random_below((int64_t)s.n - 1);
            fan_sparse *first = NULL;
            fan_sparse *both = NULL;
            fan_sparse_operand rest[MOST + 1];
            CHECK_OK(
                fan_sparse_merge(s.in, split, random_below(2), FAN_DT_NONE, NULL, &first, NULL));
            rest[0] = (fan_sparse_operand){first, s.in[split - 1].acc};
            memcpy(rest + 1, s.in + split, (s.n - split) * sizeof rest[0]);
            CHECK_OK(fan_sparse_merge(rest, s.n - split + 1, random_below(2), FAN_DT_NONE, NULL,
                                      &both, NULL));
            CHECK(same_as_model(both, m));
            fan_sparse_drop(first);
            fan_sparse_drop(both);
        }
        fan_sparse_drop(got);
        free(m);
        drop(&s);
    }
    CHECK(coalesced > 300);
    if (kind == 0)
        CHECK(not_coalesced > 100);
    if (kind == 1 || kind == 3)
        CHECK(mixed > 100);
}

/* Entries in (key, position) order, until something coalesces. */
static void coo_is_concatenated_in_order(void)
{
    const int64_t shape = 10;
    const int64_t nnz = 3;
    const int64_t index_shape[] = {1, 3};
    fan_array *indices, *values;
    fan_sparse *s[2], *got;
    fan_sparse_operand in[2];
    for (int k = 0; k < 2; k++) {
        CHECK_OK(fan_array_new(FAN_DT_INT32, 2, index_shape, NULL, &indices, NULL));
        CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, &nnz, NULL, &values, NULL));
        for (int e = 0; e < 3; e++) {
            put_index(indices, e, 9 - 2 * e - k);
            put(values, e, (number){0, e + 10 * k, 0});
        }
        CHECK_OK(
            fan_sparse_new(FAN_FORMAT_COO, 1, &shape, indices, NULL, values, false, &s[k], NULL));
        in[k] = (fan_sparse_operand){s[k], FAN_DT_FLOAT32};
        fan_array_drop(indices);
        fan_array_drop(values);
    }
    CHECK_OK(fan_sparse_merge(in, 2, false, FAN_DT_FLOAT32, NULL, &got, NULL));
    const int64_t want[] = {9, 7, 5, 8, 6, 4};
    CHECK_INT(fan_sparse_nnz(got), 6);
    for (int e = 0; e < 6; e++) {
        CHECK_INT(load_at(got->indices, e), want[e]);
        CHECK(same_real(get(got->values, e).re, e % 3 + 10 * (e / 3)));
    }
    CHECK(!got->coalesced);
    CHECK_INT(got->nnz_coalesced, 3);
    fan_sparse_drop(got);
    for (int k = 0; k < 2; k++)
        fan_sparse_drop(s[k]);
}

/* Shapes whose linear index does not fit an int64 are sorted column by column. */
static void keys_may_have_several_columns(void)
{
    const int64_t huge = (int64_t)1 << 40;
    const int64_t shape[] = {huge, 3, huge, huge};
    for (int round = 0; round < 50; round++) {
        int64_t nnz = 1 + random_below(200);
        const int64_t index_shape[] = {4, nnz};
        fan_array *indices, *values;
        fan_sparse *s = NULL;
        fan_sparse *got = NULL;
        fan_error err;
        CHECK_OK(fan_array_new(FAN_DT_INT64, 2, index_shape, NULL, &indices, NULL));
        CHECK_OK(fan_array_new(FAN_DT_INT32, 1, &nnz, NULL, &values, NULL));
        for (int64_t e = 0; e < nnz; e++) {
            for (int i = 0; i < 4; i++)
                put_index(indices, i * nnz + e,
                          shape[i] == 3 ? random_below(3)
                                        : random_below(2) * (huge - 2 + random_below(2)));
            put_index(values, e, random_below(1000000));
        }
        CHECK_OK(fan_sparse_new(FAN_FORMAT_COO, 4, shape, indices, NULL, values, false, &s, &err));
        fan_sparse_operand in = {s, FAN_DT_INT32};
        CHECK_OK(fan_sparse_merge(&in, 1, true, FAN_DT_NONE, NULL, &got, &err));
        CHECK(is_sorted(got));
        int64_t total = 0;
        int64_t sums = 0;
        for (int64_t e = 0; e < nnz; e++)
            total += load_at(values, e);
        for (int64_t g = 0; g < fan_sparse_nnz(got); g++) {
            int64_t want = 0;
            for (int64_t e = 0; e < nnz; e++) {
                bool same = true;
                for (int i = 0; i < 4; i++)
                    same &= load_at(indices, i * nnz + e) ==
                            load_at(got->indices, i * fan_sparse_nnz(got) + g);
                want += same ? load_at(values, e) : 0;
            }
            CHECK_INT(load_at(got->values, g), want);
            sums += want;
        }
        CHECK_INT(sums, total);
        fan_sparse_drop(got);
        fan_sparse_drop(s);
        fan_array_drop(indices);
        fan_array_drop(values);
    }
}

static void a_large_sum_is_sorted_stably(void)
{
    const int64_t shape = 100000;
    const int64_t nnz = 50000;
    const int64_t index_shape[] = {1, 50000};
    fan_array *indices, *values;
    fan_sparse *s, *got;
    CHECK_OK(fan_array_new(FAN_DT_INT64, 2, index_shape, NULL, &indices, NULL));
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, &nnz, NULL, &values, NULL));
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
    CHECK_OK(fan_sparse_new(FAN_FORMAT_COO, 1, &shape, indices, NULL, values, false, &s, NULL));
    fan_sparse_operand in = {s, FAN_DT_FLOAT32};
    CHECK_OK(fan_sparse_merge(&in, 1, true, FAN_DT_FLOAT32, NULL, &got, NULL));
    CHECK(is_sorted(got));
    for (int64_t e = 0; e < fan_sparse_nnz(got); e++)
        CHECK(same_real(get(got->values, e).re, (double)want[load_at(got->indices, e)]));
    free(want);
    free(here);
    fan_sparse_drop(got);
    fan_sparse_drop(s);
    fan_array_drop(indices);
    fan_array_drop(values);
}

static void scatters_equal_the_dense_model(void)
{
    for (int round = 0; round < 3000; round++) {
        sum s;
        random_sum(&s, round % 4);
        fan_dtype d = random_below(2) ? s.dtype : (fan_dtype)random_below(FAN_DT_COUNT);
        for (size_t k = 0; k < s.n; k++)
            if (!fan_dtype_can_cast(s.part[k]->values->dtype, d))
                d = s.dtype;
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
        drop(&s);
    }
}

/* Rows of an embedding: long runs, converted piece by piece or added where they lie. */
static void long_rows_are_scattered_whole(void)
{
    for (int round = 0; round < 40; round++) {
        int64_t row = 1 + random_below(1500);
        int64_t shape[] = {3, row};
        int64_t nnz = 5;
        int64_t index_shape[] = {1, 5};
        int64_t part[] = {5, row};
        fan_dtype d = round % 2 ? FAN_DT_FLOAT32 : FAN_DT_FLOAT16;
        fan_array *indices;
        fan_array *values = random_view(d, 2, part, true);
        fan_array *into = random_view(FAN_DT_FLOAT32, 2, shape, false);
        fan_sparse *s;
        CHECK_OK(fan_array_new(FAN_DT_INT64, 2, index_shape, NULL, &indices, NULL));
        for (int64_t e = 0; e < nnz; e++)
            put_index(indices, e, random_below(3));
        CHECK_OK(fan_sparse_new(FAN_FORMAT_COO, 2, shape, indices, NULL, values, false, &s, NULL));
        number *want = malloc(sizeof *want * (size_t)into->size);
        for (int64_t i = 0; i < into->size; i++)
            want[i] = get(into, i);
        for (int64_t i = 0; i < values->size; i++) {
            int64_t at = load_at(indices, i / row) * row + i % row;
            want[at] = add_numbers(FAN_DT_FLOAT32, want[at], get(values, i));
        }
        fan_sparse_scatter(into, s);
        for (int64_t i = 0; i < into->size; i++)
            CHECK(same_number(get(into, i), want[i]));
        free(want);
        fan_sparse_drop(s);
        fan_array_drop(indices);
        fan_array_drop(values);
        fan_array_drop(into);
    }
}

/* A sum to a declared shape: entries in their order, onto zeros, in the dtype of D7, rounded
 * once. */
static void reductions_equal_the_dense_model(void)
{
    for (int round = 0; round < 1500; round++) {
        sum s;
        random_sum(&s, round % 4);
        const fan_sparse *part = s.part[0];
        fan_dtype acc = fan_reduce_dtype(part->values->dtype);
        fan_dtype d = random_below(2) ? part->values->dtype : acc;
        int fewer = part->ndim ? (int)random_below(part->ndim + 1) : 0;
        int64_t small[4];
        int64_t cells = numbers_in_entry(part);
        for (int i = 0; i < fewer; i++)
            small[i] = random_below(2) ? 1 : part->shape[part->ndim - fewer + i];
        fan_array *out = random_view(d, fewer, small, false);
        number want[ALL] = {{0, 0, 0}};
        for (int64_t i = 0; i < part->values->size; i++) {
            int64_t rest = place_of(part, i / cells, i % cells);
            int64_t at = 0;
            int64_t step = 1;
            for (int k = part->ndim - 1; k >= part->ndim - fewer; k--) {
                int64_t index = rest % part->shape[k];
                int64_t extent = small[k - part->ndim + fewer];
                rest /= part->shape[k];
                at += extent == 1 ? 0 : index * step;
                step *= extent;
            }
            want[at] = add_numbers(acc, want[at],
                                   convert_number(part->values->dtype, get(part->values, i), acc));
        }
        CHECK_OK(fan_sparse_reduce(out, part, part->values->dtype, NULL));
        for (int64_t i = 0; i < out->size; i++) {
            number x = convert_number(acc, want[i], d);
            if (!is_whole(d))
                x.whole = 0;
            CHECK(same_number(get(out, i), x));
        }
        fan_array_drop(out);
        drop(&s);
    }
}

static void casts_share_what_does_not_change(void)
{
    for (int round = 0; round < 300; round++) {
        sum s;
        random_sum(&s, round % 4);
        const fan_sparse *part = s.part[0];
        fan_sparse *got = NULL;
        fan_dtype d = fan_dtype_promote(part->values->dtype, FAN_DT_FLOAT32);
        CHECK_OK(fan_sparse_cast(part, d, &got, NULL));
        CHECK(got->indices == part->indices && got->pointers == part->pointers);
        CHECK((got->values == part->values) == (d == part->values->dtype));
        CHECK_INT(got->values->dtype, d);
        for (int64_t i = 0; i < got->values->size; i++) {
            number x = convert_number(part->values->dtype, get(part->values, i), d);
            if (!is_whole(d))
                x.whole = 0;
            CHECK(same_number(get(got->values, i), x));
        }
        fan_sparse_drop(got);
        drop(&s);
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
    const int64_t three = 3;
    const int64_t five = 5;
    const int64_t six = 6;
    const int64_t block[] = {3, 2, 3};
    const int64_t odd[] = {3, 3, 3};
    fan_array *coo, *values, *floats, *index, *rows, *columns, *blocks, *odd_blocks;
    CHECK_OK(fan_array_new(FAN_DT_INT64, 2, two, NULL, &coo, NULL));
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, &three, NULL, &values, NULL));
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 2, two, NULL, &floats, NULL));
    CHECK_OK(fan_array_new(FAN_DT_INT32, 1, &three, NULL, &index, NULL));
    CHECK_OK(fan_array_new(FAN_DT_INT32, 1, &five, NULL, &rows, NULL));
    CHECK_OK(fan_array_new(FAN_DT_INT32, 1, &six, NULL, &columns, NULL));
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 3, block, NULL, &blocks, NULL));
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 3, odd, NULL, &odd_blocks, NULL));
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
    fan_array_drop(coo);
    fan_array_drop(values);
    fan_array_drop(floats);
    fan_array_drop(index);
    fan_array_drop(rows);
    fan_array_drop(columns);
    fan_array_drop(blocks);
    fan_array_drop(odd_blocks);
}

/* Index parts may change after they were checked: whatever they then say, nothing outside is
 * touched. */
static void indices_that_lie_do_no_harm(void)
{
    static const int64_t lies[] = {-1, 1000000, INT64_MAX, INT64_MIN, 7};
    int refused = 0;
    for (int round = 0; round < 2000; round++) {
        sum s;
        random_sum(&s, round % 4);
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
        if (!good)
            CHECK(status == FAN_ERR_VALUE &&
                  (strstr(err.text, "index") || strstr(err.text, "pointer")));
        refused += !good;
        fan_sparse_drop(got);
        fan_array_drop(into);
        drop(&s);
    }
    CHECK(refused > 500);
}

static void out_of_memory_leaves_nothing_behind(void)
{
    int failures = 0;
    for (int round = 0; round < 200; round++) {
        sum s;
        random_sum(&s, round % 4);
        bool want = random_below(2);
        int64_t live = fan_mem_get().live;
        int64_t none = 0;
        fan_status status = FAN_ERR_NOMEM;
        for (int n = 0; status != FAN_OK; n++) {
            for (int and_on = 0; and_on < 2; and_on++) {
                fan_sparse *got = NULL;
                fan_error err;
                fan_mem_fail_at(n, and_on ? -1 : 1);
                status = fan_sparse_merge(s.in, s.n, want, s.dtype, &s.scale, &got, &err);
                fan_mem_fail_at(-1, 0);
                CHECK(status == FAN_OK ||
                      (status == FAN_ERR_NOMEM && got == NULL && err.status == FAN_ERR_NOMEM));
                failures += status == FAN_ERR_NOMEM;
                fan_sparse_drop(got);
                CHECK_INT(fan_mem_get().live, live);
            }
        }
        fan_array *out = random_view(s.part[0]->values->dtype, 0, &none, false);
        live = fan_mem_get().live;
        status = FAN_ERR_NOMEM;
        for (int n = 0; status != FAN_OK; n++) {
            fan_sparse *got = NULL;
            fan_mem_fail_at(n, 1);
            fan_status reduced = fan_sparse_reduce(out, s.part[0], s.part[0]->values->dtype, NULL);
            fan_mem_fail_at(n, 1);
            status = fan_sparse_cast(s.part[0], FAN_DT_COMPLEX128, &got, NULL);
            fan_mem_fail_at(-1, 0);
            status = status ? status : reduced;
            CHECK(status == FAN_OK || status == FAN_ERR_NOMEM);
            fan_sparse_drop(got);
            CHECK_INT(fan_mem_get().live, live);
        }
        fan_array_drop(out);
        drop(&s);
    }
    CHECK(failures > 1000);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    formats_have_names();
    bad_parts_are_refused();
    coo_is_concatenated_in_order();
    for (int kind = 0; kind < 4; kind++)
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
