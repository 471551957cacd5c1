/* The table's entries that run jobs: one job; the read of an array by the host; and many sums in
 * one launch, at the end (Title: Many sums). */
#include "device/cuda/part.h"

#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "device/memory.h"
#include "device/stream.h"

#include <string.h>

static fan_status run_retain_array(const fan__launch_ctx *s, const fan_array *a, uint64_t capture,
                                   fan_cu_graph graph, fan_error *err)
{
    if (!a || !a->size)
        return FAN_OK;
    return fan__cuda_retain(s->part, fan__address_of(a), capture, graph, err);
}

static fan_status run_kind(fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    switch (job->kind) {
    case FAN_JOB_SUM:
        return fan__cuda_sum(s, job->out, job->in, job->n, job->scale, err);
    case FAN_JOB_EXACT:
        return fan__cuda_exact(s, job, err);
    case FAN_JOB_REDUCE:
        return fan__cuda_reduce(s, job->out, job->in[0].array, job->in[0].acc, err);
    case FAN_JOB_COPY:
        return fan__cuda_copy(s, job->out, job->in[0].array, err);
    case FAN_JOB_ZERO:
        return fan__cuda_zero(s, job->out, err);
    case FAN_JOB_SCATTER:
        return fan__cuda_scatter(s, job->out, job->sparse, err);
    case FAN_JOB_UPLOAD:
        return fan__cuda_upload(s, job->out, job->in[0].array, err);
    case FAN_JOB_STATS:
        return fan__cuda_measure(s, job, err);
    }
    return FAN_OK;
}

/* run_in_place: returns whether the job overwrites its input. */
static bool run_in_place(const fan_job *job)
{
    for (size_t k = 0; job->kind == FAN_JOB_SUM && k < job->n; k++)
        if (!fan_array_extents_disjoint(job->out, job->in[k].array))
            return true;
    return job->kind == FAN_JOB_SCATTER;
}

/* run_capture: prepares a job on a captured stream: the graph holds its memory. */
static fan_status run_capture(const fan__launch_ctx *w, const fan_job *job, uint64_t capture,
                              fan_cu_graph graph, fan_error *err)
{
    const char *needs_host = NULL;
    if (job->kind == FAN_JOB_EXACT)
        needs_host = "an exact sum";
    else if (job->stats_out)
        needs_host = "a sum with statistics";
    else if (job->kind == FAN_JOB_UPLOAD)
        needs_host = "a copy from the host";
    if (needs_host)
        return fan_fail_code(err, FAN_ERR_CAPTURE, 900,
                             "%s needs the host, which a captured stream (%#llx of cuda:%d) cannot "
                             "wait for: do it before the capture",
                             needs_host, (unsigned long long)w->stream->handle, w->part->index);
    FAN_TRY(run_retain_array(w, job->out, capture, graph, err));
    for (size_t k = 0; k < job->n; k++)
        FAN_TRY(run_retain_array(w, job->in[k].array, capture, graph, err));
    if (job->sparse) {
        FAN_TRY(run_retain_array(w, job->sparse->indices, capture, graph, err));
        FAN_TRY(run_retain_array(w, job->sparse->pointers, capture, graph, err));
        FAN_TRY(run_retain_array(w, job->sparse->values, capture, graph, err));
    }
    return fan__cuda_recorder_note(w->part->cuda, capture, job, err);
}

fan_status fan__cuda_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    bool begun = false;
    fan__launch_ctx w = {.part = fan__cuda_part_of(d),
                         .stream = s,
                         .label = fan_job_name(job),
                         .stats_out = job->stats_out,
                         .first_suspect = job->first_suspect,
                         .begun = &begun};
    fan__cuda_scope scope;
    fan_status status;
    FAN_TRY(fan__cuda_enter_on(s, &scope, err));
    w.on = scope.on;
    uint64_t capture;
    fan_cu_graph graph = NULL;
    if (job->kind == FAN_JOB_UPLOAD)
        FAN_GO(fan_memory_scope_upload(d, err));
    FAN_GO(fan__cuda_capture_of(s, &capture, &graph, err));
    if (capture)
        FAN_GO(run_capture(&w, job, capture, graph, err));
    else
        FAN_GO(fan_memory_scope_check(s, err));
    status = run_kind(&w, job, err);
    /* a job that ran out of memory changes nothing, except here */
    if (status == FAN_ERR_DEVICE_NOMEM && begun && run_in_place(job)) {
        status = FAN_ERR_DEVICE;
        if (err)
            err->status = status;
    }
