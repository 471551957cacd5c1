/* Memory: allocated, freed, copied, filled. */
#include "base/mem.h"
#include "fake_cuda/entry.h"
#include "fake_cuda/work.h"

#include <string.h>

static void memory_run_copy_in(fan__fake_work *w)
{
    memcpy(fan__host(w->address), w->payload, w->bytes);
}

static void memory_run_copy_out(fan__fake_work *w)
{
    memcpy(w->to, fan__host(w->address), w->bytes);
}

static void memory_run_fill(fan__fake_work *w)
{
    memset(fan__host(w->address), w->byte, w->bytes);
}

/* memory_run_copy_late: the device reads the host's memory itself, also after it was reused. */
static void memory_run_copy_late(fan__fake_work *w)
{
    memcpy(fan__host(w->address), w->to, w->bytes);
}

static void memory_run_free(fan__fake_work *w)
{
    fan__thing *pool = w->to;
    fan__fake_lock();
    pool->used -= w->bytes;
    pool->freed -= w->bytes;
    fan__fake_unlock();
    w->device->backend->free(w->device, fan__host(w->address), w->bytes);
}

/* memory_taken: allocated bytes of a device. Locked. */
static uint64_t memory_taken(int device)
{
    uint64_t taken = fan__fake.plain[device] + fan__fake.execs[device];
    for (const fan__thing *t = fan__fake.things[A_POOL]; t; t = t->next) {
        if (t->device == device)
            taken += t->reserved;
    }
    return taken;
}

/* memory_fits: whether the device has so many free bytes; a pool takes them from the system, if it
 * has not got them. Locked. */
static bool memory_fits(int device, fan__thing *pool, size_t bytes)
{
    uint64_t more = bytes;
    if (pool)
        more = fan__larger(pool->used + bytes, pool->reserved) - pool->reserved;
    if (memory_taken(device) + more > fan__fake.capacity)
        return false;
    if (pool) {
        pool->used += bytes;
        pool->reserved += more;
        fan__fake.mapped += more > 0;
    } else {
        fan__fake.plain[device] += bytes;
    }
    return true;
}

static bool memory_claim(int device, fan__thing *pool, size_t bytes)
{
    fan__fake_lock();
    bool fits = memory_fits(device, pool, bytes);
    fan__fake_unlock();
    return fits;
}

static void memory_unclaim(int device, fan__thing *pool, size_t bytes)
{
    fan__fake_lock();
    if (pool) {
        pool->used -= bytes;
    } else {
        fan__fake.plain[device] -= bytes;
    }
    fan__fake_unlock();
}

