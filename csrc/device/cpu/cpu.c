/* cpu: the smallest example of a backend: no streams, no events; work runs at once, so there are no
 * waits. First its functions, then its table, its one device, and how the device is found. */
#include "array/nditer.h"
#include "base/mem.h"
#include "device/cpu/recording.h"
#include "device/memory.h"
#include "device/stream.h"

static fan_status cpu_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out,
                            fan_error *err)
{
    (void)d;
    (void)stream;
    *out = fan_alloc_data(bytes);
    if (!*out) {
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s", bytes,
                        FAN_PLURAL(bytes));
    }
    return FAN_OK;
}

static void cpu_free(fan_device *d, void *data, size_t bytes)
{
    (void)d;
    fan_free_data(data, bytes);
}

static fan_status cpu_read(fan_stream *stream, const fan_array *dst, const fan_array *src,
                           fan_error *err)
{
    (void)stream;
    (void)err;
    fan_array_copy(dst, src);
    return FAN_OK;
}

static fan_status cpu_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    bool recorded;
    FAN_TRY(fan_recording_job(job, &recorded, err));
    if (recorded)
        return FAN_OK;
    uint64_t begin_ns = 0;
    if (atomic_load_explicit(&fan_traces, memory_order_relaxed))
        begin_ns = fan_trace_ns();
    fan_job_run(job, true);
    fan_job_trace(d, s, job, begin_ns, -1, -1);
    return FAN_OK;
}

static const fan_backend backend = {
    .name = "cpu",
    .has_streams = false,
    .dlpack = {1, 3}, /* kDLCPU, kDLCUDAHost */
    .alloc = cpu_alloc,
    .free = cpu_free,
    .read = cpu_read,
    .run = cpu_run,
    .recorder = &fan_cpu_recorder,
};

static fan_device device = {
    .backend = &backend,
    .index = -1,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

fan_device *fan_cpu(void)
{
    return &device;
}

static fan_status cpu_find(long index, fan_device **out, fan_error *err)
{
    (void)index;
    (void)err;
    *out = fan_cpu();
    return FAN_OK;
}

const fan_backend_entry fan_cpu_entry = {
    .backend = &backend,
    .bare_name = true,
    .find = cpu_find,
};
