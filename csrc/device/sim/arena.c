#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "device/sim/arena.h"

#include "base/mem.h"
#include "base/search.h"

#include <assert.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

static bool round_up(size_t bytes, size_t *out)
{
    size_t whole;
    if (__builtin_add_overflow(bytes ? bytes : 1, (size_t)FAN_ARENA_ALIGN - 1, &whole))
        return false;
    *out = whole - whole % FAN_ARENA_ALIGN;
    return true;
}

int fan_arena_init(fan_arena *a, size_t bytes, bool poison)
{
    memset(a, 0, sizeof *a);
    if (!round_up(bytes, &a->bytes))
        return -1;
    void *p = mmap(NULL, a->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        a->bytes = 0;
        return -1;
    }
    a->base = (uintptr_t)p;
    a->poison = poison;
    return 0;
}

void fan_arena_fini(fan_arena *a)
{
    if (a->base)
        (void)munmap((void *)a->base, a->bytes);
    fan_free(a->blocks);
    memset(a, 0, sizeof *a);
}

static void arena_spoil(const fan_arena *a, uintptr_t lo, uintptr_t hi)
{
    if (a->poison)
        memset((void *)lo, FAN_POISON, hi - lo);
}

static uintptr_t arena_top(const fan_arena *a) { return a->n ? a->blocks[a->n - 1].hi : a->base; }

fan_block *fan_arena_alloc(fan_arena *a, size_t bytes, bool *host)
{
    size_t need;
    *host = false;
    if (!round_up(bytes, &need) || need > a->bytes)
        return NULL;
    if (fan_grow((void **)&a->blocks, &a->cap, a->n + 1, sizeof *a->blocks)) {
        *host = true;
        return NULL;
    }
    size_t i = a->hint, first = SIZE_MAX;
    for (; i < a->n; i++) {
        const fan_block *b = &a->blocks[i];
        if (b->used)
            continue;
        if (first == SIZE_MAX)
            first = i;
        if (b->hi - b->lo >= need)
            break;
    }
    if (i == a->n) {
        uintptr_t lo = arena_top(a), was = lo;
        bool last = a->n > 0 && !a->blocks[a->n - 1].used; /* free and too small: it grows */
        if (last)
            lo = a->blocks[a->n - 1].lo;
        if (a->base + a->bytes - lo < need)
            return NULL;
        i = last ? a->n - 1 : a->n++;
        a->blocks[i] = (fan_block){.lo = lo, .hi = lo + need};
        arena_spoil(a, was, lo + need);
    } else if (a->blocks[i].hi - a->blocks[i].lo > need) {
        memmove(&a->blocks[i + 1], &a->blocks[i], (a->n - i) * sizeof *a->blocks);
        a->n++;
        a->blocks[i].hi = a->blocks[i + 1].lo = a->blocks[i].lo + need;
    }
    fan_block *b = &a->blocks[i];
    b->used = true;
    b->automatic = false;
    b->name = 0;
    a->hint = first == SIZE_MAX || first == i ? i + 1 : first;
    a->live++;
    a->in_use += need;
    return b;
}

/* arena_at: returns the index of the block that contains `address`; a->n if none. */
static size_t arena_at(const fan_arena *a, uintptr_t address)
{
    size_t i = fan_search_end(a->blocks, a->n, sizeof *a->blocks, offsetof(fan_block, hi), address);
    return i < a->n && a->blocks[i].lo <= address ? i : a->n;
}

fan_block *fan_arena_find(fan_arena *a, uintptr_t address)
{
    size_t i = arena_at(a, address);
    return i < a->n && a->blocks[i].used ? &a->blocks[i] : NULL;
}

void fan_arena_free(fan_arena *a, uintptr_t lo)
{
    size_t i = arena_at(a, lo);
    assert(i < a->n && a->blocks[i].used && a->blocks[i].lo == lo);
    if (i >= a->n || !a->blocks[i].used)
        return;
    fan_block *b = &a->blocks[i];
    arena_spoil(a, b->lo, b->hi);
    b->used = false;
    a->live--;
    a->in_use -= b->hi - b->lo;
    /* Merge free neighbours. */
    size_t from = i > 0 && !a->blocks[i - 1].used ? i - 1 : i;
    size_t to = i + 1 < a->n && !a->blocks[i + 1].used ? i + 1 : i;
    if (to > from) {
        a->blocks[from].hi = a->blocks[to].hi;
        memmove(&a->blocks[from + 1], &a->blocks[to + 1], (a->n - to - 1) * sizeof *a->blocks);
        a->n -= to - from;
    }
    if (from < a->hint)
        a->hint = from;
}

#ifdef FAN_TEST
void fan_arena_reset(fan_arena *a)
{
    /* All memory that was ever handed out becomes one free block: only memory beyond it is poisoned on allocation. */
    uintptr_t hi = arena_top(a);
    a->n = 0;
    if (hi > a->base && a->poison) {
        arena_spoil(a, a->base, hi);
        a->blocks[a->n++] = (fan_block){.lo = a->base, .hi = hi};
    }
    a->hint = a->live = a->in_use = 0;
}
#endif
