/* The CUDA backend's entries for graph trees.
 *
 * A recording is a graph of the driver. Its kernels use memory at fixed addresses: the tree's
 * arena, operands, scratch memory that the graph keeps. Memory nodes are refused: a graph with an
 * allocation of its own has one instance, cannot run twice before it has freed, and our liveness
 * would not hold for its allocations.
 *
 * The accesses of a graph cannot be read from it: arguments of kernels are opaque bytes. So each
 * job of ours that is queued under the capture is noted; kernels of other libraries are not
 * covered. */
#include "device/cuda/part.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdio.h>

typedef struct recorder_touch {
    char name[48];
    const void *data;
    size_t bytes;
    bool write;
} recorder_touch;

struct fan_recording {
    fan_cuda_part *part;
    /* among those in progress; guarded by the lock of the driver's first part */
    struct fan_recording *next;
    const fan_stream *origin;
    uint64_t capture;
    fan_cu_exec exec; /* NULL while in progress */
    uint64_t bytes;
    size_t kernels; /* with copies and fills */
    recorder_touch *touches;
    size_t n;
    size_t cap;
};

static void recorder_lock(fan_cuda *c)
{
    (void)pthread_mutex_lock(&c->parts[0].lock);
}
static void recorder_unlock(fan_cuda *c)
{
    (void)pthread_mutex_unlock(&c->parts[0].lock);
}

/* ---- accesses ---- */

/* recorder_touches: notes an access; there is room. */
static void recorder_touches(fan_recording *r, const fan_job *job, const fan_array *a, bool write)
{
    recorder_touch *t = &r->touches[r->n];
    int64_t lo;
    int64_t hi;
    if (!a || a->size == 0)
        return;
    fan_array_reach(a, &lo, &hi);
    *t = (recorder_touch){
        .data = a->data + lo,
        .bytes = (size_t)(hi - lo),
        .write = write,
    };
    snprintf(t->name, sizeof t->name, "%s", fan_job_name(job));
    r->n++;
}

fan_status fan__cuda_recorder_note(fan_cuda *c, uint64_t capture, const fan_job *job,
                                   fan_error *err)
{
    fan_status status = FAN_OK;
    if (!atomic_load_explicit(&c->recordings_begun, memory_order_acquire))
        return FAN_OK;
    if (FAN_FAULT(CUDA_NOTES_NOTHING))
        return FAN_OK;
    recorder_lock(c);
    fan_recording *r = c->recordings;
    while (r && r->capture != capture)
        r = r->next;
    if (r && fan_grow((void **)&r->touches, &r->cap, r->n + job->n + 4, sizeof *r->touches))
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a recording");
    for (size_t i = 0; r && status == FAN_OK && i < job->n; i++)
        recorder_touches(r, job, job->in[i].array, false);
    if (r && status == FAN_OK && job->sparse) {
        recorder_touches(r, job, job->sparse->indices, false);
        recorder_touches(r, job, job->sparse->pointers, false);
        recorder_touches(r, job, job->sparse->values, false);
    }
    if (r && status == FAN_OK)
        recorder_touches(r, job, job->out, true);
    recorder_unlock(c);
    return status;
}

static void recorder_accesses(const fan_recording *r, fan_recording_visit visit, void *ctx)
{
    for (size_t i = 0; i < r->n; i++) {
        const recorder_touch *t = &r->touches[i];
        if (!visit(ctx, t->name, t->data, t->bytes, t->write))
            return;
    }
}

/* recorder_take: removes and returns the recording in progress on `origin`. */
static fan_recording *recorder_take(fan_cuda *c, const fan_stream *origin)
{
    fan_recording *found = NULL;
    recorder_lock(c);
    for (fan_recording **at = &c->recordings; *at && !found; at = &(*at)->next) {
        if ((*at)->origin == origin) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    if (found)
        atomic_fetch_sub_explicit(&c->recordings_begun, 1, memory_order_release);
    recorder_unlock(c);
    return found;
}

static void recorder_free(fan_recording *r)
{
    fan_free(r->touches);
    fan_free(r);
}

/* ---- the driver ---- */

/* recorder_destroy: destroys a graph, and its executable one; either may be NULL. Tried twice: a
 * graph left over would keep all its memory. */
static void recorder_destroy(fan_cuda_part *p, fan_cu_graph graph, fan_cu_exec exec)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan__cuda_scope scope;
    for (int i = 0; i < 2; i++) {
        if (!graph && !exec)
            return;
        if (!fan__cuda_usable(p) || fan__cuda_enter(p, &scope, NULL) != FAN_OK)
            continue;
        int mode = fan__cuda_relax(p);
        if (graph && api->GraphDestroy(graph) == 0)
            graph = NULL;
        if (exec && api->GraphExecDestroy(exec) == 0)
            exec = NULL;
        fan__cuda_restore(p, mode);
        fan__cuda_leave(&scope);
    }
}

/* recorder_halt: ends the capture of `origin`. Tried until the driver reports that there is none,
 * because a stream that stayed captured would be unusable: a call may fail, or may not have been
 * executed. */
