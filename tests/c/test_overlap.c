/* The verdicts against brute force: every byte of every element is marked, and nothing is read but
 * the marks. Pairs, hard pairs and the ends of what can be counted; then lists and layouts. */
#include "array/overlap.h"

#include "base/rng.h"
#include "base/mem.h"
#include "check.h"
#include "array/layout.h"

#include <stdlib.h>
#include <string.h>

#define SPACE 2048 /* bytes of the world in which brute force works */
#define AT UINT64_C(0x10000)

typedef struct made {
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    fan_region r;
} made;

static uint64_t seed = 1;
static bool is_full; /* the whole size, not the sample */

/* rounds: how many rounds the whole size's `all` are here. */
static int rounds(int all)
{
    return is_full ? all : all / 5;
}

/* below: a number from 0 to n - 1. */
static int64_t below(int64_t n)
{
    return (int64_t)(fan_rng(&seed) % (uint64_t)n);
}

static const fan_region *region(made *m, uint64_t data, int64_t itemsize, int ndim)
{
    m->r = (fan_region){data, itemsize, m->shape, m->strides, ndim};
    return &m->r;
}

/* line: a region of one axis. */
static const fan_region *line(made *m, uint64_t data, int64_t itemsize, int64_t count,
                              int64_t stride)
{
    m->shape[0] = count;
    m->strides[0] = stride;
    return region(m, data, itemsize, 1);
}

/* at: the address of an element. */
static uint64_t at(const fan_region *r, const int64_t *index)
{
    uint64_t a = r->data;
    for (int i = 0; i < r->ndim; i++)
        a += (uint64_t)(index[i] * r->strides[i]);
    return a;
}

static bool one_in(int64_t n)
{
    return below(n) == 0;
}

/* next: counts `index` up to the next element; false at the end. */
static bool next(const fan_region *r, int64_t *index)
{
    for (int i = r->ndim - 1; i >= 0; i--) {
        if (++index[i] < r->shape[i])
            return true;
        index[i] = 0;
    }
    return false;
}

static bool empty(const fan_region *r)
{
    bool none = r->itemsize == 0;
    for (int i = 0; i < r->ndim; i++)
        none |= r->shape[i] == 0;
    return none;
}

/* mark: every byte of every element counts one up; returns whether a byte was counted before. */
static bool mark(const fan_region *r, unsigned char *bytes)
{
    int64_t index[FAN_MAX_NDIM] = {0};
    bool met = false;
    if (empty(r))
        return false;
    do {
        for (int64_t k = 0; k < r->itemsize; k++) {
            uint64_t byte = at(r, index) + (uint64_t)k - AT + SPACE / 2;
            if (byte >= SPACE)
                abort();
            met |= bytes[byte] != 0;
            bytes[byte] = 1;
        }
    } while (next(r, index));
    return met;
}

static bool truly_meet(const fan_region *a, const fan_region *b)
{
    unsigned char one[SPACE] = {0};
    unsigned char two[SPACE] = {0};
    unsigned char met = 0;
    mark(a, one);
    mark(b, two);
    for (int i = 0; i < SPACE; i++)
        met |= one[i] & two[i]; /* no branch: a vector unit takes many bytes at once */
    return met != 0;
}

static bool inside(const fan_region *r, const int64_t *index)
{
    for (int i = 0; i < r->ndim; i++) {
        if (index[i] < 0 || index[i] >= r->shape[i])
            return false;
    }
    return true;
}

/* near_enough: elements of a and b whose addresses differ by `distance` share a byte. */
static bool near_enough(const fan_region *a, const fan_region *b, int64_t distance)
{
    return distance < b->itemsize && -distance < a->itemsize;
}

/* proves: both are elements, and they share a byte. */
static bool proves(const fan_region *a, const int64_t *x, const fan_region *b, const int64_t *y)
{
    if (!inside(a, x) || !inside(b, y))
        return false;
    return near_enough(a, b, (int64_t)(at(a, x) - at(b, y)));
}

/* ---- one pair ---- */

static long seen[4];

/* check_seen: both certain verdicts more than `most` times, no other. */
static void check_seen(long most)
{
    CHECK(seen[FAN_OVERLAP_DISJOINT] > most);
    CHECK(seen[FAN_OVERLAP_YES] > most);
    CHECK(!seen[FAN_OVERLAP_HARD] && !seen[FAN_OVERLAP_FAR]);
}

static fan_verdict verdict_of(bool met)
{
    return met ? FAN_OVERLAP_YES : FAN_OVERLAP_DISJOINT;
}

static fan_verdict ask(const fan_region *a, const fan_region *b, uint64_t budget)
{
    int64_t x[FAN_MAX_NDIM], y[FAN_MAX_NDIM];
    fan_verdict v = FAN_OVERLAP_HARD;
    fan_verdict plain = FAN_OVERLAP_HARD;
    CHECK_OK(fan_overlap(a, b, budget, x, y, &v, NULL));
    CHECK_OK(fan_overlap(b, a, budget, NULL, NULL, &plain, NULL));
    CHECK(v == plain);
    if (v == FAN_OVERLAP_YES)
        CHECK(proves(a, x, b, y));
    seen[v]++;
    return v;
}

