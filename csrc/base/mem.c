/* Allocation, counted and made to fail by tests; memory for array data; lists that grow; and the
 * size of the second-level cache. */
#define _DEFAULT_SOURCE /* _SC_LEVEL2_CACHE_SIZE */

#include "base/mem.h"

#include "base/pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#ifdef FAN_TEST
#include <stdatomic.h>
#endif
#include <stdbool.h>
#include <stdlib.h>

#define DATA_ALIGN 64

#ifdef FAN_TEST
static atomic_int_fast64_t made, freed, refused;

/* Planned failures: `armed` is read first. */
static atomic_bool armed;
static atomic_int_fast64_t left_to_pass, left_to_fail;

void fan_mem_fail_at(int64_t skip, int64_t count)
{
    atomic_store(&armed, false);
    atomic_store(&left_to_pass, skip);
    atomic_store(&left_to_fail, count);
    atomic_store(&armed, skip >= 0 && count != 0);
}

static bool fails_on_purpose(void)
{
    if (!atomic_load_explicit(&armed, memory_order_relaxed))
        return false;
    if (atomic_fetch_sub(&left_to_pass, 1) > 0)
        return false;
    if (atomic_load(&left_to_fail) >= 0 && atomic_fetch_sub(&left_to_fail, 1) <= 0) {
        atomic_store(&armed, false);
        return false;
    }
    atomic_fetch_add(&refused, 1);
    return true;
}

static void *count_new(void *p)
{
    if (p)
        atomic_fetch_add_explicit(&made, 1, memory_order_relaxed);
    return p;
}

static void count_gone(const void *p)
{
    if (p)
        atomic_fetch_add_explicit(&freed, 1, memory_order_relaxed);
}

fan_mem_counts fan_mem_get(void)
{
    /* Reading `freed` first keeps live from being negative. */
    int64_t gone = atomic_load(&freed);
    fan_mem_counts c = {.total = atomic_load(&made), .failed = atomic_load(&refused)};
    c.live = c.total - gone;
    return c;
}
#else
static bool fails_on_purpose(void)
{
    return false;
}
static void *count_new(void *p)
{
    return p;
}
static void count_gone(const void *p)
{
    (void)p;
}
#endif

/* at_least_1: an allocation of no bytes may be NULL, which means out of memory. */
static size_t at_least_1(size_t n)
{
    return n ? n : 1;
}

/* must_fail: true if no object can be that large, or if a test makes this allocation fail. */
static bool must_fail(size_t n)
{
    return n > PTRDIFF_MAX || fails_on_purpose();
}

void *fan_alloc(size_t n)
{
    if (must_fail(n))
        return NULL;
    return count_new(malloc(at_least_1(n)));
}

void *fan_calloc(size_t n)
{
    if (must_fail(n))
        return NULL;
    return count_new(calloc(1, at_least_1(n)));
}

void *fan_realloc(void *p, size_t n)
{
    if (must_fail(n))
        return NULL;
    void *q = realloc(p, at_least_1(n));
    return p ? q : count_new(q);
}

void fan_free(void *p)
{
    count_gone(p);
    free(p);
}

void *fan_alloc_data(size_t n)
{
    size_t whole;
    if (__builtin_add_overflow(at_least_1(n), (size_t)DATA_ALIGN - 1, &whole))
        return NULL;
    if (must_fail(whole))
        return NULL;
    if (n >= FAN_POOL_FROM)
        return count_new(fan_pool_take(n));
    return count_new(aligned_alloc(DATA_ALIGN, whole - whole % DATA_ALIGN));
}

void fan_free_data(void *p, size_t n)
{
    if (p && n >= FAN_POOL_FROM) {
        count_gone(p);
        fan_pool_give(p, n);
    } else {
        fan_free(p);
    }
}

int fan_grow(void **items, size_t *cap, size_t want, size_t size)
{
    if (want <= *cap)
        return 0;
    size_t next = *cap + *cap / 2;
    size_t bytes;
    if (next < want)
        next = want;
    if (next < 8)
        next = 8;
    if (__builtin_mul_overflow(next, size, &bytes))
        return -1;
    void *p = fan_realloc(*items, bytes);
    if (!p)
        return -1;
    *items = p;
    *cap = next;
    return 0;
}

#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#define UNKNOWN (UINT64_C(1) << 20)
#define LEAST (UINT64_C(64) << 10)
#define MOST (UINT64_C(64) << 20)

static pthread_once_t cache_once = PTHREAD_ONCE_INIT;
static uint64_t answer;

static bool cache_sensible(uint64_t n)
{
    return n >= LEAST && n <= MOST;
}

/* cache_of_file: for libcs whose sysconf does not give it: Linux shows it in a file ("2048K"). */
static uint64_t cache_of_file(void)
{
    unsigned long long shown = 0;
    char unit = 0;
    FILE *f = fopen("/sys/devices/system/cpu/cpu0/cache/index2/size", "re");
    if (!f)
        return 0;
    int got = fscanf(f, "%8llu%c", &shown, &unit);
    fclose(f);
    if (got < 1)
        return 0;
    if (unit == 'K')
        return shown << 10;
    if (unit == 'M')
        return shown << 20;
    return shown;
}

static void cache_query(void)
{
    uint64_t n = 0;
#ifdef __APPLE__
    size_t size = sizeof n;
    if (sysctlbyname("hw.l2cachesize", &n, &size, NULL, 0) != 0)
        n = 0;
#elif defined(_SC_LEVEL2_CACHE_SIZE)
    long said = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (said > 0)
        n = (uint64_t)said;
#endif
    if (!cache_sensible(n))
        n = cache_of_file();
    answer = cache_sensible(n) ? n : UNKNOWN;
}

uint64_t fan_cache_bytes(void)
{
    pthread_once(&cache_once, cache_query);
    return answer;
}
