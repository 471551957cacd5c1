/* take: what a consumer gets: finish each slot's sum, order the consumer's stream, empty all at the end (S18, S19, S22,
 * A14, D11, D21). */
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/batch.h"
#include "buffer/enter.h"
#include "buffer/fold_run.h"
#include "buffer/gather.h"
#include "buffer/lock.h"
#include "buffer/order.h"
#include "buffer/pass.h"
#include "buffer/stats.h"
#include "buffer/take_slot.h"

#include <stdio.h>

/* Collects the extents of all inputs and of all outs, for a take with out=. */
static fan_status look_at_outs(fan_buffer *b, const fan_take *how, const fan_slot_take *takes, fan_extents *inputs,
                               fan_extents *outs, fan_error *err)
{
    size_t most = 0, given = 0;
    for (size_t i = 0; i < fan_take_count(b, how); i++) {
        given += fan_take_out_of(how, i) != NULL;
        most += 3 * takes[i].g.fold.n;
        for (size_t j = 0; j < takes[i].g.fold.n; j++)
            most += takes[i].g.fold.terms[j].v->nparts;
    }
    inputs->all = fan_alloc((most + 1) * sizeof *inputs->all);
    outs->all = fan_alloc((given + 1) * sizeof *outs->all);
    if (!inputs->all || !outs->all)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    for (size_t i = 0; i < fan_take_count(b, how); i++) {
        if (fan_take_out_of(how, i))
            fan_extents_put(outs, how->out[i].array, takes[i].slot, true);
        for (size_t j = 0; j < takes[i].g.fold.n; j++) {
            const fan_value *v = takes[i].g.fold.terms[j].v;
            fan_array *some[3];
            size_t n = v->form == FAN_FORM_OBJECT ? 0 : fan_value_arrays(v, some, 3);
            for (size_t k = 0; k < n && k < 3; k++)
                fan_extents_put(inputs, some[k], takes[i].slot, v->form == FAN_FORM_DENSE);
            for (size_t k = 0; k < v->nparts; k++)
                fan_extents_put(inputs, v->parts[k], takes[i].slot, false);
        }
    }
    fan_extents_sort(inputs);
    fan_extents_sort(outs);
    size_t one, two;
    if (fan_outs_meet(outs, &one, &two))
        return fan_fail(err, FAN_ERR_VALUE, "%s: out= of slots %zu and %zu may share memory", b->name, one, two);
    return FAN_OK;
}

/* D11: whether the sum must be made apart from its `out` and copied into it. With stats, the terms of an exact sum are
 * read again once it is made: none may be overwritten by then. */
static bool must_copy(const fan_buffer *b, const fan_slot_take *c, const fan_extents *inputs, const fan_value *out)
{
    for (size_t j = 0; j < c->g.fold.n; j++)
        if (c->g.fold.terms[j].v->form != FAN_FORM_DENSE)
            return true;
    return (b->sum_stats && fan_fold_is_exact(&c->g.fold) && fan_written_by_own_out(c, out)) ||
           fan_out_overlaps_inputs(inputs, out->array, c->slot);
}

/* Claims every slot, gathers what it holds, and checks what the caller asks of it. */
static fan_status take_claim(fan_buffer *b, const fan_take *how, fan_slot_take *takes, fan_extents *inputs,
                             fan_extents *outs, fan_error *err)
{
    for (size_t i = 0; i < fan_take_count(b, how); i++) {
        size_t slot = takes[i].slot;
        FAN_TRY(fan_slot_take_claim(b, slot, err));
        takes[i].claimed = true;
        FAN_TRY(fan_gather(b, slot, SIZE_MAX, true, &takes[i].g, err));
        takes[i].gathered = true;
        for (size_t j = 0; j < takes[i].g.fold.n; j++)
            if (takes[i].g.fold.terms[j].v->form == FAN_FORM_OBJECT &&
                (fan_take_scaled(how) || fan_take_out_of(how, i)))
                return fan_fail(err, FAN_ERR_TYPE, FAN_SLOT_SAID " sums objects; scale= and out= need arrays",
                                FAN_SLOT_WHO(b, slot));
        FAN_TRY(fan_take_check_scale(b, slot, &takes[i].g.fold, how, err));
        if (fan_take_out_of(how, i))
            FAN_TRY(fan_take_check_out(b, slot, &takes[i].g, &how->out[i], err));
    }
    if (how->out)
        FAN_TRY(look_at_outs(b, how, takes, inputs, outs, err));
    for (size_t i = 0; how->out && i < fan_take_count(b, how); i++)
        takes[i].copy_out = fan_take_out_of(how, i) && must_copy(b, &takes[i], inputs, &how->out[i]);
    return FAN_OK;
}

