/* Host threads of the simulated machine: turns, what one knows of another, deadlocks, the search of
 * their orders. */
#define _POSIX_C_SOURCE 200809L
#include "sim_world.h"
#include "device/sim/host_sched.h"

#include <sched.h>

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

/* finish: waits for all that the first n threads do. */
static void finish(world *w, const thread *t, int n)
{
    CHECK_OK(fan_sim_join(w->m, NULL));
    for (int i = 0; i < n; i++)
        pthread_join(t[i].os, NULL);
}

/* Two threads write one array on streams of their own, under a lock; the second to come waits for
 * the first's event. */
typedef struct pair {
    world *w;
    fan_mutex lock;
    fan_event *last;
    bool use_lock, use_event;
    /* without a lock: the one records it, the other waits for it, in whatever order */
    fan_event *shared;
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

static void touched(void *ctx, uint64_t object, fan_sched_mode how)
{
    fan_explore_access(ctx, object, how);
}

/* run_pair: one run under the search. false: abandoned. The outcome says whether it raced and what
 * came out. */
static bool run_pair(fan_explore *x, bool use_lock, bool use_event, uint64_t *outcome,
                     char *schedule, size_t size)
{
    world w;
    pair p = {.w = &w, .use_lock = use_lock, .use_event = use_event};
    half h[2] = {{&p, 0}, {&p, 1}};
    thread t[2];
    open(&w, config_of(1, 3, FAN_SIM_FIFO), 0);
    fan_mutex_init(&p.lock);
    CHECK_OK(fan_event_new(w.s[0]->device, &p.shared, NULL));
    fan_sim_set_chooser(w.m, &(fan_sim_chooser){.choose = choose, .access = touched, .ctx = x});
    for (int i = 0; i < 2; i++)
        start(&t[i], w.m, half_main, &h[i]);
    finish(&w, t, 2);
    bool whole = !fan_sim_abandoned(w.m);
    if (schedule)
        fan_sim_host_schedule(w.m, schedule, size);
    if (whole) {
        bool races = fan_sim_races(w.m) > 0;
        *outcome = mix(mix(races, races ? 0 : value(&w)), (uint64_t)p.who);
        CHECK_INT(fan_sim_unsound(w.m), 0);
    } else {
        fan_array *a;
        int64_t one = 1;
        CHECK_INT(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_INT8, 1, &one, NULL, &a, NULL),
                  FAN_ERR_STATE);
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
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static size_t distinct(uint64_t *v, size_t n)
{
    size_t kept = 0;
    qsort(v, n, sizeof *v, by_value);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || v[i] != v[i - 1])
            v[kept++] = v[i];
    }
    return kept;
}

