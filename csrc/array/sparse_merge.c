/* Design: every stored entry gets a key, the position of its index in the order of the result's indices; operands are
 * concatenated, sorted stably by key, and equal neighbours are folded from left to right. That is D12: the order (key
 * of the contribution, position) survives the sort.
 *
 *   format   axes that are indexed            an entry's values
 *   COO      the first sparse_dim             the other axes
 *   CSR      row, column                      one
 *   CSC      column, row                      one
 *   BSR      block row, block column          a block
 *   BSC      block column, block row          a block
 *
 * A key is a linear index in one int64; if the extents are too large for that, it has several columns, sorted from the
 * last to the first.
 *
 * Pitfalls: the sum widens (D3) between operands while duplicates are still separate. Converting each before adding
 * gives other bits than adding first; so everything before a widening is folded before it is converted. And index parts
 * are foreign memory, which may change after it was checked: every index is checked against its extent at its use. */
#include "array/convert.h"
#include "array/nditer.h"
#include "array/sparse.h"
#include "array/sparse_parts.h"
#include "array/sum_isa.h"
#include "base/mem.h"

#include <string.h>

/* sparse_grid: the index space of the entries of a sparse sum, and the key of an entry's index. For
 * array/sparse alone. */
/* The index space of a sum's entries. */
typedef struct fan_grid {
    fan_format format;
    int axes;
    int64_t extent[FAN_MAX_NDIM];
    int64_t cells; /* numbers in an entry */
    int columns;   /* of a key; column c is the linear index over axes first[c] .. first[c + 1] - 1 */
    int first[FAN_MAX_NDIM + 1];
} fan_grid;

/* fan__grid_axis_of_key: computes the index along one axis from keys. */
static void fan__grid_axis_of_key(const fan_grid *g, const int64_t *keys, int64_t n, int axis, char *to, int64_t step)
{
    int c = 0;
    while (axis >= g->first[c + 1])
        c++;
    int64_t below = 1;
    for (int i = axis + 1; i < g->first[c + 1]; i++)
        below *= g->extent[i];
    const int64_t *key = keys + c * n;
    for (int64_t e = 0; e < n; e++)
        *(fan_any_i64 *)(to + e * step) = key[e] / below % g->extent[axis];
}

/* own_index: computes the index of each stored entry of s along a grid axis, in the units of s's own index part, each
 * repeated `times` times. */
static fan_status own_index(const fan_sparse *s, bool compressed, int axis, int64_t extent, int64_t times, int64_t *to,
                            fan_error *err)
{
    int64_t nnz = fan_sparse_nnz(s), row = 0;
    if (compressed)
        FAN_TRY(fan__sparse_check_pointers(s, err));
    for (int64_t e = 0; e < nnz; e++) {
        int64_t index;
        if (compressed) {
            while (row < extent && sparse_pointer(s, row + 1) <= e)
                row++;
            index = row;
        } else {
            index = s->format == FAN_FORMAT_COO ? coo_index(s, axis, e) : plain_index(s, e);
        }
        if (!sparse_within(index, extent))
            return fan__sparse_outside(s, axis, e, index, extent, err);
        for (int64_t i = 0; i < times; i++)
            *to++ = index;
    }
    return FAN_OK;
}

/* fan__grid_index: computes the index along grid axis `axis` of each of s's entries in this grid (one stored entry of s
 * is `times` of them). */
static fan_status fan__grid_index(const fan_sparse *s, const fan_grid *g, int axis, int64_t times, int64_t *to,
                                  fan_error *err)
{
    int64_t n = fan_sparse_nnz(s) * times;
    if (s->format == FAN_FORMAT_COO) {
        if (axis < sparse_dim(s))
            return own_index(s, false, axis, g->extent[axis], times, to, err);
        int64_t below = 1; /* an axis that is dense in s */
        for (int i = axis + 1; i < g->axes; i++)
            below *= g->extent[i];
        for (int64_t i = 0; i < n; i++)
            to[i] = i / below % g->extent[axis];
        return FAN_OK;
    }
    if (g->format != FAN_FORMAT_COO) {
        int named = axis ? !fan_format_compressed_axis(s->format) : fan_format_compressed_axis(s->format);
        return own_index(s, axis == 0, named, g->extent[axis], times, to, err);
    }
    int64_t unit = block_extent(s, axis), wide = block_extent(s, 1);
    FAN_TRY(own_index(s, axis == fan_format_compressed_axis(s->format), axis, g->extent[axis] / unit, times, to, err));
    for (int64_t i = 0; i < n; i++)
        to[i] = to[i] * unit + (axis == 0 ? i % times / wide : i % wide);
    return FAN_OK;
}

