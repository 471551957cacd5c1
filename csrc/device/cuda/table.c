/* The backend's table; opens, initializes and closes drivers. */
#define _POSIX_C_SOURCE 200809L
#include "base/thread.h"
#include "base/mem.h"
#include "base/pool.h"
#include "device/cuda/part.h"
#include "device/memory.h"

#include <stdio.h>
#include <string.h>

#define MOST_ENTRIES ((int64_t)1 << 24) /* 256 MiB of scratch memory */
#define MOST_ROWS ((int64_t)UINT32_MAX - 1)

/* Held by the thread that initializes a device; initialized again in a forked child. */
static pthread_mutex_t table_making = PTHREAD_MUTEX_INITIALIZER;

static pthread_mutex_t opened_lock = PTHREAD_MUTEX_INITIALIZER;
static fan_cuda *opened; /* all drivers; guarded by opened_lock */

/* fork waits until no thread holds a part's lock; no call is made while one is held. */
static void table_lock_all(void)
{
    (void)pthread_mutex_lock(&opened_lock);
    for (fan_cuda *c = opened; c; c = c->next) {
        for (int i = 0; i < c->count; i++)
            fan__part_lock(&c->parts[i]);
    }
}

static void table_unlock_all(void)
{
    for (fan_cuda *c = opened; c; c = c->next) {
        for (int i = 0; i < c->count; i++)
            fan__part_unlock(&c->parts[i]);
    }
    (void)pthread_mutex_unlock(&opened_lock);
}

static void table_in_child(void)
{
    /* its holder is not in the child; its unfinished work is discarded */
    (void)pthread_mutex_init(&table_making, NULL);
}

static fan_fork table_fork = {
    .lock = table_lock_all,
    .unlock = table_unlock_all,
    .child = table_in_child,
};

static bool table_lost(fan_device *d)
{
    return !fan__cuda_usable(fan__cuda_part_of(d));
}

static uint64_t table_left_out(fan_device *d)
{
    return fan__cuda_part_of(d)->cuda->left_out;
}

static void table_fini(fan_device *d);

const fan_backend fan_cuda_backend = {
    .name = "cuda",
    .has_streams = true,
    .dlpack = {2, 13}, /* kDLCUDA, kDLCUDAManaged */
    .cuda_protocols = true,
    .find_stream = fan_cuda_stream,
    .alloc = fan__cuda_alloc,
    .free = fan__cuda_free,
    .read = fan__cuda_read,
    .current = fan__cuda_current,
    .sync = fan__cuda_sync,
    .stream_fini = fan__cuda_stream_fini,
    .event_init = fan__cuda_event_init,
    .event_fini = fan__cuda_event_fini,
    .record = fan__cuda_record,
    .note = fan__cuda_note,
    .wait = fan__cuda_wait,
    .query = fan__cuda_query,
    .peek = fan__cuda_peek,
    .event_sync = fan__cuda_event_sync,
    .capture = fan__cuda_capture,
    .capture_stream = fan__cuda_capture_stream,
    .recorder = &fan__cuda_recorder,
    .run = fan__cuda_run,
    .run_many = fan__cuda_run_many,
    .lost = table_lost,
    .left_out = table_left_out,
    .device_fini = table_fini,
};

/* table_part_fini: resets the part to its state before the first use. */
static void table_part_fini(fan_cuda_part *p)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan__cuda_scope scope;
    if (p->context && fan__cuda_usable(p)) {
        if (fan__cuda_enter(p, &scope, NULL) == FAN_OK) {
            int mode = fan__cuda_relax(p);
            fan__cuda_blocks_fini(p);
            if (p->pool)
                (void)api->MemPoolDestroy(p->pool);
            if (p->free_stream)
                (void)api->StreamDestroy(p->free_stream);
            for (size_t i = 0; i < p->ncapture_streams; i++)
                (void)api->StreamDestroy((fan_cu_stream)(uintptr_t)p->capture_streams[i].handle);
            if (p->module)
                (void)api->ModuleUnload(p->module);
            fan__cuda_restore(p, mode);
            fan__cuda_leave(&scope);
        }
        if (fan__cuda_usable(p)) {
            int mode = fan__cuda_relax(p);
            (void)api->DevicePrimaryCtxRelease(p->ordinal);
            fan__cuda_restore(p, mode);
        }
    }
    fan__cuda_blocks_fini(p);
    fan_free(p->staging);
    p->staging = NULL;
    p->staging_bytes = 0;
    fan_free(p->streams);
    p->streams = NULL;
    p->nstreams = 0;
    p->streams_cap = 0;
    fan_free(p->capture_streams);
    p->capture_streams = NULL;
    p->ncapture_streams = 0;
    p->capture_streams_cap = 0;
    p->free_stream = NULL;
    p->pool = NULL;
    p->module = NULL;
    p->context = NULL;
}

