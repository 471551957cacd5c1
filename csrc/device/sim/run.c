#include "device/sim/machine.h"

#include "base/mem.h"
#include "base/rng.h"

void fan__run_settle(fan_sim *m)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 0; i < m->nqueues; i++) {
            fan_sim_queue *q = m->queues[i];
            while (q->head && q->head->wait.queue && q->head->wait.queue->done >= q->head->wait.upto) {
                fan_sim_op *op = fan__queue_pop(q);
                fan__queue_drop(op->wait.queue);
                fan_free(op);
                moved = true;
            }
        }
    }
}

/* run_goes_before: returns whether a named schedule runs queue a before queue b. */
static bool run_goes_before(const fan_sim *m, const fan_sim_queue *a, const fan_sim_queue *b)
{
    switch (m->config.schedule) {
    case FAN_SIM_LIFO:
        return a->head->number > b->head->number;
    case FAN_SIM_ROUND_ROBIN: /* the first after the one that ran last */
        return (a->at > m->last) != (b->at > m->last) ? a->at > m->last : a->at < b->at;
    case FAN_SIM_STARVE:
        if ((a->handle == m->config.starve) != (b->handle == m->config.starve))
            return b->handle == m->config.starve;
        break;
    case FAN_SIM_FIFO:
    case FAN_SIM_SEEDED:
        break;
    }
    return a->head->number < b->head->number;
}

fan_sim_queue *fan__run_pick(fan_sim *m)
{
    fan_sim_queue *best = NULL;
    uint64_t n = 0;
    fan__run_settle(m);
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *q = m->queues[i];
        if (!q->head || q->head->wait.queue || q->running)
            continue;
        n++;
        if (m->config.schedule == FAN_SIM_SEEDED ? fan_rng(&m->random) % n == 0 : !best || run_goes_before(m, q, best))
            best = q;
    }
    return best;
}

fan_status fan__run_one(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sim_op *op = q->head;
    q->running = true;
    q->refs++;
    m->last = q->at;
    m->executor = fan_thread_id();
    m->depth++;
    size_t begin = op->njobs > 1 ? fan_rng(&m->random) % op->njobs : 0;
    fan__sim_unlock(m);

    fan__sim_here.kernels++;
    for (size_t i = 0; i < op->njobs; i++) /* a kernel has its device to itself, and its parts run in any order */
        fan_job_run(&op->jobs[(begin + i) % op->njobs], false);
    if (op->fn)
        status = op->fn(op->ctx, err);
    if (op->fini)
        op->fini(op->ctx);
    fan__sim_here.kernels--;

    fan__sim_lock(m);
    if (--m->depth == 0)
        m->executor = 0;
    fan_free(fan__queue_pop(q));
    q->running = false;
    q->refs--;
    (void)pthread_cond_broadcast(&m->ran);
    return status;
}

void fan__run_stand_by(fan_sim *m)
{
    void *let_go = NULL;
    uint64_t other = m->executor;
    if (m->hooks.before_block) {
        fan__sim_unlock(m);
        let_go = m->hooks.before_block(m->hooks.ctx);
        fan__sim_lock(m);
    }
    if (m->executor == other)
        (void)pthread_cond_wait(&m->ran, &m->lock);
    if (m->hooks.after_block) {
        fan__sim_unlock(m);
        m->hooks.after_block(m->hooks.ctx, let_go);
        fan__sim_lock(m);
    }
}

static fan_status run_stuck(fan_sim *m, fan_error *err)
{
    char text[FAN_ERROR_TEXT] = "";
    for (size_t i = 0; i < m->nqueues; i++) {
        const fan_sim_queue *q = m->queues[i];
        if (q->head && q->running)
            fan_append(text, sizeof text, "; stream %llu of sim:%d runs the calling kernel",
                       (unsigned long long)q->handle, q->device);
        else if (q->head && q->head->wait.queue)
            fan_append(text, sizeof text, "; stream %llu of sim:%d waits for stream %llu of sim:%d",
                       (unsigned long long)q->handle, q->device, (unsigned long long)q->head->wait.queue->handle,
                       q->head->wait.queue->device);
    }
    return fan_fail(err, FAN_ERR_DEADLOCK, "no queued work can run%s", text);
}

