/* sparse_grid: the index space of the entries of a sparse sum, and the key of an entry's index (sparse_merge.c). For
 * array/sparse alone. */
#ifndef FAN_ARRAY_SPARSE_GRID_H
#define FAN_ARRAY_SPARSE_GRID_H

#include "array/sparse.h"

/* The index space of a sum's entries. */
typedef struct fan_grid {
    fan_format format;
    int axes;
    int64_t extent[FAN_MAX_NDIM];
    int64_t cells; /* numbers in an entry */
    int columns;   /* of a key; column c is the linear index over axes first[c] .. first[c + 1] - 1 */
    int first[FAN_MAX_NDIM + 1];
} fan_grid;

/* fan__grid_of: computes the grid of a sum: that of the operands if it is the same for all; else COO over as many axes
 * as any of them indexes. */
void fan__grid_of(fan_grid *g, const fan_sparse_operand *in, size_t n);
/* fan__grid_most_key: returns the largest key of column c. */
int64_t fan__grid_most_key(const fan_grid *g, int c);
/* fan__grid_axis_of_key: computes the index along one axis from keys. */
void fan__grid_axis_of_key(const fan_grid *g, const int64_t *keys, int64_t n, int axis, char *to, int64_t step);
/* fan__grid_index: computes the index along grid axis `axis` of each of s's entries in this grid (one stored entry of s
 * is `times` of them). */
fan_status fan__grid_index(const fan_sparse *s, const fan_grid *g, int axis, int64_t times, int64_t *to,
                           fan_error *err);

#endif
