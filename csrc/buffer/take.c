/* take: what a consumer gets: finish each slot's sum, order the consumer's stream, empty all at the
 * end (S18, S19, S22, A14, D11, D21).
 *
 * Two paths, and each is read best from its last function on:
 *
 *   general   fan_buffer_take: 1. claim   2. gather   3. sum   4. order   5. hand over
 *   short     fan_plain_take: the same steps for slots that hold plain entries alone (plain.h)
 *
 * Before the steps of the general path: which memory meets which out=; after the short path: a
 * snapshot. */
#include "array/nditer.h"
#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/fold.h"
#include "buffer/plain.h"
#include "buffer/slot.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One slot's way through take. */
typedef struct take_slot {
    size_t slot;
    const fan_value *out; /* where the caller wants the sum; NULL: it has no out= */
    fan_stream *consumer; /* no hold; NULL: none */
    fan_gathered gathered;
    bool claimed, has_gathered;
    fan_take_plan plan;
    bool planned_again;       /* its plan was made again once no other slot could fail any more */
    bool out_overlaps_inputs; /* D11 */
    bool begun;               /* its fold has begun, and waits in the batch */
    bool ordered;             /* the consumer is, after it */
    fan_value result;
    fan_stream *ready;
    fan_event *ready_event;
    fan_sum_stats sum_stats;
} take_slot;

/* One take: the slots that it takes, and what their steps share. */
typedef struct take_op {
    fan_buffer *b;
    const fan_take *options;
    take_slot *slots;
    size_t n;
    fan_extents inputs, outs; /* which memory meets which out= (D11) */
    fan_batch *batch;         /* sums on streams, queued together; NULL: one by one */
} take_op;

/* ---- which memory meets which out= (D11) ---- */

static bool take_out_overlaps_inputs(const fan_extents *inputs, const fan_array *out, size_t slot)
{
    size_t at = inputs->n;
    while (at) {
        const fan_extent_entry *met = fan_extents_next(inputs, fan_extent_of(out), &at);
        if (!met)
            return false;
        bool own = met->owner == slot && met->flag;
        if (!own || !fan_array_same_view(out, met->array))
            return true;
    }
    return false;
}

static bool take_written_by_out(const fan_extents *outs, const fan_value *value)
{
    fan_array *own[3];
    size_t n;
    if (!outs->n)
        return false;
    fan_array *const *arrays = fan_value_arrays(value, own, &n);
    for (size_t i = 0; i < n; i++) {
        size_t at = outs->n;
        if (fan_extents_next(outs, fan_extent_of(arrays[i]), &at))
            return true;
    }
    return false;
}

/* Whether out= lies where one of the slot's own terms lies. */
static bool take_out_overlaps_own(const take_slot *part)
{
    const fan_fold *fold = &part->gathered.fold;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form != FAN_FORM_DENSE)
            continue;
        if (!fan_array_extents_disjoint(part->out->array, value->array))
            return true;
    }
    return false;
}

/* ---- 1. claim, and 2. gather: what the slots hold, checked against the call's options ---- */

/* take_scale_fits: whether the scale is one for sums of this dtype. */
static bool take_scale_fits(const fan_take *options, fan_dtype dtype)
{
    if (!options->scale.on || dtype == FAN_DT_NONE)
        return true;
    char kind = fan_dtype_kind(dtype);
    if (kind == 'c')
        return true;
    return options->real && (kind == 'f' || options->integral);
}

static fan_status take_check_out(const take_op *op, const take_slot *part, fan_error *err)
{
    const fan_buffer *b = op->b;
    const fan_slot *s = &b->slots[part->slot];
    const fan_slot_state *state = s->state;
    const fan_value *out = part->out;
    const fan_array *to = out->array;
    fan_place place = fan_slot_place(b, part->slot, -1);
    char has[160];
    char wants[160];

    const fan_fold *fold = &part->gathered.fold;
    const fan_value *any = fold->n ? fold->terms[0].v : part->gathered.zero;
    const int64_t *shape = NULL;
    int ndim = -1;
    if (any)
        ndim = fan_value_shape(any, &shape);
    if (fold->state && ndim < 0) {
        ndim = state->ndim;
        shape = state->shape;
    }
    if (ndim < 0 && !any)
        return FAN_OK;
    if (ndim < 0)
        return fan_fail_at(err, FAN_ERR_TYPE, 0, place, "sums objects; out= needs arrays");
    if (s->spec->has_shape) {
        ndim = s->spec->ndim;
        shape = s->spec->shape;
    }
    if (!fan_shape_same(ndim, shape, to->ndim, to->shape)) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place, "out= has shape %s, the sum %s",
                           fan_shape_text(to->ndim, to->shape, has, sizeof has),
                           fan_shape_text(ndim, shape, wants, sizeof wants));
    }
    fan_dtype dtype = fan_fold_dtype(fold);
    fan_dtype_set seen;
    fan_dtype_fit fit = fan_accum_dtype_fit(out->dtype, FAN_DT_NONE, dtype, false, &seen);
    if (dtype != FAN_DT_NONE && fit == FAN_DTYPE_FIT_NO) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place,
                           "out= of dtype %s cannot take a sum of dtype %s",
                           fan_dtype_name(out->dtype), fan_dtype_name(dtype));
    }
    if (state->device && out->device != state->device) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place, "out= is on %s, the sum on %s%s",
                           fan_device_text(out->device, has, sizeof has),
                           fan_device_text(state->device, wants, sizeof wants),
                           fan_device_of_another(out->device, state->device));
    }
    return FAN_OK;
}

static fan_status take_check_scale(const take_op *op, const take_slot *part, fan_error *err)
{
    const fan_take *options = op->options;
    const fan_scale *scale = &options->scale;
    fan_dtype dtype = fan_fold_dtype(&part->gathered.fold);
    if (take_scale_fits(options, dtype))
        return FAN_OK;
    fan_place place = fan_slot_place(op->b, part->slot, -1);
    const char *name = fan_dtype_name(dtype);
    const char *article = name[0] == 'i' ? "an" : "a";
    if (!options->real) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place,
                           "scale=%.12g%+.12gj: %s %s sum needs a real number", scale->re,
                           scale->im, article, name);
    }
    bool fits_int64 = scale->re < 0x1p63 && scale->re >= -0x1p63;
    return fan_fail_at(err, FAN_ERR_VALUE, 0, place, "scale=%.12g: %s %s sum needs an integer%s",
                       scale->re, article, name, fits_int64 ? "" : " that fits int64");
}

/* ---- weights that the take is given (W5), and the mean (W3) ---- */

static int late_by_key(const void *a, const void *b)
{
    const fan_late_weight *x = a;
    const fan_late_weight *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

static fan_late_weight *late_find(const fan_take *options, int64_t key)
{
    const fan_late_weight wanted = {.key = key};
    return bsearch(&wanted, options->late, options->nlate, sizeof wanted, late_by_key);
}

/* "key 3", or "the contribution at place 3" of a slot without keys. */
static const char *late_name(char *text, size_t size, bool keyed, int64_t key)
{
    snprintf(text, size, keyed ? "key %" PRId64 : "the contribution at place %" PRId64, key);
    return text;
}

/* Locked: W5: whether every contribution of the slot still waits. */
static fan_status late_check_parked(const fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    const fan_slot_state *state = s->state;
    char name[64];
    bool summed = s->list && s->list->summed;
    bool lost = state->count > (int64_t)fan_slot_entries(s);
    bool several = summed && (lost || s->list->summed > 1);
    bool folded = state->exact || several;
    if (folded) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, -1),
                           "weights= needs every contribution, and %s was summed already: make the "
                           "buffer with budget=math.inf, or give weight= at add (W5)",
                           late_name(name, sizeof name, state->keyed > 0, 0));
    }
    if (lost) {
        return fan_fail_at(
            err, FAN_ERR_VALUE, 0, fan_slot_place(b, slot, -1),
            "weights= by place of arrival needs defined contributions, and a None came "
            "without a key: give key= at add (W5)");
    }
    return FAN_OK;
}

/* The weight of the entry with this key, or at this place. */
static fan_status late_weight_of(const take_op *op, take_slot *part, size_t i, bool keyed,
                                 fan_weight_sum *sum, fan_error *err)
{
    const fan_buffer *b = op->b;
    fan_gathered *gathered = &part->gathered;
    fan_weight *own = &gathered->weights[i];
    int64_t key = keyed ? fan_entry_key(&gathered->entries[i]) : (int64_t)i;
    fan_late_weight *late = late_find(op->options, key);
    fan_place place = fan_slot_place(b, part->slot, -1);
    char name[64];
    (void)late_name(name, sizeof name, keyed, key);
    if (late)
        late->used = true;
    if (late && own->on) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place,
                           "%s has a weight in weights=, and came with one: give it once (W5)",
                           name);
    }
    if (!late && !own->on) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place, "weights= has no weight for %s (W5)",
                           name);
    }
    if (!late)
        return FAN_OK;
    *own = late->weight;
    fan_weight_sum_add(sum, own, false);
    return FAN_OK;
}

