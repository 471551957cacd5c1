/* overlap_list: which of many regions overlap (overlap.h). In this order: stretches; the list of
 * regions; arcs; what a sweep keeps, and sorts; pairs; components; runs; the public functions.
 *
 * Many regions: compare few of all the pairs.
 *
 * Sorted by their first bytes, regions form runs: the extents of one run chain, those of two runs
 * do not overlap. Within a run two tests exclude a pair without an exact question: their extents do
 * not overlap, or their arcs do not, on the circle of all remainders modulo some step g. A comb's
 * arc begins at the remainder of its first byte and is as long as its tooth and those axes that are
 * no multiples of g. Columns of a matrix have extents that all overlap, and arcs modulo the row
 * that never do; for slices of one row it is the opposite. Both tests are the same sweep over
 * sorted stretches, and the number of overlapping pairs can be counted beforehand in the time of a
 * sort. So each run counts its extents and its arcs modulo its most frequent steps, and sweeps the
 * smallest; each pair found there takes the other test as well (two comparisons), and then the
 * exact one.
 *
 * A few arrays may connect a run that falls apart without them: a flat buffer, and views of the
 * matrices in it. If so, and the rest falls into runs of at most half as many, those few are
 * compared with all, and the rest is swept separately.
 *
 * Components do not need all pairs, only enough of them. Open stretches are kept in lists, one per
 * component; a new one is compared with the members of a list, newest first, until one shares a
 * byte with it. Then the lists are merged. So a thousand views of the same memory cost a thousand
 * questions. A member whose bytes all belong to another member leaves its list: everything that
 * overlaps it overlaps that one too. So a region that shares nothing with a thousand repeated rows
 * is compared with one of them, not with each.
 *
 * The number of questions for components is limited (QUESTIONS), and so is their time: further ones
 * are "unknown", count as overlaps, and join the component beside them. Pairs have no such limit,
 * because each unknown pair would have to be listed; both sweeps end on Ctrl-C. */
#include "array/overlap.h"

#include "base/interrupt.h"
#include "base/mem.h"
#include "base/search.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* stretch: intervals of numbers (extents and arcs), sorted, and the number of overlapping pairs;
 * for array/overlap_list. */
#define FAN_NO_STRETCH UINT32_MAX

/* From one number to another, both included: an extent, or an arc (one that passes the end of the
 * circle is two). */
typedef struct fan_stretch {
    uint64_t from, to;
    uint32_t index, next; /* next: in a list of open ones */
} fan_stretch;

static fan_stretch stretch_of(uint64_t from, uint64_t to, uint32_t index)
{
    return (fan_stretch){from, to, index, FAN_NO_STRETCH};
}

/* stretch_run_end: returns the end of the ascending run that begins at `at`. */
static size_t stretch_run_end(const fan_stretch *s, size_t n, size_t at)
{
    do
        at++;
    while (at < n && s[at - 1].from <= s[at].from);
    if (at < n)
        return at;
    return n;
}

#define DISTRIBUTE 4096 /* stretches, and one run in 16, from which on digits are faster */

/* stretch_meetings: returns how many pairs of sorted stretches overlap. Those that overlap
 * s[i] follow it, so the search for their end starts there. */
static uint64_t stretch_meetings(const fan_stretch *s, size_t n)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        size_t low = i + 1;
        size_t high = low;
        size_t step = 1;
        while (high < n && s[high].from <= s[i].to) {
            low = high + 1;
            high += step;
            step *= 2;
        }
        high = fan_umin(high, n);
        size_t left = high - low;
        low += fan_search_end(s + low, left, sizeof *s, offsetof(fan_stretch, from), s[i].to);
        count += low - i - 1;
    }
    return count;
}

#define GRIDS 4   /* steps that are tried as the modulus */
#define BRIDGES 6 /* members of a run that may be set aside */

/* Questions of one call for components with the default budget: about 50 ms, and 3 us for each
 * region. */
#define QUESTIONS 4000000
#define QUESTIONS_EACH 256
#define ATTEMPT 32 /* .. of them, for each stretch of one try of a sweep */
/* a first try may be ahead of that by a sixteenth of all stretches, a second one by all */
#define EARLY 16
/* members of a list that are checked for covering a newcomer, or being covered by it */
#define COVER_LOOKS 16
#define QUESTION_ELEMENTS 64 /* elements' time that one question takes, for fan_interrupted */

