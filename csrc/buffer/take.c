/* take: what a consumer gets, the general path (fan_buffer_take, at the end). The short path of
 * slots with plain entries alone is take_plain.c.
 *
 *   1. prepare     the slots are claimed, and gathered                        take_prepare.c
 *   2. carry out   sums are made, the consumer is ordered after them          take_carry_out.c
 *   3. commit      the slots are emptied, or as they were; what they held is dropped */
#include "base/mem.h"
#include "buffer/take.h"

static void take_trace(const fan_take_slot *part)
{
    const fan_slot *s = part->s;
    const fan_slot_state *state = s->state;
    fan_stream *consumer = part->consumer;
    const fan_device *d = state->device;
    if (consumer)
        d = consumer->device;
    fan_trace_line line = {.kind = FAN_TRACE_TAKE,
                           .how = fan_slot_letter(s),
                           .device = fan_device_number(d),
                           .count = (uint32_t)state->count,
                           .key = -1,
                           .rules = state->rules,
                           .stream = fan_stream_handle(consumer),
                           .bytes = fan_value_bytes(&part->result)};
    fan_slot_trace(part->b, part->slot, line);
    fan_slot_digest(part->b, part->slot, &part->result, FAN_DIGEST_OF_SUM, NULL, part->consumer);
}

/* Cannot fail: the slot is free: empty, if the take was `good`; what it held is returned, for
 * take_drop_slot. */
static fan_slot_state *take_commit_slot(fan_take_slot *part, bool good)
{
    fan_buffer *b = part->b;
    fan_slot_state *gone = NULL;
    if (good && fan_trace_on() && part->result.form != FAN_FORM_UNDEFINED)
        take_trace(part);
    fan_slot_lock(b, part->slot);
    if (good)
        gone = fan_slot_cut(b, part->s);
    if (good && b->sum_stats) {
        fan_sum_stats old = b->sum_stats[part->slot];
        b->sum_stats[part->slot] = part->sum_stats;
        part->sum_stats = old;
    }
    fan_slot_let_go(b, part->slot);
    fan_slot_unlock(b, part->slot);
    return gone;
}

/* Drops what the way through the take held, and what was in the slot. */
static void take_drop_slot(fan_take_slot *part)
{
    fan_slot_state *gone = part->gone;
    fan_value_drop(part->b->frontend, &part->result);
    fan_sum_stats_drop(&part->sum_stats);
    fan_stream_drop(part->ready);
    fan_event_drop(part->ready_event);
    if (part->has_gathered)
        fan_gathered_fini(&part->gathered);
    /* the consumer has waited for what was pooled */
    if (gone && gone != &fan_slot_state_none) {
        fan_stream_drop(gone->capture_origin);
        gone->capture_origin = NULL;
    }
    fan_slot_state_free(part->b, gone);
}

/* Cannot fail. The slots are free before anything is dropped: a finalizer may call the buffer. */
static void take_commit(const fan_take_op *op, bool good, fan_value *results)
{
    for (size_t i = 0; i < op->n && op->slots[i].claimed; i++)
        op->slots[i].gone = take_commit_slot(&op->slots[i], good);
    for (size_t i = 0; i < op->n; i++) {
        fan_take_slot *part = &op->slots[i];
        if (good) {
            fan_take_name_origin(part);
            results[i] = part->result;
            part->result = fan_value_none();
        }
        take_drop_slot(part);
    }
}

static fan_status take_begin(fan_take_op *op, fan_error *err)
{
    const fan_take *options = op->options;
    op->n = op->b->nslots;
    if (options->one)
        op->n = 1;
    op->slots = fan_calloc((op->n + 1) * sizeof *op->slots);
    if (!op->slots)
        return fan_buffer_fail_memory(op->b, err);
    for (size_t i = 0; i < op->n; i++) {
        fan_take_slot *part = &op->slots[i];
        part->op = op;
        part->b = op->b;
        part->slot = i;
        if (options->one)
            part->slot = options->slot;
        part->s = &op->b->slots[part->slot];
        if (options->out && options->out[i].form == FAN_FORM_DENSE)
            part->out = &options->out[i];
    }
    return FAN_OK;
}

fan_status fan_buffer_take(fan_buffer *b, const fan_take *options, fan_value *results,
                           fan_error *err)
{
    fan_take_op op = {.b = b, .options = options};
    FAN_TRY(fan_buffer_check_fork(b, err));
    if (options->one)
        FAN_TRY(fan_slot_check(b, options->slot, err));
    FAN_TRY(take_begin(&op, err));
    fan_status status = fan_take_prepare(&op, err);
    if (status == FAN_OK)
        status = fan_take_carry_out(&op, err);
    take_commit(&op, status == FAN_OK, results);
    fan_free(op.inputs.all);
    fan_free(op.outs.all);
    fan_free(op.slots);
    return status;
}
