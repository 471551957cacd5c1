/* The queues of streams, and the work in them.
 *
 *   queues     made, freed, appended to
 *   run        which head runs next; runs it; waits for a point
 *   streams    barriers of the legacy default stream; new streams
 *   work       checks it and queues it, or records it in a capture; the table's entries */
#include "base/mem.h"
#include "base/rng.h"
#include "device/memory.h"
#include "device/sim/machine.h"
#include "device/stream.h"

#include <stdio.h>
#include <string.h>

fan_status fan__queue_host(fan_sim *machine, size_t host, uint64_t actor, fan_error *err)
{
    if (machine->has_lane[host])
        return FAN_OK;
    uint32_t *lane = &machine->host_lane[host];
    FAN_TRY(fan_race_check_lane(machine->race_check, FAN_SIM_OWNER(-1, actor), lane, err));
    if (fan_race_check_host(machine->race_check, *lane) != FAN_OK) {
        /* the lane stays unused */
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread");
    }
    machine->has_lane[host] = true;
    return FAN_OK;
}

fan_status fan__queue_new(fan_sim *machine, int device, uint64_t handle, bool blocking,
                          const fan_clock *seen, fan_sim_queue **out, fan_error *err)
{
    fan_sim_queue *queue = fan_calloc(sizeof *queue);
    if (!queue || fan_grow((void **)&machine->queues, &machine->queues_cap, machine->nqueues + 1,
                           sizeof *machine->queues)) {
        fan_free(queue);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
    fan_status status = FAN_OK;
    uint64_t owner = FAN_SIM_OWNER(device, handle);
    if (!seen || !fan_race_check_reuse(machine->race_check, seen, owner, &queue->lane))
        status = fan_race_check_lane(machine->race_check, owner, &queue->lane, err);
    if (status != FAN_OK) {
        fan_free(queue);
        return status;
    }
    queue->refs = 1;
    queue->device = device;
    queue->handle = handle;
    queue->name = fan__sim_new_name(machine, OF_STREAM);
    queue->legacy = handle == 1;
    queue->blocking = blocking || queue->legacy;
    queue->tail = &queue->head;
    queue->at = machine->nqueues;
    machine->queues[machine->nqueues++] = queue;
    *out = queue;
    return FAN_OK;
}

void fan__queue_drop(fan_sim_queue *queue)
{
    if (queue)
        queue->refs--; /* fan__queue_sweep frees it */
}

void fan__queue_sweep(fan_sim *machine)
{
    size_t kept = 0;
    for (size_t i = 0; i < machine->nqueues; i++) {
        fan_sim_queue *queue = machine->queues[i];
        if (queue->refs == 0 && !queue->head) {
            fan_race_check_leave(machine->race_check, queue->lane);
            fan_free(queue);
            continue;
        }
        queue->at = kept;
        machine->queues[kept++] = queue;
    }
    machine->nqueues = kept;
}

static void fan__queue_append(fan_sim *machine, fan_sim_queue *queue, fan_sim_op *op)
{
    queue->queued++;
    if (!op)
        return;
    op->next = NULL;
    op->number = machine->number++;
    *queue->tail = op;
    queue->tail = &op->next;
}

/* fan__queue_pop: removes the head; the caller frees it. */
static fan_sim_op *fan__queue_pop(fan_sim_queue *queue)
{
    fan_sim_op *op = queue->head;
    queue->head = op->next;
    if (!queue->head)
        queue->tail = &queue->head;
    queue->done++;
    return op;
}

fan_status fan__queue_wait(fan_sim *machine, fan_sim_queue *queue, fan_sim_point point,
                           fan_error *err)
{
    if (point.queue == queue)
        return FAN_OK;
    if (point.queue->done >= point.upto)
        return FAN_OK;
    fan_sim_op *op = NULL;
    if (machine->config.run_work) {
        op = fan_calloc(sizeof *op);
        if (!op)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        op->wait = point;
        point.queue->refs++;
    }
    fan__queue_append(machine, queue, op);
    return FAN_OK;
}

void fan__queue_drop_work(fan_sim *machine)
{
    fan_sim_op *gone = NULL;
    for (size_t i = 0; i < machine->nqueues; i++) {
        fan_sim_queue *queue = machine->queues[i];
        while (queue->head) {
            fan_sim_op *op = fan__queue_pop(queue);
            fan__queue_drop(op->wait.queue);
            op->next = gone;
            gone = op;
        }
        queue->done = queue->queued;
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

/* point_passed: returns whether all that the point represents has run. */
static bool point_passed(fan_sim_point point)
{
    return !point.queue || point.queue->done >= point.upto;
}

void fan__run_settle(fan_sim *machine)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 0; i < machine->nqueues; i++) {
            fan_sim_queue *queue = machine->queues[i];
            while (queue->head && queue->head->wait.queue && point_passed(queue->head->wait)) {
                fan_sim_op *op = fan__queue_pop(queue);
                fan__queue_drop(op->wait.queue);
                fan_free(op);
                moved = true;
            }
        }
    }
}

