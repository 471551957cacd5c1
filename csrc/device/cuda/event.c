#include "device/cuda/event.h"

#include "base/fault.h"
#include "device/cuda/context.h"
#include "device/cuda/stream.h"

static fan_cu_event event_handle(const fan_event *e) { return e->impl; }

fan_status fan__cuda_event_init(fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(e->device);
    fan__cuda_scope scope;
    fan_cu_event made = NULL;
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    fan_status status =
        fan__cuda_check(p, fan__cuda_api_of(p)->EventCreate(&made, FAN_CU_EVENT_DISABLE_TIMING), "cuEventCreate", err);
    fan__cuda_leave(&scope);
    e->impl = made;
    return status;
}

void fan__cuda_event_fini(fan_event *e)
{
    fan_cuda_part *p = fan__cuda_part_of(e->device);
    fan__cuda_scope scope;
    if (!fan__cuda_usable(p) || fan__cuda_enter(p, &scope, NULL) != FAN_OK)
        return;
    (void)fan__cuda_check(p, fan__cuda_api_of(p)->EventDestroy(event_handle(e)), "cuEventDestroy", NULL);
    fan__cuda_leave(&scope);
}

fan_status fan__cuda_record(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__cuda_scope scope;
    fan_cu_stream on;
    if (!err && atomic_load_explicit(&fan__cuda_queue(s)->passed, memory_order_relaxed))
        on = p->free_stream; /* called for freed memory, and nothing of the stream runs any more */
    else
        FAN_TRY(fan__cuda_queue_of(s, &on, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    fan_status status =
        FAN_FAULT(CUDA_NO_RECORD)
            ? FAN_OK
            : fan__cuda_check(p, fan__cuda_api_of(p)->EventRecord(event_handle(e), on), "cuEventRecord", err);
    fan__cuda_leave(&scope);
    return status;
}

fan_status fan__cuda_note(fan_event *e, fan_stream *s, fan_error *err)
{
    uint64_t capture = 0;
    FAN_TRY(fan__cuda_record(e, s, err));
    FAN_TRY(fan__cuda_capture(s, &capture, err)); /* after the record: another thread may have begun a capture */
    return capture ? fan_fail_code(err, FAN_ERR_CAPTURE, 907, "a capture of the stream began: the event may be in it")
                   : FAN_OK;
}

fan_status fan__cuda_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__cuda_scope scope;
    fan_cu_stream on;
    if (fan__cuda_part_of(e->device)->cuda != p->cuda)
        return fan_fail(err, FAN_ERR_VALUE, "a stream cannot wait for an event of another driver");
    if (atomic_load_explicit(&fan__cuda_part_of(e->device)->dead, memory_order_acquire))
        return fan__cuda_refuse_dead(fan__cuda_part_of(e->device), err);
    FAN_TRY(fan__cuda_queue_of(s, &on, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    fan_status status = FAN_FAULT(CUDA_NO_WAIT)
                            ? FAN_OK
                            : fan__cuda_check(p, fan__cuda_api_of(p)->StreamWaitEvent(on, event_handle(e), 0),
                                              "cuStreamWaitEvent", err);
    fan__cuda_leave(&scope);
    return status;
}

static fan_status event_free_to_ask(fan_event *e, fan_error *err)
{
    (void)pthread_mutex_lock(&e->device->lock); /* another thread may be recording it */
    bool captured = e->capture != 0;
    (void)pthread_mutex_unlock(&e->device->lock);
    return captured
               ? fan_fail_code(
                     err, FAN_ERR_CAPTURE, 907,
                     "the event was recorded on a captured stream of cuda:%d: it has no time, and can be waited for "
                     "inside the capture alone",
                     e->device->index)
               : FAN_OK;
}

fan_status fan__cuda_query(fan_event *e, bool *done, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(e->device);
    fan__cuda_scope scope;
    FAN_TRY(event_free_to_ask(e, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    int mode = fan__cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = fan__cuda_api_of(p)->EventQuery(event_handle(e));
    (void)fan__cuda_relax(p, mode);
    *done = code == 0;
    fan_status status = code == FAN_CU_NOT_READY ? FAN_OK : fan__cuda_check(p, code, "cuEventQuery", err);
    fan__cuda_leave(&scope);
    return status;
}

bool fan__cuda_peek(fan_event *e)
{
    bool done = false;
    if (!fan__cuda_usable(fan__cuda_part_of(e->device)) || FAN_FAULT(CUDA_EARLY_FREE))
        return true; /* nothing runs any more, and the memory is not freed */
    return fan__cuda_query(e, &done, NULL) == FAN_OK && done;
}

fan_status fan__cuda_event_sync(fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(e->device);
    fan__cuda_scope scope;
    FAN_TRY(event_free_to_ask(e, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    int mode = fan__cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = fan__cuda_api_of(p)->EventSynchronize(event_handle(e));
    (void)fan__cuda_relax(p, mode);
    fan_status status = fan__cuda_check(p, code, "cuEventSynchronize", err);
    fan__cuda_leave(&scope);
    if (status == FAN_OK)
        fan_sync_trace(e->device, NULL, e);
    return status;
}
