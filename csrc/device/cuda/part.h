/* part: the structs of the driver's devices. */
#ifndef FAN_DEVICE_CUDA_PART_H
#define FAN_DEVICE_CUDA_PART_H

#include "device/cuda/cuda.h"
#include "device/event.h"

/* X(field, name): the kernels other than folds. */
#define FAN__CUDA_KERNEL_LIST(X)            \
    X(any, "fan_any")                       \
    X(fold_stats_any, "fan_fold_stats_any") \
    X(fold_stats_end, "fan_fold_stats_end") \
    X(nonfinite, "fan_nonfinite_any")       \
    X(sort_count, "fan_sort_count")         \
    X(sort_scan, "fan_sort_scan")           \
    X(sort_move, "fan_sort_move")           \
    X(scatter, "fan_scatter_any")

#define FAN__CUDA_FOLDS 32

/* Kernels that were compiled for a device when it was first used. Written under fan__cuda_making. */
typedef struct fan__cuda_image {
    void *code; /* CUBIN or PTX; NULL: none yet */
    char words[64];
    bool wanted; /* the load failed because no image, or none that this driver takes, is there */
} fan__cuda_image;

enum {
#define X(field, name) FAN__CUDA_KERNEL_##field,
    FAN__CUDA_KERNEL_LIST(X)
#undef X
        FAN__CUDA_KERNELS
};

/* The number of blocks of a kernel that fit on a multiprocessor at a time. */
typedef struct fan__cuda_resident {
    fan_cu_function kernel;
    int blocks;
} fan__cuda_resident;

/* An allocated block. */
typedef struct fan__cuda_block {
    uint64_t address;
    size_t bytes;
    bool pooled;           /* from the pool */
    bool kept;             /* from cuMemAlloc, and unused: kept for reuse */
    bool left;             /* dropped, but a graph uses it */
    uint64_t capture;      /* the last capture whose graph holds it */
    atomic_size_t *graphs; /* graphs that use it; counted down on threads of the driver. NULL: none ever did */
} fan__cuda_block;

/* A stream of our own for captures that need one. */
typedef struct fan__capture_stream {
    uint64_t handle;
    uint64_t capture; /* the last capture that used it */
    size_t asked;     /* threads that are about to hold it */
} fan__capture_stream;

typedef struct fan_cuda_part {
    fan_device device;
    fan_cuda *cuda;
    int index;
    fan_cu_device ordinal;
    pthread_mutex_t
        lock;          /* guards all below; the driver may be called under it during the initialization of the part */
    atomic_bool ready; /* initialized: context, module, functions, free_stream, pool */
    bool pools;        /* stream-ordered memory is available */
    fan_cu_context context;
    int compute; /* 89: 8.9 */
    fan_cu_module module;
    fan__cuda_image image; /* kept until the driver is closed */
    const char *loaded;    /* which kernels the device has, in words: the image's, or a constant */
    fan_cu_function folds[FAN__CUDA_FOLDS], many[FAN__CUDA_FOLDS], fold_scatter[FAN__CUDA_FOLDS],
        fold_stats[FAN__CUDA_FOLDS], /* with statistics */
        reduce[FAN__CUDA_FOLDS];
#define X(field, name) fan_cu_function field;
    FAN__CUDA_KERNEL_LIST(X)
#undef X
    fan__cuda_resident resident[4 * FAN__CUDA_FOLDS + FAN__CUDA_KERNELS]; /* for kernels that distribute their work */
    size_t nresident;
    fan_cu_stream free_stream; /* of our own: only frees run on it */
    fan_cu_pool pool;          /* of our own */
    bool reads_host;           /* the device may read host memory after a copy from there has returned */
    int processors;
    fan_stream **streams; /* those with holders; not held */
    size_t nstreams, streams_cap;
    fan__capture_stream *capture_streams;
    size_t ncapture_streams, capture_streams_cap;
    fan__cuda_block *blocks; /* by address */
    size_t nblocks, blocks_cap;
    char *staging; /* for the tables of run_many; NULL: none, or in use */
    size_t staging_bytes;
    size_t nleft; /* number of blocks with `left`; if 0, block_free_pending has nothing to do */
    atomic_bool dead;
    fan_error cause; /* the first failure that ended the context; written once, before `dead` */
} fan_cuda_part;

struct fan_cuda {
    atomic_size_t holds;
    fan_cuda_api api;
    unsigned life; /* fan_fork_generation when it was opened */
    int count;
    uint64_t left_out;
    int64_t most_entries, most_rows; /* of one sort of COO data */
    fan_cuda_part *parts;
    fan_recording *recordings; /* in progress; guarded by the first part's lock */
    atomic_size_t recordings_begun;
    fan_cuda *next; /* of all that are open */
};

/* The backend's data of a stream. */
typedef struct fan__cuda_stream {
    fan_cu_stream handle;
    uint64_t thread;    /* of handle 2; else 0 */
    uint64_t id;        /* the driver's, unique for ever; 0: unknown */
    atomic_bool passed; /* destroyed, and the whole device was waited for since; release after the wait, acquire */
    /* the driver reported that it was destroyed: the handle is not used again, and may already be another stream's */
    atomic_bool gone;
} fan__cuda_stream;

/* The context of a part, current between enter and leave. */
typedef struct fan__cuda_scope {
    fan_cuda_part *part;
    bool pushed;
} fan__cuda_scope;

static inline fan_cuda_part *fan__cuda_part_of(fan_device *d)
{
    return (fan_cuda_part *)(void *)d; /* its first member */
}

static inline const fan_cuda_api *fan__cuda_api_of(const fan_cuda_part *p) { return &p->cuda->api; }

#endif
