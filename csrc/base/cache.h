/* cache: how much memory is near this machine's processors. */
#ifndef FAN_BASE_CACHE_H
#define FAN_BASE_CACHE_H

#include <stdint.h>

/* fan_cache_bytes: of the second-level cache of one core, as the system tells it: asked once; 1 MiB where it cannot be
 * asked or its answer makes no sense. */
uint64_t fan_cache_bytes(void);

#endif
