/* take: what a consumer gets: finish each slot's sum, order the consumer's stream, empty all at the
 * end (S18, S19, S22, A14, D11, D21). */
#include "array/nditer.h"
#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/fold.h"
#include "buffer/plain.h"
#include "buffer/slot.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"
#include "buffer/stats.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* One slot's way through take. */
typedef struct take_slot {
    size_t slot;
    const fan_value *out; /* where the caller wants the sum; NULL: it has no out= */
    fan_stream *consumer; /* no hold; NULL: none */
    fan_gathered gathered;
    bool claimed, has_gathered;
    fan_take_plan plan;
    bool planned_again;       /* its plan was made again once no other slot could fail any more */
    bool out_overlaps_inputs; /* D11 */
    bool begun;               /* its fold has begun, and waits in the batch */
    bool handed;              /* the consumer is ordered after it */
    fan_value result;
    fan_stream *ready;
    fan_event *ready_event;
    uint8_t origin, rank;
    fan_sum_stats sum_stats;
} take_slot;

/* One take: the slots that it takes, and what their steps share. */
typedef struct take_op {
    fan_buffer *b;
    const fan_take *options;
    take_slot *slots;
    size_t n;
    fan_extents inputs, outs; /* which memory meets which out= (D11) */
    fan_batch *batch;         /* sums on streams, queued together; NULL: one by one */
} take_op;

/* ---- which memory meets which out= (D11) ---- */

static bool take_out_overlaps_inputs(const fan_extents *inputs, const fan_array *out, size_t slot)
{
    size_t at = inputs->n;
    if (!at)
        return false;
    for (const fan_extent_entry *x;
         (x = fan_extents_next(inputs, fan_extent_of(out), &at)) != NULL;)
        if (x->owner != slot || !x->flag || !fan_array_same_view(out, x->array))
            return true;
    return false;
}

static bool take_written_by_out(const fan_extents *outs, const fan_value *v)
{
    fan_array *own[3];
    size_t n;
    fan_array *const *all = fan_value_arrays(v, own, &n);
    for (size_t i = 0; outs->n && i < n; i++) {
        size_t at = outs->n;
        if (fan_extents_next(outs, fan_extent_of(all[i]), &at))
            return true;
    }
    return false;
}

/* Whether out= lies where one of the slot's own terms lies. */
static bool take_out_overlaps_own(const take_slot *c)
{
    const fan_fold *f = &c->gathered.fold;
    for (size_t i = 0; i < f->n; i++)
        if (f->terms[i].v->form == FAN_FORM_DENSE &&
            !fan_array_extents_disjoint(c->out->array, f->terms[i].v->array))
            return true;
    return false;
}

/* ---- 1. claim, and 2. gather: what the slots hold, checked against the options of the call
 * ---- */

/* take_scale_fits: whether the scale is one for sums of this dtype. */
static bool take_scale_fits(const fan_take *options, fan_dtype d)
{
    char kind = d == FAN_DT_NONE ? 'c' : fan_dtype_kind(d);
    return !options->scale.on || kind == 'c' ||
           (options->real && (kind == 'f' || options->integral));
}

static fan_status take_check_out(const take_op *t, const take_slot *c, fan_error *err)
{
    const fan_buffer *b = t->b;
    const fan_slot *s = &b->slots[c->slot];
    const fan_value *out = c->out;
    const int64_t *shape = NULL;
    char has[160], wants[160];
    const fan_fold *f = &c->gathered.fold;
    const fan_value *any = f->n ? f->terms[0].v : c->gathered.zero;
    fan_dtype d = fan_fold_dtype(f);
    int ndim = any ? fan_value_shape(any, &shape) : -1;
    if (f->state && ndim < 0) {
        ndim = s->state->ndim;
        shape = s->state->shape;
    }
    if (ndim < 0)
        return any ? fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, c->slot, -1),
                                 "sums objects; out= needs arrays")
                   : FAN_OK;
    if (s->spec->has_shape) {
        ndim = s->spec->ndim;
        shape = s->spec->shape;
    }
    if (ndim != out->array->ndim ||
        memcmp(shape, out->array->shape, (size_t)ndim * sizeof *shape) != 0)
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, c->slot, -1),
                           "out= has shape %s, the sum %s",
                           fan_shape_text(out->array->ndim, out->array->shape, has, sizeof has),
                           fan_shape_text(ndim, shape, wants, sizeof wants));
    if (d != FAN_DT_NONE && !fan_dtype_can_cast(d, out->dtype))
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, c->slot, -1),
                           "out= of dtype %s cannot take a sum of dtype %s",
                           fan_dtype_name(out->dtype), fan_dtype_name(d));
    if (s->state->device && out->device != s->state->device)
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, c->slot, -1),
                           "out= is on %s, the sum on %s%s",
                           fan_device_text(out->device, has, sizeof has),
                           fan_device_text(s->state->device, wants, sizeof wants),
                           fan_device_of_another(out->device, s->state->device));
    return FAN_OK;
}

