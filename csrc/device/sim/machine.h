/* machine: the structs of a simulated machine, and the functions that its files call of each other,
 * a section per file. */
#ifndef FAN_DEVICE_SIM_MACHINE_H
#define FAN_DEVICE_SIM_MACHINE_H

#include "array/extents.h"
#include "device/event.h"
#include "device/job.h"
#include "device/backend.h"
#include "device/sim/capture.h"
#include "device/sim/host_sched.h"
#include "device/sim/race_check.h"
#include "device/sim/sim.h"

/* arena: addresses of one mapping, allocated first-fit: the lowest free block first, so that freed
 * memory is reused at once.
 *
 * Blocks begin at multiples of 64 bytes. With `poison`, free memory is filled with 0xA5, which
 * shows up in work that reads memory it must not read. Not thread-safe. */
#define FAN_ARENA_ALIGN 64

typedef struct fan_block {
    uintptr_t lo;
    uintptr_t hi;
    bool used;
    bool automatic; /* meaning defined by the arena's owner, as of the next three */
    bool left;
    uint32_t graphs;
    uint64_t name;
} fan_block;

typedef struct fan_arena {
    uintptr_t base;
    size_t bytes; /* mapped; a multiple of 64 */
    bool poison;
    /* sorted, contiguous from base on; after the last, memory that was never allocated */
    fan_block *blocks;
    size_t n;
    size_t cap;
    size_t hint; /* no block before it is free */
    /* used blocks, their bytes */
    size_t live;
    size_t in_use;
} fan_arena;

/* fan_arena_init: reserves `bytes` of addresses, without touching them. Returns 0, or -1 if the
 * system refuses. */
int fan_arena_init(fan_arena *a, size_t bytes, bool poison);
void fan_arena_fini(fan_arena *a);
/* fan_arena_alloc: returns the new block, valid until the next alloc or free, or NULL: no room, or,
 * with *host, no host memory for the block table. */
fan_block *fan_arena_alloc(fan_arena *a, size_t bytes, bool *host);
/* fan_arena_find: returns the used block that contains `address`; NULL if none. */
fan_block *fan_arena_find(fan_arena *a, uintptr_t address);
void fan_arena_free(fan_arena *a, uintptr_t lo);

#ifdef FAN_TEST
/* fan_arena_reset: frees every block, and poisons it if configured. */
void fan_arena_reset(fan_arena *a);
#endif

typedef struct fan_sim_queue fan_sim_queue;

typedef struct fan_sim_op fan_sim_op;

typedef struct fan_sim_recording fan_sim_recording;

/* A point in a queue: everything up to its `upto`-th op. */
typedef struct fan_sim_point {
    fan_sim_queue *queue; /* counted; NULL: none */
    uint64_t upto;
} fan_sim_point;

/* A stream's queue. It outlives its fan_stream while work, events or waits refer to it. */
struct fan_sim_queue {
    size_t refs;
    size_t at; /* its index in the machine's list */
    int device;
    uint64_t handle;
    uint64_t name; /* for footprints */
    uint32_t lane;
    fan_stream *stream; /* the stream that a user made, while it lives; not held */
    bool blocking;
    bool legacy;
    bool running; /* a thread is running its head */
    /* ops ever, ops run; events and waits use these numbers */
    uint64_t queued;
    uint64_t done;
    fan_sim_op *head;
    fan_sim_op **tail;
    double end_us;                /* the time at which all queued work will have run */
    fan_sim_recording *recording; /* the capture that it is in; counted; NULL: none */
    uint32_t member;              /* its number among the members of that capture */
};

/* A capture in progress, or an ended one that events still refer to. */
struct fan_sim_recording {
    size_t refs;
    fan_sim_recording *next; /* among those in progress */
    fan_capture_run capture;
    fan_sim_graph *graph; /* the recorded commands; NULL once it has ended */
};

