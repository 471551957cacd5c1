#include "array/exact.h"
#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/fold.h"
#include "buffer/fold_job.h"
#include "buffer/host.h"
#include "buffer/slot.h"
#include "buffer/options.h"
#include "buffer/order.h"
#include "buffer/stats.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* ---- what the slot holds, as terms ---- */

void fan_gathered_fini(fan_gathered *g)
{
    for (size_t i = 0; i < g->nvalues; i++)
        fan_value_drop(g->fold.b->frontend, &g->values[i]);
    fan_free(g->values);
    fan_free(g->entries);
    fan_free(g->fold.terms);
    fan_free(g->fold.scratch);
    fan_free(g->fold.keys);
    fan_sum_stats_drop(&g->fold.sum_stats);
    fan_stream_drop(g->fold.ready);
    fan_event_drop(g->fold.ready_event);
    memset(g, 0, sizeof *g);
}

static void fold_consider_kind(fan_gathered *g, const fan_value *v, int64_t key)
{
    if (v->form == FAN_FORM_UNDEFINED || v->form == FAN_FORM_ZERO)
        return;
    if (!g->like || v->rank < g->like->rank || (v->rank == g->like->rank && key >= 0 && key < g->like_key)) {
        g->like = v;
        g->like_key = key;
    }
}

/* The first `m` parked entries, copied: what arrives meanwhile moves the list. */
static fan_status fold_gather_entries(fan_buffer *b, size_t slot, size_t m, fan_gathered *g, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &g->fold;
    fan_slot_lock(b, slot);
    size_t room = fan_slot_waiting(s), plain = 0;
    for (size_t i = 0; i < room; i++)
        plain += !s->list->entries[i].general;
    fan_slot_unlock(b, slot);
    f->terms = fan_alloc((room + 1) * sizeof *f->terms);
    f->scratch = fan_alloc((room + 2) * sizeof *f->scratch);
    g->entries = fan_alloc((room + 1) * sizeof *g->entries);
    g->values = plain ? fan_alloc(plain * sizeof *g->values) : NULL;
    if (!f->terms || !f->scratch || !g->entries || (plain && !g->values))
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    fan_slot_lock(b, slot);
    if (s->list)
        fan_list_sort(s->list);
    for (size_t i = 0; i < fan_slot_waiting(s) && g->n < room && g->n < m; i++)
        if (fan_entry_parked(&s->list->entries[i]))
            g->entries[g->n++] = s->list->entries[i];
    fan_slot_unlock(b, slot);
    return FAN_OK;
}

