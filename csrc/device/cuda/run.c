/* The table's entries that run jobs: one job; the read of an array by the host; and many sums in
 * one launch, at the end (Title: Many sums). */
#include "device/cuda/part.h"

#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "device/memory.h"
#include "device/stream.h"

#include <string.h>

/* A job's place in a capture. */
typedef struct run_captured {
    fan_cuda_part *part;
    uint64_t capture;
    fan_cu_graph graph;
} run_captured;

static fan_status run_retain_array(const run_captured *by, const fan_array *a, fan_error *err)
{
    if (!a || !a->size)
        return FAN_OK;
    return fan__cuda_retain(by->part, fan__address_of(a), by->capture, by->graph, err);
}

static fan_status run_kind(fan__launch_ctx *s, const fan_job *job, fan_error *err)
{
    switch (job->kind) {
    case FAN_JOB_SUM:
        return fan__cuda_sum(s, job, err);
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
    for (size_t k = 0; job->kind == FAN_JOB_SUM && k < job->n; k++) {
        if (!fan_array_extents_disjoint(job->out, job->in[k].array))
            return true;
    }
    return job->kind == FAN_JOB_SCATTER;
}

/* run_needs_host: returns what the host must do for the job; NULL: nothing. */
static const char *run_needs_host(const fan_job *job)
{
    if (job->kind == FAN_JOB_EXACT)
        return "an exact sum";
    if (job->stats_out)
        return "a sum with statistics";
    if (job->kind == FAN_JOB_UPLOAD)
        return "a copy from the host";
    return NULL;
}

/* run_capture: prepares a job on a captured stream: the graph holds its memory. */
static fan_status run_capture(const fan_stream *s, const fan_job *job, const run_captured *by,
                              fan_error *err)
{
    const char *needs_host = run_needs_host(job);
    const fan_sparse *sparse = job->sparse;
    if (needs_host) {
        return fan_fail_code(err, FAN_ERR_CAPTURE, 900,
                             "%s needs the host, which a captured stream (%#llx of cuda:%d) cannot "
                             "wait for: do it before the capture",
                             needs_host, (unsigned long long)s->handle, by->part->index);
    }
    FAN_TRY(run_retain_array(by, job->out, err));
    for (size_t k = 0; k < job->n; k++)
        FAN_TRY(run_retain_array(by, job->in[k].array, err));
    if (sparse) {
        FAN_TRY(run_retain_array(by, sparse->indices, err));
        FAN_TRY(run_retain_array(by, sparse->pointers, err));
        FAN_TRY(run_retain_array(by, sparse->values, err));
    }
    return fan__cuda_recorder_note(by->part->cuda, by->capture, job, err);
}

fan_status fan__cuda_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    bool begun = false;
    fan__launch_ctx w = {
        .part = fan__cuda_part_of(d),
        .stream = s,
        .label = fan_job_name(job),
        .begun = &begun,
    };
    run_captured by = {.part = w.part};
    fan__cuda_scope scope;
    fan_status status;
    FAN_TRY(fan__cuda_enter_on(s, &scope, err));
    w.on = scope.on;
    if (job->kind == FAN_JOB_UPLOAD)
        FAN_GO(fan_memory_scope_upload(d, err));
    FAN_GO(fan__cuda_capture_of(s, &by.capture, &by.graph, err));
    if (by.capture)
        FAN_GO(run_capture(s, job, &by, err));
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
    fan__launch_ctx w = {
        .part = fan__cuda_part_of(s->device),
        .stream = s,
        .label = "read",
    };
    fan__cuda_scope scope;
    uint64_t capture;
    fan_status status;
    FAN_TRY(fan__cuda_enter_on(s, &scope, err));
    w.on = scope.on;
    FAN_GO(fan__cuda_capture_of(s, &capture, NULL, err));
    if (capture) {
        status = fan_fail_code(err, FAN_ERR_CAPTURE, 900,
                               "stream %#llx of cuda:%d is captured: its values cannot be read "
                               "before the graph has run",
                               (unsigned long long)s->handle, s->device->index);
    } else {
        status = fan__cuda_download(&w, dst, src, err);
    }
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
    size_t rows;
    size_t sources;
    size_t tiles;
    uint64_t at; /* of its table in the staging memory */
    /* written so far */
    size_t row;
    size_t source;
    size_t tile;
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

/* batch_suits: returns whether a job may be a row of a table. */
static bool batch_suits(const fan_job *job)
{
    if (job->kind != FAN_JOB_SUM || job->stats)
        return false;
    if (job->scale && job->scale->divisor)
        return false;
    return job->out->size != 0 && fan_job_bytes(job) <= MANY_BYTES;
}

/* batch_kind: returns the kind of a job, a new one if there is room; KINDS: none. */
static size_t batch_kind(const fan_job *job, batch_many *kinds, size_t *nkinds)
{
    batch_many k = {.scaled = job->scale && job->scale->on};
    fan_nditer walk;
    size_t i = 0;
    if (!batch_suits(job))
        return KINDS;
    fan__walk_job(&walk, job);
    k.which = fan__fold_for(job, &walk);
    if (k.which == FAN__FOLDS)
        return KINDS;
    if (k.scaled) {
        char factor[16] = {0};
        fan_scale_as(job->scale, job->in->acc, factor);
        memcpy(&k.factor, factor, sizeof k.factor);
    }
    while (i < *nkinds && !batch_same_kind(&kinds[i], &k))
        i++;
    if (i == KINDS)
        return KINDS;
    batch_many *kind = &kinds[i];
    if (i == *nkinds) {
        *kind = k;
        ++*nkinds;
    }
    if (kind->tiles > MOST_OF_A_TABLE || kind->sources > MOST_OF_A_TABLE)
        return KINDS;
    kind->rows++;
    kind->sources += job->n;
    kind->tiles += batch_tiles(job, k.which);
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

/* The jobs of a call, and which kinds have enough of them for a table. */
typedef struct batch_sorted {
    const fan_job *jobs;
    size_t n;
    fan_job_state *states;
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

/* batch_collect: collects the jobs of a kind; returns their number. */
static size_t batch_collect(batch_sorted *sorted, size_t kind)
{
    size_t n = 0;
    for (size_t i = 0; i < sorted->n; i++) {
        if (sorted->kind[i] == kind)
            sorted->some[n++] = sorted->jobs[i];
    }
    return n;
}

static void batch_set_states(const batch_sorted *sorted, size_t kind, fan_status status)
{
    fan_job_state state = FAN_JOB_FAILED;
    if (status == FAN_OK)
        state = FAN_JOB_QUEUED;
    for (size_t i = 0; i < sorted->n; i++) {
        if (sorted->kind[i] == kind)
            sorted->states[i] = state;
    }
}

/* batch_launch_kinds: launches each kind once. The table is on the device. */
static fan_status batch_launch_kinds(fan__launch_ctx *s, batch_sorted *sorted, uint64_t table,
                                     fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    for (size_t k = 0; k < sorted->nkinds; k++) {
        const batch_many *kind = &sorted->kinds[k];
        if (kind->rows < 2)
            continue;
        size_t n = batch_collect(sorted, k);
        s->label = fan_jobs_label(sorted->some, n, label, sizeof label);
        fan_k_many a = {
            .table = table + kind->at,
            .factor = kind->factor,
            .rows = (int64_t)kind->rows,
            .sources = (int64_t)kind->sources,
            .tiles = (int64_t)kind->tiles,
            .scaled = kind->scaled,
        };
        fan_cu_function kernel = s->part->many[kind->which];
        fan_status status = fan__launch_threads(s, kernel, a.tiles * FAN_K_WARP, &a, err);
        batch_set_states(sorted, k, status);
        FAN_TRY(status);
        fan_jobs_trace(&s->part->device, s->stream, sorted->some, n, label, -1, -1);
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
    *row = (fan_k_row){
        .out = bits,
        .count = (uint32_t)batch_numbers(job->out),
        .first = (uint32_t)kind->source,
        .tile = (uint32_t)kind->tile,
        .n = (uint16_t)job->n,
    };
    for (size_t j = 0; j < job->n; j++) {
        uint64_t address = fan__address_of(job->in[j].array);
        sources[kind->source++] = address;
        bits |= address;
    }
    int flags = fan__fold_flags(kind->which, job->out, job->in->array);
    if ((bits & 15) == 0)
        flags |= FAN_K_ALIGNED;
    row->flags = (uint16_t)flags;
    for (size_t j = 0; j < ntiles; j++)
        tiles[kind->tile++] = (uint32_t)kind->row;
    kind->row++;
}

/* The tables of all kinds: in staging memory, and on the device. */
typedef struct batch_tables {
    char *staging;
    uint64_t device;
    size_t bytes;
} batch_tables;

/* batch_send: copies the tables to the device, in pieces. */
static fan_status batch_send(const fan__launch_ctx *s, const batch_tables *tables, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(s->part);
    for (size_t at = 0; at < tables->bytes; at += PIECE) {
        size_t piece = tables->bytes - at;
        if (piece > PIECE)
            piece = PIECE;
        uint64_t to = tables->device + at;
        fan_cu_result code = api->MemcpyHtoDAsync(to, tables->staging + at, piece, s->on);
        FAN_TRY(fan__cuda_check(s->part, code, "cuMemcpyHtoDAsync", err));
    }
    return fan__cuda_pass_upload(s, err);
}

/* batch_queue: copies the tables, and launches. Memory that it lacks is no failure: launching one
 * by one needs none. */
static fan_status batch_queue(fan__launch_ctx *s, batch_sorted *sorted, batch_tables *tables,
                              fan_error *err)
{
    fan_status status = fan__cuda_scratch(s->stream, tables->bytes, &tables->device, err);
    if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
        return FAN_OK;
    FAN_TRY(status);
    status = batch_send(s, tables, err);
    if (FAN_FAULT(CUDA_EARLY_TABLE))
        fan__cuda_free(&s->part->device, (void *)(uintptr_t)tables->device, tables->bytes);
    if (status == FAN_OK)
        status = batch_launch_kinds(s, sorted, tables->device, err);
    if (!FAN_FAULT(CUDA_EARLY_TABLE))
        fan__cuda_scratch_free(s->stream, tables->device);
    return status;
}

/* batch_fail_all: if it failed before any launch, all jobs fail. */
static void batch_fail_all(const batch_sorted *sorted)
{
    for (size_t i = 0; i < sorted->n; i++) {
        if (sorted->states[i] != FAN_JOB_PENDING)
            return;
    }
    for (size_t i = 0; i < sorted->n; i++) {
        if (batch_together(sorted, i))
            sorted->states[i] = FAN_JOB_FAILED;
    }
}

/* batch_run_tables: writes the tables and queues them, unless memory for them is short. */
static fan_status batch_run_tables(fan__launch_ctx *s, batch_sorted *sorted, fan_error *err)
{
    batch_tables tables = {.bytes = batch_place_tables(sorted)};
    size_t room = tables.bytes;
    if (!room)
        return FAN_OK;
    tables.staging = batch_staging_take(s->part, &room);
    if (!tables.staging)
        return FAN_OK;
    for (size_t i = 0; i < sorted->n; i++) {
        if (batch_together(sorted, i))
            batch_write_row(&sorted->kinds[sorted->kind[i]], &sorted->jobs[i], tables.staging);
    }
    fan_status status = batch_queue(s, sorted, &tables, err);
    batch_staging_give(s->part, tables.staging, room);
    if (status != FAN_OK)
        batch_fail_all(sorted);
    return status;
}

/* batch_run: sorts the jobs and runs those that fit into tables. */
static fan_status batch_run(fan__launch_ctx *s, batch_sorted *sorted, fan_error *err)
{
    uint64_t capture;
    FAN_TRY(fan__cuda_capture_of(s->stream, &capture, NULL, err));
    if (capture || !s->part->pools)
        return FAN_OK;
    FAN_TRY(fan_memory_scope_check(s->stream, err));
    if (sorted->n > STACK_JOBS) {
        sorted->kind = fan_alloc(sorted->n);
        sorted->some = fan_alloc(sorted->n * sizeof *sorted->some);
    }
    if (!sorted->kind || !sorted->some)
        return FAN_OK;
    for (size_t i = 0; i < sorted->n; i++) {
        size_t kind = batch_kind(&sorted->jobs[i], sorted->kinds, &sorted->nkinds);
        sorted->kind[i] = (uint8_t)kind;
    }
    return batch_run_tables(s, sorted, err);
}

fan_status fan__cuda_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n,
                              fan_job_state *states, fan_error *err)
{
    fan__launch_ctx w = {
        .part = fan__cuda_part_of(d),
        .stream = s,
    };
    fan__cuda_scope scope;
    batch_sorted sorted;
    sorted.jobs = jobs;
    sorted.n = n;
    sorted.states = states;
    sorted.nkinds = 0;
    sorted.kind = sorted.stack_kind;
    sorted.some = sorted.stack_some;
    FAN_TRY(fan__cuda_enter_on(s, &scope, err));
    w.on = scope.on;
    int mode = fan__cuda_relax(w.part); /* once for all calls below */
    fan_status status = batch_run(&w, &sorted, err);
    if (sorted.kind != sorted.stack_kind)
        fan_free(sorted.kind);
    if (sorted.some != sorted.stack_some)
        fan_free(sorted.some);
    fan__cuda_restore(w.part, mode);
    fan__cuda_leave(&scope);
    return status;
}
