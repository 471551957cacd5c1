/* sparse: sparse arrays: their parts and the checks of them; reading an index; adding entries to a
 * dense array (scatter, reduce); the places of entries for exact sums; and merges of several by
 * sorted keys. */
#include "array/sparse.h"

#include "array/convert.h"
#include "array/nditer.h"
#include "array/sum_isa.h"
#include "base/float_mode.h"
#include "base/interrupt.h"
#include "base/mem.h"

#include <string.h>

static const char *const names[] = {
    [FAN_FORMAT_COO] = "coo", [FAN_FORMAT_CSR] = "csr", [FAN_FORMAT_CSC] = "csc",
    [FAN_FORMAT_BSR] = "bsr", [FAN_FORMAT_BSC] = "bsc",
};
#define FORMATS (sizeof names / sizeof names[0])

const char *fan_format_name(fan_format f)
{
    if ((size_t)f < FORMATS)
        return names[f];
    return "none";
}

bool fan_format_from_name(const char *name, fan_format *out)
{
    for (size_t f = 0; name && f < FORMATS; f++) {
        if (strcmp(names[f], name) == 0) {
            *out = (fan_format)f;
            return true;
        }
    }
    return false;
}

int64_t fan_sparse_nnz(const fan_sparse *sparse)
{
    return sparse->values->shape[0];
}

/* ---- one sparse array ---- */

static fan_status check_index_dtype(const char *what, const fan_array *a, fan_error *err)
{
    if (a->dtype == FAN_DT_INT32 || a->dtype == FAN_DT_INT64)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_TYPE, "sparse %s: expected int32 or int64, got %s", what,
                    fan_dtype_name(a->dtype));
}

static fan_status check_shape(fan_format f, const char *what, const fan_array *a, int ndim,
                              const int64_t *want, fan_error *err)
{
    bool same = a->ndim == ndim;
    for (int i = 0; same && i < ndim; i++)
        same = a->shape[i] == want[i];
    if (same)
        return FAN_OK;
    char got[128];
    char expected[128];
    return fan_fail(err, FAN_ERR_VALUE, "%s %s have shape %s: expected %s", fan_format_name(f),
                    what, fan_shape_text(a->ndim, a->shape, got, sizeof got),
                    fan_shape_text(ndim, want, expected, sizeof expected));
}

static fan_status check_coo(int ndim, const int64_t *shape, const fan_array *indices,
                            const fan_array *values, fan_error *err)
{
    if (indices->ndim != 2 || indices->shape[0] > ndim) {
        char text[128];
        return fan_fail(
            err, FAN_ERR_VALUE,
            "coo indices have shape %s: expected (sparse_dim, nnz) with sparse_dim <= %d",
            fan_shape_text(indices->ndim, indices->shape, text, sizeof text), ndim);
    }
    int dim = (int)indices->shape[0];
    if (1 + ndim - dim > FAN_MAX_NDIM)
        return fan_fail(err, FAN_ERR_VALUE, "coo values need more than %d axes", FAN_MAX_NDIM);
    int64_t want[FAN_MAX_NDIM];
    want[0] = indices->shape[1];
    for (int i = dim; i < ndim; i++)
        want[1 + i - dim] = shape[i];
    return check_shape(FAN_FORMAT_COO, "values", values, 1 + ndim - dim, want, err);
}

/* check_blocks: computes the extents of a block, which must fill the shape. */
static fan_status check_blocks(fan_format f, const int64_t *shape, const fan_array *values,
                               int64_t *block, fan_error *err)
{
    for (int i = 0; i < 2; i++) {
        block[i] = 0;
        if (values->ndim == 3)
            block[i] = values->shape[1 + i];
        if (block[i] < 1 || shape[i] % block[i]) {
            char text[128];
            char all[128];
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s values have shape %s: expected (blocks, h, w) whose blocks fill %s",
                            fan_format_name(f),
                            fan_shape_text(values->ndim, values->shape, text, sizeof text),
                            fan_shape_text(2, shape, all, sizeof all));
        }
    }
    return FAN_OK;
}

static fan_status check_compressed(fan_format f, int ndim, const int64_t *shape,
                                   const fan_array *indices, const fan_array *pointers,
                                   const fan_array *values, fan_error *err)
{
    if (ndim != 2) {
        return fan_fail(err, FAN_ERR_VALUE, "%s: expected 2 axes, got %d", fan_format_name(f),
                        ndim);
    }
    if (!pointers)
        return fan_fail(err, FAN_ERR_VALUE, "%s needs pointers", fan_format_name(f));
    FAN_TRY(check_index_dtype("pointers", pointers, err));
    int64_t nnz = -1;
    if (indices->ndim == 1)
        nnz = indices->shape[0];
    FAN_TRY(check_shape(f, "indices", indices, 1, &nnz, err));
    bool blocked = fan_format_is_blocked(f);
    int64_t block[2] = {1, 1};
    if (blocked)
        FAN_TRY(check_blocks(f, shape, values, block, err));
    int64_t want[3] = {nnz, block[0], block[1]};
    FAN_TRY(check_shape(f, "values", values, blocked ? 3 : 1, want, err));
    int axis = fan_format_compressed_axis(f);
    want[0] = shape[axis] / block[axis] + 1;
    return check_shape(f, "pointers", pointers, 1, want, err);
}