static void judge(const fan_region *a, const fan_region *b)
{
    CHECK(ask(a, b, FAN_OVERLAP_BUDGET) == verdict_of(truly_meet(a, b)));
}

static fan_verdict ask_itself(const fan_region *r, uint64_t budget)
{
    int64_t x[FAN_MAX_NDIM], y[FAN_MAX_NDIM];
    fan_verdict v = FAN_OVERLAP_HARD;
    CHECK_OK(fan_overlap_itself(r, budget, x, y, &v, NULL));
    if (v == FAN_OVERLAP_YES) {
        CHECK(proves(r, x, r, y));
        CHECK(memcmp(x, y, (size_t)r->ndim * sizeof *x) != 0);
    }
    return v;
}

static void judge_itself(const fan_region *r)
{
    unsigned char bytes[SPACE] = {0};
    fan_verdict v = ask_itself(r, FAN_OVERLAP_BUDGET);
    seen[v]++;
    CHECK(v == verdict_of(mark(r, bytes)));
}

/* random_region: up to 4 axes; small enough for the world. */
static const fan_region *random_region(made *m, int64_t farthest)
{
    static const int64_t items[] = {0, 1, 1, 2, 3, 4, 8, 16};
    int ndim = (int)below(5);
    for (int i = 0; i < ndim; i++) {
        m->shape[i] = 0;
        if (!one_in(20))
            m->shape[i] = 1 + below(ndim > 2 ? 4 : 6);
        m->strides[i] = below(2 * farthest + 1) - farthest;
    }
    int64_t item = one_in(16) ? 0 : 1 + below(7);
    uint64_t data = AT + (uint64_t)below(64);
    return region(m, data, items[item], ndim);
}

static int64_t random_farthest(void)
{
    return (int64_t[]){6, 20, 60}[below(3)];
}

static void random_pairs_are_what_brute_force_says(void)
{
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < rounds(30000); i++) {
        made a, b;
        int64_t farthest = random_farthest();
        judge(random_region(&a, farthest), random_region(&b, farthest));
    }
    check_seen(rounds(5000));
}

static void random_regions_overlap_themselves_where_brute_force_says_so(void)
{
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < rounds(30000); i++) {
        made a;
        judge_itself(random_region(&a, random_farthest()));
    }
    check_seen(rounds(5000));
}

/* All pairs of one-axis regions with small numbers. */
static void small_pairs_are_what_brute_force_says(void)
{
    memset(seen, 0, sizeof seen);
    for (int64_t code = 0; code < 3 * 3 * 4 * 4 * 7 * 7; code++) {
        int64_t item[2], shape[2], stride[2];
        int64_t rest = code;
        for (int k = 0; k < 2; k++) {
            item[k] = 1 + rest % 3;
            rest /= 3;
        }
        for (int k = 0; k < 2; k++) {
            shape[k] = rest % 4;
            rest /= 4;
        }
        for (int k = 0; k < 2; k++) {
            stride[k] = rest % 7 - 3;
            rest /= 7;
        }
        for (uint64_t shift = 0; shift < 12; shift++) {
            made a, b;
            judge(line(&a, AT + 6, item[0], shape[0], stride[0]),
                  line(&b, AT + shift, item[1], shape[1], stride[1]));
        }
    }
    check_seen(10000);
}

static void swap(int64_t *x)
{
    int64_t first = x[0];
    x[0] = x[1];
    x[1] = first;
}

/* block: m[r0:r1:rs, c0:c1:cs] of a 7 x 9 matrix of 2-byte elements. */
static const fan_region *block(made *m)
{
    int64_t r0 = below(7);
    int64_t c0 = below(9);
    int64_t rs = 1 + below(3);
    int64_t cs = 1 + below(3);
    m->shape[0] = 1 + below((6 - r0) / rs + 1);
    m->shape[1] = 1 + below((8 - c0) / cs + 1);
    m->strides[0] = 18 * rs;
    m->strides[1] = 2 * cs;
    uint64_t data = AT + (uint64_t)(18 * r0 + 2 * c0);
    if (one_in(3)) { /* backwards */
        data += (uint64_t)((m->shape[0] - 1) * m->strides[0]);
        m->strides[0] = -m->strides[0];
    }
    if (one_in(3)) { /* transposed */
        swap(m->shape);
        swap(m->strides);
    }
    return region(m, data, 2, 2);
}

static void blocks_of_a_matrix_are_what_brute_force_says(void)
{
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < rounds(20000); i++) {
        made a, b;
        judge(block(&a), block(&b));
    }
    printf("blocks: %ld disjoint, %ld overlap\n", seen[FAN_OVERLAP_DISJOINT],
           seen[FAN_OVERLAP_YES]);
    check_seen(rounds(3000));
}