/* run_goes_before: returns whether a named schedule runs queue a before queue b. */
static bool run_goes_before(const fan_sim *machine, const fan_sim_queue *a, const fan_sim_queue *b)
{
    bool a_first;
    bool b_first;
    switch (machine->config.schedule) {
    case FAN_SIM_LIFO:
        return a->head->number > b->head->number;
    case FAN_SIM_ROUND_ROBIN: /* the first after the one that ran last */
        a_first = a->at > machine->last;
        b_first = b->at > machine->last;
        if (a_first == b_first)
            return a->at < b->at;
        return a_first;
    case FAN_SIM_STARVE:
        a_first = a->handle != machine->config.starve;
        b_first = b->handle != machine->config.starve;
        if (a_first != b_first)
            return a_first;
        break;
    case FAN_SIM_FIFO:
    case FAN_SIM_SEEDED:
        break;
    }
    return a->head->number < b->head->number;
}

fan_sim_queue *fan__run_pick(fan_sim *machine)
{
    fan_sim_queue *best = NULL;
    uint64_t n = 0;
    fan__run_settle(machine);
    for (size_t i = 0; i < machine->nqueues; i++) {
        fan_sim_queue *queue = machine->queues[i];
        if (!queue->head || queue->head->wait.queue || queue->running)
            continue;
        bool chosen;
        n++;
        if (machine->config.schedule == FAN_SIM_SEEDED)
            chosen = fan_rng(&machine->random) % n == 0;
        else
            chosen = !best || run_goes_before(machine, queue, best);
        if (chosen)
            best = queue;
    }
    return best;
}

fan_status fan__run_one(fan_sim *machine, fan_sim_queue *queue, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sim_op *op = queue->head;
    queue->running = true;
    queue->refs++;
    machine->last = queue->at;
    machine->executor = fan_thread_id();
    machine->depth++;
    size_t begin = 0;
    if (op->njobs > 1)
        begin = fan_rng(&machine->random) % op->njobs;
    fan__sim_unlock(machine);

    fan__sim_here.kernels++;
    /* a kernel has its device to itself, and its parts run in any order */
    for (size_t i = 0; i < op->njobs; i++)
        fan_job_run(&op->jobs[(begin + i) % op->njobs], false);
    if (op->fn)
        status = op->fn(op->ctx, err);
    if (op->fini)
        op->fini(op->ctx);
    fan__sim_here.kernels--;

    fan__sim_lock(machine);
    if (--machine->depth == 0)
        machine->executor = 0;
    fan_free(fan__queue_pop(queue));
    queue->running = false;
    queue->refs--;
    (void)pthread_cond_broadcast(&machine->ran);
    return status;
}

void fan__run_stand_by(fan_sim *machine)
{
    const fan_sim_hooks *hooks = &machine->hooks;
    void *let_go = NULL;
    uint64_t other = machine->executor;
    if (hooks->before_block) {
        fan__sim_unlock(machine);
        let_go = hooks->before_block(hooks->ctx);
        fan__sim_lock(machine);
    }
    if (machine->executor == other)
        (void)pthread_cond_wait(&machine->ran, &machine->lock);
    if (hooks->after_block) {
        fan__sim_unlock(machine);
        hooks->after_block(hooks->ctx, let_go);
        fan__sim_lock(machine);
    }
}

static fan_status run_stuck(fan_sim *machine, fan_error *err)
{
    char text[FAN_ERROR_TEXT] = "";
    for (size_t i = 0; i < machine->nqueues; i++) {
        const fan_sim_queue *queue = machine->queues[i];
        if (queue->head && queue->running) {
            fan_append(text, sizeof text, "; stream %llu of sim:%d runs the calling kernel",
                       (unsigned long long)queue->handle, queue->device);
        } else if (queue->head && queue->head->wait.queue) {
            fan_append(text, sizeof text, "; stream %llu of sim:%d waits for stream %llu of sim:%d",
                       (unsigned long long)queue->handle, queue->device,
                       (unsigned long long)queue->head->wait.queue->handle,
                       queue->head->wait.queue->device);
        }
    }
    return fan_fail(err, FAN_ERR_DEADLOCK, "no queued work can run%s", text);
}

