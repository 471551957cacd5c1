/* part: the structs of the driver's devices, and the functions that the files of device/cuda call
 * of each other, a section per file. */
#ifndef FAN_DEVICE_CUDA_PART_H
#define FAN_DEVICE_CUDA_PART_H

#include "array/nditer.h"
#include "device/cuda/cuda.h"
#include "device/event.h"
#include "device/job.h"
#include "device/kernels/args.h"

#include <string.h>

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

/* Kernels that were compiled for a device when it was first used. Written by the thread that
 * initializes it. */
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
    bool pooled;      /* from the pool */
    bool kept;        /* from cuMemAlloc, and unused: kept for reuse */
    bool left;        /* dropped, but a graph uses it */
    uint64_t capture; /* the last capture whose graph holds it */
    /* graphs that use it; counted down on threads of the driver. NULL: none ever did */
    atomic_size_t *graphs;
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
        /* guards all below; the driver may be called under it during the initialization of the
         * part */
        lock;
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
    /* for kernels that distribute their work */
    fan__cuda_resident resident[4 * FAN__CUDA_FOLDS + FAN__CUDA_KERNELS];
    size_t nresident;
    fan_cu_stream free_stream; /* of our own: only frees run on it */
    fan_cu_pool pool;          /* of our own */
    /* the device may read host memory after a copy from there has returned */
    bool reads_host;
    int processors;
    fan_stream **streams; /* those with holders; not held */
    size_t nstreams;
    size_t streams_cap;
    fan__capture_stream *capture_streams;
    size_t ncapture_streams;
    size_t capture_streams_cap;
    fan__cuda_block *blocks; /* by address */
    size_t nblocks;
    size_t blocks_cap;
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
    /* of one sort of COO data */
    int64_t most_entries;
    int64_t most_rows;
    fan_cuda_part *parts;
    fan_recording *recordings; /* in progress; guarded by the first part's lock */
    atomic_size_t recordings_begun;
    fan_cuda *next; /* of all that are open */
};

/* The backend's data of a stream. */
typedef struct fan__cuda_stream {
    fan_cu_stream handle;
    uint64_t thread; /* of handle 2; else 0 */
    uint64_t id;     /* the driver's, unique for ever; 0: unknown */
    /* destroyed, and the whole device was waited for since; release after the wait, acquire */
    atomic_bool passed;
    /* the driver reported that it was destroyed: the handle is not used again, and may already be
     * another stream's */
    atomic_bool gone;
} fan__cuda_stream;

/* The context of a part, current between enter and leave. */
typedef struct fan__cuda_scope {
    fan_cuda_part *part;
    bool pushed;
    fan_cu_stream on; /* fan__cuda_enter_on: the driver's handle of the stream */
} fan__cuda_scope;

static inline fan_cuda_part *fan__cuda_part_of(fan_device *d)
{
    return (fan_cuda_part *)(void *)d; /* its first member */
}

static inline void fan__part_lock(fan_cuda_part *p)
{
    (void)pthread_mutex_lock(&p->lock);
}

static inline void fan__part_unlock(fan_cuda_part *p)
{
    (void)pthread_mutex_unlock(&p->lock);
}

static inline const fan_cuda_api *fan__cuda_api_of(const fan_cuda_part *p)
{
    return &p->cuda->api;
}

/* fan__parts_of: a complex number has two parts, another one. */
static inline int fan__parts_of(fan_dtype dtype)
{
    return fan_dtype_kind(dtype) == 'c' ? 2 : 1;
}

/* context: calls of the driver: makes the primary context current, converts codes to statuses,
 * handles forks. */

