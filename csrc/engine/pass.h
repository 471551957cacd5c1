/* pass: the state of one pass (PyTorch: GraphTask), and what the engine's files share.
 *
 * collect.c fills four arrays once. From then on the pass does not write into the graph's nodes, so
 * several passes may use one graph at once (E15). The nodes of a pass have places 0, 1, .. by their
 * numbers, the newest first: of the ready nodes the one with the smallest place runs next (E2).
 *
 *   nodes    of each node: its dependencies, and where its slots and edges begin below
 *   slots    of each slot: its number of producers, and the gradient that an only producer
 *            forwarded (A14)
 *   edges    of each root, then of each edge: the place and slot where it leads, and its key there
 *            (A15)
 *   wanted   what inputs= names (E8)
 *
 * A key counts the edges into a slot: the roots in their order, then the producers by place, then
 * by edge. A pass on one thread runs them in that order, so keys mostly come as 0, 1, 2 .. */
#ifndef FAN_ENGINE_PASS_H
#define FAN_ENGINE_PASS_H

#include <assert.h>
#include <stdatomic.h>

#include "base/fault.h"
#include "base/trace.h"
#include "engine/engine.h"
#include "engine/node.h"
#include "engine/ready.h"

#define FAN_NOWHERE UINT32_MAX

typedef struct fan_pass_node {
    fan_node *node;         /* borrowed: the roots' holds keep it */
    _Atomic(void *) buffer; /* the frontend's; NULL: none, or not yet */
    uint32_t dependencies;  /* gradients that are still to come */
    uint32_t slots;         /* the first of its slots */
    uint32_t edges;         /* the first of its edges .. */
    uint32_t nedges;        /* .. and how many it had when the pass began */
    uint32_t after;         /* the next in a list of ready leaves, or of nodes of its group */
    /* Set by collect.c: */
    bool needed : 1; /* it, or a node after it, is wanted; without inputs=: true */
    /* its function runs, or its leaf accumulates; else its sums are only captured */
    bool runs : 1;
    bool captured : 1; /* a sum of one of its slots is a result */
    bool leaf : 1;
    bool freed : 1; /* by an earlier pass */
    /* Set while the pass runs: */
    bool ran;
    bool begun; /* one of several workers has taken it */
} fan_pass_node;

typedef struct fan_pass_slot {
    /* a hold on the only producer's gradient; NULL: none, or it went into the buffer */
    void *forwarded;
    uint32_t producers; /* edges that lead here */
    uint32_t wanted;    /* 1 + the first index into `wanted` that names it; 0: none */
} fan_pass_slot;

typedef struct fan_pass_edge {
    uint32_t to; /* a place; FAN_NOWHERE: the gradient is not needed */
    uint32_t key;
    uint32_t slot;  /* of that node */
    bool delivered; /* its gradient has come */
    bool defined;   /* .. and it was not None */
    bool from_hook; /* .. and a post-hook returned it */
} fan_pass_edge;

/* The ready nodes. */
typedef struct fan_pass_queue {
    fan_ready nodes;
    /* a list, first in first out; FAN_NOWHERE: none */
    uint32_t leaves;
    uint32_t leaves_last;
} fan_pass_queue;

/* A node that is running: in which pass, at which place, on which thread. */
typedef struct fan_pass_running {
    const struct fan_pass *pass;
    uint32_t at;
    uint64_t thread; /* 0: any (a walk, between calls) */
    struct fan_pass_running *outer;
} fan_pass_running;

/* A thread that runs nodes of a pass. */
typedef struct fan_pass_worker {
    struct fan_pass *pass;
    uint32_t now;    /* the place of its node, running or failed; FAN_NOWHERE: none */
    uint32_t number; /* 0: the caller's */
    uint64_t thread; /* fan_thread_id(), while it runs nodes */
    bool ran;        /* several workers: the node has run and is not counted yet */
    bool delivered;  /* .. its gradients are added and not counted yet */
} fan_pass_worker;

/* The span of a node in a trace (E18). */
typedef struct fan_pass_timeline {
    uint64_t begin_ns; /* 0: no trace was on when it began */
    uint64_t thread;
    fan_trace_work outer; /* the thread's work before */
} fan_pass_timeline;

typedef struct fan_stream_list {
    fan_stream **all; /* held */
    size_t n;
    size_t cap;
} fan_stream_list;

/* The event that one of the caller's streams waits for at the end of the pass (S20). */
typedef struct fan_pass_tail {
    fan_stream *caller; /* held */
    fan_stream_list streams;
    fan_stream_list waited; /* streams that have waited for the caller's before they wrote a leaf */
    fan_value *values;      /* used on the caller's stream from then on */
    size_t nvalues;
    size_t cap;
} fan_pass_tail;

