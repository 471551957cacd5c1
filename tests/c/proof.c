/* The proof of the stream rules on the buffer's own code (docs/proof.md).
 *
 *   proof whole K D S [few|most|all] [raw] [full] [first] [part=i/n] [fault=..]
 *                                                                 adds are steps
 *   proof split D S [scene=..] [imports] [raw] [full] [first] [part=i/n] [limit=n] [fault=..]
 *                                                                 lock, unlock and device calls are
 *                                                                 steps
 *   proof values K D S [samples=n] [seed=n] [fault=..]..          order and values judge each other
 *   proof check K D S [few|most] [names] [part=i/n] fault=..      the reductions against the search
 *                                                                 without them
 *   proof sample D S [samples=n] [seed=n] [part=i/n] fault=..     split locks: random orders
 *                                                                 against the search
 *   proof kill [shallow|deep] [soon] [part=i/n] [where=..] NAME..
 *                                                                 who finds each planted fault
 *   proof replay "CONFIGURATION" SCHEDULE [fault=..]              one run of `whole`
 *   proof sizes                                                   how many configurations there are
 *
 * few, most, all: how many options (config_options). raw: each configuration, not one of each
 * class. full: no sleep sets. first: a configuration is done with when it has failed once. soon: a
 * hunt is over when a configuration has failed. part: the i-th of n, of the shapes or (check) of
 * the classes. where: on that ground alone, as the results of a hunt name it. Each line of results
 * is words and name=number pairs; the last line is "ok N checks". */
#define _GNU_SOURCE
#include "proof.h"

#include "check.h"

#include <sys/mman.h>
#include <sys/times.h>
#include <ctype.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- faults ---- */

static const char *const driver_words[] = {"count", "import-wait", "alias-wait", "alias-mark",
                                           "sync",  "elide",       "donate"};

bool fault_parse(fault *f, const char *text)
{
    memset(f, 0, sizeof *f);
    snprintf(f->name, sizeof f->name, "%s", text);
    if (strcmp(text, "none") == 0)
        return true;
    char part[96];
    const char *at = text;
    while (*at) {
        size_t n = strcspn(at, "+");
        if (n >= sizeof part)
            return false;
        memcpy(part, at, n);
        part[n] = '\0';
        if (strncmp(part, "fault:", 6) == 0) {
            f->planted = fan_fault_named(part + 6);
            if (f->planted == FAN_FAULT_NONE)
                return false;
        } else if (strncmp(part, "driver:", 7) == 0) {
            unsigned bit = 0;
            for (size_t i = 0; i < sizeof driver_words / sizeof *driver_words; i++) {
                if (strcmp(part + 7, driver_words[i]) == 0)
                    bit = 1u << i;
            }
            if (!bit)
                return false;
            f->driver |= bit;
        } else {
            uint64_t bits = fan_plan_bits(strncmp(part, "plan:", 5) == 0 ? part + 5 : part);
            if (!bits)
                return false;
            f->bits |= bits;
        }
        at += n + (at[n] == '+');
    }
    return true;
}

void fault_plant(const fault *f, world *w)
{
    fan_fault_plant(f->planted);
    fan_sim_leave_out(w->m, f->bits);
}

/* ---- whole adds ---- */

static uint64_t class_of(const config *c);

static void note(tally *out, const config *c, const fault *f, const char *schedule, const run *r)
{
    char text[320];
    if (out->worst[0])
        return;
    snprintf(out->worst, sizeof out->worst, "\"%s\" %s fault=%s", config_text(c, text, sizeof text),
             schedule[0] ? schedule : "-", f->name);
    snprintf(out->sentence, sizeof out->sentence, "%s: %.900s", verdict_words[r->verdict], r->why);
}

static void one_run(run *r, fan_explore *x, tally *out)
{
    uint32_t can;
    run_begin(r);
    while (r->verdict == FINE && (can = run_enabled(r)) != 0) {
        int actor = fan_explore_choose(x, can);
        if (actor == FAN_EXPLORE_NONE)
            break;
        run_step(r, actor, x);
        out->steps++;
    }
}

