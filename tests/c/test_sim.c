/* The simulated machine: the axioms A1-A8 as litmus tests, with verdicts and with real values; two oracles against each other; race texts;
 * memory; host threads, their search, deadlocks; failed calls. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include "array/elements.h"
#include "base/rng.h"
#include "base/mem.h"
#include "device/sim/explore.h"
#include "device/event.h"
#include "device/memory.h"
#include "device/sim/sim.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static uint64_t state = 1;

static uint64_t draw(void)
{
    return fan_rng(&state);
}

static int below(int n)
{
    return (int)(draw() % (uint64_t)n);
}

static uint64_t mix(uint64_t a, uint64_t b)
{
    a ^= b + UINT64_C(0x9E3779B97F4A7C15) + (a << 6) + (a >> 2);
    return a * UINT64_C(0xD6E8FEB86659FD93);
}

/* ---- a machine with streams and one-element arrays ---- */

#define ARRAYS 4
#define STREAMS 4

typedef struct world {
    fan_sim *m;
    fan_stream *s[STREAMS];
    fan_array *x[ARRAYS];
    fan_status worst;
    char text[FAN_ERROR_TEXT];
    int warnings;
} world;

/* A kernel: the first array becomes a mix of itself, of the others, and of a number: no two kernels commute. */
typedef struct mixing {
    uint64_t *to, *from[ARRAYS];
    int n;
    uint64_t id;
} mixing;

static fan_status run_mixing(void *ctx, fan_error *err)
{
    mixing *k = ctx;
    uint64_t v = k->id;
    (void)err;
    for (int i = 0; i < k->n; i++)
        v = mix(v, *k->from[i]);
    if (k->to)
        *k->to = mix(*k->to, v);
    return FAN_OK;
}

static char site_now[96] = "";

static void site(void *ctx, char *buf, size_t size)
{
    (void)ctx;
    snprintf(buf, size, "%s", site_now);
}

static void warn(void *ctx, const char *text)
{
    ((world *)ctx)->warnings++;
    CHECK_HAS(text, "never recorded");
}

static fan_sim_config config_of(int devices, uint64_t seed, fan_sim_schedule schedule)
{
    return (fan_sim_config){.devices = devices, .seed = seed, .schedule = schedule, .starve = seed + 2, .memory = 1 << 16, .run_work = true};
}

static void add_array(world *w, int i, int device)
{
    int64_t one = 1;
    uint64_t zero = 0;
    fan_array *init = NULL;
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &init, NULL));
    memcpy(init->data, &zero, sizeof zero);
    CHECK_OK(fan_sim_array(w->m, device, FAN_DT_UINT64, 1, &one, init, &w->x[i], NULL));
    fan_array_drop(init);
}

/* open: `blocking`: mask of the streams that are; stream i is on device i % devices. */
static void open(world *w, fan_sim_config config, uint32_t blocking)
{
    memset(w, 0, sizeof *w);
    fan_sim_hooks hooks = {.site = site, .warn = warn, .ctx = w};
    CHECK_OK(fan_sim_new(&config, &hooks, &w->m, NULL));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(fan_sim_stream(w->m, i % config.devices, blocking >> i & 1, &w->s[i], NULL));
    for (int i = 0; i < ARRAYS; i++)
        add_array(w, i, i % config.devices);
}

static void close(world *w)
{
    for (int i = 0; i < ARRAYS; i++)
        fan_array_drop(w->x[i]);
    for (int i = 0; i < STREAMS; i++)
        fan_stream_drop(w->s[i]);
    fan_sim_drop(w->m);
}

/* launch: on s, array `to` (-1: none) from the arrays in the mask `from`. */
static fan_status launch(world *w, fan_stream *s, const char *name, int to, uint32_t from, uint64_t id)
{
    mixing *k = fan_alloc(sizeof *k);
    fan_array *reads[ARRAYS], *writes[1];
    fan_error err = {0};
    *k = (mixing){.id = id};
    for (int i = 0; i < ARRAYS; i++)
        if (from >> i & 1) {
            reads[k->n] = w->x[i];
            k->from[k->n++] = (uint64_t *)(void *)w->x[i]->data;
        }
    if (to >= 0) {
        writes[0] = w->x[to];
        k->to = (uint64_t *)(void *)w->x[to]->data;
    }
    fan_sim_kernel kernel = {.name = name, .fn = run_mixing, .fini = fan_free, .ctx = k, .reads = reads, .nreads = (size_t)k->n, .writes = writes,
                             .nwrites = to >= 0, .us = -1};
    fan_status status = fan_sim_launch(w->m, s, &kernel, &err);
    if (status != FAN_OK) {
        fan_free(k);
        if (w->worst == FAN_OK)
            memcpy(w->text, err.text, sizeof w->text);
        w->worst = status;
    }
    return status;
}

static void order(fan_stream *waits, fan_stream *first)
{
    fan_event *e;
    CHECK_OK(fan_event_record(first, &e, NULL));
    CHECK_OK(fan_stream_wait(waits, e, NULL, NULL));
    fan_event_drop(e);
}

static uint64_t value(world *w)
{
    uint64_t h = 0, v;
    CHECK_OK(fan_sim_synchronize(w->m, NULL));
    for (int i = 0; i < ARRAYS; i++) {
        memcpy(&v, w->x[i]->data, sizeof v);
        h = mix(h, v);
    }
    return h;
}

/* ---- the axioms ---- */

typedef void litmus(world *w);

#define L(on, to, from) launch(w, w->s[on], "k" #on, to, from, __LINE__)

static void a1_a_stream_is_a_queue(world *w)
{
    for (int i = 0; i < 5; i++)
        L(0, i % 2, 3);
}

static void a2_an_event_is_all_earlier_work_of_its_stream(world *w)
{
    L(0, 0, 0);
    L(0, 1, 0);
    order(w->s[1], w->s[0]);
    L(1, 2, 3);
}

static void a2_but_not_later_work(world *w)
{
    L(0, 0, 0);
    order(w->s[1], w->s[0]);
    L(0, 1, 0);
    L(1, 2, 3);
}

static void a3(world *w, bool read_first, bool wait_again)
{
    fan_event *e;
    CHECK_OK(fan_event_new(w->s[0]->device, &e, NULL));
    L(0, 0, 0);
    CHECK_OK(fan_event_rerecord(e, w->s[0], NULL));
    CHECK_OK(fan_stream_wait(w->s[1], e, NULL, NULL));
    L(0, 1, 0);
    CHECK_OK(fan_event_rerecord(e, w->s[0], NULL));
    if (wait_again)
        CHECK_OK(fan_stream_wait(w->s[1], e, NULL, NULL));
    L(1, 2, read_first ? 1 : 2);
    fan_event_drop(e); /* waits that are queued stay */
}

static void a3_a_wait_is_for_the_record_that_was(world *w) { a3(w, true, false); }
static void a3_not_for_a_later_one(world *w) { a3(w, false, false); }
static void a3_unless_it_waits_again(world *w) { a3(w, false, true); }

static void a4_a_wait_for_nothing_is_nothing(world *w)
{
    fan_event *e;
    CHECK_OK(fan_event_new(w->s[0]->device, &e, NULL));
    L(0, 0, 0);
    CHECK_OK(fan_stream_wait(w->s[1], e, NULL, NULL));
    CHECK_OK(fan_event_rerecord(e, w->s[0], NULL)); /* too late */
    L(1, 1, 1);
    CHECK_INT(w->warnings, 1);
    fan_event_drop(e);
}

static void a5_the_hosts_order_is_no_order(world *w)
{
    L(0, 0, 0);
    L(1, 0, 0);
}

static void a6_waits_work_across_devices(world *w) /* s0, s2 and x0, x2 are on device 0 */
{
    CHECK(w->s[0]->device != w->s[1]->device);
    L(0, 0, 0);
    order(w->s[1], w->s[0]);
    L(1, 1, 1);
    order(w->s[2], w->s[1]);
    L(2, 0, 2);
}

static void a6_and_are_needed(world *w)
{
    L(0, 0, 0);
    L(1, 1, 1);
}

static fan_stream *legacy_of(world *w, int device)
{
    fan_stream *s = fan_stream_current(fan_sim_device(w->m, device));
    CHECK_INT(s->handle, 1);
    return s;
}

static void a7_the_legacy_stream_waits_for_blocking_ones(world *w) /* s0 blocks */
{
    fan_stream *d = legacy_of(w, 0);
    L(0, 0, 0);
    launch(w, d, "legacy", 1, 1, 70);
    fan_stream_drop(d);
}

static void a7_and_they_for_it(world *w)
{
    fan_stream *d = legacy_of(w, 0);
    launch(w, d, "legacy", 0, 0, 71);
    L(0, 1, 1);
    L(0, 2, 1);
    launch(w, d, "legacy", 2, 2, 72);
    fan_stream_drop(d);
}

static void a7_an_event_on_it_is_all_blocking_work(world *w)
{
    fan_stream *d = legacy_of(w, 0);
    L(0, 0, 0);
    order(w->s[2], d); /* s2 does not block */
    L(2, 2, 1);
    fan_stream_drop(d);
}

static void a7_not_for_the_others(world *w) /* s2 does not block */
{
    fan_stream *d = legacy_of(w, 0);
    L(2, 0, 0);
    launch(w, d, "legacy", 1, 1, 73);
    fan_stream_drop(d);
}

static void a7_nor_they_for_it(world *w)
{
    fan_stream *d = legacy_of(w, 0);
    launch(w, d, "legacy", 1, 0, 74);
    L(2, 0, 2);
    fan_stream_drop(d);
}

