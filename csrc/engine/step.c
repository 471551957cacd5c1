/* A gradient's way, from the node that made it to the one that gets it:
 *
 *   hand_over   one producer, and it is what the slot takes: kept as it is; else into the node's buffer, by its key
 *   delivered     then, and not before, one gradient less is due (E1); with the last one the node is ready
 *   sums        what was forwarded over, or a take of the buffer; hooks of the slots; captured (E8)
 *   step        the function and its other hooks; release (E10); its gradients go on
 */
#include "engine/step.h"

#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "engine/workers.h"
#include "engine/explain.h"
#include "engine/queue.h"
#include "engine/streams.h"
#include "engine/timeline.h"

static fan_status no_memory(fan_error *err) { return fan_fail(err, FAN_ERR_NOMEM, "out of memory"); }

/* ---- who runs ---- */

static fan_task_running *running; /* of all threads, the newest first (node.h, One thread at a time) */

void fan__task_running_begin(fan_task_running *r, const fan_task_worker *w, uint64_t thread)
{
    *r = (fan_task_running){w->pass, w->now, thread, running};
    running = r;
}

void fan__task_running_end(fan_task_running *r)
{
    for (fan_task_running **at = &running; *at; at = &(*at)->outer)
        if (*at == r) {
            *at = r->outer;
            return;
        }
}

bool fan_backward_needs(const fan_node *n, uint32_t edge)
{
    uint64_t thread = fan_thread_id();
    const fan_task_running *in = NULL;
    for (const fan_task_running *r = running; r && !(in && in->thread); r = r->outer) {
        const fan_task_node *v = &r->pass->nodes[r->at];
        if (v->node == n && edge < v->nedges && (r->thread == thread || (!r->thread && !in)))
            in = r;
    }
    if (in)
        return in->pass->edges[in->pass->nodes[in->at].edges + edge].to != FAN_NOWHERE;
    return edge < n->nedges && n->edges[edge].next;
}

/* ---- a gradient goes on ---- */

/* buffer_of: makes the node's buffer, if nobody has: two workers may both find none. */
static fan_status buffer_of(fan_backward *p, fan_task_node *to, fan_stream *on, void *gradient, fan_error *err)
{
    void *made = NULL, *other;
    if (p->workers && fan_watched())
        fan_touch_thing(FAN_THING_LOCKED, p->workers->lock.id, FAN_TOUCH_READS);
    if (atomic_load_explicit(&to->buffer, memory_order_acquire))
        return FAN_OK;
    FAN_TRY(p->config.frontend->buffer_new(&p->config, to->node, on, gradient, &made, err));
    fan__task_lock(p);
    other = FAN_FAULT(BUFFER_TWICE) ? NULL : atomic_load_explicit(&to->buffer, memory_order_relaxed);
    if (!other)
        atomic_store_explicit(&to->buffer, made, memory_order_release);
    fan__task_unlock(p);
    if (other)
        p->config.frontend->buffer_free(made);
    return FAN_OK;
}

/* add: into the buffer of the edge's node. */
static fan_status add(fan_backward *p, const fan_task_edge *edge, void *gradient, fan_producer *producer,
                      fan_error *err)
{
    fan_task_node *to = &p->nodes[edge->to];
    fan_run_streams there = fan_task_run_streams(p, to->node);
    producer->to = there.set;
    FAN_TRY(buffer_of(p, to, FAN_FAULT(SUM_FOR_PRODUCER) ? producer->stream : there.own, gradient, err));
    return p->config.frontend->add(to->buffer, edge->slot, FAN_FAULT(KEY_BY_ARRIVAL) ? p->arrivals++ : edge->key,
                                   gradient, producer, err);
}

static fan_status give(fan_backward *p, fan_task_edge *edge, void **gradient, fan_producer *producer, fan_error *err)
{
    const fan_task_node *to = &p->nodes[edge->to];
    fan_task_slot *s = &p->slots[to->slots + edge->slot];
    edge->defined = *gradient != NULL;
    edge->from_hook = producer->from_hook;
    if (s->producers == 1 && !p->config.detect &&
        (!*gradient || p->config.frontend->can_forward(to->node, edge->slot, *gradient))) {
        s->forwarded = *gradient;
        *gradient = NULL;
    } else {
        FAN_TRY(add(p, edge, *gradient, producer, err));
    }
    edge->delivered = true;
    if (fan__traced() && producer->node && edge->defined)
        fan__timeline_gradient(p, edge->to, edge->slot, edge->key);
    return FAN_OK;
}

fan_status fan__deliver_one(fan_backward *p, fan_task_edge *edge, void **gradient, fan_producer *producer,
                            fan_error *err)
{
    if (edge->to == FAN_NOWHERE)
        return FAN_OK;
    FAN_TRY(give(p, edge, gradient, producer, err));
    fan__dependency_done(p, edge->to);
    return FAN_OK;
}

