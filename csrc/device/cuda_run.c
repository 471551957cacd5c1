/* Jobs of the CUDA backend: which kernel, with what arguments.
 *
 * Gap-free sources of one dtype are one fold; anything else is one launch of fan_any, whose arguments hold as many
 * sources as fit; where there are more, a running sum in the last accumulation dtype is the first source of the next
 * launch. It lies in the result itself where that has its dtype and no later source lies there, else in scratch memory.
 *
 * Statistics are gathered by the launch that sums: each block writes a row behind the figures, and a small launch adds
 * the rows up (array/device_stats.h). So there is no scratch memory to give back, and nobody waits. Where a sum takes
 * several launches, each looks for who spoiled it; the last one's figures are the result's. */
#include "device/cuda_part.h"

#include "array/extents.h"
#include "array/nditer.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "device/kernels/args.h"

#include <string.h>

static const struct {
    const char *name, *many, *tell;
    int bytes;
    fan_dtype from, acc;
} folds[] = {
#define X(name, bytes, from, acc) \
    {"fan_fold_" #name, "fan_many_" #name, "fan_fold_stats_" #name, bytes, FAN_DT_##from, FAN_DT_##acc},
    FAN_K_FOLD_LIST(X)
#undef X
};
#define FOLDS (sizeof folds / sizeof *folds)
_Static_assert(FOLDS <= FAN_CUDA_FOLDS, "more folds than there is room for");
_Static_assert(sizeof(fan_k_fold) <= 4096 && sizeof(fan_k_any) <= 4096 && sizeof(fan_k_reduce) <= 4096 &&
                   sizeof(fan_k_scatter) <= 4096,
               "what every driver takes as the arguments of a kernel");
_Static_assert(sizeof(fan_k_tell) <= 4096, "the same");
_Static_assert(sizeof(fan_device_stats) == 8 * FAN_TOLD_WORDS && sizeof(fan_stats_partial) == 8 * FAN_TOLD_ROW_WORDS,
               "figures are words");

/* foreign: the driver's word for code that it cannot use: made for other GPUs, or by a newer compiler than it knows. */
static bool foreign(fan_cu_result code)
{
    enum {
        INVALID_IMAGE = 200,
        NO_BINARY_FOR_GPU = 209,
        INVALID_PTX = 218,
        UNSUPPORTED_PTX_VERSION = 222,
        INVALID_SOURCE = 300
    };
    return code == INVALID_IMAGE || code == NO_BINARY_FOR_GPU || code == INVALID_PTX ||
           code == UNSUPPORTED_PTX_VERSION || code == INVALID_SOURCE;
}

fan_status fan_cuda_load_kernels(fan_cuda_part *p, fan_error *err)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    fan_status status;
    int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = fan_kernels_fatbin_bytes ? api->ModuleLoadData(&p->module, fan_kernels_fatbin) : 0;
    if (!fan_kernels_fatbin_bytes || foreign(code))
        code = api->ModuleLoadData(&p->module, fan_kernels_ptx);
    FAN_GO(fan_cuda_check(p, code, "cuModuleLoadData", err));
    for (size_t i = 0; i < FOLDS; i++) {
        FAN_GO(fan_cuda_check(p, api->ModuleGetFunction(&p->folds[i], p->module, folds[i].name), "cuModuleGetFunction",
                              err));
        FAN_GO(fan_cuda_check(p, api->ModuleGetFunction(&p->many[i], p->module, folds[i].many), "cuModuleGetFunction",
                              err));
        FAN_GO(fan_cuda_check(p, api->ModuleGetFunction(&p->tells[i], p->module, folds[i].tell), "cuModuleGetFunction",
                              err));
    }
#define X(field, name) \
    FAN_GO(fan_cuda_check(p, api->ModuleGetFunction(&p->field, p->module, name), "cuModuleGetFunction", err));
    FAN_CUDA_KERNEL_LIST(X)
#undef X
done:
    (void)fan_cuda_relax(p, mode);
    return status;
}

/* Where a job runs. */
typedef struct site {
    fan_cuda_part *part;
    fan_stream *stream;
    fan_cu_stream on;
    const char *label;
    const fan_stats_out *figures; /* what sums leave behind; NULL: nothing */
    size_t skip;
    bool blind;  /* sums are only told of: nothing is written */
    bool *begun; /* set once a launch went through */
} site;

static fan_status launch_blocks(const site *w, fan_cu_function f, int64_t blocks, void *args, fan_error *err)
{
    char call[160] = "cuLaunchKernel";
    if (w->label)
        fan_append(call, sizeof call, "(%.120s)", w->label);
    FAN_TRY(fan_cuda_check(w->part,
                           fan_cuda_api_of(w->part)->LaunchKernel(f, blocks > 0 ? (unsigned)blocks : 1, 1, 1,
                                                                  FAN_K_BLOCK, 1, 1, 0, w->on, (void *[]){args}, NULL),
                           call, err));
    if (w->begun)
        *w->begun = true;
    return FAN_OK;
}

static fan_status launch(const site *w, fan_cu_function f, int64_t threads, void *args, fan_error *err)
{
    int64_t blocks = threads / FAN_K_BLOCK + (threads % FAN_K_BLOCK != 0), most = (int64_t)w->part->processors * 16;
    return launch_blocks(w, f, blocks < most ? blocks : most, args, err);
}

static uint64_t address_of(const fan_array *a) { return (uint64_t)(uintptr_t)a->data; }

