/* timeline: what a pass tells a trace of itself: a line for each node that ran, and one for each gradient (E18). */
#ifndef FAN_ENGINE_TIMELINE_H
#define FAN_ENGINE_TIMELINE_H

#include "engine/task.h"

/* fan__traced: some thread records. If not, nothing of this is to be called. */
static inline bool fan__traced(void) { return atomic_load_explicit(&fan_traces, memory_order_relaxed) != 0; }

/* fan__timeline_begin: the worker's node begins: what this thread records from now on is of it. fan__timeline_end: it
 * has ended, on whatever thread. */
void fan__timeline_begin(fan_task_timeline *t, const fan_task_worker *w);
void fan__timeline_end(fan_task_timeline *t, const fan_task_worker *w);
/* fan__timeline_gradient: a gradient has come to a slot of the node at a place. */
void fan__timeline_gradient(const fan_backward *p, uint32_t to, uint32_t slot, uint32_t key);

#endif
