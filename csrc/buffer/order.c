/* order: each step that sync planned, carried out; then the hand-over, and the end of a pass. */
#include "buffer/order.h"

#include "base/fault.h"

#include <stdio.h>

uint64_t fan_order_left_out(fan_device *d)
{
    if (!d->backend->left_out)
        return 0;
    return d->backend->left_out(d);
}

fan_status fan_order_record(fan_buffer *b, fan_stream *s, uint64_t bit, fan_event **out,
                            fan_error *err)
{
    if (fan_order_left_out(s->device) & bit)
        return fan_event_new(s->device, out, err);
    FAN_TRY(fan_event_record(s, out, err));
    FAN_COUNT(b, events, 1);
    return FAN_OK;
}

/* order_refused: an error of the capture's rules, at a place. */
static fan_status order_refused(fan_place at, fan_error *err)
{
    if (!err)
        return FAN_ERR_CAPTURE;
    const fan_error was = *err;
    const char *advice = "";
    if (was.code == 906 && !fan_get_capture_redirect()) {
        advice = "; or let fanin.set_options(capture_redirect=True) put the "
                 "captured stream in its place";
    }
    return fan_fail_at(err, FAN_ERR_CAPTURE, was.code, at, "%s%s", was.text, advice);
}

fan_status fan_order_wait(fan_buffer *b, size_t slot, fan_stream *s, fan_event *e, uint64_t bit,
                          fan_error *err)
{
    bool elided = false;
    if (!e || !e->stream || (fan_order_left_out(s->device) & bit))
        return FAN_OK;
    fan_status status = fan_stream_wait(s, e, &elided, err);
    if (status == FAN_ERR_CAPTURE)
        status = order_refused(fan_slot_place(b, slot, -1), err);
    FAN_TRY(status);
    if (elided)
        FAN_COUNT(b, waits_elided, 1);
    else
        FAN_COUNT(b, waits, 1);
    return FAN_OK;
}

fan_status fan_order_consumer(fan_stream *s, fan_stream *t, const fan_event *e, fan_stream **out,
                              fan_error *err)
{
    uint64_t mine;
    uint64_t theirs;
    *out = s;
    if (!s || !t)
        return FAN_OK;
    if (s == t || !fan_get_capture_redirect())
        return FAN_OK;
    FAN_TRY(fan_stream_capture(s, &mine, err));
    FAN_TRY(fan_stream_capture(t, &theirs, err));
    /* what was recorded in a capture that has ended is for no stream to take over */
    bool same_capture = !e || e->capture == theirs;
    bool legacy = s->handle == FAN_LEGACY;
    if (fan_capture_rule(mine, theirs, same_capture, legacy) == FAN_CAPTURE_REDIRECT)
        *out = t;
    return FAN_OK;
}

fan_status fan_order_record_stream(const fan_value *v, fan_stream *s, uint64_t bit, fan_error *err)
{
    if (fan_order_left_out(s->device) & bit)
        return FAN_OK;
    fan_array *own[3];
    size_t n;
    fan_array *const *arrays = fan_value_arrays(v, own, &n);
    for (size_t i = 0; i < n; i++) {
        if (arrays[i]->storage)
            FAN_TRY(fan_memory_record_stream(arrays[i]->storage, s, err));
    }
    return FAN_OK;
}

/* order_term_covers: whether a wait for term j's event makes one for term i's unnecessary: its
 * record on the same stream began when that of i was through. Of terms that share one event the
 * last one waits for it. */
static bool order_term_covers(const fan_fold *fold, size_t j, size_t i)
{
    const fan_term *newer = &fold->terms[j];
    const fan_term *term = &fold->terms[i];
    if (newer->producer != term->producer || !newer->event || !term->event)
        return false;
    if (newer->event == term->event)
        return j > i || FAN_FAULT(SHARED_EVENT_COVERS);
    if (FAN_FAULT(OLDEST_EVENT))
        return fan_event_covers(term->event, newer->event);
    return fan_event_covers(newer->event, term->event);
}

static bool order_covered(const fan_fold *fold, size_t i)
{
    for (size_t j = 0; j < fold->n; j++) {
        if (j != i && order_term_covers(fold, j, i))
            return true;
    }
    return false;
}

fan_status fan_order_wait_terms(fan_fold *fold, fan_error *err)
{
    fan_stream *A = fan_fold_accum(fold);
    if (!A || FAN_FAULT(FOLD_UNORDERED))
        return FAN_OK;
    fan_stream_id accum = fan_stream_id_of(A);
    for (size_t i = 0; i < fold->n; i++) {
        const fan_term *term = &fold->terms[i];
        fan_stream_id producer = fan_stream_id_of(term->producer);
        bool covered = order_covered(fold, i);
        fan_sync_term plan = fan_sync_term_plan(accum, producer, i == 0, covered);
        fan_stream *marked = A;
        if (FAN_FAULT(MARK_ON_PRODUCER))
            marked = term->producer;
        fold->rules |= plan.rules;
        if (plan.mark)
            FAN_TRY(fan_order_record_stream(term->v, marked, plan.mark, err));
        if (plan.wait)
            FAN_TRY(fan_order_wait(fold->b, fold->slot, A, term->event, plan.wait, err));
    }
    return FAN_OK;
}

/* order_flush: an event that is recorded on s now comes after all sums on s: also those that wait
 * in the batch. */
