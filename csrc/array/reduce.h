/* reduce: the sum of an array over some of its axes (D7). */
#ifndef FAN_ARRAY_REDUCE_H
#define FAN_ARRAY_REDUCE_H

#include "array/array.h"

/* fan_reduce_dtype: returns the dtype in which D7 folds: float64 for floats, complex128 for complex, the dtype itself
 * for the rest. */
fan_dtype fan_reduce_dtype(fan_dtype d);
/* fan_reduce: sums `in` over leading and stretched axes into `out` (fresh, any dtype, shape broadcasts to in's). May be
 * interrupted. */
void fan_reduce(const fan_array *out, const fan_array *in);

#endif
