#include "array/sparse_parts.h"

#include "base/interrupt.h"

fan_status fan__sparse_outside(const fan_sparse *s, int axis, int64_t e, int64_t index, int64_t extent, fan_error *err)
{
    return fan_fail(err, FAN_ERR_VALUE, "%s entry %lld has the index %lld along axis %d, which has %lld",
                    fan_format_name(s->format), (long long)e, (long long)index, axis, (long long)extent);
}

/* interrupted_at: asked of each of many entries. */
static bool interrupted_at(int64_t e) { return e % 4096 == 4095 && fan_interrupted(4096); }

fan_status fan__sparse_check_pointers(const fan_sparse *s, fan_error *err)
{
    int64_t last = s->pointers->shape[0] - 1, nnz = fan_sparse_nnz(s), before = 0;
    for (int64_t p = 0; p <= last; p++) {
        int64_t at = pointer(s, p);
        if (at < before || at > nnz || (p == 0 && at != 0) || (p == last && at != nnz))
            return fan_fail(err, FAN_ERR_VALUE, "%s pointer %lld is %lld: expected pointers that rise from 0 to %lld",
                            fan_format_name(s->format), (long long)p, (long long)at, (long long)nnz);
        before = at;
        if (interrupted_at(p))
            break;
    }
    return FAN_OK;
}

fan_status fan_sparse_check(const fan_sparse *s, fan_error *err)
{
    int64_t nnz = fan_sparse_nnz(s);
    if (s->format == FAN_FORMAT_COO) {
        for (int axis = 0; axis < sparse_dim(s); axis++) {
            for (int64_t e = 0; e < nnz && !interrupted_at(e); e++) {
                int64_t index = coo_index(s, axis, e);
                if (!within(index, s->shape[axis]))
                    return fan__sparse_outside(s, axis, e, index, s->shape[axis], err);
            }
        }
        return FAN_OK;
    }
    FAN_TRY(fan__sparse_check_pointers(s, err));
    int axis = !fan_format_compressed_axis(s->format);
    int64_t extent = s->shape[axis] / block_extent(s, axis);
    for (int64_t e = 0; e < nnz && !interrupted_at(e); e++) {
        int64_t index = plain_index(s, e);
        if (!within(index, extent))
            return fan__sparse_outside(s, axis, e, index, extent, err);
    }
    return FAN_OK;
}
