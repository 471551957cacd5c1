/* gather: what a fold or a take has before it, as terms. */
#ifndef FAN_BUFFER_GATHER_H
#define FAN_BUFFER_GATHER_H

#include "buffer/fold.h"

/* fan_gather: the value and the first `m` parked items (SIZE_MAX: all) as terms. may_end: as fan_fold has it. The slot
 * is busy; takes its lock. */
fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, bool may_end, fan_gathered *g, fan_error *err);
void fan_gathered_fini(fan_gathered *g);

#endif
