/* options: the switches of the process, its counters, and what scheduled threads share without a
 * lock. */
#include "buffer/internal.h"

#include "base/mem.h"

atomic_bool fan_debug_on;
static atomic_bool warn_on = true, warned, redirect_on;
static struct {
#define X(name) atomic_uint_fast64_t name;
    FAN_COUNTER_LIST(X)
#undef X
} total;
fan_counters fan_plain_total;

/* get: an option, as a step of a scheduled thread reads it. */
static bool get(const atomic_bool *option)
{
    if (fan_sched_active())
        fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_READ);
    return atomic_load(option);
}

void fan_set_debug(bool on)
{
    atomic_store(&fan_debug_on, on);
}
bool fan_get_debug(void)
{
    return get(&fan_debug_on);
}
void fan_set_warn_mismatch(bool on)
{
    atomic_store(&warn_on, on);
    if (on)
        atomic_store(&warned, false);
}
bool fan_get_warn_mismatch(void)
{
    return get(&warn_on);
}
void fan_set_capture_redirect(bool on)
{
    atomic_store(&redirect_on, on);
}
bool fan_get_capture_redirect(void)
{
    return get(&redirect_on);
}

static void touch_counters(const fan_buffer *b)
{
    if (!fan_sched_active() || !b->nlocks)
        return;
    fan_sched_access(FAN_THING_COUNTERS, b->locks[0].id, FAN_SCHED_COUNT);
    fan_sched_access(FAN_THING_COUNTERS, 0, FAN_SCHED_COUNT);
}

void fan_count(fan_buffer *b, size_t offset, uint64_t n)
{
    size_t i = offset / sizeof(uint64_t);
    touch_counters(b);
    atomic_fetch_add_explicit((atomic_uint_fast64_t *)&b->n + i, n, memory_order_relaxed);
    atomic_fetch_add_explicit((atomic_uint_fast64_t *)&total + i, n, memory_order_relaxed);
}

static void raise_to(atomic_uint_fast64_t *peak, uint64_t n)
{
    uint64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < n && !atomic_compare_exchange_weak_explicit(peak, &seen, n, memory_order_relaxed,
                                                              memory_order_relaxed))
        ;
}

void fan_count_parked(fan_buffer *b, uint64_t bytes)
{
    raise_to(&b->n.peak_parked_bytes,
             atomic_fetch_add_explicit(&b->parked, bytes, memory_order_relaxed) + bytes);
    raise_to(&total.peak_parked_bytes, atomic_load_explicit(&b->parked, memory_order_relaxed));
}

bool fan_warn_mismatch_now(void)
{
    return get(&warn_on) && !atomic_exchange(&warned, true);
}

static void counted(const fan_counters *plain, fan_counters *out)
{
    uint64_t peak = out->peak_parked_bytes;
#define X(name) out->name += plain->name;
    FAN_COUNTER_LIST(X)
#undef X
    out->peak_parked_bytes = peak > plain->peak_parked_bytes ? peak : plain->peak_parked_bytes;
}

void fan_buffer_counters(const fan_buffer *b, fan_counters *out)
{
#define X(name) out->name = atomic_load_explicit(&b->n.name, memory_order_relaxed);
    FAN_COUNTER_LIST(X)
#undef X
    counted(&b->plain, out);
}

void fan_counters_total(fan_counters *out)
{
#define X(name) out->name = atomic_load_explicit(&total.name, memory_order_relaxed);
    FAN_COUNTER_LIST(X)
#undef X
    counted(&fan_plain_total, out);
}

void fan_counters_join(fan_counters *some)
{
    raise_to(&total.peak_parked_bytes, some->peak_parked_bytes);
    some->peak_parked_bytes = 0;
#define X(name)     \
    if (some->name) \
        atomic_fetch_add_explicit(&total.name, some->name, memory_order_relaxed);
    FAN_COUNTER_LIST(X)
#undef X
    *some = (fan_counters){.adds = 0};
}

void fan_touch_budget(const fan_buffer *b, fan_sched_mode how)
{
    if (fan_sched_active() && b->nlocks)
        fan_sched_access(FAN_THING_BUDGET, b->locks[0].id, how);
}

void fan_buffer_seen(const fan_buffer *b, size_t slot, fan_sched_mode how)
{
    for (size_t i = 0; i < b->nlocks; i++) {
        if (slot == SIZE_MAX || (slot < b->nslots && slot % b->nlocks == i))
            fan_sched_access(FAN_THING_LOCKED, b->locks[i].id, how);
    }
    if (how == FAN_SCHED_WRITE) {
        fan_touch_budget(b, FAN_SCHED_COUNT);
        touch_counters(b);
    }
}

void fan_buffer_seen_counters(const fan_buffer *b)
{
    if (b->nlocks)
        fan_sched_access(FAN_THING_COUNTERS, b->locks[0].id, FAN_SCHED_DECIDE);
}

void fan_buffer_seen_parked(const fan_buffer *b)
{
    fan_touch_budget(b, FAN_SCHED_DECIDE);
}

void fan_buffer_weigh(fan_buffer *b, uint64_t bytes)
{
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    if (!fan_thread_get_hooks())
        return;
    b->weighed = (b->weighed < parked ? parked : b->weighed) + bytes;
    fan_touch_budget(b, FAN_SCHED_COUNT);
    touch_counters(b);
    if (b->weighed > b->fold_threshold)
        fan_touch_budget(b, FAN_SCHED_DECIDE);
}
