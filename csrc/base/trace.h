/* trace: a ring of what the buffer decided and the device did, one line each.
 *
 * A trace belongs to a thread while it is current there (fan_trace_begin). Without one nothing is recorded.
 */
#ifndef FAN_BASE_TRACE_H
#define FAN_BASE_TRACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, word) */
#define FAN_TRACE_LIST(X)                                                                             \
    X(ADD, "add")       /* a contribution was parked */                                               \
    X(FOLD, "fold")     /* parked contributions were summed */                                        \
    X(TAKE, "take")     /* a slot was taken */                                                        \
    X(RECORD, "record") /* an event was recorded on `stream` */                                       \
    X(WAIT, "wait")     /* `stream` waits for event `event` of `other` */                             \
    X(ELIDED, "elided") /* a wait of `stream` for event `event` was left out: it was known to hold */ \
    X(MARK, "mark")     /* memory is used on `stream` */                                              \
    X(KERNEL, "kernel") /* work was queued on `stream` */                                             \
    X(COPY, "copy")     /* a copy was queued on `stream` */                                           \
    X(FREE, "free")     /* memory went back */                                                        \
    X(SYNC, "sync")     /* the host waited */

typedef enum fan_trace_kind {
#define X(name, word) FAN_TRACE_##name,
    FAN_TRACE_LIST(X)
#undef X
} fan_trace_kind;

#define FAN_TRACE_LABEL 128 /* room for a descriptor: what is longer is cut */

typedef struct fan_trace_line {
    uint8_t kind;     /* fan_trace_kind */
    char how;         /* the case letter of the sync plan, or 0 */
    uint8_t in_place; /* 1: the sum was written into an operand */
    int16_t device;   /* ordinal; -1 for the CPU */
    int32_t slot;     /* -1: none */
    uint32_t count;   /* contributions in a fold */
    uint64_t buffer;  /* the buffer's number, 0: none */
    int64_t key;      /* -1: none */
    uint64_t rules;   /* rule bits (buffer/rules.h) */
    uint64_t stream;  /* stream's number */
    uint64_t other;   /* the other stream of a wait */
    uint64_t event;   /* event's number */
    uint64_t bytes;
    uint64_t host_ns; /* monotonic, when it was queued */
    double start_us;  /* device clock, simulated device; < 0: unknown */
    double end_us;
    char label[FAN_TRACE_LABEL];
} fan_trace_line;

typedef struct fan_trace fan_trace;

fan_trace *fan_trace_new(size_t capacity); /* NULL when out of memory; the oldest lines go first */
void fan_trace_free(fan_trace *t);
void fan_trace_begin(fan_trace *t); /* makes t the innermost trace of this thread */
void fan_trace_end(fan_trace *t);   /* takes it off again, wherever it lies */
bool fan_trace_on(void);
/* fan_traces: how many are open on any thread. 0: fan_trace_on need not be asked. */
extern atomic_int fan_traces;
/* fan_trace_put: appends `line` to every trace of this thread; does nothing without one. host_ns is filled in. */
void fan_trace_put(const fan_trace_line *line);
size_t fan_trace_count(const fan_trace *t);
uint64_t fan_trace_dropped(const fan_trace *t);
const fan_trace_line *fan_trace_at(const fan_trace *t, size_t i); /* 0 is the oldest */

#endif
