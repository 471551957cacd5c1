/* target: an array that the producer itself adds into (buffer.h). */
#include "base/mem.h"
#include "buffer/add.h"
#include "buffer/fold.h"
#include "buffer/slot.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <stdio.h>
#include <string.h>

/* Locked: the facts of the slot for the plan. */
static fan_target_facts target_facts(fan_buffer *b, size_t slot, int64_t key, const fan_stream *P)
{
    const fan_slot *s = &b->slots[slot];
    const fan_slot_state *state = s->state;
    const fan_entry *first = fan_slot_sum(s);
    const fan_item *item = NULL;
    if (first && first->general)
        item = first->item;
    bool adds = fan_slot_waiting(s) || state->arriving;
    fan_target_facts facts = {.idle = !s->busy && !adds,
                              .reuse = FAN_REUSE_HELD,
                              .complete = fan_key_is_next(state->next_key, key),
                              .producer = fan_stream_id_of(P),
                              .accum = fan_stream_id_of(state->accum)};
    if (!item)
        return facts;
    facts.ready = fan_stream_id_of(item->producer);
    if (item->value.form != FAN_FORM_DENSE || (!item->owned && !item->donated))
        return facts;
    if (fan_weight_multiplies(&item->weight)) /* what is added to it would be multiplied, too */
        return facts;
    /* A running sum that earlier targets were lent is lent again (D34). */
    fan_term term = {.v = &item->value,
                     .producer = item->producer,
                     .owned = item->owned,
                     .donated = item->donated,
                     .exposed = item->shown};
    fan_fold sum = {
        .b = b,
        .slot = slot,
        .terms = &term,
        .n = 1,
        .seen = state->summed_seen,
    };
    facts.reuse = fan_term_may_write(&sum, 0, FAN_WRITER_TARGET);
    return facts;
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

/* Locked. Cannot fail: lends the running sum. The contribution counts from now on (A16), although
 * nothing is in it yet. */
static void target_lend(fan_slot *s, fan_target *t)
{
    fan_slot_state *state = s->state;
    t->sum = fan_slot_sum(s)->item;
    t->array = fan_array_hold(t->sum->value.array);
    fan_slot_make_busy(s);
    state->count++;
    state->arriving++;
    state->keyed = -1;
    if (t->key >= 0) {
        state->keyed = 1;
        state->next_key = (uint64_t)t->key + 1;
    }
    t->sum->key = t->key;
}

/* Locked: checks the target like the contribution that it will become, begins it, and lends the
 * running sum if the plan is so. */
static fan_status target_begin(fan_buffer *b, const fan_contribution *c, fan_stream *current,
                               fan_target *t, fan_error *err)
{
    fan_slot *s = &b->slots[t->slot];
    fan_check_result checked;
    FAN_TRY(fan_slot_enter(b, t->slot, "target", err));
    const fan_add_streams with = {.current = current, .consumer = b->stream};
    FAN_TRY(fan_check_contribution(b, t->slot, c, &with, &checked, err));
    t->producer = fan_stream_hold(checked.producer);
    t->device = fan_device_hold(c->value.device);
    if (t->producer == s->state->accum)
        FAN_TRY(fan_slot_promote(b, t->slot, err));
    fan_target_facts facts = target_facts(b, t->slot, t->key, t->producer);
    t->direct = fan_plan_target(&facts).direct && !t->weight.on;
    t->thread = fan_thread_id();
    t->next = s->targets;
    s->targets = t;
    if (t->direct)
        target_lend(s, t);
    return FAN_OK;
}

/* A hold: the device that the target will be on. */
static fan_device *target_device(fan_buffer *b, size_t slot, const fan_stream *stream)
{
    const fan_slot *s = &b->slots[slot];
    if (s->spec->device)
        return fan_device_hold(s->spec->device);
    if (stream)
        return fan_device_hold(stream->device);
    fan_slot_lock(b, slot);
    fan_device *d = fan_device_hold(s->state->device ? s->state->device : fan_cpu());
    fan_slot_unlock(b, slot);
    return d;
}

/* It is done with. */
static void target_fini(fan_target *t)
{
    fan_array_drop(t->array);
    fan_stream_drop(t->producer);
    fan_device_drop(t->device);
    memset(t, 0, sizeof *t);
}

/* Scratch of its own: zeros. */
static fan_status target_scratch(const fan_slot_spec *spec, fan_dtype acc, fan_target *t,
                                 fan_error *err)
{
    FAN_TRY(fan_device_array(t->device, t->producer, acc, spec->ndim, spec->shape, NULL, &t->array,
                             err));
    fan_job job = {.kind = FAN_JOB_ZERO, .out = t->array, .label = "target"};
    return fan_device_run(t->device, t->producer, &job, err);
}

/* Fills in a target that has begun. If this fails, the target has ended. */
static fan_status target_fill(fan_buffer *b, fan_dtype acc, fan_target *t, fan_error *err)
{
    fan_slot *s = &b->slots[t->slot];
    fan_status status = FAN_OK;
    if (t->direct) { /* memory for the statistics of the lent sum */
        const fan_slot_state *state = s->state;
        if (b->sum_stats && !state->sum_stats.valid)
            status = fan_slot_measure(b, t->slot, t->array, t->device, state->like_key, err);
        if (status != FAN_OK)
            fan_slot_poison(s, status, err);
    } else {
        status = target_scratch(s->spec, acc, t, err);
    }
    if (status != FAN_OK)
        fan_buffer_target_cancel(b, t);
    return status;
}

fan_status fan_buffer_target(fan_buffer *b, size_t slot, int64_t key, fan_stream *stream,
                             fan_dtype undeclared, const fan_weight *weight, fan_target *t,
                             fan_error *err)
{
    int64_t strides[FAN_MAX_NDIM] = {0};
    memset(t, 0, sizeof *t);
    FAN_TRY(fan_slot_check(b, slot, err));
    const fan_slot_spec *spec = b->slots[slot].spec;
    fan_dtype acc = undeclared;
    if (spec->dtype != FAN_DT_NONE)
        acc = fan_accum_dtype(spec->dtype, spec->accumulate);
    if (!spec->has_shape || acc == FAN_DT_NONE) {
        return fan_fail_value(err, fan_slot_place(b, slot, -1),
                              "target() needs a slot that declares its shape and dtype: give "
                              "fanin.Slot(shape=, dtype=)");
    }
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
        .value = fan_value_dense(&like, d),
    };
    fan_stream *current = fan_current_for(b, slot, &c);
    t->slot = slot;
    t->key = key;
    if (weight)
        t->weight = *weight;
    c.weight = t->weight;
    fan_slot_lock(b, slot);
    fan_status status = target_begin(b, &c, current, t, err);
    fan_slot_unlock(b, slot);
    if (status == FAN_OK)
        status = target_fill(b, acc, t, err);
    else
        target_fini(t);
    fan_stream_drop(current);
    fan_device_drop(d);
    return status;
}

