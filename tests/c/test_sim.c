/* The simulated machine: the axioms A1-A8 as litmus tests, with verdicts and with real values; what
 * a race says; schedules, jobs, failed calls, a machine for many runs. */
#define _POSIX_C_SOURCE 200809L
#include "sim_world.h"

/* ---- the axioms ---- */

typedef void litmus(world *w);

#define L(on, to, from) launch(w, w->s[on], "k" #on, to, from, __LINE__)

static void a1_a_stream_is_a_queue(world *w)
{
    for (int i = 0; i < 5; i++)
        L(0, i % 2, 3);
}

static void a2_an_event_is_all_earlier_work_of_its_stream(world *w)
{
    L(0, 0, 0);
    L(0, 1, 0);
    order(w->s[1], w->s[0]);
    L(1, 2, 3);
}

static void a2_but_not_later_work(world *w)
{
    L(0, 0, 0);
    order(w->s[1], w->s[0]);
    L(0, 1, 0);
    L(1, 2, 3);
}

static void a3(world *w, bool read_first, bool wait_again)
{
    fan_event *e;
    CHECK_OK(fan_event_new(w->s[0]->device, &e, NULL));
    L(0, 0, 0);
    CHECK_OK(fan_event_rerecord(e, w->s[0], NULL));
    CHECK_OK(fan_stream_wait(w->s[1], e, NULL, NULL));
    L(0, 1, 0);
    CHECK_OK(fan_event_rerecord(e, w->s[0], NULL));
    if (wait_again)
        CHECK_OK(fan_stream_wait(w->s[1], e, NULL, NULL));
    L(1, 2, read_first ? 1 : 2);
    fan_event_drop(e); /* waits that are queued stay */
}

static void a3_a_wait_is_for_the_record_that_was(world *w)
{
    a3(w, true, false);
}
static void a3_not_for_a_later_one(world *w)
{
    a3(w, false, false);
}
static void a3_unless_it_waits_again(world *w)
{
    a3(w, false, true);
}

static void a4_a_wait_for_nothing_is_nothing(world *w)
{
    fan_event *e;
    CHECK_OK(fan_event_new(w->s[0]->device, &e, NULL));
    L(0, 0, 0);
    CHECK_OK(fan_stream_wait(w->s[1], e, NULL, NULL));
    CHECK_OK(fan_event_rerecord(e, w->s[0], NULL)); /* too late */
    L(1, 1, 1);
    CHECK_INT(w->warnings, 1);
    fan_event_drop(e);
}

static void a5_the_hosts_order_is_no_order(world *w)
{
    L(0, 0, 0);
    L(1, 0, 0);
}

static void a6_waits_work_across_devices(world *w) /* s0, s2 and x0, x2 are on device 0 */
{
    CHECK(w->s[0]->device != w->s[1]->device);
    L(0, 0, 0);
    order(w->s[1], w->s[0]);
    L(1, 1, 1);
    order(w->s[2], w->s[1]);
    L(2, 0, 2);
}

static void a6_and_are_needed(world *w)
{
    L(0, 0, 0);
    L(1, 1, 1);
}

static void a7_the_legacy_stream_waits_for_blocking_ones(world *w) /* s0 blocks */
{
    fan_stream *d = legacy_of(w, 0);
    L(0, 0, 0);
    launch(w, d, "legacy", 1, 1, 70);
    fan_stream_drop(d);
}

static void a7_and_they_for_it(world *w)
{
    fan_stream *d = legacy_of(w, 0);
    launch(w, d, "legacy", 0, 0, 71);
    L(0, 1, 1);
    L(0, 2, 1);
    launch(w, d, "legacy", 2, 2, 72);
    fan_stream_drop(d);
}

static void a7_an_event_on_it_is_all_blocking_work(world *w)
{
    fan_stream *d = legacy_of(w, 0);
    L(0, 0, 0);
    order(w->s[2], d); /* s2 does not block */
    L(2, 2, 1);
    fan_stream_drop(d);
}

static void a7_not_for_the_others(world *w) /* s2 does not block */
{
    fan_stream *d = legacy_of(w, 0);
    L(2, 0, 0);
    launch(w, d, "legacy", 1, 1, 73);
    fan_stream_drop(d);
}

static void a7_nor_they_for_it(world *w)
{
    fan_stream *d = legacy_of(w, 0);
    launch(w, d, "legacy", 1, 0, 74);
    L(2, 0, 2);
    fan_stream_drop(d);
}

static void a7_nor_blocking_streams_for_one_another(world *w)
{
    L(0, 0, 0);
    L(3, 0, 0);
}

static void a7_nor_across_devices(world *w) /* s1, of device 1, blocks */
{
    fan_stream *d = legacy_of(w, 0);
    launch(w, d, "legacy", 0, 0, 75);
    L(1, 0, 0);
    fan_stream_drop(d);
}

