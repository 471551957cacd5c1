/* workers: a few threads that help with one large piece of work at a time.
 *
 * No thread is started before the first work; a forked child starts its own; the threads end with the process or when
 * their number changes. They never call Python, use plain pthread waits (no hooks: the scheduler of the simulated
 * machine does not observe them), and block all signals. */
#ifndef FAN_BASE_WORKERS_H
#define FAN_BASE_WORKERS_H

#include <stddef.h>

#define FAN_WORKERS_MOST 1024

/* fan_workers_run: calls work(ctx, task) once for each task in [0, tasks), in any order and on any thread, the caller's
 * among them. Returns when all are done; their writes are visible to the caller. If another thread uses the workers, or
 * none can be started, the caller does all the work. `work` must not call fan_workers_run. */
void fan_workers_run(size_t tasks, void (*work)(void *ctx, size_t task), void *ctx);

/* fan_workers_get: returns how many threads work together, the caller included: the number set, or the processors that
 * this process may use, at most 8. */
int fan_workers_get(void);
/* fan_workers_set: sets the number of threads (0: the default; at most FAN_WORKERS_MOST). Waits for the current work
 * and ends the old threads. */
void fan_workers_set(int threads);
/* fan_workers_chosen: returns the number set last; 0: the default. */
int fan_workers_chosen(void);
#ifdef FAN_TEST
/* fan_workers_alive: returns the number of started helpers (tests). */
int fan_workers_alive(void);
#endif

#endif
