/* recorder: how a device does once more what it did: what a backend's author fills in for graph trees (graph/).
 *
 * Each entry is called by one tree at a time, on the thread that calls the tree's function, with no lock of ours held
 * but the tree's own, and without the interpreter's lock. `origin` is the tree's stream; NULL on a device without
 * streams. The order of calls:
 *
 *   origin      once, when the tree is made
 *   begin       the thread begins to record; the function's body runs (on this thread; it may fork `origin`)
 *   end         .. the recording, or a failure: either way nothing is recorded any more;  or
 *   abort       .. the body failed: what was recorded is thrown away; never fails
 *   launch      any number of times, in any order with launches of others on the same origin, from any thread
 *   drop        once
 *
 * Memory: while the thread records, or warms up, it has a fan_memory_scope (memory.h): what it allocates on the device
 * comes from the tree's arena, and keeps its address; the recorder allocates none. */
#ifndef FAN_DEVICE_RECORDER_H
#define FAN_DEVICE_RECORDER_H

#include "array/array.h"

#define FAN_POISON 0xA5 /* each byte of memory that nobody may read */

typedef struct fan_device fan_device;
typedef struct fan_stream fan_stream;
typedef struct fan_recording fan_recording; /* the backend's own */

/* One access of a recording: `bytes` from `data` on, of the operation `name`. Return false to end the visit. */
typedef bool (*fan_recording_visit)(void *ctx, const char *name, const void *data, size_t bytes, bool write);

typedef struct fan_recorder {
    /* origin: a stream of the tree's own. The caller owns a hold. NULL: the device has none. */
    fan_status (*origin)(fan_device *d, fan_stream **out, fan_error *err);

    /* begin: what this thread queues on `origin` from now on, and on streams that wait for it, is recorded and not
     * run (a device without streams: what it does). FAN_ERR_CAPTURE, FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*begin)(fan_device *d, fan_stream *origin, fan_error *err);

    /* end: the recording, for the caller to drop. FAN_ERR_CAPTURE with the reason: a stream that was not joined, a call
     * that cannot be recorded. */
    fan_status (*end)(fan_device *d, fan_stream *origin, fan_recording **out, fan_error *err);
    void (*abort)(fan_device *d, fan_stream *origin);

    /* launch: all of it once more, in the order of `origin`. Allocates nothing where it can. */
    fan_status (*launch)(fan_recording *r, fan_stream *origin, fan_error *err);
    void (*drop)(fan_recording *r);

    /* accesses: everything that it touches, as far as that can be told; else roles are believed. NULL: nothing can. */
    void (*accesses)(const fan_recording *r, fan_recording_visit visit, void *ctx);
    /* accesses_all: `accesses` visits all of them: no kernel that others launch can be part of a recording. */
    bool accesses_all;

    /* clock: when, in microseconds of the device's clock, all that is queued on `origin` will have run: for traces.
     * NULL: nobody knows. */
    double (*clock)(fan_device *d, fan_stream *origin);

    /* bytes: what the driver takes for it of the device's memory, beside the arena. NULL: nothing. */
    uint64_t (*bytes)(const fan_recording *r);

    /* poison: fills memory that nobody may read any more, in the order of `origin`; with debug=True alone, unless
     * `always_poisons`. NULL: it is left as it is. */
    bool always_poisons;
    fan_status (*poison)(fan_device *d, fan_stream *origin, void *data, size_t bytes, fan_error *err);
} fan_recorder;

#endif
