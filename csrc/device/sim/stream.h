/* stream: streams of a machine: the table's entries, and the barriers of the legacy default stream. */
#ifndef FAN_DEVICE_SIM_STREAM_H
#define FAN_DEVICE_SIM_STREAM_H

#include "device/sim/machine.h"

fan_stream *fan__sim_current(fan_device *d);
fan_status fan__sim_find_stream(fan_device *d, uint64_t handle, fan_stream **out, fan_error *err);
void fan__sim_stream_fini(fan_stream *s);
fan_status fan__sim_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status fan__sim_capture_stream(fan_device *d, uint64_t id, fan_stream **out, fan_error *err);

/* fan__stream_barrier: A7: orders work on the legacy default stream after all that its device's blocking streams have
 * queued; and work on a blocking stream after all that the legacy stream has. FAN_ERR_NOMEM may leave extra waits,
 * which no caller can observe. */
fan_status fan__stream_barrier(fan_sim *m, fan_sim_queue *q, fan_error *err);

/* event: events of a machine: the table's entries. */
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
