#include "buffer/add.h"

#include "base/interrupt.h"
#include "buffer/internal.h"

/* One job from `in` to `out`, counted. */
static fan_status convert(fan_buffer *b, fan_device *d, fan_stream *on, fan_job_kind kind, const char *label,
                          const fan_array *out, const fan_array *in, fan_error *err)
{
    fan_operand operand = {in, out->dtype};
    uint64_t bytes = (uint64_t)in->size * fan_dtype_size(in->dtype);
    bool release_gil = bytes >= FAN_BUSY_BYTES && !d->backend->has_streams && b->frontend->allow_threads_begin;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_interrupt_begin(&interrupt, d->backend->has_streams ? NULL : b->frontend->check_signals, err);
    fan_status status =
        fan_device_run(d, on, &(fan_job){.kind = kind, .out = out, .in = &operand, .n = 1, .label = label}, err);
    status = fan_interrupt_end(&interrupt, status);
    if (release_gil)
        b->frontend->allow_threads_end(left);
    FAN_COUNT(b, copies, 1);
    FAN_COUNT(b, passes, 1);
    FAN_COUNT(b, bytes_read, bytes);
    FAN_COUNT(b, bytes_written, (uint64_t)out->size * fan_dtype_size(out->dtype));
    return status;
}

/* The same entries in memory of our own. */
static fan_status copy_sparse(fan_buffer *b, fan_device *d, fan_stream *on, const fan_sparse *v, fan_sparse **out,
                              fan_error *err)
{
    const fan_array *from[3] = {v->indices, v->pointers, v->values};
    fan_array *part[3] = {NULL, NULL, NULL};
    fan_status status = FAN_OK;
    for (int i = 0; i < 3; i++) {
        if (!from[i])
            continue;
        FAN_GO(fan_device_array(d, on, from[i]->dtype, from[i]->ndim, from[i]->shape, from[i], &part[i], err));
        FAN_GO(convert(b, d, on, FAN_JOB_COPY, "copy", part[i], from[i], err));
    }
    FAN_GO(fan_sparse_new(v->format, v->ndim, v->shape, part[0], part[1], part[2], v->coalesced, out, err));
    (*out)->nnz_coalesced = v->nnz_coalesced;
done:
    for (int i = 0; i < 3; i++)
        fan_array_drop(part[i]);
    return status;
}

/* The three kinds of conversion. *made or *out is owned by the caller, also after a failure half-way; `on` orders the
 * work. */
static fan_status reduce_sparse(fan_buffer *b, const fan_slot *s, const fan_value *v, const fan_conversion *to,
                                fan_stream *on, fan_array **made, fan_error *err)
{
    fan_device *d = to->device;
    fan_dtype acc = fan_dtype_accumulate(to->dtype);
    if (!d->backend->has_streams) {
        fan_sparse *sparse = NULL;
        FAN_TRY(fan_sparse_cast(v->sparse, to->dtype, &sparse, err));
        fan_status status = fan_device_array(d, on, acc, s->spec->ndim, s->spec->shape, NULL, made, err);
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, b->frontend->check_signals, err);
        if (status == FAN_OK)
            status = fan_sparse_reduce(*made, sparse, err);
        status = fan_interrupt_end(&interrupt, status);
        fan_sparse_drop(sparse);
        FAN_COUNT(b, copies, 1);
        return status;
    }
    fan_array *dense = NULL; /* D7: through the dense gradient */
    FAN_TRY(fan_device_array(d, on, to->dtype == v->dtype ? fan_dtype_accumulate(v->dtype) : v->dtype, v->sparse->ndim,
                             v->sparse->shape, NULL, &dense, err));
    fan_status status = fan_device_run(d, on, &(fan_job){.kind = FAN_JOB_ZERO, .out = dense, .label = "fill"}, err);
    if (status == FAN_OK)
        status = fan_device_run(
            d, on, &(fan_job){.kind = FAN_JOB_SCATTER, .out = dense, .sparse = v->sparse, .label = "scatter"}, err);
    if (status == FAN_OK)
        status = fan_device_array(d, on, acc, s->spec->ndim, s->spec->shape, NULL, made, err);
    if (status == FAN_OK)
        status = convert(b, d, on, FAN_JOB_REDUCE, "reduce", *made, dense, err);
    fan_array_drop(dense);
    return status;
}