/* number_size: of one part of a complex number, else of the element. */
static uint64_t number_size(fan_dtype d) { return fan_dtype_size(d) / (fan_dtype_kind(d) == 'c' ? 2 : 1); }

/* anywhere: some element lies where its numbers cannot be read in one piece. */
static bool anywhere(const fan_array *a)
{
    uint64_t size = number_size(a->dtype), bits = address_of(a);
    for (int i = 0; i < a->ndim; i++)
        bits |= a->shape[i] > 1 ? (uint64_t)a->strides[i] : 0;
    return bits % size != 0;
}

/* ---- statistics ---- */

static uint64_t rows_of(const fan_stats_out *g) { return address_of(g->words) + sizeof(fan_device_stats); }

/* told: the rows of `size` elements into the figures. `from`: the operand that is the first source; `more`: an earlier
 * launch has told of operands before. */
static fan_status told(const site *s, int64_t rows, int64_t size, size_t from, size_t n, bool more, fan_error *err)
{
    const fan_stats_out *g = s->figures;
    fan_k_tell a;
    memset(&a, 0, sizeof a - sizeof a.keys);
    a.rows = rows_of(g);
    a.told = address_of(g->words);
    a.before = more ? a.told : g->before ? address_of(g->before) : 0;
    a.nrows = rows;
    a.count = size;
    if (n)
        memcpy(a.keys, g->keys + from, n * sizeof *a.keys);
    return launch_blocks(s, s->part->tell_end, 1, &a, err);
}

/* ---- sums ---- */

static fan_dtype unsigned_of(fan_dtype d)
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

/* fold_for: the kernel that takes these operands as they lie; FOLDS where there is none. */
static size_t fold_for(const fan_array *out, const fan_operand *in, size_t n, bool scaled, fan_nditer *w)
{
    fan_dtype d = out->dtype, acc = n ? in[0].acc : FAN_DT_NONE;
    if (n == 0 || n > FAN_K_SOURCES || (scaled && fan_dtype_kind(acc) == 'c') || anywhere(out))
        return FOLDS;
    for (size_t k = 0; k < n; k++)
        if (in[k].acc != acc || in[k].array->dtype != d || anywhere(in[k].array) ||
            !fan_nditer_whole(w, in[k].array, 0, w->size))
            return FOLDS;
    for (size_t i = 0; i < FOLDS; i++)
        if (folds[i].from == unsigned_of(d) && folds[i].acc == unsigned_of(acc))
            return fan_nditer_whole(w, out, 0, w->size) ? i : FOLDS;
    return FOLDS;
}

static fan_status fold(const site *s, size_t which, const fan_array *out, const fan_operand *in, size_t n,
                       const fan_scale *scale, fan_error *err)
{
    fan_k_fold a;
    uint64_t low = 0;
    memset(&a, 0, sizeof a - sizeof a.in);
    a.parts = fan_dtype_kind(out->dtype) == 'c' ? 2 : 1;
    a.out = s->blind ? 0 : address_of(out);
    a.count = out->size * a.parts;
    a.n = (int32_t)n;
    a.scaled = scale && scale->on;
    if (a.scaled) {
        char factor[16] = {0};
        fan_scale_as(scale, in[0].acc, factor);
        memcpy(&a.factor, factor, sizeof a.factor);
    }
    for (size_t k = 0; k < n; k++) {
        a.in[k] = address_of(in[k].array);
        low |= a.in[k];
    }
    a.wide = ((low | a.out) & 15) == 0;
    if (s->figures) {
        int64_t rows = fan_stats_partials(out->size);
        a.rows = rows_of(s->figures);
        a.negative = fan_dtype_kind(out->dtype) == 'i';
        a.skip = (int32_t)s->skip;
        FAN_TRY(launch_blocks(s, s->part->tells[which], rows, &a, err));
        return told(s, rows, out->size, 0, n, false, err);
    }
    int64_t per = a.wide ? 16 / folds[which].bytes : 1;
    return launch(s, s->part->folds[which], (a.count + per - 1) / per, &a, err);
}

/* A source of fan_any. */
typedef struct source {
    uint64_t address;
    fan_dtype dtype, acc;
    const int64_t *strides; /* by the walk's axes where `walked`, else by those of an array */
    bool walked, anywhere;
} source;

static void put_strides(int64_t *words, const fan_nditer *w, const int64_t *strides, bool walked)
{
    for (int i = 0; i < w->ndim; i++)
        words[i] = walked ? strides[i] : strides[w->axis[i]];
}

/* any_args: for fan_any and its like. */
static void any_args(const fan_nditer *w, const source *out, const source *in, size_t n, const char *factor,
                     fan_k_any *args)
{
    fan_k_any a;
    memset(&a, 0, sizeof a);
    a.size = w->size;
    a.n = (int32_t)n;
    a.ndim = w->ndim;
    a.out = out->dtype;
    a.scaled = factor != NULL;
    if (factor)
        memcpy(a.factor, factor, sizeof a.factor);
    if (factor && n && in[n - 1].acc == FAN_DT_COMPLEX64) { /* its two parts are one word each */
        memcpy(&a.factor[1], factor + 4, 4);
        a.factor[0] &= UINT32_MAX;
    }
    a.anywhere = out->anywhere;
    int64_t *at = a.words;
    memcpy(at, w->extent, (size_t)w->ndim * sizeof *at);
    at += w->ndim;
    *at++ = (int64_t)out->address;
    put_strides(at, w, out->strides, out->walked);
    at += w->ndim;
    for (size_t k = 0; k < n; k++, at += w->ndim) {
        *at++ = (int64_t)in[k].address;
        *at++ = (int64_t)in[k].dtype | (int64_t)in[k].acc << 8;
        put_strides(at, w, in[k].strides, in[k].walked);
        a.anywhere |= in[k].anywhere;
    }
    *args = a;
}

