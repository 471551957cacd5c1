/* The scheduler of a machine's host threads: one acts at a time, and each gives the turn to the
 * next at the points that it reports.
 *
 *   choices   which threads (actors) may act, and which one does; deadlocks
 *   calls     what threads report: begin, wait, lock, unlock, poll, end
 *   runs      the end of a run, and its schedule as text */
#define _POSIX_C_SOURCE 200809L
#include "device/sim/host_sched.h"

#include "base/rng.h"
#include "base/mem.h"
#include "device/sim/explore.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define NO_ACTOR (-1)
#define SITE 96

typedef enum state {
    NEW,   /* not started; may be chosen */
    READY, /* at a yield */
    ACTING,
    WAITING, /* for `mutex`: its holder, or a change under it */
    ENDED
} state;

typedef struct actor {
    pthread_cond_t go;
    state state;
    uint64_t mutex;
    bool condition; /* the mutex was free when it began to wait: it waits for a change */
    bool woken;     /* another actor has changed state under the mutex since */
    int asked;      /* consecutive "not yet" answers since another actor acted */
    bool begun;     /* it has acted */
    bool freed;     /* it was woken because the run was given up, which happens once */
    bool stuck;     /* it waits, and no actor is left to wake it */
    char call_site[SITE];
} actor;

typedef struct holding {
    uint64_t mutex;
    int actor;
} holding;

struct fan_host_sched {
    pthread_mutex_t lock; /* guards all of it, the actors' conditions too */
    pthread_cond_t done;  /* the joining thread waits for it */
    fan_host_sched_hooks hooks;
    uint64_t random;
    actor actors[FAN_ACTORS];
    int n;
    int turn;            /* the actor that acts; NO_ACTOR before a join and after it */
    bool over;           /* no actor is left that can act */
    atomic_int given_up; /* fan_give_up */
    holding *held;
    size_t nheld;
    size_t held_cap;
    unsigned char *order; /* the choices */
    size_t norder;
    size_t order_cap;
    size_t limit;              /* of choices; 0: none */
    char text[FAN_ERROR_TEXT]; /* of the deadlock */
};

static void sched_lock(fan_host_sched *sched)
{
    (void)pthread_mutex_lock(&sched->lock);
}

static void sched_unlock(fan_host_sched *sched)
{
    (void)pthread_mutex_unlock(&sched->lock);
}

fan_host_sched *fan_host_sched_new(uint64_t seed)
{
    fan_host_sched *sched = fan_calloc(sizeof *sched);
    if (!sched)
        return NULL;
    /* Registering a held mutex must not fail: an actor holds a few at most. */
    if (fan_grow((void **)&sched->held, &sched->held_cap, 8 * FAN_ACTORS, sizeof *sched->held)) {
        fan_free(sched);
        return NULL;
    }
    (void)pthread_mutex_init(&sched->lock, NULL);
    (void)pthread_cond_init(&sched->done, NULL);
    for (int i = 0; i < FAN_ACTORS; i++)
        (void)pthread_cond_init(&sched->actors[i].go, NULL);
    sched->random = seed;
    sched->turn = NO_ACTOR;
    return sched;
}

void fan_host_sched_free(fan_host_sched *sched)
{
    if (!sched)
        return;
    for (int i = 0; i < FAN_ACTORS; i++)
        (void)pthread_cond_destroy(&sched->actors[i].go);
    (void)pthread_cond_destroy(&sched->done);
    (void)pthread_mutex_destroy(&sched->lock);
    fan_free(sched->held);
    fan_free(sched->order);
    fan_free(sched);
}

#ifdef FAN_TEST
void fan_host_sched_reset(fan_host_sched *sched, uint64_t seed)
{
    sched->random = seed;
    sched->n = 0;
    sched->turn = NO_ACTOR;
    sched->over = false;
    atomic_store(&sched->given_up, FAN_GOING);
    sched->nheld = 0;
    sched->norder = 0;
}
#endif

void fan_host_sched_set_hooks(fan_host_sched *sched, const fan_host_sched_hooks *hooks)
{
    sched_lock(sched);
    sched->hooks = *hooks;
    sched_unlock(sched);
}

fan_give_up fan_host_sched_given_up(fan_host_sched *sched)
{
    return (fan_give_up)atomic_load_explicit(&sched->given_up, memory_order_relaxed);
}

static bool sched_goes_on(fan_host_sched *sched)
{
    return fan_host_sched_given_up(sched) == FAN_GOING;
}

/* ---- which actors may act, and which one does; the lock is held ---- */

static int sched_holder(const fan_host_sched *sched, uint64_t mutex)
{
    for (size_t i = 0; i < sched->nheld; i++) {
        if (sched->held[i].mutex == mutex)
            return sched->held[i].actor;
    }
    return NO_ACTOR;
}

