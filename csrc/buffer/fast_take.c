/* fast_take: a take of the fast path. */
#include "buffer/fast_part.h"

#include "base/mem.h"

#include <string.h>

#define AHEAD 8
#define FEW_OUTS 8
#define FAR 500 /* slots that no near cache holds */

/* One take under way. */
typedef struct taking {
    fan_buffer *b;
    fan_span span;
    const fan_take *how;
    const fan_fast_outs *outs;
    void **results;
    fan_fast_scratch scratch;
    fan_flat inline_outs[FEW_OUTS], *written; /* the arrays of the caller's that are written */
    bool inline_given[FEW_OUTS], *given;      /* of each slot: the caller named an array for its sum */
    size_t nwritten;
    bool asks;     /* some terms are of a kind that is checked at use */
    bool announce; /* some of the arrays that are written are of a library that counts writes */
} taking;

static fan_fast_list *list_at(const fan_buffer *b, size_t slot) { return b->slots[slot].fast; }

/* defined: the terms of a slot's sum; 0: it is undefined. */
static size_t defined(const fan_fast_list *p) { return p ? fan_fast_list_defined(p) : 0; }

static fan_dtype accum_of(const fan_buffer *b, size_t slot)
{
    return fan_accum_dtype(list_at(b, slot)->kind.dtype, b->slots[slot].spec->accumulate);
}

/* ---- 1. claim ---- */

static bool claim_slot(fan_buffer *b, size_t slot, const fan_take *how)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *p = s->fast;
    if (s->p != &fan_pass_none || s->busy || s->targets || fan_fast_stats_on_device(b, slot) ||
        (s->expected >= 0 && s->expected != fan_fast_list_count(p)))
        return false;
    if (p && p->n) {
        if (how->scale.on && fan_fast_list_defined(p) && !fan_fast_scale_fits(how, p->kind.dtype, accum_of(b, slot)))
            return false;
        fan_fast_list_sort(p);
        if (p->undefined)
            fan_fast_list_undefined_last(p);
    }
    fan_fast_claim(s);
    return true;
}

static void give_back(fan_buffer *b, fan_span span)
{
    for (size_t i = span.first; i < span.end; i++) {
        fan_fast_list *p = b->slots[i].fast;
        if (p && p->undefined && p->terms[0].key >= 0)
            fan_fast_list_by_key(p);
    }
    fan_fast_let_go(b, span);
}

static bool claim_all(fan_buffer *b, fan_span span, const fan_take *how)
{
    for (size_t i = span.first; i < span.end; i++)
        if (!claim_slot(b, i, how)) {
            give_back(b, (fan_span){span.first, i});
            return false;
        }
    return true;
}

/* ---- 2. where does each sum go? ---- */

/* reads_all: a single term is read, too, and not just handed through. */
static bool reads_all(const fan_buffer *b, const fan_take *how, const fan_fast_outs *outs)
{
    return outs || how->scale.on || how->writable || b->sum_stats;
}

/* stays_in_int64: of a sum of Python ints. */
static bool stays_in_int64(const fan_fast_list *p, const fan_take *how)
{
    int64_t total = 0, n;
    bool over = how->scale.on;
    for (size_t k = 0; k < fan_fast_list_defined(p) && !over; k++) {
        memcpy(&n, fan_fast_data(&p->kind, &p->terms[k]), sizeof n);
        over = __builtin_add_overflow(total, n, &total);
    }
    return !over;
}

/* fetch_terms: what belongs to the terms of a slot AHEAD of this one. */
static void fetch_terms(const taking *t, size_t slot, bool memory)
{
    size_t at = slot + AHEAD < t->span.end ? slot + AHEAD : slot;
    const fan_fast_list *p = list_at(t->b, at);
    fan_fast_prefetch(t->b, slot + 2 * AHEAD);
    for (size_t k = 0; k < defined(p); k++)
        __builtin_prefetch(memory ? (const void *)p->terms[k].data : p->terms[k].object);
}