/* gives: whether one of its gradients goes anywhere. */
static bool gives(const fan_backward *p, const fan_task_node *v, void **gradients)
{
    for (uint32_t i = 0; i < v->nedges; i++)
        if (gradients[i] && p->edges[v->edges + i].to != FAN_NOWHERE)
            return true;
    return false;
}

/* give_all: to all whom the node's edges lead to. Of several workers, they arrive together (queue.h). */
static fan_status give_all(fan_task_worker *w, const fan_run_streams *on, void **gradients, const void *node_hooks,
                           fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_task_node *v = &p->nodes[w->now];
    fan_producer producer = {.node = v->node, .stream = on->own};
    for (; producer.index < v->nedges; producer.index++) {
        fan_task_edge *edge = &p->edges[v->edges + producer.index];
        if (edge->to == FAN_NOWHERE)
            continue;
        if (p->workers && FAN_FAULT(COUNT_BEFORE_ADD)) {
            fan__task_lock(p);
            fan__dependency_done(p, edge->to);
            fan__task_unlock(p);
        }
        if (node_hooks)
            producer.from_hook = p->config.frontend->is_from_hook(node_hooks, producer.index);
        FAN_TRY(give(p, edge, &gradients[producer.index], &producer, err));
        if (!p->workers)
            fan__dependency_done(p, edge->to);
    }
    w->delivered = p->workers && !FAN_FAULT(COUNT_BEFORE_ADD);
    return FAN_OK;
}

fan_status fan__step_deliver(fan_task_worker *w, void **gradients, const void *node_hooks, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_task_node *v = &p->nodes[w->now];
    fan_run_streams on = fan_task_run_streams(p, v->node);
    fan_status status = FAN_OK;
    fan__queue_ran(w);
    if (!p->config.keep_graph) {
        v->node->freed_by = v->node->freed_by ? v->node->freed_by : p->id;
        status = p->config.frontend->release(v->node, err);
    }
    if (on.own && status == FAN_OK && !gives(p, v, gradients))
        status = fan_task_produced_nothing(p, &on, err);
    if (status == FAN_OK)
        status = give_all(w, &on, gradients, node_hooks, err);
    fan__drop_all(p, gradients, v->nedges);
    return status;
}

/* ---- a node ---- */

/* capture: what is wanted of a node's slots is kept for the caller (E8, S20). */
static fan_status capture(fan_backward *p, const fan_task_node *v, void **sums, fan_error *err)
{
    fan_run_streams on = fan_task_run_streams(p, v->node);
    for (uint32_t i = 0; i < v->node->inputs; i++) {
        if (p->slots[v->slots + i].wanted)
            FAN_TRY(fan_task_keep(p, sums[i], &on, err));
        for (uint32_t w = p->slots[v->slots + i].wanted; w; w = p->same[w - 1])
            if ((p->results[w - 1] = sums[i]))
                p->config.frontend->hold(sums[i]);
    }
    return FAN_OK;
}

/* order: what waits for the sums of a node, beside itself: K1; S20 of one that gives to nobody, where nothing but its
 * sums says which streams it uses. */
static fan_status order(fan_backward *p, const fan_task_node *v, void **sums, fan_error *err)
{
    fan_run_streams on = fan_task_run_streams(p, v->node);
    FAN_TRY(fan_task_join_capture(p, &on, err));
    for (uint32_t i = 0; !on.own && !v->nedges && v->runs && !v->node->ops->leaf && i < v->node->inputs; i++)
        FAN_TRY(fan_task_keep(p, sums[i], &on, err));
    return FAN_OK;
}

static fan_status hooks(fan_backward *p, const fan_task_node *v, void **sums, void **node_hooks, fan_error *err)
{
    fan_streams_outer outer;
    if (!FAN_FAULT(HOOK_ON_CALLER))
        return p->config.frontend->hooks(v->node, sums, node_hooks, err);
    fan_streams_enter(p->streams.caller, &outer);
    fan_status status = p->config.frontend->hooks(v->node, sums, node_hooks, err);
    fan_streams_leave(&outer);
    return status;
}

