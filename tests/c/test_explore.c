/* The search over host orders: the reduction against the whole search, on random programs; replay,
 * samples, limit. */
#include "check.h"

#include "base/rng.h"
#include "base/mem.h"
#include "device/sim/explore.h"

#include <stdlib.h>

static uint64_t state = 1;

static uint64_t draw(void)
{
    return fan_rng(&state);
}

static int below(int n)
{
    return (int)(draw() % (uint64_t)n);
}

#define ACTORS 4
#define STEPS 6
#define OBJECTS 4

/* A step reads some objects into its actor's own state and then writes that to some; or takes or
 * gives a lock; or adds to a number, or decides by it; or asks. */
typedef enum {
    WORK,
    LOCK,
    UNLOCK,
    COUNT,
    WEIGH,
    ASK
} kind;

#define THE_NUMBER 200
#define LIMIT 3 /* below, nobody decides */

typedef struct step {
    kind kind;
    uint32_t reads, writes; /* masks of objects */
    int lock;
} step;

typedef struct program {
    int actors, steps[ACTORS];
    step all[ACTORS][STEPS];
} program;

typedef struct world {
    uint64_t object[OBJECTS], own[ACTORS];
    int at[ACTORS], holder[2];
    bool waits[ACTORS]; /* he tried to take a lock, which another held */
    uint64_t number;
    bool stuck;
} world;

static uint64_t mix(uint64_t a, uint64_t b)
{
    a ^= b + UINT64_C(0x9E3779B97F4A7C15) + (a << 6) + (a >> 2);
    return a * UINT64_C(0xD6E8FEB86659FD93);
}

static bool tries; /* who finds a lock taken has tried; else he is not chosen in the first place */

static program random_program(int actors, int steps)
{
    program p = {.actors = actors};
    for (int a = 0; a < actors; a++) {
        int held[2] = {0, 0};
        p.steps[a] = 1 + below(steps);
        for (int i = 0; i < p.steps[a]; i++) {
            step *s = &p.all[a][i];
            int m = below(2);
            if (below(3) == 0) {
                s->kind = held[m] ? UNLOCK : LOCK;
                s->lock = m;
                held[m] = !held[m];
                continue;
            }
            s->kind = WORK;
            if (below(5) == 0)
                s->kind = below(3) == 0 ? ASK : COUNT;
            if (below(3))
                s->reads = 1u << below(OBJECTS);
            if (below(2))
                s->writes = 1u << below(OBJECTS);
        }
    }
    return p;
}

static uint32_t enabled(const program *p, const world *w)
{
    uint32_t mask = 0;
    for (int a = 0; a < p->actors; a++) {
        if (w->at[a] == p->steps[a])
            continue;
        const step *s = &p->all[a][w->at[a]];
        bool may_try = tries && !w->waits[a];
        if (s->kind != LOCK || w->holder[s->lock] == 0 || may_try)
            mask |= 1u << a;
    }
    return mask;
}

static void act(const program *p, world *w, int a, fan_explore *x)
{
    const step *s = &p->all[a][w->at[a]];
    w->waits[a] = s->kind == LOCK && w->holder[s->lock] != 0;
    if (w->waits[a]) {
        fan_explore_access(x, 100 + (uint64_t)s->lock, FAN_SCHED_READ);
        return;
    }
    w->at[a]++;
    if (s->kind == LOCK || s->kind == UNLOCK) {
        w->holder[s->lock] = 0;
        if (s->kind == LOCK)
            w->holder[s->lock] = a + 1;
        fan_explore_access(x, 100 + (uint64_t)s->lock, true);
        return;
    }
    if (s->kind == COUNT) { /* who comes when the limit is passed knows it */
        fan_explore_access(x, THE_NUMBER, FAN_SCHED_COUNT);
        if (++w->number > LIMIT) {
            fan_explore_access(x, THE_NUMBER, FAN_SCHED_DECIDE);
            w->own[a] = mix(w->own[a], w->number);
        }
        return;
    }
    if (s->kind == ASK)
        w->own[a] = mix(w->own[a], (uint64_t)fan_explore_pick(x, 2));
    for (int o = 0; o < OBJECTS; o++) {
        if (s->reads >> o & 1) {
            w->own[a] = mix(w->own[a], w->object[o]);
            fan_explore_access(x, (uint64_t)o, false);
        }
    }
    w->own[a] = mix(w->own[a], (uint64_t)w->at[a]);
    for (int o = 0; o < OBJECTS; o++) {
        if (s->writes >> o & 1) {
            w->object[o] = mix(w->own[a], (uint64_t)(100 * a));
            fan_explore_access(x, (uint64_t)o, true);
        }
    }
}

