#include "base/mem.h"

#include "check.h"

#include <pthread.h>

static void every_block_is_counted_once(void)
{
    fan_mem_counts before = fan_mem_get();
    void *a = fan_alloc(0);
    void *b = fan_calloc(64);
    void *c = fan_realloc(NULL, 8);
    void *d = fan_alloc_data(100);
    CHECK(a && b);
    CHECK(c && d);
    CHECK_INT(fan_mem_get().live - before.live, 4);
    for (int i = 0; i < 64; i++)
        CHECK(((char *)b)[i] == 0);
    c = fan_realloc(c, 5000);
    CHECK_INT(fan_mem_get().live - before.live, 4);
    fan_free(a);
    fan_free(b);
    fan_free(c);
    fan_free_data(d, 100);
    fan_free(NULL);
    fan_free_data(NULL, 1);
    fan_free_data(NULL, (size_t)1 << 30);
    CHECK_INT(fan_mem_get().live, before.live);
    CHECK_INT(fan_mem_get().total - before.total, 4);
}

static void data_is_aligned(void)
{
    size_t sizes[] = {0, 1, 63, 64, 65, 4096, (size_t)5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *p = fan_alloc_data(sizes[i]);
        CHECK(p && (uintptr_t)p % 64 == 0);
        if (p && sizes[i])
            p[0] = p[sizes[i] - 1] = 1;
        fan_free_data(p, sizes[i]);
    }
    CHECK(fan_alloc_data(SIZE_MAX) == NULL);
    CHECK(fan_alloc_data(SIZE_MAX - 63) == NULL);
    CHECK(fan_alloc(SIZE_MAX) == NULL);
    CHECK(fan_realloc(NULL, SIZE_MAX / 2 + 1) == NULL);
}

static void the_nth_allocation_fails(void)
{
    int64_t failed = fan_mem_get().failed;
    int64_t live = fan_mem_get().live;
    void *p[6];
    fan_mem_fail_at(2, 2);
    for (int i = 0; i < 6; i++) {
        if (i == 3) {
            p[i] = fan_alloc_data(8);
        } else if (i == 2) {
            p[i] = fan_realloc(NULL, 8);
        } else {
            p[i] = i % 2 ? fan_calloc(8) : fan_alloc(8);
        }
        CHECK((p[i] == NULL) == (i == 2 || i == 3));
    }
    CHECK_INT(fan_mem_get().failed - failed, 2);
    fan_mem_fail_at(0, -1);
    for (int i = 0; i < 5; i++)
        CHECK(fan_alloc(1) == NULL);
    void *kept = fan_realloc(p[0], 100); /* fails: p[0] stays valid */
    CHECK(kept == NULL);
    fan_mem_fail_at(-1, 0);
    for (int i = 0; i < 6; i++)
        fan_free(p[i]);
    CHECK_INT(fan_mem_get().failed - failed, 8);
    CHECK_INT(fan_mem_get().live, live);
    p[0] = fan_alloc(1);
    CHECK(p[0] != NULL);
    fan_free(p[0]);
}

static void a_vector_grows_or_stays(void)
{
    int *items = NULL;
    size_t cap = 0;
    for (size_t n = 1; n < 1000; n++) {
        CHECK_INT(fan_grow((void **)&items, &cap, n, sizeof *items), 0);
        CHECK(cap >= n);
        items[n - 1] = (int)n;
    }
    for (int n = 1; n < 1000; n++)
        CHECK_INT(items[n - 1], n);
    size_t was = cap;
    int *at = items;
    CHECK_INT(fan_grow((void **)&items, &cap, SIZE_MAX / 2, sizeof *items), -1);
    fan_mem_fail_at(0, -1);
    CHECK_INT(fan_grow((void **)&items, &cap, cap + 1, sizeof *items), -1);
    CHECK_INT(fan_grow((void **)&items, &cap, cap, sizeof *items), 0);
    fan_mem_fail_at(-1, 0);
    CHECK(items == at && cap == was);
    fan_free(items);
}

static void *churn(void *unused)
{
    (void)unused;
    for (int i = 0; i < 10000; i++)
        fan_free(fan_realloc(fan_alloc((size_t)i % 100), 50));
    return NULL;
}

static void counts_are_exact_across_threads(void)
{
    fan_mem_counts before = fan_mem_get();
    pthread_t t[2];
    for (int i = 0; i < 2; i++)
        CHECK_INT(pthread_create(&t[i], NULL, churn, NULL), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    CHECK_INT(fan_mem_get().live, before.live);
    CHECK_INT(fan_mem_get().total - before.total, 20000);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    every_block_is_counted_once();
    data_is_aligned();
    the_nth_allocation_fails();
    a_vector_grows_or_stays();
    counts_are_exact_across_threads();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
