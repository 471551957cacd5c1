/* batch: sums held back until one launch can do them all; sums of sparse data on a device. */
#ifndef FAN_DEVICE_BATCH_H
#define FAN_DEVICE_BATCH_H

#include "array/sparse.h"
#include "device/stream.h"

/* fan_batch: sums held back until they can be queued together (run_many). Used by one thread. A
 * flush queues every pending job on its own stream. Jobs of one stream that may access memory that
 * another of them writes are queued one after the other, in the order of fan_batch_put. The first
 * failure ends the flush; later flushes do nothing. */
typedef struct fan_batch fan_batch;
fan_batch *fan_batch_new(void);    /* NULL when out of memory */
void fan_batch_free(fan_batch *b); /* b may be NULL */
/* fan_batch_put: adds a job for stream s. Holds s and the arrays of the job until the batch is
 * cleared; `scale` must live as long. *number is for fan_batch_state. FAN_ERR_NOMEM. */
fan_status fan_batch_put(fan_batch *b, fan_stream *s, const fan_job *job, size_t *number,
                         fan_error *err);
void fan_batch_flush(fan_batch *b);
fan_job_state fan_batch_state(const fan_batch *b, size_t number);
/* fan_batch_failure: returns the first failure; FAN_OK: none. */
fan_status fan_batch_failure(const fan_batch *b, fan_error *err);
/* fan_batch_waits_on: returns whether a job of stream s is pending: flush before recording an event
 * on s. */
bool fan_batch_waits_on(const fan_batch *b, const fan_stream *s);
uint64_t fan_batch_bytes(const fan_batch *b); /* bytes of the results of all its jobs */
void fan_batch_clear(fan_batch *b);           /* empties it and keeps its memory */

/* fan_device_sparse_merge: fan_sparse_merge for parts on device d, ordered by s. COO without
 * `coalesce` and without result rounding is queued; anything else copies the parts to the host
 * (blocks), merges there and uploads. */
fan_status fan_device_sparse_merge(fan_device *d, fan_stream *s, const fan_sparse_operand *in,
                                   size_t n, bool coalesce, fan_dtype result,
                                   const fan_scale *scale, fan_sparse **out, fan_error *err);
/* fan_device_sparse_reduce: fan_sparse_reduce for parts and `out` on device d, ordered by s. On a
 * device with streams it copies the parts to the host (blocks), sums there and uploads: the order
 * of the entries is the order of the sum. */
fan_status fan_device_sparse_reduce(fan_device *d, fan_stream *s, const fan_sparse *from,
                                    fan_dtype dtype, const fan_array *out, fan_error *err);

#endif