fan_status fan__run_until(fan_sim *machine, fan_sim_point point, fan_error *err)
{
    fan_status status = FAN_OK;
    if (!machine->config.run_work) {
        for (size_t i = 0; i < machine->nqueues; i++)
            machine->queues[i]->done = machine->queues[i]->queued;
        return FAN_OK;
    }
    if (point.queue)
        point.queue->refs++;
    while (status == FAN_OK) {
        fan__run_settle(machine);
        bool over = point_passed(point);
        for (size_t i = 0; !point.queue && over && i < machine->nqueues; i++)
            over = machine->queues[i]->done >= machine->queues[i]->queued;
        if (over)
            break;
        if (machine->executor && machine->executor != fan_thread_id()) {
            fan__run_stand_by(machine);
            continue;
        }
        fan_sim_queue *queue = fan__run_pick(machine);
        if (queue)
            status = fan__run_one(machine, queue, err);
        else
            status = run_stuck(machine, err);
    }
    fan__queue_drop(point.queue);
    fan__queue_sweep(machine);
    return status;
}

fan_status fan__lane_after(fan_sim *machine, uint32_t lane, const fan_clock *clock, fan_error *err)
{
    if (fan_race_check_sync(machine->race_check, lane, clock) != FAN_OK)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
    return FAN_OK;
}

fan_status fan__run_join(fan_sim *machine, const fan_clock *clock, fan_error *err)
{
    fan__sim_access(machine, FAN__NAME(OF_WAITED, fan__sim_host(machine)), true);
    return fan__lane_after(machine, fan__sim_lane(machine), clock, err);
}

fan_status fan__run_to(fan_sim *machine, fan_sim_point point, const fan_clock *clock, double us,
                       fan_error *err)
{
    fan_clock then; /* a copy: other threads may change it meanwhile */
    fan_status status;
    fan_clock_init(&then);
    if (fan_clock_copy(&then, clock))
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait"));
    FAN_GO(fan__run_until(machine, point, err));
    FAN_GO(fan__run_join(machine, &then, err));
    fan__host_until(machine, us);
done:
    fan_clock_fini(&then);
    return status;
}

fan_status fan__run_finish(fan_sim *machine, fan_sim_queue *queue, fan_error *err)
{
    const fan_clock *clock = fan_race_check_clock(machine->race_check, queue->lane);
    return fan__run_to(machine, (fan_sim_point){queue, queue->queued}, clock, queue->end_us, err);
}

bool fan__run_has_passed(const fan_sim_event *ev)
{
    return point_passed(ev->point);
}

fan_status fan__run_for(fan_sim *machine, fan_sim_point point, size_t depth, bool *can,
                        fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sim_queue *queue = point.queue;
    queue->refs++;
    for (;;) {
        fan__run_settle(machine);
        if (status != FAN_OK || !*can || point_passed(point))
            break;
        /* a chain of waits longer than the number of queues is a cycle */
        bool blocked = !queue->head || queue->running || depth > machine->nqueues;
        if (machine->executor && machine->executor != fan_thread_id())
            fan__run_stand_by(machine);
        else if (blocked)
            *can = false;
        else if (queue->head->wait.queue)
            status = fan__run_for(machine, queue->head->wait, depth + 1, can, err);
        else
            status = fan__run_one(machine, queue, err);
    }
    fan__queue_drop(queue);
    return status;
}

fan_status fan__sim_nudge(fan_device *d, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(d);
    fan_status status = FAN_OK;
    fan__sim_lock(machine);
    bool chosen = fan__sim_picks(machine);
    bool may_run = machine->config.run_work && !machine->executor && !fan__sim_here.kernels;
    fan_sim_queue *queue = NULL;
    if (may_run && !chosen)
        queue = fan__run_pick(machine);
    if (queue) {
        status = fan__run_one(machine, queue, err);
        fan__run_settle(machine);
        fan__queue_sweep(machine);
    } else if (!chosen) {
        fan_sched_not_ready();
    }
    fan__sim_unlock(machine);
    return status;
}

