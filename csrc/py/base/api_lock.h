/* api_lock: the lock of a buffer of the C API, which replaces the interpreter's: one thread at a
 * time is inside (buffer/plain.h), and leaves wherever a thread of Python's leaves the interpreter:
 * fan_allow_threads_begin, and before it runs Python (fan_gil_enter), which may give the
 * interpreter to another thread. So no thread that has such a lock waits for the interpreter's, and
 * others' code (finalizers, release functions, deleters) runs without it and may call the
 * API. */
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
    bool in_call;       /* of the API, at whose end releases that were put off are called */
} fan_api_place;

/* Title: Releases. A function of the caller's that ends memory (of wrap, of a tensor, of a kernel)
 * may wait for a thread that needs the interpreter, so no call of the API calls it with the
 * interpreter's lock. A call on a thread that has that lock puts its releases off; at its end,
 * after it has left buffer and turn, it releases the interpreter's lock once around all of them. A
 * thread that does not have that lock calls a release at once, because the call may need the
 * memory. Outside of calls of the API (the end of an ndarray, a pass) a release is called at once,
 * whatever lock the thread has. */
typedef struct fan_api_release {
    struct fan_api_release *next;              /* put off after this one; NULL: none */
    void (*run)(struct fan_api_release *self); /* calls the caller's function; ends self */
} fan_api_release;

typedef struct fan_api_thread {
    fan_api_place place;
    /* put off, in their order; NULL: none */
    fan_api_release *first;
    fan_api_release *last;
} fan_api_thread;

extern _Thread_local fan_api_thread fan_api_here __attribute__((visibility("hidden")));

int fan_api_lock_init(fan_api_lock *l); /* 0, or -1 */
void fan_api_lock_fini(fan_api_lock *l);
/* fan_api_lock_adopt: in a forked child, whose parent may have been inside. */
void fan_api_lock_adopt(fan_api_lock *l);

/* fan_api_this_thread: &fan_api_here, found once: the compiler would call __tls_get_addr for each
 * use. */
static inline fan_api_thread *fan_api_this_thread(void)
{
    fan_api_thread *here = &fan_api_here;
    __asm__("" : "+r"(here));
    return here;
}

/* fan_api_enter: locks; returns where this thread was, for fan_api_exit. Between them releases are
 * put off; the caller calls fan_api_releases_end after fan_api_exit. */
static inline fan_api_place fan_api_enter(fan_api_lock *l, fan_api_thread *here)
{
    fan_api_place was = here->place;
    if (__builtin_expect(l->generation != fan_fork_generation(), 0))
        fan_api_lock_adopt(l);
    (void)pthread_mutex_lock(&l->mutex.m);
    here->place = (fan_api_place){l, false, true};
    return was;
}
static inline void fan_api_exit(fan_api_lock *l, fan_api_thread *here, fan_api_place was)
{
    here->place = was;
    (void)pthread_mutex_unlock(&l->mutex.m);
}

/* fan_api_leave: unlocks what this thread has; false: nothing. */
static inline bool fan_api_leave(void)
{
    fan_api_place *place = &fan_api_here.place;
    if (!place->lock || place->left)
        return false;
    place->left = true;
    (void)pthread_mutex_unlock(&place->lock->mutex.m);
    return true;
}
/* fan_api_return: after true, locks it again. */
static inline void fan_api_return(bool left)
{
    if (!left)
        return;
    (void)pthread_mutex_lock(&fan_api_here.place.lock->mutex.m);
    fan_api_here.place.left = false;
}

/* fan_api_releases_begin, _end: around a call that holds no buffer's lock, or drops something after
 * it; they nest. */
static inline fan_api_place fan_api_releases_begin(void)
{
    fan_api_place was = fan_api_here.place;
    fan_api_here.place = (fan_api_place){.in_call = true};
    return was;
}
/* fan_api_releases_run: calls what was put off. */
void fan_api_releases_run(void);
static inline void fan_api_releases_end(fan_api_place was)
{
    fan_api_here.place = was;
    if (__builtin_expect(fan_api_here.first != NULL, 0))
        fan_api_releases_run();
}
/* fan_api_release_call: calls r->run, now or when it may be. */
void fan_api_release_call(fan_api_release *r);

#endif
