/* add: one contribution into one slot.
 *
 *   1. it is checked (A8-A16), and its streams are planned (S3-S11)                       locked
 *   2. it gets a place in the slot                                                        locked
 *   3. it is converted, its event recorded, used on the accumulation stream (S9, S21)     unlocked;
 *      parked: a fold may sum it                                                          locked
 *   4. what is due is folded (Park and fold)                                              locked,
 * but for the sum
 *   5. the leaf's warning (S6) */
#include "array/extents.h"
#include "array/sum.h"
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "buffer/add.h"
#include "buffer/fold.h"
#include "buffer/plain.h"
#include "buffer/slot.h"
#include "buffer/order.h"
#include "buffer/stats.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- 1. is it right (A8-A16), and which stream waits (S3-S11)? ---- */

static const char *add_kind_words(char kind)
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

static bool add_weak_castable(fan_dtype from, fan_dtype to)
{
    static const char order[] = "bifc";
    char f = fan_dtype_kind(from), t = fan_dtype_kind(to);
    return strchr(order, f == 'u' ? 'i' : f) <= strchr(order, t == 'u' ? 'i' : t);
}

static fan_status add_check_dtype(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  fan_check_result *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *v = &c->value;
    fan_dtype sum;
    out->to.dtype = v->dtype;
    out->seen = s->state->seen;
    if (v->form == FAN_FORM_OBJECT && s->spec->exact)
        return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, c->key),
                           "an exact sum takes arrays, and no objects (A11)");
    if (v->form == FAN_FORM_OBJECT)
        return FAN_OK;
    if (s->spec->dtype != FAN_DT_NONE) {
        bool fits = v->weak ? add_weak_castable(v->dtype, s->spec->dtype)
                            : fan_dtype_can_cast(v->dtype, s->spec->dtype);
        if (!fits) {
            char want[32] = "dtype ";
            fan_append(want, sizeof want, "%s", fan_dtype_name(s->spec->dtype));
            return fan_fail_expected(err, FAN_ERR_VALUE, fan_slot_place(b, slot, c->key), want,
                                     fan_dtype_name(v->dtype),
                                     ": %s into %s would lose values; convert it yourself (A10)",
                                     add_kind_words(fan_dtype_kind(v->dtype)),
                                     add_kind_words(fan_dtype_kind(s->spec->dtype)));
        }
        out->to.dtype = c->summed ? v->dtype : s->spec->dtype;
        out->seen = fan_dtype_set_add(0, s->spec->dtype, false);
        sum = s->spec->dtype;
    } else {
        fan_dtype accumulate = s->spec->accumulate;
        if (fan_accum_dtype(v->dtype, accumulate) == FAN_DT_NONE)
            return fan_fail_at(
                err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, c->key),
                "accumulate=%s cannot hold %s of dtype %s; declare the slot's dtype (A11)",
                fan_dtype_name(accumulate), v->weak ? "a Python number" : "a gradient",
                fan_dtype_name(v->dtype));
        out->seen = fan_dtype_set_add(s->state->seen, v->dtype, v->weak);
        sum = fan_dtype_set_promote(out->seen);
        if (sum == FAN_DT_NONE)
            return fan_fail_at(
                err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, c->key),
                "%s has no common dtype with what the slot holds; declare the slot's dtype (A10)",
                fan_dtype_name(v->dtype));
        /* What holds each contribution's dtype holds their promotion. */
        assert(fan_accum_dtype(sum, accumulate) != FAN_DT_NONE);
    }
    /* D5: an undeclared dtype may still widen, so what does not fit the sum's is found when that is
     * made. */
    out->number = fan_value_number(v);
    if (s->spec->dtype != FAN_DT_NONE && !fan_weak_int_fits(out->number, sum))
        return fan_slot_fail_int(b, slot, c->key, out->number, sum, err);
    if (s->spec->exact && v->form == FAN_FORM_SPARSE && v->device &&
        v->device->backend->has_streams)
        return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, c->key),
                           "an exact sum on a device with streams takes dense gradients (A11)");
    if (v->dtype != out->to.dtype && (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE))
        out->to.cast = true;
    return FAN_OK;
}

static fan_status add_check_device(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                   fan_check_result *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *v = &c->value;
    fan_device *want = s->spec->device ? s->spec->device : s->state->device;
    char has[64] = "one on ", wants[64] = "a gradient on ", place[32];
    out->to.device = v->device;
    if (!v->device || !want || v->device == want) {
        if (v->form == FAN_FORM_OBJECT && !v->nparts &&
            ((want && want->backend->has_streams) || (c->stream && !want))) {
            return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, c->key),
                               "an object on a device with streams must say what memory it holds: "
                               "give it __fanin_parts__()");
        }
        return FAN_OK;
    }
    out->to.device = want;
    if (want->backend->has_streams && v->device == fan_cpu() && v->form == FAN_FORM_DENSE &&
        v->array->ndim == 0) {
        out->to.upload = true;
        return FAN_OK;
    }
    if (want == fan_cpu() && s->spec->device && v->form == FAN_FORM_DENSE) {
        out->to.download = true;
        return FAN_OK;
    }
    fan_append(wants, sizeof wants, "%s", fan_device_text(want, place, sizeof place));
    fan_append(has, sizeof has, "%s", fan_device_text(v->device, place, sizeof place));
    return fan_fail_expected(err, FAN_ERR_VALUE, fan_slot_place(b, slot, c->key), wants, has,
                             "%s (A12)", fan_device_of_another(v->device, want));
}

static fan_status add_check_stream(const fan_buffer *b, size_t slot, const fan_stream *s,
                                   const fan_device *d, const char *whose, int64_t key,
                                   fan_error *err)
{
    char one[32], two[32];
    if (!s || (s->device->backend == d->backend && s->device->self == d->self))
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, slot, key),
                       "the %s stream is on %s, which cannot wait for or be waited for by %s%s",
                       whose, fan_device_text(s->device, one, sizeof one),
                       fan_device_text(d, two, sizeof two), fan_device_of_another(s->device, d));
}

