/* The happens-before checker: its verdicts by example, against a checker that keeps everything,
 * byte by byte, and its speed. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include "base/rng.h"
#include "base/mem.h"
#include "device/sim/race_check.h"

#include <stdlib.h>
#include <time.h>

static uint64_t state = 1;

static uint64_t draw(void)
{
    return fan_rng(&state);
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)(draw() % n);
}

static uint32_t lane_new(fan_race_check *o)
{
    uint32_t lane = UINT32_MAX;
    CHECK_OK(fan_race_check_lane(o, 7, &lane, NULL));
    return lane;
}

static fan_status access_at(fan_race_check *o, uint32_t lane, uint32_t host, const char *name,
                            uintptr_t lo, uintptr_t hi, bool write, fan_race *race)
{
    uint64_t op;
    fan_status status = fan_race_check_begin(o, lane, host, name, "x.py:1", &op, NULL);
    if (status != FAN_OK)
        return status;
    return fan_race_check_range(o, op, lo, hi, write, race);
}

static fan_status verdict_of(bool races)
{
    return races ? FAN_ERR_RACE : FAN_OK;
}

#define READ(lane, lo, hi) access_at(o, lane, h, "read", lo, hi, false, &race)
#define WRITE(lane, lo, hi) access_at(o, lane, h, "write", lo, hi, true, &race)

static void an_event_orders_two_streams(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_race race;
    fan_clock e;
    uint32_t h = lane_new(o);
    uint32_t a = lane_new(o);
    uint32_t b = lane_new(o);
    fan_clock_init(&e);
    CHECK_OK(WRITE(a, 100, 200));
    CHECK_OK(WRITE(a, 100, 200)); /* one stream is a queue */
    CHECK_OK(READ(b, 200, 300));  /* other bytes */
    CHECK_INT(READ(b, 199, 201), FAN_ERR_RACE);
    CHECK_INT(race.lo, 199);
    CHECK_INT(race.hi, 200);
    CHECK(race.first_writes && !race.second_writes);
    CHECK(!race.release && !race.released);
    CHECK_INT(race.first.lane, a);
    CHECK_INT(race.second.lane, b);
    CHECK_STR(race.first.name, "write");
    CHECK_STR(race.first.call_site, "x.py:1");
    CHECK_OK(fan_race_check_record(o, a, h, &e));
    CHECK_OK(WRITE(a, 300, 400)); /* after the record: not in it */
    CHECK_OK(fan_race_check_wait(o, b, h, &e));
    CHECK_OK(READ(b, 100, 200));
    CHECK_OK(READ(b, 100, 200));
    CHECK_INT(READ(b, 350, 351), FAN_ERR_RACE);
    /* b's reads come after the event, before nothing of a's */
    CHECK_INT(WRITE(a, 150, 160), FAN_ERR_RACE);
    CHECK(!race.first_writes && race.second_writes);
    fan_clock_fini(&e);
    fan_race_check_free(o);
}

static void reads_do_not_race(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_race race;
    fan_clock e;
    fan_clock_init(&e);
    uint32_t h = lane_new(o);
    uint32_t a = lane_new(o);
    uint32_t b = lane_new(o);
    uint32_t c = lane_new(o);
    CHECK_OK(READ(a, 0, 100));
    CHECK_OK(READ(b, 50, 150));
    CHECK_OK(READ(c, 0, 150));
    CHECK_INT(WRITE(c, 99, 100), FAN_ERR_RACE);
    fan_race_check_reset(o);
    CHECK_OK(READ(a, 0, 100));
    CHECK_OK(READ(b, 50, 150));
    CHECK_OK(fan_race_check_record(o, a, h, &e));
    CHECK_OK(fan_race_check_wait(o, c, h, &e));
    CHECK_OK(WRITE(c, 0, 50));
    CHECK_INT(WRITE(c, 49, 51), FAN_ERR_RACE);
    CHECK_INT(race.first.lane, b);
    CHECK_INT(race.lo, 50);
    fan_clock_fini(&e);
    fan_race_check_free(o);
}

