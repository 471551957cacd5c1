/* What happens to one contribution on its way into a slot: is it right (A9-A12, A15, A16), and what must become of it
 * first (S21)? */
#include "buffer/arrive.h"

#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* refuse: "grads: slot 2 (w1), key 3: " and what follows. */
static fan_status refuse(fan_error *err, fan_status status, const fan_buffer *b, size_t slot, int64_t key,
                         const char *fmt, ...) __attribute__((format(printf, 6, 7)));

static fan_status refuse(fan_error *err, fan_status status, const fan_buffer *b, size_t slot, int64_t key,
                         const char *fmt, ...)
{
    const fan_slot *s = &b->slots[slot];
    char text[FAN_ERROR_TEXT], keyed[32] = "";
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (key >= 0)
        snprintf(keyed, sizeof keyed, ", key %" PRId64, key);
    return fan_fail(err, status, "%s: slot %zu%s%s%s%s: %s", b->name, slot, s->spec->name ? " (" : "",
                    s->spec->name ? s->spec->name : "", s->spec->name ? ")" : "", keyed, text);
}

static const char *kind_words(char kind)
{
    switch (kind) {
    case 'c':
        return "complex";
    case 'f':
        return "float";
    case 'b':
        return "bool";
    default:
        return "integer";
    }
}

static bool weak_int_fits(fan_dtype d, int64_t lo, int64_t hi)
{
    unsigned bits = (unsigned)fan_dtype_size(d) * 8;
    switch (fan_dtype_kind(d)) {
    case 'u':
        return lo >= 0 && (bits >= 63 || hi < (INT64_C(1) << bits));
    case 'i':
        return bits == 64 || (lo >= -(INT64_C(1) << (bits - 1)) && hi < (INT64_C(1) << (bits - 1)));
    default:
        return true;
    }
}

static int64_t weak_int(const fan_value *v)
{
    int64_t i = 0;
    if (v->dtype == FAN_DT_INT64)
        memcpy(&i, v->array->data, sizeof i);
    return i;
}

static bool weak_castable(fan_dtype from, fan_dtype to)
{
    static const char order[] = "bifc";
    char f = fan_dtype_kind(from), t = fan_dtype_kind(to);
    return strchr(order, f == 'u' ? 'i' : f) <= strchr(order, t == 'u' ? 'i' : t);
}

static fan_status check_shape(const fan_buffer *b, size_t slot, const fan_contribution *c, fan_arrival *out,
                              fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const int64_t *shape, *want = s->spec->has_shape ? s->spec->shape : s->p->shape;
    int ndim = fan_value_shape(&c->value, &shape), wdim = s->spec->has_shape ? s->spec->ndim : s->p->ndim;
    char has[160], wants[160];
    if (ndim < 0 || !(s->spec->has_shape || s->p->shaped))
        return FAN_OK;
    switch (fan_accum_fit(s->spec->has_shape, wdim, want, ndim, shape)) {
    case FAN_FIT_EXACT:
        return FAN_OK;
    case FAN_FIT_REDUCE:
        out->reduce = c->value.form != FAN_FORM_ZERO;
        return FAN_OK;
    default:
        return refuse(err, FAN_ERR_VALUE, b, slot, c->key, "expected a gradient of shape %s%s, got %s (A9)",
                      fan_shape_text(wdim, want, wants, sizeof wants),
                      s->spec->has_shape ? " (or one that it broadcasts to)" : " as the first one",
                      fan_shape_text(ndim, shape, has, sizeof has));
    }
}

