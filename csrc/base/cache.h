/* cache: the size of the processor's caches. */
#ifndef FAN_BASE_CACHE_H
#define FAN_BASE_CACHE_H

#include <stdint.h>

/* fan_cache_bytes: returns the size of one core's second-level cache. The system is queried once; the result is 1 MiB
 * if the query fails or gives an implausible size. */
uint64_t fan_cache_bytes(void);

#endif
