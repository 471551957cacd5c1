/* A pass, from bottom to top: a gradient is delivered, a node runs, a worker takes one node after
 * another, the pass begins and ends.
 *
 *   deliver     an only producer's gradient that matches the slot is kept as it is; others go into
 * the node's buffer by key. Then, and not before, the node has one dependency less (E1); after the
 * last it is ready sums        what was forwarded, or a take of the buffer; then the hooks of the
 * slots; captured sums (E8) run         the function with its other hooks; release (E10); its
 * gradients are
 * delivered */
#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "buffer/buffer.h"
#include "engine/workers.h"

#define DEPTH 1000 /* nested passes */

static _Thread_local unsigned depth;

/* drop_all: n holds; skips NULLs, leaves NULLs. */
static void drop_all(const fan_backward *p, void **objects, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (objects[i]) {
            void *object = objects[i];
            objects[i] = NULL;
            p->config.frontend->drop(object);
        }
}

/* ---- streams (E4, S20) ---- */

/* Title: Streams. On which streams does a pass run, and which streams wait at its end
 * (docs/rules.md)?
 *
 * The buffers do the other waits: a gradient is added with its producer's stream as P, a buffer has
 * its consumer's as C, so S4 to S19 order a take, or a single gradient that is handed through. This
 * is left for the pass:
 *
 *   the streams that are current while a node runs       those of where it was made; its own is the
 * first of them a leaf's first write in a pass                       its stream waits for the
 * caller's the end                                              the caller's stream of each device
 * waits for those of leaves, of nodes that delivered no gradient, and of captured inputs a pass
 * inside a capture                              any stream but the legacy default joins the capture
 * (K1); with redirection the caller's replaces that one (S7)
 *
 * A worked case. A leaf of stream w gets a gradient of a node on s; the caller is on c:
 *
 *   c  ==zero .grad==*1                      ^3 [step]     S20   c waits for w
 *   s      ==g==*2
 *   w              ^1^2 [.grad += g]*3                     S18   w waits for s, and before it
 * writes for c
 *
 * What can go wrong: a hook runs before the wait; a node made on the legacy stream runs on the
 * caller's; a failed pass ends without a wait, and the caller reads a `.grad` that is still being
 * written.
 *
 * A process that never made a stream current pays one load per
 * call. */

/* The streams of a node while it runs. Borrowed. */
typedef struct fan_run_streams {
    fan_stream_set *set; /* current; NULL: none is pushed */
    /* P of its gradients, C of its sums; NULL: the current stream of a gradient's device */
    fan_stream *own;
} fan_run_streams;

static fan_run_streams run_streams(const fan_backward *p, const fan_node *n)
{
    if (!fan_streams_in_use())
        return (fan_run_streams){NULL, NULL};
    fan_run_streams on = {n->streams, fan_node_stream(n)};
    if (!p->streams.captured || !fan_get_capture_redirect())
        return on;
    fan_stream *instead = on.own && on.own->handle == FAN_LEGACY
                              ? fan_stream_set_find(p->streams.caller, on.own->device)
                              : NULL;
    if (instead || !on.set)
        on = (fan_run_streams){p->streams.caller, instead};
    return on;
}

static void list_fini(fan_stream_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        fan_stream_drop(list->all[i]);
    fan_free(list->all);
}

static bool list_has(const fan_stream_list *list, const fan_stream *s)
{
    for (size_t i = 0; i < list->n; i++)
        if (list->all[i] == s)
            return true;
    return false;
}

/* list_add: unless the list has it. */
static fan_status list_add(fan_stream_list *list, fan_stream *s, fan_error *err)
{
    if (list_has(list, s))
        return FAN_OK;
    if (fan_grow((void **)&list->all, &list->cap, list->n + 1, sizeof(fan_stream *)) != 0)
        return fan__task_no_memory(err);
    list->all[list->n++] = fan_stream_hold(s);
    return FAN_OK;
}

/* tail_of: that of a stream of the caller's; NULL when out of memory. */
static fan_task_tail *tail_of(fan_backward *p, fan_stream *caller)
{
    fan_task_streams *s = &p->streams;
    for (size_t i = 0; i < s->n; i++)
        if (s->tails[i].caller == caller)
            return &s->tails[i];
    if (fan_grow((void **)&s->tails, &s->cap, s->n + 1, sizeof *s->tails) != 0)
        return NULL;
    s->tails[s->n] = (fan_task_tail){.caller = fan_stream_hold(caller)};
    return &s->tails[s->n++];
}

