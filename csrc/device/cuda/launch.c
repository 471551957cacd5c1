/* Kernels: their list, the images that they are loaded from, their launches; then which kernel fits
 * the dtypes of a sum, a reduction or a scatter. */
#include "base/fault.h"
#include "device/cuda/part.h"
#include "device/kernels/image.h"

const fan__fold fan__folds[FAN__FOLDS] = {
#define X(name, bytes, from, acc)                                                                \
    {"fan_fold_" #name, "fan_many_" #name, "fan_fold_stats_" #name, "fan_scatter_" #name, bytes, \
     FAN_DT_##from,     FAN_DT_##acc},
    FAN_K_FOLD_LIST(X)
#undef X
};

static const struct {
    const char *name;
    fan_dtype from;
} launch_reduces[FAN__REDUCES] = {
#define X(name, from, acc) {"fan_reduce_" #name, FAN_DT_##from},
    FAN_K_REDUCE_LIST(X)
#undef X
};

_Static_assert((int)FAN__REDUCES <= (int)FAN__FOLDS && FAN__FOLDS <= FAN__CUDA_FOLDS,
               "more folds than there is room for");

_Static_assert(sizeof(fan_k_fold) <= 4096, "every driver takes kernel arguments of this size");
_Static_assert(sizeof(fan_k_any) <= 4096, "the same");
_Static_assert(sizeof(fan_k_reduce) <= 4096, "the same");
_Static_assert(sizeof(fan_k_scatter) <= 4096, "the same");

_Static_assert(sizeof(fan_k_stats_end) <= 4096, "the same");

/* launch_find: finds a kernel of the loaded image, unless an earlier call failed. */
static void launch_find(const fan_cuda_part *p, fan_cu_result *code, fan_cu_function *out,
                        const char *name)
{
    if (*code == 0)
        *code = fan__cuda_api_of(p)->ModuleGetFunction(out, p->module, name);
}

static fan_cu_result launch_find_all(fan_cuda_part *p)
{
    fan_cu_result code = 0;
    for (size_t i = 0; i < FAN__FOLDS; i++) {
        launch_find(p, &code, &p->folds[i], fan__folds[i].name);
        launch_find(p, &code, &p->many[i], fan__folds[i].many);
        launch_find(p, &code, &p->fold_stats[i], fan__folds[i].stats);
        launch_find(p, &code, &p->fold_scatter[i], fan__folds[i].scatter);
    }
    for (size_t i = 0; i < FAN__REDUCES; i++)
        launch_find(p, &code, &p->reduce[i], launch_reduces[i].name);
#define X(field, name) launch_find(p, &code, &p->field, name);
    FAN__CUDA_KERNEL_LIST(X)
#undef X
    return code;
}

static void launch_add_resident(fan_cuda_part *p, fan_cu_function kernel)
{
    p->resident[p->nresident++].kernel = kernel;
}

/* launch_measure: sets how many blocks fit of each kernel that distributes its work. */
static fan_cu_result launch_measure(fan_cuda_part *p)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan_cu_result code = 0;
    p->nresident = 0;
    for (size_t i = 0; i < FAN__FOLDS; i++) {
        launch_add_resident(p, p->folds[i]);
        launch_add_resident(p, p->many[i]);
        launch_add_resident(p, p->fold_scatter[i]);
    }
    for (size_t i = 0; i < FAN__REDUCES; i++)
        launch_add_resident(p, p->reduce[i]);
#define X(field, name) launch_add_resident(p, p->field);
    FAN__CUDA_KERNEL_LIST(X)
#undef X
    for (size_t i = 0; i < p->nresident && code == 0; i++) {
        fan__cuda_resident *resident = &p->resident[i];
        code = api->OccupancyMaxActiveBlocksPerMultiprocessor(&resident->blocks, resident->kernel,
                                                              FAN_K_BLOCK, 0);
    }
    return code;
}

/* launch_load: loads an image and finds its kernels: a driver that loads lazily refuses an image
 * only then. Unloads the image if that fails. `call`: the call that failed. */
