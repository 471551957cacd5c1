#include "buffer/plain.h"

#include "array/convert.h"
#include "base/mem.h"
#include "buffer/slot.h"

#include <string.h>

fan_counters fan_plain_total;

void fan_plain_counted(const fan_counters *quick, fan_counters *out)
{
    uint64_t peak = out->peak_parked_bytes;
#define X(name) out->name += quick->name;
    FAN_COUNTER_LIST(X)
#undef X
    out->peak_parked_bytes = peak > quick->peak_parked_bytes ? peak : quick->peak_parked_bytes;
}

#define COUNT(b, name, k) ((b)->quick.name += (k), fan_plain_total.name += (k))

static void peak(uint64_t *highest, uint64_t now)
{
    if (now > *highest)
        *highest = now;
}

void fan_plains_init(fan_plains *p)
{
    p->n = 0;
    p->cap = FAN_PLAIN_INLINE;
    p->list = p->few;
}

void fan_plains_fini(fan_slot *s, bool inside)
{
    if (!s->plain)
        return;
    if (s->plain->list != s->plain->few)
        fan_free(s->plain->list);
    if (!inside)
        fan_free(s->plain);
    s->plain = NULL;
}

bool fan_plain_same(const fan_plain_kind *a, const fan_plain_kind *b)
{
    if (a->dtype != b->dtype || a->origin != b->origin || a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i])
            return false;
    return true;
}

/* What the declaration of a slot asks of its first gradient. */
static bool welcome(const fan_spec *spec, const fan_plain_kind *k)
{
    if ((spec->dtype != FAN_NO_DTYPE && spec->dtype != k->dtype) || spec->combine || spec->exact || (spec->device && spec->device != fan_cpu()))
        return false;
    if (spec->accumulate != FAN_NO_DTYPE && fan_accum_dtype(k->dtype, spec->accumulate) == FAN_NO_DTYPE)
        return false;
    if (!spec->has_shape)
        return true;
    return spec->ndim == k->ndim && memcmp(spec->shape, k->shape, (size_t)k->ndim * sizeof *k->shape) == 0;
}

static uint64_t bytes_of(const fan_plain_kind *k)
{
    uint64_t n = fan_dtype_size(k->dtype);
    for (int i = 0; i < k->ndim; i++)
        n *= (uint64_t)k->shape[i];
    return n ? n : 1; /* so that what has no bytes passes a budget of 0, too */
}

