/* stream: streams of the driver: handles, captures, the table's entries. */
#ifndef FAN_DEVICE_CUDA_STREAM_H
#define FAN_DEVICE_CUDA_STREAM_H

#include "device/cuda/part.h"

static inline fan__cuda_stream *fan__cuda_queue(const fan_stream *s) { return s->impl; }

/* fan__cuda_queue_of: returns the driver's handle; FAN_ERR_VALUE for another thread's own stream. */
fan_status fan__cuda_queue_of(const fan_stream *s, fan_cu_stream *out, fan_error *err);
/* fan__cuda_capture_of: returns the capture of s, 0: none; and its graph, if `graph` is not NULL. */
fan_status fan__cuda_capture_of(fan_stream *s, uint64_t *id, fan_cu_graph *graph, fan_error *err);

/* fan__cuda_none_captured: FAN_ERR_CAPTURE if a known stream of the device is captured, or the legacy stream must not
 * be used. Streams that fanin has not met are not covered. */
fan_status fan__cuda_none_captured(fan_cuda_part *p, const char *what, fan_error *err);
/* fan__cuda_await_gone: waits for the whole device if a destroyed stream may still have work on it, unless a known
 * stream is captured: its memory can be freed then. */
void fan__cuda_await_gone(fan_cuda_part *p);

fan_stream *fan__cuda_current(fan_device *d);
void fan__cuda_stream_fini(fan_stream *s);
fan_status fan__cuda_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status fan__cuda_capture_stream(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);
fan_status fan__cuda_sync(fan_stream *s, fan_error *err);

/* event: events of the driver: the table's entries. */
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
