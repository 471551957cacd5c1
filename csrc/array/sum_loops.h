/* sum_loops: the innermost loops of sums, one set for each kind of number. All the loops over dtypes that add are made here. */
#ifndef FAN_ARRAY_SUM_LOOPS_H
#define FAN_ARRAY_SUM_LOOPS_H

#include "array/dtype.h"

/* No `add` takes more sources. */
#define FAN_ADD_MOST 8

typedef struct fan_loops {
    size_t parts; /* numbers in an element: 2 for complex, else 1 */
    int most;     /* sources that one call of `add` takes at most: from 2 to FAN_ADD_MOST */
    /* add: dst[i] = ((src[0][i] + src[1][i]) + src[2][i]) .., for `n` numbers and 1 <= sources <= most. dst may be exactly one of the sources. */
    void (*add)(char *dst, const char *const *src, int sources, size_t n);
    /* add_at: for each i < n in turn, `run` numbers at dst + to[i] += those at src + from[i] (NULL: one behind the other). */
    void (*add_at)(char *dst, const int64_t *to, const char *src, const int64_t *from, size_t n, size_t run);
    /* add_up: acc += each of n elements in turn. */
    void (*add_up)(char *acc, const char *src, size_t n);
    /* scale: n elements of dst *= the element at factor. */
    void (*scale)(char *dst, const char *factor, size_t n);
} fan_loops;

/* fan_loops_of: the loops of a dtype; each add of a low float is done in float32 and rounded. */
const fan_loops *fan_loops_of(fan_dtype d);

#endif
