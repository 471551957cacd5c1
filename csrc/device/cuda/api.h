/* api: the functions of the CUDA driver that the backend uses, listed once, loaded at run time.
 * Nothing is linked, and no CUDA header is needed.
 *
 * Each function is looked up in the version of the prototype here: by cuGetProcAddress if the
 * driver has it (11.3), else by its full name. A driver must have all functions of MUST; the others
 * belong to a feature, which is off if one of its functions is missing: then none of them is
 * called. */
#ifndef FAN_DEVICE_CUDA_API_H
#define FAN_DEVICE_CUDA_API_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int fan_cu_result; /* 0: success */
typedef int fan_cu_device;
typedef uint64_t fan_cu_pointer;
typedef struct fan_cu_context *fan_cu_context;
typedef struct fan_cu_stream *fan_cu_stream;
typedef struct fan_cu_event *fan_cu_event;
typedef struct fan_cu_module *fan_cu_module;
typedef struct fan_cu_function *fan_cu_function;
typedef struct fan_cu_graph *fan_cu_graph;
typedef struct fan_cu_exec *fan_cu_exec; /* an executable graph */
typedef struct fan_cu_node *fan_cu_node;
typedef struct fan_cu_object *fan_cu_object;
typedef struct fan_cu_pool *fan_cu_pool;
typedef void fan_cu_call(void *ctx); /* a host function that the driver calls */

/* The properties of a pool; fields not named here are 0. */
typedef struct fan_cu_pool_props {
    int allocation; /* FAN_CU_ALLOCATION_PINNED */
    int handles;
    /* FAN_CU_LOCATION_DEVICE, and which */
    int location;
    int device;
    void *security;
    size_t most;
    unsigned char reserved[56];
} fan_cu_pool_props;

/* X(NAME, words): the features */
#define FAN_CUDA_FEATURE_LIST(X)                                                   \
    X(MUST, "everything")                                                          \
    X(POOLS, "stream-ordered memory")                                              \
    X(STREAM_IDS, "telling a new stream from a destroyed one that had its handle") \
    X(CAPTURE, "work under stream capture")                                        \
    X(GRAPHS, "memory that lives as long as the graph that uses it")               \
    X(TREES, "graph trees")

typedef enum fan_cuda_feature {
#define X(name, words) FAN_CUDA_##name,
    FAN_CUDA_FEATURE_LIST(X)
#undef X
    FAN_CUDA_FEATURES
} fan_cuda_feature;

