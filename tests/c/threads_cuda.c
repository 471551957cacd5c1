/* threads_cuda FAKE: the buffer on CUDA's devices, over the fake driver, used by several threads
 * with no interpreter's lock between them: for the thread sanitizer to see. What comes out is
 * checked as well. tests/device/parts/test_threads_cuda.py runs it, with
 * -Wl,--wrap=fan__cuda_capture. */
#define _POSIX_C_SOURCE 200809L
#include "buffer/buffer.h"
#include "check.h"
#include "device/cuda/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    THREADS = 4,
    TURNS = 12,
    LENGTH = 32,
    SLOTS = 3,
    DEVICES = 2
};

/* ---- the driver, as its other users call it ---- */

static struct {
    fan_cu_result (*Init)(unsigned);
    fan_cu_result (*DevicePrimaryCtxRetain)(fan_cu_context *, fan_cu_device);
    fan_cu_result (*DevicePrimaryCtxRelease_v2)(fan_cu_device);
    fan_cu_result (*CtxPushCurrent_v2)(fan_cu_context);
    fan_cu_result (*CtxPopCurrent_v2)(fan_cu_context *);
    fan_cu_result (*StreamCreate)(fan_cu_stream *, unsigned);
    fan_cu_result (*StreamDestroy_v2)(fan_cu_stream);
    fan_cu_result (*StreamBeginCapture_v2)(fan_cu_stream, int);
    fan_cu_result (*StreamEndCapture)(fan_cu_stream, fan_cu_graph *);
    fan_cu_result (*GraphLaunch)(fan_cu_graph, fan_cu_stream);
    fan_cu_result (*GraphDestroy)(fan_cu_graph);
} cu;
static int (*fake_reset)(int, uint64_t, int, uint64_t, uint64_t, int);
static uint64_t (*fake_races)(void);
static uint64_t (*fake_calls)(const char *);
static int64_t (*fake_live)(int);
static const char *(*fake_race)(void), *(*fake_said)(void);
static int (*fake_synchronize)(void);

static void symbol(void *library, const char *name, void *out)
{
    void *p = dlsym(library, name);
    if (!CHECK(p != NULL)) {
        fprintf(stderr, "no %s\n", name);
        exit(1);
    }
    memcpy(out, &p, sizeof p);
}

static void driver_open(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!CHECK(library != NULL)) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define FIND(name) symbol(library, "cu" #name, &cu.name)
    FIND(Init);
    FIND(DevicePrimaryCtxRetain);
    FIND(DevicePrimaryCtxRelease_v2);
    FIND(CtxPushCurrent_v2);
    FIND(CtxPopCurrent_v2);
    FIND(StreamCreate);
    FIND(StreamDestroy_v2);
    FIND(StreamBeginCapture_v2);
    FIND(StreamEndCapture);
    FIND(GraphLaunch);
    FIND(GraphDestroy);
    symbol(library, "fanFakeReset", &fake_reset);
    symbol(library, "fanFakeRaces", &fake_races);
    symbol(library, "fanFakeRace", &fake_race);
    symbol(library, "fanFakeMessage", &fake_said);
    symbol(library, "fanFakeCalls", &fake_calls);
    symbol(library, "fanFakeLive", &fake_live);
    symbol(library, "fanFakeSynchronize", &fake_synchronize); /* it stays open */
}

static void context_in(int device)
{
    fan_cu_context c = NULL;
    CHECK_INT(cu.Init(0), 0);
    CHECK_INT(cu.DevicePrimaryCtxRetain(&c, device), 0);
    CHECK_INT(cu.CtxPushCurrent_v2(c), 0);
}

static void context_out(int device)
{
    fan_cu_context c = NULL;
    CHECK_INT(cu.CtxPopCurrent_v2(&c), 0);
    CHECK_INT(cu.DevicePrimaryCtxRelease_v2(device), 0);
}

/* ---- the world: one driver, its devices, a stream for each thread and one more ---- */

typedef struct world {
    fan_cuda *cuda;
    fan_device *d[DEVICES];
    fan_cu_stream raw[THREADS + 1];
    fan_stream *s[THREADS + 1];
    pthread_barrier_t begin;
    fan_buffer *b;
    fan_event *event; /* everybody's */
    fan_storage *shared;
    atomic_long released, taken;
    atomic_int adding; /* threads that still add */
} world;

typedef struct one {
    world *w;
    int k;
    pthread_t thread;
} one;

