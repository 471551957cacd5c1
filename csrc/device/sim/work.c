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

static double work_us(const fan_sim *m, uint64_t bytes)
{
    return fan__later(KERNEL_US, (double)bytes / (m->config.gbytes_per_s * 1e3));
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

static fan_status work_record(fan_sim *m, fan_sim_queue *q, fan_sim_command *c, const fan__work *w,
                              const char *call_site, fan_error *err)
{
    fan_sim_recording *r = q->recording;
    if (!c)
        return fan__recording_refuse(q, -1, w->name, err);
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

static fan_status work_record_job(fan_sim *m, fan_sim_queue *q, const fan_job *job, const fan__work *w,
                                  const char *call_site, fan_error *err)
{
    fan__packer p = {NULL, 0};
    if (job->kind == FAN_JOB_UPLOAD || job->stats_out)
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, FAN_CAPTURE_UNSUPPORTED,
            "%s on stream %llu of sim:%d needs the host, which a graph cannot wait for: do it before the capture",
            w->name, (unsigned long long)q->handle, q->device);
    fan__pack(&p, sizeof(fan_sim_command));
    (void)fan__pack_jobs(&p, job, 1);
    fan_sim_command *c = fan__command_new(p.used);
    if (c) {
        p = (fan__packer){(char *)c, 0};
        fan__pack(&p, sizeof *c);
        c->jobs = fan__pack_jobs(&p, job, 1);
        c->njobs = 1;
    }
    return work_record(m, q, c, w, call_site, err);
}

/* work_record_kernel: records a kernel; n > 0: it represents these n jobs. */
static fan_status work_record_kernel(fan_sim *m, fan_sim_queue *q, const fan_sim_kernel *k, const fan_job *jobs,
                                     size_t n, const fan__work *w, const char *call_site, fan_error *err)
{
    fan__packer p = {NULL, 0};
    fan__pack(&p, sizeof(fan_sim_command));
    (void)fan__pack_arrays(&p, k->reads, k->nreads);
    (void)fan__pack_arrays(&p, k->writes, k->nwrites);
    (void)fan__pack_jobs(&p, jobs, n);
    fan_sim_command *c = fan__command_new(p.used);
    if (c) {
        p = (fan__packer){(char *)c, 0};
        fan__pack(&p, sizeof *c);
        c->kernel = *k;
        c->kernel.reads = fan__pack_arrays(&p, k->reads, k->nreads);
        c->kernel.writes = fan__pack_arrays(&p, k->writes, k->nwrites);
        c->jobs = fan__pack_jobs(&p, jobs, n);
        c->njobs = n;
    }
    return work_record(m, q, c, w, call_site, err);
}

fan_status fan__sim_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    fan_sim *m = fan__sim_machine(d);
    char call_site[FAN__SITE];
    fan_status status;
    fan__work w = {.name = job->label ? job->label : fan_job_word(job->kind), .next = fan__visit_job, .what = job};
    fan__sim_call_site(m, call_site, sizeof call_site);
    if (m->config.run_work && !(w.op = fan__op_new(job, 1)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "run", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    w.us = work_us(m, fan_job_bytes(job));
    if (fan__queue_of(s)->recording) {
        status = work_record_job(m, fan__queue_of(s), job, &w, call_site, err);
        goto done;
    }
    FAN_GO(fan_memory_scope_check(s, err));
    status = fan__work_enqueue(m, fan__queue_of(s), &w, call_site, err);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        w.op = NULL;
done:
    fan__sim_unlock(m);
    fan_free(w.op);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_job_trace(d, s, job, 0, w.start, w.end);
    return status;
}

/* work_as_kernel: combines the accesses of several sums as one kernel; a->reads is the room for all. FAN_ERR_NOMEM. */
static fan_status work_as_kernel(const fan_job *jobs, size_t n, fan_sim_kernel *k, uint64_t *bytes, fan_error *err)
{
    size_t reads = 0, at = 0;
    *bytes = 0;
    for (size_t i = 0; i < n; i++) {
        reads += jobs[i].n;
        *bytes += fan_job_bytes(&jobs[i]);
    }
    fan_array **all = fan_alloc((reads + n) * sizeof *all);
    if (!all)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < jobs[i].n; j++)
            all[at++] = (fan_array *)(uintptr_t)jobs[i].in[j].array;
        all[reads + i] = (fan_array *)(uintptr_t)jobs[i].out;
    }
    *k = (fan_sim_kernel){.reads = all, .nreads = reads, .writes = all + reads, .nwrites = n, .us = -1};
    return FAN_OK;
}

