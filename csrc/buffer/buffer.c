/* Who may enter a slot when: add, fold, take, clear. What is done there is in arrive.c and fold.c. */
#include "buffer/buffer.h"

#include "base/cache.h"
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "base/trace.h"
#include "array/exact.h"
#include "buffer/arrive.h"
#include "buffer/slot.h"

#include <assert.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_uint_fast64_t next_buffer = 1;
static atomic_bool debug_on, warn_on = true, warned, redirect_on;
static struct {
#define X(name) atomic_uint_fast64_t name;
    FAN_COUNTER_LIST(X)
#undef X
} total;
fan_pass fan_pass_none;

void fan_set_debug(bool on) { atomic_store(&debug_on, on); }
bool fan_get_debug(void) { return atomic_load(&debug_on); }
void fan_set_warn_mismatch(bool on)
{
    atomic_store(&warn_on, on);
    if (on)
        atomic_store(&warned, false);
}
bool fan_get_warn_mismatch(void) { return atomic_load(&warn_on); }
void fan_set_capture_redirect(bool on) { atomic_store(&redirect_on, on); }
bool fan_get_capture_redirect(void) { return atomic_load(&redirect_on); }

static void touch_counters(const fan_buffer *b)
{
    if (!fan_watched() || !b->nlocks)
        return;
    fan_touch_thing(FAN_THING_COUNTERS, b->locks[0].id, FAN_TOUCH_COUNTS);
    fan_touch_thing(FAN_THING_COUNTERS, 0, FAN_TOUCH_COUNTS);
}

/* --- counters ------------------------------------------------------------------------------------------------- */

void fan_count(fan_buffer *b, size_t offset, uint64_t n)
{
    size_t i = offset / sizeof(uint64_t);
    touch_counters(b);
    atomic_fetch_add_explicit((atomic_uint_fast64_t *)&b->n + i, n, memory_order_relaxed);
    atomic_fetch_add_explicit((atomic_uint_fast64_t *)&total + i, n, memory_order_relaxed);
}

static void raise_to(atomic_uint_fast64_t *peak, uint64_t n)
{
    uint64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < n &&
           !atomic_compare_exchange_weak_explicit(peak, &seen, n, memory_order_relaxed, memory_order_relaxed))
        ;
}

void fan_buffer_counters(const fan_buffer *b, fan_counters *out)
{
#define X(name) out->name = atomic_load_explicit(&b->n.name, memory_order_relaxed);
    FAN_COUNTER_LIST(X)
#undef X
    fan_fast_counted(&b->quick, out);
}

void fan_counters_total(fan_counters *out)
{
#define X(name) out->name = atomic_load_explicit(&total.name, memory_order_relaxed);
    FAN_COUNTER_LIST(X)
#undef X
    fan_fast_counted(&fan_fast_total, out);
}

/* --- what scheduled threads share without a lock: the slots, the budget, the counters ---------------------------- */

static void touch_budget(const fan_buffer *b, fan_touch how)
{
    if (fan_watched() && b->nlocks)
        fan_touch_thing(FAN_THING_BUDGET, b->locks[0].id, how);
}

void fan_buffer_seen(const fan_buffer *b, size_t slot, fan_touch how)
{
    for (size_t i = 0; i < b->nlocks; i++)
        if (slot == SIZE_MAX || (slot < b->nslots && slot % b->nlocks == i))
            fan_touch_thing(FAN_THING_LOCKED, b->locks[i].id, how);
    if (how == FAN_TOUCH_WRITES) {
        touch_budget(b, FAN_TOUCH_COUNTS);
        touch_counters(b);
    }
}

void fan_buffer_seen_counters(const fan_buffer *b)
{
    if (b->nlocks)
        fan_touch_thing(FAN_THING_COUNTERS, b->locks[0].id, FAN_TOUCH_WEIGHS);
}

void fan_buffer_seen_parked(const fan_buffer *b) { touch_budget(b, FAN_TOUCH_WEIGHS); }

void fan_buffer_weigh(fan_buffer *b, uint64_t bytes)
{
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    if (!fan_thread_get_hooks())
        return;
    b->weighed = (b->weighed < parked ? parked : b->weighed) + bytes;
    touch_budget(b, FAN_TOUCH_COUNTS);
    touch_counters(b);
    if (b->weighed > b->least)
        touch_budget(b, FAN_TOUCH_WEIGHS);
}

/* --- a forked child -------------------------------------------------------------------------------------------- */

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

/* --- locks ---------------------------------------------------------------------------------------------------- */

void fan_slot_lock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_lock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
    touch_budget(b, FAN_TOUCH_COUNTS); /* a sum may be due, or what waits may become less */
}

void fan_slot_unlock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_unlock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
}

static void changed(fan_buffer *b, size_t slot) { fan_cond_broadcast(&b->changed[slot % b->nlocks]); }

/* Locked; waits until something changed. Leaves the frontend first, so that who changes it can run. */
static fan_status wait_for_change(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_frontend *f = b->frontend;
    atomic_fetch_add(&b->waiting, 1);
    void *left = f->leave ? f->leave() : NULL;
    fan_cond_wait(&b->changed[slot % b->nlocks], &b->locks[slot % b->nlocks]);
    atomic_fetch_sub(&b->waiting, 1);
    fan_slot_unlock(b, slot);
    if (f->leave)
        f->enter(left);
    fan_status status = f->poll ? f->poll(err) : FAN_OK;
    fan_slot_lock(b, slot);
    return status;
}

fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_error *first = b->slots[slot].p->poison;
    if (!first)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE, FAN_SLOT_SAID " is poisoned until clear(): %s", FAN_SLOT_WHO(b, slot),
                    first->text);
}

static fan_status reentered(const fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    return fan_fail(
        err, FAN_ERR_STATE,
        "%s: %s of slot %zu from within a sum, or a target, that holds that slot or one that its take waits for",
        b->name, what, slot);
}

/* Whether this thread sums or lends a slot of the buffer, or takes one above `slot`: were it to wait for `slot`, whose
 * taker waits for that one, nobody would ever go on. Who takes waits upwards only. */
static bool holds_another(const fan_buffer *b, size_t slot)
{
    uint64_t me = fan_thread_id();
    for (size_t i = 0; i < b->nslots; i++)
        if (fan_slot_owned_by(&b->slots[i], me) && b->slots[i].busy &&
            (!b->slots[i].taking || i > slot)) /* what is ours nobody else changes */
            return true;
    return false;
}

/* Locked; makes the slot busy. Waits for whoever has it, and, for a take, until every add has parked. */
fan_status fan_slot_claim(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_status status = FAN_OK;
    while (s->busy && !FAN_FAULT(SLOT_CLAIMED_TWICE)) {
        if (fan_slot_owned_by(s, fan_thread_id()) || holds_another(b, slot))
            return reentered(b, slot, what, err);
        FAN_TRY(wait_for_change(b, slot, err));
    }
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    s->busy = true;
    s->taking = taking;
    fan_slot_set_owner(s, fan_thread_id());
    while (taking && s->p->arriving && status == FAN_OK && !FAN_FAULT(TAKE_IGNORES_ADDS))
        status = wait_for_change(b, slot, err);
    if (status != FAN_OK) {
        s->busy = s->taking = false;
        fan_slot_set_owner(s, 0);
        changed(b, slot);
    }
    return status;
}

fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err)
{
    FAN_TRY(fan_slot_claim(b, slot, taking, what, err));
    fan_status status = fan_slot_materialize(b, slot, err);
    if (status != FAN_OK)
        fan_slot_let_go(b, slot);
    return status;
}

/* Locked. */
void fan_slot_let_go(fan_buffer *b, size_t slot)
{
    fan_slot *s = &b->slots[slot];
    s->busy = s->taking = FAN_FAULT(SLOT_KEPT);
    fan_slot_set_owner(s, 0);
    changed(b, slot);
}

/* --- items and passes ----------------------------------------------------------------------------------------- */

static void item_free(fan_buffer *b, fan_item *it)
{
    if (!it)
        return;
    fan_value_drop(b->frontend, &it->value);
    fan_event_drop(it->event);
    fan_stream_drop(it->producer);
    fan_free(it);
}

/* It no longer counts against the budget. */
static void unpark(fan_buffer *b, fan_item *it)
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
static void join_pooled(const fan_pass *p)
{
    uint64_t id = 0;
    fan_event *e = NULL;
    if (p->joins && p->accum && fan_stream_capture(p->accum, &id, NULL) == FAN_OK && id &&
        fan_event_record(p->accum, &e, NULL) == FAN_OK)
        (void)fan_stream_wait(p->joins, e, NULL, NULL);
    fan_event_drop(e);
}

