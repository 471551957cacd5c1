/* unchanged: whether a contribution is still what it was when it was added: the caller may not change it before the
 * take. */
#ifndef FAN_BUFFER_UNCHANGED_H
#define FAN_BUFFER_UNCHANGED_H

#include "buffer/slot.h"

/* fan_slot_changed: the error that names the contribution which its caller changed: buffer, slot, key (-1: none). */
fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err);
/* fan_slot_check_unmoved: that error if memory of the value lies elsewhere than when it was added. */
fan_status fan_slot_check_unmoved(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, fan_error *err);
/* fan_slot_hash: of the elements of host memory, while other threads of the frontend may run; the user may end it where
 * `may_end`: nothing was done then. No lock is held. */
fan_status fan_slot_hash(const fan_buffer *b, const fan_array *a, bool may_end, uint64_t *out, fan_error *err);
/* fan_slot_unchanged: asked before a contribution is read: it lies where it lay and, with debug=True (hash: not NULL),
 * has the elements that it had. may_end as in fan_slot_hash. */
fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, const uint64_t *hash,
                              bool may_end, fan_error *err);

#endif