/* any: `begun`: how many operands earlier launches have summed into the first source; 0: there were none. */
static fan_status any(const site *s, const fan_nditer *w, const source *out, const source *in, size_t n, size_t begun,
                      const char *factor, fan_error *err)
{
    fan_k_any a;
    any_args(w, out, in, n, factor, &a);
    if (!s->figures)
        return launch(s, s->part->any, w->size, &a, err);
    int64_t rows = fan_stats_partials(w->size);
    a.rows = rows_of(s->figures);
    a.skip = begun ? 1 : (int32_t)s->skip;
    FAN_TRY(launch_blocks(s, s->part->tell_any, rows, &a, err));
    return told(s, rows, w->size, begun ? begun - 1 : 0, n, begun > 0, err);
}

static source source_of(const fan_array *a, fan_dtype acc)
{
    return (source){
        .address = address_of(a), .dtype = a->dtype, .acc = acc, .strides = a->strides, .anywhere = anywhere(a)};
}

/* keeps: a running sum of dtype acc may lie in out while in[from..n) are still to come. */
static bool keeps(const fan_array *out, fan_dtype acc, const fan_operand *in, size_t from, size_t n)
{
    for (size_t k = from; k < n; k++)
        if (!fan_array_extents_disjoint(out, in[k].array))
            return false;
    return out->dtype == acc;
}

/* scratch_sum: scratch memory for a running sum of dtype acc, in the order of the walk. */
static fan_status scratch_sum(const site *s, const fan_nditer *w, fan_dtype acc, int64_t *strides, source *out,
                              fan_error *err)
{
    int64_t step = (int64_t)fan_dtype_size(acc);
    for (int i = w->ndim - 1; i >= 0; i--) {
        strides[i] = step;
        step *= w->extent[i];
    }
    *out = (source){.dtype = acc, .strides = strides, .walked = true};
    return fan_cuda_scratch(s->stream, (size_t)step, &out->address, err);
}

static fan_status any_in_groups(const site *s, const fan_nditer *w, const fan_array *out, const fan_operand *in,
                                size_t n, const fan_scale *scale, fan_error *err)
{
    source here[FAN_K_WORDS / 2], running = {.address = 0}, target;
    source to = source_of(out, FAN_DT_NONE);
    uint64_t held = 0, next; /* scratch memory of the running sum */
    int64_t strides[2][FAN_MAX_NDIM];
    char factor[16] = {0};
    fan_status status = FAN_OK;
    size_t room = (size_t)((FAN_K_WORDS - 1 - 2 * w->ndim) / (2 + w->ndim)), k = 0;
    bool scaled = scale && scale->on;
    if (scaled)
        fan_scale_as(scale, in[n - 1].acc, factor);
    if (s->blind)
        to.address = 0;
    do {
        size_t m = 0, begun = k;
        if (k > 0)
            here[m++] = running;
        for (; m < room && k < n; m++, k++)
            here[m] = source_of(in[k].array, in[k].acc);
        target = to;
        next = 0;
        if (k < n && !keeps(out, in[k - 1].acc, in, k, n)) {
            FAN_GO(scratch_sum(s, w, in[k - 1].acc, strides[running.strides == strides[0]], &target, err));
            next = target.address;
        }
        status = any(s, w, &target, here, m, begun, k == n && scaled ? factor : NULL, err);
        if (held)
            fan_cuda_scratch_free(s->stream, held);
        held = next;
        running = target;
        running.acc = running.dtype;
    } while (status == FAN_OK && k < n);
done:
    if (held)
        fan_cuda_scratch_free(s->stream, held);
    return status;
}

static fan_status sum(const site *s, const fan_array *out, const fan_operand *in, size_t n, const fan_scale *scale,
                      fan_error *err)
{
    fan_nditer w;
    if (out->size == 0)
        return s->figures ? told(s, 0, 0, 0, 0, false, err) : FAN_OK;
    fan_nditer_begin(&w, out, false);
    for (size_t k = 0; k < n; k++)
        fan_nditer_also(&w, in[k].array);
    fan_nditer_ready(&w);
    size_t which = fold_for(out, in, n, scale && scale->on, &w);
    return which < FOLDS ? fold(s, which, out, in, n, scale, err) : any_in_groups(s, &w, out, in, n, scale, err);
}

static fan_status copy(const site *s, const fan_array *out, const fan_array *in, fan_error *err)
{
    return sum(s, out, &(fan_operand){.array = in, .acc = out->dtype}, 1, NULL, err);
}

/* blame: where the figures tell of an element that is not finite, and not of who brought it: was it `of`? */
static fan_status blame(const site *s, const fan_array *of, int64_t key, fan_error *err)
{
    fan_k_any a;
    fan_nditer w;
    char kind = fan_dtype_kind(of->dtype);
    if (of->size == 0 || (kind != 'f' && kind != 'c'))
        return FAN_OK;
    fan_nditer_begin(&w, of, false);
    fan_nditer_ready(&w);
    source in = source_of(of, of->dtype), nowhere = {.dtype = of->dtype, .strides = of->strides};
    any_args(&w, &nowhere, &in, 1, NULL, &a);
    a.rows = address_of(s->figures->words);
    memcpy(&a.factor[0], &key, sizeof key);
    return launch(s, s->part->blame, w.size, &a, err);
}

