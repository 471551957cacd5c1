/* Jobs: what each kind does on the host, their names and sizes, and copies of jobs with all that
 * they refer to, packed into one allocation. */
#include "device/job.h"

#include "array/exact.h"
#include "array/nditer.h"
#include "array/sum.h"

#include <stdio.h>
#include <string.h>

/* job_write_stats: writes the statistics to the job's memory, for fan_stats_out_read. */
static void job_write_stats(const fan_job *job, const fan_stats *s)
{
    const fan_stats_out *g = job->stats_out;
    fan_device_stats words = {.bad = 0, .key = -1};
    if (g->before)
        memcpy(&words, g->before->data, sizeof words);
    if (!words.bad && s->bad != SIZE_MAX) {
        words.bad = 1;
        words.key = g->keys[s->bad];
    }
    words.count = s->count;
    words.squares = s->squares;
    words.scale = s->scale;
    words.absmax = s->absmax;
    words.nonfinite = s->nonfinite;
    memcpy(g->words->data, &words, sizeof words);
}

/* job_measure: computes the statistics of the first operand, and finds the first non-finite one. */
static void job_measure(const fan_job *job, fan_stats *stats)
{
    fan_stats of = {.nonfinite = 0};
    size_t first = job->first_suspect;
    fan_stats_of(job->in[0].array, stats);
    for (; stats->nonfinite && first < job->n && !of.nonfinite; first++)
        fan_stats_of(job->in[first].array, &of);
    stats->bad = SIZE_MAX;
    if (of.nonfinite)
        stats->bad = first - 1;
}

void fan_job_run(const fan_job *job, bool parallel)
{
    fan_stats stats;
    fan_sum_options options = {
        .stats = job->stats_out ? &stats : job->stats,
        .first_suspect = job->first_suspect,
        .parallel = parallel,
    };
    if (job->scale)
        options.scale = *job->scale;
    switch (job->kind) {
    case FAN_JOB_SUM:
        fan_sum(job->out, job->in, job->n, &options);
        if (job->stats_out)
            job_write_stats(job, &stats);
        return;
    case FAN_JOB_EXACT:
        fan_exact_fold(job->out, job->in, job->n, job->in[0].acc, job->scale);
        return;
    case FAN_JOB_REDUCE:
        fan_reduce(job->out, job->in[0].array, job->in[0].acc);
        return;
    case FAN_JOB_COPY:
    case FAN_JOB_UPLOAD:
        fan_array_copy(job->out, job->in[0].array);
        return;
    case FAN_JOB_ZERO:
        fan_fill_zero(job->out);
        return;
    case FAN_JOB_SCATTER:
        fan_sparse_scatter(job->out, job->sparse);
        return;
    case FAN_JOB_STATS:
        job_measure(job, &stats);
        job_write_stats(job, &stats);
        return;
    }
}

static uint64_t bytes_of(const fan_array *a)
{
    if (!a)
        return 0;
    return (uint64_t)a->size * fan_dtype_size(a->dtype);
}

uint64_t fan_job_bytes(const fan_job *job)
{
    uint64_t bytes = bytes_of(job->out);
    for (size_t i = 0; i < job->n; i++)
        bytes += bytes_of(job->in[i].array);
    if (job->sparse) { /* each entry's elements are read and written */
        bytes = bytes_of(job->sparse->indices) + bytes_of(job->sparse->pointers) +
                3 * bytes_of(job->sparse->values);
    }
    return bytes;
}

const char *fan_job_word(fan_job_kind kind)
{
    static const char *const words[] = {
        [FAN_JOB_SUM] = "sum",       [FAN_JOB_EXACT] = "exact",   [FAN_JOB_REDUCE] = "reduce",
        [FAN_JOB_COPY] = "copy",     [FAN_JOB_ZERO] = "zero",     [FAN_JOB_SCATTER] = "scatter",
        [FAN_JOB_UPLOAD] = "upload", [FAN_JOB_STATS] = "measure",
    };
    return words[kind];
}

const char *fan_job_name(const fan_job *job)
{
    return job->label ? job->label : fan_job_word(job->kind);
}

char *fan_jobs_label(const fan_job *jobs, size_t n, char *buf, size_t size)
{
    snprintf(buf, size, "%zu slots:", n);
    for (size_t i = 0; i < n && i < 3; i++)
        fan_append(buf, size, "%s %s", i ? "," : "", fan_job_name(&jobs[i]));
    if (n > 3)
        fan_append(buf, size, " ..");
    return buf;
}