static uint64_t outcome(const program *p, const world *w)
{
    uint64_t h = 0;
    h = mix(h, w->number);
    for (int i = 0; i < OBJECTS; i++)
        h = mix(h, w->object[i]);
    for (int a = 0; a < p->actors; a++)
        h = mix(mix(h, w->own[a]), (uint64_t)w->at[a]);
    return h;
}

/* run_once: one run; false where it was abandoned. */
static bool run_once(const program *p, fan_explore *x, uint64_t *result, bool *deadlock)
{
    world w;
    memset(&w, 0, sizeof w);
    uint32_t mask;
    while ((mask = enabled(p, &w)) != 0) {
        int a = fan_explore_choose(x, mask);
        if (a == FAN_EXPLORE_NONE)
            return false;
        CHECK(mask >> a & 1);
        act(p, &w, a, x);
    }
    *deadlock = false;
    for (int a = 0; a < p->actors; a++)
        *deadlock |= w.at[a] < p->steps[a];
    *result = outcome(p, &w);
    return true;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

#define MOST 2000000
static uint64_t found[2][MOST], again; /* searches that began anew */

/* search: the sorted set of outcomes; how many runs it took. */
static size_t search(const program *p, bool reduce, uint64_t *into, uint64_t *runs,
                     uint64_t *abandoned, bool *deadlock)
{
    fan_explore *x = fan_explore_new(reduce, 0);
    if (tries)
        fan_explore_prune(x);
    size_t n = 0;
    size_t distinct = 0;
    uint64_t anew = 0;
    *deadlock = false;
    while (fan_explore_begin(x)) {
        bool stuck = false;
        if (n < MOST && run_once(p, x, &into[n], &stuck))
            n++;
        *deadlock |= stuck;
        fan_explore_end(x);
        if (fan_explore_anew(x) != anew) {
            anew = fan_explore_anew(x);
            n = 0;
        }
    }
    again += anew;
    CHECK(n < MOST);
    CHECK(fan_explore_complete(x));
    CHECK(!fan_explore_strayed(x));
    CHECK_INT(fan_explore_runs(x), n);
    *runs = n;
    *abandoned = fan_explore_abandoned(x);
    fan_explore_free(x);
    qsort(into, n, sizeof *into, by_value);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || into[i] != into[i - 1])
            into[distinct++] = into[i];
    }
    return distinct;
}

static void the_reduction_loses_no_outcome(bool with_tries, int programs)
{
    tries = with_tries;
    uint64_t whole = 0;
    uint64_t reduced = 0;
    uint64_t gone = 0;
    uint64_t outcomes = 0;
    uint64_t deadlocks = 0;
    uint64_t free_of_them = 0;
    for (int round = 0; round < programs; round++) {
        int actors = 2 + below(3);
        static const int longest[] = {[2] = 6, [3] = 4, [4] = 3};
        program p = random_program(actors, longest[actors]);
        uint64_t runs, few, abandoned, none;
        bool stuck[2];
        size_t n = search(&p, false, found[0], &runs, &none, &stuck[0]);
        size_t m = search(&p, true, found[1], &few, &abandoned, &stuck[1]);
        CHECK_INT(none, 0);
        CHECK_INT(m, n);
        CHECK(m == n && memcmp(found[0], found[1], n * sizeof(uint64_t)) == 0);
        CHECK_INT(stuck[1], stuck[0]);
        CHECK(few <= runs);
        whole += runs;
        reduced += few;
        gone += abandoned;
        outcomes += n;
        deadlocks += stuck[0];
        free_of_them += !stuck[0];
    }
    printf("%d programs: %" PRIu64 " orders, %" PRIu64 " outcomes; by the reduction %" PRIu64
           " runs and %" PRIu64 " abandoned; deadlocks in %" PRIu64 ", none in %" PRIu64 "\n",
           programs, whole, outcomes, reduced, gone, deadlocks, free_of_them);
    printf("%" PRIu64 " searches began anew\n", again);
    CHECK(!tries || again > 20);
    tries = false;
    CHECK(reduced >= outcomes);
    CHECK(reduced * 3 < whole);
    CHECK(deadlocks > 20);
    CHECK(free_of_them > 20);
}

