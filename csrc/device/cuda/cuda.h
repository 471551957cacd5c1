/* cuda: CUDA's devices behind the table of backend.h, by the driver's API alone (api.h).
 *
 * A fan_cuda is a driver that was opened; its devices share its holds, as those of a simulated machine do. The primary
 * context of a device is the one that torch, CuPy and JAX use: it is retained when the device is first asked for, and
 * every kernel is loaded then, because nothing may be loaded under a capture. Each call makes that context current and
 * leaves the thread with the one it had.
 *
 * Title: Failures. A code that means a lost context (fan_cuda_sticky) poisons the device: later calls fail at once with
 * the first cause, frees do nothing, other devices go on. A child of fork() has no driver: calls say so, and what is
 * let go there is only forgotten.
 *
 * Title: Per-thread streams. Handle 2 is another stream in each thread. A fan_stream of it knows its thread; another
 * thread can neither record nor wait there.
 *
 * Title: Capture. While a stream is captured nothing is queried, waited for or freed on its account. Memory that
 * captured work uses belongs to the graph as well: it goes back when both its last hold and the graph have gone. Calls
 * that CUDA deems unsafe under other threads' captures are made in relaxed mode.
 */
#ifndef FAN_DEVICE_CUDA_CUDA_H
#define FAN_DEVICE_CUDA_CUDA_H

#include "device/cuda/api.h"
#include "device/device.h"
#include "device/kernels/image.h"

typedef struct fan_cuda fan_cuda;

/* fan_cuda_open: opens a driver (NULL: the system's) with one hold. */
fan_status fan_cuda_open(const char *path, fan_cuda **out, fan_error *err);
fan_cuda *fan_cuda_hold(fan_cuda *c);
void fan_cuda_drop(fan_cuda *c); /* NULL is fine */
const fan_cuda_api *fan_cuda_driver(const fan_cuda *c);
int fan_cuda_count(const fan_cuda *c);
/* fan_cuda_device: device `index`, ready for use: a hold in *out. FAN_ERR_VALUE where there is none of that number. */
fan_status fan_cuda_device(fan_cuda *c, int index, fan_device **out, fan_error *err);
fan_cuda *fan_cuda_of(const fan_device *d); /* NULL for another backend's device */
/* fan_cuda_kernels: what the kernels of a device were loaded from, in words; NULL: nobody has used it yet. */
const char *fan_cuda_kernels(const fan_cuda *c, int index);
/* fan_cuda_wants_kernels: after fan_cuda_device failed: the device's compute capability (89: 8.9) if it failed because
 * the build embedded no kernels that this driver takes, and none were given; else 0. */
int fan_cuda_wants_kernels(const fan_cuda *c, int index);
/* fan_cuda_give_kernels: copies a CUBIN or PTX for a device that fan_cuda_device loads when it is next called; `words`
 * (of at most 63 bytes) is what fan_cuda_kernels returns then. The first image given stays. */
fan_status fan_cuda_give_kernels(fan_cuda *c, int index, const void *code, size_t bytes, const char *words,
                                 fan_error *err);
/* fan_cuda_describe: "NVIDIA H100, compute 9.0", without a context. */
fan_status fan_cuda_describe(fan_cuda *c, int index, char *buf, size_t size, fan_error *err);
/* fan_cuda_stream: the stream of a handle (0 and 1: the legacy default; 2: this thread's own), which its giver keeps
 * alive. One handle is one fan_stream as long as somebody holds it. FAN_ERR_VALUE where the driver says that it is of
 * another device. */
fan_status fan_cuda_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err);
/* fan_cuda_here: the device whose primary context is current on this thread; -1: none that is in use. */
int fan_cuda_here(fan_cuda *c);
/* fan_cuda_active: whether somebody in this process uses the primary context of the device. To ask does not create it.
 */
bool fan_cuda_active(fan_cuda *c, int index);
/* fan_cuda_holding: the device on which the driver has memory at `address`; -1: it knows none there. */
int fan_cuda_holding(fan_cuda *c, uint64_t address);
/* fan_cuda_trim: memory that is kept for next sums and not in use goes back to the system; returns how many bytes.
 * Waits for a device where streams that used memory were destroyed. No stream may be captured that fanin does not know.
 */
size_t fan_cuda_trim(fan_cuda *c);
/* fan_cuda_keep: how many bytes of each device may be kept so when somebody synchronizes. */
void fan_cuda_keep(fan_cuda *c, size_t bytes);
void fan_cuda_leave_out(fan_cuda *c, uint64_t plan_bits); /* as fan_sim_leave_out */
#ifdef FAN_TEST
/* fan_cuda_bound_sorts: at most so many entries of COO data are sorted at a time, of so many rows (below 2^32 - 1). 0,
 * 0: as at first. */
void fan_cuda_bound_sorts(fan_cuda *c, int64_t entries, int64_t rows);
#endif


#endif
