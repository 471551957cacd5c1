#include "array/exact.h"
#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/fold.h"
#include "buffer/fold_job.h"
#include "buffer/plain.h"
#include "buffer/slot.h"
#include "buffer/order.h"
#include "buffer/stats.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* ---- what the slot holds, as terms ---- */

void fan_gathered_fini(fan_gathered *gathered)
{
    for (size_t i = 0; i < gathered->nvalues; i++)
        fan_value_drop(gathered->fold.b->frontend, &gathered->values[i]);
    fan_free(gathered->values);
    fan_free(gathered->room);
    fan_free(gathered->entries);
    fan_free(gathered->fold.terms);
    fan_free(gathered->fold.scratch);
    fan_free(gathered->fold.keys);
    fan_sum_stats_drop(&gathered->fold.sum_stats);
    fan_stream_drop(gathered->fold.ready);
    fan_event_drop(gathered->fold.ready_event);
    memset(gathered, 0, sizeof *gathered);
}

/* The running sum and the first `m` parked contributions, copied: what arrives meanwhile moves the
 * list. */
static fan_status fold_gather_entries(fan_buffer *b, size_t slot, size_t m, fan_gathered *gathered,
                                      fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &gathered->fold;
    fan_slot_lock(b, slot);
    size_t room = fan_slot_entries(s), plain = 0;
    for (size_t i = 0; i < room; i++)
        plain += !s->list->entries[i].general;
    fan_slot_unlock(b, slot);
    f->terms = fan_alloc((room + 1) * sizeof *f->terms);
    f->scratch = fan_alloc((room + 2) * sizeof *f->scratch);
    gathered->entries = fan_alloc((room + 1) * sizeof *gathered->entries);
    gathered->values = plain ? fan_alloc(plain * sizeof *gathered->values) : NULL;
    gathered->room = fan_calloc(sizeof *gathered->room);
    if (!f->terms || !f->scratch || !gathered->entries || !gathered->room ||
        (plain && !gathered->values))
        return fan_slot_fail_memory(b, slot, err);
    fan_slot_lock(b, slot);
    if (s->list)
        fan_list_sort(s->list);
    gathered->has_sum = fan_slot_sum(s);
    for (size_t i = 0; i < fan_slot_entries(s) && gathered->n < room &&
                       (m == SIZE_MAX || gathered->n < m + gathered->has_sum);
         i++)
        if (fan_entry_parked(&s->list->entries[i]))
            gathered->entries[gathered->n++] = s->list->entries[i];
    fan_slot_unlock(b, slot);
    return FAN_OK;
}

/* D15: the kind of a sum that has one term more. */
static void fold_like(fan_like *like, const fan_term *t)
{
    bool lower_key = t->key >= 0 && t->key < like->key;
    if (!like->some || FAN_FAULT(KIND_OF_LAST) || t->v->rank < like->rank ||
        (t->v->rank == like->rank && lower_key))
        *like = (fan_like){.some = true, .origin = t->v->origin, .rank = t->v->rank, .key = t->key};
}

