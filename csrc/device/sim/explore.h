/* explore: a search over all orders in which a few actors may act, by running a scenario again and again.
 *
 * Stateless: the driver runs the scenario from the start; at each step it says which actors could act, gets told which
 * one does, and reports what the step touched (its footprint). Two neighbouring steps with independent footprints
 * commute, and sleep sets leave out orders that differ only by such swaps. With `reduce` false all orders are run: that
 * is how the reduction itself is checked.
 *
 *   while (fan_explore_begin(x)) {
 *       while (actors left) {
 *           a = fan_explore_choose(x, mask);
 *           step(a);
 *           fan_explore_touched(x, ..);
 *       }
 *       fan_explore_end(x);
 *   }
 *
 * Title: What footprints must say. Steps commute if neither writes what the other touches. So a footprint names
 * everything that the step's course, or whether its actor (or another) may act, depends on, and everything that it
 * changes; a lock that is taken is written. Objects bear the same number in every run: name them by the thread that
 * made them and when in the course of its maker, never by address of the host or by order of arrival.
 *
 * Title: Sleep sets. When the search has run all orders that begin (from some point) with actor a, it goes on with b
 * and lets a sleep: no order is begun with a again until a step touches what a's step touches. The footprint of a
 * sleeping actor's step is the one that it had when it was run from that point; steps independent of it leave it as it
 * is, so it need not be run to be known. Every order is then equivalent to one that was run (Godefroid); what differs
 * between the two is neither a value nor a verdict.
 *
 * Title: All alone. A step that commutes with all that other actors ever do need not be tried later: no other actor is
 * chosen in its place (a persistent set of one). What others ever do is learnt as it is seen. Until one of them is seen
 * to touch what the step touches, no order that was left out can show it: the first actor to do so would do it behind
 * the step, too, in an order that is run. When it is seen, the search begins anew with what is known by then. This
 * holds only if an actor that cannot act has touched what it waits for, in the step that ended there: else it may be
 * waiting, unseen, for this very step. So it is done only on request (fan_explore_prune).
 */
#ifndef FAN_DEVICE_SIM_EXPLORE_H
#define FAN_DEVICE_SIM_EXPLORE_H

#include "base/status.h"
#include "base/thread.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_EXPLORE_ACTORS 32
#define FAN_EXPLORE_NONE (-1)

/* How a schedule writes the answers 0, 1, ..: 'N' is no, 'Y' is yes. In a list of choices they are FAN_ANSWER and up.
 */
#define FAN_ANSWERS "NYABCDEFGHIJKLMOPQRSTUVWXZ"
#define FAN_ANSWER 64

typedef struct fan_explore fan_explore;

/* fan_explore_new: `limit` runs at most are searched in full, and ten times as many abandoned (0: no limit). NULL when
 * out of memory. */
fan_explore *fan_explore_new(bool reduce, uint64_t limit);
void fan_explore_free(fan_explore *x);  /* NULL is fine */
void fan_explore_prune(fan_explore *x); /* before the first run: All alone */
/* fan_explore_begin: starts the next run; false when all orders (or `limit` of them) have been run, or
 * fan_explore_status is a failure. */
bool fan_explore_begin(fan_explore *x);
/* fan_explore_choose: which of `enabled` (bit mask, not 0) acts next. FAN_EXPLORE_NONE: every one sleeps, the run is
 * redundant: abandon it (fan_explore_end); also when out of memory. */
int fan_explore_choose(fan_explore *x, uint32_t enabled);
/* fan_explore_pick: which of n <= 32 answers the step just chosen (or whoever acts before the first) gets from what may
 * answer either way; each is tried. -1 when out of memory. */
int fan_explore_pick(fan_explore *x, int n);
/* fan_explore_touched: what the step just chosen did to `object`. FAN_ERR_NOMEM, which fan_explore_status keeps.
 * FAN_TOUCH_WEIGHS counts from the next run on for all that COUNTS; what was searched before that is searched again. */
fan_status fan_explore_touched(fan_explore *x, uint64_t object, fan_touch how);
void fan_explore_end(fan_explore *x);
bool fan_explore_complete(const fan_explore *x); /* all orders were run, none left out by the limit */
uint64_t fan_explore_runs(const fan_explore *x); /* complete runs */
uint64_t fan_explore_abandoned(const fan_explore *x);
uint64_t fan_explore_anew(
    const fan_explore *x); /* how often the search began anew: runs and abandoned are counted from the last time on */
/* fan_explore_schedule: the choices of the current or last run, one character per step ('0'.. '9', 'a'.. 'v') or answer
 * (FAN_ANSWERS); truncates. */
void fan_explore_schedule(const fan_explore *x, char *buf, size_t size);

/* The next run, and that one alone, is no part of the search: it follows `schedule` (copied; behind its end, the lowest
 * actor acts first), or is a sample by `seed`. Even seeds choose evenly at each step; odd ones give the actors random
 * ranks that change at a few random steps (a race that needs d changes at the right steps is then met with a chance of
 * about 1 / steps^d, whatever the number of orders). FAN_ERR_NOMEM, FAN_ERR_VALUE (not a schedule). */
fan_status fan_explore_replay(fan_explore *x, const char *schedule);
void fan_explore_sample(fan_explore *x, uint64_t seed);

/* fan_explore_strayed: a scenario did not repeat itself: an actor that acted in an earlier run, or that a replayed
 * schedule names, could not act. */
bool fan_explore_strayed(const fan_explore *x);
char fan_explore_char(unsigned char choice);         /* how a schedule writes it */
fan_status fan_explore_status(const fan_explore *x); /* FAN_OK, or FAN_ERR_NOMEM: the search is not complete */

#endif