fan_status fan_sparse_new(fan_format f, int ndim, const int64_t *shape, fan_array *indices,
                          fan_array *pointers, fan_array *values, bool coalesced, fan_sparse **out,
                          fan_error *err)
{
    *out = NULL;
    if ((size_t)f >= FORMATS)
        return fan_fail(err, FAN_ERR_VALUE, "no such sparse format");
    /* The dense shape of a sparse array may be larger than any memory, so its extents are checked
     * one by one. */
    if (ndim < 0 || ndim > FAN_MAX_NDIM) {
        return fan_fail(err, FAN_ERR_VALUE, "a sparse array has 0 to %d axes, got %d", FAN_MAX_NDIM,
                        ndim);
    }
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) {
            return fan_fail(err, FAN_ERR_VALUE, "axis %d: expected a non-negative extent, got %lld",
                            i, (long long)shape[i]);
        }
    }
    FAN_TRY(check_index_dtype("indices", indices, err));
    if (f == FAN_FORMAT_COO)
        FAN_TRY(check_coo(ndim, shape, indices, values, err));
    else
        FAN_TRY(check_compressed(f, ndim, shape, indices, pointers, values, err));

    fan_sparse *s = fan_alloc(sizeof *s);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a sparse array");
    atomic_init(&s->refs, 1);
    s->format = f;
    s->ndim = ndim;
    if (ndim)
        memcpy(s->shape, shape, (size_t)ndim * sizeof *shape);
    s->indices = fan_array_hold(indices);
    s->pointers = NULL;
    if (f != FAN_FORMAT_COO)
        s->pointers = fan_array_hold(pointers);
    s->values = fan_array_hold(values);
    s->coalesced = coalesced;
    s->nnz_coalesced = fan_sparse_nnz(s);
    *out = s;
    return FAN_OK;
}

fan_sparse *fan_sparse_hold(fan_sparse *sparse)
{
    atomic_fetch_add_explicit(&sparse->refs, 1, memory_order_relaxed);
    return sparse;
}

void fan_sparse_drop(fan_sparse *sparse)
{
    if (!sparse || atomic_fetch_sub_explicit(&sparse->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_array_drop(sparse->indices);
    fan_array_drop(sparse->pointers);
    fan_array_drop(sparse->values);
    fan_free(sparse);
}

static fan_status sparse_cast(const fan_sparse *sparse, fan_dtype dtype, fan_sparse **out,
                              fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *values = NULL;
    *out = NULL;
    if (dtype == sparse->values->dtype) {
        values = fan_array_hold(sparse->values);
    } else {
        FAN_GO(
            fan_array_new(dtype, sparse->values->ndim, sparse->values->shape, NULL, &values, err));
        fan_array_copy(values, sparse->values);
    }
    FAN_GO(fan_sparse_new(sparse->format, sparse->ndim, sparse->shape, sparse->indices,
                          sparse->pointers, values, sparse->coalesced, out, err));
    (*out)->nnz_coalesced = sparse->nnz_coalesced;
done:
    fan_array_drop(values);
    return status;
}

#ifdef FAN_TEST
fan_status fan_sparse_cast(const fan_sparse *sparse, fan_dtype dtype, fan_sparse **out,
                           fan_error *err)
{
    return sparse_cast(sparse, dtype, out, err);
}
#endif

/* ---- the parts of a sparse array ----
 *
 * Index parts are foreign memory, which may change after it was checked: only these functions read
 * them, and every index is checked against its extent at its use. */

/* block_extent: returns a block's extent along an axis of the dense shape; 1 if there are no
 * blocks. */
static inline int64_t block_extent(const fan_sparse *sparse, int axis)
{
    if (fan_format_is_blocked(sparse->format))
        return sparse->values->shape[1 + axis];
    return 1;
}

static inline int sparse_dim(const fan_sparse *sparse)
{
    if (sparse->format == FAN_FORMAT_COO)
        return (int)sparse->indices->shape[0];
    return 2;
}

/* cells_of: returns the numbers in one stored entry. */
static inline int64_t cells_of(const fan_sparse *sparse)
{
    int64_t cells = 1;
    for (int i = 1; i < sparse->values->ndim; i++)
        cells *= sparse->values->shape[i];
    return cells;
}

/* Volatile: the checked value is the one used, even if another thread writes there meanwhile. */
static inline int64_t load_index(const fan_array *a, int64_t offset)
{
    const char *p = a->data + offset;
    if (a->dtype == FAN_DT_INT32)
        return *(const volatile fan_any_i32 *)p;
    return *(const volatile fan_any_i64 *)p;
}

/* coo_index: returns the index of entry e along `axis`. */
static inline int64_t coo_index(const fan_sparse *sparse, int axis, int64_t e)
{
    const int64_t *strides = sparse->indices->strides;
    return load_index(sparse->indices, axis * strides[0] + e * strides[1]);
}

static inline int64_t plain_index(const fan_sparse *sparse, int64_t e)
{
    return load_index(sparse->indices, e * sparse->indices->strides[0]);
}

static inline int64_t sparse_pointer(const fan_sparse *sparse, int64_t p)
{
    return load_index(sparse->pointers, p * sparse->pointers->strides[0]);
}

static inline bool sparse_within(int64_t index, int64_t extent)
{
    return index >= 0 && index < extent;
}

/* ---- checks ---- */

static fan_status sparse_outside(const fan_sparse *sparse, int axis, int64_t e, int64_t index,
                                 int64_t extent, fan_error *err)
{
    return fan_fail(
        err, FAN_ERR_VALUE, "%s entry %lld has the index %lld along axis %d, which has %lld",
        fan_format_name(sparse->format), (long long)e, (long long)index, axis, (long long)extent);
}

#define CHECKED 4096 /* entries between two polls for interrupts */

static fan_status sparse_check_pointers(const fan_sparse *sparse, fan_error *err)
{
    int64_t n = sparse->pointers->shape[0];
    int64_t nnz = fan_sparse_nnz(sparse);
    int64_t before = 0;
    for (int64_t p = 0; p < n; p++) {
        if (p && p % CHECKED == 0 && fan_interrupted(CHECKED))
            return FAN_OK;
        int64_t at = sparse_pointer(sparse, p);
        bool rises = at >= before && at <= nnz;
        bool from_0 = p > 0 || at == 0;
        bool to_nnz = p < n - 1 || at == nnz;
        if (!rises || !from_0 || !to_nnz) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s pointer %lld is %lld: expected pointers that rise from 0 to %lld",
                            fan_format_name(sparse->format), (long long)p, (long long)at,
                            (long long)nnz);
        }
        before = at;
    }
    return FAN_OK;
}