/* The entries of an unfinished sum: keys column by column, values contiguous in dtype acc. */
typedef struct entries {
    int64_t n;
    int64_t *keys;
    char *values;
    fan_dtype acc;
} entries;

static void entries_free(entries *e)
{
    fan_free(e->keys);
    fan_free(e->values);
    *e = (entries){0, NULL, NULL, FAN_DT_NONE};
}

/* merge_allocate: allocates n * each items of `size` bytes; NULL when out of memory or on overflow. */
static void *merge_allocate(int64_t n, int64_t each, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, each, &bytes) || __builtin_mul_overflow(bytes, size, &bytes))
        return NULL;
    return fan_alloc(bytes);
}

static bool entries_new(entries *e, const fan_grid *g, int64_t n, fan_dtype acc)
{
    e->n = n;
    e->acc = acc;
    e->keys = merge_allocate(n, g->columns, sizeof *e->keys);
    e->values = merge_allocate(n, g->cells, fan_dtype_size(acc));
    if (e->keys && e->values)
        return true;
    entries_free(e);
    return false;
}

/* read_operand: reads s into the entries of e from `at` on. */
static fan_status read_operand(entries *e, const fan_grid *g, const fan_sparse *s, int64_t at, int64_t *scratch,
                               fan_error *err)
{
    int64_t times = g->cells ? cells_of(s) / g->cells : 1, n = fan_sparse_nnz(s) * times;
    for (int c = 0; c < g->columns; c++) {
        int64_t *key = e->keys + c * e->n + at;
        memset(key, 0, (size_t)n * sizeof *key);
        for (int axis = g->first[c]; axis < g->first[c + 1]; axis++) {
            FAN_TRY(fan__grid_index(s, g, axis, times, scratch, err));
            for (int64_t i = 0; i < n; i++)
                key[i] = key[i] * g->extent[axis] + scratch[i];
        }
    }
    char *to = e->values + (size_t)(at * g->cells) * fan_dtype_size(e->acc);
    int64_t strides[FAN_MAX_NDIM];
    const fan_array *v = s->values;
    fan_dense_strides(v->ndim, v->shape, fan_dtype_size(e->acc), NULL, strides);
    fan_array flat = {
        .data = to, .dtype = e->acc, .ndim = v->ndim, .size = v->size, .shape = v->shape, .strides = strides};
    fan_array_copy(&flat, v);
    return FAN_OK;
}

/* in_order: returns 1 if strictly rising, 0 if rising with equals, -1 otherwise. */
static int in_order(const entries *e, const fan_grid *g)
{
    int answer = 1;
    for (int64_t i = 1; i < e->n; i++) {
        int c = 0;
        while (c < g->columns && e->keys[c * e->n + i - 1] == e->keys[c * e->n + i])
            c++;
        if (c == g->columns)
            answer = 0;
        else if (e->keys[c * e->n + i - 1] > e->keys[c * e->n + i])
            return -1;
    }
    return answer;
}

/* sort_by_key: computes the positions of the entries in the order of their keys; stable. `a` and `b` have room for n
 * each; returns the one with the result. */
static const int64_t *sort_by_key(const entries *e, const fan_grid *g, bool sorted, int64_t *a, int64_t *b)
{
    int bits = e->n < 4096 ? 8 : 11;
    for (int64_t i = 0; i < e->n; i++)
        a[i] = i;
    for (int c = sorted ? -1 : g->columns - 1; c >= 0; c--) {
        int64_t product = 1; /* the largest key of column c, plus one */
        for (int i = g->first[c]; i < g->first[c + 1]; i++)
            product *= g->extent[i] ? g->extent[i] : 1;
        int64_t most = product - 1;
        for (int shift = 0; shift < 63 && most >> shift; shift += bits) {
            /* Sorts `order` by one digit of the key, stably. */
            const int64_t *key = e->keys + c * e->n;
            int64_t start[1 << 11] = {0};
            uint64_t mask = ((uint64_t)1 << bits) - 1;
            for (int64_t i = 0; i < e->n; i++)
                start[(uint64_t)key[i] >> shift & mask]++;
            int64_t sum = 0;
            for (uint64_t d = 0; d <= mask; d++) {
                int64_t here = start[d];
                start[d] = sum;
                sum += here;
            }
            for (int64_t i = 0; i < e->n; i++)
                b[start[(uint64_t)key[a[i]] >> shift & mask]++] = a[i];
            int64_t *other = a;
            a = b;
            b = other;
        }
    }
    return a;
}

