/* Handlers of fork; hooks of a thread, by which a scheduler decides what runs; mutexes and
 * conditions that call them. */
#define _POSIX_C_SOURCE 200809L

#include "base/thread.h"

#include <pthread.h>
#include <stddef.h>
#include <time.h>

atomic_uint fan_forks;

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static fan_fork *oldest, *newest;
static bool watching;

static void fork_before(void)
{
    pthread_mutex_lock(&list_lock);
    for (const fan_fork *f = newest; f; f = f->older) {
        if (f->lock)
            f->lock();
    }
}

static void unlock_all(void)
{
    for (const fan_fork *f = oldest; f; f = f->newer) {
        if (f->unlock)
            f->unlock();
    }
}

static void in_parent(void)
{
    unlock_all();
    pthread_mutex_unlock(&list_lock);
}

static void in_child(void)
{
    atomic_fetch_add(&fan_forks, 1);
    unlock_all();
    for (const fan_fork *f = oldest; f; f = f->newer) {
        if (f->child)
            f->child();
    }
    pthread_mutex_unlock(&list_lock);
}

int fan_fork_add(fan_fork *f)
{
    pthread_mutex_lock(&list_lock);
    if (!watching)
        watching = pthread_atfork(fork_before, in_parent, in_child) == 0;
    if (watching && !f->added) {
        f->added = true;
        f->older = newest;
        if (newest)
            newest->newer = f;
        else
            oldest = f;
        newest = f;
    }
    int failed = watching ? 0 : -1;
    pthread_mutex_unlock(&list_lock);
    return failed;
}

#define FAN_COND_NS 50000000L

static atomic_uint_fast64_t last_mutex, last_thread;

atomic_uint fan_sched_threads;
static atomic_bool hooks_ever;
static _Thread_local const fan_thread_hooks *hooks_here;
static _Thread_local uint64_t id_here;

void fan_thread_set_hooks(const fan_thread_hooks *hooks)
{
    if (!hooks_here && hooks)
        atomic_fetch_add(&fan_sched_threads, 1);
    else if (hooks_here && !hooks)
        atomic_fetch_sub(&fan_sched_threads, 1);
    hooks_here = hooks;
    if (hooks)
        atomic_store_explicit(&hooks_ever, true, memory_order_relaxed);
}

const fan_thread_hooks *fan_thread_get_hooks(void)
{
    return hooks_here;
}

void fan_thread_set_stuck(bool stuck)
{
    if (stuck)
        atomic_fetch_sub(&fan_sched_threads, 1);
    else
        atomic_fetch_add(&fan_sched_threads, 1);
}

/* Written in the forked child, which has one thread. */
static uint64_t forked_at, survivor;

static void thread_in_child(void)
{
    forked_at = atomic_load(&last_thread);
    survivor = id_here;
}

static fan_fork thread_fork = {.child = thread_in_child};

__attribute__((constructor)) static void thread_watch_forks(void)
{
    (void)fan_fork_add(&thread_fork);
}

bool fan_thread_survived(uint64_t thread)
{
    return thread > forked_at || thread == survivor;
}

bool fan_mutex_adopt(fan_mutex *m)
{
    bool was_free = pthread_mutex_trylock(&m->m) == 0;
    if (was_free)
        pthread_mutex_unlock(&m->m);
    pthread_mutex_init(&m->m, NULL);
    return was_free;
}

void fan_cond_adopt(fan_cond *c)
{
    /* pthread_cond_destroy would wait for the waiters of before the fork */
    pthread_cond_init(&c->c, NULL);
}

uint64_t fan_thread_id(void)
{
    if (!id_here)
        id_here = atomic_fetch_add(&last_thread, 1) + 1;
    return id_here;
}

/* mutex_new_number: a scheduled thread numbers its own mutexes, so the numbers do not depend on
 * other threads. */
static uint64_t mutex_new_number(void)
{
    const fan_thread_hooks *h = hooks_here;
    if (h && h->name)
        return h->name(h->ctx);
    return atomic_fetch_add(&last_mutex, 1) + 1;
}

int fan_mutex_init(fan_mutex *m)
{
    m->id = mutex_new_number();
    return pthread_mutex_init(&m->m, NULL) ? -1 : 0;
}