/* ---- items that came out of order ---- */

static void keys_end(fan_pass *p)
{
    if (!p->unsorted)
        return;
    fan_keys_fini(p->unsorted);
    fan_free(p->unsorted);
    p->unsorted = NULL;
}

/* By arrival from now on. False: out of memory, and nothing happened. */
static bool keys_begin(fan_pass *p)
{
    bool good = (p->unsorted = fan_calloc(sizeof *p->unsorted)) != NULL;
    for (size_t i = 0; i < p->nitems && good; i++)
        good = fan_keys_put(p->unsorted, p->items[i]->key) > 0;
    if (!good)
        keys_end(p);
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

static int by_key(const void *a, const void *b)
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
        qsort(p->items, p->nitems, sizeof *p->items, by_key);
        fan_free(items);
    }
    fan_free(keys);
    fan_free(at);
    keys_end(p);
}

/* Drops all that a pass held. Unlocked. */
void fan_pass_free(fan_buffer *b, fan_pass *p)
{
    if (!p || p == &fan_pass_none)
        return;
    touch_budget(b, FAN_TOUCH_COUNTS);
    for (size_t i = 0; i < p->nitems; i++) {
        unpark(b, p->items[i]);
        item_free(b, p->items[i]);
    }
    fan_free(p->items);
    keys_end(p);
    fan_value_drop(b->frontend, &p->value);
    fan_sum_stats_drop(&p->known);
    fan_free(p->shape);
    join_pooled(p);
    fan_stream_drop(p->joins);
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

static bool is_poisonous(fan_status s)
{
    return s == FAN_ERR_DEVICE || s == FAN_ERR_RACE || s == FAN_ERR_DEADLOCK || s == FAN_ERR_CAPTURE;
}

/* Locked or owned: the first failure is kept. */
void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err)
{
    if (s->p == &fan_pass_none || s->p->poison || !is_poisonous(status))
        return;
    s->p->poison = fan_calloc(sizeof *s->p->poison);
    if (s->p->poison && err)
        *s->p->poison = *err;
}

/* Locked: parked items that a fold may sum now: keys without a gap, or all that have arrived in order. */
static size_t ready_prefix(fan_pass *p)
{
    size_t m = 0;
    if (p->unsorted && p->unsorted->least > p->next_key)
        return 0;
    fan_pass_in_order(p);
    while (m < p->nitems && p->items[m]->parked && (p->keyed < 0 || p->items[m]->key == p->next_key + (int64_t)m))
        m++;
    return m;
}

static fan_dtype_set seen_with(fan_dtype_set seen, const fan_slot *s, const fan_item *it)
{
    if (!it->own)
        return seen;
    return s->spec->dtype != FAN_DT_NONE ? it->own : seen | it->own;
}

/* --- gathering the terms of a fold ---------------------------------------------------------------------------- */


void fan_gathered_fini(fan_gathered *g)
{
    fan_free(g->items);
    fan_free(g->fold.terms);
    fan_free(g->fold.scratch);
    fan_free(g->fold.keys);
    fan_sum_stats_drop(&g->fold.known);
    fan_stream_drop(g->fold.ready);
    fan_event_drop(g->fold.ready_event);
    memset(g, 0, sizeof *g);
}

static void consider_kind(fan_gathered *g, const fan_value *v, int64_t key)
{
    if (v->form == FAN_FORM_UNDEFINED || v->form == FAN_FORM_ZERO)
        return;
    if (!g->like || v->rank < g->like->rank || (v->rank == g->like->rank && key >= 0 && key < g->like_key)) {
        g->like = v;
        g->like_key = key;
    }
}

fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err)
{
    char which[64] = "a gradient added without a key";
    if (key >= 0)
        snprintf(which, sizeof which, "the gradient added with key %" PRId64, key);
    return fan_fail(err, FAN_ERR_STATE,
                    FAN_SLOT_SAID ": %s was changed after it was added (its elements, memory, dtype or shape); leave "
                                  "it as it is until take(), or add it with copy=True",
                    FAN_SLOT_WHO(b, slot), which);
}

fan_status fan_slot_still(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, fan_error *err)
{
    bool foreign =
        b->frontend->still && v->device == fan_cpu() && (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE);
    return !foreign || b->frontend->still(v) ? FAN_OK : fan_slot_changed(b, slot, key, err);
}

/* Before it is read: it lies where it lay, and, with debug, has the elements that it had. */
static fan_status check_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, bool hashed,
                                  uint64_t hash, fan_error *err)
{
    FAN_TRY(fan_slot_still(b, slot, v, key, err));
    return !hashed || fan_array_hash(v->array) == hash ? FAN_OK : fan_slot_changed(b, slot, key, err);
}

/* The value and the first `m` items (SIZE_MAX: all that are parked) as terms. The slot is busy; takes its lock. */
fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, fan_gathered *g, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &g->fold;
    size_t n = 0, room;
    memset(g, 0, sizeof *g);
    fan_slot_lock(b, slot);
    room = s->p->nitems;
    fan_slot_unlock(b, slot);
    f->b = b;
    f->slot = slot;
    f->finish_dtype = FAN_DT_NONE;
    f->terms = fan_alloc((room + 1) * sizeof *f->terms);
    f->scratch = fan_alloc((room + 2) * sizeof *f->scratch);
    g->items = fan_alloc((room + 1) * sizeof *g->items);
    if (!f->terms || !f->scratch || !g->items) {
        fan_gathered_fini(g);
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    }
    fan_slot_lock(b, slot);
    fan_pass_in_order(s->p);
    for (size_t i = 0; i < s->p->nitems && n < room && n < m; i++)
        if (s->p->items[i]->parked)
            g->items[n++] = s->p->items[i];
    fan_slot_unlock(b, slot);
    g->nitems = n;
    f->seen = s->p->value_seen;
    f->state = s->p->exact;
    if (s->p->value.form == FAN_FORM_ZERO) {
        g->zero = &s->p->value;
    } else if (s->p->value.form != FAN_FORM_UNDEFINED) {
        f->terms[f->n++] = (fan_term){.v = &s->p->value,
                                      .producer = s->p->ready,
                                      .event = s->p->ready_event,
                                      .donated = s->p->value_donated,
                                      .ours = s->p->value_ours,
                                      .lent = s->p->value_lent,
                                      .is_value = true,
                                      .key = s->p->value_key,
                                      .own = FAN_DT_NONE,
                                      .seen = f->seen};
        consider_kind(g, &s->p->value, s->p->value_key);
        fan_status status =
            check_unchanged(b, slot, &s->p->value, s->p->value_key, s->p->value_hashed, s->p->value_hash, err);
        if (status != FAN_OK) {
            fan_gathered_fini(g);
            return status;
        }
    }
    for (size_t i = 0; i < n; i++) {
        fan_item *it = g->items[i];
        f->seen = seen_with(f->seen, s, it);
        if (it->value.form == FAN_FORM_UNDEFINED)
            continue;
        if (it->value.form == FAN_FORM_ZERO) {
            g->zero = g->zero ? g->zero : &it->value;
            continue;
        }
        fan_status status = check_unchanged(b, slot, &it->value, it->key, it->hashed, it->hash, err);
        /* Whatever the caller did to its indices since: no sum reads or writes out of bounds. */
        if (status == FAN_OK && it->value.form == FAN_FORM_SPARSE && it->value.device == fan_cpu() && !it->ours)
            status = fan_sparse_check(it->value.sparse, err);
        if (status != FAN_OK) {
            fan_gathered_fini(g);
            return status;
        }
        consider_kind(g, &it->value, it->key);
        f->terms[f->n++] = (fan_term){.v = &it->value,
                                      .producer = it->producer,
                                      .event = it->event,
                                      .donated = it->donated,
                                      .ours = it->ours,
                                      .lent = it->lent,
                                      .key = it->key,
                                      .own = it->value.weak ? FAN_DT_NONE : fan_dtype_set_promote(it->own),
                                      .seen = f->seen};
    }
    return FAN_OK;
}

/* What a slot's value was, and is dropped unlocked. */
typedef struct former {
    fan_value value;
    fan_stream *ready;
    fan_event *ready_event;
    fan_sum_stats known;
} former;

