#include "engine/workers.h"

#include "base/mem.h"

#include <stdlib.h>

/* ---- groups ---- */

typedef struct member {
    const void *group;
    uint32_t at;
} member;

static int by_group(const void *a, const void *b)
{
    uintptr_t one = (uintptr_t)((const member *)a)->group, two = (uintptr_t)((const member *)b)->group;
    return (one > two) - (one < two);
}

/* members: the nodes that have a group, by group. */
static fan_status members(const fan_backward *p, member **out, size_t *n, fan_error *err)
{
    size_t cap = 0;
    for (size_t i = 0; i < p->nnodes; i++) {
        const fan_node *node = p->nodes[i].node;
        const void *group = node->ops->leaf ? NULL : p->config.frontend->group(node);
        if (!group)
            continue;
        if (fan_grow((void **)out, &cap, *n + 1, sizeof **out) != 0)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        (*out)[(*n)++] = (member){group, (uint32_t)i};
    }
    if (*n)
        qsort(*out, *n, sizeof **out, by_group);
    return FAN_OK;
}

static fan_status groups_init(fan_backward *p, fan_task_workers *c, fan_error *err)
{
    member *all = NULL;
    size_t n = 0;
    uint32_t ngroups = 0;
    fan_status status = members(p, &all, &n, err);
    if (status == FAN_OK && n) {
        c->group_of = fan_calloc(p->nnodes * sizeof *c->group_of);
        c->groups = fan_alloc(n * sizeof *c->groups);
        if (!c->group_of || !c->groups)
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    }
    for (size_t i = 0; i < n && status == FAN_OK; i++) {
        if (i == 0 || all[i].group != all[i - 1].group)
            c->groups[ngroups++] = (fan_task_group){false, FAN_NOWHERE, FAN_NOWHERE};
        c->group_of[all[i].at] = ngroups;
    }
    fan_free(all);
    return status;
}

/* ---- devices ---- */

fan_task_device *fan__task_device_of(const fan_task_workers *c, const fan_node *n)
{
    const fan_stream *own = fan_node_stream(n);
    for (uint32_t i = 0; own && i < c->ndevices; i++)
        if (c->devices[i].device == own->device)
            return &c->devices[i];
    return NULL;
}

static fan_status devices_init(const fan_backward *p, fan_task_workers *c, fan_error *err)
{
    size_t cap = 0;
    for (size_t i = 0; i < p->nnodes; i++) {
        const fan_node *n = p->nodes[i].node;
        if (!fan_node_stream(n) || fan__task_device_of(c, n))
            continue;
        if (fan_grow((void **)&c->devices, &cap, c->ndevices + 1, sizeof *c->devices) != 0)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        fan_task_device *d = &c->devices[c->ndevices];
        *d = (fan_task_device){
            .device = fan_node_device(n), .queue.leaves = FAN_NOWHERE, .queue.leaves_last = FAN_NOWHERE};
        d->worker = p->streams.captured ? 0 : c->ndevices % (c->nhelpers + 1);
        if (fan_ready_init(&d->queue.nodes, p->nnodes) != 0)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        c->ndevices++;
    }
    return FAN_OK;
}

/* ---- begun and ended ---- */

static void run_helper(void *arg)
{
    fan_task_helper *h = arg;
    fan_task_workers *c = h->worker.pass->workers;
    fan_leaf_work_for(&c->caller);
    c->work(h); /* the pass, and c, may be gone then */
    fan_leaf_work_for(NULL);
}

static fan_status crew_fill(fan_backward *p, fan_task_workers *c, fan_error *err)
{
    for (uint32_t i = 0; i < c->nhelpers; i++) {
        fan_task_helper *h = &c->helpers[i];
        h->worker = (fan_task_worker){.pass = p, .now = FAN_NOWHERE, .number = i + 1};
        h->job = (fan_thread_job){.work = run_helper, .arg = h};
        FAN_TRY(p->config.frontend->worker_new(&h->around, err));
    }
    FAN_TRY(devices_init(p, c, err));
    return groups_init(p, c, err);
}

