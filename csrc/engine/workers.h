/* crew: the workers of one pass, where it has several (E12).
 *
 *   caller    counts, seeds | nodes ..  waits for one .. nodes |  over: cancels who has not begun, waits for the others
 *   a helper                  begins: nodes .. waits for one ..    .. leaves
 *
 * Title: One lock of the pass. What a pass counts (due, ready, leaves, ran; who waits, who is at work) is guarded by
 * one lock, held for a few instructions and never while others are called. A slot's sum has the lock of its buffer, a
 * leaf its claim (leaf.h).
 *
 * Title: On demand. Whoever takes a node and leaves another behind wakes somebody who waits, or starts a helper. So a
 * chain never has a second thread, whatever `workers` says.
 *
 * Title: A device's worker. The first device of a pass is the caller's, the second the first helper's, and so on,
 * around: the order is that of its nodes. What is captured is the caller's, who began the capture.
 *
 * What can go wrong: a pass that is done while others are still to come back: the caller waits for all that have begun.
 * An error: nobody begins another node, and it is the caller's once all have stopped. A fork inside of a node: the
 * child has none of the others, and says so.
 */
#ifndef FAN_ENGINE_WORKERS_H
#define FAN_ENGINE_WORKERS_H

#include "base/thread_pool.h"
#include "engine/leaf.h"
#include "engine/task.h"

typedef struct fan_task_helper {
    fan_task_worker worker;
    fan_thread_job job;
    void *around; /* the frontend's (worker_new) */
    enum { FAN_HELPER_NONE, FAN_HELPER_STARTS, FAN_HELPER_STARTED, FAN_HELPER_GONE } state;
} fan_task_helper;

/* Nodes of which one runs at a time. */
typedef struct fan_task_group {
    bool busy;
    uint32_t first, last; /* a list: those that were ready meanwhile; FAN_NOWHERE: none */
} fan_task_group;

/* A device of the pass: all that runs there runs on one worker, so that its streams are told in one order (E3). */
typedef struct fan_task_device {
    const fan_device *device;
    uint32_t worker; /* by its number; the caller's, once that helper has gone */
    uint32_t ready;
    fan_task_queue queue;
} fan_task_device;

typedef struct fan_task_workers {
    fan_mutex lock;
    fan_cond changed;     /* a node is ready, the pass is over, a helper has left */
    uint32_t ready;       /* leaves and nodes in the pass's queue */
    uint32_t ready_there; /* .. in those of devices */
    uint32_t ndevices;
    fan_task_device *devices;
    uint32_t busy;   /* workers that have a node */
    uint32_t asleep; /* .. that wait for one */
    uint32_t inside; /* helpers that were started, and have not left */
    bool over;       /* nobody begins a node any more */
    unsigned owner_generation;
    bool forked; /* this process has the thread alone that forked */
    bool failed;
    void *error;        /* the frontend's; NULL: none, or it was put on the caller's thread */
    uint32_t *group_of; /* of each visit: 1 + its group; 0: none. NULL: there are no groups */
    fan_task_group *groups;
    void (*work)(fan_task_helper *h);
    fan_leaf_caller caller;
    uint32_t nhelpers;
    fan_task_helper helpers[];
} fan_task_workers;

/* fan__task_workers_begin: for a pass that is collected and asks for several workers. fan__task_workers_free: they have
 * ended. */
fan_status fan__task_workers_begin(fan_backward *p, void (*work)(fan_task_helper *h), fan_error *err);
void fan__task_workers_free(fan_backward *p);

/* fan__task_workers_lock: in a forked child, which has none of the others, the pass is over. */
void fan__task_workers_lock(fan_task_workers *c);

static inline void fan__task_lock(const fan_backward *p)
{
    if (p->workers)
        fan__task_workers_lock(p->workers);
}

static inline void fan__task_unlock(const fan_backward *p)
{
    if (p->workers)
        fan_mutex_unlock(&p->workers->lock);
}

/* fan__task_workers_wait: locked before and after, not meanwhile: until something has changed, or for a twentieth of a
 * second.
 */
fan_status fan__task_workers_wait(const fan_backward *p, fan_error *err);
/* fan__task_device_of: locked: where a node waits for its turn that runs on a device; NULL: it is of the CPU.
 * fan__task_device_is_own: whether a worker runs what is on it. */
fan_task_device *fan__task_device_of(const fan_task_workers *c, const fan_node *n);
static inline bool fan__task_device_is_own(const fan_task_workers *c, const fan_task_device *d,
                                           const fan_task_worker *w)
{
    bool gone = d->worker && c->helpers[d->worker - 1].state == FAN_HELPER_GONE;
    return w->number == (gone ? 0 : d->worker);
}
/* fan__task_workers_wake: locked: this worker has a node, or none is left for it: those are woken for whom there is
 * one. true: fan__task_workers_start is to be called, unlocked. */
bool fan__task_workers_wake(const fan_task_worker *w);
void fan__task_workers_start(fan_backward *p);
/* fan__task_workers_failed: a worker ends with an error, which is the pass's if it is the first. */
void fan__task_workers_failed(fan_task_worker *w, fan_status status, const fan_error *err);
/* fan__task_workers_left: a helper has nothing more to do with the pass, which may be gone then. */
void fan__task_workers_left(fan_task_helper *h);
/* fan__task_workers_end: on the caller's thread: waits for all others. FAN_ERR_EXTERN: the frontend has the pass's
 * error. */
fan_status fan__task_workers_end(fan_backward *p);

#endif