/* 0 to 9 terms against a table that is made by adding one step at a time. */
static void equations_of_many_terms_are_solved(void)
{
    static bool reached[1 << 13];
    long yes = 0;
    long no = 0;
    for (int round = 0; round < rounds(4000); round++) {
        made a, b;
        int n = (int)below(10);
        int64_t most = 0;
        memset(reached, 0, sizeof reached);
        reached[0] = true;
        for (int i = 0; i < n; i++) {
            int64_t step = 1 + below(round % 2 ? 40 : 12) * (round % 3 + 1);
            a.strides[i] = step;
            a.shape[i] = 1 + below(5);
            for (int64_t k = 1; k < a.shape[i]; k++) { /* once more each time: from the top */
                most += step;
                for (int64_t s = most; s >= step; s--)
                    reached[s] |= reached[s - step];
            }
        }
        for (int i = 0; i < 20; i++) {
            int64_t target = below(most + 3);
            bool is = reached[target];
            const fan_region *sums = region(&a, AT, 1, n);
            const fan_region *one = region(&b, AT + (uint64_t)target, 1, 0);
            CHECK(ask(sums, one, FAN_OVERLAP_BUDGET) == verdict_of(is));
            yes += is;
            no += !is;
        }
    }
    CHECK(yes > rounds(5000) && no > rounds(5000));
}

/* ---- hard ones ---- */

/* bad_pair: it defeats a search: three large steps against two, and both places in memory. */
static void bad_pair(made *a, made *b)
{
    static const int64_t three[] = {36674, 61119, 85569};
    static const int64_t two[] = {12223, 12224};
    for (int i = 0; i < 3; i++) {
        a->shape[i] = 1049;
        a->strides[i] = three[i];
    }
    for (int i = 0; i < 2; i++) {
        b->shape[i] = 1049;
        b->strides[i] = two[i];
    }
    region(a, AT, 1, 3);
    region(b, AT + 64023025, 1, 2);
}

static void a_known_bad_pair_is_disjoint(void)
{
    made a, b;
    bad_pair(&a, &b);
    CHECK(ask(&a.r, &b.r, FAN_OVERLAP_BUDGET) == FAN_OVERLAP_DISJOINT);
}

static void over_the_budget_nobody_knows(void)
{
    made a, b;
    int64_t live = fan_mem_get().total;
    bad_pair(&a, &b);
    CHECK(ask(&a.r, &b.r, 0) == FAN_OVERLAP_HARD);
    CHECK_INT(fan_mem_get().total, live); /* without a budget nothing is allocated */
    CHECK(ask(&a.r, &b.r, 1000) == FAN_OVERLAP_HARD);
    CHECK_STR(fan_verdict_kind(FAN_OVERLAP_HARD), "unknown");
    CHECK_HAS(fan_verdict_words(FAN_OVERLAP_HARD), "budget");
}

static void without_memory_for_the_table_it_is_an_error(void)
{
    made a, b;
    fan_verdict v;
    fan_error err = {0};
    bad_pair(&a, &b);
    fan_mem_fail_at(0, 1);
    CHECK(fan_overlap(&a.r, &b.r, FAN_OVERLAP_BUDGET, NULL, NULL, &v, &err) == FAN_ERR_NOMEM);
    fan_mem_fail_at(-1, 0);
    CHECK_HAS(err.text, "table");
}

/* large: three axes with steps of the same size; what a search finds is luck. */
static const fan_region *large(made *m, int64_t step)
{
    for (int i = 0; i < 3; i++) {
        m->shape[i] = 4 + below(26);
        m->strides[i] = step + below(step);
    }
    return region(m, AT + (uint64_t)below(step * 60), 1 + below(2), 3);
}

/* sums: the sorted addresses of a region's elements. */
static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* sums: the sorted addresses of a region's elements. */
static size_t sums(const fan_region *r, uint64_t **out)
{
    int64_t index[FAN_MAX_NDIM] = {0};
    size_t n = 0;
    size_t most = 1;
    for (int i = 0; i < r->ndim; i++)
        most *= (size_t)r->shape[i];
    *out = malloc(most * sizeof **out);
    do {
        (*out)[n++] = at(r, index);
    } while (next(r, index));
    qsort(*out, n, sizeof **out, by_value);
    return n;
}

static bool lists_meet(const fan_region *a, const fan_region *b)
{
    uint64_t *one, *two;
    size_t n = sums(a, &one);
    size_t m = sums(b, &two);
    size_t i = 0;
    size_t j = 0;
    bool met = false;
    while (i < n && j < m && !met) {
        int64_t distance = (int64_t)(one[i] - two[j]);
        met = near_enough(a, b, distance);
        if (distance < 0) {
            i++;
        } else {
            j++;
        }
    }
    free(one);
    free(two);
    return met;
}

