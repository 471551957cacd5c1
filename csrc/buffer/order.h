/* order: carries out what sync planned: waits, records, record_stream, redirects, and the hand-over
 * to the consumer. `bit` is the plan bit of the step, by which a proof leaves it out
 * (fan_plan_bits); 0: it has none. */
#ifndef FAN_BUFFER_ORDER_H
#define FAN_BUFFER_ORDER_H

#include "buffer/fold_job.h"

static inline fan_stream_id fan_stream_id_of(const fan_stream *s)
{
    if (!s)
        return (fan_stream_id){0, 0};
    if (FAN_FAULT(STREAMS_BY_NUMBER))
        return (fan_stream_id){s->device->id, s->handle};
    return (fan_stream_id){s->device->id, s->id};
}

/* fan_slot_streams: C and A, for a plan. */
static inline fan_sync_slot fan_slot_streams(const fan_slot_state *state)
{
    return (fan_sync_slot){.consumer = fan_stream_id_of(state->consumer),
                           .accum = fan_stream_id_of(state->accum)};
}

/* fan_order_left_out: the bits that the proof leaves out on this device. */
uint64_t fan_order_left_out(fan_device *d);
/* fan_order_record: *out becomes an event recorded on s. Where the proof leaves out `bit`: an event
 * that was never recorded. */
fan_status fan_order_record(fan_buffer *b, fan_stream *s, uint64_t bit, fan_event **out,
                            fan_error *err);
/* fan_order_wait: s waits for e (NULL or never recorded: nothing), unless the proof leaves out
 * `bit`. A refusal by S7 names the slot. */
fan_status fan_order_wait(fan_buffer *b, size_t slot, fan_stream *s, fan_event *e, uint64_t bit,
                          fan_error *err);
/* fan_order_consumer: S7: the stream that consumes, instead of s, what is ready on t with event e
 * (NULL: none yet). It is t where t is captured, s is in no capture and redirection is on; else s.
 * *out is not held. s and t may be NULL. */
fan_status fan_order_consumer(fan_stream *s, fan_stream *t, const fan_event *e, fan_stream **out,
                              fan_error *err);
/* fan_order_record_stream: the memory of v is used on s (Lifetime). */
fan_status fan_order_record_stream(const fan_value *v, fan_stream *s, uint64_t bit, fan_error *err);

/* fan_order_wait_terms: S12, S13: A waits for every term, and uses it. */
fan_status fan_order_wait_terms(fan_fold *fold, fan_error *err);
/* fan_order_wait_users: *Reusable*, last condition: A waits for an event recorded now on every
 * other stream that used the memory. */
fan_status fan_order_wait_users(fan_fold *fold, const fan_array *a, fan_error *err);
/* fan_order_wait_taker: S22: `on`, A as a rule, waits for the taker's stream before it writes
 * out. */
fan_status fan_order_wait_taker(fan_fold *fold, fan_stream *on, const fan_sync_fold *plan,
                                fan_error *err);
/* fan_order_stream: returns the one of n streams, some of them NULL, that a plan names.
 *   NULL: the plan names none of them */
fan_stream *fan_order_stream(fan_stream_id id, fan_stream *const *among, size_t n);
/* fan_order_hand_over: S18, S19: `consumer` may use `v`, ready on R with event E. */
fan_status fan_order_hand_over(fan_buffer *b, size_t slot, const fan_value *value, fan_stream *R,
                               fan_event *E, fan_stream *consumer, uint64_t *rules, fan_error *err);

#endif
