#include "engine/collect.h"

#include "base/keys.h"
#include "base/mem.h"

#include <string.h>

static fan_status no_memory(fan_error *err) { return fan_fail(err, FAN_ERR_NOMEM, "out of memory"); }

/* ---- 1. what is reached ---- */

typedef struct found {
    int64_t age; /* the smaller, the later it was made */
    fan_node *node;
} found;

typedef struct reached {
    found *all;
    size_t n, cap;
    bool sorted;
} reached;

static fan_status reach(reached *r, fan_node *n, uint64_t id, fan_error *err)
{
    if (n->mark == id)
        return FAN_OK;
    if (r->n == UINT32_MAX - 1)
        return fan_fail(err, FAN_ERR_OVERFLOW, "a pass visits at most %u nodes", UINT32_MAX - 1);
    if (fan_grow((void **)&r->all, &r->cap, r->n + 1, sizeof *r->all) != 0)
        return no_memory(err);
    n->mark = id;
    n->at = (uint32_t)r->n;
    found one = {INT64_MAX - (int64_t)n->number, n};
    r->sorted = r->sorted && (r->n == 0 || r->all[r->n - 1].age < one.age);
    r->all[r->n++] = one;
    return FAN_OK;
}

static fan_status reach_all(const fan_backward *p, reached *r, fan_error *err)
{
    r->sorted = true;
    for (size_t i = 0; i < p->config.nroots; i++)
        FAN_TRY(reach(r, p->config.roots[i].node, p->id, err));
    for (size_t i = 0; i < r->n; i++) {
        const fan_node *n = r->all[i].node;
        for (uint32_t e = 0; e < n->nedges; e++)
            if (n->edges[e].next)
                FAN_TRY(reach(r, n->edges[e].next, p->id, err));
    }
    return FAN_OK;
}

/* ---- 2. places ---- */

/* place_all: visits, by number, and where their slots and edges begin. */
static fan_status place_all(fan_backward *p, const reached *r, fan_error *err)
{
    uint32_t *order = NULL;
    uint64_t slots = 0, edges = p->config.nroots;
    if (!r->sorted) {
        order = fan_alloc(r->n * sizeof *order);
        if (!order || !fan_keys_order(&r->all[0].age, sizeof *r->all, r->n, order)) {
            fan_free(order);
            return no_memory(err);
        }
    }
    p->visits = fan_alloc(r->n * sizeof *p->visits);
    for (size_t i = 0; p->visits && i < r->n; i++) {
        fan_node *n = r->all[order ? order[i] : i].node;
        n->at = (uint32_t)i;
        p->visits[i] = (fan_visit){.node = n,
                                   .slots = (uint32_t)slots,
                                   .edges = (uint32_t)edges,
                                   .nedges = n->nedges,
                                   .after = FAN_NOWHERE,
                                   .needed = !p->config.limited,
                                   .runs = !p->config.limited};
        slots += n->inputs;
        edges += n->nedges;
    }
    fan_free(order);
    if (!p->visits)
        return no_memory(err);
    p->nvisits = r->n;
    if (slots >= UINT32_MAX || edges >= UINT32_MAX)
        return fan_fail(err, FAN_ERR_OVERFLOW, "a pass has at most %u slots and edges", UINT32_MAX - 1);
    p->slots = fan_calloc(slots * sizeof *p->slots);
    p->nslots = p->slots ? slots : 0;
    p->edges = fan_alloc(edges * sizeof *p->edges);
    p->nedges = edges;
    return p->slots && p->edges ? FAN_OK : no_memory(err);
}

/* ---- 3. what is needed (E8) ---- */

static fan_status want_all(fan_backward *p, fan_error *err)
{
    size_t n = p->config.nwanted;
    if (!p->config.limited)
        return FAN_OK;
    p->same = fan_calloc(n * sizeof *p->same);
    p->results = fan_calloc(n * sizeof *p->results);
    if (!p->same || !p->results)
        return no_memory(err);
    for (size_t i = 0; i < n; i++) {
        const fan_wanted *w = &p->config.wanted[i];
        if (w->node->mark != p->id)
            continue; /* nothing leads there */
        fan_visit *v = &p->visits[w->node->at];
        fan_visit_slot *s = &p->slots[v->slots + w->slot];
        v->needed = true;
        v->captured = p->config.capture;
        v->runs = !p->config.capture;
        p->same[i] = s->wanted;
        s->wanted = (uint32_t)i + 1;
    }
    return FAN_OK;
}

/* need_behind: a node is needed where one behind it is, and runs then: depth first, with a list for a stack. `edges` of
 * a visit that is on the list counts the edges that have been followed, by `due`. */
static fan_status need_behind(fan_backward *p, fan_error *err)
{
    uint32_t *path = fan_alloc(p->nvisits * sizeof *path);
    bool *seen = fan_calloc(p->nvisits);
    size_t n;
    if (!path || !seen) {
        fan_free(path);
        fan_free(seen);
        return no_memory(err);
    }
    for (size_t i = 0; i < p->config.nroots; i++) {
        n = 0;
        path[n++] = p->config.roots[i].node->at;
        seen[path[0]] = true;
        while (n) {
            fan_visit *v = &p->visits[path[n - 1]];
            fan_node *next = v->due < v->nedges ? v->node->edges[v->due].next : NULL;
            if (next && !seen[next->at]) {
                seen[next->at] = true;
                path[n++] = next->at; /* and this edge is looked at again */
                continue;
            }
            if (next && p->visits[next->at].needed)
                v->needed = v->runs = true;
            if (v->due++ >= v->nedges)
                n--;
        }
    }
    for (size_t i = 0; i < p->nvisits; i++)
        p->visits[i].due = 0;
    fan_free(path);
    fan_free(seen);
    return FAN_OK;
}

/* ---- 4. counts and keys (E1, A15) ---- */

static fan_visit_edge count(const fan_backward *p, const fan_node *next, uint32_t slot)
{
    fan_visit *to = next ? &p->visits[next->at] : NULL;
    if (!to || !to->needed)
        return (fan_visit_edge){.to = FAN_NOWHERE};
    to->due++;
    return (fan_visit_edge){.to = next->at, .key = p->slots[to->slots + slot].producers++};
}

static fan_status count_all(fan_backward *p, fan_error *err)
{
    fan_visit_edge *edge = p->edges;
    for (size_t i = 0; i < p->config.nroots; i++)
        *edge++ = count(p, p->config.roots[i].node, p->config.roots[i].slot);
    for (size_t i = 0; i < p->nvisits; i++) {
        const fan_visit *v = &p->visits[i];
        if (v->runs && v->node->freed_by)
            return fan_node_freed(v->node, err);
        p->to_run += v->needed;
        for (uint32_t e = 0; e < v->nedges; e++)
            *edge++ = v->runs ? count(p, v->node->edges[e].next, v->node->edges[e].slot)
                              : (fan_visit_edge){.to = FAN_NOWHERE};
    }
    return FAN_OK;
}

fan_status fan_collect(fan_backward *p, fan_error *err)
{
    reached r = {NULL, 0, 0, false};
    fan_status status = reach_all(p, &r, err);
    if (status == FAN_OK)
        status = place_all(p, &r, err);
    fan_free(r.all);
    FAN_TRY(status);
    FAN_TRY(want_all(p, err));
    if (p->config.limited)
        FAN_TRY(need_behind(p, err));
    FAN_TRY(count_all(p, err));
    return fan_ready_init(&p->queue.nodes, p->nvisits) == 0 ? FAN_OK : no_memory(err);
}
