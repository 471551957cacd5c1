#define _POSIX_C_SOURCE 200809L
#include "device/cuda_part.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- forks ---- */

static atomic_uint forks;
static pthread_once_t watching = PTHREAD_ONCE_INIT;
static pthread_mutex_t opened_lock = PTHREAD_MUTEX_INITIALIZER, one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static fan_cuda *opened; /* all drivers; guarded by opened_lock */

/* As in device.c: a fork waits until nobody holds a part's lock, under which nothing is called. */
static void before_fork(void)
{
    (void)pthread_mutex_lock(&opened_lock);
    for (fan_cuda *c = opened; c; c = c->next)
        for (int i = 0; i < c->count; i++)
            (void)pthread_mutex_lock(&c->parts[i].lock);
}

static void after_fork(void)
{
    for (fan_cuda *c = opened; c; c = c->next)
        for (int i = 0; i < c->count; i++)
            (void)pthread_mutex_unlock(&c->parts[i].lock);
    (void)pthread_mutex_unlock(&opened_lock);
}

static void in_child(void)
{
    after_fork();
    (void)pthread_mutex_init(&one_at_a_time,
                             NULL); /* who held it is not here, and what was half made is not asked for again */
    atomic_fetch_add(&forks, 1);
}

static void watch_forks(void) { (void)pthread_atfork(before_fork, after_fork, in_child); }

static void enlist(fan_cuda *c)
{
    (void)pthread_mutex_lock(&opened_lock);
    c->next = opened;
    opened = c;
    (void)pthread_mutex_unlock(&opened_lock);
}

static void strike(fan_cuda *c)
{
    (void)pthread_mutex_lock(&opened_lock);
    for (fan_cuda **at = &opened; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    (void)pthread_mutex_unlock(&opened_lock);
}

static bool forked(const fan_cuda *c) { return c->life != atomic_load_explicit(&forks, memory_order_relaxed); }

/* ---- calls ---- */

bool fan_cuda_usable(const fan_cuda_part *p)
{
    return !forked(p->cuda) && !atomic_load_explicit(&p->dead, memory_order_acquire);
}

/* refuse_dead: the first cause, told again. */
static fan_status refuse_dead(fan_cuda_part *p, fan_error *err)
{
    return fan_fail_code(err, FAN_ERR_DEVICE, p->cause.code,
                         "cuda:%d is lost since an earlier failure: %s. Restart the process to use it again", p->index,
                         p->cause.text);
}

static fan_status refuse_child(const fan_cuda_part *p, fan_error *err)
{
    return fan_fail(err, FAN_ERR_STATE,
                    "cuda:%d cannot be used in a forked child: CUDA does not live through fork(). Start processes with "
                    "the \"spawn\" "
                    "or \"forkserver\" method of multiprocessing, or touch the device in the child alone",
                    p->index);
}

fan_status fan_cuda_enter(fan_cuda_part *p, fan_cuda_scope *scope, fan_error *err)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    fan_cu_context now = NULL;
    *scope = (fan_cuda_scope){.part = p};
    if (forked(p->cuda))
        return refuse_child(p, err);
    if (!fan_cuda_usable(p))
        return refuse_dead(p, err);
    FAN_TRY(fan_cuda_check(p, api->CtxGetCurrent(&now), "cuCtxGetCurrent", err));
    if (now == p->context)
        return FAN_OK;
    FAN_TRY(fan_cuda_check(p, api->CtxPushCurrent(p->context), "cuCtxPushCurrent", err));
    scope->pushed = true;
    return FAN_OK;
}

void fan_cuda_leave(fan_cuda_scope *scope)
{
    fan_cu_context mine = NULL;
    if (!scope->pushed || FAN_FAULT(CUDA_NO_POP))
        return;
    scope->pushed = false;
    (void)fan_cuda_check(scope->part, fan_cuda_api_of(scope->part)->CtxPopCurrent(&mine), "cuCtxPopCurrent", NULL);
}

/* die: the first cause is kept. */
static void die(fan_cuda_part *p, const fan_error *cause)
{
    (void)pthread_mutex_lock(&p->lock);
    if (!atomic_load_explicit(&p->dead, memory_order_relaxed) && !FAN_FAULT(CUDA_NO_POISON)) {
        p->cause = *cause;
        atomic_store_explicit(&p->dead, true, memory_order_release);
    }
    (void)pthread_mutex_unlock(&p->lock);
}

