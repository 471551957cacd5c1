#include "buffer/lock.h"

#include "base/fault.h"
#include "buffer/options.h"

void fan_buffer_adopt(fan_buffer *b)
{
    bool left = b->process == FAN_LEFT;
    if (b->adopted == fan_fork_generation())
        return;
    b->adopted = fan_fork_generation();
    for (size_t i = 0; i < b->nlocks; i++) {
        left |= !fan_mutex_adopt(&b->locks[i]);
        fan_cond_adopt(&b->changed[i]);
    }
    atomic_store(&b->waiting, 0);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        left |= s->p->arriving > 0;
        if (!s->busy || fan_thread_survived(atomic_load(&s->owner)))
            continue;
        left = true;
        s->busy = s->taking = false;
        fan_slot_set_owner(s, 0);
    }
    b->process = left ? FAN_LEFT : b->adopted;
}

fan_status fan_buffer_here(fan_buffer *b, fan_error *err)
{
    fan_buffer_adopt(b);
    if (b->process != FAN_LEFT)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE,
                    "%s: another thread was in this buffer when the process was forked, and what it holds is not whole "
                    "in the child: clear() it, or make one here",
                    b->name);
}

void fan_slot_lock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_lock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
    fan_touch_budget(b, FAN_SCHED_COUNT); /* a sum may be due, or what waits may become less */
}

void fan_slot_unlock(fan_buffer *b, size_t slot)
{
    if (!FAN_FAULT(SLOT_LOCK))
        fan_mutex_unlock(&b->locks[slot % b->nlocks]);
    else
        fan_yield();
}

void fan_slot_notify(fan_buffer *b, size_t slot) { fan_cond_broadcast(&b->changed[slot % b->nlocks]); }

/* The slot is locked. Waits until something changed, without the lock of the frontend, so that the thread that will
 * change it can run. */
static fan_status slot_wait_for_change(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_frontend *f = b->frontend;
    atomic_fetch_add(&b->waiting, 1);
    void *left = f->allow_threads_begin ? f->allow_threads_begin() : NULL;
    fan_cond_wait(&b->changed[slot % b->nlocks], &b->locks[slot % b->nlocks]);
    atomic_fetch_sub(&b->waiting, 1);
    fan_slot_unlock(b, slot);
    if (f->allow_threads_begin)
        f->allow_threads_end(left);
    fan_status status = f->check_signals ? f->check_signals(err) : FAN_OK;
    fan_slot_lock(b, slot);
    return status;
}

static fan_status slot_reentered(const fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    return fan_fail(
        err, FAN_ERR_STATE,
        "%s: %s of slot %zu from within a sum, or a target, that holds that slot or one that its take waits for",
        b->name, what, slot);
}

/* Deadlock guard: true if this thread is folding or lending some slot of b, or is taking one above `slot`. It must not
 * wait for `slot` then: a take of `slot` could be waiting for ours. (A take claims slots from the lowest up, and so
 * waits only for higher ones.) */
static bool slot_held_by_this_thread(const fan_buffer *b, size_t slot)
{
    uint64_t me = fan_thread_id();
    for (size_t i = 0; i < b->nslots; i++)
        if (fan_slot_owned_by(&b->slots[i], me) && b->slots[i].busy &&
            (!b->slots[i].taking || i > slot)) /* a slot that this thread owns is changed by nobody else */
            return true;
    return false;
}

fan_status fan_slot_wait_free(fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    if (fan_slot_owned_by(&b->slots[slot], fan_thread_id()) || slot_held_by_this_thread(b, slot))
        return slot_reentered(b, slot, what, err);
    return slot_wait_for_change(b, slot, err);
}

void fan_slot_make_busy(fan_slot *s)
{
    s->busy = true;
    fan_slot_set_owner(s, fan_thread_id());
}

fan_status fan_slot_claim(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_status status = FAN_OK;
    while (s->busy && !FAN_FAULT(SLOT_CLAIMED_TWICE))
        FAN_TRY(fan_slot_wait_free(b, slot, what, err));
    if (FAN_FAULT(SLOT_LOCK))
        fan_yield();
    fan_slot_make_busy(s);
    s->taking = taking;
    while (taking && s->p->arriving && status == FAN_OK && !FAN_FAULT(TAKE_IGNORES_ADDS))
        status = slot_wait_for_change(b, slot, err);
    if (status != FAN_OK) {
        s->busy = s->taking = false;
        fan_slot_set_owner(s, 0);
        fan_slot_notify(b, slot);
    }
    return status;
}

void fan_slot_let_go(fan_buffer *b, size_t slot)
{
    fan_slot *s = &b->slots[slot];
    s->busy = s->taking = FAN_FAULT(SLOT_KEPT);
    fan_slot_set_owner(s, 0);
    fan_slot_notify(b, slot);
}