static void large_steps_are_judged_by_search_and_by_table(void)
{
    long hard = 0;
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < 60; i++) {
        made a, b;
        int64_t step = (int64_t[]){3000, 40000, 300000}[below(3)];
        fan_verdict v;
        large(&a, step);
        large(&b, step);
        CHECK_OK(fan_overlap(&a.r, &b.r, 0, NULL, NULL, &v, NULL));
        hard += v == FAN_OVERLAP_HARD;
        CHECK(ask(&a.r, &b.r, FAN_OVERLAP_BUDGET) == verdict_of(lists_meet(&a.r, &b.r)));
    }
    printf("large steps: %ld hard, %ld disjoint, %ld overlap\n", hard, seen[FAN_OVERLAP_DISJOINT],
           seen[FAN_OVERLAP_YES]);
    CHECK(hard > 5);
    check_seen(5);
}

/* ---- at the ends of what can be counted ---- */

static fan_verdict of_two(uint64_t one, uint64_t two, int64_t itemsize, int64_t count,
                          int64_t stride)
{
    made a, b;
    line(&a, one, itemsize, count, stride);
    line(&b, two, itemsize, count, stride);
    return ask(&a.r, &b.r, FAN_OVERLAP_BUDGET);
}

static void memory_at_the_top_of_the_address_space_is_counted(void)
{
    uint64_t top = UINT64_MAX - 31;
    CHECK(of_two(top, top + 16, 8, 2, 8) == FAN_OVERLAP_DISJOINT);
    CHECK(of_two(top, top + 15, 8, 2, 8) == FAN_OVERLAP_YES);
    CHECK(of_two(top + 24, top + 16, 8, 2, -8) == FAN_OVERLAP_YES);
    CHECK(of_two(0, top, 8, 4, 8) == FAN_OVERLAP_DISJOINT);
    CHECK(of_two(UINT64_C(1) << 63, (UINT64_C(1) << 63) - 16, 8, 2, 8) == FAN_OVERLAP_DISJOINT);
    CHECK(of_two(UINT64_C(1) << 63, (UINT64_C(1) << 63) - 15, 8, 2, 8) == FAN_OVERLAP_YES);
}

static void what_cannot_be_counted_is_unknown(void)
{
    CHECK(of_two(AT, AT, 1, INT64_MAX, INT64_MAX) == FAN_OVERLAP_FAR);
    CHECK(of_two(AT, AT, 1, 2, INT64_MIN) == FAN_OVERLAP_FAR);
    CHECK(of_two(AT, AT, 1, 3, INT64_C(1) << 60) == FAN_OVERLAP_FAR); /* 2^61 bytes */
    CHECK(of_two(AT, AT, 1, 3, (INT64_C(1) << 60) - 1) == FAN_OVERLAP_YES);
    CHECK(of_two(UINT64_MAX - 6, AT, 8, 1, 8) == FAN_OVERLAP_FAR);       /* beyond the end */
    CHECK(of_two(AT, AT, 8, 2, -(INT64_C(1) << 40)) == FAN_OVERLAP_FAR); /* below the start */
    CHECK(of_two(AT, AT, INT64_MAX, 1, 8) == FAN_OVERLAP_FAR);
    CHECK(of_two(AT, AT, 8, 0, INT64_MAX) == FAN_OVERLAP_DISJOINT); /* empty is empty */
    CHECK(of_two(AT, AT, 0, 4, INT64_MIN) == FAN_OVERLAP_DISJOINT);
    made a;
    CHECK(ask_itself(line(&a, AT, 1, 2, INT64_MIN), 0) == FAN_OVERLAP_FAR);
    CHECK(ask_itself(line(&a, AT, 1, 2, 0), 0) == FAN_OVERLAP_YES);
    CHECK_STR(fan_verdict_kind(FAN_OVERLAP_FAR), "unknown");
}

static void as_many_axes_as_there_may_be(void)
{
    made a, b;
    for (int i = 0; i < FAN_MAX_NDIM; i++) {
        a.shape[i] = 1;
        a.strides[i] = 12345;
        b.shape[i] = 1;
        b.strides[i] = -7;
    }
    for (int i = 0; i < 55; i++) {
        a.shape[i] = 2;
        a.strides[i] = INT64_C(1) << i;
        b.shape[i] = 2;
        b.strides[i] = i % 2 ? -(INT64_C(2) << i) : INT64_C(2) << i;
    }
    uint64_t mid = UINT64_C(1) << 60;
    region(&a, mid, 1, FAN_MAX_NDIM);
    region(&b, mid, 1, FAN_MAX_NDIM);
    CHECK(ask(&a.r, &b.r, FAN_OVERLAP_BUDGET) == FAN_OVERLAP_YES);
    b.r.data += UINT64_C(1) << 58;
    CHECK(ask(&a.r, &b.r, FAN_OVERLAP_BUDGET) == FAN_OVERLAP_DISJOINT);
    CHECK(ask_itself(&a.r, FAN_OVERLAP_BUDGET) == FAN_OVERLAP_DISJOINT);
    a.strides[3] = a.strides[2];
    CHECK(ask_itself(&a.r, FAN_OVERLAP_BUDGET) == FAN_OVERLAP_YES);
}

