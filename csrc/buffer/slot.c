#include "array/convert.h"
#include "array/elements.h"
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "buffer/slot.h"
#include "buffer/options.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the lock ---- */

void fan_buffer_adopt(fan_buffer *b)
{
    bool left = b->process == FAN_LEFT;
    if (b->adopted == fan_process())
        return;
    b->adopted = fan_process();
    for (size_t i = 0; i < b->nlocks; i++) {
        left |= !fan_mutex_adopt(&b->locks[i]);
        fan_cond_adopt(&b->changed[i]);
    }
    atomic_store(&b->waiting, 0);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        left |= s->p->arriving > 0;
        if (!s->busy || fan_thread_survived(atomic_load(&s->owner)))
            continue;
        left = true;
        s->busy = s->taking = false;
        fan_slot_set_owner(s, 0);
    }
    b->process = left ? FAN_LEFT : b->adopted;
}

fan_status fan_buffer_here(fan_buffer *b, fan_error *err)
{
    fan_buffer_adopt(b);
    if (b->process != FAN_LEFT)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE,
                    "%s: another thread was in this buffer when the process was forked, and what it holds is not whole "
                    "in the child: clear() it, or make one here",
                    b->name);
}

void fan_slot_lock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_lock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
    fan_touch_budget(b, FAN_TOUCH_COUNTS); /* a sum may be due, or what waits may become less */
}

void fan_slot_unlock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_unlock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
}

void fan_slot_notify(fan_buffer *b, size_t slot) { fan_cond_broadcast(&b->changed[slot % b->nlocks]); }

/* The slot is locked. Waits until something changed, without the lock of the frontend, so that the thread that will
 * change it can run. */
static fan_status slot_wait_for_change(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_frontend *f = b->frontend;
    atomic_fetch_add(&b->waiting, 1);
    void *left = f->allow_threads_begin ? f->allow_threads_begin() : NULL;
    fan_cond_wait(&b->changed[slot % b->nlocks], &b->locks[slot % b->nlocks]);
    atomic_fetch_sub(&b->waiting, 1);
    fan_slot_unlock(b, slot);
    if (f->allow_threads_begin)
        f->allow_threads_end(left);
    fan_status status = f->check_signals ? f->check_signals(err) : FAN_OK;
    fan_slot_lock(b, slot);
    return status;
}

static fan_status slot_reentered(const fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    return fan_fail(
        err, FAN_ERR_STATE,
        "%s: %s of slot %zu from within a sum, or a target, that holds that slot or one that its take waits for",
        b->name, what, slot);
}

/* Deadlock guard: true if this thread is folding or lending some slot of b, or is taking one above `slot`. It must not
 * wait for `slot` then: a take of `slot` could be waiting for ours. (A take claims slots from the lowest up, and so
 * waits only for higher ones.) */
static bool slot_held_by_this_thread(const fan_buffer *b, size_t slot)
{
    uint64_t me = fan_thread_id();
    for (size_t i = 0; i < b->nslots; i++)
        if (fan_slot_owned_by(&b->slots[i], me) && b->slots[i].busy &&
            (!b->slots[i].taking || i > slot)) /* a slot that this thread owns is changed by nobody else */
            return true;
    return false;
}

static fan_status slot_wait_free(fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    if (fan_slot_owned_by(&b->slots[slot], fan_thread_id()) || slot_held_by_this_thread(b, slot))
        return slot_reentered(b, slot, what, err);
    return slot_wait_for_change(b, slot, err);
}

void fan_slot_make_busy(fan_slot *s)
{
    s->busy = true;
    fan_slot_set_owner(s, fan_thread_id());
}

fan_status fan_slot_claim(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_status status = FAN_OK;
    while (s->busy && !FAN_FAULT(SLOT_CLAIMED_TWICE))
        FAN_TRY(slot_wait_free(b, slot, what, err));
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    fan_slot_make_busy(s);
    s->taking = taking;
    while (taking && s->p->arriving && status == FAN_OK && !FAN_FAULT(TAKE_IGNORES_ADDS))
        status = slot_wait_for_change(b, slot, err);
    if (status != FAN_OK) {
        s->busy = s->taking = false;
        fan_slot_set_owner(s, 0);
        fan_slot_notify(b, slot);
    }
    return status;
}

void fan_slot_let_go(fan_buffer *b, size_t slot)
{
    fan_slot *s = &b->slots[slot];
    s->busy = s->taking = FAN_FAULT(SLOT_KEPT);
    fan_slot_set_owner(s, 0);
    fan_slot_notify(b, slot);
}

