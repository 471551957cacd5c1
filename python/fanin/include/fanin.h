/* fanin.h: the C API of fanin (docs/c-api.md): buffers, nodes. C11, C++17.
 *
 *   #include <Python.h>
 *   #include <fanin.h>                               found by fanin.get_include(); nothing is linked
 *
 *   static const fanin_api *api;                     once, when the module is made: api = fanin_import()
 *
 * A buffer sums gradients. It is made by `buffer_new`, holds no Python object, and is used on any thread, with or
 * without the interpreter's lock. A node's function gets the sums of its node's slots and returns one gradient for each
 * of its edges; between two functions in C no Python object is made.
 *
 * Stable: nothing that this header declares changes its place or its meaning. Later versions append to the table, and
 * to structs that begin with their size.
 */
#ifndef FANIN_H
#define FANIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FANIN_API_VERSION 2

typedef struct _object fanin_object; /* a PyObject */

typedef enum fanin_status {
    FANIN_OK = 0,
    FANIN_ERR_TYPE = 1,   /* TypeError */
    FANIN_ERR_VALUE = 2,  /* ValueError */
    FANIN_ERR_STATE = 3,  /* RuntimeError */
    FANIN_ERR_NOMEM = 4,  /* MemoryError */
    FANIN_ERR_PYTHON = 5, /* an exception is set already; for functions that have the interpreter */
    FANIN_ERR_INDEX = 6,  /* IndexError: no such slot */
    FANIN_ERR_OVERFLOW = 7,
    FANIN_ERR_BUFFER = 8,    /* BufferError: an array that cannot be imported */
    FANIN_ERR_RACE = 9,      /* fanin.RaceError: the simulated machine found a race */
    FANIN_ERR_DEADLOCK = 10, /* fanin.sim.DeadlockError */
    FANIN_ERR_DEVICE = 11,   /* fanin.DeviceError: a driver's call failed */
    FANIN_ERR_DEVICE_NOMEM = 12,
    FANIN_ERR_CAPTURE = 13, /* fanin.CaptureError */
    FANIN_ERR_ZERO_DIVISION = 14, /* ZeroDivisionError: a mean whose weights sum to 0 */
    FANIN_STATUS_SIZE = 0x7fffffff
} fanin_status;

/* The message of a node's function, and of functions on values; empty where the status is enough. */
typedef struct fanin_error {
    char text[512];
} fanin_error;

/* The error of all other functions. The caller sets struct_size; the rest is written on failure alone. */
typedef struct fanin_failure {
    size_t struct_size; /* sizeof(fanin_failure) */
    fanin_status status;
    int32_t code;        /* the driver's, with FANIN_ERR_DEVICE; else 0 */
    int64_t slot, key;   /* -1: none */
    char object[128];    /* the buffer's name; "": none */
    char slot_name[128]; /* "": none */
    char expected[128], got[128];
    char text[1024]; /* the whole message */
} fanin_failure;

typedef enum fanin_dtype {
    FANIN_BOOL = 0,
    FANIN_INT8 = 1,
    FANIN_INT16 = 2,
    FANIN_INT32 = 3,
    FANIN_INT64 = 4,
    FANIN_UINT8 = 5,
    FANIN_UINT16 = 6,
    FANIN_UINT32 = 7,
    FANIN_UINT64 = 8,
    FANIN_FLOAT16 = 9,
    FANIN_BFLOAT16 = 10,
    FANIN_FLOAT8_E4M3FN = 11,
    FANIN_FLOAT8_E5M2 = 12,
    FANIN_FLOAT32 = 13,
    FANIN_FLOAT64 = 14,
    FANIN_COMPLEX64 = 15,
    FANIN_COMPLEX128 = 16,
    FANIN_DTYPE_SIZE = 0x7fffffff
} fanin_dtype;

typedef struct fanin_array fanin_array; /* counted; what it shows does not change, but for its elements */

/* An array; all zero: undefined (None). The caller that makes one, by a function of the table, owns it until it drops
 * it or passes it to the engine. A node's function borrows its sums, which are on the CPU. */
