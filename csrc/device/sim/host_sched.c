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
    size_t nheld, held_cap;
    unsigned char *order; /* the choices */
    size_t norder, order_cap;
    size_t limit;              /* of choices; 0: none */
    char text[FAN_ERROR_TEXT]; /* of the deadlock */
};

fan_host_sched *fan_host_sched_new(uint64_t seed)
{
    fan_host_sched *t = fan_calloc(sizeof *t);
    if (!t)
        return NULL;
    /* Registering a held mutex must not fail: an actor holds a few at most. */
    if (fan_grow((void **)&t->held, &t->held_cap, 8 * FAN_ACTORS, sizeof *t->held)) {
        fan_free(t);
        return NULL;
    }
    (void)pthread_mutex_init(&t->lock, NULL);
    (void)pthread_cond_init(&t->done, NULL);
    for (int i = 0; i < FAN_ACTORS; i++)
        (void)pthread_cond_init(&t->actors[i].go, NULL);
    t->random = seed;
    t->turn = NO_ACTOR;
    return t;
}

void fan_host_sched_free(fan_host_sched *t)
{
    if (!t)
        return;
    for (int i = 0; i < FAN_ACTORS; i++)
        (void)pthread_cond_destroy(&t->actors[i].go);
    (void)pthread_cond_destroy(&t->done);
    (void)pthread_mutex_destroy(&t->lock);
    fan_free(t->held);
    fan_free(t->order);
    fan_free(t);
}

#ifdef FAN_TEST
void fan_host_sched_reset(fan_host_sched *t, uint64_t seed)
{
    t->random = seed;
    t->n = 0;
    t->turn = NO_ACTOR;
    t->over = false;
    atomic_store(&t->given_up, FAN_GOING);
    t->nheld = 0;
    t->norder = 0;
}
#endif

void fan_host_sched_set_hooks(fan_host_sched *t, const fan_host_sched_hooks *hooks)
{
    (void)pthread_mutex_lock(&t->lock);
    t->hooks = *hooks;
    (void)pthread_mutex_unlock(&t->lock);
}

fan_give_up fan_host_sched_given_up(const fan_host_sched *t)
{
    return (fan_give_up)atomic_load_explicit(&((fan_host_sched *)(uintptr_t)t)->given_up,
                                             memory_order_relaxed);
}

/* ---- which actors may act, and which one does; the lock is held ---- */

static int sched_holder(const fan_host_sched *t, uint64_t mutex)
{
    for (size_t i = 0; i < t->nheld; i++)
        if (t->held[i].mutex == mutex)
            return t->held[i].actor;
    return NO_ACTOR;
}

static bool sched_can_act(const fan_host_sched *t, const actor *a)
{
    if (a->state == NEW || a->state == READY)
        return a->asked < FAN_ASKS || fan_host_sched_given_up(t) != FAN_GOING;
    if (a->state != WAITING || sched_holder(t, a->mutex) != NO_ACTOR)
        return false;
    return !a->condition || a->woken;
}

static uint32_t sched_enabled(const fan_host_sched *t)
{
    uint32_t mask = 0;
    for (int i = 0; i < t->n; i++)
        mask |= (uint32_t)sched_can_act(t, &t->actors[i]) << i;
    return mask;
}

static int by_seed(fan_host_sched *t, uint32_t mask)
{
    for (uint64_t skip = fan_rng(&t->random) % (uint64_t)__builtin_popcount(mask); skip > 0; skip--)
        mask &= mask - 1;
    return __builtin_ctz(mask);
}

/* sched_give_up: ends the run; actors that have not started never do. */
static void sched_give_up(fan_host_sched *t, fan_give_up how)
{
    atomic_store(&t->given_up, (int)how);
    for (int i = 0; i < t->n; i++)
        if (t->actors[i].state == NEW) {
            t->actors[i].state = ENDED;
            (void)pthread_cond_broadcast(&t->actors[i].go);
        }
}

static int sched_note(fan_host_sched *t, int choice)
{
    if (fan_grow((void **)&t->order, &t->order_cap, t->norder + 1, 1) == 0)
        t->order[t->norder++] = (unsigned char)choice;
    return choice;
}

#define LATELY 1000

static void sched_set_stuck(actor *a, bool stuck)
{
    if (a->stuck != stuck)
        fan_thread_set_stuck(stuck);
    a->stuck = stuck;
}

