/* fold: what a slot holds is gathered as terms; their sum is planned, begun and ended; it becomes
 * the sum that the slot holds. To follow a sum, begin with fan_gather and fan_fold_run.
 *
 * In this order: gather; plan (may a term be written, A6?); sums with objects, term by term;
 * weights of what no loop multiplies; begin and end; the commit. The sums of arrays are made in
 * fold_dense.c, fold_sparse.c, fold_partial.c and fold_exact.c. */
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
#include "buffer/weights.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* ---- what the slot holds, as terms ---- */

void fan_gathered_fini(fan_gathered *gathered)
{
    fan_fold *fold = &gathered->fold;
    for (size_t i = 0; i < gathered->nvalues; i++)
        fan_value_drop(fold->b->frontend, &gathered->values[i]);
    for (size_t i = 0; i < gathered->nproducts; i++)
        fan_value_drop(fold->b->frontend, &gathered->products[i]);
    fan_free(gathered->products);
    fan_free(gathered->weights);
    fan_free(gathered->divisor);
    fan_free(gathered->values);
    fan_free(gathered->room);
    fan_free(gathered->entries);
    fan_free(fold->terms);
    fan_free(fold->scratch);
    fan_free(fold->keys);
    fan_sum_stats_drop(&fold->sum_stats);
    fan_stream_drop(fold->ready);
    fan_event_drop(fold->ready_event);
    memset(gathered, 0, sizeof *gathered);
}

/* Memory for `room` entries of the slot, of which `plain` are plain ones. */
static fan_status fold_make_room(fan_gathered *gathered, size_t room, size_t plain, fan_error *err)
{
    fan_fold *fold = &gathered->fold;
    fold->terms = fan_alloc((room + 1) * sizeof *fold->terms);
    fold->scratch = fan_alloc((room + 2) * sizeof *fold->scratch);
    gathered->entries = fan_alloc((room + 1) * sizeof *gathered->entries);
    if (plain)
        gathered->values = fan_alloc(plain * sizeof *gathered->values);
    gathered->room = fan_calloc(sizeof *gathered->room);
    bool terms = fold->terms && fold->scratch;
    bool entries = gathered->entries && gathered->room;
    bool values = gathered->values || !plain;
    if (!terms || !entries || !values)
        return fan_fold_fail_memory(fold, err);
    return FAN_OK;
}

/* The running sum and the first `m` parked contributions, copied: what arrives meanwhile moves the
 * list. */
static fan_status fold_gather_entries(fan_gathered *gathered, size_t m, fan_error *err)
{
    fan_buffer *b = gathered->fold.b;
    size_t slot = gathered->fold.slot;
    fan_slot *s = &b->slots[slot];
    fan_slot_lock(b, slot);
    size_t room = fan_slot_entries(s);
    size_t plain = 0;
    for (size_t i = 0; i < room; i++)
        plain += !s->list->entries[i].general;
    bool weighted = fan_slot_weighted(s);
    fan_slot_unlock(b, slot);
    FAN_TRY(fold_make_room(gathered, room, plain, err));
    if (weighted) {
        gathered->weights = fan_calloc((room + 1) * sizeof *gathered->weights);
        if (!gathered->weights)
            return fan_slot_fail_memory(b, slot, err);
    }

    fan_slot_lock(b, slot);
    if (s->list)
        fan_list_sort(s->list);
    gathered->has_sum = fan_slot_sum(s);
    size_t most = room;
    if (m < room)
        most = m + gathered->has_sum;
    if (most > room)
        most = room;
    for (size_t i = 0; i < fan_slot_entries(s) && gathered->n < most; i++) {
        if (fan_entry_parked(&s->list->entries[i]))
            gathered->entries[gathered->n++] = s->list->entries[i];
    }
    if (gathered->weights)
        fan_weights_of(s, gathered->entries, gathered->n, gathered->weights);
    fan_slot_unlock(b, slot);
    return FAN_OK;
}

/* D15: the kind of a sum that has one term more. */
static void fold_like(fan_like *like, const fan_term *term)
{
    const fan_value *value = term->v;
    bool first = !like->some || FAN_FAULT(KIND_OF_LAST);
    bool lower_key = term->key >= 0 && term->key < like->key;
    bool lower = value->rank < like->rank || (value->rank == like->rank && lower_key);
    if (!first && !lower)
        return;
    like->some = true;
    like->origin = value->origin;
    like->rank = value->rank;
    like->key = term->key;
}

/* The term of an item that adds something. */
static fan_status fold_gather_item(const fan_fold *fold, const fan_item *item, fan_term *term,
                                   fan_error *err)
{
    const fan_value *value = &item->value;
    const uint64_t *hash = NULL;
    if (item->hashed)
        hash = &item->hash;
    term->producer = item->producer;
    term->event = item->event;
    term->donated = item->donated;
    term->owned = item->owned;
    term->exposed = item->exposed;
    if (!value->weak)
        term->own = fan_dtype_set_promote(item->own);
    term->number = item->number;
    FAN_TRY(fan_slot_unchanged(fold->b, fold->slot, value, term->key, hash, fold->may_end, err));
    /* The caller may have changed its indices since: no sum reads or writes out of bounds. */
    bool sparse = value->form == FAN_FORM_SPARSE;
    if (sparse && value->device == fan_cpu() && !item->owned)
        return fan_sparse_check(value->sparse, err);
    return FAN_OK;
}

