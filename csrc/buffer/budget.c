/* budget: when the contributions of a slot are summed before a take, and how: the ready prefix,
 * once the parked bytes pass the budget (Park and fold). */
#include "array/exact.h"
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/fold.h"
#include "buffer/plain.h"
#include "buffer/slot.h"

#include <string.h>

/* ---- the limits of an automatic budget ---- */

#ifdef FAN_TEST
static fan_auto_budget budget_test_limits; /* zero: as in a release */

void fan_budget_auto_set(const fan_auto_budget *to)
{
    budget_test_limits =
        to ? (fan_auto_budget){to->alone, to->held, to->alone} : (fan_auto_budget){0};
}
#endif

/* A quarter of the cache: the sum, what the maker works on and what it makes next want to be there,
 * too. And what a fold frees at once is no more than allocators keep: glibc gives back what is free
 * at the end of its heap from 128 KiB on, and then the maker's next gradients cost a page fault for
 * each 4 KB. */
#define BUDGET_ALONE_MOST (UINT64_C(128) << 10)

fan_auto_budget fan_budget_auto(void)
{
#ifdef FAN_TEST
    if (budget_test_limits.alone)
        return budget_test_limits;
#endif
    uint64_t quarter = fan_cache_bytes() / 4;
    return (fan_auto_budget){quarter < BUDGET_ALONE_MOST ? quarter : BUDGET_ALONE_MOST,
                             UINT64_C(64) << 20, quarter};
}

/* ---- contributions of any form ---- */

/* Locked on entry and on return; the slot is free: sums its first m contributions into its sum, or
 * its exact state. */
static fan_status budget_fold(fan_buffer *b, size_t slot, size_t m, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_gathered gathered;
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    fan_slot_make_busy(s);
    fan_slot_unlock(b, slot);
    fan_status status = fan_gather(b, slot, m, false, &gathered, err);
    if (status == FAN_OK) {
        if (s->spec->exact && gathered.fold.n)
            fan_fold_decide(&gathered.fold);
        if (s->spec->exact)
            status = fan_fold_absorb(&gathered.fold, &gathered.like, err);
        if (status == FAN_OK && gathered.fold.n > 1) {
            status = fan_fold_begin(&gathered.fold, NULL, err);
            fan_slot_fail(b, slot, status, err);
        }
        if (status == FAN_OK)
            status = fan_fold_commit_end(b, slot, &gathered, err);
        fan_gathered_fini(&gathered);
    }
    fan_slot_lock(b, slot);
    fan_slot_let_go(b, slot);
    return status;
}

/* The value of an entry that is a Python int; else 0. */
static int64_t budget_weak_int(const fan_plain_kind *k, const fan_entry *one)
{
    int64_t number = 0;
    if (one->general)
        return one->item->number;
    if (k->weak && k->dtype == FAN_DT_INT64)
        memcpy(&number, fan_entry_data(k, one), sizeof number);
    return number;
}

/* Locked: whether a prefix waits because of its Python ints (D5): their sum leaves int64, and later
 * contributions may bring it back; or one of them does not fit the dtype so far, and later
 * contributions may widen that. Otherwise take() refuses it. */
static bool budget_ints_wait(const fan_slot *s, size_t m)
{
    fan_int_run run = {.sum = 0};
    const fan_value *next = NULL;
    if (!s->state->has_weak_int || !s->list)
        return false;
    const fan_plain_kind *k = &s->list->kind;
    const fan_value plain = {.form = FAN_FORM_DENSE, .dtype = k->dtype};
    fan_dtype_set seen = s->state->summed_seen;
    int64_t lo = s->state->summed_lo;
    int64_t hi = s->state->summed_hi;
    bool objects = false;
    for (size_t i = 0; i < m + (s->list->summed > 0) && !objects; i++) {
        const fan_entry *one = &s->list->entries[i];
        const fan_value *v = one->general ? &one->item->value : &plain;
        bool sum = i == 0 && s->list->summed > 0;
        if (!one->object || v->form == FAN_FORM_UNDEFINED)
            continue;
        objects = v->form == FAN_FORM_OBJECT;
        if (!sum && !objects) {
            int64_t number = budget_weak_int(k, one);
            seen = fan_entry_seen(seen, s, one);
            lo = number < lo ? number : lo;
            hi = number > hi ? number : hi;
        }
        if (next || v->form == FAN_FORM_ZERO)
            continue;
        bool counts = one->general
                          ? fan_int_run_add(&run, v, one->item->number)
                          : k->weak && fan_int_run_put(&run, k->dtype, fan_entry_data(k, one));
        next = counts ? NULL : v;
    }
    bool declared = s->spec->dtype != FAN_DT_NONE;
    fan_dtype d = fan_dtype_set_promote(seen);
    bool fits = declared || (fan_weak_int_fits(lo, d) && fan_weak_int_fits(hi, d));
    return !fits || fan_int_run_leaves(&run, next, NULL, declared ? s->spec->dtype : FAN_DT_INT64);
}

