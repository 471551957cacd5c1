/* queue: which node of a pass is ready, and which is the next (E1, E2). */
#ifndef FAN_ENGINE_QUEUE_H
#define FAN_ENGINE_QUEUE_H

#include "engine/task.h"

/* fan__dependency_done: a gradient has come to the node at that place: one less is due; with the last one it is ready.
 * While one thread alone has the pass. */
void fan__dependency_done(fan_backward *p, uint32_t at);
/* fan__queue_next: the worker has the next node: a leaf that is ready, else the first of the nodes, or what the
 * schedule picks. FAN_NOWHERE: none is left. */
fan_status fan__queue_next(fan_task_worker *w, fan_error *err);
/* fan__queue_ran: a node has run. */
static inline void fan__queue_ran(fan_task_worker *w)
{
    w->pass->nodes[w->now].ran = true;
    if (w->pass->workers)
        w->ran = true; /* counted with the lock of the pass */
    else
        w->pass->ran++;
}

#endif
