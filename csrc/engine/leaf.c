/* The plan of a leaf's accumulation (leaf.h), circles among the threads that wait for leaves, and
 * the claims of leaves. */
#include "engine/leaf.h"

#include "base/fault.h"

static fan_leaf_plan plan(fan_leaf_action action, unsigned rule)
{
    return (fan_leaf_plan){action, rule};
}

/* plan_first: the leaf has no gradient yet. */
static fan_leaf_plan plan_first(const fan_leaf_facts *facts)
{
    if (facts->sum == FAN_LEAF_OTHER)
        return plan(FAN_LEAF_STEAL, 4); /* it cannot be copied, or needs no copy */
    if (!facts->unshared)
        return plan(FAN_LEAF_COPY, 4);
    if (facts->sum == FAN_LEAF_SPARSE)
        return plan(FAN_LEAF_STEAL, 3);
    if (!facts->same_layout || facts->recording)
        return plan(FAN_LEAF_COPY, 4);
    return plan(FAN_LEAF_STEAL, 2);
}

fan_leaf_plan fan_plan_leaf(const fan_leaf_facts *facts)
{
    if (facts->sum == FAN_LEAF_ABSENT)
        return plan(FAN_LEAF_NOTHING, 1);
    if (facts->calls)
        return plan(FAN_LEAF_CALL, 0);
    if (facts->wide)
        return plan(FAN_LEAF_WIDE, 0);
    if (facts->grad == FAN_LEAF_ABSENT)
        return plan_first(facts);
    if (facts->recording)
        return plan(FAN_LEAF_REPLACE, 6);
    if (facts->grad == FAN_LEAF_DENSE && facts->sum != FAN_LEAF_OTHER)
        return plan(FAN_LEAF_ADD, 5);
    return plan(FAN_LEAF_REPLACE, 5);
}

/* ---- circles of waits ---- */

/* A thread that waits for a leaf. */
typedef struct waiting {
    const fan_leaf_claim *claim; /* NULL: it does not wait yet */
    uint64_t thread;
    const fan_leaf_caller *caller;
    const struct waiting *from; /* of a search: the one that waits for this one */
    struct waiting *next;       /* .. the queue of the search */
    struct waiting *older;
} waiting;

static waiting *waits; /* of all threads, the newest first (node.h, One thread at a time) */
static unsigned waits_generation;
static uint64_t claims;
static _Thread_local const fan_leaf_caller *works_for;

fan_leaf_caller fan_leaf_caller_here(void)
{
    return (fan_leaf_caller){fan_thread_id(), claims, works_for};
}

void fan_leaf_work_for(const fan_leaf_caller *caller)
{
    works_for = caller;
}

/* is_kept: returns whether a claim is not released before the waiting thread has what it waits
 * for. */
static bool is_kept(const fan_leaf_claim *claim, const waiting *wait)
{
    if (!claim->thread)
        return false;
    if (claim->thread == wait->thread)
        return true;
    for (const fan_leaf_caller *by = wait->caller; by; by = by->outer) {
        if (by->thread == claim->thread && claim->number <= by->claim)
            return true;
    }
    return false;
}

/* find_circle: searches, breadth first, for the wait that `me` waits for, at the end, and whose
 * claim `me` keeps.
 * NULL: there is no circle. */
static const waiting *find_circle(waiting *me)
{
    waiting *last = me;
    for (waiting *wait = waits; wait; wait = wait->older) {
        wait->from = NULL;
        wait->next = NULL;
    }
    for (waiting *at = me; at; at = at->next) {
        if (is_kept(at->claim, me))
            return at;
        for (waiting *wait = waits; wait; wait = wait->older) {
            if (wait == me || wait->from || !is_kept(at->claim, wait))
                continue;
            wait->from = at;
            last->next = wait;
            last = wait;
        }
    }
    return NULL;
}

static const char *leaf_name(const fan_leaf_claim *claim, char *buf, size_t size)
{
    if (!claim->leaf)
        return "another leaf";
    buf[0] = '\0';
    claim->leaf->ops->text(claim->leaf, buf, size);
    return buf;
}

/* check_circle: checks that the wait can end. FAN_ERR_STATE. */
static fan_status check_circle(waiting *me, fan_error *err)
{
    const waiting *wait = NULL;
    char name[128];
    if (!FAN_FAULT(LEAF_CIRCLE))
        wait = find_circle(me);
    if (!wait)
        return FAN_OK;
    if (wait == me) {
        return fan_fail(
            err, FAN_ERR_STATE,
            "a gradient comes to this leaf from within its own accumulation, on another worker");
    }
    (void)fan_fail(err, FAN_ERR_STATE, "this gradient comes from within the accumulation of %s",
                   leaf_name(wait->claim, name, sizeof name));
    if (!err)
        return FAN_ERR_STATE;
    for (wait = wait->from; wait; wait = wait->from) {
        fan_append(err->text, sizeof err->text, ", for which that of %s waits",
                   leaf_name(wait->claim, name, sizeof name));
    }
    fan_append(err->text, sizeof err->text, ": none of them would end");
    return FAN_ERR_STATE;
}