static fan_status take_gather(take_op *t, fan_error *err)
{
    fan_buffer *b = t->b;
    for (size_t i = 0; i < t->n; i++) {
        take_slot *c = &t->slots[i];
        const fan_fold *f = &c->gathered.fold;
        fan_slot *s = &b->slots[c->slot];
        fan_slot_lock(b, c->slot);
        fan_status status = fan_slot_in_target(b, c->slot, "take", err);
        if (status == FAN_OK &&
            (status = fan_slot_claim_all(b, c->slot, true, "take", err)) == FAN_OK) {
            status = fan_slot_poisoned(b, c->slot, err);
            if (status == FAN_OK && fan_slot_missing(s, 0) != 0) {
                char got[24];
                snprintf(got, sizeof got, "%" PRId64, s->state->count);
                status = fan_slot_fail_count(b, c->slot, -1, got, err);
            }
            if (status != FAN_OK)
                fan_slot_let_go(b, c->slot);
        }
        fan_slot_unlock(b, c->slot);
        FAN_TRY(status);
        c->claimed = true;
        /* The buffer's, unless it was redirected (S7); a slot of zeros alone has none. */
        fan_stream *own = s->state->consumer;
        c->consumer = t->options->stream ? t->options->stream : own ? own : b->stream;
        FAN_TRY(fan_gather(b, c->slot, SIZE_MAX, true, &c->gathered, err));
        c->has_gathered = true;
        for (size_t j = 0; j < f->n; j++)
            if (f->terms[j].v->form == FAN_FORM_OBJECT && (t->options->scale.on || c->out))
                return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(t->b, c->slot, -1),
                                   "sums objects; scale= and out= need arrays");
        const fan_take *options = t->options;
        fan_dtype d = fan_fold_dtype(f);
        const char *article = d != FAN_DT_NONE && fan_dtype_name(d)[0] == 'i' ? "an" : "a";
        if (!take_scale_fits(options, d) && !options->real)
            return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, c->slot, -1),
                               "scale=%.12g%+.12gj: %s %s sum needs a real number",
                               options->scale.re, options->scale.im, article, fan_dtype_name(d));
        if (!take_scale_fits(options, d))
            return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, c->slot, -1),
                               "scale=%.12g: %s %s sum needs an integer%s", options->scale.re,
                               article, fan_dtype_name(d),
                               (options->scale.re < 0x1p63 && options->scale.re >= -0x1p63)
                                   ? ""
                                   : " that fits int64");
        if (c->out)
            FAN_TRY(take_check_out(t, c, err));
        FAN_TRY(fan_gathered_check(&c->gathered, err));
    }
    if (!t->options->out)
        return FAN_OK;
    /* Collects the extents of all inputs and of all outs, for a take with out=. */
    size_t most = 0, given = 0;
    for (size_t i = 0; i < t->n; i++) {
        const fan_fold *f = &t->slots[i].gathered.fold;
        given += t->slots[i].out != NULL;
        most += 3 * f->n;
        for (size_t j = 0; j < f->n; j++)
            most += f->terms[j].v->nparts;
    }
    t->inputs.all = fan_alloc((most + 1) * sizeof *t->inputs.all);
    t->outs.all = fan_alloc((given + 1) * sizeof *t->outs.all);
    if (!t->inputs.all || !t->outs.all)
        return fan_buffer_fail_memory(t->b, err);
    for (size_t i = 0; i < t->n; i++) {
        const take_slot *c = &t->slots[i];
        if (c->out)
            fan_extents_put(&t->outs, c->out->array, c->slot, true);
        for (size_t j = 0; j < c->gathered.fold.n; j++) {
            const fan_value *v = c->gathered.fold.terms[j].v;
            fan_array *own[3];
            size_t n;
            fan_array *const *all = fan_value_arrays(v, own, &n);
            for (size_t k = 0; k < n; k++)
                fan_extents_put(&t->inputs, all[k], c->slot, v->form == FAN_FORM_DENSE);
        }
    }
    fan_extents_sort(&t->inputs);
    fan_extents_sort(&t->outs);
    const fan_extent_entry *x, *y;
    if (fan_extents_any_pair(&t->outs, &x, &y))
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_buffer_place(t->b),
                           "out= of slots %zu and %zu may share memory",
                           x->owner < y->owner ? x->owner : y->owner,
                           x->owner < y->owner ? y->owner : x->owner);
    for (size_t i = 0; i < t->n; i++) {
        take_slot *c = &t->slots[i];
        c->out_overlaps_inputs =
            c->out && take_out_overlaps_inputs(&t->inputs, c->out->array, c->slot);
    }
    return FAN_OK;
}

/* ---- 3. sum: planned (A14, D11, D21), then made ---- */

/* D13: a slot fed only zeros gives the first one, or one of the sum's dtype and the declared
 * shape. */
static fan_status take_zeros(fan_buffer *b, size_t slot, const fan_value *zero, fan_dtype sum,
                             fan_value *out, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_array *z = zero->array;
    int ndim = s->spec->has_shape ? s->spec->ndim : z->ndim;
    const int64_t *shape = s->spec->has_shape ? s->spec->shape : z->shape;
    fan_array *one = NULL, *whole = NULL;
    if (zero->dtype == sum && fan_accum_fit(false, ndim, shape, z->ndim, z->shape) == FAN_FIT_EXACT)
        return fan_value_copy(b->frontend, zero, out, err);
    FAN_TRY(fan_array_new(sum, 0, NULL, NULL, &one, err));
    fan_fill_zero(one);
    fan_status status = fan_array_broadcast(one, ndim, shape, &whole, err);
    fan_array_drop(one);
    if (status == FAN_OK)
        *out = (fan_value){
            .form = FAN_FORM_ZERO, .dtype = sum, .origin = zero->origin, .array = whole};
    return status;
}

/* Takes over the result of the fold. */
static fan_status take_end_fold(const take_op *t, take_slot *c, fan_error *err)
{
    fan_slot_state *p = t->b->slots[c->slot].state;
    fan_gathered *g = &c->gathered;
    fan_fold *f = &g->fold;
    c->begun = false;
    if (c->plan.way == FAN_TAKE_COMMIT) {
        FAN_TRY(fan_fold_commit_end(t->b, c->slot, g, err));
        c->ready = fan_stream_hold(g->sum->producer);
        c->ready_event = fan_event_hold(g->sum->event);
        c->sum_stats = fan_sum_stats_hold(&p->sum_stats);
        return fan_value_copy(t->b->frontend, &g->sum->value, &c->result, err);
    }
    FAN_TRY(fan_fold_end(f, err));
    c->sum_stats = fan_sum_stats_move(&f->sum_stats);
    c->result = f->result;
    f->result = fan_value_none();
    c->ready = f->ready;
    c->ready_event = f->ready_event;
    f->ready = NULL;
    f->ready_event = NULL;
    p->rules |= f->rules;
    return FAN_OK;
}

/* Ends the folds of slots [from, to) that are in the batch; `failed`: some slot did, and nothing
 * more is queued. A slot whose sum was not queued is as it was. */
static fan_status take_end_folds(const take_op *t, size_t from, size_t to, bool failed,
                                 fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!t->batch)
        return FAN_OK;
    if (!failed && !FAN_FAULT(BATCH_LATE))
        fan_batch_flush(t->batch);
    for (size_t i = from; i < to; i++) {
        take_slot *c = &t->slots[i];
        fan_error *first = status == FAN_OK ? err : &other;
        if (!c->begun)
            continue;
        if (fan_fold_left(&c->gathered.fold)) {
            fan_fold_abandon(&c->gathered.fold);
            c->begun = false;
            continue;
        }
        fan_status its = take_end_fold(t, c, first);
        fan_slot_fail(t->b, c->slot, its, first);
        status = status == FAN_OK ? its : status;
    }
    if (!failed && FAN_FAULT(BATCH_LATE))
        fan_batch_flush(t->batch);
    if (status == FAN_OK)
        status = fan_batch_failure(t->batch, err);
    fan_batch_clear(t->batch);
    return status;
}

static fan_status take_fold(const take_op *t, take_slot *c, fan_error *err)
{
    fan_fold *f = &c->gathered.fold;
    if (t->batch && fan_fold_batches(f)) {
        FAN_TRY(fan_fold_begin(f, t->batch, err));
        c->begun = true;
        return FAN_OK;
    }
    if (t->batch)
        fan_batch_flush(t->batch); /* the device's order is that of the slots */
    FAN_TRY(fan_fold_begin(f, NULL, err));
    return take_end_fold(t, c, err);
}

