/* extents: extents of arrays; sorted lists of them, and the questions these answer; runs of memory
 * without gaps; and the effort that an exact answer may take. */
#include "array/extents.h"

#include "array/convert.h"
#include "base/mem.h"
#include "base/search.h"

#include <stdlib.h>
#include <string.h>

fan_extent fan_extent_of(const fan_array *a)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    uint64_t at = (uint64_t)(uintptr_t)a->data;
    if (lo < hi)
        return (fan_extent){at + (uint64_t)lo, at + (uint64_t)hi - 1};
    return (fan_extent){1, 0};
}

bool fan_array_extents_disjoint(const fan_array *a, const fan_array *b)
{
    return !fan_extents_may_overlap(fan_extent_of(a), fan_extent_of(b));
}

/* ---- lists ---- */

void fan_extents_put(fan_extents *e, const fan_array *a, size_t owner, bool flag)
{
    fan_extent at = fan_extent_of(a);
    if (!fan_extent_empty(at))
        e->all[e->n++] = (fan_extent_entry){.at = at, .array = a, .owner = owner, .flag = flag};
}

static int by_first(const void *a, const void *b)
{
    const fan_extent_entry *x = a;
    const fan_extent_entry *y = b;
    return (x->at.first > y->at.first) - (x->at.first < y->at.first);
}

#define STRANDS 32     /* with more sorted runs than this, sort otherwise */
#define QSORT_BELOW 48 /* below this many, qsort is faster */

/* Lists of many slots consist of a few interleaved sorted runs: the first term of each slot, the
 * second, .. So each entry is appended to the strand that ends nearest below it, and strands are
 * merged pairwise. */
typedef struct extent_link {
    uint64_t first;
    uint32_t entry, next; /* next: the following link of the strand, plus one; 0: none */
} extent_link;

/* extents_merge: merges two strands; returns the first link, plus one. */
static uint32_t extents_merge(extent_link *all, uint32_t a, uint32_t b)
{
    uint32_t begin = 0;
    uint32_t *end = &begin;
    while (a && b) {
        uint32_t *less = &a;
        if (all[b - 1].first < all[a - 1].first)
            less = &b;
        *end = *less;
        end = &all[*less - 1].next;
        *less = *end;
    }
    *end = a;
    if (!a)
        *end = b;
    return begin;
}

/* extents_strands: links all entries in order; returns the first link, plus one; 0 if there are too
 * many strands. */
static uint32_t extents_strands(const fan_extents *e, extent_link *all)
{
    uint32_t begin[STRANDS], end[STRANDS]; /* sorted by the end, highest first */
    size_t n = 0;
    for (uint32_t i = 0; i < e->n; i++) {
        size_t k = 0;
        all[i] = (extent_link){.first = e->all[i].at.first, .entry = i};
        while (k < n && all[end[k] - 1].first > all[i].first)
            k++;
        if (k == STRANDS)
            return 0;
        if (k == n)
            begin[n++] = i + 1;
        else
            all[end[k] - 1].next = i + 1;
        end[k] = i + 1;
    }
    while (n > 1) {
        size_t half = n / 2;
        for (size_t k = 0; k < half; k++)
            begin[k] = extents_merge(all, begin[2 * k], begin[2 * k + 1]);
        if (n % 2)
            begin[half] = begin[n - 1];
        n -= half;
    }
    return begin[0];
}

/* extents_sort_strands: returns false if there are too many strands, or no memory. */
static bool extents_sort_strands(fan_extents *e)
{
    if (e->n < QSORT_BELOW || e->n >= UINT32_MAX)
        return false;
    extent_link *all = fan_alloc(e->n * sizeof *all);
    fan_extent_entry *was = fan_alloc(e->n * sizeof *was);
    uint32_t at = 0;
    if (all && was)
        at = extents_strands(e, all);
    bool done = at != 0;
    if (done)
        memcpy(was, e->all, e->n * sizeof *was);
    for (size_t i = 0; at; at = all[at - 1].next)
        e->all[i++] = was[all[at - 1].entry];
    fan_free(all);
    fan_free(was);
    return done;
}

static bool extents_in_order(const fan_extents *e)
{
    for (size_t i = 1; i < e->n; i++) {
        if (e->all[i - 1].at.first > e->all[i].at.first)
            return false;
    }
    return true;
}

void fan_extents_sort(fan_extents *e)
{
    uint64_t highest = 0;
    if (!extents_in_order(e) && !extents_sort_strands(e))
        qsort(e->all, e->n, sizeof *e->all, by_first);
    for (size_t i = 0; i < e->n; i++) {
        highest = fan_umax(highest, e->all[i].at.last);
        e->all[i].highest = highest;
    }
}

const fan_extent_entry *fan_extents_next(const fan_extents *e, fan_extent of, size_t *at)
{
    if (fan_extent_empty(of))
        return NULL;
    if (*at == e->n) {
        *at = fan_search_end(e->all, e->n, sizeof *e->all, offsetof(fan_extent_entry, at.first),
                             of.last);
    }
    while (*at > 0 && e->all[*at - 1].highest >= of.first) {
        const fan_extent_entry *x = &e->all[--*at];
        if (fan_extents_may_overlap(x->at, of))
            return x;
    }
    return NULL;
}

