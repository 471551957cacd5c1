/* The workers: each task once, whoever calls, however many at a time; after fork; begun late and
 * ended. */
#include "base/thread.h"
#include "base/workers.h"

#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define TASKS 300

typedef struct counts {
    atomic_int of[TASKS];
    long plain[TASKS]; /* written by the task alone, read by the caller behind it */
} counts;

static void count(void *ctx, size_t task)
{
    counts *c = ctx;
    atomic_fetch_add(&c->of[task], 1);
    c->plain[task] += (long)task + 1;
}

/* once: how many tasks were not done exactly once. */
static int wrong(size_t tasks)
{
    counts c = {0};
    int bad = 0;
    fan_workers_run(tasks, count, &c);
    for (size_t i = 0; i < TASKS; i++)
        bad += atomic_load(&c.of[i]) != (i < tasks) || c.plain[i] != (i < tasks ? (long)i + 1 : 0);
    return bad;
}

static void every_task_is_done_once(void)
{
    for (int threads = 1; threads <= 5; threads++) {
        fan_workers_set(threads);
        CHECK_INT(fan_workers_get(), threads);
        for (int round = 0; round < 200; round++)
            CHECK_INT(wrong((size_t)round % TASKS), 0);
        CHECK_INT(fan_workers_alive(), threads - 1);
    }
}

/* Tasks that wait for each other: they end only where as many threads as there are tasks are at
 * work, on one core,
 * too. */
typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t all_here;
    unsigned here, due, round;
} meeting;

static void meet(void *ctx, size_t task)
{
    meeting *m = ctx;
    (void)task;
    pthread_mutex_lock(&m->lock);
    unsigned round = m->round;
    if (++m->here == m->due) {
        m->here = 0;
        m->round++;
        pthread_cond_broadcast(&m->all_here);
    }
    while (m->round == round)
        pthread_cond_wait(&m->all_here, &m->lock);
    pthread_mutex_unlock(&m->lock);
}

static void helpers_help(void)
{
    for (unsigned threads = 2; threads <= 5; threads++) {
        meeting m = {.due = threads};
        CHECK_INT(pthread_mutex_init(&m.lock, NULL), 0);
        CHECK_INT(pthread_cond_init(&m.all_here, NULL), 0);
        fan_workers_set((int)threads);
        for (int round = 0; round < 50; round++)
            fan_workers_run(threads, meet, &m);
        CHECK_INT((int)m.round, 50);
    }
}

static void *call_often(void *ctx)
{
    atomic_int *bad = ctx;
    for (int round = 0; round < 200; round++)
        atomic_fetch_add(bad, wrong(40));
    return NULL;
}

static void several_callers_at_once(void)
{
    pthread_t t[4];
    atomic_int bad = 0;
    fan_workers_set(3);
    for (int i = 0; i < 4; i++)
        CHECK_INT(pthread_create(&t[i], NULL, call_often, &bad), 0);
    for (int round = 0; round < 20; round++) /* meanwhile the number changes */
        fan_workers_set(1 + round % 4);
    for (int i = 0; i < 4; i++)
        CHECK_INT(pthread_join(t[i], NULL), 0);
    CHECK_INT(atomic_load(&bad), 0);
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
/* The thread sanitizer ends such a child; in it the allocator of the address sanitizer may be
 * locked for ever, by the thread beside. */
static void a_child_of_a_fork_beside_the_first_start_ends(void)
{
}
#else
static atomic_bool forking, helped, served;

static void fork_begins(void)
{
    atomic_store(&forking, true);
    for (int i = 0; i < 1000000 && !atomic_load(&helped); i++)
        sched_yield(); /* bounded: the thread may need what this fork holds */
}

static void fork_is_over(void)
{
}

static void serve(void *arg)
{
    atomic_store((atomic_bool *)arg, true);
}

static void *start_beside(void *arg)
{
    while (!atomic_load(&forking))
        sched_yield();
    *(int *)arg = wrong(TASKS);
    atomic_store(&helped, true);
    return NULL;
}

static void a_child_of_a_fork_beside_the_first_start_ends(void)
{
    static fan_fork slow = {.lock = fork_begins, .unlock = fork_is_over};
    static fan_thread_job job = {.work = serve, .arg = &served};
    pthread_t t;
    int bad = -1;
    int status = -1;
    CHECK(fan_fork_add(&slow) == 0);
    fan_workers_set(3);
    CHECK_INT(pthread_create(&t, NULL, start_beside, &bad), 0);
    pid_t child = fork();
    if (child == 0) {
        exit(fan_thread_job_start(&job) ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_INT(pthread_join(t, NULL), 0);
    CHECK_INT(bad, 0);
    CHECK(atomic_load(&helped));
    fan_workers_set(1);
}
#endif

#if defined(__SANITIZE_THREAD__)
static void a_child_starts_its_own(void) /* the sanitizer ends it */
{
    fan_workers_set(1);
}
#else
static void a_child_starts_its_own(void)
{
    fan_workers_set(3);
    CHECK_INT(wrong(TASKS), 0);
    CHECK_INT(fan_workers_alive(), 2);
    pid_t child = fork();
    if (child == 0)
        _exit(fan_workers_alive() == 0 && wrong(TASKS) == 0 && fan_workers_alive() == 2 ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_INT(wrong(TASKS), 0);
    fan_workers_set(1);
    CHECK_INT(fan_workers_alive(), 0);
}
#endif

int main(void)
{
    CHECK_INT(fan_workers_alive(), 0);
    fan_workers_set(0);
    CHECK(fan_workers_get() >= 1 && fan_workers_get() <= 8);
    CHECK_INT(fan_workers_alive(), 0); /* nothing is started unasked */
    a_child_of_a_fork_beside_the_first_start_ends();
    every_task_is_done_once();
    helpers_help();
    several_callers_at_once();
    a_child_starts_its_own();
    fan_workers_set(3);
    CHECK_INT(wrong(TASKS), 0); /* helpers are alive at exit */
    return check_done();
}
