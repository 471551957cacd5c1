#include "buffer/check.h"

#include "buffer/order.h"
#include "buffer/pass.h"

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
    fan_device_text(want, wants, sizeof wants);
    fan_device_text(v->device, has, sizeof has);
    return refuse(err, FAN_ERR_VALUE, b, slot, c->key, "expected a gradient on %s, got one on %s%s (A12)", wants, has,
                  strcmp(wants, has) == 0 ? " of another machine" : "");
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
    if ((uint64_t)c->key < p->next_key || fan_pass_has(p, c->key, &out->at))
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

fan_status fan_check_contribution(const fan_buffer *b, size_t slot, const fan_contribution *c, fan_stream *current,
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
    bool whole = c->value.form == FAN_FORM_DENSE || c->value.form == FAN_FORM_SPARSE;
    bool defined = c->value.form != FAN_FORM_UNDEFINED;
    out->download = out->download && c->value.form == FAN_FORM_DENSE;
    fan_add_facts facts = {.defined = defined,
                           .changes = fan_arrival_converts(out) || (c->copy && whole),
                           .upload = out->upload,
                           .download = out->download};
    if (defined && out->device && out->device->backend->has_streams) {
        FAN_TRY(check_stream(b, slot, c->stream, out->device, "producer's", c->key, err));
        FAN_TRY(check_stream(b, slot, consumer, out->device, "consumer's", c->key, err));
        if (!current)
            return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory for the current stream", b->name, slot);
        out->producer = c->stream ? c->stream : current;
        facts.device = out->device->id;
        facts.producer = fan_stream_id_of(c->stream);
        facts.consumer = fan_stream_id_of(consumer);
        facts.current = fan_stream_id_of(current);
        facts.slot =
            (fan_sync_slot){.consumer = fan_stream_id_of(s->p->consumer), .accum = fan_stream_id_of(s->p->accum)};
    }
    out->plan = fan_plan_add(&facts);
    return FAN_OK;
}