fan_status fan__stream_barrier(fan_sim *machine, fan_sim_queue *queue, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = 0; queue->legacy && machine->recordings && i < machine->nqueues; i++) {
        const fan_sim_queue *other = machine->queues[i];
        if (!other->recording || other->device != queue->device || !other->blocking)
            continue;
        int code = fan_capture_break(&other->recording->capture, FAN_CAPTURE_IMPLICIT);
        status = fan__recording_refuse(queue, code, "work", err);
    }
    FAN_TRY(status);
    if (!queue->blocking)
        return FAN_OK;
    for (size_t i = 0; i < machine->nqueues; i++) {
        fan_sim_queue *other = machine->queues[i];
        bool ordered = queue->legacy ? other->blocking : other->legacy;
        if (other == queue || other->device != queue->device || !ordered)
            continue;
        fan__sim_access(machine, other->name, false);
        FAN_TRY(fan__queue_wait(machine, queue, (fan_sim_point){other, other->queued}, err));
        /* The host's clock is not needed: a sync queues nothing. */
        FAN_TRY(fan__lane_after(machine, queue->lane,
                                fan_race_check_clock(machine->race_check, other->lane), err));
        queue->end_us = fan__later(queue->end_us, other->end_us);
    }
    return FAN_OK;
}

fan_status fan__sim_enter_on(fan_sim *machine, fan_sim_queue *queue, const char *call,
                             const char *what, fan_error *err)
{
    FAN_TRY(fan__sim_enter(machine, call, err));
    FAN_TRY(fan__sim_raise_pending(machine, err));
    FAN_TRY(fan__recording_none(queue, what, err));
    return fan__stream_barrier(machine, queue, err);
}

fan_status fan_sim_stream(fan_sim *machine, int device, bool blocking, fan_stream **out,
                          fan_error *err)
{
    fan_sim_queue *queue;
    fan_sim_device_part *part;
    fan_status status;
    *out = NULL;
    FAN_TRY(fan__sim_part(machine, device, &part, err));
    fan_yield();
    fan__sim_lock(machine);
    FAN_GO(fan__sim_alive(machine, err));
    const fan_clock *now = fan_race_check_clock(machine->race_check, fan__sim_lane(machine));
    FAN_GO(fan__queue_new(machine, device, machine->handle + 1, blocking, now, &queue, err));
    fan__sim_access_state(machine, OF_STREAMS, FAN_SCHED_COUNT);
    machine->handle++;
    *out = fan_stream_new(&part->device, queue->handle, queue);
    if (!*out) {
        fan__queue_drop(queue);
        fan__queue_sweep(machine);
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
done:
    fan__sim_unlock(machine);
    return status;
}

fan_status fan_sim_name_stream(fan_sim *machine, const fan_stream *s, const char *name,
                               fan_error *err)
{
    fan_status status = FAN_OK;
    fan__sim_lock(machine);
    if (fan_grow((void **)&machine->names, &machine->names_cap, machine->nnames + 1,
                 sizeof *machine->names) < 0) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for the name of a stream");
        goto done;
    }
    fan_sim_name *made = &machine->names[machine->nnames++];
    made->owner = FAN_SIM_OWNER(s->device->index, s->handle);
    snprintf(made->text, sizeof made->text, "%s", name);
done:
    fan__sim_unlock(machine);
    return status;
}

#define KERNEL_US 1.0 /* at least */

fan_status fan__work_enqueue(fan_sim *machine, fan_sim_queue *queue, fan__work *work,
                             fan_error *err)
{
    fan_race race;
    double *host = fan__host_clock(machine);
    FAN_TRY(fan__stream_barrier(machine, queue, err));
    fan_status status = fan__access_judge(machine, queue->lane, work, &race, err);
    if (status != FAN_OK && status != FAN_ERR_RACE)
        return status;
    fan__sim_access(machine, queue->name, true);
    fan__sim_access_state(machine, OF_QUEUED, FAN_SCHED_COUNT);
    fan__access_report(machine, work);
    fan__queue_append(machine, queue, work->op);
    if (!work->launched)
        *host += machine->config.launch_us;
    work->start = fan__later(queue->end_us, *host);
    work->end = work->start + work->us;
    queue->end_us = work->end;
    machine->device_us = fan__later(machine->device_us, work->end);
    if (status == FAN_ERR_RACE)
        return fan__sim_raise(machine, &race, err);
    return FAN_OK;
}

/* work_keep_blocks: makes the graph keep the memory that the work accesses.
 * -1: out of memory, nothing changed. */
