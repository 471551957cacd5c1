/* The kernels for the host, and what each touches. */
#include "fake_cuda/block.h"
#include "fake_cuda/fake.h"
#include "fake_cuda/traffic.h"

#include <assert.h>

/* Of a piece that is not 16 bytes only the first number is read, which a compiler that unrolls does
 * not see. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "fake_cuda/host.h"

#include "device/kernels/kernels.cu" /* the one place where it is compiled as C */
#pragma GCC diagnostic pop

static fan_array *access_at(fan_fake_access *a, uint64_t address, int dtype, int ndim)
{
    a->array = (fan_array){.data = (char *)(uintptr_t)(address & ~FAN_FAKE_TAG),
                           .dtype = (fan_dtype)dtype,
                           .ndim = ndim,
                           .size = 1,
                           .writable = true};
    return &a->array;
}

/* dense: `count` elements without gaps. */
static void dense(fan_fake_access *a, uint64_t address, int dtype, int64_t count)
{
    access_at(a, address, dtype, 1)->size = count;
    a->dims[0] = count;
    a->dims[1] = (int64_t)fan_dtype_size((fan_dtype)dtype);
}

/* strided: extents and strides, unchanged; two runs of axes may be joined. */
static void strided(fan_fake_access *a, uint64_t address, int dtype, int n1, const int64_t *e1,
                    const int64_t *s1, int n2, const int64_t *e2, const int64_t *s2)
{
    fan_array *v = access_at(a, address, dtype, n1 + n2);
    int64_t *strides = a->dims + n1 + n2;
    assert(n1 + n2 <= FAN_MAX_NDIM);
    for (int i = 0; i < n1; i++) {
        a->dims[i] = e1[i];
        strides[i] = s1[i];
    }
    for (int i = 0; i < n2; i++) {
        a->dims[n1 + i] = e2[i];
        strides[n1 + i] = s2[i];
    }
    for (int i = 0; i < n1 + n2; i++)
        v->size *= a->dims[i];
}

/* source_dtype: of operand k; `acc`: the dtype of what the flags call wide. */
static int source_dtype(int64_t flags, uint32_t k, int dtype, int acc)
{
    return k == 0 && (flags & FAN_K_FIRST_WIDE) ? acc : dtype;
}

static int out_dtype(int64_t flags, int dtype, int acc)
{
    return flags & FAN_K_OUT_WIDE ? acc : dtype;
}

/* fold_accesses: all sources, and the result. */
static size_t fold_accesses(const fan_k_fold *a, int dtype, int acc, fan_fake_access *out)
{
    for (int32_t k = 0; k < a->n; k++)
        dense(&out[k], a->in[k], source_dtype(a->flags, (uint32_t)k, dtype, acc), a->count);
    dense(&out[a->n], a->out, out_dtype(a->flags, dtype, acc), a->count);
    return (size_t)a->n + 1;
}

size_t fan_fake_table_bytes(const fan_k_many *a)
{
    return (size_t)a->rows * sizeof(fan_k_row) + (size_t)a->sources * sizeof(uint64_t) +
           (size_t)a->tiles * sizeof(uint32_t);
}

static size_t many_most(const void *args)
{
    const fan_k_many *a = args;
    return (size_t)(1 + a->sources + a->rows);
}

/* many_accesses: the table, all sources, all results. */
static size_t many_accesses(const fan_k_many *a, const char *table, int dtype, int acc,
                            fan_fake_access *out, size_t *written)
{
    const fan_k_row *rows = (const fan_k_row *)(const void *)table;
    const uint64_t *sources = (const uint64_t *)(const void *)(rows + a->rows);
    size_t n = 0;
    dense(&out[n++], a->table, FAN_DT_UINT8, (int64_t)fan_fake_table_bytes(a));
    for (int64_t i = 0; i < a->rows; i++) {
        for (uint32_t k = 0; k < rows[i].n; k++) {
            dense(&out[n++], sources[rows[i].first + k], source_dtype(rows[i].flags, k, dtype, acc),
                  rows[i].count);
        }
    }
    for (int64_t i = 0; i < a->rows; i++)
        dense(&out[n++], rows[i].out, out_dtype(rows[i].flags, dtype, acc), rows[i].count);
    *written = (size_t)a->rows;
    return n;
}