/* ---- lists ---- */

#define MOST 192 /* regions of a list */

static fan_overlaps *list_of(const made *all, size_t n)
{
    fan_region regions[MOST];
    fan_overlaps *l = NULL;
    for (size_t i = 0; i < n; i++)
        regions[i] = all[i].r;
    CHECK_OK(fan_overlaps_new(regions, n, &l, NULL));
    return l;
}

/* joined: components by following pairs until nothing changes. */
static void joined(const bool *met, size_t n, uint32_t *label)
{
    bool more = true;
    for (size_t i = 0; i < n; i++)
        label[i] = (uint32_t)i;
    while (more) {
        more = false;
        for (size_t k = 0; k < n * n; k++) {
            uint32_t to = label[k / n];
            if (met[k] && label[k % n] > to) {
                label[k % n] = to;
                more = true;
            }
        }
    }
}

/* all_met: which two of a list truly meet; returns the number of pairs. */
static size_t all_met(const made *all, size_t n, bool *met)
{
    size_t pairs = 0;
    for (size_t i = 0; i < n; i++) {
        met[i * n + i] = false;
        for (size_t j = 0; j < i; j++) {
            bool is = truly_meet(&all[i].r, &all[j].r);
            met[i * n + j] = is;
            met[j * n + i] = is;
            pairs += is;
        }
    }
    return pairs;
}

static void judge_list(const made *all, size_t n)
{
    static bool met[MOST * MOST];
    uint32_t label[MOST], want[MOST];
    size_t count, npairs;
    uint32_t numbered = 0;
    fan_pair *pairs;
    fan_overlaps *l = list_of(all, n);
    size_t expected = all_met(all, n, met);
    joined(met, n, want);
    CHECK_OK(fan_overlaps_components(l, FAN_OVERLAP_BUDGET, label, &count, NULL, NULL));
    for (size_t i = 0; i < n; i++) {
        bool is_first = want[i] == i;
        CHECK(label[i] == (is_first ? numbered : label[want[i]]));
        numbered += is_first;
        seen[verdict_of(!is_first)]++;
    }
    CHECK_INT(count, numbered);
    CHECK_OK(fan_overlaps_pairs(l, FAN_OVERLAP_BUDGET, &pairs, &npairs, NULL));
    CHECK_INT(npairs, expected);
    size_t k = 0;
    for (size_t at = 0; at < n * n && k < npairs; at++) {
        if (!met[at] || at / n > at % n)
            continue;
        CHECK(pairs[k].one == at / n && pairs[k].two == at % n);
        CHECK(pairs[k].verdict == FAN_OVERLAP_YES);
        k++;
    }
    fan_free(pairs);
    fan_overlaps_free(l);
}

/* column_or_piece: a column, or a piece of a row between columns. */
static void column_or_piece(made *m, int64_t n, int64_t k)
{
    int64_t row = 2 * n;
    bool column = below(2) != 0;
    m->shape[0] = column ? 6 : 1 + below(3);
    m->shape[1] = 1 + below(n / 2 + 1);
    m->strides[0] = 2 * row;
    m->strides[1] = 4;
    uint64_t from = (uint64_t)(4 * k);
    if (!column)
        from = (uint64_t)(2 + 2 * row * below(4) + 4 * below(n / 2 + 1));
    region(m, AT + from, 2, column ? 1 : 2);
}

/* family: views of one matrix, sliced alike: what a list is fast at. */
static void family(made *all, size_t n)
{
    int64_t kind = below(6);
    int64_t width = 1 + below(4);
    int64_t row = (int64_t)n * 2;
    for (size_t i = 0; i < n; i++) {
        made *m = &all[i];
        int64_t k = below((int64_t)n);
        int64_t rows = below(6);
        m->shape[0] = 1 + below(6);
        m->shape[1] = width;
        m->strides[0] = row;
        m->strides[1] = 2;
        switch (kind) {
        case 0: /* columns */ region(m, AT + (uint64_t)(2 * k), 2, 2); break;
        case 1: /* pieces */ line(m, AT + (uint64_t)(k * 12), 2, m->shape[0], 2); break;
        case 2: /* blocks of columns and rows */
            region(m, AT + (uint64_t)(2 * k + rows * row) % 200, 2, 2);
            break;
        case 3: /* columns of small matrices, one behind the other */
            line(m, AT + (uint64_t)(k / 4 * 24 + k % 4 * 2), 2, 3, 8);
            break;
        case 4: /* columns, and pieces of rows that lie between them */
            column_or_piece(m, (int64_t)n, k);
            break;
        default: block(m);
        }
        if (one_in(12)) { /* one that spans many */
            int64_t count = 30 + below(60);
            int64_t stride = 1 + below(6);
            line(m, AT + (uint64_t)below(20), 1, count, stride);
        }
    }
}

