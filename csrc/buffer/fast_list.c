#include "buffer/fast_list.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

#define KEPT_TERMS 64  /* longer lists are not kept for the next pass */
#define MOVED_TERMS 64 /* what comes out of order moves so many at most */

size_t fan_fast_elements(const fan_fast_kind *k)
{
    size_t n = 1;
    for (int i = 0; i < k->ndim; i++)
        n *= (size_t)k->shape[i];
    return n;
}

uint64_t fan_fast_bytes(const fan_fast_kind *k) { return fan_dtype_size(k->dtype) * fan_fast_elements(k); }

uint64_t fan_fast_kind_bytes(const fan_fast_kind *k)
{
    uint64_t n = fan_fast_bytes(k);
    return n ? n : 1; /* so that what has no bytes passes a budget of 0, too */
}

void fan_fast_list_empty(fan_fast_list *p)
{
    p->n = p->undefined = p->alone = p->ask = 0;
    p->summed = 0;
}

void fan_fast_list_init(fan_fast_list *p)
{
    fan_fast_list_empty(p);
    p->cap = FAN_FAST_INLINE;
    p->terms = p->inline_terms;
    p->unsorted = NULL;
}

int64_t fan_fast_list_count(const fan_fast_list *p) { return p ? (int64_t)fan_fast_list_parked(p) + p->summed : 0; }

/* ---- keys out of order ---- */

/* From now on by arrival; with one more key. */
static bool keys_begin(fan_fast_list *p, int64_t key)
{
    p->unsorted = fan_calloc(sizeof *p->unsorted);
    bool good = p->unsorted && fan_keys_put(p->unsorted, key) > 0;
    for (size_t i = 0; i < p->n && good; i++)
        good = fan_keys_put(p->unsorted, p->terms[i].key) > 0;
    if (!good)
        fan_keys_free(&p->unsorted);
    return good;
}

static int by_key(const void *a, const void *b)
{
    const fan_fast_term *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

void fan_fast_list_by_key(fan_fast_list *p) { qsort(p->terms, p->n, sizeof *p->terms, by_key); }

void fan_fast_list_sort(fan_fast_list *p)
{
    if (!p->unsorted)
        return;
    int64_t *keys = fan_alloc(p->n * sizeof *keys);
    uint32_t *at = fan_alloc(p->n * sizeof *at);
    fan_fast_term *terms = fan_alloc(p->cap * sizeof *terms);
    for (size_t i = 0; keys && i < p->n; i++)
        keys[i] = p->terms[i].key;
    if (keys && at && terms && fan_keys_order(keys, sizeof *keys, p->n, at)) {
        for (size_t i = 0; i < p->n; i++)
            terms[i] = p->terms[at[i]];
        fan_free(p->terms); /* it is too long for `inline_terms` */
        p->terms = terms;
    } else {
        fan_fast_list_by_key(p);
        fan_free(terms);
    }
    fan_free(keys);
    fan_free(at);
    fan_keys_free(&p->unsorted);
}

void fan_fast_list_undefined_last(fan_fast_list *p)
{
    for (size_t i = 0, kept = 0; kept < fan_fast_list_defined(p); i++) {
        fan_fast_term one = p->terms[i];
        if (!one.object)
            continue;
        p->terms[i] = p->terms[kept];
        p->terms[kept++] = one;
    }
}

void fan_fast_list_fini(fan_fast_list *p)
{
    fan_keys_free(&p->unsorted);
    if (p->terms != p->inline_terms)
        fan_free(p->terms);
}

/* Where a key goes to; SIZE_MAX: it is there already, or there is no memory. */
static size_t place_of(fan_fast_list *p, int64_t key)
{
    size_t lo = 0, hi = p->n;
    if (p->unsorted)
        return fan_keys_put(p->unsorted, key) > 0 ? p->n : SIZE_MAX;
    if (!p->n || p->terms[p->n - 1].key < key)
        return p->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (p->terms[mid].key < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (p->terms[lo].key == key)
        return SIZE_MAX;
    return p->n - lo <= MOVED_TERMS ? lo : keys_begin(p, key) ? p->n : SIZE_MAX;
}

static bool grow(fan_fast_list *p)
{
    size_t cap = p->cap * 2;
    fan_fast_term *more = fan_realloc(p->terms == p->inline_terms ? NULL : p->terms, cap * sizeof *more);
    if (!more)
        return false;
    if (p->terms == p->inline_terms)
        memcpy(more, p->inline_terms, sizeof p->inline_terms);
    p->terms = more;
    p->cap = cap;
    return true;
}

bool fan_fast_list_put(fan_fast_list *p, const fan_fast_term *one)
{
    int64_t key = one->key;
    if (p->n == p->cap && !grow(p))
        return false;
    if (p->summed && key >= 0 && key <= p->terms[0].key) /* it is in the sum already */
        return false;
    size_t at = key < 0 ? p->n : place_of(p, key);
    if (at == SIZE_MAX)
        return false;
    if (at < p->n)
        memmove(&p->terms[at + 1], &p->terms[at], (p->n - at) * sizeof *p->terms);
    p->terms[at] = *one;
    p->n++;
    p->undefined += !one->object;
    return true;
}

bool fan_fast_list_remove_last(fan_fast_list *p, const void *object, int64_t key)
{
    for (size_t i = p->n; i-- > 0;) {
        if (p->terms[i].object != object || p->terms[i].key != key)
            continue;
        memmove(&p->terms[i], &p->terms[i + 1], (p->n - i - 1) * sizeof *p->terms);
        p->n--;
        p->undefined -= !object;
        if (p->unsorted)
            fan_keys_remove(p->unsorted, key);
        return true;
    }
    return false;
}

/* The smallest key, or one that is smaller still; of keyed ones. */
static int64_t least(const fan_fast_list *p) { return p->unsorted ? p->unsorted->least : p->terms[0].key; }

bool fan_fast_list_begins(const fan_fast_list *p)
{
    int64_t first = p->terms[0].key;
    if (first < 0)
        return true;
    if (!p->summed)
        return least(p) == 0;
    return p->unsorted ? fan_keys_has(p->unsorted, first + 1) : p->n > 1 && p->terms[1].key == first + 1;
}

size_t fan_fast_list_prefix(const fan_fast_list *p)
{
    size_t m = p->n > 0 && (p->summed || p->terms[0].key <= 0);
    while (m && m < p->n && (p->terms[0].key < 0 || p->terms[m].key == p->terms[m - 1].key + 1))
        m++;
    return m;
}

void fan_fast_list_detach(fan_fast_list *p, fan_fast_detached *to)
{
    to->n = p->n;
    to->cap = p->cap;
    to->heap = NULL;
    fan_fast_list_empty(p);
    fan_keys_free(&p->unsorted);
    if (to->n <= FAN_FAST_INLINE) {
        memcpy(to->inline_terms, p->terms, to->n * sizeof *to->inline_terms);
        return;
    }
    to->heap = p->terms;
    p->terms = p->inline_terms;
    p->cap = FAN_FAST_INLINE;
}

void fan_fast_detached_fini(fan_fast_detached *d, fan_fast_list *p)
{
    if (d->heap && p->terms == p->inline_terms && p->n == 0 && d->cap <= KEPT_TERMS) {
        p->terms = d->heap;
        p->cap = d->cap;
        d->heap = NULL;
    }
    fan_free(d->heap);
}

void fan_fast_list_shrink(fan_fast_list *p)
{
    if (p->cap <= KEPT_TERMS)
        return;
    fan_free(p->terms);
    p->terms = p->inline_terms;
    p->cap = FAN_FAST_INLINE;
}
