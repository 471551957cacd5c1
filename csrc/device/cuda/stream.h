/* stream: streams of the driver: handles, captures, the table's entries. */
#ifndef FAN_DEVICE_CUDA_STREAM_H
#define FAN_DEVICE_CUDA_STREAM_H

#include "device/cuda/part.h"

static inline fan__cuda_stream *fan__cuda_queue(const fan_stream *s) { return s->impl; }

/* fan__cuda_queue_of: the driver's handle; FAN_ERR_VALUE for another thread's own stream. */
fan_status fan__cuda_queue_of(const fan_stream *s, fan_cu_stream *out, fan_error *err);
/* fan__cuda_capture_of: the capture that s is in, 0: none; its graph too where asked for. */
fan_status fan__cuda_capture_of(fan_stream *s, uint64_t *id, fan_cu_graph *graph, fan_error *err);

/* fan__cuda_none_captured: FAN_ERR_CAPTURE where a stream of the device that is known is captured, or the legacy stream
 * must not be used. Of streams that nobody here has heard of nothing is known. */
fan_status fan__cuda_none_captured(fan_cuda_part *p, const char *what, fan_error *err);
/* fan__cuda_await_gone: waits for the whole device where a stream that was destroyed may still have work on it, unless
 * a known stream is captured: what it used can go back then. */
void fan__cuda_await_gone(fan_cuda_part *p);

fan_stream *fan__cuda_current(fan_device *d);
void fan__cuda_stream_fini(fan_stream *s);
fan_status fan__cuda_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status fan__cuda_capture_stream(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);
fan_status fan__cuda_sync(fan_stream *s, fan_error *err);

#endif