fan_status fan_check_contribution(const fan_buffer *b, size_t slot, const fan_contribution *c,
                                  fan_stream *current, fan_stream *consumer, fan_check_result *out,
                                  fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    memset(out, 0, sizeof *out);
    out->to.dtype = FAN_DT_NONE;
    out->seen = s->state->seen;
    if (c->value.form != FAN_FORM_UNDEFINED) {
        const int64_t *shape, *fixed = s->spec->has_shape ? s->spec->shape : s->state->shape;
        int ndim = fan_value_shape(&c->value, &shape),
            wdim = s->spec->has_shape ? s->spec->ndim : s->state->ndim;
        fan_fit fit = FAN_FIT_EXACT;
        if (ndim >= 0 && (s->spec->has_shape || s->state->shaped))
            fit = fan_accum_fit(s->spec->has_shape, wdim, fixed, ndim, shape);
        if (fit == FAN_FIT_NO) {
            char has[160], wants[240] = "a gradient of shape ";
            fan_append(wants, sizeof wants, "%s%s", fan_shape_text(wdim, fixed, has, sizeof has),
                       s->spec->has_shape ? " (or one that it broadcasts to)"
                                          : " as the first one");
            return fan_fail_expected(err, FAN_ERR_VALUE, fan_slot_place(b, slot, c->key), wants,
                                     fan_shape_text(ndim, shape, has, sizeof has), " (A9)");
        }
        out->to.reduce = fit == FAN_FIT_REDUCE && c->value.form != FAN_FORM_ZERO;
        FAN_TRY(add_check_dtype(b, slot, c, out, err));
        FAN_TRY(add_check_device(b, slot, c, out, err));
    }
    const fan_slot_state *p = s->state;
    if (p->keyed && (p->keyed > 0) != (c->key >= 0))
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, c->key),
                           "this pass adds %s keys to this slot; keep to that until take() (A15)",
                           p->keyed > 0 ? "with" : "without");
    if (fan_slot_missing(s, 1) <= 0)
        return fan_slot_fail_count(b, slot, c->key, "one more", err);
    if (c->key >= 0 && ((uint64_t)c->key < p->next_key || fan_list_has(s->list, c->key)))
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, c->key),
                           "this key has contributed already in this pass (A16)");
    bool whole = c->value.form == FAN_FORM_DENSE || c->value.form == FAN_FORM_SPARSE;
    bool defined = c->value.form != FAN_FORM_UNDEFINED;
    out->to.download = out->to.download && c->value.form == FAN_FORM_DENSE;
    fan_add_facts facts = {
        .defined = defined,
        .changes = (out->to.reduce || out->to.cast || out->to.upload || out->to.download) ||
                   (c->copy && whole),
        .upload = out->to.upload,
        .download = out->to.download};
    if (defined && out->to.device && out->to.device->backend->has_streams) {
        FAN_TRY(add_check_stream(b, slot, c->stream, out->to.device, "producer's", c->key, err));
        FAN_TRY(add_check_stream(b, slot, consumer, out->to.device, "consumer's", c->key, err));
        if (!current)
            return fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(b, slot, -1),
                               "out of memory for the current stream");
        out->producer = c->stream ? c->stream : current;
        FAN_TRY(fan_stream_check_open(out->producer, err));
        facts.device = out->to.device->id;
        facts.producer = fan_stream_id_of(c->stream);
        facts.consumer = fan_stream_id_of(consumer);
        facts.current = fan_stream_id_of(current);
        facts.slot = (fan_sync_slot){.consumer = fan_stream_id_of(s->state->consumer),
                                     .accum = fan_stream_id_of(s->state->accum)};
    }
    out->plan = fan_plan_add(&facts);
    return FAN_OK;
}

/* ---- 2. a place in the slot ---- */

fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c)
{
    fan_slot *s = &b->slots[slot];
    fan_device *d = s->spec->device ? s->spec->device : c->value.device;
    fan_stream *current;
    if (d == fan_cpu() && !s->spec->device && c->value.form == FAN_FORM_DENSE &&
        c->value.array->ndim == 0) {
        fan_slot_lock(b, slot);
        d = s->state->device ? s->state->device : d;
        fan_device_hold(d);
        fan_slot_unlock(b, slot);
        current = d->backend->has_streams ? fan_stream_current(d) : NULL;
        fan_device_drop(d);
        return current;
    }
    return d && d->backend->has_streams ? fan_stream_current(d) : NULL;
}

/* S7, S11: for a gradient made under capture and a slot that is empty: which stream consumes in the
 * place of that of the buffer, and which is current where the legacy stream would be. Unlocked: it
 * calls the driver. */
static fan_status add_across_captures(fan_buffer *b, size_t slot, const fan_contribution *c,
                                      fan_add_streams *with, fan_error *err)
{
    fan_stream *current = with->current, *P = c->stream ? c->stream : current,
               *C = b->stream ? b->stream : current, *capture_stream = NULL;
    uint64_t id;
    if (!current || P->device->backend != current->device->backend ||
        C->device->backend != current->device->backend)
        return FAN_OK;
    fan_stream *asked = C;
    FAN_TRY(fan_order_consumer(asked, P, NULL, &C, err));
    if (C != asked) {
        fan_stream_drop(with->consumer);
        with->consumer = fan_stream_hold(C);
    }
    if (current->handle != 1 || P->device == current->device || C->device == current->device ||
        !current->device->backend->capture_stream)
        return FAN_OK;
    fan_slot_lock(b, slot);
    bool empty = !b->slots[slot].state->accum;
    fan_slot_unlock(b, slot);
    FAN_TRY(fan_stream_capture(P, &id, err));
    if (!empty || !id)
        return FAN_OK;
    FAN_TRY(current->device->backend->capture_stream(current->device, id, &capture_stream, err));
    fan_stream_drop(current);
    with->current = capture_stream;
    with->pooled = true;
    return FAN_OK;
}

