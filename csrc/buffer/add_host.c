/* add_host: one plain contribution, or a batch of them (host.h). */
#include "buffer/fold.h"
#include "buffer/host.h"

#include "array/extents.h"
#include "array/sum.h"
#include "base/mem.h"

#include <assert.h>
#include <string.h>

static void add_host_count_peak(fan_buffer *b, uint64_t now)
{
    if (now > b->quick.peak_parked_bytes)
        b->quick.peak_parked_bytes = now;
    if (now > fan_fast_total.peak_parked_bytes)
        fan_fast_total.peak_parked_bytes = now;
}

/* ---- parked ---- */

/* Whether the first gradient of a slot is as declared (A9, A10, A12), and of a dtype that is summed here. It
 * may be large while it is alone. */
static bool add_host_fits(const fan_slot_spec *spec, const fan_fast_kind *k)
{
    return !spec->exact && fan_slot_takes(spec, k->dtype, k->ndim, k->shape) &&
           fan_sum_flat_fits(k->dtype, fan_accum_dtype(k->dtype, spec->accumulate));
}

static inline __attribute__((always_inline)) bool add_host_park(fan_buffer *b, size_t slot, const fan_fast_kind *kind,
                                                                const fan_entry *one)
{
    fan_slot *s = &b->slots[slot];
    if (s->p != &fan_slot_state_none || s->busy || fan_host_stats_on_device(b, slot))
        return false;
    fan_list *p = fan_slot_list(s);
    if (!p || (p->n && (p->entries[0].key < 0) != (one->key < 0)))
        return false;
    if (kind && !fan_list_defined(p)) {
        if (!add_host_fits(s->spec, kind))
            return false;
        p->kind = *kind;
        p->size = fan_fast_bytes(kind);
        p->bytes = p->size ? p->size : 1;
    } else if (kind && (fan_fast_is_large(p->size) || !fan_fast_same(&p->kind, kind))) {
        return false;
    }
    if (s->expected >= 0 && fan_list_count(p) >= s->expected)
        return false;
    return fan_list_insert(p, one);
}

/* add_host_count: true: the budget is to be checked; `due`: it is anyway. */
static inline __attribute__((always_inline)) bool add_host_count(fan_buffer *b, size_t slot, const fan_fast_kind *kind,
                                                                 bool copied, bool due)
{
    FAN_FAST_COUNT(b, adds, 1);
    if (!kind)
        return false;
    if (copied) { /* a copy that was made for the buffer is counted as one of its own */
        uint64_t size = fan_fast_bytes(kind);
        FAN_FAST_COUNT(b, copies, 1);
        FAN_FAST_COUNT(b, passes, 1);
        FAN_FAST_COUNT(b, bytes_read, size);
        FAN_FAST_COUNT(b, bytes_written, size);
    }
    const fan_list *p = b->slots[slot].list;
    if (fan_sched_active())
        fan_buffer_weigh(b, p->bytes);
    uint64_t now = atomic_fetch_add_explicit(&b->parked, p->bytes, memory_order_relaxed) + p->bytes;
    add_host_count_peak(b, now);
    return now > b->fold_threshold && (due || fan_list_begins(p));
}

/* ---- into the sum at once, in place ---- */

typedef struct add_host_op {
    fan_list *list; /* whose first entry is the sum */
    void *object;   /* whose memory the sum is; NULL: the buffer's own */
    char *sum;
    const char *data;
    size_t count; /* elements */
    int64_t key;
    fan_dtype dtype;
} add_host_op;

/* add_host_takes: whether one more of this kind is added straight into the sum, which is the first of the slot's list,
 * with nothing behind it (A6): it is complete up to `key`. With an automatic budget they wait until some can be summed
 * together. */
static bool add_host_takes(const fan_buffer *b, size_t slot, const fan_fast_kind *k, const char *data, int64_t key)
{
    const fan_slot *s = &b->slots[slot];
    const fan_list *p = s->list;
    const fan_entry *first = &p->entries[0];
    if (b->budget == FAN_BUDGET_AUTO || s->p != &fan_slot_state_none || s->busy || s->targets || p->n != 1 ||
        k->scalar || !fan_fast_same(&p->kind, k) || (first->key < 0) != (key < 0) ||
        (key >= 0 && (uint64_t)key != (uint64_t)first->key + 1) || (s->expected >= 0 && p->summed >= s->expected))
        return false;
    return !fan_flats_meet(first->data, p->bytes, data, p->bytes) && fan_fast_is_flat(p->size, 2) &&
           fan_host_reusable(b, slot, 1, fan_host_accum(b, slot));
}