/* capture_advice: what to do about the codes 900 to 908. */
static const char *capture_advice(fan_cu_result code)
{
    switch (code) {
    case 900:
        return "this cannot be asked of a stream that is captured: do it before the capture, or after it";
    case 901:
        return "an earlier violation has ended this capture: end it and begin anew";
    case 902:
        return "two captures would become one: capture on one stream, and fork the others from it";
    case 904:
        return "a stream that was pulled into the capture was not joined back: let the first stream wait for it before "
               "the capture ends";
    case 905:
        return "captured work would wait for work outside: record the event inside the capture, or wait before it "
               "begins";
    case 906:
        return "the legacy default stream cannot take part while a blocking stream is captured: use other streams";
    case 907:
        return "an event of a capture has no time: it can be waited for inside the capture alone";
    default:
        return "see docs/cuda.md, Capture";
    }
}

/* lives: the primary context is there, as far as the driver knows. */
static bool lives(const fan_cuda_part *p)
{
    unsigned flags = 0;
    int active = 0;
    return p->ready && fan_cuda_api_of(p)->DevicePrimaryCtxGetState(p->ordinal, &flags, &active) == 0 && active;
}

fan_status fan_cuda_check(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err)
{
    char text[256];
    fan_error mine = {.status = FAN_OK};
    if (code == 0)
        return FAN_OK;
    if (!err)
        err = &mine;
    (void)fan_cuda_text(fan_cuda_api_of(p), code, text, sizeof text);
    if (code == FAN_CU_OUT_OF_MEMORY)
        return fan_fail_code(err, FAN_ERR_DEVICE_NOMEM, code, "%s on cuda:%d failed: %s", call, p->index, text);
    if (code >= 900 && code <= 908)
        return fan_fail_code(err, FAN_ERR_CAPTURE, code, "%s on cuda:%d failed: %s; %s", call, p->index, text,
                             capture_advice(code));
    fan_status status = fan_fail_code(err, FAN_ERR_DEVICE, code, "%s on cuda:%d failed: %s", call, p->index, text);
    if (fan_cuda_stale(code) && lives(p)) {
        fan_append(err->text, sizeof err->text,
                   ". The device's context is there: it is a stream, an event or memory that is not. Was a stream "
                   "destroyed that is still used?");
    } else if (fan_cuda_sticky(code)) {
        die(p, err);
        fan_append(
            err->text, sizeof err->text,
            ". It may be the fault of any work that was queued before. The device is lost to this process: restart it");
    }
    return status;
}

int fan_cuda_relax(const fan_cuda_part *p, int mode)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    if (!api->has[FAN_CUDA_CAPTURE] || mode < 0)
        return -1;
    for (int i = 0; i < 2;
         i++) { /* a thread that stayed in relaxed mode would break other people's captures: so it is tried twice */
        int was = mode;
        if (api->ThreadExchangeStreamCaptureMode(&was) == 0)
            return was;
    }
    return -1;
}

fan_status fan_cuda_pass(fan_cuda_part *p, fan_cu_stream on, fan_error *err)
{
    int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = fan_cuda_api_of(p)->StreamSynchronize(on);
    (void)fan_cuda_relax(p, mode);
    return fan_cuda_check(p, code, "cuStreamSynchronize", err);
}

/* ---- streams ---- */

static fan_cuda_queue *queue_of(const fan_stream *s) { return s->impl; }

fan_status fan_cuda_queue_of(const fan_stream *s, fan_cu_stream *out, fan_error *err)
{
    const fan_cuda_queue *q = queue_of(s);
    if (q->thread && q->thread != fan_thread_id())
        return fan_fail(err, FAN_ERR_VALUE,
                        "stream 2 of cuda:%d is the per-thread default stream of another thread, and no call can reach "
                        "it from here; "
                        "use a stream of your own",
                        s->device->index);
    if (atomic_load_explicit(&q->gone, memory_order_relaxed))
        return fan_fail_code(
            err, FAN_ERR_DEVICE, 709,
            "stream %#llx of cuda:%d was destroyed: keep a stream until what was added on it has been taken",
            (unsigned long long)s->handle, s->device->index);
    *out = q->handle;
    return FAN_OK;
}

