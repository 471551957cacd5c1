#include "buffer/accum.h"

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

fan_accum_plan fan_accum(fan_side old, fan_side new_, bool recording)
{
    fan_accum_plan p = {.action = FAN_ACTION_SKIP, .result = old.form};
    if (new_.form == FAN_FORM_UNDEFINED) {
        p.rules = FAN_S(2);
        return p;
    }
    if (old.form == FAN_FORM_UNDEFINED) {
        p.action = FAN_ACTION_HAND;
        p.result = new_.form;
        return p;
    }
    if (new_.form == FAN_FORM_ZERO) {
        p.rules = FAN_A(2);
        return p;
    }
    if (old.form == FAN_FORM_ZERO) {
        p.action = FAN_ACTION_HAND;
        p.result = new_.form;
        p.rules = FAN_A(2);
        return p;
    }
    if (recording || old.form == FAN_FORM_OBJECT || new_.form == FAN_FORM_OBJECT) {
        p.action = FAN_ACTION_OBJECT;
        p.result = FAN_FORM_OBJECT;
        p.rules = recording ? FAN_A(1) : FAN_A(8);
        return p;
    }
    p.result = FAN_FORM_DENSE;
    if (old.form == FAN_FORM_SPARSE && new_.form == FAN_FORM_SPARSE) {
        p.result = FAN_FORM_SPARSE;
        p.action = old.format == new_.format ? FAN_ACTION_MERGE : FAN_ACTION_MERGE_COO;
        p.rules = old.format == new_.format ? FAN_A(5) : FAN_A(7);
    } else if (old.form == FAN_FORM_SPARSE) {
        p.action = new_.reusable ? FAN_ACTION_INTO_NEW : FAN_ACTION_FRESH;
        p.rules = new_.reusable ? FAN_A(3) : FAN_A(4);
    } else {
        p.action = old.reusable ? FAN_ACTION_INTO_OLD : FAN_ACTION_FRESH;
        p.rules = old.reusable ? FAN_A(6) : FAN_A(7);
    }
    return p;
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
static int weight(fan_dtype d)
{
    char k = fan_dtype_kind(d);
    return (k == 'c' ? 200 : k == 'f' ? 100 : 0) + (int)fan_dtype_size(d);
}

fan_dtype fan_dtype_set_promote(fan_dtype_set s)
{
    fan_dtype_set left = s & ((1u << FAN_DT_COUNT) - 1u);
    fan_dtype sum = FAN_DT_NONE;
    if (left == s && s && !(s & (s - 1))) /* one dtype alone, as mostly */
        return (fan_dtype)__builtin_ctz(s);
    fan_dtype_set eights = s & FAN_FLOAT8_SET;
    if (eights & (eights - 1))
        return FAN_DT_NONE;
    while (left) {
        fan_dtype best = FAN_DT_NONE;
        for (int d = 0; d < FAN_DT_COUNT; d++)
            if ((left >> d & 1u) && (best == FAN_DT_NONE || weight((fan_dtype)d) > weight(best)))
                best = (fan_dtype)d;
        left &= ~(1u << (unsigned)best);
        sum = sum == FAN_DT_NONE ? best : fan_dtype_promote(sum, best);
        if (sum == FAN_DT_NONE)
            return FAN_DT_NONE;
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
    for (size_t i = 0; i < sizeof weak / sizeof *weak; i++)
        if (s & weak[i].bit)
            sum = only_weak ? weak[i].alone : fan_dtype_promote_weak(sum, weak[i].kind);
    return sum;
}

fan_dtype fan_accum_dtype(fan_dtype d, fan_dtype wish)
{
    if (wish == FAN_DT_NONE)
        return fan_dtype_accumulate(d);
    /* Its own kind, so that the last rounding is one that A10 allows. */
    char from = fan_dtype_kind(d), to = fan_dtype_kind(wish);
    bool kin = (from == 'u' ? 'i' : from) == (to == 'u' ? 'i' : to);
    return kin && fan_dtype_promote(d, wish) == wish ? wish : FAN_DT_NONE;
}

fan_fit fan_accum_fit(bool declared, int slot_ndim, const int64_t *slot_shape, int ndim,
                      const int64_t *shape)
{
    if (slot_ndim == ndim &&
        (ndim == 0 || memcmp(slot_shape, shape, (size_t)ndim * sizeof *shape) == 0))
        return FAN_FIT_EXACT;
    if (declared && fan_broadcasts_from(ndim, shape, slot_ndim, slot_shape))
        return FAN_FIT_REDUCE;
    return FAN_FIT_NO;
}
