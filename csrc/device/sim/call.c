/* The common parts of calls on a machine, in this order: names of objects and footprints, the
 * checks at the start of each call, the text of a race, holds of a machine. */
#include "base/fault.h"
#include "device/memory.h"
#include "device/sim/machine.h"

#include <stdio.h>
#include <string.h>

_Thread_local fan__sim_thread fan__sim_here;

_Static_assert(FAN_FAULT_NO_TURNS + OF_WAITED == FAN_FAULT_NO_FOOTPRINT_WAITED,
               "base/fault.h has them in this order");

size_t fan__sim_maker(void)
{
    if (!fan__sim_here.machine)
        return 0;
    return (size_t)(1 + fan__sim_here.actor);
}

uint64_t fan__sim_new_name(fan_sim *machine, int kind)
{
    size_t by = fan__sim_maker();
    return FAN__NAME(kind, (uint64_t)by << 40 | ++machine->made[by]);
}

void fan__sim_access(const fan_sim *machine, uint64_t name, fan_sched_mode access)
{
    const fan_sim *mine = fan__sim_here.machine;
    if (FAN_FAULT_IS(FAN_FAULT_NO_TURNS + (fan_fault_id)(name >> 56 & 0x7f)))
        return;
    if (!mine || !mine->has_chooser || !mine->chooser.access)
        return;
    if (mine != machine)
        name |= OF_ANOTHER;
    mine->chooser.access(mine->chooser.ctx, name, access);
}

void fan__sim_call_site(const fan_sim *machine, char *buf, size_t size)
{
    buf[0] = '\0';
    if (machine->hooks.call_site)
        machine->hooks.call_site(machine->hooks.ctx, buf, size);
}

fan_status fan__sim_alive(fan_sim *machine, fan_error *err)
{
    switch (fan_host_sched_given_up(machine->host_sched)) {
    case FAN_ABANDONED:
        return fan_fail(err, FAN_ERR_STATE, "abandoned: the machine ends this run");
    case FAN_DEADLOCKED:
        return fan_fail(err, FAN_ERR_DEADLOCK,
                        "the machine gave up: its host threads are in a deadlock");
    case FAN_GOING:
        break;
    }
    return FAN_OK;
}

fan_status fan__sim_enter(fan_sim *machine, const char *call, fan_error *err)
{
    FAN_TRY(fan__sim_alive(machine, err));
    machine->calls++;
    fan__sim_access_state(machine, OF_CALLS, FAN_SCHED_COUNT);
    /* a call may join a capture, or break it */
    fan__sim_access_state(machine, OF_CAPTURES,
                          machine->recordings ? FAN_SCHED_WRITE : FAN_SCHED_READ);
#ifdef FAN_TEST
    if (machine->planned) /* calls after the failed one depend on it, too */
        fan__sim_access_state(machine, OF_FAULTS, true);
    if (machine->fail_at >= 0 && machine->fail_at-- == 0) {
        return fan_fail_code(err, machine->fail_with,
                             machine->fail_with == FAN_ERR_DEVICE ? 999 : 2,
                             "%s of the simulated device failed, as planned", call);
    }
#endif
    (void)machine;
    (void)call;
    (void)err;
    return FAN_OK;
}

void fan__sim_keep_race(fan_sim *machine, const fan_race *race)
{
    if (machine->races++ == 0)
        machine->first = *race;
}

/* on_host: returns whether the operation is the host's own, or a copy to it, for which it waits. */
static bool on_host(const fan_op *op)
{
    return FAN_SIM_OWNER_DEVICE(op->owner) < 0 || op->awaited;
}

/* stream_name: the name of the stream that the operation runs on; NULL: it has none. */
static const char *stream_name(const fan_sim *machine, const fan_op *op)
{
    for (size_t i = 0; i < machine->nnames; i++) {
        if (machine->names[i].owner == op->owner)
            return machine->names[i].text;
    }
    return NULL;
}

/* stream_text: writes "stream 3 of sim:0", or "stream 3 'main' of sim:0" where it has a name. */
static void stream_text(const fan_sim *machine, const fan_op *op, char *buf, size_t size)
{
    unsigned long long handle = (unsigned long long)FAN_SIM_OWNER_HANDLE(op->owner);
    int device = FAN_SIM_OWNER_DEVICE(op->owner);
    const char *name = stream_name(machine, op);
    if (handle == FAN_LEGACY)
        snprintf(buf, size, "the legacy default stream of sim:%d", device);
    else if (name)
        snprintf(buf, size, "stream %llu '%s' of sim:%d", handle, name, device);
    else
        snprintf(buf, size, "stream %llu of sim:%d", handle, device);
}

/* stream_call: writes its repr in Python. */
static void stream_call(const fan_op *op, char *buf, size_t size)
{
    snprintf(buf, size, "Stream(\"sim:%d\", %llu)", FAN_SIM_OWNER_DEVICE(op->owner),
             (unsigned long long)FAN_SIM_OWNER_HANDLE(op->owner));
}

#define OWNER_TEXT 96 /* more than owner_text writes */

/* owner_text: writes "stream 3 of sim:0", "host thread 1" or "the host": where the operation
 * runs. */
