/* A set of places beside a plain array of them. */
#include "engine/ready.h"

#include "base/mem.h"
#include "check.h"

#include <stdlib.h>

static uint64_t state = 11;

static uint64_t next(void)
{
    state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return state >> 33;
}

static size_t plain_first(const bool *in, size_t n, size_t from)
{
    while (from < n && !in[from])
        from++;
    return from < n ? from : FAN_READY_NONE;
}

/* sparse: few places are in it at a time, so that the search goes up and down. */
static void the_smallest_place_from_any_on_is_found(size_t n, bool sparse)
{
    fan_ready r;
    bool *in = calloc(n, sizeof *in);
    size_t found = 0;
    size_t none = 0;
    size_t there = 0;
    CHECK_INT(fan_ready_init(&r, n), 0);
    CHECK(fan_ready_first(&r, 0) == FAN_READY_NONE);
    for (int step = 0; step < 20000; step++) {
        size_t at = next() % n;
        size_t first = sparse ? fan_ready_first(&r, 0) : at;
        if (sparse && there > 2)
            at = first;
        if (in[at]) {
            fan_ready_remove(&r, at);
            there--;
        } else {
            fan_ready_add(&r, at);
            there++;
        }
        in[at] = !in[at];
        if (n > 5000 && step % 500 && !sparse)
            continue;
        size_t from = step % 3 ? next() % n : at + (step % 2);
        size_t got = fan_ready_first(&r, from);
        if (n <= 5000 || step % 50 == 0)
            CHECK(got == plain_first(in, n, from));
        found += got != FAN_READY_NONE;
        none += got == FAN_READY_NONE;
    }
    CHECK(found > 0 && (none > 0 || !sparse));
    fan_ready_fini(&r);
    CHECK(r.levels == 0 && fan_ready_first(&r, 0) == FAN_READY_NONE);
    free(in);
}

static void what_is_added_twice_is_there_once(void)
{
    fan_ready r;
    CHECK_INT(fan_ready_init(&r, 5000), 0);
    fan_ready_add(&r, 4097);
    fan_ready_add(&r, 4097);
    fan_ready_add(&r, 4098); /* its neighbour stays when it goes */
    fan_ready_remove(&r, 4097);
    CHECK(fan_ready_first(&r, 0) == 4098);
    fan_ready_remove(&r, 4098);
    CHECK(fan_ready_first(&r, 0) == FAN_READY_NONE);
    fan_ready_fini(&r);
}

static void without_memory_nothing_is_there(void)
{
    fan_ready r;
    fan_mem_fail_at(0, -1);
    CHECK_INT(fan_ready_init(&r, 100), -1);
    fan_mem_fail_at(-1, 0);
    fan_ready_fini(&r); /* it may be called all the same */
}

int main(void)
{
    static const size_t sizes[] = {1,    2,    63,   64,     65,     127,   128,
                                   4095, 4096, 4097, 262143, 262144, 262145};
    const int64_t before = fan_mem_get().live;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int sparse = 0; sparse < 2; sparse++)
            the_smallest_place_from_any_on_is_found(sizes[i], sparse);
    }
    what_is_added_twice_is_there_once();
    without_memory_nothing_is_there();
    CHECK_INT(fan_mem_get().live, before);
    return check_done();
}