fan_status fan_cuda_capture_of(fan_stream *s, uint64_t *id, fan_cu_graph *graph, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    const fan_cuda_api *api = fan_cuda_api_of(p);
    int status = FAN_CU_CAPTURE_NONE;
    uint64_t found = 0;
    fan_cu_stream on;
    *id = 0;
    FAN_TRY(fan_cuda_queue_of(s, &on, err));
    if (!api->has[FAN_CUDA_CAPTURE])
        return FAN_OK;
    /* The legacy stream is never captured. While a blocking stream is, it must rest: asking says so (906), and disturbs
     * nobody; work on it would. */
    fan_cu_result code = api->StreamGetCaptureInfo(on, &status, &found, graph, NULL, NULL);
    if (fan_cuda_stale(code) && s->handle > 2 && lives(p))
        atomic_store_explicit(&queue_of(s)->gone, true, memory_order_relaxed);
    FAN_TRY(fan_cuda_check(p, code, "cuStreamGetCaptureInfo", err));
    if (status == FAN_CU_CAPTURE_BROKEN)
        return fan_fail_code(err, FAN_ERR_CAPTURE, 901, "stream %#llx of cuda:%d is captured, and %s",
                             (unsigned long long)s->handle, s->device->index, capture_advice(901));
    *id = status == FAN_CU_CAPTURE_ACTIVE ? found : 0;
    return FAN_OK;
}

/* try_hold: a hold on a stream of the list, unless its last one just goes. */
static bool try_hold(fan_stream *s)
{
    size_t refs = atomic_load_explicit(&s->refs, memory_order_relaxed);
    while (refs)
        if (atomic_compare_exchange_weak_explicit(&s->refs, &refs, refs + 1, memory_order_acquire,
                                                  memory_order_relaxed))
            return true;
    return false;
}

static bool is(const fan_stream *s, uint64_t handle, uint64_t thread)
{
    return s->handle == handle && queue_of(s)->thread == thread &&
           !atomic_load_explicit(&queue_of(s)->gone, memory_order_relaxed);
}

static fan_stream *known_stream(fan_cuda_part *p, uint64_t handle, uint64_t thread)
{
    fan_stream *found = NULL;
    (void)pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->nstreams && !found; i++)
        if (is(p->streams[i], handle, thread) && try_hold(p->streams[i]))
            found = p->streams[i];
    (void)pthread_mutex_unlock(&p->lock);
    return found;
}

/* make_stream: puts a new one into the list; another thread may have come first. */
static fan_stream *make_stream(fan_cuda_part *p, uint64_t handle, uint64_t thread)
{
    fan_cuda_queue *q = fan_calloc(sizeof *q);
    fan_stream *s = q ? fan_stream_new(&p->device, handle, q) : NULL, *other = NULL;
    if (!s) {
        fan_free(q);
        return NULL;
    }
    q->handle = (fan_cu_stream)(uintptr_t)handle;
    q->thread = thread;
    (void)pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->nstreams && !other; i++)
        if (is(p->streams[i], handle, thread) && try_hold(p->streams[i]))
            other = p->streams[i];
    bool failed = !other && fan_grow((void **)&p->streams, &p->streams_cap, p->nstreams + 1, sizeof *p->streams);
    if (!other && !failed)
        p->streams[p->nstreams++] = s;
    (void)pthread_mutex_unlock(&p->lock);
    if (other || failed) {
        fan_stream_drop(s);
        s = other;
    }
    return s;
}

fan_status fan_cuda_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(d);
    fan_cuda_scope scope;
    fan_cu_context of = NULL;
    handle = handle ? handle : 1;
    uint64_t thread = handle == 2 ? fan_thread_id() : 0;
    *out = known_stream(p, handle, thread);
    if (*out)
        return FAN_OK;
    if (handle > 2) {
        FAN_TRY(fan_cuda_enter(p, &scope, err));
        fan_status status = fan_cuda_check(p, fan_cuda_api_of(p)->StreamGetCtx((fan_cu_stream)(uintptr_t)handle, &of),
                                           "cuStreamGetCtx", err);
        fan_cuda_leave(&scope);
        if (status != FAN_OK)
            return status;
        if (of != p->context)
            return fan_fail(err, FAN_ERR_VALUE,
                            "stream %#llx is not of cuda:%d's primary context: it belongs to another device, or to a "
                            "context of its own",
                            (unsigned long long)handle, p->index);
    }
    *out = make_stream(p, handle, thread);
    return *out ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
}

