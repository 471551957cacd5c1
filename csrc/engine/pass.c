/* A pass begins, runs on its workers, says what it is asked, and ends. */
#include "base/mem.h"
#include "base/thread.h"
#include "engine/collect.h"
#include "engine/workers.h"
#include "engine/queue.h"
#include "engine/step.h"
#include "engine/streams.h"
#include "engine/timeline.h"

#define DEPTH 1000 /* passes inside passes */

static _Thread_local unsigned depth;

static fan_status no_memory(fan_error *err) { return fan_fail(err, FAN_ERR_NOMEM, "out of memory"); }

/* ---- a worker ---- */

/* next_node: leaves accumulate, what is there to be captured is; then the next node that runs; FAN_NOWHERE. */
static fan_status next_node(fan_task_worker *w, fan_error *err)
{
    const fan_backward *p = w->pass;
    for (;;) {
        FAN_TRY(fan__queue_next(w, err));
        if (w->now == FAN_NOWHERE)
            return FAN_OK;
        if (p->nodes[w->now].runs && !p->nodes[w->now].leaf)
            break;
        FAN_TRY(fan__step_end(w, err));
    }
    const fan_node *n = p->nodes[w->now].node;
    return n->freed_by ? fan_node_freed(n, err) : FAN_OK; /* by another pass, since this one began */
}

/* work: nodes, until none is left. */
static fan_status work(fan_task_worker *w, fan_error *err)
{
    fan_status status;
    w->thread = fan_thread_id();
    do {
        status = next_node(w, err);
        if (status == FAN_OK && w->now != FAN_NOWHERE)
            status = fan__step(w, err);
    } while (status == FAN_OK && w->now != FAN_NOWHERE);
    return status;
}

/* help: a helper's part, on its thread. */
static void help(fan_task_helper *h)
{
    const fan_backward *p = h->worker.pass;
    if (p->config.frontend->worker_enter(h->around)) {
        fan_error err;
        fan_status status;
        err.text[0] = '\0';
        depth = p->depth;
        status = work(&h->worker, &err);
        if (status != FAN_OK)
            fan__task_workers_failed(&h->worker, status, &err);
        if (p->workers->forked)
            p->config.frontend->orphaned(p->workers->error);
        depth = 0;
        p->config.frontend->worker_leave(h->around);
    }
    fan__task_workers_left(h);
}

/* ---- begin and end ---- */

/* config_copy: its arrays, and their holds. */
static fan_status config_copy(fan_backward *p, const fan_backward_config *config, fan_error *err)
{
    p->config = *config;
    if (config->schedule)
        config->frontend->hold(config->schedule);
    if (config->progress)
        config->frontend->hold(config->progress);
    p->config.roots = fan_alloc(config->nroots * sizeof *config->roots);
    p->config.wanted = fan_alloc(config->nwanted * sizeof *config->wanted);
    if (!p->config.roots || !p->config.wanted) {
        p->config.nroots = p->config.nwanted = 0;
        return no_memory(err);
    }
    for (size_t i = 0; i < config->nroots; i++) {
        fan_root *r = &p->config.roots[i];
        *r = config->roots[i];
        r->node->ops->hold(r->node);
        if (r->gradient)
            config->frontend->hold(r->gradient);
    }
    for (size_t i = 0; i < config->nwanted; i++) {
        p->config.wanted[i] = config->wanted[i];
        config->wanted[i].node->ops->hold(config->wanted[i].node);
    }
    return FAN_OK;
}

fan_status fan_backward_begin(const fan_backward_config *config, fan_backward **out, fan_error *err)
{
    fan_backward *p = fan_calloc(sizeof *p);
    fan_status status;
    *out = NULL;
    if (!p)
        return no_memory(err);
    p->id = fan_mark_new();
    p->queue.leaves = p->queue.leaves_last = FAN_NOWHERE;
    p->caller = (fan_task_worker){.pass = p, .now = FAN_NOWHERE};
    status = config_copy(p, config, err);
    if (status == FAN_OK)
        status = fan_task_streams_begin(p, err);
    if (status == FAN_OK)
        status = fan_collect(p, err);
    if (status == FAN_OK && config->workers > 1)
        status = fan__task_workers_begin(p, help, err);
    if (status == FAN_OK)
        *out = p;
    else
        fan_backward_end(p);
    return status;
}

void fan_backward_end(fan_backward *p)
{
    const fan_engine_frontend *f;
    if (!p)
        return;
    f = p->config.frontend;
    if (p->is_running)
        fan__task_running_end(&p->running);
    fan__timeline_end(&p->timeline, &p->caller);
    fan_task_join_failed(p);
    for (size_t i = 0; i < p->nslots; i++)
        fan__drop_all(p, &p->slots[i].forwarded, 1);
    for (size_t i = 0; i < p->nnodes; i++)
        if (p->nodes[i].buffer)
            f->buffer_free(p->nodes[i].buffer);
    if (p->results)
        fan__drop_all(p, p->results, p->config.nwanted);
    for (size_t i = 0; i < p->config.nroots; i++)
        fan__drop_all(p, &p->config.roots[i].gradient, 1);
    for (size_t i = 0; i < p->config.nroots; i++)
        p->config.roots[i].node->ops->drop(p->config.roots[i].node);
    for (size_t i = 0; i < p->config.nwanted; i++)
        p->config.wanted[i].node->ops->drop(p->config.wanted[i].node);
    fan__drop_all(p, &p->config.schedule, 1);
    fan__drop_all(p, &p->config.progress, 1);
    fan__task_workers_free(p);
    fan_ready_fini(&p->queue.nodes);
    fan_task_streams_fini(p);
    fan__collect_free(p->nodes, p->cap_nodes, sizeof *p->nodes);
    fan__collect_free(p->slots, p->nslots, sizeof *p->slots);
    fan__collect_free(p->edges, p->cap_edges, sizeof *p->edges);
    fan_free(p->same);
    fan_free(p->results);
    fan_free(p->config.roots);
    fan_free(p->config.wanted);
    fan_free(p);
}

