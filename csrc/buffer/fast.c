#include "buffer/fast.h"

#include "array/convert.h"
#include "array/sum.h"
#include "base/mem.h"
#include "base/pool.h"
#include "buffer/lock.h"
#include "buffer/materialize.h"
#include "buffer/options.h"
#include "buffer/pass.h"
#include "buffer/unchanged.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(b, name, k) ((b)->quick.name += (k), fan_fast_total.name += (k))

static void peak(uint64_t *highest, uint64_t now)
{
    if (now > *highest)
        *highest = now;
}

/* Those that are parked: not the sum of others. */
static size_t waiting(const fan_fast_list *p) { return p->n - (p->summed > 0); }

int64_t fan_fast_count(const fan_fast_list *p) { return p ? (int64_t)waiting(p) + p->summed : 0; }

/* `n` of the slot's gradients no longer count against the budget, and of the others it is to be asked anew who has
 * them. */
static void unpark(fan_buffer *b, fan_fast_list *p, size_t n)
{
    atomic_fetch_sub_explicit(&b->parked, n * p->bytes, memory_order_relaxed);
    if (p->alone)
        atomic_fetch_sub_explicit(&b->alone, p->alone * p->bytes, memory_order_relaxed);
    p->alone = p->ask = 0;
}

static void emptied(fan_fast_list *p)
{
    p->n = p->undefined = p->alone = p->ask = 0;
    p->summed = 0;
}

void fan_fast_list_init(fan_fast_list *p)
{
    emptied(p);
    p->cap = FAN_PLAIN_INLINE;
    p->list = p->few;
    p->unsorted = NULL;
}

/* ---- keys out of order: the list is by arrival then, until somebody reads it ---- */

static void keys_end(fan_fast_list *p)
{
    if (!p->unsorted)
        return;
    fan_keys_fini(p->unsorted);
    fan_free(p->unsorted);
    p->unsorted = NULL;
}

/* From now on by arrival; with one more key. */
static bool keys_begin(fan_fast_list *p, int64_t key)
{
    p->unsorted = fan_calloc(sizeof *p->unsorted);
    bool good = p->unsorted && fan_keys_put(p->unsorted, key) > 0;
    for (size_t i = 0; i < p->n && good; i++)
        good = fan_keys_put(p->unsorted, p->list[i].key) > 0;
    if (!good)
        keys_end(p);
    return good;
}

static int by_key(const void *a, const void *b)
{
    const fan_fast *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

/* The list is by key afterwards. */
static void in_order(fan_fast_list *p)
{
    if (!p->unsorted)
        return;
    int64_t *keys = fan_alloc(p->n * sizeof *keys);
    uint32_t *at = fan_alloc(p->n * sizeof *at);
    fan_fast *list = fan_alloc(p->cap * sizeof *list);
    for (size_t i = 0; keys && i < p->n; i++)
        keys[i] = p->list[i].key;
    if (keys && at && list && fan_keys_order(keys, sizeof *keys, p->n, at)) {
        for (size_t i = 0; i < p->n; i++)
            list[i] = p->list[at[i]];
        fan_free(p->list); /* it is too long for `few` */
        p->list = list;
    } else {
        qsort(p->list, p->n, sizeof *p->list, by_key);
        fan_free(list);
    }
    fan_free(keys);
    fan_free(at);
    keys_end(p);
}

void fan_fast_list_fini(fan_slot *s, bool inside)
{
    if (!s->plain)
        return;
    keys_end(s->plain);
    if (s->plain->list != s->plain->few)
        fan_free(s->plain->list);
    if (!inside)
        fan_free(s->plain);
    s->plain = NULL;
}

bool fan_fast_same(const fan_fast_kind *a, const fan_fast_kind *b)
{
    if (a->dtype != b->dtype || a->origin != b->origin || a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i])
            return false;
    return true;
}

/* What the declaration of a slot asks of its first gradient. */
static bool welcome(const fan_spec *spec, const fan_fast_kind *k)
{
    if ((spec->dtype != FAN_DT_NONE && spec->dtype != k->dtype) || spec->exact ||
        (spec->device && spec->device != fan_cpu()))
        return false;
    if (spec->accumulate != FAN_DT_NONE && fan_accum_dtype(k->dtype, spec->accumulate) == FAN_DT_NONE)
        return false;
    if (!spec->has_shape)
        return true;
    return spec->ndim == k->ndim && memcmp(spec->shape, k->shape, (size_t)k->ndim * sizeof *k->shape) == 0;
}

static size_t elements(const fan_fast_kind *k)
{
    size_t n = 1;
    for (int i = 0; i < k->ndim; i++)
        n *= (size_t)k->shape[i];
    return n;
}

static uint64_t size_of(const fan_fast_kind *k) { return fan_dtype_size(k->dtype) * elements(k); }

uint64_t fan_fast_bytes(const fan_fast_kind *k)
{
    uint64_t n = size_of(k);
    return n ? n : 1; /* so that what has no bytes passes a budget of 0, too */
}

