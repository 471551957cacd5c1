#include "engine/streams.h"

#include "base/fault.h"
#include "base/mem.h"
#include "buffer/buffer.h"


fan_status fan_task_streams_begin(fan_backward *p, fan_error *err)
{
    fan_task_streams *s = &p->streams;
    uint64_t id = 0;
    FAN_TRY(fan_stream_set_now(&s->caller, err));
    for (size_t i = 0; s->caller && i < s->caller->n && !id; i++) {
        FAN_TRY(fan_stream_capture(s->caller->all[i], &id, err));
        s->captured = id ? s->caller->all[i] : NULL;
    }
    return FAN_OK;
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

static void tail_fini(const fan_backward *p, fan_task_tail *t)
{
    list_fini(&t->streams);
    list_fini(&t->waited);
    for (size_t i = 0; i < t->nvalues; i++)
        p->config.frontend->place_drop(&t->values[i]);
    fan_stream_drop(t->caller);
    fan_free(t->values);
}

void fan_task_streams_fini(fan_backward *p)
{
    fan_task_streams *s = &p->streams;
    for (size_t i = 0; i < s->n; i++)
        tail_fini(p, &s->tails[i]);
    fan_free(s->tails);
    list_fini(&s->pulled);
    fan_stream_set_drop(s->caller);
    *s = (fan_task_streams){0};
}

fan_run_streams fan__task_run_streams(const fan_backward *p, const fan_node *n)
{
    fan_run_streams on = {n->streams, fan_node_stream(n)};
    if (!p->streams.captured || !fan_get_capture_redirect())
        return on;
    fan_stream *instead =
        on.own && on.own->handle == FAN_LEGACY ? fan_stream_set_find(p->streams.caller, on.own->device) : NULL;
    if (instead || !on.set)
        on = (fan_run_streams){p->streams.caller, instead};
    return on;
}

/* ---- S20 ---- */

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

/* place_for_caller: a gradient's value, and the caller's stream on its device; called with other streams current. */
static fan_status place_for_caller(const fan_backward *p, void *gradient, fan_value *v, fan_stream **caller,
                                   fan_error *err)
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

/* before_write: `on` waits for the caller's stream, once in a pass. It is listed after the wait, since another worker
 * may be here too. */
static fan_status before_write(fan_backward *p, fan_stream *caller, fan_stream *on, fan_error *err)
{
    FAN_TRY(tail_add(p, caller, on, err));
    if (caller == on || FAN_FAULT(LEAF_WITHOUT_WAIT) || list_has(&tail_of(p, caller)->waited, on))
        return FAN_OK;
    FAN_TRY(wait_for(on, caller, err));
    return list_add(&tail_of(p, caller)->waited, on, err);
}

fan_status fan_task_leaf_begin(fan_backward *p, void *sum, const fan_run_streams *where, fan_stream **on,
                               fan_error *err)
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
        status = before_write(p, caller, *on, err);
        p->config.frontend->place_drop(&same);
        fan_stream_drop(caller);
    }
    p->config.frontend->place_drop(&v);
    fan_stream_drop(current);
    return status;
}

/* keep: the caller gets a value of `on`; NULL: of the stream that is current now. */
static fan_status keep(fan_backward *p, void *gradient, fan_stream *on, fan_error *err)
{
    fan_stream *current = NULL, *caller = NULL;
    fan_value v, same;
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

fan_status fan_task_leaf_end(fan_backward *p, fan_node *leaf, fan_stream *on, fan_error *err)
{
    void *grad = on ? p->config.frontend->leaf_grad(leaf) : NULL;
    fan_status status = grad ? keep(p, grad, on, err) : FAN_OK;
    if (grad)
        p->config.frontend->drop(grad);
    return status;
}

fan_status fan_task_keep(fan_backward *p, void *sum, const fan_run_streams *where, fan_error *err)
{
    return sum ? keep(p, sum, where->own, err) : FAN_OK;
}

fan_status fan_task_produced_nothing(fan_backward *p, const fan_run_streams *where, fan_error *err)
{
    fan_streams_outer outer;
    if (!where->own)
        return FAN_OK;
    fan_streams_enter(p->streams.caller, &outer);
    fan_stream *caller = fan_stream_current(where->own->device);
    fan_streams_leave(&outer);
    if (!caller)
        return fan__task_no_memory(err);
    fan_status status = tail_add(p, caller, where->own, err);
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
        one =
            fan_pass_end(t->caller, t->streams.all, t->streams.n, t->values, t->nvalues, status == FAN_OK ? err : NULL);
        status = status == FAN_OK ? one : status;
    }
    for (size_t i = 0; i < p->streams.n; i++)
        tail_fini(p, &p->streams.tails[i]);
    p->streams.n = 0;
    return status;
}

fan_status fan_backward_join(fan_backward *p, fan_error *err)
{
    FAN_TRY(end_tails(p, err));
    list_fini(&p->streams.pulled); /* the tails have waited for all of them */
    p->streams.pulled = (fan_stream_list){0};
    return FAN_OK;
}

/* ---- capture ---- */

fan_status fan_task_join_capture(fan_backward *p, const fan_run_streams *where, fan_error *err)
{
    uint64_t id;
    if (!p->streams.captured || !where->own || where->own->handle == FAN_LEGACY ||
        where->own->device->backend != p->streams.captured->device->backend)
        return FAN_OK;
    FAN_TRY(list_add(&p->streams.pulled, where->own, err));
    FAN_TRY(fan_stream_capture(where->own, &id, err));
    return id ? FAN_OK : wait_for(where->own, p->streams.captured, err);
}

void fan_task_join_failed(fan_backward *p)
{
    (void)end_tails(p, NULL);
    for (size_t i = 0; i < p->streams.pulled.n; i++)
        if (p->streams.pulled.all[i] != p->streams.captured)
            (void)wait_for(p->streams.captured, p->streams.pulled.all[i], NULL);
}
