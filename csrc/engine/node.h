/* node: the nodes of a graph, and their edges.
 *
 * A node represents an operation of the forward computation. It receives gradients in its slots,
 * one for each output of the operation, and returns one along each edge, one for each input. It
 * holds the nodes after it, never those before.
 *
 * Title: One thread at a time. Nodes are made, linked, numbered and freed inside the frontend's
 * interpreter, which runs one thread at a time (buffer/plain.h). No lock is needed.
 *
 * Title: Without recursion. The last reference to a node may be an edge of the node before it, and
 * so on for a million nodes: fan_node_end puts a node on a list of its thread, and the outermost
 * call frees the list. */
#ifndef FAN_ENGINE_NODE_H
#define FAN_ENGINE_NODE_H

#include "device/stream.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fan_node fan_node;

/* The frontend's functions for a type of nodes. */
typedef struct fan_node_ops {
    bool leaf;
    void (*hold)(fan_node *n);
    void (*drop)(fan_node *n);
    /* free: frees the rest, and the node itself, after the last reference and the edges are gone.
     * May run arbitrary code. */
    void (*free)(fan_node *n);
    /* text: writes the node's name, for messages. */
    void (*text)(const fan_node *n, char *buf, size_t size);
    /* is_numbered: whether that name ends with the node's number, because it was given none; NULL:
     * it was given one. */
    bool (*is_numbered)(const fan_node *n);
} fan_node_ops;

typedef struct fan_edge {
    fan_node *next; /* held; NULL: the gradient of this input is not needed */
    uint32_t slot;  /* of next */
} fan_edge;

#define FAN_INLINE_EDGES 2
#define FAN_SUMS_ON_STACK 8 /* sums or gradients of a node that need no allocation */

struct fan_node {
    const fan_node_ops *ops;
    union {
        uint64_t number; /* from 0, in the order of creation */
        fan_node *after; /* of a node that ends: the next of the list (Without recursion) */
    };
    uint64_t mark;     /* the search or pass that reached it last (fan_mark_new); 0: none */
    uint64_t freed_by; /* the pass that freed it (E10), or FAN_FREED_BY_USER; 0: none */
    /* current where it was made, its own first (E4); held; NULL: none was pushed */
    fan_stream_set *streams;
    bool host; /* it runs on the CPU, without a stream */
    /* the frontend's: construction has begun, is complete */
    bool begun;
    bool made;
    uint32_t at;     /* its place in the pass `mark` */
    uint32_t inputs; /* slots; at least 1 */
    uint32_t nedges;
    uint32_t cap;
    fan_edge *edges; /* `inline_edges`, or on the heap */
    fan_edge inline_edges[FAN_INLINE_EDGES];
};

/* fan_node_init: initializes a node in zeroed memory; cannot fail. */
void fan_node_init(fan_node *node, const fan_node_ops *ops, uint32_t inputs);
/* fan_node_room: makes room for `edges` more. */
fan_status fan_node_room(fan_node *node, size_t edges, fan_error *err);
/* fan_node_link: adds an edge to slot `slot` of `next` (NULL: to no node) to a new node, to which
 * no edge leads and which has room. Holds `next`; the node's number becomes larger than that of
 * `next`. */
void fan_node_link(fan_node *node, fan_node *next, uint32_t slot);
/* fan_node_append: adds such an edge to any node.
 * FAN_ERR_VALUE: it would close a cycle. */
fan_status fan_node_append(fan_node *node, fan_node *next, uint32_t slot, fan_error *err);
/* fan_node_unlink: drops all its edges. */
void fan_node_unlink(fan_node *node);
/* fan_node_end: called when the last reference is gone: unlinks and frees the node, or, inside
 * another fan_node_end, queues it. */
void fan_node_end(fan_node *node);

/* fan_node_stream: returns its own stream, borrowed.
 * NULL: none. */
static inline fan_stream *fan_node_stream(const fan_node *node)
{
    if (!node->streams || node->host)
        return NULL;
    return node->streams->all[0];
}

/* fan_node_device: returns where it runs (E3), borrowed. */
static inline fan_device *fan_node_device(const fan_node *node)
{
    const fan_stream *own = fan_node_stream(node);
    return own ? own->device : fan_cpu();
}

#define FAN_FREED_BY_USER UINT64_MAX
/* fan_node_freed: returns FAN_ERR_STATE, with the pass that freed the node (E10). */
fan_status fan_node_freed(const fan_node *node, fan_error *err);
/* fan_mark_new: returns a new number for a search or a pass, from 1. */
uint64_t fan_mark_new(void);

#endif