/* place_for_caller: a gradient's value, and the caller's stream on its device; called with other
 * streams current. */
static fan_status place_for_caller(const fan_backward *p, void *gradient, fan_value *v,
                                   fan_stream **caller, fan_error *err)
{
    fan_streams_outer outer;
    fan_streams_enter(p->streams.caller, &outer);
    fan_status status = p->config.frontend->place(gradient, v, caller, err);
    fan_streams_leave(&outer);
    return status;
}

static fan_status wait_for(fan_stream *s, fan_stream *other, fan_error *err)
{
    fan_event *e = NULL;
    FAN_TRY(fan_event_record(other, &e, err));
    fan_status status = fan_stream_wait(s, e, NULL, err);
    fan_event_drop(e);
    return status;
}

/* tail_add: at the end the caller's stream waits for `on`. */
static fan_status tail_add(fan_backward *p, fan_stream *caller, fan_stream *on, fan_error *err)
{
    fan_task_tail *t = tail_of(p, caller);
    return t ? list_add(&t->streams, on, err) : fan__task_no_memory(err);
}

/* leaf_begin: before a leaf accumulates `sum`: *on: a hold on the stream that writes; NULL: on the
 * CPU. It waits for the caller's, once in a pass, and is listed after the wait, since another
 * worker may be here too. */
static fan_status leaf_begin(fan_backward *p, void *sum, const fan_run_streams *where,
                             fan_stream **on, fan_error *err)
{
    fan_stream *current = NULL, *caller = NULL;
    fan_value v, same;
    *on = NULL;
    FAN_TRY(p->config.frontend->place(sum, &v, &current, err));
    if (!current)
        return FAN_OK;
    *on = fan_stream_hold(where->own ? where->own : current);
    fan_status status = place_for_caller(p, sum, &same, &caller, err);
    if (status == FAN_OK) {
        status = tail_add(p, caller, *on, err);
        if (status == FAN_OK && caller != *on && !FAN_FAULT(LEAF_WITHOUT_WAIT) &&
            !list_has(&tail_of(p, caller)->waited, *on)) {
            status = wait_for(*on, caller, err);
            if (status == FAN_OK)
                status = list_add(&tail_of(p, caller)->waited, *on, err);
        }
        p->config.frontend->place_drop(&same);
        fan_stream_drop(caller);
    }
    p->config.frontend->place_drop(&v);
    fan_stream_drop(current);
    return status;
}

/* keep: at the end the caller's stream waits for `on` (NULL: the one that is current now), which
 * makes the gradient (NULL: none), and uses it from then on. */
static fan_status keep(fan_backward *p, void *gradient, fan_stream *on, fan_error *err)
{
    fan_stream *current = NULL, *caller = NULL;
    fan_value v, same;
    if (!gradient)
        return FAN_OK;
    FAN_TRY(p->config.frontend->place(gradient, &same, &current, err));
    if (!current)
        return FAN_OK;
    fan_status status = place_for_caller(p, gradient, &v, &caller, err);
    if (status == FAN_OK) {
        status = tail_add(p, caller, on ? on : current, err);
        fan_task_tail *t = status == FAN_OK ? tail_of(p, caller) : NULL;
        if (t && fan_grow((void **)&t->values, &t->cap, t->nvalues + 1, sizeof *t->values) != 0)
            status = fan__task_no_memory(err);
        if (status == FAN_OK)
            t->values[t->nvalues++] = v;
        else
            p->config.frontend->place_drop(&v);
        fan_stream_drop(caller);
    }
    p->config.frontend->place_drop(&same);
    fan_stream_drop(current);
    return status;
}

/* keep_stream: the same for a node that delivered no gradient. */
static fan_status keep_stream(fan_backward *p, fan_stream *on, fan_error *err)
{
    fan_streams_outer outer;
    fan_streams_enter(p->streams.caller, &outer);
    fan_stream *caller = fan_stream_current(on->device);
    fan_streams_leave(&outer);
    if (!caller)
        return fan__task_no_memory(err);
    fan_status status = tail_add(p, caller, on, err);
    fan_stream_drop(caller);
    return status;
}