/* Where a key goes to; SIZE_MAX: it is there already, or there is no memory. */
static size_t place(fan_fast_list *p, int64_t key)
{
    size_t lo = 0, hi = p->n;
    if (p->unsorted)
        return fan_keys_put(p->unsorted, key) > 0 ? p->n : SIZE_MAX;
    if (!p->n || p->list[p->n - 1].key < key)
        return p->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (p->list[mid].key < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (p->list[lo].key == key)
        return SIZE_MAX;
    return p->n - lo <= FAN_SHIFTED ? lo : keys_begin(p, key) ? p->n : SIZE_MAX;
}

static bool grow(fan_fast_list *p)
{
    size_t cap = p->cap * 2;
    fan_fast *more = fan_realloc(p->list == p->few ? NULL : p->list, cap * sizeof *more);
    if (!more)
        return false;
    if (p->list == p->few)
        memcpy(more, p->few, sizeof p->few);
    p->list = more;
    p->cap = cap;
    return true;
}

/* With stats: what is known of the slot's last sum stands on a device. */
static bool knows_away(const fan_buffer *b, size_t slot)
{
    return b->known && (b->known[slot].words || b->known[slot].on);
}

static bool park(fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_fast *one)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *p = s->plain;
    int64_t key = one->key;
    size_t at;
    if (s->p != &fan_pass_none || s->busy || knows_away(b, slot) || !fan_buffer_is_here(b))
        return false;
    if (!p) {
        p = fan_alloc(sizeof *p);
        if (!p)
            return false;
        fan_fast_list_init(p);
        s->plain = p;
    }
    if (p->n && (p->list[0].key < 0) != (key < 0))
        return false;
    if (kind && p->n == p->undefined) {
        if ((s->spec != &b->undeclared || b->undeclared.accumulate != FAN_DT_NONE || b->undeclared.exact) &&
            !welcome(s->spec, kind))
            return false;
        p->kind = *kind;
        p->bytes = fan_fast_bytes(kind);
    } else if (kind && !fan_fast_same(&p->kind, kind)) {
        return false;
    }
    if (s->expected >= 0 && fan_fast_count(p) >= s->expected)
        return false;
    if (p->n == p->cap && !grow(p))
        return false;
    if (p->summed && key >= 0 && key <= p->list[0].key) /* it is in the sum already */
        return false;
    at = key < 0 ? p->n : place(p, key);
    if (at == SIZE_MAX)
        return false;
    if (at < p->n)
        memmove(&p->list[at + 1], &p->list[at], (p->n - at) * sizeof *p->list);
    p->list[at] = *one;
    p->n++;
    p->undefined += !kind;
    return true;
}

/* The smallest key, or one that is smaller still; of keyed ones. */
static int64_t least(const fan_fast_list *p) { return p->unsorted ? p->unsorted->least : p->list[0].key; }

/* Whether what a fold would begin with is there. */
static bool begins(const fan_fast_list *p)
{
    int64_t first = p->list[0].key;
    if (first < 0)
        return true;
    if (!p->summed)
        return least(p) == 0;
    return p->unsorted ? fan_keys_has(p->unsorted, first + 1) : p->n > 1 && p->list[1].key == first + 1;
}

/* A copy that was made for the buffer is counted as one of its own. */
static void copied(fan_buffer *b, const fan_fast_kind *kind)
{
    uint64_t bytes = size_of(kind);
    COUNT(b, copies, 1);
    COUNT(b, passes, 1);
    COUNT(b, bytes_read, bytes);
    COUNT(b, bytes_written, bytes);
}

bool fan_buffer_add_plain(fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_fast *one, bool *due)
{
    assert(slot < b->nslots);
    *due = false;
    if (!park(b, slot, kind, one))
        return false;
    if (b->known)
        b->known[slot] = (fan_sum_stats){.yes = false};
    if (!kind) {
        COUNT(b, adds, 1);
        return true;
    }
    if (one->ours)
        copied(b, kind);
    uint64_t bytes = b->slots[slot].plain->bytes;
    if (fan_watched())
        fan_buffer_weigh(b, bytes);
    uint64_t now = atomic_fetch_add_explicit(&b->parked, bytes, memory_order_relaxed) + bytes;
    COUNT(b, adds, 1);
    peak(&b->quick.peak_parked_bytes, now);
    peak(&fan_fast_total.peak_parked_bytes, now);
    *due = now > b->least && begins(b->slots[slot].plain);
    return true;
}

/* ---- what is due ---- */

static void wake(fan_buffer *b)
{
    for (size_t i = 0; i < b->nlocks && atomic_load(&b->waiting); i++) {
        fan_slot_lock(b, i);
        fan_cond_broadcast(&b->changed[i]);
        fan_slot_unlock(b, i);
    }
}

/* What was parked last, where its maker had it still, is asked once more: most makers drop each before they add the
 * next. */
static void ask_newest(fan_buffer *b)
{
    fan_fast_list *p = b->newest.object ? b->slots[b->newest.slot].plain : NULL;
    size_t at = b->newest.at;
    if (p && at < p->n && p->list[at].object == b->newest.object && b->frontend->alone(p->list[at].object, NULL)) {
        p->alone++;
        atomic_fetch_add_explicit(&b->alone, p->bytes, memory_order_relaxed);
    }
}

/* How many of the first terms have no gap between them. */
static size_t prefix(const fan_fast_list *p)
{
    size_t m = p->n > 0 && (p->summed || p->list[0].key <= 0);
    while (m && m < p->n && (p->list[0].key < 0 || p->list[m].key == p->list[m - 1].key + 1))
        m++;
    return m;
}

