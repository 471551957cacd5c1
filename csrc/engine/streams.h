/* streams: on which streams does a pass run, and which streams wait at its end? (E4, S20; docs/rules.md)
 *
 * The buffers do the other waits: a gradient is added with its producer's stream as P, a buffer has its consumer's as
 * C, so S4 to S19 order a take, or a single gradient that is handed through. This is left for the pass:
 *
 *   the streams that are current while a node runs       those of where it was made; its own is the first of them
 *   a leaf's first write in a pass                       its stream waits for the caller's
 *   the end                                              the caller's stream of each device waits for those of leaves,
 *                                                        of nodes that delivered no gradient, and of captured inputs
 *   a pass inside a capture                              any stream but the legacy default joins the capture (K1);
 *                                                        with redirection the caller's replaces that one (S7)
 *
 * A worked case. A leaf of stream w gets a gradient of a node on s; the caller is on c:
 *
 *   c  ==zero .grad==*1                      ^3 [step]     S20   c waits for w
 *   s      ==g==*2
 *   w              ^1^2 [.grad += g]*3                     S18   w waits for s, and before it writes for c
 *
 * What can go wrong: a hook runs before the wait; a node made on the legacy stream runs on the caller's; a failed pass
 * ends without a wait, and the caller reads a `.grad` that is still being written.
 *
 * A process that never made a stream current pays one load per call.
 */
#ifndef FAN_ENGINE_STREAMS_H
#define FAN_ENGINE_STREAMS_H

#include "engine/task.h"

/* The streams of a node while it runs. Borrowed. */
typedef struct fan_run_streams {
    fan_stream_set *set; /* current; NULL: none is pushed */
    fan_stream *own;     /* P of its gradients, C of its sums; NULL: the current stream of a gradient's device */
} fan_run_streams;

fan_status fan_task_streams_begin(fan_backward *p, fan_error *err);
void fan_task_streams_fini(fan_backward *p);
fan_run_streams fan__task_run_streams(const fan_backward *p, const fan_node *n);
static inline fan_run_streams fan_task_run_streams(const fan_backward *p, const fan_node *n)
{
    return fan_streams_in_use() ? fan__task_run_streams(p, n) : (fan_run_streams){NULL, NULL};
}

/* fan_task_leaf_begin: before a leaf accumulates `sum`: *on: a hold on the stream that writes; NULL: on the CPU.
 * fan_task_leaf_end: after the write of `.grad` was queued. */
fan_status fan_task_leaf_begin(fan_backward *p, void *sum, const fan_run_streams *where, fan_stream **on,
                               fan_error *err);
fan_status fan_task_leaf_end(fan_backward *p, fan_node *leaf, fan_stream *on, fan_error *err);
/* fan_task_keep: a sum (NULL: none) is a result (E8), or went into a node without edges: at the end the caller's stream
 * waits for the node's. */
fan_status fan_task_keep(fan_backward *p, void *sum, const fan_run_streams *where, fan_error *err);
/* fan_task_produced_nothing: the same for a node that ran and delivered no gradient. */
fan_status fan_task_produced_nothing(fan_backward *p, const fan_run_streams *where, fan_error *err);
/* fan_task_join_capture: K1, before a node runs. fan_task_join_failed: at the end of a pass, also a failed one: S20,
 * and joins the streams that the pass made part of the capture, so that it can end. */
fan_status fan_task_join_capture(fan_backward *p, const fan_run_streams *where, fan_error *err);
void fan_task_join_failed(fan_backward *p);

#endif
