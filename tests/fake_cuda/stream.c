/* Streams and events. */
#include "device/sim/machine.h"
#include "fake_cuda/entry.h"

fan_cu_result fan_fake_CtxSynchronize(void)
{
    fan_error err = {.status = FAN_OK};
    CALL(CtxSynchronize);
    INSIDE(c);
    BESIDE(CtxSynchronize);
    fan__fake_note_races();
    fan_cu_result code = fan__fake_done(fan_sim_synchronize(fan__fake.m, &err), &err);
    fan__fake_synchronized();
    return fan__first_of(code, c->lost);
}

/* stream_reuse: the handle of the stream of the device that was destroyed last is a new stream's: a
 * driver gives addresses out again. What the old one has queued still runs. False: there is none,
 * or no memory. */
static bool stream_reuse(fan__thing *fresh, fan_cu_stream *out)
{
    fan__thing *old = fan__thing_new(RETIRED, fresh->device);
    fan__thing *t = NULL;
    fan__fake_lock();
    for (t = fan__fake.things[DESTROYED]; old && t && t->device != fresh->device;)
        t = t->next;
    if (old && t) {
        fan__thing_remove(t);
        old->stream = t->stream;
        t->stream = fresh->stream;
        t->id = fresh->id;
        t->kind = A_STREAM;
        fresh->stream = NULL;
    }
    fan__fake_unlock();
    if (!old || !t) {
        if (old)
            fan__thing_drop(old);
        return false;
    }
    fan__thing_add(old);
    fan__thing_add(t);
    fan__thing_drop(fresh);
    *out = (fan_cu_stream)(void *)t;
    return true;
}