bool fan_buffer_over(fan_buffer *b, size_t slot, const void *object, bool alone)
{
    fan_fast_list *p = b->slots[slot].plain;
    size_t at = p->n, found;
    if (b->budget != FAN_BUDGET_AUTO)
        return fan_over_budget(b, 0);
    ask_newest(b);
    found = p->alone + alone;
    if (p->n >= p->ask) {
        found = 0;
        for (size_t i = p->summed > 0; i < p->n; i++)
            found +=
                p->list[i].object == object ? alone : p->list[i].object && b->frontend->alone(p->list[i].object, NULL);
        p->ask = p->n + fan_ask_step(p->n);
    }
    atomic_fetch_add_explicit(&b->alone, ((uint64_t)found - p->alone) * p->bytes,
                              memory_order_relaxed); /* it may be less than it was */
    p->alone = found;
    while (!alone && --at > 0 && p->list[at].object != object)
        ;
    b->newest.object = alone ? NULL : object;
    b->newest.slot = slot;
    b->newest.at = at;
    if (!fan_over_budget(b, 0))
        return false;
    in_order(p);
    return prefix(p) > 1; /* a first one is left as it is: there is nothing to be gained */
}

bool fan_buffer_merge_begin(fan_buffer *b, size_t slot, fan_merge *m)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *p = s->plain;
    if (s->p != &fan_pass_none || s->busy || s->targets || b->known || !p || p->undefined || p->kind.scalar ||
        fan_accum_dtype(p->kind.dtype, s->spec->accumulate) != p->kind.dtype ||
        !fan_sum_flat_fits(p->kind.dtype, p->kind.dtype))
        return false;
    in_order(p);
    m->slot = slot;
    m->sum = (fan_fast_sum){&p->kind, p->list, prefix(p), p->summed > 0};
    m->dropped = m->few;
    if (m->sum.n < 2 ||
        (m->sum.n > sizeof m->few / sizeof *m->few && !(m->dropped = fan_alloc(m->sum.n * sizeof *m->dropped))))
        return false;
    s->busy = s->taking = true;
    fan_slot_set_owner(s, fan_thread_id());
    return true;
}

#define FAR      \
    ((uint64_t)4 \
     << 20) /* bytes of terms and sum from which on several threads pay, and so the general path at a take */

/* A gap-free array of the kind, for a sum alone. */
static void array_over(fan_array *a, const fan_fast_kind *k, const char *data)
{
    memset(a, 0, sizeof *a);
    a->data = (char *)data;
    a->dtype = k->dtype;
    a->ndim = 1;
    a->shape = a->dims;
    a->strides = a->dims + 1;
    a->size = a->dims[0] = (int64_t)elements(k);
    a->dims[1] = (int64_t)fan_dtype_size(k->dtype);
}

/* 2 to FAN_PLAIN_MOST terms in their own dtype. */
static void sum_terms(const fan_fast_kind *k, const char *const *src, size_t n, char *out)
{
    FAN_UNCLEARED fan_array array[FAN_PLAIN_MOST + 1];
    FAN_UNCLEARED fan_operand in[FAN_PLAIN_MOST];
    if ((n + 1) * fan_fast_bytes(k) < FAR) {
        (void)fan_sum_flat(out, src, n, elements(k), k->dtype, k->dtype, NULL);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        array_over(&array[i], k, src[i]);
        in[i] = (fan_operand){.array = &array[i], .acc = k->dtype};
    }
    array_over(&array[n], k, out);
    fan_sum(&array[n], in, n, &(fan_sum_how){.parallel = true});
}

void fan_buffer_merge_sum(const fan_merge *m, char *out)
{
    FAN_UNCLEARED const char *src[FAN_PLAIN_MOST];
    for (size_t done = 0; done < m->sum.n;) {
        size_t k = 0;
        if (done)
            src[k++] = out;
        while (k < FAN_PLAIN_MOST && done < m->sum.n)
            src[k++] = m->sum.terms[done++].data;
        sum_terms(m->sum.kind, src, k, out);
    }
}

void fan_buffer_merge_end(fan_buffer *b, fan_merge *m, void *object, char *data)
{
    fan_slot *s = &b->slots[m->slot];
    fan_fast_list *p = s->plain;
    size_t n = object ? m->sum.n : 0;
    if (n) {
        bool first = object == p->list[0].object;
        memcpy(m->dropped, p->list, n * sizeof *p->list);
        if (first)
            m->dropped[0].object = NULL;
        COUNT(b, folds, 1);
        COUNT(b, passes, 1);
        COUNT(b, bytes_read, n * p->bytes);
        COUNT(b, bytes_written, p->bytes);
        COUNT(b, in_place, first ? n - 1 : 0);
        unpark(b, p, n - m->sum.ours);
        p->summed += (int64_t)(n - m->sum.ours);
        p->list[0] = fan_fast_one(object, data, p->list[n - 1].key, false, false);
        memmove(&p->list[1], &p->list[n], (p->n - n) * sizeof *p->list);
        p->n -= n - 1;
    }
    s->busy = s->taking = false;
    fan_slot_set_owner(s, 0);
    wake(b);
    for (size_t i = 0; i < n; i++)
        if (m->dropped[i].object)
            b->frontend->drop(m->dropped[i].object);
    if (m->dropped != m->few)
        fan_free(m->dropped);
}

