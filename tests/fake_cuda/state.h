/* state: the one machine of the fake driver, its lock, its plan of faults, and what its calls begin
 * and end with. */
#ifndef FAN_FAKE_STATE_H
#define FAN_FAKE_STATE_H

#include "device/event.h"
#include "device/sim/capture.h"
#include "fake_cuda/fake.h"

enum {
    MOST_DEVICES = 8,
    MOST_DEPTH = 16,
    MOST_HIDDEN = 8
};

typedef enum kind {
    A_STREAM = 1,
    AN_EVENT,
    A_MODULE,
    A_FUNCTION,
    AN_OBJECT,
    MEMORY,
    A_POOL,
    A_GRAPH,
    DESTROYED,
    RETIRED,
    KINDS
    /* DESTROYED: a stream that was; RETIRED: one whose handle is another's now; A_GRAPH is only
     * counted */
} fan__kind;

/* Whatever the driver gave a handle for. */
typedef struct fan__thing {
    struct fan__thing *next;
    fan__kind kind;
    int device;
    fan_stream *stream; /* A_STREAM */
    uint64_t thread;    /* of a per-thread stream; else 0 */
    uint64_t id;        /* A_STREAM: no other one ever has it */
    fan_event *event;
    bool timed;                    /* AN_EVENT: it was made to be */
    const fan_fake_kernel *kernel; /* A_FUNCTION */
    uint64_t address;              /* MEMORY, tagged */
    size_t bytes;
    struct fan__thing *pool; /* .. the pool that it is of; NULL: none */
    /* .. what the host copied there, in the order of its calls; NULL: nothing. A_MODULE: the PTX of
     * one that has not all kernels */
    char *sent;
    fan_cu_call *destroy; /* AN_OBJECT */
    void *ctx;
    size_t refs;
    /* A_POOL: bytes; freed: of `used`, once the work before it has run */
    uint64_t threshold, reserved, used, freed;
} fan__thing;

struct fan_cu_context {
    struct fan_cu_context *older; /* of the first device: the last machine's */
    int device;
    atomic_int retained;
    _Atomic fan_cu_result lost; /* the code of the error that sticks */
};

/* The state of the driver; guarded by the mutex, except fields that are set before the first
 * call. */
extern struct fan__fake {
    fan_sim *m;
    int devices;
    unsigned era; /* machines so far */
    atomic_bool initialised;
    bool pools;
    /* devices read the host's memory: a copy from there may read it after the call */
    bool coherent;
    int version;
    int compute;                  /* of all devices: 75 */
    uint64_t ids;                 /* of streams so far */
    uint64_t capacity;            /* of each device, in bytes */
    uint64_t plain[MOST_DEVICES]; /* of them, given out by cuMemAlloc */
    uint64_t execs[MOST_DEVICES]; /* .. and taken for graphs that can be launched */
    uint64_t mapped;              /* how often a pool had to get memory from the system */
    fan__thing *things[KINDS];
    fan__thing **memory; /* MEMORY by address */
    size_t nmemory, memory_cap;
    size_t live[KINDS];
    /* of this machine; those of older ones stay, so that no address is used twice */
    struct fan_cu_context *contexts;
    char hidden[MOST_HIDDEN][48];
    uint64_t calls, calls_of[128];
    atomic_uint_fast64_t launches[FAN_FAKE_KERNELS]; /* of each kernel */
    char fail_name[48];                              /* "": any */
    int64_t fail_at;
    fan_cu_result fail_with;
    bool fail_sticks;
    char message[FAN_ERROR_TEXT]; /* the message of the last error */
    char race[FAN_ERROR_TEXT];    /* the first race */
} fan__fake;
extern pthread_mutex_t fan__fake_mutex;

/* The contexts of a thread, and its capture mode, which decides which unsafe calls it may make. */
extern _Thread_local struct fan__fake_here {
    fan_capture_mode mode;
    unsigned era;
    int depth;
    struct fan_cu_context *stack[MOST_DEPTH];
} fan__fake_here;

/* fan__ok_or: OK, or another code where something is not fine. */
static inline fan_cu_result fan__ok_or(bool fine, fan_cu_result otherwise)
{
    return fine ? OK : otherwise;
}
/* fan__first_of: the first code that is not OK. */
static inline fan_cu_result fan__first_of(fan_cu_result first, fan_cu_result second)
{
    return first ? first : second;
}
static inline uint64_t fan__smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}
static inline uint64_t fan__larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline void fan__fake_lock(void)
{
    (void)pthread_mutex_lock(&fan__fake_mutex);
}
static inline void fan__fake_unlock(void)
{
    (void)pthread_mutex_unlock(&fan__fake_mutex);
}

enum {
#define X(name, suffix, version, feature, parameters) NUMBER_##name,
    FAN_CUDA_LIST(X)
#undef X
    NUMBERS
};
fan_cu_result fan__fake_call(int number);
extern const char *const fan__fake_names[NUMBERS];

#define CALL(name)                                                    \
    do {                                                              \
        fan_cu_result call_code = fan__fake_call(NUMBER_##name);      \
        if (call_code)                                                \
            return call_code;                                         \
        if (!fan__fake.initialised && NUMBER_##name != NUMBER_Init && \
            NUMBER_##name != NUMBER_DriverGetVersion)                 \
            return NOT_INITIALIZED;                                   \
    } while (0)
struct fan_cu_context *fan__fake_current(void);

/* fan__fake_inside: the current context, of which nothing is lost yet. */
fan_cu_result fan__fake_inside(struct fan_cu_context **out);
#define INSIDE(c)                                         \
    struct fan_cu_context *c;                             \
    do {                                                  \
        fan_cu_result inside_code = fan__fake_inside(&c); \
        if (inside_code)                                  \
            return inside_code;                           \
    } while (0)
/* fan__fake_code: a status of the machine as the driver's code; keeps its message for tests. */
fan_cu_result fan__fake_code(fan_status status, const fan_error *err);
/* fan__fake_note_races: a race that a release found is taken note of, so that no later call
 * stumbles over it. */
void fan__fake_note_races(void);
fan_cu_result fan__fake_done(fan_status status, const fan_error *err);
/* fan__fake_beside: what a call does during a capture of another thread (the table is in
 * state.c). */
fan_cu_result fan__fake_beside(int number);
#define BESIDE(name)                                                 \
    do {                                                             \
        fan_cu_result beside_code = fan__fake_beside(NUMBER_##name); \
        if (beside_code)                                             \
            return beside_code;                                      \
    } while (0)
/* fan__fake_synchronized: called after a wait: pools return to the system what exceeds their
 * threshold. */
void fan__fake_synchronized(void);

#endif
