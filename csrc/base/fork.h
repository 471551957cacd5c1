/* fork: handlers around fork(), in one list.
 *
 * A forked child inherits the locks of its parent, but not the threads that held them. fork() therefore acquires the
 * locks in the list first, and parent and child release them afterwards: the data that they guard is consistent in
 * both. A lock that is held across calls into other code is not acquired: the child initializes it again and discards
 * unfinished work.
 *
 *   before   `lock` of each, newest first: a holder of a newer lock may acquire an older one
 *   parent   `unlock` of each, oldest first
 *   child    `unlock`, then `child` of each, oldest first */
#ifndef FAN_BASE_FORK_H
#define FAN_BASE_FORK_H

#include <stdatomic.h>
#include <stdbool.h>

/* The handlers of one file; any may be NULL. The struct must live as long as the process. */
typedef struct fan_fork {
    void (*lock)(void);
    void (*unlock)(void);
    void (*child)(void);
    bool added; /* owned by the list, as is `newer` */
    struct fan_fork *newer, *older;
} fan_fork;

/* fan_fork_add: adds f to the list; further calls have no effect. Returns 0, or -1 when out of memory. */
int fan_fork_add(fan_fork *f);

/* fan_process: returns the number of forks that led to this process, so that objects made before the last fork can be
 * recognized. */
extern atomic_uint fan_forks __attribute__((visibility("hidden")));
static inline unsigned fan_process(void) { return atomic_load_explicit(&fan_forks, memory_order_relaxed); }

#endif
