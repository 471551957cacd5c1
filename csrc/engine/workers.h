/* workers: the threads of a pass that has several (E12): their lock, their queues, waiting and
 * waking.
 *
 *   caller     collects, seeds | nodes .. waits for a node .. nodes | over: cancels helpers,
 *                                                                     waits for the others
 *   a helper                     starts: nodes .. waits for a node .. leaves
 *
 * Title: One lock of the pass. It guards the counts (dependencies, ready, leaves, ran) and the
 * state of the workers. It is held for a few instructions and never during a call out of the
 * engine. A slot's sum is guarded by the lock of its buffer, a leaf by its claim (leaf.h).
 *
 * Title: On demand. A worker that takes a node while another one is ready wakes a waiting worker or
 * starts a helper. So a chain never has a second thread, whatever `workers` is.
 *
 * Title: A device's worker. The caller runs the nodes of the first device, helper 1 those of the
 * second, and so on, round robin; devices are ordered by their nodes. Captured work is the
 * caller's, which began the capture.
 *
 * What can go wrong: the pass ends while a helper is still running: so the caller waits for all
 * that have started. An error: no worker begins another node, and the caller raises it once all
 * have stopped. A fork inside a node: the child has none of the other threads, and its pass
 * fails. */
#ifndef FAN_ENGINE_WORKERS_H
#define FAN_ENGINE_WORKERS_H

#include "base/workers.h"
#include "engine/leaf.h"
#include "engine/pass.h"

typedef enum fan_helper_state {
    FAN_HELPER_NONE,
    FAN_HELPER_STARTS,
    FAN_HELPER_STARTED,
    FAN_HELPER_GONE
} fan_helper_state;

typedef struct fan_pass_helper {
    fan_pass_worker worker;
    fan_thread_job job;
    void *around; /* the frontend's (worker_new) */
    fan_helper_state state;
} fan_pass_helper;

/* Nodes of which one runs at a time. */
typedef struct fan_pass_group {
    bool busy;
    /* a list of its ready nodes that wait; FAN_NOWHERE: none */
    uint32_t first;
    uint32_t last;
} fan_pass_group;

/* A device of the pass. One worker runs all its nodes, so its streams get their work in one order
 * (E3). */
typedef struct fan_pass_device {
    const fan_device *device;
    uint32_t worker; /* its number; the caller takes over once that helper has gone */
    uint32_t ready;
    fan_pass_queue queue;
} fan_pass_device;

typedef struct fan_pass_workers {
    fan_mutex lock;
    fan_cond changed;     /* a node is ready, the pass is over, a helper has left */
    uint32_t ready;       /* leaves and nodes in the pass's queue */
    uint32_t ready_there; /* .. in those of devices */
    uint32_t ndevices;
    fan_pass_device *devices;
    uint32_t busy;             /* workers that have a node */
    uint32_t asleep;           /* .. that wait for one */
    uint32_t inside;           /* helpers that have started and not left */
    bool over;                 /* no worker begins another node */
    unsigned owner_generation; /* fan_fork_generation() where the lock was made */
    bool forked;               /* this process has only the thread that forked */
    bool failed;
    void *error;        /* the frontend's; NULL: none, or the caller's thread has it */
    uint32_t *group_of; /* of each node: 1 + its group; 0: none. NULL: there are no groups */
    fan_pass_group *groups;
    fan_leaf_caller caller;
    uint32_t nhelpers;
    fan_pass_helper helpers[];
} fan_pass_workers;

/* fan__pass_workers_begin: makes the workers of a collected pass; `work`: what a helper's thread
 * calls, with its fan_pass_helper. */
fan_status fan__pass_workers_begin(fan_pass *pass, void (*work)(void *helper), fan_error *err);
/* fan__pass_workers_free: frees them, after all helpers have ended. */
void fan__pass_workers_free(fan_pass *pass);

/* fan__pass_workers_lock: in a forked child, where the other threads are missing, it ends the
 * pass. */
void fan__pass_workers_lock(fan_pass_workers *workers);

static inline void fan__pass_workers_unlock(fan_pass_workers *workers)
{
    fan_mutex_unlock(&workers->lock);
}

static inline void fan__pass_lock(const fan_pass *pass)
{
    if (pass->workers)
        fan__pass_workers_lock(pass->workers);
}

static inline void fan__pass_unlock(const fan_pass *pass)
{
    if (pass->workers)
        fan__pass_workers_unlock(pass->workers);
}

/* fan__pass_workers_push: with the lock: puts a ready node into the queue of its device (E3), or
 * into the pass's. */
void fan__pass_workers_push(fan_pass *pass, uint32_t at);
/* fan__pass_progress: calls progress=, on one thread at a time, which also reports nodes that
 * others ran meanwhile. */
fan_status fan__pass_progress(fan_pass *pass, fan_error *err);
/* fan__pass_workers_next: counts what the worker's node has done, and takes the next one; waits
 * while other workers may make one ready.
 * worker->now FAN_NOWHERE: none is left. */
fan_status fan__pass_workers_next(fan_pass_worker *worker, fan_error *err);
/* fan__pass_workers_failed: ends a worker with an error; the first one is the pass's. */
void fan__pass_workers_failed(fan_pass_worker *worker, fan_status status, const fan_error *err);
/* fan__pass_workers_end: waits, on the caller's thread, for all helpers.
 * FAN_ERR_EXTERN: the frontend has the error. */
fan_status fan__pass_workers_end(fan_pass *pass);

#endif
