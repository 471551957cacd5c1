/* slot: a slot's lock and its owner, what it holds during one pass, and how that ends.
 *
 * "Locked": the caller holds the slot's lock. */
#ifndef FAN_BUFFER_SLOT_H
#define FAN_BUFFER_SLOT_H

#include "base/interrupt.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/internal.h"

/* ---- locks, and the thread that has a slot ---- */

void fan_slot_lock(fan_buffer *b, size_t slot);
void fan_slot_unlock(fan_buffer *b, size_t slot);
/* fan_buffer_check_fork: FAN_ERR_STATE in a forked child, where another thread was in the buffer at
 * the fork. Call it before any lock of the buffer is taken. */
fan_status fan_buffer_check_fork(fan_buffer *b, fan_error *err);
/* fan_buffer_adopt: the same without an error: from then on no lock or slot is held by a thread
 * that the child does not have. */
void fan_buffer_adopt(fan_buffer *b);

/* fan_slot_notify: locked: wakes the threads that wait for a change of the slot. */
void fan_slot_notify(fan_buffer *b, size_t slot);
/* fan_slot_wake_all: the same of all slots, while some thread waits; takes each lock. */
void fan_slot_wake_all(fan_buffer *b);
/* fan_slot_claim: locked: makes the slot busy. Waits for the thread that has it, and, for a take,
 * until every add has parked. `what`: the call, for messages. */
fan_status fan_slot_claim(fan_buffer *b, size_t slot, bool taking, const char *what,
                          fan_error *err);
/* fan_slot_claim_all: as fan_slot_claim, and begins the state. */
fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what,
                              fan_error *err);
/* fan_slot_make_busy: locked: the same of a slot that is free, for a fold. */
static inline void fan_slot_make_busy(fan_slot *s)
{
    s->busy = true;
    fan_slot_set_owner(s, fan_thread_id());
}
/* fan_slot_let_go: locked: makes the slot free, and wakes the threads that wait for it. */
void fan_slot_let_go(fan_buffer *b, size_t slot);

/* ---- checks ---- */

/* fan_slot_check: S1: the slot exists; and fan_buffer_check_fork. */
fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err);
/* fan_slot_enter: locked: waits while a take has the slot, begins the state, and fails if the
 * slot is poisoned. */
fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err);
/* fan_slot_in_target: locked: FAN_ERR_STATE if this thread has begun a target of the slot and not
 * ended it: what it adds would miss its pass. */
fan_status fan_slot_in_target(const fan_buffer *b, size_t slot, const char *what, fan_error *err);

/* fan_value_unmoved: whether the memory of the value lies where it lay when it was read first. */
bool fan_value_unmoved(const fan_buffer *b, const fan_value *v);
/* fan_slot_changed: the error that names the contribution which its caller changed: buffer, slot,
 * key (-1: none). */
fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err);
/* fan_slot_check_unmoved: that error if memory of the value lies elsewhere than when it was
 * added. */
fan_status fan_slot_check_unmoved(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key,
                                  fan_error *err);
/* fan_slot_hash: of the elements of host memory, while other threads of the frontend may run; the
 * user may end it where `may_end`: nothing was done then. No lock is held. */
fan_status fan_slot_hash(const fan_buffer *b, const fan_array *a, bool may_end, uint64_t *out,
                         fan_error *err);
/* fan_slot_unchanged: called before a contribution is read: checks that it is where it was and,
 * with debug=True (hash: not NULL), has the elements that it had. may_end as in fan_slot_hash. */
fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key,
                              const uint64_t *hash, bool may_end, fan_error *err);

/* ---- items, and the state of a pass ---- */

void fan_item_free(fan_buffer *b, fan_item *item);
/* fan_item_unpark: takes the item off what counts against the budget. */
void fan_item_unpark(fan_buffer *b, fan_item *item);
/* fan_entry_seen: the dtypes that the slot has seen, with those of one entry more (A10). */
fan_dtype_set fan_entry_seen(fan_dtype_set seen, const fan_slot *s, const fan_entry *one);

