/* tree: functions of arrays that are recorded once and replayed, by the path of calls before them.
 *
 * A tree has a device, an arena of its memory, a stream of its own, and recordings (nodes). A call
 * gathers facts, call.h makes the plan, and run.c carries it out. The work of a function is
 * recorded on the tree's stream: it waits for the caller's current stream before the call, and the
 * caller's waits for it after.
 *
 * Title: Which blocks live. Outputs are views of blocks of the arena. The tree holds each block's
 * storage and the arrays that it hands out, so no leaf steals this memory (L8); a block lives while
 * it has more references than the tree's. At the end of its step or path the storage is marked as
 * ended: later uses are errors (fan_storage_check). A replay hands out the same storage and arrays
 * again if they have no other references, else new ones: so a handle of an earlier step never shows
 * new data, and a steady call allocates nothing.
 *
 * Any thread may call, one at a time. The tree's lock is held while a function's body runs. */
#ifndef FAN_GRAPH_TREE_H
#define FAN_GRAPH_TREE_H

#include "array/array.h"
#include "device/stream.h"
#include "graph/call.h"

typedef struct fan_tree fan_tree;
typedef struct fan_tree_function fan_tree_function;

typedef enum fan_tree_role {
    FAN_TREE_AUTO, /* used in place if it is an output of this step, else as COPY */
    FAN_TREE_COPY, /* copied into the arena before each replay */
    FAN_TREE_STATIC,
    FAN_TREE_ACCUMULATE /* the caller's memory, which the function adds into */
} fan_tree_role;

typedef struct fan_tree_options {
    uint64_t memory; /* bytes of the arena */
    /* recordings of one function after one node because an operand moved; then it is copied */
    unsigned limit;
    bool strict; /* a static operand that moves is an error */
    /* the first so many replays of each recording also run the function (verify.c) */
    unsigned verify;
} fan_tree_options;

typedef struct fan_tree_function_options {
    const uint8_t *roles; /* of each operand; nroles 0: roles[0] of all */
    size_t nroles;
    const bool *keep; /* outputs that are copied out of the arena; nkeep 0: none, SIZE_MAX: all */
    size_t nkeep;
    size_t min_kernels;  /* a recording of fewer is not kept: the function runs eagerly */
    const int64_t *only; /* extents of the first array's first axis that are recorded */
    size_t nonly;        /* 0: all */
} fan_tree_function_options;

/* The result of a body: held arrays (NULL: None), and their container (the frontend's). */
typedef struct fan_tree_result {
    fan_array **at;
    size_t n;
    size_t cap;
    int form;
} fan_tree_result;

void fan_tree_result_clear(fan_tree_result *r); /* drops the arrays; their room stays */
void fan_tree_result_fini(fan_tree_result *r);

/* The frontend's functions of a call. run: the function, with in[i] (NULL: the caller's argument)
 * as the i-th operand; fills *out. warn: warns its owner. collect: runs the garbage collector. */
typedef struct fan_tree_body {
    fan_status (*run)(void *ctx, fan_array *const *in, fan_tree_result *out, fan_error *err);
    void (*warn)(void *ctx, const char *text);
    void (*collect)(void *ctx);
    /* cause: writes, if it is known, why the function differs from recording `node`: a clause. May
     * be NULL. */
    void (*cause)(void *ctx, int node, char *buf, size_t size);
    void *ctx;
} fan_tree_body;

typedef struct fan_tree_args {
    fan_array *const *in; /* NULL: an operand that is no array; it is part of `key` */
    size_t n;
    uint64_t key;
    const char *call_site; /* the caller's line */
    fan_tree_body body;
} fan_tree_args;

#define FAN_TREE_REASON 320

/* The outcome of a call, and its reason. */
typedef struct fan_tree_report {
    fan_tree_outcome outcome;
    uint32_t rules;
    int node;                     /* -1: none */
    bool handed;                  /* FAN_TREE_EAGER: outputs named by keep were copied */
    char reason[FAN_TREE_REASON]; /* "": a replay */
} fan_tree_report;

typedef struct fan_tree_stats {
    unsigned long long nodes;
    unsigned long long bytes;
    unsigned long long in_use;
    unsigned long long high_water;
    /* calls */
    unsigned long long warmed;
    unsigned long long recorded;
    unsigned long long replayed;
    unsigned long long eager;
    unsigned long long restored;
    unsigned long long driver_bytes; /* allocated by the driver for recordings */
    bool closed;
} fan_tree_stats;