/* ---- a sum that is due at once, in place ---- */

/* sum_of: the slot's sum, where one more gradient of this kind goes straight into it (A6): it is the buffer's own and
 * nobody else sees it, gap-free, complete up to `key`, and nothing waits behind it. Else NULL. */
static fan_array *sum_of(const fan_slot *s, const fan_fast_kind *k, int64_t key)
{
    const fan_pass *p = s->p;
    fan_array *a = p->value.array;
    if (k->late || k->weak || p->value.form != FAN_FORM_DENSE || !p->value_ours || p->value_lent ||
        p->value.origin != k->origin || p->accum || p->exact || p->poison)
        return NULL;
    if (s->busy || p->nitems || p->arriving || p->seen != fan_dtype_set_add(0, k->dtype, false))
        return NULL;
    if ((p->keyed < 0) != (key < 0) || (key >= 0 && key != p->next_key) ||
        (s->expected >= 0 && p->count >= s->expected))
        return NULL;
    if (fan_accum_dtype(k->dtype, s->spec->accumulate) != k->dtype || a->ndim != k->ndim)
        return NULL;
    int64_t step = (int64_t)fan_dtype_size(k->dtype);
    for (int i = k->ndim - 1; i >= 0; step *= k->shape[i--])
        if (a->shape[i] != k->shape[i] || (a->strides[i] != step && a->shape[i] > 1))
            return NULL;
    return fan_fast_fits(k->dtype, k->dtype, (uint64_t)step, 2) ? a : NULL;
}

/* Whether the budget is passed with `bytes` more that somebody else holds. */
static bool would_pass(const fan_buffer *b, uint64_t bytes)
{
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed) + bytes;
    if (b->budget != FAN_BUDGET_AUTO)
        return parked > b->budget;
    return parked > b->least && parked > b->limits.held + atomic_load_explicit(&b->alone, memory_order_relaxed);
}

bool fan_buffer_adds_at_once(const fan_buffer *b, size_t slot, const fan_fast_kind *kind, const char *data, int64_t key,
                             bool alone, fan_at_once *out)
{
    assert(slot < b->nslots);
    const fan_slot *s = &b->slots[slot];
    const fan_array *a;
    if (s->p == &fan_pass_none || b->known || !fan_buffer_is_here(b))
        return false;
    /* What is the buffer's alone would have to be asked later, which costs more than to add it. */
    if (!(alone && b->budget == FAN_BUDGET_AUTO) && !would_pass(b, fan_fast_bytes(kind)))
        return false;
    a = sum_of(s, kind, key);
    if (a)
        *out = (fan_at_once){s->p, (char *)a->data, data, (size_t)a->size, key, a->dtype};
    return a != NULL;
}

void fan_buffer_add_at_once(fan_buffer *b, const fan_at_once *one)
{
    fan_pass *p = one->pass;
    uint64_t bytes = (uint64_t)one->count * fan_dtype_size(one->dtype),
             now = atomic_load_explicit(&b->parked, memory_order_relaxed) + (bytes ? bytes : 1);
    if (fan_watched())
        fan_buffer_weigh(b, bytes);
    (void)fan_sum_flat(one->sum, (const char *const[]){one->sum, one->data}, 2, one->count, one->dtype, one->dtype,
                       NULL);
    p->count++;
    p->rules |= FAN_A(6) | FAN_S(3);
    if (one->key >= 0)
        p->next_key = one->key + 1;
    COUNT(b, adds, 1);
    COUNT(b, folds, 1);
    COUNT(b, passes, 1);
    COUNT(b, in_place, 1);
    COUNT(b, bytes_read, 2 * bytes);
    COUNT(b, bytes_written, bytes);
    peak(&b->quick.peak_parked_bytes, now);
    peak(&fan_fast_total.peak_parked_bytes, now);
}

void fan_buffer_unadd_plain(fan_buffer *b, size_t slot, void *object, int64_t key)
{
    fan_fast_list *p = b->slots[slot].plain;
    for (size_t i = p->n; i-- > 0;) {
        if (p->list[i].object != object || p->list[i].key != key)
            continue;
        memmove(&p->list[i], &p->list[i + 1], (p->n - i - 1) * sizeof *p->list);
        p->n--;
        if (p->unsorted)
            fan_keys_remove(p->unsorted, key);
        if (object)
            unpark(b, p, 1);
        else
            p->undefined--;
        b->quick.adds--;
        fan_fast_total.adds--;
        return;
    }
}

fan_fast_peaks fan_buffer_plain_peaks(const fan_buffer *b)
{
    return (fan_fast_peaks){b->quick.peak_parked_bytes, fan_fast_total.peak_parked_bytes};
}

void fan_buffer_plain_peaks_back(fan_buffer *b, const fan_fast_peaks *were)
{
    b->quick.peak_parked_bytes = were->buffer;
    fan_fast_total.peak_parked_bytes = were->process;
}