static fan_status take_plan_and_sum(const take_op *t, take_slot *c, bool last, fan_error *err)
{
    fan_buffer *b = t->b;
    fan_gathered *g = &c->gathered;
    fan_fold *f = &g->fold;
    const fan_slot *s = &b->slots[c->slot];
    fan_take_facts facts = {
        .terms = f->n, .has_state = f->state, .has_zero = g->zero, .last = last};
    for (size_t i = 0; i < f->n; i++) {
        facts.dense += f->terms[i].v->form == FAN_FORM_DENSE;
        facts.sparse += f->terms[i].v->form == FAN_FORM_SPARSE;
        facts.objects += f->terms[i].v->form == FAN_FORM_OBJECT;
    }
    fan_dtype sum = fan_fold_dtype(f);
    facts.has_out = c->out;
    facts.out_overlaps_inputs = c->out_overlaps_inputs;
    facts.stats = t->b->sum_stats != NULL;
    facts.out_overlaps_own = facts.has_out && facts.stats && take_out_overlaps_own(c);
    facts.scaled = t->options->scale.on;
    facts.writable = t->options->writable || (f->n == 1 && fan_is_lent(b, NULL, f->terms[0].v));
    facts.exact = fan_fold_is_exact(f);
    facts.widened = !facts.objects && fan_accum_dtype(sum, s->spec->accumulate) != sum;
    facts.expanded = fan_fold_expanded(f) != 0;
    size_t n = g->n - g->has_sum;
    facts.whole = s->state->keyed < 0 || !n ||
                  (uint64_t)fan_entry_key(&g->entries[g->n - 1]) == s->state->next_key + n - 1;
    facts.alone = t->n == 1;
    if (f->n) {
        facts.first_donated = f->terms[0].donated;
        facts.same_dtype = f->terms[0].v->dtype == sum;
        facts.summed = f->terms[0].is_value && s->list->summed > 1;
        facts.loose = f->terms[0].v->form == FAN_FORM_SPARSE && !f->terms[0].v->sparse->coalesced &&
                      !FAN_FAULT(SUM_LEFT_LOOSE);
    }
    if (f->n == 1 && !facts.has_out && !facts.scaled) {
        facts.overwritten = take_written_by_out(&t->outs, f->terms[0].v);
        if (facts.writable && !facts.objects)
            facts.reuse = fan_term_may_write(f, 0, FAN_WRITER_TAKER);
    }
    c->plan = fan_plan_take(&facts);
    f->taker = c->consumer;
    c->origin = g->like.origin;
    c->rank = g->like.rank;
    if (c->plan.rules)
        b->slots[c->slot].state->rules |= c->plan.rules;
    if (c->plan.counts)
        FAN_COUNT(b, copies, 1);
    switch (c->plan.way) {
    case FAN_TAKE_ZERO:
        return take_zeros(b, c->slot, g->zero, fan_fold_dtype(f), &c->result, err);
    case FAN_TAKE_HAND: {
        /* A14. With stats, on a device with streams, it is measured on A first, and is ready there
         * then. */
        fan_stream *R = NULL;
        if (fan_fold_first_suspect(f)) {
            c->sum_stats = fan_sum_stats_hold(&t->b->slots[c->slot].state->sum_stats);
        } else {
            FAN_TRY(fan_fold_measure_term(f, &R, err));
            c->sum_stats = fan_sum_stats_move(&f->sum_stats);
        }
        c->ready = fan_stream_hold(R ? R : f->terms[0].producer);
        c->ready_event = R ? NULL : fan_event_hold(f->terms[0].event);
        return fan_value_copy(t->b->frontend, f->terms[0].v, &c->result, err);
    }
    case FAN_TAKE_FINISH:
        f->finish = true;
        f->take = t->options;
        f->finish_dtype = c->out ? c->out->dtype : FAN_DT_NONE;
        return take_fold(t, c, err);
    case FAN_TAKE_COMMIT:
        return take_fold(t, c, err);
    case FAN_TAKE_LATE:
        c->planned_again = true;
        return FAN_OK;
    default:
        return FAN_OK;
    }
}

/* ---- 4. order: the consumer's stream, the copies into out=, what is measured ---- */

/* The stream that writes a sum into `out` (a hold): A, where the sum was made. A slot that was fed
 * symbolic zeros alone has no A: then the stream of the taker, or the current stream of the
 * device. */
static fan_stream *take_writer(const fan_slot_state *p, const fan_fold *f, const fan_value *out)
{
    if (p->accum || !out->device->backend->has_streams)
        return fan_stream_hold(p->accum);
    return f->taker && f->taker->device == out->device ? fan_stream_hold(f->taker)
                                                       : fan_stream_current(out->device);
}

/* A sum that is there already goes into out: copied, or, if it is sparse, its entries over
 * zeros. */
static fan_status take_copy_into_out(const take_op *t, const take_slot *c, fan_stream *A,
                                     fan_error *err)
{
    const fan_value *out = c->out;
    fan_operand one = {c->result.array, out->dtype};
    FAN_COUNT(t->b, copies, 1);
    FAN_COUNT(t->b, passes, 1);
    if (c->result.form == FAN_FORM_DENSE)
        return fan_device_run(
            out->device, A,
            &(fan_job){
                .kind = FAN_JOB_COPY, .out = out->array, .in = &one, .n = 1, .label = "copy"},
            err);
    FAN_TRY(fan_device_run(
        out->device, A, &(fan_job){.kind = FAN_JOB_ZERO, .out = out->array, .label = "fill"}, err));
    if (c->result.form == FAN_FORM_SPARSE)
        FAN_TRY(fan_device_run(out->device, A,
                               &(fan_job){.kind = FAN_JOB_SCATTER,
                                          .out = out->array,
                                          .sparse = c->result.sparse,
                                          .label = "scatter"},
                               err));
    return FAN_OK;
}

/* S22, for a copy that runs on `on`; *plan orders others after it. */
static fan_status take_order_copy(const take_op *t, take_slot *c, fan_stream *on,
                                  fan_sync_fold *plan, fan_error *err)
{
    fan_fold *f = &c->gathered.fold;
    const fan_slot_state *p = t->b->slots[c->slot].state;
    if (!on && c->out->device->backend->has_streams)
        return fan_buffer_fail_memory(t->b, err);
    if (on)
        FAN_TRY(fan_order_consumer(f->taker, on, NULL, &f->taker, err));
    fan_stream_id id = fan_stream_id_of(on);
    fan_sync_slot slot = {
        .consumer = p->accum ? fan_stream_id_of(p->consumer) : id, .accum = id, .ready = id};
    *plan = fan_sync_finish_plan(slot, true, fan_stream_id_of(f->taker));
    f->out = c->out;
    return fan_order_wait_taker(f, on, plan, err);
}

