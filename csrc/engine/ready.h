/* ready: a set of places from 0 to n - 1, of which the smallest is at hand: bits, with bits above them that say where
 * some are. One that is smaller than all of these may stand by itself, so that a set of one, as along a chain, has no
 * bits. A data structure: it knows nothing of nodes. */
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
    size_t front; /* 1 + the one that stands by itself; 0: none does */
} fan_ready;

int fan_ready_init(fan_ready *r, size_t n); /* 0, or -1: out of memory; nothing is in it */
void fan_ready_fini(fan_ready *r);
void fan__ready_set(fan_ready *r, size_t place);
void fan__ready_unset(fan_ready *r, size_t place);
size_t fan__ready_first_set(const fan_ready *r, size_t from);

static inline void fan_ready_add(fan_ready *r, size_t place)
{
    size_t front = r->front;
    if (front ? place + 1 < front : r->level[r->levels - 1][0] == 0) {
        r->front = place + 1;
        if (front)
            fan__ready_set(r, front - 1);
    } else if (place + 1 != front) {
        fan__ready_set(r, place);
    }
}
/* fan_ready_remove: of one that is in it. */
static inline void fan_ready_remove(fan_ready *r, size_t place)
{
    if (r->front == place + 1)
        r->front = 0;
    else
        fan__ready_unset(r, place);
}
/* fan_ready_first: the smallest that is at least `from`; FAN_READY_NONE. */
static inline size_t fan_ready_first(const fan_ready *r, size_t from)
{
    return r->front > from ? r->front - 1 : fan__ready_first_set(r, from);
}

#endif