/* keeps_keys: where other slots are taken with it, no key may be missing before the first term becomes the sum. */
static bool keeps_keys(const taking *t, const fan_fast_list *p)
{
    if (t->how->one || t->b->nslots == 1 || p->terms[0].key < 0 || p->terms[0].donated)
        return true;
    int64_t defined_last = p->terms[fan_fast_list_defined(p) - 1].key, last = p->terms[p->n - 1].key,
            from = p->summed ? p->terms[0].key : 0;
    return (last > defined_last ? last : defined_last) - from == (int64_t)p->n - 1; /* they are all different */
}

/* result_of: what the sum of a slot is written into, or is already: with a hold of the caller's. NULL: not for the
 * fast path. */
static void *result_of(taking *t, size_t slot)
{
    fan_fast_list *p = list_at(t->b, slot);
    const fan_fast_frontend *fast = t->b->frontend->fast;
    const fan_scale *scale = t->how->scale.on ? &t->how->scale : NULL;
    size_t n = fan_fast_list_defined(p);
    void *first = p->terms[0].object;
    p->out = p->terms[0].data;
    if (n == 1 && !scale && (!t->how->writable || fan_fast_reusable(t->b, slot, 1, p->kind.dtype))) {
        fast->hold(first);
        return first;
    }
    fan_dtype acc = accum_of(t->b, slot);
    if (p->kind.scalar) {
        _Alignas(16) char value[16];
        fan_fast_sum_terms(&p->kind, p->terms, n, acc, scale, value,
                           fan_fast_needs_scratch(p, n, acc, false) ? &t->scratch : NULL, NULL);
        return fast->number(&p->kind, value);
    }
    if (n > 1 && !scale && keeps_keys(t, p) && fan_fast_reusable(t->b, slot, n, acc)) {
        fast->hold(first);
        return first;
    }
    return fast->fresh(first, &p->kind, &p->out);
}

/* place_out: into the caller's array, where there is one for this slot; false: not for the fast path. */
static bool place_out(taking *t, size_t slot)
{
    fan_fast_list *p = list_at(t->b, slot);
    fan_flat *to = &t->written[t->nwritten];
    bool some = defined(p);
    void *object = NULL;
    fan_fast_where where = t->outs->at(t->outs->ctx, slot, some ? &p->kind : NULL, &object, &to->data, &to->bytes);
    if (where != FAN_FAST_THERE)
        return where != FAN_FAST_REFUSED;
    to->owner = slot;
    t->nwritten++;
    t->given[slot - t->span.first] = true;
    if (some) {
        t->announce = t->announce || p->kind.check_at_use;
        t->results[slot - t->span.first] = object;
        p->out = to->data;
    } else {
        t->b->frontend->drop(object);
    }
    return true;
}

/* sums_here: whether the sum of a slot is one for the fast path: a large array is handed through at most, and of Python
 * ints the general path says what does not fit. */
static bool sums_here(const taking *t, const fan_fast_list *p)
{
    if (fan_fast_is_large(p->size) && reads_all(t->b, t->how, t->outs))
        return false;
    return !p->kind.weak || p->kind.dtype != FAN_DT_INT64 || stays_in_int64(p, t->how);
}

static bool place_all(taking *t)
{
    bool far = t->span.end - t->span.first >= FAR;
    for (size_t i = t->span.first; t->outs && i < t->span.end; i++)
        if (!place_out(t, i))
            return false;
    if (t->outs && !fan_fast_outs_disjoint(t->b, t->span, t->written, t->nwritten))
        return false;
    for (size_t i = t->span.first; i < t->span.end; i++) {
        void **result = &t->results[i - t->span.first];
        const fan_fast_list *p = list_at(t->b, i);
        if (far)
            fetch_terms(t, i, false);
        if (!defined(p))
            continue;
        t->asks = t->asks || p->kind.check_at_use;
        if (!sums_here(t, p) || (!*result && !(*result = result_of(t, i))))
            return false;
    }
    return true;
}