static const struct {
    const char *name;
    litmus *program;
    int devices;
    uint32_t blocking;
    bool races;
} axioms[] = {
    {"A1", a1_a_stream_is_a_queue, 1, 0, false},
    {"A2", a2_an_event_is_all_earlier_work_of_its_stream, 1, 0, false},
    {"A2 later work", a2_but_not_later_work, 1, 0, true},
    {"A3", a3_a_wait_is_for_the_record_that_was, 1, 0, false},
    {"A3 later record", a3_not_for_a_later_one, 1, 0, true},
    {"A3 waits again", a3_unless_it_waits_again, 1, 0, false},
    {"A4", a4_a_wait_for_nothing_is_nothing, 1, 0, true},
    {"A5", a5_the_hosts_order_is_no_order, 1, 0, true},
    {"A6", a6_waits_work_across_devices, 2, 0, false},
    {"A6 without", a6_and_are_needed, 2, 0, true},
    {"A7 legacy waits", a7_the_legacy_stream_waits_for_blocking_ones, 1, 1, false},
    {"A7 waited for", a7_and_they_for_it, 1, 1, false},
    {"A7 event", a7_an_event_on_it_is_all_blocking_work, 1, 1, false},
    {"A7 others", a7_not_for_the_others, 1, 1, true},
    {"A7 others 2", a7_nor_they_for_it, 1, 1, true},
    {"A7 one another", a7_nor_blocking_streams_for_one_another, 1, 9, true},
    {"A7 devices", a7_nor_across_devices, 2, 3, true},
};

static void the_axioms_hold_by_verdict_and_by_value(void)
{
    for (size_t i = 0; i < sizeof axioms / sizeof axioms[0]; i++) {
        world w;
        open(&w, config_of(axioms[i].devices, 0, FAN_SIM_SEEDED), axioms[i].blocking);
        axioms[i].program(&w);
        if (!CHECK((fan_sim_races(w.m) > 0) == axioms[i].races))
            fprintf(stderr, "    %s: verdict\n", axioms[i].name);
        CHECK_INT(w.worst, axioms[i].races ? FAN_ERR_RACE : FAN_OK);
        CHECK_INT(fan_sim_unsound(w.m), 0);
        fan_sim_synchronize(w.m, NULL);
        close(&w);

        /* The same without the checker: the values. */
        uint64_t first = 0;
        long same = 0;
        long other = 0;
        for (uint64_t seed = 0; seed < 40; seed++)
            for (int schedule = FAN_SIM_SEEDED; schedule <= FAN_SIM_ROUND_ROBIN; schedule++) {
                open(&w, config_of(axioms[i].devices, seed, (fan_sim_schedule)schedule),
                     axioms[i].blocking);
                fan_sim_check(w.m, false);
                axioms[i].program(&w);
                CHECK_OK(w.worst);
                uint64_t v = value(&w);
                if (same == 0)
                    first = v;
                *(v == first ? &same : &other) += 1;
                close(&w);
            }
        if (!CHECK((other > 0) == axioms[i].races))
            fprintf(stderr, "    %s: %ld values the same, %ld not\n", axioms[i].name, same, other);
    }
}

static void a8_memory_is_used_again_at_once_and_poisoned_before(void)
{
    world w;
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    fan_device *d = fan_sim_device(w.m, 0);
    int64_t n = 100;
    fan_array *a = NULL;
    fan_array *b = NULL;
    CHECK_OK(fan_sim_array(w.m, 0, FAN_DT_UINT8, 1, &n, NULL, &a, NULL));
    for (int i = 0; i < 100; i++)
        CHECK_INT((uint8_t)a->data[i], 0xA5);
    char *data = a->data;
    CHECK_OK(fan_device_run(d, w.s[0], &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"},
                            NULL));
    CHECK_OK(fan_memory_record_stream(a->storage, w.s[0], NULL));
    fan_array_drop(a);
    CHECK_OK(fan_sim_array(w.m, 0, FAN_DT_UINT8, 1, &n, NULL, &b, NULL));
    CHECK(b->data != data); /* it may still be written */
    CHECK_INT((uint8_t)b->data[0], 0xA5);
    CHECK_INT((uint8_t)data[0], 0xA5); /* nothing ran yet */
    CHECK_OK(fan_stream_sync(w.s[0], NULL));
    CHECK_INT(data[0], 0);
    CHECK_OK(fan_sim_array(w.m, 0, FAN_DT_UINT8, 1, &n, NULL, &a, NULL));
    CHECK(a->data == data);
    CHECK_INT((uint8_t)a->data[0], 0xA5);
    CHECK_INT(fan_sim_races(w.m), 0);
    fan_array_drop(a);
    fan_array_drop(b);
    close(&w);
}

/* ---- what a race says ---- */