/* Reduced to the accumulation dtype of the declared one: rounded once more, at the end. */
static fan_status reduce_dense(fan_buffer *b, const fan_slot *s, const fan_value *v, const fan_conversion *to,
                               fan_stream *on, fan_array **made, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_device *d = to->device;
    fan_array *there = NULL, *cast = NULL;
    const fan_array *from = v->array;
    if (to->upload) {
        FAN_GO(fan_device_array(d, on, v->dtype, from->ndim, from->shape, NULL, &there, err));
        FAN_GO(convert(b, d, on, FAN_JOB_UPLOAD, "upload", there, from, err));
        from = there;
    }
    if (to->cast) {
        FAN_GO(fan_device_array(d, on, to->dtype, from->ndim, from->shape, from, &cast, err));
        FAN_GO(convert(b, d, on, FAN_JOB_COPY, "cast", cast, from, err));
        from = cast;
    }
    FAN_GO(fan_device_array(d, on, fan_dtype_accumulate(to->dtype), s->spec->ndim, s->spec->shape, NULL, made, err));
    status = convert(b, d, on, FAN_JOB_REDUCE, "reduce", *made, from, err);
done:
    fan_array_drop(there);
    fan_array_drop(cast);
    return status;
}

/* From the host to a device, or from a device to the host; cast on the host. */
static fan_status move_dense(fan_buffer *b, const fan_value *v, const fan_conversion *to, fan_stream *on,
                             fan_array **made, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *host = NULL;
    const fan_array *from = v->array;
    if (to->upload) {
        FAN_GO(fan_device_array(fan_cpu(), NULL, to->dtype, 0, NULL, NULL, &host, err));
        FAN_GO(convert(b, fan_cpu(), NULL, FAN_JOB_COPY, "cast", host, from, err));
        FAN_GO(fan_device_array(to->device, on, to->dtype, 0, NULL, NULL, made, err));
        status = convert(b, to->device, on, FAN_JOB_UPLOAD, "upload", *made, host, err);
    } else {
        FAN_GO(fan_device_array(fan_cpu(), NULL, v->dtype, from->ndim, from->shape, from, &host, err));
        FAN_GO(v->device->backend->read(on, host, from, err));
        FAN_GO(fan_device_array(fan_cpu(), NULL, to->dtype, from->ndim, from->shape, from, made, err));
        status = convert(b, fan_cpu(), NULL, FAN_JOB_COPY, "cast", *made, host, err);
    }
done:
    fan_array_drop(host);
    return status;
}

fan_status fan_contribution_convert(fan_buffer *b, size_t slot, const fan_contribution *c, const fan_conversion *to,
                                    fan_stream *on, fan_value *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *v = &c->value;
    fan_status status;
    fan_array *made = NULL;
    fan_sparse *sparse = NULL;
    *out = (fan_value){.dtype = FAN_DT_NONE};
    if (v->form == FAN_FORM_SPARSE && to->reduce)
        status = reduce_sparse(b, s, v, to, on, &made, err);
    else if (v->form == FAN_FORM_SPARSE && !to->cast)
        status = copy_sparse(b, to->device, on, v->sparse, &sparse, err);
    else if (v->form == FAN_FORM_SPARSE)
        status = to->device->backend->has_streams
                     ? fan_device_sparse_merge(to->device, on, &(fan_sparse_operand){v->sparse, v->dtype}, 1, false,
                                               to->dtype, NULL, &sparse, err)
                     : fan_sparse_cast(v->sparse, to->dtype, &sparse, err);
    else if (to->reduce)
        status = reduce_dense(b, s, v, to, on, &made, err);
    else if (to->upload || to->download)
        status = move_dense(b, v, to, on, &made, err);
    else
        status = fan_device_array(to->device, on, to->dtype, v->array->ndim, v->array->shape, v->array, &made, err);
    if (status == FAN_OK && v->form == FAN_FORM_DENSE && !to->reduce && !to->upload && !to->download)
        status = convert(b, to->device, on, FAN_JOB_COPY, to->cast ? "cast" : "copy", made, v->array, err);
    if (status != FAN_OK) {
        fan_array_drop(made);
        fan_sparse_drop(sparse);
        return status;
    }
    if (sparse && to->cast)
        FAN_COUNT(b, copies, 1);
    *out = sparse ? fan_value_sparse(sparse, to->device) : fan_value_dense(made, to->device);
    out->origin = v->origin;
    out->rank = v->rank;
    out->weak = v->weak;
    return FAN_OK;
}