fan_status fan__task_workers_begin(fan_backward *p, void (*work)(fan_task_helper *h), fan_error *err)
{
    uint32_t n = p->config.workers - 1;
    fan_task_workers *c;
    if (n >= p->nnodes)
        n = (uint32_t)p->nnodes - 1;
    if (!(c = fan_calloc(sizeof *c + n * sizeof c->helpers[0])))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    if (fan_mutex_init(&c->lock) != 0) {
        fan_free(c);
        return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
    }
    if (fan_cond_init(&c->changed) != 0) {
        fan_mutex_fini(&c->lock);
        fan_free(c);
        return fan_fail(err, FAN_ERR_STATE, "a condition could not be made");
    }
    c->owner_generation = fan_process();
    c->work = work;
    c->caller = fan_leaf_caller_here();
    c->nhelpers = n;
    p->workers = c; /* fan__task_workers_free has it from here on */
    return crew_fill(p, c, err);
}

void fan__task_workers_free(fan_backward *p)
{
    fan_task_workers *c = p->workers;
    if (!c)
        return;
    p->workers = NULL;
    for (uint32_t i = 0; i < c->nhelpers; i++)
        if (c->helpers[i].around)
            p->config.frontend->drop(c->helpers[i].around);
    if (c->error)
        p->config.frontend->drop(c->error);
    fan_cond_fini(&c->changed);
    fan_mutex_fini(&c->lock);
    for (uint32_t i = 0; i < c->ndevices; i++)
        fan_ready_fini(&c->devices[i].queue.nodes);
    fan_free(c->devices);
    fan_free(c->group_of);
    fan_free(c->groups);
    fan_free(c);
}

void fan__task_workers_lock(fan_task_workers *c)
{
    if (c->owner_generation != fan_process()) {
        c->owner_generation = fan_process();
        (void)fan_mutex_adopt(&c->lock);
        fan_cond_adopt(&c->changed);
        c->inside = c->asleep = 0;
        c->forked = c->over = true;
    }
    fan_mutex_lock(&c->lock);
}

/* ---- who waits, who is woken ---- */

fan_status fan__task_workers_wait(const fan_backward *p, fan_error *err)
{
    const fan_engine_frontend *f = p->config.frontend;
    fan_task_workers *c = p->workers;
    fan_status status;
    void *left = f->allow_threads_begin();
    c->asleep++;
    fan_cond_wait(&c->changed, &c->lock);
    c->asleep--;
    fan_mutex_unlock(&c->lock);
    f->allow_threads_end(left);
    status = f->check_signals(err);
    fan__task_workers_lock(c);
    return status;
}

/* idle_helper: one that was not started yet, and that has something to do: NULL: none. */
static fan_task_helper *idle_helper(fan_task_workers *c)
{
    for (uint32_t i = 0; i < c->ndevices; i++) {
        const fan_task_device *d = &c->devices[i];
        if (d->ready && d->worker && c->helpers[d->worker - 1].state == FAN_HELPER_NONE)
            return &c->helpers[d->worker - 1];
    }
    for (uint32_t i = 0; i < c->nhelpers && c->ready && !c->asleep; i++)
        if (c->helpers[i].state == FAN_HELPER_NONE)
            return &c->helpers[i];
    return NULL;
}

/* for_others: whether something is ready that another worker may do, or must. */
static bool for_others(const fan_task_worker *w)
{
    const fan_task_workers *c = w->pass->workers;
    if (c->ready && w->now != FAN_NOWHERE)
        return true;
    for (uint32_t i = 0; i < c->ndevices && c->ready_there; i++)
        if (c->devices[i].ready && !fan__task_device_is_own(c, &c->devices[i], w))
            return true;
    return false;
}

bool fan__task_workers_wake(const fan_task_worker *w)
{
    fan_task_workers *c = w->pass->workers;
    if (!for_others(w))
        return false;
    if (c->asleep)
        fan_cond_broadcast(&c->changed);
    return !c->over && idle_helper(c);
}