static void value_moves(fan_value *to, fan_value *from)
{
    *to = *from;
    *from = (fan_value){.dtype = FAN_DT_NONE};
}

static void commit_sum(fan_pass *p, fan_gathered *g, former *old)
{
    fan_fold *f = &g->fold;
    uint8_t origin = g->like ? g->like->origin : 0,
            rank = g->like ? g->like->rank : 0; /* of what may be the value itself */
    *old = (former){p->value, p->ready, p->ready_event, p->known};
    value_moves(&p->value, &f->result);
    p->value.origin = origin;
    p->value.rank = rank;
    p->value_lent = p->value_lent && p->value_ours && f->ours && old->value.array == p->value.array;
    p->value_ours = f->ours;
    p->value_donated = f->donated;
    p->value_hashed = false;
    p->known = fan_sum_stats_move(&f->known);
    if (old->known.bad) {
        p->known.bad = true;
        p->known.bad_key = old->known.bad_key;
    }
    p->ready = f->ready;
    p->ready_event = f->ready_event;
    f->ready = NULL;
    f->ready_event = NULL;
    p->rules |= f->rules;
}

/* The first one takes the slot: no sum yet (S8-S11 stand). */
static void commit_first(fan_pass *p, fan_item *it, former *old)
{
    *old = (former){.value = p->value, .ready = p->ready, .ready_event = p->ready_event};
    value_moves(&p->value, &it->value);
    p->value_ours = it->ours;
    p->value_lent = it->lent;
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
            unpark(b, g->items[k++]);
        else
            p->items[kept++] = p->items[i];
    }
    for (size_t k = 0; p->unsorted && k < g->nitems; k++)
        fan_keys_remove(p->unsorted, g->items[k]->key);
    p->nitems = kept;
    p->ask = 0;
    if (p->keyed > 0 && g->nitems)
        p->next_key = g->items[g->nitems - 1]->key + 1;
}

fan_status fan_fold_commit(fan_buffer *b, size_t slot, fan_gathered *g, fan_error *err)
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
    former old = {.value = {.dtype = FAN_DT_NONE}};
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
        item_free(b, g->items[i]);
    g->nitems = 0;
    f->n = 0; /* its terms are gone */
    fan_value_drop(b->frontend, &old.value);
    fan_sum_stats_drop(&old.known);
    fan_stream_drop(old.ready);
    fan_event_drop(old.ready_event);
    return FAN_OK;
}

/* How many of its items an exact slot may sum into its state: all that are parked, whatever their keys, where that
 * saves memory; 0: none. */
static size_t worth_absorbing(const fan_slot *s)
{
    fan_pass *p = s->p;
    fan_dtype d = fan_dtype_set_promote(p->seen);
    uint64_t parked = 0, dense = 0, state;
    if (!fan_exact_fits(d) || (p->device && p->device->backend->has_streams) ||
        (p->value.form != FAN_FORM_UNDEFINED && p->value.form != FAN_FORM_ZERO))
        return 0;
    if (p->unsorted && p->unsorted->least > p->next_key)
        return 0;
    fan_pass_in_order(p);
    for (size_t i = 0; i < p->nitems; i++) {
        const fan_value *v = &p->items[i]->value;
        if (!p->items[i]->parked || (p->keyed > 0 && p->items[i]->key != p->next_key + (int64_t)i))
            return 0; /* keys have no order in an exact sum, but the ledger of A16 has */
        if (v->form == FAN_FORM_SPARSE)
            return 0; /* its sum may be sparse, and small */
        if (v->form == FAN_FORM_DENSE && !fan_exact_fits(v->dtype))
            return 0; /* an integer is read as the sum's own dtype, which may widen yet */
        parked += p->items[i]->bytes;
        dense += v->form == FAN_FORM_DENSE ? (uint64_t)v->array->size : 0;
    }
    state = p->nitems ? dense / p->nitems * fan_exact_state_size(d) : 0;
    return p->nitems > 1 && (p->exact || parked > state) ? p->nitems : 0;
}

/* Locked on entry and on return; the slot is free: sums its first m items into its value, or its exact state. */
static fan_status fold_items(fan_buffer *b, size_t slot, size_t m, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_gathered g;
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    s->busy = true;
    fan_slot_set_owner(s, fan_thread_id());
    fan_slot_unlock(b, slot);
    fan_status status = fan_gather(b, slot, m, &g, err);
    if (status == FAN_OK) {
        if (s->spec->exact)
            status = fan_fold_absorb(&g.fold, g.like, err);
        if (status == FAN_OK)
            status = fan_fold_commit(b, slot, &g, err);
        fan_gathered_fini(&g);
    }
    fan_slot_lock(b, slot);
    fan_slot_let_go(b, slot);
    return status;
}

/* Locked: a prefix of Python ints whose sum does not fit waits for what brings it back, or for who asks for it and is
 * told (D5). */
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

/* Locked: with an automatic budget: who has what is parked: arrays on the host. Another's device is no cache of ours,
 * and to merge sparse ones takes as long as what is merged already: they count as held. Many are asked seldom. */
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
    if (!fan_over_budget(b, coming))
        return 0;
    if (s->spec->exact)
        return worth_absorbing(s);
    size_t m = ready_prefix(s->p);
    return ints_leave(s, m) ? 0 : m;
}

/* Locked on entry and on return: folds while the budget is passed and there is something to fold. */
static fan_status fold_while_due(fan_buffer *b, size_t slot, fan_error *err)
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
        ready_prefix(s->p) != 1)
        return FAN_OK;
    return fold_items(b, slot, 1, err);
}

fan_status fan_buffer_fold_due(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot_lock(b, slot);
    fan_status status = b->slots[slot].busy ? FAN_ERR_STATE : fan_slot_materialize(b, slot, err);
    bool thick = status == FAN_OK;
    if (thick)
        status = fold_while_due(b, slot, err);
    fan_slot_unlock(b, slot);
    /* It is parked; the sum is tried again later, and says then what is wrong. */
    if (status == FAN_ERR_EXTERN && b->frontend->forget)
        b->frontend->forget();
    return thick && is_poisonous(status) ? status : FAN_OK;
}

/* --- add ------------------------------------------------------------------------------------------------------ */

/* The streams that a contribution was given, and that stand for what it was not given; held. */
typedef struct given {
    fan_stream *current;  /* S4, S5, S11 */
    fan_stream *consumer; /* NULL: S5 */
    bool pooled;          /* `current` is the device's own: S11 under capture */
} given;

/* Locked: what the slot learns from a contribution that has been checked. FAN_ERR_NOMEM changes nothing. */
static fan_status reserve(fan_buffer *b, size_t slot, fan_contribution *c, const fan_arrival *a, const given *with,
                          fan_item *it, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_pass *p = s->p;
    const int64_t *shape = NULL;
    int ndim = fan_value_shape(&c->value, &shape);
    bool keep = c->value.form != FAN_FORM_UNDEFINED || c->key >= 0;
    int64_t *copy = NULL;
    bool bad = false;
    if (p == &fan_pass_none && !(p = fan_calloc(sizeof *p)))
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    if (ndim >= 0 && !s->spec->has_shape && !p->shaped) {
        copy = fan_alloc((size_t)ndim * sizeof *copy);
        if (copy && ndim)
            memcpy(copy, shape, (size_t)ndim * sizeof *copy);
        bad = !copy;
    }
    bad = bad || (keep && fan_grow((void **)&p->items, &p->cap, p->nitems + 1, sizeof *p->items) != 0);
    /* Among many items each would move the rest: behind all, and by key when somebody looks. */
    if (!bad && keep && c->key >= 0 && !p->unsorted && p->nitems - a->at > FAN_SHIFTED)
        bad = !keys_begin(p);
    size_t at = p->unsorted ? p->nitems : a->at;
    if (!bad && keep && p->unsorted)
        bad = fan_keys_put(p->unsorted, c->key) < 0;
    if (bad) {
        fan_free(copy);
        if (s->p == &fan_pass_none)
            fan_pass_free(b, p);
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    }
    if (s->p != p) /* who sums reads it unlocked */
        s->p = p;
    if (copy) {
        p->shape = copy;
        p->ndim = ndim;
        p->shaped = true;
    }
    p->seen = a->seen;
    if (c->value.weak) {
        p->has_weak_int = true;
        p->weak_lo = a->weak_lo;
        p->weak_hi = a->weak_hi;
    }
    p->keyed = c->key >= 0 ? 1 : -1;
    p->count++;
    p->objects = p->objects || c->value.form == FAN_FORM_OBJECT;
    if (a->device && !p->device)
        p->device = fan_device_hold(a->device);
    if (a->sync.how != '-' && a->sync.how != '+') {
        fan_stream *C = with->consumer ? with->consumer : with->current;
        p->consumer = fan_stream_hold(C);
        p->accum = fan_stream_hold(a->sync.how == 'B' ? a->producer : a->sync.how == 'C' ? with->current : C);
        p->joins = a->sync.how == 'C' && with->pooled ? fan_stream_hold(a->producer) : NULL;
        p->how = a->sync.how;
        assert(fan_stream_id_same(fan_stream_id_of(p->accum), a->sync.slot.accum));
    }
    p->rules |= a->sync.rules;
    if (keep) {
        memmove(&p->items[at + 1], &p->items[at], (p->nitems - at) * sizeof *p->items);
        p->items[at] = it;
        p->nitems++;
        p->arriving++;
        it->value = c->value;
        it->key = c->key;
        if (c->value.form != FAN_FORM_UNDEFINED && c->value.form != FAN_FORM_OBJECT)
            it->own = s->spec->dtype != FAN_DT_NONE ? a->seen : fan_dtype_set_add(0, c->value.dtype, c->value.weak);
        it->donated = c->donate && !c->copy && c->value.form != FAN_FORM_UNDEFINED;
        it->producer = a->sync.how == '-' ? NULL : fan_stream_hold(a->producer);
        it->ours = it->lent = c->summed;
        it->parked = FAN_FAULT(PARKED_EARLY);
    }
    return FAN_OK;
}