static fan_stream *cuda_current(fan_device *d)
{
    fan_stream *s = NULL;
    (void)fan_cuda_stream(d, 1, &s, NULL);
    return s;
}

static void cuda_stream_fini(fan_stream *s)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    (void)pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->nstreams; i++)
        if (p->streams[i] == s) {
            p->streams[i] = p->streams[--p->nstreams];
            break;
        }
    (void)pthread_mutex_unlock(&p->lock);
    fan_free(s->impl);
}

static fan_status cuda_capture(fan_stream *s, uint64_t *id, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    fan_cuda_scope scope;
    *id = 0;
    if (!fan_cuda_usable(p))
        return FAN_OK;
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    fan_status status = fan_cuda_capture_of(s, id, NULL, err);
    fan_cuda_leave(&scope);
    return status;
}

/* spare_for: one that this capture has already, or that nobody holds. The part's lock is held. */
static fan_cuda_spare *spare_for(fan_cuda_part *p, uint64_t capture)
{
    fan_cuda_spare *idle = NULL;
    for (size_t i = 0; i < p->nspares; i++) {
        fan_cuda_spare *one = &p->spares[i];
        bool held = one->asked > 0;
        if (one->capture == capture)
            return one;
        for (size_t k = 0; k < p->nstreams && !held; k++)
            held = p->streams[k]->handle == one->handle;
        idle = held || idle ? idle : one;
    }
    return idle;
}

/* spare_new: in relaxed mode, for a capture is under way. */
static fan_status spare_new(fan_cuda_part *p, uint64_t *handle, fan_error *err)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    fan_cuda_scope scope;
    fan_cu_stream made = NULL;
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = api->StreamCreate(&made, FAN_CU_STREAM_NON_BLOCKING);
    (void)fan_cuda_relax(p, mode);
    fan_status status = fan_cuda_check(p, code, "cuStreamCreate", err);
    if (status == FAN_OK) {
        *handle = (uint64_t)(uintptr_t)made;
        (void)pthread_mutex_lock(&p->lock);
        bool failed = fan_grow((void **)&p->spares, &p->spares_cap, p->nspares + 1, sizeof *p->spares);
        if (!failed)
            p->spares[p->nspares++] = (fan_cuda_spare){.handle = *handle, .asked = 1};
        (void)pthread_mutex_unlock(&p->lock);
        if (failed) {
            (void)fan_cuda_check(p, api->StreamDestroy(made), "cuStreamDestroy", NULL);
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
        }
    }
    fan_cuda_leave(&scope);
    return status;
}

static fan_status cuda_spare(fan_device *d, uint64_t id, fan_stream **out, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(d);
    uint64_t handle = 0;
    *out = NULL;
    (void)pthread_mutex_lock(&p->lock);
    fan_cuda_spare *found = spare_for(p, id);
    if (found) {
        handle = found->handle;
        found->capture = id;
        found->asked++;
    }
    (void)pthread_mutex_unlock(&p->lock);
    if (!handle)
        FAN_TRY(spare_new(p, &handle, err));
    fan_status status = fan_cuda_stream(d, handle, out, err);
    (void)pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->nspares; i++)
        if (p->spares[i].handle == handle) {
            p->spares[i].capture = id;
            p->spares[i].asked--;
        }
    (void)pthread_mutex_unlock(&p->lock);
    return status;
}

/* not_captured: what the host must not ask for while s is captured, refused before the driver hears of it: the capture
 * stays valid. */
static fan_status not_captured(fan_stream *s, const char *what, fan_error *err)
{
    uint64_t id;
    FAN_TRY(fan_cuda_capture_of(s, &id, NULL, err));
    return id ? fan_fail_code(
                    err, FAN_ERR_CAPTURE, 900,
                    "stream %#llx of cuda:%d is captured and cannot be %s: do it before the capture, or after it",
                    (unsigned long long)s->handle, s->device->index, what)
              : FAN_OK;
}