done:
    fan__cuda_leave(&scope);
    if (status == FAN_OK)
        fan_job_trace(d, s, job, 0, -1, -1);
    return status;
}

fan_status fan__cuda_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err)
{
    fan__launch_ctx w = {.part = fan__cuda_part_of(s->device), .stream = s, .label = "read"};
    fan__cuda_scope scope;
    uint64_t capture;
    fan_status status;
    FAN_TRY(fan__cuda_enter_on(s, &scope, err));
    w.on = scope.on;
    FAN_GO(fan__cuda_capture_of(s, &capture, NULL, err));
    if (capture)
        status = fan_fail_code(err, FAN_ERR_CAPTURE, 900,
                               "stream %#llx of cuda:%d is captured: its values cannot be read "
                               "before the graph has run",
                               (unsigned long long)s->handle, s->device->index);
    else
        status = fan__cuda_download(&w, dst, src, err);
done:
    fan__cuda_leave(&scope);
    return status;
}

/* Title: Many sums.
 *
 * Gap-free sums of one kind are rows of a table, which is copied to the device before the launch
 * and freed after it. It is copied in pieces of 64 KiB: the driver buffers those at once; for
 * larger ones it may wait until the stream has run. Left to `run`: a sum that takes longer than a
 * launch; one without a fold kernel; all sums under a capture, because a graph would read the table
 * again from the host; and all sums without stream-ordered memory, because freeing would block. */
#define MANY_BYTES (INT64_C(4) << 20) /* of a sum, read and written */
#define PIECE 65536
#define STAGING_KEPT ((size_t)1 << 20)
#define KINDS 32
#define MOST_OF_A_TABLE (UINT32_MAX / 2) /* tiles, sources */

/* Sums of one kernel and one scale. */
typedef struct batch_many {
    size_t which;
    uint64_t factor;
    bool scaled;
    size_t rows, sources, tiles;
    uint64_t at;              /* of its table in the staging memory */
    size_t row, source, tile; /* written so far */
} batch_many;

static int64_t batch_numbers(const fan_array *a)
{
    return a->size * fan__parts_of(a->dtype);
}

static size_t batch_tiles(const fan_job *job, size_t which)
{
    int64_t tile = FAN_K_TILE / fan__folds[which].bytes;
    return (size_t)((batch_numbers(job->out) + tile - 1) / tile);
}

static bool batch_same_kind(const batch_many *a, const batch_many *b)
{
    return a->which == b->which && a->scaled == b->scaled && a->factor == b->factor;
}

/* batch_kind: returns the kind of a job, a new one if there is room; KINDS: none. */
static size_t batch_kind(const fan_job *job, batch_many *kinds, size_t *nkinds)
{
    batch_many k = {.scaled = job->scale && job->scale->on};
    char factor[16] = {0};
    fan_nditer w;
    size_t i = 0;
    if (job->kind != FAN_JOB_SUM || job->stats)
        return KINDS;
    if (job->scale && job->scale->divisor)
        return KINDS;
    if (job->out->size == 0 || fan_job_bytes(job) > MANY_BYTES)
        return KINDS;
    fan_nditer_begin(&w, job->out, false);
    for (size_t j = 0; j < job->n; j++)
        fan_nditer_also(&w, job->in[j].array);
    fan_nditer_ready(&w);
    k.which = fan__fold_for(job->out, job->in, job->n, k.scaled, &w);
    if (k.which == FAN__FOLDS)
        return KINDS;
    if (k.scaled) {
        fan_scale_as(job->scale, job->in[0].acc, factor);
        memcpy(&k.factor, factor, sizeof k.factor);
    }
    while (i < *nkinds && !batch_same_kind(&kinds[i], &k))
        i++;
    if (i == KINDS)
        return KINDS;
    if (i == *nkinds)
        kinds[(*nkinds)++] = k;
    if (kinds[i].tiles > MOST_OF_A_TABLE || kinds[i].sources > MOST_OF_A_TABLE)
        return KINDS;
    kinds[i].rows++;
    kinds[i].sources += job->n;
    kinds[i].tiles += batch_tiles(job, k.which);
    return i;
}

/* batch_staging_take, _give: allocate and free host memory for tables; one piece is kept for reuse.
 * NULL: out of memory. */