/* sched_end_long_run: gives up a run that took more steps than its limit. */
static void sched_end_long_run(fan_host_sched *t)
{
    size_t acted[FAN_ACTORS] = {0};
    size_t from = 0;
    if (t->limit == 0 || t->norder < t->limit)
        return;
    if (fan_host_sched_given_up(t) != FAN_GOING)
        return;
    if (t->norder > LATELY)
        from = t->norder - LATELY;
    for (size_t i = from; i < t->norder; i++) {
        if (t->order[i] < FAN_ACTORS)
            acted[t->order[i]]++;
    }
    snprintf(t->text, sizeof t->text, "no end after %zu steps (of the last %zu", t->norder,
             t->norder - from);
    for (int i = 0; i < t->n; i++) {
        if (acted[i])
            fan_append(t->text, sizeof t->text, ", host thread %d took %zu", i, acted[i]);
    }
    fan_append(t->text, sizeof t->text,
               "): a thread that waits forever, or a scenario that needs more steps (steps=)");
    sched_give_up(t, FAN_DEADLOCKED);
}

/* sched_end_deadlock: gives up a run in which no actor may act and some have not ended. */
static void sched_end_deadlock(fan_host_sched *t)
{
    const char *sep = " ";
    bool left = false;
    for (int i = 0; i < t->n; i++)
        left |= t->actors[i].state != ENDED;
    if (!left || atomic_load(&t->given_up) != FAN_GOING)
        return;
    snprintf(t->text, sizeof t->text, "deadlock:");
    for (int i = 0; i < t->n; i++) {
        const actor *a = &t->actors[i];
        if (a->state != READY && a->state != WAITING)
            continue;
        fan_append(t->text, sizeof t->text, "%shost thread %d", sep, i);
        sep = "; ";
        if (a->state == READY) {
            fan_append(t->text, sizeof t->text, " polls for a change that no other thread makes");
            continue;
        }
        int other = sched_holder(t, a->mutex);
        if (a->call_site[0])
            fan_append(t->text, sizeof t->text, " (%s)", a->call_site);
        if (other == NO_ACTOR)
            fan_append(t->text, sizeof t->text, " waits for a change that no other thread makes");
        else
            fan_append(t->text, sizeof t->text, " waits for a lock that host thread %d holds",
                       other);
    }
    sched_give_up(t, FAN_DEADLOCKED);
}

/* sched_hand_on: chooses the next actor, and wakes it. */
static void sched_hand_on(fan_host_sched *t)
{
    t->turn = NO_ACTOR;
    sched_end_long_run(t);
    uint32_t mask = sched_enabled(t);
    if (mask && atomic_load(&t->given_up) == FAN_GOING) {
        int next;
        if (t->hooks.choose)
            next = t->hooks.choose(t->hooks.ctx, mask);
        else
            next = by_seed(t, mask);
        if (next < 0 || next >= t->n || !(mask >> next & 1)) {
            sched_give_up(t, FAN_ABANDONED);
            mask = sched_enabled(t);
        } else {
            (void)sched_note(t, next);
            mask = UINT32_C(1) << next;
            for (int i = 0; i < t->n; i++) {
                if (i != next)
                    t->actors[i].asked = 0;
            }
        }
    }
    if (!mask) {
        sched_end_deadlock(t);
        mask = sched_enabled(t); /* an actor whose query failed may continue now */
        for (int i = 0; i < t->n && !mask; i++) {
            actor *a = &t->actors[i];
            if (a->state == WAITING && a->condition && !a->freed) {
                a->woken = true;
                a->freed = true;
                mask = sched_enabled(t);
            }
        }
    }
    if (!mask) {
        for (int i = 0; i < t->n; i++)
            sched_set_stuck(&t->actors[i], t->actors[i].state == WAITING);
        t->over = true;
        (void)pthread_cond_broadcast(&t->done);
        return;
    }
    t->turn = __builtin_ctz(mask);
    (void)pthread_cond_broadcast(&t->actors[t->turn].go);
}

/* sched_await: waits until the actor is chosen: true; or until others have ended it: false. Called
 * with the lock held; releases it, and the frontend's own, while it waits. */
