#include "buffer/stats.h"

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
    if (k->words)
        copy.words = fan_array_hold(k->words);
    copy.on = fan_stream_hold(k->on);
    return copy;
}

fan_sum_stats fan_sum_stats_move(fan_sum_stats *k)
{
    fan_sum_stats moved = *k;
    *k = (fan_sum_stats){.yes = false};
    return moved;
}

void fan_sum_stats_drop(fan_sum_stats *k)
{
    fan_array_drop(k->words);
    fan_stream_drop(k->on);
    *k = (fan_sum_stats){.yes = false};
}

fan_sum_stats fan_sum_stats_forget(fan_buffer *b, size_t slot) { return fan_sum_stats_move(&b->known[slot]); }

static fan_pass *pass_of(const fan_fold *f) { return f->b->slots[f->slot].p; }

static const fan_array *numbers_of(const fan_value *v)
{
    return v->form == FAN_FORM_SPARSE                              ? v->sparse->values
           : v->form == FAN_FORM_DENSE || v->form == FAN_FORM_ZERO ? v->array
                                                                   : NULL;
}

/* away: the numbers lie on a device with streams. */
static bool away(const fan_value *v)
{
    return v->form != FAN_FORM_ZERO && v->device && v->device->backend->has_streams;
}

size_t fan_fold_skip(const fan_fold *f) { return f->b->known && f->n && f->terms[0].is_value && pass_of(f)->known.yes; }

/* figures_for: memory for the figures of up to `size` elements, unless A is captured. */
static fan_status figures_for(fan_device *d, const fan_pass *p, int64_t size, fan_sum_stats *known, fan_error *err)
{
    uint64_t capture = 0;
    if (!p->known.captured)
        FAN_TRY(fan_stream_capture(p->accum, &capture, err));
    if (p->known.captured || capture) {
        *known = (fan_sum_stats){.yes = true, .captured = true};
        return FAN_OK;
    }
    FAN_TRY(fan_stats_out_new(d, p->accum, size, &known->words, err));
    known->on = fan_stream_hold(p->accum);
    return FAN_OK;
}

/* fold_figures: the same for a fold, with room for its keys. */
static fan_status fold_figures(fan_fold *f, fan_device *d, int64_t size, fan_error *err)
{
    if (!f->keys && !(f->keys = fan_alloc((f->n + 1) * sizeof *f->keys)))
        return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", f->b->name, f->slot);
    for (size_t i = 0; i < f->n; i++)
        f->keys[i] = f->terms[i].key;
    return figures_for(d, pass_of(f), size, &f->known, err);
}

fan_status fan_fold_figures(fan_fold *f, fan_error *err)
{
    fan_device *d = pass_of(f)->device;
    int64_t size = 0;
    if (!f->b->known || f->snapshot || !d || !d->backend->has_streams)
        return FAN_OK;
    for (size_t i = 0; i < f->n; i++) {
        const fan_array *a = numbers_of(f->terms[i].v);
        if (!a)
            return FAN_OK;
        size = size < INT64_MAX - a->size ? size + a->size : INT64_MAX;
    }
    return fold_figures(f, d, size, err);
}

/* survey: a job that reads what is there already; in[0] is what it tells of. */
static fan_status survey(fan_buffer *b, size_t slot, fan_device *d, const fan_sum_stats *known, const fan_array *before,
                         const fan_operand *in, const int64_t *keys, size_t n, size_t skip, fan_error *err)
{
    char label[FAN_TRACE_LABEL];
    fan_stats_out figures = {.words = known->words, .before = before, .keys = keys};
    snprintf(label, sizeof label, "survey %s[%zu]", b->name, slot);
    return fan_device_run(
        d, known->on,
        &(fan_job){.kind = FAN_JOB_STATS, .in = in, .n = n, .stats_out = &figures, .skip = skip, .label = label}, err);
}

