/* The buffer from C, on the CPU: no frontend but a counter. */
#include "buffer/buffer.h"
#include "check.h"

#include "base/mem.h"

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
static fan_status combine(void *c, const fan_value *a, const fan_value *b, fan_value *out, fan_error *err)
{
    (void)c;
    (void)a;
    (void)b;
    (void)out;
    return fan_fail(err, FAN_ERR_TYPE, "no objects here");
}
static const fan_frontend frontend = {.hold = hold, .drop = drop, .unshared = unshared, .combine = combine};

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
    fan_buffer_config config = {.slots = slots, .budget = budget, .accumulate = FAN_DT_NONE, .frontend = &frontend};
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

/* Every allocation fails once: the call says so or succeeds, and what was in the slot is still there. */
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

int main(void)
{
    sums_under_every_budget();
    errors_leave_it_as_it_was();
    allocations_fail();
    CHECK(held == 0);
    return check_done();
}
