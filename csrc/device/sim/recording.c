/* Captures of streams that are in progress: the calls that they refuse, the commands that they
 * record, their end and their state. */
#include "base/mem.h"
#include "device/sim/machine.h"

#include <string.h>

void fan__recording_drop(fan_sim_recording *r)
{
    if (!r || --r->refs)
        return;
    fan_capture_fini(&r->capture);
    fan_free(r);
}

fan_status fan__recording_refuse(const fan_sim_queue *queue, int code, const char *what,
                                 fan_error *err)
{
    if (code == 0)
        return FAN_OK;
    if (code < 0)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a capture");
    return fan_fail_code(
        err, FAN_ERR_CAPTURE, code, "%s on stream %llu of sim:%d: %s (CUDA's code %d)", what,
        (unsigned long long)queue->handle, queue->device, fan_capture_words(code), code);
}

/* recording_break: breaks a capture because of a call on `queue`, and refuses the call. */
static fan_status recording_break(const fan_sim_queue *queue, fan_sim_recording *broken, int code,
                                  const char *what, fan_error *err)
{
    return fan__recording_refuse(queue, fan_capture_break(&broken->capture, code), what, err);
}

fan_status fan__recording_none(const fan_sim_queue *queue, const char *what, fan_error *err)
{
    if (!queue->recording)
        return FAN_OK;
    return recording_break(queue, queue->recording, FAN_CAPTURE_UNSUPPORTED, what, err);
}

fan_status fan__recording_has_time(const fan_sim_event *ev, const fan_event *e, const char *what,
                                   fan_error *err)
{
    if (!ev->recording)
        return FAN_OK;
    fan_capture_run *capture = &ev->recording->capture;
    int code = FAN_CAPTURE_EVENT;
    if (!capture->ended)
        code = fan_capture_break(capture, FAN_CAPTURE_EVENT);
    return fan_fail_code(err, FAN_ERR_CAPTURE, code,
                         "%s of an event of sim:%d: %s (CUDA's code %d)", what, e->device->index,
                         fan_capture_words(code), code);
}

fan_sim_command *fan__command_new(size_t bytes)
{
    fan_sim_command *c = fan_alloc(bytes);
    if (c)
        memset(c, 0, sizeof *c);
    return c;
}

void fan__command_put(fan_sim_graph *g, fan_sim_command *c)
{
    *g->tail = c;
    g->tail = &c->next;
}

fan_status fan__recording_record(fan_sim_event *ev, fan_sim_queue *queue, fan_error *err)
{
    fan_sim_recording *r = queue->recording;
    fan_sim_command *c = fan__command_new(sizeof *c);
    if (!c)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a capture");
    int code = fan_capture_record(&r->capture, queue->member, &ev->place);
    if (code) {
        fan_free(c);
        return fan__recording_refuse(queue, code, "record", err);
    }
    fan__recording_drop(ev->recording);
    ev->recording = r;
    r->refs++;
    ev->number = r->graph->events++;
    c->kind = FAN_COMMAND_RECORD;
    c->member = queue->member;
    c->event = ev->number;
    fan__command_put(r->graph, c);
    return FAN_OK;
}

