/* The threads of a block meet at its barriers: what a block adds up is right with them, wrong
 * without, and a thread that passes one by is found. */
#include "fake_cuda/block.c"

#include "check.h"

static int64_t shared_sum[FAN_K_BLOCK], results[3];
static int met;

/* Adds up the numbers of a block's threads as a tree, as statistics are. */
static void tree(const void *args, int64_t thread)
{
    int lane = (int)(thread % FAN_K_BLOCK);
    (void)args;
    shared_sum[lane] = thread;
    for (int half = FAN_K_BLOCK / 2; half; half /= 2) {
        fan__block_meet();
        if (lane < half)
            shared_sum[lane] += shared_sum[lane + half];
    }
    if (lane == 0)
        results[thread / FAN_K_BLOCK] = shared_sum[0];
}

static int64_t expected(int64_t b)
{
    return FAN_K_BLOCK * b * FAN_K_BLOCK + FAN_K_BLOCK * (FAN_K_BLOCK - 1) / 2;
}

static void a_tree_over_barriers_is_right_and_without_them_wrong(void)
{
    CHECK_INT(fan__block_run(tree, NULL, (int64_t)3 * FAN_K_BLOCK), FAN__BLOCK_FINE);
    for (int b = 0; b < 3; b++)
        CHECK_INT(results[b], expected(b));
    fan__block_forget_barriers(true);
    CHECK_INT(fan__block_run(tree, NULL, (int64_t)3 * FAN_K_BLOCK), FAN__BLOCK_FINE);
    fan__block_forget_barriers(false);
    for (int b = 0; b < 3; b++)
        CHECK(results[b] != expected(b));
}

static void passes_by(const void *args, int64_t thread)
{
    if (thread == *(const int64_t *)args)
        return;
    fan__block_meet();
    met++;
}

static void a_thread_that_passes_a_barrier_by_is_found(void)
{
    for (int64_t who = 0; who < FAN_K_BLOCK; who += 51) {
        CHECK_INT(fan__block_run(passes_by, &who, FAN_K_BLOCK), FAN__BLOCK_DIVERGED);
        CHECK_INT(met, 0);
    }
    CHECK_INT(fan__block_run(passes_by, &(int64_t){-1}, FAN_K_BLOCK), FAN__BLOCK_FINE);
    CHECK_INT(met, FAN_K_BLOCK);
}

int main(void)
{
    a_tree_over_barriers_is_right_and_without_them_wrong();
    a_thread_that_passes_a_barrier_by_is_found();
    return check_done();
}
