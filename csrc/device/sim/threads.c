#include "base/fault.h"
#include "device/memory.h"
#include "device/sim/machine.h"

#include <stdio.h>
#include <string.h>

_Thread_local fan__sim_thread fan__sim_here;

_Static_assert(FAN_FAULT_NO_TURNS + OF_WAITED == FAN_FAULT_NO_FOOTPRINT_WAITED, "base/fault.h has them in this order");

/* fan__sim_race_text: writes the sentence for a race, with the missing wait. The machine's lock is held. */
static void fan__sim_race_text(fan_sim *m, const fan_race *race, char *buf, size_t size);

/* fan__sim_maker: returns a number for the thread that makes an object on m; threads of other machines share one. */
static size_t fan__sim_maker(void) { return fan__sim_here.m ? (size_t)(1 + fan__sim_here.actor) : 0; }

uint64_t fan__sim_new_name(fan_sim *m, int kind)
{
    size_t by = fan__sim_maker();
    return FAN__NAME(kind, (uint64_t)by << 40 | ++m->made[by]);
}

void fan__sim_access(const fan_sim *m, uint64_t name, fan_sched_mode how)
{
    const fan_sim *mine = fan__sim_here.m;
    if (FAN_FAULT_IS(FAN_FAULT_NO_TURNS + (fan_fault_id)(name >> 56 & 0x7f)))
        return;
    if (mine && mine->has_chooser && mine->chooser.access)
        mine->chooser.access(mine->chooser.ctx, mine == m ? name : name | OF_ANOTHER, how);
}

void fan__sim_call_site(const fan_sim *m, char *buf, size_t size)
{
    buf[0] = '\0';
    if (m->hooks.call_site)
        m->hooks.call_site(m->hooks.ctx, buf, size);
}

fan_status fan__sim_alive(fan_sim *m, fan_error *err)
{
    switch (fan_host_sched_given_up(m->host_sched)) {
    case FAN_ABANDONED:
        return fan_fail(err, FAN_ERR_STATE, "abandoned: the machine ends this run");
    case FAN_DEADLOCKED:
        return fan_fail(err, FAN_ERR_DEADLOCK, "the machine gave up: its host threads are in a deadlock");
    case FAN_GOING:
        break;
    }
    return FAN_OK;
}

fan_status fan__sim_enter(fan_sim *m, const char *call, fan_error *err)
{
    FAN_TRY(fan__sim_alive(m, err));
    m->calls++;
    fan__sim_access(m, FAN__NAME(OF_CALLS, 0), FAN_SCHED_COUNT);
    fan__sim_access(m, FAN__NAME(OF_CAPTURES, 0),
                    m->recordings ? FAN_SCHED_WRITE : FAN_SCHED_READ); /* a call may join a capture, or break it */
#ifdef FAN_TEST
    if (m->planned) /* calls after the failed one depend on it, too */
        fan__sim_access(m, FAN__NAME(OF_FAULTS, 0), true);
    if (m->fail_at >= 0 && m->fail_at-- == 0)
        return fan_fail_code(err, m->fail_with, m->fail_with == FAN_ERR_DEVICE ? 999 : 2,
                             "%s of the simulated device failed, as planned", call);
#endif
    (void)m, (void)call, (void)err;
    return FAN_OK;
}

fan_status fan__sim_raise(fan_sim *m, const fan_race *race, fan_error *err)
{
    char text[FAN_ERROR_TEXT];
    fan__sim_race_text(m, race, text, sizeof text);
    return fan_fail(err, FAN_ERR_RACE, "%s", text);
}

fan_status fan__sim_raise_pending(fan_sim *m, fan_error *err)
{
    if (!m->has_pending)
        return FAN_OK;
    m->has_pending = false;
    return fan__sim_raise(m, &m->pending, err);
}

void fan__sim_keep_race(fan_sim *m, const fan_race *race)
{
    m->races++;
    if (!m->has_first) {
        m->first = *race;
        m->has_first = true;
    }
}

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

