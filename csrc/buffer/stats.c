#include "buffer/stats.h"

#include "array/sum.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/order.h"
#include "buffer/unchanged.h"

#include <assert.h>
#include <stdio.h>

fan_sum_stats fan_sum_stats_hold(const fan_sum_stats *k)
{
    fan_sum_stats copy = *k;
    if (k->device_words)
        copy.device_words = fan_array_hold(k->device_words);
    copy.stream = fan_stream_hold(k->stream);
    return copy;
}

fan_sum_stats fan_sum_stats_move(fan_sum_stats *k)
{
    fan_sum_stats moved = *k;
    *k = (fan_sum_stats){.valid = false};
    return moved;
}

void fan_sum_stats_drop(fan_sum_stats *k)
{
    fan_array_drop(k->device_words);
    fan_stream_drop(k->stream);
    *k = (fan_sum_stats){.valid = false};
}

fan_sum_stats fan_sum_stats_forget(fan_buffer *b, size_t slot) { return fan_sum_stats_move(&b->sum_stats[slot]); }

static fan_pass *pass_of(const fan_fold *f) { return f->b->slots[f->slot].p; }

static const fan_array *numbers_of(const fan_value *v)
{
    return v->form == FAN_FORM_SPARSE                              ? v->sparse->values
           : v->form == FAN_FORM_DENSE || v->form == FAN_FORM_ZERO ? v->array
                                                                   : NULL;
}

/* on_device: the numbers lie on a device with streams. */
static bool on_device(const fan_value *v)
{
    return v->form != FAN_FORM_ZERO && v->device && v->device->backend->has_streams;
}

size_t fan_fold_first_suspect(const fan_fold *f)
{
    return f->b->sum_stats && f->n && f->terms[0].is_value && pass_of(f)->sum_stats.valid;
}

/* memory_for: memory for the figures of up to `size` elements, unless A is captured. */
static fan_status memory_for(fan_device *d, const fan_pass *p, int64_t size, fan_sum_stats *sum_stats, fan_error *err)
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
static fan_status memory_for_fold(fan_fold *f, fan_device *d, int64_t size, fan_error *err)
{
    if (!f->keys && !(f->keys = fan_alloc((f->n + 1) * sizeof *f->keys)))
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", f->b->name, f->slot);
    for (size_t i = 0; i < f->n; i++)
        f->keys[i] = f->terms[i].key;
    return memory_for(d, pass_of(f), size, &f->sum_stats, err);
}

fan_status fan_fold_stats_memory(fan_fold *f, fan_error *err)
{
    fan_device *d = pass_of(f)->device;
    int64_t size = 0;
    if (!f->b->sum_stats || f->snapshot || !d || !d->backend->has_streams)
        return FAN_OK;
    for (size_t i = 0; i < f->n; i++) {
        const fan_array *a = numbers_of(f->terms[i].v);
        if (!a)
            return FAN_OK;
        size = size < INT64_MAX - a->size ? size + a->size : INT64_MAX;
    }
    return memory_for_fold(f, d, size, err);
}

/* measure: a job that reads what is there already; in[0] is what it tells of. */
static fan_status measure(fan_buffer *b, size_t slot, fan_device *d, const fan_sum_stats *sum_stats,
                          const fan_array *before, const fan_operand *in, const int64_t *keys, size_t n,
                          size_t first_suspect, fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    fan_stats_out stats_out = {.words = sum_stats->device_words, .before = before, .keys = keys};
    snprintf(label, sizeof label, "measure %s[%zu]", b->name, slot);
    return fan_device_run(d, sum_stats->stream,
                          &(fan_job){.kind = FAN_JOB_STATS,
                                     .in = in,
                                     .n = n,
                                     .stats_out = &stats_out,
                                     .first_suspect = first_suspect,
                                     .label = label},
                          err);
}

static fan_status collect_on_device(fan_fold *f, const fan_value *result, const fan_array *a, fan_error *err)
{
    const fan_pass *p = pass_of(f);
    size_t n = 1;
    if (f->sum_stats.valid || f->snapshot)
        return FAN_OK;
    if (!f->sum_stats.device_words)
        FAN_TRY(memory_for_fold(f, result->device, a->size, err));
    if (f->sum_stats.captured)
        return FAN_OK;
    f->scratch[0] = (fan_operand){a, a->dtype};
    for (size_t i = fan_fold_first_suspect(f); i < f->n; i++) {
        const fan_array *of = numbers_of(f->terms[i].v);
        if (!of || f->terms[i].v->device != result->device)
            continue;
        f->scratch[n] = (fan_operand){of, of->dtype};
        f->keys[n++] = f->terms[i].key;
    }
    FAN_TRY(measure(f->b, f->slot, result->device, &f->sum_stats, p->sum_stats.device_words, f->scratch, f->keys, n, 1,
                    err));
    f->sum_stats.valid = true;
    return FAN_OK;
}

