/* The driver, its devices and contexts, and its functions by name. */
#include "fake/entry.h"

#include <stdio.h>
#include <string.h>

/* X(number, name, text): the codes that are known by name. */
#define CODE_LIST(X)                                                                                               \
    X(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")                                                           \
    X(2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")                                                              \
    X(3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error")                                                     \
    X(4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down")                                                       \
    X(34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library")                                              \
    X(35, "CUDA_ERROR_INSUFFICIENT_DRIVER", "CUDA driver version is insufficient for CUDA runtime version")        \
    X(100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")                                           \
    X(101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")                                                  \
    X(200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid")                                           \
    X(201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context")                                                 \
    X(209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device")             \
    X(214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered")                                  \
    X(400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle")                                                 \
    X(500, "CUDA_ERROR_NOT_FOUND", "named symbol not found")                                                       \
    X(600, "CUDA_ERROR_NOT_READY", "device not ready")                                                             \
    X(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered")                               \
    X(701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch")                        \
    X(709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed")                                              \
    X(716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address")                                                  \
    X(719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure")                                               \
    X(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination") \
    X(804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW") \
    X(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing")            \
    X(901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture")     \
    X(902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences")   \
    X(903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began")          \
    X(904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work")                             \
    X(905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream")       \
    X(906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",                                                                   \
      "operation would make the legacy stream depend on a capturing blocking stream")                              \
    X(907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream") \
    X(908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",                                                               \
      "attempt to terminate a thread-local capture sequence from another thread")                                  \
    X(999, "CUDA_ERROR_UNKNOWN", "unknown error")

fan_cu_result fan_fake_Init(unsigned flags)
{
    CALL(Init);
    fan__fake.initialised = flags == 0;
    return flags ? INVALID_VALUE : OK;
}

fan_cu_result fan_fake_DriverGetVersion(int *version)
{
    CALL(DriverGetVersion);
    *version = fan__fake.version;
    return OK;
}

static fan_cu_result driver_code(fan_cu_result code, const char **name, const char **text)
{
    static const struct {
        int code;
        const char *name, *text;
    } codes[] = {
#define X(number, name, text) {number, name, text},
        CODE_LIST(X)
#undef X
    };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code == code) {
            *(name ? name : text) = name ? codes[i].name : codes[i].text;
            return OK;
        }
    return INVALID_VALUE;
}

fan_cu_result fan_fake_GetErrorName(fan_cu_result code, const char **name) { return driver_code(code, name, NULL); }

fan_cu_result fan_fake_GetErrorString(fan_cu_result code, const char **text) { return driver_code(code, NULL, text); }

fan_cu_result fan_fake_DeviceGetCount(int *count)
{
    CALL(DeviceGetCount);
    *count = fan__fake.devices;
    return OK;
}

fan_cu_result fan_fake_DeviceGet(fan_cu_device *out, int ordinal)
{
    CALL(DeviceGet);
    *out = ordinal;
    return ordinal >= 0 && ordinal < fan__fake.devices ? OK : INVALID_DEVICE;
}

fan_cu_result fan_fake_DeviceGetName(char *name, int size, fan_cu_device d)
{
    CALL(DeviceGetName);
    (void)d;
    snprintf(name, (size_t)size, "fanin's fake device");
    return OK;
}

fan_cu_result fan_fake_DeviceGetAttribute(int *out, int which, fan_cu_device d)
{
    CALL(DeviceGetAttribute);
    (void)d;
    switch (which) {
    case FAN_CU_ATTRIBUTE_MULTIPROCESSORS:
        *out = 1;
        return OK;
    case FAN_CU_ATTRIBUTE_MEMORY_POOLS:
        *out = fan__fake.pools;
        return OK;
    default:
        *out = which == FAN_CU_ATTRIBUTE_MAJOR ? 7 : 5;
        return OK;
    }
}

