/* weights: the weights of a slot's contributions (docs/rules.md, W1 to W7), and the divisor of
 * their mean.
 *
 * A contribution of the general path keeps its weight in its item. A plain entry (plain.h) has a
 * bit; its weight is in the table here, in the order of arrival. The sum of all weights is exact: a
 * float64 as long as no addition rounds, a superaccumulator from then on.
 *
 * Under the slot's lock, or, where plain entries are, inside the interpreter. */
#ifndef FAN_BUFFER_WEIGHTS_H
#define FAN_BUFFER_WEIGHTS_H

#include "array/superacc.h"
#include "buffer/internal.h"

/* The exact sum of weights; all zero: none yet. */
typedef struct fan_weight_sum {
    int64_t whole; /* small integers, as counts of tokens are; beside the rest */
    double re;
    double im;
    bool spilled; /* the rest is in the limbs: re and im are 0 */
    uint64_t limbs[2][FAN_EXACT_LIMBS];
} fan_weight_sum;

/* fan_weight_sum_add: adds a weight, or takes it away. */
void fan__weight_sum_add(fan_weight_sum *sum, const fan_weight *weight, bool minus);
static inline void fan_weight_sum_add(fan_weight_sum *sum, const fan_weight *weight, bool minus)
{
    bool small = weight->re < 0x1p31 && weight->re > -0x1p31 && weight->im == 0;
    int32_t whole = small ? (int32_t)weight->re : 0;
    if (!small || weight->re != whole) {
        fan__weight_sum_add(sum, weight, minus);
        return;
    }
    if (minus)
        whole = -whole;
    sum->whole += whole;
}

/* A weight of a plain entry. */
typedef struct fan_plain_weight {
    int64_t key; /* -1: none */
    fan_weight weight;
} fan_plain_weight;

typedef struct fan_slot_weights {
    int64_t given; /* contributions that came with a weight; 0: all else is unset */
    fan_weight_sum sum;
    fan_plain_weight *plain; /* in the order of arrival, or of keys */
    size_t n;
    size_t cap;
    bool unsorted;
} fan_slot_weights;

/* fan_slot_weighted: whether some contribution of the pass came with a weight. */
static inline bool fan_slot_weighted(const fan_slot *s)
{
    return s->weights && s->weights->given;
}
/* fan_slot_weights_begin: makes room for one weight more, of a plain entry where `plain` is set.
 *   false: out of memory; nothing happened */
bool fan__slot_weights_begin(fan_slot *s, bool plain);
static inline bool fan_slot_weights_begin(fan_slot *s, bool plain)
{
    const fan_slot_weights *weights = s->weights;
    if (weights && (!plain || weights->n < weights->cap))
        return true;
    return fan__slot_weights_begin(s, plain);
}
/* fan_slot_weights_put: cannot fail: one more contribution has a weight. */
void fan__slot_weights_first(fan_slot_weights *weights);
static inline void fan_slot_weights_put(fan_slot *s, const fan_weight *weight)
{
    fan_slot_weights *weights = s->weights;
    if (!weights->given)
        fan__slot_weights_first(weights);
    weights->given++;
    fan_weight_sum_add(&weights->sum, weight, false);
}
/* fan_slot_weights_put_plain: the same of a plain entry. */
static inline void fan_slot_weights_put_plain(fan_slot *s, int64_t key, const fan_weight *weight)
{
    fan_slot_weights_put(s, weight);
    fan_slot_weights *weights = s->weights;
    if (weights->n && key < weights->plain[weights->n - 1].key)
        weights->unsorted = true;
    weights->plain[weights->n++] = (fan_plain_weight){.key = key, .weight = *weight};
}
/* fan_slot_weights_take_back: the last that was put has none. */
void fan_slot_weights_take_back(fan_slot *s, const fan_weight *weight);
/* fan_slot_weights_clear: of a slot that is emptied. */
static inline void fan_slot_weights_clear(fan_slot *s)
{
    if (s->weights) {
        s->weights->given = 0;
        s->weights->n = 0;
    }
}
void fan_slot_weights_free(fan_slot *s);

/* fan_weights_of: writes the weight of each of n entries of the slot's list, the first ones; not
 * on: it has none. */
void fan_weights_of(fan_slot *s, const fan_entry *entries, size_t n, fan_weight *out);
/* fan_slot_weights_drop_plain: the weights of the first n entries, which leave the list, go. */
void fan_slot_weights_drop_plain(fan_slot *s, const fan_entry *entries, size_t n);

/* fan_weight_multiplies: whether a weight changes its term: it is there, and not 1. */
static inline bool fan_weight_multiplies(const fan_weight *weight)
{
    return weight->on && (weight->re != 1 || weight->im != 0);
}

/* fan_weight_check: W4: whether a weight is one for terms of dtype d, which are no objects, in the
 * accumulation dtype acc (FAN_DT_NONE: of an exact sum). */
fan_status fan_weight_check(const fan_buffer *b, size_t slot, int64_t key, const fan_weight *weight,
                            fan_dtype d, fan_dtype acc, fan_error *err);
/* fan_weight_check_value: the same of a contribution, and whether its form takes a weight. `d`: the
 * dtype that it will have; reduced: it will be dense, summed to the slot's shape. */
fan_status fan_weight_check_value(const fan_buffer *b, size_t slot, int64_t key,
                                  const fan_weight *weight, const fan_value *value, fan_dtype d,
                                  bool reduced, fan_error *err);

/* fan_divisor_of: W3: of a sum of weights and `ones` contributions without one.
 * FAN_ERR_ZERO_DIVISION: it is 0. */
fan_status fan_divisor_of(const fan_buffer *b, size_t slot, const fan_weight_sum *sum, int64_t ones,
                          fan_divisor *out, fan_error *err);

#endif
