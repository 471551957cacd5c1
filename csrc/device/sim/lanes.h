/* lanes: streams and host threads in the checker: their clocks, and the locks that order threads.
 *
 *   record   V[s] |= H[h]; E = V[s]           wait    V[s] |= H[h]; V[s] |= E
 *   sync     H[h] |= V[s] or E                lock    H[h] |= M[m]       unlock  M[m] = H[h]
 *
 * Title: Reuse of lanes. The lane of a freed stream (fan_race_check_leave) goes to a new stream or thread, which
 * continues its count, as soon as that adds no order: either the history has no more references to the old one, or the
 * clock of the thread that makes the new one contains all of it, and so the new one's does from its beginning. So there
 * are only as many lanes as there were streams at one time, and clocks are no wider. */
#ifndef FAN_DEVICE_SIM_LANES_H
#define FAN_DEVICE_SIM_LANES_H

#include "base/clock.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fan_race_check fan_race_check;

/* fan_race_check_lane: makes a lane (for a stream or a host thread); FAN_ERR_NOMEM. */
fan_status fan_race_check_lane(fan_race_check *o, uint32_t *lane, fan_error *err);
/* fan_race_check_reuse: returns a retired lane for a maker with clock `seen` (Reuse of lanes); false: none.
 * fan_race_check_leave: retires `lane`, on which nothing is queued any more. fan_race_check_name: gives later
 * operations of `lane` the number `owner` (0 at first). */
bool fan_race_check_reuse(fan_race_check *o, const fan_clock *seen, uint32_t *lane);
void fan_race_check_leave(fan_race_check *o, uint32_t lane);
void fan_race_check_name(fan_race_check *o, uint32_t lane, uint64_t owner);
uint64_t fan_race_check_owner(const fan_race_check *o, uint32_t lane);
/* fan_race_check_host: marks `lane` as a host thread. Its own accesses end when its call returns, and until then it
 * holds the memory: so a release need not wait for them. A sync of a host thread does not fail. FAN_ERR_NOMEM. */
fan_status fan_race_check_host(fan_race_check *o, uint32_t lane);
fan_clock *fan_race_check_clock(fan_race_check *o, uint32_t lane); /* borrowed, until the next fan_race_check_lane */

/* record, wait, sync, locked, unlocking: as in the table; FAN_ERR_NOMEM changes nothing. */
fan_status fan_race_check_record(fan_race_check *o, uint32_t lane, uint32_t host,
                                 fan_clock *event); /* event = V[lane] */
fan_status fan_race_check_wait(fan_race_check *o, uint32_t lane, uint32_t host, const fan_clock *event);
fan_status fan_race_check_sync(fan_race_check *o, uint32_t host, const fan_clock *with); /* H |= with */
fan_status fan_race_check_locked(fan_race_check *o, uint32_t host, uint64_t mutex);
fan_status fan_race_check_unlocking(fan_race_check *o, uint32_t host, uint64_t mutex);

/* Internal to the checker. */

/* fan__lane_room: makes room for `n` lanes in the clock. Its counts stay. */
int fan__lane_room(fan_clock *c, size_t n);
/* fan__lane_join: joins lane `from`'s clock to lane `to`'s. There must be room (fan__lane_room_to_join). */
void fan__lane_join(fan_race_check *o, uint32_t to, uint32_t from);
int fan__lane_room_to_join(fan_race_check *o, uint32_t to, uint32_t from);

#ifdef FAN_TEST
/* fan_race_check_lanes: returns how many lanes there are, retired ones included (tests). */
size_t fan_race_check_lanes(const fan_race_check *o);
#endif

#endif
