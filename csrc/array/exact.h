/* exact: sums that do not depend on order: the exact sum of all elements, rounded once (A11, accumulate="exact").
 *
 *   out[i] = round((in0[i] + in1[i] + in2[i] ..) * scale)         each in[k] first converted to the sum's dtype
 *
 * The bracket is exact, the factor too (as a float64): one rounding to nearest even to out's dtype, and only the final
 * value can overflow. Infinities follow the extended reals: a NaN, or +inf with -inf, makes NaN; else an inf makes that
 * inf. A zero sum is -0.0 if every term is -0.0, else +0.0, as in a left fold. Complex sums are exact part by part.
 *
 * Between folds an unfinished sum is kept as superaccumulators, one per number: limbs of 64 bits, exact for fewer than
 * 2^30 terms. They are large (fan_superacc_size: 40 bytes for a float32, as much as ten parked float32). A buffer
 * without a budget parks all and calls fan_exact_fold, which needs none. */
#ifndef FAN_ARRAY_EXACT_H
#define FAN_ARRAY_EXACT_H

#include "array/sum.h"

/* fan_exact_fits: returns whether sums of dtype d can be exact: real and complex floats. */
bool fan_exact_fits(fan_dtype d);

/* fan_exact_fold: writes the exact sum of `n` >= 1 arrays, each converted to d first, to `out` (real for a real d,
 * complex for a complex one; narrower or wider than d). Ignores the operands' acc; scale may be NULL; a complex factor
 * that is not real multiplies the parts rounded to float64. Allocates nothing, cannot fail, may be interrupted. `out`
 * may be the very view of one operand, as in fan_sum; otherwise it must not overlap any. */
void fan_exact_fold(const fan_array *out, const fan_operand *in, size_t n, fan_dtype d, const fan_scale *scale);

/* fan_superacc_size: returns the bytes of the superaccumulators of one element of a sum of dtype d; 0 if d does not
 * fit. */
size_t fan_superacc_size(fan_dtype d);
/* fan_superacc_start: initializes `size` elements to the empty sum (which would round to -0.0). They are in C order,
 * aligned to 8. */
void fan_superacc_start(void *accs, fan_dtype d, int64_t size);
/* fan_superacc_add: adds n arrays of one shape, each converted to d first, to the elements' superaccumulators. */
void fan_superacc_add(void *accs, fan_dtype d, const fan_array *const *in, size_t n);
/* fan_superacc_add_at: adds the i-th element of `values`, in C order, converted to d first, to element at[i]. */
void fan_superacc_add_at(void *accs, fan_dtype d, const fan_array *values, const int64_t *at);
/* fan_superacc_round: rounds them to `out` as fan_exact_fold does; they do not change. */
void fan_superacc_round(const fan_array *out, const void *accs, fan_dtype d, const fan_scale *scale);
/* fan_superacc_widen: writes the same sums for a dtype that contains d (D3) to `to`, which must not overlap `from`. */
void fan_superacc_widen(void *to, fan_dtype wider, const void *from, fan_dtype d, int64_t size);

#ifdef FAN_TEST
/* fan_exact_sum: as fan_exact_fold, for arrays alone. */
void fan_exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d, const fan_scale *scale);
/* fan_exact_slow: returns how many elements of the process took the integer path. */
int64_t fan_exact_slow(void);
#endif

#endif
