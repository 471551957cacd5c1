/* sync: the plan bits by name; which stream waits in an add, a fold, a take (sync.h). */
#include "buffer/sync.h"

#include <string.h>

static const char *const plan_words[FAN_PLAN_COUNT] = {
#define X(NAME, word) word,
    FAN_PLAN_LIST(X)
#undef X
};

const char *fan_plan_word(int index)
{
    if (index < 0 || index >= FAN_PLAN_COUNT)
        return NULL;
    return plan_words[index];
}

char fan_sync_letter(fan_sync_case stream_case)
{
    return "-AaBC+"[stream_case];
}

uint64_t fan_plan_bits(const char *word)
{
    uint64_t bits = 0;
    size_t n = strlen(word);
    if (n == 0)
        return 0;
    for (int i = 0; i < FAN_PLAN_COUNT; i++) {
        if (strncmp(plan_words[i], word, n) != 0)
            continue;
        char behind = plan_words[i][n];
        if (behind == '\0' || behind == '.')
            bits |= UINT64_C(1) << i;
    }
    return bits;
}

fan_sync_add fan_sync_add_plan(uint64_t D, fan_stream_id P, fan_stream_id C, fan_stream_id current,
                               fan_sync_slot slot)
{
    fan_sync_add plan = {.stream_case = FAN_CASE_HOST, .producer = P, .slot = slot};
    if (D == 0) {
        plan.producer = (fan_stream_id){0, 0};
        plan.rules = FAN_S(3);
        return plan;
    }
    if (!fan_stream_id_set(P)) {
        plan.producer = P = current;
        plan.rules |= FAN_S(4);
    }
    if (fan_stream_id_set(slot.accum)) {
        plan.stream_case = FAN_CASE_LATER;
        plan.record = !fan_stream_id_same(P, slot.accum);
        return plan;
    }
    if (fan_stream_id_set(slot.consumer))
        C = slot.consumer;
    if (!fan_stream_id_set(C)) {
        C = current;
        plan.rules |= FAN_S(5);
    }
    plan.slot.consumer = C;
    plan.slot.ready = P;
    if (C.device == D && fan_stream_id_same(C, P)) {
        plan.stream_case = FAN_CASE_SAME;
        plan.slot.accum = C;
        plan.rules |= FAN_S(8);
    } else if (C.device == D) {
        plan.stream_case = FAN_CASE_OTHER;
        plan.slot.accum = C;
        plan.record = plan.mark = true;
        plan.rules |= FAN_S(9);
    } else if (P.device == D) {
        plan.stream_case = FAN_CASE_PRODUCER;
        plan.slot.accum = P;
        plan.record = true;
        plan.rules |= FAN_S(10);
    } else {
        plan.stream_case = FAN_CASE_CURRENT;
        plan.slot.accum = current;
        plan.record = true;
        plan.rules |= FAN_S(11);
    }
    plan.slot.has_event = plan.record;
    return plan;
}

fan_sync_convert fan_sync_convert_plan(uint64_t D, const fan_sync_add *add)
{
    fan_sync_convert plan = {.rules = FAN_S(21)};
    plan.on_producer = D == 0 || add->producer.device == D;
    return plan;
}

fan_sync_term fan_sync_term_plan(fan_stream_id accum, fan_stream_id producer, bool first,
                                 bool covered)
{
    fan_sync_term plan = {.rules = 0};
    if (!fan_stream_id_set(accum))
        return plan;
    plan.mark = FAN_PLAN_S12_MARK;
    if (first)
        plan.mark = FAN_PLAN_S13_MARK;
    if (!fan_stream_id_set(producer) || fan_stream_id_same(accum, producer))
        return plan;
    plan.rules = FAN_S(12);
    if (first)
        plan.rules = FAN_S(13);
    if (!covered)
        plan.wait = first ? FAN_PLAN_S13_WAIT : FAN_PLAN_S12_WAIT;
    return plan;
}

/* The last work queued on A made the value: it is ready there. */
static fan_sync_fold ready_on_accum(fan_sync_slot slot)
{
    fan_sync_fold plan = {.slot = slot};
    if (!fan_stream_id_set(slot.accum)) {
        plan.rules = FAN_S(3);
        return plan;
    }
    plan.slot.ready = slot.accum;
    plan.slot.has_event = !fan_stream_id_same(slot.consumer, slot.accum);
    return plan;
}

fan_sync_fold fan_sync_fold_plan(fan_sync_slot slot)
{
    fan_sync_fold plan = ready_on_accum(slot);
    if (fan_stream_id_set(slot.accum)) {
        plan.rules = FAN_S(14) | FAN_S(17);
        plan.rules |= plan.slot.has_event ? FAN_S(15) : FAN_S(16);
    }
    return plan;
}

fan_sync_fold fan_sync_finish_plan(fan_sync_slot slot, bool has_out, fan_stream_id taker)
{
    fan_sync_fold plan = ready_on_accum(slot);
    if (!fan_stream_id_set(slot.accum))
        return plan;
    plan.rules = FAN_S(22);
    plan.mark_out = has_out;
    plan.wait_taker = has_out && fan_stream_id_set(taker) && !fan_stream_id_same(taker, slot.accum);
    return plan;
}

fan_sync_take fan_sync_take_plan(fan_sync_slot slot, fan_stream_id consumer)
{
    fan_sync_take plan = {0};
    if (!fan_stream_id_set(slot.ready) || !fan_stream_id_set(consumer))
        return plan;
    plan.mark = true;
    plan.rules = FAN_S(19);
    if (!fan_stream_id_same(consumer, slot.ready)) {
        plan.wait = true;
        plan.record_now = !slot.has_event;
        plan.rules |= FAN_S(18);
    }
    return plan;
}
