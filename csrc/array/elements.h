/* elements: an array's elements, whatever its strides: copied, set to zero, hashed. */
#ifndef FAN_ARRAY_ELEMENTS_H
#define FAN_ARRAY_ELEMENTS_H

#include "array/array.h"

/* fan_array_copy: elements of src into dst (same shape), converting dtype (D6, D9); any strides, any alignment. No
 * overlap. */
void fan_array_copy(const fan_array *dst, const fan_array *src);
/* fan_fill_zero: zero into every element of out. */
void fan_fill_zero(const fan_array *out);
/* fan_array_hash: a 64-bit hash of the elements' bytes in C order; for debug. May be interrupted. */
uint64_t fan_array_hash(const fan_array *a);

#endif
