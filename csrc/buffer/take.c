/* What a consumer gets: finish each slot's sum, order the consumer's stream, empty all at the end (S18, S19, S22, A14,
 * D11, D21). */
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/slot.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* S18, S19: `consumer` may use `v`, ready on R with event E. *E may get an event that is recorded now. */
static fan_status hand_over(fan_buffer *b, size_t slot, const fan_value *v, fan_stream *C, fan_stream *A, fan_stream *R,
                            fan_event *E, fan_stream *consumer, uint64_t *rules, fan_error *err)
{
    fan_event *now = NULL;
    fan_status status = FAN_OK;
    if (!R || !consumer)
        return FAN_OK;
    FAN_TRY(fan_plan_consumer(consumer, R, E, &consumer, err));
    fan_sync_take plan = fan_sync_take_plan((fan_sync_slot){.consumer = fan_stream_id_of(C),
                                                            .accum = fan_stream_id_of(A),
                                                            .ready = fan_stream_id_of(R),
                                                            .has_event = E != NULL},
                                            fan_stream_id_of(consumer));
    *rules |= plan.rules;
    if (plan.record_now)
        FAN_GO(fan_plan_record(b, R, FAN_PLAN_S18_RECORD, &now, err));
    if (plan.wait)
        FAN_GO(fan_plan_wait(b, slot, consumer, E ? E : now, FAN_PLAN_S18_WAIT, err));
    if (plan.mark)
        FAN_GO(fan_plan_mark(v, consumer, FAN_PLAN_S19_MARK, err));
done:
    fan_event_drop(now);
    return status;
}

/* One slot's way through take. */
typedef struct cut {
    size_t slot;
    fan_gathered g;
    bool claimed, gathered;
    bool into_out; /* the sum goes straight into out, once all else is done */
    bool late;     /* summed after all others */
    enum {
        CUT_DONE,
        CUT_COMMITS,
        CUT_FINISHES
    } doing;      /* the fold that it needs: into the slot's value, or apart from it */
    bool begun;   /* .. which waits in the batch */
    bool handed;  /* the consumer is ordered */
    bool by_copy; /* .. or is copied there from `result` */
    fan_value result;
    fan_stream *ready;
    fan_event *ready_event;
    uint8_t origin, rank;
    fan_sum_stats known;
} cut;

static bool scaled(const fan_take *how) { return how->scale.on; }

/* article: of the name of a dtype. */
static const char *article(fan_dtype d) { return fan_dtype_name(d)[0] == 'i' ? "an" : "a"; }

/* How many slots are taken. */
static size_t taken(const fan_buffer *b, const fan_take *how) { return how->one ? 1 : b->nslots; }

/* Where the sum of the i-th of them is to go; NULL: wherever. */
static const fan_value *out_of(const fan_take *how, size_t i)
{
    return how->out && how->out[i].form == FAN_FORM_DENSE ? &how->out[i] : NULL;
}

static const fan_value *out_at(const fan_take *how, size_t slot) { return out_of(how, how->one ? 0 : slot); }

