/* Begins and ends captures of streams, launches the resulting graphs, and has the recorder's
 * entries for graph trees. */
#include "base/mem.h"
#include "device/sim/machine.h"
#include "device/sim/race_check.h"

#include <string.h>

fan_status fan_sim_capture_begin(fan_sim *machine, fan_stream *s, int mode, fan_error *err)
{
    fan_sim_queue *queue = fan__queue_of(s);
    fan_sim_graph *g = fan_calloc(sizeof *g);
    fan_sim_recording *r = fan_calloc(sizeof *r);
    fan_status status;
    fan_yield();
    fan__sim_lock(machine);
    fan__sim_access_state(machine, OF_CAPTURES, FAN_SCHED_WRITE);
    if (queue->legacy || queue->recording) {
        int code = FAN_CAPTURE_VALUE;
        if (queue->legacy)
            code = FAN_CAPTURE_UNSUPPORTED;
        else if (queue->recording->capture.broken)
            code = FAN_CAPTURE_INVALIDATED;
        FAN_GO(fan__recording_refuse(queue, code, "begin a capture", err));
    }
    if (!g || !r || fan_grow((void **)&g->device, &g->device_cap, 1, sizeof *g->device))
        FAN_GO(fan__recording_refuse(queue, -1, "begin a capture", err));
    FAN_GO(fan_capture_begin(&r->capture, (fan_capture_mode)mode, fan_thread_id(), err));
    g->refs = 1;
    g->machine = machine;
    g->tail = &g->head;
    g->device[g->members++] = queue->device;
    r->graph = g;
    r->refs = 2; /* the machine's and the stream's */
    r->next = machine->recordings;
    machine->recordings = r;
    atomic_fetch_add_explicit(&machine->captures, 1, memory_order_relaxed);
    queue->recording = r;
    queue->member = 0;
    queue->refs++;
done:
    fan__sim_unlock(machine);
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
    fan_sim *machine = g->machine;
    fan__sim_lock(machine);
    --*count;
    bool last = !g->refs && !g->queued;
    for (uint32_t i = 0; last && g->queues && i < g->members; i++)
        fan__queue_drop(g->queues[i]);
    for (fan_sim_graph **at = &machine->graphs; last && *at; at = &(*at)->next) {
        if (*at == g) {
            *at = g->next;
            break;
        }
    }
    for (size_t i = 0; last && i < g->nblocks; i++) {
        fan_block *b = fan__access_block(machine, (void *)g->blocks[i]);
        if (b && --b->graphs == 0 && b->left)
            fan_arena_free(&fan__access_part(machine, b->lo)->arena, b->lo);
    }
    if (last)
        fan__queue_sweep(machine);
    fan__sim_unlock(machine);
    if (last)
        fan__graph_free(g);
}

void fan_sim_graph_drop(fan_sim_graph *g)
{
    if (!g)
        return;
    fan_sim *machine = g->machine;
    fan__sim_lock(machine);
    bool mine = g->refs == 1; /* no other holder can launch it, or get a hold */
    fan__sim_unlock(machine);
    graph_drop(g, &g->refs);
    if (mine)
        fan_sim_drop(machine);
}