static fan_stream *consumer_of(const fan_buffer *b, const fan_take *how, size_t slot)
{
    fan_stream *C =
        b->slots[slot].p->consumer; /* the buffer's, unless it was redirected (S7); of zeros alone it knows none */
    return how->stream ? how->stream : C ? C : b->stream;
}

/* One step of a take, done for every slot before the next step begins. What went into the batch meanwhile is ended
 * after it. */
typedef fan_status step(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs, fan_slot_take *c,
                        fan_batch *batch, fan_error *err);

static fan_status each_slot(fan_buffer *b, const fan_take *how, const fan_extents *outs, fan_slot_take *takes,
                            fan_batch *batch, step *one, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    size_t ended = 0;
    for (size_t i = 0; i < fan_take_count(b, how) && status == FAN_OK; i++) {
        status = one(b, takes[i].slot, how, outs, &takes[i], batch, err);
        fan_take_poison(b, takes[i].slot, status, err);
        if (status == FAN_OK && batch && fan_batch_bytes(batch) >= FAN_BATCH_BYTES) {
            status = fan_take_slots_end(b, takes, ended, i + 1, batch, false, err);
            ended = i + 1;
        }
    }
    bool failed = status != FAN_OK;
    fan_status its = fan_take_slots_end(b, takes, ended, fan_take_count(b, how), batch, failed, failed ? &other : err);
    return failed ? status : its;
}

static fan_status step_sum(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs, fan_slot_take *c,
                           fan_batch *batch, fan_error *err)
{
    FAN_TRY(fan_slot_take_decide(b, slot, how, outs, c, consumer_of(b, how, slot), false, err));
    return fan_slot_take_fold(b, slot, c, batch, err);
}

static fan_status step_ask_again(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs,
                                 fan_slot_take *c, fan_batch *batch, fan_error *err)
{
    if (!c->asked_again)
        return FAN_OK;
    FAN_TRY(fan_slot_take_decide(b, slot, how, outs, c, consumer_of(b, how, slot), true, err));
    return fan_slot_take_fold(b, slot, c, batch, err);
}

/* On the CPU nothing is allocated here: either all outs are written or none. */
static fan_status step_write(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs, fan_slot_take *c,
                             fan_batch *batch, fan_error *err)
{
    (void)outs;
    return c->plan.way == FAN_TAKE_INTO_OUT ? fan_slot_take_into_out(b, slot, how, c, batch, err) : FAN_OK;
}

static bool goes_out(const fan_take *how, size_t slot) { return fan_take_out_at(how, slot) != NULL; }

static fan_status step_hand_over(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs,
                                 fan_slot_take *c, fan_batch *batch, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    (void)outs, (void)batch;
    if (c->handed)
        return FAN_OK;
    c->handed = true;
    if (c->plan.copy_out)
        FAN_TRY(fan_slot_take_copy(b, slot, how, c, err));
    if (c->result.form != FAN_FORM_UNDEFINED)
        FAN_TRY(fan_order_hand_over(b, slot, &c->result, s->p->consumer, s->p->accum, c->ready, c->ready_event,
                                    consumer_of(b, how, slot), &s->p->rules, err));
    return b->sum_stats ? fan_slot_take_stats(c, s->p, err) : FAN_OK;
}