bool search_config(world *w, const search *how, const config *c, tally *out, verdict *worst)
{
    run r;
    fan_explore *x = fan_explore_new(how->reduce, 0);
    bool sound = true;
    *worst = FINE;
    if (!x || !run_open(&r, w, c))
        return false;
    r.driver = how->fault.driver;
    while (fan_explore_begin(x)) {
        char schedule[64];
        one_run(&r, x, out);
        fan_explore_schedule(x, schedule, sizeof schedule);
        run_end(&r);
        fan_explore_end(x);
        out->by[r.verdict]++;
        if (r.verdict != FINE) {
            note(out, c, &how->fault, schedule, &r);
            if (*worst == FINE)
                *worst = r.verdict;
            if (how->first || r.verdict == STUCK)
                break;
        }
    }
    out->traces += fan_explore_runs(x);
    out->abandoned += fan_explore_abandoned(x);
    out->configs++;
    out->failing += *worst != FINE;
    if (*worst == FINE && !fan_explore_complete(x)) {
        fprintf(stderr, "the search of a configuration is not complete\n");
        sound = false;
    }
    run_close(&r);
    fan_explore_free(x);
    if (*worst != FINE && getenv("PROOF_SHOW")) {
        char text[320];
        fprintf(stderr, "%" PRIu64 " %s %s\n", class_of(c), verdict_words[*worst],
                config_text(c, text, sizeof text));
    }
    return sound;
}

bool search_whole(const search *how, tally *out)
{
    world w;
    config c;
    uint64_t raw = config_raw(how->K, how->D, how->S);
    memset(out, 0, sizeof *out);
    if (!world_open(&w, how->D, how->S, NULL))
        return false;
    fault_plant(&how->fault, &w);
    config_plain(&c, how->K, how->D, how->S);
    bool sound = true;
    bool over = false;
    for (uint64_t i = 0; i < raw && sound && !over; i++) {
        bool any = false;
        if (!how->by_class && !config_part(i, how->from, how->step))
            continue;
        config_shape(&c, i);
        for (unsigned n = 0; config_options(&c, how->options, n) && sound && !over; n++) {
            verdict v;
            if (!how->raw && !config_first(&c))
                continue;
            if (how->by_class && !config_part(config_least(&c), how->from, how->step))
                continue;
            any = true;
            sound = search_config(&w, how, &c, out, &v);
            bool stuck = v == STUCK; /* a wait for nobody takes its time: one is enough */
            over = stuck || (how->soon && v != FINE);
            if (how->seen)
                how->seen(how->ctx, &c, v);
        }
        out->shapes += any;
    }
    fan_fault_plant(FAN_FAULT_NONE);
    world_close(&w);
    return sound;
}

static void say(const char *what, const tally *t, double since)
{
    uint64_t wrong = 0;
    for (int i = FINE + 1; i < VERDICTS; i++)
        wrong += t->by[i];
    printf("%s shapes=%" PRIu64 " configurations=%" PRIu64 " traces=%" PRIu64 " abandoned=%" PRIu64
           " steps=%" PRIu64 " races=%" PRIu64 " others=%" PRIu64 " failing=%" PRIu64
           " seconds=%.2f\n",
           what, t->shapes, t->configs, t->traces, t->abandoned, t->steps, t->by[RACED],
           wrong - t->by[RACED], t->failing, seconds() - since);
    if (t->worst[0])
        printf("  first: %s\n  %s\n", t->worst, t->sentence);
    fflush(stdout);
}

/* ---- the command line ---- */

static bool word(int argc, char **argv, const char *which)
{
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], which) == 0)
            return true;
    }
    return false;
}

static const char *option(int argc, char **argv, const char *which)
{
    size_t n = strlen(which);
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], which, n) == 0 && argv[i][n] == '=')
            return argv[i] + n + 1;
    }
    return NULL;
}

static uint64_t number(int argc, char **argv, const char *which, uint64_t otherwise)
{
    const char *text = option(argc, argv, which);
    if (!text)
        return otherwise;
    return strtoull(text, NULL, 10);
}

