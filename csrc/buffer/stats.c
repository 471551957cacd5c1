/* stats: memory for the figures of a sum, how they are measured, and stats(), which reads them. */
#include "array/exact.h"
#include "array/sparse.h"
#include "array/sum.h"
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/slot.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

static fan_slot_state *stats_state(const fan_fold *f)
{
    return f->b->slots[f->slot].state;
}

static const fan_array *stats_numbers(const fan_value *value)
{
    switch (value->form) {
    case FAN_FORM_SPARSE:
        return value->sparse->values;
    case FAN_FORM_DENSE:
    case FAN_FORM_PARTIAL:
    case FAN_FORM_ZERO:
        return value->array;
    default:
        return NULL;
    }
}

/* A sparse value without duplicates, as a take would sum it: on A, in its own dtype. */
static fan_status stats_merge(const fan_fold *fold, const fan_value *value, fan_sparse **merged,
                              fan_error *err)
{
    const fan_slot_spec *spec = fan_fold_slot(fold)->spec;
    fan_dtype dtype = value->dtype;
    if (spec->exact && fan_exact_fits(dtype) && !FAN_FAULT(STATS_OF_LEFT_FOLD))
        return fan_fold_exact_merged(fold, value, merged, err);
    fan_dtype acc = fan_accum_dtype(dtype, spec->accumulate);
    if (acc == FAN_DT_NONE)
        acc = fan_accum_dtype(dtype, FAN_DT_NONE);
    fan_sparse_operand in = {value->sparse, acc};
    return fan_device_sparse_merge(value->device, fan_fold_accum(fold), &in, 1, true, dtype, NULL,
                                   merged, err);
}

/* The elements whose statistics are those of a value: the stored numbers, or, where an index may
 * occur twice in sparse data, its merged entries, made here on A (*merged: the caller's; NULL:
 * none), rounded as the value is. */
static fan_status stats_elements(const fan_fold *fold, const fan_value *value,
                                 const fan_array **elements, fan_sparse **merged, fan_error *err)
{
    *merged = NULL;
    *elements = stats_numbers(value);
    if (value->form != FAN_FORM_SPARSE)
        return FAN_OK;
    if (value->sparse->coalesced || FAN_FAULT(STATS_OF_STORED))
        return FAN_OK;
    fan_device *d = value->device;
    if (!d->backend->has_streams && fan_sparse_is_sorted(value->sparse))
        return FAN_OK;
    FAN_TRY(stats_merge(fold, value, merged, err));
    *elements = (*merged)->values;
    return FAN_OK;
}

/* The numbers of a term of which one is an inf or a NaN if the term brought it (D35): those that
 * are stored, or, of the only contribution, those of the sum. */
static fan_status stats_suspects(const fan_fold *fold, const fan_term *term,
                                 const fan_array **elements, fan_sparse **merged, fan_error *err)
{
    bool summed = fold->state || fan_term_is_sum(fold, term);
    if (fold->n == 1 && !summed)
        return stats_elements(fold, term->v, elements, merged, err);
    *merged = NULL;
    *elements = stats_numbers(term->v);
    return FAN_OK;
}

/* on_device: the numbers lie on a device with streams. */
static bool stats_on_device(const fan_value *value)
{
    if (value->form == FAN_FORM_ZERO || !value->device)
        return false;
    return value->device->backend->has_streams;
}

size_t fan_fold_first_suspect(const fan_fold *fold)
{
    if (!fold->b->sum_stats || !fold->n)
        return 0;
    return fold->terms[0].is_value && stats_state(fold)->sum_stats.valid;
}

/* memory_for: memory for the figures of up to `size` elements, unless A is captured. */
static fan_status stats_memory(fan_device *d, const fan_slot_state *state, int64_t size,
                               fan_sum_stats *sum_stats, fan_error *err)
{
    uint64_t capture = 0;
    bool captured = state->sum_stats.captured;
    if (!captured)
        FAN_TRY(fan_stream_capture(state->accum, &capture, err));
    if (captured || capture) {
        *sum_stats = (fan_sum_stats){.valid = true, .captured = true};
        return FAN_OK;
    }
    FAN_TRY(fan_stats_out_new(d, state->accum, size, &sum_stats->device_words, err));
    sum_stats->stream = fan_stream_hold(state->accum);
    return FAN_OK;
}

/* memory_for_fold: the same for a fold, with room for its keys. */
static fan_status stats_memory_for_fold(fan_fold *fold, fan_device *d, int64_t size, fan_error *err)
{
    if (!fold->keys)
        fold->keys = fan_alloc((fold->n + 1) * sizeof *fold->keys);
    if (!fold->keys)
        return fan_fold_fail_memory(fold, err);
    for (size_t i = 0; i < fold->n; i++)
        fold->keys[i] = fold->terms[i].key;
    return stats_memory(d, stats_state(fold), size, &fold->sum_stats, err);
}

