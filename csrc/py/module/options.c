/* options: process-wide switches and counters. set_options checks all of its arguments before it
 * sets any.
 *
 * In order: the options as a dict; arguments of set_options; set_options; counters and memory. */
#include "py/device/backends.h"
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"

#include "array/sum_isa.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/workers.h"

static PyObject *get_options(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    uint64_t pool = fan_pool_get().limit;
    if (pool == SIZE_MAX)
        pool = UINT64_MAX;
    return Py_BuildValue("{s:N,s:N,s:N,s:s,s:i,s:N,s:N,s:N}", "debug",
                         PyBool_FromLong(fan_get_debug()), "warn_stream_mismatch",
                         PyBool_FromLong(fan_get_warn_mismatch()), "budget",
                         fan_budget_wrap(fan_state_get()->budget), "isa", fan_sum_isa(), "threads",
                         fan_workers_chosen(), "pool_bytes", fan_budget_wrap(pool),
                         "capture_redirect", PyBool_FromLong(fan_get_capture_redirect()), "detect",
                         PyBool_FromLong(fan_state_get()->detect));
}

/* isa_arg: the name of an instruction set that this machine has. */
static const char *isa_arg(PyObject *o)
{
    char names[64] = "";
    const char *wish = "";
    if (PyUnicode_Check(o))
        wish = fan_word_of(o);
    if (!wish)
        return NULL;
    for (size_t i = 0; fan_sum_isa_at(i); i++) {
        if (strcmp(fan_sum_isa_at(i), wish) == 0)
            return fan_sum_isa_at(i);
        fan_append(names, sizeof names, ", '%s'", fan_sum_isa_at(i));
    }
    PyErr_Format(PyExc_ValueError, "isa=%R: this machine has %s", o, names + strlen(", "));
    return NULL;
}

/* threads_arg: a number of threads; 0, which Python's side refuses, is the default. */
static int threads_arg(PyObject *o)
{
    long n = -1;
    if (PyLong_CheckExact(o))
        n = PyLong_AsLong(o);
    if (n >= 0 && n <= FAN_WORKERS_MOST)
        return (int)n;
    PyErr_Clear();
    return fan_set_error(PyExc_ValueError, "threads=%R: expected a number of threads from 1 to %d",
                         o, FAN_WORKERS_MOST);
}

/* set_options: each argument is None, or the new value. Returns the options that it replaces. */
static PyObject *set_options(PyObject *module, PyObject *const *a)
{
    PyObject *debug = a[0];
    PyObject *warn = a[1];
    PyObject *budget = a[2];
    PyObject *isa = a[3];
    PyObject *threads = a[4];
    PyObject *pool = a[5];
    PyObject *redirect = a[6];
    PyObject *detect = a[7];
    const char *set = NULL;
    int count = 0;
    uint64_t bytes = 0;
    uint64_t most = 0;
    fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_WRITE);
    if (budget != Py_None && fan_buffer_budget_arg(budget, &bytes) < 0)
        return NULL;
    if (pool != Py_None && fan_budget_arg(pool, "pool_bytes", &most) < 0)
        return NULL;
    if (isa != Py_None)
        set = isa_arg(isa);
    if (isa != Py_None && !set)
        return NULL;
    if (threads != Py_None)
        count = threads_arg(threads);
    if (count < 0)
        return NULL;
    PyObject *before = get_options(module, NULL);
    if (!before)
        return NULL;

    if (debug != Py_None) {
        fan_set_debug(debug == Py_True);
#ifndef FAN_TEST /* where it is always on */
        fan_pool_set_poison(debug == Py_True);
#endif
    }
    if (pool != Py_None) {
        fan_pool_set_limit((size_t)most);
        Py_BEGIN_ALLOW_THREADS
            fan_backends_keep((size_t)most);
        Py_END_ALLOW_THREADS
    }
    if (warn != Py_None)
        fan_set_warn_mismatch(warn == Py_True);
    if (redirect != Py_None)
        fan_set_capture_redirect(redirect == Py_True);
    if (detect != Py_None)
        fan_state_get()->detect = detect == Py_True;
    if (budget != Py_None)
        fan_state_get()->budget = bytes;
    if (set)
        (void)fan_sum_set_isa(set);
    if (threads != Py_None) {
        Py_BEGIN_ALLOW_THREADS
            fan_workers_set(count); /* waits for a running sum */
        Py_END_ALLOW_THREADS
    }
    return before;
}

static PyObject *counters(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_sched_access(FAN_THING_COUNTERS, 0, FAN_SCHED_DECIDE);
    return fan_process_counters();
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

#include "py/declared/options.h"
