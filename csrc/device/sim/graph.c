/* Begins and ends captures of streams, and launches the resulting graphs. */
#include "base/mem.h"
#include "device/sim/machine.h"
#include "device/sim/race_check.h"

#include <string.h>

fan_status fan_sim_capture_begin(fan_sim *m, fan_stream *s, int mode, fan_error *err)
{
    fan_sim_queue *q = fan__queue_of(s);
    fan_sim_graph *g = fan_calloc(sizeof *g);
    fan_sim_recording *r = fan_calloc(sizeof *r);
    fan_status status;
    fan_yield();
    fan__sim_lock(m);
    fan__sim_access(m, FAN__NAME(OF_CAPTURES, 0), FAN_SCHED_WRITE);
    if (q->legacy || q->recording) {
        int code = FAN_CAPTURE_VALUE;
        if (q->legacy)
            code = FAN_CAPTURE_UNSUPPORTED;
        else if (q->recording->capture.broken)
            code = FAN_CAPTURE_INVALIDATED;
        FAN_GO(fan__recording_refuse(q, code, "begin a capture", err));
    }
    if (!g || !r || fan_grow((void **)&g->device, &g->device_cap, 1, sizeof *g->device))
        FAN_GO(fan__recording_refuse(q, -1, "begin a capture", err));
    FAN_GO(fan_capture_begin(&r->capture, (fan_capture_mode)mode, fan_thread_id(), err));
    g->refs = 1;
    g->m = m;
    g->tail = &g->head;
    g->device[g->members++] = q->device;
    r->graph = g;
    r->refs = 2; /* the machine's and the stream's */
    r->next = m->recordings;
    m->recordings = r;
    atomic_fetch_add_explicit(&m->captures, 1, memory_order_relaxed);
    q->recording = r;
    q->member = 0;
    q->refs++;
done:
    fan__sim_unlock(m);
    if (status != FAN_OK) {
        if (g)
            fan_free(g->device);
        fan_free(g);
        if (r)
            fan_capture_fini(&r->capture);
        fan_free(r);
    }
    return status;
}

