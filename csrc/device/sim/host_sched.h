/* host_sched: host threads that act one at a time, in an order that is chosen (D30). It knows nothing of devices.
 *
 * An actor is one such thread. It has the turn from one yield to the next: that is a step. At a yield the chooser says
 * which actor goes on. An actor that wants a mutex which another one holds cannot be chosen until the mutex is free;
 * one that waits on a condition cannot be chosen until another actor has been inside the mutex of the condition and
 * changed something. It is a deadlock when no actor can be chosen, and also when one asks in vain again and again
 * (fan_host_sched_idle) while no other acts.
 *
 * Title: Giving up. A run ends early when its chooser abandons it, or in a deadlock. From then on the chooser is not
 * asked: the actor that has the turn keeps it until it ends or must wait, and actors that have not begun never do.
 * Conditions are woken once, so that an actor that waits can ask fan_host_sched_given_up. An actor that then waits
 * again, or for a mutex that is never given back, is stuck: it stays where it is for good, and the join goes on without
 * it. */
#ifndef FAN_DEVICE_SIM_HOST_SCHED_H
#define FAN_DEVICE_SIM_HOST_SCHED_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_ACTORS 32

typedef struct fan_host_sched fan_host_sched;

/* FAN_ASKS: how often in a row an actor may ask in vain while no other acts. */
#define FAN_ASKS 3

typedef enum fan_give_up { FAN_GOING, FAN_ABANDONED, FAN_DEADLOCKED } fan_give_up;

/* Which actor acts next: one of `enabled` (a mask, not 0), or -1 to abandon the run. Called with the lock of the
 * scheduler held: it may not call back. */
typedef struct fan_host_sched_hooks {
    int (*choose)(void *ctx, uint32_t enabled); /* NULL: by the seed */
    int (*pick)(void *ctx, int n);              /* one of n answers (fan_host_sched_pick); NULL: nothing chooses */
    void *ctx;
    /* around waiting for the turn (a frontend lets go of its own locks); NULL: nothing. `after` gets what `before`
     * gave. */
    void *(*before_block)(void *ctx);
    void (*after_block)(void *ctx, void *before);
    void *block_ctx;
} fan_host_sched_hooks;

fan_host_sched *fan_host_sched_new(uint64_t seed); /* NULL when out of memory */
void fan_host_sched_free(fan_host_sched *t);       /* nobody is in it; NULL is fine */
void fan_host_sched_set_hooks(fan_host_sched *t, const fan_host_sched_hooks *hooks);

/* fan_host_sched_spawn: a new actor; FAN_ERR_VALUE when there are FAN_ACTORS. Numbers begin at 0 again once all have
 * ended; *first says that they did. */
fan_status fan_host_sched_spawn(fan_host_sched *t, int *actor, bool *first, fan_error *err);
size_t fan_host_sched_count(fan_host_sched *t); /* actors of this round that have not ended */
/* fan_host_sched_begin: called by the actor's thread; blocks until it is chosen. false: it is not to run at all (and
 * counts as ended). */
bool fan_host_sched_begin(fan_host_sched *t, int actor);
/* fan_host_sched_refused: the actor has ended without ever having had the turn (Giving up). */
bool fan_host_sched_refused(fan_host_sched *t, int actor);
void fan_host_sched_yield(fan_host_sched *t, int actor);
/* fan_host_sched_wait: the actor, which has the turn, cannot go on: another one holds `mutex`, or it waits for a change
 * made under it. `call_site`: where in the source of the user. Returns when it may look again. */
void fan_host_sched_wait(fan_host_sched *t, int actor, uint64_t mutex, const char *call_site);
/* fan_host_sched_idle: counts one more question of the actor that was answered "not yet". fan_host_sched_busy: the
 * actor did something else: counts from 0 again. */
void fan_host_sched_idle(fan_host_sched *t, int actor);
void fan_host_sched_busy(fan_host_sched *t, int actor);
/* fan_host_sched_pick: the number of the answer, 0 to n - 1, that the hooks choose; it becomes part of the schedule.
 * -1: nobody chooses. */
int fan_host_sched_pick(fan_host_sched *t, int n);
/* fan_host_sched_limit: after so many choices a round counts as endless, and is given up like a deadlock; 0: no limit.
 * No thread is in it. */
void fan_host_sched_limit(fan_host_sched *t, size_t steps);
/* fan_host_sched_steps: choices so far. */
size_t fan_host_sched_steps(fan_host_sched *t);
/* fan_host_sched_break: called by any thread while an actor has the turn and does not come back: gives the round up
 * like a deadlock, reported with `text`, and goes on without that actor. Returns its number, or -1. */
int fan_host_sched_break(fan_host_sched *t, const char *text);
void fan_host_sched_locked(fan_host_sched *t, int actor, uint64_t mutex);
void fan_host_sched_unlocking(fan_host_sched *t, int actor, uint64_t mutex); /* .. which the actor holds */
/* fan_host_sched_changed: the actor, which holds the mutex, has made the change that others wait for under it. */
void fan_host_sched_changed(fan_host_sched *t, int actor, uint64_t mutex);
/* fan_host_sched_end: the actor has ended (or, called by anyone, will never begin). */
void fan_host_sched_end(fan_host_sched *t, int actor);
/* fan_host_sched_join: on a thread that is no actor: lets all act to their end. FAN_ERR_DEADLOCK, with a text that
 * names the actors and what they wait for. */
fan_status fan_host_sched_join(fan_host_sched *t, fan_error *err);

fan_give_up fan_host_sched_given_up(const fan_host_sched *t);
/* fan_host_sched_stuck: the actor will never end (Giving up). */
bool fan_host_sched_stuck(fan_host_sched *t, int actor);
/* fan_host_sched_schedule: the choices so far, one character each, as in explore.h; truncates. */
void fan_host_sched_schedule(fan_host_sched *t, char *buf, size_t size);

#ifdef FAN_TEST
/* fan_host_sched_reset: no actors, a new seed, nothing given up. Nobody is in it. */
void fan_host_sched_reset(fan_host_sched *t, uint64_t seed);
#endif

#endif