static void the_host_knows_what_it_waited_for(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_race race;
    uint32_t h = lane_new(o);
    uint32_t g = lane_new(o);
    uint32_t a = lane_new(o);
    uint32_t b = lane_new(o);
    CHECK_OK(WRITE(a, 0, 8));
    CHECK_INT(access_at(o, h, h, "host", 0, 8, false, &race), FAN_ERR_RACE);
    CHECK_OK(fan_race_check_sync(o, h, fan_race_check_clock(o, a)));
    CHECK_OK(access_at(o, h, h, "host", 0, 8, false, &race));
    /* h's own read: g and a know nothing of it */
    CHECK_INT(access_at(o, a, g, "other", 0, 8, true, &race), FAN_ERR_RACE);
    CHECK_INT(race.first.lane, h);
    fan_race_check_reset(o);
    CHECK_OK(WRITE(a, 0, 8));
    CHECK_OK(fan_race_check_sync(o, h, fan_race_check_clock(o, a)));
    CHECK_OK(READ(b, 0, 8)); /* queued by who knows */
    /* .. until h hands over by a lock. */
    fan_race_check_reset(o);
    CHECK_OK(access_at(o, h, h, "host", 0, 8, true, &race));
    CHECK_OK(fan_race_check_locked(o, g, 7));
    CHECK_OK(fan_race_check_unlocking(o, h, 7));
    CHECK_OK(fan_race_check_locked(o, g, 8));
    CHECK_INT(access_at(o, g, g, "other", 0, 8, true, &race), FAN_ERR_RACE);
    fan_race_check_reset(o);
    CHECK_OK(access_at(o, h, h, "host", 0, 8, true, &race));
    CHECK_OK(fan_race_check_unlocking(o, h, 7));
    CHECK_OK(fan_race_check_locked(o, g, 7));
    CHECK_OK(access_at(o, g, g, "other", 0, 8, true, &race));
    for (uint64_t id = 100; id < 1100; id++)
        CHECK_OK(fan_race_check_unlocking(o, h, id));
    CHECK_OK(fan_race_check_locked(o, g, 7));
    fan_race_check_free(o);
}

static void a_release_comes_after_all_uses(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_race race;
    uint32_t h = lane_new(o);
    uint32_t a = lane_new(o);
    uint32_t b = lane_new(o);
    uint32_t both[2] = {a, b};
    CHECK_OK(fan_race_check_host(o, h));
    CHECK_OK(WRITE(a, 0, 64));
    CHECK_OK(fan_race_check_release(o, h, &a, 1, 0, 64, "free.py:1", &race));
    CHECK_INT(READ(a, 8, 16), FAN_ERR_RACE); /* whoever touches it later meets the release */
    CHECK(race.released && !race.release);
    CHECK_STR(race.first.call_site, "free.py:1");
    CHECK_INT(fan_race_check_release(o, h, &a, 1, 0, 64, "", &race), FAN_ERR_RACE);
    CHECK(race.released && race.release);
    fan_race_check_forget(o, 0, 64);
    CHECK_INT(fan_race_check_ranges(o), 0);
    CHECK_OK(READ(b, 0, 64)); /* another's now */
    CHECK_OK(READ(a, 0, 64));
    CHECK_INT(fan_race_check_release(o, h, &a, 1, 0, 64, "", &race), FAN_ERR_RACE);
    CHECK(race.release && !race.released && !race.first_writes);
    CHECK_INT(race.first.lane, b);
    fan_race_check_reset(o);
    CHECK_OK(READ(b, 0, 64));
    CHECK_OK(READ(a, 0, 64));
    CHECK_OK(access_at(o, h, h, "host", 0, 64, false, &race)); /* it was over when it returned */
    CHECK_OK(fan_race_check_release(o, h, both, 2, 0, 64, "", &race));
    fan_race_check_reset(o);
    CHECK_OK(READ(b, 0, 64));
    CHECK_OK(fan_race_check_sync(o, h, fan_race_check_clock(o, b)));
    CHECK_OK(fan_race_check_release(o, h, NULL, 0, 0, 64, "", &race)); /* the host had waited */
    fan_race_check_forget(o, 16, 32);
    CHECK_OK(WRITE(a, 16, 32));
    CHECK_INT(WRITE(a, 15, 16), FAN_ERR_RACE);
    fan_race_check_free(o);
}

/* ---- a checker that keeps everything ---- */