/* A footprint that says too little makes the reduction lose outcomes: the comparison above would
 * see it. */
static void a_footprint_that_lies_is_found(void)
{
    long lost = 0;
    for (int round = 0; round < 200; round++) {
        program p = random_program(2, 4);
        program lie = p;
        uint64_t runs, none;
        bool stuck;
        size_t n = search(&p, false, found[0], &runs, &none, &stuck);
        size_t m = 0;
        fan_explore *x = fan_explore_new(true, 0);
        while (fan_explore_begin(x)) {
            world w;
            uint32_t mask;
            memset(&w, 0, sizeof w);
            bool whole = true;
            while (whole && (mask = enabled(&p, &w)) != 0) {
                fan_explore *nobody = fan_explore_new(true, 0);
                int a = fan_explore_choose(x, mask);
                whole = a != FAN_EXPLORE_NONE;
                if (whole)
                    act(&lie, &w, a, nobody); /* touched is not told */
                fan_explore_free(nobody);
            }
            if (whole)
                found[1][m++] = outcome(&p, &w);
            fan_explore_end(x);
        }
        lost += m < n;
        fan_explore_free(x);
    }
    CHECK(lost > 50);
}

static void independent_actors_need_one_run(void)
{
    program p = {.actors = 4};
    for (int a = 0; a < 4; a++) {
        p.steps[a] = 3;
        for (int i = 0; i < 3; i++)
            p.all[a][i] = (step){.kind = WORK, .reads = 1u << a, .writes = 1u << a};
    }
    uint64_t runs, abandoned;
    bool stuck;
    CHECK_INT(search(&p, true, found[0], &runs, &abandoned, &stuck), 1);
    CHECK_INT(runs, 1);
    CHECK_INT(search(&p, false, found[0], &runs, &abandoned, &stuck), 1);
    CHECK_INT(runs, 369600); /* 12! / 3!^4 */
    CHECK(!stuck);
    CHECK_INT(search(&p, true, found[0], &runs, &abandoned, &stuck), 1);
    CHECK(abandoned > 0);
    tries = true; /* Persistent sets of one: nobody is tried in the place of another */
    CHECK_INT(search(&p, true, found[0], &runs, &abandoned, &stuck), 1);
    CHECK_INT(runs, 1);
    CHECK_INT(abandoned, 0);
    tries = false;
}

/* Behind the limit of a search; they are the same for the same seed. */
static void samples_go_on(fan_explore *x, const program *p)
{
    uint64_t seen[200];
    uint64_t distinct = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        bool stuck;
        fan_explore_sample(x, seed % 200);
        CHECK(fan_explore_begin(x));
        uint64_t r;
        CHECK(run_once(p, x, &r, &stuck));
        fan_explore_end(x);
        if (seed < 200) {
            seen[seed] = r;
        } else {
            CHECK(seen[seed - 200] == r);
        }
    }
    qsort(seen, 200, sizeof *seen, by_value);
    for (int i = 0; i < 200; i++)
        distinct += i == 0 || seen[i] != seen[i - 1];
    printf("200 samples: %" PRIu64 " outcomes\n", distinct);
    CHECK(distinct > 1);
    CHECK(!fan_explore_complete(x));
}