static fan_status fold_gather_value(fan_gathered *g, fan_error *err)
{
    fan_fold *f = &g->fold;
    fan_slot_state *p = f->b->slots[f->slot].p;
    f->seen = p->value_seen;
    f->state = p->exact;
    if (p->value.form == FAN_FORM_ZERO)
        g->zero = &p->value;
    if (p->value.form == FAN_FORM_ZERO || p->value.form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    f->terms[f->n++] = (fan_term){.v = &p->value,
                                  .producer = p->ready,
                                  .event = p->ready_event,
                                  .donated = p->value_donated,
                                  .owned = p->value_owned,
                                  .exposed = p->value_exposed,
                                  .is_value = true,
                                  .key = p->value_key,
                                  .own = FAN_DT_NONE,
                                  .seen = f->seen};
    fold_consider_kind(g, &p->value, p->value_key);
    return fan_slot_unchanged(f->b, f->slot, &p->value, p->value_key, p->value_hashed ? &p->value_hash : NULL,
                              f->may_end, err);
}

static fan_status fold_gather_item(fan_gathered *g, fan_item *it, fan_error *err)
{
    fan_fold *f = &g->fold;
    if (it->value.form == FAN_FORM_ZERO && !g->zero)
        g->zero = &it->value;
    if (it->value.form == FAN_FORM_UNDEFINED || it->value.form == FAN_FORM_ZERO)
        return FAN_OK;
    const uint64_t *hash = it->hashed ? &it->hash : NULL;
    FAN_TRY(fan_slot_unchanged(f->b, f->slot, &it->value, it->key, hash, f->may_end, err));
    /* Whatever the caller did to its indices since: no sum reads or writes out of bounds. */
    if (it->value.form == FAN_FORM_SPARSE && it->value.device == fan_cpu() && !it->owned)
        FAN_TRY(fan_sparse_check(it->value.sparse, err));
    fold_consider_kind(g, &it->value, it->key);
    f->terms[f->n++] = (fan_term){.v = &it->value,
                                  .producer = it->producer,
                                  .event = it->event,
                                  .donated = it->donated,
                                  .owned = it->owned,
                                  .exposed = it->exposed,
                                  .key = it->key,
                                  .own = it->value.weak ? FAN_DT_NONE : fan_dtype_set_promote(it->own),
                                  .seen = f->seen};
    return FAN_OK;
}

/* A plain entry: its value is made for this sum, and the entry stays as it is. */
static fan_status fold_gather_plain(fan_gathered *g, const fan_entry *one, fan_error *err)
{
    fan_fold *f = &g->fold;
    const fan_slot *s = &f->b->slots[f->slot];
    const fan_frontend *frontend = f->b->frontend;
    fan_value *v = &g->values[g->nvalues];
    bool kept = false;
    if (!one->object)
        return FAN_OK;
    /* Asked now: the value has a hold as well. */
    bool unshared = f->n == 0 && !one->owned && !one->donated && frontend->fast->unshared(one->object);
    fan_status status = frontend->fast_value(one->object, one->data, &s->list->kind, v, &kept, err);
    if (status == FAN_ERR_STATE)
        return fan_slot_changed(f->b, f->slot, one->key, err);
    FAN_TRY(status);
    g->nvalues++;
    fold_consider_kind(g, v, one->key);
    f->terms[f->n++] = (fan_term){.v = v,
                                  .donated = one->donated,
                                  .owned = one->owned,
                                  .exposed = one->owned && (kept || one->exposed),
                                  .unshared = unshared && !one->exposed,
                                  .key = one->key,
                                  .own = v->weak || v->form == FAN_FORM_OBJECT ? FAN_DT_NONE : s->list->kind.dtype,
                                  .seen = f->seen};
    return FAN_OK;
}

fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, bool may_end, fan_gathered *g, fan_error *err)
{
    memset(g, 0, sizeof *g);
    g->fold.may_end = may_end;
    g->fold.b = b;
    g->fold.slot = slot;
    g->fold.finish_dtype = FAN_DT_NONE;
    fan_status status = fold_gather_entries(b, slot, m, g, err);
    if (status == FAN_OK)
        status = fold_gather_value(g, err);
    for (size_t i = 0; status == FAN_OK && i < g->n; i++) {
        const fan_entry *one = &g->entries[i];
        g->fold.seen = fan_entry_seen(g->fold.seen, &b->slots[slot], one);
        status = one->general ? fold_gather_item(g, one->item, err) : fold_gather_plain(g, one, err);
    }
    if (status != FAN_OK)
        fan_gathered_fini(g);
    return status;
}

/* ---- planned, begun, ended ---- */

/* Whether a dense term's memory may be written. `mixed`: beside sparse terms: then the sum is written in several steps,
 * each in the dtype of its prefix, and with stats the terms are looked at when it is made. */
static fan_reuse_answer fold_may_write(const fan_fold *f, size_t which, bool mixed)
{
    const fan_term *t = &f->terms[which];
    const fan_array *a = t->v->array;
    fan_array *others[3];
    fan_array *compact = NULL;
    uint64_t expanded = fan_array_expanded(a);
    fan_dtype target = fan_fold_accumulated(f, f->seen);
    bool host = !fan_fold_device(f)->backend->has_streams;
    fan_reuse facts = fan_term_holders(f->b, t, host);
    facts.writable = a->writable || t->owned;
    facts.same_dtype = a->dtype == target && (!mixed || fan_fold_accumulated(f, f->terms[0].seen) == target);
    facts.exclusive = true; /* fan_order_wait_users makes A wait */
    facts.read_later = mixed && f->b->sum_stats && !(which == 0 && fan_fold_first_suspect(f) && host);
    facts.dense = fan_array_dense(a);
    /* The compact base of our own expanded sum may be written as long as the sum stays expanded (A13). */
    if (!facts.dense && expanded && t->owned && fan_array_compact(a, expanded, &compact, NULL) == FAN_OK) {
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
        facts.owned = true;
    return fan_reusable(&facts);
}

static fan_side fold_side_of(const fan_value *v)
{
    return (fan_side){.form = v->form, .format = v->form == FAN_FORM_SPARSE ? (int)v->sparse->format : 0};
}

/* Which term the first one meets, as the rules have it: an object, else one of another form, else a sparse one of
 * another format, else the second. */
static size_t fold_other_term(const fan_fold *f)
{
    fan_side first = fold_side_of(f->terms[0].v);
    size_t at = 1;
    int best = 0;
    for (size_t i = 1; i < f->n; i++) {
        fan_side one = fold_side_of(f->terms[i].v);
        int rank = one.form == FAN_FORM_OBJECT ? 3 : one.form != first.form ? 2 : one.format != first.format ? 1 : 0;
        if (rank > best) {
            best = rank;
            at = i;
        }
    }
    return at;
}

/* The facts of the terms, but for whether they may be written. */
static fan_fold_facts fold_term_facts(const fan_fold *f)
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
    facts.first = fold_side_of(f->terms[0].v);
    facts.coalesced = sparse && sparse->coalesced;
    facts.entries_before = sparse ? sparse->nnz_coalesced : 0;
    if (f->n > 1) {
        size_t other = fold_other_term(f);
        facts.other = fold_side_of(f->terms[other].v);
        facts.other_is_second = other == 1;
    }
    return facts;
}

