/* fast_fold: what is due in a slot of the fast path: its ready prefix is summed, and the sum takes its place. */
#include "array/sum.h"
#include "base/mem.h"
#include "buffer/fast_part.h"

#include <string.h>

#define RELEASE_BYTES (UINT64_C(256) << 10) /* of terms, from which on others may run while they are summed */

/* ---- is it due? ---- */

/* ask_newest: asks once more who holds the contribution that was parked last, if its maker still held it then: most
 * makers drop each before they add the next. */
static void ask_newest(fan_buffer *b)
{
    fan_fast_list *p = b->newest.object ? b->slots[b->newest.slot].fast : NULL;
    size_t at = b->newest.at;
    if (p && at < p->n && p->terms[at].object == b->newest.object && b->frontend->alone(p->terms[at].object, NULL)) {
        p->alone++;
        atomic_fetch_add_explicit(&b->alone, p->bytes, memory_order_relaxed);
    }
}

/* sums_here: whether the fast path sums what waits in a slot: in its own dtype. */
static bool sums_here(const fan_buffer *b, size_t slot)
{
    fan_dtype own = b->slots[slot].fast->kind.dtype;
    return fan_accum_dtype(own, b->slots[slot].spec->accumulate) == own;
}

/* over: whether the budget is passed now that `object`, which its caller still holds, is parked too. */
static bool over(fan_buffer *b, size_t slot, const void *object, bool alone)
{
    fan_fast_list *p = b->slots[slot].fast;
    size_t at = p->n, found;
    if (!p->n) /* an earlier fold of the same call made items of them */
        return false;
    if (b->budget != FAN_BUDGET_AUTO)
        return fan_over_budget(b, 0, false);
    ask_newest(b);
    found = p->alone + alone;
    if (p->n >= p->ask) {
        found = 0;
        for (size_t i = p->summed > 0; i < p->n; i++)
            found += p->terms[i].object == object ? alone
                                                  : p->terms[i].object && b->frontend->alone(p->terms[i].object, NULL);
        p->ask = p->n + fan_ask_step(p->n);
    }
    atomic_fetch_add_explicit(&b->alone, ((uint64_t)found - p->alone) * p->bytes,
                              memory_order_relaxed); /* it may be less than it was */
    p->alone = found;
    while (!alone && --at > 0 && p->terms[at].object != object)
        ;
    b->newest.object = alone ? NULL : object;
    b->newest.slot = slot;
    b->newest.at = at;
    if (!fan_over_budget(b, 0, !sums_here(b, slot)))
        return false;
    fan_fast_list_sort(p);
    return fan_fast_list_prefix(p) > 1; /* a first one is left as it is: there is nothing to be gained */
}

/* ---- the fold ---- */

typedef struct merge {
    size_t n; /* terms of the ready prefix */
    fan_fast_term inline_dropped[4], *dropped;
    fan_array arrays[FAN_FAST_TERMS + 1];
    fan_operand in[FAN_FAST_TERMS];
} merge;

/* may_merge: whether what waits in the slot may be summed by the fast path. */
static bool may_merge(const fan_buffer *b, size_t slot)
{
    const fan_slot *s = &b->slots[slot];
    const fan_fast_list *p = s->fast;
    return fan_fast_allowed() && s->p == &fan_pass_none && !s->busy && !s->targets && !b->sum_stats && p &&
           !p->undefined && !p->kind.scalar && sums_here(b, slot);
}

/* merge_begin: claims the slot; false: there is nothing to sum, or not for the fast path. */
static bool merge_begin(fan_buffer *b, size_t slot, merge *m)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *p = s->fast;
    if (!may_merge(b, slot))
        return false;
    fan_fast_list_sort(p);
    m->n = fan_fast_list_prefix(p);
    m->dropped = m->inline_dropped;
    if (m->n < 2 || (m->n > sizeof m->inline_dropped / sizeof *m->inline_dropped &&
                     !(m->dropped = fan_alloc(m->n * sizeof *m->dropped))))
        return false;
    fan_fast_claim(s);
    return true;
}

/* readable: the terms are what they were; libraries are asked before anything is looked at, of what is others'. first:
 * the first one is to be written. */
static bool readable(const fan_buffer *b, size_t slot, const merge *m, bool first)
{
    const fan_fast_list *p = b->slots[slot].fast;
    const fan_fast_frontend *fast = b->frontend->fast;
    if (first && p->kind.check_at_use && !p->terms[0].ours && !fast->is_detached(p->terms[0].object))
        return false;
    for (size_t k = 0; p->kind.check_at_use && k < m->n; k++)
        if (!p->terms[k].ours && !fast->has_own_value(p->terms[k].object))
            return false;
    for (size_t k = 0; k < m->n; k++)
        if (!fast->is_unchanged(p->terms[k].object, &p->kind, p->terms[k].data))
            return false;
    return true;
}

