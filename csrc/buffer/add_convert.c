/* add_convert: a contribution becomes what its slot wants (fan_conversion): converted, moved,
 * summed to the declared shape, made dense or copied (A9, A10, A12, P5).
 *
 * In this order: one job; the parts of a sparse gradient; a reduction; an upload; a dense, a
 * partial gradient; and the choice among them. Which stream runs it, and what that waits for, is
 * the caller's (S21, add.c). */
#include "base/fault.h"
#include "base/interrupt.h"
#include "buffer/add_convert.h"
#include "buffer/fold_job.h"
#include "buffer/slot.h"

/* One conversion. The results of its steps are the caller's, also after a failure half-way. */
typedef struct add_conversion {
    fan_buffer *b;
    const fan_slot_spec *spec;
    const fan_conversion *to;
    fan_device *device; /* where a step runs, */
    fan_stream *on;     /* .. and what orders it; NULL: on the host */
    bool copies;        /* all memory of the result is the buffer's own */
} add_conversion;

/* One job from `in` to `out`, counted. `acc`: fan_operand's. */
static fan_status convert_job(const add_conversion *c, fan_job_kind kind, const char *label,
                              const fan_array *out, const fan_array *in, fan_dtype acc,
                              fan_error *err)
{
    fan_buffer *b = c->b;
    fan_operand operand = {.array = in, .acc = acc};
    fan_job job = {
        .kind = kind,
        .out = out,
        .in = &operand,
        .n = 1,
        .label = label,
    };
    uint64_t bytes = fan_dense_bytes(in);
    bool on_host = !c->device->backend->has_streams;
    void *left = fan_frontend_leave(b->frontend, bytes >= FAN_BUSY_BYTES && on_host);
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_buffer_interrupt_begin(b, &interrupt, on_host, err);
    fan_status status = fan_device_run(c->device, c->on, &job, err);
    status = fan_interrupt_end(&interrupt, status);
    fan_frontend_return(b->frontend, left);
    FAN_COUNT(b, copies, 1);
    FAN_COUNT(b, passes, 1);
    FAN_COUNT(b, bytes_read, bytes);
    FAN_COUNT(b, bytes_written, fan_dense_bytes(out));
    return status;
}

/* An array in another dtype, or copied; otherwise the same memory with a hold more. */
static fan_status convert_part(const add_conversion *c, fan_array *from, fan_dtype dtype,
                               bool copies, fan_array **out, fan_error *err)
{
    if (from->dtype == dtype && !copies) {
        *out = fan_array_hold(from);
        return FAN_OK;
    }
    const char *label = "cast";
    if (from->dtype == dtype)
        label = "copy";
    FAN_TRY(fan_device_array(c->device, c->on, dtype, from->ndim, from->shape, from, out, err));
    return convert_job(c, FAN_JOB_COPY, label, *out, from, dtype, err);
}

static fan_status convert_parts(const add_conversion *c, const fan_sparse *v, fan_sparse_parts *to,
                                fan_error *err)
{
    bool copies = c->copies;
    FAN_TRY(convert_part(c, v->indices, v->indices->dtype, copies, &to->indices, err));
    if (v->pointers)
        FAN_TRY(convert_part(c, v->pointers, v->pointers->dtype, copies, &to->pointers, err));
    return convert_part(c, v->values, c->to->dtype, copies, &to->values, err);
}

/* The same entries, each number rounded (D6): duplicates are not added here, so that their sum runs
 * in the dtype of the slot (D12). Index parts that are not copied stay the source's. */
static fan_status convert_sparse(const add_conversion *c, const fan_sparse *v, fan_sparse **out,
                                 fan_error *err)
{
    fan_sparse_parts to = {.indices = NULL};
    if (FAN_FAULT(MERGED_BEFORE_CAST)) {
        fan_dtype dtype = c->to->dtype;
        fan_sparse_operand own = {v, v->values->dtype};
        return fan_device_sparse_merge(c->device, c->on, &own, 1, true, dtype, NULL, out, err);
    }
    fan_status status = convert_parts(c, v, &to, err);
    return fan_sparse_parts_end(&to, status, v, out, err);
}

/* Summed to the declared shape, each element rounded to the declared dtype before: in the
 * accumulation dtype, so that the slot's sum is rounded once more, at the end (D7). `from` NULL: of
 * a sparse one. */
static fan_status convert_reduce(const add_conversion *c, const fan_array *from,
                                 const fan_sparse *sparse, fan_array **made, fan_error *err)
{
    fan_dtype dtype = c->to->dtype;
    fan_dtype acc = fan_accum_dtype(dtype, FAN_DT_NONE);
    FAN_TRY(
        fan_device_array(c->device, c->on, acc, c->spec->ndim, c->spec->shape, NULL, made, err));
    if (from)
        return convert_job(c, FAN_JOB_REDUCE, "reduce", *made, from, dtype, err);
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_buffer_interrupt_begin(c->b, &interrupt, !c->device->backend->has_streams, err);
    fan_status status = fan_device_sparse_reduce(c->device, c->on, sparse, dtype, *made, err);
    status = fan_interrupt_end(&interrupt, status);
    FAN_COUNT(c->b, copies, 1);
    return status;
}

