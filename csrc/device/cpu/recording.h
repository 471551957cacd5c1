/* recording: records the work of the CPU for replay: the list of the kernels of a function of a
 * graph tree, with their views.
 *
 * While a thread records, its work is appended to the list and does not run: the launch runs it, as
 * on a device. The core's own jobs (sums, folds, copies, conversions) are the C call with its
 * pointers, shapes and strides; a frontend's operation (of an array library) is a callback. A
 * launch runs the list: no engine, no slots, no rules, no allocation by the core. Memory is the
 * tree's, which checks the accesses afterwards. Nothing else is repeated: host values keep their
 * recorded results.
 *
 * Refused by name: sparse sums (their size depends on values), exact sums, statistics. A recording
 * that met such a job is invalid: its end fails with the first reason, even if the error was
 * handled.
 *
 * The caller ensures that one thread at a time launches a recording. */
#ifndef FAN_DEVICE_CPU_RECORDING_H
#define FAN_DEVICE_CPU_RECORDING_H

#include "device/job.h"
#include "device/backend.h"

#define FAN_CPU_POISON 0xff /* each byte of memory that must not be read: a NaN in every float */

/* Bytes that a kernel reads or writes. */
typedef struct fan_cpu_access {
    const void *data;
    size_t bytes;
    bool write;
} fan_cpu_access;

/* A frontend's kernel. */
typedef struct fan_cpu_call {
    fan_status (*run)(void *ctx, fan_error *err);
    void (*drop)(void *ctx); /* called once, with the recording's end, or if the call is rejected */
    void *ctx;
    const char *name; /* lives as long as ctx */
    const fan_cpu_access *accesses;
    size_t n;
} fan_cpu_call;

/* fan_recording_here: returns this thread's recording, borrowed; NULL: none. */
fan_recording *fan_recording_here(void);
/* fan_recording_call: appends a kernel; takes ctx, also on failure. FAN_ERR_NOMEM. */
fan_status fan_recording_call(fan_recording *r, const fan_cpu_call *call, fan_error *err);
/* fan_recording_job: appends a job to this thread's recording; *recorded: whether there is one, and
 * the job must not run now. FAN_ERR_CAPTURE, FAN_ERR_NOMEM. */
fan_status fan_recording_job(const fan_job *job, bool *recorded, fan_error *err);

/* fan_cpu_recorder: the CPU's entries (device/backend.h). */
extern const fan_recorder fan_cpu_recorder;

#endif
