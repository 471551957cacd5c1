/* recorder: records the work of a device and replays it: the entries that a backend's author fills in for graph trees
 * (graph/).
 *
 * One tree at a time calls each entry, on the thread that calls the tree's function, with no lock of ours held but the
 * tree's own, and without the interpreter's lock. `origin` is the tree's stream; NULL on a device without streams. The
 * order of calls:
 *
 *   origin      once, when the tree is made
 *   begin       the thread starts recording; the function's body runs (on this thread; it may fork `origin`)
 *   end         .. returns the recording, or fails: either way recording ends;  or
 *   abort       .. the body failed: discards the recording; never fails
 *   launch      any number of times, in any order with launches of others on the same origin, from any thread
 *   drop        once
 *
 * Memory: while the thread records, or warms up, it has a fan_memory_scope (memory.h): its allocations on the device
 * come from the tree's arena, at fixed addresses; the recorder allocates none. */
#ifndef FAN_DEVICE_RECORDER_H
#define FAN_DEVICE_RECORDER_H

#include "array/array.h"

#define FAN_POISON 0xA5 /* each byte of memory that must not be read */

typedef struct fan_device fan_device;
typedef struct fan_stream fan_stream;
typedef struct fan_recording fan_recording; /* the backend's own */

/* One access of a recording: `bytes` from `data` on, by the operation `name`. Returns false to end the visit. */
typedef bool (*fan_recording_visit)(void *ctx, const char *name, const void *data, size_t bytes, bool write);

typedef struct fan_recorder {
    /* origin: makes a stream for the tree. The caller owns a hold. NULL: the device has none. */
    fan_status (*origin)(fan_device *d, fan_stream **out, fan_error *err);

    /* begin: records all that this thread queues from now on on `origin`, and on streams that wait for it, instead of
     * running it (a device without streams: all work of the thread). FAN_ERR_CAPTURE, FAN_ERR_NOMEM, FAN_ERR_DEVICE. */
    fan_status (*begin)(fan_device *d, fan_stream *origin, fan_error *err);

    /* end: returns the recording, for the caller to drop. FAN_ERR_CAPTURE with the reason: a stream that was not
     * joined, a call that cannot be recorded. */
    fan_status (*end)(fan_device *d, fan_stream *origin, fan_recording **out, fan_error *err);
    void (*abort)(fan_device *d, fan_stream *origin);

    /* launch: runs all of it again, in the order of `origin`. Avoids allocation. */
    fan_status (*launch)(fan_recording *r, fan_stream *origin, fan_error *err);
    void (*drop)(fan_recording *r);

    /* accesses: visits its accesses, as far as they are available; for others the roles are trusted. NULL: none are. */
    void (*accesses)(const fan_recording *r, fan_recording_visit visit, void *ctx);
    /* accesses_all: `accesses` visits all of them: kernels of other libraries cannot be part of a recording. */
    bool accesses_all;

    /* clock: returns when all that is queued on `origin` will have run, in microseconds of the device's clock: for
     * traces. NULL: unknown. */
    double (*clock)(fan_device *d, fan_stream *origin);

    /* bytes: returns the device memory that the driver uses for it, beside the arena. NULL: none. */
    uint64_t (*bytes)(const fan_recording *r);

    /* poison: fills memory that must not be read any more, in the order of `origin`; only with debug=True, unless
     * `always_poisons`. NULL: leaves it. */
    bool always_poisons;
    fan_status (*poison)(fan_device *d, fan_stream *origin, void *data, size_t bytes, fan_error *err);
} fan_recorder;

#endif