static void nothing(void *o)
{
    (void)o;
}
static bool unshared(void *o)
{
    (void)o;
    return false;
}
static fan_status combine(void *c, const fan_value *a, const fan_value *b, fan_value *out,
                          fan_error *err)
{
    (void)c;
    (void)a;
    (void)b;
    (void)out;
    return fan_fail(err, FAN_ERR_TYPE, "no objects here");
}
static const fan_frontend frontend = {
    .hold = nothing, .drop = nothing, .unshared = unshared, .combine = combine};

static bool fine(fan_status status, const fan_error *err)
{
    bool good = CHECK_OK(status);
    if (!good)
        fprintf(stderr, "    %s\n", err->text);
    return good;
}

/* device_of: fan_cuda_device. This program embeds no kernels; the fake driver takes the beginning
 * of a fatbin. */
static fan_status device_of(fan_cuda *c, int index, fan_device **out, fan_error *err)
{
    static const unsigned char image[] = {0x50, 0xED, 0x55, 0xBA};
    int wants;
    fan_status status = fan_cuda_device(c, index, out, &wants, err);
    if (!wants)
        return status;
    FAN_TRY(fan_cuda_give_kernels(c, index, image, sizeof image, "the fake driver's", err));
    return fan_cuda_device(c, index, out, &wants, err);
}

static void world_in(world *w, const char *path)
{
    fan_error err = {0};
    memset(w, 0, sizeof *w);
    CHECK_INT(fake_reset(DEVICES, 7, 0, 0, 0, 1), 0);
    fine(fan_cuda_open(path, &w->cuda, &err), &err);
    (void)pthread_barrier_init(&w->begin, NULL, THREADS);
}

/* streams_in: after somebody has made the devices ready. */
static void streams_in(world *w)
{
    fan_error err = {0};
    for (int i = 0; i < DEVICES; i++) {
        if (!w->d[i])
            fine(device_of(w->cuda, i, &w->d[i], &err), &err);
    }
    context_in(0);
    for (int k = 0; k <= THREADS; k++) {
        CHECK_INT(cu.StreamCreate(&w->raw[k], 1), 0);
        fine(fan_cuda_stream(w->d[0], (uint64_t)(uintptr_t)w->raw[k], &w->s[k], &err), &err);
    }
    context_out(0);
}

static void world_out(world *w)
{
    CHECK_INT(fake_synchronize(), 0);
    if (!CHECK(fake_races() == 0))
        fprintf(stderr, "    %s\n", fake_race());
    for (int k = 0; k <= THREADS; k++)
        fan_stream_drop(w->s[k]);
    context_in(0);
    for (int k = 0; k <= THREADS; k++) {
        if (w->raw[k])
            CHECK_INT(cu.StreamDestroy_v2(w->raw[k]), 0);
    }
    context_out(0);
    for (int i = 0; i < DEVICES; i++)
        fan_device_drop(w->d[i]);
    fan_cuda_drop(w->cuda);
    (void)pthread_barrier_destroy(&w->begin);
    CHECK_INT(fake_live(0), 0);
}

static void together(world *w, void *(*f)(void *))
{
    one all[THREADS];
    for (int k = 0; k < THREADS; k++) {
        all[k] = (one){.w = w, .k = k};
        if (!CHECK(pthread_create(&all[k].thread, NULL, f, &all[k]) == 0))
            exit(1);
    }
    for (int k = 0; k < THREADS; k++)
        (void)pthread_join(all[k].thread, NULL);
}

/* on_device: LENGTH times x, made on s; NULL: there when this returns, and nobody's. */
static fan_array *on_device(fan_device *d, fan_stream *s, double x)
{
    fan_error err = {0};
    int64_t n = LENGTH;
    fan_array *host = NULL;
    fan_array *a = NULL;
    if (!fine(fan_array_new(FAN_DT_FLOAT64, 1, &n, NULL, &host, &err), &err) ||
        !fine(fan_device_array(d, s, FAN_DT_FLOAT64, 1, &n, NULL, &a, &err), &err))
        exit(1);
    for (int64_t i = 0; i < n; i++)
        memcpy(host->data + 8 * i, &x, sizeof x);
    fan_operand in = {.array = host, .acc = FAN_DT_FLOAT64};
    fan_stream *on = s ? fan_stream_hold(s) : fan_stream_current(d);
    fine(fan_device_run(d, on, &(fan_job){.kind = FAN_JOB_UPLOAD, .out = a, .in = &in, .n = 1},
                        &err),
         &err);
    if (!s)
        fine(fan_stream_sync(on, &err), &err);
    fan_stream_drop(on);
    fan_array_drop(host);
    return a;
}

