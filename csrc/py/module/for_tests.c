/* for_tests: functions of a development build for tests/kit/hooks.py. A release has none of them. */
#include "py/buffer/buffer_object.h"
#include "device/cuda/driver.h"
#include "py/arrays/dlpack.h"
#include "py/sim/machine_object.h"
#include "py/base/turn.h"

#ifdef FAN_TEST

#include "base/mem.h"
#include "base/workers.h"

static PyObject *test_auto_budget(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long alone = 0, held = 0;
    if (!PyArg_ParseTuple(args, "|KK:_test_auto_budget", &alone, &held))
        return NULL;
    fan_budget_auto_set(PyTuple_GET_SIZE(args) ? &(fan_auto_budget){.alone = alone, .held = held} : NULL);
    fan_auto_budget now = fan_budget_auto();
    return Py_BuildValue("(KK)", (unsigned long long)now.alone, (unsigned long long)now.held);
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
    const fan_state *st = fan_state_get();
    for (unsigned i = 0; i < st->nfreelist; i++) /* kept for the next buffers: no leak */
        n.live -= (int64_t)fan_buffer_blocks(fan_buffer_of(st->freelist[i]));
    return Py_BuildValue("(LLL)", (long long)n.live, (long long)n.total, (long long)n.failed);
}

static PyObject *test_tensor_throws(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(fan_tensor_throws());
}

static PyObject *test_helpers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLong(fan_workers_alive());
}

static PyObject *test_fault(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *text = name == Py_None ? "NONE" : PyUnicode_AsUTF8(name);
    if (!text)
        return NULL;
    fan_fault_id id = fan_fault_named(text);
    if (id == FAN_FAULT_NONE && name != Py_None)
        return PyErr_Format(PyExc_ValueError, "no fault is called %R: base/fault.h has the list", name);
    fan_fault_plant(id);
    Py_RETURN_NONE;
}

