#include "engine/timeline.h"

#include "base/thread.h"
#include "engine/streams.h"

static void put(const fan_task_worker *w, uint64_t begin_ns)
{
    const fan_node *n = w->pass->nodes[w->now].node;
    const fan_stream *own = fan_task_run_streams(w->pass, n).own;
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

void fan__timeline_begin(fan_task_timeline *t, const fan_task_worker *w)
{
    const fan_trace_work work = {w->pass->id, w->pass->nodes[w->now].node->number, w->number};
    *t =
        (fan_task_timeline){.thread = fan_thread_id(), .begin_ns = fan_trace_ns(), .outer = fan_trace_work_begin(work)};
}

void fan__timeline_end(fan_task_timeline *t, const fan_task_worker *w)
{
    const uint64_t begin_ns = t->begin_ns;
    if (begin_ns == 0)
        return;
    t->begin_ns = 0;
    if (w->now != FAN_NOWHERE)
        put(w, begin_ns);
    if (t->thread == fan_thread_id())
        (void)fan_trace_work_begin(t->outer);
}

void fan__timeline_gradient(const fan_backward *p, uint32_t to, uint32_t slot, uint32_t key)
{
    const fan_trace_line line = {.kind = FAN_TRACE_GRADIENT,
                                 .device = -1,
                                 .slot = (int32_t)slot,
                                 .key = key,
                                 .to = p->nodes[to].node->number,
                                 .start_us = -1,
                                 .end_us = -1};
    fan_trace_put(&line);
}
