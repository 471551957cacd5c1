/* fake: a CUDA driver made of a simulated machine: what driver.c, kernels.c and control.c share.
 *
 * It is a shared library of its own with the driver's entry points (cu..) and some more for tests
 * (fanFake..). Streams, events, memory and the checker are those of device/sim/sim.h; kernels are
 * device/kernels/kernels.cu compiled for the host. It refuses what the driver refuses, with the
 * same codes, as far as the backend and its tests can see. Addresses bear FAN_FAKE_TAG.
 *
 * One machine at a time. fanFakeReset makes a new one: every handle of the old one is invalid from
 * then on, as after a reset of the device by another
 * library. */
#ifndef FAN_FAKE_FAKE_H
#define FAN_FAKE_FAKE_H

#include "device/cuda/api.h"
#include "device/device.h"
#include "device/kernels/args.h"
#include "device/sim/sim.h"

#define FAN_FAKE_SHOWN __attribute__((visibility("default")))

/* The driver's codes that are named in here. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NO_BINARY_FOR_GPU = 209,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    CONTEXT_IS_DESTROYED = 709,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    UNKNOWN = 999
};

/* kernels.c. An access of a kernel: a view of the device's memory; the geometry is in dims. */

typedef struct fan_fake_access {
    fan_array array;
    int64_t dims[2 * FAN_MAX_NDIM];
} fan_fake_access;

typedef struct fan_fake_kernel {
    const char *name;
    size_t bytes;                                            /* of its arguments */
    bool table;                                              /* its arguments are a fan_k_many */
    fan_cu_result (*run)(const void *args, int64_t threads); /* a code that loses the context */
    /* most: room for its accesses. accesses: what it reads and writes, those that it writes last;
     * their number. `table`: the host copy of the memory that a fan_k_many names */
    size_t (*most)(const void *args);
    size_t (*accesses)(const void *args, const char *table, fan_fake_access *out, size_t *written);
} fan_fake_kernel;

/* fan_fake_table_bytes: of the table of a fan_k_many. */
size_t fan_fake_table_bytes(const fan_k_many *a);

#define FAN_FAKE_KERNELS 128 /* at most */
const fan_fake_kernel *fan_fake_kernel_find(const char *name);
size_t fan_fake_kernel_number(const fan_fake_kernel *k);

#endif
