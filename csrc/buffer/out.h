/* out: D11: which memory meets which? Extents by their beginning, so that asking costs little with any number of slots.
 */
#ifndef FAN_BUFFER_OUT_H
#define FAN_BUFFER_OUT_H

#include "buffer/slot.h"

typedef struct fan_extent {
    uintptr_t lo, hi, highest; /* `highest`: of all up to and with this one */
    const fan_array *a;
    size_t slot;
    bool dense;
} fan_extent;

typedef struct fan_extents {
    fan_extent *all;
    size_t n;
} fan_extents;

/* extents_put: room for it must be there. extents_sort: once all are put. */
void fan_extents_put(fan_extents *e, const fan_array *a, size_t slot, bool dense);
void fan_extents_sort(fan_extents *e);
/* out_meets_inputs: may `out` of slot k not be written while some input is still to be read? */
bool fan_out_meets_inputs(const fan_extents *inputs, const fan_array *out, size_t k);
/* written_by_out: would some out= write what is handed through? */
bool fan_written_by_out(const fan_extents *outs, const fan_value *v);
/* outs_meet: two of them that may share memory: their slots, the lesser first. */
bool fan_outs_meet(const fan_extents *outs, size_t *one, size_t *two);

#endif
