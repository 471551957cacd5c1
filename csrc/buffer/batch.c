#include "buffer/batch.h"

#include "base/fault.h"
#include "base/mem.h"
#include "buffer/commit.h"
#include "buffer/fold_run.h"
#include "buffer/gather.h"
#include "buffer/lock.h"
#include "buffer/pass.h"

/* A slot on its way. */
typedef struct folding {
    size_t slot;
    fan_gathered g;
    bool begun;
} folding;

typedef struct round {
    fan_buffer *b;
    fan_batch *batch;
    folding *all;
    size_t n;
    uint64_t coming; /* bytes that are parked, and will not be once the folds are committed */
} round;

/* Locked: bytes of the first m items, where they and the value make a sum of arrays on a device; 0: they do not. */
static uint64_t together(const fan_slot *s, size_t m)
{
    const fan_pass *p = s->p;
    size_t terms = p->value.form == FAN_FORM_DENSE;
    uint64_t bytes = 0;
    if (!p->accum || s->spec->exact || (p->value.form != FAN_FORM_DENSE && p->value.form != FAN_FORM_UNDEFINED))
        return 0;
    for (size_t i = 0; i < m; i++) {
        if (p->items[i]->value.form != FAN_FORM_DENSE)
            return 0;
        bytes += p->items[i]->bytes;
    }
    return terms + m > 1 ? bytes : 0;
}

/* Makes the slot busy if its fold can be one of many; how many items it will sum, 0: none. */
static size_t claim(round *r, size_t slot)
{
    fan_slot *s = &r->b->slots[slot];
    fan_slot_lock(r->b, slot);
    size_t m = fan_slot_due(r->b, slot, r->coming);
    uint64_t bytes = m ? together(s, m) : 0;
    if (bytes) {
        fan_slot_make_busy(s);
        r->coming += bytes;
    }
    fan_slot_unlock(r->b, slot);
    return bytes ? m : 0;
}

static fan_status end_one(round *r, folding *f, fan_error *err)
{
    fan_status status = FAN_OK;
    if (f->begun && fan_fold_left(&f->g.fold))
        fan_fold_abandon(&f->g.fold);
    else if (f->begun)
        status = fan_fold_commit_end(r->b, f->slot, &f->g, err);
    fan_gathered_fini(&f->g);
    return status;
}

/* Queues the sums, and lets all slots go. The first failure is returned. */
static fan_status end_all(round *r, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!FAN_FAULT(BATCH_LATE))
        fan_batch_flush(r->batch);
    for (size_t i = 0; i < r->n; i++) {
        folding *f = &r->all[i];
        fan_status its = end_one(r, f, status == FAN_OK ? err : &other);
        status = status == FAN_OK ? its : status;
    }
    if (FAN_FAULT(BATCH_LATE))
        fan_batch_flush(r->batch);
    if (status == FAN_OK)
        status = fan_batch_failure(r->batch, err);
    for (size_t i = 0; i < r->n; i++) {
        fan_slot_lock(r->b, r->all[i].slot);
        fan_slot_let_go(r->b, r->all[i].slot);
        fan_slot_unlock(r->b, r->all[i].slot);
    }
    fan_batch_clear(r->batch);
    r->n = 0;
    r->coming = 0;
    return status;
}

static fan_status begin_one(round *r, size_t slot, size_t items, fan_error *err)
{
    folding *f = &r->all[r->n++];
    *f = (folding){.slot = slot};
    FAN_TRY(fan_gather(r->b, slot, items, false, &f->g, err));
    fan_status status = fan_fold_begin(&f->g.fold, r->batch, err);
    f->begun = status == FAN_OK;
    if (!f->begun) {
        fan_slot_lock(r->b, slot);
        fan_slot_poison(&r->b->slots[slot], status, err);
        fan_slot_unlock(r->b, slot);
    }
    return status;
}

fan_status fan_buffer_fold_batch(fan_buffer *b, const size_t *slots, const size_t *order, size_t n, fan_error *err)
{
    round r = {.b = b};
    fan_error other;
    fan_status status = FAN_OK;
    if (b->sum_stats)
        return FAN_OK;
    r.batch = fan_batch_new();
    r.all = fan_alloc(n * sizeof *r.all);
    if (!r.batch || !r.all)
        status = fan_fail(err, FAN_ERR_NOMEM, "%s: out of memory", b->name);
    for (size_t i = 0; i < n && status == FAN_OK; i++) {
        size_t items = claim(&r, slots[order[i]]);
        if (!items)
            continue;
        status = begin_one(&r, slots[order[i]], items, err);
        if (status == FAN_OK && fan_batch_bytes(r.batch) >= FAN_BATCH_BYTES)
            status = end_all(&r, err);
    }
    if (r.n) {
        fan_status its = end_all(&r, status == FAN_OK ? err : &other);
        status = status == FAN_OK ? its : status;
    }
    fan_batch_free(r.batch);
    fan_free(r.all);
    return status;
}