/* A 0-d gradient of the host for a device; cast on the host. */
static fan_status convert_upload(const add_conversion *c, const fan_array *from, fan_array **made,
                                 fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *host = NULL;
    fan_dtype dtype = c->to->dtype;
    add_conversion here = {.b = c->b, .device = fan_cpu()};
    FAN_GO(fan_device_array(here.device, NULL, dtype, 0, NULL, NULL, &host, err));
    FAN_GO(convert_job(&here, FAN_JOB_COPY, "cast", host, from, dtype, err));
    FAN_GO(fan_device_array(c->device, c->on, dtype, 0, NULL, NULL, made, err));
    status = convert_job(c, FAN_JOB_UPLOAD, "upload", *made, host, dtype, err);
done:
    fan_array_drop(host);
    return status;
}

/* A dense gradient. An expanded one stays expanded (A13): its compact base is copied, cast and
 * moved, and a reduction reads it as it is. */
static fan_status convert_dense(add_conversion *c, const fan_value *v, fan_array **made,
                                fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *compact = NULL;   /* the base of the gradient */
    fan_array *near = NULL;      /* .. on the host, where it comes from a device */
    fan_array *converted = NULL; /* .. as the slot wants it */
    fan_array *wide = NULL;      /* what is reduced: `near` in the shape of the gradient */
    const fan_array *whole = v->array;
    uint64_t expanded = fan_array_expanded(whole);
    if (FAN_FAULT(EXPANDED_WRITTEN_OUT))
        expanded = 0;
    FAN_GO(fan_array_compact(whole, expanded, &compact, err));
    fan_array *from = compact;
    if (c->to->move == FAN_MOVE_DOWNLOAD) {
        FAN_GO(fan_device_array(fan_cpu(), NULL, from->dtype, from->ndim, from->shape, from, &near,
                                err));
        FAN_GO(v->device->backend->read(c->on, near, from, err)); /* the elements are there then */
        from = near;
        c->on = NULL;
    }
    if (c->to->reduce) {
        FAN_GO(fan_array_broadcast(from, whole->ndim, whole->shape, &wide, err));
        status = convert_reduce(c, wide, NULL, made, err);
        goto done;
    }
    if (c->to->move == FAN_MOVE_UPLOAD)
        FAN_GO(convert_upload(c, from, &converted, err));
    else
        FAN_GO(convert_part(c, from, c->to->dtype, !near, &converted, err));
    status = fan_array_broadcast(converted, whole->ndim, whole->shape, made, err);
done:
    fan_array_drop(compact);
    fan_array_drop(near);
    fan_array_drop(converted);
    fan_array_drop(wide);
    return status;
}

/* A partial gradient as a dense one, in the dtype that it has or, where nothing is summed to a
 * declared shape yet, in that of the slot; zero elsewhere. */
static fan_status convert_whole(add_conversion *c, const fan_value *v, fan_array **made,
                                fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_patch *patch = v->patch;
    fan_array *whole = NULL;
    fan_array *view = NULL;
    fan_dtype dtype = c->to->dtype;
    if (c->to->reduce)
        dtype = v->dtype;
    fan_job zero = {.kind = FAN_JOB_ZERO, .label = "begin"};
    FAN_GO(fan_device_array(c->device, c->on, dtype, patch->ndim, patch->shape, NULL, &whole, err));
    zero.out = whole;
    FAN_GO(fan_device_run(c->device, c->on, &zero, err));
    FAN_GO(fan_patch_view(patch, whole, &view, err));
    if (patch->size > 0)
        FAN_GO(convert_job(c, FAN_JOB_COPY, "copy", view, v->array, dtype, err));
    if (c->to->reduce)
        status = convert_reduce(c, whole, NULL, made, err);
    else
        *made = fan_array_hold(whole);
done:
    fan_array_drop(whole);
    fan_array_drop(view);
    return status;
}

fan_status fan_add_convert(fan_buffer *b, size_t slot, const fan_contribution *contribution,
                           const fan_conversion *to, fan_stream *on, fan_value *out, fan_error *err)
{
    const fan_value *value = &contribution->value;
    fan_status status;
    fan_array *made = NULL;
    fan_sparse *sparse = NULL;
    bool apart = contribution->copy || contribution->donate;
    add_conversion c = {
        .b = b,
        .spec = b->slots[slot].spec,
        .to = to,
        .device = to->device,
        .on = on,
    };
    /* donated memory is its owner's again once it is converted */
    c.copies = apart && !FAN_FAULT(COPY_KEEPS_INDICES);
    *out = fan_value_none();
    if (to->whole)
        status = convert_whole(&c, value, &made, err);
    else if (value->form != FAN_FORM_SPARSE)
        status = convert_dense(&c, value, &made, err);
    else if (to->reduce)
        status = convert_reduce(&c, NULL, value->sparse, &made, err);
    else
        status = convert_sparse(&c, value->sparse, &sparse, err);
    if (status != FAN_OK) {
        fan_array_drop(made);
        fan_sparse_drop(sparse);
        return status;
    }
    if (sparse)
        *out = fan_value_sparse(sparse, to->device);
    else
        *out = fan_value_dense(made, to->device);
    if (value->form == FAN_FORM_PARTIAL && !to->whole)
        fan_value_set_patch(out, value->patch);
    out->origin = value->origin;
    out->rank = value->rank;
    out->weak = value->weak;
    return FAN_OK;
}
