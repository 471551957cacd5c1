#include "device/sim/machine.h"

#include "base/mem.h"

#include <string.h>

static fan_status queue_lane(fan_sim *m, int device, uint64_t handle, uint32_t *out, fan_error *err)
{
    FAN_TRY(fan_race_check_lane(m->race_check, out, err));
    fan_race_check_name(m->race_check, *out, FAN_SIM_OWNER(device, handle));
    return FAN_OK;
}

fan_status fan__queue_host(fan_sim *m, size_t host, uint64_t actor, fan_error *err)
{
    if (m->has_lane[host])
        return FAN_OK;
    FAN_TRY(queue_lane(m, -1, actor, &m->host_lane[host], err));
    if (fan_race_check_host(m->race_check, m->host_lane[host]) != FAN_OK)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread"); /* the lane stays unused */
    m->has_lane[host] = true;
    return FAN_OK;
}

fan_status fan__queue_new(fan_sim *m, int device, uint64_t handle, bool blocking, const fan_clock *seen,
                          fan_sim_queue **out, fan_error *err)
{
    fan_sim_queue *q = fan_calloc(sizeof *q);
    if (!q || fan_grow((void **)&m->queues, &m->queues_cap, m->nqueues + 1, sizeof *m->queues)) {
        fan_free(q);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
    fan_status status = FAN_OK;
    if (seen && fan_race_check_reuse(m->race_check, seen, &q->lane))
        fan_race_check_name(m->race_check, q->lane, FAN_SIM_OWNER(device, handle));
    else
        status = queue_lane(m, device, handle, &q->lane, err);
    if (status != FAN_OK) {
        fan_free(q);
        return status;
    }
    q->refs = 1;
    q->device = device;
    q->handle = handle;
    q->name = fan__sim_new_name(m, OF_STREAM);
    q->legacy = handle == 1;
    q->blocking = blocking || q->legacy;
    q->tail = &q->head;
    q->at = m->nqueues;
    m->queues[m->nqueues++] = q;
    *out = q;
    return FAN_OK;
}

void fan__queue_drop(fan_sim_queue *q)
{
    if (q)
        q->refs--; /* fan__queue_sweep frees it */
}

void fan__queue_sweep(fan_sim *m)
{
    size_t kept = 0;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *q = m->queues[i];
        if (q->refs == 0 && !q->head) {
            fan_race_check_leave(m->race_check, q->lane);
            fan_free(q);
            continue;
        }
        q->at = kept;
        m->queues[kept++] = q;
    }
    m->nqueues = kept;
}

void fan__queue_append(fan_sim *m, fan_sim_queue *q, fan_sim_op *op)
{
    q->queued++;
    if (!op)
        return;
    op->next = NULL;
    op->number = m->number++;
    *q->tail = op;
    q->tail = &op->next;
}

fan_sim_op *fan__queue_pop(fan_sim_queue *q)
{
    fan_sim_op *op = q->head;
    q->head = op->next;
    if (!q->head)
        q->tail = &q->head;
    q->done++;
    return op;
}

fan_status fan__queue_wait(fan_sim *m, fan_sim_queue *q, fan_sim_point point, fan_error *err)
{
    if (point.queue == q || point.queue->done >= point.upto)
        return FAN_OK;
    fan_sim_op *op = NULL;
    if (m->config.run_work) {
        op = fan_calloc(sizeof *op);
        if (!op)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        op->wait = point;
        point.queue->refs++;
    }
    fan__queue_append(m, q, op);
    return FAN_OK;
}

void fan__queue_drop_work(fan_sim *m)
{
    fan_sim_op *gone = NULL;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *q = m->queues[i];
        while (q->head) {
            fan_sim_op *op = fan__queue_pop(q);
            fan__queue_drop(op->wait.queue);
            op->next = gone;
            gone = op;
        }
        q->done = q->queued;
    }
    for (fan_sim_op *op = gone; op; op = gone) { /* fini may sweep the queues */
        gone = op->next;
        if (op->fini)
            op->fini(op->ctx);
        fan_free(op);
    }
}

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
