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
    if (!s->state->accum || s->spec->exact || terms < 2)
        return 0;
    for (size_t i = 0; i < terms; i++) {
        const fan_entry *one = &s->list->entries[i];
        if (!one->general || one->item->value.form != FAN_FORM_DENSE)
            return 0;
        bytes += one->item->bytes;
    }
    return bytes;
}

/* Ends a fold that was queued; one that was not, because another failed, is dropped. */
static fan_status batch_end_one(fan_buffer *b, batch_fold *one, fan_error *err)
{
    fan_status status = FAN_OK;
    if (one->begun && fan_fold_left(&one->gathered.fold))
        fan_fold_abandon(&one->gathered.fold);
    else if (one->begun)
        status = fan_fold_commit_end(b, one->slot, &one->gathered, err);
    fan_gathered_fini(&one->gathered);
    return status;
}

static void batch_let_go(fan_buffer *b, size_t slot)
{
    fan_slot_lock(b, slot);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
}

/* Queues the sums, and lets all slots go. The first failure is returned. */
static fan_status batch_end_all(batch_round *round, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!FAN_FAULT(BATCH_LATE))
        fan_batch_flush(round->batch);
    for (size_t i = 0; i < round->n; i++) {
        if (status == FAN_OK)
            status = batch_end_one(round->b, &round->all[i], err);
        else
            (void)batch_end_one(round->b, &round->all[i], &other);
    }
    if (FAN_FAULT(BATCH_LATE))
        fan_batch_flush(round->batch);
    if (status == FAN_OK)
        status = fan_batch_failure(round->batch, err);
    for (size_t i = 0; i < round->n; i++)
        batch_let_go(round->b, round->all[i].slot);
    fan_batch_clear(round->batch);
    round->n = 0;
    round->pending = 0;
    return status;
}

static fan_status batch_begin_one(batch_round *round, size_t slot, size_t items, fan_error *err)
{
    batch_fold *one = &round->all[round->n++];
    *one = (batch_fold){.slot = slot};
    FAN_TRY(fan_gather(round->b, slot, items, false, &one->gathered, err));
    /* all its terms are dense: their pass multiplies them */
    fan_status status = fan_fold_begin(&one->gathered.fold, round->batch, err);
    one->begun = status == FAN_OK;
    fan_slot_fail(round->b, slot, status, err);
    return status;
}

/* Makes a slot busy whose fold is due and can be one of many. Returns how many contributions it is
 * of; 0: it is not so. */
static size_t batch_claim(batch_round *round, size_t slot)
{
    fan_slot *s = &round->b->slots[slot];
    uint64_t bytes = 0;
    fan_slot_lock(round->b, slot);
    size_t m = fan_slot_due(round->b, slot, round->pending);
    if (m)
        bytes = batch_bytes(s, m);
    if (bytes)
        fan_slot_make_busy(s);
    round->pending += bytes;
    fan_slot_unlock(round->b, slot);
    if (bytes)
        return m;
    return 0;
}

