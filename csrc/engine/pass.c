/* A pass, from bottom to top: a gradient is delivered, a node runs, a worker takes one node after
 * another, the pass begins and ends.
 *
 *   deliver   keeps an only producer's gradient that matches the slot as it is, and adds others to
 *             the node's buffer by key; only then has the node one dependency less (E1). After the
 *             last one it is ready
 *   sums      reads what was forwarded, or takes from the buffer; runs the hooks of the slots;
 *             captures wanted sums (E8)
 *   run       calls the function with its other hooks; releases it (E10); delivers its gradients */
#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "buffer/buffer.h"
#include "buffer/digest.h"
#include "engine/workers.h"

#include <string.h>

#define DEPTH 1000 /* nested passes */

static _Thread_local unsigned depth;

/* drop_all: drops the holds among n pointers, and sets them to NULL. */
static void drop_all(const fan_pass *pass, void **objects, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        void *object = objects[i];
        if (!object)
            continue;
        objects[i] = NULL;
        pass->frontend->drop(object);
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
 *   the streams that are current while a node runs    those of where it was made; its own is the
 *                                                     first of them
 *   a leaf's first write in a pass                    its stream waits for the caller's
 *   the end                                           the caller's stream of each device waits for
 *                                                     those of leaves, of nodes that delivered no
 *                                                     gradient, and of captured inputs
 *   a pass inside a capture                           any stream but the legacy default joins the
 *                                                     capture (K1); with redirection the caller's
 *                                                     replaces that one (S7)
 *
 * A worked case. A leaf of stream w gets a gradient of a node on s; the caller is on c:
 *
 *   c  ==zero .grad==*1                      ^3 [step]     S20   c waits for w
 *   s      ==g==*2
 *   w              ^1^2 [.grad += g]*3                     S18   w waits for s, and before it
 *                                                                writes for c
 *
 * What can go wrong: a hook runs before the wait; a node made on the legacy stream runs on the
 * caller's; a failed pass ends without a wait, and the caller reads a `.grad` that is still being
 * written.
 *
 * A process that never made a stream current pays one load per call. */

/* The streams of a node while it runs. Borrowed. */
typedef struct fan_run_streams {
    fan_stream_set *set; /* current; NULL: none is pushed */
    /* P of its gradients, C of its sums; NULL: the current stream of a gradient's device */
    fan_stream *own;
} fan_run_streams;

static fan_run_streams run_streams(const fan_pass *pass, const fan_node *node)
{
    fan_run_streams on = {NULL, NULL};
    if (!fan_streams_in_use())
        return on;
    on.set = node->streams;
    on.own = fan_node_stream(node);
    if (!pass->streams.captured || !fan_get_capture_redirect())
        return on;

    fan_stream *instead = NULL;
    if (on.own && on.own->handle == FAN_LEGACY)
        instead = fan_stream_set_find(pass->streams.caller, on.own->device);
    if (instead || !on.set) {
        on.set = pass->streams.caller;
        on.own = instead;
    }
    return on;
}

static void stream_list_fini(fan_stream_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        fan_stream_drop(list->all[i]);
    fan_free(list->all);
}

static bool stream_list_has(const fan_stream_list *list, const fan_stream *stream)
{
    for (size_t i = 0; i < list->n; i++) {
        if (list->all[i] == stream)
            return true;
    }
    return false;
}

/* stream_list_add: adds the stream unless the list has it. */
static fan_status stream_list_add(fan_stream_list *list, fan_stream *stream, fan_error *err)
{
    if (stream_list_has(list, stream))
        return FAN_OK;
    if (fan_grow((void **)&list->all, &list->cap, list->n + 1, sizeof stream) != 0)
        return fan_fail_memory(err);
    list->all[list->n++] = fan_stream_hold(stream);
    return FAN_OK;
}

/* tail_of: returns the tail of a stream of the caller's, which it makes if needed.
 * NULL: out of memory. */
static fan_pass_tail *tail_of(fan_pass *pass, fan_stream *caller)
{
    fan_pass_streams *streams = &pass->streams;
    for (size_t i = 0; i < streams->n; i++) {
        if (streams->tails[i].caller == caller)
            return &streams->tails[i];
    }
    if (fan_grow((void **)&streams->tails, &streams->cap, streams->n + 1, sizeof(fan_pass_tail)) !=
        0)
        return NULL;
    fan_pass_tail *tail = &streams->tails[streams->n++];
    *tail = (fan_pass_tail){.caller = fan_stream_hold(caller)};
    return tail;
}

/* tail_add: lets the caller's stream wait for `on` at the end. */
static fan_status tail_add(fan_pass *pass, fan_stream *caller, fan_stream *on, fan_error *err)
{
    fan_pass_tail *tail = tail_of(pass, caller);
    if (!tail)
        return fan_fail_memory(err);
    return stream_list_add(&tail->streams, on, err);
}

/* stream_wait_for: lets `stream` wait for all that is queued on `other` now. */
static fan_status stream_wait_for(fan_stream *stream, fan_stream *other, fan_error *err)
{
    fan_event *event = NULL;
    FAN_TRY(fan_event_record(other, &event, err));
    fan_status status = fan_stream_wait(stream, event, NULL, err);
    fan_event_drop(event);
    return status;
}

/* leaf_wait: lets the leaf's stream wait for the caller's, once in a pass. The stream is listed
 * after its wait: another worker may be here, too. */
static fan_status leaf_wait(fan_pass *pass, fan_stream *caller, fan_stream *on, fan_error *err)
{
    if (caller == on || FAN_FAULT(LEAF_WITHOUT_WAIT))
        return FAN_OK;
    if (stream_list_has(&tail_of(pass, caller)->waited, on))
        return FAN_OK;
    FAN_TRY(stream_wait_for(on, caller, err));
    return stream_list_add(&tail_of(pass, caller)->waited, on, err);
}

/* tail_keep: takes the value's holds, except on failure. */
static fan_status tail_keep(fan_pass_tail *tail, const fan_value *value, fan_error *err)
{
    if (fan_grow((void **)&tail->values, &tail->cap, tail->nvalues + 1, sizeof *value) != 0)
        return fan_fail_memory(err);
    tail->values[tail->nvalues++] = *value;
    return FAN_OK;
}

/* order_for_caller: orders the stream that makes `object` (`own`, or the current one) and the
 * caller's: at the end the caller's waits for it, and uses the object from then on. `leaf`: the
 * object is a sum that a leaf accumulates: the leaf's stream waits for the caller's first, once in
 * a pass. *leaf: a hold on that stream; unchanged: the object is on the CPU. */
static fan_status order_for_caller(fan_pass *pass, void *object, fan_stream *own, fan_stream **leaf,
                                   fan_error *err)
{
    fan_streams_outer outer;
    fan_stream *current = NULL;
    fan_stream *caller = NULL;
    fan_value here;
    fan_value same;
    if (!object)
        return FAN_OK;
    FAN_TRY(pass->frontend->place(object, &here, &current, err));
    if (!current)
        return FAN_OK;
    fan_stream *on = current;
    if (own)
        on = own;
    if (leaf)
        *leaf = fan_stream_hold(on);
    fan_streams_enter(pass->streams.caller, &outer);
    fan_status status = pass->frontend->place(object, &same, &caller, err);
    fan_streams_leave(&outer);
    if (status == FAN_OK) {
        status = tail_add(pass, caller, on, err);
        if (status == FAN_OK && leaf)
            status = leaf_wait(pass, caller, on, err);
        if (status == FAN_OK && !leaf)
            status = tail_keep(tail_of(pass, caller), &same, err);
        if (status != FAN_OK || leaf)
            pass->frontend->place_drop(&same);
        fan_stream_drop(caller);
    }
    pass->frontend->place_drop(&here);
    fan_stream_drop(current);
    return status;
}

/* tail_add_producer: lets the caller's stream wait, at the end, for that of a node that delivered
 * no gradient. */
static fan_status tail_add_producer(fan_pass *pass, fan_stream *on, fan_error *err)
{
    fan_streams_outer outer;
    fan_streams_enter(pass->streams.caller, &outer);
    fan_stream *caller = fan_stream_current(on->device);
    fan_streams_leave(&outer);
    if (!caller)
        return fan_fail_memory(err);
    fan_status status = tail_add(pass, caller, on, err);
    fan_stream_drop(caller);
    return status;
}

/* end_tails: carries out the waits of all tails, and ends them. Returns the first error. */
static fan_status end_tails(fan_pass *pass, fan_error *err)
{
    fan_pass_streams *streams = &pass->streams;
    fan_status status = FAN_OK;
    for (size_t i = 0; i < streams->n; i++) {
        const fan_pass_tail *tail = &streams->tails[i];
        if (FAN_FAULT(END_WITHOUT_WAIT))
            continue;
        fan_error *first = NULL;
        if (status == FAN_OK)
            first = err;
        fan_status one = fan_stream_join(tail->caller, tail->streams.all, tail->streams.n,
                                         tail->values, tail->nvalues, first);
        if (status == FAN_OK)
            status = one;
    }
    while (streams->n > 0) {
        fan_pass_tail *tail = &streams->tails[--streams->n];
        stream_list_fini(&tail->streams);
        stream_list_fini(&tail->waited);
        for (size_t i = 0; i < tail->nvalues; i++)
            pass->frontend->place_drop(&tail->values[i]);
        fan_stream_drop(tail->caller);
        fan_free(tail->values);
    }
    return status;
}

fan_status fan_pass_join(fan_pass *pass, fan_error *err)
{
    FAN_TRY(end_tails(pass, err));
    stream_list_fini(&pass->streams.pulled); /* the tails have waited for all of them */
    pass->streams.pulled = (fan_stream_list){0};
    return FAN_OK;
}

/* join_capture: makes a node's stream part of the caller's capture (K1), before the node runs. */
static fan_status join_capture(fan_pass *pass, fan_stream *on, fan_error *err)
{
    fan_stream *captured = pass->streams.captured;
    uint64_t id;
    if (!captured || !on)
        return FAN_OK;
    if (on->handle == FAN_LEGACY || on->device->backend != captured->device->backend)
        return FAN_OK;
    FAN_TRY(stream_list_add(&pass->streams.pulled, on, err));
    FAN_TRY(fan_stream_capture(on, &id, err));
    if (id)
        return FAN_OK;
    return stream_wait_for(on, captured, err);
}

/* ---- traces (E18) ---- */

static inline bool is_traced(void)
{
    return atomic_load_explicit(&fan_traces, memory_order_relaxed) != 0;
}

/* has_digests: returns whether a trace of this thread wants digests (digest.c). */
static inline bool has_digests(void)
{
    return is_traced() && fan_trace_digests();
}

/* timeline_begin: lets all that this thread traces from now on belong to the worker's node. */
static void timeline_begin(fan_pass_timeline *timeline, const fan_pass_worker *worker)
{
    const fan_pass *pass = worker->pass;
    const fan_trace_work work = {pass->id, fan__worker_node(worker)->node->number, worker->number};
    timeline->thread = fan_thread_id();
    timeline->begin_ns = fan_trace_ns();
    timeline->outer = fan_trace_work_begin(work);
}

/* timeline_end: writes the node's line; on any thread. */
static void timeline_end(fan_pass_timeline *timeline, const fan_pass_worker *worker)
{
    const uint64_t begin_ns = timeline->begin_ns;
    if (begin_ns == 0)
        return;
    timeline->begin_ns = 0;
    if (worker->now != FAN_NOWHERE) {
        const fan_node *node = fan__worker_node(worker)->node;
        const fan_stream *own = run_streams(worker->pass, node).own;
        fan_trace_line line = {
            .kind = FAN_TRACE_NODE,
            .device = -1,
            .slot = -1,
            .key = -1,
            .begin_ns = begin_ns,
            .start_us = -1,
            .end_us = -1,
        };
        if (own) {
            line.device = (int16_t)own->device->index;
            line.stream = own->handle;
        }
        node->ops->text(node, line.label, sizeof line.label);
        line.in_place = node->ops->is_numbered && node->ops->is_numbered(node);
        fan_trace_put(&line);
    }
    if (timeline->thread == fan_thread_id())
        (void)fan_trace_work_begin(timeline->outer);
}

/* ---- running nodes ---- */

/* of all threads, the newest first (node.h, One thread at a time) */
static fan_pass_running *running;

static void running_begin(fan_pass_running *here, const fan_pass_worker *worker, uint64_t thread)
{
    here->pass = worker->pass;
    here->at = worker->now;
    here->thread = thread;
    here->outer = running;
    running = here;
}

static void running_end(fan_pass_running *here)
{
    for (fan_pass_running **at = &running; *at; at = &(*at)->outer) {
        if (*at == here) {
            *at = here->outer;
            return;
        }
    }
}

/* walk_end: marks the walk's node as not running. */
static void walk_end(fan_pass *pass)
{
    if (pass->is_running)
        running_end(&pass->running);
    pass->is_running = false;
}

/* find_running: returns the innermost pass in which this thread runs the node, else the latest walk
 * that waits for it.
 * NULL: there is none. */
static const fan_pass_running *find_running(const fan_node *node, uint32_t edge)
{
    uint64_t thread = fan_thread_id();
    const fan_pass_running *walk = NULL;
    for (const fan_pass_running *at = running; at; at = at->outer) {
        const fan_pass_node *entry = &at->pass->nodes[at->at];
        if (entry->node != node || edge >= entry->nedges)
            continue;
        if (at->thread == thread)
            return at;
        if (!at->thread && !walk)
            walk = at;
    }
    return walk;
}

bool fan_pass_needs(const fan_node *node, uint32_t edge)
{
    const fan_pass_running *found = find_running(node, edge);
    if (!found)
        return edge < node->nedges && node->edges[edge].next;
    const fan_pass *pass = found->pass;
    return pass->edges[pass->nodes[found->at].edges + edge].to != FAN_NOWHERE;
}

/* ---- a gradient is delivered ---- */

static void dependency_done(fan_pass *pass, uint32_t at)
{
    if (!fan__dependency_done(&pass->nodes[at]))
        return;
    if (pass->workers)
        fan__pass_workers_push(pass, at);
    else
        fan__queue_push(&pass->queue, pass->nodes, at);
}

/* make_buffer: makes a node's buffer, unless it has one. Two workers may both make one; the second
 * drops its own. The acquire without the lock pairs with the release of the worker that made it. */
static fan_status make_buffer(fan_pass *pass, fan_pass_node *to, fan_stream *on, void *gradient,
                              fan_error *err)
{
    void *made = NULL;
    void *other = NULL;
    if (pass->workers && fan_sched_active())
        fan_sched_access(FAN_THING_LOCKED, pass->workers->lock.id, FAN_SCHED_READ);
    if (atomic_load_explicit(&to->buffer, memory_order_acquire))
        return FAN_OK;
    FAN_TRY(pass->frontend->buffer_new(&pass->config, to->node, on, gradient, &made, err));

    fan__pass_lock(pass);
    if (!FAN_FAULT(BUFFER_TWICE))
        other = atomic_load_explicit(&to->buffer, memory_order_relaxed);
    if (!other)
        atomic_store_explicit(&to->buffer, made, memory_order_release);
    fan__pass_unlock(pass);
    if (other)
        pass->frontend->buffer_free(made);
    return FAN_OK;
}

/* deliver: delivers a gradient along an edge that leads somewhere. The hold on *gradient stays the
 * caller's, or is taken and set to NULL. */
static fan_status deliver(fan_pass *pass, fan_pass_edge *edge, void **gradient,
                          fan_producer *producer, fan_error *err)
{
    fan_pass_node *to = &pass->nodes[edge->to];
    fan_pass_slot *slot = &pass->slots[to->slots + edge->slot];
    bool forwards = slot->producers == 1 && !pass->config.detect;
    edge->defined = *gradient != NULL;
    edge->from_hook = producer->from_hook;
    FAN_UNINITIALIZED fan_trace_line line;
    bool traced = is_traced() && producer->node && edge->defined;
    if (traced) {
        line = (fan_trace_line){.kind = FAN_TRACE_GRADIENT};
        pass->frontend->memory(*gradient, &line);
    }
    if (has_digests())
        fan__digest_contribution(pass, edge, *gradient, producer);
    if (forwards && *gradient)
        forwards = pass->frontend->can_forward(to->node, edge->slot, *gradient);
    if (forwards) {
        slot->forwarded = *gradient;
        *gradient = NULL;
    } else {
        fan_run_streams there = run_streams(pass, to->node);
        uint32_t key = edge->key;
        producer->to = there.set;
        if (FAN_FAULT(SUM_FOR_PRODUCER))
            there.own = producer->stream;
        FAN_TRY(make_buffer(pass, to, there.own, *gradient, err));
        if (FAN_FAULT(KEY_BY_ARRIVAL))
            key = pass->arrivals++;
        FAN_TRY(pass->frontend->add(to->buffer, edge->slot, key, *gradient, producer, err));
    }
    edge->delivered = true;
    if (traced) {
        line.device = -1;
        line.slot = (int32_t)edge->slot;
        line.key = edge->key;
        line.to = to->node->number;
        line.start_us = -1;
        line.end_us = -1;
        fan_trace_put(&line);
    }
    return FAN_OK;
}

static void node_ran(fan_pass_worker *worker)
{
    fan_pass *pass = worker->pass;
    fan__worker_node(worker)->ran = true;
    if (pass->workers)
        worker->ran = true; /* counted with the lock (workers.c) */
    else
        pass->ran++;
}

/* node_deliver: see fan_pass_give. */
static fan_status node_deliver(fan_pass_worker *worker, void **gradients, const void *node_hooks,
                               fan_error *err)
{
    fan_pass *pass = worker->pass;
    const fan_pass_node *entry = fan__worker_node(worker);
    fan_pass_edge *edges = &pass->edges[entry->edges];
    fan_stream *on = run_streams(pass, entry->node).own;
    fan_status status = FAN_OK;
    node_ran(worker);
    if (!pass->config.keep_graph) {
        if (!entry->node->freed_by)
            entry->node->freed_by = pass->id;
        status = pass->frontend->release(entry->node, err);
    }

    /* A stream of a node that delivers none: no buffer waits for it. */
    bool delivers = !on;
    for (uint32_t i = 0; i < entry->nedges && !delivers; i++)
        delivers = gradients[i] && edges[i].to != FAN_NOWHERE;
    if (status == FAN_OK && !delivers)
        status = tail_add_producer(pass, on, err);

    fan_producer producer = {.node = entry->node, .stream = on};
    for (; producer.index < entry->nedges && status == FAN_OK; producer.index++) {
        fan_pass_edge *edge = &edges[producer.index];
        if (edge->to == FAN_NOWHERE)
            continue;
        if (pass->workers && FAN_FAULT(COUNT_BEFORE_ADD)) {
            fan__pass_lock(pass);
            dependency_done(pass, edge->to);
            fan__pass_unlock(pass);
        }
        if (node_hooks)
            producer.from_hook = pass->frontend->is_from_hook(node_hooks, producer.index);
        status = deliver(pass, edge, &gradients[producer.index], &producer, err);
        if (status == FAN_OK && !pass->workers)
            dependency_done(pass, edge->to);
    }

    /* Several workers count them together (workers.c). */
    worker->delivered = status == FAN_OK && pass->workers && !FAN_FAULT(COUNT_BEFORE_ADD);
    drop_all(pass, gradients, entry->nedges);
    return status;
}

/* ---- a node's sums ---- */

/* take_sums: takes the sums that were not forwarded. */
static fan_status take_sums(const fan_pass_worker *worker, void *buffer, void **sums,
                            fan_error *err)
{
    const fan_pass *pass = worker->pass;
    const fan_pass_node *entry = fan__worker_node(worker);
    for (uint32_t i = 0; i < entry->node->inputs; i++) {
        if (sums[i] || !pass->slots[entry->slots + i].producers)
            continue;
        FAN_TRY(pass->frontend->take(entry->node, buffer, i, &sums[i], err));
        if (sums[i] && pass->config.detect)
            FAN_TRY(fan__explain_sum(worker, i, buffer, err));
    }
    return FAN_OK;
}

/* digest_sums: writes the digests of all sums; `before`: those before the hooks, of which only one
 * that a hook replaced is written; NULL: the hooks have not run. */
static void digest_sums(const fan_pass_worker *worker, void *const *sums, void *const *before)
{
    const fan_pass *pass = worker->pass;
    const fan_pass_node *entry = fan__worker_node(worker);
    fan_stream *on = run_streams(pass, entry->node).own;
    for (uint32_t i = 0; i < entry->node->inputs; i++) {
        if (!pass->slots[entry->slots + i].producers)
            continue;
        if (!before)
            fan__digest_sum(pass, entry, FAN_DIGEST_SUM, i, sums[i], on, true);
        else if (before[i] != sums[i])
            fan__digest_sum(pass, entry, FAN_DIGEST_HOOKED, i, sums[i], on, false);
    }
}

/* run_slot_hooks: runs the hooks of the slots, between the digests of the sums before and after
 * them. No sum gets a further hold, which would make it read-only for a hook. */
static fan_status run_slot_hooks(fan_pass_worker *worker, void **sums, void **node_hooks,
                                 fan_error *err)
{
    const fan_pass *pass = worker->pass;
    fan_node *node = fan__worker_node(worker)->node;
    FAN_UNINITIALIZED void *on_stack[FAN_SUMS_ON_STACK];
    void **before = on_stack;
    size_t bytes = node->inputs * sizeof *before;
    if (!has_digests())
        return pass->frontend->hooks(node, sums, node_hooks, err);
    if (node->inputs > FAN_SUMS_ON_STACK) {
        before = fan_alloc(bytes);
        if (!before)
            return fan_fail_memory(err);
    }
    memcpy(before, sums, bytes);
    digest_sums(worker, sums, NULL);
    fan_status status = pass->frontend->hooks(node, sums, node_hooks, err);
    if (status == FAN_OK)
        digest_sums(worker, sums, before);
    if (before != on_stack)
        fan_free(before);
    return status;
}

/* node_sums: see fan_pass_sums. */
static fan_status node_sums(fan_pass_worker *worker, void **sums, void **node_hooks, fan_error *err)
{
    fan_pass *pass = worker->pass;
    fan_pass_node *entry = fan__worker_node(worker);
    fan_pass_slot *slots = &pass->slots[entry->slots];
    uint32_t inputs = entry->node->inputs;
    for (uint32_t i = 0; i < inputs; i++) {
        sums[i] = slots[i].forwarded;
        slots[i].forwarded = NULL;
        if (!sums[i] && pass->digests)
            pass->digests[entry->slots + i] = 0; /* that of a contribution, not of the sum */
    }

    /* The lock that counted the dependencies orders this load. */
    void *buffer = atomic_load_explicit(&entry->buffer, memory_order_relaxed);
    if (buffer) {
        fan_status status = take_sums(worker, buffer, sums, err);
        atomic_store_explicit(&entry->buffer, NULL, memory_order_relaxed);
        pass->frontend->buffer_free(buffer);
        FAN_TRY(status);
    }

    /* K1, and S20 for a node without edges or a stream: its sums alone show which streams it
     * uses. */
    fan_stream *on = run_streams(pass, entry->node).own;
    if (buffer)
        FAN_TRY(join_capture(pass, on, err));
    bool shows_streams = buffer && !on && !entry->nedges;
    shows_streams = shows_streams && entry->runs && !entry->leaf;
    for (uint32_t i = 0; shows_streams && i < inputs; i++)
        FAN_TRY(order_for_caller(pass, sums[i], on, NULL, err));

    fan_streams_outer outer;
    bool elsewhere = FAN_FAULT(HOOK_ON_CALLER);
    if (elsewhere)
        fan_streams_enter(pass->streams.caller, &outer);
    fan_status status = run_slot_hooks(worker, sums, node_hooks, err);
    if (elsewhere)
        fan_streams_leave(&outer);
    if (status != FAN_OK || !entry->captured)
        return status;

    /* The caller gets the wanted ones (E8, S20). */
    for (uint32_t i = 0; i < inputs; i++) {
        uint32_t wanted = slots[i].wanted;
        if (wanted)
            FAN_TRY(order_for_caller(pass, sums[i], on, NULL, err));
        for (; wanted; wanted = pass->same[wanted - 1]) {
            pass->results[wanted - 1] = sums[i];
            if (sums[i])
                pass->frontend->hold(sums[i]);
        }
    }
    return FAN_OK;
}

/* ---- a leaf, a node ---- */

/* digest_leaf: writes the digest of what the leaf has now. `sum`: what it accumulated. */
static void digest_leaf(fan_pass *pass, const fan_pass_node *entry, const void *sum, fan_stream *on)
{
    if (pass->frontend->leaf_is_diverted(entry->node))
        return;
    void *gradient = pass->frontend->leaf_grad(entry->node);
    bool changed = pass->config.weight.on || pass->frontend->slot_has_hooks(entry->node);
    bool known = gradient == sum && !changed;
    fan__digest_sum(pass, entry, FAN_DIGEST_LEAF, 0, gradient, on, known);
    drop_all(pass, &gradient, 1);
}

/* accumulate_leaf: accumulates the sum (L), with S20 before and after it. *sum may be taken. */
static fan_status accumulate_leaf(fan_pass *pass, const fan_pass_node *entry, void **sum,
                                  void *node_hooks, fan_error *err)
{
    fan_node *leaf = entry->node;
    const void *accumulated = *sum;
    fan_stream *on = NULL;
    fan_status status = order_for_caller(pass, *sum, run_streams(pass, leaf).own, &on, err);
    if (status == FAN_OK)
        status = pass->frontend->accumulate(&pass->config, leaf, sum, node_hooks, err);
    if (status == FAN_OK && has_digests())
        digest_leaf(pass, entry, accumulated, on);
    if (status == FAN_OK && on) {
        void *gradient = pass->frontend->leaf_grad(leaf);
        status = order_for_caller(pass, gradient, on, NULL, err);
        drop_all(pass, &gradient, 1);
    }
    fan_stream_drop(on);
    return status;
}

/* is_function: returns whether the worker's node is one whose function runs. */
static inline bool is_function(const fan_pass_worker *worker)
{
    const fan_pass_node *entry = fan__worker_node(worker);
    return entry->runs && !entry->leaf;
}

/* run_node: runs the function and delivers its gradients. Of a node that does not run: a leaf
 * accumulates a defined sum (L1), wanted sums are captured. */
static fan_status run_node(fan_pass_worker *worker, fan_error *err)
{
    fan_pass *pass = worker->pass;
    const fan_pass_node *entry = fan__worker_node(worker);
    FAN_UNINITIALIZED void *on_stack[2 * FAN_SUMS_ON_STACK];
    void **sums = on_stack;
    void *node_hooks = NULL;
    size_t inputs = entry->node->inputs;
    size_t all = inputs + entry->nedges;
    fan_pass_running here;
    bool runs = is_function(worker);
    if (all > 2 * FAN_SUMS_ON_STACK) {
        sums = fan_alloc(all * sizeof *sums);
        if (!sums)
            return fan_fail_memory(err);
    }
    for (size_t i = 0; i < all; i++)
        sums[i] = NULL;
    void **gradients = sums + inputs;

    if (runs)
        running_begin(&here, worker, worker->thread);
    fan_status status = node_sums(worker, sums, &node_hooks, err);
    if (status == FAN_OK && runs)
        status = pass->frontend->run(entry->node, sums, node_hooks, gradients, entry->nedges, err);
    else if (status == FAN_OK && entry->runs && sums[0])
        status = accumulate_leaf(pass, entry, &sums[0], node_hooks, err);
    if (runs)
        running_end(&here);

    drop_all(pass, sums, inputs);
    if (status == FAN_OK && runs)
        status = node_deliver(worker, gradients, node_hooks, err);
    else
        drop_all(pass, gradients, entry->nedges);
    drop_all(pass, &node_hooks, 1);
    if (sums != on_stack)
        fan_free(sums);
    if (status == FAN_OK && !runs)
        node_ran(worker);
    return status;
}

/* run_on_streams: calls run_node with the node's streams current (E4), in a span of the trace if
 * one is on. */
static fan_status run_on_streams(fan_pass_worker *worker, fan_error *err)
{
    const fan_pass *pass = worker->pass;
    fan_pass_timeline timeline = {.begin_ns = 0};
    fan_streams_outer outer;
    if (!is_traced() && !fan_streams_in_use())
        return run_node(worker, err);
    if (is_traced())
        timeline_begin(&timeline, worker);
    const fan_run_streams on = run_streams(pass, fan__worker_node(worker)->node);
    fan_streams_enter(on.set, &outer);
    fan_status status = run_node(worker, err);
    fan_streams_leave(&outer);
    timeline_end(&timeline, worker);
    return status;
}

/* ---- a worker ---- */

/* Graphs of at least this many nodes prefetch the next ones while a node runs: their memory is far
 * away. */
#define FETCH_FROM 4096
#define AHEAD 4

/* next_of_one: takes, on one thread, a ready leaf, else the first ready node, or the schedule's
 * choice.
 * worker->now FAN_NOWHERE: none is left. */
static fan_status next_of_one(fan_pass_worker *worker, fan_error *err)
{
    fan_pass *pass = worker->pass;
    worker->now = FAN_NOWHERE;
    if (pass->config.progress)
        FAN_TRY(fan__pass_progress(pass, err));
    if (pass->queue.leaves != FAN_NOWHERE) {
        worker->now = fan__queue_pop_leaf(&pass->queue, pass->nodes);
        return FAN_OK;
    }
    FAN_TRY(pass->frontend->check_signals(err));
    size_t place = fan_ready_first(&pass->queue.nodes, 0);
    if (place == FAN_READY_NONE) {
        if (pass->ran == pass->to_run)
            return FAN_OK;
        return fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
    }
    if (pass->config.schedule)
        FAN_TRY(pass->frontend->pick(pass->config.schedule, pass, &place, err));
    bool stays = FAN_FAULT(RUN_TWICE) && !pass->nodes[place].nedges && pass->arrivals++ == 0;
    if (!stays)
        fan_ready_remove(&pass->queue.nodes, place);
    worker->now = (uint32_t)place;
    if (pass->nnodes >= FETCH_FROM && place + 3 * AHEAD < pass->nnodes) {
        const fan_pass_node *entry = &pass->nodes[place];
        const fan_node *const ahead[3] = {
            entry[AHEAD].node,
            entry[2 * AHEAD].node,
            entry[3 * AHEAD].node,
        };
        pass->frontend->fetch(ahead);
    }
    return FAN_OK;
}

/* next_node: ends leaves and captured nodes, up to the next node that runs.
 * worker->now FAN_NOWHERE: none is left. */
static fan_status next_node(fan_pass_worker *worker, fan_error *err)
{
    const fan_pass *pass = worker->pass;
    for (;;) {
        if (pass->workers)
            FAN_TRY(fan__pass_workers_next(worker, err));
        else
            FAN_TRY(next_of_one(worker, err));
        if (worker->now == FAN_NOWHERE)
            return FAN_OK;
        if (is_function(worker))
            break;
        FAN_TRY(run_on_streams(worker, err));
    }
    const fan_node *node = fan__worker_node(worker)->node;
    if (node->freed_by) /* by another pass, since this one began */
        return fan_node_freed(node, err);
    return FAN_OK;
}

/* run_nodes: runs nodes until none is left. */
static fan_status run_nodes(fan_pass_worker *worker, fan_error *err)
{
    worker->thread = fan_thread_id();
    for (;;) {
        FAN_TRY(next_node(worker, err));
        if (worker->now == FAN_NOWHERE)
            return FAN_OK;
        FAN_TRY(run_on_streams(worker, err));
    }
}

/* helper_run: does a helper's part, on its thread. */
static void helper_run(void *arg)
{
    fan_pass_helper *helper = arg;
    const fan_pass *pass = helper->worker.pass;
    fan_pass_workers *workers = pass->workers;
    fan_leaf_work_for(&workers->caller);
    if (pass->frontend->worker_enter(helper->around)) {
        fan_error err;
        err.text[0] = '\0';
        depth = pass->depth;
        fan_status status = run_nodes(&helper->worker, &err);
        if (status != FAN_OK)
            fan__pass_workers_failed(&helper->worker, status, &err);
        if (workers->forked)
            pass->frontend->orphaned(workers->error);
        depth = 0;
        pass->frontend->worker_leave(helper->around);
    }
    fan__pass_workers_lock(workers);
    helper->state = FAN_HELPER_GONE;
    workers->inside--;
    fan_cond_broadcast(&workers->changed);
    fan__pass_workers_unlock(workers); /* from here on the pass may be freed */
    fan_leaf_work_for(NULL);
}

/* ---- begin and end ---- */

/* hold_config: copies the configuration and holds what it names. */
static fan_status hold_config(fan_pass *pass, const fan_pass_config *config, fan_error *err)
{
    fan_pass_config *own = &pass->config;
    *own = *config;
    if (own->schedule)
        pass->frontend->hold(own->schedule);
    if (own->progress)
        pass->frontend->hold(own->progress);
    own->nroots = 0;
    own->nwanted = 0;
    own->roots = fan_alloc(config->nroots * sizeof *own->roots);
    own->wanted = fan_alloc(config->nwanted * sizeof *own->wanted);
    if (!own->roots || !own->wanted)
        return fan_fail_memory(err);
    for (; own->nroots < config->nroots; own->nroots++) {
        fan_root root = config->roots[own->nroots];
        own->roots[own->nroots] = root;
        root.node->ops->hold(root.node);
        if (root.gradient)
            pass->frontend->hold(root.gradient);
    }
    for (; own->nwanted < config->nwanted; own->nwanted++) {
        fan_wanted wanted = config->wanted[own->nwanted];
        own->wanted[own->nwanted] = wanted;
        wanted.node->ops->hold(wanted.node);
    }
    return FAN_OK;
}

fan_status fan_pass_begin(const fan_pass_config *config, fan_pass **out, fan_error *err)
{
    fan_status status = FAN_OK;
    *out = NULL;
    fan_pass *pass = fan_calloc(sizeof *pass);
    if (!pass)
        return fan_fail_memory(err);
    pass->id = fan_mark_new();
    pass->frontend = config->frontend;
    pass->queue.leaves = FAN_NOWHERE;
    pass->queue.leaves_last = FAN_NOWHERE;
    pass->caller.pass = pass;
    pass->caller.now = FAN_NOWHERE;
    FAN_GO(hold_config(pass, config, err));
    fan_pass_streams *streams = &pass->streams;
    FAN_GO(fan_stream_set_now(&streams->caller, err));
    for (size_t i = 0; streams->caller && i < streams->caller->n; i++) {
        fan_stream *stream = streams->caller->all[i];
        uint64_t id = 0;
        FAN_GO(fan_stream_capture(stream, &id, err));
        if (id) {
            streams->captured = stream;
            break;
        }
    }
    FAN_GO(fan__collect(pass, err));
    if (has_digests())
        pass->digests = fan_calloc(pass->nslots * sizeof *pass->digests); /* NULL: read twice */
    if (config->workers > 1)
        FAN_GO(fan__pass_workers_begin(pass, helper_run, err));
    *out = pass;
done:
    if (status != FAN_OK)
        fan_pass_end(pass);
    return status;
}

void fan_pass_end(fan_pass *pass)
{
    if (!pass)
        return;
    fan_pass_config *config = &pass->config;
    fan_pass_streams *streams = &pass->streams;
    walk_end(pass);
    timeline_end(&pass->timeline, &pass->caller);
    (void)end_tails(pass, NULL);
    /* The captured stream waits for those that the pass pulled in, so that a capture of the
     * caller's can end. */
    for (size_t i = 0; i < streams->pulled.n; i++) {
        fan_stream *stream = streams->pulled.all[i];
        if (stream != streams->captured)
            (void)stream_wait_for(streams->captured, stream, NULL);
    }

    /* Gradients and sums before nodes, which may end with their edges. */
    for (size_t i = 0; i < pass->nslots; i++)
        drop_all(pass, &pass->slots[i].forwarded, 1);
    for (size_t i = 0; i < pass->nnodes; i++) {
        if (pass->nodes[i].buffer)
            pass->frontend->buffer_free(pass->nodes[i].buffer);
    }
    if (pass->results)
        drop_all(pass, pass->results, config->nwanted);
    for (size_t i = 0; i < config->nroots; i++)
        drop_all(pass, &config->roots[i].gradient, 1);
    for (size_t i = 0; i < config->nroots; i++)
        config->roots[i].node->ops->drop(config->roots[i].node);
    for (size_t i = 0; i < config->nwanted; i++)
        config->wanted[i].node->ops->drop(config->wanted[i].node);
    drop_all(pass, &config->schedule, 1);
    drop_all(pass, &config->progress, 1);

    if (pass->workers)
        fan__pass_workers_free(pass);

    fan_ready_fini(&pass->queue.nodes);
    fan_free(streams->tails);
    stream_list_fini(&streams->pulled);
    fan_stream_set_drop(streams->caller);
    fan__collect_free(pass->nodes, pass->cap_nodes, sizeof *pass->nodes);
    fan__collect_free(pass->slots, pass->nslots, sizeof *pass->slots);
    fan__collect_free(pass->edges, pass->cap_edges, sizeof *pass->edges);
    fan_free(pass->same);
    fan_free(pass->digests);
    fan_free(pass->results);
    fan_free(config->roots);
    fan_free(config->wanted);
    fan_free(pass);
}

/* ---- run ---- */

fan_status fan_pass_seed(fan_pass *pass, fan_error *err)
{
    fan_streams_outer outer;
    fan_status status = FAN_OK;
    fan_streams_enter(pass->streams.caller, &outer);
    fan_producer producer = {.call = pass->config.call};
    for (; producer.index < pass->config.nroots && status == FAN_OK; producer.index++) {
        void **gradient = &pass->config.roots[producer.index].gradient;
        fan_pass_edge *edge = &pass->edges[producer.index];
        if (edge->to != FAN_NOWHERE)
            status = deliver(pass, edge, gradient, &producer, err);
        if (status != FAN_OK)
            break;
        if (edge->to != FAN_NOWHERE)
            dependency_done(pass, edge->to);
        drop_all(pass, gradient, 1);
    }
    fan_streams_leave(&outer);
    pass->seeded = status == FAN_OK;
    return status;
}

bool fan_pass_depth(int by)
{
    depth += (unsigned)by;
    return depth <= DEPTH;
}

fan_status fan_pass_too_deep(fan_error *err)
{
    return fan_fail(
        err, FAN_ERR_STATE,
        "a pass inside a pass, %d deep: does a node start a pass of its own graph? (E7)", DEPTH);
}

fan_status fan_pass_run(fan_pass *pass, fan_error *err)
{
    if (!fan_pass_depth(1)) {
        fan_pass_depth(-1);
        return fan_pass_too_deep(err);
    }
    pass->depth = depth;
    fan_status status = run_nodes(&pass->caller, err);
    if (pass->workers) {
        if (status != FAN_OK)
            fan__pass_workers_failed(&pass->caller, status, err);
        status = fan__pass_workers_end(pass);
    }
    fan_pass_depth(-1);
    return status;
}

/* ---- walk ---- */

/* current_node: returns the caller's node, running or failed.
 * NULL: it has none. */
static fan_node *current_node(const fan_pass *pass)
{
    uint32_t now = pass->caller.now;
    if (now == FAN_NOWHERE)
        return NULL;
    return pass->nodes[now].node;
}

fan_status fan_pass_next(fan_pass *pass, fan_node **out, fan_error *err)
{
    *out = NULL;
    FAN_TRY(next_node(&pass->caller, err));
    *out = current_node(pass);
    return FAN_OK;
}

fan_status fan_pass_sums(fan_pass *pass, void **sums, void **node_hooks, fan_error *err)
{
    if (is_traced())
        timeline_begin(&pass->timeline, &pass->caller);
    return node_sums(&pass->caller, sums, node_hooks, err);
}

fan_status fan_pass_give(fan_pass *pass, void **gradients, const void *node_hooks, fan_error *err)
{
    walk_end(pass);
    fan_status status = node_deliver(&pass->caller, gradients, node_hooks, err);
    timeline_end(&pass->timeline, &pass->caller);
    return status;
}

void fan_pass_enter(const fan_pass *pass, fan_streams_outer *outer)
{
    const fan_run_streams on = run_streams(pass, current_node(pass));
    fan_streams_enter(on.set, outer);
}

void fan_pass_walk_runs(fan_pass *pass, bool inside)
{
    walk_end(pass);
    running_begin(&pass->running, &pass->caller, inside ? fan_thread_id() : 0);
    pass->is_running = true;
}

/* ---- the state of a pass ---- */

void *fan_pass_result(fan_pass *pass, size_t i)
{
    void *sum = pass->results[i];
    pass->results[i] = NULL;
    return sum;
}

fan_node *fan_pass_ready(const fan_pass *pass, size_t *place)
{
    *place = fan_ready_first(&pass->queue.nodes, *place);
    if (*place == FAN_READY_NONE)
        return NULL;
    return pass->nodes[*place].node;
}

uint32_t fan_pass_edges(const fan_pass *pass)
{
    return pass->nodes[pass->caller.now].nedges;
}

const fan_node *fan_pass_at(const fan_pass *pass, uint32_t *ran, uint32_t *all)
{
    *ran = pass->ran;
    *all = pass->to_run;
    return current_node(pass);
}

bool fan_pass_seeded(const fan_pass *pass)
{
    return pass->seeded;
}

uint64_t fan_pass_id(const fan_pass *pass)
{
    return pass->id;
}

bool fan_pass_error_has_location(const fan_pass *pass)
{
    return pass->workers && pass->workers->failed;
}

/* visit_held: visits an object; returns 0 for NULL. */
static int visit_held(void *held, int (*object)(void *object, void *arg), void *arg)
{
    if (held)
        return object(held, arg);
    return 0;
}

int fan_pass_visit(fan_pass *pass, int (*object)(void *object, void *arg),
                   int (*node)(fan_node *node, void *arg), void *arg)
{
    const fan_pass_config *config = &pass->config;
    int result = visit_held(config->schedule, object, arg);
    if (!result)
        result = visit_held(config->progress, object, arg);
    for (size_t i = 0; i < pass->nslots && !result; i++)
        result = visit_held(pass->slots[i].forwarded, object, arg);
    for (size_t i = 0; i < pass->nnodes && !result; i++)
        result = visit_held(pass->nodes[i].buffer, object, arg);
    for (size_t i = 0; pass->results && i < config->nwanted && !result; i++)
        result = visit_held(pass->results[i], object, arg);
    for (size_t i = 0; i < config->nroots && !result; i++) {
        result = node(config->roots[i].node, arg);
        if (!result)
            result = visit_held(config->roots[i].gradient, object, arg);
    }
    for (size_t i = 0; i < config->nwanted && !result; i++)
        result = node(config->wanted[i].node, arg);
    return result;
}
