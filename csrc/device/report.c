#include "device/machine.h"

#include <stdio.h>
#include <string.h>

static bool on_host(const fan_sim *m, const fan_op *op)
{
    return m->lanes[op->lane].device < 0;
}

/* stream_text: "stream 3", and of which device where that is not plain. */
static void stream_text(const fan_sim *m, uint32_t lane, int device, char *buf, size_t size)
{
    const fan_sim_lane *l = &m->lanes[lane];
    buf[0] = '\0';
    if (l->handle == 1)
        fan_append(buf, size, "the legacy default stream");
    else
        fan_append(buf, size, "stream %llu", (unsigned long long)l->handle);
    if (l->device != device)
        fan_append(buf, size, " of sim:%d", l->device);
}

static void host_text(const fan_sim *m, uint32_t lane, char *buf, size_t size)
{
    const fan_sim_lane *l = &m->lanes[lane];
    if (l->handle == FAN_MAIN)
        snprintf(buf, size, "the host");
    else
        snprintf(buf, size, "host thread %llu", (unsigned long long)l->handle);
}

static void site_text(const fan_op *op, const char *before, char *buf, size_t size)
{
    if (op->site[0])
        fan_append(buf, size, "%s%s", before, op->site);
}

/* who: "'mul' (stream 1, train.py:28)", "the host (train.py:33)". */
static void who(const fan_sim *m, const fan_op *op, int device, char *buf, size_t size)
{
    char text[64];
    buf[0] = '\0';
    if (on_host(m, op)) {
        host_text(m, op->lane, text, sizeof text);
        fan_append(buf, size, "%s", text);
        if (op->site[0])
            fan_append(buf, size, " (%s)", op->site);
        return;
    }
    stream_text(m, op->lane, device, text, sizeof text);
    fan_append(buf, size, "'%s' (%s", op->name, text);
    site_text(op, ", ", buf, size);
    fan_append(buf, size, ")");
}

void fan_sim_race_text(fan_sim *m, const fan_race *r, char *buf, size_t size)
{
    int device = -1;
    char first[192], second[192], where[32] = "memory of nobody's", a[64], b[64];
    for (int i = 0; i < m->config.devices; i++)
        if (r->lo - m->parts[i].arena.base < m->parts[i].arena.bytes)
            device = i;
    if (device >= 0)
        snprintf(where, sizeof where, "sim:%d", device);
    who(m, &r->first, device, first, sizeof first);
    who(m, &r->second, device, second, sizeof second);
    buf[0] = '\0';
    fan_append(buf, size, "race on %llu bytes of %s: ", (unsigned long long)(r->hi - r->lo), where);
    const char *did = r->first_writes ? "writes" : "reads";

    if (r->released && r->release) {
        fan_append(buf, size, "memory is given back");
        site_text(&r->second, " at ", buf, size);
        fan_append(buf, size, " a second time");
        site_text(&r->first, ", first at ", buf, size);
        return;
    }
    if (r->released) {
        fan_append(buf, size, "%s %s memory that was given back", second, r->second_writes ? "writes" : "reads");
        site_text(&r->first, " at ", buf, size);
        fan_append(buf, size, "; missing: a hold on it");
        return;
    }
    if (r->release) {
        fan_append(buf, size, "memory is given back");
        site_text(&r->second, " at ", buf, size);
        stream_text(m, r->first.lane, device, a, sizeof a);
        fan_append(buf, size, " while %s %s it: nothing that is waited for comes after that; missing: mark as used on %s", first, did, a);
        return;
    }
    fan_append(buf, size, "%s %s what %s %s: nothing orders them; missing: ", second, r->second_writes ? "writes" : "reads", first,
               r->first_writes ? "wrote" : "reads");
    bool host1 = on_host(m, &r->first), host2 = on_host(m, &r->second);
    unsigned long long h1 = (unsigned long long)m->lanes[r->first.lane].handle, h2 = (unsigned long long)m->lanes[r->second.lane].handle;
    if (host1 && host2) {
        host_text(m, r->first.lane, a, sizeof a);
        host_text(m, r->second.lane, b, sizeof b);
        fan_append(buf, size, "%s must come after %s (a lock, or a join)", b, a);
    } else if (host1) {
        host_text(m, r->first.lane, a, sizeof a);
        stream_text(m, r->second.lane, device, b, sizeof b);
        fan_append(buf, size, "what is queued on %s must be queued after %s has read (a lock, or a join)", b, a);
    } else if (host2) {
        stream_text(m, r->first.lane, device, a, sizeof a);
        host_text(m, r->second.lane, b, sizeof b);
        fan_append(buf, size, "%s must wait for %s after '%s' (s%llu.synchronize())", b, a, r->first.name, h1);
    } else {
        stream_text(m, r->first.lane, device, a, sizeof a);
        stream_text(m, r->second.lane, device, b, sizeof b);
        fan_append(buf, size, "%s must wait for %s after '%s' (s%llu.wait(s%llu.record()))", b, a, r->first.name, h2, h1);
    }
}