/* W5: the terms get the weights of the call, which are added to *sum. */
static fan_status late_apply(const take_op *op, take_slot *part, fan_weight_sum *sum,
                             fan_error *err)
{
    fan_buffer *b = op->b;
    fan_gathered *gathered = &part->gathered;
    fan_fold *fold = &gathered->fold;
    const fan_slot_state *state = b->slots[part->slot].state;
    bool keyed = state->keyed > 0;
    if (keyed && op->options->late_places) {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, part->slot, -1),
                           "weights= is a list, and the contributions have keys: give a dict from "
                           "keys to weights (W5)");
    }
    if (!gathered->weights)
        gathered->weights = fan_calloc((gathered->n + 1) * sizeof *gathered->weights);
    if (!gathered->weights)
        return fan_slot_fail_memory(b, part->slot, err);
    fan_slot_lock(b, part->slot);
    fan_status status = late_check_parked(b, part->slot, err);
    fan_slot_unlock(b, part->slot);
    FAN_TRY(status);
    for (size_t i = 0; i < gathered->n; i++)
        FAN_TRY(late_weight_of(op, part, i, keyed, sum, err));
    for (size_t i = 0; i < fold->n; i++) {
        fan_term *term = &fold->terms[i];
        const fan_weight *weight = &gathered->weights[term->entry];
        FAN_TRY(fan_weight_check_value(b, part->slot, term->key, weight, term->v, term->v->dtype,
                                       false, err));
        if (fan_weight_multiplies(weight))
            term->weight = *weight;
    }
    return FAN_OK;
}

/* W3: whether a mean can be taken of such a sum. */
static fan_status mean_check_dtype(const take_op *op, const take_slot *part, fan_error *err)
{
    const fan_fold *fold = &part->gathered.fold;
    fan_dtype dtype = fan_fold_dtype(fold);
    fan_place place = fan_slot_place(op->b, part->slot, -1);
    if (dtype == FAN_DT_NONE)
        return FAN_OK;
    char kind = fan_dtype_kind(dtype);
    if (kind != 'f' && kind != 'c') {
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place,
                           "mean=True: a mean of dtype %s would be cut to integers: convert the "
                           "gradients, or declare the slot's dtype (W4)",
                           fan_dtype_name(dtype));
    }
    bool sparse = false;
    for (size_t i = 0; i < fold->n; i++)
        sparse = sparse || fold->terms[i].v->form == FAN_FORM_SPARSE;
    if (sparse && fan_fold_is_exact(fold)) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0, place,
                           "mean=True: an exact mean takes dense gradients alone: give the dense "
                           "gradients, or another accumulate= (W4)");
    }
    return FAN_OK;
}

/* Weights of the call, and the divisor. The slot is claimed. */
static fan_status take_weigh(const take_op *op, take_slot *part, fan_error *err)
{
    const fan_take *options = op->options;
    fan_buffer *b = op->b;
    const fan_slot *s = &b->slots[part->slot];
    fan_gathered *gathered = &part->gathered;
    fan_weight_sum late = {.re = 0};
    if (fan_slot_weighted(s))
        late = s->weights->sum;
    if (options->late)
        FAN_TRY(late_apply(op, part, &late, err));
    fan_weight_sum over = {.re = 0};
    for (size_t i = 0; i < options->nover; i++) {
        const fan_weight one = {.on = true, .re = options->over[i]};
        fan_weight_sum_add(&over, &one, false);
    }
    bool some = gathered->fold.n || gathered->fold.state || gathered->zero;
    if (!options->mean || !some)
        return FAN_OK;
    FAN_TRY(mean_check_dtype(op, part, err));
    gathered->divisor = fan_alloc(sizeof *gathered->divisor);
    if (!gathered->divisor)
        return fan_slot_fail_memory(b, part->slot, err);
    if (options->over)
        return fan_divisor_of(b, part->slot, &over, 0, gathered->divisor, err);
    if (options->late) /* each has a weight */
        return fan_divisor_of(b, part->slot, &late, 0, gathered->divisor, err);
    return fan_slot_divisor(b, part->slot, gathered->divisor, err);
}

/* W5: each weight of the call is that of some contribution. */
static fan_status late_check_used(const take_op *op, fan_error *err)
{
    const fan_take *options = op->options;
    for (size_t i = 0; i < options->nlate; i++) {
        if (options->late[i].used)
            continue;
        fan_place place = fan_buffer_place(op->b);
        if (options->one)
            place = fan_slot_place(op->b, options->slot, -1);
        int64_t key = options->late[i].key;
        if (options->late_places) {
            return fan_fail_at(err, FAN_ERR_VALUE, 0, place,
                               "weights= has %zu weights, and nothing was added at place %" PRId64
                               " (W5)",
                               options->nlate, key);
        }
        return fan_fail_at(err, FAN_ERR_VALUE, 0, place,
                           "weights= has key %" PRId64 ", with which nothing was added (W5)", key);
    }
    return FAN_OK;
}

/* Locked: makes the slot busy, if it can be taken now. */
static fan_status take_claim(fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_slot *s = &b->slots[slot];
    FAN_TRY(fan_slot_in_target(b, slot, "take", err));
    FAN_TRY(fan_slot_claim_all(b, slot, true, "take", err));
    fan_status status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK && fan_slot_missing(s, 0) != 0) {
        char got[24];
        snprintf(got, sizeof got, "%" PRId64, s->state->count);
        status = fan_slot_fail_count(b, slot, -1, got, err);
    }
    if (status != FAN_OK)
        fan_slot_let_go(b, slot);
    return status;
}

static fan_status take_gather_slot(const take_op *op, take_slot *part, fan_error *err)
{
    fan_buffer *b = op->b;
    const fan_take *options = op->options;
    const fan_fold *fold = &part->gathered.fold;
    fan_slot_lock(b, part->slot);
    fan_status status = take_claim(b, part->slot, err);
    fan_slot_unlock(b, part->slot);
    FAN_TRY(status);
    part->claimed = true;

    /* The buffer's, unless it was redirected (S7); a slot of zeros alone has none. */
    part->consumer = options->stream;
    if (!part->consumer)
        part->consumer = b->slots[part->slot].state->consumer;
    if (!part->consumer)
        part->consumer = b->stream;
    FAN_TRY(fan_gather(b, part->slot, SIZE_MAX, true, &part->gathered, err));
    part->has_gathered = true;
    if (options->mean || options->late)
        FAN_TRY(take_weigh(op, part, err));

    bool arrays = options->scale.on || part->out;
    for (size_t i = 0; arrays && i < fold->n; i++) {
        if (fold->terms[i].v->form == FAN_FORM_OBJECT) {
            return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(b, part->slot, -1),
                               "sums objects; scale= and out= need arrays");
        }
    }
    FAN_TRY(take_check_scale(op, part, err));
    if (part->out)
        FAN_TRY(take_check_out(op, part, err));
    return fan_gathered_check(&part->gathered, err);
}

static void take_collect_inputs(take_op *op, const take_slot *part)
{
    const fan_fold *fold = &part->gathered.fold;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        bool dense = value->form == FAN_FORM_DENSE;
        fan_array *own[3];
        size_t n;
        fan_array *const *arrays = fan_value_arrays(value, own, &n);
        for (size_t k = 0; k < n; k++)
            fan_extents_put(&op->inputs, arrays[k], part->slot, dense);
    }
}

/* The extents of all inputs and of all outs, for a take with out= (D11). */
static fan_status take_collect_extents(take_op *op, fan_error *err)
{
    size_t most = 1;
    for (size_t i = 0; i < op->n; i++) {
        const fan_fold *fold = &op->slots[i].gathered.fold;
        most += 3 * fold->n;
        for (size_t k = 0; k < fold->n; k++)
            most += fold->terms[k].v->nparts;
    }
    op->inputs.all = fan_alloc(most * sizeof *op->inputs.all);
    op->outs.all = fan_alloc((op->n + 1) * sizeof *op->outs.all);
    if (!op->inputs.all || !op->outs.all)
        return fan_buffer_fail_memory(op->b, err);

    for (size_t i = 0; i < op->n; i++) {
        const take_slot *part = &op->slots[i];
        if (part->out)
            fan_extents_put(&op->outs, part->out->array, part->slot, true);
        take_collect_inputs(op, part);
    }
    fan_extents_sort(&op->inputs);
    fan_extents_sort(&op->outs);
    const fan_extent_entry *one, *two;
    if (fan_extents_any_pair(&op->outs, &one, &two)) {
        size_t low = one->owner;
        size_t high = two->owner;
        if (low > high) {
            low = two->owner;
            high = one->owner;
        }
        return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_buffer_place(op->b),
                           "out= of slots %zu and %zu may share memory", low, high);
    }
    for (size_t i = 0; i < op->n; i++) {
        take_slot *part = &op->slots[i];
        if (part->out) {
            part->out_overlaps_inputs =
                take_out_overlaps_inputs(&op->inputs, part->out->array, part->slot);
        }
    }
    return FAN_OK;
}

