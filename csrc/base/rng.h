/* rng: reproducible pseudo-random numbers (splitmix64). */
#ifndef FAN_BASE_RNG_H
#define FAN_BASE_RNG_H

#include <stdint.h>

/* fan_rng: returns the next number and advances `state`; any state is a seed. */
static inline uint64_t fan_rng(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

#endif