typedef struct fanin_value {
    fanin_array *array;
    void *data;             /* the first element; NULL where there is none */
    const int64_t *shape;   /* ndim extents */
    const int64_t *strides; /* in bytes */
    int64_t size;           /* elements */
    fanin_dtype dtype;
    int32_t ndim;
    int32_t contiguous;  /* not 0: in C order, without gaps */
    int16_t device_type; /* where `data` lies, as DLPack numbers it; 0: the CPU, or undefined */
    int16_t device_id;
} fanin_value;

/* fanin_node_fn: sums[i] is the finished sum of slot i, undefined where nothing came; out[i], undefined before, gets
 * the gradient of edge i, and is the engine's from then on, failing too. Sums are not written, but for those of which
 * `may_write` says so.
 *
 * Called on the thread of the pass, or on one of its workers, inside the interpreter or not: a function that calls
 * Python takes PyGILState_Ensure() first. Anything but FANIN_OK ends the pass with an exception that names the node. */
typedef fanin_status (*fanin_node_fn)(void *ctx, const fanin_value *sums, size_t n, fanin_value *out, size_t m,
                                      fanin_error *err);

#define FANIN_LONG 1u /* other threads may run Python meanwhile: for what takes longer than a microsecond or so */

typedef struct fanin_function {
    size_t struct_size; /* sizeof(fanin_function) */
    fanin_node_fn call;
    void *ctx;
    void (*release)(void *ctx); /* once, inside the interpreter, when the function is let go; NULL: nothing to do */
    uint32_t inputs;            /* sums that it takes, at least 1 */
    uint32_t gradients;         /* .. and gradients that it gives */
    uint32_t flags;
    uint32_t reserved; /* 0 */
} fanin_function;

/* An edge of a node: to slot `slot` of `next`, a fanin.Node or fanin.Leaf; NULL: that gradient is not needed. */
typedef struct fanin_edge {
    fanin_object *next;
    uint32_t slot;
} fanin_edge;

/* ---- version 2 ---- */

/* DLPack's structs. Include dlpack.h before this header, and they are its own. */
#ifdef DLPACK_MAJOR_VERSION
typedef DLTensor fanin_tensor;
typedef DLManagedTensorVersioned fanin_managed;
#else
typedef struct fanin_dl_device {
    int32_t device_type; /* 1: CPU, 2: CUDA */
    int32_t device_id;
} fanin_dl_device;

typedef struct fanin_dl_dtype {
    uint8_t code; /* 0: int, 1: uint, 2: float, 4: bfloat, 5: complex, 6: bool */
    uint8_t bits;
    uint16_t lanes; /* 1 */
} fanin_dl_dtype;

typedef struct fanin_tensor {
    void *data;
    fanin_dl_device device;
    int32_t ndim;
    fanin_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: C order */
    uint64_t byte_offset;
} fanin_tensor;

typedef struct fanin_dl_version {
    uint32_t major, minor;
} fanin_dl_version;

typedef struct fanin_managed {
    fanin_dl_version version; /* 1, x */
    void *manager_ctx;
    void (*deleter)(struct fanin_managed *self);
    uint64_t flags; /* 1: read-only, 2: copied */
    fanin_tensor dl_tensor;
} fanin_managed;
#endif

#define FANIN_DEVICE_SIM 12 /* device_type of the simulated machine: DLPack's number for extensions */

/* A stream: of a device, its handle: a cudaStream_t, or the number of a simulated one. 0 and 1: the legacy default. */
typedef struct fanin_stream {
    int32_t device_type;
    int32_t device_id;
    uintptr_t handle;
} fanin_stream;

typedef struct fanin_buffer fanin_buffer;
typedef struct fanin_target fanin_target;