static fan_status take_gather(take_op *op, fan_error *err)
{
    for (size_t i = 0; i < op->n; i++)
        FAN_TRY(take_gather_slot(op, &op->slots[i], err));
    if (op->options->late)
        FAN_TRY(late_check_used(op, err));
    if (!op->options->out)
        return FAN_OK;
    return take_collect_extents(op, err);
}

/* ---- 3. sum: planned (A14, D11, D21), then made ---- */

/* D13: a slot fed only zeros gives the first one, or one of the sum's dtype and the declared
 * shape. */
static fan_status take_zeros(fan_buffer *b, size_t slot, const fan_value *zero, fan_dtype sum,
                             fan_value *out, fan_error *err)
{
    const fan_slot_spec *spec = b->slots[slot].spec;
    const fan_array *array = zero->array;
    int ndim = array->ndim;
    const int64_t *shape = array->shape;
    if (spec->has_shape) {
        ndim = spec->ndim;
        shape = spec->shape;
    }
    if (zero->dtype == sum && fan_shape_same(ndim, shape, array->ndim, array->shape))
        return fan_value_copy(b->frontend, zero, out, err);
    fan_array *one = NULL;
    fan_array *whole = NULL;
    FAN_TRY(fan_array_new(sum, 0, NULL, NULL, &one, err));
    fan_fill_zero(one);
    fan_status status = fan_array_broadcast(one, ndim, shape, &whole, err);
    fan_array_drop(one);
    FAN_TRY(status);
    *out = (fan_value){.form = FAN_FORM_ZERO, .dtype = sum, .origin = zero->origin, .array = whole};
    return FAN_OK;
}

/* Takes over the result of the fold. */
static fan_status take_end_fold(const take_op *op, take_slot *part, fan_error *err)
{
    fan_slot_state *state = op->b->slots[part->slot].state;
    fan_gathered *gathered = &part->gathered;
    fan_fold *fold = &gathered->fold;
    part->begun = false;
    if (part->plan.way == FAN_TAKE_COMMIT) {
        FAN_TRY(fan_fold_commit_end(op->b, part->slot, gathered, err));
        const fan_item *sum = gathered->sum;
        part->ready = fan_stream_hold(sum->producer);
        part->ready_event = fan_event_hold(sum->event);
        part->sum_stats = fan_sum_stats_hold(&state->sum_stats);
        return fan_value_copy(op->b->frontend, &sum->value, &part->result, err);
    }
    FAN_TRY(fan_fold_end(fold, err));
    part->sum_stats = fan_sum_stats_move(&fold->sum_stats);
    part->result = fold->result;
    fold->result = fan_value_none();
    part->ready = fold->ready;
    fold->ready = NULL;
    part->ready_event = fold->ready_event;
    fold->ready_event = NULL;
    state->rules |= fold->rules;
    return FAN_OK;
}

/* Ends the folds of slots [from, to) that are in the batch; `failed`: some slot did, and nothing
 * more is queued. A slot whose sum was not queued is as it was. */
static fan_status take_end_folds(const take_op *op, size_t from, size_t to, bool failed,
                                 fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    if (!op->batch)
        return FAN_OK;
    if (!failed && !FAN_FAULT(BATCH_LATE))
        fan_batch_flush(op->batch);
    for (size_t i = from; i < to; i++) {
        take_slot *part = &op->slots[i];
        fan_fold *fold = &part->gathered.fold;
        fan_error *first = status == FAN_OK ? err : &other;
        if (!part->begun)
            continue;
        if (fan_fold_left(fold)) {
            fan_fold_abandon(fold);
            part->begun = false;
            continue;
        }
        fan_status its = take_end_fold(op, part, first);
        fan_slot_fail(op->b, part->slot, its, first);
        if (status == FAN_OK)
            status = its;
    }
    if (!failed && FAN_FAULT(BATCH_LATE))
        fan_batch_flush(op->batch);
    if (status == FAN_OK)
        status = fan_batch_failure(op->batch, err);
    fan_batch_clear(op->batch);
    return status;
}

static fan_status take_fold(const take_op *op, take_slot *part, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    if (op->batch && fan_fold_batches(fold)) {
        FAN_TRY(fan_fold_begin(fold, op->batch, err));
        part->begun = true;
        return FAN_OK;
    }
    if (op->batch)
        fan_batch_flush(op->batch); /* the device's order is that of the slots */
    FAN_TRY(fan_fold_begin(fold, NULL, err));
    return take_end_fold(op, part, err);
}

/* Whether no key is missing: nothing but the entries of the sum comes before the last of them. */
static bool take_has_all_keys(const take_op *op, const take_slot *part)
{
    const fan_slot_state *state = op->b->slots[part->slot].state;
    const fan_gathered *gathered = &part->gathered;
    size_t n = gathered->n - gathered->has_sum;
    if (state->keyed < 0 || n == 0)
        return true;
    uint64_t last = (uint64_t)fan_entry_key(&gathered->entries[gathered->n - 1]);
    return fan_keys_whole(state->next_key, last, n);
}

/* Reads the slot. Changes nothing. `last`: no other slot is left that could fail. */
static fan_take_facts take_facts(const take_op *op, const take_slot *part, bool last)
{
    const fan_buffer *b = op->b;
    const fan_slot *s = &b->slots[part->slot];
    const fan_take *options = op->options;
    const fan_gathered *gathered = &part->gathered;
    const fan_fold *fold = &gathered->fold;
    fan_dtype sum = fan_fold_dtype(fold);
    fan_take_facts facts = {.terms = fold->n,
                            .has_state = fold->state,
                            .has_zero = gathered->zero,
                            .has_out = part->out,
                            .out_overlaps_inputs = part->out_overlaps_inputs,
                            .stats = b->sum_stats,
                            .scaled = options->scale.on || gathered->divisor,
                            .writable = options->writable,
                            .exact = fan_fold_is_exact(fold),
                            .takes_partial = s->spec->partial,
                            .expanded = fan_fold_expanded(fold),
                            .whole = take_has_all_keys(op, part),
                            .alone = op->n == 1,
                            .last = last};
    for (size_t i = 0; i < fold->n; i++) {
        fan_form form = fold->terms[i].v->form;
        facts.dense += form == FAN_FORM_DENSE;
        facts.sparse += form == FAN_FORM_SPARSE;
        facts.partial += form == FAN_FORM_PARTIAL;
        facts.objects += form == FAN_FORM_OBJECT;
    }
    if (!facts.objects)
        facts.widened = fan_accum_dtype(sum, s->spec->accumulate) != sum;
    if (facts.has_out && facts.stats)
        facts.out_overlaps_own = take_out_overlaps_own(part);
    if (!fold->n)
        return facts;

    const fan_term *first = &fold->terms[0];
    const fan_value *value = first->v;
    /* a lone term with a weight becomes another array; a sum with weights of the call does not stay
     * in the slot, should another slot fail */
    bool product = fold->n == 1 && first->weight.on;
    bool weighed = fold->n > 1 && options->late;
    facts.scaled = facts.scaled || product || weighed;
    facts.first_donated = first->donated;
    facts.same_dtype = value->dtype == sum;
    facts.summed = fan_term_is_sum(fold, first);
    if (value->form == FAN_FORM_SPARSE && !FAN_FAULT(SUM_LEFT_LOOSE))
        facts.loose = !value->sparse->coalesced;
    if (fold->n > 1)
        return facts;

    facts.writable = facts.writable || fan_is_lent(b, NULL, value);
    if (facts.has_out || facts.scaled)
        return facts;
    facts.overwritten = take_written_by_out(&op->outs, value);
    if (facts.writable && !facts.objects)
        facts.reuse = fan_term_may_write(fold, 0, FAN_WRITER_TAKER);
    return facts;
}

/* A14. With stats, on a device with streams, it is measured on A first, and is ready there then. */
static fan_status take_hand(const take_op *op, take_slot *part, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    const fan_term *only = &fold->terms[0];
    fan_stream *R = NULL;
    if (fan_fold_first_suspect(fold)) {
        part->sum_stats = fan_sum_stats_hold(&fan_fold_slot(fold)->state->sum_stats);
    } else {
        FAN_TRY(fan_fold_measure_term(fold, &R, err));
        part->sum_stats = fan_sum_stats_move(&fold->sum_stats);
    }
    if (R) {
        part->ready = fan_stream_hold(R);
    } else {
        part->ready = fan_stream_hold(only->producer);
        part->ready_event = fan_event_hold(only->event);
    }
    return fan_value_copy(op->b->frontend, only->v, &part->result, err);
}

/* The sum is handed out: scaled, or the mean. */
static void take_finish(const take_op *op, take_slot *part)
{
    fan_fold *fold = &part->gathered.fold;
    fold->finish = true;
    fold->take = op->options;
    fold->scale = op->options->scale;
    fold->scale.divisor = part->gathered.divisor;
}

