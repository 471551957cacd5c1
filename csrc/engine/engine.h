/* engine: one pass backward over a graph (docs/engine.md, in its order).
 *
 *   begin   collect: what is reached, needed and how often (E1, E8); every edge gets its key; nothing has run
 *   seed    the roots' gradients are checked and added like any other
 *   run     ready leaves accumulate, else the ready node with the largest number runs (E2): its sums, hooks, function,
 *           its gradients checked and added (E4, V)
 *   end     all that the pass holds is let go
 *
 * Gradients and sums are objects of the frontend, NULL where undefined. What the frontend keeps for a node's fan-ins, a
 * buffer, is a pointer of its own. A pass is asked for by one thread at a time; everything here is called inside the
 * interpreter (node.h, One thread at a time), which the frontend's functions may leave. A pass of several workers
 * (workers.h) calls the frontend's functions on all of them, for different nodes at once where they leave it.
 */
#ifndef FAN_ENGINE_ENGINE_H
#define FAN_ENGINE_ENGINE_H

#include "buffer/value.h"
#include "engine/node.h"

typedef struct fan_backward fan_backward;
typedef struct fan_backward_config fan_backward_config;

/* Who gives a gradient, for messages (V3). */
typedef struct fan_producer {
    const fan_node *node; /* NULL: the caller of the pass */
    const char *call;     /* his call, "backward" */
    uint32_t index;       /* of the edge, or of the root */
    bool from_hook;       /* a post-hook of the node put it there */
    fan_stream *stream;   /* P; NULL: what is current where it is added */
    fan_stream_set *to;   /* what is current where it is consumed: there C is, where the consumer has no stream (S5) */
} fan_producer;

/* A sum that is not finite (E11). */
typedef struct fan_nonfinite {
    const fan_node *to;
    uint32_t slot;
    uint64_t elements; /* of the sum, that are an inf or NaN; 0: none */
    uint64_t of;       /* .. all that it has */
    uint32_t key;      /* of the first gradient that has one; UINT32_MAX: none has, the sum overflows */
} fan_nonfinite;

/* Where text goes, piece by piece. */
typedef struct fan_text {
    void (*write)(void *to, const char *text);
    void *to;
} fan_text;