/* check_indices: checks the indices along an axis: the first is at offset `first`, each next one
 * `step` bytes further. */
static fan_status check_indices(const fan_sparse *sparse, int axis, int64_t extent, int64_t first,
                                int64_t step, fan_error *err)
{
    int64_t nnz = fan_sparse_nnz(sparse);
    for (int64_t e = 0; e < nnz; e++) {
        if (e && e % CHECKED == 0 && fan_interrupted(CHECKED))
            return FAN_OK;
        int64_t index = load_index(sparse->indices, first + e * step);
        if (!sparse_within(index, extent))
            return sparse_outside(sparse, axis, e, index, extent, err);
    }
    return FAN_OK;
}

fan_status fan_sparse_check(const fan_sparse *sparse, fan_error *err)
{
    const fan_array *a = sparse->indices;
    if (sparse->format == FAN_FORMAT_COO) {
        for (int axis = 0; axis < sparse_dim(sparse); axis++) {
            FAN_TRY(check_indices(sparse, axis, sparse->shape[axis], axis * a->strides[0],
                                  a->strides[1], err));
        }
        return FAN_OK;
    }
    FAN_TRY(sparse_check_pointers(sparse, err));
    int axis = !fan_format_compressed_axis(sparse->format);
    return check_indices(sparse, axis, sparse->shape[axis] / block_extent(sparse, axis), 0,
                         a->strides[0], err);
}

/* coo_rises: returns whether the index of entry e is behind that of the entry before it. */
static bool coo_rises(const fan_sparse *sparse, int64_t e)
{
    for (int axis = 0; axis < sparse_dim(sparse); axis++) {
        int64_t before = coo_index(sparse, axis, e - 1);
        int64_t here = coo_index(sparse, axis, e);
        if (here != before)
            return here > before;
    }
    return false;
}

bool fan_sparse_is_sorted(const fan_sparse *sparse)
{
    int64_t nnz = fan_sparse_nnz(sparse);
    if (sparse->format == FAN_FORMAT_COO) {
        for (int64_t e = 1; e < nnz; e++) {
            if (!coo_rises(sparse, e))
                return false;
        }
        return true;
    }
    int64_t rows = sparse->pointers->shape[0] - 1;
    int64_t first = 0; /* of the row */
    for (int64_t row = 0; row < rows; row++) {
        int64_t end = sparse_pointer(sparse, row + 1);
        if (end < first || end > nnz) /* other code writes the pointers meanwhile */
            return false;
        for (int64_t e = first + 1; e < end; e++) {
            if (plain_index(sparse, e) <= plain_index(sparse, e - 1))
                return false;
        }
        first = end;
    }
    return true;
}

/* ---- sparse into dense ----
 *
 * Entries are added in their order, so that those with the same index are added one after the
 * other. */

/* entry_place: computes the place of entry e's first number, for an array with these strides;
 * false: an index is outside of the shape (other code may write the indices meanwhile). *row: the
 * entry's index along the compressed axis; it begins at 0 and rises with e. */
static bool entry_place(const fan_sparse *sparse, int64_t e, int64_t *row, const int64_t *strides,
                        int64_t *place)
{
    *place = 0;
    if (sparse->format == FAN_FORMAT_COO) {
        for (int i = 0; i < sparse_dim(sparse); i++) {
            int64_t index = coo_index(sparse, i, e);
            if (!sparse_within(index, sparse->shape[i]))
                return false;
            *place += index * strides[i];
        }
        return true;
    }
    int axis = fan_format_compressed_axis(sparse->format);
    int64_t rows = sparse->pointers->shape[0] - 1;
    int64_t index = plain_index(sparse, e);
    int64_t unit = block_extent(sparse, !axis);
    while (*row < rows && sparse_pointer(sparse, *row + 1) <= e)
        ++*row;
    if (*row >= rows || !sparse_within(index, sparse->shape[!axis] / unit))
        return false;
    *place = *row * block_extent(sparse, axis) * strides[axis] + index * unit * strides[!axis];
    return true;
}

/* The positions in a dense array of the entries of `s`, in order. Inside an entry the numbers
 * extend over `inner` axes of the dense array, the last of which, or as many as are gap-free there,
 * make one `run`. */
typedef struct target {
    const fan_array *into;
    const fan_sparse *s;
    int64_t entry, row; /* of the current run's entry; row: its index along the compressed axis */
    bool inside;        /* its index is within the shape */
    int64_t base;       /* of the entry's first number, in bytes from into->data */
    int inner;
    int64_t extent[FAN_MAX_NDIM], stride[FAN_MAX_NDIM], index[FAN_MAX_NDIM];
    int64_t offset;        /* of the current run within the entry */
    int64_t run, runs, at; /* numbers in a run; runs in an entry; which run */
} target;