static fan_status take_order(const take_op *t, take_slot *c, fan_error *err)
{
    fan_slot_state *p = t->b->slots[c->slot].state;
    if (c->handed)
        return FAN_OK;
    c->handed = true;
    bool sparse_into_out = c->plan.copy_out && c->result.form == FAN_FORM_SPARSE;
    if (c->plan.copy_out) {
        fan_buffer *b = t->b;
        fan_value sum = c->result;
        fan_sync_fold plan = {.rules = 0};
        fan_stream *on = take_writer(p, &c->gathered.fold, c->out);
        fan_status status = take_order_copy(t, c, on, &plan, err);
        if (status == FAN_OK)
            status = take_copy_into_out(t, c, on, err);
        fan_stream_drop(c->ready);
        c->ready = on;
        FAN_TRY(status);
        p->rules |= plan.rules;
        fan_event_drop(c->ready_event);
        c->ready_event = NULL;
        if (plan.slot.has_event)
            FAN_TRY(fan_order_record(b, on, FAN_PLAN_S22_RECORD, &c->ready_event, err));
        c->result = fan_value_none();
        fan_value_drop(b->frontend, &sum);
        FAN_TRY(fan_value_copy(b->frontend, c->out, &c->result, err));
    }
    if (c->result.form != FAN_FORM_UNDEFINED)
        FAN_TRY(fan_order_hand_over(t->b, c->slot, &c->result, p->consumer, p->accum, c->ready,
                                    c->ready_event, c->consumer, &p->rules, err));
    if (!t->b->sum_stats)
        return FAN_OK;
    /* With stats: what the sum's own pass has not measured. A sum that is undefined or no array has
     * UINT64_MAX elements; zeros that went into an out are zeros. */
    fan_fold *f = &c->gathered.fold;
    /* They are those of all elements of out, not of the stored ones. On the host nothing may fail
     * any more. */
    bool on_host = sparse_into_out && !c->out->device->backend->has_streams;
    if (on_host)
        fan_sum_stats_of_out(t->b, c->out->array, &c->sum_stats);
    else if (sparse_into_out)
        fan_sum_stats_drop(&c->sum_stats);
    fan_sum_stats was = c->sum_stats;
    if (c->result.form == FAN_FORM_UNDEFINED || c->result.form == FAN_FORM_OBJECT) {
        fan_sum_stats_drop(&c->sum_stats);
        c->sum_stats = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
        return FAN_OK;
    }
    if (!was.valid && c->plan.copy_out && f->n == 0 && !f->state) {
        c->sum_stats = (fan_sum_stats){
            .valid = true, .stats = {.count = (uint64_t)c->result.array->size, .bad = SIZE_MAX}};
        return FAN_OK;
    }
    f->sum_stats = was;
    c->sum_stats = (fan_sum_stats){.valid = false};
    FAN_TRY(fan_fold_collect_stats(f, &c->result, err));
    c->sum_stats = fan_sum_stats_move(&f->sum_stats);
    if (p->sum_stats.has_nonfinite) {
        c->sum_stats.has_nonfinite = true;
        c->sum_stats.nonfinite_key = p->sum_stats.nonfinite_key;
    }
    return FAN_OK;
}

/* ---- the steps of a take ---- */

typedef enum take_step {
    TAKE_SUM,
    /* nothing but these sums can fail any more: they write into donated terms */
    TAKE_SUM_LATE,
    /* sums without `out`, before any out is written: to show one to the user may fail */
    TAKE_ORDER_RETURNED,
    /* on the CPU nothing is allocated here: either all outs are written or none */
    TAKE_WRITE_OUT,
    TAKE_ORDER /* the others, and the copies into `out` */
} take_step;

static fan_status take_step_of_slot(const take_op *t, take_slot *c, take_step step, fan_error *err)
{
    fan_fold *f = &c->gathered.fold;
    switch (step) {
    case TAKE_SUM:
        return take_plan_and_sum(t, c, false, err);
    case TAKE_SUM_LATE:
        return c->planned_again ? take_plan_and_sum(t, c, true, err) : FAN_OK;
    case TAKE_ORDER_RETURNED:
        return c->out ? FAN_OK : take_order(t, c, err);
    case TAKE_WRITE_OUT:
        if (c->plan.way != FAN_TAKE_INTO_OUT)
            return FAN_OK;
        f->finish = true;
        f->take = t->options;
        f->out = c->out;
        return take_fold(t, c, err);
    default:
        return take_order(t, c, err);
    }
}

/* One step, for every slot before the next step begins. The sums that it put into the batch are
 * ended after it. */
static fan_status take_each_slot(const take_op *t, take_step step, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    size_t ended = 0;
    for (size_t i = 0; i < t->n && status == FAN_OK; i++) {
        status = take_step_of_slot(t, &t->slots[i], step, err);
        fan_slot_fail(t->b, t->slots[i].slot, status, err);
        if (status == FAN_OK && t->batch && fan_batch_bytes(t->batch) >= FAN_BATCH_BYTES) {
            status = take_end_folds(t, ended, i + 1, false, err);
            ended = i + 1;
        }
    }
    bool failed = status != FAN_OK;
    fan_status its = take_end_folds(t, ended, t->n, failed, failed ? &other : err);
    return failed ? status : its;
}

static void take_name_origin(take_slot *c)
{
    if (c->result.form == FAN_FORM_UNDEFINED || c->result.form == FAN_FORM_ZERO)
        return;
    c->result.origin = c->origin;
    c->result.rank = c->rank;
}

/* Order: 1. all sums; 2. sums written straight into `out`; 3. copies into `out`. An `out` may alias
 * an input of another slot, so nothing is written while an input is still unread. */
