/* list: the kind of plain entries; entries by key, or by arrival; keys that come out of order. */
#include "buffer/list.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

#define MOVED_TERMS 64 /* what comes out of order moves so many at most */

size_t fan_plain_elements(const fan_plain_kind *kind)
{
    size_t n = 1;
    for (int i = 0; i < kind->ndim; i++)
        n *= (size_t)kind->shape[i];
    return n;
}

uint64_t fan_plain_bytes(const fan_plain_kind *kind)
{
    return fan_dtype_size(kind->dtype) * fan_plain_elements(kind);
}

uint64_t fan_plain_kind_bytes(const fan_plain_kind *kind)
{
    uint64_t n = fan_plain_bytes(kind);
    return n ? n : 1; /* so that what has no bytes passes a budget of 0, too */
}

/* The axis with the least stride above `run`; -1: there is none. */
static int plain_axis_beyond(unsigned left, int ndim, const int64_t *strides, int64_t run)
{
    int next = -1;
    for (int i = 0; i < ndim; i++) {
        bool beyond = (left >> i & 1) && strides[i] > run;
        if (beyond && (next < 0 || strides[i] < strides[next]))
            next = i;
    }
    return next;
}

#define PLAIN_MOST_PITCH ((int64_t)1 << 22)

/* The last axis whose neighbours lie `run` apart; -1: there is none. */
static int plain_axis_next(unsigned left, int ndim, const int64_t *shape, const int64_t *strides,
                           int64_t run)
{
    for (int i = ndim - 1; i >= 0; i--) {
        if (!(left >> i & 1))
            continue;
        if (shape[i] == 1 || strides[i] == run)
            return i;
    }
    return -1;
}

bool fan_plain_order(int ndim, const int64_t *shape, const int64_t *strides, int64_t unit,
                     bool gaps, uint32_t *order)
{
    unsigned left = ~0u; /* axes that have no place yet */
    int64_t run = unit;
    *order = 0;
    for (int at = 0; at < ndim; at++) {
        int i = plain_axis_next(left, ndim, shape, strides, run);
        if (i < 0) {
            if (!gaps || *order >> 10)
                return false;
            i = plain_axis_beyond(left, ndim, strides, run);
            if (i < 0 || strides[i] % unit)
                return false;
            int64_t pitch = strides[i] / unit;
            if (pitch >= PLAIN_MOST_PITCH)
                return false;
            *order |= (uint32_t)pitch << 10 | (uint32_t)at << 8;
            run = strides[i];
        }
        left &= ~(1u << i);
        *order |= (uint32_t)i << 2 * at;
        run *= shape[i];
    }
    return run > 0;
}

static int plain_axis(const fan_plain_kind *kind, int at)
{
    if (kind->order & 255)
        return (int)(kind->order >> 2 * at & 3);
    return kind->ndim - 1 - at;
}

void fan_plain_strides(const fan_plain_kind *kind, int64_t unit, int64_t *strides)
{
    for (int at = 0; at < kind->ndim; at++) {
        strides[plain_axis(kind, at)] = unit;
        unit *= kind->shape[plain_axis(kind, at)];
    }
}

void fan_plain_rows(const fan_plain_kind *kind, int64_t *rows, int64_t *row)
{
    int fastest = (int)(kind->order >> 8 & 3);
    *rows = 1;
    *row = 1;
    for (int at = 0; at < kind->ndim; at++) {
        int64_t size = kind->shape[plain_axis(kind, at)];
        if (at < fastest)
            *row *= size;
        else
            *rows *= size;
    }
}

uint64_t fan_plain_reach(const fan_plain_kind *kind)
{
    int64_t rows;
    int64_t row;
    if (!fan_plain_pitch(kind))
        return fan_plain_bytes(kind);
    fan_plain_rows(kind, &rows, &row);
    return fan_dtype_size(kind->dtype) * (uint64_t)((rows - 1) * fan_plain_pitch(kind) + row);
}

void fan_list_init(fan_list *list)
{
    fan_list_empty(list);
    list->cap = FAN_LIST_INLINE;
    list->entries = list->inline_entries;
    list->unsorted = NULL;
}

int64_t fan_list_count(const fan_list *list)
{
    if (!list)
        return 0;
    return (int64_t)fan_list_parked(list) + list->summed;
}

/* ---- keys out of order ---- */

/* From now on by arrival; with one more key. */
static bool list_keys_begin(fan_list *list, int64_t key)
{
    list->unsorted = fan_calloc(sizeof *list->unsorted);
    bool good = list->unsorted && fan_keys_put(list->unsorted, key) > 0;
    for (size_t i = 0; i < list->n && good; i++)
        good = fan_keys_put(list->unsorted, fan_entry_key(&list->entries[i])) > 0;
    if (!good)
        fan_keys_free(&list->unsorted);
    return good;
}

static int list_by_key(const void *a, const void *b)
{
    int64_t x = fan_entry_key(a);
    int64_t y = fan_entry_key(b);
    return (x > y) - (x < y);
}

void fan_list_by_key(fan_list *list)
{
    qsort(list->entries, list->n, sizeof *list->entries, list_by_key);
}

void fan__list_sort(fan_list *list)
{
    int64_t *keys = fan_alloc(list->n * sizeof *keys);
    uint32_t *at = fan_alloc(list->n * sizeof *at);
    fan_entry *sorted = fan_alloc(list->cap * sizeof *sorted);
    for (size_t i = 0; keys && i < list->n; i++)
        keys[i] = fan_entry_key(&list->entries[i]);
    bool room = keys && at && sorted;
    if (room && fan_keys_order(keys, sizeof *keys, list->n, at)) {
        for (size_t i = 0; i < list->n; i++)
            sorted[i] = list->entries[at[i]];
        fan_free(list->entries); /* it is too long for `inline_entries` */
        list->entries = sorted;
    } else {
        fan_list_by_key(list);
        fan_free(sorted);
    }
    fan_free(keys);
    fan_free(at);
    fan_keys_free(&list->unsorted);
}