void fan_buffer_plain_soon(const fan_buffer *b, size_t slot)
{
    if (slot >= b->nslots)
        return;
    const fan_slot *s = &b->slots[slot];
    if (s->p != &fan_pass_none) { /* its sum may be written at once */
        for (size_t at = 0; at < sizeof *s->p; at += 64)
            __builtin_prefetch((const char *)s->p + at, 1);
        return;
    }
    if (!s->plain)
        return;
    const char *p = (const char *)s->plain;
    __builtin_prefetch(p, 1);
    __builtin_prefetch(p + 64, 1);
    __builtin_prefetch(p + 128, 1);
}

/* ---- what is plain becomes items ---- */

static void items_free(fan_buffer *b, fan_item **items, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fan_value_drop(b->frontend, &items[i]->value);
        fan_free(items[i]);
    }
    fan_free(items);
}

/* A10: the dtype that they bring. */
static fan_dtype_set dtypes_of(const fan_spec *spec, const fan_fast_kind *k)
{
    return fan_dtype_set_add(0, k->dtype, k->weak && spec->dtype == FAN_DT_NONE);
}

/* D5: Python ints are checked against the dtype of all, which may come yet. */
static void weak_range(fan_pass *p, const fan_fast_list *plain)
{
    p->has_weak_int = true;
    for (size_t i = 0; plain->kind.dtype == FAN_DT_INT64 && i < plain->n; i++) {
        int64_t n = 0;
        if (plain->list[i].object)
            memcpy(&n, fan_fast_at(&plain->kind, &plain->list[i]), sizeof n);
        p->weak_lo = n < p->weak_lo ? n : p->weak_lo;
        p->weak_hi = n > p->weak_hi ? n : p->weak_hi;
    }
}

/* The items of what is plain, in *items. */
static fan_status items_of(fan_buffer *b, size_t slot, fan_item **items, size_t *made, fan_error *err)
{
    fan_fast_list *plain = b->slots[slot].plain;
    in_order(plain);
    fan_dtype_set own =
        plain->n > plain->undefined ? dtypes_of(b->slots[slot].spec, &plain->kind) : 0; /* no kind yet */
    for (size_t i = plain->summed > 0; i < plain->n; i++) {
        const fan_fast *one = &plain->list[i];
        if (!one->object && one->key < 0)
            continue; /* it only counts (S2) */
        fan_item *it = fan_calloc(sizeof *it);
        if (!it)
            return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
        fan_status status =
            one->object ? b->frontend->plain(one->object, one->data, &plain->kind, &it->value, err) : FAN_OK;
        if (status != FAN_OK) {
            fan_free(it);
            return status == FAN_ERR_STATE ? fan_slot_changed(b, slot, one->key, err) : status;
        }
        it->key = one->key;
        it->parked = true;
        it->own = it->value.form == FAN_FORM_OBJECT || !one->object ? 0 : own;
        it->bytes = one->object ? plain->bytes : 0;
        it->donated = one->donated;
        it->ours = one->ours;
        items[(*made)++] = it;
    }
    return FAN_OK;
}

fan_status fan_slot_materialize(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *plain = s->plain;
    const fan_fast_kind *k = plain ? &plain->kind : NULL;
    size_t n = plain ? plain->n : 0, made = 0;
    fan_status status = FAN_OK;
    fan_value sum = {.dtype = FAN_DT_NONE};
    if (!n)
        return FAN_OK;
    /* Whoever has the slot already is the caller. Nobody else adds or takes meanwhile. */
    bool mine = s->busy, taking = s->taking, some = n > plain->undefined, late = some && k->late;
    fan_pass *p = fan_calloc(sizeof *p);
    fan_item **items = fan_alloc(n * sizeof *items);
    int64_t *shape = fan_alloc(some ? (size_t)k->ndim * sizeof *shape : 0);
    if (!p || !items || !shape)
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot));
    if (late) {
        s->busy = s->taking = true;
        fan_slot_set_owner(s, fan_thread_id());
        fan_slot_unlock(b, slot);
    }
    status = items_of(b, slot, items, &made, err);
    if (status == FAN_OK && plain->summed)
        status = b->frontend->plain(plain->list[0].object, plain->list[0].data, k, &sum, err);
    if (late) {
        fan_slot_lock(b, slot);
        s->taking = taking;
        if (!mine)
            fan_slot_let_go(b, slot);
    }
    FAN_GO(status);
    if (some && k->ndim)
        memcpy(shape, k->shape, (size_t)k->ndim * sizeof *shape);
    p->seen = some ? dtypes_of(s->spec, k) : 0;
    if (some && k->weak)
        weak_range(p, plain);
    p->keyed = plain->list[0].key < 0 ? -1 : 1;
    p->count = fan_fast_count(plain);
    p->device = some ? fan_device_hold(fan_cpu()) : NULL;
    p->rules = some ? FAN_S(3) : 0;
    p->items = items;
    p->nitems = made;
    p->cap = n;
    if (plain->summed) {
        p->value = sum;
        p->value_ours = true;
        p->value_seen = p->seen;
        p->value_key = plain->list[0].key < 0 ? -1 : 0;
        p->next_key = plain->list[0].key + 1;
        p->rules |= FAN_A(6);
    }
    if (s->spec->has_shape || !some) {
        fan_free(shape);
    } else {
        p->shape = shape;
        p->ndim = k->ndim;
        p->shaped = true;
    }
    s->p = p;
    /* The items have holds of their own; nothing is called back, for more than these remain. They are parked as before;
     * who has them is asked anew. */
    unpark(b, plain, 0);
    for (size_t i = 0; i < n; i++)
        if (plain->list[i].object)
            b->frontend->drop(plain->list[i].object);
    emptied(plain);
    return FAN_OK;
