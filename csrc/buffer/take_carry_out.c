/* take_carry_out: the sums of a take are made, and the consumer is ordered after them (S18, S19,
 * S22, A14, D11, D21).
 *
 * In this order: a slot's facts and plan; the plan carried out; the consumer's stream, the copies
 * into out=, what is measured; and the steps, each for all slots before the next one begins. */
#include "array/nditer.h"
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/take.h"

/* ---- the plan (A14, D11, D21) ---- */

static bool take_written_by_out(const fan_extents *outs, const fan_value *value)
{
    fan_array *own[3];
    size_t n;
    if (!outs->n)
        return false;
    fan_array *const *arrays = fan_value_arrays(value, own, &n);
    for (size_t i = 0; i < n; i++) {
        size_t at = outs->n;
        if (fan_extents_next(outs, fan_extent_of(arrays[i]), &at))
            return true;
    }
    return false;
}

/* Whether out= lies where one of the slot's own terms lies. */
static bool take_out_overlaps_own(const fan_take_slot *part)
{
    const fan_fold *fold = &part->gathered.fold;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form != FAN_FORM_DENSE)
            continue;
        if (!fan_array_extents_disjoint(part->out->array, value->array))
            return true;
    }
    return false;
}

/* Whether no key is missing: nothing but the entries of the sum comes before the last of them. */
static bool take_has_all_keys(const fan_take_slot *part)
{
    const fan_slot_state *state = part->s->state;
    const fan_gathered *gathered = &part->gathered;
    size_t n = gathered->n - gathered->has_sum;
    if (state->keyed < 0 || n == 0)
        return true;
    uint64_t last = (uint64_t)fan_entry_key(&gathered->entries[gathered->n - 1]);
    return fan_keys_whole(state->next_key, last, n);
}

/* Reads the slot. Changes nothing. `last`: no other slot is left that could fail. */
static fan_take_facts take_facts(const fan_take_slot *part, bool last)
{
    const fan_buffer *b = part->b;
    const fan_slot *s = part->s;
    const fan_take *options = part->op->options;
    const fan_gathered *gathered = &part->gathered;
    const fan_fold *fold = &gathered->fold;
    fan_dtype sum = fan_fold_dtype(fold);
    fan_take_facts facts = {.terms = fold->n,
                            .has_state = fold->state,
                            .has_zero = gathered->zero,
                            .has_out = part->out,
                            .out_overlaps_inputs = part->out_overlaps_inputs,
                            .stats = b->sum_stats,
                            .scaled = options->scale.on || gathered->divisor,
                            .writable = options->writable,
                            .exact = fan_fold_is_exact(fold),
                            .takes_partial = s->spec->partial,
                            .expanded = fan_fold_expanded(fold),
                            .whole = take_has_all_keys(part),
                            .alone = part->op->n == 1,
                            .last = last};
    for (size_t i = 0; i < fold->n; i++) {
        fan_form form = fold->terms[i].v->form;
        facts.dense += form == FAN_FORM_DENSE;
        facts.sparse += form == FAN_FORM_SPARSE;
        facts.partial += form == FAN_FORM_PARTIAL;
        facts.objects += form == FAN_FORM_OBJECT;
    }
    if (!facts.objects)
        facts.widened = fan_accum_dtype(sum, s->spec->accumulate) != sum;
    if (facts.has_out && facts.stats)
        facts.out_overlaps_own = take_out_overlaps_own(part);
    if (!fold->n)
        return facts;

    const fan_term *first = &fold->terms[0];
    const fan_value *value = first->v;
    /* a lone term with a weight becomes another array; a sum with weights of the call does not stay
     * in the slot, should another slot fail */
    bool product = fold->n == 1 && first->weight.on;
    bool weighed = fold->n > 1 && options->late;
    facts.scaled = facts.scaled || product || weighed;
    facts.first_donated = first->donated;
    facts.same_dtype = value->dtype == sum;
    facts.summed = fan_term_is_sum(fold, first);
    if (value->form == FAN_FORM_SPARSE && !FAN_FAULT(SUM_LEFT_LOOSE))
        facts.loose = !value->sparse->coalesced;
    if (fold->n > 1)
        return facts;

    facts.writable = facts.writable || fan_is_lent(b, NULL, value);
    if (facts.has_out || facts.scaled)
        return facts;
    facts.overwritten = take_written_by_out(&part->op->outs, value);
    if (facts.writable && !facts.objects)
        facts.reuse = fan_term_may_write(fold, 0, FAN_WRITER_TAKER);
    return facts;
}