static void target_entry(target *t)
{
    t->inside = t->entry < fan_sparse_nnz(t->s) &&
                entry_place(t->s, t->entry, &t->row, t->into->strides, &t->base);
}

static void target_begin(target *t, const fan_array *into, const fan_sparse *sparse)
{
    bool blocked = fan_format_is_blocked(sparse->format);
    int first = into->ndim;
    if (sparse->format == FAN_FORMAT_COO)
        first = sparse_dim(sparse);
    else if (blocked)
        first = 0;
    t->into = into;
    t->s = sparse;
    t->entry = 0;
    t->row = 0;
    t->offset = 0;
    t->at = 0;
    t->inner = 0;
    t->run = 1;
    t->runs = 1;
    for (int i = first; i < into->ndim; i++) {
        t->extent[t->inner] = into->shape[i];
        if (blocked)
            t->extent[t->inner] = block_extent(sparse, i);
        t->stride[t->inner] = into->strides[i];
        t->index[t->inner++] = 0;
    }
    int64_t step = fan_dtype_step(into->dtype);
    for (; t->inner; t->inner--) {
        int64_t extent = t->extent[t->inner - 1];
        if (extent != 1 && t->stride[t->inner - 1] != step * t->run)
            break;
        t->run *= extent;
    }
    for (int i = 0; i < t->inner; i++)
        t->runs *= t->extent[i];
    target_entry(t);
}

static void target_next(target *t)
{
    if (++t->at == t->runs) {
        t->at = 0;
        t->offset = 0;
        memset(t->index, 0, (size_t)t->inner * sizeof t->index[0]);
        t->entry++;
        target_entry(t);
        return;
    }
    for (int i = t->inner - 1; i >= 0; i--) {
        t->offset += t->stride[i];
        if (++t->index[i] < t->extent[i])
            return;
        t->offset -= t->stride[i] * t->extent[i];
        t->index[i] = 0;
    }
}

#define PIECE 512 /* numbers converted at a time */
#define RUNS 256  /* runs at a time */

void fan_sparse_scatter(const fan_array *into, const fan_sparse *sparse)
{
    FAN_UNINITIALIZED target t;
    FAN_UNINITIALIZED fan_nditer w;
    FAN_UNINITIALIZED _Alignas(16) char piece[PIECE * 16];
    int64_t to[RUNS], from[RUNS];
    const fan_loops *loops = fan_loops_of(into->dtype);
    FAN_DEFAULT_FLOAT_MODE;
    int64_t size = fan_dtype_step(into->dtype);
    if (sparse->values->size == 0)
        return;
    target_begin(&t, into, sparse);
    fan_nditer_one(&w, sparse->values, true);
    int64_t most = 1; /* runs at a time */
    if (t.run < PIECE)
        most = fan_min(PIECE / t.run, RUNS);
    for (int64_t at = 0; at < w.size && !fan_interrupted(most * t.run);) {
        int64_t taken = 0;
        size_t n = 0;
        int64_t here = at;
        while (taken < most && here < w.size) {
            if (t.inside) {
                to[n] = t.base + t.offset;
                from[n++] = taken * t.run * size;
            }
            taken++;
            here += t.run;
            target_next(&t);
        }
        /* several rounds only for one long run */
        for (int64_t done = 0; n && done < here - at; done += PIECE) {
            int64_t m = fan_min(here - at - done, PIECE);
            const char *src =
                fan_nditer_elements(&w, sparse->values, at + done, m, into->dtype, piece);
            int64_t run = m;
            if (taken > 1)
                run = t.run;
            size_t numbers = (size_t)run * loops->parts;
            loops->add_at(into->data + done * size, to, src, from, n, numbers);
        }
        at = here;
    }
}

fan_status fan_sparse_reduce(const fan_array *out, const fan_sparse *sparse, fan_dtype dtype,
                             fan_error *err)
{
    fan_status status;
    fan_sparse *rounded = NULL;
    fan_array *sum = NULL;
    fan_array *wide = NULL;
    FAN_GO(sparse_cast(sparse, dtype, &rounded, err));
    FAN_GO(fan_array_new(fan_reduce_dtype(dtype), out->ndim, out->shape, NULL, &sum, err));
    FAN_GO(fan_array_broadcast(sum, sparse->ndim, sparse->shape, &wide, err));
    fan_fill_zero(sum);
    /* several elements of `wide` are one of `sum`: their entries are added one after the other */
    fan_sparse_scatter(wide, rounded);
    fan_array_copy(out, sum);
done:
    fan_sparse_drop(rounded);
    fan_array_drop(sum);
    fan_array_drop(wide);
    return status;
}

fan_status fan_sparse_places(const fan_sparse *s, int64_t *to, fan_error *err)
{
    int64_t strides[FAN_MAX_NDIM];
    int64_t nnz = fan_sparse_nnz(s);
    int64_t all = 1;
    int64_t row = 0;
    for (int i = s->ndim - 1; i >= 0; i--) {
        strides[i] = all;
        if (s->shape[i] && __builtin_mul_overflow(all, s->shape[i], &all)) {
            return fan_fail(
                err, FAN_ERR_VALUE,
                "exact sum of a sparse gradient: the dense shape has 2**63 elements or more");
        }
    }

    /* A block is `width` numbers of each of its rows; other entries are one row. */
    int64_t run = 0;
    if (nnz)
        run = s->values->size / nnz;
    int64_t width = fan_max(run, 1);
    int64_t next_row = 0;
    if (fan_format_is_blocked(s->format)) {
        width = block_extent(s, 1);
        next_row = s->shape[1];
    }
    for (int64_t e = 0; e < nnz; e++) {
        int64_t place;
        if (!entry_place(s, e, &row, strides, &place)) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "the indices of a sparse gradient were changed while it was summed");
        }
        for (int64_t k = 0; k < run; k += width) {
            for (int64_t i = 0; i < width; i++)
                *to++ = place + i;
            place += next_row;
        }
    }
    return FAN_OK;
}

