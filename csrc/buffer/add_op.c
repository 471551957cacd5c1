#include "buffer/add_op.h"

#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
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

static fan_status add_convert(fan_buffer *b, size_t slot, fan_contribution *c, const fan_arrival *a, fan_item *item,
                              fan_stream *A, fan_stream *C, fan_value *old, fan_error *err)
{
    const fan_value *v = &c->value;
    bool change = fan_arrival_converts(a) || (c->copy && (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE));
    fan_value made = {.dtype = FAN_DT_NONE};
    *old = (fan_value){.dtype = FAN_DT_NONE};
    if (a->download) {
        fan_stream *on = c->stream ? fan_stream_hold(c->stream) : fan_stream_current(v->device);
        fan_status status = fan_contribution_convert(b, slot, c, a, on, &made, err);
        fan_stream_drop(on);
        FAN_TRY(status);
    } else if (change && a->sync.how == '-') {
        FAN_TRY(fan_contribution_convert(b, slot, c, a, NULL, &made, err));
    } else if (change) {
        fan_sync_convert plan = fan_sync_convert_plan(a->device->id, &a->sync);
        bool on_producer = plan.on_producer && !a->upload;
        fan_stream *on = on_producer ? a->producer : A;
        if (!on_producer && !a->upload && a->producer != A) {
            FAN_TRY(record(b, slot, item, a->producer, record_bit(a->sync.how), err));
            FAN_TRY(fan_order_wait(b, slot, A, item->event, FAN_PLAN_S21_WAIT, err));
        }
        if (!a->upload)
            FAN_TRY(fan_order_mark(v, on, FAN_PLAN_S21_MARK, err));
        if (on_producer && FAN_FAULT(RECORD_BEFORE_CONVERSION) && a->sync.record)
            FAN_TRY(record(b, slot, item, a->producer, record_bit(a->sync.how), err));
        FAN_TRY(fan_contribution_convert(b, slot, c, a, on, &made, err));
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
        FAN_TRY(fan_order_mark(&item->value, A, FAN_PLAN_S9_MARK, err));
    return FAN_OK;
}

static void trace_add(const fan_buffer *b, size_t slot, const fan_contribution *c, const fan_arrival *a, uint64_t bytes)
{
    const fan_slot *s = &b->slots[slot];
    const fan_device *d =
        a->producer ? a->producer->device : a->device; /* a stream's number means something on its own device only */
    fan_trace_line line = {.kind = FAN_TRACE_ADD,
                           .how = a->sync.how,
                           .device = d && d->id ? (int16_t)d->index : -1,
                           .slot = (int32_t)slot,
                           .count = 1,
                           .buffer = b->id,
                           .key = c->key,
                           .rules = a->sync.rules,
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
    FAN_TRY(fan_slot_still(b, x->slot, &x->c->value, x->c->key, err)); /* it may have waited for the slot */
    if (fan_trace_on())
        trace_add(b, x->slot, x->c, &x->a, fan_value_bytes(&x->c->value));
    FAN_TRY(add_convert(b, x->slot, x->c, &x->a, it, x->accum, x->consumer, &x->old, err));
    x->bytes = fan_value_bytes(&it->value);
    x->bytes = x->bytes ? x->bytes : 1; /* so that what has no bytes of ours passes a budget of 0, too */
    if (fan_get_debug() && it->value.form == FAN_FORM_DENSE && it->value.device == fan_cpu() && !it->ours) {
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, b->frontend->poll, err);
        it->hash = fan_array_hash(it->value.array);
        FAN_TRY(fan_interrupt_end(&interrupt, FAN_OK));
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
    if (fan_watched())
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
    if (x->reserved && b->known) {
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
