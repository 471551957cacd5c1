#include "device/sim/race_text.h"

#include <stdio.h>
#include <string.h>

/* on_host: returns whether the operation is the host's own, or a copy to it, for which it waits. */
static bool on_host(const fan_op *op) { return FAN_SIM_OWNER_DEVICE(op->owner) < 0 || op->awaited; }

/* stream_text: writes "stream 3 of sim:0". */
static void stream_text(const fan_op *op, char *buf, size_t size)
{
    unsigned long long handle = (unsigned long long)FAN_SIM_OWNER_HANDLE(op->owner);
    if (handle == FAN_LEGACY)
        snprintf(buf, size, "the legacy default stream of sim:%d", FAN_SIM_OWNER_DEVICE(op->owner));
    else
        snprintf(buf, size, "stream %llu of sim:%d", handle, FAN_SIM_OWNER_DEVICE(op->owner));
}

/* stream_call: writes its repr in Python. */
static void stream_call(const fan_op *op, char *buf, size_t size)
{
    snprintf(buf, size, "Stream(\"sim:%d\", %llu)", FAN_SIM_OWNER_DEVICE(op->owner),
             (unsigned long long)FAN_SIM_OWNER_HANDLE(op->owner));
}

static void host_text(const fan_sim *m, const fan_op *op, char *buf, size_t size)
{
    uint64_t actor = FAN_SIM_OWNER_HANDLE(fan_race_check_owner(m->race_check, op->host));
    if (actor == FAN_MAIN)
        snprintf(buf, size, "the host");
    else
        snprintf(buf, size, "host thread %llu", (unsigned long long)actor);
}

static void site_text(const fan_op *op, const char *before, char *buf, size_t size)
{
    if (op->call_site[0])
        fan_append(buf, size, "%s%s", before, op->call_site);
}

/* race_text_operation: writes an operation with its lane and line: "'mul' (stream 1 of sim:0, train.py:28)", "the host
 * (train.py:33)". */
static void race_text_operation(const fan_sim *m, const fan_op *op, char *buf, size_t size)
{
    char text[64];
    buf[0] = '\0';
    if (on_host(op)) {
        host_text(m, op, text, sizeof text);
        fan_append(buf, size, "%s", text);
        if (op->call_site[0])
            fan_append(buf, size, " (%s)", op->call_site);
        return;
    }
    stream_text(op, text, sizeof text);
    fan_append(buf, size, "'%s' (%s", op->name, text);
    site_text(op, ", ", buf, size);
    fan_append(buf, size, ")");
}

/* race_text_missing: writes the wait that would order the two, as a call that works wherever their streams are
 * available: any code may queue to a stream. */
static void race_text_missing(const fan_sim *m, const fan_race *r, char *buf, size_t size)
{
    char a[64], b[64], first[64], second[64];
    bool host1 = on_host(&r->first), host2 = on_host(&r->second);
    if (host1)
        host_text(m, &r->first, a, sizeof a);
    else
        stream_text(&r->first, a, sizeof a);
    if (host2)
        host_text(m, &r->second, b, sizeof b);
    else
        stream_text(&r->second, b, sizeof b);
    stream_call(&r->first, first, sizeof first);
    stream_call(&r->second, second, sizeof second);
    if (host1 && host2)
        fan_append(buf, size, "%s must come after %s (a lock, or a join)", b, a);
    else if (host1)
        fan_append(buf, size, "what is queued on %s must be queued after %s has read (a lock, or a join)", b, a);
    else if (host2)
        fan_append(buf, size, "%s must wait for %s after '%s' (%s.synchronize())", b, a, r->first.name, first);
    else
        fan_append(buf, size, "%s must wait for %s after '%s' (%s.wait(%s))", b, a, r->first.name, second, first);
}

void fan__sim_race_text(fan_sim *m, const fan_race *r, char *buf, size_t size)
{
    int device = -1;
    char first[224], second[224], where[32] = "unowned memory", a[64], call[64];
    for (int i = 0; i < m->config.devices; i++)
        if (r->lo - m->parts[i].arena.base < m->parts[i].arena.bytes)
            device = i;
    if (device >= 0)
        snprintf(where, sizeof where, "sim:%d", device);
    race_text_operation(m, &r->first, first, sizeof first);
    race_text_operation(m, &r->second, second, sizeof second);
    buf[0] = '\0';
    fan_append(buf, size, "race on %llu byte%s of %s: ", (unsigned long long)(r->hi - r->lo), FAN_PLURAL(r->hi - r->lo),
               where);

    if (r->released && r->release) {
        fan_append(buf, size, "memory is freed");
        site_text(&r->second, " at ", buf, size);
        fan_append(buf, size, " a second time");
        site_text(&r->first, ", first at ", buf, size);
        return;
    }
    if (r->released) {
        fan_append(buf, size, "%s %s freed memory", second, r->second_writes ? "writes" : "reads");
        site_text(&r->first, " at ", buf, size);
        fan_append(buf, size, "; missing: a hold on it");
        return;
    }
    if (r->release) {
        fan_append(buf, size, "memory is freed");
        site_text(&r->second, " at ", buf, size);
        stream_text(&r->first, a, sizeof a);
        stream_call(&r->first, call, sizeof call);
        fan_append(buf, size,
                   " while %s %s it: no wait orders that before; missing: mark as used on %s "
                   "(array.record_stream(%s))",
                   first, r->first_writes ? "writes" : "reads", a, call);
        return;
    }
    fan_append(buf, size, "%s %s what %s %s: nothing orders them; missing: ", second,
               r->second_writes ? "writes" : "reads", first, r->first_writes ? "wrote" : "reads");
    race_text_missing(m, r, buf, size);
}