/* fan__cuda_usable: returns whether the part is alive and this is no forked child. */
bool fan__cuda_usable(const fan_cuda_part *p);
bool fan__cuda_forked(const fan_cuda *c);
/* fan__cuda_refuse_dead: FAN_ERR_DEVICE with the failure that ended the context. */
fan_status fan__cuda_refuse_dead(fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_refuse_child(const fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_enter(fan_cuda_part *p, fan__cuda_scope *scope, fan_error *err);
void fan__cuda_leave(fan__cuda_scope *scope);
/* fan__cuda_refuse: converts a driver's nonzero code: FAN_ERR_DEVICE_NOMEM, FAN_ERR_CAPTURE,
 * FAN_ERR_DEVICE; `call` names the function and its purpose. */
fan_status fan__cuda_refuse(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err);
/* fan__cuda_check: as fan__cuda_refuse; FAN_OK for a code of 0. */
static inline fan_status fan__cuda_check(fan_cuda_part *p, fan_cu_result code, const char *call,
                                         fan_error *err)
{
    if (code == 0)
        return FAN_OK;
    return fan__cuda_refuse(p, code, call, err);
}
/* fan__cuda_capture_advice: returns what to do about the codes 900 to 908. */
const char *fan__cuda_capture_advice(fan_cu_result code);
/* fan__cuda_lives: returns whether the driver still has the primary context. */
bool fan__cuda_lives(const fan_cuda_part *p);
/* fan__cuda_relax: puts this thread into a capture mode in which its unsafe calls do not disturb
 * captures of other threads. Returns what fan__cuda_restore takes, which undoes it (-1: the mode
 * was already set). */
int fan__cuda_relax(const fan_cuda_part *p);
void fan__cuda_restore(const fan_cuda_part *p, int mode);
/* fan__cuda_pass: blocks until all that is queued on a stream, which is not captured, has run. Does
 * not disturb other captures. */
fan_status fan__cuda_pass(fan_cuda_part *p, fan_cu_stream on, fan_error *err);


/* stream: streams of the driver: handles, captures, the table's entries. */

static inline fan__cuda_stream *fan__cuda_queue(const fan_stream *s)
{
    return s->impl;
}

/* fan__cuda_queue_of: returns the driver's handle; FAN_ERR_VALUE for another thread's own
 * stream. */
fan_status fan__cuda_queue_of(const fan_stream *s, fan_cu_stream *out, fan_error *err);
/* fan__cuda_enter_on: fan__cuda_queue_of into scope->on, and fan__cuda_enter. */
fan_status fan__cuda_enter_on(const fan_stream *s, fan__cuda_scope *scope, fan_error *err);
/* fan__cuda_capture_of: returns the capture of s, 0: none; and its graph, if `graph` is not
 * NULL. */
fan_status fan__cuda_capture_of(fan_stream *s, uint64_t *id, fan_cu_graph *graph, fan_error *err);

/* fan__cuda_none_captured: returns false if a known stream of the device is captured, or the legacy
 * stream must not be used. Streams that fanin has not met are not covered. */
bool fan__cuda_none_captured(fan_cuda_part *p);
/* fan__cuda_stream_at: a hold on the i-th known stream; *out NULL: it is being freed. false: there
 * are fewer. */
bool fan__cuda_stream_at(fan_cuda_part *p, size_t i, fan_stream **out);
/* fan__cuda_await_gone: waits for the whole device if a destroyed stream may still have work on it,
 * unless a known stream is captured: its memory can be freed then. */
void fan__cuda_await_gone(fan_cuda_part *p);

fan_stream *fan__cuda_current(fan_device *d);
void fan__cuda_stream_fini(fan_stream *s);
fan_status fan__cuda_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status fan__cuda_capture_stream(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);
fan_status fan__cuda_sync(fan_stream *s, fan_error *err);

/* event: events of the driver: the table's entries. */
fan_status fan__cuda_event_init(fan_event *e, fan_error *err);
void fan__cuda_event_fini(fan_event *e);
fan_status fan__cuda_record(fan_event *e, fan_stream *s, fan_error *err);
/* fan__cuda_note: FAN_ERR_CAPTURE if e may be inside a capture: then it must not be queried. */
fan_status fan__cuda_note(fan_event *e, fan_stream *s, fan_error *err);
fan_status fan__cuda_wait(fan_stream *s, fan_event *e, fan_error *err);
fan_status fan__cuda_query(fan_event *e, bool *done, fan_error *err);
bool fan__cuda_peek(fan_event *e);
fan_status fan__cuda_event_sync(fan_event *e, fan_error *err);

/* memory: the driver's memory: the table's entries, scratch memory, and memory of graphs. */

fan_status fan__cuda_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out,
                           fan_error *err);
void fan__cuda_free(fan_device *d, void *data, size_t bytes);
/* fan__cuda_scratch: allocates memory for one job on s. */
fan_status fan__cuda_scratch(fan_stream *s, size_t bytes, uint64_t *out, fan_error *err);
/* fan__cuda_scratch_free: frees such memory in the order of s. */
void fan__cuda_scratch_free(fan_stream *s, uint64_t address);
/* fan__cuda_retain: keeps the memory at `address`, used by captured work, as long as the graph. */
fan_status fan__cuda_retain(fan_cuda_part *p, uint64_t address, uint64_t capture,
                            fan_cu_graph graph, fan_error *err);
/* fan__cuda_trim: frees unused kept memory; returns how many bytes. Blocks. */
size_t fan__cuda_trim(fan_cuda_part *p);
void fan__cuda_blocks_fini(fan_cuda_part *p);

/* recorder: the entries for graph trees: captures streams, and launches the graph. */

extern const fan_recorder fan__cuda_recorder;

/* fan__cuda_recorder_note: adds the accesses of `job`, queued under `capture`, to the recording of
 * that capture, if any. FAN_ERR_NOMEM: nothing was added. */
fan_status fan__cuda_recorder_note(fan_cuda *c, uint64_t capture, const fan_job *job,
                                   fan_error *err);

/* run: jobs of the CUDA backend: the table's entries. */

fan_status fan__cuda_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
fan_status fan__cuda_read(fan_stream *s, const fan_array *dst, const fan_array *src,
                          fan_error *err);

/* batch: many sums in one launch: the table's entry. */
fan_status fan__cuda_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n,
                              fan_job_state *states, fan_error *err);