/* survey: what is there already is told of, as a sum of itself that is written nowhere. */
static fan_status survey(site *s, const fan_job *job, fan_error *err)
{
    const fan_array *of = job->in[0].array;
    s->blind = true;
    FAN_TRY(sum(s, of, &(fan_operand){.array = of, .acc = fan_dtype_accumulate(of->dtype)}, 1, NULL, err));
    for (size_t k = 1; k < job->n; k++)
        FAN_TRY(blame(s, job->in[k].array, job->figures->keys[k], err));
    return FAN_OK;
}

static fan_status zero(const site *s, const fan_array *out, fan_error *err)
{
    int64_t lo, hi;
    if (out->size == 0)
        return FAN_OK;
    if (!fan_array_dense(out))
        return sum(s, out, NULL, 0, NULL, err);
    fan_array_reach(out, &lo, &hi);
    return fan_cuda_check(
        s->part, fan_cuda_api_of(s->part)->MemsetD8Async(address_of(out) + (uint64_t)lo, 0, (size_t)(hi - lo), s->on),
        "cuMemsetD8Async", err);
}

/* ---- sums over axes, sparse into dense ---- */

static fan_status reduce(const site *s, const fan_array *out, const fan_array *in, fan_error *err)
{
    fan_k_reduce a;
    int64_t kept[3][FAN_MAX_NDIM], gone[2][FAN_MAX_NDIM];
    int lead = in->ndim - out->ndim;
    if (out->size == 0)
        return FAN_OK;
    if (in->size == 0)
        return zero(s, out, err);
    memset(&a, 0, sizeof a);
    a.out = address_of(out);
    a.in = address_of(in);
    a.size = out->size;
    a.terms = in->size / out->size;
    a.from = in->dtype;
    a.acc = fan_reduce_dtype(in->dtype);
    a.to = out->dtype;
    a.anywhere = anywhere(out) || anywhere(in);
    for (int i = 0; i < in->ndim; i++) {
        if (in->shape[i] == 1)
            continue;
        if (i >= lead && out->shape[i - lead] == in->shape[i]) {
            kept[0][a.stay] = in->shape[i];
            kept[1][a.stay] = out->strides[i - lead];
            kept[2][a.stay++] = in->strides[i];
        } else {
            gone[0][a.go] = in->shape[i];
            gone[1][a.go++] = in->strides[i];
        }
    }
    int64_t *at = a.words;
    for (int k = 0; k < 3; k++, at += a.stay)
        memcpy(at, kept[k], (size_t)a.stay * sizeof *at);
    for (int k = 0; k < 2; k++, at += a.go)
        memcpy(at, gone[k], (size_t)a.go * sizeof *at);
    return launch(s, s->part->reduce, out->size, &a, err);
}

#define WORKERS 1024 /* at most, on COO entries: each looks at all indices */
#define THREADS_WANTED ((int64_t)1 << 16)

/* scatter_coo, scatter_rows: what differs between the formats; return where the words go on. */
static int64_t *scatter_coo(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    const fan_array *indices = sp->indices;
    a->sparse = (int32_t)indices->shape[0];
    a->index_row = indices->strides[0];
    a->index_step = indices->strides[1];
    memcpy(a->words, into->shape, (size_t)a->sparse * sizeof *a->words);
    memcpy(a->words + a->sparse, into->strides, (size_t)a->sparse * sizeof *a->words);
    a->lanes = THREADS_WANTED / (a->inside ? a->inside : 1);
    a->lanes = a->lanes < 1 ? 1 : a->lanes > WORKERS ? WORKERS : a->lanes;
    a->lanes = a->lanes < a->entries ? a->lanes : a->entries;
    return a->words + 2 * a->sparse;
}

static int64_t *scatter_rows(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    bool blocked = sp->format == FAN_FORMAT_BSR || sp->format == FAN_FORMAT_BSC;
    int axis = sp->format == FAN_FORMAT_CSC || sp->format == FAN_FORMAT_BSC;
    int64_t unit[2] = {blocked ? sp->values->shape[1] : 1, blocked ? sp->values->shape[2] : 1};
    a->pointers = address_of(sp->pointers);
    a->pointer_size = (int32_t)fan_dtype_size(sp->pointers->dtype);
    a->pointer_step = sp->pointers->strides[0];
    a->index_step = sp->indices->strides[0];
    a->lanes = sp->pointers->shape[0] - 1;
    a->words[0] = unit[!axis] ? into->shape[!axis] / unit[!axis] : 0;
    a->words[1] = unit[axis] * into->strides[axis];
    a->words[2] = unit[!axis] * into->strides[!axis];
    return a->words + 3;
}

