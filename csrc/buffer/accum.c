/* accum: what two forms make, which dtypes a sum has, and whether a shape fits (accum.h). */
#include "buffer/accum.h"

#include <assert.h>
#include <string.h>

const char *fan_action_word(fan_action a)
{
    static const char *const words[] = {
#define X(NAME, word) word,
        FAN_ACTION_LIST(X)
#undef X
    };
    return words[a];
}

const char *fan_reuse_words(fan_reuse_answer a)
{
    static const char *const words[] = {
#define X(NAME, word) word,
        FAN_REUSE_LIST(X)
#undef X
    };
    return words[a];
}

/* Two arrays: A3 to A7. */
static fan_accum_plan accum_arrays(fan_side old, fan_side new_)
{
    fan_accum_plan plan = {.result = FAN_FORM_DENSE};
    bool from_sparse = old.form == FAN_FORM_SPARSE;
    if (from_sparse && new_.form == FAN_FORM_SPARSE) {
        plan.result = FAN_FORM_SPARSE;
        plan.action = FAN_ACTION_MERGE;
        plan.rules = FAN_A(5);
        if (old.format != new_.format) {
            plan.action = FAN_ACTION_MERGE_COO;
            plan.rules = FAN_A(7);
        }
    } else if (from_sparse && new_.reusable) {
        plan.action = FAN_ACTION_INTO_NEW;
        plan.rules = FAN_A(3);
    } else if (from_sparse) {
        plan.action = FAN_ACTION_FRESH;
        plan.rules = FAN_A(4);
    } else if (old.reusable) {
        plan.action = FAN_ACTION_INTO_OLD;
        plan.rules = FAN_A(6);
    } else {
        plan.action = FAN_ACTION_FRESH;
        plan.rules = FAN_A(7);
    }
    return plan;
}

fan_accum_plan fan_accum(fan_side old, fan_side new_, bool recording)
{
    fan_accum_plan plan = {.action = FAN_ACTION_SKIP, .result = old.form};
    bool was_zero = old.form == FAN_FORM_ZERO;
    if (new_.form == FAN_FORM_UNDEFINED) {
        plan.rules = FAN_S(2);
        return plan;
    }
    if (old.form != FAN_FORM_UNDEFINED && new_.form == FAN_FORM_ZERO) {
        plan.rules = FAN_A(2);
        return plan;
    }
    if (old.form == FAN_FORM_UNDEFINED || was_zero) {
        plan.action = FAN_ACTION_HAND;
        plan.result = new_.form;
        if (was_zero)
            plan.rules = FAN_A(2);
        return plan;
    }
    bool objects = old.form == FAN_FORM_OBJECT || new_.form == FAN_FORM_OBJECT;
    if (fan_accum_calls_out(recording, objects)) {
        plan.action = FAN_ACTION_OBJECT;
        plan.result = FAN_FORM_OBJECT;
        plan.rules = FAN_A(8);
        if (recording)
            plan.rules = FAN_A(1);
        return plan;
    }
    return accum_arrays(old, new_);
}

fan_dtype_set fan_dtype_set_add(fan_dtype_set s, fan_dtype d, bool weak)
{
    if (!weak)
        return s | (1u << (unsigned)d);
    switch (fan_dtype_kind(d)) {
    case 'b':
        return s | FAN_WEAK_BOOL;
    case 'f':
        return s | FAN_WEAK_FLOAT;
    case 'c':
        return s | FAN_WEAK_COMPLEX;
    default:
        return s | FAN_WEAK_INT;
    }
}

/* The wider comes first: complex before float before the rest, then by size. Pairwise promotion in
 * this order gives NumPy's answer for the whole set. */
static int weight(fan_dtype dtype)
{
    int size = (int)fan_dtype_size(dtype);
    switch (fan_dtype_kind(dtype)) {
    case 'c':
        return 200 + size;
    case 'f':
        return 100 + size;
    default:
        return size;
    }
}

/* The widest dtype of a set. */
static fan_dtype widest(fan_dtype_set set)
{
    fan_dtype best = FAN_DT_NONE;
    for (int i = 0; i < FAN_DT_COUNT; i++) {
        fan_dtype dtype = (fan_dtype)i;
        if (!(set >> i & 1u))
            continue;
        if (best == FAN_DT_NONE || weight(dtype) > weight(best))
            best = dtype;
    }
    return best;
}

