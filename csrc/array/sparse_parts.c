#include "array/sparse_parts.h"

#include "base/interrupt.h"

fan_status fan__sparse_outside(const fan_sparse *s, int axis, int64_t e, int64_t index, int64_t extent, fan_error *err)
{
    return fan_fail(err, FAN_ERR_VALUE, "%s entry %lld has the index %lld along axis %d, which has %lld",
                    fan_format_name(s->format), (long long)e, (long long)index, axis, (long long)extent);
}

#define BLOCK 4096 /* entries between two polls for interrupts */

static int64_t block_end(int64_t from, int64_t n) { return n - from < BLOCK ? n : from + BLOCK; }

fan_status fan__sparse_check_pointers(const fan_sparse *s, fan_error *err)
{
    int64_t n = s->pointers->shape[0], nnz = fan_sparse_nnz(s), before = 0;
    for (int64_t from = 0; from < n && !(from && fan_interrupted(BLOCK)); from += BLOCK) {
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
    for (int64_t from = 0; from < nnz && !(from && fan_interrupted(BLOCK)); from += BLOCK) {
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
