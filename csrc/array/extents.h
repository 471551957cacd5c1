/* extents: whose bytes may meet? The first question, which costs two comparisons; overlap.h has the exact one.
 *
 * An extent is the run of addresses from an array's first byte to its last: two arrays whose extents do not meet share
 * no byte, whatever their strides; two whose extents meet may. Everybody who asks that asks here. A list of extents
 * answers for many arrays with a sort and one look at each.
 */
#ifndef FAN_ARRAY_EXTENTS_H
#define FAN_ARRAY_EXTENTS_H

#include "array/array.h"

typedef struct fan_extent {
    uint64_t first, last; /* addresses of bytes, both included; first > last: no elements */
} fan_extent;

/* fan_extent_of: the bytes that an array reaches. */
fan_extent fan_extent_of(const fan_array *a);

/* fan_extent_flat: of `bytes` of memory without a gap. */
static inline fan_extent fan_extent_flat(const void *data, uint64_t bytes)
{
    uint64_t at = (uint64_t)(uintptr_t)data;
    return bytes ? (fan_extent){at, at + bytes - 1} : (fan_extent){1, 0};
}

static inline bool fan_extent_empty(fan_extent a) { return a.first > a.last; }
/* fan_extents_may_overlap: whether a byte may belong to both; never where one of them is empty. */
static inline bool fan_extents_may_overlap(fan_extent a, fan_extent b)
{
    return a.first <= b.last && b.first <= a.last && !fan_extent_empty(a) && !fan_extent_empty(b);
}

/* fan_extent_within: whether each byte of `a` belongs to `b`. */
static inline bool fan_extent_within(fan_extent a, fan_extent b)
{
    return fan_extent_empty(a) || (b.first <= a.first && a.last <= b.last);
}

/* fan_array_extents_disjoint: true only if no byte belongs to both arrays: their extents do not meet. */
bool fan_array_extents_disjoint(const fan_array *a, const fan_array *b);

/* ---- memory without gaps ---- */

typedef struct fan_flat {
    char *data;
    uint64_t bytes;
    size_t owner; /* the list's maker says what that is */
} fan_flat;

/* fan_flats_meet: whether a byte belongs to both of two runs of memory. */
static inline bool fan_flats_meet(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    return fan_extents_may_overlap(fan_extent_flat(a, a_bytes), fan_extent_flat(b, b_bytes));
}
/* fan_flat_within: whether all of a run of memory lies in another one, or it is empty. */
static inline bool fan_flat_within(const void *a, uint64_t a_bytes, const void *in, uint64_t in_bytes)
{
    fan_extent x = fan_extent_flat(a, a_bytes), y = fan_extent_flat(in, in_bytes);
    return fan_extent_empty(x) || (y.first <= x.first && x.last <= y.last);
}
/* fan_flats_disjoint: whether none of n meets another; sorts them by address. fan_flats_last_met: of a list that is so,
 * the one farthest behind that a run of memory meets; NULL: none. *near: about where it is, 0 at first. */
bool fan_flats_disjoint(fan_flat *all, size_t n);
const fan_flat *fan_flats_last_met(const fan_flat *all, size_t n, const char *data, uint64_t bytes, size_t *near);

/* ---- lists ---- */

typedef struct fan_extent_entry {
    fan_extent at;
    uint64_t highest;       /* once sorted: the last byte of all up to and with this one */
    const fan_array *array; /* borrowed */
    size_t owner;           /* the list's maker says what that is: a slot, a job */
    bool flag;              /* .. and of this: that it is dense, that it is written */
} fan_extent_entry;

typedef struct fan_extents {
    fan_extent_entry *all; /* the maker's memory: room for all that are put */
    size_t n;
} fan_extents;

/* fan_extents_put: an array's extent, if it has elements. fan_extents_sort: once all are put. */
void fan_extents_put(fan_extents *e, const fan_array *a, size_t owner, bool flag);
void fan_extents_sort(fan_extents *e);

/* fan_extents_next: of a sorted list the next entry that meets `of`, below *at (e->n at first); NULL: none is left. */
const fan_extent_entry *fan_extents_next(const fan_extents *e, fan_extent of, size_t *at);
/* fan_extents_any_pair: whether two of a sorted list meet; *one and *two are such. */
bool fan_extents_any_pair(const fan_extents *e, const fan_extent_entry **one, const fan_extent_entry **two);
/* fan_extents_independent: whether in a sorted list no entry with its flag set (what is written) meets one of another
 * owner. */
bool fan_extents_independent(const fan_extents *e);

#endif
