/* Sparse into dense.
 *
 * Compressed data are one launch: a worker for each row. COO data are first sorted by rows, if the
 * device finds that they need it (kernels.cu, Title: COO): per digit one launch counts, one adds
 * up, one moves; then one sums, and only this one changes the result. All of it is queued, and
 * unnecessary launches return at once. The scratch memory is bounded: a long list is split into
 * several, one after the other, and rows beyond 32 bits are processed in turns. */

#include "base/fault.h"
#include "device/cuda/part.h"

#include <string.h>

_Static_assert(sizeof(fan_k_sort) <= 4096 &&
                   sizeof(((fan_k_sort *)0)->words) >= FAN_MAX_NDIM * sizeof(int64_t),
               "any number of axes");

/* Memory of a sort. */
typedef struct scatter_sort {
    int passes;
    uint64_t at; /* scratch memory; 0: no sort needed */
    uint64_t lists[2], counts, totals, unsorted;
    int64_t entries; /* of a list, at most */
} scatter_sort;

static int scatter_bits(uint64_t most)
{
    if (most == 0)
        return 0;
    return 64 - __builtin_clzll(most);
}

static int64_t scatter_tiles(int64_t entries)
{
    return (entries + FAN_K_ENTRIES - 1) / FAN_K_ENTRIES;
}

static uint64_t scatter_round(uint64_t bytes)
{
    return (bytes + 15) & ~(uint64_t)15;
}

/* scatter_list_bytes: returns the bytes of a list: rows and their payloads, 4 bytes each at
 * most. */
static uint64_t scatter_list_bytes(int64_t entries)
{
    return 2 * scatter_round(4 * (uint64_t)entries) + 16;
}

static fan_k_list scatter_list_at(uint64_t at, int64_t entries, const fan_k_entry *form)
{
    fan_k_list list = {.low = at};
    list.high = at + scatter_round((uint64_t)(entries * form->low_size));
    list.came = list.high + scatter_round((uint64_t)(entries * form->high_size));
    return list;
}

/* scatter_sort_run: sorts the entries of `of` by their rows, into its list. */
static fan_status scatter_sort_run(const fan__launch_ctx *s, const scatter_sort *sort,
                                   fan_k_scatter *of, fan_error *err)
{
    fan__launch_ctx quiet = *s; /* no launch here changes the result */
    fan_k_sort a;
    int bits = scatter_bits(of->coo.nrows);
    int passes = sort->passes - FAN_FAULT(CUDA_SHORT_SORT);
    quiet.begun = NULL;
    memset(&a, 0, sizeof a);
    int first = (bits + sort->passes - 1) / sort->passes;
    int rest = bits - first;
    of->entry.low_bits = first;
    of->entry.low_size = first > 8 ? 2 : 1;
    of->entry.high_size = rest > 8 ? 2 : rest > 0;
    if (rest > 16) {
        of->entry.low_size = 4;
        of->entry.high_size = 0;
    }
    a.coo = of->coo;
    a.entry = of->entry;
    a.out = scatter_list_at(sort->lists[0], sort->entries, &a.entry);
    a.counts = sort->counts;
    a.totals = sort->totals;
    a.unsorted = sort->unsorted;
    a.entries = of->entries;
    a.tiles = scatter_tiles(of->entries);
    memcpy(a.words, of->words, (size_t)of->coo.sparse * sizeof *a.words);
    FAN_TRY(fan__cuda_check(s->part,
                            fan__cuda_api_of(s->part)->MemsetD8Async(sort->unsorted, 0, 4, s->on),
                            "cuMemsetD8Async", err));
    for (int pass = 0; pass < passes; pass++) {
        a.bits = (bits - a.shift + sort->passes - pass - 1) / (sort->passes - pass);
        a.out = scatter_list_at(sort->lists[pass & 1], sort->entries, &a.entry);
        FAN_TRY(fan__launch_blocks(&quiet, s->part->sort_count, a.tiles, &a, err));
        if (a.tiles > 1)
            FAN_TRY(fan__launch_blocks(&quiet, s->part->sort_scan, (int64_t)1 << a.bits, &a, err));
        FAN_TRY(fan__launch_blocks(&quiet, s->part->sort_move, a.tiles, &a, err));
        a.coo.indices = 0;
        a.list = a.out;
        a.shift += a.bits;
    }
    of->list = a.out;
    return FAN_OK;
}

