/* run: runs queued work, late and in any order that is allowed. Call with the machine's lock held; it is released while
 * work runs. */
#ifndef FAN_DEVICE_SIM_RUN_H
#define FAN_DEVICE_SIM_RUN_H

#include "device/sim/machine.h"

/* fan__run_settle: removes fulfilled waits from the queues' heads; each may fulfil others. */
void fan__run_settle(fan_sim *m);
/* fan__run_pick: returns the queue whose head runs next; NULL: no head may run. */
fan_sim_queue *fan__run_pick(fan_sim *m);
/* fan__run_one: runs the head of q, with the lock released. */
fan_status fan__run_one(fan_sim *m, fan_sim_queue *q, fan_error *err);
/* fan__run_stand_by: waits until the thread that runs work has finished one piece. */
void fan__run_stand_by(fan_sim *m);
/* fan__run_until: runs work, in any allowed order, until point has passed; queue NULL: until all is idle. Stops at the
 * first kernel that fails. */
fan_status fan__run_until(fan_sim *m, fan_sim_point point, fan_error *err);
/* fan__run_join: joins the clock `what` to the calling thread's in the checker. A release of memory needs it
 * (fan__sim_dropped). */
fan_status fan__run_join(fan_sim *m, const fan_clock *what, fan_error *err);
/* fan__run_finish: runs work until all that q has queued by now has run; orders the calling thread after it. */
fan_status fan__run_finish(fan_sim *m, fan_sim_queue *q, fan_error *err);
bool fan__run_has_passed(const fan_sim_event *ev);
/* fan__run_for: runs only the work that `point` needs; *can false: it can never pass. */
fan_status fan__run_for(fan_sim *m, fan_sim_point point, size_t depth, bool *can, fan_error *err);
/* fan__sim_nudge: runs one piece of work, where no search chooses (sim.h, Queries). */
fan_status fan__sim_nudge(fan_device *d, fan_error *err);

#endif