/* fan_slot_cut: locked: empties a slot that has a state, and returns that, for fan_slot_state_free,
 * which drops all without the lock. */
fan_slot_state *fan_slot_cut(fan_buffer *b, fan_slot *s);
void fan_slot_state_free(fan_buffer *b, fan_slot_state *state);

/* ---- failures ---- */

/* fan_status_poisons: whether after such a failure it is unknown what the memory of the slot
 * holds. */
bool fan_status_poisons(fan_status status);
/* fan_status_is_memory: there was no memory, here or on a device. */
static inline bool fan_status_is_memory(fan_status status)
{
    return status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM;
}
/* fan_slot_poison: locked or owned: keeps the first failure of a device call. */
void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err);
/* fan_slot_fail_count: the slot expects another number of contributions than `got` (A16). */
fan_status fan_slot_fail_count(const fan_buffer *b, size_t slot, int64_t key, const char *got,
                               fan_error *err);
/* fan_slot_fail_int: a Python int among the contributions does not fit the sum's dtype (D5). */
fan_status fan_slot_fail_int(const fan_buffer *b, size_t slot, int64_t key, int64_t i,
                             fan_dtype sum, fan_error *err);
/* fan_slot_poisoned: locked: the error of a slot that is poisoned. */
fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err);
/* fan_slot_fail: unlocked: fan_slot_poison of a slot that this thread has made busy: ready() may
 * read it meanwhile. */
void fan_slot_fail(fan_buffer *b, size_t slot, fan_status status, const fan_error *err);
/* fan_slot_fail_memory: FAN_ERR_NOMEM, at a slot. */
fan_status fan_slot_fail_memory(const fan_buffer *b, size_t slot, fan_error *err);
/* fan_buffer_fail_memory: FAN_ERR_NOMEM, at the buffer. */
fan_status fan_buffer_fail_memory(const fan_buffer *b, fan_error *err);

/* ---- traces and statistics ---- */

/* fan_slot_trace: a line of the trace about this slot, of which the caller fills in the step's
 * fields. */
void fan_slot_trace(const fan_buffer *b, size_t slot, fan_trace_line line);
/* fan_slot_digest: writes the line of a digest, where a trace has such lines and no pass is at work
 * here, which writes its own: of the contribution with this key (-1: none), or, FAN_DIGEST_OF_SUM,
 * of the sum. `weight`: it is part of the digest; NULL: none. `on`: where it is ready; NULL: the
 * current stream of its device. */
#define FAN_DIGEST_OF_SUM INT64_MIN
void fan_slot_digest(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key,
                     const fan_weight *weight, fan_stream *on);

/* fan_sum_stats_hold: a copy with holds of its own. */
fan_sum_stats fan_sum_stats_hold(const fan_sum_stats *sum_stats);
/* fan_sum_stats_move: returns the statistics, and empties *sum_stats. */
fan_sum_stats fan_sum_stats_move(fan_sum_stats *sum_stats);
/* fan_sum_stats_drop: unlocked. */
void fan_sum_stats_drop(fan_sum_stats *sum_stats);
/* fan_sum_stats_forget: locked: takes the statistics of the last sum away from the slot; the caller
 * drops them, unlocked. */
fan_sum_stats fan_sum_stats_forget(fan_buffer *b, size_t slot);

/* ---- reading a stream, a device, a slot ---- */

/* fan_stream_handle: returns the handle of a stream.
 *   0: the stream is NULL */
static inline uint64_t fan_stream_handle(const fan_stream *stream)
{
    if (!stream)
        return 0;
    return stream->handle;
}
/* fan_device_number: returns the number of a device with streams.
 *   -1: the device has no streams, or is NULL */
static inline int16_t fan_device_number(const fan_device *d)
{
    if (!d || !d->id)
        return -1;
    return (int16_t)d->index;
}
/* fan_buffer_interrupt_begin: opens a scope in which the user may end the work, where `when` is
 * set. */
