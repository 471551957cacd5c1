/* thing: whatever the driver gave a handle for. */
#ifndef FAN_FAKE_THING_H
#define FAN_FAKE_THING_H

#include "fake_cuda/state.h"

fan__thing *fan__thing_new(fan__kind k, int device);
/* fan__thing_add: t is made, and found from here on by every thread. Memory needs a place that was
 * made for it. */
void fan__thing_add(fan__thing *t);
/* fan__thing_made: both, for what needs nothing between them; NULL: out of memory. */
fan__thing *fan__thing_made(fan__kind k, int device);
fan__thing *fan__thing_find(fan__kind k, const void *handle);
fan__thing *fan__thing_memory(uint64_t address, uint64_t bytes);
/* fan__thing_remove: removes it from the table, so that no call finds it. Locked. */
void fan__thing_remove(fan__thing *gone);
void fan__thing_drop(fan__thing *gone);
/* fan__thing_unknown: the code for a handle that is none, or none any more. */
fan_cu_result fan__thing_unknown(const void *handle);
/* fan__thing_stream: a hold on what a handle means in this context. */
fan_cu_result fan__thing_stream(const struct fan_cu_context *c, fan_cu_stream handle,
                                fan_stream **out);

#endif