static void a7_nor_blocking_streams_for_one_another(world *w)
{
    L(0, 0, 0);
    L(3, 0, 0);
}

static void a7_nor_across_devices(world *w) /* s1, of device 1, blocks */
{
    fan_stream *d = legacy_of(w, 0);
    launch(w, d, "legacy", 0, 0, 75);
    L(1, 0, 0);
    fan_stream_drop(d);
}

static const struct {
    const char *name;
    litmus *program;
    int devices;
    uint32_t blocking;
    bool races;
} axioms[] = {
    {"A1", a1_a_stream_is_a_queue, 1, 0, false},
    {"A2", a2_an_event_is_all_earlier_work_of_its_stream, 1, 0, false},
    {"A2 later work", a2_but_not_later_work, 1, 0, true},
    {"A3", a3_a_wait_is_for_the_record_that_was, 1, 0, false},
    {"A3 later record", a3_not_for_a_later_one, 1, 0, true},
    {"A3 waits again", a3_unless_it_waits_again, 1, 0, false},
    {"A4", a4_a_wait_for_nothing_is_nothing, 1, 0, true},
    {"A5", a5_the_hosts_order_is_no_order, 1, 0, true},
    {"A6", a6_waits_work_across_devices, 2, 0, false},
    {"A6 without", a6_and_are_needed, 2, 0, true},
    {"A7 legacy waits", a7_the_legacy_stream_waits_for_blocking_ones, 1, 1, false},
    {"A7 waited for", a7_and_they_for_it, 1, 1, false},
    {"A7 event", a7_an_event_on_it_is_all_blocking_work, 1, 1, false},
    {"A7 others", a7_not_for_the_others, 1, 1, true},
    {"A7 others 2", a7_nor_they_for_it, 1, 1, true},
    {"A7 one another", a7_nor_blocking_streams_for_one_another, 1, 9, true},
    {"A7 devices", a7_nor_across_devices, 2, 3, true},
};

static void the_axioms_hold_by_verdict_and_by_value(void)
{
    for (size_t i = 0; i < sizeof axioms / sizeof axioms[0]; i++) {
        world w;
        open(&w, config_of(axioms[i].devices, 0, FAN_SIM_SEEDED), axioms[i].blocking);
        axioms[i].program(&w);
        if (!CHECK((fan_sim_races(w.m) > 0) == axioms[i].races))
            fprintf(stderr, "    %s: verdict\n", axioms[i].name);
        CHECK_INT(w.worst, axioms[i].races ? FAN_ERR_RACE : FAN_OK);
        CHECK_INT(fan_sim_unsound(w.m), 0);
        fan_sim_synchronize(w.m, NULL);
        close(&w);

        /* The same without the checker: the values. */
        uint64_t first = 0;
        long same = 0, other = 0;
        for (uint64_t seed = 0; seed < 40; seed++)
            for (int schedule = FAN_SIM_SEEDED; schedule <= FAN_SIM_ROUND_ROBIN; schedule++) {
                open(&w, config_of(axioms[i].devices, seed, (fan_sim_schedule)schedule), axioms[i].blocking);
                fan_sim_check(w.m, false);
                axioms[i].program(&w);
                CHECK_OK(w.worst);
                uint64_t v = value(&w);
                if (same == 0)
                    first = v;
                *(v == first ? &same : &other) += 1;
                close(&w);
            }
        if (!CHECK((other > 0) == axioms[i].races))
            fprintf(stderr, "    %s: %ld values the same, %ld not\n", axioms[i].name, same, other);
    }
}

static void a8_memory_is_used_again_at_once_and_poisoned_before(void)
{
    world w;
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    fan_device *d = fan_sim_device(w.m, 0);
    int64_t n = 100;
    fan_array *a = NULL, *b = NULL;
    CHECK_OK(fan_sim_array(w.m, 0, FAN_DT_UINT8, 1, &n, NULL, &a, NULL));
    for (int i = 0; i < 100; i++)
        CHECK_INT((uint8_t)a->data[i], 0xA5);
    char *data = a->data;
    CHECK_OK(fan_device_run(d, w.s[0], &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"}, NULL));
    CHECK_OK(fan_memory_record_stream(a->storage, w.s[0], NULL));
    fan_array_drop(a);
    CHECK_OK(fan_sim_array(w.m, 0, FAN_DT_UINT8, 1, &n, NULL, &b, NULL));
    CHECK(b->data != data); /* it may still be written */
    CHECK_INT((uint8_t)b->data[0], 0xA5);
    CHECK_INT((uint8_t)data[0], 0xA5); /* nothing ran yet */
    CHECK_OK(fan_stream_sync(w.s[0], NULL));
    CHECK_INT(data[0], 0);
    CHECK_OK(fan_sim_array(w.m, 0, FAN_DT_UINT8, 1, &n, NULL, &a, NULL));
    CHECK(a->data == data);
    CHECK_INT((uint8_t)a->data[0], 0xA5);
    CHECK_INT(fan_sim_races(w.m), 0);
    fan_array_drop(a);
    fan_array_drop(b);
    close(&w);
}

/* ---- what a race says ---- */

static void races_name_both_sides_and_the_wait_that_is_missing(void)
{
    world w;
    fan_error err = {0};
    fan_array *host = NULL;
    int64_t one = 1;
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, NULL));
    open(&w, config_of(2, 0, FAN_SIM_SEEDED), 0);
    strcpy(site_now, "train.py:28");
    CHECK_OK(launch(&w, w.s[0], "mul", 0, 0, 1));
    strcpy(site_now, "train.py:31");
    fan_operand in[1] = {{w.x[2], FAN_DT_UINT64}};
    fan_job job = {.kind = FAN_JOB_SUM, .out = w.x[0], .in = in, .n = 1, .label = "sum[0]"};
    CHECK_INT(fan_device_run(w.s[2]->device, w.s[2], &job, &err), FAN_ERR_RACE);
    CHECK_STR(err.text, "race on 8 bytes of sim:0: 'sum[0]' (stream 4 of sim:0, train.py:31) writes what 'mul' (stream 2 of sim:0, train.py:28) wrote: nothing orders them; "
                        "missing: stream 4 of sim:0 must wait for stream 2 of sim:0 after 'mul' (Stream(\"sim:0\", 4).wait(Stream(\"sim:0\", 2)))");
    fan_race race;
    CHECK(fan_sim_first_race(w.m, &race));
    CHECK_STR(race.first.name, "mul");
    CHECK_STR(race.second.site, "train.py:31");
    CHECK_INT(race.lo, (uintptr_t)w.x[0]->data);
    CHECK_INT(fan_sim_races(w.m), 1);

    site_now[0] = '\0';
    CHECK_INT(launch(&w, w.s[1], "far", -1, 1, 1), FAN_ERR_RACE); /* a stream of the other device reads */
    CHECK_STR(w.text, "race on 8 bytes of sim:0: 'far' (stream 3 of sim:1) reads what 'sum[0]' (stream 4 of sim:0, train.py:31) wrote: nothing orders them; missing: "
                      "stream 3 of sim:1 must wait for stream 4 of sim:0 after 'sum[0]' (Stream(\"sim:1\", 3).wait(Stream(\"sim:0\", 4)))");
    strcpy(site_now, "train.py:40");
    CHECK_INT(fan_sim_host_read(w.m, w.s[3], host, w.x[0], &err), FAN_ERR_RACE);
    CHECK_STR(err.text, "race on 8 bytes of sim:0: the host (train.py:40) reads what 'sum[0]' (stream 4 of sim:0, train.py:31) wrote: nothing orders them; missing: the "
                        "host must wait for stream 4 of sim:0 after 'sum[0]' (Stream(\"sim:0\", 4).synchronize())");
    CHECK_INT(fan_sim_races(w.m), 3);
    close(&w);

    /* Memory that goes back too early: the call that lets it go cannot say so, the next one does. */
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    fan_array *y = NULL;
    CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_UINT64, 1, &one, NULL, &y, NULL));
    job.out = y;
    in[0].array = w.x[2];
    strcpy(site_now, "train.py:50");
    CHECK_OK(fan_device_run(w.s[1]->device, w.s[1], &job, &err));
    strcpy(site_now, "train.py:51");
    fan_array copy = *y;
    copy.storage = NULL;
    copy.shape = copy.dims;
    copy.strides = copy.dims + 1;
    fan_array_drop(y);
    CHECK_INT(fan_sim_races(w.m), 1);
    CHECK_INT(fan_sim_pending(w.m, &err), FAN_ERR_RACE);
    CHECK_STR(err.text, "race on 8 bytes of sim:0: memory is given back at train.py:51 while 'sum[0]' (stream 3 of sim:0, train.py:50) writes it: nothing that is "
                        "waited for comes after that; missing: mark as used on stream 3 of sim:0 (array.record_stream(Stream(\"sim:0\", 3)))");
    CHECK_OK(fan_sim_pending(w.m, &err));
    /* .. and whoever still has the address meets the release. */
    strcpy(site_now, "train.py:52");
    fan_operand dead[1] = {{&copy, FAN_DT_UINT64}};
    CHECK_INT(fan_device_run(w.s[0]->device, w.s[0], &(fan_job){.kind = FAN_JOB_COPY, .out = w.x[0], .in = dead, .n = 1}, &err), FAN_ERR_RACE);
    CHECK_STR(err.text, "race on 8 bytes of sim:0: 'copy' (stream 2 of sim:0, train.py:52) reads memory that was given back at train.py:51; missing: a hold on it");
    close(&w);

    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_UINT64, 1, &one, NULL, &y, NULL));
    job.out = y;
    in[0].array = w.x[2];
    CHECK_OK(fan_device_run(w.s[1]->device, w.s[1], &job, &err));
    fan_array_drop(y);
    CHECK_INT(launch(&w, w.s[0], "next", 1, 0, 0), FAN_ERR_RACE); /* raised by the machine's next call, once */
    CHECK_HAS(w.text, "mark as used on stream 3");
    CHECK_OK(launch(&w, w.s[0], "next", 1, 0, 0));
    CHECK_OK(fan_sim_pending(w.m, &err));
    /* The mark, and the same is right. */
    CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_UINT64, 1, &one, NULL, &y, NULL));
    job.out = y;
    CHECK_OK(fan_device_run(w.s[1]->device, w.s[1], &job, &err));
    CHECK_OK(fan_memory_record_stream(y->storage, w.s[1], NULL));
    fan_array_drop(y);
    CHECK_OK(fan_sim_synchronize(w.m, &err));
    CHECK_INT(fan_sim_races(w.m), 1);
    close(&w);
    site_now[0] = '\0';
    fan_array_drop(host);
}