/* ---- is a contribution still what it was? ---- */

static fan_status slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err)
{
    char which[64] = "a gradient added without a key";
    if (key >= 0)
        snprintf(which, sizeof which, "the gradient added with key %" PRId64, key);
    return fan_fail(err, FAN_ERR_STATE,
                    FAN_SLOT_SAID ": %s was changed after it was added (its elements, memory, dtype or shape); leave "
                                  "it as it is until take(), or add it with copy=True",
                    FAN_SLOT_WHO(b, slot), which);
}

fan_status fan_slot_check_unmoved(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, fan_error *err)
{
    bool foreign = b->frontend->is_unchanged && v->device == fan_cpu() &&
                   (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE);
    return !foreign || b->frontend->is_unchanged(v) ? FAN_OK : slot_changed(b, slot, key, err);
}

fan_status fan_slot_hash(const fan_buffer *b, const fan_array *a, bool may_end, uint64_t *out, fan_error *err)
{
    uint64_t bytes = (uint64_t)a->size * fan_dtype_size(a->dtype);
    bool release_gil = bytes >= FAN_BUSY_BYTES && b->frontend->allow_threads_begin;
    fan_interrupt interrupt;
    fan_interrupt_begin(&interrupt, may_end ? b->frontend->check_signals : NULL, err);
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    *out = fan_array_hash(a);
    if (release_gil)
        b->frontend->allow_threads_end(left);
    return fan_interrupt_end(&interrupt, FAN_OK);
}

fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, const uint64_t *hash,
                              bool may_end, fan_error *err)
{
    uint64_t now;
    FAN_TRY(fan_slot_check_unmoved(b, slot, v, key, err));
    if (!hash)
        return FAN_OK;
    FAN_TRY(fan_slot_hash(b, v->array, may_end, &now, err));
    return now == *hash ? FAN_OK : slot_changed(b, slot, key, err);
}

/* ---- what it holds ---- */

fan_sum_stats fan_sum_stats_hold(const fan_sum_stats *k)
{
    fan_sum_stats copy = *k;
    if (k->device_words)
        copy.device_words = fan_array_hold(k->device_words);
    copy.stream = fan_stream_hold(k->stream);
    return copy;
}

fan_sum_stats fan_sum_stats_move(fan_sum_stats *k)
{
    fan_sum_stats moved = *k;
    *k = (fan_sum_stats){.valid = false};
    return moved;
}

void fan_sum_stats_drop(fan_sum_stats *k)
{
    fan_array_drop(k->device_words);
    fan_stream_drop(k->stream);
    *k = (fan_sum_stats){.valid = false};
}

fan_sum_stats fan_sum_stats_forget(fan_buffer *b, size_t slot) { return fan_sum_stats_move(&b->sum_stats[slot]); }

fan_pass fan_pass_none;

void fan_item_free(fan_buffer *b, fan_item *it)
{
    if (!it)
        return;
    fan_value_drop(b->frontend, &it->value);
    fan_event_drop(it->event);
    fan_stream_drop(it->producer);
    fan_free(it);
}

/* It no longer counts against the budget. */
void fan_item_unpark(fan_buffer *b, fan_item *it)
{
    if (!it->parked)
        return;
    atomic_fetch_sub_explicit(&b->parked, it->bytes, memory_order_relaxed);
    if (it->alone)
        atomic_fetch_sub_explicit(&b->alone, it->bytes, memory_order_relaxed);
    it->alone = false;
}

/* S11: nobody else can join a pooled stream back to the capture that it came into, or the capture could not end. What
 * fails here, its end tells. */
static void slot_join_pooled(const fan_pass *p)
{
    uint64_t id = 0;
    fan_event *e = NULL;
    if (p->capture_origin && p->accum && fan_stream_capture(p->accum, &id, NULL) == FAN_OK && id &&
        fan_event_record(p->accum, &e, NULL) == FAN_OK)
        (void)fan_stream_wait(p->capture_origin, e, NULL, NULL);
    fan_event_drop(e);
}

/* By arrival from now on. False: out of memory, and nothing happened. */
bool fan_pass_by_arrival(fan_pass *p)
{
    bool good = (p->unsorted = fan_calloc(sizeof *p->unsorted)) != NULL;
    for (size_t i = 0; i < p->nitems && good; i++)
        good = fan_keys_put(p->unsorted, p->items[i]->key) > 0;
    if (!good)
        fan_keys_free(&p->unsorted);
    return good;
}