struct fan_overlaps {
    size_t n;
    fan_region *regions;
    fan_comb *combs;
    int64_t *dims;  /* shapes and strides of all regions */
    fan_axis *axes; /* of all combs */
};

static fan_status overlaps_no_memory(size_t n, fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu arrays to compare", n);
}

fan_status fan_overlaps_new(const fan_region *regions, size_t n, fan_overlaps **out, fan_error *err)
{
    size_t ndim = 0;
    *out = NULL;
    if (n > FAN_LIST_MOST)
        return fan_fail(err, FAN_ERR_VALUE, "%zu arrays are more than can be compared at once", n);
    for (size_t i = 0; i < n; i++)
        ndim += (size_t)regions[i].ndim;
    fan_overlaps *overlaps = fan_calloc(sizeof *overlaps);
    if (!overlaps)
        return overlaps_no_memory(n, err);
    overlaps->regions = fan_alloc(n * sizeof *overlaps->regions);
    overlaps->combs = fan_alloc(n * sizeof *overlaps->combs);
    overlaps->dims = fan_alloc(2 * ndim * sizeof *overlaps->dims);
    overlaps->axes = fan_alloc(ndim * sizeof *overlaps->axes);
    bool listed = overlaps->regions && overlaps->combs;
    if (!listed || !overlaps->dims || !overlaps->axes) {
        fan_overlaps_free(overlaps);
        return overlaps_no_memory(n, err);
    }
    int64_t *dims = overlaps->dims;
    fan_axis *axes = overlaps->axes;
    for (size_t i = 0; i < n; i++) {
        const fan_region *r = &regions[i];
        size_t some = (size_t)r->ndim;
        if (some) {
            memcpy(dims, r->shape, some * sizeof *dims);
            memcpy(dims + some, r->strides, some * sizeof *dims);
        }
        overlaps->regions[i] = (fan_region){r->data, r->itemsize, dims, dims + some, r->ndim};
        fan_comb_of(&overlaps->regions[i], axes, &overlaps->combs[i]);
        dims += 2 * some;
        axes += some;
    }
    overlaps->n = n;
    *out = overlaps;
    return FAN_OK;
}

void fan_overlaps_free(fan_overlaps *overlaps)
{
    if (!overlaps)
        return;
    fan_free(overlaps->regions);
    fan_free(overlaps->combs);
    fan_free(overlaps->dims);
    fan_free(overlaps->axes);
    fan_free(overlaps);
}

size_t fan_overlaps_count(const fan_overlaps *overlaps)
{
    return overlaps->n;
}

const fan_region *fan_overlaps_region(const fan_overlaps *overlaps, size_t i)
{
    return &overlaps->regions[i];
}

bool fan_overlaps_extent(const fan_overlaps *overlaps, size_t i, uint64_t *lo, uint64_t *last)
{
    *lo = overlaps->combs[i].lo;
    *last = overlaps->combs[i].last;
    return !overlaps->combs[i].empty;
}

bool fan_overlaps_are_easy(const fan_overlaps *overlaps)
{
    /* With one step the equation of two combs, divided by it, has the steps 1 alone: it is whole
     * (step 4). */
    int64_t step = 0;
    for (size_t i = 0; i < overlaps->n; i++) {
        const fan_comb *c = &overlaps->combs[i];
        if (c->empty)
            continue;
        if (c->far)
            return false;
        for (int k = 0; k < c->n; k++) {
            if (step && c->axes[k].step != step)
                return false;
            step = c->axes[k].step;
        }
    }
    return true;
}

/* ---- arcs ---- */

/* overlaps_arcs: computes the arcs of the combs in `run` modulo g, unsorted. Returns how many, at
 * most 2n. */
static size_t overlaps_arcs(const fan_overlaps *overlaps, const fan_stretch *run, size_t n,
                            int64_t g, fan_stretch *out)
{
    size_t m = 0;
    uint64_t circle = (uint64_t)g;
    for (size_t i = 0; i < n; i++) {
        const fan_comb *c = &overlaps->combs[run[i].index];
        uint64_t from = c->lo % circle;
        uint64_t more = (uint64_t)c->tooth - 1;
        for (int k = 0; k < c->n && !c->far; k++) {
            if (c->axes[k].step % g != 0)
                more += (uint64_t)c->axes[k].step * (uint64_t)(c->axes[k].count - 1);
        }
        if (c->far || more >= circle - 1) {
            out[m++] = stretch_of(0, circle - 1, run[i].index);
        } else if (from + more < circle) {
            out[m++] = stretch_of(from, from + more, run[i].index);
        } else {
            out[m++] = stretch_of(from, circle - 1, run[i].index);
            out[m++] = stretch_of(0, from + more - circle, run[i].index);
        }
    }
    return m;
}

