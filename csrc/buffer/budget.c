/* budget: when the contributions of a slot are summed before a take, and how: the ready prefix,
 * once the parked bytes pass the budget (Park and fold). */
#include "array/exact.h"
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/fold.h"
#include "buffer/plain.h"
#include "buffer/slot.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <string.h>

/* ---- the limits of an automatic budget ---- */

#ifdef FAN_TEST
static fan_auto_budget budget_test_limits; /* zero: as in a release */

void fan_budget_auto_set(const fan_auto_budget *to)
{
    budget_test_limits = (fan_auto_budget){0};
    if (to)
        budget_test_limits = (fan_auto_budget){to->alone, to->held, to->alone};
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

/* Unlocked: makes the sum of what was gathered, and commits it. */
static fan_status budget_sum(fan_gathered *gathered, fan_error *err)
{
    fan_fold *fold = &gathered->fold;
    fan_buffer *b = fold->b;
    if (fan_fold_slot(fold)->spec->exact) {
        if (fold->n)
            fan_fold_decide(fold);
        size_t nonfinite;
        FAN_TRY(fan_fold_find_nonfinite(fold, &nonfinite, err)); /* before anything is done */
        FAN_TRY(fan_fold_absorb(fold, &gathered->like, nonfinite, err));
    }
    if (fold->n > 1) {
        fan_status status = fan_gathered_weigh(gathered, err);
        if (status == FAN_OK)
            status = fan_fold_begin(fold, NULL, err);
        fan_slot_fail(b, fold->slot, status, err);
        FAN_TRY(status);
    }
    return fan_fold_commit_end(b, fold->slot, gathered, err);
}

/* Locked on entry and on return; the slot is free: sums its first m contributions into its sum, or
 * its exact state. */
static fan_status budget_fold(fan_buffer *b, size_t slot, size_t m, fan_error *err)
{
    fan_gathered gathered;
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    fan_slot_make_busy(&b->slots[slot]);
    fan_slot_unlock(b, slot);
    fan_status status = fan_gather(b, slot, m, false, &gathered, err);
    if (status == FAN_OK) {
        status = budget_sum(&gathered, err);
        fan_gathered_fini(&gathered);
    }
    fan_slot_lock(b, slot);
    fan_slot_let_go(b, slot);
    return status;
}

/* The value of an entry that is a Python int; else 0. */
static int64_t budget_weak_int(const fan_plain_kind *kind, const fan_entry *one)
{
    int64_t number = 0;
    if (one->general)
        return one->item->number;
    if (kind->weak && kind->dtype == FAN_DT_INT64)
        memcpy(&number, fan_entry_data(kind, one), sizeof number);
    return number;
}

/* Whether an entry continues a run of Python's ints and bools. */
static bool budget_int_run_add(fan_int_run *run, const fan_plain_kind *kind, const fan_entry *one)
{
    if (one->general)
        return fan_int_run_add(run, &one->item->value, one->item->number);
    return kind->weak && fan_int_run_put(run, kind->dtype, fan_entry_data(kind, one));
}

/* Locked: whether a prefix waits because of its Python ints (D5): their sum leaves int64, and later
 * contributions may bring it back; or one of them does not fit the dtype so far, and later
 * contributions may widen that. Otherwise take() refuses it. */
static bool budget_ints_wait(const fan_slot *s, size_t m)
{
    const fan_list *list = s->list;
    if (!s->state->has_weak_int || !list)
        return false;
    const fan_plain_kind *kind = &list->kind;
    const fan_value plain = {.form = FAN_FORM_DENSE, .dtype = kind->dtype};
    fan_int_run run = {.sum = 0};
    const fan_value *next = NULL; /* what ends the run */
    fan_dtype_set seen = s->state->summed_seen;
    int64_t lo = s->state->summed_lo;
    int64_t hi = s->state->summed_hi;
    size_t begin = list->summed > 0;
    bool objects = false;
    for (size_t i = 0; i < m + begin && !objects; i++) {
        const fan_entry *one = &list->entries[i];
        const fan_value *value = &plain;
        if (one->general)
            value = &one->item->value;
        if (!one->object || value->form == FAN_FORM_UNDEFINED)
            continue;
        objects = value->form == FAN_FORM_OBJECT;
        if (i >= begin && !objects) {
            int64_t number = budget_weak_int(kind, one);
            seen = fan_entry_seen(seen, s, one);
            fan_range_add(&lo, &hi, number);
        }
        if (next || value->form == FAN_FORM_ZERO)
            continue;
        if (!budget_int_run_add(&run, kind, one))
            next = value;
    }
    if (s->spec->dtype != FAN_DT_NONE)
        return fan_int_run_leaves(&run, next, NULL, s->spec->dtype);
    fan_dtype dtype = fan_dtype_set_promote(seen);
    if (!fan_weak_int_fits(lo, dtype) || !fan_weak_int_fits(hi, dtype))
        return true;
    return fan_int_run_leaves(&run, next, NULL, FAN_DT_INT64);
}

static const fan_patch *budget_patch(const fan_entry *one)
{
    if (!one->general)
        return NULL;
    return one->item->value.patch;
}

/* Locked: whether the partial gradients among the first n entries reach each element once. Computed
 * only where they have as many elements as the whole, so that adds which never get there stay
 * cheap. */
static bool budget_partial_covers(const fan_list *list, size_t n)
{
    int64_t reached = 0;
    int64_t whole = -1;
    size_t found = 0;
    for (size_t i = 0; i < n; i++) {
        const fan_patch *patch = budget_patch(&list->entries[i]);
        if (!patch)
            continue;
        whole = patch->whole;
        if (__builtin_add_overflow(reached, patch->size, &reached))
            return false;
    }
    if (reached != whole)
        return false;
    const fan_patch **patches = fan_alloc((n + 1) * sizeof *patches);
    for (size_t i = 0; patches && i < n; i++) {
        const fan_patch *patch = budget_patch(&list->entries[i]);
        if (patch && patch->size > 0)
            patches[found++] = patch;
    }
    bool covers = patches && fan_patches_disjoint(patches, found);
    fan_free(patches);
    return covers;
}

/* Locked: whether a prefix waits because it has partial gradients, no dense one, and elements that
 * none of them reaches: their sum does not record which elements were reached (P1). */
static bool budget_partial_waits(const fan_slot *s, size_t m)
{
    const fan_list *list = s->list;
    bool partial = false;
    bool sparse = false;
    if (!list || FAN_FAULT(PADDED_ADD))
        return false;
    size_t n = m + (list->summed > 0);
    for (size_t i = 0; i < n; i++) {
        const fan_entry *one = &list->entries[i];
        if (!one->general) {
            if (one->object)
                return false;
            continue;
        }
        switch (one->item->value.form) {
        case FAN_FORM_DENSE:
        case FAN_FORM_OBJECT:
            return false;
        case FAN_FORM_PARTIAL:
            partial = true;
            break;
        case FAN_FORM_SPARSE:
            sparse = true;
            break;
        default:
            break;
        }
    }
    if (!partial)
        return false;
    return sparse || !budget_partial_covers(list, n);
}

/* Locked: checks again whether the buffer alone holds an item that is parked. */
static void budget_recheck_item(fan_buffer *b, fan_item *item)
{
    const fan_value *value = &item->value;
    if (!item->parked || item->alone || value->form != FAN_FORM_DENSE)
        return;
    item->alone = item->owned;
    if (!item->alone && value->object)
        item->alone = b->frontend->alone(value->object, value);
    if (item->alone)
        atomic_fetch_add_explicit(&b->alone, item->bytes, memory_order_relaxed);
}

/* Locked: with an automatic budget: checks again which parked arrays of the host the buffer alone
 * holds. Two kinds count as held by others unchecked: what lies on another device, whose cache is
 * not ours, and sparse gradients, which take as long to merge as what is merged already. The more
 * entries there are, the more seldom they are checked. `newest`: an object that its caller still
 * holds; `alone`: but for that it would be the buffer's alone. */
static void budget_recheck_holders(fan_buffer *b, const fan_slot *s, const void *newest, bool alone)
{
    fan_list *list = s->list;
    const fan_device *d = s->state->device;
    size_t plain = 0;
    if (b->budget != FAN_BUDGET_AUTO || !list || list->n < list->recheck_at)
        return;
    if (d && d->backend->has_streams)
        return;
    for (size_t i = list->summed > 0; i < list->n; i++) {
        const fan_entry *one = &list->entries[i];
        if (one->general)
            budget_recheck_item(b, one->item);
        else if (one->object == newest)
            plain += alone;
        else if (one->object)
            plain += b->frontend->alone(one->object, NULL);
    }
    uint64_t more = ((uint64_t)plain - list->alone) * list->bytes;
    atomic_fetch_add_explicit(&b->alone, more, memory_order_relaxed);
    list->alone = plain;
    list->recheck_at = list->n + fan_recheck_interval(list->n);
}

/* The words of a window over a sum of such terms, one along each of `axes`. */
static uint64_t budget_exact_words(const fan_array *any, uint64_t axes, fan_dtype dtype)
{
    uint64_t words = (uint64_t)any->size;
    if (fan_dtype_kind(dtype) == 'c')
        words *= 2;
    for (int i = 0; i < any->ndim; i++) {
        if (axes >> i & 1)
            words /= (uint64_t)any->shape[i];
    }
    return words;
}

/* Locked: how many contributions of a slot with accumulate="exact" move into its state now: all
 * that are parked, if that saves memory, or none. */
static size_t budget_exact_due(const fan_slot *s)
{
    const fan_slot_state *state = s->state;
    const fan_entry *sum = fan_slot_sum(s);
    fan_dtype dtype = fan_dtype_set_promote(state->seen);
    bool streams = state->device && state->device->backend->has_streams;
    bool zero = sum && sum->general && sum->item->value.form == FAN_FORM_ZERO;
    if (!fan_exact_fits(dtype) || streams || fan_slot_weighted(s))
        return 0; /* products wait until the take */
    if (sum && !zero)
        return 0;
    size_t n = fan_slot_waiting(s);
    if (fan_list_ready(s->list, state->next_key, state->keyed > 0) < n)
        return 0; /* keys have no order in an exact sum, but the ledger of A16 has */
    const fan_exact_state *exact = state->exact;
    const fan_array *any = NULL;
    size_t terms = 0;
    uint64_t parked = 0;
    uint64_t axes = ~UINT64_C(0);
    if (exact)
        axes = exact->expanded;
    for (size_t i = 0; i < n; i++) {
        const fan_entry *one = &s->list->entries[i + (sum != NULL)];
        if (!one->general) /* it is undefined: an exact sum takes no plain entries */
            continue;
        const fan_value *value = &one->item->value;
        if (value->form == FAN_FORM_SPARSE)
            return 0; /* its sum may be sparse, and small */
        parked += one->item->bytes;
        if (value->form != FAN_FORM_DENSE)
            continue;
        if (!fan_exact_fits(value->dtype))
            return 0; /* an integer is read as the sum's own dtype, which may widen yet */
        any = value->array;
        axes &= fan_array_expanded(any);
        terms++;
    }
    if (exact && exact->expanded == axes)
        return n > 1 && terms ? n : 0;
    if (terms < 2) /* one alone may be handed through (A14) */
        return 0;
    /* of a window whose words have 64 bits */
    bool saves = parked > budget_exact_words(any, axes, dtype) * 8;
    if (!saves)
        return 0;
    return n;
}

size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t pending)
{
    const fan_slot *s = &b->slots[slot];
    const fan_slot_state *state = s->state;
    if (s->busy || state->poison)
        return 0;
    if (!fan_budget_near(b, atomic_load_explicit(&b->parked, memory_order_relaxed)))
        return 0;
    budget_recheck_holders(b, s, NULL, false);
    if (!fan_budget_exceeded(b, pending, true))
        return 0;
    if (s->spec->exact)
        return budget_exact_due(s);
    size_t m = fan_list_ready(s->list, state->next_key, state->keyed > 0);
    if (budget_ints_wait(s, m) || budget_partial_waits(s, m))
        return 0;
    return m;
}