/* What a slot takes: the fields that `declares` names. */
#define FANIN_SLOT_SHAPE 1u
#define FANIN_SLOT_DTYPE 2u
#define FANIN_SLOT_DEVICE 4u
#define FANIN_SLOT_ACCUMULATE 8u /* the sum runs in this dtype (A11) */
#define FANIN_SLOT_EXACT 16u     /* the exact sum, rounded once (A11) */
typedef struct fanin_slot {
    size_t struct_size; /* sizeof(fanin_slot) */
    uint32_t declares;
    int32_t ndim;
    const int64_t *shape; /* copied */
    fanin_dtype dtype;
    fanin_dtype accumulate;
    int32_t device_type;
    int32_t device_id;
    const char *name; /* copied; NULL: none */
} fanin_slot;

#define FANIN_BUDGET_AUTO 0u
#define FANIN_BUDGET_EAGER (UINT64_MAX - 1) /* each gradient is summed when it comes */
#define FANIN_BUDGET_FUSED UINT64_MAX       /* all at the take */
#define FANIN_BUFFER_LEAF 1u                /* the consumer accumulates into a .grad (S6) */
#define FANIN_BUFFER_STATS 2u               /* buffer_stats may be called */
#define FANIN_BUFFER_ACCUMULATE 4u          /* `accumulate` is of slots that declare none */
#define FANIN_BUFFER_EXACT 8u
typedef struct fanin_buffer_options {
    size_t struct_size;         /* sizeof(fanin_buffer_options) */
    const char *name;           /* copied; NULL: "InputBuffer" */
    const fanin_slot *slots;    /* as many as the buffer has; NULL: none declares anything */
    uint64_t budget;            /* bytes that wait before they are summed; or FANIN_BUDGET_.. */
    const fanin_stream *stream; /* the consumer's; NULL: the current one when a slot gets its first gradient (S5) */
    fanin_dtype accumulate;
    uint32_t flags;
} fanin_buffer_options;

#define FANIN_ADD_KEY 1u    /* `key` is given: the sum is in the order of keys */
#define FANIN_ADD_DONATE 2u /* the buffer may write the memory: the caller does not touch it again */
#define FANIN_ADD_WEIGHT 8u /* `weight` is given, a finite number, which multiplies the gradient in the sum (W1) */
#define FANIN_ADD_COPY 4u   /* the memory is the caller's again when the call returns */
typedef struct fanin_add_options {
    size_t struct_size; /* sizeof(fanin_add_options) */
    uint32_t flags;
    uint32_t reserved; /* 0 */
    int64_t key;
    const fanin_stream *stream; /* the producer's; NULL: the current one of the gradient's device (S4) */
    double weight, weight_imag; /* read with FANIN_ADD_WEIGHT */
} fanin_add_options;

/* One gradient of `buffer_add_many`: a view or a value; both NULL: undefined. */
typedef struct fanin_gradient {
    size_t struct_size; /* sizeof(fanin_gradient) */
    size_t slot;
    int64_t key; /* read with FANIN_ADD_KEY */
    const fanin_tensor *view;
    const fanin_value *value;
    double weight, weight_imag; /* read with FANIN_ADD_WEIGHT */
} fanin_gradient;

/* A weight that a take is given. */
typedef struct fanin_weight {
    int64_t key; /* of the gradient; in a slot without keys its place in the order of arrival */
    double weight, weight_imag;
} fanin_weight;

#define FANIN_TAKE_WRITABLE 1u /* what others may hold is copied */
#define FANIN_TAKE_MEAN 4u     /* the sum is divided by that of the weights (W3) */
#define FANIN_TAKE_WEIGHTS 8u  /* `weights` are of gradients that came without one (W5) */
#define FANIN_TAKE_SCALE 2u    /* `scale` multiplies before the one rounding */
typedef struct fanin_take_options {
    size_t struct_size; /* sizeof(fanin_take_options) */
    uint32_t flags;
    uint32_t reserved;              /* 0 */
    const fanin_stream *stream;     /* the one that uses the sums; NULL: the buffer's (S18) */
    const fanin_tensor *const *out; /* for each sum memory to write it into, or NULL; NULL: none */
    double scale, scale_imag;
    const fanin_weight *weights; /* read with FANIN_TAKE_WEIGHTS */
    size_t nweights;
} fanin_take_options;

