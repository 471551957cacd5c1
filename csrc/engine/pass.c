/* pass: a gradient's way, from the node that made it to the one that gets it:
 *
 *   hand_over   one producer, and it is what the slot takes: kept as it is; else into the node's buffer, by its key
 *   arrived     then, and not before, one gradient less is due (E1); with the last one the node is ready
 *   sums        what was handed over, or a take of the buffer; hooks of the slots; captured (E8)
 *   step        the function and its other hooks; release (E10); its gradients go on
 */
#include "engine/engine.h"

#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "engine/collect.h"

#include <assert.h>
#include <string.h>

#define DEPTH 1000 /* passes inside passes */

static fan_running *running; /* of all threads, the newest first (node.h, One thread at a time) */
static _Thread_local unsigned depth;

static fan_status no_memory(fan_error *err) { return fan_fail(err, FAN_ERR_NOMEM, "out of memory"); }

/* ---- begin and end ---- */

/* config_copy: its arrays, and their holds. */
static fan_status config_copy(fan_backward *p, const fan_backward_config *config, fan_error *err)
{
    p->config = *config;
    if (config->schedule)
        config->frontend->hold(config->schedule);
    p->config.roots = fan_alloc(config->nroots * sizeof *config->roots);
    p->config.wanted = fan_alloc(config->nwanted * sizeof *config->wanted);
    if (!p->config.roots || !p->config.wanted) {
        p->config.nroots = p->config.nwanted = 0;
        return no_memory(err);
    }
    for (size_t i = 0; i < config->nroots; i++) {
        fan_root *r = &p->config.roots[i];
        *r = config->roots[i];
        r->node->kind->hold(r->node);
        if (r->gradient)
            config->frontend->hold(r->gradient);
    }
    for (size_t i = 0; i < config->nwanted; i++) {
        p->config.wanted[i] = config->wanted[i];
        config->wanted[i].node->kind->hold(config->wanted[i].node);
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
    p->leaves = p->leaves_last = p->now = FAN_NOWHERE;
    status = config_copy(p, config, err);
    if (status == FAN_OK)
        status = fan_collect(p, err);
    if (status == FAN_OK)
        *out = p;
    else
        fan_backward_end(p);
    return status;
}

static void running_begin(fan_backward *p, fan_running *r, uint64_t thread)
{
    *r = (fan_running){p, p->now, thread, running};
    running = r;
}

static void running_end(fan_running *r)
{
    for (fan_running **at = &running; *at; at = &(*at)->outer)
        if (*at == r) {
            *at = r->outer;
            return;
        }
}

static void drop_all(const fan_backward *p, void **objects, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (objects[i]) {
            void *object = objects[i];
            objects[i] = NULL;
            p->config.frontend->drop(object);
        }
}

void fan_backward_end(fan_backward *p)
{
    const fan_engine_frontend *f;
    if (!p)
        return;
    f = p->config.frontend;
    if (p->is_running)
        running_end(&p->running);
    for (size_t i = 0; i < p->nslots; i++)
        drop_all(p, &p->slots[i].handed, 1);
    for (size_t i = 0; i < p->nvisits; i++)
        if (p->visits[i].buffer)
            f->buffer_free(p->visits[i].buffer);
    if (p->results)
        drop_all(p, p->results, p->config.nwanted);
    for (size_t i = 0; i < p->config.nroots; i++)
        drop_all(p, &p->config.roots[i].gradient, 1);
    for (size_t i = 0; i < p->config.nroots; i++)
        p->config.roots[i].node->kind->drop(p->config.roots[i].node);
    for (size_t i = 0; i < p->config.nwanted; i++)
        p->config.wanted[i].node->kind->drop(p->config.wanted[i].node);
    drop_all(p, &p->config.schedule, 1);
    fan_ready_fini(&p->ready);
    fan_free(p->visits);
    fan_free(p->slots);
    fan_free(p->edges);
    fan_free(p->same);
    fan_free(p->results);
    fan_free(p->config.roots);
    fan_free(p->config.wanted);
    fan_free(p);
}

/* ---- a gradient goes on ---- */

/* arrived: one gradient less is due; the node is ready with the last one. Leaves are in a list by themselves (E2). */
static void arrived(fan_backward *p, uint32_t at)
{
    fan_visit *v = &p->visits[at];
    assert(v->due > 0);
    if (--v->due > (FAN_FAULT(TAKEN_BEFORE_LAST) ? 1u : 0u))
        return;
    if (!v->node->kind->leaf) {
        fan_ready_add(&p->ready, at);
        return;
    }
    if (p->leaves == FAN_NOWHERE)
        p->leaves = at;
    else
        p->visits[p->leaves_last].after = at;
    p->leaves_last = at;
}

static fan_status hand_over(fan_backward *p, const fan_visit_edge *edge, uint32_t slot, void **gradient,
                            const fan_giver *giver, fan_error *err)
{
    const fan_engine_frontend *f = p->config.frontend;
    fan_visit *to = &p->visits[edge->to];
    fan_visit_slot *s = &p->slots[to->slots + slot];
    if (s->producers == 1 && (!*gradient || f->hand(to->node, slot, *gradient))) {
        s->handed = *gradient;
        *gradient = NULL;
        return FAN_OK;
    }
    if (!to->buffer)
        FAN_TRY(f->buffer_new(to->node, &to->buffer, err));
    return f->add(to->buffer, slot, FAN_FAULT(KEY_BY_ARRIVAL) ? p->arrivals++ : edge->key, *gradient, giver, err);
}

static fan_status give_one(fan_backward *p, const fan_visit_edge *edge, uint32_t slot, void **gradient,
                           const fan_giver *giver, fan_error *err)
{
    if (edge->to == FAN_NOWHERE)
        return FAN_OK;
    FAN_TRY(hand_over(p, edge, slot, gradient, giver, err));
    arrived(p, edge->to);
    return FAN_OK;
}

fan_status fan_backward_seed(fan_backward *p, fan_error *err)
{
    for (size_t i = 0; i < p->config.nroots; i++) {
        fan_root *r = &p->config.roots[i];
        fan_giver giver = {NULL, p->config.call, (uint32_t)i};
        FAN_TRY(give_one(p, &p->edges[i], r->slot, &r->gradient, &giver, err));
        drop_all(p, &r->gradient, 1);
    }
    p->seeded = true;
    return FAN_OK;
}

fan_status fan_backward_give(fan_backward *p, void **gradients, fan_error *err)
{
    fan_visit *v = &p->visits[p->now];
    fan_giver giver = {v->node, NULL, 0};
    fan_status status = FAN_OK;
    if (p->is_running)
        running_end(&p->running);
    p->is_running = false;
    p->ran++;
    if (!p->config.keep_graph) {
        v->node->freed_by = v->node->freed_by ? v->node->freed_by : p->id;
        status = p->config.frontend->release(v->node, err);
    }
    for (; giver.index < v->nedges && status == FAN_OK; giver.index++)
        status = give_one(p, &p->edges[v->edges + giver.index], v->node->edges[giver.index].slot,
                          &gradients[giver.index], &giver, err);
    drop_all(p, gradients, v->nedges);
    if (status == FAN_OK)
        p->now = FAN_NOWHERE;
    return status;
}

/* ---- a node ---- */

/* capture: what is wanted of a node's slots is kept for the caller (E8). */
static void capture(fan_backward *p, const fan_visit *v, void **sums)
{
    for (uint32_t i = 0; i < v->node->inputs; i++)
        for (uint32_t w = p->slots[v->slots + i].wanted; w; w = p->same[w - 1])
            if ((p->results[w - 1] = sums[i]))
                p->config.frontend->hold(sums[i]);
}

fan_status fan_backward_sums(fan_backward *p, void **sums, void **node_hooks, fan_error *err)
{
    const fan_engine_frontend *f = p->config.frontend;
    fan_visit *v = &p->visits[p->now];
    fan_status status = FAN_OK;
    for (uint32_t i = 0; i < v->node->inputs; i++) {
        sums[i] = p->slots[v->slots + i].handed;
        p->slots[v->slots + i].handed = NULL;
    }
    for (uint32_t i = 0; v->buffer && i < v->node->inputs && status == FAN_OK; i++)
        if (!sums[i] && p->slots[v->slots + i].producers)
            status = f->take(v->buffer, i, &sums[i], err);
    if (v->buffer) {
        void *buffer = v->buffer;
        v->buffer = NULL;
        f->buffer_free(buffer);
    }
    if (status == FAN_OK)
        status = f->hooks(v->node, sums, node_hooks, err);
    if (status == FAN_OK && v->captured)
        capture(p, v, sums);
    return status;
}

/* end_here: a leaf accumulates (L1: where something has come); what is there to be captured is that. */
static fan_status end_here(fan_backward *p, fan_error *err)
{
    fan_visit *v = &p->visits[p->now];
    void *on_stack[FAN_SUMS_ON_STACK] = {NULL}, **sums = on_stack, *node_hooks = NULL;
    fan_status status;
    if (v->node->inputs > FAN_SUMS_ON_STACK && !(sums = fan_calloc(v->node->inputs * sizeof *sums)))
        return no_memory(err);
    status = fan_backward_sums(p, sums, &node_hooks, err);
    if (status == FAN_OK && v->runs && sums[0])
        status = p->config.frontend->accumulate(v->node, &sums[0], node_hooks, err);
    drop_all(p, sums, v->node->inputs);
    drop_all(p, &node_hooks, 1);
    if (sums != on_stack)
        fan_free(sums);
    p->ran += status == FAN_OK;
    if (status == FAN_OK)
        p->now = FAN_NOWHERE;
    return status;
}

/* next_place: of the nodes that are ready the first, or what the schedule picks. */
static fan_status next_place(fan_backward *p, fan_error *err)
{
    size_t place = fan_ready_first(&p->ready, 0);
    p->now = FAN_NOWHERE;
    if (place == FAN_READY_NONE)
        return p->ran == p->to_run ? FAN_OK : fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
    if (p->config.schedule)
        FAN_TRY(p->config.frontend->pick(p->config.schedule, p, &place, err));
    if (!FAN_FAULT(RUN_TWICE) || p->visits[place].nedges || p->arrivals++)
        fan_ready_remove(&p->ready, place);
    p->now = (uint32_t)place;
    return FAN_OK;
}

fan_status fan_backward_next(fan_backward *p, fan_node **out, fan_error *err)
{
    *out = NULL;
    for (;;) {
        while (p->leaves != FAN_NOWHERE) {
            p->now = p->leaves;
            p->leaves = p->visits[p->now].after;
            p->visits[p->now].after = FAN_NOWHERE;
            FAN_TRY(end_here(p, err));
        }
        FAN_TRY(p->config.frontend->check_signals(err));
        FAN_TRY(next_place(p, err));
        if (p->now == FAN_NOWHERE)
            return FAN_OK;
        if (p->visits[p->now].runs)
            break;
        FAN_TRY(end_here(p, err));
    }
    *out = p->visits[p->now].node;
    return (*out)->freed_by ? fan_node_freed(*out, err) : FAN_OK; /* by another pass, since this one began */
}

static fan_status step(fan_backward *p, fan_error *err)
{
    const fan_visit *v = &p->visits[p->now];
    void *on_stack[2 * FAN_SUMS_ON_STACK], **sums = on_stack, **gradients, *node_hooks = NULL;
    size_t n = v->node->inputs, all = n + v->nedges;
    fan_running here;
    fan_status status;
    if (all > 2 * FAN_SUMS_ON_STACK && !(sums = fan_alloc(all * sizeof *sums)))
        return no_memory(err);
    memset(sums, 0, all * sizeof *sums);
    gradients = sums + n;
    running_begin(p, &here, fan_thread_id());
    status = fan_backward_sums(p, sums, &node_hooks, err);
    if (status == FAN_OK)
        status = p->config.frontend->run(v->node, sums, node_hooks, gradients, v->nedges, err);
    running_end(&here);
    drop_all(p, sums, n);
    drop_all(p, &node_hooks, 1);
    if (status == FAN_OK)
        status = fan_backward_give(p, gradients, err);
    else
        drop_all(p, gradients, v->nedges);
    if (sums != on_stack)
        fan_free(sums);
    return status;
}

fan_status fan_backward_run(fan_backward *p, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_node *n;
    if (depth >= DEPTH)
        return fan_fail(err, FAN_ERR_STATE, "a pass inside a pass, %d deep: is it started for ever? (E7)", DEPTH);
    depth++;
    do {
        status = fan_backward_next(p, &n, err);
        if (status == FAN_OK && n)
            status = step(p, err);
    } while (status == FAN_OK && n);
    depth--;
    return status;
}

/* ---- what a pass says of itself ---- */

void fan_backward_by_hand(fan_backward *p, bool inside)
{
    if (p->is_running)
        running_end(&p->running);
    running_begin(p, &p->running, inside ? fan_thread_id() : 0);
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
    *place = fan_ready_first(&p->ready, *place);
    return *place == FAN_READY_NONE ? NULL : p->visits[*place].node;
}

uint32_t fan_backward_edges(const fan_backward *p) { return p->visits[p->now].nedges; }

const fan_node *fan_backward_at(const fan_backward *p, uint32_t *ran, uint32_t *all)
{
    *ran = p->ran;
    *all = p->to_run;
    return p->now == FAN_NOWHERE ? NULL : p->visits[p->now].node;
}

bool fan_backward_seeded(const fan_backward *p) { return p->seeded; }

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

int fan_backward_visit(fan_backward *p, int (*object)(void *object, void *arg), int (*node)(fan_node *n, void *arg),
                       void *arg)
{
    int answer = p->config.schedule ? object(p->config.schedule, arg) : 0;
    for (size_t i = 0; i < p->nslots && !answer; i++)
        answer = p->slots[i].handed ? object(p->slots[i].handed, arg) : 0;
    for (size_t i = 0; i < p->nvisits && !answer; i++)
        answer = p->visits[i].buffer ? object(p->visits[i].buffer, arg) : 0;
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