/* The term of a plain entry. Its value is made for this sum: the entry stays as it is. */
static fan_status fold_gather_plain(fan_gathered *gathered, const fan_entry *one, fan_term *term,
                                    fan_error *err)
{
    const fan_fold *fold = &gathered->fold;
    fan_buffer *b = fold->b;
    const fan_plain_kind *of_all = &fan_fold_slot(fold)->list->kind;
    const fan_plain_kind kind = fan_entry_kind(of_all, one);
    fan_value *value = &gathered->values[gathered->nvalues];
    bool kept = false;
    term->owned = one->owned || fan_term_is_sum(fold, term);
    term->donated = one->donated;
    /* Checked before plain_value makes a value, which has a reference of its own. */
    if (fold->n == 0 && !one->exposed)
        term->unshared = fan_plain_unshared(b, one, term->owned);
    fan_status status = b->frontend->plain_value(one->object, one->data, &kind, value, &kept, err);
    if (status == FAN_ERR_STATE)
        return fan_slot_changed(b, fold->slot, one->key, err);
    FAN_TRY(status);
    gathered->nvalues++;
    term->v = value;
    term->exposed = term->owned && (kept || one->exposed);
    if (!value->weak && value->form != FAN_FORM_OBJECT)
        term->own = of_all->dtype;
    term->number = fan_value_number(value);
    return FAN_OK;
}

/* The i-th entry becomes a term, if it adds anything. */
static fan_status fold_gather_one(fan_gathered *gathered, size_t i, fan_error *err)
{
    fan_fold *fold = &gathered->fold;
    const fan_slot *s = fan_fold_slot(fold);
    const fan_entry *one = &gathered->entries[i];
    bool sum = i == 0 && gathered->has_sum;
    fan_term term = {.is_value = sum, .entry = i, .own = FAN_DT_NONE};
    term.key = fan_entry_key(one);
    if (gathered->weights && fan_weight_multiplies(&gathered->weights[i]))
        term.weight = gathered->weights[i];
    if (sum)
        term.key = s->state->like_key;
    else
        fold->seen = fan_entry_seen(fold->seen, s, one);
    if (one->general) {
        fan_form form = one->item->value.form;
        term.v = &one->item->value;
        if (form != FAN_FORM_UNDEFINED && form != FAN_FORM_ZERO)
            FAN_TRY(fold_gather_item(fold, one->item, &term, err));
    } else if (one->object) {
        FAN_TRY(fold_gather_plain(gathered, one, &term, err));
    }
    if (!term.v || term.v->form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    if (term.v->form == FAN_FORM_ZERO) {
        if (!gathered->zero) {
            gathered->zero_entry = i;
            gathered->zero = term.v;
        }
        return FAN_OK;
    }
    if (!fan_term_is_sum(fold, &term))
        term.weak_int = term.number;
    term.seen = fold->seen;
    if (sum) {
        term.own = FAN_DT_NONE;
        term.seen = s->state->value_seen;
    }
    fold->terms[fold->n++] = term;
    fold_like(&gathered->like, &term);
    return FAN_OK;
}

/* How many terms come before the first object. */
static size_t fold_first_object(const fan_fold *fold)
{
    size_t n = 0;
    while (n < fold->n && fold->terms[n].v->form != FAN_FORM_OBJECT)
        n++;
    return n;
}

/* The dtypes of the first n terms, which are those before the first object. */
static fan_dtype_set fold_seen_before(const fan_fold *fold, size_t n)
{
    if (n == fold->n)
        return fold->seen;
    return fold->terms[n].seen;
}

/* D5: each Python int counts with its value. While one of those so far does not fit the promotion
 * of the terms so far, these run in that of the first later term with which they all do, or of the
 * sum. From the first object on dtypes mean nothing. */
static void fold_fit_ints(fan_gathered *gathered)
{
    fan_fold *fold = &gathered->fold;
    const fan_slot *s = fan_fold_slot(fold);
    int64_t lo = s->state->summed_lo;
    int64_t hi = s->state->summed_hi;
    size_t n = fold_first_object(fold);
    /* a number other than 0: 0 fits every dtype */
    bool some = lo < 0 || hi > 0;
    for (size_t i = 0; i < n && !some; i++)
        some = fold->terms[i].weak_int != 0;
    bool objects_alone = n == 0 && fold->n > 0;
    if (!some || objects_alone || s->spec->dtype != FAN_DT_NONE)
        return;
    fan_dtype_set all = fold_seen_before(fold, n);
    size_t waiting = 0; /* the first term whose dtype is not known yet */
    for (size_t i = 0; i < n; i++) {
        int64_t number = fold->terms[i].weak_int;
        fan_range_add(&lo, &hi, number);
        fan_dtype d = fan_dtype_set_promote(fold->terms[i].seen);
        bool fits = fan_weak_int_fits(lo, d) && fan_weak_int_fits(hi, d);
        for (; fits && waiting <= i; waiting++)
            fold->terms[waiting].seen = fold->terms[i].seen;
    }
    for (; waiting < n; waiting++)
        fold->terms[waiting].seen = all;
    gathered->weak_lo = lo;
    gathered->weak_hi = hi;
    fan_dtype d = fan_dtype_set_promote(all);
    if (!fan_weak_int_fits(lo, d))
        gathered->unfit = lo;
    else if (!fan_weak_int_fits(hi, d))
        gathered->unfit = hi;
}

/* W4: whether the weights of all terms fit the dtypes in which they are summed: an add checks that
 * of its own dtype, which others may have widened since. */
static fan_status fold_check_weights(const fan_fold *fold, fan_error *err)
{
    bool exact = fan_fold_slot(fold)->spec->exact;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_term *term = &fold->terms[i];
        fan_dtype acc = FAN_DT_NONE;
        if (!term->weight.on || term->v->form == FAN_FORM_OBJECT)
            continue;
        if (!exact)
            acc = fan_fold_accumulated(fold, term->seen);
        FAN_TRY(fan_weight_check(fold->b, fold->slot, term->key, &term->weight, term->v->dtype, acc,
                                 err));
    }
    return FAN_OK;
}