static size_t fold_count(const void *args)
{
    (void)args;
    return FAN_K_SOURCES + 3;
}

static size_t any_accesses(const void *args, fan_fake_access *out)
{
    const fan_k_any *a = args;
    const int64_t *to = a->words + a->ndim;
    const int64_t *source = to + 1 + a->ndim;
    for (int32_t k = 0; k < a->n; k++, source += 2 + a->ndim) {
        strided(&out[k], (uint64_t)source[0], (int)(source[1] & 0xff), a->ndim, a->words,
                source + 2, 0, NULL, NULL);
    }
    strided(&out[a->n], (uint64_t)to[0], a->out, a->ndim, a->words, to + 1, 0, NULL, NULL);
    return (size_t)a->n + 1;
}

/* words: of statistics (array/device_stats.h). */
static void words(fan_fake_access *a, uint64_t address, int64_t count)
{
    dense(a, address, FAN_DT_UINT64, address ? count : 0);
}

static size_t fold_stats_accesses(const fan_k_fold *a, int dtype, int acc, fan_fake_access *out)
{
    size_t n = fold_accesses(a, dtype, acc, out);
    if (!a->out)
        dense(&out[n - 1], 0, dtype, 0);
    words(&out[n], a->rows, FAN_STATS_PARTIAL_WORDS * fan_stats_partials(a->count / a->parts));
    return n + 1;
}

static size_t any_stats_accesses(const void *args, fan_fake_access *out)
{
    const fan_k_any *a = args;
    size_t n = any_accesses(args, out);
    if (!a->words[a->ndim])
        dense(&out[n - 1], 0, a->out, 0);
    words(&out[n], a->rows, FAN_STATS_PARTIAL_WORDS * fan_stats_partials(a->size));
    return n + 1;
}

static size_t stats_end_accesses(const void *args, fan_fake_access *out)
{
    const fan_k_stats_end *a = args;
    words(&out[0], a->rows, FAN_STATS_PARTIAL_WORDS * a->nrows);
    words(&out[1], a->before, FAN_STATS_WORDS);
    words(&out[2], a->stats, FAN_STATS_WORDS);
    return 3;
}

static size_t nonfinite_accesses(const void *args, fan_fake_access *out)
{
    const fan_k_any *a = args;
    size_t n = any_accesses(args, out);
    words(&out[n - 1], a->rows, FAN_STATS_WORDS);
    return n;
}

/* of_parts: the dtype of which that of a part is known. */
static int of_parts(int dtype, int parts)
{
    if (parts == 1)
        return dtype;
    return dtype == FAN_DT_FLOAT32 ? FAN_DT_COMPLEX64 : FAN_DT_COMPLEX128;
}

/* reduce_accesses: what an earlier launch left, and what this one leaves, is gap-free. */
static size_t reduce_accesses(const fan_k_reduce *a, int from, fan_fake_access *out)
{
    const int64_t *to = a->words + a->stay;
    const int64_t *in = to + a->stay;
    const int64_t *gone = in + a->stay;
    if (a->again) {
        dense(&out[0], a->in, from, a->numbers * a->terms);
    } else {
        strided(&out[0], a->in, of_parts(from, a->parts), a->stay, a->words, in, a->go, gone,
                gone + a->go);
    }
    if (a->last) {
        strided(&out[1], a->out, of_parts(a->to, a->parts), a->stay, a->words, to, 0, NULL, NULL);
    } else {
        dense(&out[1], a->out, a->acc, a->numbers * a->runs);
    }
    return 2;
}