static double read_first(fan_stream *s, const fan_array *a)
{
    fan_error err = {0};
    fan_array *host = NULL;
    double x = -1;
    if (fine(fan_array_new(FAN_DT_FLOAT64, 1, a->shape, NULL, &host, &err), &err) &&
        fine(s->device->backend->read(s, host, a, &err), &err))
        memcpy(&x, host->data, sizeof x);
    fan_array_drop(host);
    return x;
}

static fan_status add(fan_buffer *b, size_t slot, fan_device *d, fan_stream *s, fan_array *a,
                      int64_t key, fan_error *err)
{
    fan_contribution c = {.value = fan_value_dense(a, d), .key = key, .stream = s};
    fan_status status = fan_buffer_add(b, slot, &c, err);
    fan_value_drop(&frontend, &c.value);
    return status;
}

static fan_buffer *buffer_new(fan_stream *s, uint64_t budget)
{
    fan_buffer *b = NULL;
    fan_error err = {0};
    fan_buffer_config config = {.slots = SLOTS,
                                .budget = budget,
                                .accumulate = FAN_DT_NONE,
                                .frontend = &frontend,
                                .stream = s};
    if (!fine(fan_buffer_new(&config, &b, &err), &err))
        exit(1);
    return b;
}

/* take_all: how much the sums are, together. */
static double take_all(fan_buffer *b, fan_stream *s)
{
    fan_value out[SLOTS];
    fan_error err = {0};
    fan_take how = {.real = true, .integral = true, .stream = s};
    double sum = 0;
    memset(out, 0, sizeof out);
    if (!fine(fan_buffer_take(b, &how, out, &err), &err))
        return -1;
    for (int i = 0; i < SLOTS; i++) {
        if (out[i].array)
            sum += read_first(s, out[i].array);
        fan_value_drop(&frontend, &out[i]);
    }
    return sum;
}

/* ---- the scenes ---- */

/* The devices are made ready by whoever asks first; others ask which context they are in. */
static void *opening(void *ctx)
{
    one *me = ctx;
    world *w = me->w;
    fan_error err = {0};
    fan_device *d = NULL;
    char text[128];
    (void)pthread_barrier_wait(&w->begin);
    if (me->k % 2) {
        context_in(0);
        for (int i = 0; i < TURNS; i++)
            CHECK(fan_cuda_here(w->cuda) <= 0);
        fine(fan_cuda_describe(w->cuda, 0, text, sizeof text, &err), &err);
        context_out(0);
    }
    for (int i = 0; i < DEVICES; i++) {
        if (fine(device_of(w->cuda, i, &d, &err), &err))
            fan_device_drop(d);
    }
    return NULL;
}

/* All add to the slots of one buffer, each from a stream of its own; one of them takes now and
 * then. */
static void *adding(void *ctx)
{
    one *me = ctx;
    world *w = me->w;
    fan_error err = {0};
    long taken = 0;
    if (me->k % 2) /* the others push the context for each call */
        context_in(0);
    (void)pthread_barrier_wait(&w->begin);
    for (int i = 0; i < TURNS; i++) {
        fine(add(w->b, (size_t)(i + me->k) % SLOTS, w->d[0], w->s[me->k],
                 on_device(w->d[0], w->s[me->k], i + 1), -1, &err),
             &err);
        if (me->k == 0 && i % 3 == 2)
            taken += (long)take_all(w->b, w->s[THREADS]);
        if (me->k == 1 && i % 3 == 0) {
            fan_value v;
            if (fine(fan_buffer_snapshot(w->b, (size_t)i % SLOTS, w->s[1], &v, &err), &err))
                fan_value_drop(&frontend, &v);
        }
    }
    atomic_fetch_add(&w->taken, taken);
    if (me->k % 2)
        context_out(0);
    return NULL;
}

static void adds_lose_nothing(const char *path, uint64_t budget)
{
    world w;
    world_in(&w, path);
    streams_in(&w);
    w.b = buffer_new(w.s[THREADS], budget);
    together(&w, adding);
    long rest = (long)take_all(w.b, w.s[THREADS]);
    CHECK_INT(atomic_load(&w.taken) + rest, THREADS * TURNS * (TURNS + 1) / 2);
    fan_buffer_free(w.b);
    world_out(&w);
}

static void count_release(void *ctx)
{
    atomic_fetch_add((atomic_long *)ctx, 1);
}