/* none_captured: what waits for a whole context breaks every capture in it: refused while one of the streams that are
 * known is captured. */
static fan_status none_captured(fan_cuda_part *p, const char *what, fan_error *err)
{
    bool more = true, captured = false;
    fan_error mine = {.status = FAN_OK};
    for (size_t i = 0; more && !captured; i++) {
        (void)pthread_mutex_lock(&p->lock);
        more = i < p->nstreams;
        fan_stream *s = more && try_hold(p->streams[i]) ? p->streams[i] : NULL;
        (void)pthread_mutex_unlock(&p->lock);
        if (s && (!queue_of(s)->thread || queue_of(s)->thread == fan_thread_id()))
            captured = not_captured(s, what, &mine) ==
                       FAN_ERR_CAPTURE; /* of one that was destroyed nothing is known, and nothing refused */
        fan_stream_drop(s);
    }
    if (!captured)
        return FAN_OK;
    if (err)
        *err = mine;
    return FAN_ERR_CAPTURE;
}

static fan_status cuda_sync(fan_stream *s, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    const fan_cuda_api *api = fan_cuda_api_of(p);
    fan_cuda_scope scope;
    fan_cu_stream on;
    fan_status status;
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    bool gone = atomic_load_explicit(&queue_of(s)->gone, memory_order_relaxed) &&
                !err; /* memory that leaves asks: what ran there may run still */
    if (gone ||
        (queue_of(s)->thread && queue_of(s)->thread != fan_thread_id())) { /* out of reach: everything is waited for */
        FAN_GO(none_captured(p, "waited for with its whole device", err));
        status = fan_cuda_check(p, api->CtxSynchronize(), "cuCtxSynchronize", err);
        goto done;
    }
    FAN_GO(not_captured(s, "waited for", err));
    FAN_GO(fan_cuda_queue_of(s, &on, err));
    status = FAN_FAULT(CUDA_NO_SYNC) ? FAN_OK : fan_cuda_pass(p, on, err);
done:
    fan_cuda_leave(&scope);
    if (status == FAN_OK)
        fan_sync_trace(s->device, s, NULL);
    return status;
}

/* ---- events ---- */

static fan_cu_event event_of(const fan_event *e) { return e->impl; }

static fan_status cuda_event_init(fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(e->device);
    fan_cuda_scope scope;
    fan_cu_event made = NULL;
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    fan_status status =
        fan_cuda_check(p, fan_cuda_api_of(p)->EventCreate(&made, FAN_CU_EVENT_DISABLE_TIMING), "cuEventCreate", err);
    fan_cuda_leave(&scope);
    e->impl = made;
    return status;
}

static void cuda_event_fini(fan_event *e)
{
    fan_cuda_part *p = fan_cuda_part_of(e->device);
    fan_cuda_scope scope;
    if (!fan_cuda_usable(p) || fan_cuda_enter(p, &scope, NULL) != FAN_OK)
        return;
    (void)fan_cuda_check(p, fan_cuda_api_of(p)->EventDestroy(event_of(e)), "cuEventDestroy", NULL);
    fan_cuda_leave(&scope);
}

static fan_status cuda_record(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    fan_cuda_scope scope;
    fan_cu_stream on;
    FAN_TRY(fan_cuda_queue_of(s, &on, err));
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    fan_status status = FAN_FAULT(CUDA_NO_RECORD)
                            ? FAN_OK
                            : fan_cuda_check(p, fan_cuda_api_of(p)->EventRecord(event_of(e), on), "cuEventRecord", err);
    fan_cuda_leave(&scope);
    return status;
}

