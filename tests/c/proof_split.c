/* Split locks: the buffer's own yield points (before each lock, after each unlock, before each
 * device call) are the steps. Every host thread is an OS thread of its own, and the machine lets
 * one of them act at a time (csrc/device/sim/host_sched.h).
 *
 *   adds    two producers; who returns last takes
 *   take    one contribution is there; a producer adds another while the consumer takes
 *   ready   two are expected, one is there; a producer adds the other while the consumer asks
 *           whether they are through; if so, every one must have been parked, and he takes
 *   look    one contribution is there; a producer adds another while a snapshot is made
 *   clear   one contribution is there; a producer adds another while the slot is cleared
 *   takes   two contributions are there; two consumers take
 *
 * What is left is taken after the join: each contribution must come out once, of whichever take
 * (none twice and none lost where nothing is cleared). */
#define _GNU_SOURCE
#include "proof.h"

#include "base/thread.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const split_scene_words[SPLIT_SCENES] = {"adds", "take",  "ready",
                                                     "look", "clear", "takes"};

enum {
    ADDS,
    TAKE,
    READY,
    LOOK,
    CLEAR,
    TAKES
};
enum {
    THREADS = 2
};
#define THE_COUNT (UINT64_C(99) << 56)

typedef struct stage {
    run r;
    world w;
    int scene;
    fan_explore *x;
    int left; /* adds that have not returned */
    int actor[THREADS];
} stage;

/* ---- host threads, kept from run to run ---- */

typedef struct worker {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t woken;
    stage *job; /* NULL: nothing to do */
    int part;
    bool idle, quit;
} worker;

static worker workers[THREADS];

static void play(stage *s, int part);

static void *work(void *ctx)
{
    worker *w = ctx;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->job && !w->quit)
            pthread_cond_wait(&w->woken, &w->lock);
        if (!w->job)
            break;
        stage *s = w->job;
        pthread_mutex_unlock(&w->lock);
        if (fan_sim_thread_begin(s->w.m, s->actor[w->part])) {
            play(s, w->part);
            fan_sim_thread_end(s->w.m, s->actor[w->part]);
        }
        pthread_mutex_lock(&w->lock);
        w->job = NULL;
        w->idle = true;
        pthread_cond_broadcast(&w->woken);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static bool workers_open(void)
{
    for (int i = 0; i < THREADS; i++) {
        worker *w = &workers[i];
        memset(w, 0, sizeof *w);
        pthread_mutex_init(&w->lock, NULL);
        pthread_cond_init(&w->woken, NULL);
        w->idle = true;
        w->part = i;
        if (pthread_create(&w->thread, NULL, work, w) != 0)
            return false;
    }
    return true;
}

static void workers_close(void)
{
    for (int i = 0; i < THREADS; i++) {
        worker *w = &workers[i];
        pthread_mutex_lock(&w->lock);
        w->quit = true;
        pthread_cond_broadcast(&w->woken);
        pthread_mutex_unlock(&w->lock);
        pthread_join(w->thread, NULL);
        pthread_cond_destroy(&w->woken);
        pthread_mutex_destroy(&w->lock);
    }
}

static void start(stage *s, int part)
{
    worker *w = &workers[part];
    pthread_mutex_lock(&w->lock);
    w->job = s;
    w->idle = false;
    pthread_cond_broadcast(&w->woken);
    pthread_mutex_unlock(&w->lock);
}

