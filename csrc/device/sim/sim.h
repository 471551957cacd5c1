/* sim: a machine of simulated devices: streams are queues, work runs late and in any order that
 * streams and events allow.
 *
 * It implements backend.h like any backend; this header is for tests and users of the simulation.
 * Streams and events behave as in CUDA (docs/simulated-device.md). Nothing runs when it is queued:
 * at a sync, a read or a step the scheduler picks runnable heads of queues, by seed or by a named
 * schedule. Every access is checked against happens-before when it is queued (race_check.h).
 *
 * - A1: a stream is a queue.
 * - A2: an event is all earlier work of its stream.
 * - A3: a wait is for the latest record when it is queued; later records do not matter.
 * - A4: a wait for an event that was never recorded is no wait.
 * - A5: the order of launches on the host orders nothing across streams.
 * - A6: waits work across devices.
 * - A7: only the legacy default stream (handle 1) orders others, and of those only the blocking
 * ones: each call on it is ordered between theirs.
 * - A8: freed memory is reused at once.
 *
 * Title: Coverage of the search. In a spawned thread each public call begins with a yield
 * (base/thread.h, Calls and turns), and every call reports its footprint (explore.h): streams,
 * events, blocks of memory, locks, captures; and state without locks: slots, budgets, counters, the
 * end of other threads. Accesses that only add to a number (memory in use, parked bytes, queued
 * work) commute until some thread decides by the number. A thread that calls another machine
 * reports to its own. Two things are left out, because no call depends on them: addresses (freed
 * memory was checked at its last drop, is poisoned, and starts a new history), and how much work
 * has run (only queries and steps depend on it: they count as writers, a sync only reads).
 * Reference counts are atomic and not reported: which of two threads makes the last drop is tried
 * only as far as their other steps differ.
 *
 * Title: Queries. Whether work has run by now is up to the device, and a verdict may depend on it.
 * If a search chooses (fan_sim_chooser.pick), a query of an event that is not yet ordered before
 * the caller may return either answer: "not yet", at most FAN_ASKS times since the last record, or
 * "yes", and then the work that the event needs runs. Otherwise the query returns the true state,
 * and the backend's `nudge` runs one piece of work, so that a polling thread ends. */
#ifndef FAN_DEVICE_SIM_SIM_H
#define FAN_DEVICE_SIM_SIM_H

#include "base/thread.h"
#include "device/device.h"
#include "device/sim/race_check.h"

typedef struct fan_sim fan_sim;

typedef enum fan_sim_schedule {
    FAN_SIM_SEEDED,
    FAN_SIM_FIFO,
    FAN_SIM_LIFO,
    FAN_SIM_STARVE,
    FAN_SIM_ROUND_ROBIN
} fan_sim_schedule;

typedef struct fan_sim_config {
    int devices; /* 1 .. 64 */
    uint64_t seed;
    fan_sim_schedule schedule;
    uint64_t starve; /* handle of the stream that FAN_SIM_STARVE runs last */
    size_t memory;   /* bytes of each device's arena; reserved, not touched */
    bool run_work;   /* false: only check, never move bytes (proofs) */
    /* a captured graph does not keep its memory: the owner must not free it (a driver's memory) */
    bool bare;
    /* the clock's cost model; 0: defaults (3 us, 1000 GB/s) */
    double launch_us;
    double gbytes_per_s;
} fan_sim_config;

/* Callbacks of the frontend; may be NULL. call_site: writes "file.py:31" of the calling thread's
 * user code. */
typedef struct fan_sim_hooks {
    void (*call_site)(void *ctx, char *buf, size_t size);
    void (*warn)(void *ctx, const char *text); /* a wait for an event that was never recorded */
    void *ctx;
    /* before_block, after_block: called around whatever blocks the calling thread in the machine
     * (waiting for its turn, or for another's work); the result of the first is passed to the
     * second. A frontend releases its own lock in between. */
    void *(*before_block)(void *ctx);
    void (*after_block)(void *ctx, void *before);
} fan_sim_hooks;


fan_status fan_sim_new(const fan_sim_config *config, const fan_sim_hooks *hooks, fan_sim **out,
                       fan_error *err);
fan_sim *fan_sim_hold(fan_sim *machine);
void fan_sim_drop(fan_sim *machine); /* devices hold their machine; the last drop frees it */
/* fan_sim_enter: makes "sim:0" the first device of m on this thread, until fan_sim_leave undoes the
 * innermost enter of m, or the thread ends; holds m meanwhile. FAN_ERR_NOMEM. */
fan_status fan_sim_enter(fan_sim *machine, fan_error *err);
void fan_sim_leave(const fan_sim *machine);
/* fan_sim_entered: the innermost one of this thread, borrowed; NULL: none. */
fan_sim *fan_sim_entered(void);
fan_device *fan_sim_device(fan_sim *machine, int index); /* no hold; NULL out of range */
fan_sim *fan_sim_of(const fan_device *d);                /* NULL for devices of other backends */
fan_status fan_sim_stream(fan_sim *machine, int device, bool blocking, fan_stream **out,
                          fan_error *err);
