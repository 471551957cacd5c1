/* The buffer from C, on the CPU: no frontend but a counter. */
#include "buffer/buffer.h"
#include "buffer/list.h"
#include "check.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static int64_t held;
static void hold(void *o)
{
    (void)o;
    held++;
}
static void drop(void *o)
{
    (void)o;
    held--;
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
    .hold = hold, .drop = drop, .unshared = unshared, .combine = combine};

static fan_value gradient(double x, int64_t n)
{
    fan_array *a = NULL;
    (void)fan_array_new(FAN_DT_FLOAT64, 1, &n, NULL, &a, NULL);
    for (int64_t i = 0; a && i < n; i++)
        ((double *)(void *)a->data)[i] = x;
    return a ? fan_value_dense(a, fan_cpu()) : (fan_value){.dtype = FAN_DT_NONE};
}

static fan_status add(fan_buffer *b, size_t slot, double x, int64_t n, int64_t key, fan_error *err)
{
    fan_contribution c = {.value = gradient(x, n), .key = key};
    if (c.value.form == FAN_FORM_UNDEFINED)
        return FAN_ERR_NOMEM;
    fan_status s = fan_buffer_add(b, slot, &c, err);
    fan_value_drop(&frontend, &c.value);
    return s;
}

static double first(const fan_value *v)
{
    double x = -1;
    if (v->array)
        memcpy(&x, v->array->data, sizeof x);
    return x;
}

static fan_buffer *make(size_t slots, uint64_t budget)
{
    fan_buffer *b = NULL;
    fan_error err = {0};
    fan_buffer_config config = {
        .slots = slots, .budget = budget, .accumulate = FAN_DT_NONE, .frontend = &frontend};
    CHECK(fan_buffer_new(&config, &b, &err) == FAN_OK);
    return b;
}

static void sums_under_every_budget(void)
{
    static const uint64_t budgets[] = {0, 100, UINT64_MAX};
    for (size_t i = 0; i < 3; i++) {
        fan_buffer *b = make(2, budgets[i]);
        fan_value out[2];
        fan_take how = {.real = true, .integral = true};
        fan_error err = {0};
        for (int k = 0; k < 5; k++)
            CHECK(add(b, 0, k + 1, 3, (k * 3) % 5, &err) == FAN_OK);
        CHECK(fan_buffer_take(b, &how, out, &err) == FAN_OK);
        CHECK(first(&out[0]) == 15.0);
        CHECK(out[1].form == FAN_FORM_UNDEFINED);
        fan_value_drop(&frontend, &out[0]);
        CHECK(fan_buffer_take(b, &how, out, &err) == FAN_OK);
        CHECK(out[0].form == FAN_FORM_UNDEFINED);
        fan_buffer_free(b);
    }
}

static void errors_leave_it_as_it_was(void)
{
    fan_buffer *b = make(1, UINT64_MAX);
    fan_error err = {0};
    fan_value out[1];
    fan_take how = {.real = true, .integral = true};
    CHECK(add(b, 0, 1, 3, 0, &err) == FAN_OK);
    CHECK(add(b, 0, 1, 4, 1, &err) == FAN_ERR_VALUE);
    CHECK(strstr(err.text, "(3,)") && strstr(err.text, "(4,)"));
    CHECK(add(b, 0, 1, 3, 0, &err) == FAN_ERR_VALUE);
    CHECK(add(b, 0, 1, 3, -1, &err) == FAN_ERR_VALUE);
    CHECK(add(b, 1, 1, 3, 1, &err) == FAN_ERR_INDEX);
    CHECK(fan_buffer_take(b, &how, out, &err) == FAN_OK);
    CHECK(first(&out[0]) == 1.0);
    fan_value_drop(&frontend, &out[0]);
    fan_buffer_free(b);
}

/* Every allocation fails once: the call says so or succeeds, and what was in the slot is still
 * there. */
