/* take_prepare: the slots of a take are claimed; what they hold is gathered, weighed, and checked
 * against the options of the take. Nothing else changes.
 *
 * In this order: what an out= and a scale= must be; weights= and mean=; a slot; which memory meets
 * which out= (D11); all slots. */
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/take.h"
#include "buffer/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- out= and scale= ---- */

static fan_status take_check_out(const fan_take_slot *part, fan_error *err)
{
    const fan_slot *s = part->s;
    const fan_slot_state *state = s->state;
    const fan_value *out = part->out;
    const fan_array *to = out->array;
    fan_place place = fan_take_place(part);
    char has[160];
    char wants[160];

    const fan_fold *fold = &part->gathered.fold;
    const fan_value *any = part->gathered.zero;
    if (fold->n)
        any = fold->terms[0].v;
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
        return fan_fail_value(err, place, "out= has shape %s, the sum %s",
                              fan_shape_text(to->ndim, to->shape, has, sizeof has),
                              fan_shape_text(ndim, shape, wants, sizeof wants));
    }
    fan_dtype dtype = fan_fold_dtype(fold);
    fan_dtype_set seen;
    fan_dtype_fit fit = fan_accum_dtype_fit(out->dtype, FAN_DT_NONE, dtype, false, &seen);
    if (dtype != FAN_DT_NONE && fit == FAN_DTYPE_FIT_NO) {
        return fan_fail_value(err, place, "out= of dtype %s cannot take a sum of dtype %s",
                              fan_dtype_name(out->dtype), fan_dtype_name(dtype));
    }
    if (state->device && out->device != state->device) {
        return fan_fail_value(err, place, "out= is on %s, the sum on %s%s",
                              fan_device_text(out->device, has, sizeof has),
                              fan_device_text(state->device, wants, sizeof wants),
                              fan_device_of_another(out->device, state->device));
    }
    return FAN_OK;
}

static fan_status take_check_scale(const fan_take_slot *part, fan_error *err)
{
    const fan_take *options = part->op->options;
    const fan_scale *scale = &options->scale;
    fan_dtype dtype = fan_fold_dtype(&part->gathered.fold);
    if (fan_take_scale_fits(options, dtype))
        return FAN_OK;
    fan_place place = fan_take_place(part);
    const char *name = fan_dtype_name(dtype);
    const char *article = "a";
    if (name[0] == 'i')
        article = "an";
    if (!options->real) {
        return fan_fail_value(err, place, "scale=%.12g%+.12gj: %s %s sum needs a real number",
                              scale->re, scale->im, article, name);
    }
    bool fits_int64 = scale->re < 0x1p63 && scale->re >= -0x1p63;
    return fan_fail_value(err, place, "scale=%.12g: %s %s sum needs an integer%s", scale->re,
                          article, name, fits_int64 ? "" : " that fits int64");
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
        return fan_fail_value(
            err, fan_slot_place(b, slot, -1),
            "weights= needs every contribution, and %s was summed already: make the "
            "buffer with budget=math.inf, or give weight= at add (W5)",
            late_name(name, sizeof name, state->keyed > 0, 0));
    }
    if (lost) {
        return fan_fail_value(
            err, fan_slot_place(b, slot, -1),
            "weights= by place of arrival needs defined contributions, and a None came "
            "without a key: give key= at add (W5)");
    }
    return FAN_OK;
}

/* The weight of the entry with this key, or at this place. */
static fan_status late_weight_of(fan_take_slot *part, size_t i, bool keyed, fan_weight_sum *sum,
                                 fan_error *err)
{
    fan_gathered *gathered = &part->gathered;
    fan_weight *own = &gathered->weights[i];
    int64_t key = (int64_t)i;
    if (keyed)
        key = fan_entry_key(&gathered->entries[i]);
    fan_late_weight *late = late_find(part->op->options, key);
    fan_place place = fan_take_place(part);
    char name[64];
    (void)late_name(name, sizeof name, keyed, key);
    if (late)
        late->used = true;
    if (late && own->on) {
        return fan_fail_value(
            err, place, "%s has a weight in weights=, and came with one: give it once (W5)", name);
    }
    if (!late && !own->on) {
        return fan_fail_value(err, place, "weights= has no weight for %s (W5)", name);
    }
    if (!late)
        return FAN_OK;
    *own = late->weight;
    fan_weight_sum_add(sum, own, false);
    return FAN_OK;
}