static inline bool add_host_has_sum(const fan_slot *s) { return s->list && s->list->summed; }

static bool add_host_can(const fan_buffer *b, size_t slot, const fan_fast_kind *kind, const char *data, int64_t key,
                         add_host_op *out)
{
    const fan_slot *s = &b->slots[slot];
    if (b->sum_stats || !add_host_has_sum(s) ||
        atomic_load_explicit(&b->parked, memory_order_relaxed) + fan_fast_kind_bytes(kind) <= b->budget ||
        !add_host_takes(b, slot, kind, data, key))
        return false;
    const fan_entry *first = &s->list->entries[0];
    *out = (add_host_op){
        s->list, first->owned ? NULL : first->object, first->data, data, fan_fast_elements(kind), key, kind->dtype};
    return true;
}

/* add_host_unchanged: the gradient is what it was, and so is a sum that was donated (NULL: it is the buffer's own). */
static bool add_host_unchanged(const fan_fast_frontend *fast, const fan_fast_kind *kind, const fan_entry *one,
                               const add_host_op *to, void *sum)
{
    return (!kind->check_at_use || fast->is_unchanged(one->object, kind, one->data)) &&
           (!sum || (fast->is_unchanged(sum, kind, to->sum) && fast->writable(sum, kind)));
}

/* add_host_was_checked: the sum was checked when the second contribution came, and has had no other reference since. */
static bool add_host_was_checked(const fan_fast_frontend *fast, const add_host_op *to, void *sum)
{
    return to->list->summed > 1 && fast->nobody_else_has(sum);
}

/* add_host_begin: whether `one` is to be added into the slot's sum at once. Calls the library first, which
 * may run arbitrary code, and then checks all again. */
static bool add_host_begin(const fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_entry *one,
                           add_host_op *to)
{
    const fan_fast_frontend *fast = b->frontend->fast;
    FAN_UNINITIALIZED add_host_op then;
    if (one->owned || !add_host_can(b, slot, kind, one->data, one->key, to))
        return false;
    void *sum = to->object;
    if (!kind->check_at_use)
        return add_host_unchanged(fast, kind, one, to, sum);
    bool asked = !sum || add_host_was_checked(fast, to, sum);
    if (sum)
        fast->hold(sum);
    bool good = fast->has_own_value(one->object) && (asked || (fast->is_detached(sum) && fast->has_own_value(sum)));
    good = good && add_host_can(b, slot, kind, one->data, one->key, &then) && then.sum == to->sum &&
           then.object == sum && add_host_unchanged(fast, kind, one, &then, sum);
    if (good)
        *to = then;
    if (sum)
        b->frontend->drop(sum);
    return good;
}

static void add_host_add(fan_buffer *b, const add_host_op *one)
{
    uint64_t bytes = (uint64_t)one->count * fan_dtype_size(one->dtype),
             now = atomic_load_explicit(&b->parked, memory_order_relaxed) + (bytes ? bytes : 1);
    if (fan_sched_active())
        fan_buffer_weigh(b, bytes);
    (void)fan_sum_flat(one->sum, (const char *const[]){one->sum, one->data}, 2, one->count, one->dtype, one->dtype,
                       NULL);
    fan_entry *sum = &one->list->entries[0];
    one->list->summed++;
    one->list->rules |= fan_plan_fast_fold(true);
    *sum = fan_entry_of(sum->object, sum->data, one->key, false, sum->owned);
    FAN_FAST_COUNT(b, adds, 1);
    FAN_FAST_COUNT(b, folds, 1);
    FAN_FAST_COUNT(b, passes, 1);
    FAN_FAST_COUNT(b, in_place, 1);
    FAN_FAST_COUNT(b, bytes_read, 2 * bytes);
    FAN_FAST_COUNT(b, bytes_written, bytes);
    add_host_count_peak(b, now);
}

/* ---- add ---- */

bool fan_fast_add_inplace(fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_entry *one)
{
    FAN_UNINITIALIZED add_host_op inplace;
    assert(slot < b->nslots);
    if (!fan_fast_allowed() || !fan_buffer_is_usable(b) || !add_host_has_sum(&b->slots[slot]) ||
        !add_host_begin(b, slot, kind, one, &inplace))
        return false;
    add_host_add(b, &inplace);
    return true;
}