static void races_name_both_sides_and_the_wait_that_is_missing(void)
{
    world w;
    fan_error err = {0};
    fan_array *host = NULL;
    int64_t one = 1;
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, NULL));
    open(&w, config_of(2, 0, FAN_SIM_SEEDED), 0);
    strcpy(site_now, "train.py:28");
    CHECK_OK(launch(&w, w.s[0], "mul", 0, 0, 1));
    strcpy(site_now, "train.py:31");
    fan_operand in[1] = {{w.x[2], FAN_DT_UINT64}};
    fan_job job = {.kind = FAN_JOB_SUM, .out = w.x[0], .in = in, .n = 1, .label = "sum[0]"};
    CHECK_INT(fan_device_run(w.s[2]->device, w.s[2], &job, &err), FAN_ERR_RACE);
    CHECK_STR(
        err.text,
        "race on 8 bytes of sim:0: 'sum[0]' (stream 4 of sim:0, train.py:31) writes what 'mul' "
        "(stream "
        "2 of sim:0, train.py:28) wrote: nothing orders them; "
        "missing: stream 4 of sim:0 must wait for stream 2 of sim:0 after 'mul' (Stream(\"sim:0\", "
        "4).wait(Stream(\"sim:0\", 2)))");
    fan_race race;
    CHECK(fan_sim_first_race(w.m, &race));
    CHECK_STR(race.first.name, "mul");
    CHECK_STR(race.second.call_site, "train.py:31");
    CHECK_INT(race.lo, (uintptr_t)w.x[0]->data);
    CHECK_INT(fan_sim_races(w.m), 1);

    site_now[0] = '\0';
    /* a stream of the other device reads */
    CHECK_INT(launch(&w, w.s[1], "far", -1, 1, 1), FAN_ERR_RACE);
    CHECK_STR(w.text,
              "race on 8 bytes of sim:0: 'far' (stream 3 of sim:1) reads what 'sum[0]' (stream 4 "
              "of sim:0, "
              "train.py:31) wrote: nothing orders them; missing: "
              "stream 3 of sim:1 must wait for stream 4 of sim:0 after 'sum[0]' (Stream(\"sim:1\", "
              "3).wait(Stream(\"sim:0\", 4)))");
    strcpy(site_now, "train.py:40");
    CHECK_INT(fan_sim_host_read(w.m, w.s[3], host, w.x[0], &err), FAN_ERR_RACE);
    CHECK_STR(
        err.text,
        "race on 8 bytes of sim:0: the host (train.py:40) reads what 'sum[0]' (stream 4 of sim:0, "
        "train.py:31) wrote: nothing orders them; missing: the "
        "host must wait for stream 4 of sim:0 after 'sum[0]' (Stream(\"sim:0\", 4).synchronize())");
    CHECK_INT(fan_sim_races(w.m), 3);
    close(&w);
    site_now[0] = '\0';
    fan_array_drop(host);
}

/* Memory that goes back too early: the call that lets it go cannot say so, the next one does. */
static void a_release_that_is_too_early_is_raised_by_the_next_call(void)
{
    world w;
    fan_error err = {0};
    int64_t one = 1;
    fan_operand in[1] = {{NULL, FAN_DT_UINT64}};
    fan_job job = {.kind = FAN_JOB_SUM, .in = in, .n = 1, .label = "sum[0]"};
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    fan_array *y = NULL;
    CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_UINT64, 1, &one, NULL, &y, NULL));
    job.out = y;
    in[0].array = w.x[2];
    strcpy(site_now, "train.py:50");
    CHECK_OK(fan_device_run(w.s[1]->device, w.s[1], &job, &err));
    strcpy(site_now, "train.py:51");
    fan_array copy = *y;
    copy.storage = NULL;
    copy.shape = copy.dims;
    copy.strides = copy.dims + 1;
    fan_array_drop(y);
    CHECK_INT(fan_sim_races(w.m), 1);
    CHECK_INT(fan_sim_pending(w.m, &err), FAN_ERR_RACE);
    CHECK_STR(
        err.text,
        "race on 8 bytes of sim:0: memory is freed at train.py:51 while 'sum[0]' (stream 3 of "
        "sim:0, train.py:50) writes it: no wait orders "
        "that before; missing: mark as used on stream 3 of sim:0 "
        "(array.record_stream(Stream(\"sim:0\", 3)))");
    CHECK_OK(fan_sim_pending(w.m, &err));
    /* .. and whoever still has the address meets the release. */
    strcpy(site_now, "train.py:52");
    fan_operand dead[1] = {{&copy, FAN_DT_UINT64}};
    CHECK_INT(fan_device_run(w.s[0]->device, w.s[0],
                             &(fan_job){.kind = FAN_JOB_COPY, .out = w.x[0], .in = dead, .n = 1},
                             &err),
              FAN_ERR_RACE);
    CHECK_STR(err.text,
              "race on 8 bytes of sim:0: 'copy' (stream 2 of sim:0, train.py:52) reads freed "
              "memory at train.py:51; missing: a hold on it");
    close(&w);

    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_UINT64, 1, &one, NULL, &y, NULL));
    job.out = y;
    in[0].array = w.x[2];
    CHECK_OK(fan_device_run(w.s[1]->device, w.s[1], &job, &err));
    fan_array_drop(y);
    /* raised by the machine's next call, once */
    CHECK_INT(launch(&w, w.s[0], "next", 1, 0, 0), FAN_ERR_RACE);
    CHECK_HAS(w.text, "mark as used on stream 3");
    CHECK_OK(launch(&w, w.s[0], "next", 1, 0, 0));
    CHECK_OK(fan_sim_pending(w.m, &err));
    /* The mark, and the same is right. */
    CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_UINT64, 1, &one, NULL, &y, NULL));
    job.out = y;
    CHECK_OK(fan_device_run(w.s[1]->device, w.s[1], &job, &err));
    CHECK_OK(fan_memory_record_stream(y->storage, w.s[1], NULL));
    fan_array_drop(y);
    CHECK_OK(fan_sim_synchronize(w.m, &err));
    CHECK_INT(fan_sim_races(w.m), 1);
    close(&w);
    site_now[0] = '\0';
}