fan_status fan_sim_capture_end(fan_sim *machine, fan_stream *s, fan_sim_graph **out, fan_error *err)
{
    fan_sim_queue *queue = fan__queue_of(s);
    fan_sim_graph *g = NULL;
    *out = NULL;
    fan_yield();
    fan__sim_lock(machine);
    fan__sim_access_state(machine, OF_CAPTURES, FAN_SCHED_WRITE);
    fan_sim_recording *r = queue->recording;
    int code = FAN_CAPTURE_VALUE;
    if (r)
        code = fan_capture_end(&r->capture, queue->member, fan_thread_id());
    /* the first stream with captured work that the first stream does not wait for */
    uint64_t unjoined = 0;
    for (size_t i = 0; code == FAN_CAPTURE_UNJOINED && !unjoined && i < machine->nqueues; i++) {
        const fan_sim_queue *other = machine->queues[i];
        if (other->recording == r &&
            fan_clock_get(&r->capture.before[0], other->member) < r->capture.work[other->member])
            unjoined = other->handle;
    }
    if (r && r->capture.ended) {
        g = r->graph;
        g->next = machine->graphs;
        machine->graphs = g;
        fan_sim_recording **at = &machine->recordings;
        while (*at != r)
            at = &(*at)->next;
        *at = r->next;
        for (size_t i = 0; i < machine->nqueues; i++) {
            fan_sim_queue *member = machine->queues[i];
            if (member->recording == r) {
                member->recording = NULL;
                fan__queue_drop(member);
                r->refs--; /* not the last: the machine's remains */
            }
        }
        atomic_fetch_sub_explicit(&machine->captures, 1, memory_order_relaxed);
        r->graph = NULL;
        fan__recording_drop(r);
        fan__queue_sweep(machine);
    }
    fan_status status = fan__recording_refuse(queue, code, "end a capture", err);
    if (unjoined && err)
        fan_append(err->text, sizeof err->text, ": stream %llu", (unsigned long long)unjoined);
    fan__sim_unlock(machine);
    if (g)
        (void)fan_sim_hold(machine); /* the graph's */
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

static fan_status graph_no_memory(fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
}

/* graph_after: orders all that is queued on `queue` from now on after the clock, in the checker;
 * the calling thread queues it. */
static fan_status graph_after(fan_sim *machine, const fan_sim_queue *queue, const fan_clock *clock,
                              fan_error *err)
{
    if (fan_race_check_wait(machine->race_check, queue->lane, fan__sim_lane(machine), clock))
        return graph_no_memory(err);
    return FAN_OK;
}

/* graph_wait: the same for a point of another queue, which has that clock. */
static fan_status graph_wait(fan_sim *machine, fan_sim_queue *queue, fan_sim_point point,
                             const fan_clock *clock, fan_error *err)
{
    FAN_TRY(fan__queue_wait(machine, queue, point, err));
    queue->end_us = fan__later(queue->end_us, point.queue->end_us);
    return graph_after(machine, queue, clock, err);
}

/* graph_follow: the same for all that is queued on `other`. */
static fan_status graph_follow(fan_sim *machine, fan_sim_queue *queue, fan_sim_queue *other,
                               fan_error *err)
{
    return graph_wait(machine, queue, (fan_sim_point){other, other->queued},
                      fan_race_check_clock(machine->race_check, other->lane), err);
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

/* command_work: returns the work of a command, as a launch queues it. */
static fan__work command_work(const fan_sim_command *c)
{
    return (fan__work){
        .name = c->name,
        .call_site = c->call_site,
        .jobs = c->jobs,
        .njobs = c->njobs,
        .kernel = c->kernel,
        .us = c->us,
        .launched = true,
        .kept = KEPT_BY_GRAPH,
        .by_user = c->njobs == 0,
    };
}

static fan_status graph_replay(fan_sim *machine, fan_sim_graph *g, const fan_sim_command *c,
                               graph_record *marks, fan_error *err)
{
    fan_sim_queue *queue = g->queues[c->member];
    graph_record *k = &marks[c->event];
    switch (c->kind) {
    case FAN_COMMAND_WORK: {
        fan__work w = command_work(c);
        if (machine->config.bare)
            w.kept = KEPT_BY_NONE;
        graph_work *r = NULL;
        if (machine->config.run_work) {
            w.op = fan__op_new(c->jobs, c->njobs);
            r = fan_alloc(sizeof *r);
            if (!w.op || !r) {
                fan_free(w.op);
                fan_free(r);
                return graph_no_memory(err);
            }
            *r = (graph_work){g, &c->kernel};
            g->queued++;
            w.op->fn = graph_work_run;
            w.op->fini = graph_work_fini;
            w.op->ctx = r;
        }
        fan_status status = fan__work_enqueue(machine, queue, &w, err);
        if (status != FAN_OK && status != FAN_ERR_RACE) {
            if (r)
                g->queued--;
            fan_free(r);
            fan_free(w.op);
        }
        return status;
    }
    case FAN_COMMAND_RECORD:
        k->point = (fan_sim_point){queue, queue->queued};
        if (fan_race_check_record(machine->race_check, queue->lane, fan__sim_lane(machine),
                                  &k->clock) != FAN_OK)
            return graph_no_memory(err);
        break;
    case FAN_COMMAND_WAIT:
        return graph_wait(machine, queue, k->point, &k->clock, err);
    }
    return FAN_OK;
}

fan_status fan_sim_graph_launch(fan_sim_graph *g, fan_stream *s, fan_error *err)
{
    fan_sim *machine = g->machine;
    fan_sim_queue *queue = fan__queue_of(s);
    fan_status status;
    fan_status worst = FAN_OK;
    bool begun = false;
    size_t work = 0;
    graph_record *marks = fan_calloc(((size_t)g->events + 1) * sizeof *marks);
    if (!marks)
        return graph_no_memory(err);
    for (uint32_t i = 0; i < g->events; i++)
        fan_clock_init(&marks[i].clock);
    fan_yield();
    fan__sim_lock(machine);
    FAN_GO(fan__sim_enter_on(machine, queue, "launch", "launch a graph", err));
    const fan_clock *now = fan_race_check_clock(machine->race_check, queue->lane);
    FAN_GO(graph_after(machine, queue, now, err)); /* this host queues it */
    if (!g->queues)
        g->queues = fan_calloc(g->members * sizeof *g->queues);
    if (!g->queues)
        FAN_GO(graph_no_memory(err));
    /* reused in each launch: so two launches of one graph run one after the other */
    for (uint32_t i = 0; i < g->members; i++) {
        now = fan_race_check_clock(machine->race_check, queue->lane);
        if (!g->queues[i]) {
            FAN_GO(fan__queue_new(machine, g->device[i], ++machine->handle, false, now,
                                  &g->queues[i], err));
        }
    }
    for (const fan_sim_command *c = g->head; c; c = c->next)
        work += c->kind == FAN_COMMAND_WORK;
    *fan__host_clock(machine) +=
        machine->config.launch_us * (LAUNCH_SHARE + NODE_SHARE * (double)work);
    for (uint32_t i = 0; i < g->members; i++)
        FAN_GO(graph_follow(machine, g->queues[i], queue, err));
    begun = true;
    for (const fan_sim_command *c = g->head; c; c = c->next) {
        status = graph_replay(machine, g, c, marks, err);
        if (status == FAN_ERR_RACE)
            worst = FAN_ERR_RACE;
        else if (status != FAN_OK)
            goto done;
    }
    for (uint32_t i = 0; i < g->members; i++)
        FAN_GO(graph_follow(machine, queue, g->queues[i], err));
    fan__sim_access(machine, queue->name, true);
    begun = false;
    status = worst;
done:
    /* the queued part is in order even after a failure */
    for (uint32_t i = 0; begun && i < g->members; i++)
        (void)graph_follow(machine, queue, g->queues[i], NULL);
    fan__sim_unlock(machine);
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
    fan_sim *machine = fan__sim_machine(d);
    fan__sim_lock(machine);
    double us = fan__later(fan__queue_of(origin)->end_us, *fan__host_clock(machine));
    fan__sim_unlock(machine);
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
        bool write;
        if (c->kind != FAN_COMMAND_WORK)
            continue;
        fan__work work = command_work(c);
        for (size_t i = 0; fan__work_access(&work, i, &a, &write); i++) {
            int64_t lo;
            int64_t hi;
            if (!a || !a->size)
                continue;
            fan_array_reach(a, &lo, &hi);
            if (!visit(ctx, c->name, a->data + lo, (size_t)(hi - lo), write))
                return;
        }
    }
}

static size_t recorder_kernels(const fan_recording *recording)
{
    const fan_sim_graph *g = (const fan_sim_graph *)recording;
    size_t n = 0;
    for (const fan_sim_command *c = g->head; c; c = c->next)
        n += c->kind == FAN_COMMAND_WORK;
    return n;
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
    fan_array a = {
        .storage = &st,
        .data = data,
        .dtype = FAN_DT_UINT8,
        .ndim = 1,
        .size = n,
        .shape = &n,
        .strides = &step,
        .writable = true,
    };
    fan_array *writes = &a;
    recorder_range *r = fan_alloc(sizeof *r);
    if (!r)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    *r = (recorder_range){data, bytes};
    fan_sim_kernel k = {
        .name = "poison",
        .fn = recorder_spoil,
        .fini = fan_free,
        .ctx = r,
        .writes = &writes,
        .nwrites = 1,
        .us = 0,
    };
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
    .kernels = recorder_kernels,
    .poison = recorder_poison,
    .always_poisons = true,
};
