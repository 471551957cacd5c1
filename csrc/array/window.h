/* window: exact partial sums in integers, 8 bytes per number. The running sum of
 * accumulate="exact", in memory and between ranks.
 *
 *   number i of a block = word[i] * 2^base   a block is 256 numbers; a complex element is two
 *
 * The sum is exact, so any order of terms and any tree of merges leads to the same numbers. A block
 * has
 *
 *   base     its unit is 2^base. The first terms choose it a few bits below their lowest set bit. A
 *            term with a bit below it lowers it: every word is shifted left.
 *   bound    no |number| exceeds it. It grows by the largest |term| of each addition, and excludes
 *            an overflow without a read of the words. If it does not fit any more, the words are
 *            read and it is computed anew.
 *   form     words of 64 bits; of 128 where the range of its terms requires them; superaccumulators
 *            (superacc.h) beyond
 *
 * Values of the top word that no number reaches represent "only -0.0 so far", +inf, -inf and NaN,
 * as in superacc.h, so these need no memory of their own.
 *
 * Additions and merges first reserve (this may allocate and fail, and changes no number), then add
 * (which cannot fail): after a failure the window holds what it held before. Not thread-safe; reads
 * of one window may run concurrently. */
#ifndef FAN_ARRAY_WINDOW_H
#define FAN_ARRAY_WINDOW_H

#include "array/sum.h"

#define FAN_WINDOW_BLOCK 256 /* numbers */

typedef struct fan_window fan_window;

/* fan_window_new: allocates the empty sum (which would round to -0.0) of `size` elements of dtype
 * d, a real or complex float (fan_exact_fits). NULL when out of memory. */
fan_window *fan_window_new(fan_dtype d, int64_t size);
void fan_window_free(fan_window *w); /* w may be NULL */
/* fan_window_copy: allocates the same sum in a dtype that contains w's (D3): real or complex, as
 * wide or wider. NULL when out of memory. */
fan_window *fan_window_copy(const fan_window *w, fan_dtype d);
/* fan_window_spread: allocates the sum of an array of `shape` whose elements repeat along `axes`
 * those of w, which has one there; both in C order. NULL when out of memory. */
fan_window *fan_window_spread(const fan_window *w, int ndim, const int64_t *shape, uint64_t axes);
fan_dtype fan_window_dtype(const fan_window *w);

/* fan_window_add: adds n arrays of one shape with w's number of elements, in C order, each
 * converted to w's dtype first. FAN_ERR_NOMEM: nothing was added. At most 2^30 terms in all. */
fan_status fan_window_add(fan_window *w, const fan_array *const *in, size_t n, fan_error *err);
/* fan_window_add_at: adds the i-th element of `values`, in C order, to element at[i]; indices may
 * repeat. */
fan_status fan_window_add_at(fan_window *w, const fan_array *values, const int64_t *at,
                             fan_error *err);
/* fan_window_round: writes the sum, times *scale (NULL: 1), rounded once as fan_exact_fold rounds,
 * to `out`, which has the shape of the terms; w does not change. */
void fan_window_round(const fan_array *out, const fan_window *w, const fan_scale *scale);

/* fan_window_size: returns the number of elements. */
int64_t fan_window_size(const fan_window *w);

/* Messages between ranks: each block in the fewest whole bytes per number that hold it. Numbers are
 * little-endian. */

/* fan_window_room: returns how many bytes fan_window_pack writes at most. */
size_t fan_window_room(const fan_window *w);
/* fan_window_pack: writes the sum to `to` and returns the number of bytes: a multiple of 8 if the
 * blocks are whole. */
size_t fan_window_pack(const fan_window *w, void *to);
/* fan_window_merge_packed: adds the packed sum of as many numbers at the begin of `from`, and sets
 * *used to its bytes. FAN_ERR_VALUE, and nothing is added, if the bytes do not begin with the
 * message of such a sum. */
fan_status fan_window_merge_packed(fan_window *w, const void *from, size_t bytes, size_t *used,
                                   fan_error *err);

#ifdef FAN_TEST
/* fan_window_merge: adds the sum `from`, of the same dtype and size. */
fan_status fan_window_merge(fan_window *w, const fan_window *from, fan_error *err);
/* fan_window_bytes: returns the memory that the window occupies. */
size_t fan_window_bytes(const fan_window *w);
/* fan_window_forms: counts the blocks of each form: empty, 64 bits, 128 bits, superaccumulators. */
void fan_window_forms(const fan_window *w, int64_t count[4]);
#endif

#endif
