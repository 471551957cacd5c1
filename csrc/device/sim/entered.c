/* The machines that a thread has entered, and the devices that it can name for that: those of the innermost one. */
#define _POSIX_C_SOURCE 200809L
#include "base/mem.h"
#include "device/sim/machine.h"

#include <pthread.h>

typedef struct entered_machine {
    struct entered_machine *outer;
    fan_sim *machine; /* held */
} entered_machine;

static pthread_key_t entered_key; /* the innermost entered_machine of a thread */

static bool entered_has_key;

static void entered_change(fan_sim *m, size_t by)
{
    fan__sim_lock(m);
    m->entered += by;
    atomic_store_explicit(&m->closed, m->entered == 0, memory_order_release);
    fan__sim_unlock(m);
}

static entered_machine *entered_free(entered_machine *e)
{
    entered_machine *outer = e->outer;
    entered_change(e->machine, SIZE_MAX);
    fan_sim_drop(e->machine);
    fan_free(e);
    return outer;
}

static void entered_thread_exit(void *innermost)
{
    for (entered_machine *e = innermost; e;)
        e = entered_free(e);
}

static void entered_make_key(void) { entered_has_key = pthread_key_create(&entered_key, entered_thread_exit) == 0; }

static entered_machine *entered_innermost(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, entered_make_key);
    return entered_has_key ? pthread_getspecific(entered_key) : NULL;
}

fan_status fan_sim_enter(fan_sim *m, fan_error *err)
{
    entered_machine *outer = entered_innermost(), *e = fan_calloc(sizeof *e);
    if (!e || !entered_has_key || pthread_setspecific(entered_key, e)) {
        fan_free(e);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory to enter a machine");
    }
    e->outer = outer;
    e->machine = fan_sim_hold(m);
    entered_change(m, 1);
    return FAN_OK;
}

void fan_sim_leave(const fan_sim *m)
{
    entered_machine *innermost = entered_innermost();
    for (entered_machine **at = &innermost; *at; at = &(*at)->outer)
        if ((*at)->machine == m) {
            entered_machine *left = *at;
            *at = left->outer;
            (void)pthread_setspecific(entered_key, innermost); /* before what the drop may call */
            (void)entered_free(left);
            return;
        }
}

fan_sim *fan_sim_entered(void)
{
    entered_machine *e = entered_innermost();
    return e ? e->machine : NULL;
}

static int entered_count(void)
{
    entered_machine *e = entered_innermost();
    return e ? e->machine->config.devices : 0;
}

static fan_status entered_find(long index, fan_device **out, fan_error *err)
{
    entered_machine *e = entered_innermost();
    int n = entered_count();
    *out = NULL;
    if (!e)
        return fan_fail(
            err, FAN_ERR_VALUE,
            "device \"sim:%ld\": no simulated machine is entered on this thread: with fanin.sim.Machine(): ..", index);
    if (index >= n)
        return fan_fail(err, FAN_ERR_VALUE,
                        "device \"sim:%ld\": this machine has %d device%s; use fanin.sim.Machine(devices=%ld)", index,
                        n, FAN_PLURAL(n), index + 1);
    *out = fan_device_hold(fan_sim_device(e->machine, (int)index));
    return FAN_OK;
}

const fan_backend_entry fan_sim_entry = {.backend = &fan_sim_backend, .count = entered_count, .find = entered_find};