/* The statistics of a sum. The caller sets struct_size. */
typedef struct fanin_stats {
    size_t struct_size;    /* sizeof(fanin_stats) */
    uint64_t count;        /* elements */
    double sumsq, absmax;  /* of the finite elements */
    uint64_t nonfinite;    /* elements that are inf or NaN */
    int64_t first_bad_key; /* of the first gradient that has one; -1: none, or it has no key */
    int32_t defined;       /* 0: the sum was undefined, and all else is 0 */
    int32_t has_bad;       /* not 0: some gradient has an inf or NaN */
    double norm;           /* of the finite elements; right where sumsq overflows or underflows, too */
} fanin_stats;

/* X(name): the counters of a buffer, in their order (fanin.Counters). */
#define FANIN_COUNTERS(X) \
    X(adds)               \
    X(copies)             \
    X(in_place)           \
    X(folds)              \
    X(passes)             \
    X(bytes_read)         \
    X(bytes_written)      \
    X(events)             \
    X(waits)              \
    X(waits_elided)       \
    X(mismatches)         \
    X(peak_parked_bytes)
typedef struct fanin_counters {
    size_t struct_size; /* sizeof(fanin_counters) */
#define FANIN_COUNTER(name) uint64_t name;
    FANIN_COUNTERS(FANIN_COUNTER)
#undef FANIN_COUNTER
} fanin_counters;

/* A root of a pass: where it begins. */
typedef struct fanin_root {
    size_t struct_size;          /* sizeof(fanin_root) */
    fanin_object *node;          /* a fanin.Node or fanin.Leaf */
    const fanin_value *gradient; /* NULL: 1, where the slot declares one element */
    uint32_t slot;
    uint32_t reserved; /* 0 */
} fanin_root;

#define FANIN_PASS_KEEP_GRAPH 1u
#define FANIN_PASS_DETECT 2u /* the pass ends at the first gradient with an inf or NaN */
typedef struct fanin_pass_options {
    size_t struct_size; /* sizeof(fanin_pass_options) */
    uint32_t flags;
    uint32_t workers;         /* threads; 0: one */
    const fanin_edge *inputs; /* which leaves accumulate; for `grad` which sums are returned. NULL: all leaves */
    size_t ninputs;
} fanin_pass_options;

typedef enum fanin_verdict {
    FANIN_DISJOINT = 0,
    FANIN_OVERLAP = 1,
    FANIN_UNKNOWN = 2, /* treat it as an overlap */
    FANIN_VERDICT_SIZE = 0x7fffffff
} fanin_verdict;

typedef struct fanin_event fanin_event;     /* all that a stream had queued when it was recorded */
typedef struct fanin_machine fanin_machine; /* a simulated machine (docs/simulated-device.md) */

typedef enum fanin_schedule {
    FANIN_SEEDED = 0,
    FANIN_FIFO = 1,
    FANIN_LIFO = 2,
    FANIN_ROUND_ROBIN = 4,
    FANIN_SCHEDULE_SIZE = 0x7fffffff
} fanin_schedule;

typedef struct fanin_machine_options {
    size_t struct_size; /* sizeof(fanin_machine_options) */
    uint64_t seed;      /* picks which stream, and which spawned thread, goes on */
    int32_t devices;    /* 0: one */
    fanin_schedule schedule;
} fanin_machine_options;

/* Work on a simulated device. */
typedef struct fanin_kernel {
    size_t struct_size;              /* sizeof(fanin_kernel) */
    const char *name;                /* copied */
    fanin_status (*call)(void *ctx); /* later, on any thread; it accesses the data of these values alone */
    void (*release)(void *ctx);      /* once, after the call or without it; NULL: nothing */
    void *ctx;
    const fanin_value *reads, *writes;
    size_t nreads, nwrites;
} fanin_kernel;