fan_status fan__sim_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *states,
                             fan_error *err)
{
    fan_sim *m = fan__sim_machine(d);
    char call_site[FAN__SITE], label[FAN_TRACE_LABEL];
    fan_status status;
    fan_sim_kernel k;
    uint64_t bytes;
    for (size_t i = 0; i < n; i++)
        if (jobs[i].kind != FAN_JOB_SUM || jobs[i].stats)
            return FAN_OK;
    FAN_TRY(work_as_kernel(jobs, n, &k, &bytes, err));
    fan__work w = {.name = fan_jobs_label(jobs, n, label, sizeof label), .next = fan__visit_kernel, .what = &k};
    fan__sim_call_site(m, call_site, sizeof call_site);
    fan__sim_lock(m);
    if (m->config.run_work && !(w.op = fan__op_new(jobs, n)))
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work"));
    FAN_GO(fan__sim_enter(m, "run", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    w.us = work_us(m, bytes);
    if (fan__queue_of(s)->recording) {
        status = work_record_kernel(m, fan__queue_of(s), &k, jobs, n, &w, call_site, err);
        goto done;
    }
    FAN_GO(fan_memory_scope_check(s, err));
    status = fan__work_enqueue(m, fan__queue_of(s), &w, call_site, err);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        w.op = NULL;
done:
    fan__sim_unlock(m);
    fan_free(w.op);
    fan_free((void *)(uintptr_t)k.reads);
    for (size_t i = 0; i < n; i++)
        states[i] = status == FAN_OK ? FAN_JOB_QUEUED : FAN_JOB_FAILED;
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_jobs_trace(d, s, jobs, n, label, w.start, w.end);
    return status;
}

/* work_mark_automatic: marks the user's own arrays (D31) as used on the stream of a kernel that accesses them. */
static fan_status work_mark_automatic(fan_sim *m, fan_stream *s, const fan_sim_kernel *k, fan_error *err)
{
    const fan_array *a = NULL;
    bool write;
    for (size_t i = 0; fan__visit_kernel(k, i, &a, &write); i++) {
        fan__sim_lock(m);
        const fan_block *b = a->storage ? fan__access_block(m, a->storage->data) : NULL;
        bool automatic = b && b->automatic;
        fan__sim_unlock(m);
        if (!automatic)
            continue;
        if (write)
            fan_memory_set_stream(a->storage, s);
        FAN_TRY(fan_memory_record_stream(a->storage, s, err));
    }
    return FAN_OK;
}

static uint64_t work_kernel_bytes(const fan_sim_kernel *k)
{
    const fan_array *a = NULL;
    bool write;
    uint64_t bytes = 0;
    for (size_t i = 0; fan__visit_kernel(k, i, &a, &write); i++)
        bytes += (uint64_t)a->size * fan_dtype_size(a->dtype);
    return bytes;
}

static void work_trace_kernel(const fan_stream *s, const fan__work *w, uint64_t bytes)
{
    fan_trace_line line = {.kind = FAN_TRACE_KERNEL,
                           .device = (int16_t)s->device->index,
                           .slot = -1,
                           .key = -1,
                           .stream = s->handle,
                           .bytes = bytes,
                           .start_us = w->start,
                           .end_us = w->end};
    snprintf(line.label, sizeof line.label, "%s", w->name);
    fan_trace_put(&line);
}

fan_status fan_sim_launch(fan_sim *m, fan_stream *s, const fan_sim_kernel *k, fan_error *err)
{
    char call_site[FAN__SITE];
    bool captured = false;
    fan_status status;
    if (s->device->self != m)
        return fan_fail(err, FAN_ERR_VALUE, "the stream belongs to another machine");
    fan_yield();
    fan__sim_call_site(m, call_site, sizeof call_site);
    FAN_TRY(work_mark_automatic(m, s, k, err));
    uint64_t bytes = work_kernel_bytes(k);
    fan__work w = {.name = k->name ? k->name : "kernel", .next = fan__visit_kernel, .what = k, .by_user = true};
    if (m->config.run_work && !(w.op = fan__op_new(NULL, 0)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    fan_sim_op *op = w.op;
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "launch", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    w.us = k->us >= 0 ? k->us : work_us(m, bytes);
    if (fan__queue_of(s)->recording) {
        status = work_record_kernel(m, fan__queue_of(s), k, NULL, 0, &w, call_site, err);
        captured = status == FAN_OK;
        goto done;
    }
    FAN_GO(fan_memory_scope_check(s, err));
    status = fan__work_enqueue(m, fan__queue_of(s), &w, call_site, err);
    if (status == FAN_OK && op) {
        op->fn = k->fn;
        op->fini = k->fini;
        op->ctx = k->ctx;
    }
    if (status == FAN_OK || status == FAN_ERR_RACE)
        w.op = NULL;
done:
    fan__sim_unlock(m);
    fan_free(w.op);
    if (status == FAN_OK && !op && k->fini && !captured)
        k->fini(k->ctx); /* no bytes to move: it will never run */
    if ((status == FAN_OK || status == FAN_ERR_RACE) && fan_trace_on())
        work_trace_kernel(s, &w, bytes);
    return status;
}