/* Locked: with an automatic budget: checks again which parked arrays of the host the buffer alone
 * holds. Two kinds count as held by others unchecked: what lies on another device, whose cache is
 * not ours, and sparse gradients, which take as long to merge as what is merged already. The more
 * entries there are, the more seldom they are checked. `newest`: an object that its caller still
 * holds; `alone`: but for that it would be the buffer's alone. */
static void budget_recheck_holders(fan_buffer *b, const fan_slot *s, const void *newest, bool alone)
{
    fan_list *list = s->list;
    size_t plain = 0;
    if (b->budget != FAN_BUDGET_AUTO || !list || list->n < list->recheck_at ||
        (s->state->device && s->state->device->backend->has_streams))
        return;
    for (size_t i = list->summed > 0; i < list->n; i++) {
        const fan_entry *one = &list->entries[i];
        fan_item *it = one->item;
        if (!one->general) {
            plain += one->object == newest ? alone
                                           : one->object && b->frontend->alone(one->object, NULL);
            continue;
        }
        if (!it->parked || it->alone || it->value.form != FAN_FORM_DENSE)
            continue;
        it->alone =
            it->owned || (it->value.object && b->frontend->alone(it->value.object, &it->value));
        if (it->alone)
            atomic_fetch_add_explicit(&b->alone, it->bytes, memory_order_relaxed);
    }
    atomic_fetch_add_explicit(&b->alone, ((uint64_t)plain - list->alone) * list->bytes,
                              memory_order_relaxed);
    list->alone = plain;
    list->recheck_at = list->n + fan_recheck_interval(list->n);
}

/* Locked: how many contributions of a slot with accumulate="exact" move into its state now: all
 * that are parked, if that saves memory, or none. */
static size_t budget_exact_due(const fan_slot *s)
{
    const fan_slot_state *p = s->state;
    const fan_entry *sum = fan_slot_sum(s);
    fan_dtype d = fan_dtype_set_promote(p->seen);
    bool zero = sum && sum->general && sum->item->value.form == FAN_FORM_ZERO;
    bool streams = p->device && p->device->backend->has_streams;
    if (!fan_exact_fits(d) || streams || (sum && !zero))
        return 0;
    size_t n = fan_slot_waiting(s);
    if (fan_list_ready(s->list, p->next_key, p->keyed > 0) < n)
        return 0; /* keys have no order in an exact sum, but the ledger of A16 has */
    const fan_array *any = NULL;
    size_t terms = 0;
    uint64_t parked = 0;
    uint64_t axes = p->exact ? p->exact->expanded : ~UINT64_C(0);
    for (size_t i = 0; i < n; i++) {
        const fan_entry *one = &s->list->entries[i + (sum != NULL)];
        if (!one->general) /* it is undefined: an exact sum takes no plain entries */
            continue;
        const fan_value *v = &one->item->value;
        if (v->form == FAN_FORM_SPARSE)
            return 0; /* its sum may be sparse, and small */
        parked += one->item->bytes;
        if (v->form != FAN_FORM_DENSE)
            continue;
        if (!fan_exact_fits(v->dtype))
            return 0; /* an integer is read as the sum's own dtype, which may widen yet */
        any = v->array;
        axes &= fan_array_expanded(any);
        terms++;
    }
    if (p->exact && p->exact->expanded == axes)
        return n > 1 && terms ? n : 0;
    if (terms < 2) /* one alone may be handed through (A14) */
        return 0;
    uint64_t words = (uint64_t)any->size * (fan_dtype_kind(d) == 'c' ? 2 : 1);
    for (int i = 0; i < any->ndim; i++)
        if (axes >> i & 1)
            words /= (uint64_t)any->shape[i];
    return parked > words * 8 ? n : 0; /* of a window whose words have 64 bits */
}