static char *batch_staging_take(fan_cuda_part *p, size_t *bytes)
{
    fan__part_lock(p);
    char *kept = p->staging;
    size_t had = p->staging_bytes;
    p->staging = NULL;
    fan__part_unlock(p);
    if (kept && had >= *bytes) {
        *bytes = had;
        return kept;
    }
    fan_free(kept);
    return fan_alloc(*bytes);
}

static void batch_staging_give(fan_cuda_part *p, char *staging, size_t bytes)
{
    fan__part_lock(p);
    if (!p->staging && bytes <= STAGING_KEPT) {
        p->staging = staging;
        p->staging_bytes = bytes;
        staging = NULL;
    }
    fan__part_unlock(p);
    fan_free(staging);
}

#define STACK_JOBS 32 /* up to this many need no allocation */

/* The jobs sorted by kind, and which kinds have enough of them for a table. */
typedef struct batch_sorted {
    batch_many kinds[KINDS];
    size_t nkinds;
    uint8_t *kind; /* of each job */
    fan_job *some; /* the jobs of one kind */
    uint8_t stack_kind[STACK_JOBS];
    fan_job stack_some[STACK_JOBS];
} batch_sorted;

static bool batch_together(const batch_sorted *sorted, size_t job)
{
    uint8_t kind = sorted->kind[job];
    return kind < KINDS && sorted->kinds[kind].rows > 1;
}

/* batch_launch_kinds: launches each kind once. The table is on the device. */
static fan_status batch_launch_kinds(fan__launch_ctx *s, batch_sorted *sorted, const fan_job *jobs,
                                     size_t n, uint64_t table, fan_job_state *states,
                                     fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    for (size_t k = 0; k < sorted->nkinds; k++) {
        const batch_many *kind = &sorted->kinds[k];
        size_t m = 0;
        if (kind->rows < 2)
            continue;
        for (size_t i = 0; i < n; i++)
            if (sorted->kind[i] == k)
                sorted->some[m++] = jobs[i];
        s->label = fan_jobs_label(sorted->some, m, label, sizeof label);
        fan_k_many a = {.table = table + kind->at,
                        .factor = kind->factor,
                        .rows = (int64_t)kind->rows,
                        .sources = (int64_t)kind->sources,
                        .tiles = (int64_t)kind->tiles,
                        .scaled = kind->scaled};
        fan_status status =
            fan__launch_threads(s, s->part->many[kind->which], a.tiles * FAN_K_WARP, &a, err);
        for (size_t i = 0; i < n; i++)
            if (sorted->kind[i] == k)
                states[i] = status == FAN_OK ? FAN_JOB_QUEUED : FAN_JOB_FAILED;
        FAN_TRY(status);
        fan_jobs_trace(&s->part->device, s->stream, sorted->some, m, label, -1, -1);
    }
    return FAN_OK;
}

/* batch_place_tables: sets where the table of each kind begins; returns the bytes of all. */
static size_t batch_place_tables(batch_sorted *sorted)
{
    size_t bytes = 0;
    for (size_t k = 0; k < sorted->nkinds; k++) {
        batch_many *kind = &sorted->kinds[k];
        kind->at = bytes;
        if (kind->rows <= 1)
            continue;
        size_t table = kind->rows * sizeof(fan_k_row);
        table += kind->sources * sizeof(uint64_t);
        table += kind->tiles * sizeof(uint32_t);
        bytes += (table + 7) & ~(size_t)7;
    }
    return bytes;
}

/* batch_write_row: writes a job into the table of its kind. */
static void batch_write_row(batch_many *kind, const fan_job *job, char *staging)
{
    fan_k_row *rows = (fan_k_row *)(void *)(staging + kind->at);
    uint64_t *sources = (uint64_t *)(void *)(rows + kind->rows);
    uint32_t *tiles = (uint32_t *)(void *)(sources + kind->sources);
    uint64_t bits = fan__address_of(job->out);
    size_t ntiles = batch_tiles(job, kind->which);
    fan_k_row *row = &rows[kind->row];
    *row = (fan_k_row){.out = bits,
                       .count = (uint32_t)batch_numbers(job->out),
                       .first = (uint32_t)kind->source,
                       .tile = (uint32_t)kind->tile,
                       .n = (uint16_t)job->n};
    for (size_t j = 0; j < job->n; j++)
        bits |= sources[kind->source++] = fan__address_of(job->in[j].array);
    int flags = fan__fold_flags(kind->which, job->out, job->in[0].array);
    if ((bits & 15) == 0)
        flags |= FAN_K_ALIGNED;
    row->flags = (uint16_t)flags;
    for (size_t j = 0; j < ntiles; j++)
        tiles[kind->tile++] = (uint32_t)kind->row;
    kind->row++;
}

