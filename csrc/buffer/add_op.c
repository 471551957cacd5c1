#include "buffer/add_op.h"

#include "base/fault.h"
#include "base/trace.h"
#include "buffer/convert.h"
#include "buffer/lock.h"
#include "buffer/options.h"
#include "buffer/order.h"
#include "buffer/pass.h"
#include "buffer/stats.h"
#include "buffer/unchanged.h"

#include <stdio.h>

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
    return fan_order_record(b, stream, bit, &item->event, err);
}

/* S21: the converted gradient, in *made; where it is ready on A the item says so. */
static fan_status convert(fan_buffer *b, fan_add_op *x, fan_value *made, fan_error *err)
{
    const fan_add_plan *plan = &x->a.plan;
    fan_contribution *c = x->c;
    fan_item *item = x->it;
    fan_stream *on = plan->convert == FAN_CONVERT_ACCUM ? x->accum : x->a.producer;
    if (plan->convert == FAN_CONVERT_SOURCE) {
        on = c->stream ? fan_stream_hold(c->stream) : fan_stream_current(c->value.device);
        fan_status status = fan_contribution_convert(b, x->slot, c, &x->a, on, made, err);
        fan_stream_drop(on);
        return status;
    }
    if (plan->wait) {
        FAN_TRY(record(b, x->slot, item, x->a.producer, plan->producer_bit, err));
        FAN_TRY(fan_order_wait(b, x->slot, on, item->event, FAN_PLAN_S21_WAIT, err));
    }
    if (plan->mark_source)
        FAN_TRY(fan_order_record_stream(&c->value, on, FAN_PLAN_S21_MARK, err));
    if (FAN_FAULT(RECORD_BEFORE_CONVERSION) && plan->record == FAN_RECORD_PRODUCER)
        FAN_TRY(record(b, x->slot, item, x->a.producer, plan->producer_bit, err));
    FAN_TRY(fan_contribution_convert(b, x->slot, c, &x->a, on, made, err));
    if (plan->convert != FAN_CONVERT_ACCUM)
        return FAN_OK;
    fan_event_drop(item->event);
    item->event = NULL;
    fan_stream_drop(item->producer);
    item->producer = fan_stream_hold(fan_order_stream(plan->ready, &x->accum, 1));
    fan_status status =
        plan->record == FAN_RECORD_ACCUM ? record(b, x->slot, item, on, FAN_PLAN_S21_RECORD, err) : FAN_OK;
    if (status != FAN_OK)
        fan_value_drop(b->frontend, made);
    return status;
}

/* The event of the contribution before it in one call, where that stands for this one as well: it was recorded within
 * the call, on the same stream, and nothing of ours was queued there since. NULL: there is none. */
static fan_event *shared_event(const fan_add_op *x)
{
    const fan_add_op *before = x->previous;
    if (!before || !before->it || x->a.plan.convert != FAN_CONVERT_NOT || before->a.plan.convert != FAN_CONVERT_NOT ||
        before->a.plan.record != FAN_RECORD_PRODUCER || before->a.producer != x->a.producer ||
        before->a.plan.producer_bit != x->a.plan.producer_bit)
        return NULL;
    return before->it->event;
}

/* The plan of the contribution: converted, its event recorded, used on A. */
static fan_status carry_out(fan_buffer *b, fan_add_op *x, fan_error *err)
{
    const fan_add_plan *plan = &x->a.plan;
    fan_item *item = x->it;
    fan_value made = {.dtype = FAN_DT_NONE};
    if (plan->convert != FAN_CONVERT_NOT)
        FAN_TRY(convert(b, x, &made, err));
    if (made.form != FAN_FORM_UNDEFINED) {
        x->old = item->value;
        item->value = made;
        item->ours = true;
        item->donated = false;
    }
    if (plan->record == FAN_RECORD_PRODUCER && !item->event) {
        fan_stream *on = FAN_FAULT(RECORD_ON_CONSUMER) ? x->consumer : x->a.producer;
        item->event = fan_event_hold(shared_event(x));
        if (!item->event)
            FAN_TRY(record(b, x->slot, item, on, plan->producer_bit, err));
    }
    return plan->mark ? fan_order_record_stream(&item->value, x->accum, FAN_PLAN_S9_MARK, err) : FAN_OK;
}

