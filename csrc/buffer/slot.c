/* slot: a slot is locked, claimed and released; its contributions are what they were; the state of
 * a pass is begun, freed, poisoned; a call enters a slot. */
#include "array/convert.h"
#include "array/digest.h"
#include "array/nditer.h"
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "buffer/digest.h"
#include "buffer/slot.h"
#include "buffer/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the lock ---- */

/* In a forked child: lets a slot go that a thread of the parent had. Whether there was one. */
static bool slot_adopt(fan_slot *s)
{
    bool arriving = s->state->arriving > 0;
    if (!s->busy || fan_thread_survived(atomic_load(&s->owner)))
        return arriving;
    fan_slot_set_free(s);
    return true;
}

void fan_buffer_adopt(fan_buffer *b)
{
    bool left = b->fork_generation == FAN_FORK_INVALID;
    if (b->owner_generation == fan_fork_generation())
        return;
    b->owner_generation = fan_fork_generation();
    for (size_t i = 0; i < b->nlocks; i++) {
        left |= !fan_mutex_adopt(&b->locks[i]);
        fan_cond_adopt(&b->changed[i]);
    }
    atomic_store(&b->waiting, 0);
    for (size_t i = 0; i < b->nslots; i++)
        left |= slot_adopt(&b->slots[i]);
    b->fork_generation = left ? FAN_FORK_INVALID : b->owner_generation;
}

fan_status fan_buffer_check_fork(fan_buffer *b, fan_error *err)
{
    fan_buffer_adopt(b);
    if (b->fork_generation != FAN_FORK_INVALID)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_STATE, 0, fan_buffer_place(b),
                       "another thread was in this buffer when the process was forked, and what it "
                       "holds is not whole "
                       "in the child: clear() it, or make one here");
}

void fan_slot_lock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_lock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
    fan_touch_budget(b, FAN_SCHED_COUNT); /* a sum may be due, or what waits may become less */
}

void fan_slot_unlock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_unlock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
}

void fan_slot_notify(fan_buffer *b, size_t slot)
{
    fan_cond_broadcast(&b->changed[slot % b->nlocks]);
}

void fan_slot_wake_all(fan_buffer *b)
{
    for (size_t i = 0; i < b->nlocks && atomic_load(&b->waiting); i++) {
        fan_slot_lock(b, i);
        fan_cond_broadcast(&b->changed[i]);
        fan_slot_unlock(b, i);
    }
}

/* The slot is locked. Waits until something changed, without the lock of the frontend, so that the
 * thread that will change it can run. */
static fan_status slot_wait_for_change(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_frontend *frontend = b->frontend;
    fan_status status = FAN_OK;
    size_t lock = slot % b->nlocks;
    atomic_fetch_add(&b->waiting, 1);
    void *left = fan_frontend_leave(frontend, true);
    fan_cond_wait(&b->changed[lock], &b->locks[lock]);
    atomic_fetch_sub(&b->waiting, 1);
    fan_slot_unlock(b, slot);
    fan_frontend_return(frontend, left);
    if (frontend->check_signals)
        status = frontend->check_signals(err);
    fan_slot_lock(b, slot);
    return status;
}

/* Deadlock guard: true if this thread is folding or lending some slot of b, or is taking one above
 * `slot`. It must not wait for `slot` then: a take of `slot` could be waiting for one of this
 * thread's. (A take claims slots from the lowest up, and so waits only for higher ones.) */
static bool slot_held_by_this_thread(const fan_buffer *b, size_t slot)
{
    uint64_t me = fan_thread_id();
    for (size_t i = 0; i < b->nslots; i++) {
        /* no other thread changes a slot that this thread owns */
        if (!fan_slot_owned_by(&b->slots[i], me) || !b->slots[i].busy)
            continue;
        if (!b->slots[i].taking || i > slot)
            return true;
    }
    return false;
}

static fan_status slot_wait_free(fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    bool own = fan_slot_owned_by(&b->slots[slot], fan_thread_id());
    if (own || slot_held_by_this_thread(b, slot)) {
        return fan_fail_at(err, FAN_ERR_STATE, 0, fan_slot_place(b, slot, -1),
                           "%s from within a sum, or a target, that holds this slot or one that "
                           "its take waits for",
                           what);
    }
    return slot_wait_for_change(b, slot, err);
}