/* ---- schedules ---- */

static void named_schedules_are_what_they_say(void)
{
    for (int schedule = FAN_SIM_FIFO; schedule <= FAN_SIM_ROUND_ROBIN; schedule++) {
        world w;
        char order_text[16] = "";
        /* starves stream 3, which is s1 */
        open(&w, config_of(1, 1, (fan_sim_schedule)schedule), 0);
        for (int i = 0; i < 8; i++)
            CHECK_OK(launch(&w, w.s[i / 2 % 3], "k", i / 2 % 3, 0, (uint64_t)i));
        for (int i = 0; i < 8; i++) {
            bool one;
            uint64_t before[3];
            for (int k = 0; k < 3; k++)
                memcpy(&before[k], w.x[k]->data, 8);
            CHECK_OK(fan_sim_step(w.m, &one, NULL));
            CHECK(one);
            for (int k = 0; k < 3; k++)
                if (memcmp(&before[k], w.x[k]->data, 8))
                    order_text[i] = (char)('0' + k);
        }
        bool one;
        CHECK_OK(fan_sim_step(w.m, &one, NULL));
        CHECK(!one);
        /* queued: 0 0 1 1 2 2 0 0 */
        CHECK_STR(order_text, schedule == FAN_SIM_FIFO ? "00112200"
                              /* of the heads, the newest */
                              : schedule == FAN_SIM_LIFO   ? "22110000"
                              : schedule == FAN_SIM_STARVE ? "00220011"
                                                           : "01201200");
        close(&w);
    }
}

static fan_status fails(void *ctx, fan_error *err)
{
    (*(int *)ctx)++;
    return fan_fail(err, FAN_ERR_EXTERN, "the kernel failed");
}

static void done(void *ctx)
{
    (*(int *)ctx) += 100;
}

typedef struct inside {
    world *w;
    int how;
    fan_status status;
} inside;

static fan_status calls_in(void *ctx, fan_error *err)
{
    inside *c = ctx;
    (void)err;
    if (c->how == 0) /* more work, and another stream's */
        launch(c->w, c->w->s[1], "more", 1, 0, 5);
    else if (c->how == 1)
        c->status = fan_stream_sync(c->w->s[1], NULL);
    else
        c->status = fan_stream_sync(c->w->s[0], NULL); /* its own */
    return FAN_OK;
}

static void kernels_may_fail_and_may_call_in(void)
{
    world w;
    fan_error err = {0};
    int ran = 0;
    open(&w, config_of(1, 0, FAN_SIM_FIFO), 0);
    fan_sim_kernel k = {.name = "bad", .fn = fails, .fini = done, .ctx = &ran, .us = -1};
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
    CHECK_INT(ran, 0);
    CHECK_INT(fan_stream_sync(w.s[0], &err), FAN_ERR_EXTERN);
    CHECK_STR(err.text, "the kernel failed");
    CHECK_INT(ran, 101);
    CHECK_OK(fan_stream_sync(w.s[0], &err)); /* the rest runs all the same */
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    for (int how = 0; how < 3; how++) {
        inside c = {.w = &w, .how = how};
        fan_sim_kernel in = {.name = "in", .fn = calls_in, .ctx = &c, .us = -1};
        ran = 0;
        fan_stream *s = w.s[how == 1 ? 2 : 0];
        fan_sim_synchronize(w.m, NULL);
        CHECK_OK(launch(&w, w.s[1], "k", 1, 0, 1));
        CHECK_OK(fan_sim_launch(w.m, s, &in, NULL));
        CHECK_OK(fan_sim_synchronize(w.m, &err));
        CHECK_INT(c.status, how == 2 ? FAN_ERR_DEADLOCK : FAN_OK);
    }
    /* What is not run when the machine goes is dropped. */
    ran = 0;
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    close(&w);
    CHECK_INT(ran, 100);
}

static bool near(double a, double b)
{
    return a - b < 1e-6 && b - a < 1e-6;
}

static void the_clock_shows_overlap(void)
{
    world w;
    fan_sim_config c = config_of(1, 0, FAN_SIM_SEEDED);
    c.launch_us = 2;
    c.gbytes_per_s = 1;
    open(&w, c, 0);
    double host = fan_sim_host_us(w.m);
    fan_sim_kernel k = {.name = "k", .us = 100};
    CHECK_OK(fan_sim_launch(w.m, w.s[0], &k, NULL));
    CHECK_OK(fan_sim_launch(w.m, w.s[1], &k, NULL));
    CHECK(near(fan_sim_device_us(w.m), host + 104)); /* side by side */
    order(w.s[1], w.s[0]);
    CHECK_OK(fan_sim_launch(w.m, w.s[1], &k, NULL));
    CHECK(near(fan_sim_device_us(w.m), host + 204));
    CHECK(near(fan_sim_host_us(w.m), host + 6));
    CHECK_OK(fan_stream_sync(w.s[0], NULL));
    CHECK(near(fan_sim_host_us(w.m), host + 102));
    CHECK_OK(fan_sim_synchronize(w.m, NULL));
    CHECK(near(fan_sim_host_us(w.m), host + 204));
    close(&w);
}