/* fan_sim_name_stream: gives s, a stream of m, the name by which messages about races call it; the
 * text is copied. Call it once for each stream. FAN_ERR_NOMEM: it has no name. */
fan_status fan_sim_name_stream(fan_sim *machine, const fan_stream *s, const char *name,
                               fan_error *err);
/* fan_sim_list: lists s for fan_sim_listed and the backend's find_stream while it lives. */
void fan_sim_list(fan_sim *machine, fan_stream *s);
/* fan_sim_listed: returns all such streams in the order of their making, each with a hold, in an
 * array that the caller frees. */
fan_status fan_sim_listed(fan_sim *machine, fan_stream ***out, size_t *n, fan_error *err);
/* Capture (rules in device/sim/capture.h). Work queued on a captured stream is stored in a graph
 * and checked when that is launched: then each member of the capture is a queue of its own. A graph
 * holds its machine, and the memory that it uses (except with `bare`). */
typedef struct fan_sim_graph fan_sim_graph;
/* fan_sim_capture_begin: begins a capture of s in a mode of fan_capture_mode. */
fan_status fan_sim_capture_begin(fan_sim *machine, fan_stream *s, int mode, fan_error *err);
/* fan_sim_capture_end: ends the capture of s and returns its graph. */
fan_status fan_sim_capture_end(fan_sim *machine, fan_stream *s, fan_sim_graph **out,
                               fan_error *err);
/* fan_sim_capture_state: returns 0 none, 1 active, 2 broken; and its number, if `id` is not NULL.
 */
int fan_sim_capture_state(fan_sim *machine, fan_stream *s, uint64_t *id);
fan_status fan_sim_graph_launch(fan_sim_graph *g, fan_stream *s, fan_error *err);
/* fan_sim_recorder: the entries for graph trees (device/backend.h). */
extern const fan_recorder fan_sim_recorder;
void fan_sim_graph_drop(fan_sim_graph *g); /* g may be NULL */
#ifdef FAN_TEST
/* fan_sim_unsafe: a call that is illegal beside a capture (as cudaMalloc; `always`: in any mode, as
 * one that waits for the whole device), on a thread whose own mode is global: FAN_ERR_CAPTURE, and
 * the captures that it disturbs break. */
fan_status fan_sim_unsafe(fan_sim *machine, const char *call, bool always, fan_error *err);
#endif
uint64_t fan_sim_seed(const fan_sim *machine);

/* fan_sim_launch: queues a kernel of the user. `fn` is called later, by the thread that runs the
 * machine, with no lock of ours held, on the device's memory itself; `fini` once, after it ran or
 * when it is dropped unrun. On failure fini is not called (after FAN_ERR_RACE the launch is queued,
 * but does nothing). Marks memory made by fan_sim_array (D31). */
typedef struct fan_sim_kernel {
    const char *name;
    fan_status (*fn)(void *ctx, fan_error *err);
    void (*fini)(void *ctx);
    void *ctx;
    fan_array *const *reads;
    size_t nreads;
    fan_array *const *writes;
    size_t nwrites;
    double us; /* < 0: by the cost model */
} fan_sim_kernel;
fan_status fan_sim_launch(fan_sim *machine, fan_stream *s, const fan_sim_kernel *k, fan_error *err);
/* fan_sim_array: allocates memory of the user (D31), ownerless until first written by a launch;
 * filled from `init` (host; NULL: poisoned) before all later work. */
fan_status fan_sim_array(fan_sim *machine, int device, fan_dtype dtype, int ndim,
                         const int64_t *shape, const fan_array *init, fan_array **out,
                         fan_error *err);
/* fan_sim_synchronize: runs everything queued; FAN_ERR_DEADLOCK names the stuck heads. */
fan_status fan_sim_synchronize(fan_sim *machine, fan_error *err);
/* fan_sim_step: runs one runnable head; *ran false if there is none. */
fan_status fan_sim_step(fan_sim *machine, bool *ran, fan_error *err);

/* Races. The first is kept; a release cannot fail, so its race is raised by the machine's next
 * call. */
uint64_t fan_sim_races(fan_sim *machine);
/* fan_sim_pending: raises (once) a race that was not raised yet. */
fan_status fan_sim_pending(fan_sim *machine, fan_error *err);
/* fan_sim_check: switches the checker off and on (initially on). */
void fan_sim_check(fan_sim *machine, bool on);

void fan_sim_leave_out(fan_sim *machine, uint64_t plan_bits);
#ifdef FAN_TEST
/* fan_sim_fail_at: the backend's call number `index` from now (0: the next; alloc, read, sync,
 * event_init, record, wait, query, event_sync, run, launch) fails with `status` (FAN_ERR_DEVICE,
 * FAN_ERR_DEVICE_NOMEM), once, and changes nothing. < 0: none does. */
