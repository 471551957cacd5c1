/* The loops for the baseline of the processor. On x86-64 that is SSE2. */
#define FAN_SET fan_loops_base
#define FAN_WIDE 16
#if defined(__x86_64__)
#define FAN_NAME "sse2"
#else
#define FAN_NAME "plain"
#endif
#include "array/sum_body.h"
