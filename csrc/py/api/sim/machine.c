/* machine: the simulated machine of the C API. Needs no interpreter. In this order: handles;
 * streams, arrays and kernels; host threads. */
#include "py/api/api.h"
#include "py/base/api_lock.h"

#include "base/mem.h"
#include "device/sim/sim.h"

#include <pthread.h>

/* A thread of machine_spawn. */
typedef struct spawned {
    struct spawned *next;
    fan_sim *m; /* held */
    int actor;
    pthread_t thread;
    void (*run)(void *ctx);
    void *ctx;
} spawned;

/* A handle; several may be of one machine. */
struct fanin_machine {
    fan_sim *m; /* held */
    pthread_mutex_t lock;
    fan_stream **streams; /* held */
    size_t nstreams;
    spawned *threads; /* not joined yet */
};

static void *machine_before_block(void *ctx)
{
    (void)ctx;
    return fan_allow_threads_begin();
}

static void machine_after_block(void *ctx, void *left)
{
    (void)ctx;
    fan_allow_threads_end(left);
}

static const fan_sim_hooks hooks = {
    .before_block = machine_before_block,
    .after_block = machine_after_block,
};

/* ---- new, entered, free ---- */

/* handle_new: takes the hold of m, also on failure. */
static fan_status handle_new(fan_sim *m, fanin_machine **out, fan_error *err)
{
    fanin_machine *h = fan_calloc(sizeof *h);
    if (h && pthread_mutex_init(&h->lock, NULL) == 0) {
        h->m = m;
        *out = h;
        return FAN_OK;
    }
    fan_free(h);
    fan_sim_drop(m);
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
}

static fan_status machine_new(const fanin_machine_options *options, fanin_machine **out,
                              fan_error *err)
{
    fanin_machine_options o;
    fan_sim *m;
    FAN_TRY(fan_api_options(options, sizeof o, sizeof o, "fanin_machine_options", &o, err));
    if (o.schedule < FANIN_SEEDED || o.schedule > FANIN_ROUND_ROBIN || o.schedule == 3) {
        return fan_fail(err, FAN_ERR_VALUE, "fanin_machine_options: there is no schedule %d",
                        (int)o.schedule);
    }
    fan_sim_config config = {
        .devices = o.devices ? o.devices : 1,
        .seed = o.seed,
        .schedule = (fan_sim_schedule)o.schedule,
        .run_work = true,
    };
    FAN_TRY(fan_sim_new(&config, &hooks, &m, err));
    return handle_new(m, out, err);
}

fanin_status fan_api_machine_new(const fanin_machine_options *options, fanin_machine **out,
                                 fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    *out = NULL;
    fan_error_clear(&err);
    return fan_api_fail(why, machine_new(options, out, &err), &err);
}

fanin_status fan_api_machine_entered(fanin_machine **out, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    fan_sim *m = fan_sim_entered();
    *out = NULL;
    fan_error_clear(&err);
    if (m)
        status = handle_new(fan_sim_hold(m), out, &err);
    else
        status = fan_fail(&err, FAN_ERR_STATE, "this thread has entered no simulated machine");
    return fan_api_fail(why, status, &err);
}

static void spawned_free(spawned *t)
{
    fan_sim_drop(t->m);
    fan_free(t);
}

void fan_api_machine_free(fanin_machine *m)
{
    if (!m)
        return;
    fan_api_place was = fan_api_releases_begin();
    for (size_t i = 0; i < m->nstreams; i++)
        fan_stream_drop(m->streams[i]);
    fan_free(m->streams);
    /* A thread that was not joined may run for ever, so its record stays. */
    spawned *t = m->threads;
    while (t) {
        spawned *next = t->next;
        (void)pthread_detach(t->thread);
        t = next;
    }
    (void)pthread_mutex_destroy(&m->lock);
    fan_sim_drop(m->m);
    fan_free(m);
    fan_api_releases_end(was);
}

fanin_status fan_api_machine_enter(fanin_machine *m, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    return fan_api_fail(why, fan_sim_enter(m->m, &err), &err);
}

void fan_api_machine_leave(fanin_machine *m)
{
    fan_sim_leave(m->m);
}

uint64_t fan_api_machine_races(fanin_machine *m)
{
    if (fan_sched_active())
        fan_sim_read_all(m->m);
    return fan_sim_races(m->m);
}

/* ---- streams, memory, work ---- */

