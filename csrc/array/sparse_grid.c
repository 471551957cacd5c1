#include "array/sparse_grid.h"

#include "array/convert.h"
#include "array/sparse_parts.h"

static bool same_blocks(const fan_sparse *a, const fan_sparse *b)
{
    return !fan_format_is_blocked(a->format) ||
           (block_extent(a, 0) == block_extent(b, 0) && block_extent(a, 1) == block_extent(b, 1));
}

void fan__grid_of(fan_grid *g, const fan_sparse_operand *in, size_t n)
{
    const fan_sparse *s = in[0].sparse;
    bool alike = true;
    int axes = 0;
    for (size_t k = 0; k < n; k++) {
        int dim = sparse_dim(in[k].sparse);
        alike &= in[k].sparse->format == s->format && same_blocks(in[k].sparse, s);
        axes = dim > axes ? dim : axes;
    }
    g->format = alike ? s->format : FAN_FORMAT_COO;
    g->axes = axes;
    g->cells = 1;
    if (g->format == FAN_FORMAT_COO) {
        for (int i = 0; i < s->ndim; i++) {
            if (i < axes)
                g->extent[i] = s->shape[i];
            else
                g->cells *= s->shape[i];
        }
    } else {
        int axis = fan_format_compressed_axis(g->format);
        g->extent[0] = s->shape[axis] / block_extent(s, axis);
        g->extent[1] = s->shape[!axis] / block_extent(s, !axis);
        g->cells = cells_of(s);
    }
    g->columns = 0;
    int64_t product = 1;
    g->first[0] = 0;
    for (int i = 0; i < g->axes; i++) {
        if (__builtin_mul_overflow(product, g->extent[i] ? g->extent[i] : 1, &product)) {
            g->first[++g->columns] = i;
            product = g->extent[i];
        }
    }
    g->first[++g->columns] = g->axes;
}

int64_t fan__grid_most_key(const fan_grid *g, int c)
{
    int64_t product = 1;
    for (int i = g->first[c]; i < g->first[c + 1]; i++)
        product *= g->extent[i] ? g->extent[i] : 1;
    return product - 1;
}

void fan__grid_axis_of_key(const fan_grid *g, const int64_t *keys, int64_t n, int axis, char *to, int64_t step)
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

fan_status fan__grid_index(const fan_sparse *s, const fan_grid *g, int axis, int64_t times, int64_t *to, fan_error *err)
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
