/* engine: one pass backward over a graph (docs/engine.md, in its order).
 *
 *   begin   collects: counts what the roots reach and what is needed (E1, E8) and gives every edge
 *           its key
 *   seed    checks and adds the roots' gradients like any other
 *   run     accumulates ready leaves, else runs the ready node with the largest number (E2): takes
 *           its sums, calls its function, checks and adds its gradients (E4, V)
 *   end     releases all that the pass holds
 *
 * Gradients and sums are objects of the frontend, NULL where undefined. The frontend's buffer for a
 * node's fan-ins is an opaque pointer. One thread at a time calls these functions for one pass,
 * inside the interpreter (node.h, One thread at a time); the frontend's functions may leave it.
 * With several workers (workers.h) all of them call the frontend's functions, for different nodes
 * at once where these leave the interpreter. */
#ifndef FAN_ENGINE_ENGINE_H
#define FAN_ENGINE_ENGINE_H

#include "base/trace.h"
#include "buffer/value.h"
#include "engine/node.h"

/* one pass; PyTorch's GraphTask. Its parts are fan_pass_.. (pass.h) */
typedef struct fan_pass fan_pass;
typedef struct fan_pass_config fan_pass_config;

/* The producer of a gradient, for messages (V3) and streams. */
typedef struct fan_producer {
    const fan_node *node; /* NULL: the caller of the pass */
    const char *call;     /* name of the public function, "backward" */
    uint32_t index;       /* of the edge, or of the root */
    bool from_hook;       /* a post-hook of the node returned it */
    fan_stream *stream;   /* P; NULL: the current stream where it is added */
    /* streams current at the consumer; C is one of them if it has no stream of its own (S5) */
    fan_stream_set *to;
} fan_producer;

/* A sum that is not finite (E11). */
typedef struct fan_nonfinite {
    const fan_node *to;
    uint32_t slot;
    uint64_t elements; /* of the sum that are inf or NaN; 0: none */
    uint64_t total;    /* elements of the sum */
    /* of the first gradient that has one; UINT32_MAX: none has, the sum overflowed */
    uint32_t key;
} fan_nonfinite;

/* A sink for text. */
typedef struct fan_text {
    void (*write)(void *to, const char *text);
    void *to;
} fan_text;