static void table_free(fan_cuda *c)
{
    (void)pthread_mutex_lock(&opened_lock);
    for (fan_cuda **at = &opened; *at; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&opened_lock);
    for (int i = 0; i < c->count; i++) {
        fan_device *d = &c->parts[i].device;
        if (d->backend)
            fan_device_flush(d);
    }
    for (int i = 0; i < c->count; i++) {
        fan_device *d = &c->parts[i].device;
        if (d->backend)
            fan_device_clear(d);
    }
    for (int i = 0; i < c->count; i++) {
        fan_cuda_part *p = &c->parts[i];
        table_part_fini(p);
        fan_free(p->image.code);
        (void)pthread_mutex_destroy(&p->lock);
    }
    fan_free(c->parts);
    fan_free(c);
}

static void table_fini(fan_device *d)
{
    table_free(fan__cuda_part_of(d)->cuda);
}

fan_status fan_cuda_open(const char *path, fan_cuda **out, fan_error *err)
{
    fan_status status;
    *out = NULL;
    fan_cuda *c = fan_calloc(sizeof *c);
    if (!c)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a driver");
    atomic_init(&c->holds, 1);
    c->life = fan_fork_generation();
    FAN_GO(fan_cuda_api_open(&c->api, path, err));
    c->most_entries = MOST_ENTRIES;
    c->most_rows = MOST_ROWS;
    int count = 0;
    fan_cu_result code = c->api.DeviceGetCount(&count);
    if (code || count < 0) {
        char text[256];
        status = fan_fail_code(err, FAN_ERR_DEVICE, code, "cuDeviceGetCount failed: %s",
                               fan_cuda_text(&c->api, code, text, sizeof text));
        goto done;
    }
    c->parts = fan_calloc(((size_t)count + 1) * sizeof *c->parts);
    if (!c->parts) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a driver");
        goto done;
    }
    for (; c->count < count; c->count++) {
        fan_cuda_part *p = &c->parts[c->count];
        p->cuda = c;
        p->index = c->count;
        if (pthread_mutex_init(&p->lock, NULL) ||
            fan_device_init(&p->device, &fan_cuda_backend, c, c->count, &c->holds)) {
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a driver");
            goto done;
        }
    }
    (void)fan_fork_add(&table_fork);
    (void)pthread_mutex_lock(&opened_lock);
    c->next = opened;
    opened = c;
    (void)pthread_mutex_unlock(&opened_lock);
    *out = c;
done:
    if (status != FAN_OK)
        table_free(c);
    return status;
}

fan_cuda *fan_cuda_hold(fan_cuda *c)
{
    atomic_fetch_add_explicit(&c->holds, 1, memory_order_relaxed);
    return c;
}

void fan_cuda_drop(fan_cuda *c)
{
    if (!c)
        return;
    for (int i = 0; i < c->count; i++)
        fan_device_orphan(&c->parts[i].device);
    if (atomic_fetch_sub_explicit(&c->holds, 1, memory_order_acq_rel) == 1)
        table_free(c);
}

const fan_cuda_api *fan_cuda_driver(const fan_cuda *c)
{
    return &c->api;
}

int fan_cuda_count(const fan_cuda *c)
{
    return c->count;
}

int fan_cuda_holding(fan_cuda *c, uint64_t address)
{
    int index = -1;
    if (fan__cuda_forked(c) || c->count == 0)
        return -1;
    int mode = fan__cuda_relax(&c->parts[0]);
    fan_cu_result code = c->api.PointerGetAttribute(&index, FAN_CU_POINTER_DEVICE_ORDINAL, address);
    fan__cuda_restore(&c->parts[0], mode);
    if (code)
        return -1;
    if (index < 0 || index >= c->count)
        return -1;
    return index;
}

