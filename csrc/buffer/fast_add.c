/* fast_add: one gradient, or a batch, by the fast path. */
#include "buffer/fast_part.h"

#include "array/extents.h"
#include "array/sum.h"
#include "base/mem.h"

#include <assert.h>
#include <string.h>

static void count_peak(fan_buffer *b, uint64_t now)
{
    if (now > b->quick.peak_parked_bytes)
        b->quick.peak_parked_bytes = now;
    if (now > fan_fast_total.peak_parked_bytes)
        fan_fast_total.peak_parked_bytes = now;
}

/* ---- parked ---- */

/* What a slot asks of its first gradient: the declaration's dtype and shape, and a dtype that the fast path sums. It
 * may be large while it is alone. */
static bool kind_fits(const fan_buffer *b, const fan_spec *spec, const fan_fast_kind *k)
{
    bool declared = spec != &b->undeclared;
    if (spec->exact || (spec->dtype != FAN_DT_NONE && spec->dtype != k->dtype) ||
        (spec->device && spec->device != fan_cpu()))
        return false;
    if (!fan_sum_flat_fits(k->dtype, fan_accum_dtype(k->dtype, spec->accumulate)))
        return false;
    if (!declared || !spec->has_shape)
        return true;
    return spec->ndim == k->ndim && memcmp(spec->shape, k->shape, (size_t)k->ndim * sizeof *k->shape) == 0;
}

/* list_of: the slot's list, made where there is none yet; NULL: no memory. */
static fan_fast_list *list_of(fan_slot *s)
{
    if (!s->fast && (s->fast = fan_alloc(sizeof *s->fast)))
        fan_fast_list_init(s->fast);
    return s->fast;
}

static inline __attribute__((always_inline)) bool park(fan_buffer *b, size_t slot, const fan_fast_kind *kind,
                                                       const fan_fast_term *one)
{
    fan_slot *s = &b->slots[slot];
    if (s->p != &fan_pass_none || s->busy || fan_fast_stats_on_device(b, slot))
        return false;
    fan_fast_list *p = list_of(s);
    if (!p || (p->n && (p->terms[0].key < 0) != (one->key < 0)))
        return false;
    if (kind && !fan_fast_list_defined(p)) {
        if (!kind_fits(b, s->spec, kind))
            return false;
        p->kind = *kind;
        p->size = fan_fast_bytes(kind);
        p->bytes = p->size ? p->size : 1;
    } else if (kind && (fan_fast_is_large(p->size) || !fan_fast_same(&p->kind, kind))) {
        return false;
    }
    if (s->expected >= 0 && fan_fast_list_count(p) >= s->expected)
        return false;
    return fan_fast_list_insert(p, one);
}

/* count_parked: true: the budget is to be asked; `due`: it is anyway. */
static inline __attribute__((always_inline)) bool count_parked(fan_buffer *b, size_t slot, const fan_fast_kind *kind,
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
    const fan_fast_list *p = b->slots[slot].fast;
    if (fan_sched_active())
        fan_buffer_weigh(b, p->bytes);
    uint64_t now = atomic_fetch_add_explicit(&b->parked, p->bytes, memory_order_relaxed) + p->bytes;
    count_peak(b, now);
    return now > b->least && (due || fan_fast_list_begins(p));
}

/* ---- into the sum at once, in place ---- */

typedef struct inplace_add {
    fan_pass *pass;      /* that has the sum; NULL: .. */
    fan_fast_list *list; /* .. it is the first of this list */
    void *object;        /* whose memory the sum is; NULL: the buffer's own */
    char *sum;
    const char *data;
    size_t count; /* elements */
    int64_t key;
    fan_dtype dtype;
} inplace_add;

/* is_flat: the sum is of this kind, in C order. */
static bool is_flat(const fan_array *a, const fan_fast_kind *k)
{
    if (a->ndim != k->ndim)
        return false;
    for (int i = 0; i < k->ndim; i++)
        if (a->shape[i] != k->shape[i])
            return false;
    return fan_array_in_c_order(a);
}

