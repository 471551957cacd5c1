/* footprint: what the search of host orders is told: which thread of the machine acts, and what it touches.
 *
 * A name is a kind and a number within it, the same in every order of the threads (explore.h, What footprints must
 * say). */
#ifndef FAN_DEVICE_SIM_FOOTPRINT_H
#define FAN_DEVICE_SIM_FOOTPRINT_H

#include "device/sim/machine.h"

/* Footprints: a kind, and a number within it. */
enum {
    OF_STREAM = 1,
    OF_EVENT,
    OF_BLOCK,
    OF_MUTEX,
    OF_PROGRESS,
    OF_FAULTS,
    OF_QUEUED,
    OF_CAPTURES,
    OF_MEMORY,
    OF_CALLS,
    OF_STREAMS, /* which there are */
    OF_THREAD,
    OF_ACTORS,
    OF_BUDGET,
    OF_COUNTERS,
    OF_HOST,
    OF_OPTIONS,
    OF_POOL,
    OF_GRAPH,
    OF_WAITED
};

#define FAN__NAME(kind, number) ((uint64_t)(kind) << 56 | ((number) & ((UINT64_C(1) << 56) - 1)))
#define OF_ANOTHER (UINT64_C(1) << 63) /* of another machine than the thread's: all others are one */

/* Numbers of mutexes that spawned threads make: (machine, thread, how many it made before), above those that are
 * counted. */
#define MADE_HERE (UINT64_C(1) << 62)
#define OF_ITS_MAKER ((UINT64_C(1) << 46) - 1)

/* What the machine knows of the calling thread, if it spawned it; for other threads `m` is NULL. */
typedef struct fan__sim_thread {
    fan_sim *m;
    int actor;
    bool fresh; /* it has just begun a call: its first yield is this one */
    bool vain;  /* its last query was answered "not yet" */
    /* of any thread: kernels that it runs now. A kernel is one step: no other thread gets the turn inside. */
    int kernels;
    fan_thread_hooks hooks;
} fan__sim_thread;

extern _Thread_local fan__sim_thread fan__sim_here;

/* fan__sim_actor: the number of the calling thread on m; -1: m did not spawn it. fan__sim_host: its place among the
 * host threads. fan__sim_lane: its lane of the checker. */
static inline int fan__sim_actor(const fan_sim *m) { return fan__sim_here.m == m ? fan__sim_here.actor : -1; }
static inline size_t fan__sim_host(const fan_sim *m) { return (size_t)(1 + fan__sim_actor(m)); }
static inline uint32_t fan__sim_lane(const fan_sim *m) { return m->host_lane[fan__sim_host(m)]; }
/* fan__sim_maker: a number for the thread that makes something on m; threads of another machine have one of their own.
 */
size_t fan__sim_maker(void);
/* fan__sim_new_name: a name for an object made now: the thread, and how many it made before. So the object has the same
 * name in every order of the other threads. */
uint64_t fan__sim_new_name(fan_sim *m, int kind);
/* fan__sim_touch: reports to the search of the machine of the calling thread, whichever machine the object belongs to.
 */
void fan__sim_touch(const fan_sim *m, uint64_t name, fan_touch how);

#endif
