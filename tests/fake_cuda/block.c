#define _XOPEN_SOURCE 700 /* ucontext */
#include "fake_cuda/block.h"

#include "base/mem.h"
#include "device/kernels/args.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
/* A switch by ucontext makes a system call for the signal mask. Without a sanitizer only the first
 * switch to a thread uses it. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define QUICK false
#define STACK ((size_t)64 << 10)
#else
#define QUICK true
#define STACK ((size_t)16 << 10)
#endif

/* A place to switch to, and what the sanitizers need for it. */
typedef struct block_place {
    ucontext_t at;
    void *jump[5];
    bool begun; /* at least once: `jump` is where it goes on */
    void *fiber, *fake_stack;
    const void *bottom;
    size_t bytes;
} block_place;

typedef struct block {
    block_place back; /* the caller of the block */
    block_place lanes[FAN_K_BLOCK];
    bool done[FAN_K_BLOCK];
    int lane; /* the thread that runs */
    int64_t first;
    fan__block_thread *run;
    const void *args;
    char stacks[FAN_K_BLOCK][STACK];
} block;

static _Thread_local block *block_now;
static _Atomic(block *) kept; /* for the next run: pages that are there already */
static atomic_bool forgotten;

__attribute__((noinline, noreturn)) static void block_jump(block_place *to)
{
    __builtin_longjmp(to->jump, 1);
}

/* block_switch_quick: as block_switch. */
__attribute__((noinline)) static void block_switch_quick(block_place *from, block_place *to)
{
    from->begun = true;
    if (__builtin_setjmp(from->jump))
        return;
    if (to->begun)
        block_jump(to);
    to->begun = true;
    (void)setcontext(&to->at);
    /* no switch continues here; without this line clang removes the frame that `jump` returns to */
    abort();
}

/* block_switch: continues at `to`, and returns when another switch continues at `from`; with `last`
 * none does. */
static void block_switch(block_place *from, block_place *to, bool last)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? NULL : &from->fake_stack, to->bottom, to->bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to->fiber, 0);
#endif
    (void)last;
    if (QUICK) {
        block_switch_quick(from, to);
    } else {
        (void)swapcontext(&from->at, &to->at);
    }
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from->fake_stack, NULL, NULL);
#endif
}

/* block_begin: where a thread begins. */
static void block_begin(void)
{
    block *b = block_now;
    int lane = b->lane;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &b->back.bottom, &b->back.bytes);
#endif
    b->run(b->args, b->first + lane);
    b->done[lane] = true;
    block_switch(&b->lanes[lane], &b->back, true);
}

/* block_lane_init: a function of its own, because to the compiler getcontext may return twice. */
static void block_lane_init(block_place *l, void *stack)
{
    (void)getcontext(&l->at);
    l->at.uc_stack.ss_sp = stack;
    l->at.uc_stack.ss_size = STACK;
    l->at.uc_link = NULL;
    l->bottom = stack;
    l->bytes = STACK;
    l->fake_stack = NULL;
    l->begun = false;
#if defined(__SANITIZE_THREAD__)
    l->fiber = __tsan_create_fiber(0);
#endif
    makecontext(&l->at, block_begin, 0);
}

static void block_lanes_init(block *b)
{
    for (int i = 0; i < FAN_K_BLOCK; i++) {
        block_lane_init(&b->lanes[i], b->stacks[i]);
        b->done[i] = false;
    }
}

static void block_lanes_fini(block *b)
{
    (void)b;
#if defined(__SANITIZE_THREAD__)
    for (int i = 0; i < FAN_K_BLOCK; i++)
        __tsan_destroy_fiber(b->lanes[i].fiber);
#endif
}

/* block_rounds: whether all threads came to the same end. */
static bool block_rounds(block *b)
{
    int ended = 0;
    for (unsigned round = 0; ended == 0; round++) {
        for (unsigned n = 0; n < FAN_K_BLOCK; n++) {
            /* the first first, then the last first, then mixed */
            unsigned at = round % 2 ? FAN_K_BLOCK - 1 - n : n;
            b->lane = (int)(round < 2 ? at : (n * 101 + round * 17) % FAN_K_BLOCK);
            block_switch(&b->back, &b->lanes[b->lane], false);
            ended += b->done[b->lane];
        }
    }
    return ended == FAN_K_BLOCK;
}

fan__block_end fan__block_run(fan__block_thread *run, const void *args, int64_t threads)
{
    bool same = true;
    block *b = atomic_exchange(&kept, NULL);
    if (!b)
        b = fan_alloc(sizeof *b);
    if (!b)
        return FAN__BLOCK_NO_MEMORY;
    assert(threads % FAN_K_BLOCK == 0 && !block_now);
    b->run = run;
    b->args = args;
#if defined(__SANITIZE_THREAD__)
    b->back.fiber = __tsan_get_current_fiber();
#endif
    block_now = b;
    /* the last block first: no GPU promises another order */
    for (b->first = threads; same && b->first > 0;) {
        b->first -= FAN_K_BLOCK;
        block_lanes_init(b);
        same = block_rounds(b);
        block_lanes_fini(b);
    }
    block_now = NULL;
    fan_free(atomic_exchange(&kept, b));
    return same ? FAN__BLOCK_FINE : FAN__BLOCK_DIVERGED;
}

void fan__block_meet(void)
{
    block *b = block_now;
    assert(b); /* a kernel with barriers is run by fan__block_run */
    if (!atomic_load_explicit(&forgotten, memory_order_relaxed))
        block_switch(&b->lanes[b->lane], &b->back, false);
}

void fan__block_forget_barriers(bool on)
{
    atomic_store_explicit(&forgotten, on, memory_order_relaxed);
}