fan_status fan_fold_stats_memory(fan_fold *fold, fan_error *err)
{
    fan_device *d = stats_state(fold)->device;
    int64_t size = 0;
    if (!fold->b->sum_stats || fold->snapshot)
        return FAN_OK;
    if (!d || !d->backend->has_streams)
        return FAN_OK;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        const fan_array *numbers = stats_numbers(value);
        if (!numbers)
            return FAN_OK;
        /* the sum of partial ones is larger than they are */
        int64_t own = 0;
        if (value->patch)
            own = value->patch->whole;
        own = fan_max(own, numbers->size);
        if (__builtin_add_overflow(size, own, &size))
            size = INT64_MAX;
    }
    return stats_memory_for_fold(fold, d, size, err);
}

/* measure: a job that reads what is there already; in[0] is what it measures. */
static fan_status stats_measure(fan_buffer *b, size_t slot, fan_device *d,
                                const fan_sum_stats *sum_stats, const fan_array *before,
                                const fan_operand *in, const int64_t *keys, size_t n,
                                size_t first_suspect, fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    fan_stats_out stats_out = {.words = sum_stats->device_words, .before = before, .keys = keys};
    fan_job job = {.kind = FAN_JOB_STATS,
                   .in = in,
                   .n = n,
                   .stats_out = &stats_out,
                   .first_suspect = first_suspect,
                   .label = label};
    snprintf(label, sizeof label, "stats_measure %s[%zu]", b->name, slot);
    return fan_device_run(d, sum_stats->stream, &job, err);
}

static void stats_read_array(const fan_buffer *b, const fan_array *a, fan_stats *out)
{
    void *left = fan_frontend_leave(b->frontend, fan_dense_bytes(a) >= FAN_BUSY_BYTES);
    fan_stats_of(a, out);
    fan_frontend_return(b->frontend, left);
}

/* Nothing is lost where the user ends the reading, but for what was summed in place. */
static void stats_interrupt_begin(const fan_fold *fold, fan_interrupt *interrupt, fan_error *err)
{
    bool may_end = fold->may_end && !fold->plan.exclusive;
    fan_buffer_interrupt_begin(fold->b, interrupt, may_end, err);
}

/* The statistics of a result. */
static fan_status stats_of_result(const fan_fold *fold, const fan_value *value, fan_stats *out,
                                  fan_error *err)
{
    fan_interrupt interrupt;
    const fan_array *elements;
    fan_sparse *merged;
    stats_interrupt_begin(fold, &interrupt, err);
    fan_status status = stats_elements(fold, value, &elements, &merged, err);
    if (status == FAN_OK)
        stats_read_array(fold->b, elements, out);
    fan_sparse_drop(merged);
    return fan_interrupt_end(&interrupt, status);
}

/* Whether a term on the host brought no inf or NaN (D35); true of terms elsewhere. */
static fan_status stats_term_is_finite(const fan_fold *fold, const fan_term *term, bool *finite,
                                       fan_error *err)
{
    const fan_value *value = term->v;
    fan_interrupt interrupt;
    const fan_array *elements;
    fan_sparse *merged;
    fan_stats stats = {.nonfinite = 0};
    *finite = true;
    if (!stats_numbers(value) || stats_on_device(value))
        return FAN_OK;
    FAN_TRY(fan_slot_check_unmoved(fold->b, fold->slot, value, term->key, err));
    stats_interrupt_begin(fold, &interrupt, err);
    fan_status status = stats_suspects(fold, term, &elements, &merged, err);
    if (status == FAN_OK)
        stats_read_array(fold->b, elements, &stats);
    fan_sparse_drop(merged);
    *finite = stats.nonfinite == 0;
    return fan_interrupt_end(&interrupt, status);
}

fan_status fan_fold_find_nonfinite(const fan_fold *fold, size_t *found, fan_error *err)
{
    *found = fold->n;
    if (!fold->b->sum_stats || stats_state(fold)->sum_stats.has_nonfinite)
        return FAN_OK;
    for (size_t i = 0; i < fold->n && *found == fold->n; i++) {
        bool finite;
        FAN_TRY(stats_term_is_finite(fold, &fold->terms[i], &finite, err));
        if (!finite)
            *found = i;
    }
    return FAN_OK;
}

/* The job of fan_fold_collect_stats on a device: the result, and after it the terms that could be
 * the first with an inf or a NaN. */