static void allocations_fail(void)
{
    int64_t baseline = fan_mem_get().live;
    for (int64_t n = 0;; n++) {
        fan_buffer *b = make(1, 0);
        fan_error err = {0};
        fan_value out[1];
        fan_take how = {.real = true, .integral = true};
        double want = 1;
        CHECK(add(b, 0, 1, 3, 0, &err) == FAN_OK);
        int64_t failed = fan_mem_get().failed;
        fan_mem_fail_at(n, 1);
        fan_status s1 = add(b, 0, 2, 3, 1, &err);
        fan_status s2 = fan_buffer_take(b, &how, out, &err);
        fan_mem_fail_at(-1, 0);
        bool none = fan_mem_get().failed == failed;
        CHECK(s1 == FAN_OK || s1 == FAN_ERR_NOMEM);
        CHECK(s2 == FAN_OK || s2 == FAN_ERR_NOMEM);
        if (s1 == FAN_OK)
            want += 2;
        if (s2 != FAN_OK)
            CHECK(fan_buffer_take(b, &how, out, &err) == FAN_OK);
        CHECK(first(&out[0]) == want);
        fan_value_drop(&frontend, &out[0]);
        fan_buffer_free(b);
        CHECK(fan_mem_get().live == baseline);
        if (none)
            break;
    }
}

/* ---- other threads of the frontend ---- */

static bool outside;       /* the interpreter is left */
static unsigned times;     /* .. so often */
static const void *moving; /* memory that another thread moves then */
static unsigned moved;

static void *leave(void)
{
    CHECK(!outside);
    outside = true;
    times++;
    moved = moving != NULL;
    return &outside;
}

static void enter(void *left)
{
    CHECK(left == &outside && outside);
    outside = false;
}

static bool is_unchanged(const fan_value *v)
{
    CHECK(!outside);
    return !moved || v->array->data != moving;
}

static const fan_frontend leaving = {.hold = hold,
                                     .drop = drop,
                                     .unshared = unshared,
                                     .combine = combine,
                                     .is_unchanged = is_unchanged,
                                     .allow_threads_begin = leave,
                                     .allow_threads_end = enter};

#define LARGE 8192 /* doubles: from here on others are let in */

static fan_buffer *make_leaving(uint64_t budget, bool exact, bool stats)
{
    fan_buffer *b = NULL;
    fan_error err = {0};
    fan_buffer_config config = {.slots = 1,
                                .budget = budget,
                                .accumulate = FAN_DT_NONE,
                                .exact = exact,
                                .stats = stats,
                                .frontend = &leaving};
    CHECK_OK(fan_buffer_new(&config, &b, &err));
    return b;
}

/* took: how often others were let in by a take, whose sum begins with `want`. */
static unsigned took(fan_buffer *b, double want)
{
    fan_value out[1];
    fan_take how = {.real = true, .integral = true};
    fan_error err = {0};
    times = 0;
    CHECK_OK(fan_buffer_take(b, &how, out, &err));
    CHECK(first(&out[0]) == want);
    fan_value_drop(&leaving, &out[0]);
    return times;
}

static void others_run_while_a_large_gradient_is_hashed(void)
{
    fan_error err = {0};
    for (int64_t n = LARGE - 1; n <= LARGE; n++) {
        fan_buffer *b = make_leaving(UINT64_MAX, false, false);
        fan_set_debug(true);
        times = 0;
        CHECK_OK(add(b, 0, 1, n, 0, &err));
        CHECK_INT(times, n == LARGE);
        CHECK_INT(took(b, 1), n == LARGE);
        fan_set_debug(false);
        CHECK_OK(add(b, 0, 1, n, 0, &err));
        CHECK_INT(took(b, 1), 0);
        fan_buffer_free(b);
    }
}

static void others_run_while_a_large_gradient_is_copied(void)
{
    fan_error err = {0};
    for (int64_t n = LARGE - 1; n <= LARGE; n++) {
        fan_buffer *b = make_leaving(UINT64_MAX, false, false);
        fan_contribution c = {.value = gradient(1, n), .key = 0, .copy = true};
        times = 0;
        CHECK_OK(fan_buffer_add(b, 0, &c, &err));
        CHECK_INT(times, n == LARGE);
        fan_value_drop(&leaving, &c.value);
        CHECK_INT(took(b, 1), 0);
        fan_buffer_free(b);
    }
}