fan_cu_result fan_fake_DevicePrimaryCtxRetain(fan_cu_context *out, fan_cu_device d)
{
    CALL(DevicePrimaryCtxRetain);
    if (d < 0 || d >= fan__fake.devices)
        return INVALID_DEVICE;
    fan__fake.contexts[d].retained++;
    *out = &fan__fake.contexts[d];
    return OK;
}

fan_cu_result fan_fake_DevicePrimaryCtxRelease(fan_cu_device d)
{
    CALL(DevicePrimaryCtxRelease);
    if (d < 0 || d >= fan__fake.devices || fan__fake.contexts[d].retained == 0)
        return INVALID_CONTEXT;
    fan__fake.contexts[d].retained--;
    return OK;
}

fan_cu_result fan_fake_DevicePrimaryCtxGetState(fan_cu_device d, unsigned *flags, int *active)
{
    CALL(DevicePrimaryCtxGetState);
    if (d < 0 || d >= fan__fake.devices)
        return INVALID_DEVICE;
    *flags = 0;
    *active = fan__fake.contexts[d].retained > 0;
    return OK;
}

fan_cu_result fan_fake_CtxGetCurrent(fan_cu_context *out)
{
    CALL(CtxGetCurrent);
    *out = fan__fake_current();
    return OK;
}

fan_cu_result fan_fake_CtxPushCurrent(fan_cu_context c)
{
    CALL(CtxPushCurrent);
    (void)fan__fake_current();
    bool known = false;
    for (int i = 0; i < fan__fake.devices; i++)
        known |= c == &fan__fake.contexts[i];
    if (!known || !c->retained)
        return INVALID_CONTEXT;
    if (fan__fake_here.depth == MOST_DEPTH)
        return OUT_OF_MEMORY;
    fan__fake_here.stack[fan__fake_here.depth++] = c;
    return OK;
}

fan_cu_result fan_fake_CtxPopCurrent(fan_cu_context *out)
{
    struct fan_cu_context *c = fan__fake_current();
    if (!c)
        return INVALID_CONTEXT;
    *out = c;
    fan__fake_here
        .depth--; /* a pop that is told to fail has popped all the same: nothing else would leave the thread in order */
    CALL(CtxPopCurrent);
    return OK;
}

fan_cu_result fan_fake_CtxSynchronize(void)
{
    fan_error err = {.status = FAN_OK};
    CALL(CtxSynchronize);
    INSIDE(c);
    settle();
    return done(fan_sim_synchronize(fake.m, &err), &err);
}