static fan_status end_tails(fan_backward *p, fan_error *err)
{
    fan_status status = FAN_OK, one;
    for (size_t i = 0; i < p->streams.n; i++) {
        const fan_task_tail *t = &p->streams.tails[i];
        if (FAN_FAULT(END_WITHOUT_WAIT))
            continue;
        one = fan_pass_end(t->caller, t->streams.all, t->streams.n, t->values, t->nvalues,
                           status == FAN_OK ? err : NULL);
        status = status == FAN_OK ? one : status;
    }
    while (p->streams.n > 0) {
        fan_task_tail *t = &p->streams.tails[--p->streams.n];
        list_fini(&t->streams);
        list_fini(&t->waited);
        for (size_t i = 0; i < t->nvalues; i++)
            p->config.frontend->place_drop(&t->values[i]);
        fan_stream_drop(t->caller);
        fan_free(t->values);
    }
    return status;
}

fan_status fan_backward_join(fan_backward *p, fan_error *err)
{
    FAN_TRY(end_tails(p, err));
    list_fini(&p->streams.pulled); /* the tails have waited for all of them */
    p->streams.pulled = (fan_stream_list){0};
    return FAN_OK;
}

/* join_capture: K1, before a node runs. */
static fan_status join_capture(fan_backward *p, fan_stream *on, fan_error *err)
{
    uint64_t id;
    if (!p->streams.captured || !on || on->handle == FAN_LEGACY ||
        on->device->backend != p->streams.captured->device->backend)
        return FAN_OK;
    FAN_TRY(list_add(&p->streams.pulled, on, err));
    FAN_TRY(fan_stream_capture(on, &id, err));
    return id ? FAN_OK : wait_for(on, p->streams.captured, err);
}

/* ---- traces (E18) ---- */

static inline bool is_traced(void)
{
    return atomic_load_explicit(&fan_traces, memory_order_relaxed) != 0;
}

/* timeline_begin: what this thread records from now on belongs to the worker's node. */
static void timeline_begin(fan_task_timeline *t, const fan_task_worker *w)
{
    const fan_trace_work work = {w->pass->id, w->pass->nodes[w->now].node->number, w->number};
    *t = (fan_task_timeline){
        .thread = fan_thread_id(), .begin_ns = fan_trace_ns(), .outer = fan_trace_work_begin(work)};
}

/* timeline_end: writes the node's line; on any thread. */
static void timeline_end(fan_task_timeline *t, const fan_task_worker *w)
{
    const uint64_t begin_ns = t->begin_ns;
    if (begin_ns == 0)
        return;
    t->begin_ns = 0;
    if (w->now != FAN_NOWHERE) {
        const fan_node *n = w->pass->nodes[w->now].node;
        const fan_stream *own = run_streams(w->pass, n).own;
        fan_trace_line line = {.kind = FAN_TRACE_NODE,
                               .device = own ? (int16_t)own->device->index : -1,
                               .slot = -1,
                               .key = -1,
                               .stream = own ? own->handle : 0,
                               .begin_ns = begin_ns,
                               .start_us = -1,
                               .end_us = -1};
        n->ops->text(n, line.label, sizeof line.label);
        fan_trace_put(&line);
    }
    if (t->thread == fan_thread_id())
        (void)fan_trace_work_begin(t->outer);
}

/* ---- running nodes ---- */

/* of all threads, the newest first (node.h, One thread at a time) */
static fan_task_running *running;

static void running_begin(fan_task_running *r, const fan_task_worker *w, uint64_t thread)
{
    *r = (fan_task_running){w->pass, w->now, thread, running};
    running = r;
}

static void running_end(fan_task_running *r)
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
        const fan_task_node *tn = &r->pass->nodes[r->at];
        if (tn->node == n && edge < tn->nedges && (r->thread == thread || (!r->thread && !in)))
            in = r;
    }
    if (in)
        return in->pass->edges[in->pass->nodes[in->at].edges + edge].to != FAN_NOWHERE;
    return edge < n->nedges && n->edges[edge].next;
}

/* ---- a gradient is delivered ---- */

static void dependency_done(fan_backward *p, uint32_t at)
{
    if (!fan__dependency_done(&p->nodes[at]))
        return;
    if (p->workers)
        fan__task_workers_push(p, at);
    else
        fan__queue_push(&p->queue, p->nodes, at);
}

/* make_buffer: unless the node has one. Two workers may both make one; the second drops its own.
 * The acquire without the lock pairs with the release of the worker that made it. */