size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t pending)
{
    const fan_slot *s = &b->slots[slot];
    if (s->busy || s->state->poison ||
        atomic_load_explicit(&b->parked, memory_order_relaxed) <= b->fold_threshold)
        return 0;
    budget_recheck_holders(b, s, NULL, false);
    if (!fan_budget_exceeded(b, pending, true))
        return 0;
    if (s->spec->exact)
        return budget_exact_due(s);
    size_t m = fan_list_ready(s->list, s->state->next_key, s->state->keyed > 0);
    return budget_ints_wait(s, m) ? 0 : m;
}

fan_status fan_slot_fold_while_due(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t m; status == FAN_OK && (m = fan_slot_due(b, slot, 0)) > 0;)
        status = budget_fold(b, slot, m, err);
    return status;
}

fan_status fan_slot_promote(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_entry *sum = fan_slot_sum(s);
    bool plain = sum && !sum->general && !fan_slot_waiting(s);
    bool first = !sum && fan_slot_waiting(s) == 1 &&
                 fan_list_ready(s->list, s->state->next_key, s->state->keyed > 0) == 1;
    return !s->busy && !s->spec->exact && (plain || first) ? budget_fold(b, slot, first, err)
                                                           : FAN_OK;
}

/* ---- plain entries (plain.h) ---- */

/* budget_plain_fits: whether a sum of a slot's list may stay in it: it is of the kind of the list,
 * or wider. */
static bool budget_plain_fits(const fan_buffer *b, size_t slot)
{
    const fan_plain_kind *k = &b->slots[slot].list->kind;
    return !fan_plain_pitch(k) && fan_sum_flat_fits(k->dtype, fan_plain_accum(b, slot));
}

/* Whether the budget is passed now that `object`, which its caller still holds, is parked too. */
static bool budget_plain_due(fan_buffer *b, size_t slot, const void *object, bool alone)
{
    fan_list *p = b->slots[slot].list;
    size_t at = p->n;
    if (!p->n) /* an earlier fold of the same call summed it */
        return false;
    if (b->budget != FAN_BUDGET_AUTO)
        return fan_budget_exceeded(b, 0, false);
    /* Checks once more which contribution was parked last, if its maker still held it then: most
     * makers drop each before they add the next. */
    fan_list *newest = b->last_parked.object ? b->slots[b->last_parked.slot].list : NULL;
    size_t index = b->last_parked.index;
    if (newest && index < newest->n && newest->entries[index].object == b->last_parked.object &&
        b->frontend->alone(newest->entries[index].object, NULL)) {
        newest->alone++;
        atomic_fetch_add_explicit(&b->alone, newest->bytes, memory_order_relaxed);
    }
    if (p->n >= p->recheck_at) {
        budget_recheck_holders(b, &b->slots[slot], object, alone);
    } else if (alone) {
        p->alone++;
        atomic_fetch_add_explicit(&b->alone, p->bytes, memory_order_relaxed);
    }
    while (!alone && --at > 0 && p->entries[at].object != object)
        ;
    b->last_parked.object = alone ? NULL : object;
    b->last_parked.slot = slot;
    b->last_parked.index = at;
    if (!fan_budget_exceeded(b, 0, !budget_plain_fits(b, slot)))
        return false;
    fan_list_sort(p);
    return fan_list_prefix(p) > 1; /* a first one is left as it is: there is nothing to be gained */
}

/* budget_plain_may: whether what waits in the slot may be summed here. */
static bool budget_plain_may(const fan_buffer *b, size_t slot)
{
    const fan_slot *s = &b->slots[slot];
    const fan_list *p = s->list;
    return fan_plain_allowed() && !fan_slot_has_state(s) && !s->busy && !s->targets &&
           !b->sum_stats && p && !p->undefined && !p->kind.scalar && budget_plain_fits(b, slot);
}