/* sum_for: the slot's sum, where one more gradient of this kind goes straight into it (A6): it was made by the buffer,
 * or donated (an array, whose memory it is: a number is not), is complete up to `key`, and nothing waits behind it.
 * Else NULL. */
static fan_array *sum_for(const fan_slot *s, const fan_fast_kind *k, const char *data, int64_t key)
{
    const fan_pass *p = s->p;
    fan_array *a = p->value.array;
    bool donated = !k->scalar && !p->value_ours && p->value_donated && p->value.object;
    if (k->weak || p->value.form != FAN_FORM_DENSE || !(p->value_ours || donated) || p->value.origin != k->origin ||
        p->accum || p->exact || p->poison)
        return NULL;
    if (s->busy || p->nitems || p->arriving || p->seen != fan_dtype_set_add(0, k->dtype, false))
        return NULL;
    if ((p->keyed < 0) != (key < 0) || (key >= 0 && (uint64_t)key != p->next_key) ||
        (s->expected >= 0 && p->count >= s->expected))
        return NULL;
    uint64_t bytes = fan_fast_bytes(k);
    fan_reuse facts = {.dense = is_flat(a, k),
                       .writable = true,
                       .same_dtype = fan_accum_dtype(k->dtype, s->spec->accumulate) == k->dtype,
                       .disjoint = !fan_flats_meet(a->data, bytes, data, bytes),
                       .ours = p->value_ours,
                       .donated = donated,
                       .exposed = p->value_exposed,
                       .host = true};
    return fan_reusable(&facts) == FAN_REUSE_YES && fan_sum_flat_fits(k->dtype, k->dtype) && fan_fast_is_flat(bytes, 2)
               ? a
               : NULL;
}

/* list_sum_for: whether the same may be done to a sum that the fast path has made: the first of the slot's list, with
 * nothing behind it. With an automatic budget they wait until some can be summed together. */
static bool list_sum_for(const fan_buffer *b, const fan_slot *s, const fan_fast_kind *k, const char *data, int64_t key)
{
    const fan_fast_list *p = s->fast;
    const fan_fast_term *first = &p->terms[0];
    if (b->budget == FAN_BUDGET_AUTO || s->busy || s->targets || p->n != 1 || k->scalar ||
        !fan_fast_same(&p->kind, k) || (first->key < 0) != (key < 0) ||
        (key >= 0 && (uint64_t)key != (uint64_t)first->key + 1) || (s->expected >= 0 && p->summed >= s->expected))
        return false;
    fan_reuse facts = {.dense = true,
                       .writable = true,
                       .same_dtype = fan_accum_dtype(k->dtype, s->spec->accumulate) == k->dtype,
                       .disjoint = !fan_flats_meet(first->data, p->bytes, data, p->bytes),
                       .ours = p->summed > 1 || first->ours,
                       .donated = first->donated,
                       .host = true};
    return fan_reusable(&facts) == FAN_REUSE_YES && fan_fast_is_flat(p->size, 2);
}

/* over_with: whether the budget is passed with `bytes` more that somebody else holds. */
static bool over_with(const fan_buffer *b, uint64_t bytes)
{
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed) + bytes;
    if (b->budget != FAN_BUDGET_AUTO)
        return parked > b->budget;
    return parked > b->least && parked > b->limits.held + atomic_load_explicit(&b->alone, memory_order_relaxed);
}

static inline bool has_sum(const fan_slot *s) { return s->p != &fan_pass_none || (s->fast && s->fast->summed); }

static bool can_add_inplace(const fan_buffer *b, size_t slot, const fan_fast_kind *kind, const char *data, int64_t key,
                            bool alone, inplace_add *out)
{
    const fan_slot *s = &b->slots[slot];
    bool listed = s->p == &fan_pass_none;
    if (b->sum_stats || !has_sum(s))
        return false;
    /* What is the buffer's alone would have to be asked later, which costs more than to add it. */
    if (!(alone && b->budget == FAN_BUDGET_AUTO) && !over_with(b, fan_fast_kind_bytes(kind)))
        return false;
    if (listed) {
        const fan_fast_term *first = &s->fast->terms[0];
        *out = (inplace_add){NULL,        s->fast,    first->ours ? NULL : first->object,
                             first->data, data,       fan_fast_elements(kind),
                             key,         kind->dtype};
        return list_sum_for(b, s, kind, data, key);
    }
    const fan_array *a = sum_for(s, kind, data, key);
    if (a)
        *out = (inplace_add){
            s->p, NULL,    s->p->value_ours ? NULL : s->p->value.object, (char *)a->data, data, (size_t)a->size,
            key,  a->dtype};
    return a != NULL;
}

