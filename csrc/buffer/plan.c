/* plan: the plan of an add, of a fold, and of a target. */
#include "buffer/plan.h"

#include <assert.h>

static uint64_t producer_bit(fan_sync_case stream_case)
{
    switch (stream_case) {
    case FAN_CASE_OTHER:
        return FAN_PLAN_S9_RECORD;
    case FAN_CASE_PRODUCER:
        return FAN_PLAN_S10_RECORD;
    case FAN_CASE_CURRENT:
        return FAN_PLAN_S11_RECORD;
    default:
        return FAN_PLAN_S12_RECORD;
    }
}

/* S21: an array that is converted on a device. */
static void plan_convert(const fan_add_facts *f, fan_add_plan *plan)
{
    const fan_sync_slot *slot = &plan->sync.slot;
    fan_sync_convert on = fan_sync_convert_plan(f->device, &plan->sync);
    plan->mark_source = !f->upload;
    plan->rules |= on.rules;
    if (on.on_producer && !f->upload) {
        plan->convert = FAN_CONVERT_PRODUCER;
        return;
    }
    /* It is ready on the accumulation stream then, with an event there if a stream will wait. */
    bool first = plan->sync.stream_case != FAN_CASE_LATER;
    plan->convert = FAN_CONVERT_ACCUM;
    plan->wait = !f->upload && !fan_stream_id_same(plan->sync.producer, slot->accum);
    plan->ready = slot->accum;
    plan->mark = false;
    plan->record = FAN_RECORD_NOT;
    if (first && !fan_stream_id_same(slot->accum, slot->consumer))
        plan->record = FAN_RECORD_ACCUM;
}

fan_add_plan fan_plan_add(const fan_add_facts *f)
{
    fan_add_plan plan = {.convert = FAN_CONVERT_NOT};
    if (!f->defined) {
        plan.sync =
            (fan_sync_add){.stream_case = FAN_CASE_HOST, .slot = f->slot, .rules = FAN_S(2)};
        plan.rules = plan.sync.rules;
        return plan;
    }
    plan.sync = fan_sync_add_plan(f->device, f->producer, f->consumer, f->current, f->slot);
    plan.rules = plan.sync.rules;
    plan.ready = plan.sync.producer;
    if (plan.sync.record)
        plan.record = FAN_RECORD_PRODUCER;
    plan.producer_bit = producer_bit(plan.sync.stream_case);
    plan.mark = plan.sync.mark;
    if (f->download)
        plan.convert = FAN_CONVERT_SOURCE;
    else if (f->changes && plan.sync.stream_case == FAN_CASE_HOST)
        plan.convert = FAN_CONVERT_HOST;
    else if (f->changes)
        plan_convert(f, &plan);
    return plan;
}

uint64_t fan_plan_plain_slot(bool defined, bool undefined)
{
    uint64_t rules = 0;
    if (undefined)
        rules |= FAN_S(2);
    if (defined)
        rules |= FAN_S(3);
    return rules;
}

uint64_t fan_plan_plain_fold(bool reusable)
{
    fan_side first = {.form = FAN_FORM_DENSE, .reusable = reusable};
    fan_side other = {.form = FAN_FORM_DENSE};
    return fan_accum(first, other, false).rules;
}

static fan_fold_kind kind_of(const fan_fold_facts *f, fan_form result)
{
    if (f->exact) {
        bool sparse = f->sparse && f->sparse == f->terms;
        if (!sparse || f->has_state)
            return FAN_FOLD_EXACT;
        return FAN_FOLD_EXACT_SPARSE;
    }
    if (result == FAN_FORM_OBJECT)
        return FAN_FOLD_OBJECTS;
    if (f->partial)
        return FAN_FOLD_PARTIAL;
    if (result == FAN_FORM_SPARSE)
        return FAN_FOLD_SPARSE;
    if (f->sparse)
        return FAN_FOLD_MIXED;
    return FAN_FOLD_DENSE;
}

/* Which rule sums the terms, and where. */
static fan_accum_plan fold_accum(const fan_fold_facts *f)
{
    fan_side first = f->first;
    fan_side other = f->first;
    if (f->terms > 1)
        other = f->other;
    bool stays = !f->finish && !f->has_out;
    bool second = f->other_is_second && f->coalesced;
    first.reusable = stays && f->reuse_first == FAN_REUSE_YES;
    other.reusable = stays && second && f->reuse_other == FAN_REUSE_YES;
    return fan_accum(first, other, f->recording && f->objects);
}

fan_fold_plan fan_plan_fold(const fan_fold_facts *f)
{
    assert(f->terms || f->has_state);
    fan_accum_plan sum = fold_accum(f);
    fan_fold_plan plan = {.kind = kind_of(f, sum.result),
                          .action = sum.action,
                          .reuse = f->reuse_first,
                          .rules = sum.rules,
                          .dtype = fan_accum_dtype_of(f->seen, f->accumulate)};
    bool dense = plan.kind == FAN_FOLD_DENSE;
    if (f->has_out && dense) {
        plan.action = FAN_ACTION_OUT;
        plan.rules = 0;
    }
    if (f->exact) {
        plan.action = FAN_ACTION_EXACT;
        if (f->has_out)
            plan.action = FAN_ACTION_OUT;
        plan.rules = FAN_A(11);
    }
    if (f->finish || f->exact)
        plan.dtype = fan_dtype_set_promote(f->seen);
    if ((f->finish || f->exact) && f->finish_dtype != FAN_DT_NONE)
        plan.dtype = f->finish_dtype;
    bool may_expand = dense || plan.kind == FAN_FOLD_EXACT;
    bool written = f->has_out || f->writable;
    if (f->expanded && may_expand && !written) {
        plan.expanded = f->expanded;
        plan.rules |= FAN_A(13);
    }
    if (f->finish)
        plan.coalesce = f->terms > 1 || f->summed;
    else
        plan.coalesce = f->entries > 2 * f->entries_before;
    plan.exclusive = plan.action == FAN_ACTION_INTO_OLD || plan.action == FAN_ACTION_INTO_NEW;
    plan.batches = dense && fan_stream_id_set(f->slot.accum) && !f->stats;
    if (f->finish)
        plan.after = fan_sync_finish_plan(f->slot, f->has_out, f->taker);
    else
        plan.after = fan_sync_fold_plan(f->slot);
    return plan;
}

fan_target_plan fan_plan_target(const fan_target_facts *f)
{
    bool own = f->reuse == FAN_REUSE_YES;
    bool here = fan_stream_id_same(f->producer, f->accum);
    bool ready_here = fan_stream_id_same(f->ready, f->accum);
    fan_target_plan plan = {.direct = false};
    if (!f->idle || !f->complete || !own)
        return plan;
    plan.direct = here && ready_here;
    return plan;
}
