#include "engine/task.h"

#include "base/keys.h"
#include "base/mem.h"
#include "base/pool.h"

#include <string.h>


/* ---- memory ---- */

/* Arrays of up to this many items keep their pages for the next pass (base/pool.h): new page faults
 * cost as much as the pass's own work. */
#define PAGES_KEPT ((size_t)1 << 17)

static bool keeps_pages(size_t n, size_t size)
{
    return n <= PAGES_KEPT && n * size >= FAN_POOL_FROM;
}

static void *memory_new(size_t n, size_t size)
{
    return keeps_pages(n, size) ? fan_alloc_data(n * size) : fan_alloc(n * size);
}

void fan__collect_free(void *memory, size_t n, size_t size)
{
    if (keeps_pages(n, size))
        fan_free_data(memory, n * size);
    else
        fan_free(memory);
}

/* grow: room for at least `want` items: 0, or -1 and nothing has changed. */
static int grow(void **items, size_t *cap, size_t want, size_t size)
{
    size_t next = *cap * 2 < want ? want : *cap * 2;
    void *more;
    if (next < 16)
        next = 16;
    if (!keeps_pages(*cap, size) && !keeps_pages(next, size)) {
        more = fan_realloc(*items, next * size);
    } else if ((more = memory_new(next, size))) {
        if (*cap)
            memcpy(more, *items, *cap * size);
        fan__collect_free(*items, *cap, size);
    }
    if (!more)
        return -1;
    *items = more;
    *cap = next;
    return 0;
}

/* ---- 1. reach ---- */

typedef struct reached {
    int64_t *ages; /* of each node: the smaller, the newer */
    size_t cap;
    bool sorted; /* ages ascend, so the nodes are in their places */
    bool down;   /* no edge leads to a newer node */
    uint64_t slots;
} reached;

/* room_for: `more` nodes and edges. */
static fan_status room_for(fan_backward *p, reached *r, size_t more, fan_error *err)
{
    size_t nodes = p->nnodes + more, edges = p->nedges + more;
    if ((nodes > p->cap_nodes &&
         grow((void **)&p->nodes, &p->cap_nodes, nodes, sizeof *p->nodes) != 0) ||
        (nodes > r->cap && grow((void **)&r->ages, &r->cap, nodes, sizeof *r->ages) != 0) ||
        (edges > p->cap_edges &&
         grow((void **)&p->edges, &p->cap_edges, edges, sizeof *p->edges) != 0))
        return fan__task_no_memory(err);
    return FAN_OK;
}

/* reach: the pass's edge to this node, which it adds if needed. There must be room. */
static inline fan_task_edge reach(fan_backward *p, reached *r, fan_node *n, uint32_t slot)
{
    if (n && n->mark != p->id) {
        size_t at = p->nnodes;
        int64_t age = INT64_MAX - (int64_t)n->number;
        p->nodes[at] = (fan_task_node){.node = n,
                                       .slots = (uint32_t)r->slots,
                                       .nedges = n->nedges,
                                       .after = FAN_NOWHERE,
                                       .needed = !p->config.limited,
                                       .runs = !p->config.limited,
                                       .leaf = n->ops->leaf,
                                       .freed = n->freed_by != 0};
        n->mark = p->id;
        n->at = (uint32_t)at;
        r->slots += n->inputs;
        r->sorted = r->sorted && (at == 0 || r->ages[at - 1] < age);
        r->ages[at] = age;
        p->nnodes = at + 1;
    }
    return (fan_task_edge){.to = n ? n->at : FAN_NOWHERE, .slot = slot};
}

