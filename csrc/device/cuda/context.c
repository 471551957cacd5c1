#define _POSIX_C_SOURCE 200809L
/* Around each call of the driver: a device that is usable, with its context current; what a code
 * means, as a status; and the relaxed mode, in which calls disturb no capture. */
#include "device/cuda/part.h"

#include "base/fault.h"
#include "base/thread.h"

bool fan__cuda_forked(const fan_cuda *c)
{
    return c->life != fan_fork_generation();
}

bool fan__cuda_usable(const fan_cuda_part *p)
{
    return !fan__cuda_forked(p->cuda) && !atomic_load_explicit(&p->dead, memory_order_acquire);
}

fan_status fan__cuda_refuse_dead(fan_cuda_part *p, fan_error *err)
{
    return fan_fail_code(
        err, FAN_ERR_DEVICE, p->cause.code,
        "cuda:%d was lost by an earlier failure: %s. Restart the process to use it again", p->index,
        p->cause.text);
}

fan_status fan__cuda_refuse_child(const fan_cuda_part *p, fan_error *err)
{
    return fan_fail(err, FAN_ERR_STATE,
                    "cuda:%d cannot be used in a forked child: CUDA does not survive fork(). Start "
                    "processes with the \"spawn\" or \"forkserver\" method of multiprocessing, or "
                    "use the device in the child alone",
                    p->index);
}

fan_status fan__cuda_enter(fan_cuda_part *p, fan__cuda_scope *scope, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan_cu_context now = NULL;
    *scope = (fan__cuda_scope){.part = p};
    if (fan__cuda_forked(p->cuda))
        return fan__cuda_refuse_child(p, err);
    if (!fan__cuda_usable(p))
        return fan__cuda_refuse_dead(p, err);
    FAN_TRY(fan__cuda_check(p, api->CtxGetCurrent(&now), "cuCtxGetCurrent", err));
    if (now == p->context)
        return FAN_OK;
    FAN_TRY(fan__cuda_check(p, api->CtxPushCurrent(p->context), "cuCtxPushCurrent", err));
    scope->pushed = true;
    return FAN_OK;
}

void fan__cuda_leave(fan__cuda_scope *scope)
{
    fan_cu_context mine = NULL;
    if (!scope->pushed || FAN_FAULT(CUDA_NO_POP))
        return;
    scope->pushed = false;
    (void)fan__cuda_check(scope->part, fan__cuda_api_of(scope->part)->CtxPopCurrent(&mine),
                          "cuCtxPopCurrent", NULL);
}

const char *fan__cuda_capture_advice(fan_cu_result code)
{
    switch (code) {
    case 900:
        return "this call is not possible on a captured stream: make it before the capture, or "
               "after it";
    case 901:
        return "an earlier violation has ended this capture: end it and begin again";
    case 902:
        return "two captures would become one: capture on one stream, and fork the others from it";
    case 904:
        return "a stream that was pulled into the capture was not joined back: let the first "
               "stream wait for it before the capture ends";
    case 905:
        return "captured work would wait for work outside: record the event inside the capture, or "
               "wait before it begins";
    case 906:
        return "the legacy default stream cannot take part while a blocking stream is captured: "
               "use other streams";
    case 907:
        return "an event of a capture has no time: it can be waited for inside the capture alone";
    default:
        return "see docs/cuda.md, Capture";
    }
}

bool fan__cuda_lives(const fan_cuda_part *p)
{
    unsigned flags = 0;
    int active = 0;
    return p->ready &&
           fan__cuda_api_of(p)->DevicePrimaryCtxGetState(p->ordinal, &flags, &active) == 0 &&
           active;
}

fan_status fan__cuda_refuse(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err)
{
    char text[256];
    fan_error mine = {.status = FAN_OK};
    if (!err)
        err = &mine;
    (void)fan_cuda_text(fan__cuda_api_of(p), code, text, sizeof text);
    if (code == FAN_CU_OUT_OF_MEMORY) {
        return fan_fail_code(err, FAN_ERR_DEVICE_NOMEM, code, "%s on cuda:%d failed: %s", call,
                             p->index, text);
    }
    if (code >= 900 && code <= 908) {
        return fan_fail_code(err, FAN_ERR_CAPTURE, code, "%s on cuda:%d failed: %s; %s", call,
                             p->index, text, fan__cuda_capture_advice(code));
    }
    fan_status status =
        fan_fail_code(err, FAN_ERR_DEVICE, code, "%s on cuda:%d failed: %s", call, p->index, text);
    if (fan_cuda_stale(code) && fan__cuda_lives(p)) {
        fan_append(err->text, sizeof err->text,
                   ". The device's context is valid, but the stream, event or memory is not. Was a "
                   "stream destroyed that is still used?");
    } else if (fan_cuda_sticky(code)) {
        fan__part_lock(p);
        if (!atomic_load_explicit(&p->dead, memory_order_relaxed) && !FAN_FAULT(CUDA_NO_POISON)) {
            p->cause = *err;
            atomic_store_explicit(&p->dead, true, memory_order_release);
        }
        fan__part_unlock(p);
        fan_append(err->text, sizeof err->text,
                   ". Any earlier work may have caused it. The device is lost to this process: "
                   "restart it");
    }
    return status;
}

/* The driver for which this thread is in relaxed mode. */
static _Thread_local const fan_cuda *relaxed;

/* context_exchange_mode: returns the mode before; -1: it failed. Tried twice: a thread left in
 * relaxed mode would break other captures. */
static int context_exchange_mode(const fan_cuda_part *p, int mode)
{
    for (int i = 0; i < 2; i++) {
        int was = mode;
        if (fan__cuda_api_of(p)->ThreadExchangeStreamCaptureMode(&was) == 0)
            return was;
    }
    return -1;
}

int fan__cuda_relax(const fan_cuda_part *p)
{
    if (!fan__cuda_api_of(p)->has[FAN_CUDA_CAPTURE])
        return -1;
    if (relaxed == p->cuda || FAN_FAULT(CUDA_NO_RELAX))
        return -1;
    int was = context_exchange_mode(p, FAN_CU_CAPTURE_MODE_RELAXED);
    if (was >= 0)
        relaxed = p->cuda;
    return was;
}

void fan__cuda_restore(const fan_cuda_part *p, int mode)
{
    if (mode < 0)
        return;
    relaxed = NULL;
    (void)context_exchange_mode(p, mode);
}

fan_status fan__cuda_pass(fan_cuda_part *p, fan_cu_stream on, fan_error *err)
{
    int mode = fan__cuda_relax(p);
    fan_cu_result code = fan__cuda_api_of(p)->StreamSynchronize(on);
    fan__cuda_restore(p, mode);
    return fan__cuda_check(p, code, "cuStreamSynchronize", err);
}
