/* recording: what the CPU did, to be done again: the list of the kernels that ran, with their views.
 *
 * While a thread records, its work runs as ever and is put into the list: the core's own jobs (sums, folds, copies,
 * conversions) as the C call with its pointers, shapes and strides; what a frontend runs (an operation of a library) as
 * a callback. A replay goes down the list: no engine, no slots, no rules, nothing is allocated by the core.
 *
 *   memory    what the thread allocates by the core lies in blocks of the recording (blocks.h): each replay finds it at
 *             the same place. An array that nobody holds any more makes room for the next.
 *   operands  memory that is none of the blocks', and that kernels may read and write: what was told to be so. Anything
 *             else was made around the recording, and a replay would see what it holds by then: FAN_ERR_CAPTURE.
 *   nothing else is done again: what was computed of values on the host is as it was when it was recorded.
 *
 * What cannot be recorded says so: sparse sums (their size depends on values), exact sums, statistics. A recording that
 * met such a thing is no recording: its end fails with the first reason, whoever kept the error to himself.
 *
 * For a graph tree (fan_cpu_recorder) work is put into the list and does not run: the launch runs it, as on a device.
 * Its memory is the tree's, without blocks, and the tree judges what it touches once it is made.
 *
 * One thread at a time records, or replays, one recording: that is the caller's business. */
#ifndef FAN_DEVICE_CPU_RECORDING_H
#define FAN_DEVICE_CPU_RECORDING_H

#include "device/cpu/blocks.h"
#include "device/job.h"
#include "device/recorder.h"

/* Bytes that a kernel reads or writes. */
typedef struct fan_cpu_access {
    const void *data;
    size_t bytes;
    bool write;
} fan_cpu_access;

/* A kernel of a frontend's. */
typedef struct fan_cpu_call {
    fan_status (*run)(void *ctx, fan_error *err);
    void (*drop)(void *ctx); /* once, with the recording, or where it is not taken */
    void *ctx;
    const char *name; /* lives as long as ctx */
    const fan_cpu_access *accesses;
    size_t n;
} fan_cpu_call;

/* fan_recording_new: an empty one. NULL: out of memory. */
fan_recording *fan_recording_new(void);
void fan_recording_free(fan_recording *r); /* its blocks stay as long as arrays in them do; NULL is fine */
/* fan_recording_begin: this thread records. FAN_ERR_CAPTURE where it does already. fan_recording_end: it does no more;
 * the reason where something could not be recorded. */
fan_status fan_recording_begin(fan_recording *r, fan_error *err);
fan_status fan_recording_end(fan_recording *r, fan_error *err);
/* fan_recording_operand: kernels may touch these bytes from now on; until then any. The caller keeps them where they
 * are. FAN_ERR_NOMEM. */
fan_status fan_recording_operand(fan_recording *r, const void *data, size_t bytes, fan_error *err);
/* fan_recording_knows: whether a kernel may touch them. */
bool fan_recording_knows(fan_recording *r, const void *data, size_t bytes);
/* fan_recording_call: a kernel more, which has run, or runs next; ctx is taken, also where it fails. FAN_ERR_CAPTURE:
 * it touches memory that the recording does not know. */
fan_status fan_recording_call(fan_recording *r, const fan_cpu_call *call, fan_error *err);
/* fan_recording_fail: it is no recording: its end says why. */
void fan_recording_fail(fan_recording *r, const char *why);
/* fan_recording_replay: all kernels once more, in the order in which they ran; ends with the first that fails. */
fan_status fan_recording_replay(fan_recording *r, fan_error *err);
size_t fan_recording_kernels(const fan_recording *r);
fan_blocks *fan_recording_blocks(const fan_recording *r); /* borrowed */

/* fan_recording_here: that of this thread, borrowed; NULL: it does not record. */
fan_recording *fan_recording_here(void);
/* fan_recording_defers: this thread records for a graph tree (fan_cpu_recorder): nothing runs before the launch. */
bool fan_recording_defers(void);
/* fan_recording_job: a job that runs next, if this thread records. FAN_ERR_CAPTURE, FAN_ERR_NOMEM. */
fan_status fan_recording_job(const fan_job *job, fan_error *err);

/* fan_cpu_recorder: the CPU's, for its table (device/recorder.h). */
extern const fan_recorder fan_cpu_recorder;

#endif