static fan_status reach_all(fan_backward *p, reached *r, fan_error *err)
{
    r->sorted = r->down = true;
    FAN_TRY(room_for(p, r, p->config.nroots, err));
    /* The last root first if it is the newest, as roots in a list mostly are: then nothing needs
     * sorting. */
    const fan_root *roots = p->config.roots;
    size_t nroots = p->config.nroots;
    bool back = nroots && roots[0].node->number < roots[nroots - 1].node->number;
    for (size_t i = 0; i < nroots; i++) {
        size_t at = back ? nroots - 1 - i : i;
        if (i + 4 < nroots)
            __builtin_prefetch(&roots[back ? at - 4 : at + 4].node->number);
        p->edges[at] = reach(p, r, roots[at].node, roots[at].slot);
    }
    p->nedges = nroots;
    for (size_t i = 0; i < p->nnodes; i++) {
        const fan_node *n = p->nodes[i].node;
        p->nodes[i].edges = (uint32_t)p->nedges;
        FAN_TRY(room_for(p, r, n->nedges, err));
        for (uint32_t e = 0; e < n->nedges; e++) {
            fan_node *next = n->edges[e].next;
            p->edges[p->nedges++] = reach(p, r, next, n->edges[e].slot);
            r->down = r->down && (!next || next->number < n->number);
        }
        if (r->slots >= UINT32_MAX || p->nedges >= UINT32_MAX)
            return fan_fail(err, FAN_ERR_OVERFLOW, "a pass has at most %u slots and edges",
                            UINT32_MAX - 1);
    }
    return FAN_OK;
}

/* ---- 2. sort by place ---- */

/* move: copies nodes and edges to their places: place i gets node order[i]; `place` is the inverse
 * of `order`. */
static void move(const fan_backward *p, fan_task_node *nodes, fan_task_edge *edges,
                 const uint32_t *order, const uint32_t *place)
{
    uint32_t at = 0;
    for (; at < p->config.nroots; at++)
        edges[at] = (fan_task_edge){.to = place[p->edges[at].to], .slot = p->edges[at].slot};
    for (size_t i = 0; i < p->nnodes; i++) {
        fan_task_node *tn = &nodes[i];
        *tn = p->nodes[order[i]];
        tn->node->at = (uint32_t)i;
        for (uint32_t e = 0; e < tn->nedges; e++) {
            const fan_task_edge *from = &p->edges[tn->edges + e];
            edges[at + e] = *from;
            if (from->to != FAN_NOWHERE)
                edges[at + e].to = place[from->to];
        }
        tn->edges = at;
        at += tn->nedges;
    }
}

/* sort_nodes: the newest first. */
static fan_status sort_nodes(fan_backward *p, const reached *r, fan_error *err)
{
    uint32_t *order = fan_alloc(2 * p->nnodes * sizeof *order),
             *place = order ? order + p->nnodes : NULL;
    fan_task_node *nodes = memory_new(p->nnodes, sizeof *nodes);
    fan_task_edge *edges = memory_new(p->nedges, sizeof *edges);
    bool fits =
        order && nodes && edges && fan_keys_order(r->ages, sizeof *r->ages, p->nnodes, order);
    for (size_t i = 0; fits && i < p->nnodes; i++)
        place[order[i]] = (uint32_t)i;
    if (fits)
        move(p, nodes, edges, order, place);
    fan_free(order);
    fan__collect_free(fits ? p->nodes : nodes, fits ? p->cap_nodes : p->nnodes, sizeof *nodes);
    fan__collect_free(fits ? p->edges : edges, fits ? p->cap_edges : p->nedges, sizeof *edges);
    if (!fits)
        return fan__task_no_memory(err);
    p->nodes = nodes;
    p->cap_nodes = p->nnodes;
    p->edges = edges;
    p->cap_edges = p->nedges;
    return FAN_OK;
}

/* ---- 3. what is needed (E8) ---- */

/* need_one: a node whose edge leads to a needed node is needed, and runs. */
static void need_one(const fan_backward *p, fan_task_node *tn, const fan_task_edge *e)
{
    if (e->to != FAN_NOWHERE && p->nodes[e->to].needed)
        tn->needed = tn->runs = true;
}

/* need_by_depth: depth first, with a list for a stack; of a node on the list `dependencies` counts
 * the edges that were followed. */
