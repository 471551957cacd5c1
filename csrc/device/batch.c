/* Sums of one call, kept until one launch can do them all.
 *
 * A launch does not order its jobs, so none of them may access memory that another one writes. That
 * is decided from the extents of their memory, at the cost of a sort. If two may overlap, all jobs
 * of that stream are queued one by one in the order in which they came, without batching. */
#include "device/batch.h"

#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "device/memory.h"

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
    size_t n;
    size_t cap;
    fan_operand *operands;
    size_t noperands;
    size_t operands_cap;
    size_t flushed;                     /* entries before this one were flushed */
    const fan_stream *streams[STREAMS]; /* the streams of the other entries */
    size_t nstreams;                    /* if more than STREAMS, not all are listed */
    uint64_t bytes;
    fan_status status;
    fan_error err;
};

fan_batch *fan_batch_new(void)
{
    return fan_calloc(sizeof(fan_batch));
}

void fan_batch_clear(fan_batch *b)
{
    for (size_t i = 0; i < b->n; i++) {
        fan_array_drop((fan_array *)(uintptr_t)b->entries[i].job.out);
        fan_stream_drop(b->entries[i].stream);
    }
    for (size_t i = 0; i < b->noperands; i++)
        fan_array_drop((fan_array *)(uintptr_t)b->operands[i].array);
    b->n = 0;
    b->noperands = 0;
    b->flushed = 0;
    b->nstreams = 0;
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
    for (size_t i = 0; i < b->nstreams && i < STREAMS; i++) {
        if (b->streams[i] == s)
            return true;
    }
    return b->nstreams > STREAMS;
}

fan_status fan_batch_put(fan_batch *b, fan_stream *s, const fan_job *job, size_t *number,
                         fan_error *err)
{
    if (fan_grow((void **)&b->entries, &b->cap, b->n + 1, sizeof *b->entries) ||
        fan_grow((void **)&b->operands, &b->operands_cap, b->noperands + job->n,
                 sizeof *b->operands))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a batch of sums");
    entry *e = &b->entries[b->n];
    *e = (entry){
        .stream = fan_stream_hold(s),
        .job = *job,
        .first = b->noperands,
    };
    e->job.out = fan_array_hold((fan_array *)(uintptr_t)job->out);
    for (size_t i = 0; i < job->n; i++) {
        b->operands[b->noperands++] = (fan_operand){
            .array = fan_array_hold((fan_array *)(uintptr_t)job->in[i].array),
            .acc = job->in[i].acc,
            .weight = job->in[i].weight,
        };
    }
    snprintf(e->label, sizeof e->label, "%s", fan_job_name(job));
    if (!fan_batch_waits_on(b, s)) {
        if (b->nstreams < STREAMS)
            b->streams[b->nstreams] = s;
        b->nstreams++;
    }
    b->bytes += (uint64_t)job->out->size * fan_dtype_size(job->out->dtype);
    *number = b->n++;
    return FAN_OK;
}

fan_job_state fan_batch_state(const fan_batch *b, size_t number)
{
    return b->entries[number].state;
}

fan_status fan_batch_failure(const fan_batch *b, fan_error *err)
{
    if (b->status != FAN_OK && err)
        *err = b->err;
    return b->status;
}

uint64_t fan_batch_bytes(const fan_batch *b)
{
    return b->bytes;
}

/* ---- may they go together? ---- */

/* batch_independent: returns whether no job accesses memory that another one writes. `room`: memory
 * for the extents of all operands and results. */
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
    size_t *entries;
    size_t n;
} group;

static void group_run(fan_batch *b, fan_stream *s, group *g, fan_extent_entry *room)
{
    const fan_backend *backend = s->device->backend;
    bool many = g->n > 1 && backend->run_many;
    if (many && (batch_independent(g->jobs, g->n, room) || FAN_FAULT(BATCH_DEPENDENT))) {
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
        g->states[i] = FAN_JOB_FAILED;
        if (b->status == FAN_OK)
            g->states[i] = FAN_JOB_QUEUED;
    }
}