static void fault_asked(fault *f, const char *text)
{
    if (!fault_parse(f, text)) {
        fprintf(stderr, "no such fault: %s\n", text);
        exit(2);
    }
}

static fault the_fault(int argc, char **argv)
{
    fault f;
    const char *text = option(argc, argv, "fault");
    fault_asked(&f, text ? text : "none");
    return f;
}

static richness how_rich(int argc, char **argv)
{
    if (word(argc, argv, "all"))
        return OPTIONS_ALL;
    return word(argc, argv, "most") ? OPTIONS_MOST : OPTIONS_FEW;
}

static void part(int argc, char **argv, uint64_t *from, uint64_t *step)
{
    const char *text = option(argc, argv, "part");
    *from = 0;
    *step = 0;
    if (text && sscanf(text, "%" SCNu64 "/%" SCNu64, from, step) != 2)
        exit(2);
}

static void do_whole(int argc, char **argv)
{
    double since = seconds();
    char title[64];
    tally t;
    search how = {.K = atoi(argv[0]),
                  .D = atoi(argv[1]),
                  .S = atoi(argv[2]),
                  .options = how_rich(argc, argv),
                  .raw = word(argc, argv, "raw"),
                  .reduce = !word(argc, argv, "full"),
                  .first = word(argc, argv, "first"),
                  .fault = the_fault(argc, argv)};
    part(argc, argv, &how.from, &how.step);
    CHECK(search_whole(&how, &t));
    snprintf(title, sizeof title, "whole K=%d D=%d S=%d", how.K, how.D, how.S);
    say(title, &t, since);
    CHECK(t.traces > 0);
    if (strcmp(how.fault.name, "none") == 0)
        CHECK_INT(t.failing, 0);
}

static void do_split(int argc, char **argv)
{
    double since = seconds();
    char title[64];
    tally t;
    split_search how = {.D = atoi(argv[0]),
                        .S = atoi(argv[1]),
                        .raw = word(argc, argv, "raw"),
                        .reduce = !word(argc, argv, "full"),
                        .first = word(argc, argv, "first"),
                        .imports = word(argc, argv, "imports"),
                        .limit = number(argc, argv, "limit", 0),
                        .fault = the_fault(argc, argv)};
    const char *scene = option(argc, argv, "scene");
    part(argc, argv, &how.from, &how.step);
    for (int i = 0; i < SPLIT_SCENES; i++) {
        if (scene && strcmp(scene, split_scene_words[i]) != 0)
            continue;
        how.scenes = 1u << i;
        CHECK(search_split(&how, &t));
        snprintf(title, sizeof title, "split D=%d S=%d scene=%s", how.D, how.S,
                 split_scene_words[i]);
        say(title, &t, since);
        CHECK(t.traces > 0);
        if (strcmp(how.fault.name, "none") == 0)
            CHECK_INT(t.failing, 0);
        since = seconds();
    }
}

/* ---- the reductions, checked ---- */

/* Which classes fail: an open table from class and options to what was seen. */
typedef struct table {
    struct entry {
        uint64_t key;
        uint8_t seen; /* 1: a configuration that did not fail, 2: one that did */
    } *entries;
    size_t cap, n;
    uint64_t failing, all;
} table;

static uint64_t class_of(const config *c)
{
    uint64_t k = config_least(c);
    k = k * BUDGETS + (uint64_t)c->budget;
    k = k * 2 + c->keyed;
    k = k * LET_GOS + (uint64_t)c->let_go;
    k = k * MODES + (uint64_t)c->mode;
    k = k * 2 + c->undeclared;
    return k * 2 + c->sum_to_caller + 1;
}

