/* Collects a pass: what do the roots reach, what of it is needed, and which key has each edge? All
 * in loops, since a graph may be a million nodes deep.
 *
 *   memory    arrays that keep their pages for the next pass
 *   reach     lists the nodes and edges that the roots reach
 *   sort      orders the nodes by their places, the newest first, unless they are
 *   need      marks the nodes from which a wanted one is reached (E8)
 *   count     counts dependencies and gives every edge its key (E1, A15) */
#include "engine/pass.h"

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
    if (keeps_pages(n, size))
        return fan_alloc_data(n * size);
    return fan_alloc(n * size);
}

void fan__collect_free(void *memory, size_t n, size_t size)
{
    if (keeps_pages(n, size))
        fan_free_data(memory, n * size);
    else
        fan_free(memory);
}

/* grow: makes room for at least `want` items. FAN_ERR_NOMEM: nothing has changed. */
static fan_status grow(void **items, size_t *cap, size_t want, size_t size, fan_error *err)
{
    size_t next = 2 * *cap;
    void *more;
    if (want <= *cap)
        return FAN_OK;
    if (next < want)
        next = want;
    if (next < 16)
        next = 16;
    bool copies = keeps_pages(*cap, size) || keeps_pages(next, size);
    if (copies)
        more = memory_new(next, size);
    else
        more = fan_realloc(*items, next * size);
    if (!more)
        return fan_fail_memory(err);
    if (copies && *cap)
        memcpy(more, *items, *cap * size);
    if (copies)
        fan__collect_free(*items, *cap, size);
    *items = more;
    *cap = next;
    return FAN_OK;
}

/* ---- 1. reach ---- */

typedef struct reached {
    int64_t *ages; /* of each node: the smaller, the newer */
    size_t cap;
    bool sorted; /* ages ascend, so the nodes are in their places */
    bool down;   /* no edge leads to a newer node */
    uint64_t slots;
} reached;

/* room_for: makes room for `more` nodes and edges. */
static fan_status room_for(fan_pass *pass, reached *found, size_t more, fan_error *err)
{
    size_t nodes = pass->nnodes + more;
    size_t edges = pass->nedges + more;
    FAN_TRY(grow((void **)&pass->nodes, &pass->cap_nodes, nodes, sizeof(fan_pass_node), err));
    FAN_TRY(grow((void **)&found->ages, &found->cap, nodes, sizeof(int64_t), err));
    return grow((void **)&pass->edges, &pass->cap_edges, edges, sizeof(fan_pass_edge), err);
}

/* reach: returns the pass's edge to a node (NULL: to none), which it adds if needed. There must be
 * room. */
static inline fan_pass_edge reach(fan_pass *pass, reached *found, fan_node *node, uint32_t slot)
{
    if (!node)
        return (fan_pass_edge){.to = FAN_NOWHERE, .slot = slot};
    if (node->mark != pass->id) {
        size_t at = pass->nnodes;
        int64_t age = INT64_MAX - (int64_t)node->number;
        pass->nodes[at] = (fan_pass_node){
            .node = node,
            .slots = (uint32_t)found->slots,
            .nedges = node->nedges,
            .after = FAN_NOWHERE,
            .needed = !pass->config.limited,
            .runs = !pass->config.limited,
            .leaf = node->ops->leaf,
            .freed = node->freed_by != 0,
        };
        node->mark = pass->id;
        node->at = (uint32_t)at;
        found->slots += node->inputs;
        if (at > 0 && found->ages[at - 1] >= age)
            found->sorted = false;
        found->ages[at] = age;
        pass->nnodes = at + 1;
    }
    return (fan_pass_edge){.to = node->at, .slot = slot};
}

