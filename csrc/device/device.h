/* device: a device of a backend: its holds, its lock, its name.
 *
 * Devices of one machine share its holds: they go together, when nobody holds any of them. A device is begun here, and
 * ended by fan_device_flush and fan_device_clear (memory.h), which need what stands above. */
#ifndef FAN_DEVICE_DEVICE_H
#define FAN_DEVICE_DEVICE_H

#include "device/backend.h"

#include <pthread.h>
#include <stdatomic.h>

struct fan_device {
    /* the count of holds, one for all devices of a machine; NULL: the CPU, which is never freed */
    atomic_size_t *holds;
    const fan_backend *backend;
    void *self;  /* the backend's */
    int index;   /* ordinal within the backend */
    uint64_t id; /* never reused; 0 is the CPU alone */
    /* Guards what follows: `clock` and `count` of the streams of this device, its events, the users of its memory.
     * Nothing is called while it is held, so that for a scheduled thread taking it is no step (D30). */
    pthread_mutex_t lock;
    fan_event *pool; /* free events */
    /* memory whose last hold went, and whose users have not passed yet; oldest first */
    struct fan_memory *pending_free, **pending_free_end;
    atomic_uint_fast64_t events, waits,
        elided;       /* counted by fan_event_record, fan_event_rerecord and fan_stream_wait */
    fan_device *next; /* the next of all devices that were begun; guarded by a lock of its own */
};

/* fan_device_init: begins a device in memory of the backend. It shares `holds`, to which nothing is added. Returns 0 or
 * -1. fan_device_fini: ends it; nothing holds it by then, and its memory and events are gone. */
int fan_device_init(fan_device *d, const fan_backend *b, void *self, int index, atomic_size_t *holds);
void fan_device_fini(fan_device *d);
fan_device *fan_device_hold(fan_device *d);
void fan_device_drop(fan_device *d); /* NULL is fine */
/* fan_cpu: the CPU. Its holds do nothing. */
fan_device *fan_cpu(void);
/* fan_device_text: "cpu", "sim:0". */
char *fan_device_text(const fan_device *d, char *buf, size_t size);

static inline void fan__device_lock(fan_device *d) { (void)pthread_mutex_lock(&d->lock); }
static inline void fan__device_unlock(fan_device *d) { (void)pthread_mutex_unlock(&d->lock); }

#endif
