/* stretch: from one number to another: extents and arcs, sorted, and how many of them meet; for array/overlap_list. */
#ifndef FAN_ARRAY_STRETCH_H
#define FAN_ARRAY_STRETCH_H

#include <stddef.h>
#include <stdint.h>

#define FAN_NOBODY UINT32_MAX

/* From one number to another, both included: an extent, or an arc (one that passes the end of the circle is two). */
typedef struct fan_stretch {
    uint64_t from, to;
    uint32_t who, next; /* next: in a list of open ones */
} fan_stretch;

/* fan__stretch_run_end: where the ascending run that begins at `at` ends. */
size_t fan__stretch_run_end(const fan_stretch *s, size_t n, size_t at);
/* fan__stretch_merge: sorts by `from`, by merging the runs that are there, of which there are often few; `scratch` has
 * room for n. */
void fan__stretch_merge(fan_stretch *s, size_t n, fan_stretch *scratch);
/* fan__stretch_meetings: how many pairs of sorted stretches meet. */
uint64_t fan__stretch_meetings(const fan_stretch *s, size_t n);

#endif
