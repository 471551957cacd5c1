/* The driver, its devices and contexts, and its functions by name. */
#include "fake_cuda/entry.h"

#include <stdio.h>
#include <string.h>

/* X(number, name, text): the codes that are known by name. */
#define CODE_LIST(X)                                                                           \
    X(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")                                       \
    X(2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")                                          \
    X(3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error")                                 \
    X(4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down")                                   \
    X(34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library")                          \
    X(35, "CUDA_ERROR_INSUFFICIENT_DRIVER",                                                    \
      "CUDA driver version is insufficient for CUDA runtime version")                          \
    X(100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")                       \
    X(101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")                              \
    X(200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid")                       \
    X(201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context")                             \
    X(209, "CUDA_ERROR_NO_BINARY_FOR_GPU",                                                     \
      "no kernel image is available for execution on the device")                              \
    X(214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered")              \
    X(226, "CUDA_ERROR_CONTAINED",                                                             \
      "Invalid access of peer GPU memory over nvlink or a hardware error")                     \
    X(400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle")                             \
    X(500, "CUDA_ERROR_NOT_FOUND", "named symbol not found")                                   \
    X(600, "CUDA_ERROR_NOT_READY", "device not ready")                                         \
    X(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered")           \
    X(701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch")    \
    X(709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed")                          \
    X(716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address")                              \
    X(719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure")                           \
    X(802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized")                        \
    X(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",                                                \
      "system has unsupported display driver / cuda driver combination")                       \
    X(804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",                                        \
      "forward compatibility was attempted on non supported HW")                               \
    X(810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "MPS client has been terminated by the server") \
    X(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",                                            \
      "operation not permitted when stream is capturing")                                      \
    X(901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",                                            \
      "operation failed due to a previous error during capture")                               \
    X(902, "CUDA_ERROR_STREAM_CAPTURE_MERGE",                                                  \
      "operation would result in a merge of separate capture sequences")                       \
    X(903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",                                              \
      "capture was not ended in the same stream as it began")                                  \
    X(904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work")         \
    X(905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",                                              \
      "dependency created on uncaptured work in another stream")                               \
    X(906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",                                               \
      "operation would make the legacy stream depend on a capturing blocking stream")          \
    X(907, "CUDA_ERROR_CAPTURED_EVENT",                                                        \
      "operation not permitted on an event last recorded in a capturing stream")               \
    X(908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",                                           \
      "attempt to terminate a thread-local capture sequence from another thread")              \
    X(911, "CUDA_ERROR_EXTERNAL_DEVICE", "external device failure")                            \
    X(999, "CUDA_ERROR_UNKNOWN", "unknown error")

fan_cu_result fan_fake_Init(unsigned flags)
{
    CALL(Init);
    fan__fake.initialised = flags == 0;
    return fan__ok_or(flags == 0, INVALID_VALUE);
}

fan_cu_result fan_fake_DriverGetVersion(int *version)
{
    CALL(DriverGetVersion);
    *version = fan__fake.version;
    return OK;
}

static fan_cu_result driver_code(fan_cu_result code, const char **name, const char **text)
{
    static const struct {
        int code;
        const char *name, *text;
    } codes[] = {
#define X(number, name, text) {number, name, text},
        CODE_LIST(X)
#undef X
    };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        if (codes[i].code == code) {
            if (name) {
                *name = codes[i].name;
            } else {
                *text = codes[i].text;
            }
            return OK;
        }
    }
    return INVALID_VALUE;
}

fan_cu_result fan_fake_GetErrorName(fan_cu_result code, const char **name)
{
    return driver_code(code, name, NULL);
}

fan_cu_result fan_fake_GetErrorString(fan_cu_result code, const char **text)
{
    return driver_code(code, NULL, text);
}

fan_cu_result fan_fake_DeviceGetCount(int *count)
{
    CALL(DeviceGetCount);
    *count = fan__fake.devices;
    return OK;
}

/* A device's number contains its machine's, so that a number of an older machine returns no context
   of this one. Tests may give the ordinal alone. */
static fan_cu_device driver_device(int ordinal)
{
    return (int)(fan__fake.era & 0xFFFFFF) * 2 * MOST_DEVICES + ordinal;
}

/* driver_ordinal: of a device of this machine; -1: of none. */
static int driver_ordinal(fan_cu_device d)
{
    int ordinal = d % (2 * MOST_DEVICES);
    if (d < 0 || ordinal >= fan__fake.devices)
        return -1;
    return d == ordinal || d == driver_device(ordinal) ? ordinal : -1;
}

fan_cu_result fan_fake_DeviceGet(fan_cu_device *out, int ordinal)
{
    CALL(DeviceGet);
    *out = driver_device(ordinal);
    return fan__ok_or(ordinal >= 0 && ordinal < fan__fake.devices, INVALID_DEVICE);
}