fan_status fan_add_reserve(fan_buffer *b, fan_add_op *x, fan_error *err)
{
    fan_status status = FAN_OK;
    size_t slot = x->slot;
    fan_contribution *c = x->c;
    fan_slot *s = &b->slots[slot];
    FAN_TRY(fan_slot_check_unmoved(b, slot, &c->value, c->key, err));
    if (c->value.form == FAN_FORM_SPARSE && c->value.device == fan_cpu()) {
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, b->frontend->check_signals, err);
        FAN_TRY(fan_interrupt_end(&interrupt, fan_sparse_check(c->value.sparse, err)));
    }
    x->streams.current = fan_current_for(b, slot, c);
    x->streams.consumer = fan_stream_hold(b->stream);
    FAN_TRY(add_across_captures(b, slot, c, &x->streams, err));
    x->item = fan_calloc(sizeof *x->item);
    if (!x->item)
        return fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(b, slot, -1), "out of memory");
    fan_slot_lock(b, slot);
    FAN_GO(x->follows ? fan_slot_poisoned(b, slot, err) : fan_slot_enter(b, slot, "add", err));
    FAN_GO(fan_check_contribution(b, slot, c, x->streams.current, x->streams.consumer, &x->checked,
                                  err));
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    x->before = *s->state;
    const fan_check_result *a = &x->checked;
    fan_item *it = x->item;
    fan_list *list = fan_slot_list(s);
    fan_slot_state *p = s->state == &fan_slot_state_none ? fan_calloc(sizeof *p) : s->state;
    const int64_t *from = NULL;
    int ndim = fan_value_shape(&c->value, &from);
    bool shaped = p && ndim >= 0 && !s->spec->has_shape && !p->shaped;
    bool keep = c->value.form != FAN_FORM_UNDEFINED || c->key >= 0;
    int64_t *shape = shaped ? fan_alloc((size_t)ndim * sizeof *shape) : NULL;
    it->key = c->key;
    if (!list || !p || (shaped && !shape) ||
        (keep && !fan_list_put(list, &(fan_entry){.item = it, .general = true}))) {
        fan_free(shape);
        if (p && s->state == &fan_slot_state_none)
            fan_slot_state_free(b, p);
        FAN_GO(fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(b, slot, -1), "out of memory"));
    }
    if (s->state != p) /* the thread that sums reads it without the lock */
        s->state = p;
    if (shaped) {
        if (ndim)
            memcpy(shape, from, (size_t)ndim * sizeof *shape);
        p->shape = shape;
        p->ndim = ndim;
        p->shaped = true;
    }
    const fan_add_streams *with = &x->streams;
    p->seen = a->seen;
    p->has_weak_int = p->has_weak_int || c->value.weak;
    p->keyed = c->key >= 0 ? 1 : -1;
    p->count++;
    p->objects = p->objects || c->value.form == FAN_FORM_OBJECT;
    if (a->to.device && !p->device)
        p->device = fan_device_hold(a->to.device);
    if (a->plan.sync.how != FAN_CASE_HOST && a->plan.sync.how != FAN_CASE_LATER) {
        /* S5, S8 to S11: the slot's streams, fixed by its first gradient. */
        fan_stream *const known[] = {with->consumer, a->producer, with->current};
        p->how = a->plan.sync.how;
        p->consumer = fan_stream_hold(fan_order_stream(a->plan.sync.slot.consumer, known, 3));
        p->accum = fan_stream_hold(fan_order_stream(a->plan.sync.slot.accum, known, 3));
        p->capture_origin =
            p->how == FAN_CASE_CURRENT && with->pooled ? fan_stream_hold(a->producer) : NULL;
        assert(p->consumer && p->accum);
    }
    p->rules |= a->plan.rules;
    if (keep) {
        it->value = c->value;
        it->key = c->key;
        if (c->value.form != FAN_FORM_UNDEFINED && c->value.form != FAN_FORM_OBJECT)
            it->own = s->spec->dtype != FAN_DT_NONE
                          ? a->seen
                          : fan_dtype_set_add(0, c->value.dtype, c->value.weak);
        it->number = a->number;
        it->donated = c->donate && !c->copy && c->value.form != FAN_FORM_UNDEFINED;
        it->producer = fan_stream_hold(a->producer);
        it->owned = it->exposed = c->summed;
        it->parked = FAN_FAULT(PARKED_EARLY);
        p->arriving++;
    }
    x->reserved = true;
    if (b->leaf && x->checked.producer && x->checked.producer != s->state->consumer) {
        x->mismatch = true;
        x->producer = fan_stream_hold(x->checked.producer);
    }
    if (c->value.form == FAN_FORM_UNDEFINED && c->key < 0) {
        fan_free(x->item);
        x->item = NULL;
        fan_slot_notify(b, slot);
    } else if (c->value.form != FAN_FORM_UNDEFINED) {
        x->accum = fan_stream_hold(s->state->accum);
        x->consumer = fan_stream_hold(s->state->consumer);
    }
done:
    fan_slot_unlock(b, slot);
    return status;
}

/* Locked: the caller has its value again, and the slot is as it was; *gone is for
 * fan_slot_state_free. */
static void add_undo(fan_buffer *b, fan_add_op *x, fan_slot_state **gone)
{
    fan_item *it = x->item;
    fan_slot *s = &b->slots[x->slot];
    fan_slot_state *p = s->state;
    fan_list *list = s->list;
    const fan_entry entry = {.item = it, .general = true};
    if (it)
        (void)fan_list_remove(list, &entry);
    p->count--;
    /* no other contribution came meanwhile: the pass becomes what it was */
    bool alone = p->count == x->before.count && !p->poison;
    p->seen = p->summed_seen;
    for (size_t i = list->summed > 0; !alone && i < list->n; i++)
        p->seen = fan_entry_seen(p->seen, s, &list->entries[i]);
    *gone = p->count == 0 && !p->poison ? fan_slot_cut(b, s) : NULL;
    if (!*gone && alone) {
        const fan_slot_state *before = &x->before;
        if (!before->shaped) {
            fan_free(p->shape);
            p->shape = NULL;
            p->ndim = 0;
            p->shaped = false;
        }
        if (!before->device) {
            fan_device_drop(p->device);
            p->device = NULL;
        }
        if (before->how == FAN_CASE_HOST) {
            fan_stream_drop(p->consumer);
            fan_stream_drop(p->accum);
            fan_stream_drop(p->capture_origin);
            p->consumer = p->accum = p->capture_origin = NULL;
            p->how = FAN_CASE_HOST;
        }
        p->rules = before->rules;
        p->seen = before->seen;
        p->has_weak_int = before->has_weak_int;
        p->keyed = before->keyed;
    }
    if (it && it->value.form != FAN_FORM_UNDEFINED) {
        if (x->old.form == FAN_FORM_UNDEFINED) {
            x->c->value = it->value;
            it->value = (fan_value){.dtype = FAN_DT_NONE};
        } else {
            x->c->value = x->old;
            x->old = (fan_value){.dtype = FAN_DT_NONE};
        }
    }
    x->reserved = false;
    fan_slot_notify(b, x->slot);
}

void fan_add_fail(fan_buffer *b, fan_add_op *x, fan_status status, const fan_error *err)
{
    fan_slot_state *gone = NULL;
    if (!x->reserved)
        return;
    fan_slot_lock(b, x->slot);
    if (x->item && !x->item->parked)
        b->slots[x->slot].state->arriving--;
    if (status != FAN_OK)
        fan_slot_poison(&b->slots[x->slot], status, err);
    add_undo(b, x, &gone);
    fan_slot_unlock(b, x->slot);
    fan_slot_state_free(b, gone);
}

/* ---- converted, or copied, on the way into a slot (A9, A10, A12, S21) ---- */