/* The table. Later versions are longer. */
typedef struct fanin_api {
    uint32_t version; /* FANIN_API_VERSION of the fanin that runs */
    uint32_t size;    /* bytes of its table; 0 in version 1 */

    /* ---- values: on any thread, inside the interpreter or not ---- */

    /* empty: a new array in C order, not zeroed. */
    fanin_status (*empty)(fanin_dtype dtype, int ndim, const int64_t *shape, fanin_value *out, fanin_error *err);
    /* like: of a value's dtype and shape. */
    fanin_status (*like)(const fanin_value *v, fanin_value *out, fanin_error *err);
    /* share: the same array once more: a sum handed on as it is. An undefined one gives that. */
    void (*share)(const fanin_value *v, fanin_value *out);
    /* wrap: memory of the caller's, which stays as it is until release(ctx) is called, once, on any thread, as a
     * deleter is (of_managed); failing, it is not called. strides in bytes; NULL: in C order. */
    fanin_status (*wrap)(void *data, fanin_dtype dtype, int ndim, const int64_t *shape, const int64_t *strides,
                         void (*release)(void *ctx), void *ctx, fanin_value *out, fanin_error *err);
    /* may_write: not 0: only the node's function holds this sum, so it may be overwritten, and shared as gradient. */
    int (*may_write)(const fanin_value *sum);
    /* drop: what is owned goes; the value is undefined then. */
    void (*drop)(fanin_value *v);

    /* ---- objects: inside the interpreter; NULL or not 0: an exception is set ---- */

    /* function_new: a callable for fanin.Node(function, edges=..), of which it is the `fn`: new reference. Failing, it
     * does not call release. */
    fanin_object *(*function_new)(const fanin_function *f);
    /* node_new: a fanin.Node: new reference. `name` is a str, or NULL. */
    fanin_object *(*node_new)(fanin_object *function, const fanin_edge *edges, size_t nedges, fanin_object *name);
    /* to_python: the value as an ndarray, on a device as a fanin.sim.Array, over the same memory, or None: new
     * reference. of_python: an array on the CPU, a fanin.sim.Array, or None, as a value over the same memory. */
    fanin_object *(*to_python)(const fanin_value *v);
    int (*of_python)(fanin_object *o, fanin_value *out);

    /* ======== version 2 ======== */

    /* ---- arrays of other libraries: on any thread, with or without the interpreter ---- */

    /* of_managed: a value over a tensor's memory, which owns the tensor from then on, also on failure. The deleter is
     * called once, on any thread; on a device after all streams that used the memory. Calls of the table call deleters
     * without a lock of fanin's and without the interpreter, so that they may wait for it. */
    fanin_status (*of_managed)(fanin_managed *tensor, fanin_value *out, fanin_failure *why);
    /* to_managed: a tensor over the value's memory, which holds it until its deleter is called. */
    fanin_status (*to_managed)(const fanin_value *v, fanin_managed **out, fanin_failure *why);

    /* ---- the buffer: on any thread, with or without the interpreter, but for explain ---- */

    /* buffer_new: an empty buffer. options NULL: all defaults. buffer_free: drops all that it holds, once its open
     * targets have ended; no other call is in progress. NULL: nothing. */
    fanin_status (*buffer_new)(size_t slots, const fanin_buffer_options *options, fanin_buffer **out,
                               fanin_failure *why);
    void (*buffer_free)(fanin_buffer *b);
    /* buffer_add: adds memory of the CPU, which the caller keeps as it is until the sum is taken or the buffer is
     * cleared (FANIN_ADD_COPY: until the call returns). NULL: an undefined gradient. The sum never is that memory,
     * unless it was donated; then it must outlive the value that take returns. A small add of the slot's shape and
     * dtype allocates nothing. On failure all is as before. options NULL: none. */
    fanin_status (*buffer_add)(fanin_buffer *b, size_t slot, const fanin_tensor *gradient,
                               const fanin_add_options *options, fanin_failure *why);
    /* buffer_add_value: adds a value, on any device; the buffer takes a hold of its own. The sum of one gradient is
     * that value itself. */
    fanin_status (*buffer_add_value)(fanin_buffer *b, size_t slot, const fanin_value *gradient,
                                     const fanin_add_options *options, fanin_failure *why);
    /* buffer_add_many: adds all or none. `options` are of all; its key is not read. */
    fanin_status (*buffer_add_many)(fanin_buffer *b, const fanin_gradient *gradients, size_t n,
                                    const fanin_add_options *options, fanin_failure *why);
    /* buffer_expect: a slot takes n gradients in each pass from now on (A16). buffer_ready: whether all have come. */
    fanin_status (*buffer_expect)(fanin_buffer *b, size_t slot, int64_t n, fanin_failure *why);
    fanin_status (*buffer_ready)(fanin_buffer *b, size_t slot, int *ready, fanin_failure *why);
    /* buffer_take: all sums, n as many as slots, which the caller owns; the buffer is empty then. With `out`, the value
     * shows the caller's memory. On failure no sum is lost. buffer_take_one: of one slot; `out` has one entry. */
    fanin_status (*buffer_take)(fanin_buffer *b, const fanin_take_options *options, fanin_value *sums, size_t n,
                                fanin_failure *why);
    fanin_status (*buffer_take_one)(fanin_buffer *b, size_t slot, const fanin_take_options *options, fanin_value *sum,
                                    fanin_failure *why);
    /* buffer_target: an array in the accumulation dtype that the caller adds into, for a slot that declares shape and
     * dtype; *out is borrowed until target_end. Of the options, key and stream are read. target_end: good: it becomes a
     * contribution; 0: it is dropped, or poisons the slot whose running sum it is. Called by the same thread; *t is
     * gone then. */
    fanin_status (*buffer_target)(fanin_buffer *b, size_t slot, const fanin_add_options *options, fanin_target **t,
                                  fanin_value *out, fanin_failure *why);
    fanin_status (*target_end)(fanin_target *t, int good, fanin_failure *why);
    /* buffer_clear: empties it, poisoned slots too. */
    fanin_status (*buffer_clear)(fanin_buffer *b, fanin_failure *why);
    /* buffer_stats: of the last taken sum of a slot, until the next add to it; needs FANIN_BUFFER_STATS.
     * buffer_counters: of all passes. */
    fanin_status (*buffer_stats)(fanin_buffer *b, size_t slot, fanin_stats *out, fanin_failure *why);
    fanin_status (*buffer_counters)(fanin_buffer *b, fanin_counters *out, fanin_failure *why);
    /* buffer_explain: what a slot holds and what its next sum will do, in sentences with the numbers of rules: a str,
     * new reference; NULL: an exception. Inside the interpreter. */
    fanin_object *(*buffer_explain)(fanin_buffer *b, size_t slot);

    /* ---- the engine: inside the interpreter; NULL or not 0: an exception is set ---- */

    /* leaf_new: a fanin.Leaf over the value's memory: new reference. `name` is a str, or NULL. leaf_grad: its .grad, on
     * the CPU; undefined: None. */
    fanin_object *(*leaf_new)(const fanin_value *array, fanin_object *name);
    int (*leaf_grad)(fanin_object *leaf, fanin_value *out);
    /* backward: runs a pass into the leaves. grad: returns the sums of options->inputs, of which the caller owns
     * out[i]; they are on the CPU. */
    int (*backward)(const fanin_root *roots, size_t n, const fanin_pass_options *options);
    int (*grad)(const fanin_root *roots, size_t n, const fanin_pass_options *options, fanin_value *out);

    /* ---- the rest: on any thread, with or without the interpreter ---- */

    /* overlap: whether two arrays share a byte; at_a, at_b (as many numbers as axes; both may be NULL) get an element
     * of each with a common one. budget: bytes for the table of a hard question; 0: none. */
    fanin_status (*overlap)(const fanin_tensor *a, const fanin_tensor *b, uint64_t budget, int64_t *at_a, int64_t *at_b,
                            fanin_verdict *out, fanin_failure *why);

    /* event_record: all that the stream has queued so far. stream_wait: the stream's later work is ordered after that.
     * stream_sync: blocks until its work has run. value_read: copies a value to memory of the CPU of the same shape and
     * dtype, after what the stream (NULL: the current one) has queued; blocks. */
    fanin_status (*event_record)(const fanin_stream *stream, fanin_event **out, fanin_failure *why);
    void (*event_free)(fanin_event *e);
    fanin_status (*stream_wait)(const fanin_stream *stream, fanin_event *e, fanin_failure *why);
    fanin_status (*stream_sync)(const fanin_stream *stream, fanin_failure *why);
    fanin_status (*value_read)(const fanin_value *v, const fanin_stream *stream, const fanin_tensor *out,
                               fanin_failure *why);

    /* machine_new: a simulated machine; its first device is {FANIN_DEVICE_SIM, 0} on a thread that has entered it.
     * machine_entered: the one that this thread has entered, of a Machine in Python too. machine_free: the handle, and
     * its streams. */
    fanin_status (*machine_new)(const fanin_machine_options *options, fanin_machine **out, fanin_failure *why);
    fanin_status (*machine_entered)(fanin_machine **out, fanin_failure *why);
    void (*machine_free)(fanin_machine *m);
    fanin_status (*machine_enter)(fanin_machine *m, fanin_failure *why);
    void (*machine_leave)(fanin_machine *m);
    /* machine_stream: a new one, until machine_free. machine_array: memory of a device with the elements of `init`,
     * ordered before all that is queued later. machine_launch: queues a kernel: FANIN_ERR_RACE names the earlier access
     * that nothing orders before it; on failure `release` is not called. machine_synchronize: runs all
     * that is queued. machine_races: how many were found. */
    fanin_status (*machine_stream)(fanin_machine *m, int32_t device, fanin_stream *out, fanin_failure *why);
    fanin_status (*machine_array)(fanin_machine *m, int32_t device, const fanin_tensor *init, fanin_value *out,
                                  fanin_failure *why);
    fanin_status (*machine_launch)(fanin_machine *m, const fanin_stream *stream, const fanin_kernel *kernel,
                                   fanin_failure *why);
    fanin_status (*machine_synchronize)(fanin_machine *m, fanin_failure *why);
    uint64_t (*machine_races)(fanin_machine *m);
    /* machine_spawn: a host thread that calls run(ctx), in turns with the others: at most 32. machine_join: runs them
     * to their end; FANIN_ERR_DEADLOCK: those that are left wait for each other, and the machine has given up. */
    fanin_status (*machine_spawn)(fanin_machine *m, void (*run)(void *ctx), void *ctx, fanin_failure *why);
    fanin_status (*machine_join)(fanin_machine *m, fanin_failure *why);

    /* ---- one buffer in both languages: inside the interpreter; NULL: an exception is set ---- */

    /* buffer_of_python: a handle of a fanin.InputBuffer, which it holds until buffer_free; it is used like any other
     * buffer, on any thread. Each call takes the interpreter's lock, and views are copied. buffer_to_python: that
     * InputBuffer: new reference; TypeError of a buffer that buffer_new made. */
    fanin_buffer *(*buffer_of_python)(fanin_object *buffer);
    fanin_object *(*buffer_to_python)(fanin_buffer *b);

    /* buffer_snapshot: the sum of a slot as it is now, which the caller owns and later adds do not change; the slot
     * keeps its gradients (D17). On any thread, with or without the interpreter. stream: as in take. */
    fanin_status (*buffer_snapshot)(fanin_buffer *b, size_t slot, const fanin_stream *stream, fanin_value *sum,
                                    fanin_failure *why);
} fanin_api;

#define FANIN_CAPSULE "fanin._core._C_API"

#ifdef Py_PYTHON_H
/* fanin_import: the table; NULL: ImportError. */
static inline const fanin_api *fanin_import(void)
{
    const fanin_api *api = (const fanin_api *)PyCapsule_Import(FANIN_CAPSULE, 0);
    if (api && api->version < FANIN_API_VERSION) {
        PyErr_Format(PyExc_ImportError,
                     "this module was built for version %d of fanin's C API, and the fanin that is installed has "
                     "version %d: upgrade fanin",
                     FANIN_API_VERSION, (int)api->version);
        api = NULL;
    }
    return api;
}
#endif

#ifdef __cplusplus
}
#endif

#endif
