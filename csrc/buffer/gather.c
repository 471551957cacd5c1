#include "buffer/gather.h"

#include "base/mem.h"
#include "buffer/lock.h"
#include "buffer/pass.h"
#include "buffer/stats.h"
#include "buffer/unchanged.h"

#include <string.h>

void fan_gathered_fini(fan_gathered *g)
{
    fan_free(g->items);
    fan_free(g->fold.terms);
    fan_free(g->fold.scratch);
    fan_free(g->fold.keys);
    fan_sum_stats_drop(&g->fold.sum_stats);
    fan_stream_drop(g->fold.ready);
    fan_event_drop(g->fold.ready_event);
    memset(g, 0, sizeof *g);
}

static void consider_kind(fan_gathered *g, const fan_value *v, int64_t key)
{
    if (v->form == FAN_FORM_UNDEFINED || v->form == FAN_FORM_ZERO)
        return;
    if (!g->like || v->rank < g->like->rank || (v->rank == g->like->rank && key >= 0 && key < g->like_key)) {
        g->like = v;
        g->like_key = key;
    }
}

/* The first `m` parked items, copied: who arrives meanwhile moves the list. */
static fan_status gather_items(fan_buffer *b, size_t slot, size_t m, fan_gathered *g, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &g->fold;
    fan_slot_lock(b, slot);
    size_t room = s->p->nitems;
    fan_slot_unlock(b, slot);
    f->terms = fan_alloc((room + 1) * sizeof *f->terms);
    f->scratch = fan_alloc((room + 2) * sizeof *f->scratch);
    g->items = fan_alloc((room + 1) * sizeof *g->items);
    if (!f->terms || !f->scratch || !g->items)
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    fan_slot_lock(b, slot);
    fan_pass_in_order(s->p);
    for (size_t i = 0; i < s->p->nitems && g->nitems < room && g->nitems < m; i++)
        if (s->p->items[i]->parked)
            g->items[g->nitems++] = s->p->items[i];
    fan_slot_unlock(b, slot);
    return FAN_OK;
}

static fan_status gather_value(fan_gathered *g, fan_error *err)
{
    fan_fold *f = &g->fold;
    fan_pass *p = f->b->slots[f->slot].p;
    f->seen = p->value_seen;
    f->state = p->exact;
    if (p->value.form == FAN_FORM_ZERO)
        g->zero = &p->value;
    if (p->value.form == FAN_FORM_ZERO || p->value.form == FAN_FORM_UNDEFINED)
        return FAN_OK;
    f->terms[f->n++] = (fan_term){.v = &p->value,
                                  .producer = p->ready,
                                  .event = p->ready_event,
                                  .donated = p->value_donated,
                                  .ours = p->value_ours,
                                  .exposed = p->value_exposed,
                                  .is_value = true,
                                  .key = p->value_key,
                                  .own = FAN_DT_NONE,
                                  .seen = f->seen};
    consider_kind(g, &p->value, p->value_key);
    return fan_slot_unchanged(f->b, f->slot, &p->value, p->value_key, p->value_hashed ? &p->value_hash : NULL,
                              f->may_end, err);
}

static fan_status gather_item(fan_gathered *g, fan_item *it, fan_error *err)
{
    fan_fold *f = &g->fold;
    f->seen = fan_item_seen(f->seen, &f->b->slots[f->slot], it);
    if (it->value.form == FAN_FORM_ZERO && !g->zero)
        g->zero = &it->value;
    if (it->value.form == FAN_FORM_UNDEFINED || it->value.form == FAN_FORM_ZERO)
        return FAN_OK;
    const uint64_t *hash = it->hashed ? &it->hash : NULL;
    FAN_TRY(fan_slot_unchanged(f->b, f->slot, &it->value, it->key, hash, f->may_end, err));
    /* Whatever the caller did to its indices since: no sum reads or writes out of bounds. */
    if (it->value.form == FAN_FORM_SPARSE && it->value.device == fan_cpu() && !it->ours)
        FAN_TRY(fan_sparse_check(it->value.sparse, err));
    consider_kind(g, &it->value, it->key);
    f->terms[f->n++] = (fan_term){.v = &it->value,
                                  .producer = it->producer,
                                  .event = it->event,
                                  .donated = it->donated,
                                  .ours = it->ours,
                                  .exposed = it->exposed,
                                  .key = it->key,
                                  .own = it->value.weak ? FAN_DT_NONE : fan_dtype_set_promote(it->own),
                                  .seen = f->seen};
    return FAN_OK;
}

fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, bool may_end, fan_gathered *g, fan_error *err)
{
    memset(g, 0, sizeof *g);
    g->fold.may_end = may_end;
    g->fold.b = b;
    g->fold.slot = slot;
    g->fold.finish_dtype = FAN_DT_NONE;
    fan_status status = gather_items(b, slot, m, g, err);
    if (status == FAN_OK)
        status = gather_value(g, err);
    for (size_t i = 0; status == FAN_OK && i < g->nitems; i++)
        status = gather_item(g, g->items[i], err);
    if (status != FAN_OK)
        fan_gathered_fini(g);
    return status;
}