/* start_one: true: it was started for a device, and there may be more of these. */
static bool start_one(fan_task_workers *c)
{
    fan_task_helper *h;
    bool started, others;
    fan__task_workers_lock(c);
    h = c->over ? NULL : idle_helper(c);
    if (h) {
        h->state = FAN_HELPER_STARTS;
        c->inside++;
    }
    fan_mutex_unlock(&c->lock);
    if (!h)
        return false;
    started = fan_thread_job_start(&h->job);
    fan__task_workers_lock(c);
    if (h->state == FAN_HELPER_STARTS)
        h->state = started ? FAN_HELPER_STARTED : FAN_HELPER_GONE;
    if (!started)
        c->inside--;
    if (c->over || !started)
        fan_cond_broadcast(&c->changed); /* the caller may wait for this, or has what this one was to do */
    others = c->ready_there != 0;
    fan_mutex_unlock(&c->lock);
    return others;
}

void fan__task_workers_start(fan_backward *p)
{
    while (start_one(p->workers))
        continue;
}

/* ---- failed, left, ended ---- */

void fan__task_workers_failed(fan_task_worker *w, fan_status status, const fan_error *err)
{
    fan_backward *p = w->pass;
    const fan_engine_frontend *f = p->config.frontend;
    const fan_node *n = w->now == FAN_NOWHERE ? NULL : p->nodes[w->now].node;
    fan_task_workers *c = p->workers;
    void *error, *other;
    uint32_t ran;
    fan__task_workers_lock(c);
    c->over = c->failed = true;
    ran = p->ran += w->ran;
    w->ran = w->delivered = false;
    fan_mutex_unlock(&c->lock);
    error = f->error_take(p, n, ran, status, err);
    fan__task_workers_lock(c);
    while ((other = c->error)) {
        c->error = NULL;
        fan_mutex_unlock(&c->lock);
        error = f->error_both(other, error);
        fan__task_workers_lock(c);
    }
    c->error = error;
    if (w->now != FAN_NOWHERE)
        c->busy--;
    w->now = FAN_NOWHERE;
    fan_cond_broadcast(&c->changed);
    fan_mutex_unlock(&c->lock);
}

void fan__task_workers_left(fan_task_helper *h)
{
    fan_task_workers *c = h->worker.pass->workers;
    fan__task_workers_lock(c);
    h->state = FAN_HELPER_GONE;
    c->inside--;
    fan_cond_broadcast(&c->changed);
    fan_mutex_unlock(&c->lock);
}

/* cancel_one: one that was started and may not have begun; unlocked meanwhile. false: there is none. */
static bool cancel_one(fan_task_workers *c)
{
    for (uint32_t i = 0; i < c->nhelpers; i++) {
        fan_task_helper *h = &c->helpers[i];
        bool cancelled;
        if (h->state != FAN_HELPER_STARTED)
            continue;
        h->state = FAN_HELPER_GONE;
        fan_mutex_unlock(&c->lock);
        cancelled = fan_thread_job_cancel(&h->job);
        fan__task_workers_lock(c);
        c->inside -= cancelled;
        return true;
    }
    return false;
}

fan_status fan__task_workers_end(fan_backward *p)
{
    fan_task_workers *c = p->workers;
    fan_error err;
    void *error;
    fan__task_workers_lock(c);
    c->over = true;
    while (c->inside) {
        fan_status status;
        if (cancel_one(c))
            continue;
        status = fan__task_workers_wait(p, &err);
        if (status == FAN_OK)
            continue;
        fan_mutex_unlock(&c->lock); /* Ctrl-C: they come to the end of their nodes all the same */
        fan__task_workers_failed(&p->caller, status, &err);
        fan__task_workers_lock(c);
    }
    fan_mutex_unlock(&c->lock);
    error = c->error;
    c->error = NULL;
    if (!error)
        return FAN_OK;
    p->config.frontend->error_put(error);
    return FAN_ERR_EXTERN;
}
