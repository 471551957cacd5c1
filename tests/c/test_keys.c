/* A set of keys beside a plain table, and sorting by keys beside counting. */
#include "base/keys.h"

#include "base/mem.h"
#include "check.h"

#include <stdlib.h>
#include <string.h>

static uint64_t state = 7;

static uint64_t next(void)
{
    state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return state >> 33;
}

/* range: so many keys are drawn from; far: they are multiples of it, so that many meet in one
 * cell. */
static void it_holds_what_was_put_and_not_removed(int64_t range, int64_t far)
{
    fan_keys *k = fan_calloc(sizeof *k);
    bool *in = calloc((size_t)range, sizeof *in);
    size_t n = 0;
    size_t met = 0;
    for (int step = 0; step < 20000; step++) {
        int64_t key = (int64_t)(next() % (uint64_t)range);
        if (in[key] && next() % 2) {
            fan_keys_remove(k, key * far);
            in[key] = false;
            n--;
        } else {
            CHECK_INT(fan_keys_put(k, key * far), !in[key]);
            met += in[key];
            n += !in[key];
            in[key] = true;
        }
        CHECK_INT(k->n, n);
    }
    for (int64_t key = 0; key < range; key++)
        CHECK(fan_keys_has(k, key * far) == in[key]);
    CHECK(met > 0 && n > 0);
    fan_keys_free(&k);
    CHECK(k == NULL);
    fan_keys_free(&k);
    free(in);
}

/* Until the set must grow, and there. */
static void without_memory_nothing_happens(int64_t from)
{
    fan_keys *k = fan_calloc(sizeof *k);
    size_t put = 0;
    size_t refused = 0;
    fan_mem_fail_at(0, -1);
    CHECK_INT(fan_keys_put(k, from), -1);
    CHECK(k->n == 0 && !fan_keys_has(k, from));
    fan_mem_fail_at(-1, 0);
    for (int64_t key = from; key < from + 5000; key++) {
        fan_mem_fail_at(0, -1);
        int done = fan_keys_put(k, key);
        fan_mem_fail_at(-1, 0);
        CHECK(done != 0 && fan_keys_has(k, key) == (done > 0));
        put += done > 0;
        refused += done < 0;
        if (done < 0)
            CHECK_INT(fan_keys_put(k, key), 1);
        CHECK_INT(fan_keys_put(k, key), 0);
        CHECK_INT(k->n, key - from + 1);
    }
    CHECK(put > 4000 && refused > 0);
    fan_keys_free(&k);
}

/* step: between neighbours; 1: the keys are dense. */
static void at_tells_who_is_the_nth(size_t n, int64_t step, bool memory)
{
    struct {
        char other[8];
        int64_t key;
    } *all = calloc(n, sizeof *all);
    uint32_t *at = calloc(n, sizeof *at);
    for (size_t i = 0; i < n; i++)
        all[i].key = 17 + (int64_t)i * step;
    for (size_t i = n; i-- > 1;) {
        size_t k = next() % (i + 1);
        int64_t key = all[i].key;
        all[i].key = all[k].key;
        all[k].key = key;
    }
    if (!memory)
        fan_mem_fail_at(0, -1);
    CHECK(fan_keys_order(&all[0].key, sizeof *all, n, at) == memory);
    fan_mem_fail_at(-1, 0);
    for (size_t i = 0; memory && i < n; i++)
        CHECK(all[at[i]].key == 17 + (int64_t)i * step);
    free(at);
    free(all);
}

int main(void)
{
    it_holds_what_was_put_and_not_removed(300, 1);
    it_holds_what_was_put_and_not_removed(3000, 1400); /* bits and cells */
    it_holds_what_was_put_and_not_removed(3000, INT64_C(1) << 32);
    without_memory_nothing_happens(0);
    without_memory_nothing_happens(INT64_C(1) << 40);
    for (size_t n = 1; n < 6000; n = 2 * n + 1) {
        at_tells_who_is_the_nth(n, 1, true);
        at_tells_who_is_the_nth(n, 6, true);
        at_tells_who_is_the_nth(n, 1001, true);
        at_tells_who_is_the_nth(n, INT64_MAX / 6001, true);
        at_tells_who_is_the_nth(n, 3, false);
        at_tells_who_is_the_nth(n, INT64_C(1) << 40, false);
    }
    return check_done();
}