fan_status fan_job_check(const fan_job *job, fan_error *err)
{
    if (job->out)
        FAN_TRY(fan_storage_check(job->out->storage, err));
    for (size_t i = 0; i < job->n; i++) {
        if (job->in[i].array)
            FAN_TRY(fan_storage_check(job->in[i].array->storage, err));
    }
    return FAN_OK;
}

void *fan__pack(fan__packer *p, size_t bytes)
{
    size_t at = p->used;
    p->used += (bytes + 15) & ~(size_t)15;
    if (!p->to)
        return NULL;
    return p->to + at;
}

/* pack_copy: packs a copy of `bytes` from `from` on; NULL in the first pass, or of NULL. */
static void *pack_copy(fan__packer *p, const void *from, size_t bytes)
{
    if (!from)
        return NULL;
    void *copy = fan__pack(p, bytes);
    if (copy)
        memcpy(copy, from, bytes);
    return copy;
}

/* pack_array: packs an array, and its elements if `whole`. */
static fan_array *pack_array(fan__packer *p, const fan_array *a, bool whole)
{
    if (!a)
        return NULL;
    size_t dims = (size_t)a->ndim * sizeof *a->shape;
    fan_array *copy = fan__pack(p, sizeof *copy);
    int64_t *shape = pack_copy(p, a->shape, dims);
    int64_t *strides = pack_copy(p, a->strides, dims);
    char *data = a->data;
    if (whole)
        data = fan__pack(p, bytes_of(a));
    if (!copy)
        return NULL;
    *copy = (fan_array){
        .data = data,
        .dtype = a->dtype,
        .ndim = a->ndim,
        .size = a->size,
        .shape = shape,
        .strides = strides,
        .writable = true,
    };
    if (whole) {
        fan_dense_strides(a->ndim, a->shape, fan_dtype_size(a->dtype), NULL, strides);
        fan_array_copy(copy, a);
    }
    return copy;
}

static fan_stats_out *pack_stats(fan__packer *p, const fan_job *job)
{
    const fan_stats_out *from = job->stats_out;
    if (!from)
        return NULL;
    fan_stats_out *copy = fan__pack(p, sizeof *copy);
    fan_stats_out made = {
        .words = pack_array(p, from->words, false),
        .before = pack_array(p, from->before, false),
        .keys = pack_copy(p, from->keys, job->n * sizeof *from->keys),
    };
    if (copy)
        *copy = made;
    return copy;
}

static fan_scale *pack_scale(fan__packer *p, const fan_scale *from)
{
    if (!from)
        return NULL;
    fan_scale *copy = pack_copy(p, from, sizeof *copy);
    fan_divisor *divisor = pack_copy(p, from->divisor, sizeof *divisor);
    if (copy)
        copy->divisor = divisor;
    return copy;
}

static fan_sparse *pack_sparse(fan__packer *p, const fan_sparse *from)
{
    if (!from)
        return NULL;
    fan_sparse *copy = pack_copy(p, from, sizeof *copy);
    fan_array *indices = pack_array(p, from->indices, false);
    fan_array *pointers = pack_array(p, from->pointers, false);
    fan_array *values = pack_array(p, from->values, false);
    if (copy) {
        copy->indices = indices;
        copy->pointers = pointers;
        copy->values = values;
    }
    return copy;
}

/* pack_job: returns a copy of a job, without its label, whose arrays are packed. */
static fan_job pack_job(fan__packer *p, const fan_job *job)
{
    bool whole = job->kind == FAN_JOB_UPLOAD;
    fan_operand *in = pack_copy(p, job->in, job->n * sizeof *in);
    for (size_t i = 0; i < job->n; i++) {
        fan_array *a = pack_array(p, job->in[i].array, whole);
        if (in)
            in[i].array = a;
    }
    return (fan_job){
        .kind = job->kind,
        .out = pack_array(p, job->out, false),
        .in = in,
        .n = job->n,
        .scale = pack_scale(p, job->scale),
        .sparse = pack_sparse(p, job->sparse),
        .stats_out = pack_stats(p, job),
        .first_suspect = job->first_suspect,
    };
}

fan_job *fan__pack_jobs(fan__packer *p, const fan_job *jobs, size_t n)
{
    fan_job *copies = fan__pack(p, n * sizeof *copies);
    for (size_t i = 0; i < n; i++) {
        fan_job copy = pack_job(p, &jobs[i]);
        if (copies)
            copies[i] = copy;
    }
    return copies;
}

fan_array **fan__pack_arrays(fan__packer *p, fan_array *const *arrays, size_t n)
{
    fan_array **copy = fan__pack(p, n * sizeof(fan_array *));
    for (size_t i = 0; i < n; i++) {
        fan_array *a = pack_array(p, arrays[i], false);
        if (copy)
            copy[i] = a;
    }
    return copy;
}
