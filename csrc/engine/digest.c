/* digest: the digests that a pass writes into traces that have them (buffer/digest.h): of each
 * gradient where it is delivered, of each sum where it is taken, of what a leaf has afterwards.
 *
 * A gradient that is handed through is read once: the digest of the contribution is that of the
 * sum. */
#include "buffer/digest.h"
#include "engine/pass.h"

/* write_line: as work of `node` (FAN_TRACE_CALLER: the caller of the pass). */
static void write_line(const fan_pass *pass, uint64_t node, const fan_trace_line *line)
{
    fan_trace_work work = fan_trace_work_now();
    if (work.pass != pass->id)
        work.worker = 0;
    work.pass = pass->id;
    work.node = node;
    fan_trace_work outer = fan_trace_work_begin(work);
    fan_trace_put(line);
    (void)fan_trace_work_begin(outer);
}

/* digest_at: the last digest of the gradient or sum in a slot; NULL: none is kept. */
static uint64_t *digest_at(const fan_pass *pass, const fan_pass_node *entry, uint32_t slot)
{
    if (!pass->digests)
        return NULL;
    return &pass->digests[entry->slots + slot];
}

void fan__digest_contribution(const fan_pass *pass, const fan_pass_edge *edge, void *gradient,
                              const fan_producer *producer)
{
    const fan_pass_node *to = &pass->nodes[edge->to];
    uint64_t node = FAN_TRACE_CALLER;
    if (producer->node)
        node = producer->node->number;
    fan_trace_line line = {
        .kind = FAN_TRACE_DIGEST,
        .how = FAN_DIGEST_CONTRIBUTION,
        .device = -1,
        .slot = (int32_t)edge->slot,
        .key = edge->key,
        .count = producer->index,
        .to = to->node->number,
        .start_us = -1,
        .end_us = -1,
    };
    pass->frontend->digest(gradient, producer->stream, 0, &line);
    uint64_t *last = digest_at(pass, to, edge->slot);
    if (last)
        *last = line.digest;
    write_line(pass, node, &line);
}

void fan__digest_sum(const fan_pass *pass, const fan_pass_node *entry, char what, uint32_t slot,
                     void *sum, fan_stream *on, bool known)
{
    uint64_t *last = digest_at(pass, entry, slot);
    uint64_t digest = 0;
    if (known && last)
        digest = *last;
    fan_trace_line line = {
        .kind = FAN_TRACE_DIGEST,
        .how = what,
        .device = -1,
        .slot = (int32_t)slot,
        .key = -1,
        .to = entry->node->number,
        .start_us = -1,
        .end_us = -1,
    };
    pass->frontend->digest(sum, on, digest, &line);
    if (last)
        *last = line.digest;
    write_line(pass, entry->node->number, &line);
}
