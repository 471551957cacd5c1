/* snapshot: a copy of the bytes of strided arrays, to be compared with later contents, and
 * restored.
 *
 * An array is kept as its comb (overlap.h): each byte about once, however many elements share it,
 * so that a broadcast array costs its bytes. Only bytes of the arrays are read; if the axes of a
 * comb overlap, all from its first byte to its last. Restoring writes the bytes that differ, and no
 * other: unchanged read-only memory is not written.
 *
 * Addresses are trusted: the caller guarantees that the memory is still valid. Different threads
 * may use different snapshots. */
#ifndef FAN_ANALYSIS_SNAPSHOT_H
#define FAN_ANALYSIS_SNAPSHOT_H

#include "array/overlap.h"

typedef struct fan_snapshot fan_snapshot;

/* fan_snapshot_new: copies the bytes of n regions. FAN_ERR_NOMEM; FAN_ERR_VALUE for a region that
 * reaches beyond the address space. fan_snapshot_free accepts NULL. */
fan_status fan_snapshot_new(const fan_region *r, size_t n, fan_snapshot **out, fan_error *err);
void fan_snapshot_free(fan_snapshot *s);
/* fan_snapshot_bytes: returns the bytes kept. */
size_t fan_snapshot_bytes(const fan_snapshot *s);
/* fan_snapshot_data: returns the recorded address of element [0, 0, ..] of region i. */
uint64_t fan_snapshot_data(const fan_snapshot *s, size_t i);
/* fan_snapshot_changed: returns whether a byte of region i differs now. */
bool fan_snapshot_changed(const fan_snapshot *s, size_t i);
/* fan_snapshot_restore: writes the kept bytes of region i, in the same geometry around `data`: its
 * old address, or the one that its memory has moved to. */
void fan_snapshot_restore(const fan_snapshot *s, size_t i, uint64_t data);

#endif