/* The i-th entry becomes a term, if it adds anything. */
static fan_status fold_gather_one(fan_gathered *gathered, size_t i, fan_error *err)
{
    fan_fold *f = &gathered->fold;
    const fan_slot *s = fan_fold_slot(f);
    const fan_entry *one = &gathered->entries[i];
    bool sum = i == 0 && gathered->has_sum;
    fan_term t = {
        .is_value = sum, .entry = i, .key = sum ? s->state->like_key : fan_entry_key(one)};
    if (!sum)
        f->seen = fan_entry_seen(f->seen, s, one);
    if (one->general) {
        const fan_item *it = one->item;
        t.v = &it->value;
        if (it->value.form != FAN_FORM_UNDEFINED && it->value.form != FAN_FORM_ZERO) {
            t.producer = it->producer;
            t.event = it->event;
            t.donated = it->donated;
            t.owned = it->owned;
            t.exposed = it->exposed;
            t.own = it->value.weak ? FAN_DT_NONE : fan_dtype_set_promote(it->own);
            t.number = it->number;
            FAN_TRY(fan_slot_unchanged(f->b, f->slot, &it->value, t.key,
                                       it->hashed ? &it->hash : NULL, f->may_end, err));
            /* Whatever the caller did to its indices since: no sum reads or writes out of
             * bounds. */
            bool checked =
                it->value.form != FAN_FORM_SPARSE || it->value.device != fan_cpu() || it->owned;
            if (!checked)
                FAN_TRY(fan_sparse_check(it->value.sparse, err));
        }
    } else if (one->object) {
        /* The value of a plain entry, made for this sum: the entry stays as it is. */
        fan_value *v = &gathered->values[gathered->nvalues];
        bool kept = false;
        t.owned = one->owned || (t.is_value && s->list->summed > 1);
        t.donated = one->donated;
        /* Checked before plain_value makes a value, which has a reference of its own. */
        t.unshared = f->n == 0 && !one->exposed && fan_plain_unshared(f->b, one, t.owned);
        const fan_plain_kind kind = fan_entry_kind(&s->list->kind, one);
        fan_status status =
            f->b->frontend->plain_value(one->object, one->data, &kind, v, &kept, err);
        if (status == FAN_ERR_STATE)
            return fan_slot_changed(f->b, f->slot, one->key, err);
        FAN_TRY(status);
        gathered->nvalues++;
        t.v = v;
        t.exposed = t.owned && (kept || one->exposed);
        t.own = v->weak || v->form == FAN_FORM_OBJECT ? FAN_DT_NONE : s->list->kind.dtype;
        t.number = fan_value_number(v);
    }
    if (!t.v || t.v->form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    if (t.v->form == FAN_FORM_ZERO) {
        gathered->zero_entry = gathered->zero ? gathered->zero_entry : i;
        gathered->zero = gathered->zero ? gathered->zero : t.v;
        return FAN_OK;
    }
    if (sum)
        t.own = FAN_DT_NONE;
    t.weak_int = sum && s->list->summed > 1 ? 0 : t.number;
    t.seen = sum ? s->state->value_seen : f->seen;
    f->terms[f->n++] = t;
    fold_like(&gathered->like, &t);
    return FAN_OK;
}

/* D5: each Python int counts with its value. While one of those so far does not fit the promotion
 * of the terms so far, these run in that of the first later term with which they all do, or of the
 * sum. From the first object on dtypes mean nothing. */
static void fold_fit_ints(fan_gathered *gathered)
{
    fan_fold *f = &gathered->fold;
    const fan_slot *s = fan_fold_slot(f);
    size_t n = 0;
    /* a number other than 0: 0 fits every dtype */
    bool some = s->state->summed_lo < 0 || s->state->summed_hi > 0;
    while (n < f->n && f->terms[n].v->form != FAN_FORM_OBJECT) {
        some = some || f->terms[n].weak_int != 0;
        n++;
    }
    if (!some || s->spec->dtype != FAN_DT_NONE || (n == 0 && f->n > 0))
        return;
    fan_dtype_set all = n < f->n ? f->terms[n].seen : f->seen;
    size_t waiting = 0; /* the first term whose dtype is not known yet */
    gathered->weak_lo = s->state->summed_lo;
    gathered->weak_hi = s->state->summed_hi;
    for (size_t i = 0; i < n; i++) {
        int64_t number = f->terms[i].weak_int;
        gathered->weak_lo = number < gathered->weak_lo ? number : gathered->weak_lo;
        gathered->weak_hi = number > gathered->weak_hi ? number : gathered->weak_hi;
        fan_dtype d = fan_dtype_set_promote(f->terms[i].seen);
        bool fits =
            fan_weak_int_fits(gathered->weak_lo, d) && fan_weak_int_fits(gathered->weak_hi, d);
        for (; fits && waiting <= i; waiting++)
            f->terms[waiting].seen = f->terms[i].seen;
    }
    for (; waiting < n; waiting++)
        f->terms[waiting].seen = all;
    fan_dtype d = fan_dtype_set_promote(all);
    if (!fan_weak_int_fits(gathered->weak_lo, d))
        gathered->unfit = gathered->weak_lo;
    else if (!fan_weak_int_fits(gathered->weak_hi, d))
        gathered->unfit = gathered->weak_hi;
}

fan_status fan_gathered_check(const fan_gathered *gathered, fan_error *err)
{
    const fan_fold *f = &gathered->fold;
    if (!gathered->unfit || FAN_FAULT(INT_WRAPS))
        return FAN_OK;
    size_t n = 0;
    while (n < f->n && f->terms[n].v->form != FAN_FORM_OBJECT)
        n++;
    fan_dtype sum = fan_dtype_set_promote(n < f->n ? f->terms[n].seen : f->seen);
    int64_t key = -1;
    for (size_t i = 0; i < n && key < 0; i++)
        if (f->terms[i].weak_int == gathered->unfit)
            key = f->terms[i].key;
    return fan_slot_fail_int(f->b, f->slot, key, gathered->unfit, sum, err);
}

/* A10: a fold at add ends in the dtypes up to its last term. A zero behind it counts from the next
 * term on: among numbers without a dtype of their own it would narrow the sum. */
static void fold_leave_zeros(fan_gathered *gathered, size_t m)
{
    fan_fold *f = &gathered->fold;
    bool at_add = m != SIZE_MAX;
    gathered->seen = f->seen;
    if (at_add && f->n > 0 && !fan_fold_slot(f)->spec->exact)
        f->seen = f->terms[f->n - 1].seen;
}

fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, bool may_end, fan_gathered *gathered,
                      fan_error *err)
{
    memset(gathered, 0, sizeof *gathered);
    gathered->fold.may_end = may_end;
    gathered->fold.b = b;
    gathered->fold.slot = slot;
    gathered->fold.finish_dtype = FAN_DT_NONE;
    fan_status status = fold_gather_entries(b, slot, m, gathered, err);
    gathered->fold.seen = b->slots[slot].state->summed_seen;
    gathered->fold.state = b->slots[slot].state->exact;
    if (gathered->fold.state) /* it came before all that still wait */
        gathered->like = gathered->fold.state->like;
    for (size_t i = 0; status == FAN_OK && i < gathered->n; i++)
        status = fold_gather_one(gathered, i, err);
    if (status != FAN_OK) {
        fan_gathered_fini(gathered);
        return status;
    }
    fold_fit_ints(gathered);
    fold_leave_zeros(gathered, m);
    return FAN_OK;
}