bool fan_pass_has(const fan_pass *p, int64_t key, size_t *at)
{
    size_t lo = 0, hi = p->nitems;
    *at = p->nitems;
    if (p->unsorted)
        return fan_keys_has(p->unsorted, key);
    if (!hi || p->items[hi - 1]->key < key)
        return false;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (p->items[mid]->key < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    *at = lo;
    return p->items[lo]->key == key;
}

static int slot_by_key(const void *a, const void *b)
{
    const fan_item *const *x = a, *const *y = b;
    return ((*x)->key > (*y)->key) - ((*x)->key < (*y)->key);
}

void fan_pass_in_order(fan_pass *p)
{
    if (!p->unsorted)
        return;
    int64_t *keys = fan_alloc(p->nitems * sizeof *keys);
    uint32_t *at = fan_alloc(p->nitems * sizeof *at);
    fan_item **items = fan_alloc(p->cap * sizeof *items);
    for (size_t i = 0; keys && i < p->nitems; i++)
        keys[i] = p->items[i]->key;
    if (keys && at && items && fan_keys_order(keys, sizeof *keys, p->nitems, at)) {
        for (size_t i = 0; i < p->nitems; i++)
            items[i] = p->items[at[i]];
        fan_free(p->items);
        p->items = items;
    } else {
        qsort(p->items, p->nitems, sizeof *p->items, slot_by_key);
        fan_free(items);
    }
    fan_free(keys);
    fan_free(at);
    fan_keys_free(&p->unsorted);
}

/* Drops all that a pass held. Unlocked. */
void fan_pass_free(fan_buffer *b, fan_pass *p)
{
    if (!p || p == &fan_pass_none)
        return;
    fan_touch_budget(b, FAN_TOUCH_COUNTS);
    for (size_t i = 0; i < p->nitems; i++) {
        fan_item_unpark(b, p->items[i]);
        fan_item_free(b, p->items[i]);
    }
    fan_free(p->items);
    fan_keys_free(&p->unsorted);
    fan_value_drop(b->frontend, &p->value);
    fan_sum_stats_drop(&p->sum_stats);
    fan_free(p->shape);
    slot_join_pooled(p);
    fan_stream_drop(p->capture_origin);
    fan_stream_drop(p->consumer);
    fan_stream_drop(p->accum);
    fan_stream_drop(p->ready);
    fan_event_drop(p->ready_event);
    fan_device_drop(p->device);
    fan_free(p->poison);
    fan_free(p->exact);
    fan_free(p);
}

/* Locked. */
fan_pass *fan_pass_cut(fan_slot *s)
{
    fan_pass *gone = s->p;
    s->p = &fan_pass_none;
    return gone;
}

bool fan_status_poisons(fan_status s)
{
    return s == FAN_ERR_DEVICE || s == FAN_ERR_RACE || s == FAN_ERR_DEADLOCK || s == FAN_ERR_CAPTURE;
}

/* Locked or owned: the first failure is kept. */
void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err)
{
    if (s->p == &fan_pass_none || s->p->poison || !fan_status_poisons(status))
        return;
    s->p->poison = fan_calloc(sizeof *s->p->poison);
    if (s->p->poison && err)
        *s->p->poison = *err;
}

fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_error *first = b->slots[slot].p->poison;
    if (!first)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE, FAN_SLOT_SAID " is poisoned until clear(): %s", FAN_SLOT_WHO(b, slot),
                    first->text);
}

/* Locked: parked items that a fold may sum now: keys without a gap, or all that have arrived in order. */
size_t fan_pass_ready_prefix(fan_pass *p)
{
    size_t m = 0;
    if (p->unsorted && (uint64_t)p->unsorted->least > p->next_key)
        return 0;
    fan_pass_in_order(p);
    while (m < p->nitems && p->items[m]->parked && (p->keyed < 0 || (uint64_t)p->items[m]->key == p->next_key + m))
        m++;
    return m;
}

fan_dtype_set fan_item_seen(fan_dtype_set seen, const fan_slot *s, const fan_item *it)
{
    if (!it->own)
        return seen;
    return s->spec->dtype != FAN_DT_NONE ? it->own : seen | it->own;
}

/* ---- what came by the fast path becomes items ---- */

