/* The simulated machine: the axioms A1-A8 as litmus tests, with verdicts and with real values; the
 * words of a race; schedules, jobs, failed calls, a machine for many runs. */
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

static const struct axiom {
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

/* check_values: without the checker a program's values differ where it races, and only there. */
static void check_values(const struct axiom *a)
{
    uint64_t first = 0;
    long same = 0;
    long other = 0;
    for (uint64_t seed = 0; seed < 40; seed++) {
        for (int schedule = FAN_SIM_SEEDED; schedule <= FAN_SIM_ROUND_ROBIN; schedule++) {
            world w;
            open(&w, config_of(a->devices, seed, (fan_sim_schedule)schedule), a->blocking);
            fan_sim_check(w.m, false);
            a->program(&w);
            CHECK_OK(w.worst);
            uint64_t v = value(&w);
            if (same == 0)
                first = v;
            same += v == first;
            other += v != first;
            close(&w);
        }
    }
    if (!CHECK((other > 0) == a->races))
        fprintf(stderr, "    %s: %ld values the same, %ld not\n", a->name, same, other);
}

static void the_axioms_hold_by_verdict_and_by_value(void)
{
    for (size_t i = 0; i < sizeof axioms / sizeof axioms[0]; i++) {
        const struct axiom *a = &axioms[i];
        world w;
        open(&w, config_of(a->devices, 0, FAN_SIM_SEEDED), a->blocking);
        a->program(&w);
        if (!CHECK((fan_sim_races(w.m) > 0) == a->races))
            fprintf(stderr, "    %s: verdict\n", a->name);
        CHECK_INT(w.worst, a->races ? FAN_ERR_RACE : FAN_OK);
        CHECK_INT(fan_sim_unsound(w.m), 0);
        fan_sim_synchronize(w.m, NULL);
        close(&w);
        check_values(a);
    }
}

static void a8_memory_is_used_again_at_once_and_poisoned_before(void)
{
    world w;
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    int64_t n = 100;
    fan_array *a = NULL;
    fan_array *b = NULL;
    CHECK_OK(fan_sim_array(w.m, 0, FAN_DT_UINT8, 1, &n, NULL, &a, NULL));
    for (int i = 0; i < 100; i++)
        CHECK_INT((uint8_t)a->data[i], 0xA5);
    char *data = a->data;
    CHECK_OK(run_job(w.s[0], zero_job(a), NULL));
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
    fan_array *host = number_on_host();
    open(&w, config_of(2, 0, FAN_SIM_SEEDED), 0);
    strcpy(site_now, "train.py:28");
    CHECK_OK(launch(&w, w.s[0], "mul", 0, 0, 1));
    strcpy(site_now, "train.py:31");
    fan_operand in[1] = {{.array = w.x[2], .acc = FAN_DT_UINT64}};
    fan_job job = {.kind = FAN_JOB_SUM, .out = w.x[0], .in = in, .n = 1, .label = "sum[0]"};
    CHECK_INT(run_job(w.s[2], job, &err), FAN_ERR_RACE);
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
    fan_operand in[1] = {{.array = NULL, .acc = FAN_DT_UINT64}};
    fan_job job = {.kind = FAN_JOB_SUM, .in = in, .n = 1, .label = "sum[0]"};
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    fan_array *y = number_on(w.s[0], FAN_DT_UINT64);
    job.out = y;
    in[0].array = w.x[2];
    strcpy(site_now, "train.py:50");
    CHECK_OK(run_job(w.s[1], job, &err));
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
    fan_operand dead[1] = {{.array = &copy, .acc = FAN_DT_UINT64}};
    fan_job late = {.kind = FAN_JOB_COPY, .out = w.x[0], .in = dead, .n = 1};
    CHECK_INT(run_job(w.s[0], late, &err), FAN_ERR_RACE);
    CHECK_STR(err.text,
              "race on 8 bytes of sim:0: 'copy' (stream 2 of sim:0, train.py:52) reads freed "
              "memory at train.py:51; missing: a hold on it");
    close(&w);

    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    y = number_on(w.s[0], FAN_DT_UINT64);
    job.out = y;
    in[0].array = w.x[2];
    CHECK_OK(run_job(w.s[1], job, &err));
    fan_array_drop(y);
    /* raised by the machine's next call, once */
    CHECK_INT(launch(&w, w.s[0], "next", 1, 0, 0), FAN_ERR_RACE);
    CHECK_HAS(w.text, "mark as used on stream 3");
    CHECK_OK(launch(&w, w.s[0], "next", 1, 0, 0));
    CHECK_OK(fan_sim_pending(w.m, &err));
    /* The mark, and the same is right. */
    y = number_on(w.s[0], FAN_DT_UINT64);
    job.out = y;
    CHECK_OK(run_job(w.s[1], job, &err));
    CHECK_OK(fan_memory_record_stream(y->storage, w.s[1], NULL));
    fan_array_drop(y);
    CHECK_OK(fan_sim_synchronize(w.m, &err));
    CHECK_INT(fan_sim_races(w.m), 1);
    close(&w);
    site_now[0] = '\0';
}

/* ---- schedules ---- */

/* stepped: runs one piece of the machine's work; returns which array it wrote, -1: no work is
 * left. */
static int stepped(world *w)
{
    bool one;
    int written = -1;
    uint64_t before[3];
    for (int k = 0; k < 3; k++)
        memcpy(&before[k], w->x[k]->data, 8);
    CHECK_OK(fan_sim_step(w->m, &one, NULL));
    for (int k = 0; one && k < 3; k++) {
        if (memcmp(&before[k], w->x[k]->data, 8))
            written = k;
    }
    return written;
}

static void named_schedules_are_what_they_say(void)
{
    static const struct {
        fan_sim_schedule schedule;
        const char *order; /* queued: 0 0 1 1 2 2 0 0 */
    } named[] = {
        {FAN_SIM_FIFO, "00112200"},
        {FAN_SIM_LIFO, "22110000"},   /* of the heads, the newest */
        {FAN_SIM_STARVE, "00220011"}, /* stream 3, which is s1 */
        {FAN_SIM_ROUND_ROBIN, "01201200"},
    };
    for (int i = 0; i < 4; i++) {
        world w;
        char order_text[16] = "";
        open(&w, config_of(1, 1, named[i].schedule), 0);
        for (int k = 0; k < 8; k++)
            CHECK_OK(launch(&w, w.s[k / 2 % 3], "k", k / 2 % 3, 0, (uint64_t)k));
        for (int k = 0; k < 8; k++)
            order_text[k] = (char)('0' + stepped(&w));
        CHECK_INT(stepped(&w), -1);
        CHECK_STR(order_text, named[i].order);
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
    int stream; /* that the kernel waits for; -1: it launches more work */
    fan_status status;
} inside;

static fan_status calls_in(void *ctx, fan_error *err)
{
    inside *c = ctx;
    world *w = c->w;
    (void)err;
    if (c->stream < 0) {
        launch(w, w->s[1], "more", 1, 0, 5);
    } else {
        c->status = fan_stream_sync(w->s[c->stream], NULL);
    }
    return FAN_OK;
}

/* check_call_in: a kernel on stream `on` calls into the machine. */
static void check_call_in(world *w, int on, int waits_for, fan_status want)
{
    fan_error err = {0};
    inside c = {.w = w, .stream = waits_for};
    fan_sim_kernel in = {.name = "in", .fn = calls_in, .ctx = &c, .us = -1};
    fan_sim_synchronize(w->m, NULL);
    CHECK_OK(launch(w, w->s[1], "k", 1, 0, 1));
    CHECK_OK(fan_sim_launch(w->m, w->s[on], &in, NULL));
    CHECK_OK(fan_sim_synchronize(w->m, &err));
    CHECK_INT(c.status, want);
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
    check_call_in(&w, 0, -1, FAN_OK);
    check_call_in(&w, 2, 1, FAN_OK);
    check_call_in(&w, 0, 0, FAN_ERR_DEADLOCK);
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
    fan_stream_drop(stream_of(m, 1, false));
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
    fan_race race;
    fan_error err = {0};
    CHECK_INT(fan_sim_seed(w.m), 77);
    CHECK_INT(d->backend->left_out(d), 0);
    fan_sim_leave_out(w.m, 5);
    CHECK_INT(d->backend->left_out(d), 5);
    CHECK(!fan_sim_first_race(w.m, &race));
    /* Without a stream a read is in the order of the array's device's current one. */
    fan_array *host = number_on_host();
    CHECK_OK(fan_stream_push(w.s[1], NULL));
    CHECK_OK(launch(&w, w.s[1], "k", 1, 0, 1));
    CHECK_OK(fan_sim_host_read(w.m, NULL, host, w.x[1], NULL));
    CHECK(memcmp(host->data, w.x[1]->data, 8) == 0);
    CHECK(memcmp(host->data, w.x[3]->data, 8) != 0);
    fan_stream_pop(w.s[1]);
    CHECK_OK(launch(&w, w.s[1], "k", 3, 0, 1));
    CHECK_INT(fan_sim_host_read(w.m, NULL, host, w.x[3], NULL), FAN_ERR_RACE);
    CHECK_INT(fan_sim_host_read(w.m, NULL, w.x[1], host, &err), FAN_ERR_VALUE);
    CHECK_HAS(err.text, "in no memory of this machine");
    fan_array_drop(host);
    close(&w);
    fan_sim *m = sim_of((fan_sim_config){.devices = 1, .seed = 1}); /* a gigabyte of addresses */
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
    OUT = 0,
    FIRST = 1,
    SECOND = 2,
    SMALL = 3,
    INDICES = 4,
    VALUES = 5,
    ALL = 7 /* one more has no part */
};

/* The arrays of a job, on the host and on the machine. */
typedef struct job_arrays {
    fan_array *host[ALL], *on[ALL];
    fan_sparse *sparse[2]; /* of the indices and values there, and here */
} job_arrays;

static void job_arrays_make(job_arrays *x, fan_sim *m)
{
    static const struct {
        fan_dtype dtype;
        int ndim;
        int64_t shape[2];
    } made[ALL] = {[OUT] = {FAN_DT_FLOAT64, 2, {2, 3}},    [FIRST] = {FAN_DT_FLOAT64, 2, {2, 3}},
                   [SECOND] = {FAN_DT_FLOAT64, 2, {2, 3}}, [SMALL] = {FAN_DT_FLOAT64, 2, {1, 3}},
                   [INDICES] = {FAN_DT_INT64, 2, {2, 2}},  [VALUES] = {FAN_DT_FLOAT64, 1, {2}},
                   [ALL - 1] = {FAN_DT_FLOAT64, 2, {2, 3}}};
    for (int i = 0; i < ALL; i++) {
        fan_dtype dtype = made[i].dtype;
        int ndim = made[i].ndim;
        const int64_t *shape = made[i].shape;
        CHECK_OK(fan_array_new(dtype, ndim, shape, NULL, &x->host[i], NULL));
        if (i == INDICES) {
            memcpy(x->host[i]->data, (int64_t[]){0, 1, 2, 0}, 32);
        } else {
            set_to(x->host[i], i);
        }
        CHECK_OK(fan_sim_array(m, 0, dtype, ndim, shape, x->host[i], &x->on[i], NULL));
    }
    for (int i = 0; i < 2; i++) {
        fan_array **all = i ? x->on : x->host;
        CHECK_OK(fan_sparse_new(FAN_FORMAT_COO, 2, made[OUT].shape, all[INDICES], NULL, all[VALUES],
                                true, &x->sparse[i], NULL));
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

/* operands_of: how many operands a kind of job has here. */
static int operands_of(fan_job_kind kind)
{
    switch (kind) {
    case FAN_JOB_SUM: return 2;
    case FAN_JOB_ZERO:
    case FAN_JOB_SCATTER: return 0;
    default: return 1;
    }
}

/* job_reads: whether the machine reads array `which` in a job. */
static bool job_reads(fan_job_kind kind, int which)
{
    if (kind == FAN_JOB_SCATTER)
        return which == INDICES || which == VALUES;
    return kind != FAN_JOB_UPLOAD && which >= FIRST && which <= operands_of(kind);
}

/* job_of: a job on arrays of the host or of the machine. */
static fan_job job_of(fan_job_kind kind, fan_array *const *arrays, const fan_operand *in,
                      const fan_sparse *sparse)
{
    static const fan_scale scale = {.on = true, .re = 3, .i = 3};
    fan_job job = {.kind = kind, .out = arrays[OUT], .in = in};
    job.n = (size_t)operands_of(kind);
    if (kind == FAN_JOB_REDUCE)
        job.out = arrays[SMALL];
    if (kind == FAN_JOB_SUM)
        job.scale = &scale;
    if (kind == FAN_JOB_SCATTER)
        job.sparse = sparse;
    return job;
}

/* job_touches: one kind of job, while another stream has read or written array `who` (-1: none);
 * was it a race? */
static bool job_touches(fan_job_kind kind, int who, bool wrote)
{
    fan_sim *m = sim_of(config_of(1, 0, FAN_SIM_SEEDED));
    fan_stream *s = stream_of(m, 0, false);
    fan_stream *other = stream_of(m, 0, false);
    job_arrays x;
    job_arrays_make(&x, m);
    fan_array **from = kind == FAN_JOB_UPLOAD ? x.host : x.on;
    fan_operand here[2] = {{.array = x.host[1], .acc = FAN_DT_FLOAT64},
                           {.array = x.host[2], .acc = FAN_DT_FLOAT64}};
    fan_operand there[2] = {{.array = from[1], .acc = FAN_DT_FLOAT64},
                            {.array = x.on[2], .acc = FAN_DT_FLOAT64}};
    fan_job on_host = job_of(kind, x.host, here, x.sparse[0]);
    fan_job on_device = job_of(kind, x.on, there, x.sparse[1]);
    int out = kind == FAN_JOB_REDUCE ? SMALL : OUT;
    bool expect = who == out || (wrote && job_reads(kind, who));
    if (who >= 0) {
        fan_sim_kernel k = {.name = "other", .us = -1};
        if (wrote) {
            k.writes = &x.on[who];
            k.nwrites = 1;
        } else {
            k.reads = &x.on[who];
            k.nreads = 1;
        }
        CHECK_OK(fan_sim_launch(m, other, &k, NULL));
    }
    CHECK_INT(run_job(s, on_device, NULL), expect ? FAN_ERR_RACE : FAN_OK);
    fan_job_run(&on_host, true);
    if (kind == FAN_JOB_UPLOAD)
        set_to(x.host[FIRST], 100); /* was read already */
    CHECK_OK(fan_sim_synchronize(m, NULL));
    CHECK(fan_array_hash(x.on[out]) == fan_array_hash(x.host[out]));
    CHECK(fan_job_bytes(&on_host) > 0 && fan_job_word(kind)[0]);
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
    long all = 0;
    for (fan_job_kind kind = FAN_JOB_SUM; kind <= FAN_JOB_UPLOAD; kind++) {
        for (int who = -1; who < ALL; who++) { /* which array the other stream has touched */
            for (int wrote = 0; wrote < 2; wrote++) {
                races += job_touches(kind, who, wrote);
                all++;
            }
        }
    }
    printf("jobs: %ld races, %ld none\n", races, all - races);
    CHECK(races > 10 && all - races > 10);
}

/* ---- failed calls ---- */

static fan_status some_of_everything(world *w, fan_error *err)
{
    fan_event *e = NULL;
    fan_event *f = NULL;
    fan_array *a = NULL;
    fan_array *host = NULL;
    fan_stream *first = w->s[0];
    fan_stream *second = w->s[1];
    int64_t one = 1;
    bool passed;
    fan_status status;
    FAN_GO(fan_array_new(FAN_DT_UINT64, 1, &one, NULL, &host, err));
    FAN_GO(fan_device_array(first->device, first, FAN_DT_UINT64, 1, &one, NULL, &a, err));
    FAN_GO(run_job(first, zero_job(a), err));
    FAN_GO(fan_event_record(first, &e, err));
    FAN_GO(fan_stream_wait(second, e, NULL, err));
    FAN_GO(fan_memory_record_stream(a->storage, second, err));
    FAN_GO(run_job(second, zero_job(a), err));
    FAN_GO(fan_event_new(first->device, &f, err));
    FAN_GO(fan_event_rerecord(f, second, err));
    FAN_GO(fan_event_query(f, &passed, err));
    FAN_GO(fan_event_sync(f, err));
    FAN_GO(fan_sim_host_read(w->m, second, host, a, err));
    FAN_GO(fan_stream_sync(first, err));
    FAN_GO(launch(w, w->s[2], "k", 0, 0, 1));
    FAN_GO(fan_sim_synchronize(w->m, err));
done:
    fan_event_drop(e);
    fan_event_drop(f);
    fan_array_drop(a);
    fan_array_drop(host);
    return status;
}

/* fail_one: call n fails with `want`; returns whether there was such a call. */
static bool fail_one(int64_t n, fan_status want, long *failed)
{
    world w;
    fan_error err = {0};
    open(&w, config_of(1, 0, FAN_SIM_SEEDED), 0);
    uint64_t calls = fan_sim_calls(w.m);
    fan_sim_fail_at(w.m, n, want);
    fan_status status = some_of_everything(&w, &err);
    CHECK(status == FAN_OK || status == want);
    if (status != FAN_OK) {
        (*failed)++;
        CHECK(err.text[0] || w.text[0]);
        CHECK_OK(some_of_everything(&w, &err)); /* once */
    }
    bool reached = fan_sim_calls(w.m) - calls > (uint64_t)n;
    CHECK_INT(fan_sim_races(w.m), 0);
    close(&w);
    return reached;
}

static void every_call_can_fail_once_and_changes_nothing(void)
{
    static const fan_status wants[] = {FAN_ERR_DEVICE, FAN_ERR_DEVICE_NOMEM};
    int64_t live = fan_mem_get().live;
    long failed = 0;
    for (int which = 0; which < 2; which++) {
        bool reached = true;
        for (int64_t n = 0; reached; n++) {
            reached = fail_one(n, wants[which], &failed);
            CHECK_INT(fan_mem_get().live, live);
        }
    }
    printf("%ld failed calls\n", failed);
    CHECK(failed > 20);
}

/* ---- a machine for many runs ---- */

/* bare_world: a machine of two devices with streams on both, without arrays. */
static void bare_world(world *w, bool run_work)
{
    fan_sim_config c = config_of(2, 9, FAN_SIM_SEEDED);
    c.run_work = run_work;
    memset(w, 0, sizeof *w);
    w->m = sim_of(c);
    for (int i = 0; i < STREAMS; i++)
        w->s[i] = stream_of(w->m, i % 2, false);
}

static void a_reset_machine_is_a_new_one(void)
{
    world w;
    bare_world(&w, true);
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
        if (round <= 1) /* the first round makes an event that later ones find in the pool */
            calls = fan_sim_calls(w.m);
        CHECK(v == first);
        CHECK_INT(fan_sim_races(w.m), races);
        CHECK_INT(fan_sim_calls(w.m), calls);
        CHECK(races > 0);
        launch(&w, w.s[3], "left", 2, 0, 1); /* work that is dropped */
        for (int i = 0; i < ARRAYS; i++) {
            fan_array_drop(w.x[i]);
            w.x[i] = NULL;
        }
        CHECK_OK(fan_sim_reset(w.m, &err));
        CHECK_INT(fan_sim_races(w.m), 0);
        CHECK(fan_sim_host_us(w.m) == 0 && fan_sim_device_us(w.m) == 0);
    }
    close(&w);
}

/* judge_round: 24 steps on two streams that wait for one another in turn. */
static void judge_round(fan_stream *s, fan_stream *t)
{
    fan_array *a = number_on(s, FAN_DT_FLOAT32);
    fan_array *b = number_on(t, FAN_DT_FLOAT32);
    fan_operand in[2] = {{.array = a, .acc = FAN_DT_FLOAT32}, {.array = b, .acc = FAN_DT_FLOAT32}};
    for (int i = 0; i < 4; i++) {
        fan_job sum = {.kind = FAN_JOB_SUM, .out = b, .in = in, .n = 2, .label = "sum"};
        CHECK_OK(run_job(s, zero_job(a), NULL));
        order(t, s);
        CHECK_OK(run_job(t, sum, NULL));
        order(s, t);
    }
    CHECK_OK(fan_memory_record_stream(a->storage, t, NULL));
    fan_array_drop(a);
    fan_array_drop(b);
}

static void judging_alone_is_fast(void)
{
    enum {
        RUNS = LIGHT ? 2000 : 20000
    };
    world w;
    struct timespec t0, t1;
    int64_t before = 0;
    bare_world(&w, false);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t0);
    for (int round = 0; round < RUNS; round++) {
        if (round == 100)
            before = fan_mem_get().live;
        judge_round(w.s[0], w.s[1]);
        CHECK_INT(fan_sim_races(w.m), 0);
        CHECK_OK(fan_sim_reset(w.m, NULL));
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t1);
    CHECK_INT(fan_mem_get().live, before);
    double ns = 1e9 * (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec);
    printf("judging alone: %.0f ns by step (records, waits, kernels of up to three accesses; two "
           "arrays and a reset in "
           "24)\n",
           ns / (24.0 * RUNS));
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