/* ---- planned, begun, ended ---- */

/* Whether a term's memory shares bytes with no other operand (D43). */
static bool fold_term_disjoint(const fan_fold *f, size_t which)
{
    const fan_array *a = f->terms[which].v->array;
    fan_array *own[3];
    for (size_t i = 0; i < f->n; i++) {
        size_t n;
        fan_array *const *others = fan_value_arrays(f->terms[i].v, own, &n);
        for (size_t k = 0; k < n && i != which; k++)
            if (!fan_array_extents_disjoint(a, others[k]) && !fan_array_disjoint(a, others[k]))
                return false;
    }
    return true;
}

/* The compact base of our own expanded sum may be written as long as the sum stays expanded
 * (A13). */
static bool fold_term_base_dense(const fan_fold *f, const fan_term *t)
{
    uint64_t expanded = fan_array_expanded(t->v->array);
    fan_array *compact = NULL;
    if (!expanded || !t->owned ||
        fan_array_compact(t->v->array, expanded, &compact, NULL) != FAN_OK)
        return false;
    bool dense = fan_array_dense(compact);
    fan_array_drop(compact);
    for (size_t i = 0; i < f->n; i++)
        if (!f->terms[i].v->array || (expanded & ~fan_array_expanded(f->terms[i].v->array)))
            dense = false;
    return dense;
}

