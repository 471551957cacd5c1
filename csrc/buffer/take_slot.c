#include "buffer/take_slot.h"

#include "array/nditer.h"
#include "array/extents.h"
#include "base/fault.h"
#include "buffer/commit.h"
#include "buffer/enter.h"
#include "buffer/fold_job.h"
#include "buffer/fold_run.h"
#include "buffer/lock.h"
#include "buffer/options.h"
#include "buffer/order.h"
#include "buffer/pass.h"
#include "buffer/stats.h"

#include <inttypes.h>
#include <string.h>

/* article: of the name of a dtype. */
static const char *article(fan_dtype d) { return fan_dtype_name(d)[0] == 'i' ? "an" : "a"; }

fan_status fan_take_check_scale(const fan_buffer *b, size_t slot, const fan_fold *f, const fan_take *how,
                                fan_error *err)
{
    fan_dtype d = fan_fold_dtype(f);
    char kind = d == FAN_DT_NONE ? 'f' : fan_dtype_kind(d);
    if (!fan_take_scaled(how) || d == FAN_DT_NONE)
        return FAN_OK;
    if (!how->real && kind != 'c')
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": scale=%.12g%+.12gj: %s %s sum needs a real number",
                        FAN_SLOT_WHO(b, slot), how->scale.re, how->scale.im, article(d), fan_dtype_name(d));
    if (!how->integral && kind != 'f' && kind != 'c')
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": scale=%.12g: %s %s sum needs an integer%s",
                        FAN_SLOT_WHO(b, slot), how->scale.re, article(d), fan_dtype_name(d),
                        (how->scale.re < 0x1p63 && how->scale.re >= -0x1p63) ? "" : " that fits int64");
    return FAN_OK;
}

fan_status fan_take_check_out(const fan_buffer *b, size_t slot, const fan_gathered *g, const fan_value *out,
                              fan_error *err)
{
    const int64_t *shape = NULL;
    char has[160], wants[160];
    const fan_fold *f = &g->fold;
    const fan_value *any = f->n ? f->terms[0].v : g->zero;
    fan_dtype d = fan_fold_dtype(f);
    int ndim = any ? fan_value_shape(any, &shape) : -1;
    if (f->state && ndim < 0) {
        ndim = b->slots[slot].p->ndim;
        shape = b->slots[slot].p->shape;
    }
    if (ndim < 0)
        return any ? fan_fail(err, FAN_ERR_TYPE, FAN_SLOT_SAID " sums objects; out= needs arrays",
                              FAN_SLOT_WHO(b, slot))
                   : FAN_OK;
    if (b->slots[slot].spec->has_shape) {
        ndim = b->slots[slot].spec->ndim;
        shape = b->slots[slot].spec->shape;
    }
    if (ndim != out->array->ndim || memcmp(shape, out->array->shape, (size_t)ndim * sizeof *shape) != 0)
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": out= has shape %s, the sum %s", FAN_SLOT_WHO(b, slot),
                        fan_shape_text(out->array->ndim, out->array->shape, has, sizeof has),
                        fan_shape_text(ndim, shape, wants, sizeof wants));
    if (d != FAN_DT_NONE && !fan_dtype_can_cast(d, out->dtype))
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": out= of dtype %s cannot take a sum of dtype %s",
                        FAN_SLOT_WHO(b, slot), fan_dtype_name(out->dtype), fan_dtype_name(d));
    if (b->slots[slot].p->device && out->device != b->slots[slot].p->device)
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": out= is on %s, the sum on %s", FAN_SLOT_WHO(b, slot),
                        fan_device_text(out->device, has, sizeof has),
                        fan_device_text(b->slots[slot].p->device, wants, sizeof wants));
    return FAN_OK;
}

/* Whether the taker may write into the only term (*Reusable*). */
static fan_reuse_answer may_write(const fan_buffer *b, const fan_term *t)
{
    const fan_array *a = t->v->array;
    fan_reuse facts = fan_term_holders(b, t, !t->v->device->backend->has_streams);
    facts.dense = t->v->form == FAN_FORM_SPARSE || fan_array_dense(a);
    facts.writable = t->v->form == FAN_FORM_SPARSE || a->writable;
    facts.same_dtype = true; /* else it is not handed through */
    facts.exclusive = true;  /* the taker's stream waits (S18) */
    return fan_reusable(&facts);
}

/* D13: a slot fed only zeros gives the first one, or one of the sum's dtype and the declared shape. */
fan_status fan_take_zeros(fan_buffer *b, size_t slot, const fan_value *zero, fan_dtype sum, fan_value *out,
                          fan_error *err)
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
        *out = (fan_value){.form = FAN_FORM_ZERO, .dtype = sum, .origin = zero->origin, .array = whole};
    return status;
}