static fan_status machine_stream(fanin_machine *m, int32_t device, fanin_stream *out,
                                 fan_error *err)
{
    fan_stream *s = NULL;
    FAN_TRY(fan_sim_stream(m->m, device, true, &s, err));
    fan_sim_list(m->m, s);
    out->handle = (uintptr_t)s->handle;
    (void)pthread_mutex_lock(&m->lock);
    fan_stream **more = fan_realloc(m->streams, (m->nstreams + 1) * sizeof *more);
    if (more) {
        m->streams = more;
        m->streams[m->nstreams++] = s;
    }
    (void)pthread_mutex_unlock(&m->lock);
    if (more)
        return FAN_OK;
    fan_stream_drop(s);
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
}

fanin_status fan_api_machine_stream(fanin_machine *m, int32_t device, fanin_stream *out,
                                    fanin_failure *why)
{
    *out = (fanin_stream){FANIN_DEVICE_SIM, device, 0};
    FAN_API_RUN(machine_stream(m, device, out, &err));
}

static fan_status machine_array(const fanin_machine *m, int32_t device, const fanin_tensor *init,
                                fanin_value *out, fan_error *err)
{
    fan_array *from, *a = NULL;
    if (!fan_sim_device(m->m, device)) {
        return fan_fail(err, FAN_ERR_VALUE, "machine_array: the machine has no device %d",
                        (int)device);
    }
    FAN_TRY(fan_api_view(init, false, &from, err));
    fan_status status =
        fan_sim_array(m->m, device, from->dtype, from->ndim, from->shape, from, &a, err);
    fan_array_drop(from);
    if (status == FAN_OK)
        fan_api_show(a, fan_sim_device(m->m, device), out);
    return status;
}

fanin_status fan_api_machine_array(fanin_machine *m, int32_t device, const fanin_tensor *init,
                                   fanin_value *out, fanin_failure *why)
{
    fan_c_show(NULL, out);
    FAN_API_RUN(machine_array(m, device, init, out, &err));
}

/* A kernel of the caller's, with holds on its arrays. */
typedef struct queued {
    fan_api_release end;
    fanin_kernel k;
    char name[48];
    size_t n;
    fan_array *arrays[];
} queued;

static fan_status queued_call(void *ctx, fan_error *err)
{
    const queued *q = ctx;
    fan_status status = fan_api_core_status(q->k.call(q->k.ctx));
    if (status != FAN_OK)
        return fan_fail(err, status, "the kernel '%s' failed", q->name);
    return FAN_OK;
}

static void queued_drop_arrays(const queued *q)
{
    for (size_t i = 0; i < q->n; i++)
        fan_array_drop(q->arrays[i]);
}

static void queued_release(fan_api_release *end)
{
    queued *q = (queued *)end;
    q->k.release(q->k.ctx);
    fan_free(q);
}

static void queued_end(void *ctx)
{
    queued *q = ctx;
    queued_drop_arrays(q);
    if (q->k.release)
        fan_api_release_call(&q->end);
    else
        fan_free(q);
}

/* queued_add: appends n arrays of the caller's; `what` names them in messages. */
static fan_status queued_add(queued *q, const fan_sim *m, const fanin_value *values, size_t n,
                             const char *what, fan_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const fanin_value *v = &values[i];
        if (!v->array || fan_sim_of(fan_api_device_of(v)) != m) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "machine_launch: %s %zu is no array of this machine", what, i);
        }
        q->arrays[q->n++] = fan_array_hold(fan_c_array(v));
    }
    return FAN_OK;
}

/* queued_new: on failure, too, the caller drops the arrays of *out and frees it. */
static fan_status queued_new(const fanin_machine *m, const fanin_kernel *given, queued **out,
                             fan_error *err)
{
    fanin_kernel k;
    FAN_TRY(fan_api_options(given, sizeof k, sizeof k, "fanin_kernel", &k, err));
    if (!k.call)
        return fan_fail(err, FAN_ERR_VALUE, "machine_launch: expected a function, got NULL");
    queued *q = *out = fan_calloc(sizeof *q + (k.nreads + k.nwrites) * sizeof(fan_array *));
    if (!q)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    q->end.run = queued_release;
    q->k = k;
    fan_append(q->name, sizeof q->name, "%s", k.name ? k.name : "kernel");
    FAN_TRY(queued_add(q, m->m, k.reads, k.nreads, "read", err));
    return queued_add(q, m->m, k.writes, k.nwrites, "write", err);
}

