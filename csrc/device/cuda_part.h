/* cuda_part: the inside of the CUDA backend: what cuda.c, cuda_memory.c and cuda_run.c share. */
#ifndef FAN_DEVICE_CUDA_PART_H
#define FAN_DEVICE_CUDA_PART_H

#include "device/cuda.h"

/* X(field, name): the kernels that are no fold. */
#define FAN_CUDA_KERNEL_LIST(X)       \
    X(any, "fan_any")                 \
    X(tell_any, "fan_fold_stats_any") \
    X(tell_end, "fan_fold_stats_end") \
    X(blame, "fan_nonfinite_any")     \
    X(reduce, "fan_reduce_any")       \
    X(scatter, "fan_scatter_any")

#define FAN_CUDA_FOLDS 32

/* Memory that was handed out. */
typedef struct fan_cuda_block {
    uint64_t address;
    size_t bytes;
    bool pooled;           /* of cuMemAllocAsync */
    bool left;             /* its last hold went, but a graph uses it */
    uint64_t capture;      /* the last capture that was told of it */
    atomic_size_t *graphs; /* graphs that use it, counted down by the driver's threads; NULL: none ever did */
} fan_cuda_block;

/* A stream of our own for captures that need one. */
typedef struct fan_cuda_spare {
    uint64_t handle;
    uint64_t capture; /* the last one that it was lent to */
    size_t asked;     /* threads that are about to hold it */
} fan_cuda_spare;

typedef struct fan_cuda_part {
    fan_device device;
    fan_cuda *cuda;
    int index;
    fan_cu_device ordinal;
    pthread_mutex_t lock; /* guards all that follows; the driver may be called under it while the part is made ready */
    atomic_bool ready;    /* all of it is there: context, module, functions, house, pool */
    bool pools;           /* stream-ordered memory is there */
    fan_cu_context context;
    fan_cu_module module;
    fan_cu_function folds[FAN_CUDA_FOLDS], many[FAN_CUDA_FOLDS], tells[FAN_CUDA_FOLDS]; /* tells: with statistics */
#define X(field, name) fan_cu_function field;
    FAN_CUDA_KERNEL_LIST(X)
#undef X
    fan_cu_stream house; /* of our own, for what nobody waits for */
    fan_cu_pool pool;
    int processors;
    fan_stream **streams; /* those that somebody holds; no holds */
    size_t nstreams, streams_cap;
    fan_cuda_spare *spares;
    size_t nspares, spares_cap;
    fan_cuda_block *blocks; /* by address */
    size_t nblocks, blocks_cap;
    char *staging; /* where the tables of run_many are made; NULL: none, or in use */
    size_t staging_bytes;
    size_t nleft; /* blocks that are left: reap need not look where there is none */
    atomic_bool dead;
    fan_error cause; /* of its death; written once, before `dead` */
} fan_cuda_part;

struct fan_cuda {
    atomic_size_t holds;
    fan_cuda_api api;
    unsigned life; /* forks so far when it was opened */
    int count;
    uint64_t left_out;
    fan_cuda_part *parts;
    fan_cuda *next; /* of all that are open */
};

/* A stream as the backend sees it. */
typedef struct fan_cuda_queue {
    fan_cu_stream handle;
    uint64_t thread; /* of handle 2; else 0 */
    atomic_bool
        gone; /* the driver said that it was destroyed: the handle is not used again, and may be another stream's */
} fan_cuda_queue;

/* The context of a part, current between enter and leave. */
typedef struct fan_cuda_scope {
    fan_cuda_part *part;
    bool pushed;
} fan_cuda_scope;

static inline fan_cuda_part *fan_cuda_part_of(fan_device *d)
{
    return (fan_cuda_part *)(void *)d; /* its first member */
}

static inline const fan_cuda_api *fan_cuda_api_of(const fan_cuda_part *p) { return &p->cuda->api; }

/* fan_cuda_usable: not in a forked child, and not dead. */
bool fan_cuda_usable(const fan_cuda_part *p);
fan_status fan_cuda_enter(fan_cuda_part *p, fan_cuda_scope *scope, fan_error *err);
void fan_cuda_leave(fan_cuda_scope *scope);
/* fan_cuda_check: what a driver's code means: FAN_OK, FAN_ERR_DEVICE_NOMEM, FAN_ERR_CAPTURE, FAN_ERR_DEVICE; `call`
 * names the function and what it was for. */
fan_status fan_cuda_check(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err);
/* fan_cuda_relax: from here to the same call with what it returned (-1: nothing was changed), this thread's unsafe
 * calls disturb nobody's capture. */
int fan_cuda_relax(const fan_cuda_part *p, int mode);
/* fan_cuda_pass: blocks until all that is queued on a stream, which is not captured, has run. The captures of others
 * are not disturbed. */
fan_status fan_cuda_pass(fan_cuda_part *p, fan_cu_stream on, fan_error *err);
/* fan_cuda_queue_of: the driver's handle; FAN_ERR_VALUE for another thread's own stream. */
fan_status fan_cuda_queue_of(const fan_stream *s, fan_cu_stream *out, fan_error *err);
/* fan_cuda_capture_of: the capture that s is in, 0: none; its graph too where asked for. */
fan_status fan_cuda_capture_of(fan_stream *s, uint64_t *id, fan_cu_graph *graph, fan_error *err);

/* cuda_memory.c */
fan_status fan_cuda_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err);
void fan_cuda_free(fan_device *d, void *data, size_t bytes);
/* fan_cuda_scratch: memory for one job on s; fan_cuda_scratch_free: in the order of s. */
fan_status fan_cuda_scratch(fan_stream *s, size_t bytes, uint64_t *out, fan_error *err);
void fan_cuda_scratch_free(fan_stream *s, uint64_t address);
/* fan_cuda_retain: work under capture uses the memory at `address`: it lives as long as the graph. */
fan_status fan_cuda_retain(fan_cuda_part *p, uint64_t address, uint64_t capture, fan_cu_graph graph, fan_error *err);
void fan_cuda_blocks_fini(fan_cuda_part *p);
/* cuda_run.c */
fan_status fan_cuda_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
fan_status fan_cuda_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *fates,
                             fan_error *err);
fan_status fan_cuda_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err);
fan_status fan_cuda_load_kernels(fan_cuda_part *p, fan_error *err);

#endif
