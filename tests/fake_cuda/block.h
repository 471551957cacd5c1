/* block: the blocks of a kernel that has barriers, one after the other: the threads of each run by
 * turns, each until it comes to the barrier or to its end, in another order in each round. So a
 * barrier that is missing shows in what the block computes, and one that some threads pass by is
 * found. */
#ifndef FAN_FAKE_BLOCK_H
#define FAN_FAKE_BLOCK_H

#include <stdbool.h>
#include <stdint.h>

typedef void fan__block_thread(const void *args, int64_t thread);

typedef enum fan__block_end {
    FAN__BLOCK_FINE,
    FAN__BLOCK_NO_MEMORY,
    /* some threads have ended while others wait at the barrier: undefined on a GPU */
    FAN__BLOCK_DIVERGED
} fan__block_end;

/* fan__block_run: `run` for each of so many threads, FAN_K_BLOCK of them to a block. */
fan__block_end fan__block_run(fan__block_thread *run, const void *args, int64_t threads);
/* fan__block_meet: a thread of a block comes to its barrier; returns when all have. */
void fan__block_meet(void);
/* fan__block_forget_barriers: whether barriers do not wait: for tests of the effect. */
void fan__block_forget_barriers(bool on);

#endif
