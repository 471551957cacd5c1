/* target: an array that the producer itself adds into (buffer.h). */
#include "base/mem.h"
#include "buffer/add.h"
#include "buffer/fold.h"
#include "buffer/slot.h"
#include "buffer/order.h"
#include "buffer/stats.h"

#include <stdio.h>
#include <string.h>

/* Locked: the facts of the slot for the plan. */
static fan_target_facts target_facts(fan_buffer *b, size_t slot, int64_t key, const fan_stream *P)
{
    const fan_slot *s = &b->slots[slot];
    const fan_slot_state *p = s->state;
    const fan_entry *first = fan_slot_sum(s);
    const fan_item *it = first && first->general ? first->item : NULL;
    bool own = it && it->value.form == FAN_FORM_DENSE && it->owned;
    /* A running sum that earlier targets have seen is lent again (D34), one that was donated is
     * not. */
    fan_term term = {
        .v = own ? &it->value : NULL, .producer = own ? it->producer : NULL, .owned = own};
    term.exposed = own && it->shown;
    fan_fold sum = {.b = b, .slot = slot, .terms = &term, .n = 1, .seen = p->summed_seen};
    return (fan_target_facts){.idle = !s->busy && !fan_slot_waiting(s) && !p->arriving,
                              .reuse = own ? fan_term_may_write(&sum, 0, FAN_WRITER_TARGET)
                                           : FAN_REUSE_HELD,
                              .complete = key < 0 || (uint64_t)key == p->next_key,
                              .producer = fan_stream_id_of(P),
                              .accum = fan_stream_id_of(p->accum),
                              .ready = fan_stream_id_of(it ? it->producer : NULL)};
}

/* Locked. */
static void target_forget(fan_slot *s, const fan_target *t)
{
    fan_target **at = &s->targets;
    while (*at && *at != t)
        at = &(*at)->next;
    if (*at)
        *at = t->next;
}

/* Locked: checks the target like the contribution that it will become, begins it, and lends the
 * running sum if the plan is so. */
static fan_status target_begin(fan_buffer *b, const fan_contribution *c, fan_stream *current,
                               fan_target *t, fan_error *err)
{
    fan_slot *s = &b->slots[t->slot];
    fan_check_result checked;
    FAN_TRY(fan_slot_enter(b, t->slot, "target", err));
    FAN_TRY(fan_check_contribution(b, t->slot, c, current, b->stream, &checked, err));
    t->producer = fan_stream_hold(checked.producer);
    t->device = fan_device_hold(c->value.device);
    if (t->producer == s->state->accum)
        FAN_TRY(fan_slot_promote(b, t->slot, err));
    fan_target_facts facts = target_facts(b, t->slot, t->key, t->producer);
    fan_target_plan plan = fan_plan_target(&facts);
    t->direct = plan.direct;
    t->thread = fan_thread_id();
    t->next = s->targets;
    s->targets = t;
    if (plan.direct) {
        /* The contribution counts from now on (A16), although nothing is in it yet. */
        fan_slot_state *p = s->state;
        t->sum = fan_slot_sum(s)->item;
        t->array = fan_array_hold(t->sum->value.array);
        fan_slot_make_busy(s);
        p->count++;
        p->arriving++;
        p->keyed = t->key >= 0 ? 1 : -1;
        p->next_key = t->key >= 0 ? (uint64_t)t->key + 1 : p->next_key;
        t->sum->key = t->key;
    }
    return FAN_OK;
}

/* A hold: the device that the target will be on. */
static fan_device *target_device(fan_buffer *b, size_t slot, const fan_stream *stream)
{
    const fan_slot *s = &b->slots[slot];
    if (s->spec->device || stream)
        return fan_device_hold(s->spec->device ? s->spec->device : stream->device);
    fan_slot_lock(b, slot);
    fan_device *d = fan_device_hold(s->state->device ? s->state->device : fan_cpu());
    fan_slot_unlock(b, slot);
    return d;
}