fan_status fan_slot_fold_while_due(fan_buffer *b, size_t slot, fan_error *err)
{
    size_t m = fan_slot_due(b, slot, 0);
    while (m > 0) {
        FAN_TRY(budget_fold(b, slot, m, err));
        m = fan_slot_due(b, slot, 0);
    }
    return FAN_OK;
}

fan_status fan_slot_promote(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_entry *sum = fan_slot_sum(s);
    size_t waiting = fan_slot_waiting(s);
    if (s->busy || s->spec->exact)
        return FAN_OK;
    if (sum) {
        if (sum->general || waiting)
            return FAN_OK;
        return budget_fold(b, slot, 0, err);
    }
    if (waiting != 1 || fan_list_ready(s->list, s->state->next_key, s->state->keyed > 0) != 1)
        return FAN_OK;
    return budget_fold(b, slot, 1, err);
}

/* ---- plain entries (plain.h) ---- */

/* budget_plain_fits: whether a sum of a slot's list may stay in it: it is of the kind of the list,
 * or wider. */
static bool budget_plain_fits(const fan_buffer *b, size_t slot)
{
    const fan_plain_kind *k = &b->slots[slot].list->kind;
    return !fan_plain_pitch(k) && fan_sum_flat_fits(k->dtype, fan_plain_accum(b, slot));
}