static fan_status scatter(const site *s, const fan_array *into, const fan_sparse *sp, fan_error *err)
{
    fan_k_scatter a;
    const fan_array *values = sp->values;
    if (values->size == 0)
        return FAN_OK;
    memset(&a, 0, sizeof a);
    a.into = address_of(into);
    a.values = address_of(values);
    a.indices = address_of(sp->indices);
    a.entries = values->shape[0];
    a.inside = values->size / values->shape[0];
    a.value_step = values->strides[0];
    a.into_dtype = into->dtype;
    a.value_dtype = values->dtype;
    a.index_size = (int32_t)fan_dtype_size(sp->indices->dtype);
    a.anywhere = anywhere(into) || anywhere(values);
    if (anywhere(sp->indices) || (sp->pointers && anywhere(sp->pointers)))
        return fan_fail(err, FAN_ERR_VALUE, "the indices of a sparse gradient on cuda:%d are not aligned to their size",
                        s->part->index);
    int64_t *at = sp->format == FAN_FORMAT_COO ? scatter_coo(&a, into, sp) : scatter_rows(&a, into, sp);
    a.inner = values->ndim - 1;
    int first = into->ndim - a.inner; /* 0 for blocks */
    if (2 * a.sparse + 3 * (int64_t)a.inner + 3 > (int64_t)(sizeof a.words / sizeof *a.words))
        return fan_fail(err, FAN_ERR_VALUE, "a sparse gradient of %d axes has too many for cuda:%d", into->ndim,
                        s->part->index);
    memcpy(at, values->shape + 1, (size_t)a.inner * sizeof *at);
    memcpy(at + a.inner, into->strides + first, (size_t)a.inner * sizeof *at);
    memcpy(at + 2 * a.inner, values->strides + 1, (size_t)a.inner * sizeof *at);
    return launch(s, s->part->scatter, a.lanes * a.inside, &a, err);
}

/* ---- between the host and the device ---- */

/* A host copy of an array's memory: the same strides, no gaps. */
typedef struct twin {
    char *bytes;
    size_t size;
    int64_t lo;
    fan_array array;
} twin;

static fan_status twin_begin(twin *t, const fan_array *of, fan_error *err)
{
    int64_t hi;
    fan_array_reach(of, &t->lo, &hi);
    t->size = (size_t)(hi - t->lo);
    t->bytes = fan_alloc_data(t->size);
    if (!t->bytes)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s beside a device", t->size,
                        FAN_PLURAL(t->size));
    t->array = (fan_array){.data = t->bytes - t->lo,
                           .dtype = of->dtype,
                           .ndim = of->ndim,
                           .size = of->size,
                           .shape = of->shape,
                           .strides = of->strides,
                           .writable = true};
    return FAN_OK;
}

static void twin_end(twin *t) { fan_free_data(t->bytes, t->size); }

/* packed: `like` without gaps, in scratch memory of the stream; its dims in room[2 * FAN_MAX_NDIM]. */
static fan_status packed(const site *s, const fan_array *like, fan_array *out, int64_t *room, fan_error *err)
{
    uint64_t at = 0;
    FAN_TRY(fan_cuda_scratch(s->stream, (size_t)like->size * fan_dtype_size(like->dtype), &at, err));
    memcpy(room, like->shape, (size_t)like->ndim * sizeof *room);
    fan_dense_strides(like->ndim, like->shape, fan_dtype_size(like->dtype), NULL, room + FAN_MAX_NDIM);
    *out = (fan_array){.data = (char *)(uintptr_t)at,
                       .dtype = like->dtype,
                       .ndim = like->ndim,
                       .size = like->size,
                       .shape = room,
                       .strides = room + FAN_MAX_NDIM,
                       .writable = true};
    return FAN_OK;
}

static fan_status upload(const site *s, const fan_array *out, const fan_array *in, fan_error *err)
{
    fan_status status;
    twin t = {.bytes = NULL};
    fan_array near;
    int64_t room[2 * FAN_MAX_NDIM];
    if (out->size == 0)
        return FAN_OK;
    if (!fan_array_dense(out)) {
        FAN_TRY(packed(s, out, &near, room, err));
        status = upload(s, &near, in, err);
        if (status == FAN_OK)
            status = copy(s, out, &near, err);
        fan_cuda_scratch_free(s->stream, address_of(&near));
        return status;
    }
    FAN_GO(twin_begin(&t, out, err)); /* memory that is surely not pinned: the call returns when it has been read */
    fan_array_copy(&t.array, in);
    status = fan_cuda_check(
        s->part, fan_cuda_api_of(s->part)->MemcpyHtoDAsync(address_of(out) + (uint64_t)t.lo, t.bytes, t.size, s->on),
        "cuMemcpyHtoDAsync", err);
done:
    twin_end(&t);
    return status;
}

static fan_status download(const site *s, const fan_array *dst, const fan_array *src, fan_error *err)
{
    const fan_cuda_api *api = fan_cuda_api_of(s->part);
    fan_status status;
    twin t = {.bytes = NULL};
    fan_array near;
    int64_t room[2 * FAN_MAX_NDIM];
    if (src->size == 0)
        return FAN_OK;
    if (!fan_array_dense(src)) {
        FAN_TRY(packed(s, src, &near, room, err));
        status = copy(s, &near, src, err);
        if (status == FAN_OK)
            status = download(s, dst, &near, err);
        fan_cuda_scratch_free(s->stream, address_of(&near));
        return status;
    }
    FAN_GO(twin_begin(&t, src, err));
    FAN_GO(fan_cuda_check(s->part, api->MemcpyDtoHAsync(t.bytes, address_of(src) + (uint64_t)t.lo, t.size, s->on),
                          "cuMemcpyDtoHAsync", err));
    FAN_GO(fan_cuda_pass(s->part, s->on, err));
    fan_array_copy(dst, &t.array);
done:
    twin_end(&t);
    return status;
}

