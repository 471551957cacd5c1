/* A gradient's way, from the node that made it to the one that gets it:
 *
 *   hand_over   one producer, and it is what the slot takes: kept as it is; else into the node's buffer, by its key
 *   arrived     then, and not before, one gradient less is due (E1); with the last one the node is ready
 *   sums        what was handed over, or a take of the buffer; hooks of the slots; captured (E8)
 *   step        the function and its other hooks; release (E10); its gradients go on
 */
#include "engine/step.h"

#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "engine/crew.h"
#include "engine/explain.h"
#include "engine/queue.h"
#include "engine/streams.h"
#include "engine/timeline.h"

static fan_status no_memory(fan_error *err) { return fan_fail(err, FAN_ERR_NOMEM, "out of memory"); }

/* ---- who runs ---- */

static fan_running *running; /* of all threads, the newest first (node.h, One thread at a time) */

void fan__running_begin(fan_running *r, const fan_worker *w, uint64_t thread)
{
    *r = (fan_running){w->pass, w->now, thread, running};
    running = r;
}

void fan__running_end(fan_running *r)
{
    for (fan_running **at = &running; *at; at = &(*at)->outer)
        if (*at == r) {
            *at = r->outer;
            return;
        }
}

bool fan_backward_needs(const fan_node *n, uint32_t edge)
{
    uint64_t thread = fan_thread_id();
    const fan_running *in = NULL;
    for (const fan_running *r = running; r && !(in && in->thread); r = r->outer) {
        const fan_visit *v = &r->pass->visits[r->at];
        if (v->node == n && edge < v->nedges && (r->thread == thread || (!r->thread && !in)))
            in = r;
    }
    if (in)
        return in->pass->edges[in->pass->visits[in->at].edges + edge].to != FAN_NOWHERE;
    return edge < n->nedges && n->edges[edge].next;
}

/* ---- a gradient goes on ---- */

/* buffer_of: makes the node's buffer, if nobody has: two workers may both find none. */
static fan_status buffer_of(fan_backward *p, fan_visit *to, fan_stream *on, void *gradient, fan_error *err)
{
    void *made = NULL, *other;
    if (p->crew && fan_watched())
        fan_touch_thing(FAN_THING_LOCKED, p->crew->lock.id, FAN_TOUCH_READS);
    if (atomic_load_explicit(&to->buffer, memory_order_acquire))
        return FAN_OK;
    FAN_TRY(p->config.frontend->buffer_new(&p->config, to->node, on, gradient, &made, err));
    fan__pass_lock(p);
    other = FAN_FAULT(BUFFER_TWICE) ? NULL : atomic_load_explicit(&to->buffer, memory_order_relaxed);
    if (!other)
        atomic_store_explicit(&to->buffer, made, memory_order_release);
    fan__pass_unlock(p);
    if (other)
        p->config.frontend->buffer_free(made);
    return FAN_OK;
}

/* add: into the buffer of the edge's node. */
static fan_status add(fan_backward *p, const fan_visit_edge *edge, void *gradient, fan_giver *giver, fan_error *err)
{
    fan_visit *to = &p->visits[edge->to];
    fan_on there = fan_pass_on(p, to->node);
    giver->to = there.set;
    FAN_TRY(buffer_of(p, to, FAN_FAULT(SUM_FOR_PRODUCER) ? giver->stream : there.own, gradient, err));
    return p->config.frontend->add(to->buffer, edge->slot, FAN_FAULT(KEY_BY_ARRIVAL) ? p->arrivals++ : edge->key,
                                   gradient, giver, err);
}

static fan_status give(fan_backward *p, fan_visit_edge *edge, void **gradient, fan_giver *giver, fan_error *err)
{
    const fan_visit *to = &p->visits[edge->to];
    fan_visit_slot *s = &p->slots[to->slots + edge->slot];
    edge->defined = *gradient != NULL;
    edge->hook = giver->hook;
    if (s->producers == 1 && !p->config.detect &&
        (!*gradient || p->config.frontend->hand(to->node, edge->slot, *gradient))) {
        s->handed = *gradient;
        *gradient = NULL;
    } else {
        FAN_TRY(add(p, edge, *gradient, giver, err));
    }
    edge->arrived = true;
    if (fan__traced() && giver->node && edge->defined)
        fan__timeline_gave(p, edge->to, edge->slot, edge->key);
    return FAN_OK;
}