/* A captured command, queued to the graph's own queues at each launch. */
typedef struct fan_sim_command {
    struct fan_sim_command *next;
    enum {
        FAN_COMMAND_WORK,
        FAN_COMMAND_RECORD,
        FAN_COMMAND_WAIT
    } kind;
    uint32_t member;
    uint32_t event;
    char name[48];
    char call_site[96];
    double us;
    const fan_job *jobs; /* copied after this struct */
    /* 0: a kernel; else `kernel` has the accesses of several jobs. Its arrays are only geometry */
    size_t njobs;
    fan_sim_kernel kernel;
} fan_sim_command;

struct fan_sim_graph {
    /* holds of those that may launch it; while nonzero, the graph holds its machine */
    size_t refs;
    size_t queued; /* queued pieces of its work: they hold the graph, but no machine */
    fan_sim *machine;
    fan_sim_graph *next; /* among the machine's graphs */
    fan_sim_command *head;
    fan_sim_command **tail;
    uint32_t events;
    uint32_t members;
    int *device; /* of each member */
    size_t device_cap;
    fan_sim_queue **queues; /* of each member, once it was launched; counted */
    uintptr_t *blocks;      /* memory that it uses */
    size_t nblocks;
    size_t blocks_cap;
};

/* An element of a queue: work, or a wait for a point. Without bytes to move (run_work false) only
 * the numbers are kept. */
struct fan_sim_op {
    fan_sim_op *next;
    uint64_t number;    /* counts ops of the machine */
    fan_sim_point wait; /* queue NULL: work */
    /* copied after this struct; those of one launch in any order */
    const fan_job *jobs;
    size_t njobs;                                /* 0: the kernel */
    fan_status (*fn)(void *ctx, fan_error *err); /* NULL: does nothing */
    void (*fini)(void *ctx);
    void *ctx;
};

typedef struct fan_sim_event {
    fan_sim_point point;
    fan_clock clock;
    double us;
    int denied; /* how often a search answered "not yet" since the last record */
    /* `name` is for footprints, and belongs to this use of the event (fan_event.id) */
    uint64_t id;
    uint64_t name;
    fan_sim_recording *recording; /* the capture of its last record; counted; NULL: not captured */
    uint32_t number;              /* its number in that capture */
    fan_clock place;              /* the captured work ordered before it */
} fan_sim_event;

/* Memory that a caller donated to a buffer, and that no buffer has returned. */
typedef struct fan_sim_donation {
    struct fan_sim_donation *next;
    fan_op op;       /* the add */
    fan_array *what; /* only geometry, copied after this struct */
} fan_sim_donation;

/* The name of a stream, for messages; it stays when the stream ends. */
typedef struct fan_sim_name {
    uint64_t owner; /* FAN_SIM_OWNER of the stream */
    char text[48];  /* cut where it is longer */
} fan_sim_name;

/* The owner of a checker's lane: a stream of a device, or (device -1) a host thread: its actor, or
 * FAN_MAIN. */
#define FAN_SIM_OWNER(device, handle) ((uint64_t)((device) + 1) << 48 | ((handle) & FAN_MAIN))
#define FAN_SIM_OWNER_DEVICE(owner) ((int)((owner) >> 48) - 1)
#define FAN_SIM_OWNER_HANDLE(owner) ((owner) & FAN_MAIN)
#define FAN_MAIN ((UINT64_C(1) << 48) - 1)
#define FAN_SIM_DEVICES 64

typedef struct fan_sim_device_part {
    fan_device device;
    fan_arena arena;
    fan_sim_queue *legacy;
    fan_stream *current; /* the legacy stream as a fan_stream; held while the machine has users */
    uint64_t current_id; /* its number, once it has one */
    /* Bytes handed out, ever: while they fit into the arena, no thread can run out of memory
     * because of another one. */
    uint64_t given;
} fan_sim_device_part;

