/* Design: a queue of jobs under one lock, served by threads in the order of their start. There is a thread for each
 * queued job: an idle one, or a new one.
 *
 * A job of a scheduled thread is served at once and begins when its scheduler allows. It is not cancelled, unless its
 * scheduler has given up, so that the search of orders covers its work.
 *
 * Pitfalls. Fork: the child has none of the threads and initializes everything again. End of the process: a thread that
 * is at work may wait forever for an interpreter that is finalized, and is left running. */
#define _POSIX_C_SOURCE 200809L
#include "base/thread_pool.h"

#include "base/thread.h"

#include <signal.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below, and the states of jobs */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;   /* there is a job, or the process ends */
static pthread_cond_t heard = PTHREAD_COND_INITIALIZER;  /* a job was refused, or a thread ended */
static fan_thread_job *first;
static int queued, idle, alive;
static bool over;     /* the process ends: start no more threads */
static bool prepared; /* the handlers of fork and exit are installed */

static fan_thread_job *thread_pool_unlink_first(void)
{
    fan_thread_job *job = first;
    first = job->next;
    queued--;
    return job;
}

/* thread_pool_serve_one: called and returns with the lock held; the job's memory may be invalid once its work has
 * begun. */
static void thread_pool_serve_one(fan_thread_job *job)
{
    const fan_thread_job mine = *job;
    bool go = true;
    if (mine.hooks.spawn) {
        (void)pthread_mutex_unlock(&lock);
        go = mine.hooks.enter(mine.hooks.ctx, mine.number);
        (void)pthread_mutex_lock(&lock);
    }
    job->state = go ? FAN_THREAD_BEGUN : FAN_THREAD_REFUSED;
    if (!go) {
        (void)pthread_cond_broadcast(&heard);
        return;
    }
    (void)pthread_mutex_unlock(&lock);
    mine.work(mine.arg);
    if (mine.hooks.spawn)
        mine.hooks.leave(mine.hooks.ctx, mine.number);
    (void)pthread_mutex_lock(&lock);
}

static void *thread_pool_serve(void *nothing)
{
    const unsigned process = fan_fork_generation();
    (void)pthread_mutex_lock(&lock);
    while (!over && fan_fork_generation() == process) {
        if (first) {
            thread_pool_serve_one(thread_pool_unlink_first());
            continue;
        }
        idle++;
        (void)pthread_cond_wait(&wake, &lock);
        idle--;
    }
    alive--;
    (void)pthread_cond_broadcast(&heard);
    (void)pthread_mutex_unlock(&lock);
    return nothing;
}

static void at_exit(void)
{
    (void)pthread_mutex_lock(&lock);
    over = true;
    (void)pthread_cond_broadcast(&wake);
    while (idle)
        (void)pthread_cond_wait(&heard, &lock);
    (void)pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    (void)pthread_mutex_init(&lock, NULL);
    (void)pthread_cond_init(&wake, NULL);
    (void)pthread_cond_init(&heard, NULL);
    first = NULL;
    queued = idle = alive = 0;
}

static fan_fork pool_fork = {.child = in_child};

/* thread_pool_one_more: starts a thread; the lock is held. */
static bool thread_pool_one_more(void)
{
    sigset_t all, before;
    pthread_attr_t how;
    pthread_t thread;
    bool good;
    if (!prepared && (fan_fork_add(&pool_fork) || atexit(at_exit)))
        return false;
    prepared = true;
    if (pthread_attr_init(&how))
        return false;
    (void)sigfillset(&all);
    good = pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED) == 0 &&
           pthread_sigmask(SIG_SETMASK, &all, &before) == 0; /* the new thread inherits the mask */
    if (good) {
        good = pthread_create(&thread, &how, thread_pool_serve, NULL) == 0;
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    (void)pthread_attr_destroy(&how);
    alive += good;
    return good;
}

/* thread_pool_put: appends the job if there is a thread for it; the lock is held. */
static bool thread_pool_put(fan_thread_job *job)
{
    fan_thread_job **at = &first;
    if (over || (queued + 1 > idle && !thread_pool_one_more()))
        return false;
    while (*at)
        at = &(*at)->next;
    *at = job;
    queued++;
    (void)pthread_cond_signal(&wake);
    return true;
}

bool fan_thread_job_start(fan_thread_job *job)
{
    const fan_thread_hooks *hooks = fan_thread_get_hooks();
    bool good;
    job->next = NULL;
    job->state = FAN_THREAD_QUEUED;
    job->hooks = hooks && hooks->spawn ? *hooks : (fan_thread_hooks){.spawn = NULL};
    if (job->hooks.spawn && (job->number = job->hooks.spawn(job->hooks.ctx)) < 0)
        return false;
    (void)pthread_mutex_lock(&lock);
    good = thread_pool_put(job);
    (void)pthread_mutex_unlock(&lock);
    if (!good && job->hooks.spawn)
        job->hooks.leave(job->hooks.ctx, job->number);
    return good;
}

bool fan_thread_job_cancel(fan_thread_job *job)
{
    bool cancelled = false;
    if (job->hooks.spawn && !job->hooks.refused(job->hooks.ctx, job->number))
        return false;
    (void)pthread_mutex_lock(&lock);
    for (fan_thread_job **at = &first; *at && !job->hooks.spawn; at = &(*at)->next)
        if (*at == job) {
            *at = job->next;
            queued--;
            cancelled = true;
            break;
        }
    while (job->hooks.spawn && job->state != FAN_THREAD_REFUSED)
        (void)pthread_cond_wait(&heard, &lock);
    (void)pthread_mutex_unlock(&lock);
    return cancelled || job->hooks.spawn;
}

#ifdef FAN_TEST
int fan_thread_pool_alive(void)
{
    (void)pthread_mutex_lock(&lock);
    int n = alive;
    (void)pthread_mutex_unlock(&lock);
    return n;
}
#endif
