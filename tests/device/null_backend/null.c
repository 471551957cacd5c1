/* null: a backend for tests/device/test_new_backend.py: host memory, one stream, work that runs when it is queued. */
#include "array/nditer.h"
#include "base/mem.h"
#include "device/memory.h"
#include "device/stream.h"

#include <pthread.h>

static fan_device device;

static fan_status null_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err)
{
    (void)d, (void)stream;
    *out = fan_alloc_data(bytes);
    return *out ? FAN_OK : fan_fail(err, FAN_ERR_DEVICE_NOMEM, "null:0 has no %zu bytes", bytes);
}

static void null_free(fan_device *d, void *data, size_t bytes)
{
    (void)d;
    fan_free_data(data, bytes);
}

static fan_status null_read(fan_stream *stream, const fan_array *dst, const fan_array *src, fan_error *err)
{
    (void)stream, (void)err;
    fan_array_copy(dst, src);
    return FAN_OK;
}

static fan_stream *null_current(fan_device *d)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static fan_stream *stream;
    (void)pthread_mutex_lock(&lock);
    if (!stream)
        stream = fan_stream_new(d, FAN_LEGACY, NULL);
    (void)pthread_mutex_unlock(&lock);
    return fan_stream_hold(stream);
}

static fan_status null_find_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err)
{
    if (handle > FAN_LEGACY)
        return fan_fail(err, FAN_ERR_VALUE, "null:0 has one stream, which has the handle 1");
    *out = null_current(d);
    return *out ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
}

static fan_status null_sync(fan_stream *s, fan_error *err)
{
    (void)s, (void)err;
    return FAN_OK;
}

static fan_status null_event_init(fan_event *e, fan_error *err)
{
    (void)e, (void)err;
    return FAN_OK;
}

static void null_event_fini(fan_event *e) { (void)e; }

static fan_status null_record(fan_event *e, fan_stream *s, fan_error *err)
{
    (void)e, (void)s, (void)err;
    return FAN_OK;
}

static fan_status null_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    (void)s, (void)e, (void)err;
    return FAN_OK;
}

static fan_status null_query(fan_event *e, bool *done, fan_error *err)
{
    (void)e, (void)err;
    *done = true;
    return FAN_OK;
}

static fan_status null_event_sync(fan_event *e, fan_error *err)
{
    (void)e, (void)err;
    return FAN_OK;
}

static fan_status null_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    (void)err;
    fan_job_run(job, true);
    fan_job_trace(d, s, job, 0, -1, -1);
    return FAN_OK;
}

static const fan_backend backend = {
    .name = "null",
    .has_streams = true,
    .alloc = null_alloc,
    .free = null_free,
    .read = null_read,
    .current = null_current,
    .find_stream = null_find_stream,
    .sync = null_sync,
    .event_init = null_event_init,
    .event_fini = null_event_fini,
    .record = null_record,
    .wait = null_wait,
    .query = null_query,
    .event_sync = null_event_sync,
    .run = null_run,
};

static int null_count(void) { return 1; }

static bool begun;

static void null_begin(void) { begun = fan_device_init(&device, &backend, NULL, 0, NULL) == 0; }

static fan_status null_find(long index, fan_device **out, fan_error *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (index != 0)
        return fan_fail(err, FAN_ERR_VALUE, "there is no null:%ld: there is one device", index);
    (void)pthread_once(&once, null_begin);
    *out = &device;
    return begun ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a device");
}

const fan_backend_entry fan_null_entry = {.backend = &backend, .count = null_count, .find = null_find};