static inline void fan_buffer_interrupt_begin(const fan_buffer *b, fan_interrupt *interrupt,
                                              bool when, fan_error *err)
{
    if (when)
        fan_interrupt_begin(interrupt, b->frontend->check_signals, err);
    else
        fan_interrupt_begin(interrupt, NULL, err);
}
/* fan_slot_letter: returns the letter of the case of the slot's first gradient.
 *   0: the slot's device has no streams */
static inline char fan_slot_letter(const fan_slot *s)
{
    if (!s->state->accum)
        return '\0';
    return fan_sync_letter(s->state->stream_case);
}
/* fan_slot_has_state: something came to the slot in this pass that is no plain entry. */
static inline bool fan_slot_has_state(const fan_slot *s)
{
    return s->state != &fan_slot_state_none;
}
/* fan_slot_list: returns the slot's list, and allocates it where there is none yet.
 *   NULL: out of memory */
static inline fan_list *fan_slot_list(fan_slot *s)
{
    if (s->list)
        return s->list;
    s->list = fan_alloc(sizeof *s->list);
    if (s->list)
        fan_list_init(s->list);
    return s->list;
}
/* fan_slot_entries: returns how many entries the list has. */
static inline size_t fan_slot_entries(const fan_slot *s)
{
    if (!s->list)
        return 0;
    return s->list->n;
}
/* fan_slot_sum: returns the first of them, where it is the running sum.
 *   NULL: it is a contribution like the others */
static inline fan_entry *fan_slot_sum(const fan_slot *s)
{
    if (!s->list || !s->list->summed)
        return NULL;
    return &s->list->entries[0];
}
/* fan_slot_waiting: returns how many contributions wait beside the sum. */
static inline size_t fan_slot_waiting(const fan_slot *s)
{
    if (!s->list)
        return 0;
    return fan_list_parked(s->list);
}
/* fan_slot_count: contributions of this pass, those summed already too. */
static inline int64_t fan_slot_count(const fan_slot *s)
{
    if (fan_slot_has_state(s))
        return s->state->count;
    return fan_list_count(s->list);
}
/* fan_slot_missing: A16: how many of the contributions that were expected have not come;
 * `unlimited`: of a slot that expects no certain number. */
static inline int64_t fan_slot_missing(const fan_slot *s, int64_t unlimited)
{
    if (s->expected < 0)
        return unlimited;
    return s->expected - fan_slot_count(s);
}
/* fan_slot_begin_state: locked: where plain entries are in the list, the state that other
 * contributions need is made of what is known of them. The entries stay. FAN_ERR_NOMEM: nothing
 * happened. */
fan_status fan__slot_begin_state(fan_buffer *b, size_t slot, fan_error *err);
static inline fan_status fan_slot_begin_state(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    if (fan_slot_has_state(s) || !fan_slot_entries(s))
        return FAN_OK;
    return fan__slot_begin_state(b, slot, err);
}
/* fan_entry_drop: unlocked: drops what an entry that was taken out holds. */
void fan_entry_drop(fan_buffer *b, const fan_entry *one);
/* fan_slot_drop_plain: unlocked: drops what is parked in a slot. */
void fan_slot_drop_plain(fan_buffer *b, size_t slot);
/* fan_list_unpark: `n` of the slot's plain entries no longer count against the budget; the holders
 * of the others are to be checked anew. */
static inline void fan_list_unpark(fan_buffer *b, fan_list *list, size_t n)
{
    if (n) /* of undefined entries alone `bytes` is unset */
        atomic_fetch_sub_explicit(&b->parked, n * list->bytes, memory_order_relaxed);
    if (list->alone)
        atomic_fetch_sub_explicit(&b->alone, list->alone * list->bytes, memory_order_relaxed);
    list->alone = list->recheck_at = 0;
}

/* fan_slot_divisor: W3: the divisor of a mean of a slot's contributions, by the weights that came
 * with them (fan_divisor_of). */
fan_status fan_slot_divisor(const fan_buffer *b, size_t slot, fan_divisor *out, fan_error *err);

#endif