/* scatter_dense: returns whether the numbers of an entry are contiguous. */
static bool scatter_dense(const fan_array *a, int first)
{
    int64_t step = (int64_t)fan_dtype_size(a->dtype);
    for (int i = a->ndim - 1; i >= first; i--) {
        if (a->shape[i] != 1 && a->strides[i] != step)
            return false;
        step *= a->shape[i];
    }
    return true;
}

/* scatter_kernel: returns the kernel for these dtypes, if the entries' layout fits; adapts the
 * arguments `a`, and *threads per entry. */
static fan_cu_function scatter_kernel(const fan__launch_ctx *s, fan_k_scatter *a,
                                      const fan_array *into, const fan_array *values,
                                      int64_t *threads)
{
    size_t which = fan__scatter_for(into->dtype, values->dtype);
    *threads = a->inside;
    if (a->anywhere || which == FAN__FOLDS)
        return s->part->scatter;
    if (!scatter_dense(into, a->coo.sparse) || !scatter_dense(values, 1))
        return s->part->scatter;
    int64_t bytes = a->inside * (int64_t)fan_dtype_size(values->dtype);
    uint64_t low = a->into | a->values | (uint64_t)a->value_step | (uint64_t)bytes;
    for (int i = 0; i < a->coo.sparse; i++)
        low |= (uint64_t)into->strides[i];
    a->aligned = (low & 15) == 0;
    a->wide = into->dtype != values->dtype;
    a->inside = bytes / fan__folds[which].bytes;
    *threads = a->aligned ? bytes / 16 : a->inside;
    return s->part->fold_scatter[which];
}

static uint64_t scatter_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* scatter_sort_begin: scratch memory for sorting lists of at most sort->entries entries, of rows of
 * `bits` bits. */
static fan_status scatter_sort_begin(const fan__launch_ctx *s, scatter_sort *sort, int bits,
                                     fan_error *err)
{
    if (sort->entries < 2)
        return FAN_OK;
    sort->passes = (bits + FAN_K_DIGIT - 1) / FAN_K_DIGIT;
    uint64_t list = scatter_list_bytes(sort->entries);
    uint64_t digits = (uint64_t)4 << FAN_K_DIGIT;
    uint64_t counts = digits * (uint64_t)scatter_tiles(sort->entries);
    uint64_t lists = 1 + (sort->passes > 1);
    FAN_TRY(
        fan__cuda_scratch(s->stream, (size_t)(lists * list + counts + digits + 4), &sort->at, err));
    sort->lists[0] = sort->at;
    sort->lists[1] = sort->at + list;
    sort->counts = sort->at + lists * list;
    sort->totals = sort->counts + counts;
    sort->unsorted = sort->totals + digits;
    return FAN_OK;
}

static fan_status scatter_coo(const fan__launch_ctx *s, fan_k_scatter *a, const fan_array *into,
                              const fan_sparse *sp, fan_error *err)
{
    const uint64_t values = a->values;
    const uint64_t indices = a->coo.indices;
    const uint64_t entries = (uint64_t)a->entries;
    const uint64_t most = (uint64_t)s->part->cuda->most_entries;
    const uint64_t most_rows = (uint64_t)s->part->cuda->most_rows;
    size_t size = fan_dtype_size(sp->values->dtype);
    fan_status status = FAN_OK;
    uint64_t rows = 1;
    int64_t threads;
    for (int i = 0; i < a->coo.sparse; i++)
        rows *= (uint64_t)into->shape[i];
    a->entry = (fan_k_entry){.came_size = 4, .value_step = sp->values->strides[0]};
    bool carried = size <= 4 && sp->values->size == sp->values->shape[0];
    if (carried && !fan__is_anywhere(sp->values)) {
        a->entry.came_size = (int32_t)size;
        a->entry.values = values;
    }
    fan_cu_function kernel = scatter_kernel(s, a, into, sp->values, &threads);
    scatter_sort sort = {.entries = (int64_t)scatter_least(entries, most)};
    uint64_t rows_at_once = scatter_least(rows, most_rows);
    FAN_TRY(scatter_sort_begin(s, &sort, scatter_bits(rows_at_once), err));
    for (uint64_t first = 0; first < rows; first += most_rows)
        for (uint64_t done = 0; done < entries; done += most) {
            a->coo.first_row = first;
            a->coo.nrows = (uint32_t)scatter_least(rows - first, most_rows);
            a->coo.indices = indices + done * (uint64_t)a->coo.index_step;
            a->values = values + done * (uint64_t)a->value_step;
            a->entries = (int64_t)scatter_least(entries - done, most);
            a->unsorted = 0;
            if (a->entries > 1) {
                if (a->entry.values)
                    a->entry.values = a->values;
                FAN_GO(scatter_sort_run(s, &sort, a, err));
                a->unsorted = sort.unsorted;
                if (FAN_FAULT(CUDA_EARLY_SORT)) {
                    fan__cuda_scratch_free(s->stream, sort.at);
                    sort.at = 0;
                }
            }
            a->lanes = a->entries;
            FAN_GO(fan__launch_threads(s, kernel, a->entries * threads, a, err));
        }
done:
    if (sort.at)
        fan__cuda_scratch_free(s->stream, sort.at);
    return status;
}

