/* materialize: what the short way (fast.c) gives the rest of the buffer: gradients that came that way become items. */
#ifndef FAN_BUFFER_MATERIALIZE_H
#define FAN_BUFFER_MATERIALIZE_H

#include "buffer/slot.h"

/* fan_slot_materialize: locked: what is plain becomes items of a pass. FAN_ERR_NOMEM: nothing happened. */
fan_status fan_slot_materialize(fan_buffer *b, size_t slot, fan_error *err);
/* fan_fast_drop: unlocked: drops what is plain in a slot. */
void fan_fast_drop(fan_buffer *b, size_t slot);
void fan_fast_list_init(fan_fast_list *p);
int64_t fan_fast_count(const fan_fast_list *p);    /* contributions, those summed already too; p may be NULL */
void fan_fast_list_fini(fan_slot *s, bool inside); /* `inside`: the block is the buffer's own */

#endif
