#include "array/sparse_parts.h"

#include "array/nditer.h"
#include "array/sum_isa.h"
#include "base/interrupt.h"

#include <string.h>

/* ---- checks ---- */

fan_status fan__sparse_outside(const fan_sparse *s, int axis, int64_t e, int64_t index, int64_t extent, fan_error *err)
{
    return fan_fail(err, FAN_ERR_VALUE, "%s entry %lld has the index %lld along axis %d, which has %lld",
                    fan_format_name(s->format), (long long)e, (long long)index, axis, (long long)extent);
}

#define CHECKED 4096 /* entries between two polls for interrupts */

static int64_t block_end(int64_t from, int64_t n) { return n - from < CHECKED ? n : from + CHECKED; }

fan_status fan__sparse_check_pointers(const fan_sparse *s, fan_error *err)
{
    int64_t n = s->pointers->shape[0], nnz = fan_sparse_nnz(s), before = 0;
    for (int64_t from = 0; from < n && !(from && fan_interrupted(CHECKED)); from += CHECKED) {
        for (int64_t p = from, end = block_end(from, n); p < end; p++) {
            int64_t at = sparse_pointer(s, p);
            if (at < before || at > nnz || (p == 0 && at != 0) || (p == n - 1 && at != nnz))
                return fan_fail(err, FAN_ERR_VALUE,
                                "%s pointer %lld is %lld: expected pointers that rise from 0 to %lld",
                                fan_format_name(s->format), (long long)p, (long long)at, (long long)nnz);
            before = at;
        }
    }
    return FAN_OK;
}

/* check_indices: checks the indices along an axis: the first is at `first`, each next one `step` bytes further. */
static fan_status check_indices(const fan_sparse *s, int axis, int64_t extent, const char *first, int64_t step,
                                fan_error *err)
{
    int64_t nnz = fan_sparse_nnz(s);
    for (int64_t from = 0; from < nnz && !(from && fan_interrupted(CHECKED)); from += CHECKED) {
        for (int64_t e = from, end = block_end(from, nnz); e < end; e++) {
            int64_t index = load_index(s->indices, first + e * step);
            if (!sparse_within(index, extent))
                return fan__sparse_outside(s, axis, e, index, extent, err);
        }
    }
    return FAN_OK;
}

fan_status fan_sparse_check(const fan_sparse *s, fan_error *err)
{
    const fan_array *a = s->indices;
    if (s->format == FAN_FORMAT_COO) {
        for (int axis = 0; axis < sparse_dim(s); axis++)
            FAN_TRY(check_indices(s, axis, s->shape[axis], a->data + axis * a->strides[0], a->strides[1], err));
        return FAN_OK;
    }
    FAN_TRY(fan__sparse_check_pointers(s, err));
    int axis = !fan_format_compressed_axis(s->format);
    return check_indices(s, axis, s->shape[axis] / block_extent(s, axis), a->data, a->strides[0], err);
}

/* ---- sparse into dense ----
 *
 * Entries are added in their order, so that those with the same index are added one after the other. */

/* entry_place: computes the place of entry e's first number, for an array with these strides; false: an index is
 * outside of the shape (other code may write the indices meanwhile). *row: the entry's index along the compressed axis;
 * it begins at 0 and rises with e. */
static bool entry_place(const fan_sparse *s, int64_t e, int64_t *row, const int64_t *strides, int64_t *place)
{
    *place = 0;
    if (s->format == FAN_FORMAT_COO) {
        for (int i = 0; i < sparse_dim(s); i++) {
            int64_t index = coo_index(s, i, e);
            if (!sparse_within(index, s->shape[i]))
                return false;
            *place += index * strides[i];
        }
        return true;
    }
    int axis = fan_format_compressed_axis(s->format);
    int64_t rows = s->pointers->shape[0] - 1, index = plain_index(s, e), unit = block_extent(s, !axis);
    while (*row < rows && sparse_pointer(s, *row + 1) <= e)
        ++*row;
    *place = *row * block_extent(s, axis) * strides[axis] + index * unit * strides[!axis];
    return *row < rows && sparse_within(index, s->shape[!axis] / unit);
}

/* The positions in a dense array of the entries of s, in order. Inside an entry the numbers extend over `inner` axes of
 * the dense array, the last of which, or as many as are gap-free there, make one `run`. */
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
    t->inside = t->entry < fan_sparse_nnz(t->s) && entry_place(t->s, t->entry, &t->row, t->into->strides, &t->base);
}

