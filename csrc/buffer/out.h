/* out: D11: which memory meets which? Extents by their beginning, so that asking costs little with any number of slots.
 */
#ifndef FAN_BUFFER_OUT_H
#define FAN_BUFFER_OUT_H

#include "array/extents.h"
#include "buffer/slot.h"

/* fan_out_meets_inputs: may `out` of slot k not be written while some input is still to be read? */
bool fan_out_meets_inputs(const fan_extents *inputs, const fan_array *out, size_t k);
/* fan_written_by_out: would some out= write what is handed through? */
bool fan_written_by_out(const fan_extents *outs, const fan_value *v);
/* fan_outs_meet: two of them that may share memory: their slots, the lesser first. */
bool fan_outs_meet(const fan_extents *outs, size_t *one, size_t *two);

#endif
