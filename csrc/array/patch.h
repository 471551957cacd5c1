/* patch: a part of a dense array that a basic index, or a diagonal, names: its place alone, without
 * elements.
 *
 * Axis k of the whole begins at start[k] and goes on by step[k] along axis from[k] of the patch; or
 * it stays at start[k], where from[k] is -1. Two axes of the whole that go along one axis of the
 * patch make a diagonal. An axis of the patch that no axis of the whole goes along has one element
 * (None).
 *
 *   x[3, ::-2] of (5, 7)         start 3 6   step 0 -2   from -1 0
 *   the diagonal of (5, 5)       start 0 0   step 1 1    from 0 0 */
#ifndef FAN_ARRAY_PATCH_H
#define FAN_ARRAY_PATCH_H

#include "array/array.h"

typedef struct fan_patch {
    atomic_size_t refs;
    int ndim;       /* of the whole */
    int values;     /* of the patch */
    int64_t *shape; /* .. of the whole; then start, step, and the shape of the patch */
    int64_t *start, *step;
    int64_t *extent; /* the shape of the patch */
    int8_t *from;
    int64_t whole; /* elements of the whole */
    int64_t size;  /* .. and of the patch */
} fan_patch;

/* fan_patch_new: checks that the patch lies in the whole, and that no element occurs in it twice;
 * FAN_ERR_VALUE otherwise. */
fan_status fan_patch_new(int ndim, const int64_t *shape, const int64_t *start, const int64_t *step,
                         const int8_t *from, int values, const int64_t *extent, fan_patch **out,
                         fan_error *err);
fan_patch *fan_patch_hold(fan_patch *p);
void fan_patch_drop(fan_patch *p); /* p may be NULL */
/* fan_patch_view: makes the view of the patch in `whole`, which has the shape of the whole. */
fan_status fan_patch_view(const fan_patch *p, const fan_array *whole, fan_array **out,
                          fan_error *err);
/* fan_patch_order: orders patches of one whole: 0: they are the same, element by element, in the
 * same places of the patch. */
int fan_patch_order(const fan_patch *a, const fan_patch *b);
/* fan_patches_disjoint: whether n patches of one whole are known to have no element in common; some
 * that have none are not known. Sorts them. */
bool fan_patches_disjoint(const fan_patch **patches, size_t n);

#endif