/* A step and its count. */
typedef struct tally {
    int64_t step;
    size_t count;
} tally;

/* count_step: counts a step among the most frequent (Misra-Gries: a newcomer without a place lowers
 * all counts). */
static void count_step(tally *t, int64_t step)
{
    tally *place = NULL;
    for (int i = 0; i < GRIDS; i++) {
        if (t[i].count && t[i].step == step) {
            t[i].count++;
            return;
        }
        if (!t[i].count && !place)
            place = &t[i];
    }
    if (place) {
        *place = (tally){step, 1};
        return;
    }
    for (int i = 0; i < GRIDS; i++)
        t[i].count--;
}

/* Open stretches of one component. */
typedef struct list {
    uint32_t head, tail; /* FAN_NO_STRETCH: none */
} list;

/* The state of a sweep. */
typedef struct work {
    const fan_overlaps *l;
    fan_error *err;
    fan_effort left;   /* of the whole call */
    int64_t questions; /* for components: questions left */
    bool extents_only;
    bool exact; /* components: no regions were joined by an unknown verdict */
    /* all nonempty regions, by first bytes; room for 2n, as in the next three (made on first
     * use) */
    fan_stretch *run;
    fan_stretch *arc, *best; /* arcs modulo the step being tried, and modulo the best so far */
    fan_stretch *scratch;    /* for sorting */
    list *lists;             /* 2n: for components; for pairs the heads are the open stretches */
    uint32_t *parent;        /* components: towards the root; NULL: pairs are wanted */
    fan_pair *pairs;
    size_t npairs, cap;
} work;

/* overlaps_room: allocates on first use. */
static fan_status overlaps_room(const work *w, fan_stretch **s)
{
    if (!*s)
        *s = fan_alloc(2 * w->l->n * sizeof **s);
    if (*s)
        return FAN_OK;
    return overlaps_no_memory(w->l->n, w->err);
}

/* sort_by_runs: merges the ascending runs, of which there are often few. */
static void sort_by_runs(fan_stretch *s, fan_stretch *scratch, size_t n)
{
    while (stretch_run_end(s, n, 0) < n) {
        size_t end;
        for (size_t at = 0; at < n; at = end) {
            size_t mid = stretch_run_end(s, n, at);
            size_t a = at;
            size_t b = mid;
            end = n;
            if (mid < n)
                end = stretch_run_end(s, n, mid);
            for (size_t to = at; to < end; to++) {
                bool first = b == end || (a < mid && s[a].from <= s[b].from);
                if (first)
                    scratch[to] = s[a++];
                else
                    scratch[to] = s[b++];
            }
        }
        memcpy(s, scratch, n * sizeof *s);
    }
}

static fan_status overlaps_sort(work *w, fan_stretch *s, size_t n)
{
    if (stretch_run_end(s, n, 0) >= n)
        return FAN_OK;
    FAN_TRY(overlaps_room(w, &w->scratch));
    size_t runs = 0;
    for (size_t at = 0; at < n && runs <= n / 16; runs++)
        at = stretch_run_end(s, n, at);
    if (n >= DISTRIBUTE && runs > n / 16)
        fan_sort_digits(s, w->scratch, n, sizeof *s, offsetof(fan_stretch, from));
    else
        sort_by_runs(s, w->scratch, n);
    return FAN_OK;
}

/* questions_of: returns how many a budget allows for components; UINT64_MAX: any number. */
static int64_t questions_of(uint64_t budget, size_t n)
{
    int64_t times = (int64_t)(budget / FAN_OVERLAP_BUDGET);
    int64_t each = QUESTIONS + QUESTIONS_EACH * (int64_t)n;
    int64_t most;
    if (times == 0)
        times = 1;
    if (budget == UINT64_MAX || __builtin_mul_overflow(times, each, &most))
        return INT64_MAX;
    return most;
}

/* overlaps_verdict: decides on two regions whose stretches overlap. FAN_ERR_EXTERN if the work was
 * interrupted. */
