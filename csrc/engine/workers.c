#include "engine/workers.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdlib.h>

/* ---- groups ---- */

typedef struct member {
    const void *group;
    uint32_t at;
} member;

static int by_group(const void *a, const void *b)
{
    uintptr_t one = (uintptr_t)((const member *)a)->group,
              two = (uintptr_t)((const member *)b)->group;
    return (one > two) - (one < two);
}

/* ---- devices ---- */

/* device_of: the queue for a node on a device; NULL: it runs on the CPU. */
static fan_task_device *device_of(const fan_task_workers *ws, const fan_node *n)
{
    const fan_stream *own = fan_node_stream(n);
    for (uint32_t i = 0; own && i < ws->ndevices; i++)
        if (ws->devices[i].device == own->device)
            return &ws->devices[i];
    return NULL;
}

/* device_is_own: whether this worker runs the device's nodes. */
static bool device_is_own(const fan_task_workers *ws, const fan_task_device *d,
                          const fan_task_worker *w)
{
    bool gone = d->worker && ws->helpers[d->worker - 1].state == FAN_HELPER_GONE;
    return w->number == (gone ? 0 : d->worker);
}

/* ---- begin and free ---- */

fan_status fan__task_workers_begin(fan_backward *p, void (*work)(void *helper), fan_error *err)
{
    uint32_t nhelpers = p->config.workers - 1;
    fan_task_workers *ws;
    if (nhelpers >= p->nnodes)
        nhelpers = (uint32_t)p->nnodes - 1;
    if (!(ws = fan_calloc(sizeof *ws + nhelpers * sizeof ws->helpers[0])))
        return fan__task_no_memory(err);
    if (fan_mutex_init(&ws->lock) != 0) {
        fan_free(ws);
        return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
    }
    if (fan_cond_init(&ws->changed) != 0) {
        fan_mutex_fini(&ws->lock);
        fan_free(ws);
        return fan_fail(err, FAN_ERR_STATE, "a condition could not be made");
    }
    ws->owner_generation = fan_fork_generation();
    ws->caller = fan_leaf_caller_here();
    ws->nhelpers = nhelpers;
    p->workers = ws; /* from here on fan__task_workers_free frees it */
    for (uint32_t i = 0; i < ws->nhelpers; i++) {
        fan_task_helper *h = &ws->helpers[i];
        h->worker = (fan_task_worker){.pass = p, .now = FAN_NOWHERE, .number = i + 1};
        h->job = (fan_thread_job){.work = work, .arg = h};
        FAN_TRY(p->config.frontend->worker_new(&h->around, err));
    }
    size_t cap = 0;
    for (size_t i = 0; i < p->nnodes; i++) {
        const fan_node *node = p->nodes[i].node;
        if (!fan_node_stream(node) || device_of(ws, node))
            continue;
        if (fan_grow((void **)&ws->devices, &cap, ws->ndevices + 1, sizeof *ws->devices) != 0)
            return fan__task_no_memory(err);
        fan_task_device *d = &ws->devices[ws->ndevices];
        *d = (fan_task_device){.device = fan_node_device(node),
                               .queue.leaves = FAN_NOWHERE,
                               .queue.leaves_last = FAN_NOWHERE};
        d->worker = p->streams.captured ? 0 : ws->ndevices % (ws->nhelpers + 1);
        if (fan_ready_init(&d->queue.nodes, p->nnodes) != 0)
            return fan__task_no_memory(err);
        ws->ndevices++;
    }
    member *all = NULL;
    size_t n = 0, room = 0;
    uint32_t ngroups = 0;
    fan_status status = FAN_OK;
    for (size_t i = 0; i < p->nnodes && status == FAN_OK; i++) {
        const fan_node *node = p->nodes[i].node;
        const void *group = node->ops->leaf ? NULL : p->config.frontend->group(node);
        if (group && fan_grow((void **)&all, &room, n + 1, sizeof *all) != 0)
            status = fan__task_no_memory(err);
        else if (group)
            all[n++] = (member){group, (uint32_t)i};
    }
    if (status == FAN_OK && n) {
        qsort(all, n, sizeof *all, by_group);
        ws->group_of = fan_calloc(p->nnodes * sizeof *ws->group_of);
        ws->groups = fan_alloc(n * sizeof *ws->groups);
        if (!ws->group_of || !ws->groups)
            status = fan__task_no_memory(err);
    }
    for (size_t i = 0; i < n && status == FAN_OK; i++) {
        if (i == 0 || all[i].group != all[i - 1].group)
            ws->groups[ngroups++] = (fan_task_group){false, FAN_NOWHERE, FAN_NOWHERE};
        ws->group_of[all[i].at] = ngroups;
    }
    fan_free(all);
    return status;
}