/* What the engine asks of its frontend. A hold is given where it says so. */
typedef struct fan_engine_frontend {
    void (*hold)(void *object);
    void (*drop)(void *object);
    /* hand: whether a slot's only gradient may be forwarded through as it is (A14): it is what the slot declares, and
     * needs no conversion. Else it goes through a buffer, which knows what to do or to say. */
    bool (*can_forward)(const fan_node *to, uint32_t slot, void *gradient);
    /* place: where a gradient, or NULL, lies on a device with streams: its value, with holds for place_drop, and the
     * stream that is current there for it (S4). Both NULL on the CPU, which costs next to nothing. */
    fan_status (*place)(void *gradient, fan_value *value, fan_stream **current, fan_error *err);
    void (*place_drop)(fan_value *value);
    /* buffer_new: for the fan-ins of a node; C; the first gradient that comes. buffer_free: whatever it holds still. */
    fan_status (*buffer_new)(const fan_backward_config *c, const fan_node *n, fan_stream *consumer, void *gradient,
                             void **buffer, fan_error *err);
    void (*buffer_free)(void *buffer);
    /* add: one gradient, NULL for undefined; the buffer takes a hold of its own. take: a hold in *sum. */
    fan_status (*add)(void *buffer, uint32_t slot, uint32_t key, void *gradient, const fan_producer *producer,
                      fan_error *err);
    fan_status (*take)(const fan_node *n, void *buffer, uint32_t slot, void **sum, fan_error *err);
    /* look: after a take, in a pass that detects: *found's elements and key. nonfinite: the error for it; producer
     * NULL: no gradient had one. */
    fan_status (*look)(void *buffer, uint32_t slot, fan_nonfinite *found, fan_error *err);
    fan_status (*nonfinite)(const fan_nonfinite *found, const fan_producer *producer, fan_error *err);
    /* hooks: those of the slots, which may replace sums (E9). *node_hooks: those that are there now, for afterwards: a
     * hold; NULL: none. */
    fan_status (*hooks)(fan_node *n, void **sums, void **node_hooks, fan_error *err);
    /* run: the node's function, with its other hooks: `gradients`, all NULL before, get holds; those that fail too.
     * The sums, which hooks may replace, stay the caller's. */
    fan_status (*run)(fan_node *n, void **sums, void *node_hooks, void **gradients, uint32_t ngradients,
                      fan_error *err);
    /* is_from_hook: after run: whether a post-hook of these put a node's gradient there. */
    bool (*is_from_hook)(const void *node_hooks, uint32_t index);
    /* fetch: three nodes that are likely to run soon, the nearest first, and that no cache may have: of the farthest
     * itself, of the second its function, of the nearest what that needs. Nothing is called. */
    void (*fetch)(const fan_node *const ahead[3]);
    /* accumulate: a leaf's sum, which is defined (L). *sum stays the caller's, or is taken and NULL. */
    fan_status (*accumulate)(const fan_backward_config *c, fan_node *leaf, void **sum, void *node_hooks,
                             fan_error *err);
    /* leaf_grad: what a leaf has now: a hold; NULL: nothing, or it cannot be told. */
    void *(*leaf_grad)(fan_node *leaf);
    /* release: the node's function is let go (E10). */
    fan_status (*release)(fan_node *n, fan_error *err);
    /* check_signals: between nodes (E14); anything but FAN_OK ends the pass. */
    fan_status (*check_signals)(fan_error *err);
    /* With several workers. group: what nodes share that are not to run at once, NULL: nothing; two that are the same
     * pointer are the same. allow_threads_begin, _end: around waiting: others may enter the interpreter. */
    const void *(*group)(const fan_node *n);
    void *(*allow_threads_begin)(void);
    void (*allow_threads_end)(void *left);
    /* worker_new: what a thread is to have around it that runs nodes for this one: an object. worker_enter: such a
     * thread enters the interpreter; false: there is none any more. worker_leave: it leaves. */
    fan_status (*worker_new)(void **worker, fan_error *err);
    bool (*worker_enter)(void *worker);
    void (*worker_leave)(void *worker);
    /* error_take: the error of this thread as an object, which says where it was: at node `n` (NULL: between nodes),
     * when so many had run. error_both: of two the one that counts, which takes the other in: holds go in, a hold comes
     * out. error_put: it is this thread's now. */
    void *(*error_take)(const fan_backward *p, const fan_node *n, uint32_t ran, fan_status status,
                        const fan_error *err);
    void *(*error_both)(void *first, void *second);
    void (*error_put)(void *error);
    /* orphaned: of a fork on a thread that runs nodes for another one the child has that thread alone, and nobody whom
     * the error could reach: says so, and ends the process. Does not return. */
    void (*orphaned)(void *error);
    /* pick: of the ready nodes one, by its place; where the pass has a schedule. */
    fan_status (*pick)(void *schedule, const fan_backward *p, size_t *place, fan_error *err);
    /* progress: so many of all nodes have run; where the pass has somebody to tell. */
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

/* Nodes and gradients are held by the pass from begin on; the arrays are copied. */
struct fan_backward_config {
    const fan_engine_frontend *frontend;
    const char *call; /* "backward"; lives longer */
    fan_root *roots;
    size_t nroots;
    fan_wanted *wanted; /* inputs= (E8) */
    size_t nwanted;
    bool limited; /* inputs= was given */
    bool capture; /* what is wanted is forwarded out; else its leaves accumulate */
    bool keep_graph;
    bool create_graph; /* the pass records itself (A1, L6) */
    bool detect;       /* it ends at the first gradient that is not finite (E11) */
    uint32_t workers;  /* threads that run nodes, the caller's among them (E12); 0 is 1 */
    void *schedule;    /* held from begin on; NULL: E2's order */
    void *progress;    /* hears how far the pass is: held; NULL: nobody */
};

/* fan_backward_begin: collects. Failing, it changes nothing; else the pass is to be ended. */
fan_status fan_backward_begin(const fan_backward_config *config, fan_backward **out, fan_error *err);
fan_status fan_backward_seed(fan_backward *p, fan_error *err);
fan_status fan_backward_run(fan_backward *p, fan_error *err);
/* fan_backward_join: what comes at the end of every pass, one that failed too: the caller's streams wait (S20). On the
 * CPU there is nothing to do. */
fan_status fan_backward_join(fan_backward *p, fan_error *err);
void fan_backward_end(fan_backward *p); /* NULL is welcome */
/* fan_backward_result: of the i-th that is wanted: the caller's hold; NULL: none. */
void *fan_backward_result(fan_backward *p, size_t i);

/* fan_backward_depth: this thread is in one pass more (1), or less (-1); whether they are not too many. To be undone
 * where they are, too. fan_backward_too_deep: the error then (E7). */
bool fan_backward_depth(int by);
fan_status fan_backward_too_deep(fan_error *err);

/* By hand, instead of fan_backward_run. fan_backward_next: leaves accumulate; then the next node that is ready is at
 * work; NULL: the pass is done. fan_backward_sums: the holds of its sums, after the hooks of its slots, and of
 * `node_hooks`. fan_backward_give: its gradients, of which it takes the holds, failing too; `node_hooks` have run. */
fan_status fan_backward_next(fan_backward *p, fan_node **out, fan_error *err);
fan_status fan_backward_sums(fan_backward *p, void **sums, void **node_hooks, fan_error *err);
fan_status fan_backward_give(fan_backward *p, void **gradients, const void *node_hooks, fan_error *err);

/* fan_backward_walk_runs: the node at work is so until its gradients are given: inside a call, on this thread; between
 * calls, on any. */
void fan_backward_walk_runs(fan_backward *p, bool inside);
/* fan_backward_enter: the streams of the node at work are current on this thread (E4), until fan_streams_leave: around
 * what by hand is done with its sums and gradients. */
void fan_backward_enter(const fan_backward *p, fan_streams_outer *outer);
/* fan_backward_ready: the first ready node from a place on, and its place; NULL: none. */
fan_node *fan_backward_ready(const fan_backward *p, size_t *place);
/* fan_backward_edges: how many gradients the node at work is to give. */
uint32_t fan_backward_edges(const fan_backward *p);
/* fan_backward_at: the node at work, or at fault; NULL: none. *ran of *all nodes have run. */
const fan_node *fan_backward_at(const fan_backward *p, uint32_t *ran, uint32_t *all);
bool fan_backward_seeded(const fan_backward *p);
/* fan_backward_explain: for each node that has not run, or for `only`: which edges it waits for, and what it holds
 * (E17). fan_backward_lost: of a pass that ends early: what its nodes hold. Nothing where there is nothing. */
void fan_backward_explain(const fan_backward *p, const fan_node *only, const fan_text *out);
void fan_backward_lost(const fan_backward *p, const fan_text *out);
/* fan_backward_error_has_location: its error says already where it was (error_take). */
bool fan_backward_error_has_location(const fan_backward *p);
/* fan_backward_needs: whether anybody needs the gradient of an edge: what the innermost pass knows in which this thread
 * runs the node; else the latest by hand that stands at it; else whether the edge leads anywhere. */
bool fan_backward_needs(const fan_node *n, uint32_t edge);
/* fan_backward_visit: calls `visit` for every object, and `node` for every node, that the pass holds (garbage
 * collection); stops at the first answer that is not 0. */
int fan_backward_visit(fan_backward *p, int (*object)(void *object, void *arg), int (*node)(fan_node *n, void *arg),
                       void *arg);

#endif