fan_status fan__give_one(fan_backward *p, fan_visit_edge *edge, void **gradient, fan_giver *giver, fan_error *err)
{
    if (edge->to == FAN_NOWHERE)
        return FAN_OK;
    FAN_TRY(give(p, edge, gradient, giver, err));
    fan__queue_arrived(p, edge->to);
    return FAN_OK;
}

/* gives: whether one of its gradients goes anywhere. */
static bool gives(const fan_backward *p, const fan_visit *v, void **gradients)
{
    for (uint32_t i = 0; i < v->nedges; i++)
        if (gradients[i] && p->edges[v->edges + i].to != FAN_NOWHERE)
            return true;
    return false;
}

/* give_all: to all whom the node's edges lead to. Of several workers, they arrive together (queue.h). */
static fan_status give_all(fan_worker *w, const fan_on *on, void **gradients, const void *node_hooks, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_visit *v = &p->visits[w->now];
    fan_giver giver = {.node = v->node, .stream = on->own};
    for (; giver.index < v->nedges; giver.index++) {
        fan_visit_edge *edge = &p->edges[v->edges + giver.index];
        if (edge->to == FAN_NOWHERE)
            continue;
        if (p->crew && FAN_FAULT(COUNT_BEFORE_ADD)) {
            fan__pass_lock(p);
            fan__queue_arrived(p, edge->to);
            fan__pass_unlock(p);
        }
        if (node_hooks)
            giver.hook = p->config.frontend->hooked(node_hooks, giver.index);
        FAN_TRY(give(p, edge, &gradients[giver.index], &giver, err));
        if (!p->crew)
            fan__queue_arrived(p, edge->to);
    }
    w->gave = p->crew && !FAN_FAULT(COUNT_BEFORE_ADD);
    return FAN_OK;
}

fan_status fan__step_give(fan_worker *w, void **gradients, const void *node_hooks, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_visit *v = &p->visits[w->now];
    fan_on on = fan_pass_on(p, v->node);
    fan_status status = FAN_OK;
    fan__queue_ran(w);
    if (!p->config.keep_graph) {
        v->node->freed_by = v->node->freed_by ? v->node->freed_by : p->id;
        status = p->config.frontend->release(v->node, err);
    }
    if (on.own && status == FAN_OK && !gives(p, v, gradients))
        status = fan_pass_gave_nothing(p, &on, err);
    if (status == FAN_OK)
        status = give_all(w, &on, gradients, node_hooks, err);
    fan__drop_all(p, gradients, v->nedges);
    return status;
}

/* ---- a node ---- */

/* capture: what is wanted of a node's slots is kept for the caller (E8, S20). */
static fan_status capture(fan_backward *p, const fan_visit *v, void **sums, fan_error *err)
{
    fan_on on = fan_pass_on(p, v->node);
    for (uint32_t i = 0; i < v->node->inputs; i++) {
        if (p->slots[v->slots + i].wanted)
            FAN_TRY(fan_pass_keeps(p, sums[i], &on, err));
        for (uint32_t w = p->slots[v->slots + i].wanted; w; w = p->same[w - 1])
            if ((p->results[w - 1] = sums[i]))
                p->config.frontend->hold(sums[i]);
    }
    return FAN_OK;
}

/* order: what waits for the sums of a node, beside itself: K1; S20 of one that gives to nobody, where nothing but its
 * sums says which streams it uses. */
static fan_status order(fan_backward *p, const fan_visit *v, void **sums, fan_error *err)
{
    fan_on on = fan_pass_on(p, v->node);
    FAN_TRY(fan_pass_pull_in(p, &on, err));
    for (uint32_t i = 0; !on.own && !v->nedges && v->runs && !v->node->kind->leaf && i < v->node->inputs; i++)
        FAN_TRY(fan_pass_keeps(p, sums[i], &on, err));
    return FAN_OK;
}