static void recorder_halt(fan_cuda_part *p, fan_stream *origin)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan__cuda_scope scope;
    fan_cu_stream on;
    bool halted = fan__cuda_queue_of(origin, &on, NULL) != FAN_OK;
    for (int i = 0; i < 4 && !halted && !FAN_FAULT(CUDA_STAYS_CAPTURED); i++) {
        fan_cu_graph graph = NULL;
        int state = FAN_CU_CAPTURE_ACTIVE;
        if (fan__cuda_enter(p, &scope, NULL) != FAN_OK)
            continue;
        bool heard = api->StreamGetCaptureInfo(on, &state, NULL, NULL, NULL, NULL) == 0;
        if (heard && state != FAN_CU_CAPTURE_NONE && api->StreamEndCapture(on, &graph) == 0)
            recorder_destroy(p, graph, NULL);
        fan__cuda_leave(&scope);
        halted = heard && state == FAN_CU_CAPTURE_NONE;
    }
}

/* recorder_check_nodes: checks that no node allocates or frees, and counts those that work. */
static fan_status recorder_check_nodes(fan_recording *r, fan_cu_graph graph, fan_error *err)
{
    fan_cuda_part *p = r->part;
    const fan_cuda_api *api = fan__cuda_api_of(p);
    size_t n = 0;
    FAN_TRY(fan__cuda_check(p, api->GraphGetNodes(graph, NULL, &n), "cuGraphGetNodes", err));
    fan_cu_node *nodes = fan_alloc((n + 1) * sizeof *nodes);
    if (!nodes)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a recording");
    fan_status status =
        fan__cuda_check(p, api->GraphGetNodes(graph, nodes, &n), "cuGraphGetNodes", err);
    for (size_t i = 0; i < n && status == FAN_OK; i++) {
        int type = 0;
        status =
            fan__cuda_check(p, api->GraphNodeGetType(nodes[i], &type), "cuGraphNodeGetType", err);
        const char *verb = "frees";
        const char *call = "cuMemFreeAsync";
        r->kernels += type <= FAN_CU_NODE_MEMSET;
        if (type == FAN_CU_NODE_MEM_ALLOC) {
            verb = "allocates";
            call = "cuMemAllocAsync";
        } else if (type != FAN_CU_NODE_MEM_FREE)
            continue;
        if (status == FAN_OK && !FAN_FAULT(CUDA_ANY_NODE)) {
            status = fan_fail(err, FAN_ERR_CAPTURE,
                              "it %s memory of the driver's own (%s) on a captured stream: a graph "
                              "with such memory cannot be launched again before it is freed, and "
                              "fanin cannot track what lives in it; allocate before the call and "
                              "pass the array as an operand, or let fanin allocate",
                              verb, call);
        }
    }
    fan_free(nodes);
    return status;
}

/* recorder_make: instantiates the graph; measures the device memory that the driver uses for it. */
static fan_status recorder_make(fan_recording *r, fan_cu_graph graph, fan_error *err)
{
    fan_cuda_part *p = r->part;
    const fan_cuda_api *api = fan__cuda_api_of(p);
    size_t before = 0;
    size_t after = 0;
    size_t all = 0;
    FAN_TRY(recorder_check_nodes(r, graph, err));
    FAN_TRY(fan__cuda_check(p, api->MemGetInfo(&before, &all), "cuMemGetInfo", err));
    FAN_TRY(fan__cuda_check(p, api->GraphInstantiateWithFlags(&r->exec, graph, 0),
                            "cuGraphInstantiate", err));
    if (api->MemGetInfo(&after, &all) == 0 && after < before)
        r->bytes = before - after;
    return FAN_OK;
}

static fan_status recorder_finish(fan_recording *r, fan_stream *origin, fan_error *err)
{
    fan_cuda_part *p = r->part;
    fan__cuda_scope scope;
    fan_cu_graph graph = NULL;
    FAN_TRY(fan__cuda_enter_on(origin, &scope, err));
    char forked[128] = ""; /* the streams that joined the capture, as far as fanin has met them */
    fan_stream *s;
    for (size_t i = 0; fan__cuda_stream_at(p, i, &s); i++) {
        uint64_t id = 0;
        fan_status known = FAN_ERR_STATE;
        if (s && s != r->origin && s->handle > 2)
            known = fan__cuda_capture_of(s, &id, NULL, NULL);
        if (known == FAN_OK && id == r->capture) {
            fan_append(forked, sizeof forked, "%s%#llx",
                       forked[0] ? ", " : ". Forked in it: stream ", (unsigned long long)s->handle);
        }
        fan_stream_drop(s);
    }
    fan_cu_result code = fan__cuda_api_of(p)->StreamEndCapture(scope.on, &graph);
    fan_status status;
    if (code == FAN_CU_INVALID_VALUE) {
        status = fan_fail_code(err, FAN_ERR_CAPTURE, code,
                               "the capture of stream %#llx of cuda:%d was ended by other code",
                               (unsigned long long)origin->handle, p->index);
    } else {
        status = fan__cuda_check(p, code, "cuStreamEndCapture", err);
    }
    if (code == FAN_CU_CAPTURE_UNJOINED && err)
        fan_append(err->text, sizeof err->text, "%s", forked);
    int mode = fan__cuda_relax(p);
    if (status == FAN_OK)
        status = recorder_make(r, graph, err);
    fan__cuda_restore(p, mode);
    fan__cuda_leave(&scope);
    recorder_destroy(p, graph, NULL);
    return status;
}

