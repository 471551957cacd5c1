/* keys: a set of non-negative integers, and their order. Receiving many keys in any order costs
 * about as much as receiving them in order. */
#ifndef FAN_BASE_KEYS_H
#define FAN_BASE_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A struct zeroed by fan_calloc is an empty set. Small keys are bits, because keys mostly count
 * from 0; others are hashed. */
typedef struct fan_keys {
    uint64_t *bits;
    size_t words;       /* of bits */
    int64_t *cells;     /* open addressing; -1: free */
    size_t hashed, cap; /* cap: cells; a power of two, or 0 */
    size_t n;
} fan_keys;

void fan_keys_free(fan_keys **k); /* sets *k to NULL, which it may be already */
bool fan_keys_has(const fan_keys *k, int64_t key);
/* fan_keys_put: returns 1 if the key was added, 0 if it was present, -1 when out of memory (nothing
 * changed). */
int fan_keys_put(fan_keys *k, int64_t key);
void fan_keys_remove(fan_keys *k, int64_t key); /* the key must be present */

/* fan_keys_order: sorts n distinct keys, the first at `keys` and each `stride` bytes after the one
 * before: at[i] is the index of the i-th smallest. Returns false when out of memory. */
bool fan_keys_order(const int64_t *keys, size_t stride, size_t n, uint32_t *at);

#endif