static fan_status stats_measure_result(fan_fold *fold, const fan_value *result, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_array *before = stats_state(fold)->sum_stats.device_words;
    const fan_array *elements;
    size_t n = 1;
    fan_sparse *merged = NULL;
    fan_sparse *alone = NULL;
    FAN_GO(stats_elements(fold, result, &elements, &merged, err));
    fold->scratch[0] = (fan_operand){.array = elements, .acc = elements->dtype};
    for (size_t i = fan_fold_first_suspect(fold); i < fold->n; i++) {
        const fan_term *term = &fold->terms[i];
        if (!stats_numbers(term->v) || term->v->device != result->device)
            continue;
        FAN_GO(stats_suspects(fold, term, &elements, &alone, err));
        fold->scratch[n] = (fan_operand){.array = elements, .acc = elements->dtype};
        fold->keys[n++] = term->key;
    }
    status = stats_measure(fold->b, fold->slot, result->device, &fold->sum_stats, before,
                           fold->scratch, fold->keys, n, 1, err);
done:
    fan_sparse_drop(merged);
    fan_sparse_drop(alone);
    return status;
}

/* On a device with streams. */
static fan_status stats_collect_on_device(fan_fold *fold, const fan_value *result, fan_error *err)
{
    fan_sum_stats *figures = &fold->sum_stats;
    if (figures->valid || fold->snapshot)
        return FAN_OK;
    int64_t size = stats_numbers(result)->size;
    if (!figures->device_words)
        FAN_TRY(stats_memory_for_fold(fold, result->device, size, err));
    if (figures->captured)
        return FAN_OK;
    FAN_TRY(stats_measure_result(fold, result, err));
    figures->valid = true;
    return FAN_OK;
}

fan_status fan_fold_collect_stats(fan_fold *fold, const fan_value *result, fan_error *err)
{
    if (!fold->b->sum_stats || !stats_numbers(result))
        return FAN_OK;
    if (stats_on_device(result))
        return stats_collect_on_device(fold, result, err);
    fan_sum_stats *figures = &fold->sum_stats;
    fan_stats *stats = &figures->stats;
    bool summed = figures->valid;
    if (!summed) {
        int64_t key = -1;
        if (fold->n)
            key = fold->terms[0].key;
        FAN_TRY(fan_slot_check_unmoved(fold->b, fold->slot, result, key, err));
        FAN_TRY(stats_of_result(fold, result, stats, err));
        stats->bad = SIZE_MAX;
        figures->valid = true;
    }
    bool known = figures->has_nonfinite || stats_state(fold)->sum_stats.has_nonfinite;
    if (stats->nonfinite == 0 || known)
        return FAN_OK;
    size_t first = fan_fold_first_suspect(fold);
    if (summed)
        first = stats->bad;
    for (size_t i = first; i < fold->n; i++) {
        const fan_term *term = &fold->terms[i];
        bool finite = false;
        if (!summed)
            FAN_TRY(stats_term_is_finite(fold, term, &finite, err));
        if (finite)
            continue;
        fan_sum_stats_blame(figures, term->key);
        return FAN_OK;
    }
    return FAN_OK;
}

void fan_sum_stats_of_out(const fan_buffer *b, const fan_array *out, fan_sum_stats *sum_stats)
{
    stats_read_array(b, out, &sum_stats->stats);
    sum_stats->stats.bad = SIZE_MAX; /* which term was not finite is known already */
}

fan_status fan_fold_measure_term(fan_fold *fold, fan_stream **R, fan_error *err)
{
    const fan_value *value = fold->terms[0].v;
    const fan_array *numbers = stats_numbers(value);
    fan_sum_stats *figures = &fold->sum_stats;
    assert(fold->n == 1);
    if (!fold->b->sum_stats || !numbers || !stats_on_device(value))
        return FAN_OK;
    FAN_TRY(stats_memory_for_fold(fold, value->device, numbers->size, err));
    if (figures->captured)
        return FAN_OK;
    FAN_TRY(fan_order_wait_terms(fold, err));
    const fan_array *elements;
    fan_sparse *merged;
    FAN_TRY(stats_elements(fold, value, &elements, &merged, err));
    fan_operand in = {.array = elements, .acc = elements->dtype};
    fan_status status = stats_measure(fold->b, fold->slot, value->device, figures, NULL, &in,
                                      fold->keys, 1, 0, err);
    fan_sparse_drop(merged);
    FAN_TRY(status);
    figures->valid = true;
    *R = figures->stream;
    return FAN_OK;
}