done:
    fan_value_drop(b->frontend, &sum);
    if (items)
        items_free(b, items, made);
    fan_free(shape);
    fan_free(p);
    return status;
}

/* The list is empty afterwards; what it held is copied to `few`, or is *many. */
static size_t detach(fan_fast_list *p, fan_fast *few, fan_fast **many, size_t *cap)
{
    size_t n = p->n;
    *many = NULL;
    emptied(p);
    keys_end(p);
    if (n <= FAN_PLAIN_INLINE) {
        memcpy(few, p->list, n * sizeof *few);
        return n;
    }
    *many = p->list;
    *cap = p->cap;
    p->list = p->few;
    p->cap = FAN_PLAIN_INLINE;
    return n;
}

#define KEPT_TERMS 1024 /* longer lists are not kept for the next pass */

static void drop_terms(fan_fast_list *p, fan_fast *few, fan_fast *many, size_t cap, size_t n,
                       void (*drop)(void *object))
{
    const fan_fast *terms = many ? many : few;
    for (size_t i = 0; i < n; i++)
        if (terms[i].object)
            drop(terms[i].object);
    if (many && p->list == p->few && p->n == 0 && cap <= KEPT_TERMS) {
        p->list = many;
        p->cap = cap;
        many = NULL;
    }
    fan_free(many);
}

void fan_fast_drop(fan_buffer *b, size_t slot)
{
    fan_fast_list *p = b->slots[slot].plain;
    FAN_UNCLEARED fan_fast few[FAN_PLAIN_INLINE];
    fan_fast *many = NULL;
    size_t n, cap = 0;
    if (!p || !p->n)
        return;
    unpark(b, p, waiting(p) - p->undefined);
    n = detach(p, few, &many, &cap);
    drop_terms(p, few, many, cap, n, b->frontend->drop);
}

/* ---- take ---- */


bool fan_fast_fits(fan_dtype dtype, fan_dtype acc, uint64_t bytes, size_t n)
{
    if (!fan_sum_flat_fits(dtype, acc) || (n > FAN_PLAIN_MOST && acc != dtype))
        return false;
    return bytes <= FAN_PLAIN_BYTES || (bytes < FAN_POOL_FROM && n <= 8 && (n + 1) * bytes < FAR);
}

/* What is undefined goes behind the others, which keep their order. */
static void undefined_last(fan_fast_list *p)
{
    for (size_t i = 0, kept = 0; kept < p->n - p->undefined; i++) {
        fan_fast one = p->list[i];
        if (!one.object)
            continue;
        p->list[i] = p->list[kept];
        p->list[kept++] = one;
    }
}

/* Whether a scale is one for the sum of this kind, and for the loops that are at hand here; what is wrong with it the
 * general path says. */
static bool scales(const fan_take *how, fan_dtype dtype, fan_dtype acc)
{
    char kind = fan_dtype_kind(dtype);
    if (!how->scale.on)
        return true;
    return kind == 'c' ? acc == dtype : kind == 'f' ? how->real : how->integral;
}

static bool claim(fan_slot *s, const fan_take *how, bool learns)
{
    fan_fast_list *p = s->plain;
    size_t n = p ? p->n - p->undefined : 0;
    if (s->p != &fan_pass_none || s->busy || s->targets || (learns && n > FAN_PLAIN_MOST) ||
        (s->expected >= 0 && s->expected != fan_fast_count(p)))
        return false;
    if (n > 1 || (n && (how->scale.on || how->writable))) {
        fan_dtype acc = fan_accum_dtype(p->kind.dtype, s->spec->accumulate);
        if (!fan_fast_fits(p->kind.dtype, acc, p->bytes, n) || !scales(how, p->kind.dtype, acc))
            return false;
    }
    if (p)
        in_order(p);
    if (p && p->undefined)
        undefined_last(p);
    s->busy = s->taking = true;
    fan_slot_set_owner(s, fan_thread_id());
    return true;
}

static void let_go(fan_buffer *b, fan_span span)
{
    for (size_t i = span.first; i < span.end; i++) {
        fan_slot *s = &b->slots[i];
        s->busy = s->taking = false;
        fan_slot_set_owner(s, 0);
        if (s->plain && s->plain->undefined && s->plain->list[0].key >= 0)
            qsort(s->plain->list, s->plain->n, sizeof *s->plain->list, by_key); /* undefined_last */
    }
    wake(b);
}

bool fan_buffer_take_plain(fan_buffer *b, fan_span span, const fan_take *how)
{
    if (!fan_buffer_is_here(b))
        return false;
    for (size_t i = span.first; i < span.end; i++)
        if (knows_away(b, i) || !claim(&b->slots[i], how, b->known)) {
            let_go(b, (fan_span){span.first, i});
            return false;
        }
    return true;
}

void fan_buffer_plain_meanwhile(fan_buffer *b)
{
    fan_call_acted();
    fan_yield();
    fan_buffer_seen(b, SIZE_MAX, FAN_TOUCH_WRITES);
}

