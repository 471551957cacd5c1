/* device: a device of a backend: its reference count, its lock, its name.
 *
 * Devices of one machine share one count: they are freed together, after the last drop of any. A
 * device is initialized here, and ended by fan_device_flush and fan_device_clear (memory.h), which
 * need higher files. */
#ifndef FAN_DEVICE_DEVICE_H
#define FAN_DEVICE_DEVICE_H

#include "device/backend.h"

#include <pthread.h>
#include <stdatomic.h>

struct fan_device {
    /* the count, shared by all devices of a machine; NULL: the CPU, which is never freed */
    atomic_size_t *holds;
    const fan_backend *backend;
    void *self;  /* the backend's */
    int index;   /* ordinal within the backend */
    uint64_t id; /* never reused; 0: the CPU */
    /* Guards the fields below: `clock` and `count` of this device's streams, its events, the users
     * of its memory. No call is made while it is held, so for a scheduled thread locking it is no
     * step (D30). */
    pthread_mutex_t lock;
    fan_event *pool; /* free events */
    /* memory without references whose users have not passed yet; oldest first */
    struct fan_memory *pending_free;
    struct fan_memory **pending_free_end;
    /* counted by fan_event_record, fan_event_rerecord and fan_stream_wait */
    atomic_uint_fast64_t events;
    atomic_uint_fast64_t waits;
    atomic_uint_fast64_t elided;
    fan_device *next; /* the next in the list of all devices; guarded by that list's lock */
};

/* fan_device_init: initializes a device in memory of the backend. It shares `holds`, without
 * changing it. Returns 0 or -1. */
int fan_device_init(fan_device *d, const fan_backend *b, void *self, int index,
                    atomic_size_t *holds);
/* fan_device_fini: ends it; it must have no holds, and its memory and events must be freed. */
void fan_device_fini(fan_device *d);
fan_device *fan_device_hold(fan_device *d);
void fan_device_drop(fan_device *d); /* d may be NULL */
/* fan_cpu: returns the CPU, which is not counted. */
fan_device *fan_cpu(void);
/* fan_device_text: writes "cpu", "sim:0". */
char *fan_device_text(const fan_device *d, char *buf, size_t size);
/* fan_device_of_another: for a message, after the text of a device: " of another machine" if that
 * is how the two differ, or "". */
static inline const char *fan_device_of_another(const fan_device *d, const fan_device *other)
{
    if (d->backend != other->backend || d->self == other->self)
        return "";
    return " of another machine";
}

static inline void fan__device_lock(fan_device *d)
{
    (void)pthread_mutex_lock(&d->lock);
}
static inline void fan__device_unlock(fan_device *d)
{
    (void)pthread_mutex_unlock(&d->lock);
}

#endif