/* Whether the only holder of the contribution that was parked last is the buffer now, where its
 * maker still held it then: most makers drop each before they add the next. */
static void budget_recheck_last(fan_buffer *b)
{
    const void *object = b->last_parked.object;
    size_t index = b->last_parked.index;
    if (!object)
        return;
    fan_list *list = b->slots[b->last_parked.slot].list;
    if (!list || index >= list->n)
        return;
    void *parked = list->entries[index].object;
    if (parked != object || !b->frontend->alone(parked, NULL))
        return;
    list->alone++;
    atomic_fetch_add_explicit(&b->alone, list->bytes, memory_order_relaxed);
}

/* How many of the first entries have no gap between them, the sum too. */
static size_t budget_plain_prefix(fan_list *list)
{
    size_t ready = fan_list_ready(list, fan_list_next_key(list), fan_list_keyed(list) > 0);
    return ready + (list->summed > 0);
}

/* Whether the budget is passed now that `object`, which its caller still holds, is parked too. */
static bool budget_plain_due(fan_buffer *b, size_t slot, const void *object, bool alone)
{
    fan_list *list = b->slots[slot].list;
    if (!list->n) /* an earlier fold of the same call summed it */
        return false;
    if (b->budget != FAN_BUDGET_AUTO)
        return fan_budget_exceeded(b, 0, false);
    budget_recheck_last(b);
    if (list->n >= list->recheck_at) {
        budget_recheck_holders(b, &b->slots[slot], object, alone);
    } else if (alone) {
        list->alone++;
        atomic_fetch_add_explicit(&b->alone, list->bytes, memory_order_relaxed);
    }
    size_t at = list->n - 1;
    if (!alone) {
        while (at > 0 && list->entries[at].object != object)
            at--;
    }
    b->last_parked.object = object;
    if (alone)
        b->last_parked.object = NULL;
    b->last_parked.slot = slot;
    b->last_parked.index = at;
    if (!fan_budget_exceeded(b, 0, !budget_plain_fits(b, slot)))
        return false;
    /* a first one is left as it is: there is nothing to be gained */
    return budget_plain_prefix(list) > 1;
}

