/* convert: contributions converted, or copied, on their way into a slot (A9, A10, A12, S21). */
#ifndef FAN_BUFFER_CONVERT_H
#define FAN_BUFFER_CONVERT_H

#include "buffer/check.h"

/* fan_contribution_convert: the converted gradient as a value of its own; `on` orders the work. */
fan_status fan_contribution_convert(fan_buffer *b, size_t slot, const fan_contribution *c, const fan_arrival *a,
                                    fan_stream *on, fan_value *out, fan_error *err);

#endif