fan_status fan_gathered_check(const fan_gathered *gathered, fan_error *err)
{
    const fan_fold *fold = &gathered->fold;
    if (!gathered->unfit || FAN_FAULT(INT_WRAPS))
        return FAN_OK;
    size_t n = fold_first_object(fold);
    fan_dtype sum = fan_dtype_set_promote(fold_seen_before(fold, n));
    int64_t key = -1;
    for (size_t i = 0; i < n && key < 0; i++) {
        if (fold->terms[i].weak_int == gathered->unfit)
            key = fold->terms[i].key;
    }
    return fan_slot_fail_int(fold->b, fold->slot, key, gathered->unfit, sum, err);
}

/* A10: a fold at add ends in the dtypes up to its last term. A zero after it counts from the next
 * term on: among numbers without a dtype of their own it would narrow the sum. */
static void fold_leave_zeros(fan_gathered *gathered, size_t m)
{
    fan_fold *fold = &gathered->fold;
    bool at_add = m != SIZE_MAX;
    gathered->seen = fold->seen;
    if (at_add && fold->n > 0 && !fan_fold_slot(fold)->spec->exact)
        fold->seen = fold->terms[fold->n - 1].seen;
}

fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, bool may_end, fan_gathered *gathered,
                      fan_error *err)
{
    const fan_slot_state *state = b->slots[slot].state;
    fan_fold *fold = &gathered->fold;
    memset(gathered, 0, sizeof *gathered);
    fold->may_end = may_end;
    fold->b = b;
    fold->slot = slot;
    fold->finish_dtype = FAN_DT_NONE;
    fan_status status = fold_gather_entries(gathered, m, err);
    fold->seen = state->summed_seen;
    fold->state = state->exact;
    if (fold->state) /* it came before all that still wait */
        gathered->like = fold->state->like;
    for (size_t i = 0; status == FAN_OK && i < gathered->n; i++)
        status = fold_gather_one(gathered, i, err);
    if (status != FAN_OK) {
        fan_gathered_fini(gathered);
        return status;
    }
    fold_fit_ints(gathered);
    fold_leave_zeros(gathered, m);
    if (gathered->weights)
        status = fold_check_weights(fold, err);
    if (status != FAN_OK)
        fan_gathered_fini(gathered);
    return status;
}

/* ---- the plan ---- */

/* Whether a term's memory shares bytes with no other operand (D43). */
static bool fold_term_disjoint(const fan_fold *fold, size_t which)
{
    const fan_array *a = fold->terms[which].v->array;
    fan_array *own[3];
    for (size_t i = 0; i < fold->n; i++) {
        size_t n;
        fan_array *const *others = fan_value_arrays(fold->terms[i].v, own, &n);
        for (size_t k = 0; k < n && i != which; k++) {
            if (fan_array_extents_disjoint(a, others[k]))
                continue;
            if (!fan_array_disjoint(a, others[k]))
                return false;
        }
    }
    return true;
}

/* The compact base of our own expanded sum may be written as long as the sum stays expanded
 * (A13). */
static bool fold_term_base_dense(const fan_fold *fold, const fan_term *term)
{
    uint64_t expanded = fan_array_expanded(term->v->array);
    fan_array *compact = NULL;
    if (!expanded || !term->owned)
        return false;
    if (fan_array_compact(term->v->array, expanded, &compact, NULL) != FAN_OK)
        return false;
    bool dense = fan_array_dense(compact);
    fan_array_drop(compact);
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        const fan_array *other = value->array;
        if (value->form == FAN_FORM_PARTIAL)
            return false;
        if (!other || (expanded & ~fan_array_expanded(other)))
            return false;
    }
    return dense;
}

/* Two planted faults: what is shared is written, or what seems to have one holder. */
static bool fold_write_anyway(const fan_array *a)
{
    if (FAN_FAULT(WRITE_SHARED))
        return true;
    if (!FAN_FAULT(REFCOUNT_IS_ENOUGH))
        return false;
    return atomic_load(&a->refs) == 1 && atomic_load(&a->storage->refs) == 1;
}

fan_reuse_answer fan_term_may_write(const fan_fold *fold, size_t which, fan_writer writer)
{
    const fan_buffer *b = fold->b;
    const fan_term *term = &fold->terms[which];
    const fan_value *value = term->v;
    const fan_array *a = value->array;
    bool prefixes = writer == FAN_WRITER_PREFIXES;
    bool sum = writer == FAN_WRITER_SUM || prefixes;
    bool host = !fan_fold_device(fold)->backend->has_streams;
    fan_dtype target = fan_fold_accumulated(fold, fold->seen);
    fan_reuse facts = {.dense = true,
                       .writable = true,
                       .same_dtype = value->dtype == target,
                       .disjoint = !sum || fold_term_disjoint(fold, which),
                       .owned = term->owned,
                       .exposed = term->exposed,
                       .donated = term->donated,
                       .host = host};
    bool unknown = !term->owned && !term->donated && !term->exposed;
    bool host_object = host && value->object;
    if (unknown && host_object)
        facts.unshared = term->unshared || b->frontend->unshared(value->object);
    if (a) {
        facts.dense = fan_array_dense(a) || (sum && fold_term_base_dense(fold, term));
        facts.writable = a->writable || (sum && term->owned);
    }
    if (writer == FAN_WRITER_TAKER) /* it gets it as it is */
        facts.same_dtype = true;
    if (prefixes && fan_fold_accumulated(fold, fold->terms[0].seen) != target)
        facts.same_dtype = false;
    /* For a sum fan_order_wait_users makes A wait, and a taker's stream waits. */
    facts.exclusive = writer != FAN_WRITER_TARGET || term->producer == fan_fold_accum(fold);
    if (prefixes && b->sum_stats) {
        bool known = which == 0 && fan_fold_first_suspect(fold);
        facts.read_later = !known || !host;
    }
    if (sum && fold_write_anyway(a))
        facts.owned = true;
    return fan_reusable(&facts);
}