/* X(name, suffix of the full name, version whose prototype this is, feature, parameters) */
#define FAN_CUDA_LIST(X)                                                                         \
    X(Init, "", 2000, MUST, (unsigned flags))                                                    \
    X(DriverGetVersion, "", 2020, MUST, (int *version))                                          \
    X(GetErrorName, "", 6000, MUST, (fan_cu_result code, const char **name))                     \
    X(GetErrorString, "", 6000, MUST, (fan_cu_result code, const char **text))                   \
    X(DeviceGetCount, "", 2000, MUST, (int *count))                                              \
    X(DeviceGet, "", 2000, MUST, (fan_cu_device * out, int ordinal))                             \
    X(DeviceGetName, "", 2000, MUST, (char *name, int size, fan_cu_device d))                    \
    X(DeviceGetAttribute, "", 2000, MUST, (int *out, int which, fan_cu_device d))                \
    X(DevicePrimaryCtxRetain, "", 7000, MUST, (fan_cu_context * out, fan_cu_device d))           \
    X(DevicePrimaryCtxRelease, "_v2", 11000, MUST, (fan_cu_device d))                            \
    X(DevicePrimaryCtxGetState, "", 7000, MUST, (fan_cu_device d, unsigned *flags, int *active)) \
    X(CtxGetCurrent, "", 4000, MUST, (fan_cu_context * out))                                     \
    X(CtxPushCurrent, "_v2", 4000, MUST, (fan_cu_context c))                                     \
    X(CtxPopCurrent, "_v2", 4000, MUST, (fan_cu_context * out))                                  \
    X(CtxSynchronize, "", 2000, MUST, (void))                                                    \
    X(ModuleLoadData, "", 2000, MUST, (fan_cu_module * out, const void *image))                  \
    X(ModuleUnload, "", 2000, MUST, (fan_cu_module m))                                           \
    X(ModuleGetFunction, "", 2000, MUST,                                                         \
      (fan_cu_function * out, fan_cu_module m, const char *name))                                \
    X(OccupancyMaxActiveBlocksPerMultiprocessor, "", 6050, MUST,                                 \
      (int *out, fan_cu_function f, int threads, size_t shared))                                 \
    X(LaunchKernel, "", 4000, MUST,                                                              \
      (fan_cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,       \
       unsigned bz, unsigned shared, fan_cu_stream s, void **params, void **extra))              \
    X(MemAlloc, "_v2", 3020, MUST, (fan_cu_pointer * out, size_t bytes))                         \
    X(MemFree, "_v2", 3020, MUST, (fan_cu_pointer p))                                            \
    X(MemcpyHtoDAsync, "_v2", 3020, MUST,                                                        \
      (fan_cu_pointer to, const void *from, size_t bytes, fan_cu_stream s))                      \
    X(MemcpyDtoHAsync, "_v2", 3020, MUST,                                                        \
      (void *to, fan_cu_pointer from, size_t bytes, fan_cu_stream s))                            \
    X(MemsetD8Async, "", 3020, MUST,                                                             \
      (fan_cu_pointer p, unsigned char byte, size_t bytes, fan_cu_stream s))                     \
    X(PointerGetAttribute, "", 4000, MUST, (void *out, int which, fan_cu_pointer p))             \
    X(StreamCreate, "", 2000, MUST, (fan_cu_stream * out, unsigned flags))                       \
    X(StreamDestroy, "_v2", 4000, MUST, (fan_cu_stream s))                                       \
    X(StreamGetCtx, "", 9020, MUST, (fan_cu_stream s, fan_cu_context * out))                     \
    X(StreamSynchronize, "", 2000, MUST, (fan_cu_stream s))                                      \
    X(StreamWaitEvent, "", 3020, MUST, (fan_cu_stream s, fan_cu_event e, unsigned flags))        \
    X(EventCreate, "", 2000, MUST, (fan_cu_event * out, unsigned flags))                         \
    X(EventDestroy, "_v2", 4000, MUST, (fan_cu_event e))                                         \
    X(EventRecord, "", 2000, MUST, (fan_cu_event e, fan_cu_stream s))                            \
    X(EventQuery, "", 2000, MUST, (fan_cu_event e))                                              \
    X(EventSynchronize, "", 2000, MUST, (fan_cu_event e))                                        \
    X(MemAllocFromPoolAsync, "", 11020, POOLS,                                                   \
      (fan_cu_pointer * out, size_t bytes, fan_cu_pool pool, fan_cu_stream s))                   \
    X(MemFreeAsync, "", 11020, POOLS, (fan_cu_pointer p, fan_cu_stream s))                       \
    X(MemPoolCreate, "", 11020, POOLS, (fan_cu_pool * out, const fan_cu_pool_props *props))      \
    X(MemPoolDestroy, "", 11020, POOLS, (fan_cu_pool pool))                                      \
    X(MemPoolSetAttribute, "", 11020, POOLS, (fan_cu_pool pool, int which, void *value))         \
    X(MemPoolGetAttribute, "", 11020, POOLS, (fan_cu_pool pool, int which, void *value))         \
    X(MemPoolTrimTo, "", 11020, POOLS, (fan_cu_pool pool, size_t keep))                          \
    X(StreamGetId, "", 12000, STREAM_IDS, (fan_cu_stream s, uint64_t *id))                       \
    X(ThreadExchangeStreamCaptureMode, "", 10010, CAPTURE, (int *mode))                          \
    X(StreamGetCaptureInfo, "_v2", 11030, CAPTURE,                                               \
      (fan_cu_stream s, int *status, uint64_t *id, fan_cu_graph *graph, const void **frontier,   \
       size_t *count))                                                                           \
    X(UserObjectCreate, "", 11030, GRAPHS,                                                       \
      (fan_cu_object * out, void *ctx, fan_cu_call *destroy, unsigned refs, unsigned flags))     \
    X(UserObjectRelease, "", 11030, GRAPHS, (fan_cu_object o, unsigned count))                   \
    X(GraphRetainUserObject, "", 11030, GRAPHS,                                                  \
      (fan_cu_graph g, fan_cu_object o, unsigned count, unsigned flags))                         \
    X(StreamBeginCapture, "_v2", 10010, TREES, (fan_cu_stream s, int mode))                      \
    X(StreamEndCapture, "", 10000, TREES, (fan_cu_stream s, fan_cu_graph * out))                 \
    X(GraphGetNodes, "", 10000, TREES, (fan_cu_graph g, fan_cu_node * out, size_t *count))       \
    X(GraphNodeGetType, "", 10000, TREES, (fan_cu_node node, int *type))                         \
    X(GraphInstantiateWithFlags, "", 11040, TREES,                                               \
      (fan_cu_exec * out, fan_cu_graph g, uint64_t flags))                                       \
    X(GraphLaunch, "", 10000, TREES, (fan_cu_exec run, fan_cu_stream s))                         \
    X(GraphDestroy, "", 10000, TREES, (fan_cu_graph g))                                          \
    X(GraphExecDestroy, "", 10000, TREES, (fan_cu_exec run))                                     \
    X(MemGetInfo, "_v2", 3020, TREES, (size_t *unused, size_t *all))

