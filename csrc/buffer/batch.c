/* batch: add_many.
 *
 * A sum of objects runs others' code, which may raise. So the sums of objects that the batch makes
 * due are tried first, before any other thread can sum a part of the batch: each such slot is made
 * busy, its part of the batch parked in it, and the sum made beside its value. If one raises, all
 * these sums are dropped and every contribution is taken back. */
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/add.h"
#include "buffer/fold.h"
#include "buffer/slot.h"

/* ---- the folds that a batch makes due on devices, in one launch ---- */

/* A slot on its way. */
typedef struct batch_fold {
    size_t slot;
    fan_gathered gathered;
    bool begun;
} batch_fold;

typedef struct batch_round {
    fan_buffer *b;
    fan_batch *batch;
    batch_fold *all;
    size_t n;
    uint64_t pending; /* bytes that are parked, and will not be once the folds are committed */
} batch_round;

/* Locked: bytes of the first m contributions, where they and the running sum make a sum of arrays
 * on a device; 0: they do not. */
static uint64_t batch_bytes(const fan_slot *s, size_t m)
{
    size_t terms = m + (fan_slot_sum(s) != NULL);
    uint64_t bytes = 0;
    if (!s->state->accum || s->spec->exact)
        return 0;
    for (size_t i = 0; i < terms; i++) {
        const fan_entry *one = &s->list->entries[i];
        if (!one->general || one->item->value.form != FAN_FORM_DENSE)
            return 0;
        bytes += one->item->bytes;
    }
    return terms > 1 ? bytes : 0;
}

/* Queues the sums, and lets all slots go. The first failure is returned. */
static fan_status batch_end_all(batch_round *r, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!FAN_FAULT(BATCH_LATE))
        fan_batch_flush(r->batch);
    for (size_t i = 0; i < r->n; i++) {
        batch_fold *f = &r->all[i];
        fan_error *first = status == FAN_OK ? err : &other;
        fan_status its = FAN_OK;
        if (f->begun && fan_fold_left(&f->gathered.fold))
            fan_fold_abandon(&f->gathered.fold);
        else if (f->begun)
            its = fan_fold_commit_end(r->b, f->slot, &f->gathered, first);
        fan_gathered_fini(&f->gathered);
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
    r->pending = 0;
    return status;
}

static fan_status batch_begin_one(batch_round *r, size_t slot, size_t items, fan_error *err)
{
    batch_fold *f = &r->all[r->n++];
    *f = (batch_fold){.slot = slot};
    FAN_TRY(fan_gather(r->b, slot, items, false, &f->gathered, err));
    fan_status status = fan_fold_begin(&f->gathered.fold, r->batch, err);
    f->begun = status == FAN_OK;
    fan_slot_fail(r->b, slot, status, err);
    return status;
}

static fan_status batch_fold_due(fan_buffer *b, const size_t *slots, const size_t *order, size_t n,
                                 fan_error *err)
{
    batch_round r = {.b = b};
    fan_error other;
    fan_status status = FAN_OK;
    if (b->sum_stats)
        return FAN_OK;
    r.batch = fan_batch_new();
    r.all = fan_alloc(n * sizeof *r.all);
    if (!r.batch || !r.all)
        status = fan_buffer_fail_memory(b, err);
    for (size_t i = 0; i < n && status == FAN_OK; i++) {
        /* A slot whose fold can be one of many is busy from here on. */
        size_t slot = slots[order[i]];
        fan_slot *s = &r.b->slots[slot];
        fan_slot_lock(r.b, slot);
        size_t m = fan_slot_due(r.b, slot, r.pending);
        uint64_t bytes = m ? batch_bytes(s, m) : 0;
        if (bytes) {
            fan_slot_make_busy(s);
            r.pending += bytes;
        }
        fan_slot_unlock(r.b, slot);
        size_t items = bytes ? m : 0;
        if (!items)
            continue;
        status = batch_begin_one(&r, slots[order[i]], items, err);
        if (status == FAN_OK && fan_batch_bytes(r.batch) >= FAN_BATCH_BYTES)
            status = batch_end_all(&r, err);
    }
    if (r.n) {
        fan_status its = batch_end_all(&r, status == FAN_OK ? err : &other);
        status = status == FAN_OK ? its : status;
    }
    fan_batch_free(r.batch);
    fan_free(r.all);
    return status;
}