/* ---- the plan carried out ---- */

fan_status fan_take_zeros(fan_buffer *b, size_t slot, const fan_value *zero, fan_dtype sum,
                          fan_value *out, fan_error *err)
{
    const fan_slot_spec *spec = b->slots[slot].spec;
    const fan_array *array = zero->array;
    int ndim = array->ndim;
    const int64_t *shape = array->shape;
    if (spec->has_shape) {
        ndim = spec->ndim;
        shape = spec->shape;
    }
    if (zero->dtype == sum && fan_shape_same(ndim, shape, array->ndim, array->shape))
        return fan_value_copy(b->frontend, zero, out, err);
    fan_array *one = NULL;
    fan_array *whole = NULL;
    FAN_TRY(fan_array_new(sum, 0, NULL, NULL, &one, err));
    fan_fill_zero(one);
    fan_status status = fan_array_broadcast(one, ndim, shape, &whole, err);
    fan_array_drop(one);
    FAN_TRY(status);
    *out = (fan_value){
        .form = FAN_FORM_ZERO,
        .dtype = sum,
        .origin = zero->origin,
        .array = whole,
    };
    return FAN_OK;
}

/* Takes over the result of the fold. */
static fan_status take_end_fold(fan_take_slot *part, fan_error *err)
{
    fan_slot_state *state = part->s->state;
    fan_gathered *gathered = &part->gathered;
    fan_fold *fold = &gathered->fold;
    part->begun = false;
    if (part->plan.way == FAN_TAKE_COMMIT) {
        FAN_TRY(fan_fold_commit_end(part->b, part->slot, gathered, err));
        const fan_item *sum = gathered->sum;
        part->ready = fan_stream_hold(sum->producer);
        part->ready_event = fan_event_hold(sum->event);
        part->sum_stats = fan_sum_stats_hold(&state->sum_stats);
        return fan_value_copy(part->b->frontend, &sum->value, &part->result, err);
    }
    FAN_TRY(fan_fold_end(fold, err));
    part->sum_stats = fan_sum_stats_move(&fold->sum_stats);
    part->result = fold->result;
    fold->result = fan_value_none();
    part->ready = fold->ready;
    fold->ready = NULL;
    part->ready_event = fold->ready_event;
    fold->ready_event = NULL;
    state->rules |= fold->rules;
    return FAN_OK;
}

/* Ends the folds of slots [from, to) that are in the batch; `failed`: some slot did, and nothing
 * more is queued. A slot whose sum was not queued is as it was. */
static fan_status take_end_folds(const fan_take_op *op, size_t from, size_t to, bool failed,
                                 fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!op->batch)
        return FAN_OK;
    if (!failed && !FAN_FAULT(BATCH_LATE))
        fan_batch_flush(op->batch);
    for (size_t i = from; i < to; i++) {
        fan_take_slot *part = &op->slots[i];
        fan_fold *fold = &part->gathered.fold;
        fan_error *first = &other;
        if (status == FAN_OK)
            first = err;
        if (!part->begun)
            continue;
        if (fan_fold_left(fold)) {
            fan_fold_abandon(fold);
            part->begun = false;
            continue;
        }
        fan_status its = take_end_fold(part, first);
        fan_slot_fail(op->b, part->slot, its, first);
        if (status == FAN_OK)
            status = its;
    }
    if (!failed && FAN_FAULT(BATCH_LATE))
        fan_batch_flush(op->batch);
    if (status == FAN_OK)
        status = fan_batch_failure(op->batch, err);
    fan_batch_clear(op->batch);
    return status;
}

static fan_status take_fold(fan_take_slot *part, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    if (part->op->batch && fan_fold_batches(fold)) {
        FAN_TRY(fan_fold_begin(fold, part->op->batch, err));
        part->begun = true;
        return FAN_OK;
    }
    if (part->op->batch)
        fan_batch_flush(part->op->batch); /* the device's order is that of the slots */
    FAN_TRY(fan_fold_begin(fold, NULL, err));
    return take_end_fold(part, err);
}

/* A14. With stats, on a device with streams, it is measured on A first, and is ready there then. */
static fan_status take_hand(fan_take_slot *part, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    const fan_term *only = &fold->terms[0];
    fan_stream *R = NULL;
    if (fan_fold_first_suspect(fold)) {
        part->sum_stats = fan_sum_stats_hold(&fan_fold_slot(fold)->state->sum_stats);
    } else {
        FAN_TRY(fan_fold_measure_term(fold, &R, err));
        part->sum_stats = fan_sum_stats_move(&fold->sum_stats);
    }
    if (R) {
        part->ready = fan_stream_hold(R);
    } else {
        part->ready = fan_stream_hold(only->producer);
        part->ready_event = fan_event_hold(only->event);
    }
    return fan_value_copy(part->b->frontend, only->v, &part->result, err);
}

