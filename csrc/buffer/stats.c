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

static const fan_array *stats_numbers(const fan_value *v)
{
    return v->form == FAN_FORM_SPARSE                              ? v->sparse->values
           : v->form == FAN_FORM_DENSE || v->form == FAN_FORM_ZERO ? v->array
                                                                   : NULL;
}

/* The elements whose statistics are those of a value: the stored numbers, or, where an index may
 * occur twice in sparse data, its merged entries, made here on A (*merged: the caller's; NULL:
 * none), rounded as the value is. */
static fan_status stats_elements(const fan_fold *f, const fan_value *v, const fan_array **elements,
                                 fan_sparse **merged, fan_error *err)
{
    *merged = NULL;
    *elements = stats_numbers(v);
    if (v->form != FAN_FORM_SPARSE || v->sparse->coalesced || FAN_FAULT(STATS_OF_STORED))
        return FAN_OK;
    bool on_host = !v->device->backend->has_streams;
    if (on_host && fan_sparse_is_sorted(v->sparse))
        return FAN_OK;
    const fan_slot *s = fan_fold_slot(f);
    fan_dtype acc = fan_accum_dtype(v->dtype, s->spec->accumulate);
    fan_sparse_operand in = {v->sparse, acc == FAN_DT_NONE ? fan_dtype_accumulate(v->dtype) : acc};
    FAN_TRY(fan_device_sparse_merge(v->device, s->state->accum, &in, 1, true, v->dtype, NULL,
                                    merged, err));
    *elements = (*merged)->values;
    return FAN_OK;
}

/* The numbers of a term of which one is an inf or a NaN if the term brought it (D35): those that
 * are stored, or, of the only contribution, those of the sum. */
static fan_status stats_suspects(const fan_fold *f, const fan_term *t, const fan_array **elements,
                                 fan_sparse **merged, fan_error *err)
{
    bool summed = f->state || (t->is_value && fan_fold_slot(f)->list->summed > 1);
    if (f->n == 1 && !summed)
        return stats_elements(f, t->v, elements, merged, err);
    *merged = NULL;
    *elements = stats_numbers(t->v);
    return FAN_OK;
}

/* on_device: the numbers lie on a device with streams. */
static bool stats_on_device(const fan_value *v)
{
    return v->form != FAN_FORM_ZERO && v->device && v->device->backend->has_streams;
}

size_t fan_fold_first_suspect(const fan_fold *f)
{
    return f->b->sum_stats && f->n && f->terms[0].is_value && stats_state(f)->sum_stats.valid;
}

/* memory_for: memory for the figures of up to `size` elements, unless A is captured. */
static fan_status stats_memory(fan_device *d, const fan_slot_state *p, int64_t size,
                               fan_sum_stats *sum_stats, fan_error *err)
{
    uint64_t capture = 0;
    if (!p->sum_stats.captured)
        FAN_TRY(fan_stream_capture(p->accum, &capture, err));
    if (p->sum_stats.captured || capture) {
        *sum_stats = (fan_sum_stats){.valid = true, .captured = true};
        return FAN_OK;
    }
    FAN_TRY(fan_stats_out_new(d, p->accum, size, &sum_stats->device_words, err));
    sum_stats->stream = fan_stream_hold(p->accum);
    return FAN_OK;
}

/* memory_for_fold: the same for a fold, with room for its keys. */
static fan_status stats_memory_for_fold(fan_fold *f, fan_device *d, int64_t size, fan_error *err)
{
    if (!f->keys && !(f->keys = fan_alloc((f->n + 1) * sizeof *f->keys)))
        return fan_slot_fail_memory(f->b, f->slot, err);
    for (size_t i = 0; i < f->n; i++)
        f->keys[i] = f->terms[i].key;
    return stats_memory(d, stats_state(f), size, &f->sum_stats, err);
}

