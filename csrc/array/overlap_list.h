/* overlap_list: which of many regions share bytes: the pairs, and their connected components.
 *
 * A list copies the regions. Afterwards it is read-only, from any thread. An unknown verdict counts as an overlap. */
#ifndef FAN_ARRAY_OVERLAP_LIST_H
#define FAN_ARRAY_OVERLAP_LIST_H

#include "array/overlap.h"

#define FAN_LIST_MOST (UINT32_MAX / 4) /* regions */

typedef struct fan_overlaps fan_overlaps;

typedef struct fan_pair {
    uint32_t one, two; /* one < two */
    fan_verdict verdict;
} fan_pair;

/* fan_overlaps_new: makes a list of n regions. FAN_ERR_NOMEM; FAN_ERR_VALUE if there are too many. */
fan_status fan_overlaps_new(const fan_region *regions, size_t n, fan_overlaps **out, fan_error *err);
void fan_overlaps_free(fan_overlaps *l); /* l may be NULL */

size_t fan_overlaps_count(const fan_overlaps *l);
const fan_region *fan_overlaps_region(const fan_overlaps *l, size_t i);
/* fan_overlaps_extent: computes the first and the last byte of region i; false if it is empty. */
bool fan_overlaps_extent(const fan_overlaps *l, size_t i, uint64_t *lo, uint64_t *last);

/* fan_overlaps_components: label[i] becomes the number of region i's component; components are numbered by their first
 * members. *count: how many. *exact (NULL: not wanted): false if an unknown verdict joined two regions. Near-linear for
 * the slices of practice, even with many pairs; the budget limits the questions of one call, and those beyond it are
 * unknown. FAN_ERR_NOMEM; FAN_ERR_EXTERN if a fan_interrupt scope ended it. */
fan_status fan_overlaps_components(const fan_overlaps *l, uint64_t budget, uint32_t *label, size_t *count, bool *exact,
                                   fan_error *err);
/* fan_overlaps_extents: as fan_overlaps_components, for regions whose extents overlap, whether or not their bytes
 * do. */
fan_status fan_overlaps_extents(const fan_overlaps *l, uint32_t *label, size_t *count, fan_error *err);
/* fan_overlaps_pairs: returns all pairs that are not disjoint, in order; the caller frees *out with fan_free.
 * FAN_ERR_NOMEM. */
fan_status fan_overlaps_pairs(const fan_overlaps *l, uint64_t budget, fan_pair **out, size_t *count, fan_error *err);

#endif