static fan_status make_buffer(fan_backward *p, fan_task_node *to, fan_stream *on, void *gradient,
                              fan_error *err)
{
    void *made = NULL, *other;
    if (p->workers && fan_sched_active())
        fan_sched_access(FAN_THING_LOCKED, p->workers->lock.id, FAN_SCHED_READ);
    if (atomic_load_explicit(&to->buffer, memory_order_acquire))
        return FAN_OK;
    FAN_TRY(p->config.frontend->buffer_new(&p->config, to->node, on, gradient, &made, err));
    fan__task_lock(p);
    other =
        FAN_FAULT(BUFFER_TWICE) ? NULL : atomic_load_explicit(&to->buffer, memory_order_relaxed);
    if (!other)
        atomic_store_explicit(&to->buffer, made, memory_order_release);
    fan__task_unlock(p);
    if (other)
        p->config.frontend->buffer_free(made);
    return FAN_OK;
}

/* deliver: along an edge that leads somewhere. The hold on *gradient stays the caller's, or is
 * taken and it is NULL. */
static fan_status deliver(fan_backward *p, fan_task_edge *edge, void **gradient,
                          fan_producer *producer, fan_error *err)
{
    fan_task_node *to = &p->nodes[edge->to];
    fan_task_slot *s = &p->slots[to->slots + edge->slot];
    edge->defined = *gradient != NULL;
    edge->from_hook = producer->from_hook;
    if (s->producers == 1 && !p->config.detect &&
        (!*gradient || p->config.frontend->can_forward(to->node, edge->slot, *gradient))) {
        s->forwarded = *gradient;
        *gradient = NULL;
    } else {
        fan_run_streams there = run_streams(p, to->node);
        producer->to = there.set;
        FAN_TRY(make_buffer(p, to, FAN_FAULT(SUM_FOR_PRODUCER) ? producer->stream : there.own,
                            *gradient, err));
        FAN_TRY(p->config.frontend->add(to->buffer, edge->slot,
                                        FAN_FAULT(KEY_BY_ARRIVAL) ? p->arrivals++ : edge->key,
                                        *gradient, producer, err));
    }
    edge->delivered = true;
    if (is_traced() && producer->node && edge->defined) {
        const fan_trace_line line = {.kind = FAN_TRACE_GRADIENT,
                                     .device = -1,
                                     .slot = (int32_t)edge->slot,
                                     .key = edge->key,
                                     .to = p->nodes[edge->to].node->number,
                                     .start_us = -1,
                                     .end_us = -1};
        fan_trace_put(&line);
    }
    return FAN_OK;
}

static void node_ran(fan_task_worker *w)
{
    w->pass->nodes[w->now].ran = true;
    if (w->pass->workers)
        w->ran = true; /* counted with the lock (workers.c) */
    else
        w->pass->ran++;
}

/* node_deliver: see fan_backward_give. */
static fan_status node_deliver(fan_task_worker *w, void **gradients, const void *node_hooks,
                               fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_task_node *tn = &p->nodes[w->now];
    fan_run_streams on = run_streams(p, tn->node);
    fan_status status = FAN_OK;
    node_ran(w);
    if (!p->config.keep_graph) {
        tn->node->freed_by = tn->node->freed_by ? tn->node->freed_by : p->id;
        status = p->config.frontend->release(tn->node, err);
    }
    bool delivers = !on.own;
    for (uint32_t i = 0; i < tn->nedges && !delivers; i++)
        delivers = gradients[i] && p->edges[tn->edges + i].to != FAN_NOWHERE;
    if (status == FAN_OK && !delivers)
        status = keep_stream(p, on.own, err);
    fan_producer producer = {.node = tn->node, .stream = on.own};
    for (; producer.index < tn->nedges && status == FAN_OK; producer.index++) {
        fan_task_edge *edge = &p->edges[tn->edges + producer.index];
        if (edge->to == FAN_NOWHERE)
            continue;
        if (p->workers && FAN_FAULT(COUNT_BEFORE_ADD)) {
            fan__task_lock(p);
            dependency_done(p, edge->to);
            fan__task_unlock(p);
        }
        if (node_hooks)
            producer.from_hook = p->config.frontend->is_from_hook(node_hooks, producer.index);
        status = deliver(p, edge, &gradients[producer.index], &producer, err);
        if (status == FAN_OK && !p->workers)
            dependency_done(p, edge->to);
    }
    /* Several workers count them together (workers.c). */
    w->delivered = status == FAN_OK && p->workers && !FAN_FAULT(COUNT_BEFORE_ADD);
    drop_all(p, gradients, tn->nedges);
    return status;
}

/* ---- a node's sums ---- */

