/* The workers of a pass (workers.h): they begin, take nodes from the queues, wait and wake each
 * other, and end.
 *
 *   begin, free     the helpers, the queues of devices, the groups
 *   ready nodes     push and pop, with the lock
 *   wait and wake   with the lock, but for the calls out of the engine
 *   the next node   counts what a worker has done, takes its next node
 *   end             errors, and the wait for all helpers */
#include "engine/workers.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdlib.h>

/* ---- devices ---- */

/* device_of: returns the queue for a node on a device.
 * NULL: the node runs on the CPU. */
static fan_pass_device *device_of(const fan_pass_workers *workers, const fan_node *node)
{
    const fan_stream *own = fan_node_stream(node);
    if (!own)
        return NULL;
    for (uint32_t i = 0; i < workers->ndevices; i++) {
        if (workers->devices[i].device == own->device)
            return &workers->devices[i];
    }
    return NULL;
}

/* device_is_own: returns whether this worker runs the device's nodes. */
static bool device_is_own(const fan_pass_workers *workers, const fan_pass_device *device,
                          const fan_pass_worker *worker)
{
    uint32_t number = device->worker;
    if (number && workers->helpers[number - 1].state == FAN_HELPER_GONE)
        number = 0;
    return worker->number == number;
}

/* ---- begin and free ---- */

/* begin_devices: makes a queue for each device of the pass's nodes. */
static fan_status begin_devices(const fan_pass *pass, fan_pass_workers *workers, fan_error *err)
{
    size_t cap = 0;
    for (size_t i = 0; i < pass->nnodes; i++) {
        const fan_node *node = pass->nodes[i].node;
        uint32_t n = workers->ndevices;
        if (!fan_node_stream(node) || device_of(workers, node))
            continue;
        if (fan_grow((void **)&workers->devices, &cap, n + 1, sizeof(fan_pass_device)) != 0)
            return fan_fail_memory(err);
        fan_pass_device *device = &workers->devices[n];
        *device = (fan_pass_device){
            .device = fan_node_device(node),
            .queue.leaves = FAN_NOWHERE,
            .queue.leaves_last = FAN_NOWHERE,
        };
        if (!pass->streams.captured)
            device->worker = n % (workers->nhelpers + 1);
        if (fan_ready_init(&device->queue.nodes, pass->nnodes) != 0)
            return fan_fail_memory(err);
        workers->ndevices++;
    }
    return FAN_OK;
}

/* A node of a group. */
typedef struct member {
    const void *group;
    uint32_t at;
} member;

static int by_group(const void *a, const void *b)
{
    const member *first = a;
    const member *second = b;
    uintptr_t one = (uintptr_t)first->group;
    uintptr_t two = (uintptr_t)second->group;
    return (one > two) - (one < two);
}

/* begin_groups: makes the groups from their members, in any order. */
static fan_status begin_groups(const fan_pass *pass, fan_pass_workers *workers, member *members,
                               size_t n, fan_error *err)
{
    const void *last = NULL;
    uint32_t ngroups = 0;
    if (n == 0)
        return FAN_OK;
    qsort(members, n, sizeof *members, by_group);
    workers->group_of = fan_calloc(pass->nnodes * sizeof *workers->group_of);
    workers->groups = fan_alloc(n * sizeof *workers->groups);
    if (!workers->group_of || !workers->groups)
        return fan_fail_memory(err);
    for (size_t i = 0; i < n; i++) {
        if (members[i].group != last)
            workers->groups[ngroups++] = (fan_pass_group){false, FAN_NOWHERE, FAN_NOWHERE};
        last = members[i].group;
        workers->group_of[members[i].at] = ngroups;
    }
    return FAN_OK;
}

