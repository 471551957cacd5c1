/* control: the interface for tests: machines, plans of faults, counts, kernels of their own. */
#include "base/mem.h"
#include "fake_cuda/block.h"
#include "fake_cuda/fake.h"
#include "fake_cuda/graph.h"
#include "fake_cuda/thing.h"
#include "fake_cuda/traffic.h"
#include "fake_cuda/work.h"

#include <stdio.h>
#include <string.h>

FAN_FAKE_SHOWN int fanFakeReset(int devices, uint64_t seed, int schedule, uint64_t starve,
                                uint64_t memory, int check);

FAN_FAKE_SHOWN void fanFakeFail(const char *name, int64_t at, int code, int sticks);

FAN_FAKE_SHOWN void fanFakeSet(int version, int pools, int coherent, int initialised, int compute);

FAN_FAKE_SHOWN uint64_t fanFakeMapped(void);

FAN_FAKE_SHOWN void fanFakeHide(int place, const char *name);

FAN_FAKE_SHOWN uint64_t fanFakeCalls(const char *name);

FAN_FAKE_SHOWN int fanFakeTraffic(int on, uint64_t *read, uint64_t *written);

FAN_FAKE_SHOWN uint64_t fanFakeRaces(void);

FAN_FAKE_SHOWN const char *fanFakeRace(void);

FAN_FAKE_SHOWN const char *fanFakeMessage(void);

FAN_FAKE_SHOWN int fanFakeSynchronize(void);

FAN_FAKE_SHOWN int fanFakeStep(void);

FAN_FAKE_SHOWN int64_t fanFakeLive(int which);

FAN_FAKE_SHOWN int fanFakeDepth(void);

FAN_FAKE_SHOWN int fanFakeMode(void);

FAN_FAKE_SHOWN void fanFakeBarriers(int hold);

FAN_FAKE_SHOWN int fanFakeLaunch(fan_cu_stream handle, const char *name, void (*call)(int64_t),
                                 int64_t token, const int64_t *reads, int nreads,
                                 const int64_t *writes, int nwrites);

static void control_forget_all(void)
{
    fan__graph_forget_all();
    for (int k = 0; k < KINDS; k++) {
        while (fan__fake.things[k])
            fan__thing_drop(fan__fake.things[k]);
    }
    fan_free(fan__fake.memory);
    fan__fake.memory = NULL;
    fan__fake.memory_cap = 0;
}

int fanFakeReset(int devices, uint64_t seed, int schedule, uint64_t starve, uint64_t memory,
                 int check)
{
    fan_error err = {.status = FAN_OK};
    control_forget_all();
    fan_sim_drop(fan__fake.m);
    unsigned era = fan__fake.era + 1;
    struct fan_cu_context *contexts = fan_calloc(MOST_DEVICES * sizeof *contexts);
    if (!contexts)
        return -1;
    contexts->older = fan__fake.contexts;
    bool initialised = fan__fake.initialised;
    memset(&fan__fake, 0, sizeof fan__fake);
    fan__fake.initialised = initialised;
    fan__fake.era = era;
    fan__fake.contexts = contexts;
    for (int i = 0; i < MOST_DEVICES; i++)
        contexts[i].device = i;
    fan__fake.version = 12040;
    fan__fake.compute = 75;
    fan__fake.fail_at = -1;
    fan__fake.pools = true;
    fan__fake.devices = devices;
    fan__fake.capacity = memory ? memory : UINT64_C(1) << 30;
    if (devices == 0)
        return 0;
    fan_sim_config config = {.devices = devices > 0 && devices <= MOST_DEVICES ? devices : 1,
                             .seed = seed,
                             .schedule = (fan_sim_schedule)schedule,
                             .starve = starve,
                             .memory = memory,
                             .run_work = true,
                             .bare = true};
    if (fan_sim_new(&config, NULL, &fan__fake.m, &err) != FAN_OK) {
        fan__fake.m = NULL;
        snprintf(fan__fake.message, sizeof fan__fake.message, "%s", err.text);
        return -1;
    }
    fan_sim_check(fan__fake.m, check);
    return 0;
}

void fanFakeFail(const char *name, int64_t at, int code, int sticks)
{
    fan__fake_lock();
    snprintf(fan__fake.fail_name, sizeof fan__fake.fail_name, "%s", name ? name : "");
    fan__fake.fail_at = at;
    fan__fake.fail_with = code;
    fan__fake.fail_sticks = sticks;
    fan__fake_unlock();
}

uint64_t fanFakeMapped(void)
{
    fan__fake_lock();
    uint64_t n = fan__fake.mapped;
    fan__fake_unlock();
    return n;
}

void fanFakeSet(int version, int pools, int coherent, int initialised, int compute)
{
    fan__fake.compute = compute;
    fan__fake.coherent = coherent;
    fan__fake.version = version;
    fan__fake.pools = pools;
    fan__fake.initialised = initialised;
}

void fanFakeHide(int place, const char *name)
{
    if (place >= 0 && place < MOST_HIDDEN)
        snprintf(fan__fake.hidden[place], sizeof fan__fake.hidden[place], "%s", name);
}

void fanFakeBarriers(int hold)
{
    fan__block_forget_barriers(!hold);
}

