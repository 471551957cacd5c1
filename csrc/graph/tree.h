/* tree: functions of arrays that are recorded once and replayed, by the path of calls before them.
 *
 * A tree has a device, an arena of its memory, a stream of its own, and recordings (nodes). call.h decides what a call
 * does; here the facts are gathered, and what was decided is done. What a function writes and reads is recorded on the
 * tree's stream, which waits for the caller's current stream before and lets it wait afterwards.
 *
 * Title: Who lives. Outputs are views of blocks of the arena. The tree has a hold on each block's storage and on the
 * arrays that it hands out, so nobody takes such memory for his own (L8); a block lives as long as there are more holds
 * than the tree's. When its step ends, or its path, it is marked as ended: whoever touches it from then on gets an
 * error (fan_storage_check). A replay hands out the same storage and arrays again, once nobody has them; else new ones:
 * so a handle of an earlier step never shows new data, and a steady call allocates nothing.
 *
 * Threads: any may call; one does at a time. The tree's lock is held while a function's body runs. */
#ifndef FAN_GRAPH_TREE_H
#define FAN_GRAPH_TREE_H

#include "array/array.h"
#include "device/stream.h"
#include "graph/call.h"

typedef struct fan_tree fan_tree;
typedef struct fan_tree_function fan_tree_function;

typedef enum fan_tree_role {
    FAN_TREE_AUTO, /* an output of this step at its address, all else as COPY */
    FAN_TREE_COPY, /* copied into the arena before each replay */
    FAN_TREE_STATIC,
    FAN_TREE_ACCUMULATE /* the caller's memory, which the function adds into */
} fan_tree_role;

typedef struct fan_tree_options {
    uint64_t memory; /* bytes of the arena */
    unsigned limit;  /* recordings of one function behind one node because an operand moved; then it is copied */
    bool strict;     /* a static operand that moves is an error */
    unsigned verify; /* the first replays of each recording that run the function beside them (verify.c) */
} fan_tree_options;

/* What a body gives: arrays, each with a hold (NULL: None), and what they stand in (the frontend's). */
typedef struct fan_tree_result {
    fan_array **at;
    size_t n, cap;
    int form;
} fan_tree_result;

void fan_tree_result_fini(fan_tree_result *r);

/* What a call brings. run: the function itself, with in[i] (NULL: as the caller gave it) for the i-th operand; fills
 * *out. warn: a word to its owner. collect: what nobody can reach any more is let go. */
typedef struct fan_tree_body {
    fan_status (*run)(void *ctx, fan_array *const *in, fan_tree_result *out, fan_error *err);
    void (*warn)(void *ctx, const char *text);
    void (*collect)(void *ctx);
    /* cause: writes why the function gives something else than recording `node`, as far as is known: a clause. May be
     * NULL. */
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

/* What a call did, and why. */
typedef struct fan_tree_report {
    fan_tree_outcome outcome;
    uint32_t rules;
    int node;                     /* -1: none */
    bool handed;                  /* FAN_TREE_EAGER: with outputs copied as keep says, all the same */
    char reason[FAN_TREE_REASON]; /* "": a replay */
} fan_tree_report;

typedef struct fan_tree_stats {
    uint64_t nodes, bytes, in_use, high_water, warmed, recorded, replayed, eager, restored;
    uint64_t driver_bytes; /* that the driver took for recordings */
} fan_tree_stats;

/* fan_tree_new: reserves the arena. FAN_ERR_TYPE where the device cannot record, FAN_ERR_NOMEM, FAN_ERR_DEVICE_NOMEM,
 * FAN_ERR_DEVICE. One hold. */
fan_status fan_tree_new(fan_device *d, const fan_tree_options *options, fan_tree **out, fan_error *err);
void fan_tree_drop(fan_tree *t); /* the last closes it; NULL is fine */
/* fan_tree_close: what it handed out is ended, its recordings and memory are gone; calls fail from then on.
 * FAN_ERR_STATE within a step or a call. */
fan_status fan_tree_close(fan_tree *t, const char *call_site, fan_error *err);
bool fan_tree_closed(fan_tree *t);

/* fan_tree_function_new: `roles`: of each operand; nroles 0: all of them AUTO. keep: which outputs are copied out of
 * the arena; nkeep 0: none, SIZE_MAX: all. One hold; it holds the tree. FAN_ERR_NOMEM. */
fan_status fan_tree_function_new(fan_tree *t, const char *name, const uint8_t *roles, size_t nroles, const bool *keep,
                                 size_t nkeep, fan_tree_function **out, fan_error *err);
void fan_tree_function_drop(fan_tree_function *f);

/* fan_tree_step_begin, _end: between them functions may be called. Steps of one tree nest, and then they are one;
 * inside a step of another tree: FAN_ERR_STATE. */
fan_status fan_tree_step_begin(fan_tree *t, fan_error *err);
void fan_tree_step_end(fan_tree *t, const char *call_site);

/* fan_tree_function_call: *out: what the function gave, as body.run does. Failing, the path is as before, nothing is
 * captured, and what a body made is ended. */
fan_status fan_tree_function_call(fan_tree_function *f, const fan_tree_args *args, fan_tree_result *out,
                                  fan_tree_report *outcome, fan_error *err);

/* FAN_TREE_FOREIGN: the message for an operation that touches memory of others: the function, the operation. */
#define FAN_TREE_FOREIGN                                                                                         \
    "%s: %s touches memory that is neither an operand nor allocated in the function's own thread, and a replay " \
    "could not know where it lies then: pass the array as an operand (static, if it stays where it is)"

/* fan_tree_memory_under: all the memory of the tree that an array lies in, borrowed; NULL: it lies elsewhere. */
fan_storage *fan_tree_memory_under(const fan_array *a);

void fan_tree_get_stats(fan_tree *t, fan_tree_stats *out);

/* One recording, for pictures. */
typedef struct fan_tree_recording_info {
    int node, parent; /* parent -1: it is a root */
    const char *function;
    uint64_t owns;    /* bytes of its outputs */
    uint64_t reaches; /* where the memory ends that it uses */
    uint64_t replays;
    bool current; /* it is on the path */
} fan_tree_recording_info;
/* fan_tree_visit_memory: each piece of the tree's memory that a recording uses, `owns`: as an output; with the lock
 * held.
 */
void fan_tree_visit_memory(fan_tree *t, void (*visit)(void *ctx, int node, uint64_t lo, uint64_t hi, bool owns),
                           void *ctx);
/* fan_tree_visit: each recording, in the order of their numbers, with the lock held. */
void fan_tree_visit(fan_tree *t, void (*visit)(void *ctx, const fan_tree_recording_info *s), void *ctx);

#endif
