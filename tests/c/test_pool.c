/* The pool of large blocks: what is given back comes again, and never more than one owner has
 * it. */
#define _DEFAULT_SOURCE
#include "base/mem.h"
#include "base/pool.h"

#include "check.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define MB ((size_t)1 << 20)

static uintptr_t page_of(const void *p)
{
    return (uintptr_t)p / 4096;
}

static void what_is_given_back_comes_again(void)
{
    fan_pool_trim();
    fan_pool_counts before = fan_pool_get();
    char *a = fan_alloc_data(3 * MB);
    char *b = fan_alloc_data(3 * MB);
    CHECK(a && (uintptr_t)a % 64 == 0);
    CHECK(b && (uintptr_t)b % 64 == 0);
    memset(a, 1, 3 * MB);
    memset(b, 2, 3 * MB);
    CHECK(a[0] == 1 && a[3 * MB - 1] == 1);
    uintptr_t was_a = page_of(a);
    uintptr_t was_b = page_of(b);
    fan_free_data(a, 3 * MB);
    fan_free_data(b, 3 * MB);
    CHECK_INT(fan_pool_get().blocks, 2);
    CHECK(fan_pool_get().held >= 6 * MB && fan_pool_get().held < 7 * MB);
    CHECK(fan_pool_get().peak >= fan_pool_get().held);
    /* the newest first; of another size in the same eighth too; a smaller or larger one is another
     * block */
    b = fan_alloc_data(3 * MB - 100000);
    CHECK(page_of(b) == was_b);
    a = fan_alloc_data(3 * MB);
    CHECK(page_of(a) == was_a);
    fan_free_data(a, 3 * MB);
    char *c = fan_alloc_data(2 * MB);
    char *d = fan_alloc_data(4 * MB);
    CHECK(page_of(c) != was_a && page_of(d) != was_a);
    fan_pool_counts after = fan_pool_get();
    CHECK_INT(after.hits - before.hits, 2);
    CHECK_INT(after.misses - before.misses, 4);
    fan_free_data(b, 3 * MB - 100000);
    fan_free_data(c, 2 * MB);
    fan_free_data(d, 4 * MB);
    size_t had = fan_pool_get().held;
    CHECK(had > 12 * MB);
    CHECK_INT(fan_pool_trim(), had);
    CHECK_INT(fan_pool_get().held, 0);
    CHECK_INT(fan_pool_trim(), 0);
}

static void every_size_has_room(void)
{
    for (size_t n = MB; n < 40 * MB; n += n / 7 + 4099) {
        char *p = fan_alloc_data(n);
        CHECK(p && (uintptr_t)p % 64 == 0);
        if (!p)
            continue;
        p[0] = p[n - 1] = p[n / 2] = 7;
        fan_free_data(p, n);
        char *q = fan_alloc_data(n - n / 50);
        fan_free_data(q, n - n / 50);
    }
    CHECK(fan_pool_take(SIZE_MAX - 5) == NULL);
    CHECK(fan_pool_take((size_t)PTRDIFF_MAX) == NULL);
    fan_pool_trim();
}

static void the_limit_is_held_and_the_oldest_go_first(void)
{
    size_t was = fan_pool_get().limit;
    char *p[6];
    uintptr_t page[6];
    CHECK(was > 0 && was <= (size_t)1 << 30);
    fan_pool_trim();
    fan_pool_set_limit(10 * MB);
    for (int i = 0; i < 6; i++) {
        p[i] = fan_alloc_data(3 * MB);
        page[i] = page_of(p[i]);
    }
    for (int i = 0; i < 6; i++) {
        fan_free_data(p[i], 3 * MB);
        CHECK(fan_pool_get().held <= 10 * MB);
    }
    CHECK_INT(fan_pool_get().blocks, 3);
    for (int i = 5; i > 2; i--) { /* the three newest are there */
        p[i] = fan_alloc_data(3 * MB);
        CHECK(page_of(p[i]) == page[i]);
    }
    CHECK_INT(fan_pool_get().blocks, 0);
    for (int i = 3; i < 6; i++)
        fan_free_data(p[i], 3 * MB);
    char *large = fan_alloc_data(11 * MB); /* larger than all that may be held */
    fan_free_data(large, 11 * MB);
    CHECK_INT(fan_pool_get().blocks, 3);
    fan_pool_set_limit(4 * MB);
    CHECK_INT(fan_pool_get().blocks, 1);
    fan_pool_set_limit(0);
    CHECK_INT(fan_pool_get().held, 0);
    large = fan_alloc_data(2 * MB);
    fan_free_data(large, 2 * MB);
    CHECK_INT(fan_pool_get().held, 0);
    /* no more blocks than the table has room for */
    fan_pool_set_limit(SIZE_MAX);
    static char *many[1100];
    for (int i = 0; i < 1100; i++)
        many[i] = fan_alloc_data(MB);
    fan_pool_set_poison(false);
    for (int i = 0; i < 1100; i++)
        fan_free_data(many[i], MB);
    fan_pool_set_poison(true);
    CHECK(fan_pool_get().blocks <= 1024 && fan_pool_get().blocks >= 1000);
    fan_pool_trim();
    fan_pool_set_limit(was);
}

static long faults(void)
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return use.ru_minflt;
}

