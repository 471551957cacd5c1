/* elements: copies, zeroes and hashes the elements of an array with any strides. */
#ifndef FAN_ARRAY_ELEMENTS_H
#define FAN_ARRAY_ELEMENTS_H

#include "array/array.h"

/* fan_array_copy: copies the elements of src to dst (same shape), converting the dtype (D6, D9); any strides, any
 * alignment. No overlap. */
void fan_array_copy(const fan_array *dst, const fan_array *src);
/* fan_fill_zero: writes zero to every element of out. */
void fan_fill_zero(const fan_array *out);
/* fan_array_hash: returns a 64-bit hash of the elements' bytes in C order; for debug. May be interrupted. */
uint64_t fan_array_hash(const fan_array *a);

#endif