/* ---- two oracles ---- */

#define WORK 6
#define OPS 20

typedef enum { LAUNCH, RECORD, WAIT, SYNC, READ } kind;

typedef struct step {
    kind kind;
    int stream, event, to; /* stream STREAMS: the legacy one */
    uint32_t from;
} step;

typedef struct program {
    uint32_t blocking;
    int n, work;
    step all[OPS];
} program;

static program random_program(void)
{
    program p = {.blocking = (uint32_t)below(16)};
    int most = 8 + below(OPS - 8), work = 2 + below(WORK - 1);
    while (p.n < most) {
        step *s = &p.all[p.n];
        *s = (step){.stream = below(12) ? below(3) : STREAMS, .event = below(3), .to = below(3), .from = (uint32_t)below(8)};
        switch (below(10)) {
        case 0:
        case 1:
        case 2:
        case 3:
            if (p.work == work)
                continue;
            p.work++;
            s->kind = LAUNCH;
            if (below(3) == 0)
                s->to = -1;
            if (below(2))
                s->from = 0;
            if (s->to < 0 && s->from == 0)
                s->from = 1;
            break;
        case 4:
        case 5:
        case 6:
            s->kind = RECORD;
            break;
        case 7:
        case 8:
            s->kind = WAIT;
            break;
        default:
            s->kind = below(2) ? SYNC : READ;
        }
        p.n++;
    }
    return p;
}

/* The partial order, worked out here from the axioms: before[i] has the works that come before work i. Reads of the host are works that run when queued. */
typedef struct order_of {
    int n;
    uint32_t before[OPS];
    int to[OPS];
    uint32_t from[OPS];
    bool host[OPS];
} order_of;

static order_of work_out(const program *p)
{
    order_of o = {0};
    uint32_t stream[STREAMS + 1] = {0}, event[3] = {0}, host = 0;
    bool recorded[3] = {false};
    for (int i = 0; i < p->n; i++) {
        const step *s = &p->all[i];
        int t = s->stream;
        bool blocks = t == STREAMS || (p->blocking >> t & 1);
        bool on_stream = s->kind != WAIT || recorded[s->event]; /* a wait for nothing is no operation at all */
        if (blocks && on_stream)
            for (int u = 0; u <= STREAMS; u++)
                if (u != t && (t == STREAMS ? (p->blocking >> u & 1) : u == STREAMS))
                    stream[t] |= stream[u];
        switch (s->kind) {
        case LAUNCH:
            stream[t] |= host;
            o.before[o.n] = stream[t];
            o.to[o.n] = s->to;
            o.from[o.n] = s->from;
            stream[t] |= 1u << o.n++;
            break;
        case RECORD:
            stream[t] |= host;
            event[s->event] = stream[t];
            recorded[s->event] = true;
            break;
        case WAIT:
            if (recorded[s->event])
                stream[t] |= host | event[s->event];
            break;
        case SYNC:
            host |= stream[t];
            break;
        case READ:
            host |= stream[t];
            o.before[o.n] = host;
            o.to[o.n] = -1;
            o.from[o.n] = 1u << s->to;
            o.host[o.n] = true;
            host |= 1u << o.n++;
            break;
        }
    }
    return o;
}

/* extensions: every linear extension, with values; true as soon as two differ. */
typedef struct run {
    const order_of *o;
    uint64_t x[ARRAYS], seen[OPS];
    uint32_t done;
    uint64_t first;
    bool any, differs;
    long count;
} run;

static void extensions(run *r)
{
    const order_of *o = r->o;
    if (r->differs)
        return;
    if (r->done == (1u << o->n) - 1) {
        uint64_t h = 0;
        for (int i = 0; i < ARRAYS; i++)
            h = mix(h, r->x[i]);
        for (int i = 0; i < o->n; i++)
            h = mix(h, r->seen[i]);
        r->differs = r->any && h != r->first;
        r->first = h;
        r->any = true;
        r->count++;
        return;
    }
    for (int i = 0; i < o->n; i++) {
        if ((r->done >> i & 1) || (o->before[i] & ~r->done))
            continue;
        uint64_t v = (uint64_t)i + 1, was = o->to[i] >= 0 ? r->x[o->to[i]] : 0;
        for (int k = 0; k < ARRAYS; k++)
            if (o->from[i] >> k & 1)
                v = mix(v, r->x[k]);
        r->seen[i] = v;
        if (o->to[i] >= 0)
            r->x[o->to[i]] = mix(was, v);
        r->done |= 1u << i;
        extensions(r);
        r->done &= ~(1u << i);
        if (o->to[i] >= 0)
            r->x[o->to[i]] = was;
    }
}

/* play: the program on a machine; its number of races. `elide` false: every wait goes to the backend. verdicts (may be NULL): of each step. */
static uint64_t play(world *w, const program *p, bool elide, fan_status *verdicts)
{
    fan_event *e[3];
    fan_stream *d = legacy_of(w, 0);
    fan_array *host = NULL;
    int64_t one = 1;
    uint64_t work = 0;
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, NULL));
    for (int i = 0; i < 3; i++)
        CHECK_OK(fan_event_new(w->s[0]->device, &e[i], NULL));
    for (int i = 0; i < p->n; i++) {
        const step *s = &p->all[i];
        fan_stream *on = s->stream == STREAMS ? d : w->s[s->stream];
        fan_status status = FAN_OK;
        switch (s->kind) {
        case LAUNCH:
            status = launch(w, on, "k", s->to, s->from, ++work);
            break;
        case RECORD:
            CHECK_OK(fan_event_rerecord(e[s->event], on, NULL));
            break;
        case WAIT:
            if (elide)
                CHECK_OK(fan_stream_wait(on, e[s->event], NULL, NULL));
            else
                CHECK_OK(on->device->backend->wait(on, e[s->event], NULL));
            break;
        case SYNC:
            CHECK_OK(fan_stream_sync(on, NULL));
            break;
        case READ:
            status = fan_sim_host_read(w->m, on, host, w->x[s->to], NULL);
            break;
        }
        CHECK(status == FAN_OK || status == FAN_ERR_RACE);
        if (verdicts)
            verdicts[i] = status;
    }
    for (int i = 0; i < 3; i++)
        fan_event_drop(e[i]);
    fan_stream_drop(d);
    fan_array_drop(host);
    return fan_sim_races(w->m);
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define PROGRAMS 1500
#define LIGHT 1
#else
#define PROGRAMS 6000
#define LIGHT 0
#endif

static void happens_before_and_values_agree(void)
{
    long racy = 0, clean = 0, orders = 0, elided = 0, differed = 0;
    for (int round = 0; round < PROGRAMS; round++) {
        program p = random_program();
        order_of o = work_out(&p);
        run r = {.o = &o};
        extensions(&r);
        orders += r.count;
        world w, without, judged;
        fan_status a[OPS], b[OPS], c[OPS];
        open(&w, config_of(1, 0, FAN_SIM_SEEDED), p.blocking);
        open(&without, config_of(1, 0, FAN_SIM_SEEDED), p.blocking);
        fan_sim_config only = config_of(1, 0, FAN_SIM_SEEDED);
        only.run_work = false;
        open(&judged, only, p.blocking);
        uint64_t races = play(&w, &p, true, a);
        CHECK_INT(races > 0, r.differs);
        /* Elision changes no verdict; nor does it whether bytes are moved. */
        CHECK_INT(play(&without, &p, false, b), races);
        CHECK_INT(play(&judged, &p, true, c), races);
        for (int i = 0; i < p.n; i++)
            CHECK(a[i] == b[i] && a[i] == c[i]);
        CHECK_INT(fan_sim_unsound(w.m), 0);
        elided += (long)fan_sim_device(w.m, 0)->elided;
        *(races ? &racy : &clean) += 1;
        close(&w);
        close(&without);
        close(&judged);
        /* A program without a race has one value, whatever the seed; one with a race mostly has not. */
        uint64_t first = 0;
        bool differs = false;
        for (uint64_t seed = 0; seed < 6; seed++) {
            open(&w, config_of(1, seed, seed < 2 ? FAN_SIM_SEEDED : (fan_sim_schedule)(seed - 1)), p.blocking);
            fan_sim_check(w.m, false);
            play(&w, &p, true, NULL);
            uint64_t v = value(&w);
            differs |= seed > 0 && v != first;
            if (seed == 0)
                first = v;
            close(&w);
        }
        if (!races)
            CHECK(!differs);
        differed += differs;
    }
    printf("%d programs: %ld with a race, %ld without (%ld orders run by hand); %ld gave other values on the machine; %ld waits left out\n", PROGRAMS, racy, clean, orders,
           differed, elided);
    CHECK(racy > 300 && clean > 300 && elided > 300 && differed > 100);
}