fan_status fan_buffer_target(fan_buffer *b, size_t slot, int64_t key, fan_stream *stream,
                             fan_target *t, fan_error *err)
{
    int64_t strides[FAN_MAX_NDIM] = {0};
    memset(t, 0, sizeof *t);
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot *s = &b->slots[slot];
    const fan_slot_spec *spec = s->spec;
    if (!spec->has_shape || spec->dtype == FAN_DT_NONE)
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, -1),
                           "target() needs a slot that declares its shape and dtype: give "
                           "fanin.Slot(shape=, dtype=)");
    fan_dtype acc = fan_accum_dtype(spec->dtype, spec->accumulate);
    fan_device *d = target_device(b, slot, stream);
    fan_array like = {.dtype = acc,
                      .ndim = spec->ndim,
                      .size = 1,
                      .shape = (int64_t *)spec->shape,
                      .strides = strides};
    fan_contribution c = {
        .key = key,
        .stream = stream,
        .summed = true,
        .value = {.form = FAN_FORM_DENSE, .dtype = acc, .device = d, .array = &like}};
    fan_stream *current = fan_current_for(b, slot, &c);
    t->slot = slot;
    t->key = key;
    fan_slot_lock(b, slot);
    fan_status status = target_begin(b, &c, current, t, err);
    fan_slot_unlock(b, slot);
    if (status == FAN_OK && t->direct) { /* memory for the statistics of the lent sum */
        if (b->sum_stats && !s->state->sum_stats.valid)
            status = fan_slot_measure(b, slot, t->array, t->device, s->state->like_key, err);
        if (status != FAN_OK) {
            fan_slot_poison(s, status, err);
            fan_buffer_target_cancel(b, t);
        }
    } else if (status == FAN_OK) { /* scratch of its own */
        status = fan_device_array(t->device, t->producer, acc, spec->ndim, spec->shape, NULL,
                                  &t->array, err);
        if (status == FAN_OK)
            status = fan_device_run(
                t->device, t->producer,
                &(fan_job){.kind = FAN_JOB_ZERO, .out = t->array, .label = "target"}, err);
        if (status != FAN_OK) {
            fan_array_drop(t->array);
            t->array = NULL;
        }
    }
    if (status != FAN_OK) {
        fan_slot_lock(b, slot);
        target_forget(s, t);
        fan_slot_unlock(b, slot);
        fan_stream_drop(t->producer);
        fan_device_drop(t->device);
        memset(t, 0, sizeof *t);
    }
    fan_stream_drop(current);
    fan_device_drop(d);
    return status;
}

fan_status fan_buffer_target_end(fan_buffer *b, fan_target *t, bool good, uint8_t origin,
                                 fan_error *err)
{
    fan_status status = FAN_OK;
    if (!t->direct) {
        fan_slot_lock(b, t->slot);
        target_forget(&b->slots[t->slot], t);
        fan_slot_unlock(b, t->slot);
    }
    if (t->direct) {
        /* The lent running sum comes back: it has one contribution more (S15). */
        fan_slot *s = &b->slots[t->slot];
        fan_slot_state *p = s->state;
        fan_event *e = NULL, *old = NULL;
        fan_sum_stats last = {.valid = false};
        status = good ? fan_slot_measure(b, t->slot, t->array, t->device, t->key, err) : FAN_OK;
        uint64_t rules = 0;
        bool unknown = status != FAN_OK;
        if (good && !unknown && p->accum) {
            fan_sync_fold plan =
                fan_sync_fold_plan((fan_sync_slot){.consumer = fan_stream_id_of(p->consumer),
                                                   .accum = fan_stream_id_of(p->accum),
                                                   .ready = fan_stream_id_of(t->sum->producer),
                                                   .has_event = t->sum->event != NULL});
            rules = plan.rules;
            if (plan.slot.has_event)
                status = fan_order_record(b, p->accum, FAN_PLAN_S15_RECORD, &e, err);
            if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
                status = FAN_OK; /* S18 records then */
        }
        fan_slot_lock(b, t->slot);
        target_forget(s, t);
        p->rules |= rules;
        p->arriving--;
        fan_slot_poison(s, status, err);
        if (!good || unknown) {
            p->poison = p->poison ? p->poison : fan_calloc(sizeof *p->poison);
            if (p->poison && !p->poison->text[0])
                snprintf(
                    p->poison->text, sizeof p->poison->text,
                    unknown
                        ? "the statistics of the running sum were lost when target() gave it back"
                        : "the body of target() failed while it had the running sum");
        }
        if (good) {
            old = t->sum->event;
            t->sum->event = e;
            t->sum->exposed = true;
            s->list->summed++;
            if (b->sum_stats)
                last = fan_sum_stats_forget(b, t->slot);
            FAN_COUNT(b, adds, 1);
            FAN_COUNT(b, in_place, 1);
        }
        fan_slot_let_go(b, t->slot);
        fan_slot_unlock(b, t->slot);
        fan_sum_stats_drop(&last);
        fan_event_drop(old);
    } else if (good) {
        fan_contribution c = {.key = t->key,
                              .stream = t->producer,
                              .summed = true,
                              .value = fan_value_dense(fan_array_hold(t->array), t->device)};
        c.value.origin = origin;
        status = fan_buffer_add(b, t->slot, &c, err);
        fan_value_drop(b->frontend, &c.value);
    }
    fan_array_drop(t->array);
    fan_stream_drop(t->producer);
    fan_device_drop(t->device);
    memset(t, 0, sizeof *t);
    return status;
}

void fan_buffer_target_cancel(fan_buffer *b, fan_target *t)
{
    fan_slot_lock(b, t->slot);
    target_forget(&b->slots[t->slot], t);
    if (t->direct) {
        fan_slot_state *p = b->slots[t->slot].state;
        p->count--;
        p->arriving--;
        p->next_key = t->key >= 0 ? (uint64_t)t->key : p->next_key;
        t->sum->key = t->key >= 0 ? t->key - 1 : t->key;
        fan_slot_let_go(b, t->slot);
    }
    fan_slot_unlock(b, t->slot);
    fan_array_drop(t->array);
    fan_stream_drop(t->producer);
    fan_device_drop(t->device);
    memset(t, 0, sizeof *t);
}