void fan_batch_flush(fan_batch *b)
{
    size_t n = b->n - b->flushed;
    if (b->status != FAN_OK || n == 0)
        return;
    size_t operands = b->noperands - b->entries[b->flushed].first;
    group g = {
        .jobs = fan_alloc(n * sizeof *g.jobs),
        .states = fan_alloc(n * sizeof *g.states),
        .entries = fan_alloc(n * sizeof *g.entries),
    };
    fan_extent_entry *room = fan_alloc((n + operands) * sizeof *room);
    bool fits = g.jobs && g.states && g.entries;
    if (!fits || !room)
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

/* ---- sparse data ---- */

/* sparse_to_host: copies a part of sparse data (NULL: none) to the host, in the order of s. *out is
 * NULL before; the caller drops it, also on failure. sparse_to_device: the other way. */
static fan_status sparse_to_host(fan_device *d, fan_stream *s, const fan_array *part,
                                 fan_array **out, fan_error *err)
{
    if (!part)
        return FAN_OK;
    FAN_TRY(fan_array_new(part->dtype, part->ndim, part->shape, part, out, err));
    fan_yield();
    return d->backend->read(s, *out, part, err);
}

static fan_status sparse_upload(fan_device *d, fan_stream *s, const fan_array *out,
                                const fan_array *host, fan_error *err)
{
    fan_operand from = {.array = host, .acc = host->dtype};
    fan_job job = {
        .kind = FAN_JOB_UPLOAD,
        .out = out,
        .in = &from,
        .n = 1,
        .label = "upload",
    };
    return fan_device_run(d, s, &job, err);
}

static fan_status sparse_to_device(fan_device *d, fan_stream *s, const fan_array *part,
                                   fan_array **out, fan_error *err)
{
    if (!part)
        return FAN_OK;
    FAN_TRY(fan_device_array(d, s, part->dtype, part->ndim, part->shape, part, out, err));
    return sparse_upload(d, s, *out, part, err);
}

/* sparse_moved: makes a copy with every part moved by `move`. */
static fan_status sparse_moved(fan_device *d, fan_stream *s, const fan_sparse *from,
                               fan_status (*move)(fan_device *, fan_stream *, const fan_array *,
                                                  fan_array **, fan_error *),
                               fan_sparse **out, fan_error *err)
{
    fan_array *indices = NULL;
    fan_array *pointers = NULL;
    fan_array *values = NULL;
    fan_status status;
    *out = NULL;
    FAN_GO(move(d, s, from->indices, &indices, err));
    FAN_GO(move(d, s, from->pointers, &pointers, err));
    FAN_GO(move(d, s, from->values, &values, err));
    FAN_GO(fan_sparse_new(from->format, from->ndim, from->shape, indices, pointers, values,
                          from->coalesced, out, err));
    (*out)->nnz_coalesced = from->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

static fan_status sparse_merge_on_host(fan_device *d, fan_stream *s, const fan_sparse_operand *in,
                                       size_t n, bool coalesce, fan_dtype result,
                                       const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    fan_sparse *merged = NULL;
    fan_status status = FAN_OK;
    fan_sparse_operand *host = NULL;
    if (n <= SIZE_MAX / sizeof *host)
        host = fan_calloc(n * sizeof *host);
    if (!host)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a sparse sum");
    for (size_t i = 0; i < n; i++) {
        fan_sparse *part = NULL;
        if (in[i].sparse)
            FAN_GO(sparse_moved(d, s, in[i].sparse, sparse_to_host, &part, err));
        host[i] = (fan_sparse_operand){.sparse = part, .acc = in[i].acc};
    }
    FAN_GO(fan_sparse_merge(host, n, coalesce, result, scale, &merged, err));
    FAN_GO(sparse_moved(d, s, merged, sparse_to_device, out, err));
done:
    for (size_t i = 0; i < n; i++)
        fan_sparse_drop((fan_sparse *)(uintptr_t)host[i].sparse);
    fan_free(host);
    fan_sparse_drop(merged);
    return status;
}

/* sparse_queue_copy: queues a copy of src to count elements of dst from `start` along `axis`. */
static fan_status sparse_queue_copy(fan_device *d, fan_stream *s, const fan_array *dst, int axis,
                                    int64_t start, const fan_array *src, fan_error *err)
{
    fan_array *into;
    if (src->size == 0)
        return FAN_OK;
    FAN_TRY(fan_array_slice(dst, axis, start, src->shape[axis], &into, err));
    fan_operand from = {.array = src, .acc = dst->dtype};
    fan_job job = {
        .kind = FAN_JOB_COPY,
        .out = into,
        .in = &from,
        .n = 1,
        .label = "concatenate",
    };
    fan_status status = fan_device_run(d, s, &job, err);
    fan_array_drop(into);
    return status;
}

/* sparse_concatenate: queues the concatenation of the entries of COO operands. */
static fan_status sparse_concatenate(fan_device *d, fan_stream *s, const fan_sparse_operand *in,
                                     size_t n, fan_sparse **out, fan_error *err)
{
    const fan_sparse *first = in[0].sparse;
    fan_array *indices = NULL;
    fan_array *values = NULL;
    fan_status status;
    int64_t shape[FAN_MAX_NDIM];
    int64_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (__builtin_add_overflow(total, fan_sparse_nnz(in[i].sparse), &total))
            return fan_fail(err, FAN_ERR_VALUE, "a sparse sum has 2**63 entries or more");
    }
    int64_t grid[2] = {first->indices->shape[0], total};
    FAN_GO(fan_device_array(d, s, FAN_DT_INT64, 2, grid, NULL, &indices, err));
    memcpy(shape, first->values->shape, (size_t)first->values->ndim * sizeof *shape);
    shape[0] = total;
    FAN_GO(fan_device_array(d, s, in[n - 1].acc, first->values->ndim, shape, NULL, &values, err));
    int64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        FAN_GO(sparse_queue_copy(d, s, indices, 1, at, in[i].sparse->indices, err));
        FAN_GO(sparse_queue_copy(d, s, values, 0, at, in[i].sparse->values, err));
        at += fan_sparse_nnz(in[i].sparse);
    }
    FAN_GO(fan_sparse_new(FAN_FORMAT_COO, first->ndim, first->shape, indices, NULL, values,
                          n == 1 && first->coalesced, out, err));
    (*out)->nnz_coalesced = first->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(values);
    return status;
}