/* Does what the plan says. */
static fan_status take_carry_out(const take_op *op, take_slot *part, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    switch (part->plan.way) {
    case FAN_TAKE_ZERO:
        return take_zeros(op->b, part->slot, part->gathered.zero, fan_fold_dtype(fold),
                          &part->result, err);
    case FAN_TAKE_HAND:
        return take_hand(op, part, err);
    case FAN_TAKE_FINISH:
        take_finish(op, part);
        if (part->out)
            fold->finish_dtype = part->out->dtype;
        return take_fold(op, part, err);
    case FAN_TAKE_COMMIT:
        return take_fold(op, part, err);
    case FAN_TAKE_LATE:
        part->planned_again = true;
        return FAN_OK;
    default:
        return FAN_OK;
    }
}

static fan_status take_plan_and_sum(const take_op *op, take_slot *part, bool last, fan_error *err)
{
    fan_gathered *gathered = &part->gathered;
    fan_slot_state *state = op->b->slots[part->slot].state;
    FAN_TRY(fan_gathered_weigh(gathered, err));
    fan_take_facts facts = take_facts(op, part, last);
    part->plan = fan_plan_take(&facts);
    gathered->fold.taker = part->consumer;
    if (part->plan.rules) /* a slot without any may have the state that is only read */
        state->rules |= part->plan.rules;
    if (part->plan.counts)
        FAN_COUNT(op->b, copies, 1);
    return take_carry_out(op, part, err);
}

/* ---- 4. order: the consumer's stream, the copies into out=, what is measured ---- */

/* The stream that writes a sum into `out` (a hold): A, where the sum was made. A slot that was fed
 * symbolic zeros alone has no A: then the stream of the taker, or the current stream of the
 * device. */
static fan_stream *take_writer(const fan_slot_state *state, const fan_fold *fold,
                               const fan_value *out)
{
    if (state->accum || !out->device->backend->has_streams)
        return fan_stream_hold(state->accum);
    if (fold->taker && fold->taker->device == out->device)
        return fan_stream_hold(fold->taker);
    return fan_stream_current(out->device);
}

/* A sum that is there already goes into out: copied, or, if it is sparse, its entries over
 * zeros. */
static fan_status take_copy_into_out(const take_op *op, const take_slot *part, fan_stream *A,
                                     fan_error *err)
{
    const fan_value *out = part->out;
    fan_operand one = {.array = part->result.array, .acc = out->dtype};
    fan_job job = {.out = out->array};
    FAN_COUNT(op->b, copies, 1);
    FAN_COUNT(op->b, passes, 1);
    if (part->result.form == FAN_FORM_DENSE) {
        job.kind = FAN_JOB_COPY;
        job.in = &one;
        job.n = 1;
        job.label = "copy";
        return fan_device_run(out->device, A, &job, err);
    }
    job.kind = FAN_JOB_ZERO;
    job.label = "fill";
    FAN_TRY(fan_device_run(out->device, A, &job, err));
    if (part->result.form != FAN_FORM_SPARSE)
        return FAN_OK;
    job.kind = FAN_JOB_SCATTER;
    job.sparse = part->result.sparse;
    job.label = "scatter";
    return fan_device_run(out->device, A, &job, err);
}

/* S22, for a copy that runs on `on`; *plan orders others after it. */
static fan_status take_order_copy(const take_op *op, take_slot *part, fan_stream *on,
                                  fan_sync_fold *plan, fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    const fan_slot_state *state = op->b->slots[part->slot].state;
    if (!on && part->out->device->backend->has_streams)
        return fan_buffer_fail_memory(op->b, err);
    if (on)
        FAN_TRY(fan_order_consumer(fold->taker, on, NULL, &fold->taker, err));
    fan_stream_id id = fan_stream_id_of(on);
    fan_sync_slot slot = {.consumer = id, .accum = id, .ready = id};
    if (state->accum)
        slot.consumer = fan_stream_id_of(state->consumer);
    *plan = fan_sync_finish_plan(slot, true, fan_stream_id_of(fold->taker));
    fold->out = part->out;
    return fan_order_wait_taker(fold, on, plan, err);
}

/* The sum goes into its out=, which is the result from then on. */
static fan_status take_copy_out(const take_op *op, take_slot *part, fan_error *err)
{
    fan_buffer *b = op->b;
    fan_slot_state *state = b->slots[part->slot].state;
    fan_value sum = part->result;
    fan_sync_fold plan = {.rules = 0};
    fan_stream *on = take_writer(state, &part->gathered.fold, part->out);
    fan_status status = take_order_copy(op, part, on, &plan, err);
    if (status == FAN_OK)
        status = take_copy_into_out(op, part, on, err);
    fan_stream_drop(part->ready);
    part->ready = on;
    FAN_TRY(status);
    state->rules |= plan.rules;
    fan_event_drop(part->ready_event);
    part->ready_event = NULL;
    if (plan.slot.has_event)
        FAN_TRY(fan_order_record(b, on, FAN_PLAN_S22_RECORD, &part->ready_event, err));
    part->result = fan_value_none();
    fan_value_drop(b->frontend, &sum);
    return fan_value_copy(b->frontend, part->out, &part->result, err);
}

/* With stats: what the sum's own pass has not measured. A sum that is undefined or no array has
 * UINT64_MAX elements; zeros that went into an out are zeros. */
static fan_status take_measure(const take_op *op, take_slot *part, bool sparse_into_out,
                               fan_error *err)
{
    const fan_sum_stats *running = &op->b->slots[part->slot].state->sum_stats;
    fan_fold *fold = &part->gathered.fold;
    const fan_value *result = &part->result;
    /* They are those of all elements of out, not of the stored ones. On the host nothing may fail
     * any more. */
    if (sparse_into_out) {
        if (part->out->device->backend->has_streams)
            fan_sum_stats_drop(&part->sum_stats);
        else
            fan_sum_stats_of_out(op->b, part->out->array, &part->sum_stats);
    }
    if (result->form == FAN_FORM_UNDEFINED || result->form == FAN_FORM_OBJECT) {
        fan_sum_stats_drop(&part->sum_stats);
        part->sum_stats = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
        return FAN_OK;
    }
    bool zeros = fold->n == 0 && !fold->state;
    if (zeros && part->plan.copy_out && !part->sum_stats.valid) {
        part->sum_stats = (fan_sum_stats){.valid = true, .stats = {.bad = SIZE_MAX}};
        part->sum_stats.stats.count = (uint64_t)result->array->size;
        return FAN_OK;
    }
    fold->sum_stats = fan_sum_stats_move(&part->sum_stats);
    FAN_TRY(fan_fold_collect_stats(fold, result, err));
    part->sum_stats = fan_sum_stats_move(&fold->sum_stats);
    if (running->has_nonfinite)
        fan_sum_stats_blame(&part->sum_stats, running->nonfinite_key);
    return FAN_OK;
}

static fan_status take_order(const take_op *op, take_slot *part, fan_error *err)
{
    fan_slot_state *state = op->b->slots[part->slot].state;
    if (part->ordered)
        return FAN_OK;
    part->ordered = true;
    bool sparse_into_out = part->plan.copy_out && part->result.form == FAN_FORM_SPARSE;
    if (part->plan.copy_out)
        FAN_TRY(take_copy_out(op, part, err));
    if (part->result.form != FAN_FORM_UNDEFINED) {
        FAN_TRY(fan_order_hand_over(op->b, part->slot, &part->result, part->ready,
                                    part->ready_event, part->consumer, &state->rules, err));
    }
    if (!op->b->sum_stats)
        return FAN_OK;
    return take_measure(op, part, sparse_into_out, err);
}

/* ---- the steps of a take ---- */

typedef enum take_step {
    TAKE_SUM,
    /* nothing but these sums can fail any more: they write into donated terms */
    TAKE_SUM_LATE,
    /* sums without `out`, before any out is written: to show one to the user may fail */
    TAKE_ORDER_RETURNED,
    /* on the CPU nothing is allocated here: either all outs are written or none */
    TAKE_WRITE_OUT,
    TAKE_ORDER /* the others, and the copies into `out` */
} take_step;

static fan_status take_step_of_slot(const take_op *op, take_slot *part, take_step step,
                                    fan_error *err)
{
    fan_fold *fold = &part->gathered.fold;
    switch (step) {
    case TAKE_SUM:
        return take_plan_and_sum(op, part, false, err);
    case TAKE_SUM_LATE:
        if (!part->planned_again)
            return FAN_OK;
        return take_plan_and_sum(op, part, true, err);
    case TAKE_ORDER_RETURNED:
        if (part->out)
            return FAN_OK;
        return take_order(op, part, err);
    case TAKE_WRITE_OUT:
        if (part->plan.way != FAN_TAKE_INTO_OUT)
            return FAN_OK;
        take_finish(op, part);
        fold->out = part->out;
        return take_fold(op, part, err);
    default:
        return take_order(op, part, err);
    }
}

/* One step, for every slot before the next step begins. The sums that it put into the batch are
 * ended after it. */
