#include "buffer/unchanged.h"

#include "array/nditer.h"
#include "base/interrupt.h"

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

fan_status fan_slot_hash(const fan_buffer *b, const fan_array *a, bool may_end, uint64_t *out, fan_error *err)
{
    uint64_t bytes = (uint64_t)a->size * fan_dtype_size(a->dtype);
    bool release_gil = bytes >= FAN_BUSY_BYTES && b->frontend->allow_threads_begin;
    fan_interrupt interrupt;
    fan_interrupt_begin(&interrupt, may_end ? b->frontend->check_signals : NULL, err);
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    *out = fan_array_hash(a);
    if (release_gil)
        b->frontend->allow_threads_end(left);
    return fan_interrupt_end(&interrupt, FAN_OK);
}

fan_status fan_slot_unchanged(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, const uint64_t *hash,
                              bool may_end, fan_error *err)
{
    uint64_t now;
    FAN_TRY(fan_slot_check_unmoved(b, slot, v, key, err));
    if (!hash)
        return FAN_OK;
    FAN_TRY(fan_slot_hash(b, v->array, may_end, &now, err));
    return now == *hash ? FAN_OK : fan_slot_changed(b, slot, key, err);
}