#define BYTES 96
#define LANES 6
#define OPS 64

typedef struct kept {
    uint32_t lane;
    uint64_t count;
    bool write;
    bool bytes[BYTES];
} kept;

typedef struct naive {
    uint64_t v[LANES][LANES];
    kept all[2 * OPS];
    int n;
} naive;

static void naive_join(uint64_t *a, const uint64_t *b)
{
    for (int i = 0; i < LANES; i++) {
        if (a[i] < b[i])
            a[i] = b[i];
    }
}

static bool naive_access(naive *x, uint32_t lane, const bool *bytes, bool write)
{
    bool raced = false;
    for (int i = 0; i < x->n; i++) {
        const kept *was = &x->all[i];
        bool ordered = x->v[lane][was->lane] >= was->count;
        if (ordered || !(write || was->write))
            continue;
        for (int b = 0; b < BYTES; b++)
            raced |= bytes[b] && was->bytes[b];
    }
    kept *k = &x->all[x->n++];
    k->lane = lane;
    k->count = x->v[lane][lane];
    k->write = write;
    memcpy(k->bytes, bytes, BYTES);
    return raced;
}

/* A random view inside memory[BYTES], and the bytes it covers. */
static fan_array *random_view(fan_storage *st, bool *bytes)
{
    int64_t shape[3], strides[3];
    memset(bytes, 0, BYTES);
    for (;;) {
        int ndim = (int)below(4);
        fan_dtype dtype = below(2) ? FAN_DT_INT8 : FAN_DT_INT32;
        for (int i = 0; i < ndim; i++) {
            shape[i] = below(5);
            strides[i] = (int64_t)below(25) - 12;
        }
        int64_t at = below(BYTES);
        fan_array *a;
        if (fan_array_view(st, (char *)st->data + at, dtype, ndim, shape, strides, true, &a,
                           NULL) != FAN_OK)
            continue;
        for (int64_t i = 0; i < a->size; i++) {
            int64_t rest = i;
            int64_t offset = a->data - (char *)st->data;
            for (int d = ndim; d-- > 0; rest /= shape[d])
                offset += rest % shape[d] * a->strides[d];
            for (size_t k = 0; k < fan_dtype_size(dtype); k++)
                bytes[(size_t)offset + k] = true;
        }
        return a;
    }
}

static void a_view_is_its_bytes_and_no_others(void)
{
    static char memory[BYTES];
    fan_storage *st = fan_storage_wrap(memory, BYTES, NULL, NULL);
    long inside = 0;
    long outside = 0;
    for (int round = 0; round < 4000; round++) {
        bool bytes[BYTES];
        fan_array *a = random_view(st, bytes);
        fan_race_check *o = fan_race_check_new();
        uint32_t h = lane_new(o);
        uint32_t s = lane_new(o);
        uint32_t t = lane_new(o);
        uint64_t op;
        CHECK_OK(fan_race_check_begin(o, s, h, "w", "", &op, NULL));
        CHECK_OK(fan_race_check_access(o, op, a, true, NULL));
        for (size_t b = 0; b < BYTES; b++) {
            uintptr_t x = (uintptr_t)memory + b;
            fan_status status = access_at(o, t, h, "probe", x, x + 1, false, NULL);
            CHECK_INT(status, verdict_of(bytes[b]));
            inside += bytes[b];
            outside += !bytes[b];
        }
        fan_array_drop(a);
        fan_race_check_free(o);
    }
    fan_storage_drop(st);
    printf("bytes of views: %ld inside, %ld outside\n", inside, outside);
    CHECK(inside > 10000 && outside > 10000);
}

/* The checker under test beside one that keeps everything. */
typedef struct both {
    fan_race_check *o;
    naive x;
    fan_clock events[4];
    uint64_t naive_events[4][LANES];
    fan_storage *st;
    long released, refused;
} both;

static fan_race_check *checker_new(void)
{
    fan_race_check *o = fan_race_check_new();
    for (uint32_t i = 0; i < LANES; i++)
        lane_new(o);
    CHECK_OK(fan_race_check_host(o, 0));
    CHECK_OK(fan_race_check_host(o, 1));
    return o;
}