/* The machine holds every wait that is left out against the truth: a lie is found. */
static void a_wait_wrongly_left_out_is_found(void)
{
    world w;
    fan_event *e;
    bool elided;
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
    CHECK_OK(fan_event_record(w.s[0], &e, NULL));
    CHECK_INT(fan_clock_set(&w.s[1]->known, w.s[0]->lane, e->count), 0); /* planted */
    CHECK_OK(fan_stream_wait(w.s[1], e, &elided, NULL));
    CHECK(elided);
    CHECK_INT(fan_sim_unsound(w.m), 1);
    CHECK_INT(launch(&w, w.s[1], "k", 1, 1, 1), FAN_ERR_RACE);
    fan_event_drop(e);
    close(&w);
}

/* ---- schedules ---- */

static void named_schedules_are_what_they_say(void)
{
    for (int schedule = FAN_SIM_FIFO; schedule <= FAN_SIM_ROUND_ROBIN; schedule++) {
        world w;
        char order_text[16] = "";
        open(&w, config_of(1, 1, (fan_sim_schedule)schedule), 0); /* starves stream 3, which is s1 */
        for (int i = 0; i < 8; i++)
            CHECK_OK(launch(&w, w.s[i / 2 % 3], "k", i / 2 % 3, 0, (uint64_t)i));
        for (int i = 0; i < 8; i++) {
            bool one;
            uint64_t before[3];
            for (int k = 0; k < 3; k++)
                memcpy(&before[k], w.x[k]->data, 8);
            CHECK_OK(fan_sim_step(w.m, &one, NULL));
            CHECK(one);
            for (int k = 0; k < 3; k++)
                if (memcmp(&before[k], w.x[k]->data, 8))
                    order_text[i] = (char)('0' + k);
        }
        bool one;
        CHECK_OK(fan_sim_step(w.m, &one, NULL));
        CHECK(!one);
        /* queued: 0 0 1 1 2 2 0 0 */
        CHECK_STR(order_text, schedule == FAN_SIM_FIFO     ? "00112200"
                              : schedule == FAN_SIM_LIFO   ? "22110000" /* of the heads, the newest */
                              : schedule == FAN_SIM_STARVE ? "00220011"
                                                           : "01201200");
        close(&w);
    }
}

static fan_status fails(void *ctx, fan_error *err)
{
    (*(int *)ctx)++;
    return fan_fail(err, FAN_ERR_EXTERN, "the kernel failed");
}

static void done(void *ctx)
{
    (*(int *)ctx) += 100;
}

typedef struct inside {
    world *w;
    int how;
    fan_status status;
} inside;

static fan_status calls_in(void *ctx, fan_error *err)
{
    inside *c = ctx;
    (void)err;
    if (c->how == 0) /* more work, and another stream's */
        launch(c->w, c->w->s[1], "more", 1, 0, 5);
    else if (c->how == 1)
        c->status = fan_stream_sync(c->w->s[1], NULL);
    else
        c->status = fan_stream_sync(c->w->s[0], NULL); /* its own */
    return FAN_OK;
}

static void kernels_may_fail_and_may_call_in(void)
{
    world w;
    fan_error err = {0};
    int ran = 0;
    open(&w, config_of(1, 0, FAN_SIM_FIFO), 0);
    fan_sim_kernel k = {.name = "bad", .fn = fails, .fini = done, .ctx = &ran, .us = -1};
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
    CHECK_INT(ran, 0);
    CHECK_INT(fan_stream_sync(w.s[0], &err), FAN_ERR_EXTERN);
    CHECK_STR(err.text, "the kernel failed");
    CHECK_INT(ran, 101);
    CHECK_OK(fan_stream_sync(w.s[0], &err)); /* the rest runs all the same */
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    for (int how = 0; how < 3; how++) {
        inside c = {.w = &w, .how = how};
        fan_sim_kernel in = {.name = "in", .fn = calls_in, .ctx = &c, .us = -1};
        ran = 0;
        fan_stream *s = w.s[how == 1 ? 2 : 0];
        fan_sim_synchronize(w.m, NULL);
        CHECK_OK(launch(&w, w.s[1], "k", 1, 0, 1));
        CHECK_OK(fan_sim_launch(w.m, s, &in, NULL));
        CHECK_OK(fan_sim_synchronize(w.m, &err));
        CHECK_INT(c.status, how == 2 ? FAN_ERR_DEADLOCK : FAN_OK);
    }
    /* What is not run when the machine goes is dropped. */
    ran = 0;
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    close(&w);
    CHECK_INT(ran, 100);
}

static bool near(double a, double b)
{
    return a - b < 1e-6 && b - a < 1e-6;
}

static void the_clock_shows_overlap(void)
{
    world w;
    fan_sim_config c = config_of(1, 0, FAN_SIM_SEEDED);
    c.launch_us = 2;
    c.gbytes_per_s = 1;
    open(&w, c, 0);
    double host = fan_sim_host_us(w.m);
    fan_sim_kernel k = {.name = "k", .us = 100};
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    CHECK_OK(fan_sim_launch(w.m, w.s[1], &k, NULL));
    CHECK(near(fan_sim_device_us(w.m), host + 104)); /* side by side */
    order(w.s[1], w.s[0]);
    CHECK_OK(fan_sim_launch(w.m, w.s[1], &k, NULL));
    CHECK(near(fan_sim_device_us(w.m), host + 204));
    CHECK(near(fan_sim_host_us(w.m), host + 6));
    CHECK_OK(fan_stream_sync(w.s[0], NULL));
    CHECK(near(fan_sim_host_us(w.m), host + 102));
    CHECK_OK(fan_sim_synchronize(w.m, NULL));
    CHECK(near(fan_sim_host_us(w.m), host + 204));
    close(&w);
}

static void arrays_outlive_the_machine_that_made_them(void)
{
    int64_t live = fan_mem_get().live;
    world w;
    open(&w, config_of(2, 0, FAN_SIM_SEEDED), 0);
    fan_stream *d = legacy_of(&w, 0);
    uint64_t id = d->id;
    CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
    fan_array *x = fan_array_hold(w.x[0]);
    fan_stream_drop(d);
    close(&w);
    CHECK(fan_mem_get().live > live);
    fan_device *device = fan_memory_device(x->storage);
    d = fan_stream_current(device);
    CHECK_INT(d->id, id); /* the same stream, whoever asks */
    fan_sim *m = fan_sim_hold(fan_sim_of(device));
    fan_stream *s = NULL;
    CHECK_OK(fan_sim_stream(m, 1, false, &s, NULL));
    fan_stream_drop(s);
    fan_sim_drop(m);
    CHECK(fan_sim_of(fan_cpu()) == NULL);
    fan_stream_drop(d);
    fan_array_drop(x);
    CHECK_INT(fan_mem_get().live, live);
}

static void what_a_machine_was_told_it_says(void)
{
    world w;
    open(&w, config_of(2, 77, FAN_SIM_SEEDED), 0);
    fan_device *d = fan_sim_device(w.m, 1);
    fan_array *host = NULL;
    int64_t one = 1;
    fan_race race;
    fan_error err = {0};
    CHECK_INT(fan_sim_seed(w.m), 77);
    CHECK_INT(d->backend->left_out(d), 0);
    fan_sim_leave_out(w.m, 5);
    CHECK_INT(d->backend->left_out(d), 5);
    CHECK(!fan_sim_first_race(w.m, &race));
    /* Without a stream a read is in the order of the array's device's current one. */
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, NULL));
    CHECK_OK(fan_stream_push(w.s[1], NULL));
    CHECK_OK(launch(&w, w.s[1], "k", 1, 0, 1));
    CHECK_OK(fan_sim_host_read(w.m, NULL, host, w.x[1], NULL));
    CHECK(memcmp(host->data, w.x[1]->data, 8) == 0 && memcmp(host->data, w.x[3]->data, 8) != 0);
    fan_stream_pop(w.s[1]);
    CHECK_OK(launch(&w, w.s[1], "k", 3, 0, 1));
    CHECK_INT(fan_sim_host_read(w.m, NULL, host, w.x[3], NULL), FAN_ERR_RACE);
    CHECK_INT(fan_sim_host_read(w.m, NULL, w.x[1], host, &err), FAN_ERR_VALUE);
    CHECK_HAS(err.text, "in no memory of this machine");
    fan_array_drop(host);
    close(&w);
    fan_sim_config c = {.devices = 1, .seed = 1};
    fan_sim *m = NULL;
    CHECK_OK(fan_sim_new(&c, NULL, &m, NULL)); /* a gigabyte of addresses */
    CHECK_OK(fan_sim_array(m, 0, FAN_DT_INT8, 1, (int64_t[]){(1 << 30) - 64}, NULL, &host, NULL));
    fan_array_drop(host);
    fan_sim_drop(m);
}