/* Memory goes back: used on everybody's stream, let go by everybody; some of it is a library's. */
static void *leaving(void *ctx)
{
    one *me = ctx;
    world *w = me->w;
    fan_error err = {0};
    (void)pthread_barrier_wait(&w->begin);
    for (int i = 0; i < TURNS; i++) {
        fan_array *a = on_device(w->d[i % 2 ? 0 : 1], NULL, i);
        fan_array *mine = on_device(w->d[0], w->s[me->k], i);
        fan_storage *theirs = NULL;
        for (int k = 0; k < THREADS; k++) {
            fine(fan_memory_record_stream((k + i) % 2 ? mine->storage : a->storage, w->s[k], &err),
                 &err);
        }
        fine(fan_memory_record_stream(w->shared, w->s[(me->k + i) % THREADS], &err), &err);
        if (fine(fan_memory_wrap(w->d[0], mine->data, count_release, &w->released, &theirs, &err),
                 &err))
            fine(fan_memory_record_stream(theirs, w->s[me->k], &err), &err);
        fan_storage_drop(theirs);
        fan_array_drop(a);
        fan_array_drop(mine);
        if (i % 4 == 0)
            fan_device_poll(w->d[me->k % DEVICES]);
        (void)fake_live(6);
        (void)fake_calls("EventRecord");
    }
    return NULL;
}

/* One event of a user's, recorded, waited for and asked by all. */
static void *events(void *ctx)
{
    one *me = ctx;
    world *w = me->w;
    fan_error err = {0};
    bool done;
    (void)pthread_barrier_wait(&w->begin);
    for (int i = 0; i < TURNS; i++) {
        if (me->k % 2) {
            fine(fan_event_rerecord(w->event, w->s[me->k], &err), &err);
        } else {
            fine(fan_event_query(w->event, &done, &err), &err);
            fine(fan_stream_wait(w->s[me->k], w->event, NULL, &err), &err);
        }
        fan_event *e = NULL;
        if (fine(fan_event_record(w->s[me->k], &e, &err), &err)) {
            fine(fan_stream_wait(w->s[(me->k + 1) % THREADS], e, NULL, &err), &err);
            fine(fan_event_sync(e, &err), &err);
        }
        fan_event_drop(e);
        fan_stream_drop(fan_event_stream(w->event));
    }
    return NULL;
}

/* Two threads capture what they add and take, and replay it; the others add and let go beside
 * them. */
static void *capturing(void *ctx)
{
    one *me = ctx;
    world *w = me->w;
    fan_error err = {0};
    fan_stream *s = w->s[me->k];
    fan_array *g = on_device(w->d[0], s, 2);
    fine(fan_stream_sync(s, &err), &err);
    (void)pthread_barrier_wait(&w->begin);
    context_in(0);
    for (int i = 0; i < TURNS; i++) {
        fan_buffer *b = buffer_new(s, i % 2 ? 0 : UINT64_MAX);
        fan_cu_graph graph = NULL;
        fan_value out[SLOTS];
        fan_take how = {.real = true, .integral = true};
        bool captured = me->k < 2;
        memset(out, 0, sizeof out);
        if (captured) {
            /* one global, one of its thread */
            CHECK_INT(cu.StreamBeginCapture_v2(w->raw[me->k], me->k), 0);
        }
        for (int n = 0; n < 3; n++)
            fine(add(b, 0, w->d[0], s, fan_array_hold(g), -1, &err), &err);
        fine(fan_buffer_take(b, &how, out, &err), &err);
        if (captured) {
            CHECK_INT(cu.StreamEndCapture(w->raw[me->k], &graph), 0);
            CHECK_INT(cu.GraphLaunch(graph, w->raw[me->k]), 0);
            fine(fan_stream_sync(s, &err), &err);
        }
        if (out[0].array)
            CHECK_INT(read_first(s, out[0].array), 6);
        fan_value_drop(&frontend, &out[0]);
        fan_buffer_free(b);
        if (graph)
            CHECK_INT(cu.GraphDestroy(graph), 0);
    }
    fan_array_drop(g);
    context_out(0);
    return NULL;
}

/* One capture, into which every thread adds from a stream that was forked from it. */
static void *capturing_one(void *ctx)
{
    one *me = ctx;
    world *w = me->w;
    fan_error err = {0};
    fan_array *g = on_device(w->d[0], NULL, 1);
    (void)fan_stream_wait(w->s[me->k], w->event, NULL, &err);
    (void)pthread_barrier_wait(&w->begin);
    for (int n = 0; n < 3; n++)
        fine(add(w->b, 0, w->d[0], w->s[me->k], fan_array_hold(g), -1, &err), &err);
    fan_array_drop(g);
    return NULL;
}