static fan_status need_by_depth(fan_backward *p, fan_error *err)
{
    uint32_t *path = fan_alloc(p->nnodes * sizeof *path);
    bool *seen = fan_calloc(p->nnodes);
    if (!path || !seen) {
        fan_free(path);
        fan_free(seen);
        return fan__task_no_memory(err);
    }
    for (size_t i = 0; i < p->config.nroots; i++) {
        size_t n = 0;
        path[n++] = p->edges[i].to;
        seen[path[0]] = true;
        while (n) {
            fan_task_node *tn = &p->nodes[path[n - 1]];
            const fan_task_edge *e =
                tn->dependencies < tn->nedges ? &p->edges[tn->edges + tn->dependencies] : NULL;
            if (e && e->to != FAN_NOWHERE && !seen[e->to]) {
                seen[e->to] = true;
                path[n++] = e->to; /* this edge is visited again afterwards */
                continue;
            }
            if (e)
                need_one(p, tn, e);
            if (tn->dependencies++ >= tn->nedges)
                n--;
        }
    }
    for (size_t i = 0; i < p->nnodes; i++)
        p->nodes[i].dependencies = 0;
    fan_free(path);
    fan_free(seen);
    return FAN_OK;
}

/* ---- 4. counts and keys (E1, A15) ---- */

/* count_edge: gives the edge its key, or ends it where its gradient is not needed. */
static inline void count_edge(const fan_backward *p, fan_task_edge *e, bool counts)
{
    fan_task_node *to = counts && e->to != FAN_NOWHERE ? &p->nodes[e->to] : NULL;
    if (!to || !to->needed) {
        e->to = FAN_NOWHERE;
        return;
    }
    to->dependencies++;
    e->key = p->slots[to->slots + e->slot].producers++;
}

fan_status fan__collect(fan_backward *p, fan_error *err)
{
    reached r = {.ages = NULL};
    fan_status status = reach_all(p, &r, err);
    if (status == FAN_OK && !r.sorted)
        status = sort_nodes(p, &r, err);
    fan__collect_free(r.ages, r.cap, sizeof *r.ages);
    FAN_TRY(status);
    p->slots = memory_new(r.slots, sizeof *p->slots);
    if (!p->slots)
        return fan__task_no_memory(err);
    p->nslots = r.slots;
    memset(p->slots, 0, r.slots * sizeof *p->slots);
    if (p->config.limited) {
        size_t n = p->config.nwanted;
        p->same = fan_calloc(n * sizeof *p->same);
        p->results = fan_calloc(n * sizeof *p->results);
        if (!p->same || !p->results)
            return fan__task_no_memory(err);
        for (size_t i = 0; i < n; i++) {
            const fan_wanted *w = &p->config.wanted[i];
            if (w->node->mark != p->id)
                continue; /* not reached */
            fan_task_node *tn = &p->nodes[w->node->at];
            fan_task_slot *s = &p->slots[tn->slots + w->slot];
            tn->needed = true;
            tn->captured = p->config.capture;
            tn->runs = !p->config.capture;
            p->same[i] = s->wanted;
            s->wanted = (uint32_t)i + 1;
        }
        if (!r.down)
            FAN_TRY(need_by_depth(p, err));
        for (size_t i = p->nnodes; r.down && i-- > 0;) /* all edges lead to later places */
            for (uint32_t e = 0; e < p->nodes[i].nedges; e++)
                need_one(p, &p->nodes[i], &p->edges[p->nodes[i].edges + e]);
    }
    for (size_t i = 0; i < p->config.nroots; i++)
        count_edge(p, &p->edges[i], true);
    for (size_t i = 0; i < p->nnodes; i++) {
        const fan_task_node *tn = &p->nodes[i];
        if (tn->runs && tn->freed)
            return fan_node_freed(tn->node, err);
        p->to_run += tn->needed;
        for (uint32_t e = 0; e < tn->nedges; e++)
            count_edge(p, &p->edges[tn->edges + e], tn->runs);
    }
    return fan_ready_init(&p->queue.nodes, p->nnodes) == 0 ? FAN_OK : fan__task_no_memory(err);
}