/* The functions that the frontend provides. Ownership passes only where a comment states it. */
typedef struct fan_engine_frontend {
    void (*hold)(void *object);
    void (*drop)(void *object);
    /* can_forward: returns whether a slot's only gradient may be forwarded as it is (A14): it
     * matches the slot's declaration and needs no conversion. Otherwise it goes through a buffer,
     * which converts it or raises. */
    bool (*can_forward)(const fan_node *to, uint32_t slot, void *gradient);
    /* place: writes the value of a gradient (or of NULL) on a device with streams, with holds for
     * place_drop, and a hold on the stream that is current there (S4).
     * *current NULL: it is on the CPU; this costs almost nothing. */
    fan_status (*place)(void *gradient, fan_value *value, fan_stream **current, fan_error *err);
    void (*place_drop)(fan_value *value);
    /* buffer_new: makes a buffer for the fan-ins of a node; `consumer`: C; `gradient`: the first
     * one. */
    fan_status (*buffer_new)(const fan_pass_config *c, const fan_node *n, fan_stream *consumer,
                             void *gradient, void **buffer, fan_error *err);
    /* buffer_free: frees it with its contents. */
    void (*buffer_free)(void *buffer);
    /* add: adds one gradient, NULL for undefined, of which the buffer takes its own hold. */
    fan_status (*add)(void *buffer, uint32_t slot, uint32_t key, void *gradient,
                      const fan_producer *producer, fan_error *err);
    /* take: takes the sum of a slot; *sum is a hold, or NULL. */
    fan_status (*take)(const fan_node *n, void *buffer, uint32_t slot, void **sum, fan_error *err);
    /* read_stats: after a take in a pass with detect: writes the elements and the key of *found. */
    fan_status (*read_stats)(void *buffer, uint32_t slot, fan_nonfinite *found, fan_error *err);
    /* nonfinite: raises the error for it; producer NULL: every gradient was finite. */
    fan_status (*nonfinite)(const fan_nonfinite *found, const fan_producer *producer,
                            fan_error *err);
    /* hooks: runs the hooks of the slots, which may replace sums (E9). *node_hooks: a hold on the
     * node's other hooks as they are now, for `run`; NULL: none. */
    fan_status (*hooks)(fan_node *n, void **sums, void **node_hooks, fan_error *err);
    /* run: calls the node's function and its other hooks. Writes holds into `gradients`, all NULL
     * before, also on failure. The sums, which hooks may replace, stay the caller's. */
    fan_status (*run)(fan_node *n, void **sums, void *node_hooks, void **gradients,
                      uint32_t ngradients, fan_error *err);
    /* is_from_hook: after run: returns whether one of these post-hooks returned the gradient. */
    bool (*is_from_hook)(const void *node_hooks, uint32_t index);
    /* fetch: prefetches three nodes that are likely to run next, the nearest first: of the farthest
     * the node itself, of the second its function, of the nearest what that function reads. Calls
     * nothing. */
    void (*fetch)(const fan_node *const ahead[3]);
    /* accumulate: adds a sum, which is defined, to a leaf's gradient (L). *sum stays the caller's,
     * or is taken and set to NULL. */
    fan_status (*accumulate)(const fan_pass_config *c, fan_node *leaf, void **sum, void *node_hooks,
                             fan_error *err);
    /* leaf_grad: returns a hold on the leaf's gradient.
     * NULL: it has none, or it cannot be read. */
    void *(*leaf_grad)(fan_node *leaf);
    /* leaf_is_diverted: returns whether the leaf's sums go elsewhere, not to its gradient. */
    bool (*leaf_is_diverted)(const fan_node *leaf);
    /* slot_has_hooks: returns whether a hook may have changed a sum of the node. */
    bool (*slot_has_hooks)(const fan_node *n);
    /* digest: writes the digest of a gradient or a sum, NULL for undefined, into a line
     * (fan_digest_fill). */
    void (*digest)(void *object, fan_stream *on, uint64_t known, fan_trace_line *line);
    /* memory: writes the bytes and the address of a gradient's memory into a line. */
    void (*memory)(void *gradient, fan_trace_line *line);
    /* release: drops the node's function (E10). */
    fan_status (*release)(fan_node *n, fan_error *err);
    /* check_signals: runs the handlers of signals, between nodes (E14); an error ends the pass. */
    fan_status (*check_signals)(fan_error *err);

    /* ---- with several workers alone ---- */

    /* group: returns the same pointer for nodes that must not run at once; NULL: no group. */
    const void *(*group)(const fan_node *n);
    /* allow_threads_begin, _end: called around a wait, so that other threads can enter the
     * interpreter. */
    void *(*allow_threads_begin)(void);
    void (*allow_threads_end)(void *left);
    /* worker_new: makes an object with the context that a thread needs to run nodes for this
     * one. */
    fan_status (*worker_new)(void **worker, fan_error *err);
    /* worker_enter: lets such a thread enter the interpreter; false: the interpreter is gone. */
    bool (*worker_enter)(void *worker);
    /* worker_leave: lets it leave. */
    void (*worker_leave)(void *worker);
    /* error_take: returns the error of this thread as an object that has its location: node `n`
     * (NULL: between nodes), after `ran` nodes. */
    void *(*error_take)(const fan_pass *pass, const fan_node *n, uint32_t ran, fan_status status,
                        const fan_error *err);
    /* error_both: returns the more important of two, with a note of the other; takes both holds,
     * returns one. */
    void *(*error_both)(void *first, void *second);
    /* error_put: sets it as this thread's error. */
    void (*error_put)(void *error);
    /* orphaned: a worker forked: the child has only that thread and no caller to raise to. Prints
     * the error and ends the process. Does not return. */
    void (*orphaned)(void *error);

    /* ---- what the user gives ---- */

    /* pick: calls the user's schedule, which chooses one of the ready nodes: *place. */
    fan_status (*pick)(void *schedule, const fan_pass *pass, size_t *place, fan_error *err);
    /* progress: calls the user's callback: `ran` of `all` nodes have run. */
    fan_status (*progress)(void *progress, uint32_t ran, uint32_t all, fan_error *err);
} fan_engine_frontend;

typedef struct fan_root {
    fan_node *node;
    uint32_t slot;
    void *gradient;
} fan_root;

typedef struct fan_wanted {
    fan_node *node;
    uint32_t slot;
} fan_wanted;

/* From begin on the pass holds the nodes and gradients; it copies the arrays. */
struct fan_pass_config {
    const fan_engine_frontend *frontend;
    const char *call; /* "backward"; outlives the pass */
    fan_root *roots;
    size_t nroots;
    fan_wanted *wanted; /* inputs= (E8) */
    size_t nwanted;
    bool limited; /* inputs= was given */
    bool capture; /* sums of wanted slots are results; else wanted leaves accumulate */
    bool keep_graph;
    bool create_graph; /* the pass records itself (A1, L6) */
    bool detect;       /* the pass ends at the first gradient that is not finite (E11) */
    uint64_t budget;   /* of the pass's buffers */
    fan_weight weight; /* what multiplies each leaf's sum (W8); not on: it is 1 */
    bool reduced;      /* a reducer has the weight, which multiplies what leaves give it */
    uint32_t workers;  /* threads that run nodes, the caller's included (E12); 0 is 1 */
    void *schedule;    /* held from begin on; NULL: E2's order */
    void *progress;    /* callback, held from begin on; NULL: none */
};

