/* clock: a vector clock, a small map from lane to count; independent of streams.
 *
 * A lane that is absent counts 0. Memory grows with the highest lane; up to FAN_CLOCK_INLINE lanes
 * need no heap. fan_clock_init cannot fail; operations that may grow return 0, or -1 when out of
 * memory (then nothing changed). */
#ifndef FAN_BASE_CLOCK_H
#define FAN_BASE_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

#define FAN_CLOCK_INLINE 12

typedef struct fan_clock {
    uint32_t n;     /* lanes in use */
    uint32_t cap;   /* lanes that fit; FAN_CLOCK_INLINE while inline */
    uint64_t *heap; /* NULL while inline */
    uint64_t lanes[FAN_CLOCK_INLINE];
} fan_clock;

void fan_clock_init(fan_clock *c);
void fan_clock_fini(fan_clock *c);
uint64_t fan_clock_get(const fan_clock *c, uint32_t lane);
int fan_clock_set(fan_clock *c, uint32_t lane, uint64_t count);
int fan_clock_join(fan_clock *c, const fan_clock *other); /* element-wise maximum */
int fan_clock_copy(fan_clock *c, const fan_clock *other);
bool fan_clock_leq(const fan_clock *a, const fan_clock *b);

#endif
