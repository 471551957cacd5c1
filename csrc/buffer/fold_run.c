#include "buffer/fold_run.h"

#include "array/exact.h"
#include "array/overlap.h"
#include "base/fault.h"
#include "base/trace.h"
#include "buffer/fold_job.h"
#include "buffer/fold_kinds.h"
#include "buffer/options.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/unchanged.h"

#include <assert.h>
#include <stdio.h>

/* Whether a dense term's memory may be written. `mixed`: beside sparse terms: then the sum is written in several steps,
 * each in the dtype of its prefix, and with stats the terms are looked at when it is made. */
static fan_reuse_answer may_write(const fan_fold *f, size_t which, bool mixed)
{
    const fan_term *t = &f->terms[which];
    const fan_array *a = t->v->array;
    fan_array *others[3];
    fan_array *compact = NULL;
    uint64_t expanded = fan_array_expanded(a);
    fan_dtype target = fan_fold_accumulated(f, f->seen);
    bool host = !fan_fold_device(f)->backend->has_streams;
    fan_reuse facts = fan_term_holders(f->b, t, host);
    facts.writable = a->writable || t->ours;
    facts.same_dtype = a->dtype == target && (!mixed || fan_fold_accumulated(f, f->terms[0].seen) == target);
    facts.exclusive = true; /* fan_order_wait_users makes A wait */
    facts.read_later = mixed && f->b->sum_stats && !(which == 0 && fan_fold_first_suspect(f) && host);
    facts.dense = fan_array_dense(a);
    /* The compact base of our own expanded sum may be written as long as the sum stays expanded (A13). */
    if (!facts.dense && expanded && t->ours && fan_array_compact(a, expanded, &compact, NULL) == FAN_OK) {
        facts.dense = fan_array_dense(compact);
        fan_array_drop(compact);
        for (size_t i = 0; i < f->n; i++)
            if (!f->terms[i].v->array || (expanded & ~fan_array_expanded(f->terms[i].v->array)))
                facts.dense = false;
    }
    for (size_t i = 0; i < f->n && facts.disjoint; i++) {
        if (i == which)
            continue;
        size_t n = fan_value_arrays(f->terms[i].v, others, 3);
        for (size_t k = 0; k < n && k < 3; k++)
            facts.disjoint = facts.disjoint &&
                             (fan_array_extents_disjoint(a, others[k]) || fan_array_disjoint(a, others[k])); /* D43 */
    }
    if (FAN_FAULT(WRITE_SHARED) ||
        (FAN_FAULT(REFCOUNT_IS_ENOUGH) && atomic_load(&a->refs) == 1 && atomic_load(&a->storage->refs) == 1))
        facts.ours = true;
    return fan_reusable(&facts);
}

static fan_side side_of(const fan_value *v)
{
    return (fan_side){.form = v->form, .format = v->form == FAN_FORM_SPARSE ? (int)v->sparse->format : 0};
}

/* Which term the first one meets, as the rules have it: an object, else one of another form, else a sparse one of
 * another format, else the second. */
static size_t other_term(const fan_fold *f)
{
    fan_side first = side_of(f->terms[0].v);
    size_t at = 1;
    int best = 0;
    for (size_t i = 1; i < f->n; i++) {
        fan_side one = side_of(f->terms[i].v);
        int rank = one.form == FAN_FORM_OBJECT ? 3 : one.form != first.form ? 2 : one.format != first.format ? 1 : 0;
        if (rank > best) {
            best = rank;
            at = i;
        }
    }
    return at;
}

/* What is true of the terms, but for who may write them. */
static fan_fold_facts facts_of_terms(const fan_fold *f)
{
    fan_fold_facts facts = {.terms = f->n};
    for (size_t i = 0; i < f->n; i++) {
        const fan_value *v = f->terms[i].v;
        facts.sparse += v->form == FAN_FORM_SPARSE;
        facts.objects += v->form == FAN_FORM_OBJECT;
        facts.entries += v->form == FAN_FORM_SPARSE ? fan_sparse_nnz(v->sparse) : 0;
    }
    facts.expanded = fan_fold_expanded(f);
    if (!f->n)
        return facts;
    const fan_sparse *sparse = f->terms[0].v->form == FAN_FORM_SPARSE ? f->terms[0].v->sparse : NULL;
    facts.first = side_of(f->terms[0].v);
    facts.coalesced = sparse && sparse->coalesced;
    facts.entries_before = sparse ? sparse->nnz_coalesced : 0;
    if (f->n > 1) {
        size_t other = other_term(f);
        facts.other = side_of(f->terms[other].v);
        facts.other_is_second = other == 1;
    }
    return facts;
}

