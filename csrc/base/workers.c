/* Design: one set of workers, one piece of work at a time. The thread that holds `turn` uses them;
 * other threads work alone. A piece of work is a counter of tasks from which all threads take the
 * next; a new value of `work` wakes the helpers. The caller waits until all joined helpers have
 * left, so its context may be on its stack.
 *
 *   caller   turn | new work, wake | takes tasks .. | closes, waits for helpers inside | frees turn
 *   helper          asleep         | joins: takes tasks .. | leaves, the last one wakes the caller
 *
 * The pool below serves jobs, each on a thread of its own.
 *
 * Pitfall: fork. The child has none of the threads, and they may have held the locks: everything is
 * initialized again. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/workers.h"

#include "base/thread.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif

#define DEFAULT_MOST 8

static void workers_at_exit(void);
static void workers_in_child(void);

static fan_fork workers_fork = {.child = workers_in_child};
/* the handlers of fork and exit are installed: without them no thread is started */
static bool prepared;

/* When the library is loaded: a thread that adds a handler waits for a fork, and would hold one of
 * the locks below. */
__attribute__((constructor)) static void workers_prepare(void)
{
    prepared = fan_fork_add(&workers_fork) == 0 && atexit(workers_at_exit) == 0;
}

/* workers_start: starts a thread that blocks all signals. */
static bool workers_start(pthread_t *thread, void *(*serve)(void *))
{
    sigset_t all, before;
    sigfillset(&all);
    /* the new thread inherits the mask */
    if (!prepared || pthread_sigmask(SIG_SETMASK, &all, &before))
        return false;
    bool good = pthread_create(thread, NULL, serve, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return good;
}

/* ---- helpers ---- */

/* its holder uses the workers; acquired before `lock` */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
/* guards what is below but the atomics and `over` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;

static pthread_t helper[FAN_WORKERS_MOST];
static atomic_int alive;   /* helpers started; written by the holder of `turn` */
static bool ending;        /* helpers must return */
static bool over;          /* the process ends: start no more; under `turn` */
static unsigned long call; /* number of the current work */
static bool joinable;      /* helpers may still join it */
static int inside;         /* helpers at work */

static void (*work_now)(void *, size_t);
static void *ctx_now;
static size_t tasks_now;
/* relaxed: `lock` orders the call and its results, `inside` its helpers' end */
static atomic_size_t next;

static atomic_int chosen;

static void take_tasks(void (*work)(void *, size_t), void *ctx, size_t tasks)
{
    size_t task = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed);
    while (task < tasks) {
        work(ctx, task);
        task = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed);
    }
}

static void *workers_help(void *nothing)
{
    unsigned long seen = 0;
    fan_float_mode mode = FAN_FLOAT_MODE_DEFAULT;
    if (FAN_FAULT(FLOAT_MODE_OF_HELPER))
        mode = FAN_FLOAT_MODE_UPWARD;
    /* A new thread has the modes of the one that starts it. */
    fan_float_mode_set(mode);
    pthread_mutex_lock(&lock);
    while (!ending) {
        if (!joinable || call == seen) {
            pthread_cond_wait(&wake, &lock);
            continue;
        }
        seen = call;
        inside++;
        void (*work)(void *, size_t) = work_now;
        void *ctx = ctx_now;
        size_t tasks = tasks_now;
        pthread_mutex_unlock(&lock);
        take_tasks(work, ctx, tasks);
        pthread_mutex_lock(&lock);
        if (--inside == 0)
            pthread_cond_signal(&left);
    }
    pthread_mutex_unlock(&lock);
    return nothing;
}

/* workers_end: call with `turn` held. */
static void workers_end(void)
{
    pthread_mutex_lock(&lock);
    ending = true;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    int n = atomic_load(&alive);
    for (int i = 0; i < n; i++)
        pthread_join(helper[i], NULL);
    atomic_store(&alive, 0);
    pthread_mutex_lock(&lock);
    ending = false;
    pthread_mutex_unlock(&lock);
}

static int workers_processors(void)
{
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    if (n > FAN_WORKERS_MOST)
        return FAN_WORKERS_MOST;
    return n < 1 ? 1 : (int)n;
}

int fan_workers_chosen(void)
{
    return atomic_load_explicit(&chosen, memory_order_relaxed);
}

int fan_workers_get(void)
{
    int n = fan_workers_chosen();
    if (n)
        return n;
    n = workers_processors();
    return n < DEFAULT_MOST ? n : DEFAULT_MOST;
}

#ifdef FAN_TEST
int fan_workers_alive(void)
{
    return atomic_load(&alive);
}
#endif

void fan_workers_set(int threads)
{
    if (threads < 0)
        threads = 0;
    if (threads > FAN_WORKERS_MOST)
        threads = FAN_WORKERS_MOST;
    pthread_mutex_lock(&turn);
    atomic_store_explicit(&chosen, threads, memory_order_relaxed);
    if (atomic_load(&alive) >= fan_workers_get())
        workers_end();
    pthread_mutex_unlock(&turn);
}

void fan_workers_run(size_t tasks, void (*work)(void *ctx, size_t task), void *ctx)
{
    int want = 0;
    if (tasks > 1)
        want = fan_workers_get() - 1;
    if (want > 0 && (size_t)want >= tasks)
        want = (int)tasks - 1;
    if (want <= 0 || pthread_mutex_trylock(&turn)) {
        for (size_t i = 0; i < tasks; i++)
            work(ctx, i);
        return;
    }
    int n = atomic_load(&alive);
    while (!over && n < want && workers_start(&helper[n], workers_help))
        n++;
    atomic_store(&alive, n);

    pthread_mutex_lock(&lock);
    work_now = work;
    ctx_now = ctx;
    tasks_now = tasks;
    atomic_store_explicit(&next, 0, memory_order_relaxed);
    call++;
    joinable = true;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    take_tasks(work, ctx, tasks);

    pthread_mutex_lock(&lock);
    joinable = false;
    while (inside)
        pthread_cond_wait(&left, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&turn);
}