static fan_status take_all(take_op *t, fan_error *err)
{
    fan_status status = FAN_OK;
    bool streams = false, late = false;
    for (size_t i = 0; i < t->n; i++)
        streams |= t->b->slots[t->slots[i].slot].state->accum != NULL;
    if (streams && t->n > 1 && !t->b->sum_stats && !(t->batch = fan_batch_new()))
        return fan_buffer_fail_memory(t->b, err);
    FAN_GO(take_each_slot(t, TAKE_SUM, err));
    for (size_t i = 0; i < t->n; i++)
        late |= t->slots[i].planned_again;
    if (late)
        FAN_GO(take_each_slot(t, TAKE_SUM_LATE, err));
    for (size_t i = 0; late && i < t->n; i++)
        t->slots[i].gathered.fold.may_end = false;
    FAN_GO(take_each_slot(t, TAKE_ORDER_RETURNED, err));
    /* The user may keep a sum that was shown, even if the take then fails because of another slot:
     * so what stays in the slot is not written any more. */
    const fan_take *options = t->options;
    for (size_t i = 0; options->show && i < t->n; i++) {
        take_slot *c = &t->slots[i];
        if (c->out) {
            if (c->plan.way == FAN_TAKE_INTO_OUT || c->plan.copy_out)
                FAN_GO(options->show(options->ctx, i, NULL, err));
            continue;
        }
        for (size_t k = 0; k < fan_slot_entries(&t->b->slots[c->slot]); k++) {
            fan_entry *one = &t->b->slots[c->slot].list->entries[k];
            if (one->general) {
                one->item->exposed = one->item->shown = true;
                if (one->item->donated) /* the promise was one until the take */
                    fan_value_returned(&one->item->value);
                one->item->donated = false;
            } else {
                one->exposed = true;
                one->donated = false;
            }
        }
        take_name_origin(c);
        FAN_GO(options->show(options->ctx, i, &c->result, err));
    }
    /* A sum of objects has run others' code: checks that each `out` still lies where it lay. */
    const fan_buffer *b = t->b;
    for (size_t i = 0; i < t->n; i++) {
        const take_slot *c = &t->slots[i];
        if (c->out && !fan_value_unmoved(b, c->out))
            FAN_GO(fan_fail_at(err, FAN_ERR_STATE, 0, fan_slot_place(b, c->slot, -1),
                               "the memory, dtype or shape of out= was changed during the take"));
    }
    if (t->options->out) {
        FAN_GO(take_each_slot(t, TAKE_WRITE_OUT, err));
        status = take_each_slot(t, TAKE_ORDER, err);
    }
done:
    fan_batch_free(t->batch);
    return status;
}

/* ---- 5. hand over: the slots are empty and free ---- */

fan_status fan_buffer_take(fan_buffer *b, const fan_take *options, fan_value *results,
                           fan_error *err)
{
    FAN_TRY(fan_buffer_check_fork(b, err));
    if (options->one)
        FAN_TRY(fan_slot_check(b, options->slot, err));
    take_op t = {.b = b, .options = options, .n = options->one ? 1 : b->nslots};
    t.slots = fan_calloc((t.n ? t.n : 1) * sizeof *t.slots);
    fan_slot_state **gone = fan_calloc((t.n ? t.n : 1) * sizeof *gone);
    if (!t.slots || !gone) {
        fan_free(t.slots);
        fan_free(gone);
        return fan_buffer_fail_memory(b, err);
    }
    for (size_t i = 0; i < t.n; i++) {
        t.slots[i].slot = options->one ? options->slot : i;
        t.slots[i].out =
            options->out && options->out[i].form == FAN_FORM_DENSE ? &options->out[i] : NULL;
    }
    fan_status status = take_gather(&t, err);
    if (status == FAN_OK)
        status = take_all(&t, err);
    fan_free(t.inputs.all);
    fan_free(t.outs.all);
    for (size_t i = 0; i < t.n && t.slots[i].claimed; i++) {
        take_slot *c = &t.slots[i];
        if (status == FAN_OK && fan_trace_on() && c->result.form != FAN_FORM_UNDEFINED) {
            const fan_slot *s = &t.b->slots[c->slot];
            const fan_device *d = c->consumer ? c->consumer->device : s->state->device;
            fan_slot_trace(
                t.b, c->slot,
                (fan_trace_line){.kind = FAN_TRACE_TAKE,
                                 .how = s->state->accum ? fan_sync_letter(s->state->how) : '\0',
                                 .device = d && d->id ? (int16_t)d->index : -1,
                                 .count = (uint32_t)s->state->count,
                                 .key = -1,
                                 .rules = s->state->rules,
                                 .stream = c->consumer ? c->consumer->handle : 0,
                                 .bytes = fan_value_bytes(&c->result)});
        }
        fan_slot_lock(b, c->slot);
        if (status == FAN_OK) {
            gone[i] = fan_slot_cut(b, &b->slots[c->slot]);
            if (b->sum_stats) {
                fan_sum_stats old = b->sum_stats[c->slot];
                b->sum_stats[c->slot] = c->sum_stats;
                c->sum_stats = old;
            }
        }
        fan_slot_let_go(b, c->slot);
        fan_slot_unlock(b, c->slot);
    }
    for (size_t i = 0; i < t.n; i++) {
        take_slot *c = &t.slots[i];
        if (status == FAN_OK) {
            take_name_origin(c);
            results[i] = c->result;
        } else {
            fan_value_drop(b->frontend, &c->result);
        }
        fan_sum_stats_drop(&c->sum_stats);
        fan_stream_drop(c->ready);
        fan_event_drop(c->ready_event);
        if (c->has_gathered)
            fan_gathered_fini(&c->gathered);
        /* the consumer has waited for what was pooled */
        if (gone[i] && gone[i] != &fan_slot_state_none) {
            fan_stream_drop(gone[i]->capture_origin);
            gone[i]->capture_origin = NULL;
        }
        fan_slot_state_free(b, gone[i]);
    }
    fan_free(t.slots);
    fan_free(gone);
    return status;
}

/* ---- slots that hold plain entries alone (plain.h): the constant plan ---- */

#define TAKE_AHEAD 8
#define TAKE_FEW_OUTS 8
#define TAKE_FAR 500 /* slots that no near cache holds */

/* One take of such slots. */
typedef struct take_plain {
    fan_buffer *b;
    fan_span span;
    const fan_take *options;
    const fan_plain_outs *outs;
    void **results;
    fan_flat inline_outs[TAKE_FEW_OUTS], *written; /* the arrays of the caller's that are written */
    /* of each slot: the caller named an array for its sum */
    bool inline_given[TAKE_FEW_OUTS], *given;
    size_t nwritten;
    void *scratch; /* for the sum that needs the most of it; owned */
    size_t nscratch;
    bool calls;    /* some entries are of a kind that is checked at use */
    bool announce; /* some of the arrays that are written are of a library that counts writes */
} take_plain;

static fan_list *take_list(const fan_buffer *b, size_t slot)
{
    return b->slots[slot].list;
}

/* take_defined: the entries of a slot's sum; 0: it is undefined. */
static size_t take_defined(const fan_list *p)
{
    return p ? fan_list_defined(p) : 0;
}

static const fan_scale *take_scale(const fan_take *options)
{
    return options->scale.on ? &options->scale : NULL;
}

/* take_plain_scales: whether sums of dtype d are scaled here. The general path reports what is
 * wrong with a scale. */