static fan_status hooks(fan_backward *p, const fan_visit *v, void **sums, void **node_hooks, fan_error *err)
{
    fan_streams_outer outer;
    if (!FAN_FAULT(HOOK_ON_CALLER))
        return p->config.frontend->hooks(v->node, sums, node_hooks, err);
    fan_streams_enter(p->streams.caller, &outer);
    fan_status status = p->config.frontend->hooks(v->node, sums, node_hooks, err);
    fan_streams_leave(&outer);
    return status;
}

fan_status fan__step_sums(fan_worker *w, void **sums, void **node_hooks, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_engine_frontend *f = p->config.frontend;
    fan_visit *v = &p->visits[w->now];
    fan_status status = FAN_OK;
    void *buffer;
    for (uint32_t i = 0; i < v->node->inputs; i++) {
        sums[i] = p->slots[v->slots + i].handed;
        p->slots[v->slots + i].handed = NULL;
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
    fan_on where = fan_pass_on(p, leaf);
    fan_stream *on;
    fan_status status = fan_pass_leaf_begin(p, *sum, &where, &on, err);
    if (status == FAN_OK)
        status = p->config.frontend->accumulate(&p->config, leaf, sum, node_hooks, err);
    if (status == FAN_OK)
        status = fan_pass_leaf_end(p, leaf, on, err);
    fan_stream_drop(on);
    return status;
}

/* L1: where something has come. */
static fan_status end_here(fan_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_visit *v = &p->visits[w->now];
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

static fan_status run_here(fan_worker *w, fan_error *err)
{
    const fan_backward *p = w->pass;
    const fan_visit *v = &p->visits[w->now];
    FAN_RAW void *on_stack[2 * FAN_SUMS_ON_STACK];
    void **sums = on_stack, **gradients, *node_hooks = NULL;
    size_t n = v->node->inputs, all = n + v->nedges;
    fan_running here;
    fan_status status;
    if (all > 2 * FAN_SUMS_ON_STACK && !(sums = fan_alloc(all * sizeof *sums)))
        return no_memory(err);
    for (size_t i = 0; i < all; i++)
        sums[i] = NULL;
    gradients = sums + n;
    fan__running_begin(&here, w, w->thread);
    status = fan__step_sums(w, sums, &node_hooks, err);
    if (status == FAN_OK)
        status = p->config.frontend->run(v->node, sums, node_hooks, gradients, v->nedges, err);
    fan__running_end(&here);
    fan__drop_all(p, sums, n);
    if (status == FAN_OK)
        status = fan__step_give(w, gradients, node_hooks, err);
    else
        fan__drop_all(p, gradients, v->nedges);
    fan__drop_all(p, &node_hooks, 1);
    if (sums != on_stack)
        fan_free(sums);
    return status;
}

/* on_its_streams: E4. */
static fan_status on_its_streams(fan_worker *w, fan_status (*call)(fan_worker *w, fan_error *err), fan_error *err)
{
    fan_streams_outer outer;
    fan_streams_enter(fan_pass_on(w->pass, w->pass->visits[w->now].node).set, &outer);
    fan_status status = call(w, err);
    fan_streams_leave(&outer);
    return status;
}

/* recorded: E18. */
static fan_status recorded(fan_worker *w, fan_status (*call)(fan_worker *w, fan_error *err), fan_error *err)
{
    fan_timeline t;
    fan__timeline_begin(&t, w);
    fan_status status = on_its_streams(w, call, err);
    fan__timeline_end(&t, w);
    return status;
}

fan_status fan__step(fan_worker *w, fan_error *err)
{
    if (fan__traced())
        return recorded(w, run_here, err);
    return fan_streams_in_use() ? on_its_streams(w, run_here, err) : run_here(w, err);
}

fan_status fan__step_end(fan_worker *w, fan_error *err)
{
    if (fan__traced())
        return recorded(w, end_here, err);
    return fan_streams_in_use() ? on_its_streams(w, end_here, err) : end_here(w, err);
}