fan_status fan__step_sums(fan_task_worker *w, void **sums, void **node_hooks, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_engine_frontend *f = p->config.frontend;
    fan_task_node *v = &p->nodes[w->now];
    fan_status status = FAN_OK;
    void *buffer;
    for (uint32_t i = 0; i < v->node->inputs; i++) {
        sums[i] = p->slots[v->slots + i].forwarded;
        p->slots[v->slots + i].forwarded = NULL;
    }
    buffer = atomic_load_explicit(&v->buffer, memory_order_relaxed); /* all is there: the count says so */
    for (uint32_t i = 0; buffer && i < v->node->inputs && status == FAN_OK; i++)
        if (!sums[i] && p->slots[v->slots + i].producers) {
            status = f->take(v->node, buffer, i, &sums[i], err);
            if (status == FAN_OK && sums[i] && p->config.detect)
                status = fan__explain_sum(w, i, buffer, err);
        }
    if (buffer) {
        atomic_store_explicit(&v->buffer, NULL, memory_order_relaxed);
        f->buffer_free(buffer);
        if (status == FAN_OK)
            status = order(p, v, sums, err);
    }
    if (status == FAN_OK)
        status = hooks(p, v, sums, node_hooks, err);
    if (status == FAN_OK && v->captured)
        status = capture(p, v, sums, err);
    return status;
}

/* accumulate: L, and S20: before and behind it. */
static fan_status accumulate(fan_backward *p, fan_node *leaf, void **sum, void *node_hooks, fan_error *err)
{
    fan_run_streams where = fan_task_run_streams(p, leaf);
    fan_stream *on;
    fan_status status = fan_task_leaf_begin(p, *sum, &where, &on, err);
    if (status == FAN_OK)
        status = p->config.frontend->accumulate(&p->config, leaf, sum, node_hooks, err);
    if (status == FAN_OK)
        status = fan_task_leaf_end(p, leaf, on, err);
    fan_stream_drop(on);
    return status;
}

/* L1: where something has come. */
static fan_status end_here(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_task_node *v = &p->nodes[w->now];
    void *on_stack[FAN_SUMS_ON_STACK] = {NULL}, **sums = on_stack, *node_hooks = NULL;
    fan_status status;
    if (v->node->inputs > FAN_SUMS_ON_STACK && !(sums = fan_calloc(v->node->inputs * sizeof *sums)))
        return no_memory(err);
    status = fan__step_sums(w, sums, &node_hooks, err);
    if (status == FAN_OK && v->runs && sums[0])
        status = accumulate(p, v->node, &sums[0], node_hooks, err);
    fan__drop_all(p, sums, v->node->inputs);
    fan__drop_all(p, &node_hooks, 1);
    if (sums != on_stack)
        fan_free(sums);
    if (status == FAN_OK)
        fan__queue_ran(w);
    return status;
}

static fan_status run_here(fan_task_worker *w, fan_error *err)
{
    const fan_backward *p = w->pass;
    const fan_task_node *v = &p->nodes[w->now];
    FAN_RAW void *on_stack[2 * FAN_SUMS_ON_STACK];
    void **sums = on_stack, **gradients, *node_hooks = NULL;
    size_t n = v->node->inputs, all = n + v->nedges;
    fan_task_running here;
    fan_status status;
    if (all > 2 * FAN_SUMS_ON_STACK && !(sums = fan_alloc(all * sizeof *sums)))
        return no_memory(err);
    for (size_t i = 0; i < all; i++)
        sums[i] = NULL;
    gradients = sums + n;
    fan__task_running_begin(&here, w, w->thread);
    status = fan__step_sums(w, sums, &node_hooks, err);
    if (status == FAN_OK)
        status = p->config.frontend->run(v->node, sums, node_hooks, gradients, v->nedges, err);
    fan__task_running_end(&here);
    fan__drop_all(p, sums, n);
    if (status == FAN_OK)
        status = fan__step_deliver(w, gradients, node_hooks, err);
    else
        fan__drop_all(p, gradients, v->nedges);
    fan__drop_all(p, &node_hooks, 1);
    if (sums != on_stack)
        fan_free(sums);
    return status;
}

/* on_its_streams: E4. */
static fan_status on_its_streams(fan_task_worker *w, fan_status (*call)(fan_task_worker *w, fan_error *err),
                                 fan_error *err)
{
    fan_streams_outer outer;
    fan_streams_enter(fan_task_run_streams(w->pass, w->pass->nodes[w->now].node).set, &outer);
    fan_status status = call(w, err);
    fan_streams_leave(&outer);
    return status;
}

/* recorded: E18. */
static fan_status recorded(fan_task_worker *w, fan_status (*call)(fan_task_worker *w, fan_error *err), fan_error *err)
{
    fan_task_timeline t;
    fan__timeline_begin(&t, w);
    fan_status status = on_its_streams(w, call, err);
    fan__timeline_end(&t, w);
    return status;
}

fan_status fan__step(fan_task_worker *w, fan_error *err)
{
    if (fan__traced())
        return recorded(w, run_here, err);
    return fan_streams_in_use() ? on_its_streams(w, run_here, err) : run_here(w, err);
}

fan_status fan__step_end(fan_task_worker *w, fan_error *err)
{
    if (fan__traced())
        return recorded(w, end_here, err);
    return fan_streams_in_use() ? on_its_streams(w, end_here, err) : end_here(w, err);
}