fan_status fan_slot_claim(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    while (s->busy && !FAN_FAULT(SLOT_CLAIMED_TWICE))
        FAN_TRY(slot_wait_free(b, slot, what, err));
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    fan_slot_make_busy(s);
    s->taking = taking;
    if (!taking || FAN_FAULT(TAKE_IGNORES_ADDS))
        return FAN_OK;
    while (s->state->arriving) {
        fan_status status = slot_wait_for_change(b, slot, err);
        if (status == FAN_OK)
            continue;
        fan_slot_set_free(s);
        fan_slot_notify(b, slot);
        return status;
    }
    return FAN_OK;
}

void fan_slot_let_go(fan_buffer *b, size_t slot)
{
    fan_slot *s = &b->slots[slot];
    fan_slot_set_free(s);
    if (FAN_FAULT(SLOT_KEPT)) {
        s->busy = true;
        s->taking = true;
    }
    fan_slot_notify(b, slot);
}

/* ---- is a contribution still what it was? ---- */

fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err)
{
    char which[64] = "a gradient added without a key";
    if (key >= 0)
        snprintf(which, sizeof which, "the gradient added with key %" PRId64, key);
    return fan_fail_at(
        err, FAN_ERR_STATE, 0, fan_slot_place(b, slot, -1),
        "%s was changed after it was added (its elements, memory, dtype or shape); leave "
        "it as it is until take(), or add it with copy=True",
        which);
}

bool fan_value_unmoved(const fan_buffer *b, const fan_value *value)
{
    const fan_frontend *frontend = b->frontend;
    if (!frontend->is_unchanged || value->device != fan_cpu())
        return true;
    bool arrays = value->form == FAN_FORM_DENSE || value->form == FAN_FORM_PARTIAL;
    if (!arrays && value->form != FAN_FORM_SPARSE)
        return true;
    return frontend->is_unchanged(value);
}

fan_status fan_slot_check_unmoved(const fan_buffer *b, size_t slot, const fan_value *value,
                                  int64_t key, fan_error *err)
{
    if (fan_value_unmoved(b, value))
        return FAN_OK;
    return fan_slot_changed(b, slot, key, err);
}

fan_status fan_slot_hash(const fan_buffer *b, const fan_array *a, bool may_end, uint64_t *out,
                         fan_error *err)
{
    const fan_frontend *frontend = b->frontend;
    uint64_t bytes = (uint64_t)a->size * fan_dtype_size(a->dtype);
    fan_interrupt interrupt;
    fan_buffer_interrupt_begin(b, &interrupt, may_end, err);
    void *left = fan_frontend_leave(frontend, bytes >= FAN_BUSY_BYTES);
    *out = fan_array_hash(a);
    fan_frontend_return(frontend, left);
    return fan_interrupt_end(&interrupt, FAN_OK);
}

fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *value, int64_t key,
                              const uint64_t *hash, bool may_end, fan_error *err)
{
    uint64_t now;
    FAN_TRY(fan_slot_check_unmoved(b, slot, value, key, err));
    if (!hash)
        return FAN_OK;
    FAN_TRY(fan_slot_hash(b, value->array, may_end, &now, err));
    if (now == *hash)
        return FAN_OK;
    return fan_slot_changed(b, slot, key, err);
}

/* ---- what it holds ---- */

fan_sum_stats fan_sum_stats_hold(const fan_sum_stats *figures)
{
    fan_sum_stats copy = *figures;
    if (figures->device_words)
        copy.device_words = fan_array_hold(figures->device_words);
    copy.stream = fan_stream_hold(figures->stream);
    return copy;
}

fan_sum_stats fan_sum_stats_move(fan_sum_stats *figures)
{
    fan_sum_stats moved = *figures;
    *figures = (fan_sum_stats){.valid = false};
    return moved;
}

void fan_sum_stats_drop(fan_sum_stats *figures)
{
    fan_array_drop(figures->device_words);
    fan_stream_drop(figures->stream);
    *figures = (fan_sum_stats){.valid = false};
}

fan_sum_stats fan_sum_stats_forget(fan_buffer *b, size_t slot)
{
    return fan_sum_stats_move(&b->sum_stats[slot]);
}

fan_slot_state fan_slot_state_none;