/* A release of some bytes, which two lanes may have used: is it a race? */
static bool release_some(both *p, uint32_t host, uint32_t lane)
{
    uint32_t lanes[2] = {lane, 2 + below(LANES - 2)};
    uint64_t gate[LANES];
    bool bad = false;
    uint32_t lo = below(BYTES);
    uint32_t hi = lo + 1 + below(BYTES - lo);
    uintptr_t memory = (uintptr_t)p->st->data;
    memcpy(gate, p->x.v[host], sizeof gate);
    naive_join(gate, p->x.v[lanes[0]]);
    naive_join(gate, p->x.v[lanes[1]]);
    for (int i = 0; i < p->x.n; i++) {
        const kept *was = &p->x.all[i];
        bool late = was->lane >= 2 && gate[was->lane] < was->count;
        for (uint32_t b = lo; b < hi; b++)
            bad |= late && was->bytes[b];
    }
    CHECK_INT(fan_race_check_release(p->o, host, lanes, 2, memory + lo, memory + hi, "", NULL),
              verdict_of(bad));
    p->released++;
    return bad;
}

/* An operation that touches two views: is it a race? Some find no memory, and then nothing
 * happened. */
static bool operate(both *p, uint32_t host, uint32_t lane)
{
    bool bytes[BYTES], more[BYTES];
    bool race = false;
    fan_array *a = random_view(p->st, bytes);
    bool write = below(3) == 0;
    bool on_host = below(6) == 0;
    fan_array *b = random_view(p->st, more);
    uint32_t on = on_host ? host : lane;
    uint64_t op;
    fan_race_check_plan(p->o, a);
    fan_race_check_plan(p->o, b);
    bool failing = below(3) == 0;
    if (failing)
        fan_mem_fail_at(below(2), 2);
    fan_status status = fan_race_check_begin(p->o, on, host, "op", "", &op, NULL);
    if (status == FAN_OK) {
        fan_status first = fan_race_check_access(p->o, op, a, write, NULL);
        fan_status second = fan_race_check_access(p->o, op, b, false, NULL);
        fan_mem_fail_at(-1, 0);
        CHECK(first != FAN_ERR_NOMEM && second != FAN_ERR_NOMEM);
        naive_join(p->x.v[on], p->x.v[host]);
        p->x.v[on][on]++;
        bool r1 = naive_access(&p->x, on, bytes, write);
        bool r2 = naive_access(&p->x, on, more, false);
        CHECK_INT(first, verdict_of(r1));
        if (!r1)
            CHECK_INT(second, verdict_of(r2));
        race = r1 || r2;
    } else {
        CHECK_INT(status, FAN_ERR_NOMEM);
        p->refused++;
    }
    fan_mem_fail_at(-1, 0);
    fan_array_drop(a);
    fan_array_drop(b);
    return race;
}

/* A random program up to its first race; was there one? */
static bool run_both(both *p)
{
    for (int step = 0; step < OPS; step++) {
        uint32_t host = below(2);
        uint32_t lane = 2 + below(LANES - 2);
        uint32_t e = below(4);
        switch (below(8)) {
        case 0:
            CHECK_OK(fan_race_check_record(p->o, lane, host, &p->events[e]));
            naive_join(p->x.v[lane], p->x.v[host]);
            memcpy(p->naive_events[e], p->x.v[lane], sizeof p->x.v[lane]);
            break;
        case 1:
        case 2:
        case 3:
            CHECK_OK(fan_race_check_wait(p->o, lane, host, &p->events[e]));
            naive_join(p->x.v[lane], p->x.v[host]);
            naive_join(p->x.v[lane], p->naive_events[e]);
            break;
        case 4:
            CHECK_OK(fan_race_check_sync(p->o, host, &p->events[e]));
            naive_join(p->x.v[host], p->naive_events[e]);
            break;
        case 5: /* a release is judged, and ends the program: what comes later would always race */
            if (below(4) == 0)
                return release_some(p, host, lane);
            break;
        default:
            if (operate(p, host, lane))
                return true;
        }
    }
    return false;
}

