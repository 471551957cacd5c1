/* options: process-wide switches and counters, and what only tests ask for. */
#include "py/py.h"

#include "base/mem.h"

static PyObject *budget_of(uint64_t n)
{
    return n == UINT64_MAX ? PyFloat_FromDouble(Py_HUGE_VAL) : PyLong_FromUnsignedLongLong(n);
}

static PyObject *get_options(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("{s:N,s:N,s:N}", "debug", PyBool_FromLong(fan_get_debug()), "warn_stream_mismatch",
                         PyBool_FromLong(fan_get_warn_mismatch()), "budget", budget_of(fan_state_get()->budget));
}

/* set_options: each argument None, or the new value; all are checked before any is set. */
static PyObject *set_options(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *debug, *warn, *budget;
    uint64_t bytes = 0;
    int on = 0, warns = 0;
    if (!PyArg_ParseTuple(args, "OOO:set_options", &debug, &warn, &budget))
        return NULL;
    on = debug == Py_None ? 0 : PyObject_IsTrue(debug);
    warns = warn == Py_None ? 0 : PyObject_IsTrue(warn);
    if (on < 0 || warns < 0 || (budget != Py_None && fan_budget_arg(budget, &bytes) < 0))
        return NULL;
    if (debug != Py_None)
        fan_set_debug(on);
    if (warn != Py_None)
        fan_set_warn_mismatch(warns);
    if (budget != Py_None)
        fan_state_get()->budget = bytes;
    Py_RETURN_NONE;
}

static PyObject *counters(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_counters n;
    fan_counters_total(&n);
    return fan_counters_wrap(&n);
}

static PyObject *test_fail_at(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long skip, count = 1;
    if (!PyArg_ParseTuple(args, "L|L:_test_fail_at", &skip, &count))
        return NULL;
    fan_mem_fail_at(skip, count);
    Py_RETURN_NONE;
}

static PyObject *test_memory(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_mem_counts n = fan_mem_get();
    n.live -= (int64_t)fan_state_get()->nspares; /* kept for the next buffers: no leak */
    return Py_BuildValue("(LLL)", (long long)n.live, (long long)n.total, (long long)n.failed);
}

#ifdef FAN_TEST
static PyObject *test_mutant(PyObject *Py_UNUSED(module), PyObject *o)
{
    long n = PyLong_AsLong(o);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    fan_mutant = (int)n;
    Py_RETURN_NONE;
}
#endif

PyMethodDef fan_option_functions[] = {
    {"get_options", get_options, METH_NOARGS, "get_options()\n--\n\nThe process's options, as a dict."},
    {"set_options", set_options, METH_VARARGS, "set_options(debug, warn_stream_mismatch, budget, /)\n--\n\nSet those that are not None."},
    {"counters", counters, METH_NOARGS,
     "counters()\n--\n\nWhat all buffers of this process have done so far: a fanin.Counters.\n\n"
     ">>> before = fanin.counters().adds\n"
     ">>> _ = fanin.add_n([1.0, 2.0])\n"
     ">>> fanin.counters().adds - before\n"
     "2\n"},
    {"_test_fail_at", test_fail_at, METH_VARARGS,
     "_test_fail_at(skip, count=1, /)\n--\n\nTests: let `skip` allocations pass and fail the `count` after them (-1: all); skip -1: off."},
    {"_test_memory", test_memory, METH_NOARGS, "_test_memory()\n--\n\nTests: blocks alive, allocations ever, allocations refused."},
#ifdef FAN_TEST
    {"_test_mutant", test_mutant, METH_O, "_test_mutant(n, /)\n--\n\nTests: switch a planted fault on; 0: none."},
#endif
    {NULL, NULL, 0, NULL},
};
