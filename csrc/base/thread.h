/* thread: mutexes and conditions whose every step a scheduler can observe and order.
 *
 * Outside tests and the simulated device no hooks are set and a lock is a pthread mutex. With
 * hooks, a scheduler runs host threads one at a time (it gets a yield before each lock, after each
 * unlock and at each fan_yield), and the happens-before checker observes the order that locks
 * create.
 *
 * Title: Calls and turns. Calls that take no lock must be observed too. If fan_sched_active() is
 * true (one load otherwise), the frontend opens each public call with fan_sched_enter, which is a
 * yield, and the code that accesses shared state reports it with fan_sched_access. The first yield
 * inside the call repeats that of its beginning and is skipped, unless the call has acted by then
 * (fan_sched_stepped). */
#ifndef FAN_BASE_THREAD_H
#define FAN_BASE_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* fork: handlers around fork(), in one list.
 *
 * A forked child inherits the locks of its parent, but not the threads that held them. fork()
 * therefore acquires the locks in the list first, and parent and child release them afterwards: the
 * data that they guard is consistent in both. A lock that is held across calls into other code is
 * not acquired: the child initializes it again and discards unfinished work.
 *
 *   before   `lock` of each, newest first: a holder of a newer lock may acquire an older one
 *   parent   `unlock` of each, oldest first
 *   child    `unlock`, then `child` of each, oldest first */
/* The handlers of one file; any may be NULL. The struct must live as long as the process. */
typedef struct fan_fork {
    void (*lock)(void);
    void (*unlock)(void);
    void (*child)(void);
    bool added; /* owned by the list, as is `newer` */
    struct fan_fork *newer, *older;
} fan_fork;

/* fan_fork_add: adds f to the list; further calls have no effect. Returns 0, or -1 when out of
 * memory. */
int fan_fork_add(fan_fork *f);

/* fan_fork_generation: returns the number of forks that led to this process, so that objects made
 * before the last fork can be recognized. */
extern atomic_uint fan_forks __attribute__((visibility("hidden")));
static inline unsigned fan_fork_generation(void)
{
    return atomic_load_explicit(&fan_forks, memory_order_relaxed);
}

typedef struct fan_mutex {
    pthread_mutex_t m;
    uint64_t id; /* unique, for hooks; never reused */
} fan_mutex;

typedef struct fan_cond {
    pthread_cond_t c;
    atomic_uint_fast64_t calls; /* broadcasts so far */
    atomic_uint_fast64_t mutex; /* the number of the mutex that its waiters hold; 0: none yet */
} fan_cond;

/* How a step accesses shared state. COUNT: adds to a number; two such steps commute, unless some
 * step decides by that number (DECIDE). */
typedef enum fan_sched_mode {
    FAN_SCHED_READ,
    FAN_SCHED_WRITE,
    FAN_SCHED_COUNT,
    FAN_SCHED_DECIDE
} fan_sched_mode;

/* Shared state that the scheduler does not track itself; each has a number: that of the mutex that
 * represents it, or 0. LOCKED: the data that the mutex guards. OPTIONS, POOL: of the process.
 * GRAPH: all nodes and backward passes. */
typedef enum fan_thing {
    FAN_THING_LOCKED,
    FAN_THING_BUDGET,
    FAN_THING_COUNTERS,
    FAN_THING_HOST_MEMORY,
    FAN_THING_OPTIONS,
    FAN_THING_POOL,
    FAN_THING_GRAPH
} fan_thing;

/* A scheduler's hooks; any may be NULL.
 *
 *   yield     this thread may be suspended here (it holds no fan_mutex, or is about to lock a
 *             second one)
 *   wait      called by fan_cond_wait instead of sleeping, with the mutex released, and by
 *             fan_mutex_lock while another thread holds the mutex: true if the scheduler ran other
 *             threads (the caller tests its condition again), false to sleep as usual
 *   await     like wait, but what the caller checked before is no access of its step: it checks a
 *             number that only grows, so that an earlier check could only have failed
 *   reached   that number was reached: the threads that counted, with FAN_SCHED_COUNT, did so
 *             before
 *   locked, unlocking   the mutex is held
 *   begin, end   around a call (Calls and turns); begin returns false if the scheduler starts no
 *                more calls
 *   not_ready the call returned "not yet", and does so again until another thread acts
 *   access    an access of the current step
 *   name      returns a number for a new mutex of this thread, higher than all counted ones
 *   spawn     adds a thread of a pool (base/workers.h): returns its number, or -1
 *   enter, leave   on that thread, around its work; enter returns false if it must not act
 *   refused   whether enter returned false, or will */