bool fan_fold_is_exact(const fan_fold *f)
{
    fan_dtype d = fan_fold_dtype(f);
    return fan_fold_slot(f)->spec->exact && d != FAN_DT_NONE && fan_exact_fits(d);
}

static fan_fold_facts fold_facts(const fan_fold *f)
{
    const fan_slot *s = fan_fold_slot(f);
    fan_fold_facts facts = fold_term_facts(f);
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
    fan_fold_facts facts = fold_facts(f);
    bool mixed = facts.sparse && facts.sparse < f->n;
    facts.reuse_first = facts.reuse_other = FAN_REUSE_LAYOUT;
    if (!f->finish && !facts.exact && !facts.objects && f->n) {
        if (facts.first.form == FAN_FORM_DENSE)
            facts.reuse_first = fold_may_write(f, 0, mixed);
        else if (facts.coalesced && facts.other_is_second && facts.other.form == FAN_FORM_DENSE)
            facts.reuse_other = fold_may_write(f, 1, mixed);
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
        if (!f->terms[i].owned)
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

/* ---- when it is due, and how it becomes the value ---- */

/* What the value of a slot was before: dropped without the lock. */
typedef struct fold_old_sum {
    fan_value value;
    fan_stream *ready;
    fan_event *ready_event;
    fan_sum_stats sum_stats;
} fold_old_sum;

static void fold_move_value(fan_value *to, fan_value *from)
{
    *to = *from;
    *from = (fan_value){.dtype = FAN_DT_NONE};
}

static void fold_commit_sum(fan_slot_state *p, fan_gathered *g, fold_old_sum *old)
{
    fan_fold *f = &g->fold;
    uint8_t origin = g->like ? g->like->origin : 0,
            rank = g->like ? g->like->rank : 0; /* of what may be the value itself */
    *old = (fold_old_sum){p->value, p->ready, p->ready_event, p->sum_stats};
    fold_move_value(&p->value, &f->result);
    p->value.origin = origin;
    p->value.rank = rank;
    bool same = p->value_owned && f->owned && old->value.array == p->value.array;
    p->value_exposed = p->value_exposed && same;
    p->value_shown = p->value_shown && same;
    p->value_owned = f->owned;
    p->value_summed = true;
    p->value_donated = f->donated;
    p->value_hashed = false;
    p->sum_stats = fan_sum_stats_move(&f->sum_stats);
    if (old->sum_stats.has_nonfinite) {
        p->sum_stats.has_nonfinite = true;
        p->sum_stats.nonfinite_key = old->sum_stats.nonfinite_key;
    }
    p->ready = f->ready;
    p->ready_event = f->ready_event;
    f->ready = NULL;
    f->ready_event = NULL;
    p->rules |= f->rules;
}

/* The first contribution becomes the value as it is: there is no sum yet (S8-S11 hold). */
static void fold_commit_first(fan_slot_state *p, const fan_gathered *g, const fan_entry *first, fold_old_sum *old)
{
    const fan_term *t = &g->fold.terms[0];
    fan_item *it = first->general ? first->item : NULL;
    *old = (fold_old_sum){.value = p->value, .ready = p->ready, .ready_event = p->ready_event};
    fold_move_value(&p->value, it ? &it->value : &g->values[g->nvalues - 1]);
    p->value_owned = t->owned;
    p->value_summed = false;
    p->value_exposed = t->exposed;
    p->value_shown = it ? it->shown : first->exposed;
    p->value_donated = t->donated;
    p->ready = it ? it->producer : NULL;
    p->ready_event = it ? it->event : NULL;
    p->value_hashed = it && it->hashed;
    p->value_hash = it ? it->hash : 0;
    if (it) {
        it->producer = NULL;
        it->event = NULL;
    }
}

/* The gathered entry that is defined, and whose form is not (form zero: is) that of a zero; NULL: there is none. */
static const fan_entry *fold_only_entry(const fan_gathered *g, const fan_value *v)
{
    for (size_t i = 0; i < g->n; i++)
        if (g->entries[i].general ? &g->entries[i].item->value == v
                                  : g->nvalues && v == &g->values[g->nvalues - 1] && g->entries[i].object)
            return &g->entries[i];
    return NULL;
}

/* Takes the gathered entries off the list. They are at the front but for those that arrived between (only beyond a
 * gap). */
static void fold_unlist(fan_buffer *b, fan_slot *s, const fan_gathered *g)
{
    fan_list *list = s->list;
    size_t kept = 0, k = 0, plain = 0;
    for (size_t i = 0; list && i < list->n; i++) {
        const fan_entry *one = &list->entries[i];
        if (k == g->n || !fan_entry_same(one, &g->entries[k])) {
            list->entries[kept++] = *one;
            continue;
        }
        if (list->unsorted)
            fan_keys_remove(list->unsorted, fan_entry_key(one));
        if (one->general)
            fan_item_unpark(b, one->item);
        plain += !one->general && one->object;
        list->undefined -= !one->object;
        k++;
    }
    if (plain)
        fan_list_unpark(b, list, plain);
    if (list) {
        list->n = kept;
        list->recheck_at = 0;
    }
    if (s->p->keyed > 0 && g->n)
        s->p->next_key = (uint64_t)fan_entry_key(&g->entries[g->n - 1]) + 1;
}

static fan_status fold_commit(fan_buffer *b, size_t slot, fan_gathered *g, fan_error *err)
{
    fan_status status = g->fold.n > 1 ? fan_fold_begin(&g->fold, NULL, err) : FAN_OK;
    if (status == FAN_OK)
        return fan_fold_commit_end(b, slot, g, err);
    fan_slot_lock(b, slot);
    fan_slot_poison(&b->slots[slot], status, err);
    fan_slot_unlock(b, slot);
    return status;
}

fan_status fan_fold_commit_end(fan_buffer *b, size_t slot, fan_gathered *g, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_slot_state *p = s->p;
    fan_fold *f = &g->fold;
    fold_old_sum old = {.value = {.dtype = FAN_DT_NONE}};
    fan_status status = f->n > 1 ? fan_fold_end(f, err) : FAN_OK;
    const fan_entry *first = f->n == 1 && !f->terms[0].is_value ? fold_only_entry(g, f->terms[0].v) : NULL;
    const fan_entry *zero = f->n == 0 && g->zero ? fold_only_entry(g, g->zero) : NULL;
    fan_slot_lock(b, slot);
    if (status != FAN_OK) {
        fan_slot_poison(s, status, err);
        fan_slot_unlock(b, slot);
        return status;
    }
    if (f->n > 1)
        fold_commit_sum(p, g, &old);
    else if (first)
        fold_commit_first(p, g, first, &old);
    else if (zero && p->value.form == FAN_FORM_UNDEFINED)
        fold_move_value(&p->value, &zero->item->value);
    p->value_seen = f->seen;
    if (g->like)
        p->value_key = g->like_key;
    fold_unlist(b, s, g);
    fan_slot_unlock(b, slot);
    for (size_t i = 0; i < g->n; i++) {
        const fan_item *it = g->entries[i].general ? g->entries[i].item : NULL;
        if (it && it->donated && it->value.array != p->value.array)
            fan_value_returned(&it->value); /* the sum is elsewhere */
        fan_entry_drop(b, &g->entries[i]);
    }
    g->n = 0;
    f->n = 0; /* its terms are gone */
    fan_value_drop(b->frontend, &old.value);
    fan_sum_stats_drop(&old.sum_stats);
    fan_stream_drop(old.ready);
    fan_event_drop(old.ready_event);
    return FAN_OK;
}

/* How many items a slot with accumulate="exact" may sum into its state now: all that are parked, whatever their keys,
 * if that saves memory; 0: none. */
static size_t fold_worth_absorbing(const fan_slot *s)
{
    fan_slot_state *p = s->p;
    fan_dtype d = fan_dtype_set_promote(p->seen);
    uint64_t parked = 0, dense = 0, state;
    if (!fan_exact_fits(d) || (p->device && p->device->backend->has_streams) ||
        (p->value.form != FAN_FORM_UNDEFINED && p->value.form != FAN_FORM_ZERO))
        return 0;
    size_t n = fan_slot_waiting(s);
    if (fan_list_ready(s->list, p->next_key, p->keyed > 0) < n)
        return 0; /* keys have no order in an exact sum, but the ledger of A16 has */
    for (size_t i = 0; i < n; i++) {
        const fan_entry *one = &s->list->entries[i];
        if (!one->general) /* it is undefined: an exact sum takes no plain entries */
            continue;
        const fan_value *v = &one->item->value;
        if (v->form == FAN_FORM_SPARSE)
            return 0; /* its sum may be sparse, and small */
        if (v->form == FAN_FORM_DENSE && !fan_exact_fits(v->dtype))
            return 0; /* an integer is read as the sum's own dtype, which may widen yet */
        parked += one->item->bytes;
        dense += v->form == FAN_FORM_DENSE ? (uint64_t)v->array->size : 0;
    }
    state = n ? dense / n * fan_superacc_size(d) : 0;
    return n > 1 && (p->exact || parked > state) ? n : 0;
}

/* Locked on entry and on return; the slot is free: sums its first m items into its value, or its exact state. */
static fan_status fold_items(fan_buffer *b, size_t slot, size_t m, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_gathered g;
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    fan_slot_make_busy(s);
    fan_slot_unlock(b, slot);
    fan_status status = fan_gather(b, slot, m, false, &g, err);
    if (status == FAN_OK) {
        if (s->spec->exact && g.fold.n)
            fan_fold_decide(&g.fold);
        if (s->spec->exact)
            status = fan_fold_absorb(&g.fold, g.like, err);
        if (status == FAN_OK)
            status = fold_commit(b, slot, &g, err);
        fan_gathered_fini(&g);
    }
    fan_slot_lock(b, slot);
    fan_slot_let_go(b, slot);
    return status;
}

/* Locked: whether a prefix of Python ints does not fit its dtype: it then waits for contributions that bring it back,
 * or until take(), which is refused (D5). */
static bool fold_ints_leave(const fan_slot *s, size_t m)
{
    const fan_slot_state *p = s->p;
    fan_int_run run = {.sum = 0};
    const fan_value *next = NULL;
    if (!p->has_weak_int ||
        (p->value.form != FAN_FORM_UNDEFINED && p->value.form != FAN_FORM_ZERO && !fan_int_run_add(&run, &p->value)))
        return false;
    const fan_fast_kind *k = s->list ? &s->list->kind : NULL;
    const fan_value plain = {.form = FAN_FORM_DENSE, .dtype = k ? k->dtype : FAN_DT_NONE};
    for (size_t i = 0; i < m && !next; i++) {
        const fan_entry *one = &s->list->entries[i];
        const fan_value *v = one->general ? &one->item->value : &plain;
        if (!one->object || v->form == FAN_FORM_UNDEFINED || v->form == FAN_FORM_ZERO)
            continue;
        if (one->general ? !fan_int_run_add(&run, v)
                         : !k->weak || !fan_int_run_put(&run, k->dtype, fan_entry_data(k, one)))
            next = v;
    }
    return fan_int_run_leaves(&run, next, NULL, s->spec->dtype != FAN_DT_NONE ? s->spec->dtype : FAN_DT_INT64);
}

/* Locked: with an automatic budget: checks again which parked arrays of the host the buffer alone holds. Two kinds
 * count as held by others unchecked: what lies on another device, whose cache is not ours, and sparse gradients, which
 * take as long to merge as what is merged already. The more entries there are, the more seldom they are checked.
 * `newest`: an object that its caller still holds; `alone`: but for that it would be the buffer's alone. */
static void fold_recheck_holders(fan_buffer *b, const fan_slot *s, const void *newest, bool alone)
{
    fan_list *list = s->list;
    size_t plain = 0;
    if (b->budget != FAN_BUDGET_AUTO || !list || list->n < list->recheck_at ||
        (s->p->device && s->p->device->backend->has_streams))
        return;
    for (size_t i = list->summed > 0; i < list->n; i++) {
        const fan_entry *one = &list->entries[i];
        fan_item *it = one->item;
        if (!one->general) {
            plain += one->object == newest ? alone : one->object && b->frontend->alone(one->object, NULL);
            continue;
        }
        if (!it->parked || it->alone || it->value.form != FAN_FORM_DENSE)
            continue;
        it->alone = it->owned || (it->value.object && b->frontend->alone(it->value.object, &it->value));
        if (it->alone)
            atomic_fetch_add_explicit(&b->alone, it->bytes, memory_order_relaxed);
    }
    atomic_fetch_add_explicit(&b->alone, ((uint64_t)plain - list->alone) * list->bytes, memory_order_relaxed);
    list->alone = plain;
    list->recheck_at = list->n + fan_recheck_interval(list->n);
}

size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t pending)
{
    const fan_slot *s = &b->slots[slot];
    if (s->busy || s->p->poison || atomic_load_explicit(&b->parked, memory_order_relaxed) <= b->fold_threshold)
        return 0;
    fold_recheck_holders(b, s, NULL, false);
    if (!fan_budget_exceeded(b, pending, true))
        return 0;
    if (s->spec->exact)
        return fold_worth_absorbing(s);
    size_t m = fan_list_ready(s->list, s->p->next_key, s->p->keyed > 0);
    return fold_ints_leave(s, m) ? 0 : m;
}

/* Locked on entry and on return: folds while the budget is passed and there is something to fold. */
fan_status fan_slot_fold_while_due(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t m; status == FAN_OK && (m = fan_slot_due(b, slot, 0)) > 0;)
        status = fold_items(b, slot, m, err);
    return status;
}