static fan_status take_each_slot(const take_op *op, take_step step, fan_error *err)
{
    fan_error other;
    fan_status status = FAN_OK;
    size_t ended = 0;
    for (size_t i = 0; i < op->n && status == FAN_OK; i++) {
        take_slot *part = &op->slots[i];
        status = take_step_of_slot(op, part, step, err);
        fan_slot_fail(op->b, part->slot, status, err);
        bool full = op->batch && fan_batch_bytes(op->batch) >= FAN_BATCH_BYTES;
        if (status == FAN_OK && full) {
            status = take_end_folds(op, ended, i + 1, false, err);
            ended = i + 1;
        }
    }
    if (status == FAN_OK)
        return take_end_folds(op, ended, op->n, false, err);
    (void)take_end_folds(op, ended, op->n, true, &other);
    return status;
}

static void take_name_origin(take_slot *part)
{
    if (part->result.form == FAN_FORM_UNDEFINED || part->result.form == FAN_FORM_ZERO)
        return;
    part->result.origin = part->gathered.like.origin;
    part->result.rank = part->gathered.like.rank;
}

/* The user may keep a sum that was shown, even if the take then fails because of another slot: so
 * what stays in the slot is not written any more. */
static void take_expose(const fan_slot *s)
{
    for (size_t k = 0; k < fan_slot_entries(s); k++) {
        fan_entry *one = &s->list->entries[k];
        if (!one->general) {
            one->exposed = true;
            one->donated = false;
            continue;
        }
        fan_item *item = one->item;
        item->exposed = true;
        item->shown = true;
        if (item->donated) /* the promise was one until the take */
            fan_value_returned(&item->value);
        item->donated = false;
    }
}

static fan_status take_show(const take_op *op, fan_error *err)
{
    const fan_take *options = op->options;
    if (!options->show)
        return FAN_OK;
    for (size_t i = 0; i < op->n; i++) {
        take_slot *part = &op->slots[i];
        bool written = part->plan.way == FAN_TAKE_INTO_OUT || part->plan.copy_out;
        if (!part->out) {
            take_expose(&op->b->slots[part->slot]);
            take_name_origin(part);
            FAN_TRY(options->show(options->ctx, i, &part->result, err));
        } else if (written) {
            FAN_TRY(options->show(options->ctx, i, NULL, err));
        }
    }
    return FAN_OK;
}

/* A sum of objects has run others' code: checks that each `out` still lies where it lay. */
static fan_status take_check_outs_unmoved(const take_op *op, fan_error *err)
{
    for (size_t i = 0; i < op->n; i++) {
        const take_slot *part = &op->slots[i];
        if (part->out && !fan_value_unmoved(op->b, part->out)) {
            return fan_fail_at(err, FAN_ERR_STATE, 0, fan_slot_place(op->b, part->slot, -1),
                               "the memory, dtype or shape of out= was changed during the take");
        }
    }
    return FAN_OK;
}

/* Sums on streams are queued together, where there are several. */
static fan_status take_begin_batch(take_op *op, fan_error *err)
{
    bool streams = false;
    for (size_t i = 0; i < op->n; i++)
        streams |= op->b->slots[op->slots[i].slot].state->accum != NULL;
    if (!streams || op->n == 1 || op->b->sum_stats)
        return FAN_OK;
    op->batch = fan_batch_new();
    if (!op->batch)
        return fan_buffer_fail_memory(op->b, err);
    return FAN_OK;
}

/* Order: 1. all sums; 2. sums written straight into `out`; 3. copies into `out`. An `out` may alias
 * an input of another slot, so nothing is written while an input is still unread. */
static fan_status take_all(take_op *op, fan_error *err)
{
    fan_status status = FAN_OK;
    bool late = false;
    FAN_TRY(take_begin_batch(op, err));
    FAN_GO(take_each_slot(op, TAKE_SUM, err));
    for (size_t i = 0; i < op->n; i++)
        late |= op->slots[i].planned_again;
    if (late)
        FAN_GO(take_each_slot(op, TAKE_SUM_LATE, err));
    for (size_t i = 0; late && i < op->n; i++)
        op->slots[i].gathered.fold.may_end = false;
    FAN_GO(take_each_slot(op, TAKE_ORDER_RETURNED, err));
    FAN_GO(take_show(op, err));
    FAN_GO(take_check_outs_unmoved(op, err));
    if (op->options->out) {
        FAN_GO(take_each_slot(op, TAKE_WRITE_OUT, err));
        status = take_each_slot(op, TAKE_ORDER, err);
    }
done:
    fan_batch_free(op->batch);
    return status;
}

/* ---- 5. hand over: the slots are empty and free ---- */

static void take_trace(const take_op *op, const take_slot *part)
{
    const fan_slot *s = &op->b->slots[part->slot];
    const fan_slot_state *state = s->state;
    fan_stream *consumer = part->consumer;
    const fan_device *d = consumer ? consumer->device : state->device;
    fan_trace_line line = {.kind = FAN_TRACE_TAKE,
                           .how = fan_slot_letter(s),
                           .device = fan_device_number(d),
                           .count = (uint32_t)state->count,
                           .key = -1,
                           .rules = state->rules,
                           .stream = fan_stream_handle(consumer),
                           .bytes = fan_value_bytes(&part->result)};
    fan_slot_trace(op->b, part->slot, line);
    fan_slot_digest(op->b, part->slot, &part->result, FAN_DIGEST_OF_SUM, NULL, part->consumer);
}

/* Cannot fail: lets the slot go; empty, if the take was `good`: what it held is returned, for
 * fan_slot_state_free. */
static fan_slot_state *take_commit(const take_op *op, take_slot *part, bool good)
{
    fan_buffer *b = op->b;
    fan_slot_state *gone = NULL;
    if (good && fan_trace_on() && part->result.form != FAN_FORM_UNDEFINED)
        take_trace(op, part);
    fan_slot_lock(b, part->slot);
    if (good)
        gone = fan_slot_cut(b, &b->slots[part->slot]);
    if (good && b->sum_stats) {
        fan_sum_stats old = b->sum_stats[part->slot];
        b->sum_stats[part->slot] = part->sum_stats;
        part->sum_stats = old;
    }
    fan_slot_let_go(b, part->slot);
    fan_slot_unlock(b, part->slot);
    return gone;
}

/* Drops what the way through the take held, and what was in the slot. */
static void take_end_slot(const take_op *op, take_slot *part, fan_slot_state *gone)
{
    fan_value_drop(op->b->frontend, &part->result);
    fan_sum_stats_drop(&part->sum_stats);
    fan_stream_drop(part->ready);
    fan_event_drop(part->ready_event);
    if (part->has_gathered)
        fan_gathered_fini(&part->gathered);
    /* the consumer has waited for what was pooled */
    if (gone && gone != &fan_slot_state_none) {
        fan_stream_drop(gone->capture_origin);
        gone->capture_origin = NULL;
    }
    fan_slot_state_free(op->b, gone);
}

fan_status fan_buffer_take(fan_buffer *b, const fan_take *options, fan_value *results,
                           fan_error *err)
{
    FAN_TRY(fan_buffer_check_fork(b, err));
    if (options->one)
        FAN_TRY(fan_slot_check(b, options->slot, err));
    take_op op = {.b = b, .options = options, .n = options->one ? 1 : b->nslots};
    op.slots = fan_calloc((op.n + 1) * sizeof *op.slots);
    fan_slot_state **gone = fan_calloc((op.n + 1) * sizeof *gone);
    if (!op.slots || !gone) {
        fan_free(op.slots);
        fan_free(gone);
        return fan_buffer_fail_memory(b, err);
    }
    for (size_t i = 0; i < op.n; i++) {
        take_slot *part = &op.slots[i];
        part->slot = options->one ? options->slot : i;
        if (options->out && options->out[i].form == FAN_FORM_DENSE)
            part->out = &options->out[i];
    }
    fan_status status = take_gather(&op, err);
    if (status == FAN_OK)
        status = take_all(&op, err);
    fan_free(op.inputs.all);
    fan_free(op.outs.all);

    bool good = status == FAN_OK;
    for (size_t i = 0; i < op.n && op.slots[i].claimed; i++)
        gone[i] = take_commit(&op, &op.slots[i], good);
    for (size_t i = 0; i < op.n; i++) {
        take_slot *part = &op.slots[i];
        if (good) {
            take_name_origin(part);
            results[i] = part->result;
            part->result = fan_value_none();
        }
        take_end_slot(&op, part, gone[i]);
    }
    fan_free(op.slots);
    fan_free(gone);
    return status;
}

/* ---- slots that hold plain entries alone (plain.h): the constant plan ---- */

#define TAKE_AHEAD 8
#define TAKE_FEW_OUTS 8
#define TAKE_FAR 500 /* slots that no near cache holds */

/* What divides a sum, as one number of the parts of its accumulation dtype. */
typedef struct take_divisor {
    _Alignas(8) char number[8];
} take_divisor;