fan_status fan__pass_workers_begin(fan_pass *pass, void (*work)(void *helper), fan_error *err)
{
    uint32_t nhelpers = pass->config.workers - 1;
    if (nhelpers >= pass->nnodes)
        nhelpers = (uint32_t)pass->nnodes - 1;
    fan_pass_workers *workers = fan_calloc(sizeof *workers + nhelpers * sizeof(fan_pass_helper));
    if (!workers)
        return fan_fail_memory(err);
    fan_status status = fan__leaf_lock_init(&workers->lock, &workers->changed, err);
    if (status != FAN_OK) {
        fan_free(workers);
        return status;
    }
    workers->owner_generation = fan_fork_generation();
    workers->caller = fan_leaf_caller_here();
    workers->nhelpers = nhelpers;
    pass->workers = workers; /* from here on fan__pass_workers_free frees it */
    for (uint32_t i = 0; i < nhelpers; i++) {
        fan_pass_helper *helper = &workers->helpers[i];
        helper->worker = (fan_pass_worker){.pass = pass, .now = FAN_NOWHERE, .number = i + 1};
        helper->job = (fan_thread_job){.work = work, .arg = helper};
        FAN_TRY(pass->frontend->worker_new(&helper->around, err));
    }
    FAN_TRY(begin_devices(pass, workers, err));

    member *members = NULL;
    size_t n = 0;
    size_t cap = 0;
    for (uint32_t i = 0; i < pass->nnodes && status == FAN_OK; i++) {
        const fan_node *node = pass->nodes[i].node;
        const void *group = node->ops->leaf ? NULL : pass->frontend->group(node);
        if (!group)
            continue;
        if (fan_grow((void **)&members, &cap, n + 1, sizeof *members) != 0)
            status = fan_fail_memory(err);
        else
            members[n++] = (member){group, i};
    }
    if (status == FAN_OK)
        status = begin_groups(pass, workers, members, n, err);
    fan_free(members);
    return status;
}

void fan__pass_workers_free(fan_pass *pass)
{
    fan_pass_workers *workers = pass->workers;
    pass->workers = NULL;
    for (uint32_t i = 0; i < workers->nhelpers; i++) {
        if (workers->helpers[i].around)
            pass->frontend->drop(workers->helpers[i].around);
    }
    if (workers->error)
        pass->frontend->drop(workers->error);
    fan_cond_fini(&workers->changed);
    fan_mutex_fini(&workers->lock);
    for (uint32_t i = 0; i < workers->ndevices; i++)
        fan_ready_fini(&workers->devices[i].queue.nodes);
    fan_free(workers->devices);
    fan_free(workers->group_of);
    fan_free(workers->groups);
    fan_free(workers);
}

void fan__pass_workers_lock(fan_pass_workers *workers)
{
    if (workers->owner_generation != fan_fork_generation()) {
        workers->owner_generation = fan_fork_generation();
        (void)fan_mutex_adopt(&workers->lock);
        fan_cond_adopt(&workers->changed);
        workers->inside = 0;
        workers->asleep = 0;
        workers->forked = true;
        workers->over = true;
    }
    fan_mutex_lock(&workers->lock);
}

/* ---- ready nodes; from here on with the lock ---- */

void fan__pass_workers_push(fan_pass *pass, uint32_t at)
{
    fan_pass_workers *workers = pass->workers;
    fan_pass_device *device = device_of(workers, pass->nodes[at].node);
    if (device) {
        device->ready++;
        workers->ready_there++;
        fan__queue_push(&device->queue, pass->nodes, at);
    } else {
        workers->ready++;
        fan__queue_push(&pass->queue, pass->nodes, at);
    }
}

/* group_at: returns a node's group; NULL: none. */
static fan_pass_group *group_at(const fan_pass_workers *workers, uint32_t at)
{
    if (!workers->group_of || !workers->group_of[at])
        return NULL;
    return &workers->groups[workers->group_of[at] - 1];
}

/* group_enter: marks the node's group as busy.
 * false: another node of the group runs, and this one waits for it. */
static bool group_enter(fan_pass *pass, uint32_t at)
{
    fan_pass_group *group = group_at(pass->workers, at);
    if (!group)
        return true;
    if (!group->busy || FAN_FAULT(GROUP_TWICE)) {
        group->busy = true;
        return true;
    }
    if (group->first == FAN_NOWHERE)
        group->first = at;
    else
        pass->nodes[group->last].after = at;
    group->last = at;
    return false;
}