/* The sum is handed out: scaled, or the mean. */
static void take_finish(fan_take_slot *part)
{
    fan_fold *fold = &part->gathered.fold;
    fold->finish = true;
    fold->take = part->op->options;
    fold->scale = part->op->options->scale;
    fold->scale.divisor = part->gathered.divisor;
}

/* Carries the plan out. */
static fan_status take_carry_out(fan_take_slot *part, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    switch (part->plan.way) {
    case FAN_TAKE_ZERO:
        return fan_take_zeros(part->b, part->slot, part->gathered.zero, fan_fold_dtype(fold),
                              &part->result, err);
    case FAN_TAKE_HAND:
        return take_hand(part, err);
    case FAN_TAKE_FINISH:
        take_finish(part);
        if (part->out)
            fold->finish_dtype = part->out->dtype;
        return take_fold(part, err);
    case FAN_TAKE_COMMIT:
        return take_fold(part, err);
    case FAN_TAKE_LATE:
        part->planned_again = true;
        return FAN_OK;
    default:
        return FAN_OK;
    }
}

static fan_status take_plan_and_sum(fan_take_slot *part, bool last, fan_error *err)
{
    fan_gathered *gathered = &part->gathered;
    fan_slot_state *state = part->s->state;
    FAN_TRY(fan_gathered_weigh(gathered, err));
    fan_take_facts facts = take_facts(part, last);
    part->plan = fan_plan_take(&facts);
    gathered->fold.taker = part->consumer;
    if (part->plan.rules) /* a slot without any may have the state that is only read */
        state->rules |= part->plan.rules;
    if (part->plan.counts)
        FAN_COUNT(part->b, copies, 1);
    return take_carry_out(part, err);
}

/* ---- the consumer's stream, the copies into out=, what is measured ---- */

/* The stream that writes a sum into `out` (a hold): A, where the sum was made. A slot that was fed
 * symbolic zeros alone has no A: then the stream of the taker, or the current stream of the
 * device. */
static fan_stream *take_writer(const fan_slot_state *state, const fan_fold *fold,
                               const fan_value *out)
{
    if (state->accum || !out->device->backend->has_streams)
        return fan_stream_hold(state->accum);
    if (fold->taker && fold->taker->device == out->device)
        return fan_stream_hold(fold->taker);
    return fan_stream_current(out->device);
}

/* A sum that is there already goes into out: copied, or, if it is sparse, its entries over
 * zeros. */
static fan_status take_copy_into_out(const fan_take_slot *part, fan_stream *A, fan_error *err)
{
    const fan_value *out = part->out;
    fan_operand one = {.array = part->result.array, .acc = out->dtype};
    fan_job job = {.out = out->array};
    FAN_COUNT(part->b, copies, 1);
    FAN_COUNT(part->b, passes, 1);
    if (part->result.form == FAN_FORM_DENSE) {
        job.kind = FAN_JOB_COPY;
        job.in = &one;
        job.n = 1;
        job.label = "copy";
        return fan_device_run(out->device, A, &job, err);
    }
    job.kind = FAN_JOB_ZERO;
    job.label = "fill";
    FAN_TRY(fan_device_run(out->device, A, &job, err));
    if (part->result.form != FAN_FORM_SPARSE)
        return FAN_OK;
    job.kind = FAN_JOB_SCATTER;
    job.sparse = part->result.sparse;
    job.label = "scatter";
    return fan_device_run(out->device, A, &job, err);
}

/* S22, for a copy that runs on `on`; *plan orders others after it. */
static fan_status take_order_copy(fan_take_slot *part, fan_stream *on, fan_sync_fold *plan,
                                  fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    const fan_slot_state *state = part->s->state;
    if (!on && part->out->device->backend->has_streams)
        return fan_buffer_fail_memory(part->b, err);
    if (on)
        FAN_TRY(fan_order_consumer(fold->taker, on, NULL, &fold->taker, err));
    fan_stream_id id = fan_stream_id_of(on);
    fan_sync_slot slot = {.consumer = id, .accum = id, .ready = id};
    if (state->accum)
        slot.consumer = fan_stream_id_of(state->consumer);
    *plan = fan_sync_finish_plan(slot, true, fan_stream_id_of(fold->taker));
    fold->out = part->out;
    return fan_order_wait_taker(fold, on, plan, err);
}

