/* overlap: do two strided arrays have a byte in common? Exactly, for any shape, sign of stride, item size and address.
 *
 *   region    what is asked about: an address, a shape, strides in bytes, an item size; no memory is read
 *   comb      the set of a region's bytes, with as few axes as possible
 *   verdict   disjoint, overlap (with an element of each that holds one byte), or why nobody could tell
 *
 * "Cannot tell" is a verdict and no error: whoever must be safe takes it for an overlap. It is given where a region
 * cannot be counted in 61 bits, and where the question is of the hard kind (see overlap.c) and its table of sums does
 * not fit the budget, of memory or of time. Nothing here takes exponential time. Addresses are unsigned numbers;
 * regions of different devices must not be compared. All functions may be called from any thread, and allocate only for
 * hard questions (and lists).
 */
#ifndef FAN_ARRAY_OVERLAP_H
#define FAN_ARRAY_OVERLAP_H

#include "array/extents.h"
#include "array/verdict.h"

typedef struct fan_region {
    uint64_t data;          /* address of element [0, 0, ..] */
    int64_t itemsize;       /* bytes; 0: empty whatever the shape is */
    const int64_t *shape;   /* borrowed, as the strides are */
    const int64_t *strides; /* bytes */
    int ndim;               /* 0 .. FAN_MAX_NDIM */
} fan_region;

/* fan_region_of: a host array as a region; valid as long as the array. */
fan_region fan_region_of(const fan_array *a);

/* fan_overlap: the verdict on two regions. On FAN_OVERLAP_YES at_a and at_b (room for the axes of each; both NULL: not
 * asked for) get an element of each that holds one common byte. budget: bytes for the table of a hard question; 0: no
 * table, nothing is allocated and nothing fails. FAN_ERR_NOMEM. */
fan_status fan_overlap(const fan_region *a, const fan_region *b, uint64_t budget, int64_t *at_a, int64_t *at_b,
                       fan_verdict *out, fan_error *err);
/* fan_overlap_itself: the same for two different elements, `one` and `two`, of one region. */
fan_status fan_overlap_itself(const fan_region *a, uint64_t budget, int64_t *one, int64_t *two, fan_verdict *out,
                              fan_error *err);
/* fan_array_disjoint: whether no byte belongs to both of two host arrays, as far as a short search can tell; no
 * allocation. */
bool fan_array_disjoint(const fan_array *a, const fan_array *b);

/* A region's bytes: lo + step0 * x0 + step1 * x1 + .. + t, with 0 <= x < count for each axis and 0 <= t < tooth. */
typedef struct fan_axis {
    int64_t step, count; /* step > 0, count > 1 */
} fan_axis;

typedef struct fan_comb {
    uint64_t lo, last;    /* its first and its last byte */
    int64_t tooth;        /* bytes without a gap */
    const fan_axis *axes; /* the smallest step first, each larger than the tooth */
    int n;
    bool empty;
    bool far; /* cannot be counted: lo and last are those of all memory, and the rest means nothing */
} fan_comb;

static inline fan_extent fan_comb_extent(const fan_comb *c)
{
    return c->empty ? (fan_extent){1, 0} : (fan_extent){c->lo, c->last};
}

/* fan_comb_of: the bytes of a region; `axes` has room for its axes and is borrowed by the comb. */
void fan_comb_of(const fan_region *r, fan_axis *axes, fan_comb *out);
/* fan_comb_overlap: as fan_overlap, without elements; the work is taken from what is left. */
fan_status fan_comb_overlap(const fan_comb *a, const fan_comb *b, fan_effort *left, fan_verdict *out, fan_error *err);

#endif