fan_status fan_slot_promote(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    if (s->busy || s->spec->exact || fan_slot_waiting(s) != 1 || s->p->value.form != FAN_FORM_UNDEFINED ||
        fan_list_ready(s->list, s->p->next_key, s->p->keyed > 0) != 1)
        return FAN_OK;
    return fold_items(b, slot, 1, err);
}

/* ---- plain entries (host.h) ---- */

/* Checks once more which contribution was parked last, if its maker still held it then: most makers drop each before
 * they add the next. */
static void fold_recheck_newest(fan_buffer *b)
{
    fan_list *p = b->last_parked.object ? b->slots[b->last_parked.slot].list : NULL;
    size_t at = b->last_parked.index;
    if (p && at < p->n && p->entries[at].object == b->last_parked.object &&
        b->frontend->alone(p->entries[at].object, NULL)) {
        p->alone++;
        atomic_fetch_add_explicit(&b->alone, p->bytes, memory_order_relaxed);
    }
}

/* fold_host_fits: whether the list of a slot is summed in its own dtype. */
static bool fold_host_fits(const fan_buffer *b, size_t slot)
{
    return fan_host_accum(b, slot) == b->slots[slot].list->kind.dtype;
}

/* Whether the budget is passed now that `object`, which its caller still holds, is parked too. */
static bool fold_host_due(fan_buffer *b, size_t slot, const void *object, bool alone)
{
    fan_list *p = b->slots[slot].list;
    size_t at = p->n;
    if (!p->n) /* an earlier fold of the same call summed it */
        return false;
    if (b->budget != FAN_BUDGET_AUTO)
        return fan_budget_exceeded(b, 0, false);
    fold_recheck_newest(b);
    if (p->n >= p->recheck_at) {
        fold_recheck_holders(b, &b->slots[slot], object, alone);
    } else if (alone) {
        p->alone++;
        atomic_fetch_add_explicit(&b->alone, p->bytes, memory_order_relaxed);
    }
    while (!alone && --at > 0 && p->entries[at].object != object)
        ;
    b->last_parked.object = alone ? NULL : object;
    b->last_parked.slot = slot;
    b->last_parked.index = at;
    if (!fan_budget_exceeded(b, 0, !fold_host_fits(b, slot)))
        return false;
    fan_list_sort(p);
    return fan_list_prefix(p) > 1; /* a first one is left as it is: there is nothing to be gained */
}

