/* exact_loops: the fast loops of exact sums over one tile, made by macros for each way to read
 * terms and each vector unit: the sum of a tile in float64, the facts for its proof, and the proof
 * (exact.c has the essay). And the terms, read tile by tile in one dtype. For exact.c and
 * window.c. */
#ifndef FAN_ARRAY_EXACT_LOOPS_H
#define FAN_ARRAY_EXACT_LOOPS_H

#include "array/convert.h"
#include "array/nditer.h"
#include "array/sum.h"
#include "array/superacc.h"
#include "base/fault.h"

#define FAN_EXACT_TILE 512  /* numbers */
#define FAN_EXACT_SOURCES 8 /* read side by side */

/* The sum of each number of a tile, and the facts for its proof. */
typedef struct tally {
    double sum[FAN_EXACT_TILE];
    double rest[FAN_EXACT_TILE]; /* wide */
    union {
        struct {
            /* twice the bits of |x|: the smallest less one, the largest */
            uint32_t low[FAN_EXACT_TILE];
            uint32_t high[FAN_EXACT_TILE];
        };
        struct { /* wide */
            double small[FAN_EXACT_TILE];
            double large[FAN_EXACT_TILE];
        };
    };
    uint32_t bad[FAN_EXACT_TILE]; /* not proved */
    float odd[FAN_EXACT_TILE];
} tally;

/* What multiplies the sum. */
enum {
    NO_FACTOR,
    SHIFT,   /* a power of two: products are exact */
    PRODUCT, /* another number: products are rounded to odd */
    FACTORS
};

/* How a tile is judged. */
typedef struct judge {
    size_t n; /* terms */
    int digits;
    bool always;
    enum {
        TO_DOUBLE,
        TO_SINGLE,
        TO_LOW
    } grid; /* the type to which it will be rounded */
    /* there is a factor; it is a power of two, or absent: products are exact */
    bool scaled, shifts;
    double by;
} judge;

typedef struct low_ways {
    void (*up)(float *to, const char *from, size_t len);
    void (*down)(char *to, const float *from, size_t len);
} low_ways;

typedef void (*exact_tile_loop)(tally *t, const char *const *src, bool first, size_t len);
typedef bool (*exact_judge_loop)(tally *t, const judge *j, size_t len);
/* From the operands straight to the result. */
typedef bool (*exact_direct)(char *dst, const char *const *src, int sources, const judge *j,
                             size_t len, bool quick);

/* The loops of one vector unit. */
typedef struct exact_loops {
    low_ways low[FAN_DT_COUNT]; /* of low floats; else NULL */
    exact_tile_loop narrow;
    exact_tile_loop plain;
    exact_tile_loop wide;
    exact_judge_loop judge_narrow;
    exact_judge_loop judge_wide;
    /* After these two, if there is a factor, or if a sum of float64 is rounded to a narrower
     * type: they multiply by the factor, and judge the products. `sum` is exact where `bad` is 0
     * (or, wide, sum + rest is). */
    exact_judge_loop products_narrow;
    exact_judge_loop products_wide;
    void (*odd)(float *to, const double *from, size_t len);
    /* by the factor; NULL: none */
    exact_direct single[FACTORS];
    exact_direct brain[FACTORS];
    exact_direct twice[FACTORS];
    exact_direct half_sum[FACTORS];
} exact_loops;

/* fan__exact_loops: returns the loops for the widest vector unit of this machine. */
const exact_loops *fan__exact_loops(void);
int fan__exact_isa_now(void); /* as fan_sum_isa_rank, limited by fan_exact_isa */
#ifdef FAN_TEST
/* fan_exact_isa: limits the vector unit: 0 the baseline, 1 AVX2, 2 AVX-512, -1 the widest. No
 * result bit depends on it. Returns the one now in use. */
int fan_exact_isa(int most);
#endif

/* ---- terms, and the factor and dtype of the result (exact.c) ---- */

/* exact_job: several arrays of one shape, read block by block in one dtype. */
typedef struct exact_job {
    const char *in; /* pointers to arrays, `step` bytes apart */
    size_t step;
    size_t n, parts;
    fan_dtype d, read; /* the sum's dtype; the dtype as which its terms are read */
    fan_exact_kind k;
    const exact_loops *loops;
    judge j;
    fan_nditer iter; /* begun by the caller */
} exact_job;

void fan__exact_job_begin(exact_job *j, const void *in, size_t step, size_t n, fan_dtype d);
/* fan__exact_term: returns elements [at, at + len) of operand k as `read`: in place, or converted
 * to the dtype of the sum and copied to `room`. */
const char *fan__exact_term(const exact_job *j, size_t k, int64_t at, int64_t len, char *room);
/* fan__exact_scale_begin: enters a factor into the judge; true: a complex factor, which
 * fan__exact_turn applies at the end. */
bool fan__exact_scale_begin(judge *j, const fan_scale *scale, bool is_complex);
/* fan__exact_turn: multiplies `len` complex values. */
static inline void fan__exact_turn(double *parts, int64_t len, const fan_scale *scale)
{
    for (int64_t i = 0; i < len; i++) {
        double re = parts[2 * i];
        double im = parts[2 * i + 1];
        parts[2 * i] = re * scale->re - im * scale->im;
        parts[2 * i + 1] = re * scale->im + im * scale->re;
    }
}
void fan__exact_set_grid(judge *j, fan_dtype out);

/* fan__product_rest: returns what the rounding of p = a * b lost, for products far from the ends of
 * the exponents; without fma, which not every vector unit has. */
static inline double fan__product_rest(double a, double b, double p)
{
    double wide_a = a * 0x8000001p0;
    double wide_b = b * 0x8000001p0;
    double high_a = wide_a - (wide_a - a);
    double high_b = wide_b - (wide_b - b);
    double low_a = a - high_a;
    double low_b = b - high_b;
    return ((high_a * high_b - p) + high_a * low_b + low_a * high_b) + low_a * low_b;
}

/* fan__product_odd: returns a * b rounded to odd; without a branch, for vector loops. */
static inline double fan__product_odd(double a, double b)
{
    double p = a * b;
    double rest = fan__product_rest(a, b, p);
    uint64_t u = bits_of(p);
    uint64_t is_odd_now = u & 1;
    uint64_t lost = (uint64_t)(rest < 0) | (uint64_t)(rest > 0);
    uint64_t step = lost & ~is_odd_now;
    if (FAN_FAULT(EXACT_NO_ODD))
        step = 0;
    uint64_t down = 0 - (uint64_t)((rest > 0) != (p > 0));
    return of_bits(u + ((step ^ down) - down));
}

/* fan__exact_is_wide: whether numbers of d are float64; else they are read as float32. */
static inline bool fan__exact_is_wide(fan_dtype d)
{
    return d == FAN_DT_FLOAT64 || d == FAN_DT_COMPLEX128;
}
/* fan__exact_parts: returns the numbers of an element. */
static inline size_t fan__exact_parts(fan_dtype d)
{
    return 1 + (fan_dtype_kind(d) == 'c');
}
/* fan__exact_values: returns the dtype of elements of so many float64. */
static inline fan_dtype fan__exact_values(size_t parts)
{
    if (parts == 2)
        return FAN_DT_COMPLEX128;
    return FAN_DT_FLOAT64;
}
/* fan__exact_number: returns number i of a term that fan__exact_term read. */
static inline double fan__exact_number(const exact_job *j, const char *p, size_t i)
{
    const void *numbers = p;
    if (fan__exact_is_wide(j->d))
        return ((const fan_any_f64 *)numbers)[i];
    return (double)((const fan_any_f32 *)numbers)[i];
}

#endif
