/* event_count: numbers that only grow, for which threads wait (Reed and Kanodia, 1979): fanin.dist
 * waits by these alone.
 *
 * A search of schedules (base/thread.h) has one order of an advance and a wait, because they
 * commute: a wait is no step before its number is reached, and later advances do not change what it
 * returns. A read of the number does not commute with an advance, nor does a wait that ends without
 * its number. */
#include "py/base/args.h"

#include "base/thread.h"
#include "base/trace.h"

#include <math.h>

typedef struct count_object {
    PyObject_HEAD fan_mutex lock;
    fan_cond changed;
    _Atomic(uint64_t) value;
    atomic_bool over; /* no wait blocks */
} count_object;

static PyObject *count_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":EventCount", names))
        return NULL;
    count_object *self = (count_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (fan_mutex_init(&self->lock) < 0 || fan_cond_init(&self->changed) < 0) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void count_fini(count_object *self)
{
    fan_cond_fini(&self->changed);
    fan_mutex_fini(&self->lock);
}

FAN_DEALLOC(count_dealloc, count_fini((count_object *)o))

/* count_change: adds to the number, or sets `over`, and wakes the threads that wait. */
static PyObject *count_change(count_object *self, uint64_t by, bool over)
{
    const fan_thread_hooks *hooks = fan_thread_get_hooks();
    fan_yield();
    fan_sched_access(FAN_THING_LOCKED, self->lock.id, FAN_SCHED_COUNT);
    /* held for a moment, by no thread that waits for its turn */
    (void)pthread_mutex_lock(&self->lock.m);
    atomic_fetch_add(&self->value, by);
    if (over)
        atomic_store(&self->over, true);
    (void)pthread_cond_broadcast(&self->changed.c);
    (void)pthread_mutex_unlock(&self->lock.m);
    if (hooks && hooks->changed)
        hooks->changed(hooks->ctx, self->lock.id);
    fan_yield();
    Py_RETURN_NONE;
}

static PyObject *count_advance(PyObject *o, PyObject *Py_UNUSED(none))
{
    return count_change((count_object *)o, 1, false);
}

static PyObject *count_end(PyObject *o, PyObject *Py_UNUSED(none))
{
    return count_change((count_object *)o, 0, true);
}

static bool count_reached(const count_object *self, uint64_t n)
{
    return atomic_load(&self->value) >= n || atomic_load(&self->over);
}

/* count_wait_scheduled: on a thread of a scheduler, for which no time passes. -1 with an exception
 * if it ends the run. */
static int count_wait_scheduled(const count_object *self, uint64_t n, const fan_thread_hooks *hooks)
{
    if (count_reached(self, n))
        fan_yield();
    while (!count_reached(self, n)) {
        hooks->await(hooks->ctx, self->lock.id);
        if (!count_reached(self, n) && fan_sched_enter_or_raise() < 0)
            return -1;
    }
    if (atomic_load(&self->value) >= n)
        hooks->reached(hooks->ctx, self->lock.id);
    else
        fan_sched_access(FAN_THING_LOCKED, self->lock.id, FAN_SCHED_DECIDE);
    return 0;
}

/* count_wait_until: until the number is reached, or a time in nanoseconds. -1 with the exception of
 * a signal. */
static int count_wait_until(count_object *self, uint64_t n, uint64_t until)
{
    while (!count_reached(self, n) && fan_trace_ns() < until) {
        Py_BEGIN_ALLOW_THREADS
            fan_mutex_lock(&self->lock);
            if (!count_reached(self, n) && fan_trace_ns() < until)
                fan_cond_wait(&self->changed, &self->lock); /* for 50 ms at most */
            fan_mutex_unlock(&self->lock);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0)
            return -1;
    }
    return 0;
}

static PyObject *count_wait(PyObject *o, PyObject *const *a)
{
    count_object *self = (count_object *)o;
    const fan_thread_hooks *hooks = fan_thread_get_hooks();
    uint64_t until = UINT64_MAX;
    int64_t given;
    int ended;
    if (fan_index(a[0], "wait: n", PyExc_ValueError, &given) < 0)
        return NULL;
    if (a[1] && a[1] != Py_None) {
        double seconds = PyFloat_AsDouble(a[1]);
        if (seconds == -1 && PyErr_Occurred())
            return NULL;
        if (seconds < 1e9)
            until = fan_trace_ns() + (uint64_t)(fmax(seconds, 0) * 1e9);
    }
    uint64_t n = (uint64_t)given;
    if (hooks && hooks->await)
        ended = count_wait_scheduled(self, n, hooks);
    else
        ended = count_wait_until(self, n, until);
    if (ended < 0)
        return NULL;
    return PyBool_FromLong(atomic_load(&self->value) >= n);
}

static PyObject *count_get_value(PyObject *o, void *Py_UNUSED(closure))
{
    const count_object *self = (const count_object *)o;
    fan_yield();
    fan_sched_access(FAN_THING_LOCKED, self->lock.id, FAN_SCHED_DECIDE);
    return PyLong_FromUnsignedLongLong(atomic_load(&self->value));
}

#include "py/declared/EventCount.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)count_doc}, {Py_tp_new, count_make},      {Py_tp_dealloc, count_dealloc},
    {Py_tp_methods, count_methods}, {Py_tp_getset, count_getset}, {0, NULL},
};

PyType_Spec fan_event_count_spec = {
    .name = "fanin._core.EventCount",
    .basicsize = sizeof(count_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