static fan_status reach_all(fan_pass *pass, reached *found, fan_error *err)
{
    const fan_root *roots = pass->config.roots;
    size_t nroots = pass->config.nroots;
    FAN_TRY(room_for(pass, found, nroots, err));

    /* The last root first if it is the newest, as roots in a list mostly are: then nothing needs
     * sorting. */
    bool back = nroots && roots[0].node->number < roots[nroots - 1].node->number;
    for (size_t i = 0; i < nroots; i++) {
        size_t at = i;
        if (back)
            at = nroots - 1 - i;
        if (i + 4 < nroots)
            __builtin_prefetch(&roots[back ? at - 4 : at + 4].node->number);
        pass->edges[at] = reach(pass, found, roots[at].node, roots[at].slot);
    }
    pass->nedges = nroots;

    for (size_t i = 0; i < pass->nnodes; i++) {
        const fan_node *node = pass->nodes[i].node;
        pass->nodes[i].edges = (uint32_t)pass->nedges;
        FAN_TRY(room_for(pass, found, node->nedges, err));
        for (uint32_t e = 0; e < node->nedges; e++) {
            fan_node *next = node->edges[e].next;
            pass->edges[pass->nedges++] = reach(pass, found, next, node->edges[e].slot);
            if (next && next->number >= node->number)
                found->down = false;
        }
        if (found->slots >= UINT32_MAX || pass->nedges >= UINT32_MAX) {
            return fan_fail(err, FAN_ERR_OVERFLOW, "a pass has at most %u slots and edges",
                            UINT32_MAX - 1);
        }
    }
    return FAN_OK;
}

/* ---- 2. sort by place ---- */

/* move: copies nodes and edges to their places: place i gets node order[i]; `place` is the inverse
 * of `order`. */
static void move(const fan_pass *pass, fan_pass_node *nodes, fan_pass_edge *edges,
                 const uint32_t *order, const uint32_t *place)
{
    uint32_t at = 0;
    for (; at < pass->config.nroots; at++) {
        edges[at] = pass->edges[at];
        edges[at].to = place[edges[at].to];
    }
    for (size_t i = 0; i < pass->nnodes; i++) {
        fan_pass_node *entry = &nodes[i];
        *entry = pass->nodes[order[i]];
        entry->node->at = (uint32_t)i;
        const fan_pass_edge *from = &pass->edges[entry->edges];
        entry->edges = at;
        for (uint32_t e = 0; e < entry->nedges; e++) {
            edges[at] = from[e];
            if (from[e].to != FAN_NOWHERE)
                edges[at].to = place[from[e].to];
            at++;
        }
    }
}

/* sort_nodes: sorts the nodes, the newest first. */
static fan_status sort_nodes(fan_pass *pass, const reached *found, fan_error *err)
{
    size_t n = pass->nnodes;
    uint32_t *order = fan_alloc(2 * n * sizeof *order);
    fan_pass_node *nodes = memory_new(n, sizeof *nodes);
    fan_pass_edge *edges = memory_new(pass->nedges, sizeof *edges);
    bool fits = order && nodes && edges;
    if (fits)
        fits = fan_keys_order(found->ages, sizeof *found->ages, n, order);
    if (!fits) {
        fan_free(order);
        fan__collect_free(nodes, n, sizeof *nodes);
        fan__collect_free(edges, pass->nedges, sizeof *edges);
        return fan_fail_memory(err);
    }
    uint32_t *place = order + n;
    for (size_t i = 0; i < n; i++)
        place[order[i]] = (uint32_t)i;
    move(pass, nodes, edges, order, place);
    fan_free(order);
    fan__collect_free(pass->nodes, pass->cap_nodes, sizeof *nodes);
    fan__collect_free(pass->edges, pass->cap_edges, sizeof *edges);
    pass->nodes = nodes;
    pass->cap_nodes = n;
    pass->edges = edges;
    pass->cap_edges = pass->nedges;
    return FAN_OK;
}

/* ---- 3. what is needed (E8) ---- */

/* need_one: marks a node whose edge leads to a needed node: it is needed, and runs. */
static void need_one(const fan_pass *pass, fan_pass_node *entry, const fan_pass_edge *edge)
{
    if (edge->to == FAN_NOWHERE || !pass->nodes[edge->to].needed)
        return;
    entry->needed = true;
    entry->runs = true;
}

/* need_by_depth: marks what is needed, depth first, with a list for a stack; of a node on the list
 * `dependencies` counts the edges that were followed. */