void fan__task_workers_free(fan_backward *p)
{
    fan_task_workers *ws = p->workers;
    p->workers = NULL;
    for (uint32_t i = 0; i < ws->nhelpers; i++)
        if (ws->helpers[i].around)
            p->config.frontend->drop(ws->helpers[i].around);
    if (ws->error)
        p->config.frontend->drop(ws->error);
    fan_cond_fini(&ws->changed);
    fan_mutex_fini(&ws->lock);
    for (uint32_t i = 0; i < ws->ndevices; i++)
        fan_ready_fini(&ws->devices[i].queue.nodes);
    fan_free(ws->devices);
    fan_free(ws->group_of);
    fan_free(ws->groups);
    fan_free(ws);
}

void fan__task_workers_lock(fan_task_workers *ws)
{
    if (ws->owner_generation != fan_fork_generation()) {
        ws->owner_generation = fan_fork_generation();
        (void)fan_mutex_adopt(&ws->lock);
        fan_cond_adopt(&ws->changed);
        ws->inside = ws->asleep = 0;
        ws->forked = ws->over = true;
    }
    fan_mutex_lock(&ws->lock);
}

/* ---- ready nodes; from here on with the lock ---- */

void fan__task_workers_push(fan_backward *p, uint32_t at)
{
    fan_task_workers *ws = p->workers;
    fan_task_device *d = device_of(ws, p->nodes[at].node);
    if (d) {
        d->ready++;
        ws->ready_there++;
    } else {
        ws->ready++;
    }
    fan__queue_push(d ? &d->queue : &p->queue, p->nodes, at);
}

static fan_task_group *group_at(const fan_task_workers *ws, uint32_t at)
{
    return ws->group_of && ws->group_of[at] ? &ws->groups[ws->group_of[at] - 1] : NULL;
}

/* pop: the next node of a queue that may run; FAN_NOWHERE: none. */
static uint32_t pop(fan_backward *p, fan_task_queue *q, uint32_t *ready)
{
    fan_task_workers *ws = p->workers;
    while (*ready) {
        uint32_t at;
        --*ready;
        if (q->leaves != FAN_NOWHERE)
            return fan__queue_pop_leaf(q, p->nodes);
        at = (uint32_t)fan_ready_first(&q->nodes, 0);
        if (FAN_FAULT(NODE_TAKEN_TWICE)) { /* two steps, with the lock released between them */
            fan_mutex_unlock(&ws->lock);
            fan_mutex_lock(&ws->lock);
            if (fan_ready_first(&q->nodes, at) != at)
                return at;
        }
        fan_ready_remove(&q->nodes, at);
        fan_task_group *g = group_at(ws, at);
        if (!g || !g->busy || FAN_FAULT(GROUP_TWICE)) {
            if (g)
                g->busy = true;
            return at;
        }
        if (g->first == FAN_NOWHERE) /* it waits for its group */
            g->first = at;
        else
            p->nodes[g->last].after = at;
        g->last = at;
    }
    return FAN_NOWHERE;
}

/* ---- wait and wake ---- */

/* wait_for_change: releases the lock while it waits, for up to a twentieth of a second. */
static fan_status wait_for_change(const fan_backward *p, fan_error *err)
{
    const fan_engine_frontend *f = p->config.frontend;
    fan_task_workers *ws = p->workers;
    fan_status status;
    void *left = f->allow_threads_begin();
    ws->asleep++;
    fan_cond_wait(&ws->changed, &ws->lock);
    ws->asleep--;
    fan_mutex_unlock(&ws->lock);
    f->allow_threads_end(left);
    status = f->check_signals(err);
    fan__task_workers_lock(ws);
    return status;
}