/* As fan_plain_place, for a sum that is wider than the contributions. NULL also if several threads
 * sum them sooner. */
static void *budget_plain_place_wide(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc,
                                     char **data)
{
    const fan_list *p = b->slots[slot].list;
    const fan_entry *first = &p->entries[0];
    fan_plain_kind kind = p->kind;
    kind.dtype = acc;
    if (!fan_plain_is_flat(fan_plain_bytes(&kind), n))
        return NULL;
    if (first->wide && fan_plain_may_write(b, slot, n, acc) == FAN_REUSE_YES) {
        *data = first->data;
        return first->object;
    }
    return b->frontend->plain->fresh(first->object, &kind, data);
}

/* Sums the ready prefix; false: it is for the general path, and nothing happened. */
static bool budget_plain_fold(fan_buffer *b, size_t slot)
{
    fan_slot *s = &b->slots[slot];
    fan_list *p = s->list;
    FAN_UNINITIALIZED fan_entry inline_gone[FAN_LIST_INLINE];
    char *data = NULL;
    if (!budget_plain_may(b, slot))
        return false;
    fan_list_sort(p);
    size_t n = fan_list_prefix(p);
    fan_entry *gone = n <= FAN_LIST_INLINE ? inline_gone : fan_alloc(n * sizeof *gone);
    if (n < 2 || !gone)
        return false;
    fan_plain_claim(s);
    fan_dtype acc = fan_plain_accum(b, slot);
    bool wide = acc != p->kind.dtype;
    void *to = wide ? budget_plain_place_wide(b, slot, n, acc, &data)
                    : fan_plain_place(b, slot, n, acc, true, &data);
    bool first = to == p->entries[0].object;
    bool good = to && fan_plain_has_values(b, p, n, first) && fan_plain_all_unchanged(b, p, n);
    if (good) {
        if (wide)
            fan_plain_fold_wide(b, p, n, acc, data);
        else
            fan_plain_fold(b, p, n, acc, NULL, data, NULL, NULL);
        memcpy(gone, p->entries, n * sizeof *gone);
        bool owned = !first || p->entries[0].owned;
        size_t parked = n - (p->summed > 0);
        fan_plain_count(b, p, n, first, false, wide);
        fan_list_unpark(b, p, parked);
        p->rules = (p->summed ? p->rules : 0) | fan_plan_plain_fold(first);
        p->summed += (int64_t)parked;
        p->entries[0] = fan_entry_of(to, data, p->entries[n - 1].key, false, owned);
        p->entries[0].wide = wide;
        memmove(&p->entries[1], &p->entries[n], (p->n - n) * sizeof *p->entries);
        p->n -= n - 1;
    } else {
        if (to && !first)
            b->frontend->drop(to);
        if (b->frontend->clear_error)
            /* the general path reports it, if there is anything to report */
            b->frontend->clear_error();
    }
    fan_plain_release(b, (fan_span){slot, slot + 1});
    for (size_t i = first; good && i < n; i++) /* last: it may call back */
        b->frontend->drop(gone[i].object);
    if (gone != inline_gone)
        fan_free(gone);
    return good;
}

/* A first contribution becomes the sum as it is, and waits no longer. False: it is for the general
 * path. */
static bool budget_plain_first(fan_buffer *b, size_t slot)
{
    fan_list *p = b->slots[slot].list;
    if (!budget_plain_may(b, slot) || p->summed || fan_plain_is_large(p->size))
        return false;
    fan_list_sort(p);
    if (fan_list_prefix(p) != 1)
        return false;
    fan_list_unpark(b, p, 1);
    p->rules = 0;
    p->summed = 1;
    return true;
}

fan_status fan_plain_fold_due(fan_buffer *b, size_t slot, const void *object, bool alone,
                              fan_error *err)
{
    if (!budget_plain_due(b, slot, object, alone) || budget_plain_first(b, slot) ||
        budget_plain_fold(b, slot))
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
