/* event: events of a machine: the table's entries. */
#ifndef FAN_DEVICE_SIM_EVENT_H
#define FAN_DEVICE_SIM_EVENT_H

#include "device/sim/machine.h"

fan_status fan__sim_event_init(fan_event *e, fan_error *err);
void fan__sim_event_fini(fan_event *e);
fan_status fan__sim_record(fan_event *e, fan_stream *s, fan_error *err);
/* fan__sim_note: records an event at the current end of s, for memory that is to be freed: no barrier of the legacy
 * stream, and no other ordering. */
fan_status fan__sim_note(fan_event *e, fan_stream *s, fan_error *err);
fan_status fan__sim_wait(fan_stream *s, fan_event *e, fan_error *err);
void fan__sim_elided(fan_stream *s, fan_event *e);
fan_status fan__sim_query(fan_event *e, bool *done, fan_error *err);
bool fan__sim_peek(fan_event *e);
fan_status fan__sim_sync(fan_stream *s, fan_error *err);
fan_status fan__sim_event_sync(fan_event *e, fan_error *err);

#endif