/* fold_host_may: whether what waits in the slot may be summed here. */
static bool fold_host_may(const fan_buffer *b, size_t slot)
{
    const fan_slot *s = &b->slots[slot];
    const fan_list *p = s->list;
    return fan_fast_allowed() && s->p == &fan_slot_state_none && !s->busy && !s->targets && !b->sum_stats && p &&
           !p->undefined && !p->kind.scalar && fold_host_fits(b, slot);
}

/* `object` replaces the first n entries. */
static void fold_host_commit(fan_buffer *b, fan_list *p, size_t n, void *object, char *data)
{
    bool first = object == p->entries[0].object, owned = !first || p->entries[0].owned;
    size_t parked = n - (p->summed > 0);
    fan_host_count(b, p, n, first, false);
    fan_list_unpark(b, p, parked);
    p->rules = (p->summed ? p->rules : 0) | fan_plan_fast_fold(first);
    p->summed += (int64_t)parked;
    p->entries[0] = fan_entry_of(object, data, p->entries[n - 1].key, false, owned);
    memmove(&p->entries[1], &p->entries[n], (p->n - n) * sizeof *p->entries);
    p->n -= n - 1;
}

/* Sums the ready prefix; false: it is for the general path, and nothing happened. */
static bool fold_host(fan_buffer *b, size_t slot)
{
    fan_slot *s = &b->slots[slot];
    fan_list *p = s->list;
    FAN_UNINITIALIZED fan_entry inline_gone[FAN_LIST_INLINE];
    char *data = NULL;
    if (!fold_host_may(b, slot))
        return false;
    fan_list_sort(p);
    size_t n = fan_list_prefix(p);
    fan_entry *gone = n <= FAN_LIST_INLINE ? inline_gone : fan_alloc(n * sizeof *gone);
    if (n < 2 || !gone)
        return false;
    fan_host_claim(s);
    void *to = fan_host_place(b, slot, n, p->kind.dtype, true, &data);
    bool good = to && fan_host_has_values(b, p, n, to == p->entries[0].object) && fan_host_unchanged(b, p, n);
    if (good) {
        fan_host_sum(b, p, n, p->kind.dtype, NULL, data, NULL, NULL);
        memcpy(gone, p->entries, n * sizeof *gone);
        fold_host_commit(b, p, n, to, data);
    } else {
        if (to)
            b->frontend->drop(to);
        if (b->frontend->clear_error)
            b->frontend->clear_error(); /* the general path reports it, if there is anything to report */
    }
    fan_host_release(b, (fan_span){slot, slot + 1});
    for (size_t i = 0; good && i < n; i++) /* last: it may call back */
        b->frontend->drop(gone[i].object);
    if (gone != inline_gone)
        fan_free(gone);
    return good;
}