static int work_keep_blocks(fan_sim *machine, fan_sim_graph *g, const fan__work *work)
{
    const fan_array *a = NULL;
    bool write;
    size_t most = 0;
    while (fan__work_access(work, most, &a, &write))
        most++;
    if (fan_grow((void **)&g->blocks, &g->blocks_cap, g->nblocks + most, sizeof *g->blocks))
        return -1;
    for (size_t i = 0; i < most && !machine->config.bare; i++) {
        (void)fan__work_access(work, i, &a, &write);
        fan_block *b = fan__access_bytes(machine, a);
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

/* work_pack: packs a command with copies of the work's arrays and jobs; NULL: only counts. */
static fan_sim_command *work_pack(fan__packer *p, const fan__work *work)
{
    const fan_sim_kernel *kernel = &work->kernel;
    fan_sim_command *c = fan__pack(p, sizeof *c);
    fan_array **reads = fan__pack_arrays(p, kernel->reads, kernel->nreads);
    fan_array **writes = fan__pack_arrays(p, kernel->writes, kernel->nwrites);
    const fan_job *jobs = fan__pack_jobs(p, work->jobs, work->njobs);
    if (!c)
        return NULL;
    c->kernel = *kernel;
    c->kernel.reads = reads;
    c->kernel.writes = writes;
    c->jobs = jobs;
    c->njobs = work->njobs;
    c->kind = FAN_COMMAND_WORK;
    c->us = work->us;
    snprintf(c->name, sizeof c->name, "%s", work->name);
    snprintf(c->call_site, sizeof c->call_site, "%s", work->call_site);
    return c;
}

/* work_needs_host: whether a job needs the host before or after it. */
static bool work_needs_host(const fan__work *work)
{
    if (work->njobs != 1)
        return false;
    return work->jobs->kind == FAN_JOB_UPLOAD || work->jobs->stats_out;
}

/* work_record: records work in the capture of `queue`. */
static fan_status work_record(fan_sim *machine, fan_sim_queue *queue, const fan__work *work,
                              fan_error *err)
{
    fan_sim_recording *r = queue->recording;
    fan__packer p = {NULL, 0};
    if (work_needs_host(work)) {
        return fan_fail_code(err, FAN_ERR_CAPTURE, FAN_CAPTURE_UNSUPPORTED,
                             "%s on stream %llu of sim:%d needs the host, which a graph cannot "
                             "wait for: do it before the capture",
                             work->name, (unsigned long long)queue->handle, queue->device);
    }
    work_pack(&p, work);
    fan_sim_command *c = fan__command_new(p.used);
    if (!c)
        return fan__recording_refuse(queue, -1, work->name, err);
    p = (fan__packer){(char *)c, 0};
    work_pack(&p, work);
    c->member = queue->member;
    int code = work_keep_blocks(machine, r->graph, work);
    if (code == 0)
        code = fan_capture_work(&r->capture, queue->member);
    if (code) {
        fan_free(c);
        return fan__recording_refuse(queue, code, work->name, err);
    }
    fan__command_put(r->graph, c);
    return FAN_OK;
}

/* work_submit: queues or records work on s. `call`: its name for planned failures. */
static fan_status work_submit(fan_stream *s, const char *call, fan__work *work, fan_error *err)
{
    fan_sim *machine = fan__sim_machine(s->device);
    const fan_sim_kernel *kernel = &work->kernel;
    char call_site[FAN__SITE];
    fan_status status;
    fan_sim_queue *queue = fan__queue_of(s);
    fan_sim_op *op = NULL;
    fan__sim_call_site(machine, call_site, sizeof call_site);
    work->call_site = call_site;
    if (machine->config.run_work) {
        op = fan__op_new(work->jobs, work->njobs);
        if (!op)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    }
    work->op = op;
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter(machine, call, err));
    FAN_GO(fan__sim_raise_pending(machine, err));
    work->us = kernel->us;
    if (kernel->us < 0)
        work->us = fan__later(KERNEL_US, fan__sim_copy_us(machine, work->bytes));
    if (queue->recording) {
        status = work_record(machine, queue, work, err);
        work->owned = status == FAN_OK;
        goto done;
    }
    FAN_GO(fan_memory_scope_check(s, err));
    status = fan__work_enqueue(machine, queue, work, err);
    work->owned = status == FAN_OK && op;
    if (work->owned) {
        op->fn = kernel->fn;
        op->fini = kernel->fini;
        op->ctx = kernel->ctx;
    }
    if (status == FAN_OK || status == FAN_ERR_RACE)
        op = NULL;
done:
    fan__sim_unlock(machine);
    fan_free(op);
    return status;
}

fan_status fan__sim_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    fan__work work = {
        .name = fan_job_name(job),
        .bytes = fan_job_bytes(job),
        .jobs = job,
        .njobs = 1,
        .kernel.us = -1,
    };
    fan_status status = work_submit(s, "run", &work, err);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_job_trace(d, s, job, 0, work.start, work.end);
    return status;
}