/* ---- merges ----
 *
 * Design: every stored entry gets a key, the position of its index in the order of the result's
 * indices; operands are concatenated, sorted stably by key, and equal neighbours are folded from
 * left to right. That is D12: the order (key of the contribution, position) survives the sort.
 *
 *   format   axes that are indexed            an entry's values
 *   COO      the first sparse_dim             the other axes
 *   CSR      row, column                      one
 *   CSC      column, row                      one
 *   BSR      block row, block column          a block
 *   BSC      block column, block row          a block
 *
 * A key is a linear index in one int64; if the extents are too large for that, it has several
 * columns, sorted from the last to the first.
 *
 * Pitfalls: the sum widens (D3) between operands while duplicates are still separate. Converting
 * each before adding gives other bits than adding first; so everything before a widening is folded
 * before it is converted. And index parts are foreign memory, which may change after it was
 * checked: every index is checked against its extent at its use. */

/* The index space of a sum's entries, and the key of an entry's index. */
typedef struct grid {
    fan_format format;
    int axes;
    int64_t extent[FAN_MAX_NDIM];
    int64_t cells; /* numbers in an entry */
    /* of a key; column c is the linear index over axes first[c] .. first[c + 1] - 1 */
    int columns;
    int first[FAN_MAX_NDIM + 1];
} grid;

/* extent_between: returns the product of the extents of axes first .. end - 1. */
static int64_t extent_between(const grid *g, int first, int end)
{
    int64_t product = 1;
    for (int i = first; i < end; i++)
        product *= g->extent[i];
    return product;
}

/* own_index: computes the index of each stored entry along a grid axis, in the units of the array's
 * own index part, each repeated `times` times. */
static fan_status own_index(const fan_sparse *sparse, bool compressed, int axis, int64_t extent,
                            int64_t times, int64_t *to, fan_error *err)
{
    int64_t nnz = fan_sparse_nnz(sparse);
    int64_t row = 0;
    if (compressed)
        FAN_TRY(sparse_check_pointers(sparse, err));
    for (int64_t e = 0; e < nnz; e++) {
        int64_t index;
        if (compressed) {
            while (row < extent && sparse_pointer(sparse, row + 1) <= e)
                row++;
            index = row;
        } else if (sparse->format == FAN_FORMAT_COO) {
            index = coo_index(sparse, axis, e);
        } else {
            index = plain_index(sparse, e);
        }
        if (!sparse_within(index, extent))
            return sparse_outside(sparse, axis, e, index, extent, err);
        for (int64_t i = 0; i < times; i++)
            *to++ = index;
    }
    return FAN_OK;
}

/* grid_index: computes the index along grid axis `axis` of each of the array's entries in this grid
 * (one stored entry is `times` of them). */
static fan_status grid_index(const fan_sparse *sparse, const grid *g, int axis, int64_t times,
                             int64_t *to, fan_error *err)
{
    int64_t n = fan_sparse_nnz(sparse) * times;
    if (sparse->format == FAN_FORMAT_COO) {
        if (axis < sparse_dim(sparse))
            return own_index(sparse, false, axis, g->extent[axis], times, to, err);
        int64_t below = extent_between(g, axis + 1, g->axes); /* an axis that is dense in sparse */
        for (int64_t i = 0; i < n; i++)
            to[i] = i / below % g->extent[axis];
        return FAN_OK;
    }
    int compressed = fan_format_compressed_axis(sparse->format);
    if (g->format != FAN_FORMAT_COO) {
        /* the grid'sparse first axis is the compressed one */
        return own_index(sparse, axis == 0, axis ^ compressed, g->extent[axis], times, to, err);
    }
    int64_t unit = block_extent(sparse, axis);
    int64_t wide = block_extent(sparse, 1);
    FAN_TRY(own_index(sparse, axis == compressed, axis, g->extent[axis] / unit, times, to, err));
    for (int64_t i = 0; i < n; i++) {
        int64_t inside = i % wide;
        if (axis == 0)
            inside = i % times / wide;
        to[i] = to[i] * unit + inside;
    }
    return FAN_OK;
}

/* The entries of an unfinished sum: keys column by column, values contiguous in dtype acc. */
typedef struct entries {
    int64_t n;
    int64_t *keys;
    char *values;
    fan_dtype acc;
} entries;

static const entries no_entries = {.acc = FAN_DT_NONE};

static void entries_free(entries *e)
{
    fan_free(e->keys);
    fan_free(e->values);
    *e = no_entries;
}

/* entries_move: replaces the entries of `to`, and leaves none in `from`. */
static void entries_move(entries *to, entries *from)
{
    entries_free(to);
    *to = *from;
    *from = no_entries;
}

/* entries_of: returns the grid's entries in a sparse array, and how many of them are one
 * stored entry. */
static int64_t entries_of(const fan_sparse *sparse, const grid *g, int64_t *times)
{
    *times = 1;
    if (g->cells)
        *times = cells_of(sparse) / g->cells;
    return fan_sparse_nnz(sparse) * *times; /* at most its numbers, or its entries */
}