static bool sched_can_act(fan_host_sched *sched, const actor *a)
{
    if (a->state == NEW || a->state == READY)
        return a->asked < FAN_ASKS || !sched_goes_on(sched);
    if (a->state != WAITING)
        return false;
    if (sched_holder(sched, a->mutex) != NO_ACTOR)
        return false;
    return !a->condition || a->woken;
}

static uint32_t sched_enabled(fan_host_sched *sched)
{
    uint32_t mask = 0;
    for (int i = 0; i < sched->n; i++)
        mask |= (uint32_t)sched_can_act(sched, &sched->actors[i]) << i;
    return mask;
}


/* sched_give_up: ends the run; actors that have not started never do. */
static void sched_give_up(fan_host_sched *sched, fan_give_up reason)
{
    atomic_store(&sched->given_up, (int)reason);
    for (int i = 0; i < sched->n; i++) {
        if (sched->actors[i].state == NEW) {
            sched->actors[i].state = ENDED;
            (void)pthread_cond_broadcast(&sched->actors[i].go);
        }
    }
}

static void sched_note(fan_host_sched *sched, int choice)
{
    if (fan_grow((void **)&sched->order, &sched->order_cap, sched->norder + 1, 1) == 0)
        sched->order[sched->norder++] = (unsigned char)choice;
}

#define LATELY 1000

static void sched_set_stuck(actor *a, bool stuck)
{
    if (a->stuck != stuck)
        fan_thread_set_stuck(stuck);
    a->stuck = stuck;
}

/* sched_end_long_run: gives up a run that took more steps than its limit. */
static void sched_end_long_run(fan_host_sched *sched)
{
    size_t acted[FAN_ACTORS] = {0};
    size_t from = 0;
    bool is_long = sched->limit > 0 && sched->norder >= sched->limit;
    if (!is_long || !sched_goes_on(sched))
        return;
    if (sched->norder > LATELY)
        from = sched->norder - LATELY;
    for (size_t i = from; i < sched->norder; i++) {
        if (sched->order[i] < FAN_ACTORS)
            acted[sched->order[i]]++;
    }
    snprintf(sched->text, sizeof sched->text, "no end after %zu steps (of the last %zu",
             sched->norder, sched->norder - from);
    for (int i = 0; i < sched->n; i++) {
        if (acted[i])
            fan_append(sched->text, sizeof sched->text, ", host thread %d took %zu", i, acted[i]);
    }
    fan_append(sched->text, sizeof sched->text,
               "): a thread that waits forever, or a scenario that needs more steps (steps=)");
    sched_give_up(sched, FAN_DEADLOCKED);
}

/* sched_end_deadlock: gives up a run in which no actor may act and some have not ended. */
static void sched_end_deadlock(fan_host_sched *sched)
{
    const char *sep = " ";
    bool left = false;
    for (int i = 0; i < sched->n; i++)
        left |= sched->actors[i].state != ENDED;
    if (!left || !sched_goes_on(sched))
        return;
    snprintf(sched->text, sizeof sched->text, "deadlock:");
    for (int i = 0; i < sched->n; i++) {
        const actor *a = &sched->actors[i];
        if (a->state != READY && a->state != WAITING)
            continue;
        fan_append(sched->text, sizeof sched->text, "%shost thread %d", sep, i);
        sep = "; ";
        if (a->state == READY) {
            fan_append(sched->text, sizeof sched->text,
                       " polls for a change that no other thread makes");
            continue;
        }
        int other = sched_holder(sched, a->mutex);
        if (a->call_site[0])
            fan_append(sched->text, sizeof sched->text, " (%s)", a->call_site);
        if (other == NO_ACTOR) {
            fan_append(sched->text, sizeof sched->text,
                       " waits for a change that no other thread makes");
        } else {
            fan_append(sched->text, sizeof sched->text,
                       " waits for a lock that host thread %d holds", other);
        }
    }
    sched_give_up(sched, FAN_DEADLOCKED);
}

/* sched_choose: returns the one of the actors `mask` that acts next, as a mask. A choice that is
 * none of them abandons the run: then it returns all actors that may still act. */
static uint32_t sched_choose(fan_host_sched *sched, uint32_t mask)
{
    int next = -1;
    if (sched->hooks.choose) {
        next = sched->hooks.choose(sched->hooks.ctx, mask);
    } else {
        uint32_t left = mask;
        for (uint64_t skip = fan_rng(&sched->random) % (uint64_t)__builtin_popcount(mask); skip > 0;
             skip--)
            left &= left - 1;
        next = __builtin_ctz(left);
    }
    if (next < 0 || next >= sched->n || !(mask >> next & 1)) {
        sched_give_up(sched, FAN_ABANDONED);
        return sched_enabled(sched);
    }
    sched_note(sched, next);
    for (int i = 0; i < sched->n; i++) {
        if (i != next)
            sched->actors[i].asked = 0;
    }
    return UINT32_C(1) << next;
}

