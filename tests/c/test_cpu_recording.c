/* A recording on the CPU: its blocks, its kernels, what it refuses, each allocation failed once. */
#include "device/cpu/recording.h"
#include "device/memory.h"

#include "base/mem.h"
#include "base/rng.h"
#include "check.h"
#include "device/device.h"

#include <stdlib.h>

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
    fan_operand in[2] = {{a, FAN_DT_FLOAT32}, {b, FAN_DT_FLOAT32}};
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

/* A block is given again only when its array has gone, and only to what fits; who keeps an array
 * keeps the memory. */
static void blocks_are_given_again(void)
{
    fan_blocks *b = fan_blocks_new();
    fan_storage *one = fan_blocks_storage(b, 1000), *two = fan_blocks_storage(b, 1000);
    void *was = one->data;
    CHECK(one->data != two->data && fan_blocks_live(b) == 2 && fan_blocks_bytes(b) == 2048);
    CHECK(fan_blocks_have(b, (char *)one->data + 1, 999) &&
          !fan_blocks_have(b, (char *)one->data + 1000, 100));
    fan_storage_drop(one);
    CHECK(!fan_blocks_have(b, was, 1) && fan_blocks_live(b) == 1);
    fan_storage *small = fan_blocks_storage(b, 8), *again = fan_blocks_storage(b, 600);
    CHECK(small->data != was); /* less than half of it */
    CHECK(again->data == was);
    memset(two->data, 1, 1000);
    fan_storage_drop(small);
    fan_blocks_poison(b);
    CHECK(((unsigned char *)two->data)[0] == 0xff);
    fan_storage_drop(again);
    fan_blocks_drop(b);
    memset(two->data, 2, 1000); /* it lives as long as this */
    fan_storage_drop(two);
}

/* Any trace of allocations and drops: no two arrays share a byte, the same trace gives the same
 * order of blocks. */
static void no_two_arrays_share_a_byte(uint64_t seed)
{
    fan_blocks *b = fan_blocks_new();
    fan_storage *live[24] = {NULL};
    uint64_t rng = seed;
    long made = 0, dropped = 0;
    for (int step = 0; step < 3000; step++) {
        size_t i = fan_rng(&rng) % 24;
        if (live[i]) {
            bool whole = true;
            for (size_t k = 0; k < live[i]->bytes; k++)
                whole = whole && ((unsigned char *)live[i]->data)[k] == (unsigned char)i;
            CHECK(whole);
            fan_storage_drop(live[i]);
            live[i] = NULL;
            dropped++;
        } else {
            live[i] = fan_blocks_storage(b, 1 + fan_rng(&rng) % 700);
            memset(live[i]->data, (int)i, live[i]->bytes);
            made++;
        }
    }
    printf("seed %llu: %ld made, %ld dropped, %llu bytes\n", (unsigned long long)seed, made,
           dropped, (unsigned long long)fan_blocks_bytes(b));
    CHECK(made > 1000 && dropped > 1000 && fan_blocks_bytes(b) < 24 * 2 * 704);
    for (int i = 0; i < 24; i++)
        fan_storage_drop(live[i]);
    CHECK_INT(fan_blocks_live(b), 0);
    fan_blocks_drop(b);
}

/* Jobs and calls run again in their order, with the values of now; memory made while it records is
 * at its place. */
static void a_replay_does_it_again(void)
{
    fan_array *a = array(1), *b = array(2), *out = array(0);
    fan_recording *r = fan_recording_new();
    int zero = 0;
    CHECK_OK(fan_recording_operand(r, a->data, 160, true, NULL));
    CHECK_OK(fan_recording_operand(r, b->data, 160, true, NULL));
    CHECK_OK(fan_recording_operand(r, out->data, 160, true, NULL));
    CHECK(!fan_recording_here() && !fan_storage_redirected());
    CHECK_OK(fan_recording_begin(r, NULL));
    CHECK(fan_recording_here() == r && fan_storage_redirected());
    CHECK_INT(fan_recording_begin(r, NULL), FAN_ERR_CAPTURE);
    fan_array *between = array(0);
    CHECK(!fan_storage_only_ours(between->storage)); /* L8: lent */
    CHECK_OK(sum(between, a, b, NULL));
    fan_cpu_access access = {between->data, 160, false};
    fan_cpu_call call = {count_call, count_drop, &zero, "call", &access, 1};
    CHECK_OK(fan_recording_call(r, &call, NULL));
    CHECK_OK(sum(out, between, b, NULL));
    fan_array_drop(between);
    CHECK_OK(fan_recording_end(r, NULL));
    CHECK(!fan_recording_here() && !fan_storage_redirected());
    CHECK_INT(fan_recording_kernels(r), 3);
    CHECK_INT(fan_blocks_live(fan_recording_blocks(r)), 0);
    CHECK(first(out) == 5);
    ((float *)(void *)a->data)[0] = 10;
    fan_blocks_poison(fan_recording_blocks(r));
    int64_t before = fan_mem_get().total;
    CHECK_OK(fan_recording_replay(r, NULL));
    CHECK_INT(fan_mem_get().total, before); /* a replay allocates nothing */
    CHECK(first(out) == 14 && ((float *)(void *)out->data)[1] == 5 && calls == 1);
    fails_at = 0;
    CHECK_INT(fan_recording_replay(r, NULL), FAN_ERR_VALUE);
    fails_at = -1;
    fan_recording_free(r);
    CHECK_INT(drops, 1);
    fan_array_drop(a);
    fan_array_drop(b);
    fan_array_drop(out);
}

