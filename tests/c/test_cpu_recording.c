/* A recording on the CPU: its kernels, what it refuses, each allocation failed once. */
#include "device/cpu/recording.h"
#include "device/memory.h"

#include "base/mem.h"
#include "check.h"
#include "device/device.h"

static const int64_t shape[1] = {40};

static fan_array *array(float value)
{
    fan_array *a = NULL;
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, shape, NULL, &a, NULL));
    for (int i = 0; i < 40; i++)
        ((float *)(void *)a->data)[i] = value;
    return a;
}

static float first(const fan_array *a)
{
    return *(const float *)(const void *)a->data;
}

static fan_status sum(const fan_array *out, const fan_array *a, const fan_array *b, fan_error *err)
{
    fan_operand in[2] = {{.array = a, .acc = FAN_DT_FLOAT32}, {.array = b, .acc = FAN_DT_FLOAT32}};
    return fan_cpu()->backend->run(
        fan_cpu(), NULL, &(fan_job){.kind = FAN_JOB_SUM, .out = out, .in = in, .n = 2}, err);
}

static int calls, drops, fails_at = -1;
static fan_status count_call(void *ctx, fan_error *err)
{
    calls++;
    return *(int *)ctx == fails_at ? fan_fail(err, FAN_ERR_VALUE, "on purpose") : FAN_OK;
}
static void count_drop(void *ctx)
{
    drops += *(int *)ctx >= 0;
}

/* from_scope: what a function of a graph tree allocates; here it is the host's. */
static fan_status from_scope(fan_memory_scope *self, fan_stream *owner, size_t bytes,
                             fan_storage **out, fan_error *err)
{
    (void)self, (void)owner, (void)err;
    fan_storage_make was = fan_storage_redirect(NULL);
    *out = fan_storage_new(bytes);
    (void)fan_storage_redirect(was);
    return *out ? FAN_OK : FAN_ERR_NOMEM;
}

static const fan_recorder *begin(fan_memory_scope *scope)
{
    const fan_recorder *e = fan_cpu()->backend->recorder;
    *scope = (fan_memory_scope){.device = fan_cpu(), .alloc = from_scope, .who = "f"};
    fan_memory_scope_begin(scope);
    return e;
}

/* Jobs and calls run in their order at each launch, with the values of now, and not before. */
static void a_launch_runs_all_kernels(void)
{
    fan_memory_scope scope;
    fan_array *a = array(1);
    fan_array *b = array(2);
    fan_array *between = array(0);
    fan_array *out = array(0);
    fan_recording *r = NULL;
    int zero = 0;
    CHECK(!fan_recording_here());
    const fan_recorder *e = begin(&scope);
    CHECK_OK(e->begin(fan_cpu(), NULL, NULL));
    CHECK_OK(sum(between, a, b, NULL));
    fan_cpu_access access = {between->data, 160, false};
    fan_cpu_call call = {count_call, count_drop, &zero, "call", &access, 1};
    CHECK_OK(fan_recording_call(fan_recording_here(), &call, NULL));
    CHECK_OK(sum(out, between, b, NULL));
    CHECK_OK(e->end(fan_cpu(), NULL, &r, NULL));
    CHECK(!fan_recording_here());
    fan_memory_scope_end(&scope);
    CHECK(first(out) == 0 && calls == 0);
    CHECK_OK(e->launch(r, NULL, NULL));
    CHECK(first(out) == 5 && calls == 1);
    ((float *)(void *)a->data)[0] = 10;
    int64_t before = fan_mem_get().total;
    CHECK_OK(e->launch(r, NULL, NULL));
    CHECK_INT(fan_mem_get().total, before); /* a launch allocates nothing */
    CHECK(first(out) == 14 && ((float *)(void *)out->data)[1] == 5 && calls == 2);
    fails_at = 0;
    CHECK_INT(e->launch(r, NULL, NULL), FAN_ERR_VALUE);
    fails_at = -1;
    e->drop(r);
    CHECK_INT(drops, 1);
    fan_array_drop(a);
    fan_array_drop(b);
    fan_array_drop(between);
    fan_array_drop(out);
}

static bool none_writes(void *ctx, const char *name, const void *data, size_t bytes, bool write)
{
    *(int *)ctx += name && data && bytes == 160 ? 1 + 100 * write : 10000;
    return true;
}

/* The entries of the table do the same for a graph tree, but that nothing runs before the launch:
 * begin, end, launch, drop; what a recording touches can be read. */
