/* fold_dense: dense sums: of the terms of a fold, and of plain entries (plain.h). */
#include "array/sum.h"
#include "base/fault.h"
#include "buffer/fold_job.h"
#include "buffer/plain.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <string.h>

/* Of terms, from which on other threads may run while they are summed */
#define PLAIN_RELEASE_BYTES (UINT64_C(256) << 10)

/* The terms `in`, summed into fresh memory in the dtype `last`: wider than the dtype of the last
 * term, because a symbolic zero came after it, or because the scale needs it. */
static fan_status dense_widen(fan_fold *fold, const fan_operand *in, fan_dtype last,
                              fan_array **wide, fan_error *err)
{
    const fan_array *like = in[0].array;
    FAN_TRY(fan_device_array(fan_fold_device(fold), fan_fold_accum(fold), last, like->ndim,
                             like->shape, like, wide, err));
    fan_job job = {
        .kind = FAN_JOB_SUM,
        .out = *wide,
        .in = in,
        .n = fold->n,
        .label = "widen",
    };
    return fan_fold_job_to_fresh(fold, &job, err);
}

/* A dense sum while it is made. All that it holds is dropped by dense_end. */
typedef struct dense_sum {
    fan_operand *in;
    size_t compact;   /* operands that were made for the sum: compact bases (A13) */
    fan_array *out;   /* what the job writes */
    fan_array *shown; /* .. as the sum shows it, where it stays expanded (A13) */
    fan_value kept;   /* the term whose memory `out` is */
    fan_array *wide;  /* the sum before its last step, where that is one of its own */
    fan_dtype last;
    fan_int_run ints; /* D5: the Python ints and bools at the beginning */
    bool all_ints;
} dense_sum;

static void dense_end(const fan_fold *fold, dense_sum *sum)
{
    for (size_t i = 0; i < sum->compact; i++)
        fan_array_drop((fan_array *)sum->in[i].array);
    fan_value_drop(fold->b->frontend, &sum->kept);
    fan_array_drop(sum->wide);
    fan_array_drop(sum->out);
    fan_array_drop(sum->shown);
}

/* D5: a sum of Python ints that leaves its dtype is none. */
static fan_status dense_check_ints(const fan_fold *fold, dense_sum *sum, fan_error *err)
{
    const fan_term *terms = fold->terms;
    size_t n = 0;
    while (n < fold->n && fan_int_run_add(&sum->ints, terms[n].v, terms[n].number))
        n++;
    if (n == 0)
        return FAN_OK;
    sum->all_ints = n == fold->n;
    const fan_value *next = terms[n].v;
    if (sum->all_ints)
        next = NULL;
    fan_dtype dtype = fan_dtype_set_promote(terms[n - 1].seen);
    if (sum->all_ints)
        dtype = fan_fold_dtype(fold);
    if (!fan_int_run_leaves(&sum->ints, next, fan_fold_scale(fold), dtype))
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_OVERFLOW, 0, fan_slot_place(fold->b, fold->slot, -1),
                       "the sum of its Python ints does not fit %s; add floats, or object "
                       "arrays, whose + has no limit",
                       fan_dtype_name(dtype));
}

/* The operands. A13: each one's compact base, along the axes that stay expanded. */
static fan_status dense_operands(fan_fold *fold, dense_sum *sum, fan_error *err)
{
    fan_operand *in = sum->in;
    for (size_t i = 0; i < fold->n; i++) {
        in[i].array = fold->terms[i].v->array;
        in[i].acc = fan_fold_accumulated(fold, fold->terms[i].seen);
        in[i].weight = fold->terms[i].weight;
    }
    if (fold->n == 1 && !in[0].weight.on) /* a product is one of the accumulation dtype (W1) */
        in[0].acc = sum->last;
    if (!fold->plan.expanded)
        return FAN_OK;
    for (; sum->compact < fold->n; sum->compact++) {
        fan_operand *one = &in[sum->compact];
        fan_array *base = NULL;
        FAN_TRY(fan_array_compact(one->array, fold->plan.expanded, &base, err));
        one->array = base;
    }
    return FAN_OK;
}