/* The same verdict at every step as a checker that keeps everything. */
static void it_says_what_a_checker_says_that_keeps_everything(void)
{
    static char memory[BYTES];
    static both p;
    long raced = 0;
    long clean = 0;
    p.st = fan_storage_wrap(memory, BYTES, NULL, NULL);
    p.o = checker_new();
    for (int round = 0; round < 60000; round++) {
        memset(&p.x, 0, sizeof p.x);
        memset(p.naive_events, 0, sizeof p.naive_events);
        for (int i = 0; i < 4; i++)
            fan_clock_init(&p.events[i]);
        fan_race_check_reset(p.o);
        if (round % 16 == 0) { /* a new one has no room yet: its allocations can fail */
            fan_race_check_free(p.o);
            p.o = checker_new();
        }
        bool was_race = run_both(&p);
        raced += was_race;
        clean += !was_race;
        for (int i = 0; i < 4; i++)
            fan_clock_fini(&p.events[i]);
    }
    fan_race_check_free(p.o);
    fan_storage_drop(p.st);
    printf("random programs: %ld with a race, %ld without, %ld releases judged, %ld operations "
           "refused for want of "
           "memory\n",
           raced, clean, p.released, p.refused);
    CHECK(raced > 1000 && clean > 1000);
    CHECK(p.released > 1000 && p.refused > 100);
}