/* A sum that is not written into an `out` is handed over before any out is written: to show it to the user may fail. */
static fan_status step_hand_over_first(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs,
                                       fan_slot_take *c, fan_batch *batch, fan_error *err)
{
    return goes_out(how, slot) ? FAN_OK : step_hand_over(b, slot, how, outs, c, batch, err);
}

static void name_origin(fan_slot_take *c)
{
    if (c->result.form == FAN_FORM_UNDEFINED || c->result.form == FAN_FORM_ZERO)
        return;
    c->result.origin = c->origin;
    c->result.rank = c->rank;
}

/* The user may keep a sum that was shown, even if the take then fails because of another slot: so what stays in the
 * slot is not written any more. */
static fan_status show_all(fan_buffer *b, const fan_take *how, fan_slot_take *takes, fan_error *err)
{
    for (size_t i = 0; how->show && i < fan_take_count(b, how); i++) {
        fan_slot_take *c = &takes[i];
        fan_pass *p = b->slots[c->slot].p;
        if (fan_take_out_of(how, i)) {
            if (c->plan.way == FAN_TAKE_INTO_OUT || c->plan.copy_out)
                FAN_TRY(how->show(how->ctx, i, NULL, err));
            continue;
        }
        for (size_t k = 0; k < p->nitems; k++) {
            p->items[k]->exposed = p->items[k]->shown = true;
            p->items[k]->donated = false; /* the promise was one until the take */
        }
        if (p != &fan_pass_none) {
            p->value_exposed = p->value_shown = true;
            p->value_donated = false;
        }
        name_origin(c);
        FAN_TRY(how->show(how->ctx, i, &c->result, err));
    }
    return FAN_OK;
}

/* A sum of objects has run others' code: checks that each `out` still lies where it lay. */
static fan_status check_outs_unchanged(const fan_buffer *b, const fan_take *how, fan_error *err)
{
    for (size_t i = 0; how->out && b->frontend->is_unchanged && i < fan_take_count(b, how); i++)
        if (fan_take_out_of(how, i) && how->out[i].device == fan_cpu() && !b->frontend->is_unchanged(&how->out[i]))
            return fan_fail(err, FAN_ERR_STATE,
                            FAN_SLOT_SAID ": the memory, dtype or shape of out= was changed during the take",
                            FAN_SLOT_WHO(b, how->one ? how->slot : i));
    return FAN_OK;
}

/* Order: 1. all sums; 2. sums written straight into `out`; 3. copies into `out`. An `out` may alias an input of another
 * slot, so nothing is written while an input is still unread. */
static fan_status take_all(fan_buffer *b, const fan_take *how, const fan_extents *outs, fan_slot_take *takes,
                           fan_error *err)
{
    fan_batch *batch = NULL;
    fan_status status = FAN_OK;
    bool streams = false, asked_again = false;
    for (size_t i = 0; i < fan_take_count(b, how); i++)
        streams |= b->slots[takes[i].slot].p->accum != NULL;
    if (streams && fan_take_count(b, how) > 1 && !b->sum_stats && !(batch = fan_batch_new()))
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    FAN_GO(each_slot(b, how, outs, takes, batch, step_sum, err));
    FAN_GO(each_slot(b, how, outs, takes, batch, step_ask_again, err));
    for (size_t i = 0; i < fan_take_count(b, how); i++)
        asked_again |= takes[i].asked_again;
    for (size_t i = 0; asked_again && i < fan_take_count(b, how); i++)
        takes[i].g.fold.may_end = false;
    FAN_GO(each_slot(b, how, outs, takes, batch, step_hand_over_first, err));
    FAN_GO(show_all(b, how, takes, err));
    FAN_GO(check_outs_unchanged(b, how, err));
    if (how->out)
        FAN_GO(each_slot(b, how, outs, takes, batch, step_write, err));
    status = each_slot(b, how, outs, takes, batch, step_hand_over, err);
done:
    fan_batch_free(batch);
    return status;
}