static bool none_writes(void *ctx, const char *name, const void *data, size_t bytes, bool write)
{
    *(int *)ctx += name && data && bytes == 160 ? 1 + 100 * write : 10000;
    return true;
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

/* The entries of the table do the same for a graph tree, but that nothing runs before the launch:
 * begin, end, launch, drop; what a recording touches can be read. */
static void the_recorder_is_whole(void)
{
    fan_memory_scope scope = {.device = fan_cpu(), .alloc = from_scope, .who = "f"};
    const fan_recorder *e = fan_cpu()->backend->recorder;
    fan_array *a = array(1), *out = array(0);
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

/* What cannot be recorded is said, and said again at the end, whoever kept it to himself. */
static void what_cannot_be_recorded_is_refused(void)
{
    fan_array *a = array(1), *out = array(0), *elsewhere = array(0);
    fan_operand in = {a, FAN_DT_FLOAT32};
    fan_stats stats;
    fan_job jobs[] = {{.kind = FAN_JOB_EXACT, .out = out, .in = &in, .n = 1},
                      {.kind = FAN_JOB_SCATTER, .out = out},
                      {.kind = FAN_JOB_STATS, .in = &in, .n = 1},
                      {.kind = FAN_JOB_SUM, .out = out, .in = &in, .n = 1, .stats = &stats},
                      {.kind = FAN_JOB_COPY, .out = elsewhere, .in = &in, .n = 1},
                      {.kind = FAN_JOB_COPY,
                       .out = out,
                       .in = &(fan_operand){elsewhere, FAN_DT_FLOAT32},
                       .n = 1}};
    const char *words[] = {
        "exact", "sparse", "stats", "stats", "copy writes memory", "copy reads memory"};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        fan_recording *r = fan_recording_new();
        fan_error err = {0}, end = {0};
        CHECK_OK(fan_recording_operand(r, a->data, 160, true, NULL));
        CHECK_OK(fan_recording_operand(r, out->data, 160, true, NULL));
        CHECK_OK(fan_recording_begin(r, NULL));
        CHECK_INT(fan_recording_job(&jobs[i], &err), FAN_ERR_CAPTURE);
        CHECK_HAS(err.text, words[i]);
        CHECK_INT(fan_recording_kernels(r), 0);
        CHECK_INT(fan_recording_end(r, &end), FAN_ERR_CAPTURE);
        CHECK_STR(end.text, err.text);
        fan_recording_free(r);
        CHECK_OK(fan_recording_job(&jobs[i], &err)); /* nobody records */
    }
    fan_array_drop(a);
    fan_array_drop(out);
    fan_array_drop(elsewhere);
}

/* The n-th allocation fails: nothing is lost, the reason comes at the end. */
static void each_allocation_fails_once(void)
{
    fan_array *a = array(1), *out = array(0);
    int failed = 0, whole = 0, minus = -1;
    for (int n = 0; n < 40 && !whole; n++) {
        int64_t live = fan_mem_get().live;
        fan_mem_fail_at(n, 1);
        fan_recording *r = fan_recording_new();
        fan_status status = r ? fan_recording_operand(r, a->data, 160, true, NULL) : FAN_ERR_NOMEM;
        if (status == FAN_OK)
            status = fan_recording_operand(r, out->data, 160, true, NULL);
        if (status == FAN_OK && fan_recording_begin(r, NULL) == FAN_OK) {
            fan_array *between = NULL;
            fan_cpu_call call = {count_call, count_drop, &minus, "call", NULL, 0};
            status = fan_array_new(FAN_DT_FLOAT32, 1, shape, NULL, &between, NULL);
            if (status == FAN_OK)
                status = sum(between, a, a, NULL);
            if (status == FAN_OK)
                status = fan_recording_call(r, &call, NULL);
            if (status == FAN_OK)
                status = sum(out, between, a, NULL);
            fan_array_drop(between);
            fan_status end = fan_recording_end(r, NULL);
            CHECK(status == FAN_OK ? end == FAN_OK : true);
        }
        fan_mem_fail_at(-1, 0);
        fan_recording_free(r);
        CHECK_INT(fan_mem_get().live, live);
        CHECK(status == FAN_OK || status == FAN_ERR_NOMEM);
        whole += status == FAN_OK;
        failed += status != FAN_OK;
    }
    printf("%d allocations failed\n", failed);
    CHECK(failed >= 8 && whole == 1);
    fan_array_drop(a);
    fan_array_drop(out);
}

int main(void)
{
    blocks_are_given_again();
    for (uint64_t seed = 1; seed <= 5; seed++)
        no_two_arrays_share_a_byte(seed);
    a_replay_does_it_again();
    the_recorder_is_whole();
    what_cannot_be_recorded_is_refused();
    each_allocation_fails_once();
    return check_done();
}