/* budget_plain_may: whether what waits in the slot may be summed here. */
static bool budget_plain_may(const fan_buffer *b, size_t slot)
{
    const fan_slot *s = &b->slots[slot];
    const fan_list *list = s->list;
    if (!fan_plain_allowed() || b->sum_stats)
        return false;
    if (fan_slot_has_state(s) || s->busy || s->targets)
        return false;
    if (!list || list->undefined || list->kind.scalar)
        return false;
    if (!budget_plain_fits(b, slot))
        return false;
    if (!fan_slot_weighted(s))
        return true;
    bool few = list->n <= FAN_PLAIN_TERMS && list->size <= FAN_PLAIN_BYTES;
    return few && fan_plain_accum(b, slot) == list->kind.dtype;
}

/* As fan_plain_place, for a sum that is wider than the contributions. NULL also if several threads
 * sum them sooner. */
static void *budget_plain_place_wide(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc,
                                     char **data)
{
    const fan_list *list = b->slots[slot].list;
    const fan_entry *first = &list->entries[0];
    fan_plain_kind kind = list->kind;
    kind.dtype = acc;
    if (!fan_plain_is_flat(fan_plain_bytes(&kind), n))
        return NULL;
    if (first->wide && fan_plain_may_write(b, slot, n, acc) == FAN_REUSE_YES) {
        *data = first->data;
        return first->object;
    }
    return b->frontend->plain->fresh(first->object, &kind, data);
}

/* Where a sum of plain entries is made. */
typedef struct budget_place {
    void *object; /* NULL: nowhere */
    char *data;
    bool wide; /* it is wider than the contributions */
} budget_place;