static fan_cu_result launch_load(fan_cuda_part *p, const void *image, const char **call)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    *call = "cuModuleLoadData";
    fan_cu_result code = api->ModuleLoadData(&p->module, image);
    if (code == 0) {
        *call = "cuModuleGetFunction";
        code = launch_find_all(p);
    }
    if (code == 0) {
        *call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        code = launch_measure(p);
    }
    if (code && p->module && !fan_cuda_sticky(code))
        (void)api->ModuleUnload(p->module);
    if (code)
        p->module = NULL;
    return code;
}

/* launch_gives_way: whether another image may load in place of the one that gave `code`. The
 * compiler of an image may be newer than the driver, which refuses it by one of many codes. */
static bool launch_gives_way(fan_cu_result code)
{
    return code && code != FAN_CU_OUT_OF_MEMORY && !fan_cuda_sticky(code);
}

fan_status fan__cuda_load_kernels(fan_cuda_part *p, fan_error *err)
{
    const char *call = NULL;
    fan_cu_result code = 0;
    bool gives_way = true;
    int mode = fan__cuda_relax(p);
    if (fan_kernels_fatbin_bytes) {
        code = launch_load(p, fan_kernels_fatbin, &call);
        p->loaded = "machine code";
        gives_way = launch_gives_way(code);
    }
    if (gives_way && p->image.code) {
        code = launch_load(p, p->image.code, &call);
        p->loaded = p->image.words;
        gives_way = launch_gives_way(code);
    }
    fan__cuda_restore(p, mode);
    p->image.wanted = gives_way && !p->image.code;
    return fan__cuda_check(p, code, call, err);
}

fan_status fan__launch_blocks(const fan__launch_ctx *w, fan_cu_function f, int64_t blocks,
                              void *args, fan_error *err)
{
    char call[160] = "cuLaunchKernel";
    if (w->label)
        fan_append(call, sizeof call, "(%.120s)", w->label);
    unsigned grid = blocks > 0 ? (unsigned)blocks : 1;
    fan_cu_result code = fan__cuda_api_of(w->part)->LaunchKernel(f, grid, 1, 1, FAN_K_BLOCK, 1, 1,
                                                                 0, w->on, (void *[]){args}, NULL);
    FAN_TRY(fan__cuda_check(w->part, code, call, err));
    if (w->begun)
        *w->begun = true;
    return FAN_OK;
}

fan_status fan__launch_threads(const fan__launch_ctx *w, fan_cu_function f, int64_t threads,
                               void *args, fan_error *err)
{
    int64_t blocks = threads / FAN_K_BLOCK + (threads % FAN_K_BLOCK != 0);
    const fan_cuda_part *p = w->part;
    size_t i = 0;
    while (i < p->nresident && p->resident[i].kernel != f)
        i++;
    int64_t most = p->processors;
    if (i < p->nresident)
        most *= p->resident[i].blocks;
    if (blocks > most)
        blocks = most;
    return fan__launch_blocks(w, f, blocks, args, err);
}

/* launch_number_size: returns the size of one part of a complex number, else of the element. */
static uint64_t launch_number_size(fan_dtype d)
{
    if (fan_dtype_kind(d) == 'c')
        return fan_dtype_size(d) / 2;
    return fan_dtype_size(d);
}

bool fan__is_anywhere(const fan_array *a)
{
    uint64_t bits = fan__address_of(a);
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] > 1)
            bits |= (uint64_t)a->strides[i];
    }
    return bits % launch_number_size(a->dtype) != 0;
}

static fan_dtype launch_unsigned_of(fan_dtype d)
{
    switch (d) {
    case FAN_DT_INT8:
        return FAN_DT_UINT8;
    case FAN_DT_INT16:
        return FAN_DT_UINT16;
    case FAN_DT_INT32:
        return FAN_DT_UINT32;
    case FAN_DT_INT64:
        return FAN_DT_UINT64;
    case FAN_DT_COMPLEX64:
        return FAN_DT_FLOAT32;
    case FAN_DT_COMPLEX128:
        return FAN_DT_FLOAT64;
    default:
        return d;
    }
}

