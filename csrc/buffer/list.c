#include "buffer/list.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

#define MOVED_TERMS 64 /* what comes out of order moves so many at most */

size_t fan_plain_elements(const fan_plain_kind *k)
{
    size_t n = 1;
    for (int i = 0; i < k->ndim; i++)
        n *= (size_t)k->shape[i];
    return n;
}

uint64_t fan_plain_bytes(const fan_plain_kind *k)
{
    return fan_dtype_size(k->dtype) * fan_plain_elements(k);
}

uint64_t fan_plain_kind_bytes(const fan_plain_kind *k)
{
    uint64_t n = fan_plain_bytes(k);
    return n ? n : 1; /* so that what has no bytes passes a budget of 0, too */
}

/* The axis with the least stride above `run`; -1: there is none. */
static int plain_axis_beyond(unsigned left, int ndim, const int64_t *strides, int64_t run)
{
    int next = -1;
    for (int i = 0; i < ndim; i++)
        if ((left >> i & 1) && strides[i] > run && (next < 0 || strides[i] < strides[next]))
            next = i;
    return next;
}

#define PLAIN_MOST_PITCH ((int64_t)1 << 22)

bool fan_plain_order(int ndim, const int64_t *shape, const int64_t *strides, int64_t unit,
                     bool gaps, uint32_t *order)
{
    unsigned left = ~0u; /* axes that have no place yet */
    int64_t run = unit;
    *order = 0;
    for (int at = 0; at < ndim; at++) {
        int i = ndim - 1;
        while (i >= 0 && !((left >> i & 1) && (shape[i] == 1 || strides[i] == run)))
            i--;
        if (i < 0) {
            i = gaps && *order >> 10 == 0 ? plain_axis_beyond(left, ndim, strides, run) : -1;
            if (i < 0 || strides[i] % unit || strides[i] / unit >= PLAIN_MOST_PITCH)
                return false;
            *order |= (uint32_t)(strides[i] / unit) << 10 | (uint32_t)at << 8;
            run = strides[i];
        }
        left &= ~(1u << i);
        *order |= (uint32_t)i << 2 * at;
        run *= shape[i];
    }
    return run > 0;
}

static int plain_axis(const fan_plain_kind *k, int at)
{
    return k->order & 255 ? (int)(k->order >> 2 * at & 3) : k->ndim - 1 - at;
}

void fan_plain_strides(const fan_plain_kind *k, int64_t unit, int64_t *strides)
{
    for (int at = 0; at < k->ndim; at++) {
        strides[plain_axis(k, at)] = unit;
        unit *= k->shape[plain_axis(k, at)];
    }
}

void fan_plain_rows(const fan_plain_kind *k, int64_t *rows, int64_t *row)
{
    *rows = *row = 1;
    for (int at = 0; at < k->ndim; at++)
        *(at < (int)(k->order >> 8 & 3) ? row : rows) *= k->shape[plain_axis(k, at)];
}

uint64_t fan_plain_reach(const fan_plain_kind *k)
{
    int64_t rows, row;
    if (!fan_plain_pitch(k))
        return fan_plain_bytes(k);
    fan_plain_rows(k, &rows, &row);
    return fan_dtype_size(k->dtype) * (uint64_t)((rows - 1) * fan_plain_pitch(k) + row);
}

void fan_list_init(fan_list *p)
{
    fan_list_empty(p);
    p->cap = FAN_LIST_INLINE;
    p->entries = p->inline_entries;
    p->unsorted = NULL;
}

int64_t fan_list_count(const fan_list *p)
{
    return p ? (int64_t)fan_list_parked(p) + p->summed : 0;
}

/* ---- keys out of order ---- */

/* From now on by arrival; with one more key. */
static bool list_keys_begin(fan_list *p, int64_t key)
{
    p->unsorted = fan_calloc(sizeof *p->unsorted);
    bool good = p->unsorted && fan_keys_put(p->unsorted, key) > 0;
    for (size_t i = 0; i < p->n && good; i++)
        good = fan_keys_put(p->unsorted, fan_entry_key(&p->entries[i])) > 0;
    if (!good)
        fan_keys_free(&p->unsorted);
    return good;
}

static int list_by_key(const void *a, const void *b)
{
    int64_t x = fan_entry_key(a), y = fan_entry_key(b);
    return (x > y) - (x < y);
}

void fan_list_by_key(fan_list *p)
{
    qsort(p->entries, p->n, sizeof *p->entries, list_by_key);
}

void fan__list_sort(fan_list *p)
{
    int64_t *keys = fan_alloc(p->n * sizeof *keys);
    uint32_t *at = fan_alloc(p->n * sizeof *at);
    fan_entry *sorted = fan_alloc(p->cap * sizeof *sorted);
    for (size_t i = 0; keys && i < p->n; i++)
        keys[i] = fan_entry_key(&p->entries[i]);
    if (keys && at && sorted && fan_keys_order(keys, sizeof *keys, p->n, at)) {
        for (size_t i = 0; i < p->n; i++)
            sorted[i] = p->entries[at[i]];
        fan_free(p->entries); /* it is too long for `inline_entries` */
        p->entries = sorted;
    } else {
        fan_list_by_key(p);
        fan_free(sorted);
    }
    fan_free(keys);
    fan_free(at);
    fan_keys_free(&p->unsorted);
}

