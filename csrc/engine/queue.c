#include "engine/queue.h"

#include "base/fault.h"
#include "engine/crew.h"

#include <assert.h>

/* put: a node is ready. Leaves are in a list by themselves (E2). */
static void put(fan_backward *p, uint32_t at)
{
    if (!p->visits[at].node->kind->leaf) {
        fan_ready_add(&p->ready, at);
        return;
    }
    if (p->leaves == FAN_NOWHERE)
        p->leaves = at;
    else
        p->visits[p->leaves_last].after = at;
    p->leaves_last = at;
}

static uint32_t take_leaf(fan_backward *p)
{
    uint32_t at = p->leaves;
    p->leaves = p->visits[at].after;
    p->visits[at].after = FAN_NOWHERE;
    return at;
}

/* ---- one thread ---- */

static bool is_last(fan_visit *v)
{
    assert(v->due > 0);
    return --v->due <= (FAN_FAULT(TAKEN_BEFORE_LAST) ? 1u : 0u);
}

static fan_status next_of_one(fan_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    size_t place;
    w->now = FAN_NOWHERE;
    if (p->leaves != FAN_NOWHERE) {
        w->now = take_leaf(p);
        return FAN_OK;
    }
    FAN_TRY(p->config.frontend->check_signals(err));
    place = fan_ready_first(&p->ready, 0);
    if (place == FAN_READY_NONE)
        return p->ran == p->to_run ? FAN_OK : fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
    if (p->config.schedule)
        FAN_TRY(p->config.frontend->pick(p->config.schedule, p, &place, err));
    if (!FAN_FAULT(RUN_TWICE) || p->visits[place].nedges || p->arrivals++)
        fan_ready_remove(&p->ready, place);
    w->now = (uint32_t)place;
    return FAN_OK;
}

/* ---- several: all under the lock of the pass ---- */

static fan_crew_group *group_at(const fan_crew *c, uint32_t at)
{
    return c->group_of && c->group_of[at] ? &c->groups[c->group_of[at] - 1] : NULL;
}

/* group_end: the node ran; of its group another may, which was ready before. */
static void group_end(fan_backward *p, uint32_t at)
{
    fan_crew_group *g = group_at(p->crew, at);
    uint32_t next = g ? g->first : FAN_NOWHERE;
    if (!g)
        return;
    g->busy = false;
    if (next == FAN_NOWHERE)
        return;
    g->first = p->visits[next].after;
    p->visits[next].after = FAN_NOWHERE;
    p->crew->ready++;
    put(p, next);
}

/* group_begin: whether a node may run now; else it is put aside until its group is free. */
static bool group_begin(fan_backward *p, uint32_t at)
{
    fan_crew_group *g = group_at(p->crew, at);
    if (!g || !g->busy || FAN_FAULT(GROUP_TWICE)) {
        if (g)
            g->busy = true;
        return true;
    }
    if (g->first == FAN_NOWHERE)
        g->first = at;
    else
        p->visits[g->last].after = at;
    g->last = at;
    return false;
}

/* take: the next node that may run. */
static uint32_t take(fan_backward *p)
{
    fan_crew *c = p->crew;
    while (c->ready) {
        uint32_t at;
        c->ready--;
        if (p->leaves != FAN_NOWHERE)
            return take_leaf(p);
        at = (uint32_t)fan_ready_first(&p->ready, 0);
        if (FAN_FAULT(NODE_TAKEN_TWICE)) { /* found and taken are two steps */
            fan_mutex_unlock(&c->lock);
            fan_mutex_lock(&c->lock);
            if (fan_ready_first(&p->ready, at) != at)
                return at;
        }
        fan_ready_remove(&p->ready, at);
        if (group_begin(p, at))
            return at;
    }
    return FAN_NOWHERE;
}

/* over: nobody is at work, and nothing is ready: nothing ever will be. */
static fan_status over(fan_backward *p, fan_error *err)
{
    p->crew->over = true;
    fan_cond_broadcast(&p->crew->changed);
    return p->ran == p->to_run ? FAN_OK : fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
}

/* next_locked: waits where others are at work that may make a node ready. */
static fan_status next_locked(fan_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    fan_crew *c = p->crew;
    while (!c->over) {
        w->now = take(p);
        if (w->now != FAN_NOWHERE) {
            c->busy++;
            return FAN_OK;
        }
        if (c->busy == 0)
            return over(p, err);
        if (FAN_FAULT(WORKER_LEAVES))
            return FAN_OK;
        FAN_TRY(fan__crew_wait(p, err));
    }
    return c->forked ? fan_fail(err, FAN_ERR_STATE,
                                "a fork inside of a pass of several workers: this process has the thread alone that "
                                "forked, and the pass cannot go on here")
                     : FAN_OK;
}

/* count: what the worker's node has given has arrived, and it has run. */
static void count(fan_worker *w)
{
    fan_backward *p = w->pass;
    const fan_visit *v = &p->visits[w->now];
    for (uint32_t i = 0; w->gave && i < v->nedges; i++) {
        uint32_t to = p->edges[v->edges + i].to;
        if (to == FAN_NOWHERE || !is_last(&p->visits[to]))
            continue;
        put(p, to);
        p->crew->ready++;
    }
    p->ran += w->ran;
    w->gave = w->ran = false;
}

static fan_status next_of_many(fan_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    fan_status status = p->config.frontend->check_signals(err);
    bool start = false;
    fan__crew_lock(p->crew);
    if (w->now != FAN_NOWHERE) {
        count(w);
        group_end(p, w->now);
        p->crew->busy--;
    }
    w->now = FAN_NOWHERE;
    if (status == FAN_OK)
        status = next_locked(w, err);
    if (w->now != FAN_NOWHERE && p->crew->ready)
        start = fan__crew_wake(p);
    fan_mutex_unlock(&p->crew->lock);
    if (start)
        fan__crew_start(p);
    return status;
}

/* ---- the face ---- */

void fan__queue_arrived(fan_backward *p, uint32_t at)
{
    if (!is_last(&p->visits[at]))
        return;
    put(p, at);
    if (p->crew)
        p->crew->ready++;
}

fan_status fan__queue_next(fan_worker *w, fan_error *err)
{
    return w->pass->crew ? next_of_many(w, err) : next_of_one(w, err);
}