/* Where the sum is written. */
static fan_status dense_place(fan_fold *fold, dense_sum *sum, fan_error *err)
{
    const fan_array *first = sum->in[0].array;
    const fan_array *full = fold->terms[0].v->array;
    switch (fold->plan.action) {
    case FAN_ACTION_OUT:
        sum->out = fan_array_hold(fold->out->array);
        return FAN_OK;
    case FAN_ACTION_INTO_OLD:
        FAN_TRY(fan_fold_keep_term(fold, 0, &sum->kept, err));
        sum->out = fan_array_hold((fan_array *)first);
        return FAN_OK;
    default:
        FAN_TRY(fan_fold_fresh(fold, fold->plan.dtype, first->ndim, first->shape, first, &sum->out,
                               err));
        if (!fold->plan.expanded)
            return FAN_OK;
        return fan_array_broadcast(sum->out, full->ndim, full->shape, &sum->shown, err);
    }
}

/* The job, or, where the sum ends in a wider dtype, two. */
static fan_status dense_run(fan_fold *fold, dense_sum *sum, fan_error *err)
{
    const fan_scale *scale = fan_fold_scale(fold);
    fan_sum_stats *figures = &fold->sum_stats;
    fan_stats_out stats_out = {.words = figures->device_words,
                               .before = fan_fold_slot(fold)->state->sum_stats.device_words,
                               .keys = fold->keys};
    fan_job job = {.kind = FAN_JOB_SUM,
                   .out = sum->out,
                   .in = sum->in,
                   .n = fold->n,
                   .scale = scale,
                   .first_suspect = fan_fold_first_suspect(fold),
                   .label = fold->n > 1 ? "sum" : "finish"};
    fan_operand whole;
    bool wider = sum->in[fold->n - 1].acc != sum->last;
    if (wider && (scale || sum->out->dtype != sum->last)) {
        /* its statistics are read from the result, with the terms for the first that is not
         * finite */
        FAN_TRY(dense_widen(fold, sum->in, sum->last, &sum->wide, err));
        whole = (fan_operand){.array = sum->wide, .acc = sum->last};
        job.in = &whole;
        job.n = 1;
    } else if (fold->b->sum_stats) {
        if (!fan_fold_device(fold)->backend->has_streams)
            job.stats = &figures->stats;
        if (figures->device_words)
            job.stats_out = &stats_out;
    }
    if (fold->plan.action == FAN_ACTION_FRESH)
        FAN_TRY(fan_fold_job_to_fresh(fold, &job, err));
    else
        FAN_TRY(fan_fold_job(fold, &job, err));
    if (!job.stats && !job.stats_out)
        return FAN_OK;
    figures->valid = true;
    if (fold->plan.expanded && sum->out->size) /* each element repeats along an axis */
        figures->multiplicity = (uint64_t)(fold->terms[0].v->array->size / sum->out->size);
    return FAN_OK;
}

/* The fold's result. */
static fan_status dense_result(fan_fold *fold, dense_sum *sum, fan_error *err)
{
    switch (fold->plan.action) {
    case FAN_ACTION_OUT:
        FAN_TRY(fan_value_copy(fold->b->frontend, fold->out, &fold->result, err));
        break;
    case FAN_ACTION_INTO_OLD:
        FAN_COUNT(fold->b, in_place, fold->n - 1);
        fold->result = sum->kept;
        sum->kept = fan_value_none();
        break;
    default: {
        fan_array *shown = sum->out;
        if (sum->shown)
            shown = sum->shown;
        fan_fold_made(fold, shown);
    }
    }
    fold->result.weak = sum->all_ints;
    if (sum->all_ints)
        fold->int_sum = (int64_t)sum->ints.sum;
    return FAN_OK;
}

/* Order: what may fail without a trace; what the sum waits for (S12, S13, S22, *Reusable*); the
 * sum. */