static void arrays_outlive_the_machine_that_made_them(void)
{
    int64_t live = fan_mem_get().live;
    world w;
    open(&w, config_of(2, 0, FAN_SIM_SEEDED), 0);
    fan_stream *d = legacy_of(&w, 0);
    uint64_t id = d->id;
    CHECK_OK(launch(&w, w.s[0], "k", 0, 0, 1));
    fan_array *x = fan_array_hold(w.x[0]);
    fan_stream_drop(d);
    close(&w);
    CHECK(fan_mem_get().live > live);
    fan_device *device = fan_memory_device(x->storage);
    d = fan_stream_current(device);
    CHECK_INT(d->id, id); /* the same stream, whoever asks */
    fan_sim *m = fan_sim_hold(fan_sim_of(device));
    fan_stream *s = NULL;
    CHECK_OK(fan_sim_stream(m, 1, false, &s, NULL));
    fan_stream_drop(s);
    fan_sim_drop(m);
    CHECK(fan_sim_of(fan_cpu()) == NULL);
    fan_stream_drop(d);
    fan_array_drop(x);
    CHECK_INT(fan_mem_get().live, live);
}

static void what_a_machine_was_told_it_says(void)
{
    world w;
    open(&w, config_of(2, 77, FAN_SIM_SEEDED), 0);
    fan_device *d = fan_sim_device(w.m, 1);
    fan_array *host = NULL;
    int64_t one = 1;
    fan_race race;
    fan_error err = {0};
    CHECK_INT(fan_sim_seed(w.m), 77);
    CHECK_INT(d->backend->left_out(d), 0);
    fan_sim_leave_out(w.m, 5);
    CHECK_INT(d->backend->left_out(d), 5);
    CHECK(!fan_sim_first_race(w.m, &race));
    /* Without a stream a read is in the order of the array's device's current one. */
    CHECK_OK(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, NULL));
    CHECK_OK(fan_stream_push(w.s[1], NULL));
    CHECK_OK(launch(&w, w.s[1], "k", 1, 0, 1));
    CHECK_OK(fan_sim_host_read(w.m, NULL, host, w.x[1], NULL));
    CHECK(memcmp(host->data, w.x[1]->data, 8) == 0 && memcmp(host->data, w.x[3]->data, 8) != 0);
    fan_stream_pop(w.s[1]);
    CHECK_OK(launch(&w, w.s[1], "k", 3, 0, 1));
    CHECK_INT(fan_sim_host_read(w.m, NULL, host, w.x[3], NULL), FAN_ERR_RACE);
    CHECK_INT(fan_sim_host_read(w.m, NULL, w.x[1], host, &err), FAN_ERR_VALUE);
    CHECK_HAS(err.text, "in no memory of this machine");
    fan_array_drop(host);
    close(&w);
    fan_sim_config c = {.devices = 1, .seed = 1};
    fan_sim *m = NULL;
    CHECK_OK(fan_sim_new(&c, NULL, &m, NULL)); /* a gigabyte of addresses */
    CHECK_OK(fan_sim_array(m, 0, FAN_DT_INT8, 1, (int64_t[]){(1 << 30) - 64}, NULL, &host, NULL));
    fan_array_drop(host);
    fan_sim_drop(m);
}

/* A6: an array that reaches farther than can be decided may hold any byte that was donated. */
static void what_cannot_be_told_counts_as_donated(void)
{
    world w;
    fan_error err = {0};
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    fan_device *d = w.s[0]->device;
    const fan_backend *sim = d->backend;
    fan_array far = {.data = w.x[1]->data, .dtype = w.x[1]->dtype, .ndim = 1, .size = 2};
    far.shape = &far.dims[0];
    far.strides = &far.dims[1];
    far.shape[0] = 2;
    far.strides[0] = INT64_C(1) << 62;
    CHECK_OK(sim->use(d, w.x[0], "add", true, &err));
    CHECK_OK(sim->use(d, w.x[1], "add", false, &err));
    CHECK_INT(sim->use(d, &far, "add", false, &err), FAN_ERR_RACE);
    CHECK_HAS(err.text, "that was donated");
    sim->returned(d, w.x[0]);
    CHECK_OK(sim->use(d, &far, "add", false, &err));
    close(&w);
}

