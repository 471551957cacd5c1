/* stream: streams, events and reads of the C API, on any device; then which arrays share bytes.
 * Needs no interpreter. */
#include "py/api/api.h"
#include "py/base/api_lock.h"

#include "array/overlap.h"
#include "base/interrupt.h"

/* event_of: a fanin_event is a fan_event. */
static fan_event *event_of(fanin_event *e)
{
    return (fan_event *)(void *)e;
}

/* stream_arg: a hold on a stream, which must not be NULL. */
static fan_status stream_arg(const fanin_stream *given, const char *what, fan_stream **out,
                             fan_error *err)
{
    FAN_TRY(fan_api_stream(given, NULL, out, err));
    if (!*out)
        return fan_fail(err, FAN_ERR_TYPE, "%s: expected a stream, got NULL", what);
    return FAN_OK;
}

static fan_status stream_record(const fanin_stream *stream, fanin_event **out, fan_error *err)
{
    fan_stream *s;
    FAN_TRY(stream_arg(stream, "event_record", &s, err));
    fan_status status = fan_event_record(s, (fan_event **)(void *)out, err);
    fan_stream_drop(s);
    return status;
}

fanin_status fan_api_event_record(const fanin_stream *stream, fanin_event **out, fanin_failure *why)
{
    *out = NULL;
    FAN_API_RUN(stream_record(stream, out, &err));
}

void fan_api_event_free(fanin_event *e)
{
    fan_api_place was = fan_api_releases_begin();
    fan_event_drop(event_of(e));
    fan_api_releases_end(was);
}

static fan_status stream_wait(const fanin_stream *stream, fanin_event *e, fan_error *err)
{
    fan_stream *s;
    if (!e)
        return fan_fail(err, FAN_ERR_TYPE, "stream_wait: expected an event, got NULL");
    FAN_TRY(stream_arg(stream, "stream_wait", &s, err));
    fan_status status = fan_stream_wait(s, event_of(e), NULL, err);
    fan_stream_drop(s);
    return status;
}

fanin_status fan_api_stream_wait(const fanin_stream *stream, fanin_event *e, fanin_failure *why)
{
    FAN_API_RUN(stream_wait(stream, e, &err));
}

static fan_status stream_sync(const fanin_stream *stream, fan_error *err)
{
    fan_stream *s;
    FAN_TRY(stream_arg(stream, "stream_sync", &s, err));
    fan_status status = fan_stream_sync(s, err);
    fan_stream_drop(s);
    return status;
}

fanin_status fan_api_stream_sync(const fanin_stream *stream, fanin_failure *why)
{
    FAN_API_RUN(stream_sync(stream, &err));
}

/* read_into: dst has the shape and dtype of the value. */
static fan_status read_into(const fanin_value *v, fan_stream *s, const fan_array *dst,
                            fan_error *err)
{
    fan_array *a = fan_c_array(v);
    fan_device *d = fan_api_device_of(v);
    char has[160];
    char wants[160];
    if (dst->dtype != a->dtype || !fan_array_same_shape(dst, a)) {
        return fan_fail(
            err, FAN_ERR_VALUE,
            "value_read: the value is %s of shape %s, and the memory %s of shape %s",
            fan_dtype_name(a->dtype), fan_shape_text(a->ndim, a->shape, wants, sizeof wants),
            fan_dtype_name(dst->dtype), fan_shape_text(dst->ndim, dst->shape, has, sizeof has));
    }
    if (d->backend->use)
        FAN_TRY(d->backend->use(d, a, "read", false, err));
    return d->backend->read(s, dst, a, err);
}

static fan_status value_read(const fanin_value *v, const fanin_stream *stream,
                             const fanin_tensor *out, fan_error *err)
{
    fan_stream *s = NULL;
    fan_array *dst;
    fan_device *d = fan_api_device_of(v);
    if (!v->array)
        return fan_fail(err, FAN_ERR_VALUE, "value_read: the value is undefined");
    FAN_TRY(fan_api_out(out, "value_read", &dst, err));
    fan_status status = fan_api_stream(stream, d, &s, err);
    if (status == FAN_OK && !s && d->backend->has_streams) {
        s = fan_stream_current(d);
        if (!s)
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for the current stream");
    }
    if (status == FAN_OK)
        status = read_into(v, s, dst, err);
    fan_array_drop(dst);
    fan_stream_drop(s);
    return status;
}

