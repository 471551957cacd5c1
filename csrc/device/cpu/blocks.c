#include "device/cpu/blocks.h"

#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/search.h"
#include "base/thread.h"

#define UNIT 64

typedef struct block {
    fan_extent at;
    char *data;
    size_t bytes;
    bool live; /* used by an array */
} block;

struct fan_blocks {
    atomic_size_t refs;
    fan_mutex lock; /* guards all below */
    block *at;      /* by address */
    size_t n, cap, live;
    uint64_t bytes;
};

fan_blocks *fan_blocks_new(void)
{
    fan_blocks *b = fan_calloc(sizeof *b);
    if (b && fan_mutex_init(&b->lock) < 0) {
        fan_free(b);
        return NULL;
    }
    if (b)
        atomic_init(&b->refs, 1);
    return b;
}

void fan_blocks_drop(fan_blocks *b)
{
    if (!b || atomic_fetch_sub_explicit(&b->refs, 1, memory_order_acq_rel) > 1)
        return;
    for (size_t i = 0; i < b->n; i++)
        fan_free_data(b->at[i].data, b->at[i].bytes);
    fan_free(b->at);
    fan_mutex_fini(&b->lock);
    fan_free(b);
}

/* block_before: returns how many blocks begin at an address or before it. */
static size_t block_before(const fan_blocks *b, const void *data)
{
    return fan_search_end(b->at, b->n, sizeof *b->at, offsetof(block, at.first),
                          fan_extent_flat(data, 1).first);
}

static void block_release(fan_storage *s)
{
    fan_blocks *b = s->ctx;
    fan_mutex_lock(&b->lock);
    size_t i = block_before(b, s->data);
    b->at[i - 1].live = false;
    b->live--;
    fan_mutex_unlock(&b->lock);
    fan_blocks_drop(b);
}

/* block_reuse: returns the smallest free block that fits, the lowest of equals; NULL: none. */
static block *block_reuse(fan_blocks *b, size_t n)
{
    block *best = NULL;
    for (size_t i = 0; i < b->n; i++) {
        block *one = &b->at[i];
        if ((!one->live || FAN_FAULT(BLOCK_GIVEN_TWICE)) && one->bytes >= n &&
            one->bytes / 2 <= n && (!best || one->bytes < best->bytes))
            best = one;
    }
    return best;
}

static block *block_new(fan_blocks *b, size_t n)
{
    if (fan_grow((void **)&b->at, &b->cap, b->n + 1, sizeof *b->at) < 0)
        return NULL;
    char *data = fan_alloc_data(n);
    if (!data)
        return NULL;
    size_t i = block_before(b, data);
    memmove(&b->at[i + 1], &b->at[i], (b->n - i) * sizeof *b->at);
    b->at[i] = (block){.at = fan_extent_flat(data, n), .data = data, .bytes = n};
    b->n++;
    b->bytes += n;
    return &b->at[i];
}

fan_storage *fan_blocks_storage(fan_blocks *b, size_t n)
{
    size_t whole;
    if (__builtin_add_overflow(n ? n : 1, (size_t)UNIT - 1, &whole))
        return NULL;
    whole -= whole % UNIT;
    fan_storage *s = fan_storage_wrap(NULL, n, block_release, b);
    if (!s)
        return NULL;
    fan_mutex_lock(&b->lock);
    block *one = block_reuse(b, whole);
    if (!one)
        one = block_new(b, whole);
    if (one) {
        s->data = one->data;
        b->live += !one->live;
        one->live = true;
        atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
    }
    fan_mutex_unlock(&b->lock);
    if (one)
        return s;
    s->release = NULL;
    fan_storage_drop(s);
    return NULL;
}

bool fan_blocks_have(fan_blocks *b, const void *data, size_t bytes)
{
    fan_mutex_lock(&b->lock);
    size_t i = block_before(b, data);
    const block *one = i ? &b->at[i - 1] : NULL;
    bool has = one && one->live && fan_extent_within(fan_extent_flat(data, bytes), one->at);
    fan_mutex_unlock(&b->lock);
    return has;
}

size_t fan_blocks_live(fan_blocks *b)
{
    fan_mutex_lock(&b->lock);
    size_t live = b->live;
    fan_mutex_unlock(&b->lock);
    return live;
}

uint64_t fan_blocks_bytes(fan_blocks *b)
{
    fan_mutex_lock(&b->lock);
    uint64_t bytes = b->bytes;
    fan_mutex_unlock(&b->lock);
    return bytes;
}

void fan_blocks_poison(fan_blocks *b)
{
    fan_mutex_lock(&b->lock);
    for (size_t i = 0; i < b->n; i++)
        memset(b->at[i].data, FAN_CPU_POISON, b->at[i].bytes);
    fan_mutex_unlock(&b->lock);
}
