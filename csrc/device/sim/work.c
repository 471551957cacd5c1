/* The queues of streams, and the work in them. */
#include "base/mem.h"
#include "base/rng.h"
#include "device/memory.h"
#include "device/sim/machine.h"
#include "device/stream.h"

#include <stdio.h>
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
        /* the lane stays unused */
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread");
    m->has_lane[host] = true;
    return FAN_OK;
}

fan_status fan__queue_new(fan_sim *m, int device, uint64_t handle, bool blocking,
                          const fan_clock *seen, fan_sim_queue **out, fan_error *err)
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

static void fan__queue_append(fan_sim *m, fan_sim_queue *q, fan_sim_op *op)
{
    q->queued++;
    if (!op)
        return;
    op->next = NULL;
    op->number = m->number++;
    *q->tail = op;
    q->tail = &op->next;
}

/* fan__queue_pop: removes the head; the caller frees it. */
static fan_sim_op *fan__queue_pop(fan_sim_queue *q)
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

void fan__run_settle(fan_sim *m)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 0; i < m->nqueues; i++) {
            fan_sim_queue *q = m->queues[i];
            while (q->head && q->head->wait.queue &&
                   q->head->wait.queue->done >= q->head->wait.upto) {
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
        if ((a->at > m->last) != (b->at > m->last))
            return a->at > m->last;
        return a->at < b->at;
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
        bool chosen;
        n++;
        if (m->config.schedule == FAN_SIM_SEEDED)
            chosen = fan_rng(&m->random) % n == 0;
        else
            chosen = !best || run_goes_before(m, q, best);
        if (chosen)
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
    size_t begin = 0;
    if (op->njobs > 1)
        begin = fan_rng(&m->random) % op->njobs;
    fan__sim_unlock(m);

    fan__sim_here.kernels++;
    /* a kernel has its device to itself, and its parts run in any order */
    for (size_t i = 0; i < op->njobs; i++)
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
                       (unsigned long long)q->handle, q->device,
                       (unsigned long long)q->head->wait.queue->handle,
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
        if (q)
            status = fan__run_one(m, q, err);
        else
            status = run_stuck(m, err);
    }
    fan__queue_drop(point.queue);
    fan__queue_sweep(m);
    return status;
}

fan_status fan__run_join(fan_sim *m, const fan_clock *what, fan_error *err)
{
    fan__sim_access(m, FAN__NAME(OF_WAITED, fan__sim_host(m)), true);
    if (fan_race_check_sync(m->race_check, fan__sim_lane(m), what) != FAN_OK)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
    return FAN_OK;
}

fan_status fan__run_finish(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    fan_clock then;
    fan_clock_init(&then);
    double us = q->end_us;
    fan_status status = FAN_OK;
    if (fan_clock_copy(&then, fan_race_check_clock(m->race_check, q->lane)))
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
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
        /* a chain of waits longer than the number of queues is a cycle */
        bool blocked = !q->head || q->running || depth > m->nqueues;
        if (m->executor && m->executor != fan_thread_id())
            fan__run_stand_by(m);
        else if (blocked)
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
    bool may_run = m->config.run_work && !m->executor && !fan__sim_here.kernels;
    fan_sim_queue *q = NULL;
    if (may_run && !chosen)
        q = fan__run_pick(m);
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

fan_status fan__stream_barrier(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = 0; q->legacy && m->recordings && i < m->nqueues; i++) {
        const fan_sim_queue *other = m->queues[i];
        if (other->recording && other->device == q->device && other->blocking)
            status = fan__recording_refuse(
                q, fan_capture_break(&other->recording->capture, FAN_CAPTURE_IMPLICIT), "work",
                err);
    }
    FAN_TRY(status);
    if (!q->blocking)
        return FAN_OK;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *other = m->queues[i];
        bool ordered = q->legacy ? other->blocking : other->legacy;
        if (other == q || other->device != q->device || !ordered)
            continue;
        fan__sim_access(m, other->name, false);
        FAN_TRY(fan__queue_wait(m, q, (fan_sim_point){other, other->queued}, err));
        /* The host's clock is not needed: a sync queues nothing. */
        if (fan_race_check_sync(m->race_check, q->lane,
                                fan_race_check_clock(m->race_check, other->lane)) != FAN_OK)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        q->end_us = fan__later(q->end_us, other->end_us);
    }
    return FAN_OK;
}

fan_status fan_sim_stream(fan_sim *m, int device, bool blocking, fan_stream **out, fan_error *err)
{
    fan_sim_queue *q = NULL;
    *out = NULL;
    if (device < 0 || device >= m->config.devices)
        return fan_fail(err, FAN_ERR_VALUE, "no device %d: this machine has %d", device,
                        m->config.devices);
    fan_yield();
    fan__sim_lock(m);
    fan_status status = fan__sim_alive(m, err);
    if (status == FAN_OK)
        status = fan__queue_new(m, device, m->handle + 1, blocking,
                                fan_race_check_clock(m->race_check, fan__sim_lane(m)), &q, err);
    if (status == FAN_OK) {
        fan__sim_access(m, FAN__NAME(OF_STREAMS, 0), FAN_SCHED_COUNT);
        m->handle++;
        *out = fan_stream_new(&m->parts[device].device, q->handle, q);
        if (!*out) {
            fan__queue_drop(q);
            fan__queue_sweep(m);
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
        }
    }
    fan__sim_unlock(m);
    return status;
}

