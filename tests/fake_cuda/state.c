#define _POSIX_C_SOURCE 200809L
#include "fake_cuda/state.h"

#include "device/sim/machine.h"

#include <stdio.h>
#include <string.h>

pthread_mutex_t fan__fake_mutex = PTHREAD_MUTEX_INITIALIZER;

struct fan__fake fan__fake = {
    .devices = 1, .version = 12040, .fail_at = -1, .pools = true, .compute = 75};

_Thread_local struct fan__fake_here fan__fake_here;

_Static_assert(NUMBERS <= 128, "more functions than are counted");

const char *const fan__fake_names[NUMBERS] = {
#define X(name, suffix, version, feature, parameters) #name,
    FAN_CUDA_LIST(X)
#undef X
};

fan_cu_result fan__fake_call(int number)
{
    fan_cu_result code = OK;
    fan__fake_lock();
    fan__fake.calls++;
    fan__fake.calls_of[number]++;
    const char *failing = fan__fake.fail_name;
    bool is_named = !failing[0] || strcmp(failing, fan__fake_names[number]) == 0;
    if (is_named && fan__fake.fail_at >= 0 && fan__fake.fail_at-- == 0) {
        code = fan__fake.fail_with;
        if (fan__fake.fail_sticks && fan__fake_here.era == fan__fake.era &&
            fan__fake_here.depth > 0)
            fan__fake_here.stack[fan__fake_here.depth - 1]->lost = code;
    }
    fan__fake_unlock();
    return code;
}

struct fan_cu_context *fan__fake_current(void)
{
    if (fan__fake_here.era != fan__fake.era) {
        fan__fake_here.era = fan__fake.era;
        fan__fake_here.depth = 0;
    }
    return fan__fake_here.depth ? fan__fake_here.stack[fan__fake_here.depth - 1] : NULL;
}

fan_cu_result fan__fake_inside(struct fan_cu_context **out)
{
    *out = fan__fake_current();
    if (!*out || !fan__fake.m)
        return INVALID_CONTEXT;
    return (*out)->lost;
}

fan_cu_result fan__fake_code(fan_status status, const fan_error *err)
{
    if (status == FAN_OK)
        return OK;
    fan__fake_lock();
    snprintf(fan__fake.message, sizeof fan__fake.message, "%s", err->text);
    fan__fake_unlock();
    switch (status) {
    case FAN_ERR_DEVICE_NOMEM:
    case FAN_ERR_NOMEM:
        return OUT_OF_MEMORY;
    case FAN_ERR_CAPTURE:
        return err->code ? err->code : 900;
    case FAN_ERR_VALUE:
        return INVALID_VALUE;
    default:
        return UNKNOWN;
    }
}

/* work_note_race: keeps a race of the checker for the test; the driver reports none. */
static fan_status work_note_race(fan_status status, const fan_error *err)
{
    if (status != FAN_ERR_RACE)
        return status;
    fan__fake_lock();
    if (!fan__fake.race[0])
        snprintf(fan__fake.race, sizeof fan__fake.race, "%s", err->text);
    fan__fake_unlock();
    return FAN_OK;
}

void fan__fake_note_races(void)
{
    fan_error err = {.status = FAN_OK};
    (void)work_note_race(fan_sim_pending(fan__fake.m, &err), &err);
}

fan_cu_result fan__fake_done(fan_status status, const fan_error *err)
{
    return fan__fake_code(work_note_race(status, err), err);
}

/* What a call does during a capture of another thread. Corrections by a GPU's results belong here.
 * Where the documents are silent the call is forbidden, except those that users make inside
 * torch.cuda.graph (making an event) or for every stream (cuStreamGetId). */
enum {
    LEGAL,
    UNLESS_RELAXED,
    ALWAYS_BREAKS
};
static const unsigned char beside[NUMBERS] = {
    /* refused, and the captures that it disturbs are broken, unless the thread is in relaxed
     * mode */
    [NUMBER_DevicePrimaryCtxRetain] = UNLESS_RELAXED,  /* where it makes the context */
    [NUMBER_DevicePrimaryCtxRelease] = UNLESS_RELAXED, /* .. where it ends it */
    [NUMBER_ModuleLoadData] = UNLESS_RELAXED,
    [NUMBER_ModuleUnload] = UNLESS_RELAXED,
    [NUMBER_ModuleGetFunction] = UNLESS_RELAXED,
    [NUMBER_MemAlloc] = UNLESS_RELAXED,
    [NUMBER_MemAllocFromPoolAsync] = UNLESS_RELAXED,
    [NUMBER_MemFreeAsync] = UNLESS_RELAXED,
    [NUMBER_MemPoolCreate] = UNLESS_RELAXED,
    [NUMBER_MemPoolDestroy] = UNLESS_RELAXED,
    [NUMBER_MemPoolSetAttribute] = UNLESS_RELAXED,
    [NUMBER_MemPoolGetAttribute] = UNLESS_RELAXED,
    [NUMBER_MemPoolTrimTo] = UNLESS_RELAXED,
    [NUMBER_MemcpyHtoDAsync] = UNLESS_RELAXED, /* from pageable memory */
    [NUMBER_MemcpyDtoHAsync] = UNLESS_RELAXED,
    [NUMBER_PointerGetAttribute] = UNLESS_RELAXED,
    [NUMBER_StreamCreate] = UNLESS_RELAXED,
    [NUMBER_StreamDestroy] = UNLESS_RELAXED,
    [NUMBER_StreamGetCtx] = UNLESS_RELAXED,
    [NUMBER_EventQuery] = UNLESS_RELAXED,
    [NUMBER_EventSynchronize] = UNLESS_RELAXED,
    [NUMBER_GraphInstantiateWithFlags] = UNLESS_RELAXED,
    [NUMBER_GraphExecDestroy] = UNLESS_RELAXED,
    [NUMBER_MemGetInfo] = UNLESS_RELAXED,
    /* refused, and every capture is broken, in whatever mode: it waits for the whole context */
    [NUMBER_CtxSynchronize] = ALWAYS_BREAKS,
    [NUMBER_MemFree] = ALWAYS_BREAKS,
};

fan_cu_result fan__fake_beside(int number)
{
    fan_error err = {.status = FAN_OK};
    if (beside[number] == LEGAL || !fan__fake.m)
        return OK;
    fan__sim_lock(fan__fake.m);
    fan__sim_access_state(fan__fake.m, OF_CAPTURES, FAN_SCHED_WRITE);
    fan_status status =
        fan__recording_break_all(fan__fake.m, fan__fake_names[number],
                                 beside[number] == ALWAYS_BREAKS, fan__fake_here.mode, &err);
    fan__sim_unlock(fan__fake.m);
    return fan__fake_done(status, &err);
}

void fan__fake_synchronized(void)
{
    fan__fake_lock();
    for (fan__thing *t = fan__fake.things[A_POOL]; t; t = t->next) {
        t->reserved = fan__smaller(t->reserved, fan__larger(t->used, t->threshold));
    }
    fan__fake_unlock();
}
