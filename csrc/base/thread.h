/* thread: mutexes and conditions whose every step can be watched and scheduled.
 *
 * Outside tests and the simulated device no hooks are set and a lock is a pthread mutex. Hooks let a scheduler run
 * host threads one at a time (it gets a yield before each lock, after each unlock and wherever fan_yield is called) and let
 * the happens-before checker see the order that a lock makes.
 */
#ifndef FAN_BASE_THREAD_H
#define FAN_BASE_THREAD_H

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
} fan_cond;

/* A scheduler's hooks; any may be NULL. `yield`: this thread may be set aside here (it holds no fan_mutex, or it is about to take
 * a second one). `wait`: called by fan_cond_wait instead of sleeping, with the mutex released, and by fan_mutex_lock while another thread
 * holds the mutex: returns true when the scheduler has let other threads act (the caller tests its condition again), false to sleep as
 * usual. `locked`/`unlocking`: the mutex is held. */
typedef struct fan_thread_hooks {
    void (*yield)(void *ctx);
    bool (*wait)(void *ctx, uint64_t mutex_id);
    void (*locked)(void *ctx, uint64_t mutex_id);
    void (*unlocking)(void *ctx, uint64_t mutex_id);
    void *ctx;
} fan_thread_hooks;

/* fan_thread_set_hooks: hooks of the calling thread; NULL for none. The struct must outlive its use. */
void fan_thread_set_hooks(const fan_thread_hooks *hooks);
const fan_thread_hooks *fan_thread_get_hooks(void);

/* fan_thread_id: a small number of the calling thread, never reused, >= 1. */
uint64_t fan_thread_id(void);

int fan_mutex_init(fan_mutex *m); /* 0, or -1 */
void fan_mutex_fini(fan_mutex *m);
void fan_mutex_renew(fan_mutex *m); /* a free mutex begins a second life, under another number */
void fan_mutex_lock(fan_mutex *m);
void fan_mutex_unlock(fan_mutex *m);
int fan_cond_init(fan_cond *c);
void fan_cond_fini(fan_cond *c);
/* fan_cond_wait: returns after a twentieth of a second at the latest, and may return early: test the condition in a loop. */
void fan_cond_wait(fan_cond *c, fan_mutex *m);
void fan_cond_broadcast(fan_cond *c); /* call it with the mutex held: a waiter that asks its scheduler first could miss it otherwise */

/* fan_yield: a point at which a scheduler may run another host thread. No fan_mutex may be held. */
void fan_yield(void);

#endif