/* ---- the pool of threads for jobs ---- */

/* The pool: a queue of jobs under one lock, served by threads in the order of their start. There is
 * a thread for each queued job: an idle one, or a new one.
 *
 * A job of a scheduled thread is served at once and begins when its scheduler allows. It is not
 * cancelled, unless its scheduler has given up, so that the search of orders covers its work.
 *
 * Pitfall: the end of the process. A thread that is at work may wait forever for an interpreter
 * that is finalized, and is left running. */
/* guards all below, and the states of jobs */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
/* there is a job, or the process ends */
static pthread_cond_t pool_wake = PTHREAD_COND_INITIALIZER;
/* a job was refused, or a thread ended */
static pthread_cond_t pool_heard = PTHREAD_COND_INITIALIZER;
static fan_thread_job *first;
static int queued, idle;
static bool pool_over; /* the process ends: start no more threads */

static void *thread_pool_serve(void *nothing)
{
    const unsigned process = fan_fork_generation();
    pthread_detach(pthread_self());
    pthread_mutex_lock(&pool_lock);
    while (!pool_over && fan_fork_generation() == process) {
        fan_thread_job *job = first;
        if (!job) {
            idle++;
            pthread_cond_wait(&pool_wake, &pool_lock);
            idle--;
            continue;
        }
        first = job->next;
        queued--;
        const fan_thread_job mine = *job; /* its memory may be invalid once its work has begun */
        bool go = true;
        if (mine.hooks.spawn) {
            pthread_mutex_unlock(&pool_lock);
            go = mine.hooks.enter(mine.hooks.ctx, mine.number);
            pthread_mutex_lock(&pool_lock);
        }
        if (!go) {
            job->state = FAN_THREAD_REFUSED;
            pthread_cond_broadcast(&pool_heard);
            continue;
        }
        job->state = FAN_THREAD_BEGUN;
        pthread_mutex_unlock(&pool_lock);
        if (!FAN_FAULT(FLOAT_MODE_OF_JOB))
            fan_float_mode_set(mine.mode);
        mine.work(mine.arg);
        if (mine.hooks.spawn)
            mine.hooks.leave(mine.hooks.ctx, mine.number);
        pthread_mutex_lock(&pool_lock);
    }
    pthread_cond_broadcast(&pool_heard);
    pthread_mutex_unlock(&pool_lock);
    return nothing;
}

bool fan_thread_job_start(fan_thread_job *job)
{
    const fan_thread_hooks *hooks = fan_thread_get_hooks();
    fan_thread_job **at = &first;
    pthread_t thread;
    job->next = NULL;
    job->mode = fan_float_mode_get();
    job->state = FAN_THREAD_QUEUED;
    job->hooks = (fan_thread_hooks){.spawn = NULL};
    if (hooks && hooks->spawn) {
        job->hooks = *hooks;
        job->number = hooks->spawn(hooks->ctx);
        if (job->number < 0)
            return false;
    }
    pthread_mutex_lock(&pool_lock);
    bool good = false;
    if (!pool_over)
        good = queued < idle || workers_start(&thread, thread_pool_serve);
    if (good) {
        while (*at)
            at = &(*at)->next;
        *at = job;
        queued++;
        pthread_cond_signal(&pool_wake);
    }
    pthread_mutex_unlock(&pool_lock);
    if (!good && job->hooks.spawn)
        job->hooks.leave(job->hooks.ctx, job->number);
    return good;
}

/* job_dequeue: takes a job out of the queue; false: it is not there. Call with the lock held. */
static bool job_dequeue(fan_thread_job *job)
{
    for (fan_thread_job **at = &first; *at; at = &(*at)->next) {
        if (*at == job) {
            *at = job->next;
            queued--;
            return true;
        }
    }
    return false;
}

bool fan_thread_job_cancel(fan_thread_job *job)
{
    bool cancelled = true;
    if (job->hooks.spawn && !job->hooks.refused(job->hooks.ctx, job->number))
        return false;
    pthread_mutex_lock(&pool_lock);
    if (!job->hooks.spawn)
        cancelled = job_dequeue(job);
    while (job->hooks.spawn && job->state != FAN_THREAD_REFUSED)
        pthread_cond_wait(&pool_heard, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
    return cancelled;
}

/* ---- the end of the process, and a forked child ---- */

static void workers_at_exit(void)
{
    pthread_mutex_lock(&turn);
    over = true;
    workers_end();
    pthread_mutex_unlock(&turn);
    pthread_mutex_lock(&pool_lock);
    pool_over = true;
    pthread_cond_broadcast(&pool_wake);
    while (idle)
        pthread_cond_wait(&pool_heard, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
}

/* In the child: initializes the locks again. */
static void workers_in_child(void)
{
    pthread_mutex_init(&turn, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&left, NULL);
    atomic_store(&alive, 0);
    ending = false;
    joinable = false;
    inside = 0;
    pthread_mutex_init(&pool_lock, NULL);
    pthread_cond_init(&pool_wake, NULL);
    pthread_cond_init(&pool_heard, NULL);
    first = NULL;
    queued = 0;
    idle = 0;
}
