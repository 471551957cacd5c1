/* Memory: allocated, freed, copied, filled. */
#include "base/mem.h"
#include "fake/entry.h"
#include "fake/work.h"

#include <string.h>

static void memory_run_copy_in(fan__fake_work *w) { memcpy(fan__host(w->address), w->payload, w->bytes); }

static void memory_run_copy_out(fan__fake_work *w) { memcpy(w->to, fan__host(w->address), w->bytes); }

static void memory_run_fill(fan__fake_work *w) { memset(fan__host(w->address), w->byte, w->bytes); }

static void memory_run_free(fan__fake_work *w) { w->device->backend->free(w->device, fan__host(w->address), w->bytes); }

static fan_cu_result memory_allocate(const struct fan_cu_context *c, fan_stream *s, size_t bytes, uint64_t *out)
{
    fan_error err = {.status = FAN_OK};
    fan_device *d = fan_sim_device(fan__fake.m, c->device);
    void *data = NULL;
    if (!bytes)
        return INVALID_VALUE;
    fan__fake_lock();
    int failed = fan_grow((void **)&fan__fake.memory, &fan__fake.memory_cap, fan__fake.nmemory + 16,
                          sizeof *fan__fake.memory); /* several threads may be about to show theirs */
    fan__fake_unlock();
    fan__thing *t = failed ? NULL : fan__thing_new(MEMORY, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code = fan__fake_code(d->backend->alloc(d, s, bytes, &data, &err), &err);
    if (code) {
        fan__thing_drop(t);
        return code;
    }
    t->address = (uint64_t)(uintptr_t)data | FAN_FAKE_TAG;
    t->bytes = bytes;
    fan__thing_add(t);
    *out = t->address;
    return OK;
}

fan_cu_result fan_fake_MemAlloc(fan_cu_pointer *out, size_t bytes)
{
    CALL(MemAlloc);
    INSIDE(c);
    UNSAFE("cuMemAlloc");
    return memory_allocate(c, NULL, bytes, out);
}

fan_cu_result fan_fake_MemAllocAsync(fan_cu_pointer *out, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemAllocAsync);
    INSIDE(c);
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    code = memory_allocate(c, s, bytes, out);
    fan_stream_drop(s);
    return code;
}

/* memory_tell_release: the checker holds against each other all that touched the memory and this release of it. */
static void memory_tell_release(const fan__thing *t, fan_stream *s)
{
    fan_device *d = fan_sim_device(fan__fake.m, t->device);
    d->backend->dropped(d, fan__host(t->address), t->bytes, &s, s ? 1 : 0);
    fan__fake_note_races();
}

fan_cu_result fan_fake_MemFree(fan_cu_pointer p)
{
    CALL(MemFree);
    INSIDE(c);
    UNSAFE("cuMemFree");
    fan__thing *t = fan__thing_memory(p, 1);
    if (!t || t->address != p)
        return INVALID_VALUE;
    fan_device *d = fan_sim_device(fan__fake.m, t->device);
    size_t bytes = t->bytes;
    memory_tell_release(t, NULL);
    fan__thing_drop(t); /* before its address is anybody else's */
    d->backend->free(d, fan__host(p), bytes);
    return OK;
}

fan_cu_result fan_fake_MemFreeAsync(fan_cu_pointer p, fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemFreeAsync);
    INSIDE(c);
    fan__thing *t = fan__thing_memory(p, 1);
    if (!t || t->address != p)
        return INVALID_VALUE;
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    fan__fake_work *w = fan__work_new(memory_run_free, p, t->bytes, 0);
    if (w) {
        w->device = fan_sim_device(fan__fake.m, t->device);
        memory_tell_release(t, s);
        fan__thing_drop(t);
        code = fan__work_queue(s, "free", w, NULL, 0, NULL, 0);
    }
    fan_stream_drop(s);
    return w ? code : OUT_OF_MEMORY;
}