static fan_status batch_fold_due(fan_buffer *b, const size_t *slots, const size_t *order, size_t n,
                                 fan_error *err)
{
    batch_round round = {.b = b};
    fan_error other;
    fan_status status = FAN_OK;
    if (b->sum_stats)
        return FAN_OK;
    round.batch = fan_batch_new();
    round.all = fan_alloc(n * sizeof *round.all);
    if (!round.batch || !round.all)
        status = fan_buffer_fail_memory(b, err);
    for (size_t i = 0; i < n && status == FAN_OK; i++) {
        size_t slot = slots[order[i]];
        size_t items = batch_claim(&round, slot);
        if (!items)
            continue;
        status = batch_begin_one(&round, slot, items, err);
        if (status == FAN_OK && fan_batch_bytes(round.batch) >= FAN_BATCH_BYTES)
            status = batch_end_all(&round, err);
    }
    if (round.n && status == FAN_OK)
        status = batch_end_all(&round, err);
    else if (round.n)
        (void)batch_end_all(&round, &other);
    fan_batch_free(round.batch);
    fan_free(round.all);
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
static bool batch_calls_out(const fan_buffer *b, const fan_slot_state *state)
{
    return fan_accum_calls_out(b->create_graph, state->objects);
}

/* Makes the slot of ops[0 .. n) busy if its sum is to be tried; how many items that is of, 0:
 * none. */
static size_t batch_trial_claim(fan_buffer *b, fan_add_op *ops, size_t n, batch_trials *trials)
{
    size_t slot = ops->slot;
    fan_slot *s = &b->slots[slot];
    size_t m = 0;
    fan_slot_lock(b, slot);
    if (!s->busy && batch_calls_out(b, s->state)) {
        for (size_t i = 0; i < n; i++)
            fan_add_park(b, &ops[i]);
        m = fan_slot_due(b, slot, trials->pending);
        for (size_t i = 0; i < n && !m; i++)
            fan_add_unpark(b, &ops[i]);
    }
    if (m) {
        const fan_entry *first = &s->list->entries[s->list->summed > 0];
        for (size_t i = 0; i < m; i++)
            trials->pending += fan_entry_bytes(s->list, &first[i]);
        fan_slot_make_busy(s);
    }
    fan_slot_unlock(b, slot);
    return m;
}

/* Makes the sum of m items beside the value of its slot, which is busy. That there is no memory for
 * it is no failure. */
static fan_status batch_try(fan_buffer *b, batch_trial *one, size_t m, fan_error *err)
{
    fan_fold *fold = &one->gathered.fold;
    fan_status status = fan_gather(b, one->slot, m, false, &one->gathered, err);
    if (status == FAN_OK && fold->n > 1)
        status = fan_gathered_weigh(&one->gathered, err);
    if (status == FAN_OK && fold->n > 1)
        status = fan_fold_begin(fold, NULL, err);
    one->made = status == FAN_OK;
    fan_slot_fail(b, one->slot, status, err);
    if (fan_status_is_memory(status))
        return FAN_OK;
    return status;
}

/* Tries the sums that ops[0 .. n), which are in the order of their slots, make due. */
static fan_status batch_trials_make(fan_buffer *b, fan_add_op *ops, size_t n, batch_trials *trials,
                                    fan_error *err)
{
    fan_status status = FAN_OK;
    uint64_t rest = 0; /* what the others will have parked counts already */
    for (size_t i = 0; i < n; i++)
        rest += ops[i].bytes;
    trials->all = fan_calloc((n + 1) * sizeof *trials->all);
    if (!trials->all)
        return fan_buffer_fail_memory(b, err);
    size_t end;
    for (size_t i = 0; i < n && status == FAN_OK; i = end) {
        uint64_t own = 0;
        for (end = i; end < n && ops[end].slot == ops[i].slot; end++)
            own += ops[end].bytes;
        atomic_fetch_add_explicit(&b->parked, rest - own, memory_order_relaxed);
        size_t m = batch_trial_claim(b, &ops[i], end - i, trials);
        atomic_fetch_sub_explicit(&b->parked, rest - own, memory_order_relaxed);
        if (!m)
            continue;
        rest -= own;
        batch_trial *one = &trials->all[trials->n++];
        one->slot = ops[i].slot;
        status = batch_try(b, one, m, err);
    }
    return status;
}

/* Commits them, or drops them where one has `failed`, and lets their slots go. */
static fan_status batch_trials_end(fan_buffer *b, fan_add_op *ops, size_t n, batch_trials *trials,
                                   bool failed, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    for (size_t k = 0; k < trials->n; k++) {
        batch_trial *one = &trials->all[k];
        if (one->made && failed)
            fan_fold_abandon(&one->gathered.fold);
        else if (one->made && status == FAN_OK)
            status = fan_fold_commit_end(b, one->slot, &one->gathered, err);
        else if (one->made)
            (void)fan_fold_commit_end(b, one->slot, &one->gathered, &other);
        fan_gathered_fini(&one->gathered);
        fan_slot_lock(b, one->slot);
        for (size_t i = 0; i < n && failed; i++) {
            if (ops[i].slot == one->slot)
                fan_add_unpark(b, &ops[i]);
        }
        fan_slot_let_go(b, one->slot);
        fan_slot_unlock(b, one->slot);
    }
    fan_free(trials->all);
    return status;
}

/* All are parked: folds what is due, except sums that run others' code. A failure is not reported
 * here: a take reports what is wrong with a sum, and a failed device call poisons its slot. */
static fan_status batch_fold_each(fan_buffer *b, const fan_add_op *ops, size_t n, fan_error *err)
{
    for (size_t i = 0; i < n; i++) {
        size_t slot = ops[i].slot;
        fan_status status = FAN_OK;
        fan_slot_lock(b, slot);
        if (!batch_calls_out(b, b->slots[slot].state))
            status = fan_slot_fold_while_due(b, slot, err);
        fan_slot_unlock(b, slot);
        if (fan_status_poisons(status))
            return status;
    }
    return FAN_OK;
}

/* Reserves all, and carries out all. *failed: the one that failed while it was carried out; NULL:
 * there is none. */
static fan_status batch_bring_all(fan_buffer *b, fan_add_op *ops, size_t n,
                                  const fan_add_op **failed, fan_error *err)
{
    *failed = NULL;
    for (size_t i = 0; i < n; i++) {
        const fan_add_op *last = NULL;
        if (i)
            last = &ops[i - 1];
        if (last && last->slot == ops[i].slot)
            ops[i].follows = last->follows || last->item;
        FAN_TRY(fan_add_reserve(b, &ops[i], err));
    }
    for (size_t i = 0; i < n; i++) {
        ops[i].previous = NULL;
        if (i)
            ops[i].previous = &ops[i - 1];
        *failed = &ops[i];
        FAN_TRY(fan_add_carry_out(b, &ops[i], err));
    }
    *failed = NULL;
    return FAN_OK;
}

/* Parks all, and folds what is due. `committed`: how the sums ended that were tried. */
static fan_status batch_park_all(fan_buffer *b, fan_add_op *ops, size_t n, fan_status committed,
                                 const size_t *slots, const size_t *order, fan_error *err)
{
    fan_status status = FAN_OK;
    bool streams = false;
    for (size_t i = 0; i < n; i++) {
        fan_slot_lock(b, ops[i].slot);
        fan_add_park(b, &ops[i]);
        fan_slot_unlock(b, ops[i].slot);
        streams |= ops[i].accum != NULL;
    }
    FAN_TRY(committed);
    if (streams && n > 1)
        status = batch_fold_due(b, slots, order, n, err);
    if (!fan_status_is_memory(status))
        FAN_TRY(status);
    FAN_TRY(batch_fold_each(b, ops, n, err)); /* one by one they need less memory */
    return fan_add_warn(b, ops, n, err);
}

/* Each step is taken for all before the next begins, slot by slot from the lowest up, as take
 * claims them: so neither waits for the other for ever. */
fan_status fan_buffer_add_many(fan_buffer *b, fan_contribution *c, const size_t *slots,
                               const size_t *order, size_t n, fan_error *err)
{
    fan_status committed = FAN_OK;
    for (size_t i = 0; i < n; i++)
        FAN_TRY(fan_slot_check(b, slots[i], err));
    fan_add_op *ops = fan_calloc((n + 1) * sizeof *ops);
    if (!ops)
        return fan_buffer_fail_memory(b, err);
    for (size_t i = 0; i < n; i++) {
        ops[i].slot = slots[order[i]];
        ops[i].c = &c[order[i]];
        ops[i].old = fan_value_none();
    }
    const fan_add_op *failed;
    fan_status status = batch_bring_all(b, ops, n, &failed, err);
    if (status == FAN_OK) {
        batch_trials trials = {NULL, 0, 0};
        status = batch_trials_make(b, ops, n, &trials, err);
        bool undo = status != FAN_OK;
        committed = batch_trials_end(b, ops, n, &trials, undo, undo ? NULL : err);
    }
    if (status == FAN_OK) {
        status = batch_park_all(b, ops, n, committed, slots, order, err);
    } else {
        for (size_t i = n; i-- > 0;)
            fan_add_fail(b, &ops[i], &ops[i] == failed ? status : FAN_OK, err);
    }
    for (size_t i = 0; i < n; i++)
        fan_add_end(b, &ops[i]);
    fan_free(ops);
    return status;
}
