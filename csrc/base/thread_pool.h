/* thread_pool: threads that wait for jobs, one job each.
 *
 * A thread is started when there is a job and no thread is idle; idle threads end with the process, a forked child
 * starts its own, and they block all signals. If the thread that starts a job is scheduled (base/thread.h), the job is
 * a thread of that scheduler, too. The threads do not enter the interpreter: a job does so itself. */
#ifndef FAN_BASE_THREAD_POOL_H
#define FAN_BASE_THREAD_POOL_H

#include "base/thread.h"

/* A job, in memory of the thread that starts it. */
typedef struct fan_thread_job {
    void (*work)(void *arg);
    void *arg;
    /* private to the pool: */
    struct fan_thread_job *next;
    fan_thread_hooks hooks; /* those of the starting thread; no spawn: not scheduled */
    int number;             /* its number in the scheduler */
    enum { FAN_THREAD_QUEUED, FAN_THREAD_BEGUN, FAN_THREAD_REFUSED } state;
} fan_thread_job;

/* fan_thread_job_start: queues the job; work(arg) begins soon on some thread. Returns false if no thread can be had
 * (nothing is queued). The job must live until its work has begun or it was cancelled. */
bool fan_thread_job_start(fan_thread_job *job);
/* fan_thread_job_cancel: returns true if the job had not begun; it never will. Otherwise it has begun or will begin,
 * and may have ended. */
bool fan_thread_job_cancel(fan_thread_job *job);
#ifdef FAN_TEST
/* fan_thread_pool_alive: returns the number of threads (tests). */
int fan_thread_pool_alive(void);
#endif

#endif