/* One job from `in` to `out`, counted. `acc`: fan_operand's. */
static fan_status convert_job(fan_buffer *b, fan_device *d, fan_stream *on, fan_job_kind kind,
                              const char *label, const fan_array *out, const fan_array *in,
                              fan_dtype acc, fan_error *err)
{
    fan_operand operand = {in, acc};
    uint64_t bytes = (uint64_t)in->size * fan_dtype_size(in->dtype);
    bool release_gil =
        bytes >= FAN_BUSY_BYTES && !d->backend->has_streams && b->frontend->allow_threads_begin;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_interrupt_begin(&interrupt, d->backend->has_streams ? NULL : b->frontend->check_signals,
                        err);
    fan_status status = fan_device_run(
        d, on, &(fan_job){.kind = kind, .out = out, .in = &operand, .n = 1, .label = label}, err);
    status = fan_interrupt_end(&interrupt, status);
    if (release_gil)
        b->frontend->allow_threads_end(left);
    FAN_COUNT(b, copies, 1);
    FAN_COUNT(b, passes, 1);
    FAN_COUNT(b, bytes_read, bytes);
    FAN_COUNT(b, bytes_written, (uint64_t)out->size * fan_dtype_size(out->dtype));
    return status;
}

/* An array in another dtype, or copied; otherwise the same memory with a hold more. */
static fan_status convert_part(fan_buffer *b, fan_device *d, fan_stream *on, fan_array *from,
                               fan_dtype dtype, bool copies, fan_array **out, fan_error *err)
{
    if (from->dtype == dtype && !copies) {
        *out = fan_array_hold(from);
        return FAN_OK;
    }
    const char *label = from->dtype == dtype ? "copy" : "cast";
    FAN_TRY(fan_device_array(d, on, dtype, from->ndim, from->shape, from, out, err));
    return convert_job(b, d, on, FAN_JOB_COPY, label, *out, from, dtype, err);
}

/* The same entries, each number rounded to `dtype` (D6): duplicates are not added here, so that
 * their sum runs in the dtype of the slot (D12). `copies`: all memory is the buffer's own;
 * otherwise index parts stay the source's. */
static fan_status convert_sparse(fan_buffer *b, fan_device *d, fan_stream *on, const fan_sparse *v,
                                 fan_dtype dtype, bool copies, fan_sparse **out, fan_error *err)
{
    fan_array *indices = NULL;
    fan_array *pointers = NULL;
    fan_array *values = NULL;
    fan_status status = FAN_OK;
    if (FAN_FAULT(MERGED_BEFORE_CAST)) {
        fan_sparse_operand own = {v, v->values->dtype};
        return fan_device_sparse_merge(d, on, &own, 1, true, dtype, NULL, out, err);
    }
    FAN_GO(convert_part(b, d, on, v->indices, v->indices->dtype, copies, &indices, err));
    if (v->pointers)
        FAN_GO(convert_part(b, d, on, v->pointers, v->pointers->dtype, copies, &pointers, err));
    FAN_GO(convert_part(b, d, on, v->values, dtype, copies, &values, err));
    FAN_GO(fan_sparse_new(v->format, v->ndim, v->shape, indices, pointers, values, v->coalesced,
                          out, err));
    (*out)->nnz_coalesced = v->nnz_coalesced;
done:
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return status;
}

/* The kinds of conversion. *made or *out is owned by the caller, also after a failure half-way;
 * `on` orders the
 * work. */
static fan_status reduce_sparse(fan_buffer *b, const fan_slot *s, const fan_value *v,
                                const fan_conversion *to, fan_stream *on, fan_array **made,
                                fan_error *err)
{
    fan_device *d = to->device;
    fan_dtype acc = fan_dtype_accumulate(to->dtype);
    FAN_TRY(fan_device_array(d, on, acc, s->spec->ndim, s->spec->shape, NULL, made, err));
    fan_interrupt interrupt; /* what is made is thrown away then */
    fan_interrupt_begin(&interrupt, d->backend->has_streams ? NULL : b->frontend->check_signals,
                        err);
    fan_status status = fan_device_sparse_reduce(d, on, v->sparse, to->dtype, *made, err);
    status = fan_interrupt_end(&interrupt, status);
    FAN_COUNT(b, copies, 1);
    return status;
}

/* Each element rounded to the declared dtype, and then summed to the declared shape: in the
 * accumulation dtype, so that the slot's sum is rounded once more, at the end (D7). */
static fan_status reduce_dense(fan_buffer *b, const fan_slot *s, const fan_array *from,
                               const fan_conversion *to, fan_stream *on, fan_array **made,
                               fan_error *err)
{
    fan_dtype acc = fan_dtype_accumulate(to->dtype);
    FAN_TRY(fan_device_array(to->device, on, acc, s->spec->ndim, s->spec->shape, NULL, made, err));
    return convert_job(b, to->device, on, FAN_JOB_REDUCE, "reduce", *made, from, to->dtype, err);
}

/* A 0-d gradient of the host for a device; cast on the host. */
static fan_status upload_dense(fan_buffer *b, const fan_array *from, const fan_conversion *to,
                               fan_stream *on, fan_array **made, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *host = NULL;
    FAN_GO(fan_device_array(fan_cpu(), NULL, to->dtype, 0, NULL, NULL, &host, err));
    FAN_GO(convert_job(b, fan_cpu(), NULL, FAN_JOB_COPY, "cast", host, from, to->dtype, err));
    FAN_GO(fan_device_array(to->device, on, to->dtype, 0, NULL, NULL, made, err));
    status = convert_job(b, to->device, on, FAN_JOB_UPLOAD, "upload", *made, host, to->dtype, err);
done:
    fan_array_drop(host);
    return status;
}

/* The same elements in host memory, which are there when this returns. */
static fan_status download_dense(const fan_value *v, fan_stream *on, fan_array **host,
                                 fan_error *err)
{
    const fan_array *from = v->array;
    FAN_TRY(
        fan_device_array(fan_cpu(), NULL, from->dtype, from->ndim, from->shape, from, host, err));
    return v->device->backend->read(on, *host, from, err);
}

/* A dense gradient. An expanded one stays expanded (A13): its compact base is copied, cast and
 * moved, and a reduction reads it as it is. */
static fan_status convert_dense(fan_buffer *b, const fan_slot *s, const fan_value *v,
                                const fan_conversion *to, fan_stream *on, fan_array **made,
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
    const fan_array *from = compact;
    if (to->download) {
        fan_value base = *v;
        base.array = compact;
        FAN_GO(download_dense(&base, on, &near, err));
        from = near;
        on = NULL;
    }
    if (to->reduce) {
        FAN_GO(fan_array_broadcast(from, whole->ndim, whole->shape, &wide, err));
        status = reduce_dense(b, s, wide, to, on, made, err);
        goto done;
    }
    if (to->upload)
        FAN_GO(upload_dense(b, from, to, on, &converted, err));
    else
        FAN_GO(convert_part(b, to->device, on, (fan_array *)from, to->dtype, !to->download,
                            &converted, err));
    status = fan_array_broadcast(converted, whole->ndim, whole->shape, made, err);
done:
    fan_array_drop(compact);
    fan_array_drop(near);
    fan_array_drop(converted);
    fan_array_drop(wide);
    return status;
}