fan_cu_result fan_fake_ModuleLoadData(fan_cu_module *out, const void *image)
{
    CALL(ModuleLoadData);
    INSIDE(c);
    UNSAFE("cuModuleLoadData");
    uint32_t magic = 0;
    if (!image)
        return INVALID_VALUE;
    memcpy(&magic, image, sizeof magic);
    if (magic != FATBIN && !strstr(image, ".entry fan_any"))
        return INVALID_IMAGE;
    thing *t = new_thing(A_MODULE, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    show(t);
    *out = (fan_cu_module)(void *)t;
    return OK;
}

fan_cu_result fan_fake_ModuleUnload(fan_cu_module m)
{
    CALL(ModuleUnload);
    INSIDE(c);
    UNSAFE("cuModuleUnload");
    thing *t = find(A_MODULE, m);
    if (!t)
        return INVALID_HANDLE;
    drop_thing(t);
    return OK;
}

fan_cu_result fan_fake_ModuleGetFunction(fan_cu_function *out, fan_cu_module m, const char *name)
{
    CALL(ModuleGetFunction);
    INSIDE(c);
    if (!find(A_MODULE, m))
        return INVALID_HANDLE;
    const fan_fake_kernel *k = fan_fake_kernel_find(name);
    if (!k)
        return NOT_FOUND;
    thing *t = new_thing(A_FUNCTION, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    t->kernel = k;
    show(t);
    *out = (fan_cu_function)(void *)t;
    return OK;
}

/* table_of: what will lie where a kernel's table is once its turn comes: what the host sent there last, in the order of
 * its calls. That the kernel waits for the copies is the checker's business, for it reads that memory. NULL: nothing
 * was sent there. */
static const char *table_of(const fan_k_many *a)
{
    const thing *t = memory_at(a->table, fan_fake_table_bytes(a));
    return t && t->sent ? t->sent + (a->table - t->address) : NULL;
}

/* list_accesses: what a kernel touches; *stray: something that is no memory. */
static size_t list_accesses(const fan_fake_kernel *k, const void *args, const char *table, fan_fake_access *a,
                            fan_array **all, size_t *written, bool *stray)
{
    size_t n = k->accesses(args, table, a, written);
    for (size_t i = 0; i < n; i++) {
        int64_t lo, hi;
        a[i].array.shape = a[i].dims;
        a[i].array.strides = a[i].dims + a[i].array.ndim;
        all[i] = &a[i].array;
        fan_array_reach(all[i], &lo, &hi);
        *stray |= hi > lo &&
                  !memory_at(((uint64_t)(uintptr_t)a[i].array.data + (uint64_t)lo) | FAN_FAKE_TAG, (uint64_t)(hi - lo));
    }
    return n;
}

/* launch_on: a kernel that touches what is no memory loses the context, as it would when it runs. */
static fan_cu_result launch_on(struct fan_cu_context *c, fan_stream *s, const fan_fake_kernel *k, const void *args,
                               int64_t threads)
{
    fan_cu_result code = OUT_OF_MEMORY;
    const char *table = k->table ? table_of(args) : NULL;
    if (k->table && !table) {
        c->lost = ILLEGAL_ADDRESS;
        return OK;
    }
    size_t behind = k->table ? fan_fake_table_bytes(args) : 0, most = k->most(args), written;
    fan_fake_access *a = fan_calloc(most * sizeof *a);
    fan_array **all = fan_calloc(most * sizeof *all);
    work *w = new_work(k->table ? run_with_table : run_kernel, 0, 0, k->bytes + behind);
    if (a && all && w) {
        bool stray = false;
        size_t n = list_accesses(k, args, table, a, all, &written, &stray);
        if (stray) {
            c->lost = ILLEGAL_ADDRESS;
            fan_free(w);
            code = OK;
        } else {
            w->kernel = k;
            w->threads = threads;
            w->device = s->device;
            memcpy(w->payload, args, k->bytes);
            if (table)
                memcpy(w->payload + k->bytes, table, behind);
            code = queue(s, k->name, w, all, n - written, all + n - written, written);
        }
        w = NULL;
    }
    fan_free(w);
    fan_free(a);
    fan_free(all);
    return code;
}

fan_cu_result fan_fake_LaunchKernel(fan_cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                    unsigned bz, unsigned shared, fan_cu_stream handle, void **params, void **extra)
{
    fan_stream *s;
    CALL(LaunchKernel);
    INSIDE(c);
    const thing *t = find(A_FUNCTION, f);
    if (!t || t->device != c->device)
        return INVALID_HANDLE;
    if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra || !params)
        return INVALID_VALUE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = s->device->index == c->device ? launch_on(c, s, t->kernel, params[0], (int64_t)gx * bx) : INVALID_HANDLE;
    fan_stream_drop(s);
    return code;
}

/* ---- memory ---- */

static fan_cu_result allocate(const struct fan_cu_context *c, fan_stream *s, size_t bytes, uint64_t *out)
{
    fan_error err = {.status = FAN_OK};
    fan_device *d = fan_sim_device(fake.m, c->device);
    void *data = NULL;
    if (!bytes)
        return INVALID_VALUE;
    lock();
    int failed = fan_grow((void **)&fake.memory, &fake.memory_cap, fake.nmemory + 16,
                          sizeof *fake.memory); /* several threads may be about to show theirs */
    unlock();
    thing *t = failed ? NULL : new_thing(MEMORY, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code = code_of(d->backend->alloc(d, s, bytes, &data, &err), &err);
    if (code) {
        drop_thing(t);
        return code;
    }
    t->address = (uint64_t)(uintptr_t)data | FAN_FAKE_TAG;
    t->bytes = bytes;
    show(t);
    *out = t->address;
    return OK;
}

fan_cu_result fan_fake_MemAlloc(fan_cu_pointer *out, size_t bytes)
{
    CALL(MemAlloc);
    INSIDE(c);
    UNSAFE("cuMemAlloc");
    return allocate(c, NULL, bytes, out);
}

fan_cu_result fan_fake_MemAllocAsync(fan_cu_pointer *out, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemAllocAsync);
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = allocate(c, s, bytes, out);
    fan_stream_drop(s);
    return code;
}

/* tell: the checker holds against each other all that touched the memory and this release of it. */
static void tell(const thing *t, fan_stream *s)
{
    fan_device *d = fan_sim_device(fake.m, t->device);
    d->backend->dropped(d, host(t->address), t->bytes, &s, s ? 1 : 0);
    settle();
}

fan_cu_result fan_fake_MemFree(fan_cu_pointer p)
{
    CALL(MemFree);
    INSIDE(c);
    UNSAFE("cuMemFree");
    thing *t = memory_at(p, 1);
    if (!t || t->address != p)
        return INVALID_VALUE;
    fan_device *d = fan_sim_device(fake.m, t->device);
    size_t bytes = t->bytes;
    tell(t, NULL);
    drop_thing(t); /* before its address is anybody else's */
    d->backend->free(d, host(p), bytes);
    return OK;
}

fan_cu_result fan_fake_MemFreeAsync(fan_cu_pointer p, fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemFreeAsync);
    INSIDE(c);
    thing *t = memory_at(p, 1);
    if (!t || t->address != p)
        return INVALID_VALUE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_free, p, t->bytes, 0);
    if (w) {
        w->device = fan_sim_device(fake.m, t->device);
        tell(t, s);
        drop_thing(t);
        code = queue(s, "free", w, NULL, 0, NULL, 0);
    }
    fan_stream_drop(s);
    return w ? code : OUT_OF_MEMORY;
}

