/* Two oracles of the simulated machine against each other: happens-before, and the values under
 * every order. */
#define _POSIX_C_SOURCE 200809L
#include "sim_world.h"

/* ---- two oracles ---- */

#define WORK 6
#define OPS 20

typedef enum {
    LAUNCH,
    RECORD,
    WAIT,
    SYNC,
    READ
} kind;

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
    int most = 8 + below(OPS - 8);
    int work = 2 + below(WORK - 1);
    while (p.n < most) {
        step *s = &p.all[p.n];
        *s = (step){.stream = below(12) ? below(3) : STREAMS,
                    .event = below(3),
                    .to = below(3),
                    .from = (uint32_t)below(8)};
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
        case 6: s->kind = RECORD; break;
        case 7:
        case 8: s->kind = WAIT; break;
        default: s->kind = below(2) ? SYNC : READ;
        }
        p.n++;
    }
    return p;
}

/* The partial order, worked out here from the axioms: before[i] has the works that come before work
 * i. Reads of the host are works that run when queued. */
typedef struct order_of {
    int n;
    uint32_t before[OPS];
    int to[OPS];
    uint32_t from[OPS];
    bool host[OPS];
} order_of;

/* legacy_orders: whether work on stream t comes after that of u by the legacy stream's order. */
static bool legacy_orders(const program *p, int t, int u)
{
    if (t == STREAMS)
        return p->blocking >> u & 1;
    return u == STREAMS;
}

static order_of work_out(const program *p)
{
    order_of o = {0};
    uint32_t stream[STREAMS + 1] = {0};
    uint32_t event[3] = {0};
    uint32_t host = 0;
    bool recorded[3] = {false};
    for (int i = 0; i < p->n; i++) {
        const step *s = &p->all[i];
        int t = s->stream;
        bool blocks = t == STREAMS || (p->blocking >> t & 1);
        /* a wait for nothing is no operation at all */
        bool on_stream = s->kind != WAIT || recorded[s->event];
        if (blocks && on_stream) {
            for (int u = 0; u <= STREAMS; u++) {
                if (u != t && legacy_orders(p, t, u))
                    stream[t] |= stream[u];
            }
        }
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
        case SYNC: host |= stream[t]; break;
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
        uint64_t v = (uint64_t)i + 1;
        uint64_t was = o->to[i] >= 0 ? r->x[o->to[i]] : 0;
        for (int k = 0; k < ARRAYS; k++) {
            if (o->from[i] >> k & 1)
                v = mix(v, r->x[k]);
        }
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

/* play: the program on a machine; its number of races. `elide` false: every wait goes to the
 * backend. verdicts (may be NULL): of each step. */
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
        case LAUNCH: status = launch(w, on, "k", s->to, s->from, ++work); break;
        case RECORD: CHECK_OK(fan_event_rerecord(e[s->event], on, NULL)); break;
        case WAIT:
            if (elide) {
                CHECK_OK(fan_stream_wait(on, e[s->event], NULL, NULL));
            } else {
                CHECK_OK(on->device->backend->wait(on, e[s->event], NULL));
            }
            break;
        case SYNC: CHECK_OK(fan_stream_sync(on, NULL)); break;
        case READ: status = fan_sim_host_read(w->m, on, host, w->x[s->to], NULL); break;
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
#else
#define PROGRAMS 6000
#endif

static void happens_before_and_values_agree(void)
{
    long racy = 0;
    long clean = 0;
    long orders = 0;
    long elided = 0;
    long differed = 0;
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
        racy += races > 0;
        clean += races == 0;
        close(&w);
        close(&without);
        close(&judged);
        /* A program without a race has one value, whatever the seed; one with a race mostly has
         * not. */
        uint64_t first = 0;
        bool differs = false;
        for (uint64_t seed = 0; seed < 6; seed++) {
            open(&w, config_of(1, seed, seed < 2 ? FAN_SIM_SEEDED : (fan_sim_schedule)(seed - 1)),
                 p.blocking);
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
    printf("%d programs: %ld with a race, %ld without (%ld orders run by hand); %ld gave other "
           "values on the machine; "
           "%ld waits left out\n",
           PROGRAMS, racy, clean, orders, differed, elided);
    CHECK(racy > 300 && clean > 300);
    CHECK(elided > 300 && differed > 100);
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
    CHECK_INT(fan_clock_set(&w.s[1]->clock, w.s[0]->lane, e->count), 0); /* planted */
    CHECK_OK(fan_stream_wait(w.s[1], e, &elided, NULL));
    CHECK(elided);
    CHECK_INT(fan_sim_unsound(w.m), 1);
    CHECK_INT(launch(&w, w.s[1], "k", 1, 1, 1), FAN_ERR_RACE);
    fan_event_drop(e);
    close(&w);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    happens_before_and_values_agree();
    a_wait_wrongly_left_out_is_found();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