fan_reuse_answer fan_term_may_write(const fan_fold *f, size_t which, fan_writer writer)
{
    const fan_term *t = &f->terms[which];
    const fan_array *a = t->v->array;
    bool sum = writer == FAN_WRITER_SUM || writer == FAN_WRITER_PREFIXES;
    bool host = !fan_fold_device(f)->backend->has_streams;
    fan_reuse facts = {
        .owned = t->owned, .exposed = t->exposed, .donated = t->donated, .host = host};
    if (!facts.owned && !facts.donated && !facts.exposed && host && t->v->object)
        facts.unshared = t->unshared || f->b->frontend->unshared(t->v->object);
    facts.dense = !a || fan_array_dense(a) || (sum && fold_term_base_dense(f, t));
    facts.writable = !a || a->writable || (sum && t->owned);
    fan_dtype target = fan_fold_accumulated(f, f->seen);
    /* a taker gets it as it is */
    facts.same_dtype = writer == FAN_WRITER_TAKER || t->v->dtype == target;
    if (writer == FAN_WRITER_PREFIXES)
        facts.same_dtype = facts.same_dtype && fan_fold_accumulated(f, f->terms[0].seen) == target;
    facts.disjoint = !sum || fold_term_disjoint(f, which);
    /* For a sum fan_order_wait_users makes A wait, and a taker's stream waits. */
    facts.exclusive = writer != FAN_WRITER_TARGET || t->producer == fan_fold_accum(f);
    facts.read_later = writer == FAN_WRITER_PREFIXES && f->b->sum_stats &&
                       !(which == 0 && fan_fold_first_suspect(f) && host);
    if (sum &&
        (FAN_FAULT(WRITE_SHARED) || (FAN_FAULT(REFCOUNT_IS_ENOUGH) && atomic_load(&a->refs) == 1 &&
                                     atomic_load(&a->storage->refs) == 1)))
        facts.owned = true;
    return fan_reusable(&facts);
}

static fan_side fold_side_of(const fan_value *v)
{
    return (fan_side){.form = v->form,
                      .format = v->form == FAN_FORM_SPARSE ? (int)v->sparse->format : 0};
}

bool fan_fold_is_exact(const fan_fold *f)
{
    fan_dtype d = fan_fold_dtype(f);
    return fan_fold_slot(f)->spec->exact && d != FAN_DT_NONE && fan_exact_fits(d);
}

static fan_fold_facts fold_facts(const fan_fold *f)
{
    const fan_slot *s = fan_fold_slot(f);
    /* The facts of the terms, but for whether they may be written. */
    fan_fold_facts facts = {.terms = f->n};
    for (size_t i = 0; i < f->n; i++) {
        const fan_value *v = f->terms[i].v;
        facts.sparse += v->form == FAN_FORM_SPARSE;
        facts.objects += v->form == FAN_FORM_OBJECT;
        facts.entries += v->form == FAN_FORM_SPARSE ? fan_sparse_nnz(v->sparse) : 0;
    }
    facts.expanded = fan_fold_expanded(f);
    if (f->n) {
        const fan_value *v = f->terms[0].v;
        facts.first = fold_side_of(v);
        facts.coalesced = v->form == FAN_FORM_SPARSE && v->sparse->coalesced;
        facts.summed = f->terms[0].is_value && s->list->summed > 1;
        facts.entries_before = v->form == FAN_FORM_SPARSE ? v->sparse->nnz_coalesced : 0;
    }
    if (f->n > 1) {
        /* Which term the first one meets, as the rules have it: an object, else one of another
         * form, else a sparse one of another format, else the second. */
        fan_side first = fold_side_of(f->terms[0].v);
        size_t other = 1;
        int best = 0;
        for (size_t i = 1; i < f->n; i++) {
            fan_side one = fold_side_of(f->terms[i].v);
            int rank = one.form == FAN_FORM_OBJECT  ? 3
                       : one.form != first.form     ? 2
                       : one.format != first.format ? 1
                                                    : 0;
            if (rank > best) {
                best = rank;
                other = i;
            }
        }
        facts.other = fold_side_of(f->terms[other].v);
        facts.other_is_second = other == 1;
    }
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
    facts.slot = (fan_sync_slot){.consumer = fan_stream_id_of(s->state->consumer),
                                 .accum = fan_stream_id_of(s->state->accum),
                                 .ready = fan_stream_id_of(f->n ? f->terms[0].producer : NULL),
                                 .has_event = f->n && f->terms[0].event != NULL};
    facts.taker = fan_stream_id_of(f->taker);
    return facts;
}