/* idle_helper: one that has not started and has work to do; NULL: none. */
static fan_task_helper *idle_helper(fan_task_workers *ws)
{
    for (uint32_t i = 0; i < ws->ndevices; i++) {
        const fan_task_device *d = &ws->devices[i];
        if (d->ready && d->worker && ws->helpers[d->worker - 1].state == FAN_HELPER_NONE)
            return &ws->helpers[d->worker - 1];
    }
    for (uint32_t i = 0; i < ws->nhelpers && ws->ready && !ws->asleep; i++)
        if (ws->helpers[i].state == FAN_HELPER_NONE)
            return &ws->helpers[i];
    return NULL;
}

/* wake_others: this worker has a node, or no node is left for it. true: call start_helpers without
 * the lock. */
static bool wake_others(const fan_task_worker *w)
{
    fan_task_workers *ws = w->pass->workers;
    bool work = ws->ready && w->now != FAN_NOWHERE; /* that another worker may or must do */
    for (uint32_t i = 0; i < ws->ndevices && ws->ready_there && !work; i++)
        work = ws->devices[i].ready && !device_is_own(ws, &ws->devices[i], w);
    if (!work)
        return false;
    if (ws->asleep)
        fan_cond_broadcast(&ws->changed);
    return !ws->over && idle_helper(ws);
}

/* start_helpers: those for which there is work. Takes the lock. */
static void start_helpers(fan_task_workers *ws)
{
    bool others = true;
    while (others) {
        fan__task_workers_lock(ws);
        fan_task_helper *h = ws->over ? NULL : idle_helper(ws);
        if (h) {
            h->state = FAN_HELPER_STARTS;
            ws->inside++;
        }
        fan_mutex_unlock(&ws->lock);
        if (!h)
            return;
        bool started = fan_thread_job_start(&h->job);
        fan__task_workers_lock(ws);
        if (h->state == FAN_HELPER_STARTS)
            h->state = started ? FAN_HELPER_STARTED : FAN_HELPER_GONE;
        if (!started)
            ws->inside--;
        if (ws->over || !started)
            /* the caller waits for this helper, or takes over its device */
            fan_cond_broadcast(&ws->changed);
        others = ws->ready_there != 0;
        fan_mutex_unlock(&ws->lock);
    }
}

/* ---- the next node ---- */