static void owner_text(const fan_sim *machine, const fan_op *op, char *buf, size_t size)
{
    if (!on_host(op)) {
        stream_text(machine, op, buf, size);
        return;
    }
    uint64_t actor = FAN_SIM_OWNER_HANDLE(fan_race_check_owner(machine->race_check, op->host));
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

/* race_text_operation: writes an operation with its lane and line: "'mul' (stream 1 of sim:0,
 * train.py:28)", "the host (train.py:33)". */
static void race_text_operation(const fan_sim *machine, const fan_op *op, char *buf, size_t size)
{
    char text[OWNER_TEXT];
    owner_text(machine, op, text, sizeof text);
    if (on_host(op)) {
        snprintf(buf, size, "%s", text);
        if (op->call_site[0])
            fan_append(buf, size, " (%s)", op->call_site);
        return;
    }
    snprintf(buf, size, "'%s' (%s", op->name, text);
    site_text(op, ", ", buf, size);
    fan_append(buf, size, ")");
}

/* race_text_missing: writes the wait that would order the two, as a call that works wherever their
 * streams are available: any code may queue to a stream. */
static void race_text_missing(const fan_sim *machine, const fan_race *r, char *buf, size_t size)
{
    char a[OWNER_TEXT];
    char b[OWNER_TEXT];
    char first[64];
    char second[64];
    bool host1 = on_host(&r->first);
    bool host2 = on_host(&r->second);
    owner_text(machine, &r->first, a, sizeof a);
    owner_text(machine, &r->second, b, sizeof b);
    stream_call(&r->first, first, sizeof first);
    stream_call(&r->second, second, sizeof second);
    if (host1 && host2)
        fan_append(buf, size, "%s must come after %s (a lock, or a join)", b, a);
    else if (host1) {
        fan_append(buf, size,
                   "what is queued on %s must be queued after %s has read (a lock, or a join)", b,
                   a);
    } else if (host2) {
        fan_append(buf, size, "%s must wait for %s after '%s' (%s.synchronize())", b, a,
                   r->first.name, first);
    } else {
        fan_append(buf, size, "%s must wait for %s after '%s' (%s.wait(%s))", b, a, r->first.name,
                   second, first);
    }
}

static const char *access_word(bool writes)
{
    return writes ? "writes" : "reads";
}

/* fan__sim_race_text: writes the sentence for a race, with the missing wait. The machine's lock is
 * held. */
static void fan__sim_race_text(fan_sim *machine, const fan_race *r, char *buf, size_t size)
{
    char first[272];
    char second[272];
    char a[OWNER_TEXT];
    char call[64];
    char where[32] = "unowned memory";
    const char *second_does = access_word(r->second_writes);
    const fan_sim_device_part *part = fan__access_part(machine, r->lo);
    if (part)
        fan_device_text(&part->device, where, sizeof where);
    race_text_operation(machine, &r->first, first, sizeof first);
    race_text_operation(machine, &r->second, second, sizeof second);
    snprintf(buf, size, "race on %llu byte%s of %s: ", (unsigned long long)(r->hi - r->lo),
             FAN_PLURAL(r->hi - r->lo), where);

    if (r->released && r->release) {
        fan_append(buf, size, "memory is freed");
        site_text(&r->second, " at ", buf, size);
        fan_append(buf, size, " a second time");
        site_text(&r->first, ", first at ", buf, size);
        return;
    }
    if (r->donated) {
        fan_append(buf, size, "%s %s memory that was donated", second, second_does);
        site_text(&r->first, " at ", buf, size);
        fan_append(
            buf, size,
            " (donate=True): until a buffer returns it, it belongs to the buffer; missing: a copy");
        return;
    }
    if (r->released) {
        fan_append(buf, size, "%s %s freed memory", second, second_does);
        site_text(&r->first, " at ", buf, size);
        fan_append(buf, size, "; missing: a hold on it");
        return;
    }
    if (r->release) {
        fan_append(buf, size, "memory is freed");
        site_text(&r->second, " at ", buf, size);
        stream_text(machine, &r->first, a, sizeof a);
        stream_call(&r->first, call, sizeof call);
        fan_append(buf, size,
                   " while %s %s it: no wait orders that before; missing: mark as used on %s "
                   "(array.record_stream(%s))",
                   first, access_word(r->first_writes), a, call);
        return;
    }
    fan_append(buf, size, "%s %s what %s %s: nothing orders them; missing: ", second, second_does,
               first, r->first_writes ? "wrote" : "reads");
    race_text_missing(machine, r, buf, size);
}

fan_status fan__sim_raise(fan_sim *machine, const fan_race *race, fan_error *err)
{
    char text[FAN_ERROR_TEXT];
    fan__sim_race_text(machine, race, text, sizeof text);
    return fan_fail(err, FAN_ERR_RACE, "%s", text);
}

fan_status fan__sim_raise_pending(fan_sim *machine, fan_error *err)
{
    if (!machine->has_pending)
        return FAN_OK;
    machine->has_pending = false;
    return fan__sim_raise(machine, &machine->pending, err);
}

fan_status fan__sim_part(fan_sim *machine, int device, fan_sim_device_part **out, fan_error *err)
{
    if (device < 0 || device >= machine->config.devices) {
        return fan_fail(err, FAN_ERR_VALUE, "no device %d: this machine has %d", device,
                        machine->config.devices);
    }
    *out = &machine->parts[device];
    return FAN_OK;
}

fan_sim *fan_sim_hold(fan_sim *machine)
{
    fan__sim_lock(machine);
    machine->users++;
    atomic_fetch_add_explicit(&machine->holds, 1, memory_order_relaxed);
    fan__sim_unlock(machine);
    return machine;
}

void fan_sim_drop(fan_sim *machine)
{
    if (!machine)
        return;
    fan_stream *gone[FAN_SIM_DEVICES];
    int n = 0;
    fan__sim_lock(machine);
    bool last = --machine->users == 0;
    for (; last && n < machine->config.devices; n++) {
        gone[n] = machine->parts[n].current;
        machine->parts[n].current = NULL;
    }
    fan__sim_unlock(machine);
    for (int i = 0; i < n; i++)
        fan_stream_drop(gone[i]);
    for (int i = 0; i < n; i++)
        fan_device_orphan(&machine->parts[i].device);
    fan_device_drop(&machine->parts[0].device); /* its devices share its count */
}