static fan_status dense_make(fan_fold *fold, dense_sum *sum, fan_error *err)
{
    FAN_TRY(dense_check_ints(fold, sum, err));
    FAN_TRY(dense_operands(fold, sum, err));
    FAN_TRY(dense_place(fold, sum, err));
    if (!FAN_FAULT(WAIT_AFTER_SUM))
        FAN_TRY(fan_order_wait_terms(fold, err));
    if (fold->plan.exclusive)
        FAN_TRY(fan_order_wait_users(fold, sum->out, err));
    FAN_TRY(fan_order_wait_taker(fold, fan_fold_accum(fold), &fold->plan.after, err));
    FAN_TRY(dense_run(fold, sum, err));
    if (FAN_FAULT(WAIT_AFTER_SUM))
        FAN_TRY(fan_order_wait_terms(fold, err));
    return dense_result(fold, sum, err);
}

fan_status fan_fold_dense(fan_fold *fold, fan_error *err)
{
    dense_sum sum = {.in = fold->scratch, .last = fan_fold_last(fold), .kept = fan_value_none()};
    fan_status status = dense_make(fold, &sum, err);
    dense_end(fold, &sum);
    return status;
}

/* ---- of plain entries ---- */

bool fan_plain_fits(fan_dtype dtype, fan_dtype acc, uint64_t bytes)
{
    return !fan_plain_is_large(bytes) && fan_sum_flat_fits(dtype, acc);
}

/* An array over an entry, or, `gaps` false, over gap-free memory of its size, for a sum alone. */
static void plain_array(fan_array *a, const fan_plain_kind *k, size_t count, const char *data,
                        bool gaps)
{
    int64_t unit = (int64_t)fan_dtype_size(k->dtype);
    int64_t pitch = fan_plain_pitch(k);
    memset(a, 0, sizeof *a);
    a->data = (char *)data;
    a->dtype = k->dtype;
    a->ndim = 1;
    if (pitch)
        a->ndim = 2;
    a->shape = a->dims;
    a->strides = a->dims + a->ndim;
    a->size = (int64_t)count;
    a->dims[0] = (int64_t)count;
    a->strides[a->ndim - 1] = unit;
    if (pitch) {
        fan_plain_rows(k, &a->dims[0], &a->dims[1]);
        a->strides[0] = unit * (gaps ? pitch : a->dims[1]);
    }
}

/* The runs as arrays, one more of them than n: for several threads, or for statistics. */
static void plain_sum_arrays(const fan_plain_kind *k, size_t count, const char *const *src,
                             size_t n, fan_dtype acc, const fan_scale *scale, char *out,
                             fan_array *arrays, fan_operand *in, fan_stats *stats)
{
    for (size_t i = 0; i < n; i++) {
        plain_array(&arrays[i], k, count, src[i], true);
        in[i] = (fan_operand){.array = &arrays[i], .acc = acc};
    }
    bool is_there = n == 1 && !scale && out == src[0];
    if (stats && is_there) {
        fan_stats_of(&arrays[0], stats);
        return;
    }
    plain_array(&arrays[n], k, count, out, false);
    fan_sum_options options = {.stats = stats, .parallel = !stats};
    if (scale)
        options.scale = *scale;
    fan_sum(&arrays[n], in, n, &options);
}

/* The same of up to FAN_PLAIN_TERMS runs. Apart, because its frame is large. */
static __attribute__((noinline)) void plain_sum_few_arrays(const fan_plain_kind *k, size_t count,
                                                           const char *const *src, size_t n,
                                                           fan_dtype acc, const fan_scale *scale,
                                                           char *out, fan_stats *stats)
{
    FAN_UNINITIALIZED fan_array arrays[FAN_PLAIN_TERMS + 1];
    FAN_UNINITIALIZED fan_operand in[FAN_PLAIN_TERMS];
    plain_sum_arrays(k, count, src, n, acc, scale, out, arrays, in, stats);
}