static int index_dtype(int size)
{
    return size == 4 ? FAN_DT_INT32 : FAN_DT_INT64;
}

static int few_dtype(int size)
{
    switch (size) {
    case 1:
        return FAN_DT_UINT8;
    case 2:
        return FAN_DT_UINT16;
    default:
        return FAN_DT_UINT32;
    }
}

static void fours(fan_fake_access *a, uint64_t address, int64_t count)
{
    dense(a, address, FAN_DT_UINT32, count);
}

static void indices(fan_fake_access *a, const fan_k_coo *coo, int64_t entries)
{
    int64_t shape[2] = {coo->sparse, entries};
    int64_t strides[2] = {coo->index_row, coo->index_step};
    strided(a, coo->indices, index_dtype(coo->index_size), 2, shape, strides, 0, NULL, NULL);
}

/* list_rows, list_came: what a list of entries has. */
static size_t list_rows(fan_fake_access *out, const fan_k_list *list, const fan_k_entry *form,
                        int64_t entries)
{
    dense(&out[0], list->low, few_dtype(form->low_size), entries);
    if (form->high_size)
        dense(&out[1], list->high, few_dtype(form->high_size), entries);
    return form->high_size ? 2 : 1;
}

static size_t list_came(fan_fake_access *out, const fan_k_list *list, const fan_k_entry *form,
                        int64_t entries)
{
    dense(&out[0], list->came, few_dtype(form->came_size), entries);
    return 1;
}

/* sort_count_accesses, sort_scan_accesses, sort_move_accesses: what they touch where there is
 * something to sort. */
static size_t sort_count_accesses(const fan_k_sort *a, fan_fake_access *out)
{
    size_t n = 1;
    if (a->coo.indices) {
        indices(&out[0], &a->coo, a->entries);
    } else {
        n = list_rows(out, &a->list, &a->entry, a->entries);
    }
    fours(&out[n++], a->unsorted, 1);
    fours(&out[n++], a->counts, a->tiles << a->bits);
    return n;
}

static size_t sort_scan_accesses(const fan_k_sort *a, fan_fake_access *out)
{
    fours(&out[0], a->unsorted, 1);
    fours(&out[1], a->counts, a->tiles << a->bits);
    fours(&out[2], a->totals, (int64_t)1 << a->bits);
    return 3;
}

static size_t sort_move_accesses(const fan_k_sort *a, fan_fake_access *out, size_t *written)
{
    size_t n = 0;
    fours(&out[n++], a->unsorted, 1);
    fours(&out[n++], a->counts, a->tiles << a->bits);
    if (a->tiles > 1)
        fours(&out[n++], a->totals, (int64_t)1 << a->bits);
    if (a->coo.indices) {
        indices(&out[n++], &a->coo, a->entries);
        if (a->entry.values) {
            strided(&out[n++], a->entry.values, few_dtype(a->entry.came_size), 1, &a->entries,
                    &a->entry.value_step, 0, NULL, NULL);
        }
    } else {
        n += list_rows(&out[n], &a->list, &a->entry, a->entries);
        n += list_came(&out[n], &a->list, &a->entry, a->entries);
    }
    *written = list_rows(&out[n], &a->out, &a->entry, a->entries) + 1;
    n += *written - 1;
    return n + list_came(&out[n], &a->out, &a->entry, a->entries);
}

/* scatter_accesses: it writes where its indices point, which are unknown when it is queued: all
 * within reach counts. */
