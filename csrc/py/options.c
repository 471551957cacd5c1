/* options: process-wide switches and counters. */
#include "py/backends.h"
#include "py/turn.h"

#include "array/sum_isa.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/workers.h"

#include <math.h>

static PyObject *get_options(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    size_t pool = fan_pool_get().limit;
    return Py_BuildValue("{s:N,s:N,s:N,s:s,s:i,s:N,s:N,s:N}", "debug", PyBool_FromLong(fan_get_debug()),
                         "warn_stream_mismatch", PyBool_FromLong(fan_get_warn_mismatch()), "budget",
                         fan_budget_wrap(fan_state_get()->budget), "isa", fan_sum_isa(), "threads",
                         fan_workers_chosen(), "pool_bytes", fan_budget_wrap(pool == SIZE_MAX ? UINT64_MAX : pool),
                         "capture_redirect", PyBool_FromLong(fan_get_capture_redirect()), "detect",
                         PyBool_FromLong(fan_state_get()->detect));
}

/* isa_arg: the name of an instruction set that this machine has. */
static const char *isa_arg(PyObject *o)
{
    char names[64] = "";
    const char *wish = PyUnicode_Check(o) ? fan_word_of(o) : NULL;
    if (!wish && PyErr_Occurred())
        return NULL;
    for (size_t i = 0; fan_sum_isa_at(i); i++) {
        if (wish && strcmp(fan_sum_isa_at(i), wish) == 0)
            return fan_sum_isa_at(i);
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s'%s'", i ? ", " : "", fan_sum_isa_at(i));
    }
    PyErr_Format(PyExc_ValueError, "isa=%R: this machine has %s", o, names);
    return NULL;
}

/* threads_arg: how many; 0, which Python's side does not let through, is the default. */
static int threads_arg(PyObject *o)
{
    long n = PyLong_CheckExact(o) ? PyLong_AsLong(o) : -1;
    if (n >= 0 && n <= FAN_WORKERS_MOST)
        return (int)n;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "threads=%R: expected a number of threads from 1 to %d", o, FAN_WORKERS_MOST);
    return -1;
}

/* set_pool: of the host's memory, and of each device's. */
static void set_pool(size_t most)
{
    fan_pool_set_limit(most);
    Py_BEGIN_ALLOW_THREADS
        fan_backends_keep(most);
    Py_END_ALLOW_THREADS
}

/* pool_arg: a number of bytes that may be held, math.inf for no bound. */
static int pool_arg(PyObject *o, size_t *out)
{
    double f = -1;
    if (PyBool_Check(o) || (!PyFloat_Check(o) && !PyIndex_Check(o)))
        return fan_refuse(PyExc_TypeError, "pool_bytes: expected a number of bytes, math.inf or None, got %R", o);
    if (PyFloat_Check(o)) {
        f = PyFloat_AS_DOUBLE(o);
    } else {
        PyObject *i = PyNumber_Index(o);
        int positive = i ? PyObject_RichCompareBool(i, fan_state_get()->zero, Py_GE) : -1;
        if (positive > 0) {
            *out = PyLong_AsSize_t(i);
            if (*out == (size_t)-1 && PyErr_Occurred())
                PyErr_Clear(); /* more than any machine has: no bound */
        }
        Py_XDECREF(i);
        if (positive != 0)
            return positive < 0 ? -1 : 0;
    }
    if (!(f >= 0) || (isfinite(f) && f != floor(f)))
        return fan_refuse(PyExc_ValueError,
                          "pool_bytes: expected a non-negative whole number of bytes, or math.inf, got %R", o);
    *out = f >= 0x1p63 ? SIZE_MAX : (size_t)f;
    return 0;
}

