/* fast_take_few: the take of the fast path that most are: the sum of a few small arrays in one slot, scaled or not;
 * that it may be written (writable=True) it always may. It does what fast_take does for such a slot, in its order,
 * without the lists that several slots need. */
#include "array/sum.h"
#include "buffer/fast_part.h"

static bool is_few(const fan_buffer *b, const fan_slot *s, const fan_fast_list *p)
{
    if (!p || p->n < 2 || p->n > FAN_FAST_TERMS || p->size > FAN_FAST_BYTES || p->undefined || p->unsorted ||
        p->kind.scalar)
        return false;
    return s->p == &fan_pass_none && !s->busy && !s->targets && !b->sum_stats &&
           (s->expected < 0 || s->expected == fan_fast_list_count(p));
}

/* readable: libraries are asked before anything is looked at once more, of what is others': who is asked may keep what
 * it was asked of, and our own is written. handed: the first term becomes the sum. */
static bool readable(const fan_fast_frontend *fast, const fan_fast_list *p, bool handed)
{
    if (p->kind.check_at_use) {
        if (handed && !p->terms[0].ours && !fast->is_detached(p->terms[0].object))
            return false;
        for (size_t k = 0; k < p->n; k++)
            if (!p->terms[k].ours && !fast->has_own_value(p->terms[k].object))
                return false;
    }
    for (size_t k = 0; k < p->n; k++)
        if (!fast->is_unchanged(p->terms[k].object, &p->kind, p->terms[k].data))
            return false;
    return true;
}

static void sum(fan_buffer *b, const fan_fast_list *p, fan_dtype acc, const fan_scale *scale, char *out, bool in_place)
{
    FAN_UNINITIALIZED const char *src[FAN_FAST_TERMS];
    _Alignas(16) char factor[16];
    if (scale)
        fan_scale_as(scale, acc, factor);
    for (size_t k = 0; k < p->n; k++)
        src[k] = p->terms[k].data;
    (void)fan_sum_flat(out, src, p->n, fan_fast_elements(&p->kind), p->kind.dtype, acc, scale ? factor : NULL);
    FAN_FAST_COUNT(b, passes, 1);
    FAN_FAST_COUNT(b, folds, 1);
    FAN_FAST_COUNT(b, bytes_read, p->n * p->size);
    FAN_FAST_COUNT(b, bytes_written, p->size);
    FAN_FAST_COUNT(b, in_place, in_place ? p->n - 1 : 0);
}

/* finish: what the slot held is dropped last, when the buffer is ready for whatever that calls. */
static void finish(fan_buffer *b, size_t slot)
{
    FAN_UNINITIALIZED void *last[FAN_FAST_TERMS];
    fan_fast_list *p = b->slots[slot].fast;
    size_t nlast = 0;
    for (size_t k = 0; k < p->n; k++)
        if (!b->frontend->fast->drop_if_shared(p->terms[k].object))
            last[nlast++] = p->terms[k].object;
    fan_fast_unpark(b, p, fan_fast_list_parked(p));
    fan_fast_list_empty(p);
    fan_fast_list_shrink(p);
    fan_fast_let_go(b, (fan_span){slot, slot + 1});
    for (size_t k = 0; k < nlast; k++)
        b->frontend->drop(last[k]);
}

bool fan_fast_take_few(fan_buffer *b, size_t slot, const fan_take *how, void **result)
{
    fan_slot *s = &b->slots[slot];
    fan_fast_list *p = s->fast;
    const fan_fast_frontend *fast = b->frontend->fast;
    if (!is_few(b, s, p))
        return false;
    fan_dtype acc = fan_accum_dtype(p->kind.dtype, s->spec->accumulate);
    const fan_scale *scale = how->scale.on ? &how->scale : NULL;
    char *out = p->terms[0].data;
    if (scale && !fan_fast_scale_fits(how, p->kind.dtype, acc))
        return false;
    fan_fast_claim(s);
    bool first = !scale && fan_fast_reusable(b, slot, p->n, acc);
    void *to = first ? p->terms[0].object : fast->fresh(p->terms[0].object, &p->kind, &out);
    if (first)
        fast->hold(to);
    if (to && readable(fast, p, first)) {
        sum(b, p, acc, scale, out, first);
        finish(b, slot);
        *result = to;
        return true;
    }
    fan_fast_let_go(b, (fan_span){slot, slot + 1});
    if (to)
        b->frontend->drop(to);
    if (b->frontend->clear_error)
        b->frontend->clear_error(); /* it is said by the way that follows */
    return false;
}
