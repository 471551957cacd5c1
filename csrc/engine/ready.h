/* ready: a set of places from 0 to n - 1, of which the smallest is at hand: bits, with bits above them that say where
 * some are. A data structure: it knows nothing of nodes. */
#ifndef FAN_ENGINE_READY_H
#define FAN_ENGINE_READY_H

#include <stddef.h>
#include <stdint.h>

#define FAN_READY_LEVELS 6 /* 64 to the 6th places */
#define FAN_READY_NONE SIZE_MAX

/* A zeroed one has no places. */
typedef struct fan_ready {
    uint64_t *level[FAN_READY_LEVELS]; /* of each 64 words of a level one word in the next; the last one is one word */
    unsigned levels;
} fan_ready;

int fan_ready_init(fan_ready *r, size_t n); /* 0, or -1: out of memory; nothing is in it */
void fan_ready_fini(fan_ready *r);
void fan_ready_add(fan_ready *r, size_t place);
void fan_ready_remove(fan_ready *r, size_t place); /* which is in it */
/* fan_ready_first: the smallest that is at least `from`; FAN_READY_NONE. */
size_t fan_ready_first(const fan_ready *r, size_t from);

#endif