static void one_capture_of_many_threads(const char *path)
{
    world w;
    fan_error err = {0};
    fan_cu_graph graph = NULL;
    fan_value out[SLOTS];
    world_in(&w, path);
    streams_in(&w);
    fine(fan_event_new(w.d[0], &w.event, &err), &err);
    w.b = buffer_new(w.s[THREADS], 0);
    context_in(0);
    CHECK_INT(cu.StreamBeginCapture_v2(w.raw[THREADS], 2), 0);
    fine(fan_event_rerecord(w.event, w.s[THREADS], &err), &err);
    together(&w, capturing_one);
    fan_take how = {.real = true, .integral = true};
    memset(out, 0, sizeof out);
    fine(fan_buffer_take(w.b, &how, out, &err), &err);
    if (!CHECK(cu.StreamEndCapture(w.raw[THREADS], &graph) == 0))
        fprintf(stderr, "    %s\n", fake_said());
    CHECK_INT(cu.GraphLaunch(graph, w.raw[THREADS]), 0);
    fine(fan_stream_sync(w.s[THREADS], &err), &err);
    if (out[0].array)
        CHECK_INT(read_first(w.s[THREADS], out[0].array), 3 * THREADS);
    fan_value_drop(&frontend, &out[0]);
    fan_buffer_free(w.b);
    CHECK_INT(cu.GraphDestroy(graph), 0);
    context_out(0);
    fan_event_drop(w.event);
    world_out(&w);
}

/* Somebody's capture begins between two calls of ours: between the question whether there is one,
 * and the next call. */
static _Thread_local struct {
    int asks; /* of them until it begins; 0: none begins */
    fan_cu_stream on;
} soon;

fan_status __real_fan__cuda_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status __wrap_fan__cuda_capture(fan_stream *s, uint64_t *id, fan_error *err);
fan_status __wrap_fan__cuda_capture(fan_stream *s, uint64_t *id, fan_error *err)
{
    fan_status status = __real_fan__cuda_capture(s, id, err);
    if (soon.asks && --soon.asks == 0)
        CHECK_INT(cu.StreamBeginCapture_v2(soon.on, 0), 0);
    return status;
}

static void a_capture_begins_while_memory_leaves(const char *path, int asks, bool together)
{
    world w;
    fan_error err = {0};
    fan_cu_graph graph = NULL;
    world_in(&w, path);
    streams_in(&w);
    fan_array *a = on_device(w.d[0], NULL, 1);
    fine(fan_memory_record_stream(a->storage, w.s[1], &err), &err);
    context_in(0);
    soon.on = w.raw[1];
    soon.asks = asks;
    if (together)
        fan_memory_leave_begin();
    fan_array_drop(a);
    if (together)
        fan_memory_leave_end();
    fan_device_poll(w.d[0]);
    bool began = soon.asks == 0;
    soon.asks = 0;
    if (began && !CHECK(cu.StreamEndCapture(w.raw[1], &graph) == 0))
        fprintf(stderr, "    question %d, together %d: %s\n", asks, together, fake_said());
    if (graph)
        CHECK_INT(cu.GraphDestroy(graph), 0);
    CHECK(began || asks > 2);
    CHECK_INT(fake_synchronize(), 0);
    fan_device_poll(w.d[0]);
    CHECK_INT(w.d[0]->pending_free != NULL, 0);
    context_out(0);
    world_out(&w);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    world w;
    fan_error err = {0};
    driver_open(argv[1]);

    for (int i = 0; i < TURNS; i++) {
        world_in(&w, argv[1]);
        together(&w, opening);
        world_out(&w);
    }

    adds_lose_nothing(argv[1], 0);
    adds_lose_nothing(argv[1], UINT64_MAX);

    world_in(&w, argv[1]);
    streams_in(&w);
    fan_array *shared = on_device(w.d[0], NULL, 1);
    w.shared = shared->storage;
    together(&w, leaving);
    fan_array_drop(shared);
    CHECK_INT(fake_synchronize(), 0);
    for (int i = 0; i < DEVICES; i++)
        fan_device_poll(w.d[i]);
    CHECK_INT(atomic_load(&w.released), THREADS * TURNS);
    world_out(&w);

    world_in(&w, argv[1]);
    streams_in(&w);
    fine(fan_event_new(w.d[0], &w.event, &err), &err);
    together(&w, events);
    fan_event_drop(w.event);
    world_out(&w);

    world_in(&w, argv[1]);
    streams_in(&w);
    together(&w, capturing);
    world_out(&w);

    one_capture_of_many_threads(argv[1]);
    for (int asks = 1; asks <= 5; asks++) {
        for (int all = 0; all < 2; all++)
            a_capture_begins_while_memory_leaves(argv[1], asks, all != 0);
    }
    CHECK_INT(fake_reset(0, 0, 0, 0, 0, 0), 0);
    return check_done();
}