size_t fan__reduce_for(fan_dtype d)
{
    size_t i = 0;
    while (i + 1 < FAN__REDUCES && launch_reduces[i].from != launch_unsigned_of(d))
        i++;
    return i;
}

int fan__fold_flags(size_t which, const fan_array *out, const fan_array *first)
{
    uint64_t bytes = (uint64_t)fan__folds[which].bytes;
    int flags = 0;
    if (launch_number_size(first->dtype) != bytes && !FAN_FAULT(CUDA_NARROW_SUM))
        flags |= FAN_K_FIRST_WIDE;
    if (launch_number_size(out->dtype) != bytes)
        flags |= FAN_K_OUT_WIDE;
    return flags;
}

/* launch_fold_of: returns the fold of a dtype in an accumulation dtype; FOLDS if there is none. */
static size_t launch_fold_of(fan_dtype from, fan_dtype acc)
{
    size_t i = 0;
    while (i < FAN__FOLDS && (fan__folds[i].from != from || fan__folds[i].acc != acc))
        i++;
    return i;
}

size_t fan__scatter_for(fan_dtype into, fan_dtype values)
{
    fan_dtype to = launch_unsigned_of(into);
    fan_dtype from = launch_unsigned_of(values);
    if (fan_dtype_kind(into) != fan_dtype_kind(values))
        return FAN__FOLDS;
    for (size_t i = 0; i < FAN__FOLDS; i++) {
        bool converts = to == from || fan__folds[i].acc == to;
        if (fan__folds[i].from == from && converts)
            return i;
    }
    return FAN__FOLDS;
}

/* launch_is_whole: whether an array is aligned, and gap-free in the order of the walk. */
static bool launch_is_whole(const fan_nditer *w, const fan_array *a)
{
    return !fan__is_anywhere(a) && fan_nditer_whole(w, a, 0, w->size);
}

void fan__walk_job(fan_nditer *walk, const fan_job *job)
{
    fan_nditer_begin(walk, job->out, false);
    for (size_t k = 0; k < job->n; k++)
        fan_nditer_also(walk, job->in[k].array);
    fan_nditer_ready(walk);
}

/* launch_source_dtype: returns the dtype of the sources; the first of them, and the result, may
 * have that of the accumulation. */
static fan_dtype launch_source_dtype(const fan_job *job)
{
    fan_dtype first = job->in->array->dtype;
    if (job->n > 1)
        return job->in[1].array->dtype;
    if (first == job->in->acc)
        return job->out->dtype;
    return first;
}

/* launch_fits: whether a fold kernel that sums dtype d in `acc` reads the k-th operand. */
static bool launch_fits(const fan_job *job, size_t k, fan_dtype d, fan_dtype acc)
{
    const fan_operand *operand = &job->in[k];
    fan_dtype of = operand->array->dtype;
    if (operand->acc != acc || operand->weight.on)
        return false;
    return of == d || (k == 0 && of == acc);
}

size_t fan__fold_for(const fan_job *job, const fan_nditer *walk)
{
    if (job->n == 0 || job->n > FAN_K_SOURCES)
        return FAN__FOLDS;
    fan_dtype acc = job->in->acc;
    fan_dtype d = launch_source_dtype(job);
    fan_dtype to = job->out->dtype;
    char kind = fan_dtype_kind(acc);
    if (kind == 'c' && job->scale && job->scale->on)
        return FAN__FOLDS;
    if (fan_dtype_kind(d) != kind)
        return FAN__FOLDS;
    if (to != d && to != acc)
        return FAN__FOLDS;
    if (!launch_is_whole(walk, job->out))
        return FAN__FOLDS;
    for (size_t k = 0; k < job->n; k++) {
        if (!launch_fits(job, k, d, acc))
            return FAN__FOLDS;
        if (!launch_is_whole(walk, job->in[k].array))
            return FAN__FOLDS;
    }
    return launch_fold_of(launch_unsigned_of(d), launch_unsigned_of(acc));
}