static struct entry *entry_of(table *t, uint64_t key)
{
    if (2 * (t->n + 1) > t->cap) {
        table wider = {.cap = t->cap ? 2 * t->cap : 1024};
        wider.entries = calloc(wider.cap, sizeof *wider.entries);
        if (!wider.entries)
            abort();
        for (size_t i = 0; i < t->cap; i++) {
            if (t->entries[i].key)
                *entry_of(&wider, t->entries[i].key) = t->entries[i];
        }
        free(t->entries);
        t->entries = wider.entries;
        t->cap = wider.cap;
        t->n = wider.n;
    }
    size_t i = (size_t)(key * UINT64_C(0x9E3779B97F4A7C15) >> 20) & (t->cap - 1);
    while (t->entries[i].key && t->entries[i].key != key)
        i = (i + 1) & (t->cap - 1);
    if (!t->entries[i].key) {
        t->entries[i].key = key;
        t->n++;
    }
    return &t->entries[i];
}

static void see(void *ctx, const config *c, verdict v)
{
    table *t = ctx;
    entry_of(t, class_of(c))->seen |= 1u << (v != FINE);
    t->all++;
    t->failing += v != FINE;
}

/* The unreduced search over every configuration against the reduced one over classes: the same
 * classes must fail. */
static void do_check(int argc, char **argv)
{
    int K = atoi(argv[0]);
    int D = atoi(argv[1]);
    int S = atoi(argv[2]);
    uint64_t faults = 0;
    uint64_t different = 0;
    uint64_t full_failing = 0;
    uint64_t reduced_failing = 0;
    uint64_t full_traces = 0;
    uint64_t reduced_traces = 0;
    uint64_t configs = 0;
    uint64_t classes = 0;
    double since = seconds();
    /* faults that look at names: only the sleep sets are checked */
    bool names = !word(argc, argv, "names");
    for (int i = 3; i < argc; i++) {
        if (strncmp(argv[i], "fault=", 6) != 0)
            continue;
        search reduced;
        search full = {.K = K,
                       .D = D,
                       .S = S,
                       .options = how_rich(argc, argv),
                       .raw = true,
                       .first = true,
                       .by_class = true};
        table a = {0};
        table b = {0};
        tally ta, tb;
        uint64_t wrong = 0;
        fault_asked(&full.fault, argv[i] + 6);
        part(argc, argv, &full.from, &full.step);
        reduced = full;
        reduced.raw = !names;
        reduced.reduce = true;
        full.seen = reduced.seen = see;
        full.ctx = &a;
        reduced.ctx = &b;
        CHECK(search_whole(&full, &ta));
        CHECK(search_whole(&reduced, &tb));
        for (size_t k = 0; k < a.cap; k++) {
            if (a.entries[k].key) {
                if (a.entries[k].seen != entry_of(&b, a.entries[k].key)->seen && wrong++ < 3 &&
                    getenv("PROOF_SHOW")) {
                    fprintf(stderr, "    class %" PRIu64 ": %d, reduced %d\n", a.entries[k].key,
                            a.entries[k].seen, entry_of(&b, a.entries[k].key)->seen);
                }
            }
        }
        CHECK_INT(a.n, b.n);
        if (!CHECK(wrong == 0)) {
            fprintf(stderr, "    %s: %" PRIu64 " classes differ; full %s\n    reduced %s\n",
                    full.fault.name, wrong, ta.worst, tb.worst);
        }
        printf("check K=%d D=%d S=%d %s failing=%" PRIu64 " configurations=%" PRIu64
               " failing_reduced=%" PRIu64 " classes=%" PRIu64 " different=%" PRIu64 "\n",
               K, D, S, full.fault.name, a.failing, a.all, b.failing, b.all, wrong);
        faults++;
        different += wrong;
        configs += a.all;
        classes += b.all;
        full_failing += a.failing;
        reduced_failing += b.failing;
        full_traces += ta.traces;
        reduced_traces += tb.traces;
        free(a.entries);
        free(b.entries);
    }
    printf("checked K=%d D=%d S=%d faults=%" PRIu64 " different=%" PRIu64 " configurations=%" PRIu64
           " classes=%" PRIu64 " failing=%" PRIu64 " failing_reduced=%" PRIu64 " traces=%" PRIu64
           " traces_reduced=%" PRIu64 " seconds=%.2f\n",
           K, D, S, faults, different, configs, classes, full_failing, reduced_failing, full_traces,
           reduced_traces, seconds() - since);
}