static fan_status overlaps_verdict(work *w, uint32_t a, uint32_t b, fan_verdict *out)
{
    const fan_comb *one = &w->l->combs[a];
    const fan_comb *two = &w->l->combs[b];
    *out = FAN_OVERLAP_DISJOINT;
    if (fan_interrupted(QUESTION_ELEMENTS))
        return FAN_ERR_EXTERN; /* the interrupted scope holds the error */
    if (w->parent && w->questions-- <= 0) {
        *out = FAN_OVERLAP_HARD;
        return FAN_OK;
    }
    if (!fan_extents_may_overlap(fan_comb_extent(one), fan_comb_extent(two)))
        return FAN_OK;
    *out = FAN_OVERLAP_YES;
    if (w->extents_only)
        return FAN_OK;
    return fan_comb_overlap(one, two, &w->left, out, w->err);
}

/* ---- pairs ---- */

static fan_status overlaps_note(work *w, uint32_t a, uint32_t b)
{
    fan_verdict v;
    if (a == b)
        return FAN_OK;
    FAN_TRY(overlaps_verdict(w, a, b, &v));
    if (v == FAN_OVERLAP_DISJOINT)
        return FAN_OK;
    if (fan_grow((void **)&w->pairs, &w->cap, w->npairs + 1, sizeof *w->pairs) < 0)
        return fan_fail(w->err, FAN_ERR_NOMEM, "out of memory for %zu pairs", w->npairs + 1);
    w->pairs[w->npairs++] = (fan_pair){(uint32_t)fan_min(a, b), (uint32_t)fan_max(a, b), v};
    return FAN_OK;
}

static fan_status sweep_pairs(work *w, const fan_stretch *s, size_t n)
{
    size_t open = 0;
    for (uint32_t i = 0; i < n; i++) {
        size_t kept = 0;
        for (size_t k = 0; k < open; k++) {
            uint32_t j = w->lists[k].head;
            if (s[j].to < s[i].from)
                continue;
            w->lists[kept++].head = j;
            FAN_TRY(overlaps_note(w, s[j].index, s[i].index));
        }
        w->lists[kept++].head = i;
        open = kept;
    }
    return FAN_OK;
}

static int by_members(const void *a, const void *b)
{
    const fan_pair *p = a;
    const fan_pair *q = b;
    if (p->one == q->one)
        return (p->two > q->two) - (p->two < q->two);
    return (p->one > q->one) - (p->one < q->one);
}

/* in_order: sorts the pairs and drops duplicates: two arcs that both pass the end of the circle
 * meet twice. */
static void in_order(work *w)
{
    size_t kept = 0;
    if (w->npairs)
        qsort(w->pairs, w->npairs, sizeof *w->pairs, by_members);
    for (size_t i = 0; i < w->npairs; i++) {
        if (kept == 0 || by_members(&w->pairs[kept - 1], &w->pairs[i]) != 0)
            w->pairs[kept++] = w->pairs[i];
    }
    w->npairs = kept;
}

/* ---- components ---- */

static uint32_t root_of(uint32_t *parent, uint32_t i)
{
    while (parent[i] != i) {
        parent[i] = parent[parent[i]];
        i = parent[i];
    }
    return i;
}

/* overlaps_join: makes two regions one component if they share a byte, or may share one;
 * FAN_OVERLAP_YES, too, if they are one already. The smaller number is the root, so a root is its
 * component's first member. */
static fan_status overlaps_join(work *w, uint32_t a, uint32_t b, fan_verdict *out)
{
    uint32_t one = root_of(w->parent, a);
    uint32_t two = root_of(w->parent, b);
    *out = FAN_OVERLAP_YES;
    if (one == two)
        return FAN_OK;
    FAN_TRY(overlaps_verdict(w, a, b, out));
    if (*out == FAN_OVERLAP_DISJOINT)
        return FAN_OK;
    w->exact &= *out == FAN_OVERLAP_YES;
    w->parent[fan_max(one, two)] = (uint32_t)fan_min(one, two);
    return FAN_OK;
}

/* overlaps_leave: removes member `at`, which follows `before` (FAN_NO_STRETCH: it is the first),
 * from a list. */
static void overlaps_leave(fan_stretch *s, list *open, uint32_t before, uint32_t at)
{
    if (before == FAN_NO_STRETCH)
        open->head = s[at].next;
    else
        s[before].next = s[at].next;
    if (open->tail == at)
        open->tail = before;
}

