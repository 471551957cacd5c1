/* add_plain: plain contributions into their slots, the short path: without a lock, a value or an
 * item (plain.h).
 *
 *   parked     the usual case: an entry in the slot's list; a fold, if one is due
 *   in place   past a budget that is not automatic: added into the slot's sum at once (A6)
 *   one        either of the two, and a copy before it, or a weight beside it
 *   many       all into their sums, or all parked, or none
 *
 * All other contributions go to add.c, and nothing has happened before. */
#include "array/extents.h"
#include "array/sum.h"
#include "buffer/fold.h"
#include "buffer/plain.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <assert.h>
#include <math.h>

static void add_plain_count_peak(fan_buffer *b, uint64_t now)
{
    atomic_uint_fast64_t *peak = &b->counters.peak_parked_bytes;
    if (now > atomic_load_explicit(peak, memory_order_relaxed))
        atomic_store_explicit(peak, now, memory_order_relaxed);
}

/* ---- parked ---- */

/* Whether the first gradient of a slot is as declared (A9, A10, A12), and of a dtype that is summed
 * here. It may be large while it is alone. */
static bool add_plain_fits(const fan_slot_spec *spec, const fan_plain_kind *kind)
{
    if (spec->exact || !fan_slot_takes(spec, kind->dtype, kind->ndim, kind->shape))
        return false;
    return fan_sum_flat_fits(kind->dtype, fan_accum_dtype(kind->dtype, spec->accumulate));
}

/* add_plain_park: puts the entry into its slot's list. false: it, or the slot, is for the general
 * path. */
static inline __attribute__((always_inline)) bool add_plain_park(fan_buffer *b, size_t slot,
                                                                 const fan_plain_kind *kind,
                                                                 const fan_entry *one)
{
    fan_slot *s = &b->slots[slot];
    if (fan_slot_has_state(s) || s->busy || fan_plain_stats_on_device(b, slot))
        return false;
    fan_list *list = fan_slot_list(s);
    if (!list)
        return false;
    if (fan_keys_mix(fan_list_keyed(list), one->key))
        return false;
    if (kind && !fan_list_defined(list)) {
        if (!add_plain_fits(s->spec, kind))
            return false;
        list->kind = *kind;
        list->size = fan_plain_bytes(kind);
        list->bytes = 1;
        if (list->size)
            list->bytes = list->size;
    } else if (kind) {
        if (fan_plain_is_large(list->size) || !fan_plain_same(&list->kind, kind))
            return false;
    }
    if (fan_slot_missing(s, 1) <= 0)
        return false;
    return fan_list_insert(list, one);
}

/* add_plain_count: counts a contribution that was parked. Returns whether the budget is to be
 * checked now; `due`: it is anyway. */
static inline __attribute__((always_inline)) bool add_plain_count(fan_buffer *b, size_t slot,
                                                                  const fan_plain_kind *kind,
                                                                  bool copied, bool due)
{
    fan_counter_add(&b->counters.adds, 1);
    if (!kind)
        return false;
    if (copied) { /* a copy that was made for the buffer is counted as one of its own */
        uint64_t size = fan_plain_bytes(kind);
        fan_counter_add(&b->counters.copies, 1);
        fan_counter_add(&b->counters.passes, 1);
        fan_counter_add(&b->counters.bytes_read, size);
        fan_counter_add(&b->counters.bytes_written, size);
    }
    const fan_list *list = b->slots[slot].list;
    uint64_t bytes = list->bytes;
    if (fan_sched_active())
        fan_buffer_weigh(b, bytes);
    uint64_t now = atomic_fetch_add_explicit(&b->parked, bytes, memory_order_relaxed) + bytes;
    add_plain_count_peak(b, now);
    if (!fan_budget_near(b, now))
        return false;
    return due || fan_list_begins(list);
}

/* ---- into the sum, in place (A6) ---- */

/* One contribution that is added into its slot's sum at once. */
typedef struct add_in_place {
    fan_list *list; /* whose first entry is the sum .. */
    fan_dtype acc;  /* .. in this dtype */
    void *object;   /* whose memory the sum is; NULL: the buffer's own */
    char *sum;
    const char *data;
    size_t count; /* elements */
    int64_t key;
} add_in_place;

/* add_in_place_fits: whether one more of this kind can be added into the sum, which is the first of
 * the slot's list, with nothing after it (A6), and complete up to `key`. With an automatic budget
 * they wait until some can be summed together. */