static fan_status cuda_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    fan_cuda_scope scope;
    fan_cu_stream on;
    if (fan_cuda_part_of(e->device)->cuda != p->cuda)
        return fan_fail(err, FAN_ERR_VALUE, "a stream cannot wait for an event of another driver");
    if (atomic_load_explicit(&fan_cuda_part_of(e->device)->dead, memory_order_acquire))
        return refuse_dead(fan_cuda_part_of(e->device), err);
    FAN_TRY(fan_cuda_queue_of(s, &on, err));
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    fan_status status =
        FAN_FAULT(CUDA_NO_WAIT)
            ? FAN_OK
            : fan_cuda_check(p, fan_cuda_api_of(p)->StreamWaitEvent(on, event_of(e), 0), "cuStreamWaitEvent", err);
    fan_cuda_leave(&scope);
    return status;
}

static fan_status event_free_to_ask(fan_event *e, fan_error *err)
{
    (void)pthread_mutex_lock(&e->device->lock); /* somebody may record it */
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

static fan_status cuda_query(fan_event *e, bool *done, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(e->device);
    fan_cuda_scope scope;
    FAN_TRY(event_free_to_ask(e, err));
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = fan_cuda_api_of(p)->EventQuery(event_of(e));
    (void)fan_cuda_relax(p, mode);
    *done = code == 0;
    fan_status status = code == FAN_CU_NOT_READY ? FAN_OK : fan_cuda_check(p, code, "cuEventQuery", err);
    fan_cuda_leave(&scope);
    return status;
}

static bool cuda_peek(fan_event *e)
{
    bool done = false;
    if (!fan_cuda_usable(fan_cuda_part_of(e->device)) || FAN_FAULT(CUDA_EARLY_FREE))
        return true; /* nothing runs any more, and the memory is only forgotten */
    return cuda_query(e, &done, NULL) == FAN_OK && done;
}

static fan_status cuda_event_sync(fan_event *e, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(e->device);
    fan_cuda_scope scope;
    FAN_TRY(event_free_to_ask(e, err));
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = fan_cuda_api_of(p)->EventSynchronize(event_of(e));
    (void)fan_cuda_relax(p, mode);
    fan_status status = fan_cuda_check(p, code, "cuEventSynchronize", err);
    fan_cuda_leave(&scope);
    if (status == FAN_OK)
        fan_sync_trace(e->device, NULL, e);
    return status;
}

static bool cuda_lost(fan_device *d) { return !fan_cuda_usable(fan_cuda_part_of(d)); }

static uint64_t cuda_left_out(fan_device *d) { return fan_cuda_part_of(d)->cuda->left_out; }

/* ---- drivers and devices ---- */

static void cuda_fini(fan_device *d);

static const fan_backend backend = {
    .name = "cuda",
    .has_streams = true,
    .alloc = fan_cuda_alloc,
    .free = fan_cuda_free,
    .read = fan_cuda_read,
    .current = cuda_current,
    .sync = cuda_sync,
    .stream_fini = cuda_stream_fini,
    .event_init = cuda_event_init,
    .event_fini = cuda_event_fini,
    .record = cuda_record,
    .wait = cuda_wait,
    .query = cuda_query,
    .peek = cuda_peek,
    .event_sync = cuda_event_sync,
    .capture = cuda_capture,
    .spare = cuda_spare,
    .run = fan_cuda_run,
    .run_many = fan_cuda_run_many,
    .lost = cuda_lost,
    .left_out = cuda_left_out,
    .device_fini = cuda_fini,
};

/* part_fini: the part as it was before it was first asked for. */
static void part_fini(fan_cuda_part *p)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    fan_cuda_scope scope;
    if (p->context && fan_cuda_usable(p)) {
        if (fan_cuda_enter(p, &scope, NULL) == FAN_OK) {
            int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
            fan_cuda_blocks_fini(p);
            if (p->house)
                (void)api->StreamDestroy(p->house);
            for (size_t i = 0; i < p->nspares; i++)
                (void)api->StreamDestroy((fan_cu_stream)(uintptr_t)p->spares[i].handle);
            if (p->module)
                (void)api->ModuleUnload(p->module);
            (void)fan_cuda_relax(p, mode);
            fan_cuda_leave(&scope);
        }
        if (fan_cuda_usable(p))
            (void)api->DevicePrimaryCtxRelease(p->ordinal);
    }
    fan_cuda_blocks_fini(p);
    fan_free(p->staging);
    p->staging = NULL;
    p->staging_bytes = 0;
    fan_free(p->streams);
    p->streams = NULL;
    p->nstreams = p->streams_cap = 0;
    fan_free(p->spares);
    p->spares = NULL;
    p->nspares = p->spares_cap = 0;
    p->house = NULL;
    p->module = NULL;
    p->context = NULL;
}