void fan_mutexes_numbered(void)
{
    atomic_store_explicit(&hooks_ever, true, memory_order_relaxed);
}

void fan_mutex_renew(fan_mutex *m)
{
    /* Without hooks the two lives of the mutex need no different numbers. */
    if (atomic_load_explicit(&hooks_ever, memory_order_relaxed))
        m->id = mutex_new_number();
}

void fan_mutex_fini(fan_mutex *m)
{
    pthread_mutex_destroy(&m->m);
}

void fan_yield(void)
{
    const fan_thread_hooks *h = hooks_here;
    if (h && h->yield)
        h->yield(h->ctx);
}

bool fan_sched_enter(void)
{
    const fan_thread_hooks *h = hooks_here;
    if (h && h->begin)
        return h->begin(h->ctx);
    return true;
}

void fan_sched_leave(void)
{
    const fan_thread_hooks *h = hooks_here;
    if (h && h->end)
        h->end(h->ctx);
}

void fan_sched_stepped(void)
{
    fan_sched_leave();
}

void fan_sched_not_ready(void)
{
    const fan_thread_hooks *h = hooks_here;
    if (h && h->not_ready)
        h->not_ready(h->ctx);
}

void fan_sched_access(fan_thing thing, uint64_t id, fan_sched_mode mode)
{
    const fan_thread_hooks *h = hooks_here;
    if (h && h->access)
        h->access(h->ctx, thing, id, mode);
}

/* mutex_seize: locks the mutex; never blocks this OS thread while the scheduler can run the
 * holder. */
static void mutex_seize(fan_mutex *m, const fan_thread_hooks *h)
{
    while (pthread_mutex_trylock(&m->m)) {
        if (!h->wait || !h->wait(h->ctx, m->id)) {
            pthread_mutex_lock(&m->m);
            break;
        }
    }
    if (h->locked)
        h->locked(h->ctx, m->id);
}

static void mutex_release(fan_mutex *m, const fan_thread_hooks *h)
{
    if (h->unlocking)
        h->unlocking(h->ctx, m->id);
    pthread_mutex_unlock(&m->m);
}

void fan_mutex_lock(fan_mutex *m)
{
    const fan_thread_hooks *h = hooks_here;
    if (!h) {
        pthread_mutex_lock(&m->m);
        return;
    }
    fan_yield();
    mutex_seize(m, h);
}

void fan_mutex_unlock(fan_mutex *m)
{
    const fan_thread_hooks *h = hooks_here;
    if (!h) {
        pthread_mutex_unlock(&m->m);
        return;
    }
    mutex_release(m, h);
    fan_yield();
}

int fan_cond_init(fan_cond *c)
{
    atomic_init(&c->calls, 0);
    atomic_init(&c->mutex, 0);
    return pthread_cond_init(&c->c, NULL) ? -1 : 0;
}

void fan_cond_fini(fan_cond *c)
{
    pthread_cond_destroy(&c->c);
}

/* cond_doze: waits on the condition with a timeout, so that a waiter can check for signals in
 * between. */
static void cond_doze(fan_cond *c, fan_mutex *m)
{
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += FAN_COND_NS;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&c->c, &m->m, &until);
}

void fan_cond_wait(fan_cond *c, fan_mutex *m)
{
    const fan_thread_hooks *h = hooks_here;
    if (h && h->wait) {
        /* The mutex is released while the scheduler runs, so a broadcast may happen in between: the
         * count of calls shows it. */
        uint_fast64_t seen = atomic_load(&c->calls);
        atomic_store(&c->mutex, m->id);
        mutex_release(m, h);
        bool acted = h->wait(h->ctx, m->id);
        mutex_seize(m, h);
        if (acted || atomic_load(&c->calls) != seen)
            return;
    }
    if (h && h->unlocking)
        h->unlocking(h->ctx, m->id);
    cond_doze(c, m);
    if (h && h->locked)
        h->locked(h->ctx, m->id);
}

void fan_cond_broadcast(fan_cond *c)
{
    const fan_thread_hooks *h = hooks_here;
    atomic_fetch_add(&c->calls, 1);
    if (h && h->changed && atomic_load(&c->mutex))
        h->changed(h->ctx, atomic_load(&c->mutex));
    pthread_cond_broadcast(&c->c);
}