void fan_fast_unpark(fan_buffer *b, fan_fast_list *p, size_t n)
{
    if (n) /* of None alone nobody has set `bytes` */
        atomic_fetch_sub_explicit(&b->parked, n * p->bytes, memory_order_relaxed);
    if (p->alone)
        atomic_fetch_sub_explicit(&b->alone, p->alone * p->bytes, memory_order_relaxed);
    p->alone = p->ask = 0;
}

void fan_fast_drop(fan_buffer *b, size_t slot)
{
    fan_fast_list *p = b->slots[slot].fast;
    FAN_UNCLEARED fan_fast_detached gone;
    if (!p || !p->n)
        return;
    fan_fast_unpark(b, p, fan_fast_list_parked(p) - p->undefined);
    fan_fast_list_detach(p, &gone);
    const fan_fast_term *terms = gone.heap ? gone.heap : gone.inline_terms;
    for (size_t i = 0; i < gone.n; i++)
        if (terms[i].object)
            b->frontend->drop(terms[i].object);
    fan_fast_detached_fini(&gone, p);
}

static void slot_items_free(fan_buffer *b, fan_item **items, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fan_value_drop(b->frontend, &items[i]->value);
        fan_free(items[i]);
    }
    fan_free(items);
}

/* A10: the dtype that they bring. */
static fan_dtype_set slot_dtypes_of(const fan_spec *spec, const fan_fast_kind *k)
{
    return fan_dtype_set_add(0, k->dtype, k->weak && spec->dtype == FAN_DT_NONE);
}

/* D5: Python ints are checked against the dtype of all, which may come yet. */
static void slot_weak_range(fan_pass *p, const fan_fast_list *list)
{
    p->has_weak_int = true;
    for (size_t i = 0; list->kind.dtype == FAN_DT_INT64 && i < list->n; i++) {
        int64_t n = 0;
        if (list->terms[i].object)
            memcpy(&n, fan_fast_data(&list->kind, &list->terms[i]), sizeof n);
        p->weak_lo = n < p->weak_lo ? n : p->weak_lo;
        p->weak_hi = n > p->weak_hi ? n : p->weak_hi;
    }
}

/* The items of what is parked, in *items. */
static fan_status slot_items_of(fan_buffer *b, size_t slot, fan_item **items, size_t *made, fan_error *err)
{
    fan_fast_list *list = b->slots[slot].fast;
    fan_fast_list_sort(list);
    fan_dtype_set own =
        fan_fast_list_defined(list) ? slot_dtypes_of(b->slots[slot].spec, &list->kind) : 0; /* no kind yet */
    for (size_t i = list->summed > 0; i < list->n; i++) {
        const fan_fast_term *one = &list->terms[i];
        if (!one->object && one->key < 0)
            continue; /* it only counts (S2) */
        fan_item *it = fan_calloc(sizeof *it);
        if (!it)
            return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
        it->value.dtype = FAN_DT_NONE;
        bool kept = false;
        fan_status status =
            one->object ? b->frontend->fast_value(one->object, one->data, &list->kind, &it->value, &kept, err) : FAN_OK;
        if (status != FAN_OK) {
            fan_free(it);
            return status == FAN_ERR_STATE ? slot_changed(b, slot, one->key, err) : status;
        }
        it->key = one->key;
        it->parked = true;
        it->own = it->value.form == FAN_FORM_OBJECT || !one->object ? 0 : own;
        it->bytes = one->object ? list->bytes : 0;
        it->donated = one->donated;
        it->ours = one->ours;
        it->exposed = it->ours && kept;
        items[(*made)++] = it;
    }
    return FAN_OK;
}

/* sum_of: the sum so far, as a value. */
static fan_status slot_sum_of(fan_buffer *b, size_t slot, fan_value *out, bool *kept, fan_error *err)
{
    const fan_fast_list *list = b->slots[slot].fast;
    const fan_fast_term *one = &list->terms[0];
    fan_status status = b->frontend->fast_value(one->object, one->data, &list->kind, out, kept, err);
    return status == FAN_ERR_STATE ? slot_changed(b, slot, one->key, err) : status;
}