/* ---- add_many: all or none ---- */

/* A slot whose sum of objects is tried. */
typedef struct batch_trial {
    size_t slot;
    fan_gathered gathered;
    bool made; /* false: there was no memory for it, and it stays parked */
} batch_trial;

typedef struct batch_trials {
    batch_trial *all;
    size_t n;
    uint64_t pending; /* bytes that will not be parked once they are committed */
} batch_trials;

/* Locked: whether a sum of this slot runs others' code. */
static bool batch_calls_out(const fan_buffer *b, const fan_slot_state *p)
{
    return b->create_graph || p->objects;
}

/* Makes the slot of x[0 .. n) busy if its sum is to be tried; how many items that is of, 0:
 * none. */
static size_t batch_trial_claim(fan_buffer *b, fan_add_op *x, size_t n, batch_trials *t)
{
    fan_slot *s = &b->slots[x->slot];
    size_t m = 0;
    fan_slot_lock(b, x->slot);
    if (!s->busy && batch_calls_out(b, s->state)) {
        for (size_t i = 0; i < n; i++)
            fan_add_park(b, &x[i]);
        m = fan_slot_due(b, x->slot, t->pending);
        for (size_t i = 0; i < n && !m; i++)
            fan_add_unpark(b, &x[i]);
    }
    for (size_t i = 0; i < m; i++)
        t->pending += fan_entry_bytes(s->list, &s->list->entries[i + (s->list->summed > 0)]);
    if (m) {
        fan_slot_make_busy(s);
    }
    fan_slot_unlock(b, x->slot);
    return m;
}

/* Tries the sums that x[0 .. n), which are in the order of their slots, make due. */
static fan_status batch_trials_make(fan_buffer *b, fan_add_op *x, size_t n, batch_trials *t,
                                    fan_error *err)
{
    fan_status status = FAN_OK;
    uint64_t rest = 0; /* what the others will have parked counts already */
    for (size_t i = 0; i < n; i++)
        rest += x[i].bytes;
    t->all = fan_calloc((n ? n : 1) * sizeof *t->all);
    if (!t->all)
        return fan_buffer_fail_memory(b, err);
    for (size_t i = 0, end; i < n && status == FAN_OK; i = end) {
        uint64_t own = 0;
        for (end = i; end < n && x[end].slot == x[i].slot; end++)
            own += x[end].bytes;
        atomic_fetch_add_explicit(&b->parked, rest - own, memory_order_relaxed);
        size_t m = batch_trial_claim(b, &x[i], end - i, t);
        atomic_fetch_sub_explicit(&b->parked, rest - own, memory_order_relaxed);
        if (!m)
            continue;
        rest -= own;
        t->all[t->n].slot = x[i].slot;
        batch_trial *one = &t->all[t->n++];
        fan_status its = fan_gather(b, one->slot, m, false, &one->gathered, err);
        if (its == FAN_OK && one->gathered.fold.n > 1)
            its = fan_fold_begin(&one->gathered.fold, NULL, err);
        one->made = its == FAN_OK;
        fan_slot_fail(b, one->slot, its, err);
        status = its == FAN_ERR_NOMEM || its == FAN_ERR_DEVICE_NOMEM ? FAN_OK : its;
    }
    return status;
}