static fan_status launch(const fanin_machine *m, const fanin_stream *stream,
                         const fanin_kernel *kernel, fan_error *err)
{
    queued *q = NULL;
    fan_stream *s = NULL;
    fan_device *near = NULL;
    if (stream)
        near = fan_sim_device(m->m, stream->device_id);
    fan_status status = queued_new(m, kernel, &q, err);
    if (status == FAN_OK)
        status = fan_api_stream(stream, near, &s, err);
    if (status == FAN_OK && (!s || fan_sim_of(s->device) != m->m))
        status = fan_fail(err, FAN_ERR_VALUE, "machine_launch: expected a stream of this machine");
    if (status == FAN_OK) {
        fan_sim_kernel k = {
            .name = q->name,
            .fn = queued_call,
            .fini = queued_end,
            .ctx = q,
            .reads = q->arrays,
            .nreads = q->k.nreads,
            .writes = q->arrays + q->k.nreads,
            .nwrites = q->k.nwrites,
            .us = -1,
        };
        status = fan_sim_launch(m->m, s, &k, err);
    }
    if (status != FAN_OK && q) {
        queued_drop_arrays(q);
        fan_free(q);
    }
    fan_stream_drop(s);
    return status;
}

fanin_status fan_api_machine_launch(fanin_machine *m, const fanin_stream *stream,
                                    const fanin_kernel *kernel, fanin_failure *why)
{
    FAN_API_RUN(launch(m, stream, kernel, &err));
}

static fan_status machine_synchronize(const fanin_machine *m, fan_error *err)
{
    FAN_TRY(fan_sim_synchronize(m->m, err));
    return fan_sim_pending(m->m, err);
}

fanin_status fan_api_machine_synchronize(fanin_machine *m, fanin_failure *why)
{
    FAN_API_RUN(machine_synchronize(m, &err));
}

/* ---- host threads ---- */

static void *spawned_main(void *arg)
{
    const spawned *t = arg;
    /* a thread that is never joined outlives its record's handle */
    fan_sim *m = fan_sim_hold(t->m);
    int actor = t->actor;
    if (fan_sim_thread_begin(m, actor)) {
        if (fan_sim_enter(m, NULL) == FAN_OK) {
            t->run(t->ctx);
            fan_sim_leave(m);
        }
        fan_sim_thread_end(m, actor);
    }
    fan_sim_drop(m);
    return NULL;
}

static fan_status machine_spawn(fanin_machine *m, void (*run)(void *ctx), void *ctx, fan_error *err)
{
    if (!run)
        return fan_fail(err, FAN_ERR_VALUE, "machine_spawn: expected a function, got NULL");
    spawned *t = fan_calloc(sizeof *t);
    if (!t)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    fan_status status = fan_sim_spawn(m->m, &t->actor, err);
    if (status != FAN_OK) {
        fan_free(t);
        return status;
    }
    t->m = fan_sim_hold(m->m);
    t->run = run;
    t->ctx = ctx;
    if (pthread_create(&t->thread, NULL, spawned_main, t) != 0) {
        fan_sim_thread_end(m->m, t->actor); /* join would wait for it */
        spawned_free(t);
        return fan_fail(err, FAN_ERR_STATE, "a thread could not be started");
    }
    (void)pthread_mutex_lock(&m->lock);
    t->next = m->threads;
    m->threads = t;
    (void)pthread_mutex_unlock(&m->lock);
    return FAN_OK;
}

fanin_status fan_api_machine_spawn(fanin_machine *m, void (*run)(void *ctx), void *ctx,
                                   fanin_failure *why)
{
    FAN_API_RUN(machine_spawn(m, run, ctx, &err));
}

fanin_status fan_api_machine_join(fanin_machine *m, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    void *left = fan_allow_threads_begin();
    fan_status status = fan_sim_join(m->m, &err);
    (void)pthread_mutex_lock(&m->lock);
    spawned *t = m->threads;
    m->threads = NULL;
    (void)pthread_mutex_unlock(&m->lock);
    while (t) {
        spawned *next = t->next;
        if (fan_sim_stuck(m->m, t->actor)) { /* it never ends, and its record stays */
            (void)pthread_detach(t->thread);
        } else {
            (void)pthread_join(t->thread, NULL);
            spawned_free(t);
        }
        t = next;
    }
    fan_allow_threads_end(left);
    return fan_api_fail(why, status, &err);
}