/* key_order: returns -1, 0 or 1: the key of entry `one` is below, equal to or above that of
 * `two`. */
static int key_order(const entries *e, const grid *g, int64_t one, int64_t two)
{
    for (int c = 0; c < g->columns; c++) {
        const int64_t *key = e->keys + c * e->n;
        if (key[one] == key[two])
            continue;
        if (key[one] < key[two])
            return -1;
        return 1;
    }
    return 0;
}

/* merge_allocate: allocates n * each items of `size` bytes; NULL when out of memory or on
 * overflow. */
static void *merge_allocate(int64_t n, int64_t each, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, each, &bytes) || __builtin_mul_overflow(bytes, size, &bytes))
        return NULL;
    return fan_alloc(bytes);
}

static bool entries_new(entries *e, const grid *g, int64_t n, fan_dtype acc)
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

/* copy_to: copies an array to memory with these strides. */
static void copy_to(char *data, fan_dtype dtype, int64_t *strides, const fan_array *from)
{
    fan_array to = {.data = data,
                    .dtype = dtype,
                    .ndim = from->ndim,
                    .size = from->size,
                    .shape = from->shape,
                    .strides = strides};
    fan_array_copy(&to, from);
}

/* read_operand: reads a sparse array into the entries of e from `at` on. */
static fan_status read_operand(entries *e, const grid *g, const fan_sparse *sparse, int64_t at,
                               int64_t *scratch, fan_error *err)
{
    int64_t times;
    int64_t n = entries_of(sparse, g, &times);
    for (int c = 0; c < g->columns; c++) {
        int64_t *key = e->keys + c * e->n + at;
        memset(key, 0, (size_t)n * sizeof *key);
        for (int axis = g->first[c]; axis < g->first[c + 1]; axis++) {
            FAN_TRY(grid_index(sparse, g, axis, times, scratch, err));
            for (int64_t i = 0; i < n; i++)
                key[i] = key[i] * g->extent[axis] + scratch[i];
        }
    }
    size_t size = fan_dtype_size(e->acc);
    int64_t strides[FAN_MAX_NDIM];
    fan_dense_strides(sparse->values->ndim, sparse->values->shape, size, NULL, strides);
    copy_to(e->values + (size_t)(at * g->cells) * size, e->acc, strides, sparse->values);
    return FAN_OK;
}

/* in_order: returns 1 if strictly rising, 0 if rising with equals, -1 otherwise. */
static int in_order(const entries *e, const grid *g)
{
    int answer = 1;
    for (int64_t i = 1; i < e->n && answer >= 0; i++)
        answer = (int)fan_min(answer, key_order(e, g, i, i - 1));
    return answer;
}

/* sort_by_key: computes the positions of the entries in the order of their keys; stable. `a` and
 * `b` have room for n each; returns the one with the result. */
