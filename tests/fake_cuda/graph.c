/* Captures and graphs. */
#include "fake_cuda/graph.h"

#include "base/mem.h"
#include "device/sim/machine.h"
#include "fake_cuda/entry.h"
#include "fake_cuda/work.h"

#include <string.h>

fan_cu_result fan_fake_ThreadExchangeStreamCaptureMode(int *mode)
{
    CALL(ThreadExchangeStreamCaptureMode);
    if (*mode < 0 || *mode > FAN_CU_CAPTURE_MODE_RELAXED)
        return INVALID_VALUE;
    int before = (int)fan__fake_here.mode;
    fan__fake_here.mode = (fan_capture_mode)*mode;
    *mode = before;
    return OK;
}

/* A graph: the captured work, and the callbacks for when its last handle is dropped. */
struct fan_cu_graph {
    fan_sim_graph *graph; /* held; NULL while the capture is under way */
    uint64_t id;
    fan__thing *objects[256];
    size_t nobjects, refs;
    struct fan_cu_graph *next;
};

static struct fan_cu_graph *graphs;

/* graph_of: the graph of a capture in progress, made by the first call. */
static struct fan_cu_graph *graph_of(uint64_t id)
{
    fan__fake_lock();
    struct fan_cu_graph *g = graphs;
    while (g && g->id != id)
        g = g->next;
    if (!g && (g = fan_calloc(sizeof *g))) { /* under the lock: two threads get one graph */
        g->id = id;
        g->refs = 1;
        g->next = graphs;
        graphs = g;
    }
    fan__fake_unlock();
    return g;
}

static void object_release(fan__thing *t)
{
    fan__fake_lock();
    bool last = --t->refs == 0;
    fan__fake_unlock();
    if (!last)
        return;
    t->destroy(t->ctx);
    fan__thing_drop(t);
}

static void graph_release(struct fan_cu_graph *g)
{
    fan__fake_lock();
    bool last = --g->refs == 0;
    for (struct fan_cu_graph **at = &graphs; last && *at; at = &(*at)->next) {
        if (*at == g) {
            *at = g->next;
            break;
        }
    }
    fan__fake_unlock();
    if (!last)
        return;
    fan_sim_graph_drop(g->graph);
    for (size_t i = 0; i < g->nobjects; i++)
        object_release(g->objects[i]);
    fan_free(g);
}

void fan__graph_forget_all(void)
{
    while (graphs) {
        graphs->refs = 1;
        graph_release(graphs);
    }
}

/* graph_blocking_captured: a stream that the legacy stream of a device would have to wait for is
 * captured. */
static bool graph_blocking_captured(int device)
{
    bool found = false;
    fan__fake_lock();
    for (const fan__thing *t = fan__fake.things[A_STREAM]; t && !found; t = t->next) {
        if (t->device == device && t->stream) {
            const fan_sim_queue *q = t->stream->impl;
            found = q->blocking && fan_sim_capture_state(fan__fake.m, t->stream, NULL);
        }
    }
    fan__fake_unlock();
    return found;
}

fan_cu_result fan_fake_StreamGetCaptureInfo(fan_cu_stream handle, int *status, uint64_t *id,
                                            fan_cu_graph *graph, const void **frontier,
                                            size_t *count)
{
    fan_stream *s;
    uint64_t number = 0;
    CALL(StreamGetCaptureInfo);
    INSIDE(c);
    (void)frontier, (void)count;
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    *status = fan_sim_capture_state(fan__fake.m, s, &number);
    bool rests = (uintptr_t)handle <= 1 && graph_blocking_captured(c->device);
    fan_stream_drop(s);
    if (rests)
        return 906; /* and no capture is broken */
    if (id) {
        /* undefined if there is no capture, or a broken one */
        *id = *status == 1 ? number : UINT64_MAX;
    }
    if (graph && *status == 1 && !(*graph = graph_of(number)))
        return OUT_OF_MEMORY;
    return OK;
}

fan_cu_result fan_fake_UserObjectCreate(fan_cu_object *out, void *ctx, fan_cu_call *destroy,
                                        unsigned refs, unsigned flags)
{
    CALL(UserObjectCreate);
    if (flags != FAN_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC || !refs || !destroy)
        return INVALID_VALUE;
    fan__thing *t = fan__thing_new(AN_OBJECT, 0);
    if (!t)
        return OUT_OF_MEMORY;
    t->destroy = destroy;
    t->ctx = ctx;
    t->refs = refs;
    fan__thing_add(t);
    *out = (fan_cu_object)(void *)t;
    return OK;
}

fan_cu_result fan_fake_UserObjectRelease(fan_cu_object o, unsigned count)
{
    CALL(UserObjectRelease);
    fan__thing *t = fan__thing_find(AN_OBJECT, o);
    if (!t || count != 1)
        return INVALID_VALUE;
    object_release(t);
    return OK;
}