static bool add_in_place_fits(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                              const char *data, int64_t key)
{
    const fan_slot *s = &b->slots[slot];
    const fan_list *list = s->list;
    const fan_entry *first = &list->entries[0];
    bool eager = b->budget != FAN_BUDGET_AUTO;
    bool idle = !fan_slot_has_state(s) && !s->busy && !s->targets;
    bool only = list->n == 1;
    if (!eager || !idle || !only)
        return false;
    if (kind->scalar || !fan_plain_same(&list->kind, kind))
        return false;
    if (fan_keys_mix(fan_list_keyed(list), key) || fan_slot_missing(s, 1) <= 0)
        return false;
    if (!fan_key_is_next(fan_list_next_key(list), key))
        return false;
    bool overlaps = fan_flats_meet(first->data, list->bytes, data, list->bytes);
    if (overlaps || !fan_plain_is_flat(list->size, 2))
        return false;
    return fan_plain_may_write(b, slot, 1, fan_plain_accum(b, slot)) == FAN_REUSE_YES;
}

/* add_in_place_plan: whether a contribution is to be added into the sum of its slot now: its budget
 * is passed, and add_in_place_fits. *out: how. */
static bool add_in_place_plan(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                              const char *data, int64_t key, add_in_place *out)
{
    const fan_slot *s = &b->slots[slot];
    if (b->sum_stats || !fan_plain_has_sum(s))
        return false;
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    bool due = fan_budget_near(b, parked + fan_plain_kind_bytes(kind));
    if (!due || !add_in_place_fits(b, slot, kind, data, key))
        return false;
    const fan_entry *first = &s->list->entries[0];
    *out = (add_in_place){.list = s->list,
                          .acc = kind->dtype,
                          .sum = first->data,
                          .data = data,
                          .count = fan_plain_elements(kind),
                          .key = key};
    if (first->wide)
        out->acc = fan_plain_accum(b, slot);
    if (!first->owned)
        out->object = first->object;
    return true;
}

/* add_in_place_unchanged: the gradient is what it was, and so is a sum that was donated (NULL: it
 * is the buffer's own). */
static bool add_in_place_unchanged(const fan_buffer *b, const fan_plain_kind *kind,
                                   const fan_entry *one, const add_in_place *op)
{
    if (kind->check_at_use && !fan_plain_unchanged(b, one->object, kind, one->data))
        return false;
    if (!op->object)
        return true;
    return fan_plain_unchanged(b, op->object, kind, op->sum) &&
           b->frontend->plain->writable(op->object, kind);
}

/* add_in_place_begin: add_in_place_plan, and whether the memory of `one` and of the sum has its
 * value. That calls their library, which may run arbitrary code, so all is checked again after
 * it. */
static bool add_in_place_begin(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                               const fan_entry *one, add_in_place *op)
{
    const fan_plain_frontend *plain = b->frontend->plain;
    FAN_UNINITIALIZED add_in_place then;
    if (one->owned || !add_in_place_plan(b, slot, kind, one->data, one->key, op))
        return false;
    if (!kind->check_at_use)
        return add_in_place_unchanged(b, kind, one, op);
    const fan_entry first = op->list->entries[0];
    void *sum = op->object;
    /* It was checked when the second contribution came, and has had no other reference since. */
    bool checked = sum && op->list->summed > 1 && plain->is_unique(sum);
    if (sum)
        plain->hold(sum);
    bool good = fan_plain_has_value(b, one, false);
    if (good && !checked)
        good = fan_plain_has_value(b, &first, true);
    good = good && add_in_place_plan(b, slot, kind, one->data, one->key, &then);
    if (good && then.sum == op->sum && then.object == sum)
        good = add_in_place_unchanged(b, kind, one, &then);
    else
        good = false;
    if (good)
        *op = then;
    if (sum)
        b->frontend->drop(sum);
    return good;
}

/* add_in_place_sum: adds it. Cannot fail. */
static void add_in_place_sum(fan_buffer *b, const add_in_place *op)
{
    fan_list *list = op->list;
    fan_entry *sum = &list->entries[0];
    fan_dtype dtype = list->kind.dtype;
    size_t count = op->count;
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    if (fan_sched_active())
        fan_buffer_weigh(b, list->size);
    bool wide = sum->wide;
    if (wide) {
        (void)fan_sum_flat_from(op->sum, op->sum, &op->data, 1, count, dtype, op->acc, NULL, true);
    } else {
        const char *const runs[] = {op->sum, op->data};
        (void)fan_sum_flat(op->sum, runs, 2, count, dtype, op->acc, NULL);
    }
    list->summed++;
    list->rules |= fan_plan_plain_fold(true);
    *sum = fan_entry_of(sum->object, sum->data, op->key, false, sum->owned);
    sum->wide = wide;
    uint64_t size = fan_plain_sum_size(list, wide);
    fan_counter_add(&b->counters.adds, 1);
    fan_counter_add(&b->counters.folds, 1);
    fan_counter_add(&b->counters.passes, 1);
    fan_counter_add(&b->counters.in_place, 1);
    fan_counter_add(&b->counters.bytes_read, list->size + size);
    fan_counter_add(&b->counters.bytes_written, size);
    add_plain_count_peak(b, parked + list->bytes);
}