static fan_status add_contribution_convert(fan_buffer *b, size_t slot, const fan_contribution *c,
                                           const fan_conversion *to, fan_stream *on, fan_value *out,
                                           fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_value *v = &c->value;
    fan_status status;
    fan_array *made = NULL;
    fan_sparse *sparse = NULL;
    *out = (fan_value){.dtype = FAN_DT_NONE};
    /* donated memory is its owner's again once it is converted */
    bool copies = c->copy || c->donate;
    if (FAN_FAULT(COPY_KEEPS_INDICES))
        copies = false;
    if (v->form == FAN_FORM_SPARSE && to->reduce)
        status = reduce_sparse(b, s, v, to, on, &made, err);
    else if (v->form == FAN_FORM_SPARSE)
        status = convert_sparse(b, to->device, on, v->sparse, to->dtype, copies, &sparse, err);
    else
        status = convert_dense(b, s, v, to, on, &made, err);
    if (status != FAN_OK) {
        fan_array_drop(made);
        fan_sparse_drop(sparse);
        return status;
    }
    *out = sparse ? fan_value_sparse(sparse, to->device) : fan_value_dense(made, to->device);
    out->origin = v->origin;
    out->rank = v->rank;
    out->weak = v->weak;
    return FAN_OK;
}

/* ---- 3. carried out and parked ---- */

/* An event on `stream` for the item. */
static fan_status add_record(fan_buffer *b, size_t slot, fan_item *item, fan_stream *stream,
                             uint64_t bit, fan_error *err)
{
    fan_event_drop(item->event);
    item->event = NULL;
    if (FAN_FAULT(RECORD_AFTER_FOLD) && !item->owned)
        return fan_event_new(stream->device, &item->event, err);
    /* the slot is not locked here */
    size_t n = FAN_FAULT(EVENT_REUSED) ? fan_slot_entries(&b->slots[slot]) : 0;
    for (size_t i = 0; i < n; i++) {
        const fan_entry *one = &b->slots[slot].list->entries[i];
        fan_event *e = one->general ? one->item->event : NULL;
        if (!e || e->device != stream->device)
            continue;
        item->event = fan_event_hold(e);
        return fan_event_rerecord(e, stream, err);
    }
    return fan_order_record(b, stream, bit, &item->event, err);
}

/* The event of the contribution before it in one call, where that covers this one as well: it was
 * recorded within the call, on the same stream, and the buffer has queued nothing there since.
 * NULL: there is none. */
static fan_event *add_shared_event(const fan_add_op *x)
{
    const fan_add_op *before = x->previous;
    if (!before || !before->item || x->checked.plan.convert != FAN_CONVERT_NOT ||
        before->checked.plan.convert != FAN_CONVERT_NOT ||
        before->checked.plan.record != FAN_RECORD_PRODUCER ||
        before->checked.producer != x->checked.producer ||
        before->checked.plan.producer_bit != x->checked.plan.producer_bit)
        return NULL;
    return before->item->event;
}

/* Whether a converted sparse gradient still reads index memory of its source. */
static bool shares_indices(const fan_value *made, const fan_value *source)
{
    return made->form == FAN_FORM_SPARSE && made->sparse->indices == source->sparse->indices;
}