int fan_cuda_here(fan_cuda *c)
{
    fan_cu_context now = NULL;
    if (fan__cuda_forked(c))
        return -1;
    if (c->api.CtxGetCurrent(&now) != 0)
        return -1;
    if (!now)
        return -1;
    for (int i = 0; i < c->count; i++) {
        if (atomic_load_explicit(&c->parts[i].ready, memory_order_acquire) &&
            c->parts[i].context == now)
            return i;
    }
    return -1;
}

bool fan_cuda_active(fan_cuda *c, int index)
{
    fan_cu_device ordinal;
    unsigned flags = 0;
    int active = 0;
    if (fan__cuda_forked(c))
        return false;
    if (index < 0 || index >= c->count)
        return false;
    if (c->api.DeviceGet(&ordinal, index) != 0)
        return false;
    if (c->api.DevicePrimaryCtxGetState(ordinal, &flags, &active) != 0)
        return false;
    return active != 0;
}

#ifdef FAN_TEST
void fan_cuda_bound_sorts(fan_cuda *c, int64_t entries, int64_t rows)
{
    c->most_entries = entries ? entries : MOST_ENTRIES;
    c->most_rows = rows ? rows : MOST_ROWS;
}
#endif

void fan_cuda_leave_out(fan_cuda *c, uint64_t plan_bits)
{
    c->left_out = plan_bits;
}

static fan_status table_ask(fan_cuda_part *p, fan_cu_device ordinal, int which, int *out,
                            fan_error *err)
{
    return fan__cuda_check(p, fan__cuda_api_of(p)->DeviceGetAttribute(out, which, ordinal),
                           "cuDeviceGetAttribute", err);
}

static fan_status table_ask_compute(fan_cuda_part *p, fan_cu_device ordinal, int *major, int *minor,
                                    fan_error *err)
{
    FAN_TRY(table_ask(p, ordinal, FAN_CU_ATTRIBUTE_MAJOR, major, err));
    return table_ask(p, ordinal, FAN_CU_ATTRIBUTE_MINOR, minor, err);
}

/* table_make_ready: makes context, kernels and pool. Call without the part's lock: fan__cuda_check
 * takes it on failure. */
static fan_status table_make_ready(fan_cuda_part *p, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan__cuda_scope scope = {.part = NULL};
    fan_status status;
    int reads = 0;
    int major = 0;
    int minor = 0;
    FAN_GO(fan__cuda_check(p, api->DeviceGet(&p->ordinal, p->index), "cuDeviceGet", err));
    FAN_GO(table_ask_compute(p, p->ordinal, &major, &minor, err));
    p->compute = 10 * major + minor;
    p->image.wanted = !fan_kernels_fatbin_bytes && !p->image.code;
    if (p->image.wanted) {
        FAN_GO(fan_fail(err, FAN_ERR_DEVICE, "cuda:%d has no kernels: the build embedded none",
                        p->index));
    }
    FAN_GO(fan__cuda_check(p, api->DevicePrimaryCtxRetain(&p->context, p->ordinal),
                           "cuDevicePrimaryCtxRetain", err));
    FAN_GO(fan__cuda_enter(p, &scope, err));
    FAN_GO(table_ask(p, p->ordinal, FAN_CU_ATTRIBUTE_MULTIPROCESSORS, &p->processors, err));
    FAN_GO(table_ask(p, p->ordinal, FAN_CU_ATTRIBUTE_PAGEABLE_ACCESS, &reads, err));
    p->reads_host = reads != 0;
    FAN_GO(fan__cuda_check(p, api->StreamCreate(&p->free_stream, FAN_CU_STREAM_NON_BLOCKING),
                           "cuStreamCreate", err));
    /* A pool of our own: a device's default pool is shared by all libraries, and frees its memory
     * at each synchronization, unless a threshold keeps some. Without pools, memory is plain. */
    fan_cu_pool_props props = {
        .allocation = FAN_CU_ALLOCATION_PINNED,
        .location = FAN_CU_LOCATION_DEVICE,
        .device = p->index,
    };
    uint64_t keep = fan_pool_get().limit;
    int pools = 0;
    FAN_GO(table_ask(p, p->ordinal, FAN_CU_ATTRIBUTE_MEMORY_POOLS, &pools, err));
    if (pools && api->has[FAN_CUDA_POOLS]) {
        fan_cu_result code = api->MemPoolCreate(&p->pool, &props);
        if (code != FAN_CU_NOT_SUPPORTED) {
            FAN_GO(fan__cuda_check(p, code, "cuMemPoolCreate", err));
            p->pools = true;
            FAN_GO(fan__cuda_check(
                p, api->MemPoolSetAttribute(p->pool, FAN_CU_POOL_RELEASE_THRESHOLD, &keep),
                "cuMemPoolSetAttribute", err));
        }
    }
    FAN_GO(fan__cuda_load_kernels(p, err));
done:
    if (scope.part)
        fan__cuda_leave(&scope);
    return status;
}

