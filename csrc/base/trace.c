/* Traces: a ring of lines each; which traces a thread writes to; writing and reading lines. */
#define _POSIX_C_SOURCE 200809L
#include "base/trace.h"

#include "base/mem.h"
#include "base/thread.h"

#include <stdatomic.h>
#include <time.h>

/* The traces of a thread form a list, innermost first. Any thread may free or end a trace, but only
 * the thread that owns the list removes it: another thread marks it `closed`, and the owner removes
 * it at its next step. The list therefore holds a reference (`refs`), as the trace's maker does. */
struct fan_trace {
    atomic_int refs;
    atomic_bool on;     /* it is in some thread's list */
    atomic_bool closed; /* it must be removed from the list */
    bool digests;       /* it gets lines of digests */
    fan_trace *outer;   /* owned by the thread whose list it is in */
    size_t cap;
    uint64_t put; /* lines ever written; line i is at i % cap */
    fan_trace_line *lines;
};

static _Thread_local fan_trace *innermost;
static _Thread_local fan_trace_work at_work;
atomic_int fan_traces;

static void trace_drop(fan_trace *t)
{
    if (atomic_fetch_sub(&t->refs, 1) > 1)
        return;
    fan_free(t->lines);
    fan_free(t);
}

fan_trace *fan_trace_new(size_t capacity)
{
    size_t bytes;
    if (capacity == 0)
        capacity = 1;
    if (__builtin_mul_overflow(capacity, sizeof(fan_trace_line), &bytes))
        return NULL;
    fan_trace *t = fan_calloc(sizeof *t);
    if (!t)
        return NULL;
    t->lines = fan_alloc(bytes);
    if (!t->lines) {
        fan_free(t);
        return NULL;
    }
    atomic_init(&t->refs, 1);
    t->cap = capacity;
    return t;
}

/* unlink: removes `t` from this thread's list; false if it is not in it. */
static bool trace_unlink(fan_trace *t)
{
    for (fan_trace **at = &innermost; *at; at = &(*at)->outer) {
        if (*at == t) {
            *at = t->outer;
            t->outer = NULL;
            atomic_store(&t->closed, false);
            atomic_store(&t->on, false);
            atomic_fetch_sub(&fan_traces, 1);
            trace_drop(t);
            return true;
        }
    }
    return false;
}

static void trace_sweep(void)
{
    fan_trace *outer;
    for (fan_trace *t = innermost; t; t = outer) {
        outer = t->outer;
        if (atomic_load_explicit(&t->closed, memory_order_acquire))
            trace_unlink(t);
    }
}

void fan_trace_free(fan_trace *t)
{
    if (!t)
        return;
    fan_trace_end(t);
    trace_drop(t);
}

void fan_trace_begin(fan_trace *t)
{
    trace_sweep();
    if (atomic_exchange(&t->on, true))
        return;
    atomic_fetch_add(&t->refs, 1);
    t->outer = innermost;
    innermost = t;
    atomic_fetch_add(&fan_traces, 1);
}

void fan_trace_end(fan_trace *t)
{
    /* Release: the thread whose list has it unlinks it at its next line (acquire in
     * trace_sweep). */
    if (!trace_unlink(t) && atomic_load(&t->on))
        atomic_store_explicit(&t->closed, true, memory_order_release);
}

bool fan_trace_on(void)
{
    if (!innermost)
        return false;
    trace_sweep();
    return innermost != NULL;
}

void fan_trace_want_digests(fan_trace *t)
{
    t->digests = true;
}

bool fan_trace_digests(void)
{
    if (!fan_trace_on())
        return false;
    for (const fan_trace *t = innermost; t; t = t->outer) {
        if (t->digests)
            return true;
    }
    return false;
}

uint64_t fan_trace_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

fan_trace_work fan_trace_work_begin(fan_trace_work work)
{
    fan_trace_work before = at_work;
    at_work = work;
    return before;
}

fan_trace_work fan_trace_work_now(void)
{
    return at_work;
}

void fan_trace_put(const fan_trace_line *line)
{
    if (!fan_trace_on())
        return;
    uint64_t ns = fan_trace_ns();
    for (fan_trace *t = innermost; t; t = t->outer) {
        if (line->kind == FAN_TRACE_DIGEST && !t->digests)
            continue;
        fan_trace_line *to = &t->lines[t->put % t->cap];
        *to = *line;
        to->host_ns = ns;
        to->work = at_work;
        to->thread = fan_thread_id();
        to->label[FAN_TRACE_LABEL - 1] = '\0';
        t->put++;
    }
}

size_t fan_trace_count(const fan_trace *t)
{
    return t->put < t->cap ? (size_t)t->put : t->cap;
}

uint64_t fan_trace_dropped(const fan_trace *t)
{
    return t->put - fan_trace_count(t);
}

const fan_trace_line *fan_trace_at(const fan_trace *t, size_t i)
{
    if (i >= fan_trace_count(t))
        return NULL;
    return &t->lines[(fan_trace_dropped(t) + i) % t->cap];
}
