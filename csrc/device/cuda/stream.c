/* Streams and events of the driver: the list of a device's streams, by their handles; captures, and
 * streams that join them; waits of the host; and the table's entries for events. */
#include "device/cuda/part.h"

#include "base/fault.h"
#include "base/mem.h"

static bool stream_is_gone(const fan_stream *s)
{
    return atomic_load_explicit(&fan__cuda_queue(s)->gone, memory_order_relaxed);
}

fan_status fan__cuda_queue_of(const fan_stream *s, fan_cu_stream *out, fan_error *err)
{
    const fan__cuda_stream *q = fan__cuda_queue(s);
    if (q->thread && q->thread != fan_thread_id()) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "stream 2 of cuda:%d is the per-thread default stream of another thread, "
                        "and no call can use it on this thread; use a stream of your own",
                        s->device->index);
    }
    if (stream_is_gone(s)) {
        return fan_fail_code(err, FAN_ERR_DEVICE, 709,
                             "stream %#llx of cuda:%d was destroyed: keep a stream until what was "
                             "added on it has been taken",
                             (unsigned long long)s->handle, s->device->index);
    }
    *out = q->handle;
    return FAN_OK;
}

fan_status fan__cuda_enter_on(const fan_stream *s, fan__cuda_scope *scope, fan_error *err)
{
    fan_cu_stream on;
    FAN_TRY(fan__cuda_queue_of(s, &on, err));
    FAN_TRY(fan__cuda_enter(fan__cuda_part_of(s->device), scope, err));
    scope->on = on;
    return FAN_OK;
}

fan_status fan__cuda_capture_of(fan_stream *s, uint64_t *id, fan_cu_graph *graph, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    const fan_cuda_api *api = fan__cuda_api_of(p);
    int status = FAN_CU_CAPTURE_NONE;
    uint64_t found = 0;
    fan_cu_stream on;
    *id = 0;
    FAN_TRY(fan__cuda_queue_of(s, &on, err));
    if (!api->has[FAN_CUDA_CAPTURE])
        return FAN_OK;
    /* The legacy stream is never captured, and must not be used while a blocking stream is. This
     * query reports that (906) and disturbs no capture; work queued on it would. */
    fan_cu_result code = api->StreamGetCaptureInfo(on, &status, &found, graph, NULL, NULL);
    if (fan_cuda_stale(code) && s->handle > 2 && fan__cuda_lives(p))
        atomic_store_explicit(&fan__cuda_queue(s)->gone, true, memory_order_relaxed);
    FAN_TRY(fan__cuda_check(p, code, "cuStreamGetCaptureInfo", err));
    if (status == FAN_CU_CAPTURE_BROKEN) {
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, 901, "stream %#llx of cuda:%d is captured, and %s",
            (unsigned long long)s->handle, s->device->index, fan__cuda_capture_advice(901));
    }
    if (status == FAN_CU_CAPTURE_ACTIVE)
        *id = found;
    return FAN_OK;
}

/* stream_among: returns a hold on the stream of a handle in the part's list. One with another id
 * was destroyed, and its handle now belongs to another stream. The part's lock is held. */
static fan_stream *stream_among(fan_cuda_part *p, uint64_t handle, uint64_t thread, uint64_t id)
{
    for (size_t i = 0; i < p->nstreams; i++) {
        fan_stream *s = p->streams[i];
        fan__cuda_stream *q = fan__cuda_queue(s);
        if (s->handle != handle || q->thread != thread || stream_is_gone(s))
            continue;
        if (id && q->id != id && !FAN_FAULT(CUDA_SAME_HANDLE))
            atomic_store_explicit(&q->gone, true, memory_order_relaxed);
        else if (fan_stream_try_hold(s))
            return s;
    }
    return NULL;
}

static fan_stream *stream_known(fan_cuda_part *p, uint64_t handle, uint64_t thread, uint64_t id)
{
    fan__part_lock(p);
    fan_stream *found = stream_among(p, handle, thread, id);
    fan__part_unlock(p);
    return found;
}

/* stream_make: returns the listed stream of a handle, or lists a new one. */
static fan_stream *stream_make(fan_cuda_part *p, uint64_t handle, uint64_t thread, uint64_t id)
{
    fan_stream *there = stream_known(p, handle, thread, id);
    if (there)
        return there;
    fan__cuda_stream *q = fan_calloc(sizeof *q);
    fan_stream *s = NULL;
    if (q)
        s = fan_stream_new(&p->device, handle, q);
    if (!s) {
        fan_free(q);
        return NULL;
    }
    q->handle = (fan_cu_stream)(uintptr_t)handle;
    q->thread = thread;
    q->id = id;
    fan__part_lock(p);
    fan_stream *other = stream_among(p, handle, thread, id);
    bool failed = false;
    if (!other) {
        failed =
            fan_grow((void **)&p->streams, &p->streams_cap, p->nstreams + 1, sizeof *p->streams);
    }
    if (!other && !failed)
        p->streams[p->nstreams++] = s;
    fan__part_unlock(p);
    if (other || failed) {
        fan_stream_drop(s);
        s = other;
    }
    return s;
}

