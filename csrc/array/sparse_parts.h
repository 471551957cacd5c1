/* sparse_parts: reads the parts of a sparse array: checks, and sums into dense arrays. For the files of array/sparse
 * alone. Index parts are foreign memory, which may change after it was checked: only these functions read them, and
 * every index is checked against its extent at its use. */
#ifndef FAN_ARRAY_SPARSE_PARTS_H
#define FAN_ARRAY_SPARSE_PARTS_H

#include "array/convert.h"
#include "array/sparse.h"

/* block_extent: returns a block's extent along an axis of the dense shape; 1 if there are no blocks. */
static inline int64_t block_extent(const fan_sparse *s, int axis)
{
    return fan_format_is_blocked(s->format) ? s->values->shape[1 + axis] : 1;
}

static inline int sparse_dim(const fan_sparse *s)
{
    return s->format == FAN_FORMAT_COO ? (int)s->indices->shape[0] : 2;
}

/* cells_of: returns the numbers in one stored entry. */
static inline int64_t cells_of(const fan_sparse *s)
{
    int64_t cells = 1;
    for (int i = 1; i < s->values->ndim; i++)
        cells *= s->values->shape[i];
    return cells;
}

/* Volatile: the checked value is the one used, even if another thread writes there meanwhile. */
static inline int64_t load_index(const fan_array *a, const char *p)
{
    return a->dtype == FAN_DT_INT32 ? (int64_t)*(const volatile fan_any_i32 *)p : *(const volatile fan_any_i64 *)p;
}

/* coo_index: returns the index of entry e along `axis`. */
static inline int64_t coo_index(const fan_sparse *s, int axis, int64_t e)
{
    return load_index(s->indices, s->indices->data + axis * s->indices->strides[0] + e * s->indices->strides[1]);
}

static inline int64_t plain_index(const fan_sparse *s, int64_t e)
{
    return load_index(s->indices, s->indices->data + e * s->indices->strides[0]);
}

static inline int64_t sparse_pointer(const fan_sparse *s, int64_t p)
{
    return load_index(s->pointers, s->pointers->data + p * s->pointers->strides[0]);
}

static inline bool sparse_within(int64_t index, int64_t extent) { return index >= 0 && index < extent; }

/* fan__sparse_outside: FAN_ERR_VALUE naming the entry and the axis. */
fan_status fan__sparse_outside(const fan_sparse *s, int axis, int64_t e, int64_t index, int64_t extent, fan_error *err);
/* fan__sparse_check_pointers: checks that they rise from 0 to the number of entries. May be interrupted. */
fan_status fan__sparse_check_pointers(const fan_sparse *s, fan_error *err);

#endif