/* as_they_were: the gradient is what it was, and so is a sum that was donated (NULL: it is the buffer's own). */
static bool as_they_were(const fan_fast_frontend *fast, const fan_fast_kind *kind, const fan_fast_term *one,
                         const inplace_add *to, void *sum)
{
    return (!kind->check_at_use || fast->is_unchanged(one->object, kind, one->data)) &&
           (!sum || (fast->is_unchanged(sum, kind, to->sum) && fast->writable(sum, kind)));
}

/* was_asked: the sum was asked about when the second contribution came, and nobody has had it since. */
static bool was_asked(const fan_fast_frontend *fast, const inplace_add *to, void *sum)
{
    return to->list && to->list->summed > 1 && fast->nobody_else_has(sum);
}

/* inplace_begin: whether `one` is to be added into the slot's sum at once. Libraries are asked first, which may do
 * anything, and all is looked at again. */
static bool inplace_begin(const fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_fast_term *one,
                          bool alone, inplace_add *to)
{
    const fan_fast_frontend *fast = b->frontend->fast;
    FAN_UNINITIALIZED inplace_add then;
    if (one->ours || !can_add_inplace(b, slot, kind, one->data, one->key, alone, to))
        return false;
    void *sum = to->object;
    if (!kind->check_at_use)
        return as_they_were(fast, kind, one, to, sum);
    bool asked = !sum || was_asked(fast, to, sum);
    if (sum)
        fast->hold(sum);
    bool good = fast->has_own_value(one->object) && (asked || (fast->is_detached(sum) && fast->has_own_value(sum)));
    good = good && can_add_inplace(b, slot, kind, one->data, one->key, alone, &then) && then.sum == to->sum &&
           then.object == sum && as_they_were(fast, kind, one, &then, sum);
    if (good)
        *to = then;
    if (sum)
        b->frontend->drop(sum);
    return good;
}

static void add_inplace(fan_buffer *b, const inplace_add *one)
{
    fan_pass *p = one->pass;
    uint64_t bytes = (uint64_t)one->count * fan_dtype_size(one->dtype),
             now = atomic_load_explicit(&b->parked, memory_order_relaxed) + (bytes ? bytes : 1);
    if (fan_sched_active())
        fan_buffer_weigh(b, bytes);
    (void)fan_sum_flat(one->sum, (const char *const[]){one->sum, one->data}, 2, one->count, one->dtype, one->dtype,
                       NULL);
    if (p) {
        p->count++;
        p->value_summed = true;
        p->rules |= fan_plan_fast_slot(true, false) | fan_plan_fast_fold(true);
        p->next_key = one->key >= 0 ? (uint64_t)one->key + 1 : p->next_key;
    } else {
        fan_fast_term *sum = &one->list->terms[0];
        one->list->summed++;
        one->list->rules |= fan_plan_fast_fold(true);
        *sum = fan_fast_term_of(sum->object, sum->data, one->key, false, sum->ours);
    }
    FAN_FAST_COUNT(b, adds, 1);
    FAN_FAST_COUNT(b, folds, 1);
    FAN_FAST_COUNT(b, passes, 1);
    FAN_FAST_COUNT(b, in_place, 1);
    FAN_FAST_COUNT(b, bytes_read, 2 * bytes);
    FAN_FAST_COUNT(b, bytes_written, bytes);
    count_peak(b, now);
}

/* ---- add ---- */