/* stream_is_of: FAN_ERR_VALUE if a handle is of another context than the part's. */
static fan_status stream_is_of(fan_cuda_part *p, uint64_t handle, fan_error *err)
{
    fan_cu_context of = NULL;
    int mode = fan__cuda_relax(p);
    fan_cu_result code = fan__cuda_api_of(p)->StreamGetCtx((fan_cu_stream)(uintptr_t)handle, &of);
    fan__cuda_restore(p, mode);
    FAN_TRY(fan__cuda_check(p, code, "cuStreamGetCtx", err));
    if (of == p->context)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_VALUE,
                    "stream %#llx is not of cuda:%d's primary context: it belongs to another "
                    "device, or to a context of its own, as the streams of a green context do",
                    (unsigned long long)handle, p->index);
}

fan_status fan_cuda_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    fan__cuda_scope scope;
    fan_status status;
    uint64_t thread = 0;
    uint64_t id = 0;
    *out = NULL;
    if (handle == 0)
        handle = 1;
    if (handle == 2)
        thread = fan_thread_id();
    if (handle > 2) {
        FAN_TRY(fan__cuda_enter(p, &scope, err));
        const fan_cuda_api *api = fan__cuda_api_of(p);
        fan_cu_result code = 0;
        if (api->has[FAN_CUDA_STREAM_IDS]) /* the driver's number of the stream; 0: unknown */
            code = api->StreamGetId((fan_cu_stream)(uintptr_t)handle, &id);
        status = fan__cuda_check(p, code, "cuStreamGetId", err);
        if (status == FAN_OK)
            *out = stream_known(p, handle, thread, id);
        if (status == FAN_OK && !*out)
            status = stream_is_of(p, handle, err);
        fan__cuda_leave(&scope);
        if (status != FAN_OK || *out)
            return status;
    }
    *out = stream_make(p, handle, thread, id);
    if (!*out)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    return FAN_OK;
}

fan_stream *fan__cuda_current(fan_device *d)
{
    fan_stream *s = NULL;
    (void)fan_cuda_stream(d, 1, &s, NULL);
    return s;
}

void fan__cuda_stream_fini(fan_stream *s)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__part_lock(p);
    for (size_t i = 0; i < p->nstreams; i++) {
        if (p->streams[i] == s) {
            p->streams[i] = p->streams[--p->nstreams];
            break;
        }
    }
    fan__part_unlock(p);
    fan_free(s->impl);
}

fan_status fan__cuda_capture(fan_stream *s, uint64_t *id, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__cuda_scope scope;
    *id = 0;
    if (!fan__cuda_usable(p))
        return FAN_OK;
    if ((!err && atomic_load_explicit(&fan__cuda_queue(s)->passed, memory_order_acquire)))
        return FAN_OK;
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    fan_status status = fan__cuda_capture_of(s, id, NULL, err);
    fan__cuda_leave(&scope);
    return status;
}

/* capture_stream_for: returns the stream that this capture already uses, or an unused one. The
 * part's lock is held. */
static fan__capture_stream *capture_stream_for(fan_cuda_part *p, uint64_t capture)
{
    fan__capture_stream *idle = NULL;
    for (size_t i = 0; i < p->ncapture_streams; i++) {
        fan__capture_stream *one = &p->capture_streams[i];
        bool held = one->asked > 0;
        if (one->capture == capture)
            return one;
        for (size_t k = 0; k < p->nstreams && !held; k++)
            held = p->streams[k]->handle == one->handle;
        if (!held && !idle)
            idle = one;
    }
    return idle;
}

