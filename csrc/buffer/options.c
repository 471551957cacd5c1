/* options: the switches of the process, its counters, and what scheduled threads share without a
 * lock. */
#include "buffer/internal.h"

#include "base/mem.h"

atomic_bool fan_debug_on;
static atomic_bool warn_on = true, warned, redirect_on;

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

void fan_count(const fan_buffer *b, atomic_uint_fast64_t *counter, uint64_t n)
{
    touch_counters(b);
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

void fan_count_parked(fan_buffer *b, uint64_t bytes)
{
    atomic_uint_fast64_t *peak = &b->counters.peak_parked_bytes;
    uint64_t now = atomic_fetch_add_explicit(&b->parked, bytes, memory_order_relaxed) + bytes;
    uint64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < now) {
        if (atomic_compare_exchange_weak_explicit(peak, &seen, now, memory_order_relaxed,
                                                  memory_order_relaxed))
            break;
    }
}

bool fan_warn_mismatch_now(void)
{
    return get(&warn_on) && !atomic_exchange(&warned, true);
}

/* ---- the counters of the process: those of all its buffers ---- */

fan_counter_store fan_counters_of_sums;
static pthread_mutex_t buffers_lock = PTHREAD_MUTEX_INITIALIZER;
static fan_buffer *newest; /* under the lock, as is `ended` */
static fan_counters ended; /* of buffers that are gone, or count anew */

static void buffers_lock_all(void)
{
    (void)pthread_mutex_lock(&buffers_lock);
}
static void buffers_unlock_all(void)
{
    (void)pthread_mutex_unlock(&buffers_lock);
}
static fan_fork buffers_fork = {.lock = buffers_lock_all, .unlock = buffers_unlock_all};

static void counters_read(const fan_counter_store *from, fan_counters *out)
{
#define X(name) out->name = atomic_load_explicit(&from->name, memory_order_relaxed);
    FAN_COUNTER_LIST(X)
#undef X
}

/* *sum becomes that of itself and one more, but for the peak, which is the higher one. */
static void counters_add(fan_counters *sum, const fan_counter_store *more)
{
    fan_counters one;
    uint64_t peak = sum->peak_parked_bytes;
    counters_read(more, &one);
    if (one.peak_parked_bytes > peak)
        peak = one.peak_parked_bytes;
#define X(name) sum->name += one.name;
    FAN_COUNTER_LIST(X)
#undef X
    sum->peak_parked_bytes = peak;
}

void fan_counters_begin(fan_buffer *b)
{
    (void)fan_fork_add(&buffers_fork);
    buffers_lock_all();
    b->older = newest;
    if (newest)
        newest->newer = b;
    newest = b;
    buffers_unlock_all();
}

void fan_counters_end(fan_buffer *b, bool gone)
{
    buffers_lock_all();
    counters_add(&ended, &b->counters);
#define X(name) atomic_store_explicit(&b->counters.name, 0, memory_order_relaxed);
    FAN_COUNTER_LIST(X)
#undef X
    if (gone && b->older)
        b->older->newer = b->newer;
    if (gone && b->newer)
        b->newer->older = b->older;
    else if (gone)
        newest = b->older;
    buffers_unlock_all();
}

void fan_buffer_counters(const fan_buffer *b, fan_counters *out)
{
    counters_read(&b->counters, out);
}

void fan_counters_total(fan_counters *out)
{
    buffers_lock_all();
    *out = ended;
    for (const fan_buffer *b = newest; b; b = b->older)
        counters_add(out, &b->counters);
    buffers_unlock_all();
    counters_add(out, &fan_counters_of_sums);
}

void fan_touch_budget(const fan_buffer *b, fan_sched_mode mode)
{
    if (fan_sched_active() && b->nlocks)
        fan_sched_access(FAN_THING_BUDGET, b->locks[0].id, mode);
}

void fan_buffer_seen(const fan_buffer *b, size_t slot, fan_sched_mode mode)
{
    for (size_t i = 0; i < b->nlocks; i++) {
        if (slot == SIZE_MAX || (slot < b->nslots && slot % b->nlocks == i))
            fan_sched_access(FAN_THING_LOCKED, b->locks[i].id, mode);
    }
    if (mode == FAN_SCHED_WRITE) {
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
    if (fan_budget_near(b, b->weighed))
        fan_touch_budget(b, FAN_SCHED_DECIDE);
}