/* graph_drop: decrements a count of g's; the last drop of both frees it. */
static void graph_drop(fan_sim_graph *g, size_t *count)
{
    fan_sim *m = g->m;
    fan__sim_lock(m);
    --*count;
    bool last = !g->refs && !g->queued;
    for (uint32_t i = 0; last && g->queues && i < g->members; i++)
        fan__queue_drop(g->queues[i]);
    for (fan_sim_graph **at = &m->graphs; last && *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    for (size_t i = 0; last && i < g->nblocks; i++) {
        fan_block *b = fan__access_block(m, (void *)g->blocks[i]);
        if (b && --b->graphs == 0 && b->left)
            fan_arena_free(&fan__access_part(m, b->lo)->arena, b->lo);
    }
    if (last)
        fan__queue_sweep(m);
    fan__sim_unlock(m);
    if (last)
        fan__graph_free(g);
}

void fan_sim_graph_drop(fan_sim_graph *g)
{
    if (!g)
        return;
    fan_sim *m = g->m;
    fan__sim_lock(m);
    bool mine = g->refs == 1; /* no other holder can launch it, or get a hold */
    fan__sim_unlock(m);
    graph_drop(g, &g->refs);
    if (mine)
        fan_sim_drop(m);
}

fan_status fan_sim_capture_end(fan_sim *m, fan_stream *s, fan_sim_graph **out, fan_error *err)
{
    fan_sim_queue *q = fan__queue_of(s);
    fan_sim_graph *g = NULL;
    *out = NULL;
    fan_yield();
    fan__sim_lock(m);
    fan__sim_access(m, FAN__NAME(OF_CAPTURES, 0), FAN_SCHED_WRITE);
    fan_sim_recording *r = q->recording;
    int code = FAN_CAPTURE_VALUE;
    if (r)
        code = fan_capture_end(&r->capture, q->member, fan_thread_id());
    /* the first stream with captured work that the first stream does not wait for */
    uint64_t unjoined = 0;
    for (size_t i = 0; code == FAN_CAPTURE_UNJOINED && !unjoined && i < m->nqueues; i++) {
        const fan_sim_queue *other = m->queues[i];
        if (other->recording == r &&
            fan_clock_get(&r->capture.before[0], other->member) < r->capture.work[other->member])
            unjoined = other->handle;
    }
    if (r && r->capture.ended) {
        g = r->graph;
        g->next = m->graphs;
        m->graphs = g;
        fan_sim_recording **at = &m->recordings;
        while (*at != r)
            at = &(*at)->next;
        *at = r->next;
        for (size_t i = 0; i < m->nqueues; i++) {
            fan_sim_queue *member = m->queues[i];
            if (member->recording == r) {
                member->recording = NULL;
                fan__queue_drop(member);
                r->refs--; /* not the last: the machine's remains */
            }
        }
        atomic_fetch_sub_explicit(&m->captures, 1, memory_order_relaxed);
        r->graph = NULL;
        fan__recording_drop(r);
        fan__queue_sweep(m);
    }
    fan_status status = fan__recording_refuse(q, code, "end a capture", err);
    if (unjoined && err)
        fan_append(err->text, sizeof err->text, ": stream %llu", (unsigned long long)unjoined);
    fan__sim_unlock(m);
    if (g)
        (void)fan_sim_hold(m); /* the graph's */
    if (status == FAN_OK)
        *out = g;
    else
        fan_sim_graph_drop(g);
    return status;
}

/* Queued work of a graph. */
typedef struct graph_work {
    fan_sim_graph *graph; /* held: it keeps the memory until the work has run */
    const fan_sim_kernel *kernel;
} graph_work;

static fan_status graph_work_run(void *ctx, fan_error *err)
{
    const fan_sim_kernel *kernel = ((const graph_work *)ctx)->kernel;
    if (!kernel->fn)
        return FAN_OK;
    return kernel->fn(kernel->ctx, err);
}

static void graph_work_fini(void *ctx)
{
    graph_work *r = ctx;
    graph_drop(r->graph, &r->graph->queued);
    fan_free(r);
}

/* graph_follow: orders all that is queued on q from now on after all that is queued on `other`. */
static fan_status graph_follow(fan_sim *m, fan_sim_queue *q, fan_sim_queue *other, fan_error *err)
{
    FAN_TRY(fan__queue_wait(m, q, (fan_sim_point){other, other->queued}, err));
    q->end_us = fan__later(q->end_us, other->end_us);
    const fan_clock *after = fan_race_check_clock(m->race_check, other->lane);
    if (fan_race_check_wait(m->race_check, q->lane, fan__sim_lane(m), after) != FAN_OK)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
    return FAN_OK;
}

/* The host's time for a launch: a share of a kernel's, and one for each node. As CUDA's graphs: 2.5
 * us and 1 ns where a kernel takes 3 us. */
#define LAUNCH_SHARE (2.5 / 3)
#define NODE_SHARE (0.001 / 3)

/* A record in a graph, during its launch. */
typedef struct graph_record {
    fan_sim_point point;
    fan_clock clock;
} graph_record;

/* command_accesses: how to visit what a command accesses: with the returned function, of *what. */
static fan__visit *command_accesses(const fan_sim_command *c, const void **what)
{
    if (c->njobs == 1) {
        *what = c->jobs;
        return fan__visit_job;
    }
    *what = &c->kernel;
    return fan__visit_kernel;
}

static fan_status graph_replay(fan_sim *m, fan_sim_graph *g, const fan_sim_command *c,
                               graph_record *marks, fan_error *err)
{
    fan_sim_queue *q = g->queues[c->member];
    graph_record *k = &marks[c->event];
    switch (c->kind) {
    case FAN_COMMAND_WORK: {
        fan__work w = {.name = c->name,
                       .us = c->us,
                       .launched = true,
                       .by_user = c->njobs == 0,
                       .kept = m->config.bare ? KEPT_BY_NONE : KEPT_BY_GRAPH};
        w.next = command_accesses(c, &w.what);
        graph_work *r = NULL;
        if (m->config.run_work) {
            w.op = fan__op_new(c->jobs, c->njobs);
            r = fan_alloc(sizeof *r);
            if (!w.op || !r) {
                fan_free(w.op);
                fan_free(r);
                return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
            }
            *r = (graph_work){g, &c->kernel};
            g->queued++;
            w.op->fn = graph_work_run;
            w.op->fini = graph_work_fini;
            w.op->ctx = r;
        }
        fan_status status = fan__work_enqueue(m, g->queues[c->member], &w, c->call_site, err);
        if (status != FAN_OK && status != FAN_ERR_RACE) {
            if (r)
                g->queued--;
            fan_free(r);
            fan_free(w.op);
        }
        return status;
    }
    case FAN_COMMAND_RECORD:
        k->point = (fan_sim_point){q, q->queued};
        if (fan_race_check_record(m->race_check, q->lane, fan__sim_lane(m), &k->clock) != FAN_OK)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
        break;
    case FAN_COMMAND_WAIT:
        FAN_TRY(fan__queue_wait(m, q, k->point, err));
        q->end_us = fan__later(q->end_us, k->point.queue->end_us);
        if (fan_race_check_wait(m->race_check, q->lane, fan__sim_lane(m), &k->clock) != FAN_OK)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
        break;
    }
    return FAN_OK;
}

fan_status fan_sim_graph_launch(fan_sim_graph *g, fan_stream *s, fan_error *err)
{
    fan_sim *m = g->m;
    fan_sim_queue *q = fan__queue_of(s);
    fan_status status;
    fan_status worst = FAN_OK;
    bool begun = false;
    size_t work = 0;
    graph_record *marks = fan_calloc(((size_t)g->events + 1) * sizeof *marks);
    if (!marks)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
    for (uint32_t i = 0; i < g->events; i++)
        fan_clock_init(&marks[i].clock);
    fan_yield();
    fan__sim_lock(m);
    FAN_GO(fan__sim_enter(m, "launch", err));
    FAN_GO(fan__sim_raise_pending(m, err));
    FAN_GO(fan__recording_none(q, "launch a graph", err));
    FAN_GO(fan__stream_barrier(m, q, err));
    const fan_clock *now = fan_race_check_clock(m->race_check, q->lane);
    if (fan_race_check_wait(m->race_check, q->lane, fan__sim_lane(m),
                            now)) /* this host queues it */
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph"));
    if (!g->queues)
        g->queues = fan_calloc(g->members * sizeof *g->queues);
    if (!g->queues)
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph"));
    /* reused in each launch: so two launches of one graph run one after the other */
    for (uint32_t i = 0; i < g->members; i++) {
        now = fan_race_check_clock(m->race_check, q->lane);
        if (!g->queues[i])
            FAN_GO(fan__queue_new(m, g->device[i], ++m->handle, false, now, &g->queues[i], err));
    }
    for (const fan_sim_command *c = g->head; c; c = c->next)
        work += c->kind == FAN_COMMAND_WORK;
    m->host_us[fan__sim_host(m)] +=
        m->config.launch_us * (LAUNCH_SHARE + NODE_SHARE * (double)work);
    for (uint32_t i = 0; i < g->members; i++)
        FAN_GO(graph_follow(m, g->queues[i], q, err));
    begun = true;
    for (const fan_sim_command *c = g->head; c; c = c->next) {
        status = graph_replay(m, g, c, marks, err);
        if (status == FAN_ERR_RACE)
            worst = FAN_ERR_RACE;
        else if (status != FAN_OK)
            goto done;
    }
    for (uint32_t i = 0; i < g->members; i++)
        FAN_GO(graph_follow(m, q, g->queues[i], err));
    fan__sim_access(m, q->name, true);
    begun = false;
    status = worst;
done:
    /* the queued part is in order even after a failure */
    for (uint32_t i = 0; begun && i < g->members; i++)
        (void)graph_follow(m, q, g->queues[i], NULL);
    fan__sim_unlock(m);
    for (uint32_t i = 0; i < g->events; i++)
        fan_clock_fini(&marks[i].clock);
    fan_free(marks);
    return status;
}

/* The device's entries for graph trees, on its own captures. */
static fan_status recorder_origin(fan_device *d, fan_stream **out, fan_error *err)
{
    return fan_sim_stream(fan__sim_machine(d), d->index, false, out, err);
}

static fan_status recorder_begin(fan_device *d, fan_stream *origin, fan_error *err)
{
    return fan_sim_capture_begin(fan__sim_machine(d), origin, FAN_CAPTURE_THREAD_LOCAL, err);
}

static fan_status recorder_end(fan_device *d, fan_stream *origin, fan_recording **out,
                               fan_error *err)
{
    fan_sim_graph *g = NULL;
    FAN_TRY(fan_sim_capture_end(fan__sim_machine(d), origin, &g, err));
    *out = (fan_recording *)g;
    return FAN_OK;
}

static void recorder_abort(fan_device *d, fan_stream *origin)
{
    fan_sim_graph *g = NULL;
    (void)fan_sim_capture_end(fan__sim_machine(d), origin, &g, NULL);
    fan_sim_graph_drop(g);
}

static fan_status recorder_launch(fan_recording *r, fan_stream *origin, fan_error *err)
{
    return fan_sim_graph_launch((fan_sim_graph *)r, origin, err);
}

static double recorder_clock(fan_device *d, fan_stream *origin)
{
    fan_sim *m = fan__sim_machine(d);
    fan__sim_lock(m);
    double us = fan__later(fan__queue_of(origin)->end_us, m->host_us[fan__sim_host(m)]);
    fan__sim_unlock(m);
    return us;
}

static void recorder_drop(fan_recording *r)
{
    fan_sim_graph_drop((fan_sim_graph *)r);
}

static void recorder_accesses(const fan_recording *recording, fan_recording_visit visit, void *ctx)
{
    const fan_sim_graph *g = (const fan_sim_graph *)recording;
    for (const fan_sim_command *c = g->head; c; c = c->next) {
        const fan_array *a = NULL;
        const void *what;
        bool write;
        if (c->kind != FAN_COMMAND_WORK)
            continue;
        fan__visit *next = command_accesses(c, &what);
        for (size_t i = 0; next(what, i, &a, &write); i++) {
            int64_t lo, hi;
            if (!a || !a->size)
                continue;
            fan_array_reach(a, &lo, &hi);
            if (!visit(ctx, c->name, a->data + lo, (size_t)(hi - lo), write))
                return;
        }
    }
}

/* Memory that is to be poisoned. */
typedef struct recorder_range {
    void *data;
    size_t bytes;
} recorder_range;

static fan_status recorder_spoil(void *ctx, fan_error *err)
{
    const recorder_range *r = ctx;
    (void)err;
    memset(r->data, FAN_POISON, r->bytes);
    return FAN_OK;
}

static fan_status recorder_poison(fan_device *d, fan_stream *origin, void *data, size_t bytes,
                                  fan_error *err)
{
    int64_t n = (int64_t)bytes;
    int64_t step = 1;
    fan_storage st = {.data = data, .bytes = bytes};
    fan_array a = {.storage = &st,
                   .data = data,
                   .dtype = FAN_DT_UINT8,
                   .ndim = 1,
                   .size = n,
                   .shape = &n,
                   .strides = &step,
                   .writable = true};
    fan_array *writes = &a;
    recorder_range *r = fan_alloc(sizeof *r);
    if (!r)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    *r = (recorder_range){data, bytes};
    fan_sim_kernel k = {.name = "poison",
                        .fn = recorder_spoil,
                        .fini = fan_free,
                        .ctx = r,
                        .writes = &writes,
                        .nwrites = 1,
                        .us = 0};
    fan_status status = fan_sim_launch(fan__sim_machine(d), origin, &k, err);
    if (status != FAN_OK)
        fan_free(r);
    return status;
}

const fan_recorder fan_sim_recorder = {
    .origin = recorder_origin,
    .begin = recorder_begin,
    .end = recorder_end,
    .abort = recorder_abort,
    .launch = recorder_launch,
    .clock = recorder_clock,
    .drop = recorder_drop,
    .accesses = recorder_accesses,
    .accesses_all = true,
    .poison = recorder_poison,
    .always_poisons = true,
};
