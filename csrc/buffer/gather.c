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
    fan_sum_stats_drop(&g->fold.known);
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

/* The value and the first `m` items (SIZE_MAX: all that are parked) as terms. The slot is busy; takes its lock. */
fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, fan_gathered *g, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_fold *f = &g->fold;
    size_t n = 0, room;
    memset(g, 0, sizeof *g);
    fan_slot_lock(b, slot);
    room = s->p->nitems;
    fan_slot_unlock(b, slot);
    f->b = b;
    f->slot = slot;
    f->finish_dtype = FAN_DT_NONE;
    f->terms = fan_alloc((room + 1) * sizeof *f->terms);
    f->scratch = fan_alloc((room + 2) * sizeof *f->scratch);
    g->items = fan_alloc((room + 1) * sizeof *g->items);
    if (!f->terms || !f->scratch || !g->items) {
        fan_gathered_fini(g);
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", b->name, slot);
    }
    fan_slot_lock(b, slot);
    fan_pass_in_order(s->p);
    for (size_t i = 0; i < s->p->nitems && n < room && n < m; i++)
        if (s->p->items[i]->parked)
            g->items[n++] = s->p->items[i];
    fan_slot_unlock(b, slot);
    g->nitems = n;
    f->seen = s->p->value_seen;
    f->state = s->p->exact;
    if (s->p->value.form == FAN_FORM_ZERO) {
        g->zero = &s->p->value;
    } else if (s->p->value.form != FAN_FORM_UNDEFINED) {
        f->terms[f->n++] = (fan_term){.v = &s->p->value,
                                      .producer = s->p->ready,
                                      .event = s->p->ready_event,
                                      .donated = s->p->value_donated,
                                      .ours = s->p->value_ours,
                                      .lent = s->p->value_lent,
                                      .is_value = true,
                                      .key = s->p->value_key,
                                      .own = FAN_DT_NONE,
                                      .seen = f->seen};
        consider_kind(g, &s->p->value, s->p->value_key);
        fan_status status =
            fan_slot_unchanged(b, slot, &s->p->value, s->p->value_key, s->p->value_hashed, s->p->value_hash, err);
        if (status != FAN_OK) {
            fan_gathered_fini(g);
            return status;
        }
    }
    for (size_t i = 0; i < n; i++) {
        fan_item *it = g->items[i];
        f->seen = fan_item_seen(f->seen, s, it);
        if (it->value.form == FAN_FORM_UNDEFINED)
            continue;
        if (it->value.form == FAN_FORM_ZERO) {
            g->zero = g->zero ? g->zero : &it->value;
            continue;
        }
        fan_status status = fan_slot_unchanged(b, slot, &it->value, it->key, it->hashed, it->hash, err);
        /* Whatever the caller did to its indices since: no sum reads or writes out of bounds. */
        if (status == FAN_OK && it->value.form == FAN_FORM_SPARSE && it->value.device == fan_cpu() && !it->ours)
            status = fan_sparse_check(it->value.sparse, err);
        if (status != FAN_OK) {
            fan_gathered_fini(g);
            return status;
        }
        consider_kind(g, &it->value, it->key);
        f->terms[f->n++] = (fan_term){.v = &it->value,
                                      .producer = it->producer,
                                      .event = it->event,
                                      .donated = it->donated,
                                      .ours = it->ours,
                                      .lent = it->lent,
                                      .key = it->key,
                                      .own = it->value.weak ? FAN_DT_NONE : fan_dtype_set_promote(it->own),
                                      .seen = f->seen};
    }
    return FAN_OK;
}