static void a_schedule_is_replayed_and_a_limit_kept(void)
{
    program p = random_program(3, 4);
    while (p.steps[0] + p.steps[1] + p.steps[2] < 10)
        p = random_program(3, 4);
    fan_explore *x = fan_explore_new(false, 100);
    fan_explore *y = fan_explore_new(true, 0);
    long replayed = 0;
    while (fan_explore_begin(x)) {
        uint64_t a, b;
        bool stuck;
        char one[64], two[64];
        CHECK(run_once(&p, x, &a, &stuck));
        fan_explore_end(x);
        fan_explore_schedule(x, one, sizeof one);
        CHECK_OK(fan_explore_replay(y, one));
        CHECK(fan_explore_begin(y));
        CHECK(run_once(&p, y, &b, &stuck));
        fan_explore_end(y);
        fan_explore_schedule(y, two, sizeof two);
        CHECK_STR(two, one);
        CHECK(a == b);
        replayed++;
    }
    CHECK_INT(replayed, 100);
    CHECK_INT(fan_explore_runs(x), 100);
    CHECK(!fan_explore_complete(x));
    CHECK(!fan_explore_strayed(y));
    CHECK(!fan_explore_begin(x));
    samples_go_on(x, &p);
    fan_explore_free(x);
    fan_explore_free(y);
}

static void samples_do_not_disturb_a_search(void)
{
    program q = random_program(3, 3);
    uint64_t runs, abandoned;
    bool stuck;
    search(&q, true, found[0], &runs, &abandoned, &stuck);
    fan_explore *z = fan_explore_new(true, 0);
    uint64_t r;
    for (uint64_t i = 0;; i++) {
        if (i % 3 == 1)
            fan_explore_sample(z, i);
        if (!fan_explore_begin(z))
            break;
        run_once(&q, z, &r, &stuck);
        fan_explore_end(z);
    }
    CHECK(fan_explore_complete(z));
    CHECK(fan_explore_runs(z) > runs);
    CHECK_INT(fan_explore_abandoned(z), abandoned);
    CHECK_INT(fan_explore_replay(z, "012!"), FAN_ERR_VALUE);
    CHECK_OK(fan_explore_replay(z, "vvvv")); /* nobody of that name can act */
    CHECK(fan_explore_begin(z));
    CHECK(run_once(&q, z, &r, &stuck));
    fan_explore_end(z);
    CHECK(fan_explore_strayed(z));
    fan_explore_free(z);
}

static void a_scenario_that_does_not_repeat_itself_is_noticed(void)
{
    fan_explore *x = fan_explore_new(true, 0);
    for (int run = 0; fan_explore_begin(x) && run < 10; run++) {
        int a = fan_explore_choose(x, run % 2 ? 1u : 3u);
        fan_explore_access(x, 1, true);
        if (a != FAN_EXPLORE_NONE &&
            fan_explore_choose(x, run % 2 ? 2u : 3u & ~(1u << a)) != FAN_EXPLORE_NONE)
            fan_explore_access(x, 1, true);
        fan_explore_end(x);
    }
    CHECK(fan_explore_strayed(x));
    CHECK(!fan_explore_complete(x));
    fan_explore_free(x);
}

static void memory_that_fails_ends_the_search(void)
{
    program p = random_program(3, 4);
    long failed = 0;
    long passed = 0;
    for (int64_t n = 0; n < 200; n++) {
        uint64_t r;
        bool stuck;
        fan_mem_fail_at(n, 1);
        fan_explore *x = fan_explore_new(true, 50);
        while (x && fan_explore_begin(x)) {
            run_once(&p, x, &r, &stuck);
            fan_explore_end(x);
        }
        fan_mem_fail_at(-1, 0);
        bool ok = x && fan_explore_status(x) == FAN_OK;
        passed += ok;
        failed += !ok;
        CHECK(ok || !x || !fan_explore_complete(x));
        fan_explore_free(x);
    }
    printf("failed allocations: %ld searches ended, %ld not\n", failed, passed);
    CHECK(failed > 5 && passed > 5);
}

int main(int argc, char **argv)
{
    int64_t live = fan_mem_get().live;
    int programs = check_is_full(argc, argv) ? 1500 : 120;
    the_reduction_loses_no_outcome(false, programs);
    the_reduction_loses_no_outcome(true, programs);
    a_footprint_that_lies_is_found();
    independent_actors_need_one_run();
    a_schedule_is_replayed_and_a_limit_kept();
    samples_do_not_disturb_a_search();
    a_scenario_that_does_not_repeat_itself_is_noticed();
    memory_that_fails_ends_the_search();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