static bool take_plain_scales(const fan_take *options, fan_dtype d, fan_dtype acc)
{
    if (!take_scale_fits(options, d))
        return false;
    bool complex_wider = fan_dtype_kind(d) == 'c' && acc != d;
    return !complex_wider && fan_scale_dtype(&options->scale, acc) == acc;
}

/* 1. claim. False: the slot holds something else, or lacks a contribution. */
static bool take_plain_claim_slot(fan_buffer *b, size_t slot, const fan_take *options)
{
    fan_slot *s = &b->slots[slot];
    fan_list *p = s->list;
    if (fan_slot_has_state(s) || s->busy || s->targets || fan_plain_stats_on_device(b, slot) ||
        fan_slot_missing(s, 0) != 0)
        return false;
    if (p && p->n) {
        fan_dtype d = p->kind.dtype;
        if (options->scale.on && fan_list_defined(p) &&
            !take_plain_scales(options, d, fan_plain_accum(b, slot)))
            return false;
        fan_list_sort(p);
        if (p->undefined)
            fan_list_undefined_last(p);
    }
    fan_plain_claim(s);
    return true;
}

static void take_plain_give_back(fan_buffer *b, fan_span span)
{
    for (size_t i = span.first; i < span.end; i++) {
        fan_list *p = take_list(b, i);
        if (p && p->undefined && p->entries[0].key >= 0)
            fan_list_by_key(p);
    }
    fan_plain_release(b, span);
}

/* take_stays_in_int64: of a sum of Python ints. */
static bool take_stays_in_int64(const fan_list *p, const fan_take *options)
{
    int64_t total = 0, n;
    bool over = options->scale.on;
    for (size_t k = 0; k < fan_list_defined(p) && !over; k++) {
        memcpy(&n, fan_entry_data(&p->kind, &p->entries[k]), sizeof n);
        over = __builtin_add_overflow(total, n, &total);
    }
    return !over;
}

/* take_fetch: prefetches what belongs to the entries of a slot TAKE_AHEAD of this one. */
static void take_fetch(const take_plain *t, size_t slot, bool memory)
{
    size_t at = slot + TAKE_AHEAD < t->span.end ? slot + TAKE_AHEAD : slot;
    const fan_list *p = take_list(t->b, at);
    fan_plain_prefetch(t->b, slot + 2 * TAKE_AHEAD);
    for (size_t k = 0; k < take_defined(p); k++)
        __builtin_prefetch(memory ? (const void *)p->entries[k].data : p->entries[k].object);
}

/* take_keys_whole: no key is missing (A15). */
static bool take_keys_whole(const fan_list *p)
{
    if (p->entries[0].key < 0)
        return true;
    int64_t defined_last = p->entries[fan_list_defined(p) - 1].key, last = p->entries[p->n - 1].key,
            from = p->summed ? p->entries[0].key : 0;
    /* they are all different */
    return (last > defined_last ? last : defined_last) - from == (int64_t)p->n - 1;
}

/* 2. gather: how the sum of a slot reaches its taker (A14). */
static inline fan_take_way take_plain_way(const fan_buffer *b, size_t slot, const fan_take *options,
                                          const fan_list *p, size_t n, fan_dtype acc)
{
    fan_take_facts facts = {.terms = n,
                            .dense = n,
                            .scaled = options->scale.on,
                            .writable = options->writable ||
                                        (n == 1 && fan_is_lent(b, p->entries[0].object, NULL)),
                            .widened = acc != p->kind.dtype,
                            .whole = n == 1 || take_keys_whole(p),
                            .alone = options->one || b->nslots == 1,
                            .first_donated = p->entries[0].donated,
                            .same_dtype = !p->entries[0].wide};
    if (n == 1 && facts.writable)
        facts.reuse = fan_plain_may_write(b, slot, 1, p->kind.dtype);
    return fan_plan_take(&facts).way;
}

/* What the sum is written into, or is already: the first entry, or a fresh one, whose hold is the
 * caller's. NULL: it is for the general path. */
static inline void *take_plain_place(const fan_buffer *b, size_t slot, const fan_take *options,
                                     fan_list *p, size_t n, fan_dtype acc)
{
    fan_take_way way = take_plain_way(b, slot, options, p, n, acc);
    p->out = p->entries[0].data;
    if (way == FAN_TAKE_HAND)
        return p->entries[0].object;
    /* Nothing fails once a donated one is written (FAN_TAKE_LATE). */
    return fan_plain_place(b, slot, n, acc, way == FAN_TAKE_COMMIT || way == FAN_TAKE_LATE,
                           &p->out);
}

/* The sum of numbers, as a number with the caller's hold. */
static void *take_plain_number(const take_plain *t, size_t slot, const fan_list *p, size_t n,
                               fan_dtype acc)
{
    _Alignas(16) char value[16];
    if (take_plain_way(t->b, slot, t->options, p, n, acc) == FAN_TAKE_HAND) {
        t->b->frontend->plain->hold(p->entries[0].object);
        return p->entries[0].object;
    }
    fan_plain_fold(t->b, p, n, acc, take_scale(t->options), value, t->scratch, NULL);
    return t->b->frontend->plain->number(&p->kind, value);
}

/* The caller's array, where there is one for this slot; false: it is for the general path. */
static bool take_plain_place_out(take_plain *t, size_t slot)
{
    fan_list *p = take_list(t->b, slot);
    fan_flat *to = &t->written[t->nwritten];
    bool some = take_defined(p);
    void *object = NULL;
    fan_plain_where where =
        t->outs->at(t->outs->ctx, slot, some ? &p->kind : NULL, &object, &to->data, &to->bytes);
    if (where != FAN_PLAIN_THERE)
        return where != FAN_PLAIN_REFUSED;
    to->owner = slot;
    t->nwritten++;
    t->given[slot - t->span.first] = true;
    if (some) {
        t->announce = t->announce || p->kind.check_at_use;
        t->results[slot - t->span.first] = object;
        p->out = to->data;
    } else {
        t->b->frontend->drop(object);
    }
    return true;
}

/* D11: whether sums may be written to the outs in any order: none meets another, nor what is still
 * read, but for an entry of its own slot that is all of it. Sorts them by address. */
static bool take_plain_outs_disjoint(const take_plain *t)
{
    size_t near[8] = {0}; /* where the last k-th entry was */
    if (!fan_flats_disjoint(t->written, t->nwritten))
        return false;
    for (size_t i = t->span.first; t->nwritten && i < t->span.end; i++) {
        const fan_list *p = take_list(t->b, i);
        if (take_defined(p) && fan_plain_pitch(&p->kind))
            return false;
        for (size_t k = 0; k < take_defined(p); k++) {
            const char *data = p->entries[k].data;
            const fan_flat *met =
                fan_flats_last_met(t->written, t->nwritten, data, p->bytes, &near[k % 8]);
            if (met && (met->owner != i || met->data != data || p->n > FAN_PLAIN_TERMS))
                return false;
        }
    }
    return true;
}

