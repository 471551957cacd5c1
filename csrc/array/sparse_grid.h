/* sparse_grid: what the entries of a sparse sum are indexed by, and the key that an entry's index is (sparse_merge.c).
 * For array/sparse alone. */
#ifndef FAN_ARRAY_SPARSE_GRID_H
#define FAN_ARRAY_SPARSE_GRID_H

#include "array/sparse.h"

/* What the entries of a sum are indexed by. */
typedef struct fan_grid {
    fan_format format;
    int axes;
    int64_t extent[FAN_MAX_NDIM];
    int64_t cells; /* numbers in an entry */
    int columns;   /* of a key; column c is the linear index over axes first[c] .. first[c + 1] - 1 */
    int first[FAN_MAX_NDIM + 1];
} fan_grid;

/* fan__grid_of: the grid of a sum: the operands' own where they are alike; else COO over as many axes as any of them
 * indexes. */
void fan__grid_of(fan_grid *g, const fan_sparse_operand *in, size_t n);
/* fan__grid_most_key: the largest key that column c can have. */
int64_t fan__grid_most_key(const fan_grid *g, int c);
/* fan__grid_axis_of_key: the index along one axis that a key says. */
void fan__grid_axis_of_key(const fan_grid *g, const int64_t *keys, int64_t n, int axis, char *to, int64_t step);
/* fan__grid_index: the index along grid axis `axis` of each entry that s has in this grid (one stored entry of s is
 * `times` of them). */
fan_status fan__grid_index(const fan_sparse *s, const fan_grid *g, int axis, int64_t times, int64_t *to,
                           fan_error *err);

#endif
