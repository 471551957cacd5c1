/* A clock is a map from lane to count that remembers the largest: held against plain arrays. */
#include "base/clock.h"

#include "base/mem.h"
#include "check.h"

#define LANES 40

static uint64_t state = 7;

static uint32_t below(uint32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % n;
}

static void the_same(const fan_clock *c, const uint64_t *model)
{
    for (uint32_t i = 0; i < LANES + 3; i++)
        CHECK(fan_clock_get(c, i) == (i < LANES ? model[i] : 0));
}

static void random_steps_equal_the_model(void)
{
    fan_clock c[3];
    uint64_t model[3][LANES] = {{0}};
    int held = 0;
    int not_held = 0;
    for (int i = 0; i < 3; i++)
        fan_clock_init(&c[i]);
    for (int step = 0; step < 3000; step++) {
        uint32_t a = below(3);
        uint32_t b = below(3);
        uint32_t lane = below(step < 1000 ? FAN_CLOCK_INLINE : LANES);
        bool leq = true;
        switch (below(5)) {
        case 0:
        case 1:
            model[a][lane] = 0;
            if (below(4))
                model[a][lane] = below(1000);
            CHECK_INT(fan_clock_set(&c[a], lane, model[a][lane]), 0);
            break;
        case 2:
            for (int i = 0; i < LANES; i++) {
                if (model[b][i] > model[a][i])
                    model[a][i] = model[b][i];
            }
            CHECK_INT(fan_clock_join(&c[a], &c[b]), 0);
            break;
        case 3:
            memcpy(model[a], model[b], sizeof model[a]);
            CHECK_INT(fan_clock_copy(&c[a], &c[b]), 0);
            break;
        default:
            for (int i = 0; i < LANES; i++)
                leq = leq && model[a][i] <= model[b][i];
            CHECK(fan_clock_leq(&c[a], &c[b]) == leq);
            held += leq;
            not_held += !leq;
            break;
        }
        the_same(&c[a], model[a]);
    }
    CHECK(held > 50 && not_held > 50);
    for (int i = 0; i < 3; i++)
        fan_clock_fini(&c[i]);
}

static void out_of_memory_changes_nothing(void)
{
    fan_clock small, large;
    fan_clock_init(&small);
    fan_clock_init(&large);
    CHECK_INT(fan_clock_set(&small, 3, 5), 0);
    CHECK_INT(fan_clock_set(&large, 30, 9), 0);
    fan_mem_fail_at(0, -1);
    CHECK_INT(fan_clock_set(&small, FAN_CLOCK_INLINE, 1), -1);
    CHECK_INT(fan_clock_join(&small, &large), -1);
    CHECK_INT(fan_clock_copy(&small, &large), -1);
    CHECK_INT(fan_clock_set(&small, FAN_CLOCK_INLINE - 1, 2), 0); /* fits: needs no memory */
    CHECK_INT(fan_clock_set(&small, 1000, 0), 0);                 /* absent lanes count 0 already */
    fan_mem_fail_at(-1, 0);
    CHECK_INT(fan_clock_get(&small, 3), 5);
    CHECK_INT(fan_clock_get(&small, 30), 0);
    CHECK_INT(small.n, FAN_CLOCK_INLINE);
    CHECK_INT(fan_clock_set(&small, UINT32_MAX, 1), -1);
    fan_clock_fini(&small);
    fan_clock_fini(&large);
    fan_clock_fini(&large);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    random_steps_equal_the_model();
    out_of_memory_changes_nothing();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
