/* sim_world: a machine with streams and one-element arrays, for the programs that test it. */
#ifndef TEST_SIM_WORLD_H
#define TEST_SIM_WORLD_H

#include "check.h"
#include "array/nditer.h"
#include "base/rng.h"
#include "base/mem.h"
#include "device/sim/explore.h"
#include "device/event.h"
#include "device/memory.h"
#include "device/sim/sim.h"
#include <pthread.h>
#include <stdlib.h>
#include <time.h>


/* Fewer rounds under a sanitizer. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define LIGHT 1
#else
#define LIGHT 0
#endif

static uint64_t state = 1;

static inline uint64_t draw(void)
{
    return fan_rng(&state);
}

static inline int below(int n)
{
    return (int)(draw() % (uint64_t)n);
}

static inline uint64_t mix(uint64_t a, uint64_t b)
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

/* A kernel: the first array becomes a mix of itself, of the others, and of a number: no two kernels
 * commute. */
typedef struct mixing {
    uint64_t *to, *from[ARRAYS];
    int n;
    uint64_t id;
} mixing;

static inline fan_status run_mixing(void *ctx, fan_error *err)
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

static inline void call_site(void *ctx, char *buf, size_t size)
{
    (void)ctx;
    snprintf(buf, size, "%s", site_now);
}

static inline void warn(void *ctx, const char *text)
{
    ((world *)ctx)->warnings++;
    CHECK_HAS(text, "never recorded");
}

static inline fan_sim_config config_of(int devices, uint64_t seed, fan_sim_schedule schedule)
{
    return (fan_sim_config){.devices = devices,
                            .seed = seed,
                            .schedule = schedule,
                            .starve = seed + 2,
                            .memory = 1 << 16,
                            .run_work = true};
}

/* number_on_host: a uint64. */
static inline fan_array *number_on_host(void)
{
    fan_array *a = NULL;
    int64_t one = 1;
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &a, NULL));
    return a;
}

static inline void add_array(world *w, int i, int device)
{
    fan_array *init = number_on_host();
    memset(init->data, 0, 8);
    CHECK_OK(fan_sim_array(w->m, device, FAN_DT_UINT64, 1, init->shape, init, &w->x[i], NULL));
    fan_array_drop(init);
}

/* open: `blocking`: mask of the streams that are; stream i is on device i % devices. */
static inline void open(world *w, fan_sim_config config, uint32_t blocking)
{
    memset(w, 0, sizeof *w);
    fan_sim_hooks hooks = {.call_site = call_site, .warn = warn, .ctx = w};
    CHECK_OK(fan_sim_new(&config, &hooks, &w->m, NULL));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(fan_sim_stream(w->m, i % config.devices, blocking >> i & 1, &w->s[i], NULL));
    for (int i = 0; i < ARRAYS; i++)
        add_array(w, i, i % config.devices);
}

static inline void close(world *w)
{
    for (int i = 0; i < ARRAYS; i++)
        fan_array_drop(w->x[i]);
    for (int i = 0; i < STREAMS; i++)
        fan_stream_drop(w->s[i]);
    fan_sim_drop(w->m);
}

/* launch: on s, array `to` (-1: none) from the arrays in the mask `from`. */
static inline fan_status launch(world *w, fan_stream *s, const char *name, int to, uint32_t from,
                                uint64_t id)
{
    mixing *k = fan_alloc(sizeof *k);
    fan_array *reads[ARRAYS];
    fan_error err = {0};
    *k = (mixing){.id = id};
    for (int i = 0; i < ARRAYS; i++) {
        if (from >> i & 1) {
            reads[k->n] = w->x[i];
            k->from[k->n++] = (uint64_t *)(void *)w->x[i]->data;
        }
    }
    fan_sim_kernel kernel = {.name = name,
                             .fn = run_mixing,
                             .fini = fan_free,
                             .ctx = k,
                             .reads = reads,
                             .nreads = (size_t)k->n,
                             .us = -1};
    if (to >= 0) {
        kernel.writes = &w->x[to];
        kernel.nwrites = 1;
        k->to = (uint64_t *)(void *)w->x[to]->data;
    }
    fan_status status = fan_sim_launch(w->m, s, &kernel, &err);
    if (status != FAN_OK) {
        fan_free(k);
        if (w->worst == FAN_OK)
            memcpy(w->text, err.text, sizeof w->text);
        w->worst = status;
    }
    return status;
}

static inline fan_event *recorded(fan_stream *s)
{
    fan_event *e = NULL;
    CHECK_OK(fan_event_record(s, &e, NULL));
    return e;
}

static inline void order(fan_stream *waits, fan_stream *first)
{
    fan_event *e = recorded(first);
    CHECK_OK(fan_stream_wait(waits, e, NULL, NULL));
    fan_event_drop(e);
}

/* number_on: an array of one number, in the memory of s's device and in the order of s. */
static inline fan_array *number_on(fan_stream *s, fan_dtype d)
{
    fan_array *a = NULL;
    int64_t one = 1;
    CHECK_OK(fan_device_array(s->device, s, d, 1, &one, NULL, &a, NULL));
    return a;
}

static inline fan_status run_job(fan_stream *s, fan_job job, fan_error *err)
{
    return fan_device_run(s->device, s, &job, err);
}

static inline fan_job zero_job(const fan_array *a)
{
    return (fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"};
}

static inline fan_sim *sim_of(fan_sim_config config)
{
    fan_sim *m = NULL;
    CHECK_OK(fan_sim_new(&config, NULL, &m, NULL));
    return m;
}

static inline fan_stream *stream_of(fan_sim *m, int device, bool blocking)
{
    fan_stream *s = NULL;
    CHECK_OK(fan_sim_stream(m, device, blocking, &s, NULL));
    return s;
}

static inline uint64_t value(world *w)
{
    uint64_t v;
    uint64_t h = 0;
    CHECK_OK(fan_sim_synchronize(w->m, NULL));
    for (int i = 0; i < ARRAYS; i++) {
        memcpy(&v, w->x[i]->data, sizeof v);
        h = mix(h, v);
    }
    return h;
}

static inline fan_stream *legacy_of(world *w, int device)
{
    fan_stream *s = fan_stream_current(fan_sim_device(w->m, device));
    CHECK_INT(s->handle, 1);
    return s;
}

#endif