fan_status fan_add_carry_out(fan_buffer *b, fan_add_op *x, fan_error *err)
{
    fan_item *it = x->item;
    if (x->c->value.form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    /* it may have waited for the slot */
    FAN_TRY(fan_slot_check_unmoved(b, x->slot, &x->c->value, x->c->key, err));
    if (fan_trace_on()) {
        const fan_check_result *a = &x->checked;
        /* a stream's number means something on its own device only */
        const fan_device *d = a->producer ? a->producer->device : a->to.device;
        fan_slot_trace(b, x->slot,
                       (fan_trace_line){.kind = FAN_TRACE_ADD,
                                        .how = fan_sync_letter(a->plan.sync.how),
                                        .device = d && d->id ? (int16_t)d->index : -1,
                                        .count = 1,
                                        .key = x->c->key,
                                        .rules = a->plan.rules,
                                        .stream = a->producer ? a->producer->handle : 0,
                                        .bytes = fan_value_bytes(&x->c->value)});
    }
    const fan_add_plan *plan = &x->checked.plan;
    fan_item *item = x->item;
    fan_value made = {.dtype = FAN_DT_NONE};
    if (plan->convert != FAN_CONVERT_NOT) {
        /* S21: the item gets the stream where the converted gradient is ready. */
        fan_contribution *c = x->c;
        fan_stream *on = plan->convert == FAN_CONVERT_ACCUM ? x->accum : x->checked.producer;
        if (plan->convert == FAN_CONVERT_SOURCE) {
            on = c->stream ? fan_stream_hold(c->stream) : fan_stream_current(c->value.device);
            fan_status status =
                add_contribution_convert(b, x->slot, c, &x->checked.to, on, &made, err);
            fan_stream_drop(on);
            FAN_TRY(status);
        } else {
            if (plan->wait) {
                FAN_TRY(add_record(b, x->slot, item, x->checked.producer, plan->producer_bit, err));
                FAN_TRY(fan_order_wait(b, x->slot, on, item->event, FAN_PLAN_S21_WAIT, err));
            }
            if (plan->mark_source)
                FAN_TRY(fan_order_record_stream(&c->value, on, FAN_PLAN_S21_MARK, err));
            if (FAN_FAULT(RECORD_BEFORE_CONVERSION) && plan->record == FAN_RECORD_PRODUCER)
                FAN_TRY(add_record(b, x->slot, item, x->checked.producer, plan->producer_bit, err));
            FAN_TRY(add_contribution_convert(b, x->slot, c, &x->checked.to, on, &made, err));
        }
        if (plan->convert == FAN_CONVERT_ACCUM) {
            fan_event_drop(item->event);
            item->event = NULL;
            fan_stream_drop(item->producer);
            item->producer = fan_stream_hold(fan_order_stream(plan->ready, &x->accum, 1));
            fan_status status = plan->record == FAN_RECORD_ACCUM
                                    ? add_record(b, x->slot, item, on, FAN_PLAN_S21_RECORD, err)
                                    : FAN_OK;
            if (status != FAN_OK)
                fan_value_drop(b->frontend, &made);
            FAN_TRY(status);
        }
    }
    if (made.form != FAN_FORM_UNDEFINED) {
        x->old = item->value;
        item->value = made;
        item->owned = !shares_indices(&made, &x->old);
        item->donated = false;
    }
    if (plan->record == FAN_RECORD_PRODUCER && !item->event) {
        fan_stream *on = FAN_FAULT(RECORD_ON_CONSUMER) ? x->consumer : x->checked.producer;
        item->event = fan_event_hold(add_shared_event(x));
        if (!item->event)
            FAN_TRY(add_record(b, x->slot, item, on, plan->producer_bit, err));
    }
    if (plan->mark)
        FAN_TRY(fan_order_record_stream(&item->value, x->accum, FAN_PLAN_S9_MARK, err));
    x->bytes = fan_value_bytes(&it->value);
    x->bytes = x->bytes ? x->bytes : 1; /* an object without bytes passes a budget of 0, too */
    if (fan_get_debug() && it->value.form == FAN_FORM_DENSE && it->value.device == fan_cpu() &&
        !it->owned) {
        FAN_TRY(fan_slot_hash(b, it->value.array, true, &it->hash, err));
        it->hashed = true;
    }
    return FAN_OK;
}

void fan_add_park(fan_buffer *b, fan_add_op *x)
{
    fan_item *it = x->item;
    if (!it || x->parked)
        return;
    x->parked = true;
    b->slots[x->slot].state->arriving--;
    x->c->value = (fan_value){.dtype = FAN_DT_NONE};
    it->bytes = x->bytes;
    it->parked = true;
    if (fan_sched_active())
        fan_buffer_weigh(b, x->bytes);
    it->alone = b->budget == FAN_BUDGET_AUTO && it->value.form == FAN_FORM_DENSE && !x->accum &&
                (it->owned || x->c->alone);
    if (it->alone)
        atomic_fetch_add_explicit(&b->alone, it->bytes, memory_order_relaxed);
    fan_count_parked(b, x->bytes);
    fan_slot_notify(b, x->slot);
}

void fan_add_unpark(fan_buffer *b, fan_add_op *x)
{
    if (!x->parked)
        return;
    fan_item_unpark(b, x->item);
    x->parked = x->item->parked = false;
    b->slots[x->slot].state->arriving++;
}

void fan_add_end(fan_buffer *b, fan_add_op *x)
{
    if (x->reserved)
        FAN_COUNT(b, adds, 1);
    if (x->reserved && b->sum_stats) {
        fan_slot_lock(b, x->slot);
        fan_sum_stats last = fan_sum_stats_forget(b, x->slot);
        fan_slot_unlock(b, x->slot);
        fan_sum_stats_drop(&last);
    }
    if (!x->reserved)
        fan_item_free(b, x->item);
    if (x->c->donate)
        fan_value_returned(&x->old); /* the slot keeps its conversion */
    fan_value_drop(b->frontend, &x->old);
    fan_stream_drop(x->accum);
    fan_stream_drop(x->consumer);
    fan_stream_drop(x->producer);
    fan_stream_drop(x->streams.current);
    fan_stream_drop(x->streams.consumer);
}

fan_status fan_add_warn(fan_buffer *b, const fan_add_op *x, size_t n, fan_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (!x[i].mismatch)
            continue;
        FAN_COUNT(b, mismatches, 1);
        if (b->frontend->mismatch && fan_warn_mismatch_now())
            FAN_TRY(b->frontend->mismatch(b->name, x[i].slot, x[i].producer, x[i].consumer, err));
    }
    return FAN_OK;
}

/* ---- one contribution ---- */

/* Locked: folds if that is due. *gone is for fan_slot_state_free. */
static fan_status add_fold(fan_buffer *b, fan_add_op *x, fan_slot_state **gone, fan_error *err)
{
    fan_slot *s = &b->slots[x->slot];
    fan_item *it = x->item;
    fan_event *recorded_again =
        FAN_FAULT(RECORD_AFTER_FOLD) && it->event ? fan_event_hold(it->event) : NULL;
    fan_status status = fan_slot_fold_while_due(b, x->slot, err);
    if (recorded_again)
        (void)fan_event_rerecord(recorded_again, x->checked.producer, err);
    fan_event_drop(recorded_again);
    if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
        return FAN_OK; /* it is parked; the sum is tried again later */
    if (status == FAN_OK || fan_status_poisons(status))
        return status;
    /* A callback raised: the add did not happen, if its contribution is still there to be taken
     * back. */
    bool there = false;
    for (size_t i = 0; i < s->list->n; i++)
        there = there ||
                fan_entry_same(&s->list->entries[i], &(fan_entry){.item = it, .general = true});
    if (there && !s->busy) {
        fan_item_unpark(b, it);
        add_undo(b, x, gone);
    }
    return status;
}

fan_status fan_buffer_add(fan_buffer *b, size_t slot, fan_contribution *c, fan_error *err)
{
    fan_add_op x = {.slot = slot, .c = c, .old = {.dtype = FAN_DT_NONE}};
    fan_slot_state *gone = NULL;
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_status status = fan_add_reserve(b, &x, err);
    if (status == FAN_OK) {
        status = fan_add_carry_out(b, &x, err);
        if (status != FAN_OK)
            fan_add_fail(b, &x, status, err);
    }
    if (status == FAN_OK && x.item) {
        bool defined = c->value.form != FAN_FORM_UNDEFINED;
        fan_slot_lock(b, slot);
        fan_add_park(b, &x);
        status = defined ? add_fold(b, &x, &gone, err) : FAN_OK;
        fan_slot_unlock(b, slot);
        fan_slot_state_free(b, gone);
    }
    if (status == FAN_OK)
        status = fan_add_warn(b, &x, 1, err);
    fan_add_end(b, &x);
    return status;
}

/* ---- a plain contribution (plain.h): without a lock, a value or an item ---- */

static void add_plain_count_peak(fan_buffer *b, uint64_t now)
{
    if (now > b->plain.peak_parked_bytes)
        b->plain.peak_parked_bytes = now;
    if (now > b->total->peak_parked_bytes)
        b->total->peak_parked_bytes = now;
}

/* Whether the first gradient of a slot is as declared (A9, A10, A12), and of a dtype that is summed
 * here. It may be large while it is alone. */
static bool add_plain_fits(const fan_slot_spec *spec, const fan_plain_kind *k)
{
    return !spec->exact && fan_slot_takes(spec, k->dtype, k->ndim, k->shape) &&
           fan_sum_flat_fits(k->dtype, fan_accum_dtype(k->dtype, spec->accumulate));
}