void fan_list_undefined_last(fan_list *list)
{
    size_t kept = 0;
    for (size_t i = 0; kept < fan_list_defined(list); i++) {
        fan_entry one = list->entries[i];
        if (!one.object)
            continue;
        list->entries[i] = list->entries[kept];
        list->entries[kept++] = one;
    }
}

void fan_list_fini(fan_list *list)
{
    fan_keys_free(&list->unsorted);
    if (list->entries != list->inline_entries)
        fan_free(list->entries);
}

/* The place of a key in a list by key: of the first entry that has it or a greater one. */
static size_t list_find(const fan_list *list, int64_t key)
{
    size_t lo = 0;
    size_t hi = list->n;
    if (!hi || fan_entry_key(&list->entries[hi - 1]) < key)
        return hi;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (fan_entry_key(&list->entries[mid]) < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool list_in_sum(const fan_list *list, int64_t key)
{
    return list->summed && key <= fan_entry_key(&list->entries[0]);
}

/* Whether the place that list_find returned has the key itself. */
static bool list_is_at(const fan_list *list, size_t at, int64_t key)
{
    return at < list->n && fan_entry_key(&list->entries[at]) == key;
}

bool fan_list_has(const fan_list *list, int64_t key)
{
    if (!list || !list->n)
        return false;
    if (list_in_sum(list, key))
        return true;
    if (list->unsorted)
        return fan_keys_has(list->unsorted, key);
    return list_is_at(list, list_find(list, key), key);
}

/* Where a key goes to; SIZE_MAX: it is there already, or there is no memory. */
static size_t list_place(fan_list *list, int64_t key)
{
    if (list_in_sum(list, key))
        return SIZE_MAX;
    if (list->unsorted)
        return fan_keys_put(list->unsorted, key) > 0 ? list->n : SIZE_MAX;
    size_t at = list_find(list, key);
    if (list_is_at(list, at, key))
        return SIZE_MAX;
    if (list->n - at <= MOVED_TERMS)
        return at;
    if (!list_keys_begin(list, key))
        return SIZE_MAX;
    return list->n;
}

static bool list_grow(fan_list *list)
{
    bool small = list->entries == list->inline_entries;
    size_t cap = list->cap * 2;
    fan_entry *more = fan_realloc(small ? NULL : list->entries, cap * sizeof *more);
    if (!more)
        return false;
    if (small)
        memcpy(more, list->inline_entries, sizeof list->inline_entries);
    list->entries = more;
    list->cap = cap;
    return true;
}

bool fan_list_put(fan_list *list, const fan_entry *one)
{
    int64_t key = fan_entry_key(one);
    if (list->n == list->cap && !list_grow(list))
        return false;
    size_t at = key < 0 ? list->n : list_place(list, key);
    if (at == SIZE_MAX)
        return false;
    fan_entry *place = &list->entries[at];
    if (at < list->n)
        memmove(place + 1, place, (list->n - at) * sizeof *place);
    *place = *one;
    list->n++;
    list->undefined += !one->object;
    return true;
}

/* Whether the entry that a fold would begin with has come: that of `next_key`. */
static bool list_begins_with(const fan_list *list, uint64_t next_key)
{
    size_t first = list->summed > 0;
    if (list->unsorted)
        return next_key <= INT64_MAX && fan_keys_has(list->unsorted, (int64_t)next_key);
    return list->n > first && fan_key_is_next(next_key, fan_entry_key(&list->entries[first]));
}

bool fan_list_begins(const fan_list *list)
{
    return fan_list_keyed(list) < 0 || list_begins_with(list, fan_list_next_key(list));
}

size_t fan_list_ready(fan_list *list, uint64_t next_key, bool keyed)
{
    if (!list)
        return 0;
    if (keyed && !list_begins_with(list, next_key))
        return 0;
    fan_list_sort(list);
    const fan_entry *first = list->entries + (list->summed > 0);
    size_t parked = fan_list_parked(list);
    for (size_t m = 0; m < parked; m++) {
        if (!fan_entry_parked(&first[m]))
            return m;
        if (keyed && !fan_key_is_next(next_key + m, fan_entry_key(&first[m])))
            return m;
    }
    return parked;
}

bool fan_list_remove(fan_list *list, const fan_entry *one)
{
    for (size_t i = list->n; i-- > 0;) {
        if (!fan_entry_same(&list->entries[i], one))
            continue;
        memmove(&list->entries[i], &list->entries[i + 1],
                (list->n - i - 1) * sizeof *list->entries);
        list->n--;
        list->undefined -= !one->object;
        if (list->unsorted)
            fan_keys_remove(list->unsorted, fan_entry_key(one));
        return true;
    }
    return false;
}

void fan_list_detach(fan_list *list, fan_detached *to)
{
    to->n = list->n;
    to->cap = list->cap;
    to->heap = NULL;
    fan_list_empty(list);
    fan_keys_free(&list->unsorted);
    if (to->n <= FAN_LIST_INLINE) {
        memcpy(to->inline_entries, list->entries, to->n * sizeof *to->inline_entries);
        return;
    }
    to->heap = list->entries;
    list->entries = list->inline_entries;
    list->cap = FAN_LIST_INLINE;
}

void fan__list_shrink(fan_list *list)
{
    fan_free(list->entries);
    list->entries = list->inline_entries;
    list->cap = FAN_LIST_INLINE;
}