/* comb_within: returns true only if each byte of `a` belongs to `b`; false also if more than a
 * comparison per axis is needed. The steps of a comb ascend. */
static bool comb_within(const fan_comb *a, const fan_comb *b)
{
    if (a->far || b->far)
        return false;
    if (a->lo < b->lo || a->last > b->last)
        return false;
    int64_t offset = (int64_t)(a->lo - b->lo);
    int i = a->n - 1;
    for (int k = b->n - 1; k >= 0; k--) {
        int64_t step = b->axes[k].step;
        bool same = i >= 0 && a->axes[i].step == step;
        int64_t room = b->axes[k].count - 1;
        if (same)
            room = b->axes[k].count - a->axes[i].count;
        if (room < 0)
            return false;
        offset -= fan_min(offset / step, room) * step;
        i -= same;
    }
    return i < 0 && offset + a->tooth <= b->tooth;
}

/* overlaps_covers: returns whether every region that shares bytes with stretch `b`'s shares bytes
 * with `a`'s and overlaps stretch `a` as long as it overlaps `b`. */
static bool overlaps_covers(const work *w, const fan_stretch *a, const fan_stretch *b)
{
    bool yes = comb_within(&w->l->combs[b->index], &w->l->combs[a->index]);
    /* an arc inside an arc passes the circle's end with it */
    assert(!yes || (a->from <= b->from && b->to <= a->to));
    return yes;
}

/* The relation of a newcomer to an open list. */
typedef enum meeting {
    APART,
    JOINED,
    COVERED
} meeting;

/* overlaps_meet: compares stretch i with an open list. Members that have ended leave the list; once
 * one shares a byte with i, those among the next few that i covers leave, too. COVERED: one of them
 * covers i, which need not be listed. */
static fan_status overlaps_meet(work *w, fan_stretch *s, list *open, uint32_t i, meeting *out)
{
    uint32_t before = FAN_NO_STRETCH;
    uint32_t next;
    int more = COVER_LOOKS;
    *out = APART;
    for (uint32_t at = open->head; at != FAN_NO_STRETCH && more > 0; at = next) {
        fan_verdict v;
        next = s[at].next;
        if (s[at].to < s[i].from) {
            overlaps_leave(s, open, before, at);
            continue;
        }
        FAN_TRY(overlaps_join(w, s[at].index, s[i].index, &v));
        if (v == FAN_OVERLAP_DISJOINT) {
            before = at;
            continue;
        }
        more--;
        *out = JOINED;
        if (overlaps_covers(w, &s[at], &s[i])) {
            *out = COVERED;
            return FAN_OK;
        }
        if (overlaps_covers(w, &s[i], &s[at]))
            overlaps_leave(s, open, before, at);
        else
            before = at;
    }
    return FAN_OK;
}

/* sweep_components: merges the lists that a newcomer joins, with the newcomer at the head unless a
 * member covers it. *done: false if ATTEMPT questions for each stretch so far, and for `ahead`
 * more, did not suffice; the joins until then are right. SIZE_MAX: no limit. */
static fan_status sweep_components(work *w, fan_stretch *s, size_t n, size_t ahead, bool *done)
{
    size_t lists = 0;
    int64_t before = w->questions;
    *done = false;
    for (uint32_t i = 0; i < n; i++) {
        if (ahead != SIZE_MAX && before - w->questions > ATTEMPT * (int64_t)(i + ahead))
            return FAN_OK;
        list joined = {FAN_NO_STRETCH, FAN_NO_STRETCH};
        size_t kept = 0;
        bool covered = false;
        for (size_t k = 0; k < lists; k++) {
            list open = w->lists[k];
            meeting relation;
            FAN_TRY(overlaps_meet(w, s, &open, i, &relation));
            covered |= relation == COVERED;
            if (open.head == FAN_NO_STRETCH)
                continue;
            if (relation == APART) {
                w->lists[kept++] = open;
                continue;
            }
            if (joined.head == FAN_NO_STRETCH)
                joined.tail = open.tail;
            s[open.tail].next = joined.head;
            joined.head = open.head;
        }
        if (!covered) {
            if (joined.head == FAN_NO_STRETCH)
                joined.tail = i;
            s[i].next = joined.head;
            joined.head = i;
        }
        w->lists[kept++] = joined;
        lists = kept;
    }
    *done = true;
    return FAN_OK;
}

