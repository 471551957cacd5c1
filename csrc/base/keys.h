/* keys: a set of integers from 0 on, and their order: what it takes to receive many keys in any order at about the cost
 * of receiving them in order. */
#ifndef FAN_BASE_KEYS_H
#define FAN_BASE_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One zeroed by fan_calloc is empty. Small keys are bits, for keys mostly count from 0; the others are hashed. */
typedef struct fan_keys {
    uint64_t *bits;
    size_t words;       /* of bits */
    int64_t *cells;     /* open addressing; -1: free */
    size_t hashed, cap; /* cap: cells; a power of two, or 0 */
    int64_t least;      /* nothing in the set is smaller; meaningless while it is empty */
    size_t n;
} fan_keys;

void fan_keys_free(fan_keys **k); /* NULL afterwards, and fine before */
bool fan_keys_has(const fan_keys *k, int64_t key);
/* fan_keys_put: 1: put; 0: it was there; -1: out of memory, and nothing happened. */
int fan_keys_put(fan_keys *k, int64_t key);
void fan_keys_remove(fan_keys *k, int64_t key); /* which is there */

/* fan_keys_order: of n different keys, the first at `keys` and each `stride` bytes behind the one before: at[i] is
 * which of them is the i-th smallest. False: out of memory. */
bool fan_keys_order(const int64_t *keys, size_t stride, size_t n, uint32_t *at);

#endif