void fan_item_free(fan_buffer *b, fan_item *item)
{
    if (!item)
        return;
    fan_value_drop(b->frontend, &item->value);
    fan_event_drop(item->event);
    fan_stream_drop(item->producer);
    fan_free(item);
}

void fan_entry_drop(fan_buffer *b, const fan_entry *one)
{
    if (one->general)
        fan_item_free(b, one->item);
    else if (one->object)
        b->frontend->drop(one->object);
}

void fan_item_unpark(fan_buffer *b, fan_item *item)
{
    if (!item->parked)
        return;
    atomic_fetch_sub_explicit(&b->parked, item->bytes, memory_order_relaxed);
    if (item->alone)
        atomic_fetch_sub_explicit(&b->alone, item->bytes, memory_order_relaxed);
    item->alone = false;
}

/* S11: joins a pooled stream back to the capture that it came into: no other code can, and the
 * capture could not end. The end of the capture reports what fails here. */
static void slot_join_capture(const fan_slot_state *state)
{
    fan_stream *A = state->accum;
    uint64_t id = 0;
    fan_event *event = NULL;
    if (!state->capture_origin || !A)
        return;
    if (fan_stream_capture(A, &id, NULL) != FAN_OK || !id)
        return;
    if (fan_event_record(A, &event, NULL) == FAN_OK)
        (void)fan_stream_wait(state->capture_origin, event, NULL, NULL);
    fan_event_drop(event);
}

void fan_slot_state_free(fan_buffer *b, fan_slot_state *state)
{
    if (!state || state == &fan_slot_state_none)
        return;
    fan_touch_budget(b, FAN_SCHED_COUNT);
    const fan_detached *left = &state->left;
    const fan_entry *entries = left->inline_entries;
    if (left->heap)
        entries = left->heap;
    for (size_t i = 0; i < left->n; i++) {
        const fan_entry *one = &entries[i];
        if (one->general) {
            fan_item_unpark(b, one->item);
            if (one->item->donated)
                fan_value_returned(&one->item->value);
        }
        fan_entry_drop(b, one);
    }
    fan_free(left->heap);
    fan_sum_stats_drop(&state->sum_stats);
    fan_free(state->shape);
    slot_join_capture(state);
    fan_stream_drop(state->capture_origin);
    fan_stream_drop(state->consumer);
    fan_stream_drop(state->accum);
    fan_device_drop(state->device);
    fan_free(state->poison);
    if (state->exact)
        fan_window_free(state->exact->sum);
    fan_free(state->exact);
    fan_free(state);
}

fan_slot_state *fan_slot_cut(fan_buffer *b, fan_slot *s)
{
    fan_slot_state *gone = s->state;
    fan_list *list = s->list;
    size_t plain = 0;
    s->state = &fan_slot_state_none;
    fan_slot_weights_clear(s);
    if (gone == &fan_slot_state_none || !fan_slot_entries(s))
        return gone;
    for (size_t i = list->summed > 0; i < list->n; i++) {
        const fan_entry *one = &list->entries[i];
        plain += !one->general && one->object;
    }
    fan_list_unpark(b, list, plain);
    fan_list_detach(list, &gone->left);
    return gone;
}

bool fan_status_poisons(fan_status status)
{
    switch (status) {
    case FAN_ERR_DEVICE:
    case FAN_ERR_RACE:
    case FAN_ERR_DEADLOCK:
    case FAN_ERR_CAPTURE:
        return true;
    default:
        return false;
    }
}

void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err)
{
    fan_slot_state *state = s->state;
    if (!fan_slot_has_state(s) || state->poison || !fan_status_poisons(status))
        return;
    state->poison = fan_calloc(sizeof *state->poison);
    if (state->poison && err)
        *state->poison = *err;
}

void fan_slot_fail(fan_buffer *b, size_t slot, fan_status status, const fan_error *err)
{
    if (!fan_status_poisons(status))
        return;
    fan_slot_lock(b, slot);
    fan_slot_poison(&b->slots[slot], status, err);
    fan_slot_unlock(b, slot);
}

fan_status fan_slot_fail_memory(const fan_buffer *b, size_t slot, fan_error *err)
{
    return fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(b, slot, -1), "out of memory");
}

fan_status fan_buffer_fail_memory(const fan_buffer *b, fan_error *err)
{
    return fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_buffer_place(b), "out of memory");
}

