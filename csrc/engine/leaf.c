#include "engine/leaf.h"

#include "base/fault.h"

fan_leaf_plan fan_plan_leaf(const fan_leaf_facts *f)
{
    if (f->sum == FAN_LEAF_ABSENT)
        return (fan_leaf_plan){FAN_LEAF_NOTHING, 1};
    if (f->calls)
        return (fan_leaf_plan){FAN_LEAF_CALL, 0};
    if (f->wide)
        return (fan_leaf_plan){FAN_LEAF_WIDE, 0};
    if (f->grad == FAN_LEAF_ABSENT) {
        if (f->sum == FAN_LEAF_SPARSE)
            return f->unshared ? (fan_leaf_plan){FAN_LEAF_STEAL, 3}
                               : (fan_leaf_plan){FAN_LEAF_COPY, 4};
        if (f->sum == FAN_LEAF_OTHER)
            return (fan_leaf_plan){FAN_LEAF_STEAL, 4}; /* cannot be copied, or needs no copy */
        return f->unshared && f->same_layout && !f->recording ? (fan_leaf_plan){FAN_LEAF_STEAL, 2}
                                                              : (fan_leaf_plan){FAN_LEAF_COPY, 4};
    }
    if (f->recording)
        return (fan_leaf_plan){FAN_LEAF_REPLACE, 6};
    return (fan_leaf_plan){
        f->grad == FAN_LEAF_DENSE && f->sum != FAN_LEAF_OTHER ? FAN_LEAF_ADD : FAN_LEAF_REPLACE, 5};
}

/* ---- circles of waits ---- */

/* A thread that waits for a leaf. */
typedef struct waiting {
    const fan_leaf_claim *claim; /* NULL: not waiting yet */
    uint64_t thread;
    const fan_leaf_caller *caller;
    const struct waiting *from; /* the search: the one that waits for it */
    struct waiting *next;       /* .. the search's queue */
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

/* is_kept: whether a claim is not released before w has what it waits for. */
static bool is_kept(const fan_leaf_claim *c, const waiting *w)
{
    if (!c->thread || c->thread == w->thread)
        return c->thread != 0;
    for (const fan_leaf_caller *by = w->caller; by; by = by->outer)
        if (by->thread == c->thread && c->number <= by->claim)
            return true;
    return false;
}

/* find_circle: the one that `me` waits for, at the end, and whose claim `me` keeps; NULL: there is
 * no circle. */
static const waiting *find_circle(waiting *me)
{
    waiting *last = me;
    for (waiting *w = waits; w; w = w->older) {
        w->from = NULL;
        w->next = NULL;
    }
    for (waiting *x = me; x; x = x->next) {
        if (is_kept(x->claim, me))
            return x;
        for (waiting *w = waits; w; w = w->older)
            if (w != me && !w->from && is_kept(x->claim, w)) {
                w->from = x;
                last = last->next = w;
            }
    }
    return NULL;
}

static const char *leaf_name(const fan_leaf_claim *c, char *buf, size_t size)
{
    buf[0] = '\0';
    if (c->leaf)
        c->leaf->ops->text(c->leaf, buf, size);
    return c->leaf ? buf : "another leaf";
}

/* check_circle: FAN_ERR_STATE if the wait could not end. */
static fan_status check_circle(waiting *me, fan_error *err)
{
    const waiting *x = FAN_FAULT(LEAF_CIRCLE) ? NULL : find_circle(me);
    char name[128];
    if (!x)
        return FAN_OK;
    if (x == me)
        return fan_fail(
            err, FAN_ERR_STATE,
            "a gradient comes to this leaf from within its own accumulation, on another worker");
    (void)fan_fail(err, FAN_ERR_STATE, "this gradient comes from within the accumulation of %s",
                   leaf_name(x->claim, name, sizeof name));
    for (x = x->from; x && err; x = x->from)
        fan_append(err->text, sizeof err->text, ", for which that of %s waits",
                   leaf_name(x->claim, name, sizeof name));
    if (err)
        fan_append(err->text, sizeof err->text, ": none of them would end");
    return FAN_ERR_STATE;
}

/* ---- claims ---- */

fan_status fan_leaf_claim_init(fan_leaf_claim *c, fan_error *err)
{
    if (fan_mutex_init(&c->lock) != 0)
        return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
    if (fan_cond_init(&c->changed) != 0) {
        fan_mutex_fini(&c->lock);
        return fan_fail(err, FAN_ERR_STATE, "a condition could not be made");
    }
    c->thread = 0;
    c->leaf = NULL;
    c->owner_generation = fan_fork_generation() + 1;
    return FAN_OK;
}

void fan_leaf_claim_fini(fan_leaf_claim *c)
{
    if (!c->owner_generation)
        return;
    fan_mutex_fini(&c->lock);
    fan_cond_fini(&c->changed);
}

fan_status fan_leaf_claim_begin(fan_leaf_claim *c, const fan_frontend *f, fan_error *err)
{
    waiting here = {.claim = NULL};
    fan_status status = FAN_OK;
    /* threads that a forked child lacks hold nothing */
    if (c->owner_generation != fan_fork_generation() + 1) {
        c->owner_generation = fan_fork_generation() + 1;
        (void)fan_mutex_adopt(&c->lock);
        fan_cond_adopt(&c->changed);
        if (!fan_thread_survived(c->thread))
            c->thread = 0;
    }
    fan_mutex_lock(&c->lock);
    while (c->thread && status == FAN_OK && !FAN_FAULT(LEAF_UNCLAIMED)) {
        if (c->thread == fan_thread_id()) {
            status = fan_fail(err, FAN_ERR_STATE,
                              "a gradient comes to this leaf from within its own accumulation");
        } else if (!here.claim) {
            /* in a forked child the other threads are missing */
            if (waits_generation != fan_fork_generation())
                waits = NULL;
            waits_generation = fan_fork_generation();
            here = (waiting){
                .claim = c, .thread = fan_thread_id(), .caller = works_for, .older = waits};
            waits = &here;
            if (fan_sched_active())
                fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
            status = check_circle(&here, err);
        }
        if (status == FAN_OK) { /* leaves the interpreter first, so that the holder can run */
            void *left = f->allow_threads_begin ? f->allow_threads_begin() : NULL;
            fan_cond_wait(&c->changed, &c->lock);
            fan_mutex_unlock(&c->lock);
            if (f->allow_threads_begin)
                f->allow_threads_end(left);
            status = f->check_signals ? f->check_signals(err) : FAN_OK;
            fan_mutex_lock(&c->lock);
        }
    }
    for (waiting **at = &waits; here.claim && *at; at = &(*at)->older)
        if (*at == &here) {
            *at = here.older;
            break;
        }
    if (status == FAN_OK) {
        c->thread = fan_thread_id();
        c->number = ++claims;
    }
    fan_mutex_unlock(&c->lock);
    return status;
}

void fan_leaf_claim_end(fan_leaf_claim *c)
{
    fan_mutex_lock(&c->lock);
    c->thread = 0;
    fan_cond_broadcast(&c->changed);
    fan_mutex_unlock(&c->lock);
}

void fan_leaf_touch(const fan_leaf_claim *c, fan_sched_mode access)
{
    if (fan_sched_active())
        fan_sched_access(FAN_THING_LOCKED, c->lock.id, access);
}
