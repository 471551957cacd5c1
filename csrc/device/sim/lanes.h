/* lanes: streams and host threads as the checker knows them: their clocks, and the locks that order threads.
 *
 *   record   V[s] |= H[h]; E = V[s]           wait    V[s] |= H[h]; V[s] |= E
 *   sync     H[h] |= V[s] or E                lock    H[h] |= M[m]       unlock  M[m] = H[h]
 *
 * Title: Lanes are used again. The lane of a stream that is gone (fan_race_check_leave) is given to a new stream or
 * thread, which goes on counting, as soon as that adds no order: either nothing of the old one is left in the history,
 * or the thread that makes the new one knows all of it, and the new one knows it from its beginning. So there are only
 * as many lanes as there were streams at one time, and clocks are no wider. */
#ifndef FAN_DEVICE_SIM_LANES_H
#define FAN_DEVICE_SIM_LANES_H

#include "base/clock.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fan_race_check fan_race_check;

/* fan_race_check_lane: a new lane (a stream or a host thread); FAN_ERR_NOMEM. */
fan_status fan_race_check_lane(fan_race_check *o, uint32_t *lane, fan_error *err);
/* fan_race_check_reuse: a lane that was left, for one whose maker knows `seen` (Lanes are used again); false: there is
 * none. fan_race_check_leave: nothing is queued on `lane` any more. fan_race_check_name: operations of `lane` bear the
 * number `who` from now on (0 at first). */
bool fan_race_check_reuse(fan_race_check *o, const fan_clock *seen, uint32_t *lane);
void fan_race_check_leave(fan_race_check *o, uint32_t lane);
void fan_race_check_name(fan_race_check *o, uint32_t lane, uint64_t who);
uint64_t fan_race_check_who(const fan_race_check *o, uint32_t lane);
/* fan_race_check_host: says that `lane` is a host thread. What a host thread touches itself is over when its call
 * returns, and until then it holds the memory: so a release need not wait for it. A sync of a host thread does not
 * fail. FAN_ERR_NOMEM. */
fan_status fan_race_check_host(fan_race_check *o, uint32_t lane);
fan_clock *fan_race_check_clock(fan_race_check *o, uint32_t lane); /* borrowed; until the next fan_race_check_lane */

/* record, wait, sync, locked, unlocking: as the table says; FAN_ERR_NOMEM leaves all as it was. */
fan_status fan_race_check_record(fan_race_check *o, uint32_t lane, uint32_t host,
                                 fan_clock *event); /* event = V[lane] */
fan_status fan_race_check_wait(fan_race_check *o, uint32_t lane, uint32_t host, const fan_clock *event);
fan_status fan_race_check_sync(fan_race_check *o, uint32_t host, const fan_clock *with); /* H |= with */
fan_status fan_race_check_locked(fan_race_check *o, uint32_t host, uint64_t mutex);
fan_status fan_race_check_unlocking(fan_race_check *o, uint32_t host, uint64_t mutex);

/* Inside of the checker. */

/* fan__lane_room: lets the clock count `n` lanes without growing again. Its counts stay. */
int fan__lane_room(fan_clock *c, size_t n);
/* fan__lane_see: lane `to` comes after all that lane `from` knows. There is room (fan__lane_room_to_see). */
void fan__lane_see(fan_race_check *o, uint32_t to, uint32_t from);
int fan__lane_room_to_see(fan_race_check *o, uint32_t to, uint32_t from);

#ifdef FAN_TEST
/* fan_race_check_lanes: how many lanes there are, those that were left counted (tests). */
size_t fan_race_check_lanes(const fan_race_check *o);
#endif

#endif