static fan_cu_result memory_allocate(const struct fan_cu_context *c, fan_stream *s,
                                     fan__thing *pool, size_t bytes, uint64_t *out)
{
    fan_error err = {.status = FAN_OK};
    fan_device *d = fan_sim_device(fan__fake.m, c->device);
    void *data = NULL;
    if (!bytes)
        return INVALID_VALUE;
    fan__fake_lock();
    int failed = fan_grow((void **)&fan__fake.memory, &fan__fake.memory_cap, fan__fake.nmemory + 16,
                          /* several threads may be about to show theirs */
                          sizeof *fan__fake.memory);
    fan__fake_unlock();
    fan__thing *t = failed ? NULL : fan__thing_new(MEMORY, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code = OUT_OF_MEMORY;
    if (memory_claim(c->device, pool, bytes)) {
        code = fan__fake_code(d->backend->alloc(d, s, bytes, &data, &err), &err);
        if (code)
            memory_unclaim(c->device, pool, bytes);
    }
    if (code) {
        fan__thing_drop(t);
        return code;
    }
    t->address = (uint64_t)(uintptr_t)data | FAN_FAKE_TAG;
    t->bytes = bytes;
    t->pool = pool;
    fan__thing_add(t);
    *out = t->address;
    return OK;
}

fan_cu_result fan_fake_MemAlloc(fan_cu_pointer *out, size_t bytes)
{
    CALL(MemAlloc);
    INSIDE(c);
    BESIDE(MemAlloc);
    return memory_allocate(c, NULL, NULL, bytes, out);
}

/* memory_from_pool: where there is no more memory, what was freed on streams that have not come to
 * it yet is waited for, as by the dependencies that a driver puts in. */
static fan_cu_result memory_from_pool(const struct fan_cu_context *c, fan__thing *pool,
                                      size_t bytes, fan_stream *s, uint64_t *out)
{
    fan_error err = {.status = FAN_OK};
    bool ran = true;
    fan_cu_result code = memory_allocate(c, s, pool, bytes, out);
    while (code == OUT_OF_MEMORY && ran && pool->freed) {
        if (fan_sim_step(fan__fake.m, &ran, &err) != FAN_OK)
            break;
        code = memory_allocate(c, s, pool, bytes, out);
    }
    return code;
}

static void memory_run_node(fan__fake_work *w)
{
    (void)w;
}

/* memory_node: on a captured stream it becomes a node of the graph; elsewhere it is as unsafe as
 * call `number` is. */
static fan_cu_result memory_node(fan_stream *s, const char *name, int number)
{
    if (!fan_sim_capture_state(fan__fake.m, s, NULL))
        return fan__fake_beside(number);
    fan__fake_work *w = fan__work_new(memory_run_node, 0, 0, 0);
    return fan__work_queue(s, name, w, NULL, 0, NULL, 0);
}

fan_cu_result fan_fake_MemAllocFromPoolAsync(fan_cu_pointer *out, size_t bytes, fan_cu_pool pool,
                                             fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemAllocFromPoolAsync);
    INSIDE(c);
    fan__thing *t = fan__thing_find(A_POOL, pool);
    fan_cu_result code = t ? fan__thing_stream(c, handle, &s) : INVALID_VALUE;
    if (code)
        return code;
    code = memory_node(s, FAN__FAKE_ALLOC, NUMBER_MemAllocFromPoolAsync);
    if (code == OK)
        code = memory_from_pool(c, t, bytes, s, out);
    fan_stream_drop(s);
    return code;
}

/* memory_tell_release: the checker holds against each other all that touched the memory and this
 * release of it. */
static void memory_tell_release(const fan__thing *t, fan_stream *s)
{
    fan_device *d = fan_sim_device(fan__fake.m, t->device);
    d->backend->dropped(d, fan__host(t->address), t->bytes, &s, s != NULL);
    fan__fake_note_races();
}

fan_cu_result fan_fake_MemFree(fan_cu_pointer p)
{
    fan_error err = {.status = FAN_OK};
    CALL(MemFree);
    INSIDE(c);
    BESIDE(MemFree);
    fan__thing *t = fan__thing_memory(p, 1);
    if (!t || t->address != p)
        return INVALID_VALUE;
    fan_device *d = fan_sim_device(fan__fake.m, t->device);
    size_t bytes = t->bytes;
    fan__fake_note_races();
    (void)fan__fake_done(fan_sim_synchronize(fan__fake.m, &err),
                         &err); /* it waits, so that freeing too early does no harm */
    fan__fake_synchronized();
    memory_tell_release(t, NULL);
    memory_unclaim(t->device, t->pool, bytes);
    fan__thing_drop(t); /* before its address is allocated again */
    d->backend->free(d, fan__host(p), bytes);
    return c->lost;
}

fan_cu_result fan_fake_MemFreeAsync(fan_cu_pointer p, fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemFreeAsync);
    INSIDE(c);
    BESIDE(MemFreeAsync);
    fan__thing *t = fan__thing_memory(p, 1);
    if (!t || t->address != p || !t->pool)
        return INVALID_VALUE;
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    fan__fake_work *w = fan__work_new(memory_run_free, p, t->bytes, 0);
    if (w) {
        w->device = fan_sim_device(fan__fake.m, t->device);
        w->to = t->pool;
        memory_tell_release(t, s);
        fan__fake_lock();
        t->pool->freed += t->bytes;
        fan__fake_unlock();
        fan__thing_drop(t);
        code = fan__work_queue(s, "free", w, NULL, 0, NULL, 0);
    }
    fan_stream_drop(s);
    return w ? code : OUT_OF_MEMORY;
}

