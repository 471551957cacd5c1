#include "buffer/fast_part.h"

#include "base/trace.h"

bool fan_fast_allowed(void)
{
    return !fan_get_debug() && (atomic_load_explicit(&fan_traces, memory_order_relaxed) == 0 || !fan_trace_on());
}

bool fan_fast_stats_on_device(const fan_buffer *b, size_t slot)
{
    return b->known && (b->known[slot].words || b->known[slot].on);
}

void fan_fast_claim(fan_slot *s)
{
    s->busy = s->taking = true;
    fan_slot_set_owner(s, fan_thread_id());
}

void fan_fast_let_go(fan_buffer *b, fan_span span)
{
    for (size_t i = span.first; i < span.end; i++) {
        b->slots[i].busy = b->slots[i].taking = false;
        fan_slot_set_owner(&b->slots[i], 0);
    }
    for (size_t i = 0; i < b->nlocks && atomic_load(&b->waiting); i++) {
        fan_slot_lock(b, i);
        fan_cond_broadcast(&b->changed[i]);
        fan_slot_unlock(b, i);
    }
}

bool fan_fast_reusable(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc)
{
    const fan_fast_list *p = b->slots[slot].fast;
    const fan_fast_term *first = &p->terms[0];
    const fan_fast_frontend *fast = b->frontend->fast;
    bool ours = p->summed || first->ours, apart = true;
    if (p->kind.scalar || acc != p->kind.dtype)
        return false;
    for (size_t k = 1; k < n && apart; k++)
        apart = p->terms[k].data + p->bytes <= first->data || first->data + p->bytes <= p->terms[k].data;
    if (!apart)
        return false;
    return fan_reusable(&(fan_reuse){.dense = true,
                                     .writable = !first->donated || ours || fast->writable(first->object, &p->kind),
                                     .same_dtype = true,
                                     .disjoint = true,
                                     .ours = ours,
                                     .donated = first->donated,
                                     .unshared = !ours && !first->donated && fast->unshared(first->object),
                                     .host = true}) == FAN_REUSE_YES;
}