/* The streams of a pass (pass.c). */
typedef struct fan_pass_streams {
    fan_stream_set *caller; /* current where the pass began; NULL: none was pushed */
    fan_stream *captured;   /* the first of those that is captured, borrowed; NULL: none */
    fan_stream_list pulled; /* streams that the pass made part of that capture */
    fan_pass_tail *tails;   /* one for each of the caller's streams that must wait */
    size_t n;
    size_t cap;
} fan_pass_streams;

struct fan_pass {
    uint64_t id;
    fan_pass_config config; /* with copies of its arrays */
    const fan_engine_frontend *frontend;
    fan_pass_node *nodes;
    fan_pass_slot *slots;
    fan_pass_edge *edges;
    size_t nnodes;
    size_t nslots;
    size_t nedges;
    size_t cap_nodes;
    size_t cap_edges;
    uint32_t *same; /* of each wanted: 1 + the next one that wants the same slot; 0: none */
    void **results; /* of each wanted: a hold on the sum; NULL: none */
    fan_pass_queue queue;
    /* nodes and leaves */
    uint32_t ran;
    uint32_t to_run;
    /* NULL: one thread; else their lock guards dependencies, queue and ran */
    struct fan_pass_workers *workers;
    fan_pass_worker caller;
    fan_pass_running running; /* of a walk: between a node's sums and its gradients */
    bool is_running;
    fan_pass_timeline timeline; /* of a walk's node */
    bool seeded;
    bool progress_busy;    /* a worker is in the progress callback */
    uint32_t progress_ran; /* 1 + the count at its last call; 0: no call yet */
    fan_pass_streams streams;
    unsigned depth;    /* of nested passes: 1 is the outermost */
    uint32_t arrivals; /* of a planted fault alone */
    /* of each slot: the last digest of its gradient or sum; NULL: no trace had digests when the
     * pass began */
    uint64_t *digests;
};

/* fan__worker_node: returns the node that a worker runs, or that failed. */
static inline fan_pass_node *fan__worker_node(const fan_pass_worker *worker)
{
    return &worker->pass->nodes[worker->now];
}

/* fan__dependency_done: counts one gradient.
 * true: it was the node's last, so the node is ready. */
static inline bool fan__dependency_done(fan_pass_node *entry)
{
    assert(entry->dependencies > 0);
    entry->dependencies--;
    if (FAN_FAULT(TAKEN_BEFORE_LAST))
        return entry->dependencies <= 1;
    return entry->dependencies == 0;
}

/* fan__queue_push: adds a ready node. Leaves have a list of their own (E2). */
static inline void fan__queue_push(fan_pass_queue *queue, fan_pass_node *nodes, uint32_t at)
{
    if (!nodes[at].leaf) {
        fan_ready_add(&queue->nodes, at);
        return;
    }
    if (queue->leaves == FAN_NOWHERE)
        queue->leaves = at;
    else
        nodes[queue->leaves_last].after = at;
    queue->leaves_last = at;
}

/* fan__queue_pop_leaf: removes and returns the first leaf; the list is not empty. */
static inline uint32_t fan__queue_pop_leaf(fan_pass_queue *queue, fan_pass_node *nodes)
{
    uint32_t at = queue->leaves;
    queue->leaves = nodes[at].after;
    nodes[at].after = FAN_NOWHERE;
    return at;
}

/* fan__collect (collect.c): counts, in loops, what the roots reach (E1, E8, E13): fills nodes,
 * slots, edges, same and results. Their memory is the pass's, also on failure.
 * FAN_ERR_STATE: a node that is to run was freed. */
fan_status fan__collect(fan_pass *pass, fan_error *err);
/* fan__collect_free: frees the memory of nodes, slots or edges with room for n items. */
void fan__collect_free(void *memory, size_t n, size_t size);

/* fan__digest_contribution (digest.c): writes the digest of a gradient that an edge delivers. Call
 * it only if fan_trace_digests() is true. */
void fan__digest_contribution(const fan_pass *pass, const fan_pass_edge *edge, void *gradient,
                              const fan_producer *producer);
/* fan__digest_sum: the same of a sum, or of a leaf's gradient (buffer/digest.h); `on`: where it is
 * ready; NULL: the current stream; `known`: it is what the slot's last digest was of. */
void fan__digest_sum(const fan_pass *pass, const fan_pass_node *entry, char what, uint32_t slot,
                     void *sum, fan_stream *on, bool known);

/* fan__explain_sum (explain.c): checks a sum that was just taken: an error names the producer of
 * the first gradient that is not finite (E11). */
fan_status fan__explain_sum(const fan_pass_worker *worker, uint32_t slot, void *buffer,
                            fan_error *err);

#endif