fan_fast_sum fan_buffer_plain_at(fan_buffer *b, size_t slot)
{
    const fan_fast_list *p = b->slots[slot].plain;
    size_t n = p ? p->n - p->undefined : 0;
    return n ? (fan_fast_sum){&p->kind, p->list, n, p->summed > 0} : (fan_fast_sum){NULL, NULL, 0, false};
}

bool fan_buffer_plain_may_keep(const fan_buffer *b, size_t slot, bool alone)
{
    const fan_slot *s = &b->slots[slot];
    const fan_fast_list *p = s->plain;
    if (fan_accum_dtype(p->kind.dtype, s->spec->accumulate) != p->kind.dtype)
        return false;
    if (alone || b->nslots == 1 || p->list[0].key < 0 || p->list[0].donated)
        return true;
    int64_t defined = p->list[p->n - p->undefined - 1].key, last = p->list[p->n - 1].key,
            from = p->summed ? p->list[0].key : 0;
    return (last > defined ? last : defined) - from == (int64_t)p->n - 1; /* of keys that are all different */
}

/* ---- out= ---- */

static int by_address(const void *a, const void *b)
{
    const fan_fast_out *x = a, *y = b;
    return (x->data > y->data) - (x->data < y->data);
}

#define DIGIT 11 /* bits; where there are few outs, 8 */
#define FEW 48   /* and less than that are sorted otherwise */

/* By address, a digit at a time: outs of one heap differ in few. */
static void sort(fan_fast_out *outs, size_t n)
{
    uintptr_t least = UINTPTR_MAX, most = 0;
    for (size_t i = 0; i < n; i++) {
        uintptr_t at = (uintptr_t)outs[i].data;
        least = at < least ? at : least;
        most = at > most ? at : most;
    }
    const int bits = n < (size_t)1 << DIGIT ? 8 : DIGIT;
    const size_t digits = (size_t)1 << bits;
    fan_fast_out *room = n >= FEW && n <= UINT32_MAX ? fan_alloc(n * sizeof *room) : NULL, *from = outs, *to = room;
    if (!room) {
        qsort(outs, n, sizeof *outs, by_address);
        return;
    }
    for (int shift = 0; shift < 64 && (most - least) >> shift; shift += bits) {
        FAN_UNCLEARED uint32_t ends[(1 << DIGIT) + 1];
        memset(ends, 0, (digits + 1) * sizeof *ends);
#define DIGIT_OF(one) (((uintptr_t)(one).data - least) >> shift & (digits - 1))
        for (size_t i = 0; i < n; i++)
            ends[DIGIT_OF(from[i]) + 1]++;
        for (size_t i = 0; i < digits; i++)
            ends[i + 1] += ends[i];
        for (size_t i = 0; i < n; i++)
            to[ends[DIGIT_OF(from[i])]++] = from[i];
        fan_fast_out *swap = from;
        from = to;
        to = swap;
    }
    if (from != outs)
        memcpy(outs, from, n * sizeof *outs);
    fan_free(room);
}

/* How many outs begin before `end`, looked for around `from`: terms mostly lie in the order of their slots, and outs
 * too. */