/* ---- runs ---- */

/* overlaps_divides: returns whether a run without the members that span at least `most` bytes falls
 * into runs of half as many. */
static bool overlaps_divides(const fan_stretch *run, size_t n, uint64_t most)
{
    size_t longest = 0;
    size_t length = 0;
    uint64_t last = 0;
    for (size_t i = 0; i < n; i++) {
        if (run[i].to - run[i].from >= most)
            continue;
        if (length == 0 || run[i].from > last) {
            length = 0;
            last = run[i].to;
        }
        length++;
        last = fan_umax(last, run[i].to);
        longest = fan_umax(longest, length);
    }
    return longest <= n / 2;
}

/* set_aside: moves the few that connect a run to its end; the others stay in order. Returns how
 * many: 0 if that divides nothing. */
static size_t set_aside(fan_stretch *run, size_t n)
{
    fan_stretch aside[BRIDGES];
    size_t count = 0;
    size_t kept = 0;
    size_t moved = 0;
    uint64_t last = 0;
    for (size_t i = 0; i < n; i++)
        last = fan_umax(last, run[i].to);
    uint64_t half = (last - run[0].from) / 2;
    for (size_t i = 0; i < n && count <= BRIDGES; i++)
        count += run[i].to - run[i].from >= half;
    if (count == 0 || count > BRIDGES)
        return 0;
    if (!overlaps_divides(run, n, half))
        return 0;
    for (size_t i = 0; i < n; i++) {
        if (run[i].to - run[i].from >= half)
            aside[moved++] = run[i];
        else
            run[kept++] = run[i];
    }
    memcpy(run + kept, aside, count * sizeof *aside);
    return count;
}

static fan_status sweep_runs(work *w, fan_stretch *s, size_t n);

/* overlaps_sorted_arcs: computes the m arcs of a run modulo g in w->arc. */
static fan_status overlaps_sorted_arcs(work *w, const fan_stretch *run, size_t n, int64_t g,
                                       size_t *m)
{
    FAN_TRY(overlaps_room(w, &w->arc));
    *m = overlaps_arcs(w->l, run, n, g, w->arc);
    return overlaps_sort(w, w->arc, *m);
}

/* sweep_components_by: sweeps the stretches `best`, which overlap least. For components that is no
 * sure measure, because members leave their lists: if it takes many questions, extents and arcs are
 * tried in turn. In the first round a sweep whose questions grow with the square of its stretches
 * ends after few of them. */
static fan_status sweep_components_by(work *w, fan_stretch *best, size_t count, fan_stretch *run,
                                      size_t n, const tally *grids)
{
    bool done = false;
    for (size_t ahead = n / EARLY + 1; !done && ahead < EARLY * n; ahead *= EARLY) {
        FAN_TRY(sweep_components(w, best, count, ahead, &done));
        if (!done && best != run)
            FAN_TRY(sweep_components(w, run, n, ahead, &done));
        for (int i = 0; i < GRIDS && !done; i++) {
            size_t m;
            if (!grids[i].count)
                continue;
            FAN_TRY(overlaps_sorted_arcs(w, run, n, grids[i].step, &m));
            FAN_TRY(sweep_components(w, w->arc, m, ahead, &done));
        }
    }
    if (done)
        return FAN_OK;
    return sweep_components(w, best, count, SIZE_MAX, &done);
}

/* compare_with_all: compares the last `aside` of a run with all. */
static fan_status compare_with_all(work *w, const fan_stretch *run, size_t n, size_t aside)
{
    for (size_t i = n - aside; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            fan_verdict v;
            if (w->parent)
                FAN_TRY(overlaps_join(w, run[j].index, run[i].index, &v));
            else
                FAN_TRY(overlaps_note(w, run[j].index, run[i].index));
        }
    }
    return FAN_OK;
}

