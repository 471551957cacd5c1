/* machine: the structs of a simulated machine. */
#ifndef FAN_DEVICE_SIM_MACHINE_H
#define FAN_DEVICE_SIM_MACHINE_H

#include "device/event.h"
#include "device/sim/arena.h"
#include "device/sim/capture.h"
#include "device/sim/host_sched.h"
#include "device/sim/race_check.h"
#include "device/sim/sim.h"

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
    bool blocking, legacy;
    bool running;          /* a thread is running its head */
    uint64_t queued, done; /* ops ever, ops run; events and waits use these numbers */
    fan_sim_op *head, **tail;
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
    enum { FAN_COMMAND_WORK, FAN_COMMAND_RECORD, FAN_COMMAND_WAIT } kind;
    uint32_t member, event;
    char name[48], call_site[96];
    double us;
    const fan_job *jobs; /* copied after this struct */
    size_t njobs;        /* 0: a kernel; else `kernel` has the accesses of several jobs. Its arrays are only geometry */
    fan_sim_kernel kernel;
} fan_sim_command;

struct fan_sim_graph {
    size_t refs;   /* holds of those that may launch it; while nonzero, the graph holds its machine */
    size_t queued; /* queued pieces of its work: they hold the graph, but no machine */
    fan_sim *m;
    fan_sim_graph *next; /* among the machine's graphs */
    fan_sim_command *head, **tail;
    uint32_t events;
    uint32_t members;
    int *device; /* of each member */
    size_t device_cap;
    fan_sim_queue **queues; /* of each member, once it was launched; counted */
    uintptr_t *blocks;      /* memory that it uses */
    size_t nblocks, blocks_cap;
};

/* An element of a queue: work, or a wait for a point. Without bytes to move (run_work false) only the numbers are
 * kept. */
struct fan_sim_op {
    fan_sim_op *next;
    uint64_t number;                             /* counts ops of the machine */
    fan_sim_point wait;                          /* queue NULL: work */
    const fan_job *jobs;                         /* copied after this struct; those of one launch in any order */
    size_t njobs;                                /* 0: the kernel */
    fan_status (*fn)(void *ctx, fan_error *err); /* NULL: does nothing */
    void (*fini)(void *ctx);
    void *ctx;
};

typedef struct fan_sim_event {
    fan_sim_point point;
    fan_clock clock;
    double us;
    int denied;                   /* how often a search answered "not yet" since the last record */
    uint64_t id, name;            /* `name` is for footprints, and belongs to this use of the event (fan_event.id) */
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

/* The owner of a checker's lane: a stream of a device, or (device -1) a host thread: its actor, or FAN_MAIN. */
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
    /* Bytes handed out, ever: while they fit into the arena, no thread can run out of memory because of another one. */
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
    bool checking, dying;
    fan_sim_device_part *parts;
    fan_sim_queue **queues;
    size_t nqueues, queues_cap;
    size_t last;     /* queue that ran last, for round robin */
    uint64_t handle; /* last given to a stream */
    uint64_t number; /* ops so far */
    uint64_t random;
    uint64_t executor;                  /* thread that runs work now; 0: none */
    uint32_t depth;                     /* the nesting depth of work on that thread */
    uint32_t host_lane[1 + FAN_ACTORS]; /* of the main thread, of actor i at 1 + i; valid where has_lane */
    bool has_lane[1 + FAN_ACTORS];
    double host_us[1 + FAN_ACTORS];
    uint64_t made[1 + FAN_ACTORS]; /* how many objects each thread has named */
    double device_us;
    uint64_t races, unsound, calls;
    fan_race first;
    bool has_first;
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
    uint64_t mutex_base;           /* the first number of this machine's mutexes */
    uint64_t serial;               /* its number among all machines of the process; part of its mutexes' numbers */
    fan_sim_recording *recordings; /* in progress */
    fan_sim_graph *graphs;         /* those that have been made */
    atomic_size_t captures;        /* captures in progress; usually 0, which costs one load to check */
};

static inline fan_sim *fan__sim_machine(const fan_device *d) { return d->self; }
static inline void fan__sim_lock(fan_sim *m) { (void)pthread_mutex_lock(&m->lock); }
static inline void fan__sim_unlock(fan_sim *m) { (void)pthread_mutex_unlock(&m->lock); }

#endif
