/* host_sched: host threads that act one at a time, in a chosen order (D30). Independent of devices.
 *
 * An actor is one such thread. It acts from one yield to the next: that is a step. At a yield the
 * chooser selects the next actor. An actor that waits for a mutex held by another one cannot be
 * chosen until the mutex is free; one that waits on a condition cannot be chosen until another
 * actor has changed state under the condition's mutex. It is a deadlock if no actor can be chosen,
 * and also if one polls again and again (fan_host_sched_polled) while no other acts.
 *
 * Title: Giving up. A run ends early if its chooser abandons it, or in a deadlock. From then on the
 * chooser is not called: the acting actor continues until it ends or must wait, and actors that
 * have not started never do. Conditions are woken once, so that a waiting actor can check
 * fan_host_sched_given_up. An actor that then waits again, or for a mutex that is never released,
 * is stuck: it stays blocked, the join continues without it, and it counts as no scheduled thread
 * (fan_thread_set_stuck). */
#ifndef FAN_DEVICE_SIM_HOST_SCHED_H
#define FAN_DEVICE_SIM_HOST_SCHED_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_ACTORS 32

typedef struct fan_host_sched fan_host_sched;

/* FAN_ASKS: how often in a row an actor may poll while no other acts. */
#define FAN_ASKS 3

typedef enum fan_give_up {
    FAN_GOING,
    FAN_ABANDONED,
    FAN_DEADLOCKED
} fan_give_up;

/* Chooses the next actor: one of `enabled` (a mask, not 0), or -1 to abandon the run. Called with
 * the scheduler's lock held: must not call back. */
typedef struct fan_host_sched_hooks {
    int (*choose)(void *ctx, uint32_t enabled); /* NULL: by the seed */
    /* one of n answers (fan_host_sched_pick); NULL: no choice */
    int (*pick)(void *ctx, int n);
    void *ctx;
    /* called around waiting for the turn (a frontend releases its own locks); NULL: nothing.
     * `after` receives the result of `before`. */
    void *(*before_block)(void *ctx);
    void (*after_block)(void *ctx, void *before);
    void *block_ctx;
} fan_host_sched_hooks;

fan_host_sched *fan_host_sched_new(uint64_t seed); /* NULL when out of memory */
void fan_host_sched_free(fan_host_sched *sched);   /* no thread may be in it; `sched` may be NULL */
void fan_host_sched_set_hooks(fan_host_sched *sched, const fan_host_sched_hooks *hooks);

/* fan_host_sched_spawn: adds an actor, and sets *actor to its number. Numbers start at 0 again once
 * all actors have ended. FAN_ERR_VALUE: there are FAN_ACTORS. */
fan_status fan_host_sched_spawn(fan_host_sched *sched, int *actor, fan_error *err);
size_t fan_host_sched_count(fan_host_sched *sched); /* actors of this round that have not ended */
/* fan_host_sched_begin: called by the actor's thread; blocks until it is chosen.
 * false: it must not run at all (and counts as ended). */
bool fan_host_sched_begin(fan_host_sched *sched, int actor);
/* fan_host_sched_refused: returns whether the actor ended without ever acting (Giving up). */
bool fan_host_sched_refused(fan_host_sched *sched, int actor);
void fan_host_sched_yield(fan_host_sched *sched, int actor);
/* fan_host_sched_wait: blocks the acting actor: another one holds `mutex`, or it waits for a change
 * made under it. `call_site`: the line of user code. Returns when it may check again. */
void fan_host_sched_wait(fan_host_sched *sched, int actor, uint64_t mutex, const char *call_site);
/* fan_host_sched_polled: counts a poll of the actor that was answered "not yet"; in_vain false:
 * resets the count after any other act. */
void fan_host_sched_polled(fan_host_sched *sched, int actor, bool in_vain);
/* fan_host_sched_pick: returns the answer, 0 to n - 1, that the hooks choose; it becomes part of
 * the schedule.
 * -1: no choice. */
int fan_host_sched_pick(fan_host_sched *sched, int n);
/* fan_host_sched_limit: limits the choices of a round, which is then given up like a deadlock; 0:
 * no limit. No thread may be in it. */
void fan_host_sched_limit(fan_host_sched *sched, size_t steps);
/* fan_host_sched_steps: returns the choices so far. */
size_t fan_host_sched_steps(fan_host_sched *sched);
/* fan_host_sched_break: called by any thread if an acting actor does not return: gives the round up
 * like a deadlock, reported with `text`, and continues without that actor. Returns its number, or
 * -1. */
int fan_host_sched_break(fan_host_sched *sched, const char *text);
void fan_host_sched_locked(fan_host_sched *sched, int actor, uint64_t mutex);
/* .. held by the actor */
void fan_host_sched_unlocking(fan_host_sched *sched, int actor, uint64_t mutex);
/* fan_host_sched_changed: called by the actor, which holds the mutex, after the change that others
 * wait for. */
void fan_host_sched_changed(fan_host_sched *sched, int actor, uint64_t mutex);
/* fan_host_sched_end: ends the actor (called by any thread for one that will never start). */
void fan_host_sched_end(fan_host_sched *sched, int actor);
/* fan_host_sched_join: on a thread that is no actor: runs all actors to their end.
 * FAN_ERR_DEADLOCK, with a text about the actors and their waits. */
fan_status fan_host_sched_join(fan_host_sched *sched, fan_error *err);

fan_give_up fan_host_sched_given_up(fan_host_sched *sched);
/* fan_host_sched_stuck: returns whether the actor will never end (Giving up). */
bool fan_host_sched_stuck(fan_host_sched *sched, int actor);
/* fan_host_sched_schedule: writes the choices so far, one character each, as in explore.h;
 * truncates. */
void fan_host_sched_schedule(fan_host_sched *sched, char *buf, size_t size);

#ifdef FAN_TEST
/* fan_host_sched_reset: no actors, a new seed, not given up. No thread may be in it. */
void fan_host_sched_reset(fan_host_sched *sched, uint64_t seed);
#endif

#endif