struct fan_sim {
    atomic_size_t holds;  /* users, and holders of its devices */
    pthread_mutex_t lock; /* guards all below; not held while a kernel or a callback runs */
    pthread_cond_t ran;   /* some work has run */
    size_t users;
    fan_sim_config config;
    fan_sim_hooks hooks;
    size_t entered;     /* how often threads have entered it and not left */
    atomic_bool closed; /* all that entered it have left; false while none has entered */
    fan_race_check *race_check;
    bool checking;
    bool dying;
    fan_sim_device_part *parts;
    fan_sim_queue **queues;
    size_t nqueues;
    size_t queues_cap;
    fan_sim_name *names; /* of streams that have one */
    size_t nnames;
    size_t names_cap;
    size_t last;     /* queue that ran last, for round robin */
    uint64_t handle; /* last given to a stream */
    uint64_t number; /* ops so far */
    uint64_t random;
    uint64_t executor; /* thread that runs work now; 0: none */
    uint32_t depth;    /* the nesting depth of work on that thread */
    /* of the main thread, of actor i at 1 + i; valid where has_lane */
    uint32_t host_lane[1 + FAN_ACTORS];
    bool has_lane[1 + FAN_ACTORS];
    double host_us[1 + FAN_ACTORS];
    uint64_t made[1 + FAN_ACTORS]; /* how many objects each thread has named */
    double device_us;
    uint64_t races;
    uint64_t unsound;
    uint64_t calls;
    fan_race first;   /* if there is one */
    fan_race pending; /* found by a release */
    bool has_pending;
    fan_sim_donation *donations;
    uint64_t left_out;
#ifdef FAN_TEST
    int64_t fail_at; /* calls until the planned failure; < 0: none */
    bool planned;    /* there was one */
    fan_status fail_with;
#endif
    fan_host_sched *host_sched;
    fan_sim_chooser chooser;
    bool has_chooser;
    uint64_t mutex_base; /* the first number of this machine's mutexes */
    /* its number among all machines of the process; part of its mutexes' numbers */
    uint64_t serial;
    fan_sim_recording *recordings; /* in progress */
    fan_sim_graph *graphs;         /* those that have been made */
    /* captures in progress; usually 0, which costs one load to check */
    atomic_size_t captures;
};

static inline double fan__later(double a, double b)
{
    if (b > a)
        return b;
    return a;
}

/* fan__sim_copy_us: returns how long the machine reads or writes so many bytes. */
static inline double fan__sim_copy_us(const fan_sim *machine, uint64_t bytes)
{
    return (double)bytes / (machine->config.gbytes_per_s * 1e3);
}

static inline fan_sim *fan__sim_machine(const fan_device *d)
{
    return d->self;
}
static inline void fan__sim_lock(fan_sim *machine)
{
    (void)pthread_mutex_lock(&machine->lock);
}
static inline void fan__sim_unlock(fan_sim *machine)
{
    (void)pthread_mutex_unlock(&machine->lock);
}

/* access: the memory that an operation accesses: reported to the search, and checked against
 * happens-before. */

/* The owner of the accessed memory until the operation has run: none, the graph that contains it,
 * or the host thread that waits for it. */
typedef enum keeper {
    KEPT_BY_NONE,
    KEPT_BY_GRAPH,
    KEPT_BY_HOST
} fan__keeper;

/* Work that is queued or captured: one job of the table; several in one launch, whose accesses are
 * the kernel's; or (njobs 0) a kernel of the user's. */
typedef struct fan__work {
    const char *name;
    const char *call_site;
    const fan_job *jobs;
    size_t njobs;
    fan_sim_kernel kernel;
    double us;     /* its duration */
    bool launched; /* as part of a graph's launch, which is counted once */
    fan__keeper kept;
    bool by_user;   /* a kernel of the user's */
    uint64_t bytes; /* that it reads and writes */
    /* owned by the queue on FAN_OK and FAN_ERR_RACE, else by the caller; NULL: no bytes to move */
    fan_sim_op *op;
    /* filled in; owned: the queue or the graph calls the kernel's fini */
    bool owned;
    double start;
    double end;
} fan__work;

/* fan__work_access: sets *a (NULL: none) and *write to the i-th access of the work.
 * false: it has no more. */
bool fan__work_access(const fan__work *work, size_t i, const fan_array **a, bool *write);