/* Commits them, or drops them where one has `failed`, and lets their slots go. */
static fan_status batch_trials_end(fan_buffer *b, fan_add_op *x, size_t n, batch_trials *t,
                                   bool failed, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    for (size_t k = 0; k < t->n; k++) {
        batch_trial *one = &t->all[k];
        fan_status its = one->made && !failed ? fan_fold_commit_end(b, one->slot, &one->gathered,
                                                                    status == FAN_OK ? err : &other)
                                              : FAN_OK;
        status = status == FAN_OK ? its : status;
        if (one->made && failed)
            fan_fold_abandon(&one->gathered.fold);
        fan_gathered_fini(&one->gathered);
        fan_slot_lock(b, one->slot);
        for (size_t i = 0; i < n && failed; i++)
            if (x[i].slot == one->slot)
                fan_add_unpark(b, &x[i]);
        fan_slot_let_go(b, one->slot);
        fan_slot_unlock(b, one->slot);
    }
    fan_free(t->all);
    return status;
}

/* All are parked: folds what is due, except sums that run others' code. A failure is not reported
 * here: a take reports what is wrong with a sum, and a failed device call poisons its slot. */
static fan_status batch_fold_each(fan_buffer *b, const fan_add_op *x, size_t n, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = 0; i < n && !fan_status_poisons(status); i++) {
        fan_slot_lock(b, x[i].slot);
        status = batch_calls_out(b, b->slots[x[i].slot].state)
                     ? FAN_OK
                     : fan_slot_fold_while_due(b, x[i].slot, err);
        fan_slot_unlock(b, x[i].slot);
    }
    return fan_status_poisons(status) ? status : FAN_OK;
}

/* Each step is taken for all before the next begins, slot by slot from the lowest up, as take
 * claims them: so neither waits for the other for ever. */
fan_status fan_buffer_add_many(fan_buffer *b, fan_contribution *c, const size_t *slots,
                               const size_t *order, size_t n, fan_error *err)
{
    fan_status status = FAN_OK, committed = FAN_OK;
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        FAN_TRY(fan_slot_check(b, slots[i], err));
    fan_add_op *x = fan_calloc((n ? n : 1) * sizeof *x);
    if (!x)
        return fan_buffer_fail_memory(b, err);
    for (size_t i = 0; i < n; i++)
        x[i] =
            (fan_add_op){.slot = slots[order[i]], .c = &c[order[i]], .old = {.dtype = FAN_DT_NONE}};
    for (; k < n && status == FAN_OK; k++) {
        const fan_add_op *last = k ? &x[k - 1] : NULL;
        x[k].follows = last && last->slot == x[k].slot && (last->follows || last->item);
        status = fan_add_reserve(b, &x[k], err);
    }
    for (k = 0; k < n && status == FAN_OK; k++) {
        x[k].previous = k ? &x[k - 1] : NULL;
        status = fan_add_carry_out(b, &x[k], err);
    }
    if (status == FAN_OK) {
        batch_trials t = {NULL, 0, 0};
        k = 0;
        status = batch_trials_make(b, x, n, &t, err);
        committed = batch_trials_end(b, x, n, &t, status != FAN_OK, status == FAN_OK ? err : NULL);
    }
    if (status != FAN_OK) {
        for (size_t i = n; i-- > 0;)
            fan_add_fail(b, &x[i], k && i == k - 1 ? status : FAN_OK, err);
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        fan_slot_lock(b, x[i].slot);
        fan_add_park(b, &x[i]);
        fan_slot_unlock(b, x[i].slot);
    }
    bool streams = false;
    for (size_t i = 0; i < n; i++)
        streams |= x[i].accum != NULL;
    FAN_GO(committed);
    if (streams && n > 1)
        status = batch_fold_due(b, slots, order, n, err);
    if (status == FAN_OK || status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM)
        status = batch_fold_each(b, x, n, err); /* one by one they need less memory */
    if (status == FAN_OK)
        status = fan_add_warn(b, x, n, err);
done:
    for (size_t i = 0; i < n; i++)
        fan_add_end(b, &x[i]);
    fan_free(x);
    return status;
}