static void the_reduction_loses_nothing_on_real_threads(void)
{
    static uint64_t found[2][20000];
    static const bool ways[][2] = {{true, true}, {true, false}, {false, false}};
    int64_t live = fan_mem_get().live;
    /* the whole search takes long under a sanitizer */
    for (int way = LIGHT ? 2 : 0; way < 3; way++) {
        size_t n[2] = {0, 0};
        uint64_t runs[2];
        uint64_t gone = 0;
        char one[64] = "";
        char two[64] = "";
        uint64_t first = 0;
        uint64_t again = 0;
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
        size_t a = distinct(found[0], n[0]);
        size_t b = distinct(found[1], n[1]);
        printf("lock %d, event %d: %" PRIu64 " orders, %zu outcomes; reduced: %" PRIu64
               " runs, %" PRIu64 " abandoned, %zu outcomes\n",
               ways[way][0], ways[way][1], runs[0], a, runs[1], gone, b);
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
            /* which joins first */
            CHECK_OK(again ? fan_sim_join(w.m, NULL) : fan_sim_synchronize(w.m, NULL));
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

/* What blocks lets go of the frontend's lock first: here a mutex that every thread holds while it
 * is in C. */
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
        w.s[i] = stream_of(w.m, 0, false);
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
    fan_array *host = number_on_host();
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
        finish(&w, &t, 1);
        CHECK_INT(r.status, synced ? FAN_OK : FAN_ERR_RACE);
        close(&w);
    }
    for (int threads = 1; threads <= 2; threads++) {
        world w;
        reader a = {.w = &w};
        reader b = {.w = &w};
        thread t[2];
        open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
        CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
        start(&t[0], w.m, syncer_main, &a);
        if (threads == 2)
            start(&t[1], w.m, reader_main, &b); /* beside it: knows nothing of its sync */
        finish(&w, t, threads);
        CHECK_OK(a.status);
        if (threads == 2) {
            CHECK_INT(b.status, FAN_ERR_RACE);
        } else {
            CHECK_OK(launch(&w, w.s[1], "after", 0, 0, 1)); /* who joined knows what it knew */
        }
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
    reader a = {.w = &w};
    reader b = {.w = &w};
    thread t[2];
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    script = "0000000000000";
    script_at = 0;
    fan_sim_set_chooser(w.m, &(fan_sim_chooser){.choose = follow});
    start(&t[0], w.m, reader_main, &a);
    start(&t[1], w.m, writer_main, &b);
    finish(&w, t, 2);
    CHECK_OK(a.status);
    CHECK_INT(b.status, FAN_ERR_RACE);
    CHECK_STR(w.text, "race on 8 bytes of sim:0: 'write' (stream 3 of sim:0) writes what host "
                      "thread 0 reads: nothing "
                      "orders them; missing: what is queued on stream 3 "
                      "of sim:0 must be queued after host thread 0 has read (a lock, or a join)");
    close(&w);
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 1);
    fan_stream *d = legacy_of(&w, 0);
    CHECK_OK(launch(&w, d, "first", 0, 0, 1));
    CHECK_INT(launch(&w, w.s[1], "second", 0, 0, 1), FAN_ERR_RACE);
    CHECK_STR(
        w.text,
        "race on 8 bytes of sim:0: 'second' (stream 3 of sim:0) writes what 'first' (the legacy "
        "default "
        "stream of sim:0) wrote: nothing orders them; "
        "missing: stream 3 of sim:0 must wait for the legacy default stream of sim:0 after 'first' "
        "(Stream(\"sim:0\", 3).wait(Stream(\"sim:0\", 1)))");
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

/* Nobody will ever change what is waited for: the waiter is woken to look up. */
static void a_wait_for_nobody_is_named_and_ends_the_join(void)
{
    world w;
    fan_error err = {0};
    fan_mutex one;
    fan_cond never;
    thread t[2];
    fan_mutex_init(&one);
    fan_cond_init(&never);
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    strcpy(site_now, "scenario.py:7");
    tangle a = {.w = &w, .first = &one, .never = &never};
    start(&t[0], w.m, waiter_main, &a);
    CHECK_INT(fan_sim_join(w.m, &err), FAN_ERR_DEADLOCK);
    CHECK_STR(
        err.text,
        "deadlock: host thread 0 (scenario.py:7) waits for a change that no other thread makes");
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
    tangle both[2] = {{.w = &w, .first = &one, .never = &never},
                      {.w = &w, .first = &one, .never = &never}};
    for (int i = 0; i < 2; i++)
        start(&t[i], w.m, waiter_main, &both[i]);
    CHECK_INT(fan_sim_join(w.m, &err), FAN_ERR_DEADLOCK);
    CHECK_STR(err.text, "deadlock: host thread 0 waits for a change that no other thread makes; "
                        "host thread 1 waits for a "
                        "change that no other thread makes");
    for (int i = 0; i < 2; i++)
        pthread_join(t[i].os, NULL);
    close(&w);
    fan_cond_fini(&never);
}

/* Two locks in two orders: by one order of the threads it is a deadlock, by another it is none. */
static void a_deadlock_is_named_and_ends_the_join(void)
{
    world w;
    fan_error err = {0};
    fan_mutex one, two;
    fan_mutex_init(&one);
    fan_mutex_init(&two);
    site_now[0] = '\0';
    for (int good = 1; good >= 0; good--) {
        open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
        tangle x = {.w = &w, .first = &one, .second = &two};
        tangle y = {.w = &w, .first = &two, .second = &one};
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
            CHECK_STR(
                err.text,
                "deadlock: host thread 0 waits for a lock that host thread 1 holds; host thread 1 "
                "waits for a lock that host thread 0 holds");
        }
        close(&w); /* the stuck threads stay, and the machine with them */
        CHECK(!fan_sched_active());
    }
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
        finish(&w, t, 2);
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
        finish(&w, t, 32);
    }
    /* An actor whose thread could not be started. */
    int actor;
    CHECK_OK(fan_sim_spawn(w.m, &actor, &err));
    fan_sim_thread_end(w.m, actor);
    CHECK_OK(fan_sim_join(w.m, NULL));
    close(&w);
}

/* Threads that nobody spawned use a machine side by side; each orders its own work, so there is one
 * value. */