/* sparse_check_recorded: sums of sparse data are made by calls that no recorder gets. */
static fan_status sparse_check_recorded(fan_error *err)
{
    if (!fan_storage_redirected())
        return FAN_OK;
    return fan_fail(err, FAN_ERR_CAPTURE,
                    "a sum of sparse gradients cannot be recorded: its size depends on their "
                    "values; make them dense");
}

/* sparse_is_alike: whether an operand is COO, with as many sparse axes as the first. D3: if the
 * dtype widens, the earlier operands are summed first. */
static bool sparse_is_alike(const fan_sparse_operand *operand, const fan_sparse_operand *first,
                            fan_dtype acc)
{
    const fan_sparse *sparse = operand->sparse;
    if (!sparse || sparse->format != FAN_FORMAT_COO)
        return false;
    if (operand->acc != acc)
        return false;
    return sparse->indices->shape[0] == first->sparse->indices->shape[0];
}

fan_status fan_device_sparse_merge(fan_device *d, fan_stream *s, const fan_sparse_operand *in,
                                   size_t n, bool coalesce, fan_dtype result,
                                   const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    *out = NULL;
    FAN_TRY(sparse_check_recorded(err));
    if (!d->backend->has_streams)
        return fan_sparse_merge(in, n, coalesce, result, scale, out, err);
    fan_dtype last = in[n - 1].acc;
    bool scaled = fan_scale_acts(scale);
    bool converted = result != FAN_DT_NONE && result != last;
    bool plain = !coalesce && !scaled && !converted;
    for (size_t i = 0; i < n && plain; i++)
        plain = sparse_is_alike(&in[i], &in[0], last);
    if (plain)
        return sparse_concatenate(d, s, in, n, out, err);
    return sparse_merge_on_host(d, s, in, n, coalesce, result, scale, out, err);
}

fan_status fan_device_sparse_reduce(fan_device *d, fan_stream *s, const fan_sparse *from,
                                    fan_dtype dtype, const fan_array *out, fan_error *err)
{
    FAN_TRY(sparse_check_recorded(err));
    if (!d->backend->has_streams)
        return fan_sparse_reduce(out, from, dtype, err);
    fan_status status = FAN_OK;
    fan_sparse *host = NULL;
    fan_array *sum = NULL;
    FAN_GO(sparse_moved(d, s, from, sparse_to_host, &host, err));
    FAN_GO(fan_sparse_check(host, err));
    FAN_GO(fan_array_new(out->dtype, out->ndim, out->shape, out, &sum, err));
    FAN_GO(fan_sparse_reduce(sum, host, dtype, err));
    FAN_GO(sparse_upload(d, s, out, sum, err));
done:
    fan_sparse_drop(host);
    fan_array_drop(sum);
    return status;
}
