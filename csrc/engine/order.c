/* order: the order in which one thread runs the nodes of a pass (E2), found without running them.
 *
 * It counts dependencies down and takes from the queue exactly as a pass does (pass.c), with
 * the same functions; a node's gradients count as delivered when the node is listed. */
#include "engine/pass.h"

#include "base/mem.h"

/* The walk over a pass that does not run. */
typedef struct order_walk {
    fan_pass *pass;
    uint32_t *after; /* of each place: the step after which it became ready */
    uint32_t now;    /* the step whose edges are counted; FAN_NOWHERE: the roots */
} order_walk;

static void order_deliver(order_walk *walk, const fan_pass_edge *edge)
{
    fan_pass *pass = walk->pass;
    if (edge->to == FAN_NOWHERE)
        return;
    if (!fan__dependency_done(&pass->nodes[edge->to]))
        return;
    walk->after[edge->to] = walk->now;
    fan__queue_push(&pass->queue, pass->nodes, edge->to);
}

/* order_next: removes and returns the place that runs next; FAN_NOWHERE: none is ready. */
static uint32_t order_next(fan_pass *pass)
{
    if (pass->queue.leaves != FAN_NOWHERE)
        return fan__queue_pop_leaf(&pass->queue, pass->nodes);
    size_t place = fan_ready_first(&pass->queue.nodes, 0);
    if (place == FAN_READY_NONE)
        return FAN_NOWHERE;
    fan_ready_remove(&pass->queue.nodes, place);
    return (uint32_t)place;
}

fan_status fan_pass_order(fan_pass *pass, fan_pass_step *steps, fan_error *err)
{
    order_walk walk = {.pass = pass, .now = FAN_NOWHERE};
    walk.after = fan_alloc(pass->nnodes * sizeof *walk.after);
    if (!walk.after)
        return fan_fail_memory(err);
    for (size_t i = 0; i < pass->config.nroots; i++)
        order_deliver(&walk, &pass->edges[i]);
    fan_status status = FAN_OK;
    for (uint32_t n = 0; n < pass->to_run && status == FAN_OK; n++) {
        uint32_t at = order_next(pass);
        if (at == FAN_NOWHERE) {
            status = fan_fail(err, FAN_ERR_STATE, "the graph has a cycle");
            break;
        }
        const fan_pass_node *entry = &pass->nodes[at];
        bool runs = entry->runs;
        steps[n] = (fan_pass_step){entry->node, walk.after[at], runs};
        walk.now = n;
        if (entry->leaf || !runs)
            continue;
        for (uint32_t e = 0; e < entry->nedges; e++)
            order_deliver(&walk, &pass->edges[entry->edges + e]);
    }
    fan_free(walk.after);
    return status;
}