/* group_leave: makes the next of the group's nodes that wait ready. */
static void group_leave(fan_pass *pass, uint32_t at)
{
    fan_pass_group *group = group_at(pass->workers, at);
    if (!group)
        return;
    group->busy = false;
    uint32_t next = group->first;
    if (next == FAN_NOWHERE)
        return;
    group->first = pass->nodes[next].after;
    pass->nodes[next].after = FAN_NOWHERE;
    fan__pass_workers_push(pass, next);
}

/* pop: removes and returns the next node of a queue that may run.
 * FAN_NOWHERE: there is none. */
static uint32_t pop(fan_pass *pass, fan_pass_queue *queue, uint32_t *ready)
{
    while (*ready) {
        --*ready;
        if (queue->leaves != FAN_NOWHERE)
            return fan__queue_pop_leaf(queue, pass->nodes);
        uint32_t at = (uint32_t)fan_ready_first(&queue->nodes, 0);
        if (FAN_FAULT(NODE_TAKEN_TWICE)) { /* two steps, with the lock released between them */
            fan__pass_workers_unlock(pass->workers);
            fan_mutex_lock(&pass->workers->lock);
            if (fan_ready_first(&queue->nodes, at) != at)
                return at;
        }
        fan_ready_remove(&queue->nodes, at);
        if (group_enter(pass, at))
            return at;
    }
    return FAN_NOWHERE;
}

/* take_node: takes a node, of this worker's devices first: they work while the CPU's nodes run. */
static void take_node(fan_pass_worker *worker)
{
    fan_pass *pass = worker->pass;
    fan_pass_workers *workers = pass->workers;
    for (uint32_t i = 0; i < workers->ndevices && workers->ready_there; i++) {
        fan_pass_device *device = &workers->devices[i];
        uint32_t before = device->ready;
        if (!device_is_own(workers, device, worker) && !FAN_FAULT(DEVICE_ON_ANY))
            continue;
        worker->now = pop(pass, &device->queue, &device->ready);
        workers->ready_there -= before - device->ready;
        if (worker->now != FAN_NOWHERE)
            return;
    }
    worker->now = pop(pass, &pass->queue, &workers->ready);
}

/* ---- wait and wake ---- */

/* wait_for_change: releases the lock while it waits, for up to a twentieth of a second. */
static fan_status wait_for_change(const fan_pass *pass, fan_error *err)
{
    fan_pass_workers *workers = pass->workers;
    void *left = pass->frontend->allow_threads_begin();
    workers->asleep++;
    fan_cond_wait(&workers->changed, &workers->lock);
    workers->asleep--;
    fan__pass_workers_unlock(workers);
    pass->frontend->allow_threads_end(left);
    fan_status status = pass->frontend->check_signals(err);
    fan__pass_workers_lock(workers);
    return status;
}

/* find_helper: returns the first helper in this state; NULL: none. */
static fan_pass_helper *find_helper(fan_pass_workers *workers, fan_helper_state state)
{
    for (uint32_t i = 0; i < workers->nhelpers; i++) {
        if (workers->helpers[i].state == state)
            return &workers->helpers[i];
    }
    return NULL;
}

/* idle_helper: returns a helper that has not started and has work to do; NULL: none. */
static fan_pass_helper *idle_helper(fan_pass_workers *workers)
{
    for (uint32_t i = 0; i < workers->ndevices; i++) {
        const fan_pass_device *device = &workers->devices[i];
        if (!device->ready || !device->worker)
            continue;
        fan_pass_helper *helper = &workers->helpers[device->worker - 1];
        if (helper->state == FAN_HELPER_NONE)
            return helper;
    }
    if (!workers->ready || workers->asleep)
        return NULL;
    return find_helper(workers, FAN_HELPER_NONE);
}

/* wake_others: wakes workers for what this one does not do: it has a node, or none is left for it.
 * true: call start_helpers without the lock. */