fan_dtype fan_dtype_set_promote(fan_dtype_set s)
{
    fan_dtype_set left = s & ((1u << FAN_DT_COUNT) - 1u);
    bool one = s && !(s & (s - 1));
    if (one && left == s) /* as mostly */
        return (fan_dtype)__builtin_ctz(s);
    fan_dtype_set eights = s & FAN_FLOAT8_SET;
    if (eights & (eights - 1))
        return FAN_DT_NONE;
    fan_dtype sum = FAN_DT_NONE;
    while (left) {
        fan_dtype best = widest(left);
        left &= ~(1u << (unsigned)best);
        if (sum != FAN_DT_NONE)
            best = fan_dtype_promote(sum, best);
        if (best == FAN_DT_NONE)
            return FAN_DT_NONE;
        sum = best;
    }
    static const struct {
        fan_dtype_set bit;
        char kind;
        fan_dtype alone;
    } weak[] = {{FAN_WEAK_BOOL, 'b', FAN_DT_BOOL},
                {FAN_WEAK_INT, 'i', FAN_DT_INT64},
                {FAN_WEAK_FLOAT, 'f', FAN_DT_FLOAT64},
                {FAN_WEAK_COMPLEX, 'c', FAN_DT_COMPLEX128}};
    bool only_weak = sum == FAN_DT_NONE;
    for (size_t i = 0; i < sizeof weak / sizeof *weak; i++) {
        if (!(s & weak[i].bit))
            continue;
        if (only_weak)
            sum = weak[i].alone;
        else
            sum = fan_dtype_promote_weak(sum, weak[i].kind);
    }
    return sum;
}

/* family_of: the kind of a dtype, one for integers with and without a sign. */
static char family_of(fan_dtype dtype)
{
    char kind = fan_dtype_kind(dtype);
    if (kind == 'u')
        return 'i';
    return kind;
}

fan_dtype fan_accum_dtype(fan_dtype d, fan_dtype wish)
{
    if (wish == FAN_DT_NONE)
        return fan_dtype_accumulate(d);
    /* Its own kind, so that the last rounding is one that A10 allows. */
    if (family_of(d) != family_of(wish))
        return FAN_DT_NONE;
    if (fan_dtype_promote(d, wish) != wish)
        return FAN_DT_NONE;
    return wish;
}

fan_dtype fan_accum_dtype_of(fan_dtype_set seen, fan_dtype wish)
{
    fan_dtype dtype = fan_dtype_set_promote(seen);
    if (dtype == FAN_DT_NONE)
        return dtype;
    return fan_accum_dtype(dtype, wish);
}

/* Whether a Python number may be cast: its kind alone counts. */
static bool weak_can_cast(fan_dtype from, fan_dtype to)
{
    static const char order[] = "bifc";
    return strchr(order, family_of(from)) <= strchr(order, family_of(to));
}

fan_dtype_fit fan_accum_dtype_fit(fan_dtype declared, fan_dtype wish, fan_dtype dtype, bool weak,
                                  fan_dtype_set *seen)
{
    if (declared != FAN_DT_NONE) {
        *seen = fan_dtype_set_add(0, declared, false);
        if (declared == dtype)
            return FAN_DTYPE_FIT_EXACT;
        bool can = fan_dtype_can_cast(dtype, declared);
        if (weak)
            can = weak_can_cast(dtype, declared);
        if (can)
            return FAN_DTYPE_FIT_CAST;
        return FAN_DTYPE_FIT_NO;
    }
    if (fan_accum_dtype(dtype, wish) == FAN_DT_NONE)
        return FAN_DTYPE_FIT_WISH;
    *seen = fan_dtype_set_add(*seen, dtype, weak);
    if (fan_dtype_set_promote(*seen) == FAN_DT_NONE)
        return FAN_DTYPE_FIT_APART;
    /* A dtype that holds each contribution's dtype holds their promotion. */
    assert(fan_accum_dtype_of(*seen, wish) != FAN_DT_NONE);
    return FAN_DTYPE_FIT_EXACT;
}

fan_fit fan_accum_fit(bool declared, int slot_ndim, const int64_t *slot_shape, int ndim,
                      const int64_t *shape)
{
    if (fan_shape_same(slot_ndim, slot_shape, ndim, shape))
        return FAN_FIT_EXACT;
    if (declared && fan_broadcasts_from(ndim, shape, slot_ndim, slot_shape))
        return FAN_FIT_REDUCE;
    return FAN_FIT_NO;
}