#define PENDING 256

/* merge_coalesce: sorts and folds the entries; FAN_ERR_NOMEM leaves them as they are. */
static fan_status merge_coalesce(entries *e, const fan_grid *g)
{
    int ordered = in_order(e, g);
    if (ordered == 1)
        return FAN_OK;
    fan_status status = FAN_ERR_NOMEM;
    entries folded = {0, NULL, NULL, FAN_DT_NONE};
    int64_t *a = merge_allocate(e->n, 1, sizeof *a), *b = merge_allocate(e->n, 1, sizeof *b);
    if (!a || !b || !entries_new(&folded, g, e->n, e->acc))
        goto done;
    const int64_t *order = sort_by_key(e, g, ordered == 0, a, b);
    /* The left fold of e over equal keys, visited in `order`. */
    int64_t dst[PENDING], src[PENDING];
    const fan_loops *loops = fan_loops_of(e->acc);
    int64_t bytes = g->cells * (int64_t)fan_dtype_size(e->acc), m = 0, before = 0;
    size_t run = (size_t)g->cells * loops->parts, pending = 0;
    for (int64_t i = 0; i < e->n; i++) {
        int64_t k = order[i];
        int c = 0;
        while (i && c < g->columns && e->keys[c * e->n + k] == e->keys[c * e->n + before])
            c++;
        before = k;
        if (i && c == g->columns) { /* the same key again: added after its first, in order */
            dst[pending] = (m - 1) * bytes;
            src[pending++] = k * bytes;
            if (pending == PENDING) {
                loops->add_at(folded.values, dst, e->values, src, pending, run);
                pending = 0;
            }
            continue;
        }
        for (c = 0; c < g->columns; c++)
            folded.keys[c * e->n + m] = e->keys[c * e->n + k];
        memcpy(folded.values + m * bytes, e->values + k * bytes, (size_t)bytes);
        m++;
    }
    loops->add_at(folded.values, dst, e->values, src, pending, run);
    for (int c = 1; c < g->columns; c++)
        memmove(folded.keys + c * m, folded.keys + c * e->n, (size_t)m * sizeof *folded.keys);
    folded.n = m;
    entries_free(e);
    *e = folded;
    folded = (entries){0, NULL, NULL, FAN_DT_NONE};
    status = FAN_OK;
done:
    fan_free(a);
    fan_free(b);
    entries_free(&folded);
    return status;
}

/* merge_append: appends the sum so far, converted to `acc`, and the entries of operands that are all added in acc. */
static fan_status merge_append(entries *sum, const fan_grid *g, const fan_sparse_operand *in, size_t n, fan_dtype acc,
                               fan_error *err)
{
    fan_status status = FAN_ERR_NOMEM;
    entries all = {0, NULL, NULL, FAN_DT_NONE};
    int64_t total = sum->n, longest = 0, *scratch = NULL;
    for (size_t k = 0; k < n; k++) {
        int64_t times = g->cells ? cells_of(in[k].sparse) / g->cells : 1, here;
        if (__builtin_mul_overflow(fan_sparse_nnz(in[k].sparse), times, &here) ||
            __builtin_add_overflow(total, here, &total))
            goto done;
        longest = here > longest ? here : longest;
    }
    scratch = merge_allocate(longest, 1, sizeof *scratch);
    if (!scratch || !entries_new(&all, g, total, acc))
        goto done;
    for (int c = 0; sum->n && c < g->columns; c++)
        memcpy(all.keys + c * total, sum->keys + c * sum->n, (size_t)sum->n * sizeof *sum->keys);
    if (sum->n)
        fan_convert(all.values, acc, (int64_t)fan_dtype_size(acc), sum->values, sum->acc,
                    (int64_t)fan_dtype_size(sum->acc), sum->n * g->cells);
    int64_t at = sum->n;
    for (size_t k = 0; k < n; k++) {
        FAN_GO(read_operand(&all, g, in[k].sparse, at, scratch, err));
        at += fan_sparse_nnz(in[k].sparse) * (g->cells ? cells_of(in[k].sparse) / g->cells : 1);
    }
    entries_free(sum);
    *sum = all;
    all = (entries){0, NULL, NULL, FAN_DT_NONE};
    status = FAN_OK;
done:
    fan_free(scratch);
    entries_free(&all);
    return status;
}