void fan_fold_decide(fan_fold *f)
{
    fan_fold_facts facts = fold_facts(f);
    fan_writer writer = facts.sparse && facts.sparse < f->n ? FAN_WRITER_PREFIXES : FAN_WRITER_SUM;
    facts.reuse_first = facts.reuse_other = FAN_REUSE_LAYOUT;
    if (!f->finish && !facts.exact && !facts.objects && f->n) {
        if (facts.first.form == FAN_FORM_DENSE)
            facts.reuse_first = fan_term_may_write(f, 0, writer);
        else if (facts.coalesced && facts.other_is_second && facts.other.form == FAN_FORM_DENSE)
            facts.reuse_other = fan_term_may_write(f, 1, writer);
    }
    f->plan = fan_plan_fold(&facts);
}

bool fan_fold_batches(const fan_fold *f)
{
    fan_fold_facts facts = fold_facts(f);
    return f->n && fan_plan_fold(&facts).batches;
}

static fan_status fold_body(fan_fold *f, fan_error *err);

/* D14: *sum becomes the sum of the terms before the first object, made as usual. */
static fan_status fold_before_objects(fan_fold *f, size_t first, fan_value *sum, fan_error *err)
{
    const fan_term *t = &f->terms[0];
    bool summed = t->is_value && fan_fold_slot(f)->list->summed > 1;
    bool loose = summed && t->v->form == FAN_FORM_SPARSE && !t->v->sparse->coalesced; /* D12 */
    /* An object brings no dtype, so its `seen` is that of all before it. */
    bool rounded = first == 1 && t->v->dtype == fan_dtype_set_promote(f->terms[1].seen);
    if (first == 0 || (rounded && !loose))
        return fan_value_copy(f->b->frontend, t->v, sum, err);
    fan_fold sub = *f;
    sub.n = first;
    sub.seen = f->terms[first].seen;
    sub.finish = true;
    sub.finish_dtype = FAN_DT_NONE;
    sub.take = NULL;
    sub.result = fan_value_none();
    sub.sum_stats = (fan_sum_stats){.valid = false};
    fan_fold_decide(&sub);
    fan_status status = fold_body(&sub, err);
    f->rules |= sub.rules;
    *sum = sub.result;
    fan_like like = {.some = false};
    for (size_t i = 0; i < first; i++)
        fold_like(&like, &f->terms[i]);
    fan_value_set_origin(f->b->frontend, sum, like.origin, like.rank);
    return status;
}

/* fold_combine_failed: the error of term t, which the frontend did not add; with its place, which
 * the frontend has not got. */
static fan_status fold_combine_failed(const fan_fold *f, const fan_term *t, fan_status status,
                                      fan_error *err)
{
    fan_place place = fan_slot_place(f->b, f->slot, t->key);
    if (status == FAN_ERR_EXTERN) /* the frontend has the exception; this says where */
        return fan_fail_at(err, FAN_ERR_EXTERN, 0, place,
                           "this contribution was not added to those before it");
    if (!err)
        return status;
    char reason[FAN_ERROR_TEXT];
    memcpy(reason, err->text, sizeof reason);
    return fan_fail_at(err, status, 0, place, "%s", reason);
}

