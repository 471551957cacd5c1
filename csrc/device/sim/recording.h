/* recording: the state of a capture in progress, and the calls that it forbids. Call with the machine's lock held. */
#ifndef FAN_DEVICE_SIM_RECORDING_H
#define FAN_DEVICE_SIM_RECORDING_H

#include "device/sim/machine.h"

void fan__recording_drop(fan_sim_recording *r);
/* fan__recording_refuse: turns a code of capture.h into a failure that names the stream; -1: out of memory. */
fan_status fan__recording_refuse(const fan_sim_queue *q, int code, const char *what, fan_error *err);
/* fan__recording_none: fails if q is captured, for calls that a captured stream does not allow. */
fan_status fan__recording_none(const fan_sim_queue *q, const char *what, fan_error *err);
/* fan__recording_has_time: the same for an event. */
fan_status fan__recording_has_time(const fan_sim_event *ev, const fan_event *e, const char *what, fan_error *err);

fan_sim_command *fan__command_new(size_t bytes);
void fan__command_put(fan_sim_graph *g, fan_sim_command *c);
fan_status fan__recording_record(fan_sim_event *ev, fan_sim_queue *q, fan_error *err);
/* fan__recording_wait: handles a wait if q or the event is captured; *done false: neither is. */
fan_status fan__recording_wait(fan_sim_queue *q, const fan_sim_event *ev, bool *done, fan_error *err);

void fan__graph_free(fan_sim_graph *g);
/* fan__recording_drop_all: drops those that were never ended. */
void fan__recording_drop_all(fan_sim *m);

#endif