/* node_sums: see fan_backward_sums. */
static fan_status node_sums(fan_task_worker *w, void **sums, void **node_hooks, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_engine_frontend *f = p->config.frontend;
    fan_task_node *tn = &p->nodes[w->now];
    fan_status status = FAN_OK;
    void *buffer;
    for (uint32_t i = 0; i < tn->node->inputs; i++) {
        sums[i] = p->slots[tn->slots + i].forwarded;
        p->slots[tn->slots + i].forwarded = NULL;
    }
    /* the lock that counted the dependencies */
    buffer = atomic_load_explicit(&tn->buffer, memory_order_relaxed);
    for (uint32_t i = 0; buffer && i < tn->node->inputs && status == FAN_OK; i++)
        if (!sums[i] && p->slots[tn->slots + i].producers) {
            status = f->take(tn->node, buffer, i, &sums[i], err);
            if (status == FAN_OK && sums[i] && p->config.detect)
                status = fan__explain_sum(w, i, buffer, err);
        }
    if (buffer) {
        atomic_store_explicit(&tn->buffer, NULL, memory_order_relaxed);
        f->buffer_free(buffer);
    }
    FAN_TRY(status);
    fan_run_streams on = run_streams(p, tn->node);
    /* K1; and S20 for a node without edges or a stream: its sums alone show which streams it
     * uses */
    if (buffer) {
        FAN_TRY(join_capture(p, on.own, err));
        for (uint32_t i = 0;
             !on.own && !tn->nedges && tn->runs && !tn->leaf && i < tn->node->inputs; i++)
            FAN_TRY(keep(p, sums[i], on.own, err));
    }
    fan_streams_outer outer;
    bool elsewhere = FAN_FAULT(HOOK_ON_CALLER);
    if (elsewhere)
        fan_streams_enter(p->streams.caller, &outer);
    status = f->hooks(tn->node, sums, node_hooks, err);
    if (elsewhere)
        fan_streams_leave(&outer);
    for (uint32_t i = 0; status == FAN_OK && tn->captured && i < tn->node->inputs; i++) {
        if (p->slots[tn->slots + i].wanted) /* kept for the caller (E8, S20) */
            FAN_TRY(keep(p, sums[i], on.own, err));
        for (uint32_t k = p->slots[tn->slots + i].wanted; k; k = p->same[k - 1])
            if ((p->results[k - 1] = sums[i]))
                f->hold(sums[i]);
    }
    return status;
}

/* ---- a leaf, a node ---- */

/* end_node: of a node that does not run: a leaf accumulates a defined sum (L1), wanted sums are
 * captured. */
static fan_status end_node(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_task_node *tn = &p->nodes[w->now];
    void *on_stack[FAN_SUMS_ON_STACK] = {NULL}, **sums = on_stack, *node_hooks = NULL;
    fan_status status;
    if (tn->node->inputs > FAN_SUMS_ON_STACK &&
        !(sums = fan_calloc(tn->node->inputs * sizeof *sums)))
        return fan__task_no_memory(err);
    status = node_sums(w, sums, &node_hooks, err);
    if (status == FAN_OK && tn->runs && sums[0]) { /* L, with S20 before and after it */
        fan_run_streams where = run_streams(p, tn->node);
        fan_stream *on;
        status = leaf_begin(p, sums[0], &where, &on, err);
        if (status == FAN_OK)
            status =
                p->config.frontend->accumulate(&p->config, tn->node, &sums[0], node_hooks, err);
        if (status == FAN_OK) {
            void *grad = on ? p->config.frontend->leaf_grad(tn->node) : NULL;
            status = keep(p, grad, on, err);
            drop_all(p, &grad, 1);
        }
        fan_stream_drop(on);
    }
    drop_all(p, sums, tn->node->inputs);
    drop_all(p, &node_hooks, 1);
    if (sums != on_stack)
        fan_free(sums);
    if (status == FAN_OK)
        node_ran(w);
    return status;
}

static fan_status run_node(fan_task_worker *w, fan_error *err)
{
    const fan_backward *p = w->pass;
    const fan_task_node *tn = &p->nodes[w->now];
    FAN_UNINITIALIZED void *on_stack[2 * FAN_SUMS_ON_STACK];
    void **sums = on_stack, **gradients, *node_hooks = NULL;
    size_t n = tn->node->inputs, all = n + tn->nedges;
    fan_task_running here;
    fan_status status;
    if (all > 2 * FAN_SUMS_ON_STACK && !(sums = fan_alloc(all * sizeof *sums)))
        return fan__task_no_memory(err);
    for (size_t i = 0; i < all; i++)
        sums[i] = NULL;
    gradients = sums + n;
    running_begin(&here, w, w->thread);
    status = node_sums(w, sums, &node_hooks, err);
    if (status == FAN_OK)
        status = p->config.frontend->run(tn->node, sums, node_hooks, gradients, tn->nedges, err);
    running_end(&here);
    drop_all(p, sums, n);
    if (status == FAN_OK)
        status = node_deliver(w, gradients, node_hooks, err);
    else
        drop_all(p, gradients, tn->nedges);
    drop_all(p, &node_hooks, 1);
    if (sums != on_stack)
        fan_free(sums);
    return status;
}