static void bad_arguments_are_refused(void)
{
    fan_sim *m = NULL;
    fan_error err = {0};
    fan_stream *s = NULL;
    fan_array *a = NULL;
    int64_t one = 1;
    fan_sim_config c = config_of(0, 0, FAN_SIM_SEEDED);
    CHECK_INT(fan_sim_new(&c, NULL, &m, &err), FAN_ERR_VALUE);
    c.devices = 65;
    CHECK_INT(fan_sim_new(&c, NULL, &m, &err), FAN_ERR_VALUE);
    CHECK_HAS(err.text, "1 to 64 devices, got 65");
    c.devices = 1;
    c.memory = SIZE_MAX;
    CHECK_INT(fan_sim_new(&c, NULL, &m, &err), FAN_ERR_NOMEM);
    world w, v;
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    open(&v, config_of(1, 0, FAN_SIM_SEEDED), 0);
    CHECK_INT(fan_sim_stream(w.m, 1, false, &s, &err), FAN_ERR_VALUE);
    CHECK_INT(fan_sim_stream(w.m, -1, false, &s, &err), FAN_ERR_VALUE);
    CHECK_INT(fan_sim_array(w.m, 2, FAN_DT_INT8, 1, &one, NULL, &a, &err), FAN_ERR_VALUE);
    CHECK(fan_sim_device(w.m, 1) == NULL);
    fan_event *e;
    CHECK_OK(fan_event_record(v.s[0], &e, NULL));
    CHECK_INT(fan_stream_wait(w.s[0], e, NULL, &err), FAN_ERR_VALUE); /* another machine's */
    CHECK_INT(fan_event_rerecord(e, w.s[0], &err), FAN_ERR_VALUE);
    fan_event_drop(e);
    CHECK_INT(launch(&w, v.s[0], "k", 0, 0, 0), FAN_ERR_VALUE);
    close(&w);
    close(&v);
}

/* ---- jobs ---- */

static void set_to(fan_array *a, double first)
{
    for (int64_t i = 0; i < a->size; i++) {
        double v = first + (double)i;
        memcpy(a->data + 8 * i, &v, 8);
    }
}

enum {
    SPARSE = 4,
    ALL = 7
};

/* The arrays of a job, on the host and on the machine: out, in, in, small, indices, values, and one
 * that has no
 * part. */
typedef struct job_arrays {
    fan_array *host[ALL], *on[ALL];
    fan_sparse *sparse[2]; /* of the indices and values there, and here */
} job_arrays;

static void job_arrays_make(job_arrays *x, fan_sim *m)
{
    static const int64_t shape[2] = {2, 3};
    static const int64_t small[2] = {1, 3};
    static const int64_t grid[2] = {2, 2};
    static const int64_t two = 2;
    for (int i = 0; i < ALL; i++) {
        bool few = i == 3;
        bool index = i == SPARSE;
        bool vector = i == SPARSE + 1;
        const int64_t *sh = few ? small : index ? grid : vector ? &two : shape;
        fan_dtype dtype = index ? FAN_DT_INT64 : FAN_DT_FLOAT64;
        CHECK_OK(fan_array_new(dtype, vector ? 1 : 2, sh, NULL, &x->host[i], NULL));
        if (index)
            memcpy(x->host[i]->data, (int64_t[]){0, 1, 2, 0}, 32);
        else
            set_to(x->host[i], i);
        CHECK_OK(fan_sim_array(m, 0, dtype, x->host[i]->ndim, sh, x->host[i], &x->on[i], NULL));
    }
    for (int i = 0; i < 2; i++) {
        fan_array **all = i ? x->on : x->host;
        CHECK_OK(fan_sparse_new(FAN_FORMAT_COO, 2, shape, all[SPARSE], NULL, all[SPARSE + 1], true,
                                &x->sparse[i], NULL));
    }
}

static void job_arrays_drop(job_arrays *x, fan_stream *s)
{
    for (int i = 0; i < 2; i++)
        fan_sparse_drop(x->sparse[i]);
    for (int i = 0; i < ALL; i++) {
        CHECK_OK(fan_memory_record_stream(x->on[i]->storage, s, NULL));
        fan_array_drop(x->host[i]);
        fan_array_drop(x->on[i]);
    }
}

/* One kind of job, while another stream has read or written array `who` (-1: none); was it a
 * race? */