static fan_side fold_side_of(const fan_value *value)
{
    fan_side side = {.form = value->form};
    if (value->form == FAN_FORM_SPARSE)
        side.format = (int)value->sparse->format;
    return side;
}

bool fan_fold_is_exact(const fan_fold *f)
{
    fan_dtype d = fan_fold_dtype(f);
    return fan_fold_slot(f)->spec->exact && d != FAN_DT_NONE && fan_exact_fits(d);
}

/* Which term the first one meets, as the rules have it: an object, else one of another form, else a
 * sparse one of another format, else the second. */
static size_t fold_other(const fan_fold *fold)
{
    fan_side first = fold_side_of(fold->terms[0].v);
    size_t form = 0;
    size_t format = 0;
    for (size_t i = 1; i < fold->n; i++) {
        fan_side one = fold_side_of(fold->terms[i].v);
        if (one.form == FAN_FORM_OBJECT)
            return i;
        if (!form && one.form != first.form)
            form = i;
        if (!format && one.format != first.format)
            format = i;
    }
    if (form)
        return form;
    if (format)
        return format;
    return 1;
}

/* All but whether the terms may be written. */
static fan_fold_facts fold_facts(const fan_fold *fold)
{
    const fan_slot *s = fan_fold_slot(fold);
    fan_fold_facts facts = {.terms = fold->n,
                            .expanded = fan_fold_expanded(fold),
                            .recording = fold->b->create_graph,
                            .exact = fan_fold_is_exact(fold),
                            .has_state = fold->state,
                            .stats = fold->b->sum_stats,
                            .finish = fold->finish,
                            .has_out = fold->out,
                            .writable = fold->take && fold->take->writable,
                            .seen = fold->seen,
                            .accumulate = s->spec->accumulate,
                            .finish_dtype = fold->finish_dtype,
                            .taker = fan_stream_id_of(fold->taker)};
    facts.slot = fan_slot_streams(s->state);
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        facts.objects += value->form == FAN_FORM_OBJECT;
        facts.partial += value->form == FAN_FORM_PARTIAL;
        if (value->form == FAN_FORM_SPARSE) {
            facts.sparse++;
            facts.entries += fan_sparse_nnz(value->sparse);
        }
    }
    if (!fold->n)
        return facts;

    const fan_term *first = &fold->terms[0];
    facts.first = fold_side_of(first->v);
    facts.summed = fan_term_is_sum(fold, first);
    if (first->v->form == FAN_FORM_SPARSE) {
        facts.coalesced = first->v->sparse->coalesced;
        facts.entries_before = first->v->sparse->nnz_coalesced;
    }
    facts.slot.ready = fan_stream_id_of(first->producer);
    facts.slot.has_event = first->event != NULL;
    if (fold->n > 1) {
        size_t other = fold_other(fold);
        facts.other = fold_side_of(fold->terms[other].v);
        facts.other_is_second = other == 1;
    }
    return facts;
}

void fan_fold_decide(fan_fold *fold)
{
    fan_fold_facts facts = fold_facts(fold);
    bool mixed = facts.partial || (facts.sparse && facts.sparse < fold->n);
    fan_writer writer = FAN_WRITER_SUM;
    if (mixed)
        writer = FAN_WRITER_PREFIXES;
    bool stays = !fold->finish && !facts.exact;
    facts.reuse_first = FAN_REUSE_LAYOUT;
    facts.reuse_other = FAN_REUSE_LAYOUT;
    if (stays && !facts.objects && fold->n) {
        bool second = facts.other_is_second && facts.other.form == FAN_FORM_DENSE;
        if (facts.first.form == FAN_FORM_DENSE)
            facts.reuse_first = fan_term_may_write(fold, 0, writer);
        else if (second && facts.coalesced && !facts.partial)
            facts.reuse_other = fan_term_may_write(fold, 1, writer);
    }
    fold->plan = fan_plan_fold(&facts);
}

bool fan_fold_batches(const fan_fold *f)
{
    fan_fold_facts facts = fold_facts(f);
    return f->n && fan_plan_fold(&facts).batches;
}

/* ---- sums with objects, term by term (A1, A8, D14) ---- */

static fan_status fold_body(fan_fold *f, fan_error *err);

/* D14: *sum becomes the sum of the terms before the first object, made as usual. */
static fan_status fold_before_objects(fan_fold *fold, size_t first, fan_value *sum, fan_error *err)
{
    const fan_term *term = &fold->terms[0];
    const fan_value *value = term->v;
    bool loose = false; /* D12 */
    if (value->form == FAN_FORM_SPARSE && fan_term_is_sum(fold, term))
        loose = !value->sparse->coalesced;
    /* An object brings no dtype, so its `seen` is that of all before it. */
    if (first == 1 && value->form == FAN_FORM_PARTIAL)
        return fan_fold_make_whole(fold, value, sum, err);
    bool rounded = first == 1 && value->dtype == fan_dtype_set_promote(fold->terms[1].seen);
    if (first == 0 || (rounded && !loose))
        return fan_value_copy(fold->b->frontend, value, sum, err);
    fan_fold sub = *fold;
    sub.n = first;
    sub.seen = fold->terms[first].seen;
    sub.finish = true;
    sub.finish_dtype = FAN_DT_NONE;
    sub.take = NULL;
    sub.scale = (fan_scale){.on = false};
    sub.result = fan_value_none();
    sub.sum_stats = (fan_sum_stats){.valid = false};
    fan_fold_decide(&sub);
    fan_status status = fold_body(&sub, err);
    fold->rules |= sub.rules;
    *sum = sub.result;
    fan_like like = {.some = false};
    for (size_t i = 0; i < first; i++)
        fold_like(&like, &fold->terms[i]);
    fan_value_set_origin(fold->b->frontend, sum, like.origin, like.rank);
    return status;
}

/* fold_combine_failed: the error of a term, which the frontend did not add; with its place, which
 * the frontend has not got. */