static void a_second_use_faults_no_pages(void)
{
    fan_pool_set_poison(false);
    char *p = fan_alloc_data(3 * MB);
    long before = faults();
    memset(p, 1, 3 * MB);
    long fresh = faults() - before;
    for (int i = 0; i < 50; i++) {
        fan_free_data(p, 3 * MB);
        if (i == 0)
            before = faults();
        p = fan_alloc_data(3 * MB);
        memset(p, i, 3 * MB);
    }
    long again = faults() - before;
    CHECK(fresh >= 2);
    if (fresh > 500) /* small pages */
        CHECK(again < fresh / 4);
    fan_free_data(p, 3 * MB);
    fan_pool_set_poison(true);
}

static void refusals_count_on_every_way(void)
{
    int64_t live = fan_mem_get().live;
    int64_t total = fan_mem_get().total;
    char *p = fan_alloc_data(2 * MB);
    CHECK_INT(fan_mem_get().live, live + 1);
    fan_free_data(p, 2 * MB);
    CHECK_INT(fan_mem_get().live, live);
    fan_mem_fail_at(0, 1);
    CHECK(fan_alloc_data(2 * MB) == NULL); /* although one is held */
    fan_mem_fail_at(-1, 0);
    p = fan_alloc_data(2 * MB);
    CHECK(p != NULL);
    fan_free_data(p, 2 * MB);
    CHECK_INT(fan_mem_get().total, total + 2);
}

/* Threads take, sign and give back: nobody's block is another's. */
static void *signer(void *arg)
{
    unsigned seed = (unsigned)(uintptr_t)arg;
    uint64_t *mine[4] = {NULL};
    size_t size[4] = {0};
    intptr_t wrong = 0;
    for (int i = 0; i < 400; i++) {
        seed = seed * 1103515245u + 12345u;
        int k = seed >> 16 & 3;
        if (mine[k]) {
            size_t words = size[k] / 8;
            for (size_t w = 0; w < words; w += 1021)
                wrong += mine[k][w] != (uint64_t)(uintptr_t)arg;
            fan_free_data(mine[k], size[k]);
            mine[k] = NULL;
        } else {
            size[k] = MB + (seed >> 20 & 7) * 100000;
            mine[k] = fan_alloc_data(size[k]);
            for (size_t w = 0; w < size[k] / 8; w += 1021)
                mine[k][w] = (uintptr_t)arg;
        }
        if (i % 97 == 0)
            fan_pool_trim();
    }
    for (int k = 0; k < 4; k++)
        fan_free_data(mine[k], size[k]);
    return (void *)wrong;
}

static void threads_share_it(void)
{
    pthread_t t[4];
    size_t was = fan_pool_get().limit;
    fan_pool_set_poison(false); /* which takes long */
    fan_pool_set_limit(6 * MB);
    for (uintptr_t i = 0; i < 4; i++)
        CHECK_INT(pthread_create(&t[i], NULL, signer, (void *)(i + 1)), 0);
    for (int i = 0; i < 4; i++) {
        void *wrong;
        pthread_join(t[i], &wrong);
        CHECK_INT((intptr_t)wrong, 0);
    }
    CHECK(fan_pool_get().held <= 6 * MB);
    fan_pool_set_limit(was);
    fan_pool_set_poison(true);
    fan_pool_trim();
}

static atomic_bool stop;

static void *churn(void *unused)
{
    while (!stop)
        fan_free_data(fan_alloc_data(MB), MB);
    return unused;
}

/* Forked while another thread is inside: the child neither hangs nor sees a half-written table. */
static void a_child_goes_on(void)
{
    pthread_t t;
    fan_pool_set_poison(false);
    CHECK_INT(pthread_create(&t, NULL, churn, NULL), 0);
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            for (int k = 0; k < 20; k++) {
                char *p = fan_alloc_data(MB);
                if (!p)
                    _exit(1);
                memset(p, k, MB);
                fan_free_data(p, MB);
            }
            _exit(fan_pool_get().blocks ? 0 : 2);
        }
        int status = -1;
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK_INT(status, 0);
    }
    stop = true;
    pthread_join(t, NULL);
    fan_pool_set_poison(true);
    fan_pool_trim();
}

/* What is written to a held block ends the process, and says why. */
static void a_late_write_is_found(void)
{
    int pipes[2];
    char said[4096] = {0};
    CHECK_INT(pipe(pipes), 0);
    fflush(stderr);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], 2);
        close(pipes[0]);
        char *volatile p = fan_alloc_data(MB);
        memset(p, 0, MB);
        fan_free_data(p, MB);
        p[12345] = 1;
        p = fan_alloc_data(MB);
        _exit(0);
    }
    close(pipes[1]);
    for (size_t at = 0; at < sizeof said - 1;) {
        ssize_t got = read(pipes[0], said + at, sizeof said - 1 - at);
        if (got <= 0)
            break;
        at += (size_t)got;
    }
    close(pipes[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
    CHECK(strstr(said, "was written to after") || strstr(said, "use-after-poison"));
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    what_is_given_back_comes_again();
    every_size_has_room();
    the_limit_is_held_and_the_oldest_go_first();
    a_second_use_faults_no_pages();
    refusals_count_on_every_way();
    threads_share_it();
    a_child_goes_on();
    a_late_write_is_found();
    CHECK_INT(fan_mem_get().live, live);
    fan_pool_trim();
    return check_done();
}