/* family_or_any: views of one matrix, or any regions. */
static void family_or_any(made *all, size_t n, bool is_family, int64_t farthest)
{
    if (is_family) {
        family(all, n);
        return;
    }
    for (size_t k = 0; k < n; k++)
        random_region(&all[k], farthest);
}

static void lists_are_what_their_pairs_are(void)
{
    static made all[64];
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < rounds(400); i++) {
        size_t n = (size_t)below(i % 4 ? 20 : 60);
        family_or_any(all, n, i % 2, 40);
        judge_list(all, n);
    }
    check_seen(rounds(1000));
}

/* check_components: of a list of one-axis regions, by byte, count and step; `joined_ones` of
 * them are not the first of their component. */
static void check_components(const int64_t (*lines)[3], int n, long joined_ones)
{
    static made all[MOST];
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < n; i++)
        line(&all[i], AT + (uint64_t)lines[i][0], 1, lines[i][1], lines[i][2]);
    judge_list(all, (size_t)n);
    CHECK_INT(seen[FAN_OVERLAP_YES], joined_ones);
}

/* The first ends early, the third meets neither before the fourth joins it to the second: whatever
 * meets the third alone is of the same component. */
static void a_component_keeps_its_members_when_one_has_ended(void)
{
    static const int64_t lines[5][3] = {
        {0, 3, 1}, {0, 100, 10}, {15, 50, 10}, {40, 6, 1}, {55, 1, 1}};
    check_components(lines, 5, 4);
}

/* The second ends early, behind the third in their list; the fourth joins that to the first, which
 * the fifth meets alone. */
static void lists_that_become_one_keep_their_members(void)
{
    static const int64_t lines[5][3] = {
        {0, 50, 10}, {1, 3, 1}, {2, 50, 10}, {40, 6, 1}, {60, 1, 1}};
    check_components(lines, 5, 4);
}

/* Every second column of a matrix, and pieces of its rows between them: extents, and arcs modulo an
 * element, take a question for each pair. */
static void a_sweep_that_gives_up_is_followed_by_another(void)
{
    static int64_t lines[MOST][3];
    for (int i = 0; i < MOST / 2; i++) {
        memcpy(lines[i], (int64_t[]){2 * i, 5, MOST}, sizeof lines[i]);
        memcpy(lines[MOST / 2 + i], (int64_t[]){MOST * (i % 4) + 1, MOST / 2, 2}, sizeof lines[i]);
    }
    check_components((const int64_t (*)[3])lines, MOST, MOST / 2 - 4);
}

static void an_unknown_pair_of_a_list_is_a_pair(void)
{
    made all[3];
    uint32_t label[3];
    size_t count, n;
    fan_pair *pairs;
    bad_pair(&all[0], &all[1]);
    region(&all[2], AT + (UINT64_C(1) << 40), 8, 0);
    fan_overlaps *l = list_of(all, 3);
    CHECK_OK(fan_overlaps_components(l, 1000, label, &count, NULL, NULL));
    CHECK_INT(count, 2);
    CHECK(label[0] == 0 && label[1] == 0);
    CHECK_INT(label[2], 1);
    CHECK_OK(fan_overlaps_pairs(l, 1000, &pairs, &n, NULL));
    CHECK_INT(n, 1);
    CHECK(pairs[0].one == 0 && pairs[0].two == 1);
    CHECK_INT(pairs[0].verdict, FAN_OVERLAP_HARD);
    fan_free(pairs);
    CHECK_OK(fan_overlaps_components(l, FAN_OVERLAP_BUDGET, label, &count, NULL, NULL));
    CHECK_INT(count, 3);
    fan_overlaps_free(l);
}

/* lists_and_layouts: some of every call; returns the first failure. */
static fan_status lists_and_layouts(const fan_region *regions, fan_layout_item *list, size_t n)
{
    fan_overlaps *l = NULL;
    fan_layout *y = NULL;
    fan_pair *pairs = NULL;
    uint32_t label[20];
    size_t count;
    fan_difference d;
    fan_status status;
    FAN_GO(fan_overlaps_new(regions, n, &l, NULL));
    FAN_GO(fan_overlaps_components(l, FAN_OVERLAP_BUDGET, label, &count, NULL, NULL));
    FAN_GO(fan_overlaps_pairs(l, FAN_OVERLAP_BUDGET, &pairs, &count, NULL));
    FAN_GO(fan_layout_new(list, n, FAN_OVERLAP_BUDGET, &y, NULL));
    list[3].region.data++;
    status = fan_layout_check(y, list, FAN_OVERLAP_BUDGET, &d, NULL);
    list[3].region.data--;
done:
    fan_free(pairs);
    fan_overlaps_free(l);
    fan_layout_free(y);
    return status;
}

