#include "engine/queue.h"

#include "base/fault.h"
#include "engine/workers.h"

#include <assert.h>

/* put: a node is ready. Leaves are in a list by themselves (E2). */
static void put_in(fan_task_queue *q, fan_task_node *nodes, uint32_t at)
{
    if (!nodes[at].leaf) {
        fan_ready_add(&q->nodes, at);
        return;
    }
    if (q->leaves == FAN_NOWHERE)
        q->leaves = at;
    else
        nodes[q->leaves_last].after = at;
    q->leaves_last = at;
}

/* put: of several workers, what runs on a device has a queue there (E3). */
static void put(fan_backward *p, uint32_t at)
{
    fan_task_workers *c = p->workers;
    fan_task_device *d = c ? fan__task_device_of(c, p->nodes[at].node) : NULL;
    if (!c) {
        put_in(&p->queue, p->nodes, at);
    } else if (d) {
        d->ready++;
        c->ready_there++;
        put_in(&d->queue, p->nodes, at);
    } else {
        c->ready++;
        put_in(&p->queue, p->nodes, at);
    }
}

static uint32_t take_leaf(fan_task_queue *q, fan_task_node *nodes)
{
    uint32_t at = q->leaves;
    q->leaves = nodes[at].after;
    nodes[at].after = FAN_NOWHERE;
    return at;
}

/* ---- one thread ---- */

static bool is_last(fan_task_node *v)
{
    assert(v->dependencies > 0);
    return --v->dependencies <= (FAN_FAULT(TAKEN_BEFORE_LAST) ? 1u : 0u);
}

/* Of a graph of so many nodes the next ones are asked for while one runs: their memory is far away. */
#define FETCH_FROM 4096
#define AHEAD 4

static void fetch_ahead(const fan_backward *p, size_t place)
{
    const fan_task_node *v = &p->nodes[place];
    if (place + 3 * AHEAD < p->nnodes) {
        const fan_node *const ahead[3] = {v[AHEAD].node, v[2 * AHEAD].node, v[3 * AHEAD].node};
        p->config.frontend->fetch(ahead);
    }
}