/* room_for: scratch for the slot with the most terms that needs it. False: no memory. */
static bool room_for(taking *t, fan_array *arrays, fan_operand *in)
{
    size_t most = 0;
    t->scratch = (fan_fast_scratch){arrays, in};
    for (size_t i = t->span.first; i < t->span.end; i++) {
        const fan_fast_list *p = list_at(t->b, i);
        size_t n = defined(p);
        if (n > FAN_FAST_TERMS && n > most && fan_fast_needs_scratch(p, n, accum_of(t->b, i), t->b->sum_stats))
            most = n;
    }
    if (!most)
        return true;
    t->scratch.arrays = fan_alloc((most + 1) * sizeof *arrays);
    t->scratch.in = fan_alloc(most * sizeof *in);
    return t->scratch.arrays && t->scratch.in;
}

/* ---- 3. is what will be read what it was? ---- */

static bool all_unchanged(const fan_frontend *f, const fan_fast_list *p)
{
    for (size_t k = 0; k < fan_fast_list_defined(p); k++)
        if (!f->fast->is_unchanged(p->terms[k].object, &p->kind, p->terms[k].data))
            return false;
    return true;
}

/* ask_libraries: whether the memory of every term holds its value, and a term that is handed out may be; and libraries
 * that count writes to their arrays are told of ours. They may do anything meanwhile: it comes before what is looked
 * at, and behind what is made; they may keep what they are asked of: of our own, which may be written, nobody is. */
static bool ask_libraries(const taking *t)
{
    const fan_fast_frontend *fast = t->b->frontend->fast;
    for (size_t i = t->span.first; t->asks && i < t->span.end; i++) {
        const fan_fast_list *p = list_at(t->b, i);
        if (defined(p) && p->kind.check_at_use && !p->terms[0].ours &&
            t->results[i - t->span.first] == p->terms[0].object && !fast->is_detached(p->terms[0].object))
            return false;
        for (size_t k = 0; k < defined(p) && p->kind.check_at_use; k++)
            if (!p->terms[k].ours && !fast->has_own_value(p->terms[k].object))
                return false;
    }
    for (size_t i = 0; t->announce && i < t->nwritten; i++) {
        void *to = t->results[t->written[i].owner - t->span.first];
        if (to && !fast->wrote(to))
            return false;
    }
    return true;
}

static bool all_readable(const taking *t)
{
    const fan_frontend *f = t->b->frontend;
    bool reads = reads_all(t->b, t->how, t->outs), far = t->span.end - t->span.first >= FAR;
    for (size_t i = t->span.first; i < t->span.end; i++) {
        const fan_fast_list *p = list_at(t->b, i);
        size_t n = defined(p);
        if (far)
            fetch_terms(t, i, false);
        if (n && !p->kind.scalar && (n > 1 || reads) && !all_unchanged(f, p))
            return false;
    }
    for (size_t i = 0; (t->asks || t->announce) && i < t->nwritten; i++) {
        void *to = t->results[t->written[i].owner - t->span.first];
        if (to && !f->fast->is_unchanged(to, &list_at(t->b, t->written[i].owner)->kind, t->written[i].data))
            return false;
    }
    return true;
}

/* ---- 4. sum ---- */

static void keep_stats(fan_buffer *b, size_t slot, const fan_stats *stats)
{
    fan_sum_stats *sum_stats = &b->sum_stats[slot];
    *sum_stats = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
    if (!stats)
        return;
    sum_stats->stats = *stats;
    sum_stats->has_nonfinite = stats->nonfinite && stats->bad != SIZE_MAX;
    sum_stats->nonfinite_key = sum_stats->has_nonfinite ? list_at(b, slot)->terms[stats->bad].key : -1;
}

