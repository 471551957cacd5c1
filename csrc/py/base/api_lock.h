/* api_lock: the lock of a buffer of the C API, which stands for the interpreter's: one thread at a time is inside
 * (buffer/plain.h), and leaves wherever a thread of Python's leaves the interpreter: fan_allow_threads_begin, and
 * before it runs Python (fan_gil_enter), which may give the interpreter to another thread. So no thread that has such a
 * lock waits for the interpreter's, and others' code (finalizers, release functions, deleters) runs without it and may
 * call the API.
 */
#ifndef FAN_PY_API_LOCK_H
#define FAN_PY_API_LOCK_H

#include "base/thread.h"

typedef struct fan_api_lock {
    fan_mutex mutex;     /* locked without a scheduler's hooks, as the interpreter's lock is */
    unsigned generation; /* fan_fork_generation() of the process that made or adopted it */
} fan_api_lock;

/* Where this thread is. */
typedef struct fan_api_place {
    fan_api_lock *lock; /* of the innermost call; NULL: of none */
    bool left;          /* the call has left it for now */
} fan_api_place;

extern _Thread_local fan_api_place fan_api_here __attribute__((visibility("hidden")));

int fan_api_lock_init(fan_api_lock *l); /* 0, or -1 */
void fan_api_lock_fini(fan_api_lock *l);
/* fan_api_lock_adopt: in a forked child, whose parent may have been inside. */
void fan_api_lock_adopt(fan_api_lock *l);

/* fan_api_this_thread: &fan_api_here, found once: the compiler would call __tls_get_addr for each use. */
static inline fan_api_place *fan_api_this_thread(void)
{
    fan_api_place *here = &fan_api_here;
    __asm__("" : "+r"(here));
    return here;
}

/* fan_api_enter: locks; returns where this thread was, for fan_api_exit. */
static inline fan_api_place fan_api_enter(fan_api_lock *l, fan_api_place *here)
{
    fan_api_place was = *here;
    if (__builtin_expect(l->generation != fan_fork_generation(), 0))
        fan_api_lock_adopt(l);
    (void)pthread_mutex_lock(&l->mutex.m);
    *here = (fan_api_place){l, false};
    return was;
}
static inline void fan_api_exit(fan_api_lock *l, fan_api_place *here, fan_api_place was)
{
    *here = was;
    (void)pthread_mutex_unlock(&l->mutex.m);
}

/* fan_api_leave: unlocks what this thread has; false: nothing. fan_api_return: after true, locks it again. */
static inline bool fan_api_leave(void)
{
    if (!fan_api_here.lock || fan_api_here.left)
        return false;
    fan_api_here.left = true;
    (void)pthread_mutex_unlock(&fan_api_here.lock->mutex.m);
    return true;
}
static inline void fan_api_return(bool left)
{
    if (!left)
        return;
    (void)pthread_mutex_lock(&fan_api_here.lock->mutex.m);
    fan_api_here.left = false;
}

#endif