static void do_values(int argc, char **argv)
{
    double since = seconds();
    values_tally t;
    values_tally all = {0};
    int K = atoi(argv[0]);
    int D = atoi(argv[1]);
    int S = atoi(argv[2]);
    uint64_t samples = number(argc, argv, "samples", 2000);
    uint64_t seed = number(argc, argv, "seed", 1);
    bool any = false;
    for (int i = 3; i < argc || !any; i++) {
        fault f;
        if (i < argc && strncmp(argv[i], "fault=", 6) != 0)
            continue;
        any = true;
        fault_asked(&f, i < argc ? argv[i] + 6 : "none");
        CHECK(search_values(K, D, S, &f, samples, seed, &t));
        printf("values K=%d D=%d S=%d %s runs=%" PRIu64 " schedules=%" PRIu64 " racy=%" PRIu64
               " racy_wrong=%" PRIu64 " clean=%" PRIu64 " clean_wrong=%" PRIu64 "\n",
               K, D, S, f.name, t.runs, t.schedules, t.racy, t.racy_wrong, t.clean, t.clean_wrong);
        CHECK_INT(t.clean_wrong, 0);
        all.runs += t.runs;
        all.schedules += t.schedules;
        all.racy += t.racy;
        all.racy_wrong += t.racy_wrong;
        all.clean += t.clean;
        all.clean_wrong += t.clean_wrong;
    }
    printf("judged K=%d D=%d S=%d seed=%" PRIu64 " runs=%" PRIu64 " schedules=%" PRIu64
           " racy=%" PRIu64 " racy_wrong=%" PRIu64 " clean=%" PRIu64 " clean_wrong=%" PRIu64
           " seconds=%.2f\n",
           K, D, S, seed, all.runs, all.schedules, all.racy, all.racy_wrong, all.clean,
           all.clean_wrong, seconds() - since);
}

/* Split locks cannot be searched without the reduction. What random orders find, the reduced search
 * must have found too. */
static void see_split(void *ctx, const config *c, int scene, verdict v)
{
    table *t = ctx;
    entry_of(t, class_of(c) * SPLIT_SCENES + (uint64_t)scene)->seen |= 1u << (v != FINE);
    t->all++;
    t->failing += v != FINE;
}

static void do_sample(int argc, char **argv)
{
    uint64_t faults = 0;
    uint64_t missed = 0;
    uint64_t searched = 0;
    uint64_t sampled = 0;
    uint64_t runs = 0;
    double since = seconds();
    for (int i = 2; i < argc; i++) {
        table a = {0};
        table b = {0};
        tally ta, tb;
        uint64_t wrong = 0;
        split_search how = {.D = atoi(argv[0]),
                            .S = atoi(argv[1]),
                            .scenes = (1u << SPLIT_SCENES) - 1,
                            .reduce = true,
                            .first = true,
                            .seed = number(argc, argv, "seed", 1),
                            .seen = see_split,
                            .ctx = &a};
        part(argc, argv, &how.from, &how.step);
        if (strncmp(argv[i], "fault=", 6) != 0)
            continue;
        if (!fault_parse(&how.fault, argv[i] + 6))
            exit(2);
        CHECK(search_split(&how, &ta));
        how.ctx = &b;
        how.samples = number(argc, argv, "samples", 200);
        CHECK(search_split(&how, &tb));
        for (size_t k = 0; k < b.cap; k++) {
            if (b.entries[k].key && b.entries[k].seen == 2)
                wrong += entry_of(&a, b.entries[k].key)->seen != 2;
        }
        if (!CHECK(wrong == 0)) {
            fprintf(stderr, "    %s: %" PRIu64 " found by samples alone; %s\n", how.fault.name,
                    wrong, tb.worst);
        }
        printf("sample D=%d S=%d %s failing=%" PRIu64 " failing_sampled=%" PRIu64 " of=%" PRIu64
               " missed=%" PRIu64 "\n",
               how.D, how.S, how.fault.name, a.failing, b.failing, a.all, wrong);
        faults++;
        missed += wrong;
        searched += a.failing;
        sampled += b.failing;
        runs += tb.traces;
        free(a.entries);
        free(b.entries);
    }
    printf("sampled D=%s S=%s faults=%" PRIu64 " failing=%" PRIu64 " failing_sampled=%" PRIu64
           " missed=%" PRIu64 " runs=%" PRIu64 " seconds=%.2f\n",
           argv[0], argv[1], faults, searched, sampled, missed, runs, seconds() - since);
}