/* on_its_streams: run_node or end_node with the node's streams current (E4), in a span of the trace
 * if one is on. */
static fan_status on_its_streams(fan_task_worker *w,
                                 fan_status (*call)(fan_task_worker *w, fan_error *err),
                                 fan_error *err)
{
    fan_task_timeline t = {.begin_ns = 0};
    fan_streams_outer outer;
    if (is_traced())
        timeline_begin(&t, w);
    fan_streams_enter(run_streams(w->pass, w->pass->nodes[w->now].node).set, &outer);
    fan_status status = call(w, err);
    fan_streams_leave(&outer);
    timeline_end(&t, w);
    return status;
}

/* ---- a worker ---- */

/* Graphs of at least this many nodes prefetch the next ones while a node runs: their memory is far
 * away. */
#define FETCH_FROM 4096
#define AHEAD 4

/* next_of_one: on one thread: a ready leaf, else the first ready node, or the schedule's choice;
 * w->now FAN_NOWHERE: none is left. */
static fan_status next_of_one(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    size_t place;
    w->now = FAN_NOWHERE;
    if (p->config.progress)
        FAN_TRY(fan__task_progress(p, err));
    if (p->queue.leaves != FAN_NOWHERE) {
        w->now = fan__queue_pop_leaf(&p->queue, p->nodes);
        return FAN_OK;
    }
    FAN_TRY(p->config.frontend->check_signals(err));
    place = fan_ready_first(&p->queue.nodes, 0);
    if (place == FAN_READY_NONE)
        return p->ran == p->to_run ? FAN_OK : fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
    if (p->config.schedule)
        FAN_TRY(p->config.frontend->pick(p->config.schedule, p, &place, err));
    if (!FAN_FAULT(RUN_TWICE) || p->nodes[place].nedges || p->arrivals++)
        fan_ready_remove(&p->queue.nodes, place);
    w->now = (uint32_t)place;
    if (p->nnodes >= FETCH_FROM && place + 3 * AHEAD < p->nnodes) {
        const fan_task_node *tn = &p->nodes[place];
        const fan_node *const ahead[3] = {tn[AHEAD].node, tn[2 * AHEAD].node, tn[3 * AHEAD].node};
        p->config.frontend->fetch(ahead);
    }
    return FAN_OK;
}

/* next_node: ends leaves and captured nodes, up to the next node that runs; w->now FAN_NOWHERE:
 * none is left. */
static fan_status next_node(fan_task_worker *w, fan_error *err)
{
    const fan_backward *p = w->pass;
    for (;;) {
        FAN_TRY(p->workers ? fan__task_workers_next(w, err) : next_of_one(w, err));
        if (w->now == FAN_NOWHERE)
            return FAN_OK;
        if (p->nodes[w->now].runs && !p->nodes[w->now].leaf)
            break;
        FAN_TRY(is_traced() || fan_streams_in_use() ? on_its_streams(w, end_node, err)
                                                    : end_node(w, err));
    }
    const fan_node *n = p->nodes[w->now].node;
    /* by another pass, since this one began */
    return n->freed_by ? fan_node_freed(n, err) : FAN_OK;
}

/* run_nodes: until none is left. */
static fan_status run_nodes(fan_task_worker *w, fan_error *err)
{
    fan_status status;
    w->thread = fan_thread_id();
    do {
        status = next_node(w, err);
        if (status == FAN_OK && w->now != FAN_NOWHERE)
            status = is_traced() || fan_streams_in_use() ? on_its_streams(w, run_node, err)
                                                         : run_node(w, err);
    } while (status == FAN_OK && w->now != FAN_NOWHERE);
    return status;
}