static void count_sum(fan_buffer *b, const fan_fast_list *p, bool in_place, bool copied)
{
    size_t n = fan_fast_list_defined(p);
    uint64_t bytes = p->size;
    FAN_FAST_COUNT(b, passes, 1);
    FAN_FAST_COUNT(b, bytes_read, n * bytes);
    FAN_FAST_COUNT(b, bytes_written, bytes);
    FAN_FAST_COUNT(b, folds, n > 1);
    FAN_FAST_COUNT(b, in_place, in_place ? n - 1 : 0);
    FAN_FAST_COUNT(b, copies, copied);
}

/* run: without the interpreter where that pays. */
static void run(const taking *t, size_t slot, char *out, fan_stats *stats)
{
    fan_buffer *b = t->b;
    const fan_fast_list *p = list_at(b, slot);
    fan_dtype acc = accum_of(b, slot);
    size_t n = fan_fast_list_defined(p);
    void *left = p->bytes > FAN_FAST_BYTES ? b->frontend->allow_threads_begin() : NULL;
    fan_fast_sum_terms(&p->kind, p->terms, n, acc, t->how->scale.on ? &t->how->scale : NULL, out,
                       fan_fast_needs_scratch(p, n, acc, stats) ? &t->scratch : NULL, stats);
    if (!left)
        return;
    b->frontend->allow_threads_end(left);
    if (fan_sched_active()) { /* others may have come in meanwhile: so they do */
        fan_sched_stepped();
        fan_yield();
        fan_buffer_seen(b, SIZE_MAX, FAN_SCHED_WRITE);
    }
}

static void sum_slot(const taking *t, size_t slot, bool is_out)
{
    _Alignas(16) char value[16];
    FAN_UNINITIALIZED fan_stats sum_stats;
    fan_buffer *b = t->b;
    const fan_fast_list *p = list_at(b, slot);
    fan_stats *stats = b->sum_stats ? &sum_stats : NULL;
    size_t n = fan_fast_list_defined(p);
    void *to = t->results[slot - t->span.first];
    bool number = p->kind.scalar, first = !number && to == p->terms[0].object;
    bool handed = n == 1 && !t->how->scale.on && (first || (number && !t->how->writable));
    if (handed && !stats)
        return;
    if (stats || !number) {
        run(t, slot, number ? value : p->out, stats);
    }
    if (stats)
        keep_stats(b, slot, stats);
    if (!handed)
        count_sum(b, p, first && !is_out, n == 1 && !is_out);
}

static void sum_all(const taking *t)
{
    bool far = t->span.end - t->span.first >= FAR;
    for (size_t i = t->span.first; i < t->span.end; i++) {
        if (far)
            fetch_terms(t, i, true);
        if (defined(list_at(t->b, i)))
            sum_slot(t, i, t->outs && t->given[i - t->span.first]);
        else if (t->b->sum_stats)
            keep_stats(t->b, i, NULL);
    }
}

/* ---- 5. let go ---- */

/* Objects whose end may call back. Where there is no memory for more they are dropped at once: a call back into a slot
 * that is still claimed is then refused. */
typedef struct deferred_drops {
    void *inline_objects[64], **all;
    size_t n, cap;
} deferred_drops;

static bool defer_drop(deferred_drops *d, void *object)
{
    if (d->n == d->cap) {
        void **more = fan_realloc(d->all == d->inline_objects ? NULL : d->all, 2 * d->cap * sizeof *more);
        if (!more)
            return false;
        if (d->all == d->inline_objects)
            memcpy(more, d->inline_objects, sizeof d->inline_objects);
        d->all = more;
        d->cap *= 2;
    }
    d->all[d->n++] = object;
    return true;
}

/* finish: the slots are empty and free; what they held is dropped last, when the buffer is ready for whatever that
 * calls. */