fan_status fan_cuda_device(fan_cuda *c, int index, fan_device **out, int *wants, fan_error *err)
{
    *out = NULL;
    *wants = 0;
    if (index < 0 || index >= c->count) {
        return fan_fail(err, FAN_ERR_VALUE, "no device cuda:%d: the driver has %d device%s", index,
                        c->count, FAN_PLURAL(c->count));
    }
    fan_cuda_part *p = &c->parts[index];
    if (fan__cuda_forked(c))
        return fan__cuda_refuse_child(p, err);
    fan_status status = FAN_OK;
    (void)pthread_mutex_lock(&table_making);
    bool ready = atomic_load_explicit(&p->ready, memory_order_relaxed);
    if (!ready && !fan__cuda_usable(p)) {
        status = fan__cuda_refuse_dead(p, err);
    } else if (!ready) {
        /* another thread may be capturing */
        int mode = fan__cuda_relax(p);
        p->image.wanted = false;
        status = table_make_ready(p, err);
        fan__cuda_restore(p, mode);
        /* Here: without the lock, another thread could give kernels between the failure and the
         * question. */
        if (status != FAN_OK && p->image.wanted)
            *wants = p->compute;
        if (status != FAN_OK && fan__cuda_usable(p))
            table_part_fini(p);
        atomic_store_explicit(&p->ready, status == FAN_OK, memory_order_release);
    }
    (void)pthread_mutex_unlock(&table_making);
    if (status == FAN_OK)
        *out = fan_device_hold(&p->device);
    return status;
}

const char *fan_cuda_kernels(const fan_cuda *c, int index)
{
    const fan_cuda_part *p = &c->parts[index];
    if (!atomic_load_explicit(&p->ready, memory_order_acquire))
        return NULL;
    return p->loaded;
}

fan_status fan_cuda_give_kernels(fan_cuda *c, int index, const void *code, size_t bytes,
                                 const char *words, fan_error *err)
{
    fan_cuda_part *p = &c->parts[index];
    char *copy = fan_calloc(bytes + 1); /* PTX is text that ends with a zero */
    if (!copy)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the kernels of cuda:%d", index);
    memcpy(copy, code, bytes);
    (void)pthread_mutex_lock(&table_making);
    if (!p->image.code) { /* else another thread compiled them meanwhile */
        p->image.code = copy;
        snprintf(p->image.words, sizeof p->image.words, "%s", words);
        copy = NULL;
    }
    (void)pthread_mutex_unlock(&table_making);
    fan_free(copy);
    return FAN_OK;
}

fan_status fan_cuda_describe(fan_cuda *c, int index, char *buf, size_t size, fan_error *err)
{
    char name[128] = "";
    int major = 0;
    int minor = 0;
    fan_cu_device ordinal;
    fan_cuda_part *p = &c->parts[index];
    if (fan__cuda_forked(c))
        return fan__cuda_refuse_child(p, err);
    FAN_TRY(fan__cuda_check(p, c->api.DeviceGet(&ordinal, index), "cuDeviceGet", err));
    FAN_TRY(fan__cuda_check(p, c->api.DeviceGetName(name, (int)sizeof name, ordinal),
                            "cuDeviceGetName", err));
    FAN_TRY(table_ask_compute(p, ordinal, &major, &minor, err));
    snprintf(buf, size, "%s, compute %d.%d", name, major, minor);
    return FAN_OK;
}
