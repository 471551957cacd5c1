/* launch: selects a kernel for the operands and launches it. */
#ifndef FAN_DEVICE_CUDA_LAUNCH_H
#define FAN_DEVICE_CUDA_LAUNCH_H

#include "array/nditer.h"
#include "device/cuda/part.h"
#include "device/kernels/args.h"

/* The context of a job's launches. */
typedef struct fan__launch_ctx {
    fan_cuda_part *part;
    fan_stream *stream;
    fan_cu_stream on;
    const char *label;
    const fan_stats_out *stats_out; /* receives the statistics of sums; NULL: not wanted */
    size_t first_suspect;
    bool blind;  /* only statistics are computed: no sum is written */
    bool *begun; /* set once a launch succeeded */
} fan__launch_ctx;

typedef struct fan__fold {
    const char *name, *many, *stats, *scatter;
    int bytes;
    fan_dtype from, acc;
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
fan_status fan__launch_blocks(const fan__launch_ctx *w, fan_cu_function f, int64_t blocks, void *args, fan_error *err);
fan_status fan__launch_threads(const fan__launch_ctx *w, fan_cu_function f, int64_t threads, void *args,
                               fan_error *err);

static inline uint64_t fan__address_of(const fan_array *a) { return (uint64_t)(uintptr_t)a->data; }
/* fan__is_anywhere: returns whether some element's address is no multiple of its numbers' size. */
bool fan__is_anywhere(const fan_array *a);
/* fan__fold_for: returns the kernel that reads these operands in place; FOLDS if there is none. */
size_t fan__fold_for(const fan_array *out, const fan_operand *in, size_t n, bool scaled, fan_nditer *w);
/* fan__reduce_for: returns the kernel that sums numbers of this dtype, or the parts of complex ones, over axes. */
size_t fan__reduce_for(fan_dtype d);
/* fan__scatter_for: returns the kernel that adds COO data of these dtypes; FOLDS if there is none. */
size_t fan__scatter_for(fan_dtype into, fan_dtype values);
/* fan__fold_flags: returns the flags for a kernel from its operands' dtypes. */
int fan__fold_flags(size_t which, const fan_array *out, const fan_array *first);

/* sum: sums, copies on the device, statistics, zeros. */

fan_status fan__cuda_sum(const fan__launch_ctx *s, const fan_array *out, const fan_operand *in, size_t n,
                         const fan_scale *scale, fan_error *err);
fan_status fan__cuda_copy(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);
/* fan__cuda_measure: computes the statistics of an existing array, as those of its own sum, which is not written. */
fan_status fan__cuda_measure(fan__launch_ctx *s, const fan_job *job, fan_error *err);
fan_status fan__cuda_zero(const fan__launch_ctx *s, const fan_array *out, fan_error *err);

/* fan__cuda_reduce: fan_reduce (array/sum.h), a sum over axes (D7), queued; the same bits. */
fan_status fan__cuda_reduce(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);

/* copy: copies between host and device, and sums made on the host. */
fan_status fan__cuda_upload(const fan__launch_ctx *s, const fan_array *out, const fan_array *in, fan_error *err);
fan_status fan__cuda_download(const fan__launch_ctx *s, const fan_array *dst, const fan_array *src, fan_error *err);
/* fan__cuda_exact: makes an exact sum on the host, because there is no kernel for it. Blocks. */
fan_status fan__cuda_exact(const fan__launch_ctx *s, const fan_job *job, fan_error *err);

/* scatter: adds sparse data into dense arrays. */

/* fan__cuda_scatter: fan_sparse_scatter (array/sparse.h), queued; the same bits. Skips indices beyond the shape. */
fan_status fan__cuda_scatter(const fan__launch_ctx *s, const fan_array *into, const fan_sparse *sp, fan_error *err);

#endif