static fan_status check_dtype(const fan_buffer *b, size_t slot, const fan_contribution *c, fan_arrival *out,
                              fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *v = &c->value;
    fan_dtype sum;
    out->dtype = v->dtype;
    out->seen = s->p->seen;
    if (v->form == FAN_FORM_OBJECT && s->spec->exact)
        return refuse(err, FAN_ERR_TYPE, b, slot, c->key, "an exact sum takes arrays, and no objects (A11)");
    if (v->form == FAN_FORM_OBJECT)
        return FAN_OK;
    if (s->spec->dtype != FAN_DT_NONE) {
        bool fits = v->weak ? weak_castable(v->dtype, s->spec->dtype) : fan_dtype_can_cast(v->dtype, s->spec->dtype);
        if (!fits)
            return refuse(err, FAN_ERR_VALUE, b, slot, c->key,
                          "expected dtype %s, got %s: %s into %s would lose values; convert it yourself (A10)",
                          fan_dtype_name(s->spec->dtype), fan_dtype_name(v->dtype),
                          kind_words(fan_dtype_kind(v->dtype)), kind_words(fan_dtype_kind(s->spec->dtype)));
        out->dtype = c->summed ? v->dtype : s->spec->dtype;
        out->seen = fan_dtype_set_add(0, s->spec->dtype, false);
        sum = s->spec->dtype;
    } else {
        out->seen = fan_dtype_set_add(s->p->seen, v->dtype, v->weak);
        sum = fan_dtype_set_promote(out->seen);
        if (sum == FAN_DT_NONE)
            return refuse(err, FAN_ERR_VALUE, b, slot, c->key,
                          "%s has no common dtype with what the slot holds; declare the slot's dtype (A10)",
                          fan_dtype_name(v->dtype));
        if (fan_accum_dtype(sum, s->spec->accumulate) == FAN_DT_NONE)
            return refuse(err, FAN_ERR_VALUE, b, slot, c->key, "accumulate=%s cannot hold a sum of dtype %s (A11)",
                          fan_dtype_name(s->spec->accumulate), fan_dtype_name(sum));
    }
    out->weak_lo = s->p->has_weak_int ? s->p->weak_lo : 0;
    out->weak_hi = s->p->has_weak_int ? s->p->weak_hi : 0;
    if (v->weak && v->form == FAN_FORM_DENSE && v->dtype == FAN_DT_INT64) {
        int64_t i = weak_int(v);
        out->weak_lo = i < out->weak_lo ? i : out->weak_lo;
        out->weak_hi = i > out->weak_hi ? i : out->weak_hi;
    }
    if (!weak_int_fits(sum, out->weak_lo, out->weak_hi))
        return refuse(err, FAN_ERR_VALUE, b, slot, c->key,
                      "a Python int among its contributions, %" PRId64 ", does not fit dtype %s",
                      weak_int_fits(sum, 0, out->weak_hi) ? out->weak_lo : out->weak_hi, fan_dtype_name(sum));
    if (s->spec->exact && v->form == FAN_FORM_SPARSE && v->device && v->device->backend->has_streams)
        return refuse(err, FAN_ERR_TYPE, b, slot, c->key,
                      "an exact sum on a device with streams takes dense gradients (A11)");
    if (v->dtype != out->dtype && (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE))
        out->cast = true;
    return FAN_OK;
}

static fan_status check_device(const fan_buffer *b, size_t slot, const fan_contribution *c, fan_arrival *out,
                               fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *v = &c->value;
    fan_device *want = s->spec->device ? s->spec->device : s->p->device;
    char has[32], wants[32];
    out->device = v->device;
    if (!v->device || !want || v->device == want) {
        if (v->form == FAN_FORM_OBJECT && !v->nparts &&
            ((want && want->backend->has_streams) || (c->stream && !want))) {
            return refuse(
                err, FAN_ERR_TYPE, b, slot, c->key,
                "an object on a device with streams must say what memory it holds: give it __fanin_parts__()");
        }
        return FAN_OK;
    }
    out->device = want;
    if (want->backend->has_streams && v->device == fan_cpu() && v->form == FAN_FORM_DENSE && v->array->ndim == 0) {
        out->upload = true;
        return FAN_OK;
    }
    if (want == fan_cpu() && s->spec->device && v->form == FAN_FORM_DENSE) {
        out->download = true;
        return FAN_OK;
    }
    return refuse(err, FAN_ERR_VALUE, b, slot, c->key, "expected a gradient on %s, got one on %s (A12)",
                  fan_device_text(want, wants, sizeof wants), fan_device_text(v->device, has, sizeof has));
}