/* One take of such slots. */
typedef struct take_plain {
    fan_buffer *b;
    fan_span span;
    const fan_take *options;
    const fan_plain_outs *outs;
    void **results;
    fan_flat inline_outs[TAKE_FEW_OUTS], *written; /* the arrays of the caller's that are written */
    /* of each slot: the caller named an array for its sum */
    bool inline_given[TAKE_FEW_OUTS], *given;
    size_t nwritten;
    take_divisor inline_divisor, *divisors; /* of a mean: of each slot */
    void *scratch;                          /* for the sum that needs the most of it; owned */
    size_t nscratch;
    _Alignas(16) char number[16]; /* a sum of numbers, before it is made an object */
    bool calls;                   /* some entries are of a kind that is checked at use */
    bool announce; /* some of the arrays that are written are of a library that counts writes */
} take_plain;

static fan_list *take_list(const fan_buffer *b, size_t slot)
{
    return b->slots[slot].list;
}

/* take_defined: the entries of a slot's sum; 0: it is undefined. */
static size_t take_defined(const fan_list *list)
{
    if (!list)
        return 0;
    return fan_list_defined(list);
}

static const fan_scale *take_scale(const fan_take *options)
{
    if (!options->scale.on)
        return NULL;
    return &options->scale;
}

/* take_plain_scales: whether sums of dtype d are scaled here. The general path reports what is
 * wrong with a scale. */
static bool take_plain_scales(const fan_take *options, fan_dtype d, fan_dtype acc)
{
    if (!take_scale_fits(options, d))
        return false;
    bool complex_wider = fan_dtype_kind(d) == 'c' && acc != d;
    return !complex_wider && fan_scale_dtype(&options->scale, acc) == acc;
}

/* take_plain_few: whether a slot has a few small arrays of one kind, or a small wide sum, and
 * nothing else. */
static bool take_plain_few(const fan_buffer *b, const fan_list *list)
{
    const fan_plain_kind *kind = &list->kind;
    bool followed = list->entries[0].wide && list->n > 1;
    if (list->undefined || followed || b->sum_stats)
        return false;
    if (list->n > FAN_PLAIN_TERMS || list->size > FAN_PLAIN_BYTES)
        return false;
    return !kind->scalar && !fan_plain_pitch(kind);
}

/* take_plain_weighs: whether a slot with weights is summed here: a few small arrays of one kind. A
 * lone one whose weight is 1 is handed through, by the general path. */
static bool take_plain_weighs(const fan_buffer *b, const fan_slot *s)
{
    const fan_list *list = s->list;
    if (fan_slot_has_state(s) || !list || !s->weights->n)
        return false;
    if (list->n == 1 && !fan_weight_multiplies(&s->weights->plain[0].weight))
        return false;
    return !list->entries[0].wide && take_plain_few(b, list);
}

/* take_plain_fits: whether weights and the mean of a slot are no affair of the general path. */
static bool take_plain_fits(const fan_buffer *b, size_t slot, const fan_take *options)
{
    const fan_slot *s = &b->slots[slot];
    if (fan_slot_weighted(s))
        return take_plain_weighs(b, s);
    if (!options->mean || fan_slot_has_state(s) || !take_defined(s->list))
        return true;
    return take_plain_few(b, s->list);
}

/* 1. claim. False: the slot holds something else, or lacks a contribution. */
static bool take_plain_claim_slot(fan_buffer *b, size_t slot, const fan_take *options)
{
    fan_slot *s = &b->slots[slot];
    fan_list *list = s->list;
    if (fan_slot_has_state(s) || s->busy || s->targets)
        return false;
    if (fan_plain_stats_on_device(b, slot) || fan_slot_missing(s, 0) != 0)
        return false;
    if (list && list->n) {
        bool scaled = options->scale.on && fan_list_defined(list);
        if (scaled && !take_plain_scales(options, list->kind.dtype, fan_plain_accum(b, slot)))
            return false;
        fan_list_sort(list);
        if (list->undefined)
            fan_list_undefined_last(list);
    }
    fan_plain_claim(s);
    return true;
}

static void take_plain_give_back(fan_buffer *b, fan_span span)
{
    for (size_t i = span.first; i < span.end; i++) {
        fan_list *list = take_list(b, i);
        if (list && list->undefined && list->entries[0].key >= 0)
            fan_list_by_key(list);
    }
    fan_plain_release(b, span);
}

/* take_stays_in_int64: of a sum of Python ints. */
static bool take_stays_in_int64(const fan_list *list, const fan_take *options)
{
    fan_int_run run = {.sum = 0};
    for (size_t k = 0; k < fan_list_defined(list); k++) {
        const char *data = fan_entry_data(&list->kind, &list->entries[k]);
        (void)fan_int_run_put(&run, list->kind.dtype, data);
    }
    return !options->scale.on && !fan_int_run_leaves(&run, NULL, NULL, list->kind.dtype);
}

/* take_fetch: prefetches what belongs to the entries of a slot TAKE_AHEAD of this one. */
static void take_fetch(const take_plain *take, size_t slot, bool memory)
{
    size_t at = slot + TAKE_AHEAD;
    if (at >= take->span.end)
        at = slot;
    const fan_list *list = take_list(take->b, at);
    fan_plain_prefetch(take->b, slot + 2 * TAKE_AHEAD);
    for (size_t k = 0; k < take_defined(list); k++) {
        const fan_entry *one = &list->entries[k];
        if (memory)
            __builtin_prefetch(one->data);
        else
            __builtin_prefetch(one->object);
    }
}

/* take_keys_whole: no key is missing (A15). */
static bool take_keys_whole(const fan_list *list)
{
    const fan_entry *entries = list->entries;
    if (fan_list_keyed(list) < 0)
        return true;
    /* the undefined ones are behind the others */
    int64_t last = entries[fan_list_defined(list) - 1].key;
    if (last < entries[list->n - 1].key)
        last = entries[list->n - 1].key;
    return fan_keys_whole(fan_list_next_key(list), (uint64_t)last, fan_list_parked(list));
}

/* 2. gather: how the sum of a slot reaches its taker (A14). */
static inline fan_take_way take_plain_way(const fan_buffer *b, size_t slot, const fan_take *options,
                                          size_t n, fan_dtype acc, bool weighted)
{
    const fan_list *list = b->slots[slot].list;
    const fan_entry *first = &list->entries[0];
    bool product = weighted && n == 1;
    bool scaled = options->scale.on || product;
    bool whole = n == 1 || take_keys_whole(list);
    fan_take_facts facts = {.terms = n,
                            .dense = n,
                            .scaled = scaled,
                            .writable = options->writable,
                            .widened = acc != list->kind.dtype,
                            .whole = whole,
                            .alone = options->one || b->nslots == 1,
                            .first_donated = first->donated,
                            .same_dtype = !first->wide};
    if (n == 1 && !facts.writable)
        facts.writable = fan_is_lent(b, first->object, NULL);
    if (n == 1 && facts.writable)
        facts.reuse = fan_plain_may_write(b, slot, 1, list->kind.dtype);
    return fan_plan_take(&facts).way;
}

/* What the sum is written into, or is already: the first entry, or a fresh one, whose hold is the
 * caller's; and list->out. NULL: it is for the general path. */
static inline void *take_plain_place(const fan_buffer *b, size_t slot, const fan_take *options,
                                     size_t n, fan_dtype acc, bool weighted)
{
    fan_list *list = b->slots[slot].list;
    fan_take_way way = take_plain_way(b, slot, options, n, acc, weighted);
    list->out = NULL;
    if (way == FAN_TAKE_HAND)
        return list->entries[0].object;
    /* Nothing fails once a donated one is written (FAN_TAKE_LATE). */
    bool reuse = way == FAN_TAKE_COMMIT || way == FAN_TAKE_LATE;
    return fan_plain_place(b, slot, n, acc, reuse, &list->out);
}

/* The sum of numbers, as a number with the caller's hold. */
static void *take_plain_number(take_plain *take, size_t slot, size_t n, fan_dtype acc)
{
    fan_list *list = take_list(take->b, slot);
    const fan_plain_frontend *plain = take->b->frontend->plain;
    if (take_plain_way(take->b, slot, take->options, n, acc, false) == FAN_TAKE_HAND) {
        void *only = list->entries[0].object;
        list->out = NULL;
        plain->hold(only);
        return only;
    }
    list->out = take->number;
    fan_plain_fold(take->b, list, n, acc, take_scale(take->options), list->out, take->scratch,
                   NULL);
    return plain->number(&list->kind, list->out);
}

/* The caller's array, where there is one for this slot; false: it is for the general path. */
static bool take_plain_place_out(take_plain *take, size_t slot)
{
    fan_list *list = take_list(take->b, slot);
    const fan_plain_kind *kind = take_defined(list) ? &list->kind : NULL;
    fan_flat *to = &take->written[take->nwritten];
    void *object = NULL;
    fan_plain_where where =
        take->outs->at(take->outs->ctx, slot, kind, &object, &to->data, &to->bytes);
    if (where != FAN_PLAIN_THERE)
        return where != FAN_PLAIN_REFUSED;
    size_t at = slot - take->span.first;
    to->owner = slot;
    take->nwritten++;
    take->given[at] = true;
    if (!kind) {
        take->b->frontend->drop(object);
        return true;
    }
    take->announce = take->announce || kind->check_at_use;
    take->results[at] = object;
    list->out = to->data;
    return true;
}