/* take_reads_all: a single entry is read, too, and not just handed through. */
static bool take_reads_all(const take_plain *t)
{
    return t->outs || t->options->scale.on || t->options->writable || t->b->sum_stats;
}

static bool take_plain_gather(take_plain *t)
{
    bool far = t->span.end - t->span.first >= TAKE_FAR;
    for (size_t i = t->span.first; t->outs && i < t->span.end; i++)
        if (!take_plain_place_out(t, i))
            return false;
    if (t->outs && !take_plain_outs_disjoint(t))
        return false;
    for (size_t i = t->span.first; i < t->span.end; i++) {
        void **result = &t->results[i - t->span.first];
        fan_list *p = take_list(t->b, i);
        size_t n = take_defined(p);
        if (far)
            take_fetch(t, i, false);
        if (!n)
            continue;
        fan_dtype acc = fan_plain_accum(t->b, i);
        t->calls = t->calls || p->kind.check_at_use;
        /* A large array is handed through at most, and of Python ints the general path reports what
         * does not fit. */
        size_t bytes = fan_plain_scratch(p, n, acc, t->b->sum_stats);
        if (fan_plain_is_large(p->size) && take_reads_all(t))
            return false;
        if (bytes > t->nscratch) {
            fan_free(t->scratch);
            t->nscratch = bytes;
            if (!(t->scratch = fan_alloc(bytes)))
                return false;
        }
        if (p->kind.weak && p->kind.dtype == FAN_DT_INT64 && !take_stays_in_int64(p, t->options))
            return false;
        if (*result)
            continue;
        *result = p->kind.scalar ? take_plain_number(t, i, p, n, acc)
                                 : take_plain_place(t->b, i, t->options, p, n, acc);
        if (!*result)
            return false;
        if (!p->kind.scalar && *result == p->entries[0].object)
            t->b->frontend->plain->hold(*result);
    }
    return true;
}

/* Checks that what will be read is unchanged. Calls the libraries first, also those that count
 * writes to their
 * arrays. */
static bool take_plain_readable(const take_plain *t)
{
    const fan_plain_frontend *plain = t->b->frontend->plain;
    bool reads = take_reads_all(t), far = t->span.end - t->span.first >= TAKE_FAR;
    for (size_t i = t->span.first; t->calls && i < t->span.end; i++) {
        const fan_list *p = take_list(t->b, i);
        size_t n = take_defined(p);
        if (n && !fan_plain_has_values(t->b, p, n,
                                       t->results[i - t->span.first] == p->entries[0].object))
            return false;
    }
    for (size_t i = 0; t->announce && i < t->nwritten; i++) {
        void *to = t->results[t->written[i].owner - t->span.first];
        if (to && !plain->wrote(to))
            return false;
    }
    for (size_t i = t->span.first; i < t->span.end; i++) {
        const fan_list *p = take_list(t->b, i);
        size_t n = take_defined(p);
        if (far)
            take_fetch(t, i, false);
        if (n && !p->kind.scalar && (n > 1 || reads) && !fan_plain_all_unchanged(t->b, p, n))
            return false;
    }
    for (size_t i = 0; (t->calls || t->announce) && i < t->nwritten; i++) {
        void *to = t->results[t->written[i].owner - t->span.first];
        if (to && !fan_plain_unchanged(t->b, to, &take_list(t->b, t->written[i].owner)->kind,
                                       t->written[i].data))
            return false;
    }
    return true;
}

/* 3. sum */

static void take_keep_stats(fan_buffer *b, size_t slot, const fan_stats *stats)
{
    fan_sum_stats *sum_stats = &b->sum_stats[slot];
    *sum_stats = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
    if (!stats)
        return;
    sum_stats->stats = *stats;
    sum_stats->has_nonfinite = stats->nonfinite && stats->bad != SIZE_MAX;
    sum_stats->nonfinite_key =
        sum_stats->has_nonfinite ? take_list(b, slot)->entries[stats->bad].key : -1;
}

static void take_plain_sum(const take_plain *t)
{
    fan_buffer *b = t->b;
    bool far = t->span.end - t->span.first >= TAKE_FAR;
    for (size_t i = t->span.first; i < t->span.end; i++) {
        _Alignas(16) char value[16];
        FAN_UNINITIALIZED fan_stats sum_stats;
        const fan_list *p = take_list(b, i);
        fan_stats *stats = b->sum_stats ? &sum_stats : NULL;
        size_t n = take_defined(p);
        if (far)
            take_fetch(t, i, true);
        if (!n) {
            if (stats)
                take_keep_stats(b, i, NULL);
            continue;
        }
        void *to = t->results[i - t->span.first];
        bool number = p->kind.scalar, first = !number && to == p->entries[0].object;
        bool handed =
            n == 1 && !t->options->scale.on && (first || (number && !t->options->writable));
        bool is_out = t->outs && t->given[i - t->span.first];
        if (stats || (!number && !handed))
            fan_plain_fold(b, p, n, fan_plain_accum(b, i), take_scale(t->options),
                           number ? value : p->out, t->scratch, stats);
        if (stats)
            take_keep_stats(b, i, stats);
        if (!handed)
            fan_plain_count(b, p, n, first && !is_out, n == 1 && !is_out, false);
    }
}

/* 4. order: no stream has anything to do with plain entries. */

/* 5. hand over: the slots are empty and free. What they held is dropped last, when the buffer is
 * ready for whatever a finalizer calls. */

/* References to drop after all slots are released. If this list cannot grow, drop immediately: a
 * call back into a slot that is still claimed is then refused. */
typedef struct take_drops {
    void *inline_objects[64], **all;
    size_t n, cap;
} take_drops;

static bool take_defer_drop(take_drops *d, void *object)
{
    if (d->n == d->cap) {
        void **more =
            fan_realloc(d->all == d->inline_objects ? NULL : d->all, 2 * d->cap * sizeof *more);
        if (!more)
            return false;
        if (d->all == d->inline_objects)
            memcpy(more, d->inline_objects, sizeof d->inline_objects);
        d->all = more;
        d->cap *= 2;
    }
    d->all[d->n++] = object;
    return true;
}