static void cuda_free(fan_cuda *c)
{
    strike(c);
    for (int i = 0; i < c->count; i++)
        if (c->parts[i].device.backend)
            fan_device_flush(&c->parts[i].device);
    for (int i = 0; i < c->count; i++)
        if (c->parts[i].device.backend)
            fan_device_clear(&c->parts[i].device);
    for (int i = 0; i < c->count; i++) {
        part_fini(&c->parts[i]);
        (void)pthread_mutex_destroy(&c->parts[i].lock);
    }
    fan_free(c->parts);
    fan_free(c);
}

static void cuda_fini(fan_device *d) { cuda_free(fan_cuda_part_of(d)->cuda); }

fan_status fan_cuda_open(const char *path, fan_cuda **out, fan_error *err)
{
    fan_status status;
    *out = NULL;
    (void)pthread_once(&watching, watch_forks);
    fan_cuda *c = fan_calloc(sizeof *c);
    if (!c)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a driver");
    atomic_init(&c->holds, 1);
    c->life = atomic_load(&forks);
    FAN_GO(fan_cuda_api_open(&c->api, path, err));
    int count = 0;
    fan_cu_result code = c->api.DeviceGetCount(&count);
    if (code || count < 0) {
        char text[256];
        status = fan_fail_code(err, FAN_ERR_DEVICE, code, "cuDeviceGetCount failed: %s",
                               fan_cuda_text(&c->api, code, text, sizeof text));
        goto done;
    }
    c->parts = fan_calloc(((size_t)count + 1) * sizeof *c->parts);
    if (!c->parts) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a driver");
        goto done;
    }
    for (; c->count < count; c->count++) {
        fan_cuda_part *p = &c->parts[c->count];
        p->cuda = c;
        p->index = c->count;
        if (pthread_mutex_init(&p->lock, NULL) || fan_device_init(&p->device, &backend, c, c->count, &c->holds)) {
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a driver");
            goto done;
        }
    }
    enlist(c);
    *out = c;
done:
    if (status != FAN_OK)
        cuda_free(c);
    return status;
}

fan_cuda *fan_cuda_hold(fan_cuda *c)
{
    atomic_fetch_add_explicit(&c->holds, 1, memory_order_relaxed);
    return c;
}

void fan_cuda_drop(fan_cuda *c)
{
    if (!c)
        return;
    for (int i = 0; i < c->count; i++)
        fan_device_orphan(&c->parts[i].device);
    if (atomic_fetch_sub_explicit(&c->holds, 1, memory_order_acq_rel) == 1)
        cuda_free(c);
}

const fan_cuda_api *fan_cuda_driver(const fan_cuda *c) { return &c->api; }

int fan_cuda_count(const fan_cuda *c) { return c->count; }

int fan_cuda_holding(fan_cuda *c, uint64_t address)
{
    int index = -1;
    if (forked(c) || c->api.PointerGetAttribute(&index, FAN_CU_POINTER_DEVICE_ORDINAL, address) != 0)
        return -1;
    return index >= 0 && index < c->count ? index : -1;
}

int fan_cuda_here(fan_cuda *c)
{
    fan_cu_context now = NULL;
    if (forked(c) || c->api.CtxGetCurrent(&now) != 0 || !now)
        return -1;
    for (int i = 0; i < c->count; i++)
        if (atomic_load_explicit(&c->parts[i].ready, memory_order_acquire) && c->parts[i].context == now)
            return i;
    return -1;
}

bool fan_cuda_active(fan_cuda *c, int index)
{
    fan_cu_device ordinal;
    unsigned flags = 0;
    int active = 0;
    return !forked(c) && index >= 0 && index < c->count && c->api.DeviceGet(&ordinal, index) == 0 &&
           c->api.DevicePrimaryCtxGetState(ordinal, &flags, &active) == 0 && active;
}

fan_cuda *fan_cuda_of(const fan_device *d) { return d->backend == &backend ? d->self : NULL; }