/* help: a helper's part, on its thread. */
static void help(void *helper)
{
    fan_task_helper *h = helper;
    const fan_backward *p = h->worker.pass;
    fan_task_workers *ws = p->workers;
    fan_leaf_work_for(&ws->caller);
    if (p->config.frontend->worker_enter(h->around)) {
        fan_error err;
        fan_status status;
        err.text[0] = '\0';
        depth = p->depth;
        status = run_nodes(&h->worker, &err);
        if (status != FAN_OK)
            fan__task_workers_failed(&h->worker, status, &err);
        if (ws->forked)
            p->config.frontend->orphaned(ws->error);
        depth = 0;
        p->config.frontend->worker_leave(h->around);
    }
    fan__task_workers_lock(ws);
    h->state = FAN_HELPER_GONE;
    ws->inside--;
    fan_cond_broadcast(&ws->changed);
    fan_mutex_unlock(&ws->lock); /* from here on the pass may be freed */
    fan_leaf_work_for(NULL);
}

/* ---- begin and end ---- */

fan_status fan_backward_begin(const fan_backward_config *config, fan_backward **out, fan_error *err)
{
    const fan_engine_frontend *f = config->frontend;
    fan_backward *p = fan_calloc(sizeof *p);
    fan_status status = FAN_OK;
    *out = NULL;
    if (!p)
        return fan__task_no_memory(err);
    p->id = fan_mark_new();
    p->queue.leaves = p->queue.leaves_last = FAN_NOWHERE;
    p->caller = (fan_task_worker){.pass = p, .now = FAN_NOWHERE};
    p->config = *config;
    if (config->schedule)
        f->hold(config->schedule);
    if (config->progress)
        f->hold(config->progress);
    p->config.nroots = p->config.nwanted = 0;
    p->config.roots = fan_alloc(config->nroots * sizeof *config->roots);
    p->config.wanted = fan_alloc(config->nwanted * sizeof *config->wanted);
    if (!p->config.roots || !p->config.wanted)
        FAN_GO(fan__task_no_memory(err));
    for (size_t i = 0; i < config->nroots; i++) {
        fan_root *r = &p->config.roots[p->config.nroots++];
        *r = config->roots[i];
        r->node->ops->hold(r->node);
        if (r->gradient)
            f->hold(r->gradient);
    }
    for (size_t i = 0; i < config->nwanted; i++) {
        p->config.wanted[p->config.nwanted++] = config->wanted[i];
        config->wanted[i].node->ops->hold(config->wanted[i].node);
    }
    fan_task_streams *s = &p->streams;
    uint64_t id = 0;
    FAN_GO(fan_stream_set_now(&s->caller, err));
    for (size_t i = 0; s->caller && i < s->caller->n && !id; i++) {
        FAN_GO(fan_stream_capture(s->caller->all[i], &id, err));
        s->captured = id ? s->caller->all[i] : NULL;
    }
    FAN_GO(fan__collect(p, err));
    if (config->workers > 1)
        FAN_GO(fan__task_workers_begin(p, help, err));
    *out = p;
done:
    if (status != FAN_OK)
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
        running_end(&p->running);
    timeline_end(&p->timeline, &p->caller);
    (void)end_tails(p, NULL);
    for (size_t i = 0; i < p->streams.pulled.n; i++) /* so that a capture of the caller's can end */
        if (p->streams.pulled.all[i] != p->streams.captured)
            (void)wait_for(p->streams.captured, p->streams.pulled.all[i], NULL);
    for (size_t i = 0; i < p->nslots; i++)
        drop_all(p, &p->slots[i].forwarded, 1);
    for (size_t i = 0; i < p->nnodes; i++)
        if (p->nodes[i].buffer)
            f->buffer_free(p->nodes[i].buffer);
    if (p->results)
        drop_all(p, p->results, p->config.nwanted);
    for (size_t i = 0; i < p->config.nroots; i++)
        drop_all(p, &p->config.roots[i].gradient, 1);
    for (size_t i = 0; i < p->config.nroots; i++)
        p->config.roots[i].node->ops->drop(p->config.roots[i].node);
    for (size_t i = 0; i < p->config.nwanted; i++)
        p->config.wanted[i].node->ops->drop(p->config.wanted[i].node);
    drop_all(p, &p->config.schedule, 1);
    drop_all(p, &p->config.progress, 1);
    if (p->workers)
        fan__task_workers_free(p);
    fan_ready_fini(&p->queue.nodes);
    fan_free(p->streams.tails);
    list_fini(&p->streams.pulled);
    fan_stream_set_drop(p->streams.caller);
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
        if (p->edges[i].to == FAN_NOWHERE) {
            drop_all(p, &r->gradient, 1);
            continue;
        }
        status = deliver(p, &p->edges[i], &r->gradient, &producer, err);
        if (status == FAN_OK) {
            dependency_done(p, p->edges[i].to);
            drop_all(p, &r->gradient, 1);
        }
    }
    fan_streams_leave(&outer);
    p->seeded = status == FAN_OK;
    return status;
}

