#include "device/sim/machine.h"

#include "base/mem.h"
#include "device/stream.h"
#include "device/memory.h"

#include <stdio.h>

#define KERNEL_US 1.0 /* at least */

fan_status fan__work_enqueue(fan_sim *m, fan_sim_queue *q, fan__work *w, const char *call_site, fan_error *err)
{
    fan_race race;
    double *host = &m->host_us[fan__sim_host(m)];
    FAN_TRY(fan__stream_barrier(m, q, err));
    fan_status status =
        fan__access_judge(m, q->lane, w->name, call_site, w->kept, w->by_user, w->next, w->what, &race, err);
    if (status != FAN_OK && status != FAN_ERR_RACE)
        return status;
    fan__sim_access(m, q->name, true);
    fan__sim_access(m, FAN__NAME(OF_QUEUED, 0), FAN_SCHED_COUNT);
    fan__access_report(m, w->next, w->what);
    fan__queue_append(m, q, w->op);
    if (!w->launched)
        *host += m->config.launch_us;
    w->start = fan__later(q->end_us, *host);
    w->end = q->end_us = w->start + w->us;
    m->device_us = fan__later(m->device_us, w->end);
    return status == FAN_ERR_RACE ? fan__sim_raise(m, &race, err) : FAN_OK;
}

/* work_keep_blocks: makes the graph keep the memory of these accesses. -1: out of memory, nothing changed. */
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
        fan_block *b = a && a->size ? fan__access_block(m, a->data) : NULL;
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

/* work_record: records work in the capture of q: kernel k, which may represent several jobs, or (k NULL) one job. */
static fan_status work_record(fan_sim *m, fan_sim_queue *q, const fan_sim_kernel *k, const fan_job *jobs, size_t n,
                              const fan__work *w, const char *call_site, fan_error *err)
{
    static const fan_sim_kernel none;
    const fan_sim_kernel *kernel = k ? k : &none;
    fan_sim_recording *r = q->recording;
    fan__packer p = {NULL, 0};
    if (!k && (jobs->kind == FAN_JOB_UPLOAD || jobs->stats_out))
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, FAN_CAPTURE_UNSUPPORTED,
            "%s on stream %llu of sim:%d needs the host, which a graph cannot wait for: do it before the capture",
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

/* work_submit: queues or records work on s: kernel k, which may represent several jobs, or (k NULL) one job. `call`:
 * its name for planned failures. *kept (NULL: not wanted): the queue or the graph calls k->fini. */
static fan_status work_submit(fan_sim *m, fan_stream *s, const char *call, const fan_sim_kernel *k, const fan_job *jobs,
                              size_t n, uint64_t bytes, fan__work *w, bool *kept, fan_error *err)
{
    char call_site[FAN__SITE];
    fan_status status;
    fan_sim_queue *q = fan__queue_of(s);
    fan__sim_call_site(m, call_site, sizeof call_site);
    if (m->config.run_work && !(w->op = fan__op_new(jobs, n)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    fan_sim_op *op = w->op;
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, call, err));
    FAN_GO(fan__sim_raise_pending(m, err));
    w->us = k && k->us >= 0 ? k->us : fan__later(KERNEL_US, (double)bytes / (m->config.gbytes_per_s * 1e3));
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
    fan__work w = {.name = job->label ? job->label : fan_job_word(job->kind), .next = fan__visit_job, .what = job};
    fan_status status = work_submit(fan__sim_machine(d), s, "run", NULL, job, 1, fan_job_bytes(job), &w, NULL, err);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_job_trace(d, s, job, 0, w.start, w.end);
    return status;
}

fan_status fan__sim_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *states,
                             fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    for (size_t i = 0; i < n; i++)
        if (jobs[i].kind != FAN_JOB_SUM || jobs[i].stats)
            return FAN_OK;
    size_t reads = 0, at = 0;
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
    fan_sim_kernel k = {.reads = all, .nreads = reads, .writes = all + reads, .nwrites = n, .us = -1};
    fan__work w = {.name = fan_jobs_label(jobs, n, label, sizeof label), .next = fan__visit_kernel, .what = &k};
    fan_status status = work_submit(fan__sim_machine(d), s, "run", &k, jobs, n, bytes, &w, NULL, err);
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
        bool automatic = b && b->automatic; /* memory of the user (D31) is marked as used on the kernel's stream */
        fan__sim_unlock(m);
        if (!automatic)
            continue;
        if (write)
            fan_memory_set_stream(a->storage, s);
        FAN_TRY(fan_memory_record_stream(a->storage, s, err));
    }
    fan__work w = {.name = k->name ? k->name : "kernel", .next = fan__visit_kernel, .what = k, .by_user = true};
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