static fan_status check_scale(const fan_buffer *b, size_t slot, const fan_fold *f, const fan_take *how, fan_error *err)
{
    fan_dtype d = fan_fold_dtype(f);
    char kind = d == FAN_DT_NONE ? 'f' : fan_dtype_kind(d);
    if (!scaled(how) || d == FAN_DT_NONE)
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

static fan_status check_out(const fan_buffer *b, size_t slot, const fan_gathered *g, const fan_value *out,
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

/* ---- D11: which memory meets which? Extents by their beginning, so that asking costs little with any number of slots
 * ---- */

typedef struct extent {
    uintptr_t lo, hi, highest; /* `highest`: of all up to and with this one */
    const fan_array *a;
    size_t slot;
    bool dense;
} extent;

typedef struct extents {
    extent *all;
    size_t n;
} extents;

static int by_beginning(const void *a, const void *b)
{
    const extent *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

static void extents_put(extents *e, const fan_array *a, size_t slot, bool dense)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    if (lo == hi)
        return;
    e->all[e->n++] = (extent){
        .lo = (uintptr_t)(a->data + lo), .hi = (uintptr_t)(a->data + hi), .a = a, .slot = slot, .dense = dense};
}

static void extents_sort(extents *e)
{
    uintptr_t highest = 0;
    if (e->n)
        qsort(e->all, e->n, sizeof *e->all, by_beginning);
    for (size_t i = 0; i < e->n; i++) {
        highest = e->all[i].hi > highest ? e->all[i].hi : highest;
        e->all[i].highest = highest;
    }
}

/* The next extent that meets `a`, below *at (first: e->n); NULL: none is left. */
static const extent *extents_next(const extents *e, const fan_array *a, size_t *at)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    uintptr_t from = (uintptr_t)(a->data + lo), to = (uintptr_t)(a->data + hi);
    if (lo == hi)
        return NULL;
    if (*at == e->n) {
        size_t low = 0, high = e->n;
        while (low < high) {
            size_t mid = low + (high - low) / 2;
            if (e->all[mid].lo < to)
                low = mid + 1;
            else
                high = mid;
        }
        *at = low;
    }
    while (*at > 0 && e->all[*at - 1].highest > from) {
        const extent *x = &e->all[--*at];
        if (x->hi > from)
            return x;
    }
    return NULL;
}

/* May `out` of slot k be written while some input is still to be read? */
static bool out_meets_inputs(const extents *inputs, const fan_array *out, size_t k)
{
    size_t at = inputs->n;
    if (!at)
        return false;
    for (const extent *x; (x = extents_next(inputs, out, &at)) != NULL;)
        if (x->slot != k || !x->dense || !fan_array_same_view(out, x->a))
            return true;
    return false;
}

/* Would some out= write what is handed through? */
static bool written_by_out(const extents *outs, const fan_value *v)
{
    fan_array *some[3];
    size_t n = outs->n ? fan_value_arrays(v, some, 3) : 0;
    for (size_t i = 0; i < n && i < 3; i++) {
        size_t at = outs->n;
        if (extents_next(outs, some[i], &at))
            return true;
    }
    return false;
}

/* What a take with out= looks at: all inputs and all outs. */
static fan_status look_at_outs(fan_buffer *b, const fan_take *how, const cut *cuts, extents *inputs, extents *outs,
                               fan_error *err)
{
    size_t most = 0, given = 0;
    for (size_t i = 0; i < taken(b, how); i++) {
        given += out_of(how, i) != NULL;
        most += 3 * cuts[i].g.fold.n;
        for (size_t j = 0; j < cuts[i].g.fold.n; j++)
            most += cuts[i].g.fold.terms[j].v->nparts;
    }
    inputs->all = fan_alloc((most + 1) * sizeof *inputs->all);
    outs->all = fan_alloc((given + 1) * sizeof *outs->all);
    if (!inputs->all || !outs->all)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    for (size_t i = 0; i < taken(b, how); i++) {
        if (out_of(how, i))
            extents_put(outs, how->out[i].array, cuts[i].slot, true);
        for (size_t j = 0; j < cuts[i].g.fold.n; j++) {
            const fan_value *v = cuts[i].g.fold.terms[j].v;
            fan_array *some[3];
            size_t n = v->form == FAN_FORM_OBJECT ? 0 : fan_value_arrays(v, some, 3);
            for (size_t k = 0; k < n && k < 3; k++)
                extents_put(inputs, some[k], cuts[i].slot, v->form == FAN_FORM_DENSE);
            for (size_t k = 0; k < v->nparts; k++)
                extents_put(inputs, v->parts[k], cuts[i].slot, false);
        }
    }
    extents_sort(inputs);
    extents_sort(outs);
    for (size_t i = 1; i < outs->n; i++) {
        if (outs->all[i - 1].highest <= outs->all[i].lo)
            continue;
        size_t j = i - 1;
        while (outs->all[j].hi <= outs->all[i].lo)
            j--;
        size_t one = outs->all[i].slot, two = outs->all[j].slot;
        return fan_fail(err, FAN_ERR_VALUE, "%s: out= of slots %zu and %zu may share memory", b->name,
                        one < two ? one : two, one < two ? two : one);
    }
    return FAN_OK;
}

static bool plain_copy_needed(fan_buffer *b, const fan_take *how, const fan_fold *f)
{
    const fan_term *t = &f->terms[0];
    if (!how->writable || t->v->form == FAN_FORM_OBJECT)
        return false;
    if (t->v->form == FAN_FORM_DENSE && (!t->v->array->writable || fan_array_expanded(t->v->array)))
        return true;
    if ((t->ours && !t->lent) || t->donated)
        return false;
    return !(t->v->object && b->frontend->unshared(t->v->object));
}

/* D13: a slot fed only zeros gives the first one, or one of the sum's dtype and the declared shape. */
static fan_status zero_sum(fan_buffer *b, size_t slot, const fan_value *zero, fan_dtype sum, fan_value *out,
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
static fan_status survey(fan_fold *f, cut *c, fan_error *err)
{
    fan_stream *R = NULL;
    FAN_TRY(fan_fold_survey(f, &R, err));
    c->known = fan_sum_stats_move(&f->known);
    if (R) {
        fan_stream_drop(c->ready);
        fan_event_drop(c->ready_event);
        c->ready = fan_stream_hold(R);
        c->ready_event = NULL;
    }
    return FAN_OK;
}

/* What is to be done for the slot's sum, but for what goes straight into out: what needs no fold is done at once. The
 * slot is busy. */
static fan_status cut_decide(fan_buffer *b, size_t slot, const fan_take *how, const extents *outs, cut *c,
                             fan_stream *consumer, bool last, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &c->g.fold;
    const fan_value *out = out_at(how, slot);
    size_t dense = 0, sparse = 0, objects = 0;
    for (size_t i = 0; i < f->n; i++) {
        dense += f->terms[i].v->form == FAN_FORM_DENSE;
        sparse += f->terms[i].v->form == FAN_FORM_SPARSE;
        objects += f->terms[i].v->form == FAN_FORM_OBJECT;
    }
    fan_dtype sum = fan_fold_dtype(f);
    f->taker = consumer;
    if (c->g.like) {
        c->origin = c->g.like->origin;
        c->rank = c->g.like->rank;
    }
    if (f->state && !c->g.like) {
        c->origin = f->state->origin;
        c->rank = f->state->rank;
    }
    if (f->n == 0 && !f->state && !c->g.zero)
        return FAN_OK;
    if (f->n == 0 && !f->state) {
        if (out) {
            c->by_copy = true;
            return FAN_OK;
        }
        return zero_sum(b, slot, c->g.zero, sum, &c->result, err);
    }
    if (out && dense == f->n && !c->by_copy) {
        c->into_out = true;
        return FAN_OK;
    }
    if (scaled(how) && objects)
        return fan_fail(err, FAN_ERR_TYPE, FAN_SLOT_SAID " sums objects; scale= needs arrays", FAN_SLOT_WHO(b, slot));
    bool exact = fan_fold_exact(f) && (f->n > 1 || f->state);
    bool same_dtype = objects || fan_accum_dtype(sum, s->spec->accumulate) == sum;
    bool whole = scaled(how) || (out != NULL);
    /* Beyond a gap nothing is committed: should a later slot fail, the missing keys may still come. */
    bool gapless = s->p->keyed < 0 || !c->g.nitems ||
                   c->g.items[c->g.nitems - 1]->key == s->p->next_key + (int64_t)c->g.nitems - 1;
    gapless = gapless || taken(b, how) == 1 || last;
    if (!gapless && f->n > 1 && !objects && !exact && f->terms[0].donated) {
        c->late = true; /* written in place once no other slot can fail any more */
        return FAN_OK;
    }
    if (f->n > 1 && !exact && !whole && same_dtype && sparse < f->n && gapless &&
        !(how->writable && fan_fold_expanded(f))) {
        /* The running sum is the result: fold in place where that may be, and keep it should a later slot fail. */
        c->doing = CUT_COMMITS;
        return FAN_OK;
    }
    if (f->n == 1 && !exact && !out && !scaled(how) && !written_by_out(outs, f->terms[0].v) &&
        !plain_copy_needed(b, how, f) && (f->terms[0].v->form == FAN_FORM_OBJECT || f->terms[0].v->dtype == sum)) {
        c->ready = fan_stream_hold(f->terms[0].producer);
        c->ready_event = fan_event_hold(f->terms[0].event);
        s->p->rules |= FAN_A(14);
        if (fan_fold_skip(f))
            c->known = fan_sum_stats_hold(&s->p->known);
        else
            FAN_TRY(survey(f, c, err));
        return fan_value_copy(b->frontend, f->terms[0].v, &c->result, err);
    }
    c->doing = CUT_FINISHES;
    f->finish = true;
    f->take = how;
    f->finish_dtype = out ? out->dtype : FAN_DT_NONE;
    if (f->n == 1)
        FAN_COUNT(b, copies, 1);
    return FAN_OK;
}

/* What the fold gave. */
static fan_status cut_end(fan_buffer *b, size_t slot, cut *c, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &c->g.fold;
    c->begun = false;
    if (c->doing == CUT_COMMITS) {
        FAN_TRY(fan_fold_commit_end(b, slot, &c->g, err));
        c->ready = fan_stream_hold(s->p->ready);
        c->ready_event = fan_event_hold(s->p->ready_event);
        c->known = fan_sum_stats_hold(&s->p->known);
        return fan_value_copy(b->frontend, &s->p->value, &c->result, err);
    }
    FAN_TRY(fan_fold_end(f, err));
    c->known = fan_sum_stats_move(&f->known);
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
static void spoil(fan_buffer *b, size_t slot, fan_status status, const fan_error *err)
{
    if (status == FAN_OK)
        return;
    fan_slot_lock(b, slot);
    fan_slot_poison(&b->slots[slot], status, err);
    fan_slot_unlock(b, slot);
}

/* Ends the folds of cuts [from, to) that are in the batch; `failed`: some slot did, and nothing more is queued. A slot
 * whose sum was not queued is as it was. */
static fan_status cuts_end(fan_buffer *b, cut *cuts, size_t from, size_t to, fan_batch *batch, bool failed,
                           fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!batch)
        return FAN_OK;
    if (!failed && !FAN_FAULT(BATCH_LATE))
        fan_batch_flush(batch);
    for (size_t i = from; i < to; i++) {
        fan_error *said = status == FAN_OK ? err : &other;
        if (!cuts[i].begun)
            continue;
        if (fan_fold_left(&cuts[i].g.fold)) {
            fan_fold_abandon(&cuts[i].g.fold);
            cuts[i].begun = false;
            continue;
        }
        fan_status its = cut_end(b, cuts[i].slot, &cuts[i], said);
        spoil(b, cuts[i].slot, its, said);
        status = status == FAN_OK ? its : status;
    }
    if (!failed && FAN_FAULT(BATCH_LATE))
        fan_batch_flush(batch);
    if (status == FAN_OK)
        status = fan_batch_failure(batch, err);
    fan_batch_clear(batch);
    return status;
}

/* Carries out the slot's fold, or puts it into the batch. */
static fan_status cut_fold(fan_buffer *b, size_t slot, cut *c, fan_batch *batch, fan_error *err)
{
    if (c->doing == CUT_DONE)
        return FAN_OK;
    if (batch && fan_fold_batches(&c->g.fold)) {
        FAN_TRY(fan_fold_begin(&c->g.fold, batch, err));
        c->begun = true;
        return FAN_OK;
    }
    if (batch)
        fan_batch_flush(batch); /* the device's order is that of the slots */
    FAN_TRY(fan_fold_begin(&c->g.fold, NULL, err));
    return cut_end(b, slot, c, err);
}

/* The stream that writes a sum into out, a hold: A, where it was made. A slot that was fed zeros alone has none: then
 * the taker's, or the device's current one. */
static fan_stream *writer(const fan_pass *p, const fan_fold *f, const fan_value *out)
{
    if (p->accum || !out->device->backend->has_streams)
        return fan_stream_hold(p->accum);
    return f->taker && f->taker->device == out->device ? fan_stream_hold(f->taker) : fan_stream_current(out->device);
}

/* A sum that is there already goes into out: copied, or, if it is sparse, its entries over zeros. */
static fan_status copy_into_out(fan_buffer *b, const fan_value *out, cut *c, fan_stream *A, fan_error *err)
{
    fan_fold *f = &c->g.fold;
    fan_operand one = {c->result.array, out->dtype};
    if (!A && out->device->backend->has_streams)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    f->out = out;
    FAN_TRY(fan_fold_wait_taker(f, A, err));
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

/* Copies the sum into out. */
static fan_status cut_copy(fan_buffer *b, size_t slot, const fan_take *how, cut *c, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    const fan_value *out = out_at(how, slot);
    fan_value sum = c->result;
    fan_stream *R = writer(s->p, &c->g.fold, out);
    fan_status status = copy_into_out(b, out, c, R, err);
    fan_stream_drop(c->ready);
    c->ready = R;
    FAN_TRY(status);
    fan_event_drop(c->ready_event);
    c->ready_event = NULL;
    if (s->p->accum && s->p->accum != s->p->consumer)
        FAN_TRY(fan_plan_record(b, s->p->accum, FAN_PLAN_S22_RECORD, &c->ready_event, err));
    c->result = (fan_value){.dtype = FAN_DT_NONE};
    fan_value_drop(b->frontend, &sum);
    return fan_value_copy(b->frontend, out, &c->result, err);
}

/* Does out= lie where one of the terms lies? */
static bool written_by_out_itself(const cut *c, const fan_value *out)
{
    for (size_t i = 0; i < c->g.fold.n; i++)
        if (c->g.fold.terms[i].v->form == FAN_FORM_DENSE && !fan_array_apart(out->array, c->g.fold.terms[i].v->array))
            return true;
    return false;
}

static fan_status cut_claim(fan_buffer *b, size_t slot, fan_error *err)
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
static fan_status learn(cut *c, const fan_pass *p, fan_error *err)
{
    fan_fold *f = &c->g.fold;
    fan_sum_stats was = c->known;
    if (c->result.form == FAN_FORM_UNDEFINED || c->result.form == FAN_FORM_OBJECT) {
        fan_sum_stats_drop(&c->known);
        c->known = (fan_sum_stats){.yes = true, .stats = {.count = UINT64_MAX}};
        return FAN_OK;
    }
    if (!was.yes && c->by_copy && f->n == 0 && !f->state) {
        c->known = (fan_sum_stats){.yes = true, .stats = {.count = (uint64_t)c->result.array->size, .bad = SIZE_MAX}};
        return FAN_OK;
    }
    f->known = was;
    c->known = (fan_sum_stats){.yes = false};
    FAN_TRY(fan_fold_learn(f, &c->result, err));
    c->known = fan_sum_stats_move(&f->known);
    if (p->known.bad) {
        c->known.bad = true;
        c->known.bad_key = p->known.bad_key;
    }
    return FAN_OK;
}

/* Claims every slot, and looks at what it holds and at what is wished. */
static fan_status take_claim(fan_buffer *b, const fan_take *how, cut *cuts, extents *inputs, extents *outs,
                             fan_error *err)
{
    for (size_t i = 0; i < taken(b, how); i++) {
        size_t slot = cuts[i].slot;
        FAN_TRY(cut_claim(b, slot, err));
        cuts[i].claimed = true;
        FAN_TRY(fan_gather(b, slot, SIZE_MAX, &cuts[i].g, err));
        cuts[i].gathered = true;
        cuts[i].g.fold.may_end = true;
        for (size_t j = 0; j < cuts[i].g.fold.n; j++)
            if (cuts[i].g.fold.terms[j].v->form == FAN_FORM_OBJECT && (scaled(how) || out_of(how, i)))
                return fan_fail(err, FAN_ERR_TYPE, FAN_SLOT_SAID " sums objects; scale= and out= need arrays",
                                FAN_SLOT_WHO(b, slot));
        FAN_TRY(check_scale(b, slot, &cuts[i].g.fold, how, err));
        if (out_of(how, i))
            FAN_TRY(check_out(b, slot, &cuts[i].g, &how->out[i], err));
    }
    if (how->out)
        FAN_TRY(look_at_outs(b, how, cuts, inputs, outs, err));
    for (size_t i = 0; how->out && i < taken(b, how); i++)
        if (out_of(how, i)) {
            for (size_t j = 0; j < cuts[i].g.fold.n; j++)
                cuts[i].by_copy = cuts[i].by_copy || cuts[i].g.fold.terms[j].v->form != FAN_FORM_DENSE;
            /* Whether the terms of an exact sum were finite is looked at once it is made: none of them may be gone
             * then. */
            cuts[i].by_copy = cuts[i].by_copy || (b->known && fan_fold_exact(&cuts[i].g.fold) &&
                                                  written_by_out_itself(&cuts[i], &how->out[i]));
            cuts[i].by_copy = (cuts[i].g.fold.n || cuts[i].g.zero || cuts[i].g.fold.state) &&
                              (cuts[i].by_copy || out_meets_inputs(inputs, how->out[i].array, cuts[i].slot));
        }
    return FAN_OK;
}

static fan_stream *consumer_of(const fan_buffer *b, const fan_take *how, size_t slot)
{
    fan_stream *C =
        b->slots[slot].p->consumer; /* the buffer's, unless it was redirected (S7); of zeros alone it knows none */
    return how->stream ? how->stream : C ? C : b->stream;
}

/* A pass over all slots: what each does in it, and the end of what went into the batch meanwhile. */
typedef fan_status step(fan_buffer *b, size_t slot, const fan_take *how, const extents *outs, cut *c, fan_batch *batch,
                        fan_error *err);

static fan_status each_slot(fan_buffer *b, const fan_take *how, const extents *outs, cut *cuts, fan_batch *batch,
                            step *one, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    size_t ended = 0;
    for (size_t i = 0; i < taken(b, how) && status == FAN_OK; i++) {
        status = one(b, cuts[i].slot, how, outs, &cuts[i], batch, err);
        spoil(b, cuts[i].slot, status, err);
        if (status == FAN_OK && batch && fan_batch_bytes(batch) >= FAN_MANY_BYTES) {
            status = cuts_end(b, cuts, ended, i + 1, batch, false, err);
            ended = i + 1;
        }
    }
    bool failed = status != FAN_OK;
    fan_status its = cuts_end(b, cuts, ended, taken(b, how), batch, failed, failed ? &other : err);
    return failed ? status : its;
}

static fan_status step_sum(fan_buffer *b, size_t slot, const fan_take *how, const extents *outs, cut *c,
                           fan_batch *batch, fan_error *err)
{
    FAN_TRY(cut_decide(b, slot, how, outs, c, consumer_of(b, how, slot), false, err));
    return cut_fold(b, slot, c, batch, err);
}

static fan_status step_late(fan_buffer *b, size_t slot, const fan_take *how, const extents *outs, cut *c,
                            fan_batch *batch, fan_error *err)
{
    if (!c->late)
        return FAN_OK;
    FAN_TRY(cut_decide(b, slot, how, outs, c, consumer_of(b, how, slot), true, err));
    return cut_fold(b, slot, c, batch, err);
}

/* On the CPU nothing is allocated here, so no out is written unless all are. */
static fan_status step_write(fan_buffer *b, size_t slot, const fan_take *how, const extents *outs, cut *c,
                             fan_batch *batch, fan_error *err)
{
    fan_fold *f = &c->g.fold;
    (void)outs;
    if (!c->into_out)
        return FAN_OK;
    c->doing = CUT_FINISHES;
    f->take = how;
    f->finish = true;
    f->out = out_at(how, slot);
    return cut_fold(b, slot, c, batch, err);
}

static bool goes_out(const fan_take *how, size_t slot) { return out_at(how, slot) != NULL; }

static fan_status step_hand_over(fan_buffer *b, size_t slot, const fan_take *how, const extents *outs, cut *c,
                                 fan_batch *batch, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    (void)outs, (void)batch;
    if (c->handed)
        return FAN_OK;
    c->handed = true;
    if (out_at(how, slot) && c->by_copy)
        FAN_TRY(cut_copy(b, slot, how, c, err));
    if (c->result.form != FAN_FORM_UNDEFINED)
        FAN_TRY(hand_over(b, slot, &c->result, s->p->consumer, s->p->accum, c->ready, c->ready_event,
                          consumer_of(b, how, slot), &s->p->rules, err));
    return b->known ? learn(c, s->p, err) : FAN_OK;
}

/* What does not go into an out is handed over before any out is written: to show it may fail. */
static fan_status step_hand_over_first(fan_buffer *b, size_t slot, const fan_take *how, const extents *outs, cut *c,
                                       fan_batch *batch, fan_error *err)
{
    return goes_out(how, slot) ? FAN_OK : step_hand_over(b, slot, how, outs, c, batch, err);
}

static void name_origin(cut *c)
{
    if (c->result.form == FAN_FORM_UNDEFINED || c->result.form == FAN_FORM_ZERO)
        return;
    c->result.origin = c->origin;
    c->result.rank = c->rank;
}

/* Whoever is shown a sum may keep it, also where another's failure ends the take: what stays in the slot is not written
 * any more. */
static fan_status show_all(fan_buffer *b, const fan_take *how, cut *cuts, fan_error *err)
{
    for (size_t i = 0; how->show && i < taken(b, how); i++) {
        cut *c = &cuts[i];
        fan_pass *p = b->slots[c->slot].p;
        if (out_of(how, i)) {
            if (c->into_out || c->by_copy)
                FAN_TRY(how->show(how->ctx, i, NULL, err));
            continue;
        }
        for (size_t k = 0; k < p->nitems; k++)
            p->items[k]->lent = true;
        if (p != &fan_pass_none)
            p->value_lent = true;
        name_origin(c);
        FAN_TRY(how->show(how->ctx, i, &c->result, err));
    }
    return FAN_OK;
}

/* Objects that were summed meanwhile are others' code: what is to be written lies where it lay. */
static fan_status outs_still(const fan_buffer *b, const fan_take *how, fan_error *err)
{
    for (size_t i = 0; how->out && b->frontend->still && i < taken(b, how); i++)
        if (out_of(how, i) && how->out[i].device == fan_cpu() && !b->frontend->still(&how->out[i]))
            return fan_fail(err, FAN_ERR_STATE,
                            FAN_SLOT_SAID ": the memory, dtype or shape of out= was changed during the take",
                            FAN_SLOT_WHO(b, how->one ? how->slot : i));
    return FAN_OK;
}

/* What is written into out comes after all sums, copies into it after all else: they may write what is still to be
 * read. */
static fan_status take_all(fan_buffer *b, const fan_take *how, const extents *outs, cut *cuts, fan_error *err)
{
    fan_batch *batch = NULL;
    fan_status status = FAN_OK;
    bool streams = false, late = false;
    for (size_t i = 0; i < taken(b, how); i++)
        streams |= b->slots[cuts[i].slot].p->accum != NULL;
    if (streams && taken(b, how) > 1 && !b->known && !(batch = fan_batch_new()))
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    FAN_GO(each_slot(b, how, outs, cuts, batch, step_sum, err));
    FAN_GO(each_slot(b, how, outs, cuts, batch, step_late, err));
    for (size_t i = 0; i < taken(b, how); i++)
        late |= cuts[i].late;
    for (size_t i = 0; late && i < taken(b, how); i++)
        cuts[i].g.fold.may_end = false;
    FAN_GO(each_slot(b, how, outs, cuts, batch, step_hand_over_first, err));
    FAN_GO(show_all(b, how, cuts, err));
    FAN_GO(outs_still(b, how, err));
    if (how->out)
        FAN_GO(each_slot(b, how, outs, cuts, batch, step_write, err));
    status = each_slot(b, how, outs, cuts, batch, step_hand_over, err);
done:
    fan_batch_free(batch);
    return status;
}

static void trace_take(const fan_buffer *b, size_t slot, const cut *c, fan_stream *consumer)
{
    const fan_slot *s = &b->slots[slot];
    const fan_device *d = consumer ? consumer->device : s->p->device;
    fan_trace_line line = {.kind = FAN_TRACE_TAKE,
                           .how = s->p->how,
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

/* Empties the slots whose sums are there, and opens all; *gone is for fan_pass_free. */
static void take_let_go(fan_buffer *b, const fan_take *how, cut *cuts, fan_status status, fan_pass **gone)
{
    for (size_t i = 0; i < taken(b, how) && cuts[i].claimed; i++) {
        cut *c = &cuts[i];
        if (status == FAN_OK && fan_trace_on() && c->result.form != FAN_FORM_UNDEFINED)
            trace_take(b, c->slot, c, consumer_of(b, how, c->slot));
        fan_slot_lock(b, c->slot);
        if (status == FAN_OK) {
            gone[i] = fan_pass_cut(&b->slots[c->slot]);
            if (b->known) {
                fan_sum_stats old = b->known[c->slot];
                b->known[c->slot] = c->known;
                c->known = old;
            }
        }
        fan_slot_let_go(b, c->slot);
        fan_slot_unlock(b, c->slot);
    }
}

static void cut_fini(fan_buffer *b, cut *c, fan_pass *gone)
{
    fan_sum_stats_drop(&c->known);
    fan_stream_drop(c->ready);
    fan_event_drop(c->ready_event);
    if (c->gathered)
        fan_gathered_fini(&c->g);
    if (gone && gone != &fan_pass_none) { /* the consumer has waited for what was pooled */
        fan_stream_drop(gone->joins);
        gone->joins = NULL;
    }
    fan_pass_free(b, gone);
}

fan_status fan_buffer_take(fan_buffer *b, const fan_take *how, fan_value *results, fan_error *err)
{
    FAN_TRY(fan_buffer_here(b, err));
    if (how->one)
        FAN_TRY(fan_slot_check(b, how->slot, err));
    size_t n = taken(b, how);
    cut *cuts = fan_calloc((n ? n : 1) * sizeof *cuts);
    fan_pass **gone = fan_calloc((n ? n : 1) * sizeof *gone);
    fan_status status;
    if (!cuts || !gone) {
        fan_free(cuts);
        fan_free(gone);
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    }
    for (size_t i = 0; i < n; i++)
        cuts[i].slot = how->one ? how->slot : i;
    extents inputs = {NULL, 0}, outs = {NULL, 0};
    status = take_claim(b, how, cuts, &inputs, &outs, err);
    if (status == FAN_OK)
        status = take_all(b, how, &outs, cuts, err);
    fan_free(inputs.all);
    fan_free(outs.all);
    take_let_go(b, how, cuts, status, gone);
    for (size_t i = 0; i < n; i++) {
        cut *c = &cuts[i];
        if (status == FAN_OK) {
            name_origin(c);
            results[i] = c->result;
        } else {
            fan_value_drop(b->frontend, &c->result);
        }
        cut_fini(b, c, gone[i]);
    }
    fan_free(cuts);
    fan_free(gone);
    return status;
}

fan_status fan_buffer_snapshot(fan_buffer *b, size_t slot, fan_stream *consumer, fan_value *out, fan_error *err)
{
    fan_slot *s;
    fan_gathered g;
    fan_status status;
    fan_fold *f = &g.fold;
    *out = (fan_value){.dtype = FAN_DT_NONE};
    FAN_TRY(fan_slot_check(b, slot, err));
    s = &b->slots[slot];
    fan_slot_lock(b, slot);
    status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK)
        status = fan_slot_claim_all(b, slot, false, "a snapshot", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    status = fan_gather(b, slot, SIZE_MAX, &g, err);
    if (status != FAN_OK)
        goto let_go;
    f->finish = f->forbid_in_place = true;
    if (f->n == 0 && !f->state) {
        if (g.zero)
            status = zero_sum(b, slot, g.zero, fan_fold_dtype(f), out, err);
    } else if (f->n == 1 && !f->state && f->terms[0].v->form == FAN_FORM_OBJECT) {
        status = fan_value_copy(b->frontend, f->terms[0].v, out, err);
        if (status == FAN_OK)
            status = hand_over(b, slot, out, s->p->consumer, s->p->accum, f->terms[0].producer, f->terms[0].event,
                               consumer ? consumer : s->p->consumer, &f->rules, err);
    } else {
        status = fan_fold_run(f, err);
        *out = f->result;
        if (status == FAN_OK)
            status = hand_over(b, slot, out, s->p->consumer, s->p->accum, f->ready, f->ready_event,
                               consumer ? consumer : s->p->consumer, &f->rules, err);
    }
    if (status == FAN_OK && !g.like && f->state) {
        out->origin = f->state->origin;
        out->rank = f->state->rank;
    }
    if (status == FAN_OK && g.like && out->form != FAN_FORM_OBJECT) {
        out->origin = g.like->origin;
        out->rank = g.like->rank;
    }
    if (status != FAN_OK)
        fan_value_drop(b->frontend, out);
    fan_gathered_fini(&g);
let_go:
    fan_slot_lock(b, slot);
    fan_slot_poison(s, status, err);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    return status;
}