/* pass_fill: what a slot knows of a pass whose contributions so far are items of ours. Takes items, shape and sum. */
static void slot_state_fill(fan_pass *p, const fan_slot *s, fan_item **items, size_t made, int64_t *shape,
                            const fan_value *sum)
{
    const fan_fast_list *list = s->fast;
    const fan_fast_kind *k = &list->kind;
    bool some = fan_fast_list_defined(list);
    if (some && k->ndim)
        memcpy(shape, k->shape, (size_t)k->ndim * sizeof *shape);
    p->seen = some ? slot_dtypes_of(s->spec, k) : 0;
    if (some && k->weak)
        slot_weak_range(p, list);
    p->keyed = list->terms[0].key < 0 ? -1 : 1;
    p->count = fan_fast_list_count(list);
    p->device = some ? fan_device_hold(fan_cpu()) : NULL;
    p->rules = fan_plan_fast_slot(some, list->undefined > 0) | (list->summed ? list->rules : 0);
    p->items = items;
    p->nitems = made;
    p->cap = list->n;
    if (list->summed) {
        p->value = *sum;
        p->value_summed = list->summed > 1;
        p->value_ours = p->value_summed || list->terms[0].ours;
        p->value_donated = list->terms[0].donated;
        p->value_seen = p->seen;
        p->value_key = list->terms[0].key < 0 ? -1 : 0;
        p->next_key = (uint64_t)list->terms[0].key + 1;
    }
    if (s->spec->has_shape || !some) {
        fan_free(shape);
    } else {
        p->shape = shape;
        p->ndim = k->ndim;
        p->shaped = true;
    }
}

fan_status fan__slot_materialize(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *list = s->fast;
    const fan_fast_kind *k = &list->kind;
    size_t n = list->n, made = 0;
    fan_status status = FAN_OK;
    fan_value sum = {.dtype = FAN_DT_NONE};
    /* Whoever has the slot already is the caller. Nobody else adds or takes meanwhile. */
    bool mine = s->busy, taking = s->taking, some = n > list->undefined, check_late = some && k->check_at_use,
         sum_kept = false;
    fan_pass *p = fan_calloc(sizeof *p);
    fan_item **items = fan_alloc(n * sizeof *items);
    int64_t *shape = fan_alloc(some ? (size_t)k->ndim * sizeof *shape : 0);
    if (!p || !items || !shape)
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot));
    if (check_late) {
        s->busy = s->taking = true;
        fan_slot_set_owner(s, fan_thread_id());
        fan_slot_unlock(b, slot);
    }
    status = slot_items_of(b, slot, items, &made, err);
    if (status == FAN_OK && list->summed)
        status = slot_sum_of(b, slot, &sum, &sum_kept, err);
    if (check_late) {
        fan_slot_lock(b, slot);
        s->taking = taking;
        if (!mine)
            fan_slot_let_go(b, slot);
    }
    FAN_GO(status);
    slot_state_fill(p, s, items, made, shape, &sum);
    p->value_exposed = sum_kept && p->value_ours;
    s->p = p;
    /* The items have holds of their own; nothing is called back, for more than these remain. They are parked as before;
     * who has them is asked anew. */
    fan_fast_unpark(b, list, 0);
    for (size_t i = 0; i < n; i++)
        if (list->terms[i].object)
            b->frontend->drop(list->terms[i].object);
    fan_fast_list_empty(list);
    return FAN_OK;
done:
    fan_value_drop(b->frontend, &sum);
    if (items)
        slot_items_free(b, items, made);
    fan_free(shape);
    fan_free(p);
    return status;
}

/* ---- entering ---- */

fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err)
{
    FAN_TRY(fan_buffer_here(b, err));
    if (slot >= b->nslots)
        return fan_fail(err, FAN_ERR_INDEX, "%s: no slot %zu; it has %zu (S1)", b->name, slot, b->nslots);
    return FAN_OK;
}

fan_status fan_slot_in_target(const fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    for (const fan_target *t = b->slots[slot].targets; t; t = t->next)
        if (t->thread == fan_thread_id())
            return fan_fail(err, FAN_ERR_STATE,
                            FAN_SLOT_SAID ": %s() from within a target of that slot: what is added into it would miss "
                                          "this pass; leave the block first",
                            FAN_SLOT_WHO(b, slot), what);
    return FAN_OK;
}

fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err)
{
    FAN_TRY(fan_slot_claim(b, slot, taking, what, err));
    fan_status status = fan_slot_materialize(b, slot, err);
    if (status != FAN_OK)
        fan_slot_let_go(b, slot);
    return status;
}

fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    while (s->taking && s->busy && !FAN_FAULT(ADD_IGNORES_TAKE))
        FAN_TRY(slot_wait_free(b, slot, what, err));
    FAN_TRY(fan_slot_materialize(b, slot, err));
    return fan_slot_poisoned(b, slot, err);
}
