#include "buffer/order.h"

#include "base/fault.h"

#include <stdio.h>

uint64_t fan_order_left_out(fan_device *d)
{
    return d->backend->left_out ? d->backend->left_out(d) : 0;
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
    bool redirect = was.code == 906 && !fan_get_capture_redirect();
    return fan_fail_at(err, FAN_ERR_CAPTURE, was.code, at, "%s%s", was.text,
                       redirect ? "; or let fanin.set_options(capture_redirect=True) put the "
                                  "captured stream in its place"
                                : "");
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
    uint64_t mine, theirs;
    *out = s;
    if (!s || !t || s == t || !fan_get_capture_redirect())
        return FAN_OK;
    FAN_TRY(fan_stream_capture(s, &mine, err));
    FAN_TRY(fan_stream_capture(t, &theirs, err));
    bool same_capture =
        /* what was recorded in a capture that has ended is for no stream to take over */
        !e || e->capture == theirs;
    if (fan_capture_rule(mine, theirs, same_capture, s->handle == FAN_LEGACY) ==
        FAN_CAPTURE_REDIRECT)
        *out = t;
    return FAN_OK;
}

fan_status fan_order_record_stream(const fan_value *v, fan_stream *s, uint64_t bit, fan_error *err)
{
    if (fan_order_left_out(s->device) & bit)
        return FAN_OK;
    fan_array *own[3];
    size_t n;
    fan_array *const *all = fan_value_arrays(v, own, &n);
    for (size_t i = 0; i < n; i++)
        FAN_TRY(all[i]->storage ? fan_memory_record_stream(all[i]->storage, s, err) : FAN_OK);
    return FAN_OK;
}

/* order_term_covers: whether a wait for term j's event makes one for term i's unnecessary: its
 * record on the same stream began when that of i was through. Of terms that share one event the
 * last one waits for it. */
static bool order_term_covers(const fan_fold *f, size_t j, size_t i)
{
    const fan_term *newer = &f->terms[j];
    const fan_term *t = &f->terms[i];
    if (newer->producer != t->producer || !newer->event || !t->event)
        return false;
    if (newer->event == t->event)
        return j > i || FAN_FAULT(SHARED_EVENT_COVERS);
    if (FAN_FAULT(OLDEST_EVENT))
        return fan_event_covers(t->event, newer->event);
    return fan_event_covers(newer->event, t->event);
}

static bool order_covered(const fan_fold *f, size_t i)
{
    bool covered = false;
    for (size_t j = 0; j < f->n && !covered; j++)
        covered = j != i && order_term_covers(f, j, i);
    return covered;
}

fan_status fan_order_wait_terms(fan_fold *f, fan_error *err)
{
    fan_stream *A = fan_fold_accum(f);
    if (!A || FAN_FAULT(FOLD_UNORDERED))
        return FAN_OK;
    for (size_t i = 0; i < f->n; i++) {
        const fan_term *t = &f->terms[i];
        fan_sync_term plan = fan_sync_term_plan(fan_stream_id_of(A), fan_stream_id_of(t->producer),
                                                i == 0, order_covered(f, i));
        f->rules |= plan.rules;
        if (plan.mark)
            FAN_TRY(fan_order_record_stream(t->v, FAN_FAULT(MARK_ON_PRODUCER) ? t->producer : A,
                                            plan.mark, err));
        if (plan.wait)
            FAN_TRY(fan_order_wait(f->b, f->slot, A, t->event, plan.wait, err));
    }
    return FAN_OK;
}

/* order_flush: an event that is recorded on s now is behind all sums on s: also those that wait in
 * the batch. */
static void order_flush(const fan_fold *f, const fan_stream *s)
{
    if (f->batch && fan_batch_waits_on(f->batch, s) && !FAN_FAULT(BATCH_NOT_EXCLUSIVE))
        fan_batch_flush(f->batch);
}

