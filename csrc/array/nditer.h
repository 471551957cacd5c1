/* nditer: one order in which to visit the elements of several arrays of one shape, with as few axes
 * as possible.
 *
 * Axes are sorted by the leading array's strides (so its memory is visited front to back), axes of
 * extent 1 are dropped, and neighbours that every array steps through as one are joined: C-order
 * arrays of any rank become one axis. Needs no memory per array: call fan_nditer_begin with the
 * leader, fan_nditer_also with each other array, then fan_nditer_ready; position `at` counts
 * elements from 0 to size. */
#ifndef FAN_ARRAY_NDITER_H
#define FAN_ARRAY_NDITER_H

#include "array/array.h"

typedef struct fan_nditer {
    int ndim;
    int64_t size;
    uint64_t joined;        /* bit i: axis i and i + 1 may be one (until fan_nditer_ready) */
    int axis[FAN_MAX_NDIM]; /* the axis whose stride a joined axis has */
    int64_t extent[FAN_MAX_NDIM];
} fan_nditer;

/* fan_nditer_begin: starts with the leader; in_order keeps C order instead of following the
 * leader's strides. */
void fan_nditer_begin(fan_nditer *w, const fan_array *leader, bool in_order);
void fan_nditer_also(fan_nditer *w, const fan_array *a);
void fan_nditer_ready(fan_nditer *w);
/* fan_nditer_one: begins with one array alone, and is ready. */
void fan_nditer_one(fan_nditer *w, const fan_array *a, bool in_order);

/* fan_nditer_whole: returns the address of elements [at, at + n) of `a` if they are contiguous,
 * else NULL. */
char *fan_nditer_whole(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n);
/* fan_nditer_read, _write: copy elements [at, at + n) of `a` to and from a gap-free buffer of dtype
 * d, converting. */
void fan_nditer_read(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n, fan_dtype d,
                     char *buf);
void fan_nditer_write(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n, fan_dtype d,
                      const char *buf);

/* fan_nditer_elements: returns the address of elements [at, at + n) of `a` in dtype d: in place, or
 * read into `buf`. */
const char *fan_nditer_elements(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n,
                                fan_dtype d, char *buf);

/* elements: copies, zeroes and hashes the elements of an array with any strides. */
/* fan_array_copy: copies the elements of src to dst (same shape), converting the dtype (D6, D9);
 * any strides, any alignment. No overlap. */
void fan_array_copy(const fan_array *dst, const fan_array *src);
/* fan_fill_zero: writes zero to every element of out. */
void fan_fill_zero(const fan_array *out);
/* fan_array_hash: returns a 64-bit hash of the elements' bytes in C order; for debug. May be
 * interrupted. */
uint64_t fan_array_hash(const fan_array *a);

#endif
