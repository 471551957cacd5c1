#include "engine/queue.h"

#include "base/fault.h"

#include <assert.h>

void fan__queue_arrived(fan_backward *p, uint32_t at)
{
    fan_visit *v = &p->visits[at];
    assert(v->due > 0);
    if (--v->due > (FAN_FAULT(TAKEN_BEFORE_LAST) ? 1u : 0u))
        return;
    if (!v->node->kind->leaf) {
        fan_ready_add(&p->ready, at);
        return;
    }
    if (p->leaves == FAN_NOWHERE) /* leaves are in a list by themselves (E2) */
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

fan_status fan__queue_next(fan_worker *w, fan_error *err)
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