/* adds: how often others were let in by an add of x. */
static unsigned adds(fan_buffer *b, double x, int64_t key)
{
    fan_error err = {0};
    times = 0;
    CHECK_OK(add(b, 0, x, LARGE, key, &err));
    return times;
}

/* Once enough of them wait they are added to the exact state, which others need not wait for; with
 * statistics each is read before, in search of the first that is not finite. */
static void others_run_while_an_exact_sum_looks_for_an_inf(void)
{
    enum {
        N = 120,
        BAD = 100
    };
    fan_buffer *plain = make_leaving(0, true, false);
    fan_buffer *b = make_leaving(0, true, true);
    fan_error err = {0};
    unsigned folds = 0;
    unsigned waiting = 0;
    bool some, has;
    fan_stats s;
    int64_t key;
    for (unsigned k = 0; k < BAD; k++) {
        bool fold = adds(plain, 1, k) > 0;
        waiting++;
        CHECK_INT(adds(b, 1, k), fold ? 1 + waiting : 0);
        folds += fold;
        if (fold)
            waiting = 0;
    }
    CHECK(folds > 1);
    for (unsigned k = BAD; k < N; k++)
        (void)adds(b, k == BAD ? INFINITY : 1, k);
    CHECK(adds(b, 1, N) + adds(b, 1, N + 1) < 4); /* there was one: nobody looks any more */
    (void)took(b, INFINITY);
    CHECK_OK(fan_buffer_stats(b, 0, &some, &s, &has, &key, &err));
    CHECK(has && key == BAD);
    fan_buffer_free(plain);
    fan_buffer_free(b);
}

/* What another thread moves meanwhile is not read; the add that made the sum due did not happen,
 * and nothing was summed twice or lost. */
static void what_moves_while_others_run_is_not_read(void)
{
    fan_buffer *b = make_leaving(0, true, true);
    fan_error err = {0};
    fan_status status = FAN_OK;
    char text[80];
    int k = 0;
    for (times = 0; status == FAN_OK && k < 200; k++) {
        fan_contribution c = {.value = gradient(1, LARGE), .key = k};
        moving = c.value.array->data;
        status = fan_buffer_add(b, 0, &c, &err);
        fan_value_drop(&leaving, &c.value);
    }
    snprintf(text, sizeof text, "the gradient added with key %d was changed after it was added",
             k - 1);
    CHECK(status == FAN_ERR_STATE && times > 0);
    CHECK_HAS(err.text, text);
    moving = NULL;
    moved = 0;
    (void)took(b, k - 1);
    fan_buffer_free(b);
}

/* Rows of four numbers in five, three of them, twice. */
static void a_gap_along_one_axis_counts_for_the_axes_outside_it(void)
{
    static const int64_t shape[] = {2, 3, 4};
    static const int64_t strides[] = {120, 40, 8};
    static const int64_t overlaps[] = {96, 40, 8};
    uint32_t order = 0;
    CHECK(fan_plain_order(3, shape, strides, 8, true, &order));
    CHECK_INT(order, 5 << 10 | 1 << 8 | 1 << 2 | 2);
    CHECK(!fan_plain_order(3, shape, strides, 8, false, &order));
    CHECK(!fan_plain_order(3, shape, overlaps, 8, true, &order));
}

int main(void)
{
    a_gap_along_one_axis_counts_for_the_axes_outside_it();
    sums_under_every_budget();
    errors_leave_it_as_it_was();
    allocations_fail();
    others_run_while_a_large_gradient_is_hashed();
    others_run_while_a_large_gradient_is_copied();
    others_run_while_an_exact_sum_looks_for_an_inf();
    what_moves_while_others_run_is_not_read();
    CHECK(held == 0);
    return check_done();
}