static fan_status fold_combine_failed(const fan_fold *fold, const fan_term *term, fan_status status,
                                      fan_error *err)
{
    fan_place place = fan_slot_place(fold->b, fold->slot, term->key);
    if (status == FAN_ERR_EXTERN) { /* the frontend has the exception; this adds the place */
        return fan_fail_at(err, FAN_ERR_EXTERN, 0, place,
                           "this contribution was not added to those before it");
    }
    if (!err)
        return status;
    char reason[FAN_ERROR_TEXT];
    memcpy(reason, err->text, sizeof reason);
    return fan_fail_at(err, status, 0, place, "%s", reason);
}

/* *own becomes a dense term in the dtype `own`, which it had when it came. */
static fan_status fold_round(fan_fold *fold, const fan_term *term, fan_value *own, fan_error *err)
{
    const fan_value *value = term->v;
    const fan_array *from = value->array;
    fan_array *to = NULL;
    FAN_TRY(fan_fold_fresh(fold, term->own, from->ndim, from->shape, from, &to, err));
    fan_status status = fan_fold_copy(fold, "round", to, from, err);
    if (status != FAN_OK) {
        fan_array_drop(to);
        return status;
    }
    *own = fan_value_dense(to, fan_fold_device(fold));
    own->origin = value->origin;
    own->rank = value->rank;
    return FAN_OK;
}

/* *sum becomes that of itself and a term. */
static fan_status fold_combine(fan_fold *fold, const fan_term *term, fan_value *sum, fan_error *err)
{
    const fan_frontend *frontend = fold->b->frontend;
    const fan_value *value = term->v;
    fan_value own = fan_value_none();
    fan_value next = fan_value_none();
    /* A reduced contribution is kept in the accumulation dtype (D7); an object meets it in its
     * own. */
    bool dense = value->form == FAN_FORM_DENSE;
    if (dense && term->own != FAN_DT_NONE && value->dtype != term->own) {
        FAN_TRY(fold_round(fold, term, &own, err));
        value = &own;
    } else if (value->form == FAN_FORM_PARTIAL) {
        FAN_TRY(fan_fold_make_whole(fold, value, &own, err));
        value = &own;
    }
    FAN_COUNT(fold->b, passes, 1);
    fan_status status =
        frontend->combine(fan_fold_slot(fold)->spec->combine, sum, value, &next, err);
    fan_value_drop(frontend, &own);
    if (status != FAN_OK)
        return fold_combine_failed(fold, term, status, err);
    fan_value_drop(frontend, sum);
    *sum = next;
    return FAN_OK;
}

/* Pairwise (A1, A8), from `*sum` on, which is that of the first `i` terms. */
static fan_status fold_pairs(fan_fold *fold, fan_value *sum, size_t i, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_stream *A = fan_fold_accum(fold);
    FAN_TRY(fan_order_wait_terms(fold, err));
    if (A)
        FAN_TRY(fan_stream_push(A, err));
    for (; i < fold->n && status == FAN_OK; i++)
        status = fold_combine(fold, &fold->terms[i], sum, err);
    if (A)
        fan_stream_pop(A);
    FAN_TRY(status);
    fold->result = *sum;
    *sum = fan_value_none();
    fold->owned = false;
    return FAN_OK;
}

/* W3, W7: the sum, an object, over the divisor, by its own operator. */
static fan_status fold_divide_object(fan_fold *fold, fan_error *err)
{
    const fan_frontend *frontend = fold->b->frontend;
    const fan_weight by = {.on = true, .re = fold->scale.divisor->nearest};
    fan_value quotient = fan_value_none();
    fan_stream *A = fan_fold_accum(fold);
    if (A)
        FAN_TRY(fan_stream_push(A, err));
    fan_status status = frontend->multiply(&fold->result, &by, true, &quotient, err);
    if (A)
        fan_stream_pop(A);
    if (status != FAN_OK)
        return fold_combine_failed(fold, &fold->terms[fold->n - 1], status, err);
    fan_value_drop(frontend, &fold->result);
    fold->result = quotient;
    return FAN_OK;
}

/* From the first object on the fold is pairwise (A8), as it is for a pass that records itself
 * (A1). */
static fan_status fold_with_objects(fan_fold *fold, fan_error *err)
{
    fan_value sum = fan_value_none();
    size_t first = fold_first_object(fold);
    if (fold->scale.on || fold->out) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(fold->b, fold->slot, -1),
                           "sums objects; scale= and out= need arrays");
    }
    fan_status status = fold_before_objects(fold, first, &sum, err);
    if (status == FAN_OK)
        status = fold_pairs(fold, &sum, first ? first : 1, err);
    if (status == FAN_OK && fold->scale.divisor)
        status = fold_divide_object(fold, err);
    fan_value_drop(fold->b->frontend, &sum);
    return status;
}

/* Makes the sum by fold->plan. */
static fan_status fold_body(fan_fold *fold, fan_error *err)
{
    fold->rules |= fold->plan.rules;
    switch (fold->plan.kind) {
    case FAN_FOLD_DENSE:
        return fan_fold_dense(fold, err);
    case FAN_FOLD_SPARSE:
        return fan_fold_sparse(fold, err);
    case FAN_FOLD_MIXED:
        return fan_fold_mixed(fold, err);
    case FAN_FOLD_PARTIAL:
        return fan_fold_partial(fold, err);
    case FAN_FOLD_OBJECTS:
        return fold_with_objects(fold, err);
    default:
        return fan_fold_exact(fold, err);
    }
}

/* ---- terms times their weights (W1, W7), where no loop multiplies them on the way ---- */

