/* arena: addresses of one mapping, handed out first-fit: the lowest free block first, so that memory given back is used
 * again at once.
 *
 * Blocks begin at multiples of 64 bytes. With `poison`, free memory is filled with 0xA5: work that reads memory it must
 * not read sees that. Not thread-safe. */
#ifndef FAN_DEVICE_SIM_ARENA_H
#define FAN_DEVICE_SIM_ARENA_H

#include "device/recorder.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN_ARENA_ALIGN 64

typedef struct fan_block {
    uintptr_t lo, hi;
    bool used;
    bool automatic;  /* what the next four mean is for the owner of the arena to say */
    bool left;       /* .. and this */
    uint32_t graphs; /* .. and this */
    uint64_t name;   /* .. and this too */
} fan_block;

typedef struct fan_arena {
    uintptr_t base;
    size_t bytes; /* mapped; a multiple of 64 */
    bool poison;
    fan_block *blocks; /* sorted, without gaps from base on; behind the last, memory that was never handed out */
    size_t n, cap;
    size_t hint;         /* no free block stands before it */
    size_t live, in_use; /* used blocks, their bytes */
} fan_arena;

/* fan_arena_init: reserves `bytes` of addresses, of which none is touched. 0, or -1 when the system refuses. */
int fan_arena_init(fan_arena *a, size_t bytes, bool poison);
void fan_arena_fini(fan_arena *a);
/* fan_arena_alloc: the new block, or NULL: no room, or, with *host, no host memory for its block table. Good until the
 * next alloc or free. */
fan_block *fan_arena_alloc(fan_arena *a, size_t bytes, bool *host);
void fan_arena_free(fan_arena *a, uintptr_t lo);
/* fan_arena_find: the used block that holds `address`; NULL where there is none. */
fan_block *fan_arena_find(fan_arena *a, uintptr_t address);

#ifdef FAN_TEST
/* fan_arena_reset: every block is free again, and poisoned where asked. */
void fan_arena_reset(fan_arena *a);
#endif

#endif
