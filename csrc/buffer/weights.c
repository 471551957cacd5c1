/* weights: exact sums of weights; the table of plain entries; which weights fit (W4); the divisor
 * of a mean (W3). */
#include "buffer/weights.h"

#include "base/float_mode.h"
#include "base/mem.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the exact sum of weights ---- */

static void weight_sum_spill(fan_weight_sum *sum, const fan_exact_kind *kind)
{
    fan__superacc_start(sum->limbs[0], kind);
    fan__superacc_start(sum->limbs[1], kind);
    fan__superacc_add(sum->limbs[0], kind, sum->re);
    fan__superacc_add(sum->limbs[1], kind, sum->im);
    sum->re = 0;
    sum->im = 0;
    sum->spilled = true;
}

/* Whether *sum + x is a float64, which *sum then is. */
static bool weight_sum_is_exact(double *sum, double x)
{
    double after = *sum + x;
    double added = after - *sum;
    double rest = (*sum - (after - added)) + (x - added);
    if (rest != 0 || !isfinite(after))
        return false;
    *sum = after;
    return true;
}

void fan__weight_sum_add(fan_weight_sum *sum, const fan_weight *weight, bool minus)
{
    FAN_DEFAULT_FLOAT_MODE;
    double re = weight->re;
    if (minus)
        re = -weight->re;
    double im = weight->im;
    if (minus)
        im = -weight->im;
    const fan_exact_kind kind = fan__exact_kind_of(FAN_DT_FLOAT64);
    if (!sum->spilled) {
        double before = sum->re;
        if (weight_sum_is_exact(&sum->re, re)) {
            if (weight_sum_is_exact(&sum->im, im))
                return;
            sum->re = before;
        }
        weight_sum_spill(sum, &kind);
    }
    fan__superacc_add(sum->limbs[0], &kind, re);
    fan__superacc_add(sum->limbs[1], &kind, im);
}

/* The parts of a sum in limbs, the largest first; the sum is 0 from then on. */
static int weight_parts_of(uint64_t *limbs, double *parts)
{
    const fan_exact_kind kind = fan__exact_kind_of(FAN_DT_FLOAT64);
    int n = 0;
    while (n < FAN_DIVISOR_PARTS) {
        double part = fan__superacc_value(limbs, &kind, NULL, false);
        if (part == 0)
            break;
        parts[n++] = part;
        if (!isfinite(part))
            break;
        fan__superacc_add(limbs, &kind, -part);
    }
    return n;
}

/* The divisor of a sum with `whole` instead of its integers; *imaginary: the other part. */
static void divisor_of_limbs(const fan_weight_sum *sum, int64_t whole, fan_divisor *out,
                             double *imaginary)
{
    const fan_exact_kind kind = fan__exact_kind_of(FAN_DT_FLOAT64);
    fan_weight_sum all = *sum;
    /* its two halves are float64 numbers */
    const fan_weight high = {.on = true, .re = (double)(whole & ~INT64_C(0xffffffff))};
    const fan_weight low = {.on = true, .re = (double)(whole & INT64_C(0xffffffff))};
    fan__weight_sum_add(&all, &high, false);
    fan__weight_sum_add(&all, &low, false);
    if (!all.spilled)
        weight_sum_spill(&all, &kind);
    *imaginary = fan__superacc_value(all.limbs[1], &kind, NULL, false);
    out->nearest = fan__superacc_value(all.limbs[0], &kind, NULL, false);
    out->odd = fan__superacc_value(all.limbs[0], &kind, NULL, true);
    out->n = weight_parts_of(all.limbs[0], out->parts);
}