static void read_stats(const fan_buffer *b, const fan_array *a, fan_stats *out)
{
    uint64_t bytes = (uint64_t)a->size * fan_dtype_size(a->dtype);
    bool release_gil = bytes >= FAN_BUSY_BYTES && b->frontend->allow_threads_begin;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    fan_stats_of(a, out);
    if (release_gil)
        b->frontend->allow_threads_end(left);
}

/* Nothing is lost where the user ends the reading, but for what was summed in place. */
fan_status fan_fold_stats_of(const fan_fold *f, const fan_array *a, fan_stats *out, fan_error *err)
{
    fan_interrupt interrupt;
    bool may_end = f->may_end && !f->plan.exclusive;
    fan_interrupt_begin(&interrupt, may_end ? f->b->frontend->check_signals : NULL, err);
    read_stats(f->b, a, out);
    return fan_interrupt_end(&interrupt, FAN_OK);
}

static fan_status collect_on_host(fan_fold *f, const fan_value *result, const fan_array *a, fan_error *err)
{
    fan_sum_stats *sum_stats = &f->sum_stats;
    bool summed = sum_stats->valid;
    if (!summed) {
        FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, result, f->n ? f->terms[0].key : -1, err));
        FAN_TRY(fan_fold_stats_of(f, a, &sum_stats->stats, err));
        sum_stats->stats.bad = SIZE_MAX;
        sum_stats->valid = true;
    }
    if (sum_stats->stats.nonfinite == 0 || sum_stats->has_nonfinite || pass_of(f)->sum_stats.has_nonfinite)
        return FAN_OK;
    for (size_t i = summed ? sum_stats->stats.bad : fan_fold_first_suspect(f); i < f->n; i++) {
        const fan_term *t = &f->terms[i];
        fan_stats of = {.nonfinite = summed};
        if (!summed && numbers_of(t->v) && !on_device(t->v)) {
            FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, t->v, t->key, err));
            FAN_TRY(fan_fold_stats_of(f, numbers_of(t->v), &of, err));
        }
        if (of.nonfinite == 0)
            continue;
        sum_stats->has_nonfinite = true;
        sum_stats->nonfinite_key = t->key;
        return FAN_OK;
    }
    return FAN_OK;
}

fan_status fan_fold_collect_stats(fan_fold *f, const fan_value *result, fan_error *err)
{
    const fan_array *a = numbers_of(result);
    if (!f->b->sum_stats || !a)
        return FAN_OK;
    if (on_device(result))
        return collect_on_device(f, result, a, err);
    return collect_on_host(f, result, a, err);
}

fan_status fan_fold_measure_term(fan_fold *f, fan_stream **R, fan_error *err)
{
    const fan_value *v = f->terms[0].v;
    const fan_array *a = numbers_of(v);
    assert(f->n == 1);
    if (!f->b->sum_stats || !a || !on_device(v))
        return FAN_OK;
    FAN_TRY(memory_for_fold(f, v->device, a->size, err));
    if (f->sum_stats.captured)
        return FAN_OK;
    FAN_TRY(fan_order_wait_terms(f, err));
    fan_operand in = {a, a->dtype};
    FAN_TRY(measure(f->b, f->slot, v->device, &f->sum_stats, NULL, &in, f->keys, 1, 0, err));
    f->sum_stats.valid = true;
    *R = f->sum_stats.stream;
    return FAN_OK;
}

fan_status fan_slot_measure(fan_buffer *b, size_t slot, int64_t key, fan_error *err)
{
    fan_pass *p = b->slots[slot].p;
    fan_sum_stats *sum_stats = &p->sum_stats;
    const fan_array *sum = p->value.array;
    if (!b->sum_stats)
        return FAN_OK;
    if (on_device(&p->value)) {
        bool anew = !sum_stats->valid;
        if (!sum_stats->device_words)
            FAN_TRY(memory_for(p->value.device, p, sum->size, sum_stats, err));
        if (!sum_stats->captured)
            FAN_TRY(measure(b, slot, p->value.device, sum_stats, anew ? NULL : sum_stats->device_words,
                            &(fan_operand){sum, sum->dtype}, &key, 1, 0, err));
        sum_stats->multiplicity = 0;
        sum_stats->valid = true;
        return FAN_OK;
    }
    read_stats(b, sum, &sum_stats->stats);
    sum_stats->stats.bad = SIZE_MAX;
    sum_stats->multiplicity = 0;
    sum_stats->valid = true;
    if (sum_stats->stats.nonfinite && !sum_stats->has_nonfinite) {
        sum_stats->has_nonfinite = true;
        sum_stats->nonfinite_key = key;
    }
    return FAN_OK;
}
