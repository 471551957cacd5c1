/* sparse: COO, CSR, CSC, BSR, BSC as parts, and their sums (D12).
 *
 *   COO        indices (sparse_dim, nnz) int64,  values (nnz, *dense_dims)
 *   CSR, CSC   plain/compressed pointers (rows+1 or cols+1), indices (nnz), values (nnz)
 *   BSR, BSC   pointers (block rows+1 ..), indices (nblocks), values (nblocks, bh, bw)
 *
 * Parts are arrays of any strides; index dtypes int32 or int64. Sums have int64 indices and C-order
 * parts. The functions here read host memory; a device calls them from its own queue. */
#ifndef FAN_ARRAY_SPARSE_H
#define FAN_ARRAY_SPARSE_H

#include "array/array.h"
#include "array/sum.h"

typedef enum fan_format {
    FAN_FORMAT_COO,
    FAN_FORMAT_CSR,
    FAN_FORMAT_CSC,
    FAN_FORMAT_BSR,
    FAN_FORMAT_BSC
} fan_format;

typedef struct fan_sparse {
    atomic_size_t refs;
    fan_format format;
    int ndim; /* of the dense shape */
    int64_t shape[FAN_MAX_NDIM];
    fan_array *indices;  /* COO: (sparse_dim, nnz); else (nnz or nblocks,) */
    fan_array *pointers; /* NULL for COO */
    fan_array *values;
    bool coalesced; /* sorted without duplicates; false: unknown */
    /* nnz after the last coalesce (A5); at first the first contribution's own nnz */
    int64_t nnz_coalesced;
} fan_sparse;

const char *fan_format_name(fan_format f); /* "coo" */
bool fan_format_from_name(const char *name, fan_format *out);
static inline bool fan_format_is_blocked(fan_format f)
{
    return f == FAN_FORMAT_BSR || f == FAN_FORMAT_BSC;
}
/* fan_format_compressed_axis: returns the axis of the dense shape that the pointers run along. */
static inline int fan_format_compressed_axis(fan_format f)
{
    return f == FAN_FORMAT_CSC || f == FAN_FORMAT_BSC;
}

/* fan_sparse_new: checks ranks, extents and dtypes of the parts (the indices' values are checked by
 * fan_sparse_check) and holds them. */
fan_status fan_sparse_new(fan_format f, int ndim, const int64_t *shape, fan_array *indices,
                          fan_array *pointers, fan_array *values, bool coalesced, fan_sparse **out,
                          fan_error *err);
/* fan_sparse_check: reads the index parts and checks that every index is within the shape and that
 * pointers rise from 0 to nnz; FAN_ERR_VALUE otherwise. Host memory only. */
fan_status fan_sparse_check(const fan_sparse *s, fan_error *err);
fan_sparse *fan_sparse_hold(fan_sparse *s);
void fan_sparse_drop(fan_sparse *s);
/* fan_sparse_is_sorted: returns whether the entries are in the order of their indices, without
 * duplicates. Reads the index parts; host memory only. */
bool fan_sparse_is_sorted(const fan_sparse *s);
int64_t fan_sparse_nnz(const fan_sparse *s); /* stored entries (blocks for BSR, BSC) */

typedef struct fan_sparse_operand {
    /* NULL, but not of the first: no entries: the sum continues in acc (D3) */
    const fan_sparse *sparse;
    fan_dtype acc;
} fan_sparse_operand;

/* fan_sparse_merge: sums n >= 1 operands. All of one format: that format (COO is concatenated in
 * order and coalesced only if `coalesce`; the others always are); mixed formats, or blocks of two
 * sizes: COO. COO of two sparse_dims: the larger. Entries before a widening (D3) are coalesced
 * before it. FAN_ERR_VALUE if an index is out of bounds, FAN_ERR_NOMEM. Values are in the last acc,
 * or in `result` (rounded once, scaled first) if that is not FAN_DT_NONE; a rounding result is
 * always coalesced first. */
fan_status fan_sparse_merge(const fan_sparse_operand *in, size_t n, bool coalesce, fan_dtype result,
                            const fan_scale *scale, fan_sparse **out, fan_error *err);
/* fan_sparse_scatter: adds the entries of s to dense `into` (full shape), one after the other, in
 * into's dtype (converted to it). */
void fan_sparse_scatter(const fan_array *into, const fan_sparse *s);
/* fan_sparse_reduce: sums a sparse gradient, its values rounded to `dtype` first, to a declared
 * shape (A9, D7), as a dense array of `out`'s shape and dtype. */
fan_status fan_sparse_reduce(const fan_array *out, const fan_sparse *s, fan_dtype dtype,
                             fan_error *err);
/* fan_sparse_places: computes, for each stored number in C order of the values, its index in C
 * order of the dense array. The indices must have been checked. FAN_ERR_VALUE if an index exceeds
 * 63 bits. */
fan_status fan_sparse_places(const fan_sparse *s, int64_t *to, fan_error *err);
#ifdef FAN_TEST
/* fan_sparse_cast: makes a sparse array of the same entries with values rounded to `dtype`;
 * unchanged parts are shared. */
fan_status fan_sparse_cast(const fan_sparse *s, fan_dtype dtype, fan_sparse **out, fan_error *err);
#endif

#endif
