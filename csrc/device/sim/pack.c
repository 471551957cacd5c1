#include "device/sim/pack.h"

#include "base/mem.h"

#include <string.h>

fan_sim_op *fan__op_new(const fan_job *jobs, size_t n)
{
    fan__packer p = {NULL, 0};
    fan__pack(&p, sizeof(fan_sim_op));
    (void)fan__pack_jobs(&p, jobs, n);
    fan_sim_op *op = fan_alloc(p.used);
    if (!op)
        return NULL;
    p = (fan__packer){(char *)op, 0};
    memset(fan__pack(&p, sizeof *op), 0, sizeof *op);
    op->jobs = fan__pack_jobs(&p, jobs, n);
    op->njobs = n;
    return op;
}
