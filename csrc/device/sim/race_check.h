/* race_check: the happens-before checker: lanes, clocks, byte ranges; independent of devices and
 * gradients.
 *
 * Every stream and every host thread is a lane. An access is (lane, count); it happens before
 * another if its count is in the other's clock. Two accesses to a common byte, one of them a write,
 * must be ordered. History is kept by address and survives a release of the memory: a release must
 * be ordered after every access, and leaves a mark that later accesses to the bytes are checked
 * against.
 *
 *   launch   V[s] |= H[h]; V[s][s] += 1; each access is checked against the history of its bytes
 *   record, wait, sync, lock, unlock: see lanes below
 *   host     an access by lane h itself
 *   release  G = join of V of the given streams and H[h]; all history of the bytes must be in G
 *
 * Title: What is kept. Of each byte, the last write and the reads since that no later read covers.
 * That loses nothing: clocks are transitive, so an access ordered after the last write (or after
 * the covering read) is ordered after all that this was ordered after; any other access is a race
 * already. The verdict "a race so far" is exact; which of several races is reported first is
 * unspecified. */
#ifndef FAN_DEVICE_SIM_RACE_CHECK_H
#define FAN_DEVICE_SIM_RACE_CHECK_H

#include "array/array.h"
#include "base/clock.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* lanes: streams and host threads in the checker: their clocks, and the locks that order threads.
 *
 *   record   V[s] |= H[h]; E = V[s]           wait    V[s] |= H[h]; V[s] |= E
 *   sync     H[h] |= V[s] or E                lock    H[h] |= M[m]       unlock  M[m] = H[h]
 *
 * Title: Reuse of lanes. The lane of a freed stream (fan_race_check_leave) goes to a new stream or
 * thread, which continues its count, as soon as that adds no order: either the history has no more
 * references to the old one, or the clock of the thread that makes the new one contains all of it,
 * and so the new one's does from its beginning. So there are only as many lanes as there were
 * streams at one time, and clocks are no wider. */
typedef struct fan_race_check fan_race_check;

/* fan_race_check_lane: makes a lane for a stream or a host thread, whose operations get the number
 * `owner`. FAN_ERR_NOMEM. */
fan_status fan_race_check_lane(fan_race_check *check, uint64_t owner, uint32_t *lane,
                               fan_error *err);
/* fan_race_check_reuse: finds a retired lane for a maker with clock `seen` (Reuse of lanes).
 * false: there is none. */
bool fan_race_check_reuse(fan_race_check *check, const fan_clock *seen, uint64_t owner,
                          uint32_t *lane);
/* fan_race_check_leave: retires `lane`, on which nothing is queued any more. */
void fan_race_check_leave(fan_race_check *check, uint32_t lane);
uint64_t fan_race_check_owner(const fan_race_check *check, uint32_t lane);
/* fan_race_check_host: marks `lane` as a host thread. Its own accesses end when its call returns,
 * and until then it holds the memory: so a release need not wait for them. A sync of a host thread
 * does not fail. FAN_ERR_NOMEM. */
fan_status fan_race_check_host(fan_race_check *check, uint32_t lane);
/* borrowed, until the next fan_race_check_lane */
fan_clock *fan_race_check_clock(fan_race_check *check, uint32_t lane);

/* fan_race_check_record: record in the table: sets the event's clock to that of `lane`. In this and
 * in the next four, FAN_ERR_NOMEM changes nothing. */
fan_status fan_race_check_record(fan_race_check *check, uint32_t lane, uint32_t host,
                                 fan_clock *event);
/* fan_race_check_wait: wait in the table. */
fan_status fan_race_check_wait(fan_race_check *check, uint32_t lane, uint32_t host,
                               const fan_clock *event);
/* fan_race_check_sync: sync in the table: joins a clock to that of the host thread. */
fan_status fan_race_check_sync(fan_race_check *check, uint32_t host, const fan_clock *with);
/* fan_race_check_locked: lock in the table. */
fan_status fan_race_check_locked(fan_race_check *check, uint32_t host, uint64_t mutex);
/* fan_race_check_unlocking: unlock in the table. */
fan_status fan_race_check_unlocking(fan_race_check *check, uint32_t host, uint64_t mutex);

