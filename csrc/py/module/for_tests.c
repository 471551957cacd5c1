/* for_tests: functions of a development build for tests/kit/hooks.py. A release has none of
 * them. */
#include "py/buffer/buffer_object.h"
#include "device/cuda/cuda.h"
#include "py/arrays/dlpack.h"
#include "py/sim/machine_object.h"
#include "py/base/args.h"

#ifdef FAN_TEST

#include "base/mem.h"
#include "base/workers.h"

static PyObject *test_auto_budget(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t alone = 0, held = 0;
    if (fan_number_arg(a[0], "alone", &alone) < 0 || fan_number_arg(a[1], "held", &held) < 0)
        return NULL;
    fan_budget_auto_set(a[0] ? &(fan_auto_budget){.alone = (uint64_t)alone, .held = (uint64_t)held}
                             : NULL);
    fan_auto_budget now = fan_budget_auto();
    return Py_BuildValue("(KK)", (unsigned long long)now.alone, (unsigned long long)now.held);
}

static PyObject *test_fail_at(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t skip = 0, count = 1;
    if (fan_number_arg(a[0], "skip", &skip) < 0 || fan_number_arg(a[1], "count", &count) < 0)
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
        return PyErr_Format(PyExc_ValueError, "no fault is called %R: base/fault.h has the list",
                            name);
    fan_fault_plant(id);
    Py_RETURN_NONE;
}

static PyObject *test_sort_bounds(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t entries = 0, rows = 0;
    if (fan_number_arg(a[0], "entries", &entries) < 0 || fan_number_arg(a[1], "rows", &rows) < 0)
        return NULL;
    fan_cuda *c;
    if (FAN_CHECK(fan_driver_open(&c, &err)) < 0)
        return NULL;
    fan_cuda_bound_sorts(c, entries, rows);
    Py_BEGIN_ALLOW_THREADS
        fan_cuda_drop(c);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The simulated machine. */

static fan_sim *machine_arg(PyObject *o)
{
    PyTypeObject *type = fan_state_get()->machine_type; /* NULL: a core without fanin.sim */
    if (type && PyObject_TypeCheck(o, type))
        return fan_machine_self(o)->m;
    PyErr_Format(PyExc_TypeError, "expected a machine, not %.80s", Py_TYPE(o)->tp_name);
    return NULL;
}

static PyObject *test_unsound(PyObject *Py_UNUSED(module), PyObject *machine)
{
    fan_sim *m = machine_arg(machine);
    if (!m)
        return NULL;
    fan_sim_read_all(m);
    return PyLong_FromUnsignedLongLong(fan_sim_unsound(m));
}

static PyObject *test_unsafe(PyObject *Py_UNUSED(module), PyObject *machine)
{
    fan_error err = {0};
    fan_sim *m = machine_arg(machine);
    return m ? fan_done(fan_sim_unsafe(m, "an unsafe call", false, &err), &err) : NULL;
}

static PyObject *test_fail_call(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t index = 0;
    fan_sim *m = machine_arg(a[0]);
    if (!m || fan_number_arg(a[1], "index", &index) < 0)
        return NULL;
    fan_sim_fail_at(m, index, a[2] == Py_True ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE);
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

static PyObject *test_pass_end(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *streams = PySequence_Tuple(a[1]), *given = streams ? PySequence_Tuple(a[2]) : NULL,
             *result = NULL;
    fan_stream *caller = NULL, **on = NULL;
    fan_value *values = NULL;
    size_t n = 0, nvalues = 0, want, want_values;
    fan_error err = {0};
    fan_status status;
    if (!given || fan_stream_arg(a[0], &caller) < 0)
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
        if (fan_import(PyTuple_GET_ITEM(given, (Py_ssize_t)nvalues), false, true,
                       &values[nvalues]) < 0)
            goto done;
    for (size_t i = 0; i < n; i++)
        if (!on[i] || !caller) {
            PyErr_SetString(PyExc_TypeError, "expected streams, got None");
            goto done;
        }
    Py_BEGIN_ALLOW_THREADS
        status = caller ? fan_pass_end(caller, on, n, values, nvalues, &err) : FAN_OK;
    Py_END_ALLOW_THREADS
    result = status == FAN_OK ? Py_NewRef(Py_None) : fan_raise(status, &err);
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

#include "py/declared/for_tests.h"

#endif
