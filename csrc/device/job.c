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
    case FAN_JOB_STATS: {
        fan_stats of = {.nonfinite = 0};
        size_t first = job->first_suspect;
        fan_stats_of(job->in[0].array, &stats);
        for (; stats.nonfinite && first < job->n && !of.nonfinite; first++)
            fan_stats_of(job->in[first].array, &of);
        stats.bad = SIZE_MAX;
        if (of.nonfinite)
            stats.bad = first - 1;
        job_write_stats(job, &stats);
        return;
    }
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
    static const char *const words[] = {[FAN_JOB_SUM] = "sum",       [FAN_JOB_EXACT] = "exact",
                                        [FAN_JOB_REDUCE] = "reduce", [FAN_JOB_COPY] = "copy",
                                        [FAN_JOB_ZERO] = "zero",     [FAN_JOB_SCATTER] = "scatter",
                                        [FAN_JOB_UPLOAD] = "upload", [FAN_JOB_STATS] = "measure"};
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

static fan_array *pack_array(fan__packer *p, const fan_array *a, bool bytes)
{
    if (!a)
        return NULL;
    fan_array *copy = fan__pack(p, sizeof *copy);
    int64_t *dims = fan__pack(p, 2 * (size_t)a->ndim * sizeof *dims);
    char *data = a->data;
    if (bytes)
        data = fan__pack(p, bytes_of(a));
    if (!copy)
        return NULL;
    *copy = (fan_array){
        .data = data,
        .dtype = a->dtype,
        .ndim = a->ndim,
        .size = a->size,
        .shape = dims,
        .strides = dims + a->ndim,
        .writable = true,
    };
    for (int i = 0; i < a->ndim; i++) {
        copy->shape[i] = a->shape[i];
        copy->strides[i] = a->strides[i];
    }
    if (bytes) {
        fan_dense_strides(a->ndim, a->shape, fan_dtype_size(a->dtype), NULL, copy->strides);
        fan_array_copy(copy, a);
    }
    return copy;
}

static fan_stats_out *pack_stats(fan__packer *p, const fan_stats_out *stats_out, size_t n)
{
    fan_stats_out *copy = fan__pack(p, sizeof *copy);
    int64_t *keys = fan__pack(p, n * sizeof *keys);
    const fan_array *words = pack_array(p, stats_out->words, false);
    const fan_array *before = pack_array(p, stats_out->before, false);
    if (copy) {
        *copy = (fan_stats_out){
            .words = words,
            .before = before,
            .keys = keys,
        };
        memcpy(keys, stats_out->keys, n * sizeof *keys);
    }
    return copy;
}

/* pack_job: copies a job, with its arrays, to *copy; NULL: only counts the room. */
static void pack_job(fan__packer *p, fan_job *copy, const fan_job *job)
{
    fan_operand *in = fan__pack(p, job->n * sizeof *in);
    fan_scale *scale = NULL;
    fan_sparse *sparse = NULL;
    const fan_stats_out *stats_out = NULL;
    fan_divisor *divisor = NULL;
    if (job->scale)
        scale = fan__pack(p, sizeof *scale);
    if (job->scale && job->scale->divisor)
        divisor = fan__pack(p, sizeof *divisor);
    if (job->sparse)
        sparse = fan__pack(p, sizeof *sparse);
    if (job->stats_out)
        stats_out = pack_stats(p, job->stats_out, job->n);
    if (copy) {
        *copy = (fan_job){
            .kind = job->kind,
            .in = in,
            .n = job->n,
            .scale = scale,
            .stats_out = stats_out,
            .first_suspect = job->first_suspect,
            .sparse = sparse,
        };
    }
    fan_array *out = pack_array(p, job->out, false);
    if (copy)
        copy->out = out;
    for (size_t i = 0; i < job->n; i++) {
        fan_array *a = pack_array(p, job->in[i].array, job->kind == FAN_JOB_UPLOAD);
        if (in)
            in[i] = (fan_operand){
                .array = a,
                .acc = job->in[i].acc,
                .weight = job->in[i].weight,
            };
    }
    if (scale) {
        *scale = *job->scale;
        scale->divisor = divisor;
    }
    if (divisor)
        *divisor = *job->scale->divisor;
    if (job->sparse) {
        fan_array *indices = pack_array(p, job->sparse->indices, false);
        fan_array *pointers = pack_array(p, job->sparse->pointers, false);
        fan_array *values = pack_array(p, job->sparse->values, false);
        if (sparse) {
            memset(sparse, 0, sizeof *sparse);
            sparse->format = job->sparse->format;
            sparse->ndim = job->sparse->ndim;
            memcpy(sparse->shape, job->sparse->shape, sizeof sparse->shape);
            sparse->indices = indices;
            sparse->pointers = pointers;
            sparse->values = values;
            sparse->coalesced = job->sparse->coalesced;
        }
    }
}

fan_job *fan__pack_jobs(fan__packer *p, const fan_job *jobs, size_t n)
{
    fan_job *copies = fan__pack(p, n * sizeof *copies);
    for (size_t i = 0; i < n; i++)
        pack_job(p, copies ? &copies[i] : NULL, &jobs[i]);
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
