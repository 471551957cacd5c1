/* recording: records the work of the CPU for replay: the list of the kernels that ran, with their
 * views.
 *
 * While a thread records, its work runs as usual and is appended to the list: the core's own jobs
 * (sums, folds, copies, conversions) as the C call with its pointers, shapes and strides; a
 * frontend's operation (of an array library) as a callback. A replay runs the list: no engine, no
 * slots, no rules, no allocation by the core.
 *
 *   memory    the thread's allocations by the core come from blocks of the recording (blocks.h): at
 * the same address in each replay. A freed array makes room for the next. operands  other memory
 * that kernels may read and write, declared as such. Any other memory was made around the
 *     recording, and a replay would use its contents at that time: FAN_ERR_CAPTURE.
 *
 * Nothing else is repeated: host values keep their recorded results.
 *
 * Refused by name: sparse sums (their size depends on values), exact sums, statistics. A recording
 * that met such a job is invalid: its end fails with the first reason, even if the error was
 * handled.
 *
 * For a graph tree (fan_cpu_recorder) work is appended and does not run: the launch runs it, as on
 * a device. Its memory is the tree's, without blocks, and the tree checks its accesses afterwards.
 *
 * The caller ensures that one thread at a time records, or replays, a recording. */
#ifndef FAN_DEVICE_CPU_RECORDING_H
#define FAN_DEVICE_CPU_RECORDING_H

#include "device/cpu/blocks.h"
#include "device/job.h"
#include "device/backend.h"

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

/* fan_recording_new: an empty one; NULL when out of memory. */
fan_recording *fan_recording_new(void);
/* its blocks live as long as arrays in them do; r may be NULL */
void fan_recording_free(fan_recording *r);
/* fan_recording_begin: starts recording on this thread. FAN_ERR_CAPTURE if it records already.
 * fan_recording_end: stops; returns the reason if something could not be recorded. */
fan_status fan_recording_begin(fan_recording *r, fan_error *err);
fan_status fan_recording_end(fan_recording *r, fan_error *err);
/* fan_recording_operand: declares that kernels may access these bytes; until the first such call
 * they may access any. The caller keeps the memory in place. FAN_ERR_NOMEM. */
fan_status fan_recording_operand(fan_recording *r, const void *data, size_t bytes, bool writable,
                                 fan_error *err);
/* fan_recording_knows: returns whether a kernel may access these bytes; `write`: whether it may
 * write them. */
bool fan_recording_knows(fan_recording *r, const void *data, size_t bytes, bool write);
/* fan_recording_call: appends a kernel, which has run, or runs next; takes ctx, also on failure.
 * FAN_ERR_CAPTURE: it accesses memory that is not allowed. */
fan_status fan_recording_call(fan_recording *r, const fan_cpu_call *call, fan_error *err);
/* fan_recording_fail: makes the recording invalid: its end fails with this reason. */
void fan_recording_fail(fan_recording *r, const char *why);
/* fan_recording_replay: runs all kernels again, in their order; stops at the first failure. */
fan_status fan_recording_replay(fan_recording *r, fan_error *err);
size_t fan_recording_kernels(const fan_recording *r);
fan_blocks *fan_recording_blocks(const fan_recording *r); /* borrowed */

/* fan_recording_here: returns this thread's recording, borrowed; NULL: none. */
fan_recording *fan_recording_here(void);
/* fan_recording_defers: returns whether this thread records for a graph tree (fan_cpu_recorder):
 * kernels do not run before the launch. */
bool fan_recording_defers(void);
/* fan_recording_job: records a job that runs next, if this thread records. FAN_ERR_CAPTURE,
 * FAN_ERR_NOMEM. */
fan_status fan_recording_job(const fan_job *job, fan_error *err);

/* fan_cpu_recorder: the CPU's entries (device/backend.h). */
extern const fan_recorder fan_cpu_recorder;

#endif
