#include "buffer/fast_part.h"

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
    const fan_list *p = b->slots[slot].list;
    const fan_entry *first = &p->entries[0];
    const fan_fast_frontend *fast = b->frontend->fast;
    if (p->kind.scalar)
        return false;
    bool ours = p->summed > 1 || first->ours, unshared = !ours && !first->donated && fast->unshared(first->object);
    if (!ours && !first->donated && !unshared) /* the usual case, whatever else is so: somebody else holds it */
        return false;
    fan_reuse facts = {.dense = true,
                       .writable = true,
                       .same_dtype = acc == p->kind.dtype,
                       .disjoint = true,
                       .ours = ours,
                       .donated = first->donated,
                       .host = true};
    facts.unshared = unshared;
    facts.writable = !facts.donated || facts.ours || fast->writable(first->object, &p->kind);
    for (size_t k = 1; k < n && facts.disjoint; k++)
        facts.disjoint = !fan_flats_meet(p->entries[k].data, p->bytes, first->data, p->bytes);
    return fan_reusable(&facts) == FAN_REUSE_YES;
}

bool fan_fast_scale_fits(const fan_take *how, fan_dtype dtype, fan_dtype acc)
{
    char kind = fan_dtype_kind(dtype);
    return kind == 'c' ? acc == dtype : kind == 'f' ? how->real : how->integral;
}