/* *made becomes an array times a weight, in dtype `acc`, each number rounded. */
static fan_status weigh_array(fan_fold *fold, const fan_array *from, fan_dtype acc,
                              const fan_weight *weight, fan_array **made, fan_error *err)
{
    FAN_TRY(fan_fold_fresh(fold, acc, from->ndim, from->shape, from, made, err));
    const fan_operand in = {.array = from, .acc = acc, .weight = *weight};
    fan_job job = {
        .kind = FAN_JOB_SUM,
        .out = *made,
        .in = &in,
        .n = 1,
        .label = "weigh",
    };
    return fan_fold_job(fold, &job, err);
}

static fan_status weigh_dense(fan_fold *fold, const fan_value *value, fan_dtype acc,
                              const fan_weight *weight, fan_value *out, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *compact = NULL;
    fan_array *made = NULL;
    fan_array *whole = NULL;
    const fan_array *array = value->array;
    FAN_GO(fan_array_compact(array, fan_array_expanded(array), &compact, err)); /* A13 */
    FAN_GO(weigh_array(fold, compact, acc, weight, &made, err));
    FAN_GO(fan_array_broadcast(made, array->ndim, array->shape, &whole, err));
    *out = fan_value_dense(whole, fan_fold_device(fold));
done:
    fan_array_drop(compact);
    fan_array_drop(made);
    return status;
}

/* The same entries, each number times the weight. */
static fan_status weigh_sparse(fan_fold *fold, const fan_value *value, fan_dtype acc,
                               const fan_weight *weight, fan_value *out, fan_error *err)
{
    const fan_sparse *of = value->sparse;
    fan_array *values = NULL;
    fan_sparse *made = NULL;
    fan_status status = weigh_array(fold, of->values, acc, weight, &values, err);
    if (status == FAN_OK) {
        status = fan_sparse_new(of->format, of->ndim, of->shape, of->indices, of->pointers, values,
                                of->coalesced, &made, err);
    }
    fan_array_drop(values);
    FAN_TRY(status);
    made->nnz_coalesced = of->nnz_coalesced;
    *out = fan_value_sparse(made, fan_fold_device(fold));
    return FAN_OK;
}

static fan_status weigh_object(fan_fold *fold, const fan_term *term, fan_value *out, fan_error *err)
{
    fan_stream *A = fan_fold_accum(fold);
    if (A)
        FAN_TRY(fan_stream_push(A, err));
    fan_status status = fold->b->frontend->multiply(term->v, &term->weight, false, out, err);
    if (A)
        fan_stream_pop(A);
    if (status != FAN_OK)
        return fold_combine_failed(fold, term, status, err);
    return FAN_OK;
}

/* A term becomes its product, in memory of the buffer's own. */
static fan_status weigh_term(fan_fold *fold, fan_term *term, fan_value *out, fan_error *err)
{
    const fan_value *value = term->v;
    fan_dtype acc = FAN_DT_NONE;
    if (value->form != FAN_FORM_OBJECT)
        acc = fan_fold_accumulated(fold, term->seen);
    *out = fan_value_none();
    if (value->form == FAN_FORM_OBJECT)
        FAN_TRY(weigh_object(fold, term, out, err));
    else if (value->form == FAN_FORM_SPARSE)
        FAN_TRY(weigh_sparse(fold, value, acc, &term->weight, out, err));
    else
        FAN_TRY(weigh_dense(fold, value, acc, &term->weight, out, err));
    if (value->form == FAN_FORM_PARTIAL)
        fan_value_set_patch(out, value->patch);
    out->origin = value->origin;
    out->rank = value->rank;
    term->v = out;
    term->weight.on = false;
    term->donated = false;
    term->owned = value->form != FAN_FORM_OBJECT;
    term->exposed = false;
    term->unshared = false;
    return FAN_OK;
}

/* Whether one pass over memory multiplies the terms on its way. An exact sum does, exactly (W2),
 * beside sparse terms too, which have no weights there (W4). */
static bool fold_weighs_on_the_way(const fan_fold *fold)
{
    bool exact = fan_fold_is_exact(fold);
    for (size_t i = 0; i < fold->n; i++) {
        fan_form form = fold->terms[i].v->form;
        bool plain = form == FAN_FORM_DENSE || (exact && form == FAN_FORM_SPARSE);
        if (!plain)
            return false;
    }
    return true;
}

fan_status fan_gathered_weigh(fan_gathered *gathered, fan_error *err)
{
    fan_fold *fold = &gathered->fold;
    size_t some = 0;
    for (size_t i = 0; i < fold->n; i++)
        some += fold->terms[i].weight.on;
    if (!some || fold_weighs_on_the_way(fold))
        return FAN_OK;
    if (!gathered->products)
        gathered->products = fan_alloc(some * sizeof *gathered->products);
    if (!gathered->products)
        return fan_fold_fail_memory(fold, err);
    FAN_TRY(fan_order_wait_terms(fold, err));
    for (size_t i = 0; i < fold->n; i++) {
        fan_term *term = &fold->terms[i];
        if (!term->weight.on)
            continue;
        FAN_TRY(fan_slot_check_unmoved(fold->b, fold->slot, term->v, term->key, err));
        FAN_TRY(weigh_term(fold, term, &gathered->products[gathered->nproducts], err));
        gathered->nproducts++;
    }
    return FAN_OK;
}

/* ---- begun, ended ---- */

fan_status fan_fold_begin(fan_fold *fold, fan_batch *batch, fan_error *err)
{
    fan_stream *A = fan_fold_accum(fold);
    assert(fan_fold_slot(fold)->busy);
    assert(fold->n > 0 || fold->state);
    fold->result = fan_value_none();
    for (size_t i = 0; i < fold->n; i++) {
        const fan_term *term = &fold->terms[i];
        if (!term->owned)
            FAN_TRY(fan_slot_check_unmoved(fold->b, fold->slot, term->v, term->key, err));
    }
    fold->batch = batch;
    if (A && FAN_FAULT(RECORD_BEFORE_SUM)) {
        fan_event_drop(fold->ready_event);
        FAN_TRY(fan_order_record(fold->b, A, FAN_PLAN_S15_RECORD, &fold->early, err));
    }
    fan_status status = fan_fold_stats_memory(fold, err);
    if (status == FAN_OK) {
        fan_fold_decide(fold);
        status = fold_body(fold, err);
    }
    if (status != FAN_OK)
        fan_fold_abandon(fold);
    return status;
}

