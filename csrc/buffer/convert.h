/* convert: contributions converted, or copied, on their way into a slot (A9, A10, A12, S21). */
#ifndef FAN_BUFFER_CONVERT_H
#define FAN_BUFFER_CONVERT_H

#include "buffer/internal.h"

/* What a contribution must become before it is parked. */
typedef struct fan_conversion {
    bool reduce;        /* A9: sum it to the declared shape */
    bool cast;          /* A10: to the declared dtype */
    bool upload;        /* A12: a 0-d host gradient onto the slot's device */
    bool download;      /* A12: onto the host, where the slot is declared so */
    fan_dtype dtype;    /* after the cast */
    fan_device *device; /* the device that it will be on; NULL: it does not matter */
} fan_conversion;

/* fan_contribution_convert: the converted gradient as a value of its own; `on` orders the work. */
fan_status fan_contribution_convert(fan_buffer *b, size_t slot, const fan_contribution *c, const fan_conversion *to,
                                    fan_stream *on, fan_value *out, fan_error *err);

#endif