fan_cu_result fan_fake_PointerGetAttribute(void *out, int which, fan_cu_pointer p)
{
    CALL(PointerGetAttribute);
    const thing *t = memory_at(p, 1);
    if (!t || which != FAN_CU_POINTER_DEVICE_ORDINAL)
        return INVALID_VALUE;
    *(int *)out = t->device;
    return OK;
}

fan_cu_result fan_fake_DeviceGetDefaultMemPool(fan_cu_pool *out, fan_cu_device d)
{
    CALL(DeviceGetDefaultMemPool);
    *out = (fan_cu_pool)(void *)&fake.contexts[d];
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
        if (fan_sim_step(fake.m, &ran, &err) != FAN_OK)
            break;
    return OK;
}

/* transfer: the start of the three: the range must be memory. */
static fan_cu_result transfer(const struct fan_cu_context *c, uint64_t p, size_t bytes, fan_cu_stream handle,
                              fan_stream **s)
{
    if (!memory_at(p, bytes))
        return INVALID_VALUE;
    return stream_of(c, handle, s);
}

fan_cu_result fan_fake_MemcpyHtoDAsync(fan_cu_pointer to, const void *from, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyHtoDAsync);
    INSIDE(c);
    fan_cu_result code = transfer(c, to, bytes, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_copy_in, to, bytes, bytes);
    fan_array a = bytes_at(to, bytes, dims);
    thing *t = memory_at(to, bytes);
    if (w)
        memcpy(w->payload, from, bytes);
    if (t && (t->sent || (t->sent = fan_calloc(t->bytes)) != NULL))
        memcpy(t->sent + (to - t->address), from, bytes);
    code = w ? queue(s, "copy in", w, NULL, 0, (fan_array *const[]){&a}, 1) : OUT_OF_MEMORY;
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_MemcpyDtoHAsync(void *to, fan_cu_pointer from, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyDtoHAsync);
    INSIDE(c);
    fan_cu_result code = transfer(c, from, bytes, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_copy_out, from, bytes, 0);
    fan_array a = bytes_at(from, bytes, dims);
    if (w)
        w->to = to;
    code = w ? queue(s, "copy out", w, (fan_array *const[]){&a}, 1, NULL, 0) : OUT_OF_MEMORY;
    if (code == OK) { /* into pageable memory: the call returns when it is there */
        fan_error err = {.status = FAN_OK};
        code = done(s->device->backend->sync(s, &err), &err);
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
    fan_cu_result code = transfer(c, p, bytes, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_fill, p, bytes, 0);
    fan_array a = bytes_at(p, bytes, dims);
    if (w)
        w->byte = byte;
    code = w ? queue(s, "fill", w, NULL, 0, (fan_array *const[]){&a}, 1) : OUT_OF_MEMORY;
    fan_stream_drop(s);
    return code;
}

