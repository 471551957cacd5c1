/* Nodes: their numbers, their edges, the search for cycles, and their end without recursion
 * (node.h). */
#include "engine/node.h"

#include "base/mem.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

static atomic_uint_fast64_t numbers, marks;

/* Of all edges ever added that lead to a newer node: the smallest number of a source, and the
 * largest of a target. Outside this range the numbers alone rule out a cycle. */
static uint64_t lowest = UINT64_MAX, highest;

uint64_t fan_mark_new(void)
{
    return atomic_fetch_add_explicit(&marks, 1, memory_order_relaxed) + 1;
}

fan_status fan_node_freed(const fan_node *node, fan_error *err)
{
    char name[128];
    node->ops->text(node, name, sizeof name);
    if (node->freed_by == FAN_FREED_BY_USER) {
        return fan_fail(err, FAN_ERR_STATE,
                        "%s was freed by fanin.free(): its function is gone (E10)", name);
    }
    return fan_fail(
        err, FAN_ERR_STATE,
        "%s was freed by pass %llu: its function is gone; give that pass keep_graph=True (E10)",
        name, (unsigned long long)node->freed_by);
}

static uint64_t next_number(void)
{
    return atomic_fetch_add_explicit(&numbers, 1, memory_order_relaxed);
}

void fan_node_init(fan_node *node, const fan_node_ops *ops, uint32_t inputs)
{
    node->ops = ops;
    node->number = next_number();
    node->inputs = inputs;
    node->edges = node->inline_edges;
    node->cap = FAN_INLINE_EDGES;
}

fan_status fan_node_room(fan_node *node, size_t edges, fan_error *err)
{
    size_t want = node->nedges + edges;
    size_t cap = node->cap;
    fan_edge *old = node->edges;
    if (want <= cap)
        return FAN_OK;
    if (old == node->inline_edges)
        old = NULL;
    else if (want < cap + cap / 2)
        want = cap + cap / 2; /* edges are appended one by one */
    if (want > UINT32_MAX)
        return fan_fail(err, FAN_ERR_OVERFLOW, "a node has at most %u edges", UINT32_MAX);
    fan_edge *more = fan_realloc(old, want * sizeof *more);
    if (!more)
        return fan_fail_memory(err);
    if (!old)
        memcpy(more, node->inline_edges, node->nedges * sizeof *more);
    node->edges = more;
    node->cap = (uint32_t)want;
    return FAN_OK;
}

static void add_edge(fan_node *node, fan_node *next, uint32_t slot)
{
    assert(node->nedges < node->cap && (!next || slot < next->inputs));
    if (next)
        next->ops->hold(next);
    node->edges[node->nedges++] = (fan_edge){next, slot};
}

void fan_node_link(fan_node *node, fan_node *next, uint32_t slot)
{
    if (next && next->number > node->number) /* made during the construction of `node` */
        node->number = next_number();
    add_edge(node, next, slot);
}

/* reaches: sets *yes to whether a path leads from one node to another. FAN_ERR_NOMEM. */
static fan_status reaches(fan_node *from, const fan_node *to, bool *yes, fan_error *err)
{
    uint64_t mark = fan_mark_new();
    fan_node **todo = NULL;
    size_t n = 0;
    size_t cap = 0;
    const fan_node *at = from;
    *yes = from == to;
    from->mark = mark;
    while (!*yes) {
        if (fan_grow((void **)&todo, &cap, n + at->nedges, sizeof at) != 0) {
            fan_free(todo);
            return fan_fail_memory(err);
        }
        for (uint32_t i = 0; i < at->nedges; i++) {
            fan_node *next = at->edges[i].next;
            if (!next || next->mark == mark)
                continue;
            next->mark = mark;
            if (next == to)
                *yes = true;
            todo[n++] = next;
        }
        if (n == 0)
            break;
        at = todo[--n];
    }
    fan_free(todo);
    return FAN_OK;
}

/* may_close_cycle: paths lead to older nodes, but for the edges to newer ones: mostly the numbers
 * alone rule out a cycle. */
static bool may_close_cycle(const fan_node *node, const fan_node *next)
{
    if (next->number >= node->number)
        return true;
    return next->number >= lowest && node->number <= highest;
}

fan_status fan_node_append(fan_node *node, fan_node *next, uint32_t slot, fan_error *err)
{
    bool cycle = false;
    FAN_TRY(fan_node_room(node, 1, err));
    if (next && may_close_cycle(node, next))
        FAN_TRY(reaches(next, node, &cycle, err));
    if (cycle) {
        char one[128];
        char two[128];
        node->ops->text(node, one, sizeof one);
        next->ops->text(next, two, sizeof two);
        return fan_fail(err, FAN_ERR_VALUE, "%s: an edge to %s closes a cycle", one, two);
    }
    if (next && next->number > node->number) {
        if (lowest > node->number)
            lowest = node->number;
        if (highest < next->number)
            highest = next->number;
    }
    add_edge(node, next, slot);
    return FAN_OK;
}

void fan_node_unlink(fan_node *node)
{
    fan_edge on_stack[FAN_INLINE_EDGES];
    fan_edge *edges = node->edges;
    uint32_t nedges = node->nedges;
    bool heap = edges != node->inline_edges;
    if (!heap)
        edges = memcpy(on_stack, node->inline_edges, sizeof on_stack);
    node->edges = node->inline_edges;
    node->cap = FAN_INLINE_EDGES;
    node->nedges = 0; /* before a drop, which may run arbitrary code */
    for (uint32_t i = 0; i < nedges; i++) {
        fan_node *next = edges[i].next;
        if (next)
            next->ops->drop(next);
    }
    if (heap)
        fan_free(edges);
}

void fan_node_end(fan_node *node)
{
    static _Thread_local fan_node *list;
    static _Thread_local bool busy;
    node->after = list;
    list = node;
    if (busy)
        return;
    busy = true;
    while (list) {
        node = list;
        list = node->after;
        fan_node_unlink(node);
        fan_stream_set_drop(node->streams);
        node->ops->free(node);
    }
    busy = false;
}