static void finish(fan_buffer *b, fan_span span)
{
    FAN_UNINITIALIZED deferred_drops d;
    d.all = d.inline_objects;
    d.n = 0;
    d.cap = sizeof d.inline_objects / sizeof *d.inline_objects;
    for (size_t i = span.first; i < span.end; i++) {
        fan_fast_list *p = b->slots[i].fast;
        for (size_t k = 0; p && k < p->n; k++) {
            void *object = p->terms[k].object;
            if (object && !b->frontend->fast->drop_if_shared(object) && !defer_drop(&d, object))
                b->frontend->drop(object);
        }
        if (p && p->n) {
            fan_fast_unpark(b, p, fan_fast_list_parked(p) - p->undefined);
            fan_fast_list_empty(p);
            fan_fast_list_shrink(p);
        }
    }
    fan_fast_let_go(b, span);
    for (size_t i = 0; i < d.n; i++)
        b->frontend->drop(d.all[i]);
    if (d.all != d.inline_objects)
        fan_free(d.all);
}

/* call_off: as if there had been no take. */
static void call_off(const taking *t)
{
    give_back(t->b, t->span);
    for (size_t i = 0; i < t->span.end - t->span.first; i++) {
        if (t->results[i])
            t->b->frontend->drop(t->results[i]);
        t->results[i] = NULL;
    }
    if (t->b->frontend->clear_error)
        t->b->frontend->clear_error(); /* the general path says it, if there is anything to say */
}

/* outs_begin: room for what the caller names; false: no memory. */
static bool outs_begin(taking *t)
{
    size_t n = t->span.end - t->span.first;
    if (!t->outs)
        return true;
    memset(t->inline_given, 0, sizeof t->inline_given);
    if (n > FEW_OUTS) {
        t->written = fan_alloc(n * sizeof *t->written);
        t->given = fan_calloc(n * sizeof *t->given);
    }
    return t->written && t->given;
}

/* hand_through: the one contribution of a slot, which nobody looks at: the buffer's hold becomes the caller's, and
 * nobody is called. False: it is not that. */
static bool hand_through(fan_buffer *b, const fan_slot *s, void **result)
{
    fan_fast_list *p = s->fast;
    if (s->p != &fan_pass_none || s->busy || s->targets || !p || p->n != 1 || p->undefined || p->unsorted ||
        p->kind.check_at_use || (s->expected >= 0 && s->expected != fan_fast_list_count(p)))
        return false;
    *result = p->terms[0].object;
    fan_fast_unpark(b, p, fan_fast_list_parked(p));
    fan_fast_list_empty(p);
    fan_fast_list_shrink(p);
    return true;
}

bool fan_fast_take(fan_buffer *b, fan_span span, const fan_take *how, const fan_fast_outs *outs, void **results)
{
    FAN_UNINITIALIZED fan_array arrays[FAN_FAST_TERMS + 1];
    FAN_UNINITIALIZED fan_operand in[FAN_FAST_TERMS];
    if (!fan_fast_allowed() || !fan_buffer_is_here(b))
        return false;
    if (span.end - span.first == 1 && !outs &&
        ((!reads_all(b, how, outs) && hand_through(b, &b->slots[span.first], results)) ||
         fan_fast_take_few(b, span.first, how, results)))
        return true;
    if (!claim_all(b, span, how))
        return false;
    FAN_UNINITIALIZED taking t;
    t.b = b;
    t.span = span;
    t.how = how;
    t.outs = outs;
    t.results = results;
    t.written = t.inline_outs;
    t.given = t.inline_given;
    t.nwritten = 0;
    t.asks = t.announce = false;
    bool good = room_for(&t, arrays, in) && outs_begin(&t) && place_all(&t) && ask_libraries(&t) && all_readable(&t);
    if (good) {
        sum_all(&t);
        finish(b, span);
    } else {
        call_off(&t);
    }
    if (t.scratch.arrays != arrays) {
        fan_free(t.scratch.arrays);
        fan_free(t.scratch.in);
    }
    if (t.written != t.inline_outs) {
        fan_free(t.written);
        fan_free(t.given);
    }
    return good;
}