fan_cu_result fan_fake_StreamCreate(fan_cu_stream *out, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    CALL(StreamCreate);
    INSIDE(c);
    BESIDE(StreamCreate);
    fan__thing *t = fan__thing_new(A_STREAM, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code =
        fan__fake_code(fan_sim_stream(fan__fake.m, c->device, !(flags & FAN_CU_STREAM_NON_BLOCKING),
                                      &t->stream, &err),
                       &err);
    if (code) {
        fan__thing_drop(t);
        return code;
    }
    fan__fake_lock();
    t->id = ++fan__fake.ids + 16;
    fan__fake_unlock();
    if (stream_reuse(t, out))
        return OK;
    fan__thing_add(t);
    *out = (fan_cu_stream)(void *)t;
    return OK;
}

fan_cu_result fan_fake_StreamDestroy(fan_cu_stream s)
{
    CALL(StreamDestroy);
    INSIDE(c);
    BESIDE(StreamDestroy);
    fan__thing *t = fan__thing_find(A_STREAM, s);
    if (!t)
        return fan__thing_unknown(s);
    fan__fake_lock();
    fan__thing_remove(t);
    fan__fake_unlock();
    t->kind = DESTROYED; /* what is queued still runs, and the device is waited for with it */
    fan__thing_add(t);
    return OK;
}

/* stream_of_handle: a stream that was created; NULL for the default ones, and on a failure, with
 * *code. */
static const fan__thing *stream_of_handle(fan_cu_stream s, fan_cu_result *code)
{
    const fan__thing *t = NULL;
    *code = OK;
    if ((uintptr_t)s > 2) {
        t = fan__thing_find(A_STREAM, s);
        if (!t)
            *code = fan__thing_unknown(s);
    }
    return t;
}

fan_cu_result fan_fake_StreamGetCtx(fan_cu_stream s, fan_cu_context *out)
{
    fan_cu_result code;
    CALL(StreamGetCtx);
    INSIDE(c);
    BESIDE(StreamGetCtx);
    const fan__thing *t = stream_of_handle(s, &code);
    if (code)
        return code;
    *out = t ? &fan__fake.contexts[t->device] : c;
    return OK;
}

fan_cu_result fan_fake_StreamGetId(fan_cu_stream s, uint64_t *id)
{
    fan_cu_result code;
    CALL(StreamGetId);
    INSIDE(c);
    const fan__thing *t = stream_of_handle(s, &code);
    if (code)
        return code;
    *id = t ? t->id : (uintptr_t)c + (uintptr_t)s;
    return OK;
}

fan_cu_result fan_fake_StreamSynchronize(fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(StreamSynchronize);
    INSIDE(c);
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    fan__fake_note_races();
    code = fan__fake_done(s->device->backend->sync(s, &err), &err);
    fan__fake_synchronized();
    fan_stream_drop(s);
    return fan__first_of(code, c->lost);
}

fan_cu_result fan_fake_StreamWaitEvent(fan_cu_stream handle, fan_cu_event e, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(StreamWaitEvent);
    INSIDE(c);
    fan__thing *t = fan__thing_find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    if (flags)
        return INVALID_VALUE;
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    code = fan__fake_done(s->device->backend->wait(s, t->event, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_EventCreate(fan_cu_event *out, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    CALL(EventCreate);
    INSIDE(c);
    fan__thing *t = fan__thing_new(AN_EVENT, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    t->timed = !(flags & FAN_CU_EVENT_DISABLE_TIMING);
    fan_cu_result code = fan__fake_code(
        fan_event_new(fan_sim_device(fan__fake.m, c->device), &t->event, &err), &err);
    if (code) {
        fan__thing_drop(t);
        return code;
    }
    fan__thing_add(t);
    *out = (fan_cu_event)(void *)t;
    return OK;
}

fan_cu_result fan_fake_EventDestroy(fan_cu_event e)
{
    CALL(EventDestroy);
    INSIDE(c);
    fan__thing *t = fan__thing_find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    fan__thing_drop(t);
    return OK;
}

fan_cu_result fan_fake_EventRecord(fan_cu_event e, fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(EventRecord);
    INSIDE(c);
    fan__thing *t = fan__thing_find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    code = INVALID_HANDLE;
    if (s->device->index == t->device)
        code = fan__fake_done(s->device->backend->record(t->event, s, &err), &err);
    fan_stream_drop(s);
    return code;
}

/* event_read: a copy of the machine's event, to be looked at alone. */
static fan_sim_event event_read(const fan__thing *t)
{
    fan__sim_lock(fan__fake.m);
    fan_sim_event event = *(const fan_sim_event *)t->event->impl;
    fan__sim_unlock(fan__fake.m);
    return event;
}

fan_cu_result fan_fake_EventQuery(fan_cu_event e)
{
    fan_error err = {.status = FAN_OK};
    bool passed = false;
    CALL(EventQuery);
    INSIDE(c);
    fan__thing *t = fan__thing_find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    if (!event_read(t).recording) /* else it has no time at all */
        BESIDE(EventQuery);
    fan_cu_result code =
        fan__fake_done(t->event->device->backend->query(t->event, &passed, &err), &err);
    return fan__first_of(code, fan__ok_or(passed, NOT_READY));
}

fan_cu_result fan_fake_EventSynchronize(fan_cu_event e)
{
    fan_error err = {.status = FAN_OK};
    CALL(EventSynchronize);
    INSIDE(c);
    fan__thing *t = fan__thing_find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    if (!event_read(t).recording)
        BESIDE(EventSynchronize);
    fan__fake_note_races();
    fan_cu_result code =
        fan__fake_done(t->event->device->backend->event_sync(t->event, &err), &err);
    fan__fake_synchronized();
    return fan__first_of(code, c->lost);
}

/* What callers of the driver use, and the backend does not. */

API cuEventElapsedTime(float *ms, fan_cu_event start, fan_cu_event end);

/* By the machine's clock: what work costs in its model. */
fan_cu_result cuEventElapsedTime(float *ms, fan_cu_event start, fan_cu_event end)
{
    INSIDE(c);
    (void)c;
    const fan__thing *from = fan__thing_find(AN_EVENT, start);
    const fan__thing *to = fan__thing_find(AN_EVENT, end);
    if (!from || !from->timed)
        return INVALID_HANDLE;
    if (!to || !to->timed)
        return INVALID_HANDLE;
    fan_cu_result code = fan_fake_EventQuery(start);
    if (code == OK)
        code = fan_fake_EventQuery(end);
    if (code)
        return code;
    *ms = (float)((event_read(to).us - event_read(from).us) / 1000);
    return OK;
}
