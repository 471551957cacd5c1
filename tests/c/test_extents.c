/* Lists of extents beside two loops over all pairs. */
#include "array/extents.h"

#include "base/rng.h"
#include "check.h"

enum {
    BYTES = 256,
    MOST = 12
};

static bool meet(const fan_extent_entry *x, fan_extent of)
{
    return fan_extents_may_overlap(x->at, of);
}

/* put: n arrays at random places of `memory`, some without elements, some backwards. */
static void put_random_array(fan_extents *e, fan_array **made, fan_storage *s, size_t n,
                             uint64_t *seed)
{
    for (size_t i = 0; i < n; i++) {
        int64_t shape = (int64_t)(fan_rng(seed) % 5);
        int64_t stride = (int64_t)(fan_rng(seed) % 9) - 4;
        char *at = (char *)s->data + 64 + fan_rng(seed) % 128;
        CHECK_OK(fan_array_view(s, at, FAN_DT_INT8, 1, &shape, &stride, true, &made[i], NULL));
        fan_extents_put(e, made[i], fan_rng(seed) % 4, fan_rng(seed) % 3 == 0);
    }
    fan_extents_sort(e);
}

static void a_list_finds_those_who_meet(const fan_extents *e, fan_extent of, long *met)
{
    size_t at = e->n;
    size_t expected = 0;
    for (size_t i = 0; i < e->n; i++)
        expected += meet(&e->all[i], of);
    for (const fan_extent_entry *x, *before = NULL; (x = fan_extents_next(e, of, &at)) != NULL;
         before = x) {
        CHECK(meet(x, of) && (!before || x < before));
        CHECK(expected-- > 0);
        ++*met;
    }
    CHECK_INT(expected, 0);
}

static void pairs_and_independence(const fan_extents *e, long *pairs, long *independent)
{
    bool any = false;
    bool apart = true;
    for (size_t i = 0; i < e->n; i++) {
        for (size_t j = 0; j < i; j++) {
            const fan_extent_entry *x = &e->all[i];
            const fan_extent_entry *y = &e->all[j];
            any |= meet(x, y->at);
            bool may_meet = x->owner == y->owner || !(x->flag || y->flag);
            apart &= may_meet || !meet(x, y->at);
        }
    }
    const fan_extent_entry *one = NULL;
    const fan_extent_entry *two = NULL;
    CHECK(fan_extents_any_pair(e, &one, &two) == any);
    CHECK(!any || (one != two && meet(one, two->at)));
    CHECK(fan_extents_independent(e) == apart);
    pairs[any]++;
    independent[apart]++;
}

/* flats_meet: a run of memory and some bytes share one; an empty run shares none. */
static bool flats_meet(const fan_flat *run, const char *data, uint64_t bytes)
{
    if (run->bytes == 0 || bytes == 0)
        return false;
    return run->data < data + bytes && data < run->data + run->bytes;
}

/* flats: runs of memory, some empty, few or as many as are sorted a digit at a time. */
static void flats(uint64_t *seed, long *apart, long *met)
{
    static char room[1 << 14];
    enum {
        MANY = 120
    };
    fan_flat all[MANY];
    size_t n = fan_rng(seed) % (fan_rng(seed) % 2 ? 6 : MANY);
    size_t near = 0;
    bool expected = true;
    for (size_t i = 0; i < n; i++) {
        all[i] =
            (fan_flat){room + fan_rng(seed) % sizeof room, fan_rng(seed) % (n > 5 ? 8 : 2000), i};
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++)
            expected &= !flats_meet(&all[i], all[j].data, all[j].bytes);
    }
    CHECK(fan_flats_disjoint(all, n) == expected);
    apart[expected]++;
    for (int ask = 0; expected && ask < 8; ask++) {
        const char *data = room + fan_rng(seed) % sizeof room;
        uint64_t bytes = 1 + fan_rng(seed) % 300;
        const fan_flat *last = NULL;
        const fan_flat *found = fan_flats_last_met(all, n, data, bytes, &near);
        for (size_t i = 0; i < n; i++) {
            if (flats_meet(&all[i], data, bytes) && (!last || all[i].data > last->data))
                last = &all[i];
        }
        CHECK(found == last);
        met[found != NULL]++;
    }
}

/* long_lists: lists that take turns, and some without any order, are sorted, and nothing is
 * lost. */
static void long_lists(uint64_t *seed, long *turns)
{
    enum {
        LONG = 400
    };
    static fan_extent_entry all[LONG];
    static bool seen[LONG];
    size_t n = fan_rng(seed) % LONG;
    size_t lists = 1 + fan_rng(seed) % 48;
    fan_extents e = {all, n};
    uint64_t order = fan_rng(seed) % 4;
    uint64_t highest = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t at =
            order ? (i % lists * 7919 % lists) * 100000 + i / lists * 64 : fan_rng(seed) % 5000;
        all[i] = (fan_extent_entry){.at = {at, at + fan_rng(seed) % 99}, .owner = i};
        seen[i] = false;
    }
    fan_extents_sort(&e);
    for (size_t i = 0; i < n; i++) {
        if (all[i].at.last > highest)
            highest = all[i].at.last;
        CHECK(all[i].highest == highest && !seen[all[i].owner]);
        if (i > 0)
            CHECK(all[i - 1].at.first <= all[i].at.first);
        seen[all[i].owner] = true;
    }
    turns[order ? (lists > 32) + 1 : 0]++;
}

int main(void)
{
    static char memory[BYTES];
    uint64_t seed = 20261122;
    long met = 0;
    long pairs[2] = {0};
    long independent[2] = {0};
    long empty = 0;
    fan_storage *s = fan_storage_wrap(memory, sizeof memory, NULL, NULL);
    for (int turn = 0; turn < 20000; turn++) {
        fan_extent_entry room[MOST];
        fan_array *made[MOST], *another[1];
        fan_extents e = {room, 0};
        fan_extents single = {room + MOST - 1, 0};
        size_t n = fan_rng(&seed) % (MOST - 1);
        put_random_array(&e, made, s, n, &seed);
        put_random_array(&single, another, s, 1, &seed);
        fan_extent of = fan_extent_of(another[0]);
        empty += fan_extent_empty(of);
        CHECK(fan_extent_empty(of) == (another[0]->size == 0));
        a_list_finds_those_who_meet(&e, of, &met);
        pairs_and_independence(&e, pairs, independent);
        fan_array_drop(another[0]);
        for (size_t i = 0; i < n; i++)
            fan_array_drop(made[i]);
    }
    fan_storage_drop(s);
    long flats_disjoint[2] = {0};
    long flats_met[2] = {0};
    for (int turn = 0; turn < 5000; turn++)
        flats(&seed, flats_disjoint, flats_met);
    for (int k = 0; k < 2; k++)
        CHECK(flats_disjoint[k] > 500 && flats_met[k] > 500);
    long turns[3] = {0};
    for (int turn = 0; turn < 3000; turn++)
        long_lists(&seed, turns);
    CHECK(turns[0] > 300 && turns[1] > 300 && turns[2] > 300);
    printf("met %ld, lists with a pair %ld of %ld, independent %ld of %ld, empty %ld\n", met,
           pairs[1], pairs[0] + pairs[1], independent[1], independent[0] + independent[1], empty);
    CHECK(met > 1000);
    for (int k = 0; k < 2; k++)
        CHECK(pairs[k] > 1000 && independent[k] > 1000);
    CHECK(empty > 1000);
    return check_done();
}