/* plain_sum_runs: of up to FAN_PLAIN_TERMS runs. */
static inline __attribute__((always_inline)) void plain_sum_runs(const fan_plain_kind *k,
                                                                 const char *const *src, size_t n,
                                                                 fan_dtype acc,
                                                                 const fan_scale *scale, char *out,
                                                                 fan_stats *stats)
{
    _Alignas(16) char factor[16];
    size_t count = fan_plain_elements(k);
    size_t bytes = count * fan_dtype_size(k->dtype);
    if (stats || fan_plain_pitch(k) || !fan_plain_is_flat(bytes, n)) {
        plain_sum_few_arrays(k, count, src, n, acc, scale, out, stats);
    } else if (scale) {
        fan_scale_as(scale, acc, factor);
        (void)fan_sum_flat(out, src, n, count, k->dtype, acc, factor);
    } else if (n == 1) {
        memmove(out, src[0], bytes);
    } else {
        (void)fan_sum_flat(out, src, n, count, k->dtype, acc, NULL);
    }
}

/* All runs at once: a sum of many that is not in the dtype of the list has no other place between
 * them, and of the statistics of a part the first term that is not finite could not be found. */
static void plain_sum_whole(const fan_list *list, size_t n, fan_dtype acc, const fan_scale *scale,
                            char *out, void *scratch, fan_stats *stats)
{
    const fan_plain_kind *kind = &list->kind;
    fan_array *arrays = scratch;
    fan_operand *in = (fan_operand *)(void *)(arrays + n + 1);
    const char **src = (const char **)(void *)(in + n);
    for (size_t i = 0; i < n; i++)
        src[i] = fan_entry_data(kind, &list->entries[i]);
    plain_sum_arrays(kind, fan_plain_elements(kind), src, n, acc, scale, out, arrays, in, stats);
}

/* left: what allow_threads_begin returned; NULL: it was not called. */
static void plain_sum_end(const fan_buffer *b, void *left)
{
    if (!left)
        return;
    b->frontend->allow_threads_end(left);
    if (fan_sched_active()) { /* other threads may have come in meanwhile: so they do */
        fan_sched_stepped();
        fan_yield();
        fan_buffer_seen(b, SIZE_MAX, FAN_SCHED_WRITE);
    }
}

/* The runs from `done` on, beginning with the numbers at `start`, which are of the wider dtype. */
static void plain_sum_wide(const fan_list *list, size_t done, size_t n, fan_dtype acc,
                           const char *start, char *out)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    const fan_plain_kind *kind = &list->kind;
    while (done < n) {
        size_t m = 0;
        for (; m < FAN_PLAIN_TERMS && done < n; done++)
            src[m++] = list->entries[done].data;
        (void)fan_sum_flat_from(out, start, src, m, fan_plain_elements(kind), kind->dtype, acc,
                                NULL, true);
        start = out;
    }
}

void fan_plain_fold_wide(fan_buffer *b, const fan_list *list, size_t n, fan_dtype acc, char *out)
{
    const fan_entry *first = &list->entries[0];
    bool wide = first->wide;
    void *left = fan_frontend_leave(b->frontend, n * list->bytes > PLAIN_RELEASE_BYTES);
    plain_sum_wide(list, wide, n, acc, wide ? first->data : NULL, out);
    plain_sum_end(b, left);
}

/* Rounds a sum that is wider already into `out`. The entries after it are added where it is, but
 * for the last runs. */
static void plain_round_wide(const fan_list *list, size_t n, fan_dtype acc, const fan_scale *scale,
                             char *out)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    _Alignas(16) char factor[16];
    const fan_plain_kind *kind = &list->kind;
    char *sum = list->entries[0].data;
    size_t m = 0;
    size_t last = 1;
    if (n > FAN_PLAIN_TERMS)
        last = n - FAN_PLAIN_TERMS;
    plain_sum_wide(list, 1, last, acc, sum, sum);
    for (size_t k = last; k < n; k++)
        src[m++] = list->entries[k].data;
    if (scale)
        fan_scale_as(scale, acc, factor);
    (void)fan_sum_flat_from(out, sum, src, m, fan_plain_elements(kind), kind->dtype, acc,
                            scale ? factor : NULL, false);
}