/* build_indices: makes the index parts from the keys, for a grid whose entries are coalesced (or COO in any order). */
static fan_status build_indices(const entries *e, const fan_grid *g, fan_array **indices, fan_array **pointers,
                                fan_error *err)
{
    if (g->format == FAN_FORMAT_COO) {
        int64_t shape[2] = {g->axes, e->n};
        FAN_TRY(fan_array_new(FAN_DT_INT64, 2, shape, NULL, indices, err));
        for (int axis = 0; e->n && axis < g->axes; axis++)
            fan__grid_axis_of_key(g, e->keys, e->n, axis, (*indices)->data + axis * (*indices)->strides[0],
                                  (*indices)->strides[1]);
        return FAN_OK;
    }
    int64_t rows = g->extent[0] + 1;
    FAN_TRY(fan_array_new(FAN_DT_INT64, 1, &e->n, NULL, indices, err));
    FAN_TRY(fan_array_new(FAN_DT_INT64, 1, &rows, NULL, pointers, err));
    int64_t *p = (int64_t *)(void *)(*pointers)->data;
    memset(p, 0, (size_t)rows * sizeof *p);
    if (e->n) {
        int64_t *i = (int64_t *)(void *)(*indices)->data;
        fan__grid_axis_of_key(g, e->keys, e->n, 0, (*indices)->data, sizeof *i);
        for (int64_t k = 0; k < e->n; k++)
            p[i[k] + 1]++;
        fan__grid_axis_of_key(g, e->keys, e->n, 1, (*indices)->data, sizeof *i);
    }
    for (int64_t r = 1; r < rows; r++)
        p[r] += p[r - 1];
    return FAN_OK;
}

/* values_new: makes an array for n entries of dtype d. */
static fan_status values_new(const fan_grid *g, const fan_sparse *like, int64_t n, fan_dtype d, fan_array **out,
                             fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM + 1] = {n};
    int ndim = 1;
    if (g->format == FAN_FORMAT_COO)
        for (int i = g->axes; i < like->ndim; i++)
            shape[ndim++] = like->shape[i];
    else if (fan_format_is_blocked(g->format))
        for (int i = 0; i < 2; i++)
            shape[ndim++] = block_extent(like, i);
    return fan_array_new(d, ndim, shape, NULL, out, err);
}

