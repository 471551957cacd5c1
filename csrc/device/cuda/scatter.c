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
    uint64_t lists[2];
    uint64_t counts;
    uint64_t totals;
    uint64_t unsorted;
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

/* scatter_split_rows: sets how a row of `bits` bits is split: its first bits, and the rest. */
static void scatter_split_rows(fan_k_entry *form, int bits, int first)
{
    int rest = bits - first;
    form->low_bits = first;
    form->low_size = first > 8 ? 2 : 1;
    form->high_size = rest > 8 ? 2 : rest > 0;
    if (rest > 16) {
        form->low_size = 4;
        form->high_size = 0;
    }
}

/* scatter_sort_args: sets the arguments of all passes over the entries of `of`. */
static void scatter_sort_args(const scatter_sort *sort, const fan_k_scatter *of, fan_k_sort *a)
{
    memset(a, 0, sizeof *a);
    a->coo = of->coo;
    a->entry = of->entry;
    a->counts = sort->counts;
    a->totals = sort->totals;
    a->unsorted = sort->unsorted;
    a->entries = of->entries;
    a->tiles = scatter_tiles(of->entries);
    memcpy(a->words, of->words, (size_t)of->coo.sparse * sizeof *a->words);
}

static fan_status scatter_sort_pass(const fan__launch_ctx *s, fan_k_sort *a, fan_error *err)
{
    const fan_cuda_part *p = s->part;
    FAN_TRY(fan__launch_blocks(s, p->sort_count, a->tiles, a, err));
    if (a->tiles > 1)
        FAN_TRY(fan__launch_blocks(s, p->sort_scan, (int64_t)1 << a->bits, a, err));
    return fan__launch_blocks(s, p->sort_move, a->tiles, a, err);
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
    scatter_split_rows(&of->entry, bits, (bits + sort->passes - 1) / sort->passes);
    scatter_sort_args(sort, of, &a);
    FAN_TRY(fan__cuda_fill_zero(s, sort->unsorted, 4, err));
    for (int pass = 0; pass < passes; pass++) {
        int left = sort->passes - pass;
        a.bits = (bits - a.shift + left - 1) / left;
        a.out = scatter_list_at(sort->lists[pass & 1], sort->entries, &a.entry);
        FAN_TRY(scatter_sort_pass(&quiet, &a, err));
        a.coo.indices = 0;
        a.list = a.out;
        a.shift += a.bits;
    }
    of->list = a.list;
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

/* A scatter of COO data. */
typedef struct scatter_list {
    fan_k_scatter *args;
    const fan_array *into;
    const fan_array *values;
    fan_cu_function kernel;
    int64_t threads; /* of the kernel, for each entry */
    scatter_sort sort;
} scatter_list;

/* scatter_set_kernel: selects the kernel for these dtypes, if the entries' layout fits; adapts the
 * arguments to it. */
static void scatter_set_kernel(const fan__launch_ctx *s, scatter_list *list)
{
    fan_k_scatter *a = list->args;
    const fan_array *into = list->into;
    const fan_array *values = list->values;
    size_t which = fan__scatter_for(into->dtype, values->dtype);
    list->kernel = s->part->scatter;
    list->threads = a->inside;
    if (a->anywhere || which == FAN__FOLDS)
        return;
    if (!scatter_dense(into, a->coo.sparse) || !scatter_dense(values, 1))
        return;
    int64_t bytes = a->inside * (int64_t)fan_dtype_size(values->dtype);
    uint64_t low = a->into | a->values | (uint64_t)a->value_step | (uint64_t)bytes;
    for (int i = 0; i < a->coo.sparse; i++)
        low |= (uint64_t)into->strides[i];
    a->aligned = (low & 15) == 0;
    a->wide = into->dtype != values->dtype;
    a->inside = bytes / fan__folds[which].bytes;
    list->kernel = s->part->fold_scatter[which];
    list->threads = a->inside;
    if (a->aligned)
        list->threads = bytes / 16;
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
    uint64_t lists = list;
    if (sort->passes > 1)
        lists += list;
    FAN_TRY(fan__cuda_scratch(s->stream, (size_t)(lists + counts + digits + 4), &sort->at, err));
    sort->lists[0] = sort->at;
    sort->lists[1] = sort->at + list;
    sort->counts = sort->at + lists;
    sort->totals = sort->counts + counts;
    sort->unsorted = sort->totals + digits;
    return FAN_OK;
}

static void scatter_sort_end(const fan__launch_ctx *s, scatter_sort *sort)
{
    if (sort->at)
        fan__cuda_scratch_free(s->stream, sort->at);
    sort->at = 0;
}

/* scatter_some: sorts the entries of the arguments, if there are several, and adds them. */
static fan_status scatter_some(const fan__launch_ctx *s, scatter_list *list, fan_error *err)
{
    fan_k_scatter *a = list->args;
    a->unsorted = 0;
    if (a->entries > 1) {
        if (a->entry.values)
            a->entry.values = a->values;
        FAN_TRY(scatter_sort_run(s, &list->sort, a, err));
        a->unsorted = list->sort.unsorted;
        if (FAN_FAULT(CUDA_EARLY_SORT))
            scatter_sort_end(s, &list->sort);
    }
    a->lanes = a->entries;
    return fan__launch_threads(s, list->kernel, a->entries * list->threads, a, err);
}

/* scatter_rows: adds the entries whose rows the arguments name, some at a time. */
static fan_status scatter_rows(const fan__launch_ctx *s, scatter_list *list, fan_error *err)
{
    fan_k_scatter *a = list->args;
    const fan_k_scatter all = {
        .values = a->values,
        .entries = a->entries,
        .coo = a->coo,
    };
    int64_t most = s->part->cuda->most_entries;
    fan_status status = FAN_OK;
    for (int64_t done = 0; done < all.entries && status == FAN_OK; done += most) {
        a->coo.indices = all.coo.indices + (uint64_t)(done * a->coo.index_step);
        a->values = all.values + (uint64_t)(done * a->value_step);
        a->entries = all.entries - done;
        if (a->entries > most)
            a->entries = most;
        status = scatter_some(s, list, err);
    }
    a->coo = all.coo;
    a->values = all.values;
    a->entries = all.entries;
    return status;
}

static fan_status scatter_coo(const fan__launch_ctx *s, scatter_list *list, fan_error *err)
{
    fan_k_scatter *a = list->args;
    const fan_array *values = list->values;
    const fan_cuda *cuda = s->part->cuda;
    uint64_t most_rows = (uint64_t)cuda->most_rows;
    size_t size = fan_dtype_size(values->dtype);
    fan_status status = FAN_OK;
    uint64_t rows = 1;
    for (int i = 0; i < a->coo.sparse; i++)
        rows *= (uint64_t)list->into->shape[i];
    a->entry.came_size = 4;
    a->entry.value_step = values->strides[0];
    bool carried = size <= 4 && values->size == values->shape[0];
    if (carried && !fan__is_anywhere(values)) {
        a->entry.came_size = (int32_t)size;
        a->entry.values = a->values;
    }
    scatter_set_kernel(s, list);
    list->sort.entries = a->entries;
    if (a->entries > cuda->most_entries)
        list->sort.entries = cuda->most_entries;
    int bits = scatter_bits(scatter_least(rows, most_rows));
    FAN_TRY(scatter_sort_begin(s, &list->sort, bits, err));
    for (uint64_t first = 0; first < rows && status == FAN_OK; first += most_rows) {
        a->coo.first_row = first;
        a->coo.nrows = (uint32_t)scatter_least(rows - first, most_rows);
        status = scatter_rows(s, list, err);
    }
    scatter_sort_end(s, &list->sort);
    return status;
}

/* scatter_put_coo, scatter_put_rows: write the words of a format; return where the next ones go. */
static int64_t *scatter_put_coo(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    const fan_array *indices = sp->indices;
    fan_k_coo *coo = &a->coo;
    coo->indices = fan__address_of(indices);
    coo->sparse = (int32_t)indices->shape[0];
    coo->index_size = (int32_t)fan_dtype_size(indices->dtype);
    coo->index_row = indices->strides[0];
    coo->index_step = indices->strides[1];
    int64_t *at = fan__put_words(a->words, into->shape, coo->sparse);
    return fan__put_words(at, into->strides, coo->sparse);
}

static int64_t *scatter_put_rows(fan_k_scatter *a, const fan_array *into, const fan_sparse *sp)
{
    const fan_array *pointers = sp->pointers;
    bool blocked = sp->format == FAN_FORMAT_BSR || sp->format == FAN_FORMAT_BSC;
    int axis = sp->format == FAN_FORMAT_CSC || sp->format == FAN_FORMAT_BSC;
    int other = !axis;
    int64_t unit[2] = {1, 1};
    if (blocked)
        memcpy(unit, sp->values->shape + 1, sizeof unit);
    a->indices = fan__address_of(sp->indices);
    a->index_size = (int32_t)fan_dtype_size(sp->indices->dtype);
    a->index_step = sp->indices->strides[0];
    a->pointers = fan__address_of(pointers);
    a->pointer_size = (int32_t)fan_dtype_size(pointers->dtype);
    a->pointer_step = pointers->strides[0];
    a->lanes = pointers->shape[0] - 1;
    a->words[0] = 0;
    if (unit[other])
        a->words[0] = into->shape[other] / unit[other];
    a->words[1] = unit[axis] * into->strides[axis];
    a->words[2] = unit[other] * into->strides[other];
    return a->words + 3;
}

/* scatter_args: sets the arguments that all formats have. */
static void scatter_args(fan_k_scatter *a, const fan_array *into, const fan_array *values)
{
    memset(a, 0, sizeof *a);
    a->into = fan__address_of(into);
    a->values = fan__address_of(values);
    a->entries = values->shape[0];
    a->inside = values->size / values->shape[0];
    a->value_step = values->strides[0];
    a->into_dtype = (int32_t)into->dtype;
    a->value_dtype = (int32_t)values->dtype;
    a->anywhere = fan__is_anywhere(into) || fan__is_anywhere(values);
    a->inner = values->ndim - 1;
}

fan_status fan__cuda_scatter(const fan__launch_ctx *s, const fan_array *into, const fan_sparse *sp,
                             fan_error *err)
{
    fan_k_scatter a;
    const fan_array *values = sp->values;
    bool coo = sp->format == FAN_FORMAT_COO;
    if (values->size == 0)
        return FAN_OK;
    if (fan__is_anywhere(sp->indices) || (sp->pointers && fan__is_anywhere(sp->pointers))) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "the indices of a sparse gradient on cuda:%d are not aligned to their size",
                        s->part->index);
    }
    scatter_args(&a, into, values);
    int64_t *at;
    if (coo)
        at = scatter_put_coo(&a, into, sp);
    else
        at = scatter_put_rows(&a, into, sp);
    int words = 2 * a.coo.sparse + 3 * a.inner + 3;
    if (words > (int)(sizeof a.words / sizeof *a.words)) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "a sparse gradient of %d axes has too many axes for cuda:%d", into->ndim,
                        s->part->index);
    }
    int first = into->ndim - a.inner; /* 0 for blocks */
    at = fan__put_words(at, values->shape + 1, a.inner);
    at = fan__put_words(at, into->strides + first, a.inner);
    fan__put_words(at, values->strides + 1, a.inner);
    if (!coo)
        return fan__launch_threads(s, s->part->scatter, a.lanes * a.inside, &a, err);
    scatter_list list = {
        .args = &a,
        .into = into,
        .values = values,
    };
    return scatter_coo(s, &list, err);
}
