/* out: D11: which `out` overlaps which input? Extents are sorted by their beginning, so that asking costs little with
 * any number of slots. */
#ifndef FAN_BUFFER_OUT_H
#define FAN_BUFFER_OUT_H

#include "array/extents.h"
#include "buffer/slot.h"

/* fan_out_overlaps_inputs: whether writing `out` of slot k could change an input that has not been read yet. */
bool fan_out_overlaps_inputs(const fan_extents *inputs, const fan_array *out, size_t k);
/* fan_written_by_out: whether some `out` overlaps v, a contribution that is handed through as it is. */
bool fan_written_by_out(const fan_extents *outs, const fan_value *v);
/* fan_outs_meet: whether two of the outs may share memory; *one and *two are their slots, the lesser first. */
bool fan_outs_meet(const fan_extents *outs, size_t *one, size_t *two);

#endif