/* ---- one ---- */

/* A copy for the buffer, which *one is then, with the caller's hold. NULL: it is for the general
 * path. May call the array library, which may run arbitrary code. */
static void *add_plain_copy(fan_buffer *b, const fan_plain_kind *kind, fan_entry *one)
{
    if (kind->scalar || fan_plain_pitch(kind))
        return NULL;
    if (!fan_plain_fits(kind->dtype, kind->dtype, fan_plain_bytes(kind)))
        return NULL;
    void *copy = b->frontend->plain->copy(one->object, kind, &one->data);
    if (!copy)
        return NULL;
    one->object = copy;
    one->owned = true;
    one->alone = true;
    return copy;
}

/* The copy, if the contribution's copy= requires one: *one becomes it, and *copy is the caller's
 * hold; else NULL. Returns false if the contribution is for the general path. */
static inline __attribute__((always_inline)) bool add_plain_copy_if_asked(
    fan_buffer *b, const fan_plain_kind *kind, fan_entry *one, void **copy)
{
    *copy = NULL;
    if (!one->copy || !kind)
        return true;
    *copy = add_plain_copy(b, kind, one);
    return *copy && fan_plain_allowed() && fan_buffer_is_usable(b);
}

/* After the attempt to park it: the holds; and, if it is parked, the statistics, the counters, and
 * a fold that is due. */
static inline __attribute__((always_inline)) fan_status add_plain_end(fan_buffer *b, size_t slot,
                                                                      const fan_plain_kind *kind,
                                                                      const fan_entry *one,
                                                                      void *copy, bool parked,
                                                                      fan_error *err)
{
    if (parked && kind)
        b->frontend->plain->hold(one->object);
    if (copy)
        b->frontend->drop(copy);
    if (!parked)
        return FAN_OK;
    if (b->sum_stats)
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    if (!add_plain_count(b, slot, kind, one->owned, false))
        return FAN_OK;
    fan_sched_stepped();
    return fan_plain_fold_due(b, slot, one->object, one->alone, err);
}

fan_status fan_plain_add(fan_buffer *b, size_t slot, const fan_plain_kind *kind, fan_entry *one,
                         bool *added, fan_error *err)
{
    FAN_UNINITIALIZED add_in_place op;
    void *copy;
    assert(slot < b->nslots);
    *added = false;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return FAN_OK;
    bool sum = kind && fan_plain_has_sum(&b->slots[slot]);
    if (sum && add_in_place_begin(b, slot, kind, one, &op)) {
        add_in_place_sum(b, &op);
        *added = true; /* the buffer keeps no reference, so needs no copy */
        return FAN_OK;
    }
    bool allowed = add_plain_copy_if_asked(b, kind, one, &copy);
    *added = allowed && add_plain_park(b, slot, kind, one);
    return add_plain_end(b, slot, kind, one, copy, *added, err);
}

/* add_plain_weight_fits: whether a plain contribution takes this weight: the general path reports
 * what is wrong with it. */
static bool add_plain_weight_fits(const fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                                  const fan_weight *weight)
{
    if (kind->scalar || weight->im != 0)
        return false;
    fan_dtype wish = b->slots[slot].spec->accumulate;
    bool is_float = kind->dtype == FAN_DT_FLOAT32 || kind->dtype == FAN_DT_FLOAT64;
    bool usual = fabs(weight->re) < 0x1p64 && fabs(weight->re) > 0x1p-64;
    if (is_float && wish == FAN_DT_NONE && usual)
        return true;
    fan_dtype acc = fan_accum_dtype(kind->dtype, wish);
    return fan_weight_check(b, slot, -1, weight, kind->dtype, acc, NULL) == FAN_OK;
}

fan_status fan_plain_add_weighted(fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                                  fan_entry *one, const fan_weight *weight, bool *added,
                                  fan_error *err)
{
    assert(slot < b->nslots);
    fan_slot *s = &b->slots[slot];
    void *copy;
    *added = false;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return FAN_OK;
    if (!add_plain_weight_fits(b, slot, kind, weight))
        return FAN_OK;
    bool allowed = add_plain_copy_if_asked(b, kind, one, &copy);
    allowed = allowed && fan_slot_weights_begin(s, true);
    one->weighted = true;
    *added = allowed && add_plain_park(b, slot, kind, one);
    one->weighted = *added;
    if (*added)
        fan_slot_weights_put_plain(s, one->key, weight);
    return add_plain_end(b, slot, kind, one, copy, *added, err);
}

/* ---- many ---- */

#define ADD_AHEAD 8

void fan_plain_prefetch(const fan_buffer *b, size_t slot)
{
    if (slot >= b->nslots)
        return;
    const char *list = (const char *)b->slots[slot].list;
    if (!list)
        return;
    for (size_t at = 0; at < 192; at += 64)
        __builtin_prefetch(list + at, 1);
}

