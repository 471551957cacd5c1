/* fold_dense: dense sums: of the terms of a fold, and of plain entries (plain.h). */
#include "array/sum.h"
#include "base/fault.h"
#include "buffer/fold_job.h"
#include "buffer/plain.h"
#include "buffer/order.h"
#include "buffer/stats.h"

#include <string.h>

/* Of terms, from which on other threads may run while they are summed */
#define PLAIN_RELEASE_BYTES (UINT64_C(256) << 10)

/* The terms `in`, summed into fresh memory in the dtype `last`: wider than the dtype of the last
 * term, because a symbolic zero came after it, or because the scale needs it. */
static fan_status dense_widen(fan_fold *f, const fan_operand *in, fan_dtype last, fan_array **wide,
                              fan_error *err)
{
    const fan_array *like = in[0].array;
    fan_stream *on = fan_fold_accum(f);
    FAN_TRY(
        fan_device_array(fan_fold_device(f), on, last, like->ndim, like->shape, like, wide, err));
    fan_job job = {.kind = FAN_JOB_SUM, .out = *wide, .in = in, .n = f->n, .label = "widen"};
    return fan_fold_job_to_fresh(f, &job, err);
}

fan_status fan_fold_dense(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    /* the sum before its last step, where that is one of its own */
    fan_array *wide = NULL;
    fan_array *out = NULL; /* what the job writes */
    /* .. as the sum shows it, where it stays expanded (A13) */
    fan_array *seen = NULL;
    fan_value kept = fan_value_none(); /* the term whose memory `out` is */
    /* operands that were made for the sum: compact bases */
    size_t compact = 0;
    const fan_array *full = f->terms[0].v->array;
    /* D5: a sum of Python ints that leaves its dtype is none. */
    const fan_scale *scale = fan_fold_scale(f);
    fan_int_run run = {.sum = 0};
    size_t n = 0;
    while (n < f->n && fan_int_run_add(&run, f->terms[n].v, f->terms[n].number))
        n++;
    bool ints = n == f->n;
    const fan_value *next = ints ? NULL : f->terms[n].v;
    fan_dtype d = ints ? fan_fold_dtype(f)
                  : n  ? fan_dtype_set_promote(f->terms[n - 1].seen)
                       : FAN_DT_NONE;
    if (n && fan_int_run_leaves(&run, next, scale, d))
        return fan_fail_at(err, FAN_ERR_OVERFLOW, 0, fan_slot_place(f->b, f->slot, -1),
                           "the sum of its Python ints does not fit %s; add floats, or object "
                           "arrays, whose + has no limit",
                           fan_dtype_name(d));
    /* A13: each operand's compact base, along the axes that stay expanded. */
    fan_operand *in = f->scratch;
    for (size_t i = 0; i < f->n; i++)
        in[i] = (fan_operand){f->terms[i].v->array, fan_fold_accumulated(f, f->terms[i].seen)};
    fan_dtype last = fan_fold_last(f);
    if (f->n == 1)
        in[0].acc = last;
    for (; f->plan.expanded && compact < f->n; compact++) {
        fan_array *c = NULL;
        FAN_GO(fan_array_compact(in[compact].array, f->plan.expanded, &c, err));
        in[compact].array = c;
    }
    switch (f->plan.action) {
    case FAN_ACTION_OUT:
        out = fan_array_hold(f->out->array);
        break;
    case FAN_ACTION_INTO_OLD:
        FAN_GO(fan_fold_keep_term(f, 0, &kept, err));
        out = fan_array_hold((fan_array *)in[0].array);
        break;
    default:
        FAN_GO(fan_fold_fresh(f, f->plan.dtype, in[0].array->ndim, in[0].array->shape, in[0].array,
                              &out, err));
        if (f->plan.expanded)
            FAN_GO(fan_array_broadcast(out, full->ndim, full->shape, &seen, err));
    }
    /* S12, S13, S22, *Reusable*: whatever the sum has to wait for. */
    if (!FAN_FAULT(WAIT_AFTER_SUM))
        FAN_GO(fan_order_wait_terms(f, err));
    if (f->plan.exclusive)
        FAN_GO(fan_order_wait_users(f, out, err));
    FAN_GO(fan_order_wait_taker(f, fan_fold_accum(f), &f->plan.after, err));
    fan_stats_out stats_out = {.words = f->sum_stats.device_words,
                               .before = fan_fold_slot(f)->state->sum_stats.device_words,
                               .keys = f->keys};
    fan_job job = {.kind = FAN_JOB_SUM,
                   .out = out,
                   .in = in,
                   .n = f->n,
                   .scale = scale,
                   .first_suspect = fan_fold_first_suspect(f),
                   .label = f->n > 1 ? "sum" : "finish"};
    fan_operand whole;
    bool wider = in[f->n - 1].acc != last && (scale || out->dtype != last);
    /* its statistics are read from the result, with the terms for the first that is not finite */
    if (wider) {
        FAN_GO(dense_widen(f, in, last, &wide, err));
        whole = (fan_operand){wide, last};
        job.in = &whole;
        job.n = 1;
    } else if (f->b->sum_stats) {
        job.stats = fan_fold_device(f)->backend->has_streams ? NULL : &f->sum_stats.stats;
        job.stats_out = f->sum_stats.device_words ? &stats_out : NULL;
    }
    FAN_GO(
        (f->plan.action == FAN_ACTION_FRESH ? fan_fold_job_to_fresh : fan_fold_job)(f, &job, err));
    bool measured = job.stats || job.stats_out;
    f->sum_stats.valid = f->sum_stats.valid || measured;
    if (measured && f->plan.expanded && out->size) /* each element stands for several */
        f->sum_stats.multiplicity = (uint64_t)(full->size / out->size);
    if (FAN_FAULT(WAIT_AFTER_SUM))
        FAN_GO(fan_order_wait_terms(f, err));
    if (f->plan.action == FAN_ACTION_OUT) {
        FAN_GO(fan_value_copy(f->b->frontend, f->out, &f->result, err));
    } else if (f->plan.action == FAN_ACTION_INTO_OLD) {
        FAN_COUNT(f->b, in_place, f->n - 1);
        f->result = kept;
        kept = fan_value_none();
    } else {
        f->result = fan_value_dense(fan_array_hold(seen ? seen : out), fan_fold_device(f));
        f->owned = true;
    }
    f->result.weak = ints;
    f->int_sum = ints ? (int64_t)run.sum : 0;
done:
    for (size_t i = 0; i < compact; i++)
        fan_array_drop((fan_array *)f->scratch[i].array);
    fan_value_drop(f->b->frontend, &kept);
    fan_array_drop(wide);
    fan_array_drop(out);
    fan_array_drop(seen);
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
    memset(a, 0, sizeof *a);
    a->data = (char *)data;
    a->dtype = k->dtype;
    a->ndim = fan_plain_pitch(k) ? 2 : 1;
    a->shape = a->dims;
    a->strides = a->dims + a->ndim;
    a->size = a->dims[0] = (int64_t)count;
    a->strides[a->ndim - 1] = unit;
    if (fan_plain_pitch(k)) {
        fan_plain_rows(k, &a->dims[0], &a->dims[1]);
        a->strides[0] = unit * (gaps ? fan_plain_pitch(k) : a->dims[1]);
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
    if (stats && n == 1 && !scale && out == src[0]) { /* it is handed through */
        fan_stats_of(&arrays[0], stats);
        return;
    }
    plain_array(&arrays[n], k, count, out, false);
    fan_sum_how how = {.stats = stats, .parallel = !stats};
    if (scale)
        how.scale = *scale;
    fan_sum(&arrays[n], in, n, &how);
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
    if (stats || fan_plain_pitch(k) || !fan_plain_is_flat(count * fan_dtype_size(k->dtype), n)) {
        plain_sum_few_arrays(k, count, src, n, acc, scale, out, stats);
    } else if (n == 1 && !scale) {
        memmove(out, src[0], count * fan_dtype_size(k->dtype));
    } else {
        if (scale)
            fan_scale_as(scale, acc, factor);
        (void)fan_sum_flat(out, src, n, count, k->dtype, acc, scale ? factor : NULL);
    }
}

/* All runs at once: a sum of many that is not in the dtype of the list has no other place between
 * them, and of the statistics of a part the first term that is not finite could not be found. */
static void plain_sum_whole(const fan_list *p, size_t n, fan_dtype acc, const fan_scale *scale,
                            char *out, void *scratch, fan_stats *stats)
{
    fan_array *arrays = scratch;
    fan_operand *in = (fan_operand *)(void *)(arrays + n + 1);
    const char **src = (const char **)(void *)(in + n);
    for (size_t i = 0; i < n; i++)
        src[i] = fan_entry_data(&p->kind, &p->entries[i]);
    plain_sum_arrays(&p->kind, fan_plain_elements(&p->kind), src, n, acc, scale, out, arrays, in,
                     stats);
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
static void plain_sum_wide(const fan_list *p, size_t done, size_t n, fan_dtype acc,
                           const char *start, char *out)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    for (; done < n; start = out) {
        size_t m = 0;
        for (; m < FAN_PLAIN_TERMS && done < n; done++)
            src[m++] = p->entries[done].data;
        (void)fan_sum_flat_from(out, start, src, m, fan_plain_elements(&p->kind), p->kind.dtype,
                                acc, NULL, true);
    }
}

void fan_plain_fold_wide(fan_buffer *b, const fan_list *p, size_t n, fan_dtype acc, char *out)
{
    bool wide = p->entries[0].wide, release_gil = n * p->bytes > PLAIN_RELEASE_BYTES;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    plain_sum_wide(p, wide, n, acc, wide ? p->entries[0].data : NULL, out);
    plain_sum_end(b, left);
}

/* A sum that is wider already, rounded into `out`. What follows it is added where it is, but for
 * the last runs. */
static void plain_round_wide(const fan_list *p, size_t n, fan_dtype acc, const fan_scale *scale,
                             char *out)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    _Alignas(16) char factor[16];
    size_t m = 0, last = n > FAN_PLAIN_TERMS ? n - FAN_PLAIN_TERMS : 1;
    plain_sum_wide(p, 1, last, acc, p->entries[0].data, p->entries[0].data);
    for (size_t k = last; k < n; k++)
        src[m++] = p->entries[k].data;
    if (scale)
        fan_scale_as(scale, acc, factor);
    (void)fan_sum_flat_from(out, p->entries[0].data, src, m, fan_plain_elements(&p->kind),
                            p->kind.dtype, acc, scale ? factor : NULL, false);
}