/* sched_hand_on: chooses the next actor, and wakes it. */
static void sched_hand_on(fan_host_sched *sched)
{
    sched->turn = NO_ACTOR;
    sched_end_long_run(sched);
    uint32_t mask = sched_enabled(sched);
    if (mask && sched_goes_on(sched))
        mask = sched_choose(sched, mask);
    if (!mask) {
        sched_end_deadlock(sched);
        mask = sched_enabled(sched); /* an actor whose query failed may continue now */
        for (int i = 0; i < sched->n && !mask; i++) {
            actor *a = &sched->actors[i];
            if (a->state == WAITING && a->condition && !a->freed) {
                a->woken = true;
                a->freed = true;
                mask = sched_enabled(sched);
            }
        }
    }
    if (!mask) {
        for (int i = 0; i < sched->n; i++)
            sched_set_stuck(&sched->actors[i], sched->actors[i].state == WAITING);
        sched->over = true;
        (void)pthread_cond_broadcast(&sched->done);
        return;
    }
    sched->turn = __builtin_ctz(mask);
    (void)pthread_cond_broadcast(&sched->actors[sched->turn].go);
}

/* sched_before_block, sched_after_block: call the frontend's hook around a wait, with the lock
 * released. */
static void *sched_before_block(fan_host_sched *sched)
{
    fan_host_sched_hooks hooks = sched->hooks;
    if (!hooks.before_block)
        return NULL;
    sched_unlock(sched);
    void *before = hooks.before_block(hooks.block_ctx);
    sched_lock(sched);
    return before;
}

static void sched_after_block(fan_host_sched *sched, void *before)
{
    fan_host_sched_hooks hooks = sched->hooks;
    if (!hooks.after_block)
        return;
    sched_unlock(sched);
    hooks.after_block(hooks.block_ctx, before);
    sched_lock(sched);
}

/* sched_await: waits until the actor is chosen: true; or until others have ended it: false. Called
 * with the lock held; releases it, and the frontend's own, while it waits. */
static bool sched_await(fan_host_sched *sched, actor *a)
{
    int me = (int)(a - sched->actors);
    if (sched->turn != me && a->state != ENDED) {
        void *before = sched_before_block(sched);
        while (sched->turn != me && a->state != ENDED)
            (void)pthread_cond_wait(&a->go, &sched->lock);
        sched_after_block(sched, before);
    }
    sched_set_stuck(a, false);
    if (sched->turn != me)
        return false;
    a->state = ACTING;
    a->begun = true;
    return true;
}

/* ---- what actors call ---- */

fan_status fan_host_sched_spawn(fan_host_sched *sched, int *out, fan_error *err)
{
    sched_lock(sched);
    bool all_ended = true;
    for (int i = 0; i < sched->n; i++)
        all_ended &= sched->actors[i].state == ENDED;
    if (all_ended)
        sched->n = 0;
    *out = -1;
    if (sched->n < FAN_ACTORS) {
        *out = sched->n++;
        actor *a = &sched->actors[*out];
        a->state = NEW;
        a->freed = false;
        a->begun = false;
        a->asked = 0;
        a->call_site[0] = '\0';
    }
    sched_unlock(sched);
    if (*out < 0) {
        return fan_fail(err, FAN_ERR_VALUE, "a machine has at most %d host threads at a time",
                        FAN_ACTORS);
    }
    return FAN_OK;
}

size_t fan_host_sched_count(fan_host_sched *sched)
{
    size_t n = 0;
    sched_lock(sched);
    for (int i = 0; i < sched->n; i++)
        n += sched->actors[i].state != ENDED;
    sched_unlock(sched);
    return n;
}

bool fan_host_sched_begin(fan_host_sched *sched, int me)
{
    sched_lock(sched);
    bool go = me >= 0 && me < sched->n && sched_await(sched, &sched->actors[me]);
    sched_unlock(sched);
    return go;
}

bool fan_host_sched_refused(fan_host_sched *sched, int number)
{
    sched_lock(sched);
    const actor *a = &sched->actors[number];
    bool refused = a->state == ENDED && !a->begun;
    sched_unlock(sched);
    return refused;
}

void fan_host_sched_yield(fan_host_sched *sched, int me)
{
    actor *a = &sched->actors[me];
    if (!sched_goes_on(sched))
        return;
    sched_lock(sched);
    a->state = READY;
    sched_hand_on(sched);
    (void)sched_await(sched, a);
    sched_unlock(sched);
}