/* Locked: takes a reserved item back, of a pass that was `before` without it. Returns the pass if nothing else was in
 * it, for fan_pass_free. */
static fan_pass *take_back(fan_buffer *b, size_t slot, fan_item *it, const fan_pass *before)
{
    fan_slot *s = &b->slots[slot];
    fan_pass *p = s->p;
    for (size_t i = p->nitems; i-- > 0;)
        if (p->items[i] == it) {
            memmove(&p->items[i], &p->items[i + 1], (p->nitems - i - 1) * sizeof *p->items);
            p->nitems--;
            if (p->unsorted)
                fan_keys_remove(p->unsorted, it->key);
            break;
        }
    p->count--;
    bool alone = p->count == before->count && !p->poison; /* nobody came meanwhile: it is as it was (forget_one) */
    p->seen = p->value_seen;
    for (size_t i = 0; !alone && i < p->nitems; i++)
        p->seen = seen_with(p->seen, s, p->items[i]);
    return p->count == 0 && !p->poison ? fan_pass_cut(s) : NULL;
}

static void trace_add(const fan_buffer *b, size_t slot, const fan_contribution *c, const fan_arrival *a, uint64_t bytes)
{
    const fan_slot *s = &b->slots[slot];
    const fan_device *d =
        a->producer ? a->producer->device : a->device; /* a stream's number means something on its own device only */
    fan_trace_line line = {.kind = FAN_TRACE_ADD,
                           .how = a->sync.how,
                           .device = d && d->id ? (int16_t)d->index : -1,
                           .slot = (int32_t)slot,
                           .count = 1,
                           .buffer = b->id,
                           .key = c->key,
                           .rules = a->sync.rules,
                           .stream = a->producer ? a->producer->handle : 0,
                           .bytes = bytes,
                           .start_us = -1,
                           .end_us = -1};
    snprintf(line.label, sizeof line.label, "%s", s->spec->name ? s->spec->name : b->name);
    fan_trace_put(&line);
}

fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c)
{
    fan_slot *s = &b->slots[slot];
    fan_device *d = s->spec->device ? s->spec->device : c->value.device;
    fan_stream *current;
    if (d == fan_cpu() && !s->spec->device && c->value.form == FAN_FORM_DENSE && c->value.array->ndim == 0) {
        fan_slot_lock(b, slot);
        d = s->p->device ? s->p->device : d;
        fan_device_hold(d);
        fan_slot_unlock(b, slot);
        current = d->backend->has_streams ? fan_stream_current(d) : NULL;
        fan_device_drop(d);
        return current;
    }
    return d && d->backend->has_streams ? fan_stream_current(d) : NULL;
}

/* S7, S11: a gradient that is made under capture, for a slot that is empty: who consumes in the buffer's place, and
 * what is current where the legacy stream would be. Unlocked: the driver is asked. */
static fan_status across_captures(fan_buffer *b, size_t slot, const fan_contribution *c, given *with, fan_error *err)
{
    fan_stream *current = with->current, *P = c->stream ? c->stream : current, *C = b->stream ? b->stream : current,
               *spare = NULL;
    uint64_t id;
    if (!current || P->device->backend != current->device->backend || C->device->backend != current->device->backend)
        return FAN_OK;
    fan_stream *asked = C;
    FAN_TRY(fan_plan_consumer(asked, P, NULL, &C, err));
    if (C != asked) {
        fan_stream_drop(with->consumer);
        with->consumer = fan_stream_hold(C);
    }
    if (current->handle != 1 || P->device == current->device || C->device == current->device ||
        !current->device->backend->spare)
        return FAN_OK;
    fan_slot_lock(b, slot);
    bool empty = !b->slots[slot].p->accum;
    fan_slot_unlock(b, slot);
    FAN_TRY(fan_stream_capture(P, &id, err));
    if (!empty || !id)
        return FAN_OK;
    FAN_TRY(current->device->backend->spare(current->device, id, &spare, err));
    fan_stream_drop(current);
    with->current = spare;
    with->pooled = true;
    return FAN_OK;
}

fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err)
{
    FAN_TRY(fan_buffer_here(b, err));
    if (slot >= b->nslots)
        return fan_fail(err, FAN_ERR_INDEX, "%s: no slot %zu; it has %zu (S1)", b->name, slot, b->nslots);
    return FAN_OK;
}

fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    while (s->taking && s->busy && !FAN_FAULT(ADD_IGNORES_TAKE)) {
        if (fan_slot_owned_by(s, fan_thread_id()) || holds_another(b, slot))
            return reentered(b, slot, what, err);
        FAN_TRY(wait_for_change(b, slot, err));
    }
    FAN_TRY(fan_slot_materialize(b, slot, err));
    return fan_slot_poisoned(b, slot, err);
}

/* One contribution on its way. */
typedef struct adding {
    size_t slot;
    fan_contribution *c;
    fan_arrival a;
    given with;
    fan_stream *accum, *consumer, *producer; /* held */
    fan_item *it;  /* ours until it is reserved; then the slot's, and known here until it is parked */
    fan_value old; /* what a conversion replaced */
    uint64_t bytes;
    bool reserved;   /* it counts in its slot */
    bool follows;    /* another of the same call is on its way into the slot: a take waits for that one, and so for this
                        one, and must not be waited for */
    bool parked;     /* a fold may sum it */
    fan_pass before; /* what the slot knew before it: its plain fields, nothing is held */
    bool mismatch;
} adding;

/* Checks it, and gives it a place in its slot. */
static fan_status adding_reserve(fan_buffer *b, adding *x, fan_error *err)
{
    fan_status status = FAN_OK;
    size_t slot = x->slot;
    fan_contribution *c = x->c;
    fan_slot *s = &b->slots[slot];
    FAN_TRY(fan_slot_still(b, slot, &c->value, c->key, err));
    if (c->value.form == FAN_FORM_SPARSE && c->value.device == fan_cpu()) {
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, b->frontend->poll, err);
        FAN_TRY(fan_interrupt_end(&interrupt, fan_sparse_check(c->value.sparse, err)));
    }
    x->with.current = fan_current_for(b, slot, c);
    x->with.consumer = fan_stream_hold(b->stream);
    FAN_TRY(across_captures(b, slot, c, &x->with, err));
    x->it = fan_calloc(sizeof *x->it);
    if (!x->it)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    fan_slot_lock(b, slot);
    FAN_GO(x->follows ? fan_slot_poisoned(b, slot, err) : fan_slot_enter(b, slot, "add", err));
    FAN_GO(fan_arrive_check(b, slot, c, x->with.current, x->with.consumer, &x->a, err));
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    x->before = *s->p;
    FAN_GO(reserve(b, slot, c, &x->a, &x->with, x->it, err));
    x->reserved = true;
    if (b->leaf && x->a.sync.how != '-' && x->a.producer != s->p->consumer) {
        x->mismatch = true;
        x->producer = fan_stream_hold(x->a.producer);
    }
    if (c->value.form == FAN_FORM_UNDEFINED && c->key < 0) {
        fan_free(x->it);
        x->it = NULL;
        changed(b, slot);
    } else if (c->value.form != FAN_FORM_UNDEFINED) {
        x->accum = fan_stream_hold(s->p->accum);
        x->consumer = fan_stream_hold(s->p->consumer);
    }