/* capture_stream_new: creates a stream in relaxed mode, because a capture is in progress. */
static fan_status capture_stream_new(fan_cuda_part *p, uint64_t *handle, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan__cuda_scope scope;
    fan_cu_stream made = NULL;
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    int mode = fan__cuda_relax(p);
    fan_cu_result code = api->StreamCreate(&made, FAN_CU_STREAM_NON_BLOCKING);
    fan__cuda_restore(p, mode);
    fan_status status = fan__cuda_check(p, code, "cuStreamCreate", err);
    if (status == FAN_OK) {
        *handle = (uint64_t)(uintptr_t)made;
        fan__part_lock(p);
        bool failed = fan_grow((void **)&p->capture_streams, &p->capture_streams_cap,
                               p->ncapture_streams + 1, sizeof *p->capture_streams);
        if (!failed) {
            p->capture_streams[p->ncapture_streams++] = (fan__capture_stream){
                .handle = *handle,
                .asked = 1,
            };
        }
        fan__part_unlock(p);
        if (failed) {
            mode = fan__cuda_relax(p);
            (void)fan__cuda_check(p, api->StreamDestroy(made), "cuStreamDestroy", NULL);
            fan__cuda_restore(p, mode);
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
        }
    }
    fan__cuda_leave(&scope);
    return status;
}

fan_status fan__cuda_capture_stream(fan_device *d, uint64_t id, fan_stream **out, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    uint64_t handle = 0;
    *out = NULL;
    fan__part_lock(p);
    fan__capture_stream *found = capture_stream_for(p, id);
    if (found) {
        handle = found->handle;
        found->capture = id;
        found->asked++;
    }
    fan__part_unlock(p);
    if (!handle)
        FAN_TRY(capture_stream_new(p, &handle, err));
    fan_status status = fan_cuda_stream(d, handle, out, err);
    fan__part_lock(p);
    for (size_t i = 0; i < p->ncapture_streams; i++) {
        if (p->capture_streams[i].handle == handle) {
            p->capture_streams[i].capture = id;
            p->capture_streams[i].asked--;
        }
    }
    fan__part_unlock(p);
    return status;
}

/* stream_not_captured: refuses waits of the host while s is captured, before the driver is called:
 * so the capture stays valid. */
static fan_status stream_not_captured(fan_stream *s, fan_error *err)
{
    uint64_t id;
    FAN_TRY(fan__cuda_capture_of(s, &id, NULL, err));
    if (!id)
        return FAN_OK;
    return fan_fail_code(
        err, FAN_ERR_CAPTURE, 900,
        "stream %#llx of cuda:%d is captured and cannot be waited for: do it before "
        "the capture, or after it",
        (unsigned long long)s->handle, s->device->index);
}

/* stream_is_of_another_thread: whether s is a thread's own default stream, and not this one's. */
static bool stream_is_of_another_thread(const fan_stream *s)
{
    uint64_t thread = fan__cuda_queue(s)->thread;
    return thread && thread != fan_thread_id();
}

bool fan__cuda_stream_at(fan_cuda_part *p, size_t i, fan_stream **out)
{
    *out = NULL;
    fan__part_lock(p);
    bool exists = i < p->nstreams;
    if (exists && fan_stream_try_hold(p->streams[i]))
        *out = p->streams[i];
    fan__part_unlock(p);
    return exists;
}

bool fan__cuda_none_captured(fan_cuda_part *p)
{
    bool captured = false;
    /* it covers blocking streams that fanin has not met */
    fan_stream *legacy = fan__cuda_current(&p->device);
    fan_stream *s;
    for (size_t i = 0; !captured && fan__cuda_stream_at(p, i, &s); i++) {
        /* a destroyed stream is not checked, and not refused */
        if (s && !stream_is_of_another_thread(s))
            captured = stream_not_captured(s, NULL) == FAN_ERR_CAPTURE;
        fan_stream_drop(s);
    }
    fan_stream_drop(legacy);
    return !captured;
}

void fan__cuda_await_gone(fan_cuda_part *p)
{
    bool some = false;
    fan__part_lock(p);
    for (size_t i = 0; i < p->nstreams; i++)
        some |= stream_is_gone(p->streams[i]);
    fan__part_unlock(p);
    if (!some || !fan__cuda_none_captured(p))
        return;
    fan_cu_result code = fan__cuda_api_of(p)->CtxSynchronize();
    if (fan__cuda_check(p, code, "cuCtxSynchronize", NULL) != FAN_OK)
        return;
    fan__part_lock(p);
    for (size_t i = 0; i < p->nstreams; i++) {
        fan_stream *s = p->streams[i];
        if (stream_is_gone(s))
            atomic_store_explicit(&fan__cuda_queue(s)->passed, true, memory_order_release);
    }
    fan__part_unlock(p);
}

