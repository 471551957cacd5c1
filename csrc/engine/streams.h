/* streams: on which streams does a pass run, and who waits for whom at its end? (E4, S20; docs/rules.md)
 *
 * The rest of the waiting is the buffers': a gradient is added with its producer's stream for P, a buffer has its
 * consumer's for C, so that a sum is taken, or a single gradient forwarded over, by S4 to S19. What is left for the
 * pass:
 *
 *   which streams are current while a node is at work    those of where it was made; its own is the first of them
 *   a leaf's first write in a pass                       its stream waits for the caller's
 *   the end                                              the caller's stream of each device waits for those of leaves,
 *                                                        of nodes that gave nothing on, and of captured inputs
 *   a pass that is captured into a graph                 any stream but the legacy default joins the capture (K1);
 *                                                        with redirection the caller's stands in for that one (S7)
 *
 * A worked case. A leaf of stream w gets a gradient of a node on s; the caller is on c:
 *
 *   c  ==zero .grad==*1                      ^3 [step]     S20   c waits for w
 *   s      ==g==*2
 *   w              ^1^2 [.grad += g]*3                     S18   w waits for s, and before it writes for c
 *
 * What can go wrong: a hook that runs before the wait; a node made on the legacy stream that is run on the caller's;
 * the end of a pass that failed and waits for nothing, so that the caller reads a `.grad` that is being written.
 *
 * A pass where no stream was ever made current pays a load for each of these questions.
 */
#ifndef FAN_ENGINE_STREAMS_H
#define FAN_ENGINE_STREAMS_H

#include "engine/task.h"

/* Where a node is at work. Borrowed. */
typedef struct fan_run_streams {
    fan_stream_set *set; /* current; NULL: none is pushed */
    fan_stream *own;     /* P of what it gives, C of what it gets; NULL: what is current on a gradient's device */
} fan_run_streams;

fan_status fan_task_streams_begin(fan_backward *p, fan_error *err);
void fan_task_streams_fini(fan_backward *p);
fan_run_streams fan__task_run_streams(const fan_backward *p, const fan_node *n);
static inline fan_run_streams fan_task_run_streams(const fan_backward *p, const fan_node *n)
{
    return fan_streams_in_use() ? fan__task_run_streams(p, n) : (fan_run_streams){NULL, NULL};
}

/* A leaf that accumulates `sum`, on its streams: *on: the stream that does, a hold; NULL: it is on the CPU.
 * fan_task_leaf_end: its `.grad` is written. */
fan_status fan_task_leaf_begin(fan_backward *p, void *sum, const fan_run_streams *where, fan_stream **on,
                               fan_error *err);
fan_status fan_task_leaf_end(fan_backward *p, fan_node *leaf, fan_stream *on, fan_error *err);
/* fan_task_keep: a sum goes to the caller (E8), or to a node without edges, NULL for none: at the end the caller's
 * stream waits for the node's. */
fan_status fan_task_keep(fan_backward *p, void *sum, const fan_run_streams *where, fan_error *err);
/* fan_task_produced_nothing: so does it for a node that ran and gave no gradient on. */
fan_status fan_task_produced_nothing(fan_backward *p, const fan_run_streams *where, fan_error *err);
/* fan_task_join_capture: K1: a node is about to run. fan_task_join_failed: the end of a pass that has not come to its
 * end: S20, and whatever was pulled in is joined, so that the capture can end. */
fan_status fan_task_join_capture(fan_backward *p, const fan_run_streams *where, fan_error *err);
void fan_task_join_failed(fan_backward *p);

#endif
