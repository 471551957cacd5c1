/* The device's entries for graph trees, on its own captures. */
#include "base/mem.h"
#include "device/sim/access.h"
#include "device/sim/call.h"
#include "device/sim/footprint.h"
#include "device/sim/queue.h"
#include "device/sim/runs.h"

#include <string.h>

static fan_status recorder_origin(fan_device *d, fan_stream **out, fan_error *err)
{
    return fan_sim_stream(fan__sim_machine(d), d->index, false, out, err);
}

static fan_status recorder_begin(fan_device *d, fan_stream *origin, fan_error *err)
{
    return fan_sim_capture_begin(fan__sim_machine(d), origin, FAN_CAPTURE_THREAD_LOCAL, err);
}

static fan_status recorder_end(fan_device *d, fan_stream *origin, fan_recording **out, fan_error *err)
{
    fan_sim_graph *g = NULL;
    FAN_TRY(fan_sim_capture_end(fan__sim_machine(d), origin, &g, err));
    *out = (fan_recording *)g;
    return FAN_OK;
}

static void recorder_abort(fan_device *d, fan_stream *origin)
{
    fan_sim_graph *g = NULL;
    (void)fan_sim_capture_end(fan__sim_machine(d), origin, &g, NULL);
    fan_sim_graph_drop(g);
}

static fan_status recorder_launch(fan_recording *r, fan_stream *origin, fan_error *err)
{
    return fan_sim_graph_launch((fan_sim_graph *)r, origin, err);
}

static double recorder_clock(fan_device *d, fan_stream *origin)
{
    fan_sim *m = fan__sim_machine(d);
    fan__sim_lock(m);
    double us = fan__later(fan__queue_of(origin)->end_us, m->host_us[fan__sim_host(m)]);
    fan__sim_unlock(m);
    return us;
}

static void recorder_drop(fan_recording *r) { fan_sim_graph_drop((fan_sim_graph *)r); }

static void recorder_accesses(const fan_recording *recording, fan_recording_visit visit, void *ctx)
{
    const fan_sim_graph *g = (const fan_sim_graph *)recording;
    for (const fan_sim_command *c = g->head; c; c = c->next) {
        const fan_array *a = NULL;
        bool write, one = c->njobs == 1;
        if (c->kind != FAN_COMMAND_WORK)
            continue;
        fan__visit *next = one ? fan__visit_job : fan__visit_kernel;
        const void *what = one ? (const void *)c->jobs : (const void *)&c->kernel;
        for (size_t i = 0; next(what, i, &a, &write); i++) {
            int64_t lo, hi;
            if (!a || !a->size)
                continue;
            fan_array_reach(a, &lo, &hi);
            if (!visit(ctx, c->name, a->data + lo, (size_t)(hi - lo), write))
                return;
        }
    }
}

/* Memory that is to be poisoned. */
typedef struct recorder_range {
    void *data;
    size_t bytes;
} recorder_range;

static fan_status recorder_spoil(void *ctx, fan_error *err)
{
    const recorder_range *r = ctx;
    (void)err;
    memset(r->data, FAN_POISON, r->bytes);
    return FAN_OK;
}

static fan_status recorder_poison(fan_device *d, fan_stream *origin, void *data, size_t bytes, fan_error *err)
{
    int64_t n = (int64_t)bytes, step = 1;
    fan_storage st = {.data = data, .bytes = bytes};
    fan_array a = {.storage = &st,
                   .data = data,
                   .dtype = FAN_DT_UINT8,
                   .ndim = 1,
                   .size = n,
                   .shape = &n,
                   .strides = &step,
                   .writable = true};
    fan_array *writes = &a;
    recorder_range *r = fan_alloc(sizeof *r);
    if (!r)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    *r = (recorder_range){data, bytes};
    fan_sim_kernel k = {
        .name = "poison", .fn = recorder_spoil, .fini = fan_free, .ctx = r, .writes = &writes, .nwrites = 1, .us = 0};
    fan_status status = fan_sim_launch(fan__sim_machine(d), origin, &k, err);
    if (status != FAN_OK)
        fan_free(r);
    return status;
}

const fan_recorder fan_sim_recorder = {
    .origin = recorder_origin,
    .begin = recorder_begin,
    .end = recorder_end,
    .abort = recorder_abort,
    .launch = recorder_launch,
    .clock = recorder_clock,
    .drop = recorder_drop,
    .accesses = recorder_accesses,
    .accesses_all = true,
    .poison = recorder_poison,
    .always_poisons = true,
};
