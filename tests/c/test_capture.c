/* The state machine of captures: each code of device/sim/capture.h once, and the way that is legal
 * beside it. */
#include "base/mem.h"
#include "check.h"
#include "device/sim/capture.h"

static fan_capture_run begun(fan_capture_mode mode)
{
    fan_capture_run c;
    CHECK_INT(fan_capture_begin(&c, mode, 1, NULL), FAN_OK);
    return c;
}

/* fork: a member of c that waits for member `from` as it is now. */
static uint32_t fork_from(fan_capture_run *c, uint32_t from)
{
    fan_clock e;
    uint32_t member = UINT32_MAX;
    fan_clock_init(&e);
    CHECK_INT(fan_capture_record(c, from, &e), 0);
    CHECK_INT(fan_capture_pull(c, &e, &member), 0);
    fan_clock_fini(&e);
    return member;
}

static void join_to(fan_capture_run *c, uint32_t member, uint32_t to)
{
    fan_clock e;
    fan_clock_init(&e);
    CHECK_INT(fan_capture_record(c, member, &e), 0);
    CHECK_INT(fan_capture_wait(c, to, &e), 0);
    fan_clock_fini(&e);
}

static void test_joins(void)
{
    fan_capture_run c = begun(FAN_CAPTURE_GLOBAL);
    uint32_t a = fork_from(&c, 0);
    uint32_t b = fork_from(&c, a);
    CHECK_INT(c.members, 3);
    CHECK_INT(fan_capture_work(&c, a), 0);
    CHECK_INT(fan_capture_work(&c, b), 0);
    join_to(&c, b, a); /* what comes before what is joined is joined */
    join_to(&c, a, 0);
    CHECK_INT(fan_capture_end(&c, 0, 1), 0);
    CHECK(c.ended && !c.broken);
    fan_capture_fini(&c);

    c = begun(FAN_CAPTURE_GLOBAL);
    a = fork_from(&c, 0);
    CHECK_INT(fan_capture_work(&c, a), 0);
    join_to(&c, a, 0);
    CHECK_INT(fan_capture_work(&c, a), 0); /* behind the join */
    CHECK_INT(fan_capture_end(&c, 0, 1), FAN_CAPTURE_UNJOINED);
    CHECK(c.ended);
    fan_capture_fini(&c);

    c = begun(FAN_CAPTURE_GLOBAL);
    (void)fork_from(&c, 0); /* without work there is nothing to join */
    CHECK_INT(fan_capture_end(&c, 0, 1), 0);
    fan_capture_fini(&c);
}

static void test_ends(void)
{
    fan_capture_run c = begun(FAN_CAPTURE_THREAD_LOCAL);
    CHECK_INT(fan_capture_end(&c, 0, 2), FAN_CAPTURE_WRONG_THREAD);
    CHECK(!c.ended && !c.broken);
    CHECK_INT(fan_capture_end(&c, 0, 1), 0);
    fan_capture_fini(&c);

    c = begun(FAN_CAPTURE_RELAXED);
    CHECK_INT(fan_capture_end(&c, 0, 2), 0);
    fan_capture_fini(&c);

    c = begun(FAN_CAPTURE_GLOBAL);
    uint32_t a = fork_from(&c, 0);
    CHECK_INT(fan_capture_end(&c, a, 1), FAN_CAPTURE_UNMATCHED);
    CHECK(c.broken && !c.ended);
    CHECK_INT(fan_capture_end(&c, 0, 1), FAN_CAPTURE_INVALIDATED);
    CHECK(c.ended);
    fan_capture_fini(&c);
}

static void test_broken(void)
{
    fan_clock e;
    uint32_t member;
    fan_clock_init(&e);
    fan_capture_run c = begun(FAN_CAPTURE_GLOBAL);
    CHECK_INT(fan_capture_break(&c, FAN_CAPTURE_ISOLATION), FAN_CAPTURE_ISOLATION);
    CHECK_INT(fan_capture_work(&c, 0), FAN_CAPTURE_INVALIDATED);
    CHECK_INT(fan_capture_record(&c, 0, &e), FAN_CAPTURE_INVALIDATED);
    CHECK_INT(fan_capture_wait(&c, 0, &e), FAN_CAPTURE_INVALIDATED);
    CHECK_INT(fan_capture_pull(&c, &e, &member), FAN_CAPTURE_INVALIDATED);
    CHECK_INT(c.members, 1);
    fan_capture_fini(&c);
    fan_clock_fini(&e);
}

static void test_unsafe(void)
{
    static const struct {
        fan_capture_mode theirs, mine;
        uint64_t thread;
        bool forbidden;
    } rows[] = {
        {FAN_CAPTURE_GLOBAL, FAN_CAPTURE_GLOBAL, 1, true},
        {FAN_CAPTURE_GLOBAL, FAN_CAPTURE_GLOBAL, 2, true},
        {FAN_CAPTURE_GLOBAL, FAN_CAPTURE_THREAD_LOCAL, 2, false},
        {FAN_CAPTURE_GLOBAL, FAN_CAPTURE_THREAD_LOCAL, 1, true},
        {FAN_CAPTURE_GLOBAL, FAN_CAPTURE_RELAXED, 1, false},
        {FAN_CAPTURE_THREAD_LOCAL, FAN_CAPTURE_GLOBAL, 1, true},
        {FAN_CAPTURE_THREAD_LOCAL, FAN_CAPTURE_GLOBAL, 2, false},
        {FAN_CAPTURE_RELAXED, FAN_CAPTURE_GLOBAL, 1, false},
        {FAN_CAPTURE_RELAXED, FAN_CAPTURE_GLOBAL, 2, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fan_capture_run c = begun(rows[i].theirs);
        CHECK_INT(fan_capture_forbids(&c, rows[i].thread, rows[i].mine), rows[i].forbidden);
        c.ended = true;
        CHECK(!fan_capture_forbids(&c, rows[i].thread, rows[i].mine));
        fan_capture_fini(&c);
    }
}

static void test_words(void)
{
    for (int code = 900; code <= 908; code++) {
        for (int other = 900; other < code; other++)
            CHECK(strcmp(fan_capture_words(code), fan_capture_words(other)) != 0);
    }
}

static void test_memory(void)
{
    fan_mem_counts before = fan_mem_get();
    int failed = 0;
    for (int64_t n = 0; n < 20; n++) {
        fan_capture_run c;
        uint32_t member;
        fan_clock e;
        fan_clock_init(&e);
        fan_mem_fail_at(n, 1);
        fan_status status = fan_capture_begin(&c, FAN_CAPTURE_GLOBAL, 1, NULL);
        for (int i = 0; status == FAN_OK && i < 20; i++) {
            if (fan_capture_record(&c, 0, &e) || fan_capture_pull(&c, &e, &member)) {
                CHECK_INT(c.members, i + 1);
                failed++;
                break;
            }
        }
        failed += status != FAN_OK;
        fan_mem_fail_at(-1, 0);
        fan_capture_fini(&c);
        fan_clock_fini(&e);
    }
    CHECK(failed > 3);
    CHECK_INT(fan_mem_get().live, before.live);
}

int main(void)
{
    test_joins();
    test_ends();
    test_broken();
    test_unsafe();
    test_words();
    test_memory();
    return check_done();
}
