/* exact_loops: the fast loops of exact sums, over one tile, made by macros for each way to read terms and each vector
 * unit: the sum of a tile in float64, what is known of it, and the proof that it is right (exact.c has the essay). For
 * array/ exact alone. */
#ifndef FAN_ARRAY_EXACT_LOOPS_H
#define FAN_ARRAY_EXACT_LOOPS_H

#include "array/superacc.h"

#define FAN_EXACT_TILE 512  /* numbers */
#define FAN_EXACT_SOURCES 8 /* that are read side by side */

/* What is known of each number of a tile. */
typedef struct tally {
    double sum[FAN_EXACT_TILE];
    double rest[FAN_EXACT_TILE]; /* wide */
    union {
        struct {
            uint32_t low[FAN_EXACT_TILE],
                high[FAN_EXACT_TILE]; /* twice the bits of |x|: the smallest less one, the largest */
        };
        struct {
            double small[FAN_EXACT_TILE], large[FAN_EXACT_TILE]; /* wide */
        };
    };
    uint32_t bad[FAN_EXACT_TILE]; /* not proved */
    float odd[FAN_EXACT_TILE];
} tally;

/* How a tile is judged. */
typedef struct judge {
    size_t n; /* terms */
    int digits;
    bool always;
    enum { TO_DOUBLE, TO_SINGLE, TO_LOW } grid; /* what it will be rounded to */
    bool scaled, shifts; /* there is a factor; it is a power of two, or none: products are exact */
    double by;
} judge;

typedef struct low_ways {
    void (*up)(float *to, const char *from, size_t len);
    void (*down)(char *to, const float *from, size_t len);
} low_ways;

/* The loops of one vector unit. */
typedef struct exact_loops {
    low_ways half, bfloat16, e4m3fn, e5m2;
    void (*narrow)(tally *t, const char *const *src, bool first, size_t len);
    void (*plain)(tally *t, const char *const *src, bool first, size_t len);
    void (*wide)(tally *t, const char *const *src, bool first, size_t len);
    bool (*judge_narrow)(tally *t, const judge *j, size_t len);
    bool (*judge_wide)(tally *t, const judge *j, size_t len);
    void (*odd)(float *to, const double *from, size_t len);
    bool (*single)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
    bool (*brain)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
    bool (*twice)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
    bool (*half_sum)(char *dst, const char *const *src, int sources, const judge *j, size_t len, bool quick);
} exact_loops;

/* fan__exact_loops: those of the widest unit that this machine has. */
const exact_loops *fan__exact_loops(void);
/* fan__exact_judge_again: where there is a factor, or a sum of float64 becomes something narrower. `sum` is exact where
 * it is not bad (or, wide, the float64 next to the exact sum); bad ones may pass here if their product is sure all the
 * same. */
bool fan__exact_judge_again(tally *t, const judge *j, bool is_wide, size_t len);

#ifdef FAN_TEST
/* fan_exact_isa: the vector unit that is used at most: 0 the baseline, 1 AVX2, 2 AVX-512, -1 whatever is here. No bit
 * depends on it. Returns what is used from now on. */
int fan_exact_isa(int most);
#endif

#endif