/* *sum becomes that of itself and term t. */
static fan_status fold_combine(fan_fold *f, const fan_term *t, fan_value *sum, fan_error *err)
{
    fan_value own = {.dtype = FAN_DT_NONE}, next = {.dtype = FAN_DT_NONE};
    /* A reduced contribution is kept in the accumulation dtype (D7); an object meets it in its
     * own. */
    const fan_value *v = t->v;
    fan_array *a = NULL;
    if (v->form == FAN_FORM_DENSE && t->own != FAN_DT_NONE && v->dtype != t->own) {
        FAN_TRY(fan_fold_fresh(f, t->own, v->array->ndim, v->array->shape, v->array, &a, err));
        f->scratch[0] = (fan_operand){v->array, t->own};
        fan_status status = fan_fold_job(
            f,
            &(fan_job){.kind = FAN_JOB_COPY, .out = a, .in = f->scratch, .n = 1, .label = "round"},
            err);
        if (status != FAN_OK) {
            fan_array_drop(a);
            return status;
        }
        own = fan_value_dense(a, fan_fold_device(f));
        own.origin = v->origin;
        own.rank = v->rank;
    }
    FAN_COUNT(f->b, passes, 1);
    fan_status status =
        f->b->frontend->combine(fan_fold_slot(f)->spec->combine, sum,
                                own.form == FAN_FORM_UNDEFINED ? t->v : &own, &next, err);
    fan_value_drop(f->b->frontend, &own);
    if (status != FAN_OK)
        return fold_combine_failed(f, t, status, err);
    fan_value_drop(f->b->frontend, sum);
    *sum = next;
    return FAN_OK;
}

/* Pairwise (A1, A8), from `*sum` on, which is that of the first `i` terms. */
static fan_status fold_pairs(fan_fold *f, fan_value *sum, size_t i, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_stream *A = fan_fold_accum(f);
    FAN_TRY(fan_order_wait_terms(f, err));
    if (A)
        FAN_TRY(fan_stream_push(A, err));
    for (; i < f->n && status == FAN_OK; i++)
        status = fold_combine(f, &f->terms[i], sum, err);
    if (A)
        fan_stream_pop(A);
    FAN_TRY(status);
    f->result = *sum;
    *sum = fan_value_none();
    f->owned = false;
    return FAN_OK;
}

/* From the first object on the fold is pairwise (A8), as it is for a pass that records itself
 * (A1). */
static fan_status fold_with_objects(fan_fold *f, fan_error *err)
{
    fan_value sum = fan_value_none();
    size_t first = 0;
    while (f->terms[first].v->form != FAN_FORM_OBJECT)
        first++;
    if ((f->take && f->take->scale.on) || f->out)
        return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(f->b, f->slot, -1),
                           "sums objects; scale= and out= need arrays");
    fan_status status = fold_before_objects(f, first, &sum, err);
    if (status == FAN_OK)
        status = fold_pairs(f, &sum, first ? first : 1, err);
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
    f->result = fan_value_none();
    for (size_t i = 0; i < f->n; i++)
        if (!f->terms[i].owned)
            FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, f->terms[i].v, f->terms[i].key, err));
    f->batch = batch;
    if (s->state->accum && FAN_FAULT(RECORD_BEFORE_SUM)) {
        fan_event_drop(f->ready_event);
        FAN_TRY(fan_order_record(f->b, s->state->accum, FAN_PLAN_S15_RECORD, &f->early, err));
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
    return f->batch && fan_batch_state(f->batch, f->number) == FAN_JOB_PENDING &&
           !FAN_FAULT(BATCH_LATE);
}

void fan_fold_abandon(fan_fold *f)
{
    fan_value_drop(f->b->frontend, &f->result);
    f->result = fan_value_none();
    fan_event_drop(f->early);
    f->early = NULL;
    f->batch = NULL;
}