/* exact: there is no kernel for it: the host adds. Blocks. */
static fan_status exact(const site *s, const fan_job *job, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *sum_ = NULL, **made = fan_calloc(job->n * sizeof *made);
    fan_operand *in = fan_calloc(job->n * sizeof *in);
    if (!made || !in) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for an exact sum");
        goto done;
    }
    for (size_t k = 0; k < job->n; k++) {
        const fan_array *a = job->in[k].array;
        FAN_GO(fan_array_new(a->dtype, a->ndim, a->shape, a, &made[k], err));
        FAN_GO(download(s, made[k], a, err));
        in[k] = (fan_operand){.array = made[k], .acc = job->in[k].acc};
    }
    FAN_GO(fan_array_new(job->out->dtype, job->out->ndim, job->out->shape, job->out, &sum_, err));
    fan_job_run(&(fan_job){.kind = FAN_JOB_EXACT, .out = sum_, .in = in, .n = job->n, .scale = job->scale}, true);
    status = upload(s, job->out, sum_, err);
done:
    for (size_t k = 0; made && k < job->n; k++)
        fan_array_drop(made[k]);
    fan_array_drop(sum_);
    fan_free(made);
    fan_free(in);
    return status;
}

/* ---- the table's entries ---- */

static fan_status retain_array(const site *s, const fan_array *a, uint64_t capture, fan_cu_graph graph, fan_error *err)
{
    return a && a->size ? fan_cuda_retain(s->part, address_of(a), capture, graph, err) : FAN_OK;
}

static fan_status retain_all(const site *s, const fan_job *job, uint64_t capture, fan_cu_graph graph, fan_error *err)
{
    FAN_TRY(retain_array(s, job->out, capture, graph, err));
    for (size_t k = 0; k < job->n && job->kind != FAN_JOB_UPLOAD; k++)
        FAN_TRY(retain_array(s, job->in[k].array, capture, graph, err));
    if (job->sparse) {
        FAN_TRY(retain_array(s, job->sparse->indices, capture, graph, err));
        FAN_TRY(retain_array(s, job->sparse->pointers, capture, graph, err));
        FAN_TRY(retain_array(s, job->sparse->values, capture, graph, err));
    }
    return FAN_OK;
}

/* under_capture: what a graph cannot replay is refused; what the rest uses is the graph's as well. */
static fan_status under_capture(const site *s, const fan_job *job, fan_error *err)
{
    uint64_t capture;
    fan_cu_graph graph = NULL;
    FAN_TRY(fan_cuda_capture_of(s->stream, &capture, &graph, err));
    if (!capture)
        return FAN_OK;
    if (job->kind == FAN_JOB_UPLOAD || job->kind == FAN_JOB_EXACT || job->figures)
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, 900,
            "%s needs the host, which a captured stream (%#llx of cuda:%d) cannot wait for: do it before the capture",
            job->kind == FAN_JOB_EXACT ? "an exact sum"
            : job->figures             ? "a sum with statistics"
                                       : "a copy from the host",
            (unsigned long long)s->stream->handle, s->part->index);
    return retain_all(s, job, capture, graph, err);
}

static fan_status run_job(site *s, const fan_job *job, fan_error *err)
{
    switch (job->kind) {
    case FAN_JOB_SUM:
        return sum(s, job->out, job->in, job->n, job->scale, err);
    case FAN_JOB_EXACT:
        return exact(s, job, err);
    case FAN_JOB_REDUCE:
        return reduce(s, job->out, job->in[0].array, err);
    case FAN_JOB_COPY:
        return copy(s, job->out, job->in[0].array, err);
    case FAN_JOB_ZERO:
        return zero(s, job->out, err);
    case FAN_JOB_SCATTER:
        return scatter(s, job->out, job->sparse, err);
    case FAN_JOB_UPLOAD:
        return upload(s, job->out, job->in[0].array, err);
    case FAN_JOB_STATS:
        return survey(s, job, err);
    }
    return FAN_OK;
}

/* in_place: the job writes over what it reads. */
static bool in_place(const fan_job *job)
{
    for (size_t k = 0; job->kind == FAN_JOB_SUM && k < job->n; k++)
        if (!fan_array_extents_disjoint(job->out, job->in[k].array))
            return true;
    return false;
}

fan_status fan_cuda_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    bool begun = false;
    site w = {.part = fan_cuda_part_of(d),
              .stream = s,
              .label = job->label ? job->label : fan_job_word(job->kind),
              .figures = job->figures,
              .skip = job->skip,
              .begun = &begun};
    fan_cuda_scope scope;
    fan_status status;
    FAN_TRY(fan_cuda_queue_of(s, &w.on, err));
    FAN_TRY(fan_cuda_enter(w.part, &scope, err));
    FAN_GO(under_capture(&w, job, err));
    status = run_job(&w, job, err);
    if (status == FAN_ERR_DEVICE_NOMEM && begun &&
        in_place(job)) { /* want of memory changes nothing, as a rule: here it did */
        status = FAN_ERR_DEVICE;
        if (err)
            err->status = status;
    }
done:
    fan_cuda_leave(&scope);
    if (status == FAN_OK)
        fan_job_trace(d, s, job, -1, -1);
    return status;
}

/* ---- many sums in one launch ----
 *
 * Gap-free sums of one kind are rows of a table, which goes to the device before the launch and is freed behind it. It
 * goes in pieces of 64 KiB: of those the driver takes a copy at once, for more it may wait until the stream has run.
 * Left to `run`: a sum that takes longer than a launch does; one that has no fold of its own; all of them under a
 * capture, for a graph would read the table again from the host; and where memory is not stream-ordered, for freeing
 * would block. */

