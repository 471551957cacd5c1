/* thread_pool: threads that wait for jobs, one on each.
 *
 * A thread is started when there is a job and none is idle; idle ones end with the process, a forked child starts its
 * own, and they take no signals. Where whoever starts a job is scheduled (base/thread.h), the job is a thread of that
 * scheduler, too. The threads know no interpreter: a job enters one by itself.
 */
#ifndef FAN_BASE_THREAD_POOL_H
#define FAN_BASE_THREAD_POOL_H

#include "base/thread.h"

/* A job, in memory of whoever starts it. */
typedef struct fan_thread_job {
    void (*work)(void *arg);
    void *arg;
    /* the pool's: */
    struct fan_thread_job *next;
    fan_thread_hooks hooks; /* of who started it; no spawn: not scheduled */
    int number;             /* there */
    enum { FAN_THREAD_QUEUED, FAN_THREAD_BEGUN, FAN_THREAD_REFUSED } state;
} fan_thread_job;

/* fan_thread_job_start: work(arg) begins on some thread, soon. false: no thread can be had, and nothing begins. The job
 * must live until its work has begun, or it was cancelled. */
bool fan_thread_job_start(fan_thread_job *job);
/* fan_thread_job_cancel: true: it has not begun, and never will; else it has, or will, and may have ended. */
bool fan_thread_job_cancel(fan_thread_job *job);
#ifdef FAN_TEST
/* fan_thread_pool_alive: threads that there are (tests). */
int fan_thread_pool_alive(void);
#endif

#endif
