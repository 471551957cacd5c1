/* unchanged: whether a contribution is still what it was when it was added: the caller may not change it before the
 * take. */
#ifndef FAN_BUFFER_UNCHANGED_H
#define FAN_BUFFER_UNCHANGED_H

#include "buffer/slot.h"

/* fan_slot_changed: the error that names the contribution which its caller changed: buffer, slot, key (-1: none). */
fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err);
/* fan_slot_check_unmoved: that error if memory of the value lies elsewhere than when it was added. */
fan_status fan_slot_check_unmoved(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, fan_error *err);
/* fan_slot_unchanged: asked before a contribution is read: it lies where it lay and, with debug=True, has the elements
 * that it had. */
fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, bool hashed,
                              uint64_t hash, fan_error *err);

#endif