static void bad_arguments_are_refused(void)
{
    fan_sim *m = NULL;
    fan_error err = {0};
    fan_stream *s = NULL;
    fan_array *a = NULL;
    int64_t one = 1;
    fan_sim_config c = config_of(0, 0, FAN_SIM_SEEDED);
    CHECK_INT(fan_sim_new(&c, NULL, &m, &err), FAN_ERR_VALUE);
    c.devices = 65;
    CHECK_INT(fan_sim_new(&c, NULL, &m, &err), FAN_ERR_VALUE);
    CHECK_HAS(err.text, "1 to 64 devices, not 65");
    c.devices = 1;
    c.memory = SIZE_MAX;
    CHECK_INT(fan_sim_new(&c, NULL, &m, &err), FAN_ERR_NOMEM);
    world w, v;
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    open(&v, config_of(1, 0, FAN_SIM_SEEDED), 0);
    CHECK_INT(fan_sim_stream(w.m, 1, false, &s, &err), FAN_ERR_VALUE);
    CHECK_INT(fan_sim_stream(w.m, -1, false, &s, &err), FAN_ERR_VALUE);
    CHECK_INT(fan_sim_array(w.m, 2, FAN_DT_INT8, 1, &one, NULL, &a, &err), FAN_ERR_VALUE);
    CHECK(fan_sim_device(w.m, 1) == NULL);
    fan_event *e;
    CHECK_OK(fan_event_record(v.s[0], &e, NULL));
    CHECK_INT(fan_stream_wait(w.s[0], e, NULL, &err), FAN_ERR_VALUE); /* another machine's */
    CHECK_INT(fan_event_rerecord(e, w.s[0], &err), FAN_ERR_VALUE);
    fan_event_drop(e);
    CHECK_INT(launch(&w, v.s[0], "k", 0, 0, 0), FAN_ERR_VALUE);
    close(&w);
    close(&v);
}

/* ---- jobs ---- */

static void set_to(fan_array *a, double first)
{
    for (int64_t i = 0; i < a->size; i++) {
        double v = first + (double)i;
        memcpy(a->data + 8 * i, &v, 8);
    }
}

/* Every kind of job gives on the machine, late, what it gives at once on the host; and it reads and writes what it says, no more and no less. */
static void every_job_touches_what_it_says(void)
{
    enum { SPARSE = 4, ALL = 7 };
    static const int64_t shape[2] = {2, 3}, small[2] = {1, 3}, grid[2] = {2, 2}, two = 2;
    long races = 0, none = 0;
    for (int what = FAN_JOB_SUM; what <= FAN_JOB_UPLOAD; what++)
        for (int who = -1; who < ALL; who++) /* whom the other stream has touched */
            for (int wrote = 0; wrote < 2; wrote++) {
                fan_sim *m = NULL;
                fan_sim_config c = config_of(1, 0, FAN_SIM_SEEDED);
                CHECK_OK(fan_sim_new(&c, NULL, &m, NULL));
                fan_stream *s = NULL, *other = NULL;
                CHECK_OK(fan_sim_stream(m, 0, false, &s, NULL));
                CHECK_OK(fan_sim_stream(m, 0, false, &other, NULL));
                fan_array *host[ALL], *on[ALL]; /* out, in, in, small, indices, values, and one that has no part */
                for (int i = 0; i < ALL; i++) {
                    bool few = i == 3, index = i == SPARSE, vector = i == SPARSE + 1;
                    const int64_t *sh = few ? small : index ? grid : vector ? &two : shape;
                    CHECK_OK(fan_array_new(index ? FAN_DT_INT64 : FAN_DT_FLOAT64, vector ? 1 : 2, sh, NULL, &host[i], NULL));
                    if (index)
                        memcpy(host[i]->data, (int64_t[]){0, 1, 2, 0}, 32);
                    else
                        set_to(host[i], i);
                    CHECK_OK(fan_sim_array(m, 0, host[i]->dtype, host[i]->ndim, sh, host[i], &on[i], NULL));
                }
                fan_sparse *sparse[2];
                CHECK_OK(fan_sparse_new(FAN_FORMAT_COO, 2, shape, host[SPARSE], NULL, host[SPARSE + 1], true, &sparse[0], NULL));
                CHECK_OK(fan_sparse_new(FAN_FORMAT_COO, 2, shape, on[SPARSE], NULL, on[SPARSE + 1], true, &sparse[1], NULL));
                fan_scale scale = {.on = true, .re = 3, .i = 3};
                fan_operand in[2][2] = {{{host[1], FAN_DT_FLOAT64}, {host[2], FAN_DT_FLOAT64}}, {{on[1], FAN_DT_FLOAT64}, {on[2], FAN_DT_FLOAT64}}};
                if (what == FAN_JOB_UPLOAD)
                    in[1][0].array = host[1];
                int out = what == FAN_JOB_REDUCE ? 3 : 0;
                size_t n = what == FAN_JOB_SUM ? 2 : what == FAN_JOB_ZERO || what == FAN_JOB_SCATTER ? 0 : 1;
                fan_job job[2];
                for (int i = 0; i < 2; i++)
                    job[i] = (fan_job){.kind = (fan_job_kind)what, .out = i ? on[out] : host[out], .in = in[i], .n = n,
                                       .scale = what == FAN_JOB_SUM ? &scale : NULL, .sparse = what == FAN_JOB_SCATTER ? sparse[i] : NULL};
                bool reads = (what != FAN_JOB_UPLOAD && who >= 1 && who <= (int)n) ||
                             (what == FAN_JOB_SCATTER && (who == SPARSE || who == SPARSE + 1));
                bool expect = who == out || (reads && wrote);
                if (who >= 0) {
                    fan_sim_kernel k = {.name = "other", .us = -1};
                    *(wrote ? &k.writes : &k.reads) = &on[who];
                    *(wrote ? &k.nwrites : &k.nreads) = 1;
                    CHECK_OK(fan_sim_launch(m, other, &k, NULL));
                }
                CHECK_INT(fan_device_run(fan_sim_device(m, 0), s, &job[1], NULL), expect ? FAN_ERR_RACE : FAN_OK);
                *(expect ? &races : &none) += 1;
                fan_job_run(&job[0], true);
                if (what == FAN_JOB_UPLOAD)
                    set_to(host[1], 100); /* was read already */
                CHECK_OK(fan_sim_synchronize(m, NULL));
                CHECK(fan_array_hash(on[out]) == fan_array_hash(host[out]));
                CHECK(fan_job_bytes(&job[0]) > 0 && fan_job_word(job[0].kind)[0]);
                for (int i = 0; i < 2; i++)
                    fan_sparse_drop(sparse[i]);
                for (int i = 0; i < ALL; i++) {
                    CHECK_OK(fan_memory_record_stream(on[i]->storage, s, NULL));
                    fan_array_drop(host[i]);
                    fan_array_drop(on[i]);
                }
                fan_stream_drop(s);
                fan_stream_drop(other);
                fan_sim_drop(m);
            }
    printf("jobs: %ld races, %ld none\n", races, none);
    CHECK(races > 10 && none > 10);
}

/* ---- failed calls ---- */