static inline fan_sim_device_part *fan__access_part(fan_sim *machine, uintptr_t address)
{
    for (int i = 0; i < machine->config.devices; i++) {
        if (address - machine->parts[i].arena.base < machine->parts[i].arena.bytes)
            return &machine->parts[i];
    }
    return NULL;
}
fan_block *fan__access_block(fan_sim *machine, const void *address);
/* fan__access_bytes: the block of an array's bytes; NULL: it has none, or they are elsewhere.
 * Accepts NULL. */
fan_block *fan__access_bytes(fan_sim *machine, const fan_array *a);
void fan__access_report(fan_sim *machine, const fan__work *work);

/* fan__access_judge: checks work on `lane` against all earlier operations; and that a kernel of the
 * user's accesses no donated memory.
 * FAN_ERR_RACE: *race describes it. FAN_ERR_NOMEM: the history is unchanged. */
fan_status fan__access_judge(fan_sim *machine, uint32_t lane, const fan__work *work, fan_race *race,
                             fan_error *err);

/* fan__access_take_back: ends each donation of these bytes. */
void fan__access_take_back(fan_sim *machine, fan_extent bytes);
fan_status fan__sim_use(fan_device *d, const fan_array *a, const char *name, bool donate,
                        fan_error *err);
void fan__sim_returned(fan_device *d, const fan_array *a);

/* work: work queued or captured: jobs of the table, kernels of users. */

/* fan__work_enqueue: checks work and queues it on q. On FAN_ERR_RACE it is queued, and *err
 * describes the race; other failures change nothing. */
fan_status fan__work_enqueue(fan_sim *machine, fan_sim_queue *queue, fan__work *work,
                             fan_error *err);
fan_status fan__sim_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
fan_status fan__sim_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n,
                             fan_job_state *states, fan_error *err);

/* call: the checks at the start of every call on a machine: has the machine given up, is this call
 * planned to fail? And the report of a race. */

/* footprint: reports to the search of host orders: which thread of the machine acts, and what it
 * accesses.
 *
 * A name is a kind and a number within it, the same in every order of the threads (explore.h,
 * Contents of footprints). */
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
/* of another machine than the thread's: all others count as one */
#define OF_ANOTHER (UINT64_C(1) << 63)

/* Numbers of mutexes of spawned threads: (machine, thread, index among its mutexes), above the
 * counted ones. */
#define MADE_HERE (UINT64_C(1) << 62)
#define OF_ITS_MAKER ((UINT64_C(1) << 46) - 1)

/* The state of the calling thread, if the machine spawned it; for other threads `m` is NULL. */
typedef struct fan__sim_thread {
    fan_sim *machine;
    int actor;
    bool fresh; /* a call has just begun: its first yield repeats that of its beginning */
    bool vain;  /* its last query returned "not yet" */
    int apart;  /* threads of another number share no host memory and no graph with it */
    /* of any thread: depth of kernels being run. A kernel is one step: no other thread runs inside
     * it. */
    int kernels;
    fan_thread_hooks hooks;
} fan__sim_thread;

extern _Thread_local fan__sim_thread fan__sim_here;

/* fan__sim_actor: returns the number of the calling thread on m; -1: m did not spawn it. */
static inline int fan__sim_actor(const fan_sim *machine)
{
    if (fan__sim_here.machine != machine)
        return -1;
    return fan__sim_here.actor;
}
/* fan__sim_host: its index among the host threads. */
static inline size_t fan__sim_host(const fan_sim *machine)
{
    return (size_t)(1 + fan__sim_actor(machine));
}
/* fan__sim_lane: its lane of the checker. */
static inline uint32_t fan__sim_lane(const fan_sim *machine)
{
    return machine->host_lane[fan__sim_host(machine)];
}

/* fan__host_clock: returns the clock of the calling thread, in microseconds. */
static inline double *fan__host_clock(fan_sim *machine)
{
    return &machine->host_us[fan__sim_host(machine)];
}
/* fan__host_until: moves it on to `us`. */
static inline void fan__host_until(fan_sim *machine, double us)
{
    double *host = fan__host_clock(machine);
    *host = fan__later(*host, us);
}
/* fan__sim_maker: returns a number for the thread that makes an object on m; threads of other
 * machines share one. */