/* set_options: each argument None, or the new value; all are checked before any is set. The options of before. */
static PyObject *set_options(PyObject *module, PyObject *args)
{
    PyObject *debug, *warn, *budget, *isa, *threads, *pool, *redirect, *detect;
    const char *set = NULL;
    int count = 0;
    uint64_t bytes = 0;
    size_t most = 0;
    int on = 0, warns = 0, redirects = 0, detects = 0;
    if (!PyArg_ParseTuple(args, "OOOOOOOO:set_options", &debug, &warn, &budget, &isa, &threads, &pool, &redirect,
                          &detect))
        return NULL;
    on = debug == Py_None ? 0 : PyObject_IsTrue(debug);
    warns = warn == Py_None ? 0 : PyObject_IsTrue(warn);
    redirects = redirect == Py_None ? 0 : PyObject_IsTrue(redirect);
    detects = detect == Py_None ? 0 : PyObject_IsTrue(detect);
    if (on < 0 || warns < 0 || redirects < 0 || detects < 0 ||
        (budget != Py_None && fan_buffer_budget_arg(budget, &bytes) < 0) ||
        (pool != Py_None && pool_arg(pool, &most) < 0))
        return NULL;
    if ((isa != Py_None && !(set = isa_arg(isa))) || (threads != Py_None && (count = threads_arg(threads)) < 0))
        return NULL;
    PyObject *before = get_options(module, NULL);
    if (!before)
        return NULL;
    if (debug != Py_None) {
        fan_set_debug(on);
#ifndef FAN_TEST /* where it is always on */
        fan_pool_set_poison(on);
#endif
    }
    if (pool != Py_None)
        set_pool(most);
    if (warn != Py_None)
        fan_set_warn_mismatch(warns);
    if (redirect != Py_None)
        fan_set_capture_redirect(redirects);
    if (detect != Py_None)
        fan_state_get()->detect = detects;
    if (budget != Py_None)
        fan_state_get()->budget = bytes;
    if (set)
        (void)fan_sum_set_isa(set);
    if (threads != Py_None) {
        Py_BEGIN_ALLOW_THREADS
            fan_workers_set(count); /* waits for a sum under way */
        Py_END_ALLOW_THREADS
    }
    return before;
}

static PyObject *counters(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return fan_process_counters(); }

static PyObject *pool(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_pool_counts n = fan_pool_get();
    return Py_BuildValue("{s:n,s:n,s:K,s:K}", "pool_bytes", (Py_ssize_t)n.held, "pool_peak_bytes", (Py_ssize_t)n.peak,
                         "pool_hits", (unsigned long long)n.hits, "pool_misses", (unsigned long long)n.misses);
}

static PyObject *trim(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    size_t gone;
    if (fan_state_get())
        fan_buffer_freelist_free(fan_state_get());
    Py_BEGIN_ALLOW_THREADS
        gone = fan_pool_trim() + fan_backends_trim();
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(gone);
}

static PyObject *workers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLong(fan_workers_get());
}

static void seen_counters(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                          PyObject *Py_UNUSED(kwnames))
{
    fan_sched_access(FAN_THING_COUNTERS, 0, FAN_SCHED_DECIDE);
}

FAN_TURN_NONE(counters, seen_counters)
FAN_TURN_NONE(get_options, fan_seen_nothing)
FAN_TURN_TUPLE(set_options, fan_seen_options)
FAN_TURN_NONE(workers, fan_seen_nothing)
FAN_TURN_NONE(pool, fan_seen_nothing)
FAN_TURN_NONE(trim, fan_seen_nothing)

PyMethodDef fan_option_functions[] = {
    {"get_options", get_options_turn, METH_NOARGS, "get_options()\n--\n\nThe process's options, as a dict."},
    {"workers", workers_turn, METH_NOARGS, "workers()\n--\n\nHow many threads make a large sum together."},
    {"set_options", set_options_turn, METH_VARARGS,
     "set_options(debug, warn_stream_mismatch, budget, isa, threads, pool_bytes, capture_redirect, detect, "
     "/)\n--\n\nSet those "
     "that are not None; returns the options of before, as a dict."},
    {"counters", counters_turn, METH_NOARGS,
     "counters()\n--\n\n"
     "The work of all buffers of this process so far: a fanin.Counters."},
    {"pool", pool_turn, METH_NOARGS, "pool()\n--\n\nThe figures of the pool of memory, as a dict."},
    {"trim", trim_turn, METH_NOARGS,
     "trim()\n--\n\n"
     "Free the memory that is kept for large results, and on CUDA devices all unused memory; return the number\n"
     "of bytes.\n\n"
     "`set_options(pool_bytes=)` limits how much is kept. On a device it waits for destroyed streams, so no\n"
     "stream that fanin was never given may be captured meanwhile.\n\n"
     ">>> total = fanin.add_n([np.ones(1 << 18), np.ones(1 << 18)])\n"
     ">>> del total\n"
     ">>> fanin.trim() >= 2 ** 21\n"
     "True\n"
     ">>> fanin.trim()\n"
     "0"},
    {NULL, NULL, 0, NULL},
};
