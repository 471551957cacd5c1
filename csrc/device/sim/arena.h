/* arena: addresses of one mapping, allocated first-fit: the lowest free block first, so that freed memory is reused at
 * once.
 *
 * Blocks begin at multiples of 64 bytes. With `poison`, free memory is filled with 0xA5, which shows up in work that
 * reads memory it must not read. Not thread-safe. */
#ifndef FAN_DEVICE_SIM_ARENA_H
#define FAN_DEVICE_SIM_ARENA_H

#include "device/backend.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_ARENA_ALIGN 64

typedef struct fan_block {
    uintptr_t lo, hi;
    bool used;
    bool automatic; /* meaning defined by the arena's owner, as of the next three */
    bool left;
    uint32_t graphs;
    uint64_t name;
} fan_block;

typedef struct fan_arena {
    uintptr_t base;
    size_t bytes; /* mapped; a multiple of 64 */
    bool poison;
    fan_block *blocks; /* sorted, contiguous from base on; after the last, memory that was never allocated */
    size_t n, cap;
    size_t hint;         /* no block before it is free */
    size_t live, in_use; /* used blocks, their bytes */
} fan_arena;

/* fan_arena_init: reserves `bytes` of addresses, without touching them. Returns 0, or -1 if the system refuses. */
int fan_arena_init(fan_arena *a, size_t bytes, bool poison);
void fan_arena_fini(fan_arena *a);
/* fan_arena_alloc: returns the new block, valid until the next alloc or free, or NULL: no room, or, with *host, no host
 * memory for the block table. */
fan_block *fan_arena_alloc(fan_arena *a, size_t bytes, bool *host);
void fan_arena_free(fan_arena *a, uintptr_t lo);
/* fan_arena_find: returns the used block that contains `address`; NULL if none. */
fan_block *fan_arena_find(fan_arena *a, uintptr_t address);

#ifdef FAN_TEST
/* fan_arena_reset: frees every block, and poisons it if configured. */
void fan_arena_reset(fan_arena *a);
#endif

#endif
