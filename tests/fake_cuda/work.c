#include "fake_cuda/work.h"

#include "base/mem.h"

static fan_status work_run(void *ctx, fan_error *err)
{
    fan__fake_work *w = ctx;
    (void)err;
    w->run(w);
    return FAN_OK;
}

fan_cu_result fan__work_queue(fan_stream *s, const char *name, fan__fake_work *w,
                              fan_array *const *reads, size_t nreads, fan_array *const *writes,
                              size_t nwrites)
{
    fan_error err = {.status = FAN_OK};
    if (!w)
        return OUT_OF_MEMORY;
    fan__fake_note_races();
    fan_sim_kernel k = {.name = name,
                        .fn = work_run,
                        .fini = fan_free,
                        .ctx = w,
                        .reads = reads,
                        .nreads = nreads,
                        .writes = writes,
                        .nwrites = nwrites,
                        .us = -1};
    fan_status status = fan_sim_launch(fan__fake.m, s, &k, &err);
    if (status != FAN_OK)
        fan_free(w); /* it was not taken over */
    return fan__fake_done(status, &err);
}

fan_array fan__bytes_at(uint64_t address, size_t bytes, int64_t *dims)
{
    dims[0] = (int64_t)bytes;
    dims[1] = 1;
    return (fan_array){.data = fan__host(address),
                       .dtype = FAN_DT_UINT8,
                       .ndim = 1,
                       .size = (int64_t)bytes,
                       .shape = dims,
                       .strides = dims + 1,
                       .writable = true};
}

fan__fake_work *fan__work_new(void (*run)(fan__fake_work *), uint64_t address, size_t bytes,
                              size_t payload)
{
    fan__fake_work *w = fan_calloc(sizeof *w + payload);
    if (w) {
        w->run = run;
        w->address = address;
        w->bytes = bytes;
    }
    return w;
}