/* target_of: what the sum is written into, and where that is; with the caller's hold, unless it is the first term.
 * NULL: not for the fast path. */
static void *target_of(const fan_buffer *b, size_t slot, const merge *m, char **data)
{
    const fan_fast_list *p = b->slots[slot].fast;
    bool first = fan_fast_reusable(b, slot, m->n, p->kind.dtype);
    void *to = first ? p->terms[0].object : b->frontend->fast->fresh(p->terms[0].object, &p->kind, data);
    if (first)
        *data = p->terms[0].data;
    if (!to && b->frontend->clear_error)
        b->frontend->clear_error(); /* the general path says it, if there is anything to say */
    if (!to || readable(b, slot, m, first))
        return to;
    if (!first)
        b->frontend->drop(to);
    return NULL;
}

/* merge_sum: of so many terms, FAN_FAST_TERMS at a time, without the interpreter where that pays. */
static void merge_sum(const fan_buffer *b, size_t slot, merge *m, char *out)
{
    const fan_fast_list *p = b->slots[slot].fast;
    const fan_fast_scratch scratch = {m->arrays, m->in};
    const fan_fast_kind *k = &p->kind;
    void *left = m->n * p->bytes > RELEASE_BYTES ? b->frontend->allow_threads_begin() : NULL;
    FAN_UNINITIALIZED fan_fast_term part[FAN_FAST_TERMS];
    for (size_t done = 0; done < m->n;) {
        size_t n = 0;
        if (done)
            part[n++] = fan_fast_term_of(NULL, out, -1, false, false);
        while (n < FAN_FAST_TERMS && done < m->n)
            part[n++] = p->terms[done++];
        fan_fast_sum_terms(k, part, n, k->dtype, NULL, out,
                           fan_fast_needs_scratch(p, n, k->dtype, false) ? &scratch : NULL, NULL);
    }
    if (left)
        b->frontend->allow_threads_end(left);
}

/* merge_commit: `object` stands for the terms from now on; those are in m->dropped. */
static void merge_commit(fan_buffer *b, size_t slot, merge *m, void *object, char *data)
{
    fan_fast_list *p = b->slots[slot].fast;
    bool first = object == p->terms[0].object, ours = !first || p->terms[0].ours;
    size_t parked = m->n - (p->summed > 0);
    memcpy(m->dropped, p->terms, m->n * sizeof *p->terms);
    if (first)
        m->dropped[0].object = NULL;
    FAN_FAST_COUNT(b, folds, 1);
    FAN_FAST_COUNT(b, passes, 1);
    FAN_FAST_COUNT(b, bytes_read, m->n * p->bytes);
    FAN_FAST_COUNT(b, bytes_written, p->bytes);
    FAN_FAST_COUNT(b, in_place, first ? m->n - 1 : 0);
    fan_fast_unpark(b, p, parked);
    p->rules = (p->summed ? p->rules : 0) | fan_plan_fast_fold(first);
    p->summed += (int64_t)parked;
    p->terms[0] = fan_fast_term_of(object, data, p->terms[m->n - 1].key, false, ours);
    memmove(&p->terms[1], &p->terms[m->n], (p->n - m->n) * sizeof *p->terms);
    p->n -= m->n - 1;
}

/* merge_prefix: false: not for the fast path, and nothing happened. */
static bool merge_prefix(fan_buffer *b, size_t slot)
{
    FAN_UNINITIALIZED merge m;
    char *data = NULL;
    if (!merge_begin(b, slot, &m))
        return false;
    void *to = target_of(b, slot, &m, &data);
    if (to) {
        merge_sum(b, slot, &m, data);
        merge_commit(b, slot, &m, to, data);
    }
    fan_fast_let_go(b, (fan_span){slot, slot + 1});
    for (size_t i = 0; to && i < m.n; i++) /* last: it may call back */
        if (m.dropped[i].object)
            b->frontend->drop(m.dropped[i].object);
    if (m.dropped != m.inline_dropped)
        fan_free(m.dropped);
    return to != NULL;
}

/* first_begins: a first contribution becomes the sum as it is, and waits no longer. False: not for the fast path. */
static bool first_begins(fan_buffer *b, size_t slot)
{
    fan_fast_list *p = b->slots[slot].fast;
    if (!may_merge(b, slot) || p->summed || fan_fast_is_large(p->size))
        return false;
    fan_fast_list_sort(p);
    if (fan_fast_list_prefix(p) != 1)
        return false;
    fan_fast_unpark(b, p, 1);
    p->rules = 0;
    p->summed = 1;
    return true;
}

fan_status fan_fast_fold_due(fan_buffer *b, size_t slot, const void *object, bool alone, fan_error *err)
{
    if (!over(b, slot, object, alone) || first_begins(b, slot) || merge_prefix(b, slot))
        return FAN_OK;
    return fan_buffer_fold_due(b, slot, err);
}
