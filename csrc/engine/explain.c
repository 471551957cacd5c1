/* The producers of gradients, for messages: the one of a gradient that is not finite (E11), those
 * whose gradients have come or are missing, and those whose gradients are lost (E17). */
#include "engine/pass.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NODES 16 /* listed at most */
#define EDGES 8  /* .. of those that lead to each */

/* The edges that lead to a place, one after another. */
typedef struct in_edges {
    const fan_pass *pass;
    uint32_t to;
    size_t next;  /* of the pass's edges */
    size_t place; /* of the node that the last one came from */
    /* the last one: */
    const fan_pass_edge *edge;
    const fan_node *from; /* its producer; NULL: the caller, by a root */
    uint32_t index;       /* of the producer's edges, or of the roots */
} in_edges;

/* next_in_edge: moves to the next edge.
 * false: there is none. */
static bool next_in_edge(in_edges *in)
{
    const fan_pass *pass = in->pass;
    while (in->next < pass->nedges) {
        size_t at = in->next++;
        in->edge = &pass->edges[at];
        if (in->edge->to != in->to)
            continue;
        in->from = NULL;
        in->index = (uint32_t)at;
        if (at < pass->config.nroots)
            return true;
        const fan_pass_node *entry = &pass->nodes[in->place];
        while (at >= (size_t)entry->edges + entry->nedges)
            entry = &pass->nodes[++in->place];
        in->from = entry->node;
        in->index -= entry->edges;
        return true;
    }
    return false;
}

/* ---- E11 ---- */

fan_status fan__explain_sum(const fan_pass_worker *worker, uint32_t slot, void *buffer,
                            fan_error *err)
{
    const fan_pass *pass = worker->pass;
    const fan_node *node = fan__worker_node(worker)->node;
    fan_nonfinite found = {.to = node, .slot = slot, .key = FAN_NOWHERE};
    in_edges in = {.pass = pass, .to = worker->now};
    FAN_TRY(pass->frontend->read_stats(buffer, slot, &found, err));
    if (!found.elements)
        return FAN_OK;
    while (found.key != FAN_NOWHERE && next_in_edge(&in)) {
        if (in.edge->slot != slot || in.edge->key != found.key)
            continue;
        const fan_producer producer = {
            .node = in.from,
            .call = pass->config.call,
            .index = in.index,
            .from_hook = in.edge->from_hook,
        };
        return pass->frontend->nonfinite(&found, &producer, err);
    }
    return pass->frontend->nonfinite(&found, NULL, err);
}

/* ---- E17 ---- */

__attribute__((format(printf, 2, 3))) static void write_text(const fan_text *out,
                                                             const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    out->write(out->to, text);
}

static void write_node(const fan_text *out, const fan_node *node)
{
    const char *kind = "node";
    if (node->ops->leaf)
        kind = "leaf";
    char name[128];
    char number[40];
    node->ops->text(node, name, sizeof name);
    snprintf(number, sizeof number, "%s %llu", kind, (unsigned long long)node->number);
    write_text(out, "%s", name);
    if (strcmp(name, number) != 0) /* else the node has no name */
        write_text(out, " (%s)", number);
}

static void write_in_edge(const fan_text *out, const in_edges *in)
{
    if (!in->from) {
        write_text(out, "root %u", in->index);
        return;
    }
    write_text(out, "edge %u of ", in->index);
    write_node(out, in->from);
}

/* write_more: writes how many of n are not listed. */
static void write_more(const fan_text *out, const char *between, size_t n, size_t listed)
{
    if (n > listed)
        write_text(out, "%sand %zu more", between, n - listed);
}

/* write_in_edges: writes, of the edges that lead to a place, those that have delivered, or those
 * that have not. */
static void write_in_edges(const fan_pass *pass, uint32_t to, bool delivered, const fan_text *out)
{
    in_edges in = {.pass = pass, .to = to};
    size_t n = 0;
    while (next_in_edge(&in)) {
        if (in.edge->delivered != delivered || n++ >= EDGES)
            continue;
        const char *state = "got None by";
        if (!delivered)
            state = "waits for";
        else if (in.edge->defined)
            state = "holds";
        write_text(out, "%s slot %u %s ", n > 1 ? "," : "", in.edge->slot, state);
        write_in_edge(out, &in);
    }
    write_more(out, ", ", n, EDGES);
}

/* any_delivered: returns whether an edge that leads to a place has delivered. */
static bool any_delivered(const fan_pass *pass, uint32_t to)
{
    in_edges in = {.pass = pass, .to = to};
    while (next_in_edge(&in)) {
        if (in.edge->delivered)
            return true;
    }
    return false;
}

/* write_state: writes what a node of the pass waits for and holds. */
static void write_state(const fan_pass *pass, uint32_t at, const fan_text *out)
{
    const fan_pass_node *entry = &pass->nodes[at];
    write_node(out, entry->node);
    if (!entry->needed) {
        write_text(out, " is not needed");
        return;
    }
    if (entry->ran) {
        write_text(out, " has run");
        return;
    }
    if (at == pass->caller.now) {
        write_text(out, " is at work");
        return;
    }
    write_text(out, "%s", entry->dependencies ? " has not run:" : " is ready:");
    write_in_edges(pass, at, false, out);
    if (entry->dependencies && any_delivered(pass, at))
        write_text(out, ";");
    write_in_edges(pass, at, true, out);
}

void fan_pass_explain(const fan_pass *pass, const fan_node *only, const fan_text *out)
{
    size_t n = 0;
    for (uint32_t i = 0; i < pass->nnodes; i++) {
        const fan_pass_node *entry = &pass->nodes[i];
        bool listed = entry->needed && !entry->ran;
        if (only)
            listed = entry->node == only;
        if (!listed || n++ >= NODES)
            continue;
        if (n > 1)
            write_text(out, "\n");
        write_state(pass, i, out);
    }
    write_more(out, "\n", n, NODES);
    if (!n && only) {
        write_node(out, only);
        write_text(out, " is not in this pass");
    }
}

/* is_lost: returns whether a gradient was delivered to a node that has not begun. */
static bool is_lost(const fan_pass *pass, const fan_pass_edge *edge)
{
    if (edge->to == FAN_NOWHERE || edge->to == pass->caller.now)
        return false;
    const fan_pass_node *to = &pass->nodes[edge->to];
    if (to->ran || to->begun)
        return false;
    return edge->delivered && edge->defined;
}

void fan_pass_lost(const fan_pass *pass, const fan_text *out)
{
    in_edges in = {.pass = pass};
    size_t n = 0;
    for (size_t i = 0; i < pass->nedges; i++) {
        const fan_pass_edge *edge = &pass->edges[i];
        if (!is_lost(pass, edge) || n++ >= EDGES)
            continue;
        in.to = edge->to;
        in.next = i;
        (void)next_in_edge(&in);
        write_text(out, "%s", n > 1 ? ", " : "lost with the pass: ");
        write_in_edge(out, &in);
        write_text(out, " to ");
        write_node(out, pass->nodes[edge->to].node);
    }
    write_more(out, ", ", n, EDGES);
}