bool fan_fold_is_exact(const fan_fold *f)
{
    fan_dtype d = fan_fold_dtype(f);
    return fan_fold_slot(f)->spec->exact && d != FAN_DT_NONE && fan_exact_fits(d);
}

static fan_fold_facts facts_of(const fan_fold *f)
{
    const fan_slot *s = fan_fold_slot(f);
    fan_fold_facts facts = facts_of_terms(f);
    facts.recording = f->b->create_graph;
    facts.exact = fan_fold_is_exact(f);
    facts.has_state = f->state != NULL;
    facts.stats = f->b->sum_stats != NULL;
    facts.finish = f->finish;
    facts.has_out = f->out != NULL;
    facts.writable = f->take && f->take->writable;
    facts.seen = f->seen;
    facts.accumulate = s->spec->accumulate;
    facts.finish_dtype = f->finish_dtype;
    facts.slot = (fan_sync_slot){.consumer = fan_stream_id_of(s->p->consumer),
                                 .accum = fan_stream_id_of(s->p->accum),
                                 .ready = fan_stream_id_of(f->n ? f->terms[0].producer : NULL),
                                 .has_event = f->n && f->terms[0].event != NULL};
    facts.taker = fan_stream_id_of(f->taker);
    return facts;
}

void fan_fold_decide(fan_fold *f)
{
    fan_fold_facts facts = facts_of(f);
    bool mixed = facts.sparse && facts.sparse < f->n;
    facts.reuse_first = facts.reuse_other = FAN_REUSE_LAYOUT;
    if (!f->finish && !facts.exact && !facts.objects && f->n) {
        if (facts.first.form == FAN_FORM_DENSE)
            facts.reuse_first = may_write(f, 0, mixed);
        else if (facts.coalesced && facts.other_is_second && facts.other.form == FAN_FORM_DENSE)
            facts.reuse_other = may_write(f, 1, mixed);
    }
    f->plan = fan_plan_fold(&facts);
}

bool fan_fold_batches(const fan_fold *f)
{
    fan_fold_facts facts = facts_of(f);
    return f->n && fan_plan_fold(&facts).batches;
}

static fan_status fold_body(fan_fold *f, fan_error *err);

/* D14: what stands before the first object is summed as usual, and *sum. */
static fan_status fold_before_objects(fan_fold *f, size_t first, fan_value *sum, fan_error *err)
{
    /* An object brings no dtype, so its `seen` is that of all before it. */
    if (first == 0 || (first == 1 && f->terms[0].v->dtype == fan_dtype_set_promote(f->terms[1].seen)))
        return fan_value_copy(f->b->frontend, f->terms[0].v, sum, err);
    fan_fold sub = *f;
    sub.n = first;
    sub.seen = f->terms[first].seen;
    sub.finish = true;
    sub.finish_dtype = FAN_DT_NONE;
    sub.take = NULL;
    sub.result = (fan_value){.dtype = FAN_DT_NONE};
    sub.sum_stats = (fan_sum_stats){.valid = false};
    fan_fold_decide(&sub);
    fan_status status = fold_body(&sub, err);
    f->rules |= sub.rules;
    *sum = sub.result;
    return status;
}

/* From the first object on the fold is pairwise (A8), as it is for a pass that records itself (A1). */
static fan_status fold_with_objects(fan_fold *f, fan_error *err)
{
    fan_value sum = {.dtype = FAN_DT_NONE};
    size_t first = 0;
    while (f->terms[first].v->form != FAN_FORM_OBJECT)
        first++;
    if ((f->take && f->take->scale.on) || f->out)
        return fan_fail(err, FAN_ERR_TYPE, "%s: slot %zu sums objects; scale= and out= need arrays", f->b->name,
                        f->slot);
    fan_status status = fold_before_objects(f, first, &sum, err);
    if (status == FAN_OK)
        status = fan_fold_objects(f, &sum, first ? first : 1, err);
    fan_value_drop(f->b->frontend, &sum);
    return status;
}

static fan_status fold_body(fan_fold *f, fan_error *err)
{
    f->rules |= f->plan.rules;
    switch (f->plan.kind) {
    case FAN_FOLD_DENSE:
        return fan_fold_dense(f, err);
    case FAN_FOLD_SPARSE:
        return fan_fold_sparse(f, err);
    case FAN_FOLD_MIXED:
        return fan_fold_mixed(f, err);
    case FAN_FOLD_OBJECTS:
        return fold_with_objects(f, err);
    default:
        return fan_fold_exact(f, err);
    }
}