static fan_status need_by_depth(fan_pass *pass, fan_error *err)
{
    uint32_t *path = fan_alloc(pass->nnodes * sizeof *path);
    bool *seen = fan_calloc(pass->nnodes);
    if (!path || !seen) {
        fan_free(path);
        fan_free(seen);
        return fan_fail_memory(err);
    }
    for (size_t i = 0; i < pass->config.nroots; i++) {
        size_t n = 0;
        path[n++] = pass->edges[i].to;
        seen[path[0]] = true;
        while (n) {
            fan_pass_node *entry = &pass->nodes[path[n - 1]];
            if (entry->dependencies == entry->nedges) {
                n--;
                continue;
            }
            const fan_pass_edge *edge = &pass->edges[entry->edges + entry->dependencies];
            if (edge->to != FAN_NOWHERE && !seen[edge->to]) {
                seen[edge->to] = true;
                path[n++] = edge->to; /* this edge is visited again afterwards */
                continue;
            }
            need_one(pass, entry, edge);
            entry->dependencies++;
        }
    }
    for (size_t i = 0; i < pass->nnodes; i++)
        pass->nodes[i].dependencies = 0;
    fan_free(path);
    fan_free(seen);
    return FAN_OK;
}

/* need_wanted: marks the wanted slots and the nodes before them. */
static fan_status need_wanted(fan_pass *pass, bool down, fan_error *err)
{
    const fan_pass_config *config = &pass->config;
    pass->same = fan_calloc(config->nwanted * sizeof *pass->same);
    pass->results = fan_calloc(config->nwanted * sizeof *pass->results);
    if (!pass->same || !pass->results)
        return fan_fail_memory(err);
    for (size_t i = 0; i < config->nwanted; i++) {
        const fan_wanted *wanted = &config->wanted[i];
        if (wanted->node->mark != pass->id)
            continue; /* not reached */
        fan_pass_node *entry = &pass->nodes[wanted->node->at];
        fan_pass_slot *slot = &pass->slots[entry->slots + wanted->slot];
        entry->needed = true;
        entry->captured = config->capture;
        entry->runs = !config->capture;
        pass->same[i] = slot->wanted;
        slot->wanted = (uint32_t)i + 1;
    }
    if (!down)
        return need_by_depth(pass, err);
    for (size_t i = pass->nnodes; i-- > 0;) { /* all edges lead to later places */
        fan_pass_node *entry = &pass->nodes[i];
        for (uint32_t e = 0; e < entry->nedges; e++)
            need_one(pass, entry, &pass->edges[entry->edges + e]);
    }
    return FAN_OK;
}

/* ---- 4. counts and keys (E1, A15) ---- */

/* count_edge: gives the edge its key, or ends it where its gradient is not needed. */
static inline void count_edge(const fan_pass *pass, fan_pass_edge *edge, bool counts)
{
    if (!counts || edge->to == FAN_NOWHERE || !pass->nodes[edge->to].needed) {
        edge->to = FAN_NOWHERE;
        return;
    }
    fan_pass_node *to = &pass->nodes[edge->to];
    to->dependencies++;
    edge->key = pass->slots[to->slots + edge->slot].producers++;
}

fan_status fan__collect(fan_pass *pass, fan_error *err)
{
    reached found = {.sorted = true, .down = true};
    fan_status status = reach_all(pass, &found, err);
    if (status == FAN_OK && !found.sorted)
        status = sort_nodes(pass, &found, err);
    fan__collect_free(found.ages, found.cap, sizeof *found.ages);
    FAN_TRY(status);

    pass->slots = memory_new(found.slots, sizeof *pass->slots);
    if (!pass->slots)
        return fan_fail_memory(err);
    pass->nslots = found.slots;
    memset(pass->slots, 0, found.slots * sizeof *pass->slots);
    if (pass->config.limited)
        FAN_TRY(need_wanted(pass, found.down, err));

    for (size_t i = 0; i < pass->config.nroots; i++)
        count_edge(pass, &pass->edges[i], true);
    for (size_t i = 0; i < pass->nnodes; i++) {
        const fan_pass_node *entry = &pass->nodes[i];
        if (entry->runs && entry->freed)
            return fan_node_freed(entry->node, err);
        pass->to_run += entry->needed;
        for (uint32_t e = 0; e < entry->nedges; e++)
            count_edge(pass, &pass->edges[entry->edges + e], entry->runs);
    }
    if (fan_ready_init(&pass->queue.nodes, pass->nnodes) != 0)
        return fan_fail_memory(err);
    return FAN_OK;
}
