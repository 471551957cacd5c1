/* Design: held blocks are kept in a table, oldest first, so giving a block back touches only the
 * table, and a held block can be poisoned as a whole. The size of a block follows from the
 * requested bytes, so nothing is stored beside live data either.
 *
 * The offset of the data in its first page varies from block to block: arrays that all begin at the
 * same offset would compete for the same sets of the L1 cache (nine of them for eight ways). */
#define _DEFAULT_SOURCE /* madvise, MAP_ANONYMOUS */
#include "base/pool.h"

#include "base/thread.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#endif
#endif
#ifdef ASAN
#include <sanitizer/asan_interface.h>
#define HIDE(p, n) __asan_poison_memory_region(p, n)
#define SHOW(p, n) __asan_unpoison_memory_region(p, n)
#else
#define HIDE(p, n) ((void)(p), (void)(n))
#define SHOW(p, n) ((void)(p), (void)(n))
#endif

#define PAGE ((size_t)4096) /* no supported system has smaller pages */
#define ALIGN ((size_t)64)
/* From this size on huge pages are requested, as NumPy does */
#define HUGE_FROM ((size_t)4 << 20)
#define MOST_HELD 1024
#define MOST_LIMIT ((size_t)1 << 30)
#define PATTERN UINT64_C(0xfa1dfa1dfa1dfa1d)

typedef struct block {
    char *base;
    size_t size;
    bool filled; /* with the pattern */
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Guarded by `lock`. */
static block held[MOST_HELD]; /* oldest first */
static fan_pool_counts now;
static unsigned next_offset;
static bool poison
#ifdef FAN_TEST
    = true
#endif
    ;

static void pool_enter(void)
{
    pthread_mutex_lock(&lock);
}

static void pool_leave(void)
{
    pthread_mutex_unlock(&lock);
}

/* A child may be forked while another thread is in a function of this file: it inherits a free lock
 * and a consistent table. */
static fan_fork pool_fork = {.lock = pool_enter, .unlock = pool_leave};

static void pool_begin(void)
{
    long pages = sysconf(_SC_PHYS_PAGES);
    long page = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page > 0)
        now.limit = (size_t)pages / 8 * (size_t)page;
    if (now.limit > MOST_LIMIT)
        now.limit = MOST_LIMIT;
    (void)fan_fork_add(&pool_fork);
}

/* pool_size_of: returns the size of the block for n bytes: n, rounded up to an eighth of the power
 * of two below it, plus a page for the offset. */
static size_t pool_size_of(size_t n)
{
    size_t step = (size_t)1 << (60 - __builtin_clzll((unsigned long long)n));
    size_t size;
    if (__builtin_add_overflow(n, step - 1, &size))
        return 0;
    if (__builtin_add_overflow(size - size % step, PAGE, &size))
        return 0;
    return size;
}

static char *pool_fresh(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (size >= HUGE_FROM)
        (void)madvise(p, size, MADV_HUGEPAGE); /* advisory: failure changes nothing */
#endif
    return p;
}

static void to_system(const block *b)
{
    SHOW(b->base, b->size);
    (void)munmap(b->base, b->size);
}

/* pool_remove_at: takes a block out of the table. Call with the lock held. */
static block pool_remove_at(size_t i)
{
    block b = held[i];
    now.blocks--;
    now.held -= b.size;
    memmove(held + i, held + i + 1, (now.blocks - i) * sizeof *held);
    return b;
}

/* pool_touched: reports to the scheduler that a step reads or changes the held blocks
 * (fan_pool_get, fan_pool_trim). */
static void pool_touched(fan_sched_mode mode)
{
    if (fan_sched_active())
        fan_sched_access(FAN_THING_POOL, 0, mode);
}

/* pool_oldest: takes out the oldest block if more than `keep` bytes are held. Call without the
 * lock. */
static bool pool_oldest(size_t keep, block *b)
{
    pool_enter();
    bool some = now.blocks > 0 && now.held > keep;
    if (some)
        *b = pool_remove_at(0);
    pool_leave();
    return some;
}

static size_t pool_shrink(size_t keep)
{
    size_t gone = 0;
    block b;
    while (pool_oldest(keep, &b)) {
        to_system(&b);
        gone += b.size;
    }
    return gone;
}

/* pool_check: ends the process if the pattern of a held block was overwritten. */
static void pool_check(const block *b)
{
    const uint64_t *word = (const uint64_t *)(const void *)b->base;
    for (size_t i = 0; i < (b->size - PAGE) / sizeof *word; i++) {
        if (word[i] == PATTERN)
            continue;
        fprintf(stderr, "fanin: memory at %p was written to after its array had been freed\n",
                (const void *)&word[i]);
        abort();
    }
}

void *fan_pool_take(size_t n)
{
    block b = {.base = NULL, .size = pool_size_of(n)};
    if (b.size == 0)
        return NULL;
    pthread_once(&once, pool_begin);
    pool_touched(FAN_SCHED_COUNT);
    pool_enter();
    for (size_t i = now.blocks; i-- > 0;) {
        if (held[i].size == b.size) { /* the newest: it may still be in a cache */
            b = pool_remove_at(i);
            break;
        }
    }
    if (b.base)
        now.hits++;
    else
        now.misses++;
    size_t offset = next_offset++ * 11 % (PAGE / ALIGN) * ALIGN;
    pool_leave();

    if (b.base) {
        SHOW(b.base, b.size);
        if (b.filled)
            pool_check(&b);
    } else {
        b.base = pool_fresh(b.size);
        if (!b.base && pool_shrink(0) > 0)
            b.base = pool_fresh(b.size);
        if (!b.base)
            return NULL;
    }
    HIDE(b.base, offset);
    HIDE(b.base + offset + n, b.size - offset - n);
    return b.base + offset;
}

void fan_pool_give(void *p, size_t n)
{
    size_t offset = (uintptr_t)p % PAGE;
    block b = {.base = (char *)p - offset, .size = pool_size_of(n)};
    pool_touched(FAN_SCHED_COUNT);
    pool_enter();
    b.filled = poison && b.size <= now.limit;
    pool_leave();
    SHOW(b.base, b.size);
    if (b.filled) {
        uint64_t *word = (uint64_t *)(void *)b.base;
        for (size_t i = 0; i < (b.size - PAGE) / sizeof *word; i++)
            word[i] = PATTERN;
    }
    HIDE(b.base, b.size);
    bool done = false;
    while (!done) {
        block over = {.base = NULL};
        pool_enter();
        bool fits = now.blocks < MOST_HELD && now.held + b.size <= now.limit;
        if (b.size > now.limit) {
            over = b;
            done = true;
        } else if (fits) {
            held[now.blocks++] = b;
            now.held += b.size;
            if (now.held > now.peak)
                now.peak = now.held;
            done = true;
        } else {
            over = pool_remove_at(0);
        }
        pool_leave();
        if (over.base)
            to_system(&over);
    }
}

void fan_pool_set_limit(size_t bytes)
{
    pthread_once(&once, pool_begin);
    pool_touched(FAN_SCHED_WRITE);
    pool_enter();
    now.limit = bytes;
    pool_leave();
    pool_shrink(bytes);
}

size_t fan_pool_trim(void)
{
    pool_touched(FAN_SCHED_WRITE);
    return pool_shrink(0);
}

fan_pool_counts fan_pool_get(void)
{
    pthread_once(&once, pool_begin);
    pool_touched(FAN_SCHED_DECIDE);
    pool_enter();
    fan_pool_counts c = now;
    pool_leave();
    return c;
}

void fan_pool_set_poison(bool on)
{
    pool_enter();
    poison = on;
    pool_leave();
}