typedef struct fan_cuda_api {
    void *library;  /* never closed */
    char path[256]; /* the name that was opened */
    int version;    /* 12040: CUDA 12.4; 0: unknown */
    bool has[FAN_CUDA_FEATURES];
    /* the first function that a feature lacks; NULL: none */
    const char *missing[FAN_CUDA_FEATURES];
#define X(name, suffix, version, feature, parameters) fan_cu_result(*name) parameters;
    FAN_CUDA_LIST(X)
#undef X
} fan_cuda_api;

/* The driver's constants in use. */
enum {
    FAN_CU_INVALID_VALUE = 1,
    FAN_CU_OUT_OF_MEMORY = 2,
    FAN_CU_DEINITIALIZED = 4,
    FAN_CU_NOT_READY = 600,
    FAN_CU_NOT_SUPPORTED = 801,
    FAN_CU_CAPTURE_UNJOINED = 904,
    FAN_CU_STREAM_NON_BLOCKING = 1,
    FAN_CU_POINTER_DEVICE_ORDINAL = 9,
    FAN_CU_EVENT_DISABLE_TIMING = 2,
    FAN_CU_ATTRIBUTE_MULTIPROCESSORS = 16,
    FAN_CU_ATTRIBUTE_PAGEABLE_ACCESS = 88, /* the device can read unregistered host memory */
    FAN_CU_ATTRIBUTE_MEMORY_POOLS = 115,
    FAN_CU_ALLOCATION_PINNED = 1,
    FAN_CU_LOCATION_DEVICE = 1,
    /* uint64_t: bytes that the pool keeps at a synchronization */
    FAN_CU_POOL_RELEASE_THRESHOLD = 4,
    FAN_CU_POOL_RESERVED = 5, /* uint64_t: bytes that the pool has now */
    FAN_CU_ATTRIBUTE_MAJOR = 75,
    FAN_CU_ATTRIBUTE_MINOR = 76,
    FAN_CU_CAPTURE_NONE = 0,
    FAN_CU_CAPTURE_ACTIVE = 1,
    FAN_CU_CAPTURE_BROKEN = 2,
    FAN_CU_CAPTURE_MODE_THREAD_LOCAL = 1, /* only calls of this thread can break the capture */
    FAN_CU_CAPTURE_MODE_RELAXED = 2,
    FAN_CU_NODE_MEMSET = 2, /* below it: kernels and copies */
    FAN_CU_NODE_MEM_ALLOC = 10,
    FAN_CU_NODE_MEM_FREE = 11,
    FAN_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1,
    FAN_CU_GRAPH_USER_OBJECT_MOVE = 1
};

/* fan_cuda_api_open: opens `path` (NULL: the system's driver), looks up the functions, and
 * initializes the driver. FAN_ERR_DEVICE with the driver's code (or 0) and a text that names the
 * user what to do. */
fan_status fan_cuda_api_open(fan_cuda_api *api, const char *path, fan_error *err);
/* fan_cuda_text: writes "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory". */
char *fan_cuda_text(const fan_cuda_api *api, fan_cu_result code, char *buf, size_t size);
/* fan_cuda_sticky: returns whether the context is lost after this code: every later call fails. */
bool fan_cuda_sticky(fan_cu_result code);
/* fan_cuda_stale: returns whether the code reports a destroyed context. A destroyed stream or event
 * gets it as well; then nothing is lost. */
bool fan_cuda_stale(fan_cu_result code);
/* fan_cuda_feature_words: returns a feature's name. */
const char *fan_cuda_feature_words(fan_cuda_feature f);

#endif