/* Many ranges: chunks split and empty again, in every order. */
static void many_ranges_are_kept(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_race race;
    uint32_t h = lane_new(o);
    uint32_t a = lane_new(o);
    uint32_t b = lane_new(o);
    enum {
        N = 5000
    };
    static uint8_t owner[N];
    for (int round = 0; round < 40000; round++) {
        uint32_t at = below(N);
        uint32_t n = below(16) ? 1 + below(3) : 1 + below(400);
        if (at + n > N)
            n = N - at;
        if (below(3) == 0) {
            fan_race_check_forget(o, 10 * at, 10 * (at + n));
            memset(owner + at, 0, n);
            continue;
        }
        uint8_t lane = (uint8_t)(a + below(2));
        bool meets = false;
        for (uint32_t i = at; i < at + n; i++)
            meets |= owner[i] && owner[i] != lane;
        CHECK_INT(WRITE(lane, 10 * at, 10 * (at + n)), verdict_of(meets));
        memset(owner + at, lane, n);
    }
    for (uint32_t i = 0; i < N; i++) {
        for (uint8_t lane = (uint8_t)a; lane <= b; lane++) {
            bool meets = owner[i] && owner[i] != lane;
            CHECK_INT(access_at(o, lane, h, "probe", 10 * i + 3, 10 * i + 4, false, &race),
                      verdict_of(meets));
        }
    }
    for (uint32_t i = N; i-- > 0;) /* backwards, so that chunks empty from behind */
        fan_race_check_forget(o, 10 * i, 10 * i + 10);
    CHECK_INT(fan_race_check_ranges(o), 0);
    fan_race_check_free(o);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* this machine may have other things to do */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What a proof does: 8 lanes, 16 blocks, operations of two reads and a write, with records and
 * waits; a reset now and then. No allocation. */
static void a_step_is_fast_and_allocates_nothing(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_clock e;
    fan_clock_init(&e);
    for (int i = 0; i < 8; i++)
        lane_new(o);
    int64_t before = 0;
    double t = 0;
    enum {
        STEPS = 400000
    };
    for (int step = -20000; step < STEPS; step++) {
        if (step == 0) {
            before = fan_mem_get().total;
            t = now();
        }
        if (step % 32 == 0)
            fan_race_check_reset(o);
        uint32_t s = 1 + (uint32_t)(step & 7) % 7;
        uint32_t w = 1 + (uint32_t)((step >> 3) & 7) % 7;
        uintptr_t x = 4096 + (uintptr_t)(step & 15) * 256;
        uintptr_t y = 4096 + (uintptr_t)((step >> 2) & 15) * 256;
        uint64_t op;
        fan_race_check_record(o, w, 0, &e);
        fan_race_check_wait(o, s, 0, &e);
        fan_race_check_begin(o, s, 0, "sum", "", &op, NULL);
        fan_race_check_range(o, op, x, x + 256, false, NULL);
        fan_race_check_range(o, op, y, y + 256, false, NULL);
        fan_race_check_range(o, op, y, y + 256, true, NULL);
    }
    t = now() - t;
    printf("%.0f ns for a record, a wait and an operation of three accesses; %.0f ns by access\n",
           1e9 * t / STEPS, 1e9 * t / STEPS / 3);
    CHECK_INT(fan_mem_get().total - before, 0);
    fan_clock_fini(&e);
    fan_race_check_free(o);
}

static void a_lane_is_used_again_where_that_adds_no_order(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_race race;
    uint32_t h = lane_new(o);
    uint32_t a = lane_new(o);
    uint32_t b = lane_new(o);
    uint32_t again = UINT32_MAX;
    CHECK_OK(fan_race_check_host(o, h));
    CHECK_OK(WRITE(a, 0, 8));
    fan_race_check_leave(o, a);
    /* it is in the history, and h does not know it */
    CHECK(!fan_race_check_reuse(o, fan_race_check_clock(o, h), 9, &again));
    CHECK_OK(fan_race_check_sync(o, b, fan_race_check_clock(o, h)));
    fan_clock seen; /* of one who knows */
    fan_clock_init(&seen);
    CHECK_INT(fan_clock_set(&seen, a, 1), 0);
    CHECK(fan_race_check_reuse(o, &seen, 9, &again));
    CHECK_INT(again, a);
    CHECK_INT(READ(b, 0, 8), FAN_ERR_RACE); /* whom the access belonged to is known still */
    CHECK_INT(race.first.owner, 7);
    CHECK_OK(READ(again, 0, 8)); /* it knows from its beginning */
    CHECK_OK(WRITE(again, 8, 16));
    CHECK_INT(READ(b, 8, 16), FAN_ERR_RACE);
    CHECK_INT(race.first.owner, 9);
    fan_race_check_leave(o, again);
    CHECK(!fan_race_check_reuse(o, fan_race_check_clock(o, h), 9, &again));
    fan_race_check_forget(o, 0, 16);
    CHECK(
        fan_race_check_reuse(o, fan_race_check_clock(o, h), 9, &again)); /* nothing of it is left */
    CHECK_INT(fan_race_check_lanes(o), 3);
    /* Whoever knew the old one does not know the new one. */
    CHECK_OK(WRITE(again, 0, 8));
    CHECK_OK(fan_race_check_sync(o, b, &seen));
    CHECK_INT(READ(b, 0, 8), FAN_ERR_RACE);
    fan_clock_fini(&seen);
    fan_race_check_free(o);
}

static void what_somebody_keeps_is_not_asked_for_by_a_release(void)
{
    fan_race_check *o = fan_race_check_new();
    fan_race race;
    uint64_t op;
    uint32_t h = lane_new(o);
    uint32_t a = lane_new(o);
    CHECK_OK(fan_race_check_begin(o, a, h, "graph", "", &op, NULL));
    fan_race_check_over(o, op, false);
    CHECK_OK(fan_race_check_range(o, op, 0, 8, true, &race));
    CHECK_OK(fan_race_check_let_go(o, h, NULL, 0, 0, 8, "", &race));
    CHECK_OK(READ(a, 0, 8)); /* no mark is left */
    CHECK_INT(fan_race_check_let_go(o, h, NULL, 0, 0, 8, "", &race), FAN_ERR_RACE);
    CHECK(race.release);
    fan_race_check_free(o);
}

static void lanes_fail_whole(void)
{
    for (int64_t n = 0; n < 40; n++) {
        fan_mem_fail_at(n, 1);
        fan_race_check *o = fan_race_check_new();
        for (int i = 0; o && i < 40; i++) {
            uint32_t lane;
            fan_status status = fan_race_check_lane(o, 7, &lane, NULL);
            CHECK(status == FAN_OK || status == FAN_ERR_NOMEM);
        }
        fan_mem_fail_at(-1, 0);
        fan_race_check_free(o);
    }
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    an_event_orders_two_streams();
    reads_do_not_race();
    the_host_knows_what_it_waited_for();
    a_release_comes_after_all_uses();
    a_view_is_its_bytes_and_no_others();
    it_says_what_a_checker_says_that_keeps_everything();
    many_ranges_are_kept();
    a_lane_is_used_again_where_that_adds_no_order();
    what_somebody_keeps_is_not_asked_for_by_a_release();
    lanes_fail_whole();
    a_step_is_fast_and_allocates_nothing();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