fan_status fan_fold_stats_memory(fan_fold *f, fan_error *err)
{
    fan_device *d = stats_state(f)->device;
    int64_t size = 0;
    if (!f->b->sum_stats || f->snapshot || !d || !d->backend->has_streams)
        return FAN_OK;
    for (size_t i = 0; i < f->n; i++) {
        const fan_array *a = stats_numbers(f->terms[i].v);
        if (!a)
            return FAN_OK;
        size = size < INT64_MAX - a->size ? size + a->size : INT64_MAX;
    }
    return stats_memory_for_fold(f, d, size, err);
}

/* measure: a job that reads what is there already; in[0] is what it measures. */
static fan_status stats_measure(fan_buffer *b, size_t slot, fan_device *d,
                                const fan_sum_stats *sum_stats, const fan_array *before,
                                const fan_operand *in, const int64_t *keys, size_t n,
                                size_t first_suspect, fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    fan_stats_out stats_out = {.words = sum_stats->device_words, .before = before, .keys = keys};
    snprintf(label, sizeof label, "stats_measure %s[%zu]", b->name, slot);
    return fan_device_run(d, sum_stats->stream,
                          &(fan_job){.kind = FAN_JOB_STATS,
                                     .in = in,
                                     .n = n,
                                     .stats_out = &stats_out,
                                     .first_suspect = first_suspect,
                                     .label = label},
                          err);
}

static void stats_read_array(const fan_buffer *b, const fan_array *a, fan_stats *out)
{
    uint64_t bytes = (uint64_t)a->size * fan_dtype_size(a->dtype);
    bool release_gil = bytes >= FAN_BUSY_BYTES && b->frontend->allow_threads_begin;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    fan_stats_of(a, out);
    if (release_gil)
        b->frontend->allow_threads_end(left);
}

/* The statistics of a result. Nothing is lost where the user ends the reading, but for what was
 * summed in place. */
static fan_status stats_of_result(const fan_fold *f, const fan_value *v, fan_stats *out,
                                  fan_error *err)
{
    fan_interrupt interrupt;
    const fan_array *elements;
    fan_sparse *merged;
    bool may_end = f->may_end && !f->plan.exclusive;
    fan_interrupt_begin(&interrupt, may_end ? f->b->frontend->check_signals : NULL, err);
    fan_status status = stats_elements(f, v, &elements, &merged, err);
    if (status == FAN_OK)
        stats_read_array(f->b, elements, out);
    fan_sparse_drop(merged);
    return fan_interrupt_end(&interrupt, status);
}

fan_status fan_fold_term_is_finite(const fan_fold *f, const fan_term *t, bool *finite,
                                   fan_error *err)
{
    fan_interrupt interrupt;
    const fan_array *elements;
    fan_sparse *merged;
    fan_stats stats = {.nonfinite = 0};
    bool may_end = f->may_end && !f->plan.exclusive;
    *finite = true;
    if (!stats_numbers(t->v) || stats_on_device(t->v))
        return FAN_OK;
    FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, t->v, t->key, err));
    fan_interrupt_begin(&interrupt, may_end ? f->b->frontend->check_signals : NULL, err);
    fan_status status = stats_suspects(f, t, &elements, &merged, err);
    if (status == FAN_OK)
        stats_read_array(f->b, elements, &stats);
    fan_sparse_drop(merged);
    *finite = stats.nonfinite == 0;
    return fan_interrupt_end(&interrupt, status);
}

/* The job of fan_fold_collect_stats on a device: the result, and after it the terms that could be
 * the first with an inf or a NaN. */
static fan_status stats_measure_result(fan_fold *f, const fan_value *result, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_array *elements;
    size_t n = 1;
    fan_sparse *merged = NULL;
    fan_sparse *alone = NULL;
    FAN_GO(stats_elements(f, result, &elements, &merged, err));
    f->scratch[0] = (fan_operand){elements, elements->dtype};
    for (size_t i = fan_fold_first_suspect(f); i < f->n; i++) {
        const fan_term *t = &f->terms[i];
        if (!stats_numbers(t->v) || t->v->device != result->device)
            continue;
        FAN_GO(stats_suspects(f, t, &elements, &alone, err));
        f->scratch[n] = (fan_operand){elements, elements->dtype};
        f->keys[n++] = t->key;
    }
    status = stats_measure(f->b, f->slot, result->device, &f->sum_stats,
                           stats_state(f)->sum_stats.device_words, f->scratch, f->keys, n, 1, err);
done:
    fan_sparse_drop(merged);
    fan_sparse_drop(alone);
    return status;
}

