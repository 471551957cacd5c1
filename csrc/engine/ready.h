/* ready: a set of integers from 0 to n - 1 that finds its smallest quickly: a bit set, with levels
 * of bits above that mark words which are not 0. An element smaller than all of these may be kept
 * apart, so that a set of one, as along a chain, uses no bits. */
#ifndef FAN_ENGINE_READY_H
#define FAN_ENGINE_READY_H

#include <stddef.h>
#include <stdint.h>

#define FAN_READY_LEVELS 6 /* 64 to the 6th places */
#define FAN_READY_NONE SIZE_MAX

/* A zeroed one has no places. */
typedef struct fan_ready {
    /* 64 words of a level are one word of the next; the last level is one word */
    uint64_t *level[FAN_READY_LEVELS];
    unsigned levels;
    size_t front; /* 1 + the element that is kept apart; 0: none */
} fan_ready;

/* fan_ready_init: makes an empty set.
 * -1: out of memory. */
int fan_ready_init(fan_ready *ready, size_t n);
void fan_ready_fini(fan_ready *ready);
void fan__ready_set(fan_ready *ready, size_t place);
void fan__ready_unset(fan_ready *ready, size_t place);
size_t fan__ready_first_set(const fan_ready *ready, size_t from);

static inline void fan_ready_add(fan_ready *ready, size_t place)
{
    size_t front = ready->front;
    if (place + 1 == front)
        return;
    if (!front && ready->level[ready->levels - 1][0] == 0) {
        ready->front = place + 1;
    } else if (place + 1 < front) {
        ready->front = place + 1;
        fan__ready_set(ready, front - 1);
    } else {
        fan__ready_set(ready, place);
    }
}

/* fan_ready_remove: removes `place`, which must be an element. */
static inline void fan_ready_remove(fan_ready *ready, size_t place)
{
    if (ready->front == place + 1)
        ready->front = 0;
    else
        fan__ready_unset(ready, place);
}

/* fan_ready_first: returns the smallest element that is at least `from`, or FAN_READY_NONE. */
static inline size_t fan_ready_first(const fan_ready *ready, size_t from)
{
    if (ready->front > from)
        return ready->front - 1;
    return fan__ready_first_set(ready, from);
}

#endif