/* The sum goes into its out=, which is the result from then on. */
static fan_status take_copy_out(fan_take_slot *part, fan_error *err)
{
    fan_buffer *b = part->b;
    fan_slot_state *state = part->s->state;
    fan_value sum = part->result;
    fan_sync_fold plan = {.rules = 0};
    fan_stream *on = take_writer(state, &part->gathered.fold, part->out);
    fan_status status = take_order_copy(part, on, &plan, err);
    if (status == FAN_OK)
        status = take_copy_into_out(part, on, err);
    fan_stream_drop(part->ready);
    part->ready = on;
    FAN_TRY(status);
    state->rules |= plan.rules;
    fan_event_drop(part->ready_event);
    part->ready_event = NULL;
    if (plan.slot.has_event)
        FAN_TRY(fan_order_record(b, on, FAN_PLAN_S22_RECORD, &part->ready_event, err));
    part->result = fan_value_none();
    fan_value_drop(b->frontend, &sum);
    return fan_value_copy(b->frontend, part->out, &part->result, err);
}

/* With stats: what the sum's own pass has not measured. A sum that is undefined or no array has
 * UINT64_MAX elements; zeros that went into an out are zeros. */
static fan_status take_measure(fan_take_slot *part, bool sparse_into_out, fan_error *err)
{
    const fan_sum_stats *running = &part->s->state->sum_stats;
    fan_fold *fold = &part->gathered.fold;
    const fan_value *result = &part->result;
    /* They are those of all elements of out, not of the stored ones. On the host nothing may fail
     * any more. */
    if (sparse_into_out) {
        if (part->out->device->backend->has_streams)
            fan_sum_stats_drop(&part->sum_stats);
        else
            fan_sum_stats_of_out(part->b, part->out->array, &part->sum_stats);
    }
    if (result->form == FAN_FORM_UNDEFINED || result->form == FAN_FORM_OBJECT) {
        fan_sum_stats_drop(&part->sum_stats);
        part->sum_stats = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
        return FAN_OK;
    }
    bool zeros = fold->n == 0 && !fold->state;
    if (zeros && part->plan.copy_out && !part->sum_stats.valid) {
        part->sum_stats = (fan_sum_stats){.valid = true, .stats = {.bad = SIZE_MAX}};
        part->sum_stats.stats.count = (uint64_t)result->array->size;
        return FAN_OK;
    }
    fold->sum_stats = fan_sum_stats_move(&part->sum_stats);
    FAN_TRY(fan_fold_collect_stats(fold, result, err));
    part->sum_stats = fan_sum_stats_move(&fold->sum_stats);
    if (running->has_nonfinite)
        fan_sum_stats_blame(&part->sum_stats, running->nonfinite_key);
    return FAN_OK;
}

static fan_status take_order(fan_take_slot *part, fan_error *err)
{
    fan_slot_state *state = part->s->state;
    if (part->ordered)
        return FAN_OK;
    part->ordered = true;
    bool sparse_into_out = part->plan.copy_out && part->result.form == FAN_FORM_SPARSE;
    if (part->plan.copy_out)
        FAN_TRY(take_copy_out(part, err));
    if (part->result.form != FAN_FORM_UNDEFINED) {
        FAN_TRY(fan_order_hand_over(part->b, part->slot, &part->result, part->ready,
                                    part->ready_event, part->consumer, &state->rules, err));
    }
    if (!part->b->sum_stats)
        return FAN_OK;
    return take_measure(part, sparse_into_out, err);
}

/* ---- the steps of a take ---- */

typedef enum take_step {
    TAKE_SUM,
    /* nothing but these sums can fail any more: they write into donated terms */
    TAKE_SUM_LATE,
    /* sums without `out`, before any out is written: to show one to the user may fail */
    TAKE_ORDER_RETURNED,
    /* on the CPU nothing is allocated here: either all outs are written or none */
    TAKE_WRITE_OUT,
    TAKE_ORDER /* the others, and the copies into `out` */
} take_step;

static fan_status take_step_of_slot(fan_take_slot *part, take_step step, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    switch (step) {
    case TAKE_SUM:
        return take_plan_and_sum(part, false, err);
    case TAKE_SUM_LATE:
        if (!part->planned_again)
            return FAN_OK;
        return take_plan_and_sum(part, true, err);
    case TAKE_ORDER_RETURNED:
        if (part->out)
            return FAN_OK;
        return take_order(part, err);
    case TAKE_WRITE_OUT:
        if (part->plan.way != FAN_TAKE_INTO_OUT)
            return FAN_OK;
        take_finish(part);
        fold->out = part->out;
        return take_fold(part, err);
    default:
        return take_order(part, err);
    }
}