static size_t scatter_accesses(const fan_k_scatter *a, fan_fake_access *out)
{
    const int64_t *extent = a->words + (a->pointers ? 3 : 2 * a->coo.sparse);
    const int64_t *into = extent + a->inner;
    const int64_t *values = into + a->inner;
    size_t n = 0;
    strided(&out[n++], a->values, a->value_dtype, 1, &a->entries, &a->value_step, a->inner, extent,
            values);
    if (!a->pointers) {
        indices(&out[n++], &a->coo, a->entries);
        if (a->unsorted) {
            fours(&out[n++], a->unsorted, 1);
            n += list_rows(&out[n], &a->list, &a->entry, a->entries);
            n += list_came(&out[n], &a->list, &a->entry, a->entries);
        }
        strided(&out[n++], a->into, a->into_dtype, a->coo.sparse, a->words,
                a->words + a->coo.sparse, a->inner, extent, into);
        return n;
    }
    int64_t rows = a->lanes + 1;
    int64_t shape[2] = {a->lanes, a->words[0]};
    int64_t strides[2] = {a->words[1], a->words[2]};
    strided(&out[n++], a->indices, index_dtype(a->index_size), 1, &a->entries, &a->index_step, 0,
            NULL, NULL);
    strided(&out[n++], a->pointers, index_dtype(a->pointer_size), 1, &rows, &a->pointer_step, 0,
            NULL, NULL);
    strided(&out[n++], a->into, a->into_dtype, 2, shape, strides, a->inner, extent, into);
    return n;
}

static fan_cu_result run_end(bool fine)
{
    if (fan_k_misaligned)
        return MISALIGNED_ADDRESS;
    return fine ? OK : LAUNCH_FAILED;
}

/* RUN: a kernel without barriers, the last thread first: no GPU promises another order. RUN_BLOCKS:
 * one with. */
#define RUN(name, T, kernel)                                           \
    static fan_cu_result run_##name(const void *args, int64_t threads) \
    {                                                                  \
        fan_k_threads = threads;                                       \
        fan_k_misaligned = false;                                      \
        for (fan_k_thread = threads; fan_k_thread-- > 0;) {            \
            if (LANE == FAN_K_BLOCK - 1 && fan__traffic_counts())      \
                fan__traffic_block();                                  \
            kernel(*(const T *)args);                                  \
        }                                                              \
        return run_end(true);                                          \
    }
#define RUN_BLOCKS(name, T, kernel)                                        \
    static void thread_##name(const void *args, int64_t thread)            \
    {                                                                      \
        fan_k_thread = thread;                                             \
        if (LANE == 0 && fan__traffic_counts())                            \
            fan__traffic_block();                                          \
        kernel(*(const T *)args);                                          \
    }                                                                      \
    static fan_cu_result run_##name(const void *args, int64_t threads)     \
    {                                                                      \
        fan_k_threads = threads;                                           \
        fan_k_misaligned = false;                                          \
        fan__block_end end = fan__block_run(thread_##name, args, threads); \
        return run_end(end == FAN__BLOCK_FINE);                            \
    }
#define ACCESSES(name, call) ACCESSES_OF(name, 1, call)
#define ACCESSES_OF(name, writes, call)                                                      \
    static size_t accesses_##name(const void *args, const char *table, fan_fake_access *out, \
                                  size_t *written)                                           \
    {                                                                                        \
        (void)table;                                                                         \
        *written = (writes);                                                                 \
        return call;                                                                         \
    }