/* The same of a sum that is one float64, as mostly. False: it is none. */
static bool divisor_of_one(const fan_weight_sum *sum, int64_t whole, fan_divisor *out)
{
    double one = sum->re;
    bool small = whole < INT64_C(1) << 53 && whole > -(INT64_C(1) << 53);
    if (sum->spilled || sum->im != 0 || !small)
        return false;
    if (!weight_sum_is_exact(&one, (double)whole))
        return false;
    out->nearest = one;
    out->odd = one;
    out->n = one != 0;
    out->parts[0] = one;
    return true;
}

fan_status fan_divisor_of(const fan_buffer *b, size_t slot, const fan_weight_sum *sum, int64_t ones,
                          fan_divisor *out, fan_error *err)
{
    FAN_DEFAULT_FLOAT_MODE;
    fan_place place = fan_slot_place(b, slot, -1);
    int64_t whole = sum->whole + ones;
    double imaginary = 0;
    if (!divisor_of_one(sum, whole, out))
        divisor_of_limbs(sum, whole, out, &imaginary);
    if (imaginary != 0) {
        return fan_fail_value(
            err, place,
            "the sum of its weights has an imaginary part, %.12g: a mean needs a real "
            "one; take the sum, and divide it yourself (W3)",
            imaginary);
    }
    if (out->nearest == 0) {
        return fan_fail_at(err, FAN_ERR_ZERO_DIVISION, 0, place,
                           "the sum of its weights is 0: there is no mean; take the sum, or give "
                           "other weights (W3)");
    }
    if (!isfinite(out->nearest)) {
        return fan_fail_value(err, place,
                              "the sum of its weights exceeds float64: give smaller weights (W3)");
    }
    return FAN_OK;
}

/* ---- the weights of a slot ---- */

bool fan__slot_weights_begin(fan_slot *s, bool plain)
{
    if (!s->weights)
        s->weights = fan_calloc(sizeof *s->weights);
    fan_slot_weights *weights = s->weights;
    if (!weights)
        return false;
    if (!plain || weights->n < weights->cap)
        return true;
    size_t cap = 8;
    if (weights->cap)
        cap = 2 * weights->cap;
    fan_plain_weight *more = fan_realloc(weights->plain, cap * sizeof *more);
    if (!more)
        return false;
    weights->plain = more;
    weights->cap = cap;
    return true;
}

void fan__slot_weights_first(fan_slot_weights *weights)
{
    weights->sum.whole = 0;
    weights->sum.re = 0;
    weights->sum.im = 0;
    weights->sum.spilled = false;
    weights->n = 0;
    weights->unsorted = false;
}

void fan_slot_weights_take_back(fan_slot *s, const fan_weight *weight)
{
    s->weights->given--;
    fan_weight_sum_add(&s->weights->sum, weight, true);
}

void fan_slot_weights_free(fan_slot *s)
{
    if (s->weights)
        fan_free(s->weights->plain);
    fan_free(s->weights);
    s->weights = NULL;
}

