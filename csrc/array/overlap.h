/* overlap: do two strided arrays have a byte in common? Exact for any shape, sign of stride, item
 * size and address.
 *
 *   region    the question's operand: address, shape, strides in bytes, item size; no memory is
 *             read
 *   comb      the set of a region's bytes, with as few axes as possible
 *   verdict   disjoint, overlap (with an element of each that holds one byte), or unknown, with the
 *             reason
 *
 * "Unknown" is a verdict and no error: a caller that must be safe treats it as an overlap. It is
 * given if a region exceeds 61 bits, or if the question is hard (see overlap.c) and its table of
 * sums exceeds the budget of memory or time. No call takes exponential time. Addresses are unsigned
 * numbers; regions of different devices must not be compared. All functions may be called from any
 * thread, and allocate only for hard questions (and lists). */
#ifndef FAN_ARRAY_OVERLAP_H
#define FAN_ARRAY_OVERLAP_H

#include "array/extents.h"

typedef struct fan_region {
    uint64_t data;          /* address of element [0, 0, ..] */
    int64_t itemsize;       /* bytes; 0: empty whatever the shape */
    const int64_t *shape;   /* borrowed, as the strides are */
    const int64_t *strides; /* bytes */
    int ndim;               /* 0 .. FAN_MAX_NDIM */
} fan_region;

/* fan_region_of: returns a host array's region; valid as long as the array. */
fan_region fan_region_of(const fan_array *a);

/* fan_overlap: decides whether two regions overlap. On FAN_OVERLAP_YES at_a and at_b (room for the
 * axes of each; both NULL: not wanted) receive an element of each that holds one common byte.
 * budget: bytes for the table of a hard question; 0: no table, no allocation, no failure.
 * FAN_ERR_NOMEM. */
fan_status fan_overlap(const fan_region *a, const fan_region *b, uint64_t budget, int64_t *at_a,
                       int64_t *at_b, fan_verdict *out, fan_error *err);
/* fan_overlap_itself: as fan_overlap, for two different elements, `one` and `two`, of one
 * region. */
fan_status fan_overlap_itself(const fan_region *a, uint64_t budget, int64_t *one, int64_t *two,
                              fan_verdict *out, fan_error *err);
/* fan_array_disjoint: returns true if two host arrays share no byte, as far as a short search can
 * decide; no allocation. */
bool fan_array_disjoint(const fan_array *a, const fan_array *b);

/* A region's bytes: lo + step0 * x0 + step1 * x1 + .. + t, with 0 <= x < count for each axis and 0
 * <= t < tooth. */
typedef struct fan_axis {
    int64_t step, count; /* step > 0, count > 1 */
} fan_axis;

typedef struct fan_comb {
    uint64_t lo, last;    /* its first and its last byte */
    int64_t tooth;        /* bytes without a gap */
    const fan_axis *axes; /* smallest step first, each larger than the tooth */
    int n;
    bool empty;
    bool far; /* exceeds 61 bits: lo and last span all memory, the rest is meaningless */
} fan_comb;

static inline fan_extent fan_comb_extent(const fan_comb *c)
{
    return c->empty ? (fan_extent){1, 0} : (fan_extent){c->lo, c->last};
}

/* fan_comb_of: computes the bytes of a region; `axes` has room for its axes and is borrowed by the
 * comb. */
void fan_comb_of(const fan_region *r, fan_axis *axes, fan_comb *out);
/* fan_comb_overlap: as fan_overlap, without elements; subtracts its work from `left`. */
fan_status fan_comb_overlap(const fan_comb *a, const fan_comb *b, fan_effort *left,
                            fan_verdict *out, fan_error *err);

/* overlap_list: which of many regions share bytes: the pairs, and their connected components.
 *
 * A list copies the regions. Afterwards it is read-only, from any thread. An unknown verdict counts
 * as an overlap. */

#define FAN_LIST_MOST (UINT32_MAX / 4) /* regions */

typedef struct fan_overlaps fan_overlaps;

typedef struct fan_pair {
    uint32_t one, two; /* one < two */
    fan_verdict verdict;
} fan_pair;

/* fan_overlaps_new: makes a list of n regions. FAN_ERR_NOMEM; FAN_ERR_VALUE if there are too
 * many. */
fan_status fan_overlaps_new(const fan_region *regions, size_t n, fan_overlaps **out,
                            fan_error *err);
void fan_overlaps_free(fan_overlaps *l); /* l may be NULL */

size_t fan_overlaps_count(const fan_overlaps *l);
const fan_region *fan_overlaps_region(const fan_overlaps *l, size_t i);
/* fan_overlaps_extent: computes the first and the last byte of region i; false if it is empty. */
bool fan_overlaps_extent(const fan_overlaps *l, size_t i, uint64_t *lo, uint64_t *last);

/* fan_overlaps_are_easy: returns true if no verdict on two of the regions can be unknown, because
 * one step is that of all their combs' axes; false: it may be. */
bool fan_overlaps_are_easy(const fan_overlaps *l);

/* fan_overlaps_components: label[i] becomes the number of region i's component; components are
 * numbered by their first members. *count: how many. *exact (NULL: not wanted): false if an unknown
 * verdict joined two regions. Near-linear for the slices of practice, even with many pairs; the
 * budget limits the questions of one call, and those beyond it are unknown. FAN_ERR_NOMEM;
 * FAN_ERR_EXTERN if a fan_interrupt scope ended it. */
fan_status fan_overlaps_components(const fan_overlaps *l, uint64_t budget, uint32_t *label,
                                   size_t *count, bool *exact, fan_error *err);
/* fan_overlaps_extents: as fan_overlaps_components, for regions whose extents overlap, whether or
 * not their bytes do. */
fan_status fan_overlaps_extents(const fan_overlaps *l, uint32_t *label, size_t *count,
                                fan_error *err);
/* fan_overlaps_pairs: returns all pairs that are not disjoint, in order; the caller frees *out with
 * fan_free. FAN_ERR_NOMEM. */
fan_status fan_overlaps_pairs(const fan_overlaps *l, uint64_t budget, fan_pair **out, size_t *count,
                              fan_error *err);

#endif