static fan_status some_of_everything(world *w, fan_error *err)
{
    fan_event *e = NULL, *f = NULL;
    fan_array *a = NULL, *host = NULL;
    int64_t one = 1;
    fan_status status;
    FAN_GO(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, err));
    FAN_GO(fan_device_array(w->s[0]->device, w->s[0], FAN_DT_UINT64, 1, &one, NULL, &a, err));
    FAN_GO(fan_device_run(w->s[0]->device, w->s[0], &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"}, err));
    FAN_GO(fan_event_record(w->s[0], &e, err));
    FAN_GO(fan_stream_wait(w->s[1], e, NULL, err));
    FAN_GO(fan_memory_record_stream(a->storage, w->s[1], err));
    FAN_GO(fan_device_run(w->s[1]->device, w->s[1], &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"}, err));
    FAN_GO(fan_event_new(w->s[0]->device, &f, err));
    FAN_GO(fan_event_rerecord(f, w->s[1], err));
    bool passed;
    FAN_GO(fan_event_query(f, &passed, err));
    FAN_GO(fan_event_sync(f, err));
    FAN_GO(fan_sim_host_read(w->m, w->s[1], host, a, err));
    FAN_GO(fan_stream_sync(w->s[0], err));
    FAN_GO(launch(w, w->s[2], "k", 0, 0, 1));
    FAN_GO(fan_sim_synchronize(w->m, err));
done:
    fan_event_drop(e);
    fan_event_drop(f);
    fan_array_drop(a);
    fan_array_drop(host);
    return status;
}

static void every_call_can_fail_once_and_changes_nothing(void)
{
    int64_t live = fan_mem_get().live;
    long failed = 0;
    for (int which = 0; which < 2; which++)
        for (int64_t n = 0;; n++) {
            world w;
            fan_error err = {0};
            open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
            uint64_t calls = fan_sim_calls(w.m);
            fan_sim_fail_at(w.m, n, which ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE);
            fan_status status = some_of_everything(&w, &err);
            CHECK(status == FAN_OK || status == (which ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE));
            if (status != FAN_OK) {
                failed++;
                CHECK(err.text[0] || w.text[0]);
                CHECK_OK(some_of_everything(&w, &err)); /* once */
            }
            bool reached = fan_sim_calls(w.m) - calls > (uint64_t)n;
            CHECK_INT(fan_sim_races(w.m), 0);
            close(&w);
            CHECK_INT(fan_mem_get().live, live);
            if (!reached)
                break;
        }
    printf("%ld failed calls\n", failed);
    CHECK(failed > 20);
}

/* ---- a machine for many runs ---- */

static void a_reset_machine_is_a_new_one(void)
{
    world w;
    fan_sim_config c = config_of(2, 9, FAN_SIM_SEEDED);
    memset(&w, 0, sizeof w);
    CHECK_OK(fan_sim_new(&c, NULL, &w.m, NULL));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(fan_sim_stream(w.m, i % 2, false, &w.s[i], NULL));
    uint64_t first = 0, races = 0, calls = 0;
    uintptr_t address = 0;
    fan_error err = {0};
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < ARRAYS; i++)
            add_array(&w, i, i % 2);
        if (round == 0)
            address = (uintptr_t)w.x[3]->data;
        CHECK_INT((uintptr_t)w.x[3]->data, address);
        launch(&w, w.s[0], "a", 0, 0, 1);
        launch(&w, w.s[1], "b", 0, 0, 2); /* a race, every time */
        order(w.s[2], w.s[1]);
        launch(&w, w.s[2], "c", 1, 1, 3);
        CHECK_INT(fan_sim_reset(w.m, &err), FAN_ERR_STATE);
        CHECK_HAS(err.text, "4 blocks of its memory are held");
        uint64_t v = value(&w);
        if (round == 0) {
            first = v;
            races = fan_sim_races(w.m);
        }
        if (round <= 1)
            calls = fan_sim_calls(w.m); /* the first round makes an event that later ones find in the pool */
        CHECK(v == first);
        CHECK_INT(fan_sim_races(w.m), races);
        CHECK_INT(fan_sim_calls(w.m), calls);
        CHECK(races > 0);
        launch(&w, w.s[3], "left", 2, 0, 1); /* work that is dropped */
        for (int i = 0; i < ARRAYS; i++)
            fan_array_drop(w.x[i]);
        CHECK_OK(fan_sim_reset(w.m, &err));
        CHECK_INT(fan_sim_races(w.m), 0);
        CHECK(fan_sim_host_us(w.m) == 0 && fan_sim_device_us(w.m) == 0);
    }
    for (int i = 0; i < ARRAYS; i++)
        w.x[i] = NULL;
    close(&w);
}

static void judging_alone_is_fast(void)
{
    world w;
    memset(&w, 0, sizeof w);
    fan_sim_config c = config_of(2, 9, FAN_SIM_SEEDED);
    c.run_work = false;
    CHECK_OK(fan_sim_new(&c, NULL, &w.m, NULL));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(fan_sim_stream(w.m, i % 2, false, &w.s[i], NULL));
    struct timespec t0, t1;
    int64_t one = 1;
    enum { RUNS = LIGHT ? 2000 : 20000 };
    int64_t before = 0, steps = 0;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t0);
    for (int round = 0; round < RUNS; round++) {
        fan_array *a = NULL, *b = NULL;
        fan_event *e;
        if (round == 100)
            before = fan_mem_get().live;
        CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_FLOAT32, 1, &one, NULL, &a, NULL));
        CHECK_OK(fan_device_array(w.s[1]->device, w.s[1], FAN_DT_FLOAT32, 1, &one, NULL, &b, NULL));
        fan_operand in[2] = {{a, FAN_DT_FLOAT32}, {b, FAN_DT_FLOAT32}};
        for (int i = 0; i < 4; i++) {
            CHECK_OK(fan_device_run(w.s[0]->device, w.s[0], &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "z"}, NULL));
            CHECK_OK(fan_event_record(w.s[0], &e, NULL));
            CHECK_OK(fan_stream_wait(w.s[1], e, NULL, NULL));
            fan_event_drop(e);
            CHECK_OK(fan_device_run(w.s[1]->device, w.s[1], &(fan_job){.kind = FAN_JOB_SUM, .out = b, .in = in, .n = 2, .label = "sum"}, NULL));
            CHECK_OK(fan_event_record(w.s[1], &e, NULL));
            CHECK_OK(fan_stream_wait(w.s[0], e, NULL, NULL));
            fan_event_drop(e);
            steps += 6;
        }
        CHECK_OK(fan_memory_record_stream(a->storage, w.s[1], NULL));
        fan_array_drop(a);
        fan_array_drop(b);
        CHECK_INT(fan_sim_races(w.m), 0);
        CHECK_OK(fan_sim_reset(w.m, NULL));
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t1);
    CHECK_INT(fan_mem_get().live, before);
    double ns = 1e9 * (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec);
    printf("judging alone: %.0f ns by step (records, waits, kernels of up to three accesses; two arrays and a reset in 24)\n", ns / (double)steps);
    close(&w);
}

/* ---- host threads ---- */

typedef struct thread {
    fan_sim *m;
    int actor;
    void (*body)(void *arg);
    void *arg;
    pthread_t os;
    bool began;
} thread;

static void *thread_main(void *arg)
{
    thread *t = arg;
    t->began = fan_sim_thread_begin(t->m, t->actor);
    if (t->began) {
        t->body(t->arg);
        fan_sim_thread_end(t->m, t->actor);
    }
    return NULL;
}

static void start(thread *t, fan_sim *m, void (*body)(void *), void *arg)
{
    *t = (thread){.m = m, .body = body, .arg = arg};
    CHECK_OK(fan_sim_spawn(m, &t->actor, NULL));
    pthread_create(&t->os, NULL, thread_main, t);
}

/* Two threads write one array on streams of their own, under a lock; the second to come waits for the first's event. */
typedef struct pair {
    world *w;
    fan_mutex lock;
    fan_event *last;
    bool use_lock, use_event;
    fan_event *shared; /* without a lock: the one records it, the other waits for it, in whatever order */
    int who;
} pair;

typedef struct half {
    pair *p;
    int i;
} half;

static void half_main(void *arg)
{
    half *h = arg;
    pair *p = h->p;
    world *w = p->w;
    fan_stream *s = w->s[h->i];
    launch(w, s, "own", h->i, 0, (uint64_t)h->i + 10);
    if (p->use_lock) {
        fan_mutex_lock(&p->lock);
        if (p->use_event && p->last)
            fan_stream_wait(s, p->last, NULL, NULL);
        launch(w, s, "both", 2, 1u << h->i, (uint64_t)h->i + 1);
        fan_event *e = NULL;
        if (fan_event_record(s, &e, NULL) == FAN_OK) {
            fan_event_drop(p->last);
            p->last = e;
        }
        p->who = h->i;
        fan_mutex_unlock(&p->lock);
    } else {
        if (h->i == 1)
            fan_stream_wait(s, p->shared, NULL, NULL);
        launch(w, s, "both", 2, 1u << h->i, (uint64_t)h->i + 1);
        if (h->i == 0)
            fan_event_rerecord(p->shared, s, NULL);
    }
    launch(w, s, "own", h->i, 0, (uint64_t)h->i + 20);
}

static int choose(void *ctx, uint32_t enabled)
{
    return fan_explore_choose(ctx, enabled);
}

static void touched(void *ctx, uint64_t object, fan_touch how)
{
    fan_explore_touched(ctx, object, how);
}

/* run_pair: one run under the search. false: abandoned. The outcome says whether it raced and what came out. */
static bool run_pair(fan_explore *x, bool use_lock, bool use_event, uint64_t *outcome, char *schedule, size_t size)
{
    world w;
    pair p = {.w = &w, .use_lock = use_lock, .use_event = use_event};
    half h[2] = {{&p, 0}, {&p, 1}};
    thread t[2];
    open(&w, config_of(1, 3, FAN_SIM_FIFO), 0);
    fan_mutex_init(&p.lock);
    CHECK_OK(fan_event_new(w.s[0]->device, &p.shared, NULL));
    fan_sim_set_chooser(w.m, &(fan_sim_chooser){.choose = choose, .touched = touched, .ctx = x});
    for (int i = 0; i < 2; i++)
        start(&t[i], w.m, half_main, &h[i]);
    CHECK_OK(fan_sim_join(w.m, NULL));
    for (int i = 0; i < 2; i++)
        pthread_join(t[i].os, NULL);
    bool whole = !fan_sim_abandoned(w.m);
    if (schedule)
        fan_sim_host_schedule(w.m, schedule, size);
    if (whole) {
        uint64_t races = fan_sim_races(w.m);
        *outcome = mix(mix(races > 0, races ? 0 : value(&w)), (uint64_t)p.who);
        CHECK_INT(fan_sim_unsound(w.m), 0);
    } else {
        fan_array *a;
        int64_t one = 1;
        CHECK_INT(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_INT8, 1, &one, NULL, &a, NULL), FAN_ERR_STATE);
        w.worst = FAN_OK;
        CHECK_INT(launch(&w, w.s[0], "k", 0, 0, 0), FAN_ERR_STATE);
        CHECK_HAS(w.text, "abandoned");
    }
    fan_event_drop(p.last);
    fan_event_drop(p.shared);
    fan_mutex_fini(&p.lock);
    close(&w);
    return whole;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static size_t distinct(uint64_t *v, size_t n)
{
    size_t kept = 0;
    qsort(v, n, sizeof *v, by_value);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || v[i] != v[i - 1])
            v[kept++] = v[i];
    return kept;
}