static fan_status check_key(const fan_buffer *b, size_t slot, const fan_contribution *c, fan_arrival *out,
                            fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_pass *p = s->p;
    out->at = p->nitems;
    if (p->keyed && (p->keyed > 0) != (c->key >= 0))
        return refuse(err, FAN_ERR_VALUE, b, slot, c->key,
                      "this pass adds %s keys to this slot; keep to that until take() (A15)",
                      p->keyed > 0 ? "with" : "without");
    if (s->expected >= 0 && p->count >= s->expected)
        return refuse(err, FAN_ERR_VALUE, b, slot, c->key, "expected %" PRId64 " contribution%s, got one more (A16)",
                      s->expected, FAN_PLURAL(s->expected));
    if (c->key < 0)
        return FAN_OK;
    if (c->key < p->next_key || fan_pass_has(p, c->key, &out->at))
        return refuse(err, FAN_ERR_VALUE, b, slot, c->key, "this key has contributed already in this pass (A16)");
    return FAN_OK;
}

static fan_status check_stream(const fan_buffer *b, size_t slot, const fan_stream *s, const fan_device *d,
                               const char *whose, int64_t key, fan_error *err)
{
    char one[32], two[32];
    if (!s || (s->device->backend == d->backend && s->device->self == d->self))
        return FAN_OK;
    return refuse(err, FAN_ERR_TYPE, b, slot, key,
                  "the %s stream is on %s, which cannot wait for or be waited for by %s", whose,
                  fan_device_text(s->device, one, sizeof one), fan_device_text(d, two, sizeof two));
}

fan_status fan_arrive_check(const fan_buffer *b, size_t slot, const fan_contribution *c, fan_stream *current,
                            fan_stream *consumer, fan_arrival *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    memset(out, 0, sizeof *out);
    out->dtype = FAN_DT_NONE;
    out->seen = s->p->seen;
    if (c->value.form != FAN_FORM_UNDEFINED) {
        FAN_TRY(check_shape(b, slot, c, out, err));
        FAN_TRY(check_dtype(b, slot, c, out, err));
        FAN_TRY(check_device(b, slot, c, out, err));
    }
    FAN_TRY(check_key(b, slot, c, out, err));
    if (!out->device || !out->device->backend->has_streams || c->value.form == FAN_FORM_UNDEFINED) {
        out->sync.how = '-';
        out->download = out->download && c->value.form == FAN_FORM_DENSE;
        return FAN_OK;
    }
    FAN_TRY(check_stream(b, slot, c->stream, out->device, "producer's", c->key, err));
    FAN_TRY(check_stream(b, slot, consumer, out->device, "consumer's", c->key, err));
    if (!current)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory for the current stream", b->name, slot);
    out->producer = c->stream ? c->stream : current;
    out->sync = fan_sync_add_plan(
        out->device->id, fan_stream_id_of(c->stream), fan_stream_id_of(consumer), fan_stream_id_of(current),
        (fan_sync_slot){.consumer = fan_stream_id_of(s->p->consumer), .accum = fan_stream_id_of(s->p->accum)});
    return FAN_OK;
}

/* A fresh array for the conversion, on the device, first used on `on`. */
static fan_status make(fan_device *d, fan_stream *on, fan_dtype dtype, int ndim, const int64_t *shape,
                       const fan_array *like, fan_array **out, fan_error *err)
{
    return fan_device_array(d, on, dtype, ndim, shape, like, out, err);
}