fan_status fan__run_until(fan_sim *m, fan_sim_point point, fan_error *err)
{
    fan_status status = FAN_OK;
    if (!m->config.run_work) {
        for (size_t i = 0; i < m->nqueues; i++)
            m->queues[i]->done = m->queues[i]->queued;
        return FAN_OK;
    }
    if (point.queue)
        point.queue->refs++;
    while (status == FAN_OK) {
        fan__run_settle(m);
        bool over = !point.queue || point.queue->done >= point.upto;
        for (size_t i = 0; !point.queue && over && i < m->nqueues; i++)
            over = m->queues[i]->done >= m->queues[i]->queued;
        if (over)
            break;
        if (m->executor && m->executor != fan_thread_id()) {
            fan__run_stand_by(m);
            continue;
        }
        fan_sim_queue *q = fan__run_pick(m);
        status = q ? fan__run_one(m, q, err) : run_stuck(m, err);
    }
    fan__queue_drop(point.queue);
    fan__queue_sweep(m);
    return status;
}

fan_status fan__run_join(fan_sim *m, const fan_clock *what, fan_error *err)
{
    fan__sim_access(m, FAN__NAME(OF_WAITED, fan__sim_host(m)), true);
    return fan_race_check_sync(m->race_check, fan__sim_lane(m), what) == FAN_OK
               ? FAN_OK
               : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
}

fan_status fan__run_finish(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    fan_clock then;
    fan_clock_init(&then);
    double us = q->end_us;
    fan_status status = fan_clock_copy(&then, fan_race_check_clock(m->race_check, q->lane))
                            ? fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait")
                            : FAN_OK;
    if (status == FAN_OK)
        status = fan__run_until(m, (fan_sim_point){q, q->queued}, err);
    if (status == FAN_OK)
        status = fan__run_join(m, &then, err);
    fan_clock_fini(&then);
    if (status == FAN_OK)
        m->host_us[fan__sim_host(m)] = fan__later(m->host_us[fan__sim_host(m)], us);
    return status;
}

bool fan__run_has_passed(const fan_sim_event *ev)
{
    return !ev->point.queue || ev->point.queue->done >= ev->point.upto;
}

fan_status fan__run_for(fan_sim *m, fan_sim_point point, size_t depth, bool *can, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sim_queue *q = point.queue;
    q->refs++;
    for (fan__run_settle(m); status == FAN_OK && *can && q->done < point.upto; fan__run_settle(m)) {
        if (m->executor && m->executor != fan_thread_id())
            fan__run_stand_by(m);
        else if (!q->head || q->running ||
                 depth > m->nqueues) /* a chain of waits longer than the number of queues is a cycle */
            *can = false;
        else if (q->head->wait.queue)
            status = fan__run_for(m, q->head->wait, depth + 1, can, err);
        else
            status = fan__run_one(m, q, err);
    }
    fan__queue_drop(q);
    return status;
}

fan_status fan__sim_nudge(fan_device *d, fan_error *err)
{
    fan_sim *m = fan__sim_machine(d);
    fan_status status = FAN_OK;
    fan__sim_lock(m);
    bool chosen = m->has_chooser && m->chooser.pick;
    fan_sim_queue *q = chosen || fan__sim_here.kernels || !m->config.run_work || m->executor ? NULL : fan__run_pick(m);
    if (q) {
        status = fan__run_one(m, q, err);
        fan__run_settle(m);
        fan__queue_sweep(m);
    } else if (!chosen) {
        fan_sched_not_ready();
    }
    fan__sim_unlock(m);
    return status;
}