/* FAN_PLAIN_TERMS at a time: the sum so far is the first of the next. */
static inline __attribute__((always_inline)) void plain_sum_parts(const fan_list *list, size_t n,
                                                                  fan_dtype acc,
                                                                  const fan_scale *scale, char *out,
                                                                  fan_stats *stats)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    size_t done = 0;
    while (done < n) {
        size_t m = 0;
        if (done)
            src[m++] = out;
        for (; m < FAN_PLAIN_TERMS && done < n; done++)
            src[m++] = fan_entry_data(&list->kind, &list->entries[done]);
        plain_sum_runs(&list->kind, src, m, acc, done == n ? scale : NULL, out, stats);
    }
}

void fan_plain_fold(fan_buffer *b, const fan_list *list, size_t n, fan_dtype acc,
                    const fan_scale *scale, char *out, void *scratch, fan_stats *stats)
{
    uint64_t bytes = list->bytes;
    bool busy = bytes > FAN_PLAIN_BYTES || n * bytes > PLAIN_RELEASE_BYTES;
    void *left = fan_frontend_leave(b->frontend, busy);
    if (list->entries[0].wide)
        plain_round_wide(list, n, acc, scale, out);
    else if (fan_plain_scratch(list, n, acc, stats))
        plain_sum_whole(list, n, acc, scale, out, scratch, stats);
    else
        plain_sum_parts(list, n, acc, scale, out, stats);
    plain_sum_end(b, left);
}

void fan_plain_fold_weighted(fan_buffer *b, size_t slot, size_t n, const char *divisor,
                             const fan_scale *scale, char *out)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    FAN_UNINITIALIZED fan_weight weights[FAN_PLAIN_TERMS];
    FAN_UNINITIALIZED _Alignas(8) char numbers[8 * FAN_PLAIN_TERMS];
    static const fan_weight none = {.on = true, .re = 1};
    _Alignas(16) char factor[16];
    fan_slot *s = &b->slots[slot];
    const fan_list *list = s->list;
    fan_dtype acc = fan_plain_accum(b, slot);
    size_t size = fan_weight_size(acc);
    bool weighted = fan_slot_weighted(s);
    if (weighted)
        fan_weights_of(s, list->entries, n, weights);
    for (size_t i = 0; i < n; i++) {
        src[i] = list->entries[i].data;
        if (weighted)
            fan_weight_as(weights[i].on ? &weights[i] : &none, acc, numbers + i * size);
    }
    fan_dtype from = list->kind.dtype;
    size_t elements = fan_plain_elements(&list->kind);
    const char *by = NULL;
    const char *times = NULL;
    if (weighted)
        by = numbers;
    if (scale) {
        fan_scale_as(scale, acc, factor);
        times = factor;
    }
    if (list->entries[0].wide) {
        /* the result takes the place of the sum, and is rounded from there */
        char *sum = list->entries[0].data;
        (void)fan_sum_flat_weighted(sum, src, 1, elements, acc, acc, NULL, divisor, times);
        plain_round_wide(list, n, acc, NULL, out);
    } else {
        (void)fan_sum_flat_weighted(out, src, n, elements, from, acc, by, divisor, times);
    }
}

void fan_plain_sum(const fan_frontend *frontend, const fan_plain_kind *kind, const char *const *src,
                   size_t n, const fan_scale *scale, char *out)
{
    fan_counter_store *counters = &fan_counters_of_sums;
    uint64_t bytes = fan_plain_kind_bytes(kind);
    void *left = fan_frontend_leave(frontend, bytes > FAN_PLAIN_BYTES);
    plain_sum_runs(kind, src, n, fan_accum_dtype(kind->dtype, FAN_DT_NONE), scale, out, NULL);
    fan_frontend_return(frontend, left);
    fan_counter_add(&counters->adds, n);
    fan_counter_add(&counters->folds, 1);
    fan_counter_add(&counters->passes, 1);
    fan_counter_add(&counters->bytes_read, n * bytes);
    fan_counter_add(&counters->bytes_written, bytes);
}