static inline __attribute__((always_inline)) bool add_plain_park(fan_buffer *b, size_t slot,
                                                                 const fan_plain_kind *kind,
                                                                 const fan_entry *one)
{
    fan_slot *s = &b->slots[slot];
    if (s->state != &fan_slot_state_none || s->busy || fan_plain_stats_on_device(b, slot))
        return false;
    fan_list *p = fan_slot_list(s);
    if (!p || (p->n && (p->entries[0].key < 0) != (one->key < 0)))
        return false;
    if (kind && !fan_list_defined(p)) {
        if (!add_plain_fits(s->spec, kind))
            return false;
        p->kind = *kind;
        p->size = fan_plain_bytes(kind);
        p->bytes = p->size ? p->size : 1;
    } else if (kind && (fan_plain_is_large(p->size) || !fan_plain_same(&p->kind, kind))) {
        return false;
    }
    if (fan_slot_missing(s, 1) <= 0)
        return false;
    return fan_list_insert(p, one);
}

/* add_plain_count: true: the budget is to be checked; `due`: it is anyway. */
static inline __attribute__((always_inline)) bool add_plain_count(fan_buffer *b, size_t slot,
                                                                  const fan_plain_kind *kind,
                                                                  bool copied, bool due)
{
    FAN_PLAIN_COUNT(b, adds, 1);
    if (!kind)
        return false;
    if (copied) { /* a copy that was made for the buffer is counted as one of its own */
        uint64_t size = fan_plain_bytes(kind);
        FAN_PLAIN_COUNT(b, copies, 1);
        FAN_PLAIN_COUNT(b, passes, 1);
        FAN_PLAIN_COUNT(b, bytes_read, size);
        FAN_PLAIN_COUNT(b, bytes_written, size);
    }
    const fan_list *p = b->slots[slot].list;
    if (fan_sched_active())
        fan_buffer_weigh(b, p->bytes);
    uint64_t now = atomic_fetch_add_explicit(&b->parked, p->bytes, memory_order_relaxed) + p->bytes;
    add_plain_count_peak(b, now);
    return now > b->fold_threshold && (due || fan_list_begins(p));
}

typedef struct add_plain_op {
    fan_list *list; /* whose first entry is the sum .. */
    fan_dtype acc;  /* .. in this dtype */
    void *object;   /* whose memory the sum is; NULL: the buffer's own */
    char *sum;
    const char *data;
    size_t count; /* elements */
    int64_t key;
    fan_dtype dtype;
} add_plain_op;

/* add_plain_takes: whether one more of this kind is added straight into the sum, which is the first
 * of the slot's list, with nothing behind it (A6): it is complete up to `key`. With an automatic
 * budget they wait until some can be summed together. */
static bool add_plain_takes(const fan_buffer *b, size_t slot, const fan_plain_kind *k,
                            const char *data, int64_t key)
{
    const fan_slot *s = &b->slots[slot];
    const fan_list *p = s->list;
    const fan_entry *first = &p->entries[0];
    if (b->budget == FAN_BUDGET_AUTO || s->state != &fan_slot_state_none || s->busy || s->targets ||
        p->n != 1 || k->scalar || !fan_plain_same(&p->kind, k) || (first->key < 0) != (key < 0) ||
        (key >= 0 && (uint64_t)key != (uint64_t)first->key + 1) || fan_slot_missing(s, 1) <= 0)
        return false;
    return !fan_flats_meet(first->data, p->bytes, data, p->bytes) &&
           fan_plain_is_flat(p->size, 2) &&
           fan_plain_may_write(b, slot, 1, fan_plain_accum(b, slot)) == FAN_REUSE_YES;
}

static bool add_plain_can(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                          const char *data, int64_t key, add_plain_op *out)
{
    const fan_slot *s = &b->slots[slot];
    if (b->sum_stats || !fan_plain_has_sum(s) ||
        atomic_load_explicit(&b->parked, memory_order_relaxed) + fan_plain_kind_bytes(kind) <=
            b->budget ||
        !add_plain_takes(b, slot, kind, data, key))
        return false;
    const fan_entry *first = &s->list->entries[0];
    *out = (add_plain_op){s->list,
                          first->wide ? fan_plain_accum(b, slot) : kind->dtype,
                          first->owned ? NULL : first->object,
                          first->data,
                          data,
                          fan_plain_elements(kind),
                          key,
                          kind->dtype};
    return true;
}

/* add_plain_unchanged: the gradient is what it was, and so is a sum that was donated (NULL: it is
 * the buffer's own). */
static bool add_plain_unchanged(const fan_buffer *b, const fan_plain_kind *kind,
                                const fan_entry *one, const add_plain_op *to)
{
    return (!kind->check_at_use || fan_plain_unchanged(b, one->object, kind, one->data)) &&
           (!to->object || (fan_plain_unchanged(b, to->object, kind, to->sum) &&
                            b->frontend->plain->writable(to->object, kind)));
}

/* add_plain_begin: whether `one` is to be added into the slot's sum at once. Calls the library
 * first, which may run arbitrary code, and then checks all again. */
static bool add_plain_begin(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                            const fan_entry *one, add_plain_op *to)
{
    const fan_plain_frontend *plain = b->frontend->plain;
    FAN_UNINITIALIZED add_plain_op then;
    if (one->owned || !add_plain_can(b, slot, kind, one->data, one->key, to))
        return false;
    if (!kind->check_at_use)
        return add_plain_unchanged(b, kind, one, to);
    const fan_entry first = to->list->entries[0];
    void *sum = to->object;
    /* It was checked when the second contribution came, and has had no other reference since. */
    bool checked = sum && to->list->summed > 1 && plain->nobody_else_has(sum);
    if (sum)
        plain->hold(sum);
    bool good =
        fan_plain_has_value(b, one, false) && (checked || fan_plain_has_value(b, &first, true));
    good = good && add_plain_can(b, slot, kind, one->data, one->key, &then) &&
           then.sum == to->sum && then.object == sum && add_plain_unchanged(b, kind, one, &then);
    if (good)
        *to = then;
    if (sum)
        b->frontend->drop(sum);
    return good;
}

