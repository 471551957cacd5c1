/* The second oracle: sampled runs are judged by order (happens-before), and again by value, with
 * bytes that are moved late and in other orders.
 *
 * A run that the first judge finds clean must give the right values under every schedule. A run
 * that it finds racy gives a wrong value under some order of the device; a fair share of these is
 * met by the few that are tried
 * here. */
#include "proof.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

enum {
    SEEDS = 6,
    MOST_WORLDS = 3 + SEEDS + MAX_STREAMS
};

/* One run along `schedule`; with work, the device goes on a little between the steps, so that
 * memory comes back and is used again. */
static verdict along(world *w, const config *c, const fault *f, const char *schedule,
                     uint64_t random, char *why, size_t size)
{
    run r;
    uint32_t can;
    fan_explore *x = fan_explore_new(false, 0);
    if (!x || !run_open(&r, w, c))
        abort();
    if (fan_explore_replay(x, schedule) != FAN_OK || !fan_explore_begin(x))
        abort();
    r.driver = f->driver;
    run_begin(&r);
    while (r.verdict == FINE && (can = run_enabled(&r)) != 0) {
        run_step(&r, fan_explore_choose(x, can), NULL);
        for (uint64_t n = w->work ? draw(&random) % 4 : 0; n > 0 && r.verdict == FINE; n--) {
            bool ran;
            if (fan_sim_step(w->m, &ran, NULL) != FAN_OK)
                run_fail(&r, FAILED, "a step of the machine failed");
        }
        for (int d = 0; w->work && d < w->D; d++)
            fan_device_poll(w->device[d]);
    }
    run_end(&r);
    if (fan_explore_strayed(x))
        run_fail(&r, FAILED, "strayed");
    fan_explore_end(x);
    snprintf(why, size, "%s", r.why);
    verdict v = r.verdict;
    run_close(&r);
    fan_explore_free(x);
    return v;
}

/* open_works: machines that move bytes, each in another order; how many, or 0. Streams bear the
 * same handles in every world as in `judge`. */
static int open_works(world works[MOST_WORLDS], const world *judge, int D, int S, const fault *f,
                      uint64_t *random)
{
    static const fan_sim_schedule named[] = {FAN_SIM_FIFO, FAN_SIM_LIFO, FAN_SIM_ROUND_ROBIN};
    int n = 0;
    for (; n < 3 + SEEDS + D * S; n++) {
        fan_sim_config how = {.run_work = true, .seed = draw(random)};
        how.schedule = FAN_SIM_SEEDED;
        if (n < 3) {
            how.schedule = named[n];
        } else if (n >= 3 + SEEDS) {
            how.schedule = FAN_SIM_STARVE;
            how.starve = judge->stream[n - 3 - SEEDS]->handle;
        }
        if (!world_open(&works[n], D, S, &how))
            return 0;
        fault_plant(f, &works[n]);
    }
    return n;
}

/* by_order: a sampled run of c is judged by happens-before; its verdict, and the order of the
 * host's steps. */
static verdict by_order(world *judge, const config *c, const fault *f, uint64_t seed,
                        char *schedule, size_t size)
{
    run r;
    uint32_t can;
    fan_explore *x = fan_explore_new(false, 0);
    if (!x || !run_open(&r, judge, c))
        abort();
    fan_explore_sample(x, seed);
    (void)fan_explore_begin(x);
    r.driver = f->driver;
    run_begin(&r);
    while ((can = run_enabled(&r)) != 0 && r.verdict == FINE)
        run_step(&r, fan_explore_choose(x, can), NULL);
    fan_explore_schedule(x, schedule, size);
    run_end(&r);
    verdict v = r.verdict;
    run_close(&r);
    fan_explore_end(x);
    fan_explore_free(x);
    return v;
}

bool search_values(int K, int D, int S, const fault *f, uint64_t samples, uint64_t seed,
                   values_tally *out)
{
    world judge, works[MOST_WORLDS];
    bool sound = true;
    uint64_t random = seed;
    uint64_t raw = config_raw(K, D, S);
    memset(out, 0, sizeof *out);
    if (!world_open(&judge, D, S, NULL))
        return false;
    int n = open_works(works, &judge, D, S, f, &random);
    if (!n)
        return false;
    fault_plant(f, &judge);
    config c;
    config_plain(&c, K, D, S);
    unsigned options = 0;
    while (config_options(&c, OPTIONS_MOST, options))
        options++;
    for (uint64_t i = 0; i < samples && sound; i++) {
        char schedule[64], why[FAN_ERROR_TEXT], text[320];
        config_shape(&c, draw(&random) % raw);
        if (!config_options(&c, OPTIONS_MOST, (unsigned)(draw(&random) % options)) &&
            !config_options(&c, OPTIONS_MOST, (unsigned)(draw(&random) % 4)))
            continue;
        /* The order of the host's steps alone is chosen here; it is run to its end whatever is
         * found. */
        verdict judged = by_order(&judge, &c, f, draw(&random), schedule, sizeof schedule);
        if (judged != FINE && judged != RACED)
            continue; /* seen without either */
        out->runs++;
        bool wrong = false;
        for (int k = 0; k < n && !(wrong && judged == RACED); k++) {
            verdict v = along(&works[k], &c, f, schedule, draw(&random), why, sizeof why);
            out->schedules++;
            if (v == FINE)
                continue;
            wrong = true;
            if (judged == FINE) {
                sound = false;
                fprintf(stderr, "clean by order, %s by value: \"%s\" %s world %d fault=%s: %s\n",
                        verdict_words[v], config_text(&c, text, sizeof text), schedule, k, f->name,
                        why);
                break;
            }
        }
        if (judged == RACED) {
            out->racy++;
            out->racy_wrong += wrong;
        } else {
            out->clean++;
            out->clean_wrong += wrong;
        }
    }
    fan_fault_plant(FAN_FAULT_NONE);
    for (int i = 0; i < n; i++)
        world_close(&works[i]);
    world_close(&judge);
    return sound;
}
