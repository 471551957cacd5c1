/* add_convert: what a contribution must become before it is parked, and how it does. */
#ifndef FAN_BUFFER_ADD_CONVERT_H
#define FAN_BUFFER_ADD_CONVERT_H

#include "buffer/internal.h"

/* The conversions of a contribution before it is parked. */
typedef struct fan_conversion {
    bool reduce;        /* A9: sum it to the declared shape */
    bool whole;         /* a partial one is made dense first (P5) */
    bool cast;          /* A10: to the declared dtype */
    fan_move move;      /* A12: onto the slot's device */
    fan_dtype dtype;    /* after the cast */
    fan_device *device; /* the device that it will be on; NULL: it does not matter */
} fan_conversion;

/* fan_add_convert: *out becomes the contribution converted by `to`, in memory of its own where it
 * is copied or changed; made in the order of `on` (NULL: on the host). */
fan_status fan_add_convert(fan_buffer *b, size_t slot, const fan_contribution *contribution,
                           const fan_conversion *to, fan_stream *on, fan_value *out,
                           fan_error *err);

#endif
