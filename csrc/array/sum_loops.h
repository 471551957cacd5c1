/* sum_loops: the innermost loops of sums, one set for each number type and each instruction set.
 * All the loops over dtypes that add are made here.
 *
 * They are written once, in sum_body.h, which is compiled for each instruction set; the widest that
 * the machine has is chosen on first use. All give the same bits (NaNs may differ in payload): only
 * lanes differ, not the order of an element's additions. */
#ifndef FAN_ARRAY_SUM_LOOPS_H
#define FAN_ARRAY_SUM_LOOPS_H

#include "array/dtype.h"
#include "array/stats.h"

/* Options of a fold; NULL: defaults. */
typedef struct fan_loop_options {
    /* multiplies the sum before the last rounding: one number of the accumulation dtype; NULL:
     * none. Not for complex */
    const char *factor;
    /* numbers of the accumulation dtype with which the fold begins, before the first source; NULL:
     * it begins with that */
    const char *start;
    /* for each source one number of the accumulation dtype's parts, by which it is multiplied, and
     * the product rounded; NULL: none. `start` has none. */
    const char *weights;
    /* divides the sum before `factor`: one number of those parts; NULL: none. Of floats alone. */
    const char *divisor;
    bool raw;   /* dst gets the sum in the accumulation dtype, without the last rounding */
    bool ahead; /* the sources are larger than the L2 cache: prefetch them */
    /* dst is larger than the last cache and none of the sources: store past the caches */
    bool stream;
} fan_loop_options;

typedef struct fan_sources {
    const char *const *at;
    size_t n;
} fan_sources;

/* dst[i] = ((at[0][i] + at[1][i]) + at[2][i]) .., for `count` numbers and n >= 1 gap-free sources
 * (n >= 0 beside `start`). dst may be exactly one of the sources or `start`. */
typedef void fan_fold_loop(char *dst, fan_sources from, size_t count,
                           const fan_loop_options *options);

/* As fan_fold_loop for real floats, and counts the written numbers into r. Ends before a step with
 * a non-finite result, or if less than a step is left; returns how many numbers were summed,
 * counted and written. Of `options` it uses factor and stream. n >= 1. */
typedef size_t fan_watch(char *dst, fan_sources from, size_t count, const fan_loop_options *options,
                         fan_stats_run *r);

typedef struct fan_loops {
    size_t size;        /* bytes of an element */
    size_t parts;       /* numbers in an element: 2 for complex, else 1 */
    fan_fold_loop *own; /* added in the dtype itself; a low float rounds each time */
    fan_fold_loop *up;  /* added in the dtype `upper` and rounded once; NULL: there is none */
    /* float32 for the low floats, float64 for float32, complex128 for complex64 */
    fan_dtype upper;
    /* add_at: for each i < n in turn, adds `run` numbers at src + from[i] (NULL: consecutive) to
     * those at dst + to[i]. */
    void (*add_at)(char *dst, const int64_t *to, const char *src, const int64_t *from, size_t n,
                   size_t run);
    /* add_up: acc += each of n elements in turn. */
    void (*add_up)(char *acc, const char *src, size_t n);
    /* scale: n elements of dst *= the element at factor. */
    void (*scale)(char *dst, const char *factor, size_t n);
    /* measure: counts n more elements into r. */
    void (*measure)(fan_stats_run *r, const char *src, size_t n);
    fan_watch *own_watch, *up_watch; /* beside own and up; NULL: none */
} fan_loops;

/* The loops of one instruction set. */
typedef struct fan_loop_set {
    const char *name;
    /* reads every byte once, with as little else as possible */
    uint64_t (*read)(const char *p, size_t bytes);
    fan_loops of[FAN_DT_COUNT];
} fan_loop_set;

/* fan_loops_fold: returns the loop that adds sources of dtype d in `acc`; NULL if there is none. */
static inline fan_fold_loop *fan_loops_fold(const fan_loops *loops, fan_dtype d, fan_dtype acc)
{
    if (d == acc)
        return loops->own;
    if (loops->upper == acc)
        return loops->up;
    return NULL;
}

/* fan_loops_apply: applies `options` to `len` elements from src to dst, in their own dtype. */
static inline void fan_loops_apply(const fan_loops *loops, char *dst, const char *src, int64_t len,
                                   const fan_loop_options *options)
{
    fan_sources one = {&src, 1};
    loops->own(dst, one, (size_t)len * loops->parts, options);
}

#endif