void fan_slot_trace(const fan_buffer *b, size_t slot, fan_trace_line line)
{
    const char *name = b->slots[slot].spec->name;
    line.slot = (int32_t)slot;
    line.buffer = b->id;
    line.start_us = -1;
    line.end_us = -1;
    snprintf(line.label, sizeof line.label, "%s", name ? name : b->name);
    fan_trace_put(&line);
}

fan_status fan_slot_divisor(const fan_buffer *b, size_t slot, fan_divisor *out, fan_error *err)
{
    static const fan_weight_sum nothing;
    const fan_slot *s = &b->slots[slot];
    const fan_weight_sum *sum = &nothing;
    int64_t ones = fan_slot_count(s);
    if (fan_slot_weighted(s)) {
        sum = &s->weights->sum;
        ones -= s->weights->given;
    }
    return fan_divisor_of(b, slot, sum, ones, out, err);
}

/* digest_weigh: makes the weight of a contribution a part of its digest. */
static void digest_weigh(const fan_weight *weight, fan_trace_line *line)
{
    size_t used = strlen(line->label);
    const char *reason = "";
    if (line->digest) {
        line->digest = fan_digest_number(line->digest, weight->re);
        line->digest = fan_digest_number(line->digest, weight->im);
    } else if (line->event) {
        line->event = 0; /* the copy is read, and not used */
        reason = ": no digest: weighted on a device";
    }
    snprintf(line->label + used, sizeof line->label - used, " weighted%s", reason);
}

void fan_slot_digest(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key,
                     const fan_weight *weight, fan_stream *on)
{
    if (b->of_node || !fan_trace_digests() || fan_trace_work_now().pass)
        return;
    fan_trace_line line = {.kind = FAN_TRACE_DIGEST,
                           .how = FAN_DIGEST_CONTRIBUTION,
                           .device = fan_device_number(v->device),
                           .slot = (int32_t)slot,
                           .key = key,
                           .buffer = b->id,
                           .start_us = -1,
                           .end_us = -1};
    if (key == FAN_DIGEST_OF_SUM) {
        line.how = FAN_DIGEST_SUM;
        line.key = -1;
    }
    void *left = fan_frontend_leave(b->frontend, fan_value_bytes(v) >= FAN_BUSY_BYTES);
    fan_digest_fill(v, on, 0, &line);
    fan_frontend_return(b->frontend, left);
    if (weight && weight->on)
        digest_weigh(weight, &line);
    fan_trace_put(&line);
}

fan_status fan_slot_fail_int(const fan_buffer *b, size_t slot, int64_t key, int64_t i,
                             fan_dtype sum, fan_error *err)
{
    return fan_fail_value(err, fan_slot_place(b, slot, key),
                          "a Python int among its contributions, %" PRId64
                          ", does not fit dtype %s",
                          i, fan_dtype_name(sum));
}

fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_error *first = b->slots[slot].state->poison;
    if (!first)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_STATE, 0, fan_slot_place(b, slot, -1),
                       "poisoned until clear(): %s", first->text);
}

fan_status fan_slot_fail_count(const fan_buffer *b, size_t slot, int64_t key, const char *got,
                               fan_error *err)
{
    char wants[48];
    int64_t n = b->slots[slot].expected;
    snprintf(wants, sizeof wants, "%" PRId64 " contribution%s", n, FAN_PLURAL(n));
    return fan_fail_expected(err, FAN_ERR_VALUE, fan_slot_place(b, slot, key), wants, got,
                             " (A16)");
}

/* A10: the dtypes that a plain entry of this kind brings. */
static fan_dtype_set slot_entry_dtypes(const fan_slot_spec *spec, const fan_plain_kind *kind)
{
    return fan_dtype_set_add(0, kind->dtype, kind->weak && spec->dtype == FAN_DT_NONE);
}

fan_dtype_set fan_entry_seen(fan_dtype_set seen, const fan_slot *s, const fan_entry *one)
{
    fan_dtype_set own = 0;
    if (one->general)
        own = one->item->own;
    else if (one->object)
        own = slot_entry_dtypes(s->spec, &s->list->kind);
    if (!own)
        return seen;
    if (s->spec->dtype != FAN_DT_NONE)
        return own;
    return seen | own;
}

/* ---- plain entries, and the state beside them ---- */