static void order_flush(const fan_fold *fold, const fan_stream *s)
{
    if (FAN_FAULT(BATCH_NOT_EXCLUSIVE) || !fold->batch)
        return;
    if (fan_batch_waits_on(fold->batch, s))
        fan_batch_flush(fold->batch);
}

/* A waits for all that was queued on `user` up to now. */
static fan_status order_wait_user(fan_fold *fold, fan_stream *A, fan_stream *user, fan_error *err)
{
    fan_event *event = NULL;
    if (user == A)
        return FAN_OK;
    order_flush(fold, user);
    FAN_TRY(fan_event_record(user, &event, err));
    FAN_COUNT(fold->b, events, 1);
    fan_status status = fan_order_wait(fold->b, fold->slot, A, event, 0, err);
    fan_event_drop(event);
    return status;
}

fan_status fan_order_wait_users(fan_fold *fold, const fan_array *a, fan_error *err)
{
    fan_stream *A = fan_fold_accum(fold);
    if (!A || !a->storage)
        return FAN_OK;
    if (FAN_FAULT(WRITE_WITHOUT_WAIT) || FAN_FAULT(REFCOUNT_IS_ENOUGH))
        return FAN_OK;
    for (size_t i = 0;; i++) {
        fan_stream *user = fan_memory_user(a->storage, i);
        if (!user)
            return FAN_OK;
        fan_status status = order_wait_user(fold, A, user, err);
        fan_stream_drop(user);
        FAN_TRY(status);
    }
}

fan_status fan_order_wait_taker(fan_fold *fold, fan_stream *on, const fan_sync_fold *plan,
                                fan_error *err)
{
    fan_stream *taker = fold->taker;
    /* S7 is checked only now: `on` may have joined a capture by this sum's own waits */
    if (plan->wait_taker)
        FAN_TRY(fan_order_consumer(fold->taker, on, NULL, &taker, err));
    if (plan->wait_taker && taker != on) {
        fan_event *event = NULL;
        order_flush(fold, taker);
        FAN_TRY(fan_order_record(fold->b, taker, 0, &event, err));
        fan_status status = fan_order_wait(fold->b, fold->slot, on, event, FAN_PLAN_S22_WAIT, err);
        fan_event_drop(event);
        FAN_TRY(status);
    }
    if (!plan->mark_out)
        return FAN_OK;
    return fan_order_record_stream(fold->out, on, FAN_PLAN_S22_MARK, err);
}

fan_stream *fan_order_stream(fan_stream_id id, fan_stream *const *among, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fan_stream_id one = fan_stream_id_of(among[i]);
        if (among[i] && one.device == id.device && one.stream == id.stream)
            return among[i];
    }
    return NULL;
}

fan_status fan_order_hand_over(fan_buffer *b, size_t slot, const fan_value *value, fan_stream *R,
                               fan_event *E, fan_stream *consumer, uint64_t *rules, fan_error *err)
{
    const fan_slot_state *state = b->slots[slot].state;
    fan_event *now = NULL;
    fan_status status = FAN_OK;
    if (!R || !consumer)
        return FAN_OK;
    FAN_TRY(fan_order_consumer(consumer, R, E, &consumer, err));
    fan_sync_slot facts = fan_slot_streams(state);
    facts.ready = fan_stream_id_of(R);
    facts.has_event = E != NULL;
    fan_sync_take plan = fan_sync_take_plan(facts, fan_stream_id_of(consumer));
    *rules |= plan.rules;
    if (plan.record_now)
        FAN_GO(fan_order_record(b, R, FAN_PLAN_S18_RECORD, &now, err));
    if (plan.wait)
        FAN_GO(fan_order_wait(b, slot, consumer, E ? E : now, FAN_PLAN_S18_WAIT, err));
    if (plan.mark)
        FAN_GO(fan_order_record_stream(value, consumer, FAN_PLAN_S19_MARK, err));
done:
    fan_event_drop(now);
    return status;
}

/* S20: `on` waits for all that was queued on `stream`. */
static fan_status order_pass_wait(fan_stream *on, fan_stream *stream, fan_error *err)
{
    const fan_place place = {.object = "the end of the pass", .slot = -1, .key = -1};
    fan_event *event = NULL;
    FAN_TRY(fan_event_record(stream, &event, err));
    fan_status status = fan_stream_wait(on, event, NULL, err);
    fan_event_drop(event);
    if (status == FAN_ERR_CAPTURE)
        return order_refused(place, err);
    return status;
}

fan_status fan_stream_join(fan_stream *caller, fan_stream *const *streams, size_t n,
                           const fan_value *values, size_t nvalues, fan_error *err)
{
    uint64_t left_out = fan_order_left_out(caller->device);
    fan_stream *instead = caller; /* S7: the first captured one, for those of its capture */
    for (size_t i = 0; i < n; i++) {
        fan_stream *on;
        if (streams[i] == caller || (left_out & FAN_PLAN_S20_WAIT))
            continue;
        FAN_TRY(fan_order_consumer(caller, streams[i], NULL, &on, err));
        if (on != caller && instead == caller)
            instead = on;
        if (on != caller)
            on = instead;
        if (on != streams[i])
            FAN_TRY(order_pass_wait(on, streams[i], err));
    }
    for (size_t i = 0; i < nvalues; i++) {
        FAN_TRY(fan_order_record_stream(&values[i], caller, FAN_PLAN_S20_MARK, err));
        FAN_TRY(fan_order_record_stream(&values[i], instead, FAN_PLAN_S20_MARK, err));
    }
    return FAN_OK;
}