void fan_cuda_leave_out(fan_cuda *c, uint64_t plan_bits) { c->left_out = plan_bits; }

/* make_ready: its context, its kernels, its pool. The part's own lock is not held: what fails is told through
 * fan_cuda_check, which takes it. */
static fan_status make_ready(fan_cuda_part *p, fan_error *err)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    fan_cuda_scope scope = {.part = NULL};
    fan_status status;
    int pools = 0;
    FAN_GO(fan_cuda_check(p, api->DeviceGet(&p->ordinal, p->index), "cuDeviceGet", err));
    FAN_GO(fan_cuda_check(p, api->DevicePrimaryCtxRetain(&p->context, p->ordinal), "cuDevicePrimaryCtxRetain", err));
    FAN_GO(fan_cuda_enter(p, &scope, err));
    FAN_GO(fan_cuda_check(p, api->DeviceGetAttribute(&p->processors, FAN_CU_ATTRIBUTE_MULTIPROCESSORS, p->ordinal),
                          "cuDeviceGetAttribute", err));
    FAN_GO(fan_cuda_check(p, api->DeviceGetAttribute(&pools, FAN_CU_ATTRIBUTE_MEMORY_POOLS, p->ordinal),
                          "cuDeviceGetAttribute", err));
    FAN_GO(fan_cuda_check(p, api->StreamCreate(&p->house, FAN_CU_STREAM_NON_BLOCKING), "cuStreamCreate", err));
    p->pools = pools && api->has[FAN_CUDA_POOLS];
    if (p->pools)
        FAN_GO(fan_cuda_check(p, api->DeviceGetDefaultMemPool(&p->pool, p->ordinal), "cuDeviceGetDefaultMemPool", err));
    FAN_GO(fan_cuda_load_kernels(p, err));
done:
    if (scope.part)
        fan_cuda_leave(&scope);
    return status;
}

fan_status fan_cuda_device(fan_cuda *c, int index, fan_device **out, fan_error *err)
{
    *out = NULL;
    if (index < 0 || index >= c->count)
        return fan_fail(err, FAN_ERR_VALUE, "there is no cuda:%d: the driver has %d device%s", index, c->count,
                        c->count == 1 ? "" : "s");
    fan_cuda_part *p = &c->parts[index];
    if (forked(c))
        return refuse_child(p, err);
    fan_status status = FAN_OK;
    (void)pthread_mutex_lock(&one_at_a_time);
    bool ready = atomic_load_explicit(&p->ready, memory_order_relaxed);
    if (!ready && !fan_cuda_usable(p)) {
        status = refuse_dead(p, err);
    } else if (!ready) {
        int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED); /* somebody may capture already */
        status = make_ready(p, err);
        (void)fan_cuda_relax(p, mode);
        if (status != FAN_OK && fan_cuda_usable(p))
            part_fini(p);
        atomic_store_explicit(&p->ready, status == FAN_OK, memory_order_release);
    }
    (void)pthread_mutex_unlock(&one_at_a_time);
    if (status == FAN_OK)
        *out = fan_device_hold(&p->device);
    return status;
}

fan_status fan_cuda_describe(fan_cuda *c, int index, char *buf, size_t size, fan_error *err)
{
    char name[128] = "";
    int major = 0, minor = 0;
    fan_cu_device ordinal;
    fan_cuda_part *p = &c->parts[index];
    if (forked(c))
        return refuse_child(p, err);
    FAN_TRY(fan_cuda_check(p, c->api.DeviceGet(&ordinal, index), "cuDeviceGet", err));
    FAN_TRY(fan_cuda_check(p, c->api.DeviceGetName(name, (int)sizeof name, ordinal), "cuDeviceGetName", err));
    FAN_TRY(fan_cuda_check(p, c->api.DeviceGetAttribute(&major, FAN_CU_ATTRIBUTE_MAJOR, ordinal),
                           "cuDeviceGetAttribute", err));
    FAN_TRY(fan_cuda_check(p, c->api.DeviceGetAttribute(&minor, FAN_CU_ATTRIBUTE_MINOR, ordinal),
                           "cuDeviceGetAttribute", err));
    snprintf(buf, size, "%s, compute %d.%d", name, major, minor);
    return FAN_OK;
}
