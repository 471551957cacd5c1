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

/* launch_load: loads an image and finds its kernels: a driver that loads lazily refuses an image
 * only then. Unloads the image if that fails. `call`: the call that failed. */
static fan_cu_result launch_load(fan_cuda_part *p, const void *image, const char **call)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    *call = "cuModuleLoadData";
    fan_cu_result code = api->ModuleLoadData(&p->module, image);
    if (code == 0) {
        *call = "cuModuleGetFunction";
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
    }
    if (code == 0) {
        *call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        p->nresident = 0;
        for (size_t i = 0; i < FAN__FOLDS; i++) {
            p->resident[p->nresident++].kernel = p->folds[i];
            p->resident[p->nresident++].kernel = p->many[i];
            p->resident[p->nresident++].kernel = p->fold_scatter[i];
        }
        for (size_t i = 0; i < FAN__REDUCES; i++)
            p->resident[p->nresident++].kernel = p->reduce[i];
#define X(field, name) p->resident[p->nresident++].kernel = p->field;
        FAN__CUDA_KERNEL_LIST(X)
#undef X
        for (size_t i = 0; i < p->nresident && code == 0; i++)
            code = api->OccupancyMaxActiveBlocksPerMultiprocessor(
                &p->resident[i].blocks, p->resident[i].kernel, FAN_K_BLOCK, 0);
    }
    if (code && p->module && !fan_cuda_sticky(code))
        (void)api->ModuleUnload(p->module);
    if (code)
        p->module = NULL;
    return code;
}

fan_status fan__cuda_load_kernels(fan_cuda_part *p, fan_error *err)
{
    const struct {
        const void *code;
        const char *words;
    } images[] = {{fan_kernels_fatbin_bytes ? fan_kernels_fatbin : NULL, "machine code"},
                  {p->image.code, p->image.words}};
    const char *call = NULL;
    fan_cu_result code = 0;
    bool gives_way = true;
    int mode = fan__cuda_relax(p);
    for (size_t i = 0; i < sizeof images / sizeof *images && gives_way; i++) {
        if (!images[i].code)
            continue;
        code = launch_load(p, images[i].code, &call);
        p->loaded = images[i].words;
        /* The compiler of an image may be newer than the driver, which refuses it by one of many
         * codes. */
        gives_way = code && code != FAN_CU_OUT_OF_MEMORY && !fan_cuda_sticky(code);
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

size_t fan__fold_for(const fan_array *out, const fan_operand *in, size_t n, bool scaled,
                     fan_nditer *w)
{
    if (n == 0 || n > FAN_K_SOURCES)
        return FAN__FOLDS;
    /* d: of the sources; the first of them, and the result, may have the dtype of the
     * accumulation */
    fan_dtype acc = in[0].acc;
    fan_dtype d = in[0].array->dtype;
    if (n > 1)
        d = in[1].array->dtype;
    else if (d == acc)
        d = out->dtype;
    if (scaled && fan_dtype_kind(acc) == 'c')
        return FAN__FOLDS;
    if (fan_dtype_kind(d) != fan_dtype_kind(acc))
        return FAN__FOLDS;
    if (out->dtype != d && out->dtype != acc)
        return FAN__FOLDS;
    if (!launch_is_whole(w, out))
        return FAN__FOLDS;
    for (size_t k = 0; k < n; k++) {
        fan_dtype of = in[k].array->dtype;
        bool fits = of == d || (k == 0 && of == acc);
        if (in[k].acc != acc || !fits || !launch_is_whole(w, in[k].array))
            return FAN__FOLDS;
        if (in[k].weight.on)
            return FAN__FOLDS;
    }
    for (size_t i = 0; i < FAN__FOLDS; i++) {
        const fan_dtype from = fan__folds[i].from;
        if (from == launch_unsigned_of(d) && fan__folds[i].acc == launch_unsigned_of(acc))
            return i;
    }
    return FAN__FOLDS;
}