int fanFakeTraffic(int on, uint64_t *read, uint64_t *written)
{
    *read = fan__traffic_read();
    *written = fan__traffic_written();
    if (on)
        return fan__ok_or(fan__traffic_begin(), OUT_OF_MEMORY);
    fan__traffic_end();
    return OK;
}

uint64_t fanFakeCalls(const char *name)
{
    uint64_t n = UINT64_MAX;
    fan__fake_lock();
    if (!name || !name[0])
        n = fan__fake.calls;
    for (int i = 0; i < NUMBERS && n == UINT64_MAX; i++) {
        if (strcmp(fan__fake_names[i], name) == 0)
            n = fan__fake.calls_of[i];
    }
    const fan_fake_kernel *kernel = n == UINT64_MAX ? fan_fake_kernel_find(name) : NULL;
    if (kernel)
        n = fan__fake.launches[fan_fake_kernel_number(kernel)];
    fan__fake_unlock();
    return n;
}

uint64_t fanFakeRaces(void)
{
    if (!fan__fake.m)
        return 0;
    fan__fake_note_races();
    return fan_sim_races(fan__fake.m);
}

/* control_text: a copy of a text; valid until the next call of the thread. */
static const char *control_text(const char *text)
{
    static _Thread_local char copy[FAN_ERROR_TEXT];
    fan__fake_lock();
    snprintf(copy, sizeof copy, "%s", text);
    fan__fake_unlock();
    return copy;
}

const char *fanFakeRace(void)
{
    return control_text(fan__fake.race);
}

const char *fanFakeMessage(void)
{
    return control_text(fan__fake.message);
}

int fanFakeSynchronize(void)
{
    fan_error err = {.status = FAN_OK};
    if (!fan__fake.m)
        return INVALID_CONTEXT;
    fan__fake_note_races();
    return fan__fake_done(fan_sim_synchronize(fan__fake.m, &err), &err);
}

int fanFakeStep(void)
{
    fan_error err = {.status = FAN_OK};
    bool ran;
    fan__fake_note_races();
    return fan__fake_done(fan_sim_step(fan__fake.m, &ran, &err), &err);
}

int64_t fanFakeLive(int which)
{
    int64_t n = 0;
    if (which > 0 && which < KINDS) {
        fan__fake_lock();
        n = (int64_t)fan__fake.live[which];
        fan__fake_unlock();
        return n;
    }
    for (int i = 0; fan__fake.contexts && i < MOST_DEVICES; i++)
        n += fan__fake.contexts[i].retained;
    return n;
}

int fanFakeMode(void)
{
    return (int)fan__fake_here.mode;
}

int fanFakeDepth(void)
{
    (void)fan__fake_current();
    return fan__fake_here.depth;
}

/* A kernel of a test's. */
typedef struct control_callback {
    void (*call)(int64_t);
    int64_t token;
} control_callback;

static fan_status control_run(void *ctx, fan_error *err)
{
    control_callback *c = ctx;
    (void)err;
    c->call(c->token);
    return FAN_OK;
}

/* control_view: from (address, dtype, ndim, extents .., strides ..) one after the other. */
static const int64_t *control_view(const int64_t *at, fan_fake_access *a)
{
    a->array = (fan_array){.data = fan__host((uint64_t)at[0]),
                           .dtype = (fan_dtype)at[1],
                           .ndim = (int)at[2],
                           .size = 1,
                           .writable = true};
    memcpy(a->dims, at + 3, 2 * (size_t)at[2] * sizeof *at);
    a->array.shape = a->dims;
    a->array.strides = a->dims + at[2];
    for (int64_t i = 0; i < at[2]; i++)
        a->array.size *= a->dims[i];
    return at + 3 + 2 * at[2];
}

int fanFakeLaunch(fan_cu_stream handle, const char *name, void (*call)(int64_t), int64_t token,
                  const int64_t *reads, int nreads, const int64_t *writes, int nwrites)
{
    enum {
        MOST = 16
    };
    static _Thread_local fan_fake_access a[2 * MOST];
    fan_array *in[MOST], *out[MOST];
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    INSIDE(c);
    if (nreads > MOST || nwrites > MOST)
        return INVALID_VALUE;
    control_callback *k = fan_alloc(sizeof *k);
    fan_cu_result code = k ? fan__thing_stream(c, handle, &s) : OUT_OF_MEMORY;
    if (code) {
        fan_free(k);
        return code;
    }
    *k = (control_callback){call, token};
    for (int i = 0; i < nreads; i++, in[i - 1] = &a[i - 1].array)
        reads = control_view(reads, &a[i]);
    for (int i = 0; i < nwrites; i++, out[i - 1] = &a[MOST + i - 1].array)
        writes = control_view(writes, &a[MOST + i]);
    fan__fake_note_races();
    fan_sim_kernel job = {.name = name,
                          .fn = control_run,
                          .fini = fan_free,
                          .ctx = k,
                          .reads = in,
                          .nreads = (size_t)nreads,
                          .writes = out,
                          .nwrites = (size_t)nwrites,
                          .us = -1};
    fan_status status = fan_sim_launch(fan__fake.m, s, &job, &err);
    if (status != FAN_OK)
        fan_free(k);
    fan_stream_drop(s);
    return fan__fake_done(status, &err);
}