/* ---- the entries ---- */

static fan_status recorder_origin(fan_device *d, fan_stream **out, fan_error *err)
{
    static atomic_uint_fast64_t trees;
    const fan_cuda_api *api = fan__cuda_api_of(fan__cuda_part_of(d));
    for (int i = 0; i < FAN_CUDA_FEATURES; i++) {
        bool needed = i == FAN_CUDA_CAPTURE || i == FAN_CUDA_GRAPHS || i == FAN_CUDA_TREES;
        if (needed && !api->has[i]) {
            return fan_fail(err, FAN_ERR_DEVICE,
                            "GraphTree: the driver of cuda:%d has no %s: graph trees need one of "
                            "CUDA 11.4 or later",
                            d->index, api->missing[i]);
        }
    }
    /* a stream of our own, as a capture borrows it, under a number that the driver never uses */
    return fan__cuda_capture_stream(
        d, UINT64_C(1) << 63 | atomic_fetch_add_explicit(&trees, 1, memory_order_relaxed), out,
        err);
}

static fan_status recorder_begin(fan_device *d, fan_stream *origin, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    fan__cuda_scope scope;
    fan_status status;
    FAN_TRY(fan__cuda_enter_on(origin, &scope, err));
    fan_recording *r = fan_calloc(sizeof *r);
    if (!r) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a recording");
        goto done;
    }
    r->part = p;
    r->origin = origin;
    FAN_GO(fan__cuda_check(
        p, fan__cuda_api_of(p)->StreamBeginCapture(scope.on, FAN_CU_CAPTURE_MODE_THREAD_LOCAL),
        "cuStreamBeginCapture", err));
    status = fan__cuda_capture_of(origin, &r->capture, NULL, err);
    if (status == FAN_OK) {
        fan_cuda *c = r->part->cuda;
        recorder_lock(c);
        r->next = c->recordings;
        c->recordings = r;
        atomic_fetch_add_explicit(&c->recordings_begun, 1, memory_order_release);
        recorder_unlock(c);
    } else {
        recorder_halt(p, origin);
    }
done:
    fan__cuda_leave(&scope);
    if (status != FAN_OK && r)
        recorder_free(r);
    return status;
}

static void recorder_drop(fan_recording *r)
{
    recorder_destroy(r->part, NULL, r->exec);
    recorder_free(r);
}

static fan_status recorder_end(fan_device *d, fan_stream *origin, fan_recording **out,
                               fan_error *err)
{
    fan_recording *r = recorder_take(fan__cuda_part_of(d)->cuda, origin);
    *out = NULL;
    if (!r)
        return fan_fail(err, FAN_ERR_STATE, "this stream is not recording");
    fan_status status = recorder_finish(r, origin, err);
    if (status == FAN_OK) {
        *out = r;
        return FAN_OK;
    }
    recorder_halt(r->part, origin);
    recorder_drop(r);
    return status;
}

static void recorder_abort(fan_device *d, fan_stream *origin)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    fan_recording *r = recorder_take(p->cuda, origin);
    recorder_halt(p, origin);
    if (r)
        recorder_free(r);
}

static fan_status recorder_launch(fan_recording *r, fan_stream *origin, fan_error *err)
{
    fan__cuda_scope scope;
    FAN_TRY(fan__cuda_enter_on(origin, &scope, err));
    fan_status status = fan__cuda_check(
        r->part, fan__cuda_api_of(r->part)->GraphLaunch(r->exec, scope.on), "cuGraphLaunch", err);
    fan__cuda_leave(&scope);
    return status;
}

static uint64_t recorder_bytes(const fan_recording *r)
{
    return r->bytes;
}

static size_t recorder_kernels(const fan_recording *r)
{
    return r->kernels;
}

static fan_status recorder_poison(fan_device *d, fan_stream *origin, void *data, size_t bytes,
                                  fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    fan__cuda_scope scope;
    FAN_TRY(fan__cuda_enter_on(origin, &scope, err));
    fan_status status = fan__cuda_check(
        p,
        fan__cuda_api_of(p)->MemsetD8Async((uint64_t)(uintptr_t)data, FAN_POISON, bytes, scope.on),
        "cuMemsetD8Async", err);
    fan__cuda_leave(&scope);
    return status;
}

const fan_recorder fan__cuda_recorder = {
    .origin = recorder_origin,
    .begin = recorder_begin,
    .end = recorder_end,
    .abort = recorder_abort,
    .launch = recorder_launch,
    .drop = recorder_drop,
    .accesses = recorder_accesses,
    .bytes = recorder_bytes,
    .kernels = recorder_kernels,
    .poison = recorder_poison,
};
