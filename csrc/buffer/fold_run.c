#include "buffer/fold_run.h"

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

fan_reuse_answer fan_fold_reuse(const fan_fold *f)
{
    if (f->n == 0 || f->terms[0].v->form != FAN_FORM_DENSE)
        return FAN_REUSE_LAYOUT;
    return fan_fold_may_write(f, 0, fan_fold_accumulated(f, f->seen));
}

fan_accum_plan fan_fold_plan(const fan_fold *f)
{
    fan_side side[2] = {{.form = FAN_FORM_UNDEFINED}, {.form = FAN_FORM_UNDEFINED}};
    for (size_t i = 0; i < 2 && i < f->n; i++) {
        side[i].form = f->terms[i].v->form;
        if (side[i].form == FAN_FORM_SPARSE)
            side[i].format = (int)f->terms[i].v->sparse->format;
        if (side[i].form == FAN_FORM_DENSE && !f->forbid_in_place)
            side[i].reusable = fan_fold_may_write(f, i, fan_fold_accumulated(f, f->seen)) == FAN_REUSE_YES;
    }
    return fan_accum(side[0], side[1], f->b->create_graph);
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
    sub.known = (fan_sum_stats){.yes = false};
    fan_status status = fold_body(&sub, err);
    f->rules |= sub.rules;
    *sum = sub.result;
    return status;
}

/* From the first object on the fold is pairwise (A8), as it is for a pass that records itself (A1). */
static fan_status fold_with_objects(fan_fold *f, size_t first, fan_error *err)
{
    fan_value sum = {.dtype = FAN_DT_NONE};
    if ((f->take && f->take->scale.on) || f->out)
        return fan_fail(err, FAN_ERR_TYPE, "%s: slot %zu sums objects; scale= and out= need arrays", f->b->name,
                        f->slot);
    f->rules |= f->b->create_graph ? FAN_A(1) : FAN_A(8);
    fan_status status = fold_before_objects(f, first, &sum, err);
    if (status == FAN_OK)
        status = fan_fold_objects(f, &sum, first ? first : 1, err);
    fan_value_drop(f->b->frontend, &sum);
    return status;
}

static fan_status fold_body(fan_fold *f, fan_error *err)
{
    size_t sparse = 0, first = f->n;
    if (fan_fold_is_exact(f))
        return fan_fold_exact(f, err);
    for (size_t i = f->n; i-- > 0;) {
        sparse += f->terms[i].v->form == FAN_FORM_SPARSE;
        if (f->terms[i].v->form == FAN_FORM_OBJECT)
            first = i;
    }
    if (first < f->n)
        return fold_with_objects(f, first, err);
    if (sparse == f->n)
        return fan_fold_sparse(f, err);
    if (sparse)
        return fan_fold_mixed(f, err);
    return fan_fold_dense(f, f->finish ? fan_fold_finished(f) : fan_fold_accumulated(f, f->seen), err);
}

bool fan_fold_batches(const fan_fold *f)
{
    if (!fan_fold_slot(f)->p->accum || f->b->known || f->n == 0 || fan_fold_is_exact(f))
        return false;
    for (size_t i = 0; i < f->n; i++)
        if (f->terms[i].v->form != FAN_FORM_DENSE)
            return false;
    return true;
}

fan_status fan_fold_begin(fan_fold *f, fan_batch *batch, fan_error *err)
{
    fan_slot *s = fan_fold_slot(f);
    assert((f->n > 0 || f->state) && s->busy);
    f->before = (fan_sync_slot){.consumer = fan_stream_id_of(s->p->consumer),
                                .accum = fan_stream_id_of(s->p->accum),
                                .ready = fan_stream_id_of(f->n ? f->terms[0].producer : NULL),
                                .has_event = f->n && f->terms[0].event != NULL};
    f->result = (fan_value){.dtype = FAN_DT_NONE};
    for (size_t i = 0; i < f->n; i++)
        if (!f->terms[i].ours)
            FAN_TRY(fan_slot_still(f->b, f->slot, f->terms[i].v, f->terms[i].key, err));
    f->batch = batch;
    if (s->p->accum && FAN_FAULT(RECORD_BEFORE_SUM)) {
        fan_event_drop(f->ready_event);
        FAN_TRY(fan_order_record(f->b, s->p->accum, FAN_PLAN_S15_RECORD, &f->early, err));
    }
    fan_status status = fan_fold_figures(f, err);
    if (status == FAN_OK)
        status = fold_body(f, err);
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
    fan_stream *A = fan_fold_slot(f)->p->accum;
    fan_event *e = f->early;
    bool record;
    uint64_t bit;
    f->early = NULL;
    if (f->finish) {
        fan_sync_finish plan = fan_sync_finish_plan(f->before, f->out != NULL, fan_stream_id_of(f->taker));
        record = plan.record;
        f->rules |= plan.rules;
        bit = FAN_PLAN_S22_RECORD;
    } else {
        fan_sync_fold plan = fan_sync_fold_plan(f->before);
        record = plan.record;
        f->rules |= plan.rules;
        record = record && !FAN_FAULT(NO_RECORD_BEHIND_SUM);
        bit = FAN_PLAN_S15_RECORD;
    }
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
    f->ready = fan_stream_hold(FAN_FAULT(READY_STREAM_STAYS) && f->terms[0].producer ? f->terms[0].producer : A);
    return FAN_OK;
}

static void fold_trace(const fan_fold *f)
{
    const fan_slot *s = fan_fold_slot(f);
    if (!fan_trace_on())
        return;
    fan_trace_line line = {.kind = FAN_TRACE_FOLD,
                           .how = s->p->how,
                           .device = s->p->device ? (int16_t)s->p->device->index : -1,
                           .slot = (int32_t)f->slot,
                           .count = (uint32_t)f->n,
                           .buffer = f->b->id,
                           .key = -1,
                           .rules = f->rules,
                           .stream = s->p->accum ? s->p->accum->handle : 0,
                           .bytes = fan_value_bytes(&f->result),
                           .in_place = (f->rules & (FAN_A(6) | FAN_A(3))) != 0,
                           .start_us = -1,
                           .end_us = -1};
    snprintf(line.label, sizeof line.label, "%s", s->spec->name ? s->spec->name : f->b->name);
    fan_trace_put(&line);
}

fan_status fan_fold_end(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    if (f->batch && fan_batch_state(f->batch, f->number) == FAN_JOB_FAILED && !FAN_FAULT(BATCH_NO_FATE))
        status = fan_batch_failure(f->batch, err);
    assert(!fan_fold_left(f));
    f->batch = NULL;
    if (status == FAN_OK)
        status = fan_fold_learn(f, &f->result, err);
    if (status == FAN_OK) {
        FAN_COUNT(f->b, folds, f->n > 1);
        if (fan_fold_slot(f)->p->accum)
            status = fold_record(f, err);
        else
            f->rules |= FAN_S(3);
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