/* merge_finish: scales, rounds, and makes the sparse array. */
static fan_status merge_finish(entries *e, const fan_grid *g, const fan_sparse *like, bool coalesced, fan_dtype d,
                               const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    fan_status status;
    fan_array *indices = NULL, *pointers = NULL, *values = NULL;
    int64_t numbers = e->n * g->cells;
    if (scale && scale->on && numbers) {
        _Alignas(16) char factor[16];
        fan_scale_as(scale, e->acc, factor);
        fan_loops_of(e->acc)->scale(e->values, factor, (size_t)numbers);
    }
    FAN_GO(build_indices(e, g, &indices, &pointers, err));
    FAN_GO(values_new(g, like, e->n, d, &values, err));
    fan_convert(values->data, d, (int64_t)fan_dtype_size(d), e->values, e->acc, (int64_t)fan_dtype_size(e->acc),
                numbers);
    FAN_GO(fan_sparse_new(g->format, like->ndim, like->shape, indices, pointers, values, coalesced, out, err));
    if (!coalesced)
        (*out)->nnz_coalesced = like->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

/* merge_concatenate: concatenates COO operands of one grid and one dtype. */
static fan_status merge_concatenate(const fan_grid *g, const fan_sparse_operand *in, size_t n, fan_sparse **out,
                                    fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *indices = NULL, *values = NULL;
    const fan_sparse *first = in[0].sparse;
    int64_t shape[2] = {g->axes, 0};
    for (size_t k = 0; k < n; k++)
        if (__builtin_add_overflow(shape[1], fan_sparse_nnz(in[k].sparse), &shape[1]))
            return fan_fail(err, FAN_ERR_NOMEM, "too many sparse entries");
    FAN_GO(fan_array_new(FAN_DT_INT64, 2, shape, NULL, &indices, err));
    FAN_GO(values_new(g, first, shape[1], in[0].acc, &values, err));
    int64_t at = 0;
    for (size_t k = 0; k < n; k++) {
        const fan_array *i = in[k].sparse->indices, *v = in[k].sparse->values;
        if (i->size) {
            fan_array to = {.data = indices->data + at * indices->strides[1],
                            .dtype = indices->dtype,
                            .ndim = 2,
                            .size = i->size,
                            .shape = i->shape,
                            .strides = indices->strides};
            fan_array_copy(&to, i);
        }
        if (v->size) {
            fan_array to = {.data = values->data + at * values->strides[0],
                            .dtype = values->dtype,
                            .ndim = v->ndim,
                            .size = v->size,
                            .shape = v->shape,
                            .strides = values->strides};
            fan_array_copy(&to, v);
        }
        at += fan_sparse_nnz(in[k].sparse);
    }
    FAN_GO(fan_sparse_new(FAN_FORMAT_COO, first->ndim, first->shape, indices, NULL, values, n == 1 && first->coalesced,
                          out, err));
    (*out)->nnz_coalesced = first->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(values);
    return status;
}

fan_status fan_sparse_merge(const fan_sparse_operand *in, size_t n, bool coalesced, fan_dtype result,
                            const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    *out = NULL;
    FAN_UNINITIALIZED fan_grid g;
    /* The grid of the sum: that of the operands if it is the same for all; else COO over as many axes as any of them
     * indexes. */
    const fan_sparse *s = in[0].sparse;
    bool alike = true;
    int axes = 0;
    for (size_t k = 0; k < n; k++) {
        int dim = sparse_dim(in[k].sparse);
        alike &= in[k].sparse->format == s->format && (!fan_format_is_blocked(in[k].sparse->format) ||
                                                       (block_extent(in[k].sparse, 0) == block_extent(s, 0) &&
                                                        block_extent(in[k].sparse, 1) == block_extent(s, 1)));
        axes = dim > axes ? dim : axes;
    }
    g.format = alike ? s->format : FAN_FORMAT_COO;
    g.axes = axes;
    g.cells = 1;
    if (g.format == FAN_FORMAT_COO) {
        for (int i = 0; i < s->ndim; i++) {
            if (i < axes)
                g.extent[i] = s->shape[i];
            else
                g.cells *= s->shape[i];
        }
    } else {
        int axis = fan_format_compressed_axis(g.format);
        g.extent[0] = s->shape[axis] / block_extent(s, axis);
        g.extent[1] = s->shape[!axis] / block_extent(s, !axis);
        g.cells = cells_of(s);
    }
    g.columns = 0;
    int64_t product = 1;
    g.first[0] = 0;
    for (int i = 0; i < g.axes; i++) {
        if (__builtin_mul_overflow(product, g.extent[i] ? g.extent[i] : 1, &product)) {
            g.first[++g.columns] = i;
            product = g.extent[i];
        }
    }
    g.first[++g.columns] = g.axes;
    fan_dtype last = in[n - 1].acc, d = result == FAN_DT_NONE ? last : result;
    coalesced |= g.format != FAN_FORMAT_COO || d != last || (scale && scale->on);
    bool plain = !coalesced && g.format == FAN_FORMAT_COO;
    for (size_t k = 0; plain && k < n; k++)
        plain = in[k].acc == last && in[k].sparse->format == FAN_FORMAT_COO && sparse_dim(in[k].sparse) == g.axes;
    if (plain)
        return merge_concatenate(&g, in, n, out, err);

    fan_status status = FAN_OK;
    entries sum = {0, NULL, NULL, FAN_DT_NONE};
    for (size_t k = 0, end; k < n; k = end) {
        for (end = k + 1; end < n && in[end].acc == in[k].acc; end++)
            continue;
        FAN_GO(merge_append(&sum, &g, in + k, end - k, in[k].acc, err));
        if (end < n || coalesced) /* before it widens, and if requested */
            FAN_GO(merge_coalesce(&sum, &g));
    }
    FAN_GO(merge_finish(&sum, &g, in[0].sparse, coalesced, d, scale, out, err));
done:
    entries_free(&sum);
    if (status == FAN_ERR_NOMEM)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a sparse sum");
    return status;
}