static void fan__sim_race_text(fan_sim *m, const fan_race *r, char *buf, size_t size)
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
    if (r->donated) {
        fan_append(buf, size, "%s %s memory that was donated", second, r->second_writes ? "writes" : "reads");
        site_text(&r->first, " at ", buf, size);
        fan_append(buf, size, " (donate=True): until a buffer returns it, it belongs to the buffer; missing: a copy");
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

/* Host threads: the reports of a machine's spawned thread to its scheduler, the search and the checker. */

fan_status fan_sim_spawn(fan_sim *m, int *actor, fan_error *err)
{
    int i = -1;
    bool first;
    fan_status status;
    *actor = -1;
    fan__sim_lock(m);
    fan__sim_access(m, FAN__NAME(OF_ACTORS, 0), FAN_SCHED_WRITE);
    FAN_GO(fan__sim_alive(m, err));
    FAN_GO(fan_host_sched_spawn(m->host_sched, &i, &first, err));
    FAN_GO(fan__queue_host(m, 1 + (size_t)i, (uint64_t)i, err));
    if (fan_race_check_sync(m->race_check, m->host_lane[1 + i],
                            fan_race_check_clock(m->race_check, fan__sim_lane(m))) != FAN_OK) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread");
        goto done;
    }
    m->host_us[1 + i] = m->host_us[fan__sim_host(m)];
    *actor = i;
done:
    fan__sim_unlock(m);
    if (status != FAN_OK && i >= 0)
        fan_host_sched_end(m->host_sched, i);
    return status;
}

static void thread_yield(void *ctx)
{
    fan_sim *m = ctx;
    bool again = fan__sim_here.fresh;
    fan__sim_here.fresh = false;
    if (!fan__sim_here.kernels && !again)
        fan_host_sched_yield(m->host_sched, fan__sim_here.actor);
}

static bool thread_begin(void *ctx)
{
    fan_sim *m = ctx;
    if (fan__sim_here.kernels || FAN_FAULT(NO_TURNS))
        return true;
    if (!fan__sim_here.vain)
        fan_host_sched_busy(m->host_sched, fan__sim_here.actor);
    fan__sim_here.vain = false;
    fan_host_sched_yield(m->host_sched, fan__sim_here.actor);
    fan__sim_here.fresh = true;
    return fan_host_sched_given_up(m->host_sched) == FAN_GOING;
}

static void thread_end(void *ctx)
{
    (void)ctx; /* the thread's own */
    fan__sim_here.fresh = false;
}

static void thread_not_ready(void *ctx)
{
    fan_sim *m = ctx;
    if (fan__sim_here.kernels)
        return;
    fan__sim_here.vain = true;
    fan_host_sched_not_ready(m->host_sched, fan__sim_here.actor);
}

static void thread_changed(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan_host_sched_changed(m->host_sched, fan__sim_here.actor, mutex);
}

/* thread_mutex_number: returns the number of a mutex for the search, the same in every run: for one of a spawned
 * thread, that thread and the index among its mutexes; for others, the index among all. */
static uint64_t thread_mutex_number(const fan_sim *m, uint64_t id)
{
    return id & MADE_HERE ? (id & OF_ITS_MAKER) | (OF_ITS_MAKER + 1) : id - m->mutex_base;
}

static uint64_t thread_name(void *ctx)
{
    fan_sim *m = ctx;
    size_t by = fan__sim_maker();
    fan__sim_lock(m);
    uint64_t number = (uint64_t)by << 40 | ++m->made[by];
    fan__sim_unlock(m);
    return MADE_HERE | (m->serial & 0xfff) << 47 | number;
}

