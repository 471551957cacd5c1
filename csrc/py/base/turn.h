/* turn: calls of the face as turns of a simulated machine's threads (base/thread.h, Calls and turns).
 *
 * On a thread that Machine.spawn started, the beginning of a call is a step of its own, and `seen` records
 * what it accesses of what threads share, as far as no lock and no device records that. Elsewhere it costs one load.
 * FAN_TURN_..(call, seen) makes call_turn of a method `call`, by the shape of its arguments.
 */
#ifndef FAN_PY_TURN_H
#define FAN_PY_TURN_H

#include "py/base/args.h"


/* fan_seen_nothing: the call records its accesses itself. fan_seen_options, fan_seen_graph: what it may change. */
static inline void fan_seen_nothing(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    (void)o, (void)args, (void)nargs, (void)kwnames;
}

static inline void fan_seen_options(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    (void)o, (void)args, (void)nargs, (void)kwnames;
    fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_WRITE);
}

static inline void fan_seen_graph(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    (void)o, (void)args, (void)nargs, (void)kwnames;
    fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
}

/* Two functions, so that the usual way saves no registers for the other. */
#define FAN_TURN(declared, passed, seen_args, call, seen)                    \
    __attribute__((noinline, cold)) static PyObject *call##_watched declared \
    {                                                                        \
        if (fan_sched_enter_or_raise() < 0)                                  \
            return NULL;                                                     \
        seen seen_args;                                                      \
        PyObject *fan_result = call passed;                                  \
        fan_sched_leave();                                                   \
        return fan_result;                                                   \
    }                                                                        \
    static PyObject *call##_turn declared { return fan_sched_active() ? call##_watched passed : call passed; }

#define FAN_TURN_FAST(call, seen)                                                                                   \
    FAN_TURN((PyObject * o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames), (o, args, nargs, kwnames), \
             (o, args, nargs, kwnames), call, seen)
#define FAN_TURN_ONE(call, seen) \
    FAN_TURN((PyObject * o, PyObject * arg), (o, arg), (o, &arg, arg != NULL, NULL), call, seen)
#define FAN_TURN_NONE(call, seen) FAN_TURN((PyObject * o, PyObject * none), (o, none), (o, NULL, 0, NULL), call, seen)
#define FAN_TURN_TUPLE(call, seen)                       \
    FAN_TURN((PyObject * o, PyObject * args), (o, args), \
             (o, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), NULL), call, seen)
#define FAN_TURN_NAMED(call, seen)                                                  \
    FAN_TURN((PyObject * o, PyObject * args, PyObject * kwargs), (o, args, kwargs), \
             (o, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), NULL), call, seen)
#define FAN_TURN_GET(call, seen) FAN_TURN((PyObject * o, void *closure), (o, closure), (o, NULL, 0, NULL), call, seen)
#define FAN_TURN_REPR(call, seen) FAN_TURN((PyObject * o), (o), (o, NULL, 0, NULL), call, seen)

#endif