/* S15 to S17, S22: what orders others after the sum. */
static fan_status fold_record(fan_fold *f, fan_error *err)
{
    const fan_sync_fold *plan = &f->plan.after;
    fan_stream *A = fan_fold_accum(f), *first = f->n ? f->terms[0].producer : NULL;
    fan_event *e = f->early;
    uint64_t bit = f->finish ? FAN_PLAN_S22_RECORD : FAN_PLAN_S15_RECORD;
    bool record = plan->slot.has_event && !(FAN_FAULT(NO_RECORD_BEHIND_SUM) && !f->finish);
    f->early = NULL;
    f->rules |= plan->rules;
    /* Left out, S15 leaves the first producer's event in place; a record that finds no memory
     * leaves none, and S18 records then. */
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

fan_status fan_fold_end(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    if (f->batch && fan_batch_state(f->batch, f->number) == FAN_JOB_FAILED &&
        !FAN_FAULT(BATCH_FAILURE_IGNORED))
        status = fan_batch_failure(f->batch, err);
    assert(!fan_fold_left(f));
    f->batch = NULL;
    if (status == FAN_OK)
        status = fan_fold_collect_stats(f, &f->result, err);
    if (status == FAN_OK) {
        FAN_COUNT(f->b, folds, f->n > 1);
        status = fold_record(f, err);
    }
    const fan_slot *s = fan_fold_slot(f);
    if (status != FAN_OK)
        fan_fold_abandon(f);
    else if (fan_trace_on())
        fan_slot_trace(
            f->b, f->slot,
            (fan_trace_line){.kind = FAN_TRACE_FOLD,
                             .how = s->state->accum ? fan_sync_letter(s->state->how) : '\0',
                             .device = s->state->device ? (int16_t)s->state->device->index : -1,
                             .count = (uint32_t)f->n,
                             .key = -1,
                             .rules = f->rules,
                             .stream = s->state->accum ? s->state->accum->handle : 0,
                             .bytes = fan_value_bytes(&f->result),
                             .in_place = f->plan.exclusive});
    return status;
}

fan_status fan_fold_run(fan_fold *f, fan_error *err)
{
    FAN_TRY(fan_fold_begin(f, NULL, err));
    return fan_fold_end(f, err);
}

/* ---- it becomes the slot's sum ---- */

fan_status fan_fold_commit_end(fan_buffer *b, size_t slot, fan_gathered *gathered, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_slot_state *p = s->state;
    fan_fold *f = &gathered->fold;
    fan_sum_stats old = {.valid = false};
    int64_t summed = 0;
    fan_status status = f->n > 1 ? fan_fold_end(f, err) : FAN_OK;
    if (status == FAN_OK && f->n > 1) /* unlocked: it may drop an object */
        fan_value_set_origin(b->frontend, &f->result, gathered->like.origin, gathered->like.rank);
    size_t stays = f->n == 1                     ? f->terms[0].entry
                   : f->n == 0 && gathered->zero ? gathered->zero_entry
                                                 : SIZE_MAX;
    fan_slot_lock(b, slot);
    if (status != FAN_OK) {
        fan_slot_poison(s, status, err);
        fan_slot_unlock(b, slot);
        return status;
    }
    if (f->n > 1 || stays != SIZE_MAX) {
        bool item = stays != SIZE_MAX && gathered->entries[stays].general;
        gathered->sum = item ? gathered->entries[stays].item : gathered->room;
        gathered->room = item ? gathered->room : NULL;
        summed = f->n > 1 ? 2 : stays == 0 && gathered->has_sum ? s->list->summed : 1;
    }
    if (f->n > 1) {
        const fan_term *t = &f->terms[0];
        const fan_entry *first = &gathered->entries[t->entry];
        bool same = t->is_value && t->owned && f->owned && t->v->array == f->result.array;
        old = p->sum_stats;
        *gathered->sum =
            (fan_item){.value = f->result,
                       .number = f->int_sum,
                       .producer = f->ready,
                       .event = f->ready_event,
                       .donated = f->donated,
                       .owned = f->owned,
                       .exposed = same && t->exposed,
                       .shown = same && (first->general ? first->item->shown : first->exposed)};
        f->result = fan_value_none();
        f->ready = NULL;
        f->ready_event = NULL;
        p->sum_stats = fan_sum_stats_move(&f->sum_stats);
        if (old.has_nonfinite) {
            p->sum_stats.has_nonfinite = true;
            p->sum_stats.nonfinite_key = old.nonfinite_key;
        }
        p->rules |= f->rules;
    } else if (stays != SIZE_MAX && !gathered->entries[stays].general) {
        /* The only entry that is defined becomes the slot's sum, or stays it, as it is (S8-S11
         * hold). A plain one gets an item. */
        const fan_term *t = &f->terms[0];
        *gathered->sum = (fan_item){.value = gathered->values[gathered->nvalues - 1],
                                    .number = t->number,
                                    .donated = t->donated,
                                    .owned = t->owned,
                                    .exposed = t->exposed,
                                    .shown = gathered->entries[stays].exposed};
        gathered->values[gathered->nvalues - 1] = fan_value_none();
    }
    p->value_seen = f->n == 1 ? f->terms[0].seen : f->seen;
    p->summed_seen = gathered->seen;
    p->summed_lo = gathered->weak_lo;
    p->summed_hi = gathered->weak_hi;
    if (gathered->like.some)
        p->like_key = gathered->like.key;
    /* The sum, where there is one, takes the place of the gathered entries, which are at the front
     * of the list but for those that arrived between (only beyond a gap). */
    fan_list *list = s->list;
    size_t kept = gathered->sum != NULL, k = 0, plain = 0;
    int64_t last = gathered->n ? fan_entry_key(&gathered->entries[gathered->n - 1]) : -1;
    for (size_t i = 0; list && i < list->n; i++) {
        fan_entry one = list->entries[i];
        if (k == gathered->n || !fan_entry_same(&one, &gathered->entries[k])) {
            assert(kept <= i);
            list->entries[kept++] = one;
            continue;
        }
        if (list->unsorted && fan_keys_has(list->unsorted, fan_entry_key(&one)))
            fan_keys_remove(list->unsorted, fan_entry_key(&one));
        if (one.general)
            fan_item_unpark(b, one.item);
        plain += !one.general && one.object && !(i == 0 && gathered->has_sum);
        list->undefined -= !one.object;
        k++;
    }
    if (plain)
        fan_list_unpark(b, list, plain);
    if (list) {
        list->n = kept;
        list->recheck_at = 0;
        list->summed = summed;
    }
    if (gathered->sum) {
        gathered->sum->parked = true;
        gathered->sum->alone = false;
        gathered->sum->bytes = 0;
        gathered->sum->key = last;
        list->entries[0] = (fan_entry){.item = gathered->sum, .general = true};
    }
    if (s->state->keyed > 0 && gathered->n > gathered->has_sum)
        s->state->next_key = (uint64_t)last + 1;
    fan_slot_unlock(b, slot);
    for (size_t i = 0; i < gathered->n; i++) {
        const fan_item *item = gathered->entries[i].general ? gathered->entries[i].item : NULL,
                       *sum = gathered->sum;
        if (item && item == sum)
            continue;
        if (item && item->donated &&
            !(sum && item->value.array == sum->value.array &&
              item->value.sparse == sum->value.sparse))
            fan_value_returned(&item->value); /* the sum is elsewhere */
        fan_entry_drop(b, &gathered->entries[i]);
    }
    gathered->n = 0;
    f->n = 0; /* its terms are gone */
    fan_sum_stats_drop(&old);
    return FAN_OK;
}
