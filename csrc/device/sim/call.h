/* call: the checks at the start of every call on a machine: has the machine given up, is this call planned to fail? And
 * the report of a race. */
#ifndef FAN_DEVICE_SIM_CALL_H
#define FAN_DEVICE_SIM_CALL_H

#include "device/sim/machine.h"

/* footprint: reports to the search of host orders: which thread of the machine acts, and what it accesses.
 *
 * A name is a kind and a number within it, the same in every order of the threads (explore.h, Contents of
 * footprints). */
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
    OF_STREAMS, /* the set of streams */
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
#define OF_ANOTHER (UINT64_C(1) << 63) /* of another machine than the thread's: all others count as one */

/* Numbers of mutexes of spawned threads: (machine, thread, index among its mutexes), above the counted ones. */
#define MADE_HERE (UINT64_C(1) << 62)
#define OF_ITS_MAKER ((UINT64_C(1) << 46) - 1)

/* The state of the calling thread, if the machine spawned it; for other threads `m` is NULL. */
typedef struct fan__sim_thread {
    fan_sim *m;
    int actor;
    bool fresh; /* a call has just begun: its first yield repeats that of its beginning */
    bool vain;  /* its last query returned "not yet" */
    int apart;  /* threads of another number share no host memory and no graph with it */
    /* of any thread: depth of kernels being run. A kernel is one step: no other thread runs inside it. */
    int kernels;
    fan_thread_hooks hooks;
} fan__sim_thread;

extern _Thread_local fan__sim_thread fan__sim_here;

/* fan__sim_actor: returns the number of the calling thread on m; -1: m did not spawn it. fan__sim_host: its index among
 * the host threads. fan__sim_lane: its lane of the checker. */
static inline int fan__sim_actor(const fan_sim *m) { return fan__sim_here.m == m ? fan__sim_here.actor : -1; }
static inline size_t fan__sim_host(const fan_sim *m) { return (size_t)(1 + fan__sim_actor(m)); }
static inline uint32_t fan__sim_lane(const fan_sim *m) { return m->host_lane[fan__sim_host(m)]; }
/* fan__sim_maker: returns a number for the thread that makes an object on m; threads of other machines share one. */
size_t fan__sim_maker(void);
/* fan__sim_new_name: returns a name for a new object: the thread, and how many it made before. So the object has the
 * same name in every order of the other threads. */
uint64_t fan__sim_new_name(fan_sim *m, int kind);
/* fan__sim_access: reports an access to the search of the calling thread's machine, whichever machine owns the
 * object. */
void fan__sim_access(const fan_sim *m, uint64_t name, fan_sched_mode how);

#define FAN__SITE 96

void fan__sim_call_site(const fan_sim *m, char *buf, size_t size);
fan_status fan__sim_alive(fan_sim *m, fan_error *err);
/* fan__sim_enter: begins every call of the table, with the machine locked. Fails if the machine has given up, or if
 * this call is planned to fail. */
fan_status fan__sim_enter(fan_sim *m, const char *call, fan_error *err);
fan_status fan__sim_raise(fan_sim *m, const fan_race *race, fan_error *err);
/* fan__sim_raise_pending: raises a race that a release found; the first later call that can fail does it. */
fan_status fan__sim_raise_pending(fan_sim *m, fan_error *err);
void fan__sim_keep_race(fan_sim *m, const fan_race *race);

/* race_text: a race as a sentence: both operations, their streams, their lines, the missing wait. */

#endif
