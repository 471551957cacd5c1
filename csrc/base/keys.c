/* The set: bits for small keys, a hash table by open addressing for others. Then the order of keys:
 * dense ones are counted, sparse ones sorted by digits. */
#include "base/keys.h"

#include "base/mem.h"
#include "base/search.h"

#include <assert.h>
#include <string.h>

#define SMALL ((int64_t)1 << 22) /* keys below are bits */
#define FIRST_WORDS 64
#define FIRST_CELLS 64

/* ---- the set ---- */

static size_t keys_home(const fan_keys *k, int64_t key)
{
    return (size_t)((uint64_t)key * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (k->cap - 1);
}

/* Returns the cell of a key, or the free cell where it belongs. */
static size_t keys_cell(const fan_keys *k, int64_t key)
{
    size_t i = keys_home(k, key);
    while (k->cells[i] >= 0 && k->cells[i] != key)
        i = (i + 1) & (k->cap - 1);
    return i;
}

void fan_keys_free(fan_keys **k)
{
    if (!*k)
        return;
    fan_free((*k)->bits);
    fan_free((*k)->cells);
    fan_free(*k);
    *k = NULL;
}

bool fan_keys_has(const fan_keys *k, int64_t key)
{
    if (key >= SMALL)
        return k->hashed && k->cells[keys_cell(k, key)] == key;
    return (size_t)key / 64 < k->words && (k->bits[key / 64] >> (key % 64) & 1);
}

/* keys_put_bit: returns -1 when out of memory. */
static int keys_put_bit(fan_keys *k, int64_t key)
{
    size_t words = k->words ? k->words : FIRST_WORDS;
    while (words <= (size_t)key / 64)
        words *= 2;
    if (words > k->words) {
        uint64_t *bits = fan_realloc(k->bits, words * sizeof *bits);
        if (!bits)
            return -1;
        memset(bits + k->words, 0, (words - k->words) * sizeof *bits);
        k->bits = bits;
        k->words = words;
    }
    k->bits[key / 64] |= UINT64_C(1) << key % 64;
    return 0;
}

/* keys_put_cell: returns -1 when out of memory. */
static int keys_put_cell(fan_keys *k, int64_t key)
{
    if (k->hashed >= k->cap - k->cap / 4) {
        fan_keys more = {.cap = k->cap ? 2 * k->cap : FIRST_CELLS};
        more.cells = fan_alloc(more.cap * sizeof *more.cells);
        if (!more.cells)
            return -1;
        memset(more.cells, 0xff, more.cap * sizeof *more.cells);
        for (size_t i = 0; i < k->cap; i++) {
            if (k->cells[i] >= 0)
                more.cells[keys_cell(&more, k->cells[i])] = k->cells[i];
        }
        fan_free(k->cells);
        k->cells = more.cells;
        k->cap = more.cap;
    }
    k->cells[keys_cell(k, key)] = key;
    k->hashed++;
    return 0;
}

int fan_keys_put(fan_keys *k, int64_t key)
{
    assert(key >= 0);
    if (fan_keys_has(k, key))
        return 0;
    int failed;
    if (key < SMALL)
        failed = keys_put_bit(k, key);
    else
        failed = keys_put_cell(k, key);
    if (failed)
        return -1;
    k->n++;
    return 1;
}

void fan_keys_remove(fan_keys *k, int64_t key)
{
    assert(fan_keys_has(k, key));
    k->n--;
    if (key < SMALL) {
        k->bits[key / 64] &= ~(UINT64_C(1) << key % 64);
        return;
    }
    /* A key that would no longer be found because of the hole moves into it. */
    size_t mask = k->cap - 1;
    size_t hole = keys_cell(k, key);
    for (size_t i = (hole + 1) & mask; k->cells[i] >= 0; i = (i + 1) & mask) {
        size_t way = (i - keys_home(k, k->cells[i])) & mask;
        if (way < ((i - hole) & mask))
            continue;
        k->cells[hole] = k->cells[i];
        hole = i;
    }
    k->cells[hole] = -1;
    k->hashed--;
}

/* ---- their order ---- */

typedef struct ranked {
    uint64_t key;
    uint32_t at;
} ranked;

/* Keys to sort: the first at `first`, each `stride` bytes after the one before. */
typedef struct key_list {
    const char *first;
    size_t stride;
    size_t n;
    int64_t least;
    uint64_t span; /* from the least to the largest */
} key_list;

static int64_t key_at(const key_list *keys, size_t i)
{
    int64_t key;
    memcpy(&key, keys->first + i * keys->stride, sizeof key);
    return key;
}

/* Dense keys: sorted by counting. */
static bool keys_order_dense(const key_list *keys, uint32_t *at)
{
    uint32_t *owner = fan_calloc(((size_t)keys->span + 1) * sizeof *owner);
    if (!owner)
        return false;
    for (size_t i = 0; i < keys->n; i++)
        owner[key_at(keys, i) - keys->least] = (uint32_t)i + 1;
    size_t k = 0;
    for (size_t i = 0; k < keys->n; i++) {
        if (owner[i])
            at[k++] = owner[i] - 1;
    }
    fan_free(owner);
    return true;
}

static bool keys_order_sparse(const key_list *keys, uint32_t *at)
{
    size_t n = keys->n;
    ranked *all = fan_alloc(n * sizeof *all);
    ranked *room = fan_alloc(n * sizeof *room);
    bool good = all && room;
    for (size_t i = 0; good && i < n; i++)
        all[i] = (ranked){(uint64_t)(key_at(keys, i) - keys->least), (uint32_t)i};
    if (good)
        fan_sort_digits(all, room, n, sizeof *all, offsetof(ranked, key));
    for (size_t i = 0; good && i < n; i++)
        at[i] = all[i].at;
    fan_free(all);
    fan_free(room);
    return good;
}

bool fan_keys_order(const int64_t *keys, size_t stride, size_t n, uint32_t *at)
{
    key_list list = {.first = (const char *)keys, .stride = stride, .n = n, .least = INT64_MAX};
    int64_t most = -1;
    if (n >= UINT32_MAX)
        return false;
    for (size_t i = 0; i < n; i++) {
        int64_t key = key_at(&list, i);
        if (key < list.least)
            list.least = key;
        if (key > most)
            most = key;
    }
    if (n)
        list.span = (uint64_t)(most - list.least);
    if (list.span / 8 < n)
        return keys_order_dense(&list, at);
    return keys_order_sparse(&list, at);
}