typedef struct fan_thread_hooks {
    void (*yield)(void *ctx);
    bool (*wait)(void *ctx, uint64_t mutex_id);
    void (*await)(void *ctx, uint64_t mutex_id);
    void (*reached)(void *ctx, uint64_t mutex_id);
    void (*locked)(void *ctx, uint64_t mutex_id);
    void (*unlocking)(void *ctx, uint64_t mutex_id);
    /* a broadcast to the threads that wait with this mutex */
    void (*changed)(void *ctx, uint64_t mutex_id);
    bool (*begin)(void *ctx);
    void (*end)(void *ctx);
    void (*not_ready)(void *ctx);
    void (*access)(void *ctx, fan_thing thing, uint64_t id, fan_sched_mode mode);
    uint64_t (*name)(void *ctx);
    int (*spawn)(void *ctx);
    bool (*enter)(void *ctx, int number);
    void (*leave)(void *ctx, int number);
    bool (*refused)(void *ctx, int number);
    void *ctx;
} fan_thread_hooks;

/* fan_thread_set_hooks: sets the hooks of the calling thread; NULL for none. The struct must
 * outlive its use. */
void fan_thread_set_hooks(const fan_thread_hooks *hooks);
const fan_thread_hooks *fan_thread_get_hooks(void);
/* fan_thread_set_stuck: a thread with hooks waits and will never act: calls of other threads need
 * no turns for it; false: it acts again. */
void fan_thread_set_stuck(bool stuck);

/* fan_thread_id: returns a small number >= 1 of the calling thread, never reused. */
uint64_t fan_thread_id(void);

int fan_mutex_init(fan_mutex *m); /* 0, or -1 */
void fan_mutex_fini(fan_mutex *m);
/* fan_mutexes_numbered: enables fan_mutex_renew; called before the first hooks of the process are
 * set. */
void fan_mutexes_numbered(void);
void fan_mutex_renew(fan_mutex *m); /* gives a free mutex a new number, as if it were made anew */
void fan_mutex_lock(fan_mutex *m);
void fan_mutex_unlock(fan_mutex *m);
int fan_cond_init(fan_cond *c);
void fan_cond_fini(fan_cond *c);
/* fan_cond_wait: returns after 50 ms at the latest, and possibly early: test the condition in a
 * loop. */
void fan_cond_wait(fan_cond *c, fan_mutex *m);
/* fan_cond_broadcast: hold the mutex: a waiter that is calling its scheduler could miss the
 * broadcast otherwise */
void fan_cond_broadcast(fan_cond *c);

/* fan_sched_active: returns whether any thread of the process has hooks and is not stuck. */
extern atomic_uint fan_sched_threads __attribute__((visibility("hidden")));
static inline bool fan_sched_active(void)
{
    return __builtin_expect(atomic_load_explicit(&fan_sched_threads, memory_order_relaxed) != 0, 0);
}
/* The next four have no effect without hooks, nor inside another call. */
/* fan_sched_enter: opens a call of the public interface on this thread; false: the call must not
 * act (and is not ended). */
bool fan_sched_enter(void);
/* fan_sched_stepped: later yields of the call are its own. */
void fan_sched_stepped(void);
/* fan_sched_not_ready: the call returns "not yet". */
void fan_sched_not_ready(void);
/* fan_sched_leave: ends the call. */
void fan_sched_leave(void);
/* fan_sched_access: reports an access of the current step; no effect without hooks. */
void fan_sched_access(fan_thing thing, uint64_t id, fan_sched_mode mode);

/* fan_thread_survived: returns false for a thread of before the last fork that did not call fork
 * itself. */
bool fan_thread_survived(uint64_t thread);
/* fan_mutex_adopt: in a forked child: frees the mutex, whose holder no longer exists; returns
 * whether it was free. */
bool fan_mutex_adopt(fan_mutex *m);
/* fan_cond_adopt: in a forked child: drops all waiters. */
void fan_cond_adopt(fan_cond *c);

/* fan_yield: a point at which a scheduler may run another host thread. Hold no fan_mutex. */
void fan_yield(void);

#endif
