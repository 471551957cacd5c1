/* race_check: the happens-before checker. Lanes, clocks, byte ranges; knows nothing of devices or gradients.
 *
 * Every stream and every host thread is a lane. An access is (lane, count); it happens before another if its count is
 * in the other's clock. Two accesses to a common byte, one of them a write, must be ordered. History is kept by address
 * and survives a release of the memory: a release must come after everything that touched it, and leaves a mark that
 * whoever touches the bytes later meets.
 *
 *   launch   V[s] |= H[h]; V[s][s] += 1; each access is held against the history of its bytes
 *   record, wait, sync, lock, unlock: lanes.h
 *   host     an access by lane h itself
 *   release  G = join of V of the given streams and H[h]; all history of the bytes must be in G
 *
 * Title: What is kept. Of each byte, the last write and the reads since that no later read covers. Nothing is lost by
 * that: clocks are transitive, so an access that comes after the last write (or after the covering read) comes after
 * all that this came after; and an access that does not is a race already. The verdict "a race so far" is exact; which
 * of several races is named first is not promised.
 */
#ifndef FAN_DEVICE_SIM_RACE_CHECK_H
#define FAN_DEVICE_SIM_RACE_CHECK_H

#include "array/array.h"
#include "base/clock.h"
#include "base/status.h"
#include "device/sim/lanes.h"
#include "device/sim/race.h"

fan_race_check *fan_race_check_new(void);    /* NULL when out of memory */
void fan_race_check_free(fan_race_check *o); /* NULL is fine */

/* fan_race_check_plan: announces an access of the next operation: fan_race_check_begin then makes room for it, so that
 * noting it cannot fail for want of memory. Optional. */
void fan_race_check_plan(fan_race_check *o, const fan_array *a);
/* fan_race_check_begin: a new operation on `lane`, queued by host lane `host` (may be the same lane): ticks the lane.
 * Its number is in *op, good until the next operation of that lane begins. FAN_ERR_NOMEM leaves all as it was. */
fan_status fan_race_check_begin(fan_race_check *o, uint32_t lane, uint32_t host, const char *name,
                                const char *call_site, uint64_t *op, fan_error *err);
/* fan_race_check_access: operation `op` touches every byte run of `a`. Returns FAN_ERR_RACE with *race (may be NULL)
 * filled on a conflict (history is updated all the same); FAN_ERR_NOMEM. */
fan_status fan_race_check_access(fan_race_check *o, uint64_t op, const fan_array *a, bool write, fan_race *race);
/* fan_race_check_over: a release need not wait for operation `op` of a stream: the host thread that queued it waits for
 * it (`awaited`), or something keeps the memory until it has run. Called right behind fan_race_check_begin. */
void fan_race_check_over(fan_race_check *o, uint64_t op, bool awaited);
/* fan_race_check_release: host lane `host` gives the bytes [lo, hi) back once `lanes` (n of them) have passed. If
 * memory is short the check is made and no mark is left. fan_race_check_let_go: the check alone: the bytes are kept by
 * something else for now. */
fan_status fan_race_check_release(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                  uintptr_t hi, const char *call_site, fan_race *race);
fan_status fan_race_check_let_go(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                 uintptr_t hi, const char *call_site, fan_race *race);
/* fan_race_check_forget: drops the history of [lo, hi), releases included (memory that is handed out afresh: its
 * release was checked). Cannot fail. */
void fan_race_check_forget(fan_race_check *o, uintptr_t lo, uintptr_t hi);

#ifdef FAN_TEST
fan_status fan_race_check_range(fan_race_check *o, uint64_t op, uintptr_t lo, uintptr_t hi, bool write, fan_race *race);
/* fan_race_check_ranges: how many ranges of equal history there are (tests). */
size_t fan_race_check_ranges(const fan_race_check *o);
/* fan_race_check_reset: as new, but the lanes stay (their clocks are 0 again) and so does the room that was made. Costs
 * as much as there is history. */
void fan_race_check_reset(fan_race_check *o);
#endif

#endif