void fan_plain_fold(fan_buffer *b, const fan_list *p, size_t n, fan_dtype acc,
                    const fan_scale *scale, char *out, void *scratch, fan_stats *stats)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    bool whole = fan_plain_scratch(p, n, acc, stats);
    bool release_gil = p->bytes > FAN_PLAIN_BYTES || n * p->bytes > PLAIN_RELEASE_BYTES;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    if (p->entries[0].wide)
        plain_round_wide(p, n, acc, scale, out);
    else if (whole)
        plain_sum_whole(p, n, acc, scale, out, scratch, stats);
    for (size_t done = whole || p->entries[0].wide ? n : 0; done < n;) {
        size_t m = 0;
        if (done)
            src[m++] = out;
        for (; m < FAN_PLAIN_TERMS && done < n; done++)
            src[m++] = fan_entry_data(&p->kind, &p->entries[done]);
        plain_sum_runs(&p->kind, src, m, acc, done == n ? scale : NULL, out, stats);
    }
    plain_sum_end(b, left);
}

void fan_plain_sum(const fan_frontend *f, const fan_plain_kind *kind, const char *const *src,
                   size_t n, char *out)
{
    uint64_t bytes = fan_plain_kind_bytes(kind);
    void *left = bytes > FAN_PLAIN_BYTES ? f->allow_threads_begin() : NULL;
    plain_sum_runs(kind, src, n, fan_dtype_accumulate(kind->dtype), NULL, out, NULL);
    if (left)
        f->allow_threads_end(left);
    fan_plain_total.adds += n;
    fan_plain_total.folds++;
    fan_plain_total.passes++;
    fan_plain_total.bytes_read += n * bytes;
    fan_plain_total.bytes_written += bytes;
}
