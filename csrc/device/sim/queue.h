/* queue: a stream's queue, and the waits in it. Call with the machine's lock held. */
#ifndef FAN_DEVICE_SIM_QUEUE_H
#define FAN_DEVICE_SIM_QUEUE_H

#include "device/job.h"
#include "device/sim/machine.h"

static inline fan_sim_queue *fan__queue_of(const fan_stream *s) { return s->impl; }

static inline double fan__later(double a, double b) { return a > b ? a : b; }

fan_status fan__queue_host(fan_sim *m, size_t host, uint64_t actor, fan_error *err);
/* fan__queue_new: makes a queue for a new stream. seen: the clock of the thread that makes it; NULL: empty. */
fan_status fan__queue_new(fan_sim *m, int device, uint64_t handle, bool blocking, const fan_clock *seen,
                          fan_sim_queue **out, fan_error *err);
void fan__queue_drop(fan_sim_queue *q);
/* fan__queue_sweep: frees the empty queues that no stream, event or wait refers to. */
void fan__queue_sweep(fan_sim *m);
void fan__queue_append(fan_sim *m, fan_sim_queue *q, fan_sim_op *op);
/* fan__queue_pop: removes the head; the caller frees it. */
fan_sim_op *fan__queue_pop(fan_sim_queue *q);
/* fan__queue_wait: orders all that is queued on q from now on after `point`. The caller updates the clocks. */
fan_status fan__queue_wait(fan_sim *m, fan_sim_queue *q, fan_sim_point point, fan_error *err);
/* fan__queue_drop_work: removes every op without running it. */
void fan__queue_drop_work(fan_sim *m);

/* pack: operations of the machine with copies of their jobs. */
/* fan__op_new: makes an op followed by copies of n jobs; n == 0: with room for a kernel alone. */
fan_sim_op *fan__op_new(const fan_job *jobs, size_t n);

#endif