fan_status fan_fast_add(fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_entry *one, bool alone,
                        bool *added, fan_error *err)
{
    assert(slot < b->nslots);
    *added = kind && add_host_has_sum(&b->slots[slot]) && fan_fast_add_inplace(b, slot, kind, one);
    if (*added || !fan_fast_allowed() || !fan_buffer_is_usable(b))
        return FAN_OK;
    if (!add_host_park(b, slot, kind, one))
        return FAN_OK;
    *added = true;
    if (kind)
        b->frontend->fast->hold(one->object);
    if (b->sum_stats)
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    if (!add_host_count(b, slot, kind, one->owned, false))
        return FAN_OK;
    fan_sched_stepped();
    return fan_fast_fold_due(b, slot, one->object, alone, err);
}

/* ---- many ---- */

#define AHEAD 8

void fan_fast_prefetch(const fan_buffer *b, size_t slot)
{
    if (slot >= b->nslots)
        return;
    const fan_slot *s = &b->slots[slot];
    const char *p = (const char *)s->list;
    for (size_t at = 0; p && at < 192; at += 64)
        __builtin_prefetch(p + at, 1);
}

/* add_host_read: the k-th of a batch; false: it is not for the fast path. */
static bool add_host_read(const fan_buffer *b, const fan_fast_batch *batch, size_t k, size_t *slot, fan_fast_kind *kind,
                          fan_entry *one)
{
    return batch->read(batch->ctx, k, slot, kind, one) && *slot < b->nslots;
}

/* add_host_add_all: true: all went straight into their sums; false: one is not for that, and nothing happened. */
static bool add_host_add_all(fan_buffer *b, const fan_fast_batch *batch)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    FAN_UNINITIALIZED add_host_op next;
    fan_entry one;
    add_host_op *all = NULL; /* made once there is one */
    size_t k = 0, slot, last = 0;
    for (; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        /* Ascending: each slot occurs once, so each check still holds when its sum is written. */
        if (!add_host_read(b, batch, k, &slot, &kind, &one) || !one.object || kind.check_at_use ||
            (k && slot <= last) || !add_host_can(b, slot, &kind, one.data, one.key, &next) || next.object ||
            (!all && !(all = fan_alloc(batch->n * sizeof *all))))
            break;
        all[k] = next;
        last = slot;
    }
    bool good = all && k == batch->n;
    for (k = 0; good && k < batch->n; k++) {
        if (k + AHEAD < batch->n) {
            __builtin_prefetch(all[k + AHEAD].list, 1);
            __builtin_prefetch(all[k + AHEAD].sum, 1);
            __builtin_prefetch(all[k + AHEAD].data);
        }
        add_host_add(b, &all[k]);
    }
    fan_free(all);
    return good;
}

/* add_host_take_back: the first n of a batch, which were parked, the last one first. */
static void add_host_take_back(fan_buffer *b, const fan_fast_batch *batch, size_t n)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    fan_entry one;
    size_t slot;
    while (n-- > 0) {
        (void)add_host_read(b, batch, n, &slot, &kind, &one);
        fan_list *p = b->slots[slot].list;
        (void)fan_list_remove(p, &one);
        if (one.object) {
            fan_list_unpark(b, p, 1);
            b->frontend->drop(one.object);
        }
        b->quick.adds--;
        fan_fast_total.adds--;
    }
}

fan_status fan_fast_add_many(fan_buffer *b, const fan_fast_batch *batch, bool *added, fan_error *err)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    fan_entry one;
    size_t k = 0, slot;
    bool due = false;
    *added = fan_fast_allowed() && fan_buffer_is_usable(b);
    if (!*added || (batch->n && add_host_add_all(b, batch)))
        return FAN_OK;
    uint64_t peak = b->quick.peak_parked_bytes, total_peak = fan_fast_total.peak_parked_bytes;
    for (; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        if (!add_host_read(b, batch, k, &slot, &kind, &one) || !add_host_park(b, slot, one.object ? &kind : NULL, &one))
            break;
        if (one.object)
            b->frontend->fast->hold(one.object);
        due |= add_host_count(b, slot, one.object ? &kind : NULL, false, due);
    }
    *added = k == batch->n;
    if (!*added) {
        add_host_take_back(b, batch, k);
        b->quick.peak_parked_bytes = peak;
        fan_fast_total.peak_parked_bytes = total_peak;
        return FAN_OK;
    }
    for (k = 0; b->sum_stats && k < batch->n; k++) { /* last of all: of what was taken back all is known still */
        (void)batch->again(batch->ctx, k, &slot);
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    }
    if (due)
        fan_sched_stepped();
    for (k = 0; k < batch->n && due; k++) {
        const void *object = batch->again(batch->ctx, k, &slot);
        if (object)
            FAN_TRY(fan_fast_fold_due(b, slot, object, false, err));
    }
    return FAN_OK;
}