size_t fan__sim_maker(void);
/* fan__sim_new_name: returns a name for a new object: the thread, and how many it made before. So
 * the object has the same name in every order of the other threads. */
uint64_t fan__sim_new_name(fan_sim *machine, int kind);
/* fan__sim_access: reports an access to the search of the calling thread's machine, whichever
 * machine owns the object. */
void fan__sim_access(const fan_sim *machine, uint64_t name, fan_sched_mode access);
/* fan__sim_access_state: the same for the machine's only object of a kind. */
static inline void fan__sim_access_state(const fan_sim *machine, int kind, fan_sched_mode access)
{
    fan__sim_access(machine, FAN__NAME(kind, 0), access);
}
/* fan__sim_picks: returns whether a search chooses what queries answer (sim.h, Queries). */
static inline bool fan__sim_picks(const fan_sim *machine)
{
    return machine->has_chooser && machine->chooser.pick;
}

#define FAN__SITE 96

void fan__sim_call_site(const fan_sim *machine, char *buf, size_t size);
fan_status fan__sim_alive(fan_sim *machine, fan_error *err);
/* fan__sim_enter: begins every call of the table, with the machine locked. Fails if the machine has
 * given up, or if this call is planned to fail. */
fan_status fan__sim_enter(fan_sim *machine, const char *call, fan_error *err);
fan_status fan__sim_raise(fan_sim *machine, const fan_race *race, fan_error *err);
/* fan__sim_enter_on: the same for a call `what` that uses a stream, which must not be captured:
 * raises a pending race, and queues the barrier of the legacy stream. */
fan_status fan__sim_enter_on(fan_sim *machine, fan_sim_queue *queue, const char *call,
                             const char *what, fan_error *err);
/* fan__sim_part: sets *out to the part of a device. FAN_ERR_VALUE: there is none of that number. */
fan_status fan__sim_part(fan_sim *machine, int device, fan_sim_device_part **out, fan_error *err);
/* fan__sim_raise_pending: raises a race that a release found; the first later call that can fail
 * does it. */
fan_status fan__sim_raise_pending(fan_sim *machine, fan_error *err);
void fan__sim_keep_race(fan_sim *machine, const fan_race *race);

/* memory: memory of the simulated devices: the table's entries. */


/* queue: a stream's queue, and the waits in it. Call with the machine's lock held. */

static inline fan_sim_queue *fan__queue_of(const fan_stream *s)
{
    return s->impl;
}

fan_status fan__queue_host(fan_sim *machine, size_t host, uint64_t actor, fan_error *err);
/* fan__queue_new: makes a queue for a new stream. seen: the clock of the thread that makes it;
 * NULL: empty. */
fan_status fan__queue_new(fan_sim *machine, int device, uint64_t handle, bool blocking,
                          const fan_clock *seen, fan_sim_queue **out, fan_error *err);
void fan__queue_drop(fan_sim_queue *queue);
/* fan__queue_sweep: frees the empty queues that no stream, event or wait refers to. */
void fan__queue_sweep(fan_sim *machine);
/* fan__queue_wait: orders all that is queued on q from now on after `point`. The caller updates the
 * clocks. */
fan_status fan__queue_wait(fan_sim *machine, fan_sim_queue *queue, fan_sim_point point,
                           fan_error *err);
/* fan__queue_drop_work: removes every op without running it. */
void fan__queue_drop_work(fan_sim *machine);

/* fan__op_new: makes an op followed by copies of n jobs; n == 0: with room for a kernel alone. */
fan_sim_op *fan__op_new(const fan_job *jobs, size_t n);

void fan__graph_free(fan_sim_graph *g);
/* recording: the state of a capture in progress, and the calls that it forbids. Call with the
 * machine's lock held. */

void fan__recording_drop(fan_sim_recording *r);
/* fan__recording_refuse: turns a code of capture.h into a failure that names the stream; -1: out of
 * memory. */