/* overlaps_sweep: sweeps one run by the stretches that overlap least. */
static fan_status overlaps_sweep(work *w, fan_stretch *run, size_t n)
{
    size_t aside = 0;
    if (n > 2 * BRIDGES)
        aside = set_aside(run, n);
    if (aside) {
        FAN_TRY(compare_with_all(w, run, n, aside));
        return sweep_runs(w, run, n - aside);
    }

    tally grids[GRIDS] = {{0, 0}};
    fan_stretch *best = run;
    size_t count = n;
    uint64_t least = 0;
    if (!w->extents_only)
        least = stretch_meetings(run, n);
    if (least > 4 * (uint64_t)n) {
        /* Finds the steps that most combs of a run have, as far as a few counters can. */
        for (size_t i = 0; i < n; i++) {
            const fan_comb *c = &w->l->combs[run[i].index];
            for (int k = 0; k < c->n; k++)
                count_step(grids, c->axes[k].step);
        }
    }
    for (int i = 0; i < GRIDS && least > n; i++) {
        size_t m;
        if (!grids[i].count)
            continue;
        FAN_TRY(overlaps_sorted_arcs(w, run, n, grids[i].step, &m));
        uint64_t met = stretch_meetings(w->arc, m);
        if (met >= least)
            continue;
        best = w->arc;
        w->arc = w->best;
        w->best = best;
        least = met;
        count = m;
    }
    if (w->parent)
        return sweep_components_by(w, best, count, run, n, grids);
    return sweep_pairs(w, best, count);
}

static fan_status sweep_runs(work *w, fan_stretch *s, size_t n)
{
    size_t end;
    for (size_t at = 0; at < n; at = end) {
        uint64_t last = s[at].to;
        for (end = at + 1; end < n && s[end].from <= last; end++)
            last = fan_umax(last, s[end].to);
        if (end - at > 1)
            FAN_TRY(overlaps_sweep(w, s + at, end - at));
    }
    return FAN_OK;
}

/* sweep_all: sweeps all regions, with the memory for it. */
static fan_status sweep_all(work *w)
{
    const fan_overlaps *overlaps = w->l;
    fan_status status = FAN_OK;
    size_t n = 0;
    w->lists = fan_alloc(2 * overlaps->n * sizeof *w->lists);
    if (!w->lists) {
        status = overlaps_no_memory(overlaps->n, w->err);
        goto done;
    }
    FAN_GO(overlaps_room(w, &w->run));
    for (size_t i = 0; i < overlaps->n; i++) {
        const fan_comb *c = &overlaps->combs[i];
        if (!c->empty)
            w->run[n++] = stretch_of(c->lo, c->last, (uint32_t)i);
    }
    FAN_GO(overlaps_sort(w, w->run, n));
    FAN_GO(sweep_runs(w, w->run, n));
done:
    fan_free(w->run);
    fan_free(w->arc);
    fan_free(w->best);
    fan_free(w->scratch);
    fan_free(w->lists);
    return status;
}

/* label_all: w->questions and w->extents_only are set. */
static fan_status label_all(work *w, uint32_t *label, size_t *count)
{
    size_t n = w->l->n;
    size_t components = 0;
    for (size_t i = 0; i < n; i++)
        label[i] = (uint32_t)i;
    w->parent = label;
    FAN_TRY(sweep_all(w));
    /* A root is its component's first member, so it is numbered before any other member. */
    for (size_t i = 0; i < n; i++)
        label[i] = root_of(label, (uint32_t)i);
    for (size_t i = 0; i < n; i++) {
        if (label[i] == i)
            label[i] = (uint32_t)components++;
        else
            label[i] = label[label[i]];
    }
    *count = components;
    return FAN_OK;
}

fan_status fan_overlaps_components(const fan_overlaps *overlaps, uint64_t budget, uint32_t *label,
                                   size_t *count, bool *exact, fan_error *err)
{
    work w = {.l = overlaps, .err = err, .left = fan_effort_of(budget), .exact = true};
    w.questions = questions_of(budget, overlaps->n);
    FAN_TRY(label_all(&w, label, count));
    if (exact)
        *exact = w.exact;
    return FAN_OK;
}

fan_status fan_overlaps_extents(const fan_overlaps *overlaps, uint32_t *label, size_t *count,
                                fan_error *err)
{
    work w = {.l = overlaps, .err = err, .questions = INT64_MAX, .extents_only = true};
    return label_all(&w, label, count);
}

fan_status fan_overlaps_pairs(const fan_overlaps *overlaps, uint64_t budget, fan_pair **out,
                              size_t *count, fan_error *err)
{
    work w = {.l = overlaps, .err = err, .left = fan_effort_of(budget)};
    *out = NULL;
    *count = 0;
    fan_status status = sweep_all(&w);
    if (status != FAN_OK) {
        fan_free(w.pairs);
        return status;
    }
    in_order(&w);
    *out = w.pairs;
    *count = w.npairs;
    return FAN_OK;
}