static void the_reduction_loses_nothing_on_real_threads(void)
{
    static uint64_t found[2][20000];
    static const bool ways[][2] = {{true, true}, {true, false}, {false, false}};
    int64_t live = fan_mem_get().live;
    for (int way = LIGHT ? 2 : 0; way < 3; way++) { /* the whole search takes long under a sanitizer */
        size_t n[2] = {0, 0};
        uint64_t gone = 0, runs[2];
        char one[64] = "", two[64] = "";
        uint64_t first = 0, again = 0;
        for (int reduce = 0; reduce < 2; reduce++) {
            fan_explore *x = fan_explore_new(reduce, reduce ? 0 : 12000);
            while (n[reduce] < 20000 && fan_explore_begin(x)) {
                uint64_t outcome = 0;
                bool whole = run_pair(x, ways[way][0], ways[way][1], &outcome, one, sizeof one);
                fan_explore_end(x);
                if (whole) {
                    found[reduce][n[reduce]++] = outcome;
                    first = outcome;
                    memcpy(two, one, sizeof two);
                }
            }
            CHECK(!fan_explore_strayed(x));
            if (!CHECK(fan_explore_complete(x)))
                fprintf(stderr, "    way %d, reduce %d: %zu runs\n", way, reduce, n[reduce]);
            runs[reduce] = n[reduce];
            gone = fan_explore_abandoned(x);
            /* The last whole run again, from its schedule. */
            CHECK_OK(fan_explore_replay(x, two));
            CHECK(fan_explore_begin(x));
            CHECK(run_pair(x, ways[way][0], ways[way][1], &again, one, sizeof one));
            fan_explore_end(x);
            CHECK(again == first);
            CHECK_STR(one, two);
            fan_explore_free(x);
        }
        size_t a = distinct(found[0], n[0]), b = distinct(found[1], n[1]);
        printf("lock %d, event %d: %" PRIu64 " orders, %zu outcomes; reduced: %" PRIu64 " runs, %" PRIu64 " abandoned, %zu outcomes\n", ways[way][0],
               ways[way][1], runs[0], a, runs[1], gone, b);
        CHECK_INT(b, a);
        CHECK(a == b && memcmp(found[0], found[1], a * sizeof(uint64_t)) == 0);
        CHECK(runs[1] < runs[0]);
        CHECK(a >= 2);
    }
    CHECK_INT(fan_mem_get().live, live);
}

static void threads_act_by_the_seed_one_at_a_time(void)
{
    char seen[64][64];
    int n = 0;
    for (uint64_t seed = 0; seed < 64; seed++) {
        char text[2][64];
        for (int again = 0; again < 2; again++) {
            world w;
            pair p = {.w = &w, .use_lock = true, .use_event = true};
            half h[2] = {{&p, 0}, {&p, 1}};
            thread t[2];
            open(&w, config_of(1, seed, FAN_SIM_SEEDED), 0);
            fan_mutex_init(&p.lock);
            for (int i = 0; i < 2; i++)
                start(&t[i], w.m, half_main, &h[i]);
            CHECK_OK(again ? fan_sim_join(w.m, NULL) : fan_sim_synchronize(w.m, NULL)); /* which joins first */
            for (int i = 0; i < 2; i++)
                pthread_join(t[i].os, NULL);
            fan_sim_host_schedule(w.m, text[again], sizeof text[again]);
            CHECK_INT(fan_sim_races(w.m), 0);
            fan_event_drop(p.last);
            fan_mutex_fini(&p.lock);
            close(&w);
        }
        CHECK_STR(text[1], text[0]);
        bool new_ = true;
        for (int i = 0; i < n; i++)
            new_ &= strcmp(seen[i], text[0]) != 0;
        if (new_)
            strcpy(seen[n++], text[0]);
    }
    printf("64 seeds: %d orders\n", n);
    CHECK(n > 30);
}

/* What blocks lets go of the frontend's lock first: here a mutex that every thread holds while it is in C. */
static pthread_mutex_t frontend = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int frontend_held;
static atomic_long blocked;

static void *before_block(void *ctx)
{
    (void)ctx;
    CHECK_INT(frontend_held, 1);
    frontend_held = 0;
    blocked++;
    pthread_mutex_unlock(&frontend);
    return &frontend;
}

static void after_block(void *ctx, void *before)
{
    (void)ctx;
    CHECK(before == &frontend);
    pthread_mutex_lock(&frontend);
    frontend_held = 1;
}

static void *guarded_main(void *arg)
{
    pthread_mutex_lock(&frontend);
    frontend_held = 1;
    void *r = thread_main(arg);
    frontend_held = 0;
    pthread_mutex_unlock(&frontend);
    return r;
}

static void whatever_blocks_lets_go_of_the_frontends_lock(void)
{
    fan_sim_config c = config_of(1, 4, FAN_SIM_SEEDED);
    fan_sim_hooks hooks = {.before_block = before_block, .after_block = after_block};
    world w;
    memset(&w, 0, sizeof w);
    CHECK_OK(fan_sim_new(&c, &hooks, &w.m, NULL));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(fan_sim_stream(w.m, 0, false, &w.s[i], NULL));
    for (int i = 0; i < ARRAYS; i++)
        add_array(&w, i, 0);
    pair p = {.w = &w, .use_lock = true, .use_event = true};
    half h[2] = {{&p, 0}, {&p, 1}};
    thread t[2];
    fan_mutex_init(&p.lock);
    pthread_mutex_lock(&frontend);
    frontend_held = 1;
    for (int i = 0; i < 2; i++) {
        t[i] = (thread){.m = w.m, .body = half_main, .arg = &h[i]};
        CHECK_OK(fan_sim_spawn(w.m, &t[i].actor, NULL));
        pthread_create(&t[i].os, NULL, guarded_main, &t[i]);
    }
    CHECK_OK(fan_sim_join(w.m, NULL));
    CHECK_INT(frontend_held, 1);
    frontend_held = 0;
    pthread_mutex_unlock(&frontend);
    for (int i = 0; i < 2; i++)
        pthread_join(t[i].os, NULL);
    CHECK(blocked > 3);
    fan_event_drop(p.last);
    fan_mutex_fini(&p.lock);
    close(&w);
}

/* A thread's knowledge goes with spawn, lock and join, and not otherwise. */
typedef struct reader {
    world *w;
    fan_status status;
    fan_error err;
} reader;

static void reader_main(void *arg)
{
    reader *r = arg;
    fan_array *host = NULL;
    int64_t one = 1;
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, NULL));
    r->status = fan_sim_host_read(r->w->m, r->w->s[3], host, r->w->x[0], &r->err);
    fan_array_drop(host);
}

static void syncer_main(void *arg)
{
    reader *r = arg;
    r->status = fan_stream_sync(r->w->s[0], NULL);
}

static void what_a_thread_knows_goes_with_spawn_and_join(void)
{
    for (int synced = 0; synced < 2; synced++) {
        world w;
        reader r = {.w = &w};
        thread t;
        open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
        CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
        if (synced)
            CHECK_OK(fan_stream_sync(w.s[0], NULL));
        start(&t, w.m, reader_main, &r);
        CHECK_OK(fan_sim_join(w.m, NULL));
        pthread_join(t.os, NULL);
        CHECK_INT(r.status, synced ? FAN_OK : FAN_ERR_RACE);
        close(&w);
    }
    for (int threads = 1; threads <= 2; threads++) {
        world w;
        reader a = {.w = &w}, b = {.w = &w};
        thread t[2];
        open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
        CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
        start(&t[0], w.m, syncer_main, &a);
        if (threads == 2)
            start(&t[1], w.m, reader_main, &b); /* beside it: knows nothing of its sync */
        CHECK_OK(fan_sim_join(w.m, NULL));
        for (int i = 0; i < threads; i++)
            pthread_join(t[i].os, NULL);
        CHECK_OK(a.status);
        if (threads == 2)
            CHECK_INT(b.status, FAN_ERR_RACE);
        else
            CHECK_OK(launch(&w, w.s[1], "after", 0, 0, 1)); /* who joined knows what it knew */
        close(&w);
    }
}

static const char *script;
static size_t script_at;

static int follow(void *ctx, uint32_t enabled)
{
    (void)ctx;
    int a = script[script_at] ? script[script_at++] - '0' : -1;
    if (a >= 0 && enabled >> a & 1)
        return a;
    for (a = 0; !(enabled >> a & 1); a++)
        continue;
    return a;
}

/* Who reads on the host, and who then writes on a stream from another thread, must hand over. */
static void writer_main(void *arg)
{
    reader *r = arg;
    r->status = launch(r->w, r->w->s[1], "write", 0, 0, 1);
}

static void races_between_threads_name_them(void)
{
    world w;
    reader a = {.w = &w}, b = {.w = &w};
    thread t[2];
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    script = "0000000000000";
    script_at = 0;
    fan_sim_set_chooser(w.m, &(fan_sim_chooser){.choose = follow});
    start(&t[0], w.m, reader_main, &a);
    start(&t[1], w.m, writer_main, &b);
    CHECK_OK(fan_sim_join(w.m, NULL));
    for (int i = 0; i < 2; i++)
        pthread_join(t[i].os, NULL);
    CHECK_OK(a.status);
    CHECK_INT(b.status, FAN_ERR_RACE);
    CHECK_STR(w.text, "race on 8 bytes of sim:0: 'write' (stream 3 of sim:0) writes what host thread 0 reads: nothing orders them; missing: what is queued on stream 3 "
                      "of sim:0 must be queued after host thread 0 has read (a lock, or a join)");
    close(&w);
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 1);
    fan_stream *d = legacy_of(&w, 0);
    CHECK_OK(launch(&w, d, "first", 0, 0, 1));
    CHECK_INT(launch(&w, w.s[1], "second", 0, 0, 1), FAN_ERR_RACE);
    CHECK_STR(w.text, "race on 8 bytes of sim:0: 'second' (stream 3 of sim:0) writes what 'first' (the legacy default stream of sim:0) wrote: nothing orders them; "
                      "missing: stream 3 of sim:0 must wait for the legacy default stream of sim:0 after 'first' (Stream(\"sim:0\", 3).wait(Stream(\"sim:0\", 1)))");
    fan_stream_drop(d);
    close(&w);
}

