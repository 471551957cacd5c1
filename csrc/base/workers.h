/* workers: a few threads that help with one large piece of work at a time.
 *
 * Nothing is started before the first work; a forked child starts its own; the threads end with the process, or when
 * their number is set anew. They never touch Python, wait with plain pthreads (no hooks: the scheduler of the simulated
 * machine sees nothing of them), and take no signals.
 */
#ifndef FAN_BASE_WORKERS_H
#define FAN_BASE_WORKERS_H

#include <stddef.h>

#define FAN_WORKERS_MOST 1024

/* fan_workers_run: work(ctx, task) for each task in [0, tasks), each once, in any order and on any thread; returns when
 * all are done, and what they wrote is seen by the caller. The caller works too. While another thread's work is under
 * way, or where threads cannot be had, it is done by the caller alone. `work` may not call fan_workers_run. */
void fan_workers_run(size_t tasks, void (*work)(void *ctx, size_t task), void *ctx);

/* fan_workers_get: how many threads work together, the caller among them: what was set, else the processors that this
 * process may use, at most 8. */
int fan_workers_get(void);
/* fan_workers_set: from now on `threads` (0: the default again; at most FAN_WORKERS_MOST). Waits for work under way;
 * the threads of before are ended. */
void fan_workers_set(int threads);
/* fan_workers_chosen: what was set last; 0: the default. */
int fan_workers_chosen(void);
#ifdef FAN_TEST
/* fan_workers_alive: helpers that stand ready (tests). */
int fan_workers_alive(void);
#endif

#endif