#ifdef FAN_TEST
/* fan_race_check_lanes: returns how many lanes there are, retired ones included (tests). */
size_t fan_race_check_lanes(const fan_race_check *check);
#endif

/* race: an operation, and a race of two. */
/* fan_op: an operation: its lane, name and line. Stored once per queued operation, shared by its
 * accesses. */
typedef struct fan_op {
    uint64_t number; /* counts operations */
    /* host: the lane that queued it */
    uint32_t lane;
    uint32_t host;
    uint64_t count; /* of its lane */
    uint64_t owner; /* the stream or thread of the lane at that time (fan_race_check_lane) */
    /* fan_race_check_over */
    bool over;
    bool awaited;
    char name[48];      /* "mul", "sum" */
    char call_site[96]; /* "train.py:31", or "" */
} fan_op;

typedef struct fan_race {
    fan_op first;
    fan_op second;
    bool first_writes;
    bool second_writes;
    bool release;  /* the second is a release of memory */
    bool released; /* the first is one: the second accesses freed memory */
    bool donated;  /* the first is an add to which the memory was donated */
    /* bytes in common (one run of them) */
    uintptr_t lo;
    uintptr_t hi;
} fan_race;

fan_race_check *fan_race_check_new(void);        /* NULL when out of memory */
void fan_race_check_free(fan_race_check *check); /* `check` may be NULL */

/* fan_race_check_plan: announces an access of the next operation, so that fan_race_check_begin
 * makes room and noting it cannot fail for lack of memory. Optional. */
void fan_race_check_plan(fan_race_check *check, const fan_array *a);
/* fan_race_check_begin: begins an operation on `lane`, queued by host lane `host` (may be the same
 * lane): ticks the lane. Its number is in *op, valid until the next operation of that lane begins.
 * FAN_ERR_NOMEM changes nothing. */
fan_status fan_race_check_begin(fan_race_check *check, uint32_t lane, uint32_t host,
                                const char *name, const char *call_site, uint64_t *op,
                                fan_error *err);
/* fan_race_check_op: returns that operation; valid as long as its number. */
const fan_op *fan_race_check_op(const fan_race_check *check, uint64_t op);
/* fan_race_check_access: notes that operation `op` accesses every byte run of `a`. Returns
 * FAN_ERR_RACE with *race (may be NULL) filled on a conflict (history is updated all the same);
 * FAN_ERR_NOMEM. */
fan_status fan_race_check_access(fan_race_check *check, uint64_t op, const fan_array *a, bool write,
                                 fan_race *race);
/* fan_race_check_over: marks operation `op` of a stream as one that releases need not wait for: the
 * host thread that queued it waits for it (`awaited`), or another owner keeps the memory until it
 * has run. Call it right after fan_race_check_begin. */
void fan_race_check_over(fan_race_check *check, uint64_t op, bool awaited);
/* fan_race_check_release: checks that host lane `host` may free the bytes [lo, hi) once `lanes` (n
 * of them) have passed, and leaves a mark; without memory for the mark only checks. */
fan_status fan_race_check_release(fan_race_check *check, uint32_t host, const uint32_t *lanes,
                                  size_t n, uintptr_t lo, uintptr_t hi, const char *call_site,
                                  fan_race *race);
/* fan_race_check_let_go: only checks: another owner keeps the bytes for now. */
fan_status fan_race_check_let_go(fan_race_check *check, uint32_t host, const uint32_t *lanes,
                                 size_t n, uintptr_t lo, uintptr_t hi, const char *call_site,
                                 fan_race *race);
/* fan_race_check_forget: drops the history of [lo, hi), releases included (for newly allocated
 * memory, whose release was checked). Cannot fail. */
void fan_race_check_forget(fan_race_check *check, uintptr_t lo, uintptr_t hi);

#ifdef FAN_TEST
fan_status fan_race_check_range(fan_race_check *check, uint64_t op, uintptr_t lo, uintptr_t hi,
                                bool write, fan_race *race);
/* fan_race_check_ranges: returns how many ranges of equal history there are (tests). */
size_t fan_race_check_ranges(const fan_race_check *check);
/* fan_race_check_reset: resets it, but keeps the lanes (with clocks of 0) and its memory. Costs as
 * much as there is history. */
void fan_race_check_reset(fan_race_check *check);
#endif

#endif