/* Makes the sum of the first n entries, which takes their place in the list. Cannot fail. */
static void budget_plain_sum(fan_buffer *b, size_t slot, size_t n, const budget_place *to)
{
    fan_list *list = b->slots[slot].list;
    fan_entry *entries = list->entries;
    fan_dtype acc = fan_plain_accum(b, slot);
    bool first = to->object == entries[0].object;
    bool owned = !first || entries[0].owned;
    if (fan_slot_weighted(&b->slots[slot])) {
        fan_plain_fold_weighted(b, slot, n, NULL, NULL, to->data);
        fan_slot_weights_drop_plain(&b->slots[slot], entries, n);
    } else if (to->wide) {
        fan_plain_fold_wide(b, list, n, acc, to->data);
    } else {
        fan_plain_fold(b, list, n, acc, NULL, to->data, NULL, NULL);
    }
    size_t parked = n - (list->summed > 0);
    fan_plain_count(b, list, n, first, false, to->wide);
    fan_list_unpark(b, list, parked);
    if (!list->summed)
        list->rules = 0;
    list->rules |= fan_plan_plain_fold(first);
    list->summed += (int64_t)parked;
    entries[0] = fan_entry_of(to->object, to->data, entries[n - 1].key, false, owned);
    entries[0].wide = to->wide;
    memmove(&entries[1], &entries[n], (list->n - n) * sizeof *entries);
    list->n -= n - 1;
}

/* budget_plain_multiplies: whether the first entry has a weight that makes another term of it. One
 * of weight 1 is handed through, by the general path. */
static bool budget_plain_multiplies(fan_slot *s)
{
    fan_weight weight;
    if (!fan_slot_weighted(s))
        return false;
    fan_weights_of(s, s->list->entries, 1, &weight);
    return fan_weight_multiplies(&weight);
}

/* Sums the ready prefix; false: it is for the general path, and nothing happened. */
static bool budget_plain_fold(fan_buffer *b, size_t slot)
{
    fan_slot *s = &b->slots[slot];
    fan_list *list = s->list;
    FAN_UNINITIALIZED fan_entry inline_gone[FAN_LIST_INLINE];
    if (!budget_plain_may(b, slot))
        return false;
    size_t n = budget_plain_prefix(list);
    if (!n || (n == 1 && !budget_plain_multiplies(s)))
        return false;
    fan_entry *gone = inline_gone;
    if (n > FAN_LIST_INLINE)
        gone = fan_alloc(n * sizeof *gone);
    if (!gone)
        return false;
    fan_plain_claim(s);
    fan_dtype acc = fan_plain_accum(b, slot);
    budget_place to = {.wide = acc != list->kind.dtype};
    if (to.wide)
        to.object = budget_plain_place_wide(b, slot, n, acc, &to.data);
    else
        to.object = fan_plain_place(b, slot, n, acc, true, &to.data);
    bool first = to.object == list->entries[0].object;
    bool good = to.object && fan_plain_has_values(b, list, n, first);
    good = good && fan_plain_all_unchanged(b, list, n);
    if (good) {
        memcpy(gone, list->entries, n * sizeof *gone);
        budget_plain_sum(b, slot, n, &to);
    } else {
        fan_plain_give_up(b, first ? NULL : to.object);
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
    fan_list *list = b->slots[slot].list;
    if (!budget_plain_may(b, slot))
        return false;
    if (list->summed || fan_plain_is_large(list->size))
        return false;
    if (budget_plain_prefix(list) != 1 || list->entries[0].weighted)
        return false;
    fan_list_unpark(b, list, 1);
    list->rules = 0;
    list->summed = 1;
    return true;
}

fan_status fan_plain_fold_due(fan_buffer *b, size_t slot, const void *object, bool alone,
                              fan_error *err)
{
    if (!budget_plain_due(b, slot, object, alone))
        return FAN_OK;
    if (budget_plain_first(b, slot) || budget_plain_fold(b, slot))
        return FAN_OK;
    fan_status status = FAN_ERR_STATE;
    bool begun = false;
    fan_slot_lock(b, slot);
    if (!b->slots[slot].busy) {
        status = fan_slot_begin_state(b, slot, err);
        begun = status == FAN_OK;
    }
    if (begun)
        status = fan_slot_fold_while_due(b, slot, err);
    fan_slot_unlock(b, slot);
    /* It is parked; the sum is tried again later, and reports then what is wrong. */
    if (status == FAN_ERR_EXTERN)
        fan_plain_give_up(b, NULL);
    if (begun && fan_status_poisons(status))
        return status;
    return FAN_OK;
}