/* add_plain_read: the k-th of a batch; false: it is not a plain one. */
static bool add_plain_read(const fan_buffer *b, const fan_plain_batch *batch, size_t k,
                           size_t *slot, fan_plain_kind *kind, fan_entry *one)
{
    return batch->read(batch->ctx, k, slot, kind, one) && *slot < b->nslots;
}

/* Whether the k-th of a batch goes straight into the sum of a slot beyond `last`. *slot: the slot
 * that it is for. */
static bool add_in_place_of_batch(const fan_buffer *b, const fan_plain_batch *batch, size_t k,
                                  size_t last, size_t *slot, add_in_place *op)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    if (!add_plain_read(b, batch, k, slot, &kind, &one))
        return false;
    if (!one.object || kind.check_at_use)
        return false;
    if (k && *slot <= last)
        return false;
    return add_in_place_plan(b, *slot, &kind, one.data, one.key, op) && !op->object;
}

/* add_in_place_all: true: all went straight into their sums; false: one is not for that, and
 * nothing happened. */
static bool add_in_place_all(fan_buffer *b, const fan_plain_batch *batch)
{
    FAN_UNINITIALIZED add_in_place next;
    add_in_place *all = NULL; /* made once there is one */
    size_t slot;
    size_t last = 0;
    size_t found = 0;
    for (; found < batch->n; found++) {
        if (batch->far)
            batch->prefetch(batch->ctx, found);
        /* Ascending: each slot occurs once, so each check still holds when its sum is written. */
        if (!add_in_place_of_batch(b, batch, found, last, &slot, &next))
            break;
        if (!all)
            all = fan_alloc(batch->n * sizeof *all);
        if (!all)
            break;
        all[found] = next;
        last = slot;
    }
    bool good = all && found == batch->n;
    for (size_t k = 0; good && k < found; k++) {
        if (k + ADD_AHEAD < found) {
            const add_in_place *ahead = &all[k + ADD_AHEAD];
            __builtin_prefetch(ahead->list, 1);
            __builtin_prefetch(ahead->sum, 1);
            __builtin_prefetch(ahead->data);
        }
        add_in_place_sum(b, &all[k]);
    }
    fan_free(all);
    return good;
}

/* add_plain_take_back: the first n of a batch, which were parked, the last one first. */
static void add_plain_take_back(fan_buffer *b, const fan_plain_batch *batch, size_t n)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    size_t slot;
    while (n-- > 0) {
        (void)add_plain_read(b, batch, n, &slot, &kind, &one);
        fan_list *list = b->slots[slot].list;
        (void)fan_list_remove(list, &one);
        if (one.object) {
            fan_list_unpark(b, list, 1);
            b->frontend->drop(one.object);
        }
        fan_counter_add(&b->counters.adds, UINT64_MAX);
    }
}

/* Parks them in turn. Returns how many, up to the first that is not for that; *due: the budget is
 * to be checked. */
static size_t add_plain_park_all(fan_buffer *b, const fan_plain_batch *batch, bool *due)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    size_t slot;
    for (size_t k = 0; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        if (!add_plain_read(b, batch, k, &slot, &kind, &one))
            return k;
        const fan_plain_kind *its = NULL;
        if (one.object)
            its = &kind;
        if (!add_plain_park(b, slot, its, &one))
            return k;
        if (its)
            b->frontend->plain->hold(one.object);
        *due |= add_plain_count(b, slot, its, false, *due);
    }
    return batch->n;
}

fan_status fan_plain_add_many(fan_buffer *b, const fan_plain_batch *batch, bool *added,
                              fan_error *err)
{
    size_t slot;
    bool due = false;
    *added = fan_plain_allowed() && fan_buffer_is_usable(b);
    if (!*added || (batch->n && add_in_place_all(b, batch)))
        return FAN_OK;
    uint64_t peak = atomic_load(&b->counters.peak_parked_bytes);
    size_t parked = add_plain_park_all(b, batch, &due);
    *added = parked == batch->n;
    if (!*added) {
        add_plain_take_back(b, batch, parked);
        atomic_store(&b->counters.peak_parked_bytes, peak);
        return FAN_OK;
    }
    /* last of all: of what was taken back all is known still */
    for (size_t k = 0; b->sum_stats && k < parked; k++) {
        (void)batch->again(batch->ctx, k, &slot);
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    }
    if (!due)
        return FAN_OK;
    fan_sched_stepped();
    for (size_t k = 0; k < parked; k++) {
        const void *object = batch->again(batch->ctx, k, &slot);
        if (object)
            FAN_TRY(fan_plain_fold_due(b, slot, object, false, err));
    }
    return FAN_OK;
}