static void thread_access(void *ctx, fan_thing thing, uint64_t id, fan_sched_mode how)
{
    static const int kinds[] = {[FAN_THING_LOCKED] = OF_MUTEX,      [FAN_THING_BUDGET] = OF_BUDGET,
                                [FAN_THING_COUNTERS] = OF_COUNTERS, [FAN_THING_HOST_MEMORY] = OF_HOST,
                                [FAN_THING_OPTIONS] = OF_OPTIONS,   [FAN_THING_POOL] = OF_POOL,
                                [FAN_THING_GRAPH] = OF_GRAPH};
    fan_sim *m = ctx;
    uint64_t number = id ? thread_mutex_number(m, id) : 0;
    if (thing == FAN_THING_HOST_MEMORY || thing == FAN_THING_GRAPH)
        number = (uint64_t)fan__sim_here.apart;
    fan__sim_access(m, FAN__NAME(kinds[thing], number), how);
    if (thing != FAN_THING_LOCKED)
        return;
    fan__sim_lock(m); /* state guarded by the mutex was written before */
    (void)fan_race_check_locked(m->race_check, fan__sim_lane(m), id);
    if (how == FAN_SCHED_WRITE || how == FAN_SCHED_COUNT)
        (void)fan_race_check_unlocking(m->race_check, fan__sim_lane(m), id);
    fan__sim_unlock(m);
}

static uint64_t thread_mutex_name(const fan_sim *m, uint64_t id)
{
    return FAN__NAME(OF_MUTEX, thread_mutex_number(m, id));
}

static void thread_await(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    char call_site[FAN__SITE];
    fan__sim_call_site(m, call_site, sizeof call_site);
    fan_host_sched_wait(m->host_sched, fan__sim_here.actor, mutex, call_site);
}

static void thread_reached(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan__sim_lock(m);
    (void)fan_race_check_locked(m->race_check, fan__sim_lane(m), mutex);
    fan__sim_unlock(m);
}

static bool thread_wait(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan__sim_lock(m);
    fan__sim_access(m, thread_mutex_name(m, mutex), false);
    fan__sim_unlock(m);
    thread_await(ctx, mutex);
    return true;
}

static void thread_locked(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan_host_sched_locked(m->host_sched, fan__sim_here.actor, mutex);
    fan__sim_lock(m);
    fan__sim_access(m, thread_mutex_name(m, mutex), true);
    (void)fan_race_check_locked(m->race_check, fan__sim_lane(m), mutex);
    fan__sim_unlock(m);
}

static void thread_unlocking(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan__sim_lock(m);
    fan__sim_access(m, thread_mutex_name(m, mutex), true);
    (void)fan_race_check_unlocking(m->race_check, fan__sim_lane(m), mutex);
    fan__sim_unlock(m);
    fan_host_sched_unlocking(m->host_sched, fan__sim_here.actor, mutex);
}

/* thread_spawn: the new thread holds the machine until it has left, or is refused. */
static int thread_spawn(void *ctx)
{
    fan_sim *m = ctx;
    int actor = -1;
    if (fan_sim_spawn(m, &actor, NULL) != FAN_OK)
        return -1;
    fan_sim_hold(m);
    return actor;
}

static bool thread_enter(void *ctx, int actor)
{
    fan_sim *m = ctx;
    bool go = fan_sim_thread_begin(m, actor);
    if (!go)
        fan_sim_drop(m);
    return go;
}

static void thread_leave(void *ctx, int actor)
{
    fan_sim *m = ctx;
    fan_sim_thread_end(m, actor);
    fan_sim_drop(m);
}

static bool thread_refused(void *ctx, int actor)
{
    const fan_sim *m = ctx;
    return fan_host_sched_refused(m->host_sched, actor);
}