static bool sched_await(fan_host_sched *t, actor *a)
{
    int me = (int)(a - t->actors);
    if (t->turn != me && a->state != ENDED) {
        fan_host_sched_hooks h = t->hooks;
        void *before = NULL;
        if (h.before_block) {
            (void)pthread_mutex_unlock(&t->lock);
            before = h.before_block(h.block_ctx);
            (void)pthread_mutex_lock(&t->lock);
        }
        while (t->turn != me && a->state != ENDED)
            (void)pthread_cond_wait(&a->go, &t->lock);
        if (h.after_block) {
            (void)pthread_mutex_unlock(&t->lock);
            h.after_block(h.block_ctx, before);
            (void)pthread_mutex_lock(&t->lock);
        }
    }
    sched_set_stuck(a, false);
    if (t->turn != me)
        return false;
    a->state = ACTING;
    a->begun = true;
    return true;
}

/* ---- what actors call ---- */

fan_status fan_host_sched_spawn(fan_host_sched *t, int *out, bool *first, fan_error *err)
{
    (void)pthread_mutex_lock(&t->lock);
    bool all_ended = true;
    for (int i = 0; i < t->n; i++)
        all_ended &= t->actors[i].state == ENDED;
    if (all_ended)
        t->n = 0;
    *first = t->n == 0;
    *out = -1;
    if (t->n < FAN_ACTORS) {
        *out = t->n++;
        actor *a = &t->actors[*out];
        a->state = NEW;
        a->freed = false;
        a->begun = false;
        a->asked = 0;
        a->call_site[0] = '\0';
    }
    (void)pthread_mutex_unlock(&t->lock);
    if (*out < 0)
        return fan_fail(err, FAN_ERR_VALUE, "a machine has at most %d host threads at a time",
                        FAN_ACTORS);
    return FAN_OK;
}

size_t fan_host_sched_count(fan_host_sched *t)
{
    size_t n = 0;
    (void)pthread_mutex_lock(&t->lock);
    for (int i = 0; i < t->n; i++)
        n += t->actors[i].state != ENDED;
    (void)pthread_mutex_unlock(&t->lock);
    return n;
}

bool fan_host_sched_begin(fan_host_sched *t, int me)
{
    (void)pthread_mutex_lock(&t->lock);
    bool go = me >= 0 && me < t->n && sched_await(t, &t->actors[me]);
    (void)pthread_mutex_unlock(&t->lock);
    return go;
}

bool fan_host_sched_refused(fan_host_sched *t, int number)
{
    (void)pthread_mutex_lock(&t->lock);
    bool refused = t->actors[number].state == ENDED && !t->actors[number].begun;
    (void)pthread_mutex_unlock(&t->lock);
    return refused;
}

void fan_host_sched_yield(fan_host_sched *t, int me)
{
    if (fan_host_sched_given_up(t) != FAN_GOING)
        return;
    (void)pthread_mutex_lock(&t->lock);
    t->actors[me].state = READY;
    sched_hand_on(t);
    (void)sched_await(t, &t->actors[me]);
    (void)pthread_mutex_unlock(&t->lock);
}

void fan_host_sched_wait(fan_host_sched *t, int me, uint64_t mutex, const char *call_site)
{
    (void)pthread_mutex_lock(&t->lock);
    actor *a = &t->actors[me];
    a->state = WAITING;
    a->mutex = mutex;
    a->condition = sched_holder(t, mutex) == NO_ACTOR;
    a->woken = false;
    snprintf(a->call_site, sizeof a->call_site, "%s", call_site);
    sched_hand_on(t);
    (void)sched_await(t, a);
    (void)pthread_mutex_unlock(&t->lock);
}

void fan_host_sched_locked(fan_host_sched *t, int me, uint64_t mutex)
{
    (void)pthread_mutex_lock(&t->lock);
    if (fan_grow((void **)&t->held, &t->held_cap, t->nheld + 1, sizeof *t->held) == 0)
        t->held[t->nheld++] = (holding){mutex, me};
    (void)pthread_mutex_unlock(&t->lock);
}

void fan_host_sched_unlocking(fan_host_sched *t, int me, uint64_t mutex)
{
    bool held = false;
    (void)pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->nheld && !held; i++)
        if (t->held[i].mutex == mutex && t->held[i].actor == me) {
            t->held[i] = t->held[--t->nheld];
            held = true;
        }
    (void)pthread_mutex_unlock(&t->lock);
    assert(held); /* a thread unlocks only what it locked */
    (void)held;
}

