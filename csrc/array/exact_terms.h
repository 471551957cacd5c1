/* exact_terms: the terms of an exact sum, read tile by tile in one dtype, and the factor and dtype of its result. For
 * array/exact and array/window. */
#ifndef FAN_ARRAY_EXACT_TERMS_H
#define FAN_ARRAY_EXACT_TERMS_H

#include "array/convert.h"
#include "array/exact_loops.h"
#include "array/nditer.h"
#include "array/sum.h"

/* exact_job: several arrays of one shape, read block by block in one dtype. */
typedef struct exact_job {
    const char *in; /* pointers to arrays, `step` bytes apart */
    size_t step;
    size_t n, parts;
    fan_dtype d, read; /* the sum's dtype; the dtype as which its terms are read */
    fan_exact_kind k;
    const exact_loops *how;
    judge j;
    fan_nditer iter; /* begun by the caller */
} exact_job;

/* fan__exact_operand: returns array k. */
const fan_array *fan__exact_operand(const exact_job *j, size_t k);
void fan__exact_job_begin(exact_job *j, const void *in, size_t step, size_t n, fan_dtype d);
/* fan__exact_term: returns elements [at, at + len) of operand k as `read`: in place, or converted to the dtype of the
 * sum and copied to `room`. */
const char *fan__exact_term(const exact_job *j, size_t k, int64_t at, int64_t len, char *room);
/* fan__exact_scale_begin: enters a factor into the judge; true: a complex factor, which fan__exact_turn applies at the
 * end to `len` complex values. */
bool fan__exact_scale_begin(judge *j, const fan_scale *scale, bool is_complex);
void fan__exact_turn(double *parts, int64_t len, const fan_scale *scale);
void fan__exact_set_grid(judge *j, fan_dtype out);

/* fan__exact_low_ways: returns the conversions of a low dtype to and from float32; NULL if it has no loop. */
const low_ways *fan__exact_low_ways(const exact_loops *how, fan_dtype d);
/* fan__exact_is_wide: whether numbers of d are float64; else they are read as float32. */
static inline bool fan__exact_is_wide(fan_dtype d) { return d == FAN_DT_FLOAT64 || d == FAN_DT_COMPLEX128; }
/* fan__exact_parts: returns the numbers of an element. */
static inline size_t fan__exact_parts(fan_dtype d) { return fan_dtype_kind(d) == 'c' ? 2 : 1; }
/* fan__exact_number: returns number i of a term that fan__exact_term read. */
static inline double fan__exact_number(const exact_job *j, const char *p, size_t i)
{
    return fan__exact_is_wide(j->d) ? ((const fan_any_f64 *)(const void *)p)[i]
                                    : (double)((const fan_any_f32 *)(const void *)p)[i];
}

#endif
