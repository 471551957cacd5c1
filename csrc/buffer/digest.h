/* digest: the digests of gradients and sums in a trace (array/digest.h).
 *
 * On the host the digest is taken at once. On a device with streams no thread may wait while a pass
 * runs, since a wait would hide the race that the digest is to find: a copy is queued on the stream
 * where the value is ready, and its bytes are read when the trace ends (fan_digests_settle). */
#ifndef FAN_BUFFER_DIGEST_H
#define FAN_BUFFER_DIGEST_H

#include "base/trace.h"
#include "buffer/value.h"

/* The subject of a line of kind DIGEST, in its `how`. */
enum {
    FAN_DIGEST_CONTRIBUTION = 'c',
    FAN_DIGEST_SUM = 's',
    FAN_DIGEST_HOOKED = 'h', /* a sum that a hook of the slot replaced */
    FAN_DIGEST_LEAF = 'l'    /* the gradient that a leaf has */
};

/* fan_digest_fill: writes digest, bytes and label of a line, or `event`, the number of a digest
 * that is read later. `on`: where the value is ready; NULL: the current stream of its device.
 * `known`: its digest; 0: unknown. Objects and recorded values have no digest: 0, and the reason in
 * the label. Cannot fail. */
void fan_digest_fill(const fan_value *v, fan_stream *on, uint64_t known, fan_trace_line *line);

/* fan_digests_hold, _drop: count the traces whose lines may need digests. The last drop forgets all
 * of them. */
void fan_digests_hold(void);
void fan_digests_drop(void);
/* fan_digests_settle: reads what was copied, and frees the copies. Blocks; call it without locks. A
 * copy that can no longer be read has no digest. */
void fan_digests_settle(void);
/* fan_digest_later: returns the digest with this number; 0: it is not read yet, or could not be. */
uint64_t fan_digest_later(uint64_t number);

#endif
