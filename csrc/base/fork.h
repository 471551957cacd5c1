/* fork: what must be done around fork(), in one list.
 *
 * A child has its parent's locks, and not the threads that held them. So a fork waits until nobody holds one of those
 * in the list, and parent and child let go of them again: what they guard is whole in both. Where a lock is held while
 * others are called, a fork does not wait for it: the child makes it anew, and what was half made is forgotten.
 *
 *   before   `lock` of each, the newest first: who stands higher may hold his lock while he takes a lower one
 *   parent   `unlock` of each, the oldest first
 *   child    `unlock`, then `child` of each, the oldest first
 */
#ifndef FAN_BASE_FORK_H
#define FAN_BASE_FORK_H

#include <stdatomic.h>
#include <stdbool.h>

/* What one file does; any may be NULL. The struct lives as long as the process. */
typedef struct fan_fork {
    void (*lock)(void);
    void (*unlock)(void);
    void (*child)(void);
    bool added; /* of the list, as is `newer` */
    struct fan_fork *newer, *older;
} fan_fork;

/* fan_fork_add: from now on f is in the list; once is enough, and more change nothing. Returns 0, or -1: out of
 * memory. */
int fan_fork_add(fan_fork *f);

/* fan_process: how many forks led to this process: what was made before the last one has another number. */
extern atomic_uint fan_forks __attribute__((visibility("hidden")));
static inline unsigned fan_process(void) { return atomic_load_explicit(&fan_forks, memory_order_relaxed); }

#endif