fan_status fan_fold_collect_stats(fan_fold *f, const fan_value *result, fan_error *err)
{
    const fan_array *a = stats_numbers(result);
    if (!f->b->sum_stats || !a)
        return FAN_OK;
    if (stats_on_device(result)) {
        if (f->sum_stats.valid || f->snapshot)
            return FAN_OK;
        if (!f->sum_stats.device_words)
            FAN_TRY(stats_memory_for_fold(f, result->device, a->size, err));
        if (f->sum_stats.captured)
            return FAN_OK;
        FAN_TRY(stats_measure_result(f, result, err));
        f->sum_stats.valid = true;
        return FAN_OK;
    }
    fan_sum_stats *sum_stats = &f->sum_stats;
    bool summed = sum_stats->valid;
    if (!summed) {
        FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, result, f->n ? f->terms[0].key : -1, err));
        FAN_TRY(stats_of_result(f, result, &sum_stats->stats, err));
        sum_stats->stats.bad = SIZE_MAX;
        sum_stats->valid = true;
    }
    if (sum_stats->stats.nonfinite == 0 || sum_stats->has_nonfinite ||
        stats_state(f)->sum_stats.has_nonfinite)
        return FAN_OK;
    for (size_t i = summed ? sum_stats->stats.bad : fan_fold_first_suspect(f); i < f->n; i++) {
        const fan_term *t = &f->terms[i];
        bool finite = false;
        if (!summed)
            FAN_TRY(fan_fold_term_is_finite(f, t, &finite, err));
        if (finite)
            continue;
        sum_stats->has_nonfinite = true;
        sum_stats->nonfinite_key = t->key;
        return FAN_OK;
    }
    return FAN_OK;
}

void fan_sum_stats_of_out(const fan_buffer *b, const fan_array *out, fan_sum_stats *sum_stats)
{
    stats_read_array(b, out, &sum_stats->stats);
    sum_stats->stats.bad = SIZE_MAX; /* which term was not finite is known already */
}

fan_status fan_fold_measure_term(fan_fold *f, fan_stream **R, fan_error *err)
{
    const fan_value *v = f->terms[0].v;
    const fan_array *a = stats_numbers(v);
    assert(f->n == 1);
    if (!f->b->sum_stats || !a || !stats_on_device(v))
        return FAN_OK;
    FAN_TRY(stats_memory_for_fold(f, v->device, a->size, err));
    if (f->sum_stats.captured)
        return FAN_OK;
    FAN_TRY(fan_order_wait_terms(f, err));
    const fan_array *elements;
    fan_sparse *merged;
    FAN_TRY(stats_elements(f, v, &elements, &merged, err));
    fan_operand in = {elements, elements->dtype};
    fan_status status =
        stats_measure(f->b, f->slot, v->device, &f->sum_stats, NULL, &in, f->keys, 1, 0, err);
    fan_sparse_drop(merged);
    FAN_TRY(status);
    f->sum_stats.valid = true;
    *R = f->sum_stats.stream;
    return FAN_OK;
}

fan_status fan_slot_measure(fan_buffer *b, size_t slot, const fan_array *sum, fan_device *d,
                            int64_t key, fan_error *err)
{
    fan_slot_state *p = b->slots[slot].state;
    fan_sum_stats *sum_stats = &p->sum_stats;
    if (!b->sum_stats)
        return FAN_OK;
    if (d->backend->has_streams) {
        bool anew = !sum_stats->valid;
        if (!sum_stats->device_words)
            FAN_TRY(stats_memory(d, p, sum->size, sum_stats, err));
        if (!sum_stats->captured)
            FAN_TRY(stats_measure(b, slot, d, sum_stats, anew ? NULL : sum_stats->device_words,
                                  &(fan_operand){sum, sum->dtype}, &key, 1, 0, err));
        sum_stats->multiplicity = 0;
        sum_stats->valid = true;
        return FAN_OK;
    }
    stats_read_array(b, sum, &sum_stats->stats);
    sum_stats->stats.bad = SIZE_MAX;
    sum_stats->multiplicity = 0;
    sum_stats->valid = true;
    if (sum_stats->stats.nonfinite && !sum_stats->has_nonfinite) {
        sum_stats->has_nonfinite = true;
        sum_stats->nonfinite_key = key;
    }
    return FAN_OK;
}