/* ---- planted faults ---- */

typedef struct death {
    uint64_t failing, all, by[VERDICTS];
    char at[64];    /* what is searched */
    char where[64]; /* where it failed first */
    char worst[512], sentence[FAN_ERROR_TEXT];
} death;

static void bury(death *d, const tally *t)
{
    d->all += t->configs;
    d->failing += t->failing;
    for (int i = 0; i < VERDICTS; i++)
        d->by[i] += t->by[i];
    if (t->failing && !d->where[0]) {
        memcpy(d->where, d->at, sizeof d->where);
        memcpy(d->worst, t->worst, sizeof d->worst);
        memcpy(d->sentence, t->sentence, sizeof d->sentence);
    }
}

/* How far a hunt goes: without split locks; until the fault is found; and on to sizes that no fault
 * that is found needs. */
typedef enum depth {
    SHALLOW,
    USUAL,
    DEEP
} depth;

typedef struct hunting {
    depth depth;
    bool soon;           /* one configuration that fails is enough */
    uint64_t from, step; /* one part of the shapes */
    const char *where;   /* one ground, NULL: all */
} hunting;

/* is_hunted: whether a hunt goes where it now is. */
static bool is_hunted(const hunting *hunting, const death *d)
{
    return !hunting->where || strcmp(hunting->where, d->at) == 0;
}

/* hunt: what the fault does, in a process of its own; *d is shared with it and says how far it
 * came. */
static bool hunt(const fault *f, const hunting *hunting, death *d)
{
    static const struct {
        depth from;
        bool split;
        int K, D, S;
        richness options;
        bool late; /* only if nothing was found before */
    } grounds[] = {{SHALLOW, false, 1, 1, 2, OPTIONS_MOST, false},
                   {SHALLOW, false, 1, 2, 1, OPTIONS_MOST, false},
                   {SHALLOW, false, 2, 1, 2, OPTIONS_FEW, false},
                   {SHALLOW, false, 2, 2, 1, OPTIONS_FEW, false},
                   {USUAL, true, 2, 1, 1, OPTIONS_FEW, true},
                   {SHALLOW, false, 2, 2, 2, OPTIONS_FEW, true},
                   {USUAL, true, 2, 1, 2, OPTIONS_FEW, true},
                   {USUAL, true, 2, 2, 1, OPTIONS_FEW, true},
                   {DEEP, false, 2, 1, 2, OPTIONS_ALL, true},
                   {DEEP, false, 2, 2, 1, OPTIONS_ALL, true},
                   {DEEP, false, 3, 1, 2, OPTIONS_FEW, true},
                   {DEEP, false, 3, 2, 1, OPTIONS_FEW, true}};
    tally t;
    bool sound = true;
    for (size_t i = 0; i < sizeof grounds / sizeof *grounds && sound; i++) {
        int K = grounds[i].K;
        int D = grounds[i].D;
        int S = grounds[i].S;
        bool enough = d->failing && (grounds[i].late || hunting->soon);
        if (grounds[i].from > hunting->depth || enough)
            continue;
        if (!grounds[i].split) {
            search how = {.K = K,
                          .D = D,
                          .S = S,
                          .options = grounds[i].options,
                          .reduce = true,
                          .first = true,
                          .soon = hunting->soon,
                          .from = hunting->from,
                          .step = hunting->step,
                          .fault = *f};
            /* Faults that look at names: a class is not alike. */
            how.raw = f->planted == FAN_FAULT_STREAMS_BY_NUMBER ||
                      f->planted == FAN_FAULT_STREAMS_BY_DEVICE;
            snprintf(d->at, sizeof d->at, "whole K=%d D=%d S=%d", K, D, S);
            if (!is_hunted(hunting, d))
                continue;
            sound = search_whole(&how, &t);
            bury(d, &t);
            continue;
        }
        for (int scene = 0; scene < SPLIT_SCENES && sound && !d->failing; scene++) {
            split_search how = {.D = D,
                                .S = S,
                                .scenes = 1u << scene,
                                .reduce = true,
                                .first = true,
                                .soon = hunting->soon,
                                .from = hunting->from,
                                .step = hunting->step,
                                .fault = *f};
            snprintf(d->at, sizeof d->at, "split D=%d S=%d scene=%s", D, S,
                     split_scene_words[scene]);
            if (!is_hunted(hunting, d))
                continue;
            sound = search_split(&how, &t);
            bury(d, &t);
        }
    }
    return sound;
}

