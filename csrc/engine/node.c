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

fan_status fan_node_freed(const fan_node *n, fan_error *err)
{
    char name[128];
    n->ops->text(n, name, sizeof name);
    if (n->freed_by == FAN_FREED_BY_USER)
        return fan_fail(err, FAN_ERR_STATE,
                        "%s was freed by fanin.free(): its function is gone (E10)", name);
    return fan_fail(
        err, FAN_ERR_STATE,
        "%s was freed by pass %llu: its function is gone; give that pass keep_graph=True (E10)",
        name, (unsigned long long)n->freed_by);
}

void fan_node_init(fan_node *n, const fan_node_ops *ops, uint32_t inputs)
{
    n->ops = ops;
    n->number = atomic_fetch_add_explicit(&numbers, 1, memory_order_relaxed);
    n->inputs = inputs;
    n->edges = n->inline_edges;
    n->cap = FAN_INLINE_EDGES;
}

fan_status fan_node_room(fan_node *n, size_t edges, fan_error *err)
{
    size_t want = n->nedges + edges, cap = n->cap;
    fan_edge *more;
    if (want <= cap)
        return FAN_OK;
    if (n->edges != n->inline_edges && want < cap + cap / 2)
        want = cap + cap / 2; /* edges are appended one by one */
    if (want > UINT32_MAX)
        return fan_fail(err, FAN_ERR_OVERFLOW, "a node has at most %u edges", UINT32_MAX);
    more = fan_realloc(n->edges == n->inline_edges ? NULL : n->edges, want * sizeof *more);
    if (!more)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    if (n->edges == n->inline_edges)
        memcpy(more, n->inline_edges, n->nedges * sizeof *more);
    n->edges = more;
    n->cap = (uint32_t)want;
    return FAN_OK;
}

static void add_edge(fan_node *n, fan_node *next, uint32_t slot)
{
    assert(n->nedges < n->cap && (!next || slot < next->inputs));
    if (next)
        next->ops->hold(next);
    n->edges[n->nedges++] = (fan_edge){next, slot};
}

void fan_node_link(fan_node *n, fan_node *next, uint32_t slot)
{
    if (next && next->number > n->number) /* made during the construction of n */
        n->number = atomic_fetch_add_explicit(&numbers, 1, memory_order_relaxed);
    add_edge(n, next, slot);
}

/* reaches: whether a path leads from one node to another; FAN_ERR_NOMEM. */
static fan_status reaches(fan_node *from, const fan_node *to, bool *yes, fan_error *err)
{
    uint64_t mark = fan_mark_new();
    fan_node **todo = NULL;
    size_t n = 0, cap = 0;
    *yes = from == to;
    from->mark = mark;
    for (const fan_node *at = from; at && !*yes; at = n ? todo[--n] : NULL) {
        if (fan_grow((void **)&todo, &cap, n + at->nedges, sizeof(fan_node *)) != 0) {
            fan_free(todo);
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        }
        for (uint32_t i = 0; i < at->nedges; i++) {
            fan_node *next = at->edges[i].next;
            if (!next || next->mark == mark)
                continue;
            next->mark = mark;
            *yes |= next == to;
            todo[n++] = next;
        }
    }
    fan_free(todo);
    return FAN_OK;
}

fan_status fan_node_append(fan_node *n, fan_node *next, uint32_t slot, fan_error *err)
{
    char one[128], two[128];
    bool cycle = false;
    FAN_TRY(fan_node_room(n, 1, err));
    /* Paths go to older nodes, but for the edges to newer ones: mostly the numbers alone rule out a
     * cycle. */
    if (next && (next->number >= n->number || (next->number >= lowest && n->number <= highest)))
        FAN_TRY(reaches(next, n, &cycle, err));
    if (cycle) {
        n->ops->text(n, one, sizeof one);
        next->ops->text(next, two, sizeof two);
        return fan_fail(err, FAN_ERR_VALUE, "%s: an edge to %s closes a cycle", one, two);
    }
    if (next && next->number > n->number) {
        lowest = n->number < lowest ? n->number : lowest;
        highest = next->number > highest ? next->number : highest;
    }
    add_edge(n, next, slot);
    return FAN_OK;
}

void fan_node_unlink(fan_node *n)
{
    fan_edge *edges = n->edges, on_stack[FAN_INLINE_EDGES];
    uint32_t nedges = n->nedges;
    bool heap = edges != n->inline_edges;
    if (!heap)
        edges = memcpy(on_stack, n->inline_edges, sizeof on_stack);
    n->edges = n->inline_edges;
    n->cap = FAN_INLINE_EDGES;
    n->nedges = 0; /* before a drop, which may run arbitrary code */
    for (uint32_t i = 0; i < nedges; i++)
        if (edges[i].next)
            edges[i].next->ops->drop(edges[i].next);
    if (heap)
        fan_free(edges);
}

void fan_node_end(fan_node *n)
{
    static _Thread_local fan_node *list;
    static _Thread_local bool busy;
    n->after = list;
    list = n;
    if (busy)
        return;
    busy = true;
    while ((n = list)) {
        list = n->after;
        fan_node_unlink(n);
        fan_stream_set_drop(n->streams);
        n->ops->free(n);
    }
    busy = false;
}
