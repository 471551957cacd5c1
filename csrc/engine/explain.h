/* explain: what a pass says of its gradients: who gave them, who waits for them, which are lost (E11, E17). */
#ifndef FAN_ENGINE_EXPLAIN_H
#define FAN_ENGINE_EXPLAIN_H

#include "engine/task.h"

/* fan__explain_sum: of a sum that was just taken: FAN_OK, or an error that names who gave the first gradient that is
 * not finite (E11). */
fan_status fan__explain_sum(const fan_task_worker *w, uint32_t slot, void *buffer, fan_error *err);

#endif