static void trace_add(const fan_buffer *b, size_t slot, const fan_contribution *c, const fan_arrival *a, uint64_t bytes)
{
    const fan_slot *s = &b->slots[slot];
    const fan_device *d =
        a->producer ? a->producer->device : a->device; /* a stream's number means something on its own device only */
    fan_trace_line line = {.kind = FAN_TRACE_ADD,
                           .how = fan_sync_letter(a->plan.sync.how),
                           .device = d && d->id ? (int16_t)d->index : -1,
                           .slot = (int32_t)slot,
                           .count = 1,
                           .buffer = b->id,
                           .key = c->key,
                           .rules = a->plan.rules,
                           .stream = a->producer ? a->producer->handle : 0,
                           .bytes = bytes,
                           .start_us = -1,
                           .end_us = -1};
    snprintf(line.label, sizeof line.label, "%s", s->spec->name ? s->spec->name : b->name);
    fan_trace_put(&line);
}

/* Conversions, the event, the mark: nothing for an undefined one. */
fan_status fan_add_carry_out(fan_buffer *b, fan_add_op *x, fan_error *err)
{
    fan_item *it = x->it;
    if (x->c->value.form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    FAN_TRY(fan_slot_check_unmoved(b, x->slot, &x->c->value, x->c->key, err)); /* it may have waited for the slot */
    if (fan_trace_on())
        trace_add(b, x->slot, x->c, &x->a, fan_value_bytes(&x->c->value));
    FAN_TRY(carry_out(b, x, err));
    x->bytes = fan_value_bytes(&it->value);
    x->bytes = x->bytes ? x->bytes : 1; /* so that what has no bytes of ours passes a budget of 0, too */
    if (fan_get_debug() && it->value.form == FAN_FORM_DENSE && it->value.device == fan_cpu() && !it->ours) {
        FAN_TRY(fan_slot_hash(b, it->value.array, true, &it->hash, err));
        it->hashed = true;
    }
    return FAN_OK;
}

/* Locked: a fold may sum it from now on. */
void fan_add_park(fan_buffer *b, fan_add_op *x)
{
    fan_item *it = x->it;
    if (!it || x->parked)
        return;
    x->parked = true;
    b->slots[x->slot].p->arriving--;
    x->c->value = (fan_value){.dtype = FAN_DT_NONE};
    it->bytes = x->bytes;
    it->parked = true;
    if (fan_sched_active())
        fan_buffer_weigh(b, x->bytes);
    it->alone =
        b->budget == FAN_BUDGET_AUTO && it->value.form == FAN_FORM_DENSE && !x->accum && (it->ours || x->c->alone);
    if (it->alone)
        atomic_fetch_add_explicit(&b->alone, it->bytes, memory_order_relaxed);
    fan_count_parked(b, x->bytes);
    fan_slot_notify(b, x->slot);
}

/* Locked: nobody has summed it, and nobody may any more. */
void fan_add_unpark(fan_buffer *b, fan_add_op *x)
{
    if (!x->parked)
        return;
    fan_item_unpark(b, x->it);
    x->parked = x->it->parked = false;
    b->slots[x->slot].p->arriving++;
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
        fan_item_free(b, x->it);
    fan_value_drop(b->frontend, &x->old);
    fan_stream_drop(x->accum);
    fan_stream_drop(x->consumer);
    fan_stream_drop(x->producer);
    fan_stream_drop(x->with.current);
    fan_stream_drop(x->with.consumer);
}

/* S6. */
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