/* waits_add: this thread begins to wait for the leaf; FAN_ERR_STATE: the wait could not end. */
static fan_status waits_add(waiting *me, const fan_leaf_claim *claim, fan_error *err)
{
    /* in a forked child the other threads are missing */
    if (waits_generation != fan_fork_generation())
        waits = NULL;
    waits_generation = fan_fork_generation();
    me->claim = claim;
    me->thread = fan_thread_id();
    me->caller = works_for;
    me->older = waits;
    waits = me;
    if (fan_sched_active())
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    return check_circle(me, err);
}

static void waits_remove(const waiting *me)
{
    for (waiting **at = &waits; *at; at = &(*at)->older) {
        if (*at == me) {
            *at = me->older;
            return;
        }
    }
}

/* ---- claims ---- */

fan_status fan__leaf_lock_init(fan_mutex *lock, fan_cond *changed, fan_error *err)
{
    if (fan_mutex_init(lock) != 0)
        return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
    if (fan_cond_init(changed) == 0)
        return FAN_OK;
    fan_mutex_fini(lock);
    return fan_fail(err, FAN_ERR_STATE, "a condition could not be made");
}

fan_status fan_leaf_claim_init(fan_leaf_claim *claim, fan_error *err)
{
    FAN_TRY(fan__leaf_lock_init(&claim->lock, &claim->changed, err));
    claim->thread = 0;
    claim->leaf = NULL;
    claim->owner_generation = fan_fork_generation() + 1;
    return FAN_OK;
}

void fan_leaf_claim_fini(fan_leaf_claim *claim)
{
    if (!claim->owner_generation)
        return;
    fan_mutex_fini(&claim->lock);
    fan_cond_fini(&claim->changed);
}

/* claim_wait: waits until the claim changes, outside of the interpreter, so that its holder can
 * run. Called with the lock, which it releases meanwhile. */
static fan_status claim_wait(fan_leaf_claim *claim, const fan_frontend *frontend, fan_error *err)
{
    fan_status status = FAN_OK;
    void *left = NULL;
    if (frontend->allow_threads_begin)
        left = frontend->allow_threads_begin();
    fan_cond_wait(&claim->changed, &claim->lock);
    fan_mutex_unlock(&claim->lock);
    if (frontend->allow_threads_begin)
        frontend->allow_threads_end(left);
    if (frontend->check_signals)
        status = frontend->check_signals(err);
    fan_mutex_lock(&claim->lock);
    return status;
}

fan_status fan_leaf_claim_begin(fan_leaf_claim *claim, const fan_frontend *frontend, fan_error *err)
{
    waiting here = {.claim = NULL};
    uint64_t thread = fan_thread_id();
    fan_status status = FAN_OK;
    /* threads that a forked child lacks hold nothing */
    if (claim->owner_generation != fan_fork_generation() + 1) {
        claim->owner_generation = fan_fork_generation() + 1;
        (void)fan_mutex_adopt(&claim->lock);
        fan_cond_adopt(&claim->changed);
        if (!fan_thread_survived(claim->thread))
            claim->thread = 0;
    }

    fan_mutex_lock(&claim->lock);
    while (claim->thread && status == FAN_OK && !FAN_FAULT(LEAF_UNCLAIMED)) {
        if (claim->thread == thread) {
            status = fan_fail(err, FAN_ERR_STATE,
                              "a gradient comes to this leaf from within its own accumulation");
        } else if (!here.claim)
            status = waits_add(&here, claim, err);
        if (status == FAN_OK)
            status = claim_wait(claim, frontend, err);
    }
    if (here.claim)
        waits_remove(&here);
    if (status == FAN_OK) {
        claim->thread = thread;
        claim->number = ++claims;
    }
    fan_mutex_unlock(&claim->lock);
    return status;
}

void fan_leaf_claim_end(fan_leaf_claim *claim)
{
    fan_mutex_lock(&claim->lock);
    claim->thread = 0;
    fan_cond_broadcast(&claim->changed);
    fan_mutex_unlock(&claim->lock);
}

void fan_leaf_touch(const fan_leaf_claim *claim, fan_sched_mode access)
{
    if (fan_sched_active())
        fan_sched_access(FAN_THING_LOCKED, claim->lock.id, access);
}
