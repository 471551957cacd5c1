/* exact_weighted: exact sums of products, and exact means (W2):
 *
 *   out[i] = round((w0 * in0[i] + w1 * in1[i] ..) / divisor * scale)
 *
 * All of it is exact but the one rounding, over the whole range of float64. */
#ifndef FAN_ARRAY_EXACT_WEIGHTED_H
#define FAN_ARRAY_EXACT_WEIGHTED_H

#include "array/sum.h"

/* fan_exact_weighted: as fan_exact_fold (array/exact.h), which calls it where an operand has a
 * weight or the scale a divisor. A complex weight is multiplied exactly, too. */
void fan_exact_weighted(const fan_array *out, const fan_operand *in, size_t n, fan_dtype d,
                        const fan_scale *scale);

#endif