/* scatter_put_coo, scatter_put_rows: write the words of a format; return where the next ones go. */
static int64_t *scatter_put_coo(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    const fan_array *indices = sp->indices;
    a->coo.indices = fan__address_of(indices);
    a->coo.sparse = (int32_t)indices->shape[0];
    a->coo.index_size = (int32_t)fan_dtype_size(indices->dtype);
    a->coo.index_row = indices->strides[0];
    a->coo.index_step = indices->strides[1];
    memcpy(a->words, into->shape, (size_t)a->coo.sparse * sizeof *a->words);
    memcpy(a->words + a->coo.sparse, into->strides, (size_t)a->coo.sparse * sizeof *a->words);
    return a->words + 2 * a->coo.sparse;
}

static int64_t *scatter_put_rows(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    bool blocked = sp->format == FAN_FORMAT_BSR || sp->format == FAN_FORMAT_BSC;
    int axis = sp->format == FAN_FORMAT_CSC || sp->format == FAN_FORMAT_BSC;
    int64_t unit[2] = {1, 1};
    if (blocked)
        memcpy(unit, sp->values->shape + 1, sizeof unit);
    a->indices = fan__address_of(sp->indices);
    a->index_size = (int32_t)fan_dtype_size(sp->indices->dtype);
    a->index_step = sp->indices->strides[0];
    a->pointers = fan__address_of(sp->pointers);
    a->pointer_size = (int32_t)fan_dtype_size(sp->pointers->dtype);
    a->pointer_step = sp->pointers->strides[0];
    a->lanes = sp->pointers->shape[0] - 1;
    a->words[0] = unit[!axis] ? into->shape[!axis] / unit[!axis] : 0;
    a->words[1] = unit[axis] * into->strides[axis];
    a->words[2] = unit[!axis] * into->strides[!axis];
    return a->words + 3;
}

fan_status fan__cuda_scatter(const fan__launch_ctx *s, const fan_array *into, const fan_sparse *sp,
                             fan_error *err)
{
    fan_k_scatter a;
    const fan_array *values = sp->values;
    bool coo = sp->format == FAN_FORMAT_COO;
    if (values->size == 0)
        return FAN_OK;
    memset(&a, 0, sizeof a);
    a.into = fan__address_of(into);
    a.values = fan__address_of(values);
    a.entries = values->shape[0];
    a.inside = values->size / values->shape[0];
    a.value_step = values->strides[0];
    a.into_dtype = (int32_t)into->dtype;
    a.value_dtype = (int32_t)values->dtype;
    a.anywhere = fan__is_anywhere(into) || fan__is_anywhere(values);
    if (fan__is_anywhere(sp->indices) || (sp->pointers && fan__is_anywhere(sp->pointers)))
        return fan_fail(err, FAN_ERR_VALUE,
                        "the indices of a sparse gradient on cuda:%d are not aligned to their size",
                        s->part->index);
    int64_t *at;
    if (coo)
        at = scatter_put_coo(&a, into, sp);
    else
        at = scatter_put_rows(&a, into, sp);
    a.inner = values->ndim - 1;
    int first = into->ndim - a.inner; /* 0 for blocks */
    if (2 * a.coo.sparse + 3 * (int64_t)a.inner + 3 > (int64_t)(sizeof a.words / sizeof *a.words))
        return fan_fail(err, FAN_ERR_VALUE,
                        "a sparse gradient of %d axes has too many axes for cuda:%d", into->ndim,
                        s->part->index);
    memcpy(at, values->shape + 1, (size_t)a.inner * sizeof *at);
    memcpy(at + a.inner, into->strides + first, (size_t)a.inner * sizeof *at);
    memcpy(at + 2 * a.inner, values->strides + 1, (size_t)a.inner * sizeof *at);
    if (coo)
        return scatter_coo(s, &a, into, sp, err);
    return fan__launch_threads(s, s->part->scatter, a.lanes * a.inside, &a, err);
}