/* Where a key belongs; SIZE_MAX: it is there already. */
static size_t place(const fan_plains *p, int64_t key)
{
    size_t lo = 0, hi = p->n;
    if (!p->n || p->list[p->n - 1].key < key)
        return p->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (p->list[mid].key < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    return p->list[lo].key == key ? SIZE_MAX : lo;
}

static bool grow(fan_plains *p)
{
    size_t cap = p->cap * 2;
    fan_plain *more = fan_realloc(p->list == p->few ? NULL : p->list, cap * sizeof *more);
    if (!more)
        return false;
    if (p->list == p->few)
        memcpy(more, p->few, sizeof p->few);
    p->list = more;
    p->cap = cap;
    return true;
}

static bool park(fan_buffer *b, size_t slot, const fan_plain_kind *kind, void *object, char *data, int64_t key)
{
    fan_slot *s = &b->slots[slot];
    fan_plains *p = s->plain;
    size_t at;
    if (s->p != &fan_pass_none || s->busy || b->known)
        return false;
    if (!p) {
        p = fan_alloc(sizeof *p);
        if (!p)
            return false;
        fan_plains_init(p);
        s->plain = p;
    }
    if (p->n == 0) {
        if ((s->spec != &b->undeclared || b->undeclared.accumulate != FAN_NO_DTYPE || b->undeclared.exact) && !welcome(s->spec, kind))
            return false;
        p->kind = *kind;
        p->bytes = bytes_of(kind);
    } else if (!fan_plain_same(&p->kind, kind) || (p->list[0].key < 0) != (key < 0)) {
        return false;
    }
    if (s->expected >= 0 && (int64_t)p->n >= s->expected)
        return false;
    at = key < 0 ? p->n : place(p, key);
    if (at == SIZE_MAX || (p->n == p->cap && !grow(p)))
        return false;
    if (at < p->n)
        memmove(&p->list[at + 1], &p->list[at], (p->n - at) * sizeof *p->list);
    p->list[at] = (fan_plain){object, data, key};
    p->n++;
    return true;
}

bool fan_buffer_add_plain(fan_buffer *b, size_t slot, const fan_plain_kind *kind, void *object, char *data, int64_t key, bool *due)
{
    if (!park(b, slot, kind, object, data, key))
        return false;
    uint64_t bytes = b->slots[slot].plain->bytes;
    uint64_t now = atomic_fetch_add_explicit(&b->parked, bytes, memory_order_relaxed) + bytes;
    COUNT(b, adds, 1);
    peak(&b->quick.peak_parked_bytes, now);
    peak(&fan_plain_total.peak_parked_bytes, now);
    *due = now > b->budget;
    return true;
}

void fan_buffer_unadd_plain(fan_buffer *b, size_t slot, void *object, int64_t key)
{
    fan_plains *p = b->slots[slot].plain;
    for (size_t i = p->n; i-- > 0;) {
        if (p->list[i].object != object || p->list[i].key != key)
            continue;
        memmove(&p->list[i], &p->list[i + 1], (p->n - i - 1) * sizeof *p->list);
        p->n--;
        atomic_fetch_sub_explicit(&b->parked, p->bytes, memory_order_relaxed);
        b->quick.adds--;
        fan_plain_total.adds--;
        return;
    }
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

/* The items of what is plain, in *items. */
static fan_status items_of(fan_buffer *b, size_t slot, fan_item **items, size_t *made, fan_error *err)
{
    const fan_plains *plain = b->slots[slot].plain;
    fan_dtype_set own = fan_dtype_set_add(0, plain->kind.dtype, false);
    for (; *made < plain->n; ++*made) {
        const fan_plain *one = &plain->list[*made];
        fan_item *it = fan_calloc(sizeof *it);
        if (!it)
            return fan_fail(err, FAN_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
        fan_status status = b->frontend->plain(one->object, one->data, &plain->kind, &it->value, err);
        if (status != FAN_OK) {
            fan_free(it);
            return status;
        }
        it->key = one->key;
        it->parked = true;
        it->own = it->value.form == FAN_OBJECT ? 0 : own;
        it->bytes = plain->bytes;
        items[*made] = it;
    }
    return FAN_OK;
}

fan_status fan_slot_thicken(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_plains *plain = s->plain;
    const fan_plain_kind *k = plain ? &plain->kind : NULL;
    size_t n = plain ? plain->n : 0, made = 0;
    fan_status status = FAN_OK;
    if (!n)
        return FAN_OK;
    /* Whoever has the slot already is the caller. Nobody else adds or takes meanwhile. */
    bool mine = s->busy, taking = s->taking, late = k->late;
    fan_pass *p = fan_calloc(sizeof *p);
    fan_item **items = fan_alloc(n * sizeof *items);
    int64_t *shape = fan_alloc((size_t)k->ndim * sizeof *shape);
    if (!p || !items || !shape)
        FAN_GO(fan_fail(err, FAN_NOMEM, "%s: slot %zu: out of memory", b->name, slot));
    if (late) {
        s->busy = s->taking = true;
        s->owner = fan_thread_id();
        fan_slot_unlock(b, slot);
    }
    status = items_of(b, slot, items, &made, err);
    if (late) {
        fan_slot_lock(b, slot);
        s->taking = taking;
        if (!mine)
            fan_slot_let_go(b, slot);
    }
    FAN_GO(status);
    if (k->ndim)
        memcpy(shape, k->shape, (size_t)k->ndim * sizeof *shape);
    p->seen = fan_dtype_set_add(0, k->dtype, false);
    p->keyed = plain->list[0].key < 0 ? -1 : 1;
    p->count = (int64_t)n;
    p->device = fan_device_hold(fan_cpu());
    p->rules = FAN_S(3);
    p->items = items;
    p->nitems = p->cap = n;
    if (s->spec->has_shape) {
        fan_free(shape);
    } else {
        p->shape = shape;
        p->ndim = k->ndim;
        p->shaped = true;
    }
    s->p = p;
    /* The items have holds of their own; nothing is called back, for more than these remain. */
    for (size_t i = 0; i < n; i++)
        b->frontend->drop(plain->list[i].object);
    plain->n = 0;
    return FAN_OK;
done:
    if (items)
        items_free(b, items, made);
    fan_free(shape);
    fan_free(p);
    return status;
}

/* The list is empty afterwards; what it held is copied to `few`, or is *many. */
static size_t detach(fan_plains *p, fan_plain *few, fan_plain **many, size_t *cap)
{
    size_t n = p->n;
    *many = NULL;
    p->n = 0;
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

static void drop_terms(fan_plains *p, fan_plain *few, fan_plain *many, size_t cap, size_t n, void (*drop)(void *object))
{
    const fan_plain *terms = many ? many : few;
    for (size_t i = 0; i < n; i++)
        drop(terms[i].object);
    if (many && p->list == p->few && p->n == 0 && cap <= KEPT_TERMS) {
        p->list = many;
        p->cap = cap;
        many = NULL;
    }
    fan_free(many);
}

void fan_plain_drop(fan_buffer *b, size_t slot)
{
    fan_plains *p = b->slots[slot].plain;
    FAN_UNCLEARED fan_plain few[FAN_PLAIN_INLINE];
    fan_plain *many = NULL;
    size_t n, cap = 0;
    if (!p || !p->n)
        return;
    atomic_fetch_sub_explicit(&b->parked, p->n * p->bytes, memory_order_relaxed);
    n = detach(p, few, &many, &cap);
    drop_terms(p, few, many, cap, n, b->frontend->drop);
}

/* ---- take ---- */

static bool claim(fan_slot *s)
{
    const fan_plains *p = s->plain;
    if (s->p != &fan_pass_none || s->busy || (s->expected >= 0 && s->expected != (p ? (int64_t)p->n : 0)))
        return false;
    if (p && p->n > 1) {
        fan_dtype acc = fan_accum_dtype(p->kind.dtype, s->spec->accumulate);
        if (p->bytes > FAN_PLAIN_BYTES || (p->n > FAN_PLAIN_MOST && acc != p->kind.dtype) || !fan_sum_flat_fits(p->kind.dtype, acc))
            return false;
    }
    s->busy = s->taking = true;
    s->owner = fan_thread_id();
    return true;
}

static void wake(fan_buffer *b)
{
    for (size_t i = 0; i < b->nlocks && atomic_load(&b->waiting); i++) {
        fan_slot_lock(b, i);
        fan_cond_broadcast(&b->changed[i]);
        fan_slot_unlock(b, i);
    }
}

static void let_go(fan_buffer *b, size_t slots)
{
    for (size_t i = 0; i < slots; i++) {
        fan_slot *s = &b->slots[i];
        s->busy = s->taking = false;
        s->owner = 0;
    }
    wake(b);
}

bool fan_buffer_take_plain(fan_buffer *b)
{
    for (size_t i = 0; i < b->nslots; i++)
        if (b->known || !claim(&b->slots[i])) {
            let_go(b, i);
            return false;
        }
    return true;
}

fan_plain_sum fan_buffer_plain_at(fan_buffer *b, size_t slot)
{
    fan_plains *p = b->slots[slot].plain;
    return p ? (fan_plain_sum){&p->kind, p->list, p->n} : (fan_plain_sum){NULL, NULL, 0};
}

void fan_buffer_plain_fold(fan_buffer *b, size_t slot, char *out, bool in_place)
{
    const fan_slot *s = &b->slots[slot];
    const fan_plains *p = s->plain;
    fan_dtype acc = fan_accum_dtype(p->kind.dtype, s->spec->accumulate);
    FAN_UNCLEARED const char *src[FAN_PLAIN_MOST];
    size_t count = 1;
    for (int i = 0; i < p->kind.ndim; i++)
        count *= (size_t)p->kind.shape[i];
    for (size_t done = 0; done < p->n;) {
        size_t k = 0;
        if (done)
            src[k++] = out;
        while (k < FAN_PLAIN_MOST && done < p->n)
            src[k++] = p->list[done++].data;
        (void)fan_sum_flat(out, src, k, count, p->kind.dtype, acc);
    }
    COUNT(b, folds, 1);
    COUNT(b, passes, 1);
    COUNT(b, bytes_read, p->n * p->bytes);
    COUNT(b, bytes_written, p->bytes);
    if (in_place)
        COUNT(b, in_place, p->n - 1);
}

void fan_plain_sum_of(const fan_plain_kind *kind, const char *const *src, size_t n, char *out)
{
    size_t count = 1;
    for (int i = 0; i < kind->ndim; i++)
        count *= (size_t)kind->shape[i];
    (void)fan_sum_flat(out, src, n, count, kind->dtype, fan_dtype_accumulate(kind->dtype));
    fan_plain_total.adds += n;
    fan_plain_total.folds++;
    fan_plain_total.passes++;
    fan_plain_total.bytes_read += n * count * fan_dtype_size(kind->dtype);
    fan_plain_total.bytes_written += count * fan_dtype_size(kind->dtype);
}

void fan_buffer_plain_done(fan_buffer *b, bool taken, void (*drop)(void *object))
{
    if (!taken) {
        let_go(b, b->nslots);
        return;
    }
    for (size_t i = 0; i < b->nslots; i++) {
        fan_plains *p = b->slots[i].plain;
        FAN_UNCLEARED fan_plain few[FAN_PLAIN_INLINE];
        fan_plain *many = NULL;
        size_t n = p ? p->n : 0, cap = 0;
        if (n) {
            atomic_fetch_sub_explicit(&b->parked, n * p->bytes, memory_order_relaxed);
            n = detach(p, few, &many, &cap);
        }
        /* What is dropped may call back, and add to this very slot. */
        b->slots[i].busy = b->slots[i].taking = false;
        if (n)
            drop_terms(p, few, many, cap, n, drop);
    }
    wake(b);
}