/* A first contribution becomes the sum as it is, and waits no longer. False: it is for the general path. */
static bool fold_host_first(fan_buffer *b, size_t slot)
{
    fan_list *p = b->slots[slot].list;
    if (!fold_host_may(b, slot) || p->summed || fan_fast_is_large(p->size))
        return false;
    fan_list_sort(p);
    if (fan_list_prefix(p) != 1)
        return false;
    fan_list_unpark(b, p, 1);
    p->rules = 0;
    p->summed = 1;
    return true;
}

fan_status fan_fast_fold_due(fan_buffer *b, size_t slot, const void *object, bool alone, fan_error *err)
{
    if (!fold_host_due(b, slot, object, alone) || fold_host_first(b, slot) || fold_host(b, slot))
        return FAN_OK;
    fan_slot_lock(b, slot);
    fan_status status = b->slots[slot].busy ? FAN_ERR_STATE : fan_slot_begin_state(b, slot, err);
    bool begun = status == FAN_OK;
    if (begun)
        status = fan_slot_fold_while_due(b, slot, err);
    fan_slot_unlock(b, slot);
    /* It is parked; the sum is tried again later, and reports then what is wrong. */
    if (status == FAN_ERR_EXTERN && b->frontend->clear_error)
        b->frontend->clear_error();
    return begun && fan_status_poisons(status) ? status : FAN_OK;
}