fan_cu_result fan_fake_DeviceGetName(char *name, int size, fan_cu_device d)
{
    CALL(DeviceGetName);
    (void)d;
    snprintf(name, (size_t)size, "fanin's fake device");
    return OK;
}

fan_cu_result fan_fake_DeviceGetAttribute(int *out, int which, fan_cu_device d)
{
    CALL(DeviceGetAttribute);
    (void)d;
    switch (which) {
    case FAN_CU_ATTRIBUTE_MULTIPROCESSORS:
        *out = 1;
        return OK;
    case FAN_CU_ATTRIBUTE_PAGEABLE_ACCESS:
        *out = fan__fake.coherent;
        return OK;
    case FAN_CU_ATTRIBUTE_MEMORY_POOLS:
        *out = fan__fake.pools;
        return OK;
    default:
        *out = which == FAN_CU_ATTRIBUTE_MAJOR ? fan__fake.compute / 10 : fan__fake.compute % 10;
        return OK;
    }
}

fan_cu_result fan_fake_DevicePrimaryCtxRetain(fan_cu_context *out, fan_cu_device d)
{
    CALL(DevicePrimaryCtxRetain);
    int at = driver_ordinal(d);
    if (at < 0)
        return INVALID_DEVICE;
    if (!fan__fake.contexts[at].retained)
        BESIDE(DevicePrimaryCtxRetain);
    fan__fake.contexts[at].retained++;
    *out = &fan__fake.contexts[at];
    return OK;
}

fan_cu_result fan_fake_DevicePrimaryCtxRelease(fan_cu_device d)
{
    CALL(DevicePrimaryCtxRelease);
    int at = driver_ordinal(d);
    if (at < 0 || fan__fake.contexts[at].retained == 0)
        return INVALID_CONTEXT;
    if (fan__fake.contexts[at].retained == 1)
        BESIDE(DevicePrimaryCtxRelease);
    fan__fake.contexts[at].retained--;
    return OK;
}

fan_cu_result fan_fake_DevicePrimaryCtxGetState(fan_cu_device d, unsigned *flags, int *active)
{
    CALL(DevicePrimaryCtxGetState);
    int at = driver_ordinal(d);
    if (at < 0)
        return INVALID_DEVICE;
    *flags = 0;
    *active = fan__fake.contexts[at].retained > 0;
    return OK;
}

fan_cu_result fan_fake_CtxGetCurrent(fan_cu_context *out)
{
    CALL(CtxGetCurrent);
    *out = fan__fake_current();
    return OK;
}

fan_cu_result fan_fake_CtxPushCurrent(fan_cu_context c)
{
    CALL(CtxPushCurrent);
    (void)fan__fake_current();
    bool ours = false;
    for (int i = 0; i < fan__fake.devices; i++)
        ours |= c == &fan__fake.contexts[i];
    if (!ours || !c->retained)
        return INVALID_CONTEXT;
    if (fan__fake_here.depth == MOST_DEPTH)
        return OUT_OF_MEMORY;
    fan__fake_here.stack[fan__fake_here.depth++] = c;
    return OK;
}

fan_cu_result fan_fake_CtxPopCurrent(fan_cu_context *out)
{
    struct fan_cu_context *c = fan__fake_current();
    if (!c)
        return INVALID_CONTEXT;
    *out = c;
    fan__fake_here
        /* a pop that is planned to fail pops all the same: else the thread would keep the
         * context */
        .depth--;
    CALL(CtxPopCurrent);
    return OK;
}

static bool driver_hides(const char *name)
{
    bool found = false;
    for (int i = 0; i < MOST_HIDDEN; i++)
        found |= strcmp(fan__fake.hidden[i], name) == 0;
    return found;
}

API cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

fan_cu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                                  int *status)
{
    static const struct {
        const char *name;
        int version;
        size_t at;
    } rows[] = {
#define X(name, suffix, version, feature, parameters) {"cu" #name, version, NUMBER_##name},
        FAN_CUDA_LIST(X)
#undef X
    };
    (void)flags;
    *out = NULL;
    *status = 1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].name, name) != 0 || driver_hides(name + 2))
            continue;
        if (version < rows[i].version || fan__fake.version < rows[i].version)
            continue;
        switch (rows[i].at) {
#define X(name, suffix, version, feature, parameters)   \
    case NUMBER_##name: {                               \
        fan_cu_result(*f) parameters = fan_fake_##name; \
        memcpy(out, &f, sizeof f);                      \
        break;                                          \
    }
            FAN_CUDA_LIST(X)
#undef X
        default:
            break;
        }
        *status = 0;
        return OK;
    }
    return NOT_FOUND;
}