static void target_begin(target *t, const fan_array *into, const fan_sparse *s)
{
    t->into = into;
    t->s = s;
    t->entry = t->row = t->offset = t->at = 0;
    t->inner = 0;
    t->run = t->runs = 1;
    int first = s->format == FAN_FORMAT_COO ? sparse_dim(s) : fan_format_is_blocked(s->format) ? 0 : into->ndim;
    for (int i = first; i < into->ndim; i++) {
        t->extent[t->inner] = fan_format_is_blocked(s->format) ? block_extent(s, i) : into->shape[i];
        t->stride[t->inner] = into->strides[i];
        t->index[t->inner++] = 0;
    }
    int64_t step = (int64_t)fan_dtype_size(into->dtype);
    while (t->inner && (t->extent[t->inner - 1] == 1 || t->stride[t->inner - 1] == step * t->run))
        t->run *= t->extent[--t->inner];
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

void fan_sparse_scatter(const fan_array *into, const fan_sparse *s)
{
    FAN_UNINITIALIZED target t;
    FAN_UNINITIALIZED fan_nditer w;
    FAN_UNINITIALIZED _Alignas(16) char piece[PIECE * 16];
    int64_t to[RUNS], from[RUNS];
    const fan_loops *loops = fan_loops_of(into->dtype);
    int64_t size = (int64_t)fan_dtype_size(into->dtype);
    if (s->values->size == 0)
        return;
    target_begin(&t, into, s);
    fan_nditer_begin(&w, s->values, true);
    fan_nditer_ready(&w);
    int64_t most = t.run < PIECE ? PIECE / t.run : 1; /* runs at a time */
    most = most < RUNS ? most : RUNS;
    for (int64_t at = 0; at < w.size && !fan_interrupted(most * t.run);) {
        int64_t taken = 0;
        size_t n = 0;
        int64_t here = at;
        for (; taken < most && here < w.size; taken++, here += t.run, target_next(&t)) {
            if (t.inside) {
                to[n] = t.base + t.offset;
                from[n++] = taken * t.run * size;
            }
        }
        for (int64_t done = 0, m; n && done < here - at; done += m) { /* several rounds only for one long run */
            m = here - at - done < PIECE ? here - at - done : PIECE;
            const char *src = s->values->dtype == into->dtype ? fan_nditer_whole(&w, s->values, at + done, m) : NULL;
            if (!src) {
                fan_nditer_read(&w, s->values, at + done, m, into->dtype, piece);
                src = piece;
            }
            size_t run = (size_t)(taken > 1 ? t.run : m) * loops->parts;
            loops->add_at(into->data + done * size, to, src, from, n, run);
        }
        at = here;
    }
}

fan_status fan_sparse_reduce(const fan_array *out, const fan_sparse *s, fan_error *err)
{
    fan_status status;
    fan_array *sum = NULL, *wide = NULL;
    FAN_GO(fan_array_new(fan_reduce_dtype(s->values->dtype), out->ndim, out->shape, NULL, &sum, err));
    FAN_GO(fan_array_broadcast(sum, s->ndim, s->shape, &wide, err));
    fan_fill_zero(sum);
    fan_sparse_scatter(
        wide, s); /* several elements of `wide` are one of `sum`: their entries are added one after the other */
    fan_array_copy(out, sum);
done:
    fan_array_drop(sum);
    fan_array_drop(wide);
    return status;
}

fan_status fan_sparse_places(const fan_sparse *s, int64_t *to, fan_error *err)
{
    int64_t all = 1, strides[FAN_MAX_NDIM], nnz = fan_sparse_nnz(s), row = 0, place;
    int64_t run = nnz ? s->values->size / nnz : 0, width = fan_format_is_blocked(s->format) ? block_extent(s, 1) : 1;
    for (int i = s->ndim - 1; i >= 0; i--) {
        strides[i] = all;
        if (s->shape[i] && __builtin_mul_overflow(all, s->shape[i], &all))
            return fan_fail(err, FAN_ERR_VALUE,
                            "exact sum of a sparse gradient: the dense shape has 2**63 elements or more");
    }
    for (int64_t e = 0; e < nnz; e++) {
        if (!entry_place(s, e, &row, strides, &place))
            return fan_fail(err, FAN_ERR_VALUE, "the indices of a sparse gradient were changed while it was summed");
        for (int64_t k = 0; k < run; k++)
            *to++ = place + (fan_format_is_blocked(s->format) ? k / width * s->shape[1] + k % width : k);
    }
    return FAN_OK;
}