/* batch_send: copies the tables to the device, in pieces. */
static fan_status batch_send(const fan__launch_ctx *s, uint64_t table, const char *staging,
                             size_t bytes, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(s->part);
    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t piece = bytes - at;
        if (piece > PIECE)
            piece = PIECE;
        FAN_TRY(fan__cuda_check(s->part,
                                api->MemcpyHtoDAsync(table + at, staging + at, piece, s->on),
                                "cuMemcpyHtoDAsync", err));
    }
    if (!s->part->reads_host || FAN_FAULT(CUDA_EARLY_HOST))
        return FAN_OK;
    return fan__cuda_pass(s->part, s->on, err);
}

/* batch_run_tables: writes the tables, copies them, and launches. Memory that it lacks is no
 * failure: launching one by one needs none. */
static fan_status batch_run_tables(fan__launch_ctx *s, batch_sorted *sorted, const fan_job *jobs,
                                   size_t n, fan_job_state *states, fan_error *err)
{
    uint64_t table = 0;
    size_t bytes = batch_place_tables(sorted);
    size_t room = bytes;
    if (!bytes)
        return FAN_OK;
    char *staging = batch_staging_take(s->part, &room);
    if (!staging)
        return FAN_OK;
    for (size_t i = 0; i < n; i++)
        if (batch_together(sorted, i))
            batch_write_row(&sorted->kinds[sorted->kind[i]], &jobs[i], staging);
    fan_status status = fan__cuda_scratch(s->stream, bytes, &table, err);
    if (status == FAN_OK) {
        status = batch_send(s, table, staging, bytes, err);
        if (FAN_FAULT(CUDA_EARLY_TABLE))
            fan__cuda_free(&s->part->device, (void *)(uintptr_t)table, bytes);
        if (status == FAN_OK)
            status = batch_launch_kinds(s, sorted, jobs, n, table, states, err);
        if (!FAN_FAULT(CUDA_EARLY_TABLE))
            fan__cuda_scratch_free(s->stream, table);
    } else if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM) {
        status = FAN_OK;
    }
    batch_staging_give(s->part, staging, room);
    if (status == FAN_OK)
        return FAN_OK;
    for (size_t i = 0; i < n; i++)
        if (states[i] != FAN_JOB_PENDING)
            return status;
    /* it failed before any launch: all jobs fail */
    for (size_t i = 0; i < n; i++)
        if (batch_together(sorted, i))
            states[i] = FAN_JOB_FAILED;
    return status;
}

fan_status fan__cuda_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n,
                              fan_job_state *states, fan_error *err)
{
    fan__launch_ctx w = {.part = fan__cuda_part_of(d), .stream = s};
    fan__cuda_scope scope;
    fan_status status = FAN_OK;
    uint64_t capture;
    batch_sorted sorted;
    bool on_stack = n <= STACK_JOBS;
    sorted.nkinds = 0;
    sorted.kind = NULL;
    sorted.some = NULL;
    FAN_TRY(fan__cuda_enter_on(s, &scope, err));
    w.on = scope.on;
    int mode = fan__cuda_relax(w.part); /* once for all calls below */
    FAN_GO(fan__cuda_capture_of(s, &capture, NULL, err));
    if (capture || !w.part->pools)
        goto done;
    FAN_GO(fan_memory_scope_check(s, err));
    if (on_stack) {
        sorted.kind = sorted.stack_kind;
        sorted.some = sorted.stack_some;
    } else {
        sorted.kind = fan_alloc(n);
        sorted.some = fan_alloc(n * sizeof *sorted.some);
    }
    if (!sorted.kind || !sorted.some)
        goto done;
    for (size_t i = 0; i < n; i++)
        sorted.kind[i] = (uint8_t)batch_kind(&jobs[i], sorted.kinds, &sorted.nkinds);
    status = batch_run_tables(&w, &sorted, jobs, n, states, err);
done:
    if (!on_stack) {
        fan_free(sorted.kind);
        fan_free(sorted.some);
    }
    fan__cuda_restore(w.part, mode);
    fan__cuda_leave(&scope);
    return status;
}