static PyObject *test_sort_bounds(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long entries, rows;
    if (!PyArg_ParseTuple(args, "LL:_test_sort_bounds", &entries, &rows))
        return NULL;
    fan_cuda *c;
    fan_error err = {0};
    fan_status status = fan_driver_open(&c, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    fan_cuda_bound_sorts(c, entries, rows);
    Py_BEGIN_ALLOW_THREADS
        fan_cuda_drop(c);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The simulated machine. */

static bool is_machine(PyObject *o)
{
    PyTypeObject *type = fan_state_get()->machine_type; /* NULL: a core without fanin.sim */
    return type && PyObject_TypeCheck(o, type);
}

static fan_sim *machine_arg(PyObject *o)
{
    if (is_machine(o))
        return fan_machine_self(o)->m;
    PyErr_Format(PyExc_TypeError, "expected a machine, not %.80s", Py_TYPE(o)->tp_name);
    return NULL;
}

static PyObject *test_unsound(PyObject *Py_UNUSED(module), PyObject *machine)
{
    fan_sim *m = machine_arg(machine);
    return m ? PyLong_FromUnsignedLongLong(fan_sim_unsound(m)) : NULL;
}

static PyObject *test_unsafe(PyObject *Py_UNUSED(module), PyObject *machine)
{
    fan_error err = {0};
    fan_sim *m = machine_arg(machine);
    return m ? fan_sim_done(fan_sim_unsafe(m, "an unsafe call", false, &err), &err) : NULL;
}

static PyObject *test_fail_call(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *machine;
    long long index;
    int memory = 0;
    fan_sim *m;
    if (!PyArg_ParseTuple(args, "OL|p:_test_fail_call", &machine, &index, &memory) || !(m = machine_arg(machine)))
        return NULL;
    fan_sim_fail_at(m, index, memory ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE);
    Py_RETURN_NONE;
}

static PyObject *test_capture_state(PyObject *Py_UNUSED(module), PyObject *where)
{
    fan_stream *s = NULL;
    if (fan_stream_arg(where, &s) < 0)
        return NULL;
    fan_sim *m = s ? fan_sim_of(s->device) : NULL;
    PyObject *state = m ? PyLong_FromLong(fan_sim_capture_state(m, s, NULL, NULL)) : NULL;
    if (!m)
        PyErr_SetString(PyExc_ValueError, "expected a stream of a simulated machine");
    fan_stream_drop(s);
    return state;
}

static PyObject *test_pass_end(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *where, *streams, *given, *result = NULL;
    fan_stream *caller = NULL, **on = NULL;
    fan_value *values = NULL;
    size_t n = 0, nvalues = 0, want, want_values;
    fan_error err = {0};
    fan_status status;
    if (!PyArg_ParseTuple(args, "OOO:_test_pass_end", &where, &streams, &given))
        return NULL;
    streams = PySequence_Tuple(streams);
    given = streams ? PySequence_Tuple(given) : NULL;
    if (!given || fan_stream_arg(where, &caller) < 0)
        goto done;
    want = (size_t)PyTuple_GET_SIZE(streams);
    want_values = (size_t)PyTuple_GET_SIZE(given);
    on = fan_calloc((want + 1) * sizeof *on);
    values = fan_calloc((want_values + 1) * sizeof *values);
    if (!on || !values) {
        PyErr_NoMemory();
        goto done;
    }
    for (; n < want; n++)
        if (fan_stream_arg(PyTuple_GET_ITEM(streams, (Py_ssize_t)n), &on[n]) < 0)
            goto done;
    for (; nvalues < want_values; nvalues++)
        if (fan_import(PyTuple_GET_ITEM(given, (Py_ssize_t)nvalues), false, true, &values[nvalues]) < 0)
            goto done;
    for (size_t i = 0; i < n; i++)
        if (!on[i] || !caller) {
            PyErr_SetString(PyExc_TypeError, "expected streams, got None");
            goto done;
        }
    Py_BEGIN_ALLOW_THREADS
        status = caller ? fan_pass_end(caller, on, n, values, nvalues, &err) : FAN_OK;
    Py_END_ALLOW_THREADS
    result = status == FAN_OK ? Py_NewRef(Py_None) : fan_raise_sim(status, &err);
done:
    while (n-- > 0)
        fan_stream_drop(on[n]);
    while (nvalues-- > 0)
        fan_value_release(&values[nvalues]);
    fan_free(on);
    fan_free(values);
    fan_stream_drop(caller);
    Py_XDECREF(given);
    Py_XDECREF(streams);
    return result;
}

static void seen_machine(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t Py_UNUSED(nargs),
                         PyObject *Py_UNUSED(kwnames))
{
    if (is_machine(*args))
        fan_sim_read_all(fan_machine_self(*args)->m);
}

FAN_TURN_ONE(test_unsound, seen_machine)
FAN_TURN_ONE(test_unsafe, fan_seen_nothing)
FAN_TURN_ONE(test_capture_state, fan_seen_nothing)
FAN_TURN_TUPLE(test_pass_end, fan_seen_nothing)

PyMethodDef fan_test_functions[] = {
    {"_test_auto_budget", test_auto_budget, METH_VARARGS,
     "_test_auto_budget(alone, held, /)\n--\n\nOther limits than those of budget=\"auto\", of buffers made from now "
     "on, "
     "without arguments: those again. Gives them."},
    {"_test_fail_at", test_fail_at, METH_VARARGS,
     "_test_fail_at(skip, count=1, /)\n--\n\nLet `skip` allocations pass and fail the `count` after them (-1: all); "
     "skip -1: off."},
    {"_test_memory", test_memory, METH_NOARGS,
     "_test_memory()\n--\n\nBlocks alive, allocations ever, allocations refused."},
    {"_test_tensor_throws", test_tensor_throws, METH_NOARGS,
     "_test_tensor_throws()\n--\n\nTensors for which the exchange table threw."},
    {"_test_helpers", test_helpers, METH_NOARGS,
     "_test_helpers()\n--\n\n"
     "The number of helper threads for large sums."},
    {"_test_fault", test_fault, METH_O,
     "_test_fault(name, /)\n--\n\nPlant the fault of that name (base/fault.h); None: none."},
    {"_test_sort_bounds", test_sort_bounds, METH_VARARGS,
     "_test_sort_bounds(entries, rows, /)\n--\n\nAt most so many entries of COO data are sorted at a time by the "
     "driver in use, of so many rows."},
    {"_test_unsound", test_unsound_turn, METH_O,
     "_test_unsound(machine, /)\n--\n\nWaits left out whose order did not hold: must be 0."},
    {"_test_unsafe", test_unsafe_turn, METH_O,
     "_test_unsafe(machine, /)\n--\n\nA call that CUDA forbids beside a capture."},
    {"_test_fail_call", test_fail_call, METH_VARARGS,
     "_test_fail_call(machine, index, memory=False, /)\n--\n\nThe backend's call number `index` from now fails, once; "
     "below 0: none does."},
    {"_test_capture_state", test_capture_state_turn, METH_O,
     "_test_capture_state(stream, /)\n--\n\n0: not captured, 1: captured, 2: the capture is broken."},
    {"_test_pass_end", test_pass_end_turn, METH_VARARGS,
     "_test_pass_end(caller, streams, values, /)\n--\n\nThe end of a pass (S20): `caller` waits for each of `streams`, "
     "and `values` are used on it."},
    {NULL, NULL, 0, NULL},
};

#endif
