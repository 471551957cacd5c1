#define _POSIX_C_SOURCE 200809L
#include "base/fork.h"

#include <pthread.h>
#include <stddef.h>

atomic_uint fan_forks;

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static fan_fork *oldest, *newest;
static bool watching;

static void fork_before(void)
{
    (void)pthread_mutex_lock(&list_lock);
    for (const fan_fork *f = newest; f; f = f->older)
        if (f->lock)
            f->lock();
}

static void unlock_all(void)
{
    for (const fan_fork *f = oldest; f; f = f->newer)
        if (f->unlock)
            f->unlock();
}

static void in_parent(void)
{
    unlock_all();
    (void)pthread_mutex_unlock(&list_lock);
}

static void in_child(void)
{
    atomic_fetch_add(&fan_forks, 1);
    unlock_all();
    for (const fan_fork *f = oldest; f; f = f->newer)
        if (f->child)
            f->child();
    (void)pthread_mutex_unlock(&list_lock);
}

int fan_fork_add(fan_fork *f)
{
    (void)pthread_mutex_lock(&list_lock);
    watching = watching || pthread_atfork(fork_before, in_parent, in_child) == 0;
    if (watching && !f->added) {
        f->added = true;
        f->older = newest;
        *(newest ? &newest->newer : &oldest) = f;
        newest = f;
    }
    int answer = watching ? 0 : -1;
    (void)pthread_mutex_unlock(&list_lock);
    return answer;
}