fan_status fan__recording_wait(fan_sim_queue *queue, const fan_sim_event *ev, bool *done,
                               fan_error *err)
{
    fan_sim_recording *mine = queue->recording;
    fan_sim_recording *theirs = ev->recording;
    *done = mine || theirs;
    if (!*done)
        return FAN_OK;
    if (!theirs && !ev->point.queue) /* an event that was never recorded: no wait */
        return FAN_OK;
    if (!theirs)
        return recording_break(queue, mine, FAN_CAPTURE_ISOLATION, "wait", err);
    if (theirs->capture.ended) {
        if (mine)
            fan_capture_break(&mine->capture, FAN_CAPTURE_EVENT);
        return fan__recording_refuse(queue, FAN_CAPTURE_EVENT, "wait", err);
    }
    if (mine && mine != theirs) {
        fan_capture_break(&mine->capture, FAN_CAPTURE_MERGE);
        return recording_break(queue, theirs, FAN_CAPTURE_MERGE, "wait", err);
    }
    fan_sim_graph *g = theirs->graph;
    fan_sim_command *c = fan__command_new(sizeof *c);
    int code = -1;
    if (c && mine)
        code = fan_capture_wait(&mine->capture, queue->member, &ev->place);
    else if (c && queue->legacy)
        code = fan_capture_break(&theirs->capture, FAN_CAPTURE_IMPLICIT);
    else if (c && fan_grow((void **)&g->device, &g->device_cap, (size_t)g->members + 1,
                           sizeof *g->device) == 0)
        code = fan_capture_pull(&theirs->capture, &ev->place, &queue->member);
    if (code) {
        fan_free(c);
        return fan__recording_refuse(queue, code, "wait", err);
    }
    if (!mine) { /* `queue` has become a member of the capture whose event it waits for */
        g->device[g->members++] = queue->device;
        queue->recording = theirs;
        theirs->refs++;
        queue->refs++; /* until the capture ends */
    }
    c->kind = FAN_COMMAND_WAIT;
    c->member = queue->member;
    c->event = ev->number;
    fan__command_put(g, c);
    return FAN_OK;
}

void fan__graph_free(fan_sim_graph *g)
{
    for (fan_sim_command *c = g->head, *next; c; c = next) {
        next = c->next;
        if (c->kind == FAN_COMMAND_WORK && c->kernel.fini)
            c->kernel.fini(c->kernel.ctx);
        fan_free(c);
    }
    fan_free(g->device);
    fan_free(g->queues);
    fan_free(g->blocks);
    fan_free(g);
}

void fan__recording_drop_all(fan_sim *machine)
{
    while (machine->recordings) {
        fan_sim_recording *r = machine->recordings;
        machine->recordings = r->next;
        for (size_t i = 0; i < machine->nqueues; i++) {
            if (machine->queues[i]->recording == r) {
                machine->queues[i]->recording = NULL;
                r->refs--;
            }
        }
        r->capture.ended = true;
        fan__graph_free(r->graph);
        fan__recording_drop(r);
    }
}

int fan_sim_capture_state(fan_sim *machine, fan_stream *s, uint64_t *id)
{
    fan__sim_lock(machine);
    fan__sim_access_state(machine, OF_CAPTURES, FAN_SCHED_READ);
    const fan_sim_recording *r = fan__queue_of(s)->recording;
    uint64_t capture = 0;
    int state = 0;
    if (r) {
        capture = r->capture.id;
        state = r->capture.broken ? 2 : 1;
    }
    if (id)
        *id = capture;
    fan__sim_unlock(machine);
    return state;
}

fan_status fan__recording_break_all(fan_sim *machine, const char *call, bool always,
                                    fan_capture_mode mine, fan_error *err)
{
    fan_status status = FAN_OK;
    for (fan_sim_recording *r = machine->recordings; r; r = r->next) {
        if (!always && !fan_capture_forbids(&r->capture, fan_thread_id(), mine))
            continue;
        int code = fan_capture_break(&r->capture, FAN_CAPTURE_UNSUPPORTED);
        status = fan_fail_code(err, FAN_ERR_CAPTURE, code, "%s: %s (CUDA's code %d)", call,
                               fan_capture_words(code), code);
    }
    return status;
}

#ifdef FAN_TEST
fan_status fan_sim_unsafe(fan_sim *machine, const char *call, bool always, fan_error *err)
{
    fan__sim_lock(machine);
    fan__sim_access_state(machine, OF_CAPTURES,
                          machine->recordings ? FAN_SCHED_WRITE : FAN_SCHED_READ);
    fan_status status = fan__recording_break_all(machine, call, always, FAN_CAPTURE_GLOBAL, err);
    fan__sim_unlock(machine);
    return status;
}
#endif
