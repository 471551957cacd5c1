#include "buffer/plan.h"

#include <assert.h>

static uint64_t producer_bit(fan_sync_case how)
{
    switch (how) {
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

fan_add_plan fan_plan_add(const fan_add_facts *f)
{
    fan_add_plan plan = {.convert = FAN_CONVERT_NOT};
    if (!f->defined) {
        plan.sync = (fan_sync_add){.how = FAN_CASE_HOST, .slot = f->slot, .rules = FAN_S(2)};
        plan.rules = plan.sync.rules;
        return plan;
    }
    plan.sync = fan_sync_add_plan(f->device, f->producer, f->consumer, f->current, f->slot);
    plan.rules = plan.sync.rules;
    plan.ready = plan.sync.producer;
    plan.record = plan.sync.record ? FAN_RECORD_PRODUCER : FAN_RECORD_NOT;
    plan.producer_bit = producer_bit(plan.sync.how);
    plan.mark = plan.sync.mark;
    if (f->download) {
        plan.convert = FAN_CONVERT_SOURCE;
    } else if (f->changes && plan.sync.how == FAN_CASE_HOST) {
        plan.convert = FAN_CONVERT_HOST;
    } else if (f->changes) {
        fan_sync_convert on = fan_sync_convert_plan(f->device, &plan.sync);
        plan.convert = on.on_producer && !f->upload ? FAN_CONVERT_PRODUCER : FAN_CONVERT_ACCUM;
        plan.mark_source = !f->upload;
        plan.rules |= on.rules;
        if (plan.convert == FAN_CONVERT_ACCUM) {
            /* S21: it is ready on the accumulation stream then, with an event there if a stream
             * will wait. */
            const fan_sync_slot *slot = &plan.sync.slot;
            bool first = plan.sync.how != FAN_CASE_LATER;
            plan.wait = !f->upload && !fan_stream_id_same(plan.sync.producer, slot->accum);
            plan.ready = slot->accum;
            plan.mark = false;
            plan.record = first && !fan_stream_id_same(slot->accum, slot->consumer)
                              ? FAN_RECORD_ACCUM
                              : FAN_RECORD_NOT;
        }
    }
    return plan;
}

uint64_t fan_plan_plain_slot(bool defined, bool undefined)
{
    return (undefined ? FAN_S(2) : 0) | (defined ? FAN_S(3) : 0);
}

uint64_t fan_plan_plain_fold(bool reusable)
{
    fan_side first = {.form = FAN_FORM_DENSE, .reusable = reusable},
             other = {.form = FAN_FORM_DENSE};
    return fan_accum(first, other, false).rules;
}

static fan_dtype accumulated(const fan_fold_facts *f)
{
    fan_dtype d = fan_dtype_set_promote(f->seen);
    if (d == FAN_DT_NONE)
        return d;
    return f->accumulate == FAN_DT_NONE ? fan_dtype_accumulate(d) : f->accumulate;
}

static fan_fold_kind kind_of(const fan_fold_facts *f, fan_form result)
{
    if (f->exact)
        return f->sparse && f->sparse == f->terms && !f->has_state ? FAN_FOLD_EXACT_SPARSE
                                                                   : FAN_FOLD_EXACT;
    if (result == FAN_FORM_OBJECT)
        return FAN_FOLD_OBJECTS;
    if (result == FAN_FORM_SPARSE)
        return FAN_FOLD_SPARSE;
    return f->sparse ? FAN_FOLD_MIXED : FAN_FOLD_DENSE;
}

fan_fold_plan fan_plan_fold(const fan_fold_facts *f)
{
    fan_side first = f->first, other = f->terms > 1 ? f->other : f->first;
    bool stays = !f->finish && !f->has_out;
    assert(f->terms || f->has_state);
    first.reusable = stays && f->reuse_first == FAN_REUSE_YES;
    other.reusable = stays && f->other_is_second && f->coalesced && f->reuse_other == FAN_REUSE_YES;
    fan_accum_plan sum = fan_accum(first, other, f->recording && f->objects);
    fan_fold_plan plan = {.kind = kind_of(f, sum.result), .reuse = f->reuse_first};
    bool dense = plan.kind == FAN_FOLD_DENSE;
    plan.action = f->exact ? FAN_ACTION_EXACT : sum.action;
    plan.rules = f->exact ? FAN_A(11) : sum.rules;
    if (f->has_out && (f->exact || dense)) {
        plan.action = FAN_ACTION_OUT;
        plan.rules = f->exact ? FAN_A(11) : 0;
    }
    plan.dtype = accumulated(f);
    if (f->finish || f->exact)
        plan.dtype =
            f->finish_dtype != FAN_DT_NONE ? f->finish_dtype : fan_dtype_set_promote(f->seen);
    bool may_expand = dense || plan.kind == FAN_FOLD_EXACT;
    if (may_expand && f->expanded && !f->has_out && !f->writable) {
        plan.expanded = f->expanded;
        plan.rules |= FAN_A(13);
    }
    plan.coalesce = f->finish ? f->terms > 1 || f->summed : f->entries > 2 * f->entries_before;
    plan.exclusive = plan.action == FAN_ACTION_INTO_OLD || plan.action == FAN_ACTION_INTO_NEW;
    plan.batches = dense && fan_stream_id_set(f->slot.accum) && !f->stats;
    plan.after = f->finish ? fan_sync_finish_plan(f->slot, f->has_out, f->taker)
                           : fan_sync_fold_plan(f->slot);
    return plan;
}

fan_target_plan fan_plan_target(const fan_target_facts *f)
{
    fan_target_plan plan = {.direct = f->idle && f->reuse == FAN_REUSE_YES && f->complete &&
                                      fan_stream_id_same(f->producer, f->accum) &&
                                      fan_stream_id_same(f->ready, f->accum)};
    return plan;
}
