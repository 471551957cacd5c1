#include "buffer/enter.h"

#include "base/fault.h"
#include "buffer/lock.h"
#include "buffer/materialize.h"
#include "buffer/pass.h"

fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err)
{
    FAN_TRY(fan_buffer_here(b, err));
    if (slot >= b->nslots)
        return fan_fail(err, FAN_ERR_INDEX, "%s: no slot %zu; it has %zu (S1)", b->name, slot, b->nslots);
    return FAN_OK;
}

fan_status fan_slot_in_target(const fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    for (const fan_target *t = b->slots[slot].targets; t; t = t->next)
        if (t->thread == fan_thread_id())
            return fan_fail(err, FAN_ERR_STATE,
                            FAN_SLOT_SAID ": %s() from within a target of that slot: what is added into it would miss "
                                          "this pass; leave the block first",
                            FAN_SLOT_WHO(b, slot), what);
    return FAN_OK;
}

fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err)
{
    FAN_TRY(fan_slot_claim(b, slot, taking, what, err));
    fan_status status = fan_slot_materialize(b, slot, err);
    if (status != FAN_OK)
        fan_slot_let_go(b, slot);
    return status;
}

fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    while (s->taking && s->busy && !FAN_FAULT(ADD_IGNORES_TAKE))
        FAN_TRY(fan_slot_wait_free(b, slot, what, err));
    FAN_TRY(fan_slot_materialize(b, slot, err));
    return fan_slot_poisoned(b, slot, err);
}