/* ---- fan_buffer_stats ---- */

/* read: the figures, once the stream has run so far. Blocks, outside the frontend. */
static fan_status stats_read(const fan_buffer *b, size_t slot, fan_sum_stats *k, fan_error *err)
{
    fan_device_stats words;
    uint64_t capture;
    FAN_TRY(fan_stream_capture(k->stream, &capture, err));
    if (capture)
        return fan_fail_at(err, FAN_ERR_CAPTURE, 900, fan_slot_place(b, slot, -1),
                           "stats() waits for the stream that summed, which is captured now: ask "
                           "before the capture begins, or "
                           "once it has ended");
    fan_stream *on = fan_stream_hold(k->stream);
    if (FAN_FAULT(STATS_WRONG_STREAM)) {
        fan_stream_drop(on);
        on = fan_stream_current(k->stream->device);
    }
    void *left = b->frontend->allow_threads_begin ? b->frontend->allow_threads_begin() : NULL;
    fan_status status = fan_stats_out_read(on, k->device_words, &words, err);
    if (b->frontend->allow_threads_begin)
        b->frontend->allow_threads_end(left);
    fan_stream_drop(on);
    FAN_TRY(status);
    k->stats = (fan_stats){.count = words.count,
                           .squares = words.squares,
                           .scale = (int)words.scale,
                           .absmax = words.absmax,
                           .nonfinite = words.nonfinite,
                           .bad = SIZE_MAX};
    k->has_nonfinite = words.bad != 0;
    k->nonfinite_key = words.key;
    return FAN_OK;
}

fan_status fan_buffer_stats(fan_buffer *b, size_t slot, bool *some, fan_stats *out, bool *bad,
                            int64_t *bad_key, fan_error *err)
{
    fan_status status = FAN_OK;
    FAN_TRY(fan_slot_check(b, slot, err));
    if (!b->sum_stats)
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_buffer_place(b),
                           "stats() needs a buffer that was made with stats=True");
    fan_slot_lock(b, slot);
    fan_sum_stats k = fan_sum_stats_hold(&b->sum_stats[slot]);
    fan_slot_unlock(b, slot);
    if (!k.valid)
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, -1),
                           "no sum was taken since something was last added to it");
    if (k.captured)
        return fan_fail_at(err, FAN_ERR_CAPTURE, 900, fan_slot_place(b, slot, -1),
                           "its sum was made while its stream was captured, and no figures are "
                           "kept of what a graph does: "
                           "take it outside the capture, or sum the graph's results with "
                           "fanin.add_n(.., stats=True)");
    if (k.device_words) {
        status = stats_read(b, slot, &k, err);
        if (status == FAN_OK) {
            fan_slot_lock(b, slot);
            /* What was read stays, if the slot's last sum is still the same. */
            fan_sum_stats had = {.valid = false};
            if (b->sum_stats[slot].device_words == k.device_words) {
                had = b->sum_stats[slot];
                b->sum_stats[slot] = k;
                b->sum_stats[slot].device_words = NULL;
                b->sum_stats[slot].stream = NULL;
            }
            fan_slot_unlock(b, slot);
            fan_sum_stats_drop(&had);
        }
    }
    *some = k.stats.count != UINT64_MAX;
    *out = k.stats;
    if (*some && k.multiplicity > 1)
        fan_stats_repeat(out, k.multiplicity);
    *bad = k.has_nonfinite;
    *bad_key = k.nonfinite_key;
    fan_sum_stats_drop(&k);
    return status;
}
