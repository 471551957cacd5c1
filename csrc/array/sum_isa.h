/* sum_isa: which instruction set's loops sums use: the widest that the machine has, chosen when first asked for. */
#ifndef FAN_ARRAY_SUM_ISA_H
#define FAN_ARRAY_SUM_ISA_H

#include "array/sum_loops.h"

/* fan_loops_of: the loops of a dtype, for the chosen instruction set. */
const fan_loops *fan_loops_of(fan_dtype d);

/* fan_sum_set_isa: which instruction set sums use from now on ("sse2", "avx2", "avx512"; "plain" where the processor is
 * another); NULL: the widest. false, and nothing is changed, where this machine has none of that name. Process-wide;
 * changes no bits. */
bool fan_sum_set_isa(const char *name);
/* fan_sum_isa: the one in use. */
const char *fan_sum_isa(void);
#ifdef FAN_TEST
/* fan_sum_read: reads every byte (whole lines) once: the floor under any sum, for benchmarks. Gives something that
 * depends on all. */
uint64_t fan_sum_read(const char *p, size_t bytes);
#endif
/* fan_sum_isa_rank: .. as a number: 0 what every machine of this kind has, 1 AVX2 and F16C, 2 AVX-512. */
int fan_sum_isa_rank(void);
/* fan_sum_isa_at: the i-th that this machine has, narrowest first; NULL behind the last. */
const char *fan_sum_isa_at(size_t i);

#endif