fan_status fan_fast_add(fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_fast_term *one, bool alone,
                        bool *added, fan_error *err)
{
    FAN_UNINITIALIZED inplace_add inplace;
    assert(slot < b->nslots);
    *added = false;
    if (!fan_fast_allowed() || !fan_buffer_is_here(b))
        return FAN_OK;
    if (kind && has_sum(&b->slots[slot]) && inplace_begin(b, slot, kind, one, alone, &inplace)) {
        add_inplace(b, &inplace);
        *added = true;
        return FAN_OK;
    }
    if (!park(b, slot, kind, one))
        return FAN_OK;
    *added = true;
    if (kind)
        b->frontend->fast->hold(one->object);
    if (b->sum_stats)
        b->sum_stats[slot] = (fan_sum_stats){.valid = false};
    if (!count_parked(b, slot, kind, one->ours, false))
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
    if (s->p != &fan_pass_none) { /* its sum may be written at once */
        for (size_t at = 0; at < sizeof *s->p; at += 64)
            __builtin_prefetch((const char *)s->p + at, 1);
        return;
    }
    const char *p = (const char *)s->fast;
    for (size_t at = 0; p && at < 192; at += 64)
        __builtin_prefetch(p + at, 1);
}

/* read_one: the k-th of a batch; false: it is not for the fast path. */
static bool read_one(const fan_buffer *b, const fan_fast_batch *batch, size_t k, size_t *slot, fan_fast_kind *kind,
                     fan_fast_term *one)
{
    return batch->read(batch->ctx, k, slot, kind, one) && *slot < b->nslots;
}

/* many_inplace: true: all went straight into their sums; false: one is not for that, and nothing happened. */
static bool many_inplace(fan_buffer *b, const fan_fast_batch *batch)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    FAN_UNINITIALIZED inplace_add next;
    fan_fast_term one;
    inplace_add *all = NULL; /* made once there is one */
    size_t k = 0, slot, last = 0;
    for (; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        /* Ascending, so that what was asked still holds when it is done. */
        if (!read_one(b, batch, k, &slot, &kind, &one) || !one.object || kind.check_at_use || (k && slot <= last) ||
            !can_add_inplace(b, slot, &kind, one.data, one.key, false, &next) || next.object ||
            (!all && !(all = fan_alloc(batch->n * sizeof *all))))
            break;
        all[k] = next;
        last = slot;
    }
    bool good = all && k == batch->n;
    for (k = 0; good && k < batch->n; k++) {
        if (k + AHEAD < batch->n) {
            __builtin_prefetch(all[k + AHEAD].pass ? (void *)all[k + AHEAD].pass : all[k + AHEAD].list, 1);
            __builtin_prefetch(all[k + AHEAD].sum, 1);
            __builtin_prefetch(all[k + AHEAD].data);
        }
        add_inplace(b, &all[k]);
    }
    fan_free(all);
    return good;
}

/* take_back: the first n of a batch, which were parked, the last one first. */
static void take_back(fan_buffer *b, const fan_fast_batch *batch, size_t n)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    fan_fast_term one;
    size_t slot;
    while (n-- > 0) {
        (void)read_one(b, batch, n, &slot, &kind, &one);
        fan_fast_list *p = b->slots[slot].fast;
        (void)fan_fast_list_remove_last(p, one.object, one.key);
        if (one.object) {
            fan_fast_unpark(b, p, 1);
            b->frontend->drop(one.object);
        }
        b->quick.adds--;
        fan_fast_total.adds--;
    }
}

fan_status fan_fast_add_many(fan_buffer *b, const fan_fast_batch *batch, bool *added, fan_error *err)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    fan_fast_term one;
    size_t k = 0, slot;
    bool due = false;
    *added = fan_fast_allowed() && fan_buffer_is_here(b);
    if (!*added || (batch->n && many_inplace(b, batch)))
        return FAN_OK;
    uint64_t peak = b->quick.peak_parked_bytes, total_peak = fan_fast_total.peak_parked_bytes;
    for (; k < batch->n; k++) {
        if (batch->far)
            batch->prefetch(batch->ctx, k);
        if (!read_one(b, batch, k, &slot, &kind, &one) || !park(b, slot, one.object ? &kind : NULL, &one))
            break;
        if (one.object)
            b->frontend->fast->hold(one.object);
        due |= count_parked(b, slot, one.object ? &kind : NULL, false, due);
    }
    *added = k == batch->n;
    if (!*added) {
        take_back(b, batch, k);
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