void fan_host_sched_changed(fan_host_sched *t, int me, uint64_t mutex)
{
    (void)pthread_mutex_lock(&t->lock);
    for (int i = 0; i < t->n; i++) {
        actor *a = &t->actors[i];
        if (i != me && a->state == WAITING && a->mutex == mutex)
            a->woken = true;
    }
    (void)pthread_mutex_unlock(&t->lock);
}

void fan_host_sched_polled(fan_host_sched *t, int me, bool in_vain)
{
    (void)pthread_mutex_lock(&t->lock);
    if (in_vain)
        t->actors[me].asked++;
    else
        t->actors[me].asked = 0;
    (void)pthread_mutex_unlock(&t->lock);
}

int fan_host_sched_pick(fan_host_sched *t, int n)
{
    int answer = -1;
    (void)pthread_mutex_lock(&t->lock);
    if (t->hooks.pick && fan_host_sched_given_up(t) == FAN_GOING)
        answer = t->hooks.pick(t->hooks.ctx, n);
    if (answer >= 0)
        (void)sched_note(t, FAN_ANSWER + answer);
    (void)pthread_mutex_unlock(&t->lock);
    return answer;
}

void fan_host_sched_limit(fan_host_sched *t, size_t steps)
{
    t->limit = steps;
}

size_t fan_host_sched_steps(fan_host_sched *t)
{
    (void)pthread_mutex_lock(&t->lock);
    size_t n = t->norder;
    (void)pthread_mutex_unlock(&t->lock);
    return n;
}

int fan_host_sched_break(fan_host_sched *t, const char *text)
{
    (void)pthread_mutex_lock(&t->lock);
    int stuck = t->turn;
    if (stuck >= 0 && t->actors[stuck].state == ACTING && fan_host_sched_given_up(t) == FAN_GOING) {
        snprintf(t->text, sizeof t->text, "%s", text);
        sched_give_up(t, FAN_DEADLOCKED);
        sched_hand_on(t);
    } else {
        stuck = NO_ACTOR;
    }
    (void)pthread_mutex_unlock(&t->lock);
    return stuck;
}

void fan_host_sched_end(fan_host_sched *t, int me)
{
    (void)pthread_mutex_lock(&t->lock);
    bool mine = t->turn == me;
    if (me >= 0 && me < t->n)
        t->actors[me].state = ENDED;
    if (mine)
        sched_hand_on(t);
    (void)pthread_mutex_unlock(&t->lock);
}

fan_status fan_host_sched_join(fan_host_sched *t, fan_error *err)
{
    fan_status status = FAN_OK;
    (void)pthread_mutex_lock(&t->lock);
    t->over = false;
    sched_hand_on(t);
    fan_host_sched_hooks h = t->hooks;
    bool let_go = !t->over && h.before_block;
    void *before = NULL;
    if (let_go) {
        (void)pthread_mutex_unlock(&t->lock);
        before = h.before_block(h.block_ctx);
        (void)pthread_mutex_lock(&t->lock);
    }
    while (!t->over)
        (void)pthread_cond_wait(&t->done, &t->lock);
    if (fan_host_sched_given_up(t) == FAN_DEADLOCKED)
        status = fan_fail(err, FAN_ERR_DEADLOCK, "%s", t->text);
    (void)pthread_mutex_unlock(&t->lock);
    if (let_go && h.after_block)
        h.after_block(h.block_ctx, before);
    return status;
}

bool fan_host_sched_stuck(fan_host_sched *t, int me)
{
    (void)pthread_mutex_lock(&t->lock);
    bool known = me >= 0 && me < t->n;
    bool stuck = known && t->over && t->actors[me].state != ENDED;
    (void)pthread_mutex_unlock(&t->lock);
    return stuck;
}

void fan_host_sched_schedule(fan_host_sched *t, char *buf, size_t size)
{
    if (size == 0)
        return;
    (void)pthread_mutex_lock(&t->lock);
    size_t n = size - 1;
    if (n > t->norder)
        n = t->norder;
    for (size_t i = 0; i < n; i++)
        buf[i] = fan_explore_char(t->order[i]);
    buf[n] = '\0';
    (void)pthread_mutex_unlock(&t->lock);
}