/* One job from `in` to `out`, counted. */
static fan_status convert(fan_buffer *b, fan_device *d, fan_stream *on, fan_job_kind kind, const char *label,
                          const fan_array *out, const fan_array *in, fan_error *err)
{
    fan_operand operand = {in, out->dtype};
    uint64_t bytes = (uint64_t)in->size * fan_dtype_size(in->dtype);
    bool away = bytes >= 65536 && !d->backend->has_streams && b->frontend->leave;
    void *left = away ? b->frontend->leave() : NULL;
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_interrupt_begin(&interrupt, d->backend->has_streams ? NULL : b->frontend->poll, err);
    fan_status status =
        fan_device_run(d, on, &(fan_job){.kind = kind, .out = out, .in = &operand, .n = 1, .label = label}, err);
    status = fan_interrupt_end(&interrupt, status);
    if (away)
        b->frontend->enter(left);
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
        FAN_GO(make(d, on, from[i]->dtype, from[i]->ndim, from[i]->shape, from[i], &part[i], err));
        FAN_GO(convert(b, d, on, FAN_JOB_COPY, "copy", part[i], from[i], err));
    }
    FAN_GO(fan_sparse_new(v->format, v->ndim, v->shape, part[0], part[1], part[2], v->coalesced, out, err));
    (*out)->nnz_coalesced = v->nnz_coalesced;
done:
    for (int i = 0; i < 3; i++)
        fan_array_drop(part[i]);
    return status;
}

/* What `converted` makes, each of its own kind: *made or *out is the caller's, also where it failed half-way; `on`
 * orders the work. */
static fan_status reduce_sparse(fan_buffer *b, const fan_slot *s, const fan_value *v, const fan_arrival *a,
                                fan_stream *on, fan_array **made, fan_error *err)
{
    fan_device *d = a->device;
    fan_dtype acc = fan_dtype_accumulate(a->dtype);
    if (!d->backend->has_streams) {
        fan_sparse *sparse = NULL;
        FAN_TRY(fan_sparse_cast(v->sparse, a->dtype, &sparse, err));
        fan_status status = make(d, on, acc, s->spec->ndim, s->spec->shape, NULL, made, err);
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, b->frontend->poll, err);
        if (status == FAN_OK)
            status = fan_sparse_reduce(*made, sparse, err);
        status = fan_interrupt_end(&interrupt, status);
        fan_sparse_drop(sparse);
        FAN_COUNT(b, copies, 1);
        return status;
    }
    fan_array *dense = NULL; /* D7: through the dense gradient */
    FAN_TRY(make(d, on, a->dtype == v->dtype ? fan_dtype_accumulate(v->dtype) : v->dtype, v->sparse->ndim,
                 v->sparse->shape, NULL, &dense, err));
    fan_status status = fan_device_run(d, on, &(fan_job){.kind = FAN_JOB_ZERO, .out = dense, .label = "fill"}, err);
    if (status == FAN_OK)
        status = fan_device_run(
            d, on, &(fan_job){.kind = FAN_JOB_SCATTER, .out = dense, .sparse = v->sparse, .label = "scatter"}, err);
    if (status == FAN_OK)
        status = make(d, on, acc, s->spec->ndim, s->spec->shape, NULL, made, err);
    if (status == FAN_OK)
        status = convert(b, d, on, FAN_JOB_REDUCE, "reduce", *made, dense, err);
    fan_array_drop(dense);
    return status;
}

static fan_status convert_sparse(fan_buffer *b, const fan_value *v, const fan_arrival *a, fan_stream *on,
                                 fan_sparse **out, fan_error *err)
{
    fan_device *d = a->device;
    if (!a->cast)
        return copy_sparse(b, d, on, v->sparse, out, err);
    if (d->backend->has_streams)
        FAN_TRY(fan_device_sparse_merge(d, on, &(fan_sparse_operand){v->sparse, v->dtype}, 1, false, a->dtype, NULL,
                                        out, err));
    else
        FAN_TRY(fan_sparse_cast(v->sparse, a->dtype, out, err));
    FAN_COUNT(b, copies, 1);
    return FAN_OK;
}

