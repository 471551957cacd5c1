/* options: the switches of the process, what is counted, and what scheduled threads share without a lock. */
#ifndef FAN_BUFFER_OPTIONS_H
#define FAN_BUFFER_OPTIONS_H

#include "buffer/internal.h"

/* fan_count: adds to a counter of the buffer and of the process. */
void fan_count(fan_buffer *b, size_t counter_offset, uint64_t n);
#define FAN_COUNT(b, name, k) fan_count((b), offsetof(fan_counters, name), (k))
extern fan_counters fan_plain_total; /* of the process: what is counted of plain entries */
/* fan_count_parked: `bytes` more are parked; the peaks. */
void fan_count_parked(fan_buffer *b, uint64_t bytes);
/* fan_warn_mismatch_now: S6: whether it is to be warned of now: once per process, while the warning is on. */
bool fan_warn_mismatch_now(void);

/* fan_touch_budget: to the search of host orders (base/thread.h): a sum may be due, or what waits may become less. */
void fan_touch_budget(const fan_buffer *b, fan_sched_mode how);
/* fan_buffer_weigh: for the search of host orders: a scheduled thread adds `bytes`. As long as all that such threads
 * ever added fits the (smallest) budget, a fold is due or not whatever the other slots do; from then on whether one is
 * due depends on the order of all adds. */
void fan_buffer_weigh(fan_buffer *b, uint64_t bytes);

#endif