/* With stats, on a device with streams: what is handed through is looked at on A first, and is ready there then. */
static fan_status measure_term(fan_fold *f, fan_slot_take *c, fan_error *err)
{
    fan_stream *R = NULL;
    FAN_TRY(fan_fold_measure_term(f, &R, err));
    c->sum_stats = fan_sum_stats_move(&f->sum_stats);
    if (R) {
        fan_stream_drop(c->ready);
        fan_event_drop(c->ready_event);
        c->ready = fan_stream_hold(R);
        c->ready_event = NULL;
    }
    return FAN_OK;
}

/* The facts for the plan: of the slot, of what the caller asks, of the other slots. */
static fan_take_facts facts_of(fan_buffer *b, const fan_take *how, const fan_extents *outs, const fan_slot_take *c,
                               bool last)
{
    const fan_slot *s = &b->slots[c->slot];
    const fan_fold *f = &c->g.fold;
    fan_take_facts facts = {.terms = f->n, .has_state = f->state, .has_zero = c->g.zero, .last = last};
    for (size_t i = 0; i < f->n; i++) {
        facts.dense += f->terms[i].v->form == FAN_FORM_DENSE;
        facts.sparse += f->terms[i].v->form == FAN_FORM_SPARSE;
        facts.objects += f->terms[i].v->form == FAN_FORM_OBJECT;
    }
    fan_dtype sum = fan_fold_dtype(f);
    facts.has_out = fan_take_out_at(how, c->slot);
    facts.copy_out = c->copy_out;
    facts.scaled = fan_take_scaled(how);
    facts.writable = how->writable;
    facts.exact = fan_fold_is_exact(f);
    facts.widened = !facts.objects && fan_accum_dtype(sum, s->spec->accumulate) != sum;
    facts.expanded = fan_fold_expanded(f) != 0;
    facts.whole = s->p->keyed < 0 || !c->g.nitems ||
                  (uint64_t)c->g.items[c->g.nitems - 1]->key == s->p->next_key + c->g.nitems - 1;
    facts.alone = fan_take_count(b, how) == 1;
    if (f->n) {
        facts.first_donated = f->terms[0].donated;
        facts.same_dtype = f->terms[0].v->dtype == sum;
        facts.summed = f->terms[0].is_value && s->p->value_summed;
    }
    if (f->n == 1 && !facts.has_out && !facts.scaled) {
        facts.overwritten = fan_written_by_out(outs, f->terms[0].v);
        facts.must_copy = how->writable && !facts.objects && may_write(b, &f->terms[0]) != FAN_REUSE_YES;
    }
    return facts;
}

/* A14. */
static fan_status hand_through(fan_buffer *b, fan_slot_take *c, fan_error *err)
{
    fan_fold *f = &c->g.fold;
    c->ready = fan_stream_hold(f->terms[0].producer);
    c->ready_event = fan_event_hold(f->terms[0].event);
    if (fan_fold_first_suspect(f))
        c->sum_stats = fan_sum_stats_hold(&b->slots[c->slot].p->sum_stats);
    else
        FAN_TRY(measure_term(f, c, err));
    return fan_value_copy(b->frontend, f->terms[0].v, &c->result, err);
}

/* D15: the kind of object that the sum comes back as. */
static void name_kind(fan_slot_take *c)
{
    const fan_exact_state *state = c->g.fold.state;
    if (c->g.like) {
        c->origin = c->g.like->origin;
        c->rank = c->g.like->rank;
    } else if (state) {
        c->origin = state->origin;
        c->rank = state->rank;
    }
}

static void finish(fan_slot_take *c, const fan_take *how, const fan_value *out)
{
    fan_fold *f = &c->g.fold;
    f->finish = true;
    f->take = how;
    f->finish_dtype = out ? out->dtype : FAN_DT_NONE;
}

fan_status fan_slot_take_decide(fan_buffer *b, size_t slot, const fan_take *how, const fan_extents *outs,
                                fan_slot_take *c, fan_stream *consumer, bool last, fan_error *err)
{
    fan_take_facts facts = facts_of(b, how, outs, c, last);
    c->plan = fan_plan_take(&facts);
    c->g.fold.taker = consumer;
    name_kind(c);
    if (c->plan.rules)
        b->slots[slot].p->rules |= c->plan.rules;
    if (c->plan.counts)
        FAN_COUNT(b, copies, 1);
    switch (c->plan.way) {
    case FAN_TAKE_ZERO:
        return fan_take_zeros(b, slot, c->g.zero, fan_fold_dtype(&c->g.fold), &c->result, err);
    case FAN_TAKE_HAND:
        return hand_through(b, c, err);
    case FAN_TAKE_FINISH:
        finish(c, how, fan_take_out_at(how, slot));
        return FAN_OK;
    case FAN_TAKE_LATE:
        c->asked_again = true;
        return FAN_OK;
    default:
        return FAN_OK;
    }
}