#define KERNEL_US 1.0 /* at least */

fan_status fan__work_enqueue(fan_sim *m, fan_sim_queue *q, fan__work *w, const char *call_site,
                             fan_error *err)
{
    fan_race race;
    double *host = &m->host_us[fan__sim_host(m)];
    FAN_TRY(fan__stream_barrier(m, q, err));
    fan_status status = fan__access_judge(m, q->lane, w->name, call_site, w->kept, w->by_user,
                                          w->next, w->what, &race, err);
    if (status != FAN_OK && status != FAN_ERR_RACE)
        return status;
    fan__sim_access(m, q->name, true);
    fan__sim_access(m, FAN__NAME(OF_QUEUED, 0), FAN_SCHED_COUNT);
    fan__access_report(m, w->next, w->what);
    fan__queue_append(m, q, w->op);
    if (!w->launched)
        *host += m->config.launch_us;
    w->start = fan__later(q->end_us, *host);
    w->end = w->start + w->us;
    q->end_us = w->end;
    m->device_us = fan__later(m->device_us, w->end);
    if (status == FAN_ERR_RACE)
        return fan__sim_raise(m, &race, err);
    return FAN_OK;
}

/* work_keep_blocks: makes the graph keep the memory of these accesses. -1: out of memory, nothing
 * changed. */
static int work_keep_blocks(fan_sim *m, fan_sim_graph *g, fan__visit *next, const void *what)
{
    const fan_array *a = NULL;
    bool write;
    size_t most = 0;
    for (size_t i = 0; next(what, i, &a, &write); i++)
        most++;
    if (fan_grow((void **)&g->blocks, &g->blocks_cap, g->nblocks + most, sizeof *g->blocks))
        return -1;
    for (size_t i = 0; !m->config.bare && next(what, i, &a, &write); i++) {
        fan_block *b = fan__access_bytes(m, a);
        bool used = false;
        for (size_t k = 0; b && k < g->nblocks; k++)
            used |= g->blocks[k] == b->lo;
        if (b && !used) {
            b->graphs++;
            g->blocks[g->nblocks++] = b->lo;
        }
    }
    return 0;
}

/* work_record: records work in the capture of q: kernel k, which may represent several jobs, or (k
 * NULL) one job. */
static fan_status work_record(fan_sim *m, fan_sim_queue *q, const fan_sim_kernel *k,
                              const fan_job *jobs, size_t n, const fan__work *w,
                              const char *call_site, fan_error *err)
{
    static const fan_sim_kernel none;
    const fan_sim_kernel *kernel = k ? k : &none;
    fan_sim_recording *r = q->recording;
    fan__packer p = {NULL, 0};
    if (!k && (jobs->kind == FAN_JOB_UPLOAD || jobs->stats_out))
        return fan_fail_code(err, FAN_ERR_CAPTURE, FAN_CAPTURE_UNSUPPORTED,
                             "%s on stream %llu of sim:%d needs the host, which a graph cannot "
                             "wait for: do it before the capture",
                             w->name, (unsigned long long)q->handle, q->device);
    fan__pack(&p, sizeof(fan_sim_command));
    (void)fan__pack_arrays(&p, kernel->reads, kernel->nreads);
    (void)fan__pack_arrays(&p, kernel->writes, kernel->nwrites);
    (void)fan__pack_jobs(&p, jobs, n);
    fan_sim_command *c = fan__command_new(p.used);
    if (!c)
        return fan__recording_refuse(q, -1, w->name, err);
    p = (fan__packer){(char *)c, 0};
    fan__pack(&p, sizeof *c);
    c->kernel = *kernel;
    c->kernel.reads = fan__pack_arrays(&p, kernel->reads, kernel->nreads);
    c->kernel.writes = fan__pack_arrays(&p, kernel->writes, kernel->nwrites);
    c->jobs = fan__pack_jobs(&p, jobs, n);
    c->njobs = n;
    int code = work_keep_blocks(m, r->graph, w->next, w->what);
    if (code == 0)
        code = fan_capture_work(&r->capture, q->member);
    if (code) {
        fan_free(c);
        return fan__recording_refuse(q, code, w->name, err);
    }
    c->kind = FAN_COMMAND_WORK;
    c->member = q->member;
    c->us = w->us;
    snprintf(c->name, sizeof c->name, "%s", w->name);
    snprintf(c->call_site, sizeof c->call_site, "%s", call_site);
    fan__command_put(r->graph, c);
    return FAN_OK;
}

/* work_submit: queues or records work on s: kernel k, which may represent several jobs, or (k NULL)
 * one job. `call`: its name for planned failures. *kept (NULL: not wanted): the queue or the graph
 * calls k->fini. */
