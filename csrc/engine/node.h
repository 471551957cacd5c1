/* node: the nodes of a graph, and their edges.
 *
 * A node stands for an operation that was done. It receives gradients in its slots, one for each output of the
 * operation, and gives one along each edge, one for each input. It holds what comes after it, never what came before.
 *
 * Title: One thread at a time. Nodes are made, linked, numbered and freed inside the frontend's interpreter, which lets
 * one thread in at a time (buffer/fast.h). No lock is taken.
 *
 * Title: Without recursion. The last reference to a node may be that of the node before it, and so on for a million
 * nodes: fan_node_end puts a node on a list of its thread, and whoever began the list goes through it.
 */
#ifndef FAN_ENGINE_NODE_H
#define FAN_ENGINE_NODE_H

#include "device/stream.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fan_node fan_node;

/* What a frontend makes of nodes. */
typedef struct fan_node_ops {
    bool leaf;
    void (*hold)(fan_node *n);
    void (*drop)(fan_node *n);
    /* free: nobody has it any more, and its edges are gone: its other parts, and itself. May call anybody. */
    void (*free)(fan_node *n);
    /* text: what messages call it. */
    void (*text)(const fan_node *n, char *buf, size_t size);
} fan_node_ops;

typedef struct fan_edge {
    fan_node *next; /* held; NULL: nobody needs the gradient of this input */
    uint32_t slot;  /* of next */
} fan_edge;

#define FAN_INLINE_EDGES 2
#define FAN_SUMS_ON_STACK 8 /* sums or gradients for which who runs a node asks no memory */

struct fan_node {
    const fan_node_ops *ops;
    union {
        uint64_t number; /* the larger, the later it was made; from 0 */
        fan_node *after; /* of one that ends: the next of the list (Without recursion) */
    };
    uint64_t mark;           /* who numbered it last (fan_mark_new); 0: nobody */
    uint64_t freed_by;       /* the pass that freed it (E10), or FAN_FREED_BY_USER; 0: none */
    fan_stream_set *streams; /* current where it was made, its own first (E4); held; NULL: none was pushed */
    bool host;               /* it is of the CPU, and has no stream of its own */
    bool begun, made;        /* for the frontend: its filling has begun, it is whole */
    uint32_t at;             /* its place there */
    uint32_t inputs;         /* slots; at least 1 */
    uint32_t nedges, cap;
    fan_edge *edges; /* `inline_edges`, or on the heap */
    fan_edge inline_edges[FAN_INLINE_EDGES];
};

/* fan_node_init: of zeroed memory; nothing can fail. fan_node_room: room for so many edges more. */
void fan_node_init(fan_node *n, const fan_node_ops *ops, uint32_t inputs);
fan_status fan_node_room(fan_node *n, size_t edges, fan_error *err);
/* fan_node_link: adds an edge to a node that nobody leads to yet, and that has room: holds `next`, which may be NULL;
 * the node's number becomes larger than that of `next`.
 * fan_node_append: to any node: FAN_ERR_VALUE where it would close a cycle. The slot is one of next's. */
void fan_node_link(fan_node *n, fan_node *next, uint32_t slot);
fan_status fan_node_append(fan_node *n, fan_node *next, uint32_t slot, fan_error *err);
/* fan_node_unlink: drops all its edges. */
void fan_node_unlink(fan_node *n);
/* fan_node_end: the last reference has gone: unlinked and freed now, or, from within this function, soon. */
void fan_node_end(fan_node *n);

/* fan_node_stream: its own; NULL: none is known. fan_node_device: where it runs (E3). Both borrowed. */
static inline fan_stream *fan_node_stream(const fan_node *n)
{
    return n->streams && !n->host ? n->streams->all[0] : NULL;
}
static inline fan_device *fan_node_device(const fan_node *n)
{
    const fan_stream *own = fan_node_stream(n);
    return own ? own->device : fan_cpu();
}

#define FAN_FREED_BY_USER UINT64_MAX
/* fan_node_freed: FAN_ERR_STATE, and which pass freed it (E10). */
fan_status fan_node_freed(const fan_node *n, fan_error *err);
/* fan_mark_new: a number for a search or a pass, never used before, from 1. */
uint64_t fan_mark_new(void);

#endif