/* Takes over the result of the fold. */
static fan_status slot_take_end(fan_buffer *b, size_t slot, fan_slot_take *c, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &c->g.fold;
    c->begun = false;
    if (c->plan.way == FAN_TAKE_COMMIT) {
        FAN_TRY(fan_fold_commit_end(b, slot, &c->g, err));
        c->ready = fan_stream_hold(s->p->ready);
        c->ready_event = fan_event_hold(s->p->ready_event);
        c->sum_stats = fan_sum_stats_hold(&s->p->sum_stats);
        return fan_value_copy(b->frontend, &s->p->value, &c->result, err);
    }
    FAN_TRY(fan_fold_end(f, err));
    c->sum_stats = fan_sum_stats_move(&f->sum_stats);
    c->result = f->result;
    f->result = (fan_value){.dtype = FAN_DT_NONE};
    c->ready = f->ready;
    c->ready_event = f->ready_event;
    f->ready = NULL;
    f->ready_event = NULL;
    s->p->rules |= f->rules;
    return FAN_OK;
}

/* The slot is busy; who asks whether it is ready may look meanwhile. */
void fan_take_poison(fan_buffer *b, size_t slot, fan_status status, const fan_error *err)
{
    if (status == FAN_OK)
        return;
    fan_slot_lock(b, slot);
    fan_slot_poison(&b->slots[slot], status, err);
    fan_slot_unlock(b, slot);
}

/* Ends the folds of takes [from, to) that are in the batch; `failed`: some slot did, and nothing more is queued. A slot
 * whose sum was not queued is as it was. */
fan_status fan_take_slots_end(fan_buffer *b, fan_slot_take *takes, size_t from, size_t to, fan_batch *batch,
                              bool failed, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!batch)
        return FAN_OK;
    if (!failed && !FAN_FAULT(BATCH_LATE))
        fan_batch_flush(batch);
    for (size_t i = from; i < to; i++) {
        fan_error *said = status == FAN_OK ? err : &other;
        if (!takes[i].begun)
            continue;
        if (fan_fold_left(&takes[i].g.fold)) {
            fan_fold_abandon(&takes[i].g.fold);
            takes[i].begun = false;
            continue;
        }
        fan_status its = slot_take_end(b, takes[i].slot, &takes[i], said);
        fan_take_poison(b, takes[i].slot, its, said);
        status = status == FAN_OK ? its : status;
    }
    if (!failed && FAN_FAULT(BATCH_LATE))
        fan_batch_flush(batch);
    if (status == FAN_OK)
        status = fan_batch_failure(batch, err);
    fan_batch_clear(batch);
    return status;
}

static fan_status fold(fan_buffer *b, size_t slot, fan_slot_take *c, fan_batch *batch, fan_error *err)
{
    if (batch && fan_fold_batches(&c->g.fold)) {
        FAN_TRY(fan_fold_begin(&c->g.fold, batch, err));
        c->begun = true;
        return FAN_OK;
    }
    if (batch)
        fan_batch_flush(batch); /* the device's order is that of the slots */
    FAN_TRY(fan_fold_begin(&c->g.fold, NULL, err));
    return slot_take_end(b, slot, c, err);
}

fan_status fan_slot_take_fold(fan_buffer *b, size_t slot, fan_slot_take *c, fan_batch *batch, fan_error *err)
{
    if (c->plan.way != FAN_TAKE_COMMIT && c->plan.way != FAN_TAKE_FINISH)
        return FAN_OK;
    return fold(b, slot, c, batch, err);
}

fan_status fan_slot_take_into_out(fan_buffer *b, size_t slot, const fan_take *how, fan_slot_take *c, fan_batch *batch,
                                  fan_error *err)
{
    finish(c, how, NULL);
    c->g.fold.out = fan_take_out_at(how, slot);
    c->g.fold.finish_dtype = FAN_DT_NONE;
    return fold(b, slot, c, batch, err);
}

/* The stream that writes a sum into `out` (a hold): A, where the sum was made. A slot that was fed symbolic zeros alone
 * has no A: then the stream of the taker, or the current stream of the device. */
static fan_stream *writer(const fan_pass *p, const fan_fold *f, const fan_value *out)
{
    if (p->accum || !out->device->backend->has_streams)
        return fan_stream_hold(p->accum);
    return f->taker && f->taker->device == out->device ? fan_stream_hold(f->taker) : fan_stream_current(out->device);
}