fan_status fan_fold_begin(fan_fold *f, fan_batch *batch, fan_error *err)
{
    fan_slot *s = fan_fold_slot(f);
    assert((f->n > 0 || f->state) && s->busy);
    f->result = (fan_value){.dtype = FAN_DT_NONE};
    for (size_t i = 0; i < f->n; i++)
        if (!f->terms[i].ours)
            FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, f->terms[i].v, f->terms[i].key, err));
    f->batch = batch;
    if (s->p->accum && FAN_FAULT(RECORD_BEFORE_SUM)) {
        fan_event_drop(f->ready_event);
        FAN_TRY(fan_order_record(f->b, s->p->accum, FAN_PLAN_S15_RECORD, &f->early, err));
    }
    fan_status status = fan_fold_stats_memory(f, err);
    if (status == FAN_OK) {
        fan_fold_decide(f);
        status = fold_body(f, err);
    }
    if (status != FAN_OK) {
        f->batch = NULL;
        fan_fold_abandon(f);
    }
    return status;
}

bool fan_fold_left(const fan_fold *f)
{
    return f->batch && fan_batch_state(f->batch, f->number) == FAN_JOB_PENDING && !FAN_FAULT(BATCH_LATE);
}

void fan_fold_abandon(fan_fold *f)
{
    fan_value_drop(f->b->frontend, &f->result);
    f->result = (fan_value){.dtype = FAN_DT_NONE};
    fan_event_drop(f->early);
    f->early = NULL;
    f->batch = NULL;
}

/* S15 to S17, S22: what orders others after the sum. */
static fan_status fold_record(fan_fold *f, fan_error *err)
{
    const fan_sync_fold *plan = &f->plan.after;
    fan_stream *A = fan_fold_slot(f)->p->accum, *first = f->n ? f->terms[0].producer : NULL;
    fan_event *e = f->early;
    uint64_t bit = f->finish ? FAN_PLAN_S22_RECORD : FAN_PLAN_S15_RECORD;
    bool record = plan->slot.has_event && !(FAN_FAULT(NO_RECORD_BEHIND_SUM) && !f->finish);
    f->early = NULL;
    f->rules |= plan->rules;
    /* Left out, S15 leaves the first producer's event in place; a record that finds no memory leaves none, and S18
     * records then. */
    if (record && (fan_order_left_out(A->device) & bit))
        e = f->terms[0].event ? fan_event_hold(f->terms[0].event) : NULL;
    else if (record && !e) {
        fan_status status = fan_order_record(f->b, A, bit, &e, err);
        if (status != FAN_OK && status != FAN_ERR_NOMEM && status != FAN_ERR_DEVICE_NOMEM)
            return status;
    }
    f->ready_event = e;
    f->ready = fan_stream_hold(fan_order_stream(plan->slot.ready, &A, 1));
    if (FAN_FAULT(READY_STREAM_STAYS) && first) {
        fan_stream_drop(f->ready);
        f->ready = fan_stream_hold(first);
    }
    return FAN_OK;
}

static void fold_trace(const fan_fold *f)
{
    const fan_slot *s = fan_fold_slot(f);
    if (!fan_trace_on())
        return;
    fan_trace_line line = {.kind = FAN_TRACE_FOLD,
                           .how = s->p->accum ? fan_sync_letter(s->p->how) : '\0',
                           .device = s->p->device ? (int16_t)s->p->device->index : -1,
                           .slot = (int32_t)f->slot,
                           .count = (uint32_t)f->n,
                           .buffer = f->b->id,
                           .key = -1,
                           .rules = f->rules,
                           .stream = s->p->accum ? s->p->accum->handle : 0,
                           .bytes = fan_value_bytes(&f->result),
                           .in_place = f->plan.exclusive,
                           .start_us = -1,
                           .end_us = -1};
    snprintf(line.label, sizeof line.label, "%s", s->spec->name ? s->spec->name : f->b->name);
    fan_trace_put(&line);
}

fan_status fan_fold_end(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    if (f->batch && fan_batch_state(f->batch, f->number) == FAN_JOB_FAILED && !FAN_FAULT(BATCH_FAILURE_IGNORED))
        status = fan_batch_failure(f->batch, err);
    assert(!fan_fold_left(f));
    f->batch = NULL;
    if (status == FAN_OK)
        status = fan_fold_collect_stats(f, &f->result, err);
    if (status == FAN_OK) {
        FAN_COUNT(f->b, folds, f->n > 1);
        status = fold_record(f, err);
    }
    if (status == FAN_OK)
        fold_trace(f);
    else
        fan_fold_abandon(f);
    return status;
}

fan_status fan_fold_run(fan_fold *f, fan_error *err)
{
    FAN_TRY(fan_fold_begin(f, NULL, err));
    return fan_fold_end(f, err);
}