bool fan_fold_left(const fan_fold *fold)
{
    if (!fold->batch || FAN_FAULT(BATCH_LATE))
        return false;
    return fan_batch_state(fold->batch, fold->number) == FAN_JOB_PENDING;
}

void fan_fold_abandon(fan_fold *fold)
{
    fan_value_drop(fold->b->frontend, &fold->result);
    fan_event_drop(fold->early);
    fold->early = NULL;
    fold->batch = NULL;
}

/* S15 to S17, S22: what orders others after the sum. */
static fan_status fold_record(fan_fold *fold, fan_error *err)
{
    const fan_sync_fold *plan = &fold->plan.after;
    const fan_term *first = NULL;
    if (fold->n)
        first = &fold->terms[0];
    fan_stream *A = fan_fold_accum(fold);
    uint64_t bit = FAN_PLAN_S15_RECORD;
    if (fold->finish)
        bit = FAN_PLAN_S22_RECORD;
    fan_event *event = fold->early;
    fold->early = NULL;
    fold->rules |= plan->rules;
    bool record = plan->slot.has_event;
    if (FAN_FAULT(NO_RECORD_BEHIND_SUM) && !fold->finish)
        record = false;
    /* Left out, S15 leaves the first producer's event in place; a record that finds no memory
     * leaves none, and S18 records then. */
    if (record && (fan_order_left_out(A->device) & bit)) {
        event = fan_event_hold(first ? first->event : NULL);
    } else if (record && !event) {
        fan_status status = fan_order_record(fold->b, A, bit, &event, err);
        if (!fan_status_is_memory(status))
            FAN_TRY(status);
    }
    fold->ready_event = event;
    fold->ready = fan_stream_hold(fan_order_stream(plan->slot.ready, &A, 1));
    if (FAN_FAULT(READY_STREAM_STAYS) && first && first->producer) {
        fan_stream_drop(fold->ready);
        fold->ready = fan_stream_hold(first->producer);
    }
    return FAN_OK;
}

static void fold_trace(const fan_fold *fold)
{
    const fan_slot *s = fan_fold_slot(fold);
    const fan_device *d = s->state->device;
    fan_trace_line line = {.kind = FAN_TRACE_FOLD,
                           .how = fan_slot_letter(s),
                           .device = -1,
                           .count = (uint32_t)fold->n,
                           .key = -1,
                           .rules = fold->rules,
                           .stream = fan_stream_handle(s->state->accum),
                           .bytes = fan_value_bytes(&fold->result),
                           .in_place = fold->plan.exclusive};
    if (d)
        line.device = (int16_t)d->index;
    fan_slot_trace(fold->b, fold->slot, line);
}

fan_status fan_fold_end(fan_fold *fold, fan_error *err)
{
    fan_status status = FAN_OK;
    assert(!fan_fold_left(fold));
    if (fold->batch && !FAN_FAULT(BATCH_FAILURE_IGNORED)) {
        if (fan_batch_state(fold->batch, fold->number) == FAN_JOB_FAILED)
            status = fan_batch_failure(fold->batch, err);
    }
    fold->batch = NULL;
    if (status == FAN_OK)
        status = fan_fold_collect_stats(fold, &fold->result, err);
    if (status == FAN_OK) {
        FAN_COUNT(fold->b, folds, fold->n > 1);
        status = fold_record(fold, err);
    }
    if (status != FAN_OK)
        fan_fold_abandon(fold);
    else if (fan_trace_on())
        fold_trace(fold);
    return status;
}

fan_status fan_fold_run(fan_fold *fold, fan_error *err)
{
    FAN_TRY(fan_fold_begin(fold, NULL, err));
    return fan_fold_end(fold, err);
}

/* ---- it becomes the slot's sum ---- */

/* Locked. Cannot fail: the sum that was made, in `gathered->sum`. Returns the statistics of the sum
 * before it, for the caller to drop. */
static fan_sum_stats commit_made_sum(fan_gathered *gathered)
{
    fan_fold *fold = &gathered->fold;
    fan_slot_state *state = fan_fold_slot(fold)->state;
    const fan_term *term = &fold->terms[0];
    const fan_entry *first = &gathered->entries[term->entry];
    fan_item sum = {.value = fold->result,
                    .number = fold->int_sum,
                    .producer = fold->ready,
                    .event = fold->ready_event,
                    .donated = fold->donated,
                    .owned = fold->owned};
    /* it was made in the memory of the sum before it */
    bool same = term->v->array == fold->result.array && fold->owned;
    if (same && term->is_value && term->owned) {
        sum.exposed = term->exposed;
        sum.shown = first->exposed;
        if (first->general)
            sum.shown = first->item->shown;
    }
    *gathered->sum = sum;
    fold->result = fan_value_none();
    fold->ready = NULL;
    fold->ready_event = NULL;

    fan_sum_stats old = state->sum_stats;
    state->sum_stats = fan_sum_stats_move(&fold->sum_stats);
    if (old.has_nonfinite)
        fan_sum_stats_blame(&state->sum_stats, old.nonfinite_key);
    state->rules |= fold->rules;
    return old;
}

/* The weight that an entry came with, also where that is 1. */
static fan_weight commit_weight(const fan_gathered *gathered, size_t entry)
{
    if (!gathered->weights)
        return (fan_weight){.on = false};
    return gathered->weights[entry];
}

/* Locked. Cannot fail: the only entry that is defined, a plain one, becomes the slot's sum, or
 * stays it, as it is (S8-S11 hold): as an item, in `gathered->sum`. */