done:
    fan_slot_unlock(b, slot);
    return status;
}

/* Conversions, the event, the mark: nothing for an undefined one. */
static fan_status adding_carry_out(fan_buffer *b, adding *x, fan_error *err)
{
    fan_item *it = x->it;
    if (x->c->value.form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    FAN_TRY(fan_slot_still(b, x->slot, &x->c->value, x->c->key, err)); /* it may have waited for the slot */
    if (fan_trace_on())
        trace_add(b, x->slot, x->c, &x->a, fan_value_bytes(&x->c->value));
    FAN_TRY(fan_arrive_carry_out(b, x->slot, x->c, &x->a, it, x->accum, x->consumer, &x->old, err));
    x->bytes = fan_value_bytes(&it->value);
    x->bytes = x->bytes ? x->bytes : 1; /* so that what has no bytes of ours passes a budget of 0, too */
    if (fan_get_debug() && it->value.form == FAN_FORM_DENSE && it->value.device == fan_cpu() && !it->ours) {
        fan_interrupt interrupt;
        fan_interrupt_begin(&interrupt, b->frontend->poll, err);
        it->hash = fan_array_hash(it->value.array);
        FAN_TRY(fan_interrupt_end(&interrupt, FAN_OK));
        it->hashed = true;
    }
    return FAN_OK;
}

/* What a pass learnt from a contribution that is taken back, if nobody else came meanwhile. */
static void forget_one(fan_pass *p, const fan_pass *before)
{
    if (p->count != before->count || p->poison)
        return;
    if (!before->shaped) {
        fan_free(p->shape);
        p->shape = NULL;
        p->ndim = 0;
        p->shaped = false;
    }
    if (!before->device) {
        fan_device_drop(p->device);
        p->device = NULL;
    }
    if (!before->how) {
        fan_stream_drop(p->consumer);
        fan_stream_drop(p->accum);
        fan_stream_drop(p->joins);
        p->consumer = p->accum = p->joins = NULL;
        p->how = 0;
    }
    p->rules = before->rules;
    p->seen = before->seen;
    p->has_weak_int = before->has_weak_int;
    p->weak_lo = before->weak_lo;
    p->weak_hi = before->weak_hi;
    p->keyed = before->keyed;
}

/* Locked: the caller has its value again, and the slot is as it was; *gone is for fan_pass_free. */
static void adding_undo(fan_buffer *b, adding *x, fan_pass **gone)
{
    fan_item *it = x->it;
    *gone = take_back(b, x->slot, it, &x->before);
    if (!*gone)
        forget_one(b->slots[x->slot].p, &x->before);
    if (it && it->value.form != FAN_FORM_UNDEFINED) {
        if (x->old.form == FAN_FORM_UNDEFINED) {
            x->c->value = it->value;
            it->value = (fan_value){.dtype = FAN_DT_NONE};
        } else {
            x->c->value = x->old;
            x->old = (fan_value){.dtype = FAN_DT_NONE};
        }
    }
    x->reserved = false;
    changed(b, x->slot);
}

/* After a failure of its own, or of one beside it: unlocked. */
static void adding_fail(fan_buffer *b, adding *x, fan_status status, const fan_error *err)
{
    fan_pass *gone = NULL;
    if (!x->reserved)
        return;
    fan_slot_lock(b, x->slot);
    if (x->it && !x->it->parked)
        b->slots[x->slot].p->arriving--;
    if (status != FAN_OK)
        fan_slot_poison(&b->slots[x->slot], status, err);
    adding_undo(b, x, &gone);
    fan_slot_unlock(b, x->slot);
    fan_pass_free(b, gone);
}

/* Locked: a fold may sum it from now on. */
static void adding_park(fan_buffer *b, adding *x)
{
    fan_item *it = x->it;
    if (!it || x->parked)
        return;
    x->parked = true;
    b->slots[x->slot].p->arriving--;
    x->c->value = (fan_value){.dtype = FAN_DT_NONE};
    it->bytes = x->bytes;
    it->parked = true;
    if (fan_watched())
        fan_buffer_weigh(b, x->bytes);
    it->alone =
        b->budget == FAN_BUDGET_AUTO && it->value.form == FAN_FORM_DENSE && !x->accum && (it->ours || x->c->alone);
    if (it->alone)
        atomic_fetch_add_explicit(&b->alone, it->bytes, memory_order_relaxed);
    raise_to(&b->n.peak_parked_bytes, atomic_fetch_add_explicit(&b->parked, x->bytes, memory_order_relaxed) + x->bytes);
    raise_to(&total.peak_parked_bytes, atomic_load_explicit(&b->parked, memory_order_relaxed));
    changed(b, x->slot);
}

/* Locked: nobody has summed it, and nobody may any more. */
static void adding_unpark(fan_buffer *b, adding *x)
{
    if (!x->parked)
        return;
    unpark(b, x->it);
    x->parked = x->it->parked = false;
    b->slots[x->slot].p->arriving++;
}

/* Locked: folds if that is due. *gone is for fan_pass_free. */
static fan_status adding_fold(fan_buffer *b, adding *x, fan_pass **gone, fan_error *err)
{
    fan_slot *s = &b->slots[x->slot];
    fan_item *it = x->it;
    fan_event *late = FAN_FAULT(RECORD_AFTER_FOLD) && it->event ? fan_event_hold(it->event) : NULL;
    fan_status status = fold_while_due(b, x->slot, err);
    if (late)
        (void)fan_event_rerecord(late, x->a.producer, err);
    fan_event_drop(late);
    if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
        return FAN_OK; /* it is parked; the sum is tried again later */
    if (status == FAN_OK || is_poisonous(status))
        return status;
    /* A callback raised: this call did not happen, if its contribution is still there. */
    bool there = false;
    for (size_t i = 0; i < s->p->nitems; i++)
        there = there || s->p->items[i] == it;
    if (there && !s->busy) {
        unpark(b, it);
        adding_undo(b, x, gone);
    }
    return status;
}

static void adding_end(fan_buffer *b, adding *x)
{
    if (x->reserved)
        FAN_COUNT(b, adds, 1);
    if (x->reserved && b->known) {
        fan_slot_lock(b, x->slot);
        fan_sum_stats last = fan_sum_stats_forget(b, x->slot);
        fan_slot_unlock(b, x->slot);
        fan_sum_stats_drop(&last);
    }
    if (!x->reserved)
        item_free(b, x->it);
    fan_value_drop(b->frontend, &x->old);
    fan_stream_drop(x->accum);
    fan_stream_drop(x->consumer);
    fan_stream_drop(x->producer);
    fan_stream_drop(x->with.current);
    fan_stream_drop(x->with.consumer);
}

/* S6. */
static fan_status adding_warn(fan_buffer *b, const adding *x, size_t n, fan_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (!x[i].mismatch)
            continue;
        FAN_COUNT(b, mismatches, 1);
        if (atomic_load(&warn_on) && !atomic_exchange(&warned, true) && b->frontend->mismatch)
            FAN_TRY(b->frontend->mismatch(b->name, x[i].slot, x[i].producer, x[i].consumer, err));
    }
    return FAN_OK;
}

fan_status fan_buffer_add(fan_buffer *b, size_t slot, fan_contribution *c, fan_error *err)
{
    adding x = {.slot = slot, .c = c, .old = {.dtype = FAN_DT_NONE}};
    fan_pass *gone = NULL;
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_status status = adding_reserve(b, &x, err);
    if (status == FAN_OK) {
        status = adding_carry_out(b, &x, err);
        if (status != FAN_OK)
            adding_fail(b, &x, status, err);
    }
    if (status == FAN_OK && x.it) {
        bool defined = c->value.form != FAN_FORM_UNDEFINED;
        fan_slot_lock(b, slot);
        adding_park(b, &x);
        status = defined ? adding_fold(b, &x, &gone, err) : FAN_OK;
        fan_slot_unlock(b, slot);
        fan_pass_free(b, gone);
    }
    if (status == FAN_OK)
        status = adding_warn(b, &x, 1, err);
    adding_end(b, &x);
    return status;
}

