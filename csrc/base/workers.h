/* workers: the threads of the process that work for others: a few that help with one large piece of
 * work at a time, and those that wait for jobs, one job each. Helpers have the default
 * floating-point modes (base/float_mode.h); a job has those of the thread that started it.
 *
 * No thread is started before the first work; a forked child starts its own; they end with the
 * process (the helpers also when their number changes), and they block all signals. Helpers never
 * call Python and use plain pthread waits (no hooks: the scheduler of the simulated machine does
 * not observe them). */
#ifndef FAN_BASE_WORKERS_H
#define FAN_BASE_WORKERS_H

#include "base/float_mode.h"
#include "base/thread.h"

#include <stddef.h>

#define FAN_WORKERS_MOST 1024

/* fan_workers_run: calls work(ctx, task) once for each task in [0, tasks), in any order and on any
 * thread, the caller's among them. Returns when all are done; their writes are visible to the
 * caller. If another thread uses the workers, or none can be started, the caller does all the work.
 * `work` must not call fan_workers_run. */
void fan_workers_run(size_t tasks, void (*work)(void *ctx, size_t task), void *ctx);

/* fan_workers_get: returns how many threads work together, the caller included: the number set, or
 * the processors that this process may use, at most 8. */
int fan_workers_get(void);
/* fan_workers_set: sets the number of threads (0: the default; at most FAN_WORKERS_MOST). Waits for
 * the current work and ends the old threads. */
void fan_workers_set(int threads);
/* fan_workers_chosen: returns the number set last; 0: the default. */
int fan_workers_chosen(void);
#ifdef FAN_TEST
/* fan_workers_alive: returns the number of started helpers (tests). */
int fan_workers_alive(void);
#endif

/* thread_pool: a thread is started when there is a job and no thread is idle. If the thread that
 * starts a job is scheduled (base/thread.h), the job is a thread of that scheduler, too. The
 * threads do not enter the interpreter: a job does so itself. */

/* A job, in memory of the thread that starts it. */
typedef struct fan_thread_job {
    void (*work)(void *arg);
    void *arg;
    /* private to the pool: */
    struct fan_thread_job *next;
    fan_thread_hooks hooks; /* those of the starting thread; no spawn: not scheduled */
    int number;             /* its number in the scheduler */
    fan_float_mode mode;    /* of the starting thread */
    enum {
        FAN_THREAD_QUEUED,
        FAN_THREAD_BEGUN,
        FAN_THREAD_REFUSED
    } state;
} fan_thread_job;

/* fan_thread_job_start: queues the job; work(arg) begins soon on some thread. Returns false if no
 * thread can be had (nothing is queued). The job must live until its work has begun or it was
 * cancelled. */
bool fan_thread_job_start(fan_thread_job *job);
/* fan_thread_job_cancel: returns true if the job had not begun; it never will. Otherwise it has
 * begun or will begin, and may have ended. */
bool fan_thread_job_cancel(fan_thread_job *job);

#endif