fan_cu_result fan_fake_MemGetInfo(size_t *unused, size_t *all)
{
    CALL(MemGetInfo);
    INSIDE(c);
    BESIDE(MemGetInfo);
    fan__fake_lock();
    uint64_t taken = memory_taken(c->device);
    *all = (size_t)fan__fake.capacity;
    *unused = (size_t)(fan__fake.capacity - fan__smaller(taken, fan__fake.capacity));
    fan__fake_unlock();
    return OK;
}

fan_cu_result fan_fake_PointerGetAttribute(void *out, int which, fan_cu_pointer p)
{
    CALL(PointerGetAttribute);
    BESIDE(PointerGetAttribute);
    const fan__thing *t = fan__thing_memory(p, 1);
    if (!t || which != FAN_CU_POINTER_DEVICE_ORDINAL)
        return INVALID_VALUE;
    *(int *)out = t->device;
    return OK;
}

fan_cu_result fan_fake_MemPoolCreate(fan_cu_pool *out, const fan_cu_pool_props *props)
{
    CALL(MemPoolCreate);
    BESIDE(MemPoolCreate);
    bool on_device = props->location == FAN_CU_LOCATION_DEVICE;
    if (props->allocation != FAN_CU_ALLOCATION_PINNED || props->handles || !on_device)
        return INVALID_VALUE;
    if (props->device < 0 || props->device >= fan__fake.devices)
        return INVALID_VALUE;
    *out = (fan_cu_pool)(void *)fan__thing_made(A_POOL, props->device);
    return fan__ok_or(*out, OUT_OF_MEMORY);
}

/* Its memory may be in use: the pool goes with the machine. */
fan_cu_result fan_fake_MemPoolDestroy(fan_cu_pool pool)
{
    CALL(MemPoolDestroy);
    BESIDE(MemPoolDestroy);
    fan__thing *t = fan__thing_find(A_POOL, pool);
    if (!t)
        return INVALID_VALUE;
    fan__fake_lock();
    fan__thing_remove(t);
    t->kind = RETIRED;
    fan__fake_unlock();
    fan__thing_add(t);
    return OK;
}

fan_cu_result fan_fake_MemPoolSetAttribute(fan_cu_pool pool, int which, void *value)
{
    CALL(MemPoolSetAttribute);
    BESIDE(MemPoolSetAttribute);
    fan__thing *t = fan__thing_find(A_POOL, pool);
    if (!t || which != FAN_CU_POOL_RELEASE_THRESHOLD)
        return INVALID_VALUE;
    memcpy(&t->threshold, value, sizeof t->threshold);
    return OK;
}

fan_cu_result fan_fake_MemPoolGetAttribute(fan_cu_pool pool, int which, void *value)
{
    CALL(MemPoolGetAttribute);
    BESIDE(MemPoolGetAttribute);
    const fan__thing *t = fan__thing_find(A_POOL, pool);
    if (!t || which != FAN_CU_POOL_RESERVED)
        return INVALID_VALUE;
    memcpy(value, &t->reserved, sizeof t->reserved);
    return OK;
}

/* What is freed by work that has not run is in use. */
fan_cu_result fan_fake_MemPoolTrimTo(fan_cu_pool pool, size_t keep)
{
    CALL(MemPoolTrimTo);
    BESIDE(MemPoolTrimTo);
    fan__thing *t = fan__thing_find(A_POOL, pool);
    if (!t)
        return INVALID_VALUE;
    fan__fake_lock();
    t->reserved = fan__smaller(t->reserved, fan__larger(t->used, keep));
    fan__fake_unlock();
    return OK;
}

