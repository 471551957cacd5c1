/* Polls of long loops: counts their elements, and reads the clock and calls the check seldom. */
#include "base/interrupt.h"

#include "base/trace.h"

#define UNREAD ((int64_t)1 << 20)       /* elements between two reads of the clock */
#define PAUSE ((uint64_t)50 * 1000000u) /* nanoseconds between two checks */

static _Thread_local fan_interrupt *innermost;

void fan_interrupt_begin(fan_interrupt *i, fan_status (*check)(fan_error *err), fan_error *err)
{
    *i = (fan_interrupt){.check = check,
                         .err = err,
                         .status = FAN_OK,
                         .ahead = UNREAD,
                         .mode = fan_float_mode_get(),
                         .outer = innermost};
    innermost = i;
}

fan_status fan_interrupt_end(fan_interrupt *i, fan_status status)
{
    innermost = i->outer;
    return status == FAN_OK ? i->status : status;
}

bool fan_interrupted(int64_t elements)
{
    fan_interrupt *i = innermost;
    if (!i)
        return false;
    i->ahead -= elements;
    if (i->status != FAN_OK || i->ahead >= 0)
        return i->status != FAN_OK;
    uint64_t t = fan_trace_ns();
    i->ahead = UNREAD;
    if (t < i->next || !i->check)
        return false;
    if (i->next) {
        fan_float_mode ours = fan_float_mode_get();
        if (!FAN_FAULT(FLOAT_MODE_OF_CALLBACK))
            fan_float_mode_set(i->mode);
        innermost = NULL;
        i->status = i->check(i->err);
        innermost = i;
        fan_float_mode_set(ours);
        t = fan_trace_ns();
    }
    i->next = t + PAUSE;
    return i->status != FAN_OK;
}
