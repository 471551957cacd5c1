#include "device/pack.h"

#include "array/elements.h"

#include <string.h>

void *fan__pack(fan__packer *p, size_t bytes)
{
    size_t at = p->used;
    p->used += (bytes + 15) & ~(size_t)15;
    return p->to ? p->to + at : NULL;
}

static fan_array *pack_array(fan__packer *p, const fan_array *a, bool bytes)
{
    if (!a)
        return NULL;
    fan_array *copy = fan__pack(p, sizeof *copy);
    int64_t *dims = fan__pack(p, 2 * (size_t)a->ndim * sizeof *dims);
    char *data = bytes ? fan__pack(p, (size_t)a->size * fan_dtype_size(a->dtype)) : a->data;
    if (!copy)
        return NULL;
    *copy = (fan_array){.data = data,
                        .dtype = a->dtype,
                        .ndim = a->ndim,
                        .size = a->size,
                        .shape = dims,
                        .strides = dims + a->ndim,
                        .writable = true};
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
    const fan_array *words = pack_array(p, stats_out->words, false), *before = pack_array(p, stats_out->before, false);
    if (copy) {
        *copy = (fan_stats_out){.words = words, .before = before, .keys = keys};
        memcpy(keys, stats_out->keys, n * sizeof *keys);
    }
    return copy;
}

/* pack_job: copies a job, with its arrays, to *copy; NULL: only counts the room. */
static void pack_job(fan__packer *p, fan_job *copy, const fan_job *job)
{
    fan_operand *in = fan__pack(p, job->n * sizeof *in);
    fan_scale *scale = job->scale ? fan__pack(p, sizeof *scale) : NULL;
    fan_sparse *sparse = job->sparse ? fan__pack(p, sizeof *sparse) : NULL;
    const fan_stats_out *stats_out = job->stats_out ? pack_stats(p, job->stats_out, job->n) : NULL;
    if (copy)
        *copy = (fan_job){.kind = job->kind,
                          .in = in,
                          .n = job->n,
                          .scale = scale,
                          .stats_out = stats_out,
                          .first_suspect = job->first_suspect,
                          .sparse = sparse};
    fan_array *out = pack_array(p, job->out, false);
    if (copy)
        copy->out = out;
    for (size_t i = 0; i < job->n; i++) {
        fan_array *a = pack_array(p, job->in[i].array, job->kind == FAN_JOB_UPLOAD);
        if (in)
            in[i] = (fan_operand){.array = a, .acc = job->in[i].acc};
    }
    if (scale)
        *scale = *job->scale;
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