fanin_status fan_api_value_read(const fanin_value *v, const fanin_stream *stream,
                                const fanin_tensor *out, fanin_failure *why)
{
    FAN_API_RUN(value_read(v, stream, out, &err));
}

/* ---- overlap ---- */

/* region_of: the region of a tensor, whose strides in bytes are written to `strides`. */
static fan_status region_of(const fanin_tensor *given, int64_t *strides, fan_region *out,
                            fan_error *err)
{
    const fan_dl_tensor *t = fan_api_tensor(given);
    int64_t bits = (int64_t)t->dtype.lanes * t->dtype.bits;
    int64_t item = bits / 8;
    int64_t size;
    uint64_t at;
    if (!bits || bits % 8) { /* packed elements: the strides do not count bytes */
        return fan_fail(err, FAN_ERR_TYPE,
                        "overlap: expected elements of whole bytes, got %d lanes of %d bits",
                        (int)t->dtype.lanes, (int)t->dtype.bits);
    }
    bool no_shape = t->ndim && !t->shape;
    if (t->ndim < 0 || t->ndim > FAN_MAX_NDIM || no_shape) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "overlap: expected a tensor of 0 to %d axes with a shape, got %d axes",
                        FAN_MAX_NDIM, (int)t->ndim);
    }
    FAN_TRY(fan_shape_check(t->ndim, t->shape, (size_t)item, &size, err));
    fan_dense_strides(t->ndim, t->shape, (size_t)item, NULL, strides);
    for (int i = 0; i < t->ndim && t->strides && size; i++) {
        if (__builtin_mul_overflow(t->strides[i], item, &strides[i])) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "overlap: the stride %lld along axis %d is too large",
                            (long long)t->strides[i], i);
        }
    }
    if (__builtin_add_overflow((uint64_t)(uintptr_t)t->data, t->byte_offset, &at)) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "overlap: the byte_offset %llu leaves the address space",
                        (unsigned long long)t->byte_offset);
    }
    *out = (fan_region){
        .data = at,
        .itemsize = item,
        .shape = t->shape,
        .strides = strides,
        .ndim = t->ndim,
    };
    return FAN_OK;
}

static fan_status tensors_overlap(const fanin_tensor *a, const fanin_tensor *b, uint64_t budget,
                                  int64_t *at_a, int64_t *at_b, fan_verdict *out, fan_error *err)
{
    FAN_UNINITIALIZED int64_t strides[2][FAN_MAX_NDIM];
    FAN_UNINITIALIZED int64_t at[2][FAN_MAX_NDIM];
    fan_dl_device device_a = fan_api_tensor(a)->device;
    fan_dl_device device_b = fan_api_tensor(b)->device;
    fan_region x;
    fan_region y;
    if (device_a.type != device_b.type || device_a.id != device_b.id)
        return fan_fail(err, FAN_ERR_VALUE, "overlap: the tensors are on different devices");
    FAN_TRY(region_of(a, strides[0], &x, err));
    FAN_TRY(region_of(b, strides[1], &y, err));
    FAN_TRY(fan_overlap(&x, &y, budget, at[0], at[1], out, err));
    if (*out != FAN_OVERLAP_YES)
        return FAN_OK;
    if (at_a)
        memcpy(at_a, at[0], (size_t)x.ndim * sizeof *at_a);
    if (at_b)
        memcpy(at_b, at[1], (size_t)y.ndim * sizeof *at_b);
    return FAN_OK;
}

fanin_status fan_api_overlap(const fanin_tensor *a, const fanin_tensor *b, uint64_t budget,
                             int64_t *at_a, int64_t *at_b, fanin_verdict *out, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_verdict v = FAN_OVERLAP_DISJOINT;
    fan_error_clear(&err);
    fan_status status = tensors_overlap(a, b, budget, at_a, at_b, &v, &err);
    *out = FANIN_UNKNOWN; /* of a failure, too */
    if (v == FAN_OVERLAP_YES)
        *out = FANIN_OVERLAP;
    else if (status == FAN_OK && v == FAN_OVERLAP_DISJOINT)
        *out = FANIN_DISJOINT;
    return fan_api_fail(why, status, &err);
}
