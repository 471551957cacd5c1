/* order: the happens-before checker. Lanes, clocks, byte ranges; knows nothing of devices or gradients.
 *
 * Every stream and every host thread is a lane. An access is (lane, count); it happens before another if its count is
 * in the other's clock. Two accesses to a common byte, one of them a write, must be ordered. History is kept by address
 * and survives a release of the memory: a release must come after everything that touched it, and leaves a mark that
 * whoever touches the bytes later meets.
 *
 *   launch   V[s] |= H[h]; V[s][s] += 1; each access is held against the history of its bytes
 *   record   V[s] |= H[h]; E = V[s]           wait    V[s] |= H[h]; V[s] |= E
 *   sync     H[h] |= V[s] or E                lock    H[h] |= M[m]       unlock  M[m] = H[h]
 *   host     an access by lane h itself
 *   release  G = join of V of the given streams and H[h]; all history of the bytes must be in G
 *
 * Title: What is kept. Of each byte, the last write and the reads since that no later read covers. Nothing is lost by
 * that: clocks are transitive, so whoever comes after the last write (or after the covering read) comes after all that
 * it came after; and whoever does not is a race already. The verdict "a race so far" is exact; which of several races
 * is named first is not promised.
 *
 * Title: Lanes are used again. A lane whose stream has gone (fan_race_check_leave) is another's, who goes on counting,
 * as soon as that adds no order: nothing of it is left in the history, or whoever makes the other knows all of it, and
 * so does the other from its beginning. So lanes are as many as streams were at one time, and clocks no wider.
 *
 * Ranges of equal history lie in short sorted runs (chunks) under one sorted directory: an access to a range that is
 * known as such costs two binary searches and allocates nothing.
 */
#ifndef FAN_DEVICE_ORDER_H
#define FAN_DEVICE_ORDER_H

#include "array/array.h"
#include "base/clock.h"
#include "base/status.h"

typedef struct fan_race_check fan_race_check;

/* fan_op: who did it, kept once per queued operation and shared by its accesses. */
typedef struct fan_op {
    uint64_t number;     /* counts operations */
    uint32_t lane, host; /* host: the lane that queued it */
    uint64_t count;      /* of its lane */
    uint64_t who;        /* whose the lane was then (fan_race_check_name) */
    bool over, awaited;  /* fan_race_check_over */
    char name[48];       /* "mul", "sum" */
    char site[96];       /* "train.py:31", or "" */
} fan_op;

typedef struct fan_race {
    fan_op first, second;
    bool first_writes, second_writes;
    bool release;     /* the second is a release of memory */
    bool released;    /* the first is one: the second touches memory that was given back */
    uintptr_t lo, hi; /* bytes in common (one run of them) */
} fan_race;

fan_race_check *fan_race_check_new(void);    /* NULL when out of memory */
void fan_race_check_free(fan_race_check *o); /* NULL is fine */
/* fan_race_check_reset: as new, but the lanes stay (their clocks are 0 again) and so does the room that was made. Costs
 * as much as there is history. */
void fan_race_check_reset(fan_race_check *o);
/* fan_race_check_lane: a new lane (a stream or a host thread); FAN_ERR_NOMEM. */
fan_status fan_race_check_lane(fan_race_check *o, uint32_t *lane, fan_error *err);
/* fan_race_check_reuse: a lane that was left, for who knows `seen` (Lanes are used again); false: there is none.
 * fan_race_check_leave: nothing is queued on `lane` any more. fan_race_check_name: what the operations of `lane` from
 * now on say for `who` (0 at first). */
bool fan_race_check_reuse(fan_race_check *o, const fan_clock *seen, uint32_t *lane);
void fan_race_check_leave(fan_race_check *o, uint32_t lane);
void fan_race_check_name(fan_race_check *o, uint32_t lane, uint64_t who);
uint64_t fan_race_check_who(const fan_race_check *o, uint32_t lane);
/* fan_race_check_lanes: how many lanes there are, those that were left counted (tests). */
size_t fan_race_check_lanes(const fan_race_check *o);
/* fan_race_check_host: says that `lane` is a host thread. What a host thread touched itself was over when its call
 * returned, and it held the memory until then: a release does not ask for it. A sync of a host thread does not fail.
 * FAN_ERR_NOMEM.
 */
fan_status fan_race_check_host(fan_race_check *o, uint32_t lane);
fan_clock *fan_race_check_clock(fan_race_check *o, uint32_t lane); /* borrowed; until the next fan_race_check_lane */

/* fan_race_check_plan: tells of an access that the next operation will make: fan_race_check_begin then makes room for
 * it, and noting it cannot fail for want of memory. Optional. */
void fan_race_check_plan(fan_race_check *o, const fan_array *a);
/* fan_race_check_begin: a new operation on `lane`, queued by host lane `host` (may be the same lane): ticks the lane.
 * What it is called by in *op, good until the next operation of that lane begins. FAN_ERR_NOMEM leaves all as it was.
 */
fan_status fan_race_check_begin(fan_race_check *o, uint32_t lane, uint32_t host, const char *name, const char *site,
                                uint64_t *op, fan_error *err);
/* fan_race_check_access: operation `op` touches every byte run of `a`. Returns FAN_ERR_RACE with *race (may be NULL)
 * filled on a conflict (history is updated all the same); FAN_ERR_NOMEM. */
fan_status fan_race_check_access(fan_race_check *o, uint64_t op, const fan_array *a, bool write, fan_race *race);
/* fan_race_check_over: the same of an operation on a stream: the host thread that queued it waits for it (awaited), or
 * somebody keeps the memory until it has run. Right behind fan_race_check_begin. */
void fan_race_check_over(fan_race_check *o, uint64_t op, bool awaited);
fan_status fan_race_check_range(fan_race_check *o, uint64_t op, uintptr_t lo, uintptr_t hi, bool write, fan_race *race);
/* fan_race_check_release: the bytes [lo, hi) are given back once `lanes` (n of them) have passed, by host lane `host`.
 * Where memory is short the check is made and no mark is left. fan_race_check_let_go: the check alone: somebody else
 * keeps them for now. */
fan_status fan_race_check_release(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                  uintptr_t hi, const char *site, fan_race *race);
fan_status fan_race_check_let_go(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                 uintptr_t hi, const char *site, fan_race *race);
/* fan_race_check_forget: drops the history of [lo, hi), releases included (memory that is handed out afresh: its
 * release was checked). Cannot fail. */
void fan_race_check_forget(fan_race_check *o, uintptr_t lo, uintptr_t hi);

/* record, wait, sync, locked, unlocking: as above; FAN_ERR_NOMEM leaves all as it was. */
fan_status fan_race_check_record(fan_race_check *o, uint32_t lane, uint32_t host,
                                 fan_clock *event); /* event = V[lane] */
fan_status fan_race_check_wait(fan_race_check *o, uint32_t lane, uint32_t host, const fan_clock *event);
fan_status fan_race_check_sync(fan_race_check *o, uint32_t host, const fan_clock *with); /* H |= with */
fan_status fan_race_check_locked(fan_race_check *o, uint32_t host, uint64_t mutex);
fan_status fan_race_check_unlocking(fan_race_check *o, uint32_t host, uint64_t mutex);

/* fan_race_check_ranges: how many ranges of equal history there are (tests). */
size_t fan_race_check_ranges(const fan_race_check *o);

#endif