#define MANY_BYTES (INT64_C(4) << 20) /* of a sum, read and written */
#define PIECE 65536
#define STAGING_KEPT ((size_t)1 << 20)
#define KINDS 32
#define MOST_OF_A_TABLE (UINT32_MAX / 2) /* tiles, sources */

/* Sums of one kernel, and of one scale. */
typedef struct many {
    size_t which;
    uint64_t factor;
    bool scaled;
    size_t rows, sources, tiles;
    uint64_t at;              /* of its table in the staging memory */
    size_t row, source, tile; /* so many are written */
} many;

static int64_t numbers_of(const fan_array *a) { return a->size * (fan_dtype_kind(a->dtype) == 'c' ? 2 : 1); }

static size_t tiles_of(const fan_job *job, size_t which)
{
    int64_t tile = FAN_K_TILE / folds[which].bytes;
    return (size_t)((numbers_of(job->out) + tile - 1) / tile);
}

/* kind_of: which of the kinds a job belongs to, a new one where there is room; KINDS: to none. */
static size_t kind_of(const fan_job *job, many *kinds, size_t *nkinds)
{
    many k = {.scaled = job->scale && job->scale->on};
    char factor[16] = {0};
    fan_nditer w;
    size_t i = 0;
    if (job->kind != FAN_JOB_SUM || job->stats || job->out->size == 0 || fan_job_bytes(job) > MANY_BYTES)
        return KINDS;
    fan_nditer_begin(&w, job->out, false);
    for (size_t j = 0; j < job->n; j++)
        fan_nditer_also(&w, job->in[j].array);
    fan_nditer_ready(&w);
    k.which = fold_for(job->out, job->in, job->n, k.scaled, &w);
    if (k.which == FOLDS)
        return KINDS;
    if (k.scaled) {
        fan_scale_as(job->scale, job->in[0].acc, factor);
        memcpy(&k.factor, factor, sizeof k.factor);
    }
    while (i < *nkinds && (kinds[i].which != k.which || kinds[i].scaled != k.scaled || kinds[i].factor != k.factor))
        i++;
    if (i == *nkinds && i < KINDS)
        kinds[(*nkinds)++] = k;
    if (i == KINDS || kinds[i].tiles > MOST_OF_A_TABLE || kinds[i].sources > MOST_OF_A_TABLE)
        return KINDS;
    kinds[i].rows++;
    kinds[i].sources += job->n;
    kinds[i].tiles += tiles_of(job, k.which);
    return i;
}

static size_t table_bytes(const many *k)
{
    return (k->rows * sizeof(fan_k_row) + k->sources * sizeof(uint64_t) + k->tiles * sizeof(uint32_t) + 7) & ~(size_t)7;
}

static void put_row(char *staging, many *k, const fan_job *job)
{
    fan_k_row *rows = (fan_k_row *)(void *)(staging + k->at);
    uint64_t *sources = (uint64_t *)(void *)(rows + k->rows), bits = address_of(job->out);
    uint32_t *tiles = (uint32_t *)(void *)(sources + k->sources);
    size_t ntiles = tiles_of(job, k->which);
    fan_k_row *r = &rows[k->row];
    *r = (fan_k_row){.out = bits,
                     .count = (uint32_t)numbers_of(job->out),
                     .first = (uint32_t)k->source,
                     .tile = (uint32_t)k->tile,
                     .n = (uint16_t)job->n};
    for (size_t i = 0; i < job->n; i++)
        bits |= sources[k->source++] = address_of(job->in[i].array);
    r->wide = (bits & 15) == 0;
    for (size_t i = 0; i < ntiles; i++)
        tiles[k->tile++] = (uint32_t)k->row;
    k->row++;
}

/* staging_take, _give: host memory for tables; one piece of it is kept for the next time. NULL: out of memory. */
static char *staging_take(fan_cuda_part *p, size_t *bytes)
{
    (void)pthread_mutex_lock(&p->lock);
    char *kept = p->staging;
    size_t had = p->staging_bytes;
    p->staging = NULL;
    (void)pthread_mutex_unlock(&p->lock);
    if (kept && had >= *bytes) {
        *bytes = had;
        return kept;
    }
    fan_free(kept);
    return fan_alloc(*bytes);
}

static void staging_give(fan_cuda_part *p, char *staging, size_t bytes)
{
    char *gone = staging;
    (void)pthread_mutex_lock(&p->lock);
    if (!p->staging && bytes <= STAGING_KEPT) {
        p->staging = staging;
        p->staging_bytes = bytes;
        gone = NULL;
    }
    (void)pthread_mutex_unlock(&p->lock);
    fan_free(gone);
}

static fan_status send(const site *s, uint64_t to, const char *from, size_t bytes, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t at = 0; at < bytes && status == FAN_OK; at += PIECE) {
        size_t piece = bytes - at < PIECE ? bytes - at : PIECE;
        status = fan_cuda_check(s->part, fan_cuda_api_of(s->part)->MemcpyHtoDAsync(to + at, from + at, piece, s->on),
                                "cuMemcpyHtoDAsync", err);
    }
    return status;
}

