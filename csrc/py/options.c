/* options: process-wide switches and counters, and what only tests ask for. */
#include "py/py.h"

#include "array/convert.h"
#include "array/sum.h"
#include "array/sum_loops.h"
#include "base/mem.h"
#include "base/team.h"

static PyObject *budget_of(uint64_t n)
{
    return n == UINT64_MAX ? PyFloat_FromDouble(Py_HUGE_VAL) : PyLong_FromUnsignedLongLong(n);
}

static PyObject *get_options(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("{s:N,s:N,s:N,s:s,s:i}", "debug", PyBool_FromLong(fan_get_debug()), "warn_stream_mismatch",
                         PyBool_FromLong(fan_get_warn_mismatch()), "budget", budget_of(fan_state_get()->budget), "isa", fan_sum_isa(),
                         "threads", fan_team_chosen());
}

/* isa_arg: the name of an instruction set that this machine has. */
static const char *isa_arg(PyObject *o)
{
    char names[64] = "";
    const char *wish = PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : NULL;
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
    if (n >= 0 && n <= FAN_TEAM_MOST)
        return (int)n;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "threads=%R: expected a number of threads from 1 to %d", o, FAN_TEAM_MOST);
    return -1;
}

/* set_options: each argument None, or the new value; all are checked before any is set. */
static PyObject *set_options(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *debug, *warn, *budget, *isa, *threads;
    const char *set = NULL;
    int team = 0;
    uint64_t bytes = 0;
    int on = 0, warns = 0;
    if (!PyArg_ParseTuple(args, "OOOOO:set_options", &debug, &warn, &budget, &isa, &threads))
        return NULL;
    on = debug == Py_None ? 0 : PyObject_IsTrue(debug);
    warns = warn == Py_None ? 0 : PyObject_IsTrue(warn);
    if (on < 0 || warns < 0 || (budget != Py_None && fan_budget_arg(budget, &bytes) < 0))
        return NULL;
    if ((isa != Py_None && !(set = isa_arg(isa))) || (threads != Py_None && (team = threads_arg(threads)) < 0))
        return NULL;
    if (debug != Py_None)
        fan_set_debug(on);
    if (warn != Py_None)
        fan_set_warn_mismatch(warns);
    if (budget != Py_None)
        fan_state_get()->budget = bytes;
    if (set)
        (void)fan_sum_set_isa(set);
    if (threads != Py_None) {
        Py_BEGIN_ALLOW_THREADS
        fan_team_set(team); /* waits for a sum under way */
        Py_END_ALLOW_THREADS
    }
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
    return Py_BuildValue("(LLL)", (long long)n.live, (long long)n.total, (long long)n.failed);
}

/* test_read: every byte once, and nothing else: the floor under any sum. */
static PyObject *test_read(PyObject *Py_UNUSED(module), PyObject *o)
{
    Py_buffer view;
    uint64_t all;
    if (PyObject_GetBuffer(o, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    all = fan_sum_read(view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(all);
}

/* test_sum: fan_sum of gap-free buffers of one dtype, as it stands: (statistics or None). */
static PyObject *test_sum(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { MOST = 64 };
    PyObject *into, *sources, *answer = NULL;
    const char *name;
    int with_stats, parallel = 1;
    FAN_UNCLEARED Py_buffer view[MOST + 1];
    Py_ssize_t n, held = 0;
    FAN_UNCLEARED fan_array array[MOST + 1];
    FAN_UNCLEARED fan_operand in[MOST];
    fan_stats stats;
    if (!PyArg_ParseTuple(args, "OO!sp|p:_test_sum", &into, &PyTuple_Type, &sources, &name, &with_stats, &parallel))
        return NULL;
    fan_dtype d = fan_dtype_from_name(name);
    n = PyTuple_GET_SIZE(sources);
    if (d == FAN_NO_DTYPE || n < 1 || n > MOST) {
        PyErr_SetString(PyExc_ValueError, "expected a dtype and 1 to 64 sources");
        return NULL;
    }
    for (; held <= n; held++) {
        Py_ssize_t k = held; /* the last is the result */
        if (PyObject_GetBuffer(k < n ? PyTuple_GET_ITEM(sources, k) : into, &view[k], k < n ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
            goto done;
        fan_array *a = &array[k];
        memset(a, 0, sizeof *a);
        a->data = view[k].buf;
        a->dtype = d;
        a->ndim = 1;
        a->shape = a->dims;
        a->strides = a->dims + 1;
        a->size = a->dims[0] = (int64_t)view[k].len / (int64_t)fan_dtype_size(d);
        a->dims[1] = (int64_t)fan_dtype_size(d);
        if (k < n)
            in[k] = (fan_operand){.array = a, .acc = fan_dtype_accumulate(d)};
        if (a->size != array[0].size) {
            held++;
            PyErr_SetString(PyExc_ValueError, "expected buffers of one size");
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    fan_sum(&array[n], in, (size_t)n, &(fan_sum_how){.stats = with_stats ? &stats : NULL, .parallel = parallel});
    Py_END_ALLOW_THREADS
    if (!with_stats)
        answer = Py_NewRef(Py_None);
    else
        answer = Py_BuildValue("{s:K,s:d,s:d,s:K,s:N}", "count", (unsigned long long)stats.count, "sumsq", stats.sumsq, "absmax", stats.absmax,
                               "nonfinite", (unsigned long long)stats.nonfinite, "bad",
                               stats.bad == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(stats.bad));
done:
    while (held--)
        PyBuffer_Release(&view[held]);
    return answer;
}

static PyObject *test_team(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("(ii)", fan_team_get(), fan_team_alive());
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
    {"set_options", set_options, METH_VARARGS, "set_options(debug, warn_stream_mismatch, budget, isa, threads, /)\n--\n\nSet those that are not None."},
    {"counters", counters, METH_NOARGS,
     "counters()\n--\n\nWhat all buffers of this process have done so far: a fanin.Counters.\n\n"
     ">>> before = fanin.counters().adds\n"
     ">>> _ = fanin.add_n([1.0, 2.0])\n"
     ">>> fanin.counters().adds - before\n"
     "2\n"},
    {"_test_fail_at", test_fail_at, METH_VARARGS,
     "_test_fail_at(skip, count=1, /)\n--\n\nTests: let `skip` allocations pass and fail the `count` after them (-1: all); skip -1: off."},
    {"_test_memory", test_memory, METH_NOARGS, "_test_memory()\n--\n\nTests: blocks alive, allocations ever, allocations refused."},
    {"_test_read", test_read, METH_O, "_test_read(buffer, /)\n--\n\nBenchmarks: read every byte once."},
    {"_test_sum", test_sum, METH_VARARGS,
     "_test_sum(out, sources, dtype, stats, parallel=True, /)\n--\n\nTests: one fold of gap-free buffers; its statistics if they are asked for."},
    {"_test_team", test_team, METH_NOARGS, "_test_team()\n--\n\nTests: threads that work together, helpers that are alive."},
#ifdef FAN_TEST
    {"_test_mutant", test_mutant, METH_O, "_test_mutant(n, /)\n--\n\nTests: switch a planted fault on; 0: none."},
#endif
    {NULL, NULL, 0, NULL},
};
