/* sum_isa: the instruction set whose loops sums use: the widest that the machine has, chosen on
 * first use. */
#ifndef FAN_ARRAY_SUM_ISA_H
#define FAN_ARRAY_SUM_ISA_H

#include "array/sum_loops.h"

/* fan_loops_of: returns the loops of a dtype for the chosen instruction set. */
const fan_loops *fan_loops_of(fan_dtype d);

/* fan_sum_set_isa: selects the instruction set of sums ("sse2", "avx2", "avx512"; "plain" on other
 * processors); NULL: the widest. Returns false, and changes nothing, if this machine has none of
 * that name. Process-wide; changes no result bits. */
bool fan_sum_set_isa(const char *name);
/* fan_sum_isa: returns the name of the one in use. */
const char *fan_sum_isa(void);
#ifdef FAN_TEST
/* fan_sum_read: reads every byte (of whole lines) once: the lower bound of any sum, for benchmarks.
 * The result depends on all bytes. */
uint64_t fan_sum_read(const char *p, size_t bytes);
#endif
/* fan_sum_isa_rank: returns the instruction set in use as a number: 0 the baseline, 1 AVX2 and
 * F16C, 2 AVX-512. */
int fan_sum_isa_rank(void);
/* fan_sum_isa_at: returns the i-th that this machine has, narrowest first; NULL after the last. */
const char *fan_sum_isa_at(size_t i);

#endif
