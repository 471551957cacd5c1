#define _POSIX_C_SOURCE 200809L
#include "device/device.h"

#include "base/thread.h"

#include <stdio.h>
#include <string.h>

static atomic_uint_fast64_t last_device;

/* A forked child inherits its parent's locks without the threads that held them. So fork acquires these locks first: no
 * call is made while one is held, and no other is acquired. Inherited objects can be dropped in the child. */
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;

static fan_device *devices;

static void device_lock_all(void)
{
    (void)pthread_mutex_lock(&devices_lock);
    for (fan_device *d = devices; d; d = d->next)
        fan__device_lock(d);
}

static void device_unlock_all(void)
{
    for (fan_device *d = devices; d; d = d->next)
        fan__device_unlock(d);
    (void)pthread_mutex_unlock(&devices_lock);
}

static fan_fork device_fork = {.lock = device_lock_all, .unlock = device_unlock_all};

int fan_device_init(fan_device *d, const fan_backend *b, void *self, int index, atomic_size_t *holds)
{
    memset(d, 0, sizeof *d);
    if (pthread_mutex_init(&d->lock, NULL))
        return -1;
    d->holds = holds;
    d->backend = b;
    d->self = self;
    d->index = index;
    d->id = atomic_fetch_add(&last_device, 1) + 1;
    d->pending_free_end = &d->pending_free;
    (void)fan_fork_add(&device_fork);
    (void)pthread_mutex_lock(&devices_lock);
    d->next = devices;
    devices = d;
    (void)pthread_mutex_unlock(&devices_lock);
    return 0;
}

void fan_device_fini(fan_device *d)
{
    (void)pthread_mutex_lock(&devices_lock);
    for (fan_device **at = &devices; *at; at = &(*at)->next)
        if (*at == d) {
            *at = d->next;
            break;
        }
    (void)pthread_mutex_unlock(&devices_lock);
    (void)pthread_mutex_destroy(&d->lock);
}

fan_device *fan_device_hold(fan_device *d)
{
    if (d && d->holds)
        atomic_fetch_add_explicit(d->holds, 1, memory_order_relaxed);
    return d;
}

void fan_device_drop(fan_device *d)
{
    if (d && d->holds && atomic_fetch_sub_explicit(d->holds, 1, memory_order_acq_rel) == 1)
        d->backend->device_fini(d);
}

char *fan_device_text(const fan_device *d, char *buf, size_t size)
{
    if (d->index >= 0)
        snprintf(buf, size, "%s:%d", d->backend->name, d->index);
    else
        snprintf(buf, size, "%s", d->backend->name);
    return buf;
}
