/* rules: the numbers of the rules as bits, so that plans, traces and messages can name those that
 * decided. */
#ifndef FAN_BUFFER_RULES_H
#define FAN_BUFFER_RULES_H

#include <stdint.h>

#define FAN_S_RULES 22
#define FAN_A_RULES 16
#define FAN_S(n) (UINT64_C(1) << ((n) - 1))
#define FAN_A(n) (UINT64_C(1) << (FAN_S_RULES + (n) - 1))

#endif