/* Reduced to the accumulation dtype of the declared one: rounded once more, at the end. */
static fan_status reduce_dense(fan_buffer *b, const fan_slot *s, const fan_value *v, const fan_arrival *a,
                               fan_stream *on, fan_array **made, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_device *d = a->device;
    fan_array *there = NULL, *cast = NULL;
    const fan_array *from = v->array;
    if (a->upload) {
        FAN_GO(make(d, on, v->dtype, from->ndim, from->shape, NULL, &there, err));
        FAN_GO(convert(b, d, on, FAN_JOB_UPLOAD, "upload", there, from, err));
        from = there;
    }
    if (a->cast) {
        FAN_GO(make(d, on, a->dtype, from->ndim, from->shape, from, &cast, err));
        FAN_GO(convert(b, d, on, FAN_JOB_COPY, "cast", cast, from, err));
        from = cast;
    }
    FAN_GO(make(d, on, fan_dtype_accumulate(a->dtype), s->spec->ndim, s->spec->shape, NULL, made, err));
    status = convert(b, d, on, FAN_JOB_REDUCE, "reduce", *made, from, err);
done:
    fan_array_drop(there);
    fan_array_drop(cast);
    return status;
}

/* From the host to a device, or from a device to the host; cast on the host. */
static fan_status move_dense(fan_buffer *b, const fan_value *v, const fan_arrival *a, fan_stream *on, fan_array **made,
                             fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *host = NULL;
    const fan_array *from = v->array;
    if (a->upload) {
        FAN_GO(make(fan_cpu(), NULL, a->dtype, 0, NULL, NULL, &host, err));
        FAN_GO(convert(b, fan_cpu(), NULL, FAN_JOB_COPY, "cast", host, from, err));
        FAN_GO(make(a->device, on, a->dtype, 0, NULL, NULL, made, err));
        status = convert(b, a->device, on, FAN_JOB_UPLOAD, "upload", *made, host, err);
    } else {
        FAN_GO(make(fan_cpu(), NULL, v->dtype, from->ndim, from->shape, from, &host, err));
        FAN_GO(v->device->backend->read(on, host, from, err));
        FAN_GO(make(fan_cpu(), NULL, a->dtype, from->ndim, from->shape, from, made, err));
        status = convert(b, fan_cpu(), NULL, FAN_JOB_COPY, "cast", *made, host, err);
    }
done:
    fan_array_drop(host);
    return status;
}

/* The converted gradient as a value of its own; `on` orders the work. */
static fan_status converted(fan_buffer *b, size_t slot, const fan_contribution *c, const fan_arrival *a, fan_stream *on,
                            fan_value *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *v = &c->value;
    fan_status status;
    fan_array *made = NULL;
    fan_sparse *sparse = NULL;
    *out = (fan_value){.dtype = FAN_DT_NONE};
    if (v->form == FAN_FORM_SPARSE && a->reduce)
        status = reduce_sparse(b, s, v, a, on, &made, err);
    else if (v->form == FAN_FORM_SPARSE)
        status = convert_sparse(b, v, a, on, &sparse, err);
    else if (a->reduce)
        status = reduce_dense(b, s, v, a, on, &made, err);
    else if (a->upload || a->download)
        status = move_dense(b, v, a, on, &made, err);
    else
        status = make(a->device, on, a->dtype, v->array->ndim, v->array->shape, v->array, &made, err);
    if (status == FAN_OK && v->form == FAN_FORM_DENSE && !a->reduce && !a->upload && !a->download)
        status = convert(b, a->device, on, FAN_JOB_COPY, a->cast ? "cast" : "copy", made, v->array, err);
    if (status != FAN_OK) {
        fan_array_drop(made);
        fan_sparse_drop(sparse);
        return status;
    }
    *out = sparse ? fan_value_sparse(sparse, a->device) : fan_value_dense(made, a->device);
    out->origin = v->origin;
    out->rank = v->rank;
    out->weak = v->weak;
    return FAN_OK;
}