static void commit_plain_sum(fan_gathered *gathered, const fan_entry *only)
{
    const fan_term *term = &gathered->fold.terms[0];
    fan_value *value = &gathered->values[gathered->nvalues - 1];
    *gathered->sum = (fan_item){.value = *value,
                                .number = term->number,
                                .donated = term->donated,
                                .owned = term->owned,
                                .exposed = term->exposed,
                                .weight = commit_weight(gathered, term->entry),
                                .shown = only->exposed};
    *value = fan_value_none();
}

/* Locked. Cannot fail: makes the item of the sum, if there is a sum. Returns how many contributions
 * it is of, as fan_list.summed counts them; *old: as commit_made_sum returns it. */
static int64_t commit_sum(fan_gathered *gathered, fan_sum_stats *old)
{
    const fan_fold *fold = &gathered->fold;
    if (fold->n > 1) {
        gathered->sum = gathered->room;
        gathered->room = NULL;
        *old = commit_made_sum(gathered);
        return 2;
    }
    if (fold->n == 0 && !gathered->zero)
        return 0;
    size_t stays = gathered->zero_entry;
    if (fold->n)
        stays = fold->terms[0].entry;
    const fan_entry *only = &gathered->entries[stays];
    if (only->general) {
        gathered->sum = only->item;
    } else {
        gathered->sum = gathered->room;
        gathered->room = NULL;
        commit_plain_sum(gathered, only);
    }
    if (stays == 0 && gathered->has_sum)
        return fan_fold_slot(fold)->list->summed;
    return 1;
}

/* Locked. Cannot fail: the slot's fields about its sum. */
static void commit_state(const fan_gathered *gathered)
{
    const fan_fold *fold = &gathered->fold;
    fan_slot_state *state = fan_fold_slot(fold)->state;
    state->value_seen = fold->seen;
    if (fold->n == 1)
        state->value_seen = fold->terms[0].seen;
    state->summed_seen = gathered->seen;
    state->summed_lo = gathered->weak_lo;
    state->summed_hi = gathered->weak_hi;
    if (gathered->like.some)
        state->like_key = gathered->like.key;
}

/* Locked. Cannot fail: the sum, where there is one, takes the place of the gathered entries, which
 * are at the front of the list but for those that arrived between (only beyond a gap). */
static void commit_take_place(const fan_gathered *gathered, int64_t summed)
{
    fan_buffer *b = gathered->fold.b;
    fan_slot *s = fan_fold_slot(&gathered->fold);
    fan_list *list = s->list;
    fan_item *sum = gathered->sum;
    if (!list)
        return;
    if (gathered->weights)
        fan_slot_weights_drop_plain(s, gathered->entries, gathered->n);
    int64_t last = -1;
    if (gathered->n)
        last = fan_entry_key(&gathered->entries[gathered->n - 1]);
    size_t kept = sum != NULL;
    size_t found = 0; /* of those gathered */
    size_t plain = 0; /* of these, that counted as parked */
    for (size_t i = 0; i < list->n; i++) {
        const fan_entry one = list->entries[i];
        if (found == gathered->n || !fan_entry_same(&one, &gathered->entries[found])) {
            assert(kept <= i);
            list->entries[kept++] = one;
            continue;
        }
        found++;
        int64_t key = fan_entry_key(&one);
        if (list->unsorted && fan_keys_has(list->unsorted, key))
            fan_keys_remove(list->unsorted, key);
        bool was_sum = i == 0 && gathered->has_sum;
        if (one.general)
            fan_item_unpark(b, one.item);
        else if (one.object && !was_sum)
            plain++;
        list->undefined -= !one.object;
    }
    if (plain)
        fan_list_unpark(b, list, plain);
    list->n = kept;
    list->recheck_at = 0;
    list->summed = summed;
    if (sum) {
        sum->parked = true;
        sum->alone = false;
        sum->bytes = 0;
        sum->key = last;
        list->entries[0] = (fan_entry){.item = sum, .general = true};
    }
    if (s->state->keyed > 0 && gathered->n > gathered->has_sum)
        s->state->next_key = (uint64_t)last + 1;
}

/* Unlocked: drops the entries that are in the sum now, but for the sum itself. May run others'
 * code. */
static void commit_drop_entries(fan_gathered *gathered)
{
    fan_buffer *b = gathered->fold.b;
    const fan_item *sum = gathered->sum;
    for (size_t i = 0; i < gathered->n; i++) {
        const fan_entry *one = &gathered->entries[i];
        if (one->general && one->item == sum)
            continue;
        if (one->general && one->item->donated) {
            const fan_value *value = &one->item->value;
            bool in_sum = sum && value->array == sum->value.array;
            if (!in_sum || value->sparse != sum->value.sparse)
                fan_value_returned(value); /* the sum is elsewhere */
        }
        fan_entry_drop(b, one);
    }
    gathered->n = 0;
    gathered->fold.n = 0; /* its terms are gone */
}

fan_status fan_fold_commit_end(fan_buffer *b, size_t slot, fan_gathered *gathered, fan_error *err)
{
    fan_fold *fold = &gathered->fold;
    const fan_like *like = &gathered->like;
    fan_sum_stats old = {.valid = false};
    fan_status status = FAN_OK;
    if (fold->n > 1)
        status = fan_fold_end(fold, err);
    if (status != FAN_OK) {
        fan_slot_fail(b, slot, status, err);
        return status;
    }
    if (fold->n > 1) /* unlocked: it may drop an object */
        fan_value_set_origin(b->frontend, &fold->result, like->origin, like->rank);
    fan_slot_lock(b, slot);
    int64_t summed = commit_sum(gathered, &old);
    commit_state(gathered);
    commit_take_place(gathered, summed);
    fan_slot_unlock(b, slot);
    commit_drop_entries(gathered);
    fan_sum_stats_drop(&old);
    return FAN_OK;
}