static void the_recorder_is_whole(void)
{
    fan_memory_scope scope = {.device = fan_cpu(), .alloc = from_scope, .who = "f"};
    const fan_recorder *e = fan_cpu()->backend->recorder;
    fan_array *a = array(1);
    fan_array *out = array(0);
    fan_recording *r = NULL;
    int seen = 0;
    CHECK(e && !e->origin);
    fan_memory_scope_begin(&scope);
    CHECK_INT(e->end(fan_cpu(), NULL, &r, NULL), FAN_ERR_CAPTURE);
    CHECK_OK(e->begin(fan_cpu(), NULL, NULL));
    CHECK_INT(e->begin(fan_cpu(), NULL, NULL), FAN_ERR_CAPTURE);
    CHECK_OK(sum(out, a, a, NULL)); /* without operands any memory is one */
    CHECK_OK(e->end(fan_cpu(), NULL, &r, NULL));
    fan_memory_scope_end(&scope);
    CHECK(first(out) == 0);
    e->accesses(r, none_writes, &seen);
    CHECK_INT(seen, 3 + 100);
    ((float *)(void *)a->data)[0] = 4;
    CHECK_OK(e->launch(r, NULL, NULL));
    CHECK(first(out) == 8);
    CHECK_OK(e->poison(fan_cpu(), NULL, out->data, 160, NULL));
    CHECK(first(out) != first(out));
    e->drop(r);
    CHECK_OK(e->begin(fan_cpu(), NULL, NULL));
    e->abort(fan_cpu(), NULL);
    e->abort(fan_cpu(), NULL);
    CHECK(!fan_storage_redirected());
    fan_array_drop(a);
    fan_array_drop(out);
}

/* What cannot be recorded is refused, and again at the end, if the error was handled. */
static void what_cannot_be_recorded_is_refused(void)
{
    fan_array *a = array(1);
    fan_array *out = array(0);
    fan_operand in = {.array = a, .acc = FAN_DT_FLOAT32};
    fan_stats stats;
    fan_job jobs[] = {{.kind = FAN_JOB_EXACT, .out = out, .in = &in, .n = 1},
                      {.kind = FAN_JOB_SCATTER, .out = out},
                      {.kind = FAN_JOB_STATS, .in = &in, .n = 1},
                      {.kind = FAN_JOB_SUM, .out = out, .in = &in, .n = 1, .stats = &stats}};
    const char *words[] = {"exact", "sparse", "stats", "stats"};
    bool recorded;
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        fan_memory_scope scope;
        fan_error err = {0};
        fan_error end = {0};
        fan_recording *r = NULL;
        const fan_recorder *e = begin(&scope);
        CHECK_OK(e->begin(fan_cpu(), NULL, NULL));
        CHECK_INT(fan_recording_job(&jobs[i], &recorded, &err), FAN_ERR_CAPTURE);
        CHECK_HAS(err.text, words[i]);
        CHECK_INT(e->end(fan_cpu(), NULL, &r, &end), FAN_ERR_CAPTURE);
        CHECK(!r);
        CHECK_STR(end.text, err.text);
        fan_memory_scope_end(&scope);
        CHECK_OK(fan_recording_job(&jobs[i], &recorded, &err)); /* nothing records */
        CHECK(!recorded);
    }
    fan_array_drop(a);
    fan_array_drop(out);
}

/* The n-th allocation fails: nothing is lost, and the end returns the reason. */
static void each_allocation_fails_once(void)
{
    fan_array *a = array(1);
    fan_array *out = array(0);
    int failed = 0;
    int whole = 0;
    int minus = -1;
    for (int n = 0; n < 40 && !whole; n++) {
        fan_memory_scope scope;
        fan_recording *r = NULL;
        const fan_recorder *e = begin(&scope);
        int64_t live = fan_mem_get().live;
        fan_mem_fail_at(n, 1);
        fan_status status = e->begin(fan_cpu(), NULL, NULL);
        if (status == FAN_OK) {
            fan_cpu_call call = {count_call, count_drop, &minus, "call", NULL, 0};
            status = sum(out, a, a, NULL);
            if (status == FAN_OK)
                status = fan_recording_call(fan_recording_here(), &call, NULL);
            fan_status end = e->end(fan_cpu(), NULL, &r, NULL);
            CHECK(status == end);
        }
        fan_mem_fail_at(-1, 0);
        fan_memory_scope_end(&scope);
        e->drop(r);
        CHECK_INT(fan_mem_get().live, live);
        CHECK(status == FAN_OK || status == FAN_ERR_NOMEM);
        whole += status == FAN_OK;
        failed += status != FAN_OK;
    }
    printf("%d allocations failed\n", failed);
    CHECK(failed >= 4 && whole == 1);
    fan_array_drop(a);
    fan_array_drop(out);
}

int main(void)
{
    a_launch_runs_all_kernels();
    the_recorder_is_whole();
    what_cannot_be_recorded_is_refused();
    each_allocation_fails_once();
    return check_done();
}