static void take_plain_hand_over(fan_buffer *b, fan_span span)
{
    FAN_UNINITIALIZED take_drops d;
    d.all = d.inline_objects;
    d.n = 0;
    d.cap = sizeof d.inline_objects / sizeof *d.inline_objects;
    for (size_t i = span.first; i < span.end; i++) {
        fan_list *p = take_list(b, i);
        for (size_t k = 0; p && k < p->n; k++) {
            void *object = p->entries[k].object;
            if (object && !b->frontend->plain->drop_if_shared(object) &&
                !take_defer_drop(&d, object))
                b->frontend->drop(object);
        }
        if (p && p->n) {
            fan_list_unpark(b, p, fan_list_parked(p) - p->undefined);
            fan_list_empty(p);
            fan_list_shrink(p);
        }
    }
    fan_plain_release(b, span);
    for (size_t i = 0; i < d.n; i++)
        b->frontend->drop(d.all[i]);
    if (d.all != d.inline_objects)
        fan_free(d.all);
}

static bool take_plain_outs_begin(take_plain *t)
{
    size_t n = t->span.end - t->span.first;
    if (!t->outs)
        return true;
    memset(t->inline_given, 0, sizeof t->inline_given);
    if (n > TAKE_FEW_OUTS) {
        t->written = fan_alloc(n * sizeof *t->written);
        t->given = fan_calloc(n * sizeof *t->given);
    }
    return t->written && t->given;
}

/* The same steps for one slot with a few arrays, as most takes are, without what several slots need
 * between them. *result NULL: it is not that, and nothing happened. False: it is for the general
 * path. */
static bool take_plain_one(fan_buffer *b, size_t slot, const fan_take *options, void **result)
{
    if (fan_slot_has_state(&b->slots[slot]))
        return false; /* the list may have no plain entry, and then no kind */
    fan_list *p = take_list(b, slot);
    size_t n = take_defined(p);
    if (!n || n > FAN_PLAIN_TERMS || p->undefined || p->kind.scalar || p->size > FAN_PLAIN_BYTES ||
        b->sum_stats)
        return true;
    if (!take_plain_claim_slot(b, slot, options))
        return false;
    fan_dtype acc = fan_plain_accum(b, slot);
    void *to = take_plain_place(b, slot, options, p, n, acc);
    bool first = to == p->entries[0].object,
         reads = n > 1 || !first || options->scale.on || options->writable;
    if (to && fan_plain_has_values(b, p, n, first) &&
        (!reads || fan_plain_all_unchanged(b, p, n))) {
        if (n > 1 || !first) {
            fan_plain_fold(b, p, n, acc, take_scale(options), p->out, NULL, NULL);
            fan_plain_count(b, p, n, first, n == 1, false);
        }
        if (first) /* the list's hold is the caller's from now on */
            p->entries[0].object = NULL;
        take_plain_hand_over(b, (fan_span){slot, slot + 1});
        *result = to;
        return true;
    }
    fan_plain_release(b, (fan_span){slot, slot + 1});
    if (to && !first)
        b->frontend->drop(to);
    if (b->frontend->clear_error)
        b->frontend->clear_error();
    return false;
}

bool fan_plain_take(fan_buffer *b, fan_span span, const fan_take *options,
                    const fan_plain_outs *outs, void **results)
{
    FAN_UNINITIALIZED take_plain t;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return false;
    if (!outs && span.end - span.first == 1) {
        bool good = take_plain_one(b, span.first, options, results);
        if (!good || results[0])
            return good;
    }
    for (size_t i = span.first; i < span.end; i++)
        if (!take_plain_claim_slot(b, i, options)) {
            take_plain_give_back(b, (fan_span){span.first, i});
            return false;
        }
    t.b = b;
    t.span = span;
    t.options = options;
    t.outs = outs;
    t.results = results;
    t.written = t.inline_outs;
    t.given = t.inline_given;
    t.nwritten = 0;
    t.calls = t.announce = false;
    t.scratch = NULL;
    t.nscratch = 0;
    bool good = take_plain_outs_begin(&t) && take_plain_gather(&t) && take_plain_readable(&t);
    if (good) {
        take_plain_sum(&t);
        take_plain_hand_over(b, span);
    } else {
        /* As if there had been no take. The general path reports what is wrong, if anything is. */
        take_plain_give_back(t.b, t.span);
        for (size_t i = 0; i < t.span.end - t.span.first; i++) {
            if (t.results[i])
                t.b->frontend->drop(t.results[i]);
            t.results[i] = NULL;
        }
        if (t.b->frontend->clear_error)
            t.b->frontend->clear_error();
    }
    fan_free(t.scratch);
    if (t.written != t.inline_outs) {
        fan_free(t.written);
        fan_free(t.given);
    }
    return good;
}

/* ---- a snapshot: the sum as it is now, which stays (D17) ---- */

fan_status fan_buffer_snapshot(fan_buffer *b, size_t slot, fan_stream *consumer, fan_value *out,
                               fan_error *err)
{
    fan_slot *s;
    fan_gathered gathered;
    fan_status status;
    fan_fold *f = &gathered.fold;
    *out = fan_value_none();
    FAN_TRY(fan_slot_check(b, slot, err));
    s = &b->slots[slot];
    fan_slot_lock(b, slot);
    status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK)
        status = fan_slot_claim_all(b, slot, false, "a snapshot", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    status = fan_gather(b, slot, SIZE_MAX, false, &gathered, err);
    if (status != FAN_OK)
        goto let_go;
    f->finish = f->snapshot = true;
    status = fan_gathered_check(&gathered, err);
    if (status != FAN_OK) {
        fan_gathered_fini(&gathered);
        goto let_go;
    }
    if (f->n == 0 && !f->state) {
        if (gathered.zero)
            status = take_zeros(b, slot, gathered.zero, fan_fold_dtype(f), out, err);
    } else if (f->n == 1 && !f->state && f->terms[0].v->form == FAN_FORM_OBJECT) {
        status = fan_value_copy(b->frontend, f->terms[0].v, out, err);
        if (status == FAN_OK)
            status = fan_order_hand_over(b, slot, out, s->state->consumer, s->state->accum,
                                         f->terms[0].producer, f->terms[0].event,
                                         consumer ? consumer : s->state->consumer, &f->rules, err);
    } else {
        status = fan_fold_run(f, err);
        *out = f->result;
        if (status == FAN_OK)
            status = fan_order_hand_over(b, slot, out, s->state->consumer, s->state->accum,
                                         f->ready, f->ready_event,
                                         consumer ? consumer : s->state->consumer, &f->rules, err);
    }
    if (status == FAN_OK && gathered.like.some && out->form != FAN_FORM_OBJECT) {
        out->origin = gathered.like.origin;
        out->rank = gathered.like.rank;
    }
    if (status != FAN_OK)
        fan_value_drop(b->frontend, out);
    fan_gathered_fini(&gathered);
let_go:
    fan_slot_lock(b, slot);
    fan_slot_poison(s, status, err);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    return status;
}
