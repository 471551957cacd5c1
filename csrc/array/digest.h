/* digest: a 64-bit digest of an array, to compare arrays of two runs without keeping them.
 *
 * It depends on the dtype, on the shape, and on each element at its place in C order; not on
 * strides, alignment, threads or instruction set. All NaNs are one (A15 does not say which). It is
 * no cryptographic hash: two arrays that differ have equal digests once in 2^64 where nobody makes
 * them so. The digest of an array is never 0. */
#ifndef FAN_ARRAY_DIGEST_H
#define FAN_ARRAY_DIGEST_H

#include "array/array.h"
#include "array/patch.h"
#include "array/sparse.h"

/* fan_digest_array: returns the digest of host memory. Large arrays are read by several threads. */
uint64_t fan_digest_array(const fan_array *a);
/* fan_digest_sparse: the same of stored entries: format, dense shape, indices and values as they
 * are, in their order. */
uint64_t fan_digest_sparse(const fan_sparse *s);
/* fan_digest_partial: the same of the values of a partial gradient and their place. */
uint64_t fan_digest_partial(const fan_patch *p, const fan_array *values);
/* fan_digest_number: mixes a number, such as a weight, into a digest. */
uint64_t fan_digest_number(uint64_t digest, double number);
/* fan_digest_zero: the same of a symbolic zero, which has a dtype and a shape alone. */
uint64_t fan_digest_zero(const fan_array *shape);

#endif
