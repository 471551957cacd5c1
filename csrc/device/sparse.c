#include "device/sparse.h"

#include "base/mem.h"
#include "device/job.h"
#include "device/memory.h"

#include <string.h>

/* sparse_to_host: copies a part of sparse data to the host, in the order of s. NULL stays NULL. */
static fan_status sparse_to_host(fan_device *d, fan_stream *s, const fan_array *part, fan_array **out, fan_error *err)
{
    *out = NULL;
    if (!part)
        return FAN_OK;
    fan_array *host;
    FAN_TRY(fan_array_new(part->dtype, part->ndim, part->shape, part, &host, err));
    fan_yield();
    fan_status status = d->backend->read(s, host, part, err);
    if (status != FAN_OK) {
        fan_array_drop(host);
        return status;
    }
    *out = host;
    return FAN_OK;
}

static fan_status sparse_to_device(fan_device *d, fan_stream *s, const fan_array *part, fan_array **out, fan_error *err)
{
    *out = NULL;
    if (!part)
        return FAN_OK;
    fan_array *on = NULL;
    FAN_TRY(fan_device_array(d, s, part->dtype, part->ndim, part->shape, part, &on, err));
    fan_operand from = {.array = part, .acc = part->dtype};
    fan_status status = fan_device_run(
        d, s, &(fan_job){.kind = FAN_JOB_UPLOAD, .out = on, .in = &from, .n = 1, .label = "upload"}, err);
    if (status != FAN_OK) {
        fan_array_drop(on);
        return status;
    }
    *out = on;
    return FAN_OK;
}

/* sparse_moved: makes a copy with every part moved by `move`. */
static fan_status sparse_moved(fan_device *d, fan_stream *s, const fan_sparse *from,
                               fan_status (*move)(fan_device *, fan_stream *, const fan_array *, fan_array **,
                                                  fan_error *),
                               fan_sparse **out, fan_error *err)
{
    fan_array *indices = NULL, *pointers = NULL, *values = NULL;
    fan_status status;
    *out = NULL;
    FAN_GO(move(d, s, from->indices, &indices, err));
    FAN_GO(move(d, s, from->pointers, &pointers, err));
    FAN_GO(move(d, s, from->values, &values, err));
    FAN_GO(fan_sparse_new(from->format, from->ndim, from->shape, indices, pointers, values, from->coalesced, out, err));
    (*out)->nnz_coalesced = from->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

static fan_status sparse_merge_on_host(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n,
                                       bool coalesce, fan_dtype result, const fan_scale *scale, fan_sparse **out,
                                       fan_error *err)
{
    fan_sparse *merged = NULL;
    fan_status status = FAN_OK;
    fan_sparse_operand *host = n <= SIZE_MAX / sizeof *host ? fan_calloc(n * sizeof *host) : NULL;
    if (!host)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a sparse sum");
    for (size_t i = 0; i < n; i++) {
        fan_sparse *part;
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
static fan_status sparse_queue_copy(fan_device *d, fan_stream *s, const fan_array *dst, int axis, int64_t start,
                                    const fan_array *src, fan_error *err)
{
    fan_array *into;
    if (src->size == 0)
        return FAN_OK;
    FAN_TRY(fan_array_slice(dst, axis, start, src->shape[axis], &into, err));
    fan_operand from = {.array = src, .acc = dst->dtype};
    fan_status status = fan_device_run(
        d, s, &(fan_job){.kind = FAN_JOB_COPY, .out = into, .in = &from, .n = 1, .label = "concatenate"}, err);
    fan_array_drop(into);
    return status;
}

/* sparse_concatenate: queues the concatenation of the entries of COO operands. */
static fan_status sparse_concatenate(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n,
                                     fan_sparse **out, fan_error *err)
{
    const fan_sparse *first = in[0].sparse;
    fan_array *indices = NULL, *values = NULL;
    fan_status status;
    int64_t total = 0, shape[FAN_MAX_NDIM];
    for (size_t i = 0; i < n; i++)
        if (__builtin_add_overflow(total, fan_sparse_nnz(in[i].sparse), &total))
            return fan_fail(err, FAN_ERR_VALUE, "a sparse sum has 2**63 entries or more");
    int64_t grid[2] = {first->indices->shape[0], total};
    FAN_GO(fan_device_array(d, s, FAN_DT_INT64, 2, grid, NULL, &indices, err));
    memcpy(shape, first->values->shape, (size_t)first->values->ndim * sizeof *shape);
    shape[0] = total;
    FAN_GO(fan_device_array(d, s, in[n - 1].acc, first->values->ndim, shape, NULL, &values, err));
    for (size_t i = 0, at = 0; i < n; i++) {
        FAN_GO(sparse_queue_copy(d, s, indices, 1, (int64_t)at, in[i].sparse->indices, err));
        FAN_GO(sparse_queue_copy(d, s, values, 0, (int64_t)at, in[i].sparse->values, err));
        at += (size_t)fan_sparse_nnz(in[i].sparse);
    }
    FAN_GO(fan_sparse_new(FAN_FORMAT_COO, first->ndim, first->shape, indices, NULL, values, n == 1 && first->coalesced,
                          out, err));
    (*out)->nnz_coalesced = first->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(values);
    return status;
}

fan_status fan_device_sparse_merge(fan_device *d, fan_stream *s, const fan_sparse_operand *in, size_t n, bool coalesce,
                                   fan_dtype result, const fan_scale *scale, fan_sparse **out, fan_error *err)
{
    *out = NULL;
    if (fan_storage_redirected())
        return fan_fail(
            err, FAN_ERR_CAPTURE,
            "a sum of sparse gradients cannot be recorded: its size depends on their values; make them dense");
    if (!d->backend->has_streams)
        return fan_sparse_merge(in, n, coalesce, result, scale, out, err);
    fan_dtype last = in[n - 1].acc;
    bool plain = !coalesce && !(scale && scale->on) && (result == FAN_DT_NONE || result == last);
    for (size_t i = 0; i < n && plain; i++) /* D3: if the dtype widens, the earlier operands are summed first */
        plain = in[i].sparse->format == FAN_FORMAT_COO && in[i].acc == last &&
                in[i].sparse->indices->shape[0] == in[0].sparse->indices->shape[0];
    return plain ? sparse_concatenate(d, s, in, n, out, err)
                 : sparse_merge_on_host(d, s, in, n, coalesce, result, scale, out, err);
}
