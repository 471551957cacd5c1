/* measure: the statistics of an existing array. */
#ifndef FAN_ARRAY_MEASURE_H
#define FAN_ARRAY_MEASURE_H

#include "array/array.h"
#include "array/stats.h"

/* fan_stats_of: computes the statistics of an array, in the order of its memory, exactly as fan_sum does for a result
 * with these strides; bad is 0 or SIZE_MAX. May be interrupted. */
void fan_stats_of(const fan_array *a, fan_stats *s);

#endif