fan_status fan_slot_measure(fan_buffer *b, size_t slot, const fan_array *sum, fan_device *d,
                            int64_t key, fan_error *err)
{
    fan_slot_state *state = b->slots[slot].state;
    fan_sum_stats *figures = &state->sum_stats;
    if (!b->sum_stats)
        return FAN_OK;
    if (d->backend->has_streams) {
        const fan_operand in = {.array = sum, .acc = sum->dtype};
        bool anew = !figures->valid;
        if (!figures->device_words)
            FAN_TRY(stats_memory(d, state, sum->size, figures, err));
        const fan_array *before = figures->device_words;
        if (anew)
            before = NULL;
        if (!figures->captured)
            FAN_TRY(stats_measure(b, slot, d, figures, before, &in, &key, 1, 0, err));
    } else {
        fan_sum_stats_of_out(b, sum, figures);
        if (figures->stats.nonfinite)
            fan_sum_stats_blame(figures, key);
    }
    figures->multiplicity = 0;
    figures->valid = true;
    return FAN_OK;
}

/* ---- fan_buffer_stats ---- */

/* read: the figures, once the stream has run so far. Blocks, outside the frontend. */
static fan_status stats_read(const fan_buffer *b, size_t slot, fan_sum_stats *figures,
                             fan_error *err)
{
    fan_device_stats words;
    uint64_t capture;
    FAN_TRY(fan_stream_capture(figures->stream, &capture, err));
    if (capture) {
        return fan_fail_at(err, FAN_ERR_CAPTURE, 900, fan_slot_place(b, slot, -1),
                           "stats() waits for the stream that summed, which is captured now: ask "
                           "before the capture begins, or "
                           "once it has ended");
    }
    fan_stream *on = fan_stream_hold(figures->stream);
    if (FAN_FAULT(STATS_WRONG_STREAM)) {
        fan_stream_drop(on);
        on = fan_stream_current(figures->stream->device);
    }
    void *left = fan_frontend_leave(b->frontend, true);
    fan_status status = fan_stats_out_read(on, figures->device_words, &words, err);
    fan_frontend_return(b->frontend, left);
    fan_stream_drop(on);
    FAN_TRY(status);
    figures->stats = (fan_stats){.count = words.count,
                                 .squares = words.squares,
                                 .scale = (int)words.scale,
                                 .absmax = words.absmax,
                                 .nonfinite = words.nonfinite,
                                 .bad = SIZE_MAX};
    figures->has_nonfinite = words.bad != 0;
    figures->nonfinite_key = words.key;
    return FAN_OK;
}

/* Keeps what was read, if the slot's last sum is still the same. */
static void stats_keep_read(fan_buffer *b, size_t slot, const fan_sum_stats *figures)
{
    fan_sum_stats had = {.valid = false};
    fan_slot_lock(b, slot);
    fan_sum_stats *last = &b->sum_stats[slot];
    if (last->device_words == figures->device_words) {
        had = *last;
        *last = *figures;
        last->device_words = NULL;
        last->stream = NULL;
    }
    fan_slot_unlock(b, slot);
    fan_sum_stats_drop(&had);
}

fan_status fan_buffer_stats(fan_buffer *b, size_t slot, bool *some, fan_stats *out, bool *bad,
                            int64_t *bad_key, fan_error *err)
{
    fan_status status = FAN_OK;
    FAN_TRY(fan_slot_check(b, slot, err));
    if (!b->sum_stats) {
        return fan_fail_value(err, fan_buffer_place(b),
                              "stats() needs a buffer that was made with stats=True");
    }
    fan_slot_lock(b, slot);
    fan_sum_stats figures = fan_sum_stats_hold(&b->sum_stats[slot]);
    fan_slot_unlock(b, slot);
    if (!figures.valid) {
        return fan_fail_value(err, fan_slot_place(b, slot, -1),
                              "no sum was taken since something was last added to it");
    }
    if (figures.captured) {
        return fan_fail_at(err, FAN_ERR_CAPTURE, 900, fan_slot_place(b, slot, -1),
                           "its sum was made while its stream was captured, and no figures are "
                           "kept of what a graph does: "
                           "take it outside the capture, or sum the graph's results with "
                           "fanin.add_n(.., stats=True)");
    }
    if (figures.device_words) {
        status = stats_read(b, slot, &figures, err);
        if (status == FAN_OK)
            stats_keep_read(b, slot, &figures);
    }
    *some = figures.stats.count != UINT64_MAX;
    *out = figures.stats;
    if (*some && figures.multiplicity > 1)
        fan_stats_repeat(out, figures.multiplicity);
    *bad = figures.has_nonfinite;
    *bad_key = figures.nonfinite_key;
    fan_sum_stats_drop(&figures);
    return status;
}
