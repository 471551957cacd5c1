#define _POSIX_C_SOURCE 200809L
/* The driver of this process: opened at the first use, exchanged by tests; and the entry of the
 * list of backends, which finds its devices. */
#include "base/mem.h"
#include "base/thread.h"
#include "device/cuda/part.h"
#include "device/memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* The driver of this process. The lock is held while it is opened. */
static struct {
    pthread_mutex_t lock;
    fan_cuda *cuda; /* held; NULL: not open */
    char *path;     /* NULL: the system's */
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Atomic(fan_compile_kernels *) driver_compiler;

void fan_driver_compile(fan_compile_kernels *compile)
{
    atomic_store(&driver_compiler, compile);
}

static void driver_in_child(void)
{
    (void)pthread_mutex_init(&driver.lock, NULL); /* its holder is in the parent */
}

static fan_fork driver_fork = {.child = driver_in_child};

fan_status fan_driver_open(fan_cuda **out, fan_error *err)
{
    fan_status status = FAN_OK;
    *out = NULL;
    (void)fan_fork_add(&driver_fork);
    (void)pthread_mutex_lock(&driver.lock);
    if (!driver.cuda)
        status = fan_cuda_open(driver.path, &driver.cuda, err);
    if (status == FAN_OK)
        *out = fan_cuda_hold(driver.cuda);
    (void)pthread_mutex_unlock(&driver.lock);
    return status;
}

/* driver_opened: the driver, if it is open: a hold; else NULL. */
static fan_cuda *driver_opened(void)
{
    (void)pthread_mutex_lock(&driver.lock);
    fan_cuda *c = driver.cuda;
    if (c)
        (void)fan_cuda_hold(c);
    (void)pthread_mutex_unlock(&driver.lock);
    return c;
}

fan_status fan_driver_use(const char *path, fan_error *err)
{
    char *copy = NULL;
    if (path)
        copy = fan_calloc(strlen(path) + 1);
    if (path && !copy)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a path");
    if (copy)
        memcpy(copy, path, strlen(path));
    (void)pthread_mutex_lock(&driver.lock);
    fan_cuda *old = driver.cuda;
    char *old_path = driver.path;
    driver.cuda = NULL;
    driver.path = copy;
    (void)pthread_mutex_unlock(&driver.lock);
    fan_free(old_path);
    fan_cuda_drop(old);
    return FAN_OK;
}

static int driver_count(void)
{
    fan_cuda *c;
    if (fan_driver_open(&c, NULL) != FAN_OK)
        return 0;
    int n = fan_cuda_count(c);
    fan_cuda_drop(c);
    return n;
}

static fan_status driver_find(long index, fan_device **out, fan_error *err)
{
    fan_cuda *c;
    *out = NULL;
    FAN_TRY(fan_driver_open(&c, err));
    int compute;
    fan_status status = fan_cuda_device(c, (int)index, out, &compute, err);
    fan_compile_kernels *compile = atomic_load(&driver_compiler);
    if (compute && compile) {
        status = compile(c, (int)index, compute, err);
        if (status == FAN_OK)
            status = fan_cuda_device(c, (int)index, out, &compute, err);
    }
    fan_cuda_drop(c);
    return status;
}

static void driver_keep(size_t bytes)
{
    fan_cuda *c = driver_opened();
    uint64_t keep = bytes;
    for (int i = 0; c && i < c->count; i++) {
        fan_cuda_part *p = &c->parts[i];
        fan__cuda_scope scope;
        if (!atomic_load_explicit(&p->ready, memory_order_acquire) || !p->pools ||
            fan__cuda_enter(p, &scope, NULL) != FAN_OK)
            continue;
        int mode = fan__cuda_relax(p);
        (void)fan__cuda_check(
            p, c->api.MemPoolSetAttribute(p->pool, FAN_CU_POOL_RELEASE_THRESHOLD, &keep),
            "cuMemPoolSetAttribute", NULL);
        fan__cuda_restore(p, mode);
        fan__cuda_leave(&scope);
    }
    fan_cuda_drop(c);
}

/* driver_trim: waits for a device if streams that used memory were destroyed. No stream may be
 * captured that fanin has not met. */
static size_t driver_trim(void)
{
    fan_cuda *c = driver_opened();
    size_t bytes = 0;
    for (int i = 0; c && i < c->count; i++) {
        fan_cuda_part *p = &c->parts[i];
        fan__cuda_scope scope;
        if (!atomic_load_explicit(&p->ready, memory_order_acquire) ||
            fan__cuda_enter(p, &scope, NULL) != FAN_OK)
            continue;
        fan__cuda_await_gone(p);
        fan_device_poll(&p->device);
        bytes += fan__cuda_trim(p);
        fan__cuda_leave(&scope);
    }
    fan_cuda_drop(c);
    return bytes;
}

const fan_backend_entry fan_cuda_entry = {
    .backend = &fan_cuda_backend,
    .count = driver_count,
    .bare_name = true,
    .find = driver_find,
    .keep = driver_keep,
    .trim = driver_trim,
};