fan_status fan__task_progress(fan_backward *p, fan_error *err)
{
    fan_status status = FAN_OK;
    fan__task_lock(p);
    if (!p->progress_busy) {
        p->progress_busy = true;
        while (status == FAN_OK && p->progress_ran != p->ran + 1 &&
               !(p->workers && p->workers->failed)) {
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

fan_status fan__task_workers_next(fan_task_worker *w, fan_error *err)
{
    fan_backward *p = w->pass;
    fan_task_workers *ws = p->workers;
    fan_status status = p->config.frontend->check_signals(err);
    bool start = false;
    fan__task_workers_lock(ws);
    if (w->now != FAN_NOWHERE) {
        const fan_task_node *tn = &p->nodes[w->now];
        for (uint32_t i = 0; w->delivered && i < tn->nedges; i++) {
            uint32_t to = p->edges[tn->edges + i].to;
            if (to != FAN_NOWHERE && fan__dependency_done(&p->nodes[to]))
                fan__task_workers_push(p, to);
        }
        p->ran += w->ran;
        w->delivered = w->ran = false;
        fan_task_group *g = group_at(ws, w->now);
        uint32_t next = g ? g->first : FAN_NOWHERE;
        if (g)
            g->busy = false;
        if (next != FAN_NOWHERE) {
            g->first = p->nodes[next].after;
            p->nodes[next].after = FAN_NOWHERE;
            fan__task_workers_push(p, next);
        }
        ws->busy--;
    }
    if (status == FAN_OK && p->config.progress) {
        /* First wake others for the nodes that this worker cannot begin meanwhile; of a chain there
         * are none. */
        bool others =
            (ws->ready > 1 || (ws->ready && ws->asleep) || ws->ready_there) && wake_others(w);
        w->now = FAN_NOWHERE;
        fan_mutex_unlock(&ws->lock);
        if (others)
            start_helpers(ws);
        status = fan__task_progress(p, err);
        fan__task_workers_lock(ws);
    }
    w->now = FAN_NOWHERE;
    /* waits while other workers run nodes that may make one ready */
    while (status == FAN_OK && !ws->over) {
        for (uint32_t i = 0; i < ws->ndevices && ws->ready_there && w->now == FAN_NOWHERE; i++) {
            fan_task_device *d = &ws->devices[i];
            uint32_t before = d->ready;
            if (!device_is_own(ws, d, w) && !FAN_FAULT(DEVICE_ON_ANY))
                continue;
            /* first these: they work while the CPU's nodes run */
            w->now = pop(p, &d->queue, &d->ready);
            ws->ready_there -= before - d->ready;
        }
        if (w->now == FAN_NOWHERE)
            w->now = pop(p, &p->queue, &ws->ready);
        if (w->now != FAN_NOWHERE) {
            ws->busy++;
            p->nodes[w->now].begun = true;
            break;
        }
        if (ws->busy == 0 && ws->ready_there == 0) { /* so none will be ready */
            ws->over = true;
            fan_cond_broadcast(&ws->changed);
            if (p->ran != p->to_run)
                status = fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
        } else if (FAN_FAULT(WORKER_LEAVES)) {
            break;
        } else if (wake_others(w)) { /* its last node made one ready on another worker's device */
            fan_mutex_unlock(&ws->lock);
            start_helpers(ws);
            fan__task_workers_lock(ws);
        } else {
            status = wait_for_change(p, err);
        }
    }
    if (status == FAN_OK && ws->forked && w->now == FAN_NOWHERE)
        status = fan_fail(err, FAN_ERR_STATE,
                          "a fork inside of a pass of several workers: the child process has only "
                          "the thread that "
                          "forked, so the pass cannot continue here");
    if (ws->ready || ws->ready_there)
        start = wake_others(w);
    fan_mutex_unlock(&ws->lock);
    if (start)
        start_helpers(ws);
    return status;
}

/* ---- failed, left, ended ---- */

void fan__task_workers_failed(fan_task_worker *w, fan_status status, const fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_engine_frontend *f = p->config.frontend;
    const fan_node *n = w->now == FAN_NOWHERE ? NULL : p->nodes[w->now].node;
    fan_task_workers *ws = p->workers;
    void *error, *other;
    uint32_t ran;
    fan__task_workers_lock(ws);
    ws->over = ws->failed = true;
    ran = p->ran += w->ran;
    w->ran = w->delivered = false;
    fan_mutex_unlock(&ws->lock);
    error = f->error_take(p, n, ran, status, err);
    fan__task_workers_lock(ws);
    while ((other = ws->error)) {
        ws->error = NULL;
        fan_mutex_unlock(&ws->lock);
        error = f->error_both(other, error);
        fan__task_workers_lock(ws);
    }
    ws->error = error;
    if (w->now != FAN_NOWHERE)
        ws->busy--;
    w->now = FAN_NOWHERE;
    fan_cond_broadcast(&ws->changed);
    fan_mutex_unlock(&ws->lock);
}

fan_status fan__task_workers_end(fan_backward *p)
{
    fan_task_workers *ws = p->workers;
    fan_error err;
    void *error;
    fan__task_workers_lock(ws);
    ws->over = true;
    while (ws->inside) {
        fan_task_helper *h = NULL; /* its job may not have begun */
        for (uint32_t i = 0; i < ws->nhelpers && !h; i++)
            h = ws->helpers[i].state == FAN_HELPER_STARTED ? &ws->helpers[i] : NULL;
        if (h) {
            h->state = FAN_HELPER_GONE;
            fan_mutex_unlock(&ws->lock);
            bool cancelled = fan_thread_job_cancel(&h->job);
            fan__task_workers_lock(ws);
            ws->inside -= cancelled;
            continue;
        }
        fan_status status = wait_for_change(p, &err);
        if (status == FAN_OK)
            continue;
        fan_mutex_unlock(&ws->lock); /* Ctrl-C; the helpers still finish their nodes */
        fan__task_workers_failed(&p->caller, status, &err);
        fan__task_workers_lock(ws);
    }
    fan_mutex_unlock(&ws->lock);
    error = ws->error;
    ws->error = NULL;
    if (!error)
        return FAN_OK;
    p->config.frontend->error_put(error);
    return FAN_ERR_EXTERN;
}