bool fan_extents_any_pair(const fan_extents *e, const fan_extent_entry **one,
                          const fan_extent_entry **two)
{
    for (size_t i = 1; i < e->n; i++) {
        if (e->all[i - 1].highest < e->all[i].at.first)
            continue;
        size_t j = i - 1;
        while (!fan_extents_may_overlap(e->all[j].at, e->all[i].at))
            j--;
        *one = &e->all[j];
        *two = &e->all[i];
        return true;
    }
    return false;
}

/* How far the extents so far reach, and how far those of owners other than the farthest's. */
typedef struct reach {
    fan_extent farthest, other;
    size_t owner;
} reach;

static void reach_add(reach *r, const fan_extent_entry *x)
{
    bool farther = fan_extent_empty(r->farthest) || x->at.last > r->farthest.last;
    if (farther) {
        if (r->owner != x->owner)
            r->other = r->farthest;
        r->farthest = x->at;
        r->owner = x->owner;
        return;
    }
    if (r->owner == x->owner)
        return;
    if (fan_extent_empty(r->other) || x->at.last > r->other.last)
        r->other = x->at;
}

/* The extents so far begin no later, so x overlaps one of another owner only if it overlaps the
 * farthest of another owner. */
static bool reach_overlaps(const reach *r, const fan_extent_entry *x)
{
    if (r->owner == x->owner)
        return fan_extents_may_overlap(r->other, x->at);
    return fan_extents_may_overlap(r->farthest, x->at);
}

bool fan_extents_independent(const fan_extents *e)
{
    const fan_extent none = {1, 0};
    reach all = {none, none, SIZE_MAX};
    reach written = all;
    for (size_t i = 0; i < e->n; i++) {
        const fan_extent_entry *x = &e->all[i];
        const reach *so_far = &written;
        if (x->flag)
            so_far = &all;
        if (reach_overlaps(so_far, x))
            return false;
        reach_add(&all, x);
        if (x->flag)
            reach_add(&written, x);
    }
    return true;
}

/* ---- memory without gaps ---- */

static int by_address(const void *a, const void *b)
{
    const fan_flat *x = a;
    const fan_flat *y = b;
    return (x->data > y->data) - (x->data < y->data);
}

static void flats_sort(fan_flat *all, size_t n)
{
    fan_flat *room = NULL;
    if (n >= QSORT_BELOW && n <= UINT32_MAX)
        room = fan_alloc(n * sizeof *room);
    if (room)
        fan_sort_digits(all, room, n, sizeof *all, offsetof(fan_flat, data));
    else
        qsort(all, n, sizeof *all, by_address);
    fan_free(room);
}

bool fan_flats_disjoint(fan_flat *all, size_t n)
{
    bool sorted = true;
    for (size_t i = 1; i < n; i++)
        sorted = sorted && all[i - 1].data < all[i].data;
    if (!sorted)
        flats_sort(all, n);
    size_t last = 0; /* the last one with a byte */
    for (size_t i = 1; i < n; i++) {
        if (fan_flats_meet(all[last].data, all[last].bytes, all[i].data, all[i].bytes))
            return false;
        if (all[i].bytes)
            last = i;
    }
    return true;
}

const fan_flat *fan_flats_last_met(const fan_flat *all, size_t n, const char *data, uint64_t bytes,
                                   size_t *near)
{
    /* How many begin before `end`? Search from `from` outwards, because queries mostly come in
     * order. */
    const char *end = data + bytes;
    size_t from = *near;
    size_t at = 0;
    size_t hi = n;
    if (from < n && all[from].data < end) {
        at = from + 1;
        for (size_t step = 1; at + step <= n; step *= 2) {
            if (all[at + step - 1].data >= end) {
                hi = at + step - 1;
                break;
            }
            at += step;
        }
    } else {
        hi = from;
        for (size_t step = 1; step <= hi; step *= 2) {
            if (all[hi - step].data < end) {
                at = hi - step + 1;
                break;
            }
            hi -= step;
        }
    }
    while (at < hi) {
        size_t mid = at + (hi - at) / 2;
        if (all[mid].data < end)
            at = mid + 1;
        else
            hi = mid;
    }
    *near = at;
    while (at && !all[at - 1].bytes)
        at--;
    if (at == 0)
        return NULL;
    const fan_flat *last = &all[at - 1];
    if (fan_flats_meet(last->data, last->bytes, data, bytes))
        return last;
    return NULL;
}

#define WORK 100000000 /* for the default budget: about 50 ms */

#ifdef FAN_TEST
const char *fan_verdict_kind(fan_verdict v)
{
    static const char *const kinds[] = {
#define X(NAME, kind, words) kind,
        FAN_VERDICT_LIST(X)
#undef X
    };
    return kinds[v];
}
#endif

const char *fan_verdict_words(fan_verdict v)
{
    static const char *const words[] = {
#define X(NAME, kind, words) words,
        FAN_VERDICT_LIST(X)
#undef X
    };
    return words[v];
}

fan_effort fan_effort_of(uint64_t budget)
{
    int64_t times = fan_max((int64_t)(budget / FAN_OVERLAP_BUDGET), 1);
    int64_t work;
    if (budget == UINT64_MAX || __builtin_mul_overflow(times, (int64_t)WORK, &work))
        work = INT64_MAX;
    return (fan_effort){budget, work};
}