/* ---- streams and events ---- */

fan_cu_result fan_fake_StreamCreate(fan_cu_stream *out, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    CALL(StreamCreate);
    INSIDE(c);
    thing *t = new_thing(A_STREAM, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code =
        code_of(fan_sim_stream(fake.m, c->device, !(flags & FAN_CU_STREAM_NON_BLOCKING), &t->stream, &err), &err);
    if (code) {
        drop_thing(t);
        return code;
    }
    show(t);
    *out = (fan_cu_stream)(void *)t;
    return OK;
}

fan_cu_result fan_fake_StreamDestroy(fan_cu_stream s)
{
    CALL(StreamDestroy);
    INSIDE(c);
    thing *t = find(A_STREAM, s);
    if (!t)
        return find(DESTROYED, s) ? CONTEXT_IS_DESTROYED : INVALID_HANDLE;
    lock();
    unlist(t);
    unlock();
    t->kind =
        DESTROYED; /* its handle is nobody else's; what is queued still runs, and the device is waited for with it */
    show(t);
    return OK;
}

fan_cu_result fan_fake_StreamGetCtx(fan_cu_stream s, fan_cu_context *out)
{
    CALL(StreamGetCtx);
    INSIDE(c);
    const thing *t = (uintptr_t)s > 2 ? find(A_STREAM, s) : NULL;
    if ((uintptr_t)s > 2 && !t)
        return find(DESTROYED, s) ? CONTEXT_IS_DESTROYED : INVALID_HANDLE;
    *out = t ? &fake.contexts[t->device] : c;
    return OK;
}

fan_cu_result fan_fake_StreamSynchronize(fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(StreamSynchronize);
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    settle();
    code = done(s->device->backend->sync(s, &err), &err);
    fan_stream_drop(s);
    return code ? code : c->lost;
}

fan_cu_result fan_fake_StreamWaitEvent(fan_cu_stream handle, fan_cu_event e, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(StreamWaitEvent);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t || flags)
        return t ? INVALID_VALUE : INVALID_HANDLE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = done(s->device->backend->wait(s, t->event, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_EventCreate(fan_cu_event *out, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    CALL(EventCreate);
    INSIDE(c);
    (void)flags;
    thing *t = new_thing(AN_EVENT, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code = code_of(fan_event_new(fan_sim_device(fake.m, c->device), &t->event, &err), &err);
    if (code) {
        drop_thing(t);
        return code;
    }
    show(t);
    *out = (fan_cu_event)(void *)t;
    return OK;
}

fan_cu_result fan_fake_EventDestroy(fan_cu_event e)
{
    CALL(EventDestroy);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    drop_thing(t);
    return OK;
}

fan_cu_result fan_fake_EventRecord(fan_cu_event e, fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(EventRecord);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = s->device->index == t->device ? done(s->device->backend->record(t->event, s, &err), &err) : INVALID_HANDLE;
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_EventQuery(fan_cu_event e)
{
    fan_error err = {.status = FAN_OK};
    bool passed = false;
    CALL(EventQuery);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    if (!fan_sim_event_captured(fake.m, t->event)) /* else it has no time at all */
        UNSAFE("cuEventQuery");
    fan_cu_result code = done(t->event->device->backend->query(t->event, &passed, &err), &err);
    return code ? code : passed ? OK : NOT_READY;
}

fan_cu_result fan_fake_EventSynchronize(fan_cu_event e)
{
    fan_error err = {.status = FAN_OK};
    CALL(EventSynchronize);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    settle();
    fan_cu_result code = done(t->event->device->backend->event_sync(t->event, &err), &err);
    return code ? code : c->lost;
}

/* ---- capture ---- */

fan_cu_result fan_fake_ThreadExchangeStreamCaptureMode(int *mode)
{
    CALL(ThreadExchangeStreamCaptureMode);
    if (*mode < 0 || *mode > FAN_CU_CAPTURE_MODE_RELAXED)
        return INVALID_VALUE;
    *mode = fan_sim_capture_mode(*mode);
    return OK;
}

/* A graph: what was captured, and what is to be told when nobody has it any more. */
struct fan_cu_graph {
    fan_sim_graph *graph; /* held; NULL while the capture is under way */
    uint64_t id;
    thing *objects[256];
    size_t nobjects, refs;
    struct fan_cu_graph *next;
};

static struct fan_cu_graph *graphs;

/* graph_of: the graph of a capture under way, made when it is first asked for. */
static struct fan_cu_graph *graph_of(uint64_t id)
{
    lock();
    struct fan_cu_graph *g = graphs;
    while (g && g->id != id)
        g = g->next;
    if (!g && (g = fan_calloc(sizeof *g))) { /* under the lock: two threads that ask get one graph */
        g->id = id;
        g->refs = 1;
        g->next = graphs;
        graphs = g;
    }
    unlock();
    return g;
}

static void object_release(thing *t)
{
    lock();
    bool last = --t->refs == 0;
    unlock();
    if (!last)
        return;
    t->destroy(t->ctx);
    drop_thing(t);
}

static void graph_release(struct fan_cu_graph *g)
{
    lock();
    bool last = --g->refs == 0;
    for (struct fan_cu_graph **at = &graphs; last && *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    unlock();
    if (!last)
        return;
    fan_sim_graph_drop(g->graph);
    for (size_t i = 0; i < g->nobjects; i++)
        object_release(g->objects[i]);
    fan_free(g);
}

/* blocking_captured: a stream that the legacy stream of a device would have to wait for is captured. */
static bool blocking_captured(int device)
{
    bool found = false;
    lock();
    for (const thing *t = fake.things[A_STREAM]; t && !found; t = t->next)
        if (t->device == device && t->stream) {
            const fan_sim_queue *q = t->stream->impl;
            found = q->blocking && fan_sim_capture_state(fake.m, t->stream, NULL, NULL);
        }
    unlock();
    return found;
}

fan_cu_result fan_fake_StreamGetCaptureInfo(fan_cu_stream handle, int *status, uint64_t *id, fan_cu_graph *graph,
                                            const void **frontier, size_t *count)
{
    fan_stream *s;
    uint64_t number = 0;
    CALL(StreamGetCaptureInfo);
    INSIDE(c);
    (void)frontier, (void)count;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    *status = fan_sim_capture_state(fake.m, s, &number, NULL);
    bool rests = (uintptr_t)handle <= 1 && blocking_captured(c->device);
    fan_stream_drop(s);
    if (rests)
        return 906; /* and no capture is broken */
    if (id)
        *id = *status == 1 ? number : UINT64_MAX; /* of one that is none, or broken, it says nothing */
    if (graph && *status == 1 && !(*graph = graph_of(number)))
        return OUT_OF_MEMORY;
    return OK;
}

fan_cu_result fan_fake_UserObjectCreate(fan_cu_object *out, void *ctx, fan_cu_call *destroy, unsigned refs,
                                        unsigned flags)
{
    CALL(UserObjectCreate);
    if (flags != FAN_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC || !refs || !destroy)
        return INVALID_VALUE;
    thing *t = new_thing(AN_OBJECT, 0);
    if (!t)
        return OUT_OF_MEMORY;
    t->destroy = destroy;
    t->ctx = ctx;
    t->refs = refs;
    show(t);
    *out = (fan_cu_object)(void *)t;
    return OK;
}

fan_cu_result fan_fake_UserObjectRelease(fan_cu_object o, unsigned count)
{
    CALL(UserObjectRelease);
    thing *t = find(AN_OBJECT, o);
    if (!t || count != 1)
        return INVALID_VALUE;
    object_release(t);
    return OK;
}

fan_cu_result fan_fake_GraphRetainUserObject(fan_cu_graph g, fan_cu_object o, unsigned count, unsigned flags)
{
    CALL(GraphRetainUserObject);
    thing *t = find(AN_OBJECT, o);
    if (!t || count != 1 || flags != FAN_CU_GRAPH_USER_OBJECT_MOVE)
        return INVALID_VALUE;
    lock();
    bool room = g->nobjects < sizeof g->objects / sizeof *g->objects;
    if (room)
        g->objects[g->nobjects++] = t;
    unlock();
    return room ? OK : INVALID_VALUE;
}

/* What callers of the driver use, and the backend does not. */

API cuStreamBeginCapture_v2(fan_cu_stream handle, int mode);
API cuStreamEndCapture(fan_cu_stream handle, fan_cu_graph *out);
API cuGraphInstantiateWithFlags(fan_cu_graph *out, fan_cu_graph g, uint64_t flags);
API cuGraphLaunch(fan_cu_graph g, fan_cu_stream handle);
API cuGraphDestroy(fan_cu_graph g);
API cuGraphExecDestroy(fan_cu_graph g);
API cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

fan_cu_result cuStreamBeginCapture_v2(fan_cu_stream handle, int mode)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = done(fan_sim_capture_begin(fake.m, s, mode, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result cuStreamEndCapture(fan_cu_stream handle, fan_cu_graph *out)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    fan_sim_graph *graph = NULL;
    uint64_t id = 0;
    *out = NULL;
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    (void)fan_sim_capture_state(fake.m, s, &id, NULL);
    struct fan_cu_graph *g = id ? graph_of(id) : NULL;
    code = done(fan_sim_capture_end(fake.m, s, &graph, &err), &err);
    bool ended = g && fan_sim_capture_state(fake.m, s, NULL, NULL) == 0;
    fan_stream_drop(s);
    if (g && ended) {
        g->graph = graph;
        if (code)
            graph_release(g);
        else
            *out = g;
    }
    return code;
}

fan_cu_result cuGraphInstantiateWithFlags(fan_cu_graph *out, fan_cu_graph g, uint64_t flags)
{
    (void)flags;
    lock();
    g->refs++; /* what is launched is what was captured */
    unlock();
    *out = g;
    return OK;
}

fan_cu_result cuGraphLaunch(fan_cu_graph g, fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    settle();
    code = done(fan_sim_graph_launch(g->graph, s, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result cuGraphDestroy(fan_cu_graph g)
{
    graph_release(g);
    return OK;
}

fan_cu_result cuGraphExecDestroy(fan_cu_graph g)
{
    graph_release(g);
    return OK;
}

/* ---- by name ---- */

static bool hidden(const char *name)
{
    bool found = false;
    for (int i = 0; i < MOST_HIDDEN; i++)
        found |= strcmp(fan__fake.hidden[i], name) == 0;
    return found;
}

API cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

fan_cu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    static const struct {
        const char *name;
        int version;
        size_t at;
    } rows[] = {
#define X(name, suffix, version, feature, parameters) {"cu" #name, version, NUMBER_##name},
        FAN_CUDA_LIST(X)
#undef X
    };
    (void)flags;
    *out = NULL;
    *status = 1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].name, name) != 0 || version < rows[i].version || fan__fake.version < rows[i].version ||
            driver_hides(name + 2))
            continue;
        switch (rows[i].at) {
#define X(name, suffix, version, feature, parameters)   \
    case NUMBER_##name: {                               \
        fan_cu_result(*f) parameters = fan_fake_##name; \
        memcpy(out, &f, sizeof f);                      \
        break;                                          \
    }
            FAN_CUDA_LIST(X)
#undef X
        default:
            break;
        }
        *status = 0;
        return OK;
    }
    return NOT_FOUND;
}