static void add_plain_sum(fan_buffer *b, const add_plain_op *one)
{
    uint64_t bytes = (uint64_t)one->count * fan_dtype_size(one->dtype),
             now = atomic_load_explicit(&b->parked, memory_order_relaxed) + (bytes ? bytes : 1);
    if (fan_sched_active())
        fan_buffer_weigh(b, bytes);
    fan_entry *sum = &one->list->entries[0];
    bool wide = sum->wide;
    if (wide)
        (void)fan_sum_flat_from(one->sum, one->sum, &one->data, 1, one->count, one->dtype, one->acc,
                                NULL, true);
    else
        (void)fan_sum_flat(one->sum, (const char *const[]){one->sum, one->data}, 2, one->count,
                           one->dtype, one->acc, NULL);
    one->list->summed++;
    one->list->rules |= fan_plan_plain_fold(true);
    *sum = fan_entry_of(sum->object, sum->data, one->key, false, sum->owned);
    sum->wide = wide;
    FAN_PLAIN_COUNT(b, adds, 1);
    FAN_PLAIN_COUNT(b, folds, 1);
    FAN_PLAIN_COUNT(b, passes, 1);
    FAN_PLAIN_COUNT(b, in_place, 1);
    FAN_PLAIN_COUNT(b, bytes_read, bytes + fan_plain_sum_size(one->list, wide));
    FAN_PLAIN_COUNT(b, bytes_written, fan_plain_sum_size(one->list, wide));
    add_plain_count_peak(b, now);
}

static bool add_plain_into_sum(fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                               const fan_entry *one)
{
    FAN_UNINITIALIZED add_plain_op op;
    if (!add_plain_begin(b, slot, kind, one, &op))
        return false;
    add_plain_sum(b, &op);
    return true;
}

fan_status fan_plain_add(fan_buffer *b, size_t slot, const fan_plain_kind *kind, fan_entry *one,
                         bool *added, fan_error *err)
{
    assert(slot < b->nslots);
    *added = false;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return FAN_OK;
    if (kind && fan_plain_has_sum(&b->slots[slot]) && add_plain_into_sum(b, slot, kind, one)) {
        *added = true; /* the buffer keeps no reference, so needs no copy */
        return FAN_OK;
    }
    void *copy = NULL;
    if (one->copy && kind) {
        if (kind->scalar || fan_plain_pitch(kind) ||
            !fan_plain_fits(kind->dtype, kind->dtype, fan_plain_bytes(kind)) ||
            !(copy = b->frontend->plain->copy(one->object, kind, &one->data)))
            return FAN_OK;
        one->object = copy;
        one->owned = one->alone = true;
    }
    /* To copy may have called the array library, which may run arbitrary code. */
    *added = (!copy || (fan_plain_allowed() && fan_buffer_is_usable(b))) &&
             add_plain_park(b, slot, kind, one);
    if (*added && kind)
        b->frontend->plain->hold(one->object);
    if (copy)
        b->frontend->drop(copy);
    if (!*added)
        return FAN_OK;
    if (b->sum_stats)
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    if (!add_plain_count(b, slot, kind, one->owned, false))
        return FAN_OK;
    fan_sched_stepped();
    return fan_plain_fold_due(b, slot, one->object, one->alone, err);
}

/* ---- many plain contributions ---- */

#define ADD_AHEAD 8

void fan_plain_prefetch(const fan_buffer *b, size_t slot)
{
    if (slot >= b->nslots)
        return;
    const fan_slot *s = &b->slots[slot];
    const char *p = (const char *)s->list;
    for (size_t at = 0; p && at < 192; at += 64)
        __builtin_prefetch(p + at, 1);
}

/* add_plain_read: the k-th of a batch; false: it is not a plain one. */
static bool add_plain_read(const fan_buffer *b, const fan_plain_batch *batch, size_t k,
                           size_t *slot, fan_plain_kind *kind, fan_entry *one)
{
    return batch->read(batch->ctx, k, slot, kind, one) && *slot < b->nslots;
}

/* add_plain_sum_all: true: all went straight into their sums; false: one is not for that, and
 * nothing happened. */
static bool add_plain_sum_all(fan_buffer *b, const fan_plain_batch *batch)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    FAN_UNINITIALIZED add_plain_op next;
    fan_entry one;
    add_plain_op *all = NULL; /* made once there is one */
    size_t k = 0, slot, last = 0;
    for (; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        /* Ascending: each slot occurs once, so each check still holds when its sum is written. */
        if (!add_plain_read(b, batch, k, &slot, &kind, &one) || !one.object || kind.check_at_use ||
            (k && slot <= last) || !add_plain_can(b, slot, &kind, one.data, one.key, &next) ||
            next.object || (!all && !(all = fan_alloc(batch->n * sizeof *all))))
            break;
        all[k] = next;
        last = slot;
    }
    bool good = all && k == batch->n;
    for (k = 0; good && k < batch->n; k++) {
        if (k + ADD_AHEAD < batch->n) {
            __builtin_prefetch(all[k + ADD_AHEAD].list, 1);
            __builtin_prefetch(all[k + ADD_AHEAD].sum, 1);
            __builtin_prefetch(all[k + ADD_AHEAD].data);
        }
        add_plain_sum(b, &all[k]);
    }
    fan_free(all);
    return good;
}

/* add_plain_take_back: the first n of a batch, which were parked, the last one first. */
static void add_plain_take_back(fan_buffer *b, const fan_plain_batch *batch, size_t n)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    size_t slot;
    while (n-- > 0) {
        (void)add_plain_read(b, batch, n, &slot, &kind, &one);
        fan_list *p = b->slots[slot].list;
        (void)fan_list_remove(p, &one);
        if (one.object) {
            fan_list_unpark(b, p, 1);
            b->frontend->drop(one.object);
        }
        b->plain.adds--;
        b->total->adds--;
    }
}

fan_status fan_plain_add_many(fan_buffer *b, const fan_plain_batch *batch, bool *added,
                              fan_error *err)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    size_t k = 0, slot;
    bool due = false;
    *added = fan_plain_allowed() && fan_buffer_is_usable(b);
    if (!*added || (batch->n && add_plain_sum_all(b, batch)))
        return FAN_OK;
    uint64_t peak = b->plain.peak_parked_bytes, total_peak = b->total->peak_parked_bytes;
    for (; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        if (!add_plain_read(b, batch, k, &slot, &kind, &one) ||
            !add_plain_park(b, slot, one.object ? &kind : NULL, &one))
            break;
        if (one.object)
            b->frontend->plain->hold(one.object);
        due |= add_plain_count(b, slot, one.object ? &kind : NULL, false, due);
    }
    *added = k == batch->n;
    if (!*added) {
        add_plain_take_back(b, batch, k);
        b->plain.peak_parked_bytes = peak;
        b->total->peak_parked_bytes = total_peak;
        return FAN_OK;
    }
    /* last of all: of what was taken back all is known still */
    for (k = 0; b->sum_stats && k < batch->n; k++) {
        (void)batch->again(batch->ctx, k, &slot);
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    }
    if (due)
        fan_sched_stepped();
    for (k = 0; k < batch->n && due; k++) {
        const void *object = batch->again(batch->ctx, k, &slot);
        if (object)
            FAN_TRY(fan_plain_fold_due(b, slot, object, false, err));
    }
    return FAN_OK;
}