/* fan_tree_new: reserves the arena; one hold. FAN_ERR_TYPE: the device cannot record;
 * FAN_ERR_NOMEM, FAN_ERR_DEVICE_NOMEM, FAN_ERR_DEVICE. */
fan_status fan_tree_new(fan_device *d, const fan_tree_options *options, fan_tree **out,
                        fan_error *err);
void fan_tree_drop(fan_tree *t); /* the last one closes it; accepts NULL */
/* fan_tree_close: ends its outputs, frees its recordings and memory; later calls fail.
 * FAN_ERR_STATE inside a step or a call. */
fan_status fan_tree_close(fan_tree *t, const char *call_site, fan_error *err);

/* fan_tree_function_new: one hold; it holds the tree. Copies the options. FAN_ERR_NOMEM. */
fan_status fan_tree_function_new(fan_tree *t, const char *name,
                                 const fan_tree_function_options *options, fan_tree_function **out,
                                 fan_error *err);
void fan_tree_function_drop(fan_tree_function *f);

/* Calls of one function by their outcome, and its recordings. */
typedef struct fan_tree_function_stats {
    unsigned long long warmed;
    unsigned long long recorded;
    unsigned long long replayed;
    unsigned long long eager;
    unsigned long long nodes;
} fan_tree_function_stats;
void fan_tree_function_get_stats(fan_tree_function *f, fan_tree_function_stats *out);

/* fan_tree_step_begin: begins a step, in which functions may be called. Nested steps of one tree
 * are one step; inside a step of another tree: FAN_ERR_STATE. */
fan_status fan_tree_step_begin(fan_tree *t, fan_error *err);
/* fan_tree_step_end: ends it; with the last open step of the tree the outputs of its functions end,
 * whose later use names `call_site`. */
void fan_tree_step_end(fan_tree *t, const char *call_site);
/* fan_tree_in_step: whether this thread is in a step of the tree. */
bool fan_tree_in_step(const fan_tree *t);
/* fan_tree_open_steps: returns how many steps of all threads are open. */
unsigned fan_tree_open_steps(fan_tree *t);

/* fan_tree_function_call: *out: the result, as of body.run. On failure the path is unchanged,
 * nothing stays captured, and the body's allocations are ended. */
fan_status fan_tree_function_call(fan_tree_function *f, const fan_tree_args *args,
                                  fan_tree_result *out, fan_tree_report *report, fan_error *err);

/* fan_tree_warm_again: frees all recordings, but on the path; each function is warmed up again at
 * its next call. FAN_ERR_STATE in a function's body, or if the tree is closed. */
fan_status fan_tree_warm_again(fan_tree *t, fan_error *err);

/* fan_tree_copied: a copy of an array in its own memory, made on the caller's current stream; *out
 * is a hold on `a` itself if that is no memory of a tree. FAN_ERR_STATE: its step has ended, or a
 * function runs; FAN_ERR_CAPTURE: the stream is captured; FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
fan_status fan_tree_copied(fan_tree *t, fan_array *a, fan_array **out, fan_error *err);

/* FAN_TREE_FOREIGN: the message for an operation on other memory: the function, the operation. */
#define FAN_TREE_FOREIGN                                                                          \
    "%s: %s touches memory that is neither an operand nor allocated in the function's own "       \
    "thread, and a replay "                                                                       \
    "could not know where it lies then: pass the array as an operand (static, if it stays where " \
    "it is; to a step of "                                                                        \
    "tape.compiled as an argument, or in static=)"

/* fan_tree_memory_under: the arena that an array lies in, borrowed; NULL: it lies elsewhere. */
fan_storage *fan_tree_memory_under(const fan_array *a);

void fan_tree_get_stats(fan_tree *t, fan_tree_stats *out);

/* One recording, for pictures. */
typedef struct fan_tree_recording_info {
    /* parent -1: it is a root */
    int node;
    int parent;
    const char *function;
    unsigned long long owns;    /* bytes of its outputs */
    unsigned long long reaches; /* the end of the memory that it uses */
    unsigned long long replays;
    unsigned long long kernels;
    bool current; /* it is on the path */
} fan_tree_recording_info;
/* fan_tree_visit_memory: calls `visit` with the lock for each range that a recording uses; `owns`:
 * as an output. */
void fan_tree_visit_memory(fan_tree *t,
                           void (*visit)(void *ctx, int node, uint64_t lo, uint64_t hi, bool owns),
                           void *ctx);
/* fan_tree_visit: calls `visit` with the lock for each recording, the one with the highest number
 * first. */
void fan_tree_visit(fan_tree *t, void (*visit)(void *ctx, const fan_tree_recording_info *s),
                    void *ctx);

#endif
