/* The reference counts of a machine's users. */
#include "device/sim/call.h"
#include "device/memory.h"

fan_sim *fan_sim_hold(fan_sim *m)
{
    fan__sim_lock(m);
    m->users++;
    atomic_fetch_add_explicit(&m->holds, 1, memory_order_relaxed);
    fan__sim_unlock(m);
    return m;
}

void fan_sim_drop(fan_sim *m)
{
    if (!m)
        return;
    fan_stream *gone[FAN_SIM_DEVICES];
    int n = 0;
    fan__sim_lock(m);
    bool last = --m->users == 0;
    if (last)
        for (int i = 0; i < m->config.devices; i++)
            if (m->parts[i].current) {
                gone[n++] = m->parts[i].current;
                m->parts[i].current = NULL;
            }
    fan__sim_unlock(m);
    while (n > 0)
        fan_stream_drop(gone[--n]);
    if (last)
        for (int i = 0; i < m->config.devices; i++)
            fan_device_orphan(&m->parts[i].device);
    fan_device_drop(&m->parts[0].device); /* its devices share its count */
}
