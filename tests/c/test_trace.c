#include "base/trace.h"

#include "base/mem.h"
#include "check.h"

#include <pthread.h>

static void note(int slot)
{
    fan_trace_line line = {.kind = FAN_TRACE_ADD, .slot = slot, .label = "add"};
    fan_trace_put(&line);
}

static void without_a_trace_nothing_is_recorded(void)
{
    CHECK(!fan_trace_on());
    note(1);
    fan_trace *t = fan_trace_new(4);
    note(2);
    CHECK_INT(fan_trace_count(t), 0);
    CHECK(fan_trace_at(t, 0) == NULL);
    fan_trace_free(t);
}

static void the_oldest_lines_go_first(void)
{
    fan_trace *t = fan_trace_new(3);
    uint64_t before = 0;
    fan_trace_begin(t);
    CHECK(fan_trace_on());
    for (int i = 0; i < 5; i++)
        note(i);
    CHECK_INT(fan_trace_count(t), 3);
    CHECK_INT(fan_trace_dropped(t), 2);
    for (size_t i = 0; i < 3; i++) {
        const fan_trace_line *line = fan_trace_at(t, i);
        CHECK_INT(line->slot, (int)i + 2);
        CHECK_STR(line->label, "add");
        CHECK(line->host_ns >= before && line->host_ns > 0);
        before = line->host_ns;
    }
    CHECK(fan_trace_at(t, 3) == NULL);
    fan_trace_end(t);
    note(9);
    CHECK_INT(fan_trace_at(t, 2)->slot, 4);
    fan_trace_free(t);
}

static void every_trace_of_the_thread_gets_the_line(void)
{
    fan_trace *outer = fan_trace_new(0);
    fan_trace *inner = fan_trace_new(8);
    fan_trace_begin(outer);
    note(1);
    fan_trace_begin(inner);
    fan_trace_begin(inner); /* already there */
    note(2);
    fan_trace_end(outer); /* not the innermost */
    note(3);
    CHECK_INT(fan_trace_count(outer), 1);
    CHECK_INT(fan_trace_at(outer, 0)->slot, 2);
    CHECK_INT(fan_trace_count(inner), 2);
    fan_trace_begin(outer); /* may be begun again */
    note(4);
    CHECK_INT(fan_trace_at(outer, 0)->slot, 4);
    fan_trace_free(inner); /* while it is current */
    note(5);
    CHECK_INT(fan_trace_at(outer, 0)->slot, 5);
    fan_trace_free(outer);
    CHECK(!fan_trace_on());
    fan_trace_free(NULL);
}

static void *other_thread(void *t)
{
    CHECK(!fan_trace_on());
    note(7);
    fan_trace_free(t); /* current on the first thread */
    return NULL;
}

static void *end_elsewhere(void *t)
{
    fan_trace_end(t);
    return NULL;
}

static void a_trace_ended_elsewhere_may_begin_again(void)
{
    fan_trace *t = fan_trace_new(4);
    pthread_t thread;
    fan_trace_begin(t);
    CHECK_INT(pthread_create(&thread, NULL, end_elsewhere, t), 0);
    pthread_join(thread, NULL);
    note(1);
    CHECK_INT(fan_trace_count(t), 0);
    fan_trace_begin(t);
    note(2);
    note(3);
    CHECK_INT(fan_trace_count(t), 2);
    fan_trace_free(t);
    CHECK(!fan_trace_on());
}

static void a_trace_belongs_to_its_thread(void)
{
    fan_trace *t = fan_trace_new(2);
    pthread_t thread;
    fan_trace_begin(t);
    note(1);
    CHECK_INT(fan_trace_count(t), 1);
    CHECK_INT(pthread_create(&thread, NULL, other_thread, t), 0);
    pthread_join(thread, NULL);
    note(2); /* the list lets go of it here */
    CHECK(!fan_trace_on());
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    without_a_trace_nothing_is_recorded();
    the_oldest_lines_go_first();
    every_trace_of_the_thread_gets_the_line();
    a_trace_belongs_to_its_thread();
    a_trace_ended_elsewhere_may_begin_again();
    for (int n = 0; n < 2; n++) {
        fan_mem_fail_at(n, -1);
        CHECK(fan_trace_new(10) == NULL);
        fan_mem_fail_at(-1, 0);
    }
    CHECK(fan_trace_new(SIZE_MAX) == NULL);
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