/* Every allocation fails once: an error, nothing leaked. */
static void lists_and_layouts_fail_without_memory(void)
{
    static made all[20];
    fan_layout_item list[20];
    fan_region regions[20];
    family(all, 20);
    for (int i = 0; i < 20; i++) {
        regions[i] = all[i].r;
        list[i] = (fan_layout_item){.region = all[i].r};
    }
    int64_t live = fan_mem_get().live;
    int64_t refused = 0;
    bool failed = true;
    for (int64_t skip = 0; failed; skip++) {
        int64_t before = fan_mem_get().failed;
        fan_mem_fail_at(skip, 1);
        fan_status status = lists_and_layouts(regions, list, 20);
        fan_mem_fail_at(-1, 0);
        failed = fan_mem_get().failed > before;
        CHECK((status == FAN_ERR_NOMEM) == failed);
        refused += failed;
        CHECK_INT(fan_mem_get().live, live);
    }
    CHECK(refused > 15);
}

/* ---- layouts ---- */

static fan_layout_item items[64];

static fan_layout_item *as_items(const made *all, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        items[i] = (fan_layout_item){
            .region = all[i].r, .dtype = (uint64_t)all[i].r.itemsize, .writable = true};
    }
    return items;
}

static fan_difference check(const fan_layout *l, const made *all, size_t n)
{
    fan_difference d = {FAN_CHANGE_DTYPE, 0, 0};
    CHECK_OK(fan_layout_check(l, as_items(all, n), FAN_OVERLAP_BUDGET, &d, NULL));
    return d;
}

/* alike: whether the arrays of `now` hang together as those of `was`, with the same distances; by
 * brute force. */
static bool alike(const made *was, const made *now, size_t n)
{
    static bool met[64 * 64];
    uint32_t first[64], label[64];
    all_met(was, n, met);
    joined(met, n, first);
    all_met(now, n, met);
    joined(met, n, label);
    for (size_t i = 0; i < n; i++) {
        uint32_t k = first[i];
        if (label[i] != k)
            return false;
        if (now[i].r.data - now[k].r.data != was[i].r.data - was[k].r.data)
            return false;
    }
    return true;
}

/* Some arrays are moved, alone or together: the check says "same" exactly where brute force
 * does. */
static void a_layout_is_the_same_where_brute_force_says_so(void)
{
    static made was[64], now[64];
    long same = 0;
    long other = 0;
    long words[16] = {0};
    for (int round = 0; round < rounds(6000); round++) {
        size_t n = 1 + (size_t)below(12);
        fan_layout *l = NULL;
        family_or_any(was, n, round % 2, 20);
        CHECK_OK(fan_layout_new(as_items(was, n), n, FAN_OVERLAP_BUDGET, &l, NULL));
        uint64_t together = (uint64_t)below(40);
        for (size_t i = 0; i < n; i++) {
            const fan_region *from = &was[i].r;
            uint64_t alone = 0;
            if (one_in(6))
                alone = (uint64_t)(below(200) - 100);
            now[i] = was[i];
            region(&now[i], from->data + together + alone, from->itemsize, from->ndim);
        }
        fan_difference d = check(l, now, n);
        bool is = alike(was, now, n);
        CHECK((d.what == FAN_CHANGE_SAME) == is);
        CHECK(d.what == FAN_CHANGE_SAME || d.what >= FAN_CHANGE_APART);
        if (d.what == FAN_CHANGE_OVERLAP)
            CHECK(d.other < n && d.other != d.index);
        words[d.what]++;
        same += is;
        other += !is;
        fan_layout_free(l);
    }
    CHECK(same > rounds(500) && other > rounds(500));
    CHECK(words[FAN_CHANGE_APART] > rounds(50) && words[FAN_CHANGE_OFFSET] > rounds(50));
    CHECK(words[FAN_CHANGE_OVERLAP] > rounds(50));
}

/* Columns of one matrix whose memory is that of another by now, and columns that went each its own
 * way: only the first is decided by distances alone. */
static void columns_that_move_apart_are_still_the_same(void)
{
    static made was[8], now[8];
    fan_layout *l = NULL;
    for (size_t i = 0; i < 8; i++) {
        line(&was[i], AT + 8 * i, 8, 6, 64);
        line(&now[i], AT + 4096 + 4096 * ((i * 5) % 8), 8, 6, 64);
    }
    CHECK_OK(fan_layout_new(as_items(was, 8), 8, FAN_OVERLAP_BUDGET, &l, NULL));
    CHECK(check(l, now, 8).what == FAN_CHANGE_SAME);
    now[7].r.data = now[2].r.data + 7;
    fan_difference d = check(l, now, 8);
    CHECK_INT(d.what, FAN_CHANGE_OVERLAP);
    CHECK(d.index == 7 && d.other == 2);
    for (size_t i = 0; i < 8; i++) {
        CHECK_INT(fan_layout_component(l, i), i);
        CHECK_INT(fan_layout_offset(l, i), 0);
    }
    fan_layout_free(l);
}