/* S15 to S17: what orders others after the lent sum, which has one contribution more. *event: on A,
 * or none. Returns a failure of the device. */
static fan_status target_record(fan_buffer *b, const fan_target *t, fan_event **event,
                                uint64_t *rules, fan_error *err)
{
    const fan_slot_state *state = b->slots[t->slot].state;
    const fan_item *sum = t->sum;
    fan_sync_slot slot = fan_slot_streams(state);
    slot.ready = fan_stream_id_of(sum->producer);
    slot.has_event = sum->event != NULL;
    fan_sync_fold plan = fan_sync_fold_plan(slot);
    *rules = plan.rules;
    if (!plan.slot.has_event)
        return FAN_OK;
    fan_status status = fan_order_record(b, state->accum, FAN_PLAN_S15_RECORD, event, err);
    if (fan_status_is_memory(status))
        return FAN_OK; /* S18 records then */
    return status;
}

/* Locked: the value of the running sum is unknown. */
static void target_poison(fan_slot_state *state, const char *why)
{
    if (!state->poison)
        state->poison = fan_calloc(sizeof *state->poison);
    fan_error *poison = state->poison;
    if (poison && !poison->text[0])
        snprintf(poison->text, sizeof poison->text, "%s", why);
}

/* The lent running sum comes back. */
static fan_status target_end_direct(fan_buffer *b, fan_target *t, bool good, fan_error *err)
{
    fan_slot *s = &b->slots[t->slot];
    fan_slot_state *state = s->state;
    fan_event *event = NULL;
    fan_event *old = NULL;
    fan_sum_stats last = {.valid = false};
    fan_status status = FAN_OK;
    uint64_t rules = 0;
    if (good)
        status = fan_slot_measure(b, t->slot, t->array, t->device, t->key, err);
    bool unknown = status != FAN_OK;
    if (good && !unknown && state->accum)
        status = target_record(b, t, &event, &rules, err);
    fan_slot_lock(b, t->slot);
    target_forget(s, t);
    state->rules |= rules;
    state->arriving--;
    fan_slot_poison(s, status, err);
    if (unknown) {
        target_poison(state, "the statistics of the running sum were lost when target() gave it "
                             "back");
    }
    if (good) {
        old = t->sum->event;
        t->sum->event = event;
        t->sum->exposed = true;
        s->list->summed++;
        if (b->sum_stats)
            last = fan_sum_stats_forget(b, t->slot);
        FAN_COUNT(b, adds, 1);
        FAN_COUNT(b, in_place, 1);
    } else {
        target_poison(state, "the body of target() failed while it had the running sum");
    }
    fan_slot_let_go(b, t->slot);
    fan_slot_unlock(b, t->slot);
    fan_sum_stats_drop(&last);
    fan_event_drop(old);
    return status;
}

/* The scratch is added. */
static fan_status target_add(fan_buffer *b, const fan_target *t, uint8_t origin, fan_error *err)
{
    fan_contribution c = {.key = t->key,
                          .stream = t->producer,
                          .summed = true,
                          .weight = t->weight,
                          .value = fan_value_dense(fan_array_hold(t->array), t->device)};
    c.value.origin = origin;
    fan_status status = fan_buffer_add(b, t->slot, &c, err);
    fan_value_drop(b->frontend, &c.value);
    return status;
}

fan_status fan_buffer_target_end(fan_buffer *b, fan_target *t, bool good, uint8_t origin,
                                 fan_error *err)
{
    fan_status status = FAN_OK;
    if (t->direct) {
        status = target_end_direct(b, t, good, err);
    } else {
        fan_slot_lock(b, t->slot);
        target_forget(&b->slots[t->slot], t);
        fan_slot_unlock(b, t->slot);
        if (good)
            status = target_add(b, t, origin, err);
    }
    target_fini(t);
    return status;
}

void fan_buffer_target_cancel(fan_buffer *b, fan_target *t)
{
    fan_slot *s = &b->slots[t->slot];
    fan_slot_lock(b, t->slot);
    target_forget(s, t);
    if (t->direct) {
        fan_slot_state *state = s->state;
        state->count--;
        state->arriving--;
        t->sum->key = t->key;
        if (t->key >= 0) {
            state->next_key = (uint64_t)t->key;
            t->sum->key = t->key - 1;
        }
        fan_slot_let_go(b, t->slot);
    }
    fan_slot_unlock(b, t->slot);
    target_fini(t);
}