/* kill_option: whether an argument of `kill` is no name of a fault. */
static bool kill_option(const char *text)
{
    static const char *const words[] = {"shallow", "deep", "soon"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (strcmp(text, words[i]) == 0)
            return true;
    }
    return strncmp(text, "part=", 5) == 0 || strncmp(text, "where=", 6) == 0;
}

static void do_kill(int argc, char **argv)
{
    uint64_t killed = 0;
    uint64_t faults = 0;
    hunting hunting = {
        .depth = USUAL, .soon = word(argc, argv, "soon"), .where = option(argc, argv, "where")};
    struct tms before, after;
    times(&before);
    part(argc, argv, &hunting.from, &hunting.step);
    if (word(argc, argv, "shallow"))
        hunting.depth = SHALLOW;
    if (word(argc, argv, "deep"))
        hunting.depth = DEEP;
    death *d = mmap(NULL, sizeof *d, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (d == MAP_FAILED)
        abort();
    for (int i = 0; i < argc; i++) {
        fault f;
        int how = 0;
        if (kill_option(argv[i]))
            continue;
        fault_asked(&f, argv[i]);
        memset(d, 0, sizeof *d);
        fflush(stdout);
        fflush(stderr);
        pid_t child = fork();
        if (child == 0) {
            if (!getenv("PROOF_SHOW"))
                (void)(freopen("/dev/null", "w", stderr) != NULL); /* an assertion's last words */
            _exit(hunt(&f, &hunting, d) ? 0 : 3);
        }
        if (child < 0 || waitpid(child, &how, 0) != child)
            abort();
        faults++;
        if (WIFSIGNALED(how)) {
            d->failing++;
            if (!d->where[0])
                memcpy(d->where, d->at, sizeof d->where);
            d->by[CRASHED]++;
            snprintf(d->sentence, sizeof d->sentence, "ended by signal %d", WTERMSIG(how));
        } else if (!CHECK(WEXITSTATUS(how) == 0)) {
            fprintf(stderr, "    %s\n", f.name);
        }
        int most = FINE + 1;
        for (int v = most; v < VERDICTS; v++) {
            if (d->by[v] > d->by[most])
                most = v;
        }
        killed += d->failing > 0;
        const char *verdict = d->failing ? verdict_words[most] : "none";
        const char *where = d->where[0] ? d->where : "-";
        printf("kill %s failing=%" PRIu64 " of=%" PRIu64 " verdict=%s where=%s\n", f.name,
               d->failing, d->all, verdict, where);
        if (d->failing && (d->worst[0] || d->sentence[0]))
            printf("  %s\n  %s\n", d->worst, d->sentence);
    }
    CHECK(faults > 0);
    times(&after);
    printf("killed=%" PRIu64 " faults=%" PRIu64 " seconds=%.2f\n", killed, faults,
           (double)(after.tms_cutime - before.tms_cutime + after.tms_cstime - before.tms_cstime) /
               (double)sysconf(_SC_CLK_TCK));
    munmap(d, sizeof *d);
}

/* One configuration: all its runs, or, with a schedule ("-": none), that run alone, step by
 * step. */
static void do_replay(int argc, char **argv)
{
    config c;
    world w;
    search how = {
        .reduce = !word(argc, argv, "full"), .first = true, .fault = the_fault(argc, argv)};
    CHECK(config_parse(&c, argv[0]));
    CHECK(world_open(&w, c.D, c.S, NULL));
    fault_plant(&how.fault, &w);
    if (argc > 1 && strcmp(argv[1], "-") != 0 && !strchr(argv[1], '=') && argv[1][0] <= '9') {
        run r;
        fan_explore *x = fan_explore_new(false, 0);
        CHECK(run_open(&r, &w, &c));
        r.driver = how.fault.driver;
        CHECK_OK(fan_explore_replay(x, argv[1]));
        CHECK(fan_explore_begin(x));
        run_begin(&r);
        uint32_t can;
        while (r.verdict == FINE && (can = run_enabled(&r)) != 0) {
            int actor = fan_explore_choose(x, can);
            printf("actor %d step %d\n", actor, r.done[actor]);
            run_step(&r, actor, NULL);
        }
        run_end(&r);
        CHECK(!fan_explore_strayed(x));
        fan_explore_end(x);
        printf("verdict %s: %s\n", verdict_words[r.verdict], r.why);
        fan_race race;
        if (fan_sim_first_race(w.m, &race)) {
            printf("first race: '%s' lane %u then '%s' lane %u%s\n", race.first.name,
                   race.first.lane, race.second.name, race.second.lane,
                   race.release ? ", a release" : "");
        }
        run_close(&r);
        fan_explore_free(x);
    } else {
        tally t = {0};
        verdict v;
        CHECK(search_config(&w, &how, &c, &t, &v));
        say("replay", &t, seconds());
    }
    fan_fault_plant(FAN_FAULT_NONE);
    world_close(&w);
}

static void do_sizes(void)
{
    static const int sizes[][3] = {{1, 1, 1}, {1, 1, 2}, {1, 2, 1}, {1, 2, 2},
                                   {2, 1, 2}, {2, 2, 1}, {2, 2, 2}, {2, 3, 3},
                                   {3, 2, 2}, {3, 2, 3}, {3, 3, 2}, {4, 2, 2}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        config c;
        uint64_t raw = config_raw(sizes[i][0], sizes[i][1], sizes[i][2]);
        uint64_t keyed = 0;
        uint64_t unkeyed = 0;
        config_plain(&c, sizes[i][0], sizes[i][1], sizes[i][2]);
        for (uint64_t k = 0; k < raw && raw < 100000; k++) {
            config_shape(&c, k);
            c.keyed = true;
            keyed += config_first(&c);
            c.keyed = false;
            unkeyed += config_first(&c);
        }
        printf("sizes K=%d D=%d S=%d raw=%" PRIu64 " keyed=%" PRIu64 " unkeyed=%" PRIu64 "\n",
               sizes[i][0], sizes[i][1], sizes[i][2], raw, keyed, unkeyed);
        CHECK(raw > 0);
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    argc -= 2;
    argv += 2;
    if (strcmp(what, "whole") == 0 && argc >= 3) {
        do_whole(argc, argv);
    } else if (strcmp(what, "split") == 0 && argc >= 2) {
        do_split(argc, argv);
    } else if (strcmp(what, "kill") == 0) {
        do_kill(argc, argv);
    } else if (strcmp(what, "values") == 0 && argc >= 3) {
        do_values(argc, argv);
    } else if (strcmp(what, "sample") == 0 && argc >= 2) {
        do_sample(argc, argv);
    } else if (strcmp(what, "check") == 0 && argc >= 3) {
        do_check(argc, argv);
    } else if (strcmp(what, "replay") == 0 && argc >= 1) {
        do_replay(argc, argv);
    } else if (strcmp(what, "sizes") == 0) {
        do_sizes();
    }
    return check_done();
}