/* A sum that is there already goes into out: copied, or, if it is sparse, its entries over zeros. */
static fan_status copy_into_out(fan_buffer *b, const fan_value *out, const fan_slot_take *c, fan_stream *A,
                                fan_error *err)
{
    fan_operand one = {c->result.array, out->dtype};
    FAN_COUNT(b, copies, 1);
    FAN_COUNT(b, passes, 1);
    if (c->result.form == FAN_FORM_DENSE)
        return fan_device_run(out->device, A,
                              &(fan_job){.kind = FAN_JOB_COPY, .out = out->array, .in = &one, .n = 1, .label = "copy"},
                              err);
    FAN_TRY(fan_device_run(out->device, A, &(fan_job){.kind = FAN_JOB_ZERO, .out = out->array, .label = "fill"}, err));
    if (c->result.form == FAN_FORM_SPARSE)
        FAN_TRY(fan_device_run(
            out->device, A,
            &(fan_job){.kind = FAN_JOB_SCATTER, .out = out->array, .sparse = c->result.sparse, .label = "scatter"},
            err));
    return FAN_OK;
}

/* S22, for a copy that runs on `on`; *plan says what orders others after it. */
static fan_status order_copy(fan_buffer *b, fan_slot_take *c, const fan_value *out, fan_stream *on, fan_sync_fold *plan,
                             fan_error *err)
{
    fan_fold *f = &c->g.fold;
    const fan_pass *p = b->slots[c->slot].p;
    if (!on && out->device->backend->has_streams)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    if (on)
        FAN_TRY(fan_order_consumer(f->taker, on, NULL, &f->taker, err));
    fan_stream_id id = fan_stream_id_of(on);
    fan_sync_slot slot = {.consumer = p->accum ? fan_stream_id_of(p->consumer) : id, .accum = id, .ready = id};
    *plan = fan_sync_finish_plan(slot, true, fan_stream_id_of(f->taker));
    f->out = out;
    return fan_order_wait_taker(f, on, plan, err);
}

fan_status fan_slot_take_copy(fan_buffer *b, size_t slot, const fan_take *how, fan_slot_take *c, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    const fan_value *out = fan_take_out_at(how, slot);
    fan_value sum = c->result;
    fan_sync_fold plan = {.rules = 0};
    fan_stream *on = writer(s->p, &c->g.fold, out);
    fan_status status = order_copy(b, c, out, on, &plan, err);
    if (status == FAN_OK)
        status = copy_into_out(b, out, c, on, err);
    fan_stream_drop(c->ready);
    c->ready = on;
    FAN_TRY(status);
    s->p->rules |= plan.rules;
    fan_event_drop(c->ready_event);
    c->ready_event = NULL;
    if (plan.slot.has_event)
        FAN_TRY(fan_order_record(b, on, FAN_PLAN_S22_RECORD, &c->ready_event, err));
    c->result = (fan_value){.dtype = FAN_DT_NONE};
    fan_value_drop(b->frontend, &sum);
    return fan_value_copy(b->frontend, out, &c->result, err);
}

/* Does out= lie where one of the terms lies? */
bool fan_written_by_own_out(const fan_slot_take *c, const fan_value *out)
{
    for (size_t i = 0; i < c->g.fold.n; i++)
        if (c->g.fold.terms[i].v->form == FAN_FORM_DENSE &&
            !fan_array_extents_disjoint(out->array, c->g.fold.terms[i].v->array))
            return true;
    return false;
}

fan_status fan_slot_take_claim(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_slot_lock(b, slot);
    fan_status status = fan_slot_in_target(b, slot, "take", err);
    if (status == FAN_OK && (status = fan_slot_claim_all(b, slot, true, "take", err)) == FAN_OK) {
        status = fan_slot_poisoned(b, slot, err);
        if (status == FAN_OK && s->expected >= 0 && s->p->count != s->expected)
            status = fan_fail(err, FAN_ERR_VALUE,
                              FAN_SLOT_SAID ": expected %" PRId64 " contribution%s, got %" PRId64 " (A16)",
                              FAN_SLOT_WHO(b, slot), s->expected, FAN_PLURAL(s->expected), s->p->count);
        if (status != FAN_OK)
            fan_slot_let_go(b, slot);
    }
    fan_slot_unlock(b, slot);
    return status;
}

/* With stats: what the sum's own pass has not told. A sum that is undefined or no array has UINT64_MAX elements; zeros
 * that went into an out are zeros. */
fan_status fan_slot_take_stats(fan_slot_take *c, const fan_pass *p, fan_error *err)
{
    fan_fold *f = &c->g.fold;
    fan_sum_stats was = c->sum_stats;
    if (c->result.form == FAN_FORM_UNDEFINED || c->result.form == FAN_FORM_OBJECT) {
        fan_sum_stats_drop(&c->sum_stats);
        c->sum_stats = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
        return FAN_OK;
    }
    if (!was.valid && c->plan.copy_out && f->n == 0 && !f->state) {
        c->sum_stats =
            (fan_sum_stats){.valid = true, .stats = {.count = (uint64_t)c->result.array->size, .bad = SIZE_MAX}};
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