void fan_list_undefined_last(fan_list *p)
{
    for (size_t i = 0, kept = 0; kept < fan_list_defined(p); i++) {
        fan_entry one = p->entries[i];
        if (!one.object)
            continue;
        p->entries[i] = p->entries[kept];
        p->entries[kept++] = one;
    }
}

void fan_list_fini(fan_list *p)
{
    fan_keys_free(&p->unsorted);
    if (p->entries != p->inline_entries)
        fan_free(p->entries);
}

/* The place of a key in a list by key: of the first entry that has it or a greater one. */
static size_t list_find(const fan_list *p, int64_t key)
{
    size_t lo = 0, hi = p->n;
    if (!hi || fan_entry_key(&p->entries[hi - 1]) < key)
        return hi;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (fan_entry_key(&p->entries[mid]) < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool fan_list_has(const fan_list *p, int64_t key)
{
    if (!p || !p->n)
        return false;
    if (p->unsorted)
        return fan_keys_has(p->unsorted, key);
    size_t at = list_find(p, key);
    return at < p->n && fan_entry_key(&p->entries[at]) == key;
}

/* Where a key goes to; SIZE_MAX: it is there already, or there is no memory. */
static size_t list_place(fan_list *p, int64_t key)
{
    if (p->unsorted)
        return fan_keys_put(p->unsorted, key) > 0 ? p->n : SIZE_MAX;
    size_t at = list_find(p, key);
    if (at < p->n && fan_entry_key(&p->entries[at]) == key)
        return SIZE_MAX;
    return p->n - at <= MOVED_TERMS ? at : list_keys_begin(p, key) ? p->n : SIZE_MAX;
}

static bool list_grow(fan_list *p)
{
    size_t cap = p->cap * 2;
    fan_entry *more =
        fan_realloc(p->entries == p->inline_entries ? NULL : p->entries, cap * sizeof *more);
    if (!more)
        return false;
    if (p->entries == p->inline_entries)
        memcpy(more, p->inline_entries, sizeof p->inline_entries);
    p->entries = more;
    p->cap = cap;
    return true;
}

bool fan_list_put(fan_list *p, const fan_entry *one)
{
    int64_t key = fan_entry_key(one);
    if (p->n == p->cap && !list_grow(p))
        return false;
    /* it is in the sum already */
    if (p->summed && key >= 0 && key <= fan_entry_key(&p->entries[0]))
        return false;
    size_t at = key < 0 ? p->n : list_place(p, key);
    if (at == SIZE_MAX)
        return false;
    if (at < p->n)
        memmove(&p->entries[at + 1], &p->entries[at], (p->n - at) * sizeof *p->entries);
    p->entries[at] = *one;
    p->n++;
    p->undefined += !one->object;
    return true;
}

size_t fan_list_ready(fan_list *p, uint64_t next_key, bool keyed)
{
    size_t m = 0;
    if (!p || (p->unsorted && (uint64_t)p->unsorted->least > next_key))
        return 0;
    fan_list_sort(p);
    const fan_entry *first = p->entries + (p->summed > 0);
    while (m < fan_list_parked(p) && fan_entry_parked(&first[m]) &&
           (!keyed || (uint64_t)fan_entry_key(&first[m]) == next_key + m))
        m++;
    return m;
}

bool fan_list_remove(fan_list *p, const fan_entry *one)
{
    for (size_t i = p->n; i-- > 0;) {
        if (!fan_entry_same(&p->entries[i], one))
            continue;
        memmove(&p->entries[i], &p->entries[i + 1], (p->n - i - 1) * sizeof *p->entries);
        p->n--;
        p->undefined -= !one->object;
        if (p->unsorted)
            fan_keys_remove(p->unsorted, fan_entry_key(one));
        return true;
    }
    return false;
}

/* The smallest key, or one that is smaller still; of keyed ones. */
static int64_t least(const fan_list *p)
{
    return p->unsorted ? p->unsorted->least : p->entries[0].key;
}

bool fan_list_begins(const fan_list *p)
{
    int64_t first = p->entries[0].key;
    if (first < 0)
        return true;
    if (!p->summed)
        return least(p) == 0;
    return p->unsorted ? fan_keys_has(p->unsorted, first + 1)
                       : p->n > 1 && p->entries[1].key == first + 1;
}

size_t fan_list_prefix(const fan_list *p)
{
    size_t m = p->n > 0 && (p->summed || p->entries[0].key <= 0);
    while (m && m < p->n &&
           (p->entries[0].key < 0 || p->entries[m].key == p->entries[m - 1].key + 1))
        m++;
    return m;
}

void fan_list_detach(fan_list *p, fan_detached *to)
{
    to->n = p->n;
    to->cap = p->cap;
    to->heap = NULL;
    fan_list_empty(p);
    fan_keys_free(&p->unsorted);
    if (to->n <= FAN_LIST_INLINE) {
        memcpy(to->inline_entries, p->entries, to->n * sizeof *to->inline_entries);
        return;
    }
    to->heap = p->entries;
    p->entries = p->inline_entries;
    p->cap = FAN_LIST_INLINE;
}

void fan__list_shrink(fan_list *p)
{
    fan_free(p->entries);
    p->entries = p->inline_entries;
    p->cap = FAN_LIST_INLINE;
}
