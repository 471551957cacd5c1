#include "py/base/api_lock.h"

_Thread_local fan_api_place fan_api_here;

static pthread_mutex_t adopting = PTHREAD_MUTEX_INITIALIZER; /* threads of a forked child */

static void adopting_lock(void) { (void)pthread_mutex_lock(&adopting); }
static void adopting_unlock(void) { (void)pthread_mutex_unlock(&adopting); }
static fan_fork adopting_fork = {.lock = adopting_lock, .unlock = adopting_unlock};

int fan_api_lock_init(fan_api_lock *l)
{
    l->generation = fan_fork_generation();
    return fan_fork_add(&adopting_fork) == 0 ? fan_mutex_init(&l->mutex) : -1;
}

void fan_api_lock_fini(fan_api_lock *l) { fan_mutex_fini(&l->mutex); }

void fan_api_lock_adopt(fan_api_lock *l)
{
    adopting_lock();
    if (l->generation != fan_fork_generation()) {
        (void)fan_mutex_adopt(&l->mutex);
        l->generation = fan_fork_generation();
    }
    adopting_unlock();
}
