/* work: work queued or captured: jobs of the table, kernels of users. */
#ifndef FAN_DEVICE_SIM_WORK_H
#define FAN_DEVICE_SIM_WORK_H

#include "device/sim/access.h"

typedef struct fan__work {
    const char *name;
    fan__visit *next;
    const void *what;
    double us;     /* its duration */
    bool launched; /* as part of a graph's launch, which is counted once */
    fan__keeper kept;
    bool by_user;      /* a kernel of the user's */
    fan_sim_op *op;    /* owned by the queue on FAN_OK and FAN_ERR_RACE, else by the caller; NULL: no bytes to move */
    double start, end; /* filled in */
} fan__work;

/* fan__work_enqueue: checks work and queues it on q. On FAN_ERR_RACE it is queued, and *err describes the race; other
 * failures change nothing. */
fan_status fan__work_enqueue(fan_sim *m, fan_sim_queue *q, fan__work *w, const char *call_site, fan_error *err);
fan_status fan__sim_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
fan_status fan__sim_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *states,
                             fan_error *err);

#endif