static void finish(int part)
{
    worker *w = &workers[part];
    pthread_mutex_lock(&w->lock);
    while (!w->idle)
        pthread_cond_wait(&w->woken, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

/* ---- the scenes ---- */

/* What is there before the threads begin, by the main thread. */
static int before(int scene)
{
    if (scene == ADDS)
        return 0;
    return scene == TAKES ? 2 : 1;
}

static void count(stage *s)
{
    (void)fan_explore_access(s->x, THE_COUNT, true);
    s->left--;
}

static void produce_and_add(stage *s, int i)
{
    if (run_produce(&s->r, i) && run_add(&s->r, i) && s->r.c->let_go == LET_GO_LATER)
        (void)run_let_go(&s->r, i);
}

static bool all_parked(stage *s)
{
    fan_error err = {0};
    fan_slot_view slot;
    fan_item_view items[MAX_K];
    bool parked = fan_buffer_look(s->r.b, 0, &slot, items, MAX_K, &err) == FAN_OK;
    for (size_t i = 0; parked && i < slot.items; i++)
        parked = items[i].ready;
    if (!parked && err.text[0]) {
        run_fail(&s->r, FAILED, err.text);
    } else if (!parked) {
        run_fail(&s->r, MISCOUNT, "ready, but a contribution has not been parked");
    }
    return parked;
}

static void play(stage *s, int part)
{
    run *r = &s->r;
    fan_error err = {0};
    bool ready = false;
    if (part == 0 || s->scene == ADDS) {
        if (s->scene == TAKES) {
            (void)run_consume(r, false);
            return;
        }
        if (s->scene == ADDS && (r->driver & DRIVER_COUNT))
            count(s);
        produce_and_add(s, before(s->scene) ? before(s->scene) : part);
        if (s->scene != ADDS)
            return;
        if (!(r->driver & DRIVER_COUNT))
            count(s);
        if (s->left == 0)
            (void)run_consume(r, true);
        return;
    }
    switch (s->scene) {
    case TAKE:
    case TAKES: (void)run_consume(r, false); return;
    case READY:
        if (fan_buffer_ready(r->b, 0, &ready, &err) != FAN_OK) {
            run_fail(r, FAILED, err.text);
        } else if (ready && all_parked(s)) {
            (void)run_consume(r, true);
        }
        return;
    case LOOK: (void)run_snapshot(r); return;
    default:
        if (fan_buffer_clear(r->b, &err) != FAN_OK)
            run_fail(r, FAILED, err.text);
        r->taken |= 1; /* it is gone, and so may the other be */
        return;
    }
}

/* run_scene: one run. false: it was abandoned as redundant. */
static bool run_scene(stage *s)
{
    run *r = &s->r;
    fan_error err = {0};
    int n = THREADS;
    run_begin(r);
    if (!run_buffer(r))
        abort();
    s->left = 2;
    for (int i = 0; i < before(s->scene); i++)
        produce_and_add(s, i);
    if (s->scene == READY && fan_buffer_expect(r->b, 0, 2, &err) != FAN_OK)
        run_fail(r, FAILED, err.text);
    for (int i = 0; i < n; i++) {
        if (fan_sim_spawn(s->w.m, &s->actor[i], &err) != FAN_OK) {
            fprintf(stderr, "%s; %s\n", err.text, r->why);
            abort();
        }
    }
    for (int i = 0; i < n; i++)
        start(s, i);
    fan_status status = fan_sim_join(s->w.m, &err);
    if (status == FAN_ERR_DEADLOCK) {
        run_fail(r, STUCK, err.text);
        r->verdict = STUCK;
        return true; /* its threads are lost, and the machine with them */
    }
    for (int i = 0; i < n; i++)
        finish(i);
    if (fan_sim_abandoned(s->w.m)) {
        r->verdict = FINE;
        fan_buffer_free(r->b);
        r->b = NULL;
        content_reset();
        /* Holds are let go while the machine is given up, so that nothing is judged. */
        for (int i = 0; i < r->c->K; i++) {
            fan_array_drop(r->g[i]);
            r->g[i] = NULL;
        }
        fan_array_drop(r->y);
        r->y = NULL;
        return false;
    }
    if (r->verdict == FINE && fan_sim_races(s->w.m))
        run_fail(r, RACED, "a release races");
    bool unread = s->scene != ADDS && r->taken != 3 && r->c->mode != MODE_CLEAR;
    if (r->verdict == FINE && unread)
        (void)run_consume(r, false);
    if (r->verdict == FINE && s->scene != CLEAR && r->taken != 3)
        run_fail(r, MISCOUNT, "a contribution was lost");
    if (r->verdict == FINE)
        (void)(run_end_of_pass(r) && run_read_back(r));
    return true;
}

/* ---- the search ---- */

static int choose(void *ctx, uint32_t enabled)
{
    stage *s = ctx;
    return fan_explore_choose(s->x, enabled);
}

static void touched(void *ctx, uint64_t object, fan_sched_mode how)
{
    stage *s = ctx;
    (void)fan_explore_access(s->x, object, how);
}

/* warm: events enough that no run makes one: a run that repeats another has the same yield
 * points. */
static bool warm(world *w)
{
    enum {
        MANY = 64
    };
    fan_event *e[MANY];
    for (int d = 0; d < w->D; d++) {
        for (int i = 0; i < MANY; i++) {
            if (fan_event_record(w->stream[d * w->S], &e[i], NULL) != FAN_OK)
                return false;
        }
        for (int i = 0; i < MANY; i++)
            fan_event_drop(e[i]);
    }
    return true;
}

static bool search_scene(stage *s, const split_search *how, const config *c, tally *out,
                         verdict *worst)
{
    bool sound = true;
    *worst = FINE;
    s->x = fan_explore_new(how->reduce, how->limit);
    run *r = &s->r;
    memset(r, 0, sizeof *r);
    r->w = &s->w;
    r->c = c;
    r->driver = how->fault.driver;
    if (!s->x)
        return false;
    for (uint64_t sample = 0; !how->samples || sample < how->samples; sample++) {
        char schedule[256];
        if (how->samples)
            fan_explore_sample(s->x, how->seed + sample);
        if (!fan_explore_begin(s->x))
            break;
        bool whole = run_scene(s);
        fan_explore_schedule(s->x, schedule, sizeof schedule);
        out->steps += strlen(schedule);
        if (whole && r->verdict != STUCK)
            run_end(r);
        fan_explore_end(s->x);
        if (fan_explore_strayed(s->x)) {
            fprintf(stderr, "a scene did not repeat itself\n");
            sound = false;
            break;
        }
        if (!whole)
            continue;
        out->by[r->verdict]++;
        if (r->verdict == FINE)
            continue;
        if (*worst == FINE)
            *worst = r->verdict;
        if (!out->worst[0]) {
            char text[320];
            snprintf(out->worst, sizeof out->worst, "\"%s\" scene=%s %.80s fault=%s",
                     config_text(c, text, sizeof text), split_scene_words[s->scene], schedule,
                     how->fault.name);
            snprintf(out->sentence, sizeof out->sentence, "%s: %.900s", verdict_words[r->verdict],
                     r->why);
        }
        if (how->first || r->verdict == STUCK)
            break;
    }
    out->traces += fan_explore_runs(s->x);
    out->abandoned += fan_explore_abandoned(s->x);
    out->configs++;
    out->failing += *worst != FINE;
    bool is_whole = !how->limit && !how->samples;
    bool is_right = *worst == FINE && sound && is_whole;
    if (is_right && !fan_explore_complete(s->x)) {
        fprintf(stderr, "the search of a scene is not complete\n");
        sound = false;
    }
    if (*worst != STUCK) {
        fan_buffer_free(r->b);
        r->b = NULL;
    }
    fan_explore_free(s->x);
    s->x = NULL;
    return sound;
}

bool search_split(const split_search *how, tally *out)
{
    static stage s; /* threads may be lost in it */
    config c;
    cpu_set_t here, all;
    memset(out, 0, sizeof *out);
    memset(&s, 0, sizeof s);
    /* Only one thread acts at a time: on one processor the turn changes hands fastest. */
    bool pinned = sched_getaffinity(0, sizeof all, &all) == 0;
    CPU_ZERO(&here);
    int cpu = sched_getcpu();
    if (pinned && cpu >= 0) {
        CPU_SET(cpu, &here);
        pinned = sched_setaffinity(0, sizeof here, &here) == 0;
    }
    if (!world_open(&s.w, how->D, how->S, NULL) || !warm(&s.w) || !workers_open())
        return false;
    fault_plant(&how->fault, &s.w);
    fan_sim_chooser chooser = {.choose = choose, .access = touched, .ctx = &s};
    fan_sim_set_chooser(s.w.m, &chooser);
    config_plain(&c, 2, how->D, how->S);
    uint64_t raw = config_raw(2, how->D, how->S);
    bool sound = true;
    bool lost = false;
    bool over = false;
    for (uint64_t i = 0; i < raw && sound && !over; i++) {
        bool any = false;
        config_shape(&c, i);
        bool is_import = c.kin == KIN_IMPORT && how->imports;
        if (c.e != 0 || (c.kin != KIN_NONE && !is_import))
            continue;
        if (!config_part(i, how->from, how->step))
            continue;
        for (unsigned n = 0; config_options(&c, OPTIONS_FEW, n); n++) {
            for (int scene = 0; scene < SPLIT_SCENES && sound && !over; scene++) {
                verdict v;
                if (!(how->scenes >> scene & 1) || (!how->raw && !config_first(&c)))
                    continue;
                config with = c;
                with.snapshot = scene == LOOK ? c.c : -1;
                any = true;
                s.scene = scene;
                sound = search_scene(&s, how, &with, out, &v);
                if (how->seen)
                    how->seen(how->ctx, &with, scene, v);
                lost = v == STUCK;
                over = lost || (how->soon && v != FINE);
            }
        }
        out->shapes += any;
    }
    fan_fault_plant(FAN_FAULT_NONE);
    if (!lost) {
        workers_close();
        fan_sim_set_chooser(s.w.m, NULL);
        world_close(&s.w);
    }
    if (pinned)
        (void)sched_setaffinity(0, sizeof all, &all);
    return sound;
}
