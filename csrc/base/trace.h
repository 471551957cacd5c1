/* trace: a ring of lines: decisions of passes and buffers, and actions of devices.
 *
 * A trace belongs to a thread while it is open there (fan_trace_begin). Without an open trace
 * nothing is recorded. */
#ifndef FAN_BASE_TRACE_H
#define FAN_BASE_TRACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, word) */
#define FAN_TRACE_LIST(X)                                                                        \
    X(ADD, "add")       /* a contribution was parked */                                          \
    X(FOLD, "fold")     /* parked contributions were summed */                                   \
    X(TAKE, "take")     /* a slot was taken */                                                   \
    X(RECORD, "record") /* an event was recorded on `stream` */                                  \
    X(WAIT, "wait")     /* `stream` waits for event `event` of `other` */                        \
    X(ELIDED, "elided") /* a wait of `stream` for event `event` was left out: it already held */ \
    X(MARK, "mark")     /* memory is used on `stream` */                                         \
    X(KERNEL, "kernel") /* work was queued on `stream` */                                        \
    X(COPY, "copy")     /* a copy was queued on `stream` */                                      \
    X(FREE, "free")     /* memory went back */                                                   \
    X(SYNC, "sync")     /* the host waited */                                                    \
    X(NODE, "node")     /* a node of a pass ran, since `begin_ns` */                             \
    X(GRADIENT, "gradient") /* .. and gave one to node `to` */                                   \
    X(BUCKET, "bucket")     /* a step of a sum over ranks, since `begin_ns` */                   \
    X(SEND, "send")         /* .. and sent a message to rank `to` */                             \
    X(DIGEST, "digest")     /* the digest of a gradient or a sum (buffer/digest.h) */            \
    X(DROP, "drop")         /* the last reference to a sum of a boxed node went */

typedef enum fan_trace_kind {
#define X(name, word) FAN_TRACE_##name,
    FAN_TRACE_LIST(X)
#undef X
} fan_trace_kind;

#define FAN_TRACE_LABEL 128 /* room for a descriptor; longer ones are cut */

/* The current work of a thread: written to all its lines. */
typedef struct fan_trace_work {
    uint64_t pass;   /* 0: none */
    uint64_t node;   /* the node's number */
    uint32_t worker; /* of that pass; 0: the calling thread */
} fan_trace_work;

typedef struct fan_trace_line {
    uint8_t kind;     /* fan_trace_kind */
    char how;         /* the case letter of the sync plan, what a digest is of, or 0 */
    uint8_t in_place; /* 1: the sum was written into an operand; a node has no name */
    int16_t device;   /* ordinal; -1 for the CPU */
    int32_t slot;     /* -1: none */
    uint32_t count;   /* contributions in a fold */
    uint64_t buffer;  /* the buffer's number, 0: none */
    int64_t key;      /* -1: none */
    uint64_t rules;   /* rule bits (buffer/rules.h) */
    uint64_t stream;  /* stream's number */
    uint64_t other;   /* the other stream of a wait; the address of a gradient's memory */
    uint64_t event;   /* event's number */
    uint64_t bytes;
    uint64_t host_ns;  /* monotonic: when it was queued, or ended */
    uint64_t begin_ns; /* 0: it was only queued */
    uint64_t to;       /* a node's number */
    uint64_t thread;   /* fan_thread_id */
    fan_trace_work work;
    double start_us; /* device clock, simulated device; < 0: unknown */
    double end_us;
    uint64_t digest; /* 0: none */
    char label[FAN_TRACE_LABEL];
} fan_trace_line;

typedef struct fan_trace fan_trace;

/* NULL when out of memory; the oldest lines are overwritten */
fan_trace *fan_trace_new(size_t capacity);
void fan_trace_free(fan_trace *t);
void fan_trace_begin(fan_trace *t); /* makes t the innermost trace of this thread */
void fan_trace_end(fan_trace *t);   /* ends it, at any place of the list */
bool fan_trace_on(void);
/* fan_traces: the number of open traces of all threads; if 0, fan_trace_on is false. */
extern atomic_int fan_traces;
/* fan_trace_want_digests: t gets lines of digests, too. */
void fan_trace_want_digests(fan_trace *t);
/* fan_trace_digests: returns whether an open trace of this thread gets lines of digests. */
bool fan_trace_digests(void);
/* fan_trace_put: appends `line` to every open trace of this thread and fills in host_ns, work and
 * thread. */
void fan_trace_put(const fan_trace_line *line);
/* fan_trace_ns: returns the current value of host_ns. */
uint64_t fan_trace_ns(void);
/* fan_trace_work_begin: sets the current work of this thread; returns the one before, to be
 * restored. */
fan_trace_work fan_trace_work_begin(fan_trace_work work);
/* fan_trace_work_now: returns the current work of this thread. */
fan_trace_work fan_trace_work_now(void);
/* The `node` of work that no node does: the caller of a pass gives a root's gradient. */
#define FAN_TRACE_CALLER UINT64_MAX
size_t fan_trace_count(const fan_trace *t);
uint64_t fan_trace_dropped(const fan_trace *t);
const fan_trace_line *fan_trace_at(const fan_trace *t, size_t i); /* 0 is the oldest */

#endif
