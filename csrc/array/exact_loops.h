/* exact_loops: the fast loops of exact sums over one tile, made by macros for each way to read terms and each vector
 * unit: the sum of a tile in float64, the facts for its proof, and the proof (exact.c has the essay). For array/exact
 * alone. */
#ifndef FAN_ARRAY_EXACT_LOOPS_H
#define FAN_ARRAY_EXACT_LOOPS_H

#include "array/superacc.h"

#define FAN_EXACT_TILE 512  /* numbers */
#define FAN_EXACT_SOURCES 8 /* read side by side */

/* The sum of each number of a tile, and the facts for its proof. */
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
    enum { TO_DOUBLE, TO_SINGLE, TO_LOW } grid; /* the type to which it will be rounded */
    bool scaled, shifts; /* there is a factor; it is a power of two, or absent: products are exact */
    double by;
} judge;

typedef struct low_ways {
    void (*up)(float *to, const char *from, size_t len);
    void (*down)(char *to, const float *from, size_t len);
} low_ways;

/* The loops of one vector unit. */
typedef struct exact_loops {
    low_ways low[FAN_DT_COUNT]; /* of low floats; else NULL */
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

/* fan__exact_loops: returns the loops for the widest vector unit of this machine. */
const exact_loops *fan__exact_loops(void);
int fan__exact_isa_now(void); /* as fan_sum_isa_rank, limited by fan_exact_isa */
/* fan__exact_judge_again: repeats the proof if there is a factor, or if a sum of float64 is rounded to a narrower type.
 * `sum` is exact where `bad` is 0 (or, wide, the float64 nearest to the exact sum); an element that was bad may pass if
 * its product is certain. */
bool fan__exact_judge_again(tally *t, const judge *j, bool is_wide, size_t len);

#ifdef FAN_TEST
/* fan_exact_isa: limits the vector unit: 0 the baseline, 1 AVX2, 2 AVX-512, -1 the widest. No result bit depends on it.
 * Returns the one now in use. */
int fan_exact_isa(int most);
#endif

#endif
