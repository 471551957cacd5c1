/* exact: sums that do not depend on order: the exact sum of all elements, rounded once (A11, accumulate="exact").
 *
 *   out[i] = round((in0[i] + in1[i] + in2[i] ..) * scale)         each in[k] first converted to the sum's dtype
 *
 * What is in the brackets is exact, the factor too (as a float64): one rounding to nearest even into out's dtype, and
 * only the final value can overflow. Beyond numbers it is what real numbers with infinities give: a NaN, or +inf with
 * -inf, makes NaN; else an inf makes that inf. A sum that is zero is -0.0 where every term is -0.0, else +0.0, as a
 * left fold has it. Complex sums are exact part by part.
 *
 * Between folds a sum that is not finished is kept as superaccumulators, one for each number: limbs of 64 bits, exact
 * for every number of terms below 2^30. They are large (fan_superacc_size: 40 bytes for a float32): to park ten float32
 * costs the same. A buffer without a bound parks all and calls fan_exact_fold, which needs none.
 */
#ifndef FAN_ARRAY_EXACT_H
#define FAN_ARRAY_EXACT_H

#include "array/sum.h"

/* fan_exact_fits: sums of dtype d can be exact: the real and complex floats. */
bool fan_exact_fits(fan_dtype d);

/* fan_exact_fold: writes the exact sum of `n` >= 1 arrays, each converted to d first, into `out` (real for a real d,
 * complex for a complex one; narrower or wider than d); the operands' acc is not looked at; scale may be NULL; a
 * complex factor that is not real multiplies the parts rounded to float64. Allocates nothing, cannot fail, may be
 * interrupted. `out` may be the very view of one operand, as in fan_sum; otherwise it must be apart from all. */
void fan_exact_fold(const fan_array *out, const fan_operand *in, size_t n, fan_dtype d, const fan_scale *scale);

/* fan_superacc_size: bytes of the superaccumulators of one element of a sum of dtype d; 0 where d does not fit. */
size_t fan_superacc_size(fan_dtype d);
/* fan_superacc_start: `size` elements of nothing added yet (which would round to -0.0). They stand in C order of the
 * elements, aligned to 8. */
void fan_superacc_start(void *accs, fan_dtype d, int64_t size);
/* fan_superacc_add: adds n arrays of one shape, each converted to d first, to those of their elements. */
void fan_superacc_add(void *accs, fan_dtype d, const fan_array *const *in, size_t n);
/* fan_superacc_add_at: adds the i-th element of `values`, in C order, converted to d first, to those of element at[i].
 */
void fan_superacc_add_at(void *accs, fan_dtype d, const fan_array *values, const int64_t *at);
/* fan_superacc_round: rounds them into `out` as fan_exact_fold does; they stay as they are. */
void fan_superacc_round(const fan_array *out, const void *accs, fan_dtype d, const fan_scale *scale);
/* fan_superacc_widen: the same sums for a dtype that holds d (D3), apart from the old ones. */
void fan_superacc_widen(void *to, fan_dtype wider, const void *from, fan_dtype d, int64_t size);

#ifdef FAN_TEST
/* fan_exact_sum: fan_exact_fold of arrays alone. */
void fan_exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d, const fan_scale *scale);
/* fan_exact_slow: elements that needed the integer path so far, over the process. */
int64_t fan_exact_slow(void);
#endif

#endif
