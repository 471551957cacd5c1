/* thread: mutexes and conditions whose every step can be watched and scheduled.
 *
 * Outside tests and the simulated device no hooks are set and a lock is a pthread mutex. Hooks let a scheduler run
 * host threads one at a time (it gets a yield before each lock, after each unlock and wherever fan_yield is called) and
 * let the happens-before checker see the order that a lock makes.
 *
 * Title: Calls and turns. What takes no lock must be seen too. A frontend opens each call of its face with
 * fan_call_begin where fan_watched() says that some thread is scheduled (one load where none is); that is a yield, and
 * what the call does to things that threads share is told by fan_touch, by whoever does it. The first yield inside the
 * call is that of its beginning once more and is passed over, unless the call has acted by then (fan_call_acted).
 */
#ifndef FAN_BASE_THREAD_H
#define FAN_BASE_THREAD_H

#include "base/fork.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct fan_mutex {
    pthread_mutex_t m;
    uint64_t id; /* a number of its own, for hooks; never reused */
} fan_mutex;

typedef struct fan_cond {
    pthread_cond_t c;
    atomic_uint_fast64_t calls; /* broadcasts so far */
    atomic_uint_fast64_t mutex; /* the number of the one that its waiters hold; 0: there was none yet */
} fan_cond;

/* What a step does to a thing that threads share. COUNTS: adds to a number; two such steps commute, unless somebody
 * decides by it, ever (WEIGHS). */
typedef enum fan_touch { FAN_TOUCH_READS, FAN_TOUCH_WRITES, FAN_TOUCH_COUNTS, FAN_TOUCH_WEIGHS } fan_touch;

/* Such things, beside what a scheduler knows itself; each has a number: that of a mutex which stands for it, or 0.
 * LOCKED: what the mutex guards. OPTIONS, POOL: of the process. GRAPH: all nodes of passes backward. */
typedef enum fan_thing {
    FAN_THING_LOCKED,
    FAN_THING_BUDGET,
    FAN_THING_COUNTERS,
    FAN_THING_HOST_MEMORY,
    FAN_THING_OPTIONS,
    FAN_THING_POOL,
    FAN_THING_GRAPH
} fan_thing;

/* A scheduler's hooks; any may be NULL. `yield`: this thread may be set aside here (it holds no fan_mutex, or it is
 * about to take a second one). `wait`: called by fan_cond_wait instead of sleeping, with the mutex released, and by
 * fan_mutex_lock while another thread holds the mutex: returns true when the scheduler has let other threads act (the
 * caller tests its condition again), false to sleep as usual. `locked`/`unlocking`: the mutex is held. `begin`, `end`:
 * around a call (Calls and turns); false: the scheduler lets nobody begin anything any more. `idle`: the call said "not
 * yet": until another thread acts it says so again. `touch`: what the step does. `name`: a number for a mutex that this
 * thread makes, above all that are counted. `spawn`: a thread more, which a pool has (base/thread_pool.h): its number,
 * or -1; `enter` and `leave`: on it, around what it does, false: it is not to act; `refused`: whether it was so, or
 * will be. */
typedef struct fan_thread_hooks {
    void (*yield)(void *ctx);
    bool (*wait)(void *ctx, uint64_t mutex_id);
    void (*locked)(void *ctx, uint64_t mutex_id);
    void (*unlocking)(void *ctx, uint64_t mutex_id);
    void (*changed)(void *ctx, uint64_t mutex_id); /* a broadcast to those who wait with this mutex */
    bool (*begin)(void *ctx);
    void (*end)(void *ctx);
    void (*idle)(void *ctx);
    void (*touch)(void *ctx, fan_thing thing, uint64_t id, fan_touch how);
    uint64_t (*name)(void *ctx);
    int (*spawn)(void *ctx);
    bool (*enter)(void *ctx, int number);
    void (*leave)(void *ctx, int number);
    bool (*refused)(void *ctx, int number);
    void *ctx;
} fan_thread_hooks;

/* fan_thread_set_hooks: hooks of the calling thread; NULL for none. The struct must outlive its use. */
void fan_thread_set_hooks(const fan_thread_hooks *hooks);
const fan_thread_hooks *fan_thread_get_hooks(void);

/* fan_thread_id: a small number of the calling thread, never reused, >= 1. */
uint64_t fan_thread_id(void);

int fan_mutex_init(fan_mutex *m); /* 0, or -1 */
void fan_mutex_fini(fan_mutex *m);
/* fan_mutexes_numbered: from now on fan_mutex_renew does what it says; called before the first hooks of the process. */
void fan_mutexes_numbered(void);
void fan_mutex_renew(fan_mutex *m); /* a free mutex begins a second life, under another number */
void fan_mutex_lock(fan_mutex *m);
void fan_mutex_unlock(fan_mutex *m);
int fan_cond_init(fan_cond *c);
void fan_cond_fini(fan_cond *c);
/* fan_cond_wait: returns after a twentieth of a second at the latest, and may return early: test the condition in a
 * loop. */
void fan_cond_wait(fan_cond *c, fan_mutex *m);
void fan_cond_broadcast(
    fan_cond *c); /* call it with the mutex held: a waiter that asks its scheduler first could miss it otherwise */

/* fan_watched: whether any thread of the process has hooks now. */
extern atomic_uint fan_hooked __attribute__((visibility("hidden")));
static inline bool fan_watched(void)
{
    return __builtin_expect(atomic_load_explicit(&fan_hooked, memory_order_relaxed) != 0, 0);
}
/* fan_call_begin: a call of the frontend's face begins on this thread; false: it is not to do anything (and is not
 * ended). fan_call_acted: from here on its yields are its own. fan_call_idle: it says "not yet". Without hooks nothing
 * happens, nor inside the call, where another call may be made. */
bool fan_call_begin(void);
void fan_call_acted(void);
void fan_call_idle(void);
void fan_call_end(void);
/* fan_touch_thing: what the step does; nothing without hooks. */
void fan_touch_thing(fan_thing thing, uint64_t id, fan_touch how);

/* fan_thread_survived: whether a thread of before the last fork is the one that forked, or is of this process. */
bool fan_thread_survived(uint64_t thread);
/* fan_mutex_adopt: in a forked child, which has no thread that could hold it or wait: it is free from then on; whether
 * it was. fan_cond_adopt: nobody waits. */
bool fan_mutex_adopt(fan_mutex *m);
void fan_cond_adopt(fan_cond *c);

/* fan_yield: a point at which a scheduler may run another host thread. No fan_mutex may be held. */
void fan_yield(void);

#endif