static void trace_take(const fan_buffer *b, size_t slot, const fan_slot_take *c, fan_stream *consumer)
{
    const fan_slot *s = &b->slots[slot];
    const fan_device *d = consumer ? consumer->device : s->p->device;
    fan_trace_line line = {.kind = FAN_TRACE_TAKE,
                           .how = s->p->accum ? fan_sync_letter(s->p->how) : '\0',
                           .device = d && d->id ? (int16_t)d->index : -1,
                           .slot = (int32_t)slot,
                           .count = (uint32_t)s->p->count,
                           .buffer = b->id,
                           .key = -1,
                           .rules = s->p->rules,
                           .stream = consumer ? consumer->handle : 0,
                           .bytes = fan_value_bytes(&c->result),
                           .start_us = -1,
                           .end_us = -1};
    snprintf(line.label, sizeof line.label, "%s", s->spec->name ? s->spec->name : b->name);
    fan_trace_put(&line);
}

/* Empties the slots whose sums were made, and lets all slots go; *gone goes to fan_pass_free. */
static void take_let_go(fan_buffer *b, const fan_take *how, fan_slot_take *takes, fan_status status, fan_pass **gone)
{
    for (size_t i = 0; i < fan_take_count(b, how) && takes[i].claimed; i++) {
        fan_slot_take *c = &takes[i];
        if (status == FAN_OK && fan_trace_on() && c->result.form != FAN_FORM_UNDEFINED)
            trace_take(b, c->slot, c, consumer_of(b, how, c->slot));
        fan_slot_lock(b, c->slot);
        if (status == FAN_OK) {
            gone[i] = fan_pass_cut(&b->slots[c->slot]);
            if (b->sum_stats) {
                fan_sum_stats old = b->sum_stats[c->slot];
                b->sum_stats[c->slot] = c->sum_stats;
                c->sum_stats = old;
            }
        }
        fan_slot_let_go(b, c->slot);
        fan_slot_unlock(b, c->slot);
    }
}

static void slot_take_fini(fan_buffer *b, fan_slot_take *c, fan_pass *gone)
{
    fan_sum_stats_drop(&c->sum_stats);
    fan_stream_drop(c->ready);
    fan_event_drop(c->ready_event);
    if (c->gathered)
        fan_gathered_fini(&c->g);
    if (gone && gone != &fan_pass_none) { /* the consumer has waited for what was pooled */
        fan_stream_drop(gone->capture_origin);
        gone->capture_origin = NULL;
    }
    fan_pass_free(b, gone);
}

fan_status fan_buffer_take(fan_buffer *b, const fan_take *how, fan_value *results, fan_error *err)
{
    FAN_TRY(fan_buffer_here(b, err));
    if (how->one)
        FAN_TRY(fan_slot_check(b, how->slot, err));
    size_t n = fan_take_count(b, how);
    fan_slot_take *takes = fan_calloc((n ? n : 1) * sizeof *takes);
    fan_pass **gone = fan_calloc((n ? n : 1) * sizeof *gone);
    fan_status status;
    if (!takes || !gone) {
        fan_free(takes);
        fan_free(gone);
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    }
    for (size_t i = 0; i < n; i++)
        takes[i].slot = how->one ? how->slot : i;
    fan_extents inputs = {NULL, 0}, outs = {NULL, 0};
    status = take_claim(b, how, takes, &inputs, &outs, err);
    if (status == FAN_OK)
        status = take_all(b, how, &outs, takes, err);
    fan_free(inputs.all);
    fan_free(outs.all);
    take_let_go(b, how, takes, status, gone);
    for (size_t i = 0; i < n; i++) {
        fan_slot_take *c = &takes[i];
        if (status == FAN_OK) {
            name_origin(c);
            results[i] = c->result;
        } else {
            fan_value_drop(b->frontend, &c->result);
        }
        slot_take_fini(b, c, gone[i]);
    }
    fan_free(takes);
    fan_free(gone);
    return status;
}
