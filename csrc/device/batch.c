/* Sums of one call, kept until one launch can do them all.
 *
 * A launch does not order its jobs, so none of them may access memory that another one writes. That is decided from the
 * extents of their memory, at the cost of a sort. If two may overlap, all jobs of that stream are queued one by one in
 * the order in which they came, without batching. */
#include "device/batch.h"

#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STREAMS 8

typedef struct entry {
    fan_stream *stream; /* held */
    fan_job job;        /* its arrays are held; `in` and `label` are filled in when it is queued */
    size_t first;       /* of its operands */
    fan_job_state state;
    char label[FAN_TRACE_LABEL];
} entry;

struct fan_batch {
    entry *entries;
    size_t n, cap;
    fan_operand *operands;
    size_t noperands, operands_cap;
    size_t flushed;                     /* entries before this one were flushed */
    const fan_stream *streams[STREAMS]; /* the streams of the other entries */
    size_t nstreams;                    /* if more than STREAMS, not all are listed */
    uint64_t bytes;
    fan_status status;
    fan_error err;
};

fan_batch *fan_batch_new(void) { return fan_calloc(sizeof(fan_batch)); }

void fan_batch_clear(fan_batch *b)
{
    for (size_t i = 0; i < b->n; i++) {
        fan_array_drop((fan_array *)(uintptr_t)b->entries[i].job.out);
        fan_stream_drop(b->entries[i].stream);
    }
    for (size_t i = 0; i < b->noperands; i++)
        fan_array_drop((fan_array *)(uintptr_t)b->operands[i].array);
    b->n = b->noperands = b->flushed = b->nstreams = 0;
    b->bytes = 0;
    b->status = FAN_OK;
}

void fan_batch_free(fan_batch *b)
{
    if (!b)
        return;
    fan_batch_clear(b);
    fan_free(b->entries);
    fan_free(b->operands);
    fan_free(b);
}

bool fan_batch_waits_on(const fan_batch *b, const fan_stream *s)
{
    for (size_t i = 0; i < b->nstreams && i < STREAMS; i++)
        if (b->streams[i] == s)
            return true;
    return b->nstreams > STREAMS;
}

fan_status fan_batch_put(fan_batch *b, fan_stream *s, const fan_job *job, size_t *number, fan_error *err)
{
    if (fan_grow((void **)&b->entries, &b->cap, b->n + 1, sizeof *b->entries) ||
        fan_grow((void **)&b->operands, &b->operands_cap, b->noperands + job->n, sizeof *b->operands))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a batch of sums");
    entry *e = &b->entries[b->n];
    *e = (entry){.stream = fan_stream_hold(s), .job = *job, .first = b->noperands};
    e->job.out = fan_array_hold((fan_array *)(uintptr_t)job->out);
    for (size_t i = 0; i < job->n; i++)
        b->operands[b->noperands++] =
            (fan_operand){fan_array_hold((fan_array *)(uintptr_t)job->in[i].array), job->in[i].acc};
    snprintf(e->label, sizeof e->label, "%s", job->label ? job->label : fan_job_word(job->kind));
    if (!fan_batch_waits_on(b, s)) {
        if (b->nstreams < STREAMS)
            b->streams[b->nstreams] = s;
        b->nstreams++;
    }
    b->bytes += (uint64_t)job->out->size * fan_dtype_size(job->out->dtype);
    *number = b->n++;
    return FAN_OK;
}

fan_job_state fan_batch_state(const fan_batch *b, size_t number) { return b->entries[number].state; }

fan_status fan_batch_failure(const fan_batch *b, fan_error *err)
{
    if (b->status != FAN_OK && err)
        *err = b->err;
    return b->status;
}

uint64_t fan_batch_bytes(const fan_batch *b) { return b->bytes; }

/* ---- may they go together? ---- */

/* batch_independent: returns whether no job accesses memory that another one writes. `room`: memory for the extents of
 * all operands and results. */
static bool batch_independent(const fan_job *jobs, size_t n, fan_extent_entry *room)
{
    fan_extents e = {room, 0};
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < jobs[i].n; k++)
            fan_extents_put(&e, jobs[i].in[k].array, i, false);
        fan_extents_put(&e, jobs[i].out, i, true);
    }
    fan_extents_sort(&e);
    return fan_extents_independent(&e);
}

/* ---- flushing ---- */

/* All jobs of a flush that belong to one stream. */
typedef struct group {
    fan_job *jobs;
    fan_job_state *states;
    size_t *entries, n;
} group;

static void group_run(fan_batch *b, fan_stream *s, group *g, fan_extent_entry *room)
{
    const fan_backend *backend = s->device->backend;
    if (g->n > 1 && backend->run_many && (batch_independent(g->jobs, g->n, room) || FAN_FAULT(BATCH_DEPENDENT))) {
        for (size_t i = 0; i < g->n && b->status == FAN_OK; i++)
            b->status = fan_job_check(&g->jobs[i], &b->err);
        fan_yield();
        if (b->status == FAN_OK)
            b->status = backend->run_many(s->device, s, g->jobs, g->n, g->states, &b->err);
    }
    for (size_t i = 0; i < g->n && b->status == FAN_OK; i++) {
        if (g->states[i] != FAN_JOB_PENDING)
            continue;
        b->status = fan_device_run(s->device, s, &g->jobs[i], &b->err);
        g->states[i] = b->status == FAN_OK ? FAN_JOB_QUEUED : FAN_JOB_FAILED;
    }
}

void fan_batch_flush(fan_batch *b)
{
    size_t n = b->n - b->flushed;
    if (b->status != FAN_OK || n == 0)
        return;
    size_t operands = b->noperands - b->entries[b->flushed].first;
    group g = {.jobs = fan_alloc(n * sizeof *g.jobs),
               .states = fan_alloc(n * sizeof *g.states),
               .entries = fan_alloc(n * sizeof *g.entries)};
    fan_extent_entry *room = fan_alloc((n + operands) * sizeof *room);
    if (!g.jobs || !g.states || !g.entries || !room)
        b->status = fan_fail(&b->err, FAN_ERR_NOMEM, "out of memory for a batch of sums");
    for (size_t i = b->flushed; i < b->n && b->status == FAN_OK; i++) {
        if (b->entries[i].state != FAN_JOB_PENDING)
            continue;
        fan_stream *s = b->entries[i].stream;
        g.n = 0;
        for (size_t k = i; k < b->n; k++) { /* all pending entries of the stream */
            entry *e = &b->entries[k];
            if (e->stream != s || e->state != FAN_JOB_PENDING)
                continue;
            g.entries[g.n] = k;
            g.states[g.n] = FAN_JOB_PENDING;
            g.jobs[g.n] = e->job;
            g.jobs[g.n].in = b->operands + e->first;
            g.jobs[g.n++].label = e->label;
        }
        group_run(b, s, &g, room);
        for (size_t k = 0; k < g.n; k++)
            b->entries[g.entries[k]].state = g.states[k];
    }
    b->flushed = b->n;
    b->nstreams = 0;
    fan_free(g.jobs);
    fan_free(g.states);
    fan_free(g.entries);
    fan_free(room);
}