bool fan_backward_depth(int by)
{
    depth += (unsigned)by;
    return depth <= DEPTH;
}

fan_status fan_backward_too_deep(fan_error *err)
{
    return fan_fail(
        err, FAN_ERR_STATE,
        "a pass inside a pass, %d deep: does a node start a pass of its own graph? (E7)", DEPTH);
}

fan_status fan_backward_run(fan_backward *p, fan_error *err)
{
    fan_status status;
    if (!fan_backward_depth(1)) {
        fan_backward_depth(-1);
        return fan_backward_too_deep(err);
    }
    p->depth = depth;
    status = run_nodes(&p->caller, err);
    if (p->workers) {
        if (status != FAN_OK)
            fan__task_workers_failed(&p->caller, status, err);
        status = fan__task_workers_end(p);
    }
    fan_backward_depth(-1);
    return status;
}

/* ---- walk ---- */

fan_status fan_backward_next(fan_backward *p, fan_node **out, fan_error *err)
{
    *out = NULL;
    FAN_TRY(next_node(&p->caller, err));
    if (p->caller.now != FAN_NOWHERE)
        *out = p->nodes[p->caller.now].node;
    return FAN_OK;
}

fan_status fan_backward_sums(fan_backward *p, void **sums, void **node_hooks, fan_error *err)
{
    if (is_traced())
        timeline_begin(&p->timeline, &p->caller);
    return node_sums(&p->caller, sums, node_hooks, err);
}

fan_status fan_backward_give(fan_backward *p, void **gradients, const void *node_hooks,
                             fan_error *err)
{
    if (p->is_running)
        running_end(&p->running);
    p->is_running = false;
    fan_status status = node_deliver(&p->caller, gradients, node_hooks, err);
    timeline_end(&p->timeline, &p->caller);
    return status;
}

void fan_backward_enter(const fan_backward *p, fan_streams_outer *outer)
{
    fan_streams_enter(run_streams(p, p->nodes[p->caller.now].node).set, outer);
}

void fan_backward_walk_runs(fan_backward *p, bool inside)
{
    if (p->is_running)
        running_end(&p->running);
    running_begin(&p->running, &p->caller, inside ? fan_thread_id() : 0);
    p->is_running = true;
}

/* ---- the state of a pass ---- */

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

uint32_t fan_backward_edges(const fan_backward *p)
{
    return p->nodes[p->caller.now].nedges;
}

const fan_node *fan_backward_at(const fan_backward *p, uint32_t *ran, uint32_t *all)
{
    *ran = p->ran;
    *all = p->to_run;
    return p->caller.now == FAN_NOWHERE ? NULL : p->nodes[p->caller.now].node;
}

bool fan_backward_seeded(const fan_backward *p)
{
    return p->seeded;
}

uint64_t fan_backward_id(const fan_backward *p)
{
    return p->id;
}

bool fan_backward_error_has_location(const fan_backward *p)
{
    return p->workers && p->workers->failed;
}

int fan_backward_visit(fan_backward *p, int (*object)(void *object, void *arg),
                       int (*node)(fan_node *n, void *arg), void *arg)
{
    int result = p->config.schedule ? object(p->config.schedule, arg) : 0;
    if (p->config.progress && !result)
        result = object(p->config.progress, arg);
    for (size_t i = 0; i < p->nslots && !result; i++)
        result = p->slots[i].forwarded ? object(p->slots[i].forwarded, arg) : 0;
    for (size_t i = 0; i < p->nnodes && !result; i++)
        result = p->nodes[i].buffer ? object(p->nodes[i].buffer, arg) : 0;
    for (size_t i = 0; p->results && i < p->config.nwanted && !result; i++)
        result = p->results[i] ? object(p->results[i], arg) : 0;
    for (size_t i = 0; i < p->config.nroots && !result; i++) {
        result = node(p->config.roots[i].node, arg);
        if (!result && p->config.roots[i].gradient)
            result = object(p->config.roots[i].gradient, arg);
    }
    for (size_t i = 0; i < p->config.nwanted && !result; i++)
        result = node(p->config.wanted[i].node, arg);
    return result;
}