#define FOLD_RUN(name, bytes, from, acc)                                                         \
    RUN(name, fan_k_fold, fan_fold_##name)                                                       \
    RUN(many_##name, fan_k_many, fan_many_##name)                                                \
    ACCESSES(name, fold_accesses(args, FAN_DT_##from, FAN_DT_##acc, out))                        \
    ACCESSES(many_##name, many_accesses(args, table, FAN_DT_##from, FAN_DT_##acc, out, written)) \
    RUN_BLOCKS(stats_##name, fan_k_fold, fan_fold_stats_##name)                                  \
    ACCESSES_OF(stats_##name, 2, fold_stats_accesses(args, FAN_DT_##from, FAN_DT_##acc, out))    \
    RUN(scatter_##name, fan_k_scatter, fan_scatter_##name)
FAN_K_FOLD_LIST(FOLD_RUN)
#define REDUCE_RUN(name, from, acc)                     \
    RUN(reduce_##name, fan_k_reduce, fan_reduce_##name) \
    ACCESSES(reduce_##name, reduce_accesses(args, FAN_DT_##from, out))
FAN_K_REDUCE_LIST(REDUCE_RUN)
RUN(any, fan_k_any, fan_any)
RUN_BLOCKS(stats_any, fan_k_any, fan_fold_stats_any)
RUN_BLOCKS(stats_end, fan_k_stats_end, fan_fold_stats_end)
RUN(nonfinite, fan_k_any, fan_nonfinite_any)
RUN(scatter, fan_k_scatter, fan_scatter_any)
RUN_BLOCKS(sort_count, fan_k_sort, fan_sort_count)
RUN_BLOCKS(sort_scan, fan_k_sort, fan_sort_scan)
RUN_BLOCKS(sort_move, fan_k_sort, fan_sort_move)
ACCESSES(any, any_accesses(args, out))
ACCESSES_OF(stats_any, 2, any_stats_accesses(args, out))
ACCESSES(stats_end, stats_end_accesses(args, out))
ACCESSES(nonfinite, nonfinite_accesses(args, out))
ACCESSES(scatter, scatter_accesses(args, out))
ACCESSES_OF(sort_count, 2, sort_count_accesses(args, out))
ACCESSES_OF(sort_scan, 2, sort_scan_accesses(args, out))
ACCESSES(sort_move, sort_move_accesses(args, out, written))

static const fan_fake_kernel kernels[] = {
#define FOLD_ROW(name, bytes, from, acc)                                                     \
    {"fan_fold_" #name, sizeof(fan_k_fold), false, run_##name, fold_count, accesses_##name}, \
        {"fan_many_" #name, sizeof(fan_k_many), true,                                        \
         run_many_##name,   many_most,          accesses_many_##name},                       \
        {"fan_fold_stats_" #name, sizeof(fan_k_fold), false,                                 \
         run_stats_##name,        fold_count,         accesses_stats_##name},                \
        {"fan_scatter_" #name, sizeof(fan_k_scatter), false, run_scatter_##name,             \
         fold_count,           accesses_scatter},
    FAN_K_FOLD_LIST(FOLD_ROW){"fan_any", sizeof(fan_k_any), false, run_any, fold_count,
                              accesses_any},
    {"fan_fold_stats_any", sizeof(fan_k_any), false, run_stats_any, fold_count, accesses_stats_any},
    {"fan_fold_stats_end", sizeof(fan_k_stats_end), false, run_stats_end, fold_count,
     accesses_stats_end},
    {"fan_nonfinite_any", sizeof(fan_k_any), false, run_nonfinite, fold_count, accesses_nonfinite},
#define REDUCE_ROW(name, from, acc)                    \
    {"fan_reduce_" #name, sizeof(fan_k_reduce), false, \
     run_reduce_##name,   fold_count,           accesses_reduce_##name},
    FAN_K_REDUCE_LIST(REDUCE_ROW){"fan_scatter_any", sizeof(fan_k_scatter), false, run_scatter,
                                  fold_count, accesses_scatter},
    {"fan_sort_count", sizeof(fan_k_sort), false, run_sort_count, fold_count, accesses_sort_count},
    {"fan_sort_scan", sizeof(fan_k_sort), false, run_sort_scan, fold_count, accesses_sort_scan},
    {"fan_sort_move", sizeof(fan_k_sort), false, run_sort_move, fold_count, accesses_sort_move},
};

_Static_assert(sizeof kernels / sizeof *kernels <= FAN_FAKE_KERNELS,
               "more kernels than are counted");

size_t fan_fake_kernel_number(const fan_fake_kernel *k)
{
    return (size_t)(k - kernels);
}

const fan_fake_kernel *fan_fake_kernel_find(const char *name)
{
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    }
    return NULL;
}