void fan_slot_drop_plain(fan_buffer *b, size_t slot)
{
    fan_list *list = b->slots[slot].list;
    FAN_UNINITIALIZED fan_detached gone;
    if (!list || !list->n)
        return;
    fan_list_unpark(b, list, fan_list_parked(list) - list->undefined);
    fan_list_detach(list, &gone);
    const fan_entry *entries = gone.inline_entries;
    if (gone.heap)
        entries = gone.heap;
    for (size_t i = 0; i < gone.n; i++)
        fan_entry_drop(b, &entries[i]);
    /* A list that stayed empty gets its memory back, for the next pass. */
    bool small = list->entries == list->inline_entries;
    bool kept = gone.heap && gone.cap <= FAN_LIST_KEPT;
    if (small && kept && list->n == 0) {
        list->entries = gone.heap;
        list->cap = gone.cap;
        gone.heap = NULL;
    }
    fan_free(gone.heap);
}

/* Takes out the entries that are undefined and have no key: such a one only counts (S2). */
static void slot_forget_undefined(fan_list *list)
{
    size_t kept = 0;
    for (size_t i = 0; i < list->n; i++) {
        const fan_entry one = list->entries[i];
        if (one.object || one.key >= 0)
            list->entries[kept++] = one;
        else
            list->undefined--;
    }
    list->n = kept;
    list->recheck_at = 0;
}

fan_status fan__slot_begin_state(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_list *list = s->list;
    const fan_plain_kind *kind = &list->kind;
    bool some = fan_list_defined(list);
    bool shaped = some && !s->spec->has_shape;
    fan_slot_state *state = fan_calloc(sizeof *state);
    int64_t *shape = NULL;
    if (shaped)
        shape = fan_alloc((size_t)kind->ndim * sizeof *shape);
    if (!state || (shaped && !shape)) {
        fan_free(state);
        fan_free(shape);
        return fan_slot_fail_memory(b, slot, err);
    }
    fan_list_sort(list);
    /* The state of a slot to which plain entries alone have come so far. */
    int64_t first_key = list->entries[0].key;
    state->keyed = 1;
    if (first_key < 0)
        state->keyed = -1;
    state->count = fan_list_count(list);
    state->rules = fan_plan_plain_slot(some, list->undefined > 0);
    if (some) {
        state->seen = slot_entry_dtypes(s->spec, kind);
        state->has_weak_int = kind->weak;
        state->device = fan_device_hold(fan_cpu());
    }
    if (list->summed) {
        state->rules |= list->rules;
        state->summed_seen = state->seen;
        state->value_seen = state->seen;
        state->like_key = first_key < 0 ? -1 : 0; /* all are of one kind */
        state->next_key = (uint64_t)first_key + 1;
    }
    if (shaped) {
        if (kind->ndim)
            memcpy(shape, kind->shape, (size_t)kind->ndim * sizeof *shape);
        state->shape = shape;
        state->ndim = kind->ndim;
        state->shaped = true;
    }
    s->state = state;
    slot_forget_undefined(list);
    return FAN_OK;
}

/* ---- entering ---- */

fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err)
{
    FAN_TRY(fan_buffer_check_fork(b, err));
    if (slot >= b->nslots) {
        return fan_fail_at(err, FAN_ERR_INDEX, 0, fan_buffer_place(b),
                           "no slot %zu; it has %zu (S1)", slot, b->nslots);
    }
    return FAN_OK;
}

fan_status fan_slot_in_target(const fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    const fan_target *target = b->slots[slot].targets;
    while (target && target->thread != fan_thread_id())
        target = target->next;
    if (!target)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_STATE, 0, fan_slot_place(b, slot, -1),
                       "%s() from within a target of that slot: what is added into it would miss "
                       "this pass; leave the block first",
                       what);
}

fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what,
                              fan_error *err)
{
    FAN_TRY(fan_slot_claim(b, slot, taking, what, err));
    fan_status status = fan_slot_begin_state(b, slot, err);
    if (status != FAN_OK)
        fan_slot_let_go(b, slot);
    return status;
}

fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    while (s->taking && s->busy && !FAN_FAULT(ADD_IGNORES_TAKE))
        FAN_TRY(slot_wait_free(b, slot, what, err));
    FAN_TRY(fan_slot_begin_state(b, slot, err));
    return fan_slot_poisoned(b, slot, err);
}
