#include "buffer/unchanged.h"

#include "array/elements.h"

#include <inttypes.h>
#include <stdio.h>

fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err)
{
    char which[64] = "a gradient added without a key";
    if (key >= 0)
        snprintf(which, sizeof which, "the gradient added with key %" PRId64, key);
    return fan_fail(err, FAN_ERR_STATE,
                    FAN_SLOT_SAID ": %s was changed after it was added (its elements, memory, dtype or shape); leave "
                                  "it as it is until take(), or add it with copy=True",
                    FAN_SLOT_WHO(b, slot), which);
}

fan_status fan_slot_check_unmoved(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, fan_error *err)
{
    bool foreign = b->frontend->is_unchanged && v->device == fan_cpu() &&
                   (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE);
    return !foreign || b->frontend->is_unchanged(v) ? FAN_OK : fan_slot_changed(b, slot, key, err);
}

/* Before it is read: it lies where it lay, and, with debug, has the elements that it had. */
fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, bool hashed,
                              uint64_t hash, fan_error *err)
{
    FAN_TRY(fan_slot_check_unmoved(b, slot, v, key, err));
    return !hashed || fan_array_hash(v->array) == hash ? FAN_OK : fan_slot_changed(b, slot, key, err);
}