static bool job_touches(fan_job_kind what, int who, bool wrote)
{
    fan_sim *m = NULL;
    fan_sim_config c = config_of(1, 0, FAN_SIM_SEEDED);
    fan_stream *s = NULL;
    fan_stream *other = NULL;
    job_arrays x;
    CHECK_OK(fan_sim_new(&c, NULL, &m, NULL));
    CHECK_OK(fan_sim_stream(m, 0, false, &s, NULL));
    CHECK_OK(fan_sim_stream(m, 0, false, &other, NULL));
    job_arrays_make(&x, m);
    fan_scale scale = {.on = true, .re = 3, .i = 3};
    fan_operand in[2][2] = {{{x.host[1], FAN_DT_FLOAT64}, {x.host[2], FAN_DT_FLOAT64}},
                            {{x.on[1], FAN_DT_FLOAT64}, {x.on[2], FAN_DT_FLOAT64}}};
    if (what == FAN_JOB_UPLOAD)
        in[1][0].array = x.host[1];
    int out = what == FAN_JOB_REDUCE ? 3 : 0;
    size_t n = what == FAN_JOB_SUM ? 2 : what == FAN_JOB_ZERO || what == FAN_JOB_SCATTER ? 0 : 1;
    fan_job job[2];
    for (int i = 0; i < 2; i++)
        job[i] = (fan_job){.kind = what,
                           .out = i ? x.on[out] : x.host[out],
                           .in = in[i],
                           .n = n,
                           .scale = what == FAN_JOB_SUM ? &scale : NULL,
                           .sparse = what == FAN_JOB_SCATTER ? x.sparse[i] : NULL};
    bool reads = (what != FAN_JOB_UPLOAD && who >= 1 && who <= (int)n) ||
                 (what == FAN_JOB_SCATTER && (who == SPARSE || who == SPARSE + 1));
    bool expect = who == out || (reads && wrote);
    if (who >= 0) {
        fan_sim_kernel k = {.name = "other", .us = -1};
        *(wrote ? &k.writes : &k.reads) = &x.on[who];
        *(wrote ? &k.nwrites : &k.nreads) = 1;
        CHECK_OK(fan_sim_launch(m, other, &k, NULL));
    }
    CHECK_INT(fan_device_run(fan_sim_device(m, 0), s, &job[1], NULL),
              expect ? FAN_ERR_RACE : FAN_OK);
    fan_job_run(&job[0], true);
    if (what == FAN_JOB_UPLOAD)
        set_to(x.host[1], 100); /* was read already */
    CHECK_OK(fan_sim_synchronize(m, NULL));
    CHECK(fan_array_hash(x.on[out]) == fan_array_hash(x.host[out]));
    CHECK(fan_job_bytes(&job[0]) > 0 && fan_job_word(job[0].kind)[0]);
    job_arrays_drop(&x, s);
    fan_stream_drop(s);
    fan_stream_drop(other);
    fan_sim_drop(m);
    return expect;
}

/* Every kind of job gives on the machine, late, what it gives at once on the host; and it reads and
 * writes what it says, no more and no less. */
static void every_job_touches_what_it_says(void)
{
    long races = 0;
    long none = 0;
    for (int what = FAN_JOB_SUM; what <= FAN_JOB_UPLOAD; what++)
        for (int who = -1; who < ALL; who++) /* whom the other stream has touched */
            for (int wrote = 0; wrote < 2; wrote++)
                *(job_touches((fan_job_kind)what, who, wrote) ? &races : &none) += 1;
    printf("jobs: %ld races, %ld none\n", races, none);
    CHECK(races > 10 && none > 10);
}

/* ---- failed calls ---- */