/* ---- a batch: all or none ----
 *
 * A sum of objects calls others' code, which may raise. So those that the batch makes due are tried before anything of
 * it can be summed by others: each slot is made busy, its part of the batch parked in it, and its sum made beside its
 * value. If one raises, all sums are dropped, and each contribution is taken back. */

/* A slot whose sum is tried. */
typedef struct trial {
    size_t slot;
    fan_gathered g;
    bool made; /* false: there was no memory for it, and it stays parked */
} trial;

typedef struct trials {
    trial *all;
    size_t n;
    uint64_t coming; /* bytes that will not be parked once they are committed */
} trials;

/* Locked: whether a sum of this slot calls others' code. */
static bool calls_out(const fan_buffer *b, const fan_pass *p) { return b->create_graph || p->objects; }

/* Makes the slot of x[0 .. n) busy if its sum is to be tried; how many items that is of, 0: none. */
static size_t trial_claim(fan_buffer *b, adding *x, size_t n, trials *t)
{
    fan_slot *s = &b->slots[x->slot];
    size_t m = 0;
    fan_slot_lock(b, x->slot);
    if (!s->busy && calls_out(b, s->p)) {
        for (size_t i = 0; i < n; i++)
            adding_park(b, &x[i]);
        m = fan_slot_due(b, x->slot, t->coming);
        for (size_t i = 0; i < n && !m; i++)
            adding_unpark(b, &x[i]);
    }
    for (size_t i = 0; i < m; i++)
        t->coming += s->p->items[i]->bytes;
    if (m) {
        s->busy = true;
        fan_slot_set_owner(s, fan_thread_id());
    }
    fan_slot_unlock(b, x->slot);
    return m;
}

static fan_status trial_make(fan_buffer *b, trial *one, size_t m, fan_error *err)
{
    fan_status status = fan_gather(b, one->slot, m, &one->g, err);
    if (status == FAN_OK && one->g.fold.n > 1)
        status = fan_fold_begin(&one->g.fold, NULL, err);
    one->made = status == FAN_OK;
    if (is_poisonous(status)) {
        fan_slot_lock(b, one->slot);
        fan_slot_poison(&b->slots[one->slot], status, err);
        fan_slot_unlock(b, one->slot);
    }
    return status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM ? FAN_OK : status;
}

/* Tries the sums that x[0 .. n), which are in the order of their slots, make due. */
static fan_status trials_make(fan_buffer *b, adding *x, size_t n, trials *t, fan_error *err)
{
    fan_status status = FAN_OK;
    uint64_t rest = 0; /* what the others will have parked counts already */
    for (size_t i = 0; i < n; i++)
        rest += x[i].bytes;
    t->all = fan_calloc((n ? n : 1) * sizeof *t->all);
    if (!t->all)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    for (size_t i = 0, end; i < n && status == FAN_OK; i = end) {
        uint64_t own = 0;
        for (end = i; end < n && x[end].slot == x[i].slot; end++)
            own += x[end].bytes;
        atomic_fetch_add_explicit(&b->parked, rest - own, memory_order_relaxed);
        size_t m = trial_claim(b, &x[i], end - i, t);
        atomic_fetch_sub_explicit(&b->parked, rest - own, memory_order_relaxed);
        if (!m)
            continue;
        rest -= own;
        t->all[t->n].slot = x[i].slot;
        status = trial_make(b, &t->all[t->n++], m, err);
    }
    return status;
}

/* Commits them, or drops them where one has `failed`, and lets their slots go. */
static fan_status trials_end(fan_buffer *b, adding *x, size_t n, trials *t, bool failed, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    for (size_t k = 0; k < t->n; k++) {
        trial *one = &t->all[k];
        fan_status its =
            one->made && !failed ? fan_fold_commit_end(b, one->slot, &one->g, status == FAN_OK ? err : &other) : FAN_OK;
        status = status == FAN_OK ? its : status;
        if (one->made && failed)
            fan_fold_abandon(&one->g.fold);
        fan_gathered_fini(&one->g);
        fan_slot_lock(b, one->slot);
        for (size_t i = 0; i < n && failed; i++)
            if (x[i].slot == one->slot)
                adding_unpark(b, &x[i]);
        fan_slot_let_go(b, one->slot);
        fan_slot_unlock(b, one->slot);
    }
    fan_free(t->all);
    return status;
}

/* All are parked: folds what is due, but for what calls others' code. What is wrong with a sum, its take says; a failed
 * device call poisons its slot. */
static fan_status batch_fold(fan_buffer *b, const adding *x, size_t n, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = 0; i < n && !is_poisonous(status); i++) {
        fan_slot_lock(b, x[i].slot);
        status = calls_out(b, b->slots[x[i].slot].p) ? FAN_OK : fold_while_due(b, x[i].slot, err);
        fan_slot_unlock(b, x[i].slot);
    }
    return is_poisonous(status) ? status : FAN_OK;
}

/* Each step is taken for all before the next begins, slot by slot from the lowest up, as take claims them: so neither
 * waits for the other for ever. */
fan_status fan_buffer_add_many(fan_buffer *b, fan_contribution *c, const size_t *slots, const size_t *order, size_t n,
                               fan_error *err)
{
    fan_status status = FAN_OK, committed = FAN_OK;
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        FAN_TRY(fan_slot_check(b, slots[i], err));
    adding *x = fan_calloc((n ? n : 1) * sizeof *x);
    if (!x)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    for (size_t i = 0; i < n; i++)
        x[i] = (adding){.slot = slots[order[i]], .c = &c[order[i]], .old = {.dtype = FAN_DT_NONE}};
    for (; k < n && status == FAN_OK; k++) {
        const adding *last = k ? &x[k - 1] : NULL;
        x[k].follows = last && last->slot == x[k].slot && (last->follows || last->it);
        status = adding_reserve(b, &x[k], err);
    }
    for (k = 0; k < n && status == FAN_OK; k++)
        status = adding_carry_out(b, &x[k], err);
    if (status == FAN_OK) {
        trials t = {NULL, 0, 0};
        k = 0;
        status = trials_make(b, x, n, &t, err);
        committed = trials_end(b, x, n, &t, status != FAN_OK, status == FAN_OK ? err : NULL);
    }
    if (status != FAN_OK) {
        for (size_t i = n; i-- > 0;)
            adding_fail(b, &x[i], k && i == k - 1 ? status : FAN_OK, err);
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        fan_slot_lock(b, x[i].slot);
        adding_park(b, &x[i]);
        fan_slot_unlock(b, x[i].slot);
    }
    bool streams = false;
    for (size_t i = 0; i < n; i++)
        streams |= x[i].accum != NULL;
    FAN_GO(committed);
    if (streams && n > 1)
        status = fan_many_fold(b, slots, order, n, err);
    if (status == FAN_OK || status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
        status = batch_fold(b, x, n, err); /* one by one they need less memory */
    if (status == FAN_OK)
        status = adding_warn(b, x, n, err);
done:
    for (size_t i = 0; i < n; i++)
        adding_end(b, &x[i]);
    fan_free(x);
    return status;
}

/* --- asking --------------------------------------------------------------------------------------------------- */

static int64_t count_of(const fan_slot *s) { return s->p->count + fan_fast_count(s->plain); }

fan_status fan_buffer_expect(fan_buffer *b, size_t slot, int64_t n, fan_error *err)
{
    FAN_TRY(fan_slot_check(b, slot, err));
    if (n < 0)
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": expect takes a count >= 0, got %" PRId64,
                        FAN_SLOT_WHO(b, slot), n);
    fan_slot_lock(b, slot);
    fan_status status = FAN_OK;
    if (count_of(&b->slots[slot]) > n)
        status = fan_fail(err, FAN_ERR_VALUE,
                          FAN_SLOT_SAID ": expects %" PRId64 " contribution%s but has %" PRId64 " already (A16)",
                          FAN_SLOT_WHO(b, slot), n, FAN_PLURAL(n), count_of(&b->slots[slot]));
    else
        b->slots[slot].expected = n;
    fan_slot_unlock(b, slot);
    return status;
}

fan_status fan_buffer_ready(fan_buffer *b, size_t slot, bool *ready, fan_error *err)
{
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot_lock(b, slot);
    const fan_slot *s = &b->slots[slot];
    fan_status status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK && s->expected < 0)
        status = fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": ready() needs expect(%zu, n) first",
                          FAN_SLOT_WHO(b, slot), slot);
    *ready = status == FAN_OK && count_of(s) == s->expected && (s->p->arriving == 0 || FAN_FAULT(READY_TOO_SOON));
    fan_slot_unlock(b, slot);
    return status;
}

