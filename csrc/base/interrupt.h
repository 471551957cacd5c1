/* interrupt: how long work on the host hears that its user wants it to end.
 *
 * Who starts such work, and can throw away what it has made, opens a scope around it; loops over many elements ask
 * fan_interrupted and leave at once where it says so. What they have made by then is worth nothing, which the end of
 * the scope tells. Outside a scope nothing is interrupted: work that writes what must not be lost has none.
 */
#ifndef FAN_BASE_INTERRUPT_H
#define FAN_BASE_INTERRUPT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct fan_interrupt {
    fan_status (*check)(fan_error *err); /* NULL: nobody can interrupt */
    fan_error *err;
    fan_status status;           /* FAN_OK: go on */
    int64_t ahead;               /* elements until the clock is read again */
    uint64_t next;               /* nanoseconds at which `check` is called again; 0: the clock was not read yet */
    struct fan_interrupt *outer; /* NULL: none */
} fan_interrupt;

/* fan_interrupt_begin: from here on the loops of this thread ask `check` about twenty times a second; anything but
 * FAN_OK ends them. `check` may run anything: no lock may be held, and what it runs is outside the scope. */
void fan_interrupt_begin(fan_interrupt *i, fan_status (*check)(fan_error *err), fan_error *err);
/* fan_interrupt_end: ends the scope that this thread began last. Returns `status`, or, where that is FAN_OK, what
 * ended the work. */
fan_status fan_interrupt_end(fan_interrupt *i, fan_status status);

/* fan_interrupted: in loops, about every 10^3 to 10^6 elements: whether to leave at once. Costs next to nothing. */
bool fan_interrupted(int64_t elements);

#endif