static const int64_t *sort_by_key(const entries *e, const grid *g, bool sorted, int64_t *a,
                                  int64_t *b)
{
    int bits = 11;
    if (e->n < 4096)
        bits = 8;
    for (int64_t i = 0; i < e->n; i++)
        a[i] = i;
    if (sorted)
        return a;
    for (int c = g->columns - 1; c >= 0; c--) {
        const int64_t *key = e->keys + c * e->n;
        int64_t product = 1; /* the largest key of column c, plus one */
        for (int i = g->first[c]; i < g->first[c + 1]; i++)
            product *= fan_max(g->extent[i], 1);
        for (int shift = 0; shift < 63 && (product - 1) >> shift; shift += bits) {
            /* Sorts `order` by one digit of the key, stably. */
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

/* merge_fold: writes the left fold of e over equal keys, visited in `order`, to `folded`, which has
 * room for all. */
static void merge_fold(entries *folded, const entries *e, const grid *g, const int64_t *order)
{
    int64_t dst[PENDING], src[PENDING];
    const fan_loops *loops = fan_loops_of(e->acc);
    int64_t bytes = g->cells * fan_dtype_step(e->acc);
    size_t run = (size_t)g->cells * loops->parts;
    size_t pending = 0;
    int64_t m = 0;
    for (int64_t i = 0; i < e->n; i++) {
        int64_t k = order[i];
        if (i && key_order(e, g, k, order[i - 1]) == 0) { /* added after its first, in order */
            dst[pending] = (m - 1) * bytes;
            src[pending++] = k * bytes;
            if (pending == PENDING) {
                loops->add_at(folded->values, dst, e->values, src, pending, run);
                pending = 0;
            }
            continue;
        }
        for (int c = 0; c < g->columns; c++)
            folded->keys[c * e->n + m] = e->keys[c * e->n + k];
        memcpy(folded->values + m * bytes, e->values + k * bytes, (size_t)bytes);
        m++;
    }
    loops->add_at(folded->values, dst, e->values, src, pending, run);
    for (int c = 1; c < g->columns; c++)
        memmove(folded->keys + c * m, folded->keys + c * e->n, (size_t)m * sizeof *folded->keys);
    folded->n = m;
}

/* merge_coalesce: sorts and folds the entries; FAN_ERR_NOMEM leaves them as they are. */
static fan_status merge_coalesce(entries *e, const grid *g)
{
    int ordered = in_order(e, g);
    if (ordered == 1)
        return FAN_OK;
    fan_status status = FAN_ERR_NOMEM;
    entries folded = no_entries;
    int64_t *a = merge_allocate(e->n, 1, sizeof *a);
    int64_t *b = merge_allocate(e->n, 1, sizeof *b);
    if (a && b && entries_new(&folded, g, e->n, e->acc)) {
        merge_fold(&folded, e, g, sort_by_key(e, g, ordered == 0, a, b));
        entries_move(e, &folded);
        status = FAN_OK;
    }
    fan_free(a);
    fan_free(b);
    return status;
}

/* merge_append: appends the sum so far, converted to `acc`, and the entries of operands that are
 * all added in acc. */
static fan_status merge_append(entries *sum, const grid *g, const fan_sparse_operand *in, size_t n,
                               fan_dtype acc, fan_error *err)
{
    fan_status status = FAN_ERR_NOMEM;
    entries all = no_entries;
    int64_t *scratch = NULL;
    int64_t total = sum->n;
    int64_t longest = 0;
    int64_t times;
    for (size_t k = 0; k < n; k++) {
        if (!in[k].sparse)
            continue;
        int64_t here = entries_of(in[k].sparse, g, &times);
        if (__builtin_add_overflow(total, here, &total))
            goto done;
        longest = fan_max(longest, here);
    }
    scratch = merge_allocate(longest, 1, sizeof *scratch);
    if (!scratch || !entries_new(&all, g, total, acc))
        goto done;

    if (sum->n) {
        for (int c = 0; c < g->columns; c++) {
            memcpy(all.keys + c * total, sum->keys + c * sum->n,
                   (size_t)sum->n * sizeof *sum->keys);
        }
        fan_convert_dense(all.values, acc, sum->values, sum->acc, sum->n * g->cells);
    }
    int64_t at = sum->n;
    for (size_t k = 0; k < n; k++) {
        const fan_sparse *sparse = in[k].sparse;
        if (!sparse)
            continue;
        FAN_GO(read_operand(&all, g, sparse, at, scratch, err));
        at += entries_of(sparse, g, &times);
    }
    entries_move(sum, &all);
    status = FAN_OK;
done:
    fan_free(scratch);
    entries_free(&all);
    return status;
}

/* grid_axis_of_key: computes the index along one axis from the keys of all entries. */
static void grid_axis_of_key(const entries *e, const grid *g, int axis, char *to, int64_t step)
{
    int c = 0;
    while (axis >= g->first[c + 1])
        c++;
    int64_t below = extent_between(g, axis + 1, g->first[c + 1]);
    const int64_t *key = e->keys + c * e->n;
    for (int64_t i = 0; i < e->n; i++)
        *(fan_any_i64 *)(to + i * step) = key[i] / below % g->extent[axis];
}

/* build_indices: makes the index parts from the keys, for a grid whose entries are coalesced (or
 * COO in any order). */
static fan_status build_indices(const entries *e, const grid *g, fan_array **indices,
                                fan_array **pointers, fan_error *err)
{
    if (g->format == FAN_FORMAT_COO) {
        int64_t shape[2] = {g->axes, e->n};
        FAN_TRY(fan_array_new(FAN_DT_INT64, 2, shape, NULL, indices, err));
        const fan_array *a = *indices;
        for (int axis = 0; e->n && axis < g->axes; axis++)
            grid_axis_of_key(e, g, axis, a->data + axis * a->strides[0], a->strides[1]);
        return FAN_OK;
    }
    int64_t rows = g->extent[0] + 1;
    FAN_TRY(fan_array_new(FAN_DT_INT64, 1, &e->n, NULL, indices, err));
    FAN_TRY(fan_array_new(FAN_DT_INT64, 1, &rows, NULL, pointers, err));
    char *index = (*indices)->data;
    int64_t *p = (void *)(*pointers)->data;
    memset(p, 0, (size_t)rows * sizeof *p);
    grid_axis_of_key(e, g, 0, index, sizeof *p);
    for (int64_t k = 0; k < e->n; k++)
        p[((fan_any_i64 *)index)[k] + 1]++;
    grid_axis_of_key(e, g, 1, index, sizeof *p);
    for (int64_t r = 1; r < rows; r++)
        p[r] += p[r - 1];
    return FAN_OK;
}

/* values_new: makes an array for n entries of dtype d. */
static fan_status values_new(const grid *g, const fan_sparse *like, int64_t n, fan_dtype d,
                             fan_array **out, fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM + 1] = {n};
    int ndim = 1;
    if (g->format == FAN_FORMAT_COO) {
        for (int i = g->axes; i < like->ndim; i++)
            shape[ndim++] = like->shape[i];
    } else if (fan_format_is_blocked(g->format)) {
        shape[ndim++] = block_extent(like, 0);
        shape[ndim++] = block_extent(like, 1);
    }
    return fan_array_new(d, ndim, shape, NULL, out, err);
}

/* merge_divide: divides the values by the divisor of a mean. */
static void merge_divide(const entries *e, const fan_divisor *divisor, int64_t numbers)
{
    _Alignas(8) char number[8];
    const fan_loops *loops = fan_loops_of(e->acc);
    fan_divisor_as(divisor, e->acc, number);
    fan_loop_options options = {.divisor = number};
    fan_loops_apply(loops, e->values, e->values, numbers, &options);
}

/* merge_finish: scales, rounds, and makes the sparse array. */
static fan_status merge_finish(entries *e, const grid *g, const fan_sparse *like, bool coalesced,
                               fan_dtype d, const fan_scale *scale, fan_sparse **out,
                               fan_error *err)
{
    fan_status status;
    fan_array *indices = NULL;
    fan_array *pointers = NULL;
    fan_array *values = NULL;
    int64_t numbers = e->n * g->cells;
    if (scale && scale->divisor && numbers)
        merge_divide(e, scale->divisor, numbers);
    if (scale && scale->on && numbers) {
        _Alignas(16) char factor[16];
        fan_scale_as(scale, e->acc, factor);
        fan_loops_of(e->acc)->scale(e->values, factor, (size_t)numbers);
    }
    FAN_GO(build_indices(e, g, &indices, &pointers, err));
    FAN_GO(values_new(g, like, e->n, d, &values, err));
    fan_convert_dense(values->data, d, e->values, e->acc, numbers);
    FAN_GO(fan_sparse_new(g->format, like->ndim, like->shape, indices, pointers, values, coalesced,
                          out, err));
    if (!coalesced)
        (*out)->nnz_coalesced = like->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

/* copy_into: copies an array into another from position `at` along an axis on. */
static void copy_into(const fan_array *to, int axis, int64_t at, const fan_array *from)
{
    if (from->size)
        copy_to(to->data + at * to->strides[axis], to->dtype, to->strides, from);
}

/* merge_concatenate: concatenates COO operands of one grid and one dtype. */
static fan_status merge_concatenate(const grid *g, const fan_sparse_operand *in, size_t n,
                                    fan_sparse **out, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *indices = NULL;
    fan_array *values = NULL;
    const fan_sparse *first = in[0].sparse;
    int64_t shape[2] = {g->axes, 0};
    for (size_t k = 0; k < n; k++) {
        if (__builtin_add_overflow(shape[1], fan_sparse_nnz(in[k].sparse), &shape[1]))
            return fan_fail(err, FAN_ERR_NOMEM, "too many sparse entries");
    }
    FAN_GO(fan_array_new(FAN_DT_INT64, 2, shape, NULL, &indices, err));
    FAN_GO(values_new(g, first, shape[1], in[0].acc, &values, err));
    int64_t at = 0;
    for (size_t k = 0; k < n; k++) {
        const fan_sparse *s = in[k].sparse;
        copy_into(indices, 1, at, s->indices);
        copy_into(values, 0, at, s->values);
        at += fan_sparse_nnz(s);
    }
    FAN_GO(fan_sparse_new(FAN_FORMAT_COO, first->ndim, first->shape, indices, NULL, values,
                          n == 1 && first->coalesced, out, err));
    (*out)->nnz_coalesced = first->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(values);
    return status;
}

static bool same_blocks(const fan_sparse *a, const fan_sparse *b)
{
    if (a->format != b->format)
        return false;
    return block_extent(a, 0) == block_extent(b, 0) && block_extent(a, 1) == block_extent(b, 1);
}

/* grid_of: computes the grid of the sum: that of the operands if it is the same for all; else COO
 * over as many axes as any of them indexes. */
static void grid_of(grid *g, const fan_sparse_operand *in, size_t n)
{
    const fan_sparse *sparse = in[0].sparse;
    g->format = sparse->format;
    g->axes = 0;
    g->cells = 1;
    for (size_t k = 0; k < n; k++) {
        if (!in[k].sparse)
            continue;
        g->axes = (int)fan_max(g->axes, sparse_dim(in[k].sparse));
        if (!same_blocks(in[k].sparse, sparse))
            g->format = FAN_FORMAT_COO;
    }
    if (g->format == FAN_FORMAT_COO) {
        memcpy(g->extent, sparse->shape, (size_t)g->axes * sizeof *sparse->shape);
        for (int i = g->axes; i < sparse->ndim; i++)
            g->cells *= sparse->shape[i];
    } else {
        int axis = fan_format_compressed_axis(g->format);
        g->extent[0] = sparse->shape[axis] / block_extent(sparse, axis);
        g->extent[1] = sparse->shape[!axis] / block_extent(sparse, !axis);
        g->cells = cells_of(sparse);
    }

    g->columns = 0;
    g->first[0] = 0;
    int64_t product = 1;
    for (int i = 0; i < g->axes; i++) {
        if (__builtin_mul_overflow(product, fan_max(g->extent[i], 1), &product)) {
            g->first[++g->columns] = i;
            product = g->extent[i];
        }
    }
    g->first[++g->columns] = g->axes;
}

/* may_concatenate: returns whether all operands are COO of the grid and of one dtype. */
static bool may_concatenate(const grid *g, const fan_sparse_operand *in, size_t n)
{
    if (g->format != FAN_FORMAT_COO)
        return false;
    for (size_t k = 0; k < n; k++) {
        const fan_sparse *sparse = in[k].sparse;
        if (!sparse || in[k].acc != in[n - 1].acc)
            return false;
        if (sparse->format != FAN_FORMAT_COO || sparse_dim(sparse) != g->axes)
            return false;
    }
    return true;
}

fan_status fan_sparse_merge(const fan_sparse_operand *in, size_t n, bool coalesced,
                            fan_dtype result, const fan_scale *scale, fan_sparse **out,
                            fan_error *err)
{
    *out = NULL;
    FAN_DEFAULT_FLOAT_MODE;
    FAN_UNINITIALIZED grid g;
    grid_of(&g, in, n);
    fan_dtype last = in[n - 1].acc;
    fan_dtype d = result;
    if (d == FAN_DT_NONE)
        d = last;
    bool scaled = fan_scale_acts(scale);
    coalesced |= g.format != FAN_FORMAT_COO || d != last || scaled;
    if (!coalesced && may_concatenate(&g, in, n))
        return merge_concatenate(&g, in, n, out, err);

    fan_status status = FAN_OK;
    entries sum = no_entries;
    size_t end;
    for (size_t k = 0; k < n; k = end) {
        end = k + 1;
        while (end < n && in[end].acc == in[k].acc)
            end++;
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