fan_status fan__recording_refuse(const fan_sim_queue *queue, int code, const char *what,
                                 fan_error *err);
/* fan__recording_none: fails if q is captured, for calls that a captured stream does not allow. */
fan_status fan__recording_none(const fan_sim_queue *queue, const char *what, fan_error *err);
/* fan__recording_break_all: breaks the captures in progress that a call of the thread in mode
 * `mine` disturbs (`always`: all of them), and then refuses the call. */
fan_status fan__recording_break_all(fan_sim *machine, const char *call, bool always,
                                    fan_capture_mode mine, fan_error *err);
/* fan__recording_has_time: the same for an event. */
fan_status fan__recording_has_time(const fan_sim_event *ev, const fan_event *e, const char *what,
                                   fan_error *err);

fan_sim_command *fan__command_new(size_t bytes);
void fan__command_put(fan_sim_graph *g, fan_sim_command *c);
fan_status fan__recording_record(fan_sim_event *ev, fan_sim_queue *queue, fan_error *err);
/* fan__recording_wait: handles a wait if q or the event is captured; *done false: neither is. */
fan_status fan__recording_wait(fan_sim_queue *queue, const fan_sim_event *ev, bool *done,
                               fan_error *err);

/* fan__recording_drop_all: drops those that were never ended. */
void fan__recording_drop_all(fan_sim *machine);

/* run: runs queued work, late and in any order that is allowed. Call with the machine's lock held;
 * it is released while work runs. */

/* fan__run_settle: removes fulfilled waits from the queues' heads; each may fulfil others. */
void fan__run_settle(fan_sim *machine);
/* fan__run_pick: returns the queue whose head runs next; NULL: no head may run. */
fan_sim_queue *fan__run_pick(fan_sim *machine);
/* fan__run_one: runs the head of q, with the lock released. */
fan_status fan__run_one(fan_sim *machine, fan_sim_queue *queue, fan_error *err);
/* fan__run_stand_by: waits until the thread that runs work has finished one piece. */
void fan__run_stand_by(fan_sim *machine);
/* fan__run_until: runs work, in any allowed order, until point has passed; queue NULL: until all is
 * idle. Stops at the first kernel that fails. */
fan_status fan__run_until(fan_sim *machine, fan_sim_point point, fan_error *err);
/* fan__lane_after: orders what `lane` does from now on after `clock`, in the checker. */
fan_status fan__lane_after(fan_sim *machine, uint32_t lane, const fan_clock *clock, fan_error *err);
/* fan__run_join: the same for the calling thread; a release of memory needs it
 * (fan__sim_dropped). */
fan_status fan__run_join(fan_sim *machine, const fan_clock *clock, fan_error *err);
/* fan__run_to: runs work until `point` has passed; orders the calling thread after `clock`, and
 * moves its time on to `us`. */
fan_status fan__run_to(fan_sim *machine, fan_sim_point point, const fan_clock *clock, double us,
                       fan_error *err);
/* fan__run_finish: runs work until all that q has queued by now has run; orders the calling thread
 * after it. */
fan_status fan__run_finish(fan_sim *machine, fan_sim_queue *queue, fan_error *err);
bool fan__run_has_passed(const fan_sim_event *ev);
/* fan__run_for: runs only the work that `point` needs; *can false: it can never pass. */
fan_status fan__run_for(fan_sim *machine, fan_sim_point point, size_t depth, bool *can,
                        fan_error *err);
/* fan__sim_nudge: runs one piece of work, where no search chooses (sim.h, Queries). */
fan_status fan__sim_nudge(fan_device *d, fan_error *err);

/* stream: streams of a machine: the table's entries, and the barriers of the legacy default
 * stream. */


/* fan__stream_barrier: A7: orders work on the legacy default stream after all that its device's
 * blocking streams have queued; and work on a blocking stream after all that the legacy stream has.
 * FAN_ERR_NOMEM may leave extra waits, which no caller can observe. */
fan_status fan__stream_barrier(fan_sim *machine, fan_sim_queue *queue, fan_error *err);

/* event: events of a machine: the table's entries. */

#endif
