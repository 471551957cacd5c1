/* rules: the numbers of the rules as bits, so that plans, traces and messages can say which ones decided. */
#ifndef FAN_BUFFER_RULES_H
#define FAN_BUFFER_RULES_H

#include <stdint.h>

#define FAN_S_RULES 22
#define FAN_A_RULES 16
#define FAN_S(n) (UINT64_C(1) << ((n) - 1))
#define FAN_A(n) (UINT64_C(1) << (FAN_S_RULES + (n) - 1))

/* FAN_MUT: planted fault number n, each told and killed in docs/proof.md. */
#ifdef FAN_TEST
extern int fan_mutant; /* which one is on; 0: none */
#define FAN_MUT(n) (fan_mutant == (n))
#else
#define FAN_MUT(n) 0
#endif

#endif
