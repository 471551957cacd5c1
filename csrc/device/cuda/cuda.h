/* cuda: CUDA devices as a backend, by the driver's API alone (api.h).
 *
 * A fan_cuda is an open driver; its devices share its count, as those of a simulated machine do.
 * The primary context of a device is the one that torch, CuPy and JAX use: it is retained on first
 * use, and every kernel is loaded then, because nothing may be loaded under a capture. Each call
 * makes that context current and restores the thread's own.
 *
 * Title: Failures. A code that means a lost context (fan_cuda_sticky) poisons the device: later
 * calls fail at once with the first cause, frees do nothing, other devices are unaffected. A child
 * of fork() has no driver: calls fail, and drops there free nothing.
 *
 * Title: Per-thread streams. Handle 2 is another stream in each thread. A fan_stream of it records
 * its thread; another thread can neither record nor wait there.
 *
 * Title: Capture. A captured stream causes no query, wait or free. Memory that captured work uses
 * also belongs to the graph: it is freed after both its last drop and the graph's end. Calls that
 * CUDA considers unsafe under other threads' captures are made in relaxed mode. */
#ifndef FAN_DEVICE_CUDA_CUDA_H
#define FAN_DEVICE_CUDA_CUDA_H

#include "device/cuda/api.h"
#include "device/device.h"
#include "device/kernels/image.h"

typedef struct fan_cuda fan_cuda;

extern const fan_backend fan_cuda_backend;

/* fan_cuda_open: opens a driver (NULL: the system's); one hold. */
fan_status fan_cuda_open(const char *path, fan_cuda **out, fan_error *err);
fan_cuda *fan_cuda_hold(fan_cuda *c);
void fan_cuda_drop(fan_cuda *c); /* c may be NULL */
const fan_cuda_api *fan_cuda_driver(const fan_cuda *c);
int fan_cuda_count(const fan_cuda *c);
/* fan_cuda_device: initializes device `index` if needed: a hold in *out. FAN_ERR_VALUE if there is
 * no such device. *wants: the device's compute capability (89: 8.9) if the call failed because the
 * build embedded no kernels that this driver takes, and fan_cuda_give_kernels gave none before;
 * else 0. */
fan_status fan_cuda_device(fan_cuda *c, int index, fan_device **out, int *wants, fan_error *err);
/* fan_cuda_kernels: returns which image a device's kernels were loaded from; NULL: not used yet. */
const char *fan_cuda_kernels(const fan_cuda *c, int index);
/* fan_cuda_give_kernels: copies a CUBIN or PTX for a device that fan_cuda_device loads when it is
 * next called; `words` (of at most 63 bytes) is what fan_cuda_kernels returns then. The first image
 * given stays. */
fan_status fan_cuda_give_kernels(fan_cuda *c, int index, const void *code, size_t bytes,
                                 const char *words, fan_error *err);
/* fan_cuda_describe: writes "NVIDIA H100, compute 9.0", without a context. */
fan_status fan_cuda_describe(fan_cuda *c, int index, char *buf, size_t size, fan_error *err);
/* fan_cuda_stream: returns the stream of a handle (0 and 1: the legacy default; 2: this thread's
 * own), which its owner keeps alive. All holders of one handle share one fan_stream. FAN_ERR_VALUE
 * if the driver reports that it is of another device. */
fan_status fan_cuda_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err);
/* fan_cuda_here: returns the device whose primary context is current on this thread; -1: none in
 * use. */
int fan_cuda_here(fan_cuda *c);
/* fan_cuda_active: returns whether this process uses the device's primary context. Does not create
 * it. */
bool fan_cuda_active(fan_cuda *c, int index);
/* fan_cuda_holding: returns the device that owns the memory at `address`; -1: unknown to the
 * driver. */
int fan_cuda_holding(fan_cuda *c, uint64_t address);
void fan_cuda_leave_out(fan_cuda *c, uint64_t plan_bits); /* as fan_sim_leave_out */
#ifdef FAN_TEST
/* fan_cuda_bound_sorts: limits the entries of COO data sorted at a time, and the rows (below 2^32 -
 * 1). 0, 0: the defaults. */
void fan_cuda_bound_sorts(fan_cuda *c, int64_t entries, int64_t rows);
#endif

/* driver: the CUDA driver of the process, opened at its first use, and the devices and streams that
 * are named of it. */

/* fan_driver_open: the driver; the caller owns a hold in *out. Blocks while it is opened. */
fan_status fan_driver_open(fan_cuda **out, fan_error *err);
/* fan_driver_use: replaces the driver by the library at `path` (copied; NULL: the system's) for all
 * later uses. FAN_ERR_NOMEM. */
fan_status fan_driver_use(const char *path, fan_error *err);
/* fan_driver_compile: sets the function that compiles the kernels for a device that has none and
 * passes them to fan_cuda_give_kernels. It is called when the device is first used, without a lock;
 * err has the reason why the device has no kernels. */
typedef fan_status fan_compile_kernels(fan_cuda *c, int index, int compute, fan_error *err);
void fan_driver_compile(fan_compile_kernels *compile);

#endif