/* fan_pass_begin: makes a pass, and collects its nodes. On failure nothing has changed;
 * otherwise call fan_pass_end. */
fan_status fan_pass_begin(const fan_pass_config *config, fan_pass **out, fan_error *err);
fan_status fan_pass_seed(fan_pass *pass, fan_error *err);
fan_status fan_pass_run(fan_pass *pass, fan_error *err);
/* fan_pass_join: at the end of every pass, also a failed one: the caller's streams wait (S20).
 * A no-op on the CPU. */
fan_status fan_pass_join(fan_pass *pass, fan_error *err);
/* fan_pass_end: accepts NULL. */
void fan_pass_end(fan_pass *pass);
/* fan_pass_result: returns the sum of the i-th wanted slot, with its hold.
 * NULL: none. */
void *fan_pass_result(fan_pass *pass, size_t i);

/* fan_pass_depth: adds `by` (1 or -1) to this thread's depth of nested passes.
 * false: too deep; undo it then, too. */
bool fan_pass_depth(int by);
/* fan_pass_too_deep: returns the error for it (E7). */
fan_status fan_pass_too_deep(fan_error *err);

/* A node of the order in which a pass will run. */
typedef struct fan_pass_step {
    fan_node *node; /* borrowed */
    uint32_t after; /* the step that gives the last of its gradients; UINT32_MAX: the roots */
    bool runs;      /* false: its sums are only captured (E8) */
} fan_pass_step;
/* fan_pass_order: instead of fan_pass_seed: writes the steps of one thread, one for each node that
 * fan_pass_at counts, in their order (E2). The pass cannot run afterwards. FAN_ERR_STATE: the graph
 * has a cycle. */
fan_status fan_pass_order(fan_pass *pass, fan_pass_step *steps, fan_error *err);

/* The calls of walk(), instead of fan_pass_run.
 * fan_pass_next: accumulates leaves, then makes the next ready node current.
 * *out NULL: the pass is done. */
fan_status fan_pass_next(fan_pass *pass, fan_node **out, fan_error *err);
/* fan_pass_sums: writes holds of its sums, after the hooks of its slots, and of `node_hooks`.
 */
fan_status fan_pass_sums(fan_pass *pass, void **sums, void **node_hooks, fan_error *err);
/* fan_pass_give: delivers its gradients, after `node_hooks`; takes the holds, also on
 * failure. */
fan_status fan_pass_give(fan_pass *pass, void **gradients, const void *node_hooks, fan_error *err);

/* fan_pass_walk_runs: marks the current node as running until fan_pass_give: inside a call
 * on this thread, between calls on any. */
void fan_pass_walk_runs(fan_pass *pass, bool inside);
/* fan_pass_enter: makes the current node's streams current on this thread (E4), until
 * fan_streams_leave. Use around user code that runs between `next` and `give`. */
void fan_pass_enter(const fan_pass *pass, fan_streams_outer *outer);
/* fan_pass_ready: returns the first ready node at *place or later, and sets *place to its
 * place.
 * NULL: there is none. */
fan_node *fan_pass_ready(const fan_pass *pass, size_t *place);
/* fan_pass_edges: returns how many gradients the current node returns. */
uint32_t fan_pass_edges(const fan_pass *pass);
/* fan_pass_at: returns the current node, or the one that failed; *ran of *all nodes have run.
 * NULL: there is none. */
const fan_node *fan_pass_at(const fan_pass *pass, uint32_t *ran, uint32_t *all);
bool fan_pass_seeded(const fan_pass *pass);
/* fan_pass_id: returns a mark (fan_mark_new) that was new when the pass began. */
uint64_t fan_pass_id(const fan_pass *pass);
/* fan_pass_explain: writes, for each node that has not run or for `only`, the edges that it
 * waits for, and the gradients that it holds (E17). May write nothing. */
void fan_pass_explain(const fan_pass *pass, const fan_node *only, const fan_text *out);
/* fan_pass_lost: writes the gradients that a pass which ends early loses. May write nothing. */
void fan_pass_lost(const fan_pass *pass, const fan_text *out);
/* fan_pass_error_has_location: returns whether error_take has added the location to the pass's
 * error. */
bool fan_pass_error_has_location(const fan_pass *pass);
/* fan_pass_needs: returns whether the gradient of an edge is used: by the innermost pass in
 * which this thread runs the node, else by the latest walk that waits for it, else whether the edge
 * leads to a node at all. */
bool fan_pass_needs(const fan_node *node, uint32_t edge);
/* fan_pass_visit: for garbage collection: calls `object` for every object and `node` for every
 * node that the pass holds; stops at the first result that is not 0 and returns it. */
int fan_pass_visit(fan_pass *pass, int (*object)(void *object, void *arg),
                   int (*node)(fan_node *node, void *arg), void *arg);

#endif