fan_cu_result fan_fake_GraphRetainUserObject(fan_cu_graph g, fan_cu_object o, unsigned count,
                                             unsigned flags)
{
    CALL(GraphRetainUserObject);
    fan__thing *t = fan__thing_find(AN_OBJECT, o);
    if (!t || count != 1 || flags != FAN_CU_GRAPH_USER_OBJECT_MOVE)
        return INVALID_VALUE;
    fan__fake_lock();
    bool room = g->nobjects < sizeof g->objects / sizeof *g->objects;
    if (room)
        g->objects[g->nobjects++] = t;
    fan__fake_unlock();
    return fan__ok_or(room, INVALID_VALUE);
}

fan_cu_result fan_fake_StreamBeginCapture(fan_cu_stream handle, int mode)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(StreamBeginCapture);
    INSIDE(c);
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    code = fan__fake_done(fan_sim_capture_begin(fan__fake.m, s, mode, &err), &err);
    fan_stream_drop(s);
    return code;
}

/* graph_count: counts a new handle of a graph, or a returned one. */
static void graph_count(int more)
{
    fan__fake_lock();
    fan__fake.live[A_GRAPH] += (size_t)more;
    fan__fake_unlock();
}

fan_cu_result fan_fake_StreamEndCapture(fan_cu_stream handle, fan_cu_graph *out)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    fan_sim_graph *graph = NULL;
    uint64_t id = 0;
    CALL(StreamEndCapture);
    *out = NULL;
    INSIDE(c);
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    (void)fan_sim_capture_state(fan__fake.m, s, &id);
    struct fan_cu_graph *g = id ? graph_of(id) : NULL;
    code = fan__fake_done(fan_sim_capture_end(fan__fake.m, s, &graph, &err), &err);
    bool ended = g && fan_sim_capture_state(fan__fake.m, s, NULL) == 0;
    fan_stream_drop(s);
    if (g && ended) {
        g->graph = graph;
        if (code) {
            graph_release(g);
        } else {
            *out = g;
            graph_count(1);
        }
    }
    return code;
}

/* A node is a command of the graph that is work. */
fan_cu_result fan_fake_GraphGetNodes(fan_cu_graph g, fan_cu_node *out, size_t *count)
{
    size_t n = 0;
    CALL(GraphGetNodes);
    for (fan_sim_command *c = g->graph->head; c; c = c->next) {
        if (c->kind != FAN_COMMAND_WORK)
            continue;
        if (out && n < *count)
            out[n] = (fan_cu_node)(void *)c;
        n++;
    }
    *count = n;
    return OK;
}

fan_cu_result fan_fake_GraphNodeGetType(fan_cu_node node, int *type)
{
    static const struct {
        const char *name;
        int type;
    } types[] = {{"copy in", 1},
                 {"copy out", 1},
                 {"fill", 2},
                 {FAN__FAKE_ALLOC, FAN_CU_NODE_MEM_ALLOC},
                 {"free", FAN_CU_NODE_MEM_FREE}};
    const fan_sim_command *c = (const fan_sim_command *)(const void *)node;
    CALL(GraphNodeGetType);
    *type = 0; /* a kernel */
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(c->name, types[i].name) == 0)
            *type = types[i].type;
    }
    return OK;
}

/* graph_bytes: what the driver takes of the device's memory for a graph that can be launched. */
static uint64_t graph_bytes(const struct fan_cu_graph *g)
{
    uint64_t n = 1;
    for (const fan_sim_command *c = g->graph->head; c; c = c->next)
        n += c->kind == FAN_COMMAND_WORK;
    return n * 256;
}

fan_cu_result fan_fake_GraphInstantiateWithFlags(fan_cu_exec *out, fan_cu_graph g, uint64_t flags)
{
    CALL(GraphInstantiateWithFlags);
    INSIDE(c);
    BESIDE(GraphInstantiateWithFlags);
    if (flags)
        return INVALID_VALUE;
    fan__fake_lock();
    g->refs++; /* what is launched is what was captured */
    fan__fake.execs[c->device] += graph_bytes(g);
    fan__fake.live[A_GRAPH]++;
    fan__fake_unlock();
    *out = (fan_cu_exec)(void *)g;
    return OK;
}

fan_cu_result fan_fake_GraphLaunch(fan_cu_exec run, fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(GraphLaunch);
    INSIDE(c);
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    fan__fake_note_races();
    code = fan__fake_done(
        fan_sim_graph_launch(((struct fan_cu_graph *)(void *)run)->graph, s, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_GraphDestroy(fan_cu_graph g)
{
    CALL(GraphDestroy);
    graph_count(-1);
    graph_release(g);
    return OK;
}

fan_cu_result fan_fake_GraphExecDestroy(fan_cu_exec run)
{
    struct fan_cu_graph *g = (struct fan_cu_graph *)(void *)run;
    CALL(GraphExecDestroy);
    INSIDE(c);
    BESIDE(GraphExecDestroy);
    fan__fake_lock();
    fan__fake.execs[c->device] -= graph_bytes(g);
    fan__fake.live[A_GRAPH]--;
    fan__fake_unlock();
    graph_release(g);
    return OK;
}