void fan_sim_fail_at(fan_sim *machine, int64_t index, fan_status status);
uint64_t fan_sim_calls(fan_sim *machine); /* calls so far */
/* fan_sim_unsound: returns how many elided waits did not hold (must be 0: Elision). */
uint64_t fan_sim_unsound(fan_sim *machine);
#endif
double fan_sim_host_us(fan_sim *machine);   /* the clock: host time spent queueing */
double fan_sim_device_us(fan_sim *machine); /* end of the last work queued */

/* Host threads (D30). The machine runs its spawned threads one at a time. */
/* fan_sim_spawn: registers a host thread (its lane starts after the spawner's clock); sets *actor
 * to its number. */
fan_status fan_sim_spawn(fan_sim *machine, int *actor, fan_error *err);
/* fan_sim_thread_begin: called first on the new OS thread; blocks until it is first chosen;
 * installs the thread's hooks. false: the machine gave up (deadlock, abandoned run): return at
 * once, without fan_sim_thread_end. */
bool fan_sim_thread_begin(fan_sim *machine, int actor);
/* fan_sim_thread_apart: declares that this thread shares no host memory and no graph with threads
 * of another number than this; 0 at first. */
void fan_sim_thread_apart(int number);
/* fan_sim_thread_end: called last on that thread; chooses the next one. If an actor's thread could
 * not be started, any thread calls it. */
void fan_sim_thread_end(fan_sim *machine, int actor);
/* fan_sim_join: on the main thread: runs all spawned threads to their end by the chooser;
 * FAN_ERR_DEADLOCK if all left are blocked, with a text about them. After that, and in a run that
 * was abandoned (fan_sim_abandoned; the join itself returns FAN_OK), the machine has given up: its
 * calls return FAN_ERR_DEADLOCK or FAN_ERR_STATE, until a reset. The caller has released the locks
 * that the threads need (the GIL), or before_block does. */
fan_status fan_sim_join(fan_sim *machine, fan_error *err);
/* fan_sim_chooser: chooses the next actor. `choose` receives the mask of actors that may act and
 * returns one, or -1 to abandon the run; NULL: by seed. `access`: the footprint of the current
 * step; an object has the same number in every run of a repeatable scenario. Neither may call the
 * machine. */
typedef struct fan_sim_chooser {
    int (*choose)(void *ctx, uint32_t enabled);
    void (*access)(void *ctx, uint64_t object, fan_sched_mode mode);
    /* returns one of n possible answers (Queries); NULL: the true state */
    int (*pick)(void *ctx, int n);
    void *ctx;
} fan_sim_chooser;
/* fan_sim_read_thread: reports that the calling thread of a machine reads an actor's end. */
void fan_sim_read_thread(fan_sim *machine, int actor);
/* fan_sim_after_thread: orders the calling thread, which has read the result of an ended actor,
 * after all that the actor did. FAN_ERR_NOMEM. */
fan_status fan_sim_after_thread(fan_sim *machine, int actor, fan_error *err);
/* fan_sim_read_all: reports that the calling thread reads state that every call on the machine may
 * change: its clock, its counts. */
void fan_sim_read_all(fan_sim *machine);
void fan_sim_set_chooser(fan_sim *machine, const fan_sim_chooser *c); /* copied; NULL: by seed */
/* fan_sim_limit: as fan_host_sched_limit. */
void fan_sim_limit(fan_sim *machine, size_t steps);
/* fan_sim_steps: as fan_host_sched_steps. */
size_t fan_sim_steps(fan_sim *machine);
/* fan_sim_break: as fan_host_sched_break. */
int fan_sim_break(fan_sim *machine, const char *text);
bool fan_sim_abandoned(const fan_sim *machine);
/* fan_sim_stuck: returns, after a deadlock, whether the actor's thread will never end: do not wait
 * for it. It keeps its hold on the machine. */
bool fan_sim_stuck(fan_sim *machine, int actor);
/* fan_sim_host_schedule: writes the choices so far, as fan_explore_schedule does. */
void fan_sim_host_schedule(const fan_sim *machine, char *buf, size_t size);

/* fan_sim_gave_up: returns whether the run was abandoned, or is in a deadlock: waiting threads need
 * not wait any longer. */
bool fan_sim_gave_up(const fan_sim *machine);

#ifdef FAN_TEST
bool fan_sim_first_race(fan_sim *machine, fan_race *out);
/* fan_sim_host_read: runs the machine until `s` (NULL: the device's current stream) is idle, notes
 * a host read of `a` and copies it to `dst`. */
fan_status fan_sim_host_read(fan_sim *machine, fan_stream *s, const fan_array *dst,
                             const fan_array *a, fan_error *err);
/* fan_sim_reset: resets the machine (same streams, same seed), cheaply: for proofs with millions of
 * runs. All its memory must be freed, and no thread be inside: FAN_ERR_STATE otherwise. Streams
 * made since stay. */
fan_status fan_sim_reset(fan_sim *machine, fan_error *err);
#endif

#endif