/* W5: the terms get the weights of the call, which are added to *sum. */
static fan_status late_apply(fan_take_slot *part, fan_weight_sum *sum, fan_error *err)
{
    fan_buffer *b = part->b;
    fan_gathered *gathered = &part->gathered;
    fan_fold *fold = &gathered->fold;
    const fan_slot_state *state = part->s->state;
    bool keyed = state->keyed > 0;
    if (keyed && part->op->options->late_places) {
        return fan_fail_value(
            err, fan_take_place(part),
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
        FAN_TRY(late_weight_of(part, i, keyed, sum, err));
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
static fan_status mean_check_dtype(const fan_take_slot *part, fan_error *err)
{
    const fan_fold *fold = &part->gathered.fold;
    fan_dtype dtype = fan_fold_dtype(fold);
    fan_place place = fan_take_place(part);
    if (dtype == FAN_DT_NONE)
        return FAN_OK;
    char kind = fan_dtype_kind(dtype);
    if (kind != 'f' && kind != 'c') {
        return fan_fail_value(err, place,
                              "mean=True: a mean of dtype %s would be cut to integers: convert the "
                              "gradients, or declare the slot's dtype (W4)",
                              fan_dtype_name(dtype));
    }
    if (fan_fold_is_exact(fold) && fan_fold_has(fold, FAN_FORM_SPARSE)) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0, place,
                           "mean=True: an exact mean takes dense gradients alone: give the dense "
                           "gradients, or another accumulate= (W4)");
    }
    return FAN_OK;
}

/* Weights of the call, and the divisor. The slot is claimed. */
static fan_status take_weigh(fan_take_slot *part, fan_error *err)
{
    const fan_take *options = part->op->options;
    fan_buffer *b = part->b;
    const fan_slot *s = part->s;
    fan_gathered *gathered = &part->gathered;
    fan_weight_sum late = {.re = 0};
    if (fan_slot_weighted(s))
        late = s->weights->sum;
    if (options->late)
        FAN_TRY(late_apply(part, &late, err));
    fan_weight_sum over = {.re = 0};
    for (size_t i = 0; i < options->nover; i++) {
        const fan_weight one = {.on = true, .re = options->over[i]};
        fan_weight_sum_add(&over, &one, false);
    }
    bool some = gathered->fold.n || gathered->fold.state || gathered->zero;
    if (!options->mean || !some)
        return FAN_OK;
    FAN_TRY(mean_check_dtype(part, err));
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
static fan_status late_check_used(const fan_take_op *op, fan_error *err)
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
            return fan_fail_value(
                err, place,
                "weights= has %zu weights, and nothing was added at place %" PRId64 " (W5)",
                options->nlate, key);
        }
        return fan_fail_value(
            err, place, "weights= has key %" PRId64 ", with which nothing was added (W5)", key);
    }
    return FAN_OK;
}

/* ---- a slot is claimed, and gathered ---- */

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

static fan_status take_gather_slot(fan_take_slot *part, fan_error *err)
{
    fan_buffer *b = part->b;
    const fan_take *options = part->op->options;
    const fan_fold *fold = &part->gathered.fold;
    fan_slot_lock(b, part->slot);
    fan_status status = take_claim(b, part->slot, err);
    fan_slot_unlock(b, part->slot);
    FAN_TRY(status);
    part->claimed = true;

    /* The buffer's, unless it was redirected (S7); a slot of zeros alone has none. */
    part->consumer = options->stream;
    if (!part->consumer)
        part->consumer = part->s->state->consumer;
    if (!part->consumer)
        part->consumer = b->stream;
    FAN_TRY(fan_gather(b, part->slot, SIZE_MAX, true, &part->gathered, err));
    part->has_gathered = true;
    if (options->mean || options->late)
        FAN_TRY(take_weigh(part, err));

    bool arrays = options->scale.on || part->out;
    if (arrays && fan_fold_has(fold, FAN_FORM_OBJECT)) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_take_place(part),
                           "sums objects; scale= and out= need arrays");
    }
    FAN_TRY(take_check_scale(part, err));
    if (part->out)
        FAN_TRY(take_check_out(part, err));
    return fan_gathered_check(&part->gathered, err);
}

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

static void take_collect_inputs(const fan_take_slot *part, fan_extents *inputs)
{
    const fan_fold *fold = &part->gathered.fold;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        bool dense = value->form == FAN_FORM_DENSE;
        fan_array *own[3];
        size_t n;
        fan_array *const *arrays = fan_value_arrays(value, own, &n);
        for (size_t k = 0; k < n; k++)
            fan_extents_put(inputs, arrays[k], part->slot, dense);
    }
}

/* The extents of all inputs and of all outs, for a take with out= (D11). */
static fan_status take_collect_extents(fan_take_op *op, fan_error *err)
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
        const fan_take_slot *part = &op->slots[i];
        if (part->out)
            fan_extents_put(&op->outs, part->out->array, part->slot, true);
        take_collect_inputs(part, &op->inputs);
    }
    fan_extents_sort(&op->inputs);
    fan_extents_sort(&op->outs);
    const fan_extent_entry *one;
    const fan_extent_entry *two;
    if (fan_extents_any_pair(&op->outs, &one, &two)) {
        size_t low = one->owner;
        size_t high = two->owner;
        if (low > high) {
            low = two->owner;
            high = one->owner;
        }
        return fan_fail_value(err, fan_buffer_place(op->b),
                              "out= of slots %zu and %zu may share memory", low, high);
    }
    for (size_t i = 0; i < op->n; i++) {
        fan_take_slot *part = &op->slots[i];
        if (part->out) {
            part->out_overlaps_inputs =
                take_out_overlaps_inputs(&op->inputs, part->out->array, part->slot);
        }
    }
    return FAN_OK;
}

/* ---- all slots ---- */

fan_status fan_take_prepare(fan_take_op *op, fan_error *err)
{
    for (size_t i = 0; i < op->n; i++)
        FAN_TRY(take_gather_slot(&op->slots[i], err));
    if (op->options->late)
        FAN_TRY(late_check_used(op, err));
    if (!op->options->out)
        return FAN_OK;
    return take_collect_extents(op, err);
}
