/* visit: what a pass knows of the graph, beside the nodes: structs only.
 *
 * A pass counts once (collect.c), into four arrays, and never writes into a node again, so that others may walk the
 * same graph meanwhile (E15). The nodes that it nodes have places 0, 1, .. by their numbers, the latest first: who is
 * ready at the smallest place is the next (E2).
 *
 *   nodes   of each node: how many gradients are still to come, and where its slots and edges begin below
 *   slots    of each slot: how many producers it has, and what the only one of them forwarded over (A14)
 *   edges    of each root, then of each edge: whom it leads to, into which slot, and its key there (A15)
 *   wanted   what inputs= names (E8)
 *
 * A key counts the edges into a slot: the roots in their order, then the producers by place, then by edge. That is also
 * the order in which a pass on one thread runs them, so that keys mostly come as 0, 1, 2 ..
 */
#ifndef FAN_ENGINE_TASK_H
#define FAN_ENGINE_TASK_H

#include <stdatomic.h>

#include "base/trace.h"
#include "engine/node.h"
#include "engine/engine.h"
#include "engine/ready.h"

#define FAN_NOWHERE UINT32_MAX

typedef struct fan_task_node {
    fan_node *node;         /* the roots' holds keep it */
    _Atomic(void *) buffer; /* the frontend's; NULL: none, or not yet */
    uint32_t dependencies;  /* gradients that have not come yet */
    uint32_t slots;         /* the first of its slots */
    uint32_t edges;         /* the first of its edges, and how many there were when they were counted */
    uint32_t nedges;
    uint32_t after; /* in the list of ready leaves: the next */
    /* Once collected, for good: */
    bool needed : 1;   /* something in it is wanted, or lies behind it; without inputs=: true */
    bool runs : 1;     /* its function does, or its leaf accumulates; else it is there to be captured */
    bool captured : 1; /* one of its slots at least */
    bool leaf : 1;
    bool freed : 1; /* by a pass before this one */
    /* .. and while it goes on: */
    bool ran;   /* it has */
    bool begun; /* of several workers: one has taken it */
} fan_task_node;

typedef struct fan_task_slot {
    void *forwarded;    /* what its only producer forwarded over: a hold; NULL: nothing, or it went into the buffer */
    uint32_t producers; /* edges that lead here */
    uint32_t wanted;    /* 1 + the first of those in `wanted` that want it; 0: nobody does */
} fan_task_slot;

typedef struct fan_task_edge {
    uint32_t to; /* a place; FAN_NOWHERE: nobody needs it */
    uint32_t key;
    uint32_t slot;           /* of that one */
    bool delivered, defined; /* its gradient has come; it is one, and not None */
    bool from_hook;          /* .. and a post-hook of its producer put it there */
} fan_task_edge;

/* What is ready. */
typedef struct fan_task_queue {
    fan_ready nodes;
    uint32_t leaves, leaves_last; /* a list, in that order; FAN_NOWHERE: none */
} fan_task_queue;

/* A node that runs: which pass, where, and on which thread. */
typedef struct fan_task_running {
    const struct fan_backward *pass;
    uint32_t at;
    uint64_t thread; /* 0: any (by hand, between calls) */
    struct fan_task_running *outer;
} fan_task_running;

/* A thread that runs nodes of a pass. */
typedef struct fan_task_worker {
    struct fan_backward *pass;
    uint32_t now;    /* the place of the node at work, or at fault; FAN_NOWHERE: none */
    uint32_t number; /* 0: the caller's */
    uint64_t thread; /* fan_thread_id(), while it runs nodes */
    bool ran;        /* of several: the node is to be counted as run */
    bool delivered;  /* .. its gradients are there, and are to be counted */
} fan_task_worker;

/* A node that runs while somebody records (timeline.h). */
typedef struct fan_task_timeline {
    uint64_t begin_ns; /* 0: nobody did when it began */
    uint64_t thread;
    fan_trace_work outer; /* what that thread was at work on before */
} fan_task_timeline;

typedef struct fan_stream_list {
    fan_stream **all; /* held */
    size_t n, cap;
} fan_stream_list;

/* What one stream of the caller's waits for at the end of the pass (S20). */
typedef struct fan_task_tail {
    fan_stream *caller; /* held */
    fan_stream_list streams;
    fan_stream_list waited; /* those that have waited for the caller's, before they wrote a leaf */
    fan_value *values;      /* used on the caller's stream from then on */
    size_t nvalues, cap;
} fan_task_tail;

/* What a pass knows of streams (streams.h). */
typedef struct fan_task_streams {
    fan_stream_set *caller; /* what was current where the pass began; NULL: none was pushed */
    fan_stream *captured;   /* the first of those that is in a capture, borrowed; NULL: none */
    fan_stream_list pulled; /* into that capture, by the pass */
    fan_task_tail *tails;   /* one for each of the caller's streams that must wait */
    size_t n, cap;
} fan_task_streams;

struct fan_backward {
    uint64_t id;
    fan_backward_config config; /* its arrays are the pass's own */
    fan_task_node *nodes;
    fan_task_slot *slots;
    fan_task_edge *edges;
    size_t nnodes, nslots, nedges;
    size_t cap_nodes, cap_edges; /* how many there is room for */
    uint32_t *same;              /* of each wanted: 1 + the next one that wants the same slot; 0: none */
    void **results;              /* of each wanted: the sum, a hold; NULL: none */
    fan_task_queue queue;
    uint32_t ran, to_run; /* nodes and leaves */
    struct fan_task_workers
        *workers;             /* NULL: the caller runs all nodes; else its lock guards due, ready, leaves, ran */
    fan_task_worker caller;   /* who asked for the pass */
    fan_task_running running; /* by hand: between a node's sums and its gradients */
    bool is_running;
    fan_task_timeline timeline; /* of the node at work, by hand */
    bool seeded;
    bool progress_busy;    /* progress is at work, of several workers on one of them */
    uint32_t progress_ran; /* 1 + how many had run when it was called last; 0: it was not */
    fan_task_streams streams;
    unsigned depth;    /* of passes inside passes: 1 is in none */
    uint32_t arrivals; /* of a planted fault alone */
};

#endif