static void *beside(void *arg)
{
    half *h = arg;
    world *w = h->p->w;
    for (int i = 0; i < 300; i++) {
        CHECK_OK(launch(w, w->s[h->i], "k", h->i, 0, (uint64_t)i));
        if (i % 16 == 0)
            CHECK_OK(fan_stream_sync(w->s[h->i], NULL));
        if (i % 7 == 0) {
            order(w->s[(h->i + 1) % 4], w->s[h->i]);
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

/* A kernel that runs until another thread stands by, which says so by before_block. */
static atomic_int standing;
static atomic_int stood;

static void *stands_before(void *ctx)
{
    (void)ctx;
    atomic_store(&standing, 1);
    return NULL;
}

static void stands_after(void *ctx, void *before)
{
    (void)ctx, (void)before;
    atomic_fetch_add(&stood, 1);
}

static void *stand_by(void *m)
{
    CHECK_OK(fan_sim_synchronize(m, NULL));
    return NULL;
}

typedef struct waiting_kernel {
    fan_sim *m;
    pthread_t other;
} waiting_kernel;

static fan_status runs_until_another_stands_by(void *ctx, fan_error *err)
{
    waiting_kernel *k = ctx;
    (void)err;
    pthread_create(&k->other, NULL, stand_by, k->m);
    while (!atomic_load(&standing))
        sched_yield();
    return FAN_OK;
}

/* Neither before_block nor after_block is called with a lock of the machine's held: else this never
 * ends. */
static void a_thread_stands_by_while_another_one_runs_the_machine(void)
{
    fan_sim_config c = config_of(1, 0, FAN_SIM_FIFO);
    fan_sim_hooks hooks = {.before_block = stands_before, .after_block = stands_after};
    waiting_kernel k = {.m = NULL};
    CHECK_OK(fan_sim_new(&c, &hooks, &k.m, NULL));
    fan_stream *s = stream_of(k.m, 0, false);
    fan_sim_kernel kernel = {.name = "k", .fn = runs_until_another_stands_by, .ctx = &k, .us = -1};
    CHECK_OK(fan_sim_launch(k.m, s, &kernel, NULL));
    CHECK_OK(fan_sim_synchronize(k.m, NULL));
    pthread_join(k.other, NULL);
    CHECK_INT(atomic_load(&stood), 1);
    fan_stream_drop(s);
    fan_sim_drop(k.m);
}

/* The machine's answer to a wait: others have acted, so that nobody dozes; in a run that is given
 * up, too. */
typedef struct answered {
    fan_mutex lock;
    bool changed, waited, acted;
} answered;

static void waits_once(void *arg)
{
    answered *t = arg;
    const fan_thread_hooks *h = fan_thread_get_hooks();
    if (t->changed)
        return;
    t->waited = true;
    t->acted = h->wait(h->ctx, t->lock.id);
}

static void tells(void *arg)
{
    answered *t = arg;
    const fan_thread_hooks *h = fan_thread_get_hooks();
    t->changed = true;
    h->changed(h->ctx, t->lock.id);
}

static void a_wait_is_over_once_another_thread_has_acted(void)
{
    int waited = 0;
    for (uint64_t seed = 0; seed < 16; seed++) {
        world w;
        answered one = {.changed = false};
        thread t[2];
        open(&w, config_of(1, seed, FAN_SIM_SEEDED), 0);
        fan_mutex_init(&one.lock);
        start(&t[0], w.m, waits_once, &one);
        start(&t[1], w.m, tells, &one);
        finish(&w, t, 2);
        CHECK(!one.waited || one.acted);
        waited += one.waited;
        fan_mutex_fini(&one.lock);
        close(&w);
    }
    CHECK(waited > 0 && waited < 16);
}

static int pick_last(void *ctx, int n)
{
    return *(int *)ctx = n - 1;
}

/* Its list of choices begins without memory, and is full at some of these lengths: only a sanitizer
 * notices a read beyond it there. */
static void a_schedule_has_as_many_characters_as_choices_were_made(void)
{
    char text[48], cut[8];
    int picked = -1;
    fan_host_sched *t = fan_host_sched_new(1);
    fan_host_sched_set_hooks(t, &(fan_host_sched_hooks){.pick = pick_last, .ctx = &picked});
    for (size_t n = 0; n < 40; n++) {
        memset(text, '?', sizeof text);
        memset(cut, '?', sizeof cut);
        fan_host_sched_schedule(t, text, sizeof text);
        fan_host_sched_schedule(t, cut, sizeof cut - 1);
        CHECK_INT(strlen(text), n);
        CHECK_INT(strspn(text, "Y"), n);
        CHECK_INT(strlen(cut), n < 6 ? n : 6);
        CHECK_INT(cut[7], '?');
        CHECK_INT(fan_host_sched_pick(t, 2), 1);
        CHECK_INT(picked, 1);
    }
    fan_host_sched_free(t);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    a_schedule_has_as_many_characters_as_choices_were_made();
    threads_act_by_the_seed_one_at_a_time();
    whatever_blocks_lets_go_of_the_frontends_lock();
    what_a_thread_knows_goes_with_spawn_and_join();
    races_between_threads_name_them();
    an_abandoned_run_ends_quickly();
    many_threads_one_after_the_other();
    unspawned_threads_may_use_a_machine_at_once();
    a_thread_stands_by_while_another_one_runs_the_machine();
    a_wait_is_over_once_another_thread_has_acted();
    the_reduction_loses_nothing_on_real_threads();
    a_wait_for_nobody_is_named_and_ends_the_join();
    CHECK_INT(fan_mem_get().live, live);
    a_deadlock_is_named_and_ends_the_join();
    return check_done();
}