/* An event on `stream` for the item. */
static fan_status record(fan_buffer *b, size_t slot, fan_item *item, fan_stream *stream, uint64_t bit, fan_error *err)
{
    fan_pass *p = b->slots[slot].p;
    fan_event_drop(item->event);
    item->event = NULL;
    if (FAN_FAULT(RECORD_AFTER_FOLD) && !item->ours)
        return fan_event_new(stream->device, &item->event, err);
    for (size_t i = 0; FAN_FAULT(EVENT_REUSED) && i <= p->nitems; i++) {
        fan_event *e = i < p->nitems ? p->items[i]->event : p->ready_event;
        if (!e || e->device != stream->device)
            continue;
        item->event = fan_event_hold(e);
        return fan_event_rerecord(e, stream, err);
    }
    return fan_plan_record(b, stream, bit, &item->event, err);
}

static uint64_t record_bit(char how)
{
    switch (how) {
    case 'a':
        return FAN_PLAN_S9_RECORD;
    case 'B':
        return FAN_PLAN_S10_RECORD;
    case 'C':
        return FAN_PLAN_S11_RECORD;
    default:
        return FAN_PLAN_S12_RECORD;
    }
}

fan_status fan_arrive_carry_out(fan_buffer *b, size_t slot, fan_contribution *c, const fan_arrival *a, fan_item *item,
                                fan_stream *A, fan_stream *C, fan_value *old, fan_error *err)
{
    const fan_value *v = &c->value;
    bool change = fan_arrival_converts(a) || (c->copy && (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE));
    fan_value made = {.dtype = FAN_DT_NONE};
    *old = (fan_value){.dtype = FAN_DT_NONE};
    if (a->download) {
        fan_stream *on = c->stream ? fan_stream_hold(c->stream) : fan_stream_current(v->device);
        fan_status status = converted(b, slot, c, a, on, &made, err);
        fan_stream_drop(on);
        FAN_TRY(status);
    } else if (change && a->sync.how == '-') {
        FAN_TRY(converted(b, slot, c, a, NULL, &made, err));
    } else if (change) {
        fan_sync_convert plan = fan_sync_convert_plan(a->device->id, &a->sync);
        bool on_producer = plan.on_producer && !a->upload;
        fan_stream *on = on_producer ? a->producer : A;
        if (!on_producer && !a->upload && a->producer != A) {
            FAN_TRY(record(b, slot, item, a->producer, record_bit(a->sync.how), err));
            FAN_TRY(fan_plan_wait(b, slot, A, item->event, FAN_PLAN_S21_WAIT, err));
        }
        if (!a->upload)
            FAN_TRY(fan_plan_mark(v, on, FAN_PLAN_S21_MARK, err));
        if (on_producer && FAN_FAULT(RECORD_BEFORE_CONVERSION) && a->sync.record)
            FAN_TRY(record(b, slot, item, a->producer, record_bit(a->sync.how), err));
        FAN_TRY(converted(b, slot, c, a, on, &made, err));
        if (!on_producer) {
            fan_event_drop(item->event);
            item->event = NULL;
            fan_stream_drop(item->producer);
            item->producer = fan_stream_hold(A);
        }
        if (!on_producer && a->sync.how != '+' && A != C) {
            fan_status status = record(b, slot, item, A, FAN_PLAN_S21_RECORD, err);
            if (status != FAN_OK) {
                fan_value_drop(b->frontend, &made);
                return status;
            }
        }
    }
    if (made.form != FAN_FORM_UNDEFINED) {
        *old = item->value;
        item->value = made;
        item->ours = true;
        item->donated = false;
    }
    if (a->sync.how == '-' || (item->producer != a->producer))
        return FAN_OK;
    if (a->sync.record && !item->event) {
        fan_stream *on = FAN_FAULT(RECORD_ON_CONSUMER) ? C : a->producer;
        FAN_TRY(record(b, slot, item, on, record_bit(a->sync.how), err));
    }
    if (a->sync.mark)
        FAN_TRY(fan_plan_mark(&item->value, A, FAN_PLAN_S9_MARK, err));
    return FAN_OK;
}
