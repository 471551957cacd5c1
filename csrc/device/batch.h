/* batch: sums held back until one launch can do them all. */
#ifndef FAN_DEVICE_BATCH_H
#define FAN_DEVICE_BATCH_H

#include "device/stream.h"

/* fan_batch: sums held back until they can be queued together (run_many). Of one thread. A flush queues all that waits,
 * each on its own stream; jobs of a stream that may touch what another of them writes go one after the other, as they
 * came. The first failure ends the flush, and every later one does nothing. */
typedef struct fan_batch fan_batch;
fan_batch *fan_batch_new(void);    /* NULL when out of memory */
void fan_batch_free(fan_batch *b); /* NULL is fine */
/* fan_batch_put: holds s and the job's arrays until the batch is cleared; `scale` is to live as long. *number is for
 * fan_batch_state. FAN_ERR_NOMEM. */
fan_status fan_batch_put(fan_batch *b, fan_stream *s, const fan_job *job, size_t *number, fan_error *err);
void fan_batch_flush(fan_batch *b);
fan_job_state fan_batch_state(const fan_batch *b, size_t number);
/* fan_batch_failure: what the first failure was; FAN_OK: there was none. */
fan_status fan_batch_failure(const fan_batch *b, fan_error *err);
/* fan_batch_waits_on: some job may wait that belongs to s: whoever records an event on s flushes first. */
bool fan_batch_waits_on(const fan_batch *b, const fan_stream *s);
uint64_t fan_batch_bytes(const fan_batch *b); /* of the results of all its jobs */
void fan_batch_clear(fan_batch *b);           /* as new; the room stays */

#endif