/* launch: selects a kernel for the operands and launches it. */

/* The context of a job's launches. */
typedef struct fan__launch_ctx {
    fan_cuda_part *part;
    fan_stream *stream;
    fan_cu_stream on;
    const char *label;
    bool blind;  /* only statistics are computed: no sum is written */
    bool *begun; /* set once a launch succeeded */
} fan__launch_ctx;

typedef struct fan__fold {
    const char *name;
    const char *many;
    const char *stats;
    const char *scatter;
    int bytes;
    fan_dtype from;
    fan_dtype acc;
} fan__fold;

enum {
#define X(name, bytes, from, acc) FAN__FOLD_##name,
    FAN_K_FOLD_LIST(X)
#undef X
    FAN__FOLDS /* their number; as a result: none of them */
};

extern const fan__fold fan__folds[FAN__FOLDS];

/* The kernels of sums over axes. */
enum {
#define X(name, from, acc) FAN__REDUCE_##name,
    FAN_K_REDUCE_LIST(X)
#undef X
    FAN__REDUCES
};

/* fan__cuda_load_kernels: loads the first image that the driver takes, in the part's context. */
fan_status fan__cuda_load_kernels(fan_cuda_part *p, fan_error *err);
fan_status fan__launch_blocks(const fan__launch_ctx *w, fan_cu_function f, int64_t blocks,
                              void *args, fan_error *err);
fan_status fan__launch_threads(const fan__launch_ctx *w, fan_cu_function f, int64_t threads,
                               void *args, fan_error *err);

static inline uint64_t fan__address_of(const fan_array *a)
{
    return (uint64_t)(uintptr_t)a->data;
}
/* fan__put_words: writes n words of a kernel's arguments; returns where the next ones go. */
static inline int64_t *fan__put_words(int64_t *at, const int64_t *words, int n)
{
    memcpy(at, words, (size_t)n * sizeof *at);
    return at + n;
}
/* fan__is_anywhere: returns whether some element's address is no multiple of its numbers' size. */
bool fan__is_anywhere(const fan_array *a);
/* fan__walk_job: the walk over the result and the operands of a sum. */
void fan__walk_job(fan_nditer *walk, const fan_job *job);
/* fan__fold_for: returns the kernel that reads the job's operands in place; FOLDS if there is
 * none. */
size_t fan__fold_for(const fan_job *job, const fan_nditer *walk);
/* fan__reduce_for: returns the kernel that sums numbers of this dtype, or the parts of complex
 * ones, over axes. */
size_t fan__reduce_for(fan_dtype d);
/* fan__scatter_for: returns the kernel that adds COO data of these dtypes; FOLDS if there is
 * none. */
size_t fan__scatter_for(fan_dtype into, fan_dtype values);
/* fan__fold_flags: returns the flags for a kernel from its operands' dtypes. */
int fan__fold_flags(size_t which, const fan_array *out, const fan_array *first);

/* sum: sums, copies on the device, statistics, zeros. */

fan_status fan__cuda_sum(const fan__launch_ctx *s, const fan_job *job, fan_error *err);
fan_status fan__cuda_copy(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                          fan_error *err);
/* fan__cuda_measure: computes the statistics of an existing array, as those of its own sum, which
 * is not written. */
fan_status fan__cuda_measure(fan__launch_ctx *s, const fan_job *job, fan_error *err);
fan_status fan__cuda_zero(const fan__launch_ctx *s, const fan_array *out, fan_error *err);
/* fan__cuda_fill_zero: queues zeros over memory of the device. */
fan_status fan__cuda_fill_zero(const fan__launch_ctx *s, uint64_t address, size_t bytes,
                               fan_error *err);

/* fan__cuda_reduce: fan_reduce (array/sum.h), a sum over axes (D7), queued; the same bits. */
fan_status fan__cuda_reduce(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                            fan_dtype dtype, fan_error *err);

/* copy: copies between host and device, and sums made on the host. */

/* fan__cuda_pass_upload: blocks after copies from the host, if the device still reads its
 * memory. */
fan_status fan__cuda_pass_upload(const fan__launch_ctx *s, fan_error *err);
fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in,
                            fan_error *err);
fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src,
                              fan_error *err);
/* fan__cuda_exact: makes an exact sum on the host, because there is no kernel for it. Blocks. */
fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err);

/* scatter: adds sparse data into dense arrays. */

/* fan__cuda_scatter: fan_sparse_scatter (array/sparse.h), queued; the same bits. Skips indices
 * beyond the shape. */
fan_status fan__cuda_scatter(const fan__launch_ctx *s, const fan_array *into, const fan_sparse *sp,
                             fan_error *err);

#endif