fan_status fan__cuda_sync(fan_stream *s, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__cuda_scope scope;
    fan_cu_stream on;
    fan_status status;
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    if (stream_is_of_another_thread(s)) {
        /* Another thread's own stream: the legacy stream waits for all such streams and disturbs no
         * capture; if it must not be used, nothing can wait. */
        fan_stream *legacy = fan__cuda_current(&p->device);
        uint64_t id;
        if (legacy)
            status = fan__cuda_capture_of(legacy, &id, NULL, err);
        else
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
        if (status == FAN_OK)
            status = fan__cuda_pass(p, fan__cuda_queue(legacy)->handle, err);
        fan_stream_drop(legacy);
        goto done;
    }
    FAN_GO(stream_not_captured(s, err));
    FAN_GO(fan__cuda_queue_of(s, &on, err));
    if (!FAN_FAULT(CUDA_NO_SYNC))
        status = fan__cuda_pass(p, on, err);
done:
    fan__cuda_leave(&scope);
    if (status == FAN_OK)
        fan_sync_trace(s->device, s, NULL);
    return status;
}

fan_status fan__cuda_event_init(fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(e->device);
    fan__cuda_scope scope;
    fan_cu_event made = NULL;
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    fan_status status =
        fan__cuda_check(p, fan__cuda_api_of(p)->EventCreate(&made, FAN_CU_EVENT_DISABLE_TIMING),
                        "cuEventCreate", err);
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
    (void)fan__cuda_check(p, fan__cuda_api_of(p)->EventDestroy(e->impl), "cuEventDestroy", NULL);
    fan__cuda_leave(&scope);
}

fan_status fan__cuda_record(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__cuda_scope scope;
    fan_cu_stream on;
    if (!err && atomic_load_explicit(&fan__cuda_queue(s)->passed, memory_order_acquire))
        on = p->free_stream; /* called for freed memory, and nothing of the stream runs any more */
    else
        FAN_TRY(fan__cuda_queue_of(s, &on, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    fan_cu_result code = 0;
    if (!FAN_FAULT(CUDA_NO_RECORD))
        code = fan__cuda_api_of(p)->EventRecord(e->impl, on);
    fan_status status = fan__cuda_check(p, code, "cuEventRecord", err);
    fan__cuda_leave(&scope);
    return status;
}

fan_status fan__cuda_note(fan_event *e, fan_stream *s, fan_error *err)
{
    uint64_t capture = 0;
    FAN_TRY(fan__cuda_record(e, s, err));
    /* after the record: another thread may have begun a capture */
    FAN_TRY(fan__cuda_capture(s, &capture, err));
    if (!capture)
        return FAN_OK;
    return fan_fail_code(err, FAN_ERR_CAPTURE, 907,
                         "a capture of the stream began: the event may be in it");
}

fan_status fan__cuda_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan_cuda_part *of = fan__cuda_part_of(e->device);
    fan__cuda_scope scope;
    if (of->cuda != p->cuda)
        return fan_fail(err, FAN_ERR_VALUE, "a stream cannot wait for an event of another driver");
    if (atomic_load_explicit(&of->dead, memory_order_acquire))
        return fan__cuda_refuse_dead(of, err);
    FAN_TRY(fan__cuda_enter_on(s, &scope, err));
    fan_cu_result code = 0;
    if (!FAN_FAULT(CUDA_NO_WAIT))
        code = fan__cuda_api_of(p)->StreamWaitEvent(scope.on, e->impl, 0);
    fan_status status = fan__cuda_check(p, code, "cuStreamWaitEvent", err);
    fan__cuda_leave(&scope);
    return status;
}

static fan_status event_free_to_ask(fan_event *e, fan_error *err)
{
    fan__device_lock(e->device); /* another thread may be recording it */
    bool captured = e->capture != 0;
    fan__device_unlock(e->device);
    if (!captured)
        return FAN_OK;
    return fan_fail_code(err, FAN_ERR_CAPTURE, 907,
                         "the event was recorded on a captured stream of cuda:%d: it has no time, "
                         "and can be waited for inside the capture alone",
                         e->device->index);
}

fan_status fan__cuda_query(fan_event *e, bool *done, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(e->device);
    fan__cuda_scope scope;
    FAN_TRY(event_free_to_ask(e, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    int mode = fan__cuda_relax(p);
    fan_cu_result code = fan__cuda_api_of(p)->EventQuery(e->impl);
    fan__cuda_restore(p, mode);
    *done = code == 0;
    fan_status status = FAN_OK;
    if (code != FAN_CU_NOT_READY)
        status = fan__cuda_check(p, code, "cuEventQuery", err);
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
    int mode = fan__cuda_relax(p);
    fan_cu_result code = fan__cuda_api_of(p)->EventSynchronize(e->impl);
    fan__cuda_restore(p, mode);
    fan_status status = fan__cuda_check(p, code, "cuEventSynchronize", err);
    fan__cuda_leave(&scope);
    if (status == FAN_OK)
        fan_sync_trace(e->device, NULL, e);
    return status;
}
