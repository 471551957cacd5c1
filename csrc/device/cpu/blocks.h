/* blocks: memory with addresses that last as long as a recording.
 *
 * A block whose array was freed is reused for the next array that fits; none is freed before the
 * last hold on all of them. So a recording's allocations have the same addresses in each replay,
 * and take about its peak, not its total. The same calls give the same blocks. Any thread may drop
 * an array. */
#ifndef FAN_DEVICE_CPU_BLOCKS_H
#define FAN_DEVICE_CPU_BLOCKS_H

#include "array/array.h"

#define FAN_CPU_POISON 0xff /* each byte of memory that must not be read: a NaN in every float */

typedef struct fan_blocks fan_blocks;

/* fan_blocks_new: one hold; NULL when out of memory. */
fan_blocks *fan_blocks_new(void);
void fan_blocks_drop(fan_blocks *b); /* b may be NULL */
/* fan_blocks_storage: returns `n` bytes, aligned to 64, not zeroed: the smallest free block of at
 * most twice the size, else a new one. It holds b. NULL when out of memory. */
fan_storage *fan_blocks_storage(fan_blocks *b, size_t n);
/* fan_blocks_have: returns whether these bytes are in one block that is in use. */
bool fan_blocks_have(fan_blocks *b, const void *data, size_t bytes);
size_t fan_blocks_live(fan_blocks *b);    /* how many are in use */
uint64_t fan_blocks_bytes(fan_blocks *b); /* of all */
void fan_blocks_poison(fan_blocks *b);    /* fills all of them with FAN_CPU_POISON */

#endif
