/* step: a node's turn on a worker, and a gradient's way from the node that made it to the one that gets it. */
#ifndef FAN_ENGINE_STEP_H
#define FAN_ENGINE_STEP_H

#include "engine/task.h"

/* fan__drop_all: the holds of so many objects; NULLs are passed over, and left behind. */
static inline void fan__drop_all(const fan_backward *p, void **objects, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (objects[i]) {
            void *object = objects[i];
            objects[i] = NULL;
            p->config.frontend->drop(object);
        }
}
/* fan__deliver_one: a gradient goes along an edge. Its hold stays the caller's, or is taken and NULL. *producer says
 * whose it is, and is filled in. */
fan_status fan__deliver_one(fan_backward *p, fan_task_edge *edge, void **gradient, fan_producer *producer,
                            fan_error *err);
/* Of the node that the worker has (queue.h). fan__step_sums, fan__step_deliver: see fan_backward_sums,
 * fan_backward_give. fan__step: all of it. fan__step_end: of one that does not run: it accumulates, or is there to be
 * captured. */
fan_status fan__step_sums(fan_task_worker *w, void **sums, void **node_hooks, fan_error *err);
fan_status fan__step_deliver(fan_task_worker *w, void **gradients, const void *node_hooks, fan_error *err);
fan_status fan__step(fan_task_worker *w, fan_error *err);
fan_status fan__step_end(fan_task_worker *w, fan_error *err);
/* fan__task_running_begin: the node at that place runs, on a thread; 0: any. */
void fan__task_running_begin(fan_task_running *r, const fan_task_worker *w, uint64_t thread);
void fan__task_running_end(fan_task_running *r);

#endif