fan_status fan_buffer_clear(fan_buffer *b, fan_error *err)
{
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots && b->process == FAN_LEFT; i++)
        if (b->slots[i].p != &fan_pass_none)
            b->slots[i].p->arriving = 0; /* nobody brings it any more */
    b->process = b->adopted;
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot_lock(b, i);
        fan_status status = fan_slot_in_target(b, i, "clear", err);
        fan_slot_unlock(b, i);
        FAN_TRY(status);
    }
    for (size_t i = 0; i < b->nslots; i++) {
        fan_pass *gone = NULL;
        fan_slot_lock(b, i);
        fan_status status = fan_slot_claim(b, i, true, "clear", err);
        fan_slot_unlock(b, i);
        FAN_TRY(status);
        fan_fast_drop(b, i);
        fan_slot_lock(b, i);
        gone = fan_pass_cut(&b->slots[i]);
        fan_slot_let_go(b, i);
        fan_slot_unlock(b, i);
        fan_pass_free(b, gone);
    }
    return FAN_OK;
}

/* --- life ----------------------------------------------------------------------------------------------------- */

static char *copy_text(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = fan_alloc(n);
    if (copy)
        memcpy(copy, text, n);
    return copy;
}

static fan_status slot_declare(fan_buffer *b, size_t i, const fan_slot_spec *spec, fan_dtype accumulate, fan_error *err)
{
    fan_slot *s = &b->slots[i];
    fan_spec *own = fan_calloc(sizeof *own);
    if (!own)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    s->spec = own;
    own->accumulate = spec->accumulate != FAN_DT_NONE ? spec->accumulate : accumulate;
    own->exact = spec->exact || (spec->accumulate == FAN_DT_NONE && b->undeclared.exact);
    own->accumulate = own->exact ? FAN_DT_NONE : own->accumulate;
    own->dtype = spec->dtype;
    if (spec->dtype != FAN_DT_NONE && fan_accum_dtype(spec->dtype, own->accumulate) == FAN_DT_NONE)
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": accumulate=%s cannot hold a sum of dtype %s (A11)",
                        FAN_SLOT_WHO(b, i), fan_dtype_name(own->accumulate), fan_dtype_name(spec->dtype));
    if (spec->has_shape) {
        own->shape = fan_alloc((size_t)spec->ndim * sizeof *own->shape);
        if (!own->shape)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        if (spec->ndim)
            memcpy(own->shape, spec->shape, (size_t)spec->ndim * sizeof *own->shape);
        own->ndim = spec->ndim;
        own->has_shape = true;
    }
    if (spec->name && !(own->name = copy_text(spec->name)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    own->device = spec->device ? fan_device_hold(spec->device) : NULL;
    own->combine = spec->combine;
    if (own->combine)
        b->frontend->hold(own->combine);
    return FAN_OK;
}

/* A buffer of few slots is one block. */
typedef struct fan_small {
    fan_buffer b;
    fan_mutex locks[FAN_INLINE_SLOTS];
    fan_cond changed[FAN_INLINE_SLOTS];
    fan_slot slots[FAN_INLINE_SLOTS];
    fan_fast_list plains[FAN_INLINE_SLOTS];
} fan_small;

static fan_status locks_make(fan_mutex *locks, fan_cond *changed, size_t n, size_t *made, fan_error *err)
{
    for (*made = 0; *made < n; ++*made) {
        if (fan_mutex_init(&locks[*made]) != 0)
            return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
        if (fan_cond_init(&changed[*made]) != 0) {
            fan_mutex_fini(&locks[*made]);
            return fan_fail(err, FAN_ERR_STATE, "a condition could not be made");
        }
    }
    return FAN_OK;
}

static void locks_end(fan_mutex *locks, fan_cond *changed, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fan_mutex_fini(&locks[i]);
        fan_cond_fini(&changed[i]);
    }
}

static fan_status small_new(size_t nslots, fan_buffer **out, fan_error *err)
{
    size_t made;
    fan_small *s = fan_alloc(sizeof *s);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    fan_status status = locks_make(s->locks, s->changed, nslots ? nslots : 1, &made, err);
    if (status != FAN_OK) {
        locks_end(s->locks, s->changed, made);
        fan_free(s);
        return status;
    }
    memset(&s->b, 0, sizeof s->b);
    s->b.small = true;
    s->b.locks = s->locks;
    s->b.changed = s->changed;
    s->b.nlocks = made;
    s->b.slots = s->slots;
    for (size_t i = 0; i < nslots; i++) {
        s->slots[i].plain = &s->plains[i];
        fan_fast_list_init(&s->plains[i]);
    }
    *out = &s->b;
    return FAN_OK;
}

static fan_status large_new(size_t nslots, fan_buffer **out, fan_error *err)
{
    fan_status status;
    fan_buffer *b = fan_calloc(sizeof *b);
    if (!b)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    *out = b;
    b->slots = fan_calloc(nslots * sizeof *b->slots);
    b->locks = fan_calloc(FAN_LOCKS * sizeof *b->locks);
    b->changed = fan_calloc(FAN_LOCKS * sizeof *b->changed);
    if (!b->slots || !b->locks || !b->changed)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    status = locks_make(b->locks, b->changed, nslots < FAN_LOCKS ? nslots : FAN_LOCKS, &b->nlocks, err);
    return status;
}

static const char unnamed[] = "InputBuffer";

static bool told_limits;
static fan_auto_budget limits;

/* A quarter of the cache: the sum, what the maker works on and what it makes next want to be there, too. */
fan_auto_budget fan_budget_auto(void)
{
    return told_limits ? limits : (fan_auto_budget){fan_cache_bytes() / 4, UINT64_C(64) << 20};
}

void fan_budget_auto_set(const fan_auto_budget *to)
{
    told_limits = to != NULL;
    if (to)
        limits = *to;
}

uint64_t fan_buffer_budget(const fan_buffer *b) { return b->budget; }

static void set_budget(fan_buffer *b, uint64_t budget)
{
    b->budget = budget;
    b->limits = fan_budget_auto();
    b->least = budget != FAN_BUDGET_AUTO ? budget : b->limits.alone < b->limits.held ? b->limits.alone : b->limits.held;
}

fan_status fan_buffer_new(const fan_buffer_config *config, fan_buffer **out, fan_error *err)
{
    fan_buffer *b = NULL;
    fan_status status = (config->slots <= FAN_INLINE_SLOTS ? small_new : large_new)(config->slots, &b, err);
    *out = NULL;
    if (!b)
        return status;
    b->frontend = config->frontend;
    b->adopted = b->process = fan_process();
    b->name = (char *)unnamed;
    set_budget(b, config->budget);
    b->undeclared.dtype = FAN_DT_NONE;
    b->undeclared.accumulate = config->accumulate;
    b->undeclared.exact = config->exact;
    if (status != FAN_OK)
        goto done;
    b->id = atomic_fetch_add(&next_buffer, 1);
    b->stream = config->stream ? fan_stream_hold(config->stream) : NULL;
    b->leaf = config->leaf;
    b->create_graph = config->create_graph;
    if (config->stats && !(b->known = fan_calloc((config->slots ? config->slots : 1) * sizeof *b->known))) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        goto done;
    }
    b->nslots = config->slots;
    for (size_t i = 0; i < config->slots; i++) {
        fan_slot *s = &b->slots[i];
        s->spec = &b->undeclared;
        s->p = &fan_pass_none;
        s->expected = -1;
        s->targets = NULL;
        fan_slot_set_owner(s, 0);
        s->busy = s->taking = false;
    }
    if (config->name) {
        char *name = copy_text(config->name);
        if (!name) {
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory");
            goto done;
        }
        b->name = name;
    }
    for (size_t i = 0; config->specs && i < config->slots && status == FAN_OK; i++)
        status = slot_declare(b, i, &config->specs[i], config->accumulate, err);
done:
    if (status == FAN_OK)
        *out = b;
    else
        fan_buffer_free(b);
    return status;
}

/* The books of an empty buffer, but where a planted fault makes them wrong. */
static void assert_nothing_parked(const fan_buffer *b)
{
#ifdef FAN_TEST
    assert(!FAN_FAULT_IS(FAN_FAULT_NONE) || (atomic_load(&b->parked) == 0 && atomic_load(&b->alone) == 0));
#else
    (void)b;
#endif
}

