/* blocks: memory whose addresses last as long as a recording does.
 *
 * A block whose array has gone is given to the next array that fits; none goes back before the last hold on all of them
 * does. So what a recording allocated is at the same place in each replay, and takes about what it took at once, not
 * the sum of all. The same calls give the same blocks. Any thread may drop an array. */
#ifndef FAN_DEVICE_CPU_BLOCKS_H
#define FAN_DEVICE_CPU_BLOCKS_H

#include "array/array.h"

#define FAN_CPU_POISON 0xff /* each byte of memory that nobody may read: a NaN in every float */

typedef struct fan_blocks fan_blocks;

/* fan_blocks_new: one hold; NULL: out of memory. */
fan_blocks *fan_blocks_new(void);
fan_blocks *fan_blocks_hold(fan_blocks *b);
void fan_blocks_drop(fan_blocks *b); /* NULL is fine */
/* fan_blocks_storage: `n` bytes, aligned to 64, not zeroed: the smallest block that is free and not more than twice as
 * large, else a new one. It holds b. NULL: out of memory. */
fan_storage *fan_blocks_storage(fan_blocks *b, size_t n);
/* fan_blocks_have: whether so many bytes lie in one block that is in use. */
bool fan_blocks_have(fan_blocks *b, const void *data, size_t bytes);
size_t fan_blocks_live(fan_blocks *b);    /* how many are in use */
uint64_t fan_blocks_bytes(fan_blocks *b); /* of all */
/* fan_blocks_poison: fills all of them with FAN_CPU_POISON, but for those in use if `free_only`. */
void fan_blocks_poison(fan_blocks *b, bool free_only);

#endif
