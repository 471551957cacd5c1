/* stretch: intervals of numbers (extents and arcs), sorted, and the number of overlapping pairs; for
 * array/overlap_list. */
#ifndef FAN_ARRAY_STRETCH_H
#define FAN_ARRAY_STRETCH_H

#include <stddef.h>
#include <stdint.h>

#define FAN_NO_STRETCH UINT32_MAX

/* From one number to another, both included: an extent, or an arc (one that passes the end of the circle is two). */
typedef struct fan_stretch {
    uint64_t from, to;
    uint32_t index, next; /* next: in a list of open ones */
} fan_stretch;

/* fan__stretch_run_end: returns the end of the ascending run that begins at `at`. */
size_t fan__stretch_run_end(const fan_stretch *s, size_t n, size_t at);
/* fan__stretch_merge: sorts by `from` by merging the existing runs, of which there are often few; `scratch` has room
 * for n. */
void fan__stretch_merge(fan_stretch *s, size_t n, fan_stretch *scratch);
/* fan__stretch_meetings: returns how many pairs of sorted stretches overlap. */
uint64_t fan__stretch_meetings(const fan_stretch *s, size_t n);

#endif