static void what_changed_is_named(void)
{
    made a;
    fan_layout *l = NULL;
    fan_difference d;
    a.shape[0] = 3;
    a.strides[0] = 8;
    a.shape[1] = 1;
    a.strides[1] = 99;
    fan_layout_item is;
    fan_layout_item was = {.region = *region(&a, AT, 8, 2), .dtype = 1, .writable = true};
    CHECK_OK(fan_layout_new(&was, 1, 0, &l, NULL));
    made b = a;
#define SAYS(change)                                 \
    CHECK_OK(fan_layout_check(l, &is, 0, &d, NULL)); \
    CHECK_STR(fan_change_word(d.what), change);      \
    is = was;                                        \
    b = a
    is = was;
    SAYS("same");
    is.region.data += 1000;
    SAYS("same");
    b.strides[1] = -5; /* along an axis of extent 1 */
    is.region = *region(&b, AT, 8, 2);
    SAYS("same");
    is.dtype = 2;
    SAYS("dtype");
    is.region.itemsize = 4;
    SAYS("dtype");
    is.device = 1;
    SAYS("device");
    is.region.ndim = 1;
    SAYS("shape");
    b.shape[0] = 2;
    is.region = *region(&b, AT, 8, 2);
    SAYS("shape");
    b.strides[0] = 16;
    is.region = *region(&b, AT, 8, 2);
    SAYS("strides");
    is.writable = false;
    SAYS("read-only");
    fan_layout_free(l);
    was.writable = false;
    CHECK_OK(fan_layout_new(&was, 1, 0, &l, NULL));
    is = was;
    is.writable = true;
    SAYS("writable");
    fan_layout_free(l);
}

/* view_at: an array of bytes at a region's address, `more` bytes further. */
static fan_array *view_at(fan_storage *s, const fan_region *r, int more)
{
    fan_array *a = NULL;
    char *data = (char *)(uintptr_t)r->data + more;
    CHECK_OK(fan_array_view(s, data, FAN_DT_INT8, r->ndim, r->shape, r->strides, true, &a, NULL));
    return a;
}

/* The rules of memory in use: a short search decides, and what it cannot decide is not disjoint. */
static void arrays_in_use_are_disjoint_only_where_that_is_sure(void)
{
    made a, b;
    fan_storage *s = fan_storage_wrap(NULL, 0, NULL, NULL);
    bad_pair(&a, &b);
    fan_array *x = view_at(s, &a.r, 0);
    fan_array *y = view_at(s, &b.r, 0);
    line(&b, a.r.data, 1, 10, 2);
    fan_array *z = view_at(s, &b.r, 1);
    CHECK(!fan_array_disjoint(x, y));
    CHECK(!fan_array_disjoint(x, x));
    CHECK(!fan_array_extents_disjoint(x, z) && fan_array_disjoint(x, z));
    fan_array_drop(x);
    fan_array_drop(y);
    fan_array_drop(z);
    fan_storage_drop(s);
}

/* The checks of each noun; all, or those of the noun that is named behind the seed. */
static const struct {
    const char *of;
    void (*check)(void);
} groups[] = {
    {"overlap", small_pairs_are_what_brute_force_says},
    {"overlap", random_pairs_are_what_brute_force_says},
    {"overlap", blocks_of_a_matrix_are_what_brute_force_says},
    {"overlap", random_regions_overlap_themselves_where_brute_force_says_so},
    {"overlap", equations_of_many_terms_are_solved},
    {"overlap", a_known_bad_pair_is_disjoint},
    {"overlap", over_the_budget_nobody_knows},
    {"overlap", without_memory_for_the_table_it_is_an_error},
    {"overlap", large_steps_are_judged_by_search_and_by_table},
    {"overlap", memory_at_the_top_of_the_address_space_is_counted},
    {"overlap", what_cannot_be_counted_is_unknown},
    {"overlap", as_many_axes_as_there_may_be},
    {"overlap_list", lists_are_what_their_pairs_are},
    {"overlap_list", a_component_keeps_its_members_when_one_has_ended},
    {"overlap_list", lists_that_become_one_keep_their_members},
    {"overlap_list", a_sweep_that_gives_up_is_followed_by_another},
    {"overlap_list", an_unknown_pair_of_a_list_is_a_pair},
    {"overlap_list", lists_and_layouts_fail_without_memory},
    {"layout", a_layout_is_the_same_where_brute_force_says_so},
    {"layout", columns_that_move_apart_are_still_the_same},
    {"layout", what_changed_is_named},
    {"overlap", arrays_in_use_are_disjoint_only_where_that_is_sure},
};

int main(int argc, char **argv)
{
    is_full = check_is_full(argc, argv);
    if (argc > 1 && !is_full)
        seed = strtoull(argv[1], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < sizeof groups / sizeof *groups && !check_failed; i++) {
        if (argc < 3 || strcmp(argv[2], groups[i].of) == 0)
            groups[i].check();
    }
    return check_done();
}