static int weights_by_key(const void *a, const void *b)
{
    const fan_plain_weight *x = a;
    const fan_plain_weight *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

void fan_weights_of(fan_slot *s, const fan_entry *entries, size_t n, fan_weight *out)
{
    fan_slot_weights *weights = s->weights;
    size_t next = 0;
    if (weights->unsorted) /* keys alone come out of order: each is there once */
        qsort(weights->plain, weights->n, sizeof *weights->plain, weights_by_key);
    weights->unsorted = false;
    for (size_t i = 0; i < n; i++) {
        const fan_entry *one = &entries[i];
        out[i] = (fan_weight){.on = false};
        if (one->general)
            out[i] = one->item->weight;
        else if (one->weighted) /* the entries are in the order of the table */
            out[i] = weights->plain[next++].weight;
    }
}

void fan_slot_weights_drop_plain(fan_slot *s, const fan_entry *entries, size_t n)
{
    fan_slot_weights *weights = s->weights;
    size_t gone = 0;
    for (size_t i = 0; i < n; i++)
        gone += !entries[i].general && entries[i].weighted;
    if (!gone)
        return;
    memmove(weights->plain, weights->plain + gone, (weights->n - gone) * sizeof *weights->plain);
    weights->n -= gone;
}

/* ---- which weights fit (W4) ---- */

/* The part of a weight that is nearest to 0, and not 0. */
static double weight_least(const fan_weight *weight)
{
    if (weight->im == 0)
        return weight->re;
    bool imaginary = weight->re == 0 || fabs(weight->im) < fabs(weight->re);
    if (imaginary)
        return weight->im;
    return weight->re;
}

fan_status fan_weight_check(const fan_buffer *b, size_t slot, int64_t key, const fan_weight *weight,
                            fan_dtype d, fan_dtype acc, fan_error *err)
{
    assert(d != FAN_DT_NONE);
    if (!fan_weight_multiplies(weight))
        return FAN_OK;
    fan_place place = fan_slot_place(b, slot, key);
    char kind = fan_dtype_kind(d);
    const char *name = fan_dtype_name(d);
    if (weight->im != 0 && kind != 'c') {
        return fan_fail_value(
            err, place, "weight=%.12g%+.12gj: a gradient of dtype %s takes a real weight (W4)",
            weight->re, weight->im, name);
    }
    bool floats = kind == 'f' || kind == 'c';
    bool fits_int64 = weight->re >= -0x1p63 && weight->re < 0x1p63;
    bool whole = weight->re == floor(weight->re) && fits_int64;
    if (!floats && !whole) {
        return fan_fail_value(
            err, place,
            "weight=%.12g: a gradient of dtype %s takes an integer%s; convert the "
            "gradient, or declare the slot's dtype (W4)",
            weight->re, name, fits_int64 ? "" : " that fits int64");
    }
    if (acc == FAN_DT_NONE)
        return FAN_OK;
    fan_weight_fit fit = fan_weight_fit_of(weight, acc);
    if (fit == FAN_WEIGHT_FITS)
        return FAN_OK;
    if (fit == FAN_WEIGHT_TOO_SMALL) {
        return fan_fail_value(
            err, place,
            "weight=%.12g is below the smallest normal number of %s, in which the "
            "slot sums, and would lose digits; multiply all weights by one number, "
            "which a mean does not change, or give accumulate= (W4)",
            weight_least(weight), fan_dtype_name(acc));
    }
    return fan_fail_value(
        err, place,
        "weight=%.12g is not finite in %s, in which the slot sums; give a smaller "
        "one, or accumulate= (W4)",
        weight->re, fan_dtype_name(acc));
}

fan_status fan_weight_check_value(const fan_buffer *b, size_t slot, int64_t key,
                                  const fan_weight *weight, const fan_value *value, fan_dtype d,
                                  bool reduced, fan_error *err)
{
    const fan_slot_spec *spec = b->slots[slot].spec;
    bool entries = value->form == FAN_FORM_SPARSE || value->form == FAN_FORM_PARTIAL;
    bool numbers = value->form == FAN_FORM_DENSE || entries;
    if (!fan_weight_multiplies(weight) || !numbers)
        return FAN_OK;
    fan_place place = fan_slot_place(b, slot, key);
    char kind = fan_dtype_kind(d);
    bool floats = kind == 'f' || kind == 'c';
    if (value->weak && !floats) {
        return fan_fail_at(
            err, FAN_ERR_TYPE, 0, place,
            "a Python %s takes no weight: multiply it yourself, or give an array (W4)",
            kind == 'b' ? "bool" : "int");
    }
    if (spec->exact && value->form == FAN_FORM_SPARSE && !reduced) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0, place,
                           "an exact sum takes a weight with dense gradients alone: give the dense "
                           "gradient, or another accumulate= (W4)");
    }
    fan_dtype acc = FAN_DT_NONE;
    if (!spec->exact)
        acc = fan_accum_dtype(d, spec->accumulate);
    return fan_weight_check(b, slot, key, weight, d, acc, err);
}