/* One step, for every slot before the next step begins. The sums that it put into the batch are
 * ended after it. */
static fan_status take_each_slot(const fan_take_op *op, take_step step, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    size_t ended = 0;
    for (size_t i = 0; i < op->n && status == FAN_OK; i++) {
        fan_take_slot *part = &op->slots[i];
        status = take_step_of_slot(part, step, err);
        fan_slot_fail(op->b, part->slot, status, err);
        bool full = op->batch && fan_batch_bytes(op->batch) >= FAN_BATCH_BYTES;
        if (status == FAN_OK && full) {
            status = take_end_folds(op, ended, i + 1, false, err);
            ended = i + 1;
        }
    }
    if (status == FAN_OK)
        return take_end_folds(op, ended, op->n, false, err);
    (void)take_end_folds(op, ended, op->n, true, &other);
    return status;
}

/* The user may keep a sum that was shown, even if the take then fails because of another slot: so
 * what stays in the slot is not written any more. */
static void take_expose(const fan_slot *s)
{
    for (size_t k = 0; k < fan_slot_entries(s); k++) {
        fan_entry *one = &s->list->entries[k];
        if (!one->general) {
            one->exposed = true;
            one->donated = false;
            continue;
        }
        fan_item *item = one->item;
        item->exposed = true;
        item->shown = true;
        if (item->donated) /* the promise was one until the take */
            fan_value_returned(&item->value);
        item->donated = false;
    }
}

static fan_status take_show(const fan_take_op *op, fan_error *err)
{
    const fan_take *options = op->options;
    if (!options->show)
        return FAN_OK;
    for (size_t i = 0; i < op->n; i++) {
        fan_take_slot *part = &op->slots[i];
        bool written = part->plan.way == FAN_TAKE_INTO_OUT || part->plan.copy_out;
        if (!part->out) {
            take_expose(part->s);
            fan_take_name_origin(part);
            FAN_TRY(options->show(options->ctx, i, &part->result, err));
        } else if (written) {
            FAN_TRY(options->show(options->ctx, i, NULL, err));
        }
    }
    return FAN_OK;
}

/* A sum of objects has run others' code: checks that each `out` still lies where it lay. */
static fan_status take_check_outs_unmoved(const fan_take_op *op, fan_error *err)
{
    for (size_t i = 0; i < op->n; i++) {
        const fan_take_slot *part = &op->slots[i];
        if (part->out && !fan_value_unmoved(op->b, part->out)) {
            return fan_fail_at(err, FAN_ERR_STATE, 0, fan_take_place(part),
                               "the memory, dtype or shape of out= was changed during the take");
        }
    }
    return FAN_OK;
}

/* Sums on streams are queued together, where there are several. */
static fan_status take_begin_batch(fan_take_op *op, fan_error *err)
{
    bool streams = false;
    for (size_t i = 0; i < op->n; i++)
        streams |= op->slots[i].s->state->accum != NULL;
    if (!streams || op->n == 1 || op->b->sum_stats)
        return FAN_OK;
    op->batch = fan_batch_new();
    if (!op->batch)
        return fan_buffer_fail_memory(op->b, err);
    return FAN_OK;
}

/* Order: 1. all sums; 2. sums written straight into `out`; 3. copies into `out`. An `out` may alias
 * an input of another slot, so nothing is written while an input is still unread. */
fan_status fan_take_carry_out(fan_take_op *op, fan_error *err)
{
    fan_status status = FAN_OK;
    bool late = false;
    FAN_TRY(take_begin_batch(op, err));
    FAN_GO(take_each_slot(op, TAKE_SUM, err));
    for (size_t i = 0; i < op->n; i++)
        late |= op->slots[i].planned_again;
    if (late)
        FAN_GO(take_each_slot(op, TAKE_SUM_LATE, err));
    for (size_t i = 0; late && i < op->n; i++)
        op->slots[i].gathered.fold.may_end = false;
    FAN_GO(take_each_slot(op, TAKE_ORDER_RETURNED, err));
    FAN_GO(take_show(op, err));
    FAN_GO(take_check_outs_unmoved(op, err));
    if (op->options->out) {
        FAN_GO(take_each_slot(op, TAKE_WRITE_OUT, err));
        status = take_each_slot(op, TAKE_ORDER, err);
    }
done:
    fan_batch_free(op->batch);
    return status;
}
