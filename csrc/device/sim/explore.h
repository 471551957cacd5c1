/* explore: a search over all orders in which a few actors may act, by running a scenario again and
 * again.
 *
 * Stateless: the driver runs the scenario from the start; at each step it passes the actors that
 * could act, receives the one that does, and reports the accesses of the step (its footprint). Two
 * neighbouring steps with independent footprints commute, and sleep sets leave out orders that
 * differ only by such swaps. With `reduce` false all orders are run: that checks the reduction
 * itself.
 *
 *    while (fan_explore_begin(search)) {
 *        while (actors left) {
 *            a = fan_explore_choose(search, mask);
 *            step(a);
 *            fan_explore_access(search, ..);
 *        }
 *        fan_explore_end(search);
 *    }
 *
 * Title: Contents of footprints. Steps commute if neither writes what the other accesses. So a
 * footprint contains everything that the step's course, or whether its actor (or another) may act,
 * depends on, and everything that it changes; locking counts as writing. An object has the same
 * number in every run: number it by the thread that made it and by its position in that thread's
 * course, never by host address or by order of arrival.
 *
 * Title: Sleep sets. When the search has run all orders that begin (from some node) with actor a,
 * it continues with b and a sleeps: no order begins with a again until a step conflicts with a's
 * step. The footprint of a sleeping actor's step is the one that it had when it ran from that node;
 * independent steps do not change it, so it need not run again. Every order is then equivalent to
 * one that was run (Godefroid); the two do not differ in any value or verdict.
 *
 * Title: Persistent sets of one. A step that commutes with all that other actors ever do need not
 * be tried later: no other actor is chosen in its place. The accesses of others are learnt during
 * the search. Until one of them conflicts with the step, no order that was left out can show the
 * conflict: the first actor to conflict would do so after the step, too, in an order that is run.
 * When that happens, the search starts again with its present knowledge. This holds only if an
 * actor that cannot act has reported the object that it waits for, in the step that ended there:
 * else it might wait, unreported, for this very step. So it is done only on request
 * (fan_explore_prune). */
#ifndef FAN_DEVICE_SIM_EXPLORE_H
#define FAN_DEVICE_SIM_EXPLORE_H

#include "base/status.h"
#include "base/thread.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_EXPLORE_ACTORS 32
#define FAN_EXPLORE_NONE (-1)

/* How a schedule writes the answers 0, 1, ..: 'N' is no, 'Y' is yes. In a list of choices they are
 * FAN_ANSWER and up. */
#define FAN_ANSWERS "NYABCDEFGHIJKLMOPQRSTUVWXZ"
#define FAN_ANSWER 64

typedef struct fan_explore fan_explore;

/* fan_explore_new: searches at most `limit` full runs, and ten times as many abandoned ones (0: no
 * limit). NULL when out of memory. */
fan_explore *fan_explore_new(bool reduce, uint64_t limit);
void fan_explore_free(fan_explore *search);  /* `search` may be NULL */
void fan_explore_prune(fan_explore *search); /* call before the first run: Persistent sets of one */
/* fan_explore_begin: starts the next run; returns false if all orders (or `limit` of them) have
 * been run, or fan_explore_status is a failure. */
bool fan_explore_begin(fan_explore *search);
/* fan_explore_choose: returns the one of `enabled` (a bit mask, not 0) that acts next.
 * FAN_EXPLORE_NONE: all are asleep, so the run is redundant: abandon it (fan_explore_end); or out
 * of memory. */
int fan_explore_choose(fan_explore *search, uint32_t enabled);
/* fan_explore_pick: returns one of n <= 32 answers that a query may give to the step just chosen
 * (or to code before the first step); the search tries each.
 * -1: out of memory. */
int fan_explore_pick(fan_explore *search, int n);
/* fan_explore_access: reports an access of the step just chosen to `object`. FAN_ERR_NOMEM, which
 * fan_explore_status keeps. FAN_SCHED_DECIDE makes COUNTS conflict from the next run on; earlier
 * searches are repeated. */
fan_status fan_explore_access(fan_explore *search, uint64_t object, fan_sched_mode access);
void fan_explore_end(fan_explore *search);
/* fan_explore_complete: returns whether all orders were run, none left out by the limit. */
bool fan_explore_complete(const fan_explore *search);
uint64_t fan_explore_runs(const fan_explore *search); /* complete runs */
uint64_t fan_explore_abandoned(const fan_explore *search);
/* fan_explore_anew: how often the search started again; runs and abandoned are counted since
 * then */
uint64_t fan_explore_anew(const fan_explore *search);
/* fan_explore_schedule: writes the choices of the current or last run, one character per step
 * ('0'.. '9', 'a'.. 'v') or answer (FAN_ANSWERS); truncates. */
void fan_explore_schedule(const fan_explore *search, char *buf, size_t size);

/* fan_explore_replay: makes the next run alone follow `schedule`, outside the search (copied; after
 * its end, the lowest actor acts first). FAN_ERR_NOMEM, FAN_ERR_VALUE (invalid schedule). */
fan_status fan_explore_replay(fan_explore *search, const char *schedule);
/* fan_explore_sample: makes the next run alone a sample by `seed`, outside the search. Even seeds
 * choose uniformly at each step; odd ones give the actors random ranks that change at a few random
 * steps (a race that needs d changes at the right steps is then found with a chance of about 1 /
 * steps^d, whatever the number of orders). */
void fan_explore_sample(fan_explore *search, uint64_t seed);

/* fan_explore_strayed: returns whether a scenario was not repeatable: an actor that acted in an
 * earlier run, or that a replayed schedule names, could not act. */
bool fan_explore_strayed(const fan_explore *search);
/* fan_explore_write: writes n choices as a schedule, one character each; truncates. */
void fan_explore_write(const unsigned char *choices, size_t n, char *buf, size_t size);
/* fan_explore_status: FAN_ERR_NOMEM: the search is incomplete. */
fan_status fan_explore_status(const fan_explore *search);

#endif
