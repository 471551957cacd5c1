#include "device/sim/footprint.h"

#include "base/fault.h"

_Thread_local fan__sim_thread fan__sim_here;

_Static_assert(FAN_FAULT_NO_TURNS + OF_WAITED == FAN_FAULT_NO_FOOTPRINT_WAITED, "base/fault.h has them in this order");

size_t fan__sim_maker(void) { return fan__sim_here.m ? (size_t)(1 + fan__sim_here.actor) : 0; }

uint64_t fan__sim_new_name(fan_sim *m, int kind)
{
    size_t by = fan__sim_maker();
    return FAN__NAME(kind, (uint64_t)by << 40 | ++m->made[by]);
}

void fan__sim_touch(const fan_sim *m, uint64_t name, fan_touch how)
{
    const fan_sim *mine = fan__sim_here.m;
    if (FAN_FAULT_IS(FAN_FAULT_NO_TURNS + (fan_fault_id)(name >> 56 & 0x7f)))
        return;
    if (mine && mine->has_chooser && mine->chooser.touched)
        mine->chooser.touched(mine->chooser.ctx, mine == m ? name : name | OF_ANOTHER, how);
}
