/* extents: may two arrays share a byte? The first test, at the cost of two comparisons; overlap.h
 * has the exact one.
 *
 * An extent is the address range from an array's first byte to its last: two arrays with disjoint
 * extents share no byte, whatever their strides; two with overlapping extents may. This is the only
 * place that answers the question. A sorted list of extents answers it for many arrays. */
#ifndef FAN_ARRAY_EXTENTS_H
#define FAN_ARRAY_EXTENTS_H

#include "array/array.h"

#include <stdint.h>

typedef struct fan_extent {
    uint64_t first, last; /* addresses of bytes, both included; first > last: no elements */
} fan_extent;

/* fan_extent_of: returns the bytes that an array reaches. */
fan_extent fan_extent_of(const fan_array *a);

/* fan_extent_flat: returns the extent of `bytes` of memory without a gap. */
static inline fan_extent fan_extent_flat(const void *data, uint64_t bytes)
{
    uint64_t at = (uint64_t)(uintptr_t)data;
    return bytes ? (fan_extent){at, at + bytes - 1} : (fan_extent){1, 0};
}

static inline bool fan_extent_empty(fan_extent a)
{
    return a.first > a.last;
}
/* fan_extents_may_overlap: returns whether a byte may belong to both; false if one is empty. */
static inline bool fan_extents_may_overlap(fan_extent a, fan_extent b)
{
    bool both = !fan_extent_empty(a) && !fan_extent_empty(b);
    return both && a.first <= b.last && b.first <= a.last;
}

/* fan_extent_within: returns whether each byte of `a` belongs to `b`. */
static inline bool fan_extent_within(fan_extent a, fan_extent b)
{
    return fan_extent_empty(a) || (b.first <= a.first && a.last <= b.last);
}

/* fan_array_extents_disjoint: returns true only if no byte belongs to both arrays. */
bool fan_array_extents_disjoint(const fan_array *a, const fan_array *b);

/* ---- memory without gaps ---- */

typedef struct fan_flat {
    char *data;
    uint64_t bytes;
    size_t owner; /* meaning defined by the list's maker */
} fan_flat;

/* fan_flats_meet: returns whether two runs of memory share a byte. */
static inline bool fan_flats_meet(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    return fan_extents_may_overlap(fan_extent_flat(a, a_bytes), fan_extent_flat(b, b_bytes));
}
/* fan_flat_within: returns whether a run of memory is empty or lies inside another. */
static inline bool fan_flat_within(const void *a, uint64_t a_bytes, const void *in,
                                   uint64_t in_bytes)
{
    return fan_extent_within(fan_extent_flat(a, a_bytes), fan_extent_flat(in, in_bytes));
}
/* fan_flats_disjoint: returns whether no two of n overlap; sorts them by address. */
bool fan_flats_disjoint(fan_flat *all, size_t n);
/* fan_flats_last_met: returns the last entry of a list that fan_flats_disjoint has sorted that a
 * run of memory overlaps; NULL: none. *near: its approximate index, 0 at first. */
const fan_flat *fan_flats_last_met(const fan_flat *all, size_t n, const char *data, uint64_t bytes,
                                   size_t *near);

/* ---- lists ---- */

typedef struct fan_extent_entry {
    fan_extent at;
    uint64_t highest;       /* once sorted: the last byte of all entries up to this one */
    const fan_array *array; /* borrowed */
    size_t owner;           /* defined by the list's maker: a slot, a job */
    bool flag;              /* .. likewise: it is dense, it is written */
} fan_extent_entry;

typedef struct fan_extents {
    fan_extent_entry *all; /* the maker's memory, with room for all entries */
    size_t n;
} fan_extents;

/* fan_extents_put: adds an array's extent, if it has elements. */
void fan_extents_put(fan_extents *e, const fan_array *a, size_t owner, bool flag);
/* fan_extents_sort: sorts the list; once, after the last put. */
void fan_extents_sort(fan_extents *e);

/* fan_extents_next: returns the next entry of a sorted list, below *at (e->n at first), that
 * overlaps `of`; NULL: none. */
const fan_extent_entry *fan_extents_next(const fan_extents *e, fan_extent of, size_t *at);
/* fan_extents_any_pair: returns whether two entries of a sorted list overlap; *one and *two are
 * such a pair. */
bool fan_extents_any_pair(const fan_extents *e, const fan_extent_entry **one,
                          const fan_extent_entry **two);
/* fan_extents_independent: returns whether no entry of a sorted list with its flag set (written
 * memory) overlaps one of another owner. */
bool fan_extents_independent(const fan_extents *e);

/* verdict: the answers about two arrays' bytes, and the effort that finding one may take. */
/* X(NAME, kind, words): the verdicts, with the reason for an unknown one. */
#define FAN_VERDICT_LIST(X)                                                                        \
    X(DISJOINT, "disjoint", "no byte belongs to both")                                             \
    X(YES, "overlap", "one byte at least belongs to both")                                         \
    X(FAR, "unknown", "the strides reach farther than 61 bits")                                    \
    X(HARD, "unknown",                                                                             \
      "too hard: the search was given up and its table of sums does not fit the budget of memory " \
      "and time")

typedef enum fan_verdict {
#define X(NAME, kind, words) FAN_OVERLAP_##NAME,
    FAN_VERDICT_LIST(X)
#undef X
} fan_verdict;

#ifdef FAN_TEST
const char *fan_verdict_kind(fan_verdict v); /* "disjoint", "overlap", "unknown" */
#endif
const char *fan_verdict_words(fan_verdict v); /* the reason, as a clause */

#define FAN_OVERLAP_BUDGET (UINT64_C(256) << 20)

/* The effort that one question, or all questions of one call, may take: bytes for a table, and
 * work, in words of a table that are united (half a nanosecond each). The work is proportional to
 * the budget: about 50 ms for the default; unlimited for UINT64_MAX. */
typedef struct fan_effort {
    uint64_t bytes;
    int64_t work; /* left */
} fan_effort;

fan_effort fan_effort_of(uint64_t budget);

#endif