/* ---- run ---- */

fan_status fan_backward_seed(fan_backward *p, fan_error *err)
{
    fan_streams_outer outer;
    fan_status status = FAN_OK;
    fan_streams_enter(p->streams.caller, &outer);
    for (size_t i = 0; i < p->config.nroots && status == FAN_OK; i++) {
        fan_root *r = &p->config.roots[i];
        fan_producer producer = {.call = p->config.call, .index = (uint32_t)i};
        status = fan__deliver_one(p, &p->edges[i], &r->gradient, &producer, err);
        if (status == FAN_OK)
            fan__drop_all(p, &r->gradient, 1);
    }
    fan_streams_leave(&outer);
    p->seeded = status == FAN_OK;
    return status;
}

fan_status fan_backward_next(fan_backward *p, fan_node **out, fan_error *err)
{
    *out = NULL;
    FAN_TRY(next_node(&p->caller, err));
    if (p->caller.now != FAN_NOWHERE)
        *out = p->nodes[p->caller.now].node;
    return FAN_OK;
}

bool fan_backward_depth(int by)
{
    depth += (unsigned)by;
    return depth <= DEPTH;
}

fan_status fan_backward_too_deep(fan_error *err)
{
    return fan_fail(err, FAN_ERR_STATE, "a pass inside a pass, %d deep: is it started for ever? (E7)", DEPTH);
}

fan_status fan_backward_run(fan_backward *p, fan_error *err)
{
    fan_status status;
    if (!fan_backward_depth(1)) {
        fan_backward_depth(-1);
        return fan_backward_too_deep(err);
    }
    p->depth = depth;
    status = work(&p->caller, err);
    if (p->workers) {
        if (status != FAN_OK)
            fan__task_workers_failed(&p->caller, status, err);
        status = fan__task_workers_end(p);
    }
    fan_backward_depth(-1);
    return status;
}

/* ---- by hand ---- */

fan_status fan_backward_sums(fan_backward *p, void **sums, void **node_hooks, fan_error *err)
{
    if (fan__traced())
        fan__timeline_begin(&p->timeline, &p->caller);
    return fan__step_sums(&p->caller, sums, node_hooks, err);
}

fan_status fan_backward_give(fan_backward *p, void **gradients, const void *node_hooks, fan_error *err)
{
    if (p->is_running)
        fan__task_running_end(&p->running);
    p->is_running = false;
    fan_status status = fan__step_deliver(&p->caller, gradients, node_hooks, err);
    fan__timeline_end(&p->timeline, &p->caller);
    return status;
}

void fan_backward_enter(const fan_backward *p, fan_streams_outer *outer)
{
    fan_streams_enter(fan_task_run_streams(p, p->nodes[p->caller.now].node).set, outer);
}

/* ---- what a pass says of itself ---- */

void fan_backward_walk_runs(fan_backward *p, bool inside)
{
    if (p->is_running)
        fan__task_running_end(&p->running);
    fan__task_running_begin(&p->running, &p->caller, inside ? fan_thread_id() : 0);
    p->is_running = true;
}

void *fan_backward_result(fan_backward *p, size_t i)
{
    void *sum = p->results[i];
    p->results[i] = NULL;
    return sum;
}

fan_node *fan_backward_ready(const fan_backward *p, size_t *place)
{
    *place = fan_ready_first(&p->queue.nodes, *place);
    return *place == FAN_READY_NONE ? NULL : p->nodes[*place].node;
}

uint32_t fan_backward_edges(const fan_backward *p) { return p->nodes[p->caller.now].nedges; }

const fan_node *fan_backward_at(const fan_backward *p, uint32_t *ran, uint32_t *all)
{
    *ran = p->ran;
    *all = p->to_run;
    return p->caller.now == FAN_NOWHERE ? NULL : p->nodes[p->caller.now].node;
}

bool fan_backward_seeded(const fan_backward *p) { return p->seeded; }

bool fan_backward_error_has_location(const fan_backward *p) { return p->workers && p->workers->failed; }

int fan_backward_visit(fan_backward *p, int (*object)(void *object, void *arg), int (*node)(fan_node *n, void *arg),
                       void *arg)
{
    int answer = p->config.schedule ? object(p->config.schedule, arg) : 0;
    if (p->config.progress && !answer)
        answer = object(p->config.progress, arg);
    for (size_t i = 0; i < p->nslots && !answer; i++)
        answer = p->slots[i].forwarded ? object(p->slots[i].forwarded, arg) : 0;
    for (size_t i = 0; i < p->nnodes && !answer; i++)
        answer = p->nodes[i].buffer ? object(p->nodes[i].buffer, arg) : 0;
    for (size_t i = 0; p->results && i < p->config.nwanted && !answer; i++)
        answer = p->results[i] ? object(p->results[i], arg) : 0;
    for (size_t i = 0; i < p->config.nroots && !answer; i++) {
        answer = node(p->config.roots[i].node, arg);
        if (!answer && p->config.roots[i].gradient)
            answer = object(p->config.roots[i].gradient, arg);
    }
    for (size_t i = 0; i < p->config.nwanted && !answer; i++)
        answer = node(p->config.wanted[i].node, arg);
    return answer;
}
