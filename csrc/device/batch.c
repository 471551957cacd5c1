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

/* batch_own: the array whose reference the batch holds. */
static fan_array *batch_own(const fan_array *a)
{
    return (fan_array *)(uintptr_t)a;
}

void fan_batch_clear(fan_batch *b)
{
    for (size_t i = 0; i < b->n; i++) {
        fan_array_drop(batch_own(b->entries[i].job.out));
        fan_stream_drop(b->entries[i].stream);
    }
    for (size_t i = 0; i < b->noperands; i++)
        fan_array_drop(batch_own(b->operands[i].array));
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

/* batch_reserve: makes room for an entry of n operands. -1: out of memory. */
static int batch_reserve(fan_batch *b, size_t n)
{
    size_t operands = b->noperands + n;
    if (fan_grow((void **)&b->entries, &b->cap, b->n + 1, sizeof *b->entries))
        return -1;
    return fan_grow((void **)&b->operands, &b->operands_cap, operands, sizeof *b->operands);
}

fan_status fan_batch_put(fan_batch *b, fan_stream *s, const fan_job *job, size_t *number,
                         fan_error *err)
{
    if (batch_reserve(b, job->n))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a batch of sums");
    entry *e = &b->entries[b->n];
    *e = (entry){
        .stream = fan_stream_hold(s),
        .job = *job,
        .first = b->noperands,
    };
    fan_array_hold(batch_own(job->out));
    for (size_t i = 0; i < job->n; i++) {
        fan_array_hold(batch_own(job->in[i].array));
        b->operands[b->noperands++] = job->in[i];
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

/* All jobs of a flush that belong to one stream. */
typedef struct group {
    fan_job *jobs;
    fan_job_state *states;
    size_t *entries;
    fan_extent_entry *room; /* for the extents of all operands and results */
    size_t n;
} group;

/* group_independent: returns whether no job accesses memory that another one writes. */
static bool group_independent(const group *g)
{
    fan_extents e = {g->room, 0};
    for (size_t i = 0; i < g->n; i++) {
        const fan_job *job = &g->jobs[i];
        for (size_t k = 0; k < job->n; k++)
            fan_extents_put(&e, job->in[k].array, i, false);
        fan_extents_put(&e, job->out, i, true);
    }
    fan_extents_sort(&e);
    return fan_extents_independent(&e);
}

/* ---- flushing ---- */

/* group_run_together: queues the jobs by one call of the backend. */
static fan_status group_run_together(fan_stream *s, const group *g, fan_error *err)
{
    fan_device *d = s->device;
    for (size_t i = 0; i < g->n; i++)
        FAN_TRY(fan_job_check(&g->jobs[i], err));
    fan_yield();
    return d->backend->run_many(d, s, g->jobs, g->n, g->states, err);
}

static fan_status group_run(fan_stream *s, const group *g, fan_error *err)
{
    bool many = g->n > 1 && s->device->backend->run_many;
    if (many && (group_independent(g) || FAN_FAULT(BATCH_DEPENDENT)))
        FAN_TRY(group_run_together(s, g, err));
    for (size_t i = 0; i < g->n; i++) {
        if (g->states[i] != FAN_JOB_PENDING)
            continue;
        g->states[i] = FAN_JOB_FAILED;
        FAN_TRY(fan_device_run(s->device, s, &g->jobs[i], err));
        g->states[i] = FAN_JOB_QUEUED;
    }
    return FAN_OK;
}

/* group_collect: collects all pending entries of a stream, from the first on. */
static void group_collect(group *g, const fan_batch *b, size_t first)
{
    g->n = 0;
    for (size_t k = first; k < b->n; k++) {
        const entry *e = &b->entries[k];
        if (e->stream != b->entries[first].stream || e->state != FAN_JOB_PENDING)
            continue;
        fan_job *job = &g->jobs[g->n];
        *job = e->job;
        job->in = b->operands + e->first;
        job->label = e->label;
        g->entries[g->n] = k;
        g->states[g->n++] = FAN_JOB_PENDING;
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
        .room = fan_alloc((n + operands) * sizeof *g.room),
    };
    bool fits = g.jobs && g.states && g.entries;
    if (!fits || !g.room)
        b->status = fan_fail(&b->err, FAN_ERR_NOMEM, "out of memory for a batch of sums");
    for (size_t i = b->flushed; i < b->n && b->status == FAN_OK; i++) {
        if (b->entries[i].state != FAN_JOB_PENDING)
            continue;
        group_collect(&g, b, i);
        b->status = group_run(b->entries[i].stream, &g, &b->err);
        for (size_t k = 0; k < g.n; k++)
            b->entries[g.entries[k]].state = g.states[k];
    }
    b->flushed = b->n;
    b->nstreams = 0;
    fan_free(g.jobs);
    fan_free(g.states);
    fan_free(g.entries);
    fan_free(g.room);
}

/* ---- sparse data ---- */

/* Where sparse data are moved: the device, and the stream that orders it. */
typedef struct sparse_place {
    fan_device *device;
    fan_stream *stream;
} sparse_place;

/* Moves a part of sparse data (NULL: none). *out is NULL before; the caller drops it, also on
 * failure. */
typedef fan_status sparse_move(const sparse_place *at, const fan_array *part, fan_array **out,
                               fan_error *err);

static fan_status sparse_to_host(const sparse_place *at, const fan_array *part, fan_array **out,
                                 fan_error *err)
{
    if (!part)
        return FAN_OK;
    FAN_TRY(fan_array_new(part->dtype, part->ndim, part->shape, part, out, err));
    fan_yield();
    return at->device->backend->read(at->stream, *out, part, err);
}

/* sparse_queue: queues a copy of `in` to `out`. */
static fan_status sparse_queue(const sparse_place *at, fan_job_kind kind, const fan_array *out,
                               const fan_array *in, fan_error *err)
{
    fan_operand from = {
        .array = in,
        .acc = out->dtype,
    };
    fan_job job = {
        .kind = kind,
        .out = out,
        .in = &from,
        .n = 1,
        .label = kind == FAN_JOB_UPLOAD ? "upload" : "concatenate",
    };
    return fan_device_run(at->device, at->stream, &job, err);
}

static fan_status sparse_to_device(const sparse_place *at, const fan_array *part, fan_array **out,
                                   fan_error *err)
{
    if (!part)
        return FAN_OK;
    FAN_TRY(fan_device_array(at->device, at->stream, part->dtype, part->ndim, part->shape, part,
                             out, err));
    return sparse_queue(at, FAN_JOB_UPLOAD, *out, part, err);
}

/* sparse_moved: makes a copy with every part moved by `move`. */
static fan_status sparse_moved(const sparse_place *at, const fan_sparse *from, sparse_move *move,
                               fan_sparse **out, fan_error *err)
{
    fan_array *indices = NULL;
    fan_array *pointers = NULL;
    fan_array *values = NULL;
    fan_status status;
    *out = NULL;
    FAN_GO(move(at, from->indices, &indices, err));
    FAN_GO(move(at, from->pointers, &pointers, err));
    FAN_GO(move(at, from->values, &values, err));
    FAN_GO(fan_sparse_new(from->format, from->ndim, from->shape, indices, pointers, values,
                          from->coalesced, out, err));
    (*out)->nnz_coalesced = from->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

/* A sum of sparse data. */
typedef struct sparse_sum {
    sparse_place at;
    const fan_sparse_operand *in;
    size_t n;
    bool coalesce;
    fan_dtype result;
    const fan_scale *scale;
} sparse_sum;

static fan_status sparse_merge_on_host(const sparse_sum *sum, fan_sparse **out, fan_error *err)
{
    const sparse_place *at = &sum->at;
    size_t n = sum->n;
    fan_sparse *merged = NULL;
    fan_status status = FAN_OK;
    fan_sparse_operand *host = NULL;
    if (n <= SIZE_MAX / sizeof *host)
        host = fan_calloc(n * sizeof *host);
    if (!host)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a sparse sum");
    for (size_t i = 0; i < n; i++) {
        fan_sparse *part = NULL;
        if (sum->in[i].sparse)
            FAN_GO(sparse_moved(at, sum->in[i].sparse, sparse_to_host, &part, err));
        host[i].sparse = part;
        host[i].acc = sum->in[i].acc;
    }
    FAN_GO(fan_sparse_merge(host, n, sum->coalesce, sum->result, sum->scale, &merged, err));
    FAN_GO(sparse_moved(at, merged, sparse_to_device, out, err));
done:
    for (size_t i = 0; i < n; i++)
        fan_sparse_drop((fan_sparse *)(uintptr_t)host[i].sparse);
    fan_free(host);
    fan_sparse_drop(merged);
    return status;
}

/* sparse_queue_part: queues a copy of src into dst, from `start` along `axis`. */
static fan_status sparse_queue_part(const sparse_place *at, const fan_array *dst, int axis,
                                    int64_t start, const fan_array *src, fan_error *err)
{
    fan_array *into;
    if (src->size == 0)
        return FAN_OK;
    FAN_TRY(fan_array_slice(dst, axis, start, src->shape[axis], &into, err));
    fan_status status = sparse_queue(at, FAN_JOB_COPY, into, src, err);
    fan_array_drop(into);
    return status;
}

/* sparse_entries: counts the entries of all operands. */
static fan_status sparse_entries(const sparse_sum *sum, int64_t *total, fan_error *err)
{
    *total = 0;
    for (size_t i = 0; i < sum->n; i++) {
        if (__builtin_add_overflow(*total, fan_sparse_nnz(sum->in[i].sparse), total))
            return fan_fail(err, FAN_ERR_VALUE, "a sparse sum has 2**63 entries or more");
    }
    return FAN_OK;
}

/* sparse_concatenate: queues the concatenation of the entries of COO operands. */
static fan_status sparse_concatenate(const sparse_sum *sum, fan_sparse **out, fan_error *err)
{
    const sparse_place *at = &sum->at;
    const fan_sparse *first = sum->in->sparse;
    fan_array *indices = NULL;
    fan_array *values = NULL;
    fan_status status;
    int64_t total;
    FAN_TRY(sparse_entries(sum, &total, err));
    int64_t grid[2] = {first->indices->shape[0], total};
    int64_t shape[FAN_MAX_NDIM];
    memcpy(shape, first->values->shape, (size_t)first->values->ndim * sizeof *shape);
    shape[0] = total;
    fan_dtype acc = sum->in[sum->n - 1].acc;
    FAN_GO(fan_device_array(at->device, at->stream, FAN_DT_INT64, 2, grid, NULL, &indices, err));
    FAN_GO(fan_device_array(at->device, at->stream, acc, first->values->ndim, shape, NULL, &values,
                            err));
    int64_t start = 0;
    for (size_t i = 0; i < sum->n; i++) {
        const fan_sparse *part = sum->in[i].sparse;
        FAN_GO(sparse_queue_part(at, indices, 1, start, part->indices, err));
        FAN_GO(sparse_queue_part(at, values, 0, start, part->values, err));
        start += fan_sparse_nnz(part);
    }
    bool coalesced = sum->n == 1 && first->coalesced;
    FAN_GO(fan_sparse_new(FAN_FORMAT_COO, first->ndim, first->shape, indices, NULL, values,
                          coalesced, out, err));
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

/* sparse_is_plain: whether the sum is the concatenation of its operands. */
static bool sparse_is_plain(const sparse_sum *sum)
{
    fan_dtype last = sum->in[sum->n - 1].acc;
    bool converted = sum->result != FAN_DT_NONE && sum->result != last;
    if (sum->coalesce)
        return false;
    if (converted)
        return false;
    if (fan_scale_acts(sum->scale))
        return false;
    for (size_t i = 0; i < sum->n; i++) {
        if (!sparse_is_alike(&sum->in[i], sum->in, last))
            return false;
    }
    return true;
}

fan_status fan_device_sparse_merge(fan_device *d, fan_stream *s, const fan_sparse_operand *in,
                                   size_t n, bool coalesce, fan_dtype result,
                                   const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    *out = NULL;
    FAN_TRY(sparse_check_recorded(err));
    if (!d->backend->has_streams)
        return fan_sparse_merge(in, n, coalesce, result, scale, out, err);
    const sparse_sum sum = {
        .at = {d, s},
        .in = in,
        .n = n,
        .coalesce = coalesce,
        .result = result,
        .scale = scale,
    };
    if (sparse_is_plain(&sum))
        return sparse_concatenate(&sum, out, err);
    return sparse_merge_on_host(&sum, out, err);
}

fan_status fan_device_sparse_reduce(fan_device *d, fan_stream *s, const fan_sparse *from,
                                    fan_dtype dtype, const fan_array *out, fan_error *err)
{
    FAN_TRY(sparse_check_recorded(err));
    if (!d->backend->has_streams)
        return fan_sparse_reduce(out, from, dtype, err);
    const sparse_place at = {d, s};
    fan_status status = FAN_OK;
    fan_sparse *host = NULL;
    fan_array *sum = NULL;
    FAN_GO(sparse_moved(&at, from, sparse_to_host, &host, err));
    FAN_GO(fan_sparse_check(host, err));
    FAN_GO(fan_array_new(out->dtype, out->ndim, out->shape, out, &sum, err));
    FAN_GO(fan_sparse_reduce(sum, host, dtype, err));
    FAN_GO(sparse_queue(&at, FAN_JOB_UPLOAD, out, sum, err));
done:
    fan_sparse_drop(host);
    fan_array_drop(sum);
    return status;
}