/* D11: whether sums may be written to the outs in any order: none meets another, nor what is still
 * read, but for an entry of its own slot that is all of it. Sorts them by address. */
static bool take_plain_outs_disjoint(const take_plain *take)
{
    size_t near[8] = {0}; /* where the last k-th entry was */
    if (!fan_flats_disjoint(take->written, take->nwritten))
        return false;
    if (!take->nwritten)
        return true;
    for (size_t i = take->span.first; i < take->span.end; i++) {
        const fan_list *list = take_list(take->b, i);
        size_t n = take_defined(list);
        if (n && fan_plain_pitch(&list->kind))
            return false;
        for (size_t k = 0; k < n; k++) {
            const char *data = list->entries[k].data;
            const fan_flat *met =
                fan_flats_last_met(take->written, take->nwritten, data, list->bytes, &near[k % 8]);
            if (!met)
                continue;
            bool own = met->owner == i && met->data == data;
            if (!own || list->n > FAN_PLAIN_TERMS)
                return false;
        }
    }
    return true;
}

/* take_reads_all: a single entry is read, too, and not just handed through. */
static bool take_reads_all(const take_plain *take)
{
    const fan_take *options = take->options;
    if (take->outs || take->b->sum_stats)
        return true;
    return options->scale.on || options->writable || options->mean;
}

/* take_is_far: no near cache holds the slots. */
static bool take_is_far(const take_plain *take)
{
    return take->span.end - take->span.first >= TAKE_FAR;
}

/* Room for a sum that needs more of it than those before it. */
static bool take_plain_grow(take_plain *take, size_t bytes)
{
    if (bytes <= take->nscratch)
        return true;
    fan_free(take->scratch);
    take->nscratch = bytes;
    take->scratch = fan_alloc(bytes);
    return take->scratch != NULL;
}

/* W3: the divisor of the mean of a slot: the one that the caller counted, or the sum of the
 * weights. False: there is none, or the general path divides in another dtype. */
static bool take_plain_divisor(take_plain *take, size_t slot)
{
    FAN_UNINITIALIZED fan_divisor sum;
    const fan_buffer *b = take->b;
    const fan_divisor *divisor = take->options->scale.divisor;
    fan_dtype acc = fan_plain_accum(b, slot);
    char kind = fan_dtype_kind(acc);
    if (kind != 'f' && kind != 'c')
        return false;
    if (!divisor) {
        if (fan_slot_divisor(b, slot, &sum, NULL) != FAN_OK)
            return false;
        divisor = &sum;
    }
    const fan_scale scale = {.divisor = divisor};
    if (fan_scale_dtype(&scale, acc) != acc)
        return false;
    fan_divisor_as(divisor, acc, take->divisors[slot - take->span.first].number);
    return true;
}

/* Where the sum of one slot goes, with the caller's hold. False: it is for the general path. */
static bool take_plain_gather_slot(take_plain *take, size_t slot)
{
    void **result = &take->results[slot - take->span.first];
    const fan_list *list = take_list(take->b, slot);
    const fan_plain_kind *kind = &list->kind;
    size_t n = take_defined(list);
    fan_dtype acc = fan_plain_accum(take->b, slot);
    take->calls = take->calls || kind->check_at_use;
    /* A large array is handed through at most, and of Python ints the general path reports what
     * does not fit. */
    if (fan_plain_is_large(list->size) && take_reads_all(take))
        return false;
    if (!take_plain_grow(take, fan_plain_scratch(list, n, acc, take->b->sum_stats)))
        return false;
    bool ints = kind->weak && kind->dtype == FAN_DT_INT64;
    if (ints && !take_stays_in_int64(list, take->options))
        return false;
    if (take->options->mean && !take_plain_divisor(take, slot))
        return false;
    if (*result)
        return true;
    if (kind->scalar) {
        *result = take_plain_number(take, slot, n, acc);
        return *result != NULL;
    }
    bool weighted = fan_slot_weighted(&take->b->slots[slot]) || take->options->mean;
    *result = take_plain_place(take->b, slot, take->options, n, acc, weighted);
    if (*result && *result == list->entries[0].object)
        take->b->frontend->plain->hold(*result);
    return *result != NULL;
}

static bool take_plain_gather(take_plain *take)
{
    bool far = take_is_far(take);
    for (size_t i = take->span.first; take->outs && i < take->span.end; i++) {
        if (!take_plain_place_out(take, i))
            return false;
    }
    if (take->outs && !take_plain_outs_disjoint(take))
        return false;
    for (size_t i = take->span.first; i < take->span.end; i++) {
        if (far)
            take_fetch(take, i, false);
        if (take_defined(take_list(take->b, i)) && !take_plain_gather_slot(take, i))
            return false;
    }
    return true;
}

/* The array that the k-th of the outs is; NULL: its slot's sum is undefined. */
static void *take_plain_out(const take_plain *take, size_t k)
{
    return take->results[take->written[k].owner - take->span.first];
}

/* Asks the libraries whether what will be read has its value, and tells those that count writes.
 * They may run arbitrary code. */
static bool take_plain_ask(const take_plain *take)
{
    for (size_t i = take->span.first; take->calls && i < take->span.end; i++) {
        const fan_list *list = take_list(take->b, i);
        size_t n = take_defined(list);
        if (!n)
            continue;
        bool first = take->results[i - take->span.first] == list->entries[0].object;
        if (!fan_plain_has_values(take->b, list, n, first))
            return false;
    }
    for (size_t k = 0; take->announce && k < take->nwritten; k++) {
        void *to = take_plain_out(take, k);
        if (to && !take->b->frontend->plain->wrote(to))
            return false;
    }
    return true;
}

/* Checks that what will be read is unchanged. Calls the libraries first, also those that count
 * writes to their arrays. */
static bool take_plain_readable(const take_plain *take)
{
    bool reads = take_reads_all(take);
    bool far = take_is_far(take);
    if (!take_plain_ask(take))
        return false;
    for (size_t i = take->span.first; i < take->span.end; i++) {
        const fan_list *list = take_list(take->b, i);
        size_t n = take_defined(list);
        if (far)
            take_fetch(take, i, false);
        if (n == 0 || list->kind.scalar)
            continue;
        bool product = fan_slot_weighted(&take->b->slots[i]);
        bool read = n > 1 || reads || product;
        if (read && !fan_plain_all_unchanged(take->b, list, n))
            return false;
    }
    if (!take->calls && !take->announce)
        return true;
    for (size_t k = 0; k < take->nwritten; k++) {
        void *to = take_plain_out(take, k);
        const fan_plain_kind *kind = &take_list(take->b, take->written[k].owner)->kind;
        if (to && !fan_plain_unchanged(take->b, to, kind, take->written[k].data))
            return false;
    }
    return true;
}

/* 3. sum */

static void take_keep_stats(fan_buffer *b, size_t slot, const fan_stats *stats)
{
    fan_sum_stats *kept = &b->sum_stats[slot];
    *kept = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
    if (!stats)
        return;
    kept->stats = *stats;
    if (stats->nonfinite && stats->bad != SIZE_MAX)
        fan_sum_stats_blame(kept, take_list(b, slot)->entries[stats->bad].key);
}

static void take_plain_sum_slot(take_plain *take, size_t slot)
{
    FAN_UNINITIALIZED fan_stats sum_stats;
    fan_buffer *b = take->b;
    const fan_take *options = take->options;
    const fan_list *list = take_list(b, slot);
    size_t at = slot - take->span.first;
    size_t n = take_defined(list);
    fan_stats *stats = b->sum_stats ? &sum_stats : NULL;
    if (!n) {
        if (stats)
            take_keep_stats(b, slot, NULL);
        return;
    }
    bool number = list->kind.scalar;
    bool first = !number && take->results[at] == list->entries[0].object;
    bool is_out = take->outs && take->given[at];
    bool anew = options->scale.on || options->mean;
    bool lone = n == 1 && !anew && !list->entries[0].weighted;
    bool is_there = is_out && first && lone;
    char *out = list->out;
    if (!out)
        out = number ? take->number : list->entries[0].data;
    bool made = list->out && !is_there;
    bool weighs = options->mean || fan_slot_weighted(&b->slots[slot]);
    if (made && weighs) {
        const char *divisor = options->mean ? take->divisors[at].number : NULL;
        fan_plain_fold_weighted(b, slot, n, divisor, take_scale(options), out);
    } else if (stats || (!number && made)) {
        fan_plain_fold(b, list, n, fan_plain_accum(b, slot), take_scale(options), out,
                       take->scratch, stats);
    }
    if (stats)
        take_keep_stats(b, slot, stats);
    if (made)
        fan_plain_count(b, list, n, first && !is_out, n == 1 && !is_out, false);
}

static void take_plain_sum(take_plain *take)
{
    bool far = take_is_far(take);
    for (size_t i = take->span.first; i < take->span.end; i++) {
        if (far)
            take_fetch(take, i, true);
        take_plain_sum_slot(take, i);
    }
}

/* 4. order: no stream has anything to do with plain entries. */

