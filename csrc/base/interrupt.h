/* interrupt: lets long loops on the host poll for Ctrl-C.
 *
 * A caller that can discard unfinished results opens a scope around the work. Loops over many
 * elements poll fan_interrupted and return at once if it is true; the end of the scope then returns
 * a failure, and the results must be discarded. Outside a scope fan_interrupted is always false:
 * work that must not be lost opens none. */
#ifndef FAN_BASE_INTERRUPT_H
#define FAN_BASE_INTERRUPT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/float_mode.h"
#include "base/status.h"

typedef struct fan_interrupt {
    fan_status (*check)(fan_error *err); /* NULL: not interruptible */
    fan_error *err;
    fan_status status; /* FAN_OK: not interrupted */
    int64_t ahead;     /* elements until the clock is read again */
    /* nanoseconds at which `check` is due; 0: the clock was not read yet */
    uint64_t next;
    fan_float_mode mode;         /* of the thread when the scope began, for `check` */
    struct fan_interrupt *outer; /* NULL: none */
} fan_interrupt;

/* fan_interrupt_begin: opens a scope: loops of this thread call `check` about twenty times a second
 * and end on any result but FAN_OK. `check` may run arbitrary code: hold no lock inside the scope.
 * Code that `check` runs is outside it, and has the floating-point modes that the thread has
 * now. */
void fan_interrupt_begin(fan_interrupt *i, fan_status (*check)(fan_error *err), fan_error *err);
/* fan_interrupt_end: closes the innermost scope of this thread. Returns `status` or, if that is
 * FAN_OK, the failure that ended the work. */
fan_status fan_interrupt_end(fan_interrupt *i, fan_status status);

/* fan_interrupted: returns whether to stop at once. Call it every 10^3 to 10^6 elements; almost
 * free. */
bool fan_interrupted(int64_t elements);

#endif
