/* check: is a contribution right for its slot (A8-A10, A12, A15, A16), and what must become of it first? */
#ifndef FAN_BUFFER_CHECK_H
#define FAN_BUFFER_CHECK_H

#include "buffer/plan.h"
#include "buffer/slot.h"

/* What the check found out about a contribution, under the lock: what it must become, and where it goes. */
typedef struct fan_arrival {
    bool reduce;        /* A9: sum it to the declared shape */
    bool cast;          /* A10: to the declared dtype */
    bool upload;        /* A12: a 0-d host gradient onto the slot's device */
    bool download;      /* A12: onto the host, where the slot is declared so */
    fan_dtype dtype;    /* after the cast */
    fan_dtype_set seen; /* the dtypes that the slot has seen, this one's included */
    int64_t weak_lo, weak_hi;
    fan_device *device;   /* the device that it will be on; NULL: it does not matter */
    fan_stream *producer; /* S4; no hold */
    fan_add_plan plan;
    size_t at; /* its place among the items */
} fan_arrival;

static inline bool fan_arrival_converts(const fan_arrival *a)
{
    return a->reduce || a->cast || a->upload || a->download;
}

/* fan_check_contribution: shape, dtype, device, key and parts (A8-A10, A12, A15, A16), then S3-S5, S8-S11. Changes
 * nothing. Under the slot's lock. `current`: the current stream of the device it will be on; `consumer`: the buffer's
 * stream, or who was put in its place (S7). */
fan_status fan_check_contribution(const fan_buffer *b, size_t slot, const fan_contribution *c, fan_stream *current,
                                  fan_stream *consumer, fan_arrival *out, fan_error *err);

#endif