/* memory_transfer: the start of the three: the range must be memory. */
static fan_cu_result memory_transfer(const struct fan_cu_context *c, uint64_t p, size_t bytes,
                                     fan_cu_stream handle, fan_stream **s)
{
    if (!fan__thing_memory(p, bytes))
        return INVALID_VALUE;
    return fan__thing_stream(c, handle, s);
}

/* memory_write: the end of those that write; takes w, which may be NULL, and the hold on s. */
static fan_cu_result memory_write(fan_stream *s, const char *name, fan__fake_work *w, fan_array *a)
{
    fan_cu_result code = fan__work_queue(s, name, w, NULL, 0, (fan_array *const[]){a}, 1);
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_MemcpyHtoDAsync(fan_cu_pointer to, const void *from, size_t bytes,
                                       fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyHtoDAsync);
    INSIDE(c);
    BESIDE(MemcpyHtoDAsync);
    fan_cu_result code = memory_transfer(c, to, bytes, handle, &s);
    if (code)
        return code;
    fan__fake_work *w = fan__work_new(
        fan__fake.coherent ? memory_run_copy_late : memory_run_copy_in, to, bytes, bytes);
    fan_array a = fan__bytes_at(to, bytes, dims);
    fan__thing *t = fan__thing_memory(to, bytes);
    if (w) {
        memcpy(w->payload, from, bytes);
        w->to = (void *)(uintptr_t)from; /* only read */
    }
    if (t && (t->sent || (t->sent = fan_calloc(t->bytes)) != NULL))
        memcpy(t->sent + (to - t->address), from, bytes);
    return memory_write(s, "copy in", w, &a);
}

fan_cu_result fan_fake_MemcpyDtoHAsync(void *to, fan_cu_pointer from, size_t bytes,
                                       fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyDtoHAsync);
    INSIDE(c);
    BESIDE(MemcpyDtoHAsync);
    fan_cu_result code = memory_transfer(c, from, bytes, handle, &s);
    if (code)
        return code;
    fan__fake_work *w = fan__work_new(memory_run_copy_out, from, bytes, 0);
    fan_array a = fan__bytes_at(from, bytes, dims);
    if (w)
        w->to = to;
    code = fan__work_queue(s, "copy out", w, (fan_array *const[]){&a}, 1, NULL, 0);
    if (code == OK) { /* into pageable memory: the call returns when it is there */
        fan_error err = {.status = FAN_OK};
        code = fan__fake_done(s->device->backend->sync(s, &err), &err);
        code = fan__first_of(code, c->lost);
    }
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_MemsetD8Async(fan_cu_pointer p, unsigned char byte, size_t bytes,
                                     fan_cu_stream handle)
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
    return memory_write(s, "fill", w, &a);
}

/* What callers of the driver use, and the backend does not. */

API cuMemAllocAsync(fan_cu_pointer *out, size_t bytes, fan_cu_stream handle);

/* From the pool of the device, which keeps nothing: here a pool that the first call makes. */
fan_cu_result cuMemAllocAsync(fan_cu_pointer *out, size_t bytes, fan_cu_stream handle)
{
    fan_cu_pool pool = NULL;
    INSIDE(c);
    fan__fake_lock();
    for (fan__thing *t = fan__fake.things[A_POOL]; t && !pool; t = t->next) {
        if (t->device == c->device && t->refs)
            pool = (fan_cu_pool)(void *)t;
    }
    fan__fake_unlock();
    if (!pool) {
        fan__thing *t = fan__thing_made(A_POOL, c->device);
        if (!t)
            return OUT_OF_MEMORY;
        t->refs = 1;
        pool = (fan_cu_pool)(void *)t;
    }
    return fan_fake_MemAllocFromPoolAsync(out, bytes, pool, handle);
}
