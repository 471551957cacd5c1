/* collect: the first step of a pass: what the roots reach is counted, in loops (E1, E8, E13). */
#ifndef FAN_ENGINE_COLLECT_H
#define FAN_ENGINE_COLLECT_H

#include "engine/task.h"

/* fan_collect: fills in nodes, slots, edges, same and results of a pass that has its config. What it has allocated is
 * the pass's, when it fails too. FAN_ERR_STATE: a node that is to run was freed. */
fan_status fan_collect(fan_backward *p, fan_error *err);
/* fan__collect_free: of the pass's nodes, slots or edges, for so many of which there was room. */
void fan__collect_free(void *memory, size_t n, size_t size);

#endif
