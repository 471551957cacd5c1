/* options: process-wide switches and counters, and what only tests ask for. */
#include "py/py.h"

#include "array/exact.h"
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
    return Py_BuildValue("(LLL)", (long long)n.live, (long long)n.total, (long long)n.failed);
}

/* exact_sum: in one go, or over states, `step` arrays at a time. */
static fan_status exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d, const fan_scale *scale, size_t step)
{
    if (step == 0) {
        fan_exact_sum(out, in, n, d, scale);
        return FAN_OK;
    }
    void *state = fan_alloc(fan_exact_state_size(d) * (size_t)out->size);
    if (!state)
        return FAN_NOMEM;
    fan_exact_start(state, d, out->size);
    for (size_t k = 0; k < n; k += step)
        fan_exact_add(state, d, in + k, n - k < step ? n - k : step);
    fan_exact_finish(out, state, d, scale);
    fan_free(state);
    return FAN_OK;
}

static PyObject *test_exact(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *target, *arrays, *fast = NULL, *result = NULL;
    Py_complex factor = {1, 0};
    Py_ssize_t step = 0, n, had = 0;
    int isa = -1, scaled = 0;
    fan_value out = {0}, *in = NULL;
    const fan_array **terms = NULL;
    fan_dtype d;
    fan_status status;
    if (!PyArg_ParseTuple(args, "OO|pDni:_test_exact", &target, &arrays, &scaled, &factor, &step, &isa) || fan_import_out(target, &out) < 0)
        return NULL;
    fast = PySequence_Tuple(arrays);
    n = fast ? PyTuple_GET_SIZE(fast) : 0;
    in = fan_calloc((size_t)(n + 1) * sizeof *in);
    terms = fan_calloc((size_t)(n + 1) * sizeof *terms);
    if (!fast || !in || !terms) {
        if (fast)
            PyErr_NoMemory();
        goto done;
    }
    d = FAN_NO_DTYPE;
    for (; had < n; had++) {
        if (fan_import(PyTuple_GET_ITEM(fast, had), false, false, &in[had]) < 0)
            goto done;
        terms[had] = in[had].array;
        if (!terms[had] || !fan_array_same_shape(terms[had], out.array)) {
            had++;
            PyErr_SetString(PyExc_ValueError, "_test_exact: expected dense arrays of one shape");
            goto done;
        }
        d = had ? fan_dtype_promote(d, terms[had]->dtype) : terms[had]->dtype;
    }
    if (n == 0 || d == FAN_NO_DTYPE || !fan_exact_fits(d) || fan_dtype_kind(d) != fan_dtype_kind(out.array->dtype)) {
        PyErr_SetString(PyExc_ValueError, "_test_exact: expected one array at least, and floats");
        goto done;
    }
    fan_exact_isa(isa);
    Py_BEGIN_ALLOW_THREADS
    status = exact_sum(out.array, terms, (size_t)n, d, &(fan_scale){.on = scaled, .re = factor.real, .im = factor.imag}, (size_t)step);
    Py_END_ALLOW_THREADS
    fan_exact_isa(-1);
    result = status == FAN_OK ? PyLong_FromLongLong((long long)fan_exact_slow()) : PyErr_NoMemory();
done:
    for (Py_ssize_t i = 0; i < had; i++)
        fan_value_drop(&fan_python, &in[i]);
    fan_free(in);
    fan_free(terms);
    Py_XDECREF(fast);
    fan_value_drop(&fan_python, &out);
    return result;
}

#ifdef FAN_TEST
static PyObject *test_exact_mutant(PyObject *Py_UNUSED(module), PyObject *o)
{
    long n = PyLong_AsLong(o);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    fan_exact_mutant = (int)n;
    Py_RETURN_NONE;
}

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
    {"_test_exact", test_exact, METH_VARARGS,
     "_test_exact(out, arrays, scaled=False, scale=1, step=0, isa=-1, /)\n--\n\nTests: the exact sum into out; step: over states, so many arrays at a time. "
     "Returns how many elements went the slow way so far."},
#ifdef FAN_TEST
    {"_test_exact_mutant", test_exact_mutant, METH_O, "_test_exact_mutant(n, /)\n--\n\nTests: switch a planted fault of exact sums on; 0: none."},
    {"_test_mutant", test_mutant, METH_O, "_test_mutant(n, /)\n--\n\nTests: switch a planted fault on; 0: none."},
#endif
    {NULL, NULL, 0, NULL},
};