/* 5. hand over: the slots are empty and free. What they held is dropped last, when the buffer is
 * ready for whatever a finalizer calls. */

/* References to drop after all slots are released. If this list cannot grow, drop immediately: a
 * call back into a slot that is still claimed is then refused. */
typedef struct take_drops {
    void *inline_objects[64], **all;
    size_t n, cap;
} take_drops;

static bool take_defer_drop(take_drops *drops, void *object)
{
    if (drops->n == drops->cap) {
        bool small = drops->all == drops->inline_objects;
        void **more = fan_realloc(small ? NULL : drops->all, 2 * drops->cap * sizeof *more);
        if (!more)
            return false;
        if (small)
            memcpy(more, drops->inline_objects, sizeof drops->inline_objects);
        drops->all = more;
        drops->cap *= 2;
    }
    drops->all[drops->n++] = object;
    return true;
}

static void take_plain_empty(fan_buffer *b, fan_list *list, take_drops *drops)
{
    for (size_t k = 0; k < list->n; k++) {
        void *object = list->entries[k].object;
        if (!object || b->frontend->plain->drop_if_shared(object))
            continue;
        if (!take_defer_drop(drops, object))
            b->frontend->drop(object);
    }
    fan_list_unpark(b, list, fan_list_parked(list) - list->undefined);
    fan_list_empty(list);
    fan_list_shrink(list);
}

static void take_plain_hand_over(fan_buffer *b, fan_span span)
{
    FAN_UNINITIALIZED take_drops drops;
    drops.all = drops.inline_objects;
    drops.n = 0;
    drops.cap = sizeof drops.inline_objects / sizeof *drops.inline_objects;
    for (size_t i = span.first; i < span.end; i++) {
        fan_list *list = take_list(b, i);
        if (list && list->n)
            take_plain_empty(b, list, &drops);
    }
    fan_plain_release(b, span);
    for (size_t i = 0; i < drops.n; i++)
        b->frontend->drop(drops.all[i]);
    if (drops.all != drops.inline_objects)
        fan_free(drops.all);
}

/* Room for what is known of each slot. */
static bool take_plain_begin(take_plain *take)
{
    size_t n = take->span.end - take->span.first;
    if (take->options->mean && n > 1)
        take->divisors = fan_alloc(n * sizeof *take->divisors);
    if (!take->divisors)
        return false;
    if (!take->outs)
        return true;
    memset(take->inline_given, 0, sizeof take->inline_given);
    if (n > TAKE_FEW_OUTS) {
        take->written = fan_alloc(n * sizeof *take->written);
        take->given = fan_calloc(n * sizeof *take->given);
    }
    return take->written && take->given;
}

/* Whether a slot has a few arrays, as most have: 1 to FAN_PLAIN_TERMS small ones, and nothing
 * else. */
static bool take_plain_is_few(const fan_buffer *b, const fan_list *list, size_t n)
{
    if (n == 0 || n > FAN_PLAIN_TERMS || list->undefined)
        return false;
    return !list->kind.scalar && list->size <= FAN_PLAIN_BYTES && !b->sum_stats;
}

/* The same steps for one slot with a few arrays, as most takes are, without what several slots need
 * between them. *result NULL: it is not that, and nothing happened. False: it is for the general
 * path. */
static bool take_plain_one(fan_buffer *b, size_t slot, const fan_take *options, void **result)
{
    const fan_span span = {slot, slot + 1};
    if (fan_slot_has_state(&b->slots[slot]))
        return false; /* the list may have no plain entry, and then no kind */
    fan_list *list = take_list(b, slot);
    size_t n = take_defined(list);
    if (!take_plain_is_few(b, list, n) || fan_slot_weighted(&b->slots[slot]))
        return true;
    if (!take_plain_claim_slot(b, slot, options))
        return false;
    fan_dtype acc = fan_plain_accum(b, slot);
    void *to = take_plain_place(b, slot, options, n, acc, false);
    bool first = to == list->entries[0].object;
    bool sums = list->out;
    bool reads = sums || options->writable;
    bool good = to && fan_plain_has_values(b, list, n, first);
    if (good && reads)
        good = fan_plain_all_unchanged(b, list, n);
    if (good) {
        if (sums) {
            fan_plain_fold(b, list, n, acc, take_scale(options), list->out, NULL, NULL);
            fan_plain_count(b, list, n, first, n == 1, false);
        }
        if (first) /* the list's hold is the caller's from now on */
            list->entries[0].object = NULL;
        take_plain_hand_over(b, span);
        *result = to;
        return true;
    }
    fan_plain_release(b, span);
    fan_plain_give_up(b, first ? NULL : to);
    return false;
}

/* As if there had been no take. The general path reports what is wrong, if anything is. */
static void take_plain_undo(const take_plain *take)
{
    take_plain_give_back(take->b, take->span);
    for (size_t i = 0; i < take->span.end - take->span.first; i++) {
        fan_plain_give_up(take->b, take->results[i]);
        take->results[i] = NULL;
    }
}

bool fan_plain_take(fan_buffer *b, fan_span span, const fan_take *options,
                    const fan_plain_outs *outs, void **results)
{
    FAN_UNINITIALIZED take_plain take;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return false;
    bool one = !outs && span.end - span.first == 1;
    if (one && !options->mean) {
        bool good = take_plain_one(b, span.first, options, results);
        if (!good || results[0])
            return good;
    }
    for (size_t i = span.first; i < span.end; i++) {
        bool weighs = options->mean || fan_slot_weighted(&b->slots[i]);
        bool fits = !weighs || take_plain_fits(b, i, options);
        if (fits && take_plain_claim_slot(b, i, options))
            continue;
        take_plain_give_back(b, (fan_span){span.first, i});
        return false;
    }
    take.b = b;
    take.span = span;
    take.options = options;
    take.outs = outs;
    take.results = results;
    take.written = take.inline_outs;
    take.given = take.inline_given;
    take.nwritten = 0;
    take.divisors = &take.inline_divisor;
    take.calls = false;
    take.announce = false;
    take.scratch = NULL;
    take.nscratch = 0;
    bool good = take_plain_begin(&take) && take_plain_gather(&take) && take_plain_readable(&take);
    if (good) {
        take_plain_sum(&take);
        for (size_t i = span.first; i < span.end; i++)
            fan_slot_weights_clear(&b->slots[i]);
        take_plain_hand_over(b, span);
    } else {
        take_plain_undo(&take);
    }
    fan_free(take.scratch);
    if (take.divisors != &take.inline_divisor)
        fan_free(take.divisors);
    if (take.written != take.inline_outs) {
        fan_free(take.written);
        fan_free(take.given);
    }
    return good;
}

/* ---- a snapshot: the sum as it is now, which stays (D17) ---- */

/* What the slot holds, as a value of its own, in the order of the consumer. */
static fan_status snapshot_sum(fan_gathered *gathered, fan_stream *consumer, fan_value *out,
                               fan_error *err)
{
    fan_fold *fold = &gathered->fold;
    fan_buffer *b = fold->b;
    FAN_TRY(fan_gathered_check(gathered, err));
    bool some = fold->n || fold->state;
    if (!some && gathered->zero)
        return take_zeros(b, fold->slot, gathered->zero, fan_fold_dtype(fold), out, err);
    if (!some)
        return FAN_OK;
    const fan_term *first = &fold->terms[0];
    FAN_TRY(fan_gathered_weigh(gathered, err));
    if (fold->n == 1 && !fold->state && first->v->form == FAN_FORM_OBJECT) {
        FAN_TRY(fan_value_copy(b->frontend, first->v, out, err));
        return fan_order_hand_over(b, fold->slot, out, first->producer, first->event, consumer,
                                   &fold->rules, err);
    }
    fan_status status = fan_fold_run(fold, err);
    *out = fold->result;
    FAN_TRY(status);
    return fan_order_hand_over(b, fold->slot, out, fold->ready, fold->ready_event, consumer,
                               &fold->rules, err);
}

fan_status fan_buffer_snapshot(fan_buffer *b, size_t slot, fan_stream *consumer, fan_value *out,
                               fan_error *err)
{
    fan_gathered gathered;
    *out = fan_value_none();
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot *s = &b->slots[slot];
    fan_slot_lock(b, slot);
    fan_status status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK)
        status = fan_slot_claim_all(b, slot, false, "a snapshot", err);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    status = fan_gather(b, slot, SIZE_MAX, false, &gathered, err);
    if (status == FAN_OK) {
        gathered.fold.finish = true;
        gathered.fold.snapshot = true;
        if (!consumer)
            consumer = s->state->consumer;
        status = snapshot_sum(&gathered, consumer, out, err);
        if (status != FAN_OK) {
            fan_value_drop(b->frontend, out);
        } else if (gathered.like.some && out->form != FAN_FORM_OBJECT) {
            out->origin = gathered.like.origin;
            out->rank = gathered.like.rank;
        }
        fan_gathered_fini(&gathered);
    }
    fan_slot_lock(b, slot);
    fan_slot_poison(s, status, err);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    return status;
}
