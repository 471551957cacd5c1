/* unchanged: whether what a caller gave still is what it was when it came. */
#ifndef FAN_BUFFER_UNCHANGED_H
#define FAN_BUFFER_UNCHANGED_H

#include "buffer/slot.h"

/* fan_slot_changed: the error of a gradient that its giver changed: buffer, slot, key (-1: none). */
fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err);
/* fan_slot_check_unmoved: that error, where memory of a value has moved. */
fan_status fan_slot_check_unmoved(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, fan_error *err);
/* fan_slot_unchanged: before it is read: it lies where it lay, and, with debug, has the elements that it had. */
fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, bool hashed,
                              uint64_t hash, fan_error *err);

#endif