static fan_status next_of_one(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    size_t place;
    if (p->queue.leaves != FAN_NOWHERE) {
        w->now = take_leaf(&p->queue, p->nodes);
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
    if (p->nnodes >= FETCH_FROM)
        fetch_ahead(p, place);
    return FAN_OK;
}

/* ---- several: all under the lock of the pass ---- */

static fan_task_group *group_at(const fan_task_workers *c, uint32_t at)
{
    return c->group_of && c->group_of[at] ? &c->groups[c->group_of[at] - 1] : NULL;
}

/* group_end: the node ran; of its group another may, which was ready before. */
static void group_end(fan_backward *p, uint32_t at)
{
    fan_task_group *g = group_at(p->workers, at);
    uint32_t next = g ? g->first : FAN_NOWHERE;
    if (!g)
        return;
    g->busy = false;
    if (next == FAN_NOWHERE)
        return;
    g->first = p->nodes[next].after;
    p->nodes[next].after = FAN_NOWHERE;
    put(p, next);
}

/* group_begin: whether a node may run now; else it is put aside until its group is free. */
static bool group_begin(fan_backward *p, uint32_t at)
{
    fan_task_group *g = group_at(p->workers, at);
    if (!g || !g->busy || FAN_FAULT(GROUP_TWICE)) {
        if (g)
            g->busy = true;
        return true;
    }
    if (g->first == FAN_NOWHERE)
        g->first = at;
    else
        p->nodes[g->last].after = at;
    g->last = at;
    return false;
}

/* take: the next node of a queue that may run, of *ready. */
static uint32_t take(fan_backward *p, fan_task_queue *q, uint32_t *ready)
{
    fan_task_workers *c = p->workers;
    while (*ready) {
        uint32_t at;
        --*ready;
        if (q->leaves != FAN_NOWHERE)
            return take_leaf(q, p->nodes);
        at = (uint32_t)fan_ready_first(&q->nodes, 0);
        if (FAN_FAULT(NODE_TAKEN_TWICE)) { /* found and taken are two steps */
            fan_mutex_unlock(&c->lock);
            fan_mutex_lock(&c->lock);
            if (fan_ready_first(&q->nodes, at) != at)
                return at;
        }
        fan_ready_remove(&q->nodes, at);
        if (group_begin(p, at))
            return at;
    }
    return FAN_NOWHERE;
}

/* take_there: of the worker's devices. */
static uint32_t take_there(const fan_task_worker *w)
{
    fan_task_workers *c = w->pass->workers;
    uint32_t at = FAN_NOWHERE;
    for (uint32_t i = 0; i < c->ndevices && at == FAN_NOWHERE; i++) {
        fan_task_device *d = &c->devices[i];
        uint32_t before = d->ready;
        if (!fan__task_device_is_own(c, d, w) && !FAN_FAULT(DEVICE_ON_ANY))
            continue;
        at = take(w->pass, &d->queue, &d->ready);
        c->ready_there -= before - d->ready;
    }
    return at;
}

/* take_next: of its devices first: they are at work meanwhile. */
static uint32_t take_next(const fan_task_worker *w)
{
    fan_backward *p = w->pass;
    uint32_t at = p->workers->ready_there ? take_there(w) : FAN_NOWHERE;
    return at == FAN_NOWHERE ? take(p, &p->queue, &p->workers->ready) : at;
}

/* over: nobody is at work, and nothing is ready: nothing ever will be. */
static fan_status over(fan_backward *p, fan_error *err)
{
    p->workers->over = true;
    fan_cond_broadcast(&p->workers->changed);
    return p->ran == p->to_run ? FAN_OK : fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
}

/* next_locked: waits where others are at work that may make a node ready. */
static fan_status next_locked(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    fan_task_workers *c = p->workers;
    while (!c->over) {
        w->now = take_next(w);
        if (w->now != FAN_NOWHERE) {
            c->busy++;
            p->nodes[w->now].begun = true;
            return FAN_OK;
        }
        if (c->busy == 0 && c->ready_there == 0)
            return over(p, err);
        if (FAN_FAULT(WORKER_LEAVES))
            return FAN_OK;
        if (fan__task_workers_wake(w)) { /* it has made one ready that is another's */
            fan_mutex_unlock(&c->lock);
            fan__task_workers_start(p);
            fan__task_workers_lock(c);
            continue;
        }
        FAN_TRY(fan__task_workers_wait(p, err));
    }
    return c->forked ? fan_fail(err, FAN_ERR_STATE,
                                "a fork inside of a pass of several workers: this process has the thread alone that "
                                "forked, and the pass cannot go on here")
                     : FAN_OK;
}

/* count: what the worker's node has given has delivered, and it has run. */
static void count(fan_task_worker *w)
{
    fan_backward *p = w->pass;
    const fan_task_node *v = &p->nodes[w->now];
    for (uint32_t i = 0; w->delivered && i < v->nedges; i++) {
        uint32_t to = p->edges[v->edges + i].to;
        if (to != FAN_NOWHERE && is_last(&p->nodes[to]))
            put(p, to);
    }
    p->ran += w->ran;
    w->delivered = w->ran = false;
}

/* call_progress: how far the pass is, to who asked for it: one thread at a time, which tells what others have run
 * meanwhile. */
static fan_status call_progress(fan_backward *p, fan_error *err)
{
    fan_status status = FAN_OK;
    fan__task_lock(p);
    if (!p->progress_busy) {
        p->progress_busy = true;
        while (status == FAN_OK && p->progress_ran != p->ran + 1 && !(p->workers && p->workers->failed)) {
            uint32_t ran = p->ran;
            p->progress_ran = ran + 1;
            fan__task_unlock(p);
            status = p->config.frontend->progress(p->config.progress, ran, p->to_run, err);
            fan__task_lock(p);
        }
        p->progress_busy = false;
    }
    fan__task_unlock(p);
    return status;
}

/* wake_and_call: locked: others are woken before, for what this worker cannot begin meanwhile; of a chain it begins
 * all.
 */
static fan_status wake_and_call(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    fan_task_workers *c = p->workers;
    bool others = c->ready > 1 || (c->ready && c->asleep) || c->ready_there;
    bool start = others && fan__task_workers_wake(w);
    w->now = FAN_NOWHERE;
    fan_mutex_unlock(&c->lock);
    if (start)
        fan__task_workers_start(p);
    fan_status status = call_progress(p, err);
    fan__task_workers_lock(c);
    return status;
}

static fan_status next_of_many(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    fan_status status = p->config.frontend->check_signals(err);
    bool start = false;
    fan__task_workers_lock(p->workers);
    if (w->now != FAN_NOWHERE) {
        count(w);
        group_end(p, w->now);
        p->workers->busy--;
    }
    if (status == FAN_OK && p->config.progress)
        status = wake_and_call(w, err);
    w->now = FAN_NOWHERE;
    if (status == FAN_OK)
        status = next_locked(w, err);
    if (p->workers->ready || p->workers->ready_there)
        start = fan__task_workers_wake(w);
    fan_mutex_unlock(&p->workers->lock);
    if (start)
        fan__task_workers_start(p);
    return status;
}

/* ---- the face ---- */

void fan__dependency_done(fan_backward *p, uint32_t at)
{
    if (is_last(&p->nodes[at]))
        put(p, at);
}

fan_status fan__queue_next(fan_task_worker *w, fan_error *err)
{
    if (w->pass->workers)
        return next_of_many(w, err);
    w->now = FAN_NOWHERE;
    if (w->pass->config.progress)
        FAN_TRY(call_progress(w->pass, err));
    return next_of_one(w, err);
}