/* ---- deadlocks ---- */

typedef struct tangle {
    world *w;
    fan_mutex *first, *second;
    fan_cond *never;
    bool gave_up;
    fan_status after;
} tangle;

static void tangle_main(void *arg)
{
    tangle *t = arg;
    fan_mutex_lock(t->first);
    fan_mutex_lock(t->second);
    fan_mutex_unlock(t->second);
    fan_mutex_unlock(t->first);
}

static void waiter_main(void *arg)
{
    tangle *t = arg;
    fan_mutex_lock(t->first);
    while (!fan_sim_gave_up(t->w->m))
        fan_cond_wait(t->never, t->first);
    t->gave_up = true;
    fan_mutex_unlock(t->first);
    t->after = fan_stream_sync(t->w->s[0], NULL);
}

static void a_deadlock_is_named_and_ends_the_join(void)
{
    world w;
    fan_error err = {0};
    fan_mutex one, two;
    fan_cond never;
    thread t[2];
    fan_mutex_init(&one);
    fan_mutex_init(&two);
    fan_cond_init(&never);
    /* Nobody will ever change what is waited for: the waiter is woken to look up. */
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    strcpy(site_now, "scenario.py:7");
    tangle a = {.w = &w, .first = &one, .never = &never};
    start(&t[0], w.m, waiter_main, &a);
    CHECK_INT(fan_sim_join(w.m, &err), FAN_ERR_DEADLOCK);
    CHECK_STR(err.text, "deadlock: host thread 0 (scenario.py:7) waits for a change that no other makes");
    pthread_join(t[0].os, NULL);
    CHECK(a.gave_up);
    CHECK_INT(a.after, FAN_ERR_DEADLOCK);
    CHECK(!fan_sim_abandoned(w.m) && fan_sim_gave_up(w.m) && !fan_sim_stuck(w.m, 0));
    CHECK_INT(fan_sim_synchronize(w.m, &err), FAN_ERR_DEADLOCK);
    int actor;
    CHECK_INT(fan_sim_spawn(w.m, &actor, &err), FAN_ERR_DEADLOCK);
    close(&w);
    /* Two that wait for it do not take each other for somebody who changes something. */
    site_now[0] = '\0';
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    tangle both[2] = {{.w = &w, .first = &one, .never = &never}, {.w = &w, .first = &one, .never = &never}};
    for (int i = 0; i < 2; i++)
        start(&t[i], w.m, waiter_main, &both[i]);
    CHECK_INT(fan_sim_join(w.m, &err), FAN_ERR_DEADLOCK);
    CHECK_STR(err.text, "deadlock: host thread 0 waits for a change that no other makes; host thread 1 waits for a change that no other makes");
    for (int i = 0; i < 2; i++)
        pthread_join(t[i].os, NULL);
    close(&w);
    /* Two locks in two orders: by one order of the threads it is a deadlock, by another it is none. */
    site_now[0] = '\0';
    for (int good = 1; good >= 0; good--) {
        open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
        tangle x = {.w = &w, .first = &one, .second = &two}, y = {.w = &w, .first = &two, .second = &one};
        script = good ? "000000000" : "00110101";
        script_at = 0;
        fan_sim_set_chooser(w.m, &(fan_sim_chooser){.choose = follow});
        thread *stays = fan_alloc(2 * sizeof *stays);
        start(&stays[0], w.m, tangle_main, &x);
        start(&stays[1], w.m, tangle_main, &y);
        CHECK_INT(fan_sim_join(w.m, &err), good ? FAN_OK : FAN_ERR_DEADLOCK);
        CHECK_INT(fan_sim_stuck(w.m, 0), !good);
        CHECK_INT(fan_sim_stuck(w.m, 1), !good);
        if (good) {
            pthread_join(stays[0].os, NULL);
            pthread_join(stays[1].os, NULL);
            fan_free(stays);
        } else {
            CHECK_STR(err.text, "deadlock: host thread 0 waits for a lock that host thread 1 holds; host thread 1 waits for a lock that host thread 0 holds");
        }
        close(&w); /* the stuck threads stay, and the machine with them */
    }
    fan_cond_fini(&never);
}

static int nobody(void *ctx, uint32_t enabled)
{
    int *steps = ctx;
    return (*steps)-- > 0 ? __builtin_ctz(enabled) : -1;
}

static void an_abandoned_run_ends_quickly(void)
{
    int64_t live = fan_mem_get().live;
    for (int steps = 0; steps < 30; steps++) {
        world w;
        pair p = {.w = &w, .use_lock = true, .use_event = true};
        half h[2] = {{&p, 0}, {&p, 1}};
        thread t[2];
        int left = steps;
        open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
        fan_mutex_init(&p.lock);
        fan_sim_set_chooser(w.m, &(fan_sim_chooser){.choose = nobody, .ctx = &left});
        for (int i = 0; i < 2; i++)
            start(&t[i], w.m, half_main, &h[i]);
        CHECK_OK(fan_sim_join(w.m, NULL));
        for (int i = 0; i < 2; i++)
            pthread_join(t[i].os, NULL);
        CHECK_INT(fan_sim_abandoned(w.m), left < 0);
        CHECK_INT(fan_sim_join(w.m, NULL), left < 0 ? FAN_ERR_STATE : FAN_OK);
        if (steps == 0)
            CHECK(!t[0].began && !t[1].began);
        fan_event_drop(p.last);
        fan_mutex_fini(&p.lock);
        close(&w);
    }
    CHECK_INT(fan_mem_get().live, live);
}

static void many_threads_one_after_the_other(void)
{
    world w;
    reader r = {.w = &w};
    thread t[32];
    fan_error err = {0};
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    for (int round = 0; round < 3; round++) {
        int actor;
        for (int i = 0; i < 32; i++) {
            start(&t[i], w.m, syncer_main, &r);
            CHECK_INT(t[i].actor, i);
        }
        CHECK_INT(fan_sim_spawn(w.m, &actor, &err), FAN_ERR_VALUE);
        CHECK_OK(fan_sim_join(w.m, NULL));
        for (int i = 0; i < 32; i++)
            pthread_join(t[i].os, NULL);
    }
    /* An actor whose thread could not be started. */
    int actor;
    CHECK_OK(fan_sim_spawn(w.m, &actor, &err));
    fan_sim_thread_end(w.m, actor);
    CHECK_OK(fan_sim_join(w.m, NULL));
    close(&w);
}

/* Threads that nobody spawned use a machine side by side; each orders its own work, so there is one value. */
static void *beside(void *arg)
{
    half *h = arg;
    world *w = h->p->w;
    for (int i = 0; i < 300; i++) {
        CHECK_OK(launch(w, w->s[h->i], "k", h->i, 0, (uint64_t)i));
        if (i % 16 == 0)
            CHECK_OK(fan_stream_sync(w->s[h->i], NULL));
        if (i % 7 == 0) {
            fan_event *e;
            CHECK_OK(fan_event_record(w->s[h->i], &e, NULL));
            CHECK_OK(fan_stream_wait(w->s[(h->i + 1) % 4], e, NULL, NULL));
            fan_event_drop(e);
        }
    }
    return NULL;
}

static void unspawned_threads_may_use_a_machine_at_once(void)
{
    uint64_t first = 0;
    for (int round = 0; round < 6; round++) {
        world w;
        pair p = {.w = &w};
        half h[4] = {{&p, 0}, {&p, 1}, {&p, 2}, {&p, 3}};
        pthread_t t[4];
        open(&w, config_of(1, (uint64_t)round, FAN_SIM_SEEDED), 0);
        for (int i = 0; i < 4; i++)
            pthread_create(&t[i], NULL, beside, &h[i]);
        for (int i = 0; i < 4; i++)
            pthread_join(t[i], NULL);
        CHECK_INT(fan_sim_races(w.m), 0);
        uint64_t v = value(&w);
        if (round == 0)
            first = v;
        CHECK(v == first);
        close(&w);
    }
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    the_axioms_hold_by_verdict_and_by_value();
    a8_memory_is_used_again_at_once_and_poisoned_before();
    races_name_both_sides_and_the_wait_that_is_missing();
    happens_before_and_values_agree();
    a_wait_wrongly_left_out_is_found();
    named_schedules_are_what_they_say();
    kernels_may_fail_and_may_call_in();
    the_clock_shows_overlap();
    arrays_outlive_the_machine_that_made_them();
    what_a_machine_was_told_it_says();
    bad_arguments_are_refused();
    every_job_touches_what_it_says();
    every_call_can_fail_once_and_changes_nothing();
    a_reset_machine_is_a_new_one();
    judging_alone_is_fast();
    threads_act_by_the_seed_one_at_a_time();
    whatever_blocks_lets_go_of_the_frontends_lock();
    what_a_thread_knows_goes_with_spawn_and_join();
    races_between_threads_name_them();
    an_abandoned_run_ends_quickly();
    many_threads_one_after_the_other();
    unspawned_threads_may_use_a_machine_at_once();
    the_reduction_loses_nothing_on_real_threads();
    CHECK_INT(fan_mem_get().live, live);
    a_deadlock_is_named_and_ends_the_join();
    return check_done();
}