static bool wake_others(const fan_pass_worker *worker)
{
    fan_pass_workers *workers = worker->pass->workers;
    bool work = workers->ready && worker->now != FAN_NOWHERE; /* another worker may or must do it */
    for (uint32_t i = 0; i < workers->ndevices && workers->ready_there && !work; i++) {
        const fan_pass_device *device = &workers->devices[i];
        work = device->ready && !device_is_own(workers, device, worker);
    }
    if (!work)
        return false;
    if (workers->asleep)
        fan_cond_broadcast(&workers->changed);
    return !workers->over && idle_helper(workers);
}

/* start_helpers: starts the helpers for which there is work. Takes the lock. */
static void start_helpers(fan_pass_workers *workers)
{
    bool others = true;
    while (others) {
        fan__pass_workers_lock(workers);
        fan_pass_helper *helper = workers->over ? NULL : idle_helper(workers);
        if (!helper) {
            fan__pass_workers_unlock(workers);
            return;
        }
        helper->state = FAN_HELPER_STARTS;
        workers->inside++;
        fan__pass_workers_unlock(workers);

        bool started = fan_thread_job_start(&helper->job);
        fan__pass_workers_lock(workers);
        if (helper->state == FAN_HELPER_STARTS)
            helper->state = started ? FAN_HELPER_STARTED : FAN_HELPER_GONE;
        if (!started)
            workers->inside--;
        if (workers->over || !started) /* the caller waits for it, or takes over its device */
            fan_cond_broadcast(&workers->changed);
        others = workers->ready_there != 0;
        fan__pass_workers_unlock(workers);
    }
}

/* ---- the next node ---- */

/* progress_due: returns whether a node has run since the last call, and no worker has failed. */
static bool progress_due(const fan_pass *pass)
{
    if (pass->workers && pass->workers->failed)
        return false;
    return pass->progress_ran != pass->ran + 1;
}

fan_status fan__pass_progress(fan_pass *pass, fan_error *err)
{
    const fan_pass_config *config = &pass->config;
    fan_status status = FAN_OK;
    fan__pass_lock(pass);
    if (!pass->progress_busy) {
        pass->progress_busy = true;
        while (status == FAN_OK && progress_due(pass)) {
            uint32_t ran = pass->ran;
            pass->progress_ran = ran + 1;
            fan__pass_unlock(pass);
            status = config->frontend->progress(config->progress, ran, pass->to_run, err);
            fan__pass_lock(pass);
        }
        pass->progress_busy = false;
    }
    fan__pass_unlock(pass);
    return status;
}

/* count_node: counts what the worker's node has done. */
static void count_node(fan_pass_worker *worker)
{
    fan_pass *pass = worker->pass;
    const fan_pass_node *entry = fan__worker_node(worker);
    for (uint32_t i = 0; worker->delivered && i < entry->nedges; i++) {
        uint32_t to = pass->edges[entry->edges + i].to;
        if (to != FAN_NOWHERE && fan__dependency_done(&pass->nodes[to]))
            fan__pass_workers_push(pass, to);
    }
    pass->ran += worker->ran;
    worker->delivered = false;
    worker->ran = false;
    group_leave(pass, worker->now);
    pass->workers->busy--;
}

/* report_progress: calls progress=, with the lock released. First it wakes others for the nodes
 * that this worker cannot begin meanwhile; of a chain there are none. */
static fan_status report_progress(fan_pass_worker *worker, fan_error *err)
{
    fan_pass_workers *workers = worker->pass->workers;
    bool others = workers->ready > 1 || workers->ready_there;
    if (workers->ready && workers->asleep)
        others = true;
    others = others && wake_others(worker);
    worker->now = FAN_NOWHERE;
    fan__pass_workers_unlock(workers);
    if (others)
        start_helpers(workers);
    fan_status status = fan__pass_progress(worker->pass, err);
    fan__pass_workers_lock(workers);
    return status;
}

/* take_or_wait: takes the next node; waits while other workers run nodes that may make one
 * ready. */
