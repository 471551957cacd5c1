#include "engine/explain.h"

#include "engine/engine.h"

#include <stdio.h>
#include <string.h>

#define NODES 16 /* of so many, and of so many of the edges that lead to each, something is said */
#define EDGES 8

/* An edge that leads to a node: who gives, along which of his edges; node NULL: a root. */
typedef struct way {
    const fan_node *from;
    uint32_t index, slot;
    const fan_task_edge *edge;
} way;

/* next_way: the next edge that leads to a place, from *at on, which counts all edges of the pass, and `of` the nodes:
 * both from 0. */
static bool next_way(const fan_backward *p, uint32_t to, size_t *at, size_t *of, way *out)
{
    for (; *at < p->nedges; ++*at) {
        const fan_task_edge *e = &p->edges[*at];
        if (e->to != to)
            continue;
        if (*at < p->config.nroots) {
            *out = (way){NULL, (uint32_t)*at, e->slot, e};
        } else {
            while (*at >= (size_t)p->nodes[*of].edges + p->nodes[*of].nedges)
                ++*of;
            const fan_task_node *v = &p->nodes[*of];
            *out = (way){v->node, (uint32_t)(*at - v->edges), e->slot, e};
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
    way e;
    FAN_TRY(p->config.frontend->look(buffer, slot, &found, err));
    if (!found.elements)
        return FAN_OK;
    while (found.key != FAN_NOWHERE && next_way(p, w->now, &at, &of, &e))
        if (e.slot == slot && e.edge->key == found.key) {
            const fan_producer producer = {
                .node = e.from, .call = p->config.call, .index = e.index, .from_hook = e.edge->from_hook};
            return p->config.frontend->nonfinite(&found, &producer, err);
        }
    return p->config.frontend->nonfinite(&found, NULL, err);
}

/* ---- E17 ---- */

static void say_node(const fan_text *out, const fan_node *n)
{
    char name[128], number[40];
    n->ops->text(n, name, sizeof name);
    snprintf(number, sizeof number, "%s %llu", n->ops->leaf ? "leaf" : "node", (unsigned long long)n->number);
    out->write(out->to, name);
    if (strcmp(name, number) == 0) /* it has no name */
        return;
    out->write(out->to, " (");
    out->write(out->to, number);
    out->write(out->to, ")");
}

static void say_way(const fan_text *out, const way *e)
{
    char text[32];
    snprintf(text, sizeof text, e->from ? "edge %u of " : "root %u", e->index);
    out->write(out->to, text);
    if (e->from)
        say_node(out, e->from);
}

/* say_all: of the edges that lead to a place those that have delivered, or those that have not. */
static void say_all(const fan_backward *p, uint32_t to, bool delivered, const fan_text *out)
{
    size_t at = 0, of = 0, n = 0;
    char text[64];
    way e;
    while (next_way(p, to, &at, &of, &e)) {
        if (e.edge->delivered != delivered || n++ >= EDGES)
            continue;
        snprintf(text, sizeof text, n > 1 ? ", slot %u %s " : " slot %u %s ", e.slot,
                 !delivered        ? "waits for"
                 : e.edge->defined ? "holds"
                                   : "got None by");
        out->write(out->to, text);
        say_way(out, &e);
    }
    snprintf(text, sizeof text, ", and %zu more", n - EDGES);
    if (n > EDGES)
        out->write(out->to, text);
}

/* has_arrived: whether anything has come to a place. */
static bool has_arrived(const fan_backward *p, uint32_t to)
{
    size_t at = 0, of = 0;
    way e;
    while (next_way(p, to, &at, &of, &e))
        if (e.edge->delivered)
            return true;
    return false;
}

static void say_visit(const fan_backward *p, uint32_t i, const fan_text *out)
{
    const fan_task_node *v = &p->nodes[i];
    say_node(out, v->node);
    if (!v->needed || v->ran || i == p->caller.now) {
        out->write(out->to, !v->needed ? " is not needed" : v->ran ? " has run" : " is at work");
        return;
    }
    out->write(out->to, v->dependencies ? " has not run:" : " is ready:");
    say_all(p, i, false, out);
    if (v->dependencies && has_arrived(p, i))
        out->write(out->to, ";");
    say_all(p, i, true, out);
}

void fan_backward_explain(const fan_backward *p, const fan_node *only, const fan_text *out)
{
    char text[64];
    size_t n = 0;
    for (uint32_t i = 0; i < p->nnodes; i++) {
        const fan_task_node *v = &p->nodes[i];
        if (only ? v->node != only : !v->needed || v->ran)
            continue;
        if (n++ >= NODES)
            continue;
        if (n > 1)
            out->write(out->to, "\n");
        say_visit(p, i, out);
    }
    snprintf(text, sizeof text, "\nand %zu more", n - NODES);
    if (n > NODES)
        out->write(out->to, text);
    if (!n && only) {
        say_node(out, only);
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
        way found;
        if (!to || !e->delivered || !e->defined || to->ran || to->begun || e->to == p->caller.now || n++ >= EDGES ||
            !next_way(p, e->to, &at, &of, &found))
            continue;
        out->write(out->to, n > 1 ? ", " : "lost with the pass: ");
        say_way(out, &found);
        out->write(out->to, " to ");
        say_node(out, to->node);
    }
    snprintf(text, sizeof text, ", and %zu more", n - EDGES);
    if (n > EDGES)
        out->write(out->to, text);
}
