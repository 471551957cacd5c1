/* The producers of gradients, for messages: of one that is not finite (E11), and which have come,
 * which are lost
 * (E17). */
#include "engine/task.h"

#include <stdio.h>
#include <string.h>

#define NODES 16 /* listed at most */
#define EDGES 8  /* .. of those that lead to each */

/* An edge that leads to a node: its producer (NULL: the caller, by a root), the index of the
 * producer's edge. */
typedef struct in_edge {
    const fan_node *from;
    uint32_t index, slot;
    const fan_task_edge *edge;
} in_edge;

/* next_in_edge: the next edge that leads to a place. *at counts the pass's edges and *of its nodes;
 * both start at 0. */
static bool next_in_edge(const fan_backward *p, uint32_t to, size_t *at, size_t *of, in_edge *out)
{
    for (; *at < p->nedges; ++*at) {
        const fan_task_edge *e = &p->edges[*at];
        if (e->to != to)
            continue;
        if (*at < p->config.nroots) {
            *out = (in_edge){NULL, (uint32_t)*at, e->slot, e};
        } else {
            while (*at >= (size_t)p->nodes[*of].edges + p->nodes[*of].nedges)
                ++*of;
            const fan_task_node *tn = &p->nodes[*of];
            *out = (in_edge){tn->node, (uint32_t)(*at - tn->edges), e->slot, e};
        }
        ++*at;
        return true;
    }
    return false;
}

/* ---- E11 ---- */

fan_status fan__explain_sum(const fan_task_worker *w, uint32_t slot, void *buffer, fan_error *err)
{
    const fan_backward *p = w->pass;
    fan_nonfinite found = {.to = p->nodes[w->now].node, .slot = slot, .key = FAN_NOWHERE};
    size_t at = 0, of = 0;
    in_edge e;
    FAN_TRY(p->config.frontend->read_stats(buffer, slot, &found, err));
    if (!found.elements)
        return FAN_OK;
    while (found.key != FAN_NOWHERE && next_in_edge(p, w->now, &at, &of, &e))
        if (e.slot == slot && e.edge->key == found.key) {
            const fan_producer producer = {.node = e.from,
                                           .call = p->config.call,
                                           .index = e.index,
                                           .from_hook = e.edge->from_hook};
            return p->config.frontend->nonfinite(&found, &producer, err);
        }
    return p->config.frontend->nonfinite(&found, NULL, err);
}

/* ---- E17 ---- */

static void write_node(const fan_text *out, const fan_node *n)
{
    char name[128], number[40];
    n->ops->text(n, name, sizeof name);
    snprintf(number, sizeof number, "%s %llu", n->ops->leaf ? "leaf" : "node",
             (unsigned long long)n->number);
    out->write(out->to, name);
    if (strcmp(name, number) == 0) /* the node has no name */
        return;
    out->write(out->to, " (");
    out->write(out->to, number);
    out->write(out->to, ")");
}

static void write_in_edge(const fan_text *out, const in_edge *e)
{
    char text[32];
    snprintf(text, sizeof text, e->from ? "edge %u of " : "root %u", e->index);
    out->write(out->to, text);
    if (e->from)
        write_node(out, e->from);
}

/* write_in_edges: of the edges that lead to a place, those that have delivered, or those that have
 * not. */
static void write_in_edges(const fan_backward *p, uint32_t to, bool delivered, const fan_text *out)
{
    size_t at = 0, of = 0, n = 0;
    char text[64];
    in_edge e;
    while (next_in_edge(p, to, &at, &of, &e)) {
        if (e.edge->delivered != delivered || n++ >= EDGES)
            continue;
        snprintf(text, sizeof text, n > 1 ? ", slot %u %s " : " slot %u %s ", e.slot,
                 !delivered        ? "waits for"
                 : e.edge->defined ? "holds"
                                   : "got None by");
        out->write(out->to, text);
        write_in_edge(out, &e);
    }
    snprintf(text, sizeof text, ", and %zu more", n - EDGES);
    if (n > EDGES)
        out->write(out->to, text);
}

void fan_backward_explain(const fan_backward *p, const fan_node *only, const fan_text *out)
{
    char text[64];
    size_t n = 0;
    for (uint32_t i = 0; i < p->nnodes; i++) {
        const fan_task_node *tn = &p->nodes[i];
        if (only ? tn->node != only : !tn->needed || tn->ran)
            continue;
        if (n++ >= NODES)
            continue;
        if (n > 1)
            out->write(out->to, "\n");
        write_node(out, tn->node);
        if (!tn->needed || tn->ran || i == p->caller.now) {
            out->write(out->to, !tn->needed ? " is not needed"
                                : tn->ran   ? " has run"
                                            : " is at work");
            continue;
        }
        out->write(out->to, tn->dependencies ? " has not run:" : " is ready:");
        write_in_edges(p, i, false, out);
        size_t at = 0, of = 0;
        bool any = false;
        in_edge e;
        while (tn->dependencies && !any && next_in_edge(p, i, &at, &of, &e))
            any = e.edge->delivered;
        if (any)
            out->write(out->to, ";");
        write_in_edges(p, i, true, out);
    }
    snprintf(text, sizeof text, "\nand %zu more", n - NODES);
    if (n > NODES)
        out->write(out->to, text);
    if (!n && only) {
        write_node(out, only);
        out->write(out->to, " is not in this pass");
    }
}

void fan_backward_lost(const fan_backward *p, const fan_text *out)
{
    char text[64];
    size_t n = 0, of = 0;
    for (size_t i = 0; i < p->nedges; i++) {
        const fan_task_edge *e = &p->edges[i];
        const fan_task_node *to = e->to == FAN_NOWHERE ? NULL : &p->nodes[e->to];
        size_t at = i;
        in_edge found;
        if (!to || !e->delivered || !e->defined || to->ran || to->begun || e->to == p->caller.now ||
            n++ >= EDGES || !next_in_edge(p, e->to, &at, &of, &found))
            continue;
        out->write(out->to, n > 1 ? ", " : "lost with the pass: ");
        write_in_edge(out, &found);
        out->write(out->to, " to ");
        write_node(out, to->node);
    }
    snprintf(text, sizeof text, ", and %zu more", n - EDGES);
    if (n > EDGES)
        out->write(out->to, text);
}