void fan_host_sched_wait(fan_host_sched *sched, int me, uint64_t mutex, const char *call_site)
{
    sched_lock(sched);
    actor *a = &sched->actors[me];
    a->state = WAITING;
    a->mutex = mutex;
    a->condition = sched_holder(sched, mutex) == NO_ACTOR;
    a->woken = false;
    snprintf(a->call_site, sizeof a->call_site, "%s", call_site);
    sched_hand_on(sched);
    (void)sched_await(sched, a);
    sched_unlock(sched);
}

void fan_host_sched_locked(fan_host_sched *sched, int me, uint64_t mutex)
{
    sched_lock(sched);
    if (fan_grow((void **)&sched->held, &sched->held_cap, sched->nheld + 1, sizeof *sched->held) ==
        0)
        sched->held[sched->nheld++] = (holding){mutex, me};
    sched_unlock(sched);
}

void fan_host_sched_unlocking(fan_host_sched *sched, int me, uint64_t mutex)
{
    bool held = false;
    sched_lock(sched);
    for (size_t i = 0; i < sched->nheld && !held; i++) {
        holding *place = &sched->held[i];
        held = place->mutex == mutex && place->actor == me;
        if (held)
            *place = sched->held[--sched->nheld];
    }
    sched_unlock(sched);
    assert(held); /* a thread unlocks only what it locked */
    (void)held;
}

void fan_host_sched_changed(fan_host_sched *sched, int me, uint64_t mutex)
{
    sched_lock(sched);
    for (int i = 0; i < sched->n; i++) {
        actor *a = &sched->actors[i];
        if (i != me && a->state == WAITING && a->mutex == mutex)
            a->woken = true;
    }
    sched_unlock(sched);
}

void fan_host_sched_polled(fan_host_sched *sched, int me, bool in_vain)
{
    actor *a = &sched->actors[me];
    sched_lock(sched);
    a->asked++;
    if (!in_vain)
        a->asked = 0;
    sched_unlock(sched);
}

int fan_host_sched_pick(fan_host_sched *sched, int n)
{
    int answer = -1;
    sched_lock(sched);
    if (sched->hooks.pick && sched_goes_on(sched))
        answer = sched->hooks.pick(sched->hooks.ctx, n);
    if (answer >= 0)
        sched_note(sched, FAN_ANSWER + answer);
    sched_unlock(sched);
    return answer;
}

void fan_host_sched_limit(fan_host_sched *sched, size_t steps)
{
    sched->limit = steps;
}

size_t fan_host_sched_steps(fan_host_sched *sched)
{
    sched_lock(sched);
    size_t n = sched->norder;
    sched_unlock(sched);
    return n;
}

int fan_host_sched_break(fan_host_sched *sched, const char *text)
{
    sched_lock(sched);
    int stuck = sched->turn;
    bool acts = stuck >= 0 && sched->actors[stuck].state == ACTING;
    if (acts && sched_goes_on(sched)) {
        snprintf(sched->text, sizeof sched->text, "%s", text);
        sched_give_up(sched, FAN_DEADLOCKED);
        sched_hand_on(sched);
    } else {
        stuck = NO_ACTOR;
    }
    sched_unlock(sched);
    return stuck;
}

void fan_host_sched_end(fan_host_sched *sched, int me)
{
    sched_lock(sched);
    bool mine = sched->turn == me;
    if (me >= 0 && me < sched->n)
        sched->actors[me].state = ENDED;
    if (mine)
        sched_hand_on(sched);
    sched_unlock(sched);
}

fan_status fan_host_sched_join(fan_host_sched *sched, fan_error *err)
{
    fan_status status = FAN_OK;
    sched_lock(sched);
    sched->over = false;
    sched_hand_on(sched);
    if (!sched->over) {
        void *before = sched_before_block(sched);
        while (!sched->over)
            (void)pthread_cond_wait(&sched->done, &sched->lock);
        sched_after_block(sched, before);
    }
    if (fan_host_sched_given_up(sched) == FAN_DEADLOCKED)
        status = fan_fail(err, FAN_ERR_DEADLOCK, "%s", sched->text);
    sched_unlock(sched);
    return status;
}

bool fan_host_sched_stuck(fan_host_sched *sched, int me)
{
    sched_lock(sched);
    bool known = me >= 0 && me < sched->n;
    bool stuck = known && sched->over && sched->actors[me].state != ENDED;
    sched_unlock(sched);
    return stuck;
}

void fan_host_sched_schedule(fan_host_sched *sched, char *buf, size_t size)
{
    sched_lock(sched);
    fan_explore_write(sched->order, sched->norder, buf, size);
    sched_unlock(sched);
}
