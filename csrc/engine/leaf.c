#include "engine/leaf.h"

#include "base/fault.h"

/* absent: L2, L3, L4. */
static fan_leaf_plan plan_absent(const fan_leaf_facts *f)
{
    if (f->sum == FAN_LEAF_SPARSE)
        return f->unshared ? (fan_leaf_plan){FAN_LEAF_STEAL, 3} : (fan_leaf_plan){FAN_LEAF_COPY, 4};
    if (f->sum == FAN_LEAF_OTHER)
        return (fan_leaf_plan){FAN_LEAF_STEAL, 4}; /* what cannot be copied, or needs no copy */
    return f->unshared && f->same_layout && !f->recording ? (fan_leaf_plan){FAN_LEAF_STEAL, 2}
                                                          : (fan_leaf_plan){FAN_LEAF_COPY, 4};
}

fan_leaf_plan fan_plan_leaf(const fan_leaf_facts *f)
{
    if (f->sum == FAN_LEAF_ABSENT)
        return (fan_leaf_plan){FAN_LEAF_NOTHING, 1};
    if (f->calls)
        return (fan_leaf_plan){FAN_LEAF_CALL, 0};
    if (f->wide)
        return (fan_leaf_plan){FAN_LEAF_WIDE, 0};
    if (f->grad == FAN_LEAF_ABSENT)
        return plan_absent(f);
    if (f->recording)
        return (fan_leaf_plan){FAN_LEAF_REPLACE, 6};
    return (fan_leaf_plan){f->grad == FAN_LEAF_DENSE && f->sum != FAN_LEAF_OTHER ? FAN_LEAF_ADD : FAN_LEAF_REPLACE, 5};
}

/* ---- who has a leaf ---- */

fan_status fan_leaf_claim_init(fan_leaf_claim *c, fan_error *err)
{
    if (fan_mutex_init(&c->lock) != 0)
        return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
    if (fan_cond_init(&c->changed) != 0) {
        fan_mutex_fini(&c->lock);
        return fan_fail(err, FAN_ERR_STATE, "a condition could not be made");
    }
    c->thread = 0;
    c->process = fan_process() + 1;
    return FAN_OK;
}

void fan_leaf_claim_fini(fan_leaf_claim *c)
{
    if (!c->process)
        return;
    fan_mutex_fini(&c->lock);
    fan_cond_fini(&c->changed);
}

/* adopt: after a fork: whoever stayed behind has nothing any more. */
static void adopt(fan_leaf_claim *c)
{
    if (c->process == fan_process() + 1)
        return;
    c->process = fan_process() + 1;
    (void)fan_mutex_adopt(&c->lock);
    fan_cond_adopt(&c->changed);
    if (!fan_thread_survived(c->thread))
        c->thread = 0;
}

/* wait_for_change: locked; leaves the interpreter first, so that who has it can go on. */
static fan_status wait_for_change(fan_leaf_claim *c, const fan_frontend *f, fan_error *err)
{
    fan_status status;
    void *left = f->allow_threads_begin ? f->allow_threads_begin() : NULL;
    fan_cond_wait(&c->changed, &c->lock);
    fan_mutex_unlock(&c->lock);
    if (f->allow_threads_begin)
        f->allow_threads_end(left);
    status = f->check_signals ? f->check_signals(err) : FAN_OK;
    fan_mutex_lock(&c->lock);
    return status;
}

fan_status fan_leaf_claim_begin(fan_leaf_claim *c, const fan_frontend *f, fan_error *err)
{
    uint64_t me = fan_thread_id();
    fan_status status = FAN_OK;
    adopt(c);
    fan_mutex_lock(&c->lock);
    while (c->thread && status == FAN_OK && !FAN_FAULT(LEAF_UNCLAIMED))
        status = c->thread != me
                     ? wait_for_change(c, f, err)
                     : fan_fail(err, FAN_ERR_STATE, "a gradient comes to this leaf from within its own accumulation");
    if (status == FAN_OK)
        c->thread = me;
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

void fan_leaf_touch(const fan_leaf_claim *c, fan_touch how)
{
    if (fan_watched())
        fan_touch_thing(FAN_THING_LOCKED, c->lock.id, how);
}