void fan_buffer_free(fan_buffer *b)
{
    if (!b)
        return;
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        fan_pass_free(b, s->p);
        fan_fast_drop(b, i);
        fan_fast_list_fini(s, b->small);
        if (s->spec == &b->undeclared)
            continue;
        fan_free(s->spec->shape);
        fan_free(s->spec->name);
        fan_device_drop(s->spec->device);
        if (s->spec->combine)
            b->frontend->drop(s->spec->combine);
        fan_free(s->spec);
    }
    assert_nothing_parked(b);
    for (size_t i = 0; b->known && i < b->nslots; i++)
        fan_sum_stats_drop(&b->known[i]);
    fan_free(b->known);
    fan_stream_drop(b->stream);
    if (b->name != unnamed)
        fan_free(b->name);
    locks_end(b->locks, b->changed, b->nlocks);
    if (!b->small) {
        fan_free(b->locks);
        fan_free(b->changed);
        fan_free(b->slots);
    }
    fan_free(b); /* a small one begins its block */
}

bool fan_buffer_empty_for_reuse(fan_buffer *b)
{
    if (!b->small || b->known || b->stream || b->leaf || b->create_graph || b->name != unnamed ||
        b->undeclared.accumulate != FAN_DT_NONE || b->undeclared.exact)
        return false;
    fan_buffer_adopt(b);
    if (b->process == FAN_LEFT)
        return false;
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        if (s->spec != &b->undeclared)
            return false;
        fan_pass *gone = fan_pass_cut(s);
        fan_pass_free(b, gone);
        fan_fast_drop(b, i);
        s->expected = -1;
    }
    return true;
}

void fan_buffer_reuse(fan_buffer *b, uint64_t budget)
{
    assert_nothing_parked(b);
    set_budget(b, budget);
    b->id = atomic_fetch_add(&next_buffer, 1);
    b->weighed = 0;
    b->newest.object = NULL;
    memset(&b->n, 0, sizeof b->n);
    memset(&b->quick, 0, sizeof b->quick);
    for (size_t i = 0; i < b->nlocks; i++)
        fan_mutex_renew(&b->locks[i]);
}

size_t fan_buffer_slots(const fan_buffer *b) { return b->nslots; }
const char *fan_buffer_name(const fan_buffer *b) { return b->name; }

/* The collector may run anywhere, so a scheduler's hooks must not see its locks: the mutex is taken bare. No holder of
 * it waits for the collector. */
int fan_buffer_visit(fan_buffer *b, int (*visit)(void *object, void *arg), void *arg)
{
    int answer = 0;
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots && !answer; i++) {
        fan_slot *s = &b->slots[i];
        pthread_mutex_t *bare = &b->locks[i % b->nlocks].m;
        pthread_mutex_lock(bare);
        if (s->spec->combine)
            answer = visit(s->spec->combine, arg);
        if (!answer && s->p->value.object)
            answer = visit(s->p->value.object, arg);
        for (size_t k = 0; s->plain && k < s->plain->n && !answer; k++)
            if (s->plain->list[k].object)
                answer = visit(s->plain->list[k].object, arg);
        for (size_t k = 0; k < s->p->nitems && !answer; k++)
            if (s->p->items[k]->parked && s->p->items[k]->value.object)
                answer = visit(s->p->items[k]->value.object, arg);
        pthread_mutex_unlock(bare);
    }
    return answer;
}

void fan_buffer_abandon(fan_buffer *b)
{
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_pass *gone = NULL;
        void *combine;
        fan_slot_lock(b, i);
        combine = b->slots[i].spec->combine;
        b->slots[i].spec->combine = NULL;
        bool idle = !b->slots[i].busy && !b->slots[i].p->arriving;
        if (idle)
            gone = fan_pass_cut(&b->slots[i]);
        fan_slot_unlock(b, i);
        if (idle)
            fan_fast_drop(b, i);
        fan_pass_free(b, gone);
        if (combine)
            b->frontend->drop(combine);
    }
}

/* --- explain, the end of a pass ------------------------------------------------------------------------------- */

fan_status fan_buffer_look(fan_buffer *b, size_t slot, fan_slot_view *out, fan_item_view *items, size_t cap,
                           fan_error *err)
{
    fan_gathered g;
    fan_slot *s;
    fan_status status;
    memset(out, 0, sizeof *out);
    FAN_TRY(fan_slot_check(b, slot, err));
    s = &b->slots[slot];
    fan_slot_lock(b, slot);
    status = fan_slot_claim_all(b, slot, false, "explain", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    status = fan_gather(b, slot, SIZE_MAX, &g, err);
    if (status == FAN_OK) {
        fan_dtype d = fan_fold_dtype(&g.fold);
        out->dtype = d;
        out->accumulate = d == FAN_DT_NONE ? d : fan_accum_dtype(d, s->spec->accumulate);
        out->next = fan_fold_plan(&g.fold);
        out->reuse = fan_fold_reuse(&g.fold);
        fan_gathered_fini(&g);
    }
    fan_slot_lock(b, slot);
    out->how = s->p->how;
    out->rules = s->p->rules;
    out->consumer = s->p->consumer ? s->p->consumer->handle : 0;
    out->accum = s->p->accum ? s->p->accum->handle : 0;
    out->ready = s->p->ready ? s->p->ready->handle : 0;
    out->event = s->p->ready_event != NULL;
    out->has_value = s->p->value.form != FAN_FORM_UNDEFINED;
    out->value_ours = s->p->value_ours;
    out->value_form = s->p->value.form;
    out->poisoned = s->p->poison ? s->p->poison->text : NULL;
    out->count = s->p->count;
    out->expected = s->expected;
    out->next_key = s->p->keyed > 0 ? s->p->next_key : -1;
    out->items = s->p->nitems;
    fan_pass_in_order(s->p);
    out->budget = b->budget;
    out->limits = b->limits;
    out->parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    out->alone = atomic_load_explicit(&b->alone, memory_order_relaxed);
    for (size_t i = 0; i < s->p->nitems && i < cap; i++) {
        const fan_item *it = s->p->items[i];
        items[i] = (fan_item_view){.key = it->key,
                                   .form = it->value.form,
                                   .dtype = it->value.dtype,
                                   .producer = it->producer ? it->producer->handle : 0,
                                   .event = it->event != NULL,
                                   .donated = it->donated,
                                   .ready = it->parked};
    }
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    return status;
}

void fan_buffer_sketch(fan_buffer *b, fan_sketch *out)
{
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot_lock(b, i);
        const fan_slot *s = &b->slots[i];
        const fan_fast_list *plain = s->plain;
        bool begun = plain && plain->n && plain->summed; /* the first of the list is the sum then */
        out->parked += s->p->nitems + (plain ? plain->n - begun : 0);
        out->sums += s->p->value.form != FAN_FORM_UNDEFINED || s->p->exact || begun;
        out->poisoned += s->p->poison != NULL;
        fan_slot_unlock(b, i);
    }
    out->bytes = atomic_load_explicit(&b->parked, memory_order_relaxed);
}

fan_status fan_pass_end(fan_stream *caller, fan_stream *const *streams, size_t n, const fan_value *values,
                        size_t nvalues, fan_error *err)
{
    uint64_t out = caller->device->backend->left_out ? caller->device->backend->left_out(caller->device) : 0;
    fan_stream *instead = caller; /* S7: the first captured one, for those of its capture */
    for (size_t i = 0; i < n; i++) {
        fan_event *e = NULL;
        fan_stream *on;
        if (streams[i] == caller || (out & FAN_PLAN_S20_WAIT))
            continue;
        FAN_TRY(fan_plan_consumer(caller, streams[i], NULL, &on, err));
        instead = on != caller && instead == caller ? on : instead;
        on = on != caller ? instead : caller;
        if (on == streams[i])
            continue;
        FAN_TRY(fan_event_record(streams[i], &e, err));
        fan_status status = fan_stream_wait(on, e, NULL, err);
        fan_event_drop(e);
        if (status == FAN_ERR_CAPTURE)
            status = fan_plan_refused("the end of the pass", err);
        FAN_TRY(status);
    }
    for (size_t i = 0; i < nvalues; i++) {
        FAN_TRY(fan_plan_mark(&values[i], caller, FAN_PLAN_S20_MARK, err));
        FAN_TRY(fan_plan_mark(&values[i], instead, FAN_PLAN_S20_MARK, err));
    }
    return FAN_OK;
}
