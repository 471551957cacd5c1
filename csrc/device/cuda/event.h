/* event: events of the driver: the table's entries. */
#ifndef FAN_DEVICE_CUDA_EVENT_H
#define FAN_DEVICE_CUDA_EVENT_H

#include "device/cuda/part.h"

fan_status fan__cuda_event_init(fan_event *e, fan_error *err);
void fan__cuda_event_fini(fan_event *e);
fan_status fan__cuda_record(fan_event *e, fan_stream *s, fan_error *err);
/* fan__cuda_note: FAN_ERR_CAPTURE if e may be inside a capture: then it must not be queried. */
fan_status fan__cuda_note(fan_event *e, fan_stream *s, fan_error *err);
fan_status fan__cuda_wait(fan_stream *s, fan_event *e, fan_error *err);
fan_status fan__cuda_query(fan_event *e, bool *done, fan_error *err);
bool fan__cuda_peek(fan_event *e);
fan_status fan__cuda_event_sync(fan_event *e, fan_error *err);

#endif
