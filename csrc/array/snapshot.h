/* snapshot: the bytes that strided arrays show, kept, to be compared with what is there later, and put back.
 *
 * An array is kept as its comb (overlap.h): each byte about once, however many elements show it, so that a broadcast
 * array costs its bytes. Only what the arrays show is read; where the axes of a comb run into each other, all from its
 * first byte to its last is. Putting back writes the bytes that differ, and no other: memory that may only be read
 * stays untouched where it is as it was.
 *
 * Addresses are believed: whoever asks says that the memory is still there. Different snapshots may be used by
 * different threads.
 */
#ifndef FAN_ARRAY_SNAPSHOT_H
#define FAN_ARRAY_SNAPSHOT_H

#include "array/overlap.h"

typedef struct fan_snapshot fan_snapshot;

/* fan_snapshot_new: copies what n regions show. FAN_ERR_NOMEM; FAN_ERR_VALUE for a region that reaches farther than
 * memory does. `free`: of NULL as well. */
fan_status fan_snapshot_new(const fan_region *r, size_t n, fan_snapshot **out, fan_error *err);
void fan_snapshot_free(fan_snapshot *s);
/* fan_snapshot_bytes: how much is kept. */
size_t fan_snapshot_bytes(const fan_snapshot *s);
/* fan_snapshot_data: where element [0, 0, ..] of region i was. */
uint64_t fan_snapshot_data(const fan_snapshot *s, size_t i);
/* fan_snapshot_changed: whether a byte of region i is another one now. */
bool fan_snapshot_changed(const fan_snapshot *s, size_t i);
/* fan_snapshot_restore: the bytes of region i as they were, in the same geometry about `data`: where it was, or where
 * its memory has moved to. */
void fan_snapshot_restore(const fan_snapshot *s, size_t i, uint64_t data);

#endif