static fan_status launch_many(site *s, const many *k, uint64_t table, fan_error *err)
{
    fan_k_many a = {.table = table + k->at,
                    .factor = k->factor,
                    .rows = (int64_t)k->rows,
                    .sources = (int64_t)k->sources,
                    .tiles = (int64_t)k->tiles,
                    .scaled = k->scaled};
    return launch(s, s->part->many[k->which], a.tiles * FAN_K_WARP, &a, err);
}

/* A job's place: its kind, and whether it has the company that makes a table worth while. */
typedef struct sorted {
    many kinds[KINDS];
    size_t nkinds;
    uint8_t *kind; /* of each job */
    fan_job *some; /* the jobs of one kind */
} sorted;

static bool together(const sorted *o, size_t job) { return o->kind[job] < KINDS && o->kinds[o->kind[job]].rows > 1; }

/* launch_kinds: one launch for each kind. The table is there. */
static fan_status launch_kinds(site *s, sorted *o, const fan_job *jobs, size_t n, uint64_t table, fan_job_state *fates,
                               fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    for (size_t k = 0; k < o->nkinds; k++) {
        size_t m = 0;
        if (o->kinds[k].rows < 2)
            continue;
        for (size_t i = 0; i < n; i++)
            if (o->kind[i] == k)
                o->some[m++] = jobs[i];
        s->label = fan_jobs_label(o->some, m, label, sizeof label);
        fan_status status = launch_many(s, &o->kinds[k], table, err);
        for (size_t i = 0; i < n; i++)
            if (o->kind[i] == k)
                fates[i] = status == FAN_OK ? FAN_JOB_QUEUED : FAN_JOB_FAILED;
        FAN_TRY(status);
        fan_jobs_trace(&s->part->device, s->stream, o->some, m, label, -1, -1);
    }
    return FAN_OK;
}

static fan_status run_tables(site *s, sorted *o, const fan_job *jobs, size_t n, fan_job_state *fates, fan_error *err)
{
    size_t bytes = 0, room;
    uint64_t table = 0;
    for (size_t k = 0; k < o->nkinds; k++) {
        o->kinds[k].at = bytes;
        bytes += o->kinds[k].rows > 1 ? table_bytes(&o->kinds[k]) : 0;
    }
    if (!bytes)
        return FAN_OK;
    room = bytes;
    char *staging = staging_take(s->part, &room);
    if (!staging)
        return FAN_OK; /* one by one they need none */
    for (size_t i = 0; i < n; i++)
        if (together(o, i))
            put_row(staging, &o->kinds[o->kind[i]], &jobs[i]);
    fan_status status = fan_cuda_scratch(s->stream, bytes, &table, err);
    if (status == FAN_OK) {
        status = send(s, table, staging, bytes, err);
        if (FAN_FAULT(CUDA_EARLY_TABLE))
            fan_cuda_free(&s->part->device, (void *)(uintptr_t)table, bytes);
        if (status == FAN_OK)
            status = launch_kinds(s, o, jobs, n, table, fates, err);
        if (!FAN_FAULT(CUDA_EARLY_TABLE))
            fan_cuda_scratch_free(s->stream, table);
    } else if (status == FAN_ERR_NOMEM || status == FAN_ERR_DEVICE_NOMEM) {
        status = FAN_OK;
    }
    staging_give(s->part, staging, room);
    if (status == FAN_OK)
        return FAN_OK;
    bool tried = false; /* else it failed before any launch, for all of them */
    for (size_t i = 0; i < n; i++)
        tried |= fates[i] != FAN_JOB_PENDING;
    for (size_t i = 0; i < n && !tried; i++)
        if (together(o, i))
            fates[i] = FAN_JOB_FAILED;
    return status;
}

fan_status fan_cuda_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *fates,
                             fan_error *err)
{
    site w = {.part = fan_cuda_part_of(d), .stream = s};
    fan_cuda_scope scope;
    fan_status status = FAN_OK;
    uint64_t capture;
    sorted o = {.nkinds = 0};
    FAN_TRY(fan_cuda_queue_of(s, &w.on, err));
    FAN_TRY(fan_cuda_enter(w.part, &scope, err));
    FAN_GO(fan_cuda_capture_of(s, &capture, NULL, err));
    if (capture || !w.part->pools)
        goto done;
    o.kind = fan_alloc(n);
    o.some = fan_alloc(n * sizeof *o.some);
    if (!o.kind || !o.some)
        goto done;
    for (size_t i = 0; i < n; i++)
        o.kind[i] = (uint8_t)kind_of(&jobs[i], o.kinds, &o.nkinds);
    status = run_tables(&w, &o, jobs, n, fates, err);
done:
    fan_free(o.kind);
    fan_free(o.some);
    fan_cuda_leave(&scope);
    return status;
}

fan_status fan_cuda_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err)
{
    site w = {.part = fan_cuda_part_of(s->device), .stream = s, .label = "read"};
    fan_cuda_scope scope;
    uint64_t capture;
    fan_status status;
    FAN_TRY(fan_cuda_queue_of(s, &w.on, err));
    FAN_TRY(fan_cuda_enter(w.part, &scope, err));
    FAN_GO(fan_cuda_capture_of(s, &capture, NULL, err));
    if (capture)
        status =
            fan_fail_code(err, FAN_ERR_CAPTURE, 900,
                          "stream %#llx of cuda:%d is captured: its values cannot be read before the graph has run",
                          (unsigned long long)s->handle, s->device->index);
    else
        status = download(&w, dst, src, err);
done:
    fan_cuda_leave(&scope);
    return status;
}