/* work_arrays: lists what the sums read, then what they write. */
static void work_arrays(const fan_job *jobs, size_t n, fan_array **reads, fan_array **writes)
{
    for (size_t i = 0; i < n; i++) {
        const fan_job *job = &jobs[i];
        for (size_t j = 0; j < job->n; j++)
            *reads++ = (fan_array *)(uintptr_t)job->in[j].array;
        *writes++ = (fan_array *)(uintptr_t)job->out;
    }
}

fan_status fan__sim_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n,
                             fan_job_state *states, fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    fan__work work = {
        .jobs = jobs,
        .njobs = n,
        .kernel = {.nwrites = n, .us = -1},
    };
    fan_sim_kernel *kernel = &work.kernel;
    for (size_t i = 0; i < n; i++) {
        if (jobs[i].kind != FAN_JOB_SUM)
            return FAN_OK;
        if (jobs[i].stats)
            return FAN_OK;
        kernel->nreads += jobs[i].n;
        work.bytes += fan_job_bytes(&jobs[i]);
    }
    fan_array **all = fan_alloc((kernel->nreads + n) * sizeof *all);
    if (!all)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    fan_array **writes = all + kernel->nreads;
    work_arrays(jobs, n, all, writes);
    kernel->reads = all;
    kernel->writes = writes;
    work.name = fan_jobs_label(jobs, n, label, sizeof label);
    fan_status status = work_submit(s, "run", &work, err);
    fan_free(all);
    for (size_t i = 0; i < n; i++)
        states[i] = status == FAN_OK ? FAN_JOB_QUEUED : FAN_JOB_FAILED;
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_jobs_trace(d, s, jobs, n, label, work.start, work.end);
    return status;
}

/* work_mark: marks memory of the user (D31) as used on the kernel's stream. */
static fan_status work_mark(fan_sim *machine, fan_stream *s, const fan_array *a, bool write,
                            fan_error *err)
{
    if (!a->storage)
        return FAN_OK;
    fan__sim_lock(machine);
    const fan_block *b = fan__access_block(machine, a->storage->data);
    bool automatic = b && b->automatic;
    fan__sim_unlock(machine);
    if (!automatic)
        return FAN_OK;
    if (write)
        fan_memory_set_stream(a->storage, s);
    return fan_memory_record_stream(a->storage, s, err);
}

static void work_trace(const fan_stream *s, const fan__work *work)
{
    if (!fan_trace_on())
        return;
    fan_trace_line line = {
        .kind = FAN_TRACE_KERNEL,
        .device = (int16_t)s->device->index,
        .slot = -1,
        .key = -1,
        .stream = s->handle,
        .bytes = work->bytes,
        .start_us = work->start,
        .end_us = work->end,
    };
    snprintf(line.label, sizeof line.label, "%s", work->name);
    fan_trace_put(&line);
}

fan_status fan_sim_launch(fan_sim *machine, fan_stream *s, const fan_sim_kernel *k, fan_error *err)
{
    if (s->device->self != machine)
        return fan_fail(err, FAN_ERR_VALUE, "the stream belongs to another machine");
    fan_yield();
    fan__work work = {
        .name = k->name ? k->name : "kernel",
        .kernel = *k,
        .by_user = true,
    };
    const fan_array *a = NULL;
    bool write;
    for (size_t i = 0; fan__work_access(&work, i, &a, &write); i++) {
        work.bytes += (uint64_t)a->size * fan_dtype_size(a->dtype);
        FAN_TRY(work_mark(machine, s, a, write, err));
    }
    fan_status status = work_submit(s, "launch", &work, err);
    if (status == FAN_OK && !work.owned && k->fini)
        k->fini(k->ctx); /* no bytes to move: it will never run */
    if (status == FAN_OK || status == FAN_ERR_RACE)
        work_trace(s, &work);
    return status;
}