bool fan_sim_thread_begin(fan_sim *m, int actor)
{
    fan_sim_hold(m);
    if (!fan_host_sched_begin(m->host_sched, actor)) {
        fan_sim_drop(m);
        return false;
    }
    fan__sim_here.m = m;
    fan__sim_here.actor = actor;
    fan__sim_here.fresh = fan__sim_here.vain = false;
    fan__sim_here.apart = 0;
    fan__sim_here.hooks = (fan_thread_hooks){.yield = thread_yield,
                                             .wait = thread_wait,
                                             .await = thread_await,
                                             .reached = thread_reached,
                                             .locked = thread_locked,
                                             .unlocking = thread_unlocking,
                                             .begin = thread_begin,
                                             .end = thread_end,
                                             .not_ready = thread_not_ready,
                                             .changed = thread_changed,
                                             .access = thread_access,
                                             .name = thread_name,
                                             .spawn = thread_spawn,
                                             .enter = thread_enter,
                                             .leave = thread_leave,
                                             .refused = thread_refused,
                                             .ctx = m};
    fan_thread_set_hooks(&fan__sim_here.hooks);
    return true;
}

void fan_sim_thread_apart(int number) { fan__sim_here.apart = number; }

void fan_sim_thread_end(fan_sim *m, int actor)
{
    bool mine = fan__sim_here.m == m && fan__sim_here.actor == actor;
    if (mine) {
        fan__sim_access(m, FAN__NAME(OF_THREAD, (uint64_t)actor), FAN_SCHED_WRITE);
        fan_thread_set_hooks(NULL);
        fan__sim_here.m = NULL;
    }
    fan_host_sched_end(m->host_sched, actor);
    if (mine)
        fan_sim_drop(m);
}

fan_status fan_sim_join(fan_sim *m, fan_error *err)
{
    if (fan__sim_actor(m) >= 0)
        return fan_fail(err, FAN_ERR_STATE, "a host thread of the machine cannot join its threads");
    fan__sim_lock(m);
    fan_status status = fan__sim_alive(m, err);
    fan__sim_unlock(m);
    FAN_TRY(status);
    if (fan_host_sched_count(m->host_sched) == 0)
        return FAN_OK;
    status = fan_host_sched_join(m->host_sched, err);
    fan__sim_lock(m);
    for (size_t i = 1; i < 1 + FAN_ACTORS; i++)
        if (m->has_lane[i]) {
            (void)fan_race_check_sync(
                m->race_check, m->host_lane[0],
                fan_race_check_clock(m->race_check, m->host_lane[i])); /* lanes have room for all lanes */
            m->host_us[0] = fan__later(m->host_us[0], m->host_us[i]);
        }
    fan__sim_unlock(m);
    return status;
}

void fan_sim_read_thread(fan_sim *m, int actor)
{
    fan__sim_access(m, FAN__NAME(OF_THREAD, (uint64_t)actor), FAN_SCHED_READ);
}

fan_status fan_sim_after_thread(fan_sim *m, int actor, fan_error *err)
{
    fan_status status = FAN_OK;
    fan__sim_lock(m);
    if (actor >= 0 && actor < FAN_ACTORS && m->has_lane[1 + actor])
        status = fan__run_join(m, fan_race_check_clock(m->race_check, m->host_lane[1 + actor]), err);
    fan__sim_unlock(m);
    return status;
}

void fan_sim_read_event(const fan_event *e)
{
    const fan_sim_event *ev = e->impl;
    fan_sim *m = fan_sim_of(e->device);
    if (!m || !fan__sim_here.m)
        return;
    fan__sim_lock(m);
    fan__sim_access(m, ev->name, FAN_SCHED_READ);
    fan__sim_unlock(m);
}

void fan_sim_access_memory(const fan_device *d, const fan_array *a, bool write)
{
    fan_sim *m = fan_sim_of(d);
    if (!m || !fan__sim_here.m)
        return;
    fan__sim_lock(m);
    const fan_block *b = a->storage ? fan__access_block(m, a->storage->data) : NULL;
    if (b)
        fan__sim_access(m, b->name, write);
    fan__sim_unlock(m);
}

void fan_sim_read_all(fan_sim *m)
{
    fan__sim_access(m, FAN__NAME(OF_CALLS, 0), FAN_SCHED_DECIDE);
    fan__sim_access(m, FAN__NAME(OF_STREAMS, 0), FAN_SCHED_DECIDE);
}
