/* trace: the lines that devices write to this thread's traces. */
#ifndef FAN_DEVICE_TRACE_H
#define FAN_DEVICE_TRACE_H

#include "base/trace.h"
#include "device/stream.h"

/* fan__device_trace: writes a line about a stream, another one (NULL: none) and an event (0: none). */
void fan__device_trace(fan_trace_kind kind, const fan_device *d, const fan_stream *s, const fan_stream *other,
                       uint64_t event, uint64_t bytes);
/* fan_job_trace: writes the job's line (KERNEL or COPY) to this thread's traces; begin_ns: when a finished job began
 * (base/trace.h), 0: unknown; times on the device's clock, < 0: unknown. */
void fan_job_trace(const fan_device *d, const fan_stream *s, const fan_job *job, uint64_t begin_ns, double start_us,
                   double end_us);
void fan_jobs_trace(const fan_device *d, const fan_stream *s, const fan_job *jobs, size_t n, const char *label,
                    double start_us, double end_us);

#endif
