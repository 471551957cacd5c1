#include "device/trace.h"

#include <stdio.h>

void fan__device_trace(fan_trace_kind kind, const fan_device *d, const fan_stream *s, const fan_stream *other,
                       uint64_t event, uint64_t bytes)
{
    if (!fan_trace_on())
        return;
    fan_trace_line line = {.kind = (uint8_t)kind,
                           .device = (int16_t)d->index,
                           .slot = -1,
                           .key = -1,
                           .stream = s ? s->handle : 0,
                           .other = other ? other->handle : 0,
                           .event = event,
                           .bytes = bytes,
                           .start_us = -1,
                           .end_us = -1};
    if (other) {
        char text[24];
        snprintf(line.label, sizeof line.label, "stream %llu of %s", (unsigned long long)other->handle,
                 fan_device_text(other->device, text, sizeof text));
    }
    fan_trace_put(&line);
}

void fan_job_trace(const fan_device *d, const fan_stream *s, const fan_job *job, uint64_t begin_ns, double start_us,
                   double end_us)
{
    if (!fan_trace_on())
        return;
    bool copy = job->kind == FAN_JOB_COPY || job->kind == FAN_JOB_UPLOAD;
    fan_trace_line line = {.kind = copy ? FAN_TRACE_COPY : FAN_TRACE_KERNEL,
                           .device = s ? (int16_t)d->index : -1,
                           .slot = -1,
                           .key = -1,
                           .count = (uint32_t)job->n,
                           .stream = s ? s->handle : 0,
                           .bytes = fan_job_bytes(job),
                           .begin_ns = begin_ns,
                           .start_us = start_us,
                           .end_us = end_us};
    for (size_t i = 0; i < job->n; i++)
        line.in_place |= job->kind == FAN_JOB_SUM && job->in[i].array->data == job->out->data;
    snprintf(line.label, sizeof line.label, "%s", job->label ? job->label : fan_job_word(job->kind));
    fan_trace_put(&line);
}

void fan_jobs_trace(const fan_device *d, const fan_stream *s, const fan_job *jobs, size_t n, const char *label,
                    double start_us, double end_us)
{
    if (!fan_trace_on())
        return;
    fan_trace_line line = {.kind = FAN_TRACE_KERNEL,
                           .device = (int16_t)d->index,
                           .slot = -1,
                           .key = -1,
                           .count = (uint32_t)n,
                           .stream = s->handle,
                           .start_us = start_us,
                           .end_us = end_us};
    for (size_t i = 0; i < n; i++)
        line.bytes += fan_job_bytes(&jobs[i]);
    snprintf(line.label, sizeof line.label, "%s", label);
    fan_trace_put(&line);
}