fan_cu_result fan_fake_PointerGetAttribute(void *out, int which, fan_cu_pointer p)
{
    CALL(PointerGetAttribute);
    const fan__thing *t = fan__thing_memory(p, 1);
    if (!t || which != FAN_CU_POINTER_DEVICE_ORDINAL)
        return INVALID_VALUE;
    *(int *)out = t->device;
    return OK;
}

fan_cu_result fan_fake_DeviceGetDefaultMemPool(fan_cu_pool *out, fan_cu_device d)
{
    CALL(DeviceGetDefaultMemPool);
    *out = (fan_cu_pool)(void *)&fan__fake.contexts[d];
    return OK;
}

fan_cu_result fan_fake_MemPoolTrimTo(fan_cu_pool pool, size_t keep)
{
    fan_error err = {.status = FAN_OK};
    bool ran = true;
    CALL(MemPoolTrimTo);
    UNSAFE("cuMemPoolTrimTo");
    (void)pool, (void)keep;
    while (ran) /* what was freed in the order of a stream goes */
        if (fan_sim_step(fan__fake.m, &ran, &err) != FAN_OK)
            break;
    return OK;
}

/* memory_transfer: the start of the three: the range must be memory. */
static fan_cu_result memory_transfer(const struct fan_cu_context *c, uint64_t p, size_t bytes, fan_cu_stream handle,
                                     fan_stream **s)
{
    if (!fan__thing_memory(p, bytes))
        return INVALID_VALUE;
    return fan__thing_stream(c, handle, s);
}

fan_cu_result fan_fake_MemcpyHtoDAsync(fan_cu_pointer to, const void *from, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyHtoDAsync);
    INSIDE(c);
    fan_cu_result code = memory_transfer(c, to, bytes, handle, &s);
    if (code)
        return code;
    fan__fake_work *w = fan__work_new(memory_run_copy_in, to, bytes, bytes);
    fan_array a = fan__bytes_at(to, bytes, dims);
    fan__thing *t = fan__thing_memory(to, bytes);
    if (w)
        memcpy(w->payload, from, bytes);
    if (t && (t->sent || (t->sent = fan_calloc(t->bytes)) != NULL))
        memcpy(t->sent + (to - t->address), from, bytes);
    code = w ? fan__work_queue(s, "copy in", w, NULL, 0, (fan_array *const[]){&a}, 1) : OUT_OF_MEMORY;
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_MemcpyDtoHAsync(void *to, fan_cu_pointer from, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyDtoHAsync);
    INSIDE(c);
    fan_cu_result code = memory_transfer(c, from, bytes, handle, &s);
    if (code)
        return code;
    fan__fake_work *w = fan__work_new(memory_run_copy_out, from, bytes, 0);
    fan_array a = fan__bytes_at(from, bytes, dims);
    if (w)
        w->to = to;
    code = w ? fan__work_queue(s, "copy out", w, (fan_array *const[]){&a}, 1, NULL, 0) : OUT_OF_MEMORY;
    if (code == OK) { /* into pageable memory: the call returns when it is there */
        fan_error err = {.status = FAN_OK};
        code = fan__fake_done(s->device->backend->sync(s, &err), &err);
        code = code ? code : c->lost;
    }
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_MemsetD8Async(fan_cu_pointer p, unsigned char byte, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemsetD8Async);
    INSIDE(c);
    fan_cu_result code = memory_transfer(c, p, bytes, handle, &s);
    if (code)
        return code;
    fan__fake_work *w = fan__work_new(memory_run_fill, p, bytes, 0);
    fan_array a = fan__bytes_at(p, bytes, dims);
    if (w)
        w->byte = byte;
    code = w ? fan__work_queue(s, "fill", w, NULL, 0, (fan_array *const[]){&a}, 1) : OUT_OF_MEMORY;
    fan_stream_drop(s);
    return code;
}