fan_status fan_order_wait_users(fan_fold *f, const fan_array *a, fan_error *err)
{
    fan_stream *A = fan_fold_accum(f), *user;
    fan_status status = FAN_OK;
    if (!A || !a->storage || FAN_FAULT(WRITE_WITHOUT_WAIT) || FAN_FAULT(REFCOUNT_IS_ENOUGH))
        return FAN_OK;
    for (size_t i = 0; status == FAN_OK && (user = fan_memory_user(a->storage, i)); i++) {
        fan_event *e = NULL;
        if (user != A) {
            order_flush(f, user);
            if ((status = fan_event_record(user, &e, err)) == FAN_OK) {
                FAN_COUNT(f->b, events, 1);
                status = fan_order_wait(f->b, f->slot, A, e, 0, err);
            }
        }
        fan_event_drop(e);
        fan_stream_drop(user);
    }
    return status;
}

fan_status fan_order_wait_taker(fan_fold *f, fan_stream *on, const fan_sync_fold *plan,
                                fan_error *err)
{
    fan_stream *taker = f->taker;
    /* S7 is checked only now: `on` may have joined a capture by this sum's own waits */
    if (plan->wait_taker)
        FAN_TRY(fan_order_consumer(f->taker, on, NULL, &taker, err));
    if (plan->wait_taker && taker != on) {
        fan_event *e = NULL;
        order_flush(f, taker);
        FAN_TRY(fan_order_record(f->b, taker, 0, &e, err));
        fan_status status = fan_order_wait(f->b, f->slot, on, e, FAN_PLAN_S22_WAIT, err);
        fan_event_drop(e);
        FAN_TRY(status);
    }
    return plan->mark_out ? fan_order_record_stream(f->out, on, FAN_PLAN_S22_MARK, err) : FAN_OK;
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

fan_status fan_order_hand_over(fan_buffer *b, size_t slot, const fan_value *v, fan_stream *C,
                               fan_stream *A, fan_stream *R, fan_event *E, fan_stream *consumer,
                               uint64_t *rules, fan_error *err)
{
    fan_event *now = NULL;
    fan_status status = FAN_OK;
    if (!R || !consumer)
        return FAN_OK;
    FAN_TRY(fan_order_consumer(consumer, R, E, &consumer, err));
    fan_sync_take plan = fan_sync_take_plan((fan_sync_slot){.consumer = fan_stream_id_of(C),
                                                            .accum = fan_stream_id_of(A),
                                                            .ready = fan_stream_id_of(R),
                                                            .has_event = E != NULL},
                                            fan_stream_id_of(consumer));
    *rules |= plan.rules;
    if (plan.record_now)
        FAN_GO(fan_order_record(b, R, FAN_PLAN_S18_RECORD, &now, err));
    if (plan.wait)
        FAN_GO(fan_order_wait(b, slot, consumer, E ? E : now, FAN_PLAN_S18_WAIT, err));
    if (plan.mark)
        FAN_GO(fan_order_record_stream(v, consumer, FAN_PLAN_S19_MARK, err));
done:
    fan_event_drop(now);
    return status;
}

fan_status fan_pass_end(fan_stream *caller, fan_stream *const *streams, size_t n,
                        const fan_value *values, size_t nvalues, fan_error *err)
{
    uint64_t out =
        caller->device->backend->left_out ? caller->device->backend->left_out(caller->device) : 0;
    fan_stream *instead = caller; /* S7: the first captured one, for those of its capture */
    for (size_t i = 0; i < n; i++) {
        fan_event *e = NULL;
        fan_stream *on;
        if (streams[i] == caller || (out & FAN_PLAN_S20_WAIT))
            continue;
        FAN_TRY(fan_order_consumer(caller, streams[i], NULL, &on, err));
        instead = on != caller && instead == caller ? on : instead;
        on = on != caller ? instead : caller;
        if (on == streams[i])
            continue;
        FAN_TRY(fan_event_record(streams[i], &e, err));
        fan_status status = fan_stream_wait(on, e, NULL, err);
        fan_event_drop(e);
        if (status == FAN_ERR_CAPTURE)
            status = order_refused(
                (fan_place){.object = "the end of the pass", .slot = -1, .key = -1}, err);
        FAN_TRY(status);
    }
    for (size_t i = 0; i < nvalues; i++) {
        FAN_TRY(fan_order_record_stream(&values[i], caller, FAN_PLAN_S20_MARK, err));
        FAN_TRY(fan_order_record_stream(&values[i], instead, FAN_PLAN_S20_MARK, err));
    }
    return FAN_OK;
}