static fan_status take_or_wait(fan_pass_worker *worker, fan_error *err)
{
    fan_pass *pass = worker->pass;
    fan_pass_workers *workers = pass->workers;
    while (!workers->over) {
        take_node(worker);
        if (worker->now != FAN_NOWHERE) {
            workers->busy++;
            fan__worker_node(worker)->begun = true;
            return FAN_OK;
        }
        if (workers->busy == 0 && workers->ready_there == 0) { /* so none will be ready */
            workers->over = true;
            fan_cond_broadcast(&workers->changed);
            if (pass->ran != pass->to_run)
                return fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
        } else if (FAN_FAULT(WORKER_LEAVES)) {
            return FAN_OK;
        } else if (wake_others(worker)) { /* its last node made one ready on another's device */
            fan__pass_workers_unlock(workers);
            start_helpers(workers);
            fan__pass_workers_lock(workers);
        } else {
            FAN_TRY(wait_for_change(pass, err));
        }
    }
    return FAN_OK;
}

fan_status fan__pass_workers_next(fan_pass_worker *worker, fan_error *err)
{
    const fan_pass *pass = worker->pass;
    fan_pass_workers *workers = pass->workers;
    fan_status status = pass->frontend->check_signals(err);
    bool start = false;
    fan__pass_workers_lock(workers);
    if (worker->now != FAN_NOWHERE)
        count_node(worker);
    if (status == FAN_OK && pass->config.progress)
        status = report_progress(worker, err);
    worker->now = FAN_NOWHERE;
    if (status == FAN_OK)
        status = take_or_wait(worker, err);
    if (status == FAN_OK && workers->forked && worker->now == FAN_NOWHERE) {
        status = fan_fail(err, FAN_ERR_STATE,
                          "a fork inside of a pass of several workers: the child process has only "
                          "the thread that forked, so the pass cannot continue here");
    }
    if (workers->ready || workers->ready_there)
        start = wake_others(worker);
    fan__pass_workers_unlock(workers);
    if (start)
        start_helpers(workers);
    return status;
}

/* ---- failed, left, ended ---- */

void fan__pass_workers_failed(fan_pass_worker *worker, fan_status status, const fan_error *err)
{
    fan_pass *pass = worker->pass;
    fan_pass_workers *workers = pass->workers;
    const fan_node *node = NULL;
    if (worker->now != FAN_NOWHERE)
        node = fan__worker_node(worker)->node;
    fan__pass_workers_lock(workers);
    workers->over = true;
    workers->failed = true;
    pass->ran += worker->ran;
    uint32_t ran = pass->ran;
    worker->ran = false;
    worker->delivered = false;
    fan__pass_workers_unlock(workers);

    void *error = pass->frontend->error_take(pass, node, ran, status, err);
    fan__pass_workers_lock(workers);
    while (workers->error) {
        void *other = workers->error;
        workers->error = NULL;
        fan__pass_workers_unlock(workers);
        error = pass->frontend->error_both(other, error);
        fan__pass_workers_lock(workers);
    }
    workers->error = error;
    if (node)
        workers->busy--;
    worker->now = FAN_NOWHERE;
    fan_cond_broadcast(&workers->changed);
    fan__pass_workers_unlock(workers);
}

fan_status fan__pass_workers_end(fan_pass *pass)
{
    fan_pass_workers *workers = pass->workers;
    fan_error err;
    fan__pass_workers_lock(workers);
    workers->over = true;
    while (workers->inside) {
        fan_pass_helper *helper = find_helper(workers, FAN_HELPER_STARTED);
        if (helper) { /* its job may not have begun */
            helper->state = FAN_HELPER_GONE;
            fan__pass_workers_unlock(workers);
            bool cancelled = fan_thread_job_cancel(&helper->job);
            fan__pass_workers_lock(workers);
            workers->inside -= cancelled;
            continue;
        }
        fan_status status = wait_for_change(pass, &err);
        if (status == FAN_OK)
            continue;
        fan__pass_workers_unlock(workers); /* Ctrl-C; the helpers still finish their nodes */
        fan__pass_workers_failed(&pass->caller, status, &err);
        fan__pass_workers_lock(workers);
    }
    fan__pass_workers_unlock(workers);
    void *error = workers->error;
    workers->error = NULL;
    if (!error)
        return FAN_OK;
    pass->frontend->error_put(error);
    return FAN_ERR_EXTERN;
}
