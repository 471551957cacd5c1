/* exact: sums that do not depend on order: the exact sum of all elements, rounded once (A11,
 * accumulate="exact").
 *
 *   out[i] = round((in0[i] + in1[i] + in2[i] ..) * scale)         each in[k] first converted to the
 * sum's dtype
 *
 * The bracket is exact, the factor too (as a float64): one rounding to nearest even to out's dtype,
 * and only the final value can overflow. Infinities follow the extended reals: a NaN, or +inf with
 * -inf, makes NaN; else an inf makes that inf. A zero sum is -0.0 if every term is -0.0, else +0.0,
 * as in a left fold. Complex sums are exact part by part.
 *
 * Between folds and between ranks an unfinished sum is a window (window.h). */
#ifndef FAN_ARRAY_EXACT_H
#define FAN_ARRAY_EXACT_H

#include "array/sum.h"

/* fan_exact_fits: returns whether sums of dtype d can be exact: real and complex floats. */
bool fan_exact_fits(fan_dtype d);

/* fan_exact_fold: writes the exact sum of `n` >= 1 arrays, each converted to d first, to `out`
 * (real for a real d, complex for a complex one; narrower or wider than d). Ignores the operands'
 * acc; scale may be NULL; a complex factor that is not real multiplies the parts rounded to
 * float64. Allocates nothing, cannot fail, may be interrupted. `out` may be the very view of one
 * operand, as in fan_sum; otherwise it must not overlap any. */
void fan_exact_fold(const fan_array *out, const fan_operand *in, size_t n, fan_dtype d,
                    const fan_scale *scale);

#ifdef FAN_TEST
/* fan_exact_sum: as fan_exact_fold, for arrays alone. */
void fan_exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d,
                   const fan_scale *scale);
/* fan_exact_slow: returns how many elements of the process took the integer path. */
int64_t fan_exact_slow(void);
#endif

#endif
