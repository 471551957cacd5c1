#include "buffer/commit.h"

#include "array/exact.h"
#include "base/fault.h"
#include "buffer/fold_kinds.h"
#include "buffer/fold_run.h"
#include "buffer/gather.h"
#include "buffer/lock.h"
#include "buffer/materialize.h"
#include "buffer/pass.h"
#include "buffer/stats.h"

/* What the value of a slot was before: dropped without the lock. */
typedef struct old_sum {
    fan_value value;
    fan_stream *ready;
    fan_event *ready_event;
    fan_sum_stats sum_stats;
} old_sum;

static void value_moves(fan_value *to, fan_value *from)
{
    *to = *from;
    *from = (fan_value){.dtype = FAN_DT_NONE};
}

static void commit_sum(fan_pass *p, fan_gathered *g, old_sum *old)
{
    fan_fold *f = &g->fold;
    uint8_t origin = g->like ? g->like->origin : 0,
            rank = g->like ? g->like->rank : 0; /* of what may be the value itself */
    *old = (old_sum){p->value, p->ready, p->ready_event, p->sum_stats};
    value_moves(&p->value, &f->result);
    p->value.origin = origin;
    p->value.rank = rank;
    bool same = p->value_ours && f->ours && old->value.array == p->value.array;
    p->value_exposed = p->value_exposed && same;
    p->value_shown = p->value_shown && same;
    p->value_ours = f->ours;
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

/* The first contribution becomes the value as it is: there is no sum yet (S8-S11 stand). */
static void commit_first(fan_pass *p, fan_item *it, old_sum *old)
{
    *old = (old_sum){.value = p->value, .ready = p->ready, .ready_event = p->ready_event};
    value_moves(&p->value, &it->value);
    p->value_ours = it->ours;
    p->value_summed = false;
    p->value_exposed = it->exposed;
    p->value_shown = it->shown;
    p->value_donated = it->donated;
    p->ready = it->producer;
    p->ready_event = it->event;
    it->producer = NULL;
    it->event = NULL;
    p->value_hashed = it->hashed;
    p->value_hash = it->hash;
}

static fan_item *item_of(const fan_gathered *g, const fan_value *v)
{
    for (size_t i = 0; i < g->nitems; i++)
        if (&g->items[i]->value == v)
            return g->items[i];
    return NULL;
}

/* Takes the gathered items off the list. They stand at the front but for those that arrived between (only beyond a
 * gap). */
static void unlist(fan_buffer *b, fan_pass *p, const fan_gathered *g)
{
    size_t kept = 0;
    for (size_t i = 0, k = 0; i < p->nitems; i++) {
        if (k < g->nitems && p->items[i] == g->items[k])
            fan_item_unpark(b, g->items[k++]);
        else
            p->items[kept++] = p->items[i];
    }
    for (size_t k = 0; p->unsorted && k < g->nitems; k++)
        fan_keys_remove(p->unsorted, g->items[k]->key);
    p->nitems = kept;
    p->ask = 0;
    if (p->keyed > 0 && g->nitems)
        p->next_key = (uint64_t)g->items[g->nitems - 1]->key + 1;
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
    fan_pass *p = s->p;
    fan_fold *f = &g->fold;
    old_sum old = {.value = {.dtype = FAN_DT_NONE}};
    fan_status status = f->n > 1 ? fan_fold_end(f, err) : FAN_OK;
    fan_item *first = f->n == 1 && !f->terms[0].is_value ? item_of(g, f->terms[0].v) : NULL;
    fan_item *zero = f->n == 0 && g->zero ? item_of(g, g->zero) : NULL;
    fan_slot_lock(b, slot);
    if (status != FAN_OK) {
        fan_slot_poison(s, status, err);
        fan_slot_unlock(b, slot);
        return status;
    }
    if (f->n > 1)
        commit_sum(p, g, &old);
    else if (first)
        commit_first(p, first, &old);
    else if (zero && p->value.form == FAN_FORM_UNDEFINED)
        value_moves(&p->value, &zero->value);
    p->value_seen = f->seen;
    if (g->like)
        p->value_key = g->like_key;
    unlist(b, p, g);
    fan_slot_unlock(b, slot);
    for (size_t i = 0; i < g->nitems; i++)
        fan_item_free(b, g->items[i]);
    g->nitems = 0;
    f->n = 0; /* its terms are gone */
    fan_value_drop(b->frontend, &old.value);
    fan_sum_stats_drop(&old.sum_stats);
    fan_stream_drop(old.ready);
    fan_event_drop(old.ready_event);
    return FAN_OK;
}

/* How many items a slot with accumulate="exact" may sum into its state now: all that are parked, whatever their keys,
 * if that saves memory; 0: none. */
static size_t worth_absorbing(const fan_slot *s)
{
    fan_pass *p = s->p;
    fan_dtype d = fan_dtype_set_promote(p->seen);
    uint64_t parked = 0, dense = 0, state;
    if (!fan_exact_fits(d) || (p->device && p->device->backend->has_streams) ||
        (p->value.form != FAN_FORM_UNDEFINED && p->value.form != FAN_FORM_ZERO))
        return 0;
    if (p->unsorted && (uint64_t)p->unsorted->least > p->next_key)
        return 0;
    fan_pass_in_order(p);
    for (size_t i = 0; i < p->nitems; i++) {
        const fan_value *v = &p->items[i]->value;
        if (!p->items[i]->parked || (p->keyed > 0 && (uint64_t)p->items[i]->key != p->next_key + i))
            return 0; /* keys have no order in an exact sum, but the ledger of A16 has */
        if (v->form == FAN_FORM_SPARSE)
            return 0; /* its sum may be sparse, and small */
        if (v->form == FAN_FORM_DENSE && !fan_exact_fits(v->dtype))
            return 0; /* an integer is read as the sum's own dtype, which may widen yet */
        parked += p->items[i]->bytes;
        dense += v->form == FAN_FORM_DENSE ? (uint64_t)v->array->size : 0;
    }
    state = p->nitems ? dense / p->nitems * fan_superacc_size(d) : 0;
    return p->nitems > 1 && (p->exact || parked > state) ? p->nitems : 0;
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
 * or until the sum is asked for, which is refused (D5). */
static bool ints_leave(const fan_slot *s, size_t m)
{
    const fan_pass *p = s->p;
    fan_int_run run = {.sum = 0};
    const fan_value *next = NULL;
    if (!p->has_weak_int ||
        (p->value.form != FAN_FORM_UNDEFINED && p->value.form != FAN_FORM_ZERO && !fan_int_run_add(&run, &p->value)))
        return false;
    for (size_t i = 0; i < m && !next; i++) {
        const fan_value *v = &p->items[i]->value;
        if (v->form != FAN_FORM_UNDEFINED && v->form != FAN_FORM_ZERO && !fan_int_run_add(&run, v))
            next = v;
    }
    return fan_int_run_leaves(&run, next, NULL, s->spec->dtype != FAN_DT_NONE ? s->spec->dtype : FAN_DT_INT64);
}

/* Locked: with an automatic budget: asks who holds each parked array on the host. Two kinds count as held without
 * asking: what lies on another device, whose cache is not ours, and sparse gradients, which take as long to merge as
 * what is merged already. The more items there are, the more seldom they are asked. */
static void ask_items(fan_buffer *b, fan_pass *p)
{
    if (b->budget != FAN_BUDGET_AUTO || p == &fan_pass_none || p->nitems < p->ask ||
        (p->device && p->device->backend->has_streams))
        return;
    for (size_t i = 0; i < p->nitems; i++) {
        fan_item *it = p->items[i];
        if (!it->parked || it->alone || it->value.form != FAN_FORM_DENSE)
            continue;
        it->alone = it->ours || (it->value.object && b->frontend->alone(it->value.object, &it->value));
        if (it->alone)
            atomic_fetch_add_explicit(&b->alone, it->bytes, memory_order_relaxed);
    }
    p->ask = p->nitems + fan_ask_step(p->nitems);
}

size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t coming)
{
    const fan_slot *s = &b->slots[slot];
    if (s->busy || s->p->poison || atomic_load_explicit(&b->parked, memory_order_relaxed) <= b->least)
        return 0;
    ask_items(b, s->p);
    if (!fan_over_budget(b, coming, true))
        return 0;
    if (s->spec->exact)
        return worth_absorbing(s);
    size_t m = fan_pass_ready_prefix(s->p);
    return ints_leave(s, m) ? 0 : m;
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
    if (s->busy || s->spec->exact || s->p->nitems != 1 || s->p->value.form != FAN_FORM_UNDEFINED ||
        fan_pass_ready_prefix(s->p) != 1)
        return FAN_OK;
    return fold_items(b, slot, 1, err);
}

fan_status fan_buffer_fold_due(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot_lock(b, slot);
    fan_status status = b->slots[slot].busy ? FAN_ERR_STATE : fan_slot_materialize(b, slot, err);
    bool thick = status == FAN_OK;
    if (thick)
        status = fan_slot_fold_while_due(b, slot, err);
    fan_slot_unlock(b, slot);
    /* It is parked; the sum is tried again later, and says then what is wrong. */
    if (status == FAN_ERR_EXTERN && b->frontend->clear_error)
        b->frontend->clear_error();
    return thick && fan_status_poisons(status) ? status : FAN_OK;
}