static size_t before(const fan_fast_out *outs, size_t n, const char *end, size_t from)
{
    size_t lo = 0, hi = n;
    if (from < n && outs[from].data < end) {
        lo = from + 1;
        for (size_t step = 1; lo + step <= n; step *= 2) {
            if (outs[lo + step - 1].data >= end) {
                hi = lo + step - 1;
                break;
            }
            lo += step;
        }
    } else {
        hi = from;
        for (size_t step = 1; step <= hi; step *= 2) {
            if (outs[hi - step].data < end) {
                lo = hi - step + 1;
                break;
            }
            hi -= step;
        }
    }
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (outs[mid].data < end)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool fan_buffer_plain_apart(fan_buffer *b, fan_span span, fan_fast_out *outs, size_t n)
{
    size_t near[8] = {0}; /* where the last k-th term was */
    bool sorted = true;
    for (size_t i = 1; i < n; i++)
        sorted = sorted && outs[i - 1].data < outs[i].data;
    if (!sorted)
        sort(outs, n);
    for (size_t i = 1; i < n; i++)
        if (outs[i - 1].data + outs[i - 1].bytes > outs[i].data)
            return false;
    for (size_t i = span.first; n && i < span.end; i++) {
        const fan_fast_list *p = b->slots[i].plain;
        for (size_t k = 0; p && k < p->n - p->undefined; k++) {
            const char *data = p->list[k].data;
            size_t at = before(outs, n, data + p->bytes, near[k % 8]);
            near[k % 8] = at;
            if (!at || outs[at - 1].data + outs[at - 1].bytes <= data)
                continue;
            if (outs[at - 1].slot != i || outs[at - 1].data != data || p->n > FAN_PLAIN_MOST)
                return false;
        }
    }
    return true;
}

/* The same with statistics, of FAN_PLAIN_MOST terms at most. */
static void fold_watched(const fan_fast_list *p, fan_dtype acc, const fan_take *how, char *out, fan_stats *stats)
{
    FAN_UNCLEARED fan_array array[FAN_PLAIN_MOST + 1];
    FAN_UNCLEARED fan_operand in[FAN_PLAIN_MOST];
    size_t n = p->n - p->undefined;
    for (size_t i = 0; i < n; i++) {
        array_over(&array[i], &p->kind, fan_fast_at(&p->kind, &p->list[i]));
        in[i] = (fan_operand){.array = &array[i], .acc = acc};
    }
    if (n == 1 && !how->scale.on && out == p->list[0].data) { /* it is handed through */
        fan_stats_of(&array[0], stats);
        return;
    }
    array_over(&array[n], &p->kind, out);
    fan_sum(&array[n], in, n, &(fan_sum_how){.scale = how->scale, .stats = stats});
}

void fan_buffer_plain_fold(fan_buffer *b, size_t slot, const fan_take *how, char *out, fan_stats *stats)
{
    const fan_slot *s = &b->slots[slot];
    const fan_fast_list *p = s->plain;
    fan_dtype acc = fan_accum_dtype(p->kind.dtype, s->spec->accumulate);
    FAN_UNCLEARED const char *src[FAN_PLAIN_MOST];
    _Alignas(16) char factor[16];
    size_t n = p->n - p->undefined, count = elements(&p->kind);
    if (stats) {
        fold_watched(p, acc, how, out, stats);
        return;
    }
    if (n == 1 && !how->scale.on) {
        memmove(out, fan_fast_at(&p->kind, &p->list[0]), (size_t)size_of(&p->kind));
        return;
    }
    if (how->scale.on)
        fan_scale_as(&how->scale, acc, factor);
    for (size_t done = 0; done < n;) {
        size_t k = 0;
        if (done)
            src[k++] = out;
        for (; k < FAN_PLAIN_MOST && done < n; done++)
            src[k++] = fan_fast_at(&p->kind, &p->list[done]);
        (void)fan_sum_flat(out, src, k, count, p->kind.dtype, acc, how->scale.on && done == n ? factor : NULL);
    }
}

bool fan_buffer_learns(const fan_buffer *b) { return b->known; }

void fan_buffer_plain_learn(fan_buffer *b, size_t slot, const fan_stats *stats)
{
    fan_sum_stats *known = &b->known[slot];
    *known = (fan_sum_stats){.yes = true, .stats = {.count = UINT64_MAX}};
    if (!stats)
        return;
    known->stats = *stats;
    known->bad = stats->nonfinite && stats->bad != SIZE_MAX;
    known->bad_key = known->bad ? b->slots[slot].plain->list[stats->bad].key : -1;
}

void fan_buffer_plain_folded(fan_buffer *b, size_t slot, bool in_place, bool copied_one)
{
    const fan_fast_list *p = b->slots[slot].plain;
    size_t n = p->n - p->undefined;
    uint64_t bytes = size_of(&p->kind);
    COUNT(b, passes, 1);
    COUNT(b, bytes_read, n * bytes);
    COUNT(b, bytes_written, bytes);
    if (n > 1)
        COUNT(b, folds, 1);
    if (in_place)
        COUNT(b, in_place, n - 1);
    if (copied_one)
        COUNT(b, copies, 1);
}

void fan_fast_sum_of(const fan_fast_kind *kind, const char *const *src, size_t n, char *out)
{
    (void)fan_sum_flat(out, src, n, elements(kind), kind->dtype, fan_dtype_accumulate(kind->dtype), NULL);
}

void fan_fast_summed(uint64_t bytes, size_t n)
{
    fan_fast_total.adds += n;
    fan_fast_total.folds++;
    fan_fast_total.passes++;
    fan_fast_total.bytes_read += n * bytes;
    fan_fast_total.bytes_written += bytes;
}

/* Objects whose end may call back. Where there is no memory for more they are dropped at once: a call back into a slot
 * that is still claimed is then refused. */
typedef struct farewell {
    void *few[64], **all;
    size_t n, cap;
} farewell;

static bool later(farewell *f, void *object)
{
    if (f->n == f->cap) {
        void **more = fan_realloc(f->all == f->few ? NULL : f->all, 2 * f->cap * sizeof *more);
        if (!more)
            return false;
        if (f->all == f->few)
            memcpy(more, f->few, sizeof f->few);
        f->all = more;
        f->cap *= 2;
    }
    f->all[f->n++] = object;
    return true;
}

void fan_buffer_plain_done(fan_buffer *b, fan_span span, bool taken, bool (*part)(void *object))
{
    FAN_UNCLEARED farewell f;
    if (!taken) {
        let_go(b, span);
        return;
    }
    f.all = f.few;
    f.n = 0;
    f.cap = sizeof f.few / sizeof *f.few;
    for (size_t i = span.first; i < span.end; i++) {
        fan_fast_list *p = b->slots[i].plain;
        size_t n = p ? p->n : 0;
        for (size_t k = 0; k < n; k++) {
            void *object = p->list[k].object;
            if (object && !part(object) && !later(&f, object))
                b->frontend->drop(object);
        }
        if (n) {
            unpark(b, p, waiting(p) - p->undefined);
            emptied(p);
            if (p->cap > KEPT_TERMS) {
                fan_free(p->list);
                p->list = p->few;
                p->cap = FAN_PLAIN_INLINE;
            }
        }
        b->slots[i].busy = b->slots[i].taking = false;
        fan_slot_set_owner(&b->slots[i], 0);
    }
    wake(b);
    for (size_t i = 0; i < f.n; i++)
        b->frontend->drop(f.all[i]);
    if (f.all != f.few)
        fan_free(f.all);
}