static fan_status work_submit(fan_sim *m, fan_stream *s, const char *call, const fan_sim_kernel *k,
                              const fan_job *jobs, size_t n, uint64_t bytes, fan__work *w,
                              bool *kept, fan_error *err)
{
    char call_site[FAN__SITE];
    fan_status status;
    fan_sim_queue *q = fan__queue_of(s);
    fan__sim_call_site(m, call_site, sizeof call_site);
    if (m->config.run_work) {
        w->op = fan__op_new(jobs, n);
        if (!w->op)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    }
    fan_sim_op *op = w->op;
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, call, err));
    FAN_GO(fan__sim_raise_pending(m, err));
    w->us = fan__later(KERNEL_US, (double)bytes / (m->config.gbytes_per_s * 1e3));
    if (k && k->us >= 0)
        w->us = k->us;
    if (q->recording) {
        status = work_record(m, q, k, jobs, n, w, call_site, err);
        if (kept)
            *kept = status == FAN_OK;
        goto done;
    }
    FAN_GO(fan_memory_scope_check(s, err));
    status = fan__work_enqueue(m, q, w, call_site, err);
    if (status == FAN_OK && op && k) {
        op->fn = k->fn;
        op->fini = k->fini;
        op->ctx = k->ctx;
    }
    if (kept)
        *kept = status == FAN_OK && op;
    if (status == FAN_OK || status == FAN_ERR_RACE)
        w->op = NULL;
done:
    fan__sim_unlock(m);
    fan_free(w->op);
    return status;
}

fan_status fan__sim_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    fan__work w = {.name = job->label ? job->label : fan_job_word(job->kind),
                   .next = fan__visit_job,
                   .what = job};
    fan_status status =
        work_submit(fan__sim_machine(d), s, "run", NULL, job, 1, fan_job_bytes(job), &w, NULL, err);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_job_trace(d, s, job, 0, w.start, w.end);
    return status;
}

fan_status fan__sim_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n,
                             fan_job_state *states, fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    for (size_t i = 0; i < n; i++)
        if (jobs[i].kind != FAN_JOB_SUM || jobs[i].stats)
            return FAN_OK;
    size_t reads = 0;
    size_t at = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        reads += jobs[i].n;
        bytes += fan_job_bytes(&jobs[i]);
    }
    fan_array **all = fan_alloc((reads + n) * sizeof *all);
    if (!all)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < jobs[i].n; j++)
            all[at++] = (fan_array *)(uintptr_t)jobs[i].in[j].array;
        all[reads + i] = (fan_array *)(uintptr_t)jobs[i].out;
    }
    fan_sim_kernel k = {
        .reads = all, .nreads = reads, .writes = all + reads, .nwrites = n, .us = -1};
    fan__work w = {.name = fan_jobs_label(jobs, n, label, sizeof label),
                   .next = fan__visit_kernel,
                   .what = &k};
    fan_status status =
        work_submit(fan__sim_machine(d), s, "run", &k, jobs, n, bytes, &w, NULL, err);
    fan_free((void *)(uintptr_t)k.reads);
    for (size_t i = 0; i < n; i++)
        states[i] = status == FAN_OK ? FAN_JOB_QUEUED : FAN_JOB_FAILED;
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_jobs_trace(d, s, jobs, n, label, w.start, w.end);
    return status;
}

fan_status fan_sim_launch(fan_sim *m, fan_stream *s, const fan_sim_kernel *k, fan_error *err)
{
    bool kept = false;
    if (s->device->self != m)
        return fan_fail(err, FAN_ERR_VALUE, "the stream belongs to another machine");
    fan_yield();
    const fan_array *a = NULL;
    bool write;
    uint64_t bytes = 0;
    for (size_t i = 0; fan__visit_kernel(k, i, &a, &write); i++) {
        bytes += (uint64_t)a->size * fan_dtype_size(a->dtype);
        fan__sim_lock(m);
        const fan_block *b = a->storage ? fan__access_block(m, a->storage->data) : NULL;
        /* memory of the user (D31) is marked as used on the kernel's stream */
        bool automatic = b && b->automatic;
        fan__sim_unlock(m);
        if (!automatic)
            continue;
        if (write)
            fan_memory_set_stream(a->storage, s);
        FAN_TRY(fan_memory_record_stream(a->storage, s, err));
    }
    fan__work w = {.name = k->name ? k->name : "kernel",
                   .next = fan__visit_kernel,
                   .what = k,
                   .by_user = true};
    fan_status status = work_submit(m, s, "launch", k, NULL, 0, bytes, &w, &kept, err);
    if (status == FAN_OK && !kept && k->fini)
        k->fini(k->ctx); /* no bytes to move: it will never run */
    if ((status == FAN_OK || status == FAN_ERR_RACE) && fan_trace_on()) {
        fan_trace_line line = {.kind = FAN_TRACE_KERNEL,
                               .device = (int16_t)s->device->index,
                               .slot = -1,
                               .key = -1,
                               .stream = s->handle,
                               .bytes = bytes,
                               .start_us = w.start,
                               .end_us = w.end};
        snprintf(line.label, sizeof line.label, "%s", w.name);
        fan_trace_put(&line);
    }
    return status;
}