static fan_status some_of_everything(world *w, fan_error *err)
{
    fan_event *e = NULL;
    fan_event *f = NULL;
    fan_array *a = NULL;
    fan_array *host = NULL;
    int64_t one = 1;
    fan_status status;
    FAN_GO(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, err));
    FAN_GO(fan_device_array(w->s[0]->device, w->s[0], FAN_DT_UINT64, 1, &one, NULL, &a, err));
    FAN_GO(fan_device_run(w->s[0]->device, w->s[0],
                          &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"}, err));
    FAN_GO(fan_event_record(w->s[0], &e, err));
    FAN_GO(fan_stream_wait(w->s[1], e, NULL, err));
    FAN_GO(fan_memory_record_stream(a->storage, w->s[1], err));
    FAN_GO(fan_device_run(w->s[1]->device, w->s[1],
                          &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"}, err));
    FAN_GO(fan_event_new(w->s[0]->device, &f, err));
    FAN_GO(fan_event_rerecord(f, w->s[1], err));
    bool passed;
    FAN_GO(fan_event_query(f, &passed, err));
    FAN_GO(fan_event_sync(f, err));
    FAN_GO(fan_sim_host_read(w->m, w->s[1], host, a, err));
    FAN_GO(fan_stream_sync(w->s[0], err));
    FAN_GO(launch(w, w->s[2], "k", 0, 0, 1));
    FAN_GO(fan_sim_synchronize(w->m, err));
done:
    fan_event_drop(e);
    fan_event_drop(f);
    fan_array_drop(a);
    fan_array_drop(host);
    return status;
}

static void every_call_can_fail_once_and_changes_nothing(void)
{
    int64_t live = fan_mem_get().live;
    long failed = 0;
    for (int which = 0; which < 2; which++)
        for (int64_t n = 0;; n++) {
            world w;
            fan_error err = {0};
            open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
            uint64_t calls = fan_sim_calls(w.m);
            fan_sim_fail_at(w.m, n, which ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE);
            fan_status status = some_of_everything(&w, &err);
            CHECK(status == FAN_OK || status == (which ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE));
            if (status != FAN_OK) {
                failed++;
                CHECK(err.text[0] || w.text[0]);
                CHECK_OK(some_of_everything(&w, &err)); /* once */
            }
            bool reached = fan_sim_calls(w.m) - calls > (uint64_t)n;
            CHECK_INT(fan_sim_races(w.m), 0);
            close(&w);
            CHECK_INT(fan_mem_get().live, live);
            if (!reached)
                break;
        }
    printf("%ld failed calls\n", failed);
    CHECK(failed > 20);
}

/* ---- a machine for many runs ---- */

static void a_reset_machine_is_a_new_one(void)
{
    world w;
    fan_sim_config c = config_of(2, 9, FAN_SIM_SEEDED);
    memset(&w, 0, sizeof w);
    CHECK_OK(fan_sim_new(&c, NULL, &w.m, NULL));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(fan_sim_stream(w.m, i % 2, false, &w.s[i], NULL));
    uint64_t first = 0;
    uint64_t races = 0;
    uint64_t calls = 0;
    uintptr_t address = 0;
    fan_error err = {0};
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < ARRAYS; i++)
            add_array(&w, i, i % 2);
        if (round == 0)
            address = (uintptr_t)w.x[3]->data;
        CHECK_INT((uintptr_t)w.x[3]->data, address);
        launch(&w, w.s[0], "a", 0, 0, 1);
        launch(&w, w.s[1], "b", 0, 0, 2); /* a race, every time */
        order(w.s[2], w.s[1]);
        launch(&w, w.s[2], "c", 1, 1, 3);
        CHECK_INT(fan_sim_reset(w.m, &err), FAN_ERR_STATE);
        CHECK_HAS(err.text, "4 blocks of its memory are held");
        uint64_t v = value(&w);
        if (round == 0) {
            first = v;
            races = fan_sim_races(w.m);
        }
        if (round <= 1)
            /* the first round makes an event that later ones find in the pool */
            calls = fan_sim_calls(w.m);
        CHECK(v == first);
        CHECK_INT(fan_sim_races(w.m), races);
        CHECK_INT(fan_sim_calls(w.m), calls);
        CHECK(races > 0);
        launch(&w, w.s[3], "left", 2, 0, 1); /* work that is dropped */
        for (int i = 0; i < ARRAYS; i++)
            fan_array_drop(w.x[i]);
        CHECK_OK(fan_sim_reset(w.m, &err));
        CHECK_INT(fan_sim_races(w.m), 0);
        CHECK(fan_sim_host_us(w.m) == 0 && fan_sim_device_us(w.m) == 0);
    }
    for (int i = 0; i < ARRAYS; i++)
        w.x[i] = NULL;
    close(&w);
}

static void judging_alone_is_fast(void)
{
    world w;
    memset(&w, 0, sizeof w);
    fan_sim_config c = config_of(2, 9, FAN_SIM_SEEDED);
    c.run_work = false;
    CHECK_OK(fan_sim_new(&c, NULL, &w.m, NULL));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(fan_sim_stream(w.m, i % 2, false, &w.s[i], NULL));
    struct timespec t0, t1;
    int64_t one = 1;
    enum {
        RUNS = LIGHT ? 2000 : 20000
    };
    int64_t before = 0;
    int64_t steps = 0;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t0);
    for (int round = 0; round < RUNS; round++) {
        fan_array *a = NULL;
        fan_array *b = NULL;
        fan_event *e;
        if (round == 100)
            before = fan_mem_get().live;
        CHECK_OK(fan_device_array(w.s[0]->device, w.s[0], FAN_DT_FLOAT32, 1, &one, NULL, &a, NULL));
        CHECK_OK(fan_device_array(w.s[1]->device, w.s[1], FAN_DT_FLOAT32, 1, &one, NULL, &b, NULL));
        fan_operand in[2] = {{a, FAN_DT_FLOAT32}, {b, FAN_DT_FLOAT32}};
        for (int i = 0; i < 4; i++) {
            CHECK_OK(fan_device_run(w.s[0]->device, w.s[0],
                                    &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "z"},
                                    NULL));
            CHECK_OK(fan_event_record(w.s[0], &e, NULL));
            CHECK_OK(fan_stream_wait(w.s[1], e, NULL, NULL));
            fan_event_drop(e);
            CHECK_OK(fan_device_run(
                w.s[1]->device, w.s[1],
                &(fan_job){.kind = FAN_JOB_SUM, .out = b, .in = in, .n = 2, .label = "sum"}, NULL));
            CHECK_OK(fan_event_record(w.s[1], &e, NULL));
            CHECK_OK(fan_stream_wait(w.s[0], e, NULL, NULL));
            fan_event_drop(e);
            steps += 6;
        }
        CHECK_OK(fan_memory_record_stream(a->storage, w.s[1], NULL));
        fan_array_drop(a);
        fan_array_drop(b);
        CHECK_INT(fan_sim_races(w.m), 0);
        CHECK_OK(fan_sim_reset(w.m, NULL));
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t1);
    CHECK_INT(fan_mem_get().live, before);
    double ns = 1e9 * (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec);
    printf("judging alone: %.0f ns by step (records, waits, kernels of up to three accesses; two "
           "arrays and a reset in "
           "24)\n",
           ns / (double)steps);
    close(&w);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    the_axioms_hold_by_verdict_and_by_value();
    a8_memory_is_used_again_at_once_and_poisoned_before();
    races_name_both_sides_and_the_wait_that_is_missing();
    a_release_that_is_too_early_is_raised_by_the_next_call();
    named_schedules_are_what_they_say();
    kernels_may_fail_and_may_call_in();
    the_clock_shows_overlap();
    arrays_outlive_the_machine_that_made_them();
    what_a_machine_was_told_it_says();
    what_cannot_be_told_counts_as_donated();
    bad_arguments_are_refused();
    every_job_touches_what_it_says();
    every_call_can_fail_once_and_changes_nothing();
    a_reset_machine_is_a_new_one();
    judging_alone_is_fast();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