static fan_status learn_away(fan_fold *f, const fan_value *result, const fan_array *a, fan_error *err)
{
    const fan_pass *p = pass_of(f);
    size_t n = 1;
    if (f->known.yes || f->snapshot)
        return FAN_OK;
    if (!f->known.words)
        FAN_TRY(fold_figures(f, result->device, a->size, err));
    if (f->known.captured)
        return FAN_OK;
    f->scratch[0] = (fan_operand){a, a->dtype};
    for (size_t i = fan_fold_skip(f); i < f->n; i++) {
        const fan_array *of = numbers_of(f->terms[i].v);
        if (!of || f->terms[i].v->device != result->device)
            continue;
        f->scratch[n] = (fan_operand){of, of->dtype};
        f->keys[n++] = f->terms[i].key;
    }
    FAN_TRY(survey(f->b, f->slot, result->device, &f->known, p->known.words, f->scratch, f->keys, n, 1, err));
    f->known.yes = true;
    return FAN_OK;
}

/* Nothing is lost where the user ends the reading, but for what was summed in place. */
static fan_status stats_of(const fan_fold *f, const fan_array *a, fan_stats *out, fan_error *err)
{
    fan_interrupt interrupt;
    bool may_end = f->may_end && !f->plan.exclusive;
    fan_interrupt_begin(&interrupt, may_end ? f->b->frontend->poll : NULL, err);
    fan_stats_of(a, out);
    return fan_interrupt_end(&interrupt, FAN_OK);
}

static fan_status learn_here(fan_fold *f, const fan_value *result, const fan_array *a, fan_error *err)
{
    fan_sum_stats *known = &f->known;
    bool summed = known->yes;
    if (!summed) {
        FAN_TRY(fan_slot_still(f->b, f->slot, result, f->n ? f->terms[0].key : -1, err));
        FAN_TRY(stats_of(f, a, &known->stats, err));
        known->stats.bad = SIZE_MAX;
        known->yes = true;
    }
    if (known->stats.nonfinite == 0 || known->bad || pass_of(f)->known.bad)
        return FAN_OK;
    for (size_t i = summed ? known->stats.bad : fan_fold_skip(f); i < f->n; i++) {
        const fan_term *t = &f->terms[i];
        fan_stats of = {.nonfinite = summed};
        if (!summed && numbers_of(t->v) && !away(t->v)) {
            FAN_TRY(fan_slot_still(f->b, f->slot, t->v, t->key, err));
            FAN_TRY(stats_of(f, numbers_of(t->v), &of, err));
        }
        if (of.nonfinite == 0)
            continue;
        known->bad = true;
        known->bad_key = t->key;
        return FAN_OK;
    }
    return FAN_OK;
}

fan_status fan_fold_learn(fan_fold *f, const fan_value *result, fan_error *err)
{
    const fan_array *a = numbers_of(result);
    if (!f->b->known || !a)
        return FAN_OK;
    if (away(result))
        return learn_away(f, result, a, err);
    return learn_here(f, result, a, err);
}

fan_status fan_fold_survey(fan_fold *f, fan_stream **R, fan_error *err)
{
    const fan_value *v = f->terms[0].v;
    const fan_array *a = numbers_of(v);
    assert(f->n == 1);
    if (!f->b->known || !a || !away(v))
        return FAN_OK;
    FAN_TRY(fold_figures(f, v->device, a->size, err));
    if (f->known.captured)
        return FAN_OK;
    FAN_TRY(fan_order_wait_terms(f, err));
    fan_operand in = {a, a->dtype};
    FAN_TRY(survey(f->b, f->slot, v->device, &f->known, NULL, &in, f->keys, 1, 0, err));
    f->known.yes = true;
    *R = f->known.on;
    return FAN_OK;
}

fan_status fan_slot_survey(fan_buffer *b, size_t slot, int64_t key, fan_error *err)
{
    fan_pass *p = b->slots[slot].p;
    fan_sum_stats *known = &p->known;
    const fan_array *sum = p->value.array;
    if (!b->known)
        return FAN_OK;
    if (away(&p->value)) {
        bool anew = !known->yes;
        if (!known->words)
            FAN_TRY(figures_for(p->value.device, p, sum->size, known, err));
        if (!known->captured)
            FAN_TRY(survey(b, slot, p->value.device, known, anew ? NULL : known->words, &(fan_operand){sum, sum->dtype},
                           &key, 1, 0, err));
        known->times = 0;
        known->yes = true;
        return FAN_OK;
    }
    fan_stats_of(sum, &known->stats);
    known->stats.bad = SIZE_MAX;
    known->times = 0;
    known->yes = true;
    if (known->stats.nonfinite && !known->bad) {
        known->bad = true;
        known->bad_key = key;
    }
    return FAN_OK;
}
